//! Execution of a command on a file drive, from one request to the next.
#![expect(unsafe_code, reason = "promises the kernel that memory stays")]

use std::io;

use log::{error, info};

use super::claims::{BlockChange, BlockChangeClaim};
use super::lease;
use super::operation::{FileCommand, FileCommandStep, ZeroingMethod, failure, leaves_as_it_was};
use super::queue::{FileQueue, FileStepOutcome};
use super::survey;
use super::syncs::FlushRole;
use super::uring::{FileIoRequest, FileIoRing, RequestIssueMode};
use super::way::{FileIoMode, TransferBuffer, TransferDirection, UNIT};
use super::zeroes;
use crate::looks::OVERDUE;
use crate::model::TickClock;
use crate::range::range;
use nvme_mpt::host::HostMemory;
use nvme_mpt_memory::clock::ticks_in;
use nvme_spec::ids::CommandId;
use nvme_spec::nvm::{CopyCommand, CopyRange0, DatasetManagement, DsmRange, ReadWrite};
use nvme_spec::opcode::NvmOpcode;
use nvme_spec::status::Status;

/// Maximum bytes of a slice over holes. A limit is needed because the kernel also drops cached pages of holes, which takes
/// time.
const HOLE_MAX: u64 = 1 << 30;

impl<R: FileIoRing, C: TickClock> FileQueue<R, C> {
    /// Starts to read a command's data.
    pub(super) fn read(
        &mut self,
        slot: CommandId,
        plan: TransferBuffer,
        then: FileCommandStep,
        memory: HostMemory<'_>,
    ) -> Result<FileStepOutcome, Status> {
        let operation = &mut self.operations[usize::from(slot.0)];
        operation.next = FileCommandStep::Read;
        match plan {
            TransferBuffer::InPlace => {
                operation.staged = None;
                (operation.offset, operation.then) = (operation.data_offset, then);
            }
            TransferBuffer::Staged { start, end } => {
                operation.staged = Some((start, end));
                operation.use_stage(start, end)?;
                (operation.then, operation.after_scatter) = (FileCommandStep::Scatter, then);
            }
        }
        self.go_on(slot, memory)
    }

    /// Starts to write a command's data, or makes the command wait for changes that exclude the write.
    pub(super) fn write(
        &mut self,
        slot: CommandId,
        plan: TransferBuffer,
        then: FileCommandStep,
        memory: HostMemory<'_>,
    ) -> Result<FileStepOutcome, Status> {
        let Self {
            operations,
            file,
            lease,
            lane,
            ..
        } = self;
        let operation = &mut operations[usize::from(slot.0)];
        operation.then = then;
        let len = operation.vectors.len() as u64;
        let offset = operation.data_offset;
        operation.stage_write(plan, len);
        if file.way == FileIoMode::Cached {
            (operation.offset, operation.next) = (offset, FileCommandStep::Write);
            return self.go_on(slot, memory);
        }
        let (start, end) = operation.staged.unwrap_or((offset, offset + len));
        let change = BlockChange {
            start,
            end,
            partial: plan.is_partial(offset, len),
        };
        let (claim, begins) = lease.claims.enter(lane, change);
        operation.claim = claim;
        operation.next = FileCommandStep::Claimed;
        if !begins {
            return Ok(FileStepOutcome::Blocked);
        }
        self.begin_write(slot)?;
        self.go_on(slot, memory)
    }

    /// Prepares a write that no other change excludes.
    fn begin_write(&mut self, slot: CommandId) -> Result<(), Status> {
        let operation = &mut self.operations[usize::from(slot.0)];
        if operation.fills[0].is_some() || operation.fills[1].is_some() {
            operation.next = FileCommandStep::Fill;
        } else {
            prepare_write(operation)?;
        }
        Ok(())
    }

