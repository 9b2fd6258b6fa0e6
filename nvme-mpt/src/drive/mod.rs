//! Drives: namespaces of host controllers, leased in parts.
//!
//! [`HostController`] and [`HostLease`] are the control path of a host controller of any kind.

mod controller;
mod disk_image_header;
#[cfg(test)]
pub(crate) mod idle_controller;
mod lease;
mod namespace;
mod reservation;
mod spare_descriptors;
mod store;

use std::sync::Arc;

pub use controller::{DriveIncidents, HostController, QueuePairUse};
pub use disk_image_header::DiskImageHeader;
pub use lease::{HostLease, HostLeaseError, HostLeaseRequest, LOST_WRITES};
pub use namespace::HostNamespace;
pub use reservation::{QueuePairReservation, ReserveError, ReservedPairs};
pub use spare_descriptors::SpareDescriptorStore;
pub use store::{StoreController, StoreLease};

use nvme_guest::host::ControllerLimits;
use nvme_guest::rate_limit::LeaseWeight;
use nvme_lease::LeaseError;
use nvme_lease::backing_id::DriveIdentityRef;
use nvme_lease::label::DriveLabel;
use nvme_lease::range::BlockRange;
use nvme_spec::ids::Nsid;

/// Errors of using a namespace as a drive.
#[derive(Debug, thiserror::Error)]
pub enum DriveNamespaceError {
    /// The drive has no active namespace.
    #[error("Drive `{0}` has no active namespace; create and attach one with `nvme create-ns`")]
    NoNamespace(String),
    /// The drive has no active namespace with this identifier.
    #[error("Drive `{path}` has no active namespace {nsid}; it has {active:?}")]
    NoSuchNamespace {
        /// Path of the drive.
        path: String,
        /// Requested namespace.
        nsid: Nsid,
        /// Identifiers of the active namespaces.
        active: Vec<u32>,
    },
    /// The drive has less than one block.
    #[error("Drive `{path}` is smaller than one logical block of {lba_size} bytes")]
    TooSmall {
        /// Path of the drive.
        path: String,
        /// Logical block size in bytes.
        lba_size: u32,
    },
}

/// An open drive: one namespace of a host controller.
#[derive(Debug)]
pub struct Drive {
    path: String,
    namespace: HostNamespace,
    controller: Arc<dyn HostController>,
}

impl Drive {
    /// Creates a drive from a namespace of an open host controller: the given one, or the first.
    ///
    /// # Errors
    /// [`DriveNamespaceError::NoSuchNamespace`] and [`DriveNamespaceError::TooSmall`].
    pub fn new(
        path: impl Into<String>,
        controller: Arc<dyn HostController>,
        nsid: Option<Nsid>,
    ) -> Result<Arc<Self>, DriveNamespaceError> {
        let path = path.into();
        let namespaces = controller.namespaces();
        let wanted = |namespace: &&HostNamespace| nsid.is_none_or(|nsid| namespace.nsid == nsid);
        let Some(&namespace) = namespaces.iter().find(wanted) else {
            let active = namespaces.iter().map(|namespace| namespace.nsid.0);
            return Err(match nsid {
                Some(nsid) => DriveNamespaceError::NoSuchNamespace {
                    path,
                    nsid,
                    active: active.collect(),
                },
                None => DriveNamespaceError::NoNamespace(path),
            });
        };
        if namespace.blocks == 0 {
            return Err(DriveNamespaceError::TooSmall {
                path,
                lba_size: 1 << namespace.lba_shift,
            });
        }
        Ok(Arc::new(Self {
            path,
            namespace,
            controller,
        }))
    }

    /// Returns a drive for a namespace of this drive's host controller: the given namespace, or the first.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn sibling(&self, nsid: Option<Nsid>) -> Result<Arc<Self>, DriveNamespaceError> {
        Self::new(self.path.clone(), self.controller.clone(), nsid)
    }

    /// Returns the path that was opened.
    #[must_use]
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Returns the drive's persistent name, which does not depend on its path, and the drive's other names.
    #[must_use]
    pub fn identity(&self) -> DriveIdentityRef<'_> {
        self.controller.identity()
    }

    /// Returns an error of a lease on this drive with the drive's path in place of the name by which the ledger knows it.
    #[must_use]
    pub fn lease_error(&self, error: LeaseError) -> LeaseError {
        error.with_drive_path(self.identity().name, &self.path)
    }

    /// Returns the label on the drive, and whether leases use the label as the drive's name.
    #[must_use]
    pub fn label(&self) -> Option<(&DriveLabel, bool)> {
        self.controller.label()
    }

    /// Returns whether the drive exists in this process only, so that no other process can lease parts of it.
    #[must_use]
    pub fn is_private(&self) -> bool {
        self.controller.is_private()
    }

    /// Returns whether both drives are of one open host controller.
    #[must_use]
    pub fn shares_controller_with(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.controller, &other.controller)
    }

    /// Returns the namespace.
    #[must_use]
    pub fn namespace(&self) -> &HostNamespace {
        &self.namespace
    }

    /// Returns the size in logical blocks.
    #[must_use]
    pub fn blocks(&self) -> u64 {
        self.namespace.blocks
    }

    /// Returns the logical block size in bytes, as the exponent of a power of two.
    #[must_use]
    pub fn lba_shift(&self) -> u8 {
        self.namespace.lba_shift
    }

    /// Returns the host controller's limits.
    #[must_use]
    pub fn limits(&self) -> &ControllerLimits {
        self.controller.limits()
    }

    /// Returns the control path of the host controller.
    #[must_use]
    pub fn controller(&self) -> &dyn HostController {
        self.controller.as_ref()
    }

    /// Reserves I/O queue pairs of the host controller for a lease, whose initial weight is `weight`.
    ///
    /// # Errors
    /// See [`ReserveError`].
    pub fn reserve_pairs(
        &self,
        lease: &str,
        pairs: u16,
        weight: LeaseWeight,
    ) -> Result<QueuePairReservation, ReserveError> {
        self.controller.clone().reserve_pairs(lease, pairs, weight)
    }

    /// Opens a lease of parts of the namespace at the host controller. `name` is the lease's name in the log.
    ///
    /// # Errors
    /// See [`HostLeaseError`].
    pub fn open_lease(
        &self,
        name: &str,
        parts: &[BlockRange],
        reservation: Option<&QueuePairReservation>,
    ) -> Result<Box<dyn HostLease>, HostLeaseError> {
        self.controller.clone().open_lease(&HostLeaseRequest {
            name,
            namespace: self.namespace,
            parts,
            reservation,
        })
    }
}
