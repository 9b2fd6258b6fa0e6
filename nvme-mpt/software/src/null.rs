//! `null:SIZE`, a drive that keeps nothing: it shows what the path to a drive costs.

use std::io;

use nvme_mpt::drive::{HostLeaseError, HostLeaseRequest};
use nvme_mpt::host::HostMemory;
use nvme_mpt::shadow::HostQueuePair;
use nvme_mpt::spec::sqe::Sqe;
use nvme_mpt::spec::status::Status;

use crate::medium::{LeasedMedium, Medium, Pace};
use crate::store::{SoftwareQueue, Store};

/// Nothing, of some size.
#[derive(Debug)]
pub(crate) struct NullMedium {
    bytes: u64,
}

impl NullMedium {
    pub(crate) fn new(bytes: u64) -> Self {
        Self { bytes }
    }
}

impl Medium for NullMedium {
    fn identity(&self) -> String {
        format!("null:{}", self.bytes)
    }

    fn model(&self) -> &'static str {
        "nvme-mpt null drive"
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn open_lease(
        &self,
        _: &HostLeaseRequest<'_>,
    ) -> Result<Box<dyn LeasedMedium>, HostLeaseError> {
        Ok(Box::new(NullLease))
    }
}

#[derive(Debug)]
struct NullLease;

impl LeasedMedium for NullLease {
    fn create_queue(&self, slots: u16, pace: Pace<'_>) -> io::Result<HostQueuePair> {
        Ok(pace.queue(SoftwareQueue::new(NullStore, slots), slots))
    }
}

/// Completes every command at once. A read leaves the guest's buffer as it was.
#[derive(Debug, Default)]
pub(crate) struct NullStore;

impl Store for NullStore {
    #[inline]
    fn execute(&mut self, _: &Sqe, _: HostMemory<'_>) -> Status {
        Status::SUCCESS
    }

    #[inline]
    fn prefetch(&self, _: &Sqe) {}
}
