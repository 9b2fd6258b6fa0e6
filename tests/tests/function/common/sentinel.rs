//! Memory that nobody may write.

use nvme_mpt_tests::memory::{DmaBuffer, GuestMemory};

/// Byte of sentinels.
const BYTE: u8 = 0xA5;

/// Pages of a guest's that must stay as they are.
pub(crate) struct Sentinel(DmaBuffer);

impl Sentinel {
    /// New pages.
    pub(crate) fn new(memory: &GuestMemory, len: usize) -> Self {
        Self::over(memory.alloc(len).unwrap())
    }

    /// Pages that were used before.
    pub(crate) fn over(pages: DmaBuffer) -> Self {
        pages.fill(BYTE);
        Self(pages)
    }

    /// Returns their address.
    pub(crate) fn gpa(&self) -> u64 {
        self.0.gpa()
    }

    /// Nobody wrote them.
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
