//! Subject of Identify commands, and forms in which data structures have its facts.

use nvme_mpt::{LeasedNamespace, Limits, host::TemperatureThresholds};
use zerocopy::IntoBytes;

/// Subject of an Identify command.
#[derive(Clone, Copy, Debug)]
pub(super) struct Subject<'a> {
    pub(super) namespace: &'a LeasedNamespace,
    /// Logical blocks that the namespace has now.
    pub(super) blocks: u64,
    /// Bytes of it that are in use, of a namespace of keys and values.
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
    /// A number of bytes in logical blocks of the namespace.
    pub(super) fn in_blocks(&self, bytes: u64) -> u64 {
        bytes >> self.namespace.lba_shift
    }
}

/// A limit as a power of two of memory pages. Limits are no smaller than a page.
pub(super) fn in_pages(limit: u64) -> u8 {
    let pages = limit / nvme_mpt::address::PAGE_SIZE;
    pages.checked_ilog2().map_or(0, |power| power as u8)
}

pub(super) fn bytes(structure: impl IntoBytes + zerocopy::Immutable) -> Vec<u8> {
    structure.as_bytes().to_vec()
}

pub(super) fn saturating_u32(value: u64) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}
