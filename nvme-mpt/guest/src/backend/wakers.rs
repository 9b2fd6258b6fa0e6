//! Wakers of doorbell registers.
//!
//! With a Doorbell Buffer (Base 2.0, section B.5), a register write carries no value and only wakes a poller. The guest
//! first stores the value in the buffer, then writes the register if EventIdx asks for it.

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use nvme_mpt_memory::eventfd;
use nvme_spec::registers::Doorbell;
use vmm_sys_util::eventfd::EventFd;

use crate::park::{EventfdWaker, PollerWaker};

/// Waker of the poller that polls a queue.
#[derive(Clone)]
pub struct DoorbellWaker(DoorbellWakerKind);

#[derive(Clone)]
enum DoorbellWakerKind {
    Poller(Arc<PollerWaker>),
    Eventfd(Arc<EventFd>),
}

/// Creates a waker for the poller that reads the eventfd. Wakers of the same poller must share one `Arc`.
impl From<Arc<EventFd>> for DoorbellWaker {
    fn from(eventfd: Arc<EventFd>) -> Self {
        Self(DoorbellWakerKind::Eventfd(eventfd))
    }
}

impl DoorbellWaker {
    /// Creates the waker of a poller in this process.
    pub fn for_poller(waker: Arc<PollerWaker>) -> Self {
        Self(DoorbellWakerKind::Poller(waker))
    }

    /// Returns the eventfd that wakes the poller. Signalling an awake poller has no effect.
    #[must_use]
    pub fn eventfd(&self) -> &EventFd {
        match &self.0 {
            DoorbellWakerKind::Poller(waker) => waker.eventfd(),
            DoorbellWakerKind::Eventfd(eventfd) => eventfd,
        }
    }

    /// Returns a waker for another process to use; `None` if the poller is in another process.
    ///
    /// # Errors
    /// Returns the kernel's error if no descriptors are left.
    pub fn to_eventfd_waker(&self) -> io::Result<Option<EventfdDoorbellWaker>> {
        match &self.0 {
            DoorbellWakerKind::Poller(waker) => Ok(Some(EventfdDoorbellWaker(EventfdWaker::new(
                waker.clone(),
            )?))),
            DoorbellWakerKind::Eventfd(_) => Ok(None),
        }
    }
}

/// Waker that another process signals to wake a queue's poller. The process cannot suppress wake-ups by others.
#[derive(Debug)]
pub struct EventfdDoorbellWaker(EventfdWaker);

impl EventfdDoorbellWaker {
    /// Returns a descriptor for the other process to write to.
    ///
    /// # Errors
    /// Returns the kernel's error if no descriptors are left.
    pub fn share(&self) -> io::Result<OwnedFd> {
        eventfd::share(self.0.eventfd())
    }

    /// Returns whether this and `waker` wake the same poller.
    #[must_use]
    pub fn is_same_poller(&self, waker: &DoorbellWaker) -> bool {
        matches!(&waker.0, DoorbellWakerKind::Poller(waker) if Arc::ptr_eq(waker, self.0.waker()))
    }
}

/// Two wakers are equal if they wake the same poller.
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

/// Doorbells of the I/O queues that exist at one moment.
#[derive(Clone, Debug, Default)]
pub struct IoDoorbells {
    /// True if the doorbells are in a Doorbell Buffer. A register write then carries no value and only wakes the poller.
    pub are_buffered: bool,
    /// True if the guest may store to the registers without an exit, see
    /// [`begin_untrapped_doorbells`](super::QueueBackend::begin_untrapped_doorbells).
    pub are_untrapped: bool,
    /// Each doorbell, with the waker of its queue's poller.
    pub wakers: Vec<(Doorbell, DoorbellWaker)>,
}

impl IoDoorbells {
    /// Returns whether doorbell values arrive only in the registers: I/O queues exist, and the guest has set up no Doorbell
    /// Buffer.
    #[must_use]
    pub fn uses_registers(&self) -> bool {
        !self.are_buffered && !self.wakers.is_empty()
    }
}
