//! Memory of a back end's VM.

use std::time::Duration;

use nvme_mpt_memory::Mapping;
use nvme_mpt_memory::deadline::DRAIN_DEADLINE;
use nvme_mpt_memory::userfaultfd::MemoryHolder;

use crate::address::Gpa;
use crate::dma::{
    AnonymousRegion, DetachedGuestMemory, DirtyRange, DmaError, MemoryRegion, VmmMapping,
};

/// Memory of a function's VM, which commands may access.
///
/// An implementation by messages carries these parts in another form:
///
/// | here | in a message |
/// |---|---|
/// | [`MemoryRegion::fd`] | the descriptor |
/// | [`Self::map_in_place`], [`Self::set_memory_holder`], [`Self::check_memory`] | nothing of the VMM's mapping; the function's process itself checks whether its memory is complete |
/// | [`Self::map_detached`] | the descriptors, from which the other process maps the memory |
pub trait MemoryBackend {
    /// Maps a region of the VM's memory. Commands that arrive after the call may use the region.
    ///
    /// # Errors
    /// All of [`DmaError`] except those of unmapping and of the dirty log.
    fn map(&self, memory: MemoryRegion) -> Result<(), DmaError>;

    /// Maps a region that was mapped under the old server, for a function that continues. The function's limits and shares
    /// do not apply.
    ///
    /// # Errors
    /// As [`Self::map`].
    fn map_persisted(&self, memory: MemoryRegion) -> Result<(), DmaError> {
        self.map(memory)
    }

    /// Maps a region that was mapped under the old server, as claimed by the VMM. If the IOMMU still maps the region, the
    /// function's limits and shares do not apply.
    ///
    /// # Errors
    /// As [`Self::map`].
    fn map_claimed(&self, memory: MemoryRegion) -> Result<(), DmaError> {
        self.map(memory)
    }

    /// Maps a region through the mapping of a VMM in this process. A back end in another process maps the file instead.
    ///
    /// # Errors
    /// As [`Self::map`]. A back end in another process returns [`DmaError::Incomplete`] for incomplete memory.
    fn map_in_place(&self, memory: MemoryRegion, own: VmmMapping) -> Result<(), DmaError>;

    /// Maps memory without a file through the mapping of a VMM in this process. A back end in another process cannot do this.
    ///
    /// # Errors
    /// As [`Self::map`]; [`DmaError::NoFile`] from a back end in another process.
    fn map_anonymous(&self, memory: AnonymousRegion, _own: Mapping) -> Result<(), DmaError> {
        let AnonymousRegion { gpa, len, .. } = memory;
        Err(DmaError::NoFile { gpa, len })
    }

    /// Sets the process that provides the memory and may resolve page faults in it.
    fn set_memory_holder(&self, _holder: MemoryHolder) {}

    /// Checks that the mapped memory has no missing page that the process which provides the memory would fill on a page fault.
    ///
    /// # Errors
    /// [`DmaError::Incomplete`], [`DmaError::UnknownFaults`].
    fn check_memory(&self) -> Result<(), DmaError> {
        Ok(())
    }

    /// Maps memory that was [held](crate::dma::GuestMemory::detach), at the same guest addresses. A back end in another process
    /// refuses memory without a file.
    ///
    /// # Errors
    /// As [`Self::map`]. Regions mapped before the error stay mapped.
    fn map_detached(&self, memory: &DetachedGuestMemory) -> Result<(), DmaError>;

    /// Unmaps the regions in `gpa..gpa+len` and waits until no in-flight command uses them. Returns the number of bytes
    /// that were mapped there.
    ///
    /// # Errors
    /// [`DmaError::InvalidRegion`], [`DmaError::PartialUnmap`]; [`DmaError::Busy`] if in-flight commands still use the regions
    /// after `time`.
    fn unmap_within(&self, gpa: Gpa, len: u64, time: Duration) -> Result<u64, DmaError>;

    /// Unmaps regions as [`Self::unmap_within`] does, with a timeout of 30 seconds.
    ///
    /// # Errors
    /// As [`Self::unmap_within`].
    fn unmap(&self, gpa: Gpa, len: u64) -> Result<u64, DmaError> {
        self.unmap_within(gpa, len, DRAIN_DEADLINE)
    }

    /// Unmaps all regions, as [`Self::unmap`] does.
    ///
    /// # Errors
    /// [`DmaError::Busy`].
    fn unmap_all(&self) -> Result<u64, DmaError> {
        self.unmap_all_within(DRAIN_DEADLINE)
    }

    /// Unmaps all regions, as [`Self::unmap_within`] does.
    ///
    /// # Errors
    /// [`DmaError::Busy`].
    fn unmap_all_within(&self, time: Duration) -> Result<u64, DmaError> {
        self.unmap_within(Gpa(0), u64::MAX, time)
    }

    /// Starts to log the pages written by commands and through
    /// [`SharedBackendParts::memory`](super::SharedBackendParts::memory).
    ///
    /// # Errors
    /// [`DmaError::Busy`] if in-flight commands do not finish.
    fn start_dirty_log(&self) -> Result<(), DmaError>;

    /// Takes the pages written since the previous call.
    ///
    /// # Errors
    /// [`DmaError::NotLogged`].
    fn take_dirty_pages(&self) -> Result<Vec<DirtyRange>, DmaError>;

    /// Stops the log that [`Self::start_dirty_log`] started.
    fn stop_dirty_log(&self);
}
