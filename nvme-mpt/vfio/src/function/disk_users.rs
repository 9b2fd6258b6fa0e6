//! Users of the disks of a controller that is bound to the kernel's `nvme` driver.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::kernel_controller::BlockDevice;
use super::{HostRoot, IommuGroup, KernelController, PciFunctionError};

/// A user of a disk, who would lose it if the disk's controller were unbound from the host's driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DiskUser {
    /// The device is mounted.
    Mounted {
        /// Name of the disk or partition.
        device: String,
        /// Mount point.
        mount_point: String,
    },
    /// The device is swap space.
    Swap {
        /// Name of the disk or partition.
        device: String,
    },
    /// Another block device is built on the device: RAID, LVM, encryption, multipath.
    Holder {
        /// Name of the disk or partition.
        device: String,
        /// Name of the block device that is built on this device.
        holder: String,
    },
    /// A process has the device open.
    Process {
        /// Name of the disk, partition or controller.
        device: String,
        /// Process ID.
        pid: u32,
        /// Name of the process.
        command: String,
    },
    /// The kernel reports exclusive use by a user that this process cannot see.
    Exclusive {
        /// Name of the disk, or path of the IOMMU group's file.
        device: String,
    },
}

impl DiskUser {
    /// Returns whether an operator may take the disk from this user. This is true for a process that only has the device open;
    /// all other users would lose data.
    #[must_use]
    pub fn can_be_overridden(&self) -> bool {
        matches!(self, Self::Process { .. })
    }
}

impl fmt::Display for DiskUser {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mounted {
                device,
                mount_point: on,
            } => write!(f, "{device} is mounted on {on}"),
            Self::Swap { device } => write!(f, "{device} is swap space"),
            Self::Holder { device, holder } => write!(f, "{device} is part of {holder}"),
            Self::Process {
                device,
                pid,
                command,
            } => write!(f, "{device} is open in process {pid} ({command})"),
            Self::Exclusive { device } => write!(
                f,
                "{device} is in exclusive use by a process that cannot be seen from here, as in another namespace"
            ),
        }
    }
}

/// Error of a search for the users of a disk.
#[derive(Debug, thiserror::Error)]
pub enum DiskUsersError {
    /// A file of the kernel cannot be read.
    #[error(transparent)]
    Kernel(#[from] PciFunctionError),
    /// The disk cannot be opened.
    #[error("Cannot see whether {} is in use; run as root", path.display())]
    Open {
        /// File of the disk.
        path: PathBuf,
        /// Error of the open.
        source: io::Error,
    },
}

/// Exclusive claim on the disks of a controller, so that no program can mount or use them while an operator binds another
/// driver.
#[derive(Debug)]
pub struct DiskClaim {
    /// Disks opened with O_EXCL, the flag that file systems, swap and RAID use.
    _disks: Vec<File>,
}

impl KernelController {
    /// Returns the users of the controller's disks, as far as this process can see them.
    ///
    /// # Errors
    /// A file of the kernel cannot be read.
    pub fn users(&self, root: &HostRoot) -> Result<Vec<DiskUser>, PciFunctionError> {
        let mut devices = Vec::new();
        for namespace in &self.namespaces {
            devices.extend(namespace.block_devices()?);
        }
        let mut users = mounts(root, &devices)?;
        users.extend(swaps(root, &devices)?);
        for BlockDevice { name, holders, .. } in &devices {
            users.extend(holders.iter().map(|holder| DiskUser::Holder {
                device: name.clone(),
                holder: holder.clone(),
            }));
        }
        users.extend(processes(root, &device_numbers(root, self, &devices)));
        Ok(users)
    }

    /// Claims the controller's disks until the result is dropped, so that they cannot be mounted or used for swap. Also
    /// returns the present users.
    ///
    /// # Errors
    /// A file of the kernel cannot be read, or a disk cannot be opened.
    pub fn claim_disks(
        &self,
        root: &HostRoot,
    ) -> Result<(DiskClaim, Vec<DiskUser>), DiskUsersError> {
        let mut disks = Vec::new();
        let mut exclusive = Vec::new();
        for namespace in &self.namespaces {
            let path = root.dev.join(&namespace.disk);
            let opened = OpenOptions::new()
                .read(true)
                .custom_flags(libc::O_EXCL | libc::O_CLOEXEC | libc::O_NONBLOCK)
                .open(&path);
            match opened {
                Ok(disk) => disks.push(disk),
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {
                    exclusive.push(namespace.disk.clone());
                }
                // The disk was removed after the listing, so it has no user.
                Err(error) if matches!(error.raw_os_error(), Some(libc::ENXIO | libc::ENODEV)) => {}
                Err(source) => return Err(DiskUsersError::Open { path, source }),
            }
        }
        let mut users = self.users(root)?;
        for device in exclusive {
            // `Exclusive` is added only if no other entry explains the exclusive use.
            let explained = users.iter().any(|user| match user {
                DiskUser::Mounted { device: part, .. }
                | DiskUser::Swap { device: part }
                | DiskUser::Holder { device: part, .. } => is_part_of(part, &device),
                DiskUser::Process { .. } | DiskUser::Exclusive { .. } => false,
            });
            if !explained {
                users.push(DiskUser::Exclusive { device });
            }
        }
        Ok((DiskClaim { _disks: disks }, users))
    }
}

impl IommuGroup {
    /// Returns the processes that have the file of the group open, or the node of one of its functions, as far as this process can
    /// see them.
    #[must_use]
    pub fn users(&self, root: &HostRoot) -> Vec<DiskUser> {
        let members = self.members.iter();
        let nodes = members.filter_map(|member| root.device_node(&member.address));
        let paths = std::iter::once(root.group_file(self.number)).chain(nodes);
        let names = paths.filter_map(|path| {
            let file = fs::metadata(&path).ok()?;
            let is_device = file.file_type().is_char_device();
            is_device.then(|| ((false, file.rdev()), path.display().to_string()))
        });
        processes(root, &names.collect::<DeviceNumberNames>())
    }

