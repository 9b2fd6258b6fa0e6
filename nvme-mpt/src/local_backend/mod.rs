//! Local back ends: everything that one guest controller holds of a drive.
//!
//! Inputs are plain guest addresses, eventfds and numbers. A local back end knows which queues exist and where their rings lie;
//! only the queue's poller knows the progress in them.
//!
//! Lock order: `queues`, then the locks of the pollers and of the DMA window. No lock is taken on the path of an I/O. A drive
//! that is being reset creates no queue until it works again, so a host queue is requested before `queues` is locked.
//!
//! A change of a queue (an added SQ, the Doorbell Buffer) takes the queue from its poller. It waits until none of the queue's
//! commands is in flight, and returns the queue to the poller. If commands of a queue do not end in time, the queue and the
//! lease outlive the back end, and the lease is *ending* in the ledger. The back end's background thread (`flush_thread.rs`)
//! waits until the poller hands over such a queue. Pollers do not drop queues, because releasing a lease writes a file.

mod config;
mod controller_backend;
mod doorbells;
mod error;
mod flush_thread;
mod io_queues;
mod lease_growth;
mod open_lease;
mod pause;
mod persisted_queue;
mod queue_limits;
mod restore;
mod spare_descriptors;
mod state;
#[cfg(test)]
mod tests;

use std::io;
use std::sync::{Arc, PoisonError};

use log::{error, warn};
use nvme_guest::backend::{GUEST_NSID, LeaseBackend, LeaseFacts, LeasedNamespace, QueueError};
use nvme_guest::dma::{DmaWindow, MemoryKinds, MemoryLimit};
use nvme_guest::doorbell::{DoorbellMode, DoorbellPage};
use nvme_guest::event::EventQueue;
use nvme_guest::host::{CommandSets, ControllerLimits, LeaseChangeLog, Mdts};
use nvme_guest::inflight::InflightFile;
use nvme_guest::interrupt::{CoalescingFeature, InterruptVector, vector_count};
use nvme_guest::memory_account::MemoryAccount;
use nvme_guest::park::UntrappedDoorbells;
use nvme_guest::rate_limit::{RateLimiter, RateLimiterUse, RateLimits};
use nvme_guest::stats::{
    BackendStats, HostQueueUse, LatencyDistribution, LeaseCounters, LeasePairStats, MemoryStats,
    QueueCounters, QueueStats, StatusCounters,
};
use nvme_lease::Lease;
use nvme_lease::range::ByteSize;
use nvme_mpt_memory::clock::{TickRate, Ticks};
use nvme_mpt_memory::deadline::{DRAIN_DEADLINE, Deadline, SystemClock, WaitClock};
use nvme_mpt_memory::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use nvme_mpt_memory::sync::{Mutex, try_lock};
use nvme_spec::ids::QueueId;

pub use config::{BackendOptions, LocalBackendConfig, SharedBackendPartsSource};
pub use error::LocalBackendError;
pub use lease_growth::GrowError;
pub(crate) use open_lease::OpenLease;

use crate::drive::Drive;
use crate::drive::{HostLeaseError, HostNamespace, QueuePairReservation, SpareDescriptorStore};
use crate::poller::{PollPolicy, PollerIdleMode, PollerPool, PollerSharing};
use crate::shadow::{
    CommandSet, LeasedBlocks, NamespaceIds, NvmCommands, NvmFacts, QueueContext, ShadowQueue,
};
use flush_thread::FlushThread;
use io_queues::{BackendQueues, CreatedCompletionQueue};
use lease_growth::{LeaseGrowth, unit_blocks};
use spare_descriptors::SpareDescriptors;

/// A flush that outlasted its caller's timeout, and that the drive has perhaps not completed yet.
#[derive(Debug)]
struct LateFlush {
    /// Number of commands that the lease had completed when the flush started.
    commands: u64,
    receiver: Receiver<io::Result<()>>,
    /// Result of the flush, once it is received.
    received: Option<io::Result<()>>,
}

