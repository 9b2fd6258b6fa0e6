//! `memory:SIZE`: a drive in memory. Its content ends with the process, or is in a memory file that outlives the process.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::str::FromStr;
use std::sync::Arc;

use nvme_guest::control_group::{ControlGroupLimit, memory_limit};
use nvme_guest::host::ControllerLimits;
use nvme_guest::memory_account::MemoryAccount;
use nvme_lease::backing_id::DriveIdentity;
use nvme_lease::range::BlockRange;
use nvme_mpt::drive::{HostLease, HostLeaseError, HostLeaseRequest, StoreLease};
use nvme_mpt::host::{DataPointer, HostMemory, range_descriptor};
use nvme_mpt::shadow::HostQueuePair;
use nvme_mpt_memory::{self as memory, Mapping, MappingAccess, RawBytes};
use nvme_spec::ids::Lba;
use nvme_spec::nvm::{
    CompareVerify, CopyCommand, CopyRange0, DatasetManagement, DsmRange, ReadWrite,
    WriteUncorrectable, WriteZeroes,
};
use nvme_spec::opcode::NvmOpcode;
use nvme_spec::sqe::Sqe;
use nvme_spec::status::Status;

use crate::backing_store::BackingStore;
use crate::command_executor::{CommandExecutor, ExecutionStep, SoftwareQueue, TURN_BYTES};
use crate::uncorrectable::{LeaseMarkRegistration, UncorrectableBlocks, UncorrectableMarkChange};

/// Unit of `st_blocks` in bytes (stat(2)).
const STAT_BLOCK_BYTES: u64 = 512;

/// Number of bytes that can be freed in the time in which one byte is zeroed, if pages have 4 KiB. Huge pages are freed faster.
const DISCARD_SPEED: u64 = 4;

/// Time at which a drive in memory allocates its memory from the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum MemoryAllocationTime {
    /// The host gives the memory of each page when the guest writes it for the first time, so that this write takes longer.
    #[default]
    AsWritten,
    /// The host gives all of the memory when the drive is created.
    AtOnce,
}

impl FromStr for MemoryAllocationTime {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "off" => Ok(Self::AsWritten),
            "on" => Ok(Self::AtOnce),
            _ => Err(format!(
                "`{text}` is not a choice for populate; use on (all memory at the start) or off (as it is written)"
            )),
        }
    }
}

impl fmt::Display for MemoryAllocationTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::AsWritten => "off",
            Self::AtOnce => "on",
        })
    }
}

/// Returns an error if the host, or this process's control group, has less than `bytes` bytes of free memory, since the kernel
/// would then kill processes. If the host does not report its free memory, returns no error.
fn check_available_memory(bytes: u64) -> io::Result<()> {
    check_limit(bytes, memory_limit())?;
    match MemoryAccount::for_host().available() {
        Some(available) if available < bytes => Err(io::Error::new(
            io::ErrorKind::OutOfMemory,
            format!("It needs {bytes} bytes, and the host has {available} available"),
        )),
        _ => Ok(()),
    }
}

fn check_limit(bytes: u64, limit: Option<ControlGroupLimit>) -> io::Result<()> {
    match limit {
        Some(limit) if limit.remaining() < bytes => Err(io::Error::new(
            io::ErrorKind::OutOfMemory,
            format!(
                "It needs {bytes} bytes, and its control group has {} available ({} is {}, {} are used): raise it (MemoryMax= of a \
                 unit), or leave populate=on out",
                limit.remaining(),
                limit.file.display(),
                limit.limit,
                limit.used
            ),
        )),
        _ => Ok(()),
    }
}

/// A backing store in memory, or in a memory file.
#[derive(Debug)]
pub struct MemoryBackingStore {
    bytes: u64,
    executor: MemoryCommandExecutor,
}

impl MemoryBackingStore {
    pub(crate) fn new(
        bytes: u64,
        lba_shift: u8,
        allocation: MemoryAllocationTime,
    ) -> io::Result<Self> {
        let len = usize::try_from(bytes).map_err(|_| io::ErrorKind::OutOfMemory)?;
        if allocation == MemoryAllocationTime::AtOnce {
            check_available_memory(bytes)?;
        }
        let store = MemoryCommandExecutor::new(len, lba_shift, Arc::default())?;
        if allocation == MemoryAllocationTime::AtOnce {
            store.blocks.populate()?;
        }
        Ok(Self {
            bytes,
            executor: store,
        })
    }

