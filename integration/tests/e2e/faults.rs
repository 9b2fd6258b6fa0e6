//! Faults that are injected under load. The affected guest recovers or reports errors as on hardware. Another guest on the same
//! drive notices only faults of the whole drive.

use std::time::{Duration, Instant};

use integration::guest::fio::GuestFioJob;
use integration::guest::{BOOT_TIMEOUT, Guest, GuestConfig, GuestDrive};
use integration::progress::print_line;
use integration::server::{FunctionArgument, Server};

use crate::Group;
use crate::fixture::{
    CheckEnvironment, ENDLESS, Failure, TIMEOUT, await_load, await_path, await_that, end_load,
    expect, expect_no_complaints, verified_load,
};

pub(crate) const GROUP: Group = Group::Alone {
    name: "faults",
    checks: &[
        ("each_kind_under_load", each_kind_under_load),
        ("the_drive_is_removed", the_drive_is_removed),
    ],
};

/// Two guests on halves of a drive. Faults affect only the first half.
struct Scene {
    path: String,
    server: Server,
    faulty: Guest,
    steady: Guest,
}

/// Fault range: the first half of the drive, in bytes.
const HALF: &str = "range = \"0+128M\"";

impl Scene {
    fn new(bench: &CheckEnvironment) -> Result<Self, Failure> {
        let path = bench.drive("shared.img", 256)?.display().to_string();
        let function =
            |id, range: &str| FunctionArgument::new(id, path.clone(), range).option("faults=none");
        let server = bench.serve(&[function("a", "0+128M"), function("b", "128M+128M")])?;
        let boot = |name: &str| {
            let config = GuestConfig::new(name).drive(GuestDrive::vfio_user(server.socket(name)));
            Guest::start_booting(bench.v6_12(), &config, bench.dir())
        };
        let (faulty, steady) = (boot("a")?, boot("b")?);
        faulty.await_ready(BOOT_TIMEOUT)?;
        steady.await_ready(BOOT_TIMEOUT)?;
        // Shortens the I/O timeout of the guest's driver.
        let short = "echo 3000 > /sys/block/nvme0n1/queue/io_timeout";
        faulty.check(short, TIMEOUT)?;
        Ok(Self {
            path,
            server,
            faulty,
            steady,
        })
    }

    fn inject(&self, fault: &str) -> Result<(), Failure> {
        let plan = format!("[[fault]]\n{fault}\n");
        self.server.inject_faults(&self.path, &plan)?;
        Ok(())
    }

    /// Injects a fault. The guest must report it, and recover under a verified load.
    fn expect_recovery(&self, fault: &str, message: &str) -> Result<(), Failure> {
        self.faulty.check("dmesg -c > /dev/null", TIMEOUT)?;
        let load = GuestFioJob::new("load", "randwrite", "4k", 16)
            .option("size", "32m")
            .option("verify", "crc32c")
            .option("verify_backlog", "1024")
            .option("verify_fatal", "1")
            .runtime(ENDLESS);
        let job = self.faulty.start(&load.script())?;
        await_load(&self.faulty)?;
        std::thread::sleep(Duration::from_secs(2));
        let before = self.server.struck_commands(&self.path)?;
        let begun = Instant::now();
        self.inject(fault)?;
        await_that("a command to be struck", || {
            Ok(self.server.struck_commands(&self.path)? > before)
        })?;
        // fio waits for the command that the fault affects.
        end_load(&self.faulty)?;
        let output = self.faulty.finish(job, load.timeout())?;
        load.report(&output.text)?;
        print_line(&format!(
            "        {fault:?}: the load ended {:.1?} later",
            begun.elapsed()
        ));
        let kernel = self.faulty.check("dmesg", TIMEOUT)?;
        expect(kernel.contains(message), || {
            format!("After {fault}, the guest's kernel does not say \"{message}\":\n{kernel}")
        })?;
        let state = self
            .faulty
            .check("cat /sys/class/nvme/nvme0/state", TIMEOUT)?;
        expect(state.trim() == "live", || {
            format!("After {fault}, the controller is {state}")
        })
    }
}

