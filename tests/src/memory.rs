//! Guest memory: one shared memfd, with regions at guest physical addresses.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, PoisonError};

use crate::huge_pages::HugePages;
use crate::mapping::{self, Mapping};
pub use crate::mapping::{Cell, MemoryError, SharedSlice};
use crate::rng::Rng;
use nvme_mpt_memory::sync::{Mutex, MutexGuard, RwLock};

/// Memory page size that the driver sets in CC.MPS (0), independent of the host's page size.
pub const PAGE_SIZE: usize = 4096;

/// Alignment of regions in the memfd: the size of a huge page, and a multiple of every host's page size.
const REGION_ALIGN: u64 = 2 << 20;

/// A range of guest physical addresses, backed by a part of the memfd.
#[derive(Clone, Debug)]
pub struct Region {
    /// Guest physical address.
    pub gpa: u64,
    /// Size in bytes.
    pub len: u64,
    /// Offset in [`GuestMemory::fd`].
    pub fd_offset: u64,
    /// Memfd offsets of the pages, if the pages are not contiguous in the memfd.
    pages: Option<Arc<[u64]>>,
    mapping: Arc<Mapping>,
}

/// A part of a region whose pages are contiguous in the memfd, so that one mapping covers it.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    /// Guest physical address.
    pub gpa: u64,
    /// Size in bytes.
    pub len: u64,
    /// Offset in [`GuestMemory::fd`].
    pub fd_offset: u64,
}

impl Region {
    /// Returns the parts to map: the whole region, or each page of a scattered region.
    pub fn pieces(&self) -> Vec<Piece> {
        let page = PAGE_SIZE as u64;
        match &self.pages {
            None => vec![Piece {
                gpa: self.gpa,
                len: self.len,
                fd_offset: self.fd_offset,
            }],
            Some(pages) => (0..)
                .zip(pages.iter())
                .map(|(index, &fd_offset)| Piece {
                    gpa: self.gpa + index * page,
                    len: page,
                    fd_offset,
                })
                .collect(),
        }
    }

    fn offset_of(&self, gpa: u64, len: usize) -> Option<usize> {
        let offset = gpa.checked_sub(self.gpa)?;
        let end = offset.checked_add(len as u64)?;
        (end <= self.len).then_some(offset as usize)
    }
}

#[derive(Debug)]
struct Inner {
    memfd: File,
    /// Seed for the order of pages, if regions are scattered in the memfd.
    scattered: Option<u64>,
    regions: RwLock<Vec<Region>>,
    /// Free runs of pages: size in bytes by guest physical address. A run never spans two regions.
    free: Mutex<BTreeMap<u64, u64>>,
}

/// Guest memory. Clones share it.
#[derive(Clone, Debug)]
pub struct GuestMemory {
    inner: Arc<Inner>,
}

impl GuestMemory {
    /// Creates memory with the given regions (guest physical address, bytes).
    ///
    /// # Errors
    /// A region is empty, unaligned or overlaps another one, or a system call fails.
    pub fn new(regions: &[(u64, u64)]) -> Result<Self, MemoryError> {
        Self::from_memfd(mapping::memfd()?, regions, None)
    }

    /// Creates memory like [`GuestMemory::new`], in reserved huge pages.
    ///
    /// # Errors
    /// As [`GuestMemory::new`].
    pub fn in_huge_pages(pages: &HugePages, regions: &[(u64, u64)]) -> Result<Self, MemoryError> {
        Self::from_memfd(pages.file()?, regions, None)
    }

    /// Creates memory like [`GuestMemory::new`], but its pages are scattered in the memfd, and each is mapped separately. A
    /// device sees such memory if the guest has a virtual IOMMU.
    ///
    /// # Errors
    /// As [`GuestMemory::new`].
    pub fn scattered(regions: &[(u64, u64)], seed: u64) -> Result<Self, MemoryError> {
        Self::from_memfd(mapping::memfd()?, regions, Some(seed))
    }

    fn from_memfd(
        memfd: File,
        regions: &[(u64, u64)],
        scattered: Option<u64>,
    ) -> Result<Self, MemoryError> {
        let memory = Self {
            inner: Arc::new(Inner {
                memfd,
                scattered,
                regions: RwLock::default(),
                free: Mutex::default(),
            }),
        };
        for &(gpa, len) in regions {
            memory.add_region(gpa, len)?;
        }
        Ok(memory)
    }

