//! Snapshot of a paused function: configuration space, MSI-X, properties, the admin queue with the effects of admin commands,
//! and the back end with its I/O queues. A snapshot contains no guest memory and no data of the drive.
//!
//! A VMM stores a [`FunctionSnapshot`] with `serde` in its own format, or as the bytes of `to_bytes`, whose header reveals
//! truncation and damage. A state that is read back is untrusted, so all of it is checked before any of it is applied. The
//! types of the parts are in `parts`; a change to one of them needs a new [`VERSION`].

mod bytes;
pub(crate) mod parts;

use nvme_guest::{BackendState, BackendStateError, QueueError};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use parts::{MsixState, RegistersState, SavedAdminState};

/// Version of snapshots that this program takes. Only this version can be restored.
pub const VERSION: u32 = 1;

/// Error of decoding or restoring a snapshot.
#[derive(Debug, Error)]
pub enum SnapshotError {
    /// The bytes do not begin with the header of a snapshot.
    #[error(
        "This is not a snapshot of an NVMe function: it does not begin with `{}`",
        bytes::MAGIC
    )]
    NotASnapshot,
    /// The snapshot has another version.
    #[error(
        "The snapshot has version {found}, but this program takes version {VERSION}; restore it with \
         the program that took it"
    )]
    Version {
        /// Version of the snapshot.
        found: u32,
    },
    /// The state is truncated or too long.
    #[error("The snapshot has {found} bytes of state, but must have {expected}; copy it again")]
    Length {
        /// Number of bytes found.
        found: usize,
        /// Number of bytes that the header announces.
        expected: usize,
    },
    /// The checksum does not match.
    #[error(
        "The snapshot is damaged: its checksum is {found:08x}, but must be {expected:08x}; copy it \
         again"
    )]
    Checksum {
        /// Checksum of the bytes found.
        found: u32,
        /// Checksum in the header.
        expected: u32,
    },
    /// The checksum is right, but the bytes do not describe a function's state.
    #[error("The snapshot is not that of a function")]
    Syntax(#[from] serde_json::Error),
    /// The state does not fit this function, or is invalid.
    #[error(transparent)]
    State(#[from] BackendStateError),
    /// The function that is to restore the snapshot has commands in flight that do not end.
    #[error("The function cannot be stopped, so that nothing can be restored into it")]
    Stop(#[from] QueueError),
}

/// Saved state of a function.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FunctionSnapshot {
    pub(crate) version: u32,
    /// The first 256 bytes of configuration space.
    pub(crate) config_space: Vec<u8>,
    /// Set if the guest has written zero to Command. Omitted if false.
    #[serde(default, skip_serializing_if = "is_false")]
    pub(crate) switched_off: bool,
    pub(crate) msix: MsixState,
    pub(crate) registers: RegistersState,
    pub(crate) admin: SavedAdminState,
    pub(crate) attachment: BackendState,
}

/// Returns whether a boolean field is false, so that it is omitted.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
pub(crate) fn is_false(flag: &bool) -> bool {
    !flag
}

impl FunctionSnapshot {
    /// Returns the version with which the state was saved.
    #[must_use]
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Returns the state of the back end: the I/O queues, and the properties of the lease that the guest was told.
    #[must_use]
    pub fn backend_state(&self) -> &BackendState {
        &self.attachment
    }
}
