//! Surroundings of a program that runs inside the lab.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use thiserror::Error;

use crate::process::{self, ProcessError};
use crate::provision::lab as place;

/// Longest time in which the kernel shows a namespace.
const PATIENCE: Duration = Duration::from_secs(180);

/// Errors inside the lab.
#[derive(Debug, Error)]
pub enum InsideError {
    /// A file of the lab can't be used.
    #[error("Cannot use {path}: does this run inside the lab?")]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// No such drive.
    #[error("The lab has no drive '{id}'")]
    NoDrive {
        /// Its name.
        id: String,
    },
    /// A command of the lab failed.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// The drive's namespaces did not appear.
    #[error("Drive '{id}' shows no namespace {nsid}")]
    NoNamespace {
        /// The drive.
        id: String,
        /// The namespace.
        nsid: u32,
    },
}

pub use place::is_inside;

/// Returns a program or file that was brought along.
pub fn brought(name: &str) -> PathBuf {
    place::brought("bin").join(name)
}

/// Returns a drive's PCI address: `0000:01:00.0`.
///
/// # Errors
/// If there is no such drive.
pub fn address(id: &str) -> Result<String, InsideError> {
    let path = place::brought("drives");
    let list = fs::read_to_string(&path).map_err(at(&path))?;
    list.lines()
        .filter_map(|line| line.split_once(' '))
        .find(|(name, _)| *name == id)
        .map(|(_, address)| address.to_owned())
        .ok_or_else(|| InsideError::NoDrive { id: id.to_owned() })
}

/// Binds a drive to `driver`: `vfio-pci` or `nvme`.
///
/// # Errors
/// The driver does not take it.
pub fn bind(id: &str, driver: &str) -> Result<(), InsideError> {
    process::run(Command::new("lab-bind").args([driver, id]))?;
    Ok(())
}

/// Returns a namespace's block device, of a drive that the `nvme` driver has. The kernel may show it a moment later.
///
/// # Errors
/// If it does not appear.
pub fn block_device(id: &str, nsid: u32) -> Result<PathBuf, InsideError> {
    let controllers = Path::new("/sys/bus/pci/devices")
        .join(address(id)?)
        .join("nvme");
    let entries = |folder: &Path| fs::read_dir(folder).into_iter().flatten().flatten();
    // Their names are numbered in the order in which the kernel found them, not by identifier.
    let has_nsid = |namespace: &Path| {
        fs::read_to_string(namespace.join("nsid")).is_ok_and(|text| text.trim() == nsid.to_string())
    };
    let deadline = Instant::now() + PATIENCE;
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

/// Does something to a drive: a [`Request`](super::faults::Request) in its words, or `remove DRIVE`.
///
/// # Errors
/// If it can't be done.
pub fn control(request: &str) -> Result<String, InsideError> {
    let said = process::run(Command::new("lab-ctl").args(request.split_whitespace()))?;
    Ok(said.trim_end().to_owned())
}

fn at(path: &Path) -> impl FnOnce(io::Error) -> InsideError {
    let path = path.to_owned();
    |source| InsideError::File { path, source }
}
