//! Rebinding of a drive from the kernel's NVMe driver to VFIO, and back: `nvme-mpt bind` and `nvme-mpt unbind`.
//!
//! Neither [`bind`] nor [`unbind`] loads a kernel module, or stops programs that use a drive. A drive that the host uses is
//! refused. While [`bind`] changes a drive's driver, it holds the drive's block devices exclusively, so that no program can
//! start to use the drive.

use std::fmt;
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::function::{
    DiskUser, DiskUsersError, HostRoot, PciAddress, PciFunction, PciFunctionError, VFIO_PCI,
};

/// The kernel's NVMe driver.
const NVME: &str = "nvme";

/// Error of binding a drive to another driver.
#[derive(Debug, Error)]
pub enum BindError {
    /// The function's state cannot be read.
    #[error(transparent)]
    Function(#[from] PciFunctionError),
    /// The drive's users cannot be determined.
    #[error(transparent)]
    Users(#[from] DiskUsersError),
    /// The function is not an NVMe controller.
    #[error(
        "{address} is not an NVMe controller: its class code is {class:06x}h, not 010802h; `nvme-mpt drives` lists \
         those of this host"
    )]
    NotNvme {
        /// The function.
        address: PciAddress,
        /// The function's class code.
        class: u32,
    },
    /// The drive is not behind an IOMMU.
    #[error(
        "{0} has no IOMMU, without which it would reach all memory of the host; enable it in the firmware's setup (VT-d, AMD-Vi or SMMU), and with intel_iommu=on on the kernel's command line of an Intel host"
    )]
    NoIommu(PciAddress),
    /// The host uses the drive.
    #[error(
        "{address} is in use: {}; {}",
        list(users),
        if users.iter().all(DiskUser::can_be_overridden) {
            "end that first, or take the drive from it with --force"
        } else {
            "end that first (--force does not change this)"
        }
    )]
    InUse {
        /// The function.
        address: PciAddress,
        /// The drive's users.
        users: Vec<DiskUser>,
    },
    /// A process uses the drive through VFIO.
    #[error("{address} is in use: {}; end that first", list(users))]
    Driven {
        /// The function.
        address: PciAddress,
        /// The drive's users.
        users: Vec<DiskUser>,
    },
    /// The drive has a driver whose users are unknown.
    #[error(
        "{address} is bound to the driver `{driver}`, whose users nvme-mpt cannot see: make sure that nothing uses \
         it, and add --force"
    )]
    OtherDriver {
        /// The function.
        address: PciAddress,
        /// The drive's driver.
        driver: String,
    },
    /// The drive has a driver other than vfio-pci, so `nvme-mpt bind` has not bound it.
    #[error("{address} is bound to the driver `{driver}`, not to vfio-pci: nothing was changed")]
    NotVfio {
        /// The function.
        address: PciAddress,
        /// The drive's driver.
        driver: String,
    },
    /// The kernel lacks the driver.
    #[error("The host's kernel has no driver {0}; load it with: modprobe {0}")]
    NoDriver(&'static str),
    /// A sysfs file cannot be written.
    #[error(
        "Cannot write to {}{}",
        path.display(),
        if source.kind() == io::ErrorKind::PermissionDenied { "; run as root" } else { "" }
    )]
    Write {
        /// The file.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// The driver did not accept the drive.
    #[error(
        "The driver {wanted} refused {address}, which is now bound to {}; see the kernel's log (dmesg)",
        now.as_deref().unwrap_or("no driver")
    )]
    NotTaken {
        /// The function.
        address: PciAddress,
        /// The intended driver.
        wanted: &'static str,
        /// The current driver.
        now: Option<String>,
    },
}

fn list(users: &[DiskUser]) -> String {
    let users: Vec<String> = users.iter().map(DiskUser::to_string).collect();
    users.join(", ")
}

/// Outcome of binding a drive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BindResult {
    address: PciAddress,
    /// The driver that the drive is bound to.
    driver: &'static str,
    change: DriverChange,
    /// Obstacles that remain: reasons why a server cannot use the drive yet.
    remarks: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum DriverChange {
    /// The drive was already bound to the driver.
    None,
    /// The previous driver, if there was one.
    From(Option<String>),
}

impl fmt::Display for BindResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            address,
            driver,
            change,
            remarks,
        } = self;
        match change {
            DriverChange::None => write!(f, "{address} is bound to {driver} already")?,
            DriverChange::From(Some(before)) => {
                write!(f, "{address} is now bound to {driver} (before: {before})")?;
            }
            DriverChange::From(None) => write!(f, "{address} is now bound to {driver}")?,
        }
        for remark in remarks {
            write!(f, "\n{remark}")?;
        }
        Ok(())
    }
}

