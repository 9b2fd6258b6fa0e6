//! Pausing a function in a VMM's process, taking a snapshot of it, and restoring one.
//!
//! A VMM pauses its vCPUs, then its functions; takes the guest's memory and each function's state;
//! and makes both again elsewhere: a function that was just started, with the guest's memory mapped,
//! is restored, and goes on before the vCPUs do.

use nvme_mpt::DirtyRange;
use vmm_device::{BarMove, FunctionState};

use super::{DeviceError, FunctionDevice, State};

impl FunctionDevice {
    /// Has the function take no more commands, and waits for those in flight. When this returns,
    /// nothing of it touches the guest's memory until it goes on.
    ///
    /// # Errors
    /// [`DeviceError::Pause`]: it goes on, and its controller has failed.
    pub fn pause(&self) -> Result<(), DeviceError> {
        Ok(self.shared.state().function.pause()?)
    }

    /// Has the function go on.
    pub fn resume(&self) {
        let mut state = self.shared.state();
        state.function.resume();
        state.follow(&*self.shared.vmm);
    }

    /// The state of the function, which is paused.
    ///
    /// # Errors
    /// [`DeviceError::Save`].
    pub fn save(&self) -> Result<FunctionState, DeviceError> {
        Ok(self.shared.state().function.save()?)
    }

    /// Begins to note which pages of the guest's memory the function writes: for a VMM that copies
    /// the memory of a guest that runs on. It copies all of it after this.
    ///
    /// # Errors
    /// [`DeviceError::Memory`] if commands in flight do not finish.
    pub fn start_dirty_log(&self) -> Result<(), DeviceError> {
        Ok(self.shared.state().function.memory().start_dirty_log()?)
    }

    /// The pages that the function wrote since the last time, or since it began to note them. What
    /// it wrote at the last is there once it is paused.
    ///
    /// # Errors
    /// [`DeviceError::Memory`] if it does not note them.
    pub fn take_dirty_pages(&self) -> Result<Vec<DirtyRange>, DeviceError> {
        Ok(self.shared.state().function.memory().take_dirty_pages()?)
    }

    /// Ends [`Self::start_dirty_log`].
    pub fn stop_dirty_log(&self) {
        self.shared.state().function.memory().stop_dirty_log();
    }

    /// Makes a function that was just started what another one was when it was saved. It is paused
    /// until it is resumed. Returns the BARs that are somewhere now: their accesses are to reach the
    /// function there.
    ///
    /// # Errors
    /// [`DeviceError::Restore`]; then it is as it was.
    pub fn restore(&self, saved: &FunctionState) -> Result<Vec<BarMove>, DeviceError> {
        let mut state = self.shared.state();
        let State {
            function, routes, ..
        } = &mut *state;
        let moves = function.restore(saved)?;
        // No vector is raised before the function goes on.
        if let Some(routes) = routes {
            routes.follow_all(function);
        }
        state.follow(&*self.shared.vmm);
        Ok(moves)
    }
}
