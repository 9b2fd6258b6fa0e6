//! Regions as a VMM maps them, and what they share: the file that holds them, and the stretch of IOVA
//! space in which they lie side by side.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::MemoryRegion;
use crate::address::Gpa;
use crate::iova::{
    BeforePinning, Demand, IovaPart, IovaRange, IovaSpace, NoIovas, Permit, VmShares,
};
use crate::memory::holes::allocated_bytes;
use crate::memory::{Access, Mapping, host_page_size};

/// A file that holds memory of a VM, as it is mapped into this process: as a whole, so that regions
/// which follow one another in the file do so in our address space. The table has the parts that the VM may use.
/// If a whole file does not fit, each region has one of these.
#[derive(Debug)]
pub(super) struct GuestFile {
    /// Device and inode.
    id: (u64, u64),
    /// Offset in the file at which the mapping starts.
    start: u64,
    mapping: Arc<Mapping>,
    /// Kept, to be handed to another process that is to do the function's I/O.
    file: File,
    /// Bytes of the file that were allocated at the last look.
    allocated: AtomicU64,
}

impl GuestFile {
    /// Finds the file of `fd` among those that are mapped, or maps it, into `room` bytes of address space at
    /// most; nothing if that is too little.
    pub(super) fn find_or_map(
        known: &[Arc<Self>],
        fd: OwnedFd,
        offset: u64,
        len: usize,
        access: Access,
        room: u64,
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
        let has_it = |file: &&Arc<Self>| file.id == id && file.has(offset, len, access);
        if let Some(file) = known.iter().find(has_it) {
            return Ok(Some(file.clone()));
        }
        if len as u64 > room {
            return Ok(None);
        }
        let end = offset.checked_add(len as u64);
        let whole = usize::try_from(status.len())
            .ok()
            .filter(|size| *size as u64 <= room)
            .filter(|size| *size > len && end.is_some_and(|end| end <= status.len()))
            .and_then(|size| Mapping::shared_unreserved(file.as_fd(), 0, size, access).ok());
        let (start, mapping) = match whole {
            Some(mapping) => (0, mapping),
            None => (offset, Mapping::shared(file.as_fd(), offset, len, access)?),
        };
        let mapping = Arc::new(mapping);
        Ok(Some(Arc::new(Self {
            id,
            start,
            mapping,
            file,
            allocated: AtomicU64::new(0),
        })))
    }

    /// Finds the known file of memory that the VMM has mapped in this process, or adds the file with the VMM's mapping.
    /// Regions of one mapping share it here.
    pub(super) fn find_or_borrow(
        known: &[Arc<Self>],
        fd: OwnedFd,
        mapping: Mapping,
    ) -> io::Result<Arc<Self>> {
        let file = File::from(fd);
        let status = file.metadata()?;
        let id = (status.dev(), status.ino());
        let start = mapping
            .place()
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

    /// Returns whether the mapping has a part of the file, with this access.
    fn has(&self, offset: u64, len: usize, access: Access) -> bool {
        // A file that was cut short and grew again has other pages than what took their place.
        self.mapping.access() == access
            && !self.mapping.is_lost()
            && self.offset_of(offset, len).is_some()
    }

    /// Returns whether a region of this file would be used through this mapping.
    pub(super) fn serves(&self, memory: &MemoryRegion) -> bool {
        usize::try_from(memory.len).is_ok_and(|len| self.has(memory.offset, len, memory.access()))
    }

    /// Returns device and inode of a file.
    pub(super) fn id_of(fd: BorrowedFd<'_>) -> io::Result<(u64, u64)> {
        let status = File::from(fd.try_clone_to_owned()?).metadata()?;
        Ok((status.dev(), status.ino()))
    }

    pub(super) fn has_id(&self, id: (u64, u64)) -> bool {
        self.id == id
    }

    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// Notes the pages of the file once some of them are pinned.
    pub(super) fn note_pinned(&self) {
        if let Ok(now) = allocated_bytes(&self.file) {
            self.allocated.fetch_max(now, Ordering::Relaxed);
        }
    }

    /// Returns whether the file has fewer pages than at the call before, or since some were pinned.
    pub(super) fn has_shrunk(&self) -> bool {
        let Ok(now) = allocated_bytes(&self.file) else {
            return false;
        };
        now < self.allocated.swap(now, Ordering::Relaxed)
    }

    /// Has the next call of [`Self::has_shrunk`] return true.
    pub(super) fn look_again(&self) {
        self.allocated.store(u64::MAX, Ordering::Relaxed);
    }

    /// Returns the place in the mapping of the bytes from `offset` of the file on, if it has all of them.
    pub(super) fn offset_of(&self, offset: u64, len: usize) -> Option<u64> {
        let at = offset.checked_sub(self.start)?;
        self.mapping.bytes(usize::try_from(at).ok()?, len)?;
        Some(at)
    }

    pub(super) fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping
    }
}

/// A part of a VM's memory: where the guest sees it, and where it is here.
#[derive(Clone, Debug)]
pub(super) struct Place {
    /// Guest address.
    pub(super) gpa: u64,
    /// Bytes.
    pub(super) len: u64,
    /// Rights of a device to read it, and to write it: by [`Direction`](super::Direction).
    pub(super) rights: [bool; 2],
    pub(super) file: Arc<GuestFile>,
    /// Offset in the file's mapping.
    pub(super) offset: u64,
}

