//! Background thread of a local back end, for work of unbounded duration: flushes, changes of the ledger that commands wait
//! for, and waiting for queues whose commands do not end.

use std::io;
use std::sync::{Arc, PoisonError, Weak};

use nvme_guest::threads::ThreadSpawner;
use nvme_mpt_memory::sync::Mutex;
use nvme_mpt_memory::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};

use super::open_lease::OpenLease;
use crate::poller::{Poller, QueueRemoval};

/// Shadow queue with in-flight commands at the end of its back end. Its poller hands it over once they have ended.
#[derive(Debug)]
pub(super) struct OutlivingQueue {
    pub(super) queue: QueueRemoval,
    /// Poller that runs the queue until the hand-over.
    pub(super) poller: Arc<Poller>,
}

enum FlushThreadTask {
    Flush(Arc<OpenLease>, SyncSender<io::Result<()>>),
    DrainQueues(Vec<OutlivingQueue>),
    StoreMarks(Weak<OpenLease>),
}

/// Handle of the flush thread of a back end. After the handle is dropped, the thread finishes its tasks and ends.
#[derive(Debug)]
pub(super) struct FlushThread {
    tasks: Sender<FlushThreadTask>,
    /// True while the thread may store unreadable blocks. It holds the lock while it stores them.
    can_store_marks: Arc<Mutex<bool>>,
}

impl FlushThread {
    pub(super) fn start(threads: &ThreadSpawner) -> io::Result<Self> {
        let (sender, tasks) = channel();
        let stores_marks = Arc::new(Mutex::new(true));
        let may_store = stores_marks.clone();
        let work = move || {
            while let Ok(task) = tasks.recv() {
                run_task(task, &may_store);
            }
        };
        // The thread is not joined, because a drive that never answers would block the join forever.
        drop(threads.spawn("nvme-flush", Box::new(work))?);
        Ok(Self {
            tasks: sender,
            can_store_marks: stores_marks,
        })
    }

    /// Starts a flush of the drive on the thread. The result arrives when the drive has flushed.
    pub(super) fn flush(&self, holding: Arc<OpenLease>) -> Receiver<io::Result<()>> {
        let (reply, result) = sync_channel(1);
        // If the thread has ended, the reply is dropped, and the receiver reports that.
        let _ = self.tasks.send(FlushThreadTask::Flush(holding, reply));
        result
    }

    /// Returns a function that lets the thread store the unreadable blocks of a lease, and does not wait for it.
    pub(super) fn store_marks_callback(
        &self,
        holding: &Arc<OpenLease>,
    ) -> Box<dyn Fn() + Send + Sync> {
        // The drive stores the callback and is part of `holding`, so a strong reference would be a cycle.
        let (sender, holding) = (self.tasks.clone(), Arc::downgrade(holding));
        // If the thread has ended, the commands that wait for the stored marks wait until their queue ends.
        Box::new(move || drop(sender.send(FlushThreadTask::StoreMarks(holding.clone()))))
    }

    /// Lets the thread store no unreadable blocks from now on. The caller ensures that no command waits for that. Afterwards
    /// the thread takes no reference to the lease, so the lease ends with its back end.
    pub(super) fn stop_storing_marks(&self) {
        *self
            .can_store_marks
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = false;
    }

    /// Waits in the background for the last commands of queues, and then drops the queues. Pollers do not drop them, because
    /// releasing a lease writes a file.
    pub(super) fn drain_queues(&self, queues: Vec<OutlivingQueue>) {
        let _ = self.tasks.send(FlushThreadTask::DrainQueues(queues));
    }
}

fn run_task(task: FlushThreadTask, stores_marks: &Mutex<bool>) {
    match task {
        FlushThreadTask::Flush(holding, reply) => {
            let result = holding.flush();
            // Dropped before the reply, so that the waiting thread becomes the last holder of the lease.
            drop(holding);
            // The requester may have stopped waiting.
            let _ = reply.send(result);
        }
        FlushThreadTask::StoreMarks(holding) => {
            let stores_marks = stores_marks.lock();
            if *stores_marks.unwrap_or_else(PoisonError::into_inner)
                && let Some(holding) = holding.upgrade()
            {
                holding.store_marks();
            }
        }
        FlushThreadTask::DrainQueues(queues) => {
            for OutlivingQueue { queue, poller } in queues {
                // If the receive fails, the queue has ended with its poller.
                drop(queue.recv());
                drop(poller);
            }
        }
    }
}
