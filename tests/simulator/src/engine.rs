//! Scheduler of a simulation: one thread, one clock, one seed.
//!
//! Each actor has a stack of its own ([`generator`]). At each step that others can see, it may lose its turn to another
//! one. An actor that waits is looked at again after others did something, and when its time is over. The clock moves
//! with each step, and jumps where nobody has anything to do.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::fmt::Write as _;
use std::time::Duration;

use generator::{Generator, Gn};
use nvme_mpt::memory::files::simulated as files;
use nvme_mpt::memory::simulation::{
    self, ActorEvent, ActorStep, ActorWork, Simulator, costs, stores,
};
use nvme_mpt_lease_protocol::simulated as sockets;
use nvme_mpt_tests::rng::Rng;
use nvme_software::simulated as drives;

use crate::runs::Less;

/// Words of an actor's stack.
const STACK: usize = 64 << 10;

/// Steps after which a simulation is taken for one that never ends.
const STEPS_MAX: u64 = 100_000_000;

/// Moment at which an actor that is held has a processor again.
const HELD: Duration = Duration::MAX;

/// Time of a step where calls alone are charged, in nanoseconds, and the most steps per change of the actor.
const QUICK_STEP: u64 = 4;
const QUICK_STICKINESS: u64 = 64;

/// Steps that are kept for a report.
const LAST_STEPS: usize = 200;

type Stack = Generator<'static, (), Yield>;

/// Reason for which an actor lets others go on.
#[derive(Clone, Copy, Debug)]
enum Yield {
    Turn,
    Wait(Option<Duration>),
    Ended,
}

/// An actor, as the scheduler sees it.
#[derive(Debug)]
struct Actor {
    name: String,
    state: State,
    /// The process that it is a thread of.
    process: u64,
    /// When it has a processor again.
    descheduled: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Ready,
    /// Until a moment, or until the others' effects are more than these.
    Waits {
        until: Option<Duration>,
        seen: u64,
    },
    Ended,
}

/// Habits of a simulation's scheduler, by its seed.
#[derive(Clone, Copy, Debug)]
struct Habits {
    /// Time of a step, in nanoseconds.
    step: u64,
    /// Steps per change of the actor.
    stickiness: u64,
    /// Quarters of the kinds of steps at which the actor always changes.
    hot: u64,
    /// Quarter of each kind, two bits each.
    heat: u64,
    /// Steps per loss of the processor for longer; never for 0.
    desched: u64,
    /// Longest such time, in nanoseconds.
    desched_max: u64,
    /// Stores per store that is seen late; never for 0.
    late: u64,
}

impl Habits {
    fn of(rng: &mut Rng) -> Self {
        let pick = |rng: &mut Rng, of: &[u64]| of[rng.below(of.len() as u64) as usize];
        Self {
            step: pick(rng, &[20, 60, 200, 1000]),
            stickiness: pick(rng, &[1, 2, 8, 64, 500]),
            hot: pick(rng, &[0, 0, 1, 2]),
            heat: rng.next_u64(),
            desched: pick(rng, &[0, 300, 3000, 30_000]),
            desched_max: pick(rng, &[20_000, 2_000_000, 200_000_000]),
            late: pick(rng, &[0, 1, 2, 8]),
        }
    }
}

/// Returns a number below `bound`, which is less than 65,536, made of the lowest 16 random bits.
const fn share(random: u64, bound: u64) -> u64 {
    ((random & 0xFFFF) * bound) >> 16
}

/// All of a simulation but its actors' stacks.
#[derive(Debug)]
struct Core {
    rng: Rng,
    habits: Habits,
    now: u64,
    steps: u64,
    commands: u64,
    /// Steps that others may have to see.
    effects: u64,
    /// Effects after which all that wait have looked.
    looked: u64,
    actors: Vec<Actor>,
    processes: u64,
    last: VecDeque<(u64, usize, ActorEvent)>,
}

