//! Results of a load.

use std::collections::BTreeMap;
use std::fmt;

use hdrhistogram::Histogram;
use nvme_mpt_tests::doorbell::DoorbellMode;
use serde::Serialize;

use super::lane::{LaneMeasurements, latencies};
use super::options::{AccessPattern, LoadOptions};
use super::target::LoadTarget;

/// Latency in seconds above which an I/O counts as too slow on any machine.
const SLOW_SECONDS: f64 = 0.1;

/// Latencies in microseconds.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct LatencySummary {
    /// Minimum.
    pub min: f64,
    /// Mean.
    pub mean: f64,
    /// Median.
    pub p50: f64,
    /// 90th percentile.
    pub p90: f64,
    /// 99th percentile.
    pub p99: f64,
    /// 99.9th percentile.
    pub p99_9: f64,
    /// Maximum.
    pub max: f64,
}

/// Group of commands with similar latencies in the distribution.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct DistributionBucket {
    /// Lower bound in microseconds.
    pub from_us: f64,
    /// Number of commands.
    pub commands: u64,
}

/// Results of a load.
#[derive(Clone, Debug, Serialize)]
pub struct LoadReport {
    /// Model number of the controller.
    pub model: String,
    /// Size of the namespace in bytes.
    pub capacity: u64,
    /// Size of a command in bytes.
    pub size: u64,
    /// Percentage of reads.
    pub read_percent: u8,
    /// True if addresses were random.
    pub random: bool,
    /// I/O queue pairs.
    pub queues: u16,
    /// In-flight commands per queue.
    pub qd: u16,
    /// Doorbell mode: `shadow`, `mapped` or `trap`.
    pub doorbells: &'static str,
    /// True if completions were signalled by interrupts.
    pub interrupts: bool,
    /// True if all data was verified.
    pub verified: bool,
    /// Measured time in seconds.
    pub seconds: f64,
    /// Number of measured commands.
    pub commands: u64,
    /// Commands per second.
    pub iops: f64,
    /// Data rate in MiB per second.
    pub mib_s: f64,
    /// Latencies in microseconds.
    pub latency_us: LatencySummary,
    /// Trapped doorbell writes per command, which would be VM exits of a guest.
    pub doorbell_writes_per_io: f64,
    /// Doorbell rings by any means per command.
    pub doorbell_rings_per_io: f64,
    /// Interrupts per command.
    pub interrupts_per_io: f64,
    /// Number of completions for which no interrupt came within a second.
    pub lost_interrupts: u64,
    /// Number of commands that took more than 50 ms.
    pub over_50_ms: u64,
    /// Number of commands that took more than 100 ms.
    pub over_100_ms: u64,
    /// Distribution of latencies.
    pub distribution: Vec<DistributionBucket>,
}

impl LoadReport {
    pub(super) fn new(
        target: &LoadTarget,
        tallies: &[LaneMeasurements],
        options: &LoadOptions,
    ) -> Self {
        let mut latency = latencies();
        for tally in tallies {
            latency += &tally.latency;
        }
        let rate = target.ticks_per_second;
        let micros = |ticks: f64| ticks / rate * 1e6;
        let quantile = |share| micros(latency.value_at_quantile(share) as f64);
        let commands = latency.len();
        let over = |seconds: f64| commands - latency.count_between(0, (seconds * rate) as u64);
        let per_io = |count: fn(&LaneMeasurements) -> u64| {
            tallies.iter().map(count).sum::<u64>() as f64 / commands.max(1) as f64
        };
        // All lanes start nearly at the same time: they only differ by the preparation of their first commands.
        let from = tallies.iter().map(|t| t.from).min().unwrap_or(0);
        let to = tallies.iter().map(|t| t.to).max().unwrap_or(0);
        let seconds = to.saturating_sub(from) as f64 / rate;
        let iops = if seconds > 0.0 {
            commands as f64 / seconds
        } else {
            0.0
        };
        Self {
            model: target.model.clone(),
            capacity: target.capacity,
            size: options.size,
            read_percent: options.mix,
            random: options.pattern == AccessPattern::Random,
            queues: options.queues,
            qd: options.depth(),
            doorbells: match target.doorbells {
                DoorbellMode::Shadow => "shadow",
                DoorbellMode::Mapped => "mapped",
                DoorbellMode::Trap => "trap",
            },
            interrupts: options.interrupts,
            verified: options.verify,
            seconds,
            commands,
            iops,
            mib_s: iops * options.size as f64 / f64::from(1 << 20),
            latency_us: LatencySummary {
                min: micros(latency.min() as f64),
                mean: micros(latency.mean()),
                p50: quantile(0.5),
                p90: quantile(0.9),
                p99: quantile(0.99),
                p99_9: quantile(0.999),
                max: micros(latency.max() as f64),
            },
            doorbell_writes_per_io: per_io(|t| t.doorbell_writes),
            doorbell_rings_per_io: per_io(|t| t.doorbell_rings),
            interrupts_per_io: per_io(|t| t.interrupts),
            lost_interrupts: tallies.iter().map(|t| t.lost_interrupts).sum(),
            over_50_ms: over(SLOW_SECONDS / 2.0),
            over_100_ms: over(SLOW_SECONDS),
            distribution: groups(&latency)
                .into_iter()
                .map(|(ticks, commands)| DistributionBucket {
                    from_us: micros(ticks as f64),
                    commands,
                })
                .collect(),
        }
    }