    /// Executes the steps of a command until it has a pending request, has to wait, or is complete.
    pub(super) fn go_on(
        &mut self,
        slot: CommandId,
        memory: HostMemory<'_>,
    ) -> Result<FileStepOutcome, Status> {
        let index = usize::from(slot.0);
        loop {
            let file = &self.file;
            let operation = self
                .operations
                .get_mut(index)
                .ok_or(Status::INTERNAL_ERROR)?;
            if self.cut_short && operation.has_more() {
                return Err(Status::ABORTED_SQ_DELETION);
            }
            match operation.next {
                FileCommandStep::Done => {
                    if !file.uncorrectable.is_empty() && operation.clear_marks_of_written(file) {
                        continue;
                    }
                    if operation.promises_durability() {
                        let opcode = NvmOpcode(operation.sqe.opcode());
                        self.promise_durability(opcode)?;
                    }
                    return Ok(FileStepOutcome::Complete(Status::SUCCESS));
                }
                FileCommandStep::Flush => {
                    self.lease.check(NvmOpcode::FLUSH)?;
                    match self.syncs.join(operation.needs) {
                        FlushRole::Done => operation.next = FileCommandStep::Done,
                        FlushRole::Leads(number) => {
                            operation.leads = Some(number);
                            operation.next = FileCommandStep::Sync;
                        }
                        FlushRole::Waits => {
                            self.syncs.wait(slot);
                            return Ok(FileStepOutcome::Shared);
                        }
                    }
                }
                FileCommandStep::Claimed => {
                    if !self.lease.claims.may_begin(&operation.claim) {
                        return Ok(FileStepOutcome::Blocked);
                    }
                    self.begin_write(slot)?;
                }
                FileCommandStep::Fill => {
                    let [first, second] = &mut operation.fills;
                    match first.take().or_else(|| second.take()) {
                        Some((start, end)) => {
                            operation.use_stage(start, end)?;
                            if !self.skips_lost_range(slot) {
                                return self.request(slot);
                            }
                        }
                        None => prepare_write(operation)?,
                    }
                }
                FileCommandStep::Scatter => {
                    let bytes = operation.staged_data()?;
                    // SAFETY: a shadow queue keeps the memory that the vectors name mapped while the command is in
                    // flight, and one that reads may write to it; or it is the operation's own.
                    unsafe { operation.vectors.copy_from(bytes) };
                    operation.next = operation.after_scatter;
                }
                FileCommandStep::SyncCompanion if self.lease.companion_fd().is_none() => {
                    operation.next = std::mem::take(&mut operation.after_sync);
                }
                FileCommandStep::Read
                | FileCommandStep::Write
                | FileCommandStep::Sync
                | FileCommandStep::SyncCompanion
                | FileCommandStep::Slice => {
                    if !self.copies_pages(slot)? && !self.skips_lost_range(slot) {
                        return self.request(slot);
                    }
                }
                FileCommandStep::Compare => {
                    let equal = operation.equals_data(file.lba_shift, memory)?;
                    return Ok(FileStepOutcome::Complete(if equal {
                        Status::SUCCESS
                    } else {
                        Status::COMPARE_FAILURE
                    }));
                }
                FileCommandStep::CopyRange => return self.copy_range(slot, memory),
                FileCommandStep::Range => self.next_range(slot, memory)?,
                FileCommandStep::Zero => {
                    if let Some(step) = self.zero(slot, memory)? {
                        return Ok(step);
                    }
                }
                FileCommandStep::Survey => {
                    if !self.survey(slot) {
                        return Ok(FileStepOutcome::Blocked);
                    }
                }
                FileCommandStep::Turn => {
                    if !self.take_turn(slot) {
                        return Ok(FileStepOutcome::Blocked);
                    }
                }
                FileCommandStep::ClearMarks => {
                    let (start, count) = operation.unmarked;
                    operation.change = file.uncorrectable.clear(start, count);
                    operation.next = FileCommandStep::StoreMarks;
                }
                FileCommandStep::StoreMarks => {
                    if let Some(change) = operation.change {
                        match file.uncorrectable.end_of(change) {
                            None => return Ok(FileStepOutcome::Blocked),
                            Some(Err(())) => return Err(Status::INTERNAL_ERROR),
                            Some(Ok(())) => operation.change = None,
                        }
                    }
                    operation.next = operation.after_marks;
                }
                FileCommandStep::SliceClaimed => {
                    if !self.lease.claims.may_begin(&operation.claim) {
                        return Ok(FileStepOutcome::Blocked);
                    }
                    operation.next = FileCommandStep::Slice;
                }
            }
        }
    }

