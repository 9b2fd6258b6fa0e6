//! The governor: part of a drive that busy members may fill while quiet ones use it, too.
//!
//! The one rule of sharing in time; who is next is the other one (`core.rs`: deficit round robin).
//!
//! A member is *light* while it has few and small commands outstanding ([`Class::is_heavy`]); its
//! commands go to the drive at once. All others are *heavy*: of those, the drive has at most the
//! *window* in flight, of all its queue pairs together. Pairs that wait share it; where a share would
//! be small, they have turns at all of it. A command that is larger goes to the drive in parts of that
//! size ([`split`](super::split)), as far as it can be split. Something is always in flight.
//!
//! While a light member is there, that holds for queue pairs that have one member, too: a drive that
//! is busy with what comes by another pair is not less busy. Otherwise they are not slowed down.
//!
//! How large the window may be depends on the drive: one that works serially makes a light command
//! wait for all that is in front of it, a parallel one does not until its channels are full. So the
//! window follows what light members see:
//!
//! - **Alone.** Every ten seconds, at a light command's arrival, heavy members pause for some light
//!   commands (for 50 ms at most): the median latency of those is what light members see alone.
//! - **Together.** Of every eight light commands, the median is compared with that. Beyond 2.25
//!   times as long, the window shrinks in proportion; else it grows by a thirty-second, but seldom
//!   to where it was too large. The median, not the slowest: drives have slow commands of their own,
//!   which are no reason to let them idle.
//! - **Nobody light.** A second after the last light command has completed there is no window.
//!
//! On a serial drive the window ends up at one command, of a size that takes it little longer than a
//! small one; on a parallel one, about where its channels are full.
//!
//! There is one governor per drive, as a drive's queue pairs share its channels.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use nvme_mpt::clock::{Ticks, ticks_in};
use nvme_mpt::spec::opcode::NvmOpcode;

/// The largest window: what keeps any drive busy.
pub(super) const WINDOW_MAX: u64 = 8 << 20;

/// The window that the first light member finds. It doubles until it proves too large.
const WINDOW_FIRST: u64 = 16 << 10;

/// Longest latency of light commands, relative to alone, in 256ths.
const LONGER: u64 = 256 * 9 / 4;

/// For how many medians the window stays below what has proved too large: what a light command meets
/// while that is tried again is to be rarer than one of a hundred.
const HOLD: u32 = 256;

/// Most commands that a light member has outstanding, and most bytes of each.
const LIGHT_COMMANDS: u32 = 4;
const LIGHT_BYTES: u64 = 16 << 10;

/// Kinds of light commands whose latency is compared: reads and writes, by how many the member has
/// outstanding.
const KINDS: usize = 2 * LIGHT_COMMANDS as usize;

/// Weight of a command when the drive is shared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Class(u8);

impl Class {
    /// Of a member with much to do.
    pub(super) const HEAVY: Self = Self(0);
    /// Of a member with little to do; its latency tells nothing.
    const LIGHT: Self = Self(1);
    const FIRST_KIND: u8 = 2;

    /// The class of a light member's command, when it has so many outstanding.
    pub(super) fn light(opcode: NvmOpcode, outstanding: u32) -> Self {
        let first = match opcode {
            NvmOpcode::READ => Self::FIRST_KIND,
            NvmOpcode::WRITE => Self::FIRST_KIND + LIGHT_COMMANDS as u8,
            _ => return Self::LIGHT,
        };
        Self(first + outstanding.clamp(1, LIGHT_COMMANDS) as u8 - 1)
    }

    /// Returns whether a member is heavy that has so many commands outstanding, and submits one that
    /// transfers so many bytes.
    pub(super) fn is_heavy(outstanding: u32, bytes: u64) -> bool {
        outstanding > LIGHT_COMMANDS || bytes > LIGHT_BYTES
    }

    /// Which latency it is compared to.
    fn kind(self) -> Option<usize> {
        self.0.checked_sub(Self::FIRST_KIND).map(usize::from)
    }
}

