//! nvme-cli in a guest: runs commands, and returns their output and the completion status from the device.

use std::time::Duration;

use thiserror::Error;

use super::{GuestAgent, GuestError};

/// Timeout of a single NVMe command on a busy machine.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(300);

/// Mask of Status Code Type and Status Code (NVMe Base 2.0, 4.6.1). The other bits of the status are about retries.
const TYPE_AND_CODE: u16 = 0x7ff;

/// Errors of nvme-cli.
#[derive(Debug, Error)]
pub enum NvmeError {
    /// The guest failed.
    #[error(transparent)]
    Guest(#[from] GuestError),
    /// The command failed without an NVMe status.
    #[error("`nvme {command}` failed, and not with a status of the device:\n{text}")]
    NoStatus {
        /// The command.
        command: String,
        /// Output.
        text: String,
    },
    /// The command completed with another status than expected.
    #[error("`nvme {command}`: status {found:#05x}, expected {expected:#05x}:\n{text}")]
    Unexpected {
        /// The command.
        command: String,
        /// Status from the device.
        found: u16,
        /// Expected status.
        expected: u16,
        /// Output of the command.
        text: String,
    },
}

/// Result of a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NvmeCommandResult {
    /// Status Code Type (bits 10:8) and Status Code (bits 7:0); 0 is success.
    pub status: u16,
    /// Output of nvme-cli.
    pub text: String,
}

impl GuestAgent {
    /// Runs `nvme COMMAND` and returns the completion status.
    ///
    /// # Errors
    /// nvme-cli fails without an NVMe status.
    pub fn nvme(&self, command: &str) -> Result<NvmeCommandResult, NvmeError> {
        let output = self.run(&format!("nvme {command}"), COMMAND_TIMEOUT)?;
        let status = if output.status == 0 {
            Some(0)
        } else {
            parse_status(&output.text)
        };
        match status {
            Some(status) => Ok(NvmeCommandResult {
                status,
                text: output.text,
            }),
            None => Err(NvmeError::NoStatus {
                command: command.to_owned(),
                text: output.text,
            }),
        }
    }

    /// Runs `nvme COMMAND`, which must complete with status `expected`, and returns the output.
    ///
    /// # Errors
    /// The command completes with another status, or nvme-cli fails.
    pub fn expect_nvme(&self, command: &str, expected: u16) -> Result<String, NvmeError> {
        let NvmeCommandResult { status, text } = self.nvme(command)?;
        if status == expected {
            return Ok(text);
        }
        Err(NvmeError::Unexpected {
            command: command.to_owned(),
            found: status,
            expected,
            text,
        })
    }
}

/// Finds the status in `NVMe status: NAME: EXPLANATION(0xNNNN)`.
fn parse_status(text: &str) -> Option<u16> {
    let line = &text[text.find("NVMe status:")?..];
    let line = line.lines().next()?;
    let digits = &line[line.rfind("(0x")? + 3..line.rfind(')')?];
    u16::from_str_radix(digits, 16)
        .ok()
        .map(|status| status & TYPE_AND_CODE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_status_is_found_without_its_retry_bits() {
        let text = "compare: NVMe status: Compare Failure: The command failed (for once) due to a \
                    miscompare during a Compare command(0x4285)\n";
        assert_eq!(parse_status(text), Some(0x285));
    }

    #[test]
    fn output_without_a_status_yields_none() {
        assert_eq!(
            parse_status("/dev/nvme0: No such file or directory (0x2)"),
            None
        );
        assert_eq!(parse_status("NVMe status: odd"), None);
    }
}
