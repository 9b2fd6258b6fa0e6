//! A user's end of a queue pair: the host queue that a shadow queue submits to and reaps from.

use std::any::Any;
use std::os::fd::RawFd;
use std::sync::{Arc, PoisonError, TryLockError};
use std::time::Duration;

use super::arbitration::LeaseShare;
use super::ballooning::recall_borrowers;
use super::binding::{
    CurrentQueuePair, LeftoverCommands, NewQueuePairUser, QueueMigration, QueuePairBinding,
};
use super::core::QueuePairCore;
use super::migration::follow_migrations;
use super::split::UnsplitLimit;
use super::{QueuePairInner, VfioQueuePair};
use nvme_mpt::host::{
    CompletionTaker, CompletionTiming, HostBatch, HostCompletion, HostMemory, HostQueue,
    SharedQueuePair,
};
use nvme_mpt::shadow::NvmCommands;
use nvme_mpt_memory::clock::{self, Ticks};
use nvme_mpt_memory::sync::MutexGuard;
use nvme_spec::sqe::Sqe;

/// Interval at which a dropped queue polls for its commands in flight.
const DRAIN_POLL_INTERVAL: Duration = Duration::from_micros(50);

/// A host queue of a physical drive: the only user of a queue pair, or one of several.
///
/// The pair's lock is taken once per batch, for submission and for completion. Dropping the queue waits until none of its
/// commands is in flight: the drive completes the commands, or the drive monitor ends them.
#[derive(Debug)]
pub struct VfioQueue {
    shared: Arc<QueuePairInner>,
    user: u16,
    /// Commands of the present batch that will go through arbitration; empty between batches.
    staged: Vec<Sqe>,
    /// Number of submitted commands whose completions the caller has not got yet.
    outstanding: u32,
    /// Completions for the caller, taken from the pair; empty except during a reap.
    ready: Vec<HostCompletion>,
    current_pair: Arc<CurrentQueuePair>,
    /// State of a migration to another pair; `None` while the queue is not migrating.
    migration: Option<Box<QueueMigration>>,
    /// Guard that the queue's creator has passed. Dropped last, so that it lives as long as the queue.
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
        let capacity = usize::from(slots);
        let current_pair = CurrentQueuePair::new(&pair.shared);
        let user = pair.shared.lock().join(NewQueuePairUser {
            slots,
            lba_shift,
            lease: lease.clone(),
            current_pair: current_pair.clone(),
        });
        Self {
            shared: pair.shared.clone(),
            user,
            staged: Vec::with_capacity(capacity),
            outstanding: 0,
            ready: Vec::with_capacity(capacity),
            current_pair,
            migration: None,
            _guard: guard,
        }
    }

    /// Returns the queue's current pair.
    #[must_use]
    pub fn pair(&self) -> VfioQueuePair {
        VfioQueuePair {
            shared: self.shared.clone(),
        }
    }

    /// Reaps completions as [`HostQueue::reap`] does, with the given clock.
    #[inline]
    pub(super) fn reap_with_clock(
        &mut self,
        clock: impl Fn() -> Ticks,
        mut taker: impl CompletionTaker,
    ) {
        if self.migration.is_some() {
            self.reap_left_pairs(&clock);
        }
        if self.outstanding == 0 {
            return;
        }
        let Some(mut core) = self.shared.try_lock() else {
            // The thread that holds the lock distributes the completions of this queue as well.
            return;
        };
        if core.is_lone(self.user) {
            self.outstanding -= core.reap_lone(&clock, &mut taker) as u32;
        } else {
            self.outstanding -= core.reap_shared(self.user, &clock, &mut taker);
        }
        core.swap_done(self.user, &mut self.ready);
        drop(core);
        self.outstanding -= self.ready.len() as u32;
        for completion in self.ready.drain(..) {
            taker.take(completion);
        }
    }

    /// Makes the new pair the current one, if the queue has migrated with the last batch.
    #[cold]
    #[inline(never)]
    fn switch_to_new_pair(&mut self) {
        let Some(moving) = &mut self.migration else {
            return;
        };
        if let Some(LeftoverCommands {
            binding,
            outstanding,
        }) = moving.next.take()
        {
            let left = LeftoverCommands {
                binding: QueuePairBinding {
                    shared: std::mem::replace(&mut self.shared, binding.shared),
                    user: std::mem::replace(&mut self.user, binding.user),
                },
                outstanding: std::mem::replace(&mut self.outstanding, outstanding),
            };
            // A queue that has no commands on the old pair has already left that pair.
            if left.outstanding > 0 {
                moving.left.push(left);
            }
        }
    }

    /// Reaps from the pairs that the queue has left with commands in flight, and drops the pairs where none is in flight any
    /// more. Hands the completions to the current pair, so that the fast path reads from one pair only.
    #[cold]
    #[inline(never)]
    fn reap_left_pairs(&mut self, clock: impl Fn() -> Ticks) {
        self.switch_to_new_pair();
        let Some(moving) = &mut self.migration else {
            return;
        };
        let (ready, mut done) = (&mut self.ready, Vec::new());
        moving.left.retain_mut(
            |LeftoverCommands {
                 binding,
                 outstanding,
             }| {
                let mut core = binding.shared.lock();
                core.reap(&clock);
                core.swap_done(binding.user, ready);
                *outstanding -= ready.len() as u32;
                if *outstanding == 0 {
                    core.leave(binding.user);
                }
                done.append(ready);
                *outstanding > 0
            },
        );
        if moving.left.is_empty() {
            self.migration = None;
        }
        let mut binding = QueuePairBinding {
            shared: self.shared.clone(),
            user: self.user,
        };
        if self.outstanding > 0 {
            binding.shared.lock().add_completions(binding.user, &done);
        } else {
            // The queue may have migrated again while it had no commands.
            (binding, ()) =
                follow_migrations(binding, |core, user| core.add_completions(user, &done));
            (self.shared, self.user) = (binding.shared, binding.user);
        }
        self.outstanding += done.len() as u32;
    }

    /// Returns the bindings to all pairs where the queue may have commands.
    fn bindings(&mut self) -> Vec<QueuePairBinding> {
        self.switch_to_new_pair();
        let left = self.migration.iter().flat_map(|moving| &moving.left);
        let mut seats: Vec<_> = left.map(|left| left.binding.clone()).collect();
        seats.push(QueuePairBinding {
            shared: self.shared.clone(),
            user: self.user,
        });
        seats
    }
}

