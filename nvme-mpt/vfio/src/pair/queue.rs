//! A member's end of a queue pair: what a shadow queue submits to and reaps from.

use std::any::Any;
use std::os::fd::RawFd;
use std::sync::{Arc, PoisonError, TryLockError};
use std::time::Duration;

use super::core::QueuePairCore;
use super::loans::call_in;
use super::moves::follow;
use super::seat::{
    CurrentQueuePair, LeftoverCommands, NewQueuePairUser, QueueMigration, QueuePairBinding,
};
use super::split::UnsplitLimit;
use super::turns::LeaseShare;
use super::{QueuePairInner, VfioQueuePair};
use nvme_mpt::clock::{self, Ticks};
use nvme_mpt::host::{
    CompletionTaker, CompletionTiming, HostBatch, HostCompletion, HostMemory, HostQueue,
    SharedQueuePair,
};
use nvme_mpt::memory::sync::MutexGuard;
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
    shared: Arc<QueuePairInner>,
    member: u16,
    /// Commands of a batch that take their turn; empty between batches.
    staged: Vec<Sqe>,
    /// Commands that were submitted and not yet handed back.
    outstanding: u32,
    /// Completions between the pair and their taker; empty but while reaping.
    ready: Vec<HostCompletion>,
    whereabouts: Arc<CurrentQueuePair>,
    /// `None` but while it moves to another pair.
    moving: Option<Box<QueueMigration>>,
    /// Dropped last: what its maker wants to live as long as it does.
    _guard: Box<dyn Any + Send>,
}

impl VfioQueue {
    pub(super) fn new(
        pair: &VfioQueuePair,
        slots: u16,
        lba_shift: u8,
        lease: &Arc<LeaseShare>,
        guard: Box<dyn Any + Send>,
    ) -> Self {
        let room = usize::from(slots);
        let whereabouts = CurrentQueuePair::new(&pair.shared);
        let member = pair.shared.lock().join(NewQueuePairUser {
            slots,
            lba_shift,
            lease: lease.clone(),
            whereabouts: whereabouts.clone(),
        });
        Self {
            shared: pair.shared.clone(),
            member,
            staged: Vec::with_capacity(room),
            outstanding: 0,
            ready: Vec::with_capacity(room),
            whereabouts,
            moving: None,
            _guard: guard,
        }
    }

    /// The pair that it is a member of.
    #[must_use]
    pub fn pair(&self) -> VfioQueuePair {
        VfioQueuePair {
            shared: self.shared.clone(),
        }
    }

    /// [`HostQueue::reap`] by some clock.
    #[inline]
    pub(super) fn reap_by(&mut self, clock: impl Fn() -> Ticks, mut taker: impl CompletionTaker) {
        if self.moving.is_some() {
            self.reap_left(&clock);
        }
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

    /// Takes the place that the last batch went to, if the queue moved with it.
    #[cold]
    #[inline(never)]
    fn settle_in(&mut self) {
        let Some(moving) = &mut self.moving else {
            return;
        };
        if let Some(LeftoverCommands { seat, outstanding }) = moving.next.take() {
            let left = LeftoverCommands {
                seat: QueuePairBinding {
                    shared: std::mem::replace(&mut self.shared, seat.shared),
                    member: std::mem::replace(&mut self.member, seat.member),
                },
                outstanding: std::mem::replace(&mut self.outstanding, outstanding),
            };
            // Without commands there, it has left.
            if left.outstanding > 0 {
                moving.left.push(left);
            }
        }
    }

    /// Reaps from the pairs that the queue left with commands in flight, and forgets those that have none. Its pair
    /// hands the completions over, so that the usual way has one source of them.
    #[cold]
    #[inline(never)]
    fn reap_left(&mut self, clock: impl Fn() -> Ticks) {
        self.settle_in();
        let Some(moving) = &mut self.moving else {
            return;
        };
        let (ready, mut done) = (&mut self.ready, Vec::new());
        moving
            .left
            .retain_mut(|LeftoverCommands { seat, outstanding }| {
                let mut core = seat.shared.lock();
                core.reap(&clock);
                core.swap_done(seat.member, ready);
                *outstanding -= ready.len() as u32;
                if *outstanding == 0 {
                    core.leave(seat.member);
                }
                done.append(ready);
                *outstanding > 0
            });
        if moving.left.is_empty() {
            self.moving = None;
        }
        let mut seat = QueuePairBinding {
            shared: self.shared.clone(),
            member: self.member,
        };
        if self.outstanding > 0 {
            seat.shared.lock().hand_on(seat.member, &done);
        } else {
            // It may have moved again, without commands.
            (seat, ()) = follow(seat, |core, member| core.hand_on(member, &done));
            (self.shared, self.member) = (seat.shared, seat.member);
        }
        self.outstanding += done.len() as u32;
    }

    /// Returns the places where it may have commands.
    fn seats(&mut self) -> Vec<QueuePairBinding> {
        self.settle_in();
        let left = self.moving.iter().flat_map(|moving| &moving.left);
        let mut seats: Vec<_> = left.map(|left| left.seat.clone()).collect();
        seats.push(QueuePairBinding {
            shared: self.shared.clone(),
            member: self.member,
        });
        seats
    }
}

/// A batch of a member's commands. While the member has the pair to itself, they go to the ring one
/// by one as they come, under the pair's lock; else they are staged, and take their turn when the
/// batch is rung.
#[derive(Debug)]
pub struct VfioBatch<'a> {
    shared: &'a Arc<QueuePairInner>,
    member: u16,
    staged: &'a mut Vec<Sqe>,
    outstanding: &'a mut u32,
    moving: &'a mut Option<Box<QueueMigration>>,
    direct: Option<DirectSubmission<'a>>,
    /// When the last commands were taken from the guest.
    taken: Ticks,
}

