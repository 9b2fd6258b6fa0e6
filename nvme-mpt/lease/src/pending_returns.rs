//! Batching of leases that several threads return at the same time, so that one change of the ledger removes them all.
//!
//! A change writes and syncs the whole ledger under its file lock. When a server ends, all its functions return their
//! leases.

use std::sync::{Arc, OnceLock, PoisonError};

use nvme_mpt_memory::sync::{Mutex, MutexGuard};

use super::holder::LeaseSlot;
use super::ledger_store::LedgerStoreError;

/// Result of the ledger change that removed a lease. The thread that made the change passes it to the thread that returns the
/// lease.
type LeaseReturnResult = Arc<OnceLock<Result<(), Arc<LedgerStoreError>>>>;

/// Leases that threads are returning to the ledger.
#[derive(Debug, Default)]
pub(super) struct PendingLeaseReturns {
    waiting: Mutex<Vec<(LeaseSlot, LeaseReturnResult)>>,
    /// Lock of the thread that changes the ledger. It does so for itself and for all waiting threads.
    change_lock: Mutex<()>,
}

impl PendingLeaseReturns {
    /// Returns a lease, together with those of all waiting threads. `change` removes the given leases from the ledger. If
    /// another thread runs its `change`, waits for it; that change may include this lease.
    ///
    /// # Errors
    /// Returns the error of the change to each of its leases.
    pub(super) fn return_lease(
        &self,
        slot: LeaseSlot,
        change: impl FnOnce(&[LeaseSlot]) -> Result<(), LedgerStoreError>,
    ) -> Result<(), LedgerStoreError> {
        let outcome = LeaseReturnResult::default();
        lock(&self.waiting).push((slot, outcome.clone()));
        let _turn = lock(&self.change_lock);
        if let Some(outcome) = outcome.get() {
            return outcome.clone().map_err(LedgerStoreError::Together);
        }
        let mut waiting = std::mem::take(&mut *lock(&self.waiting));
        if !waiting
            .iter()
            .any(|(_, other)| Arc::ptr_eq(other, &outcome))
        {
            // The thread that took this entry from the list has panicked, so this thread removes the lease itself.
            waiting.push((slot, outcome));
        }
        let slots: Vec<_> = waiting.iter().map(|(slot, _)| *slot).collect();
        let result = change(&slots).map_err(Arc::new);
        for (_, outcome) in waiting {
            // Only the thread that changed the ledger sets the outcome.
            let _ = outcome.set(result.clone());
        }
        result.map_err(LedgerStoreError::Together)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::path::PathBuf;
    use std::sync::mpsc::channel;
    use std::thread;
    use std::time::Duration;

    use super::*;

    #[test]
    fn leases_that_are_given_back_at_the_same_time_are_one_change() {
        let returns = PendingLeaseReturns::default();
        let changes = Mutex::new(Vec::new());
        let (begins, began) = channel();
        let (end, ends) = channel::<()>();
        let give_back = |slot| {
            returns.return_lease(LeaseSlot(slot), |slots| {
                let mut changes = changes.lock().unwrap();
                changes.push(slots.to_vec());
                Err(LedgerStoreError::Io {
                    action: "write the ledger to",
                    path: PathBuf::from("/run/ledger"),
                    source: io::ErrorKind::StorageFull.into(),
                })
            })
        };
        thread::scope(|scope| {
            let returns = &returns;
            let first = scope.spawn(move || {
                returns.return_lease(LeaseSlot(0), |slots| {
                    assert_eq!(slots, [LeaseSlot(0)]);
                    begins.send(()).unwrap();
                    ends.recv().unwrap();
                    Ok(())
                })
            });
            began.recv().unwrap();
            let give_back = &give_back;
            let others: Vec<_> = (1..9)
                .map(|slot| scope.spawn(move || give_back(slot)))
                .collect();
            while returns.waiting.lock().unwrap().len() < others.len() {
                thread::sleep(Duration::from_millis(1));
            }
            end.send(()).unwrap();
            first.join().unwrap().unwrap();
            for other in others {
                let error = other.join().unwrap().unwrap_err();
                assert!(
                    error
                        .to_string()
                        .starts_with("Cannot write the ledger to /run/ledger")
                );
            }
        });
        let mut changes = changes.into_inner().unwrap();
        assert_eq!(changes.len(), 1);
        changes[0].sort_unstable_by_key(|slot| slot.0);
        assert_eq!(changes[0], (1..9).map(LeaseSlot).collect::<Vec<_>>());
    }
}
