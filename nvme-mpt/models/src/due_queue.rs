//! Priority queue by due time, for completions that are due after the ring of a [calendar](super::calendar).

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// An entry of the heap, ordered by due time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct DueEntry {
    /// Due time of the entry, in time units of the queue.
    due: u64,
    /// Number of entries that were added before this entry, which orders entries of equal due time.
    sequence: u64,
    number: u32,
}

/// Entries in the order of their due times. Entries that are due in one time unit come out in the order in which they were
/// added. No memory is allocated after the creation.
#[derive(Debug)]
pub struct DueQueue {
    /// Ticks per time unit, as a base-2 logarithm.
    shift: u32,
    /// Current time in time units. No entry is due before it.
    now: u64,
    next_sequence: u64,
    entries: BinaryHeap<Reverse<DueEntry>>,
}

impl DueQueue {
    /// Creates a queue for up to `entries` entries, with time units of at most `resolution` ticks.
    #[must_use]
    pub fn new(entries: usize, resolution: u64) -> Self {
        Self {
            shift: resolution.max(1).ilog2(),
            now: 0,
            next_sequence: 0,
            entries: BinaryHeap::with_capacity(entries),
        }
    }

    /// Returns whether an entry is due at `now`.
    #[inline]
    #[must_use]
    pub fn is_due(&self, now: u64) -> bool {
        let now = now >> self.shift;
        self.entries.peek().is_some_and(|first| first.0.due <= now)
    }

    /// Adds an entry. If it is already due, the next call of `advance` returns it.
    pub fn insert(&mut self, number: u32, due: u64) {
        // Round up, so that no entry comes out early.
        let due = due.saturating_add((1 << self.shift) - 1) >> self.shift;
        let (due, turn) = (due.max(self.now), self.next_sequence);
        self.next_sequence += 1;
        self.entries.push(Reverse(DueEntry {
            due,
            sequence: turn,
            number,
        }));
    }

    /// Removes all entries that are due at `now`, in order.
    pub fn advance(&mut self, now: u64, due: impl FnMut(u32)) {
        let now = now >> self.shift;
        self.pop_until(now, due);
        self.now = self.now.max(now);
    }

    /// Removes all entries in order. The queue's time stays unchanged.
    pub fn drain(&mut self, due: impl FnMut(u32)) {
        self.pop_until(u64::MAX, due);
    }

    fn pop_until(&mut self, now: u64, mut due: impl FnMut(u32)) {
        while let Some(first) = self.entries.peek()
            && first.0.due <= now
        {
            due(first.0.number);
            self.entries.pop();
        }
    }

    /// Returns the earliest time, in ticks, at which an entry can be due; `None` if the queue is empty.
    #[must_use]
    pub fn next_due(&self) -> Option<u64> {
        self.entries.peek().map(|first| first.0.due << self.shift)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn take(queue: &mut DueQueue, now: u64) -> Vec<u32> {
        let mut out = Vec::new();
        queue.advance(now, |number| out.push(number));
        out
    }

    #[test]
    fn entries_are_released_exactly_when_due() {
        let mut queue = DueQueue::new(4, 256);
        queue.insert(0, 1000);
        queue.insert(1, 256);
        queue.insert(2, u64::MAX);
        assert_eq!(queue.next_due(), Some(256));
        assert!(take(&mut queue, 255).is_empty());
        assert_eq!(take(&mut queue, 256), [1]);
        assert!(take(&mut queue, 1000).is_empty());
        // With a resolution of 256 ticks, the entry comes out 24 ticks late.
        assert_eq!(take(&mut queue, 1024), [0]);
        queue.insert(3, 0);
        assert_eq!(take(&mut queue, 1024), [3]);
        assert!(queue.next_due().is_some_and(|next| next > 1 << 62));
    }

    #[test]
    fn hundreds_of_thousands_come_out_in_order() {
        const COUNT: u32 = 300_000;
        let mut queue = DueQueue::new(COUNT as usize, 1);
        let due = |number: u32| u64::from(number).wrapping_mul(0x9E37_79B9) % 50_000_000;
        for number in 0..COUNT {
            queue.insert(number, due(number));
        }
        let mut expected: Vec<u32> = (0..COUNT).collect();
        expected.sort_by_key(|number| due(*number));
        let mut out = Vec::new();
        let mut now = 0;
        while let Some(next) = queue.next_due() {
            assert!(next >= now);
            now = next;
            queue.advance(now, |number| {
                assert!(due(number) <= now);
                out.push(number);
            });
        }
        assert_eq!(out, expected);
    }

    #[test]
    fn draining_does_not_move_the_time() {
        let mut queue = DueQueue::new(3, 1);
        assert!(take(&mut queue, 100).is_empty());
        queue.insert(0, 1 << 40);
        queue.insert(1, 200);
        let mut out = Vec::new();
        queue.drain(|number| out.push(number));
        assert_eq!((out, queue.next_due()), (vec![1, 0], None));
        queue.insert(2, 150);
        assert_eq!(queue.next_due(), Some(150));
        assert!(take(&mut queue, 149).is_empty());
        assert_eq!(take(&mut queue, 150), [2]);
    }

    proptest! {
        /// Compares the queue with a list sorted by due time and order of insertion.
        #[test]
        fn it_is_a_sorted_list(
            shift in 0..12u32,
            steps in prop::collection::vec((0..5u64, 0..40u32, 0..200u64), 1..300),
        ) {
            let mut queue = DueQueue::new(300, 1 << shift);
            let unit = 1_u64 << shift;
            let mut model: Vec<(u64, u32)> = Vec::new();
            let (mut now, mut number) = (0_u64, 0);
            for (kind, magnitude, value) in steps {
                let time = value << magnitude;
                if kind == 0 {
                    now += time;
                    let mut expected = Vec::new();
                    model.retain(|&(due, number)| {
                        let comes_out = due <= now / unit;
                        if comes_out {
                            expected.push((due, number));
                        }
                        !comes_out
                    });
                    expected.sort_by_key(|&(due, _)| due);
                    let expected: Vec<u32> = expected.into_iter().map(|(_, number)| number).collect();
                    prop_assert_eq!(take(&mut queue, now), expected);
                } else {
                    let due = (now + time).div_ceil(unit);
                    queue.insert(number, now + time);
                    model.push((due, number));
                    number += 1;
                }
                let first = model.iter().map(|&(due, _)| due).min();
                prop_assert_eq!(queue.next_due().is_some(), first.is_some());
                if let (Some(next), Some(first)) = (queue.next_due(), first) {
                    prop_assert!(next / unit <= first);
                }
            }
        }
    }
}
