//! Messages of the protocol. The VMM asks, and the server answers each request with one reply.

use std::io;
use std::time::Duration;

use nvme_mpt::crossing;
use nvme_mpt::doorbell::MAX_QUEUE_PAIRS;
use nvme_mpt::host::Changes;
use nvme_mpt::interrupt::vectors_of;
use nvme_mpt::limit::RateLimits;
use nvme_mpt::memory::presence;
use nvme_mpt::seam::CoalescingConfig;
use nvme_mpt::spec::ids::QueueId;
use nvme_mpt::spec::registers::Doorbell;
use nvme_mpt::{
    AttachmentState, CqConfig, DirtyRange, DoorbellBuffer, Gpa, KeptQueues, LeaseFacts,
    MemoryRegion, SqConfig,
};
use serde::{Deserialize, Serialize};

/// Version of the protocol. Sides of different versions do not talk: a change of a message, or of a type in one, is a
/// new version.
pub const VERSION: u32 = 4;

/// First message of a VMM. All versions have its fields.
///
/// Descriptors: none, or those of [`Opened::Attached`] from the server before, whose place this one is to take.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Opening {
    /// Version that the VMM speaks.
    pub(crate) version: u32,
    /// The function's option string, with absolute paths.
    #[serde(default)]
    pub(crate) options: String,
    /// True if the VMM asks only for [`Opened::Served`], and wants no lease. A server that does not know this field makes
    /// the lease, which ends with the connection.
    #[serde(default, skip_serializing_if = "is_false")]
    pub(crate) only_asks: bool,
    /// True if the VMM waits for the signs that nothing of the server is left ([`SIGNS`]). A server that does not know this
    /// field sends none.
    #[serde(default, skip_serializing_if = "is_false")]
    pub(crate) sees_end: bool,
}

fn is_false(value: &bool) -> bool {
    !value
}

/// Answers to an [`Opening`]: any number of [`Self::Waiting`], and one other.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Opened {
    /// The server does not have the drive.
    NotServed,
    /// The server has the drive. It answers [`Opening::only_asks`] so.
    Served,
    /// The server has the drive, and gives out no lease.
    Refused {
        /// Why, for a person.
        reason: String,
    },
    /// The range is being wiped, or the like. One comes each second.
    Waiting,
    /// Descriptors: the doorbells' file, that of the live state, and the eventfd of events. With [`Opening::sees_end`], the
    /// [signs](SIGNS) follow.
    Attached(Box<Attached>),
}

/// Descriptors of [`Opened::Attached`].
pub(crate) const PARTS: usize = 3;

/// Descriptors after those of [`PARTS`] that tell when nothing of the server is left: its pidfd, and a pipe.
pub(crate) const SIGNS: usize = presence::SIGNS;

/// Last messages of a server, which nobody asked for. Each comes once at most, in this order.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Farewell {
    /// An operator has taken the lease away.
    Removed,
    /// Nothing is in flight for the function, and nothing reaches its memory any more. Without this, the end of the connection
    /// says nothing about the drive.
    Ended,
}

/// Facts that stay the same as long as the function has the lease.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Attached {
    /// Id of the lease.
    pub(crate) id: String,
    pub(crate) facts: LeaseFacts,
    /// `CAP.DSTRD` of the doorbells.
    pub(crate) dstrd: u8,
    /// Interrupt vectors: that of the admin queue, and those of I/O queues.
    pub(crate) vectors: u16,
}

impl Attached {
    /// Returns whether all that was `promised` is there. The function goes on, so its own choices are the same too.
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

/// Request for one method of [`HostSide`](nvme_mpt::HostSide). The reply is the method's result.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum Request {
    Status,
    Damage,
    SmartHealth,
    Changes,
    ForgetChanges(Changes),
    Counters,
    Commands,
    Stats,
    TakeEvents,
    /// Descriptor: the file.
    Map(Region),
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
    Check(Box<AttachmentState>),
    TakeUp(Box<KeptQueues>),
    Restore(Box<AttachmentState>),
    /// Of an [`InterruptVector`](nvme_mpt::InterruptVector). Descriptor of [`VectorChange::Connect`]: the eventfd.
    Vector {
        number: u16,
        change: VectorChange,
    },
    /// As `Pause`, but queues that still have commands in flight after that time stay stopped. Servers of early builds do not
    /// know it.
    PauseWithin(Duration),
    /// As `Map`, for a region that the function had under the server before.
    MapKept(Region),
}

/// A region of the VM's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Region {
    pub(crate) gpa: Gpa,
    pub(crate) len: u64,
    pub(crate) offset: u64,
    pub(crate) readable: bool,
    pub(crate) writable: bool,
}

/// History of a region of a function's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RegionHistory {
    /// The previous server had it mapped, and it was not unmapped since.
    Kept,
    /// No server had it mapped.
    New,
}

impl Request {
    /// The request that maps a region, which is sent with the region's descriptor.
    pub(crate) fn map(region: &MemoryRegion, had: RegionHistory) -> Self {
        let MemoryRegion {
            gpa,
            len,
            fd: _,
            offset,
            readable,
            writable,
        } = *region;
        let region = Region {
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

/// Change of a vector, or question about it. The reply is a boolean.
///
/// For [`Self::Ask`] it is true if a signal waits; for the others, if one that waited was delivered.
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

/// Reply to [`Request::IoDoorbells`]. Descriptors: the bells of pollers that are new, in the order of
/// [`Self::new_bells`]. If there are [`DESCRIPTORS_MAX`](crate::DESCRIPTORS_MAX) of them, doorbells of others may be left
/// out, and the VMM asks again.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Doorbells {
    pub(crate) are_buffered: bool,
    pub(crate) are_silent: bool,
    /// Each doorbell, and the number of its poller's bell. Bells that are not named are gone.
    pub(crate) bells: Vec<(Doorbell, u64)>,
    pub(crate) new_bells: Vec<u64>,
}

/// Reply to [`Request::TakeDirtyPages`]: a part of them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DirtyPages {
    pub(crate) ranges: Vec<DirtyRange>,
    /// Others follow, for which the VMM asks again.
    pub(crate) more: bool,
}

/// Ranges in one [`DirtyPages`].
pub(crate) const RANGES_MAX: usize = 1 << 15;

/// Result of a method, or its error.
pub(crate) type Outcome<T> = Result<T, Failed>;

/// The kernel's or a library's error.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Failed(#[serde(with = "crossing::io_error")] pub(crate) io::Error);

/// A SMART / Health Information log page (Base 2.0, section 5.16.1.3), as bytes.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Smart(pub(crate) Vec<u8>);
