//! Share of a drive that busy users may fill while light users use it.
//!
//! A user of a drive is *light* while it has few and small commands outstanding ([`CommandClass::is_heavy`]). All others are
//! *heavy*. While there is a light user, the heavy ones together have at most the *window* in flight, in bytes.
//!
//! The best window depends on the drive. A serial drive makes a light command wait for all commands before it. A parallel
//! drive does so only when its channels are full. So the window adapts to the latencies of light users:
//!
//! - **Alone.** Every ten seconds, at the arrival of a light command, heavy users pause for some light commands, 50 ms at
//!   most. The median latency of these commands is the latency of light users alone.
//! - **Together.** The median latency of every eight light commands is compared with the latency alone. If it is above
//!   1.875 times the latency alone, the window shrinks in proportion. Otherwise the window grows by 1/32. It returns to a
//!   size that was too large only after [`CEILING_HOLD`] medians. The median is used because a drive completes some
//!   commands slowly for its own reasons, for which the window must not shrink. On a drive that serves its pairs in turn,
//!   most light commands may find no other command in their pair, and a few find the whole window. So the window also
//!   shrinks if the second longest of eight latencies is too long four times in a row.
//! - **In the same pair.** The *own window* is the maximum of heavy users' bytes in flight on a pair with a light user. Light
//!   commands that were submitted behind heavy commands of their own pair have a median of their own. If it is above 1.875
//!   times the latency alone, and more than 1.25 times the median of the other light commands, then the drive serves its pairs
//!   in turn, and the own window shrinks in proportion. Otherwise the own window grows by 1/32. The drive's own slow commands
//!   are as frequent in both groups, so they do not shrink the own window.
//!
//! On a parallel drive, the window settles at about the size that fills the channels. There, the slowest percent of light
//! commands is close to the median: p99 is within twice p99 alone.
//!
//! On a serial drive, the window settles at one command, of a size that takes little longer than a small one. A light command
//! waits for that command and takes at least twice as long, whatever the window. So a small window may reach 2.25 times the
//! latency alone.
//!
//! The fixed alternative is a window of 256 KiB, without pauses.

use std::time::Duration;

use nvme_mpt_memory::clock::{TickRate, Ticks};
use nvme_spec::opcode::NvmOpcode;

use super::PolicyChoice;

/// Maximum window: enough to keep any drive busy.
pub const WINDOW_MAX: u64 = 8 << 20;

/// Initial window in bytes. The window doubles until it proves too large.
const WINDOW_FIRST: u64 = 16 << 10;

/// Maximum of the median latency of light commands, relative to their latency while heavy users pause, in 256ths.
const LATENCY_RATIO_MAX: u64 = 256 * 15 / 8;

/// Limit as `LATENCY_RATIO_MAX`, for a small window. On a serial drive with 0.1 ms per command, this limit gives 128 KiB reads
/// in parts of 48 KiB, with a quarter of their throughput. A limit of 2.0 would give parts of 8 KiB, with 1/20 of the
/// throughput.
const LATENCY_RATIO_MAX_SMALL: u64 = 256 * 9 / 4;

/// Factor for two comparisons, as numerator and denominator. The second longest of [`SAMPLES`] latencies times this factor must
/// not exceed the limit of the median. The median of light commands behind heavy commands of their pair times this factor must
/// not exceed the median of the other light commands.
const TAIL: (u64, u64) = (4, 5);

/// Number of groups of [`SAMPLES`] latencies in a row whose second longest latency is too long, before the window shrinks for
/// this reason alone. If 10 % of a drive's commands are slow anyway, this happens for one group in 1,000.
const SLOW_TAILS_MAX: u32 = 4;

/// Size in bytes up to which a window counts as small. On drives that process one or a few commands at a time, the window
/// becomes small.
const WINDOW_SMALL: u64 = 64 << 10;

/// Minimum own window in bytes: one small command. One heavy command of any size may be in flight even then.
const OWN_WINDOW_MIN: u64 = 4096;

/// Number of medians for which the window stays below a size that was too large. So trying that size again delays fewer than
/// one in a hundred light commands.
const CEILING_HOLD: u32 = 256;

/// Maximum number of outstanding commands of a light user, and maximum bytes of each command (`LIGHT_BYTES`).
const LIGHT_COMMANDS: u32 = 4;
const LIGHT_BYTES: u64 = 16 << 10;

