//! Single I/Os with random pauses, in which the queue's poller parks, so that the next I/O must wake it.

use std::time::{Duration, Instant};

use nvme_mpt_tests::rng::Rng;

use super::LoadError;
use super::lane::{Lane, PassLimits};
use super::options::LoadOptions;
use super::pass::{CompletionWait, measured_limits, wait_for_interrupt};
use super::plan::MixedPlan;
use super::target::LoadTarget;

/// Runs commands one at a time until the limits are reached. Pauses for at most `most` before each command.
pub(super) fn run(
    lane: &mut Lane,
    mix: &mut MixedPlan,
    most: Duration,
    target: &LoadTarget,
    options: &LoadOptions,
) -> Result<(), LoadError> {
    let total = measured_limits(target, options);
    let seconds = match options.count {
        Some(_) => f64::INFINITY,
        None => options.seconds,
    };
    // Each pass runs one command. The first pass starts the measurement.
    let once = PassLimits {
        count: 1,
        ..PassLimits::for_whole_plan(1)
    };
    let mut pauses = Rng::new(options.seed ^ 0x7061_7573_6573);
    let start = Instant::now();
    let mut first = None;
    let mut commands = 0;
    while commands < total.count && start.elapsed().as_secs_f64() < seconds {
        let pause = pauses.below(most.as_nanos() as u64 + 1);
        std::thread::sleep(Duration::from_nanos(pause));
        lane.begin(mix, &once)?;
        first.get_or_insert(lane.tally.from);
        let mut idle = CompletionWait::new(options.timeout());
        while lane.turn(mix, &once)? == 0 {
            if options.interrupts {
                wait_for_interrupt(lane, &mut idle)?;
            } else if !idle.spin() {
                return Err(lane.stall_error(options.timeout()));
            }
        }
        lane.end();
        commands += 1;
    }
    lane.tally.from = first.unwrap_or(lane.tally.from);
    Ok(())
}
