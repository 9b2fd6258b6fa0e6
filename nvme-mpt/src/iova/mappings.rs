//! Mappings of an IOMMU, as one process leaves them to the next.
//!
//! An IOMMU belongs to its descriptors, not to a process: what a process has mapped stays mapped after its end, as long
//! as another one has the descriptors. So the next process finds the memory of a VM where the drive has it, and pins
//! nothing again. It knows the memory by its file.

use std::collections::BTreeMap;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::memory::{Access, Cell64, FilePlace, Mapping};

/// A mapping of an IOMMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IommuMapping {
    /// First address of the device.
    pub iova: u64,
    /// Bytes.
    pub len: u64,
    /// True if the device may write the memory.
    pub writable: bool,
    /// Place of the memory; `None` for memory that ends with its process.
    pub file: Option<MappedFile>,
}

/// Place of mapped memory in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MappedFile {
    /// Device of the file.
    pub device: u64,
    /// Number of the file on its device.
    pub inode: u64,
    /// Offset in the file, in bytes.
    pub offset: u64,
}

impl IommuMapping {
    pub(super) fn new(iova: u64, memory: &Mapping, part: &Range<usize>, access: Access) -> Self {
        let file = memory.place().map(|place| {
            let FilePlace {
                device,
                inode,
                offset,
            } = place;
            MappedFile {
                device,
                inode,
                offset: offset + part.start as u64,
            }
        });
        Self {
            iova,
            len: part.len() as u64,
            writable: access == Access::ReadWrite,
            file,
        }
    }

    fn end(&self) -> u64 {
        self.iova + self.len
    }

    /// Returns whether both are of one file, at the same distance from it.
    fn goes_with(&self, other: &Self) -> bool {
        let distance = |mapping: &Self| {
            let file = mapping.file?;
            let distance = mapping.iova.wrapping_sub(file.offset);
            Some((file.device, file.inode, mapping.writable, distance))
        };
        distance(self).is_some_and(|own| distance(other) == Some(own))
    }
}

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
    /// Told of each change.
    outdated: Option<Outdated>,
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
        let inherited = mappings.into_iter().map(|mapping| {
            let is_in_range = false;
            let inherited = Inherited {
                mapping,
                is_in_range,
            };
            (mapping.iova, inherited)
        });
        self.inherited.extend(inherited);
    }

    /// Returns all that are present, and has `outdated` told of each change from now on.
    pub(super) fn tell(&mut self, outdated: Outdated) -> Vec<IommuMapping> {
        self.outdated = Some(outdated);
        self.present.values().copied().collect()
    }

    /// Notes that a change begins or was made.
    pub(super) fn change(&self) {
        if let Some(outdated) = &self.outdated {
            outdated.set();
        }
    }

    pub(super) fn add(&mut self, mapping: IommuMapping) {
        self.change();
        self.present.insert(mapping.iova, mapping);
    }

    pub(super) fn remove(&mut self, iova: u64) {
        self.change();
        self.present.remove(&iova);
    }

    /// Returns whether there are mappings of the process before that nobody has found.
    pub(super) fn has_inherited(&self) -> bool {
        !self.inherited.is_empty()
    }

    /// Returns the address at which the process before had this memory.
    pub(super) fn place_of(&self, wanted: &IommuMapping) -> Option<u64> {
        wanted.file?;
        let mut free = self.inherited.values().filter(|entry| !entry.is_in_range);
        let found = free.find(|entry| {
            let iova = entry.mapping.iova;
            entry.mapping == IommuMapping { iova, ..*wanted }
        });
        Some(found?.mapping.iova)
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
        }
    }

    /// Takes over a mapping that is there already. Returns whether it is.
    pub(super) fn find(&mut self, wanted: &IommuMapping) -> bool {
        let is_it = self
            .inherited
            .get(&wanted.iova)
            .is_some_and(|entry| entry.mapping == *wanted && wanted.file.is_some());
        if is_it {
            self.inherited.remove(&wanted.iova);
            self.add(*wanted);
        }
        is_it
    }

    /// Takes out those that nobody has found, of a range or of all addresses. Each comes with whether its addresses are
    /// in a range that somebody has.
    pub(super) fn take_inherited(&mut self, range: Range<u64>) -> Vec<(IommuMapping, bool)> {
        let iovas: Vec<u64> = self.inherited.range(range).map(|(iova, _)| *iova).collect();
        let taken = iovas.iter().filter_map(|iova| self.inherited.remove(iova));
        taken
            .map(|entry| (entry.mapping, entry.is_in_range))
            .collect()
    }
}
