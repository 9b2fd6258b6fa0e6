//! Liveness of the holder of a lease, as seen by other processes.
//!
//! Every lease has a *slot*: a byte offset in a lock file. While the lease lives, its holder has an open file description
//! lock on that byte. The kernel drops the lock when the description is closed, also after SIGKILL, and shows it across pid
//! namespaces. A pid would not suffice: it may be reused after its process died, and means nothing in another container.

use std::io;
use std::ops::Range;
use std::path::Path;

use log::warn;
use nvme_mpt_memory::files::{File, is_lock_excluded, try_lock, unlock};
use nvme_mpt_memory::system::LockKind;

use crate::range_lock::{self, ProcLockKind};

/// Slot of a lease: a byte of the lock file, which the lease's live holder has locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct LeaseSlot(pub(super) u64);

impl LeaseSlot {
    /// Returns whether the kernel can lock this slot's byte and the byte after it.
    pub(super) fn is_valid(self) -> bool {
        libc::off_t::try_from(self.0).is_ok_and(|offset| offset < libc::off_t::MAX)
    }
}

/// Live holder of a lease, by its lock on the lease's slot. Dropping it releases the slot.
#[derive(Debug)]
pub(super) struct LeaseSlotHolder {
    // The lock belongs to this open file description, so each holder opens the file for itself. Rust opens it with O_CLOEXEC,
    // so a program that is started later does not keep a lease alive.
    file: File,
    slot: LeaseSlot,
}

impl LeaseSlotHolder {
    /// Locks `slot` (the byte of a lease) in a lock file that was opened for this holder alone. Returns `None` if another
    /// holder has the slot.
    pub(super) fn take(file: File, slot: LeaseSlot) -> io::Result<Option<Self>> {
        let is_free = try_lock(&file, LockKind::Exclusive, slot.0, 1)?;
        Ok(is_free.then_some(Self { file, slot }))
    }

    /// Releases the slot, so that another process can take over the lease.
    pub(super) fn release(&self) {
        // A forked child may still have the open file description, so closing it here would not release the lock.
        if let Err(error) = unlock(&self.file, self.slot.0, 1) {
            warn!("The lock of a lease's holder stays until its file is closed: {error}");
        }
    }
}

impl Drop for LeaseSlotHolder {
    fn drop(&mut self) {
        self.release();
    }
}

/// Finds the processes with locks in `range` of a file, to name them in messages.
pub(super) fn lock_users(
    file: &File,
    kind: ProcLockKind,
    range: &Range<u64>,
) -> range_lock::FileLockHolders {
    #[cfg(not(simulation))]
    return range_lock::find_holders(file, kind, range);
    // Simulated processes do not appear in /proc.
    #[cfg(simulation)]
    {
        let _ = (file, kind, range);
        range_lock::FileLockHolders::default()
    }
}

/// Access to a lock file for checking which leases have a live holder. It takes no locks.
#[derive(Debug)]
pub(super) struct LeaseSlotProbe(Option<File>);

impl LeaseSlotProbe {
    /// Opens the lock file `path`. If the file does not exist, all slots count as not held.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        match File::open(path) {
            Ok(file) => Ok(Self(Some(file))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Self(None)),
            Err(error) => Err(error),
        }
    }

    /// Returns whether the lease of `slot` has a live holder.
    pub(super) fn is_held(&self, slot: LeaseSlot) -> io::Result<bool> {
        self.is_locked(slot.0, 1)
    }

    /// Returns whether a lease of the slot `first` or a higher slot has a live holder.
    pub(super) fn is_any_held_from(&self, first: LeaseSlot) -> io::Result<bool> {
        // A length of 0 means all bytes from the offset on.
        self.is_locked(first.0, 0)
    }

    /// Finds the processes that hold the leases of the slot `first` or of higher slots.
    pub(super) fn users_from(&self, first: LeaseSlot) -> range_lock::FileLockHolders {
        match &self.0 {
            Some(file) => lock_users(file, ProcLockKind::Range, &(first.0..u64::MAX)),
            None => range_lock::FileLockHolders::default(),
        }
    }

    fn is_locked(&self, start: u64, length: u64) -> io::Result<bool> {
        let Some(file) = &self.0 else {
            return Ok(false);
        };
        // A shared lock is excluded only by an exclusive lock, as holders have it.
        is_lock_excluded(file, LockKind::Shared, start, length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::OpenOptions;

    fn take(path: &Path, slot: LeaseSlot) -> io::Result<Option<LeaseSlotHolder>> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        LeaseSlotHolder::take(options.open(path)?, slot)
    }

    #[test]
    fn a_slot_has_one_holder_and_is_free_when_that_one_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("holders.lock");
        assert!(
            !LeaseSlotProbe::open(&path)
                .unwrap()
                .is_held(LeaseSlot(3))
                .unwrap()
        );

        let holder = take(&path, LeaseSlot(3)).unwrap().unwrap();
        let holders = LeaseSlotProbe::open(&path).unwrap();
        assert!(holders.is_held(LeaseSlot(3)).unwrap());
        assert!(!holders.is_held(LeaseSlot(2)).unwrap());
        assert!(!holders.is_held(LeaseSlot(4)).unwrap());
        assert!(holders.is_any_held_from(LeaseSlot(0)).unwrap());
        assert!(holders.is_any_held_from(LeaseSlot(3)).unwrap());
        assert!(!holders.is_any_held_from(LeaseSlot(4)).unwrap());
        assert!(take(&path, LeaseSlot(3)).unwrap().is_none());
        let neighbour = take(&path, LeaseSlot(4)).unwrap().unwrap();

        drop(holder);
        assert!(!holders.is_held(LeaseSlot(3)).unwrap());
        assert!(holders.is_held(LeaseSlot(4)).unwrap());
        assert!(take(&path, LeaseSlot(3)).unwrap().is_some());
        drop(neighbour);
    }

    #[test]
    fn offsets_that_the_kernel_cannot_lock_are_no_slots() {
        assert!(LeaseSlot(0).is_valid());
        assert!(LeaseSlot(i64::MAX as u64 - 1).is_valid());
        assert!(!LeaseSlot(i64::MAX as u64).is_valid());
        assert!(!LeaseSlot(u64::MAX).is_valid());
        let dir = tempfile::tempdir().unwrap();
        assert!(take(&dir.path().join("l"), LeaseSlot(u64::MAX)).is_err());
    }
}
