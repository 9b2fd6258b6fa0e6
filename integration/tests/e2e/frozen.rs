//! Frozen storage, below functions and below QEMU's own NVMe drive.
//!
//! Guests wait for their I/O as long as their kernel's timeout says. Each guest has a function or one of QEMU's drives; a reset
//! of the latter stops the whole machine while its storage is frozen. The file system with all images is frozen. After that,
//! the loads continue and verify their reads. A table shows what each driver did during the freeze.

use std::fmt::Write;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

use integration::guest::fio::GuestFioJob;
use integration::guest::{BOOT_TIMEOUT, Guest, GuestConfig, GuestDrive, ScriptJob};
use integration::progress::print_line;
use integration::provision::host;
use integration::server::{FunctionArgument, Server};

use crate::Group;
use crate::fixture::{CheckEnvironment, ENDLESS, Failure, TIMEOUT, end_load, expect, with_path};
use crate::mounts::{self, FrozenFileSystem, LoopDevice, Mounted};

pub(crate) const GROUP: Group = Group::Alone {
    name: "frozen",
    checks: &[
        ("for_45_s", |bench| stand_still(bench, 45)),
        ("for_150_s", |bench| stand_still(bench, 150)),
    ],
};

/// I/O timeouts of a guest's kernel in seconds: short, default and infinite.
const TIMEOUTS: [&str; 3] = ["5", "30", "4294967295"];
/// The infinite timeout.
const ENDLESS_TIMEOUT: &str = TIMEOUTS[2];
/// The driver's default timeout of admin commands, which the harness extends.
const ADMIN_TIMEOUT: &str = "nvme_core.admin_timeout=60";
const IMAGE_MIB: u64 = 64;
const STORE_MIB: u64 = 1024;
/// Commands after which a load counts as running again.
const COMMANDS: u64 = 200;

/// Owner of a guest's drive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DriveOwner {
    Ours,
    Qemus,
}

/// A guest with one drive.
struct Scene {
    owner: DriveOwner,
    timeout: &'static str,
    guest: Guest,
}

