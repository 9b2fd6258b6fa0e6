//! Pause, snapshot and restore of a function in a VMM's process.

use nvme_guest::{DirtyRange, DmaError};
use vmm_device::{BarMove, FunctionState};

use super::{DeviceError, DeviceSlot, FunctionDevice, WiredFunction};

impl FunctionDevice {
    /// Stops fetching commands and waits for in-flight commands. When this returns, the function does not access the guest's
    /// memory until [`Self::resume`].
    ///
    /// A VMM pauses its vCPUs, then its functions, and [saves](Self::save) the guest's memory and each function. To restore, it
    /// starts a new function, maps the guest's memory, [restores](Self::restore) and resumes the function, and then its vCPUs.
    ///
    /// # Errors
    /// [`DeviceError::Pause`] if in-flight commands did not complete in time. The function then continues to run.
    pub fn pause(&self) -> Result<(), DeviceError> {
        match self.shared.slot().function() {
            Some(state) => Ok(state.function.pause()?),
            None => Ok(()),
        }
    }

    /// Resumes the function. If the function was [handed over](Self::hand_over), takes the drive back first. This takes as long
    /// as opening the drive, and some seconds longer if another process still has the drive.
    ///
    /// # Errors
    /// [`DeviceError::TakeBack`], and all errors of starting or restoring a function. After such an error, the slot stays
    /// empty, and the guest has no drive any more.
    pub fn resume(&self) -> Result<(), DeviceError> {
        let mut slot = self.shared.slot();
        match &mut *slot {
            DeviceSlot::Function(state) => {
                state.function.resume();
                state.update_vmm(&*self.shared.vmm);
                Ok(())
            }
            DeviceSlot::HandedOver(_) => {
                let taken_back = self.take_back(&mut slot);
                // The function's next periodic work may now be due earlier, so the control thread computes its timeout again.
                self.shared.control.wake();
                taken_back
            }
            DeviceSlot::Empty => Ok(()),
        }
    }

    /// Returns the state of a paused function.
    ///
    /// # Errors
    /// [`DeviceError::Save`], [`DeviceError::Empty`].
    pub fn save(&self) -> Result<FunctionState, DeviceError> {
        match &*self.shared.slot() {
            DeviceSlot::Function(state) => Ok(state.function.save()?),
            DeviceSlot::HandedOver(handed_over) => Ok(handed_over.saved.clone()),
            DeviceSlot::Empty => Err(self.empty_error()),
        }
    }

    /// Starts to log the pages of guest memory that the function writes, for a VMM that copies the memory of a running guest.
    /// Earlier writes are not logged, so the VMM must copy all memory after this call.
    ///
    /// # Errors
    /// [`DeviceError::Memory`] if commands in flight do not complete, [`DeviceError::HandedOver`].
    pub fn start_dirty_log(&self) -> Result<(), DeviceError> {
        match &*self.shared.slot() {
            DeviceSlot::Function(state) => Ok(state.function.backend().start_dirty_log()?),
            DeviceSlot::HandedOver(_) => Err(self.handed_over_error()),
            DeviceSlot::Empty => Ok(()),
        }
    }

    /// Returns the pages that the function has written since the last call, or since the log was started. The VMM must call
    /// this once more after it has paused the function, to get the pages written before the pause.
    ///
    /// # Errors
    /// [`DeviceError::Memory`] if the log is not active.
    pub fn take_dirty_pages(&self) -> Result<Vec<DirtyRange>, DeviceError> {
        match &mut *self.shared.slot() {
            DeviceSlot::Function(state) => Ok(state.function.backend().take_dirty_pages()?),
            DeviceSlot::HandedOver(handed_over) => {
                Ok(handed_over.take_dirty_pages().ok_or(DmaError::NotLogged)?)
            }
            // An empty slot writes no pages.
            DeviceSlot::Empty => Ok(Vec::new()),
        }
    }

    /// Stops the log of [`Self::start_dirty_log`].
    pub fn stop_dirty_log(&self) {
        match &mut *self.shared.slot() {
            DeviceSlot::Function(state) => state.function.backend().stop_dirty_log(),
            DeviceSlot::HandedOver(handed_over) => handed_over.stop_dirty_log(),
            DeviceSlot::Empty => {}
        }
    }

    /// Restores a saved function into this function, which was just started. The function is paused until it is resumed.
    /// Returns the BARs that moved: the VMM must forward accesses at their new addresses.
    ///
    /// # Errors
    /// [`DeviceError::Restore`]: the function is unchanged, or in its power-on state. [`DeviceError::HandedOver`],
    /// [`DeviceError::Empty`].
    pub fn restore(&self, saved: &FunctionState) -> Result<Vec<BarMove>, DeviceError> {
        let mut slot = self.shared.slot();
        let state = match &mut *slot {
            DeviceSlot::Function(state) => state,
            DeviceSlot::HandedOver(_) => return Err(self.handed_over_error()),
            DeviceSlot::Empty => return Err(self.empty_error()),
        };
        let WiredFunction {
            function, routes, ..
        } = &mut **state;
        let restored = function.restore(saved);
        // The routes are complete before the function is resumed and raises vectors. They are set after a refused restore as
        // well, which may have reset the function.
        routes.update_all(function);
        let bar_moves = restored?;
        state.update_vmm(&*self.shared.vmm);
        Ok(bar_moves)
    }
}
