//! One queue of a file drive: each command is a few requests to the kernel, one after the other.
#![expect(unsafe_code, reason = "promises the kernel that memory stays")]

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use log::error;

use super::lease::{self, Witness};
use super::uring::{Request, Uring, Vectors};
use super::{LeasedFile, SharedFile};
use crate::clock::Ticks;
use crate::host::data::DataPointer;
use crate::host::software::memory::range;
use crate::host::software::model::TimedStore;
use crate::host::{CompletionTaker, HostBatch, HostCompletion, HostMemory, HostQueue};
use crate::memory::{Mapping, RawBytes};
use crate::spec::ids::{CommandId, Lba};
use crate::spec::nvm::{
    CompareVerify, CopyCommand, CopyRange0, DatasetManagement, DsmRange, ReadWrite,
    WriteUncorrectable, WriteZeroes,
};
use crate::spec::opcode::NvmOpcode;
use crate::spec::sqe::Sqe;
use crate::spec::status::Status;

/// Commands at once that need data in memory of our own: Compare, Verify, Copy, and Write Zeroes
/// on a file system that cannot do it. Others of their kind wait.
const BOUNCES: usize = 4;

/// Length of such memory: the most that one command moves.
const BOUNCE_BYTES: usize = 1 << 20;

/// What a command does next, once its request is done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Next {
    /// Nothing: it is complete.
    #[default]
    Done,
    /// The rest of a transfer that the kernel did in part.
    ReadInto,
    WriteFrom,
    /// Make durable what was written.
    Sync,
    /// The same of the file that is to be as durable, if there is one.
    SyncCompanion,
    /// The file system zeroed a range, if it can do that.
    Zeroed,
    /// Compare what was read with the guest's data.
    Compare,
    /// Read the next range to copy, or write what was read.
    CopyRange,
    /// Deallocate the next range.
    Range,
}

/// A command in progress.
#[derive(Debug, Default)]
struct Operation {
    sqe: Sqe,
    next: Next,
    /// Where after a transfer is done.
    then: Next,
    /// Next byte of the file that a transfer is to read or write.
    offset: u64,
    vectors: Vectors,
    bounce: Option<Mapping>,
    /// Ranges that were dealt with, and bytes of theirs.
    ranges: usize,
    bytes: usize,
}

/// A queue pair of a file drive.
#[derive(Debug)]
pub struct FileQueue {
    /// Dropped first: it waits for the kernel, which uses the operations' memory until then.
    uring: Uring,
    operations: Box<[Operation]>,
    file: Arc<SharedFile>,
    lease: Arc<LeasedFile>,
    witness: Witness,
    /// The file's size was looked at since the last batch.
    looked: bool,
    /// Commands that were submitted and not started, or wait for a bounce.
    waiting: VecDeque<Sqe>,
    /// Those of them, at the end, that were submitted and not rung in.
    arriving: usize,
    bounces: Vec<Mapping>,
    bounces_made: usize,
    completed: Vec<HostCompletion>,
    completing: Vec<HostCompletion>,
    /// No further request is made.
    cut_short: bool,
}

/// What became of a step of a command.
enum Step {
    /// A request is on its way.
    Requested,
    /// The command is complete.
    Complete(Status),
    /// It has to wait until another gives its bounce back.
    Wait,
}

impl FileQueue {
    pub(in crate::host::software) fn new(lease: &Arc<LeasedFile>, slots: u16) -> io::Result<Self> {
        let room = usize::from(slots);
        // Each command has one request at a time, so the ring has room for all.
        let uring = Uring::new(u32::from(slots).next_power_of_two())?;
        Ok(Self {
            uring,
            operations: std::iter::repeat_with(Operation::default)
                .take(room)
                .collect(),
            file: lease.shared.clone(),
            lease: lease.clone(),
            witness: lease.open_witness()?,
            looked: false,
            waiting: VecDeque::with_capacity(room),
            arriving: 0,
            bounces: Vec::with_capacity(BOUNCES),
            bounces_made: 0,
            completed: Vec::with_capacity(room),
            completing: Vec::with_capacity(room),
            cut_short: false,
        })
    }

