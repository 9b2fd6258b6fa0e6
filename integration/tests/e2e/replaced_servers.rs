//! Servers that are killed or replaced under guests, whose kernels must not log a word about it.

use std::env;
use std::fmt::Write;

use integration::checks::FULL;
use integration::guest::{BOOT_TIMEOUT, Guest, GuestConfig, GuestDrive};
use integration::progress::print_line;
use integration::server::{FunctionArgument, Server, ServerReplacement};
use nvme_mpt_tests::rng::Rng;

use crate::Group;
use crate::fixture::{
    CheckEnvironment, ENDLESS, Failure, TIMEOUT, await_load, await_that, end_load, expect,
    verified_load,
};

pub(crate) const GROUP: Group = Group::Alone {
    name: "kept",
    checks: &[("guests_outlive_servers", check_outlives)],
};

const DRIVE_MIB: u64 = 64;
/// A server ends after fewer commands of a guest than this.
const COMMANDS: u64 = 1000;

/// Runs one guest through ten servers; with `--full`, two guests through a hundred servers.
fn check_outlives(bench: &CheckEnvironment) -> Result<(), Failure> {
    match env::var_os(FULL) {
        None => run_through_servers(bench, 1, 5),
        Some(_) => run_through_servers(bench, 2, 50),
    }
}

/// Runs fio in guests, on a file and on memory, while `times` servers are killed and `times` servers are upgraded.
fn run_through_servers(bench: &CheckEnvironment, guests: u64, times: u32) -> Result<(), Failure> {
    let file = bench.drive("drive.img", guests * DRIVE_MIB)?;
    let memory = format!("memory:{}M", guests * DRIVE_MIB);
    let functions: Vec<_> = (0..guests)
        .flat_map(|guest| {
            let range = format!("{}M+{DRIVE_MIB}M", guest * DRIVE_MIB);
            let function = |id: &str, path: &str| FunctionArgument::new(id, path, &*range);
            let [on_file, on_memory] = ids(guest);
            [
                function(&on_file, &file.display().to_string()),
                function(&on_memory, &memory),
            ]
        })
        .collect();
    let mut server = bench.serve_supervised(&functions)?;
    let boot = |guest: u64| -> Result<Guest, Failure> {
        let mut config = GuestConfig::new(format!("guest{guest}")).vcpus(2);
        for id in ids(guest) {
            config = config.drive(GuestDrive::vfio_user(server.socket(&id)).id(&id));
        }
        Ok(Guest::start_booting(bench.v6_12(), &config, bench.dir())?)
    };
    let guests: Vec<Guest> = (0..guests).map(boot).collect::<Result<_, _>>()?;
    // fio verifies written data while it writes the rest.
    let load = verified_load("load", 1)
        .option("filename", "/dev/nvme0n1:/dev/nvme1n1")
        .option("verify_backlog", "1024")
        .runtime(ENDLESS);
    let mut jobs = Vec::new();
    for guest in &guests {
        guest.await_ready(BOOT_TIMEOUT)?;
        // Discards messages of the boot.
        guest.check("dmesg -c >/dev/null", TIMEOUT)?;
        jobs.push(guest.start(&load.script())?);
        await_load(guest)?;
    }
    let mut rng = Rng::new(9);
    for _ in 0..times {
        for how in [ServerReplacement::Kill, ServerReplacement::Upgrade] {
            let guest = rng.below(guests.len() as u64);
            await_commands(&server, guest, rng.below(COMMANDS))?;
            server.replace(how)?;
        }
    }
    for guest in 0..guests.len() as u64 {
        await_commands(&server, guest, COMMANDS)?;
    }
    let mut text = String::new();
    for (guest, job) in guests.iter().zip(jobs) {
        end_load(guest)?;
        let output = guest.finish(job, load.timeout())?;
        let report = load.report(&output.text)?;
        expect(report.read.ios > 0 && report.write.ios > 0, || {
            format!("The guest has not verified anything: {report:?}")
        })?;
        let slowest = report.read.max_us.max(report.write.max_us) / 1e3;
        let ios = report.read.ios + report.write.ios;
        let _ = write!(text, "; {ios} I/Os, the slowest {slowest:.0} ms");
        // Linux reports an emulated processor that waits for its turn as a busy worker.
        let console_output = guest.check("dmesg | grep -v 'hogged CPU' || true", TIMEOUT)?;
        let says = |word: &&str| console_output.to_lowercase().contains(*word);
        let about = [
            "nvme",
            "timeout",
            "timed out",
            "abort",
            "reset",
            "i/o error",
        ];
        expect(!about.iter().any(says), || {
            format!("The guest's kernel has noticed:\n{console_output}")
        })?;
    }
    print_line(&format!(
        "        {times} servers killed, {times} upgraded{text}"
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
            commands += server.queue_totals(&id)?.commands;
        }
        Ok(commands > count)
    })
}
