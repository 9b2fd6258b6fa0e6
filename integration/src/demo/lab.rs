//! Runs the demonstration inside the lab, on a physical drive, by this program.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use super::{DemoError, DemoOptions};
use crate::guest;
use crate::lab::options::build;
use crate::lab::{EchoedOutput, Lab, LabConfig, LabDrive};
use crate::progress::{ProgressStep, print_line};
use crate::provision::KernelChoice;
use crate::provision::lab::LabAssets;

/// Name and PCI address of the lab's only drive.
const DRIVE: &str = "a";
const ADDRESS: &str = "0000:01:00.0";
/// Bytes of the drive for each guest including a guard, and for a guard.
const SHARE: u64 = (64 + 16) << 20;
const GUARD: u64 = 16 << 20;
/// Memory of the lab for each guest, and for the lab itself, in MiB.
const GUEST_MIB: u32 = 640;
const HOST_MIB: u32 = 2048;
/// Timeout of the demonstration. It is longer than any demonstration, as the run time of jobs is an option.
const TIMEOUT: Duration = Duration::from_secs(3600);
const REPORT: &str = "/tmp/demo.json";
/// Maximum number of labs that are tried if guests are lost.
const ATTEMPTS: u32 = 4;

/// Runs the demonstration inside a new lab. If a guest is lost, tries again in another lab.
pub(super) fn run(options: &DemoOptions) -> Result<bool, DemoError> {
    let programs = build()?;
    let assets = LabAssets::provide(&KernelChoice::V6_12)?;
    for _ in 1..ATTEMPTS {
        match run_once(options, &programs, &assets) {
            Err(error) if guest::is_lost(&error) => {
                crate::print_error(&error);
                print_line(&format!("In the emulated host, {}", guest::LOST_GUEST_LINE));
            }
            result => return result,
        }
    }
    run_once(options, &programs, &assets)
}

fn run_once(
    options: &DemoOptions,
    programs: &[PathBuf],
    assets: &LabAssets,
) -> Result<bool, DemoError> {
    let dir = tempfile::Builder::new()
        .prefix("nvme-mpt-demo-")
        .tempdir()
        .map_err(|source| DemoError::File {
            path: std::env::temp_dir(),
            source,
        })?;
    let size = GUARD + u64::from(options.guests) * SHARE;
    let mut config = LabConfig::new()
        .memory_mib(HOST_MIB + options.guests * GUEST_MIB)
        .drive(LabDrive::new(DRIVE, size));
    for program in programs {
        config = config.with_file(program);
    }
    let step = ProgressStep::start(
        "Booting the lab: an emulated host with an NVMe drive, an IOMMU and KVM",
    );
    let lab = Lab::boot(assets, &config, dir.path())?;
    step.done(format!("kernel {}", assets.host.kernel.name));
    let mut output = EchoedOutput::default();
    let status = lab.stream(&command(options), TIMEOUT, &mut output)?;

    let wanted = match options.json {
        Some(_) => vec![REPORT.to_owned()],
        None => Vec::new(),
    };
    let report = lab.finish(status, &wanted, dir.path())?;
    if status == i32::from(guest::LOST_STATUS) {
        return Err(DemoError::GuestLost {
            output: output.tail(),
        });
    }
    if report.files.len() < wanted.len() {
        return Err(DemoError::NotGiven {
            status,
            output: output.tail(),
        });
    }
    if let (Some(to), Some(from)) = (&options.json, report.files.first()) {
        fs::copy(from, to).map_err(|source| DemoError::File {
            path: to.clone(),
            source,
        })?;
    }
    print_line(&format!(
        "The lab's IOMMU refused {} accesses of the drive",
        report.iommu_faults
    ));
    Ok(status == 0 && report.iommu_faults == 0)
}

/// Returns the command line for the lab, with the options of this program.
fn command(options: &DemoOptions) -> String {
    let mut command = format!(
        "demo --drive {ADDRESS} --guests {} --kernel {} --doorbells {} --vcpus {} --runtime {}",
        options.guests,
        options.kernel,
        options.doorbells.word(),
        options.vcpus,
        options.runtime,
    );
    if let Some(text) = &options.jobs {
        // The text is part of a job's name, so it needs no quoting.
        command.push_str(" --jobs ");
        command.push_str(text);
    }
    if options.json.is_some() {
        command.push_str(" --json ");
        command.push_str(REPORT);
    }
    command
}
