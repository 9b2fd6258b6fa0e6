//! Shadow queue: one guest Completion Queue with its Submission Queues, bound to a host queue pair. One poller runs it.
//! The path of a command has no lock, no allocation and no system call.

mod departures;
mod dirty;
mod memory;
mod pair;
mod posting;
mod repeats;
mod rings;
mod state;

use std::any::Any;
use std::marker::PhantomData;
use std::sync::{Arc, PoisonError};

use nvme_guest::address::Gpa;
use nvme_guest::dma::{PublishedTable, TableUse, UsedTable};
use nvme_guest::doorbell::{DoorbellBuffer, DoorbellPage};
use nvme_guest::event::{EventQueue, IoQueueEvent, QueueFailure};
use nvme_guest::host::ControllerLimits;
use nvme_guest::interrupt::OutstandingCommands;
use nvme_guest::kept::keep_for_good;
use nvme_guest::limit::RateLimiter;
use nvme_guest::live::{InflightFile, InflightMark, InflightQueue};
use nvme_guest::park::UntrappedDoorbells;
use nvme_guest::stats::StatusCounters;
use nvme_mpt_memory::clock::Ticks;
use nvme_mpt_memory::crash::{CrashRecord, recorded};
use nvme_mpt_memory::sync::Mutex;
use nvme_mpt_memory::{CompletionCredit, lost_memory_epoch};
use nvme_spec::cqe::Cqe;
use nvme_spec::ids::QueueId;
use nvme_spec::sqe::Sqe;

use self::departures::UnmapsInUse;
pub use self::pair::HostQueuePair;
use self::posting::{CompletionPoster, NOT_YET, fail_command};
use self::repeats::RepeatedCommand;
pub(crate) use self::rings::{CompletionQueue, SubmissionQueue, UnmappedRing};
use super::parts::{MultiPartCommands, MultiPartStep};
use super::slot::{CommandSlots, SlotCommand, SlotPermit};
use super::translate::CommandTranslator;
use super::{CommandSet, LeasedBlocks, UntranslatedCommand};
use crate::host::{
    CompletionTaker, CompletionTiming, HostBatch, HostCompletion, HostMemory, ListMemory,
};
use crate::processor_time::{ProcessorTime, ProcessorTimeCharge};
use crate::shadow::TranslatedQueue;

/// Commands taken from one Submission Queue before the next queue gets its turn.
const BATCH_COMMANDS: u32 = 64;

/// Bytes after which a batch ends, so that small commands do not wait for large ones.
const BATCH_BYTES: u32 = 4 << 20;

/// `BATCH_BYTES` on a poller that also has queues of other functions.
const SHARED_BATCH_BYTES: u32 = 256 << 10;

/// Number of entries to prefetch ahead of the current one.
const PREFETCH: u32 = 8;

/// Operability of a shadow queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ShadowQueueCondition {
    Sound,
    /// Memory of the rings or doorbells is unmapped. The queue takes and posts nothing until it is mapped again.
    Suspended {
        gone: Gpa,
        since: Ticks,
    },
    /// The queue takes and posts nothing until it is deleted.
    Failed,
}

/// Kind of a queue's poll passes. Each kind is compiled separately, so that a cheaper kind has no checks of the other kinds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ShadowPassKind {
    /// Commands pass without extra work.
    Plain,
    /// In-flight tracking is written.
    Live,
    /// Other extra work is needed: the dirty log, limits of the lease, commands in parts or repeated, completions that wait
    /// for ring memory. In-flight tracking is written too, if there is any.
    Special,
}

