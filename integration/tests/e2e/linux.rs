//! Debian's kernels with their native driver and an I/O queue for each vCPU; small and large blocks.

use integration::guest::fio::GuestFioJob;
use integration::provision::GuestAssets;
use integration::server::FunctionArgument;

use crate::Group;
use crate::fixture::{
    BootedFunction, CheckEnvironment, DRIVE_MIB, FUNCTION, Failure, TIMEOUT, expect, function,
    verified_load,
};

pub(crate) const GROUP: Group = Group::Alone {
    name: "linux",
    checks: &[
        ("v6_1_with_1_vcpu", |bench| {
            boots_and_verifies(bench, &bench.v6_1()?, 1)
        }),
        ("v6_1_with_4_vcpus", |bench| {
            boots_and_verifies(bench, &bench.v6_1()?, 4)
        }),
        ("v6_12_with_1_vcpu", |bench| {
            boots_and_verifies(bench, bench.v6_12(), 1)
        }),
        ("v6_12_with_4_vcpus", |bench| {
            boots_and_verifies(bench, bench.v6_12(), 4)
        }),
        ("blocks_of_4096_bytes", blocks_of_4096_bytes),
        ("transfers_of_8_kib", |bench| transfers_of(bench, "8K", 8)),
        ("transfers_of_1_mib", transfers_of_1_mib),
        ("transfers_of_2_mib", |bench| {
            transfers_of(bench, "2M", 2048)
        }),
        ("doorbells_4_bytes_apart", doorbells_4_bytes_apart),
        ("drive_in_memory", drive_in_memory),
        ("drive_of_nothing", drive_of_nothing),
    ],
};

fn boots_and_verifies(
    bench: &CheckEnvironment,
    assets: &GuestAssets,
    vcpus: u32,
) -> Result<(), Failure> {
    verifies_on_each_queue(bench, assets, function(bench)?, vcpus)
}

/// Uses more queue pairs than a Doorbell Buffer can hold with a stride of 64 bytes.
fn doorbells_4_bytes_apart(bench: &CheckEnvironment) -> Result<(), Failure> {
    let function = function(bench)?
        .option("doorbell-stride=4")
        .option("queues=40");
    verifies_on_each_queue(bench, bench.v6_12(), function, 4)
}

fn verifies_on_each_queue(
    bench: &CheckEnvironment,
    assets: &GuestAssets,
    function: FunctionArgument,
    vcpus: u32,
) -> Result<(), Failure> {
    let booted = BootedFunction::boot(bench, assets, function, vcpus)?;
    let output = booted.guest.check(
        "uname -r; ls /sys/block/nvme0n1/mq | wc -l; cat /sys/class/nvme/nvme0/queue_count \
         /sys/block/nvme0n1/size",
        TIMEOUT,
    )?;
    let expected = format!(
        "{} {vcpus} {} {}",
        assets.kernel.name,
        // Linux counts the admin queue as well.
        vcpus + 1,
        (DRIVE_MIB << 20) / 512
    );
    let found = output.split_whitespace().collect::<Vec<_>>().join(" ");
    expect(found == expected, || {
        format!(
            "Kernel, hardware queues, queues with the admin queue, sectors: {found}, not {expected}"
        )
    })?;
    // One job on each vCPU, and so on each queue.
    verified_load("verify", vcpus)
        .option("cpus_allowed", &format!("0-{}", vcpus - 1))
        .option("cpus_allowed_policy", "split")
        .run(&booted.guest)?;
    let stats = booted.server().function_stats(FUNCTION)?;
    let used = stats
        .queues
        .iter()
        .filter(|queue| queue.commands > 0)
        .count();
    expect(used == vcpus as usize, || {
        format!("{used} queues of the device were used by {vcpus} vCPUs")
    })?;
    booted.expect_healthy()
}