/// Number of kinds of light commands. A command is compared only with commands of its kind: a read or a write, with a given
/// number of commands outstanding.
const KINDS: usize = 2 * LIGHT_COMMANDS as usize;

/// Class of a command on a shared drive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CommandClass(u8);

impl CommandClass {
    /// Command of a heavy user: one with many or large commands outstanding.
    pub const HEAVY: Self = Self(0);
    /// Command of a light user whose latency is not measured.
    const LIGHT: Self = Self(1);
    const FIRST_KIND: u8 = 2;
    /// Flag of a light command that was submitted while its queue pair had heavy commands in flight.
    const BEHIND_HEAVY: u8 = 1 << 7;

    /// Returns the class of a command of a light user that has `outstanding` commands, including this command.
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

    /// Returns whether a user is heavy that has `outstanding` commands and submits one that transfers `bytes`.
    #[inline]
    #[must_use]
    pub fn is_heavy(outstanding: u32, bytes: u64) -> bool {
        outstanding > LIGHT_COMMANDS || bytes > LIGHT_BYTES
    }

    /// Returns the class of a light command that is submitted while its queue pair has heavy commands in flight.
    #[inline]
    #[must_use]
    pub fn behind_heavy(self) -> Self {
        Self(self.0 | Self::BEHIND_HEAVY)
    }

    /// Returns whether heavy commands of the same queue pair were in flight when the command was submitted.
    fn is_behind_heavy(self) -> bool {
        self.0 & Self::BEHIND_HEAVY != 0
    }

    /// Returns the index into [`HeavyWindow::alone`] of the latency to compare with; `None` for a command that is not
    /// measured.
    fn kind_index(self) -> Option<usize> {
        let kind = self.0 & !Self::BEHIND_HEAVY;
        kind.checked_sub(Self::FIRST_KIND).map(usize::from)
    }
}

/// Window in bytes of the fixed alternative.
const WINDOW_FIXED: u64 = 256 << 10;

/// Length of a queue pair's turn at the window, in multiples of the latency that light commands have while heavy users pause.
const TURN_LATENCIES: u64 = 8;

/// Durations for measurements, in ticks.
#[derive(Clone, Copy, Debug)]
struct HeavyWindowTimes {
    /// Time between two pauses of heavy users in which the latency of light commands alone is measured.
    probe_interval: u64,
    /// Minimum time until the next measurement if a light command completes whose kind was in no measurement so far.
    probe_retry: u64,
    /// Maximum time for which heavy users pause during a measurement.
    pause: u64,
}

/// Number of light commands whose latency is ignored at the start of a measurement, because they still wait for commands that
/// were submitted before the pause.
const PROBE_SKIPPED: u32 = 4;

/// Number of light commands whose median latency decides on the window.
const SAMPLES: usize = 8;

/// Measurement of the latencies of light commands while heavy users pause.
#[derive(Debug)]
struct LatencyProbe {
    began: Ticks,
    skipped_left: u32,
    samples: [(u8, u64); SAMPLES],
    count: usize,
}

/// Parameters for sharing a drive between queue pairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharingParameters {
    /// Bytes that all heavy users together may have in flight while there is a light user.
    pub window: u64,
    /// Maximum of heavy users' bytes in flight on a queue pair with a light user.
    pub own_window: u64,
    /// Length of a queue pair's turn at the window, in ticks.
    pub turn: u64,
    /// Time until which heavy users pause.
    pub pause_until: Ticks,
    /// Time from which the arrival of a light command starts a measurement.
    pub next_probe: Ticks,
}

/// Latencies of up to [`SAMPLES`] light commands, relative to the latency while heavy users pause, in 256ths.
#[derive(Debug, Default)]
struct LatencyGroup {
    ratios: [u64; SAMPLES],
    count: usize,
}

impl LatencyGroup {
    /// Adds a latency. When there are [`SAMPLES`] latencies, returns their median and starts again without latencies.
    fn add(&mut self, ratio: u64) -> Option<u64> {
        self.ratios[self.count] = ratio;
        self.count = (self.count + 1) % SAMPLES;
        if self.count > 0 {
            return None;
        }
        self.ratios.sort_unstable();
        Some(self.ratios[SAMPLES / 2])
    }
}