    /// Creates a backing store of `bytes` bytes in a memory file.
    pub(crate) fn from_file(
        file: &OwnedFd,
        bytes: u64,
        lba_shift: u8,
        allocation: MemoryAllocationTime,
    ) -> io::Result<Self> {
        let len = usize::try_from(bytes).map_err(|_| io::ErrorKind::OutOfMemory)?;
        if allocation == MemoryAllocationTime::AtOnce {
            // Allocates the file's memory without populating page tables. A successor finds the memory allocated, whereas
            // populating page tables in the successor would pause its guests.
            let file = File::from(file.try_clone()?);
            let taken = file.metadata()?.blocks() * STAT_BLOCK_BYTES;
            check_available_memory(bytes.saturating_sub(taken))?;
            memory::allocate(file.as_fd(), bytes)?;
        }
        let blocks = Mapping::shared_unreserved(file.as_fd(), len, MappingAccess::ReadWrite)?;
        let store = MemoryCommandExecutor::from_mapping(blocks, true, lba_shift, Arc::default());
        Ok(Self {
            bytes,
            executor: store,
        })
    }
}

impl BackingStore for MemoryBackingStore {
    type Lease = MemoryLease;

    fn identity(&self) -> DriveIdentity {
        format!("memory:{}", self.bytes).into()
    }

    fn model(&self) -> &'static str {
        "nvme-mpt memory drive"
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the limits with a smaller one for deallocated ranges. Each range is deallocated in one step, which must not take
    /// longer than 0.3 ms.
    fn limits(&self, limits: ControllerLimits) -> ControllerLimits {
        ControllerLimits {
            dsm_range_bytes_max: 4 << 20,
            ..limits
        }
    }

    fn open_lease(&self, request: &HostLeaseRequest<'_>) -> Result<MemoryLease, HostLeaseError> {
        let store = self.executor.clone();
        let marks = store.uncorrectable.register_lease(request.parts);
        Ok(MemoryLease {
            executor: store,
            marks,
        })
    }
}

/// The blocks of a memory drive that belong to one lease.
#[derive(Debug)]
pub struct MemoryLease {
    executor: MemoryCommandExecutor,
    marks: LeaseMarkRegistration,
}

impl HostLease for MemoryLease {
    fn add_part(&self, part: BlockRange) -> Result<(), HostLeaseError> {
        self.marks.add(part);
        Ok(())
    }

    fn create_queue(&self, slots: u16) -> io::Result<HostQueuePair> {
        Ok(HostQueuePair::new(self.create_delayable_queue(slots)?))
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    fn restore_marks(&self, marks: &[BlockRange], ask: Box<dyn Fn() + Send + Sync>) {
        self.marks.restore(marks, ask);
    }

    fn store_marks(&self, store: &mut dyn FnMut(&[BlockRange]) -> io::Result<()>) {
        self.marks.store(store);
    }
}

impl StoreLease for MemoryLease {
    type Queue = SoftwareQueue<MemoryCommandExecutor>;

    fn create_delayable_queue(&self, slots: u16) -> io::Result<Self::Queue> {
        Ok(SoftwareQueue::new(self.executor.clone(), slots))
    }
}

/// Access of one queue to the blocks of a memory drive. All queues of the drive access them directly.
#[derive(Clone, Debug)]
pub struct MemoryCommandExecutor {
    blocks: Arc<Mapping>,
    /// True if the blocks are in a memory file.
    is_file: bool,
    lba_shift: u8,
    uncorrectable: Arc<UncorrectableBlocks>,
    /// Latest change of uncorrectable marks by the present command. It becomes `awaited_change` when the command's last step
    /// has succeeded.
    mark_change: Option<UncorrectableMarkChange>,
    /// Change of uncorrectable marks that the ledger must store before the present long command completes. Its other work is
    /// done.
    awaited_change: Option<UncorrectableMarkChange>,
}

impl MemoryCommandExecutor {
    pub(super) fn new(
        bytes: usize,
        lba_shift: u8,
        uncorrectable: Arc<UncorrectableBlocks>,
    ) -> io::Result<Self> {
        let blocks = Mapping::anonymous(bytes)?;
        Ok(Self::from_mapping(blocks, false, lba_shift, uncorrectable))
    }

