//! I/O queues and their doorbells, as a function requests them from its back end.

use std::io;
use std::time::Duration;

use nvme_spec::ids::QueueId;
use nvme_spec::registers::Doorbell;
use serde::{Deserialize, Serialize};

use super::wakers::IoDoorbells;
use crate::address::Gpa;
use crate::doorbell::DoorbellBuffer;
use crate::rate_limit::RateLimits;
use crate::serde_forms;

/// Completion Queue to create.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CqConfig {
    /// Identifier of the queue.
    pub qid: QueueId,
    /// Base address: the queue is physically contiguous, and starts at the start of a memory page.
    pub base: Gpa,
    /// Number of entries, at least 2.
    pub entries: u32,
    /// Number of the vector to raise; `None` if the guest wants no interrupts.
    pub vector: Option<u16>,
}

/// Submission Queue to create.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SqConfig {
    /// Identifier of the queue.
    pub qid: QueueId,
    /// Identifier of the Completion Queue that gets the completions.
    pub cqid: QueueId,
    /// Base address: the queue is physically contiguous, and starts at the start of a memory page.
    pub base: Gpa,
    /// Number of entries, at least 2.
    pub entries: u32,
}

/// Queues that a guest has created, as recorded by its function. From this record and the in-flight tracking, a back end
/// restores the queues.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PersistedQueues {
    /// Completion Queues.
    pub cqs: Vec<CqConfig>,
    /// Submission Queues.
    pub sqs: Vec<SqConfig>,
    /// Pages of Doorbell Buffer Config.
    pub doorbell_buffer: Option<DoorbellBuffer>,
    /// True if every I/O command fails until the next reset.
    pub revoked: bool,
}

impl PersistedQueues {
    /// Returns whether the doorbell's queue exists.
    #[must_use]
    pub fn has_queue(&self, doorbell: Doorbell) -> bool {
        match doorbell {
            Doorbell::SqTail(qid) => self.sqs.iter().any(|sq| sq.qid == qid),
            Doorbell::CqHead(qid) => self.cqs.iter().any(|cq| cq.qid == qid),
        }
    }

    /// Removes a deleted Submission Queue.
    pub fn delete_sq(&mut self, qid: QueueId) {
        self.sqs.retain(|sq| sq.qid != qid);
    }

    /// Removes a deleted Completion Queue.
    pub fn delete_cq(&mut self, qid: QueueId) {
        self.cqs.retain(|cq| cq.qid != qid);
    }
}

/// Interrupt Coalescing and Interrupt Vector Configuration as set by the guest's driver (Base 2.0, sections 5.27.1.6
/// and 5.27.1.7).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CoalescingConfig {
    /// Aggregation Threshold, in completions, zero-based.
    pub threshold_z: u8,
    /// Aggregation Time, in 100 us; 0 turns coalescing off.
    pub time_100us: u8,
    /// Vectors with Coalescing Disable: bit N is vector N.
    pub disabled: u128,
}

/// Error of creating, deleting or changing a queue.
#[derive(Debug, thiserror::Error, Serialize, Deserialize)]
pub enum QueueError {
    /// The identifier is 0 or above the number of queue pairs.
    #[error("Queue {0} is not a valid queue identifier")]
    InvalidQueueId(QueueId),
    /// A queue with this identifier exists already.
    #[error("Queue {0} exists already")]
    AlreadyExists(QueueId),
    /// No queue with this identifier exists.
    #[error("Queue {0} does not exist")]
    NoSuchQueue(QueueId),
    /// The Completion Queue still has a Submission Queue.
    #[error("Completion queue {0} still serves a submission queue")]
    CqInUse(QueueId),
    /// The function has no vector with this number.
    #[error("There is no interrupt vector {0}")]
    InvalidVector(u16),
    /// The size is below 2 entries or above the limit.
    #[error("A queue of {0} entries is not possible")]
    InvalidSize(u32),
    /// The queue or the buffer does not lie in one region of the VM's memory.
    #[error("Memory {gpa}+{len:#x} is not mapped, or not in one region")]
    NotMapped {
        /// Requested start address.
        gpa: Gpa,
        /// Requested length in bytes.
        len: u64,
    },
    /// The address is not aligned to a memory page.
    #[error("Address {0} is not aligned to a memory page")]
    Misaligned(Gpa),
    /// Commands are still in flight. The request takes effect once they have ended, and may be repeated.
    #[error("Commands of queue {0} are still in flight")]
    Timeout(QueueId),
    /// The queue is paused, so no poller polls it.
    #[error("Queue {0} is paused; resume its controller first")]
    Paused(QueueId),
    /// The host controller or the kernel refused.
    #[error("Queue {qid} cannot be created")]
    Host {
        /// Identifier of the queue.
        qid: QueueId,
        /// Error of the kernel or the host controller.
        #[serde(with = "serde_forms::io_error")]
        source: io::Error,
    },
}

