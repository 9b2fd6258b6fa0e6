//! The drive's own arbitration between its I/O Submission Queues (Base 2.0, section 3.4.4). Weighted round robin is used if it
//! is [chosen](ArbitrationChoice) and supported (`CAP.AMS`), else round robin.
//!
//! NVMe gives weights to priority classes, not to queues. With fixed class weights, a lease of low weight would get more than
//! its share while few leases have a low weight. A lease of high weight would get less than its share while many leases have a
//! high weight. So a class gets the total weight of the leases in it ([`ClassLoad`]). The drive monitor computes the totals in
//! each check and sends changes to the drive (Arbitration, FID 01h). The monitor ignores changes below a quarter and sends at
//! most [`CHANGES_MAX`] changes per minute, because some drives store features in flash. Guests that come and go must not wear
//! out the flash.
//!
//! A queue gets its class at creation (QPRIO): High if its lease is heavier than the default weight, Low if it is lighter. The
//! queue keeps this class even if weights change later, or if other leases use or share the pair. This does no harm, because
//! each check adds up the weights of the leases that are in the class then. The drive serves the queues of a class in turn, and
//! the governor evens out the bytes of their leases.
//!
//! Each class gets at least one command per round and at most [`CLASS_RUN_MAX`] in a row. A class with only quiet guests gets
//! as many commands per round as the class of the highest weight.
//!
//! No queue is Urgent, because the drive serves an Urgent queue before all others as long as the queue has commands. A quiet
//! guest's queue would stay Urgent after the guest becomes busy, because a class is permanent.
//!
//! Few drives are operated with weighted round robin, so it may not work although the drive reports it. Weighted round robin
//! has failed if the drive does not come up with it, does not answer Set Features, or refuses weights or a class. It is then
//! not used again for as long as this process has the drive, and the next enable selects round robin. Until that enable, the
//! classes get equal weights if possible, and new queues are Medium. A drive that did not answer Set Features gets equal
//! weights once it answers another command. If it completes the Set Features late, it gets equal weights again, but at most
//! [`EQUAL_ATTEMPTS`] times in all.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use log::{info, warn};

use super::super::queue_pair::{ClassLoad, PRIORITY_CLASSES};
use super::admin_queue::AdminQueue;
use super::drive_monitor::longest_pause;
use super::error::ControllerError;
use super::{PhysicalDrive, lock};
use nvme_driver::set_feature_command;
use nvme_guest::rate_limit::LeaseWeight;
use nvme_spec::admin::QueuePriority;
use nvme_spec::feature::{self, FeatureId};
use nvme_spec::registers::{ArbitrationMechanism, Cap};

/// Maximum number of commands of one class in a row: about as many as a fast drive executes in parallel.
const CLASS_RUN_MAX: u64 = 16;

/// Maximum Arbitration Burst that is sent, as the exponent of a power of two. Without a limit, one queue could take the turns
/// of all other queues in its class.
const BURST_MAX: u8 = feature::Arbitration::NO_LIMIT - 1;

/// Precision of the commands per round. A deviation from the weights of the leases below one part in 16 does not matter.
const PRECISION: u64 = 16;

/// Smallest change of the classes' shares that is sent to the drive: the ratio of two shares has changed by a quarter.
const CHANGE_MIN: (u64, u64) = (5, 4);

/// Maximum number of changes of the weights that are sent to the drive within [`CHANGES_PERIOD`].
const CHANGES_MAX: usize = 4;

/// Period in which at most [`CHANGES_MAX`] changes of the weights are sent.
const CHANGES_PERIOD: Duration = Duration::from_secs(60);

/// Maximum number of times that equal weights are sent after Set Features has timed out. A drive that does not answer blocks
/// the drive monitor for the admin timeout each time.
const EQUAL_ATTEMPTS: u8 = 3;

/// Arbitration mechanism that the operator chose for a drive (`CC.AMS`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ArbitrationChoice {
    /// Round robin, which every drive supports.
    #[default]
    RoundRobin,
    /// Weighted round robin with urgent priority class, if the drive supports it and works with it.
    Weighted,
}

impl FromStr for ArbitrationChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "round-robin" => Ok(Self::RoundRobin),
            "weighted" => Ok(Self::Weighted),
            _ => Err(format!(
                "`{text}` is not an arbitration; use round-robin (queues have turns) or weighted (the drive counts \
                 weights)"
            )),
        }
    }
}

