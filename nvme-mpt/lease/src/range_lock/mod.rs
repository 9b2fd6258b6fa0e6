//! Locks on ranges of files, by open file description (OFD locks). The kernel drops them with the description, also
//! after SIGKILL. They exclude other descriptions in this process as well as in other processes.
//!
//! The kernel may continue I/O of a killed process. So each I/O holds a reference to the lock's open file description
//! ([`FileRangeLock::file`]), and the lock lasts until the last I/O has ended. Meanwhile, no process has the description
//! open. So a claim that finds a lock without a visible holder waits for some time.
//!
//! A lease of a range of an image file locks that range of the image itself. Servers with another state directory, and
//! VMMs, look for locks only there. But any user who may read the image can put a shared lock there, which blocks an
//! exclusive one. So [`FileRangeLock::claim`] distinguishes:
//!
//! * A lock that is exclusive, or was taken through a writable descriptor, belongs to a user of the image: QEMU takes
//!   shared locks on images that it writes. The claim is refused, and its holder named.
//! * A shared lock through a read-only descriptor, of a user other than root and the server's own, does not block the
//!   claim. The claim then takes a shared lock through a writable descriptor, so that other claims see a user of the range.
//!   The process that holds the read-only lock is logged.
//! * The kernel may hide the holder of a lock, so that the lock may be of either kind. The claim is refused if the lock
//!   stays for [`CLAIM_TIMEOUT`]. A server without root sees only its own user's processes: its images should be readable
//!   by its user only.

mod lock_holders;

use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::PoisonError;
use std::time::Duration;

use log::warn;
use nvme_mpt_memory::deadline::{Deadline, SystemClock};
use nvme_mpt_memory::sync::{Mutex, MutexGuard};
use nvme_mpt_memory::system::{LockKind, is_lock_excluded, process_user, try_lock, unlock};

pub(crate) use lock_holders::{FileLockHolders, ProcLockKind, find_holders};

/// Maximum time for which a claim waits for an invisible holder, such as the I/O of a killed process.
pub const CLAIM_TIMEOUT: Duration = Duration::from_secs(10);

/// Minimum and maximum pause between two attempts of a claim that waits for an invisible holder. Pauses are necessary because
/// each attempt scans all processes of the host.
const PAUSE: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(100));

/// Error of claiming a range of a file.
#[derive(Debug, thiserror::Error)]
pub enum ClaimError {
    /// Another process uses part of the range.
    #[error("It is locked by {holders}")]
    Taken {
        /// Description of the processes with locks on the range, as far as this process can see them.
        holders: String,
    },
    /// A system call failed.
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl From<ClaimError> for io::Error {
    fn from(error: ClaimError) -> Self {
        match error {
            ClaimError::Taken { .. } => Self::new(io::ErrorKind::WouldBlock, error),
            ClaimError::Io(error) => error,
        }
    }
}

/// A lock on ranges of a file, held until dropped.
#[derive(Debug)]
pub struct FileRangeLock {
    // The lock belongs to this open file description, so each lock opens the file for itself. Rust opens it with O_CLOEXEC, so
    // a program that is started later does not inherit the lock.
    file: File,
    /// Start and length of each locked range.
    ranges: Mutex<Vec<(u64, u64)>>,
}

impl FileRangeLock {
    /// Creates a lock without ranges. The file must have been opened for this lock alone, for reading and writing.
    #[must_use]
    pub const fn new(file: File) -> Self {
        Self {
            file,
            ranges: Mutex::new(Vec::new()),
        }
    }

    fn ranges(&self) -> MutexGuard<'_, Vec<(u64, u64)>> {
        self.ranges.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the open file that has the lock. If the process is killed, I/O that keeps the file open also keeps the lock.
    /// Dropping the `FileRangeLock` releases the lock even if such I/O is in flight.
    pub const fn file(&self) -> &File {
        &self.file
    }

