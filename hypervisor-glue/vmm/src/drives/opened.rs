//! The drives that this process has open: each host controller once, however many functions share it.
//!
//! A block device and a VFIO group can be opened once only, and a file of keys and values is locked as a whole. So the
//! second function in a VMM's process finds the drive that the first one opened.
//!
//! `memory:` and `null:` drives are not among them: each call opens one of its own, and `serve` shares those by itself.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use nvme_mpt::drive::HostController;
use nvme_vfio::function::PciAddress;

use super::{DriveOptions, DrivePath, OpenDriveError};

/// A drive that is open, whatever path led to it. It is not the drive's identity, by which two devices could
/// have one serial number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OpenDriveKey {
    Function(PciAddress),
    /// A device's number.
    Device(u64),
    /// A file's device and inode.
    File(u64, u64),
}

impl OpenDriveKey {
    /// `None` for drives that each function has to itself, and for paths that lead to nothing.
    fn of(path: &DrivePath) -> Option<Self> {
        match path {
            DrivePath::Pci(address) => Some(Self::Function(*address)),
            DrivePath::File(path) => {
                let metadata = fs::metadata(path).ok()?;
                Some(match metadata.file_type().is_block_device() {
                    true => Self::Device(metadata.rdev()),
                    false => Self::File(metadata.dev(), metadata.ino()),
                })
            }
            _ => None,
        }
    }
}

#[derive(Debug)]
struct OpenedController {
    place: OpenDriveKey,
    options: DriveOptions,
    controller: Weak<dyn HostController>,
}

/// Held while a drive is opened, so that two functions that come at once open it once.
static OPENED: Mutex<Vec<OpenedController>> = Mutex::new(Vec::new());

fn opened() -> MutexGuard<'static, Vec<OpenedController>> {
    // Each change is complete before anything can panic.
    let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    opened.retain(|drive| drive.controller.strong_count() > 0);
    opened
}

/// Returns the options of a drive that this process has open.
pub(super) fn options(path: &DrivePath) -> Option<DriveOptions> {
    let place = OpenDriveKey::of(path)?;
    let opened = opened();
    let drive = opened.iter().find(|drive| drive.place == place)?;
    Some(drive.options.clone())
}

/// Returns the host controller of a path: the one that is open, or what `open` opens.
pub(super) fn find_or_open(
    path: &DrivePath,
    options: &DriveOptions,
    open: impl FnOnce() -> Result<Arc<dyn HostController>, OpenDriveError>,
) -> Result<Arc<dyn HostController>, OpenDriveError> {
    let Some(place) = OpenDriveKey::of(path) else {
        return open();
    };
    let mut opened = opened();
    let found = opened.iter().find(|drive| drive.place == place);
    if let Some(found) = found
        && let Some(controller) = found.controller.upgrade()
    {
        return match options.difference(path, &found.options) {
            None => Ok(controller),
            Some(key) => Err(OpenDriveError::OpenedOtherwise {
                path: path.to_string(),
                key,
            }),
        };
    }
    let controller = open()?;
    if let Some((label, true)) = controller.label() {
        let mut others = opened.iter().filter_map(|drive| drive.controller.upgrade());
        if others.any(|other| other.label() == Some((label, true))) {
            return Err(OpenDriveError::OpenedTwice {
                path: path.to_string(),
                name: label.name.clone(),
            });
        }
    }
    opened.push(OpenedController {
        place,
        options: options.clone(),
        controller: Arc::downgrade(&controller),
    });
    Ok(controller)
}
