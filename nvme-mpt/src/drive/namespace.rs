//! A namespace of a host controller, as it is leased.

use crate::spec::ids::Nsid;

/// A namespace of a host controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostNamespace {
    /// Its identifier at the host controller.
    pub nsid: Nsid,
    /// Its size, in logical blocks.
    pub blocks: u64,
    /// Logical block size as a power of two, in bytes.
    pub lba_shift: u8,
}
