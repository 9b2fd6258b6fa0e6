//! Threads, each with some lanes.

use std::time::Duration;

use super::LoadError;
use super::clock;
use super::lane::{Lane, LaneMeasurements};
use super::options::LoadOptions;
use super::pass::{measured_limits, pass};
use super::plan::MixedPlan;
use super::target::LoadTarget;
use super::{paced, verified};

/// Runs the load on all lanes, by several threads. Returns the lanes' measurements.
pub(super) fn run(
    lanes: Vec<Lane>,
    target: &LoadTarget,
    options: &LoadOptions,
) -> Result<Vec<LaneMeasurements>, LoadError> {
    let queues = lanes.len();
    let threads = usize::from(options.threads.unwrap_or(options.queues)).min(queues);
    let mut shares: Vec<Vec<(u64, Lane)>> = (0..threads).map(|_| Vec::new()).collect();
    for (index, lane) in (0..).zip(lanes) {
        shares[index as usize % threads].push((index, lane));
    }
    std::thread::scope(|scope| {
        let running: Vec<_> = shares
            .into_iter()
            .enumerate()
            .map(|(thread, share)| {
                scope.spawn(move || {
                    if !options.cpu.is_empty() {
                        let cpu = options.cpu[thread % options.cpu.len()];
                        clock::pin(cpu).map_err(|source| LoadError::System {
                            what: "Choosing the processor",
                            source,
                        })?;
                    }
                    drive(share, queues as u64, target, options)
                })
            })
            .collect();
        let mut tallies = Vec::with_capacity(queues);
        for thread in running {
            match thread.join() {
                Ok(result) => tallies.extend(result?),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        Ok(tallies)
    })
}

/// Runs the load on the lanes of one thread.
fn drive(
    share: Vec<(u64, Lane)>,
    queues: u64,
    target: &LoadTarget,
    options: &LoadOptions,
) -> Result<Vec<LaneMeasurements>, LoadError> {
    let (indices, mut lanes): (Vec<u64>, Vec<Lane>) = share.into_iter().unzip();
    let mut mixes: Vec<MixedPlan> = indices
        .iter()
        .map(|&index| {
            let (pattern, percent) = (options.pattern, options.mix);
            let mix = MixedPlan::new(target, index, queues, pattern, percent, options.seed);
            match options.deallocate {
                true => mix.with_deallocation(target.blocks_per_command),
                false => mix,
            }
        })
        .collect();
    if let Some(most) = options.pause_us {
        for (lane, mix) in lanes.iter_mut().zip(&mut mixes) {
            paced::run(lane, mix, Duration::from_micros(most), target, options)?;
        }
    } else if options.verify {
        verified::run(&mut lanes, &indices, queues, target, options)?;
    } else {
        pass(
            &mut lanes,
            &mut mixes,
            measured_limits(target, options),
            options,
        )?;
    }
    Ok(lanes.into_iter().map(|lane| lane.tally).collect())
}