    /// Starts commands in order, as far as there is memory of our own for them.
    fn start_waiting(&mut self, memory: HostMemory<'_>) {
        for _ in 0..self.waiting.len() {
            let Some(sqe) = self.waiting.pop_front() else {
                return;
            };
            let slot = sqe.cid();
            match self.start(&sqe, memory).unwrap_or_else(Step::Complete) {
                Step::Requested => {}
                Step::Complete(status) => self.complete(slot, status),
                Step::Wait => self.waiting.push_back(sqe),
            }
        }
    }

    fn complete(&mut self, slot: CommandId, status: Status) {
        if let Some(operation) = self.operations.get_mut(usize::from(slot.0))
            && let Some(bounce) = operation.bounce.take()
        {
            self.bounces.push(bounce);
        }
        self.completed.push(HostCompletion {
            slot: slot.0,
            status,
            dw0: 0,
        });
    }

    fn start(&mut self, sqe: &Sqe, memory: HostMemory<'_>) -> Result<Step, Status> {
        let opcode = NvmOpcode(sqe.opcode());
        self.lease.check(opcode)?;
        let needs_bounce = matches!(
            opcode,
            NvmOpcode::COMPARE | NvmOpcode::VERIFY | NvmOpcode::COPY
        );
        if needs_bounce && !self.can_bounce() {
            return Ok(Step::Wait);
        }
        let bounce = if needs_bounce {
            Some(self.take_bounce()?)
        } else {
            None
        };
        let operation = self
            .operations
            .get_mut(usize::from(sqe.cid().0))
            .ok_or(Status::INTERNAL_ERROR)?;
        operation.sqe = *sqe;
        operation.bounce = bounce;
        operation.vectors.clear();
        (operation.ranges, operation.bytes) = (0, 0);
        let uncorrectable = &self.file.uncorrectable;
        let shift = self.file.lba_shift;
        match opcode {
            NvmOpcode::READ | NvmOpcode::WRITE => {
                let ReadWrite {
                    slba, nlb_z, fua, ..
                } = ReadWrite::from(sqe);
                let count = u64::from(nlb_z) + 1;
                let reads = opcode == NvmOpcode::READ;
                if reads && uncorrectable.intersects(slba.0, count) {
                    return Err(Status::UNRECOVERED_READ_ERROR);
                }
                operation.offset = slba.0 << shift;
                let Operation { vectors, .. } = operation;
                DataPointer::of(sqe).for_each(memory, count << shift, |part| vectors.push(part))?;
                operation.next = if reads {
                    Next::ReadInto
                } else {
                    Next::WriteFrom
                };
                operation.then = match fua && !reads {
                    true => Next::SyncCompanion,
                    false => Next::Done,
                };
            }
            NvmOpcode::FLUSH => operation.next = Next::Sync,
            NvmOpcode::COMPARE | NvmOpcode::VERIFY => {
                let CompareVerify { slba, nlb_z, .. } = CompareVerify::from(sqe);
                let count = u64::from(nlb_z) + 1;
                if uncorrectable.intersects(slba.0, count) {
                    return Err(Status::UNRECOVERED_READ_ERROR);
                }
                operation.offset = slba.0 << shift;
                operation.push_bounce(0, (count << shift) as usize)?;
                operation.next = Next::ReadInto;
                operation.then = if opcode == NvmOpcode::COMPARE {
                    Next::Compare
                } else {
                    Next::Done
                };
            }
            NvmOpcode::WRITE_ZEROES => return self.start_write_zeroes(sqe),
            NvmOpcode::WRITE_UNCORRECTABLE => {
                let WriteUncorrectable { slba, nlb_z } = WriteUncorrectable::from(sqe);
                let marked = uncorrectable.mark(slba.0, u64::from(nlb_z) + 1);
                return Ok(Step::Complete(if marked {
                    Status::SUCCESS
                } else {
                    Status::INTERNAL_ERROR
                }));
            }
            NvmOpcode::DATASET_MANAGEMENT => {
                let deallocates = DatasetManagement::from(sqe).ad && self.file.punches_holes;
                operation.next = if deallocates { Next::Range } else { Next::Done };
            }
            NvmOpcode::COPY => operation.next = Next::CopyRange,
            _ => return Err(Status::INVALID_OPCODE),
        }
        self.go_on(sqe.cid(), memory)
    }

