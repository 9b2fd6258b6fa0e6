//! Table of an IOMMU's mappings in a memory file, for a successor if this process dies.
//!
//! The first page has a word that marks the table as valid, and the number of slots that were ever in use. The slots follow,
//! one per mapping:
//!
//! | word | content |
//! |---|---|
//! | 0 | state |
//! | 1, 2 | IOVA, length in bytes |
//! | 3 | 1 if the device may write, 2 if the memory has a place in a file |
//! | 4, 5, 6 | device and inode of the file, offset in the file |
//! | 7 | owner |
//!
//! A slot is free at first. Its state becomes `MAPPING` before the mapping is requested, `MAPPED` once it is made,
//! `UNMAPPING` before the unmapping is requested, and `FREE` once it is unmapped. The other words are written while the
//! slot is free. So a process may be killed between any two stores: the mapping of a `MAPPED` slot exists, that of a
//! `MAPPING` or `UNMAPPING` slot may exist, and no other mapping exists.
//!
//! A process writes only to its own table. It reads the table of the predecessor as untrusted data.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use nvme_mpt_memory::{MappedWord64, Mapping, MappingAccess, host_page_size, sealed_memfd};

use super::mapping::{IommuMapping, MappedFile, MappingOwner};

/// First word of a valid table.
const MAGIC: u64 = u64::from_le_bytes(*b"nvmpmap\x01");

const MAGIC_OFFSET: usize = 0;
const USED_OFFSET: usize = 64;
const SLOTS_OFFSET: usize = 4096;

const SLOT_BYTES: usize = 64;
const SLOT_WORDS: usize = SLOT_BYTES / 8;

const FREE: u64 = 0;
const MAPPING: u64 = 1;
const MAPPED: u64 = 2;
const UNMAPPING: u64 = 3;

const WRITABLE: u64 = 1;
const HAS_FILE: u64 = 2;

/// Number of slots of a table (one for each mapping) if the IOMMU reports no limit: the default limit of VFIO mappings.
const SLOTS_DEFAULT: usize = 65_536;

/// Maximum number of slots of a table, one for each mapping.
const SLOTS_MAX: usize = 1 << 20;

/// Mappings left by a process that died.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecordedMappings {
    /// Mappings that certainly exist.
    pub(super) mapped: Vec<IommuMapping>,
    /// Address ranges in which a mapping may exist: the process died while it made or removed one there.
    pub(super) uncertain: Vec<Range<u64>>,
}

