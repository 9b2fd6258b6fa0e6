//! Hand-over of a function's drive to another process, and taking it back.
//!
//! A VMM that moves a guest to another VMM on the same host pauses the guest, hands its functions over, and sends their states.
//! From then on, the process that receives the states can open the drive, and take the lease and all locks. If the move fails,
//! the guest continues here: the VMM creates the function again on the same part of the same drive, gives it the guest's memory
//! and restores it from the saved state.
//!
//! Only one process has the drive at a time. After a hand-over, the function's slot holds the saved state, the guest's memory
//! (`dma/detached_memory.rs`) and the pages written since the VMM last asked for them. If another process still has the drive,
//! `resume` waits some seconds for its release. After that, the slot stays empty. So if two VMMs run the guest by mistake, only
//! one of them has the drive.

use std::mem;

use super::function_factory::{FunctionFactory, HandedOverFunction};
use super::{DeviceError, DeviceSlot, FunctionDevice, SharedFunctionDevice, WiredFunction};

impl FunctionDevice {
    /// Sets the factory that creates the function again when a hand-over is taken back. [`Self::hand_over`] fails without a
    /// factory.
    #[must_use]
    pub fn with_factory(mut self, factory: FunctionFactory) -> Self {
        self.factory = Some(factory);
        self
    }

    /// Flushes the drive of a paused function and releases the drive, the lease and all locks, so that the function can be
    /// restored in another process. This process keeps the function's state and the list of pages that it wrote. Until the
    /// function is [resumed](Self::resume), the guest sees an empty slot.
    ///
    /// # Errors
    /// [`DeviceError::Private`], [`DeviceError::NoFactory`], [`DeviceError::Flush`], and [`DeviceError::Save`] if the function
    /// is not paused; after these errors, the function is unchanged. [`DeviceError::Empty`] if the slot has no function.
    pub fn hand_over(&self) -> Result<(), DeviceError> {
        let SharedFunctionDevice { id, .. } = &*self.shared;
        let mut slot = self.shared.slot();
        let state = match &mut *slot {
            DeviceSlot::Function(state) => state,
            DeviceSlot::HandedOver(_) => return Ok(()),
            DeviceSlot::Empty => return Err(self.empty_error()),
        };
        if self.factory.is_none() {
            return Err(DeviceError::NoFactory(id.clone()));
        }
        if state.function.facts().is_private {
            return Err(DeviceError::Private(id.clone()));
        }
        let saved = state.function.save()?;
        self.lease.end();
        if let Err(source) = state.function.flush() {
            self.lease.allow();
            return Err(DeviceError::Flush(source));
        }
        let handed_over = HandedOverFunction {
            saved,
            memory: state.function.memory().detach(),
            // The call fails if the function's writes were not logged.
            dirty: state.function.backend().take_dirty_pages().ok(),
        };
        // The function is paused, so no command in flight uses the memory.
        let unwired = self.shared.unwire(state);
        *slot = DeviceSlot::HandedOver(Box::new(handed_over));
        unwired
    }

    /// Creates the function again after a hand-over, restores it and resumes it.
    pub(super) fn take_back(&self, slot: &mut DeviceSlot) -> Result<(), DeviceError> {
        let (handed_over, factory) = match (mem::replace(slot, DeviceSlot::Empty), &self.factory) {
            (DeviceSlot::HandedOver(handed_over), Some(factory)) => (handed_over, factory),
            (other, _) => {
                *slot = other;
                return Ok(());
            }
        };
        let SharedFunctionDevice { id, vmm, .. } = &*self.shared;
        let function = factory
            .create()
            .map_err(|source| DeviceError::TakeBack(id.clone(), source))?;
        let mut state = self.shared.wire(function)?;
        if let Err(error) = state.restore_handed_over(&handed_over) {
            self.shared.unwire(&mut state)?;
            return Err(error);
        }
        state.function.resume();
        state.update_vmm(&**vmm);
        *slot = DeviceSlot::Function(Box::new(state));
        Ok(())
    }
}

impl WiredFunction {
    fn restore_handed_over(&mut self, handed_over: &HandedOverFunction) -> Result<(), DeviceError> {
        self.function.backend().map_detached(&handed_over.memory)?;
        // The result, the BARs that moved, is not needed: the VMM still forwards accesses at the addresses that the restored
        // BARs have.
        drop(self.function.restore(&handed_over.saved)?);
        self.routes.update_all(&self.function);
        Ok(())
    }
}
