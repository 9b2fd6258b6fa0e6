//! Failure of an admin command.

use std::io;

use nvme_guest::QueueError;
use nvme_spec::status::Status;

/// Failure of an admin command, which determines whether and when the command completes.
#[derive(Debug)]
pub(super) enum AdminCommandFailure {
    /// The command fails, and fails again if the guest retries it (Do Not Retry).
    Command(Status),
    /// The command fails, and may succeed if the guest retries it.
    Retryable(Status),
    /// The command names unmapped memory. The command waits until the VMM maps this memory again, and fails with this status on
    /// a timeout.
    NotMapped(Status),
    /// The command changes an I/O queue that has commands in flight. The I/O queue accepts no further commands. The admin
    /// command is carried out once the commands in flight have ended.
    QueueBusy,
}

impl AdminCommandFailure {
    /// Returns the status with which the command completes.
    pub(super) fn status(&self) -> Status {
        match self {
            Self::Retryable(status) => *status,
            Self::Command(status) | Self::NotMapped(status) => status.with_dnr(true),
            Self::QueueBusy => Status::INTERNAL_ERROR,
        }
    }
}

impl From<Status> for AdminCommandFailure {
    fn from(status: Status) -> Self {
        Self::Command(status)
    }
}

impl From<QueueError> for AdminCommandFailure {
    /// Converts the error of creating, deleting or changing an I/O queue.
    fn from(error: QueueError) -> Self {
        Self::Command(match &error {
            QueueError::NoSuchQueue { .. }
            | QueueError::AlreadyExists { .. }
            | QueueError::InvalidQueueId { .. } => Status::INVALID_QUEUE_ID,
            QueueError::CqInUse { .. } => Status::INVALID_QUEUE_DELETION,
            QueueError::InvalidVector { .. } => Status::INVALID_INTERRUPT_VECTOR,
            QueueError::InvalidSize { .. } => Status::INVALID_QUEUE_SIZE,
            QueueError::Misaligned { .. } => Status::PRP_OFFSET_INVALID,
            QueueError::NotMapped { .. } => return Self::NotMapped(Status::INVALID_FIELD),
            QueueError::Timeout { .. } => return Self::QueueBusy,
            QueueError::Paused { .. } => {
                log::error!("{error}");
                Status::INTERNAL_ERROR
            }
            QueueError::Host { source, .. } => {
                log::error!("{error}: {source}");
                // The resource is busy, for example, if the drive is reset again and again.
                if source.kind() == io::ErrorKind::ResourceBusy {
                    return Self::Retryable(Status::INTERNAL_ERROR);
                }
                Status::INTERNAL_ERROR
            }
        })
    }
}

/// Returns the error `otherwise` unless the condition holds.
pub(super) fn require(condition: bool, otherwise: Status) -> Result<(), Status> {
    if condition { Ok(()) } else { Err(otherwise) }
}
