//! A host controller as one lease has it.

use std::error::Error;
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::namespace::HostNamespace;
use super::reservation::QueuePairReservation;
use crate::event::EventQueue;
use crate::host::{CommandSetDescription, LeaseChangeLog, LeaseDamage};
use crate::limit::LeaseWeight;
use crate::live::{ChangeRecord, LeaseWriteErrorRecord};
use crate::range::{BlockRange, ByteRange};
use crate::shadow::HostQueuePair;

/// A lease to open at a host controller.
#[derive(Clone, Copy, Debug)]
pub struct HostLeaseRequest<'a> {
    /// The lease's name in the log.
    pub name: &'a str,
    /// The namespace.
    pub namespace: HostNamespace,
    /// Its parts that are leased, in the order of the lease's blocks.
    pub parts: &'a [BlockRange],
    /// Queue pairs that belong to it, if the drive has a bound on them.
    pub reservation: Option<&'a QueuePairReservation>,
}

impl HostLeaseRequest<'_> {
    /// Returns the leased parts, in bytes.
    pub fn bytes(&self) -> impl Iterator<Item = ByteRange> {
        let shift = self.namespace.lba_shift;
        self.parts.iter().map(move |part| part.bytes(shift))
    }

    /// Returns the leased part of a drive whose leases are one part.
    ///
    /// # Errors
    /// [`HostLeaseError::SeveralParts`].
    pub fn only(&self) -> Result<BlockRange, HostLeaseError> {
        match self.parts {
            [part] => Ok(*part),
            _ => Err(HostLeaseError::SeveralParts),
        }
    }
}

