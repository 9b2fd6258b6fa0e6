//! Changes of a VM's memory that are under way. A large one takes seconds, as the IOMMU pins memory page by page.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crate::clock::Ticks;

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
