//! Provides what the guests need: a QEMU with a vfio-user client, kernels, a user land.
//!
//! Everything comes from Debian's own signed packages, of the mirror that the machine uses already;
//! nothing on the machine is upgraded. What was made is kept in the [cache](cache::Cache).

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use crate::process::ProcessError;

pub mod apt;
pub mod cache;
mod cpio;
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
        /// What is missing.
        programs: String,
        /// The packages that bring it.
        packages: String,
    },
    /// A package does not hold what it used to.
    #[error("The packages of {suite} hold no {what}")]
    NotInPackages {
        /// The suite.
        suite: String,
        /// What was looked for.
        what: String,
    },
    /// A QEMU that doesn't do what is needed.
    #[error("{qemu} has no vfio-user-pci device (it needs to be version 10.1 or newer)")]
    QemuTooOld {
        /// The program.
        qemu: PathBuf,
    },
    /// A kernel that the lab can't use.
    #[error("The lab needs a kernel with its modules: 6.1 or 6.12, not an image")]
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
    /// If something can't be found, fetched or verified.
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

    /// The same with another kernel.
    ///
    /// # Errors
    /// If the kernel can't be fetched or verified.
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
