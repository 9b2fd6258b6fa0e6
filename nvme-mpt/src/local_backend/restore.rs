//! Restoring queues of a process that ended, from their in-flight tracking.

use nvme_guest::address::Gpa;
use nvme_guest::backend::{BackendStateError, CompletionQueueState, CqConfig, PersistedQueues};
use nvme_guest::event::{IoQueueEvent, QueueFailure};
use nvme_spec::cqe::Cqe;
use nvme_spec::ids::QueueId;
use zerocopy::{FromZeros, IntoBytes};

use super::LocalBackend;
use super::persisted_queue::{PersistedQueue, read_queue_state};
use super::queue_limits::QueueLimits;
use crate::shadow::{CompletionQueue, UnmappedRing};

impl LocalBackend {
    /// Restores queues from their in-flight tracking. Commands that were in flight are executed again, or complete with Command
    /// Interrupted. The caller ensures that the guest's memory is mapped as under the predecessor, and that no queues exist. A
    /// queue whose rings the VMM has unmapped waits for their memory.
    ///
    /// # Errors
    /// [`BackendStateError::Invalid`], [`BackendStateError::NotEmpty`] and [`BackendStateError::Queue`]. After an error, no
    /// queues exist, and the in-flight tracking is unchanged.
    pub(super) fn restore_persisted(
        &self,
        persisted: &PersistedQueues,
    ) -> Result<(), BackendStateError> {
        let mut queues = self.queues();
        if !queues.cqs.is_empty() {
            return Err(BackendStateError::NotEmpty(queues.cqs.len()));
        }
        let states = self.read_inflight_state(persisted)?;
        let PersistedQueues {
            cqs: _,
            sqs: _,
            doorbell_buffer,
            revoked,
        } = persisted;
        queues.buffer = *doorbell_buffer;
        queues.is_revoked = *revoked;
        for state in &states {
            let qid = QueueId(state.qid);
            if let Err(source) = self.restore_queue(&mut queues, state, UnmappedRing::AwaitedMemory)
            {
                // No poller has run the restored queues, so the guest has seen no effect of them.
                queues.cqs.clear();
                queues.buffer = None;
                queues.is_revoked = false;
                return Err(BackendStateError::Queue { qid, source });
            }
        }
        for state in states.iter().filter(|state| state.failed) {
            // The predecessor may have ended before it reported the failure to the function.
            self.context.events.report(IoQueueEvent::QueueFailed {
                qid: QueueId(state.qid),
                reason: QueueFailure::HostQueue,
            });
        }
        if !queues.is_paused {
            self.resume_queues(&mut queues);
        }
        Ok(())
    }

    /// Reads the in-flight tracking of all queues, each word once because it is not trusted, and checks the result like a
    /// snapshot.
    fn read_inflight_state(
        &self,
        persisted: &PersistedQueues,
    ) -> Result<Vec<CompletionQueueState>, BackendStateError> {
        let inflight = self.context.inflight.as_ref();
        let inflight = inflight
            .ok_or_else(|| BackendStateError::invalid("in-flight state", "not there", "a file"))?;
        let limits = QueueLimits::from_backend(self);
        self.check_doorbell_buffer(persisted.doorbell_buffer)?;
        limits.check_queue_count("completion queues", persisted.cqs.len())?;
        limits.check_queue_count("submission queues", persisted.sqs.len())?;
        let mut states = Vec::new();
        for cq in &persisted.cqs {
            limits.check_persisted_cq(cq)?;
            let sqs = persisted.sqs.iter().filter(|sq| sq.cqid == cq.qid);
            let queue = PersistedQueue {
                cq: *cq,
                sqs: sqs.collect(),
            };
            // If the ring is not mapped, the queue has posted nothing since its positions were recorded.
            let is_mapped = CompletionQueue::is_mapped(cq, &self.context);
            let entry = |index| match is_mapped {
                true => self.read_cq_entry(cq, index).map(Some),
                false => Ok(None),
            };
            states.push(read_queue_state(inflight, &queue, entry)?);
        }
        limits.check(&states)?;
        Ok(states)
    }

    /// Copies an entry of a Completion Queue from the guest's memory.
    fn read_cq_entry(&self, cq: &CqConfig, index: u32) -> Result<Cqe, BackendStateError> {
        let offset = u64::from(index) * size_of::<Cqe>() as u64;
        let mut entry = Cqe::new_zeroed();
        let read = cq.base.checked_add(offset).map(|gpa: Gpa| {
            let memory = self.window.memory();
            memory.read(gpa, entry.as_mut_bytes())
        });
        match read {
            Some(Ok(())) => Ok(entry),
            _ => {
                let name = format!("base of completion queue {}", cq.qid);
                let base = format_args!("{:#x}", cq.base.0).to_string();
                Err(BackendStateError::invalid(
                    name,
                    base,
                    "in the guest's memory",
                ))
            }
        }
    }
}
