//! Part of a shared drive that busy members may fill while quiet ones use it.
//!
//! A member is *light* while it has few and small commands outstanding ([`Class::is_heavy`]). All others are *heavy*: of
//! those, the drive has at most the *window* in flight while a light member is there.
//!
//! The best window depends on the drive. A serial one makes a light command wait for all that is in front of it. A
//! parallel one does not until its channels are full. So the window follows what light members see:
//!
//! - **Alone.** Every ten seconds, at a light command's arrival, heavy members pause for some light
//!   commands (for 50 ms at most): the median latency of those is what light members see alone.
//! - **Together.** Of every eight light commands, the median is compared with that. Beyond 1.875
//!   times as long, the window shrinks in proportion; else it grows by a thirty-second, but seldom
//!   to where it was too large. The median, not the slowest: drives have slow commands of their own,
//!   which are no reason to let them idle.
//!
//! On a parallel drive the window ends up about where its channels are full. The slowest of a hundred
//! light commands exceed the median by little there: p99 is within twice p99 alone.
//!
//! On a serial drive it ends up at one command, of a size that takes little longer than a small one. A
//! light command waits for that one and takes twice as long at least, whatever the window. Where it is
//! small, 2.25 times as long is allowed.
//!
//! The fixed alternative is a window of 256 KiB, without pauses.

use std::time::Duration;

use super::Choice;
use crate::clock::{Rate, Ticks};
use crate::spec::opcode::NvmOpcode;

/// The largest window: what keeps any drive busy.
pub const WINDOW_MAX: u64 = 8 << 20;

/// The window that the first light member finds. It doubles until it proves too large.
const WINDOW_FIRST: u64 = 16 << 10;

/// Longest latency of light commands, relative to alone, in 256ths.
const LONGER: u64 = 256 * 15 / 8;

/// The same while the window is small. On a serial drive with 0.1 ms for each command, it has 128 KiB reads in parts of
/// 48 KiB, with a quarter of their throughput. At 2.0, parts of 8 KiB would have a twentieth.
const LONGER_SMALL: u64 = 256 * 9 / 4;

/// The largest small window. Drives whose window is small work on one command, or a few, at a time.
const WINDOW_SMALL: u64 = 64 << 10;

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
pub struct Class(u8);

impl Class {
    /// Of a member with much to do.
    pub const HEAVY: Self = Self(0);
    /// Of a member with little to do; its latency tells nothing.
    const LIGHT: Self = Self(1);
    const FIRST_KIND: u8 = 2;

    /// Returns the class of a light member's command, when it has `outstanding` of them.
    #[inline]
    #[must_use]
    pub fn light(opcode: NvmOpcode, outstanding: u32) -> Self {
        let first = match opcode {
            NvmOpcode::READ => Self::FIRST_KIND,
            NvmOpcode::WRITE => Self::FIRST_KIND + LIGHT_COMMANDS as u8,
            _ => return Self::LIGHT,
        };
        Self(first + outstanding.clamp(1, LIGHT_COMMANDS) as u8 - 1)
    }

    /// Returns whether a member is heavy that has `outstanding` commands, and submits one that transfers `bytes`.
    #[inline]
    #[must_use]
    pub fn is_heavy(outstanding: u32, bytes: u64) -> bool {
        outstanding > LIGHT_COMMANDS || bytes > LIGHT_BYTES
    }

    /// Returns the index of the latency that it is compared with.
    fn kind(self) -> Option<usize> {
        self.0.checked_sub(Self::FIRST_KIND).map(usize::from)
    }
}

/// The fixed window.
const WINDOW_FIXED: u64 = 256 << 10;

/// Light commands, alone, that a queue pair's turn at the window lasts.
const TURN: u64 = 8;

/// Times, in ticks.
#[derive(Clone, Copy, Debug)]
struct Times {
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

/// Terms on which queue pairs share a drive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// Bytes of heavy members that the drive may have while a light one is there.
    pub window: u64,
    /// Length of a queue pair's turn at the window, in ticks.
    pub turn: u64,
    /// Moment until which heavy members pause.
    pub pause_until: Ticks,
    /// Moment from which on a light command's arrival begins a measurement.
    pub next_probe: Ticks,
}

