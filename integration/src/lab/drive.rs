//! The lab's drives: their properties, and the arguments of QEMU's `nvme` device for them.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde_json::{Value, json};
use thiserror::Error;

use super::LabError;

/// Number of the bus behind the first root port. Buses of further drives follow in their order.
const FIRST_BUS: usize = 1;
/// Maximum number of namespaces of a drive.
const MAX_NAMESPACES: u32 = 16;
/// Maximum number of I/O queue pairs of QEMU's device (hw/nvme/ctrl.c).
const MAX_QUEUES: u32 = 0xffff - 1;

/// A drive of the lab.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LabDrive {
    /// Name.
    pub id: String,
    /// Size of each namespace in bytes.
    pub size: u64,
    /// Logical block size in bytes: 512 or 4096.
    pub lba_size: u32,
    /// Number of namespaces. A drive with several namespaces cannot be plugged in again after its removal.
    pub namespaces: u32,
    /// Number of I/O queue pairs.
    pub max_ioqpairs: u32,
    /// Maximum Data Transfer Size, as a power of two of 4 KiB pages; 0 for no limit.
    pub mdts: u8,
    /// True if the drive supports Doorbell Buffer Config.
    pub dbcs: bool,
    /// Maximum I/Os per second; `None` for no limit.
    pub iops: Option<u64>,
    /// Maximum bytes per second; `None` for no limit.
    pub bandwidth: Option<u64>,
    /// File with the drive's data, which is created if it is missing, and stays. `None` for a file that is removed with the
    /// lab. The files of further namespaces have "-2", "-3", … at the end of their names.
    pub image: Option<PathBuf>,
}

/// Errors in a drive's description.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum DriveError {
    /// A part is not `key=value`.
    #[error("'{part}' is not KEY=VALUE")]
    NotAPair {
        /// The part.
        part: String,
    },
    /// A key is unknown.
    #[error(
        "A drive has no '{key}': there are id, size, lba, namespaces, queues, mdts, dbcs, iops, bandwidth, image"
    )]
    NoSuchKey {
        /// The key.
        key: String,
    },
    /// A value of a key is invalid.
    #[error("{key}={value}: must be {rule}")]
    BadValue {
        /// The key.
        key: String,
        /// The value.
        value: String,
        /// Rule for values of the key.
        rule: &'static str,
    },
    /// The drive has no name.
    #[error("A drive needs an id: id=a")]
    NoId,
}

impl LabDrive {
    /// Creates a drive with one namespace of `size` bytes and QEMU's default block size of 512 bytes.
    pub fn new(id: &str, size: u64) -> Self {
        Self {
            id: id.to_owned(),
            size,
            lba_size: 512,
            namespaces: 1,
            max_ioqpairs: 64,
            mdts: 7,
            dbcs: true,
            iops: None,
            bandwidth: None,
            image: None,
        }
    }

    /// Sets the size of a logical block: 512 or 4096.
    #[must_use]
    pub fn lba_size(mut self, lba_size: u32) -> Self {
        self.lba_size = lba_size;
        self
    }

    /// Sets the number of namespaces.
    #[must_use]
    pub fn namespaces(mut self, namespaces: u32) -> Self {
        self.namespaces = namespaces;
        self
    }

    /// Sets the number of I/O queue pairs.
    #[must_use]
    pub fn max_ioqpairs(mut self, max_ioqpairs: u32) -> Self {
        self.max_ioqpairs = max_ioqpairs;
        self
    }

    /// Sets the Maximum Data Transfer Size, as a power of two of 4 KiB pages; 0 for no limit.
    #[must_use]
    pub fn mdts(mut self, mdts: u8) -> Self {
        self.mdts = mdts;
        self
    }

    /// Sets whether the drive supports Doorbell Buffer Config.
    #[must_use]
    pub fn dbcs(mut self, dbcs: bool) -> Self {
        self.dbcs = dbcs;
        self
    }

    /// Sets the maximum I/Os per second.
    #[must_use]
    pub fn iops(mut self, iops: u64) -> Self {
        self.iops = Some(iops);
        self
    }

