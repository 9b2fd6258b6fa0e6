//! Waits for memory that the VMM has unmapped: memory of the admin queues, or memory that an admin command names. A VMM that
//! moves memory in the guest's address space unmaps it and soon maps it again.

use std::time::Duration;

use nvme_guest::dma::is_unmapped_too_long;

/// Poll interval for unmapped memory. Polling is needed because nothing reports a new mapping.
pub(crate) const MEMORY_POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Point in time, with the time for which the VM's memory mappings have not changed.
#[derive(Clone, Copy, Debug)]
pub(super) struct SuspensionTime {
    pub(super) now: Duration,
    pub(super) unchanged_for: Duration,
}

/// Wait of the admin queues or of a command until the VMM maps memory again.
#[derive(Debug, Default)]
pub(super) struct MemorySuspension {
    since: Option<Duration>,
}

impl MemorySuspension {
    /// Returns the point in time of an access that failed between `before` and `after`. The thread may have been preempted
    /// after the access, and the memory may be mapped by now; the next access finds out.
    pub(super) fn failure_time(
        &self,
        before: SuspensionTime,
        after: SuspensionTime,
    ) -> SuspensionTime {
        let begun = if self.is_active() { before } else { after };
        SuspensionTime {
            now: begun.now,
            unchanged_for: before.unchanged_for.min(after.unchanged_for),
        }
    }

    /// Records that memory is unmapped at `now`, in a VM whose memory mappings have not changed for `quiet`. Returns whether to
    /// stop waiting for this memory.
    pub(super) fn has_timed_out(&mut self, now: Duration, quiet: Duration) -> bool {
        let since = *self.since.get_or_insert(now);
        is_unmapped_too_long(now.saturating_sub(since), quiet)
    }

    /// Does the same as [`Self::has_timed_out`] for a command. A command may name memory that never existed. So if the mappings have
    /// not changed for a while, the memory counts as unmapped for at least this time.
    pub(super) fn has_timed_out_for_command(&mut self, now: Duration, quiet: Duration) -> bool {
        let since = *self.since.get_or_insert(now);
        is_unmapped_too_long(now.saturating_sub(since).max(quiet), quiet)
    }

    /// Records that the memory is mapped.
    pub(super) fn end(&mut self) {
        self.since = None;
    }

    /// Returns whether a wait is in progress.
    pub(super) fn is_active(&self) -> bool {
        self.since.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_memory_is_awaited_until_a_second_after_the_last_change() {
        let ms = Duration::from_millis;
        let quiet = ms(60_000);
        let mut suspension = MemorySuspension::default();
        assert!(!suspension.has_timed_out(ms(5_000), quiet));
        assert!(suspension.is_active());
        assert!(!suspension.has_timed_out(ms(6_000), quiet));
        assert!(suspension.has_timed_out(ms(6_001), quiet));
        assert!(
            !suspension.has_timed_out(ms(34_000), ms(0)),
            "memory changes"
        );
        assert!(!suspension.has_timed_out(ms(34_000), ms(1_000)));
        assert!(suspension.has_timed_out(ms(35_001), ms(0)), "30 s in all");
        suspension.end();
        assert!(!suspension.is_active());
        assert!(
            !suspension.has_timed_out(ms(40_000), quiet),
            "it begins anew"
        );
    }

    #[test]
    fn a_command_waits_until_a_second_after_the_last_change() {
        let ms = Duration::from_millis;
        let mut suspension = MemorySuspension::default();
        assert!(!suspension.has_timed_out_for_command(ms(5_000), ms(0)));
        assert!(!suspension.has_timed_out_for_command(ms(5_100), ms(1_000)));
        assert!(suspension.has_timed_out_for_command(ms(5_101), ms(1_001)));
        assert!(
            !suspension.has_timed_out_for_command(ms(35_000), ms(0)),
            "memory changes"
        );
        assert!(
            suspension.has_timed_out_for_command(ms(35_001), ms(0)),
            "30 s in all"
        );
        suspension.end();
        assert!(
            suspension.has_timed_out_for_command(ms(40_000), ms(60_000)),
            "nothing went"
        );
    }
}