impl LateFlush {
    /// Returns whether the drive is still flushing. A result that has arrived is stored for [`LocalBackend::flush_until`].
    fn is_pending(&mut self) -> bool {
        if self.received.is_none() {
            match self.receiver.try_recv() {
                Ok(result) => self.received = Some(result),
                Err(TryRecvError::Empty) => return true,
                Err(TryRecvError::Disconnected) => {}
            }
        }
        false
    }
}

/// Everything that one guest controller holds of a drive: lease, DMA window, doorbells and queues.
#[derive(Debug)]
pub struct LocalBackend {
    facts: LeaseFacts,
    poll: PollPolicy,
    pollers: Arc<PollerPool>,
    window: DmaWindow,
    context: Arc<QueueContext>,
    coalescing: Arc<CoalescingFeature>,
    /// Interrupt vectors by number. [`vector_count`] has their number for the number of queue pairs.
    vectors: Vec<Arc<InterruptVector>>,
    /// Counters of the I/O queues. Index 0 is queue 1.
    counters: Vec<Arc<QueueCounters>>,
    queues: Mutex<BackendQueues>,
    clock: Arc<dyn WaitClock>,
    flush_thread: FlushThread,
    /// Flush that outlasted its caller's timeout, if there is one.
    late_flush: Mutex<Option<LateFlush>>,
    growth: Mutex<LeaseGrowth>,
    /// Dropped last, so that the lease outlives the other fields. Each shadow queue has a reference too: see [`OpenLease`].
    open_lease: Arc<OpenLease>,
}

impl LocalBackend {
    /// Creates the back end of a guest controller on a lease of a drive.
    ///
    /// # Errors
    /// See [`LocalBackendError`].
    pub fn new(config: LocalBackendConfig) -> Result<Self, LocalBackendError> {
        Self::with_parts(config, SharedBackendPartsSource::Own)
    }

    /// Creates a back end as [`Self::new`] does, for a function that may outlive this process.
    ///
    /// # Errors
    /// As [`Self::new`]; [`LocalBackendError::Io`] if persisted parts are invalid.
    pub fn with_parts(
        config: LocalBackendConfig,
        parts: SharedBackendPartsSource,
    ) -> Result<Self, LocalBackendError> {
        Self::with_spares(config, parts, None)
    }

