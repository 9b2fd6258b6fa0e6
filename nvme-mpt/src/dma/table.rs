//! A snapshot of a VM's memory: where guest addresses lie, for us and for the host controller.

use std::sync::Arc;

use super::departure::Departure;
use super::notes::Notes;
use super::region::{Place, Region};
use super::sorted::Sorted;
use crate::address::{Gpa, Iova};
use crate::memory::{Mapping, RawBytes};

/// Regions that follow one another in guest memory, in our address space, and in the host
/// controller's: for a translation they are one.
#[derive(Clone, Debug)]
pub(super) struct Run {
    gpa: u64,
    len: u64,
    /// Bytes of it that a device may read or write: `len` or 0.
    limits: [u64; 2],
    iova: u64,
    mapping: Arc<Mapping>,
    /// Offset in the mapping at which it starts.
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

    /// The last guest address in it.
    fn last(&self) -> u64 {
        self.gpa + (self.len - 1)
    }

    /// Returns whether `next` goes on where this ends: in guest memory, here, and for the host controller.
    /// Ranges of IOVAs that were taken one by one do not touch, so the two are parts of one of them.
    fn goes_on_in(&self, next: &Self) -> bool {
        let may = |run: &Self| run.limits.map(|limit| limit > 0);
        self.last().checked_add(1) == Some(next.gpa)
            && self.iova + self.len == next.iova
            && self.offset + self.len == next.offset
            && Arc::ptr_eq(&self.mapping, &next.mapping)
            && may(self) == may(next)
    }

