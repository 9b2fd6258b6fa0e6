//! A shadow queue: one guest Completion Queue with its Submission Queues, bound to a host queue
//! pair. One poller runs it; per command it takes no lock, allocates nothing and makes no system
//! call.

mod dirty;
mod state;

use std::sync::Arc;
use std::time::Duration;

use self::dirty::WriteLog;
use super::lists::ListMemory;
use super::slot::{Slot, Slots};
use super::translate::Translator;
use super::{Failure, LeasedBlocks};
use crate::address::Gpa;
use crate::clock::{Ticks, nanoseconds};
use crate::dma::{RegionTable, TableUser, Tables};
use crate::doorbell::{DoorbellBuffer, DoorbellMode, DoorbellPage, DoorbellSource};
use crate::event::{ErrorEntry, Event, EventQueue, QueueFailure};
use crate::host::{
    CompletionTaker, HostBatch, HostCompletion, HostMemory, HostQueue, HostQueuePair, Limits,
};
use crate::interrupt::InterruptGate;
use crate::memory::{CompletionRing, SubmissionRing, lost_memory_epoch};
use crate::poller::Silence;
use crate::spec::cqe::Cqe;
use crate::spec::ids::QueueId;
use crate::spec::opcode::NvmOpcode;
use crate::spec::registers::Doorbell;
use crate::spec::sqe::Sqe;
use crate::spec::status::{Status, StatusCodeType};
use crate::stats::QueueCounters;

/// Commands taken from one Submission Queue before its neighbours get their turn.
const BATCH_COMMANDS: u32 = 64;

/// Bytes after which a batch ends, so that large commands do not make small ones wait.
const BATCH_BYTES: u64 = 4 << 20;

/// Entries that are fetched ahead of the one that is read.
const PREFETCH: u32 = 8;

/// How long the memory of a queue's rings may be gone before the queue fails. A VMM that changes the
/// map of its guest's memory takes a region away and brings it back at once, as firmware makes it do
/// when it write-protects itself with its disk driver's queues set up.
const SUSPENSION: Duration = Duration::from_secs(1);

/// Whether a shadow queue can go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Condition {
    Sound,
    /// Memory of its rings or doorbells is unmapped: it takes and posts nothing until it is back.
    Suspended {
        gone: Gpa,
        since: Ticks,
    },
    /// It takes and posts nothing any more.
    Failed,
}

/// What all shadow queues of a guest controller share.
#[derive(Debug)]
pub(crate) struct QueueContext {
    pub(crate) mode: DoorbellMode,
    pub(crate) doorbells: Arc<DoorbellPage>,
    /// Whether the guest may store to them without anybody being told.
    pub(crate) silence: Silence,
    pub(crate) events: Arc<EventQueue>,
    pub(crate) tables: Arc<Tables>,
}

/// A guest's Submission Queue.
#[derive(Debug)]
pub(crate) struct SubmissionQueue {
    qid: QueueId,
    base: Gpa,
    ring: SubmissionRing,
    entries: u32,
    head: u32,
    doorbell: DoorbellSource,
    /// The last value of the doorbell that was no index of the queue: reported, and ignored.
    bad_tail: Option<u32>,
    counters: Arc<QueueCounters>,
}

impl SubmissionQueue {
    /// `None` if its ring or its doorbell buffer does not lie in the VM's memory.
    pub(crate) fn new(
        (qid, base, entries): (QueueId, Gpa, u32),
        context: &QueueContext,
        buffer: Option<DoorbellBuffer>,
        counters: Arc<QueueCounters>,
    ) -> Option<Self> {
        let table = context.tables.current();
        let ring = submission_ring(&table, base, entries)?;
        let doorbell = Doorbell::SqTail(qid);
        let doorbell =
            DoorbellSource::new(&context.doorbells, doorbell, buffer, &table, (entries, 0))?;
        Some(Self {
            qid,
            base,
            ring,
            entries,
            head: 0,
            doorbell,
            bad_tail: None,
            counters,
        })
    }

    /// Entries that the guest has submitted and nobody has taken.
    #[inline]
    fn available(&mut self, events: &EventQueue) -> u32 {
        let tail = self.doorbell.load();
        if tail < self.entries {
            return if tail >= self.head {
                tail - self.head
            } else {
                tail + self.entries - self.head
            };
        }
        if self.bad_tail != Some(tail) {
            self.bad_tail = Some(tail);
            let doorbell = Doorbell::SqTail(self.qid);
            events.report(Event::InvalidDoorbell {
                doorbell,
                value: tail,
            });
        }
        0
    }

