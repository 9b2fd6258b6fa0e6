//! The admin queue and its commands (Base 2.0, section 5).
//!
//! Admin commands are carried out one after the other by the thread that calls [`GuestAdminQueue::process_commands`]. This
//! thread is never a poller. Two kinds of commands wait while commands behind them are carried out: Asynchronous Event
//! Requests, and commands that change an I/O queue with commands in flight.

mod abort;
mod admin_rings;
mod async_events;
mod command;
mod data_buffer;
mod doorbell_buffer;
mod error_log;
mod failure;
mod features;
mod health;
mod identify;
mod identify_subject;
mod io_queues;
mod log_pages;
mod state;
mod suspension;

#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::sync::Arc;

use nvme_guest::{
    ControllerBackend, DmaError, DoorbellBuffer, DriveEvent, ErrorEntry, Gpa, IoQueueEvent,
    LeaseFacts, PersistedQueues, SharedBackendParts,
};
use nvme_mpt_memory::deadline::{Deadline, WaitClock};
use nvme_mpt_memory::eventfd;
use nvme_spec::{
    event::{AsyncEvent, SmartEvent},
    feature::FeatureId,
    identify::{Csi, IDENTIFY_SIZE},
    ids::QueueId,
    log::{CriticalWarning, LogPageId, LogPageRequest, ParameterErrorLocation},
    registers::{Cc, CommandSetSelected},
    sqe::Sqe,
    status::Status,
};

use self::{
    admin_rings::{AdminCompletion, GuestAdminRings},
    async_events::AsyncEvents,
    command::AdminCommand,
    data_buffer::DataBuffer,
    error_log::ErrorLog,
    failure::AdminCommandFailure,
    features::{ControllerFeatures, FeatureContext},
    health::GuestDriveHealth,
    identify_subject::IdentifySubject,
    io_queues::IoQueues,
    log_pages::LogPages,
    suspension::{MemorySuspension, SuspensionTime},
};
pub(crate) use self::{health::HEALTH_POLL_INTERVAL, suspension::MEMORY_POLL_INTERVAL};
use crate::{registers::AdminQueues, state::parts::SavedAdminState};

/// Callback that stores the state of the admin queue and the list of existing I/O queues for the successor.
pub(crate) type StoreAdminState<'a> = &'a dyn Fn(SavedAdminState, &PersistedQueues);

/// Parts of the function that an admin command may use.
#[derive(Clone, Copy)]
pub(crate) struct AdminCommandContext<'a> {
    pub(crate) backend: &'a dyn ControllerBackend,
    pub(crate) facts: &'a LeaseFacts,
    pub(crate) shared: &'a SharedBackendParts,
    pub(crate) cc: Cc,
    /// Deadline of this call's waits for I/O commands in flight.
    pub(crate) deadline: &'a Deadline,
    /// Stores the state for the successor. Called before each completion is posted.
    pub(crate) state_store: Option<StoreAdminState<'a>>,
}

/// Admin queue, and the state that admin commands read and change.
#[derive(Debug)]
pub(crate) struct GuestAdminQueue {
    rings: Option<GuestAdminRings>,
    /// State of a wait until the VMM maps memory of the admin queues again.
    suspension: MemorySuspension,
    /// State of a wait until the VMM maps memory that the command in `postponed` names.
    command_suspension: MemorySuspension,
    /// Completions that are not posted yet, in order. Until all are posted, no command is taken, so there are at most as many
    /// completions as one Abort produces.
    unposted: VecDeque<AdminCompletion>,
    /// True after a restore, until the first completion of `unposted` is posted again. The predecessor may have posted it, and
    /// the guest may have consumed it.
    may_be_posted: bool,
    /// Command that is to be carried out again: after the successor of the back end's process has connected, or after the VMM
    /// has mapped memory that the command names.
    postponed: Option<Sqe>,
    features: ControllerFeatures,
    events: AsyncEvents,
    errors: ErrorLog,
    health: GuestDriveHealth,
    /// Critical warnings that are present, and of which the guest was notified.
    reported_warnings: CriticalWarning,
    /// True if the namespace has changed since the guest last read the Changed Namespace List.
    namespace_changed: bool,
    /// I/O queues that the guest has created.
    queues: PersistedQueues,
    commands: u64,
    aborts: u64,
    /// Doorbell Buffer that the present command has set up, until the rings use it.
    new_doorbell_buffer: Option<DoorbellBuffer>,
    clock: Arc<dyn WaitClock>,
    /// Commands that change an I/O queue with commands in flight, in order of arrival. They are carried out once the commands
    /// in flight have ended.
    held_commands: VecDeque<Sqe>,
    /// Events that came along with the errors of commands, until the function takes them.
    deferred_events: Vec<IoQueueEvent>,
}

