//! Scheduler of a simulation: one thread, one clock, one seed.
//!
//! Each actor is a simulated thread with its own stack ([`generator`]). At each step that is visible to other actors, the
//! scheduler may switch to another actor. The scheduler polls a waiting actor after a step of another actor that may have
//! effects, and when the waiting actor's timeout has passed. The clock advances with each step. If all actors wait, the
//! clock jumps to the next timeout.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::fmt::Write as _;
use std::time::Duration;

use generator::{Generator, Gn};
use nvme_mpt_lease_protocol::simulated as sockets;
use nvme_mpt_memory::files::simulated as files;
use nvme_mpt_memory::simulation::{
    self, ActorEvent, ActorStep, ActorWork, Simulator, costs, store_buffers,
};
use nvme_mpt_tests::rng::Rng;
use nvme_software::simulated as drives;

use crate::runs::OmittedParts;

/// Stack size of an actor, in words.
const STACK: usize = 64 << 10;

/// Numbers of steps after which a simulation is considered endless.
#[derive(Clone, Copy, Debug)]
struct StepLimits {
    /// Limit of steps in which no guest takes a completion. A drive may delay a command for 36 s, and a poller polls for
    /// its completion during this time.
    idle: u64,
    /// Limit of all steps. It also covers guests that take completions, but submit the same commands again and again. If
    /// each command comes just before its poller would sleep, most steps of the simulation are the pollers'.
    all: u64,
}

impl StepLimits {
    const DEFAULT: Self = Self {
        idle: 1_000_000_000,
        all: 4_000_000_000,
    };

    /// Checks that the simulation is within the limits.
    ///
    /// # Panics
    /// The simulation has taken too many steps, or too many since a guest took a completion.
    fn check(self, steps: u64, idle_steps: u64) {
        let Self { idle, all } = self;
        assert!(
            idle_steps < idle,
            "no end after {idle} steps in which no guest took a completion"
        );
        assert!(steps < all, "no end after {all} steps");
    }
}

/// Value of `descheduled` for an actor of a process that is held.
const HELD_UNTIL: Duration = Duration::MAX;

/// Step time in nanoseconds, and maximum number of steps between two switches, after [`Engine::charge_only_calls`].
const QUICK_STEP: u64 = 4;
const QUICK_STICKINESS: u64 = 64;

/// Number of last steps that a report contains.
const LAST_STEPS: usize = 200;

type Stack = Generator<'static, (), Yield>;

/// Reason why an actor yields.
#[derive(Clone, Copy, Debug)]
enum Yield {
    Turn,
    Wait(Option<Duration>),
    Ended,
}

#[derive(Debug)]
struct Actor {
    name: String,
    state: State,
    /// Number of the process to which this thread belongs.
    process: u64,
    /// Time from which the actor may run again.
    descheduled: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Ready,
    /// Waits until a time, or until the effect counter differs from `seen`.
    Waits {
        until: Option<Duration>,
        seen: u64,
    },
    Ended,
}

/// Scheduling parameters, which the seed chooses.
#[derive(Clone, Copy, Debug)]
struct SchedulingParameters {
    /// Average duration of a step, in nanoseconds.
    step: u64,
    /// Average number of steps between two switches.
    stickiness: u64,
    /// Bound for kinds of steps that always cause a switch: those whose value in `heat` is below it.
    hot: u64,
    /// Random value from 0 to 3 for each kind of step, two bits each.
    heat: u64,
    /// Average number of steps between two long preemptions; 0 for none.
    preemption_interval: u64,
    /// Longest duration of a long preemption, in nanoseconds.
    preemption_max: u64,
    /// Average number of stores for each delayed store; 0 for no delayed stores.
    late: u64,
}

impl SchedulingParameters {
    fn random(rng: &mut Rng) -> Self {
        let pick = |rng: &mut Rng, of: &[u64]| of[rng.below(of.len() as u64) as usize];
        Self {
            step: pick(rng, &[20, 60, 200, 1000]),
            stickiness: pick(rng, &[1, 2, 8, 64, 500]),
            hot: pick(rng, &[0, 0, 1, 2]),
            heat: rng.next_u64(),
            preemption_interval: pick(rng, &[0, 300, 3000, 30_000]),
            preemption_max: pick(rng, &[20_000, 2_000_000, 200_000_000]),
            late: pick(rng, &[0, 1, 2, 8]),
        }
    }
}

