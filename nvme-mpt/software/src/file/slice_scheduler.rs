//! Scheduling of long deallocations and zeroing in slices. While the kernel deallocates or zeroes a range, it excludes all
//! other I/O of the file. So a range is processed in slices that take about a third of a millisecond each. While other commands
//! use the file, pauses between slices leave most of the file's time to these commands.
//!
//! An adaptive policy, [`SliceLength`], chooses the length of a slice.

use std::collections::VecDeque;
use std::sync::PoisonError;
use std::time::Duration;

use crate::sync::{Mutex, MutexGuard};
use nvme_guest::adaptive::{PolicyChoice, SliceLength};
use nvme_mpt_memory::clock::{TickRate, Ticks, ticks_in};

/// Pause after a slice, while other commands use the file, as a multiple of the slice's duration. It leaves 80 % of the file's
/// time to other commands, as long as slices take at most 12 ms.
const SHARED_PAUSE_FACTOR: u64 = 4;

/// Maximum pause after a slice. Without it, a command of many short ranges would exceed its timeout on slow storage.
const PAUSE_MAX: Duration = Duration::from_millis(50);

/// Time without a transfer after which other commands count as not using the file.
const IDLE_TIME: Duration = Duration::from_millis(100);

/// Time for which a free turn is reserved for the queue that waits longest. Each waiting queue asks for the turn every 250 us.
const RESERVATION_TIME: Duration = Duration::from_millis(5);

/// Scheduler of the turns of one file. A turn is the permission to process one slice, which only one queue has at a time.
/// Queues get the turn in the order in which they asked for it.
#[derive(Debug)]
pub(super) struct SliceScheduler {
    state: Mutex<SliceSchedulerState>,
    pause_max_ticks: u64,
    idle_ticks: u64,
    reservation_ticks: u64,
}

#[derive(Debug)]
struct SliceSchedulerState {
    is_taken: bool,
    slice_length: SliceLength,
    /// Time until which the pause after the last slice lasts.
    free_at: u64,
    /// Time until which other commands count as using the file, in ticks.
    shared_until: u64,
    /// Queues that wait for the turn, in order. Each queue is listed once.
    wait_queue: VecDeque<SliceWaiter>,
    /// Time at which the turn was first seen free without the first waiting queue taking it.
    offered_at: Option<Ticks>,
}

/// Identifier of a queue that asks for turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SliceWaiter(pub(super) usize);

impl SliceScheduler {
    pub(super) fn new(slices: PolicyChoice) -> Self {
        Self {
            state: Mutex::new(SliceSchedulerState {
                is_taken: false,
                slice_length: SliceLength::new(slices, TickRate::measured()),
                free_at: 0,
                shared_until: 0,
                wait_queue: VecDeque::new(),
                offered_at: None,
            }),
            pause_max_ticks: ticks_in(PAUSE_MAX),
            idle_ticks: ticks_in(IDLE_TIME),
            reservation_ticks: ticks_in(RESERVATION_TIME),
        }
    }

    /// Takes the turn for a queue, and returns the maximum weight of its slice. Returns `None` if another queue has the turn,
    /// if the pause after the last slice is not over, or if another queue has waited longer. The queue then waits for the turn.
    pub(super) fn take_turn(&self, now: Ticks, queue: SliceWaiter) -> Option<u64> {
        let mut state = self.state();
        if state.is_taken || now.0 < state.free_at {
            state.enqueue(queue);
            return None;
        }
        if let Some(first) = state.wait_queue.front().copied()
            && first != queue
        {
            state.enqueue(queue);
            let offered = *state.offered_at.get_or_insert(now);
            if now.since(offered) >= self.reservation_ticks {
                // The first waiting queue has not taken the turn in the reserved time, so it loses its place.
                state.leave(first);
            }
            return None;
        }
        state.leave(queue);
        state.is_taken = true;
        Some(state.slice_length.bytes())
    }

    /// Returns the turn of a queue that has not processed a slice.
    pub(super) fn cancel_turn(&self) {
        self.state().is_taken = false;
    }

    /// Removes a queue from those that wait for the turn.
    pub(super) fn leave(&self, queue: SliceWaiter) {
        self.state().leave(queue);
    }

    /// Returns the turn of a queue, after a slice of weight `bytes` ([`extent_survey`](super::extent_survey)). `transfers` is
    /// true if other commands have made transfers of the file since the previous slice.
    pub(super) fn end_turn(&self, bytes: u64, began: Ticks, now: Ticks, transfers: bool) {
        let took = now.since(began);
        let mut state = self.state();
        if transfers {
            state.shared_until = now.0 + self.idle_ticks;
        }
        let is_shared = now.0 < state.shared_until;
        let pause = match is_shared {
            true => took.saturating_mul(SHARED_PAUSE_FACTOR),
            false if bytes == 0 => 0,
            false => took,
        };
        // Only slices with extents show how fast the file system deallocates extents.
        if bytes > 0 {
            state.slice_length.on_slice_done(bytes, took, is_shared);
        }
        state.free_at = now.0 + pause.min(self.pause_max_ticks);
        state.is_taken = false;
    }

