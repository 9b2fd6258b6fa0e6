//! Mutual exclusion of writes within a lease. It is needed for writes of partial blocks, which read, modify and write the
//! block. Two leases share no block, so the exclusion covers the queues of one lease only.
//!
//! A partial change reads a block, modifies it and writes it back. This would undo a write of the block that happens in
//! between. Partial changes are rare. So while there are none, all other writes take a fast lane: each queue increments a
//! counter of its own (its *lane*), and then checks for a partial change. A partial change is first announced, and then waits
//! until it has seen each lane at zero. So of a write on a lane and a partial change, at least one sees the other.
//!
//! While there are partial changes, each change is entered in a list, in order of arrival. A change may begin when no earlier
//! entry of the list excludes it. Two changes exclude each other if they overlap and one of them is partial. A command holds at
//! most one claim, and waits for nothing else while it holds the claim, so there is no deadlock.
//!
//! When a change is entered, the earlier entries that exclude it are counted. So the cost of checking whether a change may
//! begin does not depend on the length of the list. Entering and removing a change cost more in a longer list, so the number of
//! entries is limited for each queue.

use std::sync::{Arc, PoisonError};

use crate::sync::{AtomicBool, AtomicUsize, Mutex, MutexGuard, Ordering, fence};

/// A change that a command makes to a range of bytes of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BlockChange {
    pub(super) start: u64,
    pub(super) end: u64,
    /// True for a partial change: a read-modify-write of a block, which excludes every other change of the block.
    pub(super) is_partial: bool,
}

impl BlockChange {
    fn has_conflict_with(&self, other: &Self) -> bool {
        (self.is_partial || other.is_partial) && self.start < other.end && other.start < self.end
    }
}

/// Claim of a command to change blocks: a permission, or a place in the list of changes while the command waits.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) enum BlockChangeClaim {
    /// The command changes no blocks.
    #[default]
    None,
    /// The change is counted on the queue's fast lane (see the module), and may begin.
    FastLane,
    /// The change has the entry with this number in the list of changes.
    Listed(u64),
}

/// Number of a queue's list entries from which on the queue starts no further command. Commands that have already started may
/// exceed it.
pub(super) const LISTED_MAX: usize = 64;

/// Fast lane of one queue: a counter of the queue's changes that are in progress without an entry in the list of changes.
#[derive(Debug)]
pub(super) struct QueueFastLane {
    /// Number of the queue's changes that are in progress on the fast lane.
    changes: AtomicUsize,
    /// Number of the queue's entries in the list of changes.
    listed: AtomicUsize,
    /// True if the queue has made transfers since the last call of [`FileFastLanes::take_transfers`].
    has_transferred: AtomicBool,
}

/// Fast lanes of all queues of a file, of all leases.
#[derive(Debug)]
pub(super) struct FileFastLanes(Mutex<Vec<Arc<QueueFastLane>>>);

impl Default for FileFastLanes {
    fn default() -> Self {
        Self(Mutex::new(Vec::new()))
    }
}

impl FileFastLanes {
    pub(super) fn add(&self, lane: &Arc<QueueFastLane>) {
        self.lanes().push(lane.clone());
    }

    pub(super) fn remove(&self, lane: &Arc<QueueFastLane>) {
        self.lanes().retain(|other| !Arc::ptr_eq(other, lane));
    }

    /// Returns whether any queue of the file has made transfers since the last call.
    pub(super) fn take_transfers(&self) -> bool {
        let mut any = false;
        for lane in &*self.lanes() {
            any |= lane.has_transferred.swap(false, Ordering::Relaxed);
        }
        any
    }

