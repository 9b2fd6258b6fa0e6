//! Clock of the Timestamp feature (Base 2.0, section 5.27.1, "Timestamp").

use std::time::Duration;

use nvme_spec::feature::{Timestamp, TimestampAttributes, TimestampOrigin};

use crate::state::parts::TimestampState;

/// Clock of the Timestamp feature of one controller.
#[derive(Clone, Copy, Debug)]
pub(super) struct TimestampClock {
    /// Timestamp at the time `since`, in milliseconds.
    start: u64,
    since: Duration,
    origin: TimestampOrigin,
    /// True if the clock has stopped at some time since it was set, as in a snapshot. The attribute Synch reports that.
    stopped: bool,
}

impl TimestampClock {
    /// Starts the clock at zero, after a controller reset at `now`.
    pub(super) fn new(now: Duration) -> Self {
        Self {
            start: 0,
            since: now,
            origin: TimestampOrigin::CLEARED,
            stopped: false,
        }
    }

    pub(super) fn from_milliseconds(milliseconds: u64, now: Duration) -> Self {
        Self {
            start: milliseconds,
            since: now,
            origin: TimestampOrigin::SET_FEATURES,
            stopped: false,
        }
    }

    pub(super) fn timestamp(&self, now: Duration) -> Timestamp {
        let elapsed = now.saturating_sub(self.since);
        let elapsed = u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX);
        let attributes = TimestampAttributes::default()
            .with_origin(self.origin)
            .with_synch(self.stopped);
        Timestamp::new(self.start.wrapping_add(elapsed), attributes)
    }

    pub(super) fn save(&self, now: Duration) -> TimestampState {
        TimestampState {
            milliseconds: self.timestamp(now).milliseconds(),
            origin: self.origin.0,
        }
    }

    /// Restores the clock. `elapsed` is the time since the save; `None` for a snapshot, after which the clock continues from
    /// the time of the save.
    pub(super) fn from_state(
        state: &TimestampState,
        now: Duration,
        elapsed: Option<Duration>,
    ) -> Self {
        let milliseconds = elapsed.unwrap_or_default().as_millis();
        let milliseconds = u64::try_from(milliseconds).unwrap_or(u64::MAX);
        Self {
            start: state.milliseconds.wrapping_add(milliseconds),
            since: now,
            origin: TimestampOrigin(state.origin),
            stopped: elapsed.is_none(),
        }
    }
}

#[cfg(test)]
mod tests {
    use zerocopy::IntoBytes;

    use super::*;

    #[test]
    fn the_clock_continues_from_its_starting_value() {
        let clock = TimestampClock::from_milliseconds(1000, Duration::from_millis(5));
        let now = clock.timestamp(Duration::from_millis(239));
        assert_eq!(now.as_bytes(), [0xD2, 4, 0, 0, 0, 0, 0b10, 0]);
    }
}
