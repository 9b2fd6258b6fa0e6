//! Execution of a command on a file drive, from one request to the next.
#![expect(unsafe_code, reason = "promises the kernel that memory stays")]

use std::io;
use std::sync::Arc;

use log::{error, info};

use super::change_claims::{BlockChange, QueueFastLane};
use super::extent_survey;
use super::file_command::{
    FileCommand, FileCommandStep, ZeroingMethod, is_harmless_errno, status_from_errno,
};
use super::io_mode::{FileIoMode, TransferBuffer, TransferDirection, UNIT};
use super::lease;
use super::queue::{FileQueue, FileStepOutcome};
use super::queue_syncs::FlushRole;
use super::uring::{FileIoRequest, FileIoRing, RequestIssueMode};
use super::{LeasedFile, SharedFile, zeroes};
use nvme_mpt::drive::LOST_WRITES;
use nvme_mpt::host::request_age::OVERDUE_CHECKS;
use nvme_mpt::host::{HostMemory, range_descriptor};
use nvme_mpt_memory::clock::{TickClock, ticks_in};
use nvme_spec::ids::CommandId;
use nvme_spec::nvm::{CopyCommand, CopyRange0, DatasetManagement, DsmRange, ReadWrite};
use nvme_spec::opcode::NvmOpcode;
use nvme_spec::status::Status;

/// Maximum bytes of a slice over holes. The kernel also drops the holes' cached pages, so a longer slice would take too long.
const HOLE_MAX: u64 = 1 << 30;

/// A command, and the parts of its queue that its steps use.
struct CommandContext<'a> {
    command: &'a mut FileCommand,
    file: &'a Arc<SharedFile>,
    lease: &'a LeasedFile,
    lane: &'a QueueFastLane,
}

