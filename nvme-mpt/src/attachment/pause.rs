//! Pausing an attachment: its pollers take no more commands, what is in flight drains, and its
//! queues rest here until they go on or are saved.
//!
//! A queue that rests holds nothing of the VM's memory but its rings, and touches not even those,
//! so memory can come and go meanwhile. When it goes on it takes up the memory that there is then.

use std::time::Duration;

use super::Attachment;
use super::io_queues::Queues;
use crate::deadline::Deadline;
use crate::seam::QueueError;
use crate::spec::ids::QueueId;

impl Attachment {
    /// Makes the pollers take no more commands, and waits for commands in flight until `deadline`. When this returns,
    /// neither the pollers nor the host controller touch the VM's memory. Every command that was
    /// taken has its completion in the guest's queue, and the guest was told by an interrupt.
    /// Commands that were not taken stay where they are.
    ///
    /// # Errors
    /// [`QueueError::Timeout`] if commands are still in flight. No queue takes commands then: the caller repeats the call, or
    /// [resumes](Self::resume).
    pub(super) fn pause_by(&self, deadline: &Deadline) -> Result<(), QueueError> {
        let mut queues = self.queues();
        if queues.paused {
            return Ok(());
        }
        rest_by(&mut queues, deadline)?;
        // It would keep this process, with its locks, after its end.
        if self.is_flushing() {
            return Err(QueueError::Timeout(QueueId::ADMIN));
        }
        queues.paused = true;
        Ok(())
    }

    /// Checks that commands in flight end within `time`: makes the queues rest, and resumes them at once. Queues that rested
    /// before still rest afterwards.
    ///
    /// # Errors
    /// [`QueueError::Timeout`] if they do not, or if another call waits for them already.
    pub fn rest_once(&self, time: Duration) -> Result<(), QueueError> {
        let mut queues = self.queues();
        if queues.paused {
            return Ok(());
        }
        if let Some(cqid) = queues.leaving() {
            return Err(QueueError::Timeout(cqid));
        }
        let rested = rest_by(&mut queues, &Deadline::after(&self.clock, time));
        self.go_on(&mut queues);
        match self.is_flushing() {
            true => Err(QueueError::Timeout(QueueId::ADMIN)),
            false => rested,
        }
    }

    /// Has the pollers take commands again. They look at every queue once, so that nothing is missed
    /// that the guest did meanwhile.
    pub(super) fn resume(&self) {
        self.go_on(&mut self.queues());
    }

    /// Has queues go on whose change took too long. No poller has them once they have left, so whoever waits until all have
    /// taken up a table would wait in vain.
    pub(super) fn keep_polled(&self) {
        // Whoever has the lock changes the queues now.
        if let Ok(mut queues) = self.queues.try_lock()
            && !queues.paused
            && !queues.revoked
            && queues.leaving().is_some()
        {
            self.go_on(&mut queues);
        }
    }

    pub(super) fn go_on(&self, queues: &mut Queues) {
        queues.paused = false;
        for entry in queues.cqs.values_mut() {
            entry.stay();
            if let Some(mut queue) = entry.parked.take() {
                queue.take_hold(self.context.tables.register(entry.poller.waker().clone()));
                queue.resume();
                entry.poller.add(queue);
            }
        }
    }
}

/// Takes the queues from their pollers, once their commands in flight have completed. Waits until `deadline`.
///
/// # Errors
/// As [`Attachment::pause_by`].
pub(super) fn rest_by(queues: &mut Queues, deadline: &Deadline) -> Result<(), QueueError> {
    // All are stopped before the first one is waited for.
    for entry in queues.cqs.values_mut() {
        entry.begin_to_leave();
    }
    let mut result = Ok(());
    for entry in queues.cqs.values_mut() {
        if entry.parked.is_some() {
            continue;
        }
        match entry.take_from_poller(deadline) {
            Ok(mut queue) => {
                queue.settle();
                entry.park(queue);
            }
            Err(late) => result = Err(late),
        }
    }
    result
}
