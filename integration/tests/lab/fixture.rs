//! Tools of a check inside the lab: a folder of its own, servers, guests, drives.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use integration::guest::fio::FioError;
use integration::guest::nvme::NvmeError;
use integration::guest::{Guest, GuestConfig, GuestError};
use integration::lab::LabError;
use integration::lab::inside::{self, InsideError};
use integration::process::{self, ProcessError};
use integration::provision::{Assets, KernelChoice, ProvisionError};
use integration::server::{FunctionOptions, Server, ServerError};
use integration::vmms::VmmsError;
use thiserror::Error;

/// Long enough for anything that ends by itself.
pub(crate) const PATIENCE: Duration = Duration::from_secs(180);
/// Folder in which checks leave their logs.
pub(crate) const LOGS: &str = "/tmp/logs";

/// Why a check failed.
#[derive(Debug, Error)]
pub(crate) enum Fault {
    #[error(transparent)]
    Provision(#[from] ProvisionError),
    #[error(transparent)]
    Process(#[from] ProcessError),
    #[error(transparent)]
    Server(#[from] ServerError),
    #[error(transparent)]
    Guest(#[from] GuestError),
    #[error(transparent)]
    Fio(#[from] FioError),
    #[error(transparent)]
    Nvme(#[from] NvmeError),
    #[error(transparent)]
    Vmms(#[from] VmmsError),
    #[error(transparent)]
    Lab(#[from] LabError),
    #[error(transparent)]
    Inside(#[from] InsideError),
    #[error(transparent)]
    Driver(#[from] nvme_mpt_tests::Error),
    #[error(transparent)]
    Memory(#[from] nvme_mpt_tests::memory::MemoryError),
    #[error("Cannot use {path}")]
    File { path: PathBuf, source: io::Error },
    #[error("{0}")]
    Wrong(String),
}

/// Fails with `message` unless `holds`.
pub(crate) fn expect(holds: bool, message: impl FnOnce() -> String) -> Result<(), Fault> {
    if holds {
        Ok(())
    } else {
        Err(Fault::Wrong(message()))
    }
}

/// Runs a shell script on the lab's host, which must succeed, and returns what it printed.
pub(crate) fn sh(script: &str) -> Result<String, Fault> {
    Ok(process::run(Command::new("sh").args(["-c", script]))?)
}

/// Returns the number of accesses of devices that the IOMMU of the lab's host has refused so far.
pub(crate) fn iommu_faults() -> Result<u64, Fault> {
    let count = sh("dmesg | grep 'DMAR: \\[' | grep -c 'fault reason' || true")?;
    let count = count.trim().parse();
    count.map_err(|_| Fault::Wrong("The kernel's log can't be read".to_owned()))
}

/// Waits until `happened` says so.
pub(crate) fn await_that(
    what: &str,
    mut happened: impl FnMut() -> Result<bool, Fault>,
) -> Result<(), Fault> {
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
    pub(crate) fn new(check: &str) -> Result<Self, Fault> {
        let folder = Path::new(LOGS).join(check.replace("::", "-"));
        fs::create_dir_all(&folder).map_err(|source| Fault::File {
            path: folder.clone(),
            source,
        })?;
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
    pub(crate) fn serve(&self, functions: &[FunctionOptions]) -> Result<Server, Fault> {
        Ok(Server::start(&self.program(), functions, &self.folder)?)
    }

    /// A guest, by KVM.
    pub(crate) fn boot(&self, config: &GuestConfig) -> Result<Guest, Fault> {
        Ok(Guest::boot(&self.assets, config, &self.folder)?)
    }
}
