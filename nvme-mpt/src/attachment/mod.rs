//! Attachments: all that one guest controller holds of a drive.
//!
//! What goes in is plain: guest addresses, eventfds, numbers. What an attachment knows of queues is
//! which exist and where they lie; what they are doing is known to their poller alone.
//!
//! Lock order: `queues`, then those of the pollers and of the DMA window. None is taken on the way
//! of an I/O.

mod config;
mod error;
mod wakers;

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use log::{error, info};
use serde::{Deserialize, Serialize};
use vmm_sys_util::eventfd::EventFd;

pub use config::{AttachmentConfig, CqConfig, LeasedNamespace, SqConfig};
pub use error::{AttachError, QueueError};
pub use wakers::DoorbellWaker;

use crate::address::Gpa;
use crate::dma::DmaWindow;
use crate::doorbell::{DoorbellBuffer, DoorbellMode, DoorbellPage};
use crate::drive::Drive;
use crate::event::EventQueue;
use crate::host::vfio::pair::Pair;
use crate::host::{HostNamespace, Limits};
use crate::interrupt::{Coalescing, InterruptGate};
use crate::lease::Lease;
use crate::poller::{DoorbellWatch, PollPolicy, Poller, Pollers};
use crate::range_lock::RangeLock;
use crate::shadow::{
    CompletionQueue, LeasedBlocks, ListMemory, QueueContext, ShadowQueue, SubmissionQueue,
};
use crate::spec::cqe::Cqe;
use crate::spec::ids::{Nsid, QueueId};
use crate::spec::registers::Doorbell;
use crate::spec::sqe::Sqe;
use crate::stats::{Counters, HostQueueUse, QueueCounters, QueueStats};

/// The namespace that every guest sees its lease as.
pub const GUEST_NSID: Nsid = Nsid(1);

/// I/O queue pairs that a guest controller can have at most.
pub const MAX_QUEUE_PAIRS: u16 = 64;

/// Submission Queues that may share one Completion Queue are bounded by the queues there are; their
/// commands in flight, by this.
const MAX_SLOTS: u16 = 1024;

/// How long a queue is waited for until it has nothing in flight.
const DRAIN_DEADLINE: Duration = Duration::from_secs(30);

/// A Completion Queue that exists, with its Submission Queues.
#[derive(Debug)]
struct QueueEntry {
    /// Name of the shadow queue among the pollers'.
    id: u64,
    poller: Arc<Poller>,
    /// The drive's queue pair behind it, if it has a limited number of them.
    pair: Option<Pair>,
    sqs: Vec<QueueId>,
}

impl QueueEntry {
    fn host_queue(&self) -> Option<HostQueueUse> {
        let pair = self.pair.as_ref()?;
        Some(match pair.members() {
            0 | 1 => HostQueueUse::Exclusive,
            _ => HostQueueUse::Shared,
        })
    }
}

#[derive(Debug, Default)]
struct Queues {
    /// By the identifier of the Completion Queue.
    cqs: BTreeMap<u16, QueueEntry>,
    buffer: Option<DoorbellBuffer>,
    /// Until the next reset, no I/O command is carried out: its blocks are not what they were.
    revoked: bool,
    /// Who watches the admin queue's mapped doorbells, and under which name.
    watch: Option<(u64, Arc<Poller>)>,
}

impl Queues {
    fn cq_of_sq(&self, sqid: QueueId) -> Option<u16> {
        self.cqs
            .iter()
            .find(|(_, entry)| entry.sqs.contains(&sqid))
            .map(|(cqid, _)| *cqid)
    }
}

/// All that one guest controller holds of a drive: a lease, a DMA window, doorbells, queues.
#[derive(Debug)]
pub struct Attachment {
    drive: Arc<Drive>,
    lease: Lease,
    _claim: Option<RangeLock>,
    namespace: LeasedNamespace,
    queue_pairs: u16,
    poll: PollPolicy,
    pollers: Arc<Pollers>,
    window: DmaWindow,
    context: Arc<QueueContext>,
    coalescing: Arc<Coalescing>,
    /// Index 0 is queue 1.
    counters: Vec<Arc<QueueCounters>>,
    queues: Mutex<Queues>,
}

/// Names of shadow queues and watches among the pollers'.
static NEXT_ID: AtomicU64 = AtomicU64::new(0);