    fn copy_range(
        &mut self,
        slot: CommandId,
        memory: HostMemory<'_>,
    ) -> Result<FileStepOutcome, Status> {
        let Self {
            operations, file, ..
        } = self;
        let operation = &mut operations[usize::from(slot.0)];
        let sqe = operation.sqe;
        let CopyCommand { sdlba, nr_z, .. } = CopyCommand::from(&sqe);
        operation.vectors.clear();
        if operation.ranges > usize::from(nr_z) {
            operation.data_offset = sdlba.0 << file.lba_shift;
            operation.use_data(0, operation.bytes)?;
            let plan = file.plan(TransferDirection::Write, operation);
            return self.write(slot, plan, FileCommandStep::Done, memory);
        }
        let range: CopyRange0 = range(&sqe, memory, operation.ranges)?;
        let count = u64::from(range.nlb_z) + 1;
        if file.uncorrectable.intersects(range.slba.0, count) {
            return Err(Status::UNRECOVERED_READ_ERROR);
        }
        let len = (count << file.lba_shift) as usize;
        operation.use_data(operation.bytes, len)?;
        operation.data_offset = range.slba.0 << file.lba_shift;
        operation.ranges += 1;
        operation.bytes += len;
        let plan = file.plan(TransferDirection::Read, operation);
        self.read(slot, plan, FileCommandStep::CopyRange, memory)
    }

    /// Begins the next range of a Dataset Management command.
    fn next_range(&mut self, slot: CommandId, memory: HostMemory<'_>) -> Result<(), Status> {
        let Self {
            operations, file, ..
        } = self;
        let operation = &mut operations[usize::from(slot.0)];
        let DatasetManagement { nr_z, .. } = DatasetManagement::from(&operation.sqe);
        let mut joined: Option<(u64, u64)> = None;
        // Merge adjacent ranges.
        while operation.ranges <= usize::from(nr_z) && file.punches_holes() {
            let range: DsmRange = range(&operation.sqe, memory, operation.ranges)?;
            let start = range.slba.0 << file.lba_shift;
            let end = start + (u64::from(range.nlb) << file.lba_shift);
            joined = match joined {
                _ if start == end => joined,
                None => Some((start, end)),
                Some((first, last)) if last == start => Some((first, end)),
                Some(_) => break,
            };
            operation.ranges += 1;
        }
        operation.survey = None;
        operation.next = match joined {
            Some((start, end)) => {
                operation.zeroing = file.zeroing(start, end, true, FileCommandStep::Range);
                FileCommandStep::Zero
            }
            None => FileCommandStep::Done,
        };
        Ok(())
    }

    /// Zeroes the next part of a range. The file system zeroes whole blocks if it can. Partial blocks are overwritten with
    /// zeroes. A deallocation without bounce memory leaves partial blocks unchanged.
    fn zero(
        &mut self,
        slot: CommandId,
        memory: HostMemory<'_>,
    ) -> Result<Option<FileStepOutcome>, Status> {
        let Self {
            operations, file, ..
        } = self;
        let operation = &mut operations[usize::from(slot.0)];
        let is_advice = operation.is_advice();
        let leaves_parts = is_advice && operation.bounce.is_none();
        let zeroing = &mut operation.zeroing;
        let (at, end) = (zeroing.at, zeroing.end);
        if at >= end {
            // A mark hides old data, so it is cleared only after the data is gone. Write Zeroes clears its marks when it
            // completes.
            let then = zeroing.then;
            if is_advice && !zeroing.keeps_data {
                let (start, shift) = (zeroing.start, file.lba_shift);
                let blocks = (start >> shift, (end - start) >> shift);
                if operation.clear_marks(file, blocks, then) {
                    return Ok(None);
                }
            }
            operation.next = then;
            return Ok(None);
        }
        let unit = match file.way {
            FileIoMode::Cached => 1,
            FileIoMode::Direct(_) => UNIT,
        };
        let whole = end - end % unit;
        let by_hand = if !at.is_multiple_of(unit) {
            at.next_multiple_of(unit).min(end) - at
        } else if whole <= at {
            end - at
        } else if zeroing.means == ZeroingMethod::Hand {
            (whole - at).min(zeroes::BYTES as u64)
        } else {
            let surveys = file.surveyor.asks() && operation.wants_survey();
            operation.next = if surveys {
                FileCommandStep::Survey
            } else {
                FileCommandStep::Turn
            };
            return Ok(None);
        };
        if leaves_parts {
            zeroing.at += by_hand;
            zeroing.keeps_data = true;
            return Ok(None);
        }
        let bytes = zeroes::bytes(by_hand as usize).ok_or_else(|| {
            error!("No memory for zeroes to write");
            Status::INTERNAL_ERROR
        })?;
        zeroing.at += by_hand;
        operation.data_offset = at;
        operation.vectors.clear();
        operation.vectors.push(bytes);
        let plan = file.plan(TransferDirection::Write, operation);
        self.write(slot, plan, FileCommandStep::Zero, memory)
            .map(Some)
    }

