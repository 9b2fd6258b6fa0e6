//! Survey of a drive's queue pairs, by which the governor gets counts of lone users.
//!
//! A lone user submits directly to its ring and counts only its commands in flight. So the drive monitor adds up these counts
//! ten times a second, by lease. An owner (a lease) is quiet or busy by the sum over all its queues, on all pairs. If commands
//! take noticeably long on a drive with quiet and busy owners, direct submission stops. Busy owners then get their
//! [`shares`](super::shares) by weight. If a drive has one owner, or is fast enough for all owners, the only cost is the
//! survey.

use std::sync::Arc;
use std::time::Duration;

use super::arbitration::LeaseShare;
use super::core::QueuePairCore;
use super::inflight_bound::{self, DriveWork, InFlightBound};
use super::shares::{OwnerShare, WeightedShares, scale};
use super::{DriveGovernor, VfioQueuePair};
use nvme_guest::adaptive::CommandClass;
use nvme_mpt_memory::clock::{TickRate, Ticks};
use nvme_spec::admin::QueuePriority;

/// Mean time of commands in the drive from which on a quiet owner (a lease with few commands) notices a busy one. It is a few
/// times the latency of a single command on a fast drive. On a slow drive, even a single command may take longer. The governor
/// then finds a window that costs busy owners little.
const NOTICEABLE_DELAY: Duration = Duration::from_micros(250);

/// Priority classes that are used for weighted round robin.
pub const PRIORITY_CLASSES: [QueuePriority; 3] = [
    QueuePriority::HIGH,
    QueuePriority::MEDIUM,
    QueuePriority::LOW,
];

/// Factor by which a lease's weight is multiplied before it is divided among the priority classes of the lease's queues.
const WEIGHT_RESOLUTION: u64 = 64;

/// Number of surveys after its last command for which an owner (a lease) still counts in the class weights, and after its last
/// busy survey for which it counts as busy there. With a large number, pauses of a guest do not change the weights again and
/// again.
const CLASS_SURVEYS: u8 = 50;

/// Load of a priority class: the weights of the leases whose queues have the class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClassLoad {
    /// Total weight of the owners (leases) with queues of this class; 0 if there is none. Quiet owners count too, because the
    /// drive serves all queues of a class in turn. All classes use the same unit.
    pub weight: u64,
    /// True if any owner with queues of this class is busy.
    pub is_busy: bool,
}

/// An owner (a lease) that counts in the weights of the priority classes.
#[derive(Debug)]
struct ClassUser {
    lease: Arc<LeaseShare>,
    /// Number of the owner's queues of each class, at the last survey in which the owner had commands.
    queues: [u64; PRIORITY_CLASSES.len()],
    /// Numbers of further surveys for which the owner counts at all, and for which it counts as busy.
    surveys_left: u8,
    busy_surveys_left: u8,
}

impl ClassUser {
    /// Adds the owner's weight to the loads of the classes, divided in proportion to its queues of each class.
    fn add_to(&self, loads: &mut [ClassLoad; PRIORITY_CLASSES.len()]) {
        let queues: u64 = self.queues.iter().sum();
        for (load, of_class) in loads.iter_mut().zip(self.queues) {
            if of_class > 0 {
                let weight = self.lease.weight() * WEIGHT_RESOLUTION * of_class / queues;
                load.weight += weight.max(1);
                load.is_busy |= self.busy_surveys_left > 0;
            }
        }
    }
}

/// An owner (a lease) with commands, as one survey finds it.
#[derive(Debug)]
struct SurveyedOwner {
    lease: Arc<LeaseShare>,
    outstanding: u32,
    /// Number of the owner's queues.
    queues: u64,
    /// Number of the owner's queues of each priority class.
    queues_by_class: [u64; PRIORITY_CLASSES.len()],
    /// Number of further surveys for which the owner counts as busy, even without many commands.
    busy_surveys_left: u8,
    /// Number of the owner's bytes that had gone to the drive before this survey, and the owner's limit after it.
    bytes: u64,
    limit: Option<u64>,
}

/// Time between two surveys of a drive monitor that gets enough processor time.
const SURVEY_INTERVAL: Duration = Duration::from_millis(100);

/// Number of surveys after its last busy survey for which an owner still counts as busy. A guest has moments without commands
/// when it resets its controller or maps memory.
const BUSY_SURVEYS: u8 = 5;

impl SurveyedOwner {
    /// Returns whether the owner is busy, or was busy within the last [`BUSY_SURVEYS`] surveys.
    fn is_busy(&self) -> bool {
        self.has_demand() || self.busy_surveys_left > 0
    }

    /// Returns whether the owner has more outstanding commands than a quiet owner.
    fn has_demand(&self) -> bool {
        CommandClass::is_heavy(self.outstanding, 0)
    }

