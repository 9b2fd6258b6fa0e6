//! Blocks that Write Uncorrectable made unreadable until they are written again (NVM 1.0, section 3.2.7).
//!
//! A *mark* makes a range of blocks uncorrectable: reads of these blocks fail. A mark is part of the drive's content and lasts
//! as long as the content, so the ledger stores it. A command that makes a mark, or that writes marked blocks, completes only
//! when the change of marks is durable in the ledger. If a write completed before its mark is removed, a crash would make the
//! written data unreadable. If the mark were removed before the data is durable, a crash would make old data readable. So the
//! data becomes durable first, then the mark is removed, and then the write completes.
//!
//! Pollers change the marks in memory and never wait. Another thread stores all marks of a lease
//! ([`LeaseMarkRegistration::store`]), in one write for all commands that wait at that time. If the store fails, these commands
//! fail, and the marks in memory are reset to those in the ledger.
//!
//! Each lease has a limit of marks of its own, so a guest cannot exhaust the marks of another guest.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use nvme_lease::range::BlockRange;
use nvme_mpt_memory::sync::{AtomicBool, Mutex, MutexGuard};
use nvme_spec::ids::Lba;

/// Maximum number of a lease's ranges with marks, which bounds the lease's space in the ledger. A command that would exceed it
/// fails.
const MAX_RANGES: usize = 1024;

/// Maximum number of failed stores that a lease remembers, until the commands that wait for them have seen the failure.
const FAILURES_MAX: usize = 64;

/// The uncorrectable blocks of one namespace.
#[derive(Debug, Default)]
pub(crate) struct UncorrectableBlocks {
    state: Mutex<UncorrectableState>,
    /// True if any lease has marks, in memory or in the ledger. Commands check this before they take the lock.
    has_marks: AtomicBool,
}

#[derive(Debug, Default)]
struct UncorrectableState {
    /// Contiguous ranges of blocks that belong to leases, by their first block. They do not overlap.
    parts: BTreeMap<u64, UncorrectableLeasePart>,
    leases: BTreeMap<u64, LeaseUncorrectableBlocks>,
    next_lease: u64,
}

/// Contiguous range of blocks that belongs to a lease.
#[derive(Debug)]
struct UncorrectableLeasePart {
    /// First block after the range.
    end: u64,
    lease: u64,
}

/// Callback by which another thread stores the marks of a lease in the ledger.
struct MarkStoreRequest(Box<dyn Fn() + Send + Sync>);

impl fmt::Debug for MarkStoreRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Ask")
    }
}

/// The marks of one lease, in memory and in the ledger.
#[derive(Debug, Default)]
struct LeaseUncorrectableBlocks {
    current: BlockRangeSet,
    /// Marks that the ledger has.
    stored: BlockRangeSet,
    /// Number of the latest change of the lease's marks. Changes are counted from 1.
    last_change: u64,
    /// Number of the latest change that the ledger has stored.
    stored_change: u64,
    /// For each failed store, the numbers of the first and of the last change that it should have stored.
    failures: Vec<(u64, u64)>,
    /// Callback that requests a store of the marks; `None` if the marks are never stored, and end with the lease.
    request_store: Option<MarkStoreRequest>,
    /// True from the request for a store until the store begins, so that it is not requested twice.
    is_store_requested: bool,
}

/// A change of marks by a command. The command waits until the ledger has stored the change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct UncorrectableMarkChange {
    lease: u64,
    number: u64,
}

/// Registration of one lease's marks. Dropping it removes the marks from memory.
#[derive(Debug)]
pub(crate) struct LeaseMarkRegistration {
    blocks: Arc<UncorrectableBlocks>,
    lease: u64,
}

impl LeaseMarkRegistration {
    /// Adds a contiguous range of blocks to the lease. It must not overlap any other range. If a range of the lease ends where
    /// the added one begins, both become one range, because a command may cross the border.
    pub(crate) fn add(&self, part: BlockRange) {
        let (start, end) = bounds(&part);
        let mut state = self.blocks.lock();
        let its = state.parts.values_mut();
        let before = its
            .filter(|part| part.lease == self.lease)
            .find(|part| part.end == start);
        if let Some(before) = before {
            before.end = end;
            return;
        }
        let lease = self.lease;
        state
            .parts
            .insert(start, UncorrectableLeasePart { end, lease });
    }

