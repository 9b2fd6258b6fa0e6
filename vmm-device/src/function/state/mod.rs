//! Pause, saved state and restore of a function.
//!
//! The state of a paused function is whole. The state of a running function is stored while it runs, without the state of its
//! I/O queues, which the in-flight tracking ([`nvme_guest::inflight`]) has. The owner of the function stores it after each
//! access and each call of `process_events` ([`NvmeFunction::running_state`]). In two cases, the function itself stores it
//! earlier, through its [`FunctionStateStore`]:
//!
//! 1. Before an admin completion is posted. After the completion is posted, the guest may act on the command's result. So the
//!    successor must not carry out the command again. It only posts the same completion once more.
//! 2. Before queues are reset: without the queues, and with the registers from before the access. Otherwise, the successor
//!    would restore queues whose doorbells the reset has already set to zero, and would carry out their entries again.
//!
//! Everything else may happen twice. So the successor carries out an incomplete access or admin command again, from the state
//! before it.

#[cfg(test)]
pub(super) mod tests;

use std::{fmt, io, time::Duration};

use nvme_guest::{
    BackendStateError, DriveEvent, IoQueueEvent, LeaseFacts, PersistedQueues, QueueError,
    backend::LeasedNamespace,
};
use nvme_mpt_memory::{
    deadline::DRAIN_DEADLINE,
    eventfd,
    system::{self, is_exhaustion},
};

use super::{ADMIN_VECTOR, NvmeFunction};
use crate::{
    pci::{
        config_space::{BarMove, ConfigSpace},
        msix::MsixTable,
    },
    registers::{ControllerCapabilities, ControllerProperties, ControllerTransition},
    state::{
        FunctionState, FunctionStateError, IoQueuesState, VERSION,
        parts::{ResetStats, SavedAdminState},
    },
};

/// A store for the state of a running function, which outlives the process.
pub trait FunctionStateStore: fmt::Debug + Send {
    /// Replaces the stored state. When this returns, the state survives the end of the process.
    fn store(&self, state: FunctionState);
}

/// Parts of a function that are saved in its state, except for the admin queue.
#[derive(Clone, Copy)]
pub(super) struct SavedParts<'a> {
    pub(super) facts: &'a LeaseFacts,
    pub(super) config: &'a ConfigSpace,
    pub(super) msix: &'a MsixTable,
    pub(super) registers: &'a ControllerProperties,
    pub(super) resets: ResetStats,
}