    /// Sets the maximum bytes per second.
    #[must_use]
    pub fn bandwidth(mut self, bandwidth: u64) -> Self {
        self.bandwidth = Some(bandwidth);
        self
    }

    /// Stores the drive's data in a file that stays when the lab ends.
    #[must_use]
    pub fn image(mut self, image: impl Into<PathBuf>) -> Self {
        self.image = Some(image.into());
        self
    }

    fn set(&mut self, key: &str, value: &str) -> Result<(), DriveError> {
        let bad = |rule| DriveError::BadValue {
            key: key.to_owned(),
            value: value.to_owned(),
            rule,
        };
        let number = |least: u64, most: u64, rule| {
            let number = value.parse::<u64>().map_err(|_| bad(rule))?;
            if (least..=most).contains(&number) {
                Ok(number)
            } else {
                Err(bad(rule))
            }
        };
        match key {
            "id" => {
                let is_name = value.starts_with(|c: char| c.is_ascii_lowercase())
                    && value
                        .chars()
                        .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit());
                if !is_name || value.len() > 16 {
                    return Err(bad("up to 16 small letters and digits, a letter first"));
                }
                value.clone_into(&mut self.id);
            }
            "size" => {
                let rule = "a number of bytes, or with K, M, G or T, and whole MiB";
                let size = crate::parse_size(value).ok_or_else(|| bad(rule))?;
                if size == 0 || size % (1 << 20) != 0 {
                    return Err(bad(rule));
                }
                self.size = size;
            }
            "lba" => {
                self.lba_size = match value {
                    "512" => 512,
                    "4096" | "4K" => 4096,
                    _ => return Err(bad("512 or 4096")),
                }
            }
            "namespaces" => {
                self.namespaces = number(1, u64::from(MAX_NAMESPACES), "1 to 16")? as u32;
            }
            "queues" => {
                self.max_ioqpairs = number(1, u64::from(MAX_QUEUES), "1 to 65534")? as u32;
            }
            "mdts" => self.mdts = number(0, 16, "a power of two of pages, 0 to 16")? as u8,
            "dbcs" => {
                self.dbcs = match value {
                    "on" => true,
                    "off" => false,
                    _ => return Err(bad("on or off")),
                }
            }
            "iops" => self.iops = Some(number(1, 1 << 32, "1 or more")?),
            "bandwidth" => {
                let rule = "a number of bytes a second, or with K, M, G or T";
                let bandwidth = crate::parse_size(value).filter(|bytes| *bytes > 0);
                self.bandwidth = Some(bandwidth.ok_or_else(|| bad(rule))?);
            }
            "image" => {
                // Characters that have a meaning in QEMU's options are refused.
                if value.is_empty() {
                    return Err(bad("a path"));
                }
                self.image = Some(PathBuf::from(value));
            }
            _ => {
                return Err(DriveError::NoSuchKey {
                    key: key.to_owned(),
                });
            }
        }
        Ok(())
    }
}

/// Parses `id=a,size=1G,lba=4096,queues=2,…`: see the fields of [`LabDrive`].
impl FromStr for LabDrive {
    type Err = DriveError;

    fn from_str(text: &str) -> Result<Self, DriveError> {
        let mut drive = Self::new("", 1 << 30);
        for part in text.split(',').filter(|part| !part.is_empty()) {
            let Some((key, value)) = part.split_once('=') else {
                return Err(DriveError::NotAPair {
                    part: part.to_owned(),
                });
            };
            drive.set(key, value)?;
        }
        if drive.id.is_empty() {
            return Err(DriveError::NoId);
        }
        Ok(drive)
    }
}

/// A drive, and its slot in the machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PlacedDrive {
    pub(super) drive: LabDrive,
    slot: usize,
}

