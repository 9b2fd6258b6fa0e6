//! A member's end of a queue pair: what a shadow queue submits to and reaps from.

use std::any::Any;
use std::os::fd::RawFd;
use std::sync::{Arc, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

use super::core::Core;
use super::{Pair, Shared};
use crate::clock::Ticks;
use crate::host::{HostCompletion, HostMemory, HostQueue};
use crate::spec::sqe::Sqe;

/// How long a queue that is dropped waits before it looks again for what the drive still has.
const DRAIN_WAIT: Duration = Duration::from_micros(50);

/// A share of a host queue pair, or all of one.
///
/// The pair's lock is taken once per batch. Dropped, it waits until the drive has nothing of it:
/// the drive completes its commands, or the controller's supervision does.
#[derive(Debug)]
pub struct VfioQueue {
    shared: Arc<Shared>,
    member: u16,
    /// Commands that wait for the next [`HostQueue::ring`].
    staged: Vec<Sqe>,
    /// Commands that were submitted and not yet handed back.
    outstanding: u32,
    /// Where completions lie between the pair and their taker; empty but while reaping.
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

    /// [`HostQueue::ring`] at some time.
    #[inline]
    pub(super) fn ring_at(&mut self, memory: HostMemory<'_>, now: Ticks) {
        self.outstanding += self.staged.len() as u32;
        self.shared
            .lock()
            .ring(self.member, &mut self.staged, self.outstanding, memory, now);
    }

    /// [`HostQueue::reap`] by some clock.
    #[inline]
    pub(super) fn reap_by(
        &mut self,
        clock: impl Fn() -> Ticks,
        mut done: impl FnMut(HostCompletion),
    ) {
        if self.outstanding == 0 {
            return;
        }
        let Some(mut core) = self.shared.try_lock() else {
            // Somebody else is at it, who reaps for us, too.
            return;
        };
        let mut direct = if core.is_direct(self.member) {
            Some(core)
        } else {
            core.reap(&clock);
            core.swap_done(self.member, &mut self.ready);
            None
        };
        let mut ready = self.ready.drain(..);
        // Both in one loop, so that what is done with a completion is compiled into it. Each slot
        // completes once, so a drive that posts without end does not keep us here.
        let mut outstanding = self.outstanding;
        while outstanding > 0 {
            let next = match &mut direct {
                Some(core) => core.next_completion(&clock),
                None => ready.next(),
            };
            let Some(completion) = next else { break };
            outstanding -= 1;
            done(completion);
        }
        self.outstanding = outstanding;
        if let Some(core) = &mut direct {
            core.rings.release();
        }
    }
}

impl HostQueue for VfioQueue {
    #[inline]
    fn submit(&mut self, sqe: &Sqe) {
        debug_assert!(self.staged.len() < self.staged.capacity());
        self.staged.push(*sqe);
    }

    #[inline]
    fn ring(&mut self, memory: HostMemory<'_>) {
        self.ring_at(memory, Ticks::now());
    }

    #[inline]
    fn reap(&mut self, _: HostMemory<'_>, done: impl FnMut(HostCompletion)) {
        self.reap_by(Ticks::now, done);
    }

    /// The drive's completions are polled.
    fn wait_fd(&self) -> Option<RawFd> {
        None
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
