//! A queue pair of a file drive. Each command is a sequence of requests to the kernel.

mod wait_queues;

use std::collections::VecDeque;
use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

use log::error;

use self::wait_queues::{AwaitedResource, ResourceWaitQueues};
use super::bounce_buffers::QueueBounceBuffers;
use super::change_claims::QueueFastLane;
use super::file_command::{FileCommand, FileCommandStep};
use super::io_mode::{TransferBuffer, TransferDirection};
use super::kernel::Uring;
use super::lease::WriteErrorProbe;
use super::queue_syncs::QueueSyncs;
use super::slice_scheduler::SliceWaiter;
use super::uring::{FileIoCompletion, FileIoRing};
use super::{LeasedFile, SharedFile};
use nvme_mpt::host::request_age::{RequestAgeTimer, checks_in};
use nvme_mpt::host::{
    CompletionTaker, DataPointer, DelayableQueue, HostBatch, HostCompletion, HostMemory, HostQueue,
};
use nvme_mpt::shadow::NvmCommands;
use nvme_mpt_memory::clock::{HostClock, TickClock, Ticks, ticks_in};
use nvme_spec::ids::CommandId;
use nvme_spec::nvm::{
    CompareVerify, DatasetManagement, ReadWrite, WriteUncorrectable, WriteZeroes,
};
use nvme_spec::opcode::NvmOpcode;
use nvme_spec::sqe::Sqe;
use nvme_spec::status::Status;

/// Interval at which blocked commands are tried again, and at which requests that the kernel did not accept are submitted
/// again.
const RETRY_INTERVAL: Duration = Duration::from_micros(250);

/// Maximum total time for which a command waits for its turns: a third of the timeout that drivers usually have for commands. A
/// limit of a command's length would not bound this wait, because any number of commands may wait for turns of a fragmented
/// file.
const TURN_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum time for which a queue that ends waits for its pending requests.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(30);

/// Maximum time for which a failed queue that ends waits for its pending requests.
const FAILED_CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// Maximum number of commands per pass that move from one wait queue to that of another resource.
const MOVED_MAX: u32 = 16;

/// Number of short commands at the start of a batch whose requests are submitted before the others are prepared, so that the
/// device starts early.
const FIRST_PART_COMMANDS: u32 = 4;

/// Maximum bytes of a short command. A longer one keeps a device busy while the remaining commands of the batch are prepared.
const SHORT_BYTES_MAX: u64 = 16 << 10;

/// Maximum number of passes with completions between two reads of the clock.
const PASSES_PER_CLOCK_READ: u32 = 64;

/// A queue pair of a file drive.
#[derive(Debug)]
pub struct FileQueue<R: FileIoRing = Uring, C: TickClock = HostClock> {
    pub(super) ring: R,
    pub(super) clock: C,
    pub(super) commands: Box<[FileCommand]>,
    pub(super) file: Arc<SharedFile>,
    pub(super) lease: Arc<LeasedFile>,
    pub(super) probe: WriteErrorProbe,
    pub(super) lane: Arc<QueueFastLane>,
    /// True if the file's size was checked in the present batch.
    pub(super) is_size_checked: bool,
    /// True if a check in the present batch has found no resident pages, so that no further check is made.
    pub(super) has_found_no_pages: bool,
    /// Commands submitted since the doorbell was last rung.
    submitted: VecDeque<Sqe>,
    /// Slots of commands that wait for a resource before they start.
    wait_queues: ResourceWaitQueues,
    pub(super) bounces: QueueBounceBuffers,
    pub(super) syncs: QueueSyncs,
    /// Slots of blocked commands, which wait for a change of another command, for a survey, for the ledger, or for the queue's
    /// turn to process a slice.
    pub(super) blocked: Vec<u16>,
    unblocking: Vec<u16>,
    completed: Vec<HostCompletion>,
    completing: Vec<HostCompletion>,
    pub(super) age_timer: RequestAgeTimer,
    passes: u32,
    retry_ticks: u64,
    turn_timeout_ticks: u64,
    /// Time at which blocked commands are retried, and requests that the kernel did not accept are submitted again.
    retry_at: Ticks,
    /// Number of age checks after which a pending request fails the queue; `None` without a timeout.
    pub(super) timeout_checks: Option<u32>,
    /// True if a request has been pending for longer than the timeout.
    pub(super) has_failed: bool,
    /// Set when the queue ends, so that no further request is made.
    pub(super) is_stopping: bool,
    /// True if requests were pending in the kernel when the queue ended.
    has_pending_at_end: bool,
}

