//! Changes of a VM's memory that are under way. A large one takes seconds, as the IOMMU pins memory page by page.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use crate::clock::Ticks;

/// Longest time that the memory of a queue's rings may be gone before the queue fails. A VMM that changes the
/// map of its guest's memory takes a region away and brings it back at once. Firmware that write-protects
/// itself with its disk driver's queues set up makes the VMM do so. The time counts from the end of the last
/// change of the memory: to pin a large region takes longer.
const GONE_MAX: Duration = Duration::from_secs(1);

/// Longest time in all that it may be gone: drivers wait as long for a command.
const GONE_IN_ALL_MAX: Duration = Duration::from_secs(30);

/// Returns whether a queue fails because the memory of its rings is gone: for the time `gone`, and with no change
/// of the VM's memory under way for the time `quiet`.
#[must_use]
pub fn is_gone_for_good(gone: Duration, quiet: Duration) -> bool {
    gone.min(quiet) > GONE_MAX || gone > GONE_IN_ALL_MAX
}

/// Number of changes under way, and the end of the last one.
#[derive(Debug, Default)]
pub(super) struct UnderWay {
    count: AtomicUsize,
    ended: AtomicU64,
}

impl UnderWay {
    /// A change begins, which ends when the result is dropped.
    pub(super) fn begin(&self) -> Change<'_> {
        self.count.fetch_add(1, Ordering::Relaxed);
        Change(self)
    }

    /// Since when none is under way: `now` while one is.
    pub(super) fn quiet_since(&self, now: Ticks) -> Ticks {
        match self.count.load(Ordering::Acquire) {
            0 => Ticks(self.ended.load(Ordering::Relaxed)),
            _ => now,
        }
    }
}

/// A change that is under way.
#[derive(Debug)]
pub(super) struct Change<'a>(&'a UnderWay);

impl Drop for Change<'_> {
    fn drop(&mut self) {
        self.0.ended.store(Ticks::now().0, Ordering::Relaxed);
        // After the time: one that sees no change sees when the last one ended.
        self.0.count.fetch_sub(1, Ordering::Release);
    }
}
