//! Proves that refusals of the IOMMU are counted, without which a count of zero would prove nothing.

use integration::lab::{LabDrive, inside};

use crate::fixture::{CheckEnvironment, Failure, await_that, sh};
use crate::{ExpectedRefusals, Group};

pub(crate) const GROUP: Group = Group::Inside {
    name: "iommu",
    drives: || vec![LabDrive::new("a", 16 << 20)],
    refused: ExpectedRefusals::AtLeastOne,
    checks: &[("refuses_what_is_not_mapped", refuses)],
};

/// Makes a drive fetch its first admin command from an unmapped address.
fn refuses(_: &CheckEnvironment) -> Result<(), Failure> {
    inside::bind("a", "vfio-pci")?;
    let device = format!("/sys/bus/pci/devices/{}", inside::address("a")?);
    let bar = sh(&format!("head -n 1 {device}/resource | cut -d' ' -f1"))?;
    let bar = u64::from_str_radix(bar.trim().trim_start_matches("0x"), 16)
        .map_err(|error| Failure::from(format!("{bar}: {error}")))?;
    // vfio-pci lets an unopened function sleep in D3hot.
    sh(&format!("echo on >{device}/power/control"))?;
    // Memory Space Enable and Bus Master Enable.
    sh(&format!(
        "printf '\\006\\000' | dd of={device}/config bs=2 seek=2 conv=notrunc"
    ))?;
    // AQA, ASQ, ACQ, CC.EN, and then the admin tail doorbell (NVMe Base 2.0, 3.1.3).
    for (offset, value) in [
        (0x24, 0x000f_000f_u64),
        (0x28, 0xdead_0000),
        (0x2c, 0),
        (0x30, 0xbeef_0000),
        (0x34, 0),
        (0x14, 0x0046_0001),
    ] {
        sh(&format!("devmem {:#x} 32 {value:#x}", bar + offset))?;
    }
    let ready = format!("devmem {:#x} 32", bar + 0x1c);
    await_that("CSTS.RDY", || Ok(sh(&ready)?.trim().ends_with('1')))?;
    sh(&format!("devmem {:#x} 32 1", bar + 0x1000))?;
    await_that("a fault in the kernel's log", || {
        Ok(sh("dmesg")?.contains("[fault reason"))
    })
}
