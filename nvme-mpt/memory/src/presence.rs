//! Signs by which other processes see that nothing of this process is left.
//!
//! The kernel closes a process's descriptors in no order on which others could rely. A socket may be closed before the VFIO
//! descriptors of a drive, which still writes to memory of VMs then. So the end of a connection does not tell that its
//! process has ended, and two other descriptors do:
//!
//! - A pidfd is readable once the process has ended. All of its descriptors are closed by then.
//! - A pipe hangs up once nobody has its other end. All that can go on without the process has that end, too: an io_uring with
//!   requests in flight, and the keeper of a drive that rests.
#![expect(unsafe_code, reason = "pidfds have no safe interface in std")]

use std::io::{self, PipeReader, PipeWriter};
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::OnceLock;

/// Number of descriptors that are signs.
pub const SIGNS: usize = 2;

static OF_THIS_PROCESS: OnceLock<Presence> = OnceLock::new();

/// Descriptors that tell others of the end of this process, and of all that it began.
#[derive(Debug)]
pub struct Presence {
    process: OwnedFd,
    hangs_up: PipeReader,
    held: PipeWriter,
}

impl Presence {
    /// Returns the signs of this process, and makes them first if need be. What begins after that is covered by them.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn announce() -> io::Result<&'static Self> {
        if let Some(announced) = OF_THIS_PROCESS.get() {
            return Ok(announced);
        }
        let (hangs_up, held) = io::pipe()?;
        let made = Self {
            process: open_this_process()?,
            hangs_up,
            held,
        };
        Ok(OF_THIS_PROCESS.get_or_init(|| made))
    }

    /// Returns the signs: a pidfd, which becomes readable, and a pipe, which hangs up. Nothing of the process is left once both
    /// have come.
    #[must_use]
    pub fn signs(&self) -> [BorrowedFd<'_>; SIGNS] {
        [self.process.as_fd(), self.hangs_up.as_fd()]
    }
}

/// Returns the descriptor that everything keeps open which can go on without this process. `None` if the process
/// has announced no signs.
#[must_use]
pub fn held() -> Option<BorrowedFd<'static>> {
    OF_THIS_PROCESS.get().map(|presence| presence.held.as_fd())
}

/// Opens a pidfd, which is close-on-exec.
fn open_this_process() -> io::Result<OwnedFd> {
    // SAFETY: the call has no arguments, and cannot fail.
    let own = unsafe { libc::getpid() };
    // SAFETY: the call takes numbers alone.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, own, 0) };
    match RawFd::try_from(fd) {
        // SAFETY: the kernel opened the descriptor for this process, and nothing else knows of it yet.
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
        let first = Presence::announce().unwrap();
        let second = Presence::announce().unwrap();
        assert_eq!(
            first.signs().map(|sign| sign.as_raw_fd()),
            second.signs().map(|sign| sign.as_raw_fd())
        );
        assert!(held().is_some());
    }
}
