//! Checks of the host: kernel, IOMMU, limits of this process, and permissions.

use std::fs;
use std::path::{Path, PathBuf};

use nvme_lease::CONTROL_SOCKET;
use nvme_lease::range::ByteSize;
use nvme_mpt_server::control::{ControlError, query_stats};
use nvme_mpt_server::stats::SupervisorStatus;
use nvme_mpt_vmm::report::chain;
use nvme_vfio::function::{HostRoot, VFIO_PCI};
use rustix::fs::Access;

use super::report::{CheckOutcome, DoctorCheck};

/// Oldest kernel version with which the project is tested.
const OLDEST_KERNEL: (u32, u32) = (6, 1);

/// Minimum limit of open descriptors for a server with many functions. It is higher than the usual soft limit.
const DESCRIPTORS_MIN: u64 = 4096;

/// Locked memory in bytes that a process with a physical drive needs in addition to the memory of the VMs
/// (`nvme_vfio::VfioError::MemoryLock`).
const LOCKED_OVERHEAD: u64 = 256 << 20;

/// Capabilities that the checks look for (capabilities(7)).
const CAP_IPC_LOCK: u32 = 14;
const CAP_SYS_ADMIN: u32 = 21;

/// The host, as this process sees it.
#[derive(Clone, Debug)]
pub struct DoctorHost {
    /// Root of the kernel's file systems.
    pub root: HostRoot,
    /// Directory of the lease ledger.
    pub state_dir: PathBuf,
    /// True if the host must be able to serve a physical drive.
    pub physical: bool,
}

impl DoctorHost {
    /// Runs all checks of the host.
    #[must_use]
    pub fn checks(&self) -> Vec<DoctorCheck> {
        vec![
            self.kernel(),
            self.io_uring(),
            self.iommu(),
            self.vfio_pci(),
            self.vfio_type1(),
            self.vfio_device(),
            self.locked_memory(),
            self.descriptors(),
            self.huge_pages(),
            self.kvm(),
            self.state_dir(),
            self.supervisor(),
        ]
    }

    fn read_proc(&self, name: &str) -> Option<String> {
        read_text(&self.root.proc.join(name))
    }

    fn read_sys(&self, name: &str) -> Option<String> {
        read_text(&self.root.sys.join(name))
    }

    /// Returns the outcome for an unmet requirement that matters only for physical drives: a problem if the host must serve
    /// such a drive.
    fn unmet_outcome(&self) -> CheckOutcome {
        match self.physical {
            true => CheckOutcome::Problem,
            false => CheckOutcome::Warning,
        }
    }

    fn kernel(&self) -> DoctorCheck {
        const NAME: &str = "host.kernel";
        let Some(release) = self.read_proc("sys/kernel/osrelease") else {
            return DoctorCheck::not_checked(NAME, "the kernel does not report its release");
        };
        let mut numbers = release
            .split(|c: char| !c.is_ascii_digit())
            .map_while(|number| number.parse::<u32>().ok());
        let version = (numbers.next(), numbers.next());
        let (Some(major), Some(minor)) = version else {
            return DoctorCheck::not_checked(NAME, format!("a release of unknown form: {release}"));
        };
        let finding = format!("Linux {release}");
        if (major, minor) >= OLDEST_KERNEL {
            return DoctorCheck::ok(NAME, finding);
        }
        let (major, minor) = OLDEST_KERNEL;
        DoctorCheck::new(NAME, CheckOutcome::Warning, finding).with_remedy(format!(
            "use Linux {major}.{minor} or newer, as the tests do"
        ))
    }

    fn io_uring(&self) -> DoctorCheck {
        const NAME: &str = "host.io_uring";
        let Some(text) = self.read_proc("sys/kernel/io_uring_disabled") else {
            return DoctorCheck::ok(NAME, "allowed; the kernel has no switch for it");
        };
        let lost = "files and block devices cannot be drives; physical drives can";
        let refused = |finding| {
            DoctorCheck::new(NAME, CheckOutcome::Warning, finding)
                .with_remedy("sysctl kernel.io_uring_disabled=0")
        };
        match text.as_str() {
            "0" => DoctorCheck::ok(NAME, "allowed"),
            "1" if self.has_capability(CAP_SYS_ADMIN) => DoctorCheck::ok(
                NAME,
                "allowed for this user, as kernel.io_uring_disabled is 1",
            ),
            "1" => refused(format!(
                "kernel.io_uring_disabled is 1, which refuses it to most users: {lost}"
            )),
            "2" => refused(format!("kernel.io_uring_disabled is 2: {lost}")),
            other => DoctorCheck::not_checked(
                NAME,
                format!("kernel.io_uring_disabled has an unknown value: {other}"),
            ),
        }
    }

