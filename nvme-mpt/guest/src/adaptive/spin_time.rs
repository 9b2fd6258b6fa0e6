//! Time that a poller spins for work before it parks.
//!
//! If work arrives soon after parking, the time doubles, because a slightly longer spin would have avoided the parking. After
//! a long sleep, the time halves.

use std::time::Duration;

use nvme_mpt_memory::clock::TickRate;

use super::PolicyChoice;

/// Minimum and maximum (`MAX`) of the time for which a poller spins before it sleeps.
const MIN: Duration = Duration::from_micros(20);
const MAX: Duration = Duration::from_millis(4);

/// Spin time of the fixed alternative: about the cost of falling asleep and waking up. So the time spent on a spin and a park
/// is at most twice that of the better one alone.
const FIXED: Duration = Duration::from_micros(100);

/// Adaptive time that a poller spins before it parks.
#[derive(Debug)]
pub struct SpinTime {
    ticks: u64,
    min: u64,
    max: u64,
}

impl SpinTime {
    /// Creates the policy with the shortest time, or with the fixed one.
    #[must_use]
    pub fn new(choice: PolicyChoice, rate: TickRate) -> Self {
        let [min, max] = match choice {
            PolicyChoice::Adaptive => [MIN, MAX],
            PolicyChoice::Fixed => [FIXED; 2],
        };
        let [min, max] = [min, max].map(|time| rate.ticks(time));
        Self {
            ticks: min,
            min,
            max,
        }
    }

    /// Returns the spin time in ticks.
    #[inline]
    #[must_use]
    pub fn ticks(&self) -> u64 {
        self.ticks
    }

    /// Returns the shortest spin time in ticks.
    #[must_use]
    pub fn min_ticks(&self) -> u64 {
        self.min
    }

    /// Adapts the spin time to a sleep of `ticks`. `found_work` is true if the poller found work when it woke up.
    pub fn on_sleep(&mut self, ticks: u64, found_work: bool) {
        self.ticks = if found_work && ticks < self.max {
            (self.ticks * 2).min(self.max)
        } else {
            (self.ticks / 2).max(self.min)
        };
    }

    /// Shortens the spin time to its minimum, because another thread needs the processor. A thread that slept gets the
    /// processor back sooner than a thread that spun.
    pub fn on_contention(&mut self) {
        self.ticks = self.min;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_sleeps_lengthen_the_spin_and_long_ones_shorten_it() {
        let mut spin = SpinTime::new(PolicyChoice::Adaptive, TickRate::NANOSECOND);
        assert_eq!(spin.ticks(), 20_000);
        for expected in [40_000, 80_000, 160_000] {
            spin.on_sleep(100_000, true);
            assert_eq!(spin.ticks(), expected);
        }
        spin.on_sleep(100_000, false);
        assert_eq!(spin.ticks(), 80_000, "nothing was there");
        spin.on_sleep(4_000_000, true);
        assert_eq!(spin.ticks(), 40_000, "it was not soon");
        for _ in 0..20 {
            spin.on_sleep(100_000, true);
        }
        assert_eq!(spin.ticks(), 4_000_000);
        spin.on_contention();
        assert_eq!(spin.ticks(), 20_000);
    }

    #[test]
    fn a_fixed_spin_stays() {
        let mut spin = SpinTime::new(PolicyChoice::Fixed, TickRate::NANOSECOND);
        for (ticks, found_work) in [(1, true), (1, true), (1 << 40, false)] {
            spin.on_sleep(ticks, found_work);
            assert_eq!(spin.ticks(), 100_000);
        }
        spin.on_contention();
        assert_eq!(spin.ticks(), 100_000);
    }
}