    fn state(&self) -> MutexGuard<'_, SliceSchedulerState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[cfg(test)]
    pub(super) fn is_taken(&self) -> bool {
        self.state().is_taken
    }
}

impl SliceSchedulerState {
    fn enqueue(&mut self, queue: SliceWaiter) {
        if !self.wait_queue.contains(&queue) {
            self.wait_queue.push_back(queue);
        }
    }

    fn leave(&mut self, queue: SliceWaiter) {
        if self.wait_queue.front() == Some(&queue) {
            self.offered_at = None;
        }
        self.wait_queue.retain(|other| *other != queue);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Length of the first slice in bytes.
    const FIRST: u64 = 256 << 10;

    /// Returns the duration that the scheduler aims at for a slice, in ticks.
    fn target() -> u64 {
        ticks_in(Duration::from_micros(300))
    }

    const ONE: SliceWaiter = SliceWaiter(1);
    const OTHER: SliceWaiter = SliceWaiter(2);

    #[test]
    fn one_slice_at_a_time() {
        let scheduler = SliceScheduler::new(PolicyChoice::Adaptive);
        let began = Ticks(1000);
        assert_eq!(scheduler.take_turn(began, ONE), Some(FIRST));
        assert_eq!(scheduler.take_turn(began, ONE), None);
        let now = Ticks(1000 + target());
        scheduler.end_turn(FIRST, began, now, false);
        // If no other command uses the file, the pause is as long as the slice.
        let next = Ticks(now.0 + target());
        assert_eq!(scheduler.take_turn(Ticks(next.0 - 1), ONE), None);
        assert_eq!(scheduler.take_turn(next, ONE), Some(FIRST));
        scheduler.cancel_turn();
        assert_eq!(scheduler.take_turn(next, ONE), Some(FIRST));
    }

    #[test]
    fn queues_have_turns_in_the_order_in_which_they_asked() {
        let scheduler = SliceScheduler::new(PolicyChoice::Adaptive);
        let now = Ticks(1000);
        assert!(scheduler.take_turn(now, ONE).is_some());
        assert!(scheduler.take_turn(now, OTHER).is_none());
        assert!(scheduler.take_turn(now, ONE).is_none());
        scheduler.cancel_turn();
        assert!(
            scheduler.take_turn(now, ONE).is_none(),
            "it is the other's turn"
        );
        assert!(scheduler.take_turn(now, OTHER).is_some());
        scheduler.cancel_turn();
        assert!(scheduler.take_turn(now, OTHER).is_none());
        assert!(scheduler.take_turn(now, ONE).is_some());
        scheduler.cancel_turn();
        // A queue that does not take its turn blocks no other queue, and neither does a queue that no longer waits.
        assert!(scheduler.take_turn(now, ONE).is_none());
        let later = Ticks(now.0 + scheduler.reservation_ticks);
        assert!(scheduler.take_turn(later, ONE).is_none());
        assert!(scheduler.take_turn(later, ONE).is_some());
        assert!(scheduler.take_turn(later, OTHER).is_none());
        scheduler.cancel_turn();
        scheduler.leave(OTHER);
        assert!(scheduler.take_turn(later, ONE).is_some());
    }

    #[test]
    fn others_have_four_fifths_of_the_time_while_they_use_the_file() {
        let scheduler = SliceScheduler::new(PolicyChoice::Adaptive);
        let pause = |took: u64, began: u64, transfers| {
            scheduler
                .take_turn(Ticks(began), ONE)
                .expect("its pause is over");
            let now = began + took;
            scheduler.end_turn(FIRST, Ticks(began), Ticks(now), transfers);
            scheduler.state().free_at - now
        };
        let took = target();
        assert_eq!(pause(took, 0, true), 4 * took);
        // The pause has this length for a while after the last transfer, too.
        assert_eq!(pause(took, 10 * took, false), 4 * took);
        let later = 20 * took + scheduler.idle_ticks;
        assert_eq!(pause(took, later, false), took);
        let slow = 100 * scheduler.pause_max_ticks;
        assert_eq!(pause(slow, 2 * later, true), scheduler.pause_max_ticks);
    }

    #[test]
    fn slices_are_short_while_others_use_the_file() {
        let scheduler = SliceScheduler::new(PolicyChoice::Adaptive);
        let mut now = 0;
        let mut longest = |transfers| {
            for _ in 0..20 {
                now += 10 * scheduler.idle_ticks;
                let bytes = scheduler.take_turn(Ticks(now), ONE).expect("it is free");
                scheduler.end_turn(bytes, Ticks(now), Ticks(now + 1), transfers);
            }
            scheduler.state().slice_length.bytes()
        };
        assert_eq!(longest(false), 2 << 20);
        assert_eq!(longest(true), FIRST);
    }

    #[test]
    fn slices_of_a_fixed_length_stay() {
        let scheduler = SliceScheduler::new(PolicyChoice::Fixed);
        for began in [0, 100 * scheduler.pause_max_ticks] {
            assert_eq!(scheduler.take_turn(Ticks(began), ONE), Some(FIRST));
            let now = Ticks(began + scheduler.pause_max_ticks);
            scheduler.end_turn(FIRST, Ticks(began), now, true);
        }
        assert_eq!(scheduler.state().slice_length.bytes(), FIRST);
    }
}