/// Needs of commands that go straight to the ring.
#[derive(Debug)]
struct DirectSubmission<'a> {
    core: MutexGuard<'a, QueuePairCore>,
    limit: UnsplitLimit,
    /// Tail of the ring before those that are not counted.
    tail: u32,
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
        let mut core = match self.direct.take() {
            Some(DirectSubmission { mut core, tail, .. }) => {
                *self.outstanding += core.count_direct(tail) as u32;
                core
            }
            // Most likely another member of the pair has the lock.
            None => match self.shared.try_lock() {
                Some(core) => core,
                None => return,
            },
        };
        if let Some(limit) = core.takes_directly(self.member, count, taken) {
            let tail = core.rings.tail();
            self.direct = Some(DirectSubmission { core, limit, tail });
        } else {
            core.rings.ring();
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
            moving,
            direct,
            taken,
        } = self;
        if let Some(DirectSubmission { mut core, tail, .. }) = direct {
            *outstanding += core.count_direct(tail) as u32;
            core.rings.ring();
        }
        if !staged.is_empty() {
            let mut core = shared.lock();
            if core.lends(member) {
                drop(core);
                call_in(shared);
                core = shared.lock();
            }
            if let Some(seat) = core.take_move(member, *outstanding == 0) {
                drop(core);
                let count = *outstanding + staged.len() as u32;
                let (seat, ()) = follow(seat, |core, member| {
                    core.enqueue(member, staged, count, memory, taken);
                });
                moving.get_or_insert_default().next = Some(LeftoverCommands {
                    seat,
                    outstanding: staged.len() as u32,
                });
            } else {
                *outstanding += staged.len() as u32;
                core.enqueue(member, staged, *outstanding, memory, taken);
            }
            staged.clear();
        }
    }
}

impl HostQueue for VfioQueue {
    /// A drive takes longer than a poll.
    const COMPLETES: CompletionTiming = CompletionTiming::Later;

    const IS_INTERRUPTED: bool = true;

    type Commands = NvmCommands;

    type Batch<'a> = VfioBatch<'a>;

    #[inline]
    fn batch(&mut self) -> VfioBatch<'_> {
        if self.moving.is_some() {
            self.settle_in();
        }
        VfioBatch {
            shared: &self.shared,
            member: self.member,
            staged: &mut self.staged,
            outstanding: &mut self.outstanding,
            moving: &mut self.moving,
            direct: None,
            taken: Ticks::default(),
        }
    }

    #[inline]
    fn reap(&mut self, _: HostMemory<'_>, taker: impl CompletionTaker) {
        self.reap_by(Ticks::now, taker);
    }

    fn cut_short(&mut self) {
        for QueuePairBinding { shared, member } in self.seats() {
            shared.lock().cut_short(member);
        }
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

    fn shared_pair(&self) -> Option<Arc<dyn SharedQueuePair>> {
        Some(self.whereabouts.clone())
    }
}

impl Drop for VfioQueue {
    fn drop(&mut self) {
        for QueuePairBinding { shared, member } in self.seats() {
            while !shared.lock().withdraw(member) {
                shared.lock().reap(Ticks::now);
                clock::sleep(DRAIN_WAIT);
            }
            let mut core = shared.lock();
            let next = core.take_move(member, true);
            core.leave(member);
            drop(core);
            if let Some(seat) = next {
                follow(seat, QueuePairCore::leave);
            }
        }
    }
}

impl QueuePairInner {
    #[inline]
    pub(super) fn lock(&self) -> MutexGuard<'_, QueuePairCore> {
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[inline]
    fn try_lock(&self) -> Option<MutexGuard<'_, QueuePairCore>> {
        match self.core.try_lock() {
            Ok(core) => Some(core),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}