/// A batch of commands of one queue. Commands that need no arbitration go directly to the ring, under the pair's lock. All
/// others are staged, and go through arbitration when the batch is rung.
#[derive(Debug)]
pub struct VfioBatch<'a> {
    shared: &'a Arc<QueuePairInner>,
    user: u16,
    staged: &'a mut Vec<Sqe>,
    outstanding: &'a mut u32,
    migration: &'a mut Option<Box<QueueMigration>>,
    direct: Option<DirectSubmission<'a>>,
    /// Time at which the latest commands of the batch were taken from the guest's queues.
    taken_at: Ticks,
}

/// State of a batch whose commands go directly to the ring, while it holds the pair's lock.
#[derive(Debug)]
enum DirectSubmission<'a> {
    /// Commands of a lone user.
    Lone {
        core: MutexGuard<'a, QueuePairCore>,
        limit: UnsplitLimit,
        /// Tail that the ring had before the first command that is not counted yet.
        tail: u32,
    },
    /// Commands of a user of a shared pair. The pair's state has the permission.
    Shared(MutexGuard<'a, QueuePairCore>),
}

impl<'a> DirectSubmission<'a> {
    /// Counts the commands of a batch that were taken from the guest at time `taken`. Returns the pair's state and the number
    /// of commands.
    #[inline]
    fn count(self, taken: Ticks) -> (MutexGuard<'a, QueuePairCore>, u32) {
        match self {
            Self::Lone { mut core, tail, .. } => {
                let count = core.count_lone(tail);
                (core, count)
            }
            Self::Shared(mut core) => {
                let count = core.count_shared(taken);
                (core, count)
            }
        }
    }
}

impl VfioBatch<'_> {
    /// Adds a command to those of the batch that will go through arbitration.
    #[cold]
    fn stage(&mut self, sqe: &Sqe) {
        debug_assert!(self.staged.len() < self.staged.capacity());
        self.staged.push(*sqe);
    }
}

