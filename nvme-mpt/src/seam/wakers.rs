//! Wakers of doorbell registers. A register whose doorbell is in the Doorbell Buffer (Base 2.0, section B.5) only
//! wakes a poller: the guest writes it when EventIdx asked for it, after it has stored the value in the buffer.

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use vmm_sys_util::eventfd::EventFd;

use crate::memory::eventfd;
use crate::park::{ForeignBell, Waker};
use crate::spec::registers::Doorbell;

/// Waker of a queue's poller.
#[derive(Clone)]
pub struct DoorbellWaker(Bell);

#[derive(Clone)]
enum Bell {
    Poller(Arc<Waker>),
    Eventfd(Arc<EventFd>),
}

/// Wakes the poller that reads the eventfd. Wakers of one poller are made of one `Arc`.
impl From<Arc<EventFd>> for DoorbellWaker {
    fn from(eventfd: Arc<EventFd>) -> Self {
        Self(Bell::Eventfd(eventfd))
    }
}

impl DoorbellWaker {
    /// The waker of a poller of this process.
    pub(crate) fn of_poller(waker: Arc<Waker>) -> Self {
        Self(Bell::Poller(waker))
    }

    /// Wakes the poller when it is signalled. A poller that is awake is signalled in vain.
    #[must_use]
    pub fn eventfd(&self) -> &EventFd {
        match &self.0 {
            Bell::Poller(waker) => waker.eventfd(),
            Bell::Eventfd(eventfd) => eventfd,
        }
    }

    /// Makes a bell for another process; `None` if the poller is another process's.
    ///
    /// # Errors
    /// Returns the kernel's error when there are no descriptors left.
    pub fn foreign(&self) -> io::Result<Option<ForeignDoorbellWaker>> {
        match &self.0 {
            Bell::Poller(waker) => Ok(Some(ForeignDoorbellWaker(ForeignBell::new(waker.clone())?))),
            Bell::Eventfd(_) => Ok(None),
        }
    }
}

/// Bell that another process rings to wake a queue's poller. It cannot silence the bells of others.
#[derive(Debug)]
pub struct ForeignDoorbellWaker(ForeignBell);

impl ForeignDoorbellWaker {
    /// Returns a descriptor to send to the other process, which writes to it.
    ///
    /// # Errors
    /// Returns the kernel's error when there are no descriptors left.
    pub fn share(&self) -> io::Result<OwnedFd> {
        eventfd::share(self.0.eventfd())
    }

    /// Returns whether it wakes the same poller.
    #[must_use]
    pub fn is_of(&self, waker: &DoorbellWaker) -> bool {
        matches!(&waker.0, Bell::Poller(waker) if Arc::ptr_eq(waker, self.0.waker()))
    }
}

/// Wakers are equal if both wake the same poller.
impl PartialEq for DoorbellWaker {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self.eventfd(), other.eventfd())
    }
}

impl fmt::Debug for DoorbellWaker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("DoorbellWaker")
            .field(self.eventfd())
            .finish()
    }
}

/// Doorbells of the I/O queues that exist, as of one moment.
#[derive(Clone, Debug, Default)]
pub struct IoDoorbells {
    /// True if they are in a Doorbell Buffer. Then a write to a register needs no value: it only wakes the poller.
    pub are_buffered: bool,
    /// True if the guest may store to the registers without an exit, see [`begin_silent_doorbells`](super::HostSide::begin_silent_doorbells).
    pub are_silent: bool,
    /// Each doorbell, with the waker of its queue's poller.
    pub wakers: Vec<(Doorbell, DoorbellWaker)>,
}

impl IoDoorbells {
    /// Returns whether there are I/O queues whose doorbells are the registers alone.
    #[must_use]
    pub fn are_registers(&self) -> bool {
        !self.are_buffered && !self.wakers.is_empty()
    }
}