impl fmt::Display for ArbitrationChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::RoundRobin => "round-robin",
            Self::Weighted => "weighted",
        })
    }
}

/// Weights for the drive: the number of commands per round of each [priority class](PRIORITY_CLASSES).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ClassWeights([u8; PRIORITY_CLASSES.len()]);

impl ClassWeights {
    const EQUAL: Self = Self([1; PRIORITY_CLASSES.len()]);

    /// Returns the numbers of commands per round that are closest to the classes' weights; `None` if no class is busy. If
    /// several rounds are equally close, returns the shortest one.
    fn from_loads(loads: &[ClassLoad; PRIORITY_CLASSES.len()]) -> Option<Self> {
        let most = heaviest_weight(loads)?;
        let wanted = loads.map(|load| if load.is_busy { load.weight } else { most });
        let round = |longest: u64| {
            wanted.map(|weight| ((weight * longest + most / 2) / most).clamp(1, CLASS_RUN_MAX))
        };
        let error = |longest: u64| {
            let classes = wanted.into_iter().zip(round(longest));
            let errors = classes.map(|(weight, commands)| {
                let exact = weight * longest;
                PRECISION * exact.abs_diff(commands * most) / exact
            });
            errors.max()
        };
        let longest = (1..=CLASS_RUN_MAX).min_by_key(|longest| error(*longest))?;
        // At most `CLASS_RUN_MAX`, so the number fits into 8 bits.
        Some(Self(round(longest).map(|commands| commands as u8)))
    }

    /// Returns whether these weights may stay for `loads`: the shares of the classes by both differ by less than a quarter.
    /// Classes without leases do not count, and a class with only quiet guests may have more than its share.
    fn is_close_to(self, loads: &[ClassLoad; PRIORITY_CLASSES.len()]) -> bool {
        let Some(most) = heaviest_weight(loads) else {
            return true;
        };
        let classes = self.0.into_iter().zip(loads);
        let used = classes.filter(|(_, load)| load.weight > 0);
        let shares = used.map(|(commands, load)| {
            let wanted = if load.is_busy { load.weight } else { most };
            // In every round, each class gets at least 1/`CLASS_RUN_MAX` of the heaviest class's commands, so a lower weight is
            // raised to that.
            let wanted = (CLASS_RUN_MAX * wanted).max(most);
            (u64::from(commands), wanted, load.is_busy)
        });
        let shares: Vec<_> = shares.collect();
        let is_more = |(commands, wanted, is_busy): &(u64, u64, bool), other: &(u64, u64, bool)| {
            *is_busy && CHANGE_MIN.1 * commands * other.1 >= CHANGE_MIN.0 * other.0 * wanted
        };
        let mut one_by_one = shares.iter();
        !one_by_one.any(|share| shares.iter().any(|other| is_more(share, other)))
    }

    fn to_feature(self, burst: u8) -> feature::Arbitration {
        let [high, medium, low] = self.0.map(|commands| commands.saturating_sub(1));
        feature::Arbitration(0)
            .with_ab(burst)
            .with_hpw_z(high)
            .with_mpw_z(medium)
            .with_lpw_z(low)
    }
}

/// Returns the largest weight of a busy class; `None` if no class is busy.
fn heaviest_weight(loads: &[ClassLoad]) -> Option<u64> {
    let busy = loads.iter().filter(|load| load.is_busy && load.weight > 0);
    busy.map(|load| load.weight).max()
}

/// Times at which the latest changes of the weights were sent to the drive, oldest first.
#[derive(Clone, Copy, Debug, Default)]
struct RecentChanges([Option<Duration>; CHANGES_MAX]);

impl RecentChanges {
    fn can_change(&self, now: Duration) -> bool {
        self.0[0].is_none_or(|oldest| now.saturating_sub(oldest) >= CHANGES_PERIOD)
    }

    fn record(&mut self, now: Duration) {
        self.0.rotate_left(1);
        self.0[CHANGES_MAX - 1] = Some(now);
    }
}