/// The scheduler of the thread.
pub(crate) struct Engine {
    core: RefCell<Core>,
    /// Actors that were started, and have no stack in the scheduler yet.
    started: RefCell<Vec<ActorWork>>,
    current: Cell<Option<usize>>,
}

thread_local! {
    static ENGINE: Cell<Option<&'static Engine>> = const { Cell::new(None) };
}

/// A process that was killed, and has not ended yet.
#[derive(Debug)]
#[must_use = "others wait for its end"]
pub(crate) struct Dying(u64);

impl Dying {
    /// Ends it: nothing of it is left.
    pub(crate) fn end(self) {
        sockets::end_process(self.0);
    }
}

/// A process: actors that can end together.
#[derive(Debug)]
pub(crate) struct Process(u64);

impl Process {
    /// Its number, which no other process of the simulation has.
    pub(crate) const fn number(&self) -> u64 {
        self.0
    }
}

/// Outcome of a simulation without a failure.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Outcome {
    /// Steps of all actors.
    pub(crate) steps: u64,
    /// Commands that functions read from their guests' queues.
    pub(crate) commands: u64,
    /// Simulated time.
    pub(crate) time: Duration,
}

impl Engine {
    /// The thread's scheduler. There is one for the life of the thread.
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

    /// The calling thread's scheduler, if it has one.
    pub(crate) fn of_thread() -> Option<&'static Self> {
        ENGINE.get()
    }

    /// Runs `main` and all actors that it starts, until all have ended.
    ///
    /// # Panics
    /// If an actor panics, if all wait for each other, or if there is no end.
    pub(crate) fn run(
        &self,
        seed: u64,
        less: Less,
        main: impl FnOnce() + Send + 'static,
    ) -> Outcome {
        let mut core = Core::new(seed);
        if less.no_preemption {
            core.habits.desched = 0;
        }
        if less.no_late_stores {
            core.habits.late = 0;
        }
        *self.core.borrow_mut() = core;
        stores::clear();
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
                stores::drain(next);
            }
            self.core.borrow_mut().yielded(next, ended);
        }
        for stack in stacks {
            // What a process that was killed had on its stacks is not cleared away.
            if !stack.is_done() {
                std::mem::forget(stack);
            }
        }
        self.core.borrow().progress()
    }

    /// Starts an actor of a process of its own, and returns the process.
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

    /// Ends all actors of a process at the step that they are at. What they stored is seen.
    pub(crate) fn kill(&self, process: Process) {
        self.kill_but_its_drive(process).end();
    }

    /// As [`Self::kill`], but the process has not ended for others: the kernel has closed its sockets, and not its drive yet.
    pub(crate) fn kill_but_its_drive(&self, Process(process): Process) -> Dying {
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
            stores::drain(actor);
        }
        drives::end_process(process);
        files::end_process(process);
        sockets::close_all(process);
        Dying(process)
    }

    /// Has a process stand still for some time, at the steps that its actors are at.
    pub(crate) fn suspend(&self, process: &Process, time: Duration) {
        let until = self.with_core(|core| Duration::from_nanos(core.now) + time);
        self.deschedule(process, until);
    }

    /// Has a process stand still until it is [released](Self::release), at the steps that its actors are at. What they
    /// stored is seen.
    pub(crate) fn hold(&self, process: &Process) {
        for actor in self.deschedule(process, HELD) {
            stores::drain(actor);
        }
    }

    /// Lets a process that was held go on.
    pub(crate) fn release(&self, process: &Process) {
        self.deschedule(process, Duration::ZERO);
    }

    /// Has the actors of a process, whose numbers it returns, lose their processors until a moment.
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

    /// From now on, steps take hardly any time, and no actor loses its processor. So time goes by with calls that
    /// [cost](costs) it.
    pub(crate) fn charge_calls_alone(&self) {
        self.with_core(|core| {
            core.habits = Habits {
                step: QUICK_STEP,
                stickiness: core.habits.stickiness.min(QUICK_STICKINESS),
                desched: 0,
                ..core.habits
            };
        });
    }

    /// Returns the longest time for which an actor loses its processor.
    pub(crate) fn longest_absence(&self) -> Duration {
        let Habits {
            desched,
            desched_max,
            ..
        } = self.with_core(|core| core.habits);
        Duration::from_nanos(if desched == 0 { 0 } else { desched_max })
    }

    /// The last steps, one a line, with their time and actor.
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

    /// State of all actors, for a report.
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

    /// Returns what was done so far. While the engine notes a step, it returns zeroes.
    pub(crate) fn progress(&self) -> Outcome {
        let core = self.core.try_borrow();
        core.map(|core| core.progress()).unwrap_or_default()
    }
}

