//! Guests with a balloon: QEMU on a physical drive, and patched Cloud Hypervisor on a file. Cloud Hypervisor refuses a balloon
//! beside a physical drive.

use std::fs;

use integration::checks::balloon::{self, MemoryPinning};
use integration::lab::{LabDrive, inside};
use integration::process::file_tail;
use integration::server::FunctionArgument;
use integration::vmms::cloud_hypervisor::{self, CloudHypervisor};
use integration::vmms::{RootLocation, VmmSetup, VmmUnderTest, VmmsError};

use crate::fixture::{CheckEnvironment, Failure, TIMEOUT, expect, with_path};
use crate::vmms::is_patched_cloud_hypervisor_named;
use crate::{ExpectedRefusals, Group};

pub(crate) const GROUP: Group = Group::Inside {
    name: "balloon",
    drives: || vec![LabDrive::new("a", 128 << 20)],
    refused: ExpectedRefusals::None,
    checks: &[
        ("qemu_on_a_physical_drive", qemu_on_a_physical_drive),
        (
            "cloud_hypervisor_on_a_physical_drive",
            cloud_hypervisor_on_a_physical_drive,
        ),
        ("cloud_hypervisor_on_a_file", cloud_hypervisor_on_a_file),
    ],
};

const RANGE: &str = "0+64M";
/// Arguments for an empty balloon of Cloud Hypervisor.
const BALLOON: [&str; 2] = ["--balloon", "size=0,free_page_reporting=on"];

/// Checks that QEMU frees no page while it has the function, and that data is right.
fn qemu_on_a_physical_drive(bench: &CheckEnvironment) -> Result<(), Failure> {
    inside::bind("a", "vfio-pci")?;
    let function = FunctionArgument::new("a", inside::address("a")?, RANGE);
    balloon::in_qemu(bench, bench.v6_12(), &function, MemoryPinning::All)?;
    Ok(inside::bind("a", "nvme")?)
}

/// Checks that Cloud Hypervisor does not start with a balloon and a physical drive.
fn cloud_hypervisor_on_a_physical_drive(bench: &CheckEnvironment) -> Result<(), Failure> {
    if !is_patched_cloud_hypervisor_named()? {
        return Ok(());
    }
    inside::bind("a", "vfio-pci")?;
    let address = inside::address("a")?;
    let function = FunctionArgument::new("a", &address, RANGE).in_process();
    let function = format!("{function},state_dir={}", bench.state_dir().display());
    let kernel = bench.v6_12().kernel.image.display().to_string();
    let machine = [
        ["--kernel", kernel.as_str()],
        ["--memory", "size=384M,shared=on"],
        ["--nvme-mpt", function.as_str()],
        BALLOON,
    ];
    let mut vmm = cloud_hypervisor::spawn(bench.dir(), machine.as_flattened())?;
    let status = vmm.wait(TIMEOUT)?;
    let log = file_tail(vmm.log());
    expect(!status.success() && is_refusal(&log, &address), || {
        format!("It ended with {status}, and not because of its balloon:\n{log}")
    })?;
    Ok(inside::bind("a", "nvme")?)
}

/// Checks that Cloud Hypervisor with a function on a file accepts a balloon, and then refuses a function on a physical drive.
fn cloud_hypervisor_on_a_file(bench: &CheckEnvironment) -> Result<(), Failure> {
    if !is_patched_cloud_hypervisor_named()? {
        return Ok(());
    }
    inside::bind("a", "vfio-pci")?;
    let address = inside::address("a")?;
    let file = bench.drive("drive.img", 64)?.display().to_string();
    let vmm = CloudHypervisor::launch_with(
        &VmmSetup {
            assets: bench.v6_12(),
            vcpus: 2,
            root: RootLocation::Memory,
            first: FunctionArgument::new("file", &file, RANGE),
            pluggable: FunctionArgument::new("a", &address, RANGE),
            dir: bench.dir(),
            state_dir: &bench.state_dir(),
        },
        &BALLOON,
    )?;
    let mut vmm = balloon::in_cloud_hypervisor(vmm)?;
    match vmm.plug() {
        Err(VmmsError::Refused { answer, .. }) if is_refusal(&answer, &address) => {}
        plugged => {
            return Err(
                format!("A function on a physical drive is not refused: {plugged:?}").into(),
            );
        }
    }
    vmm.power_off()?;
    fs::remove_file(&file).map_err(with_path(&file))?;
    Ok(inside::bind("a", "nvme")?)
}

/// Returns whether a text names the drive and the conflicting option.
fn is_refusal(text: &str, address: &str) -> bool {
    text.contains(address) && text.contains("--balloon")
}
