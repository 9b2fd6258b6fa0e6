//! Backing stores: where software drives store their blocks.

use std::fmt;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use nvme_guest::host::ControllerLimits;
use nvme_lease::backing_id::DriveIdentity;
use nvme_lease::label::DriveLabel;
use nvme_mpt::drive::{HostLeaseError, HostLeaseRequest, StoreLease};

/// A backing store for the blocks of a software drive. Implement it to add a new kind of store.
pub trait BackingStore: fmt::Debug + Send + Sync + 'static {
    /// Access to the blocks of one lease in the backing store. Dropping it ends the lease.
    type Lease: StoreLease + 'static;

    /// Returns a name that identifies the stored bytes, whatever path leads to them. Also names the storage below, such as the
    /// file of a loop device.
    fn identity(&self) -> DriveIdentity;

    /// Returns the Model Number, up to 40 characters.
    fn model(&self) -> &'static str;

    /// Returns the size of the drive in bytes.
    fn bytes(&self) -> u64;

    /// Adapts the limits of a software drive to this backing store.
    fn limits(&self, limits: ControllerLimits) -> ControllerLimits {
        limits
    }

    /// Returns true if no other process can access the blocks.
    fn is_private(&self) -> bool {
        true
    }

    /// Returns the path of the backing file or block device; `None` if the blocks are lost when the process ends.
    fn path(&self) -> Option<&Path> {
        None
    }

    /// Sets the timeout of storage requests. If a request exceeds it, its queue fails. A store in this process's memory has no
    /// such requests, and ignores the timeout.
    fn set_timeout(&self, timeout: Duration) {
        let _ = timeout;
    }

    /// Returns whether a transfer may block the submitting thread until another process or host answers, as for a file on NFS.
    fn may_block(&self) -> bool {
        false
    }

    /// Returns the drive's label; see [`label`](nvme_mpt::drive::HostController::label) of the host controller.
    fn label(&self) -> Option<(&DriveLabel, bool)> {
        None
    }

    /// Reads bytes of the drive; see [`peek`](nvme_mpt::drive::HostController::peek) of the host controller.
    fn peek(&self, offset: u64, into: &mut [u8]) -> Option<usize> {
        let _ = (offset, into);
        None
    }

    /// Makes each later sync of the blocks also sync `file`, after the blocks. A layer keeps its own data about the blocks
    /// there.
    fn set_companion_file(&self, file: Arc<File>) {
        let _ = file;
    }

    /// Opens a lease of part of the backing store.
    ///
    /// # Errors
    /// See [`HostLeaseError`].
    fn open_lease(&self, request: &HostLeaseRequest<'_>) -> Result<Self::Lease, HostLeaseError>;
}
