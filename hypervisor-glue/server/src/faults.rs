//! `nvme-mpt fault`: injects faults into drives of a running server.

use std::sync::Arc;

use nvme_layers::LayeredController;
use nvme_layers::faults::{FaultError, FaultInjector, FaultPlan, FaultStats};
use nvme_mpt::Drive;
use nvme_mpt_vmm::drives::DrivePath;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use nvme_mpt_vmm::report;

/// Request about injected faults.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum FaultRequest {
    /// Lists the faults with their statistics.
    List {},
    /// Adds faults to a drive.
    Inject {
        /// The drive, as in `path=`.
        drive: String,
        /// Fault schedule, in the TOML syntax of the file that `faults=` names.
        plan: String,
    },
    /// Removes all faults of a drive.
    Clear {
        /// The drive, as in `path=`.
        drive: String,
    },
}

/// Error of injecting or clearing faults.
#[derive(Debug, Error)]
pub enum FaultRequestError {
    /// The server has no such drive.
    #[error(
        "The server has no drive {drive}; its drives with faults are: {}",
        known(drives)
    )]
    NoDrive {
        /// The requested drive.
        drive: String,
        /// Drives that were opened with `faults=`.
        drives: Vec<String>,
    },
    /// The drive was opened without fault injection.
    #[error(
        "Drive {0} was opened without support for faults: serve it with faults=none to inject them later"
    )]
    NoFaults(String),
    /// The plan is invalid, or does not fit the drive.
    #[error("{}", report::chain(.0))]
    Plan(#[source] FaultError),
}

fn known(drives: &[String]) -> String {
    match drives {
        [] => "none".to_owned(),
        drives => drives.join(", "),
    }
}

/// Injected faults of a drive.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DriveFaults {
    /// The drive, as in `path=`.
    pub drive: String,
    /// Faults in the order in which they are matched.
    pub faults: Vec<FaultStats>,
}

/// Executes a request. Returns the faults of all drives that were opened with `faults=`.
///
/// # Errors
/// See [`FaultRequestError`]. After an error, no fault has changed.
pub fn execute_request(
    request: &FaultRequest,
    drives: &[Arc<Drive>],
) -> Result<Vec<DriveFaults>, FaultRequestError> {
    match request {
        FaultRequest::List {} => {}
        FaultRequest::Inject { drive, plan } => {
            let faults = find_injector(drive, drives)?;
            let plan = FaultPlan::parse("request", plan).map_err(FaultRequestError::Plan)?;
            faults.inject(&plan).map_err(FaultRequestError::Plan)?;
        }
        FaultRequest::Clear { drive } => find_injector(drive, drives)?.clear(),
    }
    let listed = drives.iter().filter_map(|drive| {
        Some(DriveFaults {
            drive: drive.path().to_owned(),
            faults: fault_injector(drive)?.stats(),
        })
    });
    Ok(listed.collect())
}

fn find_injector<'a>(
    path: &str,
    drives: &'a [Arc<Drive>],
) -> Result<&'a FaultInjector, FaultRequestError> {
    let wanted: Option<DrivePath> = path.parse().ok();
    let wanted = wanted.map_or_else(|| path.to_owned(), |path| path.to_string());
    let same = |drive: &&Arc<Drive>| drive.path() == wanted;
    let Some(drive) = drives.iter().find(same) else {
        let faulty = drives
            .iter()
            .filter(|drive| fault_injector(drive).is_some());
        return Err(FaultRequestError::NoDrive {
            drive: path.to_owned(),
            drives: faulty.map(|drive| drive.path().to_owned()).collect(),
        });
    };
    let none = || FaultRequestError::NoFaults(path.to_owned());
    fault_injector(drive).ok_or_else(none)
}

/// Returns a drive's faults, or `None` if it was opened without `faults=`.
fn fault_injector(drive: &Drive) -> Option<&FaultInjector> {
    LayeredController::downcast(drive.controller())?.faults()
}

#[cfg(test)]
mod tests {
    use nvme_layers::faults::FaultKind;
    use nvme_mpt_vmm::drives::{self, DriveOptions};

    use super::*;

    fn drives() -> Vec<Arc<Drive>> {
        let open = |path: &str, faults| {
            let options = DriveOptions {
                faults,
                ..DriveOptions::default()
            };
            drives::open(&path.parse().unwrap(), options).unwrap()
        };
        vec![
            open("memory:1M", Some(Arc::default())),
            open("null:1M", None),
        ]
    }

    fn inject(drive: &str, plan: &str) -> FaultRequest {
        FaultRequest::Inject {
            drive: drive.to_owned(),
            plan: plan.to_owned(),
        }
    }

    #[test]
    fn faults_are_injected_listed_and_cleared() {
        let drives = drives();
        let plan = "[[fault]]\nkind = \"lost\"\nrange = \"0+4K\"\n";
        for faults in 1..3 {
            let listed = execute_request(&inject("memory:1024K", plan), &drives).unwrap();
            let [drive] = listed.as_slice() else {
                panic!("{listed:?}");
            };
            assert_eq!(
                (drive.drive.as_str(), drive.faults.len()),
                ("memory:1M", faults)
            );
            let last = drive.faults.last().unwrap();
            assert_eq!(
                (last.kind, last.range.as_deref()),
                (FaultKind::Lost, Some("0+4K"))
            );
        }
        let clear = FaultRequest::Clear {
            drive: "memory:1M".to_owned(),
        };
        let listed = execute_request(&clear, &drives).unwrap();
        assert_eq!(
            listed,
            execute_request(&FaultRequest::List {}, &drives).unwrap()
        );
        assert_eq!(listed[0].faults, []);
    }

    #[test]
    fn impossible_fault_requests_are_refused_with_a_reason() {
        let drives = drives();
        let plan = "[[fault]]\nkind = \"resize\"\nsize = \"2M\"\n";
        for (request, expected) in [
            (
                inject("memory:2M", plan),
                "no drive memory:2M; its drives with faults are: memory:1M",
            ),
            (inject("null:1M", plan), "serve it with faults=none"),
            (
                inject("memory:1M", plan),
                "Fault 1 cannot resize the drive to 2M: it has 1M at most",
            ),
            (
                inject("memory:1M", "fault = 1"),
                "Fault plan `request` is invalid",
            ),
            (
                inject(
                    "memory:1M",
                    "[[fault]]\nkind = \"lost\"\nrange = \"0+100\"\n",
                ),
                "Fault 1 does not fit the drive\n",
            ),
        ] {
            let error = execute_request(&request, &drives).unwrap_err().to_string();
            assert!(error.contains(expected), "{expected}: {error}");
        }
    }
}
