//! Errors of a VM's memory.

use serde::{Deserialize, Serialize};
use std::io;

use super::{MAX_FILE_BYTES, MAX_FILES, MAX_REGIONS};
use crate::address::Gpa;
use crate::serde_forms;

/// Error of an operation on a VM's memory.
#[derive(Debug, thiserror::Error, Serialize, Deserialize)]
pub enum DmaError {
    /// The range is empty, wraps around, or is not aligned to host pages.
    #[error("Region {gpa}+{len:#x} is empty, wraps around, or is not aligned")]
    InvalidRegion {
        /// Start of the range.
        gpa: Gpa,
        /// Length of the range in bytes.
        len: u64,
    },
    /// The region overlaps a mapped one.
    #[error("Region {gpa}+{len:#x} overlaps one that is mapped")]
    Overlap {
        /// Start of the region.
        gpa: Gpa,
        /// Length of the region in bytes.
        len: u64,
    },
    /// The VM has the maximum number of regions.
    #[error("No more than {MAX_REGIONS} regions of memory can be mapped")]
    TooManyRegions,
    /// The VM's memory is in the maximum number of files.
    #[error("Memory in no more than {MAX_FILES} files can be mapped")]
    TooManyFiles,
    /// The VM has used its share of the mappings of a physical drive's IOMMU.
    #[error(
        "The memory of function {function} has {taken} of the {max} mappings that the drive takes for all VMs, and \
         can have no more while {left} are left; use fewer and larger regions, or move its disk to another drive"
    )]
    TooManyMappings {
        /// Name of the function.
        function: String,
        /// Number of mappings that the VM's memory has in the drive's IOMMU.
        taken: u64,
        /// Number of mappings that are left for all VMs together.
        left: u64,
        /// Maximum number of mappings of the drive.
        max: u64,
    },
    /// The files of one VM would take more of this process's address space than allowed.
    #[error(
        "The memory of region {gpa}+{len:#x} does not fit: of the {MAX_FILE_BYTES:#x} bytes of address space that \
         the files of one VM may take, {left:#x} are left; unmap others first, or map less of it"
    )]
    FilesTooLarge {
        /// Start of the region.
        gpa: Gpa,
        /// Length of the region in bytes.
        len: u64,
        /// Bytes of address space that are left for files of the VM.
        left: u64,
    },
    /// A range to unmap cuts through a region.
    #[error("Range {gpa}+{len:#x} cuts a mapped region in two; unmap whole regions")]
    PartialUnmap {
        /// Start of the range.
        gpa: Gpa,
        /// Length of the range in bytes.
        len: u64,
    },
    /// No memory is mapped there, or the access is not allowed.
    #[error("No memory of the VM is mapped at {gpa}+{len:#x}, or not for this access")]
    NotMapped {
        /// Start of the range.
        gpa: Gpa,
        /// Length of the range in bytes.
        len: u64,
    },
    /// The host controller's IOVA space is exhausted.
    #[error("No {len:#x} bytes are left in the host controller's IOVA space")]
    NoIova {
        /// Bytes requested.
        len: u64,
    },
    /// The IOMMU refused the region.
    #[error("The memory of region {gpa}+{len:#x} cannot be mapped for the drive")]
    Iommu {
        /// Start of the region.
        gpa: Gpa,
        /// Length of the region in bytes.
        len: u64,
        /// Error of the IOMMU.
        #[serde(with = "serde_forms::io_error")]
        source: io::Error,
    },
    /// A page fault in the region's file may wait for a file system or another process, and block a poller.
    #[error(
        "Region {gpa}+{len:#x} is in a file of {file_system}, which may let page faults wait: give the VM \
         memory in a memfd, in /dev/shm or in hugetlbfs, or its function memory=any with poll=dedicated"
    )]
    MayWait {
        /// Start of the region.
        gpa: Gpa,
        /// Length of the region in bytes.
        len: u64,
        /// Type of the file system, as named by mount(8).
        file_system: String,
    },
    /// The region's file cannot be mapped.
    #[error("The memory of region {gpa}+{len:#x} cannot be mapped into this process")]
    Map {
        /// Start of the region.
        gpa: Gpa,
        /// Length of the region in bytes.
        len: u64,
        /// Error of the kernel.
        #[serde(with = "serde_forms::io_error")]
        source: io::Error,
    },
    /// The memory is incomplete: the process that provides it would fill missing pages on a page fault, but through this
    /// process's mapping they would read as zeros.
    #[error(
        "The memory of region {gpa}+{len:#x} is restored on demand (userfaultfd), and pages that are not there yet would \
         read as zeros: map it once it is complete, restore with all memory copied first, or give a function in the \
         VMM's process the VMM's own mapping"
    )]
    Incomplete {
        /// Start of the region.
        gpa: Gpa,
        /// Length of the region in bytes.
        len: u64,
    },
    /// This process cannot read its own mappings, so it cannot tell whether the memory is complete.
    #[error(
        "Whether the memory of region {gpa}+{len:#x} is restored on demand (userfaultfd) cannot be read from \
         /proc/self/smaps: allow that, or give the function the VMM's own mapping"
    )]
    UnknownFaults {
        /// Start of the region.
        gpa: Gpa,
        /// Length of the region in bytes.
        len: u64,
        /// Error of the kernel.
        #[serde(with = "serde_forms::io_error")]
        source: io::Error,
    },
    /// The region has no file, and the back end maps guest memory by its file.
    #[error(
        "Region {gpa}+{len:#x} has no file, by which a drive's server could map it: give the VM shared memory in a memfd, in \
         /dev/shm or in hugetlbfs, or open the drive in the VMM's process"
    )]
    NoFile {
        /// Start of the region.
        gpa: Gpa,
        /// Length of the region in bytes.
        len: u64,
    },
    /// The dirty log is not started.
    #[error("Written pages are not tracked; start the dirty log first")]
    NotLogged,
    /// In-flight commands did not finish in time. The memory stays mapped.
    #[error("Commands in flight still use {gpa}+{len:#x} after their timeout")]
    Busy {
        /// Start of the range.
        gpa: Gpa,
        /// Length of the range in bytes.
        len: u64,
    },
}

impl DmaError {
    /// Returns whether the memory cannot be mapped because other functions hold the drive's IOVAs or IOMMU mappings. A
    /// retry may succeed once they have released some.
    #[must_use]
    pub fn lacks_iommu_resources(&self) -> bool {
        match self {
            Self::NoIova { .. } | Self::TooManyMappings { .. } => true,
            Self::Iommu { source, .. } => source.kind() == io::ErrorKind::StorageFull,
            _ => false,
        }
    }
}