/// Assigns a slot to each drive.
pub(super) fn place(drives: &[LabDrive]) -> Result<Vec<PlacedDrive>, LabError> {
    let mut placed: Vec<PlacedDrive> = Vec::new();
    for (slot, drive) in drives.iter().enumerate() {
        if placed.iter().any(|other| other.drive.id == drive.id) {
            return Err(LabError::TwoDrives {
                id: drive.id.clone(),
            });
        }
        placed.push(PlacedDrive {
            drive: drive.clone(),
            slot,
        });
    }
    Ok(placed)
}

/// Returns a text with the names and PCI addresses of the drives, one drive per line.
pub(super) fn list(drives: &[LabDrive]) -> String {
    let line = |(slot, drive): (usize, &LabDrive)| {
        format!("{} 0000:{:02x}:00.0\n", drive.id, slot + FIRST_BUS)
    };
    drives.iter().enumerate().map(line).collect()
}

impl PlacedDrive {
    /// Returns QEMU's names of the block nodes, one for each namespace.
    pub(super) fn nodes(&self) -> Vec<String> {
        (1..=self.drive.namespaces)
            .map(|nsid| format!("{}-{nsid}", self.drive.id))
            .collect()
    }

    /// Returns QEMU's names of the devices that use the block nodes: the namespaces; for a drive with one namespace, the
    /// drive itself.
    pub(super) fn block_users(&self) -> Vec<String> {
        if self.drive.namespaces == 1 {
            vec![self.drive.id.clone()]
        } else {
            let user = |node| format!("{node}-ns");
            self.nodes().into_iter().map(user).collect()
        }
    }

    /// Returns QEMU's name of the file node below a block node.
    pub(super) fn file_node(node: &str) -> String {
        format!("{node}-file")
    }

    /// Returns the arguments of QEMU's `device_add`.
    pub(super) fn device(&self) -> Value {
        let drive = &self.drive;
        let mut device = json!({
            "driver": "nvme",
            "id": drive.id,
            "bus": self.port(),
            "serial": format!("LAB-{}", drive.id),
            "max_ioqpairs": drive.max_ioqpairs,
            // One vector for each I/O queue, and one for the admin queue.
            "msix_qsize": (drive.max_ioqpairs + 1).min(2048),
            "mdts": drive.mdts,
            "dbcs": drive.dbcs,
        });
        if drive.namespaces == 1 {
            device["drive"] = json!(self.nodes()[0]);
            self.set_block_size(&mut device);
        }
        device
    }

    fn set_block_size(&self, device: &mut Value) {
        device["logical_block_size"] = json!(self.drive.lba_size);
        device["physical_block_size"] = json!(self.drive.lba_size);
    }

    fn port(&self) -> String {
        format!("{}-port", self.drive.id)
    }

    fn image(&self, dir: &Path, node: &str, nsid: usize) -> PathBuf {
        match &self.drive.image {
            Some(image) if nsid == 1 => image.clone(),
            Some(image) => {
                let mut name = image.clone().into_os_string();
                name.push(format!("-{nsid}"));
                PathBuf::from(name)
            }
            None => dir.join(format!("{node}.img")),
        }
    }

    fn images(&self, dir: &Path) -> Vec<PathBuf> {
        let image = |(n, node): (usize, &String)| self.image(dir, node, n + 1);
        self.nodes().iter().enumerate().map(image).collect()
    }

    /// Creates missing image files.
    pub(super) fn create_images(&self, dir: &Path) -> Result<(), LabError> {
        for path in self.images(dir) {
            let size = self.drive.size;
            let make = || {
                let is_complete = fs::metadata(&path).is_ok_and(|metadata| metadata.len() == size);
                if is_complete {
                    return Ok(());
                }
                File::options()
                    .create(true)
                    .write(true)
                    .truncate(false)
                    .open(&path)?
                    .set_len(size)
            };
            make().map_err(|source| LabError::File {
                path: path.clone(),
                source,
            })?;
        }
        Ok(())
    }

