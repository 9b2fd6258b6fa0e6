//! Places of queues at queue pairs, and what a queue that [moves](super::moves) is at each of them.

use std::sync::{Arc, PoisonError, Weak};

use super::QueuePairInner;
use super::turns::LeaseShare;
use nvme_mpt::host::SharedQueuePair;
use nvme_mpt::memory::sync::{Mutex, MutexGuard};

/// Place of a queue: its number among the members of a pair.
#[derive(Clone, Debug)]
pub(super) struct QueuePairBinding {
    pub(super) shared: Arc<QueuePairInner>,
    pub(super) member: u16,
}

/// Pair that a queue is a member of, wherever it moves.
#[derive(Debug)]
pub(super) struct CurrentQueuePair(Mutex<Weak<QueuePairInner>>);

impl CurrentQueuePair {
    pub(super) fn new(shared: &Arc<QueuePairInner>) -> Arc<Self> {
        Arc::new(Self(Mutex::new(Arc::downgrade(shared))))
    }

    /// Returns the pair; `None` once it is gone.
    fn pair(&self) -> Option<Arc<QueuePairInner>> {
        self.lock().upgrade()
    }

    /// Comes before the locks of pairs.
    pub(super) fn lock(&self) -> MutexGuard<'_, Weak<QueuePairInner>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SharedQueuePair for CurrentQueuePair {
    fn members(&self) -> usize {
        self.pair().map_or(0, |shared| shared.lock().members())
    }

    fn is_reserved(&self) -> bool {
        self.pair().is_some_and(|shared| shared.is_reserved())
    }
}

/// A queue as a pair takes it up.
#[derive(Clone, Debug)]
pub(super) struct NewQueuePairUser {
    /// Most commands.
    pub(super) slots: u16,
    /// Logical block size of its namespace, as a power of two.
    pub(super) lba_shift: u8,
    pub(super) lease: Arc<LeaseShare>,
    pub(super) whereabouts: Arc<CurrentQueuePair>,
}

/// Commands of a queue at a pair that it left.
#[derive(Debug)]
pub(super) struct LeftoverCommands {
    pub(super) seat: QueuePairBinding,
    pub(super) outstanding: u32,
}

/// State of a queue that moves.
#[derive(Debug, Default)]
pub(super) struct QueueMigration {
    /// Place of its last batch, if it moved with that.
    pub(super) next: Option<LeftoverCommands>,
    /// Places that it left with commands in flight.
    pub(super) left: Vec<LeftoverCommands>,
}

/// Moves that a pair knows of: the members' numbers, and where they go.
#[derive(Debug, Default)]
pub(super) struct QueueMigrations(Vec<(u16, QueuePairBinding)>);

impl QueueMigrations {
    pub(super) fn note(&mut self, member: u16, to: QueuePairBinding) {
        self.0.push((member, to));
    }

    pub(super) fn has(&self, member: u16) -> bool {
        self.0.iter().any(|(number, _)| *number == member)
    }

    pub(super) fn take(&mut self, member: u16) -> Option<QueuePairBinding> {
        let place = self.0.iter().position(|(number, _)| *number == member)?;
        Some(self.0.swap_remove(place).1)
    }
}
