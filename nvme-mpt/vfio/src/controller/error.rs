//! Errors of a physical controller.

use std::io;

use nvme_mpt::drive::HostNamespace;
use nvme_mpt::spec::ids::{Nsid, QueueId};
use nvme_mpt::spec::opcode::AdminOpcode;
use nvme_mpt::spec::registers::Csts;
use nvme_mpt::spec::status::Status;

/// Cause for giving up a drive that is there no more.
pub(super) const REMOVED: &str = "it was removed, or lost its power";

/// Cause for giving up a drive that the host wants.
pub(super) const WANTED_BACK: &str = "the host asks for it back";

/// Errors of a physical controller.
#[derive(Debug, thiserror::Error)]
pub enum ControllerError {
    /// The function does not answer: it was removed, or has lost power.
    #[error("The drive is gone: its registers read as all ones")]
    Gone,
    /// Its link is down, or the kernel or somebody else is resetting it or has done so: it is to be waited for, and reset.
    #[error(
        "The drive has lost its commands: its registers read as all ones, or it was reset by somebody else; try again"
    )]
    Lost,
    /// It is about to be reset.
    #[error("The drive is being reset; try again")]
    Resetting,
    /// It has command sets, but not the one for blocks.
    #[error("The drive does not support the NVM Command Set (CAP.CSS)")]
    NoNvmCommandSet,
    /// Its pages are larger than those that guests are given.
    #[error("The drive needs memory pages of {min} bytes (CAP.MPSMIN); only 4096 are supported")]
    MemoryPageSize {
        /// The smallest that it takes, in bytes.
        min: u64,
    },
    /// A state that the specification promises within a time was not reached.
    #[error("The drive did not {state} within {seconds} s; its status is {csts:?}")]
    NotInTime {
        /// State that it was to reach.
        state: &'static str,
        /// Longest time that it may take.
        seconds: u64,
        /// Last report.
        csts: Csts,
    },
    /// The controller reports that it cannot go on.
    #[error("The drive reports a fatal error (CSTS.CFS)")]
    Fatal,
    /// An admin command was not completed.
    #[error("The drive did not complete the admin command {opcode} within {seconds} s")]
    AdminTimeout {
        /// The command.
        opcode: AdminOpcode,
        /// Time that was waited.
        seconds: u64,
    },
    /// An admin command failed.
    #[error("The drive refuses the admin command {opcode}: {status}")]
    Admin {
        /// The command.
        opcode: AdminOpcode,
        /// Status of its completion.
        status: Status,
    },
    /// An I/O Completion Queue is left of a pair that the drive did not create.
    #[error(
        "The drive refuses queue pair {qid}, and does not delete its Completion Queue; it has the pair again after a reset"
    )]
    QueueLeft {
        /// The pair.
        qid: QueueId,
    },
    /// It grants no I/O queues, or its BAR has no doorbells for any.
    #[error("The drive has no I/O queue pair to use")]
    NoQueuePairs,
    /// No namespace can be shared.
    #[error(
        "Namespace {nsid} of the drive cannot be used: {reason}; use another namespace or drive, one with blocks of 512 or \
         4096 bytes without metadata, or, if its data is not needed, format it so with `nvme format`, which erases it"
    )]
    Namespace {
        /// The namespace.
        nsid: Nsid,
        /// Why not.
        reason: &'static str,
    },
    /// Memory for queues cannot be had, or not mapped for the drive.
    #[error("Memory for the drive's queues cannot be had")]
    Memory(#[source] io::Error),
    /// Another process cannot go on with it, or this one not with that of another.
    #[error("The drive cannot be handed over: {0}")]
    HandOver(&'static str),
    /// The function cannot be given access to memory, or be reset.
    #[error("The drive's PCI function cannot be configured")]
    Function(#[source] io::Error),
    /// The thread that watches over the drive cannot be started.
    #[error("The drive's supervisor cannot be started")]
    Supervisor(#[source] io::Error),
    /// A command that makes writes durable failed.
    #[error("Namespace {} of the drive cannot be flushed: {status}", .namespace.nsid)]
    Flush {
        /// The namespace.
        namespace: HostNamespace,
        /// Status of the Flush.
        status: Status,
    },
}

impl From<ControllerError> for io::Error {
    fn from(error: ControllerError) -> Self {
        let kind = match &error {
            ControllerError::Gone | ControllerError::Fatal => io::ErrorKind::NotConnected,
            ControllerError::Lost | ControllerError::Resetting => io::ErrorKind::ResourceBusy,
            ControllerError::NotInTime { .. } | ControllerError::AdminTimeout { .. } => {
                io::ErrorKind::TimedOut
            }
            ControllerError::Memory(source) | ControllerError::Function(source) => source.kind(),
            _ => io::ErrorKind::Other,
        };
        Self::new(kind, error)
    }
}
