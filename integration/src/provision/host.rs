//! Programs that this machine must have. If they are missing, root installs them.

use std::fs::{self, File};
use std::path::Path;
use std::process::Command;

use super::ProvisionError;
use crate::process;
use crate::progress::ProgressStep;

/// A program and its Debian package.
#[derive(Debug, Clone, Copy)]
pub struct HostTool {
    /// Name of the program, or the path of a file that it needs.
    pub program: &'static str,
    /// Debian package.
    pub package: &'static str,
}

/// Ensures that `tools` are installed. As root, installs missing ones.
///
/// # Errors
/// A tool is missing and cannot be installed. The error names the command that installs it.
pub fn ensure(tools: &[HostTool]) -> Result<(), ProvisionError> {
    // While another thread or process unpacks a package, its programs are incomplete.
    let _turn = lock_packages(&crate::target_dir().join("installing"))?;
    let missing = |of: fn(&HostTool) -> &'static str| {
        let missing = tools.iter().filter(|tool| !on_path(tool.program));
        missing.map(of).collect::<Vec<_>>().join(" ")
    };
    let programs = missing(|tool| tool.program);
    if programs.is_empty() {
        return Ok(());
    }
    let packages = missing(|tool| tool.package);
    if !is_root() {
        return Err(ProvisionError::Missing { programs, packages });
    }
    let step = ProgressStep::start(format!("Installing {packages}"));
    let install = || {
        process::run(
            Command::new("apt-get")
                .args(["install", "--yes", "--no-install-recommends"])
                .args(packages.split(' '))
                .env("DEBIAN_FRONTEND", "noninteractive"),
        )
    };
    // The machine's package lists are usually sufficient. If they are not, they are fetched.
    if install().is_err() {
        process::run(Command::new("apt-get").arg("update"))?;
        install()?;
    }
    step.done("");
    Ok(())
}

/// Waits until no other thread or program of the workspace installs packages, since apt refuses concurrent installations.
/// Dropping the returned file ends the lock.
fn lock_packages(path: &Path) -> Result<File, ProvisionError> {
    let at = |source| ProvisionError::File {
        path: path.to_owned(),
        source,
    };
    if let Some(dir) = path.parent() {
        fs::create_dir_all(dir).map_err(at)?;
    }
    let file = File::create(path).map_err(at)?;
    file.lock().map_err(at)?;
    Ok(file)
}

/// Returns whether a program is in `PATH`.
pub fn on_path(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain([
            Path::new("/usr/sbin").to_owned(),
            Path::new("/sbin").to_owned(),
        ])
        .any(|dir| dir.join(program).is_file())
}

/// Returns whether this process runs as root.
pub fn is_root() -> bool {
    process::run(Command::new("id").arg("-u")).is_ok_and(|uid| uid.trim() == "0")
}

#[cfg(test)]
mod tests {
    use std::fs::TryLockError;

    use super::*;

    #[test]
    fn one_process_at_a_time_installs_programs() {
        let dir = tempfile::tempdir().expect("temporary folder");
        let path = dir.path().join("target/installing");
        let own = lock_packages(&path).expect("a turn");
        let other = File::open(&path).expect("the lock");
        let taken = other.try_lock().expect_err("it is taken");
        assert!(matches!(taken, TryLockError::WouldBlock), "{taken}");
        drop(own);
        // A process that was just started may hold a copy of the lock for a moment, so this waits.
        other.lock().expect("the next turn");
    }
}
