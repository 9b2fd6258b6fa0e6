//! Turns of heavy members at the places of a queue pair, in proportion to the weights of their leases.
//!
//! The rule is start-time fair queueing, in two levels. A lease's *virtual time* is the number of bytes that its members
//! got places for, divided by its weight. Of the leases that wait, the one with the earliest time is next. Within a
//! lease, the same rule with equal weights chooses the member. So a lease with four queues has one share, not four.
//!
//! - A lease that begins to wait starts no earlier than the lease that was served last. It saves no turns up while it
//!   wants none, and the others keep what it left.
//! - Once nothing waits, all leases are equal again.
//! - A new weight counts from the lease's next command on.
//!
//! While two leases wait, their bytes by weight differ by one command of each at most. The order depends on no clock: a
//! drive that is stopped or reset changes nothing here.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::collections::binary_heap::PeekMut;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use nvme_mpt::limit::LeaseWeight;

/// Virtual time of a byte at weight 1.
const BYTE: u64 = 1 << 32;

/// A lease as queue pairs know it: its reservation, its weight, and the commands of all its queues.
#[derive(Debug)]
pub struct LeaseShare {
    reservation: Option<u64>,
    /// Commands that its queues submitted in turn and have not got back. It is changed once per batch.
    outstanding: AtomicU32,
    /// Virtual time of a byte.
    per_byte: AtomicU64,
    /// Bytes that the drive got of it while shares were watched.
    launched: AtomicU64,
    /// Value of `launched` at which the lease has to wait for the next look; `u64::MAX` without a limit.
    launches_until: AtomicU64,
    /// True while its namespace is not the one that was leased.
    revoked: AtomicBool,
}

impl LeaseShare {
    /// A lease of the usual weight, with a reservation if it has one.
    #[must_use]
    pub fn new(reservation: Option<u64>) -> Arc<Self> {
        let share = Self {
            reservation,
            outstanding: AtomicU32::default(),
            per_byte: AtomicU64::default(),
            launched: AtomicU64::default(),
            launches_until: AtomicU64::new(u64::MAX),
            revoked: AtomicBool::default(),
        };
        share.set_weight(LeaseWeight::default());
        Arc::new(share)
    }

    /// Returns the reservation.
    #[must_use]
    pub fn reservation(&self) -> Option<u64> {
        self.reservation
    }

    /// Changes the weight, also while commands wait.
    pub fn set_weight(&self, weight: LeaseWeight) {
        let per_byte = BYTE / u64::from(weight.get());
        self.per_byte.store(per_byte, Ordering::Relaxed);
    }

    /// Sets whether the drive gets no command of the lease: those of queues that join from now on, and of others with
    /// [`Pair::revoke`](super::VfioQueuePair::revoke).
    pub fn set_revoked(&self, revoked: bool) {
        self.revoked.store(revoked, Ordering::Relaxed);
    }

    pub(super) fn is_revoked(&self) -> bool {
        self.revoked.load(Ordering::Relaxed)
    }

    /// A queue submitted so many commands. Returns how many the lease has outstanding with them.
    #[inline]
    pub(super) fn submitted(&self, commands: u32) -> u32 {
        let before = self.outstanding.fetch_add(commands, Ordering::Relaxed);
        before.saturating_add(commands)
    }

    /// A queue got so many commands back, or lets go of them.
    #[inline]
    pub(super) fn ended(&self, commands: u32) {
        self.outstanding.fetch_sub(commands, Ordering::Relaxed);
    }

    /// The drive got so many bytes of it.
    #[inline]
    pub(super) fn launched(&self, bytes: u64) {
        self.launched.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Returns whether it has had as much as it may until the next look.
    #[inline]
    pub(super) fn is_spent(&self) -> bool {
        self.launched.load(Ordering::Relaxed) >= self.launches_until.load(Ordering::Relaxed)
    }

    /// Returns the bytes that the drive got of it while shares were watched.
    pub(super) fn bytes(&self) -> u64 {
        self.launched.load(Ordering::Relaxed)
    }

    /// Lets the drive get so many bytes of it until the next look, or any number.
    pub(super) fn allow(&self, bytes: Option<u64>) {
        let until = bytes.map_or(u64::MAX, |bytes| self.bytes().saturating_add(bytes));
        self.launches_until.store(until, Ordering::Relaxed);
    }

    /// Returns its weight.
    #[must_use]
    pub fn weight(&self) -> u64 {
        BYTE / self.per_byte.load(Ordering::Relaxed).max(1)
    }

    fn time_of(&self, bytes: u64) -> u128 {
        u128::from(bytes) * u128::from(self.per_byte.load(Ordering::Relaxed))
    }
}

/// Parties, and those of them that wait by their virtual times.
#[derive(Debug, Default)]
struct VirtualTimeOrder {
    /// Number of parties, whether they wait or not.
    parties: usize,
    waiting: BinaryHeap<Reverse<(u128, u16)>>,
    /// Time at which the last served party began.
    now: u128,
    /// Latest time that a party has reached.
    latest: u128,
}

impl VirtualTimeOrder {
    /// Adds a party that begins to wait, which reached this time before.
    fn enter(&mut self, party: u16, time: u128) {
        if self.waiting.is_empty() {
            self.now = self.latest;
        }
        self.waiting.push(Reverse((time.max(self.now), party)));
    }

