//! A drive plugged into a running guest, taken out of use by it, and found again.
//!
//! That the VMM takes the drive out again (`device_del`) is not tested: QEMU up to 11.1 aborts itself
//! when a vfio-user function with MSI-X is unplugged, whoever serves it.

use integration::guest::{Drive, GuestConfig, HOTPLUG_BUS};

use crate::Group;
use crate::fixture::{
    FUNCTION, Failure, Lab, PATIENCE, await_path, expect_no_complaints, verified_load,
};

pub(crate) const GROUP: Group = Group::Alone {
    name: "hotplug",
    checks: &[
        ("v6_1", |lab| plugged_removed_found(lab, true)),
        ("v6_12", |lab| plugged_removed_found(lab, false)),
    ],
};

fn plugged_removed_found(lab: &Lab, old: bool) -> Result<(), Failure> {
    let assets = if old { lab.v6_1() } else { lab.v6_12() };
    let mut server = lab.serve(&[lab.function()?])?;
    let mut guest = lab.boot(assets, &GuestConfig::new("guest").vcpus(2).hotplug())?;
    guest.check("[ ! -e /dev/nvme0n1 ]", PATIENCE)?;
    guest.plug(
        &Drive::vfio_user(server.socket(FUNCTION))
            .id("plugged")
            .bus(HOTPLUG_BUS),
    )?;
    for _ in 0..2 {
        await_path(&guest, "/dev/nvme0n1", true)?;
        verified_load("verify", 2).run(&guest)?;
        guest.check("echo 1 > /sys/class/nvme/nvme0/device/remove", PATIENCE)?;
        await_path(&guest, "/dev/nvme0n1", false)?;
        guest.check("echo 1 > /sys/bus/pci/rescan", PATIENCE)?;
    }
    await_path(&guest, "/dev/nvme0n1", true)?;
    expect_no_complaints(&guest)?;
    server.expect_alive()?;
    Ok(())
}