    #[inline]
    fn after(&self, index: u32) -> u32 {
        if index + 1 == self.entries {
            0
        } else {
            index + 1
        }
    }
}

/// A guest's Completion Queue.
#[derive(Debug)]
pub(crate) struct CompletionQueue {
    qid: QueueId,
    base: Gpa,
    ring: CompletionRing,
    entries: u32,
    tail: u32,
    phase: bool,
    /// How far the guest has consumed, as far as we looked.
    head: u32,
    /// Entries that neither wait for the guest nor are promised to a command in flight. A command
    /// is taken only against one of them, so a completion never finds the queue full.
    room: u32,
    doorbell: DoorbellSource,
    bad_head: Option<u32>,
    gate: InterruptGate,
    counters: Arc<QueueCounters>,
}

impl CompletionQueue {
    /// `None` if its ring or its doorbell buffer does not lie in the VM's memory.
    pub(crate) fn new(
        (qid, base, entries): (QueueId, Gpa, u32),
        context: &QueueContext,
        buffer: Option<DoorbellBuffer>,
        gate: InterruptGate,
        counters: Arc<QueueCounters>,
    ) -> Option<Self> {
        let table = context.tables.current();
        let ring = completion_ring(&table, base, entries)?;
        let doorbell = Doorbell::CqHead(qid);
        let doorbell =
            DoorbellSource::new(&context.doorbells, doorbell, buffer, &table, (entries, 0))?;
        Some(Self {
            qid,
            base,
            ring,
            entries,
            tail: 0,
            phase: true,
            head: 0,
            room: entries - 1,
            doorbell,
            bad_head: None,
            gate,
            counters,
        })
    }

    /// Entries that wait for the guest.
    #[inline]
    fn unconsumed(&self) -> u32 {
        if self.tail >= self.head {
            self.tail - self.head
        } else {
            self.tail + self.entries - self.head
        }
    }

    /// Looks how far the guest has consumed.
    fn look_at_head(&mut self, events: &EventQueue) {
        let head = self.doorbell.load();
        if head == self.head {
            return;
        }
        let advance = if head >= self.head {
            head - self.head
        } else {
            head.saturating_add(self.entries - self.head)
        };
        // The guest cannot have consumed what was not posted.
        if head >= self.entries || advance > self.unconsumed() {
            if self.bad_head != Some(head) {
                self.bad_head = Some(head);
                let doorbell = Doorbell::CqHead(self.qid);
                events.report(Event::InvalidDoorbell {
                    doorbell,
                    value: head,
                });
            }
            return;
        }
        self.head = head;
        self.room += advance;
        self.doorbell.keep_quiet(head);
    }

    #[inline]
    fn publish(&mut self, entry: Cqe) {
        self.ring.publish(self.tail, entry.with_phase(self.phase));
        self.tail += 1;
        if self.tail == self.entries {
            self.tail = 0;
            self.phase = !self.phase;
        }
    }
}

fn submission_ring(table: &RegionTable, base: Gpa, entries: u32) -> Option<SubmissionRing> {
    let (mapping, offset) = table.locate(base, u64::from(entries) * size_of::<Sqe>() as u64)?;
    SubmissionRing::new(mapping, offset, entries)
}

fn completion_ring(table: &RegionTable, base: Gpa, entries: u32) -> Option<CompletionRing> {
    let (mapping, offset) = table.locate(base, u64::from(entries) * size_of::<Cqe>() as u64)?;
    CompletionRing::new(mapping, offset, entries)
}

/// A shadow queue, as its poller sees it.
#[derive(Debug)]
pub struct ShadowQueue {
    /// Dropped first: it waits for what it has in flight, which uses memory that the core keeps.
    host: HostQueuePair,
    core: Core,
}

/// All of a shadow queue but its host queue, so that the two can be borrowed apart.
#[derive(Debug)]
struct Core {
    id: u64,
    context: Arc<QueueContext>,
    buffer: Option<DoorbellBuffer>,
    cq: CompletionQueue,
    sqs: Vec<SubmissionQueue>,
    slots: Slots,
    translator: Translator,
    /// The command that is being translated.
    command: Sqe,
    /// `None` while the queue rests.
    table_user: Option<Arc<TableUser>>,
    generation: u64,
    /// Tables that commands in flight were translated by, besides the current one.
    old_tables: Vec<Arc<RegionTable>>,
    lost_epoch: usize,
    stopped: bool,
    condition: Condition,
    /// Completions that wait for the memory of the ring to come back. Their room is reserved.
    held: Vec<Cqe>,
    /// What is written is noted.
    log: Option<Box<WriteLog>>,
}

