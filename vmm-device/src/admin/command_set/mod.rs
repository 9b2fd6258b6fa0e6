//! I/O command sets, as Identify and the log pages describe them. A namespace has one of them, and another one is a
//! file beside this.

mod key_value;
mod nvm;
mod zoned;

use nvme_mpt::{
    LeasedNamespace, Limits,
    host::{ChangedZones, NamespaceFormat},
    spec::{
        identify::{Csi, IoCommandSetVector},
        log::LogPageId,
        status::Status,
    },
};

use super::subject::Subject;

/// An I/O command that is executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct IoCommand {
    pub(super) opcode: u8,
    /// True if it changes the content of the namespace.
    pub(super) changes_content: bool,
}

/// A namespace's command set.
pub(super) trait CommandSet {
    /// Its identifier.
    fn csi(&self) -> Csi;

    /// Returns whether a host that knows the NVM Command Set alone can use it (Base 2.0, section 3.1.3.5, `CC.CSS`).
    fn is_basic(&self) -> bool {
        false
    }

    /// Enters it in a combination of command sets (Base 2.0, section 5.17.2.21).
    fn combine(&self, vector: IoCommandSetVector) -> IoCommandSetVector;

    /// Returns the logical blocks of so many that can be written; `None` if it has no logical blocks.
    fn capacity(&self, blocks: u64) -> Option<u64>;

    /// I/O Command Set specific Identify Namespace (CNS 05h), as command set `csi` has it.
    ///
    /// # Errors
    /// The status of a command set that the namespace does not have.
    fn namespace(&self, csi: Csi, subject: &Subject<'_>) -> Result<Vec<u8>, Status>;

    /// I/O Command Set specific Identify Controller (CNS 06h).
    fn controller(&self, subject: &Subject<'_>) -> Vec<u8>;

    /// I/O commands that are executed.
    fn commands(&self, limits: &Limits) -> Vec<IoCommand>;

    /// The log page that it brings along.
    fn log_page(&self) -> Option<LogPageId> {
        None
    }

    /// Returns whether it has notices of zones that change.
    fn has_zone_notices(&self) -> bool {
        false
    }
}

/// Returns the command set of a namespace.
pub(super) fn of(namespace: &LeasedNamespace) -> &dyn CommandSet {
    match &namespace.format {
        NamespaceFormat::Blocks => &nvm::Nvm,
        NamespaceFormat::Zones(zones) => zones,
        NamespaceFormat::Keys(keys) => keys,
    }
}

/// Identify Controller of the NVM Command Set, which is there for what others have in common.
pub(super) fn nvm_controller(subject: &Subject<'_>) -> Vec<u8> {
    nvm::Nvm.controller(subject)
}

/// Returns the NVM Command Set, if a namespace of `set` executes its commands: all but one have logical blocks.
pub(super) fn nvm_beside(set: &dyn CommandSet) -> Option<&'static dyn CommandSet> {
    set.capacity(0).map(|_| &nvm::Nvm as &dyn CommandSet)
}

/// Changed Zone List (ZNS 1.1, section 4.1.4.1).
pub(super) fn changed_zone_list(changed: &ChangedZones) -> Vec<u8> {
    zoned::changed_zone_list(changed)
}
