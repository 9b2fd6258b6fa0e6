//! Shadow queue: one guest Completion Queue with its Submission Queues, bound to a host queue pair. One poller runs it.
//! The path of a command has no lock, no allocation and no system call.

mod completion_poster;
mod dirty_log;
mod host_queue_pair;
mod memory;
mod repeated_commands;
mod rings;
mod state;
mod unmaps_in_use;

use std::any::Any;
use std::marker::PhantomData;
use std::sync::{Arc, PoisonError};

use nvme_guest::address::Gpa;
use nvme_guest::dma::{PublishedTable, TableUse, UsedTable};
use nvme_guest::doorbell::{DoorbellBuffer, DoorbellPage};
use nvme_guest::event::{EventQueue, IoQueueEvent, QueueFailure};
use nvme_guest::host::ControllerLimits;
use nvme_guest::inflight::{InflightFile, InflightMark, InflightQueue};
use nvme_guest::interrupt::OutstandingCommands;
use nvme_guest::leaked::leak;
use nvme_guest::park::UntrappedDoorbells;
use nvme_guest::rate_limit::RateLimiter;
use nvme_guest::stats::StatusCounters;
use nvme_mpt_memory::clock::Ticks;
use nvme_mpt_memory::crash::{CrashRecord, run_recorded};
use nvme_mpt_memory::sync::Mutex;
use nvme_mpt_memory::{CompletionCredit, lost_memory_epoch};
use nvme_spec::cqe::Cqe;
use nvme_spec::ids::QueueId;
use nvme_spec::sqe::Sqe;

use self::completion_poster::{CompletionPoster, NOT_YET, fail_command};
pub use self::host_queue_pair::HostQueuePair;
use self::repeated_commands::RepeatedCommand;
pub(crate) use self::rings::{CompletionQueue, SubmissionQueue, UnmappedRing};
use self::unmaps_in_use::UnmapsInUse;
use super::multi_part::{MultiPartCommands, MultiPartStep};
use super::slot::{CommandSlots, SlotCommand, SlotPermit};
use super::translate::CommandTranslator;
use super::{CommandSet, LeasedBlocks, UntranslatedCommand};
use crate::host::{
    CompletionTaker, CompletionTiming, HostBatch, HostCompletion, HostMemory, ListMemory,
};
use crate::processor_time::{ProcessorTime, ProcessorTimeCharge};
use crate::shadow::TranslatedQueue;

/// Maximum number of commands taken from one Submission Queue before the next queue gets its turn.
const BATCH_COMMANDS: u32 = 64;

/// Number of data bytes after which a batch ends, so that small commands do not wait for many large ones.
const BATCH_BYTES: u32 = 4 << 20;

/// `BATCH_BYTES` for a queue on a poller that also runs queues of other functions.
const SHARED_BATCH_BYTES: u32 = 256 << 10;

/// Number of ring entries ahead of the current one that are prefetched.
const PREFETCH: u32 = 8;

/// State of a shadow queue: whether it can take commands and post completions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ShadowQueueCondition {
    Operational,
    /// Memory of the rings or doorbells is unmapped. The queue takes and posts nothing until the memory is mapped again.
    Suspended {
        missing: Gpa,
        since: Ticks,
    },
    /// The queue takes and posts nothing until it is deleted.
    Failed,
}

/// Kind of a queue's poll passes. Each kind is compiled separately, so that a pass has only the checks that its kind needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ShadowPassKind {
    /// A pass without in-flight tracking and without any other extra work.
    Plain,
    /// A pass with in-flight tracking and without any other extra work.
    Inflight,
    /// Other extra work is needed: the dirty log, limits of the lease, commands in parts or repeated, completions that wait
    /// for ring memory. In-flight tracking is written too, if there is any.
    Special,
}

/// State that all shadow queues of a guest controller share.
#[derive(Debug)]
pub(crate) struct QueueContext {
    pub(crate) doorbells: Arc<DoorbellPage>,
    /// State of the doorbells: untrapped while the guest may store to them without an exit.
    pub(crate) untrapped: UntrappedDoorbells,
    pub(crate) events: Arc<EventQueue>,
    pub(crate) tables: Arc<PublishedTable>,
    /// Rate limits of the lease.
    pub(crate) limiter: RateLimiter,
    /// Blocks of the lease. A queue adopts changed blocks together with the next table of the VM's memory.
    pub(crate) blocks: Mutex<Arc<LeasedBlocks>>,
    /// In-flight tracking, if the queues may outlive this process.
    pub(crate) inflight: Option<Arc<InflightFile>>,
    /// Counters of commands that completed with an error.
    pub(crate) errors: StatusCounters,
    /// Processor time that pollers have spent on the function's queues.
    pub(crate) processor_time: Arc<ProcessorTime>,
}

