//! Durations, on the simulated clock, of calls that depend on a guest, a client or a file.
//!
//! By default, a call takes the time of its steps. A scenario sets longer durations for signals to some eventfds, for
//! accesses to memory of a file, and for deallocations. While an actor spends such a duration, all other actors run, as on
//! a machine with enough processors.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::os::fd::RawFd;
use std::time::Duration;

use super::{actor, wait_for};

thread_local! {
    static COSTS: RefCell<SimulatedCosts> = const { RefCell::new(SimulatedCosts::NONE) };
}

#[derive(Debug)]
struct SimulatedCosts {
    /// Processor time of each signal, by the eventfd's descriptor.
    signals: BTreeMap<RawFd, Duration>,
    memory: Vec<SlowMemory>,
    /// Processor time to deallocate one MiB.
    deallocated_mib: Duration,
    /// Actors that are blocked in the kernel.
    blocked: BTreeSet<usize>,
    /// True if all queues share one poller.
    shares_one_poller: bool,
}

/// Range of a memory file in which each access blocks in the kernel for some time.
#[derive(Debug)]
struct SlowMemory {
    inode: u64,
    range: Range<u64>,
    time: Duration,
}

impl SimulatedCosts {
    const NONE: Self = Self {
        signals: BTreeMap::new(),
        memory: Vec::new(),
        deallocated_mib: Duration::ZERO,
        blocked: BTreeSet::new(),
        shares_one_poller: false,
    };
}

fn with<T>(call: impl FnOnce(&mut SimulatedCosts) -> T) -> T {
    COSTS.with_borrow_mut(call)
}

/// Removes all durations and other settings.
pub fn clear() {
    with(|costs| *costs = SimulatedCosts::NONE);
}

/// Sets the processor time of each signal to the eventfd with this descriptor.
pub fn slow_signals(fd: RawFd, time: Duration) {
    with(|costs| costs.signals.insert(fd, time));
}

/// Makes each access to a range of a memory file block in the kernel for `time`, as while a hole is punched nearby.
pub fn slow_memory(inode: u64, range: Range<u64>, time: Duration) {
    with(|costs| costs.memory.push(SlowMemory { inode, range, time }));
}

/// Sets the processor time to deallocate one MiB of memory.
pub fn slow_deallocation(mib: Duration) {
    with(|costs| costs.deallocated_mib = mib);
}

/// Lets a single poller run all queues that share pollers.
pub fn share_one_poller() {
    with(|costs| costs.shares_one_poller = true);
}

/// Returns the number of pollers for queues that share pollers.
#[must_use]
pub fn shared_pollers() -> usize {
    with(|costs| if costs.shares_one_poller { 1 } else { 2 })
}

/// Lets the actor use its processor for `time`.
pub fn work(time: Duration) {
    if !time.is_zero() {
        let _spent = wait_for(Some(time), || None::<()>);
    }
}

/// Blocks the actor in the kernel for `time`.
pub fn block(time: Duration) {
    if time.is_zero() {
        return;
    }
    with(|costs| costs.blocked.insert(actor()));
    work(time);
    with(|costs| costs.blocked.remove(&actor()));
}

/// Returns whether an actor is blocked in the kernel.
#[must_use]
pub fn is_blocked(actor: i32) -> bool {
    usize::try_from(actor).is_ok_and(|actor| with(|costs| costs.blocked.contains(&actor)))
}

/// Spends the time to deallocate `bytes` bytes.
pub fn deallocates(bytes: u64) {
    let mib = with(|costs| costs.deallocated_mib);
    work(mib.mul_f64(bytes as f64 / f64::from(1 << 20)));
}

/// Spends the time to signal an eventfd.
pub(crate) fn signals(fd: RawFd) {
    let time = with(|costs| costs.signals.get(&fd).copied());
    work(time.unwrap_or_default());
}

/// Spends the time to access a range of a memory file.
pub(crate) fn accesses(inode: u64, range: &Range<u64>) {
    let time = with(|costs| {
        let mut slow = costs.memory.iter();
        let met = slow.find(|slow| {
            slow.inode == inode && slow.range.start < range.end && range.start < slow.range.end
        });
        met.map(|slow| slow.time)
    });
    block(time.unwrap_or_default());
}
