//! NVMe functions of this host, as the kernel shows them in sysfs.

mod address;
mod disk_users;
mod kernel_controller;
mod passthrough;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

pub use address::{PciAddress, PciAddressError};
pub use disk_users::{DiskClaim, DiskUser, DiskUsersError};
pub use kernel_controller::{KernelController, KernelNamespace};
pub use passthrough::DescribeError;

/// Class code of NVMe controllers (NVMe over PCIe Transport 1.0, section 2.1.1: mass storage,
/// non-volatile memory, NVM Express I/O controller).
const CLASS_NVME: u32 = 0x01_0802;

/// Name of the driver that gives user space access to a function.
pub const VFIO_PCI: &str = "vfio-pci";

/// Mount points of the kernel's file systems, which tests replace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostRoot {
    /// Mount point of sysfs, normally `/sys`.
    pub sys: PathBuf,
    /// Mount point of procfs, normally `/proc`.
    pub proc: PathBuf,
    /// Directory of the device files, normally `/dev`.
    pub dev: PathBuf,
}

impl Default for HostRoot {
    /// Returns the mount points of this host.
    fn default() -> Self {
        Self {
            sys: "/sys".into(),
            proc: "/proc".into(),
            dev: "/dev".into(),
        }
    }
}

impl HostRoot {
    /// Returns the sysfs directory of a function.
    #[must_use]
    pub fn function_dir(&self, address: PciAddress) -> PathBuf {
        self.sys.join(format!("bus/pci/devices/{address}"))
    }

    /// Returns the file of an IOMMU group, which only one process can open at a time.
    #[must_use]
    pub fn group_file(&self, group: u32) -> PathBuf {
        self.dev.join(format!("vfio/{group}"))
    }

    /// Returns the VFIO node of the function at a PCI address (`VFIO_DEVICE_CDEV`); `None` if the kernel has no such nodes, or if
    /// the function has another driver.
    #[must_use]
    pub fn device_node(&self, address: &str) -> Option<PathBuf> {
        let dir = self.sys.join(format!("bus/pci/devices/{address}/vfio-dev"));
        let entry = fs::read_dir(dir).ok()?.next()?.ok()?;
        let node = self.dev.join("vfio/devices").join(entry.file_name());
        node.exists().then_some(node)
    }
}

/// Error of reading a PCI function from sysfs.
#[derive(Debug, thiserror::Error)]
pub enum PciFunctionError {
    /// The host has no such function.
    #[error(
        "There is no PCI function {0}; `nvme-mpt drives` lists the NVMe functions of this host"
    )]
    NotFound(PciAddress),
    /// A file of the kernel cannot be read.
    #[error("Cannot read {}", path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// Error of the read.
        source: io::Error,
    },
    /// A file of the kernel has unknown content.
    #[error("{} has an unknown form: `{text}`", path.display())]
    Form {
        /// Path of the file.
        path: PathBuf,
        /// Content that was read.
        text: String,
    },
}

/// Functions that the IOMMU cannot isolate from each other, so that only one process can use them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IommuGroup {
    /// Number of the group.
    pub number: u32,
    /// All functions of the group.
    pub members: Vec<IommuGroupMember>,
}

/// A function as a member of an IOMMU group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IommuGroupMember {
    /// Address in the kernel's form.
    pub address: String,
    /// Driver that the function is bound to; `None` for no driver.
    pub driver: Option<String>,
    /// True for a bridge, which does no DMA itself.
    pub is_bridge: bool,
}

/// State of a PCI function at the time when it was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PciFunction {
    /// PCI address.
    pub address: PciAddress,
    /// Vendor ID.
    pub vendor: u16,
    /// Device ID.
    pub device: u16,
    /// Class code.
    pub class: u32,
    /// Driver that the function is bound to; `None` for no driver.
    pub driver: Option<String>,
    /// The only driver that may bind the function; `None` if `driver_override` is not set.
    pub driver_override: Option<String>,
    /// IOMMU group; `None` without an IOMMU.
    pub iommu_group: Option<IommuGroup>,
    /// NUMA node that the function is attached to; `None` if unknown.
    pub numa_node: Option<u32>,
    /// State of the kernel's `nvme` driver for the function; `None` if another driver is bound.
    pub controller: Option<KernelController>,
}

impl PciFunction {
    /// Reads one function of any class.
    ///
    /// # Errors
    /// The host has no such function, or sysfs has unknown content.
    pub fn find(root: &HostRoot, address: PciAddress) -> Result<Self, PciFunctionError> {
        let dir = root.function_dir(address);
        if !dir.exists() {
            return Err(PciFunctionError::NotFound(address));
        }
        let driver = link_name(&dir.join("driver"))?;
        let controller = match driver.as_deref() {
            Some("nvme") => kernel_controller::read_controller(root, &dir)?,
            _ => None,
        };
        Ok(Self {
            address,
            vendor: read_id(&dir.join("vendor"))?,
            device: read_id(&dir.join("device"))?,
            class: read_hex(&dir.join("class"))?,
            driver,
            driver_override: read_optional(&dir.join("driver_override"))?
                .filter(|name| name != "(null)" && !name.is_empty()),
            iommu_group: iommu_group(&dir)?,
            // The kernel reports -1 without NUMA or if the node is unknown.
            numa_node: read_optional(&dir.join("numa_node"))?.and_then(|node| node.parse().ok()),
            controller,
        })
    }