impl QueueContext {
    pub(crate) fn blocks(&self) -> Arc<LeasedBlocks> {
        self.blocks
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    pub(crate) fn set_blocks(&self, blocks: LeasedBlocks) {
        *self.blocks.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(blocks);
    }
}

/// Shadow queue as seen by its poller.
#[derive(Debug)]
pub struct ShadowQueue {
    /// Dropped first: the drop waits for in-flight commands, which use memory of the core.
    host: HostQueuePair,
    core: ShadowCore,
    /// Processor time that the poller spends on the queue.
    cpu_charge: ProcessorTimeCharge,
    /// Crash record that is set during work on the queue, if the queue may outlive this process.
    crash_record: Option<CrashRecord>,
    /// Dropped last: the lease must outlive its commands.
    lease: LeaseGuard,
}

/// Reference to a lease, which stays open until all its references are dropped.
type LeaseGuard = Arc<dyn Any + Send + Sync>;

/// Host queue for a new shadow queue, and what the shadow queue needs to use it.
#[derive(Debug)]
pub(crate) struct HostQueueParts {
    pub(crate) queue: HostQueuePair,
    /// Number of slots of the queue, and so the maximum number of its commands in flight at the host controller.
    pub(crate) slots: u16,
    /// Memory for the lists of the slots: PRP lists, SGLs and ranges.
    pub(crate) lists: ListMemory,
    /// Limits of commands of the host controller.
    pub(crate) limits: ControllerLimits,
    pub(crate) lease: LeaseGuard,
}

/// Shadow queue without its host queue, so that both can be borrowed separately.
#[derive(Debug)]
pub(crate) struct ShadowCore {
    id: u64,
    context: Arc<QueueContext>,
    buffer: Option<DoorbellBuffer>,
    cq: CompletionQueue,
    /// In-flight tracking of the queue, if it may outlive this process: the positions in its rings, and its commands in flight.
    inflight: Option<InflightQueue>,
    sqs: Vec<SubmissionQueue>,
    slots: CommandSlots,
    translator: CommandTranslator,
    parts: MultiPartCommands,
    /// Number of data bytes after which a batch ends. Depends on whether the poller runs other functions too.
    batch_bytes: u32,
    generation: u64,
    pending_unmaps: UnmapsInUse,
    lost_epoch: usize,
    is_stopped: bool,
    /// True if the queue's in-flight commands start no further step, because the queue is about to be deleted.
    is_cut_short: bool,
    condition: ShadowQueueCondition,
    /// Completions that wait for the ring's memory to be mapped again.
    held_completions: Vec<(Cqe, CompletionCredit)>,
    /// Commands that were in flight at the end of the predecessor, and that must be executed again.
    repeats: Vec<RepeatedCommand>,
    pass_kind: ShadowPassKind,
    /// True if written pages are noted in the dirty log.
    is_logged: bool,
    /// True if the lease has rate limits.
    is_limited: bool,
    /// Time until which the queue takes no commands because of the lease's rate limits; `None` if it takes commands.
    throttled_until: Option<Ticks>,
    /// Time since which the queue takes no commands because of the lease's rate limits; `None` if it takes commands.
    throttled_since: Option<Ticks>,
    /// Registration as a user of the VM's memory, for which an unmap waits; `None` while the queue is paused. Dropped after all
    /// references to that memory.
    table_use: Option<TableUse>,
}

impl ShadowQueue {
    /// Creates a shadow queue without Submission Queues. `id` identifies it among the pollers' queues. `host.lists` has
    /// [`PART_LISTS`](super::multi_part::PART_LISTS) lists in addition to those of the slots.
    pub(crate) fn new(
        id: u64,
        context: Arc<QueueContext>,
        cq: CompletionQueue,
        buffer: Option<DoorbellBuffer>,
        host: HostQueueParts,
        used: UsedTable,
    ) -> Self {
        let HostQueueParts {
            queue: host,
            slots,
            lists,
            limits,
            lease,
        } = host;
        let UsedTable { table_use, table } = used;
        let generation = table.generation();
        let blocks = context.blocks();
        let parts = MultiPartCommands::new(slots);
        let blocks = blocks.as_ref().clone();
        let inflight = context.inflight.as_ref();
        let crashes = inflight.and_then(|inflight| inflight.crashes());
        let inflight = inflight.and_then(|inflight| inflight.queue(cq.qid));
        let charge = ProcessorTimeCharge::new(context.processor_time.clone());
        let mut core = ShadowCore {
            id,
            inflight,
            context,
            buffer,
            cq,
            sqs: Vec::new(),
            slots: CommandSlots::new(slots),
            translator: CommandTranslator::new(table, lists, blocks, limits),
            parts,
            batch_bytes: BATCH_BYTES,
            generation,
            pending_unmaps: UnmapsInUse::default(),
            // The first poll must also find memory that was lost before the queue existed.
            lost_epoch: lost_memory_epoch().wrapping_sub(1),
            is_stopped: false,
            is_cut_short: false,
            condition: ShadowQueueCondition::Operational,
            held_completions: Vec::with_capacity(usize::from(slots)),
            repeats: Vec::new(),
            pass_kind: ShadowPassKind::Plain,
            is_logged: false,
            is_limited: false,
            throttled_until: None,
            throttled_since: None,
            table_use: Some(table_use),
        };
        core.adopt_table_state();
        Self {
            host,
            core,
            cpu_charge: charge,
            crash_record: crashes,
            lease,
        }
    }

