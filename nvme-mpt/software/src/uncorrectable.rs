//! Blocks that Write Uncorrectable made unreadable until they are written again
//! (NVM 1.0, section 3.2.7).
//!
//! They are remembered as long as the lease that made them. They are not kept in the file: a mark that
//! outlived the write that clears it would lose data, and the other way round only loses the mark. Each
//! lease has room for marks of its own, so a guest takes no room from others. The next guest of a range
//! finds no marks of the one before.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError};

use nvme_mpt::memory::sync::{Mutex, MutexGuard};
use nvme_mpt::range::LbaRange;

/// Ranges of a lease at most. A guest that makes more is told that it cannot.
const MAX_RANGES: usize = 4096;

/// The unreadable blocks of one namespace.
#[derive(Debug, Default)]
pub(crate) struct UncorrectableBlocks {
    /// Parts of leases by their first block. They do not overlap.
    leases: Mutex<BTreeMap<u64, LeaseMarks>>,
    any: AtomicBool,
}

/// The unreadable blocks of one part of a lease.
#[derive(Debug)]
struct LeaseMarks {
    /// The first block behind the part.
    end: u64,
    /// Start and end of each range; they do not touch.
    ranges: BTreeMap<u64, u64>,
    /// Ranges of all parts of the lease.
    used: Arc<AtomicUsize>,
}

/// Room for the marks of one lease. Dropping it makes all blocks of the lease readable.
#[derive(Debug)]
pub(crate) struct MarkRoom {
    blocks: Arc<UncorrectableBlocks>,
    /// First blocks of the lease's parts.
    starts: Mutex<Vec<u64>>,
    used: Arc<AtomicUsize>,
}

impl MarkRoom {
    fn starts(&self) -> MutexGuard<'_, Vec<u64>> {
        // Each change is complete before anything can panic.
        self.starts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes room for the marks of a part that no lease overlaps. A command may reach over the border of a part that it
    /// follows: the two become one.
    pub(crate) fn add(&self, part: LbaRange) {
        let (start, count) = (part.start.0, part.blocks);
        let end = start.saturating_add(count);
        let mut starts = self.starts();
        let mut leases = self.blocks.lock();
        let before = starts.iter().copied().find(|before| {
            let marks = leases.get(before);
            marks.is_some_and(|marks| marks.end == start)
        });
        if let Some(marks) = before.and_then(|before| leases.get_mut(&before)) {
            marks.end = end;
            return;
        }
        let marks = LeaseMarks {
            end,
            ranges: BTreeMap::new(),
            used: self.used.clone(),
        };
        leases.insert(start, marks);
        starts.push(start);
    }
}

impl Drop for MarkRoom {
    fn drop(&mut self) {
        let mut leases = self.blocks.lock();
        for start in &*self.starts() {
            leases.remove(start);
        }
        self.blocks.note(&leases);
    }
}

impl UncorrectableBlocks {
    /// Makes room for the marks of a lease of these parts, which no other lease overlaps.
    pub(crate) fn make_room(self: &Arc<Self>, parts: &[LbaRange]) -> MarkRoom {
        let room = MarkRoom {
            blocks: self.clone(),
            starts: Mutex::default(),
            used: Arc::default(),
        };
        parts.iter().for_each(|part| room.add(*part));
        room
    }