    fn iommu(&self) -> DoctorCheck {
        const NAME: &str = "host.iommu";
        let groups = dir_names(&self.root.sys.join("kernel/iommu_groups"));
        let units = dir_names(&self.root.sys.join("class/iommu"));
        if !groups.is_empty() {
            let units = match units.is_empty() {
                true => String::new(),
                false => format!(" by {}", units.join(", ")),
            };
            return DoctorCheck::ok(NAME, format!("on: {} IOMMU groups{units}", groups.len()));
        }
        let finding = match units.is_empty() {
            true => "no IOMMU: physical drives cannot be served",
            false => "the IOMMU makes no groups: physical drives cannot be served",
        };
        DoctorCheck::new(NAME, self.unmet_outcome(), finding).with_remedy(
            "enable VT-d, AMD-Vi or SMMU in the firmware's setup, and on Intel hosts add intel_iommu=on to the kernel's \
             command line",
        )
    }

    fn vfio_pci(&self) -> DoctorCheck {
        const NAME: &str = "host.vfio_pci";
        match self
            .root
            .sys
            .join("bus/pci/drivers")
            .join(VFIO_PCI)
            .exists()
        {
            true => DoctorCheck::ok(NAME, "the driver vfio-pci is loaded"),
            false => DoctorCheck::new(
                NAME,
                self.unmet_outcome(),
                "the driver vfio-pci is not loaded",
            )
            .with_remedy("modprobe vfio-pci"),
        }
    }

    fn vfio_type1(&self) -> DoctorCheck {
        const NAME: &str = "host.vfio_iommu_type1";
        if !self.root.sys.join("module/vfio_iommu_type1").exists() {
            if self.root.dev.join("iommu").exists() {
                return DoctorCheck::ok(NAME, "not loaded; iommufd does its work");
            }
            return DoctorCheck::new(NAME, self.unmet_outcome(), "the module is not loaded")
                .with_remedy("modprobe vfio_iommu_type1");
        }
        let limit = self.read_sys("module/vfio_iommu_type1/parameters/dma_entry_limit");
        DoctorCheck::ok(
            NAME,
            match limit {
                Some(limit) => format!("loaded; a drive takes {limit} mappings for all its VMs"),
                None => "loaded".to_owned(),
            },
        )
    }

    fn vfio_device(&self) -> DoctorCheck {
        const NAME: &str = "host.vfio_device";
        let (container, iommufd) = (self.root.dev.join("vfio/vfio"), self.root.dev.join("iommu"));
        let path = match !container.exists() && iommufd.exists() {
            true => iommufd,
            false => container,
        };
        self.check_access(
            NAME,
            &path,
            self.unmet_outcome(),
            "modprobe vfio_iommu_type1",
        )
    }

    fn kvm(&self) -> DoctorCheck {
        const NAME: &str = "host.kvm";
        let path = self.root.dev.join("kvm");
        let remedy = "enable virtualisation in the firmware's setup, and load kvm_intel or kvm_amd";
        self.check_access(NAME, &path, CheckOutcome::Warning, remedy)
    }

    /// Checks that this user may read and write a device file.
    fn check_access(
        &self,
        name: &str,
        path: &Path,
        unmet: CheckOutcome,
        to_have_it: &str,
    ) -> DoctorCheck {
        let shown = path.display();
        match rustix::fs::access(path, Access::READ_OK | Access::WRITE_OK) {
            Ok(()) => DoctorCheck::ok(name, format!("{shown} can be read and written")),
            Err(_) if !path.exists() => {
                DoctorCheck::new(name, unmet, format!("{shown} does not exist")).with_remedy(to_have_it)
            }
            Err(error) => DoctorCheck::new(name, unmet, format!("{shown} cannot be used: {error}"))
                .with_remedy(format!(
                    "run as root, or let a group of this user have it: chgrp GROUP {shown} && chmod g+rw {shown}"
                )),
        }
    }

