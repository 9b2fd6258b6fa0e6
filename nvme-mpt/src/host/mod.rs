//! Host controllers: the NVMe controllers that do the I/O.
//!
//! [`HostController`] and [`HostLease`] are the control path. The data path is [`HostQueue`], one value per queue pair
//! and one poller for it: a shadow queue writes translated commands into it, rings, and reaps completions. Every kind
//! of host controller takes the same commands, with host LBAs and IOVAs.
//!
//! This crate knows no kind by name. A shadow queue has its host queue as a [`HostQueuePair`], whose poll is one
//! virtual call.

mod data;
mod format;
#[cfg(test)]
pub(crate) mod idle;
mod lease;
mod pair;
mod queue;
mod reservation;

use serde::{Deserialize, Serialize};
use std::any::Any;
use std::fmt;
use std::io;
use std::sync::Arc;

use crate::event::EventQueue;
use crate::iova::IovaSpace;
use crate::spec::identify::Oncs;
use crate::spec::ids::Nsid;
use crate::spec::log::{ErrorInformation, SmartHealth};
use crate::spec::opcode::NvmOpcode;
pub use data::DataPointer;
pub use format::{ChangedZones, Geometry, NamespaceFormat, NamespaceZones, Resources, ZoneChanges};
pub use lease::{Damage, HostLease, HostLeaseError, HostLeaseRequest};
pub use pair::HostQueuePair;
pub use queue::{
    Completes, CompletionTaker, HostBatch, HostCompletion, HostMemory, HostQueue, SharedPair,
};
pub use reservation::{Reservation, ReserveError, ReservedPairs};

/// Abilities of a host controller, and so the promises that a guest controller may make.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Maximum Data Transfer Size: a power of two of 4 KiB pages.
    pub mdts: u8,
    /// Most entries of a queue (CAP.MQES + 1).
    pub entries_max: u32,
    /// Optional NVM commands that it executes, see [`Self::offers`]; of other bits nobody takes
    /// note.
    pub commands: Oncs,
    /// Atomic Write Unit Normal, in logical blocks, zero-based (Base 2.0, Figure 275, `AWUN`).
    pub awun_z: u16,
    /// Atomic Write Unit Power Fail, in logical blocks, zero-based.
    pub awupf_z: u16,
    /// True if writes may be lost by a power failure unless they are flushed.
    pub volatile_write_cache: bool,
    /// True if deallocated blocks read as zeroes (DLFEAT 001b); else what they read is not known.
    pub deallocated_reads_zeroes: bool,
    /// Most SGL descriptors of a command.
    pub sgl_descriptors_max: u32,
    /// Most bytes of one Write Zeroes, Write Uncorrectable or Verify command; a power of two.
    pub no_data_bytes_max: u64,
    /// Most bytes of one range of a Dataset Management command.
    pub dsm_range_bytes_max: u64,
    /// Most ranges of a Dataset Management command.
    pub dsm_ranges_max: u32,
    /// Most bytes of one Copy command, and of one of its source ranges.
    pub copy_bytes_max: u64,
    /// Most source ranges of a Copy command.
    pub copy_ranges_max: u32,
    /// Limits of the namespaces' own command set.
    pub command_set: CommandSetLimits,
}

impl Limits {
    /// Most bytes that one command transfers.
    #[must_use]
    pub fn max_transfer(&self) -> u64 {
        crate::address::PAGE_SIZE << self.mdts
    }

    /// Returns whether an I/O command on logical blocks is executed: Read, Write and Flush always, the
    /// optional ones where [`Self::commands`] says so (Base 2.0, Figure 275, `ONCS`).
    #[must_use]
    pub const fn offers(&self, opcode: NvmOpcode) -> bool {
        match opcode {
            NvmOpcode::FLUSH | NvmOpcode::READ | NvmOpcode::WRITE => {
                !matches!(self.command_set, CommandSetLimits::KeyValue { .. })
            }
            NvmOpcode::COMPARE => self.commands.compare(),
            NvmOpcode::WRITE_UNCORRECTABLE => self.commands.write_uncorrectable(),
            NvmOpcode::DATASET_MANAGEMENT => self.commands.dsm(),
            NvmOpcode::WRITE_ZEROES => self.commands.write_zeroes(),
            NvmOpcode::VERIFY => self.commands.verify(),
            NvmOpcode::COPY => self.commands.copy(),
            _ => false,
        }
    }
}

/// The I/O command set of a host controller's namespaces, with limits of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CommandSetLimits {
    /// The NVM Command Set.
    Nvm,
    /// The Zoned Namespace Command Set.
    Zoned {
        /// Most bytes of a Zone Append command, a power of two of memory pages.
        append_bytes_max: u64,
    },
    /// The Key Value Command Set.
    KeyValue {
        /// Most bytes of the value of a key.
        value_bytes_max: u32,
    },
}

/// A namespace of a host controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostNamespace {
    /// Its identifier at the host controller.
    pub nsid: Nsid,
    /// Its size, in logical blocks.
    pub blocks: u64,
    /// Logical block size as a power of two, in bytes.
    pub lba_shift: u8,
}

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
pub struct Incidents {
    /// Commands that did not complete within their deadline.
    pub timeouts: u64,
    /// Abort commands for such commands.
    pub aborts: u64,
    /// Controller resets.
    pub resets: u64,
    /// True if it failed for good or was removed: every command fails.
    pub gone: bool,
}

/// Composite Temperatures at which a drive warns, in kelvins (Base 2.0, Figure 275).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TemperatureThresholds {
    /// `WCTEMP`: above it, operation goes on, with care; 0 if not reported.
    pub warning: u16,
    /// `CCTEMP`: above it, operation may end; 0 if not reported.
    pub critical: u16,
}

/// The control path of a host controller.
pub trait HostController: Any + Send + Sync + fmt::Debug {
    /// A name that stays the same for the same drive, whatever path leads to it.
    fn identity(&self) -> &str;

    /// Model Number, up to 40 characters.
    fn model(&self) -> &str;

    /// Returns its abilities.
    fn limits(&self) -> &Limits;

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

    /// Returns whether the drive exists in this process only, so that no other can have a lease of it.
    fn is_private(&self) -> bool {
        false
    }

    /// Makes I/O queue pairs those of one lease, until the reservation is dropped.
    ///
    /// # Errors
    /// See [`ReserveError`]. Nothing is reserved then.
    fn reserve(self: Arc<Self>, lease: &str, pairs: u16) -> Result<Reservation, ReserveError> {
        let _ = (lease, pairs);
        Err(ReserveError::Unbounded)
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
    fn incidents(&self) -> Incidents {
        Incidents::default()
    }

    /// Returns whether a namespace whose size changes keeps its blocks, as far as it has them. That of a
    /// physical drive is deleted, and another one created in its place.
    fn resizes_in_place(&self) -> bool {
        false
    }

    /// Tells of the drive's events ([`Event::Drive`](crate::event::Event::Drive)) from now on, as
    /// long as the queue lives.
    fn subscribe(&self, events: &Arc<EventQueue>) {
        let _ = events;
    }
}