    /// Returns the identifier of the queue among the pollers' queues.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.core.id
    }

    /// Returns the ticks that the poller has spent on this queue and that are not yet charged to the function.
    #[inline]
    pub(crate) fn cpu_charge(&self) -> &ProcessorTimeCharge {
        &self.cpu_charge
    }

    /// Returns [`Self::cpu_charge`], to be changed.
    #[inline]
    pub(crate) fn cpu_charge_mut(&mut self) -> &mut ProcessorTimeCharge {
        &mut self.cpu_charge
    }

    /// Returns the identifier of the guest's Completion Queue.
    #[must_use]
    pub fn cqid(&self) -> QueueId {
        self.core.cq.qid
    }

    /// Starts the in-flight tracking of a new queue, if the queue may outlive this process.
    pub(crate) fn init_inflight(&self) {
        if let Some(inflight) = &self.core.inflight {
            inflight.init(&self.core.cq.indices);
        }
    }

    /// Adds a Submission Queue that completes to this queue.
    pub(crate) fn add_sq(&mut self, sq: SubmissionQueue) {
        self.core.sqs.push(sq);
    }

    /// Removes a Submission Queue. The caller ensures that no poller has the shadow queue, so that no command of it is in
    /// flight.
    pub(crate) fn remove_sq(&mut self, qid: QueueId) {
        self.core.sqs.retain(|sq| sq.qid != qid);
    }

    /// Fails every command from now on, because the lease is revoked.
    pub(crate) fn revoke(&mut self) {
        self.core.translator.revoke();
    }

    /// Sets the Doorbell Buffer from which the queue reads doorbells. Returns whether the rings and doorbells lie in the VM's
    /// memory.
    pub(crate) fn set_doorbell_buffer(&mut self, buffer: Option<DoorbellBuffer>) -> bool {
        self.core.buffer = buffer;
        self.core.bind_memory().is_ok()
    }

    /// Runs one poll pass: takes commands and posts completions. Returns whether there was any work.
    #[inline]
    pub fn poll(&mut self) -> bool {
        let Self {
            host,
            core,
            crash_record: crashes,
            ..
        } = self;
        run_recorded(crashes.as_ref(), || host.poll(core))
    }

    /// Asks the guest to notify the next doorbell write, before the poller parks.
    pub fn arm_notifications(&mut self) {
        run_recorded(self.crash_record.as_ref(), || self.core.arm_notifications());
    }

    /// Checks for work once more after [`Self::arm_notifications`], because the guest may have rung a doorbell meanwhile.
    /// Returns whether there is any.
    pub fn recheck(&mut self) -> bool {
        run_recorded(self.crash_record.as_ref(), || self.core.recheck())
    }

    /// Returns whether work can arrive without waking a sleeping poller: by an untrapped doorbell write of the guest, or by a
    /// completion of a polled drive.
    #[must_use]
    pub fn needs_polling(&self) -> bool {
        self.has_unsignalled_work()
            || match self.core.condition {
                ShadowQueueCondition::Operational => self.core.context.untrapped.is_set(),
                ShadowQueueCondition::Suspended { .. } | ShadowQueueCondition::Failed => false,
            }
    }

    /// Returns whether an event is pending that wakes no sleeping poller: a completion of a polled drive, or the end of a
    /// suspension by timeout.
    #[must_use]
    pub fn has_unsignalled_work(&self) -> bool {
        (self.host.is_polled() && !self.is_drained())
            || matches!(self.core.condition, ShadowQueueCondition::Suspended { .. })
    }

