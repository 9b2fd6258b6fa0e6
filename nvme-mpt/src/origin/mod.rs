//! Origins: where the bytes of a drive lie, whatever path leads to them, and what else uses them.
//!
//! A file, a loop device of that file and a partition of that loop device are three paths to the same bytes. Leases,
//! locks and the names that guests see follow the bytes. So a path is resolved to *extents*: parts of *bases*, which
//! have stable names. A base is a disk, an NVMe namespace or a file. A disk is named by its world-wide identifier or
//! serial number. A namespace is named by its drive's name, a file by its file system and inode. A disk that has neither has
//! a name until the next boot alone (`extent::boot_of`). A file on such a disk is named by the UUID of its file
//! system, which lies outside of all files.
//!
//! A device-mapper device is its table: `linear` targets are the bytes of the devices below. Other targets, such as
//! `crypt` or `striped`, and RAID devices are bases of their own. They overlap the whole of what they are made of, but
//! thin volumes of one pool do not overlap each other.
//!
//! * `stacked`: file systems that show files of others.
//! * `system`: the kernel's view of block devices and file systems, below a folder that tests replace.
//! * [`nvme`]: names of NVMe drives.
//! * `identity`: all names of a drive.
//! * `extent`: extents, and the identity that they are written as.

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

use device::Device;
pub(crate) use extent::Extent;
pub use identity::{DriveFacts, Identity, IdentityRef};
pub(crate) use system::System;
use system::{DeviceNumber, Mount, Naming};

use crate::memory;

/// Origin of the bytes behind a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin {
    /// The bytes, in order.
    extents: Vec<Extent>,
    /// The files among them that the path does not lead to by itself.
    files: Vec<BackingFile>,
    identity: Identity,
}

/// A file that a loop device makes a block device of, or one that overlay shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackingFile {
    /// Its path.
    pub path: PathBuf,
    /// Device and inode.
    place: (u64, u64),
    /// The first of its bytes that is used.
    pub offset: u64,
    /// The byte of the drive that this is.
    at: u64,
    /// Number of bytes of the drive that lie in it.
    length: u64,
    /// True if it is read and written past the page cache.
    pub is_direct: bool,
}

impl BackingFile {
    /// Returns where it has its part of a range of the drive: the first byte, and the length.
    #[must_use]
    pub fn part(&self, start: u64, length: u64) -> Option<(u64, u64)> {
        let first = start.max(self.at);
        let end = start.saturating_add(length);
        let length = end
            .min(self.at.saturating_add(self.length))
            .checked_sub(first)?;
        (length > 0).then(|| (self.offset + (first - self.at), length))
    }

    /// Returns whether this is the file, and not another one that took its path.
    pub fn is(&self, file: &fs::File) -> io::Result<bool> {
        let metadata = file.metadata()?;
        Ok((metadata.dev(), metadata.ino()) == self.place)
    }
}

impl Origin {
    /// Resolves a path without links.
    ///
    /// # Errors
    /// Returns the kernel's error about the path itself, and `Unsupported` for a file that could be leased twice, as others
    /// reach it by another name. Unknown facts of a device make a name that holds until
    /// the next boot.
    pub fn of(path: &Path) -> io::Result<Self> {
        Self::of_path(&System::real(), path)
    }