impl ShadowQueue {
    /// A shadow queue without Submission Queues. `id` is its name among the pollers' queues.
    pub(crate) fn new(
        id: u64,
        context: Arc<QueueContext>,
        cq: CompletionQueue,
        buffer: Option<DoorbellBuffer>,
        (host, slots, lists): (HostQueuePair, u16, ListMemory),
        (blocks, limits): (LeasedBlocks, Limits),
        (table_user, table): (Arc<TableUser>, Arc<RegionTable>),
    ) -> Self {
        let generation = table.generation();
        let mut core = Core {
            id,
            context,
            buffer,
            cq,
            sqs: Vec::new(),
            slots: Slots::new(slots),
            translator: Translator::new(table, lists, blocks, limits),
            command: Sqe::default(),
            table_user: Some(table_user),
            generation,
            old_tables: Vec::new(),
            lost_epoch: lost_memory_epoch(),
            stopped: false,
            condition: Condition::Sound,
            held: Vec::with_capacity(usize::from(slots)),
            log: None,
        };
        core.follow_log();
        Self { host, core }
    }

    /// Its name among the pollers' queues.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.core.id
    }

    /// Its guest Completion Queue.
    #[must_use]
    pub fn cqid(&self) -> QueueId {
        self.core.cq.qid
    }

    /// Adds a Submission Queue that completes here.
    pub(crate) fn add_sq(&mut self, sq: SubmissionQueue) {
        self.core.sqs.push(sq);
    }

    /// Drops a Submission Queue. Nothing of it is in flight while no poller has the queue.
    pub(crate) fn remove_sq(&mut self, qid: QueueId) {
        self.core.sqs.retain(|sq| sq.qid != qid);
    }

    /// Fails every command from now on: there is no namespace any more that they could be for.
    pub(crate) fn revoke(&mut self) {
        self.core.translator.revoke();
    }

    /// Reads doorbells from another place from now on. Returns whether it lies in the VM's memory.
    pub(crate) fn set_doorbell_buffer(&mut self, buffer: Option<DoorbellBuffer>) -> bool {
        self.core.buffer = buffer;
        self.core.bind_memory().is_ok()
    }

    /// Takes commands, if there are any, and completes what is done. Returns whether there was
    /// anything to do.
    #[inline]
    pub fn poll(&mut self) -> bool {
        match &mut self.host {
            HostQueuePair::Null(host) => self.core.poll(host),
            HostQueuePair::Memory(host) => self.core.poll(host),
            HostQueuePair::File(host) => self.core.poll(host.as_mut()),
            HostQueuePair::Vfio(host) => self.core.poll(host.as_mut()),
            HostQueuePair::TimedNull(host) => self.core.poll(host.as_mut()),
            HostQueuePair::TimedMemory(host) => self.core.poll(host.as_mut()),
            HostQueuePair::TimedFile(host) => self.core.poll(host.as_mut()),
            HostQueuePair::Faulty(host) => self.core.poll(host.as_mut()),
        }
    }

    /// Asks the guest to notify us of its next doorbell write; before the poller parks.
    pub fn arm(&mut self) {
        self.core.arm();
    }

    /// Looks once more after [`Self::arm`]. Returns whether there is something to do.
    pub fn look_again(&mut self) -> bool {
        self.core.look_again()
    }

    /// Whether something can happen here that notifies nobody: a doorbell write of its guest, or a
    /// completion of a drive that is polled.
    #[must_use]
    pub fn is_silent(&self) -> bool {
        let polled = matches!(self.host, HostQueuePair::Vfio(_) | HostQueuePair::Faulty(_));
        if polled && !self.is_drained() {
            return true;
        }
        match self.core.condition {
            Condition::Sound => self.core.context.silence.may_be(),
            // Time has to pass for it.
            Condition::Suspended { .. } => true,
            Condition::Failed => false,
        }
    }

    /// Becomes readable when the host controller has completed something.
    #[must_use]
    pub fn wait_fd(&self) -> Option<std::os::fd::RawFd> {
        self.host.wait_fd()
    }

    /// A moment before which none of the commands completes that wait for nothing but their time;
    /// `None` if there are no such commands.
    #[must_use]
    pub fn next_due(&self) -> Option<Ticks> {
        self.host.next_due()
    }

    /// Takes no more commands.
    pub fn stop(&mut self) {
        self.core.stopped = true;
        self.host.hurry(true);
    }

    /// Takes commands again.
    pub(crate) fn resume(&mut self) {
        self.core.stopped = false;
        self.host.hurry(false);
    }

    /// Whether the host controller has none of its commands.
    #[must_use]
    pub fn is_drained(&self) -> bool {
        self.core.slots.in_flight() == 0
    }
}

