//! Functions that come and go on a running server, beside a guest that verifies all that it reads.

use std::time::{Duration, Instant};

use integration::guest::fio::Fio;
use integration::guest::{Drive, GuestConfig, HOTPLUG_BUS};
use integration::server::FunctionOptions;

use crate::Group;
use crate::fixture::{
    Bench, ENDLESS, Failure, PATIENCE, await_path, await_that, end_load, expect,
    expect_no_complaints,
};

pub(crate) const GROUP: Group = Group::Alone {
    name: "roster",
    checks: &[
        ("functions_come_and_go_beside_a_guest", beside_a_guest),
        ("a_limit_holds_and_ends_under_load", limit),
    ],
};

/// Functions that come and go while the first guest works.
const COMINGS: u64 = 100;

/// A limit that is lower than what any machine does, and the I/Os of a load that meets it.
const LIMITED_IOPS: u64 = 50;
const LIMITED_IOS: u64 = 300;

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
    let function = FunctionOptions::new("a", path, "0+128M").option(format!("iops={LIMITED_IOPS}"));
    let mut server = bench.serve(&[function])?;
    let config = GuestConfig::new("guest").drive(Drive::vfio_user(server.socket("a")));
    let guest = bench.boot_with(bench.v6_12(), &config)?;
    let started = Instant::now();
    let limited = Fio::new("limited", "randread", "4k", 16)
        .option("number_ios", &LIMITED_IOS.to_string())
        .run(&guest)?;
    let taken = started.elapsed();
    // The last batch of commands may come at once.
    let least = Duration::from_secs((LIMITED_IOS - 50) / LIMITED_IOPS);
    expect(limited.read.ios >= LIMITED_IOS && taken >= least, || {
        format!("{} I/Os took {taken:?}", limited.read.ios)
    })?;

    let load = Fio::new("load", "randread", "4k", 16).runtime(ENDLESS);
    let totals = || Ok::<_, Failure>(server.function_stats("a")?.totals());
    let before = totals()?;
    expect(before.throttled_ms > 0, || {
        format!("No command waited for the limit: {before:?}")
    })?;
    let job = guest.start(&load.script())?;
    await_that("commands to wait for the limit", || {
        Ok(totals()?.throttled_ms > before.throttled_ms)
    })?;
    server.limit("a", "iops=none")?;
    let mut last = totals()?;
    // The wait that the change ends is counted as well.
    await_that("commands that wait no longer", || {
        let next = totals()?;
        if next.throttled_ms != last.throttled_ms {
            last = next;
        }
        Ok(next.commands >= last.commands + LIMITED_IOS)
    })?;
    end_load(&guest)?;
    let output = guest.finish(job, load.patience())?;
    load.report(&output.text)?;
    guest.check(
        "dd if=/dev/nvme0n1 of=/dev/null bs=1M count=64 iflag=direct",
        PATIENCE,
    )?;
    expect_no_complaints(&guest)?;
    server.expect_alive()?;
    Ok(())
}