    /// Creates a back end as [`Self::with_parts`] does. `spares` stores spare open file descriptions of the lease for the
    /// successor.
    ///
    /// # Errors
    /// As [`Self::with_parts`].
    pub fn with_spares(
        config: LocalBackendConfig,
        parts: SharedBackendPartsSource,
        spares: Option<Arc<dyn SpareDescriptorStore>>,
    ) -> Result<Self, LocalBackendError> {
        let LocalBackendConfig {
            drive,
            lease,
            reservation,
            pollers,
            options,
        } = config;
        let BackendOptions {
            queue_pairs,
            mdts,
            doorbells,
            doorbell_stride,
            poll,
            adaptive: policies,
            memory,
            memory_limit,
            rates,
            serial,
        } = options;
        let most = doorbell_stride.queue_pairs_max(doorbells);
        if queue_pairs == 0 || queue_pairs > most {
            return Err(LocalBackendError::InvalidQueuePairs { queue_pairs, most });
        }
        let mut limits = *drive.limits();
        if let Some(requested) = mdts {
            let most = drive.controller().mdts_max();
            let least = limits.own_bytes_max.max(Mdts::MIN.bytes());
            if requested > most || requested.bytes() < least {
                return Err(LocalBackendError::InvalidMdts {
                    drive: drive.path().to_owned(),
                    requested,
                    least: ByteSize(least),
                    most,
                });
            }
            limits = limits.with_mdts(requested);
        }
        if let Some(range) = lease.unwiped().first().copied() {
            return Err(LocalBackendError::Unwiped(range));
        }
        if memory == MemoryKinds::Any {
            if poll.sharing != PollerSharing::Dedicated {
                return Err(LocalBackendError::MemoryMayWait);
            }
            if drive.controller().iova_space().has_iommu() {
                let drive = drive.path().to_string();
                return Err(LocalBackendError::MemoryIsPinned { drive });
            }
        }
        poll.check_processors()?;
        let doorbells = poll.doorbell_mode(doorbells);
        if poll.idle_mode == PollerIdleMode::Event && doorbells == DoorbellMode::Mapped {
            return Err(LocalBackendError::NoEvents);
        }
        let identity = lease.identity();
        let serial = match serial {
            Some(serial) => {
                let fits = (1..=20).contains(&serial.len());
                if !fits || !serial.bytes().all(|byte| (0x20..0x7F).contains(&byte)) {
                    return Err(LocalBackendError::InvalidSerial(serial));
                }
                serial
            }
            None => identity.serial,
        };
        let (extents, unit_blocks) = (lease.blocks(), unit_blocks(&drive, &lease));
        let host = drive
            .open_lease(lease.id(), &extents, reservation.as_ref())
            .map_err(|error| match error {
                HostLeaseError::InUse(source) => LocalBackendError::InUse {
                    drive: drive.path().to_owned(),
                    range: lease.extents(),
                    source,
                },
                other => LocalBackendError::Lease(other),
            })?;
        host.set_weight(rates.weight.unwrap_or_default());
        let reserved_pairs = reservation.as_ref().map_or(0, QueuePairReservation::pairs);
        lease.note_reserved(reserved_pairs)?;
        let nsids = NamespaceIds {
            guest: GUEST_NSID,
            host: lease.nsid(),
        };
        let blocks = LeasedBlocks::new(nsids, drive.lba_shift(), &extents, unit_blocks);
        let blocks =
            blocks.ok_or_else(|| LocalBackendError::PartialUnits(lease.id().to_owned()))?;
        if unit_blocks.is_some() {
            // A command that is executed in parts is atomic for single blocks only.
            (limits.awun_z, limits.awupf_z) = (0, 0);
        }
        let namespace = LeasedNamespace {
            nsid: GUEST_NSID,
            lba_shift: drive.lba_shift(),
            blocks: blocks.blocks(),
            serial,
            model: drive.controller().model().to_owned(),
            nguid: identity.nguid,
            eui64: identity.eui64,
            uuid: identity.uuid,
            command_sets: CommandSets {
                nvm: NvmCommands::describe(&NvmFacts {
                    limits,
                    lba_shift: drive.lba_shift(),
                }),
                other: host.command_set(),
            },
        };
        let space = drive.controller().iova_space();
        let memory_limit = memory_limit
            .map(|ByteSize(limit)| MemoryLimit::Configured(limit))
            .or_else(|| MemoryAccount::for_host().total().map(MemoryLimit::Host));
        let window = DmaWindow::new(space.clone()).with_kinds(memory);
        let window = window.with_function(lease.id(), memory_limit);
        let continues = matches!(
            parts,
            SharedBackendPartsSource::Continued(Some(_)) | SharedBackendPartsSource::Persisted(..)
        );
        let (page, events, inflight) = match parts {
            SharedBackendPartsSource::Own => (
                DoorbellPage::new(doorbells, doorbell_stride, queue_pairs)?,
                EventQueue::new()?,
                None,
            ),
            SharedBackendPartsSource::Outliving(reader) => (
                DoorbellPage::new(doorbells, doorbell_stride, queue_pairs)?,
                EventQueue::with_remote_reader(None, reader)?,
                Some(InflightFile::new(queue_pairs)?),
            ),
            SharedBackendPartsSource::Continued(None) => (
                DoorbellPage::new(doorbells, doorbell_stride, queue_pairs)?,
                EventQueue::new()?,
                Some(InflightFile::new(queue_pairs)?),
            ),
            SharedBackendPartsSource::Continued(Some(files)) => (
                DoorbellPage::from_persisted(
                    files.doorbells,
                    doorbells,
                    doorbell_stride,
                    queue_pairs,
                )?,
                EventQueue::new()?,
                Some(InflightFile::from_persisted(files.inflight, queue_pairs)?),
            ),
            SharedBackendPartsSource::Persisted(parts, reader) => (
                DoorbellPage::from_persisted(
                    parts.doorbells,
                    doorbells,
                    doorbell_stride,
                    queue_pairs,
                )?,
                EventQueue::with_remote_reader(Some(parts.events), reader)?,
                Some(InflightFile::from_persisted(parts.inflight, queue_pairs)?),
            ),
        };
        let pinning = inflight.as_ref().and_then(InflightFile::pinning);
        if let Some(pinning) = &pinning {
            // The predecessor's record of pinned memory has been read at this point.
            pinning.clear();
        }
        let window = window.with_pinning_record(pinning);
        let events = Arc::new(events);
        drive.controller().subscribe(&events);
        host.subscribe(&events);
        // A function without in-flight tracking ends with the process.
        let spares = spares.filter(|_| inflight.is_some());
        let spare = spares.and_then(|supervisor| {
            SpareDescriptors::restore_or_create(supervisor, &drive, &lease, &*host, continues)
        });
        if let Some(record) = inflight.as_ref().and_then(InflightFile::write_errors) {
            if record.is_set() {
                host.record_earlier_write_errors();
            }
            host.set_write_error_record(record);
            if continues {
                host.restore_write_errors();
            }
        }
        if let Some(record) = inflight.as_ref().and_then(InflightFile::changes) {
            host.record_changes(record);
        }
        let counted_before = inflight.as_ref().map(InflightFile::previous_counters);
        let counted_before = counted_before.unwrap_or_default();
        let context = Arc::new(QueueContext {
            doorbells: Arc::new(page),
            untrapped: UntrappedDoorbells::new(doorbells == DoorbellMode::Mapped),
            events,
            tables: window.tables().clone(),
            limiter: RateLimiter::new(rates, TickRate::measured()),
            blocks: Mutex::new(Arc::new(blocks)),
            inflight: inflight.map(Arc::new),
            errors: StatusCounters::default(),
            processor_time: Arc::default(),
        });
        let flush_thread = FlushThread::start(pollers.threads())?;
        let blocks_at_first = namespace.blocks;
        let facts = LeaseFacts {
            namespace,
            limits,
            queue_pairs,
            doorbells,
            parks: poll.idle_mode != PollerIdleMode::Busy,
            thresholds: drive.controller().temperature_thresholds(),
            can_be_damaged: host.can_be_damaged(),
            is_private: drive.is_private(),
            unit_blocks,
            policies,
        };
        let holding = Arc::new(OpenLease::new(lease, host, spare, reservation, drive));
        let marks = holding.lease.uncorrectable();
        holding
            .host()
            .restore_marks(&marks, flush_thread.store_marks_callback(&holding));
        if let Some(spare) = &holding.spare {
            spare.forget_on_drop();
        }
        Ok(Self {
            facts,
            poll,
            pollers,
            window,
            context,
            coalescing: Arc::default(),
            vectors: (0..vector_count(queue_pairs))
                .map(|_| InterruptVector::new())
                .collect(),
            counters: std::iter::repeat_with(Arc::default)
                .take(queue_pairs.into())
                .collect(),
            queues: Mutex::new(BackendQueues {
                previous_counters: counted_before,
                ..BackendQueues::default()
            }),
            clock: SystemClock::shared(),
            flush_thread,
            late_flush: Mutex::default(),
            growth: Mutex::new(LeaseGrowth::from(blocks_at_first)),
            open_lease: holding,
        })
    }