/// Maximum length of `held_commands`. If it is reached, the next command that would have to be added makes all commands behind
/// it wait.
const HELD_MAX: usize = 64;

/// Outcome of an admin command that has not failed.
enum AdminCommandOutcome {
    /// The command is complete, with this value in dword 0.
    Done(u32),
    /// The command is an Asynchronous Event Request, which waits for an event.
    Waiting,
}

impl GuestAdminQueue {
    pub(crate) fn new(facts: &LeaseFacts, clock: Arc<dyn WaitClock>) -> Self {
        Self {
            rings: None,
            suspension: MemorySuspension::default(),
            command_suspension: MemorySuspension::default(),
            unposted: VecDeque::new(),
            may_be_posted: false,
            postponed: None,
            features: ControllerFeatures::new(&clock),
            events: AsyncEvents::default(),
            errors: ErrorLog::default(),
            health: GuestDriveHealth::new(facts.thresholds, clock.clone()),
            reported_warnings: CriticalWarning::default(),
            namespace_changed: false,
            queues: PersistedQueues::default(),
            commands: 0,
            aborts: 0,
            new_doorbell_buffer: None,
            clock,
            held_commands: VecDeque::new(),
            deferred_events: Vec::new(),
        }
    }

    /// Replaces the clock. The caller does so before the first command.
    pub(crate) fn set_clock(&mut self, clock: Arc<dyn WaitClock>) {
        self.features = ControllerFeatures::new(&clock);
        self.health.set_clock(clock.clone());
        self.clock = clock;
    }

    /// Sets up empty admin queues after the controller was enabled.
    pub(crate) fn enable(&mut self, queues: AdminQueues, host: &dyn ControllerBackend) {
        self.reset();
        host.set_coalescing(self.features.coalescing());
        self.rings = GuestAdminRings::new(queues);
    }

    /// Resets the state of admin commands, in a controller reset. The error log and the counters continue.
    pub(crate) fn reset(&mut self) {
        self.rings = None;
        self.suspension.end();
        self.command_suspension.end();
        self.unposted.clear();
        self.may_be_posted = false;
        self.postponed = None;
        self.features = ControllerFeatures::new(&self.clock);
        self.held_commands.clear();
        self.events = AsyncEvents::default();
        self.reported_warnings = CriticalWarning::default();
        self.namespace_changed = false;
        self.queues = PersistedQueues::default();
    }

    /// Returns whether [`GuestAdminQueue::process_commands`] must be called every [`MEMORY_POLL_INTERVAL`], because a command
    /// or an admin queue waits for unmapped memory.
    pub(crate) fn is_waiting_for_memory(&self) -> bool {
        self.suspension.is_active() || self.command_suspension.is_active()
    }

    /// Returns the I/O queues that the guest has created.
    pub(crate) fn queues(&self) -> &PersistedQueues {
        &self.queues
    }

    /// Records that the lease is revoked, so that all I/O commands fail until the next controller reset.
    pub(crate) fn mark_revoked(&mut self) {
        self.queues.revoked = true;
    }

    /// Returns the number of admin commands that the controller has taken.
    pub(crate) fn commands(&self) -> u64 {
        self.commands
    }

    /// Returns the number of Abort commands that were carried out.
    pub(crate) fn aborts(&self) -> u64 {
        self.aborts
    }

