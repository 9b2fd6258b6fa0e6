//! Access of the driver to the controller's registers.

use std::os::fd::BorrowedFd;
use std::sync::atomic::AtomicU32;

use crate::mapping;
use crate::memory::{MemoryError, SharedSlice};

/// BAR0 of the controller under test.
///
/// Accesses cannot fail, as on a bus: if the device was removed or its transport has failed, reads return all ones and
/// writes are lost. If CSTS reads all ones, the driver reports [`crate::Error::Gone`].
pub trait Bar: Send + Sync {
    /// Reads 4 bytes at a multiple of 4.
    fn read32(&self, offset: u64) -> u32;

    /// Reads 8 bytes at a multiple of 8.
    fn read64(&self, offset: u64) -> u64;

    /// Writes 4 bytes at a multiple of 4.
    fn write32(&self, offset: u64, value: u32);

    /// Writes 8 bytes at a multiple of 8.
    fn write64(&self, offset: u64, value: u64);

    /// Returns the parts of the BAR that are mapped into the guest. Doorbell writes there are plain stores that do not trap.
    fn doorbell_windows(&self) -> &[DoorbellWindow] {
        &[]
    }
}

/// A mapped part of the BAR.
#[derive(Clone, Debug)]
pub struct DoorbellWindow {
    offset: u64,
    registers: SharedSlice<AtomicU32>,
}

impl DoorbellWindow {
    /// Maps `len` bytes at `fd_offset` of a file as the part of the BAR at `offset`.
    ///
    /// # Errors
    /// The file cannot be mapped.
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

    /// Returns the register at `offset` of the BAR as a slice of one element, if this window contains it.
    pub fn register(&self, offset: u64) -> Option<SharedSlice<AtomicU32>> {
        let index = usize::try_from(offset.checked_sub(self.offset)? / 4).ok()?;
        (index < self.registers.len()).then(|| self.registers.slice(index, 1))
    }
}
