//! The lab's drives match their description, and obey control commands.

use std::process::Command;
use std::time::Duration;

use integration::lab::{LabDrive, inside};

use crate::fixture::{CheckEnvironment, Failure, await_that, expect, sh, with_path};
use crate::{ExpectedRefusals, Group};

pub(crate) const GROUP: Group = Group::Inside {
    name: "drives",
    drives: || {
        vec![
            LabDrive::new("a", 64 << 20),
            LabDrive::new("b", 32 << 20)
                .lba_size(4096)
                .namespaces(2)
                .max_ioqpairs(1)
                .mdts(1)
                .dbcs(false),
        ]
    },
    refused: ExpectedRefusals::None,
    checks: &[
        ("are_as_described", are_as_described),
        ("bind_to_vfio_and_back", bind_to_vfio_and_back),
        ("freeze_and_thaw", freeze_and_thaw),
        ("fail_where_asked", fail_where_asked),
        ("slow_down", slow_down),
        ("warn", warn),
        ("vanish_and_come_back", vanish_and_come_back),
        ("refuse_what_is_no_request", refuse),
    ],
};

/// Returns the block device of drive `a`.
fn drive_a() -> Result<String, Failure> {
    Ok(inside::block_device("a", 1)?.display().to_string())
}

/// Returns the controller device of a drive.
fn controller(id: &str) -> Result<String, Failure> {
    let block = inside::block_device(id, 1)?.display().to_string();
    Ok(block.trim_end_matches("n1").to_owned())
}

/// Returns a number that nvme-cli prints after `key`.
fn identified(id: &str, key: &str) -> Result<u64, Failure> {
    let text = sh(&format!("nvme id-ctrl {} -o json", controller(id)?))?;
    let json: serde_json::Value =
        serde_json::from_str(&text).map_err(|error| Failure::from(format!("{error}: {text}")))?;
    json[key]
        .as_u64()
        .ok_or_else(|| Failure::from(format!("No {key} in {text}")))
}

fn are_as_described(_: &CheckEnvironment) -> Result<(), Failure> {
    /// Optional Admin Command Support: Doorbell Buffer Config (NVMe Base 2.0, figure 275).
    const DOORBELL_BUFFER_CONFIG: u64 = 1 << 8;
    for (id, nsid, bytes, block) in [("a", 1, 64 << 20, 512), ("b", 2, 32 << 20, 4096)] {
        let device = inside::block_device(id, nsid)?.display().to_string();
        let output = sh(&format!(
            "blockdev --getsize64 {device}; blockdev --getss {device}"
        ))?;
        expect(
            output
                .split_whitespace()
                .eq([bytes.to_string(), block.to_string()]),
            || format!("{device}: {output}"),
        )?;
    }
    for (id, mdts, dbcs) in [("a", 7, DOORBELL_BUFFER_CONFIG), ("b", 1, 0)] {
        let found = (
            identified(id, "mdts")?,
            identified(id, "oacs")? & DOORBELL_BUFFER_CONFIG,
        );
        expect(found == (mdts, dbcs), || format!("Drive {id}: {found:?}"))?;
    }
    // Number of Queues, both zero-based, with submission queues in the low half.
    let granted = sh(&format!("nvme get-feature -f 7 {}", controller("b")?))?;
    expect(
        granted.to_lowercase().contains("value:00000000") || granted.contains("0x00000000"),
        || granted,
    )
}

fn bind_to_vfio_and_back(_: &CheckEnvironment) -> Result<(), Failure> {
    inside::bind("a", "vfio-pci")?;
    let address = inside::address("a")?;
    let group = sh(&format!(
        "ls /sys/bus/pci/devices/{address}/iommu_group/devices; \
         test -e /dev/vfio/$(basename $(readlink /sys/bus/pci/devices/{address}/iommu_group))"
    ))?;
    expect(group.trim() == address, || {
        format!("Not alone in its IOMMU group: {group}")
    })?;
    inside::bind("a", "nvme")?;
    sh(&format!(
        "dd if={} of=/dev/null bs=4k count=1 iflag=direct",
        drive_a()?
    ))?;
    Ok(())
}

