//! Errors of a physical controller.

use std::io;

use nvme_driver::DriverError;
use nvme_mpt::drive::HostNamespace;
use nvme_spec::ids::{Nsid, QueueId};
use nvme_spec::opcode::AdminOpcode;
use nvme_spec::registers::Csts;
use nvme_spec::status::Status;

/// Reason in the log for giving up a drive that was removed.
pub(super) const REMOVED: &str = "it was removed, or lost its power";

/// Reason in the log for giving up a drive whose function the host wants back.
pub(super) const REMOVAL_REQUESTED: &str = "the host asks for it back";

/// Error of a physical controller.
#[derive(Debug, thiserror::Error)]
pub enum ControllerError {
    /// The function was removed, or has lost power.
    #[error("The drive is gone: its registers read as all ones")]
    Gone,
    /// The host asks for the function, because the function is being removed or unbound. The caller must release it.
    #[error("The host asks for the drive back")]
    RemovalRequested,
    /// The drive is being closed, and is no longer waited for.
    #[error("The drive was not ready when it was closed")]
    Closing,
    /// The controller has lost its commands: its link is down, or the kernel or another party has reset it. The drive monitor
    /// waits until the drive answers, and resets it.
    #[error(
        "The drive has lost its commands: its registers read as all ones, or another program has reset it; try again"
    )]
    Lost,
    /// A reset of the drive is pending or in progress.
    #[error("The drive is being reset; try again")]
    Resetting,
    /// The drive does not support the NVM Command Set.
    #[error("The drive does not support the NVM Command Set (CAP.CSS)")]
    NoNvmCommandSet,
    /// The drive's minimum page size is larger than that of guests.
    #[error("The drive needs memory pages of {min} bytes (CAP.MPSMIN); only 4096 are supported")]
    MemoryPageSize {
        /// Minimum page size of the drive in bytes.
        min: u64,
    },
    /// The controller did not reach a state within the time that the specification allows.
    #[error("The drive did not {state} within {seconds} s; its status is {csts:?}")]
    StateTimeout {
        /// State that was expected.
        state: &'static str,
        /// Timeout in seconds.
        seconds: u64,
        /// Last value of Controller Status (CSTS).
        csts: Csts,
    },
    /// The controller reports a fatal status (CSTS.CFS).
    #[error("The drive reports a fatal error (CSTS.CFS)")]
    Fatal,
    /// An admin command timed out.
    #[error("The drive did not complete the admin command {opcode} within {seconds} s")]
    AdminTimeout {
        /// Opcode of the command.
        opcode: AdminOpcode,
        /// Timeout in seconds.
        seconds: u64,
    },
    /// An admin command failed.
    #[error("The drive refuses the admin command {opcode}: {status}")]
    Admin {
        /// Opcode of the command.
        opcode: AdminOpcode,
        /// Status of the command's completion.
        status: Status,
    },
    /// The drive refused an I/O Submission Queue, and deleting its Completion Queue failed.
    #[error(
        "The drive refuses queue pair {qid}, and does not delete its Completion Queue; it has the pair again after a reset"
    )]
    QueueNotDeleted {
        /// Identifier of the queue pair.
        qid: QueueId,
    },
    /// The drive grants no I/O queues, or its BAR0 has no doorbells for an I/O queue.
    #[error("The drive has no I/O queue pair to use")]
    NoQueuePairs,
    /// The namespace cannot be leased.
    #[error(
        "Namespace {nsid} of the drive cannot be used: {reason}; use another namespace or drive, one with blocks of 512 or \
         4096 bytes without metadata, or, if its data is not needed, format it so with `nvme format`, which erases it"
    )]
    Namespace {
        /// Identifier of the namespace.
        nsid: Nsid,
        /// Reason why the namespace cannot be leased.
        reason: &'static str,
    },
    /// Memory for queues cannot be allocated, or it cannot be mapped for the drive.
    #[error("Cannot allocate memory for the drive's queues")]
    Memory(#[source] io::Error),
    /// The drive cannot be handed over to a successor, or it cannot be restored from a predecessor.
    #[error("The drive cannot be handed over: {0}")]
    HandOver(&'static str),
    /// The function's bus mastering cannot be set, or the function cannot be reset.
    #[error("The drive's PCI function cannot be configured")]
    Function(#[source] io::Error),
    /// The drive monitor cannot be started.
    #[error("The drive's monitor cannot be started")]
    Monitor(#[source] io::Error),
    /// A Flush failed.
    #[error("Namespace {} of the drive cannot be flushed: {status}", .namespace.nsid)]
    Flush {
        /// Namespace of the Flush.
        namespace: HostNamespace,
        /// Status of the Flush's completion.
        status: Status,
    },
}

impl From<DriverError> for ControllerError {
    fn from(error: DriverError) -> Self {
        match error {
            DriverError::Gone => Self::Gone,
            DriverError::RemovalRequested => Self::RemovalRequested,
            DriverError::Closing => Self::Closing,
            DriverError::Lost => Self::Lost,
            DriverError::NoNvmCommandSet => Self::NoNvmCommandSet,
            DriverError::MemoryPageSize { min } => Self::MemoryPageSize { min },
            DriverError::StateTimeout {
                state,
                seconds,
                csts,
            } => Self::StateTimeout {
                state,
                seconds,
                csts,
            },
            DriverError::Fatal => Self::Fatal,
            DriverError::AdminTimeout { opcode, seconds } => Self::AdminTimeout { opcode, seconds },
            DriverError::Admin { opcode, status } => Self::Admin { opcode, status },
            DriverError::QueueOutsideMemory => Self::Memory(io::Error::other(error)),
            DriverError::InvalidPosition => {
                Self::HandOver("its admin queues have no such positions")
            }
        }
    }
}

impl From<ControllerError> for io::Error {
    fn from(error: ControllerError) -> Self {
        let kind = match &error {
            ControllerError::Gone | ControllerError::RemovalRequested | ControllerError::Fatal => {
                io::ErrorKind::NotConnected
            }
            ControllerError::Lost | ControllerError::Resetting => io::ErrorKind::ResourceBusy,
            ControllerError::StateTimeout { .. } | ControllerError::AdminTimeout { .. } => {
                io::ErrorKind::TimedOut
            }
            ControllerError::Memory(source) | ControllerError::Function(source) => source.kind(),
            _ => io::ErrorKind::Other,
        };
        Self::new(kind, error)
    }
}
