//! Identity of a drive's bytes, whatever path leads to them, and other users of the bytes.
//!
//! A file, a loop device of that file and a partition of that loop device are three paths to the same bytes. Leases, locks
//! and the names that guests see must be the same for all three. So a path is resolved to *extents*: parts of *bases*,
//! which have stable names. A base is a disk, an NVMe namespace or a file. A disk is named by its world-wide identifier or
//! serial number, a namespace by its drive's name, and a file by its file system and inode. A disk with neither identifier
//! has a name that is only valid until the next boot (`backing_extent::boot_id_of`). A file on such a disk is named by the
//! UUID of its file system. No guest can change this UUID, because it is stored outside of all files.
//!
//! A device-mapper device is resolved by its table: `linear` targets are the bytes of the devices below. Other targets, such as
//! `crypt` or `striped`, and RAID devices are bases. Such a base counts as overlapping all devices below it. Thin volumes of
//! the same pool do not overlap each other.
//!
//! * `stacked_file_system`: file systems that show files of other file systems.
//! * `kernel_files`: the kernel's view of block devices and file systems, below a directory that tests replace.
//! * [`nvme_names`]: names of NVMe drives.
//! * `drive_identity`: all names of a drive.
//! * `backing_extent`: extents, and their text form, the identity of a drive.

mod backing_device;
pub(crate) mod backing_extent;
mod drive_identity;
mod kernel_files;
pub mod nvme_names;
mod stacked_file_system;
#[cfg(test)]
mod tests;

use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use backing_device::BackingDevice;
pub(crate) use backing_extent::BackingExtent;
pub use drive_identity::{DriveFacts, DriveIdentity, DriveIdentityRef};
pub(crate) use kernel_files::KernelFiles;
use kernel_files::{DeviceNaming, DeviceNumber, MountedFileSystem};

use nvme_mpt_memory::file_system;

/// Storage location of the bytes behind a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackingId {
    /// Extents that store the drive's bytes, in the order of the drive.
    extents: Vec<BackingExtent>,
    /// Files that store the drive's bytes, behind loop devices or overlay.
    files: Vec<BackingFile>,
    identity: DriveIdentity,
}

/// File that stores bytes of a drive: the backing file of a loop device, or the file that overlay shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackingFile {
    /// Path of the file.
    pub path: PathBuf,
    /// Device and inode number of the file.
    file_id: (u64, u64),
    /// First byte of the file that the drive uses.
    pub offset: u64,
    /// Offset on the drive of the byte that the file stores at [`Self::offset`].
    drive_offset: u64,
    /// Number of bytes of the drive that the file stores.
    length: u64,
    /// True if the file is accessed with direct I/O.
    pub is_direct: bool,
}

impl BackingFile {
    /// Returns the part of the file that stores a range of the drive, as first byte and length in the file; `None` if the
    /// file stores no byte of the range.
    #[must_use]
    pub fn file_part(&self, start: u64, length: u64) -> Option<(u64, u64)> {
        let first = start.max(self.drive_offset);
        let end = start.saturating_add(length);
        let length = end
            .min(self.drive_offset.saturating_add(self.length))
            .checked_sub(first)?;
        (length > 0).then(|| (self.offset + (first - self.drive_offset), length))
    }

    /// Returns whether the open `file` is this file, and not another file that was opened at the same path.
    pub fn is_same_file(&self, file: &fs::File) -> io::Result<bool> {
        let metadata = file.metadata()?;
        Ok((metadata.dev(), metadata.ino()) == self.file_id)
    }
}

impl BackingId {
    /// Resolves a path without symbolic links.
    ///
    /// # Errors
    /// Returns the kernel's error about the path, or `Unsupported` for a file that has another name as well, and so could
    /// be leased twice. A device that lacks attributes is no error: the drive's name is then only valid until the next
    /// boot.
    pub fn from_path(path: &Path) -> io::Result<Self> {
        Self::from_path_in(&KernelFiles::host(), path)
    }

    fn from_path_in(system: &KernelFiles, path: &Path) -> io::Result<Self> {
        let metadata = fs::metadata(path)?;
        let resolve = |system: &KernelFiles| match metadata.file_type().is_block_device() {
            true => BackingDevice::resolve(system, DeviceNumber(metadata.rdev())),
            false => BackingDevice::from_file(system, path, &metadata),
        };
        let BackingDevice {
            extents,
            files,
            refusal,
        } = resolve(system);
        if let Some(refusal) = refusal {
            return Err(io::Error::new(io::ErrorKind::Unsupported, refusal));
        }
        let name = backing_extent::format_identity(&extents);
        let by =
            |naming| backing_extent::format_identity(&resolve(&system.with_naming(naming)).extents);
        let mut others = Vec::new();
        for naming in DeviceNaming::ALTERNATIVES {
            let other = by(naming);
            if other != name && !others.contains(&other) {
                others.push(other);
            }
        }
        Ok(Self {
            identity: DriveIdentity {
                name,
                former_names: Vec::new(),
                possible_names: others,
                facts: None,
            },
            extents,
            files,
        })
    }

    /// Returns the names of the bytes.
    pub fn identity(&self) -> &DriveIdentity {
        &self.identity
    }

    /// Returns the files that store the drive's bytes, behind loop devices or overlay.
    pub fn files(&self) -> &[BackingFile] {
        &self.files
    }

    /// Returns a description of a mounted file system or swap area that uses the bytes; `None` if there is none.
    pub fn find_user(&self) -> Option<String> {
        self.find_user_in(&KernelFiles::host())
    }

