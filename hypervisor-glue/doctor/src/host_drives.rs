//! List of the host's NVMe functions with their drivers and users, and the obstacles that prevent a server from using them:
//! `nvme-mpt drives`.

use std::fmt;

use nvme_lease::range::ByteSize;
use nvme_mpt_server::stats::{DriveStats, NamespaceStats, QueuePairStats};
use nvme_vfio::bind::group_remarks;
use nvme_vfio::function::{
    DiskUser, HostRoot, KernelController, PciFunction, PciFunctionError, VFIO_PCI,
};
use serde::Serialize;

/// An NVMe PCI function of the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct HostDrive {
    /// PCI address.
    pub address: String,
    /// Vendor and device ID, as in `144d:a80a`.
    pub id: String,
    /// Model number, if the driver or server reports it.
    pub model: Option<String>,
    /// Serial number, if the kernel's driver reports it.
    pub serial: Option<String>,
    /// Kernel driver that the function is bound to.
    pub driver: Option<String>,
    /// Number of the IOMMU group.
    pub iommu_group: Option<u32>,
    /// NUMA node of the function.
    pub numa_node: Option<u32>,
    /// Namespaces, if the driver or server reports them.
    pub namespaces: Option<Vec<NamespaceStats>>,
    /// I/O queue pairs, if a server uses the drive.
    pub queue_pairs: Option<QueuePairStats>,
    /// True if the queried server uses the drive.
    pub served: bool,
    /// Obstacles that prevent a server from serving the drive, with their remedies. Empty if a server can serve the drive
    /// now.
    pub in_the_way: Vec<String>,
}

/// Returns the host's NVMe functions. `served_drives` are the statistics of the running server's drives, which are copied into
/// the result.
///
/// # Errors
/// The kernel does not report required information.
pub fn list_drives(
    root: &HostRoot,
    served_drives: &[DriveStats],
) -> Result<Vec<HostDrive>, PciFunctionError> {
    PciFunction::list(root)?
        .iter()
        .map(|function| {
            let is_it = |drive: &&DriveStats| drive.path.parse() == Ok(function.address);
            describe_function(root, function, served_drives.iter().find(is_it))
        })
        .collect()
}

fn describe_function(
    root: &HostRoot,
    function: &PciFunction,
    drive: Option<&DriveStats>,
) -> Result<HostDrive, PciFunctionError> {
    let controller = function.controller.as_ref();
    let namespaces = match (drive, controller) {
        (Some(drive), _) => Some(drive.namespaces.clone()),
        (None, Some(controller)) => Some(namespaces(controller)),
        (None, None) => None,
    };
    let model = drive
        .map(|drive| drive.model.clone())
        .or_else(|| controller.map(|controller| controller.model.clone()));
    Ok(HostDrive {
        address: function.address.to_string(),
        id: format!("{:04x}:{:04x}", function.vendor, function.device),
        model: model.map(|model| model.trim().to_owned()),
        serial: controller.map(|controller| controller.serial.clone()),
        driver: function.driver.clone(),
        iommu_group: function.iommu_group.as_ref().map(|group| group.number),
        numa_node: function.numa_node,
        namespaces,
        queue_pairs: drive.and_then(|drive| drive.queue_pairs),
        served: drive.is_some(),
        in_the_way: match drive {
            Some(_) => Vec::new(),
            None => find_obstacles(root, function)?,
        },
    })
}

fn namespaces(controller: &KernelController) -> Vec<NamespaceStats> {
    let namespaces = controller.namespaces.iter();
    namespaces
        .map(|namespace| NamespaceStats {
            nsid: namespace.nsid,
            bytes: namespace.bytes,
            lba_bytes: namespace.lba_size,
        })
        .collect()
}

/// Returns the obstacles with their remedies, most important first.
fn find_obstacles(
    root: &HostRoot,
    function: &PciFunction,
) -> Result<Vec<String>, PciFunctionError> {
    let mut obstacles = Vec::new();
    let users = match (&function.controller, &function.iommu_group) {
        (Some(controller), _) => controller.users(root)?,
        (None, Some(group)) if function.driver.as_deref() == Some(VFIO_PCI) => group.users(root),
        _ => Vec::new(),
    };
    obstacles.extend(users.iter().map(DiskUser::to_string));
    if function.iommu_group.is_none() {
        obstacles.push(
            "no IOMMU: enable it in the firmware's setup and, on Intel, with intel_iommu=on"
                .to_owned(),
        );
    }
    let vfio_pci = root.sys.join("bus/pci/drivers").join(VFIO_PCI);
    match function.driver.as_deref() {
        Some(VFIO_PCI) => {}
        _ if !vfio_pci.exists() => {
            obstacles.push(format!("no driver {VFIO_PCI}: modprobe {VFIO_PCI}"));
        }
        driver => {
            let address = function.address;
            let driver = driver.unwrap_or("no driver");
            obstacles.push(format!("bound to {driver}: nvme-mpt bind {address}"));
        }
    }
    obstacles.extend(group_remarks(function));
    Ok(obstacles)
}

