//! A snapshot of a VM's memory: where guest addresses lie, for us and for the host controller.

use std::sync::Arc;

use super::departure::Departure;
use super::dirty::DirtyPages;
use super::region::Region;
use crate::address::{Gpa, Iova, PAGE_SIZE};
use crate::memory::{Mapping, RawBytes};

/// Regions that follow one another in guest memory, in our address space, and in the host
/// controller's: for a translation they are one.
#[derive(Debug)]
pub(super) struct Run {
    gpa: u64,
    len: u64,
    /// What a device may read or write of it, in bytes: `len` or 0.
    limits: [u64; 2],
    iova: u64,
    mapping: Arc<Mapping>,
    /// Where in the mapping it starts.
    offset: u64,
}

/// Which way data goes, as the device sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the guest's memory to the drive.
    FromGuest = 0,
    /// From the drive to the guest's memory.
    ToGuest = 1,
}

impl Run {
    fn new(region: &Region) -> Self {
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

    /// Adds a region that [continues](Region::continues) the last one, and so has the same rights.
    fn push(&mut self, region: &Region) {
        self.len += region.place.len;
        for limit in self.limits.iter_mut().filter(|limit| **limit > 0) {
            *limit += region.place.len;
        }
    }

    /// Offset of `gpa..gpa+len` in the run, if a device may do this with all of it.
    #[inline]
    fn offset_of(&self, gpa: Gpa, len: u64, direction: Direction) -> Option<u64> {
        let offset = gpa.0.wrapping_sub(self.gpa);
        let limit = self.limits[direction as usize];
        (offset < limit && len <= limit - offset).then_some(offset)
    }

    /// Offset of an IOVA in the run.
    #[inline]
    fn offset_of_iova(&self, iova: u64) -> Option<u64> {
        let offset = iova.wrapping_sub(self.iova);
        (offset < self.len).then_some(offset)
    }

    /// Bytes of the run, which a caller has checked to lie in it.
    #[inline]
    fn bytes(&self, offset: u64, len: usize) -> Option<RawBytes<'_>> {
        self.mapping.bytes((self.offset + offset) as usize, len)
    }
}

/// A snapshot of a VM's memory.
#[derive(Debug, Default)]
pub struct RegionTable {
    generation: u64,
    /// Sorted by guest address, not overlapping.
    runs: Vec<Run>,
    /// Where each run starts for the host controller, and its place in `runs`: sorted.
    by_iova: Vec<(u64, usize)>,
    /// What the runs are made of: sorted by guest address.
    pub(super) regions: Vec<Arc<Region>>,
    /// Which pages of each region were written, where that is noted.
    pub(super) dirty: Option<Vec<Arc<DirtyPages>>>,
    /// Regions that went, of which some user may have commands in flight.
    departures: Vec<Arc<Departure>>,
}

/// One run's pages, for one direction: what a loop over a list of pages needs of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RunPages {
    /// Guest address of the first page.
    pub(crate) first: u64,
    /// Offset of the last byte.
    pub(crate) last_byte: u64,
    /// IOVA of the first page.
    pub(crate) iova: u64,
}

/// Where a lookup found its last run: a place to look first.
#[derive(Clone, Copy, Debug, Default)]
pub struct RegionHint(usize);

impl RegionTable {
    /// The table of regions that are sorted by guest address.
    pub(super) fn new(
        generation: u64,
        regions: Vec<Arc<Region>>,
        dirty: Option<Vec<Arc<DirtyPages>>>,
        departures: Vec<Arc<Departure>>,
    ) -> Self {
        let mut runs: Vec<Run> = Vec::new();
        let mut before: Option<&Region> = None;
        for region in &regions {
            match (runs.last_mut(), before) {
                (Some(run), Some(before)) if region.continues(before) => run.push(region),
                _ => runs.push(Run::new(region)),
            }
            before = Some(region);
        }
        let starts = runs.iter().enumerate();
        let mut by_iova: Vec<_> = starts.map(|(index, run)| (run.iova, index)).collect();
        by_iova.sort_unstable();
        Self {
            generation,
            runs,
            by_iova,
            regions,
            dirty,
            departures,
        }
    }

    /// The departures since another generation that users may have commands in flight of: for a user whose
    /// table was of that generation, all that matter to it.
    pub(crate) fn departures_since(
        &self,
        generation: u64,
    ) -> impl Iterator<Item = &Arc<Departure>> {
        let departures = self.departures.iter();
        departures.filter(move |departure| departure.generation() > generation)
    }