/// Ignores the error of a failed Set Features if the drive can continue: it refused the command, or did not answer in time. If
/// the drive executes the command late, that is harmless, because the command transfers no data.
fn tolerate(error: ControllerError) -> Result<(), ControllerError> {
    match error {
        ControllerError::Admin { .. } | ControllerError::AdminTimeout { .. } => Ok(()),
        error => Err(error),
    }
}

/// State of the equal weights that are sent to a drive after it did not answer Set Features in time. It may have executed that
/// command, or may still do so.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct EqualWeightsRequest {
    /// Number of times that equal weights were sent, at most [`EQUAL_ATTEMPTS`].
    attempts: u8,
    /// Number of admin commands that had completed late when equal weights were last sent. `None` if Set Features has timed out
    /// since then, so that they must be sent (again).
    late_completions: Option<u64>,
}

impl EqualWeightsRequest {
    /// Returns whether equal weights must be sent now. `answers` is true if the drive answers admin commands, and
    /// `late_completions` is the number of commands that it has completed late.
    fn is_due(self, answers: bool, late_completions: u64) -> bool {
        let is_outdated = self
            .late_completions
            .is_none_or(|before| late_completions > before);
        answers && is_outdated && self.attempts < EQUAL_ATTEMPTS
    }
}

/// State of a drive's arbitration, as this process has set it.
#[derive(Clone, Copy, Debug)]
pub(super) struct DriveArbitration {
    /// True if the next enable uses weighted round robin. It stays false after a failure.
    is_usable: bool,
    /// Arbitration mechanism that the drive was enabled with.
    mechanism: ArbitrationMechanism,
    /// Arbitration Burst that is sent with weights, as the exponent of a power of two.
    burst: u8,
    /// Weights that the drive has. `None` if its classes are not used: all new queues are Medium.
    weights: Option<ClassWeights>,
    /// Equal weights to send after a Set Features that timed out; `None` if there was none since the last enable.
    equal_weights: Option<EqualWeightsRequest>,
    changes: RecentChanges,
}

impl DriveArbitration {
    /// Creates the state for a drive that is not enabled yet.
    pub(super) fn new(choice: ArbitrationChoice, cap: Cap, name: &str) -> Self {
        let is_chosen = choice == ArbitrationChoice::Weighted;
        if is_chosen && !cap.ams_wrr() {
            info!(drive = name; "Drive {name} has no weighted round robin (CAP.AMS): its queue pairs have turns");
        }
        Self {
            is_usable: is_chosen && cap.ams_wrr(),
            mechanism: ArbitrationMechanism::ROUND_ROBIN,
            burst: 0,
            weights: None,
            equal_weights: None,
            changes: RecentChanges::default(),
        }
    }

    /// Creates the state for a drive that the predecessor has enabled with `mechanism`. If that is round robin, weighted round
    /// robin is not tried, because it may have failed in the predecessor.
    pub(super) fn from_predecessor(
        choice: ArbitrationChoice,
        mechanism: ArbitrationMechanism,
        cap: Cap,
        name: &str,
    ) -> Self {
        let arbitration = Self::new(choice, cap, name);
        let is_weighted = mechanism == ArbitrationMechanism::WEIGHTED_ROUND_ROBIN;
        if arbitration.is_usable && !is_weighted {
            info!(drive = name; "Drive {name} continues with round robin (CC.AMS), as it was handed over");
        }
        Self {
            is_usable: arbitration.is_usable && is_weighted,
            mechanism,
            ..arbitration
        }
    }

    /// Returns whether the next enable of the drive uses weighted round robin.
    pub(super) fn is_usable(&self) -> bool {
        self.is_usable
    }

    /// Returns whether the drive arbitrates by weights.
    pub(super) fn is_weighted(&self) -> bool {
        self.weights.is_some()
    }

    /// Records the mechanism that the drive was enabled with. The drive has no weights after an enable.
    pub(super) fn on_enabled(&mut self, mechanism: ArbitrationMechanism) {
        self.mechanism = mechanism;
        self.weights = None;
        self.equal_weights = None;
    }

    /// Returns whether `error`, of a drive that is being enabled and set up, may be caused by weighted round robin.
    pub(super) fn is_suspect(&self, error: &ControllerError) -> bool {
        self.mechanism == ArbitrationMechanism::WEIGHTED_ROUND_ROBIN
            && matches!(
                error,
                ControllerError::Fatal
                    | ControllerError::Lost
                    | ControllerError::AdminTimeout { .. }
                    | ControllerError::Admin { .. }
                    | ControllerError::NoQueuePairs
            )
    }