fn next_id() -> u64 {
    NEXT_ID.fetch_add(1, Ordering::Relaxed)
}

impl Attachment {
    /// Attaches to a lease of a drive.
    ///
    /// # Errors
    /// See [`AttachError`].
    pub fn new(config: AttachmentConfig) -> Result<Self, AttachError> {
        let AttachmentConfig {
            drive,
            lease,
            queue_pairs,
            doorbells,
            poll,
            pollers,
            serial,
        } = config;
        if queue_pairs == 0 || queue_pairs > MAX_QUEUE_PAIRS {
            return Err(AttachError::InvalidQueuePairs(queue_pairs));
        }
        let identity = lease.identity();
        let serial = match serial {
            Some(serial) => {
                let fits = (1..=20).contains(&serial.len());
                if !fits || !serial.bytes().all(|byte| (0x20..0x7F).contains(&byte)) {
                    return Err(AttachError::InvalidSerial(serial));
                }
                serial
            }
            None => identity.serial,
        };
        let namespace = LeasedNamespace {
            nsid: GUEST_NSID,
            lba_shift: drive.lba_shift(),
            blocks: lease.range().blocks,
            serial,
            model: drive.controller().model().to_owned(),
            nguid: identity.nguid,
            eui64: identity.eui64,
            uuid: identity.uuid,
        };
        let range = lease.bytes();
        let claim = drive
            .controller()
            .claim(range.start(), range.length())
            .map_err(|error| match error.kind() {
                io::ErrorKind::WouldBlock => AttachError::InUse {
                    drive: drive.path().to_string(),
                    range,
                },
                _ => AttachError::Io(error),
            })?;
        let window = DmaWindow::new(drive.controller().iova_space().clone());
        let events = Arc::new(EventQueue::new()?);
        drive.controller().subscribe(&events);
        let context = Arc::new(QueueContext {
            mode: doorbells,
            doorbells: Arc::new(DoorbellPage::new(doorbells, queue_pairs)?),
            events,
            tables: window.tables().clone(),
        });
        Ok(Self {
            drive,
            lease,
            _claim: claim,
            namespace,
            queue_pairs,
            poll,
            pollers,
            window,
            context,
            coalescing: Arc::default(),
            counters: std::iter::repeat_with(Arc::default)
                .take(queue_pairs.into())
                .collect(),
            queues: Mutex::default(),
        })
    }

    /// The drive.
    #[must_use]
    pub fn drive(&self) -> &Arc<Drive> {
        &self.drive
    }

    /// Whether the leased blocks are there: the drive is, and its namespace still has them.
    ///
    /// A namespace can be formatted, resized or detached by whoever manages the drive. With other
    /// blocks the same LBAs are other bytes, and the same commands other lengths.
    #[must_use]
    pub fn is_backed(&self) -> bool {
        !self.queues().revoked && self.has_blocks()
    }

    fn has_blocks(&self) -> bool {
        let controller = self.drive.controller();
        let range = self.lease.range();
        let fits = |namespace: &HostNamespace| {
            namespace.nsid == self.lease.nsid()
                && namespace.lba_shift == self.namespace.lba_shift
                && range.start.0 + range.blocks <= namespace.blocks
        };
        !controller.incidents().gone && controller.namespaces().iter().any(fits)
    }

    /// Has every I/O command fail that is not taken yet, until the next reset.
    ///
    /// # Errors
    /// [`QueueError::Timeout`] if commands in flight do not finish; then their queue takes no more.
    pub fn revoke(&self) -> Result<(), QueueError> {
        let mut queues = self.queues();
        queues.revoked = true;
        let mut result = Ok(());
        for cqid in queues.cqs.keys().copied() {
            // All of them, also after one that does not finish.
            let revoked = self.change(&queues, QueueId(cqid), ShadowQueue::revoke);
            result = result.and(revoked);
        }
        result
    }

    /// The VM's memory.
    #[must_use]
    pub fn window(&self) -> &DmaWindow {
        &self.window
    }

    /// The lease.
    #[must_use]
    pub fn lease(&self) -> &Lease {
        &self.lease
    }

    /// What the guest sees the lease as.
    #[must_use]
    pub fn namespace(&self) -> &LeasedNamespace {
        &self.namespace
    }

