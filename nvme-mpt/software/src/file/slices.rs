//! Long work on a file, cut into slices: the kernel excludes all other I/O of the file while it deallocates or zeroes a
//! range, so a range of any length is done in slices of about a millisecond, in turn with others' I/O.

use std::sync::atomic::AtomicU64;
use std::time::Duration;

use super::way::UNIT;
use crate::sync::{AtomicBool, Ordering};
use nvme_mpt::clock::{Ticks, ticks_in};

/// Time that a slice should take.
const TARGET: Duration = Duration::from_micros(500);

/// Bounds of a slice, in bytes, and the first one.
const MIN: u64 = 64 << 10;
const MAX: u64 = 1 << 30;
const FIRST: u64 = 4 << 20;

/// The longest pause between two slices of a command: others have had their turn by then.
const PAUSE_MAX: Duration = Duration::from_millis(2);

/// The turns of one file: at most one slice of it is under way, of whichever queue.
#[derive(Debug)]
pub(super) struct Turns {
    taken: AtomicBool,
    /// Bytes of the next slice, as the last ones taught.
    bytes: AtomicU64,
    target: u64,
    pause_max: u64,
}

impl Turns {
    pub(super) fn new() -> Self {
        Self {
            taken: AtomicBool::new(false),
            bytes: AtomicU64::new(FIRST),
            target: ticks_in(TARGET),
            pause_max: ticks_in(PAUSE_MAX),
        }
    }

    /// Takes the turn, if nobody has it. Returns the most bytes that it is for.
    pub(super) fn take(&self) -> Option<u64> {
        (!self.taken.swap(true, Ordering::Acquire)).then(|| self.bytes.load(Ordering::Relaxed))
    }

    /// Gives the turn back without having used it.
    pub(super) fn give_back(&self) {
        self.taken.store(false, Ordering::Release);
    }

    /// Gives the turn back after a slice of so many bytes. Returns the moment of the command's next one.
    pub(super) fn done(&self, bytes: u64, began: Ticks, now: Ticks) -> Ticks {
        let took = now.since(began);
        let planned = self.bytes.load(Ordering::Relaxed);
        let next = next_slice(planned, bytes, took, self.target);
        self.bytes.store(next, Ordering::Relaxed);
        self.give_back();
        // So long that what came meanwhile passes, and others who wait for a turn find it free.
        Ticks(now.0 + took.min(self.pause_max))
    }
}

/// Returns the bytes of the next slice after one of `bytes`, of `planned` at most, took so many ticks.
fn next_slice(planned: u64, bytes: u64, took: u64, target: u64) -> u64 {
    if bytes < planned && took <= target {
        // A short slice does not tell how fast a long one would be.
        return planned;
    }
    let ideal = u128::from(bytes) * u128::from(target) / u128::from(took.max(1));
    let ideal = u64::try_from(ideal).unwrap_or(u64::MAX);
    let next = ideal.clamp(planned / 4, planned * 2).clamp(MIN, MAX);
    next - next % UNIT
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_learn_their_length() {
        let target = 1000;
        // Twice as fast as wanted, and far faster.
        assert_eq!(next_slice(4 << 20, 4 << 20, 500, target), 8 << 20);
        assert_eq!(next_slice(4 << 20, 4 << 20, 1, target), 8 << 20);
        // Twice as slow, and far slower.
        assert_eq!(next_slice(4 << 20, 4 << 20, 2000, target), 2 << 20);
        assert_eq!(next_slice(4 << 20, 4 << 20, 1 << 40, target), 1 << 20);
        assert_eq!(next_slice(MIN, MIN, 1 << 40, target), MIN);
        assert_eq!(next_slice(MAX, MAX, 0, target), MAX);
        // The end of a range says little.
        assert_eq!(next_slice(4 << 20, 4096, 1, target), 4 << 20);
        assert_eq!(next_slice(4 << 20, 4096, 2000, target), 1 << 20);
    }

    #[test]
    fn one_slice_at_a_time() {
        let turns = Turns::new();
        assert_eq!(turns.take(), Some(FIRST));
        assert_eq!(turns.take(), None);
        let (began, now) = (Ticks(1000), Ticks(1000 + turns.target));
        assert_eq!(turns.done(FIRST, began, now), Ticks(now.0 + turns.target));
        assert_eq!(turns.take(), Some(FIRST));
        turns.give_back();
        assert_eq!(turns.take(), Some(FIRST));
        let late = Ticks(now.0 + 100 * turns.pause_max);
        assert_eq!(
            turns.done(FIRST, now, late),
            Ticks(late.0 + turns.pause_max)
        );
    }
}