    /// Stops the use of weighted round robin for as long as this process has the drive.
    pub(super) fn end_weighted(
        &mut self,
        name: &str,
        cause: &str,
        error: Option<&ControllerError>,
    ) {
        self.weights = None;
        if !std::mem::take(&mut self.is_usable) {
            return;
        }
        let error = error.map(|error| format!(": {error}"));
        let error = error.unwrap_or_default();
        warn!(
            drive = name;
            "Drive {name} {cause}, and serves its queue pairs in turn from now on, until the server is started again{error}"
        );
    }

    /// Sets equal weights on a drive that was just enabled or handed over. `burst` is the Arbitration Burst that the drive
    /// recommends (RAB); `send` executes Set Features.
    pub(super) fn begin_weighted(
        &mut self,
        name: &str,
        burst: u8,
        mut send: impl FnMut(feature::Arbitration) -> Result<(), ControllerError>,
    ) -> Result<(), ControllerError> {
        self.burst = burst.min(BURST_MAX);
        self.weights = None;
        if !self.is_usable || self.mechanism != ArbitrationMechanism::WEIGHTED_ROUND_ROBIN {
            return Ok(());
        }
        match self.send_with_retry(ClassWeights::EQUAL, &mut send) {
            Ok(()) => {
                self.weights = Some(ClassWeights::EQUAL);
                Ok(())
            }
            Err(error @ ControllerError::RemovalRequested) => Err(error),
            Err(error) => {
                self.end_weighted(name, "takes no weights (Arbitration)", Some(&error));
                tolerate(error)
            }
        }
    }

    /// Sends weights to the drive. If the drive refuses them without Do Not Retry, sends them once more.
    fn send_with_retry(
        &self,
        weights: ClassWeights,
        mut send: impl FnMut(feature::Arbitration) -> Result<(), ControllerError>,
    ) -> Result<(), ControllerError> {
        let feature = weights.to_feature(self.burst);
        match send(feature) {
            Err(ControllerError::Admin { status, .. }) if !status.dnr() => send(feature),
            sent => sent,
        }
    }

    /// Returns the weights for `loads` if they must be sent now, because they differ enough from those that the drive has.
    fn next_weights(
        &self,
        loads: &[ClassLoad; PRIORITY_CLASSES.len()],
        now: Duration,
    ) -> Option<ClassWeights> {
        let before = self.weights?;
        if before.is_close_to(loads) || !self.changes.can_change(now) {
            return None;
        }
        ClassWeights::from_loads(loads).filter(|weights| *weights != before)
    }

    /// Sends weights to the drive. If the drive refuses them, ends weighted round robin and sends equal weights. If the drive
    /// does not answer, [`Self::set_equal_if_due`] sends equal weights later. After any other failure, sends nothing more.
    fn set_weights(
        &mut self,
        name: &str,
        weights: ClassWeights,
        mut send: impl FnMut(feature::Arbitration) -> Result<(), ControllerError>,
    ) -> Result<(), ControllerError> {
        let Err(error) = self.send_with_retry(weights, &mut send) else {
            self.weights = Some(weights);
            return Ok(());
        };
        if matches!(error, ControllerError::RemovalRequested) {
            return Err(error);
        }
        let is_refused = matches!(error, ControllerError::Admin { .. });
        self.end_weighted(name, "takes no other weights (Arbitration)", Some(&error));
        match is_refused {
            true => self.set_equal_weights(send),
            false => self.tolerate(error),
        }
    }

    /// Sends equal weights to the drive.
    fn set_equal_weights(
        &mut self,
        mut send: impl FnMut(feature::Arbitration) -> Result<(), ControllerError>,
    ) -> Result<(), ControllerError> {
        let sent = send(ClassWeights::EQUAL.to_feature(self.burst));
        sent.or_else(|error| self.tolerate(error))
    }