    /// Restores the marks that the ledger has. From now on, each change of the marks calls `ask`, which must make another
    /// thread call [`store`](Self::store).
    pub(crate) fn restore(&self, marks: &[BlockRange], ask: Box<dyn Fn() + Send + Sync>) {
        let mut state = self.blocks.lock();
        if let Some(lease) = state.leases.get_mut(&self.lease) {
            for (start, end) in marks.iter().map(bounds) {
                lease.current.remove(start, end);
                lease.current.insert(start, end);
            }
            lease.stored = lease.current.clone();
            lease.request_store = Some(MarkStoreRequest(ask));
        }
        self.blocks.update_has_marks(&state);
    }

    /// Makes the present marks durable by calling `store`, and lets the commands that wait for them continue.
    pub(crate) fn store(&self, store: &mut dyn FnMut(&[BlockRange]) -> io::Result<()>) {
        let (marks, change) = {
            let mut state = self.blocks.lock();
            let Some(lease) = state.leases.get_mut(&self.lease) else {
                return;
            };
            lease.is_store_requested = false;
            if lease.is_settled() {
                return;
            }
            (lease.current.clone(), lease.last_change)
        };
        let stored = store(&marks.to_vec());
        let mut state = self.blocks.lock();
        if let Some(lease) = state.leases.get_mut(&self.lease) {
            match stored {
                Ok(()) => {
                    lease.stored = marks;
                    lease.stored_change = change;
                }
                Err(_) => lease.revert(),
            }
        }
        self.blocks.update_has_marks(&state);
    }
}

impl Drop for LeaseMarkRegistration {
    fn drop(&mut self) {
        let mut state = self.blocks.lock();
        state.parts.retain(|_, part| part.lease != self.lease);
        let ended = state.leases.remove(&self.lease);
        self.blocks.update_has_marks(&state);
        drop(state);
        // Dropped outside the lock, because the callback `request_store` may own values whose drop has effects.
        drop(ended);
    }
}

impl UncorrectableBlocks {
    /// Registers a lease with its ranges of blocks. No other registered lease may overlap them.
    pub(crate) fn register_lease(self: &Arc<Self>, parts: &[BlockRange]) -> LeaseMarkRegistration {
        let mut state = self.lock();
        let lease = state.next_lease;
        state.next_lease += 1;
        state
            .leases
            .insert(lease, LeaseUncorrectableBlocks::default());
        drop(state);
        let registration = LeaseMarkRegistration {
            blocks: self.clone(),
            lease,
        };
        parts.iter().for_each(|part| registration.add(*part));
        registration
    }

