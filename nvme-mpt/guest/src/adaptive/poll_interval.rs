//! Poll interval of untrapped doorbells.
//!
//! A command that arrives between two polls waits for the end of the interval. So the interval grows with the idle time: for
//! any guest, the wait is a small part of the time that it was idle.
//!
//! The fixed alternative is limited to one millisecond.

use std::time::Duration;

use super::PolicyChoice;

/// Shortest poll interval.
const MIN: Duration = Duration::from_micros(50);

/// Divisor and maximum of the poll interval while work is pending, and shortly after work. The interval is the idle time
/// divided by the divisor.
const FAST: (u32, Duration) = (8, Duration::from_millis(1));

/// Divisor and maximum of the poll interval after a longer idle time. The maximum gives 50 polls per second.
const SLOW: (u32, Duration) = (64, Duration::from_millis(20));

/// Policy for the poll interval of untrapped doorbells.
#[derive(Clone, Copy, Debug)]
pub struct PollInterval {
    choice: PolicyChoice,
}

impl PollInterval {
    /// Creates the policy. An adaptive interval grows to 20 ms, a fixed one to 1 ms.
    #[must_use]
    pub fn new(choice: PolicyChoice) -> Self {
        Self { choice }
    }

    /// Returns the poll interval of doorbells after the time `idle` without work.
    #[must_use]
    pub fn for_doorbells(self, idle: Duration) -> Duration {
        match self.choice {
            PolicyChoice::Adaptive => Self::for_pending_work(idle).max(scaled_interval(idle, SLOW)),
            PolicyChoice::Fixed => Self::for_pending_work(idle),
        }
    }

    /// Returns the poll interval while work is pending, such as commands in a drive.
    #[must_use]
    pub fn for_pending_work(idle: Duration) -> Duration {
        scaled_interval(idle, FAST).max(MIN)
    }
}

fn scaled_interval(idle: Duration, (divisor, longest): (u32, Duration)) -> Duration {
    (idle / divisor).min(longest)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counts the polls within `time` after a poller has stopped spinning. Returns this number and the longest interval.
    fn looks_within(interval: PollInterval, time: Duration) -> (usize, Duration) {
        let mut idle = Duration::from_micros(20);
        let (mut count, mut pause) = (0, Duration::ZERO);
        while idle < time {
            pause = interval.for_doorbells(idle);
            idle += pause;
            count += 1;
        }
        (count, pause)
    }

    #[test]
    fn an_idle_guest_is_looked_at_fifty_times_a_second() {
        let interval = PollInterval::new(PolicyChoice::Adaptive);
        let (first, _) = looks_within(interval, Duration::from_secs(2));
        let (all, pause) = looks_within(interval, Duration::from_secs(12));
        assert_eq!(all - first, 500);
        assert_eq!(pause, Duration::from_millis(20));
        assert!(first < 400, "{first}");
    }

    #[test]
    fn fixed_looks_go_on_each_millisecond() {
        let interval = PollInterval::new(PolicyChoice::Fixed);
        let (first, _) = looks_within(interval, Duration::from_secs(2));
        let (all, pause) = looks_within(interval, Duration::from_secs(12));
        assert_eq!(all - first, 10_000);
        assert_eq!(pause, Duration::from_millis(1));
    }

    #[test]
    fn a_command_waits_for_a_small_part_of_the_time_that_its_guest_was_idle() {
        let interval = PollInterval::new(PolicyChoice::Adaptive);
        for micros in [400, 5_000, 8_000] {
            let idle = Duration::from_micros(micros);
            assert_eq!(interval.for_doorbells(idle), idle / 8);
        }
        for millis in [9, 30, 64] {
            let pause = interval.for_doorbells(Duration::from_millis(millis));
            assert_eq!(pause, Duration::from_millis(1));
        }
        for millis in [65, 500, 1_280] {
            let idle = Duration::from_millis(millis);
            assert_eq!(interval.for_doorbells(idle), idle / 64);
        }
        assert_eq!(interval.for_doorbells(Duration::ZERO), MIN);
    }

    #[test]
    fn a_drive_that_has_commands_is_looked_at_each_millisecond() {
        for seconds in [1, 3_600] {
            let pause = PollInterval::for_pending_work(Duration::from_secs(seconds));
            assert_eq!(pause, Duration::from_millis(1));
        }
    }
}
