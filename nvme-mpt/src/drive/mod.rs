//! Drives: a namespace of a host controller, leased in parts.
//!
//! [`HostController`] and [`HostLease`] are the control path of a host controller of any kind.

mod controller;
mod header;
#[cfg(test)]
pub(crate) mod idle;
mod label;
mod lease;
mod namespace;
mod reservation;
mod spare;

use std::sync::Arc;

pub use controller::{DriveIncidents, HostController, QueuePairUse};
pub use header::DiskImageHeader;
pub use label::{DriveLabel, DriveName, LABEL_BYTES};
pub use lease::{HostLease, HostLeaseError, HostLeaseRequest};
pub use namespace::HostNamespace;
pub use reservation::{QueuePairReservation, ReserveError, ReservedPairs};
pub use spare::SpareDescriptorStore;

use crate::host::ControllerLimits;
use crate::limit::LeaseWeight;
use crate::origin::DriveIdentityRef;
use crate::range::BlockRange;
use crate::spec::ids::Nsid;

/// Errors of a namespace that cannot be leased.
#[derive(Debug, thiserror::Error)]
pub enum DriveNamespaceError {
    /// The drive has no namespace that is active.
    #[error("Drive `{0}` has no active namespace; create and attach one with `nvme create-ns`")]
    NoNamespace(String),
    /// The drive has no such namespace.
    #[error("Drive `{path}` has no active namespace {nsid}; it has {active:?}")]
    NoSuchNamespace {
        /// The drive.
        path: String,
        /// Namespace that was asked for.
        nsid: Nsid,
        /// Active namespaces.
        active: Vec<u32>,
    },
    /// The drive has no block.
    #[error("Drive `{path}` is smaller than one logical block of {lba_size} bytes")]
    TooSmall {
        /// The drive.
        path: String,
        /// Its logical block size.
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
    /// A namespace of a host controller that is there already.
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

    /// Another namespace of the same host controller, or this one again.
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

    /// Returns the name that stays the same for the same drive, whatever path leads to it, and its other names.
    #[must_use]
    pub fn identity(&self) -> DriveIdentityRef<'_> {
        self.controller.identity()
    }

    /// Returns the label that lies on the drive, and whether the drive is used by it.
    #[must_use]
    pub fn label(&self) -> Option<(&DriveLabel, bool)> {
        self.controller.label()
    }

    /// Returns whether the drive exists in this process only, so that no other can have a lease of it.
    #[must_use]
    pub fn is_private(&self) -> bool {
        self.controller.is_private()
    }

    /// Returns whether both are of one host controller that is open.
    #[must_use]
    pub fn shares_controller_with(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.controller, &other.controller)
    }

    /// Which of the host controller's namespaces it is.
    #[must_use]
    pub fn namespace(&self) -> &HostNamespace {
        &self.namespace
    }

    /// Its size, in logical blocks.
    #[must_use]
    pub fn blocks(&self) -> u64 {
        self.namespace.blocks
    }

    /// Logical block size as a power of two, in bytes.
    #[must_use]
    pub fn lba_shift(&self) -> u8 {
        self.namespace.lba_shift
    }

    /// Returns the abilities of the host controller.
    #[must_use]
    pub fn limits(&self) -> &ControllerLimits {
        self.controller.limits()
    }

    /// The control path of its host controller.
    #[must_use]
    pub fn controller(&self) -> &dyn HostController {
        self.controller.as_ref()
    }

    /// Makes I/O queue pairs of the host controller those of a lease, which begins with this weight.
    ///
    /// # Errors
    /// See [`ReserveError`].
    pub fn reserve(
        &self,
        lease: &str,
        pairs: u16,
        weight: LeaseWeight,
    ) -> Result<QueuePairReservation, ReserveError> {
        self.controller.clone().reserve(lease, pairs, weight)
    }

    /// Opens a lease of parts of its namespace at the host controller; `name` is the lease's in the log.
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
