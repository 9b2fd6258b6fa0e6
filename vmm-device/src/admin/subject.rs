//! Subject of Identify commands, and forms in which data structures have its facts.

use nvme_mpt::{
    LeasedNamespace, Limits, host::TemperatureThresholds, spec::feature::AsyncEventConfiguration,
};
use zerocopy::IntoBytes;

/// Subject of an Identify command.
#[derive(Clone, Copy, Debug)]
pub(super) struct Subject<'a> {
    pub(super) namespace: &'a LeasedNamespace,
    /// Logical blocks that the namespace has now.
    pub(super) blocks: u64,
    /// Bytes of it that are in use, if its command set counts them.
    pub(super) used: u64,
    pub(super) limits: &'a Limits,
    /// True if Doorbell Buffer Config is offered.
    pub(super) doorbell_buffer: bool,
    /// True if the namespace is active: a drive that is gone leaves a controller without one.
    pub(super) active: bool,
    pub(super) thresholds: TemperatureThresholds,
    /// Blocks of a unit, if commands should not cross the boundaries of units.
    pub(super) unit_blocks: Option<u64>,
}

impl Subject<'_> {
    /// Returns the notices of the namespace's own command set.
    pub(super) fn notices(&self) -> AsyncEventConfiguration {
        notices(self.namespace)
    }

    /// A number of bytes in logical blocks of the namespace.
    pub(super) fn in_blocks(&self, bytes: u64) -> u64 {
        bytes >> self.namespace.lba_shift
    }
}

/// Returns the notices of a namespace's own command set.
pub(super) fn notices(namespace: &LeasedNamespace) -> AsyncEventConfiguration {
    let list = &namespace.command_sets.own().change_list;
    list.as_ref()
        .map_or_else(Default::default, |list| list.notice)
}

pub(super) fn bytes(structure: impl IntoBytes + zerocopy::Immutable) -> Vec<u8> {
    structure.as_bytes().to_vec()
}

pub(super) fn saturating_u32(value: u64) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}
