//! QEMU's monitor protocol (QEMU, docs/interop/qmp-spec): one JSON object per line.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use thiserror::Error;

/// Timeout of an answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(300);

/// Errors of the monitor.
#[derive(Debug, Error)]
pub enum QmpError {
    /// The connection failed or timed out.
    #[error("QEMU's monitor does not answer `{request}`: {reason}")]
    Io {
        /// Request.
        request: String,
        /// Cause.
        reason: std::io::Error,
    },
    /// QEMU refused the request.
    #[error("QEMU refused `{request}`: {reason}")]
    Refused {
        /// Request.
        request: String,
        /// QEMU's reason.
        reason: String,
    },
}

/// A connection to the monitor.
#[derive(Debug)]
pub(crate) struct Qmp {
    lines: BufReader<UnixStream>,
    partial: Vec<u8>,
}

impl Qmp {
    pub(crate) fn new(stream: UnixStream) -> Result<Self, QmpError> {
        let mut qmp = Self {
            lines: BufReader::new(stream),
            partial: Vec::new(),
        };
        // QEMU begins with a greeting.
        qmp.read("greeting", Instant::now() + ANSWER_TIMEOUT)?;
        qmp.execute("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    pub(crate) fn execute(&mut self, command: &str, arguments: Value) -> Result<Value, QmpError> {
        let request = json!({"execute": command, "arguments": arguments});
        writeln!(self.lines.get_mut(), "{request}").map_err(|reason| QmpError::Io {
            request: command.to_owned(),
            reason,
        })?;
        let deadline = Instant::now() + ANSWER_TIMEOUT;
        loop {
            let message = self.read(command, deadline)?;
            if let Some(error) = message.get("error") {
                return Err(QmpError::Refused {
                    request: command.to_owned(),
                    reason: error["desc"]
                        .as_str()
                        .unwrap_or("no reason given")
                        .to_owned(),
                });
            }
            if let Some(answer) = message.get("return") {
                return Ok(answer.clone());
            }
            // Any other line is an event, which may come at any time and is ignored.
        }
    }

    fn read(&mut self, request: &str, deadline: Instant) -> Result<Value, QmpError> {
        let error = |reason| QmpError::Io {
            request: request.to_owned(),
            reason,
        };
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            // A socket timeout of zero would mean no timeout.
            let left = left.max(Duration::from_millis(1));
            self.lines
                .get_ref()
                .set_read_timeout(Some(left))
                .map_err(error)?;
            if self
                .lines
                .read_until(b'\n', &mut self.partial)
                .map_err(error)?
                == 0
            {
                return Err(error(std::io::ErrorKind::UnexpectedEof.into()));
            }
            let line = std::mem::take(&mut self.partial);
            match serde_json::from_slice(&line) {
                Ok(message) => return Ok(message),
                Err(_) if line.iter().all(u8::is_ascii_whitespace) => {}
                Err(source) => return Err(error(source.into())),
            }
        }
    }
}
