//! Block devices, down to what holds their bytes.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use super::extent::{self, Extent};
use super::system::{DeviceNumber, System};
use super::{BackingFile, file_extent};

/// Devices on top of each other that are looked through: more than anybody stacks.
const DEPTH: u32 = 16;

/// The kernel's sectors, whatever a device's blocks are (Linux, `Documentation/ABI/stable/sysfs-block`).
const SECTOR: u64 = 512;

/// A block device.
#[derive(Clone, Debug, Default)]
pub(super) struct Device {
    /// Its bytes, in order.
    pub(super) extents: Vec<Extent>,
    /// Extents below it, where the place of each byte is not known.
    pub(super) below: Vec<Extent>,
    /// The files that loop devices make it of.
    pub(super) files: Vec<BackingFile>,
}

impl Device {
    pub(super) fn of(extent: Extent) -> Self {
        Self {
            extents: vec![extent],
            ..Self::default()
        }
    }

    pub(super) fn resolve(system: &System, device: DeviceNumber) -> Self {
        resolve(system, device, DEPTH)
    }

    /// A part of it.
    fn part(self, offset: u64, length: u64) -> Self {
        let files = self.files.into_iter().map(|file| BackingFile {
            offset: file.offset + offset,
            ..file
        });
        Self {
            extents: extent::part(&self.extents, offset, length),
            below: self.below,
            files: files.collect(),
        }
    }
}

fn resolve(system: &System, device: DeviceNumber, depth: u32) -> Device {
    let number = |name: &str| system.attribute(device, name)?.parse::<u64>().ok();
    let length = number("size").map_or(u64::MAX, |sectors| sectors.saturating_mul(SECTOR));
    let next = |device| match depth.checked_sub(1) {
        Some(depth) => resolve(system, device, depth),
        None => Device::default(),
    };
    if system.attribute(device, "partition").is_some()
        && let (Some(start), Some(disk)) = (number("start"), system.parent(device))
    {
        let part = next(disk).part(start.saturating_mul(SECTOR), length);
        if !part.extents.is_empty() {
            return part;
        }
    }
    if let Some(file) = system.attribute(device, "loop/backing_file")
        && let Some(found) = resolve_loop(system, Path::new(&file), &next)
    {
        let part = found.part(number("loop/offset").unwrap_or(0), length);
        if !part.extents.is_empty() {
            return part;
        }
    }
    let below = system.slaves(device).into_iter().map(next);
    let below = below.flat_map(|device| device.extents.into_iter().chain(device.below));
    Device {
        below: below.collect(),
        ..Device::of(Extent {
            base: name(system, device),
            start: 0,
            length,
        })
    }
}

/// The file below a loop device. The kernel shows its present path, or that it has none.
fn resolve_loop(
    system: &System,
    path: &Path,
    next: &impl Fn(DeviceNumber) -> Device,
) -> Option<Device> {
    let metadata = fs::metadata(path).ok()?;
    if metadata.file_type().is_block_device() {
        return Some(next(DeviceNumber(metadata.rdev())));
    }
    let whole = Extent {
        // A file can grow below its device.
        length: u64::MAX,
        ..file_extent(system, path, &metadata)
    };
    Some(Device {
        files: vec![BackingFile {
            path: path.to_owned(),
            place: (metadata.dev(), metadata.ino()),
            offset: 0,
        }],
        ..Device::of(whole)
    })
}

/// The name of what is no part of anything. It is never the kernel's, which numbers devices as it finds them.
fn name(system: &System, device: DeviceNumber) -> String {
    // NVMe, SCSI, virtio, MMC; device mapper and RAID. An NVMe namespace's `wwid` is there always; the serial number
    // of its controller would be that of other namespaces, too.
    const NAMES: [(&str, &str); 7] = [
        ("disk", "wwid"),
        ("disk", "device/wwid"),
        ("disk", "serial"),
        ("disk", "device/cid"),
        ("dm", "dm/uuid"),
        ("dm", "dm/name"),
        ("md", "md/uuid"),
    ];
    let named = NAMES.iter().find_map(|(kind, attribute)| {
        let name = system.attribute(device, attribute)?;
        Some(extent::base(kind, &name))
    });
    named.unwrap_or_else(|| {
        // The kernel gives each disk that it finds another sequence number, until the next boot.
        let sequence = system.attribute(device, "diskseq");
        let sequence = sequence.unwrap_or_else(|| device.to_string());
        extent::base("disk", &format!("{}/{sequence}", system.boot()))
    })
}
