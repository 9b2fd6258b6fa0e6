//! Long work on a file, cut into slices: the kernel excludes all other I/O of the file while it deallocates or zeroes a
//! range. So a range is done in slices of about a third of a millisecond. Pauses between them leave most of the file's time
//! to others while these use it.
//!
//! The length of a slice is [learned](SliceLength).

use std::collections::VecDeque;
use std::sync::PoisonError;
use std::time::Duration;

use crate::sync::{Mutex, MutexGuard};
use nvme_mpt::clock::{Rate, Ticks, ticks_in};
use nvme_mpt::learn::{Choice, SliceLength};

/// Pause after a slice, in lengths of the slice, while others use the file: they have 80 % of its time, as long as
/// slices take 12 ms at most.
const SHARED_PAUSE: u64 = 4;

/// The longest pause: a command of many short ranges has to get its turns in time, also on slow storage.
const PAUSE_MAX: Duration = Duration::from_millis(50);

/// Time since the last transfer after which nothing else uses the file.
const QUIET: Duration = Duration::from_millis(100);

/// Time for which a free turn is kept for the first queue in the line, which looks for it every 250 us.
const KEPT: Duration = Duration::from_millis(5);

/// The turns of one file: at most one slice of it is under way, of whichever queue. Queues have turns in the order in
/// which they asked.
#[derive(Debug)]
pub(super) struct Turns {
    state: Mutex<State>,
    pause_max: u64,
    quiet: u64,
    kept: u64,
}

#[derive(Debug)]
struct State {
    taken: bool,
    slice: SliceLength,
    /// Moment before which no slice begins.
    free_at: u64,
    /// Moment until which others count as using the file.
    shared_until: u64,
    /// Queues that wait, each once.
    line: VecDeque<Waiter>,
    /// Moment at which the turn was first seen free for the first one of them.
    offered: Option<Ticks>,
}

/// A queue, as its turns name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Waiter(pub(super) usize);

impl Turns {
    pub(super) fn new(slices: Choice) -> Self {
        Self {
            state: Mutex::new(State {
                taken: false,
                slice: SliceLength::new(slices, Rate::of_this_machine()),
                free_at: 0,
                shared_until: 0,
                line: VecDeque::new(),
                offered: None,
            }),
            pause_max: ticks_in(PAUSE_MAX),
            quiet: ticks_in(QUIET),
            kept: ticks_in(KEPT),
        }
    }

    /// Takes the turn for a queue, if it is free, the pause is over and the queue is the first in the line. Else the
    /// queue stands in the line. Returns the most bytes that the turn is for.
    pub(super) fn take(&self, now: Ticks, queue: Waiter) -> Option<u64> {
        let mut state = self.state();
        if state.taken || now.0 < state.free_at {
            state.stand(queue);
            return None;
        }
        if let Some(first) = state.line.front().copied()
            && first != queue
        {
            state.stand(queue);
            let offered = *state.offered.get_or_insert(now);
            if now.since(offered) >= self.kept {
                // It does not come.
                state.leave(first);
            }
            return None;
        }
        state.leave(queue);
        state.taken = true;
        Some(state.slice.bytes())
    }

    /// Gives the turn back without having used it.
    pub(super) fn give_back(&self) {
        self.state().taken = false;
    }

    /// Takes a queue that waits for no turn any more out of the line.
    pub(super) fn leave(&self, queue: Waiter) {
        self.state().leave(queue);
    }

    /// Gives the turn back after a slice of this weight ([`survey`](super::survey)). `transfers` is true if there were
    /// transfers of the file since the last slice.
    pub(super) fn done(&self, bytes: u64, began: Ticks, now: Ticks, transfers: bool) {
        let took = now.since(began);
        let mut state = self.state();
        if transfers {
            state.shared_until = now.0 + self.quiet;
        }
        let is_shared = now.0 < state.shared_until;
        let pause = match is_shared {
            true => took.saturating_mul(SHARED_PAUSE),
            false if bytes == 0 => 0,
            false => took,
        };
        // A hole teaches nothing about the extents behind.
        if bytes > 0 {
            state.slice.done(bytes, took, is_shared);
        }
        state.free_at = now.0 + pause.min(self.pause_max);
        state.taken = false;
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[cfg(test)]
    pub(super) fn is_taken(&self) -> bool {
        self.state().taken
    }
}

impl State {
    fn stand(&mut self, queue: Waiter) {
        if !self.line.contains(&queue) {
            self.line.push_back(queue);
        }
    }