    /// Ignores an error as [`tolerate`] does. After a timeout, records that equal weights must be sent, because the drive's
    /// weights are unknown.
    fn tolerate(&mut self, error: ControllerError) -> Result<(), ControllerError> {
        if matches!(error, ControllerError::AdminTimeout { .. }) {
            self.equal_weights.get_or_insert_default().late_completions = None;
        }
        tolerate(error)
    }

    /// Sends equal weights if they must be sent after a Set Features that timed out. `answers` is true if the drive answers
    /// admin commands, and `late_completions` is the number of commands that it has completed late.
    fn set_equal_if_due(
        &mut self,
        name: &str,
        answers: bool,
        late_completions: u64,
        send: impl FnMut(feature::Arbitration) -> Result<(), ControllerError>,
    ) -> Result<(), ControllerError> {
        let due = self.equal_weights.as_mut();
        let Some(request) = due.filter(|request| request.is_due(answers, late_completions)) else {
            return Ok(());
        };
        request.attempts += 1;
        request.late_completions = Some(late_completions);
        info!(drive = name; "Drive {name} answers again, and gets equal weights (Arbitration)");
        self.set_equal_weights(send)
    }

    /// Ends weighted round robin on a drive that refused to create a queue of a priority class.
    pub(super) fn end_priority_classes(
        &mut self,
        name: &str,
        send: impl FnMut(feature::Arbitration) -> Result<(), ControllerError>,
    ) {
        let before = self.weights;
        self.end_weighted(name, "takes queues of one class alone (QPRIO)", None);
        // A failure here only logs; if it stops the drive, the next check of the drive monitor finds that.
        if before.is_some_and(|weights| weights != ClassWeights::EQUAL)
            && let Err(error) = self.set_equal_weights(send)
        {
            warn!(drive = name; "Drive {name} keeps the weights that it has: {error}");
        }
    }

    /// Returns the priority class for a new queue: `wanted` if the drive uses weighted round robin, else Medium.
    pub(super) fn priority(&self, wanted: QueuePriority) -> QueuePriority {
        match self.is_weighted() {
            true => wanted,
            false => QueuePriority::MEDIUM,
        }
    }
}

/// Executes Set Features, Arbitration (Base 2.0, section 5.27.1.1). While the drive has paused processing, the command's
/// timeout is suspended, but for at most `pause`, and only until `is_ending` returns true.
pub(super) fn set_arbitration_feature(
    admin: &mut AdminQueue,
    value: feature::Arbitration,
    pause: Duration,
    is_ending: &dyn Fn() -> bool,
) -> Result<(), ControllerError> {
    let sqe = set_feature_command(FeatureId::ARBITRATION, value.0);
    admin.execute_through_pause(sqe, pause, is_ending)?;
    Ok(())
}

impl PhysicalDrive {
    /// Executes Set Features, Arbitration. While the drive has paused processing, the command's timeout is suspended, until the
    /// drive is being closed.
    pub(super) fn send_arbitration(
        &self,
        admin: &mut AdminQueue,
        value: feature::Arbitration,
    ) -> Result<(), ControllerError> {
        let pause = longest_pause(&self.identity.controller, self.options.command_timeout);
        let is_ending = || self.registers.is_closing();
        set_arbitration_feature(admin, value, pause, &is_ending)
    }

    /// Returns the priority class for a queue of a lease with this weight; `None` if the drive does not use weighted round
    /// robin.
    pub(super) fn priority_class(&self, weight: u64) -> Option<QueuePriority> {
        if !lock(&self.arbitration).is_weighted() {
            return None;
        }
        let usual = u64::from(LeaseWeight::default().get());
        Some(match weight {
            heavier if heavier > usual => QueuePriority::HIGH,
            lighter if lighter < usual => QueuePriority::LOW,
            _ => QueuePriority::MEDIUM,
        })
    }

    /// Ends weighted round robin after the drive has refused to create a queue of a priority class. The caller holds the lock
    /// of the admin queue.
    pub(super) fn end_priority_classes(&self, admin: &mut AdminQueue) {
        let mut arbitration = *lock(&self.arbitration);
        let send = |value| self.send_arbitration(admin, value);
        arbitration.end_priority_classes(self.backing.name(), send);
        *lock(&self.arbitration) = arbitration;
    }

