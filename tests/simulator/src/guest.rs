//! Guests that behave like the drivers of operating systems. Their [`Work`] chooses the commands and checks the results.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use nvme_mpt_memory::clock;
use nvme_mpt_tests::Error;
use nvme_mpt_tests::bar::Bar;
use nvme_mpt_tests::command::{Sqe, admin};
use nvme_mpt_tests::completion::Cqe;
use nvme_mpt_tests::controller::{Config, Controller, QueueOptions};
use nvme_mpt_tests::doorbell::DoorbellMode;
use nvme_mpt_tests::function::InProcess;
use nvme_mpt_tests::interrupt::Interrupt;
use nvme_mpt_tests::memory::{DmaBuffer, GuestMemory};
use nvme_mpt_tests::prp::{self, PreparedPointer};
use nvme_mpt_tests::queue::QueuePair;
use nvme_mpt_tests::registers::{CC, CC_ENABLE, CSTS_FATAL, CSTS_READY};
use nvme_mpt_tests::rng::Rng;

/// Size of a command's buffer in bytes.
const BUFFER: usize = 16 << 10;

/// Number of polls of a controller after a function reset, before the guest regards the reset as failed. Together, the
/// polls take longer than CAP.TO.
const READY_POLLS: u32 = 2000;

/// Time after a Function Level Reset during which a driver must not access the function (PCI Express 4.0, section 6.6.2).
const FUNCTION_RESET_TIME: Duration = Duration::from_millis(100);

/// Maximum number of resets after failures of a drive. After that, the guest regards the drive as lost.
const FAILURES_MAX: u32 = 20;

/// Asynchronous Event Requests of a driver that submits them at start.
const EVENT_REQUESTS: usize = 4;

/// Interval of polling a queue without interrupts.
const POLL_INTERVAL: Duration = Duration::from_micros(20);

/// Longest pause between two commands of a guest with [`Load::Seldom`].
const SELDOM: Duration = Duration::from_millis(150);

/// Fill byte of memory that no command may write to.
const CANARY: u8 = 0xCA;

/// A driver of an operating system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Persona {
    /// Linux: shadow doorbells (Doorbell Buffer Config) for I/O queues only, and interrupts.
    Linux,
    /// libvfn: shadow doorbells for the admin queue as well, and no interrupts.
    Libvfn,
    /// Windows: doorbell registers, interrupts, and Asynchronous Event Requests at start.
    StorNvme,
    /// EDK2: one queue pair, one outstanding command, no interrupts.
    Edk2,
    /// SPDK: mapped doorbells, no interrupts.
    Spdk,
    /// FreeBSD: doorbell registers, and interrupts.
    FreeBsd,
}

impl Persona {
    /// All drivers.
    pub(crate) const ALL: [Self; 6] = [
        Self::Linux,
        Self::Libvfn,
        Self::StorNvme,
        Self::Edk2,
        Self::Spdk,
        Self::FreeBsd,
    ];

    /// Returns the doorbell mode that the driver uses for I/O queues.
    pub(crate) const fn doorbells(self) -> DoorbellMode {
        match self {
            Self::Linux | Self::Libvfn => DoorbellMode::Shadow,
            Self::Spdk => DoorbellMode::Mapped,
            Self::StorNvme | Self::Edk2 | Self::FreeBsd => DoorbellMode::Trap,
        }
    }

    const fn interrupts(self) -> bool {
        matches!(self, Self::Linux | Self::StorNvme | Self::FreeBsd)
    }
}

/// Number of commands that a guest has outstanding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Load {
    /// A varying number.
    #[default]
    Usual,
    /// One command at a time.
    Quiet,
    /// As many commands as there are buffers.
    Loud,
    /// One command at a time, with pauses.
    Seldom,
}

/// Parameters and limits of a guest.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Conditions {
    /// Number of rounds of commands.
    pub(crate) rounds: u64,
    /// Longest time of an I/O command.
    pub(crate) io_timeout: Duration,
    /// Longest time of an admin command.
    pub(crate) admin_timeout: Duration,
    /// True if commands may fail, because the drive does.
    pub(crate) may_fail: bool,
    /// True if commands may take many seconds.
    pub(crate) may_be_slow: bool,
    /// Average number of rounds for each controller reset; 0 for no resets.
    pub(crate) resets: u64,
    /// Average number of rounds for each queue deletion; 0 for no deletions.
    pub(crate) deletions: u64,
    /// Average number of rounds for each Abort; 0 for no Aborts.
    pub(crate) aborts: u64,
}

