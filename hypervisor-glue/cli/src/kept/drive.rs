//! A physical drive that goes on in the next process without a reset.
//!
//! The keeper has a bag for each drive that is open, and the bag is empty while the drive works. A server that is
//! replaced has its drives rest, and puts [what the next one needs](nvme_mpt::drive::HostController::hand_over) into
//! their bags. The next server empties a bag before it uses what was in it. A server that dies leaves an empty bag, and
//! the next one resets the drive.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use nvme_mpt::Drive;
use nvme_mpt_keep::{Bag, KeepError};
use nvme_mpt_vmm::report;

use super::registry::Registry;
use super::{Keeping, KeepingError};

/// Prefix of the names of drives.
pub(super) const DRIVE: &str = "drive-";

/// Number of the one message in a bag.
const HANDED_OVER: u64 = 0;

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
            empty(bag)?;
            let handed = contents.into_iter().next_back();
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
    /// drive, or has died.
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
            let descriptors: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
            bag.put(HANDED_OVER, &descriptors)?;
        }
        Ok(())
    }

    /// Forgets what the next server would have needed: the drive works again.
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