    /// Sends equal weights to the drive if they must be sent after a Set Features that timed out.
    fn send_due_equal_weights(&self) {
        let Some(request) = lock(&self.arbitration).equal_weights else {
            return;
        };
        let is_due = {
            let admin = lock(&self.admin);
            request.is_due(admin.queue.is_responsive(), admin.queue.late_completions())
        };
        if !is_due {
            return;
        }
        // After a failure, the drive is reset, and the reset clears its weights.
        let _ = self.with_admin(|admin| {
            let mut arbitration = *lock(&self.arbitration);
            let (answers, late) = (admin.is_responsive(), admin.late_completions());
            let send = |value| self.send_arbitration(admin, value);
            let set = arbitration.set_equal_if_due(self.backing.name(), answers, late, send);
            *lock(&self.arbitration) = arbitration;
            set
        });
    }

    /// Sends the weights of the classes to the drive, if they must change for these loads.
    pub(super) fn update_class_weights(&self, loads: &[ClassLoad; PRIORITY_CLASSES.len()]) {
        self.send_due_equal_weights();
        let clock = self.backing.clock();
        if lock(&self.arbitration)
            .next_weights(loads, clock.now())
            .is_none()
        {
            return;
        }
        // After a failure, the drive is reset, and the reset clears its weights.
        let _ = self.with_admin(|admin| {
            // Checked again, because the arbitration changes only while the admin queue is locked, as it is here.
            let mut arbitration = *lock(&self.arbitration);
            let Some(weights) = arbitration.next_weights(loads, clock.now()) else {
                return Ok(());
            };
            arbitration.changes.record(clock.now());
            let send = |value| self.send_arbitration(admin, value);
            let set = arbitration.set_weights(self.backing.name(), weights, send);
            *lock(&self.arbitration) = arbitration;
            set
        });
    }
}

#[cfg(test)]
mod tests {
    use nvme_spec::opcode::AdminOpcode;
    use nvme_spec::status::Status;

    use super::*;

    /// Returns loads of busy classes with these weights. A weight of 0 stands for an unused class.
    fn busy(weights: [u64; PRIORITY_CLASSES.len()]) -> [ClassLoad; PRIORITY_CLASSES.len()] {
        weights.map(|weight| ClassLoad {
            weight,
            is_busy: weight > 0,
        })
    }

    #[test]
    fn classes_have_commands_as_their_busy_leases_weigh() {
        let weights = |weights| ClassWeights::from_loads(&busy(weights)).map(|weights| weights.0);
        assert_eq!(weights([0, 100, 0]), Some([1, 1, 1]));
        assert_eq!(weights([300, 100, 50]), Some([6, 2, 1]));
        assert_eq!(weights([300, 0, 100]), Some([3, 3, 1]));
        // High has one lease of twice the default weight, and Medium has 15 leases of the default weight.
        assert_eq!(weights([200, 1500, 0]), Some([2, 15, 15]));
        assert_eq!(weights([0, 1000, 50]), Some([16, 16, 1]));
        // A round has as few commands as possible, and every class has at least one command.
        assert_eq!(weights([1000, 990, 1]), Some([16, 16, 1]));
        assert_eq!(weights([u64::from(u32::MAX), 1, 1]), Some([16, 1, 1]));
        assert_eq!(weights([0, 0, 0]), None);
        let [high, medium, _] = busy([300, 100, 0]);
        let quiet = ClassLoad {
            weight: 10,
            is_busy: false,
        };
        let weights = ClassWeights::from_loads(&[high, medium, quiet]);
        assert_eq!(weights, Some(ClassWeights([3, 1, 3])), "a quiet class");
    }

    #[test]
    fn classes_up_to_sixteen_to_one_have_their_shares_within_seven_percent() {
        for high in 1..=200_u64 {
            for low in 1..=high {
                let loads = busy([high, high, low]);
                let round = ClassWeights::from_loads(&loads).expect("busy leases");
                assert!(round.is_close_to(&loads), "{high}:{low} is {round:?}");
                if high > CLASS_RUN_MAX * low {
                    continue;
                }
                let [of_high, _, of_low] = round.0.map(u64::from);
                let (got, due) = (of_high * low, high * of_low);
                assert!(
                    100 * got.abs_diff(due) < 7 * due,
                    "{high}:{low} is {round:?}"
                );
            }
        }
    }

