//! Execution of a command on a file drive, from one request to the next.
#![expect(unsafe_code, reason = "promises the kernel that memory stays")]

use std::io;

use log::{error, info};

use super::change_claims::{BlockChange, BlockChangeClaim};
use super::extent_survey;
use super::file_command::{
    FileCommand, FileCommandStep, ZeroingMethod, is_harmless_errno, status_from_errno,
};
use super::io_mode::{FileIoMode, TransferBuffer, TransferDirection, UNIT};
use super::lease;
use super::queue::{FileQueue, FileStepOutcome};
use super::queue_syncs::FlushRole;
use super::uring::{FileIoRequest, FileIoRing, RequestIssueMode};
use super::zeroes;
use crate::model::TickClock;
use crate::range_descriptors::range_descriptor;
use crate::request_age::OVERDUE_CHECKS;
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
    pub(super) fn start_read(
        &mut self,
        slot: CommandId,
        plan: TransferBuffer,
        then: FileCommandStep,
        memory: HostMemory<'_>,
    ) -> Result<FileStepOutcome, Status> {
        let operation = &mut self.commands[usize::from(slot.0)];
        operation.next_step = FileCommandStep::Read;
        match plan {
            TransferBuffer::InPlace => {
                operation.staged = None;
                (operation.offset, operation.after_transfer) = (operation.data_offset, then);
            }
            TransferBuffer::Staged { start, end } => {
                operation.staged = Some((start, end));
                operation.use_stage(start, end)?;
                (operation.after_transfer, operation.after_scatter) =
                    (FileCommandStep::Scatter, then);
            }
        }
        self.run_steps(slot, memory)
    }

    /// Starts to write a command's data, or makes the command wait for changes that exclude the write.
    pub(super) fn start_write(
        &mut self,
        slot: CommandId,
        plan: TransferBuffer,
        then: FileCommandStep,
        memory: HostMemory<'_>,
    ) -> Result<FileStepOutcome, Status> {
        let Self {
            commands: operations,
            file,
            lease,
            lane,
            ..
        } = self;
        let operation = &mut operations[usize::from(slot.0)];
        operation.after_transfer = then;
        let len = operation.vectors.len() as u64;
        let offset = operation.data_offset;
        operation.stage_write(plan, len);
        if file.io_mode == FileIoMode::Cached {
            (operation.offset, operation.next_step) = (offset, FileCommandStep::Write);
            return self.run_steps(slot, memory);
        }
        let (start, end) = operation.staged.unwrap_or((offset, offset + len));
        let change = BlockChange {
            start,
            end,
            is_partial: plan.is_partial(offset, len),
        };
        let (claim, begins) = lease.claims.enter(lane, change);
        operation.claim = claim;
        operation.next_step = FileCommandStep::AwaitClaim;
        if !begins {
            return Ok(FileStepOutcome::Blocked);
        }
        self.begin_write(slot)?;
        self.run_steps(slot, memory)
    }

    /// Prepares a write that no other change excludes.
    fn begin_write(&mut self, slot: CommandId) -> Result<(), Status> {
        let operation = &mut self.commands[usize::from(slot.0)];
        if operation.fills[0].is_some() || operation.fills[1].is_some() {
            operation.next_step = FileCommandStep::Fill;
        } else {
            prepare_write(operation)?;
        }
        Ok(())
    }

    /// Executes the steps of a command until it has a pending request, has to wait, or is complete.
    pub(super) fn run_steps(
        &mut self,
        slot: CommandId,
        memory: HostMemory<'_>,
    ) -> Result<FileStepOutcome, Status> {
        let index = usize::from(slot.0);
        loop {
            let file = &self.file;
            let operation = self.commands.get_mut(index).ok_or(Status::INTERNAL_ERROR)?;
            if self.is_stopping && operation.has_more_requests() {
                return Err(Status::ABORTED_SQ_DELETION);
            }
            match operation.next_step {
                FileCommandStep::Done => {
                    if !file.uncorrectable.is_empty() && operation.clear_written_marks(file) {
                        continue;
                    }
                    if operation.needs_durability() {
                        let opcode = NvmOpcode(operation.sqe.opcode());
                        self.check_durability(opcode)?;
                    }
                    return Ok(FileStepOutcome::Complete(Status::SUCCESS));
                }
                FileCommandStep::Flush => {
                    self.lease.check_command(NvmOpcode::FLUSH)?;
                    match self.syncs.join(operation.needed_sync) {
                        FlushRole::Done => operation.next_step = FileCommandStep::Done,
                        FlushRole::Leads(number) => {
                            operation.led_sync = Some(number);
                            operation.next_step = FileCommandStep::Sync;
                        }
                        FlushRole::Waits => {
                            self.syncs.add_waiter(slot);
                            return Ok(FileStepOutcome::AwaitSync);
                        }
                    }
                }
                FileCommandStep::AwaitClaim => {
                    if !self.lease.claims.can_begin(&operation.claim) {
                        return Ok(FileStepOutcome::Blocked);
                    }
                    self.begin_write(slot)?;
                }
                FileCommandStep::Fill => {
                    let [first, second] = &mut operation.fills;
                    match first.take().or_else(|| second.take()) {
                        Some((start, end)) => {
                            operation.use_stage(start, end)?;
                            if !self.skip_lost_range(slot) {
                                return self.submit_request(slot);
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
                    operation.next_step = operation.after_scatter;
                }
                FileCommandStep::SyncCompanion if self.lease.companion_fd().is_none() => {
                    operation.next_step = std::mem::take(&mut operation.after_sync);
                }
                FileCommandStep::Read
                | FileCommandStep::Write
                | FileCommandStep::Sync
                | FileCommandStep::SyncCompanion
                | FileCommandStep::ZeroSlice => {
                    if !self.try_copy_pages(slot)? && !self.skip_lost_range(slot) {
                        return self.submit_request(slot);
                    }
                }
                FileCommandStep::Compare => {
                    let equal = operation.is_data_equal(file.lba_shift, memory)?;
                    return Ok(FileStepOutcome::Complete(if equal {
                        Status::SUCCESS
                    } else {
                        Status::COMPARE_FAILURE
                    }));
                }
                FileCommandStep::CopyRange => return self.copy_range(slot, memory),
                FileCommandStep::DeallocateRange => self.begin_next_range(slot, memory)?,
                FileCommandStep::Zero => {
                    if let Some(step) = self.zero_next_part(slot, memory)? {
                        return Ok(step);
                    }
                }
                FileCommandStep::AwaitSurvey => {
                    if !self.request_survey(slot) {
                        return Ok(FileStepOutcome::Blocked);
                    }
                }
                FileCommandStep::AwaitTurn => {
                    if !self.try_take_turn(slot) {
                        return Ok(FileStepOutcome::Blocked);
                    }
                }
                FileCommandStep::ClearMarks => {
                    let (start, count) = operation.blocks_to_unmark;
                    operation.mark_change = file.uncorrectable.clear(start, count);
                    operation.next_step = FileCommandStep::AwaitMarks;
                }
                FileCommandStep::AwaitMarks => {
                    if let Some(change) = operation.mark_change {
                        match file.uncorrectable.change_result(change) {
                            None => return Ok(FileStepOutcome::Blocked),
                            Some(Err(())) => return Err(Status::INTERNAL_ERROR),
                            Some(Ok(())) => operation.mark_change = None,
                        }
                    }
                    operation.next_step = operation.after_marks;
                }
                FileCommandStep::AwaitSliceClaim => {
                    if !self.lease.claims.can_begin(&operation.claim) {
                        return Ok(FileStepOutcome::Blocked);
                    }
                    operation.next_step = FileCommandStep::ZeroSlice;
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
            commands: operations,
            file,
            ..
        } = self;
        let operation = &mut operations[usize::from(slot.0)];
        let sqe = operation.sqe;
        let CopyCommand { sdlba, nr_z, .. } = CopyCommand::from(&sqe);
        operation.vectors.clear();
        if operation.processed_ranges > usize::from(nr_z) {
            operation.data_offset = sdlba.0 << file.lba_shift;
            operation.use_data(0, operation.processed_bytes)?;
            let plan = file.plan_transfer(TransferDirection::Write, operation);
            return self.start_write(slot, plan, FileCommandStep::Done, memory);
        }
        let range: CopyRange0 = range_descriptor(&sqe, memory, operation.processed_ranges)?;
        let count = u64::from(range.nlb_z) + 1;
        if file.uncorrectable.intersects(range.slba.0, count) {
            return Err(Status::UNRECOVERED_READ_ERROR);
        }
        let len = (count << file.lba_shift) as usize;
        operation.use_data(operation.processed_bytes, len)?;
        operation.data_offset = range.slba.0 << file.lba_shift;
        operation.processed_ranges += 1;
        operation.processed_bytes += len;
        let plan = file.plan_transfer(TransferDirection::Read, operation);
        self.start_read(slot, plan, FileCommandStep::CopyRange, memory)
    }

    /// Begins the next range of a Dataset Management command.
    fn begin_next_range(&mut self, slot: CommandId, memory: HostMemory<'_>) -> Result<(), Status> {
        let Self {
            commands: operations,
            file,
            ..
        } = self;
        let operation = &mut operations[usize::from(slot.0)];
        let DatasetManagement { nr_z, .. } = DatasetManagement::from(&operation.sqe);
        let mut joined: Option<(u64, u64)> = None;
        // Merge adjacent ranges.
        while operation.processed_ranges <= usize::from(nr_z) && file.can_punch_holes() {
            let range: DsmRange =
                range_descriptor(&operation.sqe, memory, operation.processed_ranges)?;
            let start = range.slba.0 << file.lba_shift;
            let end = start + (u64::from(range.nlb) << file.lba_shift);
            joined = match joined {
                _ if start == end => joined,
                None => Some((start, end)),
                Some((first, last)) if last == start => Some((first, end)),
                Some(_) => break,
            };
            operation.processed_ranges += 1;
        }
        operation.survey = None;
        operation.next_step = match joined {
            Some((start, end)) => {
                operation.zeroing =
                    file.plan_zeroing(start, end, true, FileCommandStep::DeallocateRange);
                FileCommandStep::Zero
            }
            None => FileCommandStep::Done,
        };
        Ok(())
    }

    /// Zeroes the next part of a range. The file system zeroes whole blocks if it can. Partial blocks are overwritten with
    /// zeroes. A deallocation without bounce memory leaves partial blocks unchanged.
    fn zero_next_part(
        &mut self,
        slot: CommandId,
        memory: HostMemory<'_>,
    ) -> Result<Option<FileStepOutcome>, Status> {
        let Self {
            commands: operations,
            file,
            ..
        } = self;
        let operation = &mut operations[usize::from(slot.0)];
        let is_advice = operation.is_advice();
        let leaves_parts = is_advice && operation.bounce.is_none();
        let zeroing = &mut operation.zeroing;
        let (at, end) = (zeroing.offset, zeroing.end);
        if at >= end {
            // A mark hides old data, so it is cleared only after the data is gone. Write Zeroes clears its marks when it
            // completes.
            let then = zeroing.next_step;
            if is_advice && !zeroing.has_skipped_data {
                let (start, shift) = (zeroing.start, file.lba_shift);
                let blocks = (start >> shift, (end - start) >> shift);
                if operation.clear_marks(file, blocks, then) {
                    return Ok(None);
                }
            }
            operation.next_step = then;
            return Ok(None);
        }
        let unit = match file.io_mode {
            FileIoMode::Cached => 1,
            FileIoMode::Direct(_) => UNIT,
        };
        let whole = end - end % unit;
        let by_hand = if !at.is_multiple_of(unit) {
            at.next_multiple_of(unit).min(end) - at
        } else if whole <= at {
            end - at
        } else if zeroing.method == ZeroingMethod::WriteZeroes {
            (whole - at).min(zeroes::BYTES as u64)
        } else {
            let surveys = file.surveyor.is_enabled() && operation.needs_survey();
            operation.next_step = if surveys {
                FileCommandStep::AwaitSurvey
            } else {
                FileCommandStep::AwaitTurn
            };
            return Ok(None);
        };
        if leaves_parts {
            zeroing.offset += by_hand;
            zeroing.has_skipped_data = true;
            return Ok(None);
        }
        let bytes = zeroes::bytes(by_hand as usize).ok_or_else(|| {
            error!("No memory for zeroes to write");
            Status::INTERNAL_ERROR
        })?;
        zeroing.offset += by_hand;
        operation.data_offset = at;
        operation.vectors.clear();
        operation.vectors.push(bytes);
        let plan = file.plan_transfer(TransferDirection::Write, operation);
        self.start_write(slot, plan, FileCommandStep::Zero, memory)
            .map(Some)
    }

    /// Requests a survey of the next bytes of a range. Returns `false` if the command has to wait for the result.
    fn request_survey(&mut self, slot: CommandId) -> bool {
        let now = self.now();
        let Self {
            commands: operations,
            file,
            ..
        } = self;
        let operation = &mut operations[usize::from(slot.0)];
        let zeroing = &mut operation.zeroing;
        match &operation.survey {
            None => match file
                .surveyor
                .request_survey(file, zeroing.offset, zeroing.end)
            {
                Some(survey) => {
                    operation.survey = Some((survey, now));
                    return false;
                }
                None => zeroing.is_unsurveyed = true,
            },
            Some((survey, _)) if survey.extents().is_some() => {}
            Some((_, asked)) if now.since(*asked) < ticks_in(extent_survey::SURVEY_TIMEOUT) => {
                return false;
            }
            Some(_) => {
                zeroing.is_unsurveyed = true;
                operation.survey = None;
            }
        }
        operation.next_step = FileCommandStep::AwaitTurn;
        true
    }

    /// Takes the file's turn for a slice. Returns `false` if the command has to wait for the turn.
    fn try_take_turn(&mut self, slot: CommandId) -> bool {
        let (now, queue) = (self.now(), self.waiter());
        let Self {
            commands: operations,
            file,
            lease,
            lane,
            ..
        } = self;
        let operation = &mut operations[usize::from(slot.0)];
        if now > operation.turn_deadline {
            // The command has waited too long. A deallocation ends here, and Write Zeroes writes the zeroes instead.
            if operation.is_advice() {
                operation.next_step = FileCommandStep::Done;
            } else {
                operation.zeroing.method = ZeroingMethod::WriteZeroes;
                operation.next_step = FileCommandStep::Zero;
            }
            return true;
        }
        let zeroing = &mut operation.zeroing;
        let Some(most) = file.slice_scheduler.take_turn(now, queue) else {
            return false;
        };
        zeroing.has_turn = true;
        let left = zeroing.end - zeroing.offset;
        let whole = match file.io_mode {
            FileIoMode::Cached => left,
            FileIoMode::Direct(_) => left - left % UNIT,
        };
        let extents = operation.survey.as_ref();
        let extents = extents.and_then(|(survey, _)| survey.extents());
        (zeroing.slice_bytes, zeroing.slice_weight) =
            match extents.filter(|_| zeroing.method == ZeroingMethod::PunchHole) {
                Some(extents) => {
                    let longest = zeroing.offset + whole.min(HOLE_MAX);
                    let (end, weight) = extents.next_slice(zeroing.offset, longest, most);
                    let slice = (end - zeroing.offset).next_multiple_of(UNIT);
                    (slice.min(whole), weight)
                }
                None => (whole.min(most), whole.min(most)),
            };
        zeroing.slice_start = now;
        operation.next_step = FileCommandStep::ZeroSlice;
        if file.io_mode != FileIoMode::Cached {
            let change = BlockChange {
                start: zeroing.offset,
                end: zeroing.offset + zeroing.slice_bytes,
                is_partial: false,
            };
            let (claim, begins) = lease.claims.enter(lane, change);
            operation.claim = claim;
            if !begins {
                operation.next_step = FileCommandStep::AwaitSliceClaim;
            }
        }
        true
    }

    /// Processes the end of a slice.
    fn end_slice(&mut self, slot: CommandId, result: Result<usize, i32>) -> Result<(), Status> {
        let now = self.now();
        let Self {
            commands: operations,
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
            file.slice_scheduler.end_turn(
                zeroing.slice_weight,
                zeroing.slice_start,
                now,
                transfers,
            );
        }
        operation.next_step = FileCommandStep::Zero;
        match result {
            Ok(_) => zeroing.offset += zeroing.slice_bytes,
            Err(libc::EAGAIN | libc::EINTR | libc::ECANCELED) => {}
            Err(errno) if is_advice && is_harmless_errno(errno) => {
                if errno == libc::EOPNOTSUPP {
                    file.disable_zeroing_method(ZeroingMethod::PunchHole);
                }
                zeroing.offset = zeroing.end;
                zeroing.has_skipped_data = true;
            }
            Err(errno)
                if is_harmless_errno(errno) && zeroing.method != ZeroingMethod::WriteZeroes =>
            {
                if errno == libc::EOPNOTSUPP {
                    file.disable_zeroing_method(zeroing.method);
                }
                zeroing.method = ZeroingMethod::WriteZeroes;
            }
            Err(errno) => return Err(status_from_errno(errno, FileCommandStep::ZeroSlice)),
        }
        Ok(())
    }

    /// Checks the file's size, if that was not done for the present batch.
    fn check_file_size(&mut self) {
        if !std::mem::replace(&mut self.is_size_checked, true) {
            self.file.check_size();
        }
    }

    /// If the next request of a deallocation reaches beyond the end of a truncated file, skips the rest of the deallocation.
    /// Returns whether it did.
    fn skip_lost_range(&mut self, slot: CommandId) -> bool {
        let index = usize::from(slot.0);
        if !self.commands[index].is_advice() {
            return false;
        }
        self.check_file_size();
        if self
            .file
            .damage_watch
            .is_intact_until(self.commands[index].request_end())
        {
            return false;
        }
        self.release_claim(index);
        let operation = &mut self.commands[index];
        operation.fills = [None; 2];
        operation.zeroing.offset = operation.zeroing.end;
        operation.zeroing.has_skipped_data = true;
        operation.next_step = FileCommandStep::Zero;
        true
    }

    /// Performs a transfer by copying from or to the mapped file, if all pages of the transfer are resident. Returns whether it
    /// did.
    #[inline]
    fn try_copy_pages(&mut self, slot: CommandId) -> Result<bool, Status> {
        let next = self.commands[usize::from(slot.0)].next_step;
        if self.file.pages.is_none()
            || !matches!(next, FileCommandStep::Read | FileCommandStep::Write)
        {
            return Ok(false);
        }
        // Beyond the end of a truncated file, its last page reads as zeroes and loses writes.
        self.check_file_size();
        let Self {
            commands: operations,
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
        if operation.after_transfer == FileCommandStep::Zero
            || !file.damage_watch.is_intact_until(operation.request_end())
        {
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
            pages.log_loss(&file.path);
            return Ok(false);
        }
        lane.record_transfer();
        self.record_transfer(slot, len)
    }

    /// After a transfer by the kernel, records which pages of the file are resident.
    fn record_resident_pages(&mut self, slot: CommandId, done: usize) {
        let Some(pages) = &self.file.pages else {
            return;
        };
        let operation = &self.commands[usize::from(slot.0)];
        let (offset, len) = (operation.offset, done as u64);
        if operation.next_step == FileCommandStep::Write {
            pages.mark_resident(offset, len);
        } else if !self.has_found_no_pages {
            self.has_found_no_pages = !pages.check_residency(&self.file.open_file, offset, len);
        }
    }

    /// Submits the kernel request of a command's current step.
    fn submit_request(&mut self, slot: CommandId) -> Result<FileStepOutcome, Status> {
        if self.is_stopping {
            return Err(Status::ABORTED_SQ_DELETION);
        }
        // Check before the first write of a batch, because no write may extend a truncated file.
        let next = self.commands[usize::from(slot.0)].next_step;
        if matches!(next, FileCommandStep::Write | FileCommandStep::ZeroSlice) {
            self.check_file_size();
        }
        let Self {
            commands: operations,
            file,
            lease,
            ring,
            age_timer: looks,
            lane,
            ..
        } = self;
        let operation = &mut operations[usize::from(slot.0)];
        if !file.damage_watch.is_intact_until(operation.request_end()) {
            return Err(status_from_errno(libc::EIO, operation.next_step));
        }
        if operation.next_step != FileCommandStep::ZeroSlice {
            lane.record_transfer();
        }
        let offset = operation.offset;
        let sync = lease.sync_fd();
        let request = match operation.next_step {
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
                durable: operation.after_transfer != FileCommandStep::Zero
                    && ReadWrite::from(&operation.sqe).fua,
            },
            FileCommandStep::Sync => FileIoRequest::Sync { fd: sync },
            FileCommandStep::SyncCompanion => FileIoRequest::Sync {
                fd: lease.companion_fd().ok_or(Status::INTERNAL_ERROR)?,
            },
            FileCommandStep::ZeroSlice => {
                let zeroing = &operation.zeroing;
                let (offset, len) = (zeroing.offset, zeroing.slice_bytes);
                if let Some(pages) = &file.pages {
                    pages.mark_absent(offset, len);
                }
                match zeroing.method {
                    ZeroingMethod::PunchHole => FileIoRequest::Punch {
                        fd: sync,
                        offset,
                        len,
                    },
                    ZeroingMethod::ZeroRange | ZeroingMethod::WriteZeroes => FileIoRequest::Zero {
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
        let manner = if operation.repeat_count > 0 {
            RequestIssueMode::Worker
        } else {
            RequestIssueMode::Inline
        };
        // SAFETY: the vectors are those of the slot's operation. It changes them only after the request has ended, as a
        // slot has one request at a time. The vectors are leaked with a queue whose requests the kernel keeps. The
        // memory is a bounce of that operation, leaked likewise, the zeroes of the process, or the guest's. A shadow
        // queue keeps the guest's memory mapped while the command is in flight. It drops it after `wait_idle` has told
        // that the kernel has no request any more, and keeps it for good otherwise.
        let prepared = unsafe { ring.prepare(u64::from(slot.0), request, manner) };
        prepared.map_err(|error| {
            error!("A request to the kernel could not be made: {error}");
            Status::INTERNAL_ERROR
        })?;
        operation.requested_at_check = looks.count;
        operation.is_requested = true;
        Ok(FileStepOutcome::Requested)
    }

    /// Processes the completion of a request.
    pub(super) fn complete_request(
        &mut self,
        slot: CommandId,
        result: Result<usize, i32>,
        memory: HostMemory<'_>,
    ) -> Result<FileStepOutcome, Status> {
        let operation = self
            .commands
            .get_mut(usize::from(slot.0))
            .ok_or(Status::INTERNAL_ERROR)?;
        operation.is_requested = false;
        let was_overdue = std::mem::take(&mut operation.is_overdue) && result.is_err();
        if was_overdue {
            operation.repeat_count += 1;
            if !self.is_stopping {
                info!("A request that was overdue was cancelled and is repeated by another thread");
            }
        }
        let result = match operation.next_step {
            FileCommandStep::Sync | FileCommandStep::SyncCompanion => lease::sync_result(result),
            _ => result,
        };
        match (operation.next_step, result) {
            (FileCommandStep::ZeroSlice, result) => self.end_slice(slot, result)?,
            // The kernel could not start the request, was interrupted, or cancelled it for lack of a worker thread.
            (next, Err(errno @ (libc::EAGAIN | libc::EINTR | libc::ECANCELED))) => {
                let since = operation.requested_at_check;
                let age = self.age_timer.count.wrapping_sub(since);
                if age >= OVERDUE_CHECKS && !was_overdue {
                    return Err(status_from_errno(errno, next));
                }
                // An interrupted sync may have consumed the only report of an error on its description.
                let fua = next == FileCommandStep::Write && ReadWrite::from(&operation.sqe).fua;
                if fua || matches!(next, FileCommandStep::Sync | FileCommandStep::SyncCompanion) {
                    self.lease.check_probe(&self.probe)?;
                }
                let step = self.submit_request(slot)?;
                if !was_overdue {
                    // Keep the age of the first attempt.
                    self.commands[usize::from(slot.0)].requested_at_check = since;
                }
                return Ok(step);
            }
            (FileCommandStep::Write, Err(errno))
                if operation.is_advice() && is_harmless_errno(errno) =>
            {
                let claim = std::mem::take(&mut operation.claim);
                self.lease.claims.leave(&self.lane, claim);
                operation.zeroing.has_skipped_data = true;
                operation.next_step = FileCommandStep::Zero;
            }
            (FileCommandStep::Sync | FileCommandStep::SyncCompanion, Err(errno)) => {
                let cause = io::Error::from_raw_os_error(errno);
                return Err(self.lease.handle_write_error(&cause));
            }
            (next, Err(errno)) => {
                // RWF_DSYNC returns the same error if the write-back of another write failed.
                if next == FileCommandStep::Write && ReadWrite::from(&operation.sqe).fua {
                    self.lease.check_probe(&self.probe)?;
                }
                return Err(status_from_errno(errno, next));
            }
            (FileCommandStep::Read | FileCommandStep::Fill | FileCommandStep::Write, Ok(done)) => {
                self.record_resident_pages(slot, done);
                if !self.record_transfer(slot, done)? {
                    return self.submit_request(slot);
                }
            }
            (FileCommandStep::Sync, Ok(_)) => operation.next_step = FileCommandStep::SyncCompanion,
            (_, Ok(_)) => operation.next_step = std::mem::take(&mut operation.after_sync),
        }
        self.run_steps(slot, memory)
    }

    /// Fails a command that would promise durable data if completed writes were lost. It does not matter which command received
    /// the kernel's report.
    fn check_durability(&self, opcode: NvmOpcode) -> Result<(), Status> {
        self.lease.check_probe(&self.probe)?;
        if opcode == NvmOpcode::FLUSH {
            self.file.check_size();
        }
        match self.lease.check_command(opcode) {
            // The command was not refused at its start, so the loss is new.
            Err(_) => Err(lease::LOST_WRITES),
            Ok(()) => Ok(()),
        }
    }

    /// Records the bytes that a request transferred. Returns whether the transfer is complete.
    fn record_transfer(&mut self, slot: CommandId, done: usize) -> Result<bool, Status> {
        let Self {
            commands: operations,
            file,
            lease,
            lane,
            ..
        } = self;
        let operation = &mut operations[usize::from(slot.0)];
        let direction = match operation.next_step {
            FileCommandStep::Write => TransferDirection::Write,
            _ => TransferDirection::Read,
        };
        let vectors = match operation.staged {
            Some(_) => &mut operation.stage,
            None => &mut operation.vectors,
        };
        if done < vectors.len() {
            let step = file.io_mode.resume_alignment(direction) as usize;
            let done = done - done % step;
            if done == 0 {
                // The file ends before the drive does: it was truncated.
                file.check_size();
                return Err(status_from_errno(libc::EIO, operation.next_step));
            }
            operation.offset += done as u64;
            vectors.advance(done);
            return Ok(false);
        }
        match operation.next_step {
            // Go on with the next partial block, if there is one.
            FileCommandStep::Fill => {}
            FileCommandStep::Write => {
                let claim = std::mem::replace(&mut operation.claim, BlockChangeClaim::None);
                lease.claims.leave(lane, claim);
                operation.next_step = operation.after_transfer;
            }
            _ => operation.next_step = operation.after_transfer,
        }
        Ok(true)
    }
}

/// Copies the command's data to the bounce buffer, if it uses one, and makes the write the next step.
fn prepare_write(operation: &mut FileCommand) -> Result<(), Status> {
    operation.next_step = FileCommandStep::Write;
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
