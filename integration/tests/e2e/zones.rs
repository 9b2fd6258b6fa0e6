//! A zoned drive with Linux, nvme-cli and fio, on a lease in the middle of the drive.

use std::fs;

use integration::guest::fio::GuestFioJob;
use integration::server::FunctionArgument;
use serde_json::Value;

use crate::Group;
use crate::fixture::{
    BootedFunction, CheckEnvironment, FUNCTION, Failure, TIMEOUT, await_path, expect, with_path,
};

pub(crate) const GROUP: Group = Group::OnGuest {
    name: "zones",
    functions: &[FUNCTION],
    boot,
    checks: &[
        ("linux_calls_it_host_managed", linux_calls_it_host_managed),
        ("wrong_writes_are_refused", wrong_writes_are_refused),
        ("zone_append", zone_append),
        ("fio_writes_and_verifies", fio_writes_and_verifies),
    ],
};

/// Checks of zones from which Linux makes no block device.
pub(crate) const ODD_GROUP: Group = Group::Alone {
    name: "odd_zones",
    checks: &[("linux_makes_no_disk_of_them", linux_makes_no_disk_of_them)],
};

const NAMESPACE: &str = "/dev/nvme0n1";

/// Size and capacity of a zone, in blocks of 4 KiB.
const ZONE: u64 = 1024;
const CAPACITY: u64 = 768;
/// Number of zones of the lease.
const ZONES: u64 = 32;

/// A profile of 4 MiB zones, of which the drive has 64 and the lease half.
const PROFILE: &str = "model = \"zns\"\nzone_size = \"4M\"\nzone_capacity = \"3M\"\n\
                       max_open = 4\nmax_active = 6\nappend_limit = \"64K\"\n";

/// Status codes (Zoned Namespace Command Set 1.1, section 3.1.2): Status Code Type in bits 10:8.
mod status {
    pub(super) const SUCCESS: u16 = 0x000;
    pub(super) const INVALID_FIELD: u16 = 0x002;
    pub(super) const ZONE_BOUNDARY_ERROR: u16 = 0x1B8;
    pub(super) const ZONE_IS_FULL: u16 = 0x1B9;
    pub(super) const ZONE_INVALID_WRITE: u16 = 0x1BC;
    pub(super) const TOO_MANY_ACTIVE_ZONES: u16 = 0x1BD;
    pub(super) const TOO_MANY_OPEN_ZONES: u16 = 0x1BE;
    pub(super) const INVALID_ZONE_STATE_TRANSITION: u16 = 0x1BF;
}

fn boot(bench: &CheckEnvironment) -> Result<Vec<BootedFunction>, Failure> {
    let profile = bench.dir().join("zones.toml");
    fs::write(&profile, PROFILE).map_err(with_path(&profile))?;
    let drive = bench.drive("zoned.img", 256)?.display().to_string();
    let function = FunctionArgument::new(FUNCTION, drive, "64M+128M")
        .option(format!("profile={}", profile.display()))
        .option("lba=4096");
    Ok(vec![BootedFunction::boot(
        bench,
        bench.v6_12(),
        function,
        2,
    )?])
}

/// Runs `nvme COMMAND` with the namespace after the command's name.
fn nvme(
    booted: &BootedFunction,
    command: &str,
    options: &str,
    status: u16,
) -> Result<String, Failure> {
    let line = format!("{command} {NAMESPACE} {options}");
    Ok(booted.guest.expect_nvme(&line, status)?)
}

/// Returns `count` zone descriptors from `zone` on, as nvme-cli prints them.
fn report(booted: &BootedFunction, zone: u64, count: u64) -> Result<Vec<Value>, Failure> {
    let options = format!("-s {} -d {count} -o json", zone * ZONE);
    let text = nvme(booted, "zns report-zones", &options, status::SUCCESS)?;
    let report: Option<Value> = serde_json::from_str(&text).ok();
    let list = report
        .as_ref()
        .and_then(|report| report["zone_list"].as_array());
    list.cloned()
        .ok_or_else(|| Failure::from(format!("No report of zones: {text}")))
}

/// Fails unless a zone is in `state`, with its write pointer `written` blocks from its start.
fn expect_zone(
    booted: &BootedFunction,
    zone: u64,
    state: &str,
    written: u64,
) -> Result<(), Failure> {
    let zones = report(booted, zone, 1)?;
    let found = zones.first();
    let is = |found: &Value| {
        let number = |field: &str| found[field].as_u64();
        let start = zone * ZONE;
        found["state"] == state
            && number("slba") == Some(start)
            && number("cap") == Some(CAPACITY)
            && (state == "FULL" || number("wp") == Some(start + written))
    };
    expect(found.is_some_and(is), || {
        format!("Zone {zone} is not {state} with {written} blocks: {zones:?}")
    })
}

