//! Loans: an idle pair is lent to a queue that shares another pair with busy queues.
//!
//! The drive monitor lends. The borrowing queue becomes a user of the idle pair and remembers its home pair. The first
//! batch of one of the lending pair's own queues calls the borrowers back: they migrate home before the batch is served.
//! Their commands in flight complete on the pair that they leave (`moves.rs`).
//!
//! Reserved pairs are never lent.

use std::sync::{Arc, Weak};

use super::core::QueuePairCore;
use super::member::QueuePairUser;
use super::moves::{QueuePairUserRole, transfer};
use super::seat::NewQueuePairUser;
use super::{QueuePairInner, VfioQueuePair};
use nvme_mpt_memory::clock::Ticks;

/// Activity of a pair between checks, by which the drive monitor finds idle pairs.
#[derive(Debug, Default)]
pub struct QueuePairActivity {
    /// Value of the pair's command counter at the last check.
    commands: u64,
    /// Number of consecutive checks that found the pair idle.
    looks: u32,
}

impl QueuePairActivity {
    /// Checks a pair. Returns the number of consecutive checks, including this one, that found the pair idle.
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
    /// Returns the number of the pair's own queues that had a batch within the last `within` ticks.
    #[must_use]
    pub fn awake(&self, now: Ticks, within: u64) -> usize {
        self.shared.lock().awake(now, within).count()
    }

    /// Returns whether any queue borrows the pair.
    #[must_use]
    pub fn is_lent(&self) -> bool {
        self.shared.lock().has_borrowers()
    }

    /// Lends the pair to a queue of `crowded` that had a batch within the last `within` ticks. Returns whether there was such a
    /// queue.
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

/// Sends all borrowers of a pair home, because one of the pair's own queues has a batch.
#[cold]
#[inline(never)]
pub(super) fn call_in(pair: &Arc<QueuePairInner>) {
    loop {
        let borrower = pair.lock().take_borrower();
        let Some((number, queue, home)) = borrower else {
            return;
        };
        // A borrower whose home pair is reserved or gone stays.
        if let Some(home) = home.upgrade() {
            transfer(pair, number, queue, &home, QueuePairUserRole::Returning);
        }
    }
}

impl QueuePairCore {
    /// Returns the users that had a batch within the last `within` ticks, except borrowers and users that migrate away.
    fn awake(&self, now: Ticks, within: u64) -> impl Iterator<Item = (u16, &QueuePairUser)> {
        let is_awake = move |since: Ticks| now.since(since) <= within;
        self.staying()
            .filter(move |(_, member)| member.home.is_none() && is_awake(member.last_batch))
    }

    /// Ends the loan of one borrower. Returns the borrower and its home pair.
    fn take_borrower(&mut self) -> Option<(u16, NewQueuePairUser, Weak<QueuePairInner>)> {
        let borrower = self.staying().find(|(_, member)| member.home.is_some());
        let number = borrower?.0;
        let home = self.end_loan(number)?;
        let queue = self.member(number)?.queue.clone();
        Some((number, queue, home))
    }
}
