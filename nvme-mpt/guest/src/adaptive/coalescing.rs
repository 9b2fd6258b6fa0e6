//! Interrupt coalescing: the number of completions of a queue per interrupt.
//!
//! A guest that submits more commands while it is interrupted for each completion loses time to the interrupts. A guest
//! that waits for a completion gains nothing from a late interrupt. The poller cannot see which of the two a guest is, so
//! the policy tries: from time to time, it doubles or halves the number of completions per interrupt. It keeps the change
//! if the guest gets more done, or gets no less done with fewer completions per interrupt.
//!
//! An interrupt is held back only while more completions are expected: commands are in flight, or the guest has just
//! submitted some. If most holds end without enough completions, the guest has too few commands outstanding. The number of
//! completions per interrupt then decreases immediately.
//!
//! Limits: 1 to 32 completions share an interrupt. A trial lasts 128 completions. It is kept if they took 4 % less time, or
//! at most 4 % more with fewer completions per interrupt. An interrupt is held back for at most 4 ms. Interrupt Coalescing
//! set by the guest replaces this policy. Coalescing Disable of a vector turns it off for the vector (Base 2.0, sections
//! 5.27.1.6 and 5.27.1.7).
//!
//! The fixed alternative holds no interrupt back and sends one for each batch of completions. In
//! `interrupt/simulation.rs`, no guest takes more than 2 % longer than with the fixed alternative, and at most 1 % with one
//! command outstanding.

use std::time::Duration;

use nvme_mpt_memory::clock::{TickRate, Ticks};

use super::PolicyChoice;

/// Number of completions in an epoch, the unit of measurement: the policy compares the times that epochs take.
const EPOCH: u32 = 128;

/// Number of completions after which a very bad trial ends, before its epoch is full. A trial is very bad if its completions
/// took more than `HOPELESS_PERCENT` percent of the time that they would have taken before the trial.
const EARLY_CHECK: u32 = EPOCH / 4;
const HOPELESS_PERCENT: u64 = 115;

/// Maximum level: the base-2 logarithm of 32 completions per interrupt.
const LEVEL_MAX: u8 = 5;

/// Maximum time for which an interrupt is held back.
const HOLD_MAX: Duration = Duration::from_millis(4);

/// Maximum average time between completions at which interrupts are coalesced. If completions come more slowly, each batch gets
/// its own interrupt.
const INTERVAL_MAX: Duration = Duration::from_millis(2);

/// Time without completions after which the guest counts as paused. Measurements that span a pause are dropped.
const PAUSE: Duration = Duration::from_millis(50);

/// Limits for keeping a trial, in percent of the time that its completions would have taken before the trial: less than
/// `BETTER_PERCENT` for more completions per interrupt, less than `WORSE_PERCENT` for fewer completions.
const BETTER_PERCENT: u64 = 96;
const WORSE_PERCENT: u64 = 104;

/// Number of holds (times for which an interrupt was held back) that time out before the policy reacts, if even fewer holds got
/// enough completions: a trial ends early, and without a trial, half as many completions share an interrupt from then on.
const TIMED_OUT_MAX: u32 = 4;

/// Maximum number of epochs between two trials. It is reached after several failed trials, because each doubles the number.
const TRIAL_WAIT_MAX: u32 = 128;

/// Trial of another number of completions per interrupt.
#[derive(Clone, Copy, Debug)]
struct CoalescingTrial {
    level: u8,
    /// Value of [`CoalescingPolicy::interval`] before the trial. The trial is kept or ended by comparison with this value.
    reference: u64,
}