    fn lanes(&self) -> MutexGuard<'_, Vec<Arc<QueueFastLane>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug)]
struct ListedChange {
    number: u64,
    change: BlockChange,
    /// Number of earlier entries that exclude this change and are still in the list.
    blocker_count: usize,
    /// For a partial change: true once each fast lane was seen at zero since the change was listed.
    has_seen_lanes_empty: bool,
}

#[derive(Debug, Default)]
struct ListedChanges {
    /// Entries in ascending order of their numbers.
    entries: Vec<ListedChange>,
    next_number: u64,
    lanes: Vec<Arc<QueueFastLane>>,
}

/// Claims for changes of one lease's blocks.
#[derive(Debug)]
pub(super) struct LeaseChangeClaims {
    /// Number of partial changes in the list. While it is not 0, no change takes the fast lane.
    partial_count: AtomicUsize,
    list: Mutex<ListedChanges>,
}

impl Default for LeaseChangeClaims {
    fn default() -> Self {
        Self {
            partial_count: AtomicUsize::new(0),
            list: Mutex::new(ListedChanges::default()),
        }
    }
}

impl LeaseChangeClaims {
    /// Creates the fast lane of a new queue.
    pub(super) fn open_lane(&self) -> Arc<QueueFastLane> {
        let lane = Arc::new(QueueFastLane {
            changes: AtomicUsize::new(0),
            listed: AtomicUsize::new(0),
            has_transferred: AtomicBool::new(false),
        });
        self.list().lanes.push(lane.clone());
        lane
    }

    pub(super) fn close_lane(&self, lane: &Arc<QueueFastLane>) {
        self.list().lanes.retain(|other| !Arc::ptr_eq(other, lane));
    }

    /// Enters a change. Also returns whether the change may begin immediately. If not, it may begin when [`Self::can_begin`]
    /// returns `true`.
    #[inline]
    pub(super) fn enter(
        &self,
        lane: &QueueFastLane,
        change: BlockChange,
    ) -> (BlockChangeClaim, bool) {
        if !change.is_partial {
            add_to_counter(&lane.changes, 1);
            fence(Ordering::SeqCst);
            if self.partial_count.load(Ordering::Acquire) == 0 {
                return (BlockChangeClaim::FastLane, true);
            }
            add_to_counter(&lane.changes, usize::MAX);
        }
        self.enter_list(lane, change)
    }

    #[cold]
    fn enter_list(&self, lane: &QueueFastLane, change: BlockChange) -> (BlockChangeClaim, bool) {
        let mut list = self.list();
        add_to_counter(&lane.listed, 1);
        if change.is_partial {
            let partial = self.partial_count.load(Ordering::Relaxed);
            self.partial_count.store(partial + 1, Ordering::Relaxed);
            fence(Ordering::SeqCst);
        }
        let number = list.next_number;
        list.next_number += 1;
        let earlier = list.entries.iter();
        let waits_for = earlier.filter(|entry| entry.change.has_conflict_with(&change));
        let waits_for = waits_for.count();
        list.entries.push(ListedChange {
            number,
            change,
            blocker_count: waits_for,
            has_seen_lanes_empty: false,
        });
        let begins = list.can_begin(number);
        (BlockChangeClaim::Listed(number), begins)
    }

    /// Returns whether an entered change may begin.
    pub(super) fn can_begin(&self, claim: &BlockChangeClaim) -> bool {
        match claim {
            BlockChangeClaim::None | BlockChangeClaim::FastLane => true,
            BlockChangeClaim::Listed(number) => self.list().can_begin(*number),
        }
    }

    /// Removes a change that has ended, or whose command does not wait for it any more.
    #[inline]
    pub(super) fn leave(&self, lane: &QueueFastLane, claim: BlockChangeClaim) {
        match claim {
            BlockChangeClaim::None => {}
            BlockChangeClaim::FastLane => add_to_counter(&lane.changes, usize::MAX),
            BlockChangeClaim::Listed(number) => self.leave_list(lane, number),
        }
    }

    #[cold]
    fn leave_list(&self, lane: &QueueFastLane, number: u64) {
        let mut list = self.list();
        let Some(place) = list.find_index(number) else {
            return;
        };
        let ListedChange { change, .. } = list.entries.remove(place);
        add_to_counter(&lane.listed, usize::MAX);
        for later in list.entries.iter_mut().skip(place) {
            later.blocker_count -= usize::from(change.has_conflict_with(&later.change));
        }
        if change.is_partial {
            let partial = self.partial_count.load(Ordering::Relaxed);
            self.partial_count.store(partial - 1, Ordering::Release);
        }
    }

