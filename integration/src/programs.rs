//! Builds of our own programs.

use std::path::PathBuf;
use std::process::Command;

use crate::process::{self, ProcessError};
use crate::progress::Step;

/// Builds programs, announced as `what`, and returns where they lie.
///
/// # Errors
/// If they don't build.
pub fn build(what: &str, programs: &[&str]) -> Result<Vec<PathBuf>, ProcessError> {
    let step = Step::start(format!("Building {what}"));
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    // Of the workspace, as tests are: with less of it, other features of shared dependencies would be asked for, and
    // nearly all crates would be compiled once more.
    command.args(["build", "--release", "--workspace"]);
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
