//! Functions for programs inside the lab.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use thiserror::Error;

use crate::process::{self, ProcessError};
use crate::provision::lab as place;

/// Timeout for the kernel to show a namespace.
const NAMESPACE_TIMEOUT: Duration = Duration::from_secs(180);

/// Errors inside the lab.
#[derive(Debug, Error)]
pub enum InsideError {
    /// A file of the lab cannot be used.
    #[error("Cannot use {path}: does this run inside the lab?")]
    File {
        /// The file.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// The drive does not exist.
    #[error("The lab has no drive '{id}'")]
    NoDrive {
        /// Name of the drive.
        id: String,
    },
    /// A command of the lab failed.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// The kernel did not show the namespace in time.
    #[error("Drive '{id}' shows no namespace {nsid}")]
    NoNamespace {
        /// The drive.
        id: String,
        /// The namespace.
        nsid: u32,
    },
}

pub use place::is_inside;

/// Returns the path of a program or file that was copied into the lab.
pub fn copied_path(name: &str) -> PathBuf {
    place::copied_path("bin").join(name)
}

/// Returns the PCI address of a drive, as in `0000:01:00.0`.
///
/// # Errors
/// The drive does not exist.
pub fn address(id: &str) -> Result<String, InsideError> {
    let path = place::copied_path("drives");
    let list = fs::read_to_string(&path).map_err(with_path(&path))?;
    list.lines()
        .filter_map(|line| line.split_once(' '))
        .find(|(name, _)| *name == id)
        .map(|(_, address)| address.to_owned())
        .ok_or_else(|| InsideError::NoDrive { id: id.to_owned() })
}

/// Binds a drive to `driver`: `vfio-pci` or `nvme`.
///
/// # Errors
/// The driver does not accept the drive.
pub fn bind(id: &str, driver: &str) -> Result<(), InsideError> {
    process::run(Command::new("lab-bind").args([driver, id]))?;
    Ok(())
}

/// Returns the block device of a namespace, for a drive of the `nvme` driver. Waits until the kernel shows the device.
///
/// # Errors
/// The device does not appear.
pub fn block_device(id: &str, nsid: u32) -> Result<PathBuf, InsideError> {
    let controllers = Path::new("/sys/bus/pci/devices")
        .join(address(id)?)
        .join("nvme");
    let entries = |dir: &Path| fs::read_dir(dir).into_iter().flatten().flatten();
    // The kernel numbers namespaces in the order of their discovery, not by their identifiers.
    let has_nsid = |namespace: &Path| {
        fs::read_to_string(namespace.join("nsid")).is_ok_and(|text| text.trim() == nsid.to_string())
    };
    let deadline = Instant::now() + NAMESPACE_TIMEOUT;
    loop {
        let found = entries(&controllers)
            .flat_map(|controller| entries(&controller.path()))
            .filter(|namespace| has_nsid(&namespace.path()))
            .map(|namespace| Path::new("/dev").join(namespace.file_name()))
            .find(|device| device.exists());
        if let Some(device) = found {
            return Ok(device);
        }
        if Instant::now() >= deadline {
            return Err(InsideError::NoNamespace {
                id: id.to_owned(),
                nsid,
            });
        }
        thread::sleep(Duration::from_millis(20));
    }
}

/// Injects a fault into a drive: a [`LabFaultRequest`](super::faults::LabFaultRequest) as text, or `remove DRIVE`.
///
/// # Errors
/// The request fails.
pub fn control(request: &str) -> Result<String, InsideError> {
    let output = process::run(Command::new("lab-ctl").args(request.split_whitespace()))?;
    Ok(output.trim_end().to_owned())
}

fn with_path(path: &Path) -> impl FnOnce(io::Error) -> InsideError {
    let path = path.to_owned();
    |source| InsideError::File { path, source }
}
