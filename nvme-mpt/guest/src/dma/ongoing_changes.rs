//! Changes of a VM's memory in progress. A large change takes seconds, because the IOMMU pins memory page by page.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use nvme_mpt_memory::clock::Ticks;

/// Time after which a queue fails if the memory of its rings stays unmapped. A VMM changes the rights of guest memory by
/// unmapping the region and immediately mapping it again. This happens when firmware write-protects its own memory while
/// its NVMe driver still has queues. Pinning a large region may take longer, so the time counts from the end of the VM's
/// last memory change.
const UNMAPPED_MAX: Duration = Duration::from_secs(1);

/// Time after which a queue fails if the memory of its rings stays unmapped, even if the VMM keeps changing other memory
/// meanwhile. It is the usual command timeout of drivers.
const UNMAPPED_TOTAL_MAX: Duration = Duration::from_secs(30);

/// Returns whether a queue has to fail because the memory of its rings is unmapped. `gone` is the time since that memory was
/// unmapped, and `unchanged_for` the time since the last change of any memory of the VM ended.
#[must_use]
pub fn is_unmapped_too_long(gone: Duration, unchanged_for: Duration) -> bool {
    gone.min(unchanged_for) > UNMAPPED_MAX || gone > UNMAPPED_TOTAL_MAX
}

/// Number of changes of a VM's memory in progress, and time at which the last change ended.
#[derive(Debug, Default)]
pub(super) struct OngoingChanges {
    count: AtomicUsize,
    ended: AtomicU64,
}

impl OngoingChanges {
    /// Starts a change of the memory, which ends when the result is dropped.
    pub(super) fn begin(&self) -> OngoingChange<'_> {
        self.count.fetch_add(1, Ordering::Relaxed);
        OngoingChange(self)
    }

    /// Returns the time at which the last change ended; `now` while a change is in progress.
    pub(super) fn last_change(&self, now: Ticks) -> Ticks {
        match self.count.load(Ordering::Acquire) {
            0 => Ticks(self.ended.load(Ordering::Relaxed)),
            _ => now,
        }
    }
}

/// A change of the memory in progress.
#[derive(Debug)]
pub(super) struct OngoingChange<'a>(&'a OngoingChanges);

impl Drop for OngoingChange<'_> {
    fn drop(&mut self) {
        self.0.ended.store(Ticks::now().0, Ordering::Relaxed);
        // The count falls after the time is stored. So a reader that sees no change in progress sees when the last change
        // ended.
        self.0.count.fetch_sub(1, Ordering::Release);
    }
}
