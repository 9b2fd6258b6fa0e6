//! The kernel's view of block devices and file systems in sysfs and proc, below a directory that tests replace.

use std::ffi::OsString;
use std::fmt;
use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use nvme_mpt_memory::device_mapper::{self, DeviceMapperTarget};

use super::backing_extent::UNKNOWN_BOOT;

/// Device number as reported by `stat`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct DeviceNumber(pub(super) u64);

impl DeviceNumber {
    fn major(self) -> u32 {
        libc::major(self.0)
    }

    pub(super) fn parse(text: &str) -> Option<Self> {
        let (major, minor) = text.trim().split_once(':')?;
        Some(Self(libc::makedev(
            major.parse().ok()?,
            minor.parse().ok()?,
        )))
    }
}

impl fmt::Display for DeviceNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.major(), libc::minor(self.0))
    }
}

/// A mounted file system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct MountedFileSystem {
    device: DeviceNumber,
    /// Directory of the file system that is mounted.
    pub(super) root: PathBuf,
    /// Mount point.
    pub(super) point: PathBuf,
    pub(super) kind: String,
    source: PathBuf,
    /// Subvolume of btrfs that contains the mounted directory.
    subvolume: Option<PathBuf>,
    /// Options of the file system, as the kernel prints them.
    options: String,
}

/// Inode number that the root directory of each btrfs subvolume has, and no other directory (`BTRFS_FIRST_FREE_OBJECTID`).
const SUBVOLUME_ROOT: u64 = 256;

impl MountedFileSystem {
    /// Returns the mount that a path lies on. The path must have no symbolic links.
    pub(super) fn find_for_path<'a>(mounts: &'a [Self], path: &Path) -> Option<&'a Self> {
        let holding = mounts.iter().filter(|mount| path.starts_with(&mount.point));
        // The last mount on a directory hides earlier mounts there.
        holding.max_by_key(|mount| mount.point.as_os_str().len())
    }

    /// Returns the value of the option `key` of the file system.
    pub(super) fn option(&self, key: &str) -> Option<PathBuf> {
        let mut options = self.options.split(',');
        let value = options.find_map(|option| option.strip_prefix(key)?.strip_prefix('='))?;
        Some(unescape(value.as_bytes()))
    }

    /// Returns whether the mount options contain the flag `key`, such as `ro`.
    pub(super) fn has_option(&self, key: &str) -> bool {
        self.options.split(',').any(|option| option == key)
    }

    /// Returns the block device of the file system. File systems such as btrfs report an anonymous device number; their
    /// device is found by the mount's source.
    pub(super) fn block_device(&self) -> Option<DeviceNumber> {
        if self.device.major() != 0 {
            return Some(self.device);
        }
        if !self.source.is_absolute() {
            return None;
        }
        let metadata = fs::metadata(&self.source).ok()?;
        let is_device = metadata.file_type().is_block_device();
        is_device.then(|| DeviceNumber(metadata.rdev()))
    }

    /// Returns the directory within which a file's inode number is unique: the file's subvolume on btrfs, otherwise the root of
    /// the file system. The result is the same through any bind mount.
    pub(super) fn inode_scope(&self, path: &Path) -> PathBuf {
        if self.kind != "btrfs" {
            return "/".into();
        }
        // A subvolume below the mounted directory has no entry in the list of mounts.
        let below = path.strip_prefix(&self.point).unwrap_or(path);
        let mut dirs = below.ancestors().skip(1);
        let nested = dirs.find(|dir| {
            let metadata = fs::metadata(self.point.join(dir));
            *dir != Path::new("") && metadata.is_ok_and(|found| found.ino() == SUBVOLUME_ROOT)
        });
        let subvolume = self.subvolume.as_ref().unwrap_or(&self.root);
        nested.map_or_else(|| subvolume.clone(), |dir| self.root.join(dir))
    }

    /// Returns the mount's source without the mounted directory, which the kernel appends to the source for NFS.
    pub(super) fn source_root(&self) -> String {
        let source = self.source.display().to_string();
        let dir = self.root.to_string_lossy();
        match source.strip_suffix(&*dir) {
            Some(whole) if self.kind.starts_with("nfs") && dir != "/" => whole.to_owned(),
            _ => source,
        }
    }
}

