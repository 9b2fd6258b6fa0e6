//! Eventfds that this process shares with other processes.
#![expect(
    unsafe_code,
    reason = "file status flags are set through fcntl alone, and EventFd has no safe conversion"
)]

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};
use std::time::Duration;

use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::EventFd;

/// Takes a descriptor that a client sent as an eventfd.
///
/// A poller that also serves other guests will write to the descriptor, and must not block. So a pipe or a file is refused,
/// because a write to it can block. The eventfd is made nonblocking, because a write to a blocking one blocks while its
/// counter is full.
///
/// # Errors
/// `EINVAL` for a descriptor that is no eventfd; the kernel's error.
pub fn from_client(fd: OwnedFd) -> io::Result<EventFd> {
    let kind = fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))?;
    if kind.as_os_str() != "anon_inode:[eventfd]" {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    // SAFETY: the descriptor is open, as `fd` owns it; F_GETFL has no argument.
    let flags = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFL) };
    if flags == -1 {
        return Err(io::Error::last_os_error());
    }
    if flags & libc::O_NONBLOCK == 0 {
        // SAFETY: the descriptor is open, as `fd` owns it; F_SETFL takes flags.
        let result =
            unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, flags | libc::O_NONBLOCK) };
        if result == -1 {
            return Err(io::Error::last_os_error());
        }
    }
    // SAFETY: the descriptor is an open eventfd, and `fd` has given up its ownership.
    Ok(unsafe { EventFd::from_raw_fd(fd.into_raw_fd()) })
}

/// Duplicates an eventfd's descriptor, to send it to another process.
///
/// # Errors
/// Returns the kernel's error when there are no descriptors left.
pub fn share(eventfd: &EventFd) -> io::Result<OwnedFd> {
    let fd = eventfd.try_clone()?.into_raw_fd();
    // SAFETY: the descriptor is open, and its owner has just given it up.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Adds one to an eventfd's counter.
///
/// # Errors
/// Returns the kernel's error; `WouldBlock` if the counter is full.
#[inline]
pub fn signal(eventfd: &EventFd) -> io::Result<()> {
    // A real kernel takes a lock here, whose duration the simulation may set.
    #[cfg(simulation)]
    crate::simulation::costs::signals(eventfd.as_raw_fd());
    #[cfg(simulation)]
    crate::simulation::fence_and_act();
    eventfd.write(1)
}

/// Waits until descriptors are ready. If `time` is set, waits for at most `time`, rounded up to milliseconds. Returns the
/// number of filled `events`.
///
/// # Errors
/// Returns the kernel's error; `Interrupted` if a signal ended the wait.
pub fn wait(epoll: &Epoll, time: Option<Duration>, events: &mut [EpollEvent]) -> io::Result<usize> {
    #[cfg(simulation)]
    let waited = crate::simulation::wait_for(time, || match epoll.wait(0, events) {
        Ok(0) => None,
        ended => Some(ended),
    });
    #[cfg(simulation)]
    return waited.unwrap_or(Ok(0));
    #[cfg(not(simulation))]
    {
        // Rounded up, so that a short remaining time does not become a poll without waiting.
        let milliseconds = time.map_or(-1, |time| {
            let milliseconds = time.as_nanos().div_ceil(1_000_000);
            i32::try_from(milliseconds).unwrap_or(i32::MAX)
        });
        epoll.wait(milliseconds, events)
    }
}

/// Returns whether a descriptor is readable now.
///
/// # Errors
/// Returns the kernel's error when there are no descriptors left.
pub fn is_readable(fd: BorrowedFd<'_>) -> io::Result<bool> {
    let epoll = Epoll::new()?;
    let event = EpollEvent::new(EventSet::IN, 0);
    epoll.ctl(ControlOperation::Add, fd.as_raw_fd(), event)?;
    Ok(epoll.wait(0, &mut [EpollEvent::default()])? > 0)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn a_full_counter_makes_no_write_wait() {
        for flags in [0, libc::EFD_NONBLOCK] {
            let theirs = EventFd::new(flags).unwrap();
            let ours = from_client(share(&theirs).unwrap()).unwrap();
            ours.write(u64::MAX - 1).unwrap();
            let error = ours.write(1).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        }
    }

    #[test]
    fn a_descriptor_is_ready_once_it_can_be_read() {
        let eventfd = EventFd::new(libc::EFD_NONBLOCK).unwrap();
        let fd = share(&eventfd).unwrap();
        assert!(!is_readable(fd.as_fd()).unwrap());
        signal(&eventfd).unwrap();
        assert!(is_readable(fd.as_fd()).unwrap() && is_readable(fd.as_fd()).unwrap());
    }

    #[test]
    fn other_descriptors_than_eventfds_are_refused() {
        let (reader, writer) = io::pipe().unwrap();
        let file = File::open("/dev/null").unwrap();
        for fd in [OwnedFd::from(reader), writer.into(), file.into()] {
            assert_eq!(
                from_client(fd).unwrap_err().raw_os_error(),
                Some(libc::EINVAL)
            );
        }
    }
}
