//! Queue pairs over backing stores that execute each command synchronously.

use std::collections::VecDeque;
use std::fmt;
use std::os::fd::RawFd;

use nvme_mpt::host::{
    CompletionTaker, CompletionTiming, DelayableQueue, HostBatch, HostCompletion, HostMemory,
    HostQueue,
};
use nvme_mpt::shadow::NvmCommands;
use nvme_mpt_memory::clock::Ticks;
use nvme_spec::ids::CommandId;
use nvme_spec::sqe::Sqe;
use nvme_spec::status::Status;

/// A backing store that executes commands synchronously, in the poller's thread. Each queue has its own executor.
pub trait CommandExecutor: fmt::Debug + Send {
    /// Executes a command completely, and returns its status.
    fn execute(&mut self, sqe: &Sqe, memory: HostMemory<'_>) -> Status;

    /// Loads the data of a command into the processor's cache. Called some time before [`Self::execute`].
    fn prefetch(&self, sqe: &Sqe);

    /// True if [`is_long`](Self::is_long) or [`needs_wait`](Self::needs_wait) can return true.
    const HAS_LONG_COMMANDS: bool = false;

    /// Returns whether a command may occupy the poller for longer than its transfer size suggests. The queue executes a long
    /// command in [steps](Self::execute_step), and the poller serves other queues between the steps.
    #[inline]
    fn is_long(_sqe: &Sqe) -> bool {
        false
    }

    /// Returns whether a short command must wait, for example until the ledger has stored a change. The queue then executes the
    /// command in steps, too.
    #[inline]
    fn needs_wait(&self, _sqe: &Sqe) -> bool {
        false
    }

    /// Executes the next step of a command that is executed in steps. `_steps` is the number of its steps that were executed
    /// before.
    fn execute_step(&mut self, sqe: &Sqe, memory: HostMemory<'_>, _steps: usize) -> ExecutionStep {
        ExecutionStep {
            bytes: 0,
            status: Some(self.execute(sqe, memory)),
        }
    }
}

/// Result of one step of a command that is executed in steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExecutionStep {
    /// Number of the drive's bytes that the step has written.
    pub bytes: u64,
    /// Status of the command; `None` if it needs further steps.
    pub status: Option<Status>,
}

/// Number of written bytes after which one call of `reap` executes no further step of long commands. Zeroing these bytes takes
/// about a tenth of a millisecond.
pub(crate) const TURN_BYTES: u64 = 1 << 20;

/// Number of commands, after the one that is executed, whose data is loaded into the processor's cache.
const PREFETCH_COMMANDS: usize = 4;

/// Queue pair that executes short commands when the doorbell is rung, and long commands in steps when it is reaped.
#[derive(Debug)]
pub struct SoftwareQueue<S> {
    pub(crate) executor: S,
    sq: Vec<Sqe>,
    cq: Vec<HostCompletion>,
    /// Commands that are executed in steps, in submission order.
    long_commands: VecDeque<Sqe>,
    /// Number of steps of the first command in `long_commands` that were executed.
    executed_steps: usize,
    /// Set when the queue ends, so that no further step begins.
    is_stopping: bool,
}

impl<S: CommandExecutor> SoftwareQueue<S> {
    /// Creates a queue pair for up to `slots` commands.
    #[must_use]
    pub fn new(store: S, slots: u16) -> Self {
        let capacity = usize::from(slots);
        Self {
            executor: store,
            sq: Vec::with_capacity(capacity),
            cq: Vec::with_capacity(capacity),
            long_commands: VecDeque::with_capacity(capacity),
            executed_steps: 0,
            is_stopping: false,
        }
    }

    fn complete(&mut self, slot: CommandId, status: Status) {
        self.cq.push(HostCompletion {
            slot: slot.0,
            status,
            dw0: 0,
        });
    }

    /// Executes steps of long commands, until none is left or until the steps have written [`TURN_BYTES`].
    #[cold]
    #[inline(never)]
    fn execute_long_steps(&mut self, memory: HostMemory<'_>) {
        let mut bytes = 0;
        while bytes < TURN_BYTES
            && let Some(sqe) = self.long_commands.front()
        {
            let slot = sqe.cid();
            let status = if self.is_stopping {
                Some(Status::ABORTED_SQ_DELETION)
            } else {
                let step = self.executor.execute_step(sqe, memory, self.executed_steps);
                bytes += step.bytes;
                self.executed_steps += 1;
                step.status
            };
            if let Some(status) = status {
                self.long_commands.pop_front();
                self.executed_steps = 0;
                self.complete(slot, status);
            }
        }
    }
}