    /// Locks `length` bytes from `start`. The file must have been opened for this lock alone, for reading and writing.
    /// Returns `None` if another lock covers part of the range.
    ///
    /// # Errors
    /// Returns the error of `fcntl`.
    pub fn take(file: File, start: u64, length: u64) -> io::Result<Option<Self>> {
        let lock = Self::new(file);
        if !try_lock(&lock.file, LockKind::Exclusive, start, length)? {
            return Ok(None);
        }
        lock.ranges().push((start, length));
        Ok(Some(lock))
    }

    /// Locks a range as [`Self::take`] does, but ignores shared locks of other users on read-only descriptors. A `length`
    /// of 0 means all bytes from `start` on. Waits up to [`CLAIM_TIMEOUT`] for an invisible holder.
    ///
    /// # Errors
    /// [`ClaimError::Taken`] names the processes that have locked part of the range; otherwise the error of `fcntl`.
    pub fn claim(file: File, start: u64, length: u64) -> Result<Self, ClaimError> {
        let lock = Self::new(file);
        lock.add(start, length)?;
        Ok(lock)
    }

    /// Claims another range of the file, which must not overlap the ranges of this lock.
    ///
    /// # Errors
    /// Like [`Self::claim`]. The lock then keeps its previous ranges.
    pub fn add(&self, start: u64, length: u64) -> Result<(), ClaimError> {
        self.add_as_user(process_user(), start, length)
    }

    fn add_as_user(&self, user: u32, start: u64, length: u64) -> Result<(), ClaimError> {
        let range = start..match length {
            0 => u64::MAX,
            length => start.saturating_add(length),
        };
        claim_range(user, &self.file, &range, start, length)?;
        self.ranges().push((start, length));
        Ok(())
    }

    /// Takes a shared lock on a byte of the file.
    ///
    /// # Errors
    /// [`ClaimError::Taken`] if another process has an exclusive lock on it; otherwise the error of `fcntl`.
    pub fn share(&self, byte: u64) -> Result<(), ClaimError> {
        if !try_lock(&self.file, LockKind::Shared, byte, 1)? {
            let holders = describe_holders(&find_holders(
                &self.file,
                ProcLockKind::Range,
                &(byte..byte + 1),
            ));
            return Err(ClaimError::Taken { holders });
        }
        self.ranges().push((byte, 1));
        Ok(())
    }

    /// Returns the names of other processes that [share](Self::share) a byte of the file. Shared locks of other users on
    /// read-only descriptors do not count.
    ///
    /// # Errors
    /// Returns the error of `fcntl`.
    pub fn sharers(&self, byte: u64) -> io::Result<Option<String>> {
        if !is_lock_excluded(&self.file, LockKind::Exclusive, byte, 1)? {
            return Ok(None);
        }
        let user = process_user();
        let mut holders = find_holders(&self.file, ProcLockKind::Range, &(byte..byte + 1));
        holders
            .visible
            .retain(|holder| !holder.is_foreign_reader(user));
        let are_some = holders.has_hidden || !holders.visible.is_empty();
        Ok(are_some.then(|| describe_holders(&holders)))
    }

    /// Releases all ranges, even if the kernel keeps the file open for I/O.
    pub fn release_all(&self) {
        let ranges = self.ranges().clone();
        for (start, length) in ranges {
            self.release(start, length);
        }
    }

