//! Limit of a drive's bytes in flight, so that no command exceeds `timeout=` on a drive that works.
//!
//! A deep queue of large commands can hold more than a slow drive completes within `timeout=`. So the bytes of busy users that
//! are in flight are limited to what the drive completes in a quarter of that time. Further commands wait at their queue pair.
//! A drive that is known to be fast has no limit, and commands of lone users go to such a drive directly and are not counted.
//!
//! Until the drive has proved fast, a lone user's commands of more than [`DIRECT_BYTES_MAX`] bytes do not go directly to it.
//! The drive monitor decides ten times a second whether the drive is fast:
//!
//! - A drive that completes [`FAST_THRESHOLD`] in a quarter of `timeout=` is fast.
//! - A drive whose commands take longer than an eighth of `timeout=` is not fast. To count as fast again, the drive must
//!   complete four times as many bytes in a quarter of `timeout=`. While its commands take longer than an eighth of `timeout=`,
//!   small commands do not go directly to the drive either.

/// Maximum bytes of a command that a lone user submits directly, on a drive that is not known to be fast.
pub(super) const DIRECT_BYTES_MAX: u64 = 16 << 10;

/// Maximum bytes in flight of a queue pair before its first survey, on a drive that is not known to be fast.
pub(super) const INITIAL_LIMIT: u64 = 2 << 20;

/// Bytes that a drive must complete in a quarter of `timeout=` to count as fast. In the whole `timeout=`, it then completes 256
/// MiB: 16 queues of 64 commands of 256 KiB.
const FAST_THRESHOLD: u64 = 64 << 20;

/// Maximum to which [`FAST_THRESHOLD`] is raised for a drive whose commands once took too long.
const FAST_THRESHOLD_MAX: u64 = 4 << 30;

/// Minimum of the limit of a drive's bytes in flight.
const LIMIT_MIN: u64 = 64 << 10;

/// Work of a drive between two surveys.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct DriveWork {
    /// Time between the surveys, in ticks.
    pub(super) elapsed: u64,
    /// Number of bytes that have completed between the surveys. Direct commands of lone users do not count.
    pub(super) completed_bytes: u64,
    /// Number of bytes in flight at the second survey. Direct commands of lone users do not count.
    pub(super) inflight_bytes: u64,
    /// Numbers of commands that have completed between the surveys, and of commands in flight at the second one.
    pub(super) completed_commands: u64,
    pub(super) inflight_commands: u64,
}

/// Limit of a drive's bytes in flight.
#[derive(Debug)]
pub(super) struct InFlightBound {
    /// Quarter of the option `timeout=`, in ticks; 0 without a timeout.
    quarter_timeout: u64,
    is_fast: bool,
    /// Number of bytes that the drive must complete within `quarter_timeout` to count as fast. It rises after the drive was
    /// slow.
    fast_threshold: u64,
    bound: u64,
}

impl InFlightBound {
    /// Creates the limit for a drive whose speed is not known yet. The argument is a quarter of `timeout=`, in ticks.
    pub(super) const fn new(timeout_ticks: u64) -> Self {
        Self {
            quarter_timeout: timeout_ticks,
            is_fast: false,
            fast_threshold: FAST_THRESHOLD,
            bound: FAST_THRESHOLD / 2,
        }
    }

    /// Adapts the limit to the drive's work since the last survey. Returns the maximum bytes in flight of busy users; `None`
    /// for no limit.
    pub(super) fn update(&mut self, work: DriveWork) -> Option<u64> {
        if self.quarter_timeout == 0 {
            return None;
        }
        let done = u128::from(work.completed_bytes) * u128::from(self.quarter_timeout);
        let done = u64::try_from(done / u128::from(work.elapsed.max(1))).unwrap_or(u64::MAX);
        if self.is_late(work) {
            if std::mem::take(&mut self.is_fast) {
                self.fast_threshold = (4 * self.fast_threshold).min(FAST_THRESHOLD_MAX);
            }
        } else if done >= self.fast_threshold {
            self.is_fast = true;
        }
        self.bound = if done >= self.bound {
            done
        } else if work.inflight_bytes >= self.bound / 2 {
            self.bound - (self.bound - done) / 4
        } else {
            // The drive had less work than it can do, so its speed is not known better.
            self.bound
        };
        self.bound = self.bound.max(LIMIT_MIN);
        (!self.is_fast).then_some(self.bound)
    }

    /// Returns whether commands take longer than half of `quarter_timeout` on average. Returns false if the drive has completed
    /// no command, because it may be executing one long command.
    pub(super) fn is_late(&self, work: DriveWork) -> bool {
        let time = u128::from(work.inflight_commands) * u128::from(work.elapsed);
        work.completed_commands > 0
            && time > u128::from(work.completed_commands) * u128::from(self.quarter_timeout / 2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUARTER_TIMEOUT: u64 = 2_500;
    const INTERVAL: u64 = 100;

    fn work(completed: u64, in_flight: u64) -> DriveWork {
        DriveWork {
            elapsed: INTERVAL,
            completed_bytes: completed,
            inflight_bytes: in_flight,
            completed_commands: completed >> 18,
            inflight_commands: in_flight >> 18,
        }
    }

    #[test]
    fn a_slow_drive_gets_a_quarter_of_the_timeout_in_flight() {
        let mut backlog = InFlightBound::new(QUARTER_TIMEOUT);
        // Eight commands of 256 KiB in 100 ms: the bound is 50 MiB.
        let (completed, mut in_flight) = (2 << 20, 32 << 20);
        for _ in 0..50 {
            in_flight = backlog.update(work(completed, in_flight)).expect("a bound");
        }
        assert!((50 << 20..52 << 20).contains(&in_flight), "{in_flight}");
        // The drive becomes slower.
        for _ in 0..50 {
            in_flight = backlog
                .update(work(completed / 8, in_flight))
                .expect("a bound");
        }
        assert!((6 << 20..8 << 20).contains(&in_flight), "{in_flight}");
        // A survey without work has no effect.
        assert_eq!(backlog.update(work(0, 0)), Some(in_flight));
    }

    #[test]
    fn a_fast_drive_has_no_bound_until_it_is_late() {
        let mut backlog = InFlightBound::new(QUARTER_TIMEOUT);
        assert!(backlog.update(work(1 << 18, 1 << 18)).is_some());
        assert_eq!(backlog.update(work(4 << 20, 4 << 20)), None);
        assert_eq!(backlog.update(work(0, 1 << 18)), None, "nothing in a look");
        assert!(backlog.update(work(1 << 18, 256 << 20)).is_some());
        assert!(
            backlog.update(work(4 << 20, 4 << 20)).is_some(),
            "once more"
        );
        assert_eq!(backlog.update(work(16 << 20, 4 << 20)), None);
    }

    #[test]
    fn a_drive_without_a_time_out_has_no_bound() {
        assert_eq!(InFlightBound::new(0).update(work(1 << 18, 256 << 20)), None);
    }
}
