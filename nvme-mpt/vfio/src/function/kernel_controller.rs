//! State of the kernel's `nvme` driver for a controller that is bound to it.

use std::path::{Path, PathBuf};

use super::{HostRoot, PciFunctionError, entries, link_name, read, read_optional};

/// Unit of a disk's size in sysfs, in bytes.
const SECTOR: u64 = 512;

/// A controller that the kernel's `nvme` driver has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelController {
    /// Name of the controller, such as `nvme0`.
    pub name: String,
    /// Model Number.
    pub model: String,
    /// Serial Number.
    pub serial: String,
    /// Namespaces that the kernel offers as disks, sorted by identifier.
    pub namespaces: Vec<KernelNamespace>,
}

/// A namespace that is a disk of the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelNamespace {
    /// Namespace identifier.
    pub nsid: u32,
    /// Name of the disk, such as `nvme0n1`.
    pub disk: String,
    /// Size of the namespace in bytes.
    pub bytes: u64,
    /// Logical block size in bytes.
    pub lba_size: u32,
    /// Directory of the disk in sysfs.
    pub(super) dir: PathBuf,
}

/// Reads the controller of the function with this directory in sysfs. Returns `None` while the driver is still probing the
/// function.
pub(super) fn read_controller(
    root: &HostRoot,
    dir: &Path,
) -> Result<Option<KernelController>, PciFunctionError> {
    let controllers = dir.join("nvme");
    let Some(name) = entries(&controllers)?.into_iter().next() else {
        return Ok(None);
    };
    let dir = controllers.join(&name);
    let mut namespaces = Vec::new();
    for entry in entries(&dir)? {
        // The disk of a namespace is in the controller's directory. With multipath, that directory has the path (nvme0c1n1)
        // instead, and the disk (nvme0n1) is under /sys/block.
        let (disk, dir) = match multipath_disk(&entry) {
            None if is_disk(&entry) => {
                let dir = dir.join(&entry);
                (entry, dir)
            }
            None => continue,
            Some(disk) => {
                let dir = root.sys.join("block").join(&disk);
                (disk, dir)
            }
        };
        namespaces.extend(read_namespace(disk, dir)?);
    }
    namespaces.sort_by_key(|namespace| namespace.nsid);
    let text = |file: &str| {
        read_optional(&dir.join(file)).map(|text| text.unwrap_or_default().trim().to_owned())
    };
    Ok(Some(KernelController {
        model: text("model")?,
        serial: text("serial")?,
        name,
        namespaces,
    }))
}

/// Splits a name like `nvme1n2` or `nvme1c3n2` into its numbers.
fn split_numbers(name: &str) -> Option<Vec<&str>> {
    let numbers: Vec<&str> = name.strip_prefix("nvme")?.split(['c', 'n']).collect();
    let numeric = |number: &&str| !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit());
    numbers.iter().all(numeric).then_some(numbers)
}

fn is_disk(name: &str) -> bool {
    split_numbers(name).is_some_and(|numbers| numbers.len() == 2) && !name.contains('c')
}

/// Returns the multipath disk to which a path, such as `nvme0c1n1`, belongs.
fn multipath_disk(name: &str) -> Option<String> {
    match &*split_numbers(name)? {
        [subsystem, _, namespace] => Some(format!("nvme{subsystem}n{namespace}")),
        _ => None,
    }
}

/// Reads a namespace. Returns `None` if the namespace was removed after the listing.
fn read_namespace(disk: String, dir: PathBuf) -> Result<Option<KernelNamespace>, PciFunctionError> {
    let whole = |file: &str| -> Result<Option<u64>, PciFunctionError> {
        let path = dir.join(file);
        let Some(text) = read_optional(&path)? else {
            return Ok(None);
        };
        match text.parse() {
            Ok(number) => Ok(Some(number)),
            Err(_) => Err(PciFunctionError::Form { path, text }),
        }
    };
    let (Some(nsid), Some(sectors), Some(lba_size)) = (
        whole("nsid")?,
        whole("size")?,
        whole("queue/logical_block_size")?,
    ) else {
        return Ok(None);
    };
    let narrow = |value: u64, file: &str| {
        u32::try_from(value).map_err(|_| PciFunctionError::Form {
            path: dir.join(file),
            text: value.to_string(),
        })
    };
    Ok(Some(KernelNamespace {
        nsid: narrow(nsid, "nsid")?,
        bytes: sectors.saturating_mul(SECTOR),
        lba_size: narrow(lba_size, "queue/logical_block_size")?,
        disk,
        dir,
    }))
}

/// A disk or partition: its name, its device number (such as `259:1`), and the block devices that are built on it.
#[derive(Debug)]
pub(super) struct BlockDevice {
    pub(super) name: String,
    pub(super) number: String,
    pub(super) holders: Vec<String>,
}

impl KernelNamespace {
    /// Returns the disk and its partitions.
    pub(super) fn block_devices(&self) -> Result<Vec<BlockDevice>, PciFunctionError> {
        let mut devices = vec![read_block_device(&self.disk, &self.dir)?];
        for entry in entries(&self.dir)? {
            let dir = self.dir.join(&entry);
            if entry.starts_with(&self.disk) && read_optional(&dir.join("partition"))?.is_some() {
                devices.push(read_block_device(&entry, &dir)?);
            }
        }
        devices[1..].sort_by(|one, other| one.name.cmp(&other.name));
        Ok(devices)
    }
}

fn read_block_device(name: &str, dir: &Path) -> Result<BlockDevice, PciFunctionError> {
    let mut holders = Vec::new();
    for holder in entries(&dir.join("holders"))? {
        let path = dir.join("holders").join(&holder);
        // The name of a device mapper volume, such as vg0-root, says more than its device name.
        holders.push(match read_optional(&path.join("dm/name"))? {
            Some(mapped) => format!("{holder} ({mapped})"),
            None => link_name(&path)?.unwrap_or(holder),
        });
    }
    holders.sort();
    Ok(BlockDevice {
        name: name.to_owned(),
        number: read(&dir.join("dev"))?,
        holders,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disks_paths_and_everything_else_are_told_apart_by_name() {
        assert!(is_disk("nvme0n1") && is_disk("nvme12n34"));
        for name in [
            "ng0n1",
            "nvme0",
            "nvme0n1p1",
            "nvme0c1n1",
            "hwmon3",
            "power",
            "nvmen1",
        ] {
            assert!(!is_disk(name), "{name}");
        }
        assert_eq!(multipath_disk("nvme1c0n2").as_deref(), Some("nvme1n2"));
        assert_eq!(multipath_disk("nvme1n2"), None);
        assert!(!is_disk("nvme1c2"));
    }
}
