//! Dirty log: the pages of a VM's memory that its device has written, which a VMM copies again during live migration.
//!
//! While the log is off, nothing is noted. The log starts with a table that has a bitmap for each region. Each write is noted
//! *after* it is done. So a page that is copied when its bit is found has the written data, or is found again.
//! [`DmaWindow::start_dirty_log`] returns when every shadow queue has adopted a table with bitmaps. From then on, queues note
//! the writes of commands when they complete, even of commands taken before.

use std::sync::Arc;

use nvme_mpt_memory::deadline::DRAIN_DEADLINE;

use super::dirty_bitmap::{DirtyRange, RegionDirtyBitmap};
use super::region::GuestMemoryPart;
use super::sorted_map::SharedSortedMap;
use super::{DmaError, DmaWindow, RegionTable};
use crate::address::Gpa;

impl RegionTable {
    /// Returns whether the dirty log is on.
    #[inline]
    #[must_use]
    pub fn has_dirty_log(&self) -> bool {
        self.dirty.is_some()
    }

    /// Notes a write of `len` bytes at a guest address. If the memory ends before, only the bytes up to its end are noted.
    pub fn mark_dirty(&self, gpa: Gpa, len: u64) {
        let Some(dirty) = &self.dirty else { return };
        let (mut at, mut rest) = (gpa.0, len);
        for notes in dirty.values_from(at) {
            let offset = at.wrapping_sub(notes.gpa);
            if rest == 0 || offset >= notes.len {
                return;
            }
            let len = rest.min(notes.len - offset);
            notes.mark(offset, len);
            at = at.wrapping_add(len);
            rest -= len;
        }
    }

    /// Notes a write of at most `len` bytes at an IOVA. Returns the number of noted bytes; 0 if this table has no memory there.
    pub fn mark_dirty_iova(&self, iova: u64, len: u64) -> u64 {
        let Some((gpa, mapped)) = self.iova_to_gpa(iova) else {
            return 0;
        };
        let len = len.min(mapped);
        self.mark_dirty(gpa, len);
        len
    }

    /// Adds all dirty pages to `ranges` in order of ascending guest addresses, and clears the log.
    pub(super) fn take_dirty(&self, ranges: &mut Vec<DirtyRange>) {
        for notes in self.dirty.iter().flat_map(SharedSortedMap::values) {
            notes.take(ranges);
        }
    }
}

impl DmaWindow {
    /// Starts the dirty log for all writes of the device: data, completions and everything else. Writes before this call
    /// returns may be missing from the log, so the VMM copies all memory after it.
    ///
    /// The function must not access guest memory during the call: no register access and no admin command may be in
    /// progress. Its pollers may continue.
    ///
    /// # Errors
    /// [`DmaError::Busy`] if a poller does not adopt a table with bitmaps. The log is off then.
    pub fn start_dirty_log(&self) -> Result<(), DmaError> {
        let generation = {
            let mut changes = self.lock_regions();
            changes.unmapped_dirty.clear();
            let mut dirty = SharedSortedMap::default();
            for GuestMemoryPart { gpa, len, .. } in
                changes.regions.values().map(|region| &region.place)
            {
                dirty.insert(*gpa, Arc::new(RegionDirtyBitmap::new(*gpa, *len)));
            }
            let mut table = self.next_table();
            table.dirty = Some(dirty);
            self.tables.publish(&changes, table)
        };
        if self
            .tables
            .wait_for_release(generation, &*self.clock, DRAIN_DEADLINE)
        {
            return Ok(());
        }
        self.stop_dirty_log();
        let (gpa, len) = (Gpa(0), u64::MAX);
        Err(DmaError::Busy { gpa, len })
    }

    /// Stops the dirty log and drops its content.
    pub fn stop_dirty_log(&self) {
        let mut changes = self.lock_regions();
        changes.unmapped_dirty.clear();
        let mut table = self.next_table();
        table.dirty = None;
        self.tables.publish(&changes, table);
    }

    /// Takes the pages written since the last call or since the start of the log, including those of unmapped regions.
    ///
    /// # Errors
    /// [`DmaError::NotLogged`] if the log is off.
    pub fn take_dirty_pages(&self) -> Result<Vec<DirtyRange>, DmaError> {
        let mut changes = self.lock_regions();
        let current = self.table();
        if !current.has_dirty_log() {
            return Err(DmaError::NotLogged);
        }
        let mut ranges = std::mem::take(&mut changes.unmapped_dirty);
        current.take_dirty(&mut ranges);
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
    fn writes_to_an_unmapped_region_are_reported() {
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
