//! Mappings of an IOMMU, as one process leaves them to the next.
//!
//! An IOMMU belongs to its descriptors, not to a process: what a process has mapped stays mapped after its end, as long
//! as another one has the descriptors. So the next process finds the memory of a VM where the drive has it, and pins
//! nothing again. It knows the memory by its file.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;

use super::mapping::{IommuMapping, MappedFile, MappingOwner, Memory};
use super::table::MappingTable;
use crate::memory::Cell64;

/// Word in a shared file, by which another process learns that what it was told of mappings is true no more.
#[derive(Debug)]
pub struct Outdated(Cell64);

impl Outdated {
    /// The word, which is 0 until something changes.
    #[must_use]
    pub fn new(word: Cell64) -> Self {
        Self(word)
    }

    /// Says that something changes.
    pub fn set(&self) {
        self.0.store(1);
    }
}

/// Mappings of an IOMMU by their first address.
#[derive(Debug, Default)]
pub(super) struct Mappings {
    present: BTreeMap<u64, IommuMapping>,
    inherited: BTreeMap<u64, Inherited>,
    /// First addresses of those inherited, by their owner.
    by_owner: BTreeMap<MappingOwner, BTreeSet<u64>>,
    /// Those of the process before that nobody can find any more, until the IOMMU has lost them.
    leaving: BTreeMap<u64, IommuMapping>,
    /// First addresses of those inherited that lie in no range that somebody has, by their memory.
    by_memory: BTreeMap<Memory, BTreeSet<u64>>,
    /// Told of each change.
    outdated: Option<Outdated>,
    /// Has all of them, for the process after a death of this one.
    table: Option<MappingTable>,
}

/// A mapping of the process before that nobody has found yet.
#[derive(Debug)]
struct Inherited {
    mapping: IommuMapping,
    /// True once its addresses lie in a range that somebody has.
    is_in_range: bool,
}

impl Mappings {
    /// Takes up the mappings of the process before.
    pub(super) fn inherit(&mut self, mappings: Vec<IommuMapping>) {
        for mapping in mappings {
            let inherited = Inherited {
                mapping,
                is_in_range: false,
            };
            self.inherited.insert(mapping.iova, inherited);
            let owned = self.by_owner.entry(mapping.owner).or_default();
            owned.insert(mapping.iova);
            if let Some(memory) = mapping.memory() {
                let places = self.by_memory.entry(memory).or_default();
                places.insert(mapping.iova);
            }
        }
    }

    /// Takes a mapping out of [`Self::by_memory`].
    fn unlist(&mut self, mapping: &IommuMapping) {
        let Some(memory) = mapping.memory() else {
            return;
        };
        if let Some(places) = self.by_memory.get_mut(&memory) {
            places.remove(&mapping.iova);
            if places.is_empty() {
                self.by_memory.remove(&memory);
            }
        }
    }

    /// All that somebody has or may find.
    fn all(&self) -> impl Iterator<Item = &IommuMapping> {
        let inherited = self.inherited.values().map(|entry| &entry.mapping);
        self.present.values().chain(inherited)
    }

    /// Returns whether some of the process before are not found yet.
    pub(super) fn has_inherited(&self) -> bool {
        !self.inherited.is_empty()
    }

    /// Returns whether the IOMMU has mappings that are about to go.
    pub(super) fn are_leaving(&self) -> bool {
        !self.leaving.is_empty()
    }

    /// Returns all that the IOMMU has, and has `outdated` told of each change from now on.
    pub(super) fn tell(&mut self, outdated: Outdated) -> Vec<IommuMapping> {
        self.outdated = Some(outdated);
        self.all().copied().collect()
    }

    /// Has a table of all of them written from now on. Returns its file.
    pub(super) fn record(&mut self, most: Option<u64>) -> io::Result<OwnedFd> {
        let all = self.all().chain(self.leaving.values());
        let (table, file) = MappingTable::new(most, all)?;
        for iova in self.leaving.keys() {
            table.leave(*iova);
        }
        self.table = Some(table);
        Ok(file)
    }

    /// Ends [`Self::record`]: the table holds no more.
    pub(super) fn end_record(&mut self) {
        if let Some(table) = self.table.take() {
            table.end();
        }
    }

    /// Notes that a change begins or was made.
    fn change(&self) {
        if let Some(outdated) = &self.outdated {
            outdated.set();
        }
    }

    /// Notes that the IOMMU is about to be asked for a mapping.
    pub(super) fn begin(&mut self, mapping: &IommuMapping) {
        self.change();
        if let Some(table) = &mut self.table {
            table.begin(mapping);
        }
    }

    /// Notes that the IOMMU has a mapping which [began](Self::begin).
    pub(super) fn add(&mut self, mapping: IommuMapping) {
        self.change();
        if let Some(table) = &self.table {
            table.settle(mapping.iova);
        }
        self.present.insert(mapping.iova, mapping);
    }

    /// Notes that the IOMMU is about to be asked to take a mapping away.
    pub(super) fn leave(&self, iova: u64) {
        self.change();
        if let Some(table) = &self.table {
            table.leave(iova);
        }
    }

