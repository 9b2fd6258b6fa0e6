//! State of a connection on the server's side that requests use in addition to the back end: descriptors, doorbell wakers and
//! vectors.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use nvme_guest::backend::{DoorbellWaker, EventfdDoorbellWaker};
use nvme_guest::interrupt::ClientSignals;
use nvme_guest::rate_limit::RateLimits;
use nvme_guest::{ControllerBackend, DirtyRange, DmaError, EventReader, InterruptVector};
use nvme_mpt_memory::eventfd;
use serde::Serialize;
use thiserror::Error;

use crate::channel::{ChannelError, LeaseChannel};
use crate::message::{DirtyPages, IoDoorbellsReply, RANGES_MAX, VectorChange};
use crate::socket::DESCRIPTORS_MAX;

/// Error of a session.
#[derive(Debug, Error)]
pub enum SessionError {
    /// The VMM violated the protocol, or the connection failed.
    #[error("A VMM's connection ended")]
    Channel(#[from] ChannelError),
    /// The lease has no shared in-flight tracking file, which a function in a VMM's process needs.
    #[error("A lease has no in-flight tracking, which a function in a VMM needs")]
    NoInflightFile,
    /// The kernel's error.
    #[error("Cannot set up the connection of a VMM")]
    Io(#[from] io::Error),
}

/// Lease of a connected VMM, with wakers and dirty pages that the VMM has not fetched yet.
pub(crate) struct BackendRequestHandler<'a> {
    channel: &'a LeaseChannel,
    pub(crate) backend: &'a dyn ControllerBackend,
    /// Sets the rate limits that the VMM requests.
    pub(crate) set_rates: &'a dyn Fn(RateLimits),
    /// Descriptor of the request that is being answered.
    pub(crate) descriptor: Option<OwnedFd>,
    /// Descriptors of the reply that is being made.
    reply_descriptors: Vec<OwnedFd>,
    vectors: Vec<Arc<InterruptVector>>,
    /// Eventfds that wake pollers and that the VMM has, by number.
    wakers: Vec<(u64, EventfdDoorbellWaker)>,
    wakers_created: u64,
    /// Dirty pages that were taken from the log, but not sent to the VMM yet.
    dirty: Vec<DirtyRange>,
    /// Sends interrupts to the VMM's eventfds.
    signals: Arc<ClientSignals>,
}

impl<'a> BackendRequestHandler<'a> {
    pub(crate) fn new(
        channel: &'a LeaseChannel,
        backend: &'a dyn ControllerBackend,
        set_rates: &'a dyn Fn(RateLimits),
        reader: EventReader,
    ) -> Self {
        Self {
            channel,
            backend,
            set_rates,
            descriptor: None,
            reply_descriptors: Vec::new(),
            vectors: backend.shared_parts().vectors,
            wakers: Vec::new(),
            wakers_created: 0,
            dirty: Vec::new(),
            signals: ClientSignals::new(&backend.stats().id, reader),
        }
    }

    /// Sends the reply, with the descriptors that belong to it.
    pub(crate) fn reply(&mut self, reply: &impl Serialize) -> Result<(), ChannelError> {
        let descriptors = std::mem::take(&mut self.reply_descriptors);
        let descriptors: Vec<BorrowedFd<'_>> = descriptors.iter().map(AsFd::as_fd).collect();
        self.channel.send(reply, &descriptors)
    }

    /// Takes the descriptor of a request that comes with `said` descriptors, 0 or 1.
    pub(crate) fn take_descriptor(
        &mut self,
        mut descriptors: Vec<OwnedFd>,
        said: usize,
    ) -> Result<(), ChannelError> {
        let came = descriptors.len();
        if came != said {
            return Err(ChannelError::Descriptors { came, said });
        }
        self.descriptor = descriptors.pop();
        Ok(())
    }

    /// Takes at most [`RANGES_MAX`] ranges of dirty pages.
    pub(crate) fn take_dirty_pages(&mut self) -> Result<DirtyPages, DmaError> {
        if self.dirty.is_empty() {
            self.dirty = self.backend.take_dirty_pages()?;
        }
        let rest = self.dirty.split_off(self.dirty.len().min(RANGES_MAX));
        let ranges = std::mem::replace(&mut self.dirty, rest);
        let more = !self.dirty.is_empty();
        Ok(DirtyPages { ranges, more })
    }

    pub(crate) fn stop_dirty_log(&mut self) {
        self.dirty.clear();
        self.backend.stop_dirty_log();
    }

    /// Carries out a change or a query of a vector.
    pub(crate) fn change_vector(&mut self, number: u16, change: VectorChange) -> bool {
        let descriptor = self.descriptor.take();
        let Some(vector) = self.vectors.get(usize::from(number)) else {
            return false;
        };
        let waited = vector.is_pending();
        match change {
            VectorChange::Connect => match descriptor.map(eventfd::from_client) {
                Some(Ok(eventfd)) => vector.set_client_eventfd(self.signals.eventfd(eventfd)),
                // The vector stays without an eventfd, and keeps interrupts pending.
                _ => {
                    log::warn!("A VMM sent a descriptor that is not an eventfd for vector {number}")
                }
            },
            VectorChange::Disconnect => vector.set_eventfd(None),
            VectorChange::Mask => vector.set_masked(true),
            VectorChange::Unmask => vector.set_masked(false),
            VectorChange::Ask => return waited,
            VectorChange::Clear => {
                vector.clear_pending();
                return false;
            }
        }
        waited && !vector.is_pending()
    }

    /// Returns the doorbells, and adds the eventfds that the VMM does not have yet to the reply's descriptors.
    pub(crate) fn io_doorbells(&mut self) -> io::Result<IoDoorbellsReply> {
        let doorbells = self.backend.io_doorbells();
        let wakers = &doorbells.wakers;
        let is_in_use = |sent: &EventfdDoorbellWaker| {
            wakers.iter().any(|(_, waker)| sent.is_same_poller(waker))
        };
        self.wakers.retain(|(_, sent)| is_in_use(sent));
        let mut answer = IoDoorbellsReply {
            are_buffered: doorbells.are_buffered,
            are_untrapped: doorbells.are_untrapped,
            ..IoDoorbellsReply::default()
        };
        for (doorbell, waker) in &doorbells.wakers {
            let number = match self
                .wakers
                .iter()
                .find(|(_, sent)| sent.is_same_poller(waker))
            {
                Some((number, _)) => *number,
                // The reply is full. The VMM repeats the request to get the remaining eventfds.
                None if answer.new_wakers.len() == DESCRIPTORS_MAX => continue,
                None => {
                    let Some((number, descriptor)) = self.create_waker(waker)? else {
                        continue;
                    };
                    answer.new_wakers.push(number);
                    self.reply_descriptors.push(descriptor);
                    number
                }
            };
            answer.wakers.push((*doorbell, number));
        }
        Ok(answer)
    }

    fn create_waker(&mut self, waker: &DoorbellWaker) -> io::Result<Option<(u64, OwnedFd)>> {
        let Some(eventfd_waker) = waker.to_eventfd_waker()? else {
            return Ok(None);
        };
        let descriptor = eventfd_waker.share()?;
        let number = self.wakers_created;
        self.wakers_created += 1;
        self.wakers.push((number, eventfd_waker));
        Ok(Some((number, descriptor)))
    }
}
