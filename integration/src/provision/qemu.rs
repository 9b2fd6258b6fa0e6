//! A QEMU that speaks vfio-user: the system's where it is new enough, else one unpacked from a newer
//! Debian suite beside it.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::ProvisionError;
use super::apt::{self, Suites};
use super::cache::Cache;
use super::host;
use crate::process;

const PROGRAM: &str = "qemu-system-x86_64";
const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";
/// Debian 13's backports carry QEMU 11, linked with Debian 13's libraries.
pub(super) const SUITES: Suites = Suites {
    known: &["trixie", "trixie-backports"],
    preferred: "trixie-backports",
};
pub(super) const PACKAGES: &[&str] = &["qemu-system-x86", "ovmf"];

/// A QEMU that can be run.
#[derive(Debug, Clone)]
pub struct Qemu {
    /// `None`: the system's.
    private_root: Option<PathBuf>,
}

impl Qemu {
    pub(super) fn provide(cache: &Cache) -> Result<Self, ProvisionError> {
        let system = Self { private_root: None };
        if host::on_path(PROGRAM) && system.speaks_vfio_user() {
            return Ok(system);
        }
        Ok(Self::unpacked_in(Self::unpacked(cache)?))
    }

    /// Returns the folder with an unpacked one.
    pub(super) fn unpacked(cache: &Cache) -> Result<PathBuf, ProvisionError> {
        let recipe = format!("{PACKAGES:?} of {SUITES:?}, as a bundle");
        cache.entry("qemu", &recipe, |root| {
            apt::unpack(SUITES, PACKAGES, root)?;
            let bundle = root.join(LIBRARIES).join("qemu-bundle");
            symlink("../../..", &bundle).map_err(|source| ProvisionError::File {
                path: bundle,
                source,
            })?;
            let unpacked = Self::unpacked_in(root.to_owned());
            if unpacked.speaks_vfio_user() {
                Ok(())
            } else {
                Err(ProvisionError::QemuTooOld {
                    qemu: root.join("usr/bin").join(PROGRAM),
                })
            }
        })
    }

    /// Returns the one that was unpacked into `root`.
    pub(super) fn unpacked_in(root: PathBuf) -> Self {
        Self {
            private_root: Some(root),
        }
    }

    /// Returns a command that runs it.
    ///
    /// The unpacked one is started by its own loader with its own libraries, the machine's being older.
    /// Its modules are the trap: it would load those of another QEMU on the system, even if it has none
    /// of that name itself, and abort because they don't fit. A folder `qemu-bundle` beside the program
    /// that runs, which is the loader, makes it take all such paths from in there.
    pub fn command(&self) -> Command {
        let Some(root) = &self.private_root else {
            return Command::new(PROGRAM);
        };
        let libraries = root.join(LIBRARIES);
        let mut command = Command::new(libraries.join("ld-linux-x86-64.so.2"));
        command
            .arg("--library-path")
            .arg(&libraries)
            .arg(root.join("usr/bin").join(PROGRAM));
        for data in ["usr/share/qemu", "usr/share/seabios", "usr/lib/ipxe/qemu"] {
            command.arg("-L").arg(root.join(data));
        }
        command
    }

    /// Returns the UEFI firmware image that belongs to it, if there is one.
    pub fn uefi_firmware(&self) -> Option<PathBuf> {
        let root = self.private_root.as_deref().unwrap_or(Path::new("/"));
        let image = root.join("usr/share/ovmf/OVMF.fd");
        image.is_file().then_some(image)
    }

    /// Returns its version, as it reports it.
    ///
    /// # Errors
    /// If it can't be run.
    pub fn version(&self) -> Result<String, ProvisionError> {
        let text = process::run(self.command().arg("--version"))?;
        Ok(text.lines().next().unwrap_or_default().to_owned())
    }

    fn speaks_vfio_user(&self) -> bool {
        process::run(self.command().args(["-device", "help"]))
            .is_ok_and(|devices| devices.contains("\"vfio-user-pci\""))
    }
}