/// Errors of opening a lease at a host controller.
#[derive(Debug, thiserror::Error)]
pub enum HostLeaseError {
    /// Another server or program has part of the range, which no ledger here knows of.
    #[error("Another process uses part of it")]
    InUse(#[source] io::Error),
    /// The drive's leases are one part each.
    #[error("Each lease of the drive is one part of it, and stays as long as it is")]
    SeveralParts,
    /// The drive cannot be leased in such parts.
    #[error(transparent)]
    Unfit(Box<dyn Error + Send + Sync>),
    /// The kernel's error.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// All that a host controller keeps for one lease, until it is dropped.
///
/// While it lives, the host controller excludes users of the range that no ledger here knows of: a server with
/// another ledger, or a VMM that has the same file open as a disk image. What outlives the lease is in the ledger:
/// see [`Self::keep_marks`].
pub trait HostLease: fmt::Debug + Send + Sync {
    /// Creates a queue pair with room for `slots` commands in flight; or a share of a queue pair, where the
    /// drive has no more of them.
    ///
    /// # Errors
    /// Returns the error of the kernel or of the drive.
    fn create_queue(&self, slots: u16) -> io::Result<HostQueuePair>;

    /// Creates a queue pair that wipes the lease. Rules that restrict a guest's writes, such as write pointers, do
    /// not hold for it.
    ///
    /// # Errors
    /// As [`Self::create_queue`].
    fn create_wiping_queue(&self, slots: u16) -> io::Result<HostQueuePair> {
        self.create_queue(slots)
    }

    /// Adds a part to the lease, behind those that it has. Queues may exist.
    ///
    /// # Errors
    /// As [`HostController::open_lease`](super::HostController::open_lease). The lease is as it was then.
    fn add(&self, part: BlockRange) -> Result<(), HostLeaseError> {
        let _ = part;
        Err(HostLeaseError::SeveralParts)
    }

    /// Changes the weight of the lease among those whose queues share queue pairs with its own. Queues may exist.
    fn set_weight(&self, weight: LeaseWeight) {
        let _ = weight;
    }

    /// Returns the number of blocks from the first one of a part on that are known to be zeroes, as those of a hole are.
    /// A wipe leaves them out. After [`Self::flush`], they are zeroes for good. The part lies in the lease, and nothing
    /// writes to it meanwhile.
    fn leading_zeroes(&self, part: BlockRange) -> u64 {
        let _ = part;
        0
    }

    /// Makes everything durable that the lease completed until now.
    ///
    /// # Errors
    /// Returns the error of the kernel or of the drive; any error if the lease has lost writes.
    fn flush(&self) -> io::Result<()>;

    /// Lets go of what keeps the next process from the lease. No command is in flight, and this process ends at once: the
    /// kernel may need some time for the rest.
    fn let_go(&self) {}

    /// Reports [changes](Self::changes) of the lease and new damage to these events from now on.
    fn subscribe(&self, events: &Arc<EventQueue>) {
        let _ = events;
    }

    /// Looks for damage of the lease's data, which takes system calls, and returns it.
    fn damage(&self) -> LeaseDamage {
        LeaseDamage::default()
    }

    /// Returns whether its damage has to be looked for now and then.
    fn can_be_damaged(&self) -> bool {
        false
    }

    /// Notes that completed writes of this VMM were lost before the lease was opened here.
    fn lose_earlier_writes(&self) {}

    /// Records from now on whether writes were lost, for the process after this one.
    fn record_losses(&self, record: LeaseWriteErrorRecord) {
        let _ = record;
    }

    /// Opens a spare description of each file that the lease writes, for a [keeper](super::SpareDescriptorStore). The lease
    /// keeps copies, and asks them when a VMM connects. Empty for a lease whose writes are in no file, or in one that may hold
    /// up the process that closes it.
    ///
    /// # Errors
    /// Returns the kernel's error.
    fn open_spare(&self) -> io::Result<Vec<OwnedFd>> {
        Ok(Vec::new())
    }

    /// Takes up spare descriptions that [`Self::open_spare`] opened in the process before. Returns whether they are of the
    /// files that the lease writes now.
    ///
    /// # Errors
    /// Returns the kernel's error.
    fn take_spare(&self, spare: Vec<OwnedFd>) -> io::Result<bool> {
        let _ = spare;
        Ok(false)
    }

    /// Notes losses that the spare descriptions tell of, or of which other leases of the drive were told before this one was
    /// opened here. The lease goes on after another process: some of its completed writes are older, and may be lost.
    fn take_up_losses(&self) {}

    /// Records from now on whether there are [changes](Self::changes) of which the guest was not told, for the process
    /// after this one. If the process before had some, there are changes that are not known one by one.
    fn record_changes(&self, record: ChangeRecord) {
        let _ = record;
    }

    /// Loads the unreadable blocks of the lease's id. From now on `ask` makes another thread call [`Self::store_marks`] after
    /// each change of them. A drive that keeps its own marks has nothing to do.
    fn keep_marks(&self, marks: &[BlockRange], ask: Box<dyn Fn() + Send + Sync>) {
        let _ = (marks, ask);
    }

    /// Makes the present unreadable blocks durable by `store`. Commands wait for that, and it takes as long as a disk write.
    fn store_marks(&self, store: &mut dyn FnMut(&[BlockRange]) -> io::Result<()>) {
        let _ = store;
    }

    /// Begins anew for a VMM that connected. Writes that were lost concern the VMM before it.
    fn begin_anew(&self) {}

    /// Notes that a range of the drive was wiped, which lies in the lease: its bytes are zeroes.
    fn wiped(&self, range: &ByteRange) {
        let _ = range;
    }

    /// Returns the description of its namespace by the command set of its own; `None` of the NVM Command Set.
    fn command_set(&self) -> Option<CommandSetDescription> {
        None
    }

    /// Returns what changed by itself; `None` if its command set has no list of changes.
    fn changes(&self) -> Option<&dyn LeaseChangeLog> {
        None
    }

    /// Returns the bytes that are in use, if its command set counts them; else 0.
    fn used(&self) -> u64 {
        0
    }
}
