//! Which pages of a VM's memory its device has written: what a VMM that moves a running VM copies
//! once more.
//!
//! Nothing is noted until somebody asks for it, by a table of the VM's memory that has a note of each
//! region's pages beside it. All writes are noted *after* they are done. So a page that is copied when its
//! note is found has what was written, or is found again. [`DmaWindow::start_dirty_log`] returns when every
//! shadow queue has taken up a table with notes: from then on it notes what commands wrote when they
//! complete, also those that were in flight before.

use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::region::Place;
use super::sorted::Sorted;
use super::{DmaError, DmaWindow, RegionTable};
use crate::address::{Gpa, PAGE_SIZE};
use crate::deadline::DRAIN_DEADLINE;

/// Pages that were written, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirtyRange {
    /// Guest address of the first one.
    pub gpa: Gpa,
    /// Bytes, whole pages.
    pub len: u64,
}

/// The pages of one region that were written.
#[derive(Debug)]
pub(super) struct Notes {
    /// Guest address of the region.
    gpa: u64,
    len: u64,
    /// By page.
    written: Box<[AtomicU64]>,
}

impl Notes {
    pub(super) fn new(gpa: u64, len: u64) -> Self {
        let words = (len / PAGE_SIZE).div_ceil(64);
        let written = (0..words).map(|_| AtomicU64::new(0)).collect();
        Self { gpa, len, written }
    }

    /// Notes a write of `len` bytes, at least one, at `offset` in the region.
    pub(super) fn note(&self, offset: u64, len: u64) {
        let mut page = offset / PAGE_SIZE;
        let end = (offset + len).div_ceil(PAGE_SIZE);
        while page < end {
            let in_word = (64 - page % 64).min(end - page);
            let bits = (u64::MAX >> (64 - in_word)) << (page % 64);
            // Beyond the region there is none. A note that is there already is made once more: only
            // so is what was written before it seen by whoever takes it.
            if let Some(word) = self.written.get((page / 64) as usize) {
                word.fetch_or(bits, Ordering::AcqRel);
            }
            page += in_word;
        }
    }

    /// Guest address of the region.
    pub(super) fn gpa(&self) -> u64 {
        self.gpa
    }

    /// Takes all notes.
    pub(super) fn take(&self, ranges: &mut Vec<DirtyRange>) {
        for (index, word) in (0..).zip(&self.written) {
            let mut bits = word.swap(0, Ordering::AcqRel);
            while bits != 0 {
                let first = bits.trailing_zeros();
                let pages = (bits >> first).trailing_ones();
                let page = index * 64 + u64::from(first);
                push(ranges, self.gpa + page * PAGE_SIZE, u64::from(pages));
                // All bits below the run are clear, so that the carry clears just the run.
                bits = bits.wrapping_add(1 << first) & bits;
            }
        }
    }
}

/// Adds pages, to the last range if they follow it.
fn push(ranges: &mut Vec<DirtyRange>, gpa: u64, pages: u64) {
    let len = pages * PAGE_SIZE;
    match ranges.last_mut() {
        Some(last) if last.gpa.0.wrapping_add(last.len) == gpa => last.len += len,
        _ => ranges.push(DirtyRange { gpa: Gpa(gpa), len }),
    }
}

impl RegionTable {
    /// Returns whether writes are noted.
    #[inline]
    #[must_use]
    pub fn is_logged(&self) -> bool {
        self.dirty.is_some()
    }

    /// Notes a write of `len` bytes at a guest address, of all up to where no memory is.
    pub(crate) fn note_written(&self, gpa: Gpa, len: u64) {
        let Some(dirty) = &self.dirty else { return };
        let (mut at, mut rest) = (gpa.0, len);
        for notes in dirty.values_from(at) {
            let offset = at.wrapping_sub(notes.gpa);
            if rest == 0 || offset >= notes.len {
                return;
            }
            let len = rest.min(notes.len - offset);
            notes.note(offset, len);
            at = at.wrapping_add(len);
            rest -= len;
        }
    }

    /// Notes a write of at most `len` bytes at an IOVA: of as many as this table knows memory for,
    /// which it returns.
    pub(crate) fn note_written_by_drive(&self, iova: u64, len: u64) -> u64 {
        let Some((gpa, mapped)) = self.guest_address(iova) else {
            return 0;
        };
        let len = len.min(mapped);
        self.note_written(gpa, len);
        len
    }

    /// Takes all notes, by ascending address.
    pub(super) fn take_notes(&self, ranges: &mut Vec<DirtyRange>) {
        for notes in self.dirty.iter().flat_map(Sorted::values) {
            notes.take(ranges);
        }
    }
}