    /// Returns true if no lease has marks. This is the usual case, and costs one atomic load.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        !self.has_marks.load(Ordering::Acquire)
    }

    /// Returns whether any block of `start..start+count` is uncorrectable. The blocks must lie in one contiguous range of a
    /// lease.
    pub(crate) fn intersects(&self, start: u64, count: u64) -> bool {
        if self.is_empty() {
            return false;
        }
        let mut state = self.lock();
        let lease = state.find_lease(start);
        lease.is_some_and(|(_, lease)| lease.current.intersects(start, start + count))
    }

    /// Returns whether a write of `start..start+count` must [clear](Self::clear) marks, in memory or in the ledger. The blocks
    /// must lie in one contiguous range of a lease.
    #[inline]
    pub(crate) fn needs_clear(&self, start: u64, count: u64) -> bool {
        !self.is_empty() && self.has_marks_in(start, start + count)
    }

    #[cold]
    fn has_marks_in(&self, start: u64, end: u64) -> bool {
        let mut state = self.lock();
        let lease = state.find_lease(start);
        lease.is_some_and(|(_, lease)| lease.has_marks_in(start, end))
    }

    /// Makes `start..start+count` uncorrectable. The blocks must lie in one contiguous range of a lease. Returns the change
    /// that the ledger must store before the command completes; `None` if the lease has its maximum number of marks.
    pub(crate) fn mark(&self, start: u64, count: u64) -> Option<UncorrectableMarkChange> {
        let mut state = self.lock();
        let (key, lease) = state.find_lease(start)?;
        if !lease.current.has_space() {
            return None;
        }
        lease.current.remove(start, start + count);
        lease.current.insert(start, start + count);
        let change = lease.begin_change(key);
        self.has_marks.store(true, Ordering::Release);
        Some(change)
    }

    /// Makes `start..start+count` readable after a write. The blocks must lie in one contiguous range of a lease. Returns the
    /// change that the ledger must store before the command completes; `None` if the blocks had no marks.
    pub(crate) fn clear(&self, start: u64, count: u64) -> Option<UncorrectableMarkChange> {
        if self.is_empty() {
            return None;
        }
        let mut state = self.lock();
        let (key, lease) = state.find_lease(start)?;
        if !lease.has_marks_in(start, start + count) {
            return None;
        }
        lease.current.remove(start, start + count);
        let change = lease.begin_change(key);
        self.update_has_marks(&state);
        Some(change)
    }

    /// Returns the result of a change; `None` if the change is not stored yet.
    ///
    /// # Errors
    /// Returns an error if the change could not be stored and was reverted.
    pub(crate) fn change_result(&self, change: UncorrectableMarkChange) -> Option<Result<(), ()>> {
        let state = self.lock();
        // An ended lease has no marks any more.
        let lease = state.leases.get(&change.lease)?;
        lease.change_result(change.number)
    }

    fn update_has_marks(&self, state: &UncorrectableState) {
        let any = state
            .leases
            .values()
            .any(LeaseUncorrectableBlocks::has_marks);
        self.has_marks.store(any, Ordering::Release);
    }

    fn lock(&self) -> MutexGuard<'_, UncorrectableState> {
        // The state is consistent at each point at which a panic can occur.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl UncorrectableState {
    /// Returns the key and the marks of the lease to which a block belongs; `None` if it belongs to no lease.
    fn find_lease(&mut self, block: u64) -> Option<(u64, &mut LeaseUncorrectableBlocks)> {
        let (_, part) = self.parts.range(..=block).next_back()?;
        let key = (block < part.end).then_some(part.lease)?;
        Some((key, self.leases.get_mut(&key)?))
    }
}

impl LeaseUncorrectableBlocks {
    /// Returns whether any block of a range has a mark, in memory or in the ledger. A mark that was cleared in memory stays in
    /// the ledger until the change is stored.
    fn has_marks_in(&self, start: u64, end: u64) -> bool {
        self.current.intersects(start, end) || self.stored.intersects(start, end)
    }

    fn has_marks(&self) -> bool {
        !self.current.0.is_empty() || !self.stored.0.is_empty()
    }

    fn is_settled(&self) -> bool {
        self.change_result(self.last_change).is_some()
    }

    /// Gives a change of the lease's marks its number, and requests a store.
    fn begin_change(&mut self, lease: u64) -> UncorrectableMarkChange {
        self.last_change += 1;
        let number = self.last_change;
        match &self.request_store {
            None => {
                self.stored = self.current.clone();
                self.stored_change = number;
            }
            Some(_) if self.is_store_requested => {}
            Some(MarkStoreRequest(ask)) => {
                ask();
                self.is_store_requested = true;
            }
        }
        UncorrectableMarkChange { lease, number }
    }

    /// Reverts the marks in memory to those in the ledger, after a failed store.
    fn revert(&mut self) {
        let first = self.failures.last().map_or(0, |(_, last)| *last);
        let first = first.max(self.stored_change) + 1;
        if self.failures.len() >= FAILURES_MAX {
            self.failures.remove(0);
        }
        self.failures.push((first, self.last_change));
        self.current = self.stored.clone();
    }

    fn change_result(&self, number: u64) -> Option<Result<(), ()>> {
        let failed = |(first, last): &(u64, u64)| (*first..=*last).contains(&number);
        if self.failures.iter().any(failed) {
            return Some(Err(()));
        }
        (number <= self.stored_change).then_some(Ok(()))
    }
}

fn bounds(range: &BlockRange) -> (u64, u64) {
    let start = range.start.0;
    (start, start.saturating_add(range.blocks))
}

/// Set of blocks as disjoint ranges: a map from the start of each range to its end.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct BlockRangeSet(BTreeMap<u64, u64>);

impl BlockRangeSet {
    fn has_space(&self) -> bool {
        self.0.len() < MAX_RANGES
    }

    fn to_vec(&self) -> Vec<BlockRange> {
        let ranges = self.0.iter().map(|(&start, &end)| BlockRange {
            start: Lba(start),
            blocks: end - start,
        });
        ranges.collect()
    }

