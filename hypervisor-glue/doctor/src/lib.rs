//! A report on a host and a drive, for the operator and for bug reports: `nvme-mpt doctor`.
//!
//! [`examine`] changes no data. It opens an unused drive that is bound to `vfio-pci`, which resets the drive. Malformed
//! text in the kernel's files does not stop the checks.
//!
//! [`DoctorReport::test_namespace`] overwrites a namespace with the operator's consent: see [`scratch`].
//!
//! Module `host` checks the host, `drive` checks a drive, and `report` has the types of their results. Module [`host_drives`]
//! lists the drives of the host, without opening any.
//!
//! # Example
//!
//! A report on a host that serves no physical drive. Each problem has a remedy:
//!
//! ```
//! use nvme_mpt_doctor::{CheckOutcome, DoctorHost, examine};
//! use nvme_vfio::function::HostRoot;
//!
//! let host = DoctorHost {
//!     root: HostRoot::default(),
//!     state_dir: "/run/nvme-mpt".into(),
//!     physical: false,
//! };
//! let report = examine(&host, None);
//! for check in &report.sections[0].checks {
//!     println!("{}: {}", check.name, check.finding);
//!     assert!(check.outcome != CheckOutcome::Problem || check.remedy.is_some());
//! }
//! ```
//!
//! # Not implemented
//!
//! The crate prints nothing and asks the operator nothing: `nvme-mpt-cli` does.

#![forbid(unsafe_code)]

mod drive;
mod host;
pub mod host_drives;
mod report;
pub mod scratch;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use nvme_guest::threads::ThreadSpawner;
use nvme_mpt_vmm::drives::DrivePath;
use nvme_mpt_vmm::report::chain;
use nvme_vfio::function::{PciAddress, PciFunction, VFIO_PCI};
use nvme_vfio::{ControllerOptions, DriveDescription, VfioBacking, VfioController};

pub use host::DoctorHost;
pub use report::{CheckOutcome, DoctorCheck, DoctorReport, ReportSection};

/// Examines a host, and a drive if there is an address.
#[must_use]
pub fn examine(host: &DoctorHost, address: Option<PciAddress>) -> DoctorReport {
    let mut sections = vec![ReportSection {
        subject: "Host".to_owned(),
        checks: host.checks(),
    }];
    if let Some(address) = address {
        sections.push(ReportSection {
            subject: format!("Drive {address}"),
            checks: check_drive(host, address, |function| describe_drive(host, function)),
        });
    }
    DoctorReport {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        time: format!("{:.0}", Timestamp::now()),
        sections,
    }
}

impl DoctorReport {
    /// Tests a namespace if `consent` allows erasing it, and appends the checks to the report. Each measurement takes `time`.
    ///
    /// Does nothing if the report already has problems.
    pub fn test_namespace(
        &mut self,
        host: &DoctorHost,
        path: &DrivePath,
        nsid: u32,
        time: Duration,
        consent: &mut scratch::ErasureConsent<'_>,
    ) {
        const NAME: &str = "scratch.setup";
        let drive = self
            .sections
            .iter()
            .skip(1)
            .flat_map(|section| &section.checks);
        let problems = drive.filter(|check| check.outcome == CheckOutcome::Problem);
        let checks = match problems.count() {
            0 => match scratch::test_namespace(host, path, nsid, time, consent) {
                Ok(checks) => checks,
                Err(error @ scratch::ScratchError::NotConfirmed) => {
                    vec![DoctorCheck::not_checked(NAME, chain(&error))]
                }
                Err(error) => vec![DoctorCheck::new(NAME, CheckOutcome::Problem, chain(&error))],
            },
            _ => vec![DoctorCheck::not_checked(NAME, "the drive has problems")],
        };
        self.sections.push(ReportSection {
            subject: format!("Namespace {nsid} of {path}"),
            checks,
        });
    }
}

/// Checks a drive. `describe` returns the drive's description, or the reason why the drive cannot be described.
fn check_drive(
    host: &DoctorHost,
    address: PciAddress,
    describe: impl FnOnce(&PciFunction) -> Result<DriveDescription, String>,
) -> Vec<DoctorCheck> {
    let function = match PciFunction::find(&host.root, address) {
        Ok(function) => function,
        Err(error) => {
            return vec![DoctorCheck::new(
                "drive.function",
                CheckOutcome::Problem,
                chain(&error),
            )];
        }
    };
    let mut checks = drive::check_placement(&host.root, &function);
    if !function.is_nvme() {
        return checks;
    }
    match describe(&function) {
        Ok(description) => checks.extend(drive::check_description(&description)),
        Err(reason) => checks.push(DoctorCheck::not_checked("drive.model", reason)),
    }
    checks
}

/// Reads the drive's description through its present driver.
fn describe_drive(host: &DoctorHost, function: &PciFunction) -> Result<DriveDescription, String> {
    if let Some(controller) = &function.controller {
        return controller
            .describe(&host.root)
            .map_err(|error| chain(&error));
    }
    let group = match (&function.iommu_group, function.driver.as_deref()) {
        (Some(group), Some(VFIO_PCI)) => group,
        _ => return Err("the drive has no driver that can query it".to_owned()),
    };
    if let Some(user) = group.users(&host.root).first() {
        return Err(format!("{user}, and only one process can query the drive"));
    }
    let backing = VfioBacking::open(function.address).map_err(|error| chain(&error))?;
    let controller = VfioController::open(
        Arc::new(backing),
        ControllerOptions::default(),
        &ThreadSpawner::default(),
    );
    let controller = controller.map_err(|error| chain(&error))?;
    controller.describe().map_err(|error| chain(&error))
}