    /// Returns the party that is next.
    #[inline]
    fn first(&self) -> Option<u16> {
        self.waiting.peek().map(|Reverse((_, party))| *party)
    }

    /// Charges the party that is next, and removes it unless it `goes_on`. Returns the time that it reached.
    ///
    /// One without another beside it takes from none, and its time stands still.
    #[inline]
    fn charge(&mut self, cost: impl FnOnce() -> u128, goes_on: bool) -> u128 {
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
        if goes_on {
            *first = Reverse((time, party));
        } else {
            PeekMut::pop(first);
        }
        time
    }

    /// Removes a party, wherever it stands.
    fn remove(&mut self, party: u16) {
        self.waiting.retain(|Reverse((_, other))| *other != party);
    }
}

/// A lease with members of the pair.
#[derive(Debug)]
struct ArbitratedLease {
    share: Arc<LeaseShare>,
    time: u128,
    /// Its members.
    order: VirtualTimeOrder,
}

/// Place of a member.
#[derive(Clone, Copy, Debug)]
struct ArbitratedUser {
    tenant: u16,
    time: u128,
    waits: bool,
}

/// Turns of a pair's members.
#[derive(Debug, Default)]
pub(super) struct QueuePairArbitration {
    /// Leases.
    order: VirtualTimeOrder,
    tenants: Vec<Option<ArbitratedLease>>,
    /// By the members' numbers.
    places: Vec<Option<ArbitratedUser>>,
}

impl QueuePairArbitration {
    /// Adds a member of a lease. No later call allocates memory for it.
    pub(super) fn join(&mut self, member: u16, share: &Arc<LeaseShare>) {
        let is_its = |tenant: &ArbitratedLease| Arc::ptr_eq(&tenant.share, share);
        let mut tenants = self.tenants.iter();
        let known = tenants.position(|tenant| tenant.as_ref().is_some_and(is_its));
        let tenant = known.or_else(|| self.tenants.iter().position(Option::is_none));
        let tenant = tenant.unwrap_or(self.tenants.len());
        if tenant == self.tenants.len() {
            self.tenants.push(None);
        }
        self.order.parties += usize::from(known.is_none());
        self.order.waiting.reserve(self.tenants.len());
        let entry = self.tenants[tenant].get_or_insert_with(|| ArbitratedLease {
            share: share.clone(),
            time: 0,
            order: VirtualTimeOrder::default(),
        });
        entry.order.parties += 1;
        entry.order.waiting.reserve(entry.order.parties);
        let number = usize::from(member);
        if self.places.len() <= number {
            self.places.resize(number + 1, None);
        }
        self.places[number] = Some(ArbitratedUser {
            tenant: tenant as u16,
            time: 0,
            waits: false,
        });
    }

    /// Removes a member, and its lease with the last one.
    pub(super) fn leave(&mut self, member: u16) {
        self.forget(member);
        let place = self.places.get_mut(usize::from(member));
        let Some(place) = place.and_then(Option::take) else {
            return;
        };
        let number = usize::from(place.tenant);
        if let Some(tenant) = &mut self.tenants[number] {
            tenant.order.parties -= 1;
            if tenant.order.parties == 0 {
                self.tenants[number] = None;
                self.order.parties -= 1;
            }
        }
    }

    /// Lets a member wait for its turn, unless it does already.
    #[inline]
    pub(super) fn wait(&mut self, member: u16) {
        let Some(Some(place)) = self.places.get_mut(usize::from(member)) else {
            return;
        };
        let Some(Some(tenant)) = self.tenants.get_mut(usize::from(place.tenant)) else {
            return;
        };
        if place.waits {
            return;
        }
        place.waits = true;
        if tenant.order.waiting.is_empty() {
            self.order.enter(place.tenant, tenant.time);
        }
        tenant.order.enter(member, place.time);
    }

    /// Returns the member whose turn it is.
    #[inline]
    pub(super) fn next(&self) -> Option<u16> {
        let tenant = self.order.first()?;
        self.tenants
            .get(usize::from(tenant))?
            .as_ref()?
            .order
            .first()
    }

    /// Charges the member whose turn it is with so many bytes. It waits no more unless it `goes_on`.
    #[inline]
    pub(super) fn charge(&mut self, bytes: u64, goes_on: bool) {
        let Some(tenant) = self.order.first() else {
            return;
        };
        let Some(Some(tenant)) = self.tenants.get_mut(usize::from(tenant)) else {
            return;
        };
        let Some(member) = tenant.order.first() else {
            return;
        };
        let time = tenant.order.charge(|| bytes.into(), goes_on);
        if let Some(Some(place)) = self.places.get_mut(usize::from(member)) {
            place.time = time;
            place.waits = goes_on;
        }
        let goes_on = !tenant.order.waiting.is_empty();
        let cost = || tenant.share.time_of(bytes);
        tenant.time = self.order.charge(cost, goes_on);
    }

    /// Lets a member wait no more.
    #[cold]
    pub(super) fn forget(&mut self, member: u16) {
        let Some(Some(place)) = self.places.get_mut(usize::from(member)) else {
            return;
        };
        let Some(Some(tenant)) = self.tenants.get_mut(usize::from(place.tenant)) else {
            return;
        };
        if !std::mem::take(&mut place.waits) {
            return;
        }
        tenant.order.remove(member);
        if tenant.order.waiting.is_empty() {
            self.order.remove(place.tenant);
        }
    }

    /// Returns whether no member waits.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.order.waiting.is_empty()
    }
}
