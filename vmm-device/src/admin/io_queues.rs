//! Creation and deletion of I/O queues (Base 2.0, sections 5.4 to 5.7). The host side checks the place of a queue, its
//! size and its vector; here is what the admin commands add.

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

use super::{Controller, failure::Failure};

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
    pub(super) fn create_cq(&self, command: CreateIoCq, base: Gpa) -> Result<CqConfig, Failure> {
        require_id(command.qid, self.allocated.completion)?;
        // CAP.CQR: queues are physically contiguous.
        require(command.pc, Status::INVALID_FIELD)?;
        // An entry size that was not set yet is reported as an invalid queue size.
        require(
            self.controller.cc.iocqes() == IOCQES,
            Status::INVALID_QUEUE_SIZE,
        )?;
        let config = CqConfig {
            qid: command.qid,
            base,
            entries: entries(command.qsize_z),
            vector: command.ien.then_some(command.iv),
        };
        self.controller.host.create_cq(config)?;
        Ok(config)
    }

    pub(super) fn create_sq(&self, command: CreateIoSq, base: Gpa) -> Result<SqConfig, Failure> {
        require_id(command.qid, self.allocated.submission)?;
        // An identifier that no completion queue can have is invalid; one that none has yet names a
        // completion queue that is.
        require_id(command.cqid, self.allocated.completion)?;
        require(command.pc, Status::INVALID_FIELD)?;
        require(
            self.controller.cc.iosqes() == IOSQES,
            Status::INVALID_QUEUE_SIZE,
        )?;
        let config = SqConfig {
            qid: command.qid,
            cqid: command.cqid,
            base,
            entries: entries(command.qsize_z),
        };
        self.controller
            .host
            .create_sq_within(config, self.controller.deadline.left())
            .map_err(|error| match error {
                QueueError::NoSuchQueue { .. } => Failure::from(Status::COMPLETION_QUEUE_INVALID),
                error => error.into(),
            })?;
        Ok(config)
    }

    pub(super) fn delete_sq(&self, command: DeleteQueue) -> Result<(), Failure> {
        require(command.qid != QueueId::ADMIN, Status::INVALID_QUEUE_ID)?;
        self.controller
            .host
            .delete_sq_within(command.qid, self.controller.deadline.left())
            .map_err(Failure::from)
    }

    pub(super) fn delete_cq(&self, command: DeleteQueue) -> Result<(), Failure> {
        require(command.qid != QueueId::ADMIN, Status::INVALID_QUEUE_ID)?;
        self.controller
            .host
            .delete_cq_within(command.qid, self.controller.deadline.left())
            .map_err(Failure::from)
    }
}

/// Returns the number of entries by the field QSIZE.
fn entries(qsize_z: u16) -> u32 {
    u32::from(qsize_z) + 1
}

fn require(condition: bool, otherwise: Status) -> Result<(), Status> {
    if condition { Ok(()) } else { Err(otherwise) }
}

fn require_id(qid: QueueId, allocated: u16) -> Result<(), Status> {
    require((1..=allocated).contains(&qid.0), Status::INVALID_QUEUE_ID)
}
