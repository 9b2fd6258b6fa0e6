//! Stores whose commands complete while they are rung in, and their queues.

use std::fmt;
use std::os::fd::RawFd;

use nvme_mpt::clock::Ticks;
use nvme_mpt::host::{
    Completes, CompletionTaker, HostBatch, HostCompletion, HostMemory, HostQueue,
};
use nvme_mpt::shadow::NvmCommands;
use nvme_mpt::spec::sqe::Sqe;
use nvme_mpt::spec::status::Status;

use crate::model::TimedStore;

/// Commands are executed here: in the poller, when their queue is rung.
pub trait Store: fmt::Debug + Send {
    /// Executes a command to its end.
    fn execute(&mut self, sqe: &Sqe, memory: HostMemory<'_>) -> Status;

    /// Asks the processor to fetch what a command will need. It comes before `execute`.
    fn prefetch(&self, sqe: &Sqe);
}

/// Commands whose data is fetched into the cache ahead of the one that is executed.
const PREFETCH: usize = 4;

/// A queue pair whose commands complete while they are rung in.
#[derive(Debug)]
pub struct SoftwareQueue<S> {
    store: S,
    sq: Vec<Sqe>,
    cq: Vec<HostCompletion>,
}

impl<S: Store> SoftwareQueue<S> {
    /// A queue pair with room for `slots` commands.
    #[must_use]
    pub fn new(store: S, slots: u16) -> Self {
        let room = usize::from(slots);
        Self {
            store,
            sq: Vec::with_capacity(room),
            cq: Vec::with_capacity(room),
        }
    }
}

/// Executes what is in an SQ, in order.
#[inline]
fn execute<S: Store>(
    store: &mut S,
    sq: &mut Vec<Sqe>,
    memory: HostMemory<'_>,
    mut done: impl FnMut(&Sqe, Status),
) {
    for sqe in sq.iter().take(PREFETCH) {
        store.prefetch(sqe);
    }
    for (i, sqe) in sq.iter().enumerate() {
        if let Some(ahead) = sq.get(i + PREFETCH) {
            store.prefetch(ahead);
        }
        let status = store.execute(sqe, memory);
        done(sqe, status);
    }
    sq.clear();
}

impl<S: Store> TimedStore for SoftwareQueue<S> {
    const AT_ONCE: bool = true;

    fn arriving(&self) -> impl Iterator<Item = &Sqe> {
        self.sq.iter()
    }

    #[inline]
    fn ring_through(&mut self, memory: HostMemory<'_>, done: impl FnMut(&Sqe, Status)) {
        execute(&mut self.store, &mut self.sq, memory, done);
    }
}

impl<S: Store> HostBatch for &mut SoftwareQueue<S> {
    #[inline]
    fn announce(&mut self, _: u32, _: Ticks) {}

    #[inline]
    fn submit(&mut self, sqe: &Sqe) {
        debug_assert!(self.sq.len() < self.sq.capacity());
        self.sq.push(*sqe);
    }

    #[inline]
    fn ring(self, memory: HostMemory<'_>) {
        let SoftwareQueue { store, sq, cq } = self;
        execute(store, sq, memory, |sqe, status| {
            cq.push(HostCompletion {
                slot: sqe.cid().0,
                status,
                dw0: 0,
            });
        });
    }
}

impl<S: Store> HostQueue for SoftwareQueue<S> {
    const COMPLETES: Completes = Completes::AtOnce;

    type Commands = NvmCommands;

    type Batch<'a>
        = &'a mut Self
    where
        S: 'a;

    #[inline]
    fn batch(&mut self) -> &mut Self {
        self
    }

    #[inline]
    fn reap(&mut self, _: HostMemory<'_>, mut taker: impl CompletionTaker) {
        for completion in self.cq.drain(..) {
            taker.take(completion);
        }
    }

    /// Each command is executed to its end when it is rung in.
    fn cut_short(&mut self) {}

    fn settle(&mut self) -> bool {
        true
    }

    fn wait_fd(&self) -> Option<RawFd> {
        None
    }
}
