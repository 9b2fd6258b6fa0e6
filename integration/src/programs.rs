//! Builds of this project's programs.

use std::path::PathBuf;
use std::process::Command;

use crate::process::{self, ProcessError};
use crate::progress::ProgressStep;

/// Builds programs and returns their paths. `what` names them in the progress message.
///
/// # Errors
/// A program does not build.
pub fn build(what: &str, programs: &[&str]) -> Result<Vec<PathBuf>, ProcessError> {
    let step = ProgressStep::start(format!("Building {what}"));
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    // The whole workspace is selected, as for tests. A smaller selection would select other features of shared
    // dependencies, so that nearly all crates would be compiled again.
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Returns the packages that the workspace's crates use along dependency edges of these kinds, with the features that
    /// each crate requests.
    fn packages(edges: &str) -> BTreeSet<String> {
        let arguments = ["tree", "--offline", "--workspace", "--edges", edges];
        let format = ["--prefix", "none", "--format", "{p} with {f}"];
        let output = process::run(
            Command::new(env!("CARGO"))
                .args([&arguments[..], &format].concat())
                .current_dir(crate::workspace_dir()),
        )
        .unwrap();
        let is_shown_again = " (*)";
        output
            .lines()
            .map(|line| line.trim_end_matches(is_shown_again).to_owned())
            .filter(|line| !line.is_empty())
            .collect()
    }

    /// If only tests requested a feature of a dependency, the dependency and every crate that uses it would be compiled
    /// twice.
    #[test]
    fn programs_and_tests_share_one_build() {
        let programs = packages("normal,build");
        let tests = packages("normal,build,dev");
        let twice: Vec<_> = programs.difference(&tests).collect();
        assert!(programs.len() > 100, "too few packages: {}", programs.len());
        assert!(
            twice.is_empty(),
            "Let the dependencies of programs, in the workspace's Cargo.toml or in integration/Cargo.toml, ask for \
             what tests ask of these: {twice:#?}"
        );
    }
}