/// Rule for choosing among the names that a device or file may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DeviceNaming {
    /// The best name that the device or file has now.
    Current,
    /// The name by the UUID of the file's file system, even if the disk has a lasting name.
    ByFileSystem,
    /// The lasting name of a disk at this index. Index 0 is the best name.
    Nth(usize),
    /// The name by vendor and serial number of an NVMe drive. It does not change if firmware reports another NQN or model.
    BySerial,
    /// The name for this boot, which a disk without any identifier has.
    ByBoot,
}

impl DeviceNaming {
    /// Rules that give the names, other than the current name, under which a ledger may know a drive.
    pub(super) const ALTERNATIVES: [Self; 5] = [
        Self::ByFileSystem,
        Self::Nth(1),
        Self::Nth(2),
        Self::BySerial,
        Self::ByBoot,
    ];
}

/// Access to the kernel's files in sysfs and proc.
#[derive(Clone, Debug)]
pub(crate) struct KernelFiles {
    root: PathBuf,
    pub(super) naming: DeviceNaming,
}

impl KernelFiles {
    /// Returns access to sysfs and proc of this machine.
    pub(crate) fn host() -> Self {
        Self {
            root: "/".into(),
            naming: DeviceNaming::Current,
        }
    }

    /// Returns access to files below `root` in place of sysfs and proc.
    #[cfg(test)]
    pub(super) fn with_root(root: &Path) -> Self {
        Self {
            root: root.to_owned(),
            naming: DeviceNaming::Current,
        }
    }

    /// Returns a copy that chooses names by `naming`.
    pub(super) fn with_naming(&self, naming: DeviceNaming) -> Self {
        Self {
            naming,
            ..self.clone()
        }
    }

    /// Returns all block devices except partitions.
    pub(super) fn block_devices(&self) -> Vec<DeviceNumber> {
        let devices = dir_entries(&self.root.join("sys/dev/block")).into_iter();
        let devices = devices.filter(|path| !path.join("partition").exists());
        devices
            .filter_map(|path| DeviceNumber::parse(path.file_name()?.to_str()?))
            .collect()
    }

    fn read_file(&self, path: &str) -> Option<Vec<u8>> {
        fs::read(self.root.join(path)).ok()
    }

    fn device_dir(&self, device: DeviceNumber) -> PathBuf {
        self.root.join(format!("sys/dev/block/{device}"))
    }

    /// Returns an attribute of a block device; `None` if it is missing or blank.
    pub(super) fn attribute(&self, device: DeviceNumber, name: &str) -> Option<String> {
        let bytes = fs::read(self.device_dir(device).join(name)).ok()?;
        let text = String::from_utf8_lossy(&bytes);
        let text = text.trim_matches(|c: char| c.is_whitespace() || c == '\0');
        (!text.is_empty()).then(|| text.to_owned())
    }

    pub(super) fn is_block_device(&self, device: DeviceNumber) -> bool {
        device.major() != 0 && self.device_dir(device).join("dev").exists()
    }

    /// Returns whether a block device has its content in memory, so that a reboot loses it: a RAM disk or zram.
    pub(super) fn is_memory_backed(&self, device: DeviceNumber) -> bool {
        // Major number (Documentation/admin-guide/devices.txt).
        const RAM_DISK: u32 = 1;
        device.major() == RAM_DISK || self.attribute(device, "comp_algorithm").is_some()
    }

    /// Returns whether the device is a device-mapper device.
    pub(super) fn is_device_mapper(&self, device: DeviceNumber) -> bool {
        self.attribute(device, "dm/name").is_some()
    }

