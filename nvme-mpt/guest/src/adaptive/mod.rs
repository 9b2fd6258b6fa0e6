//! Adaptive policies: decisions based on measurements. Each has a fixed alternative.
//!
//! | name | decision | inputs | fixed |
//! |---|---|---|---|
//! | `spin` | time that a poller spins before it parks ([`SpinTime`]) | length of each sleep, and what ended it | 100 us |
//! | `preemption-backoff` | when a spinning thread yields its processor ([`PreemptionBackoff`]) | preemptions | never |
//! | `coalescing` | completions per interrupt ([`CoalescingPolicy`]) | times of completions and submissions | one batch |
//! | `governor` | bytes of busy guests in flight on a shared drive ([`HeavyWindow`]) | latencies of quiet guests | 256 KiB |
//! | `doorbells` | when doorbells are mapped and trapped ([`DoorbellMappingPolicy`]) | exits, commands, their costs | mapped |
//! | `budget` | IOMMU mappings of one VM ([`IommuBudget`]) | mappings in use | a sixteenth |
//! | `slices` | bytes of a file to deallocate at once ([`SliceLength`]) | length and time of the last slice | 256 KiB |
//! | `poll-interval` | poll interval of untrapped doorbells ([`PollInterval`]) | time without work | 1 ms |
//!
//! # Contract
//! - **Pure.** A decision depends only on the inputs. Nothing here reads a clock, sleeps, yields, locks or allocates: the
//!   caller measures, and passes [`Ticks`](nvme_mpt_memory::clock::Ticks).
//! - **Clock.** All times are ticks of one clock, whose [`TickRate`](nvme_mpt_memory::clock::TickRate) is given at
//!   creation. Tests and simulations pass [`TickRate::NANOSECOND`](nvme_mpt_memory::clock::TickRate::NANOSECOND).
//! - **Fixed alternative.** With [`PolicyChoice::Fixed`], inputs change nothing, and the decision is the constant in the table.
//! - **Switch.** [`AdaptivePolicies`] has a choice for each policy. An operator writes the names, as in
//!   `fixed=coalescing+doorbells`.
//! - **Worth.** `docs/performance.md` compares each policy with its fixed alternative. A policy without benefit is deleted.

mod coalescing;
mod doorbell_mapping;
mod heavy_window;
mod iommu_budget;
mod poll_interval;
mod preemption_backoff;
mod slice_length;
mod spin_time;

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

pub use coalescing::{CoalescingPolicy, UnsignaledCompletions};
pub use doorbell_mapping::DoorbellMappingPolicy;
pub use heavy_window::{CommandClass, HeavyWindow, SharingParameters, WINDOW_MAX};
#[cfg(test)]
pub(crate) use iommu_budget::{ASSURED, ASSURED_DIVISOR, DRIVER_DIVISOR};
pub use iommu_budget::{IommuBudget, IommuBudgetUse, IommuShareRefusal};
pub use poll_interval::PollInterval;
pub use preemption_backoff::{PreemptionBackoff, ThreadProcessorUse};
pub use slice_length::SliceLength;
pub use spin_time::SpinTime;

/// Choice between an adaptive policy and its fixed alternative.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum PolicyChoice {
    /// The policy adapts its decisions to measurements.
    #[default]
    Adaptive,
    /// The policy's decisions are constants (the fixed alternative).
    Fixed,
}

/// Choice for each adaptive policy. The text form lists the policies that are fixed: `coalescing+doorbells`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct AdaptivePolicies {
    /// Time that a poller spins before it parks.
    pub spin: PolicyChoice,
    /// Times at which a spinning poller yields its processor to other threads.
    pub preemption_backoff: PolicyChoice,
    /// Number of completions per interrupt (interrupt coalescing).
    pub coalescing: PolicyChoice,
    /// Bytes that busy guests have in flight on a shared physical drive.
    pub governor: PolicyChoice,
    /// Times at which doorbells are mapped into the guest, and at which its writes are trapped.
    pub doorbells: PolicyChoice,
    /// IOMMU mappings and IOVAs that one VM may take.
    pub budget: PolicyChoice,
    /// Bytes of a file to deallocate or zero at once. Only the drive uses this choice, so messages and saved states of
    /// functions omit it.
    #[serde(skip)]
    pub slices: PolicyChoice,
    /// Poll interval of untrapped doorbells.
    pub poll_interval: PolicyChoice,
}

