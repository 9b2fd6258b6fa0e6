//! Environment of a check: directories, drives, servers and guests.

use std::fs::File;
use std::path::{Path, PathBuf};

use super::{Failure, with_path};
use crate::guest::{Guest, GuestConfig};
use crate::provision::{GuestAssets, KernelChoice};
use crate::server::{self, FunctionArgument, Server};

/// Environment of one check, or of a group of checks that share a guest.
#[derive(Debug)]
pub struct CheckEnvironment {
    dir: PathBuf,
    drives: PathBuf,
    program: PathBuf,
    assets: GuestAssets,
}

impl CheckEnvironment {
    /// Creates an environment. Logs and sockets are put into `dir`, and drives into `drives`. Both directories must
    /// exist. `program` is the `nvme-mpt` command.
    pub fn new(dir: PathBuf, drives: PathBuf, program: PathBuf, assets: GuestAssets) -> Self {
        Self {
            dir,
            drives,
            program,
            assets,
        }
    }

    /// Returns the directory of logs and sockets.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns the directory of the lease ledger of servers and VMMs.
    pub fn state_dir(&self) -> PathBuf {
        server::state_dir(&self.dir)
    }

    /// Returns the `nvme-mpt` command.
    pub fn program(&self) -> &Path {
        &self.program
    }

    /// Returns the assets with Linux 6.12, Debian 13's kernel.
    pub fn v6_12(&self) -> &GuestAssets {
        &self.assets
    }

    /// Returns the assets with Linux 6.1, Debian 12's kernel.
    ///
    /// # Errors
    /// The kernel cannot be fetched or verified.
    pub fn v6_1(&self) -> Result<GuestAssets, Failure> {
        Ok(self.assets.with_kernel(&KernelChoice::V6_1)?)
    }

    /// Creates a drive of `mib` MiB in a file.
    ///
    /// # Errors
    /// The file cannot be created.
    pub fn drive(&self, name: &str, mib: u64) -> Result<PathBuf, Failure> {
        let path = self.drives.join(name);
        File::create(&path)
            .and_then(|file| file.set_len(mib << 20))
            .map_err(with_path(&path))?;
        Ok(path)
    }

    /// Starts `nvme-mpt serve` with these functions.
    ///
    /// # Errors
    /// The server does not come up.
    pub fn serve(&self, functions: &[FunctionArgument]) -> Result<Server, Failure> {
        Ok(Server::start(&self.program, functions, &self.dir)?)
    }

    /// Starts `nvme-mpt serve` with these functions under a supervisor (`nvme-mpt supervise`).
    ///
    /// # Errors
    /// The server does not come up.
    pub fn serve_supervised(&self, functions: &[FunctionArgument]) -> Result<Server, Failure> {
        Ok(Server::start_supervised(
            &self.program,
            functions,
            &self.dir,
        )?)
    }

    /// Starts a server that keeps drives open, for functions in VMMs.
    ///
    /// # Errors
    /// The server does not come up.
    pub fn hold(&self, drives: &[String]) -> Result<Server, Failure> {
        Ok(Server::start_with_drives(&self.program, drives, &self.dir)?)
    }

    /// Boots a guest with Linux 6.12.
    ///
    /// # Errors
    /// The guest does not come up.
    pub fn boot(&self, config: &GuestConfig) -> Result<Guest, Failure> {
        self.boot_with(&self.assets, config)
    }

    /// Boots a guest with these assets.
    ///
    /// # Errors
    /// The guest does not come up.
    pub fn boot_with(&self, assets: &GuestAssets, config: &GuestConfig) -> Result<Guest, Failure> {
        Ok(Guest::boot(assets, config, &self.dir)?)
    }
}