    fn start_write_zeroes(&mut self, sqe: &Sqe) -> Result<Step, Status> {
        let WriteZeroes {
            slba, nlb_z, deac, ..
        } = WriteZeroes::from(sqe);
        let shift = self.file.lba_shift;
        let (offset, len) = (slba.0 << shift, (u64::from(nlb_z) + 1) << shift);
        look(&mut self.looked, &self.file, Next::WriteFrom);
        if !self.file.watched.has(offset + len) {
            return Err(failure(libc::EIO, Next::WriteFrom));
        }
        let fd = self.lease.buffered.as_raw_fd();
        let request = if deac && self.file.punches_holes {
            Request::Punch { fd, offset, len }
        } else {
            Request::Zero { fd, offset, len }
        };
        let slot = usize::from(sqe.cid().0);
        let operation = self
            .operations
            .get_mut(slot)
            .ok_or(Status::INTERNAL_ERROR)?;
        (operation.offset, operation.next) = (offset, Next::Zeroed);
        prepare(&mut self.uring, sqe.cid(), request)
    }

    /// Makes the next request of a command, or completes it.
    fn go_on(&mut self, slot: CommandId, memory: HostMemory<'_>) -> Result<Step, Status> {
        let index = usize::from(slot.0);
        let file = self.file.clone();
        let operation = self
            .operations
            .get_mut(index)
            .ok_or(Status::INTERNAL_ERROR)?;
        let sqe = operation.sqe;
        if self.cut_short && !matches!(operation.next, Next::Done | Next::Compare) {
            return Err(Status::ABORTED_SQ_DELETION);
        }
        let fd = self.lease.buffered.as_raw_fd();
        match operation.next {
            Next::Done => {
                let status = operation.finish(&file);
                if NvmOpcode(sqe.opcode()) == NvmOpcode::FLUSH {
                    self.end_flush()?;
                }
                Ok(Step::Complete(status))
            }
            Next::ReadInto | Next::WriteFrom => {
                let offset = operation.offset;
                let end = offset + operation.vectors.len() as u64;
                look(&mut self.looked, &file, operation.next);
                if !file.watched.has(end) {
                    return Err(failure(libc::EIO, operation.next));
                }
                let fd = self.lease.descriptor(offset, operation.vectors.parts());
                // Copy and Write Zeroes write too; all three have FUA in the same place.
                let durable = ReadWrite::from(&sqe).fua;
                let vectors = &operation.vectors;
                let request = match operation.next {
                    Next::ReadInto => Request::Read {
                        fd,
                        offset,
                        into: vectors,
                    },
                    _ => Request::Write {
                        fd,
                        offset,
                        from: vectors,
                        durable,
                    },
                };
                prepare(&mut self.uring, slot, request)
            }
            Next::Sync => {
                operation.next = Next::SyncCompanion;
                prepare(&mut self.uring, slot, Request::Sync { fd })
            }
            Next::SyncCompanion => {
                operation.next = Next::Done;
                match &self.lease.companion {
                    Some(companion) => {
                        let fd = companion.as_raw_fd();
                        prepare(&mut self.uring, slot, Request::Sync { fd })
                    }
                    None => self.go_on(slot, memory),
                }
            }
            Next::Zeroed => {
                operation.next = if WriteZeroes::from(&sqe).fua {
                    Next::Sync
                } else {
                    Next::Done
                };
                self.go_on(slot, memory)
            }
            Next::Compare => {
                let equal = operation.equals_bounce(file.lba_shift, memory)?;
                Ok(Step::Complete(if equal {
                    Status::SUCCESS
                } else {
                    Status::COMPARE_FAILURE
                }))
            }
            Next::CopyRange => {
                let CopyCommand { sdlba, nr_z, .. } = CopyCommand::from(&sqe);
                operation.vectors.clear();
                if operation.ranges > usize::from(nr_z) {
                    operation.offset = sdlba.0 << file.lba_shift;
                    operation.push_bounce(0, operation.bytes)?;
                    (operation.next, operation.then) = (Next::WriteFrom, Next::Done);
                    return self.go_on(slot, memory);
                }
                let range: CopyRange0 = range(&sqe, memory, operation.ranges)?;
                let count = u64::from(range.nlb_z) + 1;
                if file.uncorrectable.intersects(range.slba.0, count) {
                    return Err(Status::UNRECOVERED_READ_ERROR);
                }
                let len = (count << file.lba_shift) as usize;
                operation.push_bounce(operation.bytes, len)?;
                operation.offset = range.slba.0 << file.lba_shift;
                operation.ranges += 1;
                operation.bytes += len;
                (operation.next, operation.then) = (Next::ReadInto, Next::CopyRange);
                self.go_on(slot, memory)
            }
            Next::Range => {
                let DatasetManagement { nr_z, .. } = DatasetManagement::from(&sqe);
                while operation.ranges <= usize::from(nr_z) {
                    let range: DsmRange = range(&sqe, memory, operation.ranges)?;
                    operation.ranges += 1;
                    let count = u64::from(range.nlb);
                    if count != 0 {
                        file.uncorrectable.clear(range.slba.0, count);
                        let offset = range.slba.0 << file.lba_shift;
                        let len = count << file.lba_shift;
                        return prepare(&mut self.uring, slot, Request::Punch { fd, offset, len });
                    }
                }
                Ok(Step::Complete(Status::SUCCESS))
            }
        }
    }