/// Accessor of the choice for one policy.
type PolicyField = fn(&mut AdaptivePolicies) -> &mut PolicyChoice;

/// Name of each policy, and accessor of its choice.
const POLICIES: [(&str, PolicyField); 8] = [
    ("spin", |policies| &mut policies.spin),
    ("preemption-backoff", |policies| {
        &mut policies.preemption_backoff
    }),
    ("coalescing", |policies| &mut policies.coalescing),
    ("governor", |policies| &mut policies.governor),
    ("doorbells", |policies| &mut policies.doorbells),
    ("budget", |policies| &mut policies.budget),
    ("slices", |policies| &mut policies.slices),
    ("poll-interval", |policies| &mut policies.poll_interval),
];

impl AdaptivePolicies {
    /// Returns the choices for the policies that a poller uses. All other policies are adaptive in the result, so that it can
    /// be compared with the choices of another poller.
    #[must_use]
    pub fn for_poller(self) -> Self {
        let Self {
            spin,
            preemption_backoff,
            poll_interval,
            ..
        } = self;
        Self {
            spin,
            preemption_backoff,
            poll_interval,
            ..Self::default()
        }
    }

    /// Returns the choices for the policies that a drive uses. All other policies are adaptive in the result.
    #[must_use]
    pub fn for_drive(self) -> Self {
        let Self {
            governor,
            budget,
            slices,
            ..
        } = self;
        Self {
            governor,
            budget,
            slices,
            ..Self::default()
        }
    }
}

impl FromStr for AdaptivePolicies {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut policies = Self::default();
        for name in text.split('+') {
            let Some((_, choice)) = POLICIES.iter().find(|(known, _)| *known == name) else {
                let known = POLICIES.map(|(known, _)| known).join(", ");
                return Err(format!(
                    "`{name}` is not adaptive; join names by +, from {known}"
                ));
            };
            *choice(&mut policies) = PolicyChoice::Fixed;
        }
        Ok(policies)
    }
}

impl fmt::Display for AdaptivePolicies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut policies = *self;
        let mut separator = "";
        for (name, choice) in POLICIES {
            if *choice(&mut policies) == PolicyChoice::Fixed {
                write!(f, "{separator}{name}")?;
                separator = "+";
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_what_is_fixed_read_and_print_alike() {
        let all = POLICIES.map(|(name, _)| name);
        for name in all {
            let policies: AdaptivePolicies = name.parse().expect("a name");
            assert_eq!(policies.to_string(), name);
            let differs = policies != AdaptivePolicies::default();
            assert!(differs, "{name}");
        }
        let both: AdaptivePolicies = "doorbells+coalescing".parse().expect("two names");
        assert_eq!(both.to_string(), "coalescing+doorbells");
        assert_eq!(
            both,
            AdaptivePolicies {
                coalescing: PolicyChoice::Fixed,
                doorbells: PolicyChoice::Fixed,
                ..AdaptivePolicies::default()
            }
        );
        for text in ["", "all", "spin+", "spin,budget"] {
            let error = text.parse::<AdaptivePolicies>().expect_err(text);
            assert!(
                error.ends_with(
                    "spin, preemption-backoff, coalescing, governor, doorbells, budget, slices, poll-interval"
                ),
                "{error}"
            );
        }
    }

    #[test]
    fn messages_and_states_have_no_slices() {
        let slices: AdaptivePolicies = "budget+slices".parse().expect("two names");
        let text = serde_json::to_string(&slices).expect("text");
        let read: AdaptivePolicies = serde_json::from_str(&text).expect("as it was");
        assert_eq!(read.to_string(), "budget");
    }

    #[test]
    fn choices_belong_to_a_poller_a_drive_or_a_function() {
        let all = POLICIES.map(|(name, _)| name).join("+");
        let all: AdaptivePolicies = all.parse().expect("names");
        assert_eq!(
            all.for_poller().to_string(),
            "spin+preemption-backoff+poll-interval"
        );
        assert_eq!(all.for_drive().to_string(), "governor+budget+slices");
    }
}