/// Room of a queue pair for commands of heavy members in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Window {
    /// There is no light member: all the drive takes.
    Open,
    /// So many bytes of its own, or one command.
    Own(u64),
    /// As long as the drive has so many bytes of all its pairs, or one command.
    Drive(u64),
    /// Nothing, for a few milliseconds: light members' latency is being measured, or it is another
    /// pair's turn.
    Closed,
}

/// The least share of the window for which queue pairs do without turns.
const SHARE_MIN: u64 = 64 << 10;

/// Light commands, alone, that a queue pair's turn at the window lasts.
const TURN: u64 = 8;

/// Times, in ticks.
#[derive(Clone, Copy, Debug)]
struct Times {
    /// Time that a member counts as present after its last command, a light one after its completion: until
    /// then it may be waiting for all that heavy members had in the drive before.
    presence: u64,
    /// From one measurement of the latency alone to the next.
    probe_interval: u64,
    /// Time until the next measurement of a kind of command that was not among the last ones.
    probe_again: u64,
    /// The longest that heavy members pause.
    pause: u64,
}

/// Samples of a measurement that still meet what was in flight when the pause began.
const PROBE_SETTLES: u32 = 4;

/// Light commands whose median counts.
const SAMPLES: usize = 8;

/// Light commands while heavy members pause.
#[derive(Debug)]
struct Probe {
    began: Ticks,
    settling: u32,
    samples: [(u8, u64); SAMPLES],
    count: usize,
}

#[derive(Debug, Default)]
struct State {
    /// Median latency alone, in ticks, of each kind; 0 if it is not known.
    alone: [u64; KINDS],
    probe: Option<Probe>,
    /// Latencies of the last light commands, relative to alone, in 256ths.
    longer: [u64; SAMPLES],
    count: usize,
    /// When the window last changed: what arrived before tells nothing of it.
    changed: Ticks,
    /// True if the window has once been too large. Until then it doubles.
    is_found: bool,
    /// Bound that the window does not reach for as many medians as `hold`, as it was too large.
    ceiling: u64,
    hold: u32,
}

/// Agreement of the queue pairs of one drive about sharing it.
#[derive(Debug)]
pub struct Governor {
    times: Times,
    window: AtomicU64,
    /// Until when light members count as present; `u64::MAX` while the drive has commands of theirs.
    light_until: AtomicU64,
    /// Number of light commands.
    lights: AtomicU64,
    /// Until when heavy members pause.
    pause_until: AtomicU64,
    /// When the latency alone is measured next.
    next_probe: AtomicU64,
    /// Queue pairs there were.
    pairs: AtomicU64,
    /// Which of them, by the lowest bits of their numbers, have heavy members waiting.
    waiting: AtomicU64,
    /// Bytes of heavy members that the drive has.
    in_flight: AtomicU64,
    /// Length of a pair's turn at the window, in ticks.
    turn: AtomicU64,
    state: Mutex<State>,
}

impl Default for Governor {
    fn default() -> Self {
        Self::new()
    }
}

impl Governor {
    /// Of a drive of which nothing is known.
    #[must_use]
    pub fn new() -> Self {
        Self::with_millisecond(ticks_in(Duration::from_millis(1)))
    }

    /// With a clock that has so many ticks per millisecond.
    pub(super) fn with_millisecond(ticks: u64) -> Self {
        Self {
            times: Times {
                presence: 1000 * ticks,
                probe_interval: 10_000 * ticks,
                probe_again: 500 * ticks,
                pause: 50 * ticks,
            },
            window: AtomicU64::new(WINDOW_FIRST),
            light_until: AtomicU64::new(0),
            lights: AtomicU64::new(0),
            pause_until: AtomicU64::new(0),
            next_probe: AtomicU64::new(0),
            pairs: AtomicU64::new(0),
            waiting: AtomicU64::new(0),
            in_flight: AtomicU64::new(0),
            turn: AtomicU64::new(ticks),
            state: Mutex::default(),
        }
    }

