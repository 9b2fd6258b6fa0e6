//! `nvme-mpt doctor`: a report on a host and a drive, for a person and for an issue.
//!
//! [`examine`] changes nothing. A drive that `vfio-pci` has and no process uses is taken into use for a moment, which resets it
//! and leaves its data alone. All that is read from the host's kernel may be any text, and none of it ends the checks.
//!
//! [`Report::try_out`] overwrites a namespace that was given up for it: see [`scratch`].

mod drive;
mod host;
mod report;
pub mod scratch;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use nvme_mpt::poller::Threads;
use nvme_mpt_vmm::drives::DrivePath;
use nvme_mpt_vmm::report::chain;
use nvme_vfio::function::{PciAddress, PciFunction, VFIO_PCI};
use nvme_vfio::{ControllerOptions, Description, VfioBacking, VfioController};

pub use host::Host;
pub use report::{Check, Outcome, Report, Section};

/// Examines a host, and a drive if there is an address.
#[must_use]
pub fn examine(host: &Host, address: Option<PciAddress>) -> Report {
    let mut sections = vec![Section {
        subject: "Host".to_owned(),
        checks: host.checks(),
    }];
    if let Some(address) = address {
        sections.push(Section {
            subject: format!("Drive {address}"),
            checks: drive_checks(host, address, |function| describe(host, function)),
        });
    }
    Report {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        time: format!("{:.0}", Timestamp::now()),
        sections,
    }
}

impl Report {
    /// Tries a namespace out, whose data `consent` gives up, and appends the checks. Each measurement takes `time`.
    ///
    /// Nothing is done while the drive has problems.
    pub fn try_out(
        &mut self,
        host: &Host,
        path: &DrivePath,
        nsid: u32,
        time: Duration,
        consent: &mut scratch::Consent<'_>,
    ) {
        const NAME: &str = "scratch.setup";
        let drive = self
            .sections
            .iter()
            .skip(1)
            .flat_map(|section| &section.checks);
        let problems = drive.filter(|check| check.outcome == Outcome::Problem);
        let checks = match problems.count() {
            0 => match scratch::try_out(host, path, nsid, time, consent) {
                Ok(checks) => checks,
                Err(error @ scratch::ScratchError::NotConfirmed) => {
                    vec![Check::not_checked(NAME, chain(&error))]
                }
                Err(error) => vec![Check::new(NAME, Outcome::Problem, chain(&error))],
            },
            _ => vec![Check::not_checked(NAME, "the drive has problems")],
        };
        self.sections.push(Section {
            subject: format!("Namespace {nsid} of {path}"),
            checks,
        });
    }
}

/// Checks a drive, whose description `describe` returns or says why there is none.
fn drive_checks(
    host: &Host,
    address: PciAddress,
    describe: impl FnOnce(&PciFunction) -> Result<Description, String>,
) -> Vec<Check> {
    let function = match PciFunction::find(&host.root, address) {
        Ok(function) => function,
        Err(error) => {
            return vec![Check::new(
                "drive.function",
                Outcome::Problem,
                chain(&error),
            )];
        }
    };
    let mut checks = drive::placed(&host.root, &function);
    if !function.is_nvme() {
        return checks;
    }
    match describe(&function) {
        Ok(description) => checks.extend(drive::described(&description)),
        Err(reason) => checks.push(Check::not_checked("drive.model", reason)),
    }
    checks
}

/// Asks a drive to describe itself, through the driver that it has.
fn describe(host: &Host, function: &PciFunction) -> Result<Description, String> {
    if let Some(controller) = &function.controller {
        return controller
            .describe(&host.root)
            .map_err(|error| chain(&error));
    }
    let group = match (&function.iommu_group, function.driver.as_deref()) {
        (Some(group), Some(VFIO_PCI)) => group,
        _ => return Err("no driver asks the drive".to_owned()),
    };
    if let Some(user) = group.users(&host.root).first() {
        return Err(format!("{user}, and one process alone can ask the drive"));
    }
    let backing = VfioBacking::open(function.address).map_err(|error| chain(&error))?;
    let controller = VfioController::open(
        Arc::new(backing),
        ControllerOptions::default(),
        &Threads::default(),
    );
    let controller = controller.map_err(|error| chain(&error))?;
    controller.describe().map_err(|error| chain(&error))
}