    /// Notes that the IOMMU has no such mapping: it was taken away, or not made.
    pub(super) fn remove(&mut self, iova: u64) {
        self.change();
        self.present.remove(&iova);
        self.leaving.remove(&iova);
        if let Some(table) = &mut self.table {
            table.remove(iova);
        }
    }

    /// Returns whether the process before had just this memory mapped, and nobody has its addresses.
    pub(super) fn has(&self, owner: MappingOwner, file: MappedFile, len: u64) -> bool {
        let mut accesses = [true, false].into_iter();
        accesses.any(|writable| self.by_memory.contains_key(&(owner, file, len, writable)))
    }

    /// Returns the address at which the process before had this memory.
    pub(super) fn place_of(&self, wanted: &IommuMapping) -> Option<u64> {
        let places = self.by_memory.get(&wanted.memory()?)?;
        places.first().copied()
    }

    /// Returns the first addresses of all that lie in a range, if each goes with the one at its start.
    pub(super) fn within(&self, range: &Range<u64>) -> Option<Vec<u64>> {
        let first = &self.inherited.get(&range.start)?.mapping;
        let before = self.inherited.range(..range.start).next_back();
        if before.is_some_and(|(_, before)| before.mapping.end() > range.start) {
            return None;
        }
        let all = self.inherited.range(range.clone());
        all.map(|(iova, entry)| {
            let fits = entry.mapping.end() <= range.end
                && !entry.is_in_range
                && entry.mapping.goes_with(first);
            fits.then_some(*iova)
        })
        .collect()
    }

    /// Notes that the addresses of a mapping lie in a range that somebody has.
    pub(super) fn give_to_range(&mut self, iova: u64) {
        if let Some(entry) = self.inherited.get_mut(&iova) {
            entry.is_in_range = true;
            let mapping = entry.mapping;
            self.unlist(&mapping);
        }
    }

    /// Returns whether a mapping is there already, and nobody has found it.
    pub(super) fn is_inherited(&self, wanted: &IommuMapping) -> bool {
        let entry = self.inherited.get(&wanted.iova);
        entry.is_some_and(|entry| entry.mapping == *wanted && wanted.file.is_some())
    }

    /// Takes over a mapping that is there already. Returns whether it is.
    pub(super) fn find(&mut self, wanted: &IommuMapping) -> bool {
        let is_it = self.is_inherited(wanted);
        if is_it {
            self.remove_inherited(wanted.iova);
            self.change();
            self.present.insert(wanted.iova, *wanted);
        }
        is_it
    }

    fn remove_inherited(&mut self, iova: u64) -> Option<Inherited> {
        let entry = self.inherited.remove(&iova)?;
        let owner = entry.mapping.owner;
        if let Some(owned) = self.by_owner.get_mut(&owner) {
            owned.remove(&iova);
            if owned.is_empty() {
                self.by_owner.remove(&owner);
            }
        }
        self.unlist(&entry.mapping);
        Some(entry)
    }

    /// Takes out those that nobody has found and whose addresses are in no range that somebody has: they are about to go.
    pub(super) fn take_all_free(&mut self) -> Vec<(IommuMapping, bool)> {
        let free = self
            .inherited
            .iter()
            .filter(|(_, entry)| !entry.is_in_range);
        self.take(free.map(|(iova, _)| *iova).collect())
    }

    /// Takes out those that nobody has found of an owner, with some of the bytes of a file: they are about to go.
    pub(super) fn take_of(
        &mut self,
        owner: MappingOwner,
        file: MappedFile,
        len: u64,
    ) -> Vec<(IommuMapping, bool)> {
        let owned = self.by_owner.get(&owner).into_iter().flatten();
        let entries = owned.filter_map(|iova| self.inherited.get(iova));
        let of_file = entries.filter(|entry| entry.mapping.overlaps(file, len));
        self.take(of_file.map(|entry| entry.mapping.iova).collect())
    }

    /// Takes out those that nobody has found, of a range of addresses: they are about to go. Each comes with whether its
    /// addresses are in a range that somebody has.
    pub(super) fn take_inherited(&mut self, range: Range<u64>) -> Vec<(IommuMapping, bool)> {
        // One that begins before the range may reach into it.
        let before = self.inherited.range(..range.start).next_back();
        let before = before.filter(|(_, entry)| entry.mapping.end() > range.start);
        let first = before.map(|(iova, _)| *iova);
        let within = self.inherited.range(range).map(|(iova, _)| *iova);
        self.take(first.into_iter().chain(within).collect())
    }

    fn take(&mut self, iovas: Vec<u64>) -> Vec<(IommuMapping, bool)> {
        let mut taken = Vec::with_capacity(iovas.len());
        for iova in iovas {
            if let Some(entry) = self.remove_inherited(iova) {
                self.leaving.insert(iova, entry.mapping);
                self.leave(iova);
                taken.push((entry.mapping, entry.is_in_range));
            }
        }
        taken
    }
}
