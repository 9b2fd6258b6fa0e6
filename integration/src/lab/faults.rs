//! Mishaps of drives, made on request through QEMU's monitor.

use std::collections::HashSet;
use std::fmt;
use std::fs;
use std::io;
use std::path::PathBuf;
use std::str::FromStr;

use serde_json::{Value, json};
use thiserror::Error;

use super::drive::{LabDrive, Placed};
use crate::guest::qmp::{Qmp, QmpError};

/// Read after a drive is held to a byte a second: it then owes more than any test waits for.
const FREEZING_READ: &str = "aio_read 0 1M";

/// Request to do something to a drive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// The drive.
    pub drive: String,
    /// Action.
    pub action: Action,
}

/// Action on a drive, in the words of the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// `freeze DRIVE`: no read or write completes any more. Registers, admin commands and Flush go on, and
    /// a controller reset ends what is in flight, as QEMU's device waits for it.
    Freeze,
    /// `thaw DRIVE`: all of it completes, at full speed.
    Thaw,
    /// `slow DRIVE IOPS`: no more than that many I/Os a second.
    Slow(u64),
    /// `fail DRIVE read|write|flush [BLOCK]`: such commands end in a media error, or only those that touch
    /// one logical block of 512 bytes, whatever the drive's format is.
    Fail(Direction, Option<u64>),
    /// `heal DRIVE`: nothing fails any more.
    Heal,
    /// `warn DRIVE BITS`: the health log's Critical Warning (NVMe Base 2.0, 5.16.1.3) has these bits, and
    /// the drive reports the event.
    Warn(u8),
    /// `unplug DRIVE`: a person presses the slot's button, and the system may prepare itself.
    Unplug,
    /// `plug DRIVE`: it is put into its slot again.
    Plug,
    /// `enables DRIVE`: the answer is the number of times that CC.EN was set, of all drives together.
    Enables,
}

/// Direction that fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// Reads.
    Read,
    /// Writes.
    Write,
    /// Flushes.
    Flush,
}

/// QEMU's trace of a drive whose CC.EN is set.
pub(super) const ENABLE: &str = "pci_nvme_mmio_start_success";

/// A request that was not fulfilled.
#[derive(Debug, Error)]
pub enum FaultError {
    /// Not a request.
    #[error(
        "'{text}' is no request: freeze DRIVE, thaw DRIVE, slow DRIVE IOPS, fail DRIVE read|write|flush \
         [BLOCK], heal DRIVE, warn DRIVE BITS, unplug DRIVE, plug DRIVE or enables DRIVE"
    )]
    NotARequest {
        /// Request.
        text: String,
    },
    /// No such drive.
    #[error("There is no drive '{drive}'")]
    NoDrive {
        /// Its name.
        drive: String,
    },
    /// A drive whose namespaces QEMU can't plug in.
    #[error("Drive '{drive}' has several namespaces, which can't be plugged in at run time")]
    NotPluggable {
        /// Its name.
        drive: String,
    },
    /// QEMU's log cannot be read.
    #[error("Cannot read QEMU's log {path}")]
    Log {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// QEMU does not do it.
    #[error(transparent)]
    Monitor(#[from] QmpError),
}

impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Flush => "flush",
        })
    }
}

impl FromStr for Request {
    type Err = FaultError;

    fn from_str(text: &str) -> Result<Self, FaultError> {
        let words: Vec<&str> = text.split_whitespace().collect();
        parse(&words).ok_or_else(|| FaultError::NotARequest {
            text: text.to_owned(),
        })
    }
}

fn parse(words: &[&str]) -> Option<Request> {
    let (drive, action) = match *words {
        ["freeze", drive] => (drive, Action::Freeze),
        ["thaw", drive] => (drive, Action::Thaw),
        ["slow", drive, iops] => {
            let iops = iops.parse().ok().filter(|iops| *iops > 0)?;
            (drive, Action::Slow(iops))
        }
        ["fail", drive, what] => (drive, Action::Fail(direction(what)?, None)),
        ["fail", drive, what, block] => {
            let block = block.parse().ok()?;
            (drive, Action::Fail(direction(what)?, Some(block)))
        }
        ["heal", drive] => (drive, Action::Heal),
        ["warn", drive, bits] => (drive, Action::Warn(bits.parse().ok()?)),
        ["unplug", drive] => (drive, Action::Unplug),
        ["plug", drive] => (drive, Action::Plug),
        ["enables", drive] => (drive, Action::Enables),
        _ => return None,
    };
    Some(Request {
        drive: drive.to_owned(),
        action,
    })
}

fn direction(word: &str) -> Option<Direction> {
    match word {
        "read" => Some(Direction::Read),
        "write" => Some(Direction::Write),
        "flush" => Some(Direction::Flush),
        _ => None,
    }
}

/// The drives and the monitor of the machine that they are in.
#[derive(Debug)]
pub(super) struct Faults {
    monitor: Qmp,
    drives: Vec<Placed>,
    /// The drives that have a node in between that makes them fail.
    failing: HashSet<String>,
    /// QEMU's log of [`ENABLE`].
    log: PathBuf,
}