    /// Adds a region while the guest runs.
    ///
    /// # Errors
    /// As [`GuestMemory::new`].
    pub fn add_region(&self, gpa: u64, len: u64) -> Result<Region, MemoryError> {
        let mut regions = self
            .inner
            .regions
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        let page = PAGE_SIZE as u64;
        let is_valid = len > 0
            && gpa.is_multiple_of(page)
            && len.is_multiple_of(page)
            && gpa
                .checked_add(len)
                .is_some_and(|end| regions.iter().all(|r| end <= r.gpa || gpa >= r.gpa + r.len));
        if !is_valid {
            return Err(MemoryError::Region { gpa, len });
        }
        let fd_offset = regions
            .last()
            .map_or(0, |r| (r.fd_offset + r.len).next_multiple_of(REGION_ALIGN));
        self.inner
            .memfd
            .set_len(fd_offset + len)
            .map_err(|source| MemoryError::System {
                call: "ftruncate",
                len,
                source,
            })?;
        let pages = self.inner.scattered.map(|seed| {
            let mut rng = Rng::new(seed ^ gpa);
            let mut pages: Vec<_> = (fd_offset..fd_offset + len).step_by(PAGE_SIZE).collect();
            for left in (1..pages.len()).rev() {
                pages.swap(left, rng.below(left as u64 + 1) as usize);
            }
            Arc::<[u64]>::from(pages)
        });
        let mapping = match &pages {
            Some(pages) => Mapping::from_pages(self.fd(), pages, PAGE_SIZE)?,
            None => {
                let mapping = Mapping::new(self.fd(), fd_offset, len as usize)?;
                mapping.advise_huge();
                mapping
            }
        };
        let region = Region {
            gpa,
            len,
            fd_offset,
            pages,
            mapping: Arc::new(mapping),
        };
        regions.push(region.clone());
        self.free_runs().insert(gpa, len);
        Ok(region)
    }

    /// Returns the memfd of all regions, for DMA mappings.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.inner.memfd.as_fd()
    }

    /// Returns all regions in the order of their creation.
    pub fn regions(&self) -> Vec<Region> {
        self.inner
            .regions
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    fn free_runs(&self) -> MutexGuard<'_, BTreeMap<u64, u64>> {
        self.inner
            .free
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn find(&self, gpa: u64, len: usize) -> Result<(Arc<Mapping>, usize), MemoryError> {
        self.inner
            .regions
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .iter()
            .find_map(|r| Some((Arc::clone(&r.mapping), r.offset_of(gpa, len)?)))
            .ok_or(MemoryError::Outside { gpa, len })
    }

    /// Allocates whole, zeroed pages, which are freed when the buffer is dropped.
    ///
    /// # Errors
    /// No free run is long enough.
    pub fn alloc(&self, len: usize) -> Result<DmaBuffer, MemoryError> {
        self.alloc_aligned(len, PAGE_SIZE)
    }

    /// Allocates memory like [`GuestMemory::alloc`], aligned to `align`, a power of two of at least a page.
    ///
    /// # Errors
    /// No free run is long enough.
    pub fn alloc_aligned(&self, len: usize, align: usize) -> Result<DmaBuffer, MemoryError> {
        let exhausted = MemoryError::Exhausted { len, align };
        let bytes = len.max(1).next_multiple_of(PAGE_SIZE) as u64;
        let mut runs = self.free_runs();
        let fit = runs.iter().find_map(|(&start, &run)| {
            let at = start.checked_next_multiple_of(align as u64)?;
            (at.checked_add(bytes)? <= start + run).then_some((start, run, at))
        });
        let Some((start, run, at)) = fit else {
            return Err(exhausted);
        };
        runs.remove(&start);
        if at > start {
            runs.insert(start, at - start);
        }
        let rest = start + run - (at + bytes);
        if rest > 0 {
            runs.insert(at + bytes, rest);
        }
        drop(runs);
        self.take(at, bytes)
    }

    /// Allocates the pages at a given address.
    ///
    /// # Errors
    /// A page is in use or outside of every region.
    pub fn alloc_at(&self, gpa: u64, len: usize) -> Result<DmaBuffer, MemoryError> {
        let bytes = len.max(1).next_multiple_of(PAGE_SIZE) as u64;
        let mut runs = self.free_runs();
        let fit = runs
            .range(..=gpa)
            .next_back()
            .map(|(&start, &run)| (start, run))
            .filter(|(start, run)| bytes <= run.saturating_sub(gpa - start));
        let Some((start, run)) = fit.filter(|_| gpa.is_multiple_of(PAGE_SIZE as u64)) else {
            return Err(MemoryError::Outside { gpa, len });
        };
        runs.remove(&start);
        if gpa > start {
            runs.insert(start, gpa - start);
        }
        let rest = start + run - (gpa + bytes);
        if rest > 0 {
            runs.insert(gpa + bytes, rest);
        }
        drop(runs);
        self.take(gpa, bytes)
    }

    fn take(&self, gpa: u64, bytes: u64) -> Result<DmaBuffer, MemoryError> {
        let (mapping, offset) = self.find(gpa, bytes as usize)?;
        let buffer = DmaBuffer {
            memory: self.clone(),
            gpa,
            len: bytes as usize,
            mapping,
            offset,
        };
        buffer.fill(0);
        Ok(buffer)
    }

    fn release(&self, gpa: u64, len: u64) {
        let regions = self.regions();
        let starts_region = |at| regions.iter().any(|r| r.gpa == at);
        let mut runs = self.free_runs();
        let (mut start, mut run) = (gpa, len);
        if let Some((&before, &before_len)) = runs.range(..gpa).next_back()
            && before + before_len == gpa
            && !starts_region(gpa)
        {
            runs.remove(&before);
            start = before;
            run += before_len;
        }
        if let Some(&after_len) = runs.get(&(gpa + len))
            && !starts_region(gpa + len)
        {
            runs.remove(&(gpa + len));
            run += after_len;
        }
        runs.insert(start, run);
    }

    /// Copies bytes out of guest memory.
    ///
    /// # Errors
    /// The range is not within one region.
    pub fn read(&self, gpa: u64, into: &mut [u8]) -> Result<(), MemoryError> {
        let (mapping, offset) = self.find(gpa, into.len())?;
        mapping.read(offset, into);
        Ok(())
    }

    /// Copies bytes into guest memory.
    ///
    /// # Errors
    /// The range is not within one region.
    pub fn write(&self, gpa: u64, from: &[u8]) -> Result<(), MemoryError> {
        let (mapping, offset) = self.find(gpa, from.len())?;
        mapping.write(offset, from);
        Ok(())
    }

    /// Returns `len` elements at a guest physical address.
    ///
    /// # Errors
    /// The range is not within one region, or not aligned for `T`.
    pub fn cells<T: Cell>(&self, gpa: u64, len: usize) -> Result<SharedSlice<T>, MemoryError> {
        let bytes = len.saturating_mul(size_of::<T>());
        let (mapping, offset) = self.find(gpa, bytes)?;
        if !offset.is_multiple_of(align_of::<T>()) {
            return Err(MemoryError::Outside { gpa, len: bytes });
        }
        Ok(SharedSlice::new(&mapping, offset, len))
    }
}

