//! A physical drive and the host's own driver for it.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use super::DemoError;
use crate::process;
use crate::progress::Step;

/// Longest time that the host's driver may take to show a drive's namespace.
const PATIENCE: Duration = Duration::from_secs(60);

/// Returns the block device of the drive's first namespace, which the host's driver shows a moment after it has
/// got the drive.
pub(super) fn block_device(address: &str) -> Result<PathBuf, DemoError> {
    if let Some(device) = find(address) {
        return Ok(device);
    }
    let step = Step::start(format!("Waiting for the block device of {address}"));
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(device) = find(address) {
            step.done(device.display().to_string());
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

/// Folder with the PCI functions of this host.
const FUNCTIONS: &str = "/sys/bus/pci/devices";

/// Checks that the host's nvme driver has a function.
pub(super) fn check_function(address: &str) -> Result<(), DemoError> {
    check_function_in(Path::new(FUNCTIONS), address)
}

fn check_function_in(functions: &Path, address: &str) -> Result<(), DemoError> {
    let address = address.to_owned();
    let folder = functions.join(&address);
    if !folder.exists() {
        return Err(DemoError::NoFunction { address });
    }
    let driver = std::fs::read_link(folder.join("driver")).unwrap_or_default();
    match driver.file_name() {
        Some(name) if name == "nvme" => Ok(()),
        _ => Err(DemoError::NoBlockDevice { address }),
    }
}

fn find(address: &str) -> Option<PathBuf> {
    let controllers = Path::new(FUNCTIONS).join(address).join("nvme");
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

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_function_that_is_absent_or_that_the_host_does_not_drive_is_told_at_once() {
        let functions = tempfile::tempdir().expect("folder");
        for (address, driver) in [("0000:01:00.0", "nvme"), ("0000:02:00.0", "vfio-pci")] {
            let folder = functions.path().join(address);
            fs::create_dir(&folder).expect("folder");
            symlink(format!("../../drivers/{driver}"), folder.join("driver")).expect("link");
        }
        let check = |address| check_function_in(functions.path(), address);
        check("0000:01:00.0").expect("a drive that the host drives");
        let error = check("0000:02:00.0").expect_err("another driver has it");
        assert!(matches!(error, DemoError::NoBlockDevice { .. }), "{error}");
        let error = check("0000:03:00.0").expect_err("it is absent");
        assert!(matches!(error, DemoError::NoFunction { .. }), "{error}");
    }
}
