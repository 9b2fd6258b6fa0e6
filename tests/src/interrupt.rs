//! Interrupt vectors as eventfds.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::time::Duration;

use nvme_mpt_memory::{clock, eventfd};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// An interrupt vector: the device signals it, and the guest waits for it.
#[derive(Debug)]
pub struct Interrupt {
    event: EventFd,
    epoll: Epoll,
}

impl Interrupt {
    /// Creates a vector with a new eventfd.
    ///
    /// # Errors
    /// The system has no descriptors left.
    pub fn new() -> io::Result<Self> {
        Self::from_event(EventFd::new(EFD_NONBLOCK)?)
    }

    /// Creates a vector from the device's eventfd, which must be non-blocking.
    ///
    /// # Errors
    /// The system has no descriptors left.
    pub fn from_event(event: EventFd) -> io::Result<Self> {
        let epoll = Epoll::new()?;
        epoll.ctl(
            ControlOperation::Add,
            event.as_raw_fd(),
            EpollEvent::new(EventSet::IN, 0),
        )?;
        Ok(Self { event, epoll })
    }

    /// Returns the eventfd for the device.
    pub fn event(&self) -> &EventFd {
        &self.event
    }

    /// Takes pending signals without waiting. Returns their number.
    ///
    /// # Errors
    /// The eventfd cannot be read.
    pub fn take(&self) -> io::Result<u64> {
        match self.event.read() {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(0),
            other => other,
        }
    }

    /// Waits for signals. Returns the number of signals; 0 after a timeout.
    ///
    /// # Errors
    /// The system calls fail.
    pub fn wait(&self, timeout: Duration) -> io::Result<u64> {
        let deadline = clock::monotonic() + timeout;
        loop {
            let left = deadline.saturating_sub(clock::monotonic());
            match eventfd::wait(&self.epoll, Some(left), &mut [EpollEvent::default()]) {
                Ok(0) => return Ok(0),
                Ok(_) => match self.take()? {
                    0 => {}
                    signals => return Ok(signals),
                },
                // If the process was stopped and continued, the call may return early, so wait again.
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}

impl AsRawFd for Interrupt {
    fn as_raw_fd(&self) -> RawFd {
        self.event.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_are_counted_and_taken_once() {
        let interrupt = Interrupt::new().unwrap();
        assert_eq!(interrupt.wait(Duration::ZERO).unwrap(), 0);
        interrupt.event().write(1).unwrap();
        interrupt.event().write(1).unwrap();
        assert_eq!(interrupt.wait(Duration::from_secs(5)).unwrap(), 2);
        assert_eq!(interrupt.take().unwrap(), 0);
    }
}
