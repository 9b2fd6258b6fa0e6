//! Regions as mapped by a VMM, and the resources they share: the file that holds them, and the extent of IOVA space in which
//! they are adjacent.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use nvme_mpt_memory::holes::allocated_bytes;
use nvme_mpt_memory::{Mapping, MappingAccess, host_page_size};

use super::{DmaError, MemoryRegion};
use crate::address::Gpa;
use crate::iova::{
    BeforePinning, BudgetEntitlement, BudgetPermit, IovaPart, IovaRange, IovaRefusal, IovaSpace,
    VmShares,
};

/// File with memory of a VM, mapped into this process as a whole. So regions that are adjacent in the file are also adjacent in
/// the address space. The VM can use only the regions in the region table. If the file is larger than the address space that is
/// left for the VM's files, each region has a `GuestFile` of its own.
///
/// Memory of a VMM in this process may have no file ([`AnonymousRegion`](super::AnonymousRegion)). Then this is the VMM's mapping
/// alone.
#[derive(Debug)]
pub(super) struct GuestFile {
    /// Device and inode numbers of the file; `None` without a file.
    id: Option<(u64, u64)>,
    /// Offset in the file at which the mapping starts, in bytes; 0 without a file.
    start: u64,
    mapping: Arc<Mapping>,
    /// Descriptor of the file, which is passed to a process that takes over the function's I/O.
    file: Option<File>,
    /// Allocated bytes of the file at the last check.
    allocated: AtomicU64,
}

impl GuestFile {
    /// Returns the entry of `known` that maps these bytes of the file of `fd`. If there is none, maps the whole file, or only
    /// these bytes if the file is larger than `max_bytes` bytes of address space. Returns `None` if even these bytes need more.
    pub(super) fn find_or_map(
        known: &[Arc<Self>],
        fd: OwnedFd,
        offset: u64,
        len: usize,
        access: MappingAccess,
        max_bytes: u64,
    ) -> io::Result<Option<Arc<Self>>> {
        if !offset.is_multiple_of(host_page_size() as u64) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("file offset {offset:#x} is not aligned to the pages of the host"),
            ));
        }
        let file = File::from(fd);
        let status = file.metadata()?;
        let id = (status.dev(), status.ino());
        let has_it = |file: &&Arc<Self>| file.has_id(id) && file.covers(offset, len, access);
        if let Some(file) = known.iter().find(has_it) {
            return Ok(Some(file.clone()));
        }
        if len as u64 > max_bytes {
            return Ok(None);
        }
        let end = offset.checked_add(len as u64);
        let whole = usize::try_from(status.len())
            .ok()
            .filter(|size| *size as u64 <= max_bytes)
            .filter(|size| *size > len && end.is_some_and(|end| end <= status.len()))
            .and_then(|size| Mapping::shared_unreserved(file.as_fd(), size, access).ok());
        let (start, mapping) = match whole {
            Some(mapping) => (0, mapping),
            None => (offset, Mapping::shared(file.as_fd(), offset, len, access)?),
        };
        let mapping = Arc::new(mapping);
        Ok(Some(Arc::new(Self {
            id: Some(id),
            start,
            mapping,
            file: Some(file),
            allocated: AtomicU64::new(0),
        })))
    }

    /// Returns the entry of `known` for a VMM's own mapping in this process, or a new entry. All regions in one mapping share
    /// one entry. `fd` is the mapping's file, if it has one.
    pub(super) fn find_or_borrow(
        known: &[Arc<Self>],
        fd: Option<OwnedFd>,
        mapping: Mapping,
    ) -> io::Result<Arc<Self>> {
        let file = fd.map(File::from);
        let status = file.as_ref().map(File::metadata).transpose()?;
        let id = status.map(|status| (status.dev(), status.ino()));
        let start = mapping
            .file_place()
            .map(|place| place.offset)
            .unwrap_or_default();
        let is_it = |file: &&Arc<Self>| {
            file.id == id
                && file.start == start
                && file.mapping.is_borrowed()
                && file.mapping.is_same_range(&mapping)
                && file.mapping.access() == mapping.access()
        };
        Ok(match known.iter().find(is_it) {
            Some(file) => file.clone(),
            None => Arc::new(Self {
                id,
                start,
                mapping: Arc::new(mapping),
                file,
                allocated: AtomicU64::new(0),
            }),
        })
    }

    /// Returns whether the mapping covers this part of the file with this access.
    fn covers(&self, offset: u64, len: usize, access: MappingAccess) -> bool {
        // A mapping that lost pages to a truncation has replacement pages. If the file grows again, its pages differ from the
        // replacement pages.
        self.mapping.access() == access
            && !self.mapping.is_lost()
            && self.offset_of(offset, len).is_some()
    }

    /// Returns whether `memory`, a region of this file, would use this mapping.
    pub(super) fn covers_region(&self, memory: &MemoryRegion) -> bool {
        usize::try_from(memory.len)
            .is_ok_and(|len| self.covers(memory.offset, len, memory.access()))
    }

    /// Returns the device and inode numbers of a file.
    pub(super) fn file_id(fd: BorrowedFd<'_>) -> io::Result<(u64, u64)> {
        let status = File::from(fd.try_clone_to_owned()?).metadata()?;
        Ok((status.dev(), status.ino()))
    }

    pub(super) fn has_id(&self, id: (u64, u64)) -> bool {
        self.id == Some(id)
    }

    /// Returns the descriptor of the file; `None` without a file.
    pub(super) fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.file.as_ref()?.as_fd())
    }

    /// Returns the file; `None` without a file.
    pub(super) fn file(&self) -> Option<&File> {
        self.file.as_ref()
    }

    /// Returns the allocated bytes of the file; `None` if they are unknown, as without a file.
    fn allocated_bytes(&self) -> Option<u64> {
        allocated_bytes(self.file.as_ref()?).ok()
    }

    /// Notes the file's allocated bytes after some of its pages were pinned.
    pub(super) fn update_allocated(&self) {
        if let Some(now) = self.allocated_bytes() {
            self.allocated.fetch_max(now, Ordering::Relaxed);
        }
    }

    /// Returns whether the file has fewer allocated bytes than at the last check or pinning.
    pub(super) fn has_shrunk(&self) -> bool {
        let Some(now) = self.allocated_bytes() else {
            return false;
        };
        now < self.allocated.swap(now, Ordering::Relaxed)
    }

    /// Makes the next call of [`Self::has_shrunk`] return true.
    pub(super) fn force_recheck(&self) {
        self.allocated.store(u64::MAX, Ordering::Relaxed);
    }

    /// Returns the offset in the mapping of the `len` bytes at `offset` in the file; `None` if the mapping does not cover all
    /// of them.
    pub(super) fn offset_of(&self, offset: u64, len: usize) -> Option<u64> {
        let at = offset.checked_sub(self.start)?;
        self.mapping.bytes(usize::try_from(at).ok()?, len)?;
        Some(at)
    }

    pub(super) fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping
    }
}