    /// Returns the descriptor that is readable when the host controller has completed a command.
    #[must_use]
    pub fn wait_fd(&self) -> Option<std::os::fd::RawFd> {
        self.host.wait_fd()
    }

    /// Returns the earliest time at which a timed command completes or a held-back interrupt is due; `None` if there is
    /// neither.
    #[must_use]
    pub fn next_due(&self) -> Option<Ticks> {
        // A queue that is not operational posts nothing, so no held-back interrupt becomes due either.
        let held = self
            .core
            .cq
            .coalescer
            .due()
            .filter(|_| self.core.is_operational());
        let due = [self.host.next_due(), held];
        due.into_iter().flatten().min()
    }

    /// Returns the time until which commands wait for the limits of their lease; `None` if no command waits.
    #[must_use]
    pub fn throttled_until(&self) -> Option<Ticks> {
        self.core.throttled_until
    }

    /// Sets whether the queue's poller also runs queues of other functions, which makes batches shorter.
    pub(crate) fn set_poller_shared(&mut self, is_shared: bool) {
        self.core.batch_bytes = if is_shared {
            SHARED_BATCH_BYTES
        } else {
            BATCH_BYTES
        };
    }

    /// Stops taking commands. Commands in flight continue.
    pub fn stop(&mut self) {
        self.core.is_stopped = true;
        self.host.set_hurried(true);
    }

    /// Lets in-flight commands start no further step, because the queue is about to be deleted. The commands end as described
    /// at [`HostQueue::cut_short`].
    pub(crate) fn cut_short(&mut self) {
        self.core.is_cut_short = true;
        self.host.cut_short();
        self.core.parts.cut_short();
        self.core.repeats.clear();
    }

    /// Takes commands again, after [`Self::stop`].
    pub(crate) fn resume(&mut self) {
        self.core.is_stopped = false;
        self.host.set_hurried(false);
    }

    /// Returns whether the host controller has no command of this queue.
    #[must_use]
    pub fn is_drained(&self) -> bool {
        self.core.slots.in_flight() == 0 && self.core.repeats.is_empty()
    }
}

impl Drop for ShadowQueue {
    fn drop(&mut self) {
        if !self.host.drain() {
            // Commands that the drive has not completed may still access the VM's memory and the leased blocks. Neither may be
            // reused.
            let table = self.core.translator.table().clone();
            let pending_unmaps = std::mem::take(&mut self.core.pending_unmaps);
            leak((table, pending_unmaps, self.lease.clone()));
        }
    }
}

impl ShadowCore {
    #[inline]
    pub(crate) fn poll<H: TranslatedQueue>(&mut self, host: &mut H) -> bool {
        if !self.context.tables.is_newest(self.generation) {
            self.adopt_table();
        }
        if lost_memory_epoch() != self.lost_epoch {
            self.check_lost_memory();
        }
        match self.pass_kind {
            // Plain and in-flight passes require an operational queue and do not check its condition.
            _ if !self.is_operational() => self.special_pass(host),
            ShadowPassKind::Plain => self.run_pass::<H, false, false>(host),
            ShadowPassKind::Inflight => self.inflight_pass(host),
            ShadowPassKind::Special => self.special_pass(host),
        }
    }

    #[inline(never)]
    fn inflight_pass<H: TranslatedQueue>(&mut self, host: &mut H) -> bool {
        self.run_pass::<H, false, true>(host)
    }

    #[cold]
    #[inline(never)]
    fn special_pass<H: TranslatedQueue>(&mut self, host: &mut H) -> bool {
        let tail = self.cq.indices.tail().get();
        self.throttled_until = None;
        let worked = self.run_pass::<H, true, true>(host);
        if !self.parts.has_commands() && self.repeats.is_empty() && !self.slots.has_interrupted() {
            self.choose_pass_kind();
        }
        if !self.is_logged {
            return worked;
        }
        if worked {
            self.mark_pass_dirty(tail);
        } else {
            self.mark_event_idx_dirty();
        }
        worked
    }

