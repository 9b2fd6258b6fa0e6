//! Bindings of queues to queue pairs, and the state of a queue that [migrates](super::migration).

use std::sync::{Arc, PoisonError, Weak};

use super::QueuePairInner;
use super::arbitration::LeaseShare;
use nvme_mpt::host::SharedQueuePair;
use nvme_mpt_memory::sync::{Mutex, MutexGuard};

/// A queue pair, and the user number that a queue has on it.
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

    /// Returns the pair; `None` once the pair was dropped.
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

/// Properties of a queue that joins a pair.
#[derive(Clone, Debug)]
pub(super) struct NewQueuePairUser {
    /// Maximum number of commands.
    pub(super) slots: u16,
    /// Logical block size of the queue's namespace in bytes, as the exponent of a power of two.
    pub(super) lba_shift: u8,
    pub(super) lease: Arc<LeaseShare>,
    pub(super) current_pair: Arc<CurrentQueuePair>,
}

/// Outstanding commands of a queue on one of its pairs.
#[derive(Debug)]
pub(super) struct LeftoverCommands {
    pub(super) binding: QueuePairBinding,
    pub(super) outstanding: u32,
}

/// State of a queue that is migrating.
#[derive(Debug, Default)]
pub(super) struct QueueMigration {
    /// Pair that the last batch went to, if the queue migrated with that batch.
    pub(super) next: Option<LeftoverCommands>,
    /// Pairs that the queue has left and where some of its commands are still in flight.
    pub(super) left: Vec<LeftoverCommands>,
}

/// Migrations of a pair's queues that the queues have not carried out yet: user number and destination.
#[derive(Debug, Default)]
pub(super) struct QueueMigrations(Vec<(u16, QueuePairBinding)>);

impl QueueMigrations {
    pub(super) fn add(&mut self, member: u16, to: QueuePairBinding) {
        self.0.push((member, to));
    }

    pub(super) fn has_user(&self, member: u16) -> bool {
        self.0.iter().any(|(number, _)| *number == member)
    }

    pub(super) fn take(&mut self, member: u16) -> Option<QueuePairBinding> {
        let place = self.0.iter().position(|(number, _)| *number == member)?;
        Some(self.0.swap_remove(place).1)
    }
}
