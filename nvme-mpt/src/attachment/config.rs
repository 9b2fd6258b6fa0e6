//! Configuration of an attachment, and the facts of the lease that it holds.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use vmm_sys_util::eventfd::EventFd;

use crate::dma::MemoryKinds;
use crate::doorbell::{DoorbellMode, DoorbellStride};
use crate::drive::Drive;
use crate::drive::Reservation;
use crate::host::Mdts;
use crate::interrupt::EventReader;
use crate::learn::Learning;
use crate::lease::Lease;
use crate::limit::RateLimits;
use crate::poller::{PollPolicy, Pollers};

/// Configuration with which a guest controller attaches.
#[derive(Debug)]
pub struct AttachmentConfig {
    /// The drive.
    pub drive: Arc<Drive>,
    /// The part of it that is leased.
    pub lease: Lease,
    /// I/O queue pairs, 1 to [`DoorbellStride::queue_pairs_max`].
    pub queue_pairs: u16,
    /// Queue pairs of the drive that belong to the lease, if any do.
    pub reservation: Option<Reservation>,
    /// Most data of a command; the drive's own if not given.
    pub mdts: Option<Mdts>,
    /// Path of doorbell writes to the pollers.
    pub doorbells: DoorbellMode,
    /// Bytes from one doorbell to the next.
    pub doorbell_stride: DoorbellStride,
    /// Polling of the queues.
    pub poll: PollPolicy,
    /// Choices for all that learns; those [of the drive](Learning::of_drive) are taken when it is opened.
    pub learning: Learning,
    /// The pollers of the process.
    pub pollers: Arc<Pollers>,
    /// Kinds of files that the VM's memory may be in.
    pub memory: MemoryKinds,
    /// Most bytes that may be mapped where memory is pinned; all memory of the host if not given.
    pub memory_limit: Option<u64>,
    /// I/Os and bytes per second, over all queues, and the lease's weight.
    pub rates: RateLimits,
    /// Serial Number to show instead of the lease's own, up to 20 ASCII characters.
    pub serial: Option<String>,
}

/// Parts of a function that outlive the process of its host side.
#[derive(Debug)]
pub struct KeptParts {
    /// File of the doorbells, as [`DoorbellPage::fd`](crate::doorbell::DoorbellPage::fd) gives it.
    pub doorbells: OwnedFd,
    /// File of the live state, as [`LiveState::fd`](crate::live::LiveState::fd) gives it.
    pub live: OwnedFd,
    /// Signalled when there are events.
    pub events: EventFd,
}

/// Source of the parts that a function and its host side share.
#[derive(Debug)]
pub enum FunctionParts {
    /// The function is in this process, and ends with it.
    Own,
    /// The function is in another process, and is new. Its queues have live state.
    Outliving(EventReader),
    /// The function has them from a process that ended. They are untrusted.
    Kept(KeptParts, EventReader),
    /// The function is in this process, and goes on in the next one. Its queues have live state. The files are those of
    /// the process before this one, if there was one, and are untrusted.
    Continued(Option<KeptFiles>),
}

/// Files of a function that goes on in the next process.
#[derive(Debug)]
pub struct KeptFiles {
    /// File of the doorbells, as [`DoorbellPage::fd`](crate::doorbell::DoorbellPage::fd) gives it.
    pub doorbells: OwnedFd,
    /// File of the live state, as [`LiveState::fd`](crate::live::LiveState::fd) gives it.
    pub live: OwnedFd,
}

impl KeptParts {
    /// The same parts, by descriptors of their own.
    ///
    /// # Errors
    /// Returns the kernel's error when there are no descriptors left.
    pub fn share(&self) -> io::Result<Self> {
        Ok(Self {
            doorbells: self.doorbells.try_clone()?,
            live: self.live.try_clone()?,
            events: self.events.try_clone()?,
        })
    }
}