    /// Returns the disk that has a partition; `None` for a device that is no partition.
    pub(super) fn parent(&self, device: DeviceNumber) -> Option<DeviceNumber> {
        let dir = fs::canonicalize(self.device_dir(device)).ok()?;
        let text = fs::read_to_string(dir.parent()?.join("dev")).ok()?;
        DeviceNumber::parse(&text)
    }

    /// Returns the devices that directly store a device's bytes, such as the members of a RAID.
    pub(super) fn slaves(&self, device: DeviceNumber) -> Vec<DeviceNumber> {
        let number = |path: PathBuf| {
            let text = fs::read_to_string(path.join("dev")).ok()?;
            DeviceNumber::parse(&text)
        };
        let slaves = dir_entries(&self.device_dir(device).join("slaves"));
        slaves.into_iter().filter_map(number).collect()
    }

    /// Returns the table of a device-mapper device, if this process may read it.
    pub(super) fn dm_table(&self, device: DeviceNumber) -> Option<Vec<DeviceMapperTarget>> {
        #[cfg(test)]
        if self.root != Path::new("/") {
            let text = self.read_file(&format!("tables/{device}"))?;
            return String::from_utf8_lossy(&text)
                .lines()
                .map(parse_target)
                .collect();
        }
        let table = device_mapper::read_table(device.major(), libc::minor(device.0));
        let unread = |error| {
            // A device whose table is unknown becomes a base that overlaps all devices below it.
            log::info!("The table of the device {device} cannot be read: {error}");
        };
        table.map_err(unread).ok()
    }

    /// Returns the names of the devices on top of a device or its partitions.
    pub(super) fn holders(&self, device: DeviceNumber) -> Vec<String> {
        let dir = self.device_dir(device);
        let partitions = dir_entries(&dir)
            .into_iter()
            .filter(|path| path.join("partition").exists());
        let holders = std::iter::once(dir.clone())
            .chain(partitions)
            .flat_map(|dir| dir_entries(&dir.join("holders")));
        let mut names: Vec<_> = holders
            .filter_map(|path| Some(path.file_name()?.to_string_lossy().into_owned()))
            .collect();
        names.sort();
        names
    }

    /// Returns the identifier of this boot.
    pub(super) fn boot_id(&self) -> String {
        let id = self.read_file("proc/sys/kernel/random/boot_id");
        let id = id.map(|bytes| String::from_utf8_lossy(&bytes).trim().to_owned());
        let id = id.filter(|id| !id.is_empty());
        id.unwrap_or_else(|| UNKNOWN_BOOT.to_owned())
    }

    /// Returns the mounts that this process sees.
    pub(super) fn mounts(&self) -> Vec<MountedFileSystem> {
        let text = self.read_file("proc/self/mountinfo").unwrap_or_default();
        let lines = text.split(|byte| *byte == b'\n');
        lines.filter_map(parse_mount).collect()
    }

    /// Returns whether a path without symbolic links is on tmpfs.
    pub(super) fn is_on_tmpfs(&self, path: &Path) -> bool {
        MountedFileSystem::find_for_path(&self.mounts(), path)
            .is_some_and(|mount| mount.kind == "tmpfs")
    }

    /// Returns the files and devices that are used for swap.
    pub(super) fn swaps(&self) -> Vec<PathBuf> {
        let text = self.read_file("proc/swaps").unwrap_or_default();
        let lines = text.split(|byte| *byte == b'\n').skip(1);
        let first = |line: &[u8]| Some(unescape(line.split(u8::is_ascii_whitespace).next()?));
        let named = lines.filter(|line| !line.is_empty());
        named.filter_map(first).collect()
    }
}

fn dir_entries(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten();
    entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .collect()
}

