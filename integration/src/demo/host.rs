//! A physical drive and the host's own driver for it.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use super::DemoError;
use crate::process;

/// Longest time that the host's driver may take to show a drive's namespace.
const PATIENCE: Duration = Duration::from_secs(60);

/// The block device of the drive's first namespace, which the host's driver shows a moment after it has
/// got the drive.
pub(super) fn block_device(address: &str) -> Result<PathBuf, DemoError> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(device) = find(address) {
            return Ok(device);
        }
        if Instant::now() >= deadline {
            return Err(DemoError::NoBlockDevice {
                address: address.to_owned(),
            });
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn find(address: &str) -> Option<PathBuf> {
    let controllers = Path::new("/sys/bus/pci/devices").join(address).join("nvme");
    for controller in std::fs::read_dir(controllers).ok()?.flatten() {
        for namespace in std::fs::read_dir(controller.path()).ok()?.flatten() {
            let device = Path::new("/dev").join(namespace.file_name());
            let name = namespace.file_name().to_string_lossy().into_owned();
            // Beside it lie attributes, and "ng0n1", which is no block device.
            if name.starts_with("nvme") && device.exists() {
                return Some(device);
            }
        }
    }
    None
}

/// A drive that was taken from the host's driver, which gets it back.
#[derive(Debug)]
pub(super) struct Taken {
    binary: PathBuf,
    address: String,
    is_back: bool,
}

impl Taken {
    /// Takes the drive from the host's driver.
    pub(super) fn take(binary: &Path, address: &str) -> Result<Self, DemoError> {
        process::run(Command::new(binary).args(["bind", address]))?;
        Ok(Self {
            binary: binary.to_owned(),
            address: address.to_owned(),
            is_back: false,
        })
    }

    /// Gives the drive back, which no server holds any more.
    pub(super) fn give_back(mut self) -> Result<(), DemoError> {
        self.is_back = true;
        process::run(Command::new(&self.binary).args(["unbind", &self.address]))?;
        Ok(())
    }
}

impl Drop for Taken {
    /// After a failure, which is what is told.
    fn drop(&mut self) {
        if !self.is_back {
            let _ = process::run(Command::new(&self.binary).args(["unbind", &self.address]));
        }
    }
}
