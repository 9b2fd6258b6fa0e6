//! Builds of our own programs.

use std::path::PathBuf;
use std::process::Command;

use crate::process::{self, ProcessError};
use crate::progress::Step;

/// Packages that have our programs. All are named in each build, whatever it builds: other packages ask for other
/// features of shared dependencies, and nearly all crates would be compiled once more.
const PACKAGES: [&str; 2] = ["nvme-mpt-cli", "integration"];

/// Builds programs, announced as `what`, and returns where they lie.
///
/// # Errors
/// If they don't build.
pub fn build(what: &str, programs: &[&str]) -> Result<Vec<PathBuf>, ProcessError> {
    let step = Step::start(format!("Building {what}"));
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(["build", "--release"]);
    for package in PACKAGES {
        command.args(["--package", package]);
    }
    for program in programs {
        command.args(["--bin", program]);
    }
    process::run(command.current_dir(crate::workspace_dir()))?;
    step.done("");
    let release = crate::target_dir().join("release");
    Ok(programs
        .iter()
        .map(|program| release.join(program))
        .collect())
}