    /// Reads the admin doorbells. Returns whether the caller must read them again soon.
    pub(crate) fn read_doorbells(&mut self, shared: &SharedBackendParts) -> bool {
        let Some(rings) = &mut self.rings else {
            return false;
        };
        // After a restore, the guest's head may be beyond the first completion of `unposted`. Such a head is valid only once
        // this completion is posted again.
        if self.may_be_posted && rings.has_free_slot() {
            return true;
        }
        let poll = rings.read_doorbells(shared);
        if poll.has_invalid_value {
            self.report_invalid_doorbell(AsyncEvent::INVALID_DOORBELL_VALUE);
        }
        poll.needs_another_read
    }

    /// Reports an event to the guest: it has written a doorbell whose queue does not exist.
    pub(crate) fn report_unknown_doorbell(&mut self) {
        self.report_invalid_doorbell(AsyncEvent::INVALID_DOORBELL_REGISTER);
    }

    /// Reports an event of an I/O queue or of the drive to the guest.
    pub(crate) fn report_event(&mut self, event: &IoQueueEvent, host: &dyn ControllerBackend) {
        match event {
            IoQueueEvent::InvalidDoorbell { .. } => {
                self.report_invalid_doorbell(AsyncEvent::INVALID_DOORBELL_VALUE);
            }
            IoQueueEvent::CommandFailed(error) => self.errors.log_command_error(error),
            IoQueueEvent::QueueFailed { .. } => {
                self.errors.log_controller_error(Status::INTERNAL_ERROR)
            }
            IoQueueEvent::Drive(event) => self.report_drive_event(*event, host),
            IoQueueEvent::Changes => self.report_changes(host),
            // The function decides what the guest sees of such an event.
            IoQueueEvent::HostSide(_) => {}
        }
    }

    /// Reports to the guest that the log of changes, which the command set has, has a new entry.
    fn report_changes(&mut self, host: &dyn ControllerBackend) {
        let Some(list) = host.facts().namespace.command_sets.native().change_list else {
            return;
        };
        if self.features.async_events().0 & list.notice.0 != 0 {
            self.events.raise(list.event);
        }
    }

    /// Reports to the guest that the I/O queues are lost, so that it must reset the controller. Other events are reported
    /// afterwards.
    pub(crate) fn report_lost_queues(&mut self) {
        self.errors.log_controller_error(Status::INTERNAL_ERROR);
        self.events
            .raise_first(AsyncEvent::PERSISTENT_INTERNAL_ERROR);
    }

    /// Reports an event of the drive or of its namespaces to the guest.
    fn report_drive_event(&mut self, event: DriveEvent, host: &dyn ControllerBackend) {
        match event {
            DriveEvent::Health => self.read_health(host),
            DriveEvent::NamespaceChanged(_) => self.report_namespace_change(),
            // Each command that the reset interrupted is logged as an error, so the reset itself is not reported.
            DriveEvent::Reset => {}
            // If the namespace becomes inactive, a driver asks for the active namespaces, finds none, and fails its outstanding
            // commands. CSTS.CFS would be worse: drivers notice it only by timeouts, and reset the controller again and again.
            DriveEvent::Gone => {
                self.errors.log_controller_error(Status::INTERNAL_ERROR);
                self.report_namespace_change();
                self.read_health(host);
            }
        }
    }

    fn report_namespace_change(&mut self) {
        self.namespace_changed = true;
        if self.features.async_events().namespace_attribute() {
            self.events.raise(AsyncEvent::NAMESPACE_ATTRIBUTE_CHANGED);
        }
    }

    /// Returns whether the drive's health must be polled, because the guest has enabled events that depend on it.
    pub(crate) fn needs_health_polling(&self, facts: &LeaseFacts) -> bool {
        // Damage is logged even if the guest has not enabled the events.
        let wanted = self.features.async_events().critical_warnings().0 != 0;
        facts.can_be_damaged || (wanted && self.health.can_change())
    }

    /// Polls the drive's health if [`HEALTH_POLL_INTERVAL`] has passed.
    pub(crate) fn poll_health(&mut self, controller: AdminCommandContext<'_>) {
        if self.needs_health_polling(controller.facts) && self.health.is_due() {
            self.read_health(controller.backend);
        }
    }

