//! Shared mappings of memory files, and access to them.
//!
//! The controller under test accesses guest memory concurrently, in this process or in another one. Therefore, the driver
//! never creates a plain Rust reference to guest memory: [`SharedSlice`] provides atomics, and the copying functions use
//! volatile accesses. All unsafe code of the guest driver is here.

#![expect(
    unsafe_code,
    reason = "shared memory is mapped and accessed by address"
)]

use std::fs::File;
use std::io;
use std::ops::Deref;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64};

/// Errors of guest memory.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// A system call failed.
    #[error("{call} of {len:#x} bytes failed")]
    System {
        /// System call.
        call: &'static str,
        /// Requested size in bytes.
        len: u64,
        /// Error of the system call.
        source: io::Error,
    },
    /// A region is empty, overlaps another region, or has partial pages.
    #[error("Region {gpa:#x}+{len:#x} is empty, unaligned or overlaps another one")]
    Region {
        /// Guest physical address.
        gpa: u64,
        /// Size in bytes.
        len: u64,
    },
    /// No free run of pages is long enough.
    #[error("No {len:#x} bytes free at alignment {align:#x}")]
    Exhausted {
        /// Requested size in bytes.
        len: usize,
        /// Requested alignment.
        align: usize,
    },
    /// An address range is in no region.
    #[error("{gpa:#x}+{len:#x} is outside of guest memory")]
    Outside {
        /// Guest physical address.
        gpa: u64,
        /// Size in bytes.
        len: usize,
    },
}

/// Creates an empty memfd.
pub(crate) fn memfd() -> Result<File, MemoryError> {
    memfd_with(0)
}

/// Creates an empty memfd with additional flags.
pub(crate) fn memfd_with(flags: libc::c_uint) -> Result<File, MemoryError> {
    let flags = flags | libc::MFD_CLOEXEC;
    // SAFETY: the name is a C string. The call has no other requirement.
    let fd = unsafe { libc::memfd_create(c"guest-memory".as_ptr(), flags) };
    if fd < 0 {
        return Err(MemoryError::System {
            call: "memfd_create",
            len: 0,
            source: io::Error::last_os_error(),
        });
    }
    // SAFETY: the descriptor is new and has no other owner.
    Ok(File::from(unsafe { OwnedFd::from_raw_fd(fd) }))
}

/// A shared mapping of a file. The last reference unmaps it.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping is only an address range. Its memory is accessed only by atomics and volatile accesses.
unsafe impl Send for Mapping {}
// SAFETY: as for `Send`.
unsafe impl Sync for Mapping {}