    /// A number for another queue pair.
    pub(super) fn register(&self) -> u64 {
        self.pairs.fetch_add(1, Ordering::Relaxed)
    }

    /// Sets whether heavy members of a queue pair wait.
    pub(super) fn waiting(&self, pair: u64, is_waiting: bool) {
        let bit = Self::bit(pair);
        if is_waiting {
            self.waiting.fetch_or(bit, Ordering::Relaxed);
        } else {
            self.waiting.fetch_and(!bit, Ordering::Relaxed);
        }
    }

    /// Returns whether it is a queue pair's turn, among those that wait.
    fn is_turn_of(&self, pair: u64, waiting: u64, now: Ticks) -> bool {
        // Turns by the clock: who completes a command would always be the first to try again.
        let turn = now.0 / self.turn.load(Ordering::Relaxed).max(1);
        let mut rest = waiting;
        for _ in 0..turn % u64::from(waiting.count_ones()) {
            rest &= rest - 1;
        }
        rest & rest.wrapping_neg() == Self::bit(pair)
    }

    /// The drive got so many bytes of a heavy member.
    #[inline]
    pub(super) fn launched(&self, bytes: u64) {
        self.in_flight.fetch_add(bytes, Ordering::Relaxed);
    }

    /// The drive has completed so many bytes of a heavy member.
    #[inline]
    pub(super) fn landed(&self, bytes: u64) {
        self.in_flight.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Returns the bytes of heavy members that the drive has.
    #[inline]
    pub(super) fn in_flight(&self) -> u64 {
        self.in_flight.load(Ordering::Relaxed)
    }

    /// Returns the time that a member counts as present after its last command, in ticks.
    pub(super) fn presence(&self) -> u64 {
        self.times.presence
    }

    /// Returns whether some light member uses the drive.
    #[inline]
    pub(super) fn is_light_present(&self, now: Ticks) -> bool {
        now.0 < self.light_until.load(Ordering::Relaxed)
    }

    /// Returns the room of a queue pair's heavy members now. Pairs that wait share the window, or have turns
    /// at it where it is small: one large command keeps a drive busier than small ones of several pairs, for
    /// which a light member's command waits as long.
    #[inline]
    pub(super) fn window(&self, pair: u64, now: Ticks) -> Window {
        if now.0 < self.pause_until.load(Ordering::Relaxed) {
            return Window::Closed;
        }
        if !self.is_light_present(now) {
            return Window::Open;
        }
        let waiting = self.waiting.load(Ordering::Relaxed) | Self::bit(pair);
        let bytes = self.window.load(Ordering::Relaxed);
        let share = bytes / u64::from(waiting.count_ones());
        if share >= SHARE_MIN {
            Window::Own(share)
        } else if self.is_turn_of(pair, waiting, now) {
            Window::Drive(bytes)
        } else {
            Window::Closed
        }
    }

    fn bit(pair: u64) -> u64 {
        1 << (pair % 64)
    }

    /// A light member has submitted something.
    pub(super) fn light_arrived(&self, now: Ticks) {
        let until = now.0.saturating_add(self.times.presence);
        self.light_until.fetch_max(until, Ordering::Relaxed);
        if now.0 >= self.next_probe.load(Ordering::Relaxed) {
            self.begin_probe(now);
        }
    }

    /// The drive got a light command.
    pub(super) fn light_launched(&self) {
        self.lights.fetch_add(1, Ordering::Relaxed);
        self.light_until.store(u64::MAX, Ordering::Relaxed);
    }

    /// The drive has a light command no more; `now` is the time if that is known.
    pub(super) fn light_landed(&self, class: Class, arrived: Ticks, now: Option<Ticks>) {
        if self.lights.fetch_sub(1, Ordering::Relaxed) == 1 {
            // One that is launched right now may be forgotten; it is present for this long at least.
            let until = now.unwrap_or(arrived).0.saturating_add(self.times.presence);
            self.light_until.store(until, Ordering::Relaxed);
        }
        if let Some(now) = now {
            self.light_completed(class, arrived, now);
        }
    }

    #[cold]
    fn begin_probe(&self, now: Ticks) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if now.0 < self.next_probe.load(Ordering::Relaxed) {
            return;
        }
        let next = now.0.saturating_add(self.times.probe_interval);
        self.next_probe.store(next, Ordering::Relaxed);
        state.probe = Some(Probe {
            began: now,
            settling: PROBE_SETTLES,
            samples: [(0, 0); SAMPLES],
            count: 0,
        });
        let until = now.0.saturating_add(self.times.pause);
        self.pause_until.store(until, Ordering::Relaxed);
    }