/// Adaptive number of completions of a queue per interrupt.
#[derive(Debug)]
pub struct CoalescingPolicy {
    choice: PolicyChoice,
    /// Base-2 logarithm of the number of completions per interrupt.
    level: u8,
    trial: Option<CoalescingTrial>,
    /// True if the next trial doubles the completions per interrupt; false if it halves them.
    should_rise: bool,
    /// Number of epochs until the next trial (`trial_wait`), and number of epochs to wait after that trial if it fails
    /// (`next_trial_wait`).
    trial_wait: u32,
    next_trial_wait: u32,
    /// Ticks per completion in the last epoch, times [`INTERVAL_SCALE`]; 0 before the first epoch has ended.
    interval: u64,
    epoch: CoalescingEpoch,
    last_post: Ticks,
    last_taken: Ticks,
    hold_max: u64,
    interval_max: u64,
    pause: u64,
}

/// Number of units of [`CoalescingPolicy::interval`] in a tick.
const INTERVAL_SCALE: u64 = 16;

#[derive(Clone, Copy, Debug, Default)]
struct CoalescingEpoch {
    began: Ticks,
    completions: u32,
    /// Number of times that a held-back interrupt got enough completions (`full_holds`), and number of times that the hold
    /// timed out first (`timed_out_holds`).
    full_holds: u32,
    timed_out_holds: u32,
}

/// Posted completions for which the guest was not interrupted yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnsignaledCompletions {
    /// Number of completions.
    pub completions: u32,
    /// Time at which the first of them was posted.
    pub since: Ticks,
}

impl CoalescingPolicy {
    /// Creates the policy, which starts with an interrupt per batch.
    #[must_use]
    pub fn new(choice: PolicyChoice, rate: TickRate) -> Self {
        Self {
            choice,
            level: 0,
            trial: None,
            should_rise: true,
            trial_wait: 1,
            next_trial_wait: 1,
            interval: 0,
            epoch: CoalescingEpoch::default(),
            last_post: Ticks::default(),
            last_taken: Ticks::default(),
            hold_max: rate.ticks(HOLD_MAX),
            interval_max: INTERVAL_SCALE * rate.ticks(INTERVAL_MAX),
            pause: rate.ticks(PAUSE),
        }
    }

    /// Sets the level and the ticks per completion, as if the policy had measured them.
    #[cfg(test)]
    pub(crate) fn set_level(&mut self, level: u8, interval: u64) {
        (self.level, self.interval) = (level, INTERVAL_SCALE * interval);
    }

    /// Notes the time at which commands were fetched: more completions are expected soon.
    #[inline]
    pub fn on_taken(&mut self, now: Ticks) {
        self.last_taken = now;
    }

    /// Notes that completions were posted.
    #[inline]
    pub fn on_posted(&mut self, completions: u32, now: Ticks) {
        let paused = now.since(self.last_post) > self.pause;
        self.last_post = now;
        if paused {
            // Timed-out holds still count: a guest that often pauses has few commands outstanding.
            (self.epoch.began, self.epoch.completions) = (now, 0);
            return;
        }
        self.epoch.completions += completions;
        if self.epoch.completions >= EPOCH {
            self.end_epoch(now);
        } else if self.epoch.completions >= EARLY_CHECK && self.is_hopeless(now) {
            self.reject_trial();
            self.begin_epoch(now);
        }
    }

    /// Returns the time until which the interrupt for the completions `owed` is held back; `None` if the guest is interrupted
    /// now. `in_flight` is the number of in-flight commands.
    #[inline]
    pub fn hold_until(
        &mut self,
        owed: UnsignaledCompletions,
        in_flight: u32,
        now: Ticks,
    ) -> Option<Ticks> {
        let level = self.trial.map_or(self.level, |trial| trial.level);
        if level == 0 {
            return None;
        }
        let enough = 1 << level;
        let UnsignaledCompletions { completions, since } = owed;
        if completions >= enough {
            self.epoch.full_holds += 1;
            return None;
        }
        let (from, ticks) = if in_flight > 0 {
            (
                since,
                2 * u64::from(enough) * self.interval / INTERVAL_SCALE,
            )
        } else {
            (self.last_taken, 2 * self.interval / INTERVAL_SCALE)
        };
        let until = Ticks(from.0 + ticks).min(Ticks(since.0 + self.hold_max));
        if now < until {
            return Some(until);
        }
        self.on_hold_timeout(now);
        None
    }

