//! Resolution of block devices down to the storage of their bytes.

use std::fs::{self, Metadata};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use nvme_mpt_memory::device_mapper::DeviceMapperTarget;

use super::backing_extent::{self, BackingExtent};
use super::kernel_files::{DeviceNaming, DeviceNumber, KernelFiles};
use super::nvme_names::{self, ControllerNameFields};
use super::{BackingFile, file_extent, stacked_file_system};

/// Maximum depth to which stacked devices are resolved: more than any host has in practice.
const DEPTH_MAX: u32 = 16;

/// Bytes of a sector, the unit of sizes and offsets in sysfs. It does not depend on the device's block size (Linux,
/// `Documentation/ABI/stable/sysfs-block`).
const SECTOR: u64 = 512;

/// Block device or file, resolved to the disks and files that store its bytes.
#[derive(Clone, Debug, Default)]
pub(super) struct BackingDevice {
    /// Extents that store the bytes, in the order of the device's bytes.
    pub(super) extents: Vec<BackingExtent>,
    /// Backing files of loop devices, and files that overlay shows.
    pub(super) files: Vec<BackingFile>,
    /// Reason to refuse the path, because its bytes could be leased a second time by another path.
    pub(super) refusal: Option<String>,
}

impl BackingDevice {
    pub(super) fn from_extent(extent: BackingExtent) -> Self {
        Self {
            extents: vec![extent],
            ..Self::default()
        }
    }

    pub(super) fn resolve(system: &KernelFiles, device: DeviceNumber) -> Self {
        resolve(system, device, DEPTH_MAX)
    }

    /// Resolves a file. If the file is on overlay, resolves it to the file in the upper directory, so that locks are also taken
    /// there.
    pub(super) fn from_file(system: &KernelFiles, path: &Path, metadata: &Metadata) -> Self {
        match stacked_file_system::file_below(system, path) {
            Ok(None) => Self::from_extent(file_extent(system, path, metadata)),
            Ok(Some(file)) => match fs::metadata(&file) {
                Ok(below) => {
                    let mut device = Self::from_file(system, &file, &below);
                    device.files.push(BackingFile {
                        file_id: (below.dev(), below.ino()),
                        offset: 0,
                        drive_offset: 0,
                        length: u64::MAX,
                        // Overlay passes direct I/O to the file below, except to a file on tmpfs.
                        is_direct: !system.is_on_tmpfs(&file),
                        path: file,
                    });
                    device
                }
                Err(error) => Self {
                    refusal: Some(format!(
                        "{} below it cannot be seen: {error}",
                        file.display()
                    )),
                    ..Self::from_extent(file_extent(system, path, metadata))
                },
            },
            Err(refusal) => Self {
                refusal: Some(refusal.to_string()),
                ..Self::from_extent(file_extent(system, path, metadata))
            },
        }
    }

    /// Returns the part of the device with `length` bytes from `offset` on.
    fn slice(self, offset: u64, length: u64) -> Self {
        let end = offset.saturating_add(length);
        let files = self.files.into_iter().filter_map(|file| {
            let start = file.drive_offset.max(offset);
            let length = file
                .drive_offset
                .saturating_add(file.length)
                .min(end)
                .checked_sub(start)?;
            (length > 0).then(|| BackingFile {
                offset: file.offset + (start - file.drive_offset),
                drive_offset: start - offset,
                length,
                ..file
            })
        });
        Self {
            files: files.collect(),
            extents: backing_extent::slice_extents(&self.extents, offset, length),
            refusal: self.refusal,
        }
    }

    /// Appends another device at offset `at`.
    fn append(&mut self, other: Self, at: u64) {
        for extent in other.extents {
            match self.extents.last_mut() {
                Some(last) if last.is_followed_by(&extent) => last.length += extent.length,
                _ => self.extents.push(extent),
            }
        }
        self.refusal = self.refusal.take().or(other.refusal);
        let files = other.files.into_iter();
        self.files.extend(files.map(|file| BackingFile {
            drive_offset: file.drive_offset + at,
            ..file
        }));
    }

    /// Returns the extents, each followed by the extents below it (on the devices that store its bytes).
    fn flatten(self) -> impl Iterator<Item = BackingExtent> {
        self.extents.into_iter().flat_map(|mut extent| {
            let below = std::mem::take(&mut extent.below);
            std::iter::once(extent).chain(below)
        })
    }
}

