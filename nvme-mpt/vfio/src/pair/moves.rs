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

use std::sync::{Arc, PoisonError, Weak};

use super::core::Core;
use super::turns::LeaseShare;
use super::{Pair, Shared};
use nvme_mpt::host::SharedPair;
use nvme_mpt::memory::sync::{Mutex, MutexGuard};

/// Place of a queue: its number among the members of a pair.
#[derive(Clone, Debug)]
pub(super) struct Seat {
    pub(super) shared: Arc<Shared>,
    pub(super) member: u16,
}

/// Pair that a queue is a member of, wherever it moves.
#[derive(Debug)]
pub(super) struct Whereabouts(Mutex<Weak<Shared>>);

impl Whereabouts {
    pub(super) fn new(shared: &Arc<Shared>) -> Arc<Self> {
        Arc::new(Self(Mutex::new(Arc::downgrade(shared))))
    }

    /// Returns the pair; `None` once it is gone.
    fn pair(&self) -> Option<Arc<Shared>> {
        self.lock().upgrade()
    }

    /// Comes before the locks of pairs.
    fn lock(&self) -> MutexGuard<'_, Weak<Shared>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SharedPair for Whereabouts {
    fn members(&self) -> usize {
        self.pair().map_or(0, |shared| shared.lock().members())
    }

    fn is_reserved(&self) -> bool {
        self.pair().is_some_and(|shared| shared.is_reserved())
    }
}

/// A queue as a pair takes it up.
#[derive(Clone, Debug)]
pub(super) struct Newcomer {
    /// Most commands.
    pub(super) slots: u16,
    /// Logical block size of its namespace, as a power of two.
    pub(super) lba_shift: u8,
    pub(super) lease: Arc<LeaseShare>,
    pub(super) whereabouts: Arc<Whereabouts>,
}

/// Commands of a queue at a pair that it left.
#[derive(Debug)]
pub(super) struct Remainder {
    pub(super) seat: Seat,
    pub(super) outstanding: u32,
}

/// State of a queue that moves.
#[derive(Debug, Default)]
pub(super) struct Moving {
    /// Place of its last batch, if it moved with that.
    pub(super) next: Option<Remainder>,
    /// Places that it left with commands in flight.
    pub(super) left: Vec<Remainder>,
}

/// Moves that a pair knows of: the members' numbers, and where they go.
#[derive(Debug, Default)]
pub(super) struct Moves(Vec<(u16, Seat)>);

impl Moves {
    pub(super) fn note(&mut self, member: u16, to: Seat) {
        self.0.push((member, to));
    }

    pub(super) fn has(&self, member: u16) -> bool {
        self.0.iter().any(|(number, _)| *number == member)
    }

    pub(super) fn take(&mut self, member: u16) -> Option<Seat> {
        let place = self.0.iter().position(|(number, _)| *number == member)?;
        Some(self.0.swap_remove(place).1)
    }
}

impl Pair {
    /// Moves a queue to another pair: the first member that `which` selects by its reservation. Returns whether there
    /// was one. A queue that another caller moves meanwhile, or that ends, is none.
    pub fn move_one(&self, to: &Self, which: impl Fn(Option<u64>) -> bool) -> bool {
        loop {
            let found = self.shared.lock().find_staying(&which);
            let Some((number, newcomer)) = found else {
                return false;
            };
            if transfer(&self.shared, number, newcomer, &to.shared, Role::Own) {
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
pub(super) enum Role {
    /// One of the pair's own, as its caller decides.
    Own,
    /// One that borrows the pair, and came from this one.
    Borrower(Weak<Shared>),
    /// One that comes back to a pair, which may belong to a lease by now. It does not move then.
    Returning,
}

/// Moves a member to another pair. Returns whether it moves: of several callers that move it at the same time, one does.
pub(super) fn transfer(
    from: &Shared,
    number: u16,
    queue: Newcomer,
    to: &Arc<Shared>,
    role: Role,
) -> bool {
    let whereabouts = queue.whereabouts.clone();
    // Held throughout, so that moves of one queue follow each other.
    let mut place = whereabouts.lock();
    let joined = {
        // Who reserves the pair sets that first, and then moves all that have joined under this lock.
        let mut core = to.lock();
        match role {
            Role::Own => core.join(queue),
            Role::Borrower(home) => core.borrow(queue, home),
            Role::Returning if to.is_reserved() => return false,
            Role::Returning => core.join(queue),
        }
    };
    let seat = Seat {
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
pub(super) fn follow<T>(mut seat: Seat, act: impl FnOnce(&mut Core, u16) -> T) -> (Seat, T) {
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