fn freeze_and_thaw(_: &CheckEnvironment) -> Result<(), Failure> {
    let device = drive_a()?;
    inside::control("freeze a")?;
    let mut reader = Command::new("dd")
        .args([
            &format!("if={device}"),
            "of=/dev/null",
            "bs=4k",
            "count=1",
            "iflag=direct",
        ])
        .spawn()
        .map_err(with_path(&device))?;
    // The command must still wait in the frozen drive after a thousand times its usual duration.
    std::thread::sleep(Duration::from_secs(2));
    let ended = reader.try_wait();
    expect(matches!(ended, Ok(None)), || {
        format!("It has ended: {ended:?}")
    })?;
    // The other drive works.
    let other = inside::block_device("b", 1)?;
    sh(&format!(
        "dd if={} of=/dev/null bs=4k count=1 iflag=direct",
        other.display()
    ))?;
    inside::control("thaw a")?;
    await_that("the read that was frozen", || match reader.try_wait() {
        Ok(None) => Ok(false),
        Ok(Some(status)) => expect(status.success(), || status.to_string()).map(|()| true),
        Err(error) => Err(Failure::from(error.to_string())),
    })
}

fn fail_where_asked(_: &CheckEnvironment) -> Result<(), Failure> {
    let device = drive_a()?;
    let read = |block: u64| {
        sh(&format!(
            "dd if={device} of=/dev/null bs=4k count=1 skip={block} iflag=direct"
        ))
    };
    // Offset in units of 512 bytes: the failing sector is in the second block of 4 KiB.
    inside::control("fail a read 9")?;
    read(0)?;
    expect(read(1).is_err(), || "A read that must fail".to_owned())?;
    sh(&format!(
        "dd if=/dev/zero of={device} bs=4k count=2 oflag=direct"
    ))?;
    inside::control("fail a write")?;
    read(1)?;
    let write = sh(&format!(
        "dd if=/dev/zero of={device} bs=4k count=1 oflag=direct"
    ));
    expect(write.is_err(), || "A write that must fail".to_owned())?;
    inside::control("heal a")?;
    sh(&format!(
        "dd if=/dev/zero of={device} bs=4k count=2 oflag=direct"
    ))?;
    Ok(())
}

fn slow_down(_: &CheckEnvironment) -> Result<(), Failure> {
    let device = drive_a()?;
    inside::control("slow a 20")?;
    let started = std::time::Instant::now();
    sh(&format!(
        "dd if={device} of=/dev/null bs=4k count=20 iflag=direct"
    ))?;
    let took = started.elapsed();
    inside::control("thaw a")?;
    // Twenty commands at twenty a second. The first few may pass as a burst.
    expect(took > Duration::from_millis(500), || format!("{took:?}"))
}

fn warn(_: &CheckEnvironment) -> Result<(), Failure> {
    let warning = || {
        sh(&format!(
            "nvme smart-log {} | grep -i '^critical_warning'",
            controller("a")?
        ))
    };
    inside::control("warn a 4")?;
    let output = warning()?;
    expect(output.trim_end().ends_with('4'), || output)?;
    inside::control("warn a 0")?;
    let output = warning()?;
    expect(output.trim_end().ends_with('0'), || output)
}

fn vanish_and_come_back(_: &CheckEnvironment) -> Result<(), Failure> {
    let device = drive_a()?;
    sh(&format!(
        "echo before | dd of={device} bs=512 conv=sync oflag=direct"
    ))?;
    for vanish in ["remove a", "unplug a"] {
        inside::control(vanish)?;
        await_that("the drive is gone", || {
            Ok(inside::block_device("a", 1).is_err())
        })?;
        inside::control("plug a")?;
        await_that("the drive is back", || {
            Ok(inside::block_device("a", 1).is_ok())
        })?;
        sh(&format!(
            "dd if={} bs=512 count=1 | grep -q before",
            drive_a()?
        ))?;
        // A pressed attention button would remove the drive again after five seconds.
        std::thread::sleep(Duration::from_secs(6));
        inside::block_device("a", 1)?;
    }
    Ok(())
}

fn refuse(_: &CheckEnvironment) -> Result<(), Failure> {
    for request in ["burn a", "freeze c", "remove c", "slow a", "fail a trim"] {
        expect(inside::control(request).is_err(), || {
            format!("'{request}' was done")
        })?;
    }
    Ok(())
}
