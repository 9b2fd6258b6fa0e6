//! A guest of QEMU with a balloon on a physical drive.

use integration::checks::balloon::{self, Pinning};
use integration::lab::{LabDrive, inside};
use integration::server::FunctionOptions;

use crate::fixture::{Bench, Failure};
use crate::{Group, Refused};

pub(crate) const GROUP: Group = Group::Inside {
    name: "balloon",
    drives: || vec![LabDrive::new("a", 128 << 20)],
    refused: Refused::Nothing,
    checks: &[("qemu_on_a_physical_drive", qemu_on_a_physical_drive)],
};

const RANGE: &str = "0+64M";

/// QEMU frees no page while it has the function: data is right.
fn qemu_on_a_physical_drive(bench: &Bench) -> Result<(), Failure> {
    inside::bind("a", "vfio-pci")?;
    let function = FunctionOptions::new("a", inside::address("a")?, RANGE);
    balloon::in_qemu(bench, bench.v6_12(), &function, Pinning::All)?;
    Ok(inside::bind("a", "nvme")?)
}
