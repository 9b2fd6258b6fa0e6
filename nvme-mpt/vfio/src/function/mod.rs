//! The NVMe functions of this host, as its kernel shows them.

mod address;
mod namespaces;
mod passthrough;
mod users;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

pub use address::{PciAddress, PciAddressError};
pub use namespaces::{KernelController, KernelNamespace};
pub use passthrough::DescribeError;
pub use users::{DiskClaim, DiskUser, DiskUsersError};

/// Class code of NVMe controllers (NVMe over PCIe Transport 1.0, section 2.1.1: mass storage,
/// non-volatile memory, NVM Express I/O controller).
const CLASS_NVME: u32 = 0x01_0802;

/// The driver through which user space reaches a function.
pub const VFIO_PCI: &str = "vfio-pci";

/// Root of the kernel's file systems.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostRoot {
    /// `/sys`.
    pub sys: PathBuf,
    /// `/proc`.
    pub proc: PathBuf,
    /// `/dev`.
    pub dev: PathBuf,
}

impl Default for HostRoot {
    /// Those of this host.
    fn default() -> Self {
        Self {
            sys: "/sys".into(),
            proc: "/proc".into(),
            dev: "/dev".into(),
        }
    }
}

impl HostRoot {
    /// The folder of a function.
    #[must_use]
    pub fn function_folder(&self, address: PciAddress) -> PathBuf {
        self.sys.join(format!("bus/pci/devices/{address}"))
    }

    /// The file of an IOMMU group, which one process at a time can open.
    #[must_use]
    pub fn group_file(&self, group: u32) -> PathBuf {
        self.dev.join(format!("vfio/{group}"))
    }
}

/// A function cannot be looked at.
#[derive(Debug, thiserror::Error)]
pub enum PciFunctionError {
    /// There is none.
    #[error(
        "There is no PCI function {0}; `nvme-mpt drives` lists the NVMe functions of this host"
    )]
    NotFound(PciAddress),
    /// A file of the kernel's cannot be read.
    #[error("Cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A file of the kernel's has a form that is not known.
    #[error("{} has a form that is not known: `{text}`", path.display())]
    Form {
        /// The file.
        path: PathBuf,
        /// Content.
        text: String,
    },
}

/// Functions that cannot be told apart by the IOMMU, and go to one user together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IommuGroup {
    /// Its number.
    pub number: u32,
    /// All its functions.
    pub members: Vec<IommuGroupMember>,
}

/// A function of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IommuGroupMember {
    /// Address, as the kernel names it.
    pub address: String,
    /// The driver that it is bound to.
    pub driver: Option<String>,
    /// True if it is a bridge, which does no DMA of its own.
    pub is_bridge: bool,
}

/// A PCI function, as it is at this moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PciFunction {
    /// Address.
    pub address: PciAddress,
    /// Vendor ID.
    pub vendor: u16,
    /// Device ID.
    pub device: u16,
    /// Class code.
    pub class: u32,
    /// The driver that it is bound to.
    pub driver: Option<String>,
    /// The only driver that it may be bound to, if that was said.
    pub driver_override: Option<String>,
    /// Its IOMMU group; `None` if there is no IOMMU before it.
    pub iommu_group: Option<IommuGroup>,
    /// The node of the host's memory that it is next to.
    pub numa_node: Option<u32>,
    /// The `nvme` driver's view of it; `None` if that does not have it.
    pub controller: Option<KernelController>,
}

impl PciFunction {
    /// Looks at one function, of any class.
    ///
    /// # Errors
    /// There is none, or the kernel shows it in a way that is not understood.
    pub fn find(root: &HostRoot, address: PciAddress) -> Result<Self, PciFunctionError> {
        let folder = root.function_folder(address);
        if !folder.exists() {
            return Err(PciFunctionError::NotFound(address));
        }
        let driver = link_name(&folder.join("driver"))?;
        let controller = match driver.as_deref() {
            Some("nvme") => namespaces::controller(root, &folder)?,
            _ => None,
        };
        Ok(Self {
            address,
            vendor: id(&folder.join("vendor"))?,
            device: id(&folder.join("device"))?,
            class: number(&folder.join("class"))?,
            driver,
            driver_override: read_optional(&folder.join("driver_override"))?
                .filter(|name| name != "(null)" && !name.is_empty()),
            iommu_group: iommu_group(&folder)?,
            // -1 where there is one node only, or none is known.
            numa_node: read_optional(&folder.join("numa_node"))?.and_then(|node| node.parse().ok()),
            controller,
        })
    }