    /// Lists the NVMe functions of the host, sorted by address.
    ///
    /// # Errors
    /// See [`find`](Self::find). Functions that disappear during the call are skipped.
    pub fn list(root: &HostRoot) -> Result<Vec<Self>, PciFunctionError> {
        let dir = root.sys.join("bus/pci/devices");
        let mut addresses: Vec<PciAddress> = entries(&dir)?
            .iter()
            .filter_map(|name| name.parse().ok())
            .collect();
        addresses.sort();
        let mut functions = Vec::new();
        for address in addresses {
            let class = read_hex(&root.function_dir(address).join("class"));
            match class {
                Ok(class) if class != CLASS_NVME => continue,
                Ok(_) => {}
                Err(error) if error.is_gone() => continue,
                Err(error) => return Err(error),
            }
            match Self::find(root, address) {
                Ok(function) => functions.push(function),
                Err(error) if error.is_gone() => {}
                Err(error) => return Err(error),
            }
        }
        Ok(functions)
    }

    /// Returns whether the function is an NVMe controller.
    #[must_use]
    pub fn is_nvme(&self) -> bool {
        self.class == CLASS_NVME
    }

    /// Returns the other functions of the IOMMU group that are bound to a driver of the host, each with its driver. Such
    /// functions make the group unusable from user space.
    pub fn others_with_host_drivers(&self) -> impl Iterator<Item = (&str, &str)> {
        let own = self.address.to_string();
        let members = self.iommu_group.iter().flat_map(|group| &group.members);
        members.filter_map(move |member| {
            let driver = member.driver.as_deref()?;
            let harmless = member.is_bridge || is_user_space_driver(driver);
            (!harmless && member.address != own).then_some((member.address.as_str(), driver))
        })
    }
}

impl PciFunctionError {
    /// Returns whether the error shows that the function or file no longer exists.
    fn is_gone(&self) -> bool {
        match self {
            Self::NotFound(_) => true,
            // ENODEV: the device was removed while the file was open.
            Self::Read { source, .. } => matches!(
                source.raw_os_error(),
                Some(libc::ENOENT | libc::ENOTDIR | libc::ENODEV)
            ),
            Self::Form { .. } => false,
        }
    }
}

/// Returns whether a function with this driver may be in a group that user space uses. This is true for the drivers of VFIO,
/// and for `pci-stub`, by which a function does no DMA.
fn is_user_space_driver(driver: &str) -> bool {
    driver.contains("vfio") || driver == "pci-stub"
}

fn iommu_group(dir: &Path) -> Result<Option<IommuGroup>, PciFunctionError> {
    let link = dir.join("iommu_group");
    let Some(name) = link_name(&link)? else {
        return Ok(None);
    };
    let number = name.parse().map_err(|_| PciFunctionError::Form {
        path: link.clone(),
        text: name,
    })?;
    let mut members = Vec::new();
    let devices = link.join("devices");
    for address in entries(&devices)? {
        let dir = devices.join(&address);
        // Devices on other buses have no class and do not count as bridges.
        let class = read_optional(&dir.join("class"))?.unwrap_or_default();
        members.push(IommuGroupMember {
            driver: link_name(&dir.join("driver"))?,
            // Base class 06h: bridge.
            is_bridge: class.starts_with("0x06"),
            address,
        });
    }
    members.sort_by(|one, other| one.address.cmp(&other.address));
    Ok(Some(IommuGroup { number, members }))
}

/// Reads a file without trailing white space.
fn read(path: &Path) -> Result<String, PciFunctionError> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(text.trim_end().to_owned()),
        Err(source) => Err(PciFunctionError::Read {
            path: path.to_owned(),
            source,
        }),
    }
}

/// Reads a file without trailing white space; `None` if the file does not exist.
fn read_optional(path: &Path) -> Result<Option<String>, PciFunctionError> {
    match read(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.is_gone() => Ok(None),
        Err(error) => Err(error),
    }
}

/// Reads a hexadecimal number, such as `0x010802`.
fn read_hex(path: &Path) -> Result<u32, PciFunctionError> {
    let text = read(path)?;
    text.strip_prefix("0x")
        .and_then(|digits| u32::from_str_radix(digits, 16).ok())
        .ok_or_else(|| PciFunctionError::Form {
            path: path.to_owned(),
            text,
        })
}

fn read_id(path: &Path) -> Result<u16, PciFunctionError> {
    let value = read_hex(path)?;
    u16::try_from(value).map_err(|_| PciFunctionError::Form {
        path: path.to_owned(),
        text: format!("{value:#x}"),
    })
}

/// Lists the names of a directory's entries. Returns none if the directory does not exist.
fn entries(dir: &Path) -> Result<Vec<String>, PciFunctionError> {
    let failed = |source| PciFunctionError::Read {
        path: dir.to_owned(),
        source,
    };
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(failed(error)),
    };
    let mut names = Vec::new();
    for entry in entries {
        names.push(
            entry
                .map_err(failed)?
                .file_name()
                .to_string_lossy()
                .into_owned(),
        );
    }
    Ok(names)
}

/// Returns the file name of a link's target; `None` if the link does not exist.
fn link_name(path: &Path) -> Result<Option<String>, PciFunctionError> {
    match fs::read_link(path) {
        Ok(target) => Ok(target
            .file_name()
            .map(|name| name.to_string_lossy().into_owned())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(PciFunctionError::Read {
            path: path.to_owned(),
            source,
        }),
    }
}

#[cfg(test)]
mod tests;