    /// A light command that arrived at some time has completed.
    fn light_completed(&self, class: Class, arrived: Ticks, now: Ticks) {
        let Some(kind) = class.kind() else { return };
        let latency = now.since(arrived);
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(probe) = &mut state.probe {
            let over = now.0 >= self.pause_until.load(Ordering::Relaxed);
            if !over && arrived >= probe.began && !probe.take(kind, latency) {
                return;
            }
            if over || probe.count == SAMPLES {
                self.end_probe(&mut state);
            }
            return;
        }
        let alone = state.alone.get(kind).copied().unwrap_or(0);
        if alone == 0 {
            // Not before the last measurement is that long ago.
            let soon = now.0.saturating_add(self.times.probe_again);
            self.next_probe.fetch_min(soon, Ordering::Relaxed);
            return;
        }
        if arrived < state.changed {
            return;
        }
        let count = state.count;
        state.longer[count] = (latency << 8) / alone;
        state.count += 1;
        if state.count == SAMPLES {
            state.count = 0;
            state.changed = now;
            self.adapt(&mut state);
        }
    }

    /// Makes the window what the last light commands tell.
    fn adapt(&self, state: &mut State) {
        state.longer.sort_unstable();
        let longer = state.longer[SAMPLES / 2];
        let window = self.window.load(Ordering::Relaxed);
        let next = if longer > LONGER {
            state.is_found = true;
            state.ceiling = window - window / 8;
            state.hold = HOLD;
            // By no more than that at once: some of it was the window's last size.
            (window * LONGER / longer).max(window / 8)
        } else if !state.is_found {
            2 * window
        } else {
            let larger = window + window / 32 + 512;
            state.hold = state.hold.saturating_sub(1);
            if state.hold > 0 && larger > state.ceiling {
                return;
            }
            larger
        };
        self.window.store(next.min(WINDOW_MAX), Ordering::Relaxed);
    }

    fn end_probe(&self, state: &mut State) {
        self.pause_until.store(0, Ordering::Relaxed);
        let Some(probe) = state.probe.take() else {
            return;
        };
        state.count = 0;
        for (kind, alone) in state.alone.iter_mut().enumerate() {
            let mut latencies = [0; SAMPLES];
            let mut count = 0;
            for (of, latency) in &probe.samples[..probe.count] {
                if usize::from(*of) == kind {
                    latencies[count] = *latency;
                    count += 1;
                }
            }
            latencies[..count].sort_unstable();
            if count > 0 {
                *alone = latencies[count / 2].max(1);
            }
        }
        let longest = state.alone.iter().max().copied().unwrap_or(0);
        self.turn.store(TURN * longest.max(1), Ordering::Relaxed);
    }
}

impl Probe {
    /// Takes a sample. Returns whether it was counted.
    fn take(&mut self, kind: usize, latency: u64) -> bool {
        if self.settling > 0 {
            self.settling -= 1;
            return false;
        }
        if let Some(sample) = self.samples.get_mut(self.count) {
            *sample = (kind as u8, latency);
            self.count += 1;
        }
        true
    }
}
