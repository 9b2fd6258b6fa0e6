//! Pausing an attachment: its pollers take no more commands, what is in flight drains, and its
//! queues rest here until they go on or are saved.
//!
//! A queue that rests holds nothing of the VM's memory but its rings, and touches not even those,
//! so memory can come and go meanwhile. When it goes on it takes up the memory that there is then.

use super::io_queues::Queues;
use super::{Attachment, QueueError};
use crate::spec::ids::QueueId;

impl Attachment {
    /// Has the pollers take no more commands, and waits for those in flight. When this returns,
    /// neither the pollers nor the host controller touch the VM's memory. Every command that was
    /// taken has its completion in the guest's queue, and the guest was told by an interrupt.
    /// Commands that were not taken stay where they are.
    ///
    /// # Errors
    /// [`QueueError::Timeout`] if commands in flight do not finish, which a drive's own deadlines
    /// prevent: their queue ends with them, and all others go on.
    pub(super) fn pause(&self) -> Result<(), QueueError> {
        let mut queues = self.queues();
        if queues.paused {
            return Ok(());
        }
        // All are stopped before the first one is waited for.
        let leaving: Vec<_> = queues
            .cqs
            .iter()
            .map(|(cqid, entry)| (*cqid, entry.poller.remove(entry.id)))
            .collect();
        let deadline = self.deadline();
        let mut result = Ok(());
        for (cqid, receiver) in leaving {
            let Some(entry) = queues.cqs.get_mut(&cqid) else {
                continue;
            };
            match deadline.receive(&receiver) {
                Ok(mut queue) => {
                    queue.settle();
                    entry.park(queue);
                }
                Err(_) => result = Err(QueueError::Timeout(QueueId(cqid))),
            }
        }
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
