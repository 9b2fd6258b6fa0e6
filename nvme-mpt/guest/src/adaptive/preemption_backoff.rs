//! Preemption back-off: when a spinning thread yields its processor to other threads.
//!
//! The awaited event may need this very processor, for a vCPU or a kernel thread. A waking thread gets the processor
//! immediately if the scheduler considers this fair. Other threads wait for the end of the time slice, some milliseconds.
//! So a thread that is preempted after a long spin has delayed other threads. If this happens twice within a short time,
//! the thread sleeps instead of spinning for some time, which doubles if the preemptions continue. A single preemption has
//! no effect, because any system has threads that need a processor occasionally.
//!
//! A thread is also off its processor while the processor handles interrupts or, in a virtual machine, runs another VM. The
//! thread then delays no one. If the sandbox allows it, the kernel reports the number of preemptions, which excludes these
//! cases.
//!
//! The thread never calls `sched_yield`. On some kernels, threads that yield to each other many times per time slice starve
//! all others for half a minute or more. Linux 6.18 is one, with a writer next to such threads. Sleeping has no such effect.

use std::time::Duration;

use nvme_mpt_memory::clock::{TickRate, Ticks};

use super::PolicyChoice;

/// Minimum spin time before the policy checks for preemptions: only a thread that spins for long delays others.
const LONG_SPIN: Duration = Duration::from_micros(200);

/// Duration up to which a poller's pass counts as uninterrupted.
const PASS_MAX: Duration = Duration::from_micros(2);

/// Minimum time off the processor after which another thread, which was waiting, counts as the cause. Interrupts take less
/// time. So do threads that run as soon as they wake up, such as kernel workers that complete a poller's requests.
const OFF_PROCESSOR_MIN: Duration = Duration::from_micros(200);

/// Maximum time between two preemptions for them to count as frequent. A thread that always wants the processor gets it after a
/// time slice of some milliseconds.
const FREQUENT_INTERVAL: Duration = Duration::from_millis(15);

/// Minimum and maximum (`SLEEP_MAX`) of the back-off: the time for which a preempted thread sleeps when idle instead of
/// spinning.
const SLEEP_MIN: Duration = Duration::from_millis(10);
const SLEEP_MAX: Duration = Duration::from_secs(1);

/// Time for which the thread still spins after work during the back-off, because more work often follows immediately.
const EAGER_SPIN: Duration = Duration::from_micros(5);

/// Processor time of a thread so far.
#[derive(Clone, Copy, Debug)]
pub struct ThreadProcessorUse {
    /// Ticks that the thread has run.
    pub ticks: u64,
    /// Number of times that another thread took the processor; `None` if the kernel cannot be asked.
    pub preemptions: Option<u64>,
}

/// Adaptive policy that detects whether other threads need the thread's processor.
#[derive(Debug)]
pub struct PreemptionBackoff {
    choice: PolicyChoice,
    /// Time of the last check, and the thread's processor time then; `None` while the present spin is short.
    last_check: Option<(Ticks, ThreadProcessorUse)>,
    /// Time of the last preemption.
    last_preemption: Option<Ticks>,
    sleep_span: u64,
    sleep_until: u64,
    long_spin: u64,
    pass_max: u64,
    off_processor_min: u64,
    frequent_interval: u64,
    sleep_min: u64,
    sleep_max: u64,
    eager_spin: u64,
}

impl PreemptionBackoff {
    /// Creates the policy without any preemption so far.
    #[must_use]
    pub fn new(choice: PolicyChoice, rate: TickRate) -> Self {
        let shortest = rate.ticks(SLEEP_MIN);
        Self {
            choice,
            last_check: None,
            last_preemption: None,
            sleep_span: shortest,
            sleep_until: 0,
            long_spin: rate.ticks(LONG_SPIN),
            pass_max: rate.ticks(PASS_MAX),
            off_processor_min: rate.ticks(OFF_PROCESSOR_MIN),
            frequent_interval: rate.ticks(FREQUENT_INTERVAL),
            sleep_min: shortest,
            sleep_max: rate.ticks(SLEEP_MAX),
            eager_spin: rate.ticks(EAGER_SPIN),
        }
    }

    /// Handles the end of a pass that took `took` ticks. `spun` is the time that the thread has spun without work or sleep.
    /// `on_processor` returns the thread's processor time; it is called only after long spins. Returns whether the thread
    /// has delayed other threads.
    #[inline]
    pub fn on_pass(
        &mut self,
        now: Ticks,
        spun: u64,
        took: u64,
        on_processor: impl FnOnce() -> ThreadProcessorUse,
    ) -> bool {
        if spun < self.long_spin {
            self.last_check = None;
            return false;
        }
        if self.last_check.is_some() && took <= self.pass_max {
            return false;
        }
        self.check_preemption(now, on_processor())
    }

    #[cold]
    fn check_preemption(&mut self, now: Ticks, on_processor: ThreadProcessorUse) -> bool {
        let Some((then, before)) = self.last_check.replace((now, on_processor)) else {
            return false;
        };
        let run_ticks = on_processor.ticks.saturating_sub(before.ticks);
        let away = now.since(then).saturating_sub(run_ticks);
        let was_preempted = on_processor.preemptions.is_none_or(|preemptions| {
            before
                .preemptions
                .is_some_and(|before| preemptions > before)
        });
        if away <= self.off_processor_min || !was_preempted || self.choice == PolicyChoice::Fixed {
            return false;
        }
        let before = self.last_preemption.replace(now);
        if before.is_none_or(|before| now.since(before) > self.frequent_interval) {
            return false;
        }
        let again =
            self.sleep_until > 0 && now.0 < self.sleep_until.saturating_add(self.sleep_span);
        self.sleep_span = match again {
            true => (self.sleep_span * 2).min(self.sleep_max),
            false => self.sleep_min,
        };
        self.sleep_until = now.0.saturating_add(self.sleep_span);
        true
    }

