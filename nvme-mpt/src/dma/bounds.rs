//! Bounds of the memory that a function may have mapped, and reasons for which it gets no more.
//!
//! A physical drive's IOMMU pins the memory of all VMs. Each mapping takes page tables (a five-hundredth of its bytes), locked
//! memory and IOVAs, also if the same memory is mapped again. So bytes count as often as they are mapped.

use std::fmt;
use std::io;

use thiserror::Error;

use super::DmaError;
use crate::address::Gpa;
use crate::learn::NoShare;
use crate::memory_account::Shortage;
use crate::range::Bytes;

/// Most bytes that a function may have mapped where memory is pinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryLimit {
    /// As the operator chose.
    Chosen(u64),
    /// All memory of the host.
    Host(u64),
}

impl MemoryLimit {
    /// The limit in bytes.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        match self {
            Self::Chosen(bytes) | Self::Host(bytes) => bytes,
        }
    }
}

impl fmt::Display for MemoryLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Chosen(bytes) => write!(f, "{} (memory-limit)", Bytes(*bytes)),
            Self::Host(bytes) => write!(
                f,
                "{}, the memory of the host, as it has no memory-limit=",
                Bytes(*bytes)
            ),
        }
    }
}

/// A function's name, and its limit.
#[derive(Clone, Debug)]
pub(super) struct Bounds {
    pub(super) function: String,
    pub(super) limit: Option<MemoryLimit>,
}

impl Default for Bounds {
    fn default() -> Self {
        Self {
            function: "(without a name)".to_owned(),
            limit: None,
        }
    }
}

/// Reason for which a function gets no more memory mapped.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum MemoryRefusal {
    /// It would have more bytes mapped than its limit.
    #[error(
        "Function {function} has {} of memory mapped for its drive and asks for {} more; it may have {limit}. Memory counts as \
         often as it is mapped: have the VMM map each part once, or raise memory-limit= of the function, or --memory-limit of the server",
        Bytes(*.mapped), Bytes(*.asked)
    )]
    Limit {
        /// The function.
        function: String,
        /// Bytes that it has mapped.
        mapped: u64,
        /// Bytes that it asks for.
        asked: u64,
        /// The limit.
        limit: MemoryLimit,
    },
    /// The host, or the server's control group, cannot give the pages that are missing.
    #[error(
        "Function {function} asks for {} of memory of which {} are not there yet. The kernel would take them while the drive's \
         memory is pinned, and {shortage}: give the VM less memory, or have its VMM allocate it at its start (prealloc)",
        Bytes(*.asked), Bytes(*.missing)
    )]
    Unavailable {
        /// The function.
        function: String,
        /// Bytes of the region.
        asked: u64,
        /// Bytes that are missing of it, or of the step that was refused.
        missing: u64,
        /// Memory that is left.
        shortage: Shortage,
    },
    /// Others could need the IOVAs.
    #[error(
        "Function {function} has taken {} of the {} of IOVA space that the drive has for all VMs, and gets no {} more while {} \
         are left: have the VMM map each part of its memory once, or move its disk to another drive",
        Bytes(*.taken), Bytes(*.max), Bytes(*.asked), Bytes(*.left)
    )]
    Iovas {
        /// The function.
        function: String,
        /// Bytes of IOVA space that it has.
        taken: u64,
        /// Bytes that it asks for.
        asked: u64,
        /// Bytes that are left for all VMs.
        left: u64,
        /// Bytes that there are in all.
        max: u64,
    },
}

impl MemoryRefusal {
    pub(super) fn of_iovas(function: &str, asked: u64, share: NoShare) -> Self {
        let NoShare { taken, left, max } = share;
        Self::Iovas {
            function: function.to_owned(),
            taken,
            asked,
            left,
            max,
        }
    }

    /// Returns the error for a region. Earlier releases know it as well: it is that of an IOMMU. Its kind says that it may
    /// pass, once others have given back what is missing.
    pub(super) fn of_region(self, gpa: Gpa, len: u64) -> DmaError {
        let source = io::Error::new(io::ErrorKind::OutOfMemory, self);
        DmaError::Iommu { gpa, len, source }
    }
}
