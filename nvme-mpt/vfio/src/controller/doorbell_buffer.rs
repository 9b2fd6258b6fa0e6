//! Doorbell Buffer of a drive (Base 2.0, section 5.8). Emulated drives in nested and cloud machines have a Doorbell Buffer. It
//! turns most doorbell writes into stores to memory.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use super::super::device_backing::DeviceBacking;
use super::super::queue_pair::{BufferedDoorbell, DriveDoorbell, PairDoorbells};
use super::admin_queue::AdminQueue;
use super::error::ControllerError;
use nvme_guest::address::PAGE_SIZE;
use nvme_guest::iova::{IovaPart, IovaSpace};
use nvme_mpt_memory::{MappedWord32, Mapping, MappingAccess, memfd};
use nvme_spec::ids::QueueId;
use nvme_spec::opcode::AdminOpcode;
use nvme_spec::registers::Doorbell;
use nvme_spec::sqe::Sqe;

/// Offset of the EventIdx page, which follows the page of shadow doorbells.
const EVENT_IDX_OFFSET: usize = PAGE_SIZE as usize;

/// Shadow doorbells and EventIdx, one page each.
#[derive(Debug)]
pub(super) struct DriveDoorbellBuffer {
    /// Dropped before `memory`, so that the IOVAs are unmapped before the memory is freed.
    iova: IovaPart,
    memory: Arc<Mapping>,
    /// Memory file of both pages, for a hand-over.
    file: OwnedFd,
}

/// Length of both pages in bytes.
const BUFFER_BYTES: usize = 2 * PAGE_SIZE as usize;

impl DriveDoorbellBuffer {
    /// Allocates the pages in a new memory file.
    pub(super) fn new(space: &Arc<IovaSpace>) -> Result<Self, ControllerError> {
        let file =
            memfd(c"nvme-mpt-doorbells", BUFFER_BYTES as u64).map_err(ControllerError::Memory)?;
        Self::from_file(space, file)
    }

    /// Restores the predecessor's pages, which the drive is using. Sets the doorbells of the I/O queues to 0, because no I/O
    /// queue exists.
    pub(super) fn from_predecessor(
        space: &Arc<IovaSpace>,
        file: OwnedFd,
        dstrd: u8,
    ) -> Result<Self, ControllerError> {
        let buffer = Self::from_file(space, file)?;
        let first = Doorbell::SqTail(QueueId(1)).offset(dstrd) as usize;
        for page in [0, EVENT_IDX_OFFSET] {
            let len = EVENT_IDX_OFFSET.checked_sub(first);
            let io_queues = len.and_then(|len| buffer.memory.bytes(page + first, len));
            let none = ControllerError::HandOver("its Doorbell Buffer has no I/O queues");
            io_queues.ok_or(none)?.zero();
        }
        Ok(buffer)
    }

    /// Returns the memory file of both pages, for a hand-over.
    pub(super) fn hand_over(&self) -> io::Result<OwnedFd> {
        self.file.try_clone()
    }

    fn from_file(space: &Arc<IovaSpace>, file: OwnedFd) -> Result<Self, ControllerError> {
        let memory = Mapping::shared(file.as_fd(), 0, BUFFER_BYTES, MappingAccess::ReadWrite);
        let memory = memory.map_err(ControllerError::Memory)?;
        let iova = space
            .map(&memory, MappingAccess::ReadWrite)
            .map_err(ControllerError::Memory)?;
        Ok(Self {
            iova,
            memory: Arc::new(memory),
            file,
        })
    }

    /// Zeroes the pages, and gives them to the drive with Doorbell Buffer Config. The caller ensures that no I/O queue exists.
    pub(super) fn configure(&self, admin: &mut AdminQueue) -> Result<(), ControllerError> {
        if let Some(memory) = self.memory.bytes(0, self.memory.len()) {
            memory.zero();
        }
        let mut sqe = Sqe::new(AdminOpcode::DOORBELL_BUFFER_CONFIG.0);
        let shadow = self.iova.start();
        sqe.dptr = [shadow, shadow + EVENT_IDX_OFFSET as u64];
        admin.execute(sqe)?;
        Ok(())
    }

    fn doorbell(&self, offset: usize) -> Option<BufferedDoorbell> {
        // A doorbell beyond the first page is not in the buffer.
        (offset < EVENT_IDX_OFFSET).then_some(())?;
        Some(BufferedDoorbell {
            shadow: MappedWord32::new(&self.memory, offset)?,
            event_idx: MappedWord32::new(&self.memory, EVENT_IDX_OFFSET + offset)?,
        })
    }
}

/// Returns the doorbells of an I/O queue pair: the registers, and their words in the Doorbell Buffer if the drive has one.
pub(super) fn pair_doorbells(
    backing: &dyn DeviceBacking,
    dstrd: u8,
    buffer: Option<&DriveDoorbellBuffer>,
    qid: QueueId,
) -> Result<PairDoorbells, ControllerError> {
    let (registers, first) = backing.doorbells();
    let doorbell = |doorbell: Doorbell| {
        let offset = doorbell.offset(dstrd) as usize;
        let register = MappedWord32::new(&registers, first + offset)?;
        let buffer = buffer.and_then(|buffer| buffer.doorbell(offset));
        Some(DriveDoorbell { register, buffer })
    };
    let doorbells = doorbell(Doorbell::SqTail(qid)).zip(doorbell(Doorbell::CqHead(qid)));
    let (sq_tail, cq_head) = doorbells.ok_or(ControllerError::NoQueuePairs)?;
    Ok(PairDoorbells { sq_tail, cq_head })
}
