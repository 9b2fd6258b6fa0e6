//! A drive that is plugged into a running guest, removed by the guest, and found again.
//!
//! Unplugging by the VMM (`device_del`) is not tested: QEMU up to 11.1 aborts when a vfio-user function with MSI-X is
//! unplugged, whatever server the function has.

use integration::guest::{GuestConfig, GuestDrive, HOTPLUG_BUS};

use crate::Group;
use crate::fixture::{
    CheckEnvironment, FUNCTION, Failure, TIMEOUT, await_path, expect_no_complaints, function,
    verified_load,
};

pub(crate) const GROUP: Group = Group::Alone {
    name: "hotplug",
    checks: &[
        ("v6_1", |bench| plugged_removed_found(bench, true)),
        ("v6_12", |bench| plugged_removed_found(bench, false)),
    ],
};

fn plugged_removed_found(bench: &CheckEnvironment, old: bool) -> Result<(), Failure> {
    let assets = if old { &bench.v6_1()? } else { bench.v6_12() };
    let mut server = bench.serve(&[function(bench)?])?;
    let mut guest = bench.boot_with(assets, &GuestConfig::new("guest").vcpus(2).hotplug())?;
    guest.check("[ ! -e /dev/nvme0n1 ]", TIMEOUT)?;
    guest.plug(
        &GuestDrive::vfio_user(server.socket(FUNCTION))
            .id("plugged")
            .bus(HOTPLUG_BUS),
    )?;
    for _ in 0..2 {
        await_path(&guest, "/dev/nvme0n1", true)?;
        verified_load("verify", 2).run(&guest)?;
        guest.check("echo 1 > /sys/class/nvme/nvme0/device/remove", TIMEOUT)?;
        await_path(&guest, "/dev/nvme0n1", false)?;
        guest.check("echo 1 > /sys/bus/pci/rescan", TIMEOUT)?;
    }
    await_path(&guest, "/dev/nvme0n1", true)?;
    expect_no_complaints(&guest)?;
    server.expect_alive()?;
    Ok(())
}