/// I/O queues of a function, and their doorbells.
///
/// An implementation by messages carries a [`DoorbellWaker`](super::DoorbellWaker) as the eventfd and a number that names the
/// poller.
pub trait QueueBackend {
    /// Creates a Completion Queue.
    ///
    /// # Errors
    /// All of [`QueueError`] except those of deletion.
    fn create_cq(&self, config: CqConfig) -> Result<(), QueueError>;

    /// Creates a Submission Queue.
    ///
    /// # Errors
    /// All of [`QueueError`] except those of deletion; [`QueueError::NoSuchQueue`] if its Completion Queue does not exist;
    /// [`QueueError::Timeout`] if commands of the Completion Queue are still in flight after `time`. After a timeout, the
    /// Completion Queue takes no commands until the call is repeated with success, or until a reset.
    fn create_sq_within(&self, config: SqConfig, time: Duration) -> Result<(), QueueError>;

    /// Deletes a Submission Queue. On success, every command taken from the queue has its completion.
    ///
    /// # Errors
    /// [`QueueError::NoSuchQueue`]; [`QueueError::Timeout`] as in [`Self::create_sq_within`].
    fn delete_sq_within(&self, qid: QueueId, time: Duration) -> Result<(), QueueError>;

    /// Deletes a Completion Queue that has no Submission Queue.
    ///
    /// # Errors
    /// [`QueueError::NoSuchQueue`], [`QueueError::CqInUse`]; [`QueueError::Timeout`] as in [`Self::create_sq_within`].
    fn delete_cq_within(&self, qid: QueueId, time: Duration) -> Result<(), QueueError>;

    /// Sets Interrupt Coalescing and Coalescing Disable of the I/O queues' vectors.
    fn set_coalescing(&self, coalescing: CoalescingConfig);

    /// Sets the limits of I/Os and bytes per second for all I/O queues together.
    fn set_rate_limits(&self, rates: RateLimits);

    /// Stores the value of a trapped I/O doorbell write, and wakes the queue's poller. Returns whether the queue exists;
    /// if not, nothing is stored.
    ///
    /// Takes no message: an implementation by messages stores to
    /// [`SharedBackendParts::doorbells`](super::SharedBackendParts::doorbells) and signals a waker of [`Self::io_doorbells`].
    fn ring(&self, doorbell: Doorbell, value: u32) -> bool;

    /// Returns the doorbells of the existing I/O queues.
    ///
    /// After a queue was created or deleted, a VMM may take some time to connect a register to its new waker. The VMM then
    /// signals the waker once, so that no earlier doorbell write is missed.
    fn io_doorbells(&self) -> IoDoorbells;

    /// Uses the pages of a Doorbell Buffer Config command until the next reset.
    ///
    /// # Errors
    /// [`QueueError::Misaligned`] and [`QueueError::NotMapped`] for the pages; [`QueueError::Timeout`] as in
    /// [`Self::create_sq_within`].
    fn set_doorbell_buffer_within(
        &self,
        buffer: DoorbellBuffer,
        time: Duration,
    ) -> Result<(), QueueError>;

    /// Announces that the doorbell registers are about to be mapped, so that the guest stores to them without an exit.
    ///
    /// Pollers then check the registers periodically. [`SharedBackendParts::events`](super::SharedBackendParts::events) is
    /// signalled when a doorbell of the admin queue has changed.
    ///
    /// # Errors
    /// Returns the kernel's error if no poller can be started. The call then has no effect.
    fn begin_untrapped_doorbells(&self) -> io::Result<()>;

    /// Ends [`Self::begin_untrapped_doorbells`]: the registers are unmapped, and writes arrive at [`Self::ring`] again.
    fn end_untrapped_doorbells(&self);

    /// Watches the doorbells of the admin queue until the next reset, if doorbells are untrapped. With
    /// [`DoorbellMode::Mapped`](crate::DoorbellMode::Mapped), doorbells are untrapped from the start.
    ///
    /// # Errors
    /// Returns the kernel's error if no poller can be started. If the back end's process is gone and a successor is awaited,
    /// returns `NotConnected`; the successor starts the watch.
    fn watch_admin_doorbells(&self) -> io::Result<()>;
}
