//! I/O queue pairs of a drive: granted, created on demand, and shared once the drive has no more.
//!
//! A created pair is never deleted while the drive is in use; a later queue reuses it. So a queue that ends needs no
//! admin command. A lease can reserve pairs (`reservations.rs`).

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use log::warn;

use super::super::backing::DeviceBacking;
use super::super::pair::{
    CLASSES, ClassLoad, DriveGovernor, DriveSurvey, ENTRIES_MAX, LeaseShare, PairConfig,
    PairDoorbells, QueuePairActivity, VfioQueue, VfioQueuePair,
};
use super::admin_queue::AdminQueue;
use super::doorbell_buffer::pair_doorbells;
use super::error::ControllerError;
use super::supervisor::TICK;
use super::{PhysicalDrive, lock};
use nvme_guest::address::PAGE_SIZE;
use nvme_guest::dma::RegionTable;
use nvme_mpt::drive::{HostNamespace, QueuePairUse, ReservedPairs};
use nvme_mpt::host::ListMemory;
use nvme_mpt::host::{HostBatch, HostCompletion, HostMemory, HostQueue};
use nvme_mpt_memory::clock::{TickRate, Ticks, ticks_in};
use nvme_mpt_memory::sync::{Mutex, MutexGuard};
use nvme_spec::admin::{CreateIoCq, CreateIoSq, DeleteQueue, QueuePriority, SetFeatures};
use nvme_spec::feature::{FeatureId, NumberOfQueues};
use nvme_spec::ids::{CommandId, QueueId};
use nvme_spec::opcode::{AdminOpcode, NvmOpcode};
use nvme_spec::registers::{Cap, Doorbell};
use nvme_spec::sqe::Sqe;
use nvme_spec::status::Status;

/// Poll interval while a Flush is pending.
const FLUSH_PAUSE: Duration = Duration::from_micros(200);

/// Time without commands after which a queue counts as idle.
const REST: Duration = Duration::from_secs(1);

/// [`REST`] as a number of checks by the drive monitor.
const RESTING_LOOKS: u32 = (REST.as_millis() / TICK.as_millis()) as u32;

/// Maximum attempts at a Flush that resets or Aborts interrupt.
const FLUSH_ATTEMPTS: u32 = 5;

/// Maximum attempts at creating a pair that end in a reset, so that a drive that fails on each new pair is not reset
/// forever.
const JOIN_ATTEMPTS: u32 = 2;

/// Maximum resets that may begin while a queue waits for its pair, so that the wait is bounded.
const JOIN_RESETS: u64 = 5;

/// Maximum time that a reservation waits for the end of a reset. The time is short, because changes of other drives' functions
/// wait for the reservation.
const RESET_PATIENCE: Duration = Duration::from_secs(2);

/// Number of queue pairs to request; the drive grants as many as it has.
const WANTED: u16 = 1024;

/// I/O queue pairs of a drive. The pair with identifier `n` is at index `n - 1`.
#[derive(Debug)]
pub(super) struct QueuePairs {
    /// Number of pairs that the drive can have. This is less than `granted` if the drive refused to create a pair.
    total: u16,
    /// Number of pairs that the drive granted when it was opened.
    granted: u16,
    entries: u32,
    pairs: Vec<OwnedPair>,
    /// Next pair, whose creation failed. Its memory stays allocated, because the drive may keep one of the queues until a
    /// reset.
    left: Option<VfioQueuePair>,
    /// Reservations, oldest first.
    pub(super) holders: Vec<ReservationHolder>,
    governor: Arc<DriveGovernor>,
    survey: DriveSurvey,
    view: SharedPairCounts,
    /// True during a reset, in which no pair is added.
    pub(super) is_resetting: bool,
}

/// A reservation of a drive.
#[derive(Debug)]
pub(super) struct ReservationHolder {
    /// Key of the reservation, unique in this process.
    pub(super) key: u64,
    pub(super) pairs: ReservedPairs,
}