/// Returns a number below `bound` from the lowest 16 bits of `random`. `bound` must be less than 65,536.
const fn share(random: u64, bound: u64) -> u64 {
    ((random & 0xFFFF) * bound) >> 16
}

/// State of a simulation, without the actors' stacks.
#[derive(Debug)]
struct Core {
    rng: Rng,
    parameters: SchedulingParameters,
    now: u64,
    limits: StepLimits,
    steps: u64,
    /// Number of steps when a guest last took a completion.
    last_completion_step: u64,
    commands: u64,
    /// Effect counter: number of steps that may be visible to waiting actors.
    effects: u64,
    /// Value of `effects` when all waiting actors were last polled.
    polled_effects: u64,
    actors: Vec<Actor>,
    processes: u64,
    last: VecDeque<(u64, usize, ActorEvent)>,
}

/// Scheduler of a thread.
pub(crate) struct Engine {
    core: RefCell<Core>,
    /// New actors, for which the scheduler has not created a stack yet.
    started: RefCell<Vec<ActorWork>>,
    current: Cell<Option<usize>>,
}

thread_local! {
    static ENGINE: Cell<Option<&'static Engine>> = const { Cell::new(None) };
}

/// A process that was killed, but has not ended completely.
#[derive(Debug)]
#[must_use = "others wait for its end"]
pub(crate) struct DyingProcess(u64);

impl DyingProcess {
    /// Ends the process completely. After this, none of its state remains.
    pub(crate) fn end(self) {
        sockets::end_process(self.0);
    }
}

/// A process: a group of actors that can be killed together.
#[derive(Debug)]
pub(crate) struct Process(u64);

impl Process {
    /// Returns the number of the process, which no other process of the simulation has.
    pub(crate) const fn number(&self) -> u64 {
        self.0
    }
}

/// Statistics of a successful simulation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Outcome {
    /// Number of steps of all actors.
    pub(crate) steps: u64,
    /// Number of commands that functions have read from their guests' queues.
    pub(crate) commands: u64,
    /// Simulated time.
    pub(crate) time: Duration,
}