    /// Returns whether there are none, as nearly always: one load.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        !self.any.load(Ordering::Acquire)
    }

    /// Returns whether some block of `start..start+count`, which lies in one part of a lease, cannot be read.
    pub(crate) fn intersects(&self, start: u64, count: u64) -> bool {
        if self.is_empty() {
            return false;
        }
        let end = start + count;
        Self::lease_of(&mut self.lock(), start).is_some_and(|marks| {
            let before = marks.ranges.range(..end).next_back();
            before.is_some_and(|(_, &range_end)| range_end > start)
        })
    }

    /// Makes `start..start+count`, which lies in one part of a lease, unreadable. Returns whether there was room to
    /// remember it.
    #[must_use]
    pub(crate) fn mark(&self, start: u64, count: u64) -> bool {
        let mut leases = self.lock();
        let Some(marks) = Self::lease_of(&mut leases, start) else {
            return false;
        };
        if !marks.has_room() {
            return false;
        }
        marks.cut(start, start + count);
        marks.insert(start, start + count);
        self.any.store(true, Ordering::Release);
        true
    }

    /// Makes `start..start+count`, which lies in one part of a lease, readable, because it was written.
    pub(crate) fn clear(&self, start: u64, count: u64) {
        if self.is_empty() {
            return;
        }
        let mut leases = self.lock();
        if let Some(marks) = Self::lease_of(&mut leases, start) {
            marks.cut(start, start + count);
        }
        self.note(&leases);
    }

    fn lease_of(leases: &mut BTreeMap<u64, LeaseMarks>, block: u64) -> Option<&mut LeaseMarks> {
        let (_, marks) = leases.range_mut(..=block).next_back()?;
        (block < marks.end).then_some(marks)
    }

    fn note(&self, leases: &BTreeMap<u64, LeaseMarks>) {
        let any = leases.values().any(|marks| !marks.ranges.is_empty());
        self.any.store(any, Ordering::Release);
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, LeaseMarks>> {
        // Each change is complete before anything can panic.
        self.leases.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl LeaseMarks {
    fn has_room(&self) -> bool {
        self.used.load(Ordering::Relaxed) < MAX_RANGES
    }

    fn insert(&mut self, start: u64, end: u64) {
        self.ranges.insert(start, end);
        // All of them are changed under one lock.
        self.used.fetch_add(1, Ordering::Relaxed);
    }

    fn remove(&mut self, start: u64) {
        if self.ranges.remove(&start).is_some() {
            self.used.fetch_sub(1, Ordering::Relaxed);
        }
    }

    fn cut(&mut self, start: u64, end: u64) {
        let touched: Vec<(u64, u64)> = self
            .ranges
            .range(..end)
            .rev()
            .take_while(|&(_, &range_end)| range_end > start)
            .map(|(&range_start, &range_end)| (range_start, range_end))
            .collect();
        for (range_start, range_end) in touched {
            self.remove(range_start);
            if range_start < start {
                self.insert(range_start, start);
            }
            // A write in the middle makes two ranges of one. If there is no room for both, the second is lost:
            // a write cannot be refused for it.
            if range_end > end && self.has_room() {
                self.insert(end, range_end);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use nvme_mpt::spec::ids::Lba;

    use super::*;

    fn range(start: u64, blocks: u64) -> LbaRange {
        LbaRange {
            start: Lba(start),
            blocks,
        }
    }
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn it_is_a_set_of_blocks(steps in prop::collection::vec((any::<bool>(), 0..60u64, 1..9u64), 1..60)) {
            let blocks = Arc::new(UncorrectableBlocks::default());
            let _room = blocks.make_room(&[range(0, 80)]);
            let mut model = [false; 80];
            for (mark, start, count) in steps {
                if mark {
                    prop_assert!(blocks.mark(start, count));
                } else {
                    blocks.clear(start, count);
                }
                model[start as usize..(start + count) as usize].fill(mark);
                prop_assert_eq!(blocks.is_empty(), !model.contains(&true));
                for (i, marked) in model.iter().enumerate() {
                    prop_assert_eq!(blocks.intersects(i as u64, 1), *marked);
                }
            }
        }
    }

    #[test]
    fn a_lease_takes_no_room_from_others() {
        let blocks = Arc::new(UncorrectableBlocks::default());
        let greedy = blocks.make_room(&[range(0, 1 << 20)]);
        let modest = blocks.make_room(&[range(1 << 20, 1 << 20)]);
        let marked = (0..1 << 20).step_by(2).take_while(|&at| blocks.mark(at, 1));
        assert_eq!(marked.count(), MAX_RANGES);
        assert!(blocks.mark(1 << 20, 1));
        // Blocks of no lease have no room.
        assert!(!blocks.mark(1 << 21, 1));

        drop(greedy);
        assert!(!blocks.intersects(0, 1 << 20));
        assert!(blocks.intersects(1 << 20, 1));
        let _next = blocks.make_room(&[range(0, 1 << 20)]);
        assert!(!blocks.intersects(0, 1 << 20) && blocks.mark(0, 1));
        drop(modest);
        assert!(!blocks.is_empty());
        blocks.clear(0, 1);
        assert!(blocks.is_empty());
    }

    #[test]
    fn parts_of_a_lease_share_its_room() {
        let blocks = Arc::new(UncorrectableBlocks::default());
        let room = blocks.make_room(&[range(1 << 20, 1 << 20), range(0, 1 << 19)]);
        room.add(range(1 << 21, 1 << 20));
        let parts = [1 << 20, 0, 1 << 21];
        let each = MAX_RANGES as u64 / 4;
        for part in parts {
            assert!((0..each).all(|at| blocks.mark(part + 2 * at, 1)));
        }
        // Over the border of two parts that follow each other.
        let border = 1 << 21;
        assert!(blocks.mark(border - 1, 2) && blocks.intersects(border, 1));
        let marked = (each..2 * each).take_while(|at| blocks.mark(2 * at, 1));
        assert_eq!(marked.count() as u64, each);
        assert!(!blocks.mark(border + 2 * each, 1), "no room");
        blocks.clear(1 << 20, 1);
        assert!(blocks.mark(border + 2 * each, 1));
        drop(room);
        assert!(blocks.is_empty());
    }

    #[test]
    fn writes_into_a_mark_make_no_more_of_them_than_there_is_room_for() {
        let blocks = Arc::new(UncorrectableBlocks::default());
        let _room = blocks.make_room(&[range(0, 1 << 20)]);
        assert!(blocks.mark(0, 1 << 20));
        for at in (1..1 << 20).step_by(2) {
            blocks.clear(at, 1);
            assert!(!blocks.intersects(at, 1));
        }
        let leases = blocks.lock();
        let ranges: usize = leases.values().map(|marks| marks.ranges.len()).sum();
        assert!(ranges <= MAX_RANGES, "{ranges}");
    }
}
