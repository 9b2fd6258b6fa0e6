//! `null:SIZE`, a drive that keeps nothing: it shows what the path to a drive costs.

use super::Store;
use crate::host::HostMemory;
use crate::spec::sqe::Sqe;
use crate::spec::status::Status;

/// Completes every command at once. A read leaves the guest's buffer as it was.
#[derive(Debug, Default)]
pub struct NullStore;

impl Store for NullStore {
    #[inline]
    fn execute(&mut self, _: &Sqe, _: HostMemory<'_>) -> Status {
        Status::SUCCESS
    }

    #[inline]
    fn prefetch(&self, _: &Sqe) {}
}