/// Outcome of a command's steps, after which other commands are served.
#[derive(Debug)]
pub(super) enum FileStepOutcome {
    /// A request of the command is pending in the kernel.
    Requested,
    /// The command is blocked: it waits for a change of another command, for a survey, for the ledger, or for the queue's turn
    /// to process a slice.
    Blocked,
    /// The command is complete.
    Complete(Status),
    /// The command cannot start before another command has released this resource.
    AwaitResource(AwaitedResource),
    /// The command waits for a sync that another command performs.
    AwaitSync,
}

impl FileQueue {
    pub(crate) fn new(lease: &Arc<LeasedFile>, slots: u16) -> io::Result<Self> {
        // Each slot has at most one request, so the ring has an entry for every slot.
        let ring = Uring::new(u32::from(slots).next_power_of_two())?;
        // If this process is killed, its pending requests keep the files open, and thus the locks of the range.
        if let Some(locks) = lease.locks() {
            locks.with_open_files(|files| ring.keep_open(files))?;
        }
        Self::with_ring(ring, HostClock, lease, slots)
    }
}

impl<R: FileIoRing, C: TickClock> FileQueue<R, C> {
    pub(super) fn with_ring(
        ring: R,
        clock: C,
        lease: &Arc<LeasedFile>,
        slots: u16,
    ) -> io::Result<Self> {
        let capacity = usize::from(slots);
        let file = lease.shared.clone();
        let probe = lease.open_probe()?;
        let lane = lease.claims.open_lane();
        file.lanes.add(&lane);
        let timeout = file.timeout.get().copied().map(checks_in);
        Ok(Self {
            lease: lease.clone(),
            probe,
            ring,
            clock,
            commands: std::iter::repeat_with(FileCommand::default)
                .take(capacity)
                .collect(),
            lane,
            is_size_checked: false,
            has_found_no_pages: false,
            file,
            submitted: VecDeque::with_capacity(capacity),
            wait_queues: ResourceWaitQueues::new(capacity),
            bounces: QueueBounceBuffers::new(),
            syncs: QueueSyncs::new(capacity),
            blocked: Vec::with_capacity(capacity),
            unblocking: Vec::with_capacity(capacity),
            completed: Vec::with_capacity(capacity),
            completing: Vec::with_capacity(capacity),
            age_timer: RequestAgeTimer::new(),
            passes: 0,
            retry_ticks: ticks_in(RETRY_INTERVAL),
            turn_timeout_ticks: ticks_in(TURN_TIMEOUT),
            retry_at: Ticks(0),
            timeout_checks: timeout,
            has_failed: false,
            is_stopping: false,
            has_pending_at_end: false,
        })
    }

    /// Returns the queue's identifier for the slice scheduler. It is the address of the queue's fast lane, which exists as long
    /// as the queue.
    pub(super) fn waiter(&self) -> SliceWaiter {
        SliceWaiter(Arc::as_ptr(&self.lane).addr())
    }

    pub(super) fn now(&self) -> Ticks {
        Ticks(self.clock.now())
    }

    /// Starts waiting commands whose resource is available. Per pass, tries only a few commands that it cannot start.
    fn start_waiting(&mut self, memory: HostMemory<'_>) {
        for want in AwaitedResource::ALL {
            let mut moved = 0;
            while moved < MOVED_MAX
                && let Some(slot) = self.wait_queues.take(want)
            {
                let sqe = self.commands[usize::from(slot)].sqe;
                match self.try_start(&sqe, memory) {
                    None => {}
                    Some(wanted) if wanted == want => {
                        self.wait_queues.push_front(want, slot);
                        break;
                    }
                    // The command now waits for another resource, and is started when a command that holds this resource ends.
                    Some(wanted) => {
                        self.wait_queues.push(wanted, slot);
                        moved += 1;
                    }
                }
            }
        }
    }

