//! Errors of a VM's memory.

use serde::{Deserialize, Serialize};
use std::io;

use super::{MAX_FILE_BYTES, MAX_FILES, MAX_REGIONS};
use crate::address::Gpa;
use crate::crossing;

/// Errors of a VM's memory.
#[derive(Debug, thiserror::Error, Serialize, Deserialize)]
pub enum DmaError {
    /// The range is empty, wraps, or is not aligned to the pages of the host.
    #[error("Region {gpa}+{len:#x} is empty, wraps around, or is not aligned")]
    InvalidRegion {
        /// Start.
        gpa: Gpa,
        /// Its length in bytes.
        len: u64,
    },
    /// Something is mapped there already.
    #[error("Region {gpa}+{len:#x} overlaps one that is mapped")]
    Overlap {
        /// Start.
        gpa: Gpa,
        /// Its length in bytes.
        len: u64,
    },
    /// The VM has as many regions as it may have.
    #[error("No more than {MAX_REGIONS} regions of memory can be mapped")]
    TooManyRegions,
    /// The VM's memory is in as many files as it may be in.
    #[error("Memory in no more than {MAX_FILES} files can be mapped")]
    TooManyFiles,
    /// The VM has as many mappings of a physical drive's IOMMU as it may have.
    #[error(
        "The memory of function {function} has {taken} of the {max} mappings that the drive takes for all VMs, and can have no \
         more while {left} are left; have it in fewer and larger regions, or its disk on another drive"
    )]
    TooManyMappings {
        /// The function; empty from servers of earlier releases.
        #[serde(default)]
        function: String,
        /// Mappings of the VM's memory.
        taken: u64,
        /// Mappings that are left, for all VMs.
        left: u64,
        /// Mappings that the drive takes, in all.
        max: u64,
    },
    /// The VM's files take as much of this process's address space as they may.
    #[error(
        "The memory of region {gpa}+{len:#x} has no room: of the {MAX_FILE_BYTES:#x} bytes of address space \
         that the files of one VM may take, {left:#x} are left; unmap others first, or map less of it"
    )]
    FilesTooLarge {
        /// Start.
        gpa: Gpa,
        /// Its length in bytes.
        len: u64,
        /// Bytes that are left.
        left: u64,
    },
    /// A range to unmap cuts through a region.
    #[error("Range {gpa}+{len:#x} cuts a mapped region in two; unmap whole regions")]
    PartialUnmap {
        /// Start.
        gpa: Gpa,
        /// Its length in bytes.
        len: u64,
    },
    /// No memory is mapped there, or not for this kind of access.
    #[error("No memory of the VM is mapped at {gpa}+{len:#x}, or not for this access")]
    NotMapped {
        /// Start.
        gpa: Gpa,
        /// Its length in bytes.
        len: u64,
    },
    /// The host controller's address space has no room.
    #[error("No {len:#x} bytes are left in the host controller's IOVA space")]
    NoIova {
        /// Bytes that were wanted.
        len: u64,
    },
    /// The IOMMU does not take the region.
    #[error("The memory of region {gpa}+{len:#x} cannot be mapped for the drive")]
    Iommu {
        /// Start.
        gpa: Gpa,
        /// Its length in bytes.
        len: u64,
        /// Kernel's error.
        #[serde(with = "crossing::io_error")]
        source: io::Error,
    },
    /// Page faults in the region's file may wait, and hold up a poller.
    #[error(
        "Region {gpa}+{len:#x} is in a file of {file_system}, which may let page faults wait: give the VM \
         memory in a memfd, in /dev/shm or in hugetlbfs, or its function memory=any with poll=dedicated"
    )]
    MayWait {
        /// Start.
        gpa: Gpa,
        /// Its length in bytes.
        len: u64,
        /// Type of the file system, as mount(8) names it.
        file_system: String,
    },
    /// The region's file cannot be mapped.
    #[error("The memory of region {gpa}+{len:#x} cannot be mapped into this process")]
    Map {
        /// Start.
        gpa: Gpa,
        /// Its length in bytes.
        len: u64,
        /// Kernel's error.
        #[serde(with = "crossing::io_error")]
        source: io::Error,
    },
    /// The memory is incomplete, and a missing page would read as zeros.
    #[error(
        "The memory of region {gpa}+{len:#x} is restored on demand (userfaultfd), and pages that are not there yet would \
         read as zeros: map it once it is complete, restore with all memory copied first, or give a function in the \
         VMM's process the VMM's own mapping"
    )]
    Incomplete {
        /// Start.
        gpa: Gpa,
        /// Its length in bytes.
        len: u64,
    },
    /// This process cannot look at its own mappings.
    #[error(
        "Whether the memory of region {gpa}+{len:#x} is restored on demand (userfaultfd) cannot be read from \
         /proc/self/smaps: allow that, or give the function the VMM's own mapping"
    )]
    UnknownFaults {
        /// Start.
        gpa: Gpa,
        /// Its length in bytes.
        len: u64,
        /// Kernel's error.
        #[serde(with = "crossing::io_error")]
        source: io::Error,
    },
    /// It was not begun.
    #[error("Pages that are written are not noted; start the dirty log first")]
    NotLogged,
    /// Commands in flight did not finish in time; the memory stays mapped.
    #[error("Commands in flight still use {gpa}+{len:#x} after the time that they had")]
    Busy {
        /// Start.
        gpa: Gpa,
        /// Its length in bytes.
        len: u64,
    },
}

impl DmaError {
    /// Returns whether others have what the drive would need for the memory: addresses or mappings of its IOMMU. Once they
    /// have given it back, the memory can be mapped.
    #[must_use]
    pub fn lacks_room(&self) -> bool {
        match self {
            Self::NoIova { .. } | Self::TooManyMappings { .. } => true,
            Self::Iommu { source, .. } => source.kind() == io::ErrorKind::StorageFull,
            _ => false,
        }
    }
}