impl Scene {
    fn start(
        bench: &CheckEnvironment,
        server: &Server,
        store: &Path,
        (whose, timeout): (DriveOwner, &'static str),
    ) -> Result<Self, Failure> {
        let config = GuestConfig::new(format!("{whose:?}-{timeout}"))
            .kernel_arguments(&format!("nvme_core.io_timeout={timeout} {ADMIN_TIMEOUT}"));
        let config = match whose {
            DriveOwner::Ours => config.drive(GuestDrive::vfio_user(server.socket(&id(timeout)))),
            DriveOwner::Qemus => {
                let image = image(store, whose, timeout)?;
                let image = format!("if=none,id=image,format=raw,file={}", image.display());
                let device = "nvme,drive=image,serial=theirs";
                config.qemu_arguments(["-drive", &image, "-device", device])
            }
        };
        let guest = Guest::start_booting(bench.v6_12(), &config, bench.dir())?;
        Ok(Self {
            owner: whose,
            timeout,
            guest,
        })
    }

    /// Starts the load, and waits until fio runs.
    fn load(&self) -> Result<(GuestFioJob, ScriptJob), Failure> {
        self.guest.await_ready(BOOT_TIMEOUT)?;
        self.guest.check("dmesg -c > /dev/null", TIMEOUT)?;
        let load = GuestFioJob::new("load", "randwrite", "4k", 4)
            .option("size", "16m")
            .option("rate_iops", "100")
            .option("verify", "crc32c")
            .option("verify_backlog", "256")
            .option("verify_fatal", "1")
            .runtime(ENDLESS);
        let job = self.guest.start(&load.script())?;
        self.await_ios()?;
        Ok((load, job))
    }

    /// Waits until the drive has completed `COMMANDS` more commands.
    fn await_ios(&self) -> Result<(), Failure> {
        let done = "awk '{ print $1 + $5 }' /sys/block/nvme0n1/stat";
        let script = format!(
            "before=$({done}); until [ $({done}) -gt $((before + {COMMANDS})) ]; do sleep 0.2; done"
        );
        self.guest.check(&script, TIMEOUT)?;
        Ok(())
    }

    /// Ends the load, and returns its row of the table. The load on a function must have found no error.
    fn finish_and_describe(&self, load: &GuestFioJob, job: ScriptJob) -> Result<String, Failure> {
        end_load(&self.guest)?;
        let end = match self.guest.finish(job, TIMEOUT) {
            Ok(output) => load.report(&output.text).map_err(Failure::from),
            Err(failure) => Err(failure.into()),
        };
        let kernel = self.guest.check("dmesg", TIMEOUT)?;
        let count = |message: &str| kernel.lines().filter(|line| line.contains(message)).count();
        let aborts = count("timeout, aborting");
        let resets = count("timeout, reset controller") + count("timeout, disable controller");
        let errors = count("I/O error, dev nvme");
        let end = match end {
            Ok(report) => {
                let slowest = report.read.max_us.max(report.write.max_us) / 1e6;
                format!("verified, the slowest I/O took {slowest:.1} s")
            }
            Err(failure) if self.owner == DriveOwner::Qemus => {
                let text = failure.to_string();
                text.lines().next().unwrap_or_default().to_owned()
            }
            Err(failure) => return Err(format!("{failure}\nThe guest's kernel:\n{kernel}").into()),
        };
        let patient = self.timeout == ENDLESS_TIMEOUT;
        let is_right = errors == 0 && !(patient && aborts + resets > 0);
        expect(is_right || self.owner == DriveOwner::Qemus, || {
            format!(
                "The kernel of the guest that waits {} s:\n{kernel}",
                self.timeout
            )
        })?;
        let name = match self.owner {
            DriveOwner::Ours => "nvme-mpt",
            DriveOwner::Qemus => "QEMU's nvme",
        };
        let timeout = self.timeout;
        Ok(format!(
            "        {timeout:>10} | {name:<11} | {aborts:>6} | {resets:>6} | {errors:>6} | {end}\n"
        ))
    }
}

/// Returns the id of a guest's function.
fn id(timeout: &str) -> String {
    format!("guest{timeout}")
}

/// Creates an image on the storage that will be frozen.
fn image(store: &Path, whose: DriveOwner, timeout: &str) -> Result<PathBuf, Failure> {
    let path = store.join(format!("{whose:?}-{timeout}.img"));
    File::create(&path)
        .and_then(|file| file.set_len(IMAGE_MIB << 20))
        .map_err(with_path(&path))?;
    Ok(path)
}

fn stand_still(bench: &CheckEnvironment, seconds: u64) -> Result<(), Failure> {
    if !host::is_root() {
        print_line("        NOT CHECKED: frozen: only root can freeze a file system");
        return Ok(());
    }
    let disk = LoopDevice::attach(&bench.drive("store.img", STORE_MIB)?)?;
    mounts::run("mkfs.ext4", &[Path::new("-q"), &disk.path])?;
    let store = Mounted::at(&disk.path, bench.dir().join("store"))?;
    let function = |timeout: &&str| {
        let path = image(&store.dir, DriveOwner::Ours, timeout)?;
        let path = path.display().to_string();
        let range = format!("0+{IMAGE_MIB}M");
        Ok(FunctionArgument::new(&id(timeout), path, range))
    };
    let functions: Result<Vec<_>, Failure> = TIMEOUTS.iter().map(function).collect();
    let mut server = bench.serve(&functions?)?;
    let mut scenes = Vec::new();
    for timeout in TIMEOUTS {
        for whose in [DriveOwner::Ours, DriveOwner::Qemus] {
            scenes.push(Scene::start(bench, &server, &store.dir, (whose, timeout))?);
        }
    }
    let mut loads = Vec::new();
    for scene in &scenes {
        loads.push(scene.load()?);
    }

    let frozen = FrozenFileSystem::new(&store)?;
    std::thread::sleep(Duration::from_secs(seconds));
    drop(frozen);

    let mut table = format!(
        "        The storage stood still for {seconds} s\n        \
         io_timeout | drive       | aborts | resets | errors | fio\n"
    );
    for (scene, (load, job)) in scenes.iter().zip(loads) {
        if scene.owner == DriveOwner::Ours {
            scene.await_ios()?;
        }
        let _ = write!(table, "{}", scene.finish_and_describe(&load, job)?);
    }
    print_line(table.trim_end());
    server.expect_alive()?;
    Ok(())
}
