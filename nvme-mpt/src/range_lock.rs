//! Locks on ranges of files, by open file description: the kernel drops them with the description,
//! after SIGKILL too, and they exclude other descriptions in this process as in any other.
#![expect(
    unsafe_code,
    reason = "open file description locks are reached through fcntl alone"
)]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use libc::{F_OFD_GETLK, F_OFD_SETLK, F_UNLCK, F_WRLCK, SEEK_SET, c_int, c_short, off_t};

/// An exclusive lock on a range of a file, held until dropped.
#[derive(Debug)]
pub struct RangeLock {
    // The lock belongs to this open file description, hence one description per lock. Rust opens
    // it with O_CLOEXEC, so that no program started later keeps the lock.
    _file: File,
}

impl RangeLock {
    /// Locks `length` bytes from `start` on of a file that was opened for this lock alone, to
    /// read and write. `None`: someone else has part of it locked.
    ///
    /// # Errors
    /// What `fcntl` reports.
    pub fn take(file: File, start: u64, length: u64) -> io::Result<Option<Self>> {
        match fcntl(&file, F_OFD_SETLK, &mut exclusive(start, length)?) {
            Ok(()) => Ok(Some(Self { _file: file })),
            Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }
}

/// Whether someone else has part of `length` bytes from `start` on locked. A length of 0 reaches to
/// the end of what can be locked.
///
/// # Errors
/// What `fcntl` reports.
pub fn is_locked(file: &File, start: u64, length: u64) -> io::Result<bool> {
    let mut lock = exclusive(start, length)?;
    fcntl(file, F_OFD_GETLK, &mut lock)?;
    // The kernel writes the lock that stands in the way, or F_UNLCK for none.
    Ok(c_int::from(lock.l_type) != F_UNLCK)
}

fn exclusive(start: u64, length: u64) -> io::Result<libc::flock> {
    let offset = |value: u64| {
        off_t::try_from(value).map_err(|_| io::Error::from_raw_os_error(libc::EOVERFLOW))
    };
    // F_WRLCK and SEEK_SET are 1 and 0; l_pid must be 0 for open file description locks.
    Ok(libc::flock {
        l_type: F_WRLCK as c_short,
        l_whence: SEEK_SET as c_short,
        l_start: offset(start)?,
        l_len: offset(length)?,
        l_pid: 0,
    })
}

fn fcntl(file: &File, command: c_int, lock: &mut libc::flock) -> io::Result<()> {
    // SAFETY: the descriptor is open for as long as `file` is borrowed; both commands read and
    // write one `struct flock`, which `lock` is, and keep no pointer to it.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), command, std::ptr::from_mut(lock)) };
    if result == -1 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