    /// Releases a range that was [added](Self::add).
    pub fn release(&self, start: u64, length: u64) {
        self.ranges().retain(|range| *range != (start, length));
        if let Err(error) = unlock(&self.file, start, length) {
            warn!("A lock on a drive's file stays until the file is closed: {error}");
        }
    }
}

/// Claims a range of a file, as the process of `user`.
fn claim_range(
    user: u32,
    file: &File,
    range: &Range<u64>,
    start: u64,
    length: u64,
) -> Result<(), ClaimError> {
    let deadline = Deadline::after(&SystemClock::shared(), CLAIM_TIMEOUT);
    let mut pause = PAUSE.0;
    loop {
        // The deadline is checked before the attempt. So the last attempt comes after the timeout, even if the machine was
        // suspended.
        let is_last = deadline.has_passed();
        if try_lock(file, LockKind::Exclusive, start, length)? {
            return Ok(());
        }
        // Each claim first takes a shared lock, and then looks for locks of others. So of two concurrent claims, at least one
        // sees the other.
        let shared = try_lock(file, LockKind::Shared, start, length)?;
        let holders = find_holders(file, ProcLockKind::Range, range);
        let reads_only = |holder: &lock_holders::LockHolder| holder.is_foreign_reader(user);
        if shared && !holders.has_hidden && holders.visible.iter().all(reads_only) {
            if !holders.visible.is_empty() {
                warn!(
                    "A lock on the drive's file is shared with {}, which only reads it; take the permission to \
                     read the file from others",
                    describe_holders(&holders)
                );
            }
            return Ok(());
        }
        // The lock is released before the next attempt, so that two concurrent claims do not wait for each other. A refused
        // claim keeps no lock either.
        unlock(file, start, length)?;
        if is_last || !holders.visible.iter().all(reads_only) {
            let holders = describe_holders(&holders);
            return Err(ClaimError::Taken { holders });
        }
        deadline.sleep(pause);
        pause = (pause * 2).min(PAUSE.1);
    }
}

impl Drop for FileRangeLock {
    fn drop(&mut self) {
        // A forked child or pending I/O of the lease may still have the open file description, so closing it here would not
        // release the locks.
        for &(start, length) in &*self.ranges() {
            if let Err(error) = unlock(&self.file, start, length) {
                warn!("A lock on a drive's file stays until the file is closed: {error}");
            }
        }
    }
}

/// Formats the names of the processes that hold locks, for messages.
pub(crate) fn describe_holders(holders: &FileLockHolders) -> String {
    let mut names: Vec<String> = holders.visible.iter().map(ToString::to_string).collect();
    if names.is_empty() || holders.has_hidden {
        names.push(
            "a process that cannot be seen from here, or I/O of one that was killed".to_owned(),
        );
    }
    names.join(" and ")
}

/// Returns whether another description has an exclusive lock on part of `length` bytes from `start`. A `length` of 0 means
/// all bytes from `start` on.
///
/// # Errors
/// Returns the error of `fcntl`.
pub fn is_locked(file: &File, start: u64, length: u64) -> io::Result<bool> {
    // A shared lock is excluded only by an exclusive lock. So shared locks, which any reader can take, do not count here.
    is_lock_excluded(file, LockKind::Shared, start, length)
}

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;

    use super::*;

    const EOF: Range<u64> = 0..u64::MAX;

    struct LockTestImage(tempfile::NamedTempFile);

    impl LockTestImage {
        fn new() -> Self {
            let file = tempfile::NamedTempFile::new().expect("a file");
            file.as_file().set_len(1 << 20).expect("room");
            Self(file)
        }

        fn open(&self, write: bool) -> File {
            let mut options = OpenOptions::new();
            options
                .read(true)
                .write(write)
                .open(self.0.path())
                .expect("opens")
        }

        /// Takes a shared lock on the whole image.
        fn share(&self, write: bool) -> File {
            let file = self.open(write);
            assert!(try_lock(&file, LockKind::Shared, 0, 0).expect("fcntl"));
            file
        }

        /// Claims a part of the image as a server of `user`.
        fn claim(&self, user: u32, start: u64) -> Result<FileRangeLock, ClaimError> {
            let lock = FileRangeLock::new(self.open(true));
            lock.add_as_user(user, start, 1 << 10)?;
            Ok(lock)
        }
    }

