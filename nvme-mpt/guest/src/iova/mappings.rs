//! Mappings of an IOMMU, and their hand-over from one process to the next.
//!
//! An IOMMU's mappings belong to its descriptors, not to a process: they stay after the process ends, as long as another
//! process has the descriptors. So the successor finds a VM's memory mapped, identifies it by its file, and pins nothing
//! again.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;

use nvme_mpt_memory::MappedWord64;

use super::mapping::{IommuMapping, MappedFile, MappedMemoryKey, MappingOwner};
use super::mapping_table::MappingTable;

/// Word in a file shared with another process. It tells that process that its list of mappings is outdated.
#[derive(Debug)]
pub struct StaleMappingsFlag(MappedWord64);

impl StaleMappingsFlag {
    /// Wraps the word, which is 0 until a change.
    #[must_use]
    pub fn new(word: MappedWord64) -> Self {
        Self(word)
    }

    /// Marks the list as outdated.
    pub fn set(&self) {
        self.0.store(1);
    }
}

/// Mappings of an IOMMU, by first address: those of this process, and those inherited from the predecessor.
#[derive(Debug, Default)]
pub(super) struct IommuMappings {
    current: BTreeMap<u64, IommuMapping>,
    inherited: BTreeMap<u64, InheritedMapping>,
    /// First addresses of inherited mappings, by owner.
    by_owner: BTreeMap<MappingOwner, BTreeSet<u64>>,
    /// Mappings of the predecessor that are about to be unmapped, because no memory can take them over any more.
    unmapping: BTreeMap<u64, IommuMapping>,
    /// First addresses of inherited mappings, by the identity of their memory. Mappings in an allocated IOVA range are not
    /// listed.
    by_memory: BTreeMap<MappedMemoryKey, BTreeSet<u64>>,
    /// Flag that each change sets, once another process has a list of the mappings.
    stale_flag: Option<StaleMappingsFlag>,
    /// Table in which a successor finds all mappings, if this process dies.
    table: Option<MappingTable>,
}

/// Mapping of the predecessor that no memory has taken over yet.
#[derive(Debug)]
struct InheritedMapping {
    mapping: IommuMapping,
    /// True if the mapping's addresses lie in an allocated IOVA range, so that only memory in that range can take it over.
    is_in_range: bool,
}

impl IommuMappings {
    /// Adds the mappings of the predecessor.
    pub(super) fn inherit(&mut self, mappings: Vec<IommuMapping>) {
        for mapping in mappings {
            let inherited = InheritedMapping {
                mapping,
                is_in_range: false,
            };
            self.inherited.insert(mapping.iova, inherited);
            let owned = self.by_owner.entry(mapping.owner).or_default();
            owned.insert(mapping.iova);
            if let Some(memory) = mapping.memory_key() {
                let places = self.by_memory.entry(memory).or_default();
                places.insert(mapping.iova);
            }
        }
    }

    /// Removes a mapping from [`Self::by_memory`].
    fn remove_from_index(&mut self, mapping: &IommuMapping) {
        let Some(memory) = mapping.memory_key() else {
            return;
        };
        if let Some(places) = self.by_memory.get_mut(&memory) {
            places.remove(&mapping.iova);
            if places.is_empty() {
                self.by_memory.remove(&memory);
            }
        }
    }

    /// Returns all mappings that are not about to be unmapped: those of this process, and those of the predecessor that a VM's
    /// memory may still take over.
    fn all(&self) -> impl Iterator<Item = &IommuMapping> {
        let inherited = self.inherited.values().map(|entry| &entry.mapping);
        self.current.values().chain(inherited)
    }

    /// Returns whether there are mappings of the predecessor that no memory has taken over yet.
    pub(super) fn has_inherited(&self) -> bool {
        !self.inherited.is_empty()
    }

    /// Returns whether the IOMMU has mappings that are about to be unmapped.
    pub(super) fn has_unmapping(&self) -> bool {
        !self.unmapping.is_empty()
    }

