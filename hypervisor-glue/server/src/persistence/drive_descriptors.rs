//! Physical drives that a successor takes over without a reset.
//!
//! The supervisor stores a descriptor queue for each open drive. In an upgrade, the predecessor pauses the drive and puts
//! the [descriptors that the successor needs](nvme_mpt::drive::HostController::hand_over) into the queue. The successor
//! removes these descriptors before it uses the drive. After a crash, the queue has no such descriptors, and the next server
//! resets the drive.
//!
//! If a server crashes, the kernel resets the device when its last descriptor closes. But the drive's descriptor queue also
//! holds the descriptor of the drive's IOMMU and a table of its mappings as long as a server has the drive open. So guest
//! memory stays pinned and mapped. See `nvme_vfio::DescriptorStore`.
//!
//! A handed-over drive may still execute in-flight commands of functions in VMMs, even while no server runs. VMMs must not
//! treat such commands as ended. Therefore, the drive's descriptor queue also holds the predecessor's end of its [presence]
//! pipe until the drive is open again.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nvme_mpt::Drive;
use nvme_mpt_memory::process_liveness;
use nvme_mpt_supervise::{DescriptorQueue, FdStoreError};
use nvme_mpt_vmm::drives::PersistedDriveDescriptors;
use nvme_mpt_vmm::report;
use nvme_vfio::DescriptorStore;

use super::fd_store_registry::FdStoreRegistry;
use super::{PersistenceError, ServerPersistence};

/// Prefix of the names under which the supervisor stores descriptor queues of drives.
pub(super) const DRIVE_PREFIX: &str = "drive-";

/// Number, in a drive's descriptor queue, of the message with the descriptors of a hand-over.
const HANDED_OVER: u64 = 0;

/// Number of the message with the predecessor's end of the presence pipe, whose closing shows VMMs that the predecessor has
/// ended.
const PRESENCE: u64 = 1;

/// Number of the message with the IOMMU's descriptor and the table of its mappings.
const MAPPINGS: u64 = 2;

/// Descriptor queues of the physical drives, by the names under which the supervisor stores them.
#[derive(Debug, Default)]
pub(super) struct DriveDescriptorQueues(BTreeMap<String, SharedDescriptorQueue>);

/// A drive's descriptor queue, shared with the driver, which stores the IOMMU's descriptor in the queue.
#[derive(Clone, Debug)]
struct SharedDescriptorQueue(Arc<Mutex<DescriptorQueue>>);

impl SharedDescriptorQueue {
    fn new(queue: DescriptorQueue) -> Self {
        Self(Arc::new(Mutex::new(queue)))
    }

    fn lock(&self) -> MutexGuard<'_, DescriptorQueue> {
        // A poisoned lock is usable: no change can be interrupted by a panic.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl DescriptorStore for SharedDescriptorQueue {
    fn store(&self, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut queue = self.lock();
        queue.put(MAPPINGS, descriptors).map_err(io::Error::other)?;
        // Remove the replaced message, because its descriptors keep memory allocated.
        if let Err(error) = queue.retain(|_| true) {
            log::warn!(
                "Cannot remove the older table of mappings from the supervisor: {}",
                report::chain(&error)
            );
        }
        Ok(())
    }

    fn clear(&self) -> io::Result<()> {
        let retained = self.lock().retain(|number| number != MAPPINGS);
        retained.map(drop).map_err(io::Error::other)
    }
}

/// Returns the name under which the supervisor stores a drive's descriptor queue. Names cannot contain colons.
fn entry_name(path: &str) -> String {
    format!("{DRIVE_PREFIX}{path}").replace(':', "_")
}

impl DriveDescriptorQueues {
    /// Adds a drive's descriptor queue, whose two ends the supervisor has stored.
    pub(super) fn insert(&mut self, name: String, ends: Vec<OwnedFd>) -> Result<(), FdStoreError> {
        self.0.insert(
            name,
            SharedDescriptorQueue::new(DescriptorQueue::from_persisted(ends)?),
        );
        Ok(())
    }

