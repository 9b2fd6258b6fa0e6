//! Moves of queues from one queue pair to another, while commands are in flight.
//!
//! The drive's control threads decide on a move; the queue's poller carries it out:
//!
//! 1. The queue becomes a member of the other pair. The old pair notes where it moves.
//! 2. The queue's next batch goes to the other pair. Commands that the old pair has complete there, and the queue reaps
//!    from both until the last of them has ended.
//! 3. The queue leaves the old pair.
//!
//! A queue without commands leaves the old pair in step 1, so that an idle queue is in no other's way.
//!
//! NVMe does not order commands in flight, so the two pairs may complete them in any order. Flush covers what completed
//! before it, whatever the pair.
//!
//! A queue that takes its turn looks for a move once per batch. One that has its pair to itself does not look: a move
//! of it makes its next batch take its turn.

use std::sync::{Arc, Weak};

use super::core::QueuePairCore;
use super::seat::{NewQueuePairUser, QueuePairBinding};
use super::{QueuePairInner, VfioQueuePair};

impl VfioQueuePair {
    /// Moves a queue to another pair: the first member that `which` selects by its reservation. Returns whether there
    /// was one. A queue that another caller moves meanwhile, or that ends, is none.
    pub fn move_one(&self, to: &Self, which: impl Fn(Option<u64>) -> bool) -> bool {
        loop {
            let found = self.shared.lock().find_staying(&which);
            let Some((number, newcomer)) = found else {
                return false;
            };
            if transfer(
                &self.shared,
                number,
                newcomer,
                &to.shared,
                QueuePairUserRole::Own,
            ) {
                return true;
            }
        }
    }

    /// Sets whether the pair belongs to one lease alone.
    pub fn set_reserved(&self, reserved: bool) {
        self.shared.set_reserved(reserved);
    }
}

/// Part that a queue has in the pair that it moves to.
#[derive(Clone, Debug)]
pub(super) enum QueuePairUserRole {
    /// One of the pair's own, as its caller decides.
    Own,
    /// One that borrows the pair, and came from this one.
    Borrower(Weak<QueuePairInner>),
    /// One that comes back to a pair, which may belong to a lease by now. It does not move then.
    Returning,
}

/// Moves a member to another pair. Returns whether it moves: of several callers that move it at the same time, one does.
pub(super) fn transfer(
    from: &QueuePairInner,
    number: u16,
    queue: NewQueuePairUser,
    to: &Arc<QueuePairInner>,
    role: QueuePairUserRole,
) -> bool {
    let whereabouts = queue.whereabouts.clone();
    // Held throughout, so that moves of one queue follow each other.
    let mut place = whereabouts.lock();
    let joined = {
        // Who reserves the pair sets that first, and then moves all that have joined under this lock.
        let mut core = to.lock();
        match role {
            QueuePairUserRole::Own => core.join(queue),
            QueuePairUserRole::Borrower(home) => core.borrow(queue, home),
            QueuePairUserRole::Returning if to.is_reserved() => return false,
            QueuePairUserRole::Returning => core.join(queue),
        }
    };
    let seat = QueuePairBinding {
        shared: to.clone(),
        member: joined,
    };
    let moved = from.lock().begin_move(number, &whereabouts, seat);
    if moved {
        *place = Arc::downgrade(to);
    } else {
        // It has ended meanwhile, or moves elsewhere.
        to.lock().leave(joined);
    }
    moved
}

/// Follows the moves of a queue that has no commands at `seat`. Returns its place, and what `act` made of it under
/// the lock of its pair.
pub(super) fn follow<T>(
    mut seat: QueuePairBinding,
    act: impl FnOnce(&mut QueuePairCore, u16) -> T,
) -> (QueuePairBinding, T) {
    loop {
        let mut core = seat.shared.lock();
        if let Some(next) = core.take_move(seat.member, true) {
            drop(core);
            seat = next;
            continue;
        }
        let result = act(&mut core, seat.member);
        drop(core);
        return (seat, result);
    }
}
