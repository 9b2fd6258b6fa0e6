//! Age of pending requests, measured in periodic looks at them.
//!
//! A queue looks at its requests four times a second and counts the looks. Each request stores the count at its start.
//! Measuring the age therefore costs nothing per command, and a suspended host makes no request look old.

use std::time::Duration;

use nvme_mpt_memory::clock::{Ticks, ticks_in};

/// Interval between two looks.
pub(crate) const LOOK: Duration = Duration::from_millis(250);

/// Number of looks after which a request is overdue: 10 s, far longer than a healthy drive needs.
pub(crate) const OVERDUE: u32 = 40;

/// Converts a duration to a number of looks.
pub(crate) fn looks_in(time: Duration) -> u32 {
    u32::try_from(time.as_millis() / LOOK.as_millis()).unwrap_or(u32::MAX)
}

/// Look counter of one queue.
#[derive(Debug)]
pub(crate) struct RequestAgeTimer {
    /// Number of looks so far.
    pub(crate) count: u32,
    /// Moment of the next look.
    pub(crate) next: Ticks,
    interval: u64,
}

impl RequestAgeTimer {
    pub(crate) fn new() -> Self {
        Self {
            count: 0,
            next: Ticks(0),
            interval: ticks_in(LOOK),
        }
    }

    /// Counts a look and schedules the next.
    pub(crate) fn look(&mut self, now: Ticks) {
        self.next = Ticks(now.0 + self.interval);
        self.count = self.count.wrapping_add(1);
    }
}