    /// Returns the owner's use of the drive and its limit. The bytes that it got in `elapsed` ticks are scaled to an interval
    /// of `interval` ticks.
    fn owner_share(&self, interval: u64, elapsed: u64) -> OwnerShare {
        let got = self.lease.dispatched_bytes().saturating_sub(self.bytes);
        OwnerShare {
            weight: self.lease.weight(),
            received_bytes: scale(got, interval, elapsed),
            has_demand: self.has_demand(),
            limit: self.limit,
        }
    }
}

/// Survey of a drive: of its owners (leases), and of the time that their commands take.
#[derive(Debug)]
pub struct DriveSurvey {
    noticeable_ticks: u64,
    interval_ticks: u64,
    /// Owners that have commands in the present survey, or have had some since the previous one.
    owners: Vec<SurveyedOwner>,
    /// Owners of the previous survey.
    previous_owners: Vec<SurveyedOwner>,
    class_users: Vec<ClassUser>,
    shares: WeightedShares,
    /// Number of pairs that have users in the present survey.
    used_pairs: usize,
    /// True if some pair had no free entry for heavy users in the present survey.
    is_full: bool,
    /// Limit of the drive's bytes in flight, by which no command exceeds `timeout=`; `None` until the first survey.
    inflight_bound: Option<InFlightBound>,
    /// Numbers of bytes that have completed since the last survey, and of bytes in flight. Direct commands of lone users do not
    /// count.
    completed_bytes: u64,
    inflight_bytes: u64,
    /// True if a light user was active in the previous survey, and the drive was weighed then.
    had_light: bool,
    /// True if the drive was weighed in the previous survey: its busy owners were limited to their shares by weight.
    is_weighed: bool,
    /// Time of the last survey.
    surveyed_at: Ticks,
    /// Number of commands that were in flight on all pairs at the survey before the last one.
    previous_inflight: u64,
    /// Number of commands that were submitted between the last two surveys.
    submitted_commands: u64,
    /// Number of commands that were in flight on all pairs at the last survey.
    inflight_commands: u64,
    /// Number of the commands in `inflight_commands` that lone users had submitted directly.
    direct_commands: u64,
}

impl DriveSurvey {
    /// Creates the survey of a drive that was not surveyed yet. `rate` is the tick rate of the clock.
    #[must_use]
    pub fn new(rate: TickRate) -> Self {
        Self {
            noticeable_ticks: rate.ticks(NOTICEABLE_DELAY),
            interval_ticks: rate.ticks(SURVEY_INTERVAL),
            owners: Vec::new(),
            previous_owners: Vec::new(),
            class_users: Vec::new(),
            shares: WeightedShares::default(),
            used_pairs: 0,
            is_full: false,
            inflight_bound: None,
            completed_bytes: 0,
            inflight_bytes: 0,
            had_light: false,
            is_weighed: false,
            surveyed_at: Ticks::default(),
            previous_inflight: 0,
            submitted_commands: 0,
            inflight_commands: 0,
            direct_commands: 0,
        }
    }

