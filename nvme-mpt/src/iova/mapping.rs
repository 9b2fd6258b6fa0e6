//! One mapping of an IOMMU, by the place of its memory in a file.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::memory::{Access, FilePlace, Mapping};

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
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
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

    pub(super) fn end(&self) -> u64 {
        self.iova + self.len
    }

    /// Returns its memory; `None` if that ends with its process.
    pub(super) fn memory(&self) -> Option<Memory> {
        Some((self.file?, self.len, self.writable))
    }

    /// Returns whether both are of one file, at the same distance from it.
    pub(super) fn goes_with(&self, other: &Self) -> bool {
        let distance = |mapping: &Self| {
            let file = mapping.file?;
            let distance = mapping.iova.wrapping_sub(file.offset);
            Some((file.device, file.inode, mapping.writable, distance))
        };
        distance(self).is_some_and(|own| distance(other) == Some(own))
    }
}

/// Memory that a device can reach: its place in a file, its bytes, and whether the device may write it.
pub(super) type Memory = (MappedFile, u64, bool);
