//! The clock behind the Timestamp feature (Base 2.0, section 5.27.1, "Timestamp").

use std::time::{Duration, Instant};

use nvme_mpt::spec::feature::{Timestamp, TimestampAttributes, TimestampOrigin};

use crate::state::parts::TimestampState;

/// The clock of one controller.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clock {
    /// Its value at `since`, in milliseconds.
    start: u64,
    since: Instant,
    origin: TimestampOrigin,
    /// It stood still for a time: Synch.
    stopped: bool,
}

impl Default for Clock {
    /// As a reset of the controller leaves it: it counts from zero.
    fn default() -> Self {
        Self {
            start: 0,
            since: Instant::now(),
            origin: TimestampOrigin::CLEARED,
            stopped: false,
        }
    }
}

impl Clock {
    pub(super) fn set_to(milliseconds: u64) -> Self {
        Self {
            start: milliseconds,
            since: Instant::now(),
            origin: TimestampOrigin::SET_FEATURES,
            stopped: false,
        }
    }

    pub(super) fn now(&self) -> Timestamp {
        self.at(self.since.elapsed())
    }

    pub(super) fn save(&self) -> TimestampState {
        TimestampState {
            milliseconds: self.now().milliseconds(),
            origin: self.origin.0,
        }
    }

    /// It did not run while the function was kept in a snapshot.
    pub(super) fn restored(state: &TimestampState) -> Self {
        Self {
            start: state.milliseconds,
            since: Instant::now(),
            origin: TimestampOrigin(state.origin),
            stopped: true,
        }
    }

    fn at(&self, elapsed: Duration) -> Timestamp {
        let elapsed = u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX);
        let attributes = TimestampAttributes::default()
            .with_origin(self.origin)
            .with_synch(self.stopped);
        Timestamp::new(self.start.wrapping_add(elapsed), attributes)
    }
}

#[cfg(test)]
mod tests {
    use zerocopy::IntoBytes;

    use super::*;

    #[test]
    fn it_runs_on_from_where_it_began() {
        let clock = Clock {
            start: 1000,
            ..Clock::default()
        };
        let now = clock.at(Duration::from_millis(234));
        assert_eq!(now.as_bytes(), [0xD2, 4, 0, 0, 0, 0, 0, 0]);
    }
}
