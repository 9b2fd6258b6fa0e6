//! Functions that come and go on a running server, beside a guest that verifies all that it reads.

use std::time::Duration;

use integration::guest::fio::Fio;
use integration::guest::{Drive, GuestConfig, HOTPLUG_BUS};
use integration::server::FunctionOptions;

use crate::Group;
use crate::fixture::{Bench, Failure, PATIENCE, await_path, expect, expect_no_complaints};

pub(crate) const GROUP: Group = Group::Alone {
    name: "roster",
    checks: &[
        ("functions_come_and_go_beside_a_guest", beside_a_guest),
        ("a_limit_holds_and_ends_under_load", limit),
    ],
};

/// Functions that come and go while the first guest works.
const COMINGS: u64 = 100;

fn beside_a_guest(bench: &Bench) -> Result<(), Failure> {
    let path = bench.drive("shared.img", 256)?.display().to_string();
    let function = |id: &str, range: &str| FunctionOptions::new(id, path.clone(), range);
    // The server has no function yet.
    let mut server = bench.serve(&[])?;
    server.add(&function("a", "0+64M"))?;
    let config = GuestConfig::new("guest").vcpus(2).hotplug();
    let config = config.drive(Drive::vfio_user(server.socket("a")));
    let mut guest = bench.boot_with(bench.v6_12(), &config)?;
    let load = Fio::new("beside", "randwrite", "4k", 16)
        .option("size", "60m")
        .option("verify", "crc32c")
        .option("verify_backlog", "1024")
        .option("verify_fatal", "1")
        .runtime(Duration::from_secs(20));
    let job = guest.start(&load.script())?;
    for number in 0..COMINGS {
        let id = format!("f{number}");
        // Each on blocks of its own: none is the former tenant of another.
        server.add(&function(&id, &format!("{}M+1M", 128 + number)))?;
        server.remove(&id)?;
    }
    // A VM's second drive joins a server that serves it already.
    server.add(&function("b", "64M+64M"))?;
    let drive = Drive::vfio_user(server.socket("b")).id("plugged");
    guest.plug(&drive.bus(HOTPLUG_BUS))?;
    await_path(&guest, "/dev/nvme1n1", true)?;
    let refused = server.remove("b").is_err();
    expect(refused, || "A function with a VMM was removed".to_owned())?;
    let output = guest.finish(job, load.patience())?;
    load.report(&output.text)?;
    // Without its server's restart, and there again after one.
    let mut functions: Vec<String> = server.list()?;
    functions.sort();
    expect(functions == ["a", "b"], || format!("{functions:?}"))?;
    expect_no_complaints(&guest)?;
    server.expect_alive()?;
    Ok(())
}

fn limit(bench: &Bench) -> Result<(), Failure> {
    let path = bench.drive("limited.img", 128)?.display().to_string();
    let function = FunctionOptions::new("a", path, "0+128M").option("iops=500");
    let mut server = bench.serve(&[function])?;
    let config = GuestConfig::new("guest").drive(Drive::vfio_user(server.socket("a")));
    let guest = bench.boot_with(bench.v6_12(), &config)?;
    let load = Fio::new("limited", "randread", "4k", 16).runtime(Duration::from_secs(6));
    let limited = load.run(&guest)?.main().iops;
    // An emulated guest's clock may run behind. A slow machine alone brings fewer.
    expect(limited <= 600.0, || {
        format!("{limited} I/Os per second instead of 500")
    })?;
    let job = guest.start(&load.script())?;
    server.limit("a", "iops=none")?;
    let output = guest.finish(job, load.patience())?;
    let free = load.report(&output.text)?.main().iops;
    expect(free > 1.5 * limited, || {
        format!("{free} I/Os per second without a limit, {limited} with one")
    })?;
    guest.check(
        "dd if=/dev/nvme0n1 of=/dev/null bs=1M count=64 iflag=direct",
        PATIENCE,
    )?;
    expect_no_complaints(&guest)?;
    server.expect_alive()?;
    Ok(())
}
