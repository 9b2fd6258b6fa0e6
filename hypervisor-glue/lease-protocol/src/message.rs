//! Messages of the protocol. The VMM sends requests, and the server answers each with one reply.

use std::io;
use std::time::Duration;

use nvme_guest::doorbell::MAX_QUEUE_PAIRS;
use nvme_guest::host::UnreportedChanges;
use nvme_guest::interrupt::vectors_of;
use nvme_guest::limit::RateLimits;
use nvme_guest::seam::CoalescingConfig;
use nvme_guest::{
    BackendState, CqConfig, DirtyRange, DoorbellBuffer, Gpa, LeaseFacts, MemoryRegion,
    PersistedQueues, SqConfig, crossing,
};
use nvme_mpt_memory::presence;
use nvme_spec::ids::QueueId;
use nvme_spec::registers::Doorbell;
use serde::{Deserialize, Serialize};

/// Version of the protocol. Client and server must have the same. Any change of a message, or of a type in one, needs a new
/// version.
pub const VERSION: u32 = 4;

/// First message of a VMM. All versions have its fields.
///
/// Descriptors: none, or those of [`AttachReply::Attached`] from the previous server, which this one is to replace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct AttachRequest {
    /// Protocol version of the VMM.
    pub(crate) version: u32,
    /// The function's option string, with absolute paths.
    #[serde(default)]
    pub(crate) options: String,
    /// Set if the VMM only requests [`AttachReply::Served`], and no lease. A server that does not know this field creates a
    /// lease, which ends with the connection.
    #[serde(default, skip_serializing_if = "is_false")]
    pub(crate) only_asks: bool,
    /// Set if the VMM waits for the [`SIGNS`] of the server's end. A server that does not know this field sends none.
    #[serde(default, skip_serializing_if = "is_false")]
    pub(crate) sees_end: bool,
}

fn is_false(value: &bool) -> bool {
    !value
}

/// Answers to an [`AttachRequest`]: any number of [`Self::Waiting`], then one other.
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
    /// The lease is being created, for example while the range is wiped. Sent every second.
    Waiting,
    /// The lease is granted. Descriptors: the doorbells' file, the file of the in-flight state, and the eventfd of events. With
    /// [`AttachRequest::sees_end`], the [signs](SIGNS) follow.
    Attached(Box<AttachedLease>),
}

/// Number of descriptors of [`AttachReply::Attached`].
pub(crate) const PARTS: usize = 3;

/// Number of descriptors after [`PARTS`] that signal the complete end of the server's process: its pidfd, and a pipe.
pub(crate) const SIGNS: usize = presence::SIGNS;

/// Last messages of a server, sent without a request. Each is sent at most once, in this order.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum LeaseEndNotice {
    /// An operator has removed the lease.
    Removed,
    /// No command is in flight, and nothing accesses the function's memory. Without this message, the end of the connection
    /// says nothing about the drive.
    Ended,
}

/// Facts that are constant during a lease.
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
    /// Returns whether these facts include everything that was `promised` to the function. Its own options must be equal.
    pub(crate) fn keeps(&self, promised: &Self) -> bool {
        let own = |attached: &Self| {
            let LeaseFacts {
                parks,
                can_be_damaged,
                learning,
                ..
            } = attached.facts;
            let Self { dstrd, vectors, .. } = *attached;
            (dstrd, vectors, parks, can_be_damaged, learning)
        };
        self.id == promised.id && own(self) == own(promised) && self.facts.keep(&promised.facts)
    }

    /// Returns whether a lease can have these facts.
    pub(crate) fn is_possible(&self) -> bool {
        let LeaseFacts {
            namespace,
            queue_pairs,
            ..
        } = &self.facts;
        let shift = u32::from(namespace.lba_shift);
        (1..=MAX_QUEUE_PAIRS).contains(queue_pairs)
            && self.vectors == vectors_of(*queue_pairs)
            && (9..=16).contains(&shift)
            && namespace.blocks <= u64::MAX >> shift
    }
}

