//! Fixtures of checks inside the lab: a bench, and helpers for the lab host.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

pub(crate) use integration::checks::{CheckEnvironment, Failure, expect, with_path};
use integration::lab::inside;
use integration::process;
use integration::provision::{GuestAssets, KernelChoice};

/// Timeout of any operation in the lab.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(180);
/// Directory for the logs of checks.
pub(crate) const LOGS: &str = "/tmp/logs";

/// Runs a shell script on the lab host, which must succeed. Returns its output.
pub(crate) fn sh(script: &str) -> Result<String, Failure> {
    Ok(process::run(Command::new("sh").args(["-c", script]))?)
}

/// Runs `work` with its child processes pinned to one processor of the lab host.
pub(crate) fn on_processor<T>(
    processor: u32,
    work: impl FnOnce() -> Result<T, Failure>,
) -> Result<T, Failure> {
    let this = std::process::id();
    let processors = sh(&format!("taskset -p {this} | sed 's/.*: //'"))?;
    sh(&format!("taskset -pc {processor} {this}"))?;
    let done = work();
    sh(&format!("taskset -p {} {this}", processors.trim()))?;
    done
}

/// Returns the number of DMA accesses that the IOMMU of the lab host has refused so far.
pub(crate) fn iommu_faults() -> Result<u64, Failure> {
    let count = sh("dmesg | grep 'DMAR: \\[' | grep -c 'fault reason' || true")?;
    let count = count.trim().parse();
    count.map_err(|_| Failure::from("The kernel's log can't be read"))
}

/// Waits until `happened` returns true.
pub(crate) fn await_that(
    what: &str,
    mut happened: impl FnMut() -> Result<bool, Failure>,
) -> Result<(), Failure> {
    let deadline = std::time::Instant::now() + TIMEOUT;
    while !happened()? {
        expect(std::time::Instant::now() < deadline, || {
            format!("Waited {TIMEOUT:?} in vain: {what}")
        })?;
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// Returns a bench with its own directory.
pub(crate) fn bench(check: &str) -> Result<CheckEnvironment, Failure> {
    let dir = Path::new(LOGS).join(check.replace("::", "-"));
    fs::create_dir_all(&dir).map_err(with_path(&dir))?;
    let assets = GuestAssets::provide(&KernelChoice::V6_12)?;
    Ok(CheckEnvironment::new(
        dir.clone(),
        dir,
        inside::copied_path("nvme-mpt"),
        assets,
    ))
}