/// Parses a line of mountinfo (`proc_pid_mountinfo(5)`).
fn parse_mount(line: &[u8]) -> Option<MountedFileSystem> {
    let mut fields = line.split(|byte| *byte == b' ');
    let device = fields.nth(2)?;
    let (root, point) = (fields.next()?, fields.next()?);
    let mut rest = fields.skip_while(|field| *field != b"-").skip(1);
    let (kind, source) = (rest.next()?, rest.next()?);
    // The line is split at the last such option, because the value may contain commas.
    let options = String::from_utf8_lossy(rest.next().unwrap_or_default());
    let subvolume = options.split_once(",subvol=");
    let subvolume = subvolume.map(|(_, dir)| unescape(dir.as_bytes()));
    Some(MountedFileSystem {
        device: DeviceNumber::parse(std::str::from_utf8(device).ok()?)?,
        root: unescape(root),
        point: unescape(point),
        kind: String::from_utf8_lossy(kind).into_owned(),
        source: unescape(source),
        subvolume,
        options: options.into_owned(),
    })
}

/// Decodes the kernel's escapes in names: a backslash and three octal digits.
fn unescape(text: &[u8]) -> PathBuf {
    let mut name = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((&first, after)) = rest.split_first() {
        let octal = after
            .get(..3)
            .filter(|_| first == b'\\')
            .and_then(|digits| {
                let digits = std::str::from_utf8(digits).ok()?;
                u8::from_str_radix(digits, 8).ok()
            });
        match octal {
            Some(byte) => {
                name.push(byte);
                rest = &after[3..];
            }
            None => {
                name.push(first);
                rest = after;
            }
        }
    }
    OsString::from_vec(name).into()
}

/// Parses a target from a line of `dmsetup table`, the format in which tests define tables.
#[cfg(test)]
fn parse_target(line: &str) -> Option<DeviceMapperTarget> {
    let mut words = line.splitn(4, ' ');
    Some(DeviceMapperTarget {
        start: words.next()?.parse().ok()?,
        sectors: words.next()?.parse().ok()?,
        kind: words.next()?.to_owned(),
        parameters: words.next().unwrap_or_default().to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStrExt;

    use super::*;

    #[test]
    fn mounts_and_swaps_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let proc = dir.path().join("proc");
        fs::create_dir_all(proc.join("self")).unwrap();
        fs::write(
            proc.join("self/mountinfo"),
            "36 35 98:5 /sub /mnt\\040two rw,noatime master:1 shared:7 - ext4 /dev/root rw,errors=continue\n\
             malformed\n\
             37 35 0:40 / / rw - overlay overlay rw\n",
        )
        .unwrap();
        fs::write(
            proc.join("swaps"),
            "Filename\tType\tSize\n/swap\\040file   file 1 2 3\n/dev/sda2 partition 1 2 3\n",
        )
        .unwrap();
        let system = KernelFiles::with_root(dir.path());
        let mounts = system.mounts();
        assert_eq!(mounts.len(), 2);
        assert_eq!(mounts[0].device.to_string(), "98:5");
        assert_eq!(mounts[0].point.as_os_str().as_bytes(), b"/mnt two");
        assert_eq!(
            (mounts[0].root.to_str(), mounts[0].kind.as_str()),
            (Some("/sub"), "ext4")
        );
        assert_eq!(mounts[0].block_device(), Some(mounts[0].device));
        assert_eq!(mounts[1].block_device(), None);
        let swaps: [PathBuf; 2] = ["/swap file".into(), "/dev/sda2".into()];
        assert_eq!(system.swaps(), swaps);
        let nothing = KernelFiles::with_root(&dir.path().join("none"));
        assert_eq!(nothing.boot_id(), UNKNOWN_BOOT);
        fs::create_dir_all(proc.join("sys/kernel/random")).unwrap();
        fs::write(proc.join("sys/kernel/random/boot_id"), "\n").unwrap();
        assert_eq!(system.boot_id(), UNKNOWN_BOOT);
        assert!(nothing.mounts().is_empty() && nothing.swaps().is_empty());
    }
}