    fn locked_memory(&self) -> DoctorCheck {
        const NAME: &str = "host.locked_memory";
        if self.has_capability(CAP_IPC_LOCK) {
            return DoctorCheck::ok(NAME, "without a limit for this user (CAP_IPC_LOCK)");
        }
        let Some(limits) = self.resource_limit("Max locked memory") else {
            return DoctorCheck::not_checked(NAME, "the kernel does not report the limit");
        };
        let limit = match limits.0 {
            None => return DoctorCheck::ok(NAME, "without a limit"),
            Some(limit) => limit,
        };
        let memory = self.total_memory();
        let enough = memory.is_some_and(|memory| limit >= memory);
        if enough {
            return DoctorCheck::ok(
                NAME,
                format!("{}, all memory of this host", ByteSize(limit)),
            );
        }
        let outcome = match limit < LOCKED_OVERHEAD {
            true => self.unmet_outcome(),
            false => CheckOutcome::Warning,
        };
        let finding = format!(
            "{} may be locked; the memory of all VMs on a physical drive is, and {} besides",
            ByteSize(limit),
            ByteSize(LOCKED_OVERHEAD)
        );
        DoctorCheck::new(NAME, outcome, finding)
            .with_remedy("ulimit -l unlimited, or LimitMEMLOCK=infinity in the unit")
    }