/// Executes all commands of `sq` in order. Leaves out those for which `postpone` returns true.
#[inline]
fn execute_all<S: CommandExecutor>(
    store: &mut S,
    sq: &mut Vec<Sqe>,
    memory: HostMemory<'_>,
    mut postpone: impl FnMut(&S, &Sqe) -> bool,
    mut done: impl FnMut(&Sqe, Status),
) {
    for sqe in sq.iter().take(PREFETCH_COMMANDS) {
        store.prefetch(sqe);
    }
    for (i, sqe) in sq.iter().enumerate() {
        if let Some(ahead) = sq.get(i + PREFETCH_COMMANDS) {
            store.prefetch(ahead);
        }
        if !postpone(store, sqe) {
            let status = store.execute(sqe, memory);
            done(sqe, status);
        }
    }
    sq.clear();
}

/// Adds a command to `long` if it must be executed in steps. Returns whether it was added.
#[inline]
fn defer_if_long<S: CommandExecutor>(store: &S, sqe: &Sqe, long: &mut VecDeque<Sqe>) -> bool {
    let is_long = S::HAS_LONG_COMMANDS && (S::is_long(sqe) || store.needs_wait(sqe));
    if is_long {
        long.push_back(*sqe);
    }
    is_long
}

impl<S: CommandExecutor> DelayableQueue for SoftwareQueue<S> {
    const IS_SYNCHRONOUS: bool = true;

    fn submitted_commands(&self) -> impl Iterator<Item = &Sqe> {
        self.sq.iter()
    }

    #[inline]
    fn ring_and_complete(&mut self, memory: HostMemory<'_>, done: impl FnMut(&Sqe, Status)) {
        let Self {
            executor: store,
            sq,
            long_commands: long,
            ..
        } = self;
        let postpone = |store: &S, sqe: &Sqe| defer_if_long(store, sqe, long);
        execute_all(store, sq, memory, postpone, done);
    }

    fn deferred_commands(&self) -> impl Iterator<Item = &Sqe> {
        self.long_commands.iter()
    }
}

impl<S: CommandExecutor> HostBatch for &mut SoftwareQueue<S> {
    #[inline]
    fn announce(&mut self, _: u32, _: Ticks) {}

    #[inline]
    fn submit(&mut self, sqe: &Sqe) {
        debug_assert!(self.sq.len() < self.sq.capacity());
        self.sq.push(*sqe);
    }

    #[inline]
    fn ring(self, memory: HostMemory<'_>) {
        let SoftwareQueue {
            executor: store,
            sq,
            cq,
            long_commands: long,
            ..
        } = self;
        let postpone = |store: &S, sqe: &Sqe| defer_if_long(store, sqe, long);
        execute_all(store, sq, memory, postpone, |sqe, status| {
            cq.push(HostCompletion {
                slot: sqe.cid().0,
                status,
                dw0: 0,
            });
        });
    }
}

impl<S: CommandExecutor> HostQueue for SoftwareQueue<S> {
    const COMPLETION_TIMING: CompletionTiming = CompletionTiming::Immediate;

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
    fn reap(&mut self, memory: HostMemory<'_>, mut taker: impl CompletionTaker) {
        if self.has_deferred_commands() {
            self.execute_long_steps(memory);
        }
        for completion in self.cq.drain(..) {
            taker.take(completion);
        }
    }

    fn cut_short(&mut self) {
        self.is_stopping = true;
    }

    fn drain(&mut self) -> bool {
        true
    }

    fn wait_fd(&self) -> Option<RawFd> {
        None
    }

    /// Returns the present as due time while commands are deferred. A layer in front of this queue calls `next_due`, but not
    /// `has_deferred_commands`.
    fn next_due(&self) -> Option<Ticks> {
        self.has_deferred_commands().then_some(Ticks(0))
    }

    #[inline]
    fn has_deferred_commands(&self) -> bool {
        S::HAS_LONG_COMMANDS && !self.long_commands.is_empty()
    }
}