    /// Starts newly submitted commands whose resources are available.
    ///
    /// The requests of the first [`FIRST_PART_COMMANDS`] short commands are submitted to the kernel together, then the requests
    /// of twice as many commands, and so on. So the device begins with the first requests while requests behind them are
    /// prepared, and a batch needs few system calls.
    fn start_submitted(&mut self, memory: HostMemory<'_>) {
        let (mut part, mut started) = (FIRST_PART_COMMANDS, 0);
        while let Some(sqe) = self.submitted.pop_front() {
            if let Some(want) = self.try_start(&sqe, memory) {
                self.wait_queues.push(want, sqe.cid().0);
            }
            started += u32::from(self.is_short(&sqe));
            if started == part {
                self.ring.submit();
                (part, started) = (2 * part, 0);
            }
        }
    }

    /// Returns whether a command is a short transfer.
    #[inline]
    fn is_short(&self, sqe: &Sqe) -> bool {
        let transfers = matches!(NvmOpcode(sqe.opcode()), NvmOpcode::READ | NvmOpcode::WRITE);
        let blocks = u64::from(ReadWrite::from(sqe).nlb_z) + 1;
        transfers && blocks << self.file.lba_shift <= SHORT_BYTES_MAX
    }

    /// Starts a command. If a resource is missing, returns the resource that the command must wait for.
    fn try_start(&mut self, sqe: &Sqe, memory: HostMemory<'_>) -> Option<AwaitedResource> {
        match self
            .start(sqe, memory)
            .unwrap_or_else(FileStepOutcome::Complete)
        {
            FileStepOutcome::AwaitResource(want) => Some(want),
            step => {
                self.apply_outcome(sqe.cid(), step);
                None
            }
        }
    }

    fn apply_outcome(&mut self, slot: CommandId, step: FileStepOutcome) {
        match step {
            FileStepOutcome::Requested
            | FileStepOutcome::AwaitResource(_)
            | FileStepOutcome::AwaitSync => {}
            FileStepOutcome::Blocked => self.blocked.push(slot.0),
            FileStepOutcome::Complete(status) => self.complete(slot, status),
        }
    }

    fn complete(&mut self, slot: CommandId, status: Status) {
        let index = usize::from(slot.0);
        self.release_claim(index);
        if let Some(operation) = self.commands.get_mut(index) {
            if let Some(bounce) = operation.bounce.take() {
                self.bounces.put(bounce);
            }
            if let Some(number) = operation.led_sync.take() {
                self.syncs.end_sync(number, status == Status::SUCCESS);
            }
        }
        self.completed.push(HostCompletion {
            slot: slot.0,
            status,
            dw0: 0,
        });
    }

    /// Releases a command's claim on blocks, and the turn to process a slice if the command has it.
    pub(super) fn release_claim(&mut self, index: usize) {
        if let Some(operation) = self.commands.get_mut(index) {
            let claim = std::mem::take(&mut operation.claim);
            self.lease.claims.leave(&self.lane, claim);
            if std::mem::take(&mut operation.zeroing.has_turn) {
                self.file.slice_scheduler.cancel_turn();
            }
        }
    }

