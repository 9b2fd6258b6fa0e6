//! Namespaces of a host controller.

use nvme_spec::ids::Nsid;

/// A namespace of a host controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostNamespace {
    /// Namespace identifier at the host controller.
    pub nsid: Nsid,
    /// Size in logical blocks.
    pub blocks: u64,
    /// Logical block size in bytes, as the exponent of a power of two.
    pub lba_shift: u8,
}