fn reset_all(booted: &BootedFunction) -> Result<(), Failure> {
    nvme(booted, "zns reset-zone", "-a", status::SUCCESS)?;
    Ok(())
}

/// Creates a file in the guest with `count` blocks of a letter.
fn data(booted: &BootedFunction, count: u64, letter: char) -> Result<String, Failure> {
    let file = format!("/tmp/{letter}{count}");
    let bytes = count * 4096;
    booted.guest.check(
        &format!("head -c {bytes} /dev/zero | tr '\\0' {letter} > {file}"),
        TIMEOUT,
    )?;
    Ok(file)
}

fn write(booted: &BootedFunction, slba: u64, count: u64, status: u16) -> Result<(), Failure> {
    let file = data(booted, count, 'w')?;
    let options = format!("-s {slba} -c {} -z {} -d {file}", count - 1, count * 4096);
    nvme(booted, "write", &options, status)?;
    Ok(())
}

fn linux_calls_it_host_managed(booted: &BootedFunction) -> Result<(), Failure> {
    // Attributes are in sectors of 512 bytes. The limits are the lease's share.
    for (attribute, expected) in [
        ("zoned", "host-managed".to_owned()),
        ("nr_zones", ZONES.to_string()),
        ("chunk_sectors", (ZONE * 8).to_string()),
        ("max_open_zones", "2".to_owned()),
        ("max_active_zones", "3".to_owned()),
        ("zone_append_max_bytes", "65536".to_owned()),
    ] {
        let path = format!("/sys/block/nvme0n1/queue/{attribute}");
        let found = booted.guest.check(&format!("cat {path}"), TIMEOUT)?;
        expect(found.trim() == expected, || {
            format!("{path} is {}, not {expected}", found.trim())
        })?;
    }
    let zones = report(booted, 0, ZONES)?;
    expect(zones.len() as u64 == ZONES, || {
        format!("{} zones in the report: {zones:?}", zones.len())
    })?;
    expect_zone(booted, 0, "EMPTY", 0)?;
    expect_zone(booted, ZONES - 1, "EMPTY", 0)?;
    let id = nvme(booted, "zns id-ns", "", status::SUCCESS)?;
    expect(id.contains("0x400"), || format!("No zone size in\n{id}"))?;
    booted.expect_healthy()
}

fn wrong_writes_are_refused(booted: &BootedFunction) -> Result<(), Failure> {
    reset_all(booted)?;
    let zone = |index: u64| index * ZONE;
    write(booted, zone(1) + 1, 1, status::ZONE_INVALID_WRITE)?;
    write(booted, zone(1), 3, status::SUCCESS)?;
    write(booted, zone(1), 1, status::ZONE_INVALID_WRITE)?;
    expect_zone(booted, 1, "IMP_OPENED", 3)?;
    nvme(
        booted,
        "zns open-zone",
        &format!("-s {}", zone(1) + 1),
        status::INVALID_FIELD,
    )?;
    let at = |index: u64| format!("-s {}", zone(index));
    nvme(booted, "zns close-zone", &at(1), status::SUCCESS)?;
    expect_zone(booted, 1, "CLOSED", 3)?;
    nvme(booted, "zns finish-zone", &at(1), status::SUCCESS)?;
    expect_zone(booted, 1, "FULL", 0)?;
    write(booted, zone(1) + 3, 1, status::ZONE_IS_FULL)?;
    nvme(
        booted,
        "zns close-zone",
        &at(1),
        status::INVALID_ZONE_STATE_TRANSITION,
    )?;
    // Fills all writable blocks but 64.
    let fill = format!("dd if=/dev/zero of={NAMESPACE} bs=256k count=11 seek=32 oflag=direct");
    booted.guest.check(&fill, TIMEOUT)?;
    write(
        booted,
        zone(2) + CAPACITY - 64,
        65,
        status::ZONE_BOUNDARY_ERROR,
    )?;
    for index in [3, 4] {
        nvme(booted, "zns open-zone", &at(index), status::SUCCESS)?;
    }
    // The controller closed zone 2 to open other zones. Zone 2 is still active, so a write reopens it.
    write(
        booted,
        zone(2) + CAPACITY - 64,
        1,
        status::TOO_MANY_OPEN_ZONES,
    )?;
    write(booted, zone(5), 1, status::TOO_MANY_ACTIVE_ZONES)?;
    nvme(booted, "zns reset-zone", &at(3), status::SUCCESS)?;
    write(booted, zone(5), 1, status::SUCCESS)?;
    reset_all(booted)?;
    expect_zone(booted, 2, "EMPTY", 0)
}

