//! Configuration of an attachment.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use nvme_lease::Lease;
use vmm_sys_util::eventfd::EventFd;

use crate::dma::MemoryKinds;
use crate::doorbell::{DoorbellMode, DoorbellStride};
use crate::drive::Drive;
use crate::drive::QueuePairReservation;
use crate::host::Mdts;
use crate::interrupt::EventReader;
use crate::learn::AdaptivePolicies;
use crate::limit::RateLimits;
use crate::poller::{PollPolicy, PollerPool};

/// Configuration for attaching a guest controller.
#[derive(Debug)]
pub struct LocalBackendConfig {
    /// Drive of the lease.
    pub drive: Arc<Drive>,
    /// Lease of a part of the drive.
    pub lease: Lease,
    /// Number of I/O queue pairs: 1 to [`DoorbellStride::queue_pairs_max`].
    pub queue_pairs: u16,
    /// Queue pairs of the drive that are reserved for the lease.
    pub reservation: Option<QueuePairReservation>,
    /// Maximum data transfer size of a command; the drive's own if not given.
    pub mdts: Option<Mdts>,
    /// Path of doorbell writes to the pollers.
    pub doorbells: DoorbellMode,
    /// Distance between doorbells.
    pub doorbell_stride: DoorbellStride,
    /// Polling policy of the queues.
    pub poll: PollPolicy,
    /// Choices of the adaptive policies; those [of the drive](AdaptivePolicies::of_drive) are set when the drive is opened.
    pub learning: AdaptivePolicies,
    /// Pollers of the process.
    pub pollers: Arc<PollerPool>,
    /// Kinds of files that may hold the VM's memory.
    pub memory: MemoryKinds,
    /// Maximum bytes that may be mapped if memory is pinned; all memory of the host if not given.
    pub memory_limit: Option<u64>,
    /// Limits of I/Os and bytes per second for all queues together, and the lease's weight.
    pub rates: RateLimits,
    /// Serial Number to report instead of the lease's own, up to 20 ASCII characters.
    pub serial: Option<String>,
}

/// Parts of a function that outlive the back end's process.
#[derive(Debug)]
pub struct PersistedBackendParts {
    /// File of the doorbells, from [`DoorbellPage::fd`](crate::doorbell::DoorbellPage::fd).
    pub doorbells: OwnedFd,
    /// File of the in-flight tracking, from [`LiveState::fd`](crate::live::InflightFile::fd).
    pub live: OwnedFd,
    /// Eventfd that is signalled when there are events.
    pub events: EventFd,
}

/// Source of the parts that a function and its back end share.
#[derive(Debug)]
pub enum SharedPartsSource {
    /// The function is in this process and ends with it.
    Own,
    /// The function is new and in another process. Its queues have in-flight tracking.
    Outliving(EventReader),
    /// The function kept the parts of a process that ended. They are untrusted.
    Kept(PersistedBackendParts, EventReader),
    /// The function is in this process and continues in the next one. Its queues have in-flight tracking. The files come from
    /// the old server, if there was one, and are untrusted.
    Continued(Option<PersistedBackendFiles>),
}

/// Files of a function that continues in the next process.
#[derive(Debug)]
pub struct PersistedBackendFiles {
    /// File of the doorbells, from [`DoorbellPage::fd`](crate::doorbell::DoorbellPage::fd).
    pub doorbells: OwnedFd,
    /// File of the in-flight tracking, from [`LiveState::fd`](crate::live::InflightFile::fd).
    pub live: OwnedFd,
}

impl PersistedBackendParts {
    /// Duplicates the descriptors of the parts.
    ///
    /// # Errors
    /// Returns the kernel's error if no descriptors are left.
    pub fn share(&self) -> io::Result<Self> {
        Ok(Self {
            doorbells: self.doorbells.try_clone()?,
            live: self.live.try_clone()?,
            events: self.events.try_clone()?,
        })
    }
}