impl HostBatch for VfioBatch<'_> {
    #[inline]
    fn announce(&mut self, count: u32, taken: Ticks) {
        let before = std::mem::replace(&mut self.taken_at, taken);
        let mut core = match self.direct.take() {
            Some(direct) => {
                let (core, count) = direct.count(before);
                *self.outstanding += count;
                core
            }
            // If the lock is taken, usually another user of the pair holds it.
            None => match self.shared.try_lock() {
                Some(core) => core,
                None => return,
            },
        };
        if let Some(limit) = core.permit_lone(self.user, count, taken) {
            let tail = core.rings.tail();
            self.direct = Some(DirectSubmission::Lone { core, limit, tail });
        } else if core.permit_shared(self.user, count, taken) {
            self.direct = Some(DirectSubmission::Shared(core));
        } else {
            core.rings.ring_sq();
        }
    }

    #[inline(always)]
    fn submit(&mut self, sqe: &Sqe) {
        let is_submitted = match &mut self.direct {
            Some(DirectSubmission::Lone { core, limit, .. }) => {
                core.submit_lone(sqe, *limit, self.taken_at)
            }
            Some(DirectSubmission::Shared(core)) => core.submit_shared(sqe, self.taken_at),
            None => false,
        };
        if !is_submitted {
            self.stage(sqe);
        }
    }

    #[inline]
    fn ring(self, memory: HostMemory<'_>) {
        let Self {
            shared,
            user,
            staged,
            outstanding,
            migration: moving,
            direct,
            taken_at: taken,
        } = self;
        if let Some(direct) = direct {
            let (mut core, count) = direct.count(taken);
            *outstanding += count;
            core.rings.ring_sq();
        }
        if !staged.is_empty() {
            let mut core = shared.lock();
            if core.is_lender(user) {
                drop(core);
                recall_borrowers(shared);
                core = shared.lock();
            }
            if let Some(binding) = core.take_migration(user, *outstanding == 0) {
                drop(core);
                let count = *outstanding + staged.len() as u32;
                let (binding, ()) = follow_migrations(binding, |core, user| {
                    core.enqueue(user, staged, count, memory, taken);
                });
                moving.get_or_insert_default().next = Some(LeftoverCommands {
                    binding,
                    outstanding: staged.len() as u32,
                });
            } else {
                *outstanding += staged.len() as u32;
                core.enqueue(user, staged, *outstanding, memory, taken);
            }
            staged.clear();
        }
    }
}

impl HostQueue for VfioQueue {
    /// A physical drive's completions are reaped by later polls, never by the poll that submits a command.
    const COMPLETION_TIMING: CompletionTiming = CompletionTiming::Deferred;

    const IS_INTERRUPTED: bool = true;

    type Commands = NvmCommands;

    type Batch<'a> = VfioBatch<'a>;

    #[inline]
    fn batch(&mut self) -> VfioBatch<'_> {
        if self.migration.is_some() {
            self.switch_to_new_pair();
        }
        VfioBatch {
            shared: &self.shared,
            user: self.user,
            staged: &mut self.staged,
            outstanding: &mut self.outstanding,
            migration: &mut self.migration,
            direct: None,
            taken_at: Ticks::default(),
        }
    }

    #[inline]
    fn reap(&mut self, _: HostMemory<'_>, taker: impl CompletionTaker) {
        self.reap_with_clock(Ticks::now, taker);
    }

    fn cut_short(&mut self) {
        for QueuePairBinding { shared, user } in self.bindings() {
            shared.lock().cut_short(user);
        }
    }

    /// Always returns true, because dropping the queue waits for the drive.
    fn drain(&mut self) -> bool {
        true
    }

    /// Always returns `None`, because completions are polled.
    fn wait_fd(&self) -> Option<RawFd> {
        None
    }

    fn is_polled(&self) -> bool {
        true
    }

    fn shared_pair(&self) -> Option<Arc<dyn SharedQueuePair>> {
        Some(self.current_pair.clone())
    }
}

impl Drop for VfioQueue {
    fn drop(&mut self) {
        for QueuePairBinding { shared, user } in self.bindings() {
            while !shared.lock().drop_waiting(user) {
                shared.lock().reap(Ticks::now);
                clock::sleep(DRAIN_POLL_INTERVAL);
            }
            let mut core = shared.lock();
            let next = core.take_migration(user, true);
            core.leave(user);
            drop(core);
            if let Some(binding) = next {
                follow_migrations(binding, QueuePairCore::leave);
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
