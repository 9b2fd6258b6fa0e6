//! I/O queues, as a function asks its host side for them.

use std::io;

use serde::{Deserialize, Serialize};

use crate::address::Gpa;
use crate::crossing;
use crate::doorbell::DoorbellBuffer;
use crate::spec::ids::QueueId;
use crate::spec::registers::Doorbell;

/// A Completion Queue to create.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CqConfig {
    /// Its identifier.
    pub qid: QueueId,
    /// Base: physically contiguous, at the start of a memory page.
    pub base: Gpa,
    /// Its entries, at least 2.
    pub entries: u32,
    /// Number of the vector to raise; `None` if the guest wants no interrupts.
    pub vector: Option<u16>,
}

/// A Submission Queue to create.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SqConfig {
    /// Its identifier.
    pub qid: QueueId,
    /// The Completion Queue that it completes to.
    pub cqid: QueueId,
    /// Base: physically contiguous, at the start of a memory page.
    pub base: Gpa,
    /// Its entries, at least 2.
    pub entries: u32,
}

/// Queues that a guest has created, as its function remembers them. With the live state, they tell all about them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptQueues {
    /// Completion Queues.
    pub cqs: Vec<CqConfig>,
    /// Submission Queues.
    pub sqs: Vec<SqConfig>,
    /// The pages of Doorbell Buffer Config.
    pub doorbell_buffer: Option<DoorbellBuffer>,
    /// Every I/O command fails until the next reset.
    pub revoked: bool,
}

impl KeptQueues {
    /// Returns whether the queue of a doorbell exists.
    #[must_use]
    pub fn has(&self, doorbell: Doorbell) -> bool {
        match doorbell {
            Doorbell::SqTail(qid) => self.sqs.iter().any(|sq| sq.qid == qid),
            Doorbell::CqHead(qid) => self.cqs.iter().any(|cq| cq.qid == qid),
        }
    }

    /// Notes that a Submission Queue is deleted.
    pub fn delete_sq(&mut self, qid: QueueId) {
        self.sqs.retain(|sq| sq.qid != qid);
    }

    /// Notes that a Completion Queue is deleted.
    pub fn delete_cq(&mut self, qid: QueueId) {
        self.cqs.retain(|cq| cq.qid != qid);
    }
}

/// Why a queue cannot be created, deleted or changed.
#[derive(Debug, thiserror::Error, Serialize, Deserialize)]
pub enum QueueError {
    /// The identifier is 0 or larger than the number of queue pairs.
    #[error("There can be no queue {0}")]
    InvalidQueueId(QueueId),
    /// A queue with this identifier exists.
    #[error("Queue {0} exists already")]
    AlreadyExists(QueueId),
    /// No queue with this identifier exists.
    #[error("Queue {0} does not exist")]
    NoSuchQueue(QueueId),
    /// The Completion Queue still has a Submission Queue.
    #[error("Completion queue {0} still serves a submission queue")]
    CqInUse(QueueId),
    /// The function has no vector of this number.
    #[error("There is no interrupt vector {0}")]
    InvalidVector(u16),
    /// Fewer than 2 entries, or more than the limit.
    #[error("A queue of {0} entries is not possible")]
    InvalidSize(u32),
    /// The queue or the buffer does not lie in one region of the VM's memory.
    #[error("Memory {gpa}+{len:#x} is not mapped, or not in one region")]
    NotMapped {
        /// Start that was asked for.
        gpa: Gpa,
        /// Its length in bytes.
        len: u64,
    },
    /// The address is not that of a memory page.
    #[error("Address {0} is not aligned to a memory page")]
    Misaligned(Gpa),
    /// Commands are in flight still. What was asked for is complete once they have ended, and may be asked for again.
    #[error("Commands of queue {0} are still in flight")]
    Timeout(QueueId),
    /// It rests, and nobody polls it.
    #[error("Queue {0} is paused; resume its controller first")]
    Paused(QueueId),
    /// The host controller, or the kernel, refused.
    #[error("Queue {qid} cannot be created")]
    Host {
        /// The queue.
        qid: QueueId,
        /// Kernel's error.
        #[serde(with = "crossing::io_error")]
        source: io::Error,
    },
}
