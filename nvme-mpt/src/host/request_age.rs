//! Age of pending requests, measured in periodic checks.
//!
//! A queue checks its requests four times a second, and counts these checks. Each request records the count at its start, so no
//! command has to read the clock. While the host is suspended, no checks are counted, so requests do not become old.

use std::time::Duration;

use nvme_mpt_memory::clock::{Ticks, ticks_in};

/// Interval between two checks of the requests in flight.
pub const CHECK_INTERVAL: Duration = Duration::from_millis(250);

/// Number of checks after which a request is overdue. This is 10 s, far longer than a healthy drive needs.
pub const OVERDUE_CHECKS: u32 = 40;

/// Converts a duration to a number of checks.
#[must_use]
pub fn checks_in(time: Duration) -> u32 {
    u32::try_from(time.as_millis() / CHECK_INTERVAL.as_millis()).unwrap_or(u32::MAX)
}

/// Counter of the checks of one queue's requests. The age of a request is the number of checks since its submission.
#[derive(Debug)]
pub struct RequestAgeTimer {
    /// Number of checks so far.
    pub count: u32,
    /// Time of the next check.
    pub next: Ticks,
    interval: u64,
}

impl Default for RequestAgeTimer {
    fn default() -> Self {
        Self::new()
    }
}

impl RequestAgeTimer {
    /// Creates a counter without checks. The first check is due immediately.
    #[must_use]
    pub fn new() -> Self {
        Self {
            count: 0,
            next: Ticks(0),
            interval: ticks_in(CHECK_INTERVAL),
        }
    }

    /// Counts a check and schedules the next one.
    pub fn count_check(&mut self, now: Ticks) {
        self.next = Ticks(now.0 + self.interval);
        self.count = self.count.wrapping_add(1);
    }
}
