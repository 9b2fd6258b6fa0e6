//! A snapshot of a VM's memory: where guest addresses lie, for us and for the host controller.

use std::sync::Arc;

use super::dirty::DirtyPages;
use crate::address::{Gpa, Iova, PAGE_SIZE};
use crate::iova::IovaRange;
use crate::memory::{Mapping, RawBytes};

/// One region of a VM's memory.
#[derive(Debug)]
pub struct Region {
    pub(super) gpa: u64,
    pub(super) len: u64,
    /// What a device may read or write of it, in bytes: `len` or 0.
    pub(super) limits: [u64; 2],
    pub(super) iova: IovaRange,
    pub(super) mapping: Arc<Mapping>,
}

/// Which way data goes, as the device sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the guest's memory to the drive.
    FromGuest = 0,
    /// From the drive to the guest's memory.
    ToGuest = 1,
}

impl Region {
    /// Offset of `gpa..gpa+len` in the region, if a device may do this with all of it.
    #[inline]
    fn offset_of(&self, gpa: Gpa, len: u64, direction: Direction) -> Option<u64> {
        let offset = gpa.0.wrapping_sub(self.gpa);
        let limit = self.limits[direction as usize];
        (offset < limit && len <= limit - offset).then_some(offset)
    }
}

/// A snapshot of a VM's memory.
#[derive(Debug, Default)]
pub struct RegionTable {
    pub(super) generation: u64,
    /// Sorted by address, not overlapping.
    pub(super) regions: Vec<Arc<Region>>,
    /// Which pages of each region were written, where that is noted.
    pub(super) dirty: Option<Vec<Arc<DirtyPages>>>,
}

/// One region's pages, for one direction: what a loop over a list of pages needs of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RegionPages {
    /// Guest address of the first page.
    pub(crate) first: u64,
    /// Offset of the last byte.
    pub(crate) last_byte: u64,
    /// IOVA of the first page.
    pub(crate) iova: u64,
}

/// Where a lookup found its last region: a place to look first.
#[derive(Clone, Copy, Debug, Default)]
pub struct RegionHint(usize);

impl RegionTable {
    /// Number of the snapshot; each change of the window makes the next one.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.generation
    }

    #[inline]
    pub(super) fn find(
        &self,
        gpa: Gpa,
        len: u64,
        direction: Direction,
        hint: &mut RegionHint,
    ) -> Option<(&Region, u64)> {
        if let Some(region) = self.regions.get(hint.0)
            && let Some(offset) = region.offset_of(gpa, len, direction)
        {
            return Some((region, offset));
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
    ) -> Option<(&Region, u64)> {
        let index = self
            .regions
            .partition_point(|region| region.gpa <= gpa.0)
            .checked_sub(1)?;
        let region = &self.regions[index];
        let offset = region.offset_of(gpa, len, direction)?;
        *hint = RegionHint(index);
        Some((region, offset))
    }

    /// The IOVA of `gpa..gpa+len`, if all of it lies in one region that allows the access.
    #[inline]
    #[must_use]
    pub fn translate(
        &self,
        gpa: Gpa,
        len: u64,
        direction: Direction,
        hint: &mut RegionHint,
    ) -> Option<Iova> {
        let (region, offset) = self.find(gpa, len, direction, hint)?;
        Some(Iova(region.iova.start() + offset))
    }

    /// The region around a page, to translate whole pages by, if it allows the access.
    #[inline]
    #[must_use]
    pub(crate) fn pages_around(
        &self,
        gpa: Gpa,
        direction: Direction,
        hint: &mut RegionHint,
    ) -> Option<RegionPages> {
        let (region, _) = self.find(gpa, PAGE_SIZE, direction, hint)?;
        Some(RegionPages {
            first: region.gpa,
            last_byte: region.limits[direction as usize] - 1,
            iova: region.iova.start(),
        })
    }

    /// The bytes at `gpa..gpa+len`, if all of them lie in one region that allows the access.
    #[inline]
    #[must_use]
    pub fn bytes(
        &self,
        gpa: Gpa,
        len: u64,
        direction: Direction,
        hint: &mut RegionHint,
    ) -> Option<RawBytes<'_>> {
        let (region, offset) = self.find(gpa, len, direction, hint)?;
        region
            .mapping
            .bytes(usize::try_from(offset).ok()?, usize::try_from(len).ok()?)
    }

    /// The mapping that holds `gpa..gpa+len` for reading and writing, and the offset in it.
    #[must_use]
    pub fn locate(&self, gpa: Gpa, len: u64) -> Option<(&Arc<Mapping>, usize)> {
        let mut hint = RegionHint::default();
        let (region, offset) = self.find(gpa, len, Direction::ToGuest, &mut hint)?;
        region.offset_of(gpa, len, Direction::FromGuest)?;
        Some((&region.mapping, usize::try_from(offset).ok()?))
    }

    /// The software IOMMU: the bytes at an IOVA of this VM's, if they lie in one region.
    #[inline]
    #[must_use]
    pub fn resolve(&self, iova: u64, len: usize, hint: &mut RegionHint) -> Option<RawBytes<'_>> {
        let within = |region: &Region| {
            let offset = iova.wrapping_sub(region.iova.start());
            (offset < region.len).then_some(offset)
        };
        if let Some(region) = self.regions.get(hint.0)
            && let Some(offset) = within(region)
        {
            return region.mapping.bytes(offset as usize, len);
        }
        let index = self
            .regions
            .iter()
            .position(|region| within(region).is_some())?;
        *hint = RegionHint(index);
        let region = &self.regions[index];
        region.mapping.bytes(within(region)? as usize, len)
    }

    /// Whether some of the memory was taken away under us (its file was cut short).
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.regions.iter().any(|region| region.mapping.is_lost())
    }
}