    fn take(
        &mut self,
        registry: &FdStoreRegistry,
        name: String,
    ) -> Result<PersistedDriveDescriptors, FdStoreError> {
        if let Some(shared) = self.0.get(&name) {
            let mut queue = shared.lock();
            let contents = queue.contents()?;
            queue.retain(|number| number != HANDED_OVER)?;
            drop(queue);
            let mut contents: BTreeMap<_, _> = contents.into_iter().collect();
            let mut message = |number| contents.remove(&number).unwrap_or_default();
            return Ok(PersistedDriveDescriptors {
                handed_over: message(HANDED_OVER),
                crash_leftovers: message(MAPPINGS),
                fd_store: Some(Arc::new(shared.clone())),
            });
        }
        let queue = DescriptorQueue::new()?;
        // If the supervisor's store is full, the empty queue is not stored and nothing is lost: the next server resets the
        // drive, as it would with an empty queue.
        registry.store_descriptors(&name, &queue.ends())?;
        let queue = SharedDescriptorQueue::new(queue);
        self.0.insert(name, queue.clone());
        Ok(PersistedDriveDescriptors {
            fd_store: Some(Arc::new(queue)),
            ..PersistedDriveDescriptors::default()
        })
    }
}

impl ServerPersistence {
    /// Returns the descriptors that the predecessor left for a drive. Until [`Self::reclaim_drive`] is called, VMMs see the
    /// predecessor as running, since its presence pipe stays open.
    ///
    /// # Errors
    /// [`PersistenceError::Supervisor`].
    pub(crate) fn drive_descriptors(
        &self,
        path: &str,
    ) -> Result<PersistedDriveDescriptors, PersistenceError> {
        let mut state = self.state();
        Ok(state.drives.take(&self.registry, entry_name(path))?)
    }

    /// Stores the descriptors of a paused drive for the successor.
    pub(crate) fn hand_over_drive(
        &self,
        path: &str,
        descriptors: &[OwnedFd],
    ) -> Result<(), PersistenceError> {
        let state = self.state();
        if let Some(queue) = state.drives.0.get(&entry_name(path)) {
            let queue = queue.lock();
            if let Some(held) = process_liveness::hangup_writer() {
                queue.put(PRESENCE, &[held])?;
            }
            let descriptors: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
            queue.put(HANDED_OVER, &descriptors)?;
        }
        Ok(())
    }

    /// Removes the hand-over's descriptors and the presence pipe from a drive's descriptor queue, once the drive works in this
    /// process. The IOMMU's descriptors stay.
    pub(crate) fn reclaim_drive(&self, path: &str) {
        self.retain_messages(path, |number| number == MAPPINGS);
    }

    /// Empties the descriptor queue of a drive that could not be opened, so that no process holds the drive's descriptors.
    pub(crate) fn release_drive(&self, path: &str) {
        self.retain_messages(path, |_| false);
    }

    fn retain_messages(&self, path: &str, retained: impl Fn(u64) -> bool) {
        let state = self.state();
        if let Some(queue) = state.drives.0.get(&entry_name(path))
            && let Err(error) = queue.lock().retain(retained)
        {
            let error = report::chain(&error);
            log::error!("Cannot use the supervisor's descriptors of drive {path}: {error}");
        }
    }

    /// Removes all drives from the supervisor except those that are open in this server.
    pub(crate) fn forget_other_drives(&self, open: &[Arc<Drive>]) {
        let mut state = self.state();
        let open: Vec<String> = open.iter().map(|drive| entry_name(drive.path())).collect();
        state.drives.0.retain(|name, queue| {
            let is_open = open.contains(name);
            if !is_open {
                // The queue is emptied first, because the supervisor may take a moment to close it: no other process can use
                // the drive while any process has the IOMMU's descriptor open.
                if let Err(error) = queue.clear() {
                    log::error!("Cannot remove {name} from the supervisor: {error}");
                }
            }
            if !is_open && let Err(error) = self.registry.forget(name) {
                log::error!(
                    "Cannot remove {name} from the supervisor: {}",
                    report::chain(&error)
                );
            }
            is_open
        });
    }
}

