//! A Btrfs file system on zones, which is created, filled, partly emptied, and verified.

use std::fs;
use std::time::Duration;

use integration::provision::GuestAssets;
use integration::server::FunctionArgument;

use crate::Group;
use crate::fixture::{
    BootedFunction, CheckEnvironment, FUNCTION, Failure, TIMEOUT, expect, with_path,
};

pub(crate) const GROUP: Group = Group::Alone {
    name: "btrfs",
    checks: &[("fills_a_drive_with_zones", fills_a_drive_with_zones)],
};

/// Timeout of a script: the guest computes checksums in software, on an emulated processor.
const WORK: Duration = Duration::from_secs(600);

/// Linux needs at least eight active zones (`BTRFS_MIN_ACTIVE_ZONES`). The lease has half of the drive's.
const PROFILE: &str = "model = \"zns\"\nzone_size = \"4M\"\nzone_capacity = \"4M\"\n\
                       max_open = 32\nmax_active = 32\nappend_limit = \"128K\"\n";
/// Zones of the lease.
const ZONES: u64 = 128;
/// Zones that the file system must fill. Its metadata needs further zones, because each change writes a new copy.
const FILLED: u64 = 80;

const MAKE: &str = "mkfs.btrfs -q -d single -m single /dev/nvme0n1 && mount -t btrfs /dev/nvme0n1 /mnt && \
                    grep /mnt /proc/mounts";
/// Writes files that are verified later, and a large file.
const FILL: &str = "for i in $(seq 8); do head -c 2000000 /dev/urandom > /mnt/$i || exit 1; done; sync; \
                    cd /mnt && md5sum * > /tmp/sums && cd / && \
                    dd if=/dev/zero of=/mnt/rest bs=1M count=320 && sync";
/// Removes files, which leaves zones to be reset, and fills those zones with other files.
const REPLACE_FILES: &str = "rm /mnt/rest && sync && sleep 1 && \
                         for i in $(seq 3); do head -c 4000000 /dev/urandom > /mnt/new || exit 1; sync; done; \
                         rm /mnt/new && umount /mnt && btrfs check /dev/nvme0n1";
const FIND: &str = "mount -t btrfs /dev/nvme0n1 /mnt && cd /mnt && md5sum -c /tmp/sums && \
                    cd / && umount /mnt";

fn fills_a_drive_with_zones(bench: &CheckEnvironment) -> Result<(), Failure> {
    let profile = bench.dir().join("zones.toml");
    fs::write(&profile, PROFILE).map_err(with_path(&profile))?;
    let drive = bench.drive("zoned.img", 1024)?.display().to_string();
    let function = FunctionArgument::new(FUNCTION, drive, "128M+512M")
        .option(format!("profile={}", profile.display()))
        .option("lba=4096");
    let assets = GuestAssets::provide_with_modules(&["btrfs"])?;
    let booted = BootedFunction::boot(bench, &assets, function, 2)?;
    let guest = &booted.guest;
    guest.load_modules()?;

    // Condition of an empty zone in the output of blkzone: `zcond: 1(em)`.
    let zones = |condition: &str| -> Result<u64, Failure> {
        let count = format!("blkzone report /dev/nvme0n1 | grep -c '({condition})' || true");
        let text = guest.check(&count, TIMEOUT)?;
        let count = text.trim().parse();
        count.map_err(|_| Failure::from(format!("blkzone counts no zones: {text}")))
    };
    let empty = zones("em")?;
    expect(empty == ZONES, || {
        format!("{empty} zones are empty, not {ZONES}")
    })?;
    guest.check(MAKE, WORK)?;
    guest.check(FILL, WORK)?;
    let full = zones("fu")?;
    expect(full >= FILLED, || {
        format!("{full} zones are full, not {FILLED}")
    })?;
    guest.check(REPLACE_FILES, WORK)?;
    guest.check(FIND, WORK)?;
    booted.expect_healthy()
}
