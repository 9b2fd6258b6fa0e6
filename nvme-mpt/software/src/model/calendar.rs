//! Completions until they are due: a calendar with a page for each unit of the near future, in a ring,
//! and a heap for what is further away.
//!
//! Nearly all that a drive has in flight is due within a millisecond. To put such a completion on its
//! page and to take it off again costs far less than the heap takes. Nothing is allocated after it was
//! made. Completions that are due in the same unit come out in no order, as a
//! drive promises none among commands (Base 2.0, section 3.4.1).

use super::due::DueQueue;
use nvme_mpt::host::HostCompletion;
use nvme_mpt::spec::status::Status;

/// Pages in the ring.
const PAGES: u64 = 64 * 64;

const NONE: u16 = u16::MAX;

/// A time in ticks, plus one tick less than a unit. Cut to whole units it is rounded up, so nothing comes out before
/// it is due. A time counted from it is rounded up, too, without a further addition.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RoundedUp(pub(crate) u64);

/// A slot's completion: its status in the upper half, and the next slot on its page in the lower one. As a word, it
/// is written and read at once.
#[derive(Clone, Copy, Debug)]
struct Entry(u32);

impl Entry {
    #[inline]
    fn new(status: Status, next: u16) -> Self {
        Self(u32::from(status.0) << 16 | u32::from(next))
    }

    #[inline]
    fn status(self) -> Status {
        Status((self.0 >> 16) as u16)
    }

    #[inline]
    fn next(self) -> u16 {
        self.0 as u16
    }
}

/// The pages of the near future, in units of time.
#[derive(Debug)]
struct Ring {
    /// The unit from which on there are pages: nothing is on an earlier one.
    begin: u64,
    /// Pages that are not empty.
    occupied: [u64; 64],
    /// The first slot on each page.
    pages: [u16; PAGES as usize],
    /// By slot.
    entries: Box<[Entry]>,
}

impl Ring {
    /// Returns whether there is a page for a unit.
    #[inline]
    fn has(&self, unit: u64) -> bool {
        unit.wrapping_sub(self.begin) < PAGES
    }

    /// Puts a completion on the page of a unit.
    #[inline]
    fn enter(&mut self, slot: u16, status: Status, unit: u64) {
        let Some(entry) = self.entries.get_mut(usize::from(slot)) else {
            return;
        };
        let page = (unit % PAGES) as usize;
        let next = std::mem::replace(&mut self.pages[page], slot);
        *entry = Entry::new(status, next);
        self.occupied[page / 64] |= 1 << (page % 64);
    }

    /// Puts a completion on the page of a unit that was kept for later.
    fn enter_kept(&mut self, slot: u32, unit: u64) {
        if let Some(entry) = self.entries.get(slot as usize) {
            self.enter(slot as u16, entry.status(), unit);
        }
    }

    /// Takes out what is on the pages up to that of a unit.
    #[inline]
    fn release_until(&mut self, until: u64, mut done: impl FnMut(HostCompletion)) {
        // Not before its time by the clock of another processor, which may be behind.
        let Some(ahead) = until.checked_sub(self.begin) else {
            return;
        };
        // By words of pages. Those before the first page, if they are asked for, come last.
        let last = self.begin + ahead.min(PAGES - 1);
        let (mut word, mut asked) = (self.begin / 64, u64::MAX << (self.begin % 64));
        loop {
            while word < last / 64 && self.occupied[(word % 64) as usize] & asked == 0 {
                word += 1;
                asked = u64::MAX;
            }
            let is_last = word == last / 64;
            if is_last {
                asked &= u64::MAX >> (63 - last % 64);
            }
            self.release_word((word % 64) as usize, asked, &mut done);
            if is_last {
                return;
            }
            word += 1;
            asked = u64::MAX;
        }
    }

    /// Takes out what is on those pages of a word that are asked for.
    #[inline(always)]
    fn release_word(&mut self, word: usize, asked: u64, done: &mut impl FnMut(HostCompletion)) {
        let mut due = self.occupied[word] & asked;
        self.occupied[word] ^= due;
        while due != 0 {
            let page = word * 64 + due.trailing_zeros() as usize;
            due &= due - 1;
            let mut slot = std::mem::replace(&mut self.pages[page], NONE);
            while let Some(&entry) = self.entries.get(usize::from(slot)) {
                let (status, dw0) = (entry.status(), 0);
                done(HostCompletion { slot, status, dw0 });
                slot = entry.next();
            }
        }
    }

