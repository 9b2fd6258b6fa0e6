//! Backing stores: where software drives store their blocks.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use nvme_guest::event::EventQueue;
use nvme_guest::host::{ControllerLimits, LeaseDamage};
use nvme_guest::inflight::LeaseWriteErrorRecord;
use nvme_lease::backing_id::DriveIdentity;
use nvme_lease::label::DriveLabel;
use nvme_lease::range::BlockRange;
use nvme_mpt::drive::{HostLeaseError, HostLeaseRequest};
use nvme_mpt::shadow::HostQueuePair;
use nvme_spec::status::Status;

use crate::model::{DriveModel, TimedQueue, TimedQueueBackend};

/// Status of a command of a lease that has lost completed writes. The command fails even if its own blocks are unaffected,
/// because a success would hide the loss from the guest.
pub(crate) const LOST_WRITES: Status = Status::WRITE_FAULT.with_dnr(true);

/// A store for the blocks of a software drive. A new kind of store implements this trait.
pub trait BackingStore: fmt::Debug + Send + Sync {
    /// Returns an identity of the stored bytes that does not depend on the path. It includes the storage below, such as the
    /// file of a loop device.
    fn identity(&self) -> DriveIdentity;

    /// Returns the Model Number, up to 40 characters.
    fn model(&self) -> &'static str;

    /// Returns the size in bytes.
    fn bytes(&self) -> u64;

    /// Adapts the limits of a software drive to this backing store.
    fn limits(&self, limits: ControllerLimits) -> ControllerLimits {
        limits
    }

    /// Returns true if no other process can access the blocks.
    fn is_private(&self) -> bool {
        true
    }

    /// Returns the path of the backing file or block device; `None` if the blocks are lost when the process ends.
    fn path(&self) -> Option<&Path> {
        None
    }

    /// Sets the timeout of storage requests. If a request exceeds it, its queue fails. A store in this process's memory has no
    /// such requests, and ignores the timeout.
    fn set_timeout(&self, timeout: Duration) {
        let _ = timeout;
    }

    /// Returns whether a transfer may block the submitting thread, because the storage depends on another process or host.
    fn may_block(&self) -> bool {
        false
    }

    /// Returns the drive's label; see [`label`](nvme_mpt::drive::HostController::label) of the host controller.
    fn label(&self) -> Option<(&DriveLabel, bool)> {
        None
    }

    /// Reads bytes of the drive; see [`peek`](nvme_mpt::drive::HostController::peek) of the host controller.
    fn peek(&self, offset: u64, into: &mut [u8]) -> Option<usize> {
        let _ = (offset, into);
        None
    }

    /// Makes each later sync of the blocks also sync `file`, after the blocks.
    fn set_companion_file(&self, file: Arc<File>) {
        let _ = file;
    }

    /// Opens a lease of part of the backing store.
    ///
    /// # Errors
    /// See [`HostLeaseError`].
    fn open_lease(
        &self,
        request: &HostLeaseRequest<'_>,
    ) -> Result<Box<dyn LeasedBackingStore>, HostLeaseError>;
}

