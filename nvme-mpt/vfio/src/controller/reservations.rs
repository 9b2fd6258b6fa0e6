//! Queue pairs that are reserved for leases.
//!
//! A reservation takes its pairs when it is made: unused pairs first, then the pairs with the fewest users. Queues of other
//! leases migrate from these pairs to unreserved pairs (`queue_pair/migration.rs`). So a reservation is refused only if other
//! reservations leave too few pairs. One pair always stays unreserved, for queues without a reservation, wipes and flushes.
//!
//! The drive monitor evens out the queues among the unreserved pairs, so a pair whose reservation ends goes to queues that
//! share a pair.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use log::info;

use super::error::ControllerError;
use super::queue_pairs::{QueuePairs, ReservationHolder};
use super::{PhysicalDrive, VfioController, lock};
use nvme_guest::rate_limit::LeaseWeight;
use nvme_mpt::drive::{QueuePairReservation, ReserveError, ReservedPairs};
use nvme_spec::admin::QueuePriority;

/// Number of queue pairs of each drive that cannot be reserved, so that leases without a reservation have one.
const UNRESERVED_MIN: u16 = 1;

/// Key of the next reservation of queue pairs, unique among all drives of this process.
static NEXT_KEY: AtomicU64 = AtomicU64::new(0);

/// A lease's right to its reserved queue pairs. The right ends when this is dropped.
#[derive(Debug)]
struct ReservationGrant {
    key: u64,
    controller: Arc<VfioController>,
}

impl Drop for ReservationGrant {
    fn drop(&mut self) {
        self.controller.drive.release_pairs(self.key);
    }
}

impl QueuePairs {
    /// Refuses a reservation of queue pairs if those of other leases leave too few.
    fn check_available(&self, drive: &str, requested: u16) -> Result<(), ReserveError> {
        let left = self
            .total()
            .saturating_sub(self.reserved() + UNRESERVED_MIN);
        if requested <= left {
            return Ok(());
        }
        Err(ReserveError::TooFew {
            drive: drive.to_owned(),
            requested,
            left,
            total: self.total(),
            holders: self
                .holders
                .iter()
                .map(|holder| holder.pairs.clone())
                .collect(),
        })
    }
}

impl PhysicalDrive {
    /// Reserves `requested` queue pairs for a lease. Returns the key of the reservation. If the drive is being reset, waits for
    /// a short time, and then fails.
    fn reserve_pairs(
        &self,
        lease: &str,
        requested: u16,
        weight: LeaseWeight,
    ) -> Result<u64, ReserveError> {
        let failed = |error: ControllerError| ReserveError::Io(error.into());
        let mut pairs = self.wait_for_pairs().map_err(failed)?;
        if self.is_gone() {
            return Err(failed(ControllerError::Gone));
        }
        let name = self.backing.name();
        pairs.check_available(name, requested)?;
        // All promised pairs are created now, because the drive may be able to have fewer pairs than it granted.
        let promised = pairs.reserved() + requested + UNRESERVED_MIN;
        let class = self.priority_class(weight.get().into());
        let of_lease = class.unwrap_or(QueuePriority::MEDIUM);
        while pairs.count() < promised {
            let priority = match pairs.count() - pairs.reserved() {
                // The first unreserved pair is for queues of all leases.
                0 => QueuePriority::MEDIUM,
                _ => of_lease,
            };
            if !self.add_pair(&mut pairs, priority).map_err(failed)? {
                break;
            }
        }
        pairs.check_available(name, requested)?;
        let key = NEXT_KEY.fetch_add(1, Ordering::Relaxed);
        for _ in 0..requested {
            pairs.assign_pair(key, of_lease);
        }
        if pairs.usage().shared > 0 {
            self.log_sharing(&pairs);
        }
        let lease = lease.to_owned();
        info!(drive = name, lease = lease.as_str(); "Drive {name}: {requested} queue pairs belong to lease {lease}");
        pairs.holders.push(ReservationHolder {
            key,
            pairs: ReservedPairs {
                lease,
                pairs: requested,
            },
        });
        Ok(key)
    }

    /// Ends a reservation of queue pairs, given by its key. Queues that share a pair migrate to the freed ones: immediately, or
    /// by the drive monitor if a reset is in progress.
    fn release_pairs(&self, key: u64) {
        let mut pairs = lock(&self.pairs);
        pairs.holders.retain(|holder| holder.key != key);
        pairs.unassign_pairs(key);
        if !pairs.is_resetting {
            pairs.rebalance();
        }
    }

    /// Surveys the users of all pairs, and sends the weights of the priority classes to the drive. If queues share pairs, also
    /// evens out the queues among the pairs and lends idle pairs.
    pub(super) fn rebalance(&self) {
        let mut pairs = lock(&self.pairs);
        let loads = pairs.survey();
        if self.counters.is_sharing.load(Ordering::Relaxed) {
            pairs.rebalance();
            pairs.lend_idle_pairs();
        }
        drop(pairs);
        self.update_class_weights(&loads);
    }
}

impl VfioController {
    /// Reserves queue pairs for a lease until the returned reservation is dropped.
    pub(super) fn grant_reservation(
        self: Arc<Self>,
        lease: &str,
        pairs: u16,
        weight: LeaseWeight,
    ) -> Result<QueuePairReservation, ReserveError> {
        let key = self.drive.reserve_pairs(lease, pairs, weight)?;
        let grant = ReservationGrant {
            key,
            controller: self,
        };
        Ok(QueuePairReservation::new(key, pairs, grant))
    }
}
