//! Time that a thread spins before it offers its processor to others.
//!
//! It has to offer it: the one that it waits for may be waiting for this very processor. But the offer costs nothing, a
//! few microseconds or a whole time slice of milliseconds, depending on the thread that takes it up. A thread that offers
//! too often beside one that never does gets next to nothing. So it learns from the cost of the last offer.

use std::time::Duration;

use super::Choice;
use crate::clock::Rate;

/// Bounds of the time that a thread spins before it offers its processor. The first is the fixed one, too.
const EAGER: Duration = Duration::from_micros(5);
const RELUCTANT: Duration = Duration::from_millis(4);

/// An offer that took longer was taken up by a thread with a time slice of work.
const SLICE: Duration = Duration::from_micros(500);

/// An offer that took less was taken up by no thread.
const REFUSED: Duration = Duration::from_micros(2);

/// Learns the time that a thread spins before it offers its processor.
#[derive(Debug)]
pub struct Courtesy {
    patience: u64,
    next: u64,
    eager: u64,
    reluctant: u64,
    slice: u64,
    refused: u64,
}

impl Courtesy {
    /// As eager as it gets.
    #[must_use]
    pub fn new(choice: Choice, rate: Rate) -> Self {
        let eager = rate.ticks(EAGER);
        let reluctant = match choice {
            Choice::Learned => rate.ticks(RELUCTANT),
            Choice::Fixed => eager,
        };
        Self {
            patience: eager,
            next: eager,
            eager,
            reluctant,
            slice: rate.ticks(SLICE),
            refused: rate.ticks(REFUSED),
        }
    }

    /// Notes that there was work: waiting begins anew.
    #[inline]
    pub fn reset(&mut self) {
        self.next = self.patience;
    }

    /// Returns whether to offer the processor, `idle` ticks after the last work.
    #[inline]
    #[must_use]
    pub fn is_due(&self, idle: u64) -> bool {
        idle >= self.next
    }

    /// Notes an offer that began `idle` ticks after the last work and took `took`. Returns whether a thread with a time
    /// slice of work took it up.
    pub fn offered(&mut self, idle: u64, took: u64) -> bool {
        let is_slice = took > self.slice;
        self.patience = if is_slice {
            (self.patience * 8).min(self.reluctant)
        } else if took > self.refused {
            // Perhaps the one that is waited for; it gave the processor back.
            self.eager
        } else {
            (self.patience / 2).max(self.eager)
        };
        self.next = idle + took + self.patience;
        is_slice
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn offers_that_cost_a_slice_become_rare() {
        let mut courtesy = Courtesy::new(Choice::Learned, Rate::NANOSECOND);
        for expected in [40_000, 320_000, 2_560_000, 4 * MS, 4 * MS] {
            assert!(courtesy.offered(0, MS));
            assert_eq!(courtesy.patience, expected);
        }
        assert!(!courtesy.offered(0, 100));
        assert_eq!(courtesy.patience, 2 * MS, "no other thread is there");
        assert!(!courtesy.offered(0, 20_000));
        assert_eq!(courtesy.patience, 5000, "a partner gave it back soon");
    }

    #[test]
    fn nothing_is_offered_before_it_is_time() {
        let mut courtesy = Courtesy::new(Choice::Learned, Rate::NANOSECOND);
        assert!(!courtesy.is_due(4999));
        assert!(courtesy.is_due(5000));
        courtesy.offered(5000, MS);
        assert!(!courtesy.is_due(MS + 44_999));
        assert!(courtesy.is_due(MS + 45_000));
        courtesy.reset();
        assert!(!courtesy.is_due(39_999));
        assert!(courtesy.is_due(40_000));
    }

    #[test]
    fn a_fixed_thread_stays_eager() {
        let mut courtesy = Courtesy::new(Choice::Fixed, Rate::NANOSECOND);
        for took in [MS, MS, 100, 20_000] {
            courtesy.offered(0, took);
            courtesy.reset();
            assert!(!courtesy.is_due(4999) && courtesy.is_due(5000));
        }
    }
}
