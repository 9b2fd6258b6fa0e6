//! I/O queue pairs of a drive: granted, created on demand, and shared once the drive has no more.
//!
//! A created pair is never deleted while the drive is in use; the next queue that needs a pair reuses it. So the end of a queue
//! needs no admin command. A lease can reserve pairs (`reservations.rs`).

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use log::warn;

use super::super::device_backing::DeviceBacking;
use super::super::queue_pair::{
    ClassLoad, DriveGovernor, DriveSurvey, ENTRIES_MAX, LeaseShare, PRIORITY_CLASSES, PairConfig,
    PairDoorbells, QueuePairActivity, VfioQueue, VfioQueuePair,
};
use super::admin_queue::AdminQueue;
use super::doorbell_buffer::pair_doorbells;
use super::drive_monitor::CHECK_INTERVAL;
use super::error::ControllerError;
use super::{PhysicalDrive, lock};
use nvme_driver::{DriverError, QueuePairAddresses};
use nvme_guest::address::PAGE_SIZE;
use nvme_guest::dma::RegionTable;
use nvme_mpt::drive::{HostNamespace, QueuePairUse, ReservedPairs};
use nvme_mpt::host::ListMemory;
use nvme_mpt::host::{HostBatch, HostCompletion, HostMemory, HostQueue};
use nvme_mpt_memory::clock::{TickRate, Ticks, ticks_in};
use nvme_mpt_memory::sync::{Mutex, MutexGuard};
use nvme_spec::admin::QueuePriority;
use nvme_spec::ids::{CommandId, QueueId};
use nvme_spec::opcode::NvmOpcode;
use nvme_spec::registers::{Cap, Doorbell};
use nvme_spec::sqe::Sqe;
use nvme_spec::status::Status;

/// Interval at which a caller polls for the completion of a Flush.
const FLUSH_POLL_INTERVAL: Duration = Duration::from_micros(200);

/// Time without commands after which a queue pair counts as idle, so that it can be lent to queues of a busy pair.
const IDLE_TIME: Duration = Duration::from_secs(1);

/// [`IDLE_TIME`] as a number of checks by the drive monitor.
const IDLE_CHECKS: u32 = (IDLE_TIME.as_millis() / CHECK_INTERVAL.as_millis()) as u32;

/// Maximum number of times that a Flush is sent, because a reset or an Abort may interrupt it.
const FLUSH_ATTEMPTS: u32 = 5;

/// Maximum number of attempts to create a pair for a queue. Each may end in a reset, so the number bounds the resets by a drive
/// that fails on every new pair.
const JOIN_ATTEMPTS: u32 = 2;

/// Maximum number of resets for whose ends a new queue waits until it gets a pair, so that the wait is bounded.
const JOIN_RESETS: u64 = 5;

/// Maximum time that a reservation of queue pairs waits for the end of a reset. The time is short, because changes of other
/// drives' functions wait for the reservation.
const RESET_TIMEOUT: Duration = Duration::from_secs(2);

/// Number of queue pairs that the drive is asked for. It grants as many as it has.
const REQUESTED_PAIRS: u16 = 1024;

/// I/O queue pairs of a drive. The pair with identifier `n` is at index `n - 1`.
#[derive(Debug)]
pub(super) struct QueuePairs {
    /// Number of pairs that the drive can have. It is less than `granted` if the drive has refused to create a pair.
    total: u16,
    /// Number of pairs that the drive granted when it was opened.
    granted: u16,
    entries: u32,
    pairs: Vec<OwnedPair>,
    /// Pair that the next attempt creates, after a failed one. Its memory stays allocated, because the drive may use one of its
    /// queues until a reset.
    failed_pair: Option<VfioQueuePair>,
    /// Reservations of queue pairs, oldest first.
    pub(super) holders: Vec<ReservationHolder>,
    governor: Arc<DriveGovernor>,
    survey: DriveSurvey,
    shared_counts: SharedPairCounts,
    /// True during a reset, in which no pair is added.
    pub(super) is_resetting: bool,
}

/// A lease's reservation of queue pairs of the drive.
#[derive(Debug)]
pub(super) struct ReservationHolder {
    /// Key of the reservation of queue pairs, unique in this process.
    pub(super) key: u64,
    pub(super) pairs: ReservedPairs,
}