/// State that all shadow queues of a guest controller share.
#[derive(Debug)]
pub(crate) struct QueueContext {
    pub(crate) doorbells: Arc<DoorbellPage>,
    /// State of the doorbells: untrapped while the guest may store to them without an exit.
    pub(crate) silence: UntrappedDoorbells,
    pub(crate) events: Arc<EventQueue>,
    pub(crate) tables: Arc<PublishedTable>,
    /// Limits of the lease.
    pub(crate) limiter: RateLimiter,
    /// Blocks of the lease. A queue adopts changed blocks together with the next table of the VM's memory.
    pub(crate) blocks: Mutex<Arc<LeasedBlocks>>,
    /// In-flight tracking, if the queues may outlive this process.
    pub(crate) live: Option<Arc<InflightFile>>,
    /// Counters of commands that completed with an error.
    pub(crate) errors: StatusCounters,
    /// Processor time of the pollers.
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
    /// Dropped first: the drop waits for in-flight commands, which use memory that the core keeps.
    host: HostQueuePair,
    core: ShadowCore,
    /// Processor time spent on the queue by its poller.
    bill: ProcessorTimeCharge,
    /// Crash record for work on the queue, if the queue may outlive this process.
    crashes: Option<CrashRecord>,
    /// Dropped last: the lease must outlive its commands.
    lease: LeaseGuard,
}

/// Value that holds a lease until it is dropped.
type LeaseGuard = Arc<dyn Any + Send + Sync>;

/// Host controller's end of a shadow queue.
#[derive(Debug)]
pub(crate) struct HostQueueParts {
    pub(crate) queue: HostQueuePair,
    /// Number of slots.
    pub(crate) slots: u16,
    /// Memory for PRP lists and SGLs, one list per slot.
    pub(crate) lists: ListMemory,
    /// Limits of the host controller.
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
    /// Record of positions and in-flight commands, if the queue may outlive this process.
    live: Option<InflightQueue>,
    sqs: Vec<SubmissionQueue>,
    slots: CommandSlots,
    translator: CommandTranslator,
    parts: MultiPartCommands,
    /// Bytes after which a batch ends.
    batch_bytes: u32,
    generation: u64,
    departures: UnmapsInUse,
    lost_epoch: usize,
    stopped: bool,
    /// True if the queue's commands start no further step.
    is_cut_short: bool,
    condition: ShadowQueueCondition,
    /// Completions that wait for the ring's memory to be mapped again.
    held: Vec<(Cqe, CompletionCredit)>,
    /// In-flight commands of the old server that must be executed again.
    repeats: Vec<RepeatedCommand>,
    passes: ShadowPassKind,
    /// True if written pages are noted in the dirty log.
    is_logged: bool,
    /// True if the lease has limits.
    is_limited: bool,
    /// Time until which commands wait for the lease's limits; `None` if none waits.
    rests_until: Option<Ticks>,
    /// Time since which commands wait for the lease's limits; `None` if none waits.
    throttled_since: Option<Ticks>,
    /// `None` while the queue is paused. Dropped last, after all references to the VM's memory.
    table_use: Option<TableUse>,
}

