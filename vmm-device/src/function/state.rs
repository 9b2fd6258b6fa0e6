//! Pausing a function, taking a snapshot of it, and restoring one.

use std::{io, time::Duration};

use nvme_mpt::{KeptQueues, QueueError, StateError, deadline::DRAIN_DEADLINE};

use super::{ADMIN_VECTOR, NvmeFunction};
use crate::{
    pci::config_space::BarMove,
    state::{FunctionState, SnapshotError, VERSION},
};

impl NvmeFunction {
    /// Stops taking commands, of I/O queues and of the admin queue, and waits for those in flight.
    /// When it returns, nothing touches the guest's memory until it goes on. Accesses are answered
    /// as ever; commands that they announce wait.
    ///
    /// # Errors
    /// [`QueueError::Timeout`] if commands are in flight after 30 seconds. The function then continues as before.
    pub fn pause(&mut self) -> Result<(), QueueError> {
        self.pause_within(DRAIN_DEADLINE)
    }

    /// As [`Self::pause`], with a wait of at most `time`.
    ///
    /// # Errors
    /// As [`Self::pause`].
    pub fn pause_within(&mut self, time: Duration) -> Result<(), QueueError> {
        let paused = match self.rest_waits {
            // Its queues stay stopped whatever becomes of this.
            true => self.host.pause_within(time),
            false if time == DRAIN_DEADLINE => self.host.pause(),
            false => self
                .host
                .pause_within(time)
                .inspect_err(|_| self.host.resume()),
        };
        if paused.is_ok() {
            (self.paused, self.rests, self.rest_waits) = (true, true, false);
        }
        // Events that the queues reported on their way to rest are a part of the saved state.
        self.take_events();
        paused
    }

    /// Goes on where it was when it was paused, or saved.
    pub fn resume(&mut self) {
        self.paused = false;
        // Unless its guest does not let it master the bus: then it goes on when that changes.
        self.follow_bus_master();
    }

    /// Returns whether it is paused.
    #[must_use]
    pub fn is_paused(&self) -> bool {
        self.paused
    }

    /// Saves the function, while it is paused.
    ///
    /// # Errors
    /// [`StateError::NotPaused`]; [`StateError::Unreachable`] while the function waits for its host side.
    pub fn save(&self) -> Result<FunctionState, StateError> {
        if self.waiting.is_some() {
            let text = "the guest enables its controller or shuts it down, which waits for the host side: save it again \
                        later";
            let source = io::Error::new(io::ErrorKind::NotConnected, text);
            return Err(StateError::Unreachable { source });
        }
        let mut msix = self.msix.save();
        // Those of a function that was restored and did not go on yet are owed still.
        msix.pending.extend(&self.owed);
        msix.pending.sort_unstable();
        msix.pending.dedup();
        Ok(FunctionState {
            version: VERSION,
            config_space: self.config.save(),
            switched_off: self.config.is_switched_off(),
            msix,
            registers: self.registers.save(),
            admin: self.admin.save(),
            attachment: self.host.save()?,
        })
    }

    /// Becomes the function that was saved, in this process or another one: on an equal lease, with
    /// the guest's memory mapped. It is paused until it is resumed, and has raised no vector until
    /// then. Returns the BARs that moved.
    ///
    /// # Errors
    /// All of [`SnapshotError`] but those of bytes; then it is as after power-on, and not paused.
    pub fn restore(&mut self, state: &FunctionState) -> Result<Vec<BarMove>, SnapshotError> {
        state.check_version()?;
        // Before anything is made of any of it, and what says most about it first.
        self.host.check(&state.attachment)?;
        self.config.check(&state.config_space)?;
        self.msix.check(&state.msix)?;
        self.registers.check(&state.registers)?;
        self.admin
            .check(&state.admin, self.msix.vectors().len(), &self.facts)?;
        self.check_enabled(state)?;

        let mut moves = self.reset_by(&self.deadline());
        self.pause()?;
        if let Err(error) = self.apply(state, &mut moves) {
            drop(self.reset_by(&self.deadline()));
            self.owed.clear();
            self.resume();
            return Err(error);
        }
        Ok(moves)
    }

    /// Queues belong to a controller that is enabled.
    fn check_enabled(&self, state: &FunctionState) -> Result<(), StateError> {
        let queues = state.attachment.queues.len() + usize::from(state.admin.rings.is_some());
        if queues > 0 && !state.registers.is_enabled() {
            let valid = "0, as the controller is disabled";
            return Err(StateError::invalid("queues", queues, valid));
        }
        Ok(())
    }

    fn apply(
        &mut self,
        state: &FunctionState,
        moves: &mut Vec<BarMove>,
    ) -> Result<(), SnapshotError> {
        let FunctionState {
            version: _,
            config_space,
            switched_off,
            msix,
            registers,
            admin,
            attachment,
        } = state;
        self.host.restore(attachment)?;
        self.registers.restore(registers);
        if registers.is_being_disabled() {
            // The commands that the disable waited for are not here.
            self.registers.disabled();
        }
        let queues = KeptQueues::of(attachment);
        self.admin.restore(admin, queues, &*self.host, None);
        if self.registers.is_running()
            && let Err(error) = self.host.watch_admin_doorbells()
            // The next one is told that they are watched.
            && !self.is_waited_for(&error)
        {
            self.fail(&format!("its admin doorbells cannot be watched: {error}"));
        }
        moves.extend(self.config.restore(config_space, *switched_off));
        self.msix.restore(msix);
        self.apply_masks();
        self.owed.clone_from(&msix.pending);
        // The interrupt that told of admin completions may have been lost on the way, as those of
        // I/O queues. One too many harms nobody.
        if self.admin.has_unconsumed() {
            self.owed.push(ADMIN_VECTOR);
        }
        Ok(())
    }
}
