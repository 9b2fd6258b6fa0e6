//! Data from which Identify commands build their data structures.

use nvme_guest::{ControllerLimits, LeasedNamespace, host::TemperatureThresholds};
use nvme_spec::feature::AsyncEventConfiguration;
use zerocopy::IntoBytes;

/// Namespace and limits that Identify commands describe.
#[derive(Clone, Copy, Debug)]
pub(super) struct IdentifySubject<'a> {
    pub(super) namespace: &'a LeasedNamespace,
    /// Present size of the namespace in logical blocks.
    pub(super) blocks: u64,
    /// Bytes of the namespace that are in use, if the command set counts them.
    pub(super) used_bytes: u64,
    pub(super) limits: &'a ControllerLimits,
    /// Set if Doorbell Buffer Config is offered.
    pub(super) has_doorbell_buffer: bool,
    /// Set if the namespace is active. It is inactive while its command set is disabled, after the lease was revoked, and after
    /// the drive failed or was removed.
    pub(super) is_active: bool,
    pub(super) thresholds: TemperatureThresholds,
    /// Size, in blocks, of the units whose boundaries a command should not cross; `None` if there are no such units.
    pub(super) unit_blocks: Option<u64>,
}

impl IdentifySubject<'_> {
    /// Returns the asynchronous event notices that the namespace's command set offers, as bits.
    pub(super) fn notices(&self) -> AsyncEventConfiguration {
        notices(self.namespace)
    }

    /// Converts bytes into logical blocks of the namespace.
    pub(super) fn bytes_to_blocks(&self, bytes: u64) -> u64 {
        bytes >> self.namespace.lba_shift
    }
}

/// Returns the asynchronous event notices that a namespace's command set offers, as bits.
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
