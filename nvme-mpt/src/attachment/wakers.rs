//! Doorbell registers that only wake a poller: those of queues whose doorbells are in the Doorbell
//! Buffer (Base 2.0, section B.5). A guest writes such a register only when EventIdx asked for it, and
//! what it writes there, it has stored in the buffer before.

use std::fmt;
use std::sync::Arc;

use vmm_sys_util::eventfd::EventFd;

use super::Attachment;
use crate::poller::Waker;
use crate::spec::ids::QueueId;
use crate::spec::registers::Doorbell;

/// Waker of a queue's poller.
#[derive(Clone)]
pub struct DoorbellWaker(Arc<Waker>);

impl DoorbellWaker {
    /// Wakes the poller when it is signalled. A poller that is awake is signalled in vain.
    #[must_use]
    pub fn eventfd(&self) -> &EventFd {
        self.0.eventfd()
    }
}

/// Wakers are equal if both wake the same poller.
impl PartialEq for DoorbellWaker {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl fmt::Debug for DoorbellWaker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("DoorbellWaker")
            .field(self.eventfd())
            .finish()
    }
}

impl Attachment {
    /// The doorbell registers whose writes may signal a waker in place of
    /// [`ring_doorbell`](Self::ring_doorbell), as of now: none without a Doorbell Buffer.
    ///
    /// A VMM that acts upon it later than a queue changes has writes signal a poller that is not the
    /// queue's any more. It makes up for that by signalling the new one once, which then looks.
    #[must_use]
    pub fn wake_only_doorbells(&self) -> Vec<(Doorbell, DoorbellWaker)> {
        let queues = self.queues();
        if queues.buffer.is_none() {
            return Vec::new();
        }
        let mut doorbells = Vec::new();
        for (cqid, entry) in &queues.cqs {
            let waker = DoorbellWaker(entry.poller.waker().clone());
            doorbells.push((Doorbell::CqHead(QueueId(*cqid)), waker.clone()));
            for sqid in &entry.sqs {
                doorbells.push((Doorbell::SqTail(*sqid), waker.clone()));
            }
        }
        doorbells
    }
}
