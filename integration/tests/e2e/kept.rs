//! Servers that are killed or replaced under guests, whose kernels must not log a word about it.

use std::env;
use std::fmt::Write;

use integration::checks::FULL;
use integration::guest::{BOOT_PATIENCE, Drive, Guest, GuestConfig};
use integration::progress::say;
use integration::server::{FunctionOptions, Replacement, Server};
use nvme_mpt_tests::rng::Rng;

use crate::Group;
use crate::fixture::{
    Bench, ENDLESS, Failure, PATIENCE, await_load, await_that, end_load, expect, verified_load,
};

pub(crate) const GROUP: Group = Group::Alone {
    name: "kept",
    checks: &[("guests_outlive_servers", outlive_as_asked)],
};

const DRIVE_MIB: u64 = 64;
/// A server ends after fewer commands of a guest than this.
const COMMANDS: u64 = 1000;

/// Runs one guest through ten servers; with `--full`, two guests through a hundred servers.
fn outlive_as_asked(bench: &Bench) -> Result<(), Failure> {
    match env::var_os(FULL) {
        None => outlive(bench, 1, 5),
        Some(_) => outlive(bench, 2, 50),
    }
}

/// Runs fio in guests, on a file and on memory, while `times` servers are killed and `times` servers are upgraded.
fn outlive(bench: &Bench, guests: u64, times: u32) -> Result<(), Failure> {
    let file = bench.drive("drive.img", guests * DRIVE_MIB)?;
    let memory = format!("memory:{}M", guests * DRIVE_MIB);
    let functions: Vec<_> = (0..guests)
        .flat_map(|guest| {
            let range = format!("{}M+{DRIVE_MIB}M", guest * DRIVE_MIB);
            let function = |id: &str, path: &str| FunctionOptions::new(id, path, &*range);
            let [on_file, on_memory] = ids(guest);
            [
                function(&on_file, &file.display().to_string()),
                function(&on_memory, &memory),
            ]
        })
        .collect();
    let mut server = bench.serve_kept(&functions)?;
    let boot = |guest: u64| -> Result<Guest, Failure> {
        let mut config = GuestConfig::new(format!("guest{guest}")).vcpus(2);
        for id in ids(guest) {
            config = config.drive(Drive::vfio_user(server.socket(&id)).id(&id));
        }
        Ok(Guest::start_booting(
            bench.v6_12(),
            &config,
            bench.folder(),
        )?)
    };
    let guests: Vec<Guest> = (0..guests).map(boot).collect::<Result<_, _>>()?;
    // fio verifies written data while it writes the rest.
    let load = verified_load("load", 1)
        .option("filename", "/dev/nvme0n1:/dev/nvme1n1")
        .option("verify_backlog", "1024")
        .runtime(ENDLESS);
    let mut jobs = Vec::new();
    for guest in &guests {
        guest.await_ready(BOOT_PATIENCE)?;
        // Discards messages of the boot.
        guest.check("dmesg -c >/dev/null", PATIENCE)?;
        jobs.push(guest.start(&load.script())?);
        await_load(guest)?;
    }
    let mut rng = Rng::new(9);
    for _ in 0..times {
        for how in [Replacement::Kill, Replacement::Upgrade] {
            let guest = rng.below(guests.len() as u64);
            await_commands(&server, guest, rng.below(COMMANDS))?;
            server.replace(how)?;
        }
    }
    for guest in 0..guests.len() as u64 {
        await_commands(&server, guest, COMMANDS)?;
    }
    let mut told = String::new();
    for (guest, job) in guests.iter().zip(jobs) {
        end_load(guest)?;
        let output = guest.finish(job, load.patience())?;
        let report = load.report(&output.text)?;
        expect(report.read.ios > 0 && report.write.ios > 0, || {
            format!("The guest has not verified anything: {report:?}")
        })?;
        let slowest = report.read.max_us.max(report.write.max_us) / 1e3;
        let ios = report.read.ios + report.write.ios;
        let _ = write!(told, "; {ios} I/Os, the slowest {slowest:.0} ms");
        // Linux reports an emulated processor that waits for its turn as a busy worker.
        let said = guest.check("dmesg | grep -v 'hogged CPU' || true", PATIENCE)?;
        let says = |word: &&str| said.to_lowercase().contains(*word);
        let about = [
            "nvme",
            "timeout",
            "timed out",
            "abort",
            "reset",
            "i/o error",
        ];
        expect(!about.iter().any(says), || {
            format!("The guest's kernel has noticed:\n{said}")
        })?;
    }
    say(&format!(
        "        {times} servers killed, {times} upgraded{told}"
    ));
    server.expect_alive()?;
    drop(guests);
    server.stop()?;
    Ok(())
}

/// Ids of a guest's functions, on the file and on memory.
fn ids(guest: u64) -> [String; 2] {
    [format!("file{guest}"), format!("memory{guest}")]
}

/// Waits until this server has completed more than `count` commands of a guest.
fn await_commands(server: &Server, guest: u64, count: u64) -> Result<(), Failure> {
    await_that("commands of a guest", || {
        let mut commands = 0;
        for id in ids(guest) {
            commands += server.function_stats(&id)?.totals().commands;
        }
        Ok(commands > count)
    })
}