    fn leave(&mut self, queue: Waiter) {
        if self.line.front() == Some(&queue) {
            self.offered = None;
        }
        self.line.retain(|other| *other != queue);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes of the first slice.
    const FIRST: u64 = 256 << 10;

    /// Time that a slice should take, in ticks.
    fn target() -> u64 {
        ticks_in(Duration::from_micros(300))
    }

    const ONE: Waiter = Waiter(1);
    const OTHER: Waiter = Waiter(2);

    #[test]
    fn one_slice_at_a_time() {
        let turns = Turns::new(Choice::Learned);
        let began = Ticks(1000);
        assert_eq!(turns.take(began, ONE), Some(FIRST));
        assert_eq!(turns.take(began, ONE), None);
        let now = Ticks(1000 + target());
        turns.done(FIRST, began, now, false);
        // Nothing else uses the file: the pause is as long as the slice.
        let next = Ticks(now.0 + target());
        assert_eq!(turns.take(Ticks(next.0 - 1), ONE), None);
        assert_eq!(turns.take(next, ONE), Some(FIRST));
        turns.give_back();
        assert_eq!(turns.take(next, ONE), Some(FIRST));
    }

    #[test]
    fn queues_have_turns_in_the_order_in_which_they_asked() {
        let turns = Turns::new(Choice::Learned);
        let now = Ticks(1000);
        assert!(turns.take(now, ONE).is_some());
        assert!(turns.take(now, OTHER).is_none());
        assert!(turns.take(now, ONE).is_none());
        turns.give_back();
        assert!(turns.take(now, ONE).is_none(), "it is the other's turn");
        assert!(turns.take(now, OTHER).is_some());
        turns.give_back();
        assert!(turns.take(now, OTHER).is_none());
        assert!(turns.take(now, ONE).is_some());
        turns.give_back();
        // One that does not come, and one that left, hold nothing up.
        assert!(turns.take(now, ONE).is_none());
        let later = Ticks(now.0 + turns.kept);
        assert!(turns.take(later, ONE).is_none());
        assert!(turns.take(later, ONE).is_some());
        assert!(turns.take(later, OTHER).is_none());
        turns.give_back();
        turns.leave(OTHER);
        assert!(turns.take(later, ONE).is_some());
    }

    #[test]
    fn others_have_four_fifths_of_the_time_while_they_use_the_file() {
        let turns = Turns::new(Choice::Learned);
        let pause = |took: u64, began: u64, transfers| {
            turns.take(Ticks(began), ONE).expect("its pause is over");
            let now = began + took;
            turns.done(FIRST, Ticks(began), Ticks(now), transfers);
            turns.state().free_at - now
        };
        let took = target();
        assert_eq!(pause(took, 0, true), 4 * took);
        // Also after a slice without a transfer, for a while.
        assert_eq!(pause(took, 10 * took, false), 4 * took);
        let later = 20 * took + turns.quiet;
        assert_eq!(pause(took, later, false), took);
        let slow = 100 * turns.pause_max;
        assert_eq!(pause(slow, 2 * later, true), turns.pause_max);
    }

    #[test]
    fn slices_are_short_while_others_use_the_file() {
        let turns = Turns::new(Choice::Learned);
        let mut now = 0;
        let mut longest = |transfers| {
            for _ in 0..20 {
                now += 10 * turns.quiet;
                let bytes = turns.take(Ticks(now), ONE).expect("it is free");
                turns.done(bytes, Ticks(now), Ticks(now + 1), transfers);
            }
            turns.state().slice.bytes()
        };
        assert_eq!(longest(false), 2 << 20);
        assert_eq!(longest(true), FIRST);
    }

    #[test]
    fn slices_of_a_fixed_length_stay() {
        let turns = Turns::new(Choice::Fixed);
        for began in [0, 100 * turns.pause_max] {
            assert_eq!(turns.take(Ticks(began), ONE), Some(FIRST));
            let now = Ticks(began + turns.pause_max);
            turns.done(FIRST, Ticks(began), now, true);
        }
        assert_eq!(turns.state().slice.bytes(), FIRST);
    }
}