    /// The NVMe functions of the host, by their addresses.
    ///
    /// # Errors
    /// As [`find`](Self::find), but for functions that go meanwhile.
    pub fn list(root: &HostRoot) -> Result<Vec<Self>, PciFunctionError> {
        let folder = root.sys.join("bus/pci/devices");
        let mut addresses: Vec<PciAddress> = entries(&folder)?
            .iter()
            .filter_map(|name| name.parse().ok())
            .collect();
        addresses.sort();
        let mut functions = Vec::new();
        for address in addresses {
            let class = number(&root.function_folder(address).join("class"));
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

    /// Returns whether it is an NVMe controller.
    #[must_use]
    pub fn is_nvme(&self) -> bool {
        self.class == CLASS_NVME
    }

    /// Other functions of its group that the host drives, each with its driver: they keep the group
    /// from being used from user space.
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
    /// Returns whether what was looked at is there no more.
    fn is_gone(&self) -> bool {
        match self {
            Self::NotFound(_) => true,
            // ENODEV: the file was open when its device went.
            Self::Read { source, .. } => matches!(
                source.raw_os_error(),
                Some(libc::ENOENT | libc::ENOTDIR | libc::ENODEV)
            ),
            Self::Form { .. } => false,
        }
    }
}

/// Returns whether functions with this driver may be in a group that user space uses: VFIO's own drivers and
/// the one that only reserves a function.
fn is_user_space_driver(driver: &str) -> bool {
    driver.contains("vfio") || driver == "pci-stub"
}

fn iommu_group(folder: &Path) -> Result<Option<IommuGroup>, PciFunctionError> {
    let link = folder.join("iommu_group");
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
        let folder = devices.join(&address);
        // Devices of other buses have no class; no bridge has a NVMe function behind it there.
        let class = read_optional(&folder.join("class"))?.unwrap_or_default();
        members.push(IommuGroupMember {
            driver: link_name(&folder.join("driver"))?,
            // Base class 06h.
            is_bridge: class.starts_with("0x06"),
            address,
        });
    }
    members.sort_by(|one, other| one.address.cmp(&other.address));
    Ok(Some(IommuGroup { number, members }))
}

/// The text of a file, without the line's end.
fn read(path: &Path) -> Result<String, PciFunctionError> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(text.trim_end().to_owned()),
        Err(source) => Err(PciFunctionError::Read {
            path: path.to_owned(),
            source,
        }),
    }
}

/// The same, or `None` if there is no such file.
fn read_optional(path: &Path) -> Result<Option<String>, PciFunctionError> {
    match read(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.is_gone() => Ok(None),
        Err(error) => Err(error),
    }
}

/// A number, as in `0x010802`.
fn number(path: &Path) -> Result<u32, PciFunctionError> {
    let text = read(path)?;
    text.strip_prefix("0x")
        .and_then(|digits| u32::from_str_radix(digits, 16).ok())
        .ok_or_else(|| PciFunctionError::Form {
            path: path.to_owned(),
            text,
        })
}

fn id(path: &Path) -> Result<u16, PciFunctionError> {
    let value = number(path)?;
    u16::try_from(value).map_err(|_| PciFunctionError::Form {
        path: path.to_owned(),
        text: format!("{value:#x}"),
    })
}

/// Names in a folder; none if there is no such folder.
fn entries(folder: &Path) -> Result<Vec<String>, PciFunctionError> {
    let failed = |source| PciFunctionError::Read {
        path: folder.to_owned(),
        source,
    };
    let entries = match fs::read_dir(folder) {
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

/// Name of what a link points to; `None` if there is no such link.
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