    /// Sets the clock by which the back end waits.
    #[must_use]
    pub fn with_clock(mut self, clock: Arc<dyn WaitClock>) -> Self {
        self.window.set_clock(clock.clone());
        self.clock = clock;
        self
    }

    /// Returns the deadline for all waits of a reset, a shutdown or an end of the back end that starts now: 30 seconds from
    /// now.
    fn deadline(&self) -> Deadline {
        Deadline::after(&self.clock, DRAIN_DEADLINE)
    }

    fn drive(&self) -> &Arc<Drive> {
        &self.open_lease.drive
    }

    /// Returns whether the lease is on a namespace of the host controller that `drive` is on. The namespaces of the two may
    /// differ.
    #[must_use]
    pub fn shares_controller_with(&self, drive: &Drive) -> bool {
        self.drive().shares_controller_with(drive)
    }

    /// Returns whether the leased blocks exist: the drive is present, and its namespace still has them.
    ///
    /// The drive's administrator can format, resize or detach a namespace. After a format with another block size, the LBAs of
    /// the lease address other bytes, and a number of blocks is another number of bytes.
    fn has_blocks(&self) -> bool {
        self.is_usable_with(self.blocks()) && !self.drive().controller().incidents().is_gone
    }

    /// Returns whether commands may use the lease if the namespace still has `blocks` of the leased blocks: all of them, or
    /// some if the drive keeps the data of a namespace that is resized.
    fn is_usable_with(&self, blocks: u64) -> bool {
        let whole = blocks == self.context.blocks().blocks();
        whole || (blocks > 0 && self.drive().controller().can_resize_in_place())
    }

