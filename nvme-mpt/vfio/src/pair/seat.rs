//! Places of queues at queue pairs, and what a queue that [moves](super::moves) is at each of them.

use std::sync::{Arc, PoisonError, Weak};

use super::Shared;
use super::turns::LeaseShare;
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
    pub(super) fn lock(&self) -> MutexGuard<'_, Weak<Shared>> {
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
