//! Functions that are added to and removed from a running server, beside a guest that verifies its reads.

use std::time::{Duration, Instant};

use integration::guest::fio::GuestFioJob;
use integration::guest::{GuestConfig, GuestDrive, HOTPLUG_BUS};
use integration::server::FunctionArgument;

use crate::Group;
use crate::fixture::{
    CheckEnvironment, ENDLESS, Failure, TIMEOUT, await_load, await_path, await_that, end_load,
    expect, expect_no_complaints,
};

pub(crate) const GROUP: Group = Group::Alone {
    name: "roster",
    checks: &[
        ("functions_come_and_go_beside_a_guest", beside_a_guest),
        ("a_limit_holds_and_ends_under_load", limit),
        ("a_lease_grows_under_verified_load", grow),
    ],
};

/// Number of functions that are added and removed while the first guest works.
const ADDITIONS: u64 = 100;

/// A limit below the rate of any machine, and the number of commands of the limited load.
const LIMITED_IOPS: u64 = 50;
const LIMITED_IOS: u64 = 300;

fn beside_a_guest(bench: &CheckEnvironment) -> Result<(), Failure> {
    let path = bench.drive("shared.img", 256)?.display().to_string();
    let function = |id: &str, range: &str| FunctionArgument::new(id, path.clone(), range);
    // The server starts without functions.
    let mut server = bench.serve(&[])?;
    server.add(&function("a", "0+64M"))?;
    let config = GuestConfig::new("guest").vcpus(2).hotplug();
    let config = config.drive(GuestDrive::vfio_user(server.socket("a")));
    let mut guest = bench.boot_with(bench.v6_12(), &config)?;
    let load = GuestFioJob::new("beside", "randwrite", "4k", 16)
        .option("size", "60m")
        .option("verify", "crc32c")
        .option("verify_backlog", "1024")
        .option("verify_fatal", "1")
        .runtime(ENDLESS);
    let job = guest.start(&load.script())?;
    await_load(&guest)?;
    for number in 0..ADDITIONS {
        let id = format!("f{number}");
        // Each function has its own blocks, so none has a previous owner.
        server.add(&function(&id, &format!("{}M+1M", 128 + number)))?;
        server.remove(&id)?;
    }
    // The VM gets a second drive from the server of its first.
    server.add(&function("b", "64M+64M"))?;
    let drive = GuestDrive::vfio_user(server.socket("b")).id("plugged");
    guest.plug(&drive.bus(HOTPLUG_BUS))?;
    await_path(&guest, "/dev/nvme1n1", true)?;
    let refused = server.remove("b").is_err();
    expect(refused, || "A function with a VMM was removed".to_owned())?;
    end_load(&guest)?;
    let output = guest.finish(job, load.timeout())?;
    load.report(&output.text)?;
    // Functions that were added without a restart exist after a restart as well.
    let mut functions: Vec<String> = server.list()?;
    functions.sort();
    expect(functions == ["a", "b"], || format!("{functions:?}"))?;
    expect_no_complaints(&guest)?;
    server.expect_alive()?;
    Ok(())
}

/// Size of the lease in bytes after it has grown.
const GROWN_BYTES: u64 = 100 << 30;

fn grow(bench: &CheckEnvironment) -> Result<(), Failure> {
    let path = bench.drive("large.img", 128 << 10)?.display().to_string();
    let mut server = bench.serve(&[
        FunctionArgument::new("beside", path.clone(), "2G+1G"),
        FunctionArgument::by_size("a", path, "1G"),
    ])?;
    let config = GuestConfig::new("guest")
        .vcpus(2)
        .drive(GuestDrive::vfio_user(server.socket("a")));
    let guest = bench.boot_with(bench.v6_12(), &config)?;
    let load = |name: &str| {
        GuestFioJob::new(name, "randwrite", "4k", 16)
            .option("size", "60m")
            .option("verify", "crc32c")
            .option("verify_backlog", "1024")
            .option("verify_fatal", "1")
    };
    let load_job = load("beside").runtime(ENDLESS);
    let job = guest.start(&load_job.script())?;
    let refused = server.resize("a", "200G").is_err();
    expect(refused, || "A lease is larger than its drive".to_owned())?;
    server.resize("a", "2G")?;
    server.resize("a", &GROWN_BYTES.to_string())?;
    let size = format!("[ $(cat /sys/block/nvme0n1/size) = {} ]", GROWN_BYTES / 512);
    await_that("the guest to see the size", || {
        Ok(guest.run(&size, TIMEOUT)?.status == 0)
    })?;
    // The load crosses the border of two extents, at 2 GiB of the lease.
    let across = load("across")
        .option("offset", "2018m")
        .option("bs", "64k")
        .runtime(Duration::from_secs(5));
    across.run(&guest)?;
    let last = "dd if=/dev/urandom of=/tmp/last bs=1M count=4 && \
                dd if=/tmp/last of=/dev/nvme0n1 bs=1M seek=102396 oflag=direct && \
                dd if=/dev/nvme0n1 bs=1M skip=102396 iflag=direct | cmp - /tmp/last";
    guest.check(last, TIMEOUT)?;
    end_load(&guest)?;
    let output = guest.finish(job, load_job.timeout())?;
    load_job.report(&output.text)?;
    expect_no_complaints(&guest)?;
    server.expect_alive()?;
    Ok(())
}

fn limit(bench: &CheckEnvironment) -> Result<(), Failure> {
    let path = bench.drive("limited.img", 128)?.display().to_string();
    let function =
        FunctionArgument::new("a", path, "0+128M").option(format!("iops={LIMITED_IOPS}"));
    let mut server = bench.serve(&[function])?;
    let config = GuestConfig::new("guest").drive(GuestDrive::vfio_user(server.socket("a")));
    let guest = bench.boot_with(bench.v6_12(), &config)?;
    let started = Instant::now();
    let limited = GuestFioJob::new("limited", "randread", "4k", 16)
        .option("number_ios", &LIMITED_IOS.to_string())
        .run(&guest)?;
    let taken = started.elapsed();
    // The last batch of commands may complete at once.
    let least = Duration::from_secs((LIMITED_IOS - 50) / LIMITED_IOPS);
    expect(limited.read.ios >= LIMITED_IOS && taken >= least, || {
        format!("{} I/Os took {taken:?}", limited.read.ios)
    })?;

    let load = GuestFioJob::new("load", "randread", "4k", 16).runtime(ENDLESS);
    let totals = || Ok::<_, Failure>(server.queue_totals("a")?);
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
    // The wait that the change of the limit ends is counted as well.
    await_that("commands that wait no longer", || {
        let next = totals()?;
        if next.throttled_ms != last.throttled_ms {
            last = next;
        }
        Ok(next.commands >= last.commands + LIMITED_IOS)
    })?;
    end_load(&guest)?;
    let output = guest.finish(job, load.timeout())?;
    load.report(&output.text)?;
    guest.check(
        "dd if=/dev/nvme0n1 of=/dev/null bs=1M count=64 iflag=direct",
        TIMEOUT,
    )?;
    expect_no_complaints(&guest)?;
    server.expect_alive()?;
    Ok(())
}
