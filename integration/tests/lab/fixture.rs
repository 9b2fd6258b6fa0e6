//! Tools of a check inside the lab: a folder of its own, servers, guests, drives.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

pub(crate) use integration::checks::{Failure, at, expect};
use integration::guest::{Guest, GuestConfig};
use integration::lab::inside;
use integration::process;
use integration::provision::{Assets, KernelChoice};
use integration::server::{FunctionOptions, Server};

/// Long enough for anything that ends by itself.
pub(crate) const PATIENCE: Duration = Duration::from_secs(180);
/// Folder in which checks leave their logs.
pub(crate) const LOGS: &str = "/tmp/logs";

/// Runs a shell script on the lab's host, which must succeed, and returns what it printed.
pub(crate) fn sh(script: &str) -> Result<String, Failure> {
    Ok(process::run(Command::new("sh").args(["-c", script]))?)
}

/// Returns the number of accesses of devices that the IOMMU of the lab's host has refused so far.
pub(crate) fn iommu_faults() -> Result<u64, Failure> {
    let count = sh("dmesg | grep 'DMAR: \\[' | grep -c 'fault reason' || true")?;
    let count = count.trim().parse();
    count.map_err(|_| Failure::from("The kernel's log can't be read"))
}

/// Waits until `happened` says so.
pub(crate) fn await_that(
    what: &str,
    mut happened: impl FnMut() -> Result<bool, Failure>,
) -> Result<(), Failure> {
    let deadline = std::time::Instant::now() + PATIENCE;
    while !happened()? {
        expect(std::time::Instant::now() < deadline, || {
            format!("Waited {PATIENCE:?} in vain: {what}")
        })?;
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// Possessions of one check, inside the lab.
pub(crate) struct Bench {
    folder: PathBuf,
    assets: Assets,
}

impl Bench {
    pub(crate) fn new(check: &str) -> Result<Self, Failure> {
        let folder = Path::new(LOGS).join(check.replace("::", "-"));
        fs::create_dir_all(&folder).map_err(at(&folder))?;
        Ok(Self {
            folder,
            assets: Assets::provide(&KernelChoice::V6_12)?,
        })
    }

    /// Its own folder.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// The `nvme-mpt` program.
    pub(crate) fn program(&self) -> PathBuf {
        inside::brought("nvme-mpt")
    }

    /// `nvme-mpt serve` with these functions.
    pub(crate) fn serve(&self, functions: &[FunctionOptions]) -> Result<Server, Failure> {
        Ok(Server::start(&self.program(), functions, &self.folder)?)
    }

    /// A guest, by KVM.
    pub(crate) fn boot(&self, config: &GuestConfig) -> Result<Guest, Failure> {
        Ok(Guest::boot(&self.assets, config, &self.folder)?)
    }
}
