//! Registry of the drives that this process has open. Each host controller is opened once and shared by its functions.
//!
//! A block device or VFIO group can be opened only once, and a key-value file is locked as a whole. So the second function of a
//! VMM's process must share the drive that the first function opened.
//!
//! `memory:` and `null:` drives are not registered, since each open makes a new drive. `nvme-mpt serve` itself shares them
//! among its functions.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use nvme_mpt::drive::HostController;
use nvme_vfio::function::PciAddress;

use super::{DriveOptions, DrivePath, OpenDriveError};

/// Identity of an open drive, by which two paths to one drive are recognised. A serial number is no identity, since two devices
/// may report equal numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OpenDriveKey {
    Function(PciAddress),
    /// Device number.
    Device(u64),
    /// Device and inode number.
    File(u64, u64),
}

impl OpenDriveKey {
    /// Returns the identity of the drive at a path; `None` for `memory:` and `null:` drives, and for paths that do not exist.
    fn from_path(path: &DrivePath) -> Option<Self> {
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
    key: OpenDriveKey,
    options: DriveOptions,
    controller: Weak<dyn HostController>,
}

/// Drives that this process has open. The lock is held while a drive is opened, so that two functions that start concurrently
/// open their drive only once.
static OPENED: Mutex<Vec<OpenedController>> = Mutex::new(Vec::new());

fn lock_opened() -> MutexGuard<'static, Vec<OpenedController>> {
    // Poisoning is harmless: a panic cannot leave a partial change.
    let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    opened.retain(|drive| drive.controller.strong_count() > 0);
    opened
}

/// Returns whether this process has the drive at `path` open.
pub(super) fn is_open(path: &DrivePath) -> bool {
    OpenDriveKey::from_path(path)
        .is_some_and(|place| lock_opened().iter().any(|drive| drive.key == place))
}

/// Returns the host controller that is open for a path. If there is none, opens one by `open`.
pub(super) fn find_or_open(
    path: &DrivePath,
    options: &DriveOptions,
    open: impl FnOnce() -> Result<Arc<dyn HostController>, OpenDriveError>,
) -> Result<Arc<dyn HostController>, OpenDriveError> {
    let Some(place) = OpenDriveKey::from_path(path) else {
        return open();
    };
    let mut opened = lock_opened();
    let found = opened.iter().find(|drive| drive.key == place);
    if let Some(found) = found
        && let Some(controller) = found.controller.upgrade()
    {
        return match options.conflicting_option(path, &found.options) {
            None => Ok(controller),
            Some(key) => Err(OpenDriveError::OptionConflict {
                path: path.to_string(),
                key,
            }),
        };
    }
    let controller = open()?;
    if let Some((label, true)) = controller.label() {
        let mut others = opened.iter().filter_map(|drive| drive.controller.upgrade());
        if others.any(|other| other.label() == Some((label, true))) {
            return Err(OpenDriveError::DuplicateLabel {
                path: path.to_string(),
                name: label.name.clone(),
            });
        }
    }
    opened.push(OpenedController {
        key: place,
        options: options.clone(),
        controller: Arc::downgrade(&controller),
    });
    Ok(controller)
}