    /// What may be promised to the guest.
    #[must_use]
    pub fn limits(&self) -> &Limits {
        self.drive.limits()
    }

    /// I/O queue pairs that can exist.
    #[must_use]
    pub fn max_queue_pairs(&self) -> u16 {
        self.queue_pairs
    }

    /// The doorbell registers, from offset 1000h of BAR0 on.
    #[must_use]
    pub fn doorbells(&self) -> &Arc<DoorbellPage> {
        &self.context.doorbells
    }

    /// How doorbell writes reach the pollers.
    #[must_use]
    pub fn doorbell_mode(&self) -> DoorbellMode {
        self.context.mode
    }

    /// A write to an I/O queue's doorbell register exited to the VMM.
    pub fn ring_doorbell(&self, doorbell: Doorbell, value: u32) {
        self.context.doorbells.store(doorbell, value);
        let (Doorbell::SqTail(qid) | Doorbell::CqHead(qid)) = doorbell;
        if let Some(counters) = self.queue_counters(qid) {
            counters.doorbell_exits.add(1);
        }
        let queues = self.queues();
        let cqid = match doorbell {
            Doorbell::SqTail(sqid) => queues.cq_of_sq(sqid),
            Doorbell::CqHead(cqid) => Some(cqid.0),
        };
        if let Some(entry) = cqid.and_then(|cqid| queues.cqs.get(&cqid)) {
            entry.poller.waker().wake();
        }
    }

    /// Has the admin queue's doorbells watched, where the guest only stores to them (`mapped`):
    /// `wake` is signalled when one has changed. It ends with [`Self::unwatch_admin_doorbells`].
    ///
    /// # Errors
    /// What the kernel reports when no poller can be started.
    pub fn watch_admin_doorbells(&self, wake: EventFd) -> io::Result<()> {
        let mut queues = self.queues();
        self.unwatch(&mut queues);
        let doorbells = &self.context.doorbells;
        let (sq, cq) = (
            Doorbell::SqTail(QueueId::ADMIN),
            Doorbell::CqHead(QueueId::ADMIN),
        );
        let (Some(sq_cell), Some(cq_cell)) = (doorbells.cell(sq), doorbells.cell(cq)) else {
            return Err(io::Error::other("There are no admin doorbells"));
        };
        let poller = self.pollers.place(&self.poll)?;
        let id = next_id();
        // What was stored before the watch began is a change, too.
        let doorbells = [sq_cell, cq_cell];
        poller.watch(DoorbellWatch {
            id,
            doorbells,
            seen: [0, 0],
            wake,
        });
        queues.watch = Some((id, poller));
        Ok(())
    }

    /// Ends the watch of the admin queue's doorbells.
    pub fn unwatch_admin_doorbells(&self) {
        self.unwatch(&mut self.queues());
    }

    fn unwatch(&self, queues: &mut Queues) {
        if let Some((id, poller)) = queues.watch.take() {
            poller.unwatch(id);
        }
    }

    /// Takes up the pages of a Doorbell Buffer Config command, or forgets them.
    ///
    /// # Errors
    /// [`QueueError::Misaligned`] and [`QueueError::NotMapped`] for the pages, and
    /// [`QueueError::Timeout`].
    pub fn set_doorbell_buffer(&self, buffer: Option<DoorbellBuffer>) -> Result<(), QueueError> {
        if let Some(DoorbellBuffer { shadow, event_idx }) = buffer {
            let table = self.window.table();
            let len = crate::address::PAGE_SIZE;
            for gpa in [shadow, event_idx] {
                if !gpa.is_page_aligned() {
                    return Err(QueueError::Misaligned(gpa));
                }
                table
                    .locate(gpa, len)
                    .ok_or(QueueError::NotMapped { gpa, len })?;
            }
        }
        let mut queues = self.queues();
        queues.buffer = buffer;
        if let Some(DoorbellBuffer { shadow, .. }) = buffer {
            self.carry_doorbells_over(&queues, shadow);
        }
        let cqids: Vec<u16> = queues.cqs.keys().copied().collect();
        for cqid in cqids {
            self.change(&queues, QueueId(cqid), |queue| {
                // The pages were found above; where they are gone meanwhile, the queue's poller
                // finds that out from the new table.
                queue.set_doorbell_buffer(buffer);
            })?;
        }
        Ok(())
    }

