//! Completions that are held until they are due, in two structures. A ring has a page for each time unit of the near future. A
//! heap has the completions that are due after the ring's last time unit.
//!
//! Nearly all commands in flight are due within a millisecond. Adding their completions to a page and removing them costs far
//! less than operations on a heap. No memory is allocated after the creation. Completions that are due in one time unit come
//! out in any order, because a drive promises no order among commands (Base 2.0, section 3.4.1).

use super::due_queue::DueQueue;
use nvme_mpt::host::HostCompletion;
use nvme_spec::status::Status;

/// Number of pages of the ring, one for each time unit of the near future.
const PAGES: u64 = 64 * 64;

const NO_SLOT: u16 = u16::MAX;

/// A time in ticks plus one tick less than a time unit. Truncating this number to time units therefore rounds the time up, so
/// that no completion comes out early. The property survives adding ticks, so due times that are computed from this number are
/// rounded up, too.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RoundedUpTicks(pub u64);

/// Entry of a command's slot in the list of a page: the status in the upper half of the word, and the next slot of the list in
/// the lower half. Both are read and written together.
#[derive(Clone, Copy, Debug)]
struct CalendarEntry(u32);

impl CalendarEntry {
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

/// Pages for the time units of the near future.
#[derive(Debug)]
struct CalendarRing {
    /// Number of the first time unit that has a page. All completions of earlier units have come out.
    window_start: u64,
    /// Bitmap of the pages: 1 for a page with completions.
    occupied: [u64; 64],
    /// First slot in the list of each page.
    pages: [u16; PAGES as usize],
    /// List entries, indexed by slot.
    entries: Box<[CalendarEntry]>,
}

impl CalendarRing {
    /// Returns whether the ring has a page for a time unit.
    #[inline]
    fn has_unit(&self, unit: u64) -> bool {
        unit.wrapping_sub(self.window_start) < PAGES
    }

    /// Adds a slot's completion to the page of a time unit.
    #[inline]
    fn insert(&mut self, slot: u16, status: Status, unit: u64) {
        let Some(entry) = self.entries.get_mut(usize::from(slot)) else {
            return;
        };
        let page = (unit % PAGES) as usize;
        let next = std::mem::replace(&mut self.pages[page], slot);
        *entry = CalendarEntry::new(status, next);
        self.occupied[page / 64] |= 1 << (page % 64);
    }

    /// Moves a slot's completion from the heap to the page of a time unit.
    fn move_from_later(&mut self, slot: u32, unit: u64) {
        if let Some(entry) = self.entries.get(slot as usize) {
            self.insert(slot as u16, entry.status(), unit);
        }
    }

    /// Removes all completions on the pages of time units up to `until`.
    #[inline]
    fn release_until(&mut self, until: u64, mut done: impl FnMut(HostCompletion)) {
        // The clock of another processor may be behind, so time may seem to go backwards.
        let Some(ahead) = until.checked_sub(self.window_start) else {
            return;
        };
        // Scans the bitmap word by word. The bits before the first page in the first word are the end of the ring, and come
        // last.
        let last = self.window_start + ahead.min(PAGES - 1);
        let (mut word, mut wanted) = (self.window_start / 64, u64::MAX << (self.window_start % 64));
        loop {
            while word < last / 64 && self.occupied[(word % 64) as usize] & wanted == 0 {
                word += 1;
                wanted = u64::MAX;
            }
            let is_last = word == last / 64;
            if is_last {
                wanted &= u64::MAX >> (63 - last % 64);
            }
            self.release_word((word % 64) as usize, wanted, &mut done);
            if is_last {
                return;
            }
            word += 1;
            wanted = u64::MAX;
        }
    }

    /// Removes the completions on those pages of a bitmap word whose bits are set in `wanted`.
    #[inline(always)]
    fn release_word(&mut self, word: usize, wanted: u64, done: &mut impl FnMut(HostCompletion)) {
        let mut due = self.occupied[word] & wanted;
        self.occupied[word] ^= due;
        while due != 0 {
            let page = word * 64 + due.trailing_zeros() as usize;
            due &= due - 1;
            let mut slot = std::mem::replace(&mut self.pages[page], NO_SLOT);
            while let Some(&entry) = self.entries.get(usize::from(slot)) {
                let (status, dw0) = (entry.status(), 0);
                done(HostCompletion { slot, status, dw0 });
                slot = entry.next();
            }
        }
    }

    /// Returns the first time unit whose page has completions.
    fn first_occupied(&self) -> Option<u64> {
        let (word, bit) = (
            (self.window_start % PAGES / 64) as usize,
            self.window_start % 64,
        );
        // The bits before the first page in the first word are the last pages of the ring.
        let words = (0..=64).map(|i| match i {
            0 => self.occupied[word] >> bit << bit,
            64 => self.occupied[word] & !(u64::MAX << bit),
            i => self.occupied[(word + i) % 64],
        });
        let (i, found) = words.enumerate().find(|(_, found)| *found != 0)?;
        let of_word = self.window_start - bit + i as u64 * 64;
        Some(of_word + u64::from(found.trailing_zeros()))
    }
}

/// Completions that are held until they are due. The slot identifies a completion.
#[derive(Debug)]
pub struct CompletionCalendar {
    /// Ticks per time unit, as a base-2 logarithm.
    shift: u32,
    /// Number of ticks that are added to a time to round it up: one less than in a time unit.
    rounding_ticks: u64,
    near: CalendarRing,
    /// Completions that are due after the last time unit of the ring.
    later: DueQueue,
}

impl CompletionCalendar {
    /// Creates a calendar for slots 0 to `slots`-1, with time units of at most `resolution` ticks.
    #[must_use]
    pub fn new(slots: u16, resolution: u64) -> Self {
        let nothing = CalendarEntry::new(Status::SUCCESS, NO_SLOT);
        let shift = resolution.max(1).ilog2();
        Self {
            shift,
            rounding_ticks: (1 << shift) - 1,
            near: CalendarRing {
                window_start: 0,
                occupied: [0; 64],
                pages: [NO_SLOT; PAGES as usize],
                // There are at most 65,535 slots, so `NO_SLOT` is no valid slot.
                entries: vec![nothing; slots.into()].into_boxed_slice(),
            },
            later: DueQueue::new(slots.into(), resolution),
        }
    }