    /// Returns the number of leased blocks that the drive's namespace still has; 0 if the namespace was replaced.
    fn blocks(&self) -> u64 {
        let same = |namespace: &&HostNamespace| {
            namespace.nsid == self.lease().nsid()
                && namespace.lba_shift == self.facts.namespace.lba_shift
        };
        let namespaces = self.drive().controller().namespaces();
        let namespace = namespaces.iter().find(same);
        namespace.map_or(0, |namespace| {
            self.context.blocks().blocks_within(namespace.blocks)
        })
    }

    /// Revokes the lease, because its blocks no longer exist: until the next reset, every I/O command fails that is not taken
    /// yet.
    ///
    /// # Errors
    /// [`QueueError::Timeout`] if in-flight commands do not end. Their queue takes no more commands then.
    fn revoke(&self) -> Result<(), QueueError> {
        let mut queues = self.queues();
        queues.is_revoked = true;
        let deadline = self.deadline();
        let mut result = Ok(());
        for entry in queues.cqs.values_mut() {
            // The other queues are revoked too if a queue's commands do not end.
            let revoked = entry.change(&deadline, ShadowQueue::revoke);
            result = result.and(revoked);
        }
        result
    }

    /// Sets the limits of I/Os and bytes per second for all queues of the function together, and the lease's weight.
    pub fn set_rates(&self, rates: RateLimits) {
        let weight = rates.weight.unwrap_or_default();
        self.open_lease.host().set_weight(weight);
        self.context.limiter.set(rates, Ticks::now());
        // Queues check the limiter only when they adopt a table, so that a lease without limits has no cost.
        self.window.republish_table();
    }

    /// Returns how much of the rate limits is used up. A new back end of the lease in this process continues from there.
    #[must_use]
    pub fn limits_usage(&self) -> RateLimiterUse {
        self.context.limiter.usage()
    }

    /// Continues with the rate limits as an earlier back end of the lease has used them up, so that a guest gains nothing from
    /// a new back end.
    pub fn restore_limits(&self, used: RateLimiterUse) {
        self.context.limiter.restore(used, Ticks::now());
    }

    /// Releases the locks of the lease before a hand-over. The caller ensures that the function is paused and that this process
    /// exits immediately afterwards.
    pub fn release_locks(&self) {
        // A poller that watches doorbells could take the processor of the successor's poller.
        self.stop_admin_watch(&mut self.queues());
        self.open_lease.host().release_locks();
        self.lease().hand_over();
    }

