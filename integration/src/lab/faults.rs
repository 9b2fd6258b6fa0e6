//! Faults of drives, injected through QEMU's monitor.

use std::collections::HashSet;
use std::fmt;
use std::fs;
use std::io;
use std::path::PathBuf;
use std::str::FromStr;

use serde_json::{Value, json};
use thiserror::Error;

use super::drive::{LabDrive, PlacedDrive};
use crate::guest::qmp::{Qmp, QmpError};

/// Read that is issued once the drive is limited to one byte per second. The time that it takes exceeds every test.
const FREEZING_READ: &str = "aio_read 0 1M";

/// Request for a fault of a drive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LabFaultRequest {
    /// The drive.
    pub drive: String,
    /// Requested action.
    pub action: LabFaultAction,
}

/// Actions of a request, with their text forms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LabFaultAction {
    /// `freeze DRIVE`: reads and writes no longer complete. Registers, admin commands and Flush still work. A controller
    /// reset waits for the in-flight commands, so QEMU's device ends them then.
    Freeze,
    /// `thaw DRIVE`: frozen commands complete, and the drive has its full speed again.
    Thaw,
    /// `slow DRIVE IOPS`: limits the I/Os per second.
    Slow(u64),
    /// `fail DRIVE read|write|flush [BLOCK]`: commands of this kind end with a media error. With BLOCK, only commands on this
    /// block of 512 bytes fail, independent of the drive's block size.
    Fail(FailedCommandKind, Option<u64>),
    /// `heal DRIVE`: commands of all kinds succeed again.
    Heal,
    /// `warn DRIVE BITS`: sets the health log's Critical Warning bits (NVMe Base 2.0, 5.16.1.3), and reports the event.
    Warn(u8),
    /// `unplug DRIVE`: presses the attention button of the drive's slot, so that the system can prepare for the removal.
    Unplug,
    /// `plug DRIVE`: plugs the drive into its slot again.
    Plug,
    /// `enables DRIVE`: returns the number of times that CC.EN was set. The number is the sum over all drives.
    Enables,
}

/// Kind of commands to fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FailedCommandKind {
    /// Reads.
    Read,
    /// Writes.
    Write,
    /// Flushes.
    Flush,
}

/// QEMU's trace event for setting CC.EN.
pub(super) const ENABLE: &str = "pci_nvme_mmio_start_success";

/// Errors of a fault request.
#[derive(Debug, Error)]
pub enum LabFaultError {
    /// The text is no request.
    #[error(
        "'{text}' is not a request: freeze DRIVE, thaw DRIVE, slow DRIVE IOPS, fail DRIVE read|write|flush [BLOCK], \
         heal DRIVE, warn DRIVE BITS, unplug DRIVE, plug DRIVE or enables DRIVE"
    )]
    NotARequest {
        /// The text.
        text: String,
    },
    /// The drive does not exist.
    #[error("There is no drive '{drive}'")]
    NoDrive {
        /// Name of the drive.
        drive: String,
    },
    /// QEMU cannot plug in the drive's namespaces.
    #[error("Drive '{drive}' has several namespaces, which can't be plugged in at run time")]
    NotPluggable {
        /// Name of the drive.
        drive: String,
    },
    /// QEMU's log cannot be read.
    #[error("Cannot read QEMU's log {path}")]
    Log {
        /// The file.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// QEMU refused the request.
    #[error(transparent)]
    Monitor(#[from] QmpError),
}

impl fmt::Display for FailedCommandKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Flush => "flush",
        })
    }
}

impl FromStr for LabFaultRequest {
    type Err = LabFaultError;

    fn from_str(text: &str) -> Result<Self, LabFaultError> {
        let words: Vec<&str> = text.split_whitespace().collect();
        parse(&words).ok_or_else(|| LabFaultError::NotARequest {
            text: text.to_owned(),
        })
    }
}