    fn begin_epoch(&mut self, now: Ticks) {
        self.epoch = CoalescingEpoch {
            began: now,
            ..CoalescingEpoch::default()
        };
    }

    fn is_hopeless(&self, now: Ticks) -> bool {
        let CoalescingEpoch {
            began, completions, ..
        } = self.epoch;
        let took = now.since(began) * INTERVAL_SCALE * 100;
        self.trial
            .is_some_and(|trial| took > trial.reference * HOPELESS_PERCENT * u64::from(completions))
    }

    #[cold]
    fn on_hold_timeout(&mut self, now: Ticks) {
        self.epoch.timed_out_holds += 1;
        let CoalescingEpoch {
            full_holds: full,
            timed_out_holds: in_vain,
            ..
        } = self.epoch;
        if in_vain < TIMED_OUT_MAX || in_vain <= full {
            return;
        }
        if self.trial.is_some() {
            self.reject_trial();
        } else {
            self.level -= 1;
        }
        self.begin_epoch(now);
    }

    #[cold]
    fn end_epoch(&mut self, now: Ticks) {
        let CoalescingEpoch {
            began, completions, ..
        } = self.epoch;
        let interval = now.since(began) * INTERVAL_SCALE / u64::from(completions);
        self.begin_epoch(now);
        // Checked once per epoch rather than per completion. No other function starts a first trial.
        if self.choice == PolicyChoice::Fixed {
            return;
        }
        let before = std::mem::replace(&mut self.interval, interval);
        if interval > self.interval_max {
            (self.level, self.trial) = (0, None);
            (self.should_rise, self.trial_wait, self.next_trial_wait) = (true, 1, 1);
            return;
        }
        match self.trial {
            Some(CoalescingTrial { level, reference }) => {
                let percent = if level > self.level {
                    BETTER_PERCENT
                } else {
                    WORSE_PERCENT
                };
                if interval * 100 < reference * percent {
                    (self.level, self.trial) = (level, None);
                    (self.trial_wait, self.next_trial_wait) = (1, 1);
                } else {
                    self.reject_trial();
                }
            }
            None if self.trial_wait > 0 => self.trial_wait -= 1,
            None => {
                let level = match (self.should_rise, self.level) {
                    (true, LEVEL_MAX) => LEVEL_MAX - 1,
                    (true, level) => level + 1,
                    (false, 0) => 1,
                    (false, level) => level - 1,
                };
                // The reference is the average of two epochs, so that a single disturbed epoch does not decide.
                let reference = u64::midpoint(before, interval);
                self.trial = Some(CoalescingTrial { level, reference });
            }
        }
    }

    /// Ends a failed trial: the previous number of completions per interrupt stays, and the next trial comes later.
    fn reject_trial(&mut self) {
        self.trial = None;
        self.should_rise = !self.should_rise;
        self.trial_wait = self.next_trial_wait;
        self.next_trial_wait = (self.next_trial_wait * 2).min(TRIAL_WAIT_MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns one unsignalled completion since `since`.
    const fn one(since: Ticks) -> UnsignaledCompletions {
        UnsignaledCompletions {
            completions: 1,
            since,
        }
    }

    #[test]
    fn a_guest_that_pauses_after_each_command_does_not_wait_for_ever() {
        let mut policy = CoalescingPolicy::new(PolicyChoice::Adaptive, TickRate::NANOSECOND);
        policy.set_level(LEVEL_MAX, 500_000);
        let (mut now, mut late) = (Ticks(1 << 40), 0);
        for _ in 0..100 {
            now.0 += 2 * PAUSE.as_nanos() as u64;
            policy.on_taken(now);
            policy.on_posted(1, now);
            if let Some(until) = policy.hold_until(one(now), 0, now) {
                late += 1;
                assert_eq!(policy.hold_until(one(now), 0, until), None);
            }
        }
        assert_eq!(late, u32::from(LEVEL_MAX) * TIMED_OUT_MAX);
    }
}