    /// Requests a survey of the next bytes of a range. Returns `false` if the command has to wait for the result.
    fn survey(&mut self, slot: CommandId) -> bool {
        let now = self.now();
        let Self {
            operations, file, ..
        } = self;
        let operation = &mut operations[usize::from(slot.0)];
        let zeroing = &mut operation.zeroing;
        match &operation.survey {
            None => match file.surveyor.ask(file, zeroing.at, zeroing.end) {
                Some(survey) => {
                    operation.survey = Some((survey, now));
                    return false;
                }
                None => zeroing.is_blind = true,
            },
            Some((survey, _)) if survey.extents().is_some() => {}
            Some((_, asked)) if now.since(*asked) < ticks_in(survey::PATIENCE) => return false,
            Some(_) => {
                zeroing.is_blind = true;
                operation.survey = None;
            }
        }
        operation.next = FileCommandStep::Turn;
        true
    }

    /// Takes the file's turn for a slice. Returns `false` if the command has to wait for the turn.
    fn take_turn(&mut self, slot: CommandId) -> bool {
        let (now, queue) = (self.now(), self.waiter());
        let Self {
            operations,
            file,
            lease,
            lane,
            ..
        } = self;
        let operation = &mut operations[usize::from(slot.0)];
        if now > operation.last_turn {
            // The command has waited too long. A deallocation ends here, and Write Zeroes writes the zeroes instead.
            if operation.is_advice() {
                operation.next = FileCommandStep::Done;
            } else {
                operation.zeroing.means = ZeroingMethod::Hand;
                operation.next = FileCommandStep::Zero;
            }
            return true;
        }
        let zeroing = &mut operation.zeroing;
        let Some(most) = file.turns.take(now, queue) else {
            return false;
        };
        zeroing.has_turn = true;
        let left = zeroing.end - zeroing.at;
        let whole = match file.way {
            FileIoMode::Cached => left,
            FileIoMode::Direct(_) => left - left % UNIT,
        };
        let extents = operation.survey.as_ref();
        let extents = extents.and_then(|(survey, _)| survey.extents());
        (zeroing.slice, zeroing.weight) =
            match extents.filter(|_| zeroing.means == ZeroingMethod::Punch) {
                Some(extents) => {
                    let longest = zeroing.at + whole.min(HOLE_MAX);
                    let (end, weight) = extents.slice(zeroing.at, longest, most);
                    let slice = (end - zeroing.at).next_multiple_of(UNIT);
                    (slice.min(whole), weight)
                }
                None => (whole.min(most), whole.min(most)),
            };
        zeroing.began = now;
        operation.next = FileCommandStep::Slice;
        if file.way != FileIoMode::Cached {
            let change = BlockChange {
                start: zeroing.at,
                end: zeroing.at + zeroing.slice,
                partial: false,
            };
            let (claim, begins) = lease.claims.enter(lane, change);
            operation.claim = claim;
            if !begins {
                operation.next = FileCommandStep::SliceClaimed;
            }
        }
        true
    }

    /// Processes the end of a slice.
    fn slice_ended(&mut self, slot: CommandId, result: Result<usize, i32>) -> Result<(), Status> {
        let now = self.now();
        let Self {
            operations,
            file,
            lease,
            lane,
            ..
        } = self;
        let operation = &mut operations[usize::from(slot.0)];
        let is_advice = operation.is_advice();
        let claim = std::mem::take(&mut operation.claim);
        lease.claims.leave(lane, claim);
        let zeroing = &mut operation.zeroing;
        // If the queue has failed in the meantime, the turn was returned and may belong to another command.
        if std::mem::take(&mut zeroing.has_turn) {
            let transfers = file.lanes.take_transfers();
            file.turns
                .done(zeroing.weight, zeroing.began, now, transfers);
        }
        operation.next = FileCommandStep::Zero;
        match result {
            Ok(_) => zeroing.at += zeroing.slice,
            Err(libc::EAGAIN | libc::EINTR | libc::ECANCELED) => {}
            Err(errno) if is_advice && leaves_as_it_was(errno) => {
                if errno == libc::EOPNOTSUPP {
                    file.gives_up(ZeroingMethod::Punch);
                }
                zeroing.at = zeroing.end;
                zeroing.keeps_data = true;
            }
            Err(errno) if leaves_as_it_was(errno) && zeroing.means != ZeroingMethod::Hand => {
                if errno == libc::EOPNOTSUPP {
                    file.gives_up(zeroing.means);
                }
                zeroing.means = ZeroingMethod::Hand;
            }
            Err(errno) => return Err(failure(errno, FileCommandStep::Slice)),
        }
        Ok(())
    }

