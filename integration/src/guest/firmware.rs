//! A machine without a kernel. Its firmware uses the drive.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use thiserror::Error;

use super::{GuestConfig, GuestDrive, machine_arguments};
use crate::process::{self, ProcessError, SupervisedChild};
use crate::provision::{GuestAssets, Qemu};

/// Error: there is no UEFI firmware for this QEMU.
#[derive(Debug, Error)]
#[error("QEMU has no UEFI firmware beside it: install the package ovmf")]
pub struct NoUefi;

/// Errors of a firmware check.
#[derive(Debug, Error)]
pub enum FirmwareError {
    /// QEMU cannot be run.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// UEFI firmware is missing.
    #[error(transparent)]
    NoUefi(#[from] NoUefi),
    /// The expected text did not appear on the console.
    #[error(
        "{expected:?} is not on the firmware's console:\n{console}\nThe end of QEMU's log:\n{log}"
    )]
    Silent {
        /// Expected text.
        expected: String,
        /// End of the console.
        console: String,
        /// End of QEMU's output.
        log: String,
    },
}

/// Kinds of firmware.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Firmware {
    /// SeaBIOS, which is part of QEMU.
    Bios,
    /// OVMF.
    Uefi,
}

impl Firmware {
    /// Adds the firmware to QEMU's arguments.
    pub(super) fn add_to(self, command: &mut Command, qemu: &Qemu) -> Result<(), NoUefi> {
        if self == Self::Uefi {
            let image = qemu.uefi_firmware().ok_or(NoUefi)?;
            command.arg("-bios").arg(image);
        }
        Ok(())
    }
}

/// Starts a machine with only firmware and drives, and waits until `expected` appears on its console. The firmware boots
/// from the drive with a [boot index](GuestDrive::boot_index).
///
/// # Errors
/// The text does not appear within `timeout`.
pub fn await_console(
    assets: &GuestAssets,
    firmware: Firmware,
    drives: &[GuestDrive],
    dir: &Path,
    expected: &str,
    timeout: Duration,
) -> Result<(), FirmwareError> {
    let console = dir.join("firmware.console");
    let mut command = assets.qemu.command();
    machine_arguments(&mut command, &GuestConfig::new("firmware"));
    firmware.add_to(&mut command, &assets.qemu)?;
    command
        .arg("-serial")
        .arg(format!("file:{}", console.display()));
    for drive in drives {
        command.arg("-device").arg(drive.properties().to_string());
    }
    let mut qemu = SupervisedChild::spawn("firmware", &command, &dir.join("firmware.qemu.log"))?;
    let deadline = Instant::now() + timeout;
    loop {
        let output = fs::read(&console).unwrap_or_default();
        let output = String::from_utf8_lossy(&output);
        if output.contains(expected) {
            return Ok(());
        }
        if qemu.try_wait()?.is_some() || Instant::now() >= deadline {
            return Err(FirmwareError::Silent {
                expected: expected.to_owned(),
                console: process::tail(&output),
                log: process::file_tail(qemu.log()),
            });
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}
