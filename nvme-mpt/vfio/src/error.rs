//! Reasons why a drive cannot be used through VFIO, with their remedies.

use std::io;
use std::path::{Path, PathBuf};

use super::function::{DiskUser, PciAddress, PciFunctionError};

/// Formats the processes that have an IOMMU group open, for [`VfioError::InUse`].
fn group_users(group: &Path, users: &[DiskUser]) -> String {
    let users: Vec<String> = users.iter().map(DiskUser::to_string).collect();
    match users.as_slice() {
        [] => format!(
            "{} is open in a process that this user may not see",
            group.display()
        ),
        users => users.join(", "),
    }
}

/// Reason why an NVMe function cannot be used through VFIO.
#[derive(Debug, thiserror::Error)]
pub enum VfioError {
    /// The IOMMU group from a predecessor has no container: the function was unbound or removed in the meantime.
    #[error("{address} was unbound or removed after another process had opened it")]
    NoContainer {
        /// Address of the function.
        address: PciAddress,
    },
    /// The function does not exist or cannot be read from sysfs.
    #[error(transparent)]
    Function(#[from] PciFunctionError),
    /// The function is not an NVMe controller (class code 010802h).
    #[error(
        "{address} is not an NVMe controller: its class code is {class:06x}h, not 010802h; `nvme-mpt drives` lists \
         those of this host"
    )]
    NotNvme {
        /// Address of the function.
        address: PciAddress,
        /// Class code that the function has.
        class: u32,
    },
    /// The function is bound to another driver.
    #[error(
        "{address} is bound to the driver `{driver}`, not to vfio-pci; run: nvme-mpt bind {address}"
    )]
    OtherDriver {
        /// Address of the function.
        address: PciAddress,
        /// Driver that the function is bound to.
        driver: String,
    },
    /// The function is bound to no driver.
    #[error("{address} is bound to no driver; run: nvme-mpt bind {address}")]
    NoDriver {
        /// Address of the function.
        address: PciAddress,
    },
    /// The function has no IOMMU.
    #[error(
        "{address} has no IOMMU; enable it in the firmware's setup (VT-d, AMD-Vi or SMMU), and with intel_iommu=on on the kernel's command line of an Intel host"
    )]
    NoIommu {
        /// Address of the function.
        address: PciAddress,
    },
    /// A VFIO file does not exist.
    #[error("{} does not exist; load the driver with: modprobe vfio-pci", .0.display())]
    NoVfio(PathBuf),
    /// The user has no permission to open a VFIO file.
    #[error(
        "No permission to open {}; run as root, or give this user read and write access to it", .0.display()
    )]
    Permission(PathBuf),
    /// Another process has the IOMMU group open.
    #[error(
        "{address} is in use: {}; end that first, or share the drive among VMMs with: nvme-mpt serve --drive path={address}",
        group_users(group, users)
    )]
    InUse {
        /// Address of the function.
        address: PciAddress,
        /// File of the IOMMU group.
        group: PathBuf,
        /// Processes that have the group open, as far as this process can see them.
        users: Vec<DiskUser>,
    },
    /// Another function of the IOMMU group is bound to a driver of the host.
    #[error(
        "{address} cannot be isolated: its IOMMU group {group} has other functions with drivers of the host ({}); bind each of them to vfio-pci as well, or put the drive into another slot", others.join(", ")
    )]
    NotViable {
        /// Address of the function.
        address: PciAddress,
        /// Number of the IOMMU group.
        group: u32,
        /// Other functions of the group that are bound to a driver of the host, each with its driver.
        others: Vec<String>,
    },
    /// VFIO lacks the type 1 IOMMU or has an unknown API version.
    #[error("The kernel's VFIO has no type 1 IOMMU; load it with: modprobe vfio_iommu_type1")]
    NoType1,
    /// The platform has no interrupt remapping, so a device could raise any interrupt.
    #[error(
        "The platform cannot isolate interrupts of {address}: enable interrupt remapping in the firmware's setup, or accept the risk with allow_unsafe_interrupts=1 of the module vfio_iommu_type1, or of iommufd on a kernel without IOMMU groups in /dev/vfio"
    )]
    UnsafeInterrupts {
        /// Address of the function.
        address: PciAddress,
    },
    /// The IOMMU offers no IOVA range that this process can use.
    #[error("The IOMMU of {address} offers no addresses for DMA")]
    NoAddresses {
        /// Address of the function.
        address: PciAddress,
    },
    /// BAR0 is too small for registers and doorbells.
    #[error(
        "BAR0 of {address} has {size:#x} bytes, too few for the registers and doorbells of an NVMe controller (2000h)"
    )]
    SmallBar {
        /// Address of the function.
        address: PciAddress,
        /// Size of the BAR in bytes.
        size: u64,
    },
    /// The doorbells cannot be mapped.
    #[error(
        "The doorbells of {address}, at 1000h of BAR0, cannot be mapped: they share a page with its MSI-X table or with another device; use a kernel of 4.16 or newer, or one with smaller pages"
    )]
    DoorbellsNotMappable {
        /// Address of the function.
        address: PciAddress,
    },
    /// The process may not lock as much memory as a mapping for DMA needs.
    #[error(
        "Cannot lock {len} bytes of memory for the drive: {locked} are locked already, of {limit} that are allowed; raise the limit with `ulimit -l` (in KiB) or LimitMEMLOCK= of the unit to the memory of all virtual machines that use the drive and 256 MiB more"
    )]
    MemoryLock {
        /// Bytes that had to be locked.
        len: u64,
        /// Bytes of memory that the process has locked already.
        locked: u64,
        /// Limit of locked memory (`RLIMIT_MEMLOCK`), in bytes.
        limit: u64,
    },
    /// The user may not lock as much memory as a mapping for DMA needs.
    #[error(
        "Cannot lock {len} bytes of memory for the drive: the processes of this user may lock {limit} together; raise the limit with `ulimit -l` (in KiB) or LimitMEMLOCK= of the unit to the memory of all virtual machines that use its drives and 256 MiB more for each drive"
    )]
    MemoryLockOfUser {
        /// Bytes that had to be locked.
        len: u64,
        /// Limit of locked memory (`RLIMIT_MEMLOCK`), in bytes.
        limit: u64,
    },
    /// The container has its maximum number of mappings.
    #[error(
        "The drive's IOMMU takes {limit} mappings, all of which are used; raise vfio_iommu_type1.dma_entry_limit"
    )]
    Mappings {
        /// Maximum number of mappings of the container.
        limit: u32,
    },
    /// The kernel unmapped fewer bytes than requested.
    #[error(
        "The kernel unmapped {unmapped:#x} bytes at IOVA {iova:#x} instead of {len:#x}; the drive may reach memory still"
    )]
    PartlyUnmapped {
        /// First IOVA to unmap.
        iova: u64,
        /// Number of bytes to unmap.
        len: u64,
        /// Number of bytes that the kernel reports as unmapped.
        unmapped: u64,
    },
    /// Any other error of the kernel.
    #[error("Cannot {what} of {address}")]
    Refused {
        /// Address of the function.
        address: PciAddress,
        /// Action that failed, as a verb with its object.
        what: &'static str,
        /// Error of the kernel.
        source: io::Error,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_drive_in_use_names_the_process_and_the_way_to_share_it() {
        let in_use = |users| VfioError::InUse {
            address: "0000:01:00.0".parse().expect("an address"),
            group: "/dev/vfio/7".into(),
            users,
        };
        let process = DiskUser::Process {
            device: "/dev/vfio/7".to_owned(),
            pid: 77,
            command: "cloud-hypervisor".to_owned(),
        };
        assert_eq!(
            in_use(vec![process]).to_string(),
            "0000:01:00.0 is in use: /dev/vfio/7 is open in process 77 (cloud-hypervisor); end that first, or share \
             the drive among VMMs with: nvme-mpt serve --drive path=0000:01:00.0"
        );
        let unseen = in_use(Vec::new()).to_string();
        assert!(
            unseen.contains("/dev/vfio/7 is open in a process that this user may not see; "),
            "{unseen}"
        );
    }
}