    fn start(&mut self, sqe: &Sqe, memory: HostMemory<'_>) -> Result<FileStepOutcome, Status> {
        #[cfg(test)]
        STARTS.set(STARTS.get() + 1);
        let opcode = NvmOpcode(sqe.opcode());
        self.lease.check_command(opcode)?;
        let Self {
            commands: operations,
            file,
            bounces,
            lane,
            ..
        } = self;
        let slot = sqe.cid();
        let operation = operations
            .get_mut(usize::from(slot.0))
            .ok_or(Status::INTERNAL_ERROR)?;
        operation.reset(sqe);
        // Each listed change makes further list entries more expensive, which would delay the poller's other queues.
        if matches!(opcode, NvmOpcode::WRITE | NvmOpcode::WRITE_ZEROES) && !lane.has_space() {
            return Ok(FileStepOutcome::AwaitResource(AwaitedResource::ListEntry));
        }
        let mut plan = TransferBuffer::InPlace;
        if matches!(opcode, NvmOpcode::READ | NvmOpcode::WRITE) {
            let ReadWrite { slba, nlb_z, .. } = ReadWrite::from(sqe);
            let len = (u64::from(nlb_z) + 1) << file.lba_shift;
            operation.data_offset = slba.0 << file.lba_shift;
            let vectors = &mut operation.vectors;
            DataPointer::from_sqe(sqe).for_each_piece(memory, len, |part| vectors.push(part))?;
            let direction = match opcode {
                NvmOpcode::READ => TransferDirection::Read,
                _ => TransferDirection::Write,
            };
            plan = file.plan_transfer(direction, operation);
        }
        if let Some(need) = operation.needed_bounce_buffer(file, plan) {
            let bounce = bounces.take(need).map_err(|error| {
                error!("No memory for a command that needs some of its own: {error}");
                Status::INTERNAL_ERROR
            })?;
            // A deallocation does not wait for a bounce buffer, because its time limit starts now.
            if bounce.is_none() && opcode != NvmOpcode::DATASET_MANAGEMENT {
                return Ok(FileStepOutcome::AwaitResource(
                    AwaitedResource::BounceBuffer(need),
                ));
            }
            operation.bounce = bounce;
        }
        self.begin_command(slot, opcode, plan, memory)
    }

    fn begin_command(
        &mut self,
        slot: CommandId,
        opcode: NvmOpcode,
        plan: TransferBuffer,
        memory: HostMemory<'_>,
    ) -> Result<FileStepOutcome, Status> {
        let last_turn = match opcode {
            NvmOpcode::WRITE_ZEROES | NvmOpcode::DATASET_MANAGEMENT => {
                Ticks(self.now().0 + self.turn_timeout_ticks)
            }
            _ => Ticks(0),
        };
        let Self {
            commands: operations,
            file,
            ..
        } = self;
        let operation = &mut operations[usize::from(slot.0)];
        operation.turn_deadline = last_turn;
        let sqe = &operation.sqe;
        let uncorrectable = &file.uncorrectable;
        let shift = file.lba_shift;
        match opcode {
            NvmOpcode::READ => {
                let ReadWrite { slba, nlb_z, .. } = ReadWrite::from(sqe);
                if uncorrectable.intersects(slba.0, u64::from(nlb_z) + 1) {
                    return Err(Status::UNRECOVERED_READ_ERROR);
                }
                return self.start_read(slot, plan, FileCommandStep::Done, memory);
            }
            NvmOpcode::WRITE => {
                let then = match ReadWrite::from(sqe).fua {
                    true => FileCommandStep::SyncCompanion,
                    false => FileCommandStep::Done,
                };
                return self.start_write(slot, plan, then, memory);
            }
            NvmOpcode::FLUSH => {
                operation.needed_sync = self.syncs.next_sync();
                operation.next_step = FileCommandStep::Flush;
            }
            NvmOpcode::COMPARE | NvmOpcode::VERIFY => {
                let CompareVerify { slba, nlb_z, .. } = CompareVerify::from(sqe);
                let count = u64::from(nlb_z) + 1;
                if uncorrectable.intersects(slba.0, count) {
                    return Err(Status::UNRECOVERED_READ_ERROR);
                }
                operation.data_offset = slba.0 << shift;
                operation.use_data(0, (count << shift) as usize)?;
                let plan = file.plan_transfer(TransferDirection::Read, operation);
                let then = match opcode {
                    NvmOpcode::COMPARE => FileCommandStep::Compare,
                    _ => FileCommandStep::Done,
                };
                return self.start_read(slot, plan, then, memory);
            }
            NvmOpcode::WRITE_ZEROES => {
                let WriteZeroes {
                    slba, nlb_z, deac, ..
                } = WriteZeroes::from(sqe);
                let end = slba.0 + u64::from(nlb_z) + 1;
                let then = operation.step_after_zeroes();
                operation.zeroing = file.plan_zeroing(slba.0 << shift, end << shift, deac, then);
                operation.next_step = FileCommandStep::Zero;
            }
            NvmOpcode::WRITE_UNCORRECTABLE => {
                let WriteUncorrectable { slba, nlb_z } = WriteUncorrectable::from(sqe);
                let change = uncorrectable.mark(slba.0, u64::from(nlb_z) + 1);
                operation.mark_change = Some(change.ok_or(Status::INTERNAL_ERROR)?);
                operation.next_step = FileCommandStep::AwaitMarks;
            }
            NvmOpcode::DATASET_MANAGEMENT => {
                let deallocates = DatasetManagement::from(sqe).ad && file.can_punch_holes();
                operation.next_step = if deallocates {
                    FileCommandStep::DeallocateRange
                } else {
                    FileCommandStep::Done
                };
            }
            NvmOpcode::COPY => operation.next_step = FileCommandStep::CopyRange,
            _ => return Err(Status::INVALID_OPCODE),
        }
        self.run_steps(slot, memory)
    }