/// The part of a backing store that belongs to one lease. Dropping it ends the lease.
pub trait LeasedBackingStore: fmt::Debug + Send + Sync {
    /// Creates a queue pair for up to `slots` commands, whose completions `pace` delays.
    ///
    /// # Errors
    /// Returns the kernel's error.
    fn create_queue(&self, slots: u16, pace: CommandTiming<'_>) -> io::Result<HostQueuePair>;

    /// Adds a part to the lease. The default does nothing, for backing stores without state per lease.
    ///
    /// # Errors
    /// See [`HostLeaseError`]. An error leaves the lease unchanged.
    fn add_part(&self, part: BlockRange) -> Result<(), HostLeaseError> {
        let _ = part;
        Ok(())
    }

    /// Returns the number of blocks at the start of a part that are known to be zero; see
    /// [`HostLease::leading_zeroes`](nvme_mpt::drive::HostLease::leading_zeroes).
    fn leading_zeroes(&self, part: BlockRange) -> u64 {
        let _ = part;
        0
    }

    /// Makes all completed writes of the lease durable.
    ///
    /// # Errors
    /// Returns the kernel's error. After a lost write, every flush of the lease fails.
    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    /// Releases the lease's locks, so that another process can continue the lease; see
    /// [`HostLease::release_locks`](nvme_mpt::drive::HostLease::release_locks).
    fn release_locks(&self) {}

    /// Reports damage that occurs from now on to `events`.
    fn subscribe(&self, events: &Arc<EventQueue>) {
        let _ = events;
    }

    /// Checks the lease's data for damage.
    fn damage(&self) -> LeaseDamage {
        LeaseDamage::default()
    }

    /// Returns whether damage is possible that only a periodic check finds.
    fn can_be_damaged(&self) -> bool {
        false
    }

    /// Records that completed writes of the lease's VMM were lost before this process opened the lease.
    fn record_earlier_write_errors(&self) {}

    /// Writes to `record`, now and at each change, whether the lease has lost writes, so that a successor process can read it.
    fn set_write_error_record(&self, record: LeaseWriteErrorRecord) {
        let _ = record;
    }

    /// Opens spare file descriptions, on which the kernel reports write-back errors to a successor; see
    /// [`HostLease::open_spare_fds`](nvme_mpt::drive::HostLease::open_spare_fds).
    ///
    /// # Errors
    /// Returns the kernel's error.
    fn open_spare_fds(&self) -> io::Result<Vec<OwnedFd>> {
        Ok(Vec::new())
    }

    /// Adopts the spare file descriptions of the predecessor; see
    /// [`HostLease::restore_spare_fds`](nvme_mpt::drive::HostLease::restore_spare_fds).
    ///
    /// # Errors
    /// Returns the kernel's error.
    fn restore_spare_fds(&self, spare: Vec<OwnedFd>) -> io::Result<bool> {
        let _ = spare;
        Ok(false)
    }

    /// Records lost writes of an earlier process: write-back errors on the spare file descriptions, and errors that were
    /// reported to other leases before this process opened this lease. Called when the lease continues after another process.
    fn restore_write_errors(&self) {}

    /// Loads the lease's uncorrectable blocks; see [`HostLease::restore_marks`](nvme_mpt::drive::HostLease::restore_marks).
    fn restore_marks(&self, marks: &[BlockRange], ask: Box<dyn Fn() + Send + Sync>) {
        let _ = (marks, ask);
    }

    /// Stores the lease's present uncorrectable blocks; see
    /// [`HostLease::store_marks`](nvme_mpt::drive::HostLease::store_marks).
    fn store_marks(&self, store: &mut dyn FnMut(&[BlockRange]) -> io::Result<()>) {
        let _ = store;
    }

    /// Resets the state of the lease when a VMM has connected.
    fn reset_state(&self) {}
}

/// Timing of a drive's commands: by a model, or as fast as the backing store allows.
#[derive(Clone, Copy, Debug)]
pub struct CommandTiming<'a>(pub(crate) Option<&'a Arc<DriveModel>>);

impl CommandTiming<'_> {
    /// Returns whether commands complete without a model's delay.
    #[must_use]
    pub fn is_immediate(self) -> bool {
        self.0.is_none()
    }

    /// Puts a layer that delays completions in front of a queue of the backing store, if there is a timing model.
    pub fn wrap_queue<Q>(self, queue: Q, slots: u16) -> HostQueuePair
    where
        Q: TimedQueueBackend + fmt::Debug + Send + 'static,
    {
        match self.0 {
            None => HostQueuePair::new(queue),
            Some(model) => HostQueuePair::new(TimedQueue::new(queue, model.clone(), slots)),
        }
    }
}