impl Core {
    #[inline]
    fn poll<H: HostQueue>(&mut self, host: &mut H) -> bool {
        if self.context.tables.generation() != self.generation {
            self.take_up_table();
        }
        if lost_memory_epoch() != self.lost_epoch {
            self.check_lost_memory();
        }
        if self.log.is_none() {
            self.pass::<H, false>(host)
        } else {
            self.logged_pass(host)
        }
    }

    #[cold]
    #[inline(never)]
    fn logged_pass<H: HostQueue>(&mut self, host: &mut H) -> bool {
        let tail = self.cq.tail;
        let worked = self.pass::<H, true>(host);
        if worked {
            self.note_pass(tail);
        } else {
            self.note_event_idx();
        }
        worked
    }

    #[inline]
    fn pass<H: HostQueue, const LOG: bool>(&mut self, host: &mut H) -> bool {
        let mut worked = self.slots.in_flight() > 0 && self.reap::<H, LOG>(host);
        let sound = self.is_sound();
        if sound && !self.stopped {
            let mut batch = host.batch();
            let mut taken = false;
            for index in 0..self.sqs.len() {
                taken |= self.take::<LOG>(index, &mut batch);
            }
            if taken {
                batch.ring(self.translator.memory());
                if H::COMPLETES_AT_ONCE {
                    self.reap::<H, LOG>(host);
                }
                worked = true;
            }
        }
        if host.has_failed() {
            self.fail(QueueFailure::HostQueue);
        }
        // What a queue that is not sound has of the guest's memory may have been unmapped: the
        // doorbell, too.
        if sound && self.cq.gate.is_owed() {
            self.settle_interrupt();
        }
        if !sound {
            self.end_suspension();
        }
        worked
    }

    /// Takes commands of one Submission Queue and submits them. Returns whether there were any.
    #[inline]
    fn take<const LOG: bool>(&mut self, index: usize, batch: &mut impl HostBatch) -> bool {
        let sq = &mut self.sqs[index];
        let available = sq.available(&self.context.events);
        if available == 0 {
            return false;
        }
        // At least once per half round, so that its EventIdx stays behind it.
        if self.cq.room < available.max(self.cq.entries / 2) {
            self.cq.look_at_head(&self.context.events);
        }
        let slots = self.slots.free() as u32;
        let count = available.min(self.cq.room).min(slots).min(BATCH_COMMANDS);
        if count == 0 {
            return false;
        }
        let Self {
            cq,
            sqs,
            slots,
            translator,
            command,
            context,
            log,
            ..
        } = self;
        let Some(sq) = sqs.get_mut(index) else {
            return false;
        };
        for ahead in 0..count.min(PREFETCH) {
            sq.ring.prefetch(sq.head + ahead);
        }
        let taken = Ticks::now();
        batch.announce(count, taken);
        let mut bytes = 0;
        for _ in 0..count {
            // A slot is free for each of them, by the count above.
            let Some(number) = slots.next() else { break };
            let guest = sq.ring.read(sq.head);
            sq.ring.prefetch(sq.head + PREFETCH);
            sq.head = sq.after(sq.head);
            cq.room -= 1;
            match translator.translate(&guest, number, command) {
                Ok(transfer) => {
                    slots.occupy(Slot {
                        cid: guest.cid(),
                        sq: index as u16,
                        opcode: NvmOpcode(guest.opcode()),
                        busy: true,
                        stale: false,
                        bytes: transfer,
                        slba: guest.cdw10_11(),
                        taken,
                    });
                    if LOG && let Some(log) = log {
                        log.submitted(number, command);
                    }
                    batch.submit(command);
                    bytes += u64::from(transfer);
                    if bytes >= BATCH_BYTES {
                        break;
                    }
                }
                Err(failure) => fail_command(context, cq, sq, (&guest, taken), failure),
            }
        }
        sq.doorbell.keep_quiet(sq.head);
        true
    }

