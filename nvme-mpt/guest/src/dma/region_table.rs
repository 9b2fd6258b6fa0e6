//! Region table: snapshot of a VM's memory map for translation and access.

use std::sync::Arc;

use nvme_mpt_memory::{Mapping, RawBytes};

use super::dirty_bitmap::RegionDirtyBitmap;
use super::pending_unmap::PendingUnmap;
use super::region::{GuestMemoryPart, MappedRegion};
use super::sorted_map::SharedSortedMap;
use crate::address::{Gpa, Iova};

/// Run: regions that are adjacent in guest memory, in this process's address space and in the IOVA space. Translation treats
/// them as one.
#[derive(Clone, Debug)]
pub(super) struct RegionRun {
    gpa: u64,
    len: u64,
    /// Number of bytes, from the run's start, that a device may read and write, indexed by `DmaDirection`: the run's length, or
    /// 0 without the right.
    limits: [u64; 2],
    iova: u64,
    mapping: Arc<Mapping>,
    /// Offset in the mapping at which the run starts.
    offset: u64,
}

/// Direction of a data transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DmaDirection {
    /// From the guest's memory to the drive, as for a Write command.
    FromGuest = 0,
    /// From the drive to the guest's memory, as for a Read command.
    ToGuest = 1,
}

impl RegionRun {
    fn new(region: &MappedRegion) -> Self {
        let place = &region.place;
        Self {
            gpa: place.gpa,
            len: place.len,
            limits: place.rights.map(|may| if may { place.len } else { 0 }),
            iova: region.iova(),
            mapping: place.file.mapping().clone(),
            offset: place.offset,
        }
    }

    /// Returns the last guest address of the run.
    fn last_gpa(&self) -> u64 {
        self.gpa + (self.len - 1)
    }

    /// Returns whether `next` is adjacent to the end of this run in guest memory, in the mapping and in the IOVA space.
    /// Separately allocated IOVA ranges never touch, so adjacent IOVAs belong to the same range.
    fn is_followed_by(&self, next: &Self) -> bool {
        let may = |run: &Self| run.limits.map(|limit| limit > 0);
        self.last_gpa().checked_add(1) == Some(next.gpa)
            && self.iova + self.len == next.iova
            && self.offset + self.len == next.offset
            && Arc::ptr_eq(&self.mapping, &next.mapping)
            && may(self) == may(next)
    }

    /// Returns the `len` bytes at a guest address in this run, as a run of their own.
    fn slice(&self, gpa: u64, len: u64) -> Self {
        let offset = gpa - self.gpa;
        Self {
            gpa,
            len,
            limits: self.limits.map(|limit| if limit > 0 { len } else { 0 }),
            iova: self.iova + offset,
            mapping: self.mapping.clone(),
            offset: self.offset + offset,
        }
    }

    /// Joins this run and the run `next` that [follows](Self::is_followed_by) it.
    fn join(&self, next: &Self) -> Self {
        let len = self.len + next.len;
        Self {
            len,
            ..self.slice(self.gpa, len)
        }
    }

    /// Returns the offset of `gpa..gpa+len` in the run, if a device may access all of it in this direction.
    #[inline(always)]
    fn offset_of(&self, gpa: Gpa, len: u64, direction: DmaDirection) -> Option<u64> {
        offset_of(self.gpa, &self.limits, gpa, len, direction)
    }

    /// Returns the offset of an IOVA in the run.
    #[inline]
    fn offset_of_iova(&self, iova: u64) -> Option<u64> {
        let offset = iova.wrapping_sub(self.iova);
        (offset < self.len).then_some(offset)
    }

    /// Returns bytes of the run. The caller has checked that they lie in the run.
    #[inline]
    fn bytes(&self, offset: u64, len: usize) -> Option<RawBytes<'_>> {
        self.mapping.bytes((self.offset + offset) as usize, len)
    }
}

/// Returns the offset of `gpa..gpa+len` from the first address of a run, if a device may access all of it in this direction.
#[inline(always)]
fn offset_of(
    first: u64,
    limits: &[u64; 2],
    gpa: Gpa,
    len: u64,
    direction: DmaDirection,
) -> Option<u64> {
    let offset = gpa.0.wrapping_sub(first);
    let limit = limits[direction as usize];
    (offset < limit && len <= limit - offset).then_some(offset)
}