    #[inline]
    fn run_pass<H: TranslatedQueue, const SPECIAL: bool, const LIVE: bool>(
        &mut self,
        host: &mut H,
    ) -> bool {
        let mut worked = H::COMPLETION_TIMING != CompletionTiming::Immediate
            && self.slots.in_flight() > 0
            && self.reap::<H, SPECIAL, LIVE>(host);
        let is_operational = !SPECIAL || self.is_operational();
        let mut rung = SPECIAL && self.submit_parts::<H>(host);
        if SPECIAL && self.slots.has_interrupted() {
            rung |= self.submit_interrupted::<H>(host);
        }
        if SPECIAL && is_operational && !self.repeats.is_empty() {
            rung |= self.submit_repeats::<H>(host);
        }
        if is_operational && !self.is_stopped {
            let mut batch = host.batch();
            let mut taken = false;
            for index in 0..self.sqs.len() {
                // Chosen by instruction counts: code for deferred completions is larger, and two loops in one function would
                // exceed the processor's registers.
                taken |= match H::COMPLETION_TIMING {
                    CompletionTiming::Deferred => {
                        self.take_outlined::<H, SPECIAL, LIVE>(index, &mut batch)
                    }
                    _ => self.take_commands::<H, SPECIAL, LIVE>(index, &mut batch),
                };
            }
            if taken {
                batch.ring(self.translator.memory());
                rung = true;
            }
        }
        if rung || host.has_deferred_commands() {
            if H::COMPLETION_TIMING != CompletionTiming::Deferred {
                self.reap::<H, SPECIAL, LIVE>(host);
            }
            worked = true;
        }
        if host.has_failed() {
            self.fail(QueueFailure::HostQueue);
        }
        // If the queue is not operational, the guest's memory may be unmapped, including the doorbell.
        if is_operational && self.cq.coalescer.is_owed() {
            self.signal_if_due();
        }
        if !is_operational {
            self.check_suspension();
        }
        worked
    }

    /// Calls [`Self::take_commands`] without being inlined, for host queues whose completions are deferred (see the caller).
    #[inline(never)]
    fn take_outlined<H: TranslatedQueue, const SPECIAL: bool, const LIVE: bool>(
        &mut self,
        index: usize,
        batch: &mut impl HostBatch,
    ) -> bool {
        self.take_commands::<H, SPECIAL, LIVE>(index, batch)
    }

    /// Takes commands from one Submission Queue and submits them. Returns whether there were commands.
    #[inline(always)]
    fn take_commands<H: TranslatedQueue, const SPECIAL: bool, const LIVE: bool>(
        &mut self,
        index: usize,
        batch: &mut impl HostBatch,
    ) -> bool {
        let sq = &mut self.sqs[index];
        let available = sq.available(&self.context.events);
        if available == 0 {
            return false;
        }
        if !self.context.tables.is_newest(self.generation) {
            // Memory that was mapped before the guest wrote its doorbell is in the newest table. The next pass starts with that
            // table.
            return true;
        }
        // The head is read at least once per half round, so that the head's EventIdx stays behind the head.
        if self.cq.indices.free_entries() < available.max(self.cq.entries() / 2) {
            self.read_cq_head();
        }
        let slots = self.slots.free_count() as u32;
        let mut most = available.min(slots).min(BATCH_COMMANDS);
        if SPECIAL {
            most = most.min(self.allowed_commands());
        }
        let mut credits = self.cq.indices.reserve_up_to(most);
        let count = credits.count();
        if count == 0 {
            return false;
        }
        let Self {
            cq,
            inflight,
            sqs,
            slots,
            translator,
            parts,
            pass_kind: passes,
            context,
            batch_bytes,
            ..
        } = self;
        let inflight = inflight.as_ref().filter(|_| LIVE);
        if LIVE && !SPECIAL && inflight.is_none() {
            // An in-flight pass always has in-flight tracking. This check, once per pass, saves a check per command.
            debug_assert!(inflight.is_some(), "a live pass without live state");
            return false;
        }
        let Some(sq) = sqs.get_mut(index) else {
            return false;
        };
        for ahead in 0..count.min(PREFETCH) {
            sq.ring.prefetch(sq.head.get() + ahead);
        }
        let first = sq.head;
        let mut mark = match &mut sq.inflight {
            Some(inflight) if LIVE => inflight.begin_batch(first),
            _ => InflightMark::default(),
        };
        let taken = Ticks::now();
        batch.announce(count, taken);
        cq.coalescer.on_taken(taken);
        // A batch continues while its commands have fewer than `batch_bytes` bytes.
        let mut bytes_left = *batch_bytes - 1;
        let mut last_bytes = 0;
        // At most as many commands as free slots are taken, so each command finds a slot.
        while let Some(mut permit) = slots.reserve()
            && let Some(credit) = credits.split_off()
        {
            let (number, host) = permit.host();
            let guest = sq.ring.read_ahead(sq.head.get(), PREFETCH);
            if let Some(inflight) = inflight {
                inflight.record(number, &guest, mark);
                mark = mark.next();
            }
            sq.head.advance();
            match H::Commands::translate(translator, &guest, number, host) {
                Ok(transfer) => {
                    let command = SlotCommand {
                        credit,
                        cdw0: guest.cdw0,
                        sq: index as u16,
                        bytes: transfer,
                        slba: H::Commands::error_log_lba(&guest),
                        taken_at: taken,
                    };
                    batch.submit(permit.occupy(command));
                    match bytes_left.checked_sub(transfer) {
                        Some(left) => bytes_left = left,
                        None => {
                            last_bytes = transfer;
                            break;
                        }
                    }
                }
                Err(error) => {
                    let arrival = FetchedCommand {
                        command: &guest,
                        sq: index as u16,
                        taken_at: taken,
                    };
                    let bytes = handle_untranslated::<H>(
                        error,
                        arrival,
                        ReservedSlot { permit, credit },
                        GuestQueues { context, cq, sq },
                        InflightRecord {
                            inflight,
                            next_mark: mark,
                        },
                        SubmissionPath {
                            translator,
                            parts,
                            pass_kind: passes,
                        },
                    );
                    bytes_left = bytes_left.saturating_sub(bytes);
                }
            }
        }
        if LIVE && let Some(inflight) = &mut sq.inflight {
            inflight.store(sq.head, mark);
        }
        sq.update_position();
        cq.indices.return_credits(credits);
        cq.counters.in_flight.set(slots.in_flight() as u64);
        sq.doorbell.suppress(sq.head.get());
        if SPECIAL {
            let commands = sq.head.size().distance(first.get(), sq.head.get());
            let bytes = u64::from(*batch_bytes - 1 - bytes_left) + u64::from(last_bytes);
            context.limiter.charge(commands, bytes, taken);
        }
        true
    }

