//! Programs that this one runs: git, rustfmt and cargo.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Seek, Write};
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::process::{Command, Output};

use thiserror::Error;

/// Error of a program.
#[derive(Debug, Error)]
pub enum ProgramError {
    /// The program could not be started.
    #[error("{program} cannot be started: {source}")]
    Start {
        /// Name of the program.
        program: String,
        /// Kernel's error.
        source: io::Error,
    },
    /// The program reported an error.
    #[error("`{command}` failed: {message}")]
    Failed {
        /// The program with its arguments.
        command: String,
        /// Output of the program.
        message: String,
    },
}

/// Runs a program to its end, with a text as its input.
pub(crate) fn run(command: &mut Command, input: &str) -> Result<Output, ProgramError> {
    let program = command.get_program().to_string_lossy().into_owned();
    let start = |source| ProgramError::Start {
        program: program.clone(),
        source,
    };
    // A file as the input: a pipe would need a thread that fills it.
    let file = || -> io::Result<File> {
        let mut file = tempfile::tempfile()?;
        file.write_all(input.as_bytes())?;
        file.rewind()?;
        Ok(file)
    };
    let output = command.stdin(file().map_err(start)?).output();
    let output = output.map_err(start)?;
    if output.status.success() {
        return Ok(output);
    }
    let words = command.get_args().map(OsStr::to_string_lossy);
    let words: Vec<_> = [program.into()].into_iter().chain(words).collect();
    let text = match output.stderr.trim_ascii().is_empty() {
        true => &output.stdout,
        false => &output.stderr,
    };
    let text = String::from_utf8_lossy(text).trim().to_owned();
    Err(ProgramError::Failed {
        command: words.join(" "),
        message: match text.is_empty() {
            true => output.status.to_string(),
            false => text,
        },
    })
}

/// Returns the path that a program wrote.
pub(crate) fn path_of(output: Output) -> PathBuf {
    let mut bytes = output.stdout;
    if bytes.ends_with(b"\n") {
        bytes.pop();
    }
    PathBuf::from(OsString::from_vec(bytes))
}
