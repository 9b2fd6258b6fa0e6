//! Ballooning: an idle pair is lent to a queue that shares another pair with busy queues.
//!
//! The drive monitor lends. The borrowing queue becomes a user of the idle pair and remembers its home pair. The first batch of
//! one of the lending pair's own queues calls the borrowers back: they migrate home before the batch is served. Their commands
//! in flight complete on the pair that they leave (`migration.rs`).
//!
//! Reserved pairs are never lent.

use std::sync::{Arc, Weak};

use super::binding::NewQueuePairUser;
use super::core::QueuePairCore;
use super::migration::{QueuePairUserRole, migrate_user};
use super::user::QueuePairUser;
use super::{QueuePairInner, VfioQueuePair};
use nvme_mpt_memory::clock::Ticks;

/// Activity of a pair between checks, by which the drive monitor finds idle pairs.
#[derive(Debug, Default)]
pub struct QueuePairActivity {
    /// Value of the pair's command counter at the last check.
    commands: u64,
    /// Number of consecutive checks that found the pair idle.
    idle_checks: u32,
}

impl QueuePairActivity {
    /// Checks the pair's activity. Returns the number of consecutive checks that found the pair idle, with this check.
    pub fn check(&mut self, pair: &VfioQueuePair) -> u32 {
        let core = pair.shared.lock();
        let commands = core.stats().commands;
        let is_idle = commands == self.commands && core.in_flight() == 0;
        self.commands = commands;
        self.idle_checks = if is_idle { self.idle_checks + 1 } else { 0 };
        self.idle_checks
    }
}

impl VfioQueuePair {
    /// Returns the number of the pair's own queues that submitted a batch within the last `within` ticks.
    #[must_use]
    pub fn active_queues(&self, now: Ticks, within: u64) -> usize {
        self.shared.lock().active_users(now, within).count()
    }

    /// Returns whether any queue of another pair borrows this pair.
    #[must_use]
    pub fn is_lent(&self) -> bool {
        self.shared.lock().has_borrowers()
    }

    /// Lends this idle pair to a queue of `crowded` that had a batch within the last `within` ticks. Returns false if there is
    /// no such queue.
    pub fn lend_to(&self, crowded: &Self, now: Ticks, within: u64) -> bool {
        let chosen = {
            let core = crowded.shared.lock();
            let first = core.active_users(now, within).next();
            first.map(|(number, user)| (number, user.queue.clone()))
        };
        let Some((number, queue)) = chosen else {
            return false;
        };
        let role = QueuePairUserRole::Borrower(Arc::downgrade(&crowded.shared));
        migrate_user(&crowded.shared, number, queue, &self.shared, role)
    }
}

/// Sends all borrowers of a pair back to their home pairs, because one of the pair's own queues has a batch.
#[cold]
#[inline(never)]
pub(super) fn recall_borrowers(pair: &Arc<QueuePairInner>) {
    loop {
        let borrower = pair.lock().take_borrower();
        let Some((number, queue, home_pair)) = borrower else {
            return;
        };
        // If the home pair was reserved or no longer exists, the borrower stays.
        if let Some(home_pair) = home_pair.upgrade() {
            migrate_user(
                pair,
                number,
                queue,
                &home_pair,
                QueuePairUserRole::Returning,
            );
        }
    }
}

impl QueuePairCore {
    /// Returns the users that had a batch within the last `within` ticks, with their numbers. Leaves out borrowers, and users
    /// that migrate to another pair.
    fn active_users(&self, now: Ticks, within: u64) -> impl Iterator<Item = (u16, &QueuePairUser)> {
        let is_awake = move |since: Ticks| now.since(since) <= within;
        self.staying_users()
            .filter(move |(_, user)| user.home_pair.is_none() && is_awake(user.last_batch))
    }

    /// Ends the lending of the pair to one borrower. Returns the borrower's number and queue, and its home pair; `None` if no
    /// queue borrows the pair.
    fn take_borrower(&mut self) -> Option<(u16, NewQueuePairUser, Weak<QueuePairInner>)> {
        let borrower = self
            .staying_users()
            .find(|(_, user)| user.home_pair.is_some());
        let number = borrower?.0;
        let home_pair = self.end_balloon(number)?;
        let queue = self.user(number)?.queue.clone();
        Some((number, queue, home_pair))
    }
}
