//! The data path of a host controller: queues, batches of commands, completions.

use std::fmt;
use std::os::fd::RawFd;
use std::sync::Arc;

use crate::clock::Ticks;
use crate::dma::RegionTable;
use crate::host::ListMemory;
use crate::spec::sqe::Sqe;
use crate::spec::status::Status;

/// Completion of a command by a host controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostCompletion {
    /// The command's identifier at the host controller: its slot.
    pub slot: u16,
    /// Status with which it ended.
    pub status: Status,
    /// Dword 0 of the completion.
    pub dw0: u32,
}

/// The memory that translated commands name: what an IOMMU would let the host controller reach.
#[derive(Clone, Copy, Debug)]
pub struct HostMemory<'a> {
    /// The VM's memory.
    pub table: &'a RegionTable,
    /// The slots' own lists.
    pub lists: &'a ListMemory,
}

/// Time at which a host queue's commands complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Completes {
    /// All of them while they are rung in, but for those that are [put off](HostQueue::puts_off).
    AtOnce,
    /// Some of them while they are rung in.
    SoonOrLater,
    /// None of them before a poll is over.
    Later,
}

/// The data path of one host queue pair. It is used by one thread at a time.
pub trait HostQueue {
    /// Time at which its commands complete: a poller looks for completions then.
    const COMPLETES: Completes = Completes::SoonOrLater;

    /// True if a reset of the drive ends commands with Command Interrupted, which the shadow queue is to give it again.
    const IS_INTERRUPTED: bool = false;

    /// The command set that its commands belong to: a [`CommandSet`](crate::shadow::CommandSet) where a shadow queue has
    /// it.
    type Commands;

    /// See [`Self::batch`].
    type Batch<'a>: HostBatch
    where
        Self: 'a;

    /// A batch of commands for the host SQ. One that nothing is submitted to costs nothing.
    fn batch(&mut self) -> Self::Batch<'_>;

    /// Hands over completions that are there.
    fn reap(&mut self, memory: HostMemory<'_>, taker: impl CompletionTaker);

    /// Begins no further step of any command: one that has steps left ends with
    /// [`Status::ABORTED_SQ_DELETION`] when the step is done that the drive has of it. The queue gets no
    /// more commands, and is deleted when the last one has ended.
    fn cut_short(&mut self);

    /// Waits for what the drive still has of it, as it is about to be dropped. Returns whether the drive has nothing
    /// more.
    ///
    /// If it has, the shadow queue keeps the memory and the lease that its commands name for good.
    fn settle(&mut self) -> bool;

    /// Becomes readable when completions are there, for a poller that wants to sleep; `None` if
    /// commands complete while they are rung in, so that there is nothing to wait for.
    fn wait_fd(&self) -> Option<RawFd>;

    /// Returns whether it goes on with commands when completions are [reaped](Self::reap) next, although it
    /// [completes](Self::COMPLETES) others at once.
    fn puts_off(&self) -> bool {
        false
    }

    /// Returns whether it can only be deleted.
    fn has_failed(&self) -> bool {
        false
    }

    /// Returns whether its drive was removed, so that all that it is given fails.
    fn is_gone(&self) -> bool {
        false
    }

    /// Blocks that its drive's namespace has now; `None` if it keeps those that it had.
    fn blocks(&self) -> Option<u64> {
        None
    }

    /// Returns whether commands can complete without a notification.
    fn is_polled(&self) -> bool {
        false
    }

    /// Sets whether commands complete as soon as they can, instead of when they are due: while a caller waits
    /// for the queue to be empty.
    fn hurry(&mut self, hurried: bool) {
        let _ = hurried;
    }

    /// A moment before which nothing happens here but by a completion that wakes the poller; `None` if nothing
    /// ever does.
    fn next_due(&self) -> Option<Ticks> {
        None
    }

    /// The drive's own queue pair behind it, which others may come to share; `None` for a drive that makes any
    /// number of them.
    fn shared_pair(&self) -> Option<Arc<dyn SharedPair>> {
        None
    }
}

/// The queue pair of a drive behind a host queue, which other host queues may share. It may become another one.
pub trait SharedPair: fmt::Debug + Send + Sync {
    /// Returns the number of host queues that share it.
    fn members(&self) -> usize;

    /// Returns whether it belongs to the lease of the host queue.
    fn is_reserved(&self) -> bool;
}

/// Commands on their way into a host SQ: what they need in common is done once for all of them.
pub trait HostBatch {
    /// Tells that so many commands follow at most, which were taken from the guest at this time.
    fn announce(&mut self, count: u32, taken: Ticks);

    /// Writes a command into the host SQ, one of those that were announced. There is room for as
    /// many as there are slots.
    fn submit(&mut self, sqe: &Sqe);

    /// As [`Self::submit`], for a command that a process which ended may have carried out in part or as a whole.
    fn submit_again(&mut self, sqe: &Sqe) {
        self.submit(sqe);
    }

    /// Rings the host SQ's doorbell: the controller starts on all that was submitted.
    fn ring(self, memory: HostMemory<'_>);
}

/// Taker of completions. Any closure that takes one is; a type of its own can ask that its work is compiled
/// into each place of use.
pub trait CompletionTaker {
    /// Takes a completion.
    fn take(&mut self, completion: HostCompletion);
}

impl<F: FnMut(HostCompletion)> CompletionTaker for F {
    #[inline]
    fn take(&mut self, completion: HostCompletion) {
        self(completion);
    }
}
