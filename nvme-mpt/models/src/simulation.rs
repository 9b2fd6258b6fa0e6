//! Runs a model without a drive, on a simulated clock. Hours of a drive's operation are simulated in seconds, and the results
//! are equal on every machine.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::time::TickUnit;
use super::{DriveModel, DriveProfile, FlashWear, MediaAccess, MediaWork, ModelKind, lock};

/// Block size as a base-2 logarithm: the smallest one, so that every command size is a whole number of blocks.
const LBA_SHIFT: u8 = 9;

/// A modelled drive without data.
#[derive(Debug)]
pub struct ModelSimulation {
    model: DriveModel,
    bytes: u64,
    now: u64,
    random: u64,
}

/// Direction of commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadDirection {
    /// Reads.
    Read,
    /// Writes.
    Write,
}

/// Access pattern.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadOrder {
    /// Consecutive blocks from the first to the last, over and over.
    Sequential,
    /// Random multiples of the command size.
    Random,
}

/// A workload with a constant number of commands in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SimulatedLoad {
    /// Direction of the commands.
    pub direction: LoadDirection,
    /// Access pattern of the commands.
    pub order: LoadOrder,
    /// Size of a command in bytes: a multiple of 512, and at most the size of the drive.
    pub bytes: u64,
    /// Number of commands in flight, at least one.
    pub depth: usize,
    /// Total number of commands.
    pub commands: usize,
}

/// Result of a workload. All times are in nanoseconds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SimulatedLoadResult {
    /// Time when the workload started.
    pub started_at: u64,
    /// Time when the last command completed.
    pub ended_at: u64,
    /// Time when each command completed, in order of arrival.
    pub completion_times: Vec<u64>,
    /// Latency of each command, in order of arrival.
    pub latencies: Vec<u64>,
}

impl SimulatedLoadResult {
    /// Returns the bandwidth in bytes per second, for commands of `bytes` bytes.
    #[must_use]
    pub fn bandwidth(&self, bytes: u64) -> f64 {
        let nanoseconds = (self.ended_at - self.started_at).max(1);
        bytes as f64 * self.completion_times.len() as f64 * 1e9 / nanoseconds as f64
    }

    /// Returns the latency that `per_mille` of 1000 commands do not exceed; 0 without commands.
    #[must_use]
    pub fn quantile(&self, per_mille: f64) -> u64 {
        let mut sorted = self.latencies.clone();
        sorted.sort_unstable();
        let rank = (sorted.len() as f64 * per_mille / 1000.0).ceil() as usize;
        sorted.get(rank.max(1) - 1).copied().unwrap_or_default()
    }
}

impl ModelSimulation {
    /// Creates a new drive of `bytes` bytes; `None` if the profile has no timing.
    #[must_use]
    pub fn new(profile: &DriveProfile, bytes: u64) -> Option<Self> {
        let blocks = bytes >> LBA_SHIFT;
        let model = DriveModel::with_timebase(profile, blocks, LBA_SHIFT, TickUnit::Nanoseconds)?;
        Some(Self {
            model,
            bytes,
            now: 0,
            random: 1,
        })
    }

    /// Runs a workload on an idle drive. The workload starts a second after the end of the previous workload.
    pub fn run(&mut self, load: &SimulatedLoad) -> SimulatedLoadResult {
        let mut outcome = SimulatedLoadResult {
            started_at: self.now,
            ended_at: self.now,
            ..SimulatedLoadResult::default()
        };
        let places = (self.bytes / load.bytes.max(1)).max(1);
        let mut flying = BinaryHeap::new();
        for index in 0..load.commands {
            if flying.len() >= load.depth.max(1)
                && let Some(Reverse(done)) = flying.pop()
            {
                self.now = self.now.max(done);
            }
            let place = match load.order {
                LoadOrder::Sequential => index as u64 % places,
                LoadOrder::Random => self.random_below(places),
            };
            let work = MediaWork {
                access: match load.direction {
                    LoadDirection::Read => MediaAccess::Read,
                    LoadDirection::Write => MediaAccess::Write,
                },
                slba: (place * load.bytes) >> LBA_SHIFT,
                blocks: load.bytes >> LBA_SHIFT,
            };
            let due = self.due_time(&work);
            outcome.completion_times.push(due);
            outcome.latencies.push(due - self.now);
            outcome.ended_at = outcome.ended_at.max(due);
            flying.push(Reverse(due));
        }
        self.now = outcome.ended_at + 1_000_000_000;
        outcome
    }

