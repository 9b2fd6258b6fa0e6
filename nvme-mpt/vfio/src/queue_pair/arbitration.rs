//! Arbitration between a queue pair's heavy users, in proportion to the weights of their leases.
//!
//! The algorithm is start-time fair queueing on two levels. A lease's *virtual time* is the number of dispatched bytes of its
//! users, divided by its weight. The waiting lease with the earliest virtual time is next. Within the lease, its users are
//! selected in the same way, with equal weights. So a lease with four queues has one share, not four.
//!
//! - A lease that begins to wait starts no earlier than the virtual time of the lease that was served last. So an idle lease
//!   accumulates no credit.
//! - Once no lease waits, all leases start again with equal virtual times.
//! - A new weight applies from the lease's next command on.
//!
//! While two leases wait, their dispatched bytes, divided by weight, differ by at most one command of each lease. The order
//! does not depend on a clock, so stopping or resetting the drive does not change it.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::collections::binary_heap::PeekMut;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use nvme_guest::rate_limit::LeaseWeight;

/// Virtual time that one byte takes at weight 1.
const BYTE_TIME: u64 = 1 << 32;

/// State of a lease that its queues on all pairs share: its reservation of queue pairs, its weight, and its counts of commands
/// and bytes.
#[derive(Debug)]
pub struct LeaseShare {
    reservation: Option<u64>,
    /// Number of outstanding commands of all queues of the lease, without those of lone users. Updated once per batch.
    outstanding: AtomicU32,
    /// Virtual time that one byte takes at the lease's weight.
    time_per_byte: AtomicU64,
    /// Number of bytes of the lease that went to the drive while the drive was [weighed](super::governor), which divides it by
    /// the leases' weights.
    dispatched_bytes: AtomicU64,
    /// Value of `dispatched_bytes` from which the lease waits for the next survey of the drive monitor; `u64::MAX` without a
    /// limit.
    dispatch_limit: AtomicU64,
    /// True while the leased namespace is missing or has another block size. The drive then gets no command of the lease.
    is_revoked: AtomicBool,
}

impl LeaseShare {
    /// Creates the state of a lease with the default weight. `reservation` is the key of its reservation of queue pairs.
    #[must_use]
    pub fn new(reservation: Option<u64>) -> Arc<Self> {
        let share = Self {
            reservation,
            outstanding: AtomicU32::default(),
            time_per_byte: AtomicU64::default(),
            dispatched_bytes: AtomicU64::default(),
            dispatch_limit: AtomicU64::new(u64::MAX),
            is_revoked: AtomicBool::default(),
        };
        share.set_weight(LeaseWeight::default());
        Arc::new(share)
    }

    /// Returns the key of the lease's reservation of queue pairs; `None` if it has none.
    #[must_use]
    pub fn reservation(&self) -> Option<u64> {
        self.reservation
    }

    /// Sets the lease's weight. It applies to each command that is dispatched from now on, also to one that waits already.
    pub fn set_weight(&self, weight: LeaseWeight) {
        let per_byte = BYTE_TIME / u64::from(weight.get());
        self.time_per_byte.store(per_byte, Ordering::Relaxed);
    }

    /// Sets whether the lease is revoked, so that the drive gets none of its commands. This applies to queues that join from
    /// now on, and to present users after [`VfioQueuePair::revoke`](super::VfioQueuePair::revoke).
    pub fn set_revoked(&self, revoked: bool) {
        self.is_revoked.store(revoked, Ordering::Relaxed);
    }

    pub(super) fn is_revoked(&self) -> bool {
        self.is_revoked.load(Ordering::Relaxed)
    }

    /// Counts commands that a queue of the lease has submitted. Returns the number of outstanding commands of all queues of the
    /// lease.
    #[inline]
    pub(super) fn count_submitted(&self, commands: u32) -> u32 {
        let before = self.outstanding.fetch_add(commands, Ordering::Relaxed);
        before.saturating_add(commands)
    }

    /// Returns the number of outstanding commands of all queues of the lease, without those of lone users.
    #[inline]
    pub(super) fn outstanding(&self) -> u32 {
        self.outstanding.load(Ordering::Relaxed)
    }

    /// Counts commands of the lease that have completed or were dropped.
    #[inline]
    pub(super) fn count_ended(&self, commands: u32) {
        self.outstanding.fetch_sub(commands, Ordering::Relaxed);
    }