    fn from_mapping(
        blocks: Mapping,
        is_file: bool,
        lba_shift: u8,
        uncorrectable: Arc<UncorrectableBlocks>,
    ) -> Self {
        blocks.advise_huge_pages();
        Self {
            blocks: Arc::new(blocks),
            is_file,
            lba_shift,
            uncorrectable,
            mark_change: None,
            awaited_change: None,
        }
    }

    /// Gives the memory of a range of bytes back to the host. The bytes then read as zeroes.
    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        let (offset, len) = (offset as usize, len as usize);
        match self.is_file {
            true => self.blocks.discard_file(offset, len),
            false => self.blocks.discard(offset, len),
        }
    }

    /// Returns the memory of `count` blocks from `slba` on. Fails if some of them do not exist.
    #[inline]
    fn bytes(&self, slba: Lba, count: u64) -> Result<RawBytes<'_>, Status> {
        let offset = slba.0 << self.lba_shift;
        self.blocks
            .bytes(offset as usize, (count << self.lba_shift) as usize)
            .ok_or(Status::LBA_OUT_OF_RANGE)
    }

    #[inline]
    fn check_readable(&self, slba: Lba, count: u64) -> Result<(), Status> {
        if !self.uncorrectable.is_empty() && self.uncorrectable.intersects(slba.0, count) {
            return Err(Status::UNRECOVERED_READ_ERROR);
        }
        Ok(())
    }

    #[inline]
    fn read(&self, sqe: &Sqe, memory: HostMemory<'_>) -> Result<(), Status> {
        let ReadWrite { slba, nlb_z, .. } = ReadWrite::from(sqe);
        let count = u64::from(nlb_z) + 1;
        self.check_readable(slba, count)?;
        let blocks = self.bytes(slba, count)?;
        let mut done = 0;
        DataPointer::from_sqe(sqe).for_each_piece(memory, blocks.len() as u64, |part| {
            if let Some(source) = blocks.slice(done, part.len()) {
                part.copy_from_bytes(source);
            }
            done += part.len();
        })
    }

    #[inline]
    fn write(&mut self, sqe: &Sqe, memory: HostMemory<'_>) -> Result<(), Status> {
        let ReadWrite { slba, nlb_z, .. } = ReadWrite::from(sqe);
        let count = u64::from(nlb_z) + 1;
        let blocks = self.bytes(slba, count)?;
        let mut done = 0;
        DataPointer::from_sqe(sqe).for_each_piece(memory, blocks.len() as u64, |part| {
            if let Some(target) = blocks.slice(done, part.len()) {
                target.copy_from_bytes(part);
            }
            done += part.len();
        })?;
        self.clear_marks(slba, count);
        Ok(())
    }

    /// Executes a Read whose data lies in one memory page. Returns `None` if [`Self::execute_any`] must execute the Read: its
    /// data lies elsewhere, or the Read fails.
    #[inline]
    fn read_page(&self, sqe: &Sqe, memory: HostMemory<'_>) -> Option<()> {
        let ReadWrite { slba, nlb_z, .. } = ReadWrite::from(sqe);
        let count = u64::from(nlb_z) + 1;
        self.check_readable(slba, count).ok()?;
        let blocks = self.bytes(slba, count).ok()?;
        let page = DataPointer::from_sqe(sqe).single_page_bytes(memory, blocks.len() as u64)?;
        page.copy_from_bytes(blocks);
        Some(())
    }

    /// Executes a Write whose data is in one memory page, to blocks without uncorrectable marks. Returns `None` if
    /// [`Self::execute_any`] must execute the Write.
    #[inline]
    fn write_page(&self, sqe: &Sqe, memory: HostMemory<'_>) -> Option<()> {
        let ReadWrite { slba, nlb_z, .. } = ReadWrite::from(sqe);
        let count = u64::from(nlb_z) + 1;
        let blocks = self.bytes(slba, count).ok()?;
        let page = DataPointer::from_sqe(sqe).single_page_bytes(memory, blocks.len() as u64)?;
        blocks.copy_from_bytes(page);
        Some(())
    }

    /// Executes a command of any kind, without the fast path for data in one page.
    #[inline(never)]
    fn execute_any(&mut self, sqe: &Sqe, memory: HostMemory<'_>) -> Status {
        let result = match NvmOpcode(sqe.opcode()) {
            NvmOpcode::READ => self.read(sqe, memory),
            NvmOpcode::WRITE => self.write(sqe, memory),
            // There is no cache that a Flush could write to memory, and memory does not outlive the process.
            NvmOpcode::FLUSH => Ok(()),
            NvmOpcode::COMPARE => self.compare(sqe, memory),
            NvmOpcode::VERIFY => self.verify(sqe),
            NvmOpcode::WRITE_ZEROES => self.write_zeroes(sqe),
            NvmOpcode::WRITE_UNCORRECTABLE => self.write_uncorrectable(sqe),
            NvmOpcode::DATASET_MANAGEMENT => self.dataset_management(sqe, memory),
            NvmOpcode::COPY => self.copy(sqe, memory),
            _ => Err(Status::INVALID_OPCODE),
        };
        result.err().unwrap_or(Status::SUCCESS)
    }

    fn compare(&self, sqe: &Sqe, memory: HostMemory<'_>) -> Result<(), Status> {
        let CompareVerify { slba, nlb_z, .. } = CompareVerify::from(sqe);
        let count = u64::from(nlb_z) + 1;
        self.check_readable(slba, count)?;
        let blocks = self.bytes(slba, count)?;
        let (mut done, mut equal) = (0, true);
        DataPointer::from_sqe(sqe).for_each_piece(memory, blocks.len() as u64, |part| {
            equal &= blocks
                .slice(done, part.len())
                .is_some_and(|source| source.equals(part));
            done += part.len();
        })?;
        if equal {
            Ok(())
        } else {
            Err(Status::COMPARE_FAILURE)
        }
    }

    fn verify(&self, sqe: &Sqe) -> Result<(), Status> {
        let CompareVerify { slba, nlb_z, .. } = CompareVerify::from(sqe);
        self.bytes(slba, u64::from(nlb_z) + 1)?;
        self.check_readable(slba, u64::from(nlb_z) + 1)
    }

    fn write_zeroes(&mut self, sqe: &Sqe) -> Result<(), Status> {
        let WriteZeroes {
            slba, nlb_z, deac, ..
        } = WriteZeroes::from(sqe);
        let count = u64::from(nlb_z) + 1;
        if deac {
            self.deallocate(slba, count)?;
        } else {
            self.bytes(slba, count)?.zero();
        }
        self.clear_marks(slba, count);
        Ok(())
    }

    /// Clears the uncorrectable marks of blocks that the present command has written.
    #[inline]
    fn clear_marks(&mut self, slba: Lba, count: u64) {
        if let Some(change) = self.uncorrectable.clear(slba.0, count) {
            self.mark_change = Some(change);
        }
    }

    fn write_uncorrectable(&mut self, sqe: &Sqe) -> Result<(), Status> {
        let WriteUncorrectable { slba, nlb_z } = WriteUncorrectable::from(sqe);
        let count = u64::from(nlb_z) + 1;
        self.bytes(slba, count)?;
        let change = self.uncorrectable.mark(slba.0, count);
        self.mark_change = Some(change.ok_or(Status::INTERNAL_ERROR)?);
        Ok(())
    }

    /// Gives the memory of the whole 64 KiB pages in a range of blocks back to the host, and zeroes the other blocks of the
    /// range.
    fn deallocate(&self, slba: Lba, count: u64) -> Result<(), Status> {
        const PAGE: u64 = 64 << 10;
        let bytes = self.bytes(slba, count)?;
        #[cfg(simulation)]
        memory::simulation::costs::deallocates(bytes.len() as u64);
        let start = slba.0 << self.lba_shift;
        let end = start + bytes.len() as u64;
        let (first, last) = (start.next_multiple_of(PAGE), end / PAGE * PAGE);
        if first >= last || self.discard(first, last - first).is_err() {
            bytes.zero();
            return Ok(());
        }
        let edge = |from: u64, to: u64| {
            if let Some(edge) = self.blocks.bytes(from as usize, (to - from) as usize) {
                edge.zero();
            }
        };
        edge(start, first);
        edge(last, end);
        Ok(())
    }

    /// Deallocates the range with a given number in a Dataset Management command. Returns the range's number of blocks; `None`
    /// if the command has no such range.
    fn deallocate_range(
        &mut self,
        sqe: &Sqe,
        memory: HostMemory<'_>,
        index: usize,
    ) -> Result<Option<u64>, Status> {
        let DatasetManagement { nr_z, ad, .. } = DatasetManagement::from(sqe);
        if !ad || index > usize::from(nr_z) {
            return Ok(None);
        }
        let DsmRange { slba, nlb, .. } = range_descriptor(sqe, memory, index)?;
        if nlb != 0 {
            self.deallocate(slba, u64::from(nlb))?;
            self.clear_marks(slba, u64::from(nlb));
        }
        Ok(Some(u64::from(nlb)))
    }

    fn dataset_management(&mut self, sqe: &Sqe, memory: HostMemory<'_>) -> Result<(), Status> {
        let mut ranges = 0..;
        while let Some(index) = ranges.next()
            && self.deallocate_range(sqe, memory, index)?.is_some()
        {}
        Ok(())
    }

    /// Copies the source ranges in order. A source range that overlaps the destination may have been overwritten by then: the
    /// specification leaves the result undefined.
    fn copy(&mut self, sqe: &Sqe, memory: HostMemory<'_>) -> Result<(), Status> {
        let CopyCommand { sdlba, nr_z, .. } = CopyCommand::from(sqe);
        for index in 0..=usize::from(nr_z) {
            let CopyRange0 { slba, nlb_z, .. } = range_descriptor(sqe, memory, index)?;
            self.check_readable(slba, u64::from(nlb_z) + 1)?;
        }
        let mut target = sdlba;
        for index in 0..=usize::from(nr_z) {
            let CopyRange0 { slba, nlb_z, .. } = range_descriptor(sqe, memory, index)?;
            let count = u64::from(nlb_z) + 1;
            self.bytes(target, count)?
                .copy_from_bytes(self.bytes(slba, count)?);
            self.clear_marks(target, count);
            target = target.checked_add(count).ok_or(Status::LBA_OUT_OF_RANGE)?;
        }
        Ok(())
    }
}