    #[test]
    fn ranges_are_released_while_something_keeps_the_file_open() {
        let image = LockTestImage::new();
        let user = process_user();
        let lock = image.claim(user, 0).expect("free");
        lock.add_as_user(user, 1 << 12, 1 << 10).expect("free");
        let descriptor = lock.file().try_clone().expect("descriptor");
        let is_free = |start| {
            let taken = FileRangeLock::take(image.open(true), start, 1 << 10).expect("fcntl");
            taken.is_some()
        };
        assert!(!is_free(0) && !is_free(1 << 12));
        lock.release_all();
        assert!(is_free(0) && is_free(1 << 12));
        drop(descriptor);
    }

    #[test]
    fn a_range_that_was_refused_is_not_locked_by_the_lock_that_asked() {
        let image = LockTestImage::new();
        let user = process_user();
        let lock = image.claim(user, 0).expect("free");
        let (start, length) = (1 << 12, 1 << 10);
        let sharer = image.open(true);
        assert!(try_lock(&sharer, LockKind::Shared, start, length).expect("fcntl"));
        lock.add_as_user(user, start, length).expect_err("in use");
        drop(sharer);
        let taken = FileRangeLock::take(image.open(true), start, length).expect("fcntl");
        assert!(taken.is_some(), "the lock that was refused has it");
        lock.add_as_user(user, start, length).expect_err("in use");
    }

    /// Returns a user other than this test's.
    fn other_user() -> u32 {
        process_user().wrapping_add(1000)
    }

    // A reader in another process needs root: see tests/range_lock.rs.
    #[test]
    fn a_reader_of_another_user_refuses_nothing() {
        if process_user() == 0 {
            return;
        }
        let image = LockTestImage::new();
        let reader = image.share(false);
        assert!(!try_lock(&image.open(true), LockKind::Exclusive, 0, 1).expect("fcntl"));
        // For a server of another user, the locks of this process are those of another user.
        let user = other_user();
        let _claimed = image.claim(user, 0).expect("only read");
        image.claim(user, 512).expect_err("taken");
        image.claim(user, 1 << 10).expect("the next part");
        drop(reader);
        image.claim(user, 0).expect_err("taken");
    }

    #[test]
    fn a_reader_of_our_own_refuses() {
        let image = LockTestImage::new();
        let _reader = image.share(false);
        let own = image.claim(process_user(), 0).expect_err("our own user's");
        let pid = format!("process {} (", std::process::id());
        assert!(own.to_string().contains(&pid), "{own}");
    }

    #[test]
    fn a_user_of_the_image_is_refused_by_name() {
        for exclusive in [true, false] {
            let image = LockTestImage::new();
            let vmm = match exclusive {
                true => {
                    let file = image.open(true);
                    assert!(try_lock(&file, LockKind::Exclusive, 0, 0).expect("fcntl"));
                    file
                }
                // QEMU takes such locks on images that it writes.
                false => image.share(true),
            };
            let taken = image.claim(other_user(), 4096).expect_err("in use");
            let pid = format!("process {} (", std::process::id());
            assert!(taken.to_string().contains(&pid), "{taken}");
            let found = find_holders(&image.open(true), ProcLockKind::Range, &EOF);
            assert_eq!((found.visible.len(), found.has_hidden), (1, false));
            assert_eq!(
                (found.visible[0].is_exclusive, found.visible[0].is_writable),
                (exclusive, true)
            );
            drop(vmm);
            image.claim(other_user(), 4096).expect("free again");
        }
    }

    #[test]
    fn shared_locks_of_readers_make_no_holder() {
        let image = LockTestImage::new();
        let _reader = image.share(false);
        assert!(!is_locked(&image.open(false), 0, 0).expect("fcntl"));
        let other = LockTestImage::new();
        let _holder = FileRangeLock::take(other.open(true), 7, 1)
            .expect("fcntl")
            .expect("free");
        assert!(is_locked(&other.open(false), 0, 0).expect("fcntl"));
        assert!(!is_locked(&other.open(false), 8, 0).expect("fcntl"));
    }
}