fn zone_append(booted: &BootedFunction) -> Result<(), Failure> {
    reset_all(booted)?;
    let zslba = 5 * ZONE;
    for (count, letter) in [(2, 'a'), (3, 'b')] {
        let file = data(booted, count, letter)?;
        let options = format!("-s {zslba} -z {} -d {file}", count * 4096);
        let output = nvme(booted, "zns zone-append", &options, status::SUCCESS)?;
        let at = if letter == 'a' { zslba } else { zslba + 2 };
        // nvme-cli prints the address in hexadecimal.
        expect(output.trim_end().ends_with(&format!("LBA {at:x}")), || {
            format!("The append did not go to {at:#x}: {output}")
        })?;
    }
    expect_zone(booted, 5, "IMP_OPENED", 5)?;
    let read = format!("-s {zslba} -c 4 -z 20480 -d /tmp/found");
    nvme(booted, "read", &read, status::SUCCESS)?;
    booted
        .guest
        .check("cat /tmp/a2 /tmp/b3 | cmp - /tmp/found", TIMEOUT)?;
    Ok(())
}

fn fio_writes_and_verifies(booted: &BootedFunction) -> Result<(), Failure> {
    reset_all(booted)?;
    for (name, pattern) in [("sequential", "write"), ("random", "randwrite")] {
        GuestFioJob::new(name, pattern, "16k", 4)
            .with_verification()
            .option("zonemode", "zbd")
            .option("max_open_zones", "2")
            .option("offset", "16m")
            .option("size", "32m")
            .option("io_size", "6m")
            .run(&booted.guest)?;
    }
    booted.expect_healthy()
}

/// Checks zones whose size is not a power of two: programs use the character device, and `serve` warns.
fn linux_makes_no_disk_of_them(bench: &CheckEnvironment) -> Result<(), Failure> {
    const NAMESPACE: &str = "/dev/ng0n1";
    let profile = bench.dir().join("odd.toml");
    let text = "model = \"zns\"\nzone_size = \"6M\"\nzone_capacity = \"6M\"\n\
                max_open = 4\nmax_active = 6\nappend_limit = \"64K\"\n";
    fs::write(&profile, text).map_err(with_path(&profile))?;
    let drive = bench.drive("odd.img", 192)?.display().to_string();
    let function = FunctionArgument::new(FUNCTION, drive, "48M+96M")
        .option(format!("profile={}", profile.display()))
        .option("lba=4096");
    let booted = BootedFunction::boot(bench, bench.v6_12(), function, 1)?;
    let guest = &booted.guest;
    await_path(guest, NAMESPACE, true)?;
    let disks = guest.check("grep -c nvme /proc/partitions || true", TIMEOUT)?;
    expect(disks.trim() == "0", || {
        format!("There are {disks} block devices")
    })?;
    let output = guest.check("dmesg | grep 'invalid zone size' || true", TIMEOUT)?;
    expect(!output.is_empty(), || {
        "The kernel does not say why there is no disk".to_owned()
    })?;
    // 16 zones of 1,536 blocks.
    let report = format!("zns report-zones {NAMESPACE} -d 16 -o json");
    let text = guest.expect_nvme(&report, status::SUCCESS)?;
    let report: Option<Value> = serde_json::from_str(&text).ok();
    let zones = report
        .as_ref()
        .and_then(|report| report["zone_list"].as_array());
    let starts = zones.map(|zones| zones.iter().map(|zone| zone["slba"].as_u64()));
    let starts: Vec<_> = starts.into_iter().flatten().collect();
    let expected: Vec<_> = (0..16_u64).map(|zone| Some(1536 * zone)).collect();
    expect(starts == expected, || {
        format!("Zones begin elsewhere: {text}")
    })?;
    let log = booted.server().log_tail();
    expect(log.contains("Linux makes no disk of it"), || {
        format!("The server does not warn:\n{log}")
    })?;
    booted.server().expect_alive()?;
    Ok(())
}
