//! Errors of a local back end and its queues.

use std::io;

use nvme_guest::host::Mdts;
use nvme_lease::range::{ByteRange, ByteSize};
use nvme_lease::{LeaseError, LeaseExtents};

use crate::drive::HostLeaseError;
use crate::poller::NoSuchProcessor;

/// Reason why a local back end cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum LocalBackendError {
    /// The number of queue pairs is 0 or above the maximum.
    #[error("{queue_pairs} I/O queue pairs are not possible; use 1 to {most}")]
    InvalidQueuePairs {
        /// Number of queue pairs that was requested.
        queue_pairs: u16,
        /// Maximum number of queue pairs for the doorbell mode and the stride.
        most: u16,
    },
    /// The maximum data size of a command is above the drive's, or below the size that its command set promises.
    #[error("{requested} of data in one command is not possible on {drive}; use {least} to {most}")]
    InvalidMdts {
        /// Path of the drive.
        drive: String,
        /// Maximum data size that was requested.
        requested: Mdts,
        /// Minimum data size of a command, promised by the command set.
        least: ByteSize,
        /// Maximum data size of a command on the drive.
        most: Mdts,
    },
    /// The serial number does not fit its field.
    #[error("Serial number `{0}` is not possible; use 1 to 20 printable ASCII characters")]
    InvalidSerial(String),
    /// The lease's range has data of another id that must be wiped.
    #[error(
        "Range {0} has data of another lease, which is to be wiped before it can be attached to"
    )]
    Unwiped(ByteRange),
    /// The lease has several extents, and one of them is not a multiple of the ledger's smallest extent (unit). An address
    /// could not be translated.
    #[error(
        "The extents of lease \"{0}\" are not whole units of it; the ledger was changed by hand"
    )]
    PartialUnits(String),
    /// Page faults in the memory may take long, and other functions use the same pollers.
    #[error(
        "Memory in any kind of file needs pollers of its own, since page faults may stop them: use memory=any \
         with poll=dedicated"
    )]
    MemoryMayWait,
    /// An event-driven poller would miss stores to mapped doorbells.
    #[error(
        "A store to a mapped doorbell does not wake an event-driven poller: use another mode than doorbells=mapped, \
         or poll= without :event"
    )]
    NoEvents,
    /// A physical drive pins its VMs' memory, so page faults must not take long.
    #[error(
        "Drive {drive} is physical and pins the memory of all its VMs, so that memory in any kind of file could \
         hold up others: use memory=resident"
    )]
    MemoryIsPinned {
        /// Path of the drive.
        drive: String,
    },
    /// A process without a lease in this ledger has locked part of the range.
    #[error(
        "Range {range} of drive {drive} is locked by a user with no lease in this ledger: a server or a function \
         with another state directory, or a VMM that has the file open; stop it, or choose another range"
    )]
    InUse {
        /// Path of the drive.
        drive: String,
        /// Extents of the lease, in bytes.
        range: LeaseExtents,
        /// Error that names the processes that hold the lock.
        source: io::Error,
    },
    /// A processor that was named for a poller does not exist.
    #[error(transparent)]
    Processor(#[from] NoSuchProcessor),
    /// The host controller refused the lease.
    #[error(transparent)]
    Lease(HostLeaseError),
    /// The ledger cannot store how many queue pairs are reserved for the lease.
    #[error(transparent)]
    Ledger(#[from] LeaseError),
    /// The kernel has no free memory, descriptors or threads.
    #[error("Doorbells, events or a thread cannot be created")]
    Io(#[from] io::Error),
}