    #[test]
    fn changes_below_a_quarter_are_none() {
        let equal = ClassWeights::EQUAL;
        for (loads, suits) in [
            ([100, 100, 0], true),
            ([124, 100, 0], true),
            ([125, 100, 0], false),
            ([100, 125, 100], false),
            ([100, 0, 0], true),
            ([0, 0, 0], true),
        ] {
            assert_eq!(equal.is_close_to(&busy(loads)), suits, "{loads:?}");
        }
        // A class with only quiet guests may get more than its share, but not less than the heaviest guest.
        let [high, medium, _] = busy([300, 100, 0]);
        let quiet = ClassLoad {
            weight: 1,
            is_busy: false,
        };
        let suits = |weights| ClassWeights(weights).is_close_to(&[high, medium, quiet]);
        assert!(suits([3, 1, 3]) && suits([3, 1, 16]));
        assert!(!suits([3, 1, 1]));
    }

    fn weighted() -> DriveArbitration {
        let cap = Cap(0).with_ams_wrr(true);
        let mut arbitration = DriveArbitration::new(ArbitrationChoice::Weighted, cap, "a");
        arbitration.on_enabled(ArbitrationMechanism::WEIGHTED_ROUND_ROBIN);
        let mut sent = Vec::new();
        let send = |value: feature::Arbitration| {
            sent.push(value.0);
            Ok(())
        };
        arbitration.begin_weighted("a", 3, send).expect("begun");
        assert_eq!(sent, [3]);
        arbitration
    }

    #[test]
    fn a_drive_is_told_of_four_changes_in_a_minute_at_most() {
        let mut arbitration = weighted();
        let mut reported = Vec::new();
        // Guests arrive or leave before each survey, so the weights always change.
        for poll in 0..1_800_u64 {
            let now = Duration::from_millis(100 * poll);
            let loads = busy([100 + 300 * (poll % 2), 100, 0]);
            if let Some(weights) = arbitration.next_weights(&loads, now) {
                arbitration.changes.record(now);
                arbitration
                    .set_weights("a", weights, |_| Ok(()))
                    .expect("set");
                reported.push(now);
            }
        }
        assert!(reported.len() > CHANGES_MAX);
        for changes in reported.windows(CHANGES_MAX + 1) {
            assert!(changes[CHANGES_MAX] - changes[0] >= CHANGES_PERIOD);
        }
    }

    fn refusal(dnr: bool) -> ControllerError {
        ControllerError::Admin {
            opcode: AdminOpcode::SET_FEATURES,
            status: Status::INVALID_FIELD.with_dnr(dnr),
        }
    }

    /// Sets weights on a drive that gives `answers` to the commands. Returns the weights that it got, and whether it must be
    /// reset.
    fn set_with(answers: &[fn() -> Result<(), ControllerError>]) -> (Vec<[u8; 3]>, bool) {
        let mut arbitration = weighted();
        let (mut sent, mut answers) = (Vec::new(), answers.iter());
        let send = |value: feature::Arbitration| {
            sent.push([value.hpw_z(), value.mpw_z(), value.lpw_z()]);
            answers.next().map_or(Ok(()), |answer| answer())
        };
        let set = arbitration.set_weights("a", ClassWeights([4, 2, 1]), send);
        let is_first = sent.len() == 1 && set.is_ok();
        assert_eq!(arbitration.is_usable(), arbitration.is_weighted());
        assert!(is_first || !arbitration.is_usable(), "{sent:?}");
        (sent, set.is_err())
    }

    #[test]
    fn a_failure_is_the_last_time_that_weights_are_sent() {
        const UNEQUAL: [u8; 3] = [3, 1, 0];
        const EQUAL: [u8; 3] = [0; 3];
        let timeout = || {
            Err(ControllerError::AdminTimeout {
                opcode: AdminOpcode::SET_FEATURES,
                seconds: 5,
            })
        };
        assert_eq!(set_with(&[]), (vec![UNEQUAL], false));
        let never = || Err(refusal(true));
        assert_eq!(set_with(&[never]), (vec![UNEQUAL, EQUAL], false));
        assert_eq!(set_with(&[never, never]), (vec![UNEQUAL, EQUAL], false));
        assert_eq!(set_with(&[never, timeout]), (vec![UNEQUAL, EQUAL], false));
        let now = || Err(refusal(false));
        let twice = vec![UNEQUAL, UNEQUAL, EQUAL];
        assert_eq!(set_with(&[now, now, now, now]), (twice.clone(), false));
        assert_eq!(set_with(&[now, never]), (twice, false));
        assert_eq!(set_with(&[timeout]), (vec![UNEQUAL], false));
        // The drive itself has failed, so no further weights are sent.
        assert_eq!(
            set_with(&[|| Err(ControllerError::Fatal)]),
            (vec![UNEQUAL], true)
        );
        let lost = || Err(ControllerError::Lost);
        assert_eq!(set_with(&[now, lost]), (vec![UNEQUAL, UNEQUAL], true));
    }