/// Maximum number of runs for which a table has an array. Most VMs have fewer runs, and an array is searched faster than the
/// map.
const ARRAY_RUNS_MAX: usize = 64;

/// Snapshot of a VM's memory map, as runs of adjacent regions.
///
/// The table does not keep the memory mapped: the window does, until none of the window's users has the table.
#[derive(Clone, Debug, Default)]
pub struct RegionTable {
    generation: u64,
    /// All runs by guest address, not overlapping, if there are at most [`ARRAY_RUNS_MAX`]; empty if there are more.
    array: Vec<RegionRun>,
    by_gpa: SharedSortedMap<Arc<RegionRun>>,
    by_iova: SharedSortedMap<Arc<RegionRun>>,
    /// Dirty pages of each region, if the dirty log is on.
    pub(super) dirty: Option<SharedSortedMap<Arc<RegionDirtyBitmap>>>,
    /// Pending unmaps whose memory in-flight commands may still use.
    pending_unmaps: Vec<Arc<PendingUnmap>>,
}

/// Page range of one run for one direction, used by loops over page lists.
#[derive(Clone, Copy, Debug)]
pub struct RunPages {
    /// Guest address of the first page.
    pub first: u64,
    /// Offset of the last byte of the run from its first page.
    pub last_byte: u64,
    /// IOVA of the first page.
    pub iova: u64,
}

/// Index of the run found by the last lookup. The next lookup tries this run first.
#[derive(Clone, Copy, Debug, Default)]
pub struct RegionHint(usize);

/// Copy of the run found by the last lookup, for translating guest addresses to IOVAs. It is valid for one table; another table
/// needs a new hint.
#[derive(Clone, Copy, Debug, Default)]
pub struct IovaHint {
    gpa: u64,
    limits: [u64; 2],
    iova: u64,
}

impl IovaHint {
    /// Returns the IOVA of `gpa..gpa+len`, if it lies completely in the copied run and the access is allowed.
    #[inline(always)]
    pub fn translate(&self, gpa: Gpa, len: u64, direction: DmaDirection) -> Option<Iova> {
        let offset = offset_of(self.gpa, &self.limits, gpa, len, direction)?;
        Some(Iova(self.iova + offset))
    }

    /// Returns the pages of the copied run for translating whole pages, if the access is allowed.
    #[inline(always)]
    pub fn pages(&self, direction: DmaDirection) -> Option<RunPages> {
        Some(RunPages {
            first: self.gpa,
            last_byte: self.limits[direction as usize].checked_sub(1)?,
            iova: self.iova,
        })
    }
}

impl RegionTable {
    /// Completes the table after a change: increments its generation and sets its pending unmaps.
    pub(super) fn complete(&mut self, pending_unmaps: Vec<Arc<PendingUnmap>>) {
        self.generation += 1;
        self.pending_unmaps = pending_unmaps;
        self.array = match self.by_gpa.len() <= ARRAY_RUNS_MAX {
            true => self
                .by_gpa
                .values()
                .map(|run| RegionRun::clone(run))
                .collect(),
            false => Vec::new(),
        };
    }

    fn insert_run(&mut self, run: RegionRun) {
        let run = Arc::new(run);
        self.by_gpa.insert(run.gpa, run.clone());
        self.by_iova.insert(run.iova, run);
    }

    fn remove_run(&mut self, run: &RegionRun) {
        self.by_gpa.remove(run.gpa);
        self.by_iova.remove(run.iova);
    }

    /// Adds a region that does not overlap any region of the table.
    pub(super) fn add_region(&mut self, region: &MappedRegion) {
        let mut run = RegionRun::new(region);
        let before = self.by_gpa.get_at_or_before(run.gpa);
        if let Some(before) = before.filter(|before| before.is_followed_by(&run)).cloned() {
            self.remove_run(&before);
            run = before.join(&run);
        }
        let next = run.last_gpa().checked_add(1);
        let next = next.and_then(|gpa| self.by_gpa.get(gpa));
        if let Some(next) = next.filter(|next| run.is_followed_by(next)).cloned() {
            self.remove_run(&next);
            run = run.join(&next);
        }
        self.insert_run(run);
        if let Some(dirty) = &mut self.dirty {
            let GuestMemoryPart { gpa, len, .. } = region.place;
            dirty.insert(gpa, Arc::new(RegionDirtyBitmap::new(gpa, len)));
        }
    }