    /// Checks the file's size, if that was not done for the present batch.
    fn look_at_size(&mut self) {
        if !std::mem::replace(&mut self.looked, true) {
            self.file.look_at_size();
        }
    }

    /// If the next request of a deallocation reaches beyond the end of a truncated file, skips the rest of the deallocation.
    /// Returns whether it did.
    fn skips_lost_range(&mut self, slot: CommandId) -> bool {
        let index = usize::from(slot.0);
        if !self.operations[index].is_advice() {
            return false;
        }
        self.look_at_size();
        if self.file.watched.has(self.operations[index].reach()) {
            return false;
        }
        self.release(index);
        let operation = &mut self.operations[index];
        operation.fills = [None; 2];
        operation.zeroing.at = operation.zeroing.end;
        operation.zeroing.keeps_data = true;
        operation.next = FileCommandStep::Zero;
        true
    }

    /// Performs a transfer by copying from or to the mapped file, if all pages of the transfer are resident. Returns whether it
    /// did.
    #[inline]
    fn copies_pages(&mut self, slot: CommandId) -> Result<bool, Status> {
        let next = self.operations[usize::from(slot.0)].next;
        if self.file.pages.is_none()
            || !matches!(next, FileCommandStep::Read | FileCommandStep::Write)
        {
            return Ok(false);
        }
        // Beyond the end of a truncated file, its last page reads as zeroes and loses writes.
        self.look_at_size();
        let Self {
            operations,
            file,
            lane,
            ..
        } = self;
        let operation = &operations[usize::from(slot.0)];
        let Some(pages) = &file.pages else {
            return Ok(false);
        };
        // Written zeroes may be many times as long as a transfer. As separate requests, their pieces let other commands run in
        // between.
        if operation.then == FileCommandStep::Zero || !file.watched.has(operation.reach()) {
            return Ok(false);
        }
        let vectors = match operation.staged {
            Some(_) => &operation.stage,
            None => &operation.vectors,
        };
        let len = vectors.len();
        let Some(bytes) = pages.bytes(operation.offset, len) else {
            return Ok(false);
        };
        // SAFETY: a shadow queue keeps the memory that the vectors name mapped while the command is in flight, and one
        // that reads may write to it; or it is the operation's own, or zeroes of the process, which are only read.
        unsafe {
            match next {
                FileCommandStep::Write => vectors.copy_to(bytes),
                _ => vectors.copy_from(bytes),
            }
        }
        if pages.is_lost() {
            pages.report(&file.path);
            return Ok(false);
        }
        lane.note_transfer();
        self.transferred(slot, len)
    }

    /// After a transfer by the kernel, records which pages of the file are resident.
    fn learn_pages(&mut self, slot: CommandId, done: usize) {
        let Some(pages) = &self.file.pages else {
            return;
        };
        let operation = &self.operations[usize::from(slot.0)];
        let (offset, len) = (operation.offset, done as u64);
        if operation.next == FileCommandStep::Write {
            pages.note(offset, len);
        } else if !self.looked_in_vain {
            self.looked_in_vain = !pages.look(&self.file.opened, offset, len);
        }
    }

