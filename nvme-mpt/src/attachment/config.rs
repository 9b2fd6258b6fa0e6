//! Configuration of an attachment, and the facts of the lease that it holds.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use vmm_sys_util::eventfd::EventFd;

use crate::address::Gpa;
use crate::dma::MemoryKinds;
use crate::doorbell::DoorbellMode;
use crate::drive::Drive;
use crate::host::{Limits, NamespaceFormat, Reservation, TemperatureThresholds};
use crate::learn::Learning;
use crate::lease::Lease;
use crate::limit::RateLimits;
use crate::poller::{PollPolicy, Pollers};
use crate::spec::ids::{Nsid, QueueId};

/// Configuration with which a guest controller attaches.
#[derive(Debug)]
pub struct AttachmentConfig {
    /// The drive.
    pub drive: Arc<Drive>,
    /// The part of it that is leased.
    pub lease: Lease,
    /// I/O queue pairs, 1 to [`MAX_QUEUE_PAIRS`](super::MAX_QUEUE_PAIRS).
    pub queue_pairs: u16,
    /// Queue pairs of the drive that belong to the lease, if any do.
    pub reservation: Option<Reservation>,
    /// Path of doorbell writes to the pollers.
    pub doorbells: DoorbellMode,
    /// Polling of the queues.
    pub poll: PollPolicy,
    /// Choices for all that learns; those [of the drive](Learning::of_drive) are taken when it is opened.
    pub learning: Learning,
    /// The pollers of the process.
    pub pollers: Arc<Pollers>,
    /// Kinds of files that the VM's memory may be in.
    pub memory: MemoryKinds,
    /// I/Os and bytes per second, over all queues, and the lease's weight.
    pub rates: RateLimits,
    /// Serial Number to show instead of the lease's own, up to 20 ASCII characters.
    pub serial: Option<String>,
}

/// Parts of a function that outlive the process of its host side.
#[derive(Debug)]
pub struct KeptParts {
    /// File of the doorbells, as [`DoorbellPage::fd`](crate::doorbell::DoorbellPage::fd) gives it.
    pub doorbells: OwnedFd,
    /// File of the live state, as [`LiveState::fd`](crate::live::LiveState::fd) gives it.
    pub live: OwnedFd,
    /// Signalled when there are events.
    pub events: EventFd,
}

/// Source of the parts that a function and its host side share.
#[derive(Debug)]
pub enum FunctionParts {
    /// The function is in this process, and ends with it.
    Own,
    /// The function is in another process, and is new. Its queues have live state.
    Outliving,
    /// The function has them from a process that ended. They are untrusted.
    Kept(KeptParts),
}

impl KeptParts {
    /// The same parts, by descriptors of their own.
    ///
    /// # Errors
    /// Returns the kernel's error when there are no descriptors left.
    pub fn share(&self) -> io::Result<Self> {
        Ok(Self {
            doorbells: self.doorbells.try_clone()?,
            live: self.live.try_clone()?,
            events: self.events.try_clone()?,
        })
    }
}

/// A Completion Queue to create.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CqConfig {
    /// Its identifier.
    pub qid: QueueId,
    /// Base: physically contiguous, at the start of a memory page.
    pub base: Gpa,
    /// Its entries, at least 2.
    pub entries: u32,
    /// Number of the vector to raise; `None` if the guest wants no interrupts.
    pub vector: Option<u16>,
}

/// A Submission Queue to create.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SqConfig {
    /// Its identifier.
    pub qid: QueueId,
    /// The Completion Queue that it completes to.
    pub cqid: QueueId,
    /// Base: physically contiguous, at the start of a memory page.
    pub base: Gpa,
    /// Its entries, at least 2.
    pub entries: u32,
}

/// A lease as its guest sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeasedNamespace {
    /// Its identifier, always 1.
    pub nsid: Nsid,
    /// Logical block size as a power of two, in bytes.
    pub lba_shift: u8,
    /// Its size in logical blocks.
    pub blocks: u64,
    /// Serial Number of the controller, up to 20 characters.
    pub serial: String,
    /// Model Number of the controller, up to 40 characters.
    pub model: String,
    /// Namespace Globally Unique Identifier.
    pub nguid: [u8; 16],
    /// IEEE Extended Unique Identifier.
    pub eui64: [u8; 8],
    /// Namespace UUID.
    pub uuid: [u8; 16],
    /// Its format, by its command set.
    pub format: NamespaceFormat,
}

/// Facts of a lease that stay the same as long as a function holds it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseFacts {
    /// The lease as the guest sees it, with the blocks that it has at first.
    pub namespace: LeasedNamespace,
    /// Promises that may be made to the guest.
    pub limits: Limits,
    /// I/O queue pairs that can exist, identifiers 1 to this number.
    pub queue_pairs: u16,
    /// Path of doorbell writes to the pollers.
    pub doorbells: DoorbellMode,
    /// True if the pollers ever sleep, so that a doorbell has to wake them.
    pub parks: bool,
    /// Temperatures at which the drive warns; `None` if it measures none.
    pub thresholds: Option<TemperatureThresholds>,
    /// True if [`HostSide::damage`](crate::seam::HostSide::damage) can change, so that it has to be looked for now and then.
    pub can_be_damaged: bool,
    /// True if the drive exists in the host side's process only, so that no other can take its lease over.
    pub is_private: bool,
    /// Blocks of a unit of a lease by size, which may grow; `None` of a lease of a range. A command that crosses from
    /// one unit to the next may be carried out in parts.
    pub unit_blocks: Option<u64>,
    /// Choices for all that learns.
    pub learning: Learning,
}