    /// Tries each blocked command again, and lets it continue if its wait is over.
    #[cold]
    fn retry_blocked(&mut self, memory: HostMemory<'_>) {
        std::mem::swap(&mut self.blocked, &mut self.unblocking);
        // The turn belongs to the queue, so only one of the commands that wait for the turn asks for it.
        let mut refused = None;
        for index in 0..self.unblocking.len() {
            let slot = CommandId(self.unblocking[index]);
            let step = match refused {
                Some(now) if self.is_waiting_for_turn(slot, now) => FileStepOutcome::Blocked,
                _ => self
                    .run_steps(slot, memory)
                    .unwrap_or_else(FileStepOutcome::Complete),
            };
            let is_blocked = matches!(step, FileStepOutcome::Blocked);
            if refused.is_none() && is_blocked && self.is_waiting_for_turn(slot, Ticks(0)) {
                refused = Some(self.now());
            }
            self.apply_outcome(slot, step);
        }
        self.unblocking.clear();
    }

    /// Returns whether a command waits at `now` for its turn to process a slice.
    fn is_waiting_for_turn(&self, slot: CommandId, now: Ticks) -> bool {
        let operation = self.commands.get(usize::from(slot.0));
        operation.is_some_and(|operation| {
            operation.next_step == FileCommandStep::AwaitTurn && now <= operation.turn_deadline
        })
    }

    /// Continues the Flushes whose sync has ended.
    #[cold]
    fn resume_flushes(&mut self, memory: HostMemory<'_>) {
        let slots = self.syncs.take_waiting();
        for slot in slots.iter().copied().map(CommandId) {
            let step = self
                .run_steps(slot, memory)
                .unwrap_or_else(FileStepOutcome::Complete);
            self.apply_outcome(slot, step);
        }
        self.syncs.recycle(slots);
    }

    /// Returns whether this pass reads the clock, to check the age of requests.
    #[inline]
    fn should_read_clock(&mut self, ended: bool) -> bool {
        self.passes = self.passes.wrapping_add(1);
        !ended || self.passes.is_multiple_of(PASSES_PER_CLOCK_READ) || !self.blocked.is_empty()
    }
}

impl DelayableQueue for FileQueue {
    const IS_SYNCHRONOUS: bool = false;

    fn submitted_commands(&self) -> impl Iterator<Item = &Sqe> {
        self.submitted.iter()
    }

    fn ring_and_complete(&mut self, memory: HostMemory<'_>, _: impl FnMut(&Sqe, Status)) {
        self.ring(memory);
    }
}

impl<R: FileIoRing, C: TickClock> HostBatch for &mut FileQueue<R, C> {
    fn announce(&mut self, _: u32, _: Ticks) {}

    fn submit(&mut self, sqe: &Sqe) {
        self.submitted.push_back(*sqe);
    }

    fn ring(self, memory: HostMemory<'_>) {
        self.is_size_checked = false;
        self.start_waiting(memory);
        self.start_submitted(memory);
        self.ring.submit();
    }
}

impl<R: FileIoRing, C: TickClock> HostQueue for FileQueue<R, C> {
    type Commands = NvmCommands;

