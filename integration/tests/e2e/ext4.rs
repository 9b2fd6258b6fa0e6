//! An ext4 file system, whose guest and whose server are killed: flushed data must survive.

use std::time::Duration;

use integration::guest::{Guest, GuestConfig, GuestDrive};
use integration::server::Server;

use crate::Group;
use crate::fixture::{CheckEnvironment, FUNCTION, Failure, TIMEOUT, expect, function};

pub(crate) const GROUP: Group = Group::Alone {
    name: "ext4",
    checks: &[
        (
            "survives_the_kill_of_its_guest",
            survives_the_kill_of_its_guest,
        ),
        (
            "survives_the_kill_of_its_server",
            survives_the_kill_of_its_server,
        ),
    ],
};

/// Number of durable records before the kill.
const RECORDS: u64 = 40;

/// Creates a file system, fills a part of it, and stores checksums of its files.
const MAKE: &str = "mkfs.ext4 -q -F /dev/nvme0n1 && mount -t ext4 /dev/nvme0n1 /mnt && \
     mkdir /mnt/files /mnt/records && \
     for i in $(seq 24); do head -c 2000000 /dev/urandom > /mnt/files/$i || exit 1; done && \
     cd /mnt/files && md5sum * > /mnt/sums && sync";

/// Mounts the file system, which replays its journal, and verifies the files.
const CHECK: &str = "mount -t ext4 /dev/nvme0n1 /mnt && cd /mnt/files && md5sum -c /mnt/sums && \
     cd / && ls /mnt/records";

fn boot(bench: &CheckEnvironment, server: &Server) -> Result<Guest, Failure> {
    let config = GuestConfig::new("guest")
        .vcpus(2)
        .drive(GuestDrive::vfio_user(server.socket(FUNCTION)));
    bench.boot(&config)
}

/// Writes records, each reported once it is durable, beside an unrelated load of files. Returns the number of the last record
/// that was reported.
fn write_records(guest: &Guest) -> Result<u64, Failure> {
    guest.check(MAKE, TIMEOUT)?;
    guest
        .start("cd /mnt && while :; do head -c 1000000 /dev/urandom > junk; mv junk junk2; done")?;
    guest.start("fsync-records /mnt/records")?;
    let mut last = 0;
    while last < RECORDS {
        last = record(&guest.next_event(TIMEOUT)?)?;
    }
    Ok(last)
}

/// Parses the event `record NUMBER`.
fn record(event: &str) -> Result<u64, Failure> {
    event
        .strip_prefix("record ")
        .and_then(|number| number.parse().ok())
        .ok_or_else(|| Failure::from(format!("An event that is no record: {event}")))
}

/// Verifies in a new guest that all durable records exist, and that the file system has no errors.
fn expect_all_there(guest: &Guest, last: u64) -> Result<(), Failure> {
    guest.check(CHECK, TIMEOUT)?;
    let report = guest.check(
        &format!(
            "for n in $(seq {last}); do \
               seq $n $((n + 400)) | cmp - /mnt/records/$n || exit 1; \
             done; umount /mnt && e2fsck -f -n /dev/nvme0n1"
        ),
        TIMEOUT,
    )?;
    expect(!report.contains("Fix"), || {
        format!("e2fsck found something to fix:\n{report}")
    })
}

fn survives_the_kill_of_its_guest(bench: &CheckEnvironment) -> Result<(), Failure> {
    let server = bench.serve(&[function(bench)?])?;
    let mut guest = boot(bench, &server)?;
    let mut last = write_records(&guest)?;
    guest.kill();
    // Records that the guest reported before the kill, and that are read only now.
    for event in guest.pending_events() {
        last = record(&event)?;
    }
    expect_all_there(&boot(bench, &server)?, last)
}

fn survives_the_kill_of_its_server(bench: &CheckEnvironment) -> Result<(), Failure> {
    let mut server = bench.serve(&[function(bench)?])?;
    let mut guest = boot(bench, &server)?;
    let mut last = write_records(&guest)?;
    server.kill();
    // Without its drive, the guest cannot make further records durable. The pause lets the last reports arrive.
    std::thread::sleep(Duration::from_secs(1));
    guest.kill();
    for event in guest.pending_events() {
        if let Ok(number) = record(&event) {
            last = last.max(number);
        }
    }
    server.restart()?;
    expect_all_there(&boot(bench, &server)?, last)
}