    /// Counts bytes of the lease that went to the drive.
    #[inline]
    pub(super) fn count_dispatched(&self, bytes: u64) {
        self.dispatched_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Returns whether the lease has used up its limit of bytes until the drive monitor measures the leases again.
    #[inline]
    pub(super) fn is_at_limit(&self) -> bool {
        self.dispatched_bytes.load(Ordering::Relaxed) >= self.dispatch_limit.load(Ordering::Relaxed)
    }

    /// Returns the number of bytes that went to the drive while it was weighed.
    pub(super) fn dispatched_bytes(&self) -> u64 {
        self.dispatched_bytes.load(Ordering::Relaxed)
    }

    /// Sets the number of bytes of the lease that may go to the drive until the next survey; `None` for no limit.
    pub(super) fn set_byte_limit(&self, bytes: Option<u64>) {
        let until = bytes.map_or(u64::MAX, |bytes| {
            self.dispatched_bytes().saturating_add(bytes)
        });
        self.dispatch_limit.store(until, Ordering::Relaxed);
    }

    /// Returns the lease's weight.
    #[must_use]
    pub fn weight(&self) -> u64 {
        BYTE_TIME / self.time_per_byte.load(Ordering::Relaxed).max(1)
    }

    fn virtual_time(&self, bytes: u64) -> u128 {
        u128::from(bytes) * u128::from(self.time_per_byte.load(Ordering::Relaxed))
    }
}

/// Order of the parties that wait, by virtual time. The parties are either the leases of a pair, or the users of one lease.
#[derive(Debug, Default)]
struct VirtualTimeOrder {
    /// Number of parties, whether they wait or not.
    parties: usize,
    waiting: BinaryHeap<Reverse<(u128, u16)>>,
    /// Virtual time that the party which was served last had before it was served.
    now: u128,
    /// Latest virtual time that any party has reached.
    latest: u128,
}

impl VirtualTimeOrder {
    /// Adds a party that begins to wait, and that has reached the virtual time `time`.
    fn enter(&mut self, party: u16, time: u128) {
        if self.waiting.is_empty() {
            self.now = self.latest;
        }
        self.waiting.push(Reverse((time.max(self.now), party)));
    }

    /// Returns the waiting party that is served next.
    #[inline]
    fn first(&self) -> Option<u16> {
        self.waiting.peek().map(|Reverse((_, party))| *party)
    }

    /// Charges the party that is served next, and removes the party unless it still has commands (`continues`). Returns the
    /// virtual time that the party has reached.
    ///
    /// If there is only one party, its virtual time does not advance, because the party takes no share from another.
    #[inline]
    fn charge(&mut self, cost: impl FnOnce() -> u128, continues: bool) -> u128 {
        let Some(mut first) = self.waiting.peek_mut() else {
            return self.latest;
        };
        let Reverse((start, party)) = *first;
        let mut time = start;
        if self.parties > 1 {
            time += cost();
            self.now = start;
            self.latest = self.latest.max(time);
        }
        if continues {
            *first = Reverse((time, party));
        } else {
            PeekMut::pop(first);
        }
        time
    }

    /// Removes the party that would be served next from those that wait, and returns it.
    fn skip(&mut self) -> Option<u16> {
        let Reverse((_, party)) = self.waiting.pop()?;
        Some(party)
    }

