//! The admin queue and the commands in it (Base 2.0, section 5).
//!
//! One command after the other is taken, carried out and completed, on the thread that calls
//! [`Admin::run`] and never on a poller. Requests for asynchronous events wait, and so do commands that change an I/O queue
//! which has commands in flight.

mod abort;
mod async_events;
mod command;
mod data;
mod doorbell_buffer;
mod error_log;
mod failure;
mod features;
mod health;
mod identify;
mod io_queues;
mod log_pages;
mod ring;
mod state;
mod subject;
mod suspension;

#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::sync::Arc;

use nvme_mpt::{
    DmaError, DoorbellBuffer, DriveEvent, ErrorEntry, Event, Gpa, HostSide, KeptQueues, LeaseFacts,
    SharedParts,
    deadline::{Deadline, WaitClock},
    memory::eventfd,
    spec::{
        event::{AsyncEvent, SmartEvent},
        feature::FeatureId,
        identify::{Csi, IDENTIFY_SIZE},
        ids::QueueId,
        log::{CriticalWarning, LogPageId, LogPageRequest, ParameterErrorLocation},
        registers::{Cc, CommandSetSelected},
        sqe::Sqe,
        status::Status,
    },
};

use self::{
    async_events::AsyncEvents,
    command::AdminCommand,
    data::DataBuffer,
    error_log::ErrorLog,
    failure::Failure,
    features::{FeatureContext, Features},
    health::Health,
    io_queues::IoQueues,
    log_pages::LogPages,
    ring::{AdminRings, Completion},
    subject::Subject,
    suspension::{Moment, Suspension},
};
pub(crate) use self::{health::WATCH_INTERVAL, suspension::LOOK_INTERVAL};
use crate::{registers::AdminQueues, state::parts::AdminState};

/// Store of the state of the admin queue, with the I/O queues that there are.
pub(crate) type Keep<'a> = &'a dyn Fn(AdminState, &KeptQueues);

/// Parts that admin commands act upon, apart from the state that they keep here.
#[derive(Clone, Copy)]
pub(crate) struct Controller<'a> {
    pub(crate) host: &'a dyn HostSide,
    pub(crate) facts: &'a LeaseFacts,
    pub(crate) shared: &'a SharedParts,
    pub(crate) cc: Cc,
    /// End of all waits for commands in flight.
    pub(crate) deadline: &'a Deadline,
    /// Stores the state before each completion is posted, for the process after this one.
    pub(crate) keep: Option<Keep<'a>>,
}

/// The admin queue and the state that admin commands read and change.
#[derive(Debug)]
pub(crate) struct Admin {
    rings: Option<AdminRings>,
    /// Wait for memory of the rings.
    suspension: Suspension,
    /// Wait for memory that a command names. The command is postponed meanwhile.
    command_suspension: Suspension,
    /// Completions that were not posted yet, in order. No command is taken while there are any,
    /// so there are never more than an abort makes.
    unposted: VecDeque<Completion>,
    /// The process before may have posted the first of them, and the guest may have consumed it.
    may_be_posted: bool,
    /// A command that is carried out again: by the next host side if the one before went meanwhile, or once memory
    /// that it names is back.
    postponed: Option<Sqe>,
    features: Features,
    events: AsyncEvents,
    errors: ErrorLog,
    health: Health,
    /// Critical warnings that there are and that need no further event, as they were one already.
    warned: CriticalWarning,
    /// The namespace is in the Changed Namespace List.
    namespace_changed: bool,
    /// I/O queues that the guest has created.
    queues: KeptQueues,
    commands: u64,
    aborts: u64,
    /// Doorbell Buffer that the command which is carried out has set up.
    new_buffer: Option<DoorbellBuffer>,
    clock: Arc<dyn WaitClock>,
    /// Commands that change an I/O queue which has commands in flight, in the order in which they came.
    held: VecDeque<Sqe>,
    /// Events that came with errors of commands, until the function has taken them.
    put_off: Vec<Event>,
}

/// Most commands that wait for I/O commands in flight. A further one blocks all commands behind it.
const HELD_MAX: usize = 64;

/// Continuation of a command that was carried out.
enum Outcome {
    /// It completes, with dword 0 of its completion.
    Done(u32),
    /// It waits.
    Waits,
}