/// Adaptive parameters, derived from the latencies of light commands.
#[derive(Debug)]
pub struct HeavyWindow {
    choice: PolicyChoice,
    times: HeavyWindowTimes,
    parameters: SharingParameters,
    /// Median latency of each kind of light command while heavy users pause, in ticks; 0 if unknown.
    alone: [u64; KINDS],
    probe: Option<LatencyProbe>,
    /// Latencies of the last light commands, relative to the latency while heavy users pause, in 256ths.
    latency_ratios: [u64; SAMPLES],
    count: usize,
    /// Time of the last change of the window. The latency of a command that arrived before that time says nothing about the new
    /// window.
    changed: Ticks,
    /// True if the window has ever been too large. Until then it doubles.
    has_been_too_large: bool,
    /// Maximum window for the next `ceiling_hold` medians, below a size that was too large.
    ceiling: u64,
    ceiling_hold: u32,
    /// Number of groups of [`SAMPLES`] latencies in a row whose second longest latency was too long.
    slow_tails: u32,
    /// Latencies of light commands that were submitted behind heavy commands of their own pair.
    behind_heavy: LatencyGroup,
    /// Latencies of all other light commands.
    ahead: LatencyGroup,
    /// Last median of `ahead`; 0 before the first.
    ahead_median: u64,
}

impl HeavyWindow {
    /// Creates the policy for an unknown drive.
    #[must_use]
    pub fn new(choice: PolicyChoice, rate: TickRate) -> Self {
        let millisecond = rate.ticks(Duration::from_millis(1));
        let (window, next_probe) = match choice {
            PolicyChoice::Adaptive => (WINDOW_FIRST, 0),
            PolicyChoice::Fixed => (WINDOW_FIXED, u64::MAX),
        };
        Self {
            choice,
            times: HeavyWindowTimes {
                probe_interval: 10_000 * millisecond,
                probe_retry: 500 * millisecond,
                pause: 50 * millisecond,
            },
            parameters: SharingParameters {
                window,
                own_window: WINDOW_MAX,
                turn: millisecond,
                pause_until: Ticks(0),
                next_probe: Ticks(next_probe),
            },
            alone: [0; KINDS],
            probe: None,
            latency_ratios: [0; SAMPLES],
            count: 0,
            changed: Ticks(0),
            has_been_too_large: false,
            ceiling: 0,
            ceiling_hold: 0,
            slow_tails: 0,
            behind_heavy: LatencyGroup::default(),
            ahead: LatencyGroup::default(),
            ahead_median: 0,
        }
    }

    /// Returns the current parameters.
    #[must_use]
    pub fn parameters(&self) -> SharingParameters {
        self.parameters
    }

    /// Notes the arrival of a light command, which starts a measurement if one is due.
    pub fn on_arrival(&mut self, now: Ticks) {
        if now < self.parameters.next_probe {
            return;
        }
        self.parameters.next_probe = add_ticks(now, self.times.probe_interval);
        self.parameters.pause_until = add_ticks(now, self.times.pause);
        self.probe = Some(LatencyProbe {
            began: now,
            skipped_left: PROBE_SKIPPED,
            samples: [(0, 0); SAMPLES],
            count: 0,
        });
    }

    /// Notes the completion of a light command that arrived at `arrived`.
    pub fn on_completion(&mut self, class: CommandClass, arrived: Ticks, now: Ticks) {
        let Some(kind) = class.kind_index() else {
            return;
        };
        if self.choice == PolicyChoice::Fixed {
            return;
        }
        let latency = now.since(arrived);
        if let Some(probe) = &mut self.probe {
            let over = now >= self.parameters.pause_until;
            if !over && arrived >= probe.began && !probe.add_sample(kind, latency) {
                return;
            }
            if over || probe.count == SAMPLES {
                self.end_probe();
            }
            return;
        }
        let alone = self.alone.get(kind).copied().unwrap_or(0);
        if alone == 0 {
            // The next measurement comes early, because the latency of this kind alone is unknown. `probe_retry` limits how
            // often this happens.
            let soon = add_ticks(now, self.times.probe_retry);
            self.parameters.next_probe = soon.min(self.parameters.next_probe);
            return;
        }
        if arrived < self.changed {
            return;
        }
        let ratio = (latency << 8) / alone;
        self.adapt_own_window(class, ratio);
        self.latency_ratios[self.count] = ratio;
        self.count += 1;
        if self.count == SAMPLES {
            self.count = 0;
            self.changed = now;
            self.adapt();
        }
    }

