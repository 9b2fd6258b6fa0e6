//! Use of the drive by firmware, long before an operating system.

use std::fs::File;
use std::io::Write;
use std::time::Duration;

use integration::guest::Drive;
use integration::guest::firmware::{Firmware, await_console};

use crate::Group;
use crate::fixture::{Bench, FUNCTION, Failure, at, function};

pub(crate) const GROUP: Group = Group::Alone {
    name: "firmware",
    checks: &[
        ("bios_boots_from_the_drive", bios_boots_from_the_drive),
        ("uefi_sees_the_drive", uefi_sees_the_drive),
    ],
};

const PATIENCE: Duration = Duration::from_secs(120);
const GREETING: &[u8] = b"booted from NVMe\0";

/// A boot sector that writes a greeting to the first serial port and halts.
fn boot_sector() -> Vec<u8> {
    // The BIOS loads it at 7C00h, so the greeting, which follows the code, lies at 7C12h.
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

fn bios_boots_from_the_drive(bench: &Bench) -> Result<(), Failure> {
    let function = function(bench)?;
    let path = std::path::PathBuf::from(&function.path);
    File::options()
        .write(true)
        .open(&path)
        .and_then(|mut file| file.write_all(&boot_sector()))
        .map_err(at(path))?;
    let server = bench.serve(&[function])?;
    let drive = Drive::vfio_user(server.socket(FUNCTION));
    await_console(
        bench.v6_12(),
        Firmware::Bios,
        drive,
        bench.folder(),
        "booted from NVMe",
        PATIENCE,
    )?;
    Ok(())
}

/// The UEFI shell begins with a list of all block devices, by their paths.
fn uefi_sees_the_drive(bench: &Bench) -> Result<(), Failure> {
    let server = bench.serve(&[function(bench)?])?;
    let drive = Drive::vfio_user(server.socket(FUNCTION));
    await_console(
        bench.v6_12(),
        Firmware::Uefi,
        drive,
        bench.folder(),
        "NVMe(0x1,",
        PATIENCE,
    )?;
    Ok(())
}
