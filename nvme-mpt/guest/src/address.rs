//! Addresses of guest memory: guest physical addresses, and IOVAs for the host controller.

use core::fmt;
use serde::{Deserialize, Serialize};

pub use nvme_mpt_memory::PAGE_SIZE;

/// A guest physical address, as the guest writes it into PRPs, SGLs and queue base registers. Over vfio-user: the DMA
/// address that the client mapped.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[repr(transparent)]
pub struct Gpa(pub u64);

impl Gpa {
    /// Returns the address plus `bytes`; `None` on overflow.
    #[must_use]
    #[inline]
    pub const fn checked_add(self, bytes: u64) -> Option<Self> {
        match self.0.checked_add(bytes) {
            Some(gpa) => Some(Self(gpa)),
            None => None,
        }
    }

    /// Returns the offset within the memory page.
    #[must_use]
    #[inline]
    pub const fn page_offset(self) -> u64 {
        self.0 % PAGE_SIZE
    }

    /// Returns whether the address is the start of a memory page.
    #[must_use]
    #[inline]
    pub const fn is_page_aligned(self) -> bool {
        self.page_offset() == 0
    }
}

impl fmt::Display for Gpa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// Returns a limit in bytes as a power of two of memory pages, rounded down. Returns 0 for limits below two pages.
#[must_use]
pub const fn log2_pages(bytes: u64) -> u8 {
    match (bytes / PAGE_SIZE).checked_ilog2() {
        Some(power) => power as u8,
        None => 0,
    }
}

/// An address in a host controller's IOVA space. Only address translation creates one from a guest's address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct Iova(pub(crate) u64);

impl Iova {
    /// Returns the value for a PRP entry or SGL descriptor of the host controller.
    #[must_use]
    #[inline]
    pub const fn bits(self) -> u64 {
        self.0
    }
}

impl fmt::Display for Iova {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}
