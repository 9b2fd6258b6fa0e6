//! Event loops that can drive a server.

use std::io;
use std::os::fd::RawFd;

use event_manager::{EventOps, Events};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

/// Event loop that watches sockets for a [`VfioUserServer`](crate::VfioUserServer).
pub trait SocketWatcher {
    /// Starts to watch `fd`, and reports each of `events` with `token`.
    ///
    /// # Errors
    ///
    /// Returns the event loop's error.
    fn add(&mut self, fd: RawFd, token: u32, events: EventSet) -> io::Result<()>;

    /// Replaces the events to watch at `fd`.
    ///
    /// # Errors
    ///
    /// Returns the event loop's error.
    fn modify(&mut self, fd: RawFd, token: u32, events: EventSet) -> io::Result<()>;

    /// Stops watching `fd`.
    ///
    /// # Errors
    ///
    /// Returns the event loop's error.
    fn remove(&mut self, fd: RawFd) -> io::Result<()>;
}

/// Event manager of the `event-manager` crate, with the server as a subscriber.
impl SocketWatcher for EventOps<'_> {
    fn add(&mut self, fd: RawFd, token: u32, events: EventSet) -> io::Result<()> {
        Self::add(self, Events::with_data_raw(fd, token, events)).map_err(io::Error::other)
    }

    fn modify(&mut self, fd: RawFd, token: u32, events: EventSet) -> io::Result<()> {
        Self::modify(self, Events::with_data_raw(fd, token, events)).map_err(io::Error::other)
    }

    fn remove(&mut self, fd: RawFd) -> io::Result<()> {
        Self::remove(self, Events::empty_raw(fd)).map_err(io::Error::other)
    }
}

/// Epoll instance of the caller's own event loop. The token becomes the event's `data`.
impl SocketWatcher for &Epoll {
    fn add(&mut self, fd: RawFd, token: u32, events: EventSet) -> io::Result<()> {
        let event = EpollEvent::new(events, token.into());
        self.ctl(ControlOperation::Add, fd, event)
    }

    fn modify(&mut self, fd: RawFd, token: u32, events: EventSet) -> io::Result<()> {
        let event = EpollEvent::new(events, token.into());
        self.ctl(ControlOperation::Modify, fd, event)
    }

    fn remove(&mut self, fd: RawFd) -> io::Result<()> {
        self.ctl(ControlOperation::Delete, fd, EpollEvent::default())
    }
}
