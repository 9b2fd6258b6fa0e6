//! Messages of the protocol that are no [calls](crate::call), and the parts of calls.

use std::io;
use std::os::fd::OwnedFd;

use nvme_guest::doorbell::MAX_QUEUE_PAIRS;
use nvme_guest::interrupt::vector_count;
use nvme_guest::{DirtyRange, DmaError, Gpa, LeaseFacts, MemoryRegion, serde_forms};
use nvme_mpt_memory::process_liveness;
use nvme_spec::registers::Doorbell;
use serde::{Deserialize, Serialize};

/// Version of the protocol. VMM and server must have equal versions. After the first release, any change of a message, or of a
/// type that a message contains, needs a new version.
pub const VERSION: u32 = 1;

/// First message of a VMM. All protocol versions have these fields.
///
/// Descriptors: none for a new function. For a function that has lost its server: the descriptors that the previous server
/// sent with [`AttachReply::Attached`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct AttachRequest {
    /// Protocol version of the VMM.
    pub(crate) version: u32,
    /// The function's option string, with absolute paths.
    #[serde(default)]
    pub(crate) options: String,
    /// Set if the VMM only asks whether the server has the drive; the answer is [`AttachReply::Served`].
    #[serde(default, skip_serializing_if = "is_false")]
    pub(crate) only_asks: bool,
}

fn is_false(value: &bool) -> bool {
    !value
}

/// Answers to an [`AttachRequest`]: any number of [`Self::Waiting`], followed by exactly one other answer.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum AttachReply {
    /// The server does not have the drive.
    NotServed,
    /// The server has the drive. Answer to [`AttachRequest::only_asks`].
    Served,
    /// The server has the drive, but grants no lease.
    Refused {
        /// Reason, for a person.
        reason: String,
    },
    /// The server is still creating the lease, for example while it wipes the range. Sent every second.
    Waiting,
    /// The lease is granted. Descriptors: the doorbells' file, the in-flight tracking file, and the eventfd that signals
    /// events. The [signs](SIGNS) follow.
    Attached(Box<AttachedLease>),
}

/// Number of descriptors of [`AttachReply::Attached`] before the [signs](SIGNS).
pub(crate) const ATTACH_DESCRIPTORS: usize = 3;

/// Number of descriptors after [`ATTACH_DESCRIPTORS`] that signal the complete end of the server's process: its pidfd, and
/// a pipe.
pub(crate) const SIGNS: usize = process_liveness::LIVENESS_FDS;

/// Last messages of a server. They answer no request. The server sends each at most once, in this order.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum LeaseEndNotice {
    /// An operator has removed the lease.
    Removed,
    /// No command is in flight, and nothing accesses the function's memory. If the connection ends without this message,
    /// commands may still be in flight.
    Ended,
}

/// Properties of a lease that do not change while the lease exists.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct AttachedLease {
    /// Id of the lease.
    pub(crate) id: String,
    pub(crate) facts: LeaseFacts,
    /// `CAP.DSTRD` of the doorbells.
    pub(crate) dstrd: u8,
    /// Number of interrupt vectors, including the one of the admin queue.
    pub(crate) vectors: u16,
}

impl AttachedLease {
    /// Returns whether this lease offers at least the properties that the guest was promised by an earlier lease. Some
    /// properties, such as the doorbell stride, must be equal; other properties may be greater.
    pub(crate) fn can_replace(&self, promised: &Self) -> bool {
        let own = |attached: &Self| {
            let LeaseFacts {
                parks,
                can_be_damaged,
                policies,
                ..
            } = attached.facts;
            let Self { dstrd, vectors, .. } = *attached;
            (dstrd, vectors, parks, can_be_damaged, policies)
        };
        self.id == promised.id
            && own(self) == own(promised)
            && self.facts.check_promises(&promised.facts).is_ok()
    }

    /// Returns whether the properties are within their limits and do not contradict each other.
    pub(crate) fn is_valid(&self) -> bool {
        let LeaseFacts {
            namespace,
            queue_pairs,
            ..
        } = &self.facts;
        let shift = u32::from(namespace.lba_shift);
        (1..=MAX_QUEUE_PAIRS).contains(queue_pairs)
            && self.vectors == vector_count(*queue_pairs)
            && (9..=16).contains(&shift)
            && namespace.blocks <= u64::MAX >> shift
    }
}

/// Region of the VM's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct MemoryRegionMessage {
    pub(crate) gpa: Gpa,
    pub(crate) len: u64,
    pub(crate) offset: u64,
    pub(crate) readable: bool,
    pub(crate) writable: bool,
}

impl MemoryRegionMessage {
    /// Creates the message of a region. The descriptor of the region's memory is sent with the message.
    pub(crate) fn new(region: &MemoryRegion) -> Self {
        let MemoryRegion {
            gpa,
            len,
            fd: _,
            offset,
            readable,
            writable,
        } = *region;
        Self {
            gpa,
            len,
            offset,
            readable,
            writable,
        }
    }

    /// Creates the region from its message and its descriptor.
    pub(crate) fn to_region(self, descriptor: Option<OwnedFd>) -> Result<MemoryRegion, DmaError> {
        let Self {
            gpa,
            len,
            offset,
            readable,
            writable,
        } = self;
        let fd = descriptor.ok_or(DmaError::InvalidRegion { gpa, len })?;
        Ok(MemoryRegion {
            gpa,
            len,
            fd,
            offset,
            readable,
            writable,
        })
    }
}

/// Change or query of a vector. The reply is a boolean.
///
/// The reply to [`Self::Ask`] tells whether an interrupt is pending. The reply to every other variant tells whether the
/// change delivered a pending interrupt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum VectorChange {
    Connect,
    Disconnect,
    Mask,
    Unmask,
    Ask,
    Clear,
}

/// Reply to [`BackendRequest::io_doorbells`](crate::call::BackendRequest::io_doorbells). Descriptors: the eventfds that wake
/// the new pollers, in the order of [`Self::new_wakers`]. If a reply has [`DESCRIPTORS_MAX`](crate::DESCRIPTORS_MAX)
/// descriptors, it may lack doorbells, so the VMM sends the request again.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct IoDoorbellsReply {
    pub(crate) are_buffered: bool,
    pub(crate) are_untrapped: bool,
    /// Each doorbell, with the number of the eventfd that wakes its poller. The VMM closes an eventfd whose number is
    /// missing here, since it is no longer in use.
    pub(crate) wakers: Vec<(Doorbell, u64)>,
    pub(crate) new_wakers: Vec<u64>,
}

/// Reply to [`BackendRequest::take_dirty_pages`](crate::call::BackendRequest::take_dirty_pages). The ranges may need several
/// replies.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DirtyPages {
    pub(crate) ranges: Vec<DirtyRange>,
    /// Set if there are further ranges, which the VMM gets by repeating the request.
    pub(crate) more: bool,
}

/// Maximum number of ranges in one [`DirtyPages`].
pub(crate) const RANGES_MAX: usize = 1 << 15;

/// Result of a method, or its error.
pub(crate) type BackendResult<T> = Result<T, RemoteIoError>;

/// Error of the kernel or of a library.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct RemoteIoError(#[serde(with = "serde_forms::io_error")] pub(crate) io::Error);

/// SMART / Health Information log page (Base 2.0, section 5.16.1.3), as bytes.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct SmartHealthBytes(pub(crate) Vec<u8>);