    /// Returns the wear of the flash; `None` if the model does not count wear.
    #[must_use]
    pub fn wear(&self) -> Option<FlashWear> {
        self.model.wear()
    }

    fn due_time(&self, work: &MediaWork) -> u64 {
        match &self.model.0 {
            ModelKind::Nvm(model) => model.due_time(work, self.now),
            ModelKind::Ssd(model) => {
                let mut model = lock(model);
                model.begin_batch(self.now);
                model.due_time(work, self.now)
            }
            ModelKind::Zns(model) => {
                let mut model = lock(model);
                model.begin_batch(self.now);
                model.due_time(work, self.now)
            }
        }
        .max(self.now)
    }

    /// Returns a number below `limit` from a linear congruential generator, so that results are reproducible.
    fn random_below(&mut self, limit: u64) -> u64 {
        self.random = self
            .random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 33) % limit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn load(direction: LoadDirection, order: LoadOrder, bytes: u64, depth: usize) -> SimulatedLoad {
        SimulatedLoad {
            direction,
            order,
            bytes,
            depth,
            commands: (64 * MIB / bytes) as usize,
        }
    }

    #[test]
    fn a_drive_without_erase_blocks_does_what_its_profile_says() {
        let profile = DriveProfile::find_built_in("nvm").expect("comes along");
        let mut drive = ModelSimulation::new(&profile, 64 * MIB).expect("a model");
        let alone = drive.run(&load(LoadDirection::Read, LoadOrder::Random, 4096, 1));
        assert_eq!(
            (alone.quantile(500.0), alone.quantile(999.0)),
            (12_000, 12_000)
        );
        let all = drive.run(&load(LoadDirection::Write, LoadOrder::Sequential, MIB, 32));
        let ratio = all.bandwidth(MIB) / f64::from(1_u32 << 31);
        assert!((0.98..=1.01).contains(&ratio), "{ratio}");
        assert_eq!(drive.wear(), None);
        assert_eq!(all.started_at, alone.ended_at + 1_000_000_000);
    }

    #[test]
    fn the_same_load_takes_the_same_time() {
        let profile = DriveProfile::find_built_in("ssd").expect("comes along");
        let run = || {
            let mut drive = ModelSimulation::new(&profile, 64 * MIB).expect("a model");
            drive.run(&load(LoadDirection::Write, LoadOrder::Sequential, MIB, 8));
            let outcome = drive.run(&load(LoadDirection::Write, LoadOrder::Random, 4096, 32));
            (outcome, drive.wear().expect("flash"))
        };
        let (outcome, wear) = run();
        assert_eq!((outcome.clone(), wear), run());
        assert_eq!(
            (outcome.completion_times.len(), wear.host_pages),
            (16384, 2 * 16384)
        );
        assert!(outcome.quantile(1000.0) > outcome.quantile(0.0));
    }

    #[test]
    fn nothing_takes_no_time() {
        let profile = DriveProfile::find_built_in("nvm").expect("comes along");
        let nothing = SimulatedLoad {
            commands: 0,
            ..load(LoadDirection::Read, LoadOrder::Random, 4096, 0)
        };
        let outcome = ModelSimulation::new(&profile, MIB)
            .expect("a model")
            .run(&nothing);
        assert_eq!(
            (outcome.quantile(500.0), outcome.bandwidth(4096) as u64),
            (0, 0)
        );
    }
}