    /// Returns the number of commands that the rate limits of the lease allow now. If the number is 0, sets the time of the
    /// next attempt.
    #[cold]
    fn allowed_commands(&mut self) -> u32 {
        if !self.is_limited {
            return u32::MAX;
        }
        let now = Ticks::now();
        let limiter = &self.context.limiter;
        let allowance = limiter.allowance(now);
        if allowance == 0 {
            self.throttled_until = Some(limiter.next_poll(now));
        }
        self.account_throttling(allowance == 0, now);
        allowance
    }

    /// Counts the time in which the rate limits of the lease keep the queue from taking commands. `waits` says whether they do
    /// now.
    #[cold]
    fn account_throttling(&mut self, waits: bool, now: Ticks) {
        match (self.throttled_since, waits) {
            (None, true) => self.throttled_since = Some(now),
            (Some(since), false) => {
                self.cq.counters.throttled.add(now.since(since));
                self.throttled_since = None;
            }
            _ => {}
        }
    }

    /// Submits or completes the commands in parts whose turn it is, up to a batch. Returns whether there were any.
    #[cold]
    #[inline(never)]
    fn submit_parts<H: TranslatedQueue>(&mut self, host: &mut H) -> bool {
        let gives_up = self.condition == ShadowQueueCondition::Failed;
        if !self.parts.has_commands() {
            return false;
        }
        let now = Ticks::now();
        let mut worked = false;
        for _ in 0..BATCH_COMMANDS {
            let (slots, translator) = (&self.slots, &mut self.translator);
            match self.parts.next_step(slots, translator, now, gives_up) {
                Some(MultiPartStep::Submit(part)) => {
                    let mut batch = host.batch();
                    batch.announce(1, now);
                    batch.submit(&part);
                    batch.ring(self.translator.memory());
                }
                Some(MultiPartStep::Complete(slot, status)) => {
                    self.post_completions::<H, true, true>(|_, mut posting| {
                        posting.take(HostCompletion {
                            slot,
                            status,
                            dw0: 0,
                        });
                    });
                }
                None => break,
            }
            worked = true;
        }
        worked
    }

    /// Posts the completions of the host controller. Returns whether there were completions.
    #[inline]
    fn reap<H: TranslatedQueue, const SPECIAL: bool, const LIVE: bool>(
        &mut self,
        host: &mut H,
    ) -> bool {
        self.post_completions::<H, SPECIAL, LIVE>(|memory, posting| host.reap(memory, posting))
    }

