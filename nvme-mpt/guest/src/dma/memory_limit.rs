//! Limits of a function's mapped memory, and the reasons for refusing more.
//!
//! A physical drive's IOMMU pins the memory of all VMs. Each mapping takes page tables (1/500 of its bytes), locked memory
//! and IOVAs, even if the memory is also mapped elsewhere. So memory that is mapped several times counts several times.

use std::fmt;
use std::io;

use nvme_lease::range::ByteSize;
use thiserror::Error;

use super::DmaError;
use crate::adaptive::IommuShareRefusal;
use crate::address::Gpa;
use crate::memory_account::MemoryShortage;

/// Maximum number of bytes that a function may have mapped if an IOMMU pins the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryLimit {
    /// Limit in bytes, set by the operator.
    Configured(u64),
    /// The host's total memory in bytes, if the operator sets no limit.
    Host(u64),
}

impl MemoryLimit {
    /// Returns the limit in bytes.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        match self {
            Self::Configured(bytes) | Self::Host(bytes) => bytes,
        }
    }
}

impl fmt::Display for MemoryLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Configured(bytes) => write!(f, "{} (memory-limit)", ByteSize(*bytes)),
            Self::Host(bytes) => write!(
                f,
                "{}, the memory of the host, as it has no memory-limit=",
                ByteSize(*bytes)
            ),
        }
    }
}

/// Name of a function, and its limit of mapped memory.
#[derive(Clone, Debug)]
pub(super) struct FunctionMemoryLimit {
    pub(super) function: String,
    pub(super) limit: Option<MemoryLimit>,
}

impl Default for FunctionMemoryLimit {
    fn default() -> Self {
        Self {
            function: "(without a name)".to_owned(),
            limit: None,
        }
    }
}

/// Reason for refusing to map more memory of a function.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum MemoryRefusal {
    /// The function would exceed its limit.
    #[error(
        "Function {function} has {} of memory mapped for its drive and asks for {} more; it may have {limit}. Memory counts as \
         often as it is mapped: have the VMM map each part once, or raise memory-limit= of the function, or --memory-limit of the server",
        ByteSize(*.mapped), ByteSize(*.requested)
    )]
    Limit {
        /// Name of the function.
        function: String,
        /// Bytes that the function has mapped.
        mapped: u64,
        /// Bytes requested.
        requested: u64,
        /// Limit that the function would exceed.
        limit: MemoryLimit,
    },
    /// The host or the server's control group has too little free memory for the pages that the region lacks.
    #[error(
        "Function {function} asks for {} of memory of which {} are not there yet. The kernel would take them while the drive's \
         memory is pinned, and {shortage}: give the VM less memory, or have its VMM allocate it at its start (prealloc)",
        ByteSize(*.requested), ByteSize(*.missing)
    )]
    Unavailable {
        /// Name of the function.
        function: String,
        /// Bytes of the region.
        requested: u64,
        /// Bytes of the region that have no pages yet, or that had none in the part which was about to be allocated.
        missing: u64,
        /// Available memory, and the amount that has to stay free.
        shortage: MemoryShortage,
    },
    /// The IOVAs are reserved for other functions.
    #[error(
        "Function {function} has taken {} of the {} of IOVA space that the drive has for all VMs, and gets no {} more while {} \
         are left: have the VMM map each part of its memory once, or move its disk to another drive",
        ByteSize(*.taken), ByteSize(*.max), ByteSize(*.requested), ByteSize(*.left)
    )]
    Iovas {
        /// Name of the function.
        function: String,
        /// Bytes of IOVA space that the function has taken.
        taken: u64,
        /// Bytes requested.
        requested: u64,
        /// Bytes left for all VMs.
        left: u64,
        /// Total bytes of the IOVA space.
        max: u64,
    },
}

impl MemoryRefusal {
    pub(super) fn from_iova_refusal(
        function: &str,
        requested: u64,
        share: IommuShareRefusal,
    ) -> Self {
        let IommuShareRefusal { taken, left, max } = share;
        Self::Iovas {
            function: function.to_owned(),
            taken,
            requested,
            left,
            max,
        }
    }

    /// Returns the error for a region at `gpa` that is refused for this reason. It is an IOMMU error, whose kind
    /// `OutOfMemory` says that a retry may succeed once other functions have
    /// released memory.
    pub(super) fn into_region_error(self, gpa: Gpa, len: u64) -> DmaError {
        let source = io::Error::new(io::ErrorKind::OutOfMemory, self);
        DmaError::Iommu { gpa, len, source }
    }
}
