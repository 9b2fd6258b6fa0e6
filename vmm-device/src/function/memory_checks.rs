//! Pace of the checks whether a guest's memory is complete.
//!
//! A check reads the mappings of the VMM's process from `/proc`, for which the kernel walks the process's pages: the more memory,
//! the longer. The VMM's threads that map memory wait meanwhile. A guest has a check with each enable of its controller, so it
//! decides how many there are.

use std::time::Duration;

/// Factor between the time of a check and the rest after it.
const REST: u32 = 20;

/// Longest rest.
const REST_MAX: Duration = Duration::from_secs(2);

/// Pace of a function's checks. Moments are those of the function's clock.
#[derive(Debug, Default)]
pub(super) struct MemoryChecks {
    next: Duration,
}

impl MemoryChecks {
    /// Returns whether a check may begin.
    pub(super) fn may_begin(&self, now: Duration) -> bool {
        now >= self.next
    }

    /// Notes a check.
    pub(super) fn ended(&mut self, began: Duration, now: Duration) {
        let rest = now.saturating_sub(began).saturating_mul(REST);
        self.next = now.saturating_add(rest.min(REST_MAX));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checks_take_a_twentieth_of_the_time() {
        let ms = Duration::from_millis;
        let mut checks = MemoryChecks::default();
        assert!(checks.may_begin(ms(0)));
        checks.ended(ms(1_000), ms(1_002));
        assert!(!checks.may_begin(ms(1_041)));
        assert!(checks.may_begin(ms(1_042)));
        checks.ended(ms(2_000), ms(5_000));
        assert!(!checks.may_begin(ms(6_999)));
        assert!(checks.may_begin(ms(7_000)), "two seconds at most");
        checks.ended(ms(8_000), ms(8_000));
        assert!(checks.may_begin(ms(8_000)));
    }
}