    /// Leaves the [spare descriptions](SpareDescriptorStore) of the lease in the supervisor process when this back end ends,
    /// because the function continues later in this process or in a successor.
    pub fn retain_spares(&self) {
        if let Some(spare) = &self.open_lease.spare {
            spare.retain_on_drop();
        }
    }

    /// Returns the window with the VM's memory.
    #[must_use]
    pub fn window(&self) -> &DmaWindow {
        &self.window
    }

    /// Returns the lease.
    #[must_use]
    pub fn lease(&self) -> &Lease {
        &self.open_lease.lease
    }

    /// Returns the namespace as the guest sees it.
    #[must_use]
    pub fn namespace(&self) -> &LeasedNamespace {
        &self.facts.namespace
    }

    /// Returns the log of changes that the guest did not cause, if the command set has a change list.
    fn change_log(&self) -> Option<&dyn LeaseChangeLog> {
        self.open_lease.host().change_log()
    }

    /// Returns the limits of commands that may be promised to the guest.
    fn limits(&self) -> &ControllerLimits {
        &self.facts.limits
    }

    /// Returns the maximum number of I/O queue pairs.
    #[must_use]
    pub fn max_queue_pairs(&self) -> u16 {
        self.facts.queue_pairs
    }

    /// Returns the doorbell registers, which start at offset 1000h of BAR0.
    #[must_use]
    pub fn doorbells(&self) -> &Arc<DoorbellPage> {
        &self.context.doorbells
    }

    /// Makes all completed writes durable, with a timeout of 30 seconds. After a timeout, the drive continues the flush, and
    /// the lease lives until the flush is done.
    ///
    /// # Errors
    /// Returns the host controller's error, or an error if completed writes were lost; [`io::ErrorKind::TimedOut`] after 30
    /// seconds.
    pub fn flush(&self) -> io::Result<()> {
        self.flush_until(&self.deadline())
    }

    /// Flushes as [`Self::flush`] does, and waits until `deadline`. If an earlier flush has timed out and no command has
    /// completed since it started, waits for the earlier flush instead.
    fn flush_until(&self, deadline: &Deadline) -> io::Result<()> {
        // A command is counted shortly after its guest sees the completion. Without queues, all completed commands are counted.
        let has_queues = !self.queues().cqs.is_empty();
        // Locked after `queues` is released, because a pause locks this while it holds `queues`.
        let mut late = self
            .late_flush
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let commands = LeaseBackend::completed_commands(self);
        let covers_all = |flush: &LateFlush| !has_queues && flush.commands == commands;
        let result = match late.take().filter(covers_all) {
            Some(LateFlush {
                received: Some(flushed),
                ..
            }) => return flushed,
            Some(flush) => flush.receiver,
            None => self.flush_thread.flush(self.open_lease.clone()),
        };
        match deadline.receive(&result) {
            Ok(flushed) => flushed,
            Err(RecvTimeoutError::Timeout) => {
                *late = Some(LateFlush {
                    commands,
                    receiver: result,
                    received: None,
                });
                let text = "The drive has not flushed yet";
                Err(io::Error::new(io::ErrorKind::TimedOut, text))
            }
            Err(RecvTimeoutError::Disconnected) => Err(io::Error::other("The flush panicked")),
        }
    }

    /// Returns whether a flush that timed out is still in progress.
    fn is_flushing(&self) -> bool {
        let mut late = self
            .late_flush
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        late.as_mut().is_some_and(LateFlush::is_pending)
    }

    /// Returns the counters of the lease since this back end was created.
    fn own_counters(&self) -> LeaseCounters {
        let queues = self.counters.iter().map(|queue| queue.smart_counters());
        queues.fold(LeaseCounters::default(), |sum, queue| sum + queue)
    }