    /// The `len` bytes of it at a guest address.
    fn part(&self, gpa: u64, len: u64) -> Self {
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

    /// This and what [goes on](Self::goes_on_in) behind it.
    fn with(&self, next: &Self) -> Self {
        let len = self.len + next.len;
        Self {
            len,
            ..self.part(self.gpa, len)
        }
    }

    /// Offset of `gpa..gpa+len` in the run, if a device may do this with all of it.
    #[inline(always)]
    fn offset_of(&self, gpa: Gpa, len: u64, direction: Direction) -> Option<u64> {
        offset_of(self.gpa, &self.limits, gpa, len, direction)
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

/// Offset of `gpa..gpa+len` behind the first address of a run, if a device may do this with all of it.
#[inline(always)]
fn offset_of(
    first: u64,
    limits: &[u64; 2],
    gpa: Gpa,
    len: u64,
    direction: Direction,
) -> Option<u64> {
    let offset = gpa.0.wrapping_sub(first);
    let limit = limits[direction as usize];
    (offset < limit && len <= limit - offset).then_some(offset)
}

/// Most runs that lie side by side: most VMs have fewer, and what is translated is looked up among these first.
const FEW: usize = 64;

/// A snapshot of a VM's memory.
///
/// It does not keep the memory mapped: a window does, until none of its users has the snapshot any more.
#[derive(Clone, Debug, Default)]
pub struct RegionTable {
    generation: u64,
    /// All runs by guest address, not overlapping, if they are [`FEW`]; else none.
    few: Vec<Run>,
    by_gpa: Sorted<Arc<Run>>,
    by_iova: Sorted<Arc<Run>>,
    /// Which pages of each region were written, where that is noted.
    pub(super) dirty: Option<Sorted<Arc<Notes>>>,
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

/// Place at which a lookup found its last run, to look there first.
#[derive(Clone, Copy, Debug, Default)]
pub struct RegionHint(usize);

/// Copy of the run in which the last lookup found its place, as far as IOVAs need it. The copy belongs to one table.
/// Another table takes a new hint.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct IovaHint {
    gpa: u64,
    limits: [u64; 2],
    iova: u64,
}

impl IovaHint {
    /// The IOVA of `gpa..gpa+len`, if all of it lies in the copied run, and the run allows the access.
    #[inline(always)]
    pub(crate) fn translate(&self, gpa: Gpa, len: u64, direction: Direction) -> Option<Iova> {
        let offset = offset_of(self.gpa, &self.limits, gpa, len, direction)?;
        Some(Iova(self.iova + offset))
    }

    /// The pages of the copied run, to translate whole pages by, if it allows the access.
    #[inline(always)]
    pub(crate) fn pages(&self, direction: Direction) -> Option<RunPages> {
        Some(RunPages {
            first: self.gpa,
            last_byte: self.limits[direction as usize].checked_sub(1)?,
            iova: self.iova,
        })
    }
}

impl RegionTable {
    /// Makes this the next snapshot, with these regions that went.
    pub(super) fn complete(&mut self, departures: Vec<Arc<Departure>>) {
        self.generation += 1;
        self.departures = departures;
        self.few = match self.by_gpa.len() <= FEW {
            true => self.by_gpa.values().map(|run| Run::clone(run)).collect(),
            false => Vec::new(),
        };
    }

    fn insert(&mut self, run: Run) {
        let run = Arc::new(run);
        self.by_gpa.insert(run.gpa, run.clone());
        self.by_iova.insert(run.iova, run);
    }

    fn remove(&mut self, run: &Run) {
        self.by_gpa.remove(run.gpa);
        self.by_iova.remove(run.iova);
    }

    /// Adds a region that overlaps none.
    pub(super) fn add(&mut self, region: &Region) {
        let mut run = Run::new(region);
        let before = self.by_gpa.at_or_before(run.gpa);
        if let Some(before) = before.filter(|before| before.goes_on_in(&run)).cloned() {
            self.remove(&before);
            run = before.with(&run);
        }
        let next = run.last().checked_add(1);
        let next = next.and_then(|gpa| self.by_gpa.get(gpa));
        if let Some(next) = next.filter(|next| run.goes_on_in(next)).cloned() {
            self.remove(&next);
            run = run.with(&next);
        }
        self.insert(run);
        if let Some(dirty) = &mut self.dirty {
            let Place { gpa, len, .. } = region.place;
            dirty.insert(gpa, Arc::new(Notes::new(gpa, len)));
        }
    }

    /// Takes away a region that was added. Returns its notes.
    pub(super) fn take_away(&mut self, region: &Region) -> Option<Arc<Notes>> {
        let place = &region.place;
        if let Some(run) = self.by_gpa.at_or_before(place.gpa).cloned() {
            self.remove(&run);
            if run.gpa < place.gpa {
                self.insert(run.part(run.gpa, place.gpa - run.gpa));
            }
            if run.last() > place.last() {
                self.insert(run.part(place.last() + 1, run.last() - place.last()));
            }
        }
        self.dirty.as_mut()?.remove(place.gpa)
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

    #[inline(always)]
    fn find(
        &self,
        gpa: Gpa,
        len: u64,
        direction: Direction,
        hint: &mut RegionHint,
    ) -> Option<(&Run, u64)> {
        self.in_run(gpa, len, direction, hint, |run, offset| Some((run, offset)))
    }

    /// Returns what `then` makes of the run that holds `gpa..gpa+len`, and of the offset there.
    ///
    /// Each of the two ways to the run has `then` in line. So the common way tests once whether there is a run.
    #[inline(always)]
    fn in_run<'a, T>(
        &'a self,
        gpa: Gpa,
        len: u64,
        direction: Direction,
        hint: &mut RegionHint,
        then: impl Fn(&'a Run, u64) -> Option<T>,
    ) -> Option<T> {
        if let Some(run) = self.few.get(hint.0)
            && let Some(offset) = run.offset_of(gpa, len, direction)
        {
            return then(run, offset);
        }
        let (run, offset) = self.find_slowly(gpa, len, direction, hint)?;
        then(run, offset)
    }

    #[cold]
    fn find_slowly(
        &self,
        gpa: Gpa,
        len: u64,
        direction: Direction,
        hint: &mut RegionHint,
    ) -> Option<(&Run, u64)> {
        let Some(index) = self
            .few
            .partition_point(|run| run.gpa <= gpa.0)
            .checked_sub(1)
        else {
            // None, or more than a few.
            let run = self.by_gpa.at_or_before(gpa.0)?;
            return Some((run, run.offset_of(gpa, len, direction)?));
        };
        let run = &self.few[index];
        let offset = run.offset_of(gpa, len, direction)?;
        *hint = RegionHint(index);
        Some((run, offset))
    }

    /// The IOVA of `gpa..gpa+len`, if all of it lies in one run that allows the access.
    #[inline(always)]
    #[must_use]
    pub fn translate(
        &self,
        gpa: Gpa,
        len: u64,
        direction: Direction,
        hint: &mut RegionHint,
    ) -> Option<Iova> {
        self.in_run(gpa, len, direction, hint, |run, offset| {
            Some(Iova(run.iova + offset))
        })
    }

    /// As [`Self::translate`], with a hint that [alone](IovaHint::translate) finds the next place in the same run.
    pub(crate) fn translate_for_hint(
        &self,
        gpa: Gpa,
        len: u64,
        direction: Direction,
        hint: &mut IovaHint,
    ) -> Option<Iova> {
        if let Some(iova) = hint.translate(gpa, len, direction) {
            return Some(iova);
        }
        let (run, offset) = self.find_slowly(gpa, len, direction, &mut RegionHint::default())?;
        *hint = IovaHint {
            gpa: run.gpa,
            limits: run.limits,
            iova: run.iova,
        };
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
        let size = usize::try_from(len).ok()?;
        self.in_run(gpa, len, direction, hint, |run, offset| {
            run.bytes(offset, size)
        })
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
        let (run, offset) = match self.few.get(hint.0) {
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
        let run = self.by_iova.at_or_before(iova)?;
        let offset = run.offset_of_iova(iova)?;
        if let Ok(index) = self.few.binary_search_by_key(&run.gpa, |run| run.gpa) {
            *hint = RegionHint(index);
        }
        Some((run, offset))
    }

    /// The guest address of an IOVA, and for how many bytes addresses go on from there.
    pub(super) fn guest_address(&self, iova: u64) -> Option<(Gpa, u64)> {
        let (run, offset) = self.find_iova(iova, &mut RegionHint::default())?;
        Some((Gpa(run.gpa + offset), run.len - offset))
    }

    /// Returns whether some of the memory was taken away under us (its file was cut short).
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.by_gpa.values().any(|run| run.mapping.is_lost())
    }

    #[cfg(test)]
    pub(super) fn runs(&self) -> usize {
        self.by_gpa.len()
    }
}