/// Contiguous whole pages of guest memory, freed when dropped.
#[derive(Debug)]
pub struct DmaBuffer {
    memory: GuestMemory,
    gpa: u64,
    len: usize,
    mapping: Arc<Mapping>,
    offset: usize,
}

impl DmaBuffer {
    /// Returns the guest physical address.
    pub fn gpa(&self) -> u64 {
        self.gpa
    }

    /// Returns the size in bytes, a multiple of [`PAGE_SIZE`].
    #[expect(clippy::len_without_is_empty, reason = "a buffer is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns the guest memory that contains the buffer.
    pub fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    /// Copies bytes out of the buffer.
    ///
    /// # Panics
    /// The range is not within the buffer.
    pub fn read(&self, offset: usize, into: &mut [u8]) {
        assert!(offset <= self.len && into.len() <= self.len - offset);
        self.mapping.read(self.offset + offset, into);
    }

    /// Copies bytes out of the buffer into a new vector.
    ///
    /// # Panics
    /// The range is not within the buffer.
    pub fn to_vec(&self, offset: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.read(offset, &mut bytes);
        bytes
    }

    /// Copies bytes into the buffer.
    ///
    /// # Panics
    /// The range is not within the buffer.
    pub fn write(&self, offset: usize, from: &[u8]) {
        assert!(offset <= self.len && from.len() <= self.len - offset);
        self.mapping.write(self.offset + offset, from);
    }

    /// Sets every byte.
    pub fn fill(&self, byte: u8) {
        self.mapping.fill(self.offset, self.len, byte);
    }

    /// Returns the host physical address of the first byte (Linux, `admin-guide/mm/pagemap`). Requires root.
    ///
    /// # Errors
    /// The kernel hides the address, or the page is not present.
    pub fn host_address(&self) -> Result<u64, MemoryError> {
        let failed = |source| MemoryError::System {
            call: "reading /proc/self/pagemap",
            len: self.len as u64,
            source,
        };
        let pages = File::open("/proc/self/pagemap").map_err(failed)?;
        let mut entry = [0; 8];
        let page = self.mapping.address(self.offset) / PAGE_SIZE as u64;
        pages.read_exact_at(&mut entry, 8 * page).map_err(failed)?;
        let entry = u64::from_le_bytes(entry);
        match entry & ((1 << 55) - 1) {
            0 => Err(failed(io::ErrorKind::PermissionDenied.into())),
            frame if entry >> 63 == 1 => Ok(frame * PAGE_SIZE as u64),
            _ => Err(failed(io::ErrorKind::NotFound.into())),
        }
    }

