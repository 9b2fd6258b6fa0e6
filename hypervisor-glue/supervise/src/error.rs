//! Errors of the server's side of the protocol, and of the supervisor's side.

use std::ffi::OsString;
use std::io;
use std::process::ExitStatus;

use thiserror::Error;

/// Error of the server's side: of the connection to a supervisor, of inherited descriptors, and of descriptor queues.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum FdStoreError {
    /// A variable of the supervisor's protocol is malformed.
    #[error(
        "{name} is {value:?}, which a supervisor does not set: start the server by its supervisor, or unset {name}"
    )]
    Variable {
        /// The variable's name.
        name: &'static str,
        /// Value of the variable.
        value: OsString,
    },
    /// Nothing listens at the address in `NOTIFY_SOCKET`.
    #[error("Cannot connect to the supervisor at {address:?}, which NOTIFY_SOCKET names")]
    Connect {
        /// The address.
        address: OsString,
        /// The kernel's error.
        source: io::Error,
    },
    /// The name is invalid for stored descriptors.
    #[error(
        "Descriptors cannot be stored as {name:?}: use 1 to 255 printable ASCII characters without a colon"
    )]
    Name {
        /// The name.
        name: String,
    },
    /// The supervisor has ended.
    #[error(
        "The supervisor has ended: if this server dies, VMs on vfio-user lose their drives. Start another supervisor with `nvme-mpt supervise --adopt`"
    )]
    Gone {
        /// The kernel's error.
        source: io::Error,
    },
    /// A message could not be sent to the supervisor.
    #[error("Cannot send {message:?} to the supervisor")]
    Send {
        /// The message.
        message: String,
        /// The kernel's error.
        source: io::Error,
    },
    /// The supervisor did not process a barrier in time.
    #[error("The supervisor has not processed all messages within {milliseconds} ms")]
    Barrier {
        /// Duration of the wait.
        milliseconds: u128,
    },
    /// Code of this process has already taken the inherited descriptors, which it can do only once.
    #[error("The inherited descriptors were taken before: take them once, at the start")]
    TakenBefore,
    /// A descriptor counted by `LISTEN_FDS` is closed.
    #[error("Descriptor {number} is closed, though LISTEN_FDS counts it")]
    Closed {
        /// The descriptor.
        number: i32,
    },
    /// The stored descriptors are no descriptor queue.
    #[error("The inherited descriptors are not a descriptor store: {reason}")]
    NotDescriptorQueue {
        /// The reason.
        reason: &'static str,
    },
    /// A message for a descriptor queue has more descriptors than the kernel passes at once.
    #[error(
        "{count} descriptors are too many for one message of a descriptor store, which takes at most 253"
    )]
    TooMany {
        /// The number of descriptors.
        count: usize,
    },
    /// A descriptor queue is full.
    #[error("The descriptor store is full: remove messages from it, or raise net.core.wmem_max")]
    Full,
    /// The user has too many descriptors in queues of sockets.
    #[error("The user has too many descriptors in queues of sockets: raise RLIMIT_NOFILE")]
    TooManyInQueues,
    /// A descriptor queue has more messages than allowed.
    #[error("The descriptor store has more than {limit} messages")]
    TooManyMessages {
        /// Maximum number of messages.
        limit: usize,
    },
    /// A message has more descriptors than this process may open.
    #[error(
        "The process has too few descriptors left to read a descriptor store: raise RLIMIT_NOFILE"
    )]
    Truncated,
    /// A system call failed.
    #[error("Cannot {action}")]
    System {
        /// The operation that failed, for the message.
        action: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
}

impl FdStoreError {
    /// Returns whether the supervisor has ended, so that no message can reach it.
    #[must_use]
    pub fn is_supervisor_gone(&self) -> bool {
        matches!(self, Self::Gone { .. })
    }
}

/// Error of the supervisor's side: of the supervisor's process, and of a command's first stage.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SuperviseError {
    /// No command was given.
    #[error("No command to start: name it after --")]
    NoCommand,
    /// A system call failed.
    #[error("The supervisor cannot {action}")]
    System {
        /// The operation that failed, for the message.
        action: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
    /// The running server did not accept this supervisor.
    #[error("The server does not accept this supervisor")]
    Adopt(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The command died too often.
    #[error(
        "{command:?} ended {deaths} times within a minute, at last with {status}: the supervisor gives up, and closes \
         all descriptors that it stores"
    )]
    GaveUp {
        /// The command.
        command: OsString,
        /// Number of deaths within a minute.
        deaths: usize,
        /// Status of the last process.
        status: ExitStatus,
    },
    /// The first stage was started without a supervisor.
    #[error(
        "Only a supervisor may run the first stage of a command: standard input is not a supervisor's socket"
    )]
    NoSupervisor(#[source] io::Error),
    /// The first stage received fewer descriptors than the supervisor stores.
    #[error("The supervisor could not pass all descriptors: raise RLIMIT_NOFILE")]
    Truncated,
    /// A descriptor number that is needed for a stored descriptor is already in use.
    #[error("Descriptor {number} is open already in the first stage of a command")]
    Occupied {
        /// The descriptor.
        number: i32,
    },
    /// The command cannot be executed.
    #[error("Cannot execute {command:?}")]
    Execute {
        /// The command.
        command: OsString,
        /// The kernel's error.
        source: io::Error,
    },
}

impl FdStoreError {
    pub(crate) fn system(action: &'static str, error: impl Into<io::Error>) -> Self {
        let source = error.into();
        Self::System { action, source }
    }
}

impl SuperviseError {
    pub(crate) fn system(action: &'static str, error: impl Into<io::Error>) -> Self {
        let source = error.into();
        Self::System { action, source }
    }
}
