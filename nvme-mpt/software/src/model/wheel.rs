//! Commands in the order in which they are due: a hierarchical timing wheel.
//!
//! To insert and to take out cost a few instructions each, whatever number is in it, and nothing is
//! allocated after it was made. Level 0 has a bucket per unit of wheel time, each further level has
//! buckets 64 times as long. A bucket of a higher level is spread over the lower ones when its time
//! comes, at most once per level and entry.

/// Buckets of a level as a power of two: as many as a word has bits.
const BITS: u32 = 6;
const BUCKETS: usize = 1 << BITS;

/// Levels, for times of 64 bits; the number is a power of two, so that an index can be masked.
const LEVELS: usize = 16;

const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
struct Bucket {
    head: u32,
    tail: u32,
}

const EMPTY: Bucket = Bucket {
    head: NONE,
    tail: NONE,
};

#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    /// In wheel time.
    due: u64,
    next: u32,
}

/// Entries, known by their number, in the order in which they are due. Entries that are due in the
/// same unit of wheel time come out in the order in which they went in.
#[derive(Debug)]
pub(crate) struct DueWheel {
    /// Ticks per unit of wheel time, as a power of two.
    shift: u32,
    /// In wheel time: nothing that is due before it is in here.
    now: u64,
    /// In wheel time: nothing has to be done before it.
    next: u64,
    /// A bit for each bucket of a level that is not empty.
    occupied: [u64; LEVELS],
    buckets: Box<[Bucket; LEVELS * BUCKETS]>,
    entries: Box<[Entry]>,
}

impl DueWheel {
    /// A wheel for entries 0 to `entries`-1 that tells times apart that are `resolution` ticks
    /// apart, or less.
    pub(crate) fn new(entries: usize, resolution: u64) -> Self {
        Self {
            shift: resolution.max(1).ilog2(),
            now: 0,
            next: u64::MAX,
            occupied: [0; LEVELS],
            buckets: Box::new([EMPTY; LEVELS * BUCKETS]),
            entries: vec![Entry::default(); entries].into_boxed_slice(),
        }
    }

    /// Returns whether something may have to be taken out at `now`.
    #[inline]
    pub(crate) fn is_due(&self, now: u64) -> bool {
        now >> self.shift >= self.next
    }

    /// Puts an entry in that is not in it. What is due already comes out next.
    #[inline]
    pub(crate) fn insert(&mut self, number: u32, due: u64) {
        // Rounded up: never before it is due.
        let due = due.saturating_add((1 << self.shift) - 1) >> self.shift;
        let due = due.max(self.now);
        self.next = self.next.min(due);
        self.place(number, due);
    }

    #[inline]
    fn place(&mut self, number: u32, due: u64) {
        let Some(entry) = self.entries.get_mut(number as usize) else {
            return;
        };
        *entry = Entry { due, next: NONE };
        // The highest bit in which it differs from now names the level.
        let level = ((due ^ self.now) | 1).ilog2() / BITS;
        let bucket = (due >> (level * BITS)) as usize % BUCKETS;
        let level = level as usize % LEVELS;
        self.occupied[level] |= 1 << bucket;
        let bucket = &mut self.buckets[level * BUCKETS + bucket];
        match self.entries.get_mut(bucket.tail as usize) {
            Some(last) => last.next = number,
            None => bucket.head = number,
        }
        bucket.tail = number;
    }

    /// Takes out all that is due at `now`, in order.
    #[inline]
    pub(crate) fn advance(&mut self, now: u64, due: impl FnMut(u32)) {
        let now = now >> self.shift;
        if now >= self.next {
            self.take_out(now, due);
        } else {
            self.catch_up(now);
        }
    }

    /// It is at least `now`, in wheel time, so that what goes in next comes to lie at a low level. Were
    /// something in here, its bucket might begin by now, and would have to be spread first.
    #[inline]
    fn catch_up(&mut self, now: u64) {
        if self.next == u64::MAX {
            self.now = self.now.max(now);
        }
    }

    /// It is at least `now`, in ticks.
    #[inline]
    pub(crate) fn begin(&mut self, now: u64) {
        self.catch_up(now >> self.shift);
    }

    /// Takes out everything, in order, as if it were due. Time goes on from where it was.
    pub(crate) fn drain(&mut self, due: impl FnMut(u32)) {
        let now = self.now;
        self.take_out(u64::MAX, due);
        self.now = now;
    }

