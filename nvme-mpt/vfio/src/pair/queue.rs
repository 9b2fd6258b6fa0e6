//! A member's end of a queue pair: what a shadow queue submits to and reaps from.

use std::any::Any;
use std::os::fd::RawFd;
use std::sync::{Arc, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

use super::core::Core;
use super::split::WholeLimit;
use super::{Pair, Shared};
use nvme_mpt::clock::Ticks;
use nvme_mpt::host::{
    Completes, CompletionTaker, HostBatch, HostCompletion, HostMemory, HostQueue, SharedPair,
};
use nvme_mpt::shadow::NvmCommands;
use nvme_mpt::spec::sqe::Sqe;

/// Pause of a dropped queue between two looks for commands that the drive still has.
const DRAIN_WAIT: Duration = Duration::from_micros(50);

/// A share of a host queue pair, or all of one.
///
/// The pair's lock is taken once per batch, in and out. Dropped, it waits until the drive has nothing of it:
/// the drive completes its commands, or the controller's supervision does.
#[derive(Debug)]
pub struct VfioQueue {
    shared: Arc<Shared>,
    member: u16,
    /// Commands of a batch that take their turn; empty between batches.
    staged: Vec<Sqe>,
    /// Commands that were submitted and not yet handed back.
    outstanding: u32,
    /// Completions between the pair and their taker; empty but while reaping.
    ready: Vec<HostCompletion>,
    /// Dropped last: what its maker wants to live as long as it does.
    _guard: Box<dyn Any + Send>,
}

impl VfioQueue {
    pub(super) fn new(pair: &Pair, slots: u16, lba_shift: u8, guard: Box<dyn Any + Send>) -> Self {
        let room = usize::from(slots);
        let member = pair.shared.lock().join(slots, lba_shift);
        Self {
            shared: pair.shared.clone(),
            member,
            staged: Vec::with_capacity(room),
            outstanding: 0,
            ready: Vec::with_capacity(room),
            _guard: guard,
        }
    }

    /// The pair that it is a member of.
    #[must_use]
    pub fn pair(&self) -> Pair {
        Pair {
            shared: self.shared.clone(),
        }
    }

    /// [`HostQueue::reap`] by some clock.
    #[inline]
    pub(super) fn reap_by(&mut self, clock: impl Fn() -> Ticks, mut taker: impl CompletionTaker) {
        if self.outstanding == 0 {
            return;
        }
        let Some(mut core) = self.shared.try_lock() else {
            // Somebody else is at it, who reaps for us, too.
            return;
        };
        if core.is_direct(self.member) {
            self.outstanding -= core.reap_directly(&clock, &mut taker) as u32;
        } else {
            core.reap(&clock);
        }
        core.swap_done(self.member, &mut self.ready);
        drop(core);
        self.outstanding -= self.ready.len() as u32;
        for completion in self.ready.drain(..) {
            taker.take(completion);
        }
    }
}

/// A batch of a member's commands. While the member has the pair to itself, they go to the ring one
/// by one as they come, under the pair's lock; else they are staged, and take their turn when the
/// batch is rung.
#[derive(Debug)]
pub struct VfioBatch<'a> {
    shared: &'a Shared,
    member: u16,
    staged: &'a mut Vec<Sqe>,
    outstanding: &'a mut u32,
    direct: Option<Direct<'a>>,
    /// When the last commands were taken from the guest.
    taken: Ticks,
}

/// Needs of commands that go straight to the ring.
#[derive(Debug)]
struct Direct<'a> {
    core: MutexGuard<'a, Core>,
    limit: WholeLimit,
    /// Number of commands in flight before.
    before: usize,
}

impl VfioBatch<'_> {
    /// Lets a command take its turn.
    #[cold]
    fn stage(&mut self, sqe: &Sqe) {
        debug_assert!(self.staged.len() < self.staged.capacity());
        self.staged.push(*sqe);
    }
}

impl HostBatch for VfioBatch<'_> {
    #[inline]
    fn announce(&mut self, count: u32, taken: Ticks) {
        self.taken = taken;
        let (mut core, before) = match self.direct.take() {
            Some(Direct { core, before, .. }) => (core, Some(before)),
            // Most likely another member of the pair has the lock.
            None => match self.shared.try_lock() {
                Some(core) => (core, None),
                None => return,
            },
        };
        if let Some(limit) = core.takes_directly(self.member, count, taken) {
            let before = before.unwrap_or(core.in_flight());
            self.direct = Some(Direct {
                core,
                limit,
                before,
            });
        } else if let Some(before) = before {
            *self.outstanding += core.ring(before) as u32;
        }
    }

    #[inline(always)]
    fn submit(&mut self, sqe: &Sqe) {
        if let Some(direct) = &mut self.direct
            && direct.core.submit_directly(sqe, direct.limit, self.taken)
        {
            return;
        }
        self.stage(sqe);
    }

    #[inline]
    fn ring(self, memory: HostMemory<'_>) {
        let Self {
            shared,
            member,
            staged,
            outstanding,
            direct,
            taken,
        } = self;
        if let Some(Direct {
            mut core, before, ..
        }) = direct
        {
            *outstanding += core.ring(before) as u32;
        }
        if !staged.is_empty() {
            *outstanding += staged.len() as u32;
            shared
                .lock()
                .enqueue(member, staged, *outstanding, memory, taken);
            staged.clear();
        }
    }
}

impl HostQueue for VfioQueue {
    /// A drive takes longer than a poll.
    const COMPLETES: Completes = Completes::Later;

    type Commands = NvmCommands;

    type Batch<'a> = VfioBatch<'a>;

    #[inline]
    fn batch(&mut self) -> VfioBatch<'_> {
        VfioBatch {
            shared: &self.shared,
            member: self.member,
            staged: &mut self.staged,
            outstanding: &mut self.outstanding,
            direct: None,
            taken: Ticks::default(),
        }
    }

    #[inline]
    fn reap(&mut self, _: HostMemory<'_>, taker: impl CompletionTaker) {
        self.reap_by(Ticks::now, taker);
    }

    fn cut_short(&mut self) {
        self.shared.lock().cut_short(self.member);
    }

    /// Its drop waits for the drive, however long that takes.
    fn settle(&mut self) -> bool {
        true
    }

    /// The drive's completions are polled.
    fn wait_fd(&self) -> Option<RawFd> {
        None
    }

    fn is_polled(&self) -> bool {
        true
    }

    fn shared_pair(&self) -> Option<Arc<dyn SharedPair>> {
        Some(self.shared.clone())
    }
}

impl Drop for VfioQueue {
    fn drop(&mut self) {
        while !self.shared.lock().withdraw(self.member) {
            self.shared.lock().reap(Ticks::now);
            std::thread::sleep(DRAIN_WAIT);
        }
        self.shared.lock().leave(self.member);
    }
}

impl SharedPair for Shared {
    fn members(&self) -> usize {
        self.lock().members()
    }
}

impl Shared {
    #[inline]
    pub(super) fn lock(&self) -> MutexGuard<'_, Core> {
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[inline]
    fn try_lock(&self) -> Option<MutexGuard<'_, Core>> {
        match self.core.try_lock() {
            Ok(core) => Some(core),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}