    /// Queues that exist go on in the buffer from where their registers are.
    fn carry_doorbells_over(&self, queues: &Queues, shadow: Gpa) {
        let existing = queues.cqs.iter().flat_map(|(cqid, entry)| {
            let cq = std::iter::once(Doorbell::CqHead(QueueId(*cqid)));
            cq.chain(entry.sqs.iter().map(|sqid| Doorbell::SqTail(*sqid)))
        });
        for doorbell in existing {
            self.carry_doorbell_over(doorbell, shadow);
        }
    }

    fn carry_doorbell_over(&self, doorbell: Doorbell, shadow: Gpa) {
        let doorbells = &self.context.doorbells;
        let value = doorbells.load(doorbell).to_le_bytes();
        if let Some(gpa) = shadow.checked_add(doorbell.offset(doorbells.dstrd()))
            && let Err(error) = self.window.write(gpa, &value)
        {
            error!("A doorbell buffer is gone: {error}");
        }
    }

    /// A new queue begins at entry 0. The buffer may still hold what the guest last wrote for a
    /// queue of the same identifier that was deleted.
    fn begin_doorbell(&self, doorbell: Doorbell, buffer: Option<DoorbellBuffer>) {
        self.context.doorbells.store(doorbell, 0);
        if let Some(DoorbellBuffer { shadow, .. }) = buffer {
            self.carry_doorbell_over(doorbell, shadow);
        }
    }

    /// Creates a Completion Queue.
    ///
    /// # Errors
    /// All of [`QueueError`] but those of deleting.
    pub fn create_cq(&self, config: CqConfig) -> Result<(), QueueError> {
        let CqConfig {
            qid,
            base,
            entries,
            interrupt,
        } = config;
        let counters = self
            .queue_counters(qid)
            .ok_or(QueueError::InvalidQueueId(qid))?;
        self.check_ring(base, entries)?;
        let mut queues = self.queues();
        if queues.cqs.contains_key(&qid.0) {
            return Err(QueueError::AlreadyExists(qid));
        }
        let failed = |source: io::Error| QueueError::Host { qid, source };
        if queues.revoked || !self.has_blocks() {
            let gone = "The drive is gone, or its namespace is not the one that was leased";
            return Err(failed(io::Error::new(io::ErrorKind::NotConnected, gone)));
        }
        let poller = self.pollers.place(&self.poll).map_err(failed)?;
        // No more commands can be in flight than there is room for their completions.
        let slots = u16::try_from(entries - 1)
            .unwrap_or(MAX_SLOTS)
            .min(MAX_SLOTS);
        let controller = self.drive.controller();
        let host = controller
            .create_queue(slots, self.drive.namespace())
            .map_err(failed)?;
        let pair = host.pair();
        if let Some(pair) = &pair
            && pair.members() > 1
        {
            info!(
                "I/O queue {qid} of lease {} shares a queue pair of drive {}, which has no other",
                self.lease.id(),
                self.drive.path(),
            );
        }
        let lists = ListMemory::new(controller.iova_space(), slots.into()).map_err(failed)?;
        self.begin_doorbell(Doorbell::CqHead(qid), queues.buffer);
        let gate = InterruptGate::new(interrupt, self.coalescing.clone());
        let table_user = self.context.tables.register(poller.waker().clone());
        let buffer = queues.buffer;
        let place = (qid, base, entries);
        let cq = CompletionQueue::new(place, &self.context, buffer, gate, counters.clone()).ok_or(
            QueueError::NotMapped {
                gpa: base,
                len: ring_len::<Cqe>(entries),
            },
        )?;
        let id = next_id();
        let blocks = LeasedBlocks {
            guest_nsid: GUEST_NSID,
            host_nsid: self.lease.nsid(),
            first: self.lease.range().start,
            blocks: self.lease.range().blocks,
            lba_shift: self.namespace.lba_shift,
        };
        poller.add(Box::new(ShadowQueue::new(
            id,
            self.context.clone(),
            cq,
            buffer,
            (host, slots, lists),
            (blocks, *self.drive.limits()),
            table_user,
        )));
        queues.cqs.insert(
            qid.0,
            QueueEntry {
                id,
                poller,
                pair,
                sqs: Vec::new(),
            },
        );
        Ok(())
    }