fn resolve(system: &KernelFiles, device: DeviceNumber, depth: u32) -> BackingDevice {
    let number = |name: &str| system.attribute(device, name)?.parse::<u64>().ok();
    let length = number("size").map_or(u64::MAX, |sectors| sectors.saturating_mul(SECTOR));
    let next = |device| match depth.checked_sub(1) {
        Some(depth) => resolve(system, device, depth),
        None => BackingDevice::default(),
    };
    if system.attribute(device, "partition").is_some()
        && let (Some(start), Some(disk)) = (number("start"), system.parent(device))
    {
        let part = next(disk).slice(start.saturating_mul(SECTOR), length);
        if !part.extents.is_empty() {
            return part;
        }
    }
    if let Some(file) = system.attribute(device, "loop/backing_file")
        && let Some(found) = resolve_loop(system, device, Path::new(&file), &next)
    {
        let part = found.slice(number("loop/offset").unwrap_or(0), length);
        if !part.extents.is_empty() {
            return part;
        }
    }
    if system.is_device_mapper(device)
        && let Some(table) = system.dm_table(device)
        && let Some(mapped) = resolve_table(system, device, &table, &next)
    {
        return mapped;
    }
    BackingDevice::from_extent(BackingExtent {
        base: device_name(system, device),
        start: 0,
        length,
        below: gather_extents(system.slaves(device), &next),
    })
}

/// Resolves a device-mapper device. A `linear` target is resolved to bytes of the device below. Any other target is
/// resolved to bytes of the device itself, and all devices below it are listed.
fn resolve_table(
    system: &KernelFiles,
    device: DeviceNumber,
    table: &[DeviceMapperTarget],
    next: &impl Fn(DeviceNumber) -> BackingDevice,
) -> Option<BackingDevice> {
    let mut mapped = BackingDevice::default();
    let mut end = 0;
    for target in table {
        let (start, length) = (
            target.start.checked_mul(SECTOR)?,
            target.sectors.checked_mul(SECTOR)?,
        );
        if start != end {
            return None;
        }
        end = start.checked_add(length)?;
        let linear = (target.kind == "linear")
            .then(|| resolve_linear(&target.parameters, length, next))
            .flatten();
        let part = linear.unwrap_or_else(|| {
            let (base, start) = match thin_name(system, target) {
                // All thin devices with the same number in a pool are the same volume.
                Some(base) => (base, 0),
                None => (device_name(system, device), start),
            };
            BackingDevice::from_extent(BackingExtent {
                base,
                start,
                length,
                below: extents_below(system, device, target, next),
            })
        });
        mapped.append(part, start);
    }
    (end > 0).then_some(mapped)
}

/// Resolves a `linear` target. Its parameters are the device and the first sector.
fn resolve_linear(
    parameters: &str,
    length: u64,
    next: &impl Fn(DeviceNumber) -> BackingDevice,
) -> Option<BackingDevice> {
    let (device, start) = parameters.trim().split_once(' ')?;
    let start: u64 = start.parse().ok()?;
    let part = next(DeviceNumber::parse(device)?).slice(start.checked_mul(SECTOR)?, length);
    let whole = part.extents.iter().map(|extent| extent.length).sum::<u64>();
    (whole == length).then_some(part)
}

/// Returns the name of a `thin` target: the pool's name, and the volume's number in the pool.
fn thin_name(system: &KernelFiles, target: &DeviceMapperTarget) -> Option<String> {
    let mut words = target.parameters.split_whitespace();
    let pool = DeviceNumber::parse(words.next()?)?;
    let number = words.next()?;
    (target.kind == "thin").then(|| backing_extent::volume_name(&device_name(system, pool), number))
}

/// Returns the extents on the devices below a target. Devices whose writes do not change the target's bytes are omitted.
fn extents_below(
    system: &KernelFiles,
    device: DeviceNumber,
    target: &DeviceMapperTarget,
    next: &impl Fn(DeviceNumber) -> BackingDevice,
) -> Vec<BackingExtent> {
    let mut words = target.parameters.split_whitespace();
    let devices = match target.kind.as_str() {
        "error" | "zero" => Vec::new(),
        // A snapshot and its origin do not change each other, so only the device with the snapshot's changes counts.
        "snapshot" => words
            .nth(1)
            .and_then(DeviceNumber::parse)
            .into_iter()
            .collect(),
        _ => system.slaves(device),
    };
    gather_extents(devices, next)
}

/// Returns the extents of `devices` and of everything below them, each once.
fn gather_extents(
    devices: Vec<DeviceNumber>,
    next: &impl Fn(DeviceNumber) -> BackingDevice,
) -> Vec<BackingExtent> {
    let mut all = Vec::new();
    for extent in devices
        .into_iter()
        .flat_map(|device| next(device).flatten())
    {
        if !all.contains(&extent) {
            all.push(extent);
        }
    }
    all
}