    /// Returns QEMU's arguments.
    pub(super) fn arguments(&self, dir: &Path) -> Vec<String> {
        let mut arguments = Vec::new();
        let mut add = |option: &str, value: String| {
            arguments.extend([option.to_owned(), value]);
        };
        let port = json!({
            "driver": "pcie-root-port",
            "id": self.port(),
            "chassis": self.slot + 1,
            "slot": self.slot + 1,
        });
        add("-device", port.to_string());
        for (node, image) in self.nodes().iter().zip(self.images(dir)) {
            let file = json!({
                "driver": "file",
                "node-name": Self::file_node(node),
                "filename": image,
                "discard": "unmap",
            });
            add("-blockdev", file.to_string());
            add(
                "-blockdev",
                self.node(node, &Self::file_node(node)).to_string(),
            );
        }
        add("-device", self.device().to_string());
        if self.drive.namespaces > 1 {
            for (nsid, (node, user)) in self.nodes().iter().zip(self.block_users()).enumerate() {
                let mut namespace = json!({
                    "driver": "nvme-ns",
                    "id": user,
                    "bus": self.drive.id,
                    "nsid": nsid + 1,
                    "drive": node,
                });
                self.set_block_size(&mut namespace);
                add("-device", namespace.to_string());
            }
        }
        arguments
    }

    /// Returns the block node of a namespace, which lies on top of node `over`.
    pub(super) fn node(&self, node: &str, over: &str) -> Value {
        json!({"driver": "raw", "node-name": node, "discard": "unmap", "file": over})
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_drive_description_names_all_differences_from_the_default() {
        let drive: LabDrive =
            "id=b2,size=512M,lba=4096,namespaces=2,queues=3,mdts=5,dbcs=off,iops=100,bandwidth=4M,image=/x/y"
                .parse()
                .expect("drive");
        let expected = LabDrive::new("b2", 512 << 20)
            .lba_size(4096)
            .namespaces(2)
            .max_ioqpairs(3)
            .mdts(5)
            .dbcs(false)
            .iops(100)
            .bandwidth(4 << 20)
            .image("/x/y");
        assert_eq!(drive, expected);
        assert_eq!("id=a".parse(), Ok(LabDrive::new("a", 1 << 30)));
    }

    #[test]
    fn wrong_descriptions_are_refused() {
        for wrong in [
            "",
            "a",
            "size=1G",
            "id=A",
            "id=1",
            "id=a,size=1",
            "id=a,size=0",
            "id=a,lba=1024",
            "id=a,namespaces=0",
            "id=a,namespaces=17",
            "id=a,queues=0",
            "id=a,queues=99999999999999999999",
            "id=a,mdts=-1",
            "id=a,dbcs=yes",
            "id=a,iops=0",
            "id=a,bandwidth=0",
            "id=a,image=",
            "id=a,color=red",
        ] {
            assert!(wrong.parse::<LabDrive>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn drives_have_the_addresses_that_are_told() {
        let drives = [LabDrive::new("a", 1 << 20), LabDrive::new("b", 1 << 20)];
        assert_eq!(list(&drives), "a 0000:01:00.0\nb 0000:02:00.0\n");
        let placed = place(&drives).expect("placed");
        let arguments = placed[1].arguments(Path::new("/f")).join(" ");
        assert!(arguments.contains(r#""chassis":2"#), "{arguments}");
        assert!(place(&[drives[0].clone(), drives[0].clone()]).is_err());
    }

    #[test]
    fn a_single_namespace_belongs_to_the_drive_and_several_are_devices() {
        let one = &place(&[LabDrive::new("a", 1 << 20)]).expect("placed")[0];
        assert_eq!(one.block_users(), ["a"]);
        assert_eq!(one.device()["drive"], "a-1");
        let two = &place(&[LabDrive::new("a", 1 << 20).namespaces(2)]).expect("placed")[0];
        assert_eq!(two.block_users(), ["a-1-ns", "a-2-ns"]);
        assert_eq!(two.device()["drive"], Value::Null);
        let images = two.images(Path::new("/f"));
        assert_eq!(images, [Path::new("/f/a-1.img"), Path::new("/f/a-2.img")]);
    }
}
