//! Use of the drive by firmware, before an operating system runs.
//!
//! Each check runs with the drive alone, and with a zoned drive and a key-value drive before it, which the firmware must skip.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use integration::guest::firmware::{Firmware, await_console};
use integration::guest::{Guest, GuestConfig, GuestDrive};
use integration::process;
use integration::progress::print_line;
use integration::provision::{bootable, host};
use integration::server::{FunctionArgument, Server};

use crate::Group;
use crate::fixture::{
    CheckEnvironment, FUNCTION, Failure, expect, expect_no_complaints, function, with_path,
};

pub(crate) const GROUP: Group = Group::Alone {
    name: "firmware",
    checks: &[
        ("bios_boots_from_the_drive", |bench| bios_boots(bench, &[])),
        ("bios_boots_from_the_drive_beside_others", |bench| {
            bios_boots(bench, &others(bench)?)
        }),
        ("uefi_sees_the_drive", |bench| {
            uefi_sees(bench, function(bench)?)
        }),
        // The minimum number of queue pairs that the firmware's driver accepts.
        ("uefi_sees_the_drive_with_two_queue_pairs", |bench| {
            let narrow = function(bench)?.option("queues=2");
            uefi_sees(bench, narrow.option("doorbell-stride=4"))
        }),
    ],
};

/// Checks that need a separate Debian installation.
pub(crate) const FULL_GROUP: Group = Group::Alone {
    name: "debian",
    checks: &[
        ("uefi_boots_it", |bench| uefi_boots_debian(bench, &[])),
        ("uefi_boots_it_beside_others", |bench| {
            uefi_boots_debian(bench, &others(bench)?)
        }),
    ],
};

/// Timeout of a Debian that GRUB loads through the firmware's driver, on an emulated processor.
const BOOT_TIMEOUT: Duration = Duration::from_secs(600);
const TIMEOUT: Duration = Duration::from_secs(300);
const GREETING: &[u8] = b"booted from NVMe\0";

/// Returns a boot sector that writes a greeting to the first serial port and halts.
fn boot_sector() -> Vec<u8> {
    // The BIOS loads the sector at 7C00h. The greeting follows the code at 7C12h.
    let code: [u8; 18] = [
        0xfc, // cld
        0x31, 0xc0, // xor ax, ax
        0x8e, 0xd8, // mov ds, ax
        0xbe, 0x12, 0x7c, // mov si, 0x7c12
        0xba, 0xf8, 0x03, // mov dx, 0x3f8
        0xac, // next: lodsb
        0xee, // out dx, al
        0x84, 0xc0, // test al, al
        0x75, 0xfa, // jnz next
        0xf4, // hlt
    ];
    let mut sector = code.to_vec();
    sector.extend(GREETING);
    sector.resize(510, 0);
    sector.extend([0x55, 0xaa]);
    sector
}

/// A profile of zones without unwritable blocks.
const ZONES: &str = "model = \"zns\"\nzone_size = \"4M\"\nzone_capacity = \"4M\"\n\
                     max_open = 4\nmax_active = 4\nappend_limit = \"64K\"\n";

/// Returns functions on a zoned drive and on a key-value drive.
fn others(bench: &CheckEnvironment) -> Result<[FunctionArgument; 2], Failure> {
    let profile = bench.dir().join("zones.toml");
    fs::write(&profile, ZONES).map_err(with_path(&profile))?;
    let zoned = bench.drive("zoned.img", 64)?.display().to_string();
    let pairs = bench.drive("pairs.img", 64)?.display().to_string();
    Ok([
        FunctionArgument::new("zoned", zoned, "0+64M")
            .option(format!("profile={}", profile.display())),
        FunctionArgument::new("pairs", pairs, "0+64M").option("profile=kv"),
    ])
}

/// Starts a server with these functions. Returns the drives of a machine that boots from the last one.
fn serve(
    bench: &CheckEnvironment,
    others: &[FunctionArgument],
    boots: FunctionArgument,
) -> Result<(Server, Vec<GuestDrive>), Failure> {
    let server = bench.serve(&[others, &[boots]].concat())?;
    let drive = |id: &str| GuestDrive::vfio_user(server.socket(id)).id(id);
    let mut drives: Vec<GuestDrive> = others.iter().map(|other| drive(&other.id)).collect();
    drives.push(drive(FUNCTION).boot_index(0));
    Ok((server, drives))
}

