//! Deallocation by guests: a file on the host shrinks after `fstrim` and `blkdiscard` in a standard Debian, with its own kernel
//! and tools.
//!
//! Linux 5.10 of Debian 11 knows no limit of Deallocate ranges (DMRSL, NVMe 2.0): it deallocates the whole drive by one
//! command.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use integration::error_chain;
use integration::guest::{Guest, GuestConfig, GuestDrive, HOTPLUG_BUS};
use integration::progress::print_line;
use integration::provision::debian::{self, DebianRelease};
use integration::provision::{ProvisionError, host};
use integration::server::FunctionArgument;

use crate::Group;
use crate::fixture::{
    CheckEnvironment, FUNCTION, Failure, TIMEOUT, await_path, expect, expect_no_complaints,
    with_path,
};

pub(crate) const GROUP: Group = Group::Alone {
    name: "trim",
    checks: &[
        ("debian_11", |bench| {
            frees_blocks(bench, DebianRelease::Debian11)
        }),
        ("debian_12", |bench| {
            frees_blocks(bench, DebianRelease::Debian12)
        }),
        ("debian_13", |bench| {
            frees_blocks(bench, DebianRelease::Debian13)
        }),
    ],
};

/// Size of the drive, which exceeds the advised limit of a Deallocate, 1 GiB.
const DRIVE_MIB: u64 = 4096;
/// Size of the file that a guest writes and removes.
const FILE_MIB: u64 = 64;
/// Fewest MiB that must be allocated or freed for the file, as file system and guest may keep a part.
const TRIMMED_MIB_MIN: u64 = 60;
/// Most MiB that an empty ext4 of this size needs with its journal.
const EMPTY_MIB: u64 = 160;

/// Error texts of apt for a mirror without a suite.
const NO_SUITE: [&str; 2] = ["does not have a Release file", "404"];

/// Returns the MiB that are allocated to a file on the host, like `du`.
fn du(path: &Path) -> Result<u64, Failure> {
    let metadata = fs::metadata(path).map_err(with_path(path))?;
    Ok((metadata.blocks() * 512) >> 20)
}

/// Boots a Debian, and plugs the function in after its root was mounted, so that the root is the first drive.
fn boot(bench: &CheckEnvironment, release: DebianRelease, socket: &Path) -> Result<Guest, Failure> {
    let image = debian::provide(release)?;
    let assets = bench.v6_12().with_kernel(&release.kernel())?;
    let image = format!(
        "if=none,id=root,format=raw,snapshot=on,file={}",
        image.display()
    );
    let config = GuestConfig::new("debian")
        .vcpus(2)
        .memory_mib(1024)
        .hotplug()
        .root_on_drive()
        .kernel_arguments("init=/lib/systemd/systemd systemd.show_status=0")
        .qemu_arguments(["-drive", &image, "-device", "nvme,drive=root,serial=root"]);
    let mut guest = Guest::start_booting(&assets, &config, bench.dir())?;
    guest.await_ready(TIMEOUT)?;
    guest.plug(&GuestDrive::vfio_user(socket).id("plugged").bus(HOTPLUG_BUS))?;
    await_path(&guest, "/dev/nvme1n1", true)?;
    Ok(guest)
}

/// Returns whether the mirror lacks a suite. Debian moves old suites to an archive.
fn is_missing_suite(failure: &Failure) -> bool {
    let text = error_chain(&**failure);
    failure.is::<ProvisionError>() && NO_SUITE.iter().any(|message| text.contains(message))
}

fn frees_blocks(bench: &CheckEnvironment, release: DebianRelease) -> Result<(), Failure> {
    let suite = release.suite();
    if !host::is_root() {
        print_line(&format!(
            "        NOT CHECKED: trim: {suite}: only root can install a Debian into a folder"
        ));
        return Ok(());
    }
    let drive = bench.drive("drive.img", DRIVE_MIB)?;
    let range = format!("0+{DRIVE_MIB}M");
    let path = drive.display().to_string();
    let mut server = bench.serve(&[FunctionArgument::new(FUNCTION, path, range)])?;
    let guest = match boot(bench, release, &server.socket(FUNCTION)) {
        Err(failure) if release == DebianRelease::Debian11 && is_missing_suite(&failure) => {
            print_line(&format!(
                "        NOT CHECKED: trim: {suite}: the mirror has it no more"
            ));
            return Ok(());
        }
        booted => booted?,
    };
    let check = |script: &str| guest.check(script, TIMEOUT);

    // mkfs.ext4 deallocates the drive first. The kernel writes no tables of inodes later.
    check(
        "dmesg -C; mkfs.ext4 -q -F /dev/nvme1n1 && mount -o noinit_itable /dev/nvme1n1 /mnt && sync",
    )?;
    let empty = du(&drive)?;
    expect(empty <= EMPTY_MIB, || {
        format!("An empty file system takes {empty} MiB")
    })?;
    let script = format!("head -c {FILE_MIB}M /dev/urandom > /mnt/file && sync");
    check(&script)?;
    let full = du(&drive)?;
    expect(full >= empty + TRIMMED_MIB_MIN, || {
        format!("{FILE_MIB} MiB were written, and the file went from {empty} to {full} MiB")
    })?;
    check("rm /mnt/file && sync")?;
    let output = check("fstrim --verbose /mnt && sync")?;
    let trimmed = du(&drive)?;
    expect(trimmed + TRIMMED_MIB_MIN <= full, || {
        format!("fstrim left {trimmed} of {full} MiB: {output}")
    })?;
    // Remaining data must be intact.
    check("umount /mnt && e2fsck -f -n /dev/nvme1n1")?;
    check("blkdiscard --force /dev/nvme1n1")?;
    let discarded = du(&drive)?;
    expect(discarded == 0, || {
        format!("blkdiscard left {discarded} MiB")
    })?;
    expect_no_complaints(&guest)?;
    let kernel = check("uname --kernel-release")?;
    let largest = check("cat /sys/block/nvme1n1/queue/discard_max_bytes")?;
    print_line(&format!(
        "        {suite}, Linux {}, discards of at most {} bytes: the file takes {empty} MiB with an empty ext4, \
         {full} MiB with {FILE_MIB} MiB written, {trimmed} MiB after fstrim, {discarded} MiB after blkdiscard",
        kernel.trim(),
        largest.trim()
    ));
    server.expect_alive()?;
    Ok(())
}