impl ShadowQueue {
    /// Creates a shadow queue without Submission Queues. `id` identifies it among the pollers' queues. `host.lists` has
    /// [`PART_LISTS`](super::parts::PART_LISTS) lists in addition to those of the slots.
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
        let live = context.live.as_ref();
        let crashes = live.and_then(|live| live.crashes());
        let live = live.and_then(|live| live.queue(cq.qid));
        let bill = ProcessorTimeCharge::new(context.processor_time.clone());
        let mut core = ShadowCore {
            id,
            live,
            context,
            buffer,
            cq,
            sqs: Vec::new(),
            slots: CommandSlots::new(slots),
            translator: CommandTranslator::new(table, lists, blocks, limits),
            parts,
            batch_bytes: BATCH_BYTES,
            generation,
            departures: UnmapsInUse::default(),
            // The first poll checks for memory lost before the queue existed too.
            lost_epoch: lost_memory_epoch().wrapping_sub(1),
            stopped: false,
            is_cut_short: false,
            condition: ShadowQueueCondition::Sound,
            held: Vec::with_capacity(usize::from(slots)),
            repeats: Vec::new(),
            passes: ShadowPassKind::Plain,
            is_logged: false,
            is_limited: false,
            rests_until: None,
            throttled_since: None,
            table_use: Some(table_use),
        };
        core.follow_table();
        Self {
            host,
            core,
            bill,
            crashes,
            lease,
        }
    }

    /// Returns the identifier of the queue among the pollers' queues.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.core.id
    }

    /// Returns the account of the poller's time for this queue.
    #[inline]
    pub(crate) fn bill(&self) -> &ProcessorTimeCharge {
        &self.bill
    }

    /// Returns the account of [`Self::bill`] for charging.
    #[inline]
    pub(crate) fn bill_mut(&mut self) -> &mut ProcessorTimeCharge {
        &mut self.bill
    }

    /// Returns the identifier of the guest's Completion Queue.
    #[must_use]
    pub fn cqid(&self) -> QueueId {
        self.core.cq.qid
    }

    /// Initializes the in-flight tracking of a new queue, if there is any.
    pub(crate) fn begin(&self) {
        if let Some(live) = &self.core.live {
            live.begin(&self.core.cq.indices);
        }
    }

    /// Adds a Submission Queue that completes to this queue.
    pub(crate) fn add_sq(&mut self, sq: SubmissionQueue) {
        self.core.sqs.push(sq);
    }

    /// Removes a Submission Queue. No poller may have the shadow queue, so no command of it is in flight.
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

    /// Takes commands, and posts completions. Returns whether there was any work.
    #[inline]
    pub fn poll(&mut self) -> bool {
        let Self {
            host,
            core,
            crashes,
            ..
        } = self;
        recorded(crashes.as_ref(), || host.poll(core))
    }

    /// Asks the guest to notify the next doorbell write, before the poller parks.
    pub fn arm(&mut self) {
        recorded(self.crashes.as_ref(), || self.core.arm());
    }

    /// Checks for work once more after [`Self::arm`]. Returns whether there is any.
    pub fn look_again(&mut self) -> bool {
        recorded(self.crashes.as_ref(), || self.core.look_again())
    }

    /// Returns whether work can arrive without waking a sleeping poller: by an untrapped doorbell write of the guest, or by a
    /// completion of a polled drive.
    #[must_use]
    pub fn is_silent(&self) -> bool {
        self.has_silent_work()
            || match self.core.condition {
                ShadowQueueCondition::Sound => self.core.context.silence.may_be(),
                ShadowQueueCondition::Suspended { .. } | ShadowQueueCondition::Failed => false,
            }
    }

    /// Returns whether something is pending whose end wakes no sleeping poller: commands at a polled drive, or a suspension
    /// that ends after a timeout.
    #[must_use]
    pub fn has_silent_work(&self) -> bool {
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
        // A queue that is not sound posts nothing, so it settles no interrupt either.
        let held = self.core.cq.gate.due().filter(|_| self.core.is_sound());
        let due = [self.host.next_due(), held];
        due.into_iter().flatten().min()
    }

    /// Returns the time until which commands wait for the limits of their lease; `None` if none waits.
    #[must_use]
    pub fn rests_until(&self) -> Option<Ticks> {
        self.core.rests_until
    }

    /// Sets whether the poller has queues of other functions too.
    pub(crate) fn share_poller(&mut self, is_shared: bool) {
        self.core.batch_bytes = if is_shared {
            SHARED_BATCH_BYTES
        } else {
            BATCH_BYTES
        };
    }

    /// Stops taking commands.
    pub fn stop(&mut self) {
        self.core.stopped = true;
        self.host.hurry(true);
    }

    /// Lets in-flight commands start no further step, because the queue is about to be deleted. The commands end as described
    /// at [`HostQueue::cut_short`].
    pub(crate) fn cut_short(&mut self) {
        self.core.is_cut_short = true;
        self.host.cut_short();
        self.core.parts.cut_short();
        self.core.repeats.clear();
    }

    /// Takes commands again.
    pub(crate) fn resume(&mut self) {
        self.core.stopped = false;
        self.host.hurry(false);
    }

    /// Returns whether the host controller has no command of this queue.
    #[must_use]
    pub fn is_drained(&self) -> bool {
        self.core.slots.in_flight() == 0 && self.core.repeats.is_empty()
    }
}

impl Drop for ShadowQueue {
    fn drop(&mut self) {
        if !self.host.settle() {
            // Commands that the drive keeps may still access the VM's memory and the leased blocks. Neither may be reused.
            let table = self.core.translator.table().clone();
            let departures = std::mem::take(&mut self.core.departures);
            keep_for_good((table, departures, self.lease.clone()));
        }
    }
}

