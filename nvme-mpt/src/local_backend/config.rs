//! Configuration of a local back end.

use std::sync::Arc;

use nvme_guest::adaptive::AdaptivePolicies;
use nvme_guest::backend::{PersistedBackendFiles, PersistedBackendParts};
use nvme_guest::dma::MemoryKinds;
use nvme_guest::doorbell::{DoorbellMode, DoorbellStride};
use nvme_guest::host::Mdts;
use nvme_guest::interrupt::EventReader;
use nvme_guest::rate_limit::RateLimits;
use nvme_lease::Lease;
use nvme_lease::range::ByteSize;

use crate::drive::Drive;
use crate::drive::QueuePairReservation;
use crate::poller::{PollPolicy, PollerPool};

/// Configuration of a local back end of one guest controller.
#[derive(Debug)]
pub struct LocalBackendConfig {
    /// Drive of the lease.
    pub drive: Arc<Drive>,
    /// Lease of ranges of the drive.
    pub lease: Lease,
    /// Queue pairs of the drive that are reserved for the lease.
    pub reservation: Option<QueuePairReservation>,
    /// Pollers that run the queues.
    pub pollers: Arc<PollerPool>,
    /// Options of the function.
    pub options: BackendOptions,
}

/// Default number of I/O queue pairs: one for each vCPU of most guests. A queue pair that the guest does not create costs
/// nothing.
const DEFAULT_QUEUE_PAIRS: u16 = 16;

/// Options of a function for its back end.
#[derive(Clone, Debug, PartialEq)]
pub struct BackendOptions {
    /// Maximum number of I/O queue pairs for the guest: 1 to [`DoorbellStride::queue_pairs_max`].
    pub queue_pairs: u16,
    /// Maximum data transfer size of a command; `None` for that of the drive.
    pub mdts: Option<Mdts>,
    /// Way in which doorbell writes reach the pollers.
    pub doorbells: DoorbellMode,
    /// Distance between doorbell registers.
    pub doorbell_stride: DoorbellStride,
    /// Polling policy of the queues.
    pub poll: PollPolicy,
    /// Choices of the adaptive policies; those [of the drive](AdaptivePolicies::for_drive) are set when the drive is opened.
    pub adaptive: AdaptivePolicies,
    /// Kinds of files that may back the VM's memory.
    pub memory: MemoryKinds,
    /// Maximum bytes of VM memory that may be mapped if memory is pinned; `None` for all memory of the host.
    pub memory_limit: Option<ByteSize>,
    /// Limits of I/Os and bytes per second for all queues of the function together, and the lease's weight.
    pub rates: RateLimits,
    /// Serial Number to report instead of the lease's own, up to 20 ASCII characters.
    pub serial: Option<String>,
}

impl Default for BackendOptions {
    fn default() -> Self {
        Self {
            queue_pairs: DEFAULT_QUEUE_PAIRS,
            mdts: None,
            doorbells: DoorbellMode::default(),
            doorbell_stride: DoorbellStride::default(),
            poll: PollPolicy::default(),
            adaptive: AdaptivePolicies::default(),
            memory: MemoryKinds::default(),
            memory_limit: None,
            rates: RateLimits::default(),
            serial: None,
        }
    }
}

impl BackendOptions {
    /// Returns [`Self::queue_pairs`], or fewer if the function offers a Doorbell Buffer, whose one page limits the number of
    /// doorbells.
    #[must_use]
    pub fn bounded_queue_pairs(&self) -> u16 {
        let most = self.doorbell_stride.queue_pairs_max(self.doorbells);
        self.queue_pairs.min(most)
    }
}

/// Source of the parts that a function and its back end share.
#[derive(Debug)]
pub enum SharedBackendPartsSource {
    /// The function is in this process and ends with it.
    Own,
    /// The function is new and in another process. Its queues have in-flight tracking.
    Outliving(EventReader),
    /// The function survived the process of its previous back end and passes on the parts of that back end. They are untrusted.
    Persisted(PersistedBackendParts, EventReader),
    /// The function is in this process and continues in the next one. Its queues have in-flight tracking. The files come from
    /// the predecessor, if there was one, and are untrusted.
    Continued(Option<PersistedBackendFiles>),
}
