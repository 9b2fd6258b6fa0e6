//! `nvme-mpt doctor`.

use std::error::Error;
use std::io::{self, Write};

use clap::Args;
use nvme_vfio::function::{HostRoot, PciAddress};
use thiserror::Error;

use super::State;
use crate::doctor::{Host, Outcome, examine};

/// Check a host, and a drive, for what serving needs, and print a report to attach to an issue
///
/// Nothing is changed. A drive that is bound to vfio-pci, and that no process uses, is reset to ask it for its abilities.
/// The command fails if there is a problem; a warning names a drawback.
#[derive(Args, Debug)]
pub(super) struct Doctor {
    /// The drive's PCI address, as in 0000:01:00.0, or its folder in /sys/bus/pci/devices
    address: Option<PciAddress>,
    /// As JSON, one line
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    state: State,
}

/// There is something that has to be changed first.
#[derive(Debug, Error)]
#[error("Problems found: {0}; the report has the remedies")]
struct ProblemsFound(usize);

impl Doctor {
    pub(super) fn run(self) -> Result<(), Box<dyn Error>> {
        let host = Host {
            root: HostRoot::default(),
            state_dir: self.state.state_dir,
            physical: self.address.is_some(),
        };
        let report = examine(&host, self.address);
        let mut out = io::stdout().lock();
        match self.json {
            true => writeln!(out, "{}", serde_json::to_string(&report)?)?,
            false => write!(out, "{report}")?,
        }
        match report.count(Outcome::Problem) {
            0 => Ok(()),
            problems => Err(ProblemsFound(problems).into()),
        }
    }
}
