//! The state of a function that is paused, as a snapshot keeps it: configuration space, MSI-X,
//! properties, the admin queue with what admin commands left behind, and the attachment with its
//! I/O queues. No guest memory and no data of the drive.
//!
//! [`FunctionState`] goes into whatever a VMM keeps its own state in, by `serde`, or into bytes of
//! its own. These bytes reveal a snapshot that was cut short or changed. A state that comes back
//! from either is untrusted: all of it is checked before anything is made of it. The types of all parts
//! lie in `parts`; a change to one of them is a new [`VERSION`].

mod bytes;
pub(crate) mod parts;

use nvme_mpt::{AttachmentState, QueueError, StateError};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use parts::{AdminState, MsixState, RegistersState};

/// The version of snapshots that are taken, and the only one that is restored.
pub const VERSION: u32 = 1;

/// Why a function cannot be restored.
#[derive(Debug, Error)]
pub enum SnapshotError {
    /// The bytes begin otherwise.
    #[error(
        "This is no snapshot of an NVMe function: it does not begin with `{}`",
        bytes::MAGIC
    )]
    NotASnapshot,
    /// Another program took it.
    #[error(
        "The snapshot has version {found}, but this program takes version {VERSION}; restore it with \
         the program that took it"
    )]
    Version {
        /// Its version.
        found: u32,
    },
    /// Bytes are missing at its end, or there are too many.
    #[error("The snapshot has {found} bytes of state, but must have {expected}; copy it again")]
    Length {
        /// Bytes that there are.
        found: usize,
        /// Bytes that it says there are.
        expected: usize,
    },
    /// Bytes changed.
    #[error(
        "The snapshot is damaged: its checksum is {found:08x}, but must be {expected:08x}; copy it \
         again"
    )]
    Checksum {
        /// Of the bytes that there are.
        found: u32,
        /// Of the bytes that were saved.
        expected: u32,
    },
    /// It is no state, although nothing was damaged.
    #[error("The snapshot is not that of a function")]
    Syntax(#[from] serde_json::Error),
    /// It does not fit, or its values cannot be.
    #[error(transparent)]
    State(#[from] StateError),
    /// The function that it was to be restored into cannot be stopped.
    #[error("The function cannot be stopped, so that nothing can be restored into it")]
    Stop(#[from] QueueError),
}

/// The state of a function.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FunctionState {
    pub(crate) version: u32,
    /// The first 256 bytes of configuration space.
    pub(crate) config_space: Vec<u8>,
    /// The guest has cleared Command. It is left out where it has not.
    #[serde(default, skip_serializing_if = "is_false")]
    pub(crate) switched_off: bool,
    pub(crate) msix: MsixState,
    pub(crate) registers: RegistersState,
    pub(crate) admin: AdminState,
    pub(crate) attachment: AttachmentState,
}

/// Skips a field that says nothing.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
pub(crate) fn is_false(flag: &bool) -> bool {
    !flag
}

impl FunctionState {
    /// The version that it was saved by.
    #[must_use]
    pub fn version(&self) -> u32 {
        self.version
    }

    /// The attachment's part: queues, and what the guest was promised.
    #[must_use]
    pub fn attachment(&self) -> &AttachmentState {
        &self.attachment
    }
}