    /// Completes what the host controller has done. Returns whether there was anything.
    #[inline]
    fn reap<H: HostQueue, const LOG: bool>(&mut self, host: &mut H) -> bool {
        let Self {
            cq,
            sqs,
            slots,
            translator,
            context,
            condition,
            held,
            log,
            old_tables,
            ..
        } = self;
        let mut posting = Posting::<LOG> {
            cq,
            sqs,
            slots,
            context,
            condition: *condition,
            held,
            log,
            memory: translator.memory(),
            old_tables,
            completed: 0,
            now: Ticks::default(),
        };
        host.reap(translator.memory(), &mut posting);
        let Posting { completed, now, .. } = posting;
        if completed == 0 {
            return false;
        }
        cq.gate.post(completed, now);
        if !self.old_tables.is_empty() && self.slots.stale() == 0 {
            self.settle_table();
        }
        true
    }

    fn settle_interrupt(&mut self) {
        self.cq.look_at_head(&self.context.events);
        if self.cq.gate.settle(self.cq.unconsumed(), Ticks::now()) {
            self.cq.counters.interrupts.add(1);
        }
    }

    fn arm(&mut self) {
        if !self.is_sound() {
            return;
        }
        self.cq.look_at_head(&self.context.events);
        if self.cq.gate.settle_now(self.cq.unconsumed()) {
            self.cq.counters.interrupts.add(1);
        }
        for sq in &mut self.sqs {
            sq.doorbell.arm(sq.head);
        }
        if self.log.is_some() {
            self.note_event_idx();
        }
        // Only a full queue waits for the guest to consume.
        if self.cq.room == 0 {
            self.cq.doorbell.arm(self.cq.head);
        }
    }

    fn look_again(&mut self) -> bool {
        if self.context.tables.generation() != self.generation {
            return true;
        }
        if !self.is_sound() || self.stopped {
            return false;
        }
        self.cq.look_at_head(&self.context.events);
        if self.cq.room == 0 || self.slots.free() == 0 {
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

    /// Takes up the newest snapshot of the VM's memory.
    #[cold]
    fn take_up_table(&mut self) {
        let table = self.context.tables.current();
        self.generation = table.generation();
        let old = self.translator.set_table(table);
        self.slots.make_stale();
        self.follow_log();
        let tail = self.cq.tail;
        self.rebind();
        if self.log.is_some() {
            // Completions that were held, and EventIdx at its new place.
            self.note_pass(tail);
        }
        // Memory that commands in flight use stays mapped until they are done.
        self.old_tables.push(old);
        if self.slots.stale() == 0 {
            self.settle_table();
        }
    }

    #[inline]
    fn is_sound(&self) -> bool {
        self.condition == Condition::Sound
    }

    /// The memory of the rings is back: what was held is posted.
    fn resume_posting(&mut self) {
        self.condition = Condition::Sound;
        let Self { cq, held, .. } = self;
        let count = held.len() as u32;
        for entry in held.drain(..) {
            cq.publish(entry);
        }
        cq.gate.post(count, Ticks::now());
    }

    /// A suspension that lasts is no change of the memory map any more.
    #[cold]
    fn end_suspension(&mut self) {
        if let Condition::Suspended { gone, since } = self.condition
            && nanoseconds(Ticks::now().since(since)) > SUSPENSION.as_nanos() as u64
        {
            self.fail(QueueFailure::RingUnmapped(gone));
        }
    }

    #[cold]
    fn settle_table(&mut self) {
        self.old_tables.clear();
        if let Some(user) = &self.table_user {
            user.settle(self.generation);
        }
    }

    /// Finds rings and doorbells in the current snapshot. On failure, returns what is gone.
    fn bind_memory(&mut self) -> Result<(), Gpa> {
        let table = self.translator.table().clone();
        let page = &self.context.doorbells;
        let cq = &mut self.cq;
        cq.ring = completion_ring(&table, cq.base, cq.entries).ok_or(cq.base)?;
        let buffer_base = self.buffer.map_or(Gpa(0), |buffer| buffer.shadow);
        let source = |doorbell, entries, seen| {
            DoorbellSource::new(page, doorbell, self.buffer, &table, (entries, seen))
                .ok_or(buffer_base)
        };
        cq.doorbell = source(Doorbell::CqHead(cq.qid), cq.entries, cq.head)?;
        for sq in &mut self.sqs {
            sq.ring = submission_ring(&table, sq.base, sq.entries).ok_or(sq.base)?;
            sq.doorbell = source(Doorbell::SqTail(sq.qid), sq.entries, sq.head)?;
        }
        Ok(())
    }

    #[cold]
    fn check_lost_memory(&mut self) {
        self.lost_epoch = lost_memory_epoch();
        if self.translator.table().is_lost() {
            self.fail(QueueFailure::MemoryLost);
        }
    }

    /// The queue cannot go on: it takes nothing more and posts nothing more.
    #[cold]
    fn fail(&mut self, reason: QueueFailure) {
        if self.condition != Condition::Failed {
            self.condition = Condition::Failed;
            self.held.clear();
            self.context.events.report(Event::QueueFailed {
                qid: self.cq.qid,
                reason,
            });
        }
    }
}

/// Gives the guest its completions.
struct Posting<'a, const LOG: bool> {
    cq: &'a mut CompletionQueue,
    sqs: &'a [SubmissionQueue],
    slots: &'a mut Slots,
    context: &'a QueueContext,
    condition: Condition,
    held: &'a mut Vec<Cqe>,
    log: &'a mut Option<Box<WriteLog>>,
    memory: HostMemory<'a>,
    old_tables: &'a [Arc<RegionTable>],
    /// How many there were.
    completed: u32,
    /// When the first of them was posted.
    now: Ticks,
}

impl<const LOG: bool> CompletionTaker for &mut Posting<'_, LOG> {
    #[inline(always)]
    fn take(&mut self, completion: HostCompletion) {
        // A number that no command in flight has is a completion that came too late.
        let Some(slot) = self.slots.release(completion.slot) else {
            return;
        };
        self.completed += 1;
        if LOG && let Some(log) = self.log.as_mut() {
            log.completed(completion.slot, slot, self.memory, self.old_tables);
        }
        let Some(sq) = self.sqs.get(usize::from(slot.sq)) else {
            return;
        };
        if self.condition == Condition::Failed {
            return;
        }
        if !completion.status.is_success() {
            // Before the guest sees the completion and asks for the error log.
            report_failure(self.context, sq, slot, completion.status);
        }
        let HostCompletion { status, dw0, .. } = completion;
        let entry = Cqe::new(sq.qid, sq.head as u16, slot.cid, status, dw0, 0);
        if self.condition == Condition::Sound {
            self.cq.publish(entry);
        } else {
            self.held.push(entry);
        }
        // The guest has its completion; what follows nobody waits for.
        if self.completed == 1 {
            self.now = Ticks::now();
        }
        count(&sq.counters, slot, self.now);
    }
}