    fn find_user_in(&self, system: &KernelFiles) -> Option<String> {
        let is_ours = |device: &BackingDevice| {
            let mut all = device.extents.iter();
            all.any(|extent| self.extents.iter().any(|ours| ours.overlaps(extent)))
        };
        let mount = |mount: &MountedFileSystem| {
            let device = BackingDevice::resolve(system, mount.block_device()?);
            is_ours(&device).then(|| format!("the file system on {}", mount.point.display()))
        };
        let swap = |path: &PathBuf| {
            let metadata = fs::metadata(path).ok()?;
            let device = match metadata.file_type().is_block_device() {
                true => BackingDevice::resolve(system, DeviceNumber(metadata.rdev())),
                false => BackingDevice::from_file(system, path, &metadata),
            };
            is_ours(&device).then(|| format!("swap ({})", path.display()))
        };
        let mounts = system.mounts();
        let swaps = system.swaps();
        mounts
            .iter()
            .find_map(mount)
            .or_else(|| swaps.iter().find_map(swap))
    }
}

/// Boot id and disks of the host, for telling drives whose names have changed from drives that are absent.
#[derive(Clone, Debug)]
pub(crate) struct HostDisks {
    /// Identifier of this boot.
    pub(crate) boot_id: String,
    /// All names of all disks of the host.
    disks: Vec<String>,
}

impl HostDisks {
    /// Reads the boot id and the disks of this host.
    pub(crate) fn query() -> Self {
        Self::from_system(&KernelFiles::host())
    }

    fn from_system(system: &KernelFiles) -> Self {
        let disks = system.block_devices().into_iter();
        Self {
            boot_id: system.boot_id(),
            disks: disks
                .flat_map(|disk| backing_device::device_names(system, disk))
                .collect(),
        }
    }

    /// Returns whether this process sees the disk of a base, or, for a file, the disk of its file system.
    pub(crate) fn has_disk(&self, base: &str) -> bool {
        let is_of = |disk: &String| {
            let mut places = base.match_indices(disk.as_str());
            places.any(|(at, _)| {
                let (before, after) = (&base[..at], &base[at + disk.len()..]);
                (before.is_empty() || before.ends_with(['@', '_', ':']))
                    && (after.is_empty() || after.starts_with([':', '_']))
            })
        };
        self.disks.iter().any(is_of)
    }
}

/// Returns the identifier of this boot of the host.
#[cfg(test)]
pub(crate) fn boot_id() -> String {
    KernelFiles::host().boot_id()
}

/// Returns a name for the location of a drive's first byte: the base and the offset in the drive's
/// [identity](DriveIdentity::name). If the drive grows, or a device below it changes (such as a member of a RAID), the drive's
/// identity changes, but this name does not.
#[must_use]
pub fn start_location(identity: &str) -> String {
    backing_extent::start_location(identity)
}

/// Returns the names of devices that prevent a block device from being opened exclusively; `None` if the kernel reports
/// none.
pub fn device_holders(path: &Path) -> Option<String> {
    let device = DeviceNumber(fs::metadata(path).ok()?.rdev());
    let holders = KernelFiles::host().holders(device);
    (!holders.is_empty()).then(|| format!("the device {}", holders.join(", ")))
}

/// Returns the extent of a whole file, with a name from the inode and the file system.
fn file_extent(system: &KernelFiles, path: &Path, metadata: &Metadata) -> BackingExtent {
    let device = DeviceNumber(metadata.dev());
    let file_system = if system.is_device_mapper(device) {
        // Few processes can read the device's table, but all processes must find the same name for a file. So the table is not
        // resolved.
        backing_device::device_name(system, device)
    } else if system.is_block_device(device) {
        backing_extent::format_identity(&BackingDevice::resolve(system, device).extents)
    } else {
        file_system_name(system, path, device)
    };
    let is_labelled = match system.naming {
        DeviceNaming::ByBoot => false,
        DeviceNaming::ByFileSystem => true,
        DeviceNaming::Current | DeviceNaming::Nth(_) | DeviceNaming::BySerial => {
            backing_extent::boot_id_of(&file_system).is_some()
        }
    };
    let file_system = match is_labelled {
        // The UUID of a file system is stored outside of all files, so no lease can overwrite it.
        true => {
            let label = file_system::uuid_name(path);
            label.map_or(file_system, |label| {
                format!("{}{label}", backing_extent::FS_UUID_PREFIX)
            })
        }
        false => file_system,
    };
    BackingExtent {
        base: backing_extent::base_name("file", &format!("{}@{file_system}", metadata.ino())),
        start: 0,
        length: metadata.len(),
        below: Vec::new(),
    }
}

/// Returns a name for a file system that has no block device.
fn file_system_name(system: &KernelFiles, path: &Path, device: DeviceNumber) -> String {
    let mounts = system.mounts();
    match MountedFileSystem::find_for_path(&mounts, path) {
        // A file system in memory ends with this boot, and so does its name.
        None => format!("{}/{device}", system.boot_id()),
        Some(mount) if matches!(mount.kind.as_str(), "tmpfs" | "ramfs" | "devtmpfs") => {
            format!("{}/{device}", system.boot_id())
        }
        Some(mount) => {
            let source = match mount.block_device() {
                Some(device) => {
                    backing_extent::format_identity(&BackingDevice::resolve(system, device).extents)
                }
                None => mount.source_root(),
            };
            format!(
                "{}:{source}:{}",
                mount.kind,
                mount.inode_scope(path).display()
            )
        }
    }
}
