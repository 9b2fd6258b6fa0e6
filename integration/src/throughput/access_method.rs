//! Ways of giving a drive to a guest. Each is set up as its own documentation recommends, and torn down afterwards.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde_json::json;

use super::{DRIVE, ThroughputError};
use crate::guest::fio::{FioJobDirection, GuestFioJob};
use crate::guest::{Guest, GuestAgent, GuestConfig, GuestDrive};
use crate::lab::inside;
use crate::process;
use crate::server::{FunctionArgument, Server};
use crate::vmms::cloud_hypervisor::{self, CloudHypervisor};
use crate::vmms::{RootLocation, VmmSetup, VmmUnderTest};

const TIMEOUT: Duration = Duration::from_secs(120);
const FUNCTION: &str = "f";
/// Mount point of a file system on the drive.
const MOUNTED: &str = "/mnt";
/// File on that file system, which guests use as a drive.
const FILE: &str = "/mnt/drive.img";
const FILE_SIZE: &str = "256M";

/// A way of accessing the drive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AccessMethod {
    /// The host's driver, without a guest.
    Host,
    /// A guest that has the whole drive through QEMU's `vfio-pci`.
    PassThrough,
    /// A guest with a function of nvme-mpt, whose poller never parks.
    Busy,
    /// A guest with a function of nvme-mpt, which has the default polling policy.
    Adaptive,
    /// A guest with QEMU's virtio-blk, on the host's driver.
    Virtio,
    /// A guest of Cloud Hypervisor with a function of nvme-mpt on a file. The poller never parks.
    FileBusy,
    /// A guest of Cloud Hypervisor with a function of nvme-mpt on a file, which has the default polling policy.
    FileAdaptive,
    /// A guest of Cloud Hypervisor with its virtio-blk on the file.
    FileVirtio,
}

impl AccessMethod {
    const ON_DRIVE: [Self; 5] = [
        Self::Host,
        Self::PassThrough,
        Self::Busy,
        Self::Adaptive,
        Self::Virtio,
    ];
    const ON_FILE: [Self; 3] = [Self::FileBusy, Self::FileAdaptive, Self::FileVirtio];

    /// Returns all available ways. Ways on a file need a Cloud Hypervisor.
    pub(super) fn all() -> Vec<Self> {
        let on_file = cloud_hypervisor::configured_path().map(|_| Self::ON_FILE);
        Self::ON_DRIVE
            .into_iter()
            .chain(on_file.into_iter().flatten())
            .collect()
    }

    /// Returns the name of the way in the table.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Host => "host driver",
            Self::PassThrough => "pass-through",
            Self::Busy => "nvme-mpt busy",
            Self::Adaptive => "nvme-mpt adaptive",
            Self::Virtio => "virtio-blk",
            Self::FileBusy => "file, busy",
            Self::FileAdaptive => "file, adaptive",
            Self::FileVirtio => "file, virtio-blk",
        }
    }

    /// Runs all jobs with this way.
    pub(super) fn measure(
        self,
        jobs: &[GuestFioJob],
        assets: &crate::provision::GuestAssets,
        dir: &Path,
    ) -> Result<Vec<FioJobDirection>, ThroughputError> {
        let boot = |drive| {
            let config = GuestConfig::new("guest").drive(drive);
            Guest::boot(assets, &config, dir)
        };
        match self {
            Self::Host => {
                inside::bind(DRIVE, "nvme")?;
                let device = inside::block_device(DRIVE, 1)?;
                on_host(jobs, &device.display().to_string())
            }
            Self::PassThrough => {
                inside::bind(DRIVE, "vfio-pci")?;
                let guest = boot(GuestDrive::vfio_pci(&inside::address(DRIVE)?))?;
                in_guest(jobs, guest, "/dev/nvme0n1")
            }
            Self::Busy => serve_functions(jobs, dir, "dedicated:busy", boot),
            Self::Adaptive => serve_functions(jobs, dir, "shared:adaptive", boot),
            Self::Virtio => {
                inside::bind(DRIVE, "nvme")?;
                let guest = boot(GuestDrive::virtio_blk(inside::block_device(DRIVE, 1)?))?;
                guest.load_modules()?;
                in_guest(jobs, guest, "/dev/vda")
            }
            Self::FileBusy => on_file(jobs, assets, dir, "dedicated:busy", "/dev/nvme0n1"),
            Self::FileAdaptive => on_file(jobs, assets, dir, "shared:adaptive", "/dev/nvme0n1"),
            Self::FileVirtio => on_file(jobs, assets, dir, "shared:adaptive", VIRTIO_DISK),
        }
    }
}

/// Device of the virtio disk in a guest.
const VIRTIO_DISK: &str = "/dev/vda";

