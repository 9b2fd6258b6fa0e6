//! Regions that were unmapped, while commands in flight may still use them.

use std::sync::Arc;

use super::lock;
use super::notes::{DirtyRange, Notes};
use super::region::Region;
use crate::address::Gpa;
use crate::memory::sync::Mutex;

/// Regions that one change took away.
///
/// The memory stays mapped, for this process and for the drive, until [`Self::release`].
#[derive(Debug)]
pub(crate) struct Departure {
    generation: u64,
    /// Sorted by IOVA, not overlapping.
    parts: Vec<Part>,
    regions: Mutex<Vec<Arc<Region>>>,
}

/// One region that went.
#[derive(Debug)]
struct Part {
    iova: u64,
    gpa: u64,
    len: u64,
    /// Which of its pages were written, where that is noted.
    notes: Option<Arc<Notes>>,
}

impl Departure {
    /// The departure of regions, each with its notes if there are any. `generation` is that of the first table
    /// without them.
    pub(super) fn new(
        generation: u64,
        regions: impl Iterator<Item = (Arc<Region>, Option<Arc<Notes>>)>,
    ) -> Self {
        let (mut parts, mut kept) = (Vec::new(), Vec::new());
        for (region, notes) in regions {
            parts.push(Part {
                iova: region.iova(),
                gpa: region.place.gpa,
                len: region.place.len,
                notes,
            });
            kept.push(region);
        }
        parts.sort_unstable_by_key(|part| part.iova);
        Self {
            generation,
            parts,
            regions: Mutex::new(kept),
        }
    }

    /// Generation of the first table without the regions.
    pub(crate) fn generation(&self) -> u64 {
        self.generation
    }

    /// The last part that starts before an IOVA.
    fn before(&self, iova: u64) -> Option<&Part> {
        let after = self.parts.partition_point(|part| part.iova < iova);
        self.parts.get(after.checked_sub(1)?)
    }

    /// Returns whether any of `len` bytes at an IOVA, at least one, is in one of the regions.
    pub(crate) fn has_iova(&self, iova: u64, len: u64) -> bool {
        let part = self.before(iova.saturating_add(len));
        part.is_some_and(|part| part.iova + part.len > iova)
    }

    /// Returns whether any of `len` bytes at a guest address is in one of the regions.
    pub(crate) fn has_gpa(&self, gpa: Gpa, len: u64) -> bool {
        let overlaps = |part: &Part| {
            let (first, other) = (part.gpa.max(gpa.0), part.gpa.min(gpa.0));
            let len = if part.gpa < gpa.0 { part.len } else { len };
            first - other < len
        };
        self.parts.iter().any(overlaps)
    }

    /// Notes a write of at most `len` bytes at an IOVA: of as many as lie in one of the regions, which it
    /// returns.
    pub(crate) fn note_written_by_drive(&self, iova: u64, len: u64) -> u64 {
        let part = self.before(iova.saturating_add(1));
        let Some(part) = part.filter(|part| iova - part.iova < part.len) else {
            return 0;
        };
        let offset = iova - part.iova;
        let len = len.min(part.len - offset);
        if let Some(notes) = &part.notes {
            notes.note(offset, len);
        }
        len
    }

    /// Takes the notes of all regions, by ascending address.
    pub(super) fn take_notes(&self, ranges: &mut Vec<DirtyRange>) {
        let notes = self.parts.iter().filter_map(|part| part.notes.as_ref());
        let mut notes: Vec<_> = notes.collect();
        notes.sort_unstable_by_key(|notes| notes.gpa);
        for notes in notes {
            notes.take(ranges);
        }
    }

    /// Gives the memory back: nothing uses it any more. The drive cannot reach it when this returns, also if another
    /// thread gives it back.
    pub(super) fn release(&self) {
        lock(&self.regions).clear();
    }
}