    /// Advances the current time to `now`, if it is earlier. Returns `now` rounded up, as the base of due times.
    #[inline]
    pub fn advance_to(&mut self, now: u64) -> RoundedUpTicks {
        let unit = now >> self.shift;
        // Moves the ring forward, if no completion has been held for a long time.
        if unit > self.near.window_start + PAGES / 2 && self.near.first_occupied().is_none() {
            self.near.window_start = unit;
        }
        RoundedUpTicks(now.wrapping_add(self.rounding_ticks))
    }

    /// Holds a slot's completion until it is due. The slot may not have another held completion. A completion that is already
    /// due comes out in the next release.
    #[inline]
    pub fn hold(&mut self, slot: u16, status: Status, due: RoundedUpTicks) {
        let unit = due.0 >> self.shift;
        if self.near.has_unit(unit) {
            self.near.insert(slot, status, unit);
        } else {
            self.hold_outside_ring(slot, status, due);
        }
    }

    /// Holds a completion whose due time lies outside of the ring.
    #[cold]
    fn hold_outside_ring(&mut self, slot: u16, status: Status, due: RoundedUpTicks) {
        if due.0 >> self.shift < self.near.window_start {
            self.near.insert(slot, status, self.near.window_start);
        } else if let Some(entry) = self.near.entries.get_mut(usize::from(slot)) {
            *entry = CalendarEntry::new(status, NO_SLOT);
            // `later` itself rounds due times up.
            self.later.insert(slot.into(), due.0 - self.rounding_ticks);
        }
    }

    /// Removes all completions that are due at `now`. If `now` is `None`, removes all completions, and leaves the calendar's
    /// time unchanged. One function does both, so that `done` is inlined only once.
    #[inline]
    pub fn release(&mut self, now: Option<u64>, done: impl FnMut(HostCompletion)) {
        let Self {
            shift, near, later, ..
        } = self;
        let begin = near.window_start;
        let until = match now {
            Some(now) => {
                if later.is_due(now) {
                    // Completions of the heap move to the page that comes out next.
                    later.advance(now, |slot| near.move_from_later(slot, begin));
                }
                now >> *shift
            }
            None => {
                later.drain(|slot| near.move_from_later(slot, begin));
                u64::MAX - 1
            }
        };
        near.release_until(until, done);
        if now.is_some() {
            near.window_start = begin.max(until);
        }
    }

    /// Returns the earliest time, in ticks, at which a completion can come out; `None` if the calendar is empty.
    #[must_use]
    pub fn next_due(&self) -> Option<u64> {
        let near = self.near.first_occupied().map(|unit| unit << self.shift);
        [near, self.later.next_due()].into_iter().flatten().min()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns a status that differs for each slot, so that it identifies the slot's completion.
    fn status(slot: u16) -> Status {
        Status(slot & 0xFF)
    }

    fn hold(calendar: &mut CompletionCalendar, slot: u16, due: u64) {
        calendar.hold(
            slot,
            status(slot),
            RoundedUpTicks(due + calendar.rounding_ticks),
        );
    }

    fn release(calendar: &mut CompletionCalendar, now: u64) -> Vec<u16> {
        let mut out = Vec::new();
        calendar.release(Some(now), |completion| {
            assert_eq!(completion.status, status(completion.slot));
            out.push(completion.slot);
        });
        out.sort_unstable();
        out
    }

    #[test]
    fn entries_are_released_exactly_when_due() {
        let mut calendar = CompletionCalendar::new(4, 256);
        hold(&mut calendar, 0, 1000);
        hold(&mut calendar, 1, 256);
        hold(&mut calendar, 2, 1 << 40);
        assert_eq!(calendar.next_due(), Some(256));
        assert!(release(&mut calendar, 255).is_empty());
        assert_eq!(release(&mut calendar, 256), [1]);
        assert!(release(&mut calendar, 1000).is_empty());
        // With a resolution of 256 ticks, the completion comes out 24 ticks late.
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
        let mut calendar = CompletionCalendar::new(1, 1);
        assert!(release(&mut calendar, 100).is_empty());
        hold(&mut calendar, 0, 100);
        assert!(release(&mut calendar, 99).is_empty());
        assert_eq!(release(&mut calendar, 100), [0]);
    }

    #[test]
    fn draining_does_not_move_the_time() {
        let mut calendar = CompletionCalendar::new(3, 1);
        assert!(release(&mut calendar, 100).is_empty());
        calendar.advance_to(100);
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
        /// Compares the calendar with a plain list of completions.
        #[test]
        fn it_holds_each_until_its_unit_of_time(
            shift in 0..10u32,
            steps in prop::collection::vec((0..4u64, 0..16u32, 0..200u64), 1..300),
        ) {
            let mut calendar = CompletionCalendar::new(300, 1 << shift);
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
                    1 => prop_assert_eq!(calendar.advance_to(now), RoundedUpTicks(now + unit - 1)),
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