impl SavedParts<'_> {
    fn to_state(self, admin: SavedAdminState, queues: IoQueuesState) -> FunctionState {
        FunctionState {
            version: VERSION,
            facts: self.facts.clone(),
            config_space: self.config.save(),
            switched_off: self.config.is_command_cleared(),
            msix: self.msix.save(),
            registers: self.registers.save(),
            admin,
            resets: self.resets,
            stored_at: None,
            queues,
        }
    }

    /// Returns the state of a running function, with the given states of its admin queue and of its I/O queues.
    pub(super) fn to_running_state(
        self,
        admin: SavedAdminState,
        queues: PersistedQueues,
    ) -> FunctionState {
        FunctionState {
            stored_at: Some(system::host_time()),
            ..self.to_state(admin, IoQueuesState::InFlight(queues))
        }
    }
}

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

    /// Continues after a pause, or after a restore.
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
    /// [`BackendStateError::NotPaused`]; [`BackendStateError::Unreachable`] while the back end's process is away, or while a
    /// transition has yet to end queues.
    pub fn save(&self) -> Result<FunctionState, BackendStateError> {
        let queues = self.backend.save()?;
        // The registers show a transition that is not complete, so the restored function continues it. But it would not end
        // queues of the controller's previous state.
        if self.pending_transition.is_some() && !queues.queues.is_empty() {
            let text = "the guest disables its controller or shuts it down, which waits for the drive: save it again later";
            let source = io::Error::new(io::ErrorKind::NotConnected, text);
            return Err(BackendStateError::Unreachable { source });
        }
        let queues = IoQueuesState::Paused(queues);
        let mut state = self.saved_parts().to_state(self.admin.save(), queues);
        // A restored function that was not resumed yet still has to raise these vectors.
        let pending = &mut state.msix.pending;
        pending.extend(&self.pending_vectors);
        pending.sort_unstable();
        pending.dedup();
        Ok(state)
    }

    /// Returns the state of the running function, for its successor.
    #[must_use]
    pub fn running_state(&self) -> FunctionState {
        let parts = SavedParts {
            registers: self
                .registers_before_access
                .as_ref()
                .unwrap_or(&self.registers),
            ..self.saved_parts()
        };
        parts.to_running_state(self.admin.save(), self.admin.queues().clone())
    }

    fn saved_parts(&self) -> SavedParts<'_> {
        SavedParts {
            facts: &self.facts,
            config: &self.config,
            msix: &self.msix,
            registers: &self.registers,
            resets: self.resets,
        }
    }

    /// Sets the `supervisor`, in which the function stores its state during accesses and in `process_events`.
    pub fn set_state_store(&mut self, supervisor: Box<dyn FunctionStateStore>) {
        self.state_store = Some(supervisor);
    }

    /// Returns whether the state may have changed since the last call of this method.
    pub fn take_changed_flag(&mut self) -> bool {
        std::mem::take(&mut self.may_have_changed)
    }

    /// Stores the state, if the function has a store for it.
    pub(super) fn store_running_state(&self) {
        if let Some(supervisor) = &self.state_store {
            supervisor.store(self.running_state());
        }
    }

    /// Restores the untrusted state of a paused function, in this process or another one. The lease must keep what the guest
    /// was told, and the guest's memory must be mapped. Afterwards, the function is paused, and raises no vector until it is
    /// resumed. Returns the BARs that moved.
    ///
    /// # Errors
    /// All of [`FunctionStateError`] except those about bytes. If a check of the state fails, the function is unchanged. After
    /// any other error, it is in its power-on state, and not paused.
    pub fn restore(&mut self, state: &FunctionState) -> Result<Vec<BarMove>, FunctionStateError> {
        let IoQueuesState::Paused(queues) = &state.queues else {
            return Err(FunctionStateError::Running);
        };
        let facts = self.check(state)?;
        let mut bar_moves = self.reset_until(&self.drain_deadline());
        self.pause()?;
        let before = (self.facts.clone(), self.resets);
        bar_moves.extend(self.apply(state, facts));
        if let Err(error) = self.backend.restore(queues) {
            (self.facts, self.resets) = before;
            drop(self.reset_until(&self.drain_deadline()));
            self.pending_vectors.clear();
            self.resume();
            return Err(error.into());
        }
        self.pending_vectors.clone_from(&state.msix.pending);
        // The interrupt for admin completions may have been lost, like those of I/O queues. A superfluous one is harmless.
        if self.admin.has_unconsumed_completions() {
            self.pending_vectors.push(ADMIN_VECTOR);
        }
        Ok(bar_moves)
    }

    /// Restores the untrusted state of a running function whose process ended. The function must be in its power-on state, and
    /// have the files of that process: its doorbells and its in-flight tracking. The guest's memory must be mapped. Returns the
    /// BARs that moved.
    ///
    /// The function runs afterwards. Commands in flight are carried out again, or end with Command Interrupted. If the queues
    /// cannot be restored, the controller fails (`CSTS.CFS`) and the guest's driver resets it. But if the cause is that the
    /// host lacks memory, descriptors or threads, this returns an error. Each vector is raised once, because the predecessor
    /// may have ended before it raised the vector.
    ///
    /// # Errors
    /// All of [`FunctionStateError`] except those about bytes. If a check of the state fails, the function is unchanged. After
    /// any other error, the guest is unaffected, and another function can restore the state later.
    pub fn restore_running(
        &mut self,
        state: &FunctionState,
    ) -> Result<Vec<BarMove>, FunctionStateError> {
        let IoQueuesState::InFlight(queues) = &state.queues else {
            return Err(FunctionStateError::Paused);
        };
        let facts = self.check(state)?;
        let bar_moves = self.apply(state, facts);
        if let Err(error) = self.backend.restore_running(queues) {
            if is_exhaustion(&error) {
                return Err(error.into());
            }
            log::error!("Cannot restore the queues of the previous process: {error}");
            self.admin.report_lost_queues();
            self.process_admin_commands();
            self.fail("the process that had its queues ended");
        }
        for vector in self.msix.vectors() {
            // Owners of queues signal the pin if their guest has left entries. A level without an entry would stay high.
            if !vector.is_pin() || self.admin.has_unconsumed_completions() {
                vector.signal();
            }
        }
        // Admin commands may be waiting whose doorbell was written before. A full counter wakes as well.
        let _ = eventfd::signal(self.events_fd());
        Ok(bar_moves)
    }

    /// Quarantines the function of a process that ended: restores its registers without its queues and commands, and fails the
    /// controller for good.
    ///
    /// The guest sees `CSTS.CFS` and cannot enable the controller again. A disable or a shutdown completes immediately. The
    /// function neither accesses guest memory nor sends interrupts. This function must be in the power-on state, and the saved
    /// state is untrusted.
    ///
    /// # Errors
    /// See [`FunctionStateError`]. After an error, the function is unchanged.
    pub fn quarantine(&mut self, state: &FunctionState) -> Result<(), FunctionStateError> {
        self.facts = self.check_registers(state)?;
        self.registers.restore(&state.registers);
        // The client keeps the BARs where they are.
        drop(self.config.restore(&state.config_space, state.switched_off));
        self.is_quarantined = true;
        self.registers.fail();
        Ok(())
    }

    /// Checks all of a state that can be checked before any of it is applied. Returns the facts of the restored function.
    fn check(&self, state: &FunctionState) -> Result<LeaseFacts, FunctionStateError> {
        let facts = self.check_registers(state)?;
        let queues = match &state.queues {
            IoQueuesState::Paused(queues) => {
                self.backend.check_state(queues)?;
                queues.queues.len()
            }
            // The back end checks them with the in-flight tracking.
            IoQueuesState::InFlight(queues) => queues.cqs.len(),
        };
        self.msix.check(&state.msix)?;
        let vectors = self.msix.vectors().len();
        self.admin.check(&state.admin, vectors, &facts)?;
        let queues = queues + usize::from(state.admin.rings.is_some());
        if queues > 0 && !state.registers.is_ready() {
            let valid = "0, as the controller is not enabled and ready";
            return Err(BackendStateError::invalid("queues", queues, valid).into());
        }
        Ok(facts)
    }

    /// Checks the version, the facts, configuration space and the registers of a state. Returns the facts of the restored
    /// function: those that the guest was told, and the present values of those that it does not see.
    fn check_registers(&self, state: &FunctionState) -> Result<LeaseFacts, FunctionStateError> {
        state.check_version()?;
        let present = self.present_facts();
        present.check_promises(&state.facts)?;
        if let IoQueuesState::InFlight(_) = state.queues {
            present.check_continuation(&state.facts)?;
        }
        let facts = LeaseFacts {
            doorbells: present.doorbells,
            is_private: present.is_private,
            parks: present.parks,
            can_be_damaged: present.can_be_damaged,
            policies: present.policies,
            ..state.facts.clone()
        };
        self.config.check(&state.config_space)?;
        let properties = ControllerProperties::new(ControllerCapabilities {
            queue_entries_max: facts.limits.entries_max,
            dstrd: self.shared.doorbells.dstrd(),
        });
        properties.check(&state.registers)?;
        Ok(facts)
    }

    /// Applies a checked state, without the queues of the back end. Returns the BARs that have moved.
    fn apply(&mut self, state: &FunctionState, facts: LeaseFacts) -> Vec<BarMove> {
        let FunctionState {
            version: _,
            facts: _,
            config_space,
            switched_off,
            msix,
            registers,
            admin,
            resets,
            stored_at,
            queues,
        } = state;
        self.may_have_changed = true;
        self.registers.restore(registers);
        if registers.is_being_disabled() {
            // The commands that the disable waited for do not exist here.
            self.registers.complete_reset();
        }
        self.pending_transition = self.registers.incomplete_transition();
        self.resets = *resets;
        let since = stored_at.map(|at| system::host_time().saturating_sub(at));
        self.admin
            .restore(admin, queues.to_created(), &*self.backend, since);
        self.adopt_facts(facts);
        let bar_moves = self.config.restore(config_space, *switched_off);
        self.msix.restore(msix);
        // Without Bus Master Enable, the queues are paused before they are created.
        self.apply_bus_master();
        if self.registers.is_running()
            && let Err(error) = self.backend.watch_admin_doorbells()
            // The successor of the back end's process gets this request when it connects.
            && !self.is_disconnect_error(&error)
        {
            self.fail(&format!("its admin doorbells cannot be watched: {error}"));
        }
        bar_moves
    }

    /// Adopts the facts of a restored function, and reports to the guest if its lease has grown since the save.
    fn adopt_facts(&mut self, facts: LeaseFacts) {
        let reported_blocks = facts.namespace.blocks;
        self.facts = facts;
        self.record_growth();
        let LeasedNamespace { nsid, blocks, .. } = self.facts.namespace;
        if reported_blocks < blocks {
            let changed = IoQueueEvent::Drive(DriveEvent::NamespaceChanged(nsid));
            self.admin.report_event(&changed, &*self.backend);
        }
    }

    /// Completes the transition that a register write has requested of a quarantined function, whose controller stays failed.
    pub(super) fn complete_quarantined_transition(
        &mut self,
        transition: Option<ControllerTransition>,
    ) {
        match transition {
            Some(ControllerTransition::Disable) => self.registers.complete_reset(),
            Some(ControllerTransition::Shutdown(_)) => self.registers.complete_shutdown(),
            Some(ControllerTransition::Enable(_)) | None => {}
        }
        self.registers.fail();
    }
}
