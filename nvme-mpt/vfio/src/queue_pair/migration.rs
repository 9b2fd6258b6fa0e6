//! Migration of queues from one queue pair to another, while commands are in flight.
//!
//! The drive's control threads start a migration; the queue's poller carries it out:
//!
//! 1. The queue becomes a user of the new pair. The old pair records the new pair for the queue.
//! 2. The queue's next batch goes to the new pair. Commands in flight complete on the old pair, and the queue reaps from both
//!    pairs until the last of these commands has completed.
//! 3. The queue leaves the old pair.
//!
//! A queue without commands leaves the old pair in step 1, so that an idle queue delays no other queue there.
//!
//! NVMe does not order commands in flight, so the two pairs may complete them in any order. A Flush covers all writes that
//! completed before it, on any pair.
//!
//! A queue under arbitration checks for a migration once per batch. A user that submits directly does not check: a pending
//! migration ends its direct submission, so that its next batch goes through arbitration.

use std::sync::{Arc, Weak};

use super::binding::{NewQueuePairUser, QueuePairBinding};
use super::core::QueuePairCore;
use super::{QueuePairInner, VfioQueuePair};

impl VfioQueuePair {
    /// Migrates one queue to the pair `to`: that of a user for whose key of a reservation of queue pairs `which` returns true.
    /// Returns false if there is no such user. Skips users whose queue is ending, and users that another thread is migrating.
    pub fn migrate_one(&self, to: &Self, which: impl Fn(Option<u64>) -> bool) -> bool {
        loop {
            let found = self.shared.lock().find_staying_user(&which);
            let Some((number, user)) = found else {
                return false;
            };
            if migrate_user(
                &self.shared,
                number,
                user,
                &to.shared,
                QueuePairUserRole::Own,
            ) {
                return true;
            }
        }
    }

    /// Sets whether one lease has reserved the pair.
    pub fn set_reserved(&self, reserved: bool) {
        self.shared.set_reserved(reserved);
    }
}

/// Role of a queue in the pair that it migrates to.
#[derive(Clone, Debug)]
pub(super) enum QueuePairUserRole {
    /// The new pair becomes the queue's home pair, even if it is reserved.
    Own,
    /// The queue borrows the pair, and later returns to this home pair.
    Borrower(Weak<QueuePairInner>),
    /// The queue returns to its home pair. It stays where it is if a lease has reserved the home pair meanwhile.
    Returning,
}

/// Migrates a user's queue to another pair. Returns whether this call has started the migration: if several threads call this
/// for one queue, only one starts it.
pub(super) fn migrate_user(
    from: &QueuePairInner,
    number: u16,
    queue: NewQueuePairUser,
    to: &Arc<QueuePairInner>,
    role: QueuePairUserRole,
) -> bool {
    let current_pair = queue.current_pair.clone();
    // Locked throughout, so that migrations of one queue are serialised.
    let mut place = current_pair.lock();
    let joined = {
        // A reservation first marks the pair as reserved, and then migrates all users. So each user joins before the mark and
        // is migrated, or sees the mark under this lock.
        let mut core = to.lock();
        match role {
            QueuePairUserRole::Own => core.join(queue),
            QueuePairUserRole::Borrower(home_pair) => core.join_borrower(queue, home_pair),
            QueuePairUserRole::Returning if to.is_reserved() => return false,
            QueuePairUserRole::Returning => core.join(queue),
        }
    };
    let binding = QueuePairBinding {
        shared: to.clone(),
        user: joined,
    };
    let moved = from.lock().begin_migration(number, &current_pair, binding);
    if moved {
        *place = Arc::downgrade(to);
    } else {
        // The queue has ended, or another thread has migrated it.
        to.lock().leave(joined);
    }
    moved
}

/// Follows the migrations of a queue that has no commands, from the given binding to its current one. Calls `act` under the
/// lock of the queue's current pair. Returns the current binding, and the result of `act`.
pub(super) fn follow_migrations<T>(
    mut binding: QueuePairBinding,
    act: impl FnOnce(&mut QueuePairCore, u16) -> T,
) -> (QueuePairBinding, T) {
    loop {
        let mut core = binding.shared.lock();
        if let Some(next) = core.take_migration(binding.user, true) {
            drop(core);
            binding = next;
            continue;
        }
        let result = act(&mut core, binding.user);
        drop(core);
        return (binding, result);
    }
}