impl Admin {
    pub(crate) fn new(facts: &LeaseFacts, clock: Arc<dyn WaitClock>) -> Self {
        Self {
            rings: None,
            suspension: Suspension::default(),
            command_suspension: Suspension::default(),
            unposted: VecDeque::new(),
            may_be_posted: false,
            postponed: None,
            features: Features::new(&clock),
            events: AsyncEvents::default(),
            errors: ErrorLog::default(),
            health: Health::new(facts.thresholds, clock.clone()),
            warned: CriticalWarning::default(),
            namespace_changed: false,
            queues: KeptQueues::default(),
            commands: 0,
            aborts: 0,
            new_buffer: None,
            clock,
            held: VecDeque::new(),
            put_off: Vec::new(),
        }
    }

    /// Goes by another clock, before the first command.
    pub(crate) fn set_clock(&mut self, clock: Arc<dyn WaitClock>) {
        self.features = Features::new(&clock);
        self.health.set_clock(clock.clone());
        self.clock = clock;
    }

    /// The controller was enabled: the admin queues are empty and begin where it says.
    pub(crate) fn enable(&mut self, queues: AdminQueues, host: &dyn HostSide) {
        self.reset();
        host.set_coalescing(self.features.coalescing());
        self.rings = AdminRings::new(queues);
    }

    /// The controller was reset. The error log and what is counted live as long as the function.
    pub(crate) fn reset(&mut self) {
        self.rings = None;
        self.suspension.end();
        self.command_suspension.end();
        self.unposted.clear();
        self.may_be_posted = false;
        self.postponed = None;
        self.features = Features::new(&self.clock);
        self.held.clear();
        self.events = AsyncEvents::default();
        self.warned = CriticalWarning::default();
        self.namespace_changed = false;
        self.queues = KeptQueues::default();
    }

    /// Returns whether memory of the rings, or that a command names, has to be looked for every [`LOOK_INTERVAL`].
    pub(crate) fn waits_for_memory(&self) -> bool {
        self.suspension.is_on() || self.command_suspension.is_on()
    }

    /// I/O queues that the guest has created.
    pub(crate) fn queues(&self) -> &KeptQueues {
        &self.queues
    }

    /// Every I/O command fails until the next reset.
    pub(crate) fn note_revoked(&mut self) {
        self.queues.revoked = true;
    }

    /// Commands taken so far.
    pub(crate) fn commands(&self) -> u64 {
        self.commands
    }

    /// Returns the number of Abort commands that were carried out.
    pub(crate) fn aborts(&self) -> u64 {
        self.aborts
    }

    /// Takes over what the admin doorbells hold. Returns whether another look is due.
    pub(crate) fn ring(&mut self, shared: &SharedParts) -> bool {
        let Some(rings) = &mut self.rings else {
            return false;
        };
        // A head behind that completion is valid once it is posted again.
        if self.may_be_posted && rings.has_room() {
            return true;
        }
        let look = rings.look(shared);
        if look.invalid {
            self.report_doorbell(AsyncEvent::INVALID_DOORBELL_VALUE);
        }
        look.moves_on
    }

    /// A doorbell was written whose queue does not exist.
    pub(crate) fn report_unknown_doorbell(&mut self) {
        self.report_doorbell(AsyncEvent::INVALID_DOORBELL_REGISTER);
    }

    /// Something happened on an I/O queue or to the drive that the guest can be told of.
    pub(crate) fn report(&mut self, event: &Event, host: &dyn HostSide) {
        match event {
            Event::InvalidDoorbell { .. } => {
                self.report_doorbell(AsyncEvent::INVALID_DOORBELL_VALUE);
            }
            Event::CommandFailed(error) => self.errors.command_failed(error),
            Event::QueueFailed { .. } => self.errors.controller_failed(Status::INTERNAL_ERROR),
            Event::Drive(event) => self.report_drive(*event, host),
            Event::Changes => self.report_changes(host),
            // The function decides what the guest learns of it.
            Event::HostSide(_) => {}
        }
    }

    /// The command set's list of changes has another one.
    fn report_changes(&mut self, host: &dyn HostSide) {
        let Some(list) = host.facts().namespace.command_sets.own().change_list else {
            return;
        };
        if self.features.async_events().0 & list.notice.0 != 0 {
            self.events.raise(list.event);
        }
    }

    /// The I/O queues are lost, and only a reset goes on. The guest is told at once, if it listens.
    pub(crate) fn report_lost_queues(&mut self) {
        self.errors.controller_failed(Status::INTERNAL_ERROR);
        self.events
            .raise_first(AsyncEvent::PERSISTENT_INTERNAL_ERROR);
    }

