//! Identity of a drive's bytes, whatever path leads to them, and other users of the bytes.
//!
//! A file, a loop device of that file and a partition of that loop device are three paths to the same bytes. Leases, locks and
//! the names that guests see must be the same for all these paths. So a path is resolved to *extents*: parts of *bases*, which
//! have stable names. A base is a disk, an NVMe namespace or a file. A disk is named by its world-wide identifier or serial
//! number, a namespace by its drive's name, and a file by its file system and inode. A disk with neither identifier has a name
//! that is only valid until the next boot (`extent::boot_of`). A file on such a disk is named by the UUID of its file system:
//! no guest can change this UUID, because it is stored outside of all files.
//!
//! A device-mapper device is resolved by its table: `linear` targets are the bytes of the devices below. Other targets, such as
//! `crypt` or `striped`, and RAID devices are bases. Such a base counts as overlapping all devices below it. Thin volumes of
//! the same pool do not overlap each other.
//!
//! * `stacked`: file systems that show files of other file systems.
//! * `system`: the kernel's view of block devices and file systems, below a directory that tests replace.
//! * [`nvme`]: names of NVMe drives.
//! * `identity`: all names of a drive.
//! * `extent`: extents, and their text form, the identity of a drive.

mod device;
pub(crate) mod extent;
mod identity;
pub mod nvme;
mod stacked;
mod system;
#[cfg(test)]
mod tests;

use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use device::BackingDevice;
pub(crate) use extent::BackingExtent;
pub use identity::{DriveFacts, DriveIdentity, DriveIdentityRef};
pub(crate) use system::KernelFiles;
use system::{DeviceNaming, DeviceNumber, MountedFileSystem};

use nvme_mpt_memory::file_system;

/// Storage location of the bytes behind a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackingId {
    /// Extents, in the order of the drive's bytes.
    extents: Vec<BackingExtent>,
    /// Files below the path, behind loop devices or overlay.
    files: Vec<BackingFile>,
    identity: DriveIdentity,
}

/// Backing file of a loop device, or the file that overlay shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackingFile {
    /// Path of the file.
    pub path: PathBuf,
    /// Device and inode number.
    place: (u64, u64),
    /// First byte of the file that is used.
    pub offset: u64,
    /// Offset of this byte on the drive.
    at: u64,
    /// Number of the drive's bytes that are stored in the file.
    length: u64,
    /// True if the file is accessed with direct I/O.
    pub is_direct: bool,
}

impl BackingFile {
    /// Returns the part of a range of the drive that this file stores, as first byte and length in the file. `None` if the file
    /// stores no byte of the range.
    #[must_use]
    pub fn part(&self, start: u64, length: u64) -> Option<(u64, u64)> {
        let first = start.max(self.at);
        let end = start.saturating_add(length);
        let length = end
            .min(self.at.saturating_add(self.length))
            .checked_sub(first)?;
        (length > 0).then(|| (self.offset + (first - self.at), length))
    }

    /// Returns whether the open `file` is this file, and not another file that was opened at the same path.
    pub fn is(&self, file: &fs::File) -> io::Result<bool> {
        let metadata = file.metadata()?;
        Ok((metadata.dev(), metadata.ino()) == self.place)
    }
}

impl BackingId {
    /// Resolves a path without symbolic links.
    ///
    /// # Errors
    /// Returns the kernel's error about the path. Returns `Unsupported` for a file that could be leased twice, because it also
    /// has another name. Unknown facts about a device are no error: the drive's name is then only valid until the next boot.
    pub fn of(path: &Path) -> io::Result<Self> {
        Self::of_path(&KernelFiles::real(), path)
    }

