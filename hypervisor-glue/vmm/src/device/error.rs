//! Errors of a function in a VMM.

use std::io;

use nvme_guest::{BackendStateError, DmaError, QueueError};
use nvme_mpt::local_backend::GrowError;
use thiserror::Error;
use vmm_device::{EndError, FunctionStateError};

use crate::open::OpenError;
use crate::vmm::VmmError;

/// Error of a function in a VMM.
#[derive(Debug, Error)]
pub enum DeviceError {
    /// The VMM failed to provide a service of [`Vmm`](crate::Vmm).
    #[error(transparent)]
    Vmm(#[from] VmmError),
    /// The kernel refused a resource for connecting the function to the VMM, such as a file descriptor.
    #[error("Cannot create the eventfds of {id}; raise the limit on open files")]
    Wiring {
        /// Id of the function.
        id: String,
        /// Kernel's error.
        source: io::Error,
    },
    /// The control thread cannot be started.
    #[error("Cannot start the control thread of {id}")]
    Thread {
        /// Id of the function.
        id: String,
        /// Kernel's error.
        source: io::Error,
    },
    /// Guest memory cannot be mapped for the function, or unmapped.
    #[error("Cannot track the guest's memory")]
    Memory(#[from] DmaError),
    /// In-flight commands did not complete in time, so the function was not paused and continues to run.
    #[error("The function cannot be paused and continues as before; pause it again later")]
    Pause(#[from] QueueError),
    /// The function's state cannot be saved.
    #[error("The state of the function cannot be saved")]
    Save(#[from] BackendStateError),
    /// The saved state does not fit the function, or is damaged.
    #[error("The function cannot be restored")]
    Restore(#[from] FunctionStateError),
    /// The drive could not be flushed.
    #[error("Cannot flush the drive: what the guest wrote and did not flush may be lost")]
    Flush(#[source] io::Error),
    /// The function has left the VMM, but its in-flight commands did not end in time, or the drive was not flushed.
    #[error(transparent)]
    End(#[from] EndError),
    /// The control thread panicked.
    #[error("The control thread of {0} panicked")]
    Panicked(String),
    /// The drive exists in this process only, so no other process can take it over.
    #[error("The drive of {0} cannot be handed over: it exists in this process only")]
    Private(String),
    /// The function has no [factory](crate::FunctionFactory) that creates it again, so a hand-over could not be taken back.
    #[error("The drive of {0} cannot be handed over: it could not be taken back")]
    NoFactory(String),
    /// The function's drive was handed over to another process.
    #[error("The drive of {0} was handed over; resume the function first")]
    HandedOver(String),
    /// The drive was handed over, and this process cannot open it again.
    #[error("The drive of {0} cannot be taken back; its slot is empty from now on")]
    TakeBack(String, #[source] OpenError),
    /// The lease cannot grow to the requested size.
    #[error("The lease cannot be resized; the guest keeps the size that it has")]
    Resize(#[from] GrowError),
    /// This process cannot resize the lease, since a drive server has the drive.
    #[error("The lease of {0} is with a drive server; resize it there, by `nvme-mpt resize`")]
    ServerLease(String),
    /// The slot has no function.
    #[error("The slot of {0} is empty; remove it")]
    Empty(String),
}

impl DeviceError {
    pub(super) fn wiring(id: &str, source: io::Error) -> Self {
        Self::Wiring {
            id: id.to_owned(),
            source,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvme_spec::ids::QueueId;

    #[test]
    fn a_failed_pause_says_that_the_function_continues() {
        let error = DeviceError::from(QueueError::Timeout(QueueId(1))).to_string();
        assert!(error.contains("continues"), "{error}");
        assert!(!error.contains("reset"), "{error}");
    }
}