    /// Creates a Submission Queue.
    ///
    /// # Errors
    /// All of [`QueueError`] but those of deleting; [`QueueError::NoSuchQueue`] if the Completion
    /// Queue does not exist.
    pub fn create_sq(&self, config: SqConfig) -> Result<(), QueueError> {
        let SqConfig {
            qid,
            cqid,
            base,
            entries,
        } = config;
        let counters = self
            .queue_counters(qid)
            .ok_or(QueueError::InvalidQueueId(qid))?;
        self.check_ring(base, entries)?;
        let mut queues = self.queues();
        if queues.cq_of_sq(qid).is_some() {
            return Err(QueueError::AlreadyExists(qid));
        }
        if !queues.cqs.contains_key(&cqid.0) {
            return Err(QueueError::NoSuchQueue(cqid));
        }
        self.begin_doorbell(Doorbell::SqTail(qid), queues.buffer);
        let place = (qid, base, entries);
        let sq = SubmissionQueue::new(place, &self.context, queues.buffer, counters.clone())
            .ok_or(QueueError::NotMapped {
                gpa: base,
                len: ring_len::<Sqe>(entries),
            })?;
        self.change(&queues, cqid, |queue| queue.add_sq(sq))?;
        if let Some(entry) = queues.cqs.get_mut(&cqid.0) {
            entry.sqs.push(qid);
        }
        Ok(())
    }

    /// Deletes a Submission Queue. When it returns, nothing of the queue is in flight and every
    /// command that was taken from it has its completion in the Completion Queue.
    ///
    /// # Errors
    /// [`QueueError::NoSuchQueue`] and [`QueueError::Timeout`].
    pub fn delete_sq(&self, qid: QueueId) -> Result<(), QueueError> {
        let mut queues = self.queues();
        let cqid = queues.cq_of_sq(qid).ok_or(QueueError::NoSuchQueue(qid))?;
        self.change(&queues, QueueId(cqid), |queue| queue.remove_sq(qid))?;
        if let Some(entry) = queues.cqs.get_mut(&cqid) {
            entry.sqs.retain(|sqid| *sqid != qid);
        }
        Ok(())
    }

    /// Deletes a Completion Queue that no Submission Queue completes to.
    ///
    /// # Errors
    /// [`QueueError::NoSuchQueue`], [`QueueError::CqInUse`] and [`QueueError::Timeout`].
    pub fn delete_cq(&self, qid: QueueId) -> Result<(), QueueError> {
        let mut queues = self.queues();
        let entry = queues.cqs.get(&qid.0).ok_or(QueueError::NoSuchQueue(qid))?;
        if !entry.sqs.is_empty() {
            return Err(QueueError::CqInUse(qid));
        }
        drop(take_from_poller(qid, entry)?);
        queues.cqs.remove(&qid.0);
        Ok(())
    }

    /// Takes the shadow queue of a Completion Queue from its poller, for a caller that polls by
    /// itself. Until it is given back, the queue cannot be changed or deleted.
    ///
    /// # Errors
    /// [`QueueError::NoSuchQueue`] and [`QueueError::Timeout`].
    pub fn take_queue(&self, cqid: QueueId) -> Result<Box<ShadowQueue>, QueueError> {
        let queues = self.queues();
        let entry = queues
            .cqs
            .get(&cqid.0)
            .ok_or(QueueError::NoSuchQueue(cqid))?;
        let mut queue = take_from_poller(cqid, entry)?;
        queue.resume();
        Ok(queue)
    }

    /// Gives a shadow queue back that [`Self::take_queue`] took.
    ///
    /// # Errors
    /// [`QueueError::NoSuchQueue`] if it is none of this attachment's; then it ends here.
    pub fn give_queue_back(&self, queue: Box<ShadowQueue>) -> Result<(), QueueError> {
        let queues = self.queues();
        let entry = queues.cqs.values().find(|entry| entry.id == queue.id());
        let entry = entry.ok_or(QueueError::NoSuchQueue(queue.cqid()))?;
        entry.poller.add(queue);
        Ok(())
    }

