//! A QEMU with vfio-user. If the system's QEMU is too old, one from a newer Debian suite is unpacked.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::ProvisionError;
use super::apt::{self, DebianSuites};
use super::cache::ProvisionCache;
use super::host;
use crate::process;

const PROGRAM: &str = "qemu-system-x86_64";
const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";
/// Suites with a QEMU that is new enough: Debian 13's backports have QEMU 11, linked with Debian 13's libraries.
pub(super) const SUITES: DebianSuites = DebianSuites {
    known: &["trixie", "trixie-backports"],
    preferred: "trixie-backports",
};
pub(super) const PACKAGES: &[&str] = &["qemu-system-x86", "ovmf"];

/// A runnable QEMU.
#[derive(Debug, Clone)]
pub struct Qemu {
    /// Root directory of the unpacked QEMU; `None` for the system's QEMU.
    private_root: Option<PathBuf>,
}

impl Qemu {
    pub(super) fn provide(cache: &ProvisionCache) -> Result<Self, ProvisionError> {
        let system = Self { private_root: None };
        if host::on_path(PROGRAM) && system.speaks_vfio_user() {
            return Ok(system);
        }
        Ok(Self::from_unpacked(Self::unpacked(cache)?))
    }

    /// Returns the directory of the unpacked QEMU.
    pub(super) fn unpacked(cache: &ProvisionCache) -> Result<PathBuf, ProvisionError> {
        let recipe = format!("{PACKAGES:?} of {SUITES:?}, as a bundle");
        cache.entry("qemu", &recipe, |root| {
            apt::unpack(SUITES, PACKAGES, root)?;
            let bundle = root.join(LIBRARIES).join("qemu-bundle");
            symlink("../../..", &bundle).map_err(|source| ProvisionError::File {
                path: bundle,
                source,
            })?;
            let unpacked = Self::from_unpacked(root.to_owned());
            if unpacked.speaks_vfio_user() {
                Ok(())
            } else {
                Err(ProvisionError::QemuTooOld {
                    qemu: root.join("usr/bin").join(PROGRAM),
                })
            }
        })
    }

    /// Creates a handle of the QEMU that is unpacked in `root`.
    pub(super) fn from_unpacked(root: PathBuf) -> Self {
        Self {
            private_root: Some(root),
        }
    }

    /// Returns a command that runs QEMU.
    ///
    /// The unpacked QEMU is started by its own loader with its own libraries, since the machine's are older. By default,
    /// QEMU would load the modules of the system's QEMU, which do not fit, and abort. If there is a directory `qemu-bundle`
    /// next to the running program, which is the loader here, QEMU looks up all such paths in this directory.
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

    /// Returns the path of the UEFI firmware from QEMU's packages; `None` if it is missing.
    pub fn uefi_firmware(&self) -> Option<PathBuf> {
        let root = self.private_root.as_deref().unwrap_or(Path::new("/"));
        let image = root.join("usr/share/ovmf/OVMF.fd");
        image.is_file().then_some(image)
    }

    /// Returns the version that QEMU reports.
    ///
    /// # Errors
    /// QEMU cannot be run.
    pub fn version(&self) -> Result<String, ProvisionError> {
        let text = process::run(self.command().arg("--version"))?;
        Ok(text.lines().next().unwrap_or_default().to_owned())
    }

    fn speaks_vfio_user(&self) -> bool {
        process::run(self.command().args(["-device", "help"]))
            .is_ok_and(|devices| devices.contains("\"vfio-user-pci\""))
    }
}