    /// The drive, or what it is divided into, is not what it was.
    fn report_drive(&mut self, event: DriveEvent, host: &dyn HostSide) {
        match event {
            DriveEvent::Health => self.read_health(host),
            DriveEvent::NamespaceChanged(_) => self.report_namespace(),
            // Each command that it interrupted is an error of its own.
            DriveEvent::Reset => {}
            // Without its drive, a driver does best to forget the namespace: it asks which are active, finds none,
            // and fails its remaining commands. It would reset a controller in a fatal state again and again, and
            // notice that state by time-outs alone.
            DriveEvent::Gone => {
                self.errors.controller_failed(Status::INTERNAL_ERROR);
                self.report_namespace();
                self.read_health(host);
            }
        }
    }

    fn report_namespace(&mut self) {
        self.namespace_changed = true;
        if self.features.async_events().namespace_attribute() {
            self.events.raise(AsyncEvent::NAMESPACE_ATTRIBUTE_CHANGED);
        }
    }

    /// Returns whether the drive has to be asked for its health now and then.
    pub(crate) fn watches_health(&self, facts: &LeaseFacts) -> bool {
        // Damage is for the log, too, whatever the guest wants to hear of.
        let wanted = self.features.async_events().critical_warnings().0 != 0;
        facts.can_be_damaged || (wanted && self.health.can_change())
    }

    /// Asks the drive for its health, if it was not asked for long.
    pub(crate) fn watch_health(&mut self, controller: Controller<'_>) {
        if self.watches_health(controller.facts) && self.health.is_due() {
            self.read_health(controller.host);
        }
    }

    fn read_health(&mut self, host: &dyn HostSide) {
        self.health.note(host.damage());
        self.health.read(host);
        self.report_health();
    }

