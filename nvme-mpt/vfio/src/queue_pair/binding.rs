//! Bindings of queues to queue pairs, and the state of a queue that [migrates](super::migration).

use std::sync::{Arc, PoisonError, Weak};

use super::QueuePairInner;
use super::arbitration::LeaseShare;
use nvme_mpt::host::SharedQueuePair;
use nvme_mpt_memory::sync::{Mutex, MutexGuard};

/// Binding of a queue to a queue pair, as one of its users.
#[derive(Clone, Debug)]
pub(super) struct QueuePairBinding {
    pub(super) shared: Arc<QueuePairInner>,
    pub(super) user: u16,
}

/// Pair that a queue currently uses. Migrations update it.
#[derive(Debug)]
pub(super) struct CurrentQueuePair(Mutex<Weak<QueuePairInner>>);

impl CurrentQueuePair {
    pub(super) fn new(shared: &Arc<QueuePairInner>) -> Arc<Self> {
        Arc::new(Self(Mutex::new(Arc::downgrade(shared))))
    }

    /// Returns the current pair; `None` once it was dropped.
    fn pair(&self) -> Option<Arc<QueuePairInner>> {
        self.lock().upgrade()
    }

    /// Locks the current pair of the queue. In the lock order, this lock comes before the locks of pairs.
    pub(super) fn lock(&self) -> MutexGuard<'_, Weak<QueuePairInner>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SharedQueuePair for CurrentQueuePair {
    fn user_count(&self) -> usize {
        self.pair().map_or(0, |shared| shared.lock().user_count())
    }

    fn is_reserved(&self) -> bool {
        self.pair().is_some_and(|shared| shared.is_reserved())
    }
}

/// A queue that joins a pair as a user, or a user's queue.
#[derive(Clone, Debug)]
pub(super) struct NewQueuePairUser {
    /// Maximum number of commands in flight of the queue.
    pub(super) slots: u16,
    /// Logical block size of the queue's namespace in bytes, as the exponent of a power of two.
    pub(super) lba_shift: u8,
    pub(super) lease: Arc<LeaseShare>,
    pub(super) current_pair: Arc<CurrentQueuePair>,
}

/// Commands of a queue that it has submitted to one pair, and that have not completed.
#[derive(Debug)]
pub(super) struct LeftoverCommands {
    pub(super) binding: QueuePairBinding,
    pub(super) outstanding: u32,
}

/// State of a queue that is migrating to another pair.
#[derive(Debug, Default)]
pub(super) struct QueueMigration {
    /// Pair of the last batch and its commands, if the queue has migrated with that batch.
    pub(super) next: Option<LeftoverCommands>,
    /// Pairs that the queue has left, each with the queue's commands that are still in flight there.
    pub(super) left: Vec<LeftoverCommands>,
}

/// Migrations that were started for a pair's queues and that the queues have not noticed yet: number of the user, and new
/// binding.
#[derive(Debug, Default)]
pub(super) struct QueueMigrations(Vec<(u16, QueuePairBinding)>);

impl QueueMigrations {
    pub(super) fn add(&mut self, user: u16, to: QueuePairBinding) {
        self.0.push((user, to));
    }

    pub(super) fn has_user(&self, user: u16) -> bool {
        self.0.iter().any(|(number, _)| *number == user)
    }

    pub(super) fn take(&mut self, user: u16) -> Option<QueuePairBinding> {
        let place = self.0.iter().position(|(number, _)| *number == user)?;
        Some(self.0.swap_remove(place).1)
    }
}