    type Batch<'a>
        = &'a mut Self
    where
        R: 'a,
        C: 'a;

    fn batch(&mut self) -> &mut Self {
        self
    }

    fn reap(&mut self, memory: HostMemory<'_>, mut taker: impl CompletionTaker) {
        let mut ended = false;
        self.is_size_checked = false;
        self.has_found_no_pages = false;
        while let Some(FileIoCompletion { tag, result }) = self.ring.take() {
            ended = true;
            let Some(slot) = self.completed_slot(tag, result) else {
                continue;
            };
            let step = self
                .complete_request(slot, result, memory)
                .unwrap_or_else(FileStepOutcome::Complete);
            self.apply_outcome(slot, step);
        }
        if self.should_read_clock(ended) {
            let now = self.now();
            if now >= self.age_timer.next {
                self.check_request_ages(now);
            }
            if !self.blocked.is_empty() {
                self.retry_blocked(memory);
            }
            self.retry_at = Ticks(now.0 + self.retry_ticks);
        }
        if self.syncs.can_resume() {
            self.resume_flushes(memory);
        }
        // A command that failed without a request also releases its resources.
        if !self.wait_queues.is_empty() && (ended || !self.completed.is_empty()) {
            self.start_waiting(memory);
        }
        self.ring.submit();
        std::mem::swap(&mut self.completed, &mut self.completing);
        for completion in self.completing.drain(..) {
            taker.take(completion);
        }
    }

    fn cut_short(&mut self) {
        self.is_stopping = true;
        self.file.slice_scheduler.leave(self.waiter());
        while let Some(sqe) = self.submitted.pop_front() {
            self.complete(sqe.cid(), Status::ABORTED_SQ_DELETION);
        }
        while let Some(slot) = self.wait_queues.take_any() {
            self.complete(CommandId(slot), Status::ABORTED_SQ_DELETION);
        }
        while let Some(slot) = self.blocked.pop().or_else(|| self.syncs.pop()) {
            self.complete(CommandId(slot), Status::ABORTED_SQ_DELETION);
        }
    }

    fn next_due(&self) -> Option<Ticks> {
        let age_check =
            (self.ring.in_flight() > 0 && !self.has_failed).then_some(self.age_timer.next);
        let retry =
            (!self.blocked.is_empty() || self.ring.has_unsubmitted()).then_some(self.retry_at);
        [age_check, retry].into_iter().flatten().min()
    }

    /// Waits for pending requests, because the kernel must not write to memory that the queue has freed.
    fn drain(&mut self) -> bool {
        if self.has_pending_at_end {
            return false;
        }
        let timeout = if self.has_failed {
            FAILED_CLOSE_TIMEOUT
        } else {
            CLOSE_TIMEOUT
        };
        let settled = self.ring.wait_idle(timeout);
        if !settled {
            self.has_pending_at_end = true;
            error!(
                "The kernel does not complete {} requests on {}; their memory is not reused",
                self.ring.in_flight(),
                self.file.path.display()
            );
        }
        settled
    }

    fn wait_fd(&self) -> Option<RawFd> {
        Some(self.ring.fd())
    }

    fn has_failed(&self) -> bool {
        self.has_failed
    }
}

impl<R: FileIoRing, C: TickClock> Drop for FileQueue<R, C> {
    fn drop(&mut self) {
        let settled = self.drain();
        for slot in 0..self.commands.len() {
            self.release_claim(slot);
        }
        self.file.slice_scheduler.leave(self.waiter());
        self.lease.claims.close_lane(&self.lane);
        self.file.lanes.remove(&self.lane);
        if !settled {
            nvme_guest::leaked::leak(std::mem::take(&mut self.commands));
            // The lease must stay as well, since it holds the locks of the range.
            nvme_guest::leaked::leak(self.lease.clone());
        }
    }
}

#[cfg(test)]
thread_local! {
    /// Number of attempts to start a command, on this thread, by which tests bound the cost.
    pub(super) static STARTS: std::cell::Cell<u32> = const { std::cell::Cell::new(0) };
}

#[cfg(test)]
mod tests;