    /// Returns statistics of the lease and its queues.
    #[must_use]
    pub fn stats(&self) -> BackendStats {
        self.collect_stats(&self.queues(), self.window.stats())
    }

    /// Returns [`Self::stats`]; `None` while another thread changes the queues or the memory, which may take as long as
    /// in-flight commands.
    #[must_use]
    pub fn try_stats(&self) -> Option<BackendStats> {
        let existing = try_lock(&self.queues)?;
        Some(self.collect_stats(&existing, self.window.try_stats()?))
    }

    fn collect_stats(&self, existing: &BackendQueues, memory: MemoryStats) -> BackendStats {
        let namespace = &self.facts.namespace;
        let host_queue = |sqid| {
            let cqid = existing.cq_of_sq(QueueId(sqid))?;
            existing.cqs.get(&cqid)?.host_queue_use()
        };
        // A function in another process counts its exits itself.
        let inflight = self.context.inflight.as_ref();
        let exits_there = |qid| inflight.map_or(0, |inflight| inflight.exits(QueueId(qid)));
        let queues = self.counters.iter().zip(1..).map(|(counters, qid)| {
            let stats = counters.stats(qid);
            // The queue may have been deleted while commands were in flight, so the gauge counts only for an existing queue.
            let exists = existing.cqs.contains_key(&qid);
            QueueStats {
                in_flight: stats.in_flight * u64::from(exists),
                host_queue: host_queue(qid),
                doorbell_exits: stats.doorbell_exits + exits_there(qid),
                ..stats
            }
        });
        BackendStats {
            queue_pairs: self.pair_stats(existing),
            id: self.lease().id().to_owned(),
            model: namespace.model.clone(),
            serial: namespace.serial.clone(),
            capacity_bytes: self.context.blocks().blocks() << namespace.lba_shift,
            doorbells: self.facts.doorbells.to_string(),
            memory,
            queues: queues
                .filter(|queue| queue.commands + queue.doorbell_exits + queue.in_flight > 0)
                .collect(),
            latency: LatencyDistribution::sum(self.counters.iter().map(|queue| &queue.latency))
                .buckets(),
            errors: self.context.errors.stats(),
            processor_seconds: self.context.processor_time.seconds(),
        }
    }

    /// Returns the use of the drive's queue pairs; `None` if the drive has no limit on them.
    fn pair_stats(&self, queues: &BackendQueues) -> Option<LeasePairStats> {
        self.drive().controller().queue_pairs()?;
        let uses = queues
            .cqs
            .values()
            .filter_map(CreatedCompletionQueue::host_queue_use);
        let uses: Vec<_> = uses.collect();
        let with = |wanted| uses.iter().filter(|queue| **queue == wanted).count() as u16;
        let reservation = self.open_lease.reservation.as_ref();
        Some(LeasePairStats {
            reserved: reservation.map_or(0, QueuePairReservation::pairs),
            exclusive: with(HostQueueUse::Exclusive),
            shared: with(HostQueueUse::Shared),
        })
    }

    fn queue_counters(&self, qid: QueueId) -> Option<&Arc<QueueCounters>> {
        self.counters.get(usize::from(qid.0).checked_sub(1)?)
    }
}

impl Drop for LocalBackend {
    fn drop(&mut self) {
        self.stop_admin_watch(&mut self.queues());
        let overdue = self.end_queues();
        if overdue.is_empty() {
            self.flush_thread.stop_storing_marks();
        }
        // Every further reference belongs to a queue or to a flush.
        if Arc::strong_count(&self.open_lease) > 1 {
            let id = self.lease().id();
            warn!(lease = id; "Lease {id} is detached with commands in flight, and ends with the last of them");
            if let Err(error) = self.lease().mark_ending() {
                error!(lease = id; "Lease {id} is not marked as ending: {error}");
            }
        }
        self.flush_thread.drain_queues(overdue);
    }
}
