//! KVM guests inside the lab.

use integration::guest::fio::Fio;
use integration::guest::{Drive, Guest, GuestConfig};
use integration::lab::{LabDrive, inside};

use crate::fixture::{Bench, Failure, PATIENCE, expect};
use crate::{Group, Refused};

pub(crate) const GROUP: Group = Group::Inside {
    name: "nested",
    drives: || vec![LabDrive::new("a", 256 << 20)],
    refused: Refused::Nothing,
    checks: &[("a_whole_drive_passed_through", passed_through)],
};

fn passed_through(bench: &Bench) -> Result<(), Failure> {
    inside::bind("a", "vfio-pci")?;
    let drive = Drive::vfio_pci(&inside::address("a")?);
    let mut guest = bench.boot(&GuestConfig::new("guest").drive(drive))?;
    expect_model(&guest, "QEMU NVMe Ctrl")?;
    load().run(&guest)?;
    guest.power_off(PATIENCE)?;
    inside::bind("a", "nvme")?;
    Ok(())
}

fn load() -> Fio {
    Fio::new("verify", "randwrite", "4k", 32)
        .option("size", "8m")
        .verified()
}

fn expect_model(guest: &Guest, model: &str) -> Result<(), Failure> {
    let said = guest.check("cat /sys/class/nvme/nvme0/model", PATIENCE)?;
    expect(said.starts_with(model), || {
        format!("The guest's drive calls itself {said:?}")
    })
}