    /// Returns all mappings, for another process. `outdated` is set at each later change.
    pub(super) fn list_with_flag(&mut self, outdated: StaleMappingsFlag) -> Vec<IommuMapping> {
        self.stale_flag = Some(outdated);
        self.all().copied().collect()
    }

    /// Starts to record all mappings in a table for a successor. Returns the table's file.
    pub(super) fn start_record(&mut self, most: Option<u64>) -> io::Result<OwnedFd> {
        let all = self.all().chain(self.unmapping.values());
        let (table, file) = MappingTable::new(most, all)?;
        for iova in self.unmapping.keys() {
            table.begin_unmapping(*iova);
        }
        self.table = Some(table);
        Ok(file)
    }

    /// Ends the recording in a table, and marks the table as invalid.
    pub(super) fn end_record(&mut self) {
        if let Some(table) = self.table.take() {
            table.invalidate();
        }
    }

    /// Marks the list that another process has as outdated. Called before and after each change.
    fn mark_stale(&self) {
        if let Some(outdated) = &self.stale_flag {
            outdated.set();
        }
    }

    /// Records that a mapping is about to be made. Called before the request to the IOMMU.
    pub(super) fn begin_mapping(&mut self, mapping: &IommuMapping) {
        self.mark_stale();
        if let Some(table) = &mut self.table {
            table.begin_mapping(mapping);
        }
    }

    /// Records that a mapping which [began](Self::begin_mapping) was made.
    pub(super) fn finish_mapping(&mut self, mapping: IommuMapping) {
        self.mark_stale();
        if let Some(table) = &self.table {
            table.finish_mapping(mapping.iova);
        }
        self.current.insert(mapping.iova, mapping);
    }

    /// Records that a mapping which [began](Self::begin_mapping) was made in part, and that the part cannot be unmapped. No
    /// memory can take it over, so a successor unmaps it.
    pub(super) fn keep_stuck(&mut self, mapping: IommuMapping) {
        self.mark_stale();
        let mapping = IommuMapping {
            file: None,
            ..mapping
        };
        self.current.insert(mapping.iova, mapping);
    }

    /// Records that a mapping is about to be unmapped. Called before the request to the IOMMU.
    pub(super) fn begin_unmapping(&self, iova: u64) {
        self.mark_stale();
        if let Some(table) = &self.table {
            table.begin_unmapping(iova);
        }
    }

    /// Records that a mapping could not be unmapped, or not as a whole. No memory can take it over, so a successor unmaps it.
    pub(super) fn keep_unmappable(&mut self, iova: u64) {
        self.mark_stale();
        if let Some(mapping) = self.current.get_mut(&iova) {
            mapping.file = None;
        }
    }

    /// Records that a mapping was unmapped, or could not be made.
    pub(super) fn remove(&mut self, iova: u64) {
        self.mark_stale();
        self.current.remove(&iova);
        self.unmapping.remove(&iova);
        if let Some(table) = &mut self.table {
            table.remove(iova);
        }
    }

    /// Returns whether the predecessor left exactly this memory mapped, at addresses outside of all allocated IOVA ranges.
    pub(super) fn has_memory(&self, owner: MappingOwner, file: MappedFile, len: u64) -> bool {
        let mut accesses = [true, false].into_iter();
        accesses.any(|writable| self.by_memory.contains_key(&(owner, file, len, writable)))
    }

    /// Returns the first address at which the predecessor left this memory mapped, outside of all allocated IOVA ranges.
    pub(super) fn find_iova(&self, wanted: &IommuMapping) -> Option<u64> {
        let places = self.by_memory.get(&wanted.memory_key()?)?;
        places.first().copied()
    }

    /// Returns the first addresses of all inherited mappings in `range`, if one IOVA range can take over all of them. For that,
    /// one mapping starts at the range's start; all have its owner, its file and its distance between IOVA and file offset; and
    /// none crosses an end of the range.
    pub(super) fn inherited_within(&self, range: &Range<u64>) -> Option<Vec<u64>> {
        let first = &self.inherited.get(&range.start)?.mapping;
        let before = self.inherited.range(..range.start).next_back();
        if before.is_some_and(|(_, before)| before.mapping.end() > range.start) {
            return None;
        }
        let all = self.inherited.range(range.clone());
        all.map(|(iova, entry)| {
            let fits = entry.mapping.end() <= range.end
                && !entry.is_in_range
                && entry.mapping.has_same_layout(first);
            fits.then_some(*iova)
        })
        .collect()
    }

