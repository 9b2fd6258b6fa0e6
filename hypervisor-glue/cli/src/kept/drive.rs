//! A physical drive that goes on in the next process without a reset.
//!
//! The keeper has a bag for each drive that is open, and the bag is empty while the drive works. A server that is
//! replaced has its drives rest, and puts [what the next one needs](nvme_mpt::drive::HostController::hand_over) into
//! their bags. The next server takes that out of a bag before it uses it. A server that dies leaves an empty bag, and
//! the next one resets the drive.
//!
//! A drive that is handed over still carries out commands in flight of functions in VMMs, even while no server runs. So
//! the bag also holds the old server's end of its [presence] pipe, until the drive is open again.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use nvme_mpt::Drive;
use nvme_mpt::memory::presence;
use nvme_mpt_keep::{Bag, KeepError};
use nvme_mpt_vmm::report;

use super::registry::Registry;
use super::{Keeping, KeepingError};

/// Prefix of the names of drives.
pub(super) const DRIVE: &str = "drive-";

/// Number of the message with what the next server needs.
const HANDED_OVER: u64 = 0;

/// Number of the message with the old server's end of its presence pipe.
const PRESENCE: u64 = 1;

/// Bags of physical drives, by their names in the keeper.
#[derive(Debug, Default)]
pub(super) struct DriveBags(BTreeMap<String, Bag>);

/// Returns a drive's name in the keeper, whose names have no colons.
fn name_of(path: &str) -> String {
    format!("{DRIVE}{path}").replace(':', "_")
}

fn empty(bag: &mut Bag) -> Result<(), KeepError> {
    bag.retain(|_| false)
}

impl DriveBags {
    /// Takes up a bag of the process before.
    pub(super) fn add(&mut self, name: String, ends: Vec<OwnedFd>) -> Result<(), KeepError> {
        self.0.insert(name, Bag::from_kept(ends)?);
        Ok(())
    }

    fn take(&mut self, registry: &Registry, name: String) -> Result<Vec<OwnedFd>, KeepError> {
        if let Some(bag) = self.0.get_mut(&name) {
            let contents = bag.contents()?;
            bag.retain(|number| number == PRESENCE)?;
            let mut contents = contents.into_iter();
            let handed = contents.find(|(number, _)| *number == HANDED_OVER);
            return Ok(handed.map_or_else(Vec::new, |(_, descriptors)| descriptors));
        }
        let bag = Bag::new()?;
        // After a death of this server, the next one resets the drive, whether the keeper has an empty bag or none.
        registry.keep(&name, &bag.ends())?;
        self.0.insert(name, bag);
        Ok(Vec::new())
    }
}

impl Keeping {
    /// Returns what the server before has handed over of a drive that is opened; nothing if that server had not the
    /// drive, or has died. VMMs take that server for present until [`Self::take_drive_back`].
    ///
    /// # Errors
    /// [`KeepingError::Keeper`].
    pub(crate) fn open_drive(&self, path: &str) -> Result<Vec<OwnedFd>, KeepingError> {
        let mut state = self.state();
        Ok(state.drives.take(&self.registry, name_of(path))?)
    }

    /// Keeps what the next server needs of a drive that rests.
    pub(crate) fn hand_drive_over(
        &self,
        path: &str,
        descriptors: &[OwnedFd],
    ) -> Result<(), KeepingError> {
        let state = self.state();
        if let Some(bag) = state.drives.0.get(&name_of(path)) {
            if let Some(held) = presence::held() {
                bag.put(PRESENCE, &[held])?;
            }
            let descriptors: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
            bag.put(HANDED_OVER, &descriptors)?;
        }
        Ok(())
    }

    /// Empties the bag of a drive that no other process has any more: it works again in this process, or was closed.
    pub(crate) fn take_drive_back(&self, path: &str) {
        let mut state = self.state();
        if let Some(bag) = state.drives.0.get_mut(&name_of(path))
            && let Err(error) = empty(bag)
        {
            let error = report::chain(&error);
            log::error!("The keeper has descriptors of drive {path}, which are of no use: {error}");
        }
    }

    /// Has the keeper let go of drives that this server has not open.
    pub(crate) fn forget_drives_but(&self, open: &[Arc<Drive>]) {
        let mut state = self.state();
        let open: Vec<String> = open.iter().map(|drive| name_of(drive.path())).collect();
        state.drives.0.retain(|name, _| {
            let is_open = open.contains(name);
            if !is_open && let Err(error) = self.registry.forget(name) {
                log::error!("{name} stays with the keeper: {}", report::chain(&error));
            }
            is_open
        });
    }
}

#[cfg(test)]
mod tests {
    use std::io::{self, PipeReader};

    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::super::function::Shelf;
    use super::*;

    fn has_hung_up(pipe: &PipeReader) -> bool {
        let mut ends = [PollFd::new(pipe, PollFlags::empty())];
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        poll(&mut ends, Some(&now)).unwrap() > 0
    }

    #[test]
    fn a_server_is_present_until_its_drive_is_open_again() {
        let folder = tempfile::tempdir().unwrap();
        let (Shelf { registry, .. }, _keeper) = Shelf::of_silent_keeper(folder.path());
        let (hangs_up, held) = io::pipe().unwrap();
        let state = OwnedFd::from(tempfile::tempfile().unwrap());
        let name = name_of("0000:01:00.0");
        let mut bags = DriveBags::default();
        assert!(bags.take(&registry, name.clone()).unwrap().is_empty());
        let bag = &bags.0[&name];
        bag.put(PRESENCE, &[held.as_fd()]).unwrap();
        bag.put(HANDED_OVER, &[state.as_fd()]).unwrap();
        drop(held);
        // A process that dies before it has opened the drive is followed by another one.
        assert_eq!(bags.take(&registry, name.clone()).unwrap().len(), 1);
        assert!(!has_hung_up(&hangs_up));
        assert!(bags.take(&registry, name.clone()).unwrap().is_empty());
        assert!(!has_hung_up(&hangs_up));
        empty(bags.0.get_mut(&name).unwrap()).unwrap();
        assert!(has_hung_up(&hangs_up));
    }
}