impl fmt::Display for HostDrive {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let known = |text: &Option<String>| match text.as_deref() {
            Some(text) if !text.is_empty() => text.to_owned(),
            _ => "model unknown while it has no driver".to_owned(),
        };
        write!(f, "{}  {}", self.address, known(&self.model))?;
        if let Some(serial) = &self.serial {
            write!(f, ", serial {serial}")?;
        }
        writeln!(f, ", PCI ID {}", self.id)?;

        match self.driver.as_deref() {
            Some(driver) => write!(f, "  driver {driver}")?,
            None => write!(f, "  no driver")?,
        }
        match self.iommu_group {
            Some(group) => write!(f, ", IOMMU group {group}")?,
            None => write!(f, ", no IOMMU")?,
        }
        if let Some(node) = self.numa_node {
            write!(f, ", NUMA node {node}")?;
        }
        writeln!(f)?;

        match &self.namespaces {
            None => {}
            Some(namespaces) if namespaces.is_empty() => writeln!(f, "  no namespace")?,
            Some(namespaces) => {
                for NamespaceStats {
                    nsid,
                    bytes,
                    lba_bytes,
                } in namespaces
                {
                    // The size is shown twice: in the units of range options, and in the decimal gigabytes of vendors.
                    let size = ByteSize(*bytes);
                    let gigabytes = *bytes as f64 / 1e9;
                    writeln!(
                        f,
                        "  namespace {nsid}: {size} ({gigabytes:.1} GB), blocks of {lba_bytes} bytes"
                    )?;
                }
            }
        }
        if let Some(pairs) = &self.queue_pairs {
            writeln!(
                f,
                "  queue pairs: {} of {} free; {} reserved, {} leased to one queue each, {} shared",
                pairs.free, pairs.total, pairs.reserved, pairs.exclusive, pairs.shared
            )?;
        }
        if self.served {
            writeln!(f, "  served")?;
        } else if self.in_the_way.is_empty() {
            writeln!(f, "  ready: serve it with path={}", self.address)?;
        }
        for obstacle in &self.in_the_way {
            writeln!(f, "  in the way: {obstacle}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drive() -> HostDrive {
        HostDrive {
            address: "0000:01:00.0".to_owned(),
            id: "1b36:0010".to_owned(),
            model: Some("A drive".to_owned()),
            serial: Some("S1".to_owned()),
            driver: Some("nvme".to_owned()),
            iommu_group: Some(7),
            numa_node: Some(1),
            namespaces: Some(vec![
                NamespaceStats {
                    nsid: 1,
                    bytes: 64 << 30,
                    lba_bytes: 512,
                },
                NamespaceStats {
                    nsid: 2,
                    bytes: 1_000_204_886_016,
                    lba_bytes: 4096,
                },
            ]),
            queue_pairs: None,
            served: false,
            in_the_way: vec!["nvme0n1 is mounted on /srv".to_owned()],
        }
    }

    #[test]
    fn the_listing_shows_drives_and_their_obstacles() {
        assert_eq!(
            drive().to_string(),
            "0000:01:00.0  A drive, serial S1, PCI ID 1b36:0010\n\
             \x20 driver nvme, IOMMU group 7, NUMA node 1\n\
             \x20 namespace 1: 64G (68.7 GB), blocks of 512 bytes\n\
             \x20 namespace 2: 976762584K (1000.2 GB), blocks of 4096 bytes\n\
             \x20 in the way: nvme0n1 is mounted on /srv\n"
        );
        let unknown = HostDrive {
            model: None,
            serial: None,
            driver: Some(VFIO_PCI.to_owned()),
            numa_node: None,
            namespaces: None,
            in_the_way: Vec::new(),
            ..drive()
        };
        assert_eq!(
            unknown.to_string(),
            "0000:01:00.0  model unknown while it has no driver, PCI ID 1b36:0010\n\
             \x20 driver vfio-pci, IOMMU group 7\n\
             \x20 ready: serve it with path=0000:01:00.0\n"
        );
        let drive = HostDrive {
            queue_pairs: Some(QueuePairStats {
                total: 31,
                reserved: 2,
                exclusive: 4,
                shared: 1,
                free: 24,
            }),
            served: true,
            namespaces: Some(Vec::new()),
            ..unknown
        };
        assert!(
            drive.to_string().ends_with(
                "  no namespace\n  queue pairs: 24 of 31 free; 2 reserved, 4 leased to one queue each, 1 shared\n  served\n"
            ),
            "{drive}"
        );
    }

    #[test]
    fn unknown_values_are_null_in_json() {
        let drive = HostDrive {
            model: None,
            iommu_group: None,
            ..drive()
        };
        let json = serde_json::to_value(&drive).unwrap();
        assert!(json["model"].is_null() && json["iommu_group"].is_null());
        assert!(json["queue_pairs"].is_null());
        assert_eq!(json["namespaces"][1]["bytes"], 1_000_204_886_016_u64);
        assert_eq!(json["in_the_way"][0], "nvme0n1 is mounted on /srv");
    }
}
