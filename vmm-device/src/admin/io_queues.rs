//! Creation and deletion of I/O queues (Base 2.0, sections 5.4 to 5.7). The back end checks a queue's address, size and vector.
//! This module checks all other fields of these commands.

use nvme_guest::{CqConfig, Gpa, QueueError, SqConfig};
use nvme_spec::{
    admin::{CreateIoCq, CreateIoSq, DeleteQueue},
    cqe::IOCQES,
    ids::QueueId,
    sqe::IOSQES,
    status::Status,
};

use super::{
    AdminCommandContext,
    failure::{AdminCommandFailure, require},
};

/// Context of the commands that create and delete I/O queues.
pub(super) struct IoQueues<'a> {
    pub(super) controller: AdminCommandContext<'a>,
    /// Numbers of I/O queues that the guest may create, by the feature Number of Queues.
    pub(super) allocated: IoQueueAllocation,
}

/// Maximum numbers of I/O Submission Queues and of I/O Completion Queues. Queue identifiers from 1 to these numbers are valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct IoQueueAllocation {
    pub(super) submission: u16,
    pub(super) completion: u16,
}

impl IoQueues<'_> {
    pub(super) fn create_cq(
        &self,
        command: CreateIoCq,
        base: Gpa,
    ) -> Result<CqConfig, AdminCommandFailure> {
        require_id(command.qid, self.allocated.completion)?;
        // CAP.CQR is set: queues must be physically contiguous.
        require(command.pc, Status::INVALID_FIELD)?;
        // If the guest has not set CC.IOCQES, the queue size is invalid.
        require(
            self.controller.cc.iocqes() == IOCQES,
            Status::INVALID_QUEUE_SIZE,
        )?;
        let config = CqConfig {
            qid: command.qid,
            base,
            entries: queue_entries(command.qsize_z),
            vector: command.ien.then_some(command.iv),
        };
        self.controller.backend.create_cq(config)?;
        Ok(config)
    }

    pub(super) fn create_sq(
        &self,
        command: CreateIoSq,
        base: Gpa,
    ) -> Result<SqConfig, AdminCommandFailure> {
        require_id(command.qid, self.allocated.submission)?;
        // An identifier beyond the granted numbers is an invalid queue identifier. For an unused identifier within them, the
        // back end reports an invalid completion queue.
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
            entries: queue_entries(command.qsize_z),
        };
        self.controller
            .backend
            .create_sq_within(config, self.controller.deadline.remaining())
            .map_err(|error| match error {
                QueueError::NoSuchQueue { .. } => {
                    AdminCommandFailure::from(Status::COMPLETION_QUEUE_INVALID)
                }
                error => error.into(),
            })?;
        Ok(config)
    }

    pub(super) fn delete_sq(&self, command: DeleteQueue) -> Result<(), AdminCommandFailure> {
        require(command.qid != QueueId::ADMIN, Status::INVALID_QUEUE_ID)?;
        self.controller
            .backend
            .delete_sq_within(command.qid, self.controller.deadline.remaining())
            .map_err(AdminCommandFailure::from)
    }

    pub(super) fn delete_cq(&self, command: DeleteQueue) -> Result<(), AdminCommandFailure> {
        require(command.qid != QueueId::ADMIN, Status::INVALID_QUEUE_ID)?;
        self.controller
            .backend
            .delete_cq_within(command.qid, self.controller.deadline.remaining())
            .map_err(AdminCommandFailure::from)
    }
}

/// Returns the number of entries of a queue. QSIZE has it as a zero-based value.
fn queue_entries(qsize_z: u16) -> u32 {
    u32::from(qsize_z) + 1
}

fn require_id(qid: QueueId, allocated: u16) -> Result<(), Status> {
    require((1..=allocated).contains(&qid.0), Status::INVALID_QUEUE_ID)
}
