//! Access of the driver to the controller's registers.

use std::os::fd::BorrowedFd;
use std::sync::atomic::AtomicU32;

use crate::mapping;
use crate::memory::{MemoryError, SharedSlice};

/// BAR0 of the controller under test.
///
/// Accesses are infallible, as on a bus: where nothing answers, reads give all ones and writes go
/// nowhere. An implementation whose transport failed does the same, and the driver reports
/// [`crate::Error::Gone`] when CSTS reads all ones.
pub trait Bar: Send + Sync {
    /// Reads 4 bytes at a multiple of 4.
    fn read32(&self, offset: u64) -> u32;

    /// Reads 8 bytes at a multiple of 8.
    fn read64(&self, offset: u64) -> u64;

    /// Writes 4 bytes at a multiple of 4.
    fn write32(&self, offset: u64, value: u32);

    /// Writes 8 bytes at a multiple of 8.
    fn write64(&self, offset: u64, value: u64);

    /// The parts of the BAR that are mapped into the guest, so that a doorbell write there is a plain
    /// store that is not trapped.
    fn doorbell_windows(&self) -> &[DoorbellWindow] {
        &[]
    }
}

/// A part of the BAR that is memory.
#[derive(Clone, Debug)]
pub struct DoorbellWindow {
    offset: u64,
    registers: SharedSlice<AtomicU32>,
}

impl DoorbellWindow {
    /// Maps `len` bytes at `fd_offset` of a file as the part of the BAR at `offset`.
    ///
    /// # Errors
    /// When the file cannot be mapped.
    pub fn map(
        offset: u64,
        fd: BorrowedFd<'_>,
        fd_offset: u64,
        len: usize,
    ) -> Result<Self, MemoryError> {
        Ok(Self {
            offset,
            registers: mapping::map_registers(fd, fd_offset, len)?,
        })
    }

    /// The register at `offset` of the BAR, as a slice of one, where this window holds it.
    pub fn register(&self, offset: u64) -> Option<SharedSlice<AtomicU32>> {
        let index = usize::try_from(offset.checked_sub(self.offset)? / 4).ok()?;
        (index < self.registers.len()).then(|| self.registers.slice(index, 1))
    }
}
