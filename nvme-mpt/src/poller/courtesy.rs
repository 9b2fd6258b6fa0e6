//! When a thread that spins offers its processor to others.
//!
//! It has to: the one it waits for may be waiting for this very processor. But the offer costs
//! nothing, a few microseconds or a whole time slice of milliseconds, depending on who takes it up,
//! and a thread that offers too often beside one that never does gets next to nothing. So it learns
//! from what the last offer cost.

use std::time::Duration;

use crate::clock::{Ticks, ticks_in};

/// The bounds of how long a thread spins before it offers its processor.
const EAGER: Duration = Duration::from_micros(5);
const RELUCTANT: Duration = Duration::from_millis(4);

/// An offer that took longer was taken up by somebody with a time slice of work.
const SLICE: Duration = Duration::from_micros(500);

/// An offer that took less was taken up by nobody.
const NOBODY: Duration = Duration::from_micros(2);

/// Learns how long to spin before the processor is offered.
#[derive(Debug)]
pub struct Courtesy {
    patience: u64,
    next: u64,
    eager: u64,
    reluctant: u64,
    slice: u64,
    nobody: u64,
}

impl Default for Courtesy {
    fn default() -> Self {
        let eager = ticks_in(EAGER);
        Self {
            patience: eager,
            next: eager,
            eager,
            reluctant: ticks_in(RELUCTANT),
            slice: ticks_in(SLICE),
            nobody: ticks_in(NOBODY),
        }
    }
}

impl Courtesy {
    /// There was work: waiting begins anew.
    #[inline]
    pub fn reset(&mut self) {
        self.next = self.patience;
    }

    /// Offers the processor if it is time to, `idle` ticks after the last work. Returns whether
    /// somebody with a time slice of work took it.
    #[inline]
    pub fn spin(&mut self, idle: u64) -> bool {
        if idle < self.next {
            return false;
        }
        let offered = Ticks::now();
        std::thread::yield_now();
        let took = Ticks::now().since(offered);
        self.learn(idle + took, took);
        took > self.slice
    }

    fn learn(&mut self, idle: u64, took: u64) {
        self.patience = if took > self.slice {
            (self.patience * 8).min(self.reluctant)
        } else if took > self.nobody {
            // Perhaps the one that is waited for; it gave the processor back.
            self.eager
        } else {
            (self.patience / 2).max(self.eager)
        };
        self.next = idle + self.patience;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn courtesy() -> Courtesy {
        Courtesy {
            patience: 10,
            next: 10,
            eager: 10,
            reluctant: 1000,
            slice: 100,
            nobody: 2,
        }
    }

    #[test]
    fn offers_that_cost_a_slice_become_rare() {
        let mut courtesy = courtesy();
        for expected in [80, 640, 1000, 1000] {
            courtesy.learn(0, 500);
            assert_eq!(courtesy.patience, expected);
        }
        courtesy.learn(0, 1);
        assert_eq!(courtesy.patience, 500, "nobody else is there any more");
        courtesy.learn(0, 20);
        assert_eq!(courtesy.patience, 10, "a partner gave it back soon");
    }

    #[test]
    fn nothing_is_offered_before_it_is_time() {
        let mut courtesy = courtesy();
        assert!(!courtesy.spin(9));
        assert_eq!(courtesy.next, 10);
        courtesy.spin(10);
        assert!(
            courtesy.next > 10,
            "the next offer comes after as much spinning again"
        );
        courtesy.reset();
        assert_eq!(courtesy.next, courtesy.patience);
    }
}