    /// Whether an I/O Submission Queue exists.
    #[must_use]
    pub fn has_sq(&self, qid: QueueId) -> bool {
        self.queues().cq_of_sq(qid).is_some()
    }

    /// Whether an I/O Completion Queue exists.
    #[must_use]
    pub fn has_cq(&self, qid: QueueId) -> bool {
        self.queues().cqs.contains_key(&qid.0)
    }

    /// Deletes all queues, forgets the Doorbell Buffer, and sets the doorbells to zero. When it
    /// returns, neither the pollers nor the host controller touch the VM's memory.
    ///
    /// # Errors
    /// [`QueueError::Timeout`] if commands in flight do not finish. Their queues take no more
    /// commands, and what of them can be deleted is.
    pub fn reset(&self) -> Result<(), QueueError> {
        let mut queues = self.queues();
        queues.buffer = None;
        queues.revoked = false;
        // All are stopped before the first one is waited for.
        let leaving: Vec<_> = queues
            .cqs
            .iter()
            .map(|(cqid, entry)| (QueueId(*cqid), entry.poller.remove(entry.id)))
            .collect();
        let mut result = Ok(());
        for (cqid, receiver) in leaving {
            match receiver.recv_timeout(DRAIN_DEADLINE) {
                Ok(queue) => {
                    drop(queue);
                    queues.cqs.remove(&cqid.0);
                }
                // An earlier call gave up waiting, and the queue ended with its poller meanwhile.
                Err(RecvTimeoutError::Disconnected) => drop(queues.cqs.remove(&cqid.0)),
                Err(RecvTimeoutError::Timeout) => result = Err(QueueError::Timeout(cqid)),
            }
        }
        self.context.doorbells.clear();
        result
    }

    /// Aggregation Threshold (zero-based) and Aggregation Time (in 100 us, 0 for none) of the
    /// Interrupt Coalescing feature.
    pub fn set_interrupt_coalescing(&self, threshold_z: u8, time_100us: u8) {
        self.coalescing.set(threshold_z, time_100us);
    }

    /// What the queues report.
    #[must_use]
    pub fn events(&self) -> &EventQueue {
        &self.context.events
    }

    /// Makes everything durable that was completed until now.
    ///
    /// # Errors
    /// What the host controller reports.
    pub fn flush(&self) -> io::Result<()> {
        self.drive.controller().flush(self.drive.namespace())
    }

    /// What the lease did so far.
    #[must_use]
    pub fn counters(&self) -> Counters {
        let mut sum = Counters::default();
        for counters in &self.counters {
            sum.reads += counters.reads.get();
            sum.writes += counters.writes.get();
            sum.bytes_read += counters.read_bytes.get();
            sum.bytes_written += counters.write_bytes.get();
            sum.media_errors += counters.media_errors.get();
            sum.errors += counters.errors.get();
        }
        sum
    }

    /// Figures of the lease and its queues.
    #[must_use]
    pub fn stats(&self) -> AttachmentStats {
        let existing = self.queues();
        let host_queue = |sqid| {
            let cqid = existing.cq_of_sq(QueueId(sqid))?;
            existing.cqs.get(&cqid)?.host_queue()
        };
        let queues = self
            .counters
            .iter()
            .zip(1..)
            .map(|(counters, qid)| QueueStats {
                host_queue: host_queue(qid),
                ..counters.stats(qid)
            });
        AttachmentStats {
            id: self.lease.id().to_owned(),
            model: self.namespace.model.clone(),
            serial: self.namespace.serial.clone(),
            capacity_bytes: self.namespace.blocks << self.namespace.lba_shift,
            doorbells: self.context.mode.to_string(),
            queues: queues
                .filter(|queue| queue.commands + queue.doorbell_exits > 0)
                .collect(),
        }
    }

    fn queue_counters(&self, qid: QueueId) -> Option<&Arc<QueueCounters>> {
        self.counters.get(usize::from(qid.0).checked_sub(1)?)
    }

    fn check_ring(&self, base: Gpa, entries: u32) -> Result<(), QueueError> {
        if entries < 2 || entries > self.drive.limits().entries_max {
            return Err(QueueError::InvalidSize(entries));
        }
        if base.is_page_aligned() {
            Ok(())
        } else {
            Err(QueueError::Misaligned(base))
        }
    }