impl Faults {
    pub(super) fn new(monitor: Qmp, drives: Vec<Placed>, log: PathBuf) -> Result<Self, FaultError> {
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

    /// Fulfils a request and returns the answer.
    pub(super) fn execute(&mut self, request: &Request) -> Result<String, FaultError> {
        let drive = self
            .drives
            .iter()
            .find(|drive| drive.drive.id == request.drive)
            .cloned()
            .ok_or_else(|| FaultError::NoDrive {
                drive: request.drive.clone(),
            })?;
        match request.action {
            Action::Freeze => self.freeze(&drive)?,
            Action::Thaw => self.throttle(&drive, 0, 0)?,
            Action::Slow(iops) => self.throttle(&drive, 0, iops)?,
            Action::Fail(direction, block) => {
                self.heal(&drive)?;
                self.fail(&drive, direction, block)?;
            }
            Action::Heal => self.heal(&drive)?,
            Action::Warn(bits) => {
                let property = json!({
                    "path": format!("/machine/peripheral/{}", request.drive),
                    "property": "smart_critical_warning",
                    "value": bits,
                });
                self.ask("qom-set", property)?;
            }
            Action::Unplug => self.ask("device_del", json!({"id": request.drive}))?,
            Action::Plug => {
                if drive.drive.namespaces > 1 {
                    return Err(FaultError::NotPluggable {
                        drive: request.drive.clone(),
                    });
                }
                self.ask("device_add", drive.device())?;
                self.limit(&drive)?;
            }
            Action::Enables => {
                let log = fs::read_to_string(&self.log).map_err(|source| FaultError::Log {
                    path: self.log.clone(),
                    source,
                })?;
                let enables = log.lines().filter(|line| line.contains(ENABLE));
                return Ok(enables.count().to_string());
            }
        }
        Ok(String::new())
    }

    fn ask(&mut self, command: &str, arguments: Value) -> Result<(), FaultError> {
        self.monitor.execute(command, arguments)?;
        Ok(())
    }

    /// Applies the limits in a drive's description.
    fn limit(&mut self, drive: &Placed) -> Result<(), FaultError> {
        let LabDrive {
            iops, bandwidth, ..
        } = drive.drive;
        self.throttle(drive, bandwidth.unwrap_or(0), iops.unwrap_or(0))
    }

    /// Limits a drive; 0 is no limit.
    fn throttle(&mut self, drive: &Placed, bps: u64, iops: u64) -> Result<(), FaultError> {
        for user in drive.block_users() {
            let limits = json!({
                "id": user,
                "bps": bps, "bps_rd": 0, "bps_wr": 0,
                "iops": iops, "iops_rd": 0, "iops_wr": 0,
            });
            self.ask("block_set_io_throttle", limits)?;
        }
        Ok(())
    }

    /// Returns a limit lets the first request through and makes the next ones wait until it is paid for: that
    /// first request is a large one of ours.
    fn freeze(&mut self, drive: &Placed) -> Result<(), FaultError> {
        self.throttle(drive, 1, 0)?;
        for user in drive.block_users() {
            let line = format!("qemu-io -d {user} \"{FREEZING_READ}\"");
            self.ask("human-monitor-command", json!({"command-line": line}))?;
        }
        Ok(())
    }

    /// Puts a node that fails between each namespace and its file.
    fn fail(
        &mut self,
        drive: &Placed,
        direction: Direction,
        block: Option<u64>,
    ) -> Result<(), FaultError> {
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
                "image": Placed::file_node(&node),
                "inject-error": [rule],
            });
            self.ask("blockdev-add", failing)?;
            let over = drive.node(&node, &failing_node(&node));
            self.ask("blockdev-reopen", json!({"options": [over]}))?;
            self.failing.insert(node);
        }
        Ok(())
    }

    fn heal(&mut self, drive: &Placed) -> Result<(), FaultError> {
        for node in drive.nodes() {
            if self.failing.remove(&node) {
                let over = drive.node(&node, &Placed::file_node(&node));
                self.ask("blockdev-reopen", json!({"options": [over]}))?;
                self.ask("blockdev-del", json!({"node-name": failing_node(&node)}))?;
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
        let request = |drive: &str, action| Request {
            drive: drive.to_owned(),
            action,
        };
        for (text, expected) in [
            ("freeze a", request("a", Action::Freeze)),
            (" thaw\ta ", request("a", Action::Thaw)),
            ("slow b 10", request("b", Action::Slow(10))),
            (
                "fail a read",
                request("a", Action::Fail(Direction::Read, None)),
            ),
            (
                "fail a write 2048",
                request("a", Action::Fail(Direction::Write, Some(2048))),
            ),
            (
                "fail a flush",
                request("a", Action::Fail(Direction::Flush, None)),
            ),
            ("heal a", request("a", Action::Heal)),
            ("warn a 4", request("a", Action::Warn(4))),
            ("unplug a", request("a", Action::Unplug)),
            ("plug a", request("a", Action::Plug)),
        ] {
            assert_eq!(text.parse::<Request>().expect(text), expected);
        }
    }

    #[test]
    fn anything_else_is_refused() {
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
            assert!(text.parse::<Request>().is_err(), "{text}");
        }
    }
}
