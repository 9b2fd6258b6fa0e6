//! The control path of a host controller for one lease.

use std::error::Error;
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use nvme_guest::event::EventQueue;
use nvme_guest::host::{CommandSetDescription, LeaseChangeLog, LeaseDamage};
use nvme_guest::inflight::{ChangeRecord, LeaseWriteErrorRecord};
use nvme_guest::rate_limit::LeaseWeight;
use nvme_lease::range::{BlockRange, ByteRange};
use nvme_spec::status::Status;

use super::namespace::HostNamespace;
use super::reservation::QueuePairReservation;
use crate::shadow::HostQueuePair;

/// Request to open a lease at a host controller.
#[derive(Clone, Copy, Debug)]
pub struct HostLeaseRequest<'a> {
    /// Name of the lease, for messages in the log.
    pub name: &'a str,
    /// Namespace that the lease is in.
    pub namespace: HostNamespace,
    /// Leased ranges of the namespace, in the order of the lease's blocks.
    pub parts: &'a [BlockRange],
    /// Reservation of queue pairs for the lease; `None` if its queues share the drive's queue pairs.
    pub reservation: Option<&'a QueuePairReservation>,
}

impl HostLeaseRequest<'_> {
    /// Returns the leased ranges in bytes.
    pub fn byte_ranges(&self) -> impl Iterator<Item = ByteRange> {
        let shift = self.namespace.lba_shift;
        self.parts.iter().map(move |part| part.bytes(shift))
    }

    /// Returns the only leased part, for a drive whose leases are contiguous.
    ///
    /// # Errors
    /// [`HostLeaseError::SeveralParts`].
    pub fn single_part(&self) -> Result<BlockRange, HostLeaseError> {
        match self.parts {
            [part] => Ok(*part),
            _ => Err(HostLeaseError::SeveralParts),
        }
    }
}