    fn of_path(system: &KernelFiles, path: &Path) -> io::Result<Self> {
        let metadata = fs::metadata(path)?;
        let resolve = |system: &KernelFiles| match metadata.file_type().is_block_device() {
            true => BackingDevice::resolve(system, DeviceNumber(metadata.rdev())),
            false => BackingDevice::of_file(system, path, &metadata),
        };
        let BackingDevice {
            extents,
            files,
            refusal,
        } = resolve(system);
        if let Some(refusal) = refusal {
            return Err(io::Error::new(io::ErrorKind::Unsupported, refusal));
        }
        let name = extent::join(&extents);
        let by = |naming| extent::join(&resolve(&system.by(naming)).extents);
        let formerly: Vec<String> = Some(by(DeviceNaming::Former))
            .filter(|former| *former != name)
            .into_iter()
            .collect();
        let mut others = Vec::new();
        for naming in DeviceNaming::OTHERS {
            let other = by(naming);
            if other != name && !formerly.contains(&other) && !others.contains(&other) {
                others.push(other);
            }
        }
        Ok(Self {
            identity: DriveIdentity {
                name,
                formerly,
                others,
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

    /// Returns the files below loop devices or overlay.
    pub fn files(&self) -> &[BackingFile] {
        &self.files
    }

    /// If a mounted file system or a swap area uses the bytes, describes it.
    pub fn user(&self) -> Option<String> {
        self.user_in(&KernelFiles::real())
    }

    fn user_in(&self, system: &KernelFiles) -> Option<String> {
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
                false => BackingDevice::of_file(system, path, &metadata),
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

/// Boot id and disks of the host.
#[derive(Clone, Debug)]
pub(crate) struct HostDisks {
    /// Identifier of this boot.
    pub(crate) boot: String,
    /// All names of all disks.
    disks: Vec<String>,
}

impl HostDisks {
    /// Queries this host.
    pub(crate) fn now() -> Self {
        Self::of(&KernelFiles::real())
    }

    fn of(system: &KernelFiles) -> Self {
        let disks = system.block_devices().into_iter();
        Self {
            boot: system.boot(),
            disks: disks.flat_map(|disk| device::names(system, disk)).collect(),
        }
    }

    /// Returns whether the host has the disk of a base, or, for a file, the disk of its file system. Also returns `false` if
    /// this process cannot see the disk.
    pub(crate) fn has(&self, base: &str) -> bool {
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
pub(crate) fn boot() -> String {
    KernelFiles::real().boot()
}

/// Returns the location of a drive's first byte, by its [identity](DriveIdentity). Unlike the identity, the location does
/// not change when the drive grows or a device below it changes, such as a member of a RAID.
#[must_use]
pub fn beginning(identity: &str) -> String {
    extent::beginning(identity)
}

/// Names the devices that prevent a block device from being opened exclusively, if the kernel reports any.
pub fn holder(path: &Path) -> Option<String> {
    let device = DeviceNumber(fs::metadata(path).ok()?.rdev());
    let holders = KernelFiles::real().holders(device);
    (!holders.is_empty()).then(|| format!("the device {}", holders.join(", ")))
}

/// Returns the extent of a whole file, named by inode and file system.
fn file_extent(system: &KernelFiles, path: &Path, metadata: &Metadata) -> BackingExtent {
    let device = DeviceNumber(metadata.dev());
    let file_system = if system.is_mapped(device) {
        // Few processes can read the device's table, but a file must have the same name for all.
        device::name(system, device)
    } else if system.is_block_device(device) {
        extent::join(&BackingDevice::resolve(system, device).extents)
    } else {
        file_system(system, path, device)
    };
    let is_labelled = match system.naming {
        DeviceNaming::Former | DeviceNaming::ByBoot => false,
        DeviceNaming::ByFileSystem => true,
        DeviceNaming::Present | DeviceNaming::Nth(_) | DeviceNaming::Numbered => {
            extent::boot_of(&file_system).is_some()
        }
    };
    let file_system = match is_labelled {
        // The UUID of a file system is stored outside of all files, so no lease can overwrite it.
        true => {
            let label = file_system::uuid_name(path);
            label.map_or(file_system, |label| format!("{}{label}", extent::LABELLED))
        }
        false => file_system,
    };
    BackingExtent {
        base: extent::base("file", &format!("{}@{file_system}", metadata.ino())),
        start: 0,
        length: metadata.len(),
        below: Vec::new(),
    }
}

/// Returns a name of a file system without a block device.
fn file_system(system: &KernelFiles, path: &Path, device: DeviceNumber) -> String {
    let mounts = system.mounts();
    match MountedFileSystem::holding(&mounts, path) {
        // A file system in memory ends with this boot.
        None => format!("{}/{device}", system.boot()),
        Some(mount) if matches!(mount.kind.as_str(), "tmpfs" | "ramfs" | "devtmpfs") => {
            format!("{}/{device}", system.boot())
        }
        Some(mount) => {
            let source = match mount.block_device() {
                Some(device) => extent::join(&BackingDevice::resolve(system, device).extents),
                None => mount.whole_source(),
            };
            format!(
                "{}:{source}:{}",
                mount.kind,
                mount.numbered_in(path).display()
            )
        }
    }
}
