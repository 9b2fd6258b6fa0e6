//! Persisted mappings of a drive's IOMMU, which survive the death of a process.
//!
//! The process stores descriptors in a [`DescriptorStore`]: the [table](IovaSpace::record) of its mappings and the
//! [IOMMU](DeviceBacking::persist_iommu). It stores no descriptor of the function, so the kernel resets the function when the
//! process dies. The successor restores the IOMMU, opens the function, disables its controller, and continues as after any
//! crash. It finds the memory of VMs still mapped and pins nothing again.
//!
//! The successor writes a new table, which replaces the old table in the store before the successor changes any mapping. If the
//! successor dies before the replacement, the next process finds the old table, which is still valid. Mappings that the old
//! table marks as uncertain may have been removed; removing them again is harmless.
//!
//! The successor matches memory by its file. While there was no server, a VMM may have unmapped memory, freed its pages and
//! mapped the file again, although the IOMMU still maps the old pages. So only functions of the predecessor may use old
//! mappings: the *inheritance*, which is the use of old mappings, must end before any other function may map memory.
//!
//! The store is emptied before the function and the IOMMU are released. The kernel lets no other process open the function
//! while a descriptor of its group exists.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use log::{error, warn};

use super::super::device_backing::DeviceBacking;
use super::super::error::VfioError;
use super::super::function::PciAddress;
use super::super::vfio_backing::VfioBacking;
use super::error::ControllerError;
use super::{PhysicalDrive, lock};
use nvme_guest::iova::{IovaSpace, RecordedMappings};
use nvme_guest::threads::ThreadSpawner;
use nvme_mpt_memory::deadline::Deadline;
use nvme_mpt_memory::sync::JoinHandle;

/// Maximum time for which functions can take over the predecessor's mappings of the memory that they map. A server ends this
/// time as soon as its functions are restored; the maximum is for drives that are added later. It is long because other drives
/// may take minutes each to become ready.
pub(super) const PREDECESSOR_MAPPINGS_TIMEOUT: Duration = Duration::from_secs(3600);

/// Mappings of the predecessor that no function has taken over yet.
#[derive(Debug)]
pub(super) struct PredecessorMappings {
    /// Time at which the mappings are removed; `None` once their removal has begun.
    pub(super) deadline: Option<Deadline>,
    /// Thread that removes the mappings, once the removal has begun.
    thread: Option<JoinHandle<()>>,
}

impl PredecessorMappings {
    /// Creates the state for mappings of the predecessor that functions can take over until `end`.
    pub(super) fn with_deadline(end: Deadline) -> Self {
        Self {
            deadline: Some(end),
            thread: None,
        }
    }

    /// Returns whether the mappings are being removed. The mappings must not be handed over until the removal has ended.
    pub(super) fn is_unmapping(&self) -> bool {
        self.thread
            .as_ref()
            .is_some_and(|thread| !thread.is_finished())
    }
}