impl DmaWindow {
    /// Begins to note which pages the device writes: data, completions, and all else. Writes before this returns may
    /// be missing from the notes, so a VMM copies all memory after it.
    ///
    /// Nothing else of the function is to be under way, but for its pollers: no access and no
    /// admin command.
    ///
    /// # Errors
    /// [`DmaError::Busy`] if a poller does not take up a table with notes; then nothing is noted.
    pub fn start_dirty_log(&self) -> Result<(), DmaError> {
        let generation = {
            let mut changes = self.changes();
            changes.departed.clear();
            let mut dirty = Sorted::default();
            for Place { gpa, len, .. } in changes.regions.values().map(|region| &region.place) {
                dirty.insert(*gpa, Arc::new(Notes::new(*gpa, *len)));
            }
            let mut table = self.next_table();
            table.dirty = Some(dirty);
            self.tables.publish(&changes, table)
        };
        if self
            .tables
            .wait_left(generation, &*self.clock, DRAIN_DEADLINE)
        {
            return Ok(());
        }
        self.stop_dirty_log();
        let (gpa, len) = (Gpa(0), u64::MAX);
        Err(DmaError::Busy { gpa, len })
    }

    /// Ends [`Self::start_dirty_log`], and forgets what was noted.
    pub fn stop_dirty_log(&self) {
        let mut changes = self.changes();
        changes.departed.clear();
        let mut table = self.next_table();
        table.dirty = None;
        self.tables.publish(&changes, table);
    }

    /// The pages that were written since the last time somebody asked, or since it began; also those
    /// of regions that were unmapped meanwhile.
    ///
    /// # Errors
    /// [`DmaError::NotLogged`] unless it began.
    pub fn take_dirty_pages(&self) -> Result<Vec<DirtyRange>, DmaError> {
        let mut changes = self.changes();
        let current = self.table();
        if !current.is_logged() {
            return Err(DmaError::NotLogged);
        }
        let mut ranges = std::mem::take(&mut changes.departed);
        current.take_notes(&mut ranges);
        Ok(ranges)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dma::tests::{region, window};

    fn range(gpa: u64, pages: u64) -> DirtyRange {
        DirtyRange {
            gpa: Gpa(gpa),
            len: pages * PAGE_SIZE,
        }
    }

    #[test]
    fn writes_of_the_control_path_are_noted_once() {
        let window = window();
        window.map(region(0x10000, 0x4000)).expect("map");
        window.map(region(0x14000, 0x100_000)).expect("map");
        window.write(Gpa(0x10000), &[1]).expect("mapped");
        assert!(matches!(
            window.take_dirty_pages(),
            Err(DmaError::NotLogged)
        ));
        window.start_dirty_log().expect("idle");
        assert_eq!(window.take_dirty_pages().expect("logged"), []);
        window.write(Gpa(0x11FFF), &[1, 2]).expect("mapped");
        window.write(Gpa(0x13FF0), &[0; 32]).expect("across");
        window
            .write(Gpa(0x14000 + 63 * 0x1000), &[0; 0x3000])
            .expect("mapped");
        assert_eq!(
            window.take_dirty_pages().expect("logged"),
            [range(0x11000, 4), range(0x53000, 3)]
        );
        assert_eq!(window.take_dirty_pages().expect("logged"), []);
        window.stop_dirty_log();
        window.write(Gpa(0x11000), &[1]).expect("mapped");
        window.start_dirty_log().expect("idle");
        assert_eq!(window.take_dirty_pages().expect("logged"), []);
    }

    #[test]
    fn what_was_written_to_a_region_that_went_is_told() {
        let window = window();
        window.map(region(0x10000, 0x4000)).expect("map");
        window.start_dirty_log().expect("idle");
        window.write(Gpa(0x12000), &[1]).expect("mapped");
        window.unmap(Gpa(0x10000), 0x4000).expect("idle");
        window.map(region(0x10000, 0x4000)).expect("map");
        window.write(Gpa(0x13000), &[1]).expect("mapped");
        assert_eq!(
            window.take_dirty_pages().expect("logged"),
            [range(0x12000, 2)]
        );
    }

    #[test]
    fn runs_of_bits_become_ranges() {
        let pages = Notes::new(0, 200 * PAGE_SIZE);
        for run in [0..1, 3..64, 65..66, 127..130, 199..200] {
            pages.note(run.start * PAGE_SIZE, (run.end - run.start) * PAGE_SIZE);
        }
        let mut ranges = Vec::new();
        pages.take(&mut ranges);
        let expected = [(0, 1), (3, 61), (65, 1), (127, 3), (199, 1)];
        assert_eq!(
            ranges,
            expected.map(|(at, count)| range(at * PAGE_SIZE, count))
        );
        // The whole first word, and beyond the region.
        pages.note(0, 64 * PAGE_SIZE);
        pages.note(300 * PAGE_SIZE, 1);
        ranges.clear();
        pages.take(&mut ranges);
        assert_eq!(ranges, [range(0, 64)]);
    }
}