/// Binds a drive to `vfio-pci`. With `force`, also takes a drive that a process has open, or that has an unknown driver. A
/// drive that is mounted, swap space or part of another device is always refused.
///
/// # Errors
/// Returns the obstacle. If `vfio-pci` does not take the drive, the kernel chooses a driver for the drive again.
pub fn bind(root: &HostRoot, address: PciAddress, force: bool) -> Result<BindResult, BindError> {
    let function = find_nvme_function(root, address)?;
    if function.iommu_group.is_none() {
        return Err(BindError::NoIommu(address));
    }
    let done = |change| BindResult {
        address,
        driver: VFIO_PCI,
        change,
        remarks: group_remarks(&function),
    };
    if function.driver.as_deref() == Some(VFIO_PCI) {
        return Ok(done(DriverChange::None));
    }
    check_driver(root, VFIO_PCI)?;
    let claim = match (&function.driver, &function.controller) {
        (Some(driver), _) if driver != NVME && !force => {
            let driver = driver.clone();
            return Err(BindError::OtherDriver { address, driver });
        }
        (_, None) => None,
        (_, Some(controller)) => {
            let (claim, users) = controller.claim_disks(root)?;
            if !users.iter().all(|user| force && user.can_be_overridden()) {
                return Err(BindError::InUse { address, users });
            }
            Some(claim)
        }
    };
    let dir = root.function_dir(address);
    write_sysfs(&dir.join("driver_override"), VFIO_PCI)?;
    let taken = rebind(root, &function, VFIO_PCI);
    // Until now, this claim has prevented mounting of the drive.
    drop(claim);
    if taken.is_err() {
        // The drive gets no driver from the override, so the kernel chooses one.
        let back = write_sysfs(&dir.join("driver_override"), "\n")
            .and_then(|()| write_sysfs(&drivers_probe_path(root), &address.to_string()));
        if let Err(error) = back {
            log::warn!("Cannot give {address} back to its driver: {error}");
        }
    }
    taken?;
    Ok(done(DriverChange::From(function.driver.clone())))
}

/// Binds a drive to the kernel's `nvme` driver.
///
/// # Errors
/// Returns the obstacle, such as a process that uses the drive.
pub fn unbind(root: &HostRoot, address: PciAddress) -> Result<BindResult, BindError> {
    let function = find_nvme_function(root, address)?;
    let dir = root.function_dir(address);
    let done = |change| BindResult {
        address,
        driver: NVME,
        change,
        remarks: Vec::new(),
    };
    // With an override that remains, the `nvme` driver would not get the drive.
    let clear = |function: &PciFunction| match function.driver_override {
        Some(_) => write_sysfs(&dir.join("driver_override"), "\n"),
        None => Ok(()),
    };
    match function.driver.as_deref() {
        Some(NVME) => {
            clear(&function)?;
            return Ok(done(DriverChange::None));
        }
        Some(VFIO_PCI) => {
            let group = function.iommu_group.as_ref();
            let users = group.map_or_else(Vec::new, |group| group.exclusive_users(root));
            if !users.is_empty() {
                return Err(BindError::Driven { address, users });
            }
        }
        Some(driver) => {
            let driver = driver.to_owned();
            return Err(BindError::NotVfio { address, driver });
        }
        None => {}
    }
    check_driver(root, NVME)?;
    clear(&function)?;
    rebind(root, &function, NVME)?;
    Ok(done(DriverChange::From(function.driver.clone())))
}

/// Returns the function, if it is an NVMe controller.
fn find_nvme_function(root: &HostRoot, address: PciAddress) -> Result<PciFunction, BindError> {
    let function = PciFunction::find(root, address)?;
    if !function.is_nvme() {
        let class = function.class;
        return Err(BindError::NotNvme { address, class });
    }
    Ok(function)
}

/// Returns remarks about other functions in the drive's IOMMU group whose drivers prevent the use of the drive with `vfio-pci`.
#[must_use]
pub fn group_remarks(function: &PciFunction) -> Vec<String> {
    let Some(group) = &function.iommu_group else {
        return Vec::new();
    };
    let remark = |(member, driver)| {
        format!(
            "{member}, in the same IOMMU group {}, is bound to {driver}: bind it to {VFIO_PCI} as well, or to no driver",
            group.number
        )
    };
    function.others_with_host_drivers().map(remark).collect()
}

fn drivers_probe_path(root: &HostRoot) -> PathBuf {
    root.sys.join("bus/pci/drivers_probe")
}

/// Checks that the kernel has the driver.
fn check_driver(root: &HostRoot, driver: &'static str) -> Result<(), BindError> {
    if root.sys.join("bus/pci/drivers").join(driver).exists() {
        Ok(())
    } else {
        Err(BindError::NoDriver(driver))
    }
}

/// Unbinds a function from its driver and lets the kernel bind the driver `wanted`.
fn rebind(root: &HostRoot, function: &PciFunction, wanted: &'static str) -> Result<(), BindError> {
    let address = function.address;
    let text = address.to_string();
    if function.driver.is_some() {
        let dir = root.function_dir(address);
        write_sysfs(&dir.join("driver/unbind"), &text)?;
    }
    // The write returns the result of the driver's probe.
    let probed = write_sysfs(&drivers_probe_path(root), &text);
    let now = PciFunction::find(root, address)?.driver;
    if now.as_deref() == Some(wanted) {
        return Ok(());
    }
    probed?;
    Err(BindError::NotTaken {
        address,
        wanted,
        now,
    })
}

fn write_sysfs(path: &Path, text: &str) -> Result<(), BindError> {
    let written = OpenOptions::new()
        .write(true)
        .open(path)
        .and_then(|mut file| file.write_all(text.as_bytes()));
    written.map_err(|source| BindError::Write {
        path: path.to_owned(),
        source,
    })
}

#[cfg(test)]
mod tests;
