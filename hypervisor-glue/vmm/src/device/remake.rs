//! The parts of a function whose drive was handed over, and the recipe to make it again.

use std::fmt;
use std::mem;
use std::time::Duration;

use nvme_mpt::DirtyRange;
use nvme_mpt::deadline::{Deadline, SystemClock};
use nvme_mpt::dma::HeldMemory;
use vmm_device::{FunctionState, NvmeFunction};

use crate::open::OpenError;

/// Pause between two attempts to take a drive back.
const RETRY_INTERVAL: Duration = Duration::from_millis(50);

/// Parts of a function whose drive another process may have.
pub(super) struct HandedOver {
    pub(super) saved: FunctionState,
    pub(super) memory: HeldMemory,
    /// Pages of its last writes, if they were logged.
    pub(super) dirty: Option<Vec<DirtyRange>>,
}

impl HandedOver {
    /// Takes the pages that were not taken yet.
    pub(super) fn take_dirty_pages(&mut self) -> Option<Vec<DirtyRange>> {
        self.dirty.as_mut().map(mem::take)
    }

    pub(super) fn stop_dirty_log(&mut self) {
        self.dirty = None;
    }
}

/// Recipe that makes a function once more.
pub struct Remake {
    make: Box<dyn Fn() -> Result<NvmeFunction, OpenError> + Send + Sync>,
    /// For how long it is tried: who had the drive meanwhile may be about to give it back.
    patience: Duration,
}

impl Remake {
    /// Remakes by `make`, which is tried again for `patience` if it fails.
    pub fn new(
        make: impl Fn() -> Result<NvmeFunction, OpenError> + Send + Sync + 'static,
        patience: Duration,
    ) -> Self {
        Self {
            make: Box::new(make),
            patience,
        }
    }

    pub(super) fn function(&self) -> Result<NvmeFunction, OpenError> {
        let deadline = Deadline::after(&SystemClock::shared(), self.patience);
        loop {
            match (self.make)() {
                Err(_) if !deadline.has_passed() => deadline.sleep(RETRY_INTERVAL),
                made => return made,
            }
        }
    }
}

impl fmt::Debug for Remake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Remake")
            .field("patience", &self.patience)
            .finish_non_exhaustive()
    }
}