impl Engine {
    /// Creates the calling thread's scheduler, which lives as long as the thread.
    pub(crate) fn install() -> &'static Self {
        let engine: &'static Self = Box::leak(Box::new(Self {
            core: RefCell::new(Core::new(0)),
            started: RefCell::default(),
            current: Cell::new(None),
        }));
        simulation::install(engine);
        ENGINE.set(Some(engine));
        engine
    }

    /// Returns the calling thread's scheduler; `None` if the thread has none.
    pub(crate) fn of_thread() -> Option<&'static Self> {
        ENGINE.get()
    }

    /// Runs `main` and all actors that `main` starts, until all actors have ended.
    ///
    /// # Panics
    /// An actor panics, all actors wait for each other, or the simulation exceeds the maximum number of steps.
    pub(crate) fn run(
        &self,
        seed: u64,
        less: OmittedParts,
        main: impl FnOnce() + Send + 'static,
    ) -> Outcome {
        self.run_with_limits(StepLimits::DEFAULT, seed, less, main)
    }

    fn run_with_limits(
        &self,
        limits: StepLimits,
        seed: u64,
        less: OmittedParts,
        main: impl FnOnce() + Send + 'static,
    ) -> Outcome {
        let mut core = Core {
            limits,
            ..Core::new(seed)
        };
        if less.no_preemption {
            core.parameters.preemption_interval = 0;
        }
        if less.no_late_stores {
            core.parameters.late = 0;
        }
        *self.core.borrow_mut() = core;
        store_buffers::clear();
        costs::clear();
        self.start("main", Box::new(main));
        let mut stacks: Vec<Stack> = Vec::new();
        loop {
            for work in self.started.take() {
                stacks.push(Gn::new_opt(STACK, move || {
                    work();
                    Yield::Ended
                }));
            }
            let Some(next) = self.core.borrow_mut().next() else {
                break;
            };
            self.current.set(Some(next));
            let ended = stacks[next].resume().unwrap_or(Yield::Ended);
            self.current.set(None);
            if matches!(ended, Yield::Ended) {
                store_buffers::drain(next);
            }
            self.core.borrow_mut().on_yield(next, ended);
        }
        for stack in stacks {
            // The stack of a killed process is not unwound, so that no destructors run.
            if !stack.is_done() {
                std::mem::forget(stack);
            }
        }
        self.core.borrow().progress()
    }

    /// Starts an actor in a new process, and returns the process.
    pub(crate) fn start_process(
        &self,
        name: &str,
        work: impl FnOnce() + Send + 'static,
    ) -> Process {
        let process = self.with_core(|core| {
            core.processes += 1;
            core.processes
        });
        self.add(name, process, Box::new(work));
        Process(process)
    }

    /// Kills all actors of a process at their current steps. Their delayed stores become visible.
    pub(crate) fn kill(&self, process: Process) {
        self.kill_before_drive(process).end();
    }

    /// Kills a process like [`Self::kill`], but delays its complete end: the kernel has closed the sockets of the process,
    /// and not its drive yet.
    pub(crate) fn kill_before_drive(&self, Process(process): Process) -> DyingProcess {
        let killed = self.with_core(|core| {
            core.effects += 1;
            let actors = core.actors.iter_mut().enumerate();
            let its = actors.filter(|(_, actor)| actor.process == process);
            its.map(|(number, actor)| {
                actor.state = State::Ended;
                number
            })
            .collect::<Vec<_>>()
        });
        for actor in killed {
            store_buffers::drain(actor);
        }
        drives::end_process(process);
        files::end_process(process);
        sockets::close_all(process);
        DyingProcess(process)
    }

    /// Suspends a process for `time`: its actors stop at their current steps.
    pub(crate) fn suspend(&self, process: &Process, time: Duration) {
        let until = self.with_core(|core| Duration::from_nanos(core.now) + time);
        self.deschedule(process, until);
    }

    /// Suspends a process until [`Self::release`]: its actors stop at their current steps. Their delayed stores become
    /// visible.
    pub(crate) fn hold(&self, process: &Process) {
        for actor in self.deschedule(process, HELD_UNTIL) {
            store_buffers::drain(actor);
        }
    }

    /// Resumes a held process.
    pub(crate) fn release(&self, process: &Process) {
        self.deschedule(process, Duration::ZERO);
    }

    /// Prevents the actors of a process from running until a given time. Returns the numbers of the actors.
    fn deschedule(&self, Process(process): &Process, until: Duration) -> Vec<usize> {
        self.with_core(|core| {
            core.effects += 1;
            let actors = core.actors.iter_mut().enumerate();
            let its = actors.filter(|(_, actor)| actor.process == *process);
            its.map(|(number, actor)| {
                actor.descheduled = until;
                number
            })
            .collect()
        })
    }

    fn add(&self, name: &str, process: u64, work: ActorWork) {
        self.started.borrow_mut().push(work);
        self.with_core(|core| {
            core.effects += 1;
            core.actors.push(Actor {
                name: name.to_owned(),
                state: State::Ready,
                process,
                descheduled: Duration::ZERO,
            });
        });
    }

    /// Makes steps take almost no time, and prevents long preemptions. From now on, mainly calls with a [cost](costs)
    /// advance the clock.
    pub(crate) fn charge_only_calls(&self) {
        self.with_core(|core| {
            core.parameters = SchedulingParameters {
                step: QUICK_STEP,
                stickiness: core.parameters.stickiness.min(QUICK_STICKINESS),
                preemption_interval: 0,
                ..core.parameters
            };
        });
    }

    /// Returns the longest time for which an actor can be preempted.
    pub(crate) fn max_preemption(&self) -> Duration {
        let SchedulingParameters {
            preemption_interval: desched,
            preemption_max: desched_max,
            ..
        } = self.with_core(|core| core.parameters);
        Duration::from_nanos(if desched == 0 { 0 } else { desched_max })
    }

    /// Returns the last steps as text: one line for each step, with time and actor.
    pub(crate) fn trace(&self) -> String {
        let Ok(core) = self.core.try_borrow() else {
            return String::new();
        };
        let mut text = String::new();
        for (now, actor, ActorEvent { step, numbers }) in &core.last {
            let name = core.actors.get(*actor).map_or("?", |actor| &actor.name);
            let [a, b] = numbers;
            let _infallible = writeln!(
                text,
                "{now:>14} ns  {actor:>2} {name:<18} {step:?} {a:#x} {b:#x}"
            );
        }
        text
    }

    /// Returns the state of all actors as text, for a report.
    pub(crate) fn actors(&self) -> String {
        let Ok(core) = self.core.try_borrow() else {
            return String::new();
        };
        let mut text = String::new();
        for (number, actor) in core.actors.iter().enumerate() {
            let _infallible = writeln!(text, "{number:>2} {:<18} {:?}", actor.name, actor.state);
        }
        text
    }

    /// Returns the statistics so far. While the engine records a step, all numbers are zero, since the core is borrowed.
    pub(crate) fn progress(&self) -> Outcome {
        let core = self.core.try_borrow();
        core.map(|core| core.progress()).unwrap_or_default()
    }
}