    /// Changes a shadow queue while no poller has it and nothing of it is in flight.
    fn change(
        &self,
        queues: &Queues,
        cqid: QueueId,
        change: impl FnOnce(&mut ShadowQueue),
    ) -> Result<(), QueueError> {
        let entry = queues
            .cqs
            .get(&cqid.0)
            .ok_or(QueueError::NoSuchQueue(cqid))?;
        let mut queue = take_from_poller(cqid, entry)?;
        change(&mut queue);
        queue.resume();
        entry.poller.add(queue);
        Ok(())
    }

    fn queues(&self) -> MutexGuard<'_, Queues> {
        // Each change is complete before anything can panic.
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Attachment {
    fn drop(&mut self) {
        self.unwatch_admin_doorbells();
        if let Err(error) = self.reset() {
            error!(
                "Lease {} was detached with commands in flight: {error}",
                self.lease.id()
            );
        }
    }
}

/// Takes a shadow queue from its poller, once nothing of it is in flight.
fn take_from_poller(cqid: QueueId, entry: &QueueEntry) -> Result<Box<ShadowQueue>, QueueError> {
    let receiver = entry.poller.remove(entry.id);
    receiver
        .recv_timeout(DRAIN_DEADLINE)
        .map_err(|_| QueueError::Timeout(cqid))
}

fn ring_len<T>(entries: u32) -> u64 {
    u64::from(entries) * size_of::<T>() as u64
}

/// Figures of one guest controller's lease and queues.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AttachmentStats {
    /// The lease's id.
    pub id: String,
    /// Model Number.
    pub model: String,
    /// Serial Number.
    pub serial: String,
    /// Size of the lease in bytes.
    pub capacity_bytes: u64,
    /// How doorbell writes reach the pollers.
    pub doorbells: String,
    /// The I/O queue pairs that did anything.
    pub queues: Vec<QueueStats>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drive::DriveOptions;
    use crate::lease::{LeaseRequest, Ledger};

    fn config(drive: &Arc<Drive>, range: &str) -> AttachmentConfig {
        // A ledger of its own, as a server with another state folder has.
        let lease = Ledger::in_process().acquire(&LeaseRequest {
            id: "test",
            drive: drive.identity(),
            nsid: Nsid(1),
            range: range.parse().expect("a range"),
            lba_shift: drive.lba_shift(),
            blocks: drive.blocks(),
        });
        AttachmentConfig {
            drive: drive.clone(),
            lease: lease.expect("free"),
            queue_pairs: 1,
            doorbells: DoorbellMode::Shadow,
            poll: PollPolicy::default(),
            pollers: Pollers::new(),
            serial: None,
        }
    }

    #[test]
    fn a_range_of_a_file_is_attached_once_whatever_the_ledger_says() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        file.as_file().set_len(1 << 20).expect("set_len");
        let path = file
            .path()
            .to_str()
            .expect("UTF-8")
            .parse()
            .expect("a path");
        let open = || Drive::open(&path, DriveOptions::default()).expect("opens");
        let (one, other) = (open(), open());
        let first = Attachment::new(config(&one, "0+512K")).expect("free");
        let error = Attachment::new(config(&other, "256K+512K")).expect_err("taken");
        assert!(matches!(error, AttachError::InUse { .. }), "{error}");
        assert!(error.to_string().contains("256K+512K"), "{error}");
        Attachment::new(config(&other, "512K+512K")).expect("another range");
        drop(first);
        Attachment::new(config(&other, "256K+512K")).expect("free again");
    }

    #[test]
    fn impossible_attachments_are_refused_by_name() {
        let path = "null:1M".parse().expect("a path");
        let drive = Drive::open(&path, DriveOptions::default()).expect("opens");
        let attach = |change: fn(&mut AttachmentConfig)| {
            let mut config = config(&drive, "0+1M");
            change(&mut config);
            Attachment::new(config).expect_err("refused").to_string()
        };
        assert!(attach(|config| config.queue_pairs = 0).contains("1 to 64"));
        assert!(attach(|config| config.queue_pairs = 65).contains("65"));
        assert!(attach(|config| config.serial = Some("x".repeat(21))).contains("20 printable"));
        assert!(attach(|config| config.serial = Some("a\nb".into())).contains("20 printable"));
    }
}
