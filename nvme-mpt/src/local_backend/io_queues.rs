//! I/O queues of a local back end: creation, changes and end.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use log::info;
use nvme_guest::backend::state::slot_count;
use nvme_guest::backend::{CompletionQueueState, CqConfig, QueueError, SqConfig};
use nvme_guest::doorbell::DoorbellBuffer;
use nvme_guest::interrupt::{InterruptCoalescer, InterruptVector};
use nvme_guest::stats::{HostQueueUse, LeaseCounters};
use nvme_mpt_memory::clock::TickRate;
use nvme_mpt_memory::deadline::Deadline;
use nvme_mpt_memory::sync::MutexGuard;
use nvme_mpt_memory::sync::mpsc::RecvTimeoutError;
use nvme_spec::cqe::Cqe;
use nvme_spec::ids::QueueId;
use nvme_spec::registers::Doorbell;
use nvme_spec::sqe::Sqe;

use super::LocalBackend;
use super::flush_thread::OutlivingQueue;
use super::queue_limits::QueueLimits;
use super::state::blocks_gone_error;
use crate::host::ListMemory;
use crate::host::SharedQueuePair;
use crate::poller::{Poller, PollerLocality, QueueRemoval};
use crate::shadow::{
    CompletionQueue, HostQueuePair, HostQueueParts, PART_LISTS, ShadowQueue, SubmissionQueue,
    UnmappedRing,
};

/// Completion Queue that the guest has created, with its Submission Queues and the shadow queue of both.
#[derive(Debug)]
pub(super) struct CreatedCompletionQueue {
    pub(super) cqid: QueueId,
    /// Identifier of the shadow queue, by which its poller finds it.
    pub(super) id: u64,
    pub(super) poller: Arc<Poller>,
    /// Drive's queue pair behind the shadow queue; `None` if the drive has no limit on its queue pairs.
    pair: Option<Arc<dyn SharedQueuePair>>,
    pub(super) sqs: Vec<QueueId>,
    /// The shadow queue while no poller runs it, as in a pause.
    pub(super) detached: Option<Box<ShadowQueue>>,
    /// Receives the shadow queue that its poller hands over. The queue takes no new commands, and arrives once its last
    /// in-flight command has ended.
    removal: Option<QueueRemoval>,
    /// True if the shadow queue is dropped when its poller hands it over. Its in-flight commands start no further step.
    is_ending: bool,
    /// True if a wait for the in-flight commands of the shadow queue has timed out.
    is_overdue: bool,
}

impl CreatedCompletionQueue {
    pub(super) fn host_queue_use(&self) -> Option<HostQueueUse> {
        let pair = self.pair.as_ref()?;
        Some(match pair.user_count() {
            _ if pair.is_reserved() => HostQueueUse::Reserved,
            0 | 1 => HostQueueUse::Exclusive,
            _ => HostQueueUse::Shared,
        })
    }

    /// Changes the shadow queue with `change`. Takes it from its poller for that, once none of its commands is in flight.
    pub(super) fn change(
        &mut self,
        deadline: &Deadline,
        change: impl FnOnce(&mut ShadowQueue),
    ) -> Result<(), QueueError> {
        if let Some(queue) = &mut self.detached {
            change(queue);
            return Ok(());
        }
        let mut queue = self.take_from_poller(deadline)?;
        change(&mut queue);
        queue.resume();
        self.poller.add(queue);
        Ok(())
    }

    /// Makes the poller stop and hand over the shadow queue, once none of its commands is in flight.
    pub(super) fn begin_removal(&mut self) {
        if self.removal.is_none() && self.detached.is_none() {
            self.removal = Some(self.poller.remove(self.id));
        }
    }

    /// Makes the poller hand over the shadow queue as [`Self::begin_removal`] does, and cuts its in-flight commands short,
    /// because the queue is going to be deleted.
    fn begin_deletion(&mut self) {
        match &self.removal {
            Some(_) if self.is_ending => {}
            Some(_) => self.poller.cut_short(self.id),
            None => self.removal = Some(self.poller.delete(self.id)),
        }
        self.is_ending = true;
    }