    /// A request of the kernel has ended.
    fn ended(
        &mut self,
        slot: CommandId,
        result: Result<usize, i32>,
        memory: HostMemory<'_>,
    ) -> Result<Step, Status> {
        let index = usize::from(slot.0);
        let operation = self
            .operations
            .get_mut(index)
            .ok_or(Status::INTERNAL_ERROR)?;
        let next = operation.next;
        let result = match next {
            Next::SyncCompanion | Next::Done => lease::synced(result),
            _ => result,
        };
        let done = match (result, next) {
            (Ok(done), _) => done,
            // The kernel could not start it, or was interrupted: it is asked again.
            (Err(libc::EAGAIN | libc::EINTR), Next::ReadInto | Next::WriteFrom) => 0,
            (Err(libc::EOPNOTSUPP | libc::EINVAL), Next::Zeroed) => {
                return self.zero_by_hand(slot, memory);
            }
            // It did not run, or not to its end, so nothing is known of what was written.
            (Err(libc::EAGAIN | libc::EINTR | libc::ECANCELED), _) => {
                return Err(failure(libc::EAGAIN, next));
            }
            // What is next after a sync, of the file or its companion.
            (Err(errno), Next::SyncCompanion | Next::Done) => {
                let cause = io::Error::from_raw_os_error(errno);
                return Err(self.lease.lose_writes(&cause));
            }
            (Err(errno), _) => {
                // RWF_DSYNC reports by the same error that another write's write-back failed.
                if next == Next::WriteFrom && ReadWrite::from(&operation.sqe).fua {
                    self.lease.ask(&self.witness)?;
                }
                return Err(failure(errno, next));
            }
        };
        if matches!(next, Next::ReadInto | Next::WriteFrom) {
            if done == 0 && result.is_ok() {
                // The file ends before the drive does: somebody cut it short.
                self.file.look_at_size();
                return Err(failure(libc::EIO, next));
            }
            operation.offset += done as u64;
            operation.vectors.advance(done);
            if operation.vectors.len() == 0 {
                operation.next = operation.then;
            }
        }
        self.go_on(slot, memory)
    }

