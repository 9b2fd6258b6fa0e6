//! Stores of any type behind the layers. Their type matters only where a queue is created.

use std::fmt;
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;

use nvme_models::{DriveModel, TimedQueue};
use nvme_mpt::drive::{
    HostController, HostLease, HostLeaseError, HostLeaseRequest, StoreController, StoreLease,
};
use nvme_mpt::shadow::HostQueuePair;

/// Object-safe form of [`StoreController`].
pub(crate) trait AnyStore: fmt::Debug + Send + Sync {
    /// Returns the store as a host controller.
    fn controller(&self) -> &dyn HostController;

    /// See [`StoreController::open_store_lease`].
    fn open_lease(
        &self,
        request: &HostLeaseRequest<'_>,
    ) -> Result<Box<dyn AnyStoreLease>, HostLeaseError>;

    /// See [`StoreController::path`].
    fn path(&self) -> Option<&Path>;

    /// See [`StoreController::set_companion_file`].
    fn set_companion_file(&self, file: Arc<File>);
}

impl<C: StoreController> AnyStore for C {
    fn controller(&self) -> &dyn HostController {
        self
    }

    fn open_lease(
        &self,
        request: &HostLeaseRequest<'_>,
    ) -> Result<Box<dyn AnyStoreLease>, HostLeaseError> {
        Ok(Box::new(self.open_store_lease(request)?))
    }

    fn path(&self) -> Option<&Path> {
        StoreController::path(self)
    }

    fn set_companion_file(&self, file: Arc<File>) {
        StoreController::set_companion_file(self, file);
    }
}

/// Object-safe form of [`StoreLease`].
pub(crate) trait AnyStoreLease: fmt::Debug + Send + Sync {
    /// Returns the lease as one of a host controller.
    fn lease(&self) -> &dyn HostLease;

    /// Creates a queue pair whose completions the model delays. The model's code is compiled for the store's type of queue.
    fn create_timed_queue(&self, slots: u16, model: &Arc<DriveModel>) -> io::Result<HostQueuePair>;
}

impl<L: StoreLease + 'static> AnyStoreLease for L {
    fn lease(&self) -> &dyn HostLease {
        self
    }

    fn create_timed_queue(&self, slots: u16, model: &Arc<DriveModel>) -> io::Result<HostQueuePair> {
        let queue = self.create_delayable_queue(slots)?;
        Ok(HostQueuePair::new(TimedQueue::new(
            queue,
            model.clone(),
            slots,
        )))
    }
}
