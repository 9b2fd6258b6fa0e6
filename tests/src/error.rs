//! Errors on the guest's side of a controller.

use std::time::Duration;

use crate::completion::Cqe;
use crate::memory::MemoryError;

/// The result of a driver operation.
pub type Result<T> = std::result::Result<T, Error>;

/// A driver operation that did not succeed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// CSTS reads all ones: nothing answers at the BAR any more.
    #[error("Controller is gone (CSTS reads all ones)")]
    Gone,
    /// CSTS.CFS is set: only a reset helps.
    #[error("Controller failed (CSTS {csts:#x} has CFS set)")]
    Fatal {
        /// The register as read.
        csts: u32,
    },
    /// CSTS did not show what was waited for within CAP.TO.
    #[error("Controller did not reach {want} within {after:?} (CSTS {csts:#x})")]
    NotReached {
        /// The state waited for.
        want: &'static str,
        /// Time after which it ended.
        after: Duration,
        /// The register as last read.
        csts: u32,
    },
    /// The controller cannot do what was asked of it.
    #[error("Controller does not support {0}")]
    Unsupported(&'static str),
    /// The controller is disabled, so that there is no admin queue.
    #[error("Controller is not enabled")]
    Disabled,
    /// A command completed with an error status.
    #[error("Opcode {opcode:#04x} completed with {status}", status = .cqe.status())]
    Status {
        /// Opcode of the command.
        opcode: u8,
        /// Its completion.
        cqe: Cqe,
    },
    /// A command did not complete in time.
    #[error("Command {cid} on queue {queue} did not complete within {after:?}")]
    Timeout {
        /// Command identifier.
        cid: u16,
        /// Submission queue identifier.
        queue: u16,
        /// Time that was waited.
        after: Duration,
    },
    /// A completion queue entry that no command asked for, or the second for one command.
    #[error("Unexpected completion on queue {queue}: {cqe:?}")]
    UnexpectedCompletion {
        /// Submission queue identifier.
        queue: u16,
        /// The entry.
        cqe: Cqe,
    },
    /// The submission queue has no free entry.
    #[error("Submission queue {queue} is full")]
    QueueFull {
        /// Submission queue identifier.
        queue: u16,
    },
    /// A data structure of the controller breaks the specification.
    #[error("Invalid {what}: {value}")]
    Invalid {
        /// The structure or field.
        what: &'static str,
        /// Its value.
        value: String,
    },
    /// A doorbell outside of every mapped window.
    #[error("No mapped doorbell at BAR0 offset {offset:#x}")]
    NotMapped {
        /// Offset of the doorbell in BAR0.
        offset: u64,
    },
    /// Guest memory could not be had.
    #[error("Guest memory failed")]
    Memory(#[from] MemoryError),
    /// A system call on an interrupt vector failed.
    #[error("Interrupt vector failed")]
    Interrupt(#[source] std::io::Error),
    /// The vfio-user connection failed.
    #[error("vfio-user request failed")]
    VfioUser(#[source] vfio_user::Error),
}

impl Error {
    /// The completion of a command that was answered with an error status.
    pub fn completion(&self) -> Option<Cqe> {
        match self {
            Self::Status { cqe, .. } => Some(*cqe),
            _ => None,
        }
    }
}
