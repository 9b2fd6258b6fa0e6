//! Loans: a pair whose queues rest serves a queue that shares another pair with busy ones.
//!
//! The drive's supervisor lends. The queue that borrows becomes a member of the pair that rests, and remembers the one
//! that it came from. The first batch of a queue that rested calls the borrowers in: they move back before it is served.
//! The drive completes what it has of them in the pair that they leave (`moves.rs`).
//!
//! Pairs of a reservation are never lent.

use std::sync::{Arc, Weak};

use super::core::QueuePairCore;
use super::member::QueuePairUser;
use super::moves::{QueuePairUserRole, transfer};
use super::seat::NewQueuePairUser;
use super::{QueuePairInner, VfioQueuePair};
use nvme_mpt::clock::Ticks;

/// Activity of a pair since its last look, by which its supervisor knows one that rests.
#[derive(Debug, Default)]
pub struct QueuePairActivity {
    /// Commands that it had taken at the last look.
    commands: u64,
    /// Looks since then at which it had nothing to do.
    looks: u32,
}

impl QueuePairActivity {
    /// Looks at a pair. Returns the number of looks, this one included, at which it had nothing to do without a break.
    pub fn look(&mut self, pair: &VfioQueuePair) -> u32 {
        let core = pair.shared.lock();
        let commands = core.stats().commands;
        let is_idle = commands == self.commands && core.in_flight() == 0;
        self.commands = commands;
        self.looks = if is_idle { self.looks + 1 } else { 0 };
        self.looks
    }
}

impl VfioQueuePair {
    /// Returns the number of queues that share the pair and had a batch within so many ticks.
    #[must_use]
    pub fn awake(&self, now: Ticks, within: u64) -> usize {
        self.shared.lock().awake(now, within).count()
    }

    /// Returns whether a queue borrows the pair.
    #[must_use]
    pub fn is_lent(&self) -> bool {
        self.shared.lock().has_borrowers()
    }

    /// Lends the pair to one of the queues that share another one and had a batch within so many ticks. Returns whether
    /// there was one.
    pub fn lend_to_one_of(&self, crowded: &Self, now: Ticks, within: u64) -> bool {
        let chosen = {
            let core = crowded.shared.lock();
            let first = core.awake(now, within).next();
            first.map(|(number, member)| (number, member.queue.clone()))
        };
        let Some((number, queue)) = chosen else {
            return false;
        };
        let role = QueuePairUserRole::Borrower(Arc::downgrade(&crowded.shared));
        transfer(&crowded.shared, number, queue, &self.shared, role)
    }
}

/// Has the borrowers of a pair move back, as one of its own queues has a batch.
#[cold]
#[inline(never)]
pub(super) fn call_in(pair: &Arc<QueuePairInner>) {
    loop {
        let borrower = pair.lock().take_borrower();
        let Some((number, queue, home)) = borrower else {
            return;
        };
        // One whose pair belongs to a lease by now, or is gone, stays.
        if let Some(home) = home.upgrade() {
            transfer(pair, number, queue, &home, QueuePairUserRole::Returning);
        }
    }
}

impl QueuePairCore {
    /// Returns the members that stay and had a batch within so many ticks, those that borrow the pair aside.
    fn awake(&self, now: Ticks, within: u64) -> impl Iterator<Item = (u16, &QueuePairUser)> {
        let is_awake = move |since: Ticks| now.since(since) <= within;
        self.staying()
            .filter(move |(_, member)| member.home.is_none() && is_awake(member.last_batch))
    }

    /// Returns a member that borrows the pair, and the pair that it came from. It does not borrow any more.
    fn take_borrower(&mut self) -> Option<(u16, NewQueuePairUser, Weak<QueuePairInner>)> {
        let borrower = self.staying().find(|(_, member)| member.home.is_some());
        let number = borrower?.0;
        let home = self.end_loan(number)?;
        let queue = self.member(number)?.queue.clone();
        Some((number, queue, home))
    }
}
