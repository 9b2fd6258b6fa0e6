//! Interface between the data path and a simulator, which runs all actors of the data path on one thread.
//!
//! An actor stands for a thread: a poller, a drive monitor, a control thread, or a guest. It lets other actors run at each
//! access to memory that several actors use ([`turn`]), and when it has to wait ([`wait`]). The simulator provides the
//! clock and all random decisions.
//!
//! Stores are delayed as on an x86-64 processor: each actor has a first-in-first-out store buffer ([`store_buffers`]). The
//! actor's own loads see the stores in the buffer, and a fence makes them visible to all actors. So a missing fence is
//! detected.

pub mod atomics;
pub mod channel;
pub mod costs;
pub mod locks;
pub mod store_buffers;
pub mod threads;

use std::cell::Cell;
use std::time::Duration;

use nvme_spec::cqe::Cqe;
use nvme_spec::ids::CommandId;
use nvme_spec::sqe::Sqe;

/// Work of an actor.
pub type ActorWork = Box<dyn FnOnce() + Send>;

/// Interface of a simulator.
pub trait Simulator {
    /// Returns the time since the simulation began.
    fn now(&self) -> Duration;

    /// Returns the number of the actor that runs.
    fn actor(&self) -> usize;

    /// Returns the number of the process to which the running actor belongs.
    fn process(&self) -> u64;

    /// Lets other actors run before the running actor does the step `event`.
    fn turn(&self, event: ActorEvent);

    /// Lets other actors run until one of them acts, or until the moment `until`. May return early.
    fn wait(&self, until: Option<Duration>);

    /// Records that the running actor did something that other actors may wait for.
    fn acted(&self);

    /// Starts an actor with this name and work.
    fn start(&self, name: &str, work: ActorWork);

    /// Returns a random number.
    fn random(&self) -> u64;

    /// Returns whether the next store stays in its actor's store buffer for some time.
    fn delays_store(&self) -> bool;
}

/// Kind of a step of an actor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActorStep {
    /// A word is loaded: its address.
    Load,
    /// A word is stored: its address, and the value.
    Store,
    /// A fence: all earlier stores of the actor become visible before its later loads are executed.
    Fence,
    /// A word is exchanged.
    Swap,
    /// A word is compared and exchanged.
    Exchange,
    /// A value is added to a word, or the word is raised to a value.
    Add,
    /// A lock is taken.
    Lock,
    /// A channel is polled.
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
    /// A drive's Completion Queue is polled: the index.
    LookForCompletion,
    /// The half of a drive's completion that has the Phase Tag is read: its index.
    HalfTaken,
    /// A drive's register is read: its offset.
    ReadRegister,
    /// A drive's register is written: its offset.
    WriteRegister,
    /// A command is recorded for in-flight tracking: its slot and its Command Identifier.
    Record,
    /// A slot's mark is stored: the slot and the mark.
    Mark,
    /// A file or directory is opened or created; the numbers are unused.
    OpenFile,
    /// A file or its metadata is read: its number and the offset.
    ReadFile,
    /// A file is written: its number and the offset.
    WriteFile,
    /// A file or directory is synced: its number.
    SyncFile,
    /// A directory is created, or a file is renamed.
    ChangeFolder,
    /// A lock of a file is taken, released or tested: its number and the first byte.
    LockFile,
    /// A guest stores a doorbell: its value.
    GuestRings,
    /// A guest reads EventIdx after storing a doorbell: the doorbell's value.
    GuestReadsEventIdx,
    /// A guest takes a completion: its index and its Command Identifier.
    GuestTakes,
    /// A guest writes a command into a queue: its Command Identifier and its opcode.
    GuestSubmits,
}

impl ActorStep {
    /// Returns whether other actors may wait for such a step.
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

/// A step of an actor that other actors can notice, for a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ActorEvent {
    /// Kind of the step.
    pub step: ActorStep,
    /// Numbers of the step, as its kind defines them, such as a queue, a Command Identifier, or a value.
    pub numbers: [u64; 2],
}

thread_local! {
    static SIMULATOR: Cell<Option<&'static dyn Simulator>> = const { Cell::new(None) };
}

/// Installs the simulator that from now on controls the calling thread.
pub fn install(simulator: &'static dyn Simulator) {
    SIMULATOR.set(Some(simulator));
}

/// Calls the simulator, if one controls this thread.
fn with<T>(call: impl FnOnce(&'static dyn Simulator) -> T) -> Option<T> {
    SIMULATOR.get().map(call)
}

/// Lets other actors run before the running actor does a step.
#[inline]
pub fn turn(step: ActorStep, numbers: [u64; 2]) {
    with(|simulator| simulator.turn(ActorEvent { step, numbers }));
}

/// Records that the running actor did something that other actors may wait for.
pub fn acted() {
    with(Simulator::acted);
}

/// Makes all stores of the running actor visible, and records that it did something that other actors may wait for.
pub fn fence_and_act() {
    store_buffers::drain_own();
    acted();
}

/// Makes earlier stores of the running actor visible, before it publishes a completion.
pub(crate) fn publishes(entry: Cqe) {
    let numbers = [entry.sqid().0.into(), entry.cid().0.into()];
    turn(ActorStep::Complete, numbers);
    store_buffers::drain_own();
}

/// Makes earlier stores of the running actor visible, before it submits a command to a drive.
pub(crate) fn submits(entry: &Sqe, cid: CommandId) {
    turn(ActorStep::Submit, [cid.0.into(), entry.opcode().into()]);
    store_buffers::drain_own();
}

/// Lets other actors run until one of them acts, or until the moment `until`. May return early.
///
/// # Panics
/// If there is no simulator, because then no other actor could act.
pub fn wait(until: Option<Duration>) {
    let simulator = SIMULATOR.get().expect("a wait needs a simulator");
    store_buffers::drain(simulator.actor());
    simulator.wait(until);
}

/// Waits until `attempt` returns a result, for at most `time` if it is set. Returns the result.
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

/// Returns the number of the process to which the running actor belongs.
#[must_use]
pub fn process() -> u64 {
    with(Simulator::process).unwrap_or_default()
}

/// Returns the number of the actor that runs.
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
