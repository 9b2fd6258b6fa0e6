//! Users of the disks of a controller that the kernel's driver has.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::namespaces::BlockDevice;
use super::{HostRoot, IommuGroup, KernelController, PciFunctionError};

/// Somebody who would lose a disk if its controller were taken from the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DiskUser {
    /// It is mounted.
    Mounted {
        /// The disk or partition.
        device: String,
        /// Place of the use.
        on: String,
    },
    /// The host swaps to it.
    Swap {
        /// The disk or partition.
        device: String,
    },
    /// Another block device is made of it: RAID, LVM, encryption, multipath.
    Holder {
        /// The disk or partition.
        device: String,
        /// That block device.
        holder: String,
    },
    /// A process has it open.
    Process {
        /// The disk, partition or controller.
        device: String,
        /// The process.
        pid: u32,
        /// Its name.
        command: String,
    },
    /// The kernel says that somebody has it to himself, and none of the above is why.
    Exclusive {
        /// The disk, or the IOMMU group's file.
        device: String,
    },
}

impl DiskUser {
    /// Returns whether it is a process that merely has the device open, and the operator may decide that it
    /// can do without. All others would lose data.
    #[must_use]
    pub fn can_be_overridden(&self) -> bool {
        matches!(self, Self::Process { .. })
    }
}

impl fmt::Display for DiskUser {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mounted { device, on } => write!(f, "{device} is mounted on {on}"),
            Self::Swap { device } => write!(f, "{device} is swap space"),
            Self::Holder { device, holder } => write!(f, "{device} is part of {holder}"),
            Self::Process {
                device,
                pid,
                command,
            } => write!(f, "{device} is open in process {pid} ({command})"),
            Self::Exclusive { device } => write!(
                f,
                "{device} is in exclusive use by what cannot be seen from here, as in another namespace"
            ),
        }
    }
}

