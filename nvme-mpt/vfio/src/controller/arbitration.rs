//! The drive's own arbitration between its I/O Submission Queues (Base 2.0, section 3.4.4): weighted round robin where it has
//! that (`CAP.AMS`), else all queues in turn.
//!
//! Weights are those of classes, not of queues: a queue that is alone in its class has all of the class. A class that always
//! had the same weight would give a light lease more than its share while few are light, and a heavy one less while many
//! are heavy. So each class has what the busy leases in it weigh together. The supervisor adds them up at each look, and tells
//! the drive of a change (Arbitration, FID 01h). A weight that changes, and a guest that becomes busy, count within a tenth of
//! a second, also on a drive that is too fast for [shares](super::super::pair) of bytes.
//!
//! A queue gets its class when it is created (QPRIO): High if the lease that it is created for is heavier than usual, Low if it
//! is lighter. It stays, though weights change, and other leases use the pair later or share it. No class is wrong: whose weight
//! counts in it is seen at each look. Leases in one class have turns by queue, as without classes, and the governor evens out
//! their bytes.
//!
//! Nobody starves: each class has a command in each round, and none more than [`LONGEST`] in a row. A class in which only quiet
//! guests are has as many as the heaviest.
//!
//! No queue is Urgent. Such a queue goes before all others for as long as it has commands. A queue is Urgent for good, but a
//! quiet guest may be busy a moment later.

use log::warn;

use super::super::pair::CLASSES;
use super::admin_queue::AdminQueue;
use super::error::ControllerError;
use super::{PhysicalDrive, lock};
use nvme_mpt::limit::Weight;
use nvme_mpt::spec::admin::{QueuePriority, SetFeatures};
use nvme_mpt::spec::feature::{self, FeatureId};
use nvme_mpt::spec::identify::IdentifyController;
use nvme_mpt::spec::opcode::AdminOpcode;
use nvme_mpt::spec::registers::ArbitrationMechanism;
use nvme_mpt::spec::sqe::Sqe;

/// Most commands of a class before it is the others' turn: about as many as a fast drive works on at once.
const LONGEST: u64 = 16;

/// Largest Arbitration Burst, as a power of two. Without a limit, a queue could have the turns of all others in its class.
const BURST_MAX: u8 = feature::Arbitration::NO_LIMIT - 1;

/// Difference from the leases' weights that does not matter: one part of so many.
const PRECISION: u64 = 16;

/// Commands of each [class](CLASSES) in a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ClassWeights([u8; CLASSES.len()]);

impl ClassWeights {
    const EQUAL: Self = Self([1; CLASSES.len()]);

    /// Returns the shortest round in which the classes have commands as their busy leases weigh; `None` if none is busy.
    fn of(busy: [u64; CLASSES.len()]) -> Option<Self> {
        let most = busy.into_iter().max().filter(|most| *most > 0)?;
        let wanted = busy.map(|weight| if weight == 0 { most } else { weight });
        let round = |longest: u64| {
            wanted.map(|weight| ((weight * longest + most / 2) / most).clamp(1, LONGEST))
        };
        let error = |longest: u64| {
            let classes = wanted.into_iter().zip(round(longest));
            let errors = classes.map(|(weight, commands)| {
                let exact = weight * longest;
                PRECISION * exact.abs_diff(commands * most) / exact
            });
            errors.max()
        };
        let longest = (1..=LONGEST).min_by_key(|longest| error(*longest))?;
        // Within LONGEST.
        Some(Self(round(longest).map(|commands| commands as u8)))
    }
}

/// Arbitration of a drive that is enabled.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arbitration {
    /// Arbitration Burst, as a power of two.
    burst: u8,
    /// Weights that the drive has; `None` if its queues have turns.
    weights: Option<ClassWeights>,
}

impl Arbitration {
    /// Begins with equal weights, on a drive that was enabled with this mechanism. One that refuses weights has all queues in
    /// one class, which is round robin.
    pub(super) fn begin(
        admin: &mut AdminQueue,
        mechanism: ArbitrationMechanism,
        controller: &IdentifyController,
        name: &str,
    ) -> Result<Self, ControllerError> {
        let burst = controller.rab.min(BURST_MAX);
        let mut arbitration = Self {
            burst,
            weights: None,
        };
        if mechanism != ArbitrationMechanism::WEIGHTED_ROUND_ROBIN {
            return Ok(arbitration);
        }
        match set_weights(admin, burst, ClassWeights::EQUAL) {
            Ok(()) => arbitration.weights = Some(ClassWeights::EQUAL),
            Err(error @ ControllerError::Admin { .. }) => warn!(
                drive = name;
                "Drive {name} takes no weights (Arbitration), and serves its queue pairs in turn: {error}"
            ),
            Err(error) => return Err(error),
        }
        Ok(arbitration)
    }

