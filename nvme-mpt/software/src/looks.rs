//! The age of requests: a queue looks at them a few times a second and counts its looks.
//!
//! A request remembers the count at which it was made. So its age costs nothing per command, and a host that was
//! suspended makes no request old.

use std::time::Duration;

use nvme_mpt::clock::{Ticks, ticks_in};

/// Time between two looks.
pub(crate) const LOOK: Duration = Duration::from_millis(250);

/// Looks after which a request is overdue: 10 s, far more than a drive that is well needs.
pub(crate) const OVERDUE: u32 = 40;

/// Returns the number of looks within a time.
pub(crate) fn looks_in(time: Duration) -> u32 {
    u32::try_from(time.as_millis() / LOOK.as_millis()).unwrap_or(u32::MAX)
}

/// The looks of one queue at its requests.
#[derive(Debug)]
pub(crate) struct Looks {
    /// Their number.
    pub(crate) count: u32,
    /// Moment of the next one.
    pub(crate) next: Ticks,
    interval: u64,
}

impl Looks {
    pub(crate) fn new() -> Self {
        Self {
            count: 0,
            next: Ticks(0),
            interval: ticks_in(LOOK),
        }
    }

    /// Counts a look, and sets the moment of the next one.
    pub(crate) fn look(&mut self, now: Ticks) {
        self.next = Ticks(now.0 + self.interval);
        self.count = self.count.wrapping_add(1);
    }
}