    #[test]
    fn a_drive_that_did_not_answer_gets_equal_weights_once_it_answers() {
        let mut arbitration = weighted();
        let timeout = |_| {
            Err(ControllerError::AdminTimeout {
                opcode: AdminOpcode::SET_FEATURES,
                seconds: 5,
            })
        };
        let set = arbitration.set_weights("a", ClassWeights([4, 2, 1]), timeout);
        set.expect("no reset");
        let mut sends = |answers, late_completions, is_answered| {
            let mut sent = Vec::new();
            let send = |value: feature::Arbitration| {
                sent.push([value.hpw_z(), value.mpw_z(), value.lpw_z()]);
                if is_answered { Ok(()) } else { timeout(value) }
            };
            let made = arbitration.set_equal_if_due("a", answers, late_completions, send);
            made.expect("no reset");
            sent
        };
        let (none, equal) = ([[0; 3]; 0], [[0; 3]]);
        assert_eq!(sends(false, 0, true), none);
        assert_eq!(sends(true, 0, false), equal, "no answer again");
        assert_eq!(sends(false, 0, true), none);
        assert_eq!(sends(true, 0, true), equal);
        assert_eq!(sends(true, 0, true), none);
        // The first command, which had timed out, completes now.
        assert_eq!(sends(true, 1, true), equal);
        assert_eq!(sends(true, 1, true), none);
        arbitration.on_enabled(ArbitrationMechanism::ROUND_ROBIN);
        assert_eq!(arbitration.equal_weights, None);
    }

    /// A drive may answer all commands but Set Features for Arbitration, for example because a firmware update has dropped the
    /// feature. It gets equal weights at most three times nevertheless.
    #[test]
    fn a_drive_that_never_answers_weights_gets_them_three_times_at_most() {
        let mut arbitration = weighted();
        let timeout = |_| {
            Err(ControllerError::AdminTimeout {
                opcode: AdminOpcode::SET_FEATURES,
                seconds: 5,
            })
        };
        let set = arbitration.set_weights("a", ClassWeights([4, 2, 1]), timeout);
        set.expect("no reset");
        let mut sent = 0;
        for late_completions in 0..20 {
            let send = |value| {
                sent += 1;
                timeout(value)
            };
            let made = arbitration.set_equal_if_due("a", true, late_completions, send);
            made.expect("no reset");
        }
        assert_eq!(sent, u32::from(EQUAL_ATTEMPTS));
    }

    #[test]
    fn a_choice_is_read_as_it_is_written() {
        for choice in [ArbitrationChoice::RoundRobin, ArbitrationChoice::Weighted] {
            assert_eq!(choice.to_string().parse(), Ok(choice));
        }
        "urgent".parse::<ArbitrationChoice>().unwrap_err();
    }

    #[test]
    fn a_drive_goes_on_with_the_arbitration_that_it_is_found_with() {
        let cap = Cap(0).with_ams_wrr(true);
        let [round_robin, weighted] = [
            ArbitrationMechanism::ROUND_ROBIN,
            ArbitrationMechanism::WEIGHTED_ROUND_ROBIN,
        ];
        for (choice, mechanism, is_usable) in [
            (ArbitrationChoice::Weighted, weighted, true),
            (ArbitrationChoice::Weighted, round_robin, false),
            (ArbitrationChoice::RoundRobin, weighted, false),
        ] {
            let found = DriveArbitration::from_predecessor(choice, mechanism, cap, "a");
            assert_eq!(found.is_usable(), is_usable, "{choice}, {mechanism:?}");
        }
    }
}
