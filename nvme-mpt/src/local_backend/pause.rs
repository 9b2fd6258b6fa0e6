//! Pausing a local back end: its pollers take no more commands, in-flight commands complete, and its queues are held here until
//! they resume or are saved.
//!
//! A paused queue holds only references to the memory of its rings, and does not access even that memory. So memory can be
//! mapped and unmapped during a pause. A queue that resumes uses the memory map of that time.

use std::time::Duration;

use nvme_guest::backend::QueueError;
use nvme_mpt_memory::deadline::Deadline;
use nvme_spec::ids::QueueId;

use super::LocalBackend;
use super::io_queues::BackendQueues;

impl LocalBackend {
    /// Stops the pollers from taking commands, and waits for in-flight commands until `deadline`. On success, neither the
    /// pollers nor the host controller access the VM's memory afterwards. Every taken command has its completion in the guest's
    /// queue, and the guest was interrupted for it. All commands that were not taken stay in their queues.
    ///
    /// # Errors
    /// [`QueueError::Timeout`] if commands are still in flight. No queue takes commands then: the caller repeats the call, or
    /// [resumes](Self::resume).
    pub(super) fn pause_until(&self, deadline: &Deadline) -> Result<(), QueueError> {
        let mut queues = self.queues();
        if queues.is_paused {
            return Ok(());
        }
        quiesce_until(&mut queues, deadline)?;
        // A flush in progress would keep this process and its locks alive after the pause.
        if self.is_flushing() {
            return Err(QueueError::Timeout(QueueId::ADMIN));
        }
        queues.is_paused = true;
        Ok(())
    }

    /// Checks that in-flight commands end within `time`, by a pause and an immediate resume. Does nothing if the back end is
    /// paused.
    ///
    /// # Errors
    /// [`QueueError::Timeout`] if commands do not end, or if another call already waits for them.
    pub fn quiesce_once(&self, time: Duration) -> Result<(), QueueError> {
        let mut queues = self.queues();
        if queues.is_paused {
            return Ok(());
        }
        if let Some(cqid) = queues.pending_removal() {
            return Err(QueueError::Timeout(cqid));
        }
        let result = quiesce_until(&mut queues, &Deadline::after(&self.clock, time));
        self.resume_queues(&mut queues);
        match self.is_flushing() {
            true => Err(QueueError::Timeout(QueueId::ADMIN)),
            false => result,
        }
    }

    /// Lets the pollers take commands again. Each poller checks all of its queues once, because the guest may have rung
    /// doorbells during the pause.
    pub(super) fn resume(&self) {
        self.resume_queues(&mut self.queues());
    }

    /// Returns queues to their pollers after a change of the queues has timed out. A queue without a poller adopts no new
    /// memory table, so a wait until all queues have adopted a table would not end.
    pub(super) fn resume_timed_out(&self) {
        // If another thread holds the lock, it is changing the queues.
        if let Ok(mut queues) = self.queues.try_lock()
            && !queues.is_paused
            && !queues.is_revoked
            && queues.pending_removal().is_some()
        {
            self.resume_queues(&mut queues);
        }
    }

    pub(super) fn resume_queues(&self, queues: &mut BackendQueues) {
        queues.is_paused = false;
        for entry in queues.cqs.values_mut() {
            entry.cancel_removal();
            if let Some(mut queue) = entry.detached.take() {
                queue.acquire_memory(self.context.tables.register(entry.poller.waker().clone()));
                queue.resume();
                entry.poller.add(queue);
            }
        }
    }
}

/// Takes the queues from their pollers once their in-flight commands have completed. Waits until `deadline`.
///
/// # Errors
/// As [`LocalBackend::pause_until`].
pub(super) fn quiesce_until(
    queues: &mut BackendQueues,
    deadline: &Deadline,
) -> Result<(), QueueError> {
    // All queues are stopped before the first wait.
    for entry in queues.cqs.values_mut() {
        entry.begin_removal();
    }
    let mut result = Ok(());
    for entry in queues.cqs.values_mut() {
        if entry.detached.is_some() {
            continue;
        }
        match entry.take_from_poller(deadline) {
            Ok(mut queue) => {
                queue.signal_now();
                entry.hold_detached(queue);
            }
            Err(late) => result = Err(late),
        }
    }
    result
}
