//! Tools of a check: a folder of its own, drives, servers, guests.

use std::fs::File;
use std::path::{Path, PathBuf};

use super::{Failure, at};
use crate::guest::{Guest, GuestConfig};
use crate::provision::{Assets, KernelChoice};
use crate::server::{self, FunctionOptions, Server};

/// Possessions of one check, or of a group of checks that share a guest.
#[derive(Debug)]
pub struct Bench {
    folder: PathBuf,
    drives: PathBuf,
    program: PathBuf,
    assets: Assets,
}

impl Bench {
    /// Returns a bench with the `nvme-mpt` command `program`. Logs and sockets go to `folder`, drives to `drives`; both are
    /// there.
    pub fn new(folder: PathBuf, drives: PathBuf, program: PathBuf, assets: Assets) -> Self {
        Self {
            folder,
            drives,
            program,
            assets,
        }
    }

    /// Returns the folder of logs, sockets and the like.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the folder with the leases of its servers and VMMs.
    pub fn state_dir(&self) -> PathBuf {
        server::state_dir(&self.folder)
    }

    /// Returns the `nvme-mpt` command.
    pub fn program(&self) -> &Path {
        &self.program
    }

    /// Assets with Linux 6.12, Debian 13's kernel.
    pub fn v6_12(&self) -> &Assets {
        &self.assets
    }

    /// Assets with Linux 6.1, Debian 12's kernel.
    ///
    /// # Errors
    /// The kernel can't be fetched or verified.
    pub fn v6_1(&self) -> Result<Assets, Failure> {
        Ok(self.assets.with_kernel(&KernelChoice::V6_1)?)
    }

    /// Makes a drive of so many MiB in a file.
    ///
    /// # Errors
    /// The file can't be made.
    pub fn drive(&self, name: &str, mib: u64) -> Result<PathBuf, Failure> {
        let path = self.drives.join(name);
        File::create(&path)
            .and_then(|file| file.set_len(mib << 20))
            .map_err(at(&path))?;
        Ok(path)
    }

    /// Starts `nvme-mpt serve` with these functions.
    ///
    /// # Errors
    /// If it does not start.
    pub fn serve(&self, functions: &[FunctionOptions]) -> Result<Server, Failure> {
        Ok(Server::start(&self.program, functions, &self.folder)?)
    }

    /// Starts `nvme-mpt serve` with these functions under `nvme-mpt keep`.
    ///
    /// # Errors
    /// If it does not start.
    pub fn serve_kept(&self, functions: &[FunctionOptions]) -> Result<Server, Failure> {
        Ok(Server::start_kept(&self.program, functions, &self.folder)?)
    }

    /// Starts a server with drives for functions in VMMs.
    ///
    /// # Errors
    /// If it does not come up.
    pub fn hold(&self, drives: &[String]) -> Result<Server, Failure> {
        Ok(Server::holding(&self.program, drives, &self.folder)?)
    }

    /// Boots a guest with Linux 6.12.
    ///
    /// # Errors
    /// If it does not come up.
    pub fn boot(&self, config: &GuestConfig) -> Result<Guest, Failure> {
        self.boot_with(&self.assets, config)
    }

    /// Boots a guest with these assets.
    ///
    /// # Errors
    /// If it does not come up.
    pub fn boot_with(&self, assets: &Assets, config: &GuestConfig) -> Result<Guest, Failure> {
        Ok(Guest::boot(assets, config, &self.folder)?)
    }
}