    /// The first unit whose page is not empty.
    fn first(&self) -> Option<u64> {
        let (word, bit) = ((self.begin % PAGES / 64) as usize, self.begin % 64);
        // The first word's pages before the first page are the last ones of the ring.
        let words = (0..=64).map(|i| match i {
            0 => self.occupied[word] >> bit << bit,
            64 => self.occupied[word] & !(u64::MAX << bit),
            i => self.occupied[(word + i) % 64],
        });
        let (i, found) = words.enumerate().find(|(_, found)| *found != 0)?;
        let of_word = self.begin - bit + i as u64 * 64;
        Some(of_word + u64::from(found.trailing_zeros()))
    }
}

/// Completions, known by their slots, that wait until they are due.
#[derive(Debug)]
pub(crate) struct Calendar {
    /// Ticks per unit as a power of two.
    shift: u32,
    /// Ticks added to round a time up: one less than a unit.
    round: u64,
    near: Ring,
    /// Beyond the ring.
    later: DueQueue,
}

impl Calendar {
    /// A calendar for slots 0 to `slots`-1 that tells times apart that are `resolution` ticks apart,
    /// or less.
    pub(crate) fn new(slots: u16, resolution: u64) -> Self {
        let nothing = Entry::new(Status::SUCCESS, NONE);
        let shift = resolution.max(1).ilog2();
        Self {
            shift,
            round: (1 << shift) - 1,
            near: Ring {
                begin: 0,
                occupied: [0; 64],
                pages: [NONE; PAGES as usize],
                // One less than there are numbers at most, so that one of them is nobody's.
                entries: vec![nothing; slots.into()].into_boxed_slice(),
            },
            later: DueQueue::new(slots.into(), resolution),
        }
    }

    /// It is at least `now`: what is put in next is near. Returns `now` rounded up, for due times to be counted from.
    #[inline]
    pub(crate) fn begin(&mut self, now: u64) -> RoundedUp {
        let unit = now >> self.shift;
        // Nothing was released for long: most likely there was nothing.
        if unit > self.near.begin + PAGES / 2 && self.near.first().is_none() {
            self.near.begin = unit;
        }
        RoundedUp(now.wrapping_add(self.round))
    }

    /// Puts in a completion, for a slot that has none in it. A completion that is due already comes out next.
    #[inline]
    pub(crate) fn hold(&mut self, slot: u16, status: Status, due: RoundedUp) {
        let unit = due.0 >> self.shift;
        if self.near.has(unit) {
            self.near.enter(slot, status, unit);
        } else {
            self.hold_elsewhere(slot, status, due);
        }
    }

    /// Puts a completion in for which there is no page.
    #[cold]
    fn hold_elsewhere(&mut self, slot: u16, status: Status, due: RoundedUp) {
        if due.0 >> self.shift < self.near.begin {
            self.near.enter(slot, status, self.near.begin);
        } else if let Some(entry) = self.near.entries.get_mut(usize::from(slot)) {
            *entry = Entry::new(status, NONE);
            // It rounds by itself.
            self.later.insert(slot.into(), due.0 - self.round);
        }
    }

    /// Takes out all that is due at `now`; or everything, as if it were due, and then time goes on from
    /// where it was. In one place for both, so that what is done with completions is, too.
    #[inline]
    pub(crate) fn release(&mut self, now: Option<u64>, done: impl FnMut(HostCompletion)) {
        let Self {
            shift, near, later, ..
        } = self;
        let begin = near.begin;
        let until = match now {
            Some(now) => {
                if later.is_due(now) {
                    // By the page that comes out next.
                    later.advance(now, |slot| near.enter_kept(slot, begin));
                }
                now >> *shift
            }
            None => {
                later.drain(|slot| near.enter_kept(slot, begin));
                u64::MAX - 1
            }
        };
        near.release_until(until, done);
        if now.is_some() {
            near.begin = begin.max(until);
        }
    }