    /// Fails a Flush whose error the kernel told to another one, of this queue or of another.
    fn end_flush(&self) -> Result<(), Status> {
        self.lease.ask(&self.witness)?;
        self.file.look_at_size();
        self.lease.check(NvmOpcode::FLUSH)
    }

    /// Writes zeroes, because the file system cannot zero a range by itself.
    fn zero_by_hand(&mut self, slot: CommandId, memory: HostMemory<'_>) -> Result<Step, Status> {
        let bounce = self.take_bounce()?;
        let len = {
            let operation = &mut self.operations[usize::from(slot.0)];
            let WriteZeroes { nlb_z, .. } = WriteZeroes::from(&operation.sqe);
            ((u64::from(nlb_z) + 1) << self.file.lba_shift) as usize
        };
        let operation = &mut self.operations[usize::from(slot.0)];
        bounce.bytes(0, len).ok_or(Status::INTERNAL_ERROR)?.zero();
        operation.bounce = Some(bounce);
        operation.vectors.clear();
        operation.push_bounce(0, len)?;
        (operation.next, operation.then) = (Next::WriteFrom, Next::Done);
        self.go_on(slot, memory)
    }

    fn can_bounce(&self) -> bool {
        !self.bounces.is_empty() || self.bounces_made < BOUNCES
    }

    fn take_bounce(&mut self) -> Result<Mapping, Status> {
        if let Some(bounce) = self.bounces.pop() {
            return Ok(bounce);
        }
        let bounce = Mapping::anonymous(BOUNCE_BYTES).map_err(|error| {
            error!("No memory for a Compare, Verify or Copy command: {error}");
            Status::INTERNAL_ERROR
        })?;
        self.bounces_made += 1;
        Ok(bounce)
    }
}

/// Looks at the file's size ahead of the first write of a batch: none may make a file longer that was cut short.
#[inline]
fn look(looked: &mut bool, file: &SharedFile, step: Next) {
    if step == Next::WriteFrom && !std::mem::replace(looked, true) {
        file.look_at_size();
    }
}

/// Asks the kernel for the next step of a command.
fn prepare(uring: &mut Uring, slot: CommandId, request: Request<'_>) -> Result<Step, Status> {
    // SAFETY: the vectors are those of the slot's operation, which changes them only after the
    // request has ended, as a slot has one request at a time. The memory they name is a bounce of
    // that operation, or the guest's, which a shadow queue keeps mapped while the command is in
    // flight and beyond the end of this queue, whose `Uring` waits for all requests when dropped.
    unsafe { uring.prepare(u64::from(slot.0), request) }.map_err(|error| {
        error!("A request to the kernel could not be made: {error}");
        Status::INTERNAL_ERROR
    })?;
    Ok(Step::Requested)
}

impl Operation {
    fn push_bounce(&mut self, offset: usize, len: usize) -> Result<(), Status> {
        let bytes = self
            .bounce
            .as_ref()
            .and_then(|bounce| bounce.bytes(offset, len));
        self.vectors.push(bytes.ok_or(Status::INTERNAL_ERROR)?);
        Ok(())
    }