/// Counts of the pairs for statistics. Readers do not wait for the lock of [`QueuePairs`], which is held while the drive
/// creates a pair.
#[derive(Clone, Debug, Default)]
pub(super) struct SharedPairCounts(Arc<Mutex<PairCounts>>);

#[derive(Debug, Default)]
struct PairCounts {
    total: u16,
    reserved: u16,
    /// Pairs without a reservation.
    others: Vec<VfioQueuePair>,
}

impl SharedPairCounts {
    pub(super) fn usage(&self) -> QueuePairUse {
        let counted = lock(&self.0);
        let with = |wanted: fn(usize) -> bool| {
            let others = counted.others.iter();
            others.filter(|pair| wanted(pair.members())).count() as u16
        };
        QueuePairUse {
            total: counted.total,
            reserved: counted.reserved,
            exclusive: with(|members| members == 1),
            shared: with(|members| members > 1),
        }
    }
}

/// A pair with the reservation that owns it.
#[derive(Debug)]
struct OwnedPair {
    pair: VfioQueuePair,
    owner: Option<u64>,
    rest: QueuePairActivity,
}

impl QueuePairs {
    /// Sets Number of Queues (Base 2.0, section 5.27.1.5), limited to the doorbells that BAR0 has.
    pub(super) fn grant(
        admin: &mut AdminQueue,
        backing: &dyn DeviceBacking,
        cap: Cap,
        governor: DriveGovernor,
    ) -> Result<Self, ControllerError> {
        let (doorbells, first) = backing.doorbells();
        let room = doorbells.len().saturating_sub(first) as u64;
        let pairs = (room / (2 * Doorbell::spacing(cap.dstrd()))).saturating_sub(1);
        let fit = u16::try_from(pairs).unwrap_or(u16::MAX);
        let total = set_number_of_queues(admin)?.min(fit);
        Self::new(total, total, cap, governor)
    }

    /// Creates an empty list of pairs. The drive can have `total` of the `granted` pairs.
    pub(super) fn new(
        total: u16,
        granted: u16,
        cap: Cap,
        governor: DriveGovernor,
    ) -> Result<Self, ControllerError> {
        if total == 0 {
            return Err(ControllerError::NoQueuePairs);
        }
        // MQES is zero-based and at least 1 by the specification.
        let entries = (u32::from(cap.mqes_z()) + 1).clamp(2, ENTRIES_MAX);
        let pairs = Self {
            total,
            granted: granted.max(total),
            entries,
            pairs: Vec::new(),
            left: None,
            holders: Vec::new(),
            governor: Arc::new(governor),
            survey: DriveSurvey::new(TickRate::of_this_machine()),
            view: SharedPairCounts::default(),
            is_resetting: false,
        };
        pairs.show();
        Ok(pairs)
    }

    /// Returns the shared counts.
    pub(super) fn view(&self) -> SharedPairCounts {
        self.view.clone()
    }

    /// Updates the shared counts.
    fn show(&self) {
        *lock(&self.view.0) = PairCounts {
            total: self.total,
            reserved: self.reserved(),
            others: self.of(None).cloned().collect(),
        };
    }

    pub(super) fn total(&self) -> u16 {
        self.total
    }

    /// Returns the number of pairs that the drive granted when it was opened.
    pub(super) fn granted(&self) -> u16 {
        self.granted
    }

    /// Records the number of pairs that the drive grants after a reset. The drive has lost all queues and may accept
    /// pairs that it refused before.
    pub(super) fn begin_anew(&mut self, granted: u16) {
        self.left = None;
        self.total = granted.min(self.granted).max(self.count());
        self.show();
    }

    /// Returns whether the doorbells of all pairs fit into a page of a Doorbell Buffer.
    pub(super) fn fit_doorbell_buffer(&self, dstrd: u8) -> bool {
        Doorbell::area(self.total, dstrd) <= PAGE_SIZE
    }

    /// Iterates over the created pairs with their identifiers.
    pub(super) fn iter(&self) -> impl Iterator<Item = (QueueId, &VfioQueuePair)> {
        let pairs = self.pairs.iter().map(|owned| &owned.pair);
        (1..).map(QueueId).zip(pairs)
    }

