//! A mapping of an IOMMU, identified by its memory's place in a file.

use std::ops::Range;

use nvme_mpt_memory::{FilePlace, Mapping, MappingAccess};
use serde::{Deserialize, Serialize};
use uuid::{Uuid, uuid};

/// Mapping of an IOMMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IommuMapping {
    /// First IOVA.
    pub iova: u64,
    /// Length in bytes.
    pub len: u64,
    /// True if the device may write the memory.
    pub writable: bool,
    /// Place of the memory in a file; `None` for memory that ends with its process.
    pub file: Option<MappedFile>,
    /// Owner of the memory.
    #[serde(default, skip_serializing_if = "MappingOwner::is_driver")]
    pub owner: MappingOwner,
}

/// Owner of mapped memory: a function or the drive's driver. A successor takes over a mapping only for its owner.
/// Otherwise, a new file that reuses the device and inode numbers of a closed file could get the closed file's pages, which
/// are still pinned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct MappingOwner(pub(super) u64);

impl MappingOwner {
    /// Owner of the driver's memory.
    pub const DRIVER: Self = Self(0);

    /// Namespace of the UUIDs (RFC 9562, version 5) that stand for functions' ids.
    const FUNCTIONS: Uuid = uuid!("8d2f6c1e-3f0a-4b57-9f0b-6b0f4f0c6a51");

    /// Returns the owner for the function whose lease has this id.
    #[must_use]
    pub fn for_function(id: &str) -> Self {
        let (word, _) = Uuid::new_v5(&Self::FUNCTIONS, id.as_bytes()).as_u64_pair();
        Self(word.max(1))
    }

    fn is_driver(&self) -> bool {
        *self == Self::DRIVER
    }
}

/// Place of mapped memory in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MappedFile {
    /// Device number of the file's file system.
    pub device: u64,
    /// Inode number of the file.
    pub inode: u64,
    /// Offset in the file, in bytes.
    pub offset: u64,
}

impl IommuMapping {
    pub(super) fn new(
        iova: u64,
        memory: &Mapping,
        part: &Range<usize>,
        access: MappingAccess,
        owner: MappingOwner,
    ) -> Self {
        let file = memory.file_place().map(|place| {
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
            writable: access == MappingAccess::ReadWrite,
            file,
            owner,
        }
    }

    pub(super) fn end(&self) -> u64 {
        self.iova + self.len
    }

    /// Returns the identity of the mapped memory; `None` for memory that ends with its process.
    pub(super) fn memory_key(&self) -> Option<MappedMemoryKey> {
        Some((self.owner, self.file?, self.len, self.writable))
    }

    /// Returns whether the mapped memory overlaps the `len` bytes at a place in a file. The place and `len` may be untrusted.
    pub(super) fn overlaps(&self, file: MappedFile, len: u64) -> bool {
        self.file.is_some_and(|own| {
            let is_file = (own.device, own.inode) == (file.device, file.inode);
            let begins_before = own.offset < file.offset.saturating_add(len);
            let ends_after = file.offset < own.offset.saturating_add(self.len);
            is_file && begins_before && ends_after
        })
    }

    /// Returns whether both mappings have the same owner, file and rights, and the same distance between IOVA and file offset.
    pub(super) fn has_same_layout(&self, other: &Self) -> bool {
        let distance = |mapping: &Self| {
            let file = mapping.file?;
            let distance = mapping.iova.wrapping_sub(file.offset);
            let file = (file.device, file.inode);
            Some((mapping.owner, file, mapping.writable, distance))
        };
        distance(self).is_some_and(|own| distance(other) == Some(own))
    }
}

/// Identity of mapped memory: owner, place in a file, length in bytes, and whether the device may write.
pub(super) type MappedMemoryKey = (MappingOwner, MappedFile, u64, bool);