impl Place {
    /// Returns the place as it is handed over.
    pub(super) fn region(&self) -> io::Result<MemoryRegion> {
        let [readable, writable] = self.rights;
        Ok(MemoryRegion {
            gpa: Gpa(self.gpa),
            len: self.len,
            fd: self.file.file.try_clone()?.into(),
            offset: self.file.start + self.offset,
            readable,
            writable,
        })
    }

    /// Returns its part of the file, in bytes.
    pub(super) fn in_file(&self) -> Range<u64> {
        let start = self.file.start + self.offset;
        start..start + self.len
    }

    /// Returns its part of the file's mapping.
    pub(super) fn part(&self) -> Range<usize> {
        self.offset as usize..(self.offset + self.len) as usize
    }

    /// The last guest address in it.
    pub(super) fn last(&self) -> u64 {
        self.gpa + (self.len - 1)
    }

    /// Returns whether `inner` is a part of this: there is as far from the start in guest memory as in the
    /// file.
    fn has(&self, inner: &Self) -> bool {
        let from_start = inner.gpa.wrapping_sub(self.gpa);
        Arc::ptr_eq(&self.file, &inner.file)
            && self.rights == inner.rights
            && inner.offset.wrapping_sub(self.offset) == from_start
            && from_start < self.len
            && inner.len <= self.len - from_start
    }
}

/// A stretch of IOVA space for a part of a VM's memory of which some is mapped: regions in it have the
/// distances of their guest addresses.
#[derive(Debug)]
pub(super) struct Extent {
    place: Place,
    iova: Arc<IovaRange>,
    /// Bytes of all extents of the VM.
    taken: Arc<AtomicU64>,
}

impl Extent {
    /// Takes IOVAs of a VM's share for `place` on the ground of `demand`, and for up to `spare` bytes that follow it in its
    /// file if others do not need them. `taken` counts them.
    pub(super) fn new(
        space: &Arc<IovaSpace>,
        vm: &VmShares,
        (place, demand): (&Place, Demand),
        spare: u64,
        taken: &Arc<AtomicU64>,
    ) -> Result<Arc<Self>, NoIovas> {
        let mapped = place.file.mapping.len() as u64;
        let follows = (mapped - place.offset - place.len)
            .min(spare)
            .min(u64::MAX - place.last());
        let part = place.part();
        let memory = &place.file.mapping;
        let had = demand != Demand::New;
        let iova = |len, demand| {
            let range = space.allocate_for(vm, (demand, had), len, memory, &part)?;
            Ok((len, range))
        };
        let (len, iova) =
            iova(place.len + follows, Demand::New).or_else(|_| iova(place.len, demand))?;
        let place = Place {
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

    /// Returns the first IOVA of a place, if there are IOVAs for it.
    pub(super) fn iova_of(&self, place: &Place) -> Option<u64> {
        let has_it = self.place.has(place) && !self.iova.is_stuck();
        has_it.then(|| self.start_of(place))
    }

    /// Returns the first IOVA of a place that it has.
    fn start_of(&self, place: &Place) -> u64 {
        self.iova.start() + (place.gpa - self.place.gpa)
    }

    /// Returns whether the process before has left a place mapped, which it has.
    pub(super) fn is_inherited(&self, place: &Place) -> bool {
        let (iova, memory) = (self.start_of(place), &place.file.mapping);
        self.iova.is_inherited(iova, memory, &place.part())
    }
}

impl Extent {
    /// Takes away whatever the process before had mapped at a place, which is mapped anew.
    pub(super) fn disinherit(&self, place: &Place) {
        if let Some(iova) = self.iova_of(place) {
            self.iova.disinherit(iova..iova + place.len);
        }
    }

    /// Takes away whatever the process before had mapped in it, and is not found.
    pub(super) fn end_inheritance(&self) {
        let start = self.iova.start();
        self.iova.disinherit(start..start + self.place.len);
    }
}

impl Drop for Extent {
    fn drop(&mut self) {
        self.taken.fetch_sub(self.place.len, Ordering::Relaxed);
    }
}

/// A part of a VM's memory that its VMM mapped, and can unmap.
#[derive(Debug)]
pub(super) struct Region {
    /// Mapping for the drive; it is dropped, and thereby unmapped, before the memory is.
    part: IovaPart,
    pub(super) place: Place,
    pub(super) extent: Arc<Extent>,
    _pinned: Pinned,
}

/// Bytes that count as mapped until this is dropped.
#[derive(Debug)]
pub(super) struct Pinned {
    count: Arc<AtomicU64>,
    bytes: u64,
}

impl Pinned {
    pub(super) fn new(count: &Arc<AtomicU64>, bytes: u64) -> Self {
        count.fetch_add(bytes, Ordering::Relaxed);
        let count = count.clone();
        Self { count, bytes }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        self.count.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl Region {
    /// Lets the host controller reach `place` at its IOVAs in `extent`, which has it. `before` may refuse each part of the
    /// file's mapping.
    pub(super) fn new(
        place: Place,
        extent: Arc<Extent>,
        permit: Permit,
        pinned: Pinned,
        before: &mut BeforePinning<'_>,
    ) -> io::Result<Self> {
        let mapping = &place.file.mapping;
        let part = place.part();
        let iova = extent.start_of(&place);
        let access = mapping.access();
        let part = extent
            .iova
            .map(iova, mapping, part, access, permit, before)?;
        Ok(Self {
            part,
            place,
            extent,
            _pinned: pinned,
        })
    }

    /// The first IOVA.
    pub(super) fn iova(&self) -> u64 {
        self.part.start()
    }
}
