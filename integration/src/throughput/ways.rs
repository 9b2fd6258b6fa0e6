//! The ways, each set up as its own documentation recommends, and put away again.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use super::{DRIVE, ThroughputError};
use crate::guest::fio::{Fio, Side};
use crate::guest::{Drive, Guest, GuestConfig};
use crate::lab::inside;
use crate::process;
use crate::server::{FunctionOptions, Server};

const PATIENCE: Duration = Duration::from_secs(120);
const FUNCTION: &str = "f";

/// A way to the drive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// The host's driver; no guest.
    Host,
    /// A guest has the whole drive, by QEMU's `vfio-pci`.
    PassThrough,
    /// A guest on nvme-mpt, whose poller never sleeps.
    Busy,
    /// A guest on nvme-mpt as it is by default.
    Adaptive,
    /// A guest with QEMU's virtio-blk over the host's driver.
    Virtio,
}

impl Way {
    pub(super) const ALL: [Self; 5] = [
        Self::Host,
        Self::PassThrough,
        Self::Busy,
        Self::Adaptive,
        Self::Virtio,
    ];

    /// Returns its name in the table.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Host => "host driver",
            Self::PassThrough => "pass-through",
            Self::Busy => "nvme-mpt busy",
            Self::Adaptive => "nvme-mpt adaptive",
            Self::Virtio => "virtio-blk",
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
        }
    }
}

/// Writes the whole drive once: reads of what was never written would be of nothing.
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
    let sides = jobs
        .iter()
        .map(|job| {
            let job = job.clone().option("filename", device);
            Ok(job.run(&guest)?.main().clone())
        })
        .collect::<Result<Vec<_>, ThroughputError>>()?;
    guest.power_off(PATIENCE)?;
    Ok(sides)
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