    fn of_path(system: &System, path: &Path) -> io::Result<Self> {
        let metadata = fs::metadata(path)?;
        let resolve = |system: &System| match metadata.file_type().is_block_device() {
            true => Device::resolve(system, DeviceNumber(metadata.rdev())),
            false => Device::of_file(system, path, &metadata),
        };
        let Device {
            extents,
            files,
            refusal,
        } = resolve(system);
        if let Some(refusal) = refusal {
            return Err(io::Error::new(io::ErrorKind::Unsupported, refusal));
        }
        let name = extent::join(&extents);
        let by = |naming| extent::join(&resolve(&system.by(naming)).extents);
        let formerly: Vec<String> = Some(by(Naming::Former))
            .filter(|former| *former != name)
            .into_iter()
            .collect();
        let mut others = Vec::new();
        for naming in Naming::OTHERS {
            let other = by(naming);
            if other != name && !formerly.contains(&other) && !others.contains(&other) {
                others.push(other);
            }
        }
        Ok(Self {
            identity: Identity {
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
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Returns the files that lie below a loop device, or below overlay.
    pub fn files(&self) -> &[BackingFile] {
        &self.files
    }

    /// Returns what uses the bytes: a mount or swap.
    pub fn user(&self) -> Option<String> {
        self.user_in(&System::real())
    }

    fn user_in(&self, system: &System) -> Option<String> {
        let is_ours = |device: &Device| {
            let mut all = device.extents.iter();
            all.any(|extent| self.extents.iter().any(|ours| ours.overlaps(extent)))
        };
        let mount = |mount: &Mount| {
            let device = Device::resolve(system, mount.block_device()?);
            is_ours(&device).then(|| format!("the file system on {}", mount.point.display()))
        };
        let swap = |path: &PathBuf| {
            let metadata = fs::metadata(path).ok()?;
            let device = match metadata.file_type().is_block_device() {
                true => Device::resolve(system, DeviceNumber(metadata.rdev())),
                false => Device::of_file(system, path, &metadata),
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

/// The boot of the host, and the disks that it has.
#[derive(Clone, Debug)]
pub(crate) struct Host {
    /// Tells this boot from others.
    pub(crate) boot: String,
    /// All names of all disks.
    disks: Vec<String>,
}

impl Host {
    /// Looks at this host.
    pub(crate) fn now() -> Self {
        Self::of(&System::real())
    }

    fn of(system: &System) -> Self {
        let disks = system.block_devices().into_iter();
        Self {
            boot: system.boot(),
            disks: disks.flat_map(|disk| device::names(system, disk)).collect(),
        }
    }

    /// Returns whether the host has the disk that a base is, or that its file system is on. `false` for a disk that cannot be
    /// seen.
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

/// Returns what tells this boot of the host from others.
#[cfg(test)]
pub(crate) fn boot() -> String {
    System::real().boot()
}

/// Returns where the first byte of a drive lies, by its [identity](Identity). Unlike the identity, this stays as it is when the
/// drive grows, or when something below it changes, as a member of a RAID.
#[must_use]
pub fn beginning(identity: &str) -> String {
    extent::beginning(identity)
}

/// Returns what keeps a block device from being opened exclusively, as far as the kernel names it.
pub fn holder(path: &Path) -> Option<String> {
    let device = DeviceNumber(fs::metadata(path).ok()?.rdev());
    let holders = System::real().holders(device);
    (!holders.is_empty()).then(|| format!("the device {}", holders.join(", ")))
}

/// A whole file: its inode, and the file system that it is in.
fn file_extent(system: &System, path: &Path, metadata: &Metadata) -> Extent {
    let device = DeviceNumber(metadata.dev());
    let file_system = if system.is_mapped(device) {
        // Its table can be read by few processes, and a file has the same name for all.
        device::name(system, device)
    } else if system.is_block_device(device) {
        extent::join(&Device::resolve(system, device).extents)
    } else {
        file_system(system, path, device)
    };
    let is_labelled = match system.naming {
        Naming::Former | Naming::ByBoot => false,
        Naming::ByFileSystem => true,
        Naming::Present | Naming::Nth(_) | Naming::Numbered => {
            extent::boot_of(&file_system).is_some()
        }
    };
    let file_system = match is_labelled {
        // The label of a file system lies outside of all files, so that no lease can cover it.
        true => {
            let label = memory::file_system::uuid_name(path);
            label.map_or(file_system, |label| format!("{}{label}", extent::LABELLED))
        }
        false => file_system,
    };
    Extent {
        base: extent::base("file", &format!("{}@{file_system}", metadata.ino())),
        start: 0,
        length: metadata.len(),
        below: Vec::new(),
    }
}

/// Returns a name of a file system that is on no block device of its own.
fn file_system(system: &System, path: &Path, device: DeviceNumber) -> String {
    let mounts = system.mounts();
    match Mount::holding(&mounts, path) {
        // A file system in memory ends with this boot.
        None => format!("{}/{device}", system.boot()),
        Some(mount) if matches!(mount.kind.as_str(), "tmpfs" | "ramfs" | "devtmpfs") => {
            format!("{}/{device}", system.boot())
        }
        Some(mount) => {
            let source = match mount.block_device() {
                Some(device) => extent::join(&Device::resolve(system, device).extents),
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