    /// Adapts the own window to the latency of a light command.
    fn adapt_own_window(&mut self, class: CommandClass, ratio: u64) {
        if !class.is_behind_heavy() {
            self.ahead_median = self.ahead.add(ratio).unwrap_or(self.ahead_median);
            return;
        }
        let Some(median) = self.behind_heavy.add(ratio) else {
            return;
        };
        let SharingParameters {
            window, own_window, ..
        } = self.parameters;
        let is_longer = self.ahead_median > 0 && median * TAIL.0 / TAIL.1 > self.ahead_median;
        let own = own_window.min(window);
        let longest = latency_ratio_max(own);
        self.parameters.own_window = if median > longest && is_longer {
            let shrunk = own * longest / median;
            shrunk.clamp(own / 8, own - own / 8).max(OWN_WINDOW_MIN)
        } else {
            (own_window + own_window / 32 + 512).min(WINDOW_MAX)
        };
    }

    /// Adapts the window to the latencies of the last light commands.
    fn adapt(&mut self) {
        self.latency_ratios.sort_unstable();
        let tail = self.latency_ratios[SAMPLES - 2] * TAIL.0 / TAIL.1;
        let longer = self.latency_ratios[SAMPLES / 2];
        let window = self.parameters.window;
        // A command is split into parts of whole steps. So a small window that shrinks by less than an eighth may give
        // parts of the same size.
        let longest = latency_ratio_max(window);
        let least = if window <= WINDOW_SMALL {
            window / 8
        } else {
            0
        };
        self.slow_tails = if tail > longest {
            self.slow_tails + 1
        } else {
            0
        };
        // The shrinking per step is limited, because commands under the previous, larger window cause some of the latency.
        let shrunk = |longer: u64| (window * longest / longer).clamp(window / 8, window - least);
        let next = if longer > longest {
            self.has_been_too_large = true;
            self.ceiling = window - window / 8;
            self.ceiling_hold = CEILING_HOLD;
            shrunk(longer)
        } else if self.slow_tails >= SLOW_TAILS_MAX {
            // The drive may be slow for its own reasons, so this size does not become the ceiling of the window.
            self.has_been_too_large = true;
            self.slow_tails = 0;
            shrunk(tail)
        } else if !self.has_been_too_large {
            2 * window
        } else {
            let larger = window + window / 32 + 512;
            self.ceiling_hold = self.ceiling_hold.saturating_sub(1);
            if self.ceiling_hold > 0 && larger > self.ceiling {
                return;
            }
            larger
        };
        self.parameters.window = next.min(WINDOW_MAX);
    }

    fn end_probe(&mut self) {
        self.parameters.pause_until = Ticks(0);
        let Some(probe) = self.probe.take() else {
            return;
        };
        self.count = 0;
        // Ratios to the previous latencies alone are not comparable with later ones.
        self.behind_heavy = LatencyGroup::default();
        self.ahead = LatencyGroup::default();
        self.ahead_median = 0;
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
        self.parameters.turn = TURN_LATENCIES * longest.max(1);
    }
}

/// Returns the maximum of the median latency of light commands beside a window of this size, in 256ths of that alone.
fn latency_ratio_max(window: u64) -> u64 {
    match window {
        ..=WINDOW_SMALL => LATENCY_RATIO_MAX_SMALL,
        _ => LATENCY_RATIO_MAX,
    }
}

/// Returns the time `ticks` after `now`.
fn add_ticks(now: Ticks, ticks: u64) -> Ticks {
    Ticks(now.0.saturating_add(ticks))
}

