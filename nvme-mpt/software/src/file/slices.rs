//! Long work on a file, cut into slices: the kernel excludes all other I/O of the file while it deallocates or zeroes a
//! range. So a range is done in slices of about half a millisecond, with pauses that leave most of the file's time to
//! others while these use it.
//!
//! The time of a slice follows from the extents in it, which are as short as a block on a fragmented file. The next
//! slice has the length that would have taken the right time.

use std::sync::atomic::AtomicU64;
use std::time::Duration;

use super::way::UNIT;
use crate::sync::{AtomicBool, Ordering};
use nvme_mpt::clock::{Ticks, ticks_in};

/// Time that a slice should take.
const TARGET: Duration = Duration::from_micros(500);

/// Bounds of a slice, in bytes, and the first one. The shortest one is a block, as that may be an extent by itself.
const MIN: u64 = UNIT;
const MAX: u64 = 1 << 30;
const FIRST: u64 = 256 << 10;

/// The longest slice while others use the file: at most 512 extents, which is a quarter of a second on slow storage.
const SHARED_MAX: u64 = 2 << 20;

/// Pause after a slice, in lengths of the slice, while others use the file: they have 80 % of its time.
const SHARED_PAUSE: u64 = 4;

/// The longest pause.
const PAUSE_MAX: Duration = Duration::from_millis(250);

/// Time since the last transfer after which nothing else uses the file.
const QUIET: Duration = Duration::from_millis(100);

/// The turns of one file: at most one slice of it is under way, of whichever queue.
#[derive(Debug)]
pub(super) struct Turns {
    taken: AtomicBool,
    /// Bytes of the next slice, as the last ones taught.
    bytes: AtomicU64,
    /// Moment before which no slice begins.
    free_at: AtomicU64,
    /// Moment until which others count as using the file.
    shared_until: AtomicU64,
    target: u64,
    pause_max: u64,
    quiet: u64,
}

impl Turns {
    pub(super) fn new() -> Self {
        Self {
            taken: AtomicBool::new(false),
            bytes: AtomicU64::new(FIRST),
            free_at: AtomicU64::new(0),
            shared_until: AtomicU64::new(0),
            target: ticks_in(TARGET),
            pause_max: ticks_in(PAUSE_MAX),
            quiet: ticks_in(QUIET),
        }
    }

    /// Takes the turn, if it is free and the pause is over. Returns the most bytes that it is for.
    pub(super) fn take(&self, now: Ticks) -> Option<u64> {
        if now.0 < self.free_at.load(Ordering::Relaxed) {
            return None;
        }
        let taken = self.taken.swap(true, Ordering::Acquire);
        (!taken).then(|| self.bytes.load(Ordering::Relaxed))
    }

    /// Gives the turn back without having used it.
    pub(super) fn give_back(&self) {
        self.taken.store(false, Ordering::Release);
    }

    /// Gives the turn back after a slice of so many bytes. `transfers` is true if there were transfers of the file
    /// since the last slice.
    pub(super) fn done(&self, bytes: u64, began: Ticks, now: Ticks, transfers: bool) {
        let took = now.since(began);
        if transfers {
            self.shared_until
                .store(now.0 + self.quiet, Ordering::Relaxed);
        }
        let shared = now.0 < self.shared_until.load(Ordering::Relaxed);
        let (pause, max) = match shared {
            true => (took.saturating_mul(SHARED_PAUSE), SHARED_MAX),
            false => (took, MAX),
        };
        let planned = self.bytes.load(Ordering::Relaxed);
        let next = next_slice(planned, bytes, took, self.target).min(max);
        self.bytes.store(next, Ordering::Relaxed);
        let free_at = now.0 + pause.min(self.pause_max);
        self.free_at.store(free_at, Ordering::Relaxed);
        self.give_back();
    }
}

/// Returns the bytes of the next slice after one of `bytes`, of `planned` at most, took so many ticks.
fn next_slice(planned: u64, bytes: u64, took: u64, target: u64) -> u64 {
    if bytes < planned && took <= target {
        // A short slice says little about the time of a long one.
        return planned;
    }
    let ideal = u128::from(bytes) * u128::from(target) / u128::from(took.max(1));
    let ideal = u64::try_from(ideal).unwrap_or(u64::MAX);
    let next = ideal.min(planned * 2).clamp(MIN, MAX);
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
        assert_eq!(next_slice(4 << 20, 4 << 20, 64_000, target), 64 << 10);
        assert_eq!(next_slice(4 << 20, 4 << 20, 1 << 40, target), MIN);
        assert_eq!(next_slice(MIN, MIN, 1 << 40, target), MIN);
        assert_eq!(next_slice(MAX, MAX, 0, target), MAX);
        // The end of a range says little, unless it is slow.
        assert_eq!(next_slice(4 << 20, 4096, 1, target), 4 << 20);
        assert_eq!(next_slice(4 << 20, 8192, 2000, target), 4096);
    }

    #[test]
    fn one_slice_at_a_time() {
        let turns = Turns::new();
        let began = Ticks(1000);
        assert_eq!(turns.take(began), Some(FIRST));
        assert_eq!(turns.take(began), None);
        let now = Ticks(1000 + turns.target);
        turns.done(FIRST, began, now, false);
        // Nothing else uses the file: the pause is as long as the slice.
        let next = Ticks(now.0 + turns.target);
        assert_eq!(turns.take(Ticks(next.0 - 1)), None);
        assert_eq!(turns.take(next), Some(FIRST));
        turns.give_back();
        assert_eq!(turns.take(next), Some(FIRST));
    }

    #[test]
    fn others_have_four_fifths_of_the_time_while_they_use_the_file() {
        let turns = Turns::new();
        let pause = |took: u64, began: u64, transfers| {
            turns.take(Ticks(began)).expect("its pause is over");
            let now = began + took;
            turns.done(FIRST, Ticks(began), Ticks(now), transfers);
            turns.free_at.load(Ordering::Relaxed) - now
        };
        let took = turns.target;
        assert_eq!(pause(took, 0, true), 4 * took);
        // Also after a slice without a transfer, for a while.
        assert_eq!(pause(took, 10 * took, false), 4 * took);
        let later = 20 * took + turns.quiet;
        assert_eq!(pause(took, later, false), took);
        assert_eq!(
            pause(100 * turns.pause_max, 2 * later, true),
            turns.pause_max
        );
    }

    #[test]
    fn slices_are_short_while_others_use_the_file() {
        let turns = Turns::new();
        let mut now = 0;
        let mut longest = |transfers| {
            for _ in 0..20 {
                now += 10 * turns.quiet;
                let bytes = turns.take(Ticks(now)).expect("it is free");
                turns.done(bytes, Ticks(now), Ticks(now + 1), transfers);
            }
            turns.bytes.load(Ordering::Relaxed)
        };
        assert_eq!(longest(false), MAX);
        assert_eq!(longest(true), SHARED_MAX);
    }
}
