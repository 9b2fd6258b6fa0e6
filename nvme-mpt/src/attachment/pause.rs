//! Pausing an attachment: its pollers take no more commands, what is in flight drains, and its
//! queues rest here until they go on or are saved.
//!
//! A queue that rests holds nothing of the VM's memory but its rings, and touches not even those,
//! so memory can come and go meanwhile. When it goes on it takes up the memory that there is then.

use crate::memory::sync::mpsc::RecvTimeoutError;

use super::Attachment;
use super::io_queues::{QueueEntry, Queues};
use crate::deadline::Deadline;
use crate::seam::QueueError;

impl Attachment {
    /// Has the pollers take no more commands, and waits for those in flight. When this returns,
    /// neither the pollers nor the host controller touch the VM's memory. Every command that was
    /// taken has its completion in the guest's queue, and the guest was told by an interrupt.
    /// Commands that were not taken stay where they are.
    ///
    /// # Errors
    /// [`QueueError::Timeout`] if commands in flight do not finish, which a drive's own deadlines
    /// prevent: their queue ends with them, and all others go on. It is not waited for again.
    pub(super) fn pause(&self) -> Result<(), QueueError> {
        let mut queues = self.queues();
        if queues.paused {
            return Ok(());
        }
        let result = rest_by(&mut queues, &self.deadline(), Late::Overdue);
        queues.paused = true;
        if result.is_err() {
            self.go_on(&mut queues);
        }
        result
    }

    /// Has the pollers take commands again. They look at every queue once, so that nothing is missed
    /// that the guest did meanwhile.
    pub(super) fn resume(&self) {
        self.go_on(&mut self.queues());
    }

    pub(super) fn go_on(&self, queues: &mut Queues) {
        queues.paused = false;
        for entry in queues.cqs.values_mut() {
            if let Some(mut queue) = entry.parked.take() {
                queue.take_hold(self.context.tables.register(entry.poller.waker().clone()));
                queue.resume();
                entry.poller.add(queue);
            }
        }
    }
}

/// Treatment of queues that a deadline finds with commands in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Late {
    /// They are not waited for again.
    Overdue,
    /// They are waited for once more.
    Awaited,
}

/// Has the queues rest that pollers have, once their commands in flight have completed. Waits until `deadline`, and not
/// for queues that are overdue already.
pub(super) fn rest_by(
    queues: &mut Queues,
    deadline: &Deadline,
    late: Late,
) -> Result<(), QueueError> {
    // All are stopped before the first one is waited for.
    let remove = |entry: &QueueEntry| (!entry.overdue).then(|| entry.poller.remove(entry.id));
    let leaving: Vec<_> = queues.cqs.values().map(remove).collect();
    let mut result = Ok(());
    for (entry, receiver) in queues.cqs.values_mut().zip(leaving) {
        match receiver.map(|receiver| deadline.receive(&receiver)) {
            Some(Ok(mut queue)) => {
                queue.settle();
                entry.park(queue);
            }
            taken => {
                // One that ended with its poller, as an earlier call gave up waiting, is not late.
                let is_late = matches!(taken, Some(Err(RecvTimeoutError::Timeout)));
                entry.overdue |= is_late && late == Late::Overdue;
                result = Err(QueueError::Timeout(entry.cqid));
            }
        }
    }
    result
}