/// Completes a command that does not reach the host controller.
#[cold]
fn fail_command(
    context: &QueueContext,
    cq: &mut CompletionQueue,
    sq: &SubmissionQueue,
    (guest, taken): (&Sqe, Ticks),
    failure: Failure,
) {
    sq.counters.commands.add(1);
    sq.counters.errors.add(1);
    context.events.report(Event::CommandFailed(ErrorEntry {
        sqid: sq.qid,
        cid: guest.cid(),
        status: failure.status(),
        lba: guest.cdw10_11(),
        nsid: guest.nsid,
        parameter_location: failure.location(),
    }));
    let entry = Cqe::new(sq.qid, sq.head as u16, guest.cid(), failure.status(), 0, 0);
    cq.publish(entry);
    cq.gate.post(1, taken);
}

#[inline]
fn count(counters: &QueueCounters, slot: &Slot, now: Ticks) {
    counters.commands.add(1);
    match slot.opcode {
        NvmOpcode::READ => {
            counters.reads.add(1);
            counters.read_bytes.add(u64::from(slot.bytes));
        }
        NvmOpcode::WRITE => {
            counters.writes.add(1);
            counters.write_bytes.add(u64::from(slot.bytes));
        }
        _ => {}
    }
    counters.latency.record(now.since(slot.taken));
}

#[cold]
fn report_failure(context: &QueueContext, sq: &SubmissionQueue, slot: &Slot, status: Status) {
    sq.counters.errors.add(1);
    if status.sct() == StatusCodeType::MEDIA {
        sq.counters.media_errors.add(1);
    }
    context.events.report(Event::CommandFailed(ErrorEntry {
        sqid: sq.qid,
        cid: slot.cid,
        status,
        lba: slot.slba,
        nsid: crate::attachment::GUEST_NSID,
        parameter_location: 0xFFFF,
    }));
}
