//! Changes of a VM's memory in progress. A large change takes seconds, because the IOMMU pins memory page by page.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use nvme_mpt_memory::clock::Ticks;

/// Maximum time for which the memory of a queue's rings may be unmapped before the queue fails. A VMM changes the rights of
/// guest memory by unmapping the region and mapping it again at once. This happens when firmware write-protects its own memory
/// while its NVMe driver still has queues. The time counts from the end of the last change, because pinning a large region
/// takes longer.
const UNMAPPED_MAX: Duration = Duration::from_secs(1);

/// Maximum time for which the memory of a queue's rings may be unmapped in all, whatever other changes the VMM makes: the
/// command timeout of drivers.
const UNMAPPED_TOTAL_MAX: Duration = Duration::from_secs(30);

/// Returns whether a queue fails because the memory of its rings is unmapped. `gone` is the time since the memory was
/// unmapped, and `quiet` the time since the last change of the VM's memory ended.
#[must_use]
pub fn is_unmapped_too_long(gone: Duration, quiet: Duration) -> bool {
    gone.min(quiet) > UNMAPPED_MAX || gone > UNMAPPED_TOTAL_MAX
}

/// Number of changes in progress, and the end of the last one.
#[derive(Debug, Default)]
pub(super) struct OngoingChanges {
    count: AtomicUsize,
    ended: AtomicU64,
}

impl OngoingChanges {
    /// Starts a change, which ends when the result is dropped.
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

/// A change in progress.
#[derive(Debug)]
pub(super) struct OngoingChange<'a>(&'a OngoingChanges);

impl Drop for OngoingChange<'_> {
    fn drop(&mut self) {
        self.0.ended.store(Ticks::now().0, Ordering::Relaxed);
        // After the time, so that a reader that sees no change sees the end of the last one.
        self.0.count.fetch_sub(1, Ordering::Release);
    }
}
