//! Save and restore of the admin queue and of the state that admin commands change.

use std::time::Duration;

use nvme_guest::{BackendStateError, ControllerBackend, LeaseFacts, PersistedQueues};
use nvme_spec::{ids::CommandId, log::CriticalWarning, status::Status};
use zerocopy::transmute;

use super::{
    AdminCompletion, AsyncEvents, ControllerFeatures, ErrorLog, GuestAdminQueue, GuestAdminRings,
    HELD_MAX, async_events,
};
use crate::state::parts::{CompletionState, SavedAdminState};

/// Maximum number of completions that are not posted: one of an Abort, and one of each event request.
const UNPOSTED_MAX: usize = async_events::LIMIT_Z as usize + 2;

impl GuestAdminQueue {
    pub(crate) fn save(&self) -> SavedAdminState {
        self.save_with_rings(self.rings.as_ref())
    }

    /// Saves the state, with the queue pair `rings`: a call of `process_commands` has taken it out of `self`.
    pub(super) fn save_with_rings(&self, rings: Option<&GuestAdminRings>) -> SavedAdminState {
        let Self {
            rings: _,
            // The successor starts its waits anew.
            suspension: _,
            command_suspension: _,
            unposted,
            // The restore sets this.
            may_be_posted: _,
            postponed,
            features,
            events,
            errors,
            // The health itself is read from the drive again, only the powered time is saved.
            health,
            reported_warnings: warned,
            namespace_changed,
            // Saved with the back end's queues.
            queues: _,
            commands,
            aborts,
            // Set only while a command is carried out.
            new_doorbell_buffer: _,
            clock: _,
            held_commands: held,
            // Empty, since the function takes the events before it saves the state.
            deferred_events: _,
        } = self;
        SavedAdminState {
            rings: rings.map(GuestAdminRings::save),
            unposted: unposted.iter().map(save_completion).collect(),
            postponed: postponed.map(|sqe| transmute!(sqe)),
            held: held.iter().map(|sqe| transmute!(*sqe)).collect(),
            features: features.save(),
            events: events.save(),
            errors: errors.save(),
            warned: warned.0,
            namespace_changed: *namespace_changed,
            commands: *commands,
            aborts: *aborts,
            powered_seconds: health.powered_time().as_secs(),
        }
    }

    pub(crate) fn check(
        &self,
        state: &SavedAdminState,
        vectors: usize,
        facts: &LeaseFacts,
    ) -> Result<(), BackendStateError> {
        let SavedAdminState {
            rings,
            unposted,
            // Checked when the command is carried out, like any command.
            postponed: _,
            held,
            features,
            events,
            errors,
            warned: _,
            namespace_changed: _,
            commands: _,
            aborts: _,
            powered_seconds: _,
        } = state;
        if let Some(rings) = rings {
            GuestAdminRings::check(rings)?;
        }
        if unposted.len() > UNPOSTED_MAX {
            let valid = format!("at most {UNPOSTED_MAX}");
            return Err(BackendStateError::invalid(
                "admin completions that wait",
                unposted.len(),
                valid,
            ));
        }
        if held.len() > HELD_MAX {
            let valid = format!("at most {HELD_MAX}");
            return Err(BackendStateError::invalid(
                "admin commands that wait",
                held.len(),
                valid,
            ));
        }
        ControllerFeatures::check(features, vectors, facts)?;
        AsyncEvents::check(events)?;
        ErrorLog::check(errors)
    }

    /// Restores a checked state, for a back end with the queues `queues`. `since` is the time since the save; `None` for a
    /// snapshot, after which the controller's clock continues from the time of the save.
    pub(crate) fn restore(
        &mut self,
        state: &SavedAdminState,
        queues: PersistedQueues,
        host: &dyn ControllerBackend,
        since: Option<Duration>,
    ) {
        let SavedAdminState {
            rings,
            unposted,
            postponed,
            held,
            features,
            events,
            errors,
            warned,
            namespace_changed,
            commands,
            aborts,
            powered_seconds,
        } = state;
        let buffer = queues.doorbell_buffer;
        self.rings = rings
            .as_ref()
            .and_then(|rings| GuestAdminRings::from_state(rings, buffer));
        self.unposted = unposted.iter().map(completion_from_state).collect();
        self.may_be_posted = !self.unposted.is_empty();
        self.postponed = postponed.map(|words| transmute!(words));
        self.held_commands = held.iter().map(|words| transmute!(*words)).collect();
        self.features = ControllerFeatures::from_state(features, &self.clock, since);
        let powered = Duration::from_secs(*powered_seconds);
        self.health
            .set_powered_time(powered.saturating_add(since.unwrap_or_default()));
        self.events = AsyncEvents::from_state(events);
        self.errors = ErrorLog::from_state(errors);
        self.reported_warnings = CriticalWarning(*warned);
        self.namespace_changed = *namespace_changed;
        self.queues = queues;
        self.commands = *commands;
        self.aborts = *aborts;
        host.set_coalescing(self.features.coalescing());
    }

    /// Returns whether the admin Completion Queue has completions that the guest has not consumed.
    pub(crate) fn has_unconsumed_completions(&self) -> bool {
        self.rings
            .as_ref()
            .is_some_and(GuestAdminRings::has_unconsumed_completions)
    }
}

fn save_completion(completion: &AdminCompletion) -> CompletionState {
    let AdminCompletion { cid, status, dw0 } = *completion;
    CompletionState {
        cid: cid.0,
        status: status.0,
        dw0,
    }
}

fn completion_from_state(state: &CompletionState) -> AdminCompletion {
    let CompletionState { cid, status, dw0 } = *state;
    AdminCompletion {
        cid: CommandId(cid),
        status: Status(status),
        dw0,
    }
}
