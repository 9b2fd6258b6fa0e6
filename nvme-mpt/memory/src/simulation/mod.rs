//! Seam between the data path and a simulator, which runs all actors of the data path on one thread.
//!
//! An actor is what would be a thread: a poller, a supervisor, a control thread, a guest. It lets others go on at each
//! access to memory that several of them use ([`turn`]), and where it cannot go on itself ([`wait`]). The simulator
//! owns the clock and all chance.
//!
//! Stores are delayed as by an x86-64 processor: each actor has a first-in-first-out buffer ([`stores`]) that it reads
//! through, and that a fence empties. So a fence that is missing is found.

pub mod atomics;
pub mod channel;
pub mod costs;
pub mod locks;
pub mod stores;
pub mod threads;

use std::cell::Cell;
use std::time::Duration;

use nvme_spec::cqe::Cqe;
use nvme_spec::ids::CommandId;
use nvme_spec::sqe::Sqe;

/// Work of an actor.
pub type Work = Box<dyn FnOnce() + Send>;

/// Requests of the data path to a simulator.
pub trait Simulator {
    /// Returns the time since the simulation began.
    fn now(&self) -> Duration;

    /// Returns the number of the actor that runs.
    fn actor(&self) -> usize;

    /// Returns the number of the process that the actor is a thread of.
    fn process(&self) -> u64;

    /// Lets others go on, before the actor does what `event` says.
    fn turn(&self, event: Event);

    /// Lets others go on until one of them did something, or until a moment. It may return early.
    fn wait(&self, until: Option<Duration>);

    /// Takes note that the actor did something that others may wait for.
    fn acted(&self);

    /// Starts an actor.
    fn start(&self, name: &str, work: Work);

    /// Returns a random number.
    fn random(&self) -> u64;

    /// Returns whether a store that is made now stays in its actor's buffer for some time.
    fn delays_store(&self) -> bool;
}

/// Kind of a step of an actor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// A word is loaded: its address.
    Load,
    /// A word is stored: its address, and the value.
    Store,
    /// All that the actor stored is seen before what it loads next.
    Fence,
    /// A word is exchanged.
    Swap,
    /// A word is compared and exchanged.
    Exchange,
    /// A word is added to, or raised.
    Add,
    /// A lock is taken.
    Lock,
    /// A channel is looked into.
    Receive,
    /// A value is sent through a channel.
    Send,
    /// An entry of a guest's Submission Queue is read: its index.
    ReadEntry,
    /// A completion is published: its Submission Queue and its Command Identifier.
    Complete,
    /// The first half of a completion is written: its index.
    HalfPublished,
    /// A command is written for a drive: its Command Identifier and its opcode.
    Submit,
    /// A drive's Completion Queue is looked into: the index.
    LookForCompletion,
    /// The half of a drive's completion that has the Phase Tag is read: its index.
    HalfTaken,
    /// A drive's register is read: its offset.
    ReadRegister,
    /// A drive's register is written: its offset.
    WriteRegister,
    /// A command is recorded in the live state: its slot and its Command Identifier.
    Record,
    /// A slot of the live state is marked: its number, and the mark.
    Mark,
    /// A file or folder is opened, or made.
    OpenFile,
    /// A file is read, or looked at: its number and the offset.
    ReadFile,
    /// A file is written: its number and the offset.
    WriteFile,
    /// A file or folder is synced: its number.
    SyncFile,
    /// A folder is made, or a file is renamed.
    ChangeFolder,
    /// A lock of a file is taken, let go or looked at: its number and the first byte.
    LockFile,
    /// A guest stores a doorbell: its value.
    GuestRings,
    /// A guest reads EventIdx, after it stored a doorbell: of this value.
    GuestReadsEventIdx,
    /// A guest takes a completion: its index and its Command Identifier.
    GuestTakes,
    /// A guest writes a command into a queue: its Command Identifier and its opcode.
    GuestSubmits,
}

impl Step {
    /// Returns whether others may have waited for it.
    #[must_use]
    pub const fn has_effect(self) -> bool {
        !matches!(
            self,
            Self::Load
                | Self::Lock
                | Self::Receive
                | Self::ReadEntry
                | Self::LookForCompletion
                | Self::HalfTaken
                | Self::ReadRegister
                | Self::ReadFile
                | Self::LockFile
        )
    }
}

/// A step of an actor that others can see, for a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// Kind of the step.
    pub step: Step,
    /// Its numbers, in the order that its kind has: a queue, a Command Identifier, a value.
    pub numbers: [u64; 2],
}

thread_local! {
    static SIMULATOR: Cell<Option<&'static dyn Simulator>> = const { Cell::new(None) };
}

/// Has a simulator run what the calling thread does from now on.
pub fn install(simulator: &'static dyn Simulator) {
    SIMULATOR.set(Some(simulator));
}

/// Calls the simulator, if the thread has one.
fn with<T>(call: impl FnOnce(&'static dyn Simulator) -> T) -> Option<T> {
    SIMULATOR.get().map(call)
}

/// Lets others go on, before the actor does what the arguments say.
#[inline]
pub fn turn(step: Step, numbers: [u64; 2]) {
    with(|simulator| simulator.turn(Event { step, numbers }));
}

/// Takes note that the actor did something that others may wait for.
pub fn acted() {
    with(Simulator::acted);
}

/// Takes note that the actor is about to do something that others may wait for, and that all it stored is seen first.
pub fn fence_and_act() {
    stores::drain_own();
    acted();
}

/// Posts a completion to a guest, or to a host: half of it first. Stores that came before it are seen first.
pub(crate) fn publishes(entry: Cqe) {
    let numbers = [entry.sqid().0.into(), entry.cid().0.into()];
    turn(Step::Complete, numbers);
    stores::drain_own();
}

/// Gives a command to a drive.
pub(crate) fn submits(entry: &Sqe, cid: CommandId) {
    turn(Step::Submit, [cid.0.into(), entry.opcode().into()]);
    stores::drain_own();
}

/// Lets others go on until one of them did something, or until a moment. It may return early.
///
/// # Panics
/// Without a simulator, as nobody else could do anything.
pub fn wait(until: Option<Duration>) {
    let simulator = SIMULATOR.get().expect("a wait needs a simulator");
    stores::drain(simulator.actor());
    simulator.wait(until);
}

/// Waits until `attempt` succeeds, for `time` at most if there is a bound. Returns its result.
pub fn wait_for<T>(time: Option<Duration>, mut attempt: impl FnMut() -> Option<T>) -> Option<T> {
    let until = time.map(|time| now().saturating_add(time));
    loop {
        if let Some(result) = attempt() {
            return Some(result);
        }
        if until.is_some_and(|until| now() >= until) {
            return None;
        }
        wait(until);
    }
}

/// Returns the number of the process that the actor is a thread of.
#[must_use]
pub fn process() -> u64 {
    with(Simulator::process).unwrap_or_default()
}

/// Returns the number of the actor.
#[must_use]
pub fn actor() -> usize {
    with(Simulator::actor).unwrap_or_default()
}

/// Returns the time since the simulation began.
#[must_use]
pub fn now() -> Duration {
    with(Simulator::now).unwrap_or_default()
}

/// Returns a random number of the simulation.
#[must_use]
pub fn random() -> u64 {
    with(Simulator::random).unwrap_or_default()
}
