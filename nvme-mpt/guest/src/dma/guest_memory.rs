//! Access to a VM's memory for the control path of a function.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use nvme_mpt_memory::clock::{Ticks, ticks_to_nanoseconds};
use nvme_mpt_memory::{MappedWord32, RawBytes};

use super::{
    DetachedGuestMemory, DmaDirection, DmaError, PublishedTable, RegionHint, RegionTable, lock,
};
use crate::address::Gpa;

/// Access to a VM's memory in this process. Clones access the same memory.
///
/// An access uses the memory map of the [window](super::DmaWindow) at the time of the access. While this value exists, the
/// memory stays mapped for this process and for the host controller, even after the window is dropped.
#[derive(Clone, Debug)]
pub struct GuestMemory(Arc<PublishedTable>);

impl GuestMemory {
    pub(super) fn new(tables: Arc<PublishedTable>) -> Self {
        Self(tables)
    }

    /// Copies from the VM's memory, across regions if necessary.
    ///
    /// # Errors
    /// [`DmaError::NotMapped`]. Bytes copied before the error stay in `buffer`.
    pub fn read(&self, gpa: Gpa, buffer: &mut [u8]) -> Result<(), DmaError> {
        let len = buffer.len();
        self.for_each_part(gpa, len, DmaDirection::FromGuest, |bytes, range| {
            bytes.copy_to(&mut buffer[range]);
        })
    }

    /// Copies to the VM's memory, across regions if necessary.
    ///
    /// # Errors
    /// [`DmaError::NotMapped`]. Bytes copied before the error stay in the VM's memory.
    pub fn write(&self, gpa: Gpa, buffer: &[u8]) -> Result<(), DmaError> {
        let len = buffer.len();
        let written = self.for_each_part(gpa, len, DmaDirection::ToGuest, |bytes, range| {
            bytes.copy_from(&buffer[range]);
        });
        log_write(&self.table(), gpa, len as u64);
        written
    }

    /// Loads a word with acquire semantics, to which the guest may store concurrently. Returns `None` if the word is not
    /// mapped or not aligned to 4 bytes.
    #[must_use]
    pub fn load(&self, gpa: Gpa) -> Option<u32> {
        let table = self.table();
        Some(mapped_word(&table, gpa)?.load())
    }

    /// Stores a word with release semantics, which the guest may load concurrently. Returns whether the word is mapped and
    /// aligned to 4 bytes.
    pub fn store(&self, gpa: Gpa, value: u32) -> bool {
        let table = self.table();
        let Some(cell) = mapped_word(&table, gpa) else {
            return false;
        };
        cell.store(value);
        log_write(&table, gpa, size_of::<u32>() as u64);
        true
    }

    /// Returns the time since the last change of the memory map; zero while a change is in progress.
    #[must_use]
    pub fn time_since_change(&self) -> Duration {
        let now = Ticks::now();
        Duration::from_nanos(ticks_to_nanoseconds(now.since(self.0.last_change(now))))
    }

    /// Returns the current memory, for [mapping it again](super::DmaWindow::map_detached).
    #[must_use]
    pub fn detach(&self) -> DetachedGuestMemory {
        DetachedGuestMemory::from_regions(&lock(&self.0.regions))
    }

    fn table(&self) -> Arc<RegionTable> {
        self.0.current()
    }

    fn for_each_part(
        &self,
        gpa: Gpa,
        len: usize,
        direction: DmaDirection,
        mut part: impl FnMut(RawBytes<'_>, Range<usize>),
    ) -> Result<(), DmaError> {
        let table = self.table();
        let mut hint = RegionHint::default();
        let mut done = 0;
        while done < len {
            let not_mapped = DmaError::NotMapped {
                gpa,
                len: len as u64,
            };
            let Some(at) = gpa.checked_add(done as u64) else {
                return Err(not_mapped);
            };
            let Some(bytes) = table.bytes_prefix(at, len - done, direction, &mut hint) else {
                return Err(not_mapped);
            };
            let size = bytes.len();
            part(bytes, done..done + size);
            done += size;
        }
        Ok(())
    }
}

fn mapped_word(table: &RegionTable, gpa: Gpa) -> Option<MappedWord32> {
    let (mapping, offset) = table.locate(gpa, size_of::<u32>() as u64)?;
    MappedWord32::new(mapping, offset)
}

/// Notes a finished write in the dirty log, if the log is on. The write has `len` bytes at a guest address.
fn log_write(table: &RegionTable, gpa: Gpa, len: u64) {
    if table.has_dirty_log() {
        table.mark_dirty(gpa, len);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dma::tests::{region, window};

    #[test]
    fn a_view_follows_its_window() {
        let window = window();
        let memory = window.memory();
        let (at, mut byte) = (Gpa(0x1800), [0]);
        memory.read(at, &mut byte).expect_err("not mapped yet");
        window.map(region(0x1000, 0x2000)).expect("map");
        memory.write(at, &[7]).expect("mapped");
        window.read(at, &mut byte).expect("mapped");
        assert_eq!(byte, [7]);
        window.unmap_all().expect("idle");
        memory.read(at, &mut byte).expect_err("unmapped");
    }

    #[test]
    fn memory_is_not_quiet_while_it_changes() {
        let window = window();
        let memory = window.memory();
        let change = memory.0.ongoing.begin();
        assert_eq!(memory.time_since_change(), Duration::ZERO);
        drop(change);
        let ended = memory.0.last_change(Ticks::now());
        assert_ne!(ended, Ticks::default());
    }

    #[test]
    fn words_are_aligned_and_their_stores_are_noted() {
        let window = window();
        let memory = window.memory();
        assert!(!memory.store(Gpa(0x1000), 1), "not mapped");
        window.map(region(0x1000, 0x2000)).expect("map");
        window.start_dirty_log().expect("idle");
        assert!(!memory.store(Gpa(0x1002), 1), "not aligned");
        assert_eq!(memory.load(Gpa(0x1002)), None);
        assert!(window.take_dirty_pages().expect("logged").is_empty());
        assert!(memory.store(Gpa(0x2004), 0x0102_0304));
        assert_eq!(memory.load(Gpa(0x2004)), Some(0x0102_0304));
        let dirty = window.take_dirty_pages().expect("logged");
        assert_eq!(dirty.len(), 1);
        assert_eq!((dirty[0].gpa, dirty[0].len), (Gpa(0x2000), 0x1000));
    }
}
