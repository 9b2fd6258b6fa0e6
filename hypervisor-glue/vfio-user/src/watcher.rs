//! Event loops that a server can be part of.

use std::io;
use std::os::fd::RawFd;

use event_manager::{EventOps, Events};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

/// Event loop that watches sockets for a [`Server`](crate::Server).
pub trait Watcher {
    /// Reports `token` from now on whenever one of `events` happens at `fd`.
    ///
    /// # Errors
    ///
    /// Returns the event loop's error.
    fn add(&mut self, fd: RawFd, token: u32, events: EventSet) -> io::Result<()>;

    /// Waits for `events` at `fd` instead of those before.
    ///
    /// # Errors
    ///
    /// Returns the event loop's error.
    fn modify(&mut self, fd: RawFd, token: u32, events: EventSet) -> io::Result<()>;

    /// Watches `fd` no more.
    ///
    /// # Errors
    ///
    /// Returns the event loop's error.
    fn remove(&mut self, fd: RawFd) -> io::Result<()>;
}

/// An event manager of `event-manager`, which a server is a subscriber of.
impl Watcher for EventOps<'_> {
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

/// An epoll instance of a loop of one's own. The token is the event's data.
impl Watcher for &Epoll {
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
