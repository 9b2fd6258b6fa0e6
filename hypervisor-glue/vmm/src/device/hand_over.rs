//! Handing a function's drive over to another process, and taking it back.
//!
//! A VMM that moves a guest to another one on the same host pauses it, has its functions handed over,
//! and sends their states. From then on the drive, its lease and all locks are free for whoever gets
//! the states. If nobody takes the guest after all, it goes on here, and the function is made again:
//! the same part of the same drive, with the guest's memory as it was, restored from its state.
//!
//! The drive has one owner at a time. The slot keeps the state, the guest's memory (`dma/held.rs`) and the pages
//! written last. `resume` waits some seconds for a drive that another process has; if that process keeps it, the slot
//! stays empty. So of two VMMs that both believe to have the guest, one has its drive.

use std::mem;

use super::remake::{HandedOver, Remake};
use super::{DeviceError, FunctionDevice, Shared, Slot, State};

impl FunctionDevice {
    /// Says how to make the function again, which [`Self::hand_over`] needs.
    #[must_use]
    pub fn remade_by(mut self, remake: Remake) -> Self {
        self.remake = Some(remake);
        self
    }

    /// Gives up the drive, the lease and all locks of a function that is paused, so that the function
    /// can be restored elsewhere. Written data is durable then. Its state and the list of pages that it wrote stay
    /// available. Until it is [resumed](Self::resume), its slot is empty for the guest.
    ///
    /// # Errors
    /// [`DeviceError::Private`], [`DeviceError::Unique`], [`DeviceError::Save`] if it is not paused,
    /// [`DeviceError::Flush`]: it is as it was. [`DeviceError::Empty`].
    pub fn hand_over(&self) -> Result<(), DeviceError> {
        let Shared { id, .. } = &*self.shared;
        let mut slot = self.shared.slot();
        let state = match &mut *slot {
            Slot::Function(state) => state,
            Slot::HandedOver(_) => return Ok(()),
            Slot::Empty => return Err(self.empty()),
        };
        if self.remake.is_none() {
            return Err(DeviceError::Unique(id.clone()));
        }
        if state.function.facts().is_private {
            return Err(DeviceError::Private(id.clone()));
        }
        let saved = state.function.save()?;
        state.function.flush().map_err(DeviceError::Flush)?;
        let handed_over = HandedOver {
            saved,
            memory: state.function.memory().hold(),
            // None are noted if it fails.
            dirty: state.function.host().take_dirty_pages().ok(),
        };
        // It is paused, so that nothing keeps the memory busy.
        let unwired = self.shared.unwire(state);
        *slot = Slot::HandedOver(Box::new(handed_over));
        unwired
    }

    /// Makes the function again, and has it go on.
    pub(super) fn take_back(&self, slot: &mut Slot) -> Result<(), DeviceError> {
        let (handed_over, remake) = match (mem::replace(slot, Slot::Empty), &self.remake) {
            (Slot::HandedOver(handed_over), Some(remake)) => (handed_over, remake),
            (other, _) => {
                *slot = other;
                return Ok(());
            }
        };
        let Shared { id, vmm, .. } = &*self.shared;
        let function = remake
            .function()
            .map_err(|source| DeviceError::TakeBack(id.clone(), source))?;
        let mut state = self.shared.wire(function)?;
        if let Err(error) = state.become_again(&handed_over) {
            self.shared.unwire(&mut state)?;
            return Err(error);
        }
        state.function.resume();
        state.follow(&**vmm);
        *slot = Slot::Function(Box::new(state));
        Ok(())
    }
}

impl State {
    fn become_again(&mut self, handed_over: &HandedOver) -> Result<(), DeviceError> {
        self.function.host().map_held(&handed_over.memory)?;
        // The VMM has the BARs where it had them.
        drop(self.function.restore(&handed_over.saved)?);
        self.routes.follow_all(&self.function);
        Ok(())
    }
}
