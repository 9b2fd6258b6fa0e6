//! Guests that have only INTx, without MSI and MSI-X.
//!
//! On a busy machine, Linux has disabled the line ("nobody cared"), because the level rose as the guest consumed its last
//! entry, and did not fall. Therefore the function gives the guest's handler an entry to find.

use integration::guest::{GuestConfig, GuestDrive, HOTPLUG_BUS};
use integration::server::FunctionArgument;

use crate::Group;
use crate::fixture::{
    CheckEnvironment, DRIVE_MIB, FUNCTION, Failure, TIMEOUT, await_path, expect,
    expect_no_complaints, function, verified_load,
};

pub(crate) const GROUP: Group = Group::Alone {
    name: "interrupts",
    checks: &[("pin_boots_loads_and_plugs", pin_boots_loads_and_plugs)],
};

/// The function that is plugged in later.
const LATER: &str = "later";

fn pin_boots_loads_and_plugs(bench: &CheckEnvironment) -> Result<(), Failure> {
    let later = bench.drive("later.img", DRIVE_MIB)?.display().to_string();
    let later = FunctionArgument::new(LATER, later, format!("0+{DRIVE_MIB}M"));
    let mut server = bench.serve(&[function(bench)?, later])?;
    let config = GuestConfig::new("guest")
        .vcpus(2)
        .hotplug()
        .drive(GuestDrive::vfio_user(server.socket(FUNCTION)))
        .kernel_arguments("pci=nomsi");
    let mut guest = bench.boot(&config)?;
    let of_nvme = guest.check("grep nvme /proc/interrupts", TIMEOUT)?;
    expect(
        of_nvme.contains("IO-APIC") && !of_nvme.contains("MSI"),
        || format!("The guest has other interrupts than the pin:\n{of_nvme}"),
    )?;
    verified_load("boot", 2).run(&guest)?;
    guest.plug(
        &GuestDrive::vfio_user(server.socket(LATER))
            .id("plugged")
            .bus(HOTPLUG_BUS),
    )?;
    await_path(&guest, "/dev/nvme1n1", true)?;
    verified_load("plugged", 2)
        .option("filename", "/dev/nvme1n1")
        .run(&guest)?;
    // Load on both drives at once, then on the first alone.
    verified_load("both", 2)
        .option("filename", "/dev/nvme0n1:/dev/nvme1n1")
        .run(&guest)?;
    verified_load("again", 2).run(&guest)?;
    // The kernel disables a line that stays high.
    let output = guest.check("dmesg | grep -i 'nobody cared' || true", TIMEOUT)?;
    expect(output.trim().is_empty(), || output.clone())?;
    expect_no_complaints(&guest)?;
    server.expect_alive()?;
    Ok(())
}
