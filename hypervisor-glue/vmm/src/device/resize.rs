//! Growth of a function's lease while its guest runs.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use nvme_mpt::LocalBackend;

use super::{DeviceError, DeviceSlot, FunctionDevice};

/// The back end of a function whose drive this process has; empty if a server has the drive. It is replaced when the function
/// takes its drive back.
pub(crate) type LocalBackendSlot = Arc<Mutex<Weak<LocalBackend>>>;

/// Notes `backend` as the one of a function.
pub(crate) fn note_backend(slot: &LocalBackendSlot, backend: Option<&Arc<LocalBackend>>) {
    let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
    *slot = backend.map(Arc::downgrade).unwrap_or_default();
}

/// Grows the lease of a function. It can be used on another thread than the function's, since growing takes as long as wiping
/// the added blocks.
#[derive(Debug)]
pub struct LeaseResizer {
    id: String,
    backend: Weak<LocalBackend>,
}

impl LeaseResizer {
    /// Grows the lease, which was requested by size, to `bytes`, and wipes the added blocks if they have earlier data. When
    /// this returns, the guest was told of the new size.
    ///
    /// # Errors
    /// [`DeviceError::Resize`], after which the guest keeps its old size; [`DeviceError::Empty`] if the function has ended.
    pub fn grow(&self, bytes: u64) -> Result<(), DeviceError> {
        let backend = self.backend.upgrade();
        let backend = backend.ok_or_else(|| DeviceError::Empty(self.id.clone()))?;
        Ok(backend.grow(bytes, &AtomicBool::new(false))?)
    }
}

impl FunctionDevice {
    pub(crate) fn with_local_backend(mut self, backend: LocalBackendSlot) -> Self {
        self.local_backend = backend;
        self
    }

    /// Returns what grows the function's lease.
    ///
    /// # Errors
    /// [`DeviceError::ServerLease`], [`DeviceError::HandedOver`], [`DeviceError::Empty`].
    pub fn lease_resizer(&self) -> Result<LeaseResizer, DeviceError> {
        match &*self.shared.slot() {
            DeviceSlot::Function(_) => {}
            DeviceSlot::HandedOver(_) => return Err(self.handed_over_error()),
            DeviceSlot::Empty => return Err(self.empty_error()),
        }
        let id = self.id().to_owned();
        let slot = self.local_backend.lock();
        let backend = slot.unwrap_or_else(PoisonError::into_inner).clone();
        match backend.strong_count() {
            0 => Err(DeviceError::ServerLease(id)),
            _ => Ok(LeaseResizer { id, backend }),
        }
    }
}