/// Numbers of the pairs for statistics, behind a lock of their own. The lock of [`QueuePairs`] is held while the drive creates
/// a pair, and readers of the statistics do not wait for that.
#[derive(Clone, Debug, Default)]
pub(super) struct SharedPairCounts(Arc<Mutex<PairCounts>>);

#[derive(Debug, Default)]
struct PairCounts {
    total: u16,
    reserved: u16,
    /// Pairs that no lease has reserved.
    others: Vec<VfioQueuePair>,
}

impl SharedPairCounts {
    pub(super) fn usage(&self) -> QueuePairUse {
        let counted = lock(&self.0);
        let with = |wanted: fn(usize) -> bool| {
            let others = counted.others.iter();
            others.filter(|pair| wanted(pair.user_count())).count() as u16
        };
        QueuePairUse {
            total: counted.total,
            reserved: counted.reserved,
            exclusive: with(|users| users == 1),
            shared: with(|users| users > 1),
        }
    }
}

/// A pair of the drive. `owner` is the key of the reservation of queue pairs that it belongs to, if any.
#[derive(Debug)]
struct OwnedPair {
    pair: VfioQueuePair,
    owner: Option<u64>,
    activity: QueuePairActivity,
}

impl QueuePairs {
    /// Requests queue pairs from the drive with Number of Queues (Base 2.0, section 5.27.1.5): as many as BAR0 has doorbells
    /// for, at most.
    pub(super) fn request_pairs(
        admin: &mut AdminQueue,
        backing: &dyn DeviceBacking,
        cap: Cap,
        governor: DriveGovernor,
    ) -> Result<Self, ControllerError> {
        let (doorbells, first) = backing.doorbells();
        let max_bytes = doorbells.len().saturating_sub(first) as u64;
        let pairs = (max_bytes / (2 * Doorbell::stride_bytes(cap.dstrd()))).saturating_sub(1);
        let fit = u16::try_from(pairs).unwrap_or(u16::MAX);
        let total = set_number_of_queues(admin)?.min(fit);
        Self::new(total, total, cap, governor)
    }

    /// Creates the list of a drive's pairs, without any. The drive has granted `granted` pairs and can have `total` of them.
    pub(super) fn new(
        total: u16,
        granted: u16,
        cap: Cap,
        governor: DriveGovernor,
    ) -> Result<Self, ControllerError> {
        if total == 0 {
            return Err(ControllerError::NoQueuePairs);
        }
        // MQES is zero-based, and the specification requires at least 1.
        let entries = (u32::from(cap.mqes_z()) + 1).clamp(2, ENTRIES_MAX);
        let pairs = Self {
            total,
            granted: granted.max(total),
            entries,
            pairs: Vec::new(),
            failed_pair: None,
            holders: Vec::new(),
            governor: Arc::new(governor),
            survey: DriveSurvey::new(TickRate::measured()),
            shared_counts: SharedPairCounts::default(),
            is_resetting: false,
        };
        pairs.publish_counts();
        Ok(pairs)
    }

    /// Returns a handle of the counts for statistics.
    pub(super) fn shared_counts(&self) -> SharedPairCounts {
        self.shared_counts.clone()
    }

    /// Updates the numbers of the pairs for statistics.
    fn publish_counts(&self) {
        *lock(&self.shared_counts.0) = PairCounts {
            total: self.total,
            reserved: self.reserved(),
            others: self.owned_by(None).cloned().collect(),
        };
    }

    pub(super) fn total(&self) -> u16 {
        self.total
    }

    /// Returns the number of pairs that the drive granted when it was opened.
    pub(super) fn granted(&self) -> u16 {
        self.granted
    }

    /// Records the number of pairs that the drive grants after a reset. The reset has deleted all queues, so the drive may now
    /// create pairs that it refused before.
    pub(super) fn set_granted(&mut self, granted: u16) {
        self.failed_pair = None;
        self.total = granted.min(self.granted).max(self.count());
        self.publish_counts();
    }

    /// Returns whether the doorbells of all pairs fit into a page of a Doorbell Buffer.
    pub(super) fn can_use_doorbell_buffer(&self, dstrd: u8) -> bool {
        Doorbell::area_bytes(self.total, dstrd) <= PAGE_SIZE
    }