/// Choice of a guest's commands, and their expected results.
pub(crate) trait Work: Send {
    /// Description of a command.
    type Command: Send;

    /// Value of CC.CSS with which the driver enables the controller.
    const COMMAND_SETS: u32;

    /// Chooses the next command.
    fn choose(&mut self, rng: &mut Rng) -> Self::Command;

    /// Returns a command's submission queue entry (without a data pointer) and data.
    fn to_sqe(&self, command: &Self::Command) -> (Sqe, Data);

    /// Records that a command was put into its queue.
    fn begin(&mut self, command: &mut Self::Command, now: Duration);

    /// Checks the result of a command.
    ///
    /// # Panics
    /// The result is impossible.
    fn end(&mut self, command: Self::Command, end: &CommandEnd<'_>);

    /// Returns commands that read the whole contents. The guest executes them when no other command is in flight.
    fn verification_commands(&self) -> Vec<Self::Command>;
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Data {
    /// No data.
    None,
    /// Data from the guest to the drive.
    Out(Vec<u8>),
    /// Number of bytes from the drive to the guest.
    In(usize),
}

impl Data {
    /// Returns the number of bytes.
    pub(crate) const fn len(&self) -> usize {
        match self {
            Self::None => 0,
            Self::Out(bytes) => bytes.len(),
            Self::In(len) => *len,
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct CommandEnd<'a> {
    /// Time of submission.
    pub(crate) began: Duration,
    /// Time of the completion, or of the loss of the queue.
    pub(crate) now: Duration,
    /// Completion queue entry. `None` if the queue was lost: the command has taken effect before `now`, or never will.
    pub(crate) cqe: Option<Cqe>,
    /// True if the command may have failed. Then it may or may not have taken effect.
    pub(crate) is_excused: bool,
    /// Data of the transfer.
    pub(crate) data: &'a [u8],
}

impl CommandEnd<'_> {
    /// Returns whether the command succeeded.
    pub(crate) fn has_succeeded(&self) -> bool {
        self.cqe.is_some_and(|cqe| cqe.status().is_success())
    }
}

/// State that a guest and its VMM share.
#[derive(Debug, Default)]
pub(crate) struct GuestState {
    /// True while commands may use the high memory, which the VMM maps and unmaps.
    pub(crate) plugged: AtomicBool,
    /// Number of times that the VMM has unmapped the high memory although commands were in flight.
    pub(crate) forced_unmaps: AtomicUsize,
    /// Number of commands in flight that use the high memory.
    pub(crate) users: AtomicUsize,
    /// True if the guest's processors must stop.
    pub(crate) should_stop: AtomicBool,
    /// True while the guest's processors are stopped.
    pub(crate) is_stopped: AtomicBool,
    /// True once the guest has created its I/O queues.
    pub(crate) has_queues: AtomicBool,
    /// True once the guest's drive may have been removed.
    pub(crate) may_be_gone: AtomicBool,
    /// Number of a killed server whose drive may still write to the guest's memory; 0 for none.
    pub(crate) killed_server: AtomicU64,
    /// True once the guest has ended.
    pub(crate) ended: AtomicBool,
    /// The guest's function, once there is one.
    pub(crate) function: Mutex<Weak<InProcess>>,
}

/// Memory of a guest's commands.
pub(crate) struct Buffers {
    /// Memory that stays mapped.
    pub(crate) low: DmaBuffer,
    /// Memory that the VMM maps and unmaps.
    pub(crate) high: DmaBuffer,
}

/// Hardware of a guest.
pub(crate) struct Machine {
    /// Guest memory.
    pub(crate) memory: GuestMemory,
    /// Interrupt vectors of the function.
    pub(crate) interrupts: Vec<Arc<Interrupt>>,
    /// State shared with the VMM.
    pub(crate) shared: Arc<GuestState>,
    /// Buffers for commands.
    pub(crate) buffers: Buffers,
}

/// A command in flight.
struct GuestCommand<C> {
    command: C,
    opcode: u8,
    began: Duration,
    slot: Slot,
    offset: usize,
    len: usize,
    _prepared: Option<PreparedPointer>,
    aborted: bool,
    /// Value of [`GuestState::forced_unmaps`] at submission.
    forced_unmaps: usize,
}

/// Buffer of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Slot {
    high: bool,
    index: usize,
}

struct Queue<C> {
    pair: QueuePair,
    interrupt: Option<Arc<Interrupt>>,
    inflight: BTreeMap<u16, GuestCommand<C>>,
    next_cid: u16,
}

pub(crate) struct Guest<W: Work> {
    work: W,
    persona: Persona,
    conditions: Conditions,
    rng: Rng,
    memory: GuestMemory,
    interrupts: Vec<Arc<Interrupt>>,
    shared: Arc<GuestState>,
    buffers: Buffers,
    busy: Vec<Slot>,
    queues: Vec<Queue<W::Command>>,
    /// Number of admin commands that have failed.
    failures: u32,
    load: Load,
    /// States of the guests that must end before this guest ends.
    companions: Vec<Arc<GuestState>>,
    /// Performs a Function Level Reset; `None` if the guest performs none.
    reset_function: Option<Box<dyn Fn() + Send>>,
    /// True once the guest has stopped using a drive that was removed.
    has_given_up: bool,
    /// Timeouts of the driver; `None` without timeouts.
    timeouts: Option<Timeouts>,
    /// True if a command has exceeded the driver's timeout.
    is_late: bool,
    /// Maximum latency of an I/O command, if there is a limit.
    max_latency: Option<Duration>,
}

/// Timeouts of a driver.
pub(crate) struct Timeouts {
    /// Timeout of a command, after which the driver aborts it. After twice this time, the driver resets the controller.
    pub(crate) command: Duration,
    /// Longest duration of an Abort, which must not depend on other commands.
    pub(crate) abort: Duration,
    /// Longest time without progress of the storage.
    pub(crate) storage: Duration,
    /// Returns the number of transfers that the host's kernel has in progress for this guest's memory.
    pub(crate) transfers: fn() -> usize,
}

impl<W: Work> Guest<W> {
    /// Creates a guest with its own function and memory.
    pub(crate) fn new(
        work: W,
        persona: Persona,
        conditions: Conditions,
        rng: Rng,
        machine: Machine,
    ) -> Self {
        let Machine {
            memory,
            interrupts,
            shared,
            buffers,
        } = machine;
        Self {
            work,
            persona,
            conditions,
            rng,
            memory,
            interrupts,
            shared,
            buffers,
            busy: Vec::new(),
            queues: Vec::new(),
            failures: 0,
            load: Load::Usual,
            companions: Vec::new(),
            reset_function: None,
            has_given_up: false,
            timeouts: None,
            is_late: false,
            max_latency: None,
        }
    }

    /// Sets timeouts after which the driver aborts commands and resets the controller.
    pub(crate) fn with_timeouts(self, timeouts: Timeouts) -> Self {
        Self {
            timeouts: Some(timeouts),
            ..self
        }
    }

    /// Sets the maximum latency of I/O commands.
    pub(crate) fn with_max_latency(self, longest: Duration) -> Self {
        Self {
            max_latency: Some(longest),
            ..self
        }
    }

    /// Sets the load, and the guests that must end before this guest.
    pub(crate) fn with_load(self, load: Load, company: Vec<Arc<GuestState>>) -> Self {
        Self {
            load,
            companions: company,
            ..self
        }
    }

    /// Lets some controller resets start with a Function Level Reset.
    pub(crate) fn with_function_resets(self, reset: impl Fn() + Send + 'static) -> Self {
        Self {
            reset_function: Some(Box::new(reset)),
            ..self
        }
    }

    /// Attaches to the controller, executes the rounds, verifies all written data, and shuts the controller down.
    pub(crate) fn run(self, bar: Arc<dyn Bar>) {
        self.run_until(bar, || ());
    }

    /// Attaches to the controller and creates the queues. Returns the controller, and the number of queues that the guest
    /// requested.
    fn attach(&mut self, bar: Arc<dyn Bar>) -> Option<(Controller, u16)> {
        let config = Config {
            doorbells: self.persona.doorbells(),
            admin_timeout: self.conditions.admin_timeout,
            admin_in_buffer: self.persona == Persona::Libvfn,
            admin_entries: 8 + self.rng.below(24) as u16,
            command_set: W::COMMAND_SETS,
        };
        let count = match self.persona {
            Persona::Edk2 => 1,
            _ => 1 + self.rng.below(3) as u16,
        };
        let memory = self.memory.clone();
        let mut controller = match Controller::attach(bar, memory, config, count) {
            Ok(controller) => controller,
            Err(error) => {
                self.give_up_drive("the controller does not attach", &error);
                self.shared.ended.store(true, Ordering::Relaxed);
                return None;
            }
        };
        self.request_events(&mut controller);
        self.create_queues(&mut controller, count);
        self.shared.has_queues.store(true, Ordering::Relaxed);
        Some((controller, count))
    }

    /// Attaches to the controller, executes the rounds, calls `last`, fills the queues, and ends while commands are in
    /// flight.
    pub(crate) fn run_and_abandon(mut self, bar: Arc<dyn Bar>, last: impl FnOnce()) {
        let Some((mut controller, count)) = self.attach(bar) else {
            return;
        };
        for _ in 0..self.conditions.rounds {
            self.round(&mut controller, count);
        }
        self.drain();
        last();
        for index in 0..self.queues.len() {
            while self.submit(index) {}
            self.queues[index].pair.ring();
        }
        let bits = self.rng.below(24);
        clock::sleep(Duration::from_nanos(self.rng.below(2 << bits)));
        self.shared.ended.store(true, Ordering::Relaxed);
    }

    /// Attaches to the controller, executes the rounds, waits for `end`, verifies all written data, and shuts the
    /// controller down.
    pub(crate) fn run_until(mut self, bar: Arc<dyn Bar>, end: impl FnOnce()) {
        let Some((mut controller, count)) = self.attach(bar) else {
            return;
        };
        let mut rounds = 0;
        while !self.has_given_up && (rounds < self.conditions.rounds || self.has_company()) {
            self.round(&mut controller, count);
            self.recover(&mut controller, count);
            rounds += 1;
        }
        self.drain();
        self.recover(&mut controller, count);
        end();
        while !self.has_given_up {
            self.read_all();
            if !self.recover(&mut controller, count) {
                break;
            }
        }
        if let Err(error) = controller.shutdown(false) {
            self.give_up_drive("the controller does not shut down", &error);
        }
        if self.shared.may_be_gone.load(Ordering::Relaxed) {
            self.leave(&mut controller);
        }
        self.shared.ended.store(true, Ordering::Relaxed);
    }

    /// Ends the use of a drive that may have been removed. After the controller is disabled, the drive must not access the
    /// guest's memory.
    fn leave(&mut self, controller: &mut Controller) {
        let disabled = controller.disable();
        disabled.unwrap_or_else(|error| panic!("the controller is not disabled: {error}"));
        let queues = std::mem::take(&mut self.queues);
        self.end_queue_commands(queues);
    }

    fn has_company(&self) -> bool {
        let mut company = self.companions.iter();
        company.any(|other| !other.ended.load(Ordering::Relaxed))
    }

    /// Ends the use of a drive that was removed.
    ///
    /// # Panics
    /// The drive is present, or the guest's access timed out without an answer.
    fn give_up_drive(&mut self, what: &str, error: &Error) {
        let is_answer = match error {
            Error::Timeout { .. } => false,
            Error::NotReached { csts, .. } => csts & CSTS_FATAL != 0,
            _ => true,
        };
        let is_gone = self.shared.may_be_gone.load(Ordering::Relaxed);
        assert!(is_gone && is_answer, "{:?}: {what}: {error}", self.persona);
        self.has_given_up = true;
    }

    /// Executes the rounds on queues that exist already, and verifies all written data.
    pub(crate) fn run_on(mut self, pairs: Vec<QueuePair>) {
        for pair in pairs {
            let next_cid = self.rng.next_u64() as u16;
            self.queues.push(Queue {
                pair,
                interrupt: None,
                inflight: BTreeMap::new(),
                next_cid,
            });
        }
        for _ in 0..self.conditions.rounds {
            self.submit_round();
        }
        self.drain();
        self.read_all();
        self.shared.ended.store(true, Ordering::Relaxed);
    }

    fn one_in(&mut self, bound: u64) -> bool {
        bound > 0 && self.rng.below(bound) == 0
    }

    fn round(&mut self, controller: &mut Controller, count: u16) {
        if self.one_in(self.conditions.resets) {
            self.reset(controller, count);
        }
        if !self.has_given_up && self.one_in(self.conditions.deletions) {
            self.delete_queue(controller, count);
        }
        if self.has_given_up {
            return;
        }
        let index = self.submit_round();
        if self.one_in(self.conditions.aborts) {
            self.abort(controller, index);
        }
    }

    /// Submits commands to a queue, and takes completions. Returns the index of the queue.
    fn submit_round(&mut self) -> usize {
        while self.shared.should_stop.load(Ordering::Relaxed) {
            self.shared.is_stopped.store(true, Ordering::Relaxed);
            clock::sleep(Duration::from_micros(50));
        }
        self.shared.is_stopped.store(false, Ordering::Relaxed);
        let depth = match (self.persona, self.load) {
            (Persona::Edk2, _) | (_, Load::Quiet | Load::Seldom) => 1,
            (_, Load::Usual) => 1 + self.rng.below(16),
            (_, Load::Loud) => 16,
        };
        if self.load == Load::Seldom {
            clock::sleep(SELDOM.mul_f64(self.rng.below(1000) as f64 / 1000.0));
        }
        let index = self.rng.below(self.queues.len() as u64) as usize;
        for _ in 0..depth {
            if !self.submit(index) {
                break;
            }
            if self.one_in(4) {
                self.queues[index].pair.ring();
            }
        }
        self.queues[index].pair.ring();
        if self.load != Load::Seldom && self.one_in(6) {
            // The pause may be long enough for the pollers to park.
            let bits = self.rng.below(24);
            clock::sleep(Duration::from_nanos(self.rng.below(2 << bits)));
        }
        let drains = match self.load {
            Load::Usual => self.one_in(3),
            Load::Quiet | Load::Seldom => true,
            Load::Loud => false,
        };
        if drains {
            self.drain();
        } else {
            self.collect(index, 1);
        }
        index
    }

    /// Submits the Asynchronous Event Requests of a driver that submits them at start.
    fn request_events(&self, controller: &mut Controller) {
        if self.persona == Persona::StorNvme {
            for _ in 0..EVENT_REQUESTS {
                let given = controller.request_async_event();
                given.unwrap_or_else(|error| panic!("a request for events is not given: {error}"));
            }
        }
    }

    fn create_queues(&mut self, controller: &mut Controller, count: u16) {
        for id in 1..=count {
            match self.create_queue(controller, id) {
                Ok(queue) => self.queues.push(queue),
                Err(error) => return self.recover_from_admin_failure(controller, count, &error),
            }
        }
    }

    /// Handles a failed admin command. The drive may have failed, so the driver resets the controller. The number of resets
    /// is limited.
    fn recover_from_admin_failure(
        &mut self,
        controller: &mut Controller,
        count: u16,
        error: &Error,
    ) {
        if self.shared.may_be_gone.load(Ordering::Relaxed) {
            return self.give_up_drive("an admin command failed", error);
        }
        self.failures += 1;
        assert!(
            self.conditions.may_fail && self.failures < FAILURES_MAX,
            "{:?}: an admin command failed: {error}",
            self.persona
        );
        self.reset(controller, count);
    }

    fn create_queue(
        &mut self,
        controller: &mut Controller,
        id: u16,
    ) -> Result<Queue<W::Command>, Error> {
        let entries = 2 + self.rng.below(20) as u32;
        let interrupt = self
            .persona
            .interrupts()
            .then(|| self.interrupts[usize::from(id)].clone());
        let options = match &interrupt {
            Some(interrupt) => QueueOptions::interrupting(entries, id, interrupt.clone()),
            None => QueueOptions::polled(entries),
        };
        let pair = controller.create_queue_pair(id, &options)?;
        Ok(Queue {
            pair,
            interrupt,
            inflight: BTreeMap::new(),
            next_cid: self.rng.next_u64() as u16,
        })
    }

    fn slot(&mut self) -> Option<Slot> {
        let high = self.one_in(3) && self.shared.plugged.load(Ordering::Relaxed);
        let buffer = if high {
            &self.buffers.high
        } else {
            &self.buffers.low
        };
        let slots = buffer.len() / BUFFER;
        let first = self.rng.below(slots as u64) as usize;
        let slot = (0..slots)
            .map(|step| Slot {
                high,
                index: (first + step) % slots,
            })
            .find(|slot| !self.busy.contains(slot))?;
        self.busy.push(slot);
        self.shared
            .users
            .fetch_add(usize::from(high), Ordering::Relaxed);
        Some(slot)
    }

    fn free(&mut self, slot: Slot) {
        self.busy.retain(|busy| *busy != slot);
        self.shared
            .users
            .fetch_sub(usize::from(slot.high), Ordering::Relaxed);
    }

    fn buffer(&self, slot: Slot) -> (&DmaBuffer, usize) {
        let buffer = if slot.high {
            &self.buffers.high
        } else {
            &self.buffers.low
        };
        (buffer, slot.index * BUFFER)
    }

    /// Chooses a command and submits it. Returns whether the queue had space.
    fn submit(&mut self, index: usize) -> bool {
        let command = self.work.choose(&mut self.rng);
        self.submit_command(index, command).is_ok()
    }

    /// Submits a command. Returns the command if the queue is full.
    fn submit_command(&mut self, index: usize, mut command: W::Command) -> Result<(), W::Command> {
        let Some(slot) = self.slot() else {
            return Err(command);
        };
        let rude = self.shared.forced_unmaps.load(Ordering::Relaxed);
        let offset = 4 * self.rng.below(1000) as usize;
        let (sqe, data) = self.work.to_sqe(&command);
        let len = data.len();
        let (buffer, start) = self.buffer(slot);
        buffer.write(start, &[CANARY; BUFFER]);
        if let Data::Out(bytes) = &data {
            buffer.write(start + offset, bytes);
        }
        let prepared = (len > 0).then(|| {
            prp::buffer(buffer, start + offset, len)
                .unwrap_or_else(|error| panic!("no memory for a list: {error}"))
        });
        let sqe = match &prepared {
            Some(prepared) => sqe.with_data(prepared.pointer),
            None => sqe,
        };
        let queue = &mut self.queues[index];
        while queue.inflight.contains_key(&queue.next_cid) || queue.next_cid >= 0xF000 {
            queue.next_cid = queue.next_cid.wrapping_add(1) % 0xF000;
        }
        let cid = queue.next_cid;
        queue.next_cid = queue.next_cid.wrapping_add(1);
        let began = clock::monotonic();
        if !queue.pair.push(&sqe.with_cid(cid)) {
            self.free(slot);
            return Err(command);
        }
        self.work.begin(&mut command, began);
        let inflight_command = GuestCommand {
            command,
            opcode: sqe.opcode(),
            began,
            slot,
            offset,
            len,
            _prepared: prepared,
            aborted: false,
            forced_unmaps: rude,
        };
        self.queues[index].inflight.insert(cid, inflight_command);
        Ok(())
    }

    /// Takes at least `least` completions; fewer if nothing is in flight any more.
    fn collect(&mut self, index: usize, least: usize) {
        let mut taken = 0;
        let mut last = clock::monotonic();
        loop {
            while let Some(cqe) = self.queues[index].pair.poll() {
                self.complete(index, cqe);
                taken += 1;
                last = clock::monotonic();
            }
            let before = clock::monotonic();
            self.queues[index].pair.ring();
            // The VMM may pin memory before it handles a trapped doorbell. This time does not count as the command's
            // latency.
            last += clock::monotonic() - before;
            let queue = &self.queues[index];
            if taken >= least || queue.inflight.is_empty() {
                return;
            }
            let waited = clock::monotonic() - last;
            if self
                .timeouts
                .as_ref()
                .is_some_and(|limits| waited >= limits.command)
            {
                self.is_late = true;
                return;
            }
            assert!(
                waited < self.conditions.io_timeout,
                "{:?}: {} commands of queue {} did not complete within {:?}",
                self.persona,
                queue.inflight.len(),
                queue.pair.sq.id(),
                self.conditions.io_timeout
            );
            match &queue.interrupt {
                Some(interrupt) => {
                    let time = self.timeouts.as_ref().map(|limits| limits.command);
                    let time = time.unwrap_or(self.conditions.io_timeout);
                    let signals = interrupt.wait(time);
                    let signals = signals.unwrap_or_else(|error| panic!("{error}"));
                    assert!(
                        signals > 0 || !queue.pair.cq.has_entry(),
                        "{:?}: queue {} has completions, and signalled none for {:?}",
                        self.persona,
                        queue.pair.cq.id(),
                        self.conditions.io_timeout
                    );
                }
                // If the kernel delays requests for long, a fixed polling interval would lead to a million polls.
                None if self.conditions.may_be_slow => {
                    clock::sleep((waited / 64).clamp(POLL_INTERVAL, 500 * POLL_INTERVAL));
                }
                None => clock::sleep(POLL_INTERVAL),
            }
        }
    }

    fn drain(&mut self) {
        for index in 0..self.queues.len() {
            self.collect(index, usize::MAX);
        }
    }

    /// Aborts commands that have exceeded their timeout, and resets the controller if they still do not end. Returns true
    /// if there were such commands.
    ///
    /// # Panics
    /// An Abort waits for other commands, the controller fails, or the reset completes although the host still has
    /// requests.
    fn recover(&mut self, controller: &mut Controller, count: u16) -> bool {
        if !std::mem::take(&mut self.is_late) {
            return false;
        }
        let Some(Timeouts {
            abort,
            storage,
            transfers,
            ..
        }) = self.timeouts
        else {
            return false;
        };
        for index in 0..self.queues.len() {
            let began = clock::monotonic();
            self.abort(controller, index);
            let took = clock::monotonic() - began;
            assert!(took < abort, "{:?}: an Abort took {took:?}", self.persona);
        }
        self.drain();
        if !std::mem::take(&mut self.is_late) {
            return true;
        }
        let began = clock::monotonic();
        loop {
            // Some drivers enable a controller again before its reset is complete.
            if self.one_in(3) {
                let cc = controller.bar().read32(CC);
                controller.bar().write32(CC, cc & !CC_ENABLE);
                controller.bar().write32(CC, cc | CC_ENABLE);
            }
            let is_reset = controller.disable();
            let csts = controller.status();
            let csts = csts.unwrap_or_else(|error| panic!("the controller is gone: {error}"));
            assert_eq!(csts & CSTS_FATAL, 0, "{:?}: CSTS.CFS", self.persona);
            let waited = clock::monotonic() - began;
            match is_reset {
                Ok(()) => break,
                Err(error) => assert!(
                    waited < storage,
                    "{:?}: the controller is not reset after {waited:?}: {error}",
                    self.persona
                ),
            }
        }
        let left = transfers();
        assert_eq!(
            left, 0,
            "{:?}: the reset is complete, and the host has transfers of the guest's memory",
            self.persona
        );
        let queues = std::mem::take(&mut self.queues);
        self.end_queue_commands(queues);
        let enabled = controller.enable();
        enabled.unwrap_or_else(|error| panic!("the controller is not enabled: {error}"));
        self.set_up(controller, count);
        true
    }

    /// Handles a completion.
    fn complete(&mut self, index: usize, cqe: Cqe) {
        let queue = &mut self.queues[index];
        let id = queue.pair.sq.id();
        assert_eq!(cqe.sq_id(), id, "a completion of another queue: {cqe:?}");
        let command = queue.inflight.remove(&cqe.cid());
        let command = command.unwrap_or_else(|| panic!("queue {id}: nobody waits for {cqe:?}"));
        let is_taken = command.slot.high
            && self.shared.forced_unmaps.load(Ordering::Relaxed) != command.forced_unmaps;
        let is_gone = self.shared.may_be_gone.load(Ordering::Relaxed);
        let is_excused = self.conditions.may_fail || command.aborted || is_taken || is_gone;
        self.end_command(command, Some(cqe), is_excused);
    }

    /// Ends a command that has completed, or whose queue was lost.
    fn end_command(
        &mut self,
        command: GuestCommand<W::Command>,
        cqe: Option<Cqe>,
        is_excused: bool,
    ) {
        let now = clock::monotonic();
        if let Some(longest) = self.max_latency {
            let took = now - command.began;
            assert!(
                took <= longest,
                "{:?}: opcode {:#x} took {took:?}, which is longer than {longest:?}",
                self.persona,
                command.opcode
            );
        }
        let (buffer, start) = self.buffer(command.slot);
        let bytes = buffer.to_vec(start, BUFFER);
        let transfer = command.offset..command.offset + command.len;
        let strays = |at: &usize| !transfer.contains(at) && bytes[*at] != CANARY;
        if let Some(at) = (0..BUFFER).find(strays) {
            panic!(
                "{:?}: byte {at} beside the transfer {transfer:?} of opcode {:#x} was written",
                self.persona, command.opcode
            );
        }
        let end = CommandEnd {
            began: command.began,
            now,
            cqe,
            is_excused,
            data: &bytes[transfer],
        };
        self.work.end(command.command, &end);
        self.free(command.slot);
    }

    /// Ends the commands of deleted queues: each has taken effect already, or never will. From now on, the test checks that
    /// nothing writes to the commands' memory.
    fn end_queue_commands(&mut self, queues: Vec<Queue<W::Command>>) {
        let mut slots = Vec::new();
        for command in queues
            .into_iter()
            .flat_map(|queue| queue.inflight.into_values())
        {
            let slot = command.slot;
            self.end_command(command, None, true);
            let (buffer, start) = self.buffer(slot);
            buffer.write(start, &[CANARY; BUFFER]);
            slots.push(slot);
        }
        let bits = self.rng.below(20);
        clock::sleep(Duration::from_nanos(self.rng.below(2 << bits)));
        for slot in slots {
            let (buffer, start) = self.buffer(slot);
            let bytes = buffer.to_vec(start, BUFFER);
            let written = bytes.iter().position(|byte| *byte != CANARY);
            assert_eq!(
                written, None,
                "{:?}: memory of a command was written after its queue was gone",
                self.persona
            );
        }
    }

    /// Performs a Function Level Reset at random.
    fn reset_function(&mut self, controller: &Controller) {
        let Some(reset) = self.reset_function.take() else {
            return;
        };
        if self.one_in(3) {
            reset();
            clock::sleep(FUNCTION_RESET_TIME);
            // Until the controller is ready again, the host may still have commands that use the guest's memory.
            let mut polls = 0;
            loop {
                let csts = controller.status();
                let csts = csts.unwrap_or_else(|error| panic!("the function was reset: {error}"));
                if csts & CSTS_READY == 0 {
                    break;
                }
                polls += 1;
                assert!(
                    polls < READY_POLLS,
                    "{:?}: the controller is ready after a reset of its function",
                    self.persona
                );
                clock::sleep(FUNCTION_RESET_TIME);
            }
            let queues = std::mem::take(&mut self.queues);
            self.end_queue_commands(queues);
        }
        self.reset_function = Some(reset);
    }

    fn reset(&mut self, controller: &mut Controller, count: u16) {
        self.reset_function(controller);
        let late = self.shared.killed_server.load(Ordering::Relaxed);
        controller
            .disable()
            .unwrap_or_else(|error| panic!("the controller is not disabled: {error}"));
        assert!(
            late == 0 || late != self.shared.killed_server.load(Ordering::Relaxed),
            "{:?}: the reset is complete, and the drive of a killed server writes to the guest's memory",
            self.persona
        );
        let queues = std::mem::take(&mut self.queues);
        self.end_queue_commands(queues);
        if let Err(error) = controller.enable() {
            return self.give_up_drive("the controller is not enabled", &error);
        }
        self.set_up(controller, count);
    }

    /// Configures a controller that was just enabled.
    fn set_up(&mut self, controller: &mut Controller, count: u16) {
        if self.persona.doorbells() == DoorbellMode::Shadow
            && let Err(error) = controller.configure_doorbell_buffer(&mut [])
        {
            return self.give_up_drive("the controller is not enabled", &error);
        }
        self.request_events(controller);
        self.create_queues(controller, count);
    }

    fn delete_queue(&mut self, controller: &mut Controller, count: u16) {
        let index = self.rng.below(self.queues.len() as u64) as usize;
        let mut queue = self.queues.swap_remove(index);
        queue.pair.ring();
        let id = queue.pair.sq.id();
        let deleted = controller
            .admin(Sqe::delete_sq(id))
            .and_then(|_| controller.admin(Sqe::delete_cq(id)));
        if let Err(error) = deleted {
            self.queues.push(queue);
            return self.recover_from_admin_failure(controller, count, &error);
        }
        for command in queue.inflight.values_mut() {
            command.aborted = true;
        }
        self.queues.push(queue);
        let last = self.queues.len() - 1;
        while let Some(cqe) = self.queues[last].pair.poll() {
            self.complete(last, cqe);
        }
        let queue = self.queues.pop();
        self.end_queue_commands(queue.into_iter().collect());
        match self.create_queue(controller, id) {
            Ok(queue) => self.queues.push(queue),
            Err(error) => self.recover_from_admin_failure(controller, count, &error),
        }
    }

    fn abort(&mut self, controller: &mut Controller, index: usize) {
        let queue = &mut self.queues[index];
        let Some((&cid, command)) = queue.inflight.iter_mut().next() else {
            return;
        };
        command.aborted = true;
        let sqe = Sqe::abort(queue.pair.sq.id(), cid);
        debug_assert_eq!(sqe.opcode(), admin::ABORT);
        let aborted = controller.admin_raw(sqe);
        assert!(
            aborted.is_ok() || self.conditions.may_fail,
            "an Abort did not complete: {aborted:?}"
        );
    }

    /// Verifies all data, after all other commands have ended.
    fn read_all(&mut self) {
        for mut command in self.work.verification_commands() {
            while let Err(left) = self.submit_command(0, command) {
                command = left;
                self.queues[0].pair.ring();
                self.collect(0, 1);
            }
        }
        self.drain();
    }
}