    /// Returns the distribution of latencies as text, with one line for each group.
    pub fn histogram(&self) -> String {
        let most = self.distribution.iter().map(|b| b.commands).max();
        let most = most.unwrap_or(0).max(1);
        let mut text = String::new();
        let mut below = 0;
        for bucket in &self.distribution {
            below += bucket.commands;
            let share = 100.0 * below as f64 / self.commands.max(1) as f64;
            let bar = "#".repeat((40 * bucket.commands / most) as usize);
            text += &format!(
                "{:>12.3} us {:>12} {share:>9.4} % {bar}\n",
                bucket.from_us, bucket.commands
            );
        }
        text
    }
}

/// Returns the groups of latencies that are not empty, as lower bound and count. Each octave has four groups.
fn groups(latency: &Histogram<u64>) -> BTreeMap<u64, u64> {
    let mut groups = BTreeMap::new();
    for bucket in latency.iter_recorded() {
        let lowest = latency.lowest_equivalent(bucket.value_iterated_to());
        // Latencies of one group have the same highest set bit, and the same two bits behind it.
        let shift = lowest.max(1).ilog2().saturating_sub(2);
        *groups.entry(lowest >> shift << shift).or_default() += bucket.count_at_value();
    }
    groups
}

impl fmt::Display for LoadReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pattern = if self.random { "random" } else { "sequential" };
        writeln!(
            f,
            "{} ({} MiB), {} bytes {pattern}, {} % reads, {} x QD {}, {} doorbells, {}{}",
            self.model,
            self.capacity >> 20,
            self.size,
            self.read_percent,
            self.queues,
            self.qd,
            self.doorbells,
            if self.interrupts {
                "interrupts"
            } else {
                "polled"
            },
            if self.verified { ", verified" } else { "" },
        )?;
        writeln!(
            f,
            "  {:.0} IOPS, {:.1} MiB/s ({} commands in {:.3} s)",
            self.iops, self.mib_s, self.commands, self.seconds
        )?;
        let l = &self.latency_us;
        writeln!(
            f,
            "  latency us: min {:.2}, mean {:.2}, p50 {:.2}, p90 {:.2}, p99 {:.2}, p99.9 {:.2}, max {:.2}",
            l.min, l.mean, l.p50, l.p90, l.p99, l.p99_9, l.max
        )?;
        write!(
            f,
            "  per I/O: {:.5} doorbell writes, {:.3} doorbells rung, {:.3} interrupts",
            self.doorbell_writes_per_io, self.doorbell_rings_per_io, self.interrupts_per_io
        )?;
        if self.over_50_ms > 0 {
            write!(
                f,
                "\n  SLOW: {} over 50 ms, {} over 100 ms",
                self.over_50_ms, self.over_100_ms
            )?;
        }
        if self.lost_interrupts > 0 {
            write!(f, "\n  LOST: {} interrupts", self.lost_interrupts)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_hold_every_latency_once_and_in_order() {
        let mut latency = latencies();
        for ticks in 0..1 << 16 {
            latency.saturating_record(ticks);
        }
        let mut next = 0;
        for (lowest, count) in groups(&latency) {
            assert_eq!(lowest, next);
            next += count;
        }
        assert_eq!(next, 1 << 16);
    }
}