/// Region that a VMM asks to map.
#[derive(Debug)]
pub(super) struct RegionRequest {
    /// Guest address.
    pub(super) gpa: Gpa,
    /// Length in bytes.
    pub(super) len: u64,
    /// Start offset in the file, or in the mapping if there is no file, in bytes.
    pub(super) offset: u64,
    /// A device's rights to read and to write the memory.
    pub(super) rights: [bool; 2],
    pub(super) source: RegionSource,
}

/// Source of a region's mapping.
#[derive(Debug)]
pub(super) enum RegionSource {
    /// File, which this process maps.
    File(OwnedFd),
    /// Mapping of a VMM in this process, with the mapping's file if it has one.
    Vmm(Option<OwnedFd>, Mapping),
}

/// Part of a VM's memory, with its guest address and its location in the file.
#[derive(Clone, Debug)]
pub(super) struct GuestMemoryPart {
    /// Guest address of the part.
    pub(super) gpa: u64,
    /// Length in bytes.
    pub(super) len: u64,
    /// A device's rights to read and to write the memory, indexed by [`DmaDirection`](super::DmaDirection).
    pub(super) rights: [bool; 2],
    pub(super) file: Arc<GuestFile>,
    /// Offset of the part in the file's mapping.
    pub(super) offset: u64,
}

impl GuestMemoryPart {
    /// Returns the part as a region with a descriptor, for mapping in another process.
    ///
    /// # Errors
    /// Returns the kernel's error, or `Unsupported` for memory without a file.
    pub(super) fn to_region(&self) -> io::Result<MemoryRegion> {
        let [readable, writable] = self.rights;
        let (gpa, len) = (Gpa(self.gpa), self.len);
        let no_file = || io::Error::new(io::ErrorKind::Unsupported, DmaError::NoFile { gpa, len });
        let file = self.file.file().ok_or_else(no_file)?;
        Ok(MemoryRegion {
            gpa,
            len,
            fd: file.try_clone()?.into(),
            offset: self.file.start + self.offset,
            readable,
            writable,
        })
    }

    /// Returns the part's range in the file, in bytes.
    pub(super) fn file_range(&self) -> Range<u64> {
        let start = self.file.start + self.offset;
        start..start + self.len
    }

    /// Returns the part's range in the file's mapping, in bytes.
    pub(super) fn mapping_range(&self) -> Range<usize> {
        self.offset as usize..(self.offset + self.len) as usize
    }

    /// Returns the guest address of the part's last byte.
    pub(super) fn last_gpa(&self) -> u64 {
        self.gpa + (self.len - 1)
    }

    /// Returns whether `inner` lies in this part, at the same distance from the part's start in guest memory and in the file.
    fn contains(&self, inner: &Self) -> bool {
        let from_start = inner.gpa.wrapping_sub(self.gpa);
        Arc::ptr_eq(&self.file, &inner.file)
            && self.rights == inner.rights
            && inner.offset.wrapping_sub(self.offset) == from_start
            && from_start < self.len
            && inner.len <= self.len - from_start
    }
}

