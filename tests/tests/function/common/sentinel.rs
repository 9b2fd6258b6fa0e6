//! Guest memory that must stay unchanged.

use nvme_mpt_tests::memory::{DmaBuffer, GuestMemory};

/// Fill byte.
const BYTE: u8 = 0xA5;

/// Pages of the guest that must stay unchanged.
pub(crate) struct Sentinel(DmaBuffer);

impl Sentinel {
    /// Allocates and fills pages.
    pub(crate) fn new(memory: &GuestMemory, len: usize) -> Self {
        Self::from_pages(memory.alloc(len).unwrap())
    }

    /// Fills pages that were in use.
    pub(crate) fn from_pages(pages: DmaBuffer) -> Self {
        pages.fill(BYTE);
        Self(pages)
    }

    /// Returns the guest physical address.
    pub(crate) fn gpa(&self) -> u64 {
        self.0.gpa()
    }

    /// Checks that the pages are unchanged.
    #[track_caller]
    pub(crate) fn check(&self) {
        let bytes = self.0.to_vec(0, self.0.len());
        if let Some(at) = bytes.iter().position(|&byte| byte != BYTE) {
            panic!(
                "{:#x} was written, with {:02x?}…",
                self.0.gpa() + at as u64,
                &bytes[at..bytes.len().min(at + 16)]
            );
        }
    }
}
