//! Mappings of host memory, which live as long as they are referenced.
#![expect(unsafe_code, reason = "maps and unmaps memory")]

use std::any::Any;
use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::bytes::RawBytes;
use super::file_system::{host_page_size, page_size};
use super::sigbus;

/// Access to a mapping's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MappingAccess {
    /// Loads only; stores fault.
    Read,
    /// Loads and stores.
    ReadWrite,
}

/// Location of a mapping's first byte in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FilePlace {
    /// Device of the file.
    pub device: u64,
    /// Inode number of the file. While a process has the file open, no other file has this number.
    pub inode: u64,
    /// Offset in the file, in bytes.
    pub offset: u64,
}

/// Owner of memory that a [`Mapping`] only borrows.
#[derive(Clone)]
struct MemoryOwner(#[expect(dead_code, reason = "held for its drop")] Arc<dyn Any + Send + Sync>);

impl fmt::Debug for MemoryOwner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MemoryOwner")
    }
}

/// Range of this process's address space, mapped until it is dropped.
///
/// Its bytes are accessed through [`RawBytes`], rings and cells, never through a reference.
#[derive(Debug)]
pub struct Mapping {
    start: NonNull<u8>,
    len: usize,
    /// Length of the whole pages that the kernel mapped: huge pages, if the memory has them.
    mapped_bytes: usize,
    access: MappingAccess,
    place: Option<FilePlace>,
    guard: Option<sigbus::SigbusGuard>,
    /// Other owner of the memory, which has mapped it and will unmap it; `None` if this mapping does.
    owner: Option<MemoryOwner>,
    /// True after [`Mapping::mark_lost`].
    is_marked_lost: AtomicBool,
}