fn parse(words: &[&str]) -> Option<LabFaultRequest> {
    let (drive, action) = match *words {
        ["freeze", drive] => (drive, LabFaultAction::Freeze),
        ["thaw", drive] => (drive, LabFaultAction::Thaw),
        ["slow", drive, iops] => {
            let iops = iops.parse().ok().filter(|iops| *iops > 0)?;
            (drive, LabFaultAction::Slow(iops))
        }
        ["fail", drive, what] => (drive, LabFaultAction::Fail(direction(what)?, None)),
        ["fail", drive, what, block] => {
            let block = block.parse().ok()?;
            (drive, LabFaultAction::Fail(direction(what)?, Some(block)))
        }
        ["heal", drive] => (drive, LabFaultAction::Heal),
        ["warn", drive, bits] => (drive, LabFaultAction::Warn(bits.parse().ok()?)),
        ["unplug", drive] => (drive, LabFaultAction::Unplug),
        ["plug", drive] => (drive, LabFaultAction::Plug),
        ["enables", drive] => (drive, LabFaultAction::Enables),
        _ => return None,
    };
    Some(LabFaultRequest {
        drive: drive.to_owned(),
        action,
    })
}

fn direction(word: &str) -> Option<FailedCommandKind> {
    match word {
        "read" => Some(FailedCommandKind::Read),
        "write" => Some(FailedCommandKind::Write),
        "flush" => Some(FailedCommandKind::Flush),
        _ => None,
    }
}

/// Injector of faults into the drives of a machine, through its monitor.
#[derive(Debug)]
pub(super) struct LabFaultInjector {
    monitor: Qmp,
    drives: Vec<PlacedDrive>,
    /// Drives that have a failing block node between each namespace and its file.
    failing: HashSet<String>,
    /// File in which QEMU logs [`ENABLE`].
    log: PathBuf,
}

impl LabFaultInjector {
    pub(super) fn new(
        monitor: Qmp,
        drives: Vec<PlacedDrive>,
        log: PathBuf,
    ) -> Result<Self, LabFaultError> {
        let mut faults = Self {
            monitor,
            drives,
            failing: HashSet::new(),
            log,
        };
        for drive in faults.drives.clone() {
            faults.limit(&drive)?;
        }
        Ok(faults)
    }

    /// Executes a request and returns the answer.
    pub(super) fn execute(&mut self, request: &LabFaultRequest) -> Result<String, LabFaultError> {
        let drive = self
            .drives
            .iter()
            .find(|drive| drive.drive.id == request.drive)
            .cloned()
            .ok_or_else(|| LabFaultError::NoDrive {
                drive: request.drive.clone(),
            })?;
        match request.action {
            LabFaultAction::Freeze => self.freeze(&drive)?,
            LabFaultAction::Thaw => self.throttle(&drive, 0, 0)?,
            LabFaultAction::Slow(iops) => self.throttle(&drive, 0, iops)?,
            LabFaultAction::Fail(direction, block) => {
                self.heal(&drive)?;
                self.fail(&drive, direction, block)?;
            }
            LabFaultAction::Heal => self.heal(&drive)?,
            LabFaultAction::Warn(bits) => {
                let property = json!({
                    "path": format!("/machine/peripheral/{}", request.drive),
                    "property": "smart_critical_warning",
                    "value": bits,
                });
                self.run_qmp("qom-set", property)?;
            }
            LabFaultAction::Unplug => self.run_qmp("device_del", json!({"id": request.drive}))?,
            LabFaultAction::Plug => {
                if drive.drive.namespaces > 1 {
                    return Err(LabFaultError::NotPluggable {
                        drive: request.drive.clone(),
                    });
                }
                self.run_qmp("device_add", drive.device())?;
                self.limit(&drive)?;
            }
            LabFaultAction::Enables => {
                let log = fs::read_to_string(&self.log).map_err(|source| LabFaultError::Log {
                    path: self.log.clone(),
                    source,
                })?;
                let enables = log.lines().filter(|line| line.contains(ENABLE));
                return Ok(enables.count().to_string());
            }
        }
        Ok(String::new())
    }

    fn run_qmp(&mut self, command: &str, arguments: Value) -> Result<(), LabFaultError> {
        self.monitor.execute(command, arguments)?;
        Ok(())
    }

    /// Applies the limits in a drive's description.
    fn limit(&mut self, drive: &PlacedDrive) -> Result<(), LabFaultError> {
        let LabDrive {
            iops, bandwidth, ..
        } = drive.drive;
        self.throttle(drive, bandwidth.unwrap_or(0), iops.unwrap_or(0))
    }

