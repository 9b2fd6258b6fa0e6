//! Access of the driver to an NVMe function.

use std::fmt;
use std::io;
use std::ops::RangeInclusive;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use nvme_mpt::deadline::{SystemClock, WaitClock};
use nvme_mpt::iova::Iommu;
use nvme_mpt::memory::Mapping;

/// An NVMe function, as its driver reaches it: registers, doorbells, and DMA through an [`Iommu`].
///
/// A function may disappear at any time (hot removal). Then registers read as all ones, writes go
/// nowhere, and everything else says [`io::ErrorKind::NotConnected`]; nothing faults. The same holds for a while where its
/// link is down or the kernel resets it, and [`Self::is_gone`] tells the two apart.
pub trait DeviceBacking: Send + Sync + fmt::Debug {
    /// Returns its name for messages: a PCI address, as in `0000:01:00.0`.
    fn name(&self) -> &str;

    /// Reads a 32-bit controller register (Base 2.0, section 3.1.3).
    fn read32(&self, offset: usize) -> u32;

    /// Reads a 64-bit controller register.
    fn read64(&self, offset: usize) -> u64;

    /// Writes a 32-bit controller register.
    fn write32(&self, offset: usize, value: u32);

    /// Writes a 64-bit controller register.
    fn write64(&self, offset: usize, value: u64);

    /// Returns the mapping of the doorbells: BAR0 or part of it, and the offset of doorbell 0 (which is
    /// offset 1000h of BAR0) in the mapping. Its end bounds the queues that can be used.
    fn doorbells(&self) -> (Arc<Mapping>, usize);

    /// Returns the IOMMU that the function's DMA goes through.
    fn iommu(&self) -> Arc<dyn Iommu>;

    /// The addresses that its DMA can use: sorted, not overlapping, without those the platform
    /// reserves.
    fn usable_iovas(&self) -> Vec<RangeInclusive<u64>>;

    /// Lets the function access memory (Command register: Memory Space Enable, Bus Master Enable),
    /// or keeps it from all further DMA.
    ///
    /// # Errors
    /// Returns the kernel's error.
    fn set_bus_master(&self, enabled: bool) -> io::Result<()>;

    /// Resets the function (function level reset, or what the platform has in its place).
    ///
    /// # Errors
    /// Returns the kernel's error; `Unsupported` if there is no way to reset it.
    fn reset(&self) -> io::Result<()>;

    /// Returns the node of the host's memory that the function is next to, by the kernel's number; `None` if it is next
    /// to none, or that is not known.
    fn numa_node(&self) -> Option<u32> {
        None
    }

    /// Returns the longest time of an admin command. Those that the driver sends touch no media.
    fn admin_timeout(&self) -> Duration {
        Duration::from_secs(5)
    }

    /// Returns the clock of the driver's waits for the function.
    fn clock(&self) -> Arc<dyn WaitClock> {
        SystemClock::shared()
    }

    /// Becomes readable when the host wants the function back: it is being removed, or unbound.
    /// [`Self::release`] is the answer.
    fn removal_request(&self) -> Option<BorrowedFd<'_>>;

    /// Returns whether the function is there no more, for good: removed, or [released](Self::release). One that does not
    /// answer may come back.
    fn is_gone(&self) -> bool;

    /// Returns descriptors by which another process goes on with the function, as it is. This one ends without giving it
    /// up.
    ///
    /// # Errors
    /// The kernel's error; `Unsupported` for a function that cannot be handed over.
    fn hand_over(&self) -> io::Result<Vec<OwnedFd>> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Returns descriptors that keep its IOMMU as it is, with all mappings, while the function itself is given up: by the
    /// end of this process, too. [`Self::release`] takes all mappings away nevertheless.
    ///
    /// # Errors
    /// The kernel's error; `Unsupported` for a function whose IOMMU ends with its process.
    fn keep_iommu(&self) -> io::Result<Vec<OwnedFd>> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Gives the function up. No DMA of it reaches memory afterwards; registers read as all ones.
    fn release(&self);
}
