//! Configuration of an attachment, and the namespace that it gets.

use std::sync::Arc;

use crate::address::Gpa;
use crate::dma::MemoryKinds;
use crate::doorbell::DoorbellMode;
use crate::drive::Drive;
use crate::host::NamespaceFormat;
use crate::lease::Lease;
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
    /// Path of doorbell writes to the pollers.
    pub doorbells: DoorbellMode,
    /// Polling of the queues.
    pub poll: PollPolicy,
    /// The pollers of the process.
    pub pollers: Arc<Pollers>,
    /// Kinds of files that the VM's memory may be in.
    pub memory: MemoryKinds,
    /// Serial Number to show instead of the lease's own, up to 20 ASCII characters.
    pub serial: Option<String>,
}

/// A Completion Queue to create.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
#[derive(Clone, Debug, PartialEq, Eq)]
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