    /// Posts the completions that `give` passes to the poster. Returns whether there were any.
    #[inline(always)]
    fn post_completions<H: TranslatedQueue, const SPECIAL: bool, const LIVE: bool>(
        &mut self,
        give: impl FnOnce(HostMemory<'_>, &mut CompletionPoster<'_, H, SPECIAL, LIVE>),
    ) -> bool {
        let Self {
            cq,
            inflight,
            sqs,
            slots,
            translator,
            context,
            condition,
            held_completions: held,
            pending_unmaps,
            parts,
            pass_kind: passes,
            is_logged,
            is_cut_short,
            ..
        } = self;
        let inflight = inflight.as_ref().filter(|_| LIVE);
        if LIVE && !SPECIAL && inflight.is_none() {
            // As in `take_commands`, this check, once per pass, saves a check per command.
            debug_assert!(inflight.is_some(), "a live pass without live state");
            return false;
        }
        let tail = cq.indices.tail();
        let mut posting = CompletionPoster::<H, SPECIAL, LIVE> {
            kind: PhantomData,
            cq,
            inflight,
            sqs,
            slots,
            context,
            condition: *condition,
            held_completions: held,
            translator,
            pending_unmaps,
            parts,
            pass_kind: passes,
            is_logged: *is_logged,
            is_cut_short: *is_cut_short,
            completed: 0,
            now: NOT_YET,
        };
        give(translator.memory(), &mut posting);
        let CompletionPoster { completed, now, .. } = posting;
        let completed = if SPECIAL {
            completed
        } else {
            cq.indices.filled_since(tail)
        };
        if completed == 0 {
            return false;
        }
        cq.counters.in_flight.set(slots.in_flight() as u64);
        if LIVE
            && (!SPECIAL || *condition == ShadowQueueCondition::Operational)
            && let Some(inflight) = inflight
        {
            inflight.store_tail(cq.indices.tail(), false);
        }
        if LIVE {
            sqs.iter_mut().for_each(SubmissionQueue::record_counts);
        }
        cq.coalescer.on_posted(completed, now);
        if self.pending_unmaps.has_ended() {
            self.pending_unmaps.release_ended(self.table_use.as_ref());
        }
        true
    }

    /// Reads the Completion Queue's head from the guest's doorbell: the guest has consumed all entries before it.
    #[inline]
    fn read_cq_head(&mut self) {
        let (events, inflight) = (&self.context.events, self.inflight.as_ref());
        self.cq.read_head(events, inflight);
    }

    fn signal_if_due(&mut self) {
        if self.cq.coalescer.pin().is_some() {
            return self.signal_pin_if_due();
        }
        self.read_cq_head();
        let outstanding = self.outstanding();
        if self.cq.coalescer.signal_if_due(outstanding, Ticks::now()) {
            self.cq.counters.interrupts.add(1);
        }
    }

    /// Signals the INTx pin under the conditions of [`Self::signal_if_due`].
    #[cold]
    #[inline(never)]
    fn signal_pin_if_due(&mut self) {
        let Some((epoch, by_access)) = self
            .cq
            .coalescer
            .pin()
            .map(|pin| (pin.pin_epoch(), pin.deasserts_on_access()))
        else {
            return;
        };
        self.read_cq_head();
        // The pin is deasserted only when the guest writes the head doorbell, so EventIdx must ask for that write. If the guest
        // moved the head before it could see the new EventIdx, the head is read again. The loop ends, as the guest consumes
        // entries each time.
        while by_access && !self.cq.doorbell.is_armed(self.cq.indices.head().get()) {
            self.cq.doorbell.arm(self.cq.indices.head().get());
            self.read_cq_head();
        }
        let outstanding = self.outstanding();
        if self
            .cq
            .coalescer
            .signal_pin_if_due(outstanding, Ticks::now(), epoch)
        {
            self.cq.counters.interrupts.add(1);
        }
    }

    /// Returns the numbers of the guest's commands in flight and of the completions that it has not consumed.
    #[inline]
    fn outstanding(&self) -> OutstandingCommands {
        OutstandingCommands {
            unconsumed: self.cq.indices.unconsumed(),
            in_flight: self.slots.in_flight() as u32,
        }
    }

    fn arm_notifications(&mut self) {
        if !self.is_operational() {
            return;
        }
        self.read_cq_head();
        if self.cq.coalescer.pin().is_some() {
            self.signal_pin_if_due();
        } else {
            let outstanding = self.outstanding();
            if self
                .cq
                .coalescer
                .signal_before_sleep(outstanding, Ticks::now())
            {
                self.cq.counters.interrupts.add(1);
            }
        }
        // While commands wait for their lease's limits, a timer wakes the poller, so the guest need not notify.
        if self.throttled_until.is_none() {
            for sq in &mut self.sqs {
                sq.doorbell.arm(sq.head.get());
            }
        }
        if self.is_logged {
            self.mark_event_idx_dirty();
        }
        let head = self.cq.indices.head().get();
        // Only a full queue waits for the guest to consume entries.
        if self.cq.indices.free_entries() == 0 {
            self.cq.doorbell.arm(head);
        } else {
            self.cq.doorbell.suppress_initially(head);
        }
    }