/// Range of IOVA space for memory of a VM. At least a part of the range is mapped. Regions in it have the same distances in
/// IOVA space as in guest memory.
#[derive(Debug)]
pub(super) struct IovaExtent {
    place: GuestMemoryPart,
    iova: Arc<IovaRange>,
    /// Bytes of IOVA space in all extents of the VM.
    taken: Arc<AtomicU64>,
}

impl IovaExtent {
    /// Allocates IOVAs for `place` from the VM's share. `demand` says why the VM may have them. Also takes up to `spare` bytes
    /// of IOVAs for the following bytes of the file, if the budget's rule allows that. `taken` counts both.
    pub(super) fn new(
        space: &Arc<IovaSpace>,
        vm: &VmShares,
        (place, demand): (&GuestMemoryPart, BudgetEntitlement),
        spare: u64,
        taken: &Arc<AtomicU64>,
    ) -> Result<Arc<Self>, IovaRefusal> {
        let mapped = place.file.mapping.len() as u64;
        let follows = (mapped - place.offset - place.len)
            .min(spare)
            .min(u64::MAX - place.last_gpa());
        let part = place.mapping_range();
        let memory = &place.file.mapping;
        let had = demand != BudgetEntitlement::New;
        let iova = |len, demand| {
            let range = space.allocate_for(vm, (demand, had), len, memory, &part)?;
            Ok((len, range))
        };
        let (len, iova) = iova(place.len + follows, BudgetEntitlement::New)
            .or_else(|_| iova(place.len, demand))?;
        let place = GuestMemoryPart {
            len,
            ..place.clone()
        };
        taken.fetch_add(len, Ordering::Relaxed);
        Ok(Arc::new(Self {
            place,
            iova: Arc::new(iova),
            taken: taken.clone(),
        }))
    }

    /// Returns the first IOVA for a place; `None` if the extent does not contain the IOVAs for it.
    pub(super) fn find_iova(&self, place: &GuestMemoryPart) -> Option<u64> {
        let has_it = self.place.contains(place) && !self.iova.is_stuck();
        has_it.then(|| self.first_iova(place))
    }

    /// Returns the first IOVA of a place, which must lie in this extent.
    fn first_iova(&self, place: &GuestMemoryPart) -> u64 {
        self.iova.start() + (place.gpa - self.place.gpa)
    }

    /// Returns whether the predecessor left the place mapped. The place must lie in this extent.
    pub(super) fn is_inherited(&self, place: &GuestMemoryPart) -> bool {
        let (iova, memory) = (self.first_iova(place), &place.file.mapping);
        self.iova.is_inherited(iova, memory, &place.mapping_range())
    }
}

impl IovaExtent {
    /// Unmaps the mappings of the predecessor at the IOVAs of `place`, before `place` is mapped there.
    pub(super) fn unmap_inherited(&self, place: &GuestMemoryPart) {
        if let Some(iova) = self.find_iova(place) {
            self.iova.unmap_inherited(iova..iova + place.len);
        }
    }

    /// Unmaps those mappings of the predecessor in this extent that no region has taken over.
    pub(super) fn end_inheritance(&self) {
        let start = self.iova.start();
        self.iova.unmap_inherited(start..start + self.place.len);
    }
}

impl Drop for IovaExtent {
    fn drop(&mut self) {
        self.taken.fetch_sub(self.place.len, Ordering::Relaxed);
    }
}

/// Part of a VM's memory that its VMM has mapped and can unmap.
#[derive(Debug)]
pub(super) struct MappedRegion {
    /// Mapping for the drive. It is the first field, so that it is dropped (and the drive's access ends) before the memory is
    /// unmapped.
    part: IovaPart,
    pub(super) place: GuestMemoryPart,
    pub(super) extent: Arc<IovaExtent>,
    _pinned: MappedByteCount,
}

/// Bytes that count against the function's limit of mapped memory until this is dropped.
#[derive(Debug)]
pub(super) struct MappedByteCount {
    count: Arc<AtomicU64>,
    bytes: u64,
}

impl MappedByteCount {
    pub(super) fn new(count: &Arc<AtomicU64>, bytes: u64) -> Self {
        count.fetch_add(bytes, Ordering::Relaxed);
        let count = count.clone();
        Self { count, bytes }
    }
}

impl Drop for MappedByteCount {
    fn drop(&mut self) {
        self.count.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl MappedRegion {
    /// Maps `place` for the host controller at its IOVAs in `extent`, which must contain it. `before_pinning` is called before
    /// each piece of it is pinned, and may refuse the piece.
    pub(super) fn new(
        place: GuestMemoryPart,
        extent: Arc<IovaExtent>,
        permit: BudgetPermit,
        pinned: MappedByteCount,
        before_pinning: &mut BeforePinning<'_>,
    ) -> io::Result<Self> {
        let mapping = &place.file.mapping;
        let part = place.mapping_range();
        let iova = extent.first_iova(&place);
        let access = mapping.access();
        let part = extent
            .iova
            .map(iova, mapping, part, access, permit, before_pinning)?;
        Ok(Self {
            part,
            place,
            extent,
            _pinned: pinned,
        })
    }

    /// Returns the IOVA of the region's first byte.
    pub(super) fn iova(&self) -> u64 {
        self.part.start()
    }
}