/// Runs all jobs in a guest of Cloud Hypervisor, on a file in a new file system on the drive.
fn on_file(
    jobs: &[GuestFioJob],
    assets: &crate::provision::GuestAssets,
    dir: &Path,
    poll: &str,
    device: &str,
) -> Result<Vec<FioJobDirection>, ThroughputError> {
    inside::bind(DRIVE, "nvme")?;
    let disk = inside::block_device(DRIVE, 1)?;
    let shell = |script: String| process::run(Command::new("sh").arg("-c").arg(script));
    shell(format!(
        "mkfs.ext4 -q -F {disk} && mount {disk} {MOUNTED} && \
         fio --name=fill --filename={FILE} --size={FILE_SIZE} --rw=write --bs=1m --direct=1",
        disk = disk.display(),
    ))?;
    let sides = in_cloud_hypervisor(jobs, assets, dir, poll, device);
    shell(format!("umount {MOUNTED}"))?;
    sides
}

fn in_cloud_hypervisor(
    jobs: &[GuestFioJob],
    assets: &crate::provision::GuestAssets,
    dir: &Path,
    poll: &str,
    device: &str,
) -> Result<Vec<FioJobDirection>, ThroughputError> {
    let is_virtio = device == VIRTIO_DISK;
    // Every guest has a function. The function is not used if the guest uses virtio-blk.
    let path = if is_virtio { "null:256M" } else { FILE };
    let function = |id| {
        FunctionArgument::new(id, path, format!("0+{FILE_SIZE}"))
            .option(format!("poll={poll}"))
            .option("queues=1")
    };
    let mut vmm = CloudHypervisor::launch(&VmmSetup {
        assets,
        vcpus: 1,
        root: RootLocation::Memory,
        first: function(FUNCTION),
        pluggable: FunctionArgument::new("other", "null:256M", format!("0+{FILE_SIZE}")),
        dir,
        state_dir: &dir.join("state"),
    })?;
    vmm.guest().load_modules()?;
    if is_virtio {
        let disk = json!({"path": FILE, "direct": true});
        cloud_hypervisor::request(dir, "vm.add-disk", &disk)?;
        // fio must wait until the disk exists. Otherwise, it would create a file in the guest's memory.
        let wait_script = format!("until [ -b {VIRTIO_DISK} ]; do sleep 0.1; done");
        vmm.guest().check(&wait_script, TIMEOUT)?;
    }
    let sides = run(jobs, vmm.guest(), device)?;
    vmm.power_off()?;
    Ok(sides)
}

/// Writes the whole drive once, since reads of unwritten blocks may not reach the drive's storage.
pub(super) fn fill() -> Result<(), ThroughputError> {
    inside::bind(DRIVE, "nvme")?;
    let device = inside::block_device(DRIVE, 1)?;
    process::run(
        Command::new("fio")
            .args(["--name=fill", "--rw=write", "--bs=1m", "--direct=1"])
            .arg(format!("--filename={}", device.display())),
    )?;
    Ok(())
}

fn on_host(jobs: &[GuestFioJob], device: &str) -> Result<Vec<FioJobDirection>, ThroughputError> {
    jobs.iter()
        .map(|job| {
            let job = job.clone().option("filename", device);
            let text = process::run(Command::new("sh").arg("-c").arg(job.script()))?;
            Ok(job.report(&text)?.main().clone())
        })
        .collect()
}

fn in_guest(
    jobs: &[GuestFioJob],
    mut guest: Guest,
    device: &str,
) -> Result<Vec<FioJobDirection>, ThroughputError> {
    let sides = run(jobs, &guest, device)?;
    guest.power_off(TIMEOUT)?;
    Ok(sides)
}

fn run(
    jobs: &[GuestFioJob],
    guest: &GuestAgent,
    device: &str,
) -> Result<Vec<FioJobDirection>, ThroughputError> {
    jobs.iter()
        .map(|job| {
            let job = job.clone().option("filename", device);
            Ok(job.run(guest)?.main().clone())
        })
        .collect()
}

fn serve_functions(
    jobs: &[GuestFioJob],
    dir: &Path,
    poll: &str,
    boot: impl FnOnce(GuestDrive) -> Result<Guest, crate::guest::GuestError>,
) -> Result<Vec<FioJobDirection>, ThroughputError> {
    inside::bind(DRIVE, "vfio-pci")?;
    let function = FunctionArgument::new(FUNCTION, inside::address(DRIVE)?, "0+512M")
        .option(format!("poll={poll}"))
        .option("queues=1");
    let mut server = Server::start(&inside::copied_path("nvme-mpt"), &[function], dir)?;
    let guest = boot(GuestDrive::vfio_user(server.socket(FUNCTION)))?;
    let sides = in_guest(jobs, guest, "/dev/nvme0n1")?;
    server.stop()?;
    Ok(sides)
}
