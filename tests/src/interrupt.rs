//! Interrupt vectors as eventfds.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::time::Duration;

use nvme_mpt::memory::{clock, eventfd};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// One vector that the device signals and the guest waits for.
#[derive(Debug)]
pub struct Interrupt {
    event: EventFd,
    epoll: Epoll,
}

impl Interrupt {
    /// A vector on an eventfd of its own.
    ///
    /// # Errors
    /// When the system has no descriptors left.
    pub fn new() -> io::Result<Self> {
        Self::from_event(EventFd::new(EFD_NONBLOCK)?)
    }

    /// A vector on an eventfd that the device has already. It must be non-blocking.
    ///
    /// # Errors
    /// When the system has no descriptors left.
    pub fn from_event(event: EventFd) -> io::Result<Self> {
        let epoll = Epoll::new()?;
        epoll.ctl(
            ControlOperation::Add,
            event.as_raw_fd(),
            EpollEvent::new(EventSet::IN, 0),
        )?;
        Ok(Self { event, epoll })
    }

    /// The eventfd, for the device's side.
    pub fn event(&self) -> &EventFd {
        &self.event
    }

    /// Takes the signals that came, without waiting: how many since the last time.
    ///
    /// # Errors
    /// When the eventfd cannot be read.
    pub fn take(&self) -> io::Result<u64> {
        match self.event.read() {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(0),
            other => other,
        }
    }

    /// Waits for a signal: how many came, 0 when none did in time.
    ///
    /// # Errors
    /// When the system calls fail.
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
                // A process that was stopped and continued did not wait its time.
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
