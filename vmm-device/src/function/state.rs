//! Pause, snapshot and restore of a function.

use std::{io, time::Duration};

use nvme_guest::{BackendStateError, PersistedQueues, QueueError};
use nvme_mpt_memory::deadline::DRAIN_DEADLINE;

use super::{ADMIN_VECTOR, NvmeFunction};
use crate::{
    pci::config_space::BarMove,
    state::{FunctionSnapshot, SnapshotError, VERSION},
};

impl NvmeFunction {
    /// Stops taking I/O and admin commands, and waits for commands in flight. After it returns, nothing touches the guest's
    /// memory until `resume`. Register accesses are still answered, but commands that the guest submits wait.
    ///
    /// # Errors
    /// [`QueueError::Timeout`] if commands are in flight after 30 seconds. After an error, the function runs as before.
    pub fn pause(&mut self) -> Result<(), QueueError> {
        self.pause_with_timeout(DRAIN_DEADLINE)
    }

    /// Pauses like [`Self::pause`], but waits at most `time`.
    ///
    /// # Errors
    /// As [`Self::pause`].
    pub fn pause_with_timeout(&mut self, time: Duration) -> Result<(), QueueError> {
        let paused = match self.is_quiescing {
            // Bus Master Enable is clear: the queues stay stopped even if this times out.
            true => self.backend.pause_within(time),
            false if time == DRAIN_DEADLINE => self.backend.pause(),
            false => self
                .backend
                .pause_within(time)
                .inspect_err(|_| self.backend.resume()),
        };
        if paused.is_ok() {
            (self.paused, self.is_quiesced, self.is_quiescing) = (true, true, false);
        }
        // Events that the queues reported while they stopped belong to the saved state.
        self.handle_events();
        paused
    }

    /// Continues after a pause or a restore.
    pub fn resume(&mut self) {
        self.paused = false;
        // Without Bus Master Enable, the function continues once the guest sets it.
        self.apply_bus_master();
    }

    /// Returns whether the VMM has paused the function.
    #[must_use]
    pub fn is_paused(&self) -> bool {
        self.paused
    }

    /// Saves the state of a paused function.
    ///
    /// # Errors
    /// [`BackendStateError::NotPaused`]; [`BackendStateError::Unreachable`] while a transition waits for the back end or its
    /// storage.
    pub fn save(&self) -> Result<FunctionSnapshot, BackendStateError> {
        if self.pending_transition.is_some() {
            let text = "the guest enables its controller or shuts it down, which waits for the drive: save it again later";
            let source = io::Error::new(io::ErrorKind::NotConnected, text);
            return Err(BackendStateError::Unreachable { source });
        }
        let mut msix = self.msix.save();
        // A restored function that was not resumed yet still has to raise these vectors.
        msix.pending.extend(&self.pending_vectors);
        msix.pending.sort_unstable();
        msix.pending.dedup();
        Ok(FunctionSnapshot {
            version: VERSION,
            config_space: self.config.save(),
            switched_off: self.config.is_command_cleared(),
            msix,
            registers: self.registers.save(),
            admin: self.admin.save(),
            attachment: self.backend.save()?,
        })
    }

    /// Restores a saved function, in this process or another one. The lease must have equal properties, and the guest's memory
    /// must be mapped. Afterwards, the function is paused, and raises no vector until it is resumed. Returns the BARs that
    /// moved.
    ///
    /// # Errors
    /// All of [`SnapshotError`] except those about bytes. If a check of the saved state fails, the function is unchanged. After
    /// any other error, it is in its power-on state, and not paused.
    pub fn restore(&mut self, state: &FunctionSnapshot) -> Result<Vec<BarMove>, SnapshotError> {
        state.check_version()?;
        // Everything is checked before anything is applied. The host side comes first, as its errors are the most telling.
        self.backend.check_state(&state.attachment)?;
        self.config.check(&state.config_space)?;
        self.msix.check(&state.msix)?;
        self.registers.check(&state.registers)?;
        self.admin
            .check(&state.admin, self.msix.vectors().len(), &self.facts)?;
        self.check_enabled(state)?;

        let mut moves = self.reset_until(&self.drain_deadline());
        self.pause()?;
        if let Err(error) = self.apply(state, &mut moves) {
            drop(self.reset_until(&self.drain_deadline()));
            self.pending_vectors.clear();
            self.resume();
            return Err(error);
        }
        Ok(moves)
    }

    /// Checks that the saved state has queues only if the controller is enabled.
    fn check_enabled(&self, state: &FunctionSnapshot) -> Result<(), BackendStateError> {
        let queues = state.attachment.queues.len() + usize::from(state.admin.rings.is_some());
        if queues > 0 && !state.registers.is_enabled() {
            let valid = "0, as the controller is disabled";
            return Err(BackendStateError::invalid("queues", queues, valid));
        }
        Ok(())
    }

    fn apply(
        &mut self,
        state: &FunctionSnapshot,
        moves: &mut Vec<BarMove>,
    ) -> Result<(), SnapshotError> {
        let FunctionSnapshot {
            version: _,
            config_space,
            switched_off,
            msix,
            registers,
            admin,
            attachment,
        } = state;
        self.backend.restore(attachment)?;
        self.registers.restore(registers);
        if registers.is_being_disabled() {
            // The commands that the disable waited for do not exist here.
            self.registers.complete_reset();
        }
        let queues = PersistedQueues::from_state(attachment);
        self.admin.restore(admin, queues, &*self.backend, None);
        if self.registers.is_running()
            && let Err(error) = self.backend.watch_admin_doorbells()
            // The host side's next process gets this request on connecting.
            && !self.is_disconnect_error(&error)
        {
            self.fail(&format!("its admin doorbells cannot be watched: {error}"));
        }
        moves.extend(self.config.restore(config_space, *switched_off));
        self.msix.restore(msix);
        self.apply_masks();
        self.pending_vectors.clone_from(&msix.pending);
        // The interrupt for admin completions may have been lost, like those of I/O queues. A superfluous one is harmless.
        if self.admin.has_unconsumed_completions() {
            self.pending_vectors.push(ADMIN_VECTOR);
        }
        Ok(())
    }
}