impl ShadowCore {
    #[inline]
    pub(crate) fn poll<H: TranslatedQueue>(&mut self, host: &mut H) -> bool {
        if !self.context.tables.is_newest(self.generation) {
            self.take_up_table();
        }
        if lost_memory_epoch() != self.lost_epoch {
            self.check_lost_memory();
        }
        match self.passes {
            // Plain and live passes require a sound queue and do not check its condition.
            _ if !self.is_sound() => self.special_pass(host),
            ShadowPassKind::Plain => self.pass::<H, false, false>(host),
            ShadowPassKind::Live => self.live_pass(host),
            ShadowPassKind::Special => self.special_pass(host),
        }
    }

    #[inline(never)]
    fn live_pass<H: TranslatedQueue>(&mut self, host: &mut H) -> bool {
        self.pass::<H, false, true>(host)
    }

    #[cold]
    #[inline(never)]
    fn special_pass<H: TranslatedQueue>(&mut self, host: &mut H) -> bool {
        let tail = self.cq.indices.tail().get();
        self.rests_until = None;
        let worked = self.pass::<H, true, true>(host);
        if !self.parts.are_some() && self.repeats.is_empty() && !self.slots.has_interrupted() {
            self.note_special();
        }
        if !self.is_logged {
            return worked;
        }
        if worked {
            self.note_pass(tail);
        } else {
            self.note_event_idx();
        }
        worked
    }

    #[inline]
    fn pass<H: TranslatedQueue, const SPECIAL: bool, const LIVE: bool>(
        &mut self,
        host: &mut H,
    ) -> bool {
        let mut worked = H::COMPLETES != CompletionTiming::AtOnce
            && self.slots.in_flight() > 0
            && self.reap::<H, SPECIAL, LIVE>(host);
        let sound = !SPECIAL || self.is_sound();
        let mut rung = SPECIAL && self.submit_parts::<H>(host);
        if SPECIAL && self.slots.has_interrupted() {
            rung |= self.submit_interrupted::<H>(host);
        }
        if SPECIAL && sound && !self.repeats.is_empty() {
            rung |= self.submit_repeats::<H>(host);
        }
        if sound && !self.stopped {
            let mut batch = host.batch();
            let mut taken = false;
            for index in 0..self.sqs.len() {
                // By count of instructions: a drive that completes later has more code around both loops, which exceeds the
                // processor's registers.
                taken |= match H::COMPLETES {
                    CompletionTiming::Later => {
                        self.take_apart::<H, SPECIAL, LIVE>(index, &mut batch)
                    }
                    _ => self.take::<H, SPECIAL, LIVE>(index, &mut batch),
                };
            }
            if taken {
                batch.ring(self.translator.memory());
                rung = true;
            }
        }
        if rung || host.puts_off() {
            if H::COMPLETES != CompletionTiming::Later {
                self.reap::<H, SPECIAL, LIVE>(host);
            }
            worked = true;
        }
        if host.has_failed() {
            self.fail(QueueFailure::HostQueue);
        }
        // If the queue is not sound, the guest's memory may be unmapped, including the doorbell.
        if sound && self.cq.gate.is_owed() {
            self.settle_interrupt();
        }
        if !sound {
            self.end_suspension();
        }
        worked
    }

    /// Calls [`Self::take`] as a separate, not inlined function.
    #[inline(never)]
    fn take_apart<H: TranslatedQueue, const SPECIAL: bool, const LIVE: bool>(
        &mut self,
        index: usize,
        batch: &mut impl HostBatch,
    ) -> bool {
        self.take::<H, SPECIAL, LIVE>(index, batch)
    }

