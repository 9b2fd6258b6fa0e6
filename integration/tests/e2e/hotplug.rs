//! A drive plugged into a running guest, and taken out again.

use integration::guest::{Drive, GuestConfig, HOTPLUG_BUS};

use crate::Group;
use crate::lab::{FUNCTION, Fault, Lab, PATIENCE, await_path, verified_load};

pub(crate) const GROUP: Group = Group::Alone {
    name: "hotplug",
    checks: &[("in_and_out_and_in_again", in_and_out_and_in_again)],
};

fn in_and_out_and_in_again(lab: &Lab) -> Result<(), Fault> {
    let mut server = lab.serve(&[lab.function()?])?;
    let mut guest = lab.boot(lab.v6_12(), &GuestConfig::new("guest").vcpus(2).hotplug())?;
    guest.check("[ ! -e /dev/nvme0n1 ]", PATIENCE)?;
    let drive = Drive::vfio_user(server.socket(FUNCTION))
        .id("plugged")
        .bus(HOTPLUG_BUS);
    for _ in 0..3 {
        guest.plug(&drive)?;
        await_path(&guest, "/dev/nvme0n1", true)?;
        verified_load("verify", 2).run(&guest)?;
        guest.unplug("plugged", PATIENCE)?;
        await_path(&guest, "/dev/nvme0n1", false)?;
        server.expect_alive()?;
    }
    Ok(())
}
