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

/// Status of a command that fails because completed writes of its lease were lost, or that would hide this loss. The blocks of
/// this command itself are unaffected.
pub(crate) const LOST_WRITES: Status = Status::WRITE_FAULT.with_dnr(true);

/// A backing store for the blocks of a software drive. Implement it to add a new kind of store.
pub trait BackingStore: fmt::Debug + Send + Sync {
    /// Returns a name that identifies the stored bytes independently of the path. The result also names the storage below, such
    /// as the file of a loop device.
    fn identity(&self) -> DriveIdentity;

    /// Returns the Model Number, up to 40 characters.
    fn model(&self) -> &'static str;

    /// Returns the size in bytes.
    fn bytes(&self) -> u64;

    /// Adapts the limits of a software drive to this backing store.
    fn limits(&self, limits: ControllerLimits) -> ControllerLimits {
        limits
    }

    /// Returns whether no other process can access the blocks.
    fn is_private(&self) -> bool {
        true
    }

    /// Returns the path of the backing file or block device, or `None` if the blocks are lost when the process ends.
    fn path(&self) -> Option<&Path> {
        None
    }

    /// Sets the time after which a pending storage request fails its queue. A store in this process's memory ignores the
    /// timeout.
    fn set_timeout(&self, timeout: Duration) {
        let _ = timeout;
    }

    /// Returns whether a transfer may block the submitting thread while it waits for another process or host.
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

    /// From now on, makes each sync of the blocks also sync `file` afterwards.
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

/// The parts of a backing store that belong to one lease. Dropping it ends the lease.
pub trait LeasedBackingStore: fmt::Debug + Send + Sync {
    /// Creates a queue pair for up to `slots` commands, timed by `pace`.
    ///
    /// # Errors
    /// Returns the kernel's error.
    fn create_queue(&self, slots: u16, pace: CommandTiming<'_>) -> io::Result<HostQueuePair>;

    /// Appends a part to the lease. The default does nothing, for backing stores without state per lease.
    ///
    /// # Errors
    /// See [`HostLeaseError`]. On an error, the lease is unchanged.
    fn add_part(&self, part: BlockRange) -> Result<(), HostLeaseError> {
        let _ = part;
        Ok(())
    }

    /// Returns how many blocks at the start of a part are known to be zero; see
    /// [`HostLease::leading_zeroes`](nvme_mpt::drive::HostLease::leading_zeroes).
    fn leading_zeroes(&self, part: BlockRange) -> u64 {
        let _ = part;
        0
    }

    /// Makes all completed writes of the lease durable.
    ///
    /// # Errors
    /// Returns the kernel's error. If the lease has lost writes, every flush fails.
    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    /// Releases the locks before another process continues the lease; see
    /// [`HostLease::release_locks`](nvme_mpt::drive::HostLease::release_locks).
    fn release_locks(&self) {}

    /// From now on, reports new damage to `events`.
    fn subscribe(&self, events: &Arc<EventQueue>) {
        let _ = events;
    }

    /// Checks the lease's data for damage.
    fn damage(&self) -> LeaseDamage {
        LeaseDamage::default()
    }

    /// Returns whether there can be damage that is only found by checking periodically.
    fn can_be_damaged(&self) -> bool {
        false
    }

    /// Records that completed writes of the connected VMM were lost before this process opened the lease.
    fn record_earlier_write_errors(&self) {}

    /// Stores in `record` whether writes were lost, now and at each change, so that a successor process learns of the loss.
    fn set_write_error_record(&self, record: LeaseWriteErrorRecord) {
        let _ = record;
    }

    /// Opens spare file descriptions, on which the kernel reports write-back errors to a successor; see
    /// [`HostLease::open_spare_fds`](nvme_mpt::drive::HostLease::open_spare_fds).
    ///
    /// # Errors Returns the kernel's error.
    fn open_spare_fds(&self) -> io::Result<Vec<OwnedFd>> {
        Ok(Vec::new())
    }

    /// Takes over spare file descriptions of the predecessor; see
    /// [`HostLease::restore_spare_fds`](nvme_mpt::drive::HostLease::restore_spare_fds).
    ///
    /// # Errors
    /// Returns the kernel's error.
    fn restore_spare_fds(&self, spare: Vec<OwnedFd>) -> io::Result<bool> {
        let _ = spare;
        Ok(false)
    }

    /// Records write-back losses that the spare file descriptions report, and losses that were reported to other leases before
    /// this process opened this lease. Called when the lease continues after another process.
    fn restore_write_errors(&self) {}

    /// Loads the unreadable blocks of the lease; see [`HostLease::restore_marks`](nvme_mpt::drive::HostLease::restore_marks).
    fn restore_marks(&self, marks: &[BlockRange], ask: Box<dyn Fn() + Send + Sync>) {
        let _ = (marks, ask);
    }

    /// Stores the current unreadable blocks; see [`HostLease::store_marks`](nvme_mpt::drive::HostLease::store_marks).
    fn store_marks(&self, store: &mut dyn FnMut(&[BlockRange]) -> io::Result<()>) {
        let _ = store;
    }

    /// Resets the state of the lease, after a VMM has connected.
    fn reset_state(&self) {}
}

/// Timing of a drive's commands: by a model, or as fast as the backing store.
#[derive(Clone, Copy, Debug)]
pub struct CommandTiming<'a>(pub(crate) Option<&'a Arc<DriveModel>>);

impl CommandTiming<'_> {
    /// Returns whether commands complete without a delay by a model.
    #[must_use]
    pub fn is_immediate(self) -> bool {
        self.0.is_none()
    }

    /// Wraps a queue of the backing store in a queue that delays completions, if there is a timing model.
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