fn read_at(mib: u32) -> String {
    format!(
        "dd if=/dev/nvme0n1 of=/dev/null bs=4096 skip={} count=1 iflag=direct",
        mib * 256
    )
}

fn each_kind_under_load(bench: &CheckEnvironment) -> Result<(), Failure> {
    let mut scene = Scene::new(bench)?;
    let steady_load = GuestFioJob::new("steady", "randwrite", "4k", 8)
        .option("size", "32m")
        .option("verify", "crc32c")
        .option("verify_backlog", "1024")
        .option("verify_fatal", "1")
        .runtime(ENDLESS);
    let steady = scene.steady.start(&steady_load.script())?;
    await_load(&scene.steady)?;

    scene.inject("kind = \"media-error\"\nrange = \"100M+1M\"")?;
    scene
        .faulty
        .check(&format!("! {} && {}", read_at(100), read_at(101)), TIMEOUT)?;
    let kernel = scene.faulty.check("dmesg", TIMEOUT)?;
    expect(kernel.contains("critical medium error"), || {
        format!("The guest's kernel does not tell of its medium:\n{kernel}")
    })?;
    scene.server.clear_faults(&scene.path)?;
    scene.faulty.check(&read_at(100), TIMEOUT)?;

    scene.inject(
        "kind = \"latency\"\nadd = \"500ms\"\nrange = \"100M+1M\"\noperations = [\"read\"]",
    )?;
    // Duration of ten sequential reads, in hundredths of a second.
    let now = "cut -d' ' -f1 /proc/uptime | tr -d .";
    let taken = scene.faulty.check(
        &format!(
            "begin=$({now}); for i in $(seq 10); do {} 2> /dev/null; done; end=$({now}); echo $((end - begin))",
            read_at(100)
        ),
        TIMEOUT,
    )?;
    expect(
        taken.trim().parse().is_ok_and(|taken: u32| taken >= 500),
        || {
            format!(
                "Ten reads that take 500 ms longer took {} s/100",
                taken.trim()
            )
        },
    )?;

    scene.expect_recovery(&format!("kind = \"lost\"\n{HALF}"), "timeout")?;
    scene.expect_recovery(
        &format!("kind = \"fatal\"\n{HALF}"),
        "controller is down; will reset",
    )?;

    end_load(&scene.steady)?;
    let output = scene.steady.finish(steady, steady_load.timeout())?;
    steady_load.report(&output.text)?;
    expect_no_complaints(&scene.steady)?;

    // The drive loses 64 MiB of the other guest's half, and gets them back.
    for (size, sectors) in [("192M", 131_072), ("256M", 262_144)] {
        scene.inject(&format!("kind = \"resize\"\nsize = \"{size}\""))?;
        scene.faulty.check(&read_at(0), TIMEOUT)?;
        scene.steady.check(
            &format!(
                "for i in $(seq 1800); do [ $(cat /sys/block/nvme0n1/size) = {sectors} ] && exit 0; \
                 sleep 0.1; done; cat /sys/block/nvme0n1/size; exit 1"
            ),
            TIMEOUT,
        )?;
    }
    verified_load("afterwards", 1).run(&scene.steady)?;
    verified_load("afterwards", 1).run(&scene.faulty)?;
    scene.server.expect_alive()?;
    Ok(())
}

fn the_drive_is_removed(bench: &CheckEnvironment) -> Result<(), Failure> {
    let mut scene = Scene::new(bench)?;
    for guest in [&scene.faulty, &scene.steady] {
        guest.start(&verified_load("load", 1).script())?;
    }
    std::thread::sleep(Duration::from_secs(1));
    scene.inject("kind = \"removal\"")?;
    for guest in [&scene.faulty, &scene.steady] {
        await_path(guest, "/sys/block/nvme0n1", false)?;
    }
    scene.server.expect_alive()?;
    Ok(())
}
