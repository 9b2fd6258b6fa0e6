//! The host's NVMe driver for a physical drive, with which the demonstration reads and writes the drive.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use super::DemoError;
use crate::process;
use crate::progress::ProgressStep;

/// Timeout for the host's driver to show a namespace.
const NAMESPACE_TIMEOUT: Duration = Duration::from_secs(60);

/// Returns the block device of the drive's first namespace. The host's driver shows it some time after binding, so this
/// waits.
pub(super) fn block_device(address: &str) -> Result<PathBuf, DemoError> {
    if let Some(device) = find(address) {
        return Ok(device);
    }
    let step = ProgressStep::start(format!("Waiting for the block device of {address}"));
    let deadline = Instant::now() + NAMESPACE_TIMEOUT;
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

/// Directory of the host's PCI functions.
const FUNCTIONS: &str = "/sys/bus/pci/devices";

/// Checks that a PCI function exists and the nvme driver is bound to it.
pub(super) fn check_function(address: &str) -> Result<(), DemoError> {
    check_function_in(Path::new(FUNCTIONS), address)
}

fn check_function_in(functions: &Path, address: &str) -> Result<(), DemoError> {
    let address = address.to_owned();
    let dir = functions.join(&address);
    if !dir.exists() {
        return Err(DemoError::NoFunction { address });
    }
    let driver = std::fs::read_link(dir.join("driver")).unwrap_or_default();
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
            // The directory also contains attributes and "ng0n1", a character device.
            if name.starts_with("nvme") && device.exists() {
                return Some(device);
            }
        }
    }
    None
}

/// A drive that was unbound from the host's driver. Dropping this binds the drive again.
#[derive(Debug)]
pub(super) struct UnboundDrive {
    binary: PathBuf,
    address: String,
    is_bound: bool,
}

impl UnboundDrive {
    /// Unbinds the drive from the host's driver.
    pub(super) fn take(binary: &Path, address: &str) -> Result<Self, DemoError> {
        process::run(Command::new(binary).args(["bind", address]))?;
        Ok(Self {
            binary: binary.to_owned(),
            address: address.to_owned(),
            is_bound: false,
        })
    }

    /// Binds the drive to the host's driver again. No server may use the drive at this time.
    pub(super) fn bind_again(mut self) -> Result<(), DemoError> {
        self.is_bound = true;
        process::run(Command::new(&self.binary).args(["unbind", &self.address]))?;
        Ok(())
    }
}

impl Drop for UnboundDrive {
    /// Binds the drive again after a failure. Errors are ignored, so that the failure is reported.
    fn drop(&mut self) {
        if !self.is_bound {
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
    fn an_absent_or_foreign_function_is_reported_at_once() {
        let functions = tempfile::tempdir().expect("folder");
        for (address, driver) in [("0000:01:00.0", "nvme"), ("0000:02:00.0", "vfio-pci")] {
            let dir = functions.path().join(address);
            fs::create_dir(&dir).expect("folder");
            symlink(format!("../../drivers/{driver}"), dir.join("driver")).expect("link");
        }
        let check = |address| check_function_in(functions.path(), address);
        check("0000:01:00.0").expect("a drive that the host drives");
        let error = check("0000:02:00.0").expect_err("another driver has it");
        assert!(matches!(error, DemoError::NoBlockDevice { .. }), "{error}");
        let error = check("0000:03:00.0").expect_err("it is absent");
        assert!(matches!(error, DemoError::NoFunction { .. }), "{error}");
    }
}