fn bios_boots(bench: &CheckEnvironment, others: &[FunctionArgument]) -> Result<(), Failure> {
    let function = function(bench)?;
    let path = PathBuf::from(&function.path);
    File::options()
        .write(true)
        .open(&path)
        .and_then(|mut file| file.write_all(&boot_sector()))
        .map_err(with_path(path))?;
    let (_server, drives) = serve(bench, others, function)?;
    await_console(
        bench.v6_12(),
        Firmware::Bios,
        &drives,
        bench.dir(),
        "booted from NVMe",
        TIMEOUT,
    )?;
    Ok(())
}

/// Waits for the list of block devices that the UEFI shell prints at first.
fn uefi_sees(bench: &CheckEnvironment, function: FunctionArgument) -> Result<(), Failure> {
    let (_server, drives) = serve(bench, &[], function)?;
    await_console(
        bench.v6_12(),
        Firmware::Uefi,
        &drives,
        bench.dir(),
        "NVMe(0x1,",
        TIMEOUT,
    )?;
    Ok(())
}

/// Checks that OVMF finds GRUB on the drive, GRUB finds the kernel, and the kernel finds a writable root.
fn uefi_boots_debian(bench: &CheckEnvironment, others: &[FunctionArgument]) -> Result<(), Failure> {
    if !host::is_root() {
        print_line("        NOT CHECKED: debian: only root can install a Debian into a folder");
        return Ok(());
    }
    let (function, disk) = debian_function(bench)?;
    let (mut server, drives) = serve(bench, others, function)?;
    let mut config = GuestConfig::new("debian")
        .memory_mib(1024)
        .firmware(Firmware::Uefi);
    for drive in drives {
        config = config.drive(drive);
    }
    let mut guest = Guest::start_booting(bench.v6_12(), &config, bench.dir())?;
    guest.await_ready(BOOT_TIMEOUT)?;
    let check = |script: &str| guest.check(script, BOOT_TIMEOUT);

    check("test -d /sys/firmware/efi")?;
    let root = check("findmnt --noheadings --output SOURCE /")?;
    let namespace = root.trim().trim_end_matches("p2");
    let serial = check(&format!("cat /sys/block/{}/device/serial", name(namespace)))?;
    let serials = server.function_stats(FUNCTION)?.serial;
    expect(serial.trim() == serials, || {
        format!("Its root is on {root}, the drive of serial {serial}, not {serials}")
    })?;
    let found = check("ls -d /sys/class/nvme/nvme* | wc -l")?;
    expect(found.trim() == (others.len() + 1).to_string(), || {
        format!("The guest has {found} controllers")
    })?;
    check(&format!("echo {NOTE} > /note && sync"))?;
    expect_no_complaints(&guest)?;
    guest.power_off(BOOT_TIMEOUT)?;
    server.expect_alive()?;

    // The note must be in the file system of the partition.
    process::run(Command::new("grep").args(["-q", "-a", NOTE]).arg(&disk))?;
    Ok(())
}

/// Text that a guest writes to its root file system.
const NOTE: &str = "this_guest_was_booted_by_firmware";

/// Returns the name of a block device.
fn name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

/// Returns a function on a drive with a Debian, and the drive's file.
fn debian_function(bench: &CheckEnvironment) -> Result<(FunctionArgument, PathBuf), Failure> {
    let image = bootable::provide()?;
    let drive = bench.drive("debian.img", 0)?;
    process::run(
        Command::new("cp")
            .arg("--sparse=always")
            .args([Path::new(&image), &drive]),
    )?;
    let bytes = fs::metadata(&drive).map_err(with_path(&drive))?.len();
    let function = FunctionArgument::new(
        FUNCTION,
        drive.display().to_string(),
        format!("0+{}M", bytes >> 20),
    );
    Ok((function, drive))
}