    /// Takes commands from one Submission Queue and submits them. Returns whether there were commands.
    #[inline(always)]
    fn take<H: TranslatedQueue, const SPECIAL: bool, const LIVE: bool>(
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
        // The head is read at least once per half round, so that its EventIdx stays behind it.
        if self.cq.indices.room() < available.max(self.cq.entries() / 2) {
            self.look_at_head();
        }
        let slots = self.slots.free() as u32;
        let mut most = available.min(slots).min(BATCH_COMMANDS);
        if SPECIAL {
            most = most.min(self.allowance());
        }
        let mut rooms = self.cq.indices.reserve_up_to(most);
        let count = rooms.count();
        if count == 0 {
            return false;
        }
        let Self {
            cq,
            live,
            sqs,
            slots,
            translator,
            parts,
            passes,
            context,
            batch_bytes,
            ..
        } = self;
        let live = live.as_ref().filter(|_| LIVE);
        if LIVE && !SPECIAL && live.is_none() {
            // A live pass has in-flight tracking. This check spares one per command.
            debug_assert!(live.is_some(), "a live pass without live state");
            return false;
        }
        let Some(sq) = sqs.get_mut(index) else {
            return false;
        };
        for ahead in 0..count.min(PREFETCH) {
            sq.ring.prefetch(sq.head.get() + ahead);
        }
        let first = sq.head;
        let mut mark = match &mut sq.live {
            Some(live) if LIVE => live.begin_batch(first),
            _ => InflightMark::default(),
        };
        let taken = Ticks::now();
        batch.announce(count, taken);
        cq.gate.taken(taken);
        // A batch continues while it has fewer bytes than `batch_bytes`.
        let mut bytes_left = *batch_bytes - 1;
        let mut last_bytes = 0;
        // The count above ensures a free slot for each command.
        while let Some(mut permit) = slots.reserve()
            && let Some(room) = rooms.split_off()
        {
            let (number, host) = permit.host();
            let guest = sq.ring.read_ahead(sq.head.get(), PREFETCH);
            if let Some(live) = live {
                live.record(number, &guest, mark);
                mark = mark.next();
            }
            sq.head.advance();
            match H::Commands::translate(translator, &guest, number, host) {
                Ok(transfer) => {
                    let command = SlotCommand {
                        room,
                        cdw0: guest.cdw0,
                        sq: index as u16,
                        bytes: transfer,
                        slba: H::Commands::named_lba(&guest),
                        taken,
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
                        taken,
                    };
                    let bytes = not_one_command::<H>(
                        error,
                        arrival,
                        ReservedSlot { permit, room },
                        GuestQueues { context, cq, sq },
                        InflightRecord { live, next: mark },
                        SubmissionPath {
                            translator,
                            parts,
                            passes,
                        },
                    );
                    bytes_left = bytes_left.saturating_sub(bytes);
                }
            }
        }
        if LIVE && let Some(live) = &mut sq.live {
            live.store(sq.head, mark);
        }
        sq.follow_head();
        cq.indices.give_back(rooms);
        cq.counters.in_flight.set(slots.in_flight() as u64);
        sq.doorbell.keep_quiet(sq.head.get());
        if SPECIAL {
            let commands = sq.head.size().distance(first.get(), sq.head.get());
            let bytes = u64::from(*batch_bytes - 1 - bytes_left) + u64::from(last_bytes);
            context.limiter.charge(commands, bytes, taken);
        }
        true
    }

    /// Returns the number of commands that the limits of the lease allow now. If the number is 0, the queue takes no commands
    /// until the limits allow some.
    #[cold]
    fn allowance(&mut self) -> u32 {
        if !self.is_limited {
            return u32::MAX;
        }
        let now = Ticks::now();
        let limiter = &self.context.limiter;
        let allowance = limiter.allowance(now);
        if allowance == 0 {
            self.rests_until = Some(limiter.rest(now));
        }
        self.throttle(allowance == 0, now);
        allowance
    }

    /// Accounts the time in which commands wait for the limits of their lease.
    #[cold]
    fn throttle(&mut self, waits: bool, now: Ticks) {
        match (self.throttled_since, waits) {
            (None, true) => self.throttled_since = Some(now),
            (Some(since), false) => {
                self.cq.counters.throttled.add(now.since(since));
                self.throttled_since = None;
            }
            _ => {}
        }
    }