/// It cannot be found out who uses a disk.
#[derive(Debug, thiserror::Error)]
pub enum DiskUsersError {
    /// The kernel does not tell.
    #[error(transparent)]
    Kernel(#[from] PciFunctionError),
    /// The disk cannot be opened.
    #[error("Cannot see whether {} is in use; run as root", path.display())]
    Open {
        /// Its file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// The disks of a controller, held so that nobody can begin to use them.
#[derive(Debug)]
pub struct DiskClaim {
    /// Open with O_EXCL, as file systems, swap and RAID open them.
    _disks: Vec<File>,
}

impl KernelController {
    /// Returns the users of its disks, as far as this process may know.
    ///
    /// # Errors
    /// The kernel does not report something that is needed.
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

    /// Takes its disks for as long as the result lives, so that nobody can mount one or swap to it.
    /// With those that somebody has, tells who.
    ///
    /// # Errors
    /// The kernel does not report something that is needed.
    pub fn claim(&self, root: &HostRoot) -> Result<(DiskClaim, Vec<DiskUser>), DiskUsersError> {
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
                // It went meanwhile, so nobody uses it.
                Err(error) if matches!(error.raw_os_error(), Some(libc::ENXIO | libc::ENODEV)) => {}
                Err(source) => return Err(DiskUsersError::Open { path, source }),
            }
        }
        let mut users = self.users(root)?;
        for device in exclusive {
            // Say more than that it is in use, where there is more to say.
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
    /// Processes that have the group, and so its functions, as far as this process may know.
    #[must_use]
    pub fn users(&self, root: &HostRoot) -> Vec<DiskUser> {
        let path = root.group_file(self.number);
        let Ok(file) = fs::metadata(&path) else {
            return Vec::new();
        };
        if !file.file_type().is_char_device() {
            return Vec::new();
        }
        let name = path.display().to_string();
        processes(
            root,
            &DeviceNumberNames::from([((false, file.rdev()), name)]),
        )
    }

    /// The same, asking the kernel as well, which lets one process have it at a time. Whoever wants
    /// to have it at this very moment is refused: to be asked before it is taken from all only.
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

/// Returns whether a device is the disk, or a partition of it as in `nvme0n1p2`.
fn is_part_of(device: &str, disk: &str) -> bool {
    device
        .strip_prefix(disk)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('p'))
}

fn read_proc(path: PathBuf) -> Result<String, PciFunctionError> {
    fs::read_to_string(&path).map_err(|source| PciFunctionError::Read { path, source })
}

/// Mounts in the mount namespace of this process, and in those of all others that may be looked at.
fn mounts(root: &HostRoot, devices: &[BlockDevice]) -> Result<Vec<DiskUser>, PciFunctionError> {
    let own = read_proc(root.proc.join("self/mountinfo"))?;
    let mut users = mounts_in(root, devices, &own);
    let own = fs::read_link(root.proc.join("self/ns/mnt"));
    let mut seen: BTreeSet<PathBuf> = own.into_iter().collect();
    for pid in pids(root) {
        let folder = root.proc.join(pid.to_string());
        // A process that ends meanwhile has no namespace, and one of another user shows none.
        let namespace = fs::read_link(folder.join("ns/mnt"));
        if !namespace.is_ok_and(|namespace| seen.insert(namespace)) {
            continue;
        }
        let text = fs::read_to_string(folder.join("mountinfo")).unwrap_or_default();
        for user in mounts_in(root, devices, &text) {
            let DiskUser::Mounted { device, on } = user else {
                continue;
            };
            // Most namespaces have the mounts of the host as well.
            let is_known = users.iter().any(
                |known| matches!(known, DiskUser::Mounted { device: of, .. } if *of == device),
            );
            if !is_known {
                let command = command(&folder);
                let on = format!("{on} in the mount namespace of process {pid} ({command})");
                users.push(DiskUser::Mounted { device, on });
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
        // Some file systems have device numbers of their own, and name one disk of theirs.
        let source = line
            .split_once(" - ")
            .and_then(|(_, rest)| rest.split(' ').nth(1));
        let device = devices.iter().find(|device| {
            device.number == number || source.is_some_and(|source| is_file_of(root, source, device))
        });
        if let Some(device) = device {
            users.push(DiskUser::Mounted {
                device: device.name.clone(),
                on: unescaped(on),
            });
        }
    }
    users
}

/// Returns the numbers of all processes, in order.
fn pids(root: &HostRoot) -> BTreeSet<u32> {
    let folders = fs::read_dir(&root.proc).into_iter().flatten().flatten();
    let names = folders.map(|folder| folder.file_name());
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

/// Returns whether a path, as the kernel tells it, is that of a device: by its name or by a link to it.
fn is_file_of(root: &HostRoot, path: &str, device: &BlockDevice) -> bool {
    let Some(name) = path.strip_prefix("/dev/") else {
        return false;
    };
    name == device.name
        || fs::canonicalize(root.dev.join(unescaped(name)))
            .is_ok_and(|file| file.file_name().is_some_and(|name| *name == *device.name))
}

/// Text of the kernel's, in which blanks are octal numbers.
fn unescaped(text: &str) -> String {
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

/// Processes that have a device open, this one excepted. Those of other users are seen by root only.
fn processes(root: &HostRoot, numbers: &DeviceNumberNames) -> Vec<DiskUser> {
    let mut users = Vec::new();
    let mut pids = pids(root);
    pids.remove(&std::process::id());
    for pid in pids {
        let folder = root.proc.join(pid.to_string());
        for device in open_devices(&folder, numbers) {
            users.push(DiskUser::Process {
                device: device.clone(),
                pid,
                command: command(&folder),
            });
        }
    }
    users
}

/// The name of a process, as far as it tells.
fn command(folder: &Path) -> String {
    let comm = fs::read_to_string(folder.join("comm")).unwrap_or_default();
    comm.trim_end().to_owned()
}

/// Device number → name, of block and character devices: a process may also have the controller
/// open, or a namespace for passing commands through.
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

/// The devices among `numbers` that the process of a folder has open, each once.
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
        assert_eq!(unescaped(r"/mnt/a\040b\134c"), r"/mnt/a b\c");
        assert_eq!(unescaped(r"\04"), r"\04");
        assert_eq!(unescaped(r"\999"), r"\999");
        assert_eq!(unescaped(""), "");
    }

    #[test]
    fn partitions_belong_to_their_disk() {
        assert!(is_part_of("nvme0n1", "nvme0n1") && is_part_of("nvme0n1p2", "nvme0n1"));
        assert!(!is_part_of("nvme0n12", "nvme0n1") && !is_part_of("nvme0n1", "nvme0n1p1"));
    }
}
