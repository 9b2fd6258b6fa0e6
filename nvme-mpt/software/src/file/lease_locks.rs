//! Locks of the bytes of a lease: in the drive's file, and in the files below if the drive is a loop device.
//!
//! The files below need locks of their own: a program that uses such a file directly locks the file, and not the loop device.

use std::io;
use std::path::Path;
use std::sync::Arc;

use nvme_lease::backing_id::BackingFile;
use nvme_lease::range::ByteRange;

use super::SharedFile;
use super::io_mode::FileIoMode;
use super::kernel::{File, FileRangeLock, lock_backing_file, reopen};

/// Offsets of two bytes beyond all data. A process locks one of the two bytes to announce the way in which it accesses the
/// file: the page cache, or direct I/O.
///
/// All processes must access a file in one way. If the page cache has a page of a written range in one folio with a dirty
/// page, a direct write cannot drop the page. The kernel then reports an error to all users of the file.
const MODE_LOCK_OFFSETS: [u64; 2] = [1 << 62, (1 << 62) + 1];

/// Locks of the bytes of a lease against other processes.
#[derive(Debug)]
pub(crate) struct LeaseFileLocks {
    shared: Arc<SharedFile>,
    file: FileRangeLock,
    /// Locks in the files below a loop device; in place of a file that cannot be opened, the reason. All files are opened at
    /// the start, even if the lease does not use them yet. A file that is opened when the lease grows into it would not be kept
    /// open by the rings of existing queues.
    backing_locks: Vec<Result<FileRangeLock, String>>,
}

impl LeaseFileLocks {
    /// Opens the files, without locking a range.
    ///
    /// # Errors
    /// Returns the kernel's error if the file cannot be opened again.
    pub(super) fn new(shared: &Arc<SharedFile>) -> io::Result<Self> {
        let file = FileRangeLock::new(reopen(&shared.open_file, Some(&shared.path), 0)?);
        announce_io_mode(
            &file,
            &shared.path,
            matches!(shared.io_mode, FileIoMode::Direct(_)),
        )?;
        let below = |below: &BackingFile| {
            let lock = lock_backing_file(below)?;
            announce_io_mode(&lock, &below.path, below.is_direct)
                .map_err(|error| error.to_string())?;
            Ok(lock)
        };
        Ok(Self {
            shared: shared.clone(),
            file,
            backing_locks: shared.backing_id.files().iter().map(below).collect(),
        })
    }

    /// Locks a range of the drive against other processes that lock their ranges.
    ///
    /// # Errors
    /// Returns `WouldBlock` with the processes that have locked a part of the range; otherwise the kernel's error. After an
    /// error, the ranges that were locked before the call stay locked.
    pub(super) fn lock_range(&self, range: ByteRange) -> io::Result<()> {
        let (start, length) = (range.start(), range.length());
        self.file.add(start, length)?;
        let added = self.lock_backing_range(start, length);
        if added.is_err() {
            self.file.release(start, length);
        }
        added
    }

    fn lock_backing_range(&self, start: u64, length: u64) -> io::Result<()> {
        let mut added: Vec<(&FileRangeLock, (u64, u64))> = Vec::new();
        let files = self
            .shared
            .backing_id
            .files()
            .iter()
            .zip(&self.backing_locks);
        let result = files
            .filter_map(|(file, lock)| Some((lock, file.file_part(start, length)?)))
            .try_for_each(|(lock, (start, length))| {
                let lock = lock
                    .as_ref()
                    .map_err(|reason| io::Error::other(reason.clone()))?;
                lock.add(start, length)?;
                added.push((lock, (start, length)));
                Ok(())
            });
        if result.is_err() {
            for (lock, (start, length)) in added {
                lock.release(start, length);
            }
        }
        result
    }

    /// Releases all locks. No command may be in flight.
    pub(super) fn release(&self) {
        let below = self.backing_locks.iter().flatten();
        std::iter::once(&self.file)
            .chain(below)
            .for_each(FileRangeLock::release_all);
    }

    /// Calls `persist` with the open files that hold the locks.
    ///
    /// # Errors
    /// Returns the error of `persist`.
    pub(super) fn with_open_files(
        &self,
        persist: impl FnOnce(&mut dyn Iterator<Item = &File>) -> io::Result<()>,
    ) -> io::Result<()> {
        let below = self.backing_locks.iter().flatten().map(FileRangeLock::file);
        persist(&mut std::iter::once(self.file.file()).chain(below))
    }
}

/// Announces to other processes whether this one accesses a file through the page cache or with direct I/O. Fails if another
/// process has announced the other way.
fn announce_io_mode(lock: &FileRangeLock, path: &Path, is_direct: bool) -> io::Result<()> {
    let (ours, other) = (usize::from(is_direct), usize::from(!is_direct));
    // Announces before it checks, so that of two concurrent processes, at least one sees the other.
    lock.share(MODE_LOCK_OFFSETS[ours])?;
    let Some(users) = lock.sharers(MODE_LOCK_OFFSETS[other])? else {
        return Ok(());
    };
    let ways = ["through the page cache", "past the page cache"];
    let [ours, other] = [ours, other].map(|way| ways[way]);
    Err(io::Error::other(format!(
        "{} would be used {ours}, and is used {other} by {users}: give all functions the same path, either the file or \
         its loop device, or let the loop device bypass the page cache (losetup --direct-io=on)",
        path.display()
    )))
}

#[cfg(test)]
mod tests {
    use nvme_guest::adaptive::PolicyChoice;
    use nvme_mpt::host::HostQueue;
    use nvme_mpt_memory::process_liveness::ProcessLiveness;

    use super::*;
    use crate::file::{FileBackingStore, FileQueue};

    #[test]
    fn the_ring_of_a_queue_keeps_all_files_below_its_drive() {
        // A ring also keeps this process's liveness lock, so the lock must exist.
        ProcessLiveness::open().unwrap();
        let drive = tempfile::NamedTempFile::new().unwrap();
        drive.as_file().set_len(1 << 20).unwrap();
        let store = FileBackingStore::open(drive.path(), 9, PolicyChoice::Adaptive).unwrap();
        let mut locks = store.lock_ranges(["0+4K".parse().unwrap()]).unwrap();
        // The second file covers the space into which the lease may grow.
        let files = [(); 2].map(|()| tempfile::tempfile().unwrap());
        locks.backing_locks = files.map(|file| Ok(FileRangeLock::new(file))).into();
        let lease = store.open_for_lease("a", 4096, Some(locks)).unwrap();
        let queue = FileQueue::new(&lease, 4).unwrap();
        let ring = queue.wait_fd().unwrap();
        let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{ring}")).unwrap();
        assert!(info.contains("\nUserFiles:\t4\n"), "{info}");
    }
}
