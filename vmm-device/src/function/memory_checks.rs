//! Rate limit for the checks that a guest's memory is completely mapped.
//!
//! A check reads the mappings of the VMM's process from `/proc`. For that, the kernel walks the process's pages and blocks the
//! VMM's threads that map memory. The walk takes longer with more memory. Each time the guest enables its controller, the
//! memory is checked. So without a limit, the guest could slow down the VMM.

use std::time::Duration;

/// Duration below which a memory check is not counted, because it has not read the mappings of the VMM's process.
const UNCOUNTED_TIME: Duration = Duration::from_micros(50);

/// Total duration of memory checks that a guest may cause one after the other, before the next one has to wait.
const BURST: Duration = Duration::from_millis(100);

/// Divisor of time: in the long run, memory checks may take 1/`TIME_SHARE_DIVISOR` of it.
const TIME_SHARE_DIVISOR: u32 = 20;

/// Maximum time for which the guest's enable of its controller waits until the memory may be checked.
const WAIT_MAX: Duration = Duration::from_secs(2);

/// Rate limiter for a function's memory checks: a token bucket whose tokens are time. All times are by the function's clock.
#[derive(Debug, Default)]
pub(super) struct MemoryChecks {
    /// Time that checks have taken until `updated_at`, less the time that was earned back until then. A check may begin while
    /// it is at most [`BURST`].
    debt: Duration,
    updated_at: Duration,
}

impl MemoryChecks {
    /// Returns whether a memory check may begin.
    pub(super) fn can_begin(&self, now: Duration) -> bool {
        self.debt_at(now) <= BURST
    }

    /// Records the duration of a memory check, which began at `began`.
    pub(super) fn record_check(&mut self, began: Duration, now: Duration) {
        let time = now.saturating_sub(began);
        if time >= UNCOUNTED_TIME {
            let debt = self.debt_at(now).saturating_add(time);
            self.debt = debt.min(BURST + WAIT_MAX / TIME_SHARE_DIVISOR);
            self.updated_at = now;
        }
    }

    fn debt_at(&self, now: Duration) -> Duration {
        let paid = now.saturating_sub(self.updated_at) / TIME_SHARE_DIVISOR;
        self.debt.saturating_sub(paid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checks_take_a_twentieth_of_the_time() {
        let ms = Duration::from_millis;
        let mut checks = MemoryChecks::default();
        assert!(checks.can_begin(ms(0)));
        checks.record_check(ms(1_000), ms(1_100));
        assert!(checks.can_begin(ms(1_100)), "several at once");
        checks.record_check(ms(1_100), ms(1_102));
        assert!(!checks.can_begin(ms(1_139)));
        assert!(checks.can_begin(ms(1_140)));
        checks.record_check(ms(2_000), ms(5_000));
        assert!(!checks.can_begin(ms(6_999)));
        assert!(checks.can_begin(ms(7_000)), "two seconds at most");
        // The memory of most guests needs no checks.
        let mut free = MemoryChecks::default();
        for _ in 0..10_000 {
            free.record_check(ms(1), ms(1) + Duration::from_micros(49));
        }
        assert!(free.can_begin(ms(1)));
    }
}
