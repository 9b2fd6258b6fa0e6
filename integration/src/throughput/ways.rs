//! The ways, each set up as its own documentation recommends, and torn down afterwards.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde_json::json;

use super::{DRIVE, ThroughputError};
use crate::guest::fio::{Fio, Side};
use crate::guest::{Agent, Drive, Guest, GuestConfig};
use crate::lab::inside;
use crate::process;
use crate::server::{FunctionOptions, Server};
use crate::vmms::cloud_hypervisor::{self, CloudHypervisor};
use crate::vmms::{Root, Setup, Vmm};

const PATIENCE: Duration = Duration::from_secs(120);
const FUNCTION: &str = "f";
/// Mount point of a file system on the drive.
const MOUNTED: &str = "/mnt";
/// File in that file system.
const FILE: &str = "/mnt/drive.img";
const FILE_SIZE: &str = "256M";

/// A way of accessing the drive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// The host's driver without a guest.
    Host,
    /// A guest with the whole drive, by QEMU's `vfio-pci`.
    PassThrough,
    /// A guest with nvme-mpt, whose poller never parks.
    Busy,
    /// A guest with nvme-mpt and its default polling.
    Adaptive,
    /// A guest with QEMU's virtio-blk over the host's driver.
    Virtio,
    /// A guest of Cloud Hypervisor with nvme-mpt on a file, whose poller never parks.
    FileBusy,
    /// A guest of Cloud Hypervisor with nvme-mpt on a file and its default polling.
    FileAdaptive,
    /// A guest of Cloud Hypervisor with its virtio-blk on the same file.
    FileVirtio,
}

impl Way {
    const ON_DRIVE: [Self; 5] = [
        Self::Host,
        Self::PassThrough,
        Self::Busy,
        Self::Adaptive,
        Self::Virtio,
    ];
    const ON_FILE: [Self; 3] = [Self::FileBusy, Self::FileAdaptive, Self::FileVirtio];

    /// Returns all available ways. Those on a file need a Cloud Hypervisor.
    pub(super) fn all() -> Vec<Self> {
        let on_file = cloud_hypervisor::named().map(|_| Self::ON_FILE);
        Self::ON_DRIVE
            .into_iter()
            .chain(on_file.into_iter().flatten())
            .collect()
    }

    /// Returns the way's name in the table.
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

    /// Runs all jobs this way.
    pub(super) fn measure(
        self,
        jobs: &[Fio],
        assets: &crate::provision::Assets,
        folder: &Path,
    ) -> Result<Vec<Side>, ThroughputError> {
        let boot = |drive| {
            let config = GuestConfig::new("guest").drive(drive);
            Guest::boot(assets, &config, folder)
        };
        match self {
            Self::Host => {
                inside::bind(DRIVE, "nvme")?;
                let device = inside::block_device(DRIVE, 1)?;
                on_host(jobs, &device.display().to_string())
            }
            Self::PassThrough => {
                inside::bind(DRIVE, "vfio-pci")?;
                let guest = boot(Drive::vfio_pci(&inside::address(DRIVE)?))?;
                in_guest(jobs, guest, "/dev/nvme0n1")
            }
            Self::Busy => served(jobs, folder, "dedicated:busy", boot),
            Self::Adaptive => served(jobs, folder, "shared:adaptive", boot),
            Self::Virtio => {
                inside::bind(DRIVE, "nvme")?;
                let guest = boot(Drive::virtio_blk(inside::block_device(DRIVE, 1)?))?;
                guest.load_modules()?;
                in_guest(jobs, guest, "/dev/vda")
            }
            Self::FileBusy => on_file(jobs, assets, folder, "dedicated:busy", "/dev/nvme0n1"),
            Self::FileAdaptive => on_file(jobs, assets, folder, "shared:adaptive", "/dev/nvme0n1"),
            Self::FileVirtio => on_file(jobs, assets, folder, "shared:adaptive", VIRTIO_DISK),
        }
    }
}

/// The virtio disk in a guest.
const VIRTIO_DISK: &str = "/dev/vda";