    fn read_health(&mut self, host: &dyn ControllerBackend) {
        self.health.set_damage(host.check_damage());
        self.health.read(host);
        self.report_health();
    }

    /// Reports critical warnings to the guest that are new, and whose events it has enabled.
    fn report_health(&mut self) {
        let warnings = self.health.warnings(&self.features);
        let wanted = self.features.async_events().critical_warnings();
        let news = CriticalWarning(warnings.0 & !self.reported_warnings.0 & wanted.0);
        self.reported_warnings = CriticalWarning(warnings.0 & wanted.0);
        // The specification groups the warnings in this way (Base 2.0, Figure 147).
        let reliability = news.reliability() || news.read_only() || news.volatile_backup();
        for (is_news, event) in [
            (news.spare(), SmartEvent::SPARE_BELOW_THRESHOLD),
            (news.temperature(), SmartEvent::TEMPERATURE_THRESHOLD),
            (reliability, SmartEvent::SUBSYSTEM_RELIABILITY),
        ] {
            if is_news {
                self.events.raise(AsyncEvent::smart(event));
            }
        }
    }

    /// Completes an Asynchronous Event Request without an event, if one waits. The interrupt handler of a guest whose INTx
    /// level is stuck then finds a completion.
    pub(crate) fn complete_event_request(&mut self) {
        self.unposted.extend(self.events.complete_without_event());
    }

    fn report_invalid_doorbell(&mut self, event: AsyncEvent) {
        // An event is logged only if no equal event waits, so that a guest with a stream of invalid writes does not flood the
        // log.
        if self.events.raise(event) {
            self.errors.log_controller_error(Status::INVALID_FIELD);
        }
    }

    /// Carries out pending commands and posts completions. Returns whether completions were posted.
    ///
    /// # Errors
    /// The memory of an admin queue has been unmapped for too long. The caller must set `CSTS.CFS`.
    pub(crate) fn process_commands(
        &mut self,
        controller: AdminCommandContext<'_>,
    ) -> Result<bool, DmaError> {
        // Taken out of `self`, so that commands can borrow the other fields.
        let Some(mut rings) = self.rings.take() else {
            return Ok(false);
        };
        let mut posted = false;
        // Read the time before the access: when the thread reads it again, the memory may be mapped.
        let before = self.suspension_time(controller);
        let result = self.process_rings(&mut rings, controller, &mut posted);
        self.rings = Some(rings);
        match result {
            Ok(()) => self.suspension.end(),
            Err(error) => {
                let is_gone = matches!(error, DmaError::NotMapped { .. });
                let after = self.suspension_time(controller);
                let SuspensionTime { now, unchanged_for } =
                    self.suspension.failure_time(before, after);
                if !is_gone || self.suspension.has_timed_out(now, unchanged_for) {
                    return Err(error);
                }
            }
        }
        Ok(posted)
    }

    /// Returns whether admin commands wait until I/O commands in flight have ended.
    pub(crate) fn has_held_commands(&self) -> bool {
        !self.held_commands.is_empty()
    }

    /// Carries out commands and posts completions until nothing is left to do. Sets `posted` with the first posted completion.
    /// If the memory of an admin queue cannot be accessed, returns the error, and the next call begins with the queue entry
    /// that failed.
    fn process_rings(
        &mut self,
        rings: &mut GuestAdminRings,
        controller: AdminCommandContext<'_>,
        posted: &mut bool,
    ) -> Result<(), DmaError> {
        let memory = &controller.shared.memory;
        let at_once = AdminCommandContext {
            deadline: &controller.deadline.expired(),
            ..controller
        };
        for _ in 0..self.held_commands.len() {
            if let Some(sqe) = self.held_commands.pop_front() {
                self.carry_out_with_rings(&sqe, rings, at_once);
            }
        }
        if let Some(sqe) = self.postponed.take() {
            self.carry_out_with_rings(&sqe, rings, controller);
        }
        // Reserves a completion queue entry before taking a command that needs it. If the guest frees no entry, only this
        // guest's commands wait. When it writes the head doorbell, this loop runs again.
        while self.postponed.is_none()
            && let Some(credit) = rings.reserve()
        {
            let event = self.unposted.is_empty().then(|| self.events.report_next());
            self.unposted.extend(event.flatten());
            if let Some(completion) = self.unposted.front().copied() {
                if let Some(store) = controller.state_store {
                    // The guest may act on a completion as soon as it is visible. By then, the stored state must show that the
                    // command was carried out. A successor posts the completion once more, which changes nothing.
                    store(self.save_with_rings(Some(rings)), &self.queues);
                }
                rings.post(credit, completion, memory)?;
                self.unposted.pop_front();
                self.may_be_posted = false;
                *posted = true;
            } else if let Some(sqe) = rings.take(credit, memory)? {
                self.commands += 1;
                self.carry_out_with_rings(&sqe, rings, controller);
            } else {
                break;
            }
        }
        Ok(())
    }

