//! Errors of an attachment and its queues.

use std::io;

use crate::drive::HostLeaseError;
use crate::host::Mdts;
use crate::lease::{Extents, LeaseError};
use crate::poller::NoSuchProcessor;
use crate::range::{ByteRange, Bytes};

/// Why a guest controller cannot attach.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// More queue pairs than there can be, or none.
    #[error("{queue_pairs} I/O queue pairs are not possible; use 1 to {most}")]
    InvalidQueuePairs {
        /// Number that was asked for.
        queue_pairs: u16,
        /// Most that doorbell mode and stride allow.
        most: u16,
    },
    /// More data of a command than the drive takes, or less than its command set promises.
    #[error("{asked} as most data of a command is not possible on {drive}; use {least} to {most}")]
    InvalidMdts {
        /// The drive.
        drive: String,
        /// Size that was asked for.
        asked: Mdts,
        /// Bytes that the command set promises.
        least: Bytes,
        /// Most that the drive takes.
        most: Mdts,
    },
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
    /// An event-driven poller would not notice stores to mapped doorbells.
    #[error(
        "No store to a mapped doorbell wakes an event-driven poller: use another way of doorbells than doorbells=mapped, \
         or poll= without :event"
    )]
    NoEvents,
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
