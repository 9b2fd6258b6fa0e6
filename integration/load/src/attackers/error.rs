//! Failures of a measurement beside an attacker.

use std::io;
use std::path::PathBuf;
use std::process::Output;

use nvme_mpt_tests::memory::MemoryError;

/// A measurement beside an attacker that could not be made, or that found a victim disturbed.
#[derive(Debug, thiserror::Error)]
pub enum AttackError {
    /// A program does not start.
    #[error("Cannot start {program}")]
    Start {
        /// Its path.
        program: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The server ended before it was ready.
    #[error("{program} ended before it was ready:\n{log}")]
    NotReady {
        /// Its path.
        program: PathBuf,
        /// Its log.
        log: String,
    },
    /// A guest's driver failed.
    #[error("The driver of {who} failed")]
    Driver {
        /// The guest's function.
        who: String,
        /// Why.
        source: nvme_mpt_tests::Error,
    },
    /// Memory for a guest could not be had.
    #[error("Cannot have memory for a guest")]
    Memory(#[from] MemoryError),
    /// A system call failed.
    #[error("{what} failed")]
    System {
        /// Action that failed.
        what: &'static str,
        /// Its error.
        source: io::Error,
    },
    /// A thread cannot be kept on a processor.
    #[error("Cannot keep a thread on processor {cpu}: name others with --cpus")]
    Processor {
        /// Its number.
        cpu: usize,
        /// Why.
        source: io::Error,
    },
    /// An upgrade was not refused for the drive that was renamed.
    #[error("`nvme-mpt upgrade` was not refused for the drive that was renamed: {printed}")]
    Upgraded {
        /// Output of the command.
        printed: String,
    },
    /// Bug in this program.
    #[error("A thread panicked")]
    Panicked,
}

impl AttackError {
    pub(super) fn driver(who: &str) -> impl Fn(nvme_mpt_tests::Error) -> Self + use<> {
        let who = who.to_owned();
        move |source| Self::Driver {
            who: who.clone(),
            source,
        }
    }

    pub(super) fn system(what: &'static str) -> impl Fn(io::Error) -> Self {
        move |source| Self::System { what, source }
    }

    pub(super) fn upgraded(output: &Output) -> Self {
        let printed = [&output.stdout[..], &output.stderr].concat();
        Self::Upgraded {
            printed: String::from_utf8_lossy(&printed).trim().to_owned(),
        }
    }

    /// Returns the error and its causes in one line.
    pub(super) fn chain(&self) -> String {
        let mut text = self.to_string();
        let mut source = std::error::Error::source(self);
        while let Some(cause) = source {
            text += &format!(": {cause}");
            source = cause.source();
        }
        text
    }
}
