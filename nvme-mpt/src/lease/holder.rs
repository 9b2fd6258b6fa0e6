//! Liveness of the holder of a lease, as seen by other processes.
//!
//! Every lease has a *slot*: one byte offset in a lock file. Its holder keeps an open file description lock on that
//! byte while the lease lives. The kernel drops the lock with the description, also after SIGKILL, and shows it across
//! pid namespaces. A pid would not be enough: it may be reused after its process died, and it has no meaning in another
//! container.

use std::io;
use std::ops::Range;
use std::path::Path;

use log::warn;

use crate::memory::files::{File, is_lock_excluded, try_lock, unlock};
use crate::memory::system::LockKind;
use crate::range_lock::{self, Kind};

/// A byte of the lock file that represents one lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Slot(pub(super) u64);

impl Slot {
    /// Returns whether the kernel can lock this byte and the one after it.
    pub(super) fn is_valid(self) -> bool {
        libc::off_t::try_from(self.0).is_ok_and(|offset| offset < libc::off_t::MAX)
    }
}

/// The live holder of a slot. Dropping it releases the slot.
#[derive(Debug)]
pub(super) struct Holder {
    // The lock belongs to this open file description, so each holder has its own. Rust opens the file with O_CLOEXEC,
    // so a program that is started later does not keep a lease alive.
    file: File,
    slot: Slot,
}

impl Holder {
    /// Takes `slot` in a lock file that was opened for this holder alone. Returns `None` if another process holds the
    /// slot.
    pub(super) fn take(file: File, slot: Slot) -> io::Result<Option<Self>> {
        let is_free = try_lock(&file, LockKind::Exclusive, slot.0, 1)?;
        Ok(is_free.then_some(Self { file, slot }))
    }

    /// Releases the slot for another holder.
    pub(super) fn let_go(&self) {
        // The description may outlive this value in a forked child.
        if let Err(error) = unlock(&self.file, self.slot.0, 1) {
            warn!("The lock of a lease's holder stays until its file is closed: {error}");
        }
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        self.let_go();
    }
}

/// Finds the processes with locks in `range` of a file, for messages.
pub(super) fn users(file: &File, kind: Kind, range: &Range<u64>) -> range_lock::Holders {
    #[cfg(not(simulation))]
    return range_lock::find(file, kind, range);
    // Simulated processes do not appear in /proc.
    #[cfg(simulation)]
    {
        let _ = (file, kind, range);
        range_lock::Holders::default()
    }
}

/// Access to the slots of a lock file, without taking any.
#[derive(Debug)]
pub(super) struct Holders(Option<File>);

impl Holders {
    /// Opens the lock file `path`. If it does not exist, no slot is held.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        match File::open(path) {
            Ok(file) => Ok(Self(Some(file))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Self(None)),
            Err(error) => Err(error),
        }
    }

    /// Returns whether the holder of `slot` is alive.
    pub(super) fn holds(&self, slot: Slot) -> io::Result<bool> {
        self.is_locked(slot.0, 1)
    }

    /// Returns whether `first` or a higher slot is held.
    pub(super) fn any_from(&self, first: Slot) -> io::Result<bool> {
        // A length of 0 extends to the largest offset.
        self.is_locked(first.0, 0)
    }

    /// Finds the processes with locks on `first` or a higher slot.
    pub(super) fn users_from(&self, first: Slot) -> range_lock::Holders {
        match &self.0 {
            Some(file) => users(file, Kind::Range, &(first.0..u64::MAX)),
            None => range_lock::Holders::default(),
        }
    }

    fn is_locked(&self, start: u64, length: u64) -> io::Result<bool> {
        let Some(file) = &self.0 else {
            return Ok(false);
        };
        // Only an exclusive lock excludes a shared one.
        is_lock_excluded(file, LockKind::Shared, start, length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::OpenOptions;

    fn take(path: &Path, slot: Slot) -> io::Result<Option<Holder>> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        Holder::take(options.open(path)?, slot)
    }

    #[test]
    fn a_slot_has_one_holder_and_is_free_when_that_one_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("holders.lock");
        assert!(!Holders::open(&path).unwrap().holds(Slot(3)).unwrap());

        let holder = take(&path, Slot(3)).unwrap().unwrap();
        let holders = Holders::open(&path).unwrap();
        assert!(holders.holds(Slot(3)).unwrap());
        assert!(!holders.holds(Slot(2)).unwrap());
        assert!(!holders.holds(Slot(4)).unwrap());
        assert!(holders.any_from(Slot(0)).unwrap());
        assert!(holders.any_from(Slot(3)).unwrap());
        assert!(!holders.any_from(Slot(4)).unwrap());
        assert!(take(&path, Slot(3)).unwrap().is_none());
        let neighbour = take(&path, Slot(4)).unwrap().unwrap();

        drop(holder);
        assert!(!holders.holds(Slot(3)).unwrap());
        assert!(holders.holds(Slot(4)).unwrap());
        assert!(take(&path, Slot(3)).unwrap().is_some());
        drop(neighbour);
    }

    #[test]
    fn offsets_that_the_kernel_cannot_lock_are_no_slots() {
        assert!(Slot(0).is_valid());
        assert!(Slot(i64::MAX as u64 - 1).is_valid());
        assert!(!Slot(i64::MAX as u64).is_valid());
        assert!(!Slot(u64::MAX).is_valid());
        let dir = tempfile::tempdir().unwrap();
        assert!(take(&dir.path().join("l"), Slot(u64::MAX)).is_err());
    }
}