fn blocks_of_4096_bytes(bench: &CheckEnvironment) -> Result<(), Failure> {
    let booted =
        BootedFunction::boot(bench, bench.v6_12(), function(bench)?.option("lba=4096"), 1)?;
    let size = booted
        .guest
        .check("cat /sys/block/nvme0n1/queue/logical_block_size", TIMEOUT)?;
    expect(size.trim() == "4096", || {
        format!("The guest sees blocks of {size} bytes")
    })?;
    verified_load("verify", 1).run(&booted.guest)?;
    booted.expect_healthy()
}

/// The guest's driver splits requests at the operator's limit.
fn transfers_of(bench: &CheckEnvironment, mdts: &str, kib: u64) -> Result<(), Failure> {
    const SIZE_KIB: u64 = 16 << 10;
    let function = function(bench)?.option(format!("mdts={mdts}"));
    let booted = BootedFunction::boot(bench, bench.v6_12(), function, 1)?;
    let limit = booted
        .guest
        .check("cat /sys/block/nvme0n1/queue/max_hw_sectors_kb", TIMEOUT)?;
    expect(limit.trim() == kib.to_string(), || {
        format!("A command carries at most {limit} KiB, not {kib}")
    })?;
    booted.guest.check(
        "cd /sys/block/nvme0n1/queue && cat max_hw_sectors_kb > max_sectors_kb",
        TIMEOUT,
    )?;
    GuestFioJob::new("large", "randwrite", "2m", 4)
        .option("size", &format!("{SIZE_KIB}k"))
        .with_verification()
        .run(&booted.guest)?;
    let commands = booted.server().queue_totals(FUNCTION)?.commands;
    expect(commands >= SIZE_KIB / kib, || {
        format!("The guest wrote {SIZE_KIB} KiB by {commands} commands")
    })?;
    booted.expect_healthy()
}

fn transfers_of_1_mib(bench: &CheckEnvironment) -> Result<(), Failure> {
    let booted = BootedFunction::new(bench, 1)?;
    let limit = booted
        .guest
        .check("cat /sys/block/nvme0n1/queue/max_hw_sectors_kb", TIMEOUT)?;
    let kib: u64 = limit.trim().parse().unwrap_or(0);
    expect(kib >= 1024, || {
        format!("A command carries at most {limit} KiB")
    })?;
    // Uses the largest request that the device allows.
    booted.guest.check(
        "cd /sys/block/nvme0n1/queue && cat max_hw_sectors_kb > max_sectors_kb",
        TIMEOUT,
    )?;
    GuestFioJob::new("large", "randwrite", "1m", 4)
        .option("size", "128m")
        .with_verification()
        .run(&booted.guest)?;
    // Any number of blocks, from memory that begins in the middle of a page.
    GuestFioJob::new("odd", "randwrite", "512", 8)
        .option("bsrange", "512-131072")
        .option("iomem_align", "512")
        .option("size", "16m")
        .with_verification()
        .run(&booted.guest)?;
    booted.expect_healthy()
}

fn drive_in_memory(bench: &CheckEnvironment) -> Result<(), Failure> {
    let function = FunctionArgument::new(FUNCTION, "memory:256M", "0+256M");
    let booted = BootedFunction::boot(bench, bench.v6_12(), function, 2)?;
    verified_load("verify", 2).run(&booted.guest)?;
    booted.expect_healthy()
}

fn drive_of_nothing(bench: &CheckEnvironment) -> Result<(), Failure> {
    let function = FunctionArgument::new(FUNCTION, "null:1T", "512G+512G");
    let booted = BootedFunction::boot(bench, bench.v6_12(), function, 1)?;
    let sectors = booted.guest.check("cat /sys/block/nvme0n1/size", TIMEOUT)?;
    expect(
        sectors.trim() == ((512_u64 << 30) / 512).to_string(),
        || format!("The guest sees {sectors} sectors"),
    )?;
    let report = GuestFioJob::new("null", "randrw", "4k", 32)
        .option("number_ios", "20000")
        .run(&booted.guest)?;
    expect(report.read.ios + report.write.ios >= 20_000, || {
        format!("{report:?}")
    })?;
    booted.expect_healthy()
}
