//! Locks on the bytes of a lease: in the drive's file, and in the files of the loop devices that it lies on.
//!
//! A program that has the file of a loop device locks that, and knows of no device.

use std::fs::{File, OpenOptions};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nvme_mpt::origin::BackingFile;
use nvme_mpt::range::ByteRange;
use nvme_mpt::range_lock::RangeLock;

use super::SharedFile;
use super::lease::reopen;

/// Locks on the bytes of a lease.
#[derive(Debug)]
pub(crate) struct Locks {
    shared: Arc<SharedFile>,
    file: RangeLock,
    /// Those in files below a device, by the file's place among them.
    below: Mutex<Vec<(usize, Arc<RangeLock>)>>,
}

impl Locks {
    /// Without a range yet.
    ///
    /// # Errors
    /// Returns the kernel's error if the file cannot be opened once more.
    pub(super) fn new(shared: &Arc<SharedFile>) -> io::Result<Self> {
        let file = reopen(&shared.opened, Some(&shared.path), 0)?;
        Ok(Self {
            shared: shared.clone(),
            file: RangeLock::new(file),
            below: Mutex::default(),
        })
    }

    fn below(&self) -> MutexGuard<'_, Vec<(usize, Arc<RangeLock>)>> {
        // Each change is complete before anything can panic.
        self.below.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks a range of the drive against others who lock what they use.
    ///
    /// # Errors
    /// `WouldBlock` names the processes that have part of it locked; else what the kernel reports. What was locked
    /// before is all that is locked then.
    pub(super) fn add(&self, range: ByteRange) -> io::Result<()> {
        let (start, length) = (range.start(), range.length());
        self.file.add(start, length)?;
        let added = self.add_below(start, length);
        if added.is_err() {
            self.file.give_up(start, length);
        }
        added
    }

    fn add_below(&self, start: u64, length: u64) -> io::Result<()> {
        let mut added: Vec<(Arc<RangeLock>, (u64, u64))> = Vec::new();
        let files = self.shared.origin.files().iter().enumerate();
        let result = files
            .filter_map(|(number, file)| Some((number, file, file.part(start, length)?)))
            .try_for_each(|(number, file, (start, length))| {
                let lock = self.lock_of(number, file)?;
                lock.add(start, length)?;
                added.push((lock, (start, length)));
                Ok(())
            });
        if result.is_err() {
            for (lock, (start, length)) in added {
                lock.give_up(start, length);
            }
        }
        result
    }

    fn lock_of(&self, number: usize, file: &BackingFile) -> io::Result<Arc<RangeLock>> {
        let mut below = self.below();
        if let Some((_, lock)) = below.iter().find(|(known, _)| *known == number) {
            return Ok(lock.clone());
        }
        let lock = Arc::new(RangeLock::new(open_below(file)?));
        below.push((number, lock.clone()));
        Ok(lock)
    }

    /// Calls `keep` with the open files that have the locks.
    ///
    /// # Errors
    /// Those of `keep`.
    pub(super) fn keep_open(
        &self,
        keep: impl FnOnce(&mut dyn Iterator<Item = &File>) -> io::Result<()>,
    ) -> io::Result<()> {
        let below = self.below();
        let below = below.iter().map(|(_, lock)| lock.file());
        keep(&mut std::iter::once(self.file.file()).chain(below))
    }
}

/// Opens the file of a loop device.
fn open_below(below: &BackingFile) -> io::Result<File> {
    let file = OpenOptions::new().read(true).write(true).open(&below.path);
    let failed = |why: &str| {
        let path = below.path.display();
        io::Error::other(format!(
            "the loop device's file {path} cannot be locked: {why}"
        ))
    };
    let file = file.map_err(|error| failed(&error.to_string()))?;
    match below.is(&file)? {
        true => Ok(file),
        false => Err(failed("its path leads to another file")),
    }
}
