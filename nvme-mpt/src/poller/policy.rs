//! Polling as an operator asks for it.

use std::fmt;
use std::str::FromStr;

use super::affinity::{self, NoSuchProcessor};

/// Sharing of a poller.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Placement {
    /// A few pollers run all shadow queues of all VMs.
    #[default]
    Shared,
    /// Each shadow queue has a poller to itself.
    Dedicated,
}

/// Behaviour of a poller without work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Spin {
    /// It spins for a bounded time and then parks.
    #[default]
    Adaptive,
    /// It never parks. (It still yields to others on its processor.)
    Busy,
}

/// Polling of a guest controller's queues: `MODE[:adaptive|:busy][@CPU[+CPU…]]`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PollPolicy {
    /// Sharing of a poller.
    pub placement: Placement,
    /// Behaviour of a poller without work.
    pub spin: Spin,
    /// Processors to pin pollers to, in turn; none pinned if empty, since a pinned poller cannot
    /// get out of the way of whatever else runs on its processor.
    pub cpus: Vec<usize>,
}

impl FromStr for PollPolicy {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (mode, cpus) = match text.split_once('@') {
            Some((mode, cpus)) => (mode, Some(cpus)),
            None => (text, None),
        };
        let (placement, spin) = mode.split_once(':').unwrap_or((mode, "adaptive"));
        let form = "use shared or dedicated, then :adaptive or :busy, then @ and processor \
                    numbers joined by +, as in dedicated:busy@2+3";
        let placement = match placement {
            "shared" => Placement::Shared,
            "dedicated" => Placement::Dedicated,
            _ => return Err(format!("`{placement}` is no way of polling; {form}")),
        };
        let spin = match spin {
            "adaptive" => Spin::Adaptive,
            "busy" => Spin::Busy,
            _ => return Err(format!("`{spin}` is no way of spinning; {form}")),
        };
        let parse = |cpu: &str| {
            cpu.parse::<usize>()
                .ok()
                .filter(|cpu| *cpu < 4096)
                .ok_or_else(|| format!("`{cpu}` is no processor number; {form}"))
        };
        let cpus = cpus.map_or(Ok(Vec::new()), |cpus| cpus.split('+').map(parse).collect())?;
        Ok(Self {
            placement,
            spin,
            cpus,
        })
    }
}

impl PollPolicy {
    /// Refuses a policy that names a processor that this machine does not have.
    ///
    /// # Errors
    /// [`NoSuchProcessor`].
    pub fn check(&self) -> Result<(), NoSuchProcessor> {
        affinity::check(&self.cpus)
    }
}

impl fmt::Display for PollPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.placement {
            Placement::Shared => "shared",
            Placement::Dedicated => "dedicated",
        })?;
        if self.spin == Spin::Busy {
            f.write_str(":busy")?;
        }
        for (i, cpu) in self.cpus.iter().enumerate() {
            write!(f, "{}{cpu}", if i == 0 { '@' } else { '+' })?;
        }
        Ok(())
    }
}