impl CommandExecutor for MemoryCommandExecutor {
    const HAS_LONG_COMMANDS: bool = true;

    /// Treats all commands except Flush, Write and Read as long. These three have the lowest opcodes.
    #[inline]
    fn is_long(sqe: &Sqe) -> bool {
        NvmOpcode(sqe.opcode()) > NvmOpcode::READ
    }

    /// Makes a Write to marked blocks wait until the ledger has removed the marks.
    #[inline]
    fn needs_wait(&self, sqe: &Sqe) -> bool {
        let is_write = NvmOpcode(sqe.opcode()) == NvmOpcode::WRITE;
        is_write && !self.uncorrectable.is_empty() && self.has_marks(sqe)
    }

    fn execute_step(&mut self, sqe: &Sqe, memory: HostMemory<'_>, steps: usize) -> ExecutionStep {
        if let Some(change) = self.awaited_change {
            return self.await_mark_change(change);
        }
        let step = self.execute_data_step(sqe, memory, steps);
        if step.status.is_some() {
            let change = self.mark_change.take();
            self.awaited_change = change.filter(|_| step.status == Some(Status::SUCCESS));
        }
        match self.awaited_change {
            None => step,
            Some(_) => ExecutionStep {
                status: None,
                ..step
            },
        }
    }

