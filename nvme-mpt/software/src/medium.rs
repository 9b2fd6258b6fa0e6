//! Media: the places in which software drives keep their blocks.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use nvme_mpt::drive::{DriveLabel, HostLeaseError, HostLeaseRequest};
use nvme_mpt::event::EventQueue;
use nvme_mpt::host::{Damage, Limits};
use nvme_mpt::live::LossRecord;
use nvme_mpt::origin::Identity;
use nvme_mpt::range::LbaRange;
use nvme_mpt::shadow::HostQueuePair;
use nvme_mpt::spec::status::Status;

use crate::model::{Model, TimedQueue, TimedStore};

/// The status of a command that finds, or would hide, that completed writes of its lease were lost. Its own blocks are as
/// sound as before.
pub(crate) const LOST: Status = Status::WRITE_FAULT.with_dnr(true);

/// A place in which a software drive keeps its blocks: a new kind of store implements it.
pub trait Medium: fmt::Debug + Send + Sync {
    /// Returns the name that stays the same for the same bytes, whatever path leads to them, and their other names.
    fn identity(&self) -> Identity;

    /// Model Number, up to 40 characters.
    fn model(&self) -> &'static str;

    /// Returns its size in bytes.
    fn bytes(&self) -> u64;

    /// Returns its abilities, made from those of any software drive.
    fn limits(&self, limits: Limits) -> Limits {
        limits
    }

    /// Returns whether it exists in this process only.
    fn is_private(&self) -> bool {
        true
    }

    /// Returns the path of the file or block device that it is; `None` for one that ends with the process.
    fn path(&self) -> Option<&Path> {
        None
    }

    /// Sets the time that a request of the storage may take. After it, the queue fails. A medium whose storage is this
    /// process's memory has none.
    fn set_timeout(&self, timeout: Duration) {
        let _ = timeout;
    }

    /// Returns whether a transfer may make the submitting thread wait for another process or host.
    fn may_block(&self) -> bool {
        false
    }

    /// As [`label`](nvme_mpt::drive::HostController::label) of a host controller.
    fn label(&self) -> Option<(&DriveLabel, bool)> {
        None
    }

    /// As [`peek`](nvme_mpt::drive::HostController::peek) of a host controller.
    fn peek(&self, offset: u64, into: &mut [u8]) -> Option<usize> {
        let _ = (offset, into);
        None
    }

    /// Makes another file durable from now on whenever blocks are, after them.
    fn keep_durable_with(&self, file: Arc<File>) {
        let _ = file;
    }

    /// Opens a lease of a part of it.
    ///
    /// # Errors
    /// See [`HostLeaseError`].
    fn open_lease(
        &self,
        request: &HostLeaseRequest<'_>,
    ) -> Result<Box<dyn LeasedMedium>, HostLeaseError>;
}

/// A medium as one lease has it, until it is dropped.
pub trait LeasedMedium: fmt::Debug + Send + Sync {
    /// Creates a queue pair with room for `slots` commands, at a pace.
    ///
    /// # Errors
    /// Returns the kernel's error.
    fn create_queue(&self, slots: u16, pace: Pace<'_>) -> io::Result<HostQueuePair>;

    /// Adds a part to the lease, behind those that it has. A medium that keeps nothing for a lease has nothing to do.
    ///
    /// # Errors
    /// See [`HostLeaseError`]. The lease is as it was then.
    fn add(&self, part: LbaRange) -> Result<(), HostLeaseError> {
        let _ = part;
        Ok(())
    }

    /// Returns the number of blocks from the first one of a part on that are known to be zeroes, as
    /// [`HostLease::leading_zeroes`](nvme_mpt::drive::HostLease::leading_zeroes) has it.
    fn leading_zeroes(&self, part: LbaRange) -> u64 {
        let _ = part;
        0
    }

    /// Makes everything durable that the lease completed until now.
    ///
    /// # Errors
    /// Returns the kernel's error; any error if the lease has lost writes.
    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    /// Lets go of what keeps the next process from the lease, as [`HostLease::let_go`](nvme_mpt::drive::HostLease::let_go)
    /// has it.
    fn let_go(&self) {}

    /// Reports new damage to these events from now on.
    fn subscribe(&self, events: &Arc<EventQueue>) {
        let _ = events;
    }

    /// Looks for damage of the lease's data, and returns it.
    fn damage(&self) -> Damage {
        Damage::default()
    }

    /// Returns whether its damage has to be looked for now and then.
    fn can_be_damaged(&self) -> bool {
        false
    }

    /// Notes that completed writes of this VMM were lost before the lease was opened here.
    fn lose_earlier_writes(&self) {}

    /// Records from now on whether writes were lost, for the process after this one.
    fn record_losses(&self, record: LossRecord) {
        let _ = record;
    }

    /// Opens spare descriptions, as [`HostLease::open_spare`](nvme_mpt::drive::HostLease::open_spare) does.
    ///
    /// # Errors
    /// Returns the kernel's error.
    fn open_spare(&self) -> io::Result<Vec<OwnedFd>> {
        Ok(Vec::new())
    }

    /// Takes up spare descriptions, as [`HostLease::take_spare`](nvme_mpt::drive::HostLease::take_spare) does.
    ///
    /// # Errors
    /// Returns the kernel's error.
    fn take_spare(&self, spare: Vec<OwnedFd>) -> io::Result<bool> {
        let _ = spare;
        Ok(false)
    }

    /// Notes losses that the spare descriptions tell of, or of which other leases were told before this one was opened
    /// here. It goes on after another process.
    fn take_up_losses(&self) {}

    /// Takes up the unreadable blocks of the lease's id, as [`HostLease::keep_marks`](nvme_mpt::drive::HostLease::keep_marks)
    /// has it.
    fn keep_marks(&self, marks: &[LbaRange], ask: Box<dyn Fn() + Send + Sync>) {
        let _ = (marks, ask);
    }

    /// Has the present unreadable blocks stored, as [`HostLease::store_marks`](nvme_mpt::drive::HostLease::store_marks) has it.
    fn store_marks(&self, store: &mut dyn FnMut(&[LbaRange]) -> io::Result<()>) {
        let _ = store;
    }

    /// Begins anew for a VMM that connected.
    fn begin_anew(&self) {}
}

/// The pace of a drive's commands: that of a timing model, or of the medium alone.
#[derive(Clone, Copy, Debug)]
pub struct Pace<'a>(pub(crate) Option<&'a Arc<Model>>);

impl Pace<'_> {
    /// Returns whether commands take no time of a model.
    #[must_use]
    pub fn is_immediate(self) -> bool {
        self.0.is_none()
    }

    /// Makes a medium's queue one of the drive.
    pub fn queue<Q>(self, queue: Q, slots: u16) -> HostQueuePair
    where
        Q: TimedStore + fmt::Debug + Send + 'static,
    {
        match self.0 {
            None => HostQueuePair::new(queue),
            Some(model) => HostQueuePair::new(TimedQueue::new(queue, model.clone(), slots)),
        }
    }
}
