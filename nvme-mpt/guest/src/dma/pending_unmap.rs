//! Pending unmaps: unmapped regions that in-flight commands may still use.

use std::sync::Arc;

use nvme_mpt_memory::sync::Mutex;

use super::dirty_bitmap::{DirtyRange, RegionDirtyBitmap};
use super::lock;
use super::region::MappedRegion;
use crate::address::Gpa;

/// Pending unmap: regions that one change has unmapped, while commands in flight may still use them.
///
/// The memory stays mapped for this process and for the drive until its release.
#[derive(Debug)]
pub struct PendingUnmap {
    generation: u64,
    /// Unmapped regions sorted by IOVA, not overlapping.
    parts: Vec<UnmappedPart>,
    regions: Mutex<Vec<Arc<MappedRegion>>>,
}

/// Address range of one unmapped region.
#[derive(Debug)]
struct UnmappedPart {
    iova: u64,
    gpa: u64,
    len: u64,
    /// Dirty pages of the region, if the dirty log is on.
    dirty: Option<Arc<RegionDirtyBitmap>>,
}

impl PendingUnmap {
    /// Creates a pending unmap of regions, each with its dirty bitmap if the dirty log is on. `generation` is the number of the
    /// first table that does not have the regions.
    pub(super) fn new(
        generation: u64,
        regions: impl Iterator<Item = (Arc<MappedRegion>, Option<Arc<RegionDirtyBitmap>>)>,
    ) -> Self {
        let (mut parts, mut remaining) = (Vec::new(), Vec::new());
        for (region, notes) in regions {
            parts.push(UnmappedPart {
                iova: region.iova(),
                gpa: region.place.gpa,
                len: region.place.len,
                dirty: notes,
            });
            remaining.push(region);
        }
        parts.sort_unstable_by_key(|part| part.iova);
        Self {
            generation,
            parts,
            regions: Mutex::new(remaining),
        }
    }

    /// Returns the number of the first table that does not have the regions.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Returns the last region that starts before an IOVA.
    fn last_part_before(&self, iova: u64) -> Option<&UnmappedPart> {
        let after = self.parts.partition_point(|part| part.iova < iova);
        self.parts.get(after.checked_sub(1)?)
    }

    /// Returns whether any of the `len` bytes at an IOVA is in one of the regions. `len` is at least 1.
    pub fn overlaps_iova(&self, iova: u64, len: u64) -> bool {
        let part = self.last_part_before(iova.saturating_add(len));
        part.is_some_and(|part| part.iova + part.len > iova)
    }

    /// Returns whether any of the `len` bytes at a guest address is in one of the regions.
    pub fn overlaps_gpa(&self, gpa: Gpa, len: u64) -> bool {
        let overlaps = |part: &UnmappedPart| {
            let (first, other) = (part.gpa.max(gpa.0), part.gpa.min(gpa.0));
            let len = if part.gpa < gpa.0 { part.len } else { len };
            first - other < len
        };
        self.parts.iter().any(overlaps)
    }

    /// Notes a write of at most `len` bytes at an IOVA in the dirty log. Returns the number of noted bytes, which all lie in
    /// one region; 0 if the IOVA is in none of the regions.
    pub fn mark_dirty_iova(&self, iova: u64, len: u64) -> u64 {
        let part = self.last_part_before(iova.saturating_add(1));
        let Some(part) = part.filter(|part| iova - part.iova < part.len) else {
            return 0;
        };
        let offset = iova - part.iova;
        let len = len.min(part.len - offset);
        if let Some(notes) = &part.dirty {
            notes.mark(offset, len);
        }
        len
    }

    /// Adds the dirty pages of all regions to `ranges`, in order of ascending guest addresses, and clears them.
    pub(super) fn take_dirty(&self, ranges: &mut Vec<DirtyRange>) {
        let notes = self.parts.iter().filter_map(|part| part.dirty.as_ref());
        let mut notes: Vec<_> = notes.collect();
        notes.sort_unstable_by_key(|notes| notes.gpa);
        for notes in notes {
            notes.take(ranges);
        }
    }

    /// Unmaps the memory after its last use. On return, the drive cannot access the memory, even if another thread runs this
    /// function at the same time.
    pub(super) fn release(&self) {
        lock(&self.regions).clear();
    }
}