    /// Submits the kernel request of a command's current step.
    fn request(&mut self, slot: CommandId) -> Result<FileStepOutcome, Status> {
        if self.cut_short {
            return Err(Status::ABORTED_SQ_DELETION);
        }
        // Check before the first write of a batch, because no write may extend a truncated file.
        let next = self.operations[usize::from(slot.0)].next;
        if matches!(next, FileCommandStep::Write | FileCommandStep::Slice) {
            self.look_at_size();
        }
        let Self {
            operations,
            file,
            lease,
            ring,
            looks,
            lane,
            ..
        } = self;
        let operation = &mut operations[usize::from(slot.0)];
        if !file.watched.has(operation.reach()) {
            return Err(failure(libc::EIO, operation.next));
        }
        if operation.next != FileCommandStep::Slice {
            lane.note_transfer();
        }
        let offset = operation.offset;
        let sync = lease.sync_fd();
        let request = match operation.next {
            FileCommandStep::Read | FileCommandStep::Fill => FileIoRequest::Read {
                fd: lease.data_fd(),
                offset,
                into: if operation.staged.is_some() {
                    &operation.stage
                } else {
                    &operation.vectors
                },
            },
            FileCommandStep::Write => FileIoRequest::Write {
                fd: lease.data_fd(),
                offset,
                from: if operation.staged.is_some() {
                    &operation.stage
                } else {
                    &operation.vectors
                },
                // Write, Copy and Write Zeroes have FUA in the same place. A sync follows the zeroes of a Write Zeroes.
                durable: operation.then != FileCommandStep::Zero
                    && ReadWrite::from(&operation.sqe).fua,
            },
            FileCommandStep::Sync => FileIoRequest::Sync { fd: sync },
            FileCommandStep::SyncCompanion => FileIoRequest::Sync {
                fd: lease.companion_fd().ok_or(Status::INTERNAL_ERROR)?,
            },
            FileCommandStep::Slice => {
                let zeroing = &operation.zeroing;
                let (offset, len) = (zeroing.at, zeroing.slice);
                if let Some(pages) = &file.pages {
                    pages.forget(offset, len);
                }
                match zeroing.means {
                    ZeroingMethod::Punch => FileIoRequest::Punch {
                        fd: sync,
                        offset,
                        len,
                    },
                    ZeroingMethod::Zero | ZeroingMethod::Hand => FileIoRequest::Zero {
                        fd: sync,
                        offset,
                        len,
                    },
                }
            }
            next => {
                error!("A command has no request for its step {next:?}");
                return Err(Status::INTERNAL_ERROR);
            }
        };
        let manner = if operation.repeats > 0 {
            RequestIssueMode::ByThread
        } else {
            RequestIssueMode::AtOnce
        };
        // SAFETY: the vectors are those of the slot's operation. It changes them only after the request has ended, as a
        // slot has one request at a time. The vectors are leaked with a queue whose requests the kernel keeps. The
        // memory is a bounce of that operation, leaked likewise, the zeroes of the process, or the guest's. A shadow
        // queue keeps the guest's memory mapped while the command is in flight. It drops it after `settle` has told
        // that the kernel has no request any more, and keeps it for good otherwise.
        let prepared = unsafe { ring.prepare(u64::from(slot.0), request, manner) };
        prepared.map_err(|error| {
            error!("A request to the kernel could not be made: {error}");
            Status::INTERNAL_ERROR
        })?;
        operation.since = looks.count;
        operation.requested = true;
        Ok(FileStepOutcome::Requested)
    }