    #[inline]
    fn execute(&mut self, sqe: &Sqe, memory: HostMemory<'_>) -> Status {
        // Fast path, which most commands take: they move data within one page.
        let moved = match NvmOpcode(sqe.opcode()) {
            NvmOpcode::READ => self.read_page(sqe, memory),
            NvmOpcode::WRITE => self.write_page(sqe, memory),
            _ => None,
        };
        match moved {
            Some(()) => Status::SUCCESS,
            None => self.execute_any(sqe, memory),
        }
    }

    #[inline]
    fn prefetch(&self, sqe: &Sqe) {
        if NvmOpcode(sqe.opcode()) == NvmOpcode::READ {
            let command = ReadWrite::from(sqe);
            if let Ok(bytes) = self.bytes(command.slba, u64::from(command.nlb_z) + 1) {
                bytes.prefetch();
            }
        }
    }
}

impl MemoryCommandExecutor {
    /// Returns whether a Write goes to blocks with uncorrectable marks.
    #[cold]
    fn has_marks(&self, sqe: &Sqe) -> bool {
        let ReadWrite { slba, nlb_z, .. } = ReadWrite::from(sqe);
        self.uncorrectable.needs_clear(slba.0, u64::from(nlb_z) + 1)
    }

    /// Completes the command if the ledger has stored its change of uncorrectable marks. If not, ends the queue's turn, and the
    /// command checks again in the queue's next turn.
    fn await_mark_change(&mut self, change: UncorrectableMarkChange) -> ExecutionStep {
        let end = self.uncorrectable.change_result(change);
        if end.is_some() {
            self.awaited_change = None;
        }
        ExecutionStep {
            bytes: TURN_BYTES,
            status: end.map(|end| match end {
                Ok(()) => Status::SUCCESS,
                Err(()) => Status::INTERNAL_ERROR,
            }),
        }
    }

