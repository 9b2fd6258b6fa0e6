//! The control path of a host controller.

use std::any::Any;
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use nvme_guest::event::EventQueue;
use nvme_guest::host::{ControllerLimits, Mdts, TemperatureThresholds};
use nvme_guest::iova::IovaSpace;
use nvme_guest::rate_limit::LeaseWeight;
use nvme_lease::backing_id::DriveIdentityRef;
use nvme_lease::label::DriveLabel;
use nvme_spec::log::{ErrorInformation, SmartHealth};

use super::lease::{HostLease, HostLeaseError, HostLeaseRequest};
use super::namespace::HostNamespace;
use super::reservation::{QueuePairReservation, ReserveError};

/// Use of a host controller's limited number of I/O queue pairs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueuePairUse {
    /// Total number of I/O queue pairs that the drive has.
    pub total: u16,
    /// Queue pairs that are reserved for single leases, used or not.
    pub reserved: u16,
    /// Unreserved queue pairs with one shadow queue each.
    pub exclusive: u16,
    /// Unreserved queue pairs with several shadow queues each.
    pub shared: u16,
}

impl QueuePairUse {
    /// Returns the number of unused queue pairs.
    #[must_use]
    pub fn free(&self) -> u16 {
        self.total - self.reserved - self.exclusive - self.shared
    }
}

/// Incidents of a drive since it was opened, and the reactions to them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DriveIncidents {
    /// Commands that did not complete within their deadline.
    pub timeouts: u64,
    /// Abort commands that were sent for these overdue commands.
    pub aborts: u64,
    /// Controller resets.
    pub resets: u64,
    /// True if the drive failed permanently or was removed. Every command then fails.
    pub is_gone: bool,
}

/// The control path of a host controller.
pub trait HostController: Any + Send + Sync + fmt::Debug {
    /// Returns the drive's persistent name, which does not depend on its path, and the drive's other names.
    fn identity(&self) -> DriveIdentityRef<'_>;

    /// Returns the Model Number, up to 40 characters.
    fn model(&self) -> &str;

    /// Returns the controller's limits.
    fn limits(&self) -> &ControllerLimits;

    /// Returns the largest MDTS that an operator may choose for a function. By default this is the MDTS of [`Self::limits`],
    /// which also applies if the operator chooses none.
    fn mdts_max(&self) -> Mdts {
        Mdts::from_log2_pages(self.limits().mdts)
    }

    /// Returns the active namespaces, by ascending identifier.
    fn namespaces(&self) -> Vec<HostNamespace>;

    /// Returns the address space of the drive's DMA.
    fn iova_space(&self) -> &Arc<IovaSpace>;

    /// Opens a lease of parts of a namespace. Refuses a part that another program or server uses without an entry in the
    /// ledger.
    ///
    /// # Errors
    /// See [`HostLeaseError`].
    fn open_lease(
        self: Arc<Self>,
        request: &HostLeaseRequest<'_>,
    ) -> Result<Box<dyn HostLease>, HostLeaseError>;

    /// Returns the label on the drive, and whether leases use the label as the drive's name.
    fn label(&self) -> Option<(&DriveLabel, bool)> {
        None
    }

    /// Reads bytes of a drive that is a file or block device of the host. The caller checks by them whether the drive holds
    /// something else, before the first lease. Returns the number of bytes read; `None` for drives of other kinds and for
    /// unreadable bytes.
    fn peek(&self, offset: u64, into: &mut [u8]) -> Option<usize> {
        let _ = (offset, into);
        None
    }

    /// Returns whether the drive exists in this process only, so that no other process can lease parts of it.
    fn is_private(&self) -> bool {
        false
    }

    /// Reserves I/O queue pairs for one lease until the returned reservation is dropped. `weight` is the lease's initial
    /// weight.
    ///
    /// # Errors
    /// See [`ReserveError`]. Nothing is reserved after an error.
    fn reserve_pairs(
        self: Arc<Self>,
        lease: &str,
        pairs: u16,
        weight: LeaseWeight,
    ) -> Result<QueuePairReservation, ReserveError> {
        let _ = (lease, pairs, weight);
        Err(ReserveError::Unbounded)
    }

    /// Returns the kernel's number of the NUMA node that the drive is attached to; `None` if the node is unknown.
    fn numa_node(&self) -> Option<u32> {
        None
    }

    /// Returns whether submitting a command may block the thread until another process or host has answered, as for a file on
    /// NFS or FUSE. Such a drive shares no poller with other drives.
    fn may_block(&self) -> bool {
        false
    }

    /// Returns the size in bytes that every lease of the drive is a multiple of, if each lease must be one contiguous range.
    /// Returns `None` if leases may have any size and several ranges.
    fn lease_unit_bytes(&self) -> Option<u64> {
        None
    }

    /// Returns the use of the I/O queue pairs; `None` if their number is not limited.
    fn queue_pairs(&self) -> Option<QueuePairUse> {
        None
    }

    /// Returns the drive's SMART / Health Information, which covers all users together; `None` if the drive has no such log
    /// page.
    ///
    /// # Errors
    /// Returns the drive's error. Also fails while the drive is being reset, and after it was removed.
    fn smart_health(&self) -> io::Result<Option<SmartHealth>> {
        Ok(None)
    }

    /// Returns the drive's Error Information entries, newest first. They contain the host's command identifiers and LBAs, so
    /// guests must not see them unchanged.
    ///
    /// # Errors
    /// As [`Self::smart_health`].
    fn error_information(&self) -> io::Result<Vec<ErrorInformation>> {
        Ok(Vec::new())
    }

    /// Returns the temperatures at which the drive warns; `None` if it measures no temperature.
    fn temperature_thresholds(&self) -> Option<TemperatureThresholds> {
        None
    }

    /// Returns the incidents since the drive was opened.
    fn incidents(&self) -> DriveIncidents {
        DriveIncidents::default()
    }

    /// Returns whether a resized namespace keeps the data of the blocks that it still has. This is true for files; a physical
    /// drive instead deletes the namespace and creates a new one.
    fn can_resize_in_place(&self) -> bool {
        false
    }

    /// Quiesces the drive and returns the descriptors for its successor. `None` if the successor opens the drive anew.
    ///
    /// The caller ensures that no function has an in-flight command. Admin commands wait until [`Self::cancel_hand_over`] is
    /// called or this process exits.
    ///
    /// # Errors
    /// Returns an error if the drive cannot be quiesced. This process then continues to use the drive, and the successor resets
    /// it.
    fn hand_over(&self) -> io::Result<Option<Vec<OwnedFd>>> {
        Ok(None)
    }

    /// Returns whether two processes can have the drive open at the same time. The second process can lease parts that the
    /// first one has [released](HostLease::release_locks).
    fn can_open_concurrently(&self) -> bool {
        false
    }

    /// Resumes the use of the drive after [`Self::hand_over`], if no other process took the drive.
    fn cancel_hand_over(&self) {}

    /// Schedules the removal, after `time`, of the mappings of VMs' memory that the predecessor left. Those that functions of
    /// this process have mapped again by then stay.
    fn expire_predecessor_mappings(&self, time: Duration) {
        let _ = time;
    }

    /// Reports the drive's events ([`Event::Drive`](nvme_guest::event::IoQueueEvent::Drive)) to the queue `events`, until that
    /// queue is dropped.
    fn subscribe(&self, events: &Arc<EventQueue>) {
        let _ = events;
    }
}