    /// Whether what was read is what the guest has.
    fn equals_bounce(&self, lba_shift: u8, memory: HostMemory<'_>) -> Result<bool, Status> {
        let bounce = self.bounce.as_ref().ok_or(Status::INTERNAL_ERROR)?;
        let (mut done, mut equal) = (0, true);
        let len = (u64::from(CompareVerify::from(&self.sqe).nlb_z) + 1) << lba_shift;
        DataPointer::of(&self.sqe).for_each(memory, len, |part: RawBytes<'_>| {
            equal &= bounce
                .bytes(done, part.len())
                .is_some_and(|read| read.equals(part));
            done += part.len();
        })?;
        Ok(equal)
    }

    /// What a command ends with when all its requests succeeded.
    fn finish(&self, file: &SharedFile) -> Status {
        let written = match NvmOpcode(self.sqe.opcode()) {
            NvmOpcode::WRITE | NvmOpcode::WRITE_ZEROES => {
                let ReadWrite { slba, nlb_z, .. } = ReadWrite::from(&self.sqe);
                Some((slba, u64::from(nlb_z) + 1))
            }
            NvmOpcode::COPY => {
                let CopyCommand { sdlba, .. } = CopyCommand::from(&self.sqe);
                Some((sdlba, self.bytes as u64 >> file.lba_shift))
            }
            _ => None,
        };
        if let Some((Lba(start), count)) = written {
            file.uncorrectable.clear(start, count);
        }
        Status::SUCCESS
    }
}

/// The status for an error of the kernel's in a step of a command.
fn failure(errno: i32, step: Next) -> Status {
    match errno {
        // A hole could not be filled.
        libc::ENOSPC | libc::EDQUOT => Status::CAPACITY_EXCEEDED,
        libc::EFAULT => Status::DATA_TRANSFER_ERROR,
        libc::ENOMEM | libc::EAGAIN => Status::INTERNAL_ERROR,
        // Of a Copy, too, as long as it reads.
        _ if step == Next::ReadInto => Status::UNRECOVERED_READ_ERROR,
        _ => Status::WRITE_FAULT,
    }
}

impl TimedStore for FileQueue {
    const AT_ONCE: bool = false;

    fn arriving(&self) -> impl Iterator<Item = &Sqe> {
        let before = self.waiting.len().saturating_sub(self.arriving);
        self.waiting.iter().skip(before)
    }

    fn ring_through(&mut self, memory: HostMemory<'_>, _: impl FnMut(&Sqe, Status)) {
        self.ring(memory);
    }
}

impl HostBatch for &mut FileQueue {
    fn announce(&mut self, _: u32, _: Ticks) {}

    fn submit(&mut self, sqe: &Sqe) {
        self.waiting.push_back(*sqe);
        self.arriving += 1;
    }

    fn ring(self, memory: HostMemory<'_>) {
        self.arriving = 0;
        self.looked = false;
        self.start_waiting(memory);
        self.uring.submit();
    }
}

impl HostQueue for FileQueue {
    type Batch<'a> = &'a mut Self;

    fn batch(&mut self) -> &mut Self {
        self
    }

    fn reap(&mut self, memory: HostMemory<'_>, mut taker: impl CompletionTaker) {
        let mut ended = false;
        self.looked = false;
        while let Some((tag, result)) = self.uring.take() {
            ended = true;
            let slot = CommandId(tag as u16);
            match self
                .ended(slot, result, memory)
                .unwrap_or_else(Step::Complete)
            {
                Step::Complete(status) => self.complete(slot, status),
                Step::Requested | Step::Wait => {}
            }
        }
        if ended && !self.waiting.is_empty() {
            self.start_waiting(memory);
        }
        self.uring.submit();
        std::mem::swap(&mut self.completed, &mut self.completing);
        for completion in self.completing.drain(..) {
            taker.take(completion);
        }
    }

    fn cut_short(&mut self) {
        self.cut_short = true;
        while let Some(sqe) = self.waiting.pop_front() {
            self.complete(sqe.cid(), Status::ABORTED_SQ_DELETION);
        }
        self.arriving = 0;
    }

    fn wait_fd(&self) -> Option<RawFd> {
        Some(self.uring.fd())
    }
}

#[cfg(test)]
mod tests;
