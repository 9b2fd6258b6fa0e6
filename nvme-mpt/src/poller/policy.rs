//! Polling policy, as chosen by an operator.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use nvme_guest::doorbell::DoorbellMode;
use nvme_mpt_memory::processors::PROCESSORS_MAX;

use super::affinity::{self, NoSuchProcessor};

/// Sharing of pollers between queues.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PollerSharing {
    /// A few pollers run all shadow queues of all VMs.
    #[default]
    Shared,
    /// Each shadow queue has its own poller.
    Dedicated,
}

/// Time before a due command in which a spinning poller does not sleep, because falling asleep and waking up takes about as
/// long.
const DUE_SOON: Duration = Duration::from_micros(100);

/// Behaviour of a poller without work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PollerIdleMode {
    /// The poller spins for a limited time and then parks.
    #[default]
    Adaptive,
    /// The poller never parks while it has queues. (It still yields to other threads on its processor.)
    Busy,
    /// The poller parks as soon as a pass finds no work. A doorbell or a completion of the drive wakes it up once for all work
    /// that has arrived by then.
    Event,
}

impl PollerIdleMode {
    /// Returns the ticks that a poller spins without work before it parks; `None` if it never parks. `spin` is the present
    /// result of the adaptive spin time.
    #[inline]
    pub(super) fn park_timeout(self, spin: u64) -> Option<u64> {
        match self {
            Self::Adaptive => Some(spin),
            Self::Busy => None,
            Self::Event => Some(0),
        }
    }

    /// Returns the time before a timed command is due, as of a timing model, at which a sleeping poller wakes up and starts to
    /// spin. So the command completes on time.
    pub(super) fn spin_lead(self) -> Duration {
        match self {
            Self::Adaptive | Self::Busy => DUE_SOON,
            Self::Event => Duration::ZERO,
        }
    }
}

/// Processors of pollers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum PollerProcessors {
    /// Chosen by the kernel. The kernel can then move a poller away from other threads on its processor.
    #[default]
    Any,
    /// The named processors in turn; the list is not empty.
    Named(Vec<usize>),
    /// Processors beside the vCPU that receives a queue's interrupts, if the VMM reports the vCPU; otherwise those of the
    /// drive's NUMA node. Only for [`PollerSharing::Dedicated`], because a shared poller works for many vCPUs.
    Vcpu,
}

/// Polling policy of a guest controller's queues: `MODE[:adaptive|:busy|:event][@CPU[+CPU…]|@vcpu]`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PollPolicy {
    /// Sharing of pollers between queues.
    pub sharing: PollerSharing,
    /// Behaviour of a poller without work.
    pub idle_mode: PollerIdleMode,
    /// Processors of the pollers.
    pub processors: PollerProcessors,
}

impl FromStr for PollPolicy {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (mode, processors) = match text.split_once('@') {
            Some((mode, processors)) => (mode, Some(processors)),
            None => (text, None),
        };
        let (placement, spin) = mode.split_once(':').unwrap_or((mode, "adaptive"));
        let form = "use shared or dedicated, then :adaptive, :busy or :event, then @ and \
                    processor numbers joined by +, as in dedicated:busy@2+3, or @vcpu behind dedicated";
        let placement = match placement {
            "shared" => PollerSharing::Shared,
            "dedicated" => PollerSharing::Dedicated,
            _ => {
                return Err(format!(
                    "`{placement}` is not a placement of pollers; {form}"
                ));
            }
        };
        let spin = match spin {
            "adaptive" => PollerIdleMode::Adaptive,
            "busy" => PollerIdleMode::Busy,
            "event" => PollerIdleMode::Event,
            _ => return Err(format!("`{spin}` is not a polling mode; {form}")),
        };
        let parse = |cpu: &str| {
            cpu.parse::<usize>()
                .ok()
                .filter(|cpu| *cpu < PROCESSORS_MAX)
                .ok_or_else(|| format!("`{cpu}` is not a processor number; {form}"))
        };
        let processors = match processors {
            None => PollerProcessors::Any,
            Some("vcpu") if placement == PollerSharing::Dedicated => PollerProcessors::Vcpu,
            Some("vcpu") => {
                return Err(format!(
                    "a shared poller works for many vCPUs, so @vcpu needs dedicated; {form}"
                ));
            }
            Some(named) => {
                PollerProcessors::Named(named.split('+').map(parse).collect::<Result<_, _>>()?)
            }
        };
        Ok(Self {
            sharing: placement,
            idle_mode: spin,
            processors,
        })
    }
}

impl PollPolicy {
    /// Returns the doorbell mode for pollers of this policy. `requested` is the requested mode.
    ///
    /// A store to a mapped register wakes no poller. So the doorbell registers of event-driven pollers are not mapped in
    /// [`DoorbellMode::Auto`].
    #[must_use]
    pub fn doorbell_mode(&self, requested: DoorbellMode) -> DoorbellMode {
        match (self.idle_mode, requested) {
            (PollerIdleMode::Event, DoorbellMode::Auto) => DoorbellMode::Shadow,
            (_, requested) => requested,
        }
    }

    /// Checks that all named processors exist on this machine.
    ///
    /// # Errors
    /// [`NoSuchProcessor`].
    pub fn check_processors(&self) -> Result<(), NoSuchProcessor> {
        match &self.processors {
            PollerProcessors::Named(named) => affinity::check_online(named),
            PollerProcessors::Any | PollerProcessors::Vcpu => Ok(()),
        }
    }
}

impl fmt::Display for PollPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.sharing {
            PollerSharing::Shared => "shared",
            PollerSharing::Dedicated => "dedicated",
        })?;
        f.write_str(match self.idle_mode {
            PollerIdleMode::Adaptive => "",
            PollerIdleMode::Busy => ":busy",
            PollerIdleMode::Event => ":event",
        })?;
        match &self.processors {
            PollerProcessors::Any => {}
            PollerProcessors::Named(named) => {
                for (i, cpu) in named.iter().enumerate() {
                    write!(f, "{}{cpu}", if i == 0 { '@' } else { '+' })?;
                }
            }
            PollerProcessors::Vcpu => f.write_str("@vcpu")?,
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_way_of_spinning_bounds_the_time_without_work() {
        assert_eq!(PollerIdleMode::Adaptive.park_timeout(7), Some(7));
        assert_eq!(PollerIdleMode::Busy.park_timeout(7), None);
        assert_eq!(PollerIdleMode::Event.park_timeout(7), Some(0));
    }

    #[test]
    fn an_event_driven_poller_spins_for_no_command_that_is_due_soon() {
        assert_eq!(PollerIdleMode::Event.spin_lead(), Duration::ZERO);
        assert!(!PollerIdleMode::Adaptive.spin_lead().is_zero());
    }

    #[test]
    fn doorbells_of_an_event_driven_poller_are_not_mapped_unasked() {
        let [event, adaptive] = ["dedicated:event", "dedicated"];
        let [event, adaptive] = [event, adaptive].map(|text| {
            let policy: PollPolicy = text.parse().expect("valid");
            policy
        });
        for (policy, requested, given) in [
            (&event, DoorbellMode::Auto, DoorbellMode::Shadow),
            (&event, DoorbellMode::Trap, DoorbellMode::Trap),
            (&event, DoorbellMode::Mapped, DoorbellMode::Mapped),
            (&adaptive, DoorbellMode::Auto, DoorbellMode::Auto),
        ] {
            assert_eq!(
                policy.doorbell_mode(requested),
                given,
                "{policy}: {requested}"
            );
        }
    }
}
