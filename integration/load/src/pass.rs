//! Passes of plans over lanes, and waiting for completions.

use std::time::{Duration, Instant};

use super::LoadError;
use super::clock::ticks;
use super::lane::{Lane, PassLimits};
use super::options::LoadOptions;
use super::plan::CommandPlan;
use super::target::LoadTarget;

/// Number of turns without a completion after which the clock is read.
const IDLE_TURNS: u32 = 64;
/// Time of spinning without a completion. After this time, the thread sleeps, since the device's thread may need this
/// processor.
const SPIN_MAX: Duration = Duration::from_micros(500);
/// Duration of a sleep that yields the processor.
const REST: Duration = Duration::from_micros(20);
/// Time without an interrupt after which the queue is checked nevertheless.
const LOST_INTERRUPT: Duration = Duration::from_secs(1);

/// Returns the limits of the measured pass, which starts now.
pub(super) fn measured_limits(target: &LoadTarget, options: &LoadOptions) -> PassLimits {
    let batch = u32::from(options.batch);
    match options.count {
        Some(count) => PassLimits {
            count,
            ..PassLimits::for_whole_plan(batch)
        },
        None => {
            let measure_from = ticks() + target.ticks(options.warmup);
            PassLimits {
                count: u64::MAX,
                measure_from,
                until: measure_from + target.ticks(options.seconds),
                batch,
            }
        }
    }
}

/// Runs the plans to their end, or until the limits are reached. Then waits until all commands have completed.
pub(super) fn pass<P: CommandPlan>(
    lanes: &mut [Lane],
    plans: &mut [P],
    limits: PassLimits,
    options: &LoadOptions,
) -> Result<(), LoadError> {
    for (lane, plan) in lanes.iter_mut().zip(&mut *plans) {
        lane.begin(plan, &limits)?;
    }
    let mut idle = CompletionWait::new(options.timeout());
    while lanes.iter().any(|lane| lane.outstanding() > 0) {
        let mut done = 0;
        for (lane, plan) in lanes.iter_mut().zip(&mut *plans) {
            done += lane.turn(plan, &limits)?;
        }
        if done > 0 {
            idle.reset();
        } else if options.interrupts {
            wait_for_interrupt(&mut lanes[0], &mut idle)?;
        } else if !idle.spin()
            && let Some(lane) = lanes.iter().find(|lane| lane.outstanding() > 0)
        {
            return Err(lane.stall_error(options.timeout()));
        }
    }
    for lane in lanes {
        lane.end();
    }
    Ok(())
}

/// Waits for the queue's interrupt vector, as a guest does: the queue is only checked after the vector was signalled.
pub(super) fn wait_for_interrupt(
    lane: &mut Lane,
    idle: &mut CompletionWait,
) -> Result<(), LoadError> {
    let Some(interrupt) = lane.queue.cq.interrupt() else {
        return Err(LoadError::Options("The queue has no vector".to_owned()));
    };
    let signals = interrupt
        .wait(LOST_INTERRUPT)
        .map_err(nvme_mpt_tests::Error::Interrupt)?;
    if signals > 0 {
        lane.count_interrupt();
    } else if lane.queue.cq.has_entry() {
        lane.tally.lost_interrupts += 1;
    } else if !idle.is_within_timeout() {
        return Err(lane.stall_error(idle.timeout));
    }
    Ok(())
}

/// Wait for completions with a timeout. It spins at first.
pub(super) struct CompletionWait {
    spins: u32,
    since: Option<Instant>,
    timeout: Duration,
}

impl CompletionWait {
    pub(super) fn new(timeout: Duration) -> Self {
        Self {
            spins: 0,
            since: None,
            timeout,
        }
    }

    /// Resets the wait after a completion.
    #[inline]
    pub(super) fn reset(&mut self) {
        self.spins = 0;
        self.since = None;
    }

    /// Waits briefly, as there is no completion. Returns false after the timeout.
    #[inline]
    pub(super) fn spin(&mut self) -> bool {
        self.spins += 1;
        if self.spins < IDLE_TURNS {
            return true;
        }
        self.spins = 0;
        let idle = self.since.get_or_insert_with(Instant::now).elapsed();
        if idle > SPIN_MAX {
            std::thread::sleep(REST);
        }
        idle < self.timeout
    }

    /// Returns whether the timeout has not passed yet.
    fn is_within_timeout(&mut self) -> bool {
        self.since.get_or_insert_with(Instant::now).elapsed() < self.timeout
    }
}
