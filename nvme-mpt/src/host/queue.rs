//! Data path of a host controller: queues, batches of commands, completions.

use std::fmt;
use std::os::fd::RawFd;
use std::sync::Arc;

use nvme_guest::dma::RegionTable;
use nvme_mpt_memory::clock::Ticks;
use nvme_spec::sqe::Sqe;
use nvme_spec::status::Status;

use crate::host::ListMemory;

/// Completion of a command by a host controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostCompletion {
    /// Command identifier at the host controller, which is the slot number.
    pub slot: u16,
    /// Completion status.
    pub status: Status,
    /// Dword 0 of the completion.
    pub dw0: u32,
}

/// Memory to which the addresses in a translated command refer. A software-defined drive looks them up here. A physical drive
/// reaches the memory through the IOMMU, and its queue reads only lists here.
#[derive(Clone, Copy, Debug)]
pub struct HostMemory<'a> {
    /// The VM's memory.
    pub table: &'a RegionTable,
    /// Memory of the lists (PRP lists, SGLs and ranges) of the queue's slots.
    pub lists: &'a ListMemory,
}

/// Time at which the commands of a host queue complete, relative to the poll that submits them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompletionTiming {
    /// All commands complete while their doorbell is rung, apart from [deferred commands](HostQueue::has_deferred_commands).
    Immediate,
    /// Some commands complete while their doorbell is rung.
    Mixed,
    /// No command completes before the end of the poll.
    Deferred,
}

/// Data path of one host queue pair. Only one thread uses it at a time.
pub trait HostQueue {
    /// Time at which commands complete, so that the poller knows when to reap.
    const COMPLETION_TIMING: CompletionTiming = CompletionTiming::Mixed;

    /// True if a reset of the drive completes commands with Command Interrupted. The shadow queue resubmits such commands.
    const IS_INTERRUPTED: bool = false;

    /// Command set of the queue's commands; a [`CommandSet`](crate::shadow::CommandSet) if a shadow queue uses the queue.
    type Commands;

    /// Type of the batches that [`Self::batch`] starts.
    type Batch<'a>: HostBatch
    where
        Self: 'a;

    /// Starts a batch of commands for the host SQ. An empty batch costs nothing.
    fn batch(&mut self) -> Self::Batch<'_>;

    /// Passes available completions to `taker`.
    fn reap(&mut self, memory: HostMemory<'_>, taker: impl CompletionTaker);

    /// Lets the queue's commands start no further step. Called when the queue is about to be deleted and gets no more commands.
    /// A command with steps left ends with [`Status::ABORTED_SQ_DELETION`] when its current step is done.
    fn cut_short(&mut self);

    /// Waits, before the queue is dropped, for commands that the drive has not completed. Returns whether all have completed.
    ///
    /// If some have not, the shadow queue never releases the memory and the lease that they use.
    fn drain(&mut self) -> bool;

    /// Returns a descriptor that is readable while completions are available, for a poller that wants to sleep; `None` if
    /// commands complete while their doorbell is rung.
    fn wait_fd(&self) -> Option<RawFd>;

    /// Returns whether the queue has commands that continue only at the next [reap](Self::reap), although its [completion
    /// timing](Self::COMPLETION_TIMING) is immediate for all other commands.
    fn has_deferred_commands(&self) -> bool {
        false
    }

    /// Returns whether the queue has failed and can only be deleted.
    fn has_failed(&self) -> bool {
        false
    }

    /// Returns whether the drive was removed, so that all commands fail.
    fn is_gone(&self) -> bool {
        false
    }

    /// Returns the present size in blocks of the drive's namespace; `None` if the size cannot change.
    fn blocks(&self) -> Option<u64> {
        None
    }

    /// Returns whether commands can complete without a signal that wakes a sleeping poller.
    fn is_polled(&self) -> bool {
        false
    }

    /// Sets whether commands complete as soon as they can, instead of at their due time. It is set while a caller waits until
    /// no command of the queue is in flight.
    fn set_hurried(&mut self, hurried: bool) {
        let _ = hurried;
    }

    /// Returns the earliest time at which the poller must poll the queue without being woken, such as the due time of a
    /// command; `None` if there is no such time.
    fn next_due(&self) -> Option<Ticks> {
        None
    }

    /// Returns the drive's queue pair behind this queue, which several host queues may share; `None` if the drive creates a
    /// queue pair for each host queue.
    fn shared_pair(&self) -> Option<Arc<dyn SharedQueuePair>> {
        None
    }
}

/// Queue pair of a drive that several host queues may share. A host queue may move to another pair.
pub trait SharedQueuePair: fmt::Debug + Send + Sync {
    /// Returns the number of host queues that share the pair.
    fn user_count(&self) -> usize;

    /// Returns whether the pair is reserved for the lease of the host queue.
    fn is_reserved(&self) -> bool;
}

/// Batch of commands for a host SQ. Work that all commands need is done once per batch.
pub trait HostBatch {
    /// Announces at most `count` commands, which were taken from the guest at time `taken`.
    fn announce(&mut self, count: u32, taken: Ticks);

    /// Writes an announced command to the host SQ, which has free entries for as many commands as the queue has slots.
    fn submit(&mut self, sqe: &Sqe);

    /// Submits a command again that the host controller may have executed already, partly or completely.
    fn resubmit(&mut self, sqe: &Sqe) {
        self.submit(sqe);
    }

    /// Rings the host SQ's doorbell, so that the controller starts the batch.
    fn ring(self, memory: HostMemory<'_>);
}

/// Receiver of completions. Closures implement it; a separate type can request inlining.
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
