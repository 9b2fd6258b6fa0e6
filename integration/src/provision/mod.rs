//! Provides what the guests need: a QEMU with a vfio-user client, kernels, a user land.
//!
//! Everything comes from Debian's own signed packages, of the mirror that the machine uses already, but for [`go`];
//! nothing on the machine is upgraded. The [cache](cache::Cache) keeps the results.

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

use cache::Cache;
use kernel::Kernel;

/// Why guests could not be provided.
#[derive(Debug, Error)]
pub enum ProvisionError {
    /// The cache folder can't be used.
    #[error("Cannot use the cache folder {path} (set {variable} to use another)", variable = cache::CACHE_VARIABLE)]
    Cache {
        /// The folder.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A file that is needed can't be read or written.
    #[error("Cannot use {path}")]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Not a Debian machine.
    #[error(
        "Guests are made from Debian packages: this needs a Debian machine with apt-get, dpkg-deb \
         and the debian-archive-keyring"
    )]
    NotDebian,
    /// No Debian mirror in the machine's apt sources.
    #[error("No Debian mirror for '{suite}' in /etc/apt/sources.list or /etc/apt/sources.list.d")]
    NoMirror {
        /// The suite that was looked for.
        suite: String,
    },
    /// Something is missing and only root may install it.
    #[error("Missing: {programs}. Run as root: apt-get update && apt-get install -y {packages}")]
    Missing {
        /// Missing programs.
        programs: String,
        /// The packages that bring it.
        packages: String,
    },
    /// A package does not hold what it used to.
    #[error("The packages of {suite} hold no {what}")]
    NotInPackages {
        /// The suite.
        suite: String,
        /// Name that was looked for.
        what: String,
    },
    /// A QEMU that doesn't do what is needed.
    #[error("{qemu} has no vfio-user-pci device (it needs to be version 10.1 or newer)")]
    QemuTooOld {
        /// The program.
        qemu: PathBuf,
    },
    /// A kernel without its modules where they are needed.
    #[error("There are modules for the kernels 6.1 and 6.12 only, and none inside the lab")]
    NoModules,
    /// A program failed.
    #[error(transparent)]
    Process(#[from] ProcessError),
}

/// All that booting a guest takes.
#[derive(Debug, Clone)]
pub struct Assets {
    /// The VMM.
    pub qemu: Qemu,
    /// The guest's kernel.
    pub kernel: Kernel,
    /// The guest's user land, which serves every kernel.
    pub initramfs: PathBuf,
}

impl Assets {
    /// Provides the VMM, `kernel`, and the user land. Inside the lab, they are there.
    ///
    /// # Errors
    /// Something can't be found, fetched or verified.
    pub fn provide(kernel: &KernelChoice) -> Result<Self, ProvisionError> {
        if lab::is_inside() {
            return lab::nested(kernel);
        }
        let cache = Cache::open()?;
        Ok(Self {
            qemu: Qemu::provide(&cache)?,
            kernel: Kernel::provide(&cache, kernel)?,
            initramfs: userland::provide(&cache)?,
        })
    }

    /// Debian 13's kernel with the modules `wanted`, which a guest finds in `/lib/modules`, in the order in
    /// which they load.
    ///
    /// # Errors
    /// Something can't be found, fetched or verified; inside the lab, which has none.
    pub fn provide_with_modules(wanted: &[&str]) -> Result<Self, ProvisionError> {
        if lab::is_inside() {
            return Err(ProvisionError::NoModules);
        }
        let cache = Cache::open()?;
        let (kernel, modules) =
            Kernel::with_modules(&cache, &KernelChoice::V6_12, "guest", wanted)?;
        let userland = userland::provide(&cache)?;
        let additions = userland::Additions {
            folders: &["lib/modules"],
            scripts: &[],
            modules: &modules,
        };
        Ok(Self {
            qemu: Qemu::provide(&cache)?,
            kernel,
            initramfs: additions.to(&cache, "guest-userland", &userland)?,
        })
    }

    /// The same with another kernel.
    ///
    /// # Errors
    /// The kernel can't be fetched or verified.
    pub fn with_kernel(&self, kernel: &KernelChoice) -> Result<Self, ProvisionError> {
        if lab::is_inside() {
            return lab::nested(kernel);
        }
        let cache = Cache::open()?;
        Ok(Self {
            kernel: Kernel::provide(&cache, kernel)?,
            ..self.clone()
        })
    }
}

fn at(path: &Path) -> impl FnOnce(io::Error) -> ProvisionError {
    let path = path.to_owned();
    |source| ProvisionError::File { path, source }
}
