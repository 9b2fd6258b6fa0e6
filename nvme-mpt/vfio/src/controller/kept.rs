//! Mappings of a drive's IOMMU that outlive a process which dies.
//!
//! The process keeps descriptors in a place that outlives it: the [table](IovaSpace::record) of its mappings, and the
//! [IOMMU](DeviceBacking::keep_iommu). It keeps no descriptor of the function, so the kernel stops and resets the function when
//! the process dies. The next process takes the IOMMU up, opens the function, disables its controller, and goes on as
//! after any crash; the memory of VMs is found where it was, and nothing of it is pinned again.
//!
//! That process has a table of its own, which takes the place of the former one before it changes a mapping. If it dies
//! before that, the process after it finds the former table, which says the truth still: what it said to be uncertain may
//! have been taken away meanwhile, and is taken away again.
//!
//! Memory is found by its file. So the inheritance ends before anybody but the functions of the process before can map
//! memory: a VMM that was without a server may have unmapped memory, given its pages back and mapped the file again, and
//! the IOMMU has the former pages.
//!
//! The place is emptied before the IOMMU loses its mappings with the function. The kernel would let no other process have
//! the function while a descriptor of its group is left.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use log::{error, warn};

use super::super::backing::DeviceBacking;
use super::super::device::VfioBacking;
use super::super::error::VfioError;
use super::super::function::PciAddress;
use super::error::ControllerError;
use super::{PhysicalDrive, lock};
use nvme_mpt::deadline::Deadline;
use nvme_mpt::iova::{IovaSpace, RecordedMappings};
use nvme_mpt::memory::sync::JoinHandle;
use nvme_mpt::poller::ThreadSpawner;

/// Time in which what the process before had mapped is found at most. A server ends it earlier, once its functions are there:
/// this is for drives that come later. Before, other drives may take minutes each to become ready.
pub(super) const INHERITANCE: Duration = Duration::from_secs(3600);

/// Mappings of the process before that nobody has found.
#[derive(Debug)]
pub(super) struct PredecessorMappings {
    /// When they are taken away; `None` once they are, or are being taken away.
    pub(super) end: Option<Deadline>,
    /// Takes them away.
    thread: Option<JoinHandle<()>>,
}

impl PredecessorMappings {
    /// They are there until `end`.
    pub(super) fn until(end: Deadline) -> Self {
        Self {
            end: Some(end),
            thread: None,
        }
    }

    /// Returns whether they are being taken away. Nobody is to be told of them meanwhile.
    pub(super) fn is_ending(&self) -> bool {
        self.thread
            .as_ref()
            .is_some_and(|thread| !thread.is_finished())
    }
}

/// Place for descriptors that outlives this process.
pub trait DescriptorStore: Send + Sync + fmt::Debug {
    /// Keeps descriptors in the place of those that it has.
    ///
    /// # Errors
    /// It has no room, and has what it had.
    fn keep(&self, descriptors: &[BorrowedFd<'_>]) -> io::Result<()>;

    /// Closes all that it has. Nothing else has copies of them when this returns.
    ///
    /// # Errors
    /// It may have them still.
    fn let_go(&self) -> io::Result<()>;
}

/// IOMMU of a drive whose process has died.
#[derive(Debug)]
pub struct PredecessorIommu {
    mappings: RecordedMappings,
    iommu: Vec<OwnedFd>,
}

impl PredecessorIommu {
    /// Reads what another process has given to its [keeper](DescriptorStore).
    ///
    /// # Errors
    /// [`ControllerError::HandOver`] for anything else; [`ControllerError::Memory`] for a table that does not hold.
    pub fn read(descriptors: Vec<OwnedFd>) -> Result<Self, ControllerError> {
        let mut descriptors = descriptors.into_iter();
        let missing = ControllerError::HandOver("the table of its mappings is missing");
        let table = descriptors.next().ok_or(missing)?;
        let mappings = RecordedMappings::read(table).map_err(ControllerError::Memory)?;
        let iommu = descriptors.collect();
        Ok(Self { mappings, iommu })
    }

    /// Opens the function, with this IOMMU.
    ///
    /// # Errors
    /// The obstacle to its use. Then the IOMMU is as it was.
    pub fn backing(&mut self, address: PciAddress) -> Result<VfioBacking, VfioError> {
        let iommu = std::mem::take(&mut self.iommu).try_into();
        let iommu = iommu.map_err(|_| VfioError::NoContainer { address })?;
        VfioBacking::left(address, iommu, self.mappings.there())
    }
}

/// Keeper of a drive, and the IOMMU that the process before has left, if it died.
#[derive(Debug, Default)]
pub struct PersistedIommu {
    /// Place for the descriptors of this process; `None` if nothing outlives it.
    pub keeper: Option<Arc<dyn DescriptorStore>>,
    /// IOMMU that the drive's [function](DeviceBacking) has.
    pub left: Option<PredecessorIommu>,
}

/// Returns the space with the mappings that another process has left.
pub(super) fn surviving(
    space: IovaSpace,
    left: Option<PredecessorIommu>,
) -> Result<IovaSpace, ControllerError> {
    match left {
        Some(left) => space
            .surviving(left.mappings)
            .map_err(ControllerError::Memory),
        None => Ok(space),
    }
}

/// Keeps the mappings of a space for the process after a death of this one, from now on. Without them, that process has
/// all memory pinned again.
///
/// # Errors
/// The keeper has neither these mappings nor let go of those of the process before: the next process would believe those.
pub(super) fn keep(
    space: &IovaSpace,
    backing: &dyn DeviceBacking,
    keeper: Option<&Arc<dyn DescriptorStore>>,
) -> Result<(), ControllerError> {
    let Some(keeper) = keeper else {
        return Ok(());
    };
    let kept = backing.keep_iommu().and_then(|iommu| {
        let table = space.record()?;
        let iommu = iommu.iter().map(AsFd::as_fd);
        let descriptors: Vec<_> = std::iter::once(table.as_fd()).chain(iommu).collect();
        keeper.keep(&descriptors)
    });
    if let Err(error) = kept {
        warn!(
            "Drive {}: after a death of this process, all memory is pinned again: {error}",
            backing.name()
        );
        // It would go on as if nothing had changed since.
        space.end_record();
        keeper.let_go().map_err(ControllerError::Memory)?;
    }
    Ok(())
}

impl PhysicalDrive {
    /// Ends the inheritance of mappings if it is time, on a thread of its own: the kernel unpins memory page by page.
    pub(super) fn check_inheritance(&self, threads: &ThreadSpawner) {
        let mut inheritance = lock(&self.inheritance);
        // Once the drive rests, what is left is the next process's.
        let is_resting = self.closing.load(Ordering::Acquire);
        let end = inheritance.end.as_ref();
        if is_resting || !end.is_some_and(Deadline::has_passed) {
            return;
        }
        let space = self.space.clone();
        let begun = threads.spawn("unmap", Box::new(move || space.end_inheritance()));
        // Without a thread, the next look tries again.
        if let Ok(thread) = begun {
            *inheritance = PredecessorMappings {
                end: None,
                thread: Some(thread),
            };
        }
    }

    /// Gives the function up, with all mappings.
    pub(super) fn give_back(&self) {
        self.space.end_record();
        let_go(self.keeper.as_ref());
        self.backing.release();
    }
}

/// Has a keeper close what it has of a function that is given up.
pub(super) fn let_go(keeper: Option<&Arc<dyn DescriptorStore>>) {
    if let Some(keeper) = keeper
        && let Err(error) = keeper.let_go()
    {
        error!("The keeper has the IOMMU of a drive that is given up: {error}");
    }
}
