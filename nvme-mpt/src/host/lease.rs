//! A host controller as one lease has it.

use std::error::Error;
use std::fmt;
use std::io;
use std::sync::Arc;

use super::{HostNamespace, HostQueuePair};
use crate::event::EventQueue;
use crate::lease::{ByteRange, LbaRange};
use crate::spec::ids::Lba;
use crate::spec::key_value::KvFormat;
use crate::spec::zns::ChangedZoneList;

/// A lease to open at a host controller.
#[derive(Clone, Copy, Debug)]
pub struct HostLeaseRequest<'a> {
    /// The lease's name in the log.
    pub name: &'a str,
    /// The namespace.
    pub namespace: HostNamespace,
    /// Its part that is leased.
    pub range: LbaRange,
}

impl HostLeaseRequest<'_> {
    /// Returns the leased part, in bytes.
    #[must_use]
    pub fn bytes(&self) -> ByteRange {
        self.range.bytes(self.namespace.lba_shift)
    }
}

/// Errors of opening a lease at a host controller.
#[derive(Debug, thiserror::Error)]
pub enum HostLeaseError {
    /// Another server or program has part of the range, which no ledger here knows of.
    #[error("Another process uses part of it")]
    InUse(#[source] io::Error),
    /// The drive cannot be leased in such parts.
    #[error(transparent)]
    Unfit(Box<dyn Error + Send + Sync>),
    /// The kernel's error.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// All that a host controller keeps for one lease, until it is dropped.
///
/// While it lives, the host controller keeps from the range whoever does not ask a ledger of ours: a server with
/// another ledger, or a VMM that has the same file open as a disk image. What is remembered of the lease ends
/// with it.
pub trait HostLease: fmt::Debug + Send + Sync {
    /// Creates a queue pair with room for `slots` commands in flight; or a share of a queue pair, where the
    /// drive has no more of them.
    ///
    /// # Errors
    /// Returns the error of the kernel or of the drive.
    fn create_queue(&self, slots: u16) -> io::Result<HostQueuePair>;

    /// Creates a queue pair that wipes the lease: what keeps a guest from writing some of its blocks is no
    /// obstacle to it.
    ///
    /// # Errors
    /// As [`Self::create_queue`].
    fn create_wiping_queue(&self, slots: u16) -> io::Result<HostQueuePair> {
        self.create_queue(slots)
    }

    /// Makes everything durable that the lease completed until now.
    ///
    /// # Errors
    /// Returns the error of the kernel or of the drive; any error if the lease has lost writes.
    fn flush(&self) -> io::Result<()>;

    /// Reports changes of the lease's zones and new damage to these events from now on.
    fn subscribe(&self, events: &Arc<EventQueue>) {
        let _ = events;
    }

    /// Looks for damage of the lease's data, which takes system calls, and returns it.
    fn damage(&self) -> Damage {
        Damage::default()
    }

    /// Returns whether its damage has to be looked for now and then.
    fn can_be_damaged(&self) -> bool {
        false
    }

    /// Begins anew for a VMM that connected: what was lost was lost for the one before.
    fn begin_anew(&self) {}

    /// Notes that `blocks` blocks from `start` of the lease on were wiped: they are zeroes.
    fn wiped(&self, start: u64, blocks: u64) {
        let _ = (start, blocks);
    }

    /// Returns its zones; `None` if it is not divided into zones.
    fn zones(&self) -> Option<&dyn HostZones> {
        None
    }

    /// Returns its keys and values; `None` if it has logical blocks.
    fn keys(&self) -> Option<&dyn HostKeys> {
        None
    }
}

/// Data of a lease that is not what its guest wrote.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Damage {
    /// Completed writes were lost before they were durable. The lease is read only until its VMM connects again.
    pub lost_writes: bool,
    /// The drive's file was cut short, and blocks of the lease are gone. They are neither read nor written.
    pub cut_short: bool,
    /// The path of the drive's file leads to another one, or to none.
    pub replaced: bool,
}

/// The keys and values of a lease.
pub trait HostKeys {
    /// Returns the limits of keys and values.
    fn format(&self) -> KvFormat;

    /// Returns the bytes in use.
    fn used(&self) -> u64;
}

/// The zones of a lease.
pub trait HostZones {
    /// Returns the division of the lease into zones.
    fn geometry(&self) -> Geometry;

    /// Returns the most zones that can be in use at a time.
    fn resources(&self) -> Resources;

    /// Returns the zones that changed by themselves.
    fn changed(&self) -> ChangedZones;

    /// Adds zones that changed, and of which the guest was not told.
    fn recall_changed(&self, untold: &ChangedZones);

    /// Forgets zones of which the guest was told; what changed since stays.
    fn forget_changed(&self, told: &ChangedZones);
}

/// Division of a lease into zones, in logical blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Zone Size: from the start of a zone to that of the next, a power of two.
    pub size: u64,
    /// Zone Capacity: those of them that can be written.
    pub capacity: u64,
}

/// Most zones that can be in use at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resources {
    /// Maximum Open Resources: zones that are open, implicitly or explicitly.
    pub open: u32,
    /// Maximum Active Resources: zones that are open or closed.
    pub active: u32,
}

/// Zones that changed by themselves since their guest was told, by their Zone Start LBAs in the lease.
#[derive(Clone, Debug, Default)]
pub struct ChangedZones {
    starts: Vec<Lba>,
    /// There are others, which are not known one by one.
    more: bool,
}

impl ChangedZones {
    /// Those that start at some LBAs, and others if there are `more`.
    #[must_use]
    pub fn new(starts: &[Lba], more: bool) -> Self {
        let mut changed = Self::default();
        starts.iter().for_each(|start| changed.add(*start));
        changed.more |= more;
        changed
    }

    /// Those that are known one by one.
    #[must_use]
    pub fn starts(&self) -> &[Lba] {
        &self.starts
    }

    /// Returns whether there are others.
    #[must_use]
    pub fn are_more(&self) -> bool {
        self.more
    }

    /// All of them; `None` if there are more than a Changed Zone List has room for.
    #[must_use]
    pub fn listed(&self) -> Option<&[Lba]> {
        (!self.more).then_some(&self.starts)
    }

    /// Adds a zone, once.
    pub fn add(&mut self, start: Lba) {
        if self.starts.contains(&start) {
        } else if self.starts.len() < ChangedZoneList::CAPACITY {
            self.starts.push(start);
        } else {
            self.more = true;
        }
    }

    /// Adds others.
    pub fn recall(&mut self, untold: &Self) {
        untold.starts.iter().for_each(|start| self.add(*start));
        self.more |= untold.more;
    }

    /// Removes those that the guest was told of; they were the first ones here.
    pub fn forget(&mut self, told: &Self) {
        self.starts
            .drain(..told.starts.len().min(self.starts.len()));
        self.more &= !told.more;
    }
}