    fn take_out(&mut self, now: u64, mut due: impl FnMut(u32)) {
        self.next = loop {
            let Some((level, bucket, begins)) = self.first() else {
                break u64::MAX;
            };
            if begins > now {
                break begins;
            }
            self.now = begins;
            self.occupied[level] &= !(1 << bucket);
            let list = &mut self.buckets[level * BUCKETS + bucket];
            let mut number = std::mem::replace(list, EMPTY).head;
            while let Some(&entry) = self.entries.get(number as usize) {
                if level == 0 {
                    due(number);
                } else {
                    self.place(number, entry.due);
                }
                number = entry.next;
            }
        };
        self.now = self.now.max(now);
    }

    /// The first bucket that is not empty, as level and index, and when it begins. All of a lower
    /// level comes before all of a higher one, as it differs from now in lower bits.
    #[inline]
    fn first(&self) -> Option<(usize, usize, u64)> {
        let level = self.occupied.iter().position(|bits| *bits != 0)?;
        let bucket = self.occupied[level].trailing_zeros();
        let shift = level as u32 * BITS;
        // What all of the level has in common with now, which is nothing at the last one.
        let common = self.now.checked_shr(shift + BITS).unwrap_or(0);
        let common = common.checked_shl(shift + BITS).unwrap_or(0);
        Some((level, bucket as usize, common | u64::from(bucket) << shift))
    }

    /// A time in ticks until which nothing has to be done; `None` if there is nothing to do.
    pub(crate) fn next_due(&self) -> Option<u64> {
        (self.next != u64::MAX).then(|| self.next << self.shift)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn take(wheel: &mut DueWheel, now: u64) -> Vec<u32> {
        let mut out = Vec::new();
        wheel.advance(now, |number| out.push(number));
        out
    }

    #[test]
    fn nothing_comes_out_before_it_is_due_and_all_of_it_then() {
        let mut wheel = DueWheel::new(4, 256);
        wheel.insert(0, 1000);
        wheel.insert(1, 256);
        wheel.insert(2, u64::MAX);
        assert_eq!(wheel.next_due(), Some(256));
        assert!(take(&mut wheel, 255).is_empty());
        assert_eq!(take(&mut wheel, 256), [1]);
        assert!(take(&mut wheel, 1000).is_empty());
        // A resolution of 256 ticks makes it 24 ticks late.
        assert_eq!(take(&mut wheel, 1024), [0]);
        wheel.insert(3, 0);
        assert_eq!(take(&mut wheel, 1024), [3]);
        assert!(wheel.next_due().is_some_and(|next| next > 1 << 62));
    }

    #[test]
    fn hundreds_of_thousands_come_out_in_order() {
        const COUNT: u32 = 300_000;
        let mut wheel = DueWheel::new(COUNT as usize, 1);
        let due = |number: u32| u64::from(number).wrapping_mul(0x9E37_79B9) % 50_000_000;
        for number in 0..COUNT {
            wheel.insert(number, due(number));
        }
        let mut expected: Vec<u32> = (0..COUNT).collect();
        expected.sort_by_key(|number| due(*number));
        let mut out = Vec::new();
        let mut now = 0;
        while let Some(next) = wheel.next_due() {
            assert!(next >= now);
            now = next;
            wheel.advance(now, |number| {
                assert!(due(number) <= now);
                out.push(number);
            });
        }
        assert_eq!(out, expected);
    }

    #[test]
    fn what_is_drained_leaves_the_time_as_it_was() {
        let mut wheel = DueWheel::new(3, 1);
        assert!(take(&mut wheel, 100).is_empty());
        wheel.insert(0, 1 << 40);
        wheel.insert(1, 200);
        let mut out = Vec::new();
        wheel.drain(|number| out.push(number));
        assert_eq!((out, wheel.next_due()), (vec![1, 0], None));
        wheel.insert(2, 150);
        assert_eq!(wheel.next_due(), Some(150));
        assert!(take(&mut wheel, 149).is_empty());
        assert_eq!(take(&mut wheel, 150), [2]);
    }

    proptest! {
        /// Against a list that is sorted by due time and, within it, by when an entry went in.
        #[test]
        fn it_is_a_sorted_list(
            shift in 0..12u32,
            steps in prop::collection::vec((0..5u64, 0..40u32, 0..200u64), 1..300),
        ) {
            let mut wheel = DueWheel::new(300, 1 << shift);
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
                    prop_assert_eq!(take(&mut wheel, now), expected);
                } else {
                    let due = (now + time).div_ceil(unit);
                    wheel.insert(number, now + time);
                    model.push((due, number));
                    number += 1;
                }
                let first = model.iter().map(|&(due, _)| due).min();
                prop_assert_eq!(wheel.next_due().is_some(), first.is_some());
                if let (Some(next), Some(first)) = (wheel.next_due(), first) {
                    prop_assert!(next / unit <= first);
                }
            }
        }
    }
}