/// A store for descriptors that outlives this process.
pub trait DescriptorStore: Send + Sync + fmt::Debug {
    /// Replaces the stored descriptors by `descriptors`.
    ///
    /// # Errors
    /// The store has no free space. It keeps the descriptors that it had.
    fn store(&self, descriptors: &[BorrowedFd<'_>]) -> io::Result<()>;

    /// Closes all stored descriptors. After the call, no process has a copy of them from the store.
    ///
    /// # Errors
    /// The store may still have the descriptors.
    fn clear(&self) -> io::Result<()>;
}

/// IOMMU of a drive whose process has died.
#[derive(Debug)]
pub struct PredecessorIommu {
    mappings: RecordedMappings,
    iommu: Vec<OwnedFd>,
}

impl PredecessorIommu {
    /// Reads the descriptors that the predecessor has put into its [store](DescriptorStore).
    ///
    /// # Errors
    /// [`ControllerError::HandOver`] if these are not such descriptors; [`ControllerError::Memory`] for an invalid table.
    pub fn read(descriptors: Vec<OwnedFd>) -> Result<Self, ControllerError> {
        let mut descriptors = descriptors.into_iter();
        let missing = ControllerError::HandOver("the table of its mappings is missing");
        let table = descriptors.next().ok_or(missing)?;
        let mappings = RecordedMappings::read(table).map_err(ControllerError::Memory)?;
        let iommu = descriptors.collect();
        Ok(Self { mappings, iommu })
    }

    /// Opens the function with this IOMMU.
    ///
    /// # Errors
    /// Returns why the function cannot be used. The IOMMU is then unchanged.
    pub fn open_backing(&mut self, address: PciAddress) -> Result<VfioBacking, VfioError> {
        let iommu = std::mem::take(&mut self.iommu);
        VfioBacking::with_predecessor_iommu(address, iommu, self.mappings.mapped())
    }
}

/// Persistence of a drive's IOMMU: the store for the successor, and the IOMMU that a dead predecessor has left.
#[derive(Debug, Default)]
pub struct PersistedIommu {
    /// Store for the descriptors of this process; `None` if nothing is persisted.
    pub store: Option<Arc<dyn DescriptorStore>>,
    /// IOMMU of the drive's [function](DeviceBacking), if a predecessor has left one.
    pub predecessor: Option<PredecessorIommu>,
}

/// Adds the mappings that a predecessor has left to an IOVA space. If there was no predecessor, returns the space unchanged.
pub(super) fn add_predecessor_mappings(
    space: IovaSpace,
    left: Option<PredecessorIommu>,
) -> Result<IovaSpace, ControllerError> {
    match left {
        Some(left) => space
            .with_recorded(left.mappings)
            .map_err(ControllerError::Memory),
        None => Ok(space),
    }
}

/// Starts to persist the mappings of an IOVA space for a successor. If this fails, a successor pins all memory again.
///
/// # Errors
/// The store could neither replace nor drop the predecessor's mappings. A successor would then trust these outdated mappings.
pub(super) fn persist_mappings(
    space: &IovaSpace,
    backing: &dyn DeviceBacking,
    supervisor: Option<&Arc<dyn DescriptorStore>>,
) -> Result<(), ControllerError> {
    let Some(supervisor) = supervisor else {
        return Ok(());
    };
    let persisted = backing.persist_iommu().and_then(|iommu| {
        let table = space.start_record()?;
        let iommu = iommu.iter().map(AsFd::as_fd);
        let descriptors: Vec<_> = std::iter::once(table.as_fd()).chain(iommu).collect();
        supervisor.store(&descriptors)
    });
    if let Err(error) = persisted {
        warn!(
            "Drive {}: after a death of this process, all memory is pinned again: {error}",
            backing.name()
        );
        // A record that is no longer updated must not remain for a successor, which would trust it.
        space.end_record();
        supervisor.clear().map_err(ControllerError::Memory)?;
    }
    Ok(())
}

impl PhysicalDrive {
    /// Starts the removal of the predecessor's mappings if the time for taking them over has passed. A new thread removes them,
    /// because this may take long: the kernel unpins memory page by page.
    pub(super) fn check_predecessor_mappings(&self, threads: &ThreadSpawner) {
        let mut inheritance = lock(&self.predecessor_mappings);
        // If the drive is quiesced, the remaining mappings go to the successor.
        let is_resting = self.registers.is_closing();
        let end = inheritance.deadline.as_ref();
        if is_resting || !end.is_some_and(Deadline::has_passed) {
            return;
        }
        let space = self.space.clone();
        let begun = threads.spawn("unmap", Box::new(move || space.end_inheritance()));
        // If the thread cannot be started, the next check tries to start it again.
        if let Ok(thread) = begun {
            *inheritance = PredecessorMappings {
                deadline: None,
                thread: Some(thread),
            };
        }
    }

    /// Releases the function with all its mappings, and removes its descriptors from the store first.
    pub(super) fn release_function(&self) {
        self.space.end_record();
        clear_store(self.descriptor_store.as_ref());
        self.backing.release();
    }
}

/// Removes the descriptors of a function that is being released from the store.
pub(super) fn clear_store(supervisor: Option<&Arc<dyn DescriptorStore>>) {
    if let Some(supervisor) = supervisor
        && let Err(error) = supervisor.clear()
    {
        error!("Cannot remove the IOMMU of a failed drive from the supervisor: {error}");
    }
}