#[cfg(test)]
mod tests {
    use std::io::PipeReader;

    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::super::persisted_function::FdStoreKey;
    use super::*;

    fn hangs_up_within(pipe: &PipeReader, seconds: i64) -> bool {
        let mut ends = [PollFd::new(pipe, PollFlags::empty())];
        let time = Timespec {
            tv_sec: seconds,
            tv_nsec: 0,
        };
        poll(&mut ends, Some(&time)).unwrap() > 0
    }

    fn has_hung_up(pipe: &PipeReader) -> bool {
        hangs_up_within(pipe, 0)
    }

    /// Waits up to a minute, because a process that another test starts briefly holds copies of all descriptors.
    fn hangs_up_soon(pipe: &PipeReader) -> bool {
        hangs_up_within(pipe, 60)
    }

    #[test]
    fn a_server_is_present_until_its_drive_is_open_again() {
        let dir = tempfile::tempdir().unwrap();
        let (FdStoreKey { registry, .. }, _supervisor) =
            FdStoreKey::with_silent_supervisor(dir.path());
        let (hangs_up, held) = io::pipe().unwrap();
        let state = OwnedFd::from(tempfile::tempfile().unwrap());
        let name = entry_name("0000:01:00.0");
        let mut bags = DriveDescriptorQueues::default();
        let handed = |bags: &mut DriveDescriptorQueues| {
            bags.take(&registry, name.clone()).unwrap().handed_over
        };
        assert!(handed(&mut bags).is_empty());
        let queue = bags.0[&name].clone();
        queue.lock().put(PRESENCE, &[held.as_fd()]).unwrap();
        queue.lock().put(HANDED_OVER, &[state.as_fd()]).unwrap();
        drop(held);
        // The descriptors stay until the drive is open. If the process dies before, the next one gets them.
        assert_eq!(handed(&mut bags).len(), 1);
        assert!(!has_hung_up(&hangs_up));
        assert!(handed(&mut bags).is_empty());
        assert!(!has_hung_up(&hangs_up));
        queue.lock().retain(|number| number == MAPPINGS).unwrap();
        assert!(hangs_up_soon(&hangs_up));
    }

    #[test]
    fn the_iommu_of_a_drive_is_stored_until_its_release() {
        let dir = tempfile::tempdir().unwrap();
        let (FdStoreKey { registry, .. }, _supervisor) =
            FdStoreKey::with_silent_supervisor(dir.path());
        let name = entry_name("0000:01:00.0");
        let mut bags = DriveDescriptorQueues::default();
        let supervisor = bags
            .take(&registry, name.clone())
            .unwrap()
            .fd_store
            .unwrap();
        let store_descriptors = |count: usize| {
            let (hangs_up, held) = io::pipe().unwrap();
            supervisor.store(&vec![held.as_fd(); count]).unwrap();
            hangs_up
        };
        let first = store_descriptors(3);
        assert!(!has_hung_up(&first));
        let second = store_descriptors(2);
        assert!(hangs_up_soon(&first), "it was replaced");
        // Each server finds the IOMMU's descriptors, until one of them stores others.
        for _ in 0..2 {
            let left = bags.take(&registry, name.clone()).unwrap();
            assert_eq!((left.handed_over.len(), left.crash_leftovers.len()), (0, 2));
            bags.0[&name]
                .lock()
                .retain(|number| number == MAPPINGS)
                .unwrap();
        }
        assert!(!has_hung_up(&second));
        supervisor.clear().unwrap();
        assert!(hangs_up_soon(&second));
        assert!(
            bags.take(&registry, name)
                .unwrap()
                .crash_leftovers
                .is_empty()
        );
    }
}
