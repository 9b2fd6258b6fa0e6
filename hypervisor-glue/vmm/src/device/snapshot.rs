//! Pausing a function in a VMM's process, taking a snapshot of it, and restoring one.
//!
//! A VMM pauses its vCPUs, then its functions; takes the guest's memory and each function's state;
//! and makes both again elsewhere: a function that was just started, with the guest's memory mapped,
//! is restored, and goes on before the vCPUs do.

use nvme_mpt::{DirtyRange, DmaError};
use vmm_device::{BarMove, FunctionState};

use super::{DeviceError, FunctionDevice, Slot, State};

impl FunctionDevice {
    /// Has the function take no more commands, and waits for those in flight. When this returns,
    /// nothing of it touches the guest's memory until it goes on.
    ///
    /// # Errors
    /// [`DeviceError::Pause`]: it goes on, and its controller has failed.
    pub fn pause(&self) -> Result<(), DeviceError> {
        match self.shared.slot().function() {
            Some(state) => Ok(state.function.pause()?),
            None => Ok(()),
        }
    }

    /// Has the function go on. One that was [handed over](Self::hand_over) is taken back first, with
    /// its drive: that takes as long as the drive takes to be opened, and some seconds if somebody
    /// else has it.
    ///
    /// # Errors
    /// [`DeviceError::TakeBack`], and whatever a function cannot be started or restored for: its slot
    /// is empty from then on, as if the guest had lost its drive.
    pub fn resume(&self) -> Result<(), DeviceError> {
        let mut slot = self.shared.slot();
        match &mut *slot {
            Slot::Function(state) => {
                state.function.resume();
                state.follow(&*self.shared.vmm);
                Ok(())
            }
            Slot::HandedOver(_) => {
                let taken_back = self.take_back(&mut slot);
                // The control thread may have to wake up at another time now.
                self.shared.control.wake();
                taken_back
            }
            Slot::Empty => Ok(()),
        }
    }

    /// The state of the function, which is paused.
    ///
    /// # Errors
    /// [`DeviceError::Save`], [`DeviceError::Empty`].
    pub fn save(&self) -> Result<FunctionState, DeviceError> {
        match &*self.shared.slot() {
            Slot::Function(state) => Ok(state.function.save()?),
            Slot::HandedOver(handed_over) => Ok(handed_over.saved.clone()),
            Slot::Empty => Err(self.empty()),
        }
    }

    /// Begins to note which pages of the guest's memory the function writes: for a VMM that copies
    /// the memory of a guest that runs on. It copies all of it after this.
    ///
    /// # Errors
    /// [`DeviceError::Memory`] if commands in flight do not finish, [`DeviceError::HandedOver`].
    pub fn start_dirty_log(&self) -> Result<(), DeviceError> {
        match &*self.shared.slot() {
            Slot::Function(state) => Ok(state.function.host().start_dirty_log()?),
            Slot::HandedOver(_) => Err(self.handed_over()),
            Slot::Empty => Ok(()),
        }
    }

    /// The pages that the function wrote since the last time, or since it began to note them. What
    /// it wrote at the last is there once it is paused.
    ///
    /// # Errors
    /// [`DeviceError::Memory`] if it does not note them.
    pub fn take_dirty_pages(&self) -> Result<Vec<DirtyRange>, DeviceError> {
        match &mut *self.shared.slot() {
            Slot::Function(state) => Ok(state.function.host().take_dirty_pages()?),
            Slot::HandedOver(handed_over) => {
                Ok(handed_over.take_dirty_pages().ok_or(DmaError::NotLogged)?)
            }
            // Without a function, there are no writes.
            Slot::Empty => Ok(Vec::new()),
        }
    }

    /// Ends [`Self::start_dirty_log`].
    pub fn stop_dirty_log(&self) {
        match &mut *self.shared.slot() {
            Slot::Function(state) => state.function.host().stop_dirty_log(),
            Slot::HandedOver(handed_over) => handed_over.stop_dirty_log(),
            Slot::Empty => {}
        }
    }

    /// Makes a function that was just started what another one was when it was saved. It is paused
    /// until it is resumed. Returns the BARs that are somewhere now: their accesses are to reach the
    /// function there.
    ///
    /// # Errors
    /// [`DeviceError::Restore`]; then it is as it was. [`DeviceError::HandedOver`],
    /// [`DeviceError::Empty`].
    pub fn restore(&self, saved: &FunctionState) -> Result<Vec<BarMove>, DeviceError> {
        let mut slot = self.shared.slot();
        let state = match &mut *slot {
            Slot::Function(state) => state,
            Slot::HandedOver(_) => return Err(self.handed_over()),
            Slot::Empty => return Err(self.empty()),
        };
        let State {
            function, routes, ..
        } = &mut **state;
        let restored = function.restore(saved);
        // No vector is raised before the function goes on. One that was refused is as after power-on.
        routes.follow_all(function);
        let moves = restored?;
        state.follow(&*self.shared.vmm);
        Ok(moves)
    }
}