/// Request to call one method of [`ControllerBackend`](nvme_guest::ControllerBackend). The reply is the method's result.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum BackendRequest {
    Status,
    Damage,
    SmartHealth,
    Changes,
    ForgetChanges(UnreportedChanges),
    Counters,
    Commands,
    Stats,
    TakeEvents,
    /// Descriptor: the file.
    Map(MemoryRegionMessage),
    Unmap {
        gpa: Gpa,
        len: u64,
        time: Duration,
    },
    StartDirtyLog,
    TakeDirtyPages,
    StopDirtyLog,
    CreateCq(CqConfig),
    CreateSq {
        config: SqConfig,
        time: Duration,
    },
    DeleteSq {
        qid: QueueId,
        time: Duration,
    },
    DeleteCq {
        qid: QueueId,
        time: Duration,
    },
    SetCoalescing(CoalescingConfig),
    SetRates(RateLimits),
    IoDoorbells,
    SetDoorbellBuffer {
        buffer: DoorbellBuffer,
        time: Duration,
    },
    BeginSilentDoorbells,
    EndSilentDoorbells,
    WatchAdminDoorbells,
    BeginAnew,
    Pause,
    Resume,
    Revoke,
    ResetWithin(Duration),
    FlushWithin(Duration),
    Save,
    Check(Box<BackendState>),
    TakeUp(Box<PersistedQueues>),
    Restore(Box<BackendState>),
    /// Change of an [`InterruptVector`](nvme_guest::InterruptVector). Descriptor of [`VectorChange::Connect`]: the eventfd.
    Vector {
        number: u16,
        change: VectorChange,
    },
    /// Like `Pause`, but after a timeout the queues stay stopped. Servers of early builds do not know it.
    PauseWithin(Duration),
    /// Like `Map`, for a region that was mapped under the previous server.
    MapKept(MemoryRegionMessage),
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

/// History of a region of the function's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RegionHistory {
    /// The previous server had the region mapped, and it was not unmapped since.
    Kept,
    /// The previous server did not have the region mapped in this form.
    New,
}

impl BackendRequest {
    /// Returns the request that maps a region. The region's descriptor must be sent with it.
    pub(crate) fn map(region: &MemoryRegion, had: RegionHistory) -> Self {
        let MemoryRegion {
            gpa,
            len,
            fd: _,
            offset,
            readable,
            writable,
        } = *region;
        let region = MemoryRegionMessage {
            gpa,
            len,
            offset,
            readable,
            writable,
        };
        match had {
            RegionHistory::Kept => Self::MapKept(region),
            RegionHistory::New => Self::Map(region),
        }
    }
}

/// Change or query of a vector. The reply is a boolean.
///
/// For [`Self::Ask`], the reply tells whether a signal is pending; for the others, whether a pending one was delivered.
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

/// Reply to [`BackendRequest::IoDoorbells`]. Descriptors: the wakers of new pollers, in the order of [`Self::new_bells`]. If
/// there are [`DESCRIPTORS_MAX`](crate::DESCRIPTORS_MAX) of them, doorbells may be missing, and the VMM asks again.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct IoDoorbellsReply {
    pub(crate) are_buffered: bool,
    pub(crate) are_silent: bool,
    /// Each doorbell, and the number of its poller's waker. Wakers that are not listed no longer exist.
    pub(crate) bells: Vec<(Doorbell, u64)>,
    pub(crate) new_bells: Vec<u64>,
}

/// Part of the reply to [`BackendRequest::TakeDirtyPages`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DirtyPages {
    pub(crate) ranges: Vec<DirtyRange>,
    /// Set if further ranges follow, for which the VMM sends another request.
    pub(crate) more: bool,
}

/// Maximum number of ranges in one [`DirtyPages`].
pub(crate) const RANGES_MAX: usize = 1 << 15;

/// Result of a method, or its error.
pub(crate) type BackendResult<T> = Result<T, RemoteIoError>;

/// Error of the kernel or of a library.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct RemoteIoError(#[serde(with = "crossing::io_error")] pub(crate) io::Error);

/// SMART / Health Information log page (Base 2.0, section 5.16.1.3), as bytes.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct SmartHealthBytes(pub(crate) Vec<u8>);