    /// Limits the rates of a drive; 0 means no limit.
    fn throttle(&mut self, drive: &PlacedDrive, bps: u64, iops: u64) -> Result<(), LabFaultError> {
        for user in drive.block_users() {
            let limits = json!({
                "id": user,
                "bps": bps, "bps_rd": 0, "bps_wr": 0,
                "iops": iops, "iops_rd": 0, "iops_wr": 0,
            });
            self.run_qmp("block_set_io_throttle", limits)?;
        }
        Ok(())
    }

    /// Freezes a drive by a limit of one byte per second. With such a limit, QEMU executes one request and delays all later
    /// ones, until the limit allows the size of the first. The first request is a large read.
    fn freeze(&mut self, drive: &PlacedDrive) -> Result<(), LabFaultError> {
        self.throttle(drive, 1, 0)?;
        for user in drive.block_users() {
            let line = format!("qemu-io -d {user} \"{FREEZING_READ}\"");
            self.run_qmp("human-monitor-command", json!({"command-line": line}))?;
        }
        Ok(())
    }

    /// Inserts a failing block node between each namespace and its file.
    fn fail(
        &mut self,
        drive: &PlacedDrive,
        direction: FailedCommandKind,
        block: Option<u64>,
    ) -> Result<(), LabFaultError> {
        for node in drive.nodes() {
            let mut rule = json!({
                "event": "none",
                "iotype": direction.to_string(),
                "errno": libc::EIO,
            });
            if let Some(block) = block {
                rule["sector"] = json!(block);
            }
            let failing = json!({
                "driver": "blkdebug",
                "node-name": failing_node(&node),
                "image": PlacedDrive::file_node(&node),
                "inject-error": [rule],
            });
            self.run_qmp("blockdev-add", failing)?;
            let over = drive.node(&node, &failing_node(&node));
            self.run_qmp("blockdev-reopen", json!({"options": [over]}))?;
            self.failing.insert(node);
        }
        Ok(())
    }

    fn heal(&mut self, drive: &PlacedDrive) -> Result<(), LabFaultError> {
        for node in drive.nodes() {
            if self.failing.remove(&node) {
                let over = drive.node(&node, &PlacedDrive::file_node(&node));
                self.run_qmp("blockdev-reopen", json!({"options": [over]}))?;
                self.run_qmp("blockdev-del", json!({"node-name": failing_node(&node)}))?;
            }
        }
        Ok(())
    }
}

fn failing_node(node: &str) -> String {
    format!("{node}-failing")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_understood() {
        let request = |drive: &str, action| LabFaultRequest {
            drive: drive.to_owned(),
            action,
        };
        for (text, expected) in [
            ("freeze a", request("a", LabFaultAction::Freeze)),
            (" thaw\ta ", request("a", LabFaultAction::Thaw)),
            ("slow b 10", request("b", LabFaultAction::Slow(10))),
            (
                "fail a read",
                request("a", LabFaultAction::Fail(FailedCommandKind::Read, None)),
            ),
            (
                "fail a write 2048",
                request(
                    "a",
                    LabFaultAction::Fail(FailedCommandKind::Write, Some(2048)),
                ),
            ),
            (
                "fail a flush",
                request("a", LabFaultAction::Fail(FailedCommandKind::Flush, None)),
            ),
            ("heal a", request("a", LabFaultAction::Heal)),
            ("warn a 4", request("a", LabFaultAction::Warn(4))),
            ("unplug a", request("a", LabFaultAction::Unplug)),
            ("plug a", request("a", LabFaultAction::Plug)),
        ] {
            assert_eq!(text.parse::<LabFaultRequest>().expect(text), expected);
        }
    }

    #[test]
    fn unknown_fault_requests_are_refused() {
        for text in [
            "",
            "freeze",
            "freeze a b",
            "slow a",
            "slow a 0",
            "slow a fast",
            "fail a",
            "fail a trim",
            "fail a read -1",
            "warn a 256",
            "burn a",
        ] {
            assert!(text.parse::<LabFaultRequest>().is_err(), "{text}");
        }
    }
}