/// Resolves the backing file of a loop device. The kernel shows the file's present path, or marks the file as deleted.
fn resolve_loop(
    system: &KernelFiles,
    device_number: DeviceNumber,
    path: &Path,
    next: &impl Fn(DeviceNumber) -> BackingDevice,
) -> Option<BackingDevice> {
    let metadata = fs::metadata(path).ok()?;
    if metadata.file_type().is_block_device() {
        return Some(next(DeviceNumber(metadata.rdev())));
    }
    let mut device = BackingDevice::from_file(system, path, &metadata);
    for extent in &mut device.extents {
        // The file may grow, and with it the extent that the loop device shows.
        extent.length = u64::MAX;
    }
    device.files.push(BackingFile {
        path: path.to_owned(),
        file_id: (metadata.dev(), metadata.ino()),
        offset: 0,
        drive_offset: 0,
        length: u64::MAX,
        is_direct: system.attribute(device_number, "loop/dio").as_deref() == Some("1"),
    });
    Some(device)
}

/// Returns the name of an NVMe namespace: the drive's name as derived from Identify Controller, and the namespace's
/// number.
fn nvme_name(system: &KernelFiles, device: DeviceNumber) -> Option<String> {
    let attribute = |name| system.attribute(device, name);
    let nsid = attribute("nsid")?.parse().ok()?;
    let vendor = attribute("device/device/vendor");
    let vendor = vendor.and_then(|vendor| u16::from_str_radix(vendor.strip_prefix("0x")?, 16).ok());
    let [nqn, model, serial] = ["device/subsysnqn", "device/model", "device/serial"].map(attribute);
    let (nqn, model, serial) = (nqn?, model?, serial?);
    let drive = ControllerNameFields {
        nqn: nqn.as_bytes(),
        vendor,
        model: model.as_bytes(),
        serial: serial.as_bytes(),
    };
    let numbered = drive
        .serial_name()
        .filter(|_| system.naming == DeviceNaming::BySerial);
    Some(nvme_names::namespace_name(
        &numbered.or_else(|| drive.name())?,
        nsid,
    ))
}

/// Returns the best name of a device that is not part of another device. Kernel names such as `sda` are not used, because they
/// depend on the order in which the kernel finds devices.
pub(super) fn device_name(system: &KernelFiles, device: DeviceNumber) -> String {
    if let Some(name) = nvme_name(system, device) {
        return name;
    }
    let mut names = persistent_names(system, device);
    match system.naming {
        DeviceNaming::Nth(nth) if nth < names.len() => names.swap_remove(nth),
        DeviceNaming::ByBoot => boot_name(system, device),
        _ if names.is_empty() => boot_name(system, device),
        _ => names.swap_remove(0),
    }
}

/// Returns all names of a device that is not part of another device, from the best to the name for this boot.
pub(super) fn device_names(system: &KernelFiles, device: DeviceNumber) -> Vec<String> {
    let mut names = persistent_names(system, device);
    names.extend(nvme_name(system, device));
    names.push(boot_name(system, device));
    names
}

/// Returns the names that a device keeps after a reboot, the best one first.
fn persistent_names(system: &KernelFiles, device: DeviceNumber) -> Vec<String> {
    // Attributes of NVMe, SCSI, virtio and MMC disks; of device mapper and RAID devices. An NVMe namespace always has a
    // `wwid`. The serial number of its controller would be ambiguous, because other namespaces share it.
    const NAMES: [(&str, &str); 7] = [
        (backing_extent::DISK_KIND, "wwid"),
        (backing_extent::DISK_KIND, "device/wwid"),
        (backing_extent::DISK_KIND, "serial"),
        (backing_extent::DISK_KIND, "device/cid"),
        ("dm", "dm/uuid"),
        ("dm", "dm/name"),
        (backing_extent::ARRAY_KIND, "md/uuid"),
    ];
    let mut names: Vec<String> = Vec::new();
    for (kind, attribute) in NAMES {
        if let Some(name) = system.attribute(device, attribute) {
            let name = backing_extent::base_name(kind, &name);
            if !names.contains(&name) {
                names.push(name);
            }
        }
    }
    names
}

/// Returns a device's name for this boot. The kernel gives each disk a unique sequence number.
fn boot_name(system: &KernelFiles, device: DeviceNumber) -> String {
    let sequence = system.attribute(device, "diskseq");
    let sequence = sequence.unwrap_or_else(|| device.to_string());
    let kind = match system.is_memory_backed(device) {
        true => "ram",
        false => backing_extent::DISK_KIND,
    };
    backing_extent::base_name(kind, &format!("{}/{sequence}", system.boot_id()))
}