/// Errors of opening a lease at a host controller.
#[derive(Debug, thiserror::Error)]
pub enum HostLeaseError {
    /// Another server or program uses part of the range, without an entry in this ledger.
    #[error("Another process uses part of it")]
    InUse(#[source] io::Error),
    /// The lease has several ranges or grows, but a lease of this drive must be one contiguous range of a fixed size.
    #[error("Leases of the drive have a fixed size")]
    SeveralParts,
    /// The drive cannot use the requested ranges as a lease.
    #[error(transparent)]
    Unfit(Box<dyn Error + Send + Sync>),
    /// Error of the kernel.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Status of a command that fails because completed writes of its lease were lost, or that would hide this loss. The blocks of
/// this command itself are unaffected.
pub const LOST_WRITES: Status = Status::WRITE_FAULT.with_dnr(true);

/// The control path of one lease at a host controller.
///
/// Until this is dropped, the host controller excludes users of the leased range that this host's ledger does not know: a
/// server with another ledger, or a VMM that has the same file open as a disk image. State that must outlive this value is
/// stored in the ledger: see [`Self::restore_marks`].
pub trait HostLease: fmt::Debug + Send + Sync {
    /// Creates a queue pair for `slots` in-flight commands. If the drive has no free queue pair, the new queue pair shares one
    /// of the drive with other host queues.
    ///
    /// # Errors
    /// Returns the error of the kernel or of the drive.
    fn create_queue(&self, slots: u16) -> io::Result<HostQueuePair>;

    /// Creates a queue pair for wiping the lease. Restrictions of a guest's writes, such as the write pointers of zones, do not
    /// apply to this queue pair.
    ///
    /// # Errors
    /// As [`Self::create_queue`].
    fn create_wiping_queue(&self, slots: u16) -> io::Result<HostQueuePair> {
        self.create_queue(slots)
    }

    /// Appends a range of blocks to the end of the lease. The lease's queues may be in use during the call.
    ///
    /// # Errors
    /// As [`HostController::open_lease`](super::HostController::open_lease). The lease is unchanged after an error.
    fn add_part(&self, part: BlockRange) -> Result<(), HostLeaseError> {
        let _ = part;
        Err(HostLeaseError::SeveralParts)
    }

    /// Sets the lease's weight, in relation to other leases that share its queue pairs. The lease's queues may be in use during
    /// the call.
    fn set_weight(&self, weight: LeaseWeight) {
        let _ = weight;
    }

    /// Returns the number of blocks at the start of `part` that are known to read as zeroes, such as a hole in a file. A wipe
    /// skips these blocks. After [`Self::flush`], the zeroes are durable. The caller ensures that the part is leased and that
    /// nothing writes to it during the call.
    fn leading_zeroes(&self, part: BlockRange) -> u64 {
        let _ = part;
        0
    }

    /// Makes all completed writes of the lease durable.
    ///
    /// # Errors
    /// Returns the error of the kernel or of the drive. Also returns an error if completed writes of the lease were lost.
    fn flush(&self) -> io::Result<()>;

    /// Releases the locks of the lease before a hand-over, since the kernel may need time to release them after the process
    /// exits. The caller ensures that no command is in flight and that this process exits immediately afterwards.
    fn release_locks(&self) {}

    /// Reports changes that the drive itself made (see [`Self::change_log`]), and new damage of the lease, to `events` until
    /// that queue is dropped.
    fn subscribe(&self, events: &Arc<EventQueue>) {
        let _ = events;
    }

    /// Checks the lease's data for damage and returns the result. The check makes system calls.
    fn damage(&self) -> LeaseDamage {
        LeaseDamage::default()
    }

    /// Returns whether callers must poll [`Self::damage`], because the lease can lose data.
    fn can_be_damaged(&self) -> bool {
        false
    }

    /// Notes that writes of the present VMM were lost, although they had completed, before this process opened the lease.
    /// Writes and flushes of the lease fail from now on.
    fn record_earlier_write_errors(&self) {}

    /// Records lost writes in `record` from now on, so that the successor process knows of them.
    fn set_write_error_record(&self, record: LeaseWriteErrorRecord) {
        let _ = record;
    }

    /// Opens a spare descriptor of each file that the lease writes, for the [supervisor process](super::SpareDescriptorStore).
    /// The lease keeps duplicates, and checks them when a VMM connects. Returns an empty list if the lease writes no file, or
    /// if closing the file may block.
    ///
    /// # Errors
    /// Returns the kernel's error.
    fn open_spare_fds(&self) -> io::Result<Vec<OwnedFd>> {
        Ok(Vec::new())
    }

    /// Restores spare descriptors that [`Self::open_spare_fds`] opened in the predecessor. Returns whether they refer to the
    /// files that the lease writes in this process.
    ///
    /// # Errors
    /// Returns the kernel's error.
    fn restore_spare_fds(&self, spare: Vec<OwnedFd>) -> io::Result<bool> {
        let _ = spare;
        Ok(false)
    }

    /// Notes lost writes from before this process opened the lease, if the kernel has already reported them to the lease's
    /// spare descriptors or to another lease of the drive. Called if another process had the lease before: writes that
    /// completed there may be lost.
    fn restore_write_errors(&self) {}

    /// Records from now on, in `record`, whether there are [changes](Self::change_log) that the guest does not know yet, for
    /// the successor. If the record shows such changes of the predecessor, the lease reports a change of unknown blocks.
    fn record_changes(&self, record: ChangeRecord) {
        let _ = record;
    }

    /// Loads the unreadable blocks of the lease's id. After each change of these blocks, the lease calls `ask`, which makes
    /// another thread call [`Self::store_marks`]. A drive that stores its unreadable blocks itself ignores this.
    fn restore_marks(&self, marks: &[BlockRange], ask: Box<dyn Fn() + Send + Sync>) {
        let _ = (marks, ask);
    }

    /// Stores the present unreadable blocks durably by calling `store`. Commands of the lease wait during the call, for as long
    /// as a disk write takes.
    fn store_marks(&self, store: &mut dyn FnMut(&[BlockRange]) -> io::Result<()>) {
        let _ = store;
    }

    /// Forgets lost writes of the previous VMM, because a newly connected VMM must not get errors for them.
    fn forget_write_errors(&self) {}

    /// Notes that `range` of the lease was wiped, so that its bytes are zeroes.
    fn on_wiped(&self, range: &ByteRange) {
        let _ = range;
    }

    /// Returns the namespace's command set description; `None` for the NVM Command Set.
    fn command_set(&self) -> Option<CommandSetDescription> {
        None
    }

    /// Returns the log of changes that the drive itself made; `None` if the command set has no such log.
    fn change_log(&self) -> Option<&dyn LeaseChangeLog> {
        None
    }

    /// Returns the number of used bytes if the command set counts them, else 0.
    fn used_bytes(&self) -> u64 {
        0
    }
}
