//! Factory that creates a function again after its drive was handed over, and the state that is needed for that.

use std::fmt;
use std::mem;
use std::time::Duration;

use nvme_guest::DirtyRange;
use nvme_guest::dma::DetachedGuestMemory;
use nvme_mpt_memory::deadline::{Deadline, SystemClock};
use vmm_device::{FunctionState, NvmeFunction};

use crate::open::OpenError;

/// Interval between two attempts to take a drive back.
const RETRY_INTERVAL: Duration = Duration::from_millis(50);

/// State of a function whose drive was handed over to another process, with which this process can take the function back.
pub(super) struct HandedOverFunction {
    pub(super) saved: FunctionState,
    pub(super) memory: DetachedGuestMemory,
    /// Pages that the function wrote since the VMM last asked for them; `None` if writes were not logged.
    pub(super) dirty: Option<Vec<DirtyRange>>,
}

impl HandedOverFunction {
    /// Returns the pages that were logged since the last call, and clears the list.
    pub(super) fn take_dirty_pages(&mut self) -> Option<Vec<DirtyRange>> {
        self.dirty.as_mut().map(mem::take)
    }

    pub(super) fn stop_dirty_log(&mut self) {
        self.dirty = None;
    }
}

/// Constructor of a function, which takes the function's drive back after a hand-over that failed.
pub struct FunctionFactory {
    make: Box<dyn Fn() -> Result<NvmeFunction, OpenError> + Send + Sync>,
    /// Time during which a failed creation is repeated, because the process that has the drive may be about to release it.
    timeout: Duration,
}

impl FunctionFactory {
    /// Creates a factory that creates the function by `make`, and repeats a failed `make` for up to `timeout`.
    pub fn new(
        make: impl Fn() -> Result<NvmeFunction, OpenError> + Send + Sync + 'static,
        timeout: Duration,
    ) -> Self {
        Self {
            make: Box::new(make),
            timeout,
        }
    }

    pub(super) fn create(&self) -> Result<NvmeFunction, OpenError> {
        let deadline = Deadline::after(&SystemClock::shared(), self.timeout);
        loop {
            match (self.make)() {
                Err(_) if !deadline.has_passed() => deadline.sleep(RETRY_INTERVAL),
                made => return made,
            }
        }
    }
}

impl fmt::Debug for FunctionFactory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FunctionFactory")
            .field("timeout", &self.timeout)
            .finish_non_exhaustive()
    }
}
