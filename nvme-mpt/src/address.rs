//! Addresses: of a guest's memory as the guest names it, and of the same memory as a host
//! controller names it.

use core::fmt;
use serde::{Deserialize, Serialize};

pub use nvme_mpt_memory::PAGE_SIZE;

/// A guest physical address: what a guest writes into PRPs, SGLs and queue base registers.
/// Over vfio-user it is the address that the client mapped, whatever that is on its side.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[repr(transparent)]
pub struct Gpa(pub u64);

impl Gpa {
    /// The address `bytes` further on, unless there is none.
    #[must_use]
    pub const fn checked_add(self, bytes: u64) -> Option<Self> {
        match self.0.checked_add(bytes) {
            Some(gpa) => Some(Self(gpa)),
            None => None,
        }
    }

    /// Offset in its memory page.
    #[must_use]
    pub const fn page_offset(self) -> u64 {
        self.0 % PAGE_SIZE
    }

    /// Returns whether it is the start of a memory page.
    #[must_use]
    pub const fn is_page_aligned(self) -> bool {
        self.page_offset() == 0
    }
}

impl fmt::Display for Gpa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// Returns a limit of bytes as a power of two of memory pages, rounded down; 0 below two pages.
#[must_use]
pub const fn log2_pages(bytes: u64) -> u8 {
    match (bytes / PAGE_SIZE).checked_ilog2() {
        Some(power) => power as u8,
        None => 0,
    }
}

/// An address in a host controller's IOVA space. Only translation makes one from a guest's word.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct Iova(pub(crate) u64);

impl Iova {
    /// The number that goes into a PRP entry or an SGL descriptor for the host controller.
    #[must_use]
    pub const fn bits(self) -> u64 {
        self.0
    }
}

impl fmt::Display for Iova {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}
