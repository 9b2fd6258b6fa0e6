//! One pass of plans over lanes, and the wait for what they have outstanding.

use std::time::{Duration, Instant};

use super::LoadError;
use super::clock::ticks;
use super::lane::{Lane, Limits};
use super::options::Options;
use super::plan::Plan;
use super::target::Target;

/// Turns without a completion between two looks at the clock.
const IDLE_TURNS: u32 = 64;
/// Time without a completion after which the thread that completes our commands may need this processor.
const EAGER: Duration = Duration::from_micros(500);
/// Sleep that leaves it the processor.
const REST: Duration = Duration::from_micros(20);
/// Time without an interrupt after which the queue is examined all the same.
const LOST_INTERRUPT: Duration = Duration::from_secs(1);

/// Returns the limits that the options give for the measured pass, from now on.
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

/// Runs the plans until they or the limits end, and every command has completed.
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

/// As an interrupt handler is entered: the queue is looked at again only after its vector was signalled.
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

/// Spinning for completions, with an end.
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

    /// Something completed.
    #[inline]
    pub(super) fn over(&mut self) {
        self.turns = 0;
        self.since = None;
    }

    /// Nothing completed: false when that has been so for too long.
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

    /// Nothing completed: whether that may still go on.
    fn in_time(&mut self) -> bool {
        self.since.get_or_insert_with(Instant::now).elapsed() < self.timeout
    }
}
