//! Host controllers that other host controllers put layers in front of.

use std::fmt;
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;

use super::controller::HostController;
use super::lease::{HostLease, HostLeaseError, HostLeaseRequest};
use super::namespace::HostNamespace;
use crate::host::DelayableQueue;
use crate::shadow::CommandSet;

/// Host controller of a drive with a backing store. Its queues have a known type, so a layer in front of them is compiled
/// together with them, and a poll remains one virtual call.
pub trait StoreController: HostController {
    /// Type of the store's leases.
    type Lease: StoreLease + 'static;

    /// Returns the store's only namespace.
    fn namespace(&self) -> &HostNamespace;

    /// Opens a lease like [`HostController::open_lease`].
    ///
    /// # Errors
    /// See [`HostLeaseError`].
    fn open_store_lease(
        &self,
        request: &HostLeaseRequest<'_>,
    ) -> Result<Self::Lease, HostLeaseError>;

    /// Returns the path of the file or block device, or `None` if the blocks are lost when the process ends.
    fn path(&self) -> Option<&Path>;

    /// Makes each sync of the blocks also sync `file` afterwards, from now on. A layer keeps its own data about the blocks in
    /// `file`.
    fn set_companion_file(&self, file: Arc<File>);
}

/// A lease of a store.
pub trait StoreLease: HostLease {
    /// Type of the store's queue pairs, in front of which a layer can stand.
    type Queue: DelayableQueue<Commands: CommandSet> + fmt::Debug + Send + 'static;

    /// Creates a queue pair like [`HostLease::create_queue`], but of a known type.
    ///
    /// # Errors
    /// As [`HostLease::create_queue`].
    fn create_delayable_queue(&self, slots: u16) -> io::Result<Self::Queue>;
}