    /// Cancels the hand-over of the shadow queue, except for a queue that is going to be deleted. If the shadow queue has
    /// already left its poller, it is held here; otherwise it stays with the poller.
    pub(super) fn cancel_removal(&mut self) {
        if self.is_ending {
            return;
        }
        if let Some(leaving) = self.removal.take() {
            self.poller.cancel_removal(self.id);
            if let Some(queue) = leaving.cancel() {
                self.hold_detached(queue);
            }
        }
    }

    /// Stores a shadow queue that has left its poller, and drops the queue's reference to the VM's memory.
    pub(super) fn hold_detached(&mut self, mut queue: Box<ShadowQueue>) {
        queue.release_memory();
        self.detached = Some(queue);
    }

    /// Takes the shadow queue from its poller, once none of its commands is in flight.
    ///
    /// # Errors
    /// [`QueueError::Timeout`]. The queue then takes no new commands and its hand-over continues. [`Self::cancel_removal`]
    /// cancels the hand-over.
    pub(super) fn take_from_poller(
        &mut self,
        deadline: &Deadline,
    ) -> Result<Box<ShadowQueue>, QueueError> {
        self.begin_removal();
        let (late, is_long) = (
            QueueError::Timeout(self.cqid),
            deadline.remaining() >= OVERDUE_WAIT_MIN,
        );
        let Some(leaving) = self.removal.take() else {
            return Err(late);
        };
        match deadline.receive(&leaving) {
            Ok(queue) => {
                self.is_overdue = false;
                Ok(queue)
            }
            Err(RecvTimeoutError::Timeout) => {
                self.removal = Some(leaving);
                self.is_overdue |= is_long;
                Err(late)
            }
            // The thread of its poller has ended.
            Err(RecvTimeoutError::Disconnected) => Err(late),
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct BackendQueues {
    /// Completion Queues by identifier.
    pub(super) cqs: BTreeMap<u16, CreatedCompletionQueue>,
    pub(super) buffer: Option<DoorbellBuffer>,
    /// True if every I/O command fails until the next reset, because the lease is revoked.
    pub(super) is_revoked: bool,
    /// True if no poller runs any queue: all shadow queues are held here.
    pub(super) is_paused: bool,
    /// Counters of the lease from before a restore, or from the predecessor.
    pub(super) previous_counters: LeaseCounters,
    /// Watch of the admin queue's mapped doorbells, if there is one: its identifier, and the poller that watches.
    pub(super) admin_watch: Option<(u64, Arc<Poller>)>,
}

impl BackendQueues {
    pub(super) fn cq_of_sq(&self, sqid: QueueId) -> Option<u16> {
        self.cqs
            .iter()
            .find(|(_, entry)| entry.sqs.contains(&sqid))
            .map(|(cqid, _)| *cqid)
    }

    /// Returns a Completion Queue whose shadow queue its poller has not handed over yet, because commands of it are in flight.
    pub(super) fn pending_removal(&self) -> Option<QueueId> {
        let mut entries = self.cqs.values();
        entries
            .find(|entry| entry.removal.is_some())
            .map(|entry| entry.cqid)
    }

    fn entry(&mut self, cqid: QueueId) -> Result<&mut CreatedCompletionQueue, QueueError> {
        self.cqs
            .get_mut(&cqid.0)
            .ok_or(QueueError::NoSuchQueue(cqid))
    }
}

/// Minimum length of a wait that makes a queue overdue when the wait times out. A VMM may request shorter waits, which even an
/// idle queue may exceed.
const OVERDUE_WAIT_MIN: Duration = Duration::from_secs(1);

/// Treatment of overdue queues: their in-flight commands did not end within a wait of at least [`OVERDUE_WAIT_MIN`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OverdueQueuePolicy {
    /// Waits for the in-flight commands of overdue queues as for those of any queue.
    Wait,
    /// Fails without a wait if an overdue queue still has commands in flight.
    Skip,
}

/// Returns the error for a Completion Queue whose ring does not lie in the VM's memory.
fn not_mapped(config: &CqConfig) -> QueueError {
    QueueError::NotMapped {
        gpa: config.base,
        len: ring_len::<Cqe>(config.entries),
    }
}

/// Identifier that the next shadow queue, or watch of doorbells, gets.
static NEXT_ID: AtomicU64 = AtomicU64::new(0);

pub(super) fn next_id() -> u64 {
    NEXT_ID.fetch_add(1, Ordering::Relaxed)
}

impl LocalBackend {
    /// Creates a Completion Queue.
    ///
    /// # Errors
    /// All of [`QueueError`] except those of deletion.
    pub fn create_cq(&self, config: CqConfig) -> Result<(), QueueError> {
        let qid = config.qid;
        self.check_new_cq(&self.queues(), &config)?;
        // The function may repeat the request often, so no host queue is created for a ring that is not in the VM's memory.
        if !CompletionQueue::is_mapped(&config, &self.context) {
            return Err(not_mapped(&config));
        }
        // The lock is not held here: while a drive is being reset, this takes long, and doorbells and statistics must continue.
        let host = self.create_host_queue(&config)?;
        let mut queues = self.queues();
        self.check_new_cq(&queues, &config)?;
        let (mut entry, queue) = self.new_queue(&queues, config, UnmappedRing::Refused, host)?;
        queue.init_inflight();
        self.reset_doorbell(Doorbell::CqHead(qid), queues.buffer);
        if queues.is_paused {
            entry.hold_detached(queue);
        } else {
            entry.poller.add(queue);
        }
        queues.cqs.insert(qid.0, entry);
        Ok(())
    }

    /// Checks that the guest may create a Completion Queue now.
    fn check_new_cq(&self, queues: &BackendQueues, config: &CqConfig) -> Result<(), QueueError> {
        let qid = config.qid;
        if queues.is_revoked || !self.has_blocks() {
            let source = blocks_gone_error();
            return Err(QueueError::Host { qid, source });
        }
        self.check_cq_config(queues, config)
    }

    /// Checks the parameters of a Completion Queue, and that its identifier is free.
    fn check_cq_config(&self, queues: &BackendQueues, config: &CqConfig) -> Result<(), QueueError> {
        QueueLimits::from_backend(self).check_cq(config)?;
        match queues.cqs.contains_key(&config.qid.0) {
            true => Err(QueueError::AlreadyExists(config.qid)),
            false => Ok(()),
        }
    }

    /// Creates the host queue behind a guest's Completion Queue.
    fn create_host_queue(&self, config: &CqConfig) -> Result<HostQueuePair, QueueError> {
        let host = self
            .open_lease
            .host()
            .create_queue(slot_count(config.entries));
        let qid = config.qid;
        host.map_err(|source| QueueError::Host { qid, source })
    }

    /// Creates a shadow queue without Submission Queues. No poller runs it yet.
    fn new_queue(
        &self,
        queues: &BackendQueues,
        config: CqConfig,
        unmapped: UnmappedRing,
        host: HostQueuePair,
    ) -> Result<(CreatedCompletionQueue, Box<ShadowQueue>), QueueError> {
        let CqConfig {
            qid,
            base: _,
            entries,
            vector,
        } = config;
        let counters = self
            .queue_counters(qid)
            .ok_or(QueueError::InvalidQueueId(qid))?;
        let interrupt = vector.map(|number| self.vector(number)).transpose()?;
        let failed = |source: io::Error| QueueError::Host { qid, source };
        let neighbours = self.poller_locality(interrupt.clone());
        let poller = self
            .pollers
            .choose_poller(
                &self.poll,
                self.facts.policies,
                neighbours,
                self.blocking_drive(),
            )
            .map_err(failed)?;
        let slots = slot_count(entries);
        let pair = host.shared_pair();
        if let Some(pair) = &pair
            && pair.user_count() > 1
        {
            info!(
                lease = self.lease().id(), queue = qid.0;
                "I/O queue {qid} of lease {} shares a queue pair of drive {}, which has no other",
                self.lease().id(),
                self.drive().path(),
            );
        }
        let lists = usize::from(slots) + usize::from(PART_LISTS);
        let lists = ListMemory::new(self.drive().controller().iova_space(), lists);
        let lists = lists.map_err(failed)?;
        let coalescer = InterruptCoalescer::new(
            interrupt,
            self.coalescing.clone(),
            self.facts.policies.coalescing,
            TickRate::measured(),
        );
        let used_table = self.context.tables.register(poller.waker().clone());
        let buffer = queues.buffer;
        let counters = counters.clone();
        let cq = CompletionQueue::new(
            &config,
            &self.context,
            buffer,
            unmapped,
            coalescer,
            counters,
        )
        .ok_or_else(|| not_mapped(&config))?;
        let id = next_id();
        let queue = Box::new(ShadowQueue::new(
            id,
            self.context.clone(),
            cq,
            buffer,
            HostQueueParts {
                queue: host,
                slots,
                lists,
                limits: self.facts.limits,
                lease: self.open_lease.clone(),
            },
            used_table,
        ));
        let entry = CreatedCompletionQueue {
            cqid: qid,
            id,
            poller,
            pair,
            sqs: Vec::new(),
            detached: None,
            removal: None,
            is_ending: false,
            is_overdue: false,
        };
        Ok((entry, queue))
    }

    /// Recreates a queue with its Submission Queues from a checked state. No poller runs the queue until the back end resumes.
    pub(super) fn restore_queue(
        &self,
        queues: &mut BackendQueues,
        state: &CompletionQueueState,
        unmapped: UnmappedRing,
    ) -> Result<(), QueueError> {
        let config = state.config();
        self.check_cq_config(queues, &config)?;
        let host = self.create_host_queue(&config)?;
        let (mut entry, mut queue) = self.new_queue(queues, config, unmapped, host)?;
        let cqid = QueueId(state.qid);
        for state in &state.submission_queues {
            let mut sq = self.new_sq(queues, &state.config(cqid), unmapped)?;
            sq.restore(state);
            queue.add_sq(sq);
            entry.sqs.push(QueueId(state.qid));
        }
        queue.restore(state);
        if queues.is_revoked {
            queue.revoke();
        }
        entry.hold_detached(queue);
        queues.cqs.insert(state.qid, entry);
        Ok(())
    }

    /// Creates a Submission Queue.
    ///
    /// # Errors
    /// All of [`QueueError`] except those of deletion; [`QueueError::NoSuchQueue`] if the Completion Queue does not exist.
    pub fn create_sq(&self, config: SqConfig) -> Result<(), QueueError> {
        self.create_sq_until(config, &self.deadline())
    }

    /// Creates a Submission Queue as [`Self::create_sq`] does, and waits for the shadow queue until `deadline`.
    pub(super) fn create_sq_until(
        &self,
        config: SqConfig,
        deadline: &Deadline,
    ) -> Result<(), QueueError> {
        let SqConfig {
            qid,
            cqid,
            base: _,
            entries: _,
        } = config;
        QueueLimits::from_backend(self).check_sq(&config)?;
        let mut queues = self.queues();
        if queues.cq_of_sq(qid).is_some() {
            return Err(QueueError::AlreadyExists(qid));
        }
        if !queues.cqs.contains_key(&cqid.0) {
            return Err(QueueError::NoSuchQueue(cqid));
        }
        let mut sq = self.new_sq(&queues, &config, UnmappedRing::Refused)?;
        sq.init_inflight();
        self.reset_doorbell(Doorbell::SqTail(qid), queues.buffer);
        let entry = queues.entry(cqid)?;
        entry.change(deadline, |queue| queue.add_sq(sq))?;
        entry.sqs.push(qid);
        Ok(())
    }

    fn new_sq(
        &self,
        queues: &BackendQueues,
        config: &SqConfig,
        unmapped: UnmappedRing,
    ) -> Result<SubmissionQueue, QueueError> {
        let counters = self
            .queue_counters(config.qid)
            .ok_or(QueueError::InvalidQueueId(config.qid))?;
        let not_mapped = QueueError::NotMapped {
            gpa: config.base,
            len: ring_len::<Sqe>(config.entries),
        };
        let counters = counters.clone();
        SubmissionQueue::new(config, &self.context, queues.buffer, unmapped, counters)
            .ok_or(not_mapped)
    }

    /// Deletes a Submission Queue. On success, none of its commands is in flight, and every command taken from it has its
    /// completion in the Completion Queue.
    ///
    /// # Errors
    /// [`QueueError::NoSuchQueue`] and [`QueueError::Timeout`].
    pub fn delete_sq(&self, qid: QueueId) -> Result<(), QueueError> {
        self.delete_sq_until(qid, &self.deadline())
    }

    /// Deletes a Submission Queue as [`Self::delete_sq`] does, and waits for the shadow queue until `deadline`.
    pub(super) fn delete_sq_until(
        &self,
        qid: QueueId,
        deadline: &Deadline,
    ) -> Result<(), QueueError> {
        let mut queues = self.queues();
        let cqid = queues.cq_of_sq(qid).ok_or(QueueError::NoSuchQueue(qid))?;
        let entry = queues.entry(QueueId(cqid))?;
        entry.change(deadline, |queue| queue.remove_sq(qid))?;
        entry.sqs.retain(|sqid| *sqid != qid);
        Ok(())
    }

    /// Deletes a Completion Queue that has no Submission Queue.
    ///
    /// # Errors
    /// [`QueueError::NoSuchQueue`], [`QueueError::CqInUse`] and [`QueueError::Timeout`].
    pub fn delete_cq(&self, qid: QueueId) -> Result<(), QueueError> {
        self.delete_cq_until(qid, &self.deadline())
    }

    /// Deletes a Completion Queue as [`Self::delete_cq`] does, and waits for the shadow queue until `deadline`.
    pub(super) fn delete_cq_until(
        &self,
        qid: QueueId,
        deadline: &Deadline,
    ) -> Result<(), QueueError> {
        let mut queues = self.queues();
        let entry = queues.entry(qid)?;
        if !entry.sqs.is_empty() {
            return Err(QueueError::CqInUse(qid));
        }
        if entry.detached.is_none() {
            drop(entry.take_from_poller(deadline)?);
        }
        queues.cqs.remove(&qid.0);
        Ok(())
    }

    /// Takes the shadow queue of a Completion Queue from its poller, for a caller that polls it. Until [`Self::return_queue`],
    /// the queue cannot be changed or deleted.
    ///
    /// # Errors
    /// [`QueueError::NoSuchQueue`], [`QueueError::Paused`] and [`QueueError::Timeout`].
    pub fn take_queue(&self, cqid: QueueId) -> Result<Box<ShadowQueue>, QueueError> {
        let mut queues = self.queues();
        let entry = queues.entry(cqid)?;
        if entry.detached.is_some() {
            return Err(QueueError::Paused(cqid));
        }
        let mut queue = entry.take_from_poller(&self.deadline())?;
        queue.resume();
        Ok(queue)
    }

    /// Returns a shadow queue from [`Self::take_queue`] to its poller.
    ///
    /// # Errors
    /// [`QueueError::NoSuchQueue`] if the queue does not belong to this back end. The queue is dropped then.
    pub fn return_queue(&self, queue: Box<ShadowQueue>) -> Result<(), QueueError> {
        let queues = self.queues();
        let entry = queues.cqs.values().find(|entry| entry.id == queue.id());
        let entry = entry.ok_or(QueueError::NoSuchQueue(queue.cqid()))?;
        entry.poller.add(queue);
        Ok(())
    }

    /// Deletes all queues, drops the Doorbell Buffer, and sets the doorbells to zero. In-flight commands start no further step.
    /// On success, neither the pollers nor the host controller access the VM's memory afterwards.
    ///
    /// # Errors
    /// [`QueueError::Timeout`] if in-flight commands do not end within 30 seconds. Their queues take no more commands, and all
    /// other queues are deleted. Once those commands have ended, another reset succeeds.
    pub fn reset(&self) -> Result<(), QueueError> {
        self.reset_until(&self.deadline())
    }

    /// Resets as [`Self::reset`] does. The waits for all queues together end at `deadline`.
    pub(super) fn reset_until(&self, deadline: &Deadline) -> Result<(), QueueError> {
        let mut queues = self.queues();
        let result = self.delete_queues_until(&mut queues, deadline, OverdueQueuePolicy::Wait);
        self.context.doorbells.clear();
        result
    }

    /// Deletes all queues and drops the Doorbell Buffer. The waits for all queues together end at `deadline`.
    pub(super) fn delete_queues_until(
        &self,
        queues: &mut BackendQueues,
        deadline: &Deadline,
        overdue: OverdueQueuePolicy,
    ) -> Result<(), QueueError> {
        queues.buffer = None;
        queues.is_revoked = false;
        match self.delete_each_queue(queues, deadline, overdue) {
            Some(late) => Err(QueueError::Timeout(late)),
            None => Ok(()),
        }
    }

    /// Deletes all queues when the back end ends. Returns those with commands in flight that did not end in time.
    pub(super) fn end_queues(&self) -> Vec<OutlivingQueue> {
        let mut queues = self.queues();
        self.delete_each_queue(&mut queues, &self.deadline(), OverdueQueuePolicy::Skip);
        let entries = std::mem::take(&mut queues.cqs).into_values();
        let late = entries.filter_map(|entry| {
            let CreatedCompletionQueue {
                removal: leaving,
                poller,
                ..
            } = entry;
            leaving.map(|queue| OutlivingQueue { queue, poller })
        });
        late.collect()
    }

    /// Deletes all queues. If some still have commands in flight at the deadline, returns the identifier of one of them;
    /// pollers hand over such queues later.
    fn delete_each_queue(
        &self,
        queues: &mut BackendQueues,
        deadline: &Deadline,
        overdue: OverdueQueuePolicy,
    ) -> Option<QueueId> {
        let is_long = deadline.remaining() >= OVERDUE_WAIT_MIN;
        // All queues are stopped before the first wait.
        for entry in queues.cqs.values_mut() {
            entry.begin_deletion();
        }
        queues.cqs.retain(|_, entry| {
            let is_left = entry.is_overdue && overdue == OverdueQueuePolicy::Skip;
            let deadline = match is_left {
                true => &deadline.expired(),
                false => deadline,
            };
            let left = entry
                .removal
                .as_ref()
                .map(|leaving| deadline.receive(leaving));
            // Any other result means that the queue arrived, was already held here, or lost its poller's thread.
            let is_late = matches!(left, Some(Err(RecvTimeoutError::Timeout)));
            entry.is_overdue |= is_late && is_long;
            is_late
        });
        queues.cqs.keys().next().copied().map(QueueId)
    }

    /// Sets the doorbell of a new queue to 0, the index of its first entry. The Doorbell Buffer may still have the value of a
    /// deleted queue with the same identifier.
    fn reset_doorbell(&self, doorbell: Doorbell, buffer: Option<DoorbellBuffer>) {
        self.context.doorbells.store(doorbell, 0);
        if let Some(DoorbellBuffer { shadow, .. }) = buffer {
            self.copy_doorbell(doorbell, shadow);
        }
    }

    /// Returns hints for choosing the poller of a queue with this interrupt vector: the vector and the drive's NUMA node.
    pub(super) fn poller_locality(&self, vector: Option<Arc<InterruptVector>>) -> PollerLocality {
        PollerLocality {
            vector,
            node: self.drive().controller().numa_node(),
        }
    }

    /// Returns a number that identifies the drive, if submitting commands to it may block a poller.
    pub(super) fn blocking_drive(&self) -> Option<usize> {
        let drive = self.drive();
        drive
            .controller()
            .may_block()
            .then(|| Arc::as_ptr(drive).addr())
    }

    fn vector(&self, number: u16) -> Result<Arc<InterruptVector>, QueueError> {
        let vector = self.vectors.get(usize::from(number));
        vector.cloned().ok_or(QueueError::InvalidVector(number))
    }

    pub(super) fn queues(&self) -> MutexGuard<'_, BackendQueues> {
        // A poisoned lock is harmless, since each change is complete before a panic is possible.
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn ring_len<T>(entries: u32) -> u64 {
    u64::from(entries) * size_of::<T>() as u64
}