impl<R: FileIoRing, C: TickClock> FileQueue<R, C> {
    #[inline]
    fn context(&mut self, slot: CommandId) -> CommandContext<'_> {
        CommandContext {
            command: &mut self.commands[usize::from(slot.0)],
            file: &self.file,
            lease: &self.lease,
            lane: &self.lane,
        }
    }

    /// Starts to read a command's data.
    pub(super) fn start_read(
        &mut self,
        slot: CommandId,
        plan: TransferBuffer,
        then: FileCommandStep,
        memory: HostMemory<'_>,
    ) -> Result<FileStepOutcome, Status> {
        let command = self.context(slot).command;
        command.next_step = FileCommandStep::Read;
        match plan {
            TransferBuffer::InPlace => {
                command.staged = None;
                (command.offset, command.after_transfer) = (command.data_offset, then);
            }
            TransferBuffer::Staged { start, end } => {
                command.staged = Some((start, end));
                command.use_stage(start, end)?;
                (command.after_transfer, command.after_scatter) = (FileCommandStep::Scatter, then);
            }
        }
        self.run_steps(slot, memory)
    }

    /// Starts to write a command's data. If other changes of the blocks exclude the write, makes the command wait for them.
    pub(super) fn start_write(
        &mut self,
        slot: CommandId,
        plan: TransferBuffer,
        then: FileCommandStep,
        memory: HostMemory<'_>,
    ) -> Result<FileStepOutcome, Status> {
        let CommandContext { command, file, .. } = self.context(slot);
        command.after_transfer = then;
        let len = command.vectors.len() as u64;
        let offset = command.data_offset;
        command.stage_write(plan, len);
        if file.io_mode == FileIoMode::Cached {
            (command.offset, command.next_step) = (offset, FileCommandStep::Write);
        } else {
            let (start, end) = command.staged.unwrap_or((offset, offset + len));
            let change = BlockChange {
                start,
                end,
                is_partial: plan.is_partial(offset, len),
            };
            self.claim_blocks(slot, change, FileCommandStep::Fill);
        }
        self.run_steps(slot, memory)
    }

    /// Claims blocks for a change, which begins with the step `then`: immediately, or when no other change excludes it.
    #[inline]
    fn claim_blocks(&mut self, slot: CommandId, change: BlockChange, then: FileCommandStep) {
        let CommandContext {
            command,
            lease,
            lane,
            ..
        } = self.context(slot);
        let (claim, begins) = lease.claims.enter(lane, change);
        (command.claim, command.after_claim) = (claim, then);
        command.next_step = match begins {
            true => then,
            false => FileCommandStep::AwaitClaim,
        };
    }

    /// Executes the steps of a command until it is complete, has a request pending in the kernel, or must wait.
    pub(super) fn run_steps(
        &mut self,
        slot: CommandId,
        memory: HostMemory<'_>,
    ) -> Result<FileStepOutcome, Status> {
        let index = usize::from(slot.0);
        loop {
            let file = &self.file;
            let command = self.commands.get_mut(index).ok_or(Status::INTERNAL_ERROR)?;
            if self.is_stopping && command.has_more_requests() {
                return Err(Status::ABORTED_SQ_DELETION);
            }
            match command.next_step {
                FileCommandStep::Done => {
                    if !file.uncorrectable.is_empty() && command.clear_written_marks(file) {
                        continue;
                    }
                    if command.needs_durability() {
                        let opcode = NvmOpcode(command.sqe.opcode());
                        self.check_durability(opcode)?;
                    }
                    return Ok(FileStepOutcome::Complete(Status::SUCCESS));
                }
                FileCommandStep::Flush => {
                    self.lease.check_command(NvmOpcode::FLUSH)?;
                    match self.syncs.join(command.needed_sync) {
                        FlushRole::Done => command.next_step = FileCommandStep::Done,
                        FlushRole::Leads(number) => {
                            command.led_sync = Some(number);
                            command.next_step = FileCommandStep::Sync;
                        }
                        FlushRole::Waits => {
                            self.syncs.add_waiter(slot);
                            return Ok(FileStepOutcome::AwaitSync);
                        }
                    }
                }
                FileCommandStep::AwaitClaim
                | FileCommandStep::AwaitSurvey
                | FileCommandStep::AwaitTurn
                | FileCommandStep::AwaitMarks => {
                    if !self.try_end_wait(slot)? {
                        return Ok(FileStepOutcome::Blocked);
                    }
                }
                FileCommandStep::Fill => {
                    let [first, second] = &mut command.fills;
                    match first.take().or_else(|| second.take()) {
                        Some((start, end)) => {
                            command.use_stage(start, end)?;
                            if !self.skip_lost_range(slot) {
                                return self.submit_request(slot);
                            }
                        }
                        None => prepare_write(command)?,
                    }
                }
                FileCommandStep::Scatter => {
                    let bytes = command.staged_data()?;
                    // SAFETY: a shadow queue keeps the memory that the vectors name mapped while the command is in
                    // flight, and one that reads may write to it; or it is the command's own.
                    unsafe { command.vectors.copy_from(bytes) };
                    command.next_step = command.after_scatter;
                }
                FileCommandStep::SyncCompanion if self.lease.companion_fd().is_none() => {
                    command.next_step = std::mem::take(&mut command.after_sync);
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
                    let equal = command.is_data_equal(file.lba_shift, memory)?;
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
                FileCommandStep::ClearMarks => {
                    let (start, count) = command.blocks_to_unmark;
                    command.mark_change = file.uncorrectable.clear(start, count);
                    command.next_step = FileCommandStep::AwaitMarks;
                }
            }
        }
    }

    /// Checks whether a waiting command can continue, and lets it. Returns `false` if it must wait longer.
    fn try_end_wait(&mut self, slot: CommandId) -> Result<bool, Status> {
        let CommandContext {
            command,
            file,
            lease,
            ..
        } = self.context(slot);
        match command.next_step {
            FileCommandStep::AwaitSurvey => return Ok(self.request_survey(slot)),
            FileCommandStep::AwaitTurn => return Ok(self.try_take_turn(slot)),
            FileCommandStep::AwaitMarks => {
                if let Some(change) = command.mark_change {
                    match file.uncorrectable.change_result(change) {
                        None => return Ok(false),
                        Some(Err(())) => return Err(Status::INTERNAL_ERROR),
                        Some(Ok(())) => command.mark_change = None,
                    }
                }
                command.next_step = command.after_marks;
            }
            _ => {
                if !lease.claims.can_begin(&command.claim) {
                    return Ok(false);
                }
                command.next_step = command.after_claim;
            }
        }
        Ok(true)
    }

    fn copy_range(
        &mut self,
        slot: CommandId,
        memory: HostMemory<'_>,
    ) -> Result<FileStepOutcome, Status> {
        let CommandContext { command, file, .. } = self.context(slot);
        let sqe = command.sqe;
        let CopyCommand { sdlba, nr_z, .. } = CopyCommand::from(&sqe);
        command.vectors.clear();
        if command.processed_ranges > usize::from(nr_z) {
            command.data_offset = sdlba.0 << file.lba_shift;
            command.use_data(0, command.processed_bytes)?;
            let plan = file.plan_transfer(TransferDirection::Write, command);
            return self.start_write(slot, plan, FileCommandStep::Done, memory);
        }
        let range: CopyRange0 = range_descriptor(&sqe, memory, command.processed_ranges)?;
        let count = u64::from(range.nlb_z) + 1;
        if file.uncorrectable.intersects(range.slba.0, count) {
            return Err(Status::UNRECOVERED_READ_ERROR);
        }
        let len = (count << file.lba_shift) as usize;
        command.use_data(command.processed_bytes, len)?;
        command.data_offset = range.slba.0 << file.lba_shift;
        command.processed_ranges += 1;
        command.processed_bytes += len;
        let plan = file.plan_transfer(TransferDirection::Read, command);
        self.start_read(slot, plan, FileCommandStep::CopyRange, memory)
    }

    /// Begins to deallocate the next range of a Dataset Management command.
    fn begin_next_range(&mut self, slot: CommandId, memory: HostMemory<'_>) -> Result<(), Status> {
        let CommandContext { command, file, .. } = self.context(slot);
        let DatasetManagement { nr_z, .. } = DatasetManagement::from(&command.sqe);
        let mut joined: Option<(u64, u64)> = None;
        // Merge adjacent ranges.
        while command.processed_ranges <= usize::from(nr_z) && file.can_punch_holes() {
            let range: DsmRange = range_descriptor(&command.sqe, memory, command.processed_ranges)?;
            let start = range.slba.0 << file.lba_shift;
            let end = start + (u64::from(range.nlb) << file.lba_shift);
            joined = match joined {
                _ if start == end => joined,
                None => Some((start, end)),
                Some((first, last)) if last == start => Some((first, end)),
                Some(_) => break,
            };
            command.processed_ranges += 1;
        }
        command.survey = None;
        command.next_step = match joined {
            Some((start, end)) => {
                command.zeroing =
                    file.plan_zeroing(start, end, true, FileCommandStep::DeallocateRange);
                FileCommandStep::Zero
            }
            None => FileCommandStep::Done,
        };
        Ok(())
    }

    /// Zeroes or deallocates the next part of a range. The file system processes whole blocks if it can. Partial blocks are
    /// overwritten with zeroes, but a deallocation without a bounce buffer leaves them unchanged.
    fn zero_next_part(
        &mut self,
        slot: CommandId,
        memory: HostMemory<'_>,
    ) -> Result<Option<FileStepOutcome>, Status> {
        let CommandContext { command, file, .. } = self.context(slot);
        let is_advice = command.is_advice();
        let leaves_parts = is_advice && command.bounce.is_none();
        let zeroing = &mut command.zeroing;
        let (at, end) = (zeroing.offset, zeroing.end);
        if at >= end {
            // A mark hides old data, so it is cleared only after the data is gone. Write Zeroes clears its marks when it
            // completes.
            let then = zeroing.next_step;
            if is_advice && !zeroing.has_skipped_data {
                let (start, shift) = (zeroing.start, file.lba_shift);
                let blocks = (start >> shift, (end - start) >> shift);
                if command.clear_marks(file, blocks, then) {
                    return Ok(None);
                }
            }
            command.next_step = then;
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
            let surveys = file.surveyor.is_enabled() && command.needs_survey();
            command.next_step = if surveys {
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
        command.data_offset = at;
        command.vectors.clear();
        command.vectors.push(bytes);
        let plan = file.plan_transfer(TransferDirection::Write, command);
        self.start_write(slot, plan, FileCommandStep::Zero, memory)
            .map(Some)
    }

    /// Requests a survey of the next bytes of a range. Returns `false` if the command must wait for the result.
    fn request_survey(&mut self, slot: CommandId) -> bool {
        let now = self.now();
        let CommandContext { command, file, .. } = self.context(slot);
        let zeroing = &mut command.zeroing;
        match &command.survey {
            None => match file
                .surveyor
                .request_survey(file, zeroing.offset, zeroing.end)
            {
                Some(survey) => {
                    command.survey = Some((survey, now));
                    return false;
                }
                None => zeroing.is_unsurveyed = true,
            },
            Some((survey, _)) if survey.extents().is_some() => {}
            Some((_, surveyed_at))
                if now.since(*surveyed_at) < ticks_in(extent_survey::SURVEY_TIMEOUT) =>
            {
                return false;
            }
            Some(_) => {
                zeroing.is_unsurveyed = true;
                command.survey = None;
            }
        }
        command.next_step = FileCommandStep::AwaitTurn;
        true
    }

    /// Takes the turn to process a slice of the file. Returns `false` if the command must wait for the turn.
    fn try_take_turn(&mut self, slot: CommandId) -> bool {
        let (now, queue) = (self.now(), self.waiter());
        let CommandContext { command, file, .. } = self.context(slot);
        if now > command.turn_deadline {
            // The command has waited too long. A deallocation ends here, and Write Zeroes writes the zeroes instead.
            if command.is_advice() {
                command.next_step = FileCommandStep::Done;
            } else {
                command.zeroing.method = ZeroingMethod::WriteZeroes;
                command.next_step = FileCommandStep::Zero;
            }
            return true;
        }
        let zeroing = &mut command.zeroing;
        let Some(most) = file.slice_scheduler.take_turn(now, queue) else {
            return false;
        };
        zeroing.has_turn = true;
        let left = zeroing.end - zeroing.offset;
        let whole = match file.io_mode {
            FileIoMode::Cached => left,
            FileIoMode::Direct(_) => left - left % UNIT,
        };
        let extents = command.survey.as_ref();
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
        if file.io_mode == FileIoMode::Cached {
            command.next_step = FileCommandStep::ZeroSlice;
        } else {
            let change = BlockChange {
                start: zeroing.offset,
                end: zeroing.offset + zeroing.slice_bytes,
                is_partial: false,
            };
            self.claim_blocks(slot, change, FileCommandStep::ZeroSlice);
        }
        true
    }

    /// Processes the result of a slice that the file system has processed, and returns the turn.
    fn end_slice(&mut self, slot: CommandId, result: Result<usize, i32>) -> Result<(), Status> {
        let now = self.now();
        let CommandContext {
            command,
            file,
            lease,
            lane,
        } = self.context(slot);
        let is_advice = command.is_advice();
        lease.claims.leave(lane, std::mem::take(&mut command.claim));
        let zeroing = &mut command.zeroing;
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
        command.next_step = FileCommandStep::Zero;
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

    /// Checks whether the file was truncated, once per batch.
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
        let command = &mut self.commands[index];
        command.fills = [None; 2];
        command.zeroing.offset = command.zeroing.end;
        command.zeroing.has_skipped_data = true;
        command.next_step = FileCommandStep::Zero;
        true
    }

    /// Transfers a command's data by copying from or to the mapped file, if all pages of the transfer are resident. Returns
    /// whether it did.
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
        let CommandContext {
            command,
            file,
            lane,
            ..
        } = self.context(slot);
        let Some(pages) = &file.pages else {
            return Ok(false);
        };
        // Written zeroes may be many times as long as a transfer. As separate requests, their pieces let other commands run in
        // between.
        if command.after_transfer == FileCommandStep::Zero
            || !file.damage_watch.is_intact_until(command.request_end())
        {
            return Ok(false);
        }
        let vectors = command.transfer_vectors();
        let len = vectors.len();
        let Some(bytes) = pages.bytes(command.offset, len) else {
            return Ok(false);
        };
        // SAFETY: a shadow queue keeps the memory that the vectors name mapped while the command is in flight, and one
        // that reads may write to it; or it is the command's own, or zeroes of the process, which are only read.
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

    /// Records which pages of a file in memory are resident, after the kernel has transferred `done` bytes of them.
    fn record_resident_pages(&mut self, slot: CommandId, done: usize) {
        let Some(pages) = &self.file.pages else {
            return;
        };
        let command = &self.commands[usize::from(slot.0)];
        let (offset, len) = (command.offset, done as u64);
        if command.next_step == FileCommandStep::Write {
            pages.mark_resident(offset, len);
        } else if !self.has_found_no_pages {
            self.has_found_no_pages = !pages.check_residency(&self.file.open_file, offset, len);
        }
    }

    /// Prepares the request to the kernel that a command's present step makes.
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
            commands,
            file,
            lease,
            ring,
            age_timer,
            lane,
            ..
        } = self;
        let command = &mut commands[usize::from(slot.0)];
        if !file.damage_watch.is_intact_until(command.request_end()) {
            return Err(status_from_errno(libc::EIO, command.next_step));
        }
        if command.next_step != FileCommandStep::ZeroSlice {
            lane.record_transfer();
        }
        let offset = command.offset;
        let sync = lease.sync_fd();
        let request = match command.next_step {
            FileCommandStep::Read | FileCommandStep::Fill => FileIoRequest::Read {
                fd: lease.data_fd(),
                offset,
                into: command.transfer_vectors(),
            },
            FileCommandStep::Write => FileIoRequest::Write {
                fd: lease.data_fd(),
                offset,
                from: command.transfer_vectors(),
                // Write, Copy and Write Zeroes have FUA in the same place. A sync follows the zeroes of a Write Zeroes.
                durable: command.after_transfer != FileCommandStep::Zero
                    && ReadWrite::from(&command.sqe).fua,
            },
            FileCommandStep::Sync => FileIoRequest::Sync { fd: sync },
            FileCommandStep::SyncCompanion => FileIoRequest::Sync {
                fd: lease.companion_fd().ok_or(Status::INTERNAL_ERROR)?,
            },
            FileCommandStep::ZeroSlice => {
                let zeroing = &command.zeroing;
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
        let mode = if command.repeat_count > 0 {
            RequestIssueMode::Worker
        } else {
            RequestIssueMode::Inline
        };
        // SAFETY: the vectors belong to the slot's command, which changes them only after the request has ended, because
        // a slot has one request at a time. If the kernel never ends a request, the queue and its vectors are leaked.
        // The memory is the command's bounce buffer, which is leaked with the queue; or zeroes of the process; or the
        // guest's memory. A shadow queue keeps the guest's memory mapped while the command is in flight. It unmaps the
        // memory only if `wait_idle` has returned true: the kernel then has no request any more.
        let prepared = unsafe { ring.prepare(u64::from(slot.0), request, mode) };
        prepared.map_err(|error| {
            error!("A request to the kernel could not be made: {error}");
            Status::INTERNAL_ERROR
        })?;
        command.requested_at_check = age_timer.count;
        command.is_requested = true;
        Ok(FileStepOutcome::Requested)
    }

    /// Processes the completion of a request to the kernel, and continues the command.
    pub(super) fn complete_request(
        &mut self,
        slot: CommandId,
        result: Result<usize, i32>,
        memory: HostMemory<'_>,
    ) -> Result<FileStepOutcome, Status> {
        let command = self
            .commands
            .get_mut(usize::from(slot.0))
            .ok_or(Status::INTERNAL_ERROR)?;
        command.is_requested = false;
        let was_overdue = std::mem::take(&mut command.is_overdue) && result.is_err();
        if was_overdue {
            command.repeat_count += 1;
            if !self.is_stopping {
                info!("A request that was overdue was cancelled and is repeated by another thread");
            }
        }
        let is_sync = command.next_step.is_sync();
        let result = match is_sync {
            true => lease::sync_result(result),
            false => result,
        };
        // RWF_DSYNC returns the same error if the write-back of another write failed.
        let is_durable_write =
            command.next_step == FileCommandStep::Write && ReadWrite::from(&command.sqe).fua;
        match (command.next_step, result) {
            (FileCommandStep::ZeroSlice, result) => self.end_slice(slot, result)?,
            // The kernel could not start the request, was interrupted, or cancelled it for lack of a worker thread.
            (next, Err(errno @ (libc::EAGAIN | libc::EINTR | libc::ECANCELED))) => {
                let since = command.requested_at_check;
                let age = self.age_timer.count.wrapping_sub(since);
                if age >= OVERDUE_CHECKS && !was_overdue {
                    return Err(status_from_errno(errno, next));
                }
                // An interrupted sync may have consumed the only report of an error on its description.
                if is_durable_write || is_sync {
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
                if command.is_advice() && is_harmless_errno(errno) =>
            {
                let claim = std::mem::take(&mut command.claim);
                self.lease.claims.leave(&self.lane, claim);
                command.zeroing.has_skipped_data = true;
                command.next_step = FileCommandStep::Zero;
            }
            (_, Err(errno)) if is_sync => {
                let cause = io::Error::from_raw_os_error(errno);
                return Err(self.lease.handle_write_error(&cause));
            }
            (next, Err(errno)) => {
                if is_durable_write {
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
            (FileCommandStep::Sync, Ok(_)) => command.next_step = FileCommandStep::SyncCompanion,
            (_, Ok(_)) => command.next_step = std::mem::take(&mut command.after_sync),
        }
        self.run_steps(slot, memory)
    }

    /// Fails a command that would promise durable data although completed writes were lost, whichever command got the report of
    /// the kernel.
    fn check_durability(&self, opcode: NvmOpcode) -> Result<(), Status> {
        self.lease.check_probe(&self.probe)?;
        if opcode == NvmOpcode::FLUSH {
            self.file.check_size();
        }
        match self.lease.check_command(opcode) {
            // The command was not refused at its start, so the loss is new.
            Err(_) => Err(LOST_WRITES),
            Ok(()) => Ok(()),
        }
    }

    /// Records the bytes that a request has transferred. Returns whether the transfer is complete.
    fn record_transfer(&mut self, slot: CommandId, done: usize) -> Result<bool, Status> {
        let CommandContext {
            command,
            file,
            lease,
            lane,
        } = self.context(slot);
        let direction = match command.next_step {
            FileCommandStep::Write => TransferDirection::Write,
            _ => TransferDirection::Read,
        };
        let vectors = command.transfer_vectors_mut();
        if done < vectors.len() {
            let step = file.io_mode.resume_alignment(direction) as usize;
            let done = done - done % step;
            if done == 0 {
                // The file ends before the drive does: it was truncated.
                file.check_size();
                return Err(status_from_errno(libc::EIO, command.next_step));
            }
            vectors.advance(done);
            command.offset += done as u64;
            return Ok(false);
        }
        match command.next_step {
            // Go on with the next partial block, if there is one.
            FileCommandStep::Fill => {}
            FileCommandStep::Write => {
                lease.claims.leave(lane, std::mem::take(&mut command.claim));
                command.next_step = command.after_transfer;
            }
            _ => command.next_step = command.after_transfer,
        }
        Ok(true)
    }
}

/// Copies the command's data to the bounce buffer, if it uses one, and makes the write the next step.
fn prepare_write(command: &mut FileCommand) -> Result<(), Status> {
    command.next_step = FileCommandStep::Write;
    let Some((start, end)) = command.staged else {
        command.offset = command.data_offset;
        return Ok(());
    };
    let bytes = command.staged_data()?;
    // SAFETY: a shadow queue keeps the memory that the vectors name mapped while the command is in flight; or it is
    // the command's own, or the zeroes of the process.
    unsafe { command.vectors.copy_to(bytes) };
    command.use_stage(start, end)
}
