//! KVM guests inside the lab.

use integration::guest::fio::GuestFioJob;
use integration::guest::{Guest, GuestConfig, GuestDrive};
use integration::lab::{LabDrive, inside};

use crate::fixture::{CheckEnvironment, Failure, TIMEOUT, expect};
use crate::{ExpectedRefusals, Group};

pub(crate) const GROUP: Group = Group::Inside {
    name: "nested",
    drives: || vec![LabDrive::new("a", 256 << 20)],
    refused: ExpectedRefusals::None,
    checks: &[("a_whole_drive_passed_through", passed_through)],
};

fn passed_through(bench: &CheckEnvironment) -> Result<(), Failure> {
    inside::bind("a", "vfio-pci")?;
    let drive = GuestDrive::vfio_pci(&inside::address("a")?);
    let mut guest = bench.boot(&GuestConfig::new("guest").drive(drive))?;
    expect_model(&guest, "QEMU NVMe Ctrl")?;
    load().run(&guest)?;
    guest.power_off(TIMEOUT)?;
    inside::bind("a", "nvme")?;
    Ok(())
}

fn load() -> GuestFioJob {
    GuestFioJob::new("verify", "randwrite", "4k", 32)
        .option("size", "8m")
        .with_verification()
}

fn expect_model(guest: &Guest, model: &str) -> Result<(), Failure> {
    let output = guest.check("cat /sys/class/nvme/nvme0/model", TIMEOUT)?;
    expect(output.starts_with(model), || {
        format!("The guest's drive calls itself {output:?}")
    })
}