    /// Removes a party from those that wait.
    fn remove(&mut self, party: u16) {
        self.waiting.retain(|Reverse((_, other))| *other != party);
    }
}

/// A lease in the arbitration of a pair, with its users on this pair.
#[derive(Debug)]
struct ArbitratedLease {
    share: Arc<LeaseShare>,
    time: u128,
    /// Order of the lease's users that wait.
    order: VirtualTimeOrder,
}

/// State of one user of the pair in the arbitration: its lease, its virtual time, and whether it waits.
#[derive(Clone, Copy, Debug)]
struct ArbitratedUser {
    lease: u16,
    time: u128,
    is_waiting: bool,
}

/// Arbitration between a pair's heavy users, by the weights of their leases.
#[derive(Debug, Default)]
pub(super) struct QueuePairArbitration {
    /// Order of the leases whose users wait.
    order: VirtualTimeOrder,
    leases: Vec<Option<ArbitratedLease>>,
    /// State of the users, by user number.
    users: Vec<Option<ArbitratedUser>>,
}

impl QueuePairArbitration {
    /// Adds a user to the arbitration. Allocates all memory that later calls for this user need.
    pub(super) fn join(&mut self, user: u16, share: &Arc<LeaseShare>) {
        let is_its = |lease: &ArbitratedLease| Arc::ptr_eq(&lease.share, share);
        let mut leases = self.leases.iter();
        let known = leases.position(|lease| lease.as_ref().is_some_and(is_its));
        let index = known.or_else(|| self.leases.iter().position(Option::is_none));
        let index = index.unwrap_or(self.leases.len());
        if index == self.leases.len() {
            self.leases.push(None);
        }
        self.order.parties += usize::from(known.is_none());
        self.order.waiting.reserve(self.leases.len());
        let entry = self.leases[index].get_or_insert_with(|| ArbitratedLease {
            share: share.clone(),
            time: 0,
            order: VirtualTimeOrder::default(),
        });
        entry.order.parties += 1;
        entry.order.waiting.reserve(entry.order.parties);
        let number = usize::from(user);
        if self.users.len() <= number {
            self.users.resize(number + 1, None);
        }
        self.users[number] = Some(ArbitratedUser {
            lease: index as u16,
            time: 0,
            is_waiting: false,
        });
    }

    /// Removes a user, and also its lease if no other user of that lease is left.
    pub(super) fn leave(&mut self, user: u16) {
        self.remove_waiting(user);
        let place = self.users.get_mut(usize::from(user));
        let Some(place) = place.and_then(Option::take) else {
            return;
        };
        let number = usize::from(place.lease);
        if let Some(lease) = &mut self.leases[number] {
            lease.order.parties -= 1;
            if lease.order.parties == 0 {
                self.leases[number] = None;
                self.order.parties -= 1;
            }
        }
    }

    /// Adds a user to those that wait.
    #[inline]
    pub(super) fn mark_waiting(&mut self, user: u16) {
        let Some(Some(place)) = self.users.get_mut(usize::from(user)) else {
            return;
        };
        let Some(Some(lease)) = self.leases.get_mut(usize::from(place.lease)) else {
            return;
        };
        if place.is_waiting {
            return;
        }
        place.is_waiting = true;
        if lease.order.waiting.is_empty() {
            self.order.enter(place.lease, lease.time);
        }
        lease.order.enter(user, place.time);
    }

    /// Returns the waiting user that is served next.
    #[inline]
    pub(super) fn next(&self) -> Option<u16> {
        let index = self.order.first()?;
        self.leases.get(usize::from(index))?.as_ref()?.order.first()
    }

    /// Charges the user that is served next with `bytes`. The user waits on if it has more commands (`continues`).
    #[inline]
    pub(super) fn charge(&mut self, bytes: u64, continues: bool) {
        let Some(index) = self.order.first() else {
            return;
        };
        let Some(Some(lease)) = self.leases.get_mut(usize::from(index)) else {
            return;
        };
        let Some(user) = lease.order.first() else {
            return;
        };
        let time = lease.order.charge(|| bytes.into(), continues);
        if let Some(Some(place)) = self.users.get_mut(usize::from(user)) {
            place.time = time;
            place.is_waiting = continues;
        }
        let continues = !lease.order.waiting.is_empty();
        let cost = || lease.share.virtual_time(bytes);
        lease.time = self.order.charge(cost, continues);
    }

    /// Removes the user that would be served next from those that wait, without charging it.
    pub(super) fn skip(&mut self) {
        let Some(index) = self.order.first() else {
            return;
        };
        let Some(Some(lease)) = self.leases.get_mut(usize::from(index)) else {
            return;
        };
        let user = lease.order.skip();
        if lease.order.waiting.is_empty() {
            self.order.skip();
        }
        if let Some(user) = user
            && let Some(Some(place)) = self.users.get_mut(usize::from(user))
        {
            place.is_waiting = false;
        }
    }

    /// Removes a user from those that wait.
    #[cold]
    fn remove_waiting(&mut self, user: u16) {
        let Some(Some(place)) = self.users.get_mut(usize::from(user)) else {
            return;
        };
        let Some(Some(lease)) = self.leases.get_mut(usize::from(place.lease)) else {
            return;
        };
        if !std::mem::take(&mut place.is_waiting) {
            return;
        }
        lease.order.remove(user);
        if lease.order.waiting.is_empty() {
            self.order.remove(place.lease);
        }
    }

    /// Returns whether no user is waiting.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.order.waiting.is_empty()
    }
}