    /// Iterates over the created pairs with their identifiers.
    pub(super) fn iter(&self) -> impl Iterator<Item = (QueueId, &VfioQueuePair)> {
        let pairs = self.pairs.iter().map(|owned| &owned.pair);
        (1..).map(QueueId).zip(pairs)
    }

    /// Returns handles of the created pairs with their identifiers, for use without the lock of this list.
    pub(super) fn clone_pairs(&self) -> Vec<(QueueId, VfioQueuePair)> {
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

    /// Iterates over the pairs that belong to a reservation of queue pairs, given by its key; over the unreserved pairs for
    /// `None`.
    fn owned_by(&self, owner: Option<u64>) -> impl Iterator<Item = &VfioQueuePair> {
        let owned = self.pairs.iter().filter(move |owned| owned.owner == owner);
        owned.map(|owned| &owned.pair)
    }

    /// Returns the number of reserved pairs.
    pub(super) fn reserved(&self) -> u16 {
        self.count() - self.owned_by(None).count() as u16
    }

    pub(super) fn usage(&self) -> QueuePairUse {
        self.shared_counts.usage()
    }

    /// Returns the unreserved pair with the fewest users.
    fn least_used(&self) -> Option<&VfioQueuePair> {
        self.owned_by(None).min_by_key(|pair| pair.user_count())
    }

    /// Returns the unreserved pair with the fewest users. Among equal pairs, one of this priority class is preferred.
    fn least_used_in_class(&self, priority: QueuePriority) -> Option<&VfioQueuePair> {
        let by_use = |pair: &&VfioQueuePair| (pair.user_count(), pair.priority() != priority);
        self.owned_by(None).min_by_key(by_use)
    }

    /// Returns a pair without users that belongs to a reservation of queue pairs, given by its key; an unreserved pair for
    /// `None`. Returns `None` if each of them has users.
    fn find_unused(&self, reservation: Option<u64>) -> Option<&VfioQueuePair> {
        reservation?;
        self.owned_by(reservation)
            .find(|pair| pair.user_count() == 0)
    }

    /// Adds the unreserved pair with the fewest users to a reservation of queue pairs, given by its key. Among equal pairs, one
    /// of this priority class is preferred. The users of the pair migrate to other unreserved pairs.
    pub(super) fn assign_pair(&mut self, key: u64, priority: QueuePriority) {
        let by_use =
            |owned: &&mut OwnedPair| (owned.pair.user_count(), owned.pair.priority() != priority);
        let unowned = self.pairs.iter_mut().filter(|owned| owned.owner.is_none());
        let Some(chosen) = unowned.min_by_key(by_use) else {
            return;
        };
        chosen.owner = Some(key);
        chosen.pair.set_reserved(true);
        let pair = chosen.pair.clone();
        self.publish_counts();
        while let Some(other) = self.least_used()
            && pair.migrate_one(other, |_| true)
        {}
    }

    /// Ends a reservation of queue pairs, given by its key: queues of all leases may use its pairs again.
    pub(super) fn unassign_pairs(&mut self, key: u64) {
        for owned in &mut self.pairs {
            if owned.owner == Some(key) {
                owned.owner = None;
                owned.pair.set_reserved(false);
            }
        }
        self.publish_counts();
    }

    /// Migrates queues: to unused pairs that their leases have reserved; and among the unreserved pairs, until no pair has two
    /// users more than another.
    pub(super) fn rebalance(&self) {
        for owned in &self.pairs {
            if let Some(key) = owned.owner
                && owned.pair.user_count() == 0
            {
                let mut others = self.owned_by(None);
                others.any(|other| other.migrate_one(&owned.pair, |of| of == Some(key)));
            }
        }
        while let Some(least) = self.least_used()
            && let Some(most) = self.owned_by(None).max_by_key(|pair| pair.user_count())
            && most.user_count() > least.user_count() + 1
            && most.migrate_one(least, |_| true)
        {}
    }

    /// Surveys the users of all pairs, which updates the drive's governor. Returns the load of each priority class. Called by
    /// the drive monitor in each check.
    pub(super) fn survey(&mut self) -> [ClassLoad; PRIORITY_CLASSES.len()] {
        let pairs = self.pairs.iter().map(|owned| &owned.pair);
        self.survey
            .survey_pairs(&self.governor, pairs, Ticks::now());
        self.survey.class_loads()
    }

    /// Lends idle pairs to queues that share a pair with busy queues. Called by the drive monitor in each check.
    pub(super) fn lend_idle_pairs(&mut self) {
        let (now, within) = (Ticks::now(), ticks_in(IDLE_TIME));
        let unowned = self.pairs.iter_mut().filter(|owned| owned.owner.is_none());
        let mut idle = Vec::new();
        let mut others = Vec::new();
        for OwnedPair { pair, activity, .. } in unowned {
            let is_idle = activity.check(pair) >= IDLE_CHECKS && !pair.is_lent();
            if is_idle {
                idle.push(&*pair);
            } else {
                others.push(&*pair);
            }
        }
        for pair in idle {
            let awake = others
                .iter()
                .map(|other| (other.active_queues(now, within), other));
            let crowded = awake.max_by_key(|(awake, _)| *awake);
            if let Some((2.., crowded)) = crowded {
                pair.lend_to(crowded, now, within);
            }
        }
    }
}

/// Limit of the retries for a queue that needs a new pair, on a drive that fails while it creates the pair.
#[derive(Debug)]
struct JoinRetryLimit {
    /// Number of attempts to create the pair that ended in a reset.
    failed_attempts: u32,
    /// Number of the drive's resets that had begun before the first attempt.
    resets_before: u64,
}

impl JoinRetryLimit {
    fn new(resets: u64) -> Self {
        Self {
            failed_attempts: 0,
            resets_before: resets,
        }
    }

