//! Creation and deletion of I/O queues (Base 2.0, sections 5.4 to 5.7).

use nvme_mpt::{
    CqConfig, Gpa, QueueError, SqConfig,
    spec::{
        admin::{CreateIoCq, CreateIoSq, DeleteQueue},
        cqe::IOCQES,
        ids::QueueId,
        sqe::IOSQES,
        status::Status,
    },
};

use super::Controller;

/// Parts from which I/O queues are created.
pub(super) struct IoQueues<'a> {
    pub(super) controller: Controller<'a>,
    /// Queues of each kind that were allocated by the Number of Queues feature.
    pub(super) allocated: Allocated,
}

/// I/O queues of each kind that a host may create: identifiers 1 to that number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Allocated {
    pub(super) submission: u16,
    pub(super) completion: u16,
}

impl IoQueues<'_> {
    pub(super) fn create_cq(&self, command: CreateIoCq, base: Gpa) -> Result<(), Status> {
        require_id(command.qid, self.allocated.completion)?;
        // CAP.CQR: queues are physically contiguous.
        require(command.pc, Status::INVALID_FIELD)?;
        // An entry size that was not set yet is reported as an invalid queue size.
        require(
            self.controller.cc.iocqes() == IOCQES,
            Status::INVALID_QUEUE_SIZE,
        )?;
        let entries = self.entries(command.qsize_z)?;
        require(base.is_page_aligned(), Status::PRP_OFFSET_INVALID)?;
        let vector = command.ien.then_some(command.iv);
        let exists = |vector: u16| usize::from(vector) < self.controller.shared.vectors.len();
        require(vector.is_none_or(exists), Status::INVALID_INTERRUPT_VECTOR)?;
        self.controller
            .host
            .create_cq(CqConfig {
                qid: command.qid,
                base,
                entries,
                vector,
            })
            .map_err(|error| status(&error))
    }

    pub(super) fn create_sq(&self, command: CreateIoSq, base: Gpa) -> Result<(), Status> {
        require_id(command.qid, self.allocated.submission)?;
        // An identifier that no completion queue can have is invalid; one that none has yet names a
        // completion queue that is.
        require_id(command.cqid, self.allocated.completion)?;
        require(command.pc, Status::INVALID_FIELD)?;
        require(
            self.controller.cc.iosqes() == IOSQES,
            Status::INVALID_QUEUE_SIZE,
        )?;
        let entries = self.entries(command.qsize_z)?;
        require(base.is_page_aligned(), Status::PRP_OFFSET_INVALID)?;
        let config = SqConfig {
            qid: command.qid,
            cqid: command.cqid,
            base,
            entries,
        };
        self.controller
            .host
            .create_sq(config)
            .map_err(|error| match error {
                QueueError::NoSuchQueue { .. } => Status::COMPLETION_QUEUE_INVALID,
                error => status(&error),
            })
    }

    pub(super) fn delete_sq(&self, command: DeleteQueue) -> Result<(), Status> {
        require(command.qid != QueueId::ADMIN, Status::INVALID_QUEUE_ID)?;
        self.controller
            .host
            .delete_sq(command.qid)
            .map_err(|error| status(&error))
    }

    pub(super) fn delete_cq(&self, command: DeleteQueue) -> Result<(), Status> {
        require(command.qid != QueueId::ADMIN, Status::INVALID_QUEUE_ID)?;
        self.controller
            .host
            .delete_cq(command.qid)
            .map_err(|error| status(&error))
    }

    /// Entries of a queue: at least two, as a queue of one could hold none, and at most what
    /// CAP.MQES says.
    fn entries(&self, qsize_z: u16) -> Result<u32, Status> {
        let entries = u32::from(qsize_z) + 1;
        let valid = (2..=self.controller.facts.limits.entries_max).contains(&entries);
        require(valid, Status::INVALID_QUEUE_SIZE)?;
        Ok(entries)
    }
}

fn require(condition: bool, otherwise: Status) -> Result<(), Status> {
    if condition { Ok(()) } else { Err(otherwise) }
}

fn require_id(qid: QueueId, allocated: u16) -> Result<(), Status> {
    require((1..=allocated).contains(&qid.0), Status::INVALID_QUEUE_ID)
}

/// Returns the guest's status for a queue that could not be created or deleted.
fn status(error: &QueueError) -> Status {
    match error {
        QueueError::NoSuchQueue { .. }
        | QueueError::AlreadyExists { .. }
        | QueueError::InvalidQueueId { .. } => Status::INVALID_QUEUE_ID,
        QueueError::CqInUse { .. } => Status::INVALID_QUEUE_DELETION,
        QueueError::InvalidVector { .. } => Status::INVALID_INTERRUPT_VECTOR,
        QueueError::InvalidSize { .. } => Status::INVALID_QUEUE_SIZE,
        QueueError::Misaligned { .. } => Status::PRP_OFFSET_INVALID,
        // PRP1 names memory that the guest does not have.
        QueueError::NotMapped { .. } => Status::INVALID_FIELD,
        QueueError::Timeout { .. } | QueueError::Paused { .. } => {
            log::error!("{error}");
            Status::INTERNAL_ERROR
        }
        QueueError::Host { source, .. } => {
            log::error!("{error}: {source}");
            Status::INTERNAL_ERROR
        }
    }
}
