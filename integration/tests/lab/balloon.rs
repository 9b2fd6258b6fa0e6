//! Guests with a balloon: QEMU on a physical drive, and patched Cloud Hypervisor on a file. Cloud Hypervisor refuses a balloon
//! beside a physical drive.

use std::fs;

use integration::checks::balloon::{self, Pinning};
use integration::lab::{LabDrive, inside};
use integration::process::file_tail;
use integration::server::FunctionOptions;
use integration::vmms::cloud_hypervisor::{self, CloudHypervisor};
use integration::vmms::{Root, Setup, Vmm, VmmsError};

use crate::fixture::{Bench, Failure, PATIENCE, at, expect};
use crate::vmms::is_patched_cloud_hypervisor_named;
use crate::{Group, Refused};

pub(crate) const GROUP: Group = Group::Inside {
    name: "balloon",
    drives: || vec![LabDrive::new("a", 128 << 20)],
    refused: Refused::Nothing,
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
fn qemu_on_a_physical_drive(bench: &Bench) -> Result<(), Failure> {
    inside::bind("a", "vfio-pci")?;
    let function = FunctionOptions::new("a", inside::address("a")?, RANGE);
    balloon::in_qemu(bench, bench.v6_12(), &function, Pinning::All)?;
    Ok(inside::bind("a", "nvme")?)
}

/// Checks that Cloud Hypervisor does not start with a balloon and a physical drive.
fn cloud_hypervisor_on_a_physical_drive(bench: &Bench) -> Result<(), Failure> {
    if !is_patched_cloud_hypervisor_named()? {
        return Ok(());
    }
    inside::bind("a", "vfio-pci")?;
    let address = inside::address("a")?;
    let function = FunctionOptions::new("a", &address, RANGE).in_process();
    let function = format!("{function},state_dir={}", bench.state_dir().display());
    let kernel = bench.v6_12().kernel.image.display().to_string();
    let machine = [
        ["--kernel", kernel.as_str()],
        ["--memory", "size=384M,shared=on"],
        ["--nvme-mpt", function.as_str()],
        BALLOON,
    ];
    let mut vmm = cloud_hypervisor::spawn(bench.folder(), machine.as_flattened())?;
    let status = vmm.wait(PATIENCE)?;
    let log = file_tail(vmm.log());
    expect(!status.success() && is_refusal(&log, &address), || {
        format!("It ended with {status}, and not because of its balloon:\n{log}")
    })?;
    Ok(inside::bind("a", "nvme")?)
}

/// Checks that Cloud Hypervisor with a function on a file accepts a balloon, and then refuses a function on a physical drive.
fn cloud_hypervisor_on_a_file(bench: &Bench) -> Result<(), Failure> {
    if !is_patched_cloud_hypervisor_named()? {
        return Ok(());
    }
    inside::bind("a", "vfio-pci")?;
    let address = inside::address("a")?;
    let file = bench.drive("drive.img", 64)?.display().to_string();
    let vmm = CloudHypervisor::launch_with(
        &Setup {
            assets: bench.v6_12(),
            vcpus: 2,
            root: Root::Memory,
            first: FunctionOptions::new("file", &file, RANGE),
            pluggable: FunctionOptions::new("a", &address, RANGE),
            folder: bench.folder(),
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
    fs::remove_file(&file).map_err(at(&file))?;
    Ok(inside::bind("a", "nvme")?)
}

/// Returns whether a text names the drive and the conflicting option.
fn is_refusal(text: &str, address: &str) -> bool {
    text.contains(address) && text.contains("--balloon")
}