    /// Notes that the addresses of an inherited mapping now lie in an allocated IOVA range.
    pub(super) fn assign_to_range(&mut self, iova: u64) {
        if let Some(entry) = self.inherited.get_mut(&iova) {
            entry.is_in_range = true;
            let mapping = entry.mapping;
            self.remove_from_index(&mapping);
        }
    }

    /// Returns whether the predecessor left this mapping and no memory has taken it over yet.
    pub(super) fn is_inherited(&self, wanted: &IommuMapping) -> bool {
        let entry = self.inherited.get(&wanted.iova);
        entry.is_some_and(|entry| entry.mapping == *wanted && wanted.file.is_some())
    }

    /// Takes over a mapping that the predecessor left. Returns whether there is such a mapping.
    pub(super) fn adopt(&mut self, wanted: &IommuMapping) -> bool {
        let is_it = self.is_inherited(wanted);
        if is_it {
            self.remove_inherited(wanted.iova);
            self.mark_stale();
            self.current.insert(wanted.iova, *wanted);
        }
        is_it
    }

    fn remove_inherited(&mut self, iova: u64) -> Option<InheritedMapping> {
        let entry = self.inherited.remove(&iova)?;
        let owner = entry.mapping.owner;
        if let Some(owned) = self.by_owner.get_mut(&owner) {
            owned.remove(&iova);
            if owned.is_empty() {
                self.by_owner.remove(&owner);
            }
        }
        self.remove_from_index(&entry.mapping);
        Some(entry)
    }

    /// Removes and returns the inherited mappings that lie outside of allocated IOVA ranges and that no memory has taken over.
    /// The caller unmaps them.
    pub(super) fn take_unassigned(&mut self) -> Vec<(IommuMapping, bool)> {
        let free = self
            .inherited
            .iter()
            .filter(|(_, entry)| !entry.is_in_range);
        self.take_iovas(free.map(|(iova, _)| *iova).collect())
    }

    /// Removes and returns an owner's inherited mappings that overlap these bytes of a file and that no memory has taken over.
    /// The caller unmaps them.
    pub(super) fn take_overlapping(
        &mut self,
        owner: MappingOwner,
        file: MappedFile,
        len: u64,
    ) -> Vec<(IommuMapping, bool)> {
        let owned = self.by_owner.get(&owner).into_iter().flatten();
        let entries = owned.filter_map(|iova| self.inherited.get(iova));
        let of_file = entries.filter(|entry| entry.mapping.overlaps(file, len));
        self.take_iovas(of_file.map(|entry| entry.mapping.iova).collect())
    }

    /// Removes and returns the inherited mappings in a range of addresses that no memory has taken over. The caller unmaps
    /// them. The flag of each mapping is true if its addresses lie in an allocated IOVA range.
    pub(super) fn take_inherited(&mut self, range: Range<u64>) -> Vec<(IommuMapping, bool)> {
        // A mapping that starts before the range may reach into it.
        let before = self.inherited.range(..range.start).next_back();
        let before = before.filter(|(_, entry)| entry.mapping.end() > range.start);
        let first = before.map(|(iova, _)| *iova);
        let within = self.inherited.range(range).map(|(iova, _)| *iova);
        self.take_iovas(first.into_iter().chain(within).collect())
    }

    fn take_iovas(&mut self, iovas: Vec<u64>) -> Vec<(IommuMapping, bool)> {
        let mut taken = Vec::with_capacity(iovas.len());
        for iova in iovas {
            if let Some(entry) = self.remove_inherited(iova) {
                self.unmapping.insert(iova, entry.mapping);
                self.begin_unmapping(iova);
                taken.push((entry.mapping, entry.is_in_range));
            }
        }
        taken
    }
}
