//! Waits for memory that the VMM has unmapped: memory of the admin queues, or memory that an admin command names. Such a wait
//! usually succeeds: a VMM that moves memory in the guest's address space unmaps the memory, and soon maps it again.

use std::time::Duration;

use nvme_guest::dma::is_unmapped_too_long;

/// Interval at which unmapped memory is accessed again. Polling is needed because new mappings are not reported.
pub(crate) const MEMORY_POLL_INTERVAL: Duration = Duration::from_millis(10);

/// A point in time, with the time since the last change of the VM's memory mappings.
#[derive(Clone, Copy, Debug)]
pub(super) struct SuspensionTime {
    pub(super) now: Duration,
    pub(super) unchanged_for: Duration,
}

/// State of a wait until the VMM maps memory again: of the admin queues, or of one command.
#[derive(Debug, Default)]
pub(super) struct MemorySuspension {
    since: Option<Duration>,
}

impl MemorySuspension {
    /// Returns the time that counts for an access that failed between `before` and `after`. The thread may have been preempted
    /// after the access, and the memory may be mapped by now, which the next access shows.
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

    /// Records that memory is unmapped at `now`, `unchanged_for` after the last change of the VM's memory mappings. Returns
    /// whether the wait for the memory has taken too long.
    pub(super) fn has_timed_out(&mut self, now: Duration, unchanged_for: Duration) -> bool {
        let since = *self.since.get_or_insert(now);
        is_unmapped_too_long(now.saturating_sub(since), unchanged_for)
    }

    /// Works like [`Self::has_timed_out`], for memory that a command names. Such memory may never have existed. So the memory
    /// counts as unmapped at least since the last change of the mappings.
    pub(super) fn has_timed_out_for_command(
        &mut self,
        now: Duration,
        unchanged_for: Duration,
    ) -> bool {
        let since = *self.since.get_or_insert(now);
        is_unmapped_too_long(now.saturating_sub(since).max(unchanged_for), unchanged_for)
    }

    /// Ends the wait, because the memory is mapped again.
    pub(super) fn end(&mut self) {
        self.since = None;
    }

    /// Returns whether memory is unmapped, so that a wait is in progress.
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
        let unchanged_for = ms(60_000);
        let mut suspension = MemorySuspension::default();
        assert!(!suspension.has_timed_out(ms(5_000), unchanged_for));
        assert!(suspension.is_active());
        assert!(!suspension.has_timed_out(ms(6_000), unchanged_for));
        assert!(suspension.has_timed_out(ms(6_001), unchanged_for));
        assert!(
            !suspension.has_timed_out(ms(34_000), ms(0)),
            "memory changes"
        );
        assert!(!suspension.has_timed_out(ms(34_000), ms(1_000)));
        assert!(suspension.has_timed_out(ms(35_001), ms(0)), "30 s in all");
        suspension.end();
        assert!(!suspension.is_active());
        assert!(
            !suspension.has_timed_out(ms(40_000), unchanged_for),
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
