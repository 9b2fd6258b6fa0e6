//! `null:SIZE`: a drive that stores no data, to measure the cost of the data path.

use std::io;
use std::os::fd::RawFd;

use nvme_lease::backing_id::DriveIdentity;
use nvme_lease::range::BlockRange;
use nvme_mpt::drive::{HostLease, HostLeaseError, HostLeaseRequest, StoreLease};
use nvme_mpt::host::{
    CompletionTaker, CompletionTiming, HostBatch, HostCompletion, HostMemory, HostQueue,
};
use nvme_mpt::shadow::{HostQueuePair, NvmCommands};
use nvme_mpt_memory::clock::Ticks;
use nvme_spec::sqe::Sqe;
use nvme_spec::status::Status;

use crate::backing_store::BackingStore;
use crate::command_executor::{CommandExecutor, SoftwareQueue};

/// A backing store that stores nothing.
#[derive(Debug)]
pub struct NullBackingStore {
    bytes: u64,
}

impl NullBackingStore {
    pub(crate) fn new(bytes: u64) -> Self {
        Self { bytes }
    }
}

impl BackingStore for NullBackingStore {
    type Lease = NullLease;

    fn identity(&self) -> DriveIdentity {
        format!("null:{}", self.bytes).into()
    }

    fn model(&self) -> &'static str {
        "nvme-mpt null drive"
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn open_lease(&self, _: &HostLeaseRequest<'_>) -> Result<NullLease, HostLeaseError> {
        Ok(NullLease)
    }
}

/// A lease of a drive that stores nothing.
#[derive(Debug)]
pub struct NullLease;

impl HostLease for NullLease {
    fn create_queue(&self, slots: u16) -> io::Result<HostQueuePair> {
        Ok(HostQueuePair::new(NullQueue::new(slots)))
    }

    fn add_part(&self, _: BlockRange) -> Result<(), HostLeaseError> {
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }
}

impl StoreLease for NullLease {
    type Queue = SoftwareQueue<NullCommandExecutor>;

    fn create_delayable_queue(&self, slots: u16) -> io::Result<Self::Queue> {
        Ok(SoftwareQueue::new(NullCommandExecutor, slots))
    }
}

/// Queue pair that completes each command when it is submitted.
#[derive(Debug)]
struct NullQueue {
    cq: Vec<HostCompletion>,
}

impl NullQueue {
    /// Creates a queue pair for up to `slots` commands.
    fn new(slots: u16) -> Self {
        Self {
            cq: Vec::with_capacity(usize::from(slots)),
        }
    }
}

impl HostBatch for &mut NullQueue {
    #[inline]
    fn announce(&mut self, _: u32, _: Ticks) {}

    #[inline]
    fn submit(&mut self, sqe: &Sqe) {
        self.cq.push(HostCompletion {
            slot: sqe.cid().0,
            status: Status::SUCCESS,
            dw0: 0,
        });
    }

    #[inline]
    fn ring(self, _: HostMemory<'_>) {}
}

impl HostQueue for NullQueue {
    const COMPLETION_TIMING: CompletionTiming = CompletionTiming::Immediate;

    type Commands = NvmCommands;

    type Batch<'a> = &'a mut Self;

    #[inline]
    fn batch(&mut self) -> &mut Self {
        self
    }

    #[inline]
    fn reap(&mut self, _: HostMemory<'_>, mut taker: impl CompletionTaker) {
        for completion in self.cq.drain(..) {
            taker.take(completion);
        }
    }

    fn cut_short(&mut self) {}

    fn drain(&mut self) -> bool {
        true
    }

    fn wait_fd(&self) -> Option<RawFd> {
        None
    }
}

/// Executor of the store when layers stand in front of it. Every command succeeds, and a Read leaves the guest's buffer
/// unchanged.
#[derive(Debug, Default)]
pub struct NullCommandExecutor;

impl CommandExecutor for NullCommandExecutor {
    #[inline]
    fn execute(&mut self, _: &Sqe, _: HostMemory<'_>) -> Status {
        Status::SUCCESS
    }

    #[inline]
    fn prefetch(&self, _: &Sqe) {}
}