    /// Returns whether the queue may wait for the end of another reset. `resets` is the number of the drive's resets that have
    /// begun.
    fn should_wait(&self, resets: u64) -> bool {
        resets.saturating_sub(self.resets_before) <= JOIN_RESETS
    }

    /// Returns whether to try again after `error`. `resets` is the number of the drive's resets that have begun.
    fn should_retry(&mut self, error: &ControllerError, resets: u64) -> bool {
        match error {
            // The command was not sent to the drive, so the attempt does not count.
            ControllerError::Resetting => self.should_wait(resets),
            ControllerError::AdminTimeout { .. }
            | ControllerError::Fatal
            | ControllerError::Lost => {
                self.failed_attempts += 1;
                self.failed_attempts < JOIN_ATTEMPTS
            }
            _ => false,
        }
    }
}

/// Sends Set Features, Number of Queues, which the drive needs after each reset. Returns the number of granted pairs.
pub(super) fn set_number_of_queues(admin: &mut AdminQueue) -> Result<u16, ControllerError> {
    Ok(admin
        .request_queue_pairs(REQUESTED_PAIRS)?
        .min(REQUESTED_PAIRS))
}

/// Creates the queues of a pair on the drive, without interrupts (Base 2.0, sections 5.4 and 5.5). Returns the priority class
/// that the Submission Queue has: Medium if the drive refuses the requested class.
pub(super) fn create_queues(
    admin: &mut AdminQueue,
    qid: QueueId,
    pair: &VfioQueuePair,
    priority: QueuePriority,
) -> Result<QueuePriority, ControllerError> {
    let addresses = QueuePairAddresses {
        sq: pair.sq_iova().bits(),
        cq: pair.cq_iova().bits(),
        // At most `ENTRIES_MAX` entries, so the number fits into 16 bits.
        entries: pair.entries() as u16,
    };
    admin.create_cq(qid, &addresses)?;
    let mut create_sq = |qprio| admin.create_sq(qid, &addresses, qprio).map(|()| qprio);
    let created = match create_sq(priority) {
        // Any failure counts as a refusal of the class: drives use different statuses for it.
        Err(DriverError::Admin { .. }) if priority != QueuePriority::MEDIUM => {
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
    if let DriverError::Admin { .. } = error {
        // The Completion Queue is deleted, so that the next attempt can use its identifier and the memory can be freed.
        return Err(match admin.delete_cq(qid) {
            Ok(()) => error.into(),
            Err(DriverError::Admin { .. }) => ControllerError::QueueNotDeleted { qid },
            Err(unanswered) => unanswered.into(),
        });
    }
    Err(error.into())
}

/// Deletes the queues of a pair on the drive (Base 2.0, sections 5.6 and 5.7). The deletion ends all commands of these queues.
pub(super) fn delete_queues(admin: &mut AdminQueue, qid: QueueId) -> Result<(), ControllerError> {
    admin.delete_sq(qid)?;
    Ok(admin.delete_cq(qid)?)
}

impl PhysicalDrive {
    /// Returns whether a reset is pending or in progress and the drive may work again afterwards. Returns false for a drive
    /// that was given up, although the reset may need up to another minute to release the drive.
    fn can_recover(&self, pairs: &QueuePairs) -> bool {
        (pairs.is_resetting || self.needs_reset.load(Ordering::Acquire)) && !self.is_gone()
    }

    /// Waits until no reset is pending or in progress, or until the drive is given up, and returns the pairs. Fails after the
    /// number of resets that the retry limit permits.
    fn pairs_after_reset(
        &self,
        retry_limit: &JoinRetryLimit,
    ) -> Result<MutexGuard<'_, QueuePairs>, ControllerError> {
        let pairs = lock(&self.pairs);
        let waited = self.reset_ended.wait_while(pairs, |pairs| {
            self.can_recover(pairs) && retry_limit.should_wait(self.reset_count())
        });
        let pairs = waited.unwrap_or_else(PoisonError::into_inner);
        match self.can_recover(&pairs) {
            true => Err(ControllerError::Resetting),
            false => Ok(pairs),
        }
    }

    /// Returns the number of the drive's resets that have begun.
    fn reset_count(&self) -> u64 {
        self.counters.resets.load(Ordering::Relaxed)
    }

    /// Waits for the end of a reset, and returns the pairs.
    ///
    /// # Errors
    /// [`ControllerError::Resetting`] if the reset takes longer than [`RESET_TIMEOUT`].
    pub(super) fn wait_for_pairs(&self) -> Result<MutexGuard<'_, QueuePairs>, ControllerError> {
        let pairs = lock(&self.pairs);
        let waited = self
            .reset_ended
            .wait_timeout_while(pairs, RESET_TIMEOUT, |pairs| self.can_recover(pairs));
        let (pairs, _) = waited.unwrap_or_else(PoisonError::into_inner);
        match self.can_recover(&pairs) {
            true => Err(ControllerError::Resetting),
            false => Ok(pairs),
        }
    }

    /// Joins a queue pair with at most `slots` commands.
    ///
    /// The order of preference is an unused pair of the lease's reservation, an unused unreserved pair, and a share of the
    /// least used unreserved pair. Pairs of the lease's [priority class](super::arbitration) are preferred, and one is created
    /// if the drive can have another pair. If the drive fails meanwhile, the pair is created after the reset.
    pub(super) fn join_queue_pair(
        &self,
        slots: u16,
        namespace: &HostNamespace,
        lease: &Arc<LeaseShare>,
    ) -> Result<VfioQueue, ControllerError> {
        let mut retry_limit = JoinRetryLimit::new(self.reset_count());
        loop {
            match self.try_join(slots, namespace, lease, &retry_limit) {
                Err(error) if retry_limit.should_retry(&error, self.reset_count()) => {}
                joined => return joined,
            }
        }
    }

    /// Waits until no reset is pending or in progress. Then makes a queue a user of a pair.
    fn try_join(
        &self,
        slots: u16,
        namespace: &HostNamespace,
        lease: &Arc<LeaseShare>,
        retry_limit: &JoinRetryLimit,
    ) -> Result<VfioQueue, ControllerError> {
        let mut pairs = self.pairs_after_reset(retry_limit)?;
        if self.is_gone() {
            return Err(ControllerError::Gone);
        }
        if let Some(pair) = pairs.find_unused(lease.reservation()) {
            return Ok(pair.join_lease(slots, namespace.lba_shift, lease));
        }
        let class = self.priority_class(lease.weight());
        let priority = class.unwrap_or(QueuePriority::MEDIUM);
        let least_used = pairs.least_used_in_class(priority);
        let is_idle = least_used.is_some_and(|pair| pair.user_count() == 0);
        let is_its = |pair: &VfioQueuePair| class.is_none_or(|class| pair.priority() == class);
        if !(is_idle && least_used.is_some_and(is_its)) {
            match self.add_pair(&mut pairs, priority) {
                Ok(_) => {}
                // An idle pair of another class serves the queue as well as a pair would without classes.
                Err(error) if is_idle => self.log_other_class(&error),
                Err(error) => return Err(error),
            }
        }
        let least_used = pairs.least_used_in_class(priority);
        let pair = least_used.ok_or(ControllerError::NoQueuePairs)?;
        if pair.user_count() > 0 {
            self.log_sharing(&pairs);
        }
        Ok(pair.join_lease(slots, namespace.lba_shift, lease))
    }

    /// Logs, once for the drive, that queues share pairs.
    pub(super) fn log_sharing(&self, pairs: &QueuePairs) {
        if !self.counters.is_sharing.swap(true, Ordering::Relaxed) {
            warn!(
                "Drive {} has {} queue pairs, fewer than its guests want: they share them from now on",
                self.backing.name(),
                pairs.total,
            );
        }
    }

    /// Logs, once for the drive, that a queue got an idle pair of another priority class, because no pair of its own class
    /// could be created.
    fn log_other_class(&self, error: &ControllerError) {
        if !self.counters.has_other_class.swap(true, Ordering::Relaxed) {
            let name = self.backing.name();
            warn!(
                drive = name;
                "Drive {name} has an idle queue pair used for a guest of another class, as it creates no other: {error}"
            );
        }
    }

    /// Creates another pair on the drive. Returns false if the drive can have no more pairs.
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
                    activity: QueuePairActivity::default(),
                });
                pairs.publish_counts();
            }
            // A drive may grant more queues than it can have at a time. The next attempt to create this pair follows after a
            // reset.
            Err(
                error @ (ControllerError::Admin { .. } | ControllerError::QueueNotDeleted { .. }),
            ) if !pairs.pairs.is_empty() => {
                warn!("Drive {} has no more queues: {error}", self.backing.name());
                pairs.total = pairs.count();
                pairs.publish_counts();
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
        if pairs.failed_pair.is_some() {
            self.with_admin(|admin| Ok(admin.delete_cq(qid)?))?;
            pairs.failed_pair = None;
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
            // Another thread may have ended weighted round robin while this thread waited for the admin queue.
            let priority = lock(&self.arbitration).priority(priority);
            if create_queues(admin, qid, &pair, priority)? != priority {
                self.end_priority_classes(admin);
            }
            Ok(())
        });
        match created {
            Ok(()) => Ok(pair),
            Err(error) => {
                let is_left = matches!(
                    error,
                    ControllerError::QueueNotDeleted { .. }
                        | ControllerError::AdminTimeout { .. }
                        | ControllerError::Fatal
                        | ControllerError::Lost
                );
                if is_left {
                    pairs.failed_pair = Some(pair);
                }
                Err(error)
            }
        }
    }

    pub(super) fn doorbells(&self, qid: QueueId) -> Result<PairDoorbells, ControllerError> {
        let dstrd = self.registers.cap().dstrd();
        pair_doorbells(
            self.backing.as_ref(),
            dstrd,
            self.doorbell_buffer.as_ref(),
            qid,
        )
    }

    /// Makes all completed writes of a namespace durable, with a Flush.
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
            status = self.execute_alone(&mut queue, &sqe, memory);
            // A command that a reset or an Abort interrupted is repeated, as drivers do.
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

    /// Executes a command on a queue without other commands in flight, and waits for its completion.
    fn execute_alone(&self, queue: &mut VfioQueue, sqe: &Sqe, memory: HostMemory<'_>) -> Status {
        let mut batch = queue.batch();
        batch.announce(1, Ticks::now());
        batch.submit(sqe);
        batch.ring(memory);
        let mut completed = None;
        let clock = self.backing.clock();
        // The loop ends, because the drive monitor ends every command that the drive does not complete.
        loop {
            queue.reap(memory, |completion: HostCompletion| {
                completed = Some(completion.status);
            });
            match completed {
                None => clock.sleep(FLUSH_POLL_INTERVAL),
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
        let mut retry_limit = JoinRetryLimit::new(7);
        let resets = (7..)
            .take_while(|resets| retry_limit.should_retry(&ControllerError::Resetting, *resets));
        assert_eq!(resets.count() as u64, JOIN_RESETS + 1);
        assert!(!retry_limit.should_wait(7 + JOIN_RESETS + 1));
        assert!(retry_limit.should_retry(&ControllerError::Fatal, 7));
        assert!(!retry_limit.should_retry(&ControllerError::Fatal, 7));
        assert!(!retry_limit.should_retry(&ControllerError::Gone, 7));
    }
}