    /// Returns clones of the created pairs, for use without the lock.
    pub(super) fn all(&self) -> Vec<(QueueId, VfioQueuePair)> {
        self.iter().map(|(qid, pair)| (qid, pair.clone())).collect()
    }

    /// Returns the pair with this identifier.
    pub(super) fn get(&self, qid: QueueId) -> Option<&VfioQueuePair> {
        let owned = self.pairs.get(usize::from(qid.0).checked_sub(1)?)?;
        Some(&owned.pair)
    }

    /// Returns the number of created pairs.
    pub(super) fn count(&self) -> u16 {
        self.pairs.len() as u16
    }

    /// Iterates over the pairs of a reservation, or over those without one.
    fn of(&self, owner: Option<u64>) -> impl Iterator<Item = &VfioQueuePair> {
        let owned = self.pairs.iter().filter(move |owned| owned.owner == owner);
        owned.map(|owned| &owned.pair)
    }

    /// Returns the number of reserved pairs.
    pub(super) fn reserved(&self) -> u16 {
        self.count() - self.of(None).count() as u16
    }

    pub(super) fn usage(&self) -> QueuePairUse {
        self.view.usage()
    }

    /// Returns the unreserved pair with the fewest users.
    fn least_used(&self) -> Option<&VfioQueuePair> {
        self.of(None).min_by_key(|pair| pair.members())
    }

    /// Returns the unreserved pair with the fewest users, preferably of this priority class.
    fn least_used_of(&self, priority: QueuePriority) -> Option<&VfioQueuePair> {
        let by_use = |pair: &&VfioQueuePair| (pair.members(), pair.priority() != priority);
        self.of(None).min_by_key(by_use)
    }

    /// Returns an unused pair of a reservation.
    fn free_of(&self, reservation: Option<u64>) -> Option<&VfioQueuePair> {
        reservation?;
        self.of(reservation).find(|pair| pair.members() == 0)
    }

    /// Gives the least used unreserved pair to a reservation, preferably a pair of this priority class. The pair's queues
    /// migrate to other unreserved pairs.
    pub(super) fn give_one_to(&mut self, key: u64, priority: QueuePriority) {
        let by_use =
            |owned: &&mut OwnedPair| (owned.pair.members(), owned.pair.priority() != priority);
        let unowned = self.pairs.iter_mut().filter(|owned| owned.owner.is_none());
        let Some(chosen) = unowned.min_by_key(by_use) else {
            return;
        };
        chosen.owner = Some(key);
        chosen.pair.set_reserved(true);
        let pair = chosen.pair.clone();
        self.show();
        while let Some(other) = self.least_used()
            && pair.move_one(other, |_| true)
        {}
    }

    /// Makes the pairs of a reservation unreserved.
    pub(super) fn take_back(&mut self, key: u64) {
        for owned in &mut self.pairs {
            if owned.owner == Some(key) {
                owned.owner = None;
                owned.pair.set_reserved(false);
            }
        }
        self.show();
    }

    /// Migrates queues to unused pairs of their own reservations, and from crowded unreserved pairs to less used ones.
    pub(super) fn even_out(&self) {
        for owned in &self.pairs {
            if let Some(key) = owned.owner
                && owned.pair.members() == 0
            {
                let mut others = self.of(None);
                others.any(|other| other.move_one(&owned.pair, |of| of == Some(key)));
            }
        }
        while let Some(least) = self.least_used()
            && let Some(most) = self.of(None).max_by_key(|pair| pair.members())
            && most.members() > least.members() + 1
            && most.move_one(least, |_| true)
        {}
    }

    /// Surveys the users of all pairs. Returns the load of each priority class. The drive monitor calls this in each
    /// check.
    pub(super) fn survey(&mut self) -> [ClassLoad; CLASSES.len()] {
        let pairs = self.pairs.iter().map(|owned| &owned.pair);
        self.survey.look(&self.governor, pairs, Ticks::now());
        self.survey.class_loads()
    }