fn invalid_data(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

impl RecordedMappings {
    /// Reads the table of another process.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidData`] if the table is invalid or damaged; otherwise the kernel's error.
    pub fn read(table: OwnedFd) -> io::Result<Self> {
        let file = File::from(table);
        let mut head = [0; SLOTS_OFFSET];
        file.read_exact_at(&mut head, 0)
            .map_err(|_| invalid_data("the table of mappings is cut short"))?;
        let word = |bytes: &[u8], at: usize| {
            let word = bytes.get(at..).and_then(<[u8]>::first_chunk);
            word.map_or(0, |word| u64::from_le_bytes(*word))
        };
        if word(&head, MAGIC_OFFSET) != MAGIC {
            return Err(invalid_data("the table of mappings does not hold"));
        }
        let used = usize::try_from(word(&head, USED_OFFSET)).ok();
        let used = used.filter(|used| *used <= SLOTS_MAX);
        let used = used.ok_or(invalid_data("the table of mappings has too many slots"))?;
        let mut bytes = vec![0; used * SLOT_BYTES];
        file.read_exact_at(&mut bytes, SLOTS_OFFSET as u64)
            .map_err(|_| invalid_data("the table of mappings is cut short"))?;
        let mut left = Self::default();
        for slot in bytes.chunks_exact(SLOT_BYTES) {
            let words: [u64; SLOT_WORDS] = std::array::from_fn(|index| word(slot, 8 * index));
            left.add_slot(words)?;
        }
        left.check_overlaps()?;
        Ok(left)
    }

    fn add_slot(&mut self, words: [u64; SLOT_WORDS]) -> io::Result<()> {
        let [state, iova, len, flags, device, inode, offset, owner] = words;
        let page = host_page_size() as u64;
        if state == FREE {
            return Ok(());
        }
        let end = iova.checked_add(len);
        let is_whole = len > 0 && iova.is_multiple_of(page) && len.is_multiple_of(page);
        let end = end.filter(|_| is_whole && flags & !(WRITABLE | HAS_FILE) == 0);
        let end = end.ok_or(invalid_data("a mapping in the table cannot have been made"))?;
        let file = MappedFile {
            device,
            inode,
            offset,
        };
        match state {
            MAPPED => self.mapped.push(IommuMapping {
                iova,
                len,
                writable: flags & WRITABLE != 0,
                file: (flags & HAS_FILE != 0).then_some(file),
                owner: MappingOwner(owner),
            }),
            MAPPING | UNMAPPING => self.uncertain.push(iova..end),
            _ => return Err(invalid_data("a mapping in the table has an unknown state")),
        }
        Ok(())
    }

    /// Checks that mappings do not overlap.
    fn check_overlaps(&self) -> io::Result<()> {
        let mapped_ranges = self.mapped.iter();
        let mapped_ranges = mapped_ranges.map(|mapping| mapping.iova..mapping.iova + mapping.len);
        let mut all: Vec<_> = mapped_ranges
            .chain(self.uncertain.iter().cloned())
            .collect();
        all.sort_by_key(|range| range.start);
        let are_apart = all.is_sorted_by(|before, after| before.end <= after.start);
        are_apart
            .then_some(())
            .ok_or(invalid_data("mappings in the table overlap"))
    }

    /// Returns the mappings that certainly exist.
    #[must_use]
    pub fn mapped(&self) -> &[IommuMapping] {
        &self.mapped
    }
}

/// Table in which this process records its mappings, for a successor.
#[derive(Debug)]
pub(super) struct MappingTable {
    memory: Arc<Mapping>,
    /// Slot of each mapping, by the mapping's first address.
    slot_by_iova: BTreeMap<u64, usize>,
    /// Slots that are free again after use.
    free: Vec<usize>,
    used: usize,
    slots: usize,
}

impl MappingTable {
    /// Creates a table of the existing `mappings`, and its file. `most` is the maximum number of mappings of the IOMMU.
    pub(super) fn new<'a>(
        most: Option<u64>,
        mappings: impl Iterator<Item = &'a IommuMapping>,
    ) -> io::Result<(Self, OwnedFd)> {
        let slots = most.and_then(|most| usize::try_from(most).ok());
        let slots = slots.unwrap_or(SLOTS_DEFAULT).clamp(1, SLOTS_MAX);
        let len = SLOTS_OFFSET + slots * SLOT_BYTES;
        let file = sealed_memfd(c"nvme-mpt-mappings", len as u64)?;
        let memory = Mapping::shared(file.as_fd(), 0, len, MappingAccess::ReadWrite)?;
        let mut table = Self {
            memory: Arc::new(memory),
            slot_by_iova: BTreeMap::new(),
            free: Vec::new(),
            used: 0,
            slots,
        };
        table.store(MAGIC_OFFSET, MAGIC);
        for mapping in mappings {
            table.begin_mapping(mapping);
            table.finish_mapping(mapping.iova);
        }
        Ok((table, file))
    }

    /// Records that a mapping is about to be made. Called before the request to the IOMMU.
    pub(super) fn begin_mapping(&mut self, mapping: &IommuMapping) {
        if self.slot_by_iova.contains_key(&mapping.iova) {
            log::error!(
                "IOVA {:#x} is mapped twice in the record of a drive's mappings: after a death of this process, all memory is \
                 pinned again",
                mapping.iova
            );
            self.invalidate();
            return;
        }
        let Some(slot) = self.take_slot() else {
            log::warn!(
                "A drive has more than {} mappings at a time: after a death of this process, all memory is pinned again",
                self.slots
            );
            self.invalidate();
            return;
        };
        let IommuMapping {
            iova,
            len,
            writable,
            file,
            owner,
        } = *mapping;
        let flags = u64::from(writable) * WRITABLE + u64::from(file.is_some()) * HAS_FILE;
        let [device, inode, offset] =
            file.map_or([0; 3], |file| [file.device, file.inode, file.offset]);
        let at = SLOTS_OFFSET + slot * SLOT_BYTES;
        for (index, word) in (1..).zip([iova, len, flags, device, inode, offset, owner.0]) {
            self.store(at + 8 * index, word);
        }
        self.store(at, MAPPING);
        self.slot_by_iova.insert(iova, slot);
    }

    /// Records that a mapping was made.
    pub(super) fn finish_mapping(&self, iova: u64) {
        self.set_state(iova, MAPPED);
    }

    /// Records that a mapping is about to be unmapped. Called before the request to the IOMMU.
    pub(super) fn begin_unmapping(&self, iova: u64) {
        self.set_state(iova, UNMAPPING);
    }

    /// Records that a mapping was unmapped, or could not be made.
    pub(super) fn remove(&mut self, iova: u64) {
        self.set_state(iova, FREE);
        self.free.extend(self.slot_by_iova.remove(&iova));
    }

    /// Marks the table as invalid, so that a successor does not use it.
    pub(super) fn invalidate(&self) {
        self.store(MAGIC_OFFSET, 0);
    }

    fn take_slot(&mut self) -> Option<usize> {
        if let Some(slot) = self.free.pop() {
            return Some(slot);
        }
        let slot = self.used;
        if slot == self.slots {
            return None;
        }
        self.used += 1;
        self.store(USED_OFFSET, self.used as u64);
        Some(slot)
    }

    fn set_state(&self, iova: u64, state: u64) {
        if let Some(slot) = self.slot_by_iova.get(&iova) {
            self.store(SLOTS_OFFSET + slot * SLOT_BYTES, state);
        }
    }

    fn store(&self, at: usize, word: u64) {
        if let Some(cell) = MappedWord64::new(&self.memory, at) {
            cell.store(word);
        }
        #[cfg(test)]
        kill_points::run_hook();
    }
}

/// Points at which a process may be killed.
#[cfg(test)]
pub(super) mod kill_points {
    use std::cell::RefCell;

    type CutHook = Box<dyn FnMut()>;

    thread_local! {
        static LOOK: RefCell<Option<CutHook>> = const { RefCell::new(None) };
    }

    /// Sets the function that this thread calls at each point at which a test simulates a kill.
    pub(crate) fn set_hook(hook: Option<CutHook>) {
        LOOK.set(hook);
    }

    /// Calls the function that a test has set. Called after each store to a table and each change of the IOMMU.
    pub(crate) fn run_hook() {
        LOOK.with_borrow_mut(|hook| {
            if let Some(hook) = hook {
                hook();
            }
        });
    }
}