    /// Returns the users of the group as [`Self::users`] does, and also tries to open the group. The kernel lets only one
    /// process open a group, so EBUSY shows that the group has a user, even one that this process cannot see. The attempt may
    /// make an open by another process fail, so this is called only if the group is about to be taken from all its users.
    #[must_use]
    pub fn exclusive_users(&self, root: &HostRoot) -> Vec<DiskUser> {
        let path = root.group_file(self.number);
        let opened = OpenOptions::new().read(true).write(true).open(&path);
        let is_taken = opened.is_err_and(|error| error.raw_os_error() == Some(libc::EBUSY));
        let mut users = self.users(root);
        if is_taken && users.is_empty() {
            let device = path.display().to_string();
            users.push(DiskUser::Exclusive { device });
        }
        users
    }
}

/// Returns whether `device` is the disk, or one of its partitions, such as `nvme0n1p2`.
fn is_part_of(device: &str, disk: &str) -> bool {
    device
        .strip_prefix(disk)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('p'))
}

fn read_proc(path: PathBuf) -> Result<String, PciFunctionError> {
    fs::read_to_string(&path).map_err(|source| PciFunctionError::Read { path, source })
}

/// Finds mounts of the devices in the mount namespaces of this process and of all other processes that it may inspect.
fn mounts(root: &HostRoot, devices: &[BlockDevice]) -> Result<Vec<DiskUser>, PciFunctionError> {
    let own = read_proc(root.proc.join("self/mountinfo"))?;
    let mut users = mounts_in(root, devices, &own);
    let own = fs::read_link(root.proc.join("self/ns/mnt"));
    let mut seen: BTreeSet<PathBuf> = own.into_iter().collect();
    for pid in pids(root) {
        let dir = root.proc.join(pid.to_string());
        // The link may be missing: the process has ended, or it belongs to another user and hides its namespace.
        let namespace = fs::read_link(dir.join("ns/mnt"));
        if !namespace.is_ok_and(|namespace| seen.insert(namespace)) {
            continue;
        }
        let text = fs::read_to_string(dir.join("mountinfo")).unwrap_or_default();
        for user in mounts_in(root, devices, &text) {
            let DiskUser::Mounted {
                device,
                mount_point: on,
            } = user
            else {
                continue;
            };
            // Most mount namespaces repeat the host's mounts, which are listed once.
            let is_known = users.iter().any(
                |known| matches!(known, DiskUser::Mounted { device: of, .. } if *of == device),
            );
            if !is_known {
                let command = process_name(&dir);
                let on = format!("{on} in the mount namespace of process {pid} ({command})");
                users.push(DiskUser::Mounted {
                    device,
                    mount_point: on,
                });
            }
        }
    }
    Ok(users)
}

fn mounts_in(root: &HostRoot, devices: &[BlockDevice], text: &str) -> Vec<DiskUser> {
    let mut users = Vec::new();
    for line in text.lines() {
        // proc_pid_mountinfo(5): ID, parent, device number, root, mount point, … - type, source.
        let mut fields = line.split(' ');
        let (Some(number), Some(on)) = (fields.nth(2), fields.nth(1)) else {
            continue;
        };
        // Some file systems have their own device numbers and report one of their disks as source.
        let source = line
            .split_once(" - ")
            .and_then(|(_, rest)| rest.split(' ').nth(1));
        let device = devices.iter().find(|device| {
            device.number == number || source.is_some_and(|source| is_file_of(root, source, device))
        });
        if let Some(device) = device {
            users.push(DiskUser::Mounted {
                device: device.name.clone(),
                mount_point: unescape(on),
            });
        }
    }
    users
}

/// Returns the IDs of all processes, ascending.
fn pids(root: &HostRoot) -> BTreeSet<u32> {
    let dirs = fs::read_dir(&root.proc).into_iter().flatten().flatten();
    let names = dirs.map(|dir| dir.file_name());
    names
        .filter_map(|name| name.to_str()?.parse().ok())
        .collect()
}