    /// Lends idle pairs to queues on crowded pairs. The drive monitor calls this in each check.
    pub(super) fn lend(&mut self) {
        let (now, within) = (Ticks::now(), ticks_in(REST));
        let unowned = self.pairs.iter_mut().filter(|owned| owned.owner.is_none());
        let mut resting = Vec::new();
        let mut others = Vec::new();
        for OwnedPair { pair, rest, .. } in unowned {
            let rests = rest.look(pair) >= RESTING_LOOKS && !pair.is_lent();
            if rests {
                resting.push(&*pair);
            } else {
                others.push(&*pair);
            }
        }
        for pair in resting {
            let awake = others.iter().map(|other| (other.awake(now, within), other));
            let crowded = awake.max_by_key(|(awake, _)| *awake);
            if let Some((2.., crowded)) = crowded {
                pair.lend_to_one_of(crowded, now, within);
            }
        }
    }
}

/// Limit of retries when the drive fails while a queue's pair is created.
#[derive(Debug)]
struct JoinRetryLimit {
    /// Number of attempts that ended in a reset.
    failed: u32,
    /// Number of resets that had begun before the first attempt.
    resets_before: u64,
}

impl JoinRetryLimit {
    fn new(resets: u64) -> Self {
        Self {
            failed: 0,
            resets_before: resets,
        }
    }

    /// Returns whether to wait for the end of one more reset. `resets` is the number of resets that have begun.
    fn lasts(&self, resets: u64) -> bool {
        resets.saturating_sub(self.resets_before) <= JOIN_RESETS
    }

    /// Returns whether to retry after `error`. `resets` is the number of resets that have begun.
    fn goes_on(&mut self, error: &ControllerError, resets: u64) -> bool {
        match error {
            // The drive has received no command.
            ControllerError::Resetting => self.lasts(resets),
            ControllerError::AdminTimeout { .. }
            | ControllerError::Fatal
            | ControllerError::Lost => {
                self.failed += 1;
                self.failed < JOIN_ATTEMPTS
            }
            _ => false,
        }
    }
}

/// Sets Number of Queues, which is also necessary after each reset. Returns the number of granted pairs.
pub(super) fn set_number_of_queues(admin: &mut AdminQueue) -> Result<u16, ControllerError> {
    let wanted = NumberOfQueues(0)
        .with_nsq_z(WANTED - 1)
        .with_ncq_z(WANTED - 1);
    let mut sqe = Sqe::new(AdminOpcode::SET_FEATURES.0);
    let set = SetFeatures {
        fid: FeatureId::NUMBER_OF_QUEUES,
        dword11: wanted.0,
        ..SetFeatures::default()
    };
    set.write_to(&mut sqe);
    let granted = NumberOfQueues(admin.execute(sqe)?.dw0());
    Ok(granted
        .nsq_z()
        .min(granted.ncq_z())
        .saturating_add(1)
        .min(WANTED))
}