    /// Carries out one command as [`Self::carry_out`] does. If the command has set up a Doorbell Buffer, the admin queue uses
    /// it from now on.
    fn carry_out_with_rings(
        &mut self,
        sqe: &Sqe,
        rings: &mut GuestAdminRings,
        controller: AdminCommandContext<'_>,
    ) {
        self.carry_out(sqe, controller);
        // The buffer must be in use before the completion is posted, since the driver may use it afterwards.
        if let Some(buffer) = self.new_doorbell_buffer.take() {
            rings.use_doorbell_buffer(buffer, controller.shared);
        }
    }

    /// Carries out one command and queues its completion. If the back end is disconnected, or the command names unmapped
    /// memory, postpones the command.
    fn carry_out(&mut self, sqe: &Sqe, controller: AdminCommandContext<'_>) {
        let cid = sqe.cid();
        let host = controller.backend;
        let successors = host.successor_count();
        let before = self.suspension_time(controller);
        let completion = match self.execute(sqe, controller) {
            Ok(AdminCommandOutcome::Waiting) => return,
            Ok(AdminCommandOutcome::Done(dw0)) => AdminCompletion {
                cid,
                status: Status::SUCCESS,
                dw0,
            },
            // The next back-end process may already be connected. The event that reports the connection carries out the command
            // again.
            Err(_) if host.is_disconnected() || host.successor_count() != successors => {
                self.postponed = Some(*sqe);
                return;
            }
            // The failed command has changed nothing.
            Err(AdminCommandFailure::NotMapped(_))
                if !self.should_stop_waiting(before, controller) =>
            {
                self.postponed = Some(*sqe);
                return;
            }
            // The command waits for commands in flight on its I/O queue. Commands behind it, such as an Abort, are carried out
            // meanwhile.
            Err(AdminCommandFailure::QueueBusy) if self.held_commands.len() < HELD_MAX => {
                self.held_commands.push_back(*sqe);
                return;
            }
            Err(AdminCommandFailure::QueueBusy) => {
                self.postponed = Some(*sqe);
                return;
            }
            Err(failure) => {
                let status = failure.status();
                self.errors.log_command_error(&ErrorEntry {
                    sqid: QueueId::ADMIN,
                    cid,
                    status,
                    lba: 0,
                    nsid: sqe.nsid,
                    parameter_location: ParameterErrorLocation::NONE.0,
                });
                AdminCompletion {
                    cid,
                    status,
                    dw0: 0,
                }
            }
        };
        self.command_suspension.end();
        self.unposted.push_back(completion);
    }

    /// Returns the present time, with the time since the last change of the VM's memory mappings.
    fn suspension_time(&self, controller: AdminCommandContext<'_>) -> SuspensionTime {
        SuspensionTime {
            now: self.clock.now(),
            unchanged_for: controller.shared.memory.time_since_change(),
        }
    }

    /// Returns whether the wait for memory that a command names has taken too long. The command's access to it has failed after
    /// `before`.
    fn should_stop_waiting(
        &mut self,
        before: SuspensionTime,
        controller: AdminCommandContext<'_>,
    ) -> bool {
        let after = self.suspension_time(controller);
        let SuspensionTime { now, unchanged_for } =
            self.command_suspension.failure_time(before, after);
        self.command_suspension
            .has_timed_out_for_command(now, unchanged_for)
    }