fn swaps(root: &HostRoot, devices: &[BlockDevice]) -> Result<Vec<DiskUser>, PciFunctionError> {
    let path = root.proc.join("swaps");
    // A kernel without swap has no such file.
    let text = match fs::read_to_string(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        text => text.map_err(|source| PciFunctionError::Read { path, source })?,
    };
    let files = text
        .lines()
        .filter_map(|line| line.split_whitespace().next());
    Ok(files
        .filter_map(|file| devices.iter().find(|device| is_file_of(root, file, device)))
        .map(|device| DiskUser::Swap {
            device: device.name.clone(),
        })
        .collect())
}

/// Returns whether a path that the kernel reports is the file of a device, or a symbolic link to it.
fn is_file_of(root: &HostRoot, path: &str, device: &BlockDevice) -> bool {
    let Some(name) = path.strip_prefix("/dev/") else {
        return false;
    };
    name == device.name
        || fs::canonicalize(root.dev.join(unescape(name)))
            .is_ok_and(|file| file.file_name().is_some_and(|name| *name == *device.name))
}

/// Decodes the octal escapes that the kernel writes for white space.
fn unescape(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, after @ ..] = rest {
        let octal = after.first_chunk::<3>().filter(|_| *first == b'\\');
        let value = octal.and_then(|digits| {
            let digits = std::str::from_utf8(digits).ok()?;
            u8::from_str_radix(digits, 8).ok()
        });
        bytes.push(value.unwrap_or(*first));
        rest = if value.is_some() { &after[3..] } else { after };
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Returns the processes that have a device open, except this process. Processes of other users are visible to root only.
fn processes(root: &HostRoot, numbers: &DeviceNumberNames) -> Vec<DiskUser> {
    let mut users = Vec::new();
    let mut pids = pids(root);
    pids.remove(&std::process::id());
    for pid in pids {
        let dir = root.proc.join(pid.to_string());
        for device in open_devices(&dir, numbers) {
            users.push(DiskUser::Process {
                device: device.clone(),
                pid,
                command: process_name(&dir),
            });
        }
    }
    users
}

/// Returns the name of the process with this directory in `/proc`; an empty name if it cannot be read.
fn process_name(dir: &Path) -> String {
    let comm = fs::read_to_string(dir.join("comm")).unwrap_or_default();
    comm.trim_end().to_owned()
}

/// Names of devices, by kind and device number. The kind is true for block devices. Character devices are the controller and
/// the passthrough devices of its namespaces.
type DeviceNumberNames = BTreeMap<(bool, u64), String>;

fn device_numbers(
    root: &HostRoot,
    controller: &KernelController,
    devices: &[BlockDevice],
) -> DeviceNumberNames {
    let mut numbers = DeviceNumberNames::new();
    for BlockDevice { name, number, .. } in devices {
        let parts = number.split_once(':');
        let parsed = parts.and_then(|(major, minor)| {
            Some(libc::makedev(major.parse().ok()?, minor.parse().ok()?))
        });
        numbers.extend(parsed.map(|number| ((true, number), name.clone())));
    }
    let generic = controller.namespaces.iter();
    let generic = generic.filter_map(|namespace| {
        let rest = namespace.disk.strip_prefix("nvme")?;
        Some(format!("ng{rest}"))
    });
    for name in generic.chain([controller.name.clone()]) {
        if let Ok(file) = fs::metadata(root.dev.join(&name))
            && file.file_type().is_char_device()
        {
            numbers.insert((false, file.rdev()), name);
        }
    }
    numbers
}

/// Returns the devices among `numbers` that a process has open, without duplicates.
fn open_devices<'n>(process: &Path, numbers: &'n DeviceNumberNames) -> Vec<&'n String> {
    let mut open = Vec::new();
    let Ok(files) = fs::read_dir(process.join("fd")) else {
        return open;
    };
    for file in files.flatten() {
        let Ok(file) = fs::metadata(file.path()) else {
            continue;
        };
        let kind = file.file_type();
        if kind.is_block_device() || kind.is_char_device() {
            let found = numbers.get(&(kind.is_block_device(), file.rdev()));
            open.extend(found.filter(|name| !open.contains(name)));
        }
    }
    open
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blanks_in_mount_points_are_octal() {
        assert_eq!(unescape(r"/mnt/a\040b\134c"), r"/mnt/a b\c");
        assert_eq!(unescape(r"\04"), r"\04");
        assert_eq!(unescape(r"\999"), r"\999");
        assert_eq!(unescape(""), "");
    }

    #[test]
    fn partitions_belong_to_their_disk() {
        assert!(is_part_of("nvme0n1", "nvme0n1") && is_part_of("nvme0n1p2", "nvme0n1"));
        assert!(!is_part_of("nvme0n12", "nvme0n1") && !is_part_of("nvme0n1", "nvme0n1p1"));
    }
}