    /// Number of the snapshot; each change of the window makes the next one.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.generation
    }

    #[inline]
    fn find(
        &self,
        gpa: Gpa,
        len: u64,
        direction: Direction,
        hint: &mut RegionHint,
    ) -> Option<(&Run, u64)> {
        if let Some(run) = self.runs.get(hint.0)
            && let Some(offset) = run.offset_of(gpa, len, direction)
        {
            return Some((run, offset));
        }
        self.find_slowly(gpa, len, direction, hint)
    }

    #[cold]
    fn find_slowly(
        &self,
        gpa: Gpa,
        len: u64,
        direction: Direction,
        hint: &mut RegionHint,
    ) -> Option<(&Run, u64)> {
        let index = self
            .runs
            .partition_point(|run| run.gpa <= gpa.0)
            .checked_sub(1)?;
        let run = &self.runs[index];
        let offset = run.offset_of(gpa, len, direction)?;
        *hint = RegionHint(index);
        Some((run, offset))
    }

    /// The IOVA of `gpa..gpa+len`, if all of it lies in one run that allows the access.
    #[inline]
    #[must_use]
    pub fn translate(
        &self,
        gpa: Gpa,
        len: u64,
        direction: Direction,
        hint: &mut RegionHint,
    ) -> Option<Iova> {
        let (run, offset) = self.find(gpa, len, direction, hint)?;
        Some(Iova(run.iova + offset))
    }

    /// The IOVA of a guest address, and for how many bytes, of `len` at most, addresses go on from
    /// there, if the access is allowed.
    #[must_use]
    pub(crate) fn translate_some(
        &self,
        gpa: Gpa,
        len: u64,
        direction: Direction,
        hint: &mut RegionHint,
    ) -> Option<(Iova, u64)> {
        let (run, offset) = self.find(gpa, 1, direction, hint)?;
        Some((Iova(run.iova + offset), len.min(run.len - offset)))
    }

    /// The run around a page, to translate whole pages by, if it allows the access.
    #[inline]
    #[must_use]
    pub(crate) fn pages_around(
        &self,
        gpa: Gpa,
        direction: Direction,
        hint: &mut RegionHint,
    ) -> Option<RunPages> {
        let (run, _) = self.find(gpa, PAGE_SIZE, direction, hint)?;
        Some(RunPages {
            first: run.gpa,
            last_byte: run.limits[direction as usize] - 1,
            iova: run.iova,
        })
    }

    /// The bytes at `gpa..gpa+len`, if all of them lie in one run that allows the access.
    #[inline]
    #[must_use]
    pub fn bytes(
        &self,
        gpa: Gpa,
        len: u64,
        direction: Direction,
        hint: &mut RegionHint,
    ) -> Option<RawBytes<'_>> {
        let (run, offset) = self.find(gpa, len, direction, hint)?;
        run.bytes(offset, usize::try_from(len).ok()?)
    }

    /// The bytes from `gpa` on, `len` at most, that lie in one run, if it allows the access.
    pub(super) fn some_bytes(
        &self,
        gpa: Gpa,
        len: usize,
        direction: Direction,
        hint: &mut RegionHint,
    ) -> Option<RawBytes<'_>> {
        let (run, offset) = self.find(gpa, 1, direction, hint)?;
        run.bytes(offset, (run.len - offset).min(len as u64) as usize)
    }

    /// The mapping that holds `gpa..gpa+len` for reading and writing, and the offset in it.
    #[must_use]
    pub fn locate(&self, gpa: Gpa, len: u64) -> Option<(&Arc<Mapping>, usize)> {
        let mut hint = RegionHint::default();
        let (run, offset) = self.find(gpa, len, Direction::ToGuest, &mut hint)?;
        run.offset_of(gpa, len, Direction::FromGuest)?;
        Some((&run.mapping, usize::try_from(run.offset + offset).ok()?))
    }

    /// The software IOMMU: the bytes at an IOVA of this VM's, if they lie in one run.
    #[inline]
    #[must_use]
    pub fn resolve(&self, iova: u64, len: usize, hint: &mut RegionHint) -> Option<RawBytes<'_>> {
        let (run, offset) = match self.runs.get(hint.0) {
            Some(run) if let Some(offset) = run.offset_of_iova(iova) => (run, offset),
            _ => self.find_iova(iova, hint)?,
        };
        if len as u64 > run.len - offset {
            return None;
        }
        run.bytes(offset, len)
    }

    #[cold]
    fn find_iova(&self, iova: u64, hint: &mut RegionHint) -> Option<(&Run, u64)> {
        let after = self.by_iova.partition_point(|(start, _)| *start <= iova);
        let (_, index) = self.by_iova[after.checked_sub(1)?];
        let run = &self.runs[index];
        let offset = run.offset_of_iova(iova)?;
        *hint = RegionHint(index);
        Some((run, offset))
    }

    /// The guest address of an IOVA, and for how many bytes addresses go on from there.
    pub(super) fn guest_address(&self, iova: u64) -> Option<(Gpa, u64)> {
        let (run, offset) = self.find_iova(iova, &mut RegionHint::default())?;
        Some((Gpa(run.gpa + offset), run.len - offset))
    }

    /// Whether some of the memory was taken away under us (its file was cut short).
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.runs.iter().any(|run| run.mapping.is_lost())
    }

    #[cfg(test)]
    pub(super) fn runs(&self) -> usize {
        self.runs.len()
    }
}