    fn recheck(&mut self) -> bool {
        if !self.context.tables.is_newest(self.generation) || self.slots.has_interrupted() {
            return true;
        }
        if !self.is_operational() || self.is_stopped {
            return false;
        }
        self.read_cq_head();
        let is_throttled = self.throttled_until.is_some_and(|end| Ticks::now() < end);
        if self.cq.indices.free_entries() == 0 || self.slots.free_count() == 0 || is_throttled {
            return false;
        }
        let mut found = false;
        for sq in &mut self.sqs {
            if sq.available(&self.context.events) > 0 {
                sq.counters.rearm_saves.add(1);
                found = true;
            }
        }
        found
    }

    #[inline]
    fn is_operational(&self) -> bool {
        self.condition == ShadowQueueCondition::Operational
    }

    /// Fails the queue permanently: it takes and posts nothing until it is deleted. Reports the reason as an event.
    #[cold]
    fn fail(&mut self, reason: QueueFailure) {
        if self.condition != ShadowQueueCondition::Failed {
            self.condition = ShadowQueueCondition::Failed;
            self.held_completions.clear();
            self.repeats.clear();
            if let Some(inflight) = &self.inflight {
                inflight.store(&self.cq.indices, true);
            }
            self.context.events.report(IoQueueEvent::QueueFailed {
                qid: self.cq.qid,
                reason,
            });
        }
    }
}

/// Guest command that the poller has taken from a Submission Queue.
#[derive(Clone, Copy, Debug)]
struct FetchedCommand<'a> {
    command: &'a Sqe,
    /// Index of the command's Submission Queue among those of the shadow queue.
    sq: u16,
    taken_at: Ticks,
}

/// Free slot and completion entry that are reserved for a command.
struct ReservedSlot<'a> {
    permit: SlotPermit<'a>,
    credit: CompletionCredit,
}

/// Guest queues that a command belongs to.
struct GuestQueues<'a> {
    context: &'a QueueContext,
    cq: &'a mut CompletionQueue,
    sq: &'a mut SubmissionQueue,
}

/// Access to the in-flight tracking of a command, if the queue has any.
struct InflightRecord<'a> {
    inflight: Option<&'a InflightQueue>,
    /// Mark that the next command of the Submission Queue will get in the tracking.
    next_mark: InflightMark,
}

/// Parts of the shadow queue that pass a command on to the host controller.
struct SubmissionPath<'a> {
    translator: &'a mut CommandTranslator,
    parts: &'a mut MultiPartCommands,
    pass_kind: &'a mut ShadowPassKind,
}

/// Completes a command that does not reach the host controller, or starts a command in parts. Returns the data bytes of a
/// command that was started.
// Arguments that exceed the registers are passed on the stack and cost time for each command of the batch.
#[cold]
#[inline(never)]
fn handle_untranslated<H: TranslatedQueue>(
    error: UntranslatedCommand,
    arrival: FetchedCommand<'_>,
    reserved: ReservedSlot<'_>,
    queues: GuestQueues<'_>,
    record: InflightRecord<'_>,
    way: SubmissionPath<'_>,
) -> u32 {
    let FetchedCommand {
        command: guest,
        sq: sq_index,
        taken_at: taken,
    } = arrival;
    let ReservedSlot { mut permit, credit } = reserved;
    let SubmissionPath {
        translator,
        parts,
        pass_kind: passes,
    } = way;
    let (number, whole) = permit.host();
    let translated = match error {
        UntranslatedCommand::Failed(failure) => Err(failure),
        UntranslatedCommand::InParts => translator
            .translate_whole(|translator| H::Commands::translate(translator, guest, number, whole)),
    };
    match translated {
        Ok(bytes) => {
            let whole = permit.occupy_in_parts(SlotCommand {
                credit,
                cdw0: guest.cdw0,
                sq: sq_index,
                bytes,
                slba: H::Commands::error_log_lba(guest),
                taken_at: taken,
            });
            parts.begin(number, whole, translator.part_context().lists);
            *passes = ShadowPassKind::Special;
            bytes
        }
        Err(failure) => {
            let GuestQueues { context, cq, sq } = queues;
            if let Some(head) = &mut sq.inflight {
                head.store(sq.head, record.next_mark);
            }
            fail_command::<H>(context, cq, credit, sq, &arrival, failure);
            if let Some(inflight) = record.inflight {
                inflight.clear(number);
                inflight.store_tail(cq.indices.tail(), false);
            }
            0
        }
    }
}

#[cfg(test)]
mod tests;
