//! Control line between the lab and its host: a program in the lab sends one request per line, and the host answers with
//! one line.
//!
//! An answer is `ok [TEXT]` or `error TEXT`. `resources/lab/lab-ctl` is the client in the lab.

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use thiserror::Error;

use super::drive::PlacedDrive;
use super::faults::{ENABLE, LabFaultError, LabFaultInjector, LabFaultRequest};
use crate::guest::qmp::Qmp;

/// QEMU's name of the serial port, by which the lab finds it.
const PORT: &str = "lab.control";
/// Maximum length of a request line.
const LONGEST_LINE: usize = 256;

/// Errors of the control line.
#[derive(Debug, Error)]
pub enum LabControlError {
    /// A socket of QEMU cannot be used.
    #[error("Cannot use the lab's socket {path}")]
    Socket {
        /// The socket.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// The request failed.
    #[error(transparent)]
    Fault(#[from] LabFaultError),
}

/// Server of the control line. It answers requests until this is dropped.
#[derive(Debug)]
pub(super) struct LabControlServer {
    line: UnixStream,
}

fn line_socket(dir: &Path) -> PathBuf {
    dir.join("control.line")
}

fn drive_log(dir: &Path) -> PathBuf {
    dir.join("drives.log")
}

fn monitor_socket(dir: &Path) -> PathBuf {
    dir.join("control.monitor")
}

impl LabControlServer {
    /// Returns QEMU's arguments for the control line, and for a monitor that only this server uses.
    pub(super) fn arguments(dir: &Path) -> Vec<String> {
        let socket = |id: &str, path: PathBuf| {
            format!("socket,id={id},path={},server=on,wait=off", path.display())
        };
        let arguments = [
            "-chardev",
            &socket(PORT, line_socket(dir)),
            "-device",
            &format!("virtserialport,chardev={PORT},name={PORT}"),
            "-chardev",
            &socket("lab.monitor", monitor_socket(dir)),
            "-qmp",
            "chardev:lab.monitor",
            "-d",
            &format!("trace:{ENABLE}"),
            "-D",
            &drive_log(dir).display().to_string(),
        ];
        arguments.map(str::to_owned).to_vec()
    }

    /// Starts to answer requests. QEMU must be running.
    pub(super) fn start(dir: &Path, drives: Vec<PlacedDrive>) -> Result<Self, LabControlError> {
        let connect = |path: PathBuf| {
            UnixStream::connect(&path).map_err(|source| LabControlError::Socket { path, source })
        };
        let monitor = Qmp::new(connect(monitor_socket(dir))?).map_err(LabFaultError::Monitor)?;
        let mut faults = LabFaultInjector::new(monitor, drives, drive_log(dir))?;
        let line = connect(line_socket(dir))?;
        let ours = line.try_clone().map_err(|source| LabControlError::Socket {
            path: line_socket(dir),
            source,
        })?;
        // The thread ends with QEMU, or when the lab is dropped.
        std::thread::spawn(move || answer(ours, |request| faults.execute(request)));
        Ok(Self { line })
    }
}

impl Drop for LabControlServer {
    fn drop(&mut self) {
        // Fails only if QEMU has ended. Then the thread has ended, too.
        let _ = self.line.shutdown(std::net::Shutdown::Both);
    }
}

/// Answers each line until the end of input.
fn answer(
    line: UnixStream,
    mut execute: impl FnMut(&LabFaultRequest) -> Result<String, LabFaultError>,
) {
    let Ok(mut out) = line.try_clone() else {
        return;
    };
    let mut input = BufReader::new(line);
    let mut bytes = Vec::new();
    loop {
        bytes.clear();
        match read_line(&mut input, &mut bytes) {
            Ok(true) => {}
            Ok(false) | Err(_) => return,
        }
        let text = String::from_utf8_lossy(&bytes);
        let answer = match text
            .parse::<LabFaultRequest>()
            .and_then(|request| execute(&request))
        {
            Ok(said) => format!("ok {said}"),
            Err(error) => format!("error {}", crate::error_chain(&error)),
        };
        // An answer must be a single line.
        let answer = answer.replace('\n', " ");
        if writeln!(out, "{}", answer.trim_end()).is_err() {
            return;
        }
    }
}

/// Reads a line, and stores at most [`LONGEST_LINE`] bytes of it. Returns false at the end of input.
fn read_line(input: &mut impl BufRead, line: &mut Vec<u8>) -> io::Result<bool> {
    loop {
        let available = input.fill_buf()?;
        if available.is_empty() {
            return Ok(false);
        }
        let end = available.iter().position(|byte| *byte == b'\n');
        let taken = end.map_or(available.len(), |end| end + 1);
        let padding = LONGEST_LINE.saturating_sub(line.len());
        line.extend(&available[..end.unwrap_or(taken).min(padding)]);
        input.consume(taken);
        if end.is_some() {
            return Ok(true);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lab::faults::LabFaultAction;

    fn ask(lines: &[u8]) -> Vec<String> {
        let (ours, mut theirs) = UnixStream::pair().expect("socket pair");
        let thread = std::thread::spawn(move || {
            answer(ours, |request| match request.action {
                LabFaultAction::Freeze => Ok(String::new()),
                LabFaultAction::Heal => Ok("two\nlines".to_owned()),
                _ => Err(LabFaultError::NoDrive {
                    drive: request.drive.clone(),
                }),
            });
        });
        theirs.write_all(lines).expect("write");
        theirs
            .shutdown(std::net::Shutdown::Write)
            .expect("shut down");
        let answers = BufReader::new(theirs)
            .lines()
            .map(|line| line.expect("line"))
            .collect();
        thread.join().expect("thread");
        answers
    }

    #[test]
    fn every_line_has_one_answer() {
        let answers = ask(b"freeze a\nheal a\nthaw b\n");
        assert_eq!(
            answers,
            ["ok", "ok two lines", "error There is no drive 'b'"]
        );
    }

    #[test]
    fn invalid_requests_are_answered_as_well() {
        let mut lines = vec![b'x'; 1 << 20];
        lines.extend(b"\n\xff\xfe\nfreeze a\n");
        let answers = ask(&lines);
        assert_eq!(answers.len(), 3);
        assert!(answers[0].starts_with("error 'xxx"), "{}", answers[0]);
        assert!(answers[0].len() < 1000, "the whole line came back");
        assert_eq!(answers[2], "ok");
    }
}
