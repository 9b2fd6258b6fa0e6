//! Data from which Identify commands build their data structures.

use nvme_guest::{ControllerLimits, LeasedNamespace, host::TemperatureThresholds};
use nvme_spec::feature::AsyncEventConfiguration;
use zerocopy::IntoBytes;

/// Namespace and limits that an Identify command describes to the guest.
#[derive(Clone, Copy, Debug)]
pub(super) struct IdentifySubject<'a> {
    pub(super) namespace: &'a LeasedNamespace,
    /// Present size of the namespace in logical blocks.
    pub(super) blocks: u64,
    /// Number of bytes of the namespace that are in use, if the command set counts them; otherwise 0.
    pub(super) used_bytes: u64,
    pub(super) limits: &'a ControllerLimits,
    /// True if the controller offers Doorbell Buffer Config.
    pub(super) has_doorbell_buffer: bool,
    /// True if the namespace is active. It is inactive while its command set is disabled, after the lease was revoked, and
    /// after the drive failed or was removed.
    pub(super) is_active: bool,
    pub(super) thresholds: TemperatureThresholds,
    /// Number of blocks of an allocation unit of a lease that was requested by size; `None` for a lease of a range. A command
    /// that crosses the boundary of a unit may be executed in parts.
    pub(super) unit_blocks: Option<u64>,
}

impl IdentifySubject<'_> {
    /// Returns the notices of asynchronous events that the namespace's command set offers, as bits of OAES.
    pub(super) fn notices(&self) -> AsyncEventConfiguration {
        notices(self.namespace)
    }

    /// Converts bytes into logical blocks of the namespace.
    pub(super) fn bytes_to_blocks(&self, bytes: u64) -> u64 {
        bytes >> self.namespace.lba_shift
    }
}

/// Returns the notices of asynchronous events that a namespace's command set offers, as bits of OAES.
pub(super) fn notices(namespace: &LeasedNamespace) -> AsyncEventConfiguration {
    let list = &namespace.command_sets.native().change_list;
    list.as_ref()
        .map_or_else(Default::default, |list| list.notice)
}

pub(super) fn structure_bytes(structure: impl IntoBytes + zerocopy::Immutable) -> Vec<u8> {
    structure.as_bytes().to_vec()
}

pub(super) fn saturating_u32(value: u64) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}
