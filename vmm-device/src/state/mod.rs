//! Saved state of a function: the facts that its guest was told, configuration space, MSI-X, properties, the admin queue with
//! the effects of admin commands, and the I/O queues. It contains no guest memory and no data of the drive.
//!
//! A [`FunctionState`] is saved in two cases, which differ in the I/O queues alone: of a paused function,
//! for a snapshot or another process, or of a running one, for the successor of a process that ends at any instruction.
//!
//! A VMM stores a state with `serde` in its own format, or as the bytes of `to_bytes`, whose header reveals truncation and
//! damage. A state that is read back is untrusted, so all of it is checked before any of it is applied. The types of the parts
//! are in `parts`; a change to one of them needs a new [`VERSION`].

mod bytes;
pub(crate) mod parts;

use std::time::Duration;

use nvme_guest::{BackendState, BackendStateError, LeaseFacts, PersistedQueues, QueueError};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use parts::{MsixState, RegistersState, ResetStats, SavedAdminState};

/// Version of the format. Only this version can be restored.
pub const VERSION: u32 = 1;

/// Error of decoding or restoring the state of a function.
#[derive(Debug, Error)]
pub enum FunctionStateError {
    /// The bytes do not begin with the header of a state.
    #[error(
        "This is not the state of an NVMe function: it does not begin with `{}`",
        bytes::MAGIC
    )]
    NotAState,
    /// The state has another version.
    #[error(
        "The function's state has version {found}, but this program takes version {VERSION}; restore it with the \
         program that saved it, or detach the drive and attach it again"
    )]
    Version {
        /// Version of the state that was found.
        found: u32,
    },
    /// The bytes end before the state does, or go beyond it.
    #[error(
        "The state has the wrong length: it has {found} bytes, but must have {expected}; copy it again"
    )]
    Length {
        /// Number of bytes found.
        found: usize,
        /// Number of bytes that the header announces.
        expected: usize,
    },
    /// The checksum does not match the bytes.
    #[error(
        "The function's state is damaged: its checksum is {found:08x}, but must be {expected:08x}; copy it again"
    )]
    Checksum {
        /// Checksum of the bytes that were found.
        found: u32,
        /// Checksum that the header announces.
        expected: u32,
    },
    /// The checksum matches, but the bytes do not describe a function's state.
    #[error("The state is not that of a function")]
    Syntax(#[from] serde_json::Error),
    /// The state does not fit this function, or is invalid.
    #[error(transparent)]
    State(#[from] BackendStateError),
    /// A running function has stored the state, and only its successor can restore it.
    #[error(
        "The state is that of a running function, whose commands in flight only the next server of its drive can restore: \
         pause the function, and save it again"
    )]
    Running,
    /// A paused function has saved the state, and a server continues only from the state of a running one.
    #[error(
        "The state is that of a paused function, but a server continues only the state that it stored while its function ran: \
         restore it in a VMM's process"
    )]
    Paused,
    /// Commands in flight of the function that is to restore the state do not end.
    #[error("The function cannot be stopped, so that nothing can be restored into it")]
    Stop(#[from] QueueError),
}

/// State of a function.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FunctionState {
    pub(crate) version: u32,
    /// Properties of the lease that the guest was told.
    pub(crate) facts: LeaseFacts,
    /// First 256 bytes of configuration space.
    pub(crate) config_space: Vec<u8>,
    /// True if the guest has written zero to Command, so that the function must not access memory. Omitted if false.
    #[serde(default, skip_serializing_if = "is_false")]
    pub(crate) switched_off: bool,
    pub(crate) msix: MsixState,
    pub(crate) registers: RegistersState,
    pub(crate) admin: SavedAdminState,
    /// Numbers of the function's resets. Omitted if there was none.
    #[serde(default, skip_serializing_if = "ResetStats::is_zero")]
    pub(crate) resets: ResetStats,
    /// Host time at which a running function stored the state. The guest's clocks continue from there. Omitted for a paused
    /// function, whose clocks stand still.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) stored_at: Option<Duration>,
    pub(crate) queues: IoQueuesState,
}

/// I/O queues of a saved function.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum IoQueuesState {
    /// Queues of a paused function, with their positions.
    Paused(BackendState),
    /// Queues as the guest of a running function created them. The in-flight tracking ([`nvme_guest::inflight`]) has their
    /// positions and commands.
    InFlight(PersistedQueues),
}

impl IoQueuesState {
    /// Returns the queues as the guest created them.
    pub(crate) fn to_created(&self) -> PersistedQueues {
        match self {
            Self::Paused(state) => PersistedQueues::from_state(state),
            Self::InFlight(queues) => queues.clone(),
        }
    }
}

/// Returns whether a boolean field is false. Such a field is omitted.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
pub(crate) fn is_false(flag: &bool) -> bool {
    !flag
}

impl FunctionState {
    /// Returns the version with which the state was saved.
    #[must_use]
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Checks whether this program can restore a state of this version.
    ///
    /// # Errors
    /// [`FunctionStateError::Version`].
    pub fn check_version(&self) -> Result<(), FunctionStateError> {
        match self.version {
            VERSION => Ok(()),
            found => Err(FunctionStateError::Version { found }),
        }
    }

    /// Returns the state of a paused function's back end; `None` if the function was running.
    #[must_use]
    pub fn backend_state(&self) -> Option<&BackendState> {
        match &self.queues {
            IoQueuesState::Paused(state) => Some(state),
            IoQueuesState::InFlight(_) => None,
        }
    }
}
