//! The demonstration in a lab: two guests on two ranges of one physical drive.

use std::fs;

use clap::Parser;
use integration::demo;

use crate::Group;
use crate::fixture::{Failure, expect, with_path};
use crate::harness::Suite;

pub(crate) const GROUP: Group = Group::Around {
    name: "sharing",
    checks: &[("demo_on_a_physical_drive", demo_in_lab)],
};

/// The guests verify their data while both write. After the drive was returned to the host's driver, the host verifies all
/// ranges and the gaps between them.
fn demo_in_lab(_: &Suite) -> Result<(), Failure> {
    let dir = tempfile::tempdir().map_err(with_path(std::env::temp_dir()))?;
    let json = dir.path().join("demo.json");
    // The measuring jobs check nothing, and take longest in the lab.
    let arguments = ["demo", "--drive", "lab", "--jobs", "verify", "--json"];
    let path = json.display().to_string();
    let options = demo::DemoOptions::try_parse_from(arguments.into_iter().chain([path.as_str()]))
        .map_err(|error| Failure::from(error.to_string()))?;
    let well = demo::run(&options)?;
    let text = fs::read_to_string(&json).map_err(with_path(json))?;
    let report: serde_json::Value = serde_json::from_str(&text)?;
    let guests = report["guests"].as_array().cloned().unwrap_or_default();
    let verified = guests.iter().all(|guest| guest["verify_ok"] == true);
    expect(
        well && report["isolation_ok"] == true && guests.len() == 2 && verified,
        || text,
    )
}