/// Learns the terms from the latencies of light commands.
#[derive(Debug)]
pub struct HeavyWindow {
    choice: Choice,
    times: Times,
    terms: Terms,
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

impl HeavyWindow {
    /// The window of a drive of which nothing is known.
    #[must_use]
    pub fn new(choice: Choice, rate: Rate) -> Self {
        let millisecond = rate.ticks(Duration::from_millis(1));
        let (window, next_probe) = match choice {
            Choice::Learned => (WINDOW_FIRST, 0),
            Choice::Fixed => (WINDOW_FIXED, u64::MAX),
        };
        Self {
            choice,
            times: Times {
                probe_interval: 10_000 * millisecond,
                probe_again: 500 * millisecond,
                pause: 50 * millisecond,
            },
            terms: Terms {
                window,
                turn: millisecond,
                pause_until: Ticks(0),
                next_probe: Ticks(next_probe),
            },
            alone: [0; KINDS],
            probe: None,
            longer: [0; SAMPLES],
            count: 0,
            changed: Ticks(0),
            is_found: false,
            ceiling: 0,
            hold: 0,
        }
    }

    /// Returns the terms.
    #[must_use]
    pub fn terms(&self) -> Terms {
        self.terms
    }

    /// Notes that a light command arrived, which begins a measurement if it is time for one.
    pub fn arrived(&mut self, now: Ticks) {
        if now < self.terms.next_probe {
            return;
        }
        self.terms.next_probe = after(now, self.times.probe_interval);
        self.terms.pause_until = after(now, self.times.pause);
        self.probe = Some(Probe {
            began: now,
            settling: PROBE_SETTLES,
            samples: [(0, 0); SAMPLES],
            count: 0,
        });
    }

    /// Notes that a light command that arrived at some time has completed.
    pub fn completed(&mut self, class: Class, arrived: Ticks, now: Ticks) {
        let Some(kind) = class.kind() else { return };
        if self.choice == Choice::Fixed {
            return;
        }
        let latency = now.since(arrived);
        if let Some(probe) = &mut self.probe {
            let over = now >= self.terms.pause_until;
            if !over && arrived >= probe.began && !probe.take(kind, latency) {
                return;
            }
            if over || probe.count == SAMPLES {
                self.end_probe();
            }
            return;
        }
        let alone = self.alone.get(kind).copied().unwrap_or(0);
        if alone == 0 {
            // Not before the last measurement is that long ago.
            let soon = after(now, self.times.probe_again);
            self.terms.next_probe = soon.min(self.terms.next_probe);
            return;
        }
        if arrived < self.changed {
            return;
        }
        self.longer[self.count] = (latency << 8) / alone;
        self.count += 1;
        if self.count == SAMPLES {
            self.count = 0;
            self.changed = now;
            self.adapt();
        }
    }

    /// Makes the window what the last light commands call for.
    fn adapt(&mut self) {
        self.longer.sort_unstable();
        let longer = self.longer[SAMPLES / 2];
        let window = self.terms.window;
        // The parts of commands come in steps: a small window that shrinks by less may have parts of the same size.
        let (longest, least) = match window {
            ..=WINDOW_SMALL => (LONGER_SMALL, window / 8),
            _ => (LONGER, 0),
        };
        let next = if longer > longest {
            self.is_found = true;
            self.ceiling = window - window / 8;
            self.hold = HOLD;
            // No further at once: some of the latency is of the window's last size.
            (window * longest / longer).clamp(window / 8, window - least)
        } else if !self.is_found {
            2 * window
        } else {
            let larger = window + window / 32 + 512;
            self.hold = self.hold.saturating_sub(1);
            if self.hold > 0 && larger > self.ceiling {
                return;
            }
            larger
        };
        self.terms.window = next.min(WINDOW_MAX);
    }

    fn end_probe(&mut self) {
        self.terms.pause_until = Ticks(0);
        let Some(probe) = self.probe.take() else {
            return;
        };
        self.count = 0;
        for (kind, alone) in self.alone.iter_mut().enumerate() {
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
        let longest = self.alone.iter().max().copied().unwrap_or(0);
        self.terms.turn = TURN * longest.max(1);
    }
}

/// The moment so many ticks after another.
fn after(now: Ticks, ticks: u64) -> Ticks {
    Ticks(now.0.saturating_add(ticks))
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
