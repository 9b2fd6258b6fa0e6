//! Descriptors by which other processes detect that nothing of this process runs any more.
//!
//! The kernel closes a process's descriptors in no guaranteed order. A socket may be closed before the VFIO descriptors of
//! a drive, which can then still write to VM memory. So the end of a connection does not prove that the process has ended.
//! Two other descriptors do:
//!
//! - A pidfd is readable once the process has ended. All of its descriptors are closed by then.
//! - A pipe hangs up when all copies of its other end are closed. Everything that can outlive the process holds a copy:
//!   an io_uring with requests in flight, and the supervisor process that keeps the descriptors of a quiescent drive.
#![expect(unsafe_code, reason = "pidfds have no safe interface in std")]

use std::io::{self, PipeReader, PipeWriter};
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::OnceLock;

/// Number of descriptors that other processes watch.
pub const LIVENESS_FDS: usize = 2;

static THIS_PROCESS: OnceLock<ProcessLiveness> = OnceLock::new();

/// A pidfd and a pipe, by which other processes detect that this process has ended, with everything that it started.
#[derive(Debug)]
pub struct ProcessLiveness {
    process: OwnedFd,
    hangup_reader: PipeReader,
    hangup_writer: PipeWriter,
}

impl ProcessLiveness {
    /// Returns the descriptors of this process. The first call creates them. They also cover I/O and processes that start
    /// later.
    ///
    /// # Errors
    /// Returns the kernel's error.
    pub fn open() -> io::Result<&'static Self> {
        if let Some(announced) = THIS_PROCESS.get() {
            return Ok(announced);
        }
        let (hangup_reader, hangup_writer) = io::pipe()?;
        let made = Self {
            process: open_pidfd()?,
            hangup_reader,
            hangup_writer,
        };
        Ok(THIS_PROCESS.get_or_init(|| made))
    }

    /// Returns the descriptors to watch: a pidfd, which becomes readable, and a pipe, which hangs up. After both events,
    /// nothing of the process runs any more.
    #[must_use]
    pub fn fds(&self) -> [BorrowedFd<'_>; LIVENESS_FDS] {
        [self.process.as_fd(), self.hangup_reader.as_fd()]
    }
}

/// Returns the end of the pipe of which everything that can outlive this process must hold a copy; `None` if
/// [`ProcessLiveness::open`] was not called.
#[must_use]
pub fn hangup_writer() -> Option<BorrowedFd<'static>> {
    THIS_PROCESS
        .get()
        .map(|presence| presence.hangup_writer.as_fd())
}

/// Opens a pidfd of this process that is close-on-exec.
fn open_pidfd() -> io::Result<OwnedFd> {
    // SAFETY: the call has no arguments, and cannot fail.
    let own = unsafe { libc::getpid() };
    // SAFETY: the call only takes numbers.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, own, 0) };
    match RawFd::try_from(fd) {
        // SAFETY: the kernel opened the descriptor for this process, and nothing else uses it yet.
        Ok(fd) if fd >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn the_signs_of_a_process_are_the_same_at_each_time() {
        let first = ProcessLiveness::open().unwrap();
        let second = ProcessLiveness::open().unwrap();
        assert_eq!(
            first.fds().map(|sign| sign.as_raw_fd()),
            second.fds().map(|sign| sign.as_raw_fd())
        );
        assert!(hangup_writer().is_some());
    }
}