    fn execute(
        &mut self,
        sqe: &Sqe,
        controller: AdminCommandContext<'_>,
    ) -> Result<AdminCommandOutcome, AdminCommandFailure> {
        let memory = &controller.shared.memory;
        let mut dw0 = 0;
        match AdminCommand::parse(sqe)? {
            AdminCommand::Identify(command) => {
                let structure = self
                    .identify_subject(controller)
                    .identify(command, sqe.nsid)?;
                DataBuffer::new(memory, sqe, IDENTIFY_SIZE as u64).write(&structure)?;
            }
            AdminCommand::GetLogPage(request) => {
                self.get_log_page(&request, sqe, controller)?;
            }
            AdminCommand::GetFeatures(command) => {
                let context = self.feature_context(controller);
                let dword11 = command.dword11;
                let value =
                    self.features
                        .get(command.fid, command.sel, dword11, sqe.nsid, &context)?;
                DataBuffer::new(memory, sqe, value.data.len() as u64).write(&value.data)?;
                dw0 = value.dw0;
            }
            AdminCommand::SetFeatures(command) => {
                let context = self.feature_context(controller);
                features::check_set(command.fid, command.sv, sqe.nsid, &context)?;
                let mut data = vec![0; ControllerFeatures::data_length(command.fid)];
                DataBuffer::new(memory, sqe, data.len() as u64).read(&mut data)?;
                dw0 = self
                    .features
                    .set(command.fid, command.dword11, &data, &context)?;
                self.apply_feature(command.fid, controller);
            }
            AdminCommand::CreateIoCq(command) => {
                let base = Gpa(sqe.prp1());
                let created = self.io_queues(controller).create_cq(command, base)?;
                self.queues.cqs.push(created);
            }
            AdminCommand::CreateIoSq(command) => {
                let base = Gpa(sqe.prp1());
                let created = self.io_queues(controller).create_sq(command, base)?;
                self.queues.sqs.push(created);
            }
            AdminCommand::DeleteIoCq(command) => {
                self.io_queues(controller).delete_cq(command)?;
                self.queues.delete_cq(command.qid);
            }
            AdminCommand::DeleteIoSq(command) => {
                self.io_queues(controller).delete_sq(command)?;
                self.queues.delete_sq(command.qid);
            }
            AdminCommand::Abort(command) => {
                self.aborts += 1;
                let (aborted, not_aborted) = abort::abort(command, &mut self.events);
                self.unposted.extend(aborted);
                dw0 = not_aborted;
            }
            AdminCommand::AsyncEventRequest => {
                self.events.add_request(sqe.cid())?;
                return Ok(AdminCommandOutcome::Waiting);
            }
            AdminCommand::DoorbellBufferConfig => {
                let buffer = doorbell_buffer::configure(controller, sqe)?;
                self.new_doorbell_buffer = Some(buffer);
                self.queues.doorbell_buffer = Some(buffer);
            }
        }
        Ok(AdminCommandOutcome::Done(dw0))
    }

    fn get_log_page(
        &mut self,
        request: &LogPageRequest,
        sqe: &Sqe,
        controller: AdminCommandContext<'_>,
    ) -> Result<(), AdminCommandFailure> {
        let AdminCommandContext {
            backend: host,
            facts,
            shared,
            ..
        } = controller;
        if matches!(
            request.lid,
            LogPageId::ERROR_INFORMATION | LogPageId::SMART_HEALTH
        ) {
            self.collect_errors(controller);
        }
        if request.lid == LogPageId::SMART_HEALTH {
            self.health.set_damage(host.check_damage());
            self.health.refresh(host);
            self.report_health();
        }
        let list = facts.namespace.command_sets.native().change_list;
        let list = list.filter(|list| list.lid == request.lid);
        let changes = list.and_then(|_| host.changes());
        let pages = LogPages {
            subject: self.identify_subject(controller),
            features: &self.features,
            context: self.feature_context(controller),
            errors: &self.errors,
            counters: host.counters(),
            health: &self.health,
            namespace_changed: self.namespace_changed,
            changes: changes.as_ref(),
        };
        let part = pages.read(request, sqe.nsid)?;
        DataBuffer::new(&shared.memory, sqe, request.length()).write(&part)?;
        if request.rae {
            return Ok(());
        }
        if let Some(event_type) = log_pages::unmasked_event_type(request.lid) {
            self.events.unmask(event_type);
        }
        if request.lid == LogPageId::CHANGED_NAMESPACE_LIST {
            self.namespace_changed = false;
        }
        if let (Some(list), Some(changes_reported)) = (list, &changes) {
            self.events.unmask(list.event.event_type());
            host.remove_changes(changes_reported);
        }
        Ok(())
    }