    /// Executes the next steps of commands in parts. Returns whether there were such steps.
    #[cold]
    #[inline(never)]
    fn submit_parts<H: TranslatedQueue>(&mut self, host: &mut H) -> bool {
        let gives_up = self.condition == ShadowQueueCondition::Failed;
        if !self.parts.are_some() {
            return false;
        }
        let now = Ticks::now();
        let mut worked = false;
        for _ in 0..BATCH_COMMANDS {
            let (slots, translator) = (&self.slots, &mut self.translator);
            match self.parts.next(slots, translator, now, gives_up) {
                Some(MultiPartStep::Submit(part)) => {
                    let mut batch = host.batch();
                    batch.announce(1, now);
                    batch.submit(&part);
                    batch.ring(self.translator.memory());
                }
                Some(MultiPartStep::End(slot, status)) => {
                    self.post::<H, true, true>(|_, mut posting| {
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
        self.post::<H, SPECIAL, LIVE>(|memory, posting| host.reap(memory, posting))
    }

    /// Posts the completions that `give` delivers. Returns whether there were completions.
    #[inline(always)]
    fn post<H: TranslatedQueue, const SPECIAL: bool, const LIVE: bool>(
        &mut self,
        give: impl FnOnce(HostMemory<'_>, &mut CompletionPoster<'_, H, SPECIAL, LIVE>),
    ) -> bool {
        let Self {
            cq,
            live,
            sqs,
            slots,
            translator,
            context,
            condition,
            held,
            departures,
            parts,
            passes,
            is_logged,
            is_cut_short,
            ..
        } = self;
        let live = live.as_ref().filter(|_| LIVE);
        if LIVE && !SPECIAL && live.is_none() {
            // As in `take`.
            debug_assert!(live.is_some(), "a live pass without live state");
            return false;
        }
        let tail = cq.indices.tail();
        let mut posting = CompletionPoster::<H, SPECIAL, LIVE> {
            kind: PhantomData,
            cq,
            live,
            sqs,
            slots,
            context,
            condition: *condition,
            held,
            translator,
            departures,
            parts,
            passes,
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
            && (!SPECIAL || *condition == ShadowQueueCondition::Sound)
            && let Some(live) = live
        {
            live.store_tail(cq.indices.tail(), false);
        }
        if LIVE {
            sqs.iter_mut().for_each(SubmissionQueue::record_counts);
        }
        cq.gate.post(completed, now);
        if self.departures.have_ended() {
            self.departures.let_go(self.table_use.as_ref());
        }
        true
    }

    /// Reads the head up to which the guest has consumed entries.
    #[inline]
    fn look_at_head(&mut self) {
        let (events, live) = (&self.context.events, self.live.as_ref());
        self.cq.look_at_head(events, live);
    }

    fn settle_interrupt(&mut self) {
        if self.cq.gate.pin().is_some() {
            return self.settle_pin();
        }
        self.look_at_head();
        let standing = self.standing();
        if self.cq.gate.settle(standing, Ticks::now()) {
            self.cq.counters.interrupts.add(1);
        }
    }

    /// Settles the interrupt as [`Self::settle_interrupt`] does, if it is the INTx pin.
    #[cold]
    #[inline(never)]
    fn settle_pin(&mut self) {
        let Some((epoch, by_access)) = self
            .cq
            .gate
            .pin()
            .map(|pin| (pin.epoch(), pin.falls_by_access()))
        else {
            return;
        };
        self.look_at_head();
        // The level falls only when the guest writes the register, so EventIdx must ask for that write. If the guest moved the
        // head before it could see the new EventIdx, the head is read again. The loop ends, as the guest consumes entries each
        // time.
        while by_access && !self.cq.doorbell.is_armed(self.cq.indices.head().get()) {
            self.cq.doorbell.arm(self.cq.indices.head().get());
            self.look_at_head();
        }
        let standing = self.standing();
        if self.cq.gate.settle_pin(standing, Ticks::now(), epoch) {
            self.cq.counters.interrupts.add(1);
        }
    }

    /// Returns the guest's outstanding commands and completions.
    #[inline]
    fn standing(&self) -> OutstandingCommands {
        OutstandingCommands {
            unconsumed: self.cq.indices.unconsumed(),
            in_flight: self.slots.in_flight() as u32,
        }
    }

    fn arm(&mut self) {
        if !self.is_sound() {
            return;
        }
        self.look_at_head();
        if self.cq.gate.pin().is_some() {
            self.settle_pin();
        } else {
            let standing = self.standing();
            if self.cq.gate.settle_for_sleep(standing, Ticks::now()) {
                self.cq.counters.interrupts.add(1);
            }
        }
        // A timer ends a rest, so the guest need not notify.
        if self.rests_until.is_none() {
            for sq in &mut self.sqs {
                sq.doorbell.arm(sq.head.get());
            }
        }
        if self.is_logged {
            self.note_event_idx();
        }
        let head = self.cq.indices.head().get();
        // Only a full queue waits for the guest to consume entries.
        if self.cq.indices.room() == 0 {
            self.cq.doorbell.arm(head);
        } else {
            self.cq.doorbell.begin(head);
        }
    }

    fn look_again(&mut self) -> bool {
        if !self.context.tables.is_newest(self.generation) || self.slots.has_interrupted() {
            return true;
        }
        if !self.is_sound() || self.stopped {
            return false;
        }
        self.look_at_head();
        let rests = self.rests_until.is_some_and(|end| Ticks::now() < end);
        if self.cq.indices.room() == 0 || self.slots.free() == 0 || rests {
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
    fn is_sound(&self) -> bool {
        self.condition == ShadowQueueCondition::Sound
    }

    /// Fails the queue permanently: it takes and posts nothing.
    #[cold]
    fn fail(&mut self, reason: QueueFailure) {
        if self.condition != ShadowQueueCondition::Failed {
            self.condition = ShadowQueueCondition::Failed;
            self.held.clear();
            self.repeats.clear();
            if let Some(live) = &self.live {
                live.store(&self.cq.indices, true);
            }
            self.context.events.report(IoQueueEvent::QueueFailed {
                qid: self.cq.qid,
                reason,
            });
        }
    }
}

/// Guest command as it was taken.
#[derive(Clone, Copy, Debug)]
struct FetchedCommand<'a> {
    command: &'a Sqe,
    /// Index of its Submission Queue.
    sq: u16,
    taken: Ticks,
}

/// Slot and completion entry reserved for a command.
struct ReservedSlot<'a> {
    permit: SlotPermit<'a>,
    room: CompletionCredit,
}

/// Guest queues of a command.
struct GuestQueues<'a> {
    context: &'a QueueContext,
    cq: &'a mut CompletionQueue,
    sq: &'a mut SubmissionQueue,
}

/// In-flight record of a command.
struct InflightRecord<'a> {
    live: Option<&'a InflightQueue>,
    /// Mark of the next command.
    next: InflightMark,
}

/// Parts of the queue that carry a command to the host controller.
struct SubmissionPath<'a> {
    translator: &'a mut CommandTranslator,
    parts: &'a mut MultiPartCommands,
    passes: &'a mut ShadowPassKind,
}

/// Completes a command that does not reach the host controller, or starts it in parts. Returns its data bytes if it was
/// started.
// Arguments beyond the register count go to the stack and cost time for each command of the batch.
#[cold]
#[inline(never)]
fn not_one_command<H: TranslatedQueue>(
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
        taken,
    } = arrival;
    let ReservedSlot { mut permit, room } = reserved;
    let SubmissionPath {
        translator,
        parts,
        passes,
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
                room,
                cdw0: guest.cdw0,
                sq: sq_index,
                bytes,
                slba: H::Commands::named_lba(guest),
                taken,
            });
            parts.begin(number, whole, translator.for_parts().lists);
            *passes = ShadowPassKind::Special;
            bytes
        }
        Err(failure) => {
            let GuestQueues { context, cq, sq } = queues;
            if let Some(head) = &mut sq.live {
                head.store(sq.head, record.next);
            }
            fail_command::<H>(context, cq, room, sq, &arrival, failure);
            if let Some(live) = record.live {
                live.clear(number);
                live.store_tail(cq.indices.tail(), false);
            }
            0
        }
    }
}

#[cfg(test)]
mod tests;