impl Mapping {
    pub(crate) fn new(fd: BorrowedFd<'_>, offset: u64, len: usize) -> Result<Self, MemoryError> {
        let failed = |call, source| MemoryError::System {
            call,
            len: len as u64,
            source,
        };
        let offset = libc::off_t::try_from(offset)
            .map_err(|_| failed("mmap", io::Error::from(io::ErrorKind::InvalidInput)))?;
        // SAFETY: the kernel chooses the address of this new mapping, so it touches no existing memory.
        let base = unsafe {
            libc::mmap(
                ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                fd.as_raw_fd(),
                offset,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(failed("mmap", io::Error::last_os_error()));
        }
        let base = NonNull::new(base.cast::<u8>())
            .ok_or_else(|| failed("mmap", io::Error::from(io::ErrorKind::Other)))?;
        Ok(Self { base, len })
    }

    /// Maps pages from any offsets of a file to consecutive addresses.
    pub(crate) fn from_pages(
        fd: BorrowedFd<'_>,
        offsets: &[u64],
        page: usize,
    ) -> Result<Self, MemoryError> {
        let (&first, rest) = offsets
            .split_first()
            .ok_or(MemoryError::Region { gpa: 0, len: 0 })?;
        // Reserves consecutive addresses for all pages, which replace this mapping below.
        let mut mapping = Self::new(fd, first, page)?;
        let len = page * offsets.len();
        let failed = |call| MemoryError::System {
            call,
            len: len as u64,
            source: io::Error::last_os_error(),
        };
        // SAFETY: the mapping grows, and the kernel may move it, as nothing points into it yet. The pages behind the first
        // one are replaced below.
        let base = unsafe {
            let base = mapping.base.as_ptr().cast();
            libc::mremap(base, mapping.len, len, libc::MREMAP_MAYMOVE)
        };
        if base == libc::MAP_FAILED {
            return Err(failed("mremap"));
        }
        mapping.base = NonNull::new(base.cast::<u8>()).ok_or_else(|| failed("mremap"))?;
        mapping.len = len;
        for (index, &offset) in (1..).zip(rest) {
            // SAFETY: the page lies in the mapping, and nothing points into the mapping yet.
            let mapped = unsafe {
                libc::mmap(
                    mapping.base.as_ptr().add(index * page).cast(),
                    page,
                    libc::PROT_READ | libc::PROT_WRITE,
                    libc::MAP_SHARED | libc::MAP_FIXED,
                    fd.as_raw_fd(),
                    offset as libc::off_t,
                )
            };
            if mapped == libc::MAP_FAILED {
                return Err(failed("mmap"));
            }
        }
        Ok(mapping)
    }

    /// Requests huge pages. A refusal is no error, since they are optional.
    pub(crate) fn advise_huge(&self) {
        // SAFETY: the range is this mapping; the advice changes no content.
        unsafe { libc::madvise(self.base.as_ptr().cast(), self.len, libc::MADV_HUGEPAGE) };
    }

    /// Returns the address of a byte in this process.
    pub(crate) fn address(&self, offset: usize) -> u64 {
        self.base.as_ptr().addr() as u64 + offset as u64
    }

    pub(crate) fn read(&self, offset: usize, into: &mut [u8]) {
        assert!(offset <= self.len && into.len() <= self.len - offset);
        // SAFETY: `offset` was checked to be within the mapping.
        let from = unsafe { self.base.as_ptr().add(offset) };
        let mut at = 0;
        while at < into.len() {
            // SAFETY: `at` is below `into.len()`, which was checked to fit behind `offset`.
            let p = unsafe { from.add(at) };
            if into.len() - at >= 8 && p.addr().is_multiple_of(8) {
                // SAFETY: `p` is aligned, and 8 bytes behind it are in the mapping.
                let word = unsafe { p.cast::<u64>().read_volatile() };
                into[at..at + 8].copy_from_slice(&word.to_ne_bytes());
                at += 8;
            } else {
                // SAFETY: one byte at `p` is in the mapping.
                into[at] = unsafe { p.read_volatile() };
                at += 1;
            }
        }
    }

    pub(crate) fn write(&self, offset: usize, from: &[u8]) {
        assert!(offset <= self.len && from.len() <= self.len - offset);
        // SAFETY: `offset` was checked to be within the mapping.
        let to = unsafe { self.base.as_ptr().add(offset) };
        let mut at = 0;
        while at < from.len() {
            // SAFETY: `at` is below `from.len()`, which was checked to fit behind `offset`.
            let p = unsafe { to.add(at) };
            match from[at..].first_chunk::<8>() {
                // SAFETY: `p` is aligned, and 8 bytes behind it are in the mapping.
                Some(word) if p.addr().is_multiple_of(8) => unsafe {
                    p.cast::<u64>().write_volatile(u64::from_ne_bytes(*word));
                    at += 8;
                },
                // SAFETY: one byte at `p` is in the mapping.
                _ => unsafe {
                    p.write_volatile(from[at]);
                    at += 1;
                },
            }
        }
    }

    pub(crate) fn fill(&self, offset: usize, len: usize, byte: u8) {
        assert!(offset <= self.len && len <= self.len - offset);
        // SAFETY: the range was checked to be within the mapping.
        unsafe { ptr::write_bytes(self.base.as_ptr().add(offset), byte, len) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `new`, and nothing that points into it outlives the mapping.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

mod sealed {
    pub trait Sealed {}
}

/// Element types of shared memory: atomics, and arrays of them.
///
/// Sealed, because [`SharedSlice`] relies on every bit pattern being valid and on interior mutability.
pub trait Cell: sealed::Sealed + Sync + 'static {}

macro_rules! cells {
    ($($t:ty),*) => { $(impl sealed::Sealed for $t {} impl Cell for $t {})* };
}
cells!(AtomicU8, AtomicU16, AtomicU32, AtomicU64);

impl<T: Cell, const N: usize> sealed::Sealed for [T; N] {}
impl<T: Cell, const N: usize> Cell for [T; N] {}

/// A slice of atomics in shared memory, which keeps the mapping alive.
#[derive(Debug)]
pub struct SharedSlice<T: Cell> {
    first: NonNull<T>,
    len: usize,
    mapping: Arc<Mapping>,
}

// SAFETY: `T` is `Sync` and only accessible by shared reference. The mapping may be dropped on any thread.
unsafe impl<T: Cell> Send for SharedSlice<T> {}
// SAFETY: as for `Send`.
unsafe impl<T: Cell> Sync for SharedSlice<T> {}

impl<T: Cell> SharedSlice<T> {
    pub(crate) fn new(mapping: &Arc<Mapping>, offset: usize, len: usize) -> Self {
        let bytes = len.saturating_mul(size_of::<T>());
        assert!(offset <= mapping.len && bytes <= mapping.len - offset);
        // SAFETY: `offset` was checked to be within the mapping.
        let first = unsafe { mapping.base.add(offset) }.cast::<T>();
        assert!(first.is_aligned());
        Self {
            first,
            len,
            mapping: Arc::clone(mapping),
        }
    }

    /// Returns `len` elements from `start` as a slice.
    ///
    /// # Panics
    /// The elements are not all in this slice.
    pub fn slice(&self, start: usize, len: usize) -> Self {
        assert!(start <= self.len && len <= self.len - start);
        Self {
            // SAFETY: `start` was checked to be within this slice.
            first: unsafe { self.first.add(start) },
            len,
            mapping: Arc::clone(&self.mapping),
        }
    }
}

impl SharedSlice<[AtomicU64; 8]> {
    /// Stores all 64 bytes of an element. This is not atomic: the controller reads a submission queue entry only after its
    /// doorbell.
    ///
    /// # Panics
    /// The element does not exist.
    #[inline]
    pub fn store(&self, index: usize, words: &[u64; 8]) {
        assert!(index < self.len);
        // SAFETY: the element is within this slice, and is aligned as the array is.
        unsafe {
            self.first
                .add(index)
                .cast::<[u64; 8]>()
                .write_volatile(*words);
        }
    }
}

impl<T: Cell> Clone for SharedSlice<T> {
    fn clone(&self) -> Self {
        self.slice(0, self.len)
    }
}

impl<T: Cell> Deref for SharedSlice<T> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        // SAFETY: the elements lie in a mapping that `self` keeps. `T` consists of atomics, which other processes may write
        // at any time and which may have any bit pattern.
        unsafe { std::slice::from_raw_parts(self.first.as_ptr(), self.len) }
    }
}

/// Maps `len` bytes at `offset` of a file as doorbell registers.
///
/// # Errors
/// The file cannot be mapped.
pub(crate) fn map_registers(
    fd: BorrowedFd<'_>,
    offset: u64,
    len: usize,
) -> Result<SharedSlice<AtomicU32>, MemoryError> {
    let mapping = Arc::new(Mapping::new(fd, offset, len)?);
    Ok(SharedSlice::new(&mapping, 0, len / 4))
}
