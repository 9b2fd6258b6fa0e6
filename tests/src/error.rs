//! Errors of the guest driver.

use std::time::Duration;

use crate::completion::Cqe;
use crate::memory::MemoryError;

/// The result of a driver operation.
pub type Result<T> = std::result::Result<T, Error>;

/// Error of a driver operation.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// CSTS reads all ones: the device is gone.
    #[error("Controller is gone (CSTS reads all ones)")]
    Gone,
    /// CSTS.CFS is set: the controller needs a reset.
    #[error("Controller failed (CSTS {csts:#x} has CFS set)")]
    Fatal {
        /// Value of CSTS.
        csts: u32,
    },
    /// CSTS did not reach the expected state within CAP.TO.
    #[error("Controller did not reach {want} within {after:?} (CSTS {csts:#x})")]
    NotReached {
        /// Expected state.
        want: &'static str,
        /// Timeout.
        after: Duration,
        /// Last value of CSTS.
        csts: u32,
    },
    /// The controller does not support a feature.
    #[error("Controller does not support {0}")]
    Unsupported(&'static str),
    /// The controller is disabled and has no admin queue.
    #[error("Controller is not enabled")]
    Disabled,
    /// A command completed with an error status.
    #[error("Opcode {opcode:#04x} completed with {status}", status = .cqe.status())]
    Status {
        /// Opcode of the command.
        opcode: u8,
        /// Completion of the command.
        cqe: Cqe,
    },
    /// A command did not complete in time.
    #[error("Command {cid} on queue {queue} did not complete within {after:?}")]
    Timeout {
        /// Command identifier.
        cid: u16,
        /// Submission queue identifier.
        queue: u16,
        /// Timeout.
        after: Duration,
    },
    /// A completion queue entry matches no command in flight, or a command completed twice.
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
    /// A data structure of the controller violates the specification.
    #[error("Invalid {what}: {value}")]
    Invalid {
        /// Structure or field.
        what: &'static str,
        /// Its value.
        value: String,
    },
    /// A doorbell is outside of every mapped window.
    #[error("No mapped doorbell at BAR0 offset {offset:#x}")]
    NotMapped {
        /// Offset of the doorbell in BAR0.
        offset: u64,
    },
    /// A guest memory operation failed.
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
    /// Returns the completion of a command that failed with an error status.
    pub fn completion(&self) -> Option<Cqe> {
        match self {
            Self::Status { cqe, .. } => Some(*cqe),
            _ => None,
        }
    }
}