    /// Tells of the critical warnings that are new, if the guest wants to hear of them.
    fn report_health(&mut self) {
        let warnings = self.health.warnings(&self.features);
        let wanted = self.features.async_events().critical_warnings();
        let news = CriticalWarning(warnings.0 & !self.warned.0 & wanted.0);
        self.warned = CriticalWarning(warnings.0 & wanted.0);
        // As the specification sorts them (Base 2.0, Figure 147).
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

    /// Posts an entry for the guest to find, if it has an Asynchronous Event Request outstanding: an event that tells of
    /// nothing.
    pub(crate) fn report_nothing(&mut self) {
        self.unposted.extend(self.events.report_nothing());
    }

    fn report_doorbell(&mut self, event: AsyncEvent) {
        // The log has an entry per event, so a guest that writes nonsense on and on fills neither.
        if self.events.raise(event) {
            self.errors.controller_failed(Status::INVALID_FIELD);
        }
    }

    /// Carries out the commands that wait and posts what there is to post. Returns whether the
    /// guest has something new to look at.
    ///
    /// # Errors
    /// The memory of a queue cannot be accessed, and is not waited for any longer: the controller cannot go on.
    pub(crate) fn run(&mut self, controller: Controller<'_>) -> Result<bool, DmaError> {
        // Taken out, so that commands can have all the rest.
        let Some(mut rings) = self.rings.take() else {
            return Ok(false);
        };
        let mut posted = false;
        // In front of the look at the memory, which may be back when the thread looks at the clock once more.
        let before = self.moment(controller);
        let result = self.run_rings(&mut rings, controller, &mut posted);
        self.rings = Some(rings);
        match result {
            Ok(()) => self.suspension.end(),
            Err(error) => {
                let is_gone = matches!(error, DmaError::NotMapped { .. });
                let after = self.moment(controller);
                let Moment { now, quiet } = self.suspension.moment(before, after);
                if !is_gone || self.suspension.is_over(now, quiet) {
                    return Err(error);
                }
            }
        }
        Ok(posted)
    }

    /// Returns whether commands wait for I/O commands in flight.
    pub(crate) fn holds_commands(&self) -> bool {
        !self.held.is_empty()
    }

    /// Carries out and posts until nothing is left. Sets `posted` with the first completion. After an error, the entry
    /// at which it stopped is the next one still.
    fn run_rings(
        &mut self,
        rings: &mut AdminRings,
        controller: Controller<'_>,
        posted: &mut bool,
    ) -> Result<(), DmaError> {
        let memory = &controller.shared.memory;
        let at_once = Controller {
            deadline: &controller.deadline.at_once(),
            ..controller
        };
        for _ in 0..self.held.len() {
            if let Some(sqe) = self.held.pop_front() {
                self.carry_out_in(&sqe, rings, at_once);
            }
        }
        if let Some(sqe) = self.postponed.take() {
            self.carry_out_in(&sqe, rings, controller);
        }
        // Room is had before anything is taken that will need it. A guest that makes none waits for
        // itself; the doorbell that it makes room with leads here again.
        while self.postponed.is_none()
            && let Some(room) = rings.reserve()
        {
            let event = self.unposted.is_empty().then(|| self.events.report());
            self.unposted.extend(event.flatten());
            if let Some(completion) = self.unposted.front().copied() {
                if let Some(keep) = controller.keep {
                    // The guest acts on a completion as soon as it sees it. So the next process has to know by then
                    // that the command was carried out. It posts the same entry once more, which changes nothing.
                    keep(self.save_with(Some(rings)), &self.queues);
                }
                rings.post(room, completion, memory)?;
                self.unposted.pop_front();
                self.may_be_posted = false;
                *posted = true;
            } else if let Some(sqe) = rings.take(room, memory)? {
                self.commands += 1;
                self.carry_out_in(&sqe, rings, controller);
            } else {
                break;
            }
        }
        Ok(())
    }

    /// Carries out one command and notes its completion, as [`Self::carry_out`] does.
    fn carry_out_in(&mut self, sqe: &Sqe, rings: &mut AdminRings, controller: Controller<'_>) {
        self.carry_out(sqe, controller);
        // Before its completion is posted: from then on the driver may use the buffer.
        if let Some(buffer) = self.new_buffer.take() {
            rings.enter_buffer(buffer, controller.shared);
        }
    }

    /// Carries out one command and notes its completion, or that it waits for the next host side or for memory.
    fn carry_out(&mut self, sqe: &Sqe, controller: Controller<'_>) {
        let cid = sqe.cid();
        let host = controller.host;
        let successors = host.successors();
        let before = self.moment(controller);
        let completion = match self.execute(sqe, controller) {
            Ok(Outcome::Waits) => return,
            Ok(Outcome::Done(dw0)) => Completion {
                cid,
                status: Status::SUCCESS,
                dw0,
            },
            // Another process may be back by now. Its event leads here again.
            Err(_) if host.is_away() || host.successors() != successors => {
                self.postponed = Some(*sqe);
                return;
            }
            // It has changed nothing yet.
            Err(Failure::NotMapped(_)) if !self.is_memory_gone_for_good(before, controller) => {
                self.postponed = Some(*sqe);
                return;
            }
            // Its I/O queue has commands in flight. Others, such as an Abort, are carried out meanwhile.
            Err(Failure::Waits) if self.held.len() < HELD_MAX => {
                self.held.push_back(*sqe);
                return;
            }
            Err(Failure::Waits) => {
                self.postponed = Some(*sqe);
                return;
            }
            Err(failure) => {
                let status = failure.status();
                self.errors.command_failed(&ErrorEntry {
                    sqid: QueueId::ADMIN,
                    cid,
                    status,
                    lba: 0,
                    nsid: sqe.nsid,
                    parameter_location: ParameterErrorLocation::NONE.0,
                });
                Completion {
                    cid,
                    status,
                    dw0: 0,
                }
            }
        };
        self.command_suspension.end();
        self.unposted.push_back(completion);
    }

    /// Returns the present moment.
    fn moment(&self, controller: Controller<'_>) -> Moment {
        Moment {
            now: self.clock.now(),
            quiet: controller.shared.memory.quiet_for(),
        }
    }

    /// Returns whether memory that a command names is waited for no longer. The command did not find it after `before`.
    fn is_memory_gone_for_good(&mut self, before: Moment, controller: Controller<'_>) -> bool {
        let after = self.moment(controller);
        let Moment { now, quiet } = self.command_suspension.moment(before, after);
        self.command_suspension.is_over_for_command(now, quiet)
    }

    fn execute(&mut self, sqe: &Sqe, controller: Controller<'_>) -> Result<Outcome, Failure> {
        let memory = &controller.shared.memory;
        let mut dw0 = 0;
        match AdminCommand::parse(sqe)? {
            AdminCommand::Identify(command) => {
                let structure = self.subject(controller).identify(command, sqe.nsid)?;
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
                let mut data = vec![0; Features::data_length(command.fid)];
                DataBuffer::new(memory, sqe, data.len() as u64).read(&mut data)?;
                dw0 = self
                    .features
                    .set(command.fid, command.dword11, &data, &context)?;
                self.feature_changed(command.fid, controller);
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
                self.events.request(sqe.cid())?;
                return Ok(Outcome::Waits);
            }
            AdminCommand::DoorbellBufferConfig => {
                let buffer = doorbell_buffer::configure(controller, sqe)?;
                self.new_buffer = Some(buffer);
                self.queues.doorbell_buffer = Some(buffer);
            }
        }
        Ok(Outcome::Done(dw0))
    }

    fn get_log_page(
        &mut self,
        request: &LogPageRequest,
        sqe: &Sqe,
        controller: Controller<'_>,
    ) -> Result<(), Failure> {
        let Controller {
            host,
            facts,
            shared,
            ..
        } = controller;
        if matches!(
            request.lid,
            LogPageId::ERROR_INFORMATION | LogPageId::SMART_HEALTH
        ) {
            self.take_up_errors(controller);
        }
        if request.lid == LogPageId::SMART_HEALTH {
            self.health.note(host.damage());
            self.health.refresh(host);
            self.report_health();
        }
        let list = facts.namespace.command_sets.own().change_list;
        let list = list.filter(|list| list.lid == request.lid);
        let changes = list.and_then(|_| host.changes());
        let pages = LogPages {
            subject: self.subject(controller),
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
        if let Some(event_type) = log_pages::cleared_by(request.lid) {
            self.events.clear(event_type);
        }
        if request.lid == LogPageId::CHANGED_NAMESPACE_LIST {
            self.namespace_changed = false;
        }
        if let (Some(list), Some(told)) = (list, &changes) {
            self.events.clear(list.event.event_type());
            host.forget_changes(told);
        }
        Ok(())
    }

    /// Takes up the errors that queues have reported by now. The guest may have seen the completions of their commands
    /// before it asked for the log, and after the function looked for events.
    fn take_up_errors(&mut self, controller: Controller<'_>) {
        for event in controller.host.take_events() {
            match event {
                Event::CommandFailed(error) => self.errors.command_failed(&error),
                other => self.put_off.push(other),
            }
        }
        // The look for events takes the signal of a doorbell, too. A counter that is full wakes as well.
        let _ = eventfd::signal(&controller.shared.events);
    }

    /// Returns the events that the function has not been told of.
    pub(crate) fn take_put_off(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.put_off)
    }

    /// Carries out the demand of a feature that got another value.
    fn feature_changed(&mut self, fid: FeatureId, controller: Controller<'_>) {
        match fid {
            FeatureId::INTERRUPT_COALESCING | FeatureId::INTERRUPT_VECTOR_CONFIGURATION => {
                controller.host.set_coalescing(self.features.coalescing());
            }
            // A condition that holds already is told once more, to a host that asks for it anew.
            FeatureId::TEMPERATURE_THRESHOLD | FeatureId::ASYNC_EVENT_CONFIGURATION => {
                self.warned = match fid {
                    FeatureId::TEMPERATURE_THRESHOLD => self.warned.with_temperature(false),
                    _ => CriticalWarning::default(),
                };
                self.health.note(controller.host.damage());
                self.health.refresh(controller.host);
                self.report_health();
            }
            _ => {}
        }
    }

    fn feature_context<'a>(&self, controller: Controller<'a>) -> FeatureContext<'a> {
        let facts = controller.facts;
        FeatureContext {
            namespace: &facts.namespace,
            blocks: controller.host.status().blocks,
            volatile_write_cache: facts.limits.volatile_write_cache,
            queue_pairs_max: facts.queue_pairs,
            default_threshold: self.health.default_threshold(),
            vectors: controller.shared.vectors.len(),
            io_queues_exist: !self.queues.cqs.is_empty(),
        }
    }

    fn io_queues<'a>(&self, controller: Controller<'a>) -> IoQueues<'a> {
        IoQueues {
            controller,
            allocated: self.features.allocated(&self.feature_context(controller)),
        }
    }

    fn subject<'a>(&self, controller: Controller<'a>) -> Subject<'a> {
        let Controller {
            host, facts, cc, ..
        } = controller;
        let status = host.status();
        // A namespace of a command set that is not enabled is not there (Base 2.0, section 3.1.3.5).
        let is_basic = facts.namespace.command_sets.own().csi == Csi::NVM;
        let enabled = is_basic || cc.css() == CommandSetSelected::ALL;
        Subject {
            namespace: &facts.namespace,
            blocks: status.blocks,
            used: status.used,
            limits: &facts.limits,
            doorbell_buffer: doorbell_buffer::is_supported(facts),
            active: enabled && status.is_backed,
            thresholds: self.health.thresholds(),
            unit_blocks: facts.unit_blocks,
        }
    }
}