impl LatencyProbe {
    /// Adds the latency of a light command to the measurement. Returns whether it counts.
    fn add_sample(&mut self, kind: usize, latency: u64) -> bool {
        if self.skipped_left > 0 {
            self.skipped_left -= 1;
            return false;
        }
        if let Some(sample) = self.samples.get_mut(self.count) {
            *sample = (kind as u8, latency);
            self.count += 1;
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Latency of a light command while no heavy user has commands in flight, in nanoseconds.
    const ALONE: u64 = 100_000;

    /// Returns the window in bytes after 400,000 light commands on a drive with the given latencies. `latency` gets a random
    /// number below 100 and the bytes that heavy users have in flight.
    fn window_by(latency: impl Fn(u64, u64) -> u64) -> u64 {
        let mut heavy_window = HeavyWindow::new(PolicyChoice::Adaptive, TickRate::NANOSECOND);
        let class = CommandClass::light(NvmOpcode::READ, 1);
        let mut now = Ticks(1);
        let mut random: u64 = 1;
        for _ in 0..400_000 {
            random = random.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(1);
            heavy_window.on_arrival(now);
            let SharingParameters {
                window,
                pause_until,
                ..
            } = heavy_window.parameters();
            let heavy = if now < pause_until { 0 } else { window };
            let arrived = now;
            now = add_ticks(now, latency((random >> 33) % 100, heavy));
            heavy_window.on_completion(class, arrived, now);
        }
        heavy_window.parameters().window
    }

    #[test]
    fn slow_commands_of_the_drives_own_leave_busy_users_a_window() {
        for (percent, longer, least) in [
            (1, 3, WINDOW_MAX),
            (3, 3, WINDOW_MAX / 2),
            (5, 5, WINDOW_MAX / 2),
            (10, 10, WINDOW_MAX / 16),
        ] {
            let window = window_by(|random, _| match random < percent {
                true => longer * ALONE,
                false => ALONE,
            });
            assert!(window >= least, "{percent} % take {longer} times: {window}");
        }
    }

    #[test]
    fn a_window_that_one_of_three_light_commands_waits_for_shrinks() {
        let window = window_by(|random, heavy| match random < 33 {
            true => ALONE + heavy,
            false => ALONE,
        });
        assert!(
            (ALONE / 2..5 * ALONE).contains(&window),
            "{window} ns in front of light commands"
        );
    }

    /// Returns the own window in bytes after 4,000 light commands. Outside of probes, every fourth of them is behind heavy
    /// commands of its pair. `latency` gets a random number below 100, and the heavy bytes in flight on the pair.
    fn own_window_by(latency: impl Fn(u64, u64) -> u64) -> u64 {
        let mut heavy_window = HeavyWindow::new(PolicyChoice::Adaptive, TickRate::NANOSECOND);
        let class = CommandClass::light(NvmOpcode::READ, 1);
        let mut now = Ticks(1);
        let mut random: u64 = 1;
        for i in 0..4000 {
            random = random.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(1);
            heavy_window.on_arrival(now);
            let SharingParameters {
                own_window,
                pause_until,
                ..
            } = heavy_window.parameters();
            let (class, heavy) = match now >= pause_until && i % 4 == 0 {
                true => (class.behind_heavy(), own_window),
                false => (class, 0),
            };
            let arrived = now;
            now = add_ticks(now, latency((random >> 33) % 100, heavy));
            heavy_window.on_completion(class, arrived, now);
        }
        heavy_window.parameters().own_window
    }

    #[test]
    fn the_own_window_shrinks_if_light_commands_wait_for_their_own_pair() {
        let own = own_window_by(|_, heavy| ALONE + heavy);
        assert!((ALONE / 2..=2 * ALONE).contains(&own), "{own}");
    }

    #[test]
    fn a_small_own_window_may_double_the_latency() {
        let mut heavy_window = HeavyWindow::new(PolicyChoice::Adaptive, TickRate::NANOSECOND);
        heavy_window.parameters.own_window = WINDOW_SMALL;
        heavy_window.parameters.window = WINDOW_SMALL;
        heavy_window.ahead_median = 256;
        let class = CommandClass::light(NvmOpcode::READ, 1).behind_heavy();
        (0..SAMPLES).for_each(|_| heavy_window.adapt_own_window(class, 2 * 256));
        assert!(heavy_window.parameters.own_window > WINDOW_SMALL);
        (0..SAMPLES).for_each(|_| heavy_window.adapt_own_window(class, 3 * 256));
        assert!(heavy_window.parameters.own_window < WINDOW_SMALL);
    }

    #[test]
    fn the_own_window_stays_large_if_all_light_commands_wait_alike() {
        assert_eq!(own_window_by(|_, _| 3 * ALONE), WINDOW_MAX);
        let own = own_window_by(|random, _| match random < 10 {
            true => 20 * ALONE,
            false => ALONE,
        });
        assert_eq!(own, WINDOW_MAX);
    }
}
