//! Growth of a function's lease while its guest runs.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};

use nvme_mpt::LocalBackend;

use super::{DeviceError, DeviceSlot, FunctionDevice, lock};

/// Lease that grows on another thread than its function's, since growing takes as long as wiping the added blocks.
///
/// Growing ends before the function releases the lease. Else this process would wipe blocks of the lease's next holder.
#[derive(Debug, Default)]
pub(crate) struct GrowingLease {
    /// Back end of the function; empty if a server has the drive. A function that takes its drive back has another one.
    backend: Mutex<Weak<LocalBackend>>,
    is_released: AtomicBool,
    /// Locked while the lease grows.
    growth: Mutex<()>,
}

impl GrowingLease {
    /// Notes the back end of the function, whose lease may grow from now on.
    pub(crate) fn set_backend(&self, backend: Option<&Arc<LocalBackend>>) {
        *lock(&self.backend) = backend.map(Arc::downgrade).unwrap_or_default();
        self.allow();
    }

    fn has_backend(&self) -> bool {
        lock(&self.backend).strong_count() > 0
    }

    /// Lets the lease grow again after [`Self::end`].
    pub(super) fn allow(&self) {
        self.is_released.store(false, Ordering::Release);
    }

    /// Prevents further growth, and waits until the present one has wiped the block that it is at.
    pub(super) fn end(&self) {
        self.is_released.store(true, Ordering::Release);
        drop(lock(&self.growth));
    }
}

/// Grows the lease of a function, on any thread.
#[derive(Debug)]
pub struct LeaseResizer {
    id: String,
    lease: Arc<GrowingLease>,
}

impl LeaseResizer {
    /// Grows the lease, which was requested by size, to `bytes`, and wipes the added blocks if they have earlier data. When
    /// this returns, the guest was told of the new size.
    ///
    /// # Errors
    /// [`DeviceError::Resize`], after which the guest keeps its old size; [`DeviceError::Empty`] if the function has ended.
    pub fn grow(&self, bytes: u64) -> Result<(), DeviceError> {
        let _growth = lock(&self.lease.growth);
        let backend = lock(&self.lease.backend).upgrade();
        match backend.filter(|_| !self.lease.is_released.load(Ordering::Acquire)) {
            Some(backend) => Ok(backend.grow(bytes, &self.lease.is_released)?),
            None => Err(DeviceError::Empty(self.id.clone())),
        }
    }
}

impl FunctionDevice {
    pub(crate) fn with_growing_lease(mut self, lease: Arc<GrowingLease>) -> Self {
        self.lease = lease;
        self
    }

    /// Returns a handle that grows the function's lease.
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
        match self.lease.has_backend() {
            true => Ok(LeaseResizer {
                id,
                lease: self.lease.clone(),
            }),
            false => Err(DeviceError::ServerLease(id)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    #[test]
    fn a_lease_is_released_after_its_growth() {
        let lease = Arc::new(GrowingLease::default());
        let has_grown = Arc::new(AtomicBool::new(false));
        let (report_start, started) = mpsc::channel();
        let growing = {
            let (lease, has_grown) = (lease.clone(), has_grown.clone());
            thread::spawn(move || {
                let _growth = lock(&lease.growth);
                report_start.send(()).unwrap();
                // Growth ends when it sees that the lease is to be released.
                while !lease.is_released.load(Ordering::Acquire) {
                    thread::yield_now();
                }
                has_grown.store(true, Ordering::Release);
            })
        };
        started.recv().unwrap();
        lease.end();
        assert!(has_grown.load(Ordering::Acquire));
        growing.join().unwrap();
    }
}