    /// Returns the buffer as a slice of atomics, with as many elements as fit.
    pub fn cells<T: Cell>(&self) -> SharedSlice<T> {
        SharedSlice::new(&self.mapping, self.offset, self.len / size_of::<T>())
    }
}

impl Drop for DmaBuffer {
    fn drop(&mut self) {
        self.memory.release(self.gpa, self.len as u64);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    const BASE: u64 = 0x10_0000;

    #[test]
    fn bytes_come_back_from_any_alignment() {
        let memory = GuestMemory::new(&[(BASE, 0x4000), (0x1_0000_0000, 0x2000)]).unwrap();
        let data: Vec<u8> = (0..100).collect();
        for skew in 0..9 {
            let at = 0x1_0000_0000 + 0x0ffb + skew;
            memory.write(at, &data).unwrap();
            let mut back = [0; 100];
            memory.read(at, &mut back).unwrap();
            assert_eq!(&back[..], data);
        }
    }

    #[test]
    fn scattered_pages_are_where_their_pieces_say() {
        let memory = GuestMemory::scattered(&[(BASE, 0x10_0000)], 7).unwrap();
        let data: Vec<u8> = (0..0x10_0000_u32).map(|at| (at / 4096) as u8).collect();
        memory.write(BASE, &data).unwrap();
        let pieces = memory.regions()[0].pieces();
        assert_eq!(pieces.len(), 256);
        let moved = pieces
            .iter()
            .filter(|piece| piece.fd_offset != piece.gpa - BASE);
        assert!(moved.count() > 200);
        for piece in pieces {
            let page = Mapping::new(memory.fd(), piece.fd_offset, PAGE_SIZE).unwrap();
            let mut back = [0; PAGE_SIZE];
            page.read(0, &mut back);
            assert_eq!(back, [((piece.gpa - BASE) / 4096) as u8; PAGE_SIZE]);
        }
    }

    #[test]
    fn ranges_outside_of_a_region_are_refused() {
        let memory = GuestMemory::new(&[(BASE, 0x2000), (BASE + 0x2000, 0x2000)]).unwrap();
        let mut two = [0; 2];
        // The regions are adjacent, but a range across both is in neither.
        assert!(memory.read(BASE + 0x1fff, &mut two).is_err());
        assert!(memory.read(BASE - 1, &mut two).is_err());
        assert!(memory.read(u64::MAX, &mut two).is_err());
        assert!(memory.cells::<AtomicU64>(BASE + 4, 1).is_err());
        assert!(memory.add_region(BASE + 0x1000, 0x1000).is_err());
        assert!(memory.add_region(u64::MAX - 0xfff, 0x2000).is_err());
    }

    #[test]
    fn freed_pages_merge_and_are_zeroed_for_the_next_owner() {
        let memory = GuestMemory::new(&[(BASE, 4 << 12)]).unwrap();
        let pages: Vec<_> = (0..4).map(|_| memory.alloc(1).unwrap()).collect();
        assert!(memory.alloc(1).is_err());
        pages[2].fill(0xff);
        let mut pages: Vec<_> = pages.into_iter().map(Some).collect();
        for index in [2, 0, 1, 3] {
            pages[index] = None;
        }
        let all = memory.alloc(4 << 12).unwrap();
        assert_eq!(all.gpa(), BASE);
        assert!(all.to_vec(0, 4 << 12).iter().all(|&b| b == 0));
    }

    #[test]
    fn runs_of_two_regions_stay_apart() {
        let memory = GuestMemory::new(&[(BASE, 0x1000), (BASE + 0x1000, 0x1000)]).unwrap();
        let low = memory.alloc_at(BASE, 1).unwrap();
        let high = memory.alloc_at(BASE + 0x1000, 1).unwrap();
        assert!(memory.alloc_at(BASE, 1).is_err());
        drop((low, high));
        assert!(memory.alloc(0x2000).is_err());
    }

    #[test]
    fn alignment_is_kept() {
        let memory = GuestMemory::new(&[(BASE, 8 << 20)]).unwrap();
        let _one = memory.alloc(1).unwrap();
        let huge = memory.alloc_aligned(0x1000, 2 << 20).unwrap();
        assert!(huge.gpa().is_multiple_of(2 << 20));
    }

    #[test]
    fn another_mapping_of_the_memfd_sees_the_same_bytes() {
        let memory = GuestMemory::new(&[(BASE, 0x1000), (BASE * 2, 0x1000)]).unwrap();
        let region = memory.regions()[1].clone();
        let registers = mapping::map_registers(memory.fd(), region.fd_offset, 0x1000).unwrap();
        registers[3].store(0x0403_0201, Ordering::Release);
        let mut back = [0; 4];
        memory.read(BASE * 2 + 12, &mut back).unwrap();
        assert_eq!(back, 0x0403_0201_u32.to_ne_bytes());
    }
}