    /// Adds the errors that I/O queues have reported to the error log. A guest that reads the log after the failed completion
    /// of a command must find the error there.
    fn collect_errors(&mut self, controller: AdminCommandContext<'_>) {
        for event in controller.backend.take_events() {
            match event {
                IoQueueEvent::CommandFailed(error) => self.errors.log_command_error(&error),
                other => self.deferred_events.push(other),
            }
        }
        // Taking the events also consumed the signal of an admin doorbell, so signal again. The call fails only if the counter
        // is full, which wakes the reader as well.
        let _ = eventfd::signal(&controller.shared.events);
    }

    /// Takes the events that [`Self::collect_errors`] has found and that the function must handle.
    pub(crate) fn take_deferred_events(&mut self) -> Vec<IoQueueEvent> {
        std::mem::take(&mut self.deferred_events)
    }

    /// Puts the new value of a feature into effect.
    fn apply_feature(&mut self, fid: FeatureId, controller: AdminCommandContext<'_>) {
        match fid {
            FeatureId::INTERRUPT_COALESCING | FeatureId::INTERRUPT_VECTOR_CONFIGURATION => {
                controller
                    .backend
                    .set_coalescing(self.features.coalescing());
            }
            // A warning that is present is reported again when the host enables it again.
            FeatureId::TEMPERATURE_THRESHOLD | FeatureId::ASYNC_EVENT_CONFIGURATION => {
                self.reported_warnings = match fid {
                    FeatureId::TEMPERATURE_THRESHOLD => {
                        self.reported_warnings.with_temperature(false)
                    }
                    _ => CriticalWarning::default(),
                };
                self.health.set_damage(controller.backend.check_damage());
                self.health.refresh(controller.backend);
                self.report_health();
            }
            _ => {}
        }
    }

    fn feature_context<'a>(&self, controller: AdminCommandContext<'a>) -> FeatureContext<'a> {
        let facts = controller.facts;
        FeatureContext {
            namespace: &facts.namespace,
            blocks: controller.backend.status().blocks,
            volatile_write_cache: facts.limits.volatile_write_cache,
            queue_pairs_max: facts.queue_pairs,
            default_threshold: self.health.default_threshold(),
            vectors: controller.shared.vectors.len(),
            io_queues_exist: !self.queues.cqs.is_empty(),
        }
    }

    fn io_queues<'a>(&self, controller: AdminCommandContext<'a>) -> IoQueues<'a> {
        IoQueues {
            controller,
            allocated: self
                .features
                .allocated_queues(&self.feature_context(controller)),
        }
    }

    fn identify_subject<'a>(&self, controller: AdminCommandContext<'a>) -> IdentifySubject<'a> {
        let AdminCommandContext {
            backend: host,
            facts,
            cc,
            ..
        } = controller;
        let status = host.status();
        // A namespace whose command set is disabled is inactive (Base 2.0, section 3.1.3.5).
        let is_basic = facts.namespace.command_sets.native().csi == Csi::NVM;
        let enabled = is_basic || cc.css() == CommandSetSelected::ALL;
        IdentifySubject {
            namespace: &facts.namespace,
            blocks: status.blocks,
            used_bytes: status.used,
            limits: &facts.limits,
            has_doorbell_buffer: doorbell_buffer::is_supported(facts),
            is_active: enabled && status.is_backed,
            thresholds: self.health.thresholds(),
            unit_blocks: facts.unit_blocks,
        }
    }
}