/// Creates the queues of a pair, without interrupts (Base 2.0, sections 5.4 and 5.5). Returns the priority class of the
/// Submission Queue: Medium if the drive refuses the requested class.
pub(super) fn create(
    admin: &mut AdminQueue,
    qid: QueueId,
    pair: &VfioQueuePair,
    priority: QueuePriority,
) -> Result<QueuePriority, ControllerError> {
    // At most ENTRIES_MAX entries.
    let qsize_z = (pair.entries() - 1) as u16;
    let mut cq = Sqe::new(AdminOpcode::CREATE_IO_CQ.0);
    cq.dptr = [pair.cq_iova().bits(), 0];
    let create_cq = CreateIoCq {
        qid,
        qsize_z,
        pc: true,
        ien: false,
        iv: 0,
    };
    create_cq.write_to(&mut cq);
    admin.execute(cq)?;
    let mut create_sq = |qprio| {
        let mut sq = Sqe::new(AdminOpcode::CREATE_IO_SQ.0);
        sq.dptr = [pair.sq_iova().bits(), 0];
        let create_sq = CreateIoSq {
            qid,
            qsize_z,
            pc: true,
            qprio,
            cqid: qid,
            nvmsetid: 0,
        };
        create_sq.write_to(&mut sq);
        admin.execute(sq).map(|_| qprio)
    };
    let created = match create_sq(priority) {
        // The status does not matter: drives refuse a priority class with different statuses.
        Err(ControllerError::Admin { .. }) if priority != QueuePriority::MEDIUM => {
            create_sq(QueuePriority::MEDIUM)
        }
        created => created,
    };
    let error = match created {
        Ok(priority) => {
            pair.set_priority(priority);
            return Ok(priority);
        }
        Err(error) => error,
    };
    if let ControllerError::Admin { .. } = error {
        // Delete the Completion Queue, so that the identifier is free for the next attempt and the memory can be freed.
        return Err(match delete_one(admin, AdminOpcode::DELETE_IO_CQ, qid) {
            Ok(()) => error,
            Err(ControllerError::Admin { .. }) => ControllerError::QueueLeft { qid },
            Err(unanswered) => unanswered,
        });
    }
    Err(error)
}

/// Deletes the queues of a pair (Base 2.0, sections 5.6 and 5.7). The deletion ends all commands of these queues.
pub(super) fn delete(admin: &mut AdminQueue, qid: QueueId) -> Result<(), ControllerError> {
    delete_one(admin, AdminOpcode::DELETE_IO_SQ, qid)?;
    delete_one(admin, AdminOpcode::DELETE_IO_CQ, qid)
}

fn delete_one(
    admin: &mut AdminQueue,
    opcode: AdminOpcode,
    qid: QueueId,
) -> Result<(), ControllerError> {
    let mut delete = Sqe::new(opcode.0);
    DeleteQueue { qid }.write_to(&mut delete);
    admin.execute(delete).map(|_| ())
}

impl PhysicalDrive {
    /// Returns whether a reset is pending or in progress and the drive may come back. Returns false for a drive that is gone,
    /// although the reset may still be releasing the drive for up to a minute.
    fn may_come_back(&self, pairs: &QueuePairs) -> bool {
        (pairs.is_resetting || self.reset_wanted.load(Ordering::Acquire)) && !self.is_gone()
    }

