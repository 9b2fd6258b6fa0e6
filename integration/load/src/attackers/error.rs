//! Errors of a measurement with an attacker.

use std::io;
use std::path::PathBuf;
use std::process::Output;

use nvme_mpt_tests::memory::MemoryError;

/// Errors of a measurement with an attacker.
#[derive(Debug, thiserror::Error)]
pub enum AttackError {
    /// A program cannot be started.
    #[error("Cannot start {program}")]
    Start {
        /// Path of the program.
        program: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// The server ended before it was ready.
    #[error("{program} ended before it was ready:\n{log}")]
    NotReady {
        /// Path of the program.
        program: PathBuf,
        /// Log of the server.
        log: String,
    },
    /// A guest driver failed.
    #[error("The driver of {who} failed")]
    Driver {
        /// Name of the guest's function.
        who: String,
        /// Cause.
        source: nvme_mpt_tests::Error,
    },
    /// Guest memory cannot be allocated.
    #[error("Cannot allocate memory for a guest")]
    Memory(#[from] MemoryError),
    /// A system call failed.
    #[error("{what} failed")]
    System {
        /// Action that failed.
        what: &'static str,
        /// Error of the call.
        source: io::Error,
    },
    /// A thread cannot be bound to a processor.
    #[error("Cannot pin a thread to processor {cpu}: name others with --cpus")]
    Processor {
        /// Number of the processor.
        cpu: usize,
        /// Cause.
        source: io::Error,
    },
    /// An upgrade succeeded although the drive was renamed.
    #[error("`nvme-mpt upgrade` was not refused for the drive that was renamed: {printed}")]
    Upgraded {
        /// Output of the command.
        printed: String,
    },
    /// A thread of this program panicked.
    #[error("A thread panicked")]
    Panicked,
}

impl AttackError {
    pub(super) fn driver_error(who: &str) -> impl Fn(nvme_mpt_tests::Error) -> Self + use<> {
        let who = who.to_owned();
        move |source| Self::Driver {
            who: who.clone(),
            source,
        }
    }

    pub(super) fn system_error(what: &'static str) -> impl Fn(io::Error) -> Self {
        move |source| Self::System { what, source }
    }

    pub(super) fn unexpected_upgrade(output: &Output) -> Self {
        let printed = [&output.stdout[..], &output.stderr].concat();
        Self::Upgraded {
            printed: String::from_utf8_lossy(&printed).trim().to_owned(),
        }
    }
}
