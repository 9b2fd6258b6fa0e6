//! A pass of plans over lanes, and waiting for completions.

use std::time::{Duration, Instant};

use super::LoadError;
use super::clock::ticks;
use super::lane::{Lane, Limits};
use super::options::Options;
use super::plan::Plan;
use super::target::Target;

/// Number of turns without a completion between reads of the clock.
const IDLE_TURNS: u32 = 64;
/// Spinning time without a completion, after which the device's thread may need this processor.
const EAGER: Duration = Duration::from_micros(500);
/// Sleep that yields the processor.
const REST: Duration = Duration::from_micros(20);
/// Time without an interrupt after which the queue is checked anyway.
const LOST_INTERRUPT: Duration = Duration::from_secs(1);

/// Returns the limits of the measured pass, starting now.
pub(super) fn timed(target: &Target, options: &Options) -> Limits {
    let batch = u32::from(options.batch);
    match options.count {
        Some(count) => Limits {
            count,
            ..Limits::none(batch)
        },
        None => {
            let measure_from = ticks() + target.ticks(options.warmup);
            Limits {
                count: u64::MAX,
                measure_from,
                until: measure_from + target.ticks(options.seconds),
                batch,
            }
        }
    }
}

/// Runs the plans until their end or the limits, and until all commands have completed.
pub(super) fn pass<P: Plan>(
    lanes: &mut [Lane],
    plans: &mut [P],
    limits: Limits,
    options: &Options,
) -> Result<(), LoadError> {
    for (lane, plan) in lanes.iter_mut().zip(&mut *plans) {
        lane.begin(plan, &limits)?;
    }
    let mut idle = Idle::new(options.timeout());
    while lanes.iter().any(|lane| lane.outstanding() > 0) {
        let mut done = 0;
        for (lane, plan) in lanes.iter_mut().zip(&mut *plans) {
            done += lane.turn(plan, &limits)?;
        }
        if done > 0 {
            idle.over();
        } else if options.interrupts {
            wait_for_interrupt(&mut lanes[0], &mut idle)?;
        } else if !idle.spin()
            && let Some(lane) = lanes.iter().find(|lane| lane.outstanding() > 0)
        {
            return Err(lane.stalled(options.timeout()));
        }
    }
    for lane in lanes {
        lane.end();
    }
    Ok(())
}

/// Waits for the queue's interrupt vector, as a guest does. The queue is not checked before the vector is signalled.
pub(super) fn wait_for_interrupt(lane: &mut Lane, idle: &mut Idle) -> Result<(), LoadError> {
    let Some(interrupt) = lane.queue.cq.interrupt() else {
        return Err(LoadError::Options("The queue has no vector".to_owned()));
    };
    let signals = interrupt
        .wait(LOST_INTERRUPT)
        .map_err(nvme_mpt_tests::Error::Interrupt)?;
    if signals > 0 {
        lane.interrupted();
    } else if lane.queue.cq.ready() {
        lane.tally.lost_interrupts += 1;
    } else if !idle.in_time() {
        return Err(lane.stalled(idle.timeout));
    }
    Ok(())
}

/// Spinning for completions with a timeout.
pub(super) struct Idle {
    turns: u32,
    since: Option<Instant>,
    timeout: Duration,
}

impl Idle {
    pub(super) fn new(timeout: Duration) -> Self {
        Self {
            turns: 0,
            since: None,
            timeout,
        }
    }

    /// Resets the wait after a completion.
    #[inline]
    pub(super) fn over(&mut self) {
        self.turns = 0;
        self.since = None;
    }

    /// Waits for a moment without a completion. Returns false after the timeout.
    #[inline]
    pub(super) fn spin(&mut self) -> bool {
        self.turns += 1;
        if self.turns < IDLE_TURNS {
            return true;
        }
        self.turns = 0;
        let idle = self.since.get_or_insert_with(Instant::now).elapsed();
        if idle > EAGER {
            std::thread::sleep(REST);
        }
        idle < self.timeout
    }

    /// Returns whether the timeout has not passed yet.
    fn in_time(&mut self) -> bool {
        self.since.get_or_insert_with(Instant::now).elapsed() < self.timeout
    }
}