impl Core {
    fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed ^ 0x5EED);
        Self {
            parameters: SchedulingParameters::random(&mut rng),
            rng,
            now: 0,
            limits: StepLimits::DEFAULT,
            steps: 0,
            last_completion_step: 0,
            commands: 0,
            effects: 0,
            polled_effects: 0,
            actors: Vec::new(),
            processes: 0,
            last: VecDeque::with_capacity(LAST_STEPS),
        }
    }

    /// Returns the statistics so far.
    fn progress(&self) -> Outcome {
        Outcome {
            steps: self.steps,
            commands: self.commands,
            time: Duration::from_nanos(self.now),
        }
    }

    /// Records a step of an actor. Returns true if the scheduler must switch to another actor.
    fn step(&mut self, actor: usize, event: ActorEvent) -> bool {
        if self.last.len() == LAST_STEPS {
            self.last.pop_front();
        }
        self.last.push_back((self.now, actor, event));
        self.steps += 1;
        if event.step == ActorStep::GuestTakes {
            self.last_completion_step = self.steps;
        }
        self.commands += u64::from(event.step == ActorStep::ReadEntry);
        let random = self.rng.next_u64();
        self.now += 1 + share(random, 2 * self.parameters.step);
        self.effects += u64::from(event.step.has_effect());
        let SchedulingParameters {
            stickiness,
            hot,
            heat,
            preemption_interval: desched,
            preemption_max: desched_max,
            ..
        } = self.parameters;
        if desched > 0 && share(random >> 16, desched) == 0 {
            // The exponent is uniformly distributed, so that short times are as frequent as long times.
            let bits = self.rng.below(u64::from(desched_max.ilog2()));
            let time = self.rng.below(2 << bits);
            self.actors[actor].descheduled = Duration::from_nanos(self.now + time);
            return true;
        }
        let is_hot = hot > 0 && (heat >> (2 * (event.step as u64 % 32)) & 3) < hot;
        is_hot || share(random >> 32, stickiness) == 0
    }

    /// Updates the state of an actor that has yielded.
    fn on_yield(&mut self, actor: usize, reason: Yield) {
        self.actors[actor].state = match reason {
            Yield::Turn => State::Ready,
            Yield::Wait(until) => State::Waits {
                until,
                seen: self.effects,
            },
            Yield::Ended => {
                self.effects += 1;
                State::Ended
            }
        };
    }

    /// Chooses the next actor, and advances the clock until an actor can run. Returns `None` if all actors have ended.
    ///
    /// # Panics
    /// All actors wait without a timeout.
    fn next(&mut self) -> Option<usize> {
        loop {
            let now = Duration::from_nanos(self.now);
            let can = |actor: &Actor| {
                actor.descheduled <= now
                    && match actor.state {
                        State::Ready => true,
                        State::Waits { until, seen } => {
                            seen != self.effects || until.is_some_and(|until| until <= now)
                        }
                        State::Ended => false,
                    }
            };
            let count = self.actors.iter().filter(|actor| can(actor)).count();
            if count > 0 {
                let nth = self.rng.below(count as u64) as usize;
                let mut able = (0..self.actors.len()).filter(|index| can(&self.actors[*index]));
                return able.nth(nth);
            }
            if self.actors.iter().all(|actor| actor.state == State::Ended) {
                return None;
            }
            // Before the clock advances, all waiting actors are polled once more.
            if self.effects != self.polled_effects {
                self.effects += 1;
                self.polled_effects = self.effects;
                continue;
            }
            let able = self
                .actors
                .iter()
                .filter(|actor| actor.descheduled < HELD_UNTIL);
            let ends = able.filter_map(|actor| match actor.state {
                State::Ready => Some(actor.descheduled),
                State::Waits { until, .. } if actor.descheduled > now => {
                    Some(until.map_or(actor.descheduled, |until| until.max(actor.descheduled)))
                }
                State::Waits { until, .. } => until,
                State::Ended => None,
            });
            let end = ends.min().expect("all actors wait for each other");
            self.now = self.now.max(end.as_nanos() as u64);
        }
    }
}

impl Engine {
    fn with_core<T>(&self, call: impl FnOnce(&mut Core) -> T) -> T {
        call(&mut self.core.borrow_mut())
    }

