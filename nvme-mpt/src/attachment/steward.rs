//! The steward: an attachment's thread for work without a bound on its time: flushes, changes of the ledger that commands wait
//! for, and queues whose commands do not end.

use std::io;
use std::sync::{Arc, PoisonError, Weak};

use super::holding::Holding;
use crate::memory::sync::Mutex;
use crate::memory::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use crate::poller::{LeavingQueue, Poller, Threads};

/// A shadow queue on its way from its poller, which hands it over once nothing of it is in flight.
#[derive(Debug)]
pub(super) struct Leaving {
    pub(super) queue: LeavingQueue,
    /// It runs the queue until then.
    pub(super) poller: Arc<Poller>,
}

enum Task {
    Flush(Arc<Holding>, SyncSender<io::Result<()>>),
    Outlive(Vec<Leaving>),
    StoreMarks(Weak<Holding>),
}

/// A handle to the steward, which ends when this is dropped and its tasks are done.
#[derive(Debug)]
pub(super) struct Steward {
    tasks: Sender<Task>,
    /// True while marks may be stored. Its lock is held while they are.
    stores_marks: Arc<Mutex<bool>>,
}

impl Steward {
    pub(super) fn start(threads: &Threads) -> io::Result<Self> {
        let (sender, tasks) = channel();
        let stores_marks = Arc::new(Mutex::new(true));
        let may_store = stores_marks.clone();
        let work = move || {
            while let Ok(task) = tasks.recv() {
                carry_out(task, &may_store);
            }
        };
        // Nobody waits for its end: a drive that never answers would keep it for ever.
        drop(threads.spawn("nvme-steward", Box::new(work))?);
        Ok(Self {
            tasks: sender,
            stores_marks,
        })
    }

    /// Has the drive flushed. The result arrives when the drive is done.
    pub(super) fn flush(&self, holding: Arc<Holding>) -> Receiver<io::Result<()>> {
        let (reply, result) = sync_channel(1);
        // Without a steward the reply is dropped, which the receiver tells.
        let _ = self.tasks.send(Task::Flush(holding, reply));
        result
    }

    /// Returns a request to store the unreadable blocks of a lease, which waits for nothing.
    pub(super) fn storing_marks(&self, holding: &Arc<Holding>) -> Box<dyn Fn() + Send + Sync> {
        // The drive has the request, and is among what is held.
        let (sender, holding) = (self.tasks.clone(), Arc::downgrade(holding));
        // Without a steward, commands wait until their queue ends.
        Box::new(move || drop(sender.send(Task::StoreMarks(holding.clone()))))
    }

    /// Ends the storing of marks, once no command waits for it. The steward then has no share of the lease for it, so that
    /// the lease ends with its attachment.
    pub(super) fn store_no_more(&self) {
        *self
            .stores_marks
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = false;
    }

    /// Keeps queues until the last of their commands has ended. Pollers do not end them, because a lease
    /// is given back in a file.
    pub(super) fn outlive(&self, queues: Vec<Leaving>) {
        let _ = self.tasks.send(Task::Outlive(queues));
    }
}

fn carry_out(task: Task, stores_marks: &Mutex<bool>) {
    match task {
        Task::Flush(holding, reply) => {
            let result = holding.flush();
            // Before the reply: the thread that waits for it is then the last holder of the lease.
            drop(holding);
            // The requester may have given up waiting.
            let _ = reply.send(result);
        }
        Task::StoreMarks(holding) => {
            let stores_marks = stores_marks.lock();
            if *stores_marks.unwrap_or_else(PoisonError::into_inner)
                && let Some(holding) = holding.upgrade()
            {
                holding.store_marks();
            }
        }
        Task::Outlive(queues) => {
            for Leaving { queue, poller } in queues {
                // A queue that does not arrive has ended with its poller.
                drop(queue.recv());
                drop(poller);
            }
        }
    }
}
