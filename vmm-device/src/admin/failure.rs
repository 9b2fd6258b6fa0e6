//! Failure of an admin command.

use std::io;

use nvme_mpt::{QueueError, spec::status::Status};

/// Failure of a command.
#[derive(Debug)]
pub(super) enum Failure {
    /// The command fails, as it does when it comes again. The controller goes on.
    Command(Status),
    /// The command fails, and may succeed when it comes again.
    ForNow(Status),
    /// Memory that the command names is not there, and the VMM may bring it back. The command fails with this status if it
    /// does not.
    NotMapped(Status),
    /// The command is to change an I/O queue that has commands in flight. The queue takes no more commands, and this one is
    /// carried out again.
    Waits,
}

impl Failure {
    /// Returns the status that completes the command.
    pub(super) fn status(&self) -> Status {
        match self {
            Self::ForNow(status) => *status,
            Self::Command(status) | Self::NotMapped(status) => status.with_dnr(true),
            Self::Waits => Status::INTERNAL_ERROR,
        }
    }
}

impl From<Status> for Failure {
    fn from(status: Status) -> Self {
        Self::Command(status)
    }
}

impl From<QueueError> for Failure {
    /// The failure of a command whose queue could not be created, deleted or changed.
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
            QueueError::Timeout { .. } => return Self::Waits,
            QueueError::Paused { .. } => {
                log::error!("{error}");
                Status::INTERNAL_ERROR
            }
            QueueError::Host { source, .. } => {
                log::error!("{error}: {source}");
                // A drive that is reset again and again, say.
                if source.kind() == io::ErrorKind::ResourceBusy {
                    return Self::ForNow(Status::INTERNAL_ERROR);
                }
                Status::INTERNAL_ERROR
            }
        })
    }
}