    fn insert(&mut self, start: u64, end: u64) {
        self.0.insert(start, end);
    }

    fn intersects(&self, start: u64, end: u64) -> bool {
        let before = self.0.range(..end).next_back();
        before.is_some_and(|(_, &range_end)| range_end > start)
    }

    fn remove(&mut self, start: u64, end: u64) {
        let touched: Vec<(u64, u64)> = self
            .0
            .range(..end)
            .rev()
            .take_while(|&(_, &range_end)| range_end > start)
            .map(|(&range_start, &range_end)| (range_start, range_end))
            .collect();
        for (range_start, range_end) in touched {
            self.0.remove(&range_start);
            if range_start < start {
                self.insert(range_start, start);
            }
            // A write into the middle of a range splits the range. At the limit of ranges, the part behind the write loses its
            // mark, because the write cannot be refused.
            if range_end > end && self.has_space() {
                self.insert(end, range_end);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    fn range(start: u64, blocks: u64) -> BlockRange {
        BlockRange {
            start: Lba(start),
            blocks,
        }
    }
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn it_is_a_set_of_blocks(steps in prop::collection::vec((any::<bool>(), 0..60u64, 1..9u64), 1..60)) {
            let blocks = Arc::new(UncorrectableBlocks::default());
            let _room = blocks.register_lease(&[range(0, 80)]);
            let mut model = [false; 80];
            for (mark, start, count) in steps {
                let bytes = start as usize..(start + count) as usize;
                if mark {
                    let change = blocks.mark(start, count).unwrap();
                    prop_assert_eq!(blocks.change_result(change), Some(Ok(())));
                } else {
                    let had = model[bytes.clone()].contains(&true);
                    prop_assert_eq!(blocks.needs_clear(start, count), had);
                    prop_assert_eq!(blocks.clear(start, count).is_some(), had);
                }
                model[bytes].fill(mark);
                prop_assert_eq!(blocks.is_empty(), !model.contains(&true));
                for (i, marked) in model.iter().enumerate() {
                    prop_assert_eq!(blocks.intersects(i as u64, 1), *marked);
                }
            }
        }
    }

    /// Creates a lease of 80 blocks whose marks the ledger stores. Also returns the number of requested stores, as it counts
    /// on.
    fn lease_with_marks(
        marks: &[BlockRange],
    ) -> (
        Arc<UncorrectableBlocks>,
        LeaseMarkRegistration,
        Arc<AtomicUsize>,
    ) {
        let blocks = Arc::new(UncorrectableBlocks::default());
        let registration = blocks.register_lease(&[range(0, 80)]);
        let request_count = Arc::new(AtomicUsize::new(0));
        let count = request_count.clone();
        registration.restore(
            marks,
            Box::new(move || {
                count.fetch_add(1, Ordering::Relaxed);
            }),
        );
        (blocks, registration, request_count)
    }

    #[test]
    fn a_change_ends_when_it_is_stored() {
        let (blocks, registration, request_count) = lease_with_marks(&[range(4, 2)]);
        assert!(blocks.intersects(5, 1));
        let mark = blocks.mark(10, 1).unwrap();
        assert!(blocks.intersects(10, 1), "at once");
        let clear = blocks.clear(4, 1).unwrap();
        assert!(!blocks.intersects(4, 1) && blocks.intersects(5, 1));
        assert_eq!(request_count.load(Ordering::Relaxed), 1, "once for both");
        assert_eq!(
            (blocks.change_result(mark), blocks.change_result(clear)),
            (None, None)
        );
        // The ledger has the mark until the change is stored, so another write of the block waits as well.
        let again = blocks.clear(4, 1).unwrap();
        let mut between = None;
        registration.store(&mut |marks| {
            assert_eq!(marks, [range(5, 1), range(10, 1)]);
            between = blocks.mark(20, 1);
            Ok(())
        });
        for change in [mark, clear, again] {
            assert_eq!(blocks.change_result(change), Some(Ok(())));
        }
        assert_eq!(
            blocks.change_result(between.unwrap()),
            None,
            "it came too late"
        );
        assert_eq!(request_count.load(Ordering::Relaxed), 2);
        assert_eq!(blocks.clear(4, 1), None, "there is nothing to wait for");
        registration.store(&mut |marks| {
            assert_eq!(marks.len(), 3);
            Ok(())
        });
        assert_eq!(blocks.change_result(between.unwrap()), Some(Ok(())));
        registration.store(&mut |_| panic!("nothing has changed"));
    }

    #[test]
    fn changes_that_cannot_be_stored_are_taken_back() {
        let (blocks, registration, _) = lease_with_marks(&[range(4, 2)]);
        let fails = |registration: &LeaseMarkRegistration| {
            registration.store(&mut |_| Err(io::ErrorKind::StorageFull.into()))
        };
        let changes = [blocks.mark(10, 1), blocks.clear(4, 2)].map(Option::unwrap);
        fails(&registration);
        for change in changes {
            assert_eq!(blocks.change_result(change), Some(Err(())));
        }
        assert!(!blocks.intersects(10, 1));
        assert!(blocks.intersects(4, 1), "as the ledger has it");
        let next = blocks.clear(4, 2).unwrap();
        registration.store(&mut |marks| {
            assert_eq!(marks, []);
            Ok(())
        });
        assert_eq!(blocks.change_result(next), Some(Ok(())));
        let last = blocks.mark(7, 1).unwrap();
        fails(&registration);
        assert_eq!(blocks.change_result(last), Some(Err(())));
        for change in changes {
            assert_eq!(blocks.change_result(change), Some(Err(())), "they stay so");
        }
        assert_eq!(blocks.change_result(next), Some(Ok(())));
        assert!(blocks.is_empty());
    }

    #[test]
    fn a_lease_takes_no_room_from_others() {
        let blocks = Arc::new(UncorrectableBlocks::default());
        let greedy = blocks.register_lease(&[range(0, 1 << 20)]);
        let modest = blocks.register_lease(&[range(1 << 20, 1 << 20)]);
        let marked = (0..1 << 20)
            .step_by(2)
            .take_while(|&at| blocks.mark(at, 1).is_some());
        assert_eq!(marked.count(), MAX_RANGES);
        assert!(blocks.mark(1 << 20, 1).is_some());
        // Blocks without a lease cannot have marks.
        assert!(blocks.mark(1 << 21, 1).is_none());

        drop(greedy);
        assert!(!blocks.intersects(0, 1 << 20));
        assert!(blocks.intersects(1 << 20, 1));
        let _next = blocks.register_lease(&[range(0, 1 << 20)]);
        assert!(!blocks.intersects(0, 1 << 20) && blocks.mark(0, 1).is_some());
        drop(modest);
        assert!(!blocks.is_empty());
        blocks.clear(0, 1);
        assert!(blocks.is_empty());
    }

    #[test]
    fn parts_of_a_lease_share_its_room() {
        let blocks = Arc::new(UncorrectableBlocks::default());
        let registration = blocks.register_lease(&[range(1 << 20, 1 << 20), range(0, 1 << 19)]);
        registration.add(range(1 << 21, 1 << 20));
        let parts = [1 << 20, 0, 1 << 21];
        let each = MAX_RANGES as u64 / 4;
        for part in parts {
            assert!((0..each).all(|at| blocks.mark(part + 2 * at, 1).is_some()));
        }
        // The range crosses the border of two adjacent parts.
        let border = 1 << 21;
        assert!(blocks.mark(border - 1, 2).is_some() && blocks.intersects(border, 1));
        let marked = (each..2 * each).take_while(|at| blocks.mark(2 * at, 1).is_some());
        assert_eq!(marked.count() as u64, each);
        assert!(blocks.mark(border + 2 * each, 1).is_none(), "no room");
        blocks.clear(1 << 20, 1);
        assert!(blocks.mark(border + 2 * each, 1).is_some());
        drop(registration);
        assert!(blocks.is_empty());
    }

    #[test]
    fn writes_into_marks_do_not_exceed_the_mark_capacity() {
        let blocks = Arc::new(UncorrectableBlocks::default());
        let registration = blocks.register_lease(&[range(0, 1 << 20)]);
        assert!(blocks.mark(0, 1 << 20).is_some());
        for at in (1..1 << 20).step_by(2) {
            blocks.clear(at, 1);
            assert!(!blocks.intersects(at, 1));
        }
        let state = blocks.lock();
        let ranges = state.leases[&registration.lease].current.0.len();
        assert!(ranges <= MAX_RANGES, "{ranges}");
    }
}