    /// Yields to other actors. Does nothing if the caller is not an actor.
    fn yield_to_actors(&self, reason: Yield) {
        if self.current.get().is_some() {
            #[expect(
                deprecated,
                reason = "the handle that replaces it cannot reach the data path"
            )]
            generator::yield_with(reason);
        }
    }
}

impl Simulator for Engine {
    fn now(&self) -> Duration {
        Duration::from_nanos(self.core.borrow().now)
    }

    fn actor(&self) -> usize {
        self.current.get().unwrap_or(usize::MAX)
    }

    fn process(&self) -> u64 {
        let actor = self.current.get();
        actor.map_or(0, |actor| self.with_core(|core| core.actors[actor].process))
    }

    fn turn(&self, event: ActorEvent) {
        let Some(actor) = self.current.get() else {
            return;
        };
        let (others, seen, limits, steps, idle) = self.with_core(|core| {
            let others = core.step(actor, event);
            let late = core.parameters.late > 0 && core.steps.is_multiple_of(5);
            let seen = late.then(|| core.rng.below(core.actors.len() as u64));
            let idle = core.steps - core.last_completion_step;
            (others, seen, core.limits, core.steps, idle)
        });
        // Checked here, where the core is not borrowed: the report of a failure borrows it.
        limits.check(steps, idle);
        if let Some(seen) = seen {
            store_buffers::drain_one(seen as usize);
        }
        if others {
            self.yield_to_actors(Yield::Turn);
        }
    }

    fn acted(&self) {
        self.with_core(|core| core.effects += 1);
    }

    fn wait(&self, until: Option<Duration>) {
        self.yield_to_actors(Yield::Wait(until));
    }

    fn start(&self, name: &str, work: ActorWork) {
        self.add(name, self.process(), work);
    }

    fn random(&self) -> u64 {
        self.with_core(|core| core.rng.next_u64())
    }

    fn delays_store(&self) -> bool {
        self.with_core(|core| core.parameters.late > 0 && core.rng.below(core.parameters.late) == 0)
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    const LIMITS: StepLimits = StepLimits {
        idle: 100_000,
        all: 3_000_000,
    };

    fn step(step: ActorStep) {
        simulation::turn(step, [0; 2]);
    }

    /// Runs a simulation in which actors are only preempted for a few steps. Returns the outcome, or the text of its panic.
    fn run(main: impl FnOnce() + Send + 'static) -> Result<Outcome, String> {
        let engine = Engine::install();
        let less = OmittedParts {
            no_preemption: true,
            ..OmittedParts::default()
        };
        let run = AssertUnwindSafe(|| engine.run_with_limits(LIMITS, 1, less, main));
        catch_unwind(run).map_err(|panic| match panic.downcast::<String>() {
            Ok(text) => *text,
            Err(_) => "another panic".to_owned(),
        })
    }

    /// A guest whose commands take many steps, beside a poller that polls all the time. The guest ends after `completions`
    /// completions.
    fn guest_and_poller(completions: u32) {
        const STEPS: u32 = 20_000;
        let ended = Arc::new(AtomicBool::new(false));
        let ends = ended.clone();
        let guest = move || {
            for _ in 0..completions {
                (0..STEPS).for_each(|_| step(ActorStep::Load));
                step(ActorStep::GuestTakes);
            }
            ends.store(true, Ordering::Relaxed);
        };
        let engine = Engine::of_thread().expect("an engine");
        engine.start("guest", Box::new(guest));
        while !ended.load(Ordering::Relaxed) {
            step(ActorStep::LookForCompletion);
        }
    }

    #[test]
    fn actors_that_only_react_to_each_other_are_found() {
        fn spin() {
            loop {
                step(ActorStep::Exchange);
            }
        }
        let world = || {
            let engine = Engine::of_thread().expect("an engine");
            engine.start("other", Box::new(spin));
            spin();
        };
        let error = run(world).expect_err("it never ends");
        assert!(error.contains("no guest took a completion"), "{error}");
    }

    #[test]
    fn a_world_whose_guest_goes_on_ends_after_many_steps() {
        let outcome = run(|| guest_and_poller(20)).expect("it ends");
        assert!(outcome.steps > 3 * LIMITS.idle, "{outcome:?}");
    }

    #[test]
    fn a_guest_that_never_ends_is_found() {
        let error = run(|| guest_and_poller(u32::MAX)).expect_err("it never ends");
        assert!(error.contains("3000000 steps"), "{error}");
    }
}