    /// Surveys all pairs of a drive, and updates the drive's governor and the limits of the owners.
    pub fn survey_pairs<'a>(
        &mut self,
        governor: &DriveGovernor,
        pairs: impl IntoIterator<Item = &'a VfioQueuePair> + Clone,
        now: Ticks,
    ) {
        let elapsed = now.since(self.surveyed_at);
        (self.surveyed_at, self.previous_inflight) = (now, self.inflight_commands);
        (
            self.submitted_commands,
            self.inflight_commands,
            self.direct_commands,
        ) = (0, 0, 0);
        (self.used_pairs, self.is_full) = (0, false);
        (self.completed_bytes, self.inflight_bytes) = (0, 0);
        std::mem::swap(&mut self.owners, &mut self.previous_owners);
        self.owners.clear();
        for pair in pairs.clone() {
            self.add_pair(pair.priority(), &mut pair.shared.lock(), now, elapsed);
        }
        self.limit_inflight(governor, pairs, elapsed, now);
        self.update_class_users();
        self.remember_busy();
        let busy = self.owners.iter().filter(|it| it.is_busy()).count();
        let is_slow = governor.waiting().count() > 0 || self.is_slow(elapsed);
        if is_slow && busy > 0 && busy < self.owners.len() {
            governor.mark_contended(now);
        }
        // If the only used pair has no free entry, its arbitration alone divides the drive. If entries are free, no command
        // waits for arbitration, and the drive has all commands that were submitted.
        let is_divided = self.used_pairs == 1 && self.is_full;
        let is_contended = is_slow && busy > 1 && !is_divided;
        self.limit_by_weight(governor, is_contended, elapsed, now);
        // While direct submission is enabled, the number may grow at any time, so it is not reported.
        let direct = governor
            .is_direct_disabled(now)
            .then_some(self.direct_commands);
        governor.set_direct_commands(direct);
    }

    /// Returns the loads of the [priority classes](PRIORITY_CLASSES) at the last survey.
    #[must_use]
    pub fn class_loads(&self) -> [ClassLoad; PRIORITY_CLASSES.len()] {
        let mut loads = [ClassLoad::default(); PRIORITY_CLASSES.len()];
        self.class_users
            .iter()
            .for_each(|user| user.add_to(&mut loads));
        loads
    }

    /// Updates the owners that count in the class weights. Drops those that have had no commands for [`CLASS_SURVEYS`] surveys.
    fn update_class_users(&mut self) {
        for user in &mut self.class_users {
            user.surveys_left = user.surveys_left.saturating_sub(1);
            user.busy_surveys_left = user.busy_surveys_left.saturating_sub(1);
        }
        for owner in &self.owners {
            let busy_looks = if owner.has_demand() { CLASS_SURVEYS } else { 0 };
            let mut known = self.class_users.iter_mut();
            match known.find(|user| Arc::ptr_eq(&user.lease, &owner.lease)) {
                Some(user) => {
                    user.queues = owner.queues_by_class;
                    user.surveys_left = CLASS_SURVEYS;
                    user.busy_surveys_left = user.busy_surveys_left.max(busy_looks);
                }
                None => self.class_users.push(ClassUser {
                    lease: owner.lease.clone(),
                    queues: owner.queues_by_class,
                    surveys_left: CLASS_SURVEYS,
                    busy_surveys_left: busy_looks,
                }),
            }
        }
        self.class_users.retain(|user| user.surveys_left > 0);
    }

    /// Takes over, from the previous survey, for how many further surveys each owner counts as busy. Adds the owners that have
    /// no commands in the present survey.
    fn remember_busy(&mut self) {
        for old in &self.previous_owners {
            let busy_looks = match old.has_demand() {
                true => BUSY_SURVEYS,
                false => old.busy_surveys_left.saturating_sub(1),
            };
            if busy_looks == 0 {
                continue;
            }
            let mut known = self.owners.iter_mut();
            match known.find(|owner| Arc::ptr_eq(&owner.lease, &old.lease)) {
                Some(owner) => owner.busy_surveys_left = busy_looks,
                None => self.owners.push(SurveyedOwner {
                    lease: old.lease.clone(),
                    outstanding: 0,
                    queues: 0,
                    queues_by_class: [0; PRIORITY_CLASSES.len()],
                    busy_surveys_left: busy_looks,
                    bytes: old.lease.dispatched_bytes(),
                    limit: None,
                }),
            }
        }
    }

    /// Sets the limits by weight of the busy owners if the drive is contended; otherwise removes them.
    fn limit_by_weight(
        &mut self,
        governor: &DriveGovernor,
        is_contended: bool,
        elapsed: u64,
        now: Ticks,
    ) {
        if !is_contended {
            if std::mem::take(&mut self.is_weighed) {
                governor.end_weight_limits();
                self.shares.forget();
            }
            for owner in self.previous_owners.iter().chain(&self.owners) {
                owner.lease.set_byte_limit(None);
            }
            return;
        }
        let mut previous = std::mem::take(&mut self.previous_owners);
        // With a quiet owner, the drive has another throughput than without one. So the estimate and the limits start anew.
        let has_light = governor.is_light_active(now);
        if std::mem::replace(&mut self.had_light, has_light) != has_light {
            self.shares.forget();
            previous.iter_mut().for_each(|owner| owner.limit = None);
        }
        for old in &previous {
            let mut owners = self.owners.iter_mut();
            match owners.find(|owner| Arc::ptr_eq(&owner.lease, &old.lease)) {
                Some(owner) => {
                    owner.bytes = old.bytes;
                    owner.limit = old.limit.filter(|_| owner.is_busy());
                }
                None => old.lease.set_byte_limit(None),
            }
        }
        self.previous_owners = previous;
        // While a light user is active, busy owners' commands wait in front of the drive, so the drive counts as slow.
        let is_slow = self.is_slow(elapsed) || has_light;
        let owners = self.owners.iter_mut();
        let mut busy: Vec<_> = owners.filter(|owner| owner.is_busy()).collect();
        let mut portions: Vec<_> = busy
            .iter()
            .map(|owner| owner.owner_share(self.interval_ticks, elapsed))
            .collect();
        if std::mem::replace(&mut self.is_weighed, true) {
            let done = scale(self.completed_bytes, self.interval_ticks, elapsed);
            self.shares.divide_limits(&mut portions, done, is_slow);
        }
        for (owner, portion) in busy.iter_mut().zip(portions) {
            owner.limit = portion.limit;
        }
        for owner in &mut self.owners {
            owner.bytes = owner.lease.dispatched_bytes();
            owner
                .lease
                .set_byte_limit(owner.limit.filter(|_| owner.is_busy()));
        }
        governor.limit_by_weight(now);
    }

    /// Limits the bytes in flight of each pair while the drive is not known to be fast. Each owner gets a part of the drive's
    /// limit by its weight, and each of its queues an equal part of that.
    fn limit_inflight<'a>(
        &mut self,
        governor: &DriveGovernor,
        pairs: impl IntoIterator<Item = &'a VfioQueuePair>,
        elapsed: u64,
        now: Ticks,
    ) {
        let backlog = self
            .inflight_bound
            .get_or_insert_with(|| InFlightBound::new(governor.quarter_timeout()));
        let work = DriveWork {
            elapsed,
            completed_bytes: self.completed_bytes,
            inflight_bytes: self.inflight_bytes,
            completed_commands: (self.previous_inflight + self.submitted_commands)
                .saturating_sub(self.inflight_commands),
            inflight_commands: self.inflight_commands,
        };
        let bound = backlog.update(work);
        if bound.is_some() && backlog.is_late(work) {
            governor.disable_direct(now);
        }
        let Some(bound) = bound else {
            // Pairs that were created after the last survey have an initial limit, which is removed.
            pairs
                .into_iter()
                .for_each(|pair| pair.shared.lock().limit_heavy_bytes(None));
            return;
        };
        let weights = self.owners.iter().map(|owner| owner.lease.weight());
        let weights: u64 = weights.sum();
        for pair in pairs {
            let mut core = pair.shared.lock();
            let parts = core.staying_users().filter_map(|(_, user)| {
                let of = |owner: &&SurveyedOwner| Arc::ptr_eq(&owner.lease, &user.queue.lease);
                let owner = self.owners.iter().find(of)?;
                Some(owner.lease.weight() as f64 / owner.queues.max(1) as f64)
            });
            let part: f64 = parts.sum();
            let bytes = match part > 0.0 {
                true => (bound as f64 * part / weights as f64) as u64,
                // The pair was not used after the last survey.
                false => inflight_bound::INITIAL_LIMIT.min(bound),
            };
            core.limit_heavy_bytes(Some(bytes));
        }
    }

    /// Adds the commands and owners of a pair in the last `elapsed` ticks to the survey.
    fn add_pair(
        &mut self,
        priority: QueuePriority,
        core: &mut QueuePairCore,
        now: Ticks,
        elapsed: u64,
    ) {
        let (taken, in_flight) = (core.stats().commands, core.in_flight() as u64);
        let commands = taken - std::mem::replace(&mut core.surveyed_commands, taken);
        self.submitted_commands += commands;
        self.inflight_commands += in_flight;
        self.direct_commands += core.direct_count() as u64;
        let (completed_bytes, heavy) = core.take_heavy_bytes();
        self.completed_bytes += completed_bytes;
        self.inflight_bytes += heavy;
        self.used_pairs += usize::from(core.user_count() > 0);
        self.is_full |= core.is_full();
        let is_lone = core.user_count() == 1;
        for (_, user) in core.staying_users() {
            let counted = user.counted();
            let (outstanding, is_active) = match is_lone {
                true => (counted.max(in_flight as u32), commands > 0 || in_flight > 0),
                false => (counted, now.since(user.last_batch) <= elapsed),
            };
            if is_active || outstanding > 0 {
                self.add_user(&user.queue.lease, priority, outstanding);
            }
        }
    }

    fn add_user(&mut self, lease: &Arc<LeaseShare>, priority: QueuePriority, outstanding: u32) {
        let in_classes = PRIORITY_CLASSES.map(|class| u64::from(class == priority));
        let mut known = self.owners.iter_mut();
        match known.find(|owner| Arc::ptr_eq(&owner.lease, lease)) {
            Some(owner) => {
                owner.outstanding = owner.outstanding.saturating_add(outstanding);
                owner.queues += 1;
                for (class, one) in owner.queues_by_class.iter_mut().zip(in_classes) {
                    *class += one;
                }
            }
            None => self.owners.push(SurveyedOwner {
                lease: lease.clone(),
                outstanding,
                queues: 1,
                queues_by_class: in_classes,
                busy_surveys_left: 0,
                bytes: lease.dispatched_bytes(),
                limit: None,
            }),
        }
    }

    /// Returns whether the mean time of commands is noticeable for quiet owners. By Little's law, it is the number of commands
    /// in flight divided by the number of completions per tick.
    fn is_slow(&self, elapsed: u64) -> bool {
        let completed = (self.previous_inflight + self.submitted_commands)
            .saturating_sub(self.inflight_commands);
        u128::from(self.inflight_commands) * u128::from(elapsed)
            > u128::from(completed) * u128::from(self.noticeable_ticks)
    }
}
