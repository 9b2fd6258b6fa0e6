//! Lease, drive and related resources of a local back end, released after their last use.

use std::io;
use std::sync::Arc;

use log::error;
use nvme_lease::Lease;

use crate::drive::Drive;
use crate::drive::{HostLease, QueuePairReservation};

use super::spare_descriptors::SpareDescriptors;

/// A lease with its range lock and its drive.
///
/// The local back end, each of its shadow queues and each flush hold a reference. So the lease lives until its last command has
/// ended, even if the back end has stopped waiting.
#[derive(Debug)]
pub(crate) struct OpenLease {
    /// Dropped before the lease, so that the lease's next holder finds the range unlocked.
    host: Box<dyn HostLease>,
    /// Dropped after `host`, but while the drive is still open. Otherwise the supervisor process could be the last one to close
    /// a block device, and would wait there until all writes have ended.
    pub(super) spare: Option<SpareDescriptors>,
    /// Dropped after all queues of the lease.
    pub(super) reservation: Option<QueuePairReservation>,
    pub(super) lease: Lease,
    pub(super) drive: Arc<Drive>,
}

impl OpenLease {
    pub(super) fn new(
        lease: Lease,
        host: Box<dyn HostLease>,
        spare: Option<SpareDescriptors>,
        reservation: Option<QueuePairReservation>,
        drive: Arc<Drive>,
    ) -> Self {
        Self {
            host,
            spare,
            reservation,
            lease,
            drive,
        }
    }

    /// Returns the lease as it is open at the host controller.
    pub(crate) fn host(&self) -> &dyn HostLease {
        self.host.as_ref()
    }

    /// Stores the unreadable blocks of the lease in the ledger. The call takes as long as the ledger's disk needs.
    pub(super) fn store_marks(&self) {
        let marks = self.lease.uncorrectable_marks();
        self.host.store_marks(&mut |blocks| {
            marks.store(blocks).map_err(|error| {
                let id = self.lease.id();
                error!(lease = id; "Unreadable blocks of lease {id} cannot be stored, so commands on them fail: {error}");
                io::Error::other(error)
            })
        });
    }

    /// Makes all completed writes of the lease durable. The call takes as long as the drive needs.
    pub(super) fn flush(&self) -> io::Result<()> {
        self.host.flush()
    }
}
