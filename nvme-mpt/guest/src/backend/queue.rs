//! I/O queues as a function requests them from its back end.

use std::io;

use nvme_spec::ids::QueueId;
use nvme_spec::registers::Doorbell;
use serde::{Deserialize, Serialize};

use crate::address::Gpa;
use crate::doorbell::DoorbellBuffer;
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
