//! Errors of an attachment and its queues.

use serde::{Deserialize, Serialize};
use std::io;

use super::MAX_QUEUE_PAIRS;
use crate::address::Gpa;
use crate::deadline::DRAIN_DEADLINE;
use crate::host::HostLeaseError;
use crate::lease::{ByteRange, Extents, LeaseError};
use crate::poller::NoSuchProcessor;
use crate::seam::crossing;
use crate::spec::ids::QueueId;

/// Why a guest controller cannot attach.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// More queue pairs than there can be, or none.
    #[error("{0} I/O queue pairs are not possible; use 1 to {MAX_QUEUE_PAIRS}")]
    InvalidQueuePairs(u16),
    /// A serial number that does not fit its field.
    #[error("Serial number `{0}` is not possible; use 1 to 20 printable ASCII characters")]
    InvalidSerial(String),
    /// A lease whose range has data of another id that is to be wiped.
    #[error(
        "Range {0} has data of another lease, which is to be wiped before it can be attached to"
    )]
    Unwiped(ByteRange),
    /// A lease of several extents that are no whole units.
    #[error(
        "The extents of lease \"{0}\" are no whole units of it; the ledger was changed by hand"
    )]
    Units(String),
    /// Memory whose page faults may wait, with pollers that others wait for.
    #[error(
        "Memory in any kind of file needs pollers of its own, since page faults may stop them: use memory=any \
         with poll=dedicated"
    )]
    MemoryMayWait,
    /// A physical drive pins its VMs' memory, for which page faults may not wait.
    #[error(
        "Drive {drive} is physical and pins the memory of all its VMs, so that memory in any kind of file could \
         hold up others: use memory=resident"
    )]
    MemoryIsPinned {
        /// The drive.
        drive: String,
    },
    /// Somebody uses part of the range without a lease in the same ledger.
    #[error(
        "Range {range} of drive {drive} is locked by a user with no lease in this ledger: a server or a \
         function with another state folder, or a VMM that has the file open; stop it, or choose another range"
    )]
    InUse {
        /// The drive.
        drive: String,
        /// Its extents, in bytes.
        range: Extents,
        /// The processes that have it locked.
        source: io::Error,
    },
    /// Pollers are to be pinned to a processor that is not there.
    #[error(transparent)]
    Processor(#[from] NoSuchProcessor),
    /// The host controller does not give the lease.
    #[error(transparent)]
    Lease(HostLeaseError),
    /// The lease's queue pairs cannot be entered in the ledger.
    #[error(transparent)]
    Ledger(#[from] LeaseError),
    /// The kernel has no memory, no file descriptors or no threads to give.
    #[error("Doorbells, events or a thread cannot be created")]
    Io(#[from] io::Error),
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
    /// Commands in flight did not end in time.
    #[error("Commands of queue {0} are still in flight after {DRAIN_DEADLINE:?}")]
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
