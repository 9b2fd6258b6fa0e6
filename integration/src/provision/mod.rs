//! Provides the files of guests: a QEMU with a vfio-user client, kernels, and a user land.
//!
//! Except for [`go`], all files come from Debian's signed packages, through the machine's own mirror. No package of the
//! machine is upgraded. The [cache](cache::ProvisionCache) stores the results.

use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::process::ProcessError;

pub mod apt;
pub mod bootable;
pub mod cache;
mod cpio;
pub mod debian;
pub mod go;
pub mod host;
pub(crate) mod image;
pub mod kernel;
pub mod lab;
mod modules;
pub mod qemu;
mod userland;

pub use kernel::KernelChoice;
pub use qemu::Qemu;

use cache::ProvisionCache;
use kernel::GuestKernel;

/// Errors of providing guests.
#[derive(Debug, Error)]
pub enum ProvisionError {
    /// The cache directory cannot be used.
    #[error(
        "Cannot use the cache directory {path} (set {variable} to use another)",
        variable = cache::CACHE_VARIABLE
    )]
    Cache {
        /// The directory.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// A file cannot be read or written.
    #[error("Cannot use {path}")]
    File {
        /// The file.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// The machine does not run Debian.
    #[error(
        "Guests are made from Debian packages: this needs a Debian machine with apt-get, dpkg-deb \
         and the debian-archive-keyring"
    )]
    NotDebian,
    /// The machine's apt sources contain no Debian mirror.
    #[error("No Debian mirror for '{suite}' in /etc/apt/sources.list or /etc/apt/sources.list.d")]
    NoMirror {
        /// Name of the suite.
        suite: String,
    },
    /// A program is missing, and this user may not install it.
    #[error("Missing: {programs}. Run as root: apt-get update && apt-get install -y {packages}")]
    Missing {
        /// Missing programs.
        programs: String,
        /// Packages with the programs.
        packages: String,
    },
    /// A package does not contain an expected file.
    #[error("The packages of {suite} hold no {what}")]
    NotInPackages {
        /// Name of the suite.
        suite: String,
        /// Name of the file.
        what: String,
    },
    /// QEMU lacks a required feature.
    #[error("{qemu} has no vfio-user-pci device (it needs to be version 10.1 or newer)")]
    QemuTooOld {
        /// The program.
        qemu: PathBuf,
    },
    /// Modules of a kernel are required but missing.
    #[error("There are modules for the kernels 6.1 and 6.12 only, and none inside the lab")]
    NoModules,
    /// A program failed.
    #[error(transparent)]
    Process(#[from] ProcessError),
}

/// Files for booting a guest.
#[derive(Debug, Clone)]
pub struct GuestAssets {
    /// QEMU.
    pub qemu: Qemu,
    /// Guest kernel.
    pub kernel: GuestKernel,
    /// Guest user land, which works with every kernel.
    pub initramfs: PathBuf,
}

impl GuestAssets {
    /// Provides QEMU, `kernel`, and the user land. Inside the lab, returns those of the lab.
    ///
    /// # Errors
    /// A file cannot be found, fetched or verified.
    pub fn provide(kernel: &KernelChoice) -> Result<Self, ProvisionError> {
        if lab::is_inside() {
            return lab::nested(kernel);
        }
        let cache = ProvisionCache::open()?;
        Ok(Self {
            qemu: Qemu::provide(&cache)?,
            kernel: GuestKernel::provide(&cache, kernel)?,
            initramfs: userland::provide(&cache)?,
        })
    }

    /// Provides QEMU, and Debian 13's kernel with the modules `wanted`. The guest has these modules in `/lib/modules`, in
    /// loading order.
    ///
    /// # Errors
    /// A file cannot be found, fetched or verified. Inside the lab, which has no modules for guests, this fails always.
    pub fn provide_with_modules(wanted: &[&str]) -> Result<Self, ProvisionError> {
        if lab::is_inside() {
            return Err(ProvisionError::NoModules);
        }
        let cache = ProvisionCache::open()?;
        let (kernel, modules) =
            GuestKernel::with_modules(&cache, &KernelChoice::V6_12, "guest", wanted)?;
        let userland = userland::provide(&cache)?;
        let additions = userland::UserlandAdditions {
            dirs: &["lib/modules"],
            scripts: &[],
            modules: &modules,
        };
        Ok(Self {
            qemu: Qemu::provide(&cache)?,
            kernel,
            initramfs: additions.to(&cache, "guest-userland", &userland)?,
        })
    }

    /// Returns these assets with another kernel.
    ///
    /// # Errors
    /// The kernel cannot be fetched or verified.
    pub fn with_kernel(&self, kernel: &KernelChoice) -> Result<Self, ProvisionError> {
        if lab::is_inside() {
            return lab::nested(kernel);
        }
        let cache = ProvisionCache::open()?;
        Ok(Self {
            kernel: GuestKernel::provide(&cache, kernel)?,
            ..self.clone()
        })
    }
}

fn with_path(path: &Path) -> impl FnOnce(io::Error) -> ProvisionError {
    let path = path.to_owned();
    |source| ProvisionError::File { path, source }
}
