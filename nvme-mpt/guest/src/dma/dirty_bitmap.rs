//! Dirty pages of a region: pages that the function's device has written.

use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

use crate::address::{Gpa, PAGE_SIZE};

/// Contiguous range of dirty pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirtyRange {
    /// Guest address of the first page.
    pub gpa: Gpa,
    /// Length in bytes, a multiple of the page size.
    pub len: u64,
}

/// Dirty pages of one region.
#[derive(Debug)]
pub(super) struct RegionDirtyBitmap {
    /// Guest address of the region.
    pub(super) gpa: u64,
    /// Length of the region in bytes.
    pub(super) len: u64,
    /// Bitmap with one bit per page.
    written: Box<[AtomicU64]>,
}

impl RegionDirtyBitmap {
    pub(super) fn new(gpa: u64, len: u64) -> Self {
        let words = (len / PAGE_SIZE).div_ceil(64);
        let written = (0..words).map(|_| AtomicU64::new(0)).collect();
        Self { gpa, len, written }
    }

    /// Marks the pages of a write as dirty. The write has `len` bytes, at least 1, at `offset` in the region.
    pub(super) fn mark(&self, offset: u64, len: u64) {
        let mut page = offset / PAGE_SIZE;
        let end = (offset + len).div_ceil(PAGE_SIZE);
        while page < end {
            let in_word = (64 - page % 64).min(end - page);
            let bits = (u64::MAX >> (64 - in_word)) << (page % 64);
            // Pages beyond the region are ignored. A bit is set again even if it is already set: only the release of this store
            // makes the written data visible to the thread that takes the bit.
            if let Some(word) = self.written.get((page / 64) as usize) {
                word.fetch_or(bits, Ordering::AcqRel);
            }
            page += in_word;
        }
    }

    /// Adds all dirty pages to `ranges`, and clears their bits.
    pub(super) fn take(&self, ranges: &mut Vec<DirtyRange>) {
        for (index, word) in (0..).zip(&self.written) {
            let mut bits = word.swap(0, Ordering::AcqRel);
            while bits != 0 {
                let first = bits.trailing_zeros();
                let pages = (bits >> first).trailing_ones();
                let page = index * 64 + u64::from(first);
                push_range(ranges, self.gpa + page * PAGE_SIZE, u64::from(pages));
                // All bits below the run of set bits are clear, so the carry clears only the run.
                bits = bits.wrapping_add(1 << first) & bits;
            }
        }
    }
}

/// Adds a range of pages. If the range starts where the last range ends, the last range is extended instead.
fn push_range(ranges: &mut Vec<DirtyRange>, gpa: u64, pages: u64) {
    let len = pages * PAGE_SIZE;
    match ranges.last_mut() {
        Some(last) if last.gpa.0.wrapping_add(last.len) == gpa => last.len += len,
        _ => ranges.push(DirtyRange { gpa: Gpa(gpa), len }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(gpa: u64, pages: u64) -> DirtyRange {
        DirtyRange {
            gpa: Gpa(gpa),
            len: pages * PAGE_SIZE,
        }
    }

    #[test]
    fn runs_of_bits_become_ranges() {
        let pages = RegionDirtyBitmap::new(0, 200 * PAGE_SIZE);
        for run in [0..1, 3..64, 65..66, 127..130, 199..200] {
            pages.mark(run.start * PAGE_SIZE, (run.end - run.start) * PAGE_SIZE);
        }
        let mut ranges = Vec::new();
        pages.take(&mut ranges);
        let expected = [(0, 1), (3, 61), (65, 1), (127, 3), (199, 1)];
        assert_eq!(
            ranges,
            expected.map(|(at, count)| range(at * PAGE_SIZE, count))
        );
        // All bits of the first word, and then pages beyond the region.
        pages.mark(0, 64 * PAGE_SIZE);
        pages.mark(300 * PAGE_SIZE, 1);
        ranges.clear();
        pages.take(&mut ranges);
        assert_eq!(ranges, [range(0, 64)]);
    }
}