    /// Returns whether the drive serves its queues by weights.
    pub(super) fn is_weighted(&self) -> bool {
        self.weights.is_some()
    }

    /// Returns the class of a queue that is to have this one.
    pub(super) fn priority(&self, wanted: QueuePriority) -> QueuePriority {
        match self.is_weighted() {
            true => wanted,
            false => QueuePriority::MEDIUM,
        }
    }
}

/// Arbitration (Base 2.0, section 5.27.1.1).
fn set_weights(
    admin: &mut AdminQueue,
    burst: u8,
    weights: ClassWeights,
) -> Result<(), ControllerError> {
    let [high, medium, low] = weights.0.map(|commands| commands - 1);
    let value = feature::Arbitration(0)
        .with_ab(burst)
        .with_hpw_z(high)
        .with_mpw_z(medium)
        .with_lpw_z(low);
    let mut sqe = Sqe::new(AdminOpcode::SET_FEATURES.0);
    let set = SetFeatures {
        fid: FeatureId::ARBITRATION,
        dword11: value.0,
        ..SetFeatures::default()
    };
    set.write_to(&mut sqe);
    admin.execute(sqe).map(|_| ())
}

impl PhysicalDrive {
    /// Begins anew after a reset.
    pub(super) fn begin_arbitration(
        &self,
        admin: &mut AdminQueue,
        mechanism: ArbitrationMechanism,
    ) -> Result<Arbitration, ControllerError> {
        let controller = &self.identity.controller;
        let begun = Arbitration::begin(admin, mechanism, controller, self.backing.name())?;
        *lock(&self.arbitration) = begun;
        Ok(begun)
    }

    /// Returns the class of a queue that is created for a lease of this weight.
    pub(super) fn priority_of(&self, weight: u64) -> QueuePriority {
        let usual = u64::from(Weight::default().get());
        let wanted = match weight {
            heavier if heavier > usual => QueuePriority::HIGH,
            lighter if lighter < usual => QueuePriority::LOW,
            _ => QueuePriority::MEDIUM,
        };
        lock(&self.arbitration).priority(wanted)
    }

    /// Tells the drive what the busy leases in each class weigh, if that has changed.
    pub(super) fn arbitrate(&self, busy: [u64; CLASSES.len()]) {
        let Arbitration { burst, weights } = *lock(&self.arbitration);
        let (Some(before), Some(weights)) = (weights, ClassWeights::of(busy)) else {
            return;
        };
        if weights == before {
            return;
        }
        let set = self.with_admin(|admin| set_weights(admin, burst, weights));
        let known = match set {
            Ok(()) => Some(weights),
            Err(error @ ControllerError::Admin { .. }) => {
                let name = self.backing.name();
                warn!(
                    drive = name;
                    "Drive {name} takes no other weights (Arbitration) until it is reset: {error}"
                );
                None
            }
            // The reset that is to come begins anew.
            Err(_) => return,
        };
        lock(&self.arbitration).weights = known;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_have_commands_as_their_busy_leases_weigh() {
        let weights = |busy| ClassWeights::of(busy).map(|weights| weights.0);
        assert_eq!(weights([0, 100, 0]), Some([1, 1, 1]));
        assert_eq!(weights([300, 100, 50]), Some([6, 2, 1]));
        assert_eq!(weights([300, 0, 100]), Some([3, 3, 1]));
        // One heavy lease beside many of the usual weight has its share, not its class's.
        assert_eq!(weights([200, 1500, 0]), Some([2, 15, 15]));
        assert_eq!(weights([0, 1000, 50]), Some([16, 16, 1]));
        // A round is as long as it has to be, and no class is without a command.
        assert_eq!(weights([1000, 990, 1]), Some([16, 16, 1]));
        assert_eq!(weights([u64::from(u32::MAX), 1, 1]), Some([16, 1, 1]));
        assert_eq!(weights([0, 0, 0]), None);
    }

    #[test]
    fn classes_up_to_sixteen_to_one_have_their_shares_within_seven_percent() {
        for high in 1..=200_u64 {
            for low in 1..=high {
                if high > LONGEST * low {
                    continue;
                }
                let round = ClassWeights::of([high, high, low]).expect("busy leases");
                let [of_high, _, of_low] = round.0.map(u64::from);
                let (got, due) = (of_high * low, high * of_low);
                assert!(
                    100 * got.abs_diff(due) < 7 * due,
                    "{high}:{low} is {round:?}"
                );
            }
        }
    }
}