    /// Returns whether the thread should sleep instead of spin, `idle` ticks after its last work.
    #[inline]
    #[must_use]
    pub fn should_sleep(&self, now: Ticks, idle: u64) -> bool {
        idle >= self.eager_spin && now.0 < self.sleep_until
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: u64 = 1_000;
    const MS: u64 = 1_000_000;

    fn adaptive() -> PreemptionBackoff {
        PreemptionBackoff::new(PolicyChoice::Adaptive, TickRate::NANOSECOND)
    }

    /// Returns the processor use of a thread that has run for `ticks`, in a sandbox.
    fn ticks(ticks: u64) -> ThreadProcessorUse {
        ThreadProcessorUse {
            ticks,
            preemptions: None,
        }
    }

    /// Preempts a thread twice after long spins. Returns whether the thread still spins at `now`.
    fn preempt(backoff: &mut PreemptionBackoff, now: u64) -> bool {
        let mut once = |now| {
            assert!(!backoff.on_pass(Ticks(now), 0, 100, || unreachable!()));
            assert!(!backoff.on_pass(Ticks(now - 320 * US), 200 * US, 100, || ticks(700)));
            assert!(!backoff.on_pass(Ticks(now - 300 * US), 220 * US, 100, || unreachable!()));
            backoff.on_pass(Ticks(now), 520 * US, 300 * US, || ticks(2700))
        };
        assert!(!once(now - 500 * US), "a single one");
        once(now)
    }

    #[test]
    fn a_thread_that_kept_others_waiting_sleeps_for_a_while() {
        let mut backoff = adaptive();
        assert!(!backoff.should_sleep(Ticks(1), 5 * US));
        assert!(preempt(&mut backoff, MS));
        assert!(
            !backoff.should_sleep(Ticks(MS), 4999),
            "work may come at once"
        );
        assert!(backoff.should_sleep(Ticks(MS), 5 * US));
        assert!(backoff.should_sleep(Ticks(11 * MS - 1), 5 * US));
        assert!(!backoff.should_sleep(Ticks(11 * MS), 5 * US));
    }

    #[test]
    fn preemptions_before_a_long_spin_and_interrupts_are_no_harm() {
        let mut backoff = adaptive();
        let now = Ticks(MS);
        assert!(!backoff.on_pass(now, 199 * US, MS, || unreachable!()));
        assert!(!backoff.on_pass(now, 200 * US, MS, || ticks(3 * US)));
        let later = Ticks(now.0 + 50 * US);
        assert!(
            !backoff.on_pass(later, 250 * US, 4 * US, || ticks(49 * US)),
            "an interrupt of four microseconds"
        );
        // The poller had work, so its spin is short.
        assert!(!backoff.on_pass(later, 0, 100, || unreachable!()));
        let later = Ticks(now.0 + MS);
        assert!(!backoff.on_pass(later, 200 * US, MS, || ticks(60 * US)));
        assert!(!backoff.should_sleep(later, MS));
    }

    #[test]
    fn workers_that_take_the_processor_for_a_moment_are_no_harm() {
        let mut backoff = adaptive();
        for worker in 0..100 {
            let now = MS * (1 + worker);
            assert!(!backoff.on_pass(Ticks(now), 200 * US, 100, || ticks(0)));
            let later = Ticks(now + 190 * US);
            assert!(!backoff.on_pass(later, 390 * US, 150 * US, || ticks(10 * US)));
            assert!(!backoff.on_pass(later, 0, 100, || unreachable!()));
        }
        assert!(!backoff.should_sleep(Ticks(101 * MS), MS));
    }

    #[test]
    fn time_that_no_thread_took_is_no_harm() {
        let counted = |ticks, preemptions| ThreadProcessorUse {
            ticks,
            preemptions: Some(preemptions),
        };
        let mut backoff = adaptive();
        assert!(!backoff.on_pass(Ticks(MS), 200 * US, 100, || counted(700, 3)));
        // The hypervisor's host used the processor.
        assert!(!backoff.on_pass(Ticks(2 * MS), 300 * US, MS, || counted(800, 3)));
        assert!(!backoff.on_pass(Ticks(3 * MS), 400 * US, MS, || counted(900, 4)));
        // A short preemption.
        assert!(!backoff.on_pass(Ticks(3 * MS + 9), 400 * US, 3 * US, || counted(901, 5)));
        assert!(backoff.on_pass(Ticks(18 * MS), 500 * US, MS, || counted(901, 6)));
    }

    #[test]
    fn the_while_grows_when_it_happens_again_soon() {
        let mut backoff = adaptive();
        let mut now = MS;
        for expected in [10, 20, 40, 80, 160, 320, 640, 1000, 1000] {
            assert!(preempt(&mut backoff, now));
            let end = now + expected * MS;
            assert!(backoff.should_sleep(Ticks(end - 1), 5 * US), "{expected}");
            assert!(!backoff.should_sleep(Ticks(end), 5 * US), "{expected}");
            now = end + expected * MS - 1;
        }
        // After a long time without preemption, the back-off starts at its minimum again.
        now += 2000 * MS;
        assert!(preempt(&mut backoff, now));
        assert!(!backoff.should_sleep(Ticks(now + 10 * MS), 5 * US));
    }

    #[test]
    fn a_fixed_thread_never_sleeps() {
        let mut backoff = PreemptionBackoff::new(PolicyChoice::Fixed, TickRate::NANOSECOND);
        assert!(!preempt(&mut backoff, MS));
        assert!(!backoff.should_sleep(Ticks(MS), MS));
    }
}