/// Runs all jobs in a guest of Cloud Hypervisor, on a file in a new file system on the drive.
fn on_file(
    jobs: &[Fio],
    assets: &crate::provision::Assets,
    folder: &Path,
    poll: &str,
    device: &str,
) -> Result<Vec<Side>, ThroughputError> {
    inside::bind(DRIVE, "nvme")?;
    let disk = inside::block_device(DRIVE, 1)?;
    let shell = |script: String| process::run(Command::new("sh").arg("-c").arg(script));
    shell(format!(
        "mkfs.ext4 -q -F {disk} && mount {disk} {MOUNTED} && \
         fio --name=fill --filename={FILE} --size={FILE_SIZE} --rw=write --bs=1m --direct=1",
        disk = disk.display(),
    ))?;
    let sides = in_cloud_hypervisor(jobs, assets, folder, poll, device);
    shell(format!("umount {MOUNTED}"))?;
    sides
}

fn in_cloud_hypervisor(
    jobs: &[Fio],
    assets: &crate::provision::Assets,
    folder: &Path,
    poll: &str,
    device: &str,
) -> Result<Vec<Side>, ThroughputError> {
    let is_virtio = device == VIRTIO_DISK;
    // Every guest has a function. With virtio-blk, the function is idle.
    let path = if is_virtio { "null:256M" } else { FILE };
    let function = |id| {
        FunctionOptions::new(id, path, format!("0+{FILE_SIZE}"))
            .option(format!("poll={poll}"))
            .option("queues=1")
    };
    let mut vmm = CloudHypervisor::launch(&Setup {
        assets,
        vcpus: 1,
        root: Root::Memory,
        first: function(FUNCTION),
        pluggable: FunctionOptions::new("other", "null:256M", format!("0+{FILE_SIZE}")),
        folder,
        state_dir: &folder.join("state"),
    })?;
    vmm.guest().load_modules()?;
    if is_virtio {
        let disk = json!({"path": FILE, "direct": true});
        cloud_hypervisor::ask(folder, "vm.add-disk", &disk)?;
        // If the disk does not exist yet, fio would create a file in the guest's memory instead.
        let there = format!("until [ -b {VIRTIO_DISK} ]; do sleep 0.1; done");
        vmm.guest().check(&there, PATIENCE)?;
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

fn on_host(jobs: &[Fio], device: &str) -> Result<Vec<Side>, ThroughputError> {
    jobs.iter()
        .map(|job| {
            let job = job.clone().option("filename", device);
            let text = process::run(Command::new("sh").arg("-c").arg(job.script()))?;
            Ok(job.report(&text)?.main().clone())
        })
        .collect()
}

fn in_guest(jobs: &[Fio], mut guest: Guest, device: &str) -> Result<Vec<Side>, ThroughputError> {
    let sides = run(jobs, &guest, device)?;
    guest.power_off(PATIENCE)?;
    Ok(sides)
}

fn run(jobs: &[Fio], guest: &Agent, device: &str) -> Result<Vec<Side>, ThroughputError> {
    jobs.iter()
        .map(|job| {
            let job = job.clone().option("filename", device);
            Ok(job.run(guest)?.main().clone())
        })
        .collect()
}

fn served(
    jobs: &[Fio],
    folder: &Path,
    poll: &str,
    boot: impl FnOnce(Drive) -> Result<Guest, crate::guest::GuestError>,
) -> Result<Vec<Side>, ThroughputError> {
    inside::bind(DRIVE, "vfio-pci")?;
    let function = FunctionOptions::new(FUNCTION, inside::address(DRIVE)?, "0+512M")
        .option(format!("poll={poll}"))
        .option("queues=1");
    let mut server = Server::start(&inside::brought("nvme-mpt"), &[function], folder)?;
    let guest = boot(Drive::vfio_user(server.socket(FUNCTION)))?;
    let sides = in_guest(jobs, guest, "/dev/nvme0n1")?;
    server.stop()?;
    Ok(sides)
}