impl Core {
    fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed ^ 0x5EED);
        Self {
            habits: Habits::of(&mut rng),
            rng,
            now: 0,
            steps: 0,
            commands: 0,
            effects: 0,
            looked: 0,
            actors: Vec::new(),
            processes: 0,
            last: VecDeque::with_capacity(LAST_STEPS),
        }
    }

    /// Returns what was done so far.
    fn progress(&self) -> Outcome {
        Outcome {
            steps: self.steps,
            commands: self.commands,
            time: Duration::from_nanos(self.now),
        }
    }

    /// Takes note of a step of an actor. Returns whether another one goes on.
    fn step(&mut self, actor: usize, event: ActorEvent) -> bool {
        if self.last.len() == LAST_STEPS {
            self.last.pop_front();
        }
        self.last.push_back((self.now, actor, event));
        self.steps += 1;
        self.commands += u64::from(event.step == ActorStep::ReadEntry);
        let random = self.rng.next_u64();
        self.now += 1 + share(random, 2 * self.habits.step);
        self.effects += u64::from(event.step.has_effect());
        let Habits {
            stickiness,
            hot,
            heat,
            desched,
            desched_max,
            ..
        } = self.habits;
        if desched > 0 && share(random >> 16, desched) == 0 {
            // As many short times as long ones.
            let bits = self.rng.below(u64::from(desched_max.ilog2()));
            let time = self.rng.below(2 << bits);
            self.actors[actor].descheduled = Duration::from_nanos(self.now + time);
            return true;
        }
        let is_hot = hot > 0 && (heat >> (2 * (event.step as u64 % 32)) & 3) < hot;
        is_hot || share(random >> 32, stickiness) == 0
    }

    /// The actor goes on later.
    fn yielded(&mut self, actor: usize, reason: Yield) {
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

    /// Chooses the actor that goes on, and lets time pass until there is one. None if all have ended.
    ///
    /// # Panics
    /// If all wait, and nothing ends that.
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
            // Before time passes, all that wait look once more.
            if self.effects != self.looked {
                self.effects += 1;
                self.looked = self.effects;
                continue;
            }
            let able = self.actors.iter().filter(|actor| actor.descheduled < HELD);
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

    /// Lets others go on, if an actor runs at all.
    fn lets_go_on(&self, reason: Yield) {
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
        let (others, seen, steps) = self.with_core(|core| {
            let others = core.step(actor, event);
            let late = core.habits.late > 0 && core.steps.is_multiple_of(5);
            let seen = late.then(|| core.rng.below(core.actors.len() as u64));
            (others, seen, core.steps)
        });
        assert!(steps < STEPS_MAX, "no end after {STEPS_MAX} steps");
        if let Some(seen) = seen {
            stores::drain_one(seen as usize);
        }
        if others {
            self.lets_go_on(Yield::Turn);
        }
    }

    fn acted(&self) {
        self.with_core(|core| core.effects += 1);
    }

    fn wait(&self, until: Option<Duration>) {
        self.lets_go_on(Yield::Wait(until));
    }

    fn start(&self, name: &str, work: ActorWork) {
        self.add(name, self.process(), work);
    }

    fn random(&self) -> u64 {
        self.with_core(|core| core.rng.next_u64())
    }

    fn delays_store(&self) -> bool {
        self.with_core(|core| core.habits.late > 0 && core.rng.below(core.habits.late) == 0)
    }
}