    /// A time in ticks until which nothing comes out; `None` if there is nothing in it.
    pub(crate) fn next_due(&self) -> Option<u64> {
        let near = self.near.first().map(|unit| unit << self.shift);
        [near, self.later.next_due()].into_iter().flatten().min()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A status that tells a slot's completion from others.
    fn status(slot: u16) -> Status {
        Status(slot & 0xFF)
    }

    fn hold(calendar: &mut Calendar, slot: u16, due: u64) {
        calendar.hold(slot, status(slot), RoundedUp(due + calendar.round));
    }

    fn release(calendar: &mut Calendar, now: u64) -> Vec<u16> {
        let mut out = Vec::new();
        calendar.release(Some(now), |completion| {
            assert_eq!(completion.status, status(completion.slot));
            out.push(completion.slot);
        });
        out.sort_unstable();
        out
    }

    #[test]
    fn nothing_comes_out_before_it_is_due_and_all_of_it_then() {
        let mut calendar = Calendar::new(4, 256);
        hold(&mut calendar, 0, 1000);
        hold(&mut calendar, 1, 256);
        hold(&mut calendar, 2, 1 << 40);
        assert_eq!(calendar.next_due(), Some(256));
        assert!(release(&mut calendar, 255).is_empty());
        assert_eq!(release(&mut calendar, 256), [1]);
        assert!(release(&mut calendar, 1000).is_empty());
        // A resolution of 256 ticks makes it 24 ticks late.
        assert_eq!(release(&mut calendar, 1024), [0]);
        hold(&mut calendar, 3, 0);
        assert_eq!(release(&mut calendar, 1024), [3]);
        assert!(calendar.next_due().is_some_and(|next| next > 1 << 38));
        assert!(release(&mut calendar, (1 << 40) - 1).is_empty());
        assert_eq!(release(&mut calendar, 1 << 40), [2]);
        assert_eq!(calendar.next_due(), None);
    }

    #[test]
    fn a_clock_that_is_behind_releases_nothing_early() {
        let mut calendar = Calendar::new(1, 1);
        assert!(release(&mut calendar, 100).is_empty());
        hold(&mut calendar, 0, 100);
        assert!(release(&mut calendar, 99).is_empty());
        assert_eq!(release(&mut calendar, 100), [0]);
    }

    #[test]
    fn what_is_drained_leaves_the_time_as_it_was() {
        let mut calendar = Calendar::new(3, 1);
        assert!(release(&mut calendar, 100).is_empty());
        calendar.begin(100);
        hold(&mut calendar, 0, 1 << 40);
        hold(&mut calendar, 1, 200);
        let mut out = 0;
        calendar.release(None, |_| out += 1);
        assert_eq!((out, calendar.next_due()), (2, None));
        hold(&mut calendar, 2, 150);
        assert!(release(&mut calendar, 149).is_empty());
        assert_eq!(release(&mut calendar, 150), [2]);
    }

    proptest! {
        /// Against a list.
        #[test]
        fn it_holds_each_until_its_unit_of_time(
            shift in 0..10u32,
            steps in prop::collection::vec((0..4u64, 0..16u32, 0..200u64), 1..300),
        ) {
            let mut calendar = Calendar::new(300, 1 << shift);
            let unit = 1_u64 << shift;
            let mut model: Vec<(u64, u16)> = Vec::new();
            let (mut now, mut slot) = (0_u64, 0);
            for (kind, magnitude, value) in steps {
                let time = value << magnitude;
                match kind {
                    0 => {
                        now += time;
                        let mut expected = Vec::new();
                        model.retain(|&(due, slot)| {
                            let comes_out = due <= now / unit;
                            if comes_out {
                                expected.push(slot);
                            }
                            !comes_out
                        });
                        expected.sort_unstable();
                        prop_assert_eq!(release(&mut calendar, now), expected);
                    }
                    1 => prop_assert_eq!(calendar.begin(now), RoundedUp(now + unit - 1)),
                    _ => {
                        hold(&mut calendar, slot, now + time);
                        model.push(((now + time).div_ceil(unit), slot));
                        slot += 1;
                    }
                }
                let first = model.iter().map(|&(due, _)| due).min();
                prop_assert_eq!(calendar.next_due().is_some(), first.is_some());
                if let (Some(next), Some(first)) = (calendar.next_due(), first) {
                    prop_assert!(next / unit <= first);
                }
            }
        }
    }
}