    /// Returns the pairs once no reset is pending or in progress, or once the drive is gone. `patience` limits the number of
    /// resets to wait for.
    fn pairs_after_reset(
        &self,
        patience: &JoinRetryLimit,
    ) -> Result<MutexGuard<'_, QueuePairs>, ControllerError> {
        let pairs = lock(&self.pairs);
        let waited = self.reset_over.wait_while(pairs, |pairs| {
            self.may_come_back(pairs) && patience.lasts(self.resets())
        });
        let pairs = waited.unwrap_or_else(PoisonError::into_inner);
        match self.may_come_back(&pairs) {
            true => Err(ControllerError::Resetting),
            false => Ok(pairs),
        }
    }

    /// Returns the number of resets that have begun.
    fn resets(&self) -> u64 {
        self.counters.resets.load(Ordering::Relaxed)
    }

    /// Returns the pairs, or an error if a reset takes longer than [`RESET_PATIENCE`].
    pub(super) fn pairs_soon(&self) -> Result<MutexGuard<'_, QueuePairs>, ControllerError> {
        let pairs = lock(&self.pairs);
        let waited = self
            .reset_over
            .wait_timeout_while(pairs, RESET_PATIENCE, |pairs| self.may_come_back(pairs));
        let (pairs, _) = waited.unwrap_or_else(PoisonError::into_inner);
        match self.may_come_back(&pairs) {
            true => Err(ControllerError::Resetting),
            false => Ok(pairs),
        }
    }

    /// Joins a queue pair.
    ///
    /// The order of preference is an unused pair of the lease's reservation, an unused unreserved pair, and a share of
    /// the least used unreserved pair. Pairs of the lease's [priority class](super::arbitration) are preferred, and one
    /// is created if the drive can have another pair. If the drive fails meanwhile, the pair is created after the reset.
    pub(super) fn join_queue_pair(
        &self,
        slots: u16,
        namespace: &HostNamespace,
        lease: &Arc<LeaseShare>,
    ) -> Result<VfioQueue, ControllerError> {
        let mut patience = JoinRetryLimit::new(self.resets());
        loop {
            match self.try_to_join(slots, namespace, lease, &patience) {
                Err(error) if patience.goes_on(&error, self.resets()) => {}
                joined => return joined,
            }
        }
    }

    /// Joins a queue pair once no reset is pending or in progress.
    fn try_to_join(
        &self,
        slots: u16,
        namespace: &HostNamespace,
        lease: &Arc<LeaseShare>,
        patience: &JoinRetryLimit,
    ) -> Result<VfioQueue, ControllerError> {
        let mut pairs = self.pairs_after_reset(patience)?;
        if self.is_gone() {
            return Err(ControllerError::Gone);
        }
        if let Some(pair) = pairs.free_of(lease.reservation()) {
            return Ok(pair.join_lease(slots, namespace.lba_shift, lease));
        }
        let class = self.class_of(lease.weight());
        let priority = class.unwrap_or(QueuePriority::MEDIUM);
        let least_used = pairs.least_used_of(priority);
        let is_idle = least_used.is_some_and(|pair| pair.members() == 0);
        let is_its = |pair: &VfioQueuePair| class.is_none_or(|class| pair.priority() == class);
        if !(is_idle && least_used.is_some_and(is_its)) {
            match self.add_pair(&mut pairs, priority) {
                Ok(_) => {}
                // The idle pair of another class serves the queue as well as without classes.
                Err(error) if is_idle => self.note_other_class(&error),
                Err(error) => return Err(error),
            }
        }
        let least_used = pairs.least_used_of(priority);
        let pair = least_used.ok_or(ControllerError::NoQueuePairs)?;
        if pair.members() > 0 {
            self.note_sharing(&pairs);
        }
        Ok(pair.join_lease(slots, namespace.lba_shift, lease))
    }

    /// Logs once that queues share pairs.
    pub(super) fn note_sharing(&self, pairs: &QueuePairs) {
        if !self.counters.sharing.swap(true, Ordering::Relaxed) {
            warn!(
                "Drive {} has {} queue pairs, fewer than its guests want: they share them from now on",
                self.backing.name(),
                pairs.total,
            );
        }
    }

    /// Logs once that a queue got an idle pair of another priority class because no pair of its own class could be
    /// created.
    fn note_other_class(&self, error: &ControllerError) {
        if !self.counters.other_class.swap(true, Ordering::Relaxed) {
            let name = self.backing.name();
            warn!(
                drive = name;
                "Drive {name} has an idle queue pair used for a guest of another class, as it creates no other: {error}"
            );
        }
    }

    /// Creates one more pair. Returns false if the drive has no more.
    pub(super) fn add_pair(
        &self,
        pairs: &mut QueuePairs,
        priority: QueuePriority,
    ) -> Result<bool, ControllerError> {
        if pairs.count() >= pairs.total {
            return Ok(false);
        }
        match self.create_pair(pairs, priority) {
            Ok(pair) => {
                pairs.pairs.push(OwnedPair {
                    pair,
                    owner: None,
                    rest: QueuePairActivity::default(),
                });
                pairs.show();
            }
            // A drive may grant more queues than it can have at a time. The next attempt follows after its next reset.
            Err(error @ (ControllerError::Admin { .. } | ControllerError::QueueLeft { .. }))
                if !pairs.pairs.is_empty() =>
            {
                warn!("Drive {} has no more queues: {error}", self.backing.name());
                pairs.total = pairs.count();
                pairs.show();
                return Ok(false);
            }
            Err(error) => return Err(error),
        }
        Ok(true)
    }

    fn create_pair(
        &self,
        pairs: &mut QueuePairs,
        priority: QueuePriority,
    ) -> Result<VfioQueuePair, ControllerError> {
        let qid = QueueId(pairs.count() + 1);
        if pairs.left.is_some() {
            self.with_admin(|admin| delete_one(admin, AdminOpcode::DELETE_IO_CQ, qid))?;
            pairs.left = None;
        }
        let config = PairConfig {
            entries: pairs.entries,
            max_transfer: self.identity.max_transfer,
            doorbells: self.doorbells(qid)?,
            governor: pairs.governor.clone(),
            priority,
        };
        let pair = VfioQueuePair::new(&self.space, config).map_err(ControllerError::Memory)?;
        let created = self.with_admin(|admin| {
            // Another thread may have ended the weights while this one waited for the admin queue.
            let priority = lock(&self.arbitration).priority(priority);
            if create(admin, qid, &pair, priority)? != priority {
                self.end_classes(admin);
            }
            Ok(())
        });
        match created {
            Ok(()) => Ok(pair),
            Err(error) => {
                let is_left = matches!(
                    error,
                    ControllerError::QueueLeft { .. }
                        | ControllerError::AdminTimeout { .. }
                        | ControllerError::Fatal
                        | ControllerError::Lost
                );
                if is_left {
                    pairs.left = Some(pair);
                }
                Err(error)
            }
        }
    }

    pub(super) fn doorbells(&self, qid: QueueId) -> Result<PairDoorbells, ControllerError> {
        let dstrd = self.registers.cap().dstrd();
        pair_doorbells(self.backing.as_ref(), dstrd, self.buffer.as_ref(), qid)
    }

    /// Makes all completed writes of a namespace durable with a Flush.
    pub(super) fn flush(&self, namespace: &HostNamespace) -> Result<(), ControllerError> {
        let mut queue = self.join_queue_pair(1, namespace, &LeaseShare::new(None))?;
        let lists = ListMemory::new(&self.space, 1).map_err(ControllerError::Memory)?;
        let memory = HostMemory {
            table: &RegionTable::default(),
            lists: &lists,
        };
        let mut sqe = Sqe::new(NvmOpcode::FLUSH.0);
        sqe.set_cid(CommandId(0));
        sqe.nsid = namespace.nsid;
        let mut status = Status::COMMAND_INTERRUPTED;
        for _ in 0..FLUSH_ATTEMPTS {
            status = self.carry_out(&mut queue, &sqe, memory);
            // Retry, as drivers do after commands that a reset or an Abort interrupted.
            if status != Status::COMMAND_INTERRUPTED {
                break;
            }
        }
        if status.is_success() {
            return Ok(());
        }
        let namespace = *namespace;
        Err(ControllerError::Flush { namespace, status })
    }

    /// Executes a command on a queue without other commands.
    fn carry_out(&self, queue: &mut VfioQueue, sqe: &Sqe, memory: HostMemory<'_>) -> Status {
        let mut batch = queue.batch();
        batch.announce(1, Ticks::now());
        batch.submit(sqe);
        batch.ring(memory);
        let mut completed = None;
        let clock = self.backing.clock();
        // The loop ends because the drive monitor ends every command.
        loop {
            queue.reap(memory, |completion: HostCompletion| {
                completed = Some(completion.status);
            });
            match completed {
                None => clock.sleep(FLUSH_PAUSE),
                Some(status) => return status,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_drive_that_wants_one_reset_after_the_other_is_not_waited_for_without_end() {
        let mut patience = JoinRetryLimit::new(7);
        let resets =
            (7..).take_while(|resets| patience.goes_on(&ControllerError::Resetting, *resets));
        assert_eq!(resets.count() as u64, JOIN_RESETS + 1);
        assert!(!patience.lasts(7 + JOIN_RESETS + 1));
        assert!(patience.goes_on(&ControllerError::Fatal, 7));
        assert!(!patience.goes_on(&ControllerError::Fatal, 7));
        assert!(!patience.goes_on(&ControllerError::Gone, 7));
    }
}
