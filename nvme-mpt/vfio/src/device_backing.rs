//! Interface between the driver and an NVMe function.

use std::fmt;
use std::io;
use std::ops::RangeInclusive;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use nvme_driver::ControllerAccess;
use nvme_guest::iova::Iommu;
use nvme_mpt_memory::Mapping;

/// Access to an NVMe function for its driver: registers, doorbells, and DMA through an [`Iommu`].
///
/// A function may disappear at any time (hot removal). Then registers read as all ones, writes are lost, and all other calls
/// return [`io::ErrorKind::NotConnected`]; no access faults. A function whose link is down or that the kernel is resetting
/// behaves in this way too, but only for a while. [`ControllerAccess::is_gone`] is true only for a function that was removed or
/// [released](Self::release).
pub trait DeviceBacking: ControllerAccess + fmt::Debug {
    /// Returns the function's name for messages: its PCI address, such as `0000:01:00.0`.
    fn name(&self) -> &str;

    /// Returns a mapping with the doorbells (BAR0 or a part of it), and the offset of doorbell 0 in it (offset 1000h of BAR0).
    /// Queues whose doorbells lie behind the end of the mapping cannot be used.
    fn doorbells(&self) -> (Arc<Mapping>, usize);

    /// Returns the IOMMU that the function's DMA goes through.
    fn iommu(&self) -> Arc<dyn Iommu>;

    /// Returns the IOVA ranges that the function's DMA can use: sorted, disjoint, without ranges that the platform reserves.
    fn usable_iovas(&self) -> Vec<RangeInclusive<u64>>;

    /// Enables or disables DMA of the function (Command register: Bus Master Enable; Memory Space Enable stays set).
    ///
    /// # Errors
    /// Returns the kernel's error.
    fn set_bus_master(&self, enabled: bool) -> io::Result<()>;

    /// Resets the function (function level reset or the platform's substitute).
    ///
    /// # Errors
    /// Returns the kernel's error; `Unsupported` if the function cannot be reset.
    fn reset(&self) -> io::Result<()>;

    /// Returns the kernel's number of the NUMA node that the function is attached to; `None` if unknown.
    fn numa_node(&self) -> Option<u32> {
        None
    }

    /// Returns a descriptor that becomes readable when the host wants the function back, because the function is being removed
    /// or unbound. The owner of this value must then call [`Self::release`].
    fn removal_request(&self) -> Option<BorrowedFd<'_>>;

    /// Returns descriptors with which a successor process continues to use the function in its present state. The caller then
    /// exits without releasing the function.
    ///
    /// # Errors
    /// The kernel's error; `Unsupported` for a function that cannot be handed over.
    fn hand_over(&self) -> io::Result<Vec<OwnedFd>> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Returns descriptors that preserve the function's IOMMU and all mappings, even after the function is closed or this
    /// process has exited. Only [`Self::release`] removes the mappings.
    ///
    /// # Errors
    /// The kernel's error; `Unsupported` if the mappings of the function's IOMMU cannot outlive this process.
    fn persist_iommu(&self) -> io::Result<Vec<OwnedFd>> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Returns the number of the function's I/O address space in iommufd, which a successor needs with the descriptors of
    /// [`Self::hand_over`]; `None` if the function has another IOMMU.
    fn ioas(&self) -> Option<u32> {
        None
    }

    /// Releases the function: its DMA reaches no memory any more, and its registers read as all ones.
    fn release(&self);
}
