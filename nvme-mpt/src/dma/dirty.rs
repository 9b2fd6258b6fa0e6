//! Which pages of a VM's memory its device has written: what a VMM that moves a running VM copies
//! once more.
//!
//! Nothing is noted until somebody asks for it, by a table of the VM's memory that has a note of each
//! region's pages beside it. All writes are noted *after* they are done. So a page that is copied when its
//! note is found has what was written, or is found again. [`DmaWindow::start_dirty_log`] returns when every
//! shadow queue has taken up a table with notes: from then on it notes what commands wrote when they
//! complete, also those that were in flight before.

use std::sync::Arc;

use super::notes::{DirtyRange, Notes};
use super::region::Place;
use super::sorted::Sorted;
use super::{DmaError, DmaWindow, RegionTable};
use crate::address::Gpa;
use crate::deadline::DRAIN_DEADLINE;

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
    use crate::address::PAGE_SIZE;
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
}