    fn list(&self) -> MutexGuard<'_, ListedChanges> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ListedChanges {
    fn find_index(&self, number: u64) -> Option<usize> {
        let place = self
            .entries
            .binary_search_by_key(&number, |entry| entry.number);
        place.ok()
    }

    fn can_begin(&mut self, number: u64) -> bool {
        let place = self.find_index(number);
        let Some(entry) = place.and_then(|place| self.entries.get_mut(place)) else {
            return true;
        };
        if entry.change.is_partial && !entry.has_seen_lanes_empty {
            // Lanes count only changes that began before this partial change was announced. Changes that begin afterwards are
            // listed.
            entry.has_seen_lanes_empty = self.lanes.iter().all(|lane| lane.is_empty());
            if !entry.has_seen_lanes_empty {
                return false;
            }
        }
        entry.blocker_count == 0
    }
}

impl QueueFastLane {
    /// Returns whether the queue has fewer than [`LISTED_MAX`] list entries, so that it may start a command that may need one.
    #[inline]
    pub(super) fn has_space(&self) -> bool {
        self.listed.load(Ordering::Relaxed) < LISTED_MAX
    }

    fn is_empty(&self) -> bool {
        self.changes.load(Ordering::Acquire) == 0
    }

    /// Records that the queue has made a transfer. Each queue has a flag of its own, so that the queues' processors do not
    /// contend for one.
    #[inline]
    pub(super) fn record_transfer(&self) {
        self.has_transferred.store(true, Ordering::Relaxed);
    }
}

/// Adds to a counter of a fast lane, modulo 2^64. Only the lane's own queue writes it.
#[inline]
fn add_to_counter(number: &AtomicUsize, by: usize) {
    let sum = number.load(Ordering::Relaxed).wrapping_add(by);
    number.store(sum, Ordering::Release);
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn change(start: u64, end: u64, partial: bool) -> BlockChange {
        BlockChange {
            start,
            end,
            is_partial: partial,
        }
    }

    #[test]
    fn whole_blocks_exclude_nothing_but_partial_changes() {
        let claims = LeaseChangeClaims::default();
        let (a, b) = (claims.open_lane(), claims.open_lane());
        let (first, begins) = claims.enter(&a, change(0, 8192, false));
        assert!(begins && first == BlockChangeClaim::FastLane);
        let (second, begins) = claims.enter(&b, change(0, 4096, false));
        assert!(begins && second == BlockChangeClaim::FastLane);
        // The list does not contain the two writes on the fast lane, so the partial change waits for both.
        let (partial, begins) = claims.enter(&a, change(65_536, 69_632, true));
        assert!(!begins);
        // From now on, each change is listed with its blocks.
        let (third, begins) = claims.enter(&b, change(0, 65_536, false));
        assert!(begins && third != BlockChangeClaim::FastLane);
        let (fourth, begins) = claims.enter(&b, change(65_536, 131_072, false));
        assert!(!begins);
        claims.leave(&a, first);
        assert!(!claims.can_begin(&partial));
        claims.leave(&b, second);
        assert!(claims.can_begin(&partial) && !claims.can_begin(&fourth));
        claims.leave(&a, partial);
        assert!(claims.can_begin(&fourth));
        claims.leave(&b, third);
        claims.leave(&b, fourth);
        let (again, begins) = claims.enter(&b, change(65_536, 131_072, false));
        assert!(begins && again == BlockChangeClaim::FastLane);
    }

    #[test]
    fn partial_changes_take_turns_in_their_order() {
        let claims = LeaseChangeClaims::default();
        let lane = claims.open_lane();
        let partial = change(0, 4096, true);
        let (first, begins) = claims.enter(&lane, partial);
        assert!(begins);
        let (second, begins) = claims.enter(&lane, partial);
        assert!(!begins);
        let (third, begins) = claims.enter(&lane, change(0, 8192, false));
        assert!(!begins);
        let (fourth, begins) = claims.enter(&lane, change(4096, 8192, true));
        assert!(!begins, "behind the third");
        claims.leave(&lane, first);
        assert!(claims.can_begin(&second) && !claims.can_begin(&third));
        claims.leave(&lane, second);
        assert!(claims.can_begin(&third) && !claims.can_begin(&fourth));
        // A command that stops waiting excludes no other command.
        claims.leave(&lane, third);
        assert!(claims.can_begin(&fourth));
        claims.leave(&lane, fourth);
        assert_eq!(claims.partial_count.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_queue_has_no_room_for_more_changes_than_so_many_in_the_list() {
        let claims = LeaseChangeClaims::default();
        let (lane, other) = (claims.open_lane(), claims.open_lane());
        let (partial, begins) = claims.enter(&lane, change(0, 4096, true));
        assert!(begins);
        let whole = |_| {
            assert!(lane.has_space());
            let (claim, begins) = claims.enter(&lane, change(0, 4096, false));
            assert!(!begins);
            claim
        };
        let mut claimed: Vec<BlockChangeClaim> = (1..LISTED_MAX).map(whole).collect();
        assert!(!lane.has_space() && other.has_space());
        claims.leave(&lane, partial);
        assert!(lane.has_space());
        assert!(claimed.iter().all(|claim| claims.can_begin(claim)));
        // A partial change waits for each of the earlier changes that are left.
        let (partial, begins) = claims.enter(&other, change(0, 4096, true));
        assert!(!begins);
        while let Some(claim) = claimed.pop() {
            assert!(!claims.can_begin(&partial));
            claims.leave(&lane, claim);
        }
        assert!(claims.can_begin(&partial));
        claims.leave(&other, partial);
    }

    #[test]
    fn a_closed_lane_blocks_no_others() {
        let claims = LeaseChangeClaims::default();
        let (gone, lane) = (claims.open_lane(), claims.open_lane());
        let (_, begins) = claims.enter(&gone, change(0, 4096, false));
        assert!(begins);
        let (partial, begins) = claims.enter(&lane, change(0, 4096, true));
        assert!(!begins);
        claims.close_lane(&gone);
        assert!(claims.can_begin(&partial));
    }
}

#[cfg(all(test, loom))]
mod loom_models {
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    /// Model of a block that two queues change. loom reports concurrent accesses to the block.
    fn model(partial: [bool; 2]) {
        loom::model(move || {
            let claims = Arc::new(LeaseChangeClaims::default());
            let block = Arc::new(UnsafeCell::new(0));
            let change = move |claims: &LeaseChangeClaims,
                               lane: &QueueFastLane,
                               block: &UnsafeCell<u32>,
                               partial| {
                let change = BlockChange {
                    start: 0,
                    end: 4096,
                    is_partial: partial,
                };
                let (claim, mut begins) = claims.enter(lane, change);
                while !begins {
                    thread::yield_now();
                    begins = claims.can_begin(&claim);
                }
                #[expect(unsafe_code, reason = "an access that loom watches")]
                // SAFETY: loom stops the model if two threads are here at the same time.
                block.with_mut(|block| unsafe { *block += 1 });
                claims.leave(lane, claim);
            };
            let lanes = [claims.open_lane(), claims.open_lane()];
            let [mine, other] = lanes;
            let thread = {
                let (claims, block) = (claims.clone(), block.clone());
                thread::spawn(move || change(&claims, &other, &block, partial[1]))
            };
            change(&claims, &mine, &block, partial[0]);
            thread.join().expect("no panic");
        });
    }

    #[test]
    fn a_partial_change_and_a_whole_one_exclude_each_other() {
        model([true, false]);
    }

    #[test]
    fn two_partial_changes_exclude_each_other() {
        model([true, true]);
    }
}
