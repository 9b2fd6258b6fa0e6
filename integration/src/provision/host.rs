//! Programs of the machine itself: asked for by name, installed by package where allowed.

use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use super::ProvisionError;
use crate::process;
use crate::progress::Step;

/// A program and the Debian package that brings it.
#[derive(Debug, Clone, Copy)]
pub struct Tool {
    /// Its name, or the path of a file that it needs.
    pub program: &'static str,
    /// Its package.
    pub package: &'static str,
}

/// Ensures that `tools` are there; root installs missing ones.
///
/// # Errors
/// If something is missing and can't be installed; the error names the command to run.
pub fn ensure(tools: &[Tool]) -> Result<(), ProvisionError> {
    // apt refuses a second one beside it.
    static INSTALLING: Mutex<()> = Mutex::new(());
    let _installing = INSTALLING.lock().unwrap_or_else(PoisonError::into_inner);
    let missing: Vec<&Tool> = tools.iter().filter(|tool| !on_path(tool.program)).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let join = |of: fn(&Tool) -> &'static str| {
        missing
            .iter()
            .map(|tool| of(tool))
            .collect::<Vec<_>>()
            .join(" ")
    };
    let packages = join(|tool| tool.package);
    if !is_root() {
        return Err(ProvisionError::Missing {
            programs: join(|tool| tool.program),
            packages,
        });
    }
    let step = Step::start(format!("Installing {packages}"));
    let install = || {
        process::run(
            Command::new("apt-get")
                .args(["install", "--yes", "--no-install-recommends"])
                .args(packages.split(' '))
                .env("DEBIAN_FRONTEND", "noninteractive"),
        )
    };
    // Lists that are already there are mostly good enough; without them, or with old ones, fetch.
    if install().is_err() {
        process::run(Command::new("apt-get").arg("update"))?;
        install()?;
    }
    step.done("");
    Ok(())
}

/// Returns whether a program can be found.
pub fn on_path(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain([
            Path::new("/usr/sbin").to_owned(),
            Path::new("/sbin").to_owned(),
        ])
        .any(|folder| folder.join(program).is_file())
}

/// Returns whether this process runs as root.
pub fn is_root() -> bool {
    process::run(Command::new("id").arg("-u")).is_ok_and(|uid| uid.trim() == "0")
}