    fn total_memory(&self) -> Option<u64> {
        let text = self.read_proc("meminfo")?;
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix("MemTotal:"))?;
        let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
        kib.checked_mul(1024)
    }

    fn descriptors(&self) -> DoctorCheck {
        const NAME: &str = "host.descriptors";
        let Some((soft, hard)) = self.resource_limit("Max open files") else {
            return DoctorCheck::not_checked(NAME, "the kernel does not report the limit");
        };
        let shown = |limit: Option<u64>| {
            limit.map_or("without a limit".to_owned(), |limit| limit.to_string())
        };
        let finding = format!("{} (at most {})", shown(soft), shown(hard));
        if soft.is_none_or(|soft| soft >= DESCRIPTORS_MIN) {
            return DoctorCheck::ok(NAME, finding);
        }
        let finding = format!("{finding}: few for a server with many functions");
        DoctorCheck::new(NAME, CheckOutcome::Warning, finding)
            .with_remedy("ulimit -n 524288, or LimitNOFILE=524288 in the unit")
    }

    fn huge_pages(&self) -> DoctorCheck {
        const NAME: &str = "host.huge_pages";
        let dir = "kernel/mm/hugepages";
        let mut sizes = Vec::new();
        for name in dir_names(&self.root.sys.join(dir)) {
            let total = self.read_sys(&format!("{dir}/{name}/nr_hugepages"));
            let free = self.read_sys(&format!("{dir}/{name}/free_hugepages"));
            if let (Some(total), Some(free)) = (total, free)
                && total != "0"
            {
                let size = name.trim_start_matches("hugepages-");
                sizes.push(format!("{free} of {total} of {size} free"));
            }
        }
        let reserved = match sizes.is_empty() {
            true => "none reserved".to_owned(),
            false => sizes.join(", "),
        };
        let transparent = self.read_sys("kernel/mm/transparent_hugepage/enabled");
        let choice = transparent
            .as_deref()
            .and_then(|text| Some(text.split_once('[')?.1.split_once(']')?.0));
        match choice {
            Some("never") => DoctorCheck::new(
                NAME,
                CheckOutcome::Warning,
                format!(
                    "{reserved}; transparent huge pages are off, so mapping a large VM takes long"
                ),
            )
            .with_remedy("echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"),
            Some(choice) => DoctorCheck::ok(NAME, format!("{reserved}; transparent: {choice}")),
            None => DoctorCheck::ok(NAME, reserved),
        }
    }

    fn state_dir(&self) -> DoctorCheck {
        const NAME: &str = "host.state_folder";
        let dir = &self.state_dir;
        let shown = dir.display();
        let writable = Access::READ_OK | Access::WRITE_OK | Access::EXEC_OK;
        if dir.is_dir() {
            return match rustix::fs::access(dir, writable) {
                Ok(()) => DoctorCheck::ok(NAME, format!("{shown} can be written")),
                Err(error) => DoctorCheck::new(
                    NAME,
                    CheckOutcome::Problem,
                    format!("{shown} cannot be written: {error}"),
                )
                .with_remedy(
                    "run as its owner or as root, or choose another directory with --state-dir",
                ),
            };
        }
        let elsewhere = "run as root, or choose another directory with --state-dir";
        if dir.exists() {
            return DoctorCheck::new(
                NAME,
                CheckOutcome::Problem,
                format!("{shown} is not a directory"),
            )
            .with_remedy(elsewhere);
        }
        let nearest = dir.ancestors().skip(1).find(|parent| parent.exists());
        // A relative path without a directory starts at the working directory.
        let parent = nearest.unwrap_or(Path::new("."));
        match rustix::fs::access(parent, writable) {
            Ok(()) if parent.is_dir() => DoctorCheck::ok(
                NAME,
                format!("{shown} does not exist yet; the first server makes it"),
            ),
            _ => DoctorCheck::new(
                NAME,
                CheckOutcome::Problem,
                format!(
                    "{shown} does not exist and cannot be made in {}",
                    parent.display()
                ),
            )
            .with_remedy(elsewhere),
        }
    }

    /// Checks the supervisor process of the server that has the state directory's control socket.
    fn supervisor(&self) -> DoctorCheck {
        const NAME: &str = "server.supervisor";
        match query_stats(&self.state_dir.join(CONTROL_SOCKET)).map(|stats| stats.supervisor) {
            Err(ControlError::NoServer { .. }) => DoctorCheck::ok(NAME, "no server runs"),
            Err(error) => DoctorCheck::not_checked(NAME, chain(&error)),
            Ok(SupervisorStatus::Runs) => DoctorCheck::ok(NAME, "VMs on vfio-user outlive the server"),
            Ok(SupervisorStatus::None) => DoctorCheck::new(
                NAME,
                CheckOutcome::Warning,
                "the server has no supervisor: VMs on vfio-user lose their drives when it ends",
            )
            .with_remedy("start it by `nvme-mpt supervise`, or by systemd with resources/nvme-mpt.service"),
            Ok(SupervisorStatus::Ended) => DoctorCheck::new(
                NAME,
                CheckOutcome::Problem,
                "the server's supervisor has ended: VMs on vfio-user lose their drives if the server dies",
            )
            .with_remedy("start another supervisor with `nvme-mpt supervise --adopt -- nvme-mpt serve ...`"),
        }
    }

    /// Returns the soft and the hard limit of this process for the resource `name`; `None` if they cannot be read. An inner
    /// `None` means unlimited.
    fn resource_limit(&self, name: &str) -> Option<(Option<u64>, Option<u64>)> {
        let text = self.read_proc("self/limits")?;
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        let mut values = line.split_whitespace();
        let mut value = || match values.next()? {
            "unlimited" => Some(None),
            number => number.parse().ok().map(Some),
        };
        Some((value()?, value()?))
    }

    /// Returns whether this process has a capability.
    fn has_capability(&self, capability: u32) -> bool {
        let Some(text) = self.read_proc("self/status") else {
            return false;
        };
        let effective = text.lines().find_map(|line| line.strip_prefix("CapEff:"));
        effective
            .and_then(|digits| u64::from_str_radix(digits.trim(), 16).ok())
            .is_some_and(|capabilities| capabilities >> capability & 1 != 0)
    }
}

/// Returns the text of a file without the line end; `None` if the file cannot be read.
fn read_text(path: &Path) -> Option<String> {
    let bytes = fs::read(path).ok()?;
    Some(String::from_utf8_lossy(&bytes).trim().to_owned())
}

/// Returns the names in a directory, sorted; none if the directory cannot be read.
fn dir_names(dir: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(dir) else {
        return Vec::new();
    };
    let mut names: Vec<String> = entries
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}