    /// Removes a region. Returns its dirty bitmap, if the dirty log is on.
    pub(super) fn remove_region(
        &mut self,
        region: &MappedRegion,
    ) -> Option<Arc<RegionDirtyBitmap>> {
        let place = &region.place;
        if let Some(run) = self.by_gpa.get_at_or_before(place.gpa).cloned() {
            self.remove_run(&run);
            if run.gpa < place.gpa {
                self.insert_run(run.slice(run.gpa, place.gpa - run.gpa));
            }
            if run.last_gpa() > place.last_gpa() {
                self.insert_run(run.slice(place.last_gpa() + 1, run.last_gpa() - place.last_gpa()));
            }
        }
        self.dirty.as_mut()?.remove(place.gpa)
    }

    /// Returns the pending unmaps of generations after `generation`: all whose memory a user of that older table may still use.
    pub fn pending_unmaps_since(
        &self,
        generation: u64,
    ) -> impl Iterator<Item = &Arc<PendingUnmap>> {
        let pending_unmaps = self.pending_unmaps.iter();
        pending_unmaps.filter(move |unmap| unmap.generation() > generation)
    }

    /// Returns the number of the snapshot, which each change of the window increments.
    #[must_use]
    #[inline]
    pub fn generation(&self) -> u64 {
        self.generation
    }

    #[inline(always)]
    fn find_run(
        &self,
        gpa: Gpa,
        len: u64,
        direction: DmaDirection,
        hint: &mut RegionHint,
    ) -> Option<(&RegionRun, u64)> {
        self.with_run(gpa, len, direction, hint, |run, offset| Some((run, offset)))
    }

    /// Finds the run that contains all of `gpa..gpa+len` and allows `direction`, first by `hint`. Returns what `then` returns
    /// for the run and the offset of `gpa` in it; `None` if there is no such run.
    ///
    /// `then` is called in two places and inlined in both, so the common path tests only once whether there is a run.
    #[inline(always)]
    fn with_run<'a, T>(
        &'a self,
        gpa: Gpa,
        len: u64,
        direction: DmaDirection,
        hint: &mut RegionHint,
        then: impl Fn(&'a RegionRun, u64) -> Option<T>,
    ) -> Option<T> {
        if let Some(run) = self.array.get(hint.0)
            && let Some(offset) = run.offset_of(gpa, len, direction)
        {
            return then(run, offset);
        }
        let (run, offset) = self.search_run(gpa, len, direction, hint)?;
        then(run, offset)
    }

    #[cold]
    fn search_run(
        &self,
        gpa: Gpa,
        len: u64,
        direction: DmaDirection,
        hint: &mut RegionHint,
    ) -> Option<(&RegionRun, u64)> {
        let Some(index) = self
            .array
            .partition_point(|run| run.gpa <= gpa.0)
            .checked_sub(1)
        else {
            // There is no run at or below `gpa`, or the array is empty because the table has more than [`ARRAY_RUNS_MAX`] runs.
            let run = self.by_gpa.get_at_or_before(gpa.0)?;
            return Some((run, run.offset_of(gpa, len, direction)?));
        };
        let run = &self.array[index];
        let offset = run.offset_of(gpa, len, direction)?;
        *hint = RegionHint(index);
        Some((run, offset))
    }

    /// Returns the IOVA of `gpa..gpa+len`, if it lies completely in one run that allows the access.
    #[inline(always)]
    #[must_use]
    pub fn translate(
        &self,
        gpa: Gpa,
        len: u64,
        direction: DmaDirection,
        hint: &mut RegionHint,
    ) -> Option<Iova> {
        self.with_run(gpa, len, direction, hint, |run, offset| {
            Some(Iova(run.iova + offset))
        })
    }

