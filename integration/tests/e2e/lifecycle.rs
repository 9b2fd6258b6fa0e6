//! Clients and servers that end: guest reboots, killed clients, and a server that is stopped.

use std::time::Duration;

use integration::guest::fio::GuestFioJob;
use integration::guest::{BOOT_TIMEOUT, Guest, GuestConfig, GuestDrive};
use integration::server::Server;

use crate::Group;
use crate::fixture::{
    CheckEnvironment, FUNCTION, Failure, TIMEOUT, expect, expect_no_complaints, function,
    verified_load,
};

pub(crate) const GROUP: Group = Group::Alone {
    name: "lifecycle",
    checks: &[
        ("guest_reboots", guest_reboots),
        ("client_dies_and_comes_back", client_dies_and_comes_back),
        (
            "one_client_dies_and_the_other_goes_on",
            one_client_dies_and_the_other_goes_on,
        ),
        ("server_stops_under_a_guest", server_stops_under_a_guest),
        ("guest_is_paused_under_load", guest_is_paused_under_load),
    ],
};

fn pattern_job(name: &str, pattern: &str) -> GuestFioJob {
    GuestFioJob::new(name, pattern, "64k", 8)
        .option("size", "16m")
        .option("offset", "128m")
        .option("verify", "crc32c")
        .option("verify_fatal", "1")
}

fn config(server: &Server) -> GuestConfig {
    GuestConfig::new("guest").drive(GuestDrive::vfio_user(server.socket(FUNCTION)))
}

fn guest_reboots(bench: &CheckEnvironment) -> Result<(), Failure> {
    let mut server = bench.serve(&[function(bench)?])?;
    let mut guest = bench.boot(&config(&server).reboots())?;
    pattern_job("mark", "write")
        .option("do_verify", "0")
        .run(&guest)?;
    for round in 0..4 {
        // The guest reboots itself in even rounds, and is reset under load in odd rounds.
        if round % 2 == 0 {
            guest.start("reboot -f")?;
        } else {
            guest.start(&verified_load("load", 1).script())?;
            std::thread::sleep(Duration::from_millis(300));
            guest.reset()?;
        }
        guest.await_ready(BOOT_TIMEOUT)?;
        pattern_job("marks", "read").run(&guest)?;
        verified_load("verify", 1).run(&guest)?;
        expect_no_complaints(&guest)?;
    }
    server.expect_alive()?;
    Ok(())
}

fn client_dies_and_comes_back(bench: &CheckEnvironment) -> Result<(), Failure> {
    let mut server = bench.serve(&[function(bench)?])?;
    let mut guest = bench.boot(&config(&server))?;
    pattern_job("mark", "write")
        .option("do_verify", "0")
        .option("end_fsync", "1")
        .run(&guest)?;
    for _ in 0..3 {
        // The guest is killed with a full queue of commands in flight.
        guest.start(&verified_load("load", 1).option("iodepth", "128").script())?;
        std::thread::sleep(Duration::from_millis(700));
        guest.kill();
        server.expect_alive()?;
        guest = bench.boot(&config(&server))?;
        pattern_job("marks", "read").run(&guest)?;
        verified_load("verify", 1).run(&guest)?;
        expect_no_complaints(&guest)?;
    }
    Ok(())
}

fn one_client_dies_and_the_other_goes_on(bench: &CheckEnvironment) -> Result<(), Failure> {
    let drive = bench.drive("shared.img", 256)?.display().to_string();
    let function =
        |id, range: &str| integration::server::FunctionArgument::new(id, drive.clone(), range);
    let mut server = bench.serve(&[function("a", "0+128M"), function("b", "128M+128M")])?;
    let boot = |name: &str| {
        let config = GuestConfig::new(name).drive(GuestDrive::vfio_user(server.socket(name)));
        Guest::start_booting(bench.v6_12(), &config, bench.dir())
    };
    let mut dying = boot("a")?;
    let steady = boot("b")?;
    dying.await_ready(BOOT_TIMEOUT)?;
    steady.await_ready(BOOT_TIMEOUT)?;
    let load = GuestFioJob::new("steady", "randwrite", "4k", 16)
        .option("size", "32m")
        .option("verify", "crc32c")
        .option("verify_backlog", "1024")
        .option("verify_fatal", "1")
        .runtime(Duration::from_secs(6));
    let job = steady.start(&load.script())?;
    dying.start(&verified_load("load", 1).script())?;
    std::thread::sleep(Duration::from_secs(2));
    dying.kill();
    let output = steady.finish(job, load.timeout())?;
    load.report(&output.text)?;
    expect_no_complaints(&steady)?;
    server.expect_alive()?;
    Ok(())
}

fn server_stops_under_a_guest(bench: &CheckEnvironment) -> Result<(), Failure> {
    let mut server = bench.serve(&[function(bench)?])?;
    let guest = bench.boot(&config(&server))?;
    guest.start(&verified_load("load", 1).script())?;
    std::thread::sleep(Duration::from_millis(700));
    // The server must exit successfully, whatever the guest does.
    server.stop()?;
    drop(guest);
    server.restart()?;
    let guest = bench.boot(&config(&server))?;
    verified_load("verify", 1).run(&guest)?;
    server.stop()?;
    Ok(())
}

fn guest_is_paused_under_load(bench: &CheckEnvironment) -> Result<(), Failure> {
    let mut server = bench.serve(&[function(bench)?])?;
    let mut guest = bench.boot(&config(&server))?;
    let load = verified_load("load", 1);
    let job = guest.start(&load.script())?;
    for _ in 0..3 {
        std::thread::sleep(Duration::from_millis(500));
        guest.pause()?;
        // Commands in flight complete while the guest is paused.
        std::thread::sleep(Duration::from_millis(300));
        guest.resume()?;
    }
    let output = guest.finish(job, load.timeout())?;
    load.report(&output.text)?;
    server.expect_alive()?;
    let text = guest.check("cat /sys/class/nvme/nvme0/state", TIMEOUT)?;
    expect(text.trim() == "live", || {
        format!("The controller is {text}")
    })
}