    /// Processes the completion of a request.
    pub(super) fn ended(
        &mut self,
        slot: CommandId,
        result: Result<usize, i32>,
        memory: HostMemory<'_>,
    ) -> Result<FileStepOutcome, Status> {
        let operation = self
            .operations
            .get_mut(usize::from(slot.0))
            .ok_or(Status::INTERNAL_ERROR)?;
        operation.requested = false;
        let was_overdue = std::mem::take(&mut operation.overdue) && result.is_err();
        if was_overdue {
            operation.repeats += 1;
            if !self.cut_short {
                info!("A request that was overdue was cancelled and is repeated by another thread");
            }
        }
        let result = match operation.next {
            FileCommandStep::Sync | FileCommandStep::SyncCompanion => lease::synced(result),
            _ => result,
        };
        match (operation.next, result) {
            (FileCommandStep::Slice, result) => self.slice_ended(slot, result)?,
            // The kernel could not start the request, was interrupted, or cancelled it for lack of a worker thread.
            (next, Err(errno @ (libc::EAGAIN | libc::EINTR | libc::ECANCELED))) => {
                let since = operation.since;
                let age = self.looks.count.wrapping_sub(since);
                if age >= OVERDUE && !was_overdue {
                    return Err(failure(errno, next));
                }
                // An interrupted sync may have consumed the only report of an error on its description.
                let fua = next == FileCommandStep::Write && ReadWrite::from(&operation.sqe).fua;
                if fua || matches!(next, FileCommandStep::Sync | FileCommandStep::SyncCompanion) {
                    self.lease.ask(&self.witness)?;
                }
                let step = self.request(slot)?;
                if !was_overdue {
                    // Keep the age of the first attempt.
                    self.operations[usize::from(slot.0)].since = since;
                }
                return Ok(step);
            }
            (FileCommandStep::Write, Err(errno))
                if operation.is_advice() && leaves_as_it_was(errno) =>
            {
                let claim = std::mem::take(&mut operation.claim);
                self.lease.claims.leave(&self.lane, claim);
                operation.zeroing.keeps_data = true;
                operation.next = FileCommandStep::Zero;
            }
            (FileCommandStep::Sync | FileCommandStep::SyncCompanion, Err(errno)) => {
                let cause = io::Error::from_raw_os_error(errno);
                return Err(self.lease.lose_writes(&cause));
            }
            (next, Err(errno)) => {
                // RWF_DSYNC returns the same error if the write-back of another write failed.
                if next == FileCommandStep::Write && ReadWrite::from(&operation.sqe).fua {
                    self.lease.ask(&self.witness)?;
                }
                return Err(failure(errno, next));
            }
            (FileCommandStep::Read | FileCommandStep::Fill | FileCommandStep::Write, Ok(done)) => {
                self.learn_pages(slot, done);
                if !self.transferred(slot, done)? {
                    return self.request(slot);
                }
            }
            (FileCommandStep::Sync, Ok(_)) => operation.next = FileCommandStep::SyncCompanion,
            (_, Ok(_)) => operation.next = std::mem::take(&mut operation.after_sync),
        }
        self.go_on(slot, memory)
    }

    /// Fails a command that would promise durable data if completed writes were lost. It does not matter which command received
    /// the kernel's report.
    fn promise_durability(&self, opcode: NvmOpcode) -> Result<(), Status> {
        self.lease.ask(&self.witness)?;
        if opcode == NvmOpcode::FLUSH {
            self.file.look_at_size();
        }
        match self.lease.check(opcode) {
            // The command was not refused at its start, so the loss is new.
            Err(_) => Err(lease::LOST),
            Ok(()) => Ok(()),
        }
    }

    /// Records the bytes that a request transferred. Returns whether the transfer is complete.
    fn transferred(&mut self, slot: CommandId, done: usize) -> Result<bool, Status> {
        let Self {
            operations,
            file,
            lease,
            lane,
            ..
        } = self;
        let operation = &mut operations[usize::from(slot.0)];
        let direction = match operation.next {
            FileCommandStep::Write => TransferDirection::Write,
            _ => TransferDirection::Read,
        };
        let vectors = match operation.staged {
            Some(_) => &mut operation.stage,
            None => &mut operation.vectors,
        };
        if done < vectors.len() {
            let step = file.way.step(direction) as usize;
            let done = done - done % step;
            if done == 0 {
                // The file ends before the drive does: it was truncated.
                file.look_at_size();
                return Err(failure(libc::EIO, operation.next));
            }
            operation.offset += done as u64;
            vectors.advance(done);
            return Ok(false);
        }
        match operation.next {
            // Go on with the next partial block, if there is one.
            FileCommandStep::Fill => {}
            FileCommandStep::Write => {
                let claim = std::mem::replace(&mut operation.claim, BlockChangeClaim::None);
                lease.claims.leave(lane, claim);
                operation.next = operation.then;
            }
            _ => operation.next = operation.then,
        }
        Ok(true)
    }
}

/// Copies the command's data to the bounce buffer, if it uses one, and makes the write the next step.
fn prepare_write(operation: &mut FileCommand) -> Result<(), Status> {
    operation.next = FileCommandStep::Write;
    let Some((start, end)) = operation.staged else {
        operation.offset = operation.data_offset;
        return Ok(());
    };
    let bytes = operation.staged_data()?;
    // SAFETY: a shadow queue keeps the memory that the vectors name mapped while the command is in flight; or it is
    // the operation's own, or the zeroes of the process.
    unsafe { operation.vectors.copy_to(bytes) };
    operation.use_stage(start, end)
}