    /// Translates as [`Self::translate`] does, and updates a hint that [translates](IovaHint::translate) further addresses of
    /// the same run.
    #[inline]
    pub fn translate_for_hint(
        &self,
        gpa: Gpa,
        len: u64,
        direction: DmaDirection,
        hint: &mut IovaHint,
    ) -> Option<Iova> {
        if let Some(iova) = hint.translate(gpa, len, direction) {
            return Some(iova);
        }
        let (run, offset) = self.search_run(gpa, len, direction, &mut RegionHint::default())?;
        *hint = IovaHint {
            gpa: run.gpa,
            limits: run.limits,
            iova: run.iova,
        };
        Some(Iova(run.iova + offset))
    }

    /// Returns the IOVA of a guest address and the number of contiguous bytes from there, at most `len`, if the access is
    /// allowed.
    #[must_use]
    #[inline]
    pub fn translate_prefix(
        &self,
        gpa: Gpa,
        len: u64,
        direction: DmaDirection,
        hint: &mut RegionHint,
    ) -> Option<(Iova, u64)> {
        let (run, offset) = self.find_run(gpa, 1, direction, hint)?;
        Some((Iova(run.iova + offset), len.min(run.len - offset)))
    }

    /// Returns the bytes at `gpa..gpa+len`, if they lie completely in one run that allows the access.
    #[inline]
    #[must_use]
    pub fn bytes(
        &self,
        gpa: Gpa,
        len: u64,
        direction: DmaDirection,
        hint: &mut RegionHint,
    ) -> Option<RawBytes<'_>> {
        let size = usize::try_from(len).ok()?;
        self.with_run(gpa, len, direction, hint, |run, offset| {
            run.bytes(offset, size)
        })
    }

    /// Returns the bytes at `gpa` up to the end of their run, at most `len`; `None` if there are none or the run does not allow
    /// the access.
    pub(super) fn bytes_prefix(
        &self,
        gpa: Gpa,
        len: usize,
        direction: DmaDirection,
        hint: &mut RegionHint,
    ) -> Option<RawBytes<'_>> {
        let (run, offset) = self.find_run(gpa, 1, direction, hint)?;
        run.bytes(offset, (run.len - offset).min(len as u64) as usize)
    }

    /// Returns the mapping that holds `gpa..gpa+len` for reading and writing, and the offset in the mapping.
    #[must_use]
    pub fn locate(&self, gpa: Gpa, len: u64) -> Option<(&Arc<Mapping>, usize)> {
        let mut hint = RegionHint::default();
        let (run, offset) = self.find_run(gpa, len, DmaDirection::ToGuest, &mut hint)?;
        run.offset_of(gpa, len, DmaDirection::FromGuest)?;
        Some((&run.mapping, usize::try_from(run.offset + offset).ok()?))
    }

    /// Returns the bytes at an IOVA of this VM, if they lie in one run. For software drives, this does the work of an IOMMU.
    #[inline]
    #[must_use]
    pub fn resolve(&self, iova: u64, len: usize, hint: &mut RegionHint) -> Option<RawBytes<'_>> {
        let (run, offset) = if let Some(run) = self.array.get(hint.0)
            && let Some(offset) = run.offset_of_iova(iova)
        {
            (run, offset)
        } else {
            self.find_run_by_iova(iova, hint)?
        };
        if len as u64 > run.len - offset {
            return None;
        }
        run.bytes(offset, len)
    }

    #[cold]
    fn find_run_by_iova(&self, iova: u64, hint: &mut RegionHint) -> Option<(&RegionRun, u64)> {
        let run = self.by_iova.get_at_or_before(iova)?;
        let offset = run.offset_of_iova(iova)?;
        if let Ok(index) = self.array.binary_search_by_key(&run.gpa, |run| run.gpa) {
            *hint = RegionHint(index);
        }
        Some((run, offset))
    }

    /// Returns the guest address of an IOVA, and the number of bytes that are contiguous from there in both address spaces.
    pub(super) fn iova_to_gpa(&self, iova: u64) -> Option<(Gpa, u64)> {
        let (run, offset) = self.find_run_by_iova(iova, &mut RegionHint::default())?;
        Some((Gpa(run.gpa + offset), run.len - offset))
    }

    /// Returns whether some of the memory was lost, because its file was truncated or pinned pages were freed.
    #[must_use]
    #[inline]
    pub fn is_lost(&self) -> bool {
        self.by_gpa.values().any(|run| run.mapping.is_lost())
    }

    #[cfg(test)]
    pub(super) fn run_count(&self) -> usize {
        self.by_gpa.len()
    }
}