    /// Executes the next step of a long command that moves or zeroes data. The wait for a change of uncorrectable marks follows
    /// the last of these steps.
    fn execute_data_step(
        &mut self,
        sqe: &Sqe,
        memory: HostMemory<'_>,
        steps: usize,
    ) -> ExecutionStep {
        let lba_shift = self.lba_shift;
        let whole = |status, blocks: u64| ExecutionStep {
            bytes: blocks << lba_shift,
            status: Some(status),
        };
        match NvmOpcode(sqe.opcode()) {
            NvmOpcode::DATASET_MANAGEMENT => match self.deallocate_range(sqe, memory, steps) {
                Ok(Some(blocks)) => ExecutionStep {
                    bytes: (blocks << self.lba_shift) / DISCARD_SPEED,
                    status: None,
                },
                Ok(None) => whole(Status::SUCCESS, 0),
                Err(status) => whole(status, 0),
            },
            NvmOpcode::COPY => ExecutionStep {
                bytes: TURN_BYTES,
                status: Some(self.execute(sqe, memory)),
            },
            // All other commands that get here have NLB where Read and Write have it.
            _ => {
                let blocks = u64::from(ReadWrite::from(sqe).nlb_z) + 1;
                whole(self.execute_any(sqe, memory), blocks)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    use nvme_guest::dma::RegionTable;
    use nvme_guest::iova::IovaSpace;
    use nvme_models::{DriveModel, DriveProfile, TimedQueue};
    use nvme_mpt::host::{HostBatch, HostCompletion, HostQueue, ListMemory};
    use nvme_mpt_memory::clock::Ticks;
    use nvme_mpt_memory::host_page_size;
    use nvme_spec::ids::CommandId;
    use zerocopy::IntoBytes;

    const SLOTS: u16 = 64;
    const MIB: u64 = 1 << 20;

    /// Returns, for each page of a store, whether the page is in memory: bit 63 of its entry (proc_pid_pagemap(5)).
    fn is_resident(store: &MemoryCommandExecutor) -> bool {
        let pagemap = File::open("/proc/self/pagemap").unwrap();
        let bytes = store.blocks.bytes(0, store.blocks.len()).unwrap();
        let pages = (0..store.blocks.len()).step_by(host_page_size());
        pages.into_iter().all(|offset| {
            let page = (bytes.as_ptr() as usize + offset) / host_page_size();
            let mut entry = [0; 8];
            pagemap.read_exact_at(&mut entry, 8 * page as u64).unwrap();
            u64::from_le_bytes(entry) >> 63 == 1
        })
    }

    #[test]
    fn memory_is_allocated_at_once_on_request() {
        for (allocation, taken) in [
            (MemoryAllocationTime::AsWritten, false),
            (MemoryAllocationTime::AtOnce, true),
        ] {
            let store = MemoryBackingStore::new(4 * MIB, 9, allocation).unwrap();
            assert_eq!(is_resident(&store.executor), taken, "{allocation}");

            let file = memory::memfd(c"test", 4 * MIB).unwrap();
            let content = File::from(file.try_clone().unwrap());
            content.write_all_at(&[7], MIB).unwrap();
            // The second call is that of a successor, which finds the memory allocated.
            for _ in 0..2 {
                MemoryBackingStore::from_file(&file, 4 * MIB, 9, allocation).unwrap();
                let bytes = content.metadata().unwrap().blocks() * STAT_BLOCK_BYTES;
                assert_eq!(bytes == 4 * MIB, taken, "{allocation}: {bytes}");
            }
            let mut read = [0; 2];
            content.read_exact_at(&mut read, MIB).unwrap();
            assert_eq!(read, [7, 0]);
        }
    }

    #[test]
    fn a_host_is_not_asked_for_more_memory_than_it_has() {
        const PIB: u64 = 1 << 50;
        let error = MemoryBackingStore::new(PIB, 9, MemoryAllocationTime::AtOnce).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::OutOfMemory);
        assert!(error.to_string().contains("available"), "{error}");
        let file = memory::memfd(c"test", PIB).unwrap();
        let error =
            MemoryBackingStore::from_file(&file, PIB, 9, MemoryAllocationTime::AtOnce).unwrap_err();
        assert!(error.to_string().contains("available"), "{error}");
        let limit = |used| ControlGroupLimit {
            file: "/sys/fs/cgroup/a/memory.max".into(),
            limit: 1000,
            used,
        };
        let refused = check_limit(600, Some(limit(401))).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::OutOfMemory);
        for part in ["needs 600 bytes", "has 599 available", "memory.max is 1000"] {
            assert!(refused.to_string().contains(part), "{refused}");
        }
        check_limit(600, Some(limit(400))).unwrap();
        check_limit(u64::MAX, None).unwrap();
    }

    struct MemoryTestDrive {
        queue: SoftwareQueue<MemoryCommandExecutor>,
        table: RegionTable,
        lists: ListMemory,
    }

    impl MemoryTestDrive {
        fn new(bytes: u64) -> Self {
            let store = MemoryCommandExecutor::new(bytes as usize, 9, Arc::default()).unwrap();
            let space = Arc::new(IovaSpace::software());
            Self {
                queue: SoftwareQueue::new(store, SLOTS),
                table: RegionTable::default(),
                lists: ListMemory::new(&space, SLOTS.into()).unwrap(),
            }
        }

        fn ring(&mut self, slot: u16, mut sqe: Sqe) {
            sqe.set_cid(CommandId(slot));
            let memory = HostMemory {
                table: &self.table,
                lists: &self.lists,
            };
            let mut batch = self.queue.batch();
            batch.submit(&sqe);
            batch.ring(memory);
        }

        /// Returns slots and statuses of the completions that a poller takes in one pass.
        fn reap(&mut self) -> Vec<(u16, Status)> {
            let memory = HostMemory {
                table: &self.table,
                lists: &self.lists,
            };
            let mut done = Vec::new();
            self.queue.reap(memory, |completion: HostCompletion| {
                done.push((completion.slot, completion.status));
            });
            done
        }

        fn zeroes(&mut self, slot: u16, mib: u64) {
            let mut sqe = Sqe::new(NvmOpcode::WRITE_ZEROES.0);
            let zeroes = WriteZeroes {
                slba: Lba(mib * MIB / 512),
                nlb_z: (MIB / 512 - 1) as u16,
                ..WriteZeroes::default()
            };
            zeroes.write_to(&mut sqe);
            self.ring(slot, sqe);
        }

        fn deallocate(&mut self, slot: u16, ranges: &[DsmRange]) {
            let sqe = self.deallocation(slot, ranges);
            self.ring(slot, sqe);
        }

        fn deallocation(&mut self, slot: u16, ranges: &[DsmRange]) -> Sqe {
            let (list, iova) = self.lists.slot_list(slot);
            let list = list.as_mut_bytes();
            list[..size_of_val(ranges)].copy_from_slice(ranges.as_bytes());
            let mut sqe = Sqe::new(NvmOpcode::DATASET_MANAGEMENT.0);
            let command = DatasetManagement {
                nr_z: (ranges.len() - 1) as u8,
                ad: true,
                ..DatasetManagement::default()
            };
            command.write_to(&mut sqe);
            sqe.dptr[0] = iova.bits();
            sqe.set_cid(CommandId(slot));
            sqe
        }
    }

    #[test]
    fn zeroes_are_written_in_turn_with_other_commands() {
        let mut drive = MemoryTestDrive::new(64 * MIB);
        for slot in 0..8 {
            drive.zeroes(slot, slot.into());
        }
        assert_eq!(drive.reap(), [(0, Status::SUCCESS)]);
        drive.ring(8, Sqe::new(NvmOpcode::FLUSH.0));
        let passes: Vec<_> = (1..8).map(|_| drive.reap()).collect();
        assert_eq!(passes[0], [(8, Status::SUCCESS), (1, Status::SUCCESS)]);
        assert_eq!(passes[6], [(7, Status::SUCCESS)]);
        assert!(!drive.queue.has_deferred_commands());
    }

    #[test]
    fn ranges_are_deallocated_in_turn_with_other_commands() {
        let mut drive = MemoryTestDrive::new(64 * MIB);
        let range = DsmRange {
            slba: Lba(0),
            nlb: (32 * MIB / 512) as u32,
            ..DsmRange::default()
        };
        let blocks = drive.queue.executor.blocks.clone();
        let last = blocks.bytes(32 * MIB as usize - 8, 8).unwrap();
        last.copy_from(&[1; 8]);
        drive.deallocate(0, &[range; 16]);
        for pass in 0..16 {
            assert_eq!(drive.reap(), [], "pass {pass}");
            assert!(drive.queue.has_deferred_commands());
            assert_eq!(drive.queue.next_due(), Some(Ticks(0)));
        }
        assert_eq!(drive.reap(), [(0, Status::SUCCESS)]);
        let mut read = [1; 8];
        last.copy_to(&mut read);
        assert_eq!(read, [0; 8]);
    }

    #[test]
    fn a_drive_that_keeps_time_deallocates_in_turn_too() {
        const PROFILE: &str = r#"
            model = "nvm"
            units = 2
            stripe = "4K"
            read = { latency = "10us", bandwidth = "1G" }
            write = { latency = "20us", bandwidth = "1G" }
        "#;
        let profile = DriveProfile::parse("test", PROFILE).unwrap();
        let model = DriveModel::new(&profile, 64 * MIB / 512, 9).unwrap();
        let mut drive = MemoryTestDrive::new(64 * MIB);
        let ranges = [0, 32].map(|mib| DsmRange {
            slba: Lba(mib * MIB / 512),
            nlb: (32 * MIB / 512) as u32,
            ..DsmRange::default()
        });
        let blocks = drive.queue.executor.blocks.clone();
        let last = blocks.bytes(64 * MIB as usize - 8, 8).unwrap();
        last.copy_from(&[1; 8]);
        let sqe = drive.deallocation(0, &ranges);
        let store = SoftwareQueue::new(drive.queue.executor.clone(), SLOTS);
        let mut queue = HostQueuePair::new(TimedQueue::new(store, Arc::new(model), SLOTS));
        let memory = HostMemory {
            table: &drive.table,
            lists: &drive.lists,
        };
        queue.submit_batch(&[sqe], memory);
        let mut read = [0; 8];
        last.copy_to(&mut read);
        assert_eq!(read, [1; 8], "its turn has not come");
        let mut done = Vec::new();
        while done.is_empty() {
            queue.reap_into(memory, &mut done);
        }
        assert_eq!((done[0].slot, done[0].status), (0, Status::SUCCESS));
        last.copy_to(&mut read);
        assert_eq!(read, [0; 8]);
    }

    #[test]
    fn a_queue_that_is_cut_short_begins_no_further_step() {
        let mut drive = MemoryTestDrive::new(64 * MIB);
        drive.zeroes(0, 0);
        drive.zeroes(1, 1);
        assert_eq!(drive.reap(), [(0, Status::SUCCESS)]);
        drive.queue.cut_short();
        assert_eq!(drive.reap(), [(1, Status::ABORTED_SQ_DELETION)]);
    }
}