// SAFETY: the mapping is plain memory without thread affinity; all access to it is by raw volatile, atomic or bulk
// copies that tolerate concurrent change.
unsafe impl Send for Mapping {}
// SAFETY: as above; shared access never makes a reference to the memory.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes of `fd` from `offset`. Other mappings of the file share the memory.
    ///
    /// # Errors
    /// Returns the error of `fstat` or `mmap`. Returns `InvalidInput` if the file ends before the range does, or if the
    /// range is empty or not aligned to the host's page size.
    pub fn shared(
        fd: BorrowedFd<'_>,
        offset: u64,
        len: usize,
        access: MappingAccess,
    ) -> io::Result<Self> {
        Self::map_file(fd, offset, len, access, libc::MAP_SHARED)
    }

    /// Maps the first `len` bytes of `fd` as [`Self::shared`] does, but reserves no memory for untouched pages. For a file
    /// in huge pages, a reservation would take pages from other users of the pool.
    ///
    /// # Errors
    /// Like [`Self::shared`].
    pub fn shared_unreserved(
        fd: BorrowedFd<'_>,
        len: usize,
        access: MappingAccess,
    ) -> io::Result<Self> {
        Self::map_file(fd, 0, len, access, libc::MAP_SHARED | libc::MAP_NORESERVE)
    }

    fn map_file(
        fd: BorrowedFd<'_>,
        offset: u64,
        len: usize,
        access: MappingAccess,
        flags: libc::c_int,
    ) -> io::Result<Self> {
        let invalid = |what: String| io::Error::new(io::ErrorKind::InvalidInput, what);
        let file_offset = libc::off_t::try_from(offset)
            .map_err(|_| invalid(format!("file offset {offset:#x} is too large")))?;
        let stat = fstat(fd)?;
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        if offset.checked_add(len as u64).is_none_or(|end| end > size) {
            return Err(invalid(format!(
                "the file has {size:#x} bytes, fewer than {offset:#x} + {len:#x}"
            )));
        }
        let page = page_size(fd)?;
        let mut mapping = Self::map(len, access, flags, fd.as_raw_fd(), file_offset)?;
        mapping.mapped_bytes = len.next_multiple_of(page);
        mapping.place = Some(FilePlace {
            device: stat.st_dev,
            inode: stat.st_ino,
            offset,
        });
        let (start, kind) = (mapping.start, sigbus::MappingKind::Memory);
        mapping.guard = Some(sigbus::SigbusGuard::new(
            start,
            mapping.mapped_bytes,
            page,
            kind,
        )?);
        Ok(mapping)
    }

    /// Borrows memory that another owner has mapped, such as a VMM's guest memory, without a second mapping. `fd` is the
    /// memory's file, and `offset` the location of the first byte in the file.
    ///
    /// Page faults happen in the owner's mapping, so they go to the owner's userfaultfd, if there is one. The owner also
    /// handles SIGBUS. A lost page is not replaced here ([`is_lost`](Self::is_lost) stays false), because the guest would
    /// see the replacement as well.
    ///
    /// # Errors
    /// Returns the error of `fstat`.
    ///
    /// # Safety
    /// The `len` bytes from `start` must be a shared mapping of the file that allows `access` and does not change while
    /// `owner` is held. There must be no Rust reference to them.
    pub unsafe fn borrowed(
        start: NonNull<u8>,
        len: usize,
        access: MappingAccess,
        fd: BorrowedFd<'_>,
        offset: u64,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> io::Result<Self> {
        let stat = fstat(fd)?;
        // SAFETY: by the caller, who promises the same of a mapping with a file.
        let mut mapping = unsafe { Self::borrowed_anonymous(start, len, access, owner) };
        mapping.place = Some(FilePlace {
            device: stat.st_dev,
            inode: stat.st_ino,
            offset,
        });
        Ok(mapping)
    }

    /// Borrows memory without a file that another owner has mapped, such as a VMM's anonymous guest memory. Otherwise works like
    /// [`Self::borrowed`].
    ///
    /// # Safety
    /// The `len` bytes from `start` must be a mapping that allows `access` and does not change while `owner` is held. There must
    /// be no Rust reference to them.
    #[must_use]
    pub unsafe fn borrowed_anonymous(
        start: NonNull<u8>,
        len: usize,
        access: MappingAccess,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Self {
        Self {
            start,
            len,
            mapped_bytes: len,
            access,
            place: None,
            guard: None,
            owner: Some(MemoryOwner(owner)),
            is_marked_lost: AtomicBool::new(false),
        }
    }

    /// Returns whether another owner has mapped the memory: see [`Self::borrowed`].
    #[must_use]
    pub fn is_borrowed(&self) -> bool {
        self.owner.is_some()
    }

    /// Returns whether both values are the same mapping: they have the same address and length.
    #[must_use]
    pub fn is_same_range(&self, other: &Self) -> bool {
        self.start == other.start && self.len == other.len
    }

    /// Maps `len` bytes of a device's registers, at `offset` of the device's file.
    ///
    /// Once the device is gone, reads return ones and writes are discarded, and [`is_lost`](Self::is_lost) is true. This
    /// begins with the first access that finds the device gone, or with [`detach_device`](Self::detach_device).
    ///
    /// # Errors
    /// Returns the error of `mmap`; `InvalidInput` if the offset is too large.
    pub fn device(fd: BorrowedFd<'_>, offset: u64, len: usize) -> io::Result<Self> {
        let file_offset = libc::off_t::try_from(offset).map_err(|_| {
            let what = format!("file offset {offset:#x} is too large");
            io::Error::new(io::ErrorKind::InvalidInput, what)
        })?;
        let (access, flags) = (MappingAccess::ReadWrite, libc::MAP_SHARED);
        let mut mapping = Self::map(len, access, flags, fd.as_raw_fd(), file_offset)?;
        let (page, kind) = (host_page_size(), sigbus::MappingKind::Device);
        mapping.guard = Some(sigbus::SigbusGuard::new(mapping.start, len, page, kind)?);
        Ok(mapping)
    }

    /// Unmaps the device, so that the mapping behaves as if the device were gone. Other threads may access the mapping
    /// during the call: each access reaches either the device or the replacement.
    ///
    /// # Errors
    /// Returns the error of `mmap`; part of the device is then still mapped. Returns `InvalidInput` for memory.
    pub fn detach_device(&self) -> io::Result<()> {
        match &self.guard {
            Some(guard) if guard.kind() == sigbus::MappingKind::Device => guard.detach_device(),
            _ => Err(io::ErrorKind::InvalidInput.into()),
        }
    }

    /// Maps `len` bytes of zeroed private memory. A page is allocated when it is first written.
    ///
    /// # Errors
    /// Returns the error of `mmap`.
    pub fn anonymous(len: usize) -> io::Result<Self> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        Self::map(len, MappingAccess::ReadWrite, flags, -1, 0)
    }

    /// Maps at least `len` bytes of zeroed private memory, in huge pages of 2 MiB if the kernel has reserved some;
    /// otherwise as [`Self::anonymous`] does.
    ///
    /// # Errors
    /// Returns the error of `mmap`.
    pub fn huge(len: usize) -> io::Result<Self> {
        const HUGE_PAGE: usize = 2 << 20;
        let flags =
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_HUGETLB | libc::MAP_HUGE_2MB;
        Self::map(
            len.next_multiple_of(HUGE_PAGE),
            MappingAccess::ReadWrite,
            flags,
            -1,
            0,
        )
        .or_else(|_| Self::anonymous(len))
    }

    fn map(
        len: usize,
        access: MappingAccess,
        flags: libc::c_int,
        fd: libc::c_int,
        offset: libc::off_t,
    ) -> io::Result<Self> {
        let prot = match access {
            MappingAccess::Read => libc::PROT_READ,
            MappingAccess::ReadWrite => libc::PROT_READ | libc::PROT_WRITE,
        };
        // SAFETY: without MAP_FIXED the kernel chooses an unused range, so no memory of ours is replaced; the result is
        // checked.
        let address = unsafe { libc::mmap(std::ptr::null_mut(), len, prot, flags, fd, offset) };
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(address.cast::<u8>())
            .ok_or_else(|| io::Error::other("mmap placed a mapping at address 0"))?;
        Ok(Self {
            start,
            len,
            mapped_bytes: len,
            access,
            place: None,
            guard: None,
            owner: None,
            is_marked_lost: AtomicBool::new(false),
        })
    }

    /// Asks the kernel to use huge pages for this memory.
    pub fn advise_huge_pages(&self) {
        // SAFETY: the range is this mapping; the advice changes no content. A kernel without huge pages refuses, which
        // only costs speed.
        unsafe { libc::madvise(self.start.as_ptr().cast(), self.len, libc::MADV_HUGEPAGE) };
    }

    /// Allocates all memory of a writable mapping, as if each page had been written.
    ///
    /// Until it is first written, a page of anonymous memory is the shared zero page. Without this call, kernels before 6.2
    /// would map the zero page for a device with read-only access. After a write, the process would have a new page, but
    /// the device would still read the zero page.
    ///
    /// # Errors
    /// Returns the error of `madvise`: `InvalidInput` for kernels before 5.14, which do not support it.
    pub fn populate(&self) -> io::Result<()> {
        // SAFETY: the range is this mapping; populating it changes no content.
        let result = unsafe {
            let start = self.start.as_ptr().cast();
            libc::madvise(start, self.len, libc::MADV_POPULATE_WRITE)
        };
        if result < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }

    /// Allocates the missing memory of a part, as an access to each of its pages would.
    ///
    /// # Errors
    /// Like [`Self::populate`]; `InvalidInput` also outside the mapping.
    pub fn populate_part(&self, offset: usize, len: usize) -> io::Result<()> {
        let bytes = self.bytes(offset, len).ok_or(io::ErrorKind::InvalidInput)?;
        let advice = match self.access {
            MappingAccess::Read => libc::MADV_POPULATE_READ,
            MappingAccess::ReadWrite => libc::MADV_POPULATE_WRITE,
        };
        // SAFETY: the range lies in this mapping; populating it changes no content.
        if unsafe { libc::madvise(bytes.as_ptr().cast(), len, advice) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }

    /// Frees the memory of a range of an anonymous mapping, which then reads as zeroes.
    ///
    /// # Errors
    /// Returns the error of `madvise`; `InvalidInput` outside the mapping.
    pub fn discard(&self, offset: usize, len: usize) -> io::Result<()> {
        let bytes = self.bytes(offset, len).ok_or(io::ErrorKind::InvalidInput)?;
        // SAFETY: the range lies in this mapping, which is private anonymous memory when this is
        // called. (File-backed mappings would read their file again, which is as well defined.)
        if unsafe { libc::madvise(bytes.as_ptr().cast(), len, libc::MADV_DONTNEED) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }

    /// Frees the memory of a range of a shared memory file, which then reads as zeroes in all mappings.
    ///
    /// # Errors
    /// Returns the error of `madvise`; `InvalidInput` outside the mapping, or if it is not a shared mapping of a memory
    /// file.
    pub fn discard_file(&self, offset: usize, len: usize) -> io::Result<()> {
        let bytes = self.bytes(offset, len).ok_or(io::ErrorKind::InvalidInput)?;
        // SAFETY: the range lies in this mapping. The kernel refuses anything but shared memory. Other users of the
        // file see zeroes, as after a write of zeroes.
        if unsafe { libc::madvise(bytes.as_ptr().cast(), len, libc::MADV_REMOVE) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }

    #[inline]
    pub(super) fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Returns the length in bytes.
    #[inline]
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the mapping has no bytes. Always false, because the kernel refuses empty mappings.
    #[inline]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the allowed access to the memory.
    #[inline]
    #[must_use]
    pub fn access(&self) -> MappingAccess {
        self.access
    }

    /// Returns the location of the first byte in a file; `None` for private memory and registers.
    #[must_use]
    pub fn file_place(&self) -> Option<FilePlace> {
        self.place
    }

    /// Returns the `len` bytes from `offset`; `None` if they are not all in the mapping.
    #[inline]
    #[must_use]
    pub fn bytes(&self, offset: usize, len: usize) -> Option<RawBytes<'_>> {
        if offset > self.len || len > self.len - offset {
            return None;
        }
        #[cfg(simulation)]
        if let Some(FilePlace {
            inode,
            offset: start,
            ..
        }) = self.place
        {
            let start = start + offset as u64;
            crate::simulation::costs::accesses(inode, &(start..start + len as u64));
        }
        // SAFETY: `offset` is at most the mapping's length, so the pointer stays in the mapping (or one past it). The
        // `len` bytes from there were just checked. The lifetime is ours.
        Some(unsafe { RawBytes::new(self.start.as_ptr().add(offset), len) })
    }

    /// Returns whether the memory or the device behind the mapping is lost: memory of a truncated file was replaced by
    /// zeroes, a device was replaced by ones, or a drive uses other pages of the file than this mapping
    /// ([`Self::mark_lost`]). The guest's queues must then stop, because the guest's data in this memory is lost.
    #[inline]
    #[must_use]
    pub fn is_lost(&self) -> bool {
        let replaced = self.is_marked_lost.load(Ordering::Acquire);
        replaced
            || self
                .guard
                .as_ref()
                .is_some_and(sigbus::SigbusGuard::is_lost)
    }

    /// Marks the memory as lost, because pages that are pinned for a drive were freed. Queues find out by
    /// [`lost_memory_epoch`](crate::lost_memory_epoch).
    pub fn mark_lost(&self) {
        self.is_marked_lost.store(true, Ordering::Release);
        sigbus::advance_loss_epoch();
    }
}

fn fstat(fd: BorrowedFd<'_>) -> io::Result<libc::stat> {
    // SAFETY: `stat` is a plain structure that fstat fills, and `fd` is open.
    unsafe {
        let mut stat = std::mem::zeroed::<libc::stat>();
        if libc::fstat(fd.as_raw_fd(), &mut stat) < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(stat)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // The guard is dropped before the range is unmapped, because another mapping may get the range immediately.
        self.guard = None;
        #[cfg(simulation)]
        crate::simulation::store_buffers::forget(
            &(self.start.as_ptr().addr()..self.start.as_ptr().addr() + self.mapped_bytes),
        );
        if self.is_borrowed() {
            return;
        }
        // SAFETY: we mapped the range, and unmap it once; every user of its addresses borrows from, or holds a
        // reference count of, this mapping.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.mapped_bytes) };
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::OwnedFd;

    use super::*;
    use std::os::fd::AsFd;

    fn memfd(len: u64) -> OwnedFd {
        crate::memfd(c"test", len).expect("memory")
    }

    #[test]
    fn bytes_stay_inside() {
        let mapping = Mapping::anonymous(8192).expect("map");
        assert!(mapping.bytes(0, 8192).is_some());
        assert!(mapping.bytes(8192, 0).is_some());
        assert!(mapping.bytes(8191, 2).is_none());
        assert!(mapping.bytes(usize::MAX, 1).is_none());
        assert!(mapping.bytes(1, usize::MAX).is_none());
    }

    #[test]
    fn memory_is_there_with_and_without_huge_pages() {
        let mapping = Mapping::huge(5000).expect("map");
        assert!(mapping.len() >= 5000);
        let mut read = [9; 5000];
        mapping.bytes(0, 5000).expect("inside").copy_to(&mut read);
        assert_eq!(read, [0; 5000]);
    }

    #[test]
    fn a_file_that_is_too_short_is_refused() {
        let fd = memfd(4096);
        let error =
            Mapping::shared(fd.as_fd(), 0, 8192, MappingAccess::ReadWrite).expect_err("too short");
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
        let error =
            Mapping::shared(fd.as_fd(), u64::MAX, 1, MappingAccess::Read).expect_err("overflow");
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn populated_memory_is_there_and_unchanged() {
        // Bit 63 of a page's entry reports that the page is in memory (proc_pid_pagemap(5)).
        let is_there = |mapping: &Mapping, page: usize| {
            let address = mapping.start.as_ptr() as usize + page * host_page_size();
            let mut entry = [0; 8];
            let file = File::open("/proc/self/pagemap").expect("pagemap");
            let at = 8 * (address / host_page_size()) as u64;
            std::os::unix::fs::FileExt::read_exact_at(&file, &mut entry, at).expect("an entry");
            u64::from_le_bytes(entry) >> 63 == 1
        };
        let mapping = Mapping::anonymous(4 * host_page_size()).expect("map");
        mapping.bytes(5, 1).expect("inside").copy_from(&[7]);
        assert!(!is_there(&mapping, 3));
        mapping.populate().expect("populate");
        assert!((0..4).all(|page| is_there(&mapping, page)));
        assert_eq!(read(&mapping, 4), [0, 7, 0, 0]);
        let fd = memfd(4096);
        let read_only = Mapping::shared(fd.as_fd(), 0, 4096, MappingAccess::Read).expect("map");
        assert!(read_only.populate().is_err());
    }

    #[test]
    fn discarded_memory_reads_as_zeroes() {
        let mapping = Mapping::anonymous(8192).expect("map");
        let bytes = mapping.bytes(4096, 4).expect("inside");
        bytes.copy_from(&[1, 2, 3, 4]);
        mapping.discard(4096, 4096).expect("discard");
        let mut read = [9; 4];
        bytes.copy_to(&mut read);
        assert_eq!(read, [0; 4]);
    }

    #[test]
    fn discarded_parts_of_a_memory_file_read_as_zeroes_in_each_mapping() {
        let fd = memfd(8192);
        let map = || Mapping::shared(fd.as_fd(), 0, 8192, MappingAccess::ReadWrite).expect("map");
        let (mapping, other) = (map(), map());
        for at in [0, 4096] {
            mapping
                .bytes(at, 4)
                .expect("inside")
                .copy_from(&[1, 2, 3, 4]);
        }
        mapping.discard_file(4096, 4096).expect("discard");
        for (at, content) in [(0, [1, 2, 3, 4]), (4096, [0; 4])] {
            let mut read = [9; 4];
            other.bytes(at, 4).expect("inside").copy_to(&mut read);
            assert_eq!(read, content);
        }
        let private = Mapping::anonymous(4096).expect("map");
        private.discard_file(0, 4096).expect_err("no file");
    }

    #[test]
    fn memory_whose_file_is_cut_short_is_lost_not_fatal() {
        let fd = memfd(16384);
        let mapping = Mapping::shared(fd.as_fd(), 0, 16384, MappingAccess::ReadWrite).expect("map");
        let untouched =
            Mapping::shared(memfd(4096).as_fd(), 0, 4096, MappingAccess::Read).expect("map");
        mapping
            .bytes(8192, 4)
            .expect("inside")
            .copy_from(&[1, 2, 3, 4]);
        let epoch = crate::lost_memory_epoch();
        File::from(fd).set_len(4096).expect("cut short");
        let mut read = [9; 4];
        mapping.bytes(8192, 4).expect("inside").copy_to(&mut read);
        assert_eq!(read, [0; 4]);
        assert!(mapping.is_lost());
        assert!(!untouched.is_lost());
        assert_ne!(crate::lost_memory_epoch(), epoch);
    }

    fn read(mapping: &Mapping, offset: usize) -> [u8; 4] {
        let mut read = [9; 4];
        mapping.bytes(offset, 4).expect("inside").copy_to(&mut read);
        read
    }

    /// Creates a fake device in a file. Truncating the file removes its pages, as removing a drive removes its registers.
    fn device(len: u64) -> (File, Mapping) {
        let fd = memfd(len);
        let mapping = Mapping::device(fd.as_fd(), 0, len as usize).expect("map");
        (File::from(fd), mapping)
    }

    #[test]
    fn a_device_that_is_gone_reads_as_ones_and_takes_writes() {
        let pages = 3 * crate::host_page_size();
        let (file, mapping) = device(pages as u64);
        let (_other_file, other) = device(pages as u64);
        mapping
            .bytes(8, 4)
            .expect("inside")
            .copy_from(&[1, 2, 3, 4]);
        assert_eq!(read(&mapping, 8), [1, 2, 3, 4]);
        file.set_len(0).expect("cut short");
        // The last page is written first, because the loss of each page is detected separately.
        mapping
            .bytes(pages - 8, 4)
            .expect("inside")
            .copy_from(&[0; 4]);
        assert!(mapping.is_lost());
        assert_eq!(read(&mapping, pages - 4), [0xFF; 4]);
        assert_eq!(read(&mapping, 8), [0xFF; 4]);
        assert_eq!(read(&mapping, pages / 2), [0xFF; 4]);
        assert!(!other.is_lost());
        assert_eq!(read(&other, 8), [0; 4]);
    }

    #[test]
    fn a_device_that_is_given_up_is_reached_no_more() {
        let pages = 3 * crate::host_page_size();
        let (file, mapping) = device(pages as u64);
        let probe = Mapping::shared(file.as_fd(), 0, pages, MappingAccess::Read).expect("map");
        mapping.bytes(0, 4).expect("inside").copy_from(&[1; 4]);
        mapping.detach_device().expect("give up");
        assert!(mapping.is_lost());
        for offset in (0..pages).step_by(512) {
            assert_eq!(read(&mapping, offset), [0xFF; 4]);
            mapping.bytes(offset, 4).expect("inside").copy_from(&[2; 4]);
        }
        assert_eq!(read(&probe, 0), [1; 4]);
        assert_eq!(read(&probe, 512), [0; 4]);
        mapping.detach_device().expect("again");

        let memory = Mapping::shared(file.as_fd(), 0, pages, MappingAccess::Read).expect("map");
        assert!(memory.detach_device().is_err());
        assert!(
            Mapping::anonymous(4096)
                .expect("map")
                .detach_device()
                .is_err()
        );
    }
}
