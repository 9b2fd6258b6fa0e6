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
    /// The command names unmapped memory. It waits until the VMM maps this memory again. If that takes too long, it fails with
    /// this status.
    NotMapped(Status),
    /// The command changes an I/O queue that has commands in flight. The I/O queue takes no further commands, and the admin
    /// command is carried out once those in flight have ended.
    QueueBusy,
}

impl AdminCommandFailure {
    /// Returns the status with which the command fails, if the caller does not let it wait.
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
    /// Converts an error of the back end in the creation, deletion or change of an I/O queue.
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

/// Checks a condition. Returns the error `otherwise` if it does not hold.
pub(super) fn require(condition: bool, otherwise: Status) -> Result<(), Status> {
    if condition { Ok(()) } else { Err(otherwise) }
}
