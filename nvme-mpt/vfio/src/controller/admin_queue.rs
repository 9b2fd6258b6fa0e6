//! Admin queue pair of a physical controller, in a memory file with which a successor continues.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::super::device_backing::DeviceBacking;
use super::error::ControllerError;
use nvme_driver::{
    ADMIN_MEMORY_BYTES, AdminQueuePair, AdminQueuePositions, QueueMemory, QueuePairDoorbells,
    QueuePairPositions,
};
use nvme_guest::iova::{IovaPart, IovaSpace, StaleMappingsFlag};
use nvme_mpt_memory::{MappedWord32, Mapping, MappingAccess, memfd};
use nvme_spec::ids::QueueId;

/// Admin queue pair of a drive.
pub(super) type AdminQueue = AdminQueuePair<dyn DeviceBacking, AdminQueueMemory, MappedWord32>;

/// Memory of the admin queue pair, mapped for the drive.
#[derive(Debug)]
pub(super) struct AdminQueueMemory {
    /// Dropped before `mapping`, so that the IOVAs are unmapped before the memory is freed.
    iova: IovaPart,
    mapping: Arc<Mapping>,
    /// Memory file, for a hand-over.
    file: OwnedFd,
}

impl AdminQueueMemory {
    fn map(space: &Arc<IovaSpace>, file: OwnedFd) -> io::Result<Self> {
        let access = MappingAccess::ReadWrite;
        let mapping = Mapping::shared(file.as_fd(), 0, ADMIN_MEMORY_BYTES, access)?;
        Ok(Self {
            iova: space.map(&mapping, access)?,
            mapping: Arc::new(mapping),
            file,
        })
    }
}

impl QueueMemory for AdminQueueMemory {
    fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping
    }

    fn device_address(&self, offset: usize) -> u64 {
        self.iova.iova_at(offset as u64).bits()
    }
}

/// State that the lock of a drive's admin queue pair protects.
#[derive(Debug)]
pub(super) struct LockedAdminQueue {
    pub(super) queue: AdminQueue,
    /// Set while the drive is quiesced for a hand-over. No command may be sent then.
    pub(super) quiesced: Option<QuiescedDrive>,
}

/// Data that belongs to the quiesced state of a drive.
#[derive(Debug)]
pub(super) struct QuiescedDrive {
    /// Flag by which the predecessor invalidates the state that it wrote for the successor.
    pub(super) stale_flag: StaleMappingsFlag,
}

/// Positions in the admin queue pair for a hand-over. Only an Asynchronous Event Request may be in flight then.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct DriveAdminQueueState {
    tail: u32,
    head: u32,
    phase: bool,
    next_cid: u16,
    listening: bool,
}

/// Creates an empty admin queue pair in a new memory file.
pub(super) fn create(
    backing: Arc<dyn DeviceBacking>,
    space: &Arc<IovaSpace>,
    dstrd: u8,
) -> Result<AdminQueue, ControllerError> {
    let file = memfd(c"nvme-mpt-admin", ADMIN_MEMORY_BYTES as u64);
    from_file(
        backing,
        space,
        dstrd,
        file.map_err(ControllerError::Memory)?,
    )
}

/// Restores the predecessor's admin queue pair from its memory file.
pub(super) fn from_predecessor(
    backing: Arc<dyn DeviceBacking>,
    space: &Arc<IovaSpace>,
    dstrd: u8,
    file: OwnedFd,
    state: DriveAdminQueueState,
) -> Result<AdminQueue, ControllerError> {
    let DriveAdminQueueState {
        tail,
        head,
        phase,
        next_cid,
        listening,
    } = state;
    Ok(
        from_file(backing, space, dstrd, file)?.at(AdminQueuePositions {
            rings: QueuePairPositions { tail, head, phase },
            cid: next_cid,
            has_event_request: listening,
        })?,
    )
}

/// Returns the positions in the queues and the memory file, for a hand-over.
pub(super) fn hand_over(queue: &AdminQueue) -> io::Result<(DriveAdminQueueState, OwnedFd)> {
    let positions = queue.positions();
    let QueuePairPositions { tail, head, phase } = positions.rings;
    let state = DriveAdminQueueState {
        tail,
        head,
        phase,
        next_cid: positions.cid,
        listening: positions.has_event_request,
    };
    Ok((state, queue.memory().file.try_clone()?))
}

fn from_file(
    backing: Arc<dyn DeviceBacking>,
    space: &Arc<IovaSpace>,
    dstrd: u8,
    file: OwnedFd,
) -> Result<AdminQueue, ControllerError> {
    let memory = AdminQueueMemory::map(space, file).map_err(ControllerError::Memory)?;
    let (doorbells, first) = backing.doorbells();
    let doorbells = QueuePairDoorbells::mapped(&doorbells, first, QueueId::ADMIN, dstrd);
    let doorbells = doorbells.ok_or(ControllerError::NoQueuePairs)?;
    Ok(AdminQueue::new(backing, memory, doorbells)?)
}
