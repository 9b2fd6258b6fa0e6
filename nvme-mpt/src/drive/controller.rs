//! The control path of a host controller.

use std::any::Any;
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use super::label::DriveLabel;
use super::lease::{HostLease, HostLeaseError, HostLeaseRequest};
use super::namespace::HostNamespace;
use super::reservation::{QueuePairReservation, ReserveError};
use crate::event::EventQueue;
use crate::host::{ControllerLimits, Mdts, TemperatureThresholds};
use crate::iova::IovaSpace;
use crate::limit::LeaseWeight;
use crate::origin::DriveIdentityRef;
use crate::spec::log::{ErrorInformation, SmartHealth};

/// I/O queue pairs of a host controller that has a number of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueuePairUse {
    /// Total of the drive.
    pub total: u16,
    /// Those that belong to one lease each, used or not.
    pub reserved: u16,
    /// Those that one shadow queue has to itself, of those without a reservation.
    pub exclusive: u16,
    /// Those that several shadow queues share, of those without a reservation.
    pub shared: u16,
}

impl QueuePairUse {
    /// Those that nobody uses.
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
    /// Abort commands for such commands.
    pub aborts: u64,
    /// Controller resets.
    pub resets: u64,
    /// True if it failed for good or was removed: every command fails.
    pub gone: bool,
}

/// The control path of a host controller.
pub trait HostController: Any + Send + Sync + fmt::Debug {
    /// Returns the name that stays the same for the same drive, whatever path leads to it, and its other names.
    fn identity(&self) -> DriveIdentityRef<'_>;

    /// Model Number, up to 40 characters.
    fn model(&self) -> &str;

    /// Returns its abilities.
    fn limits(&self) -> &ControllerLimits;

    /// Returns the most data of one command that a function on it can be given; that of [`Self::limits`] unless the
    /// operator chooses.
    fn mdts_max(&self) -> Mdts {
        Mdts::of_pages(self.limits().mdts)
    }

    /// Its active namespaces, by ascending identifier.
    fn namespaces(&self) -> Vec<HostNamespace>;

    /// The addresses that it can be given.
    fn iova_space(&self) -> &Arc<IovaSpace>;

    /// Opens a lease of part of a namespace. It finds what a ledger cannot know of: other users of the same bytes.
    ///
    /// # Errors
    /// See [`HostLeaseError`].
    fn open_lease(
        self: Arc<Self>,
        request: &HostLeaseRequest<'_>,
    ) -> Result<Box<dyn HostLease>, HostLeaseError>;

    /// Returns the label that lies on the drive, and whether the drive is used by it.
    fn label(&self) -> Option<(&DriveLabel, bool)> {
        None
    }

    /// Reads bytes of a file or block device of the host, to check its content before the first lease. Returns their number;
    /// `None` for other drives, and for bytes that cannot be read.
    fn peek(&self, offset: u64, into: &mut [u8]) -> Option<usize> {
        let _ = (offset, into);
        None
    }

    /// Returns whether the drive exists in this process only, so that no other can have a lease of it.
    fn is_private(&self) -> bool {
        false
    }

    /// Makes I/O queue pairs those of one lease, until the reservation is dropped. The lease begins with this weight.
    ///
    /// # Errors
    /// See [`ReserveError`]. Nothing is reserved then.
    fn reserve(
        self: Arc<Self>,
        lease: &str,
        pairs: u16,
        weight: LeaseWeight,
    ) -> Result<QueuePairReservation, ReserveError> {
        let _ = (lease, pairs, weight);
        Err(ReserveError::Unbounded)
    }

    /// Returns the node of the host's memory that the drive is next to, by the kernel's number; `None` if it is next to
    /// none, or that is not known.
    fn numa_node(&self) -> Option<u32> {
        None
    }

    /// Returns whether the kernel may make a thread that submits commands wait for other processes or hosts. Such a drive
    /// shares no poller with others.
    fn may_block(&self) -> bool {
        false
    }

    /// Returns the number of bytes of which a lease is a multiple and one part; `None` if leases may be any parts.
    fn whole_lease(&self) -> Option<u64> {
        None
    }

    /// Returns the use of its I/O queue pairs; `None` without a bound on them.
    fn queue_pairs(&self) -> Option<QueuePairUse> {
        None
    }

    /// The drive's own SMART / Health Information, which is that of all its users together; `None`
    /// if it keeps none.
    ///
    /// # Errors
    /// Returns the drive's error; nothing of it is known while the drive is reset or gone.
    fn smart_health(&self) -> io::Result<Option<SmartHealth>> {
        Ok(None)
    }

    /// The drive's own Error Information entries, newest first. They name its users' commands by
    /// the host's identifiers and LBAs, so no guest may see them as they are.
    ///
    /// # Errors
    /// As [`Self::smart_health`].
    fn error_information(&self) -> io::Result<Vec<ErrorInformation>> {
        Ok(Vec::new())
    }

    /// When the drive warns of its temperature; `None` if it measures none.
    fn temperature_thresholds(&self) -> Option<TemperatureThresholds> {
        None
    }

    /// Returns its incidents so far.
    fn incidents(&self) -> DriveIncidents {
        DriveIncidents::default()
    }

    /// Returns whether a namespace whose size changes keeps its blocks, as far as it has them. That of a
    /// physical drive is deleted, and another one created in its place.
    fn resizes_in_place(&self) -> bool {
        false
    }

    /// Has the drive rest, and returns descriptors with which another process goes on with it as it is. `None` for a
    /// drive that the next process opens anew.
    ///
    /// No function has a command in flight. Admin commands wait until [`Self::take_back`], or this process ends without
    /// giving the drive back.
    ///
    /// # Errors
    /// The drive cannot rest, and goes on: the next process resets it.
    fn hand_over(&self) -> io::Result<Option<Vec<OwnedFd>>> {
        Ok(None)
    }

    /// Returns whether another process can open the drive while this one has it open, and lease parts of it that this one
    /// has [let go](HostLease::let_go) of.
    fn opens_beside(&self) -> bool {
        false
    }

    /// Ends the rest of [`Self::hand_over`]: no other process has the drive.
    fn take_back(&self) {}

    /// Takes memory from the drive that the process before had mapped, and that no function of this one has after `time`.
    fn end_inheritance(&self, time: Duration) {
        let _ = time;
    }

    /// Tells of the drive's events ([`Event::Drive`](crate::event::IoQueueEvent::Drive)) from now on, as
    /// long as the queue lives.
    fn subscribe(&self, events: &Arc<EventQueue>) {
        let _ = events;
    }
}
