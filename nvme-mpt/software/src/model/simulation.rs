//! Runs a model without a drive, on a simulated clock. Hours of a drive take seconds, and results are equal on every machine.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::time::Timebase;
use super::{Access, Model, Profile, Wear, Work, lock};

/// Smallest block size, so that every command size is a whole number of blocks.
const LBA_SHIFT: u8 = 9;

/// A modelled drive without data.
#[derive(Debug)]
pub struct Simulation {
    model: Model,
    bytes: u64,
    now: u64,
    random: u64,
}

/// Direction of commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Reads.
    Read,
    /// Writes.
    Write,
}

/// Access pattern.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Consecutive blocks from the first, starting over at the end.
    Sequential,
    /// Random multiples of the command size.
    Random,
}

/// A workload with a constant number of commands in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    /// Direction of the commands.
    pub direction: Direction,
    /// Access pattern of the commands.
    pub order: Order,
    /// Bytes per command: a multiple of 512, and at most the size of the drive.
    pub bytes: u64,
    /// Commands in flight, at least one.
    pub depth: usize,
    /// Total number of commands.
    pub commands: usize,
}

/// Result of a workload. All times are in nanoseconds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Start of the workload.
    pub began: u64,
    /// Completion of the last command.
    pub ended: u64,
    /// Completion of each command, in order of arrival.
    pub done: Vec<u64>,
    /// Latency of each command, in order of arrival.
    pub latencies: Vec<u64>,
}

impl Outcome {
    /// Returns the bandwidth in bytes per second, for commands of `bytes` bytes.
    #[must_use]
    pub fn bandwidth(&self, bytes: u64) -> f64 {
        let nanoseconds = (self.ended - self.began).max(1);
        bytes as f64 * self.done.len() as f64 * 1e9 / nanoseconds as f64
    }

    /// Returns the latency that `per_mille` of a thousand commands do not exceed, or 0 without commands.
    #[must_use]
    pub fn quantile(&self, per_mille: f64) -> u64 {
        let mut sorted = self.latencies.clone();
        sorted.sort_unstable();
        let rank = (sorted.len() as f64 * per_mille / 1000.0).ceil() as usize;
        sorted.get(rank.max(1) - 1).copied().unwrap_or_default()
    }
}

impl Simulation {
    /// Creates a new drive of `bytes` bytes. Returns `None` if the profile has no timing.
    #[must_use]
    pub fn new(profile: &Profile, bytes: u64) -> Option<Self> {
        let blocks = bytes >> LBA_SHIFT;
        let model = Model::with_timebase(profile, blocks, LBA_SHIFT, Timebase::Nanoseconds)?;
        Some(Self {
            model,
            bytes,
            now: 0,
            random: 1,
        })
    }

    /// Runs a workload on an idle drive, a second after the previous workload.
    pub fn run(&mut self, load: &Load) -> Outcome {
        let mut outcome = Outcome {
            began: self.now,
            ended: self.now,
            ..Outcome::default()
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
                Order::Sequential => index as u64 % places,
                Order::Random => self.random_below(places),
            };
            let work = Work {
                access: match load.direction {
                    Direction::Read => Access::Read,
                    Direction::Write => Access::Write,
                },
                slba: (place * load.bytes) >> LBA_SHIFT,
                blocks: load.bytes >> LBA_SHIFT,
            };
            let due = self.due(&work);
            outcome.done.push(due);
            outcome.latencies.push(due - self.now);
            outcome.ended = outcome.ended.max(due);
            flying.push(Reverse(due));
        }
        self.now = outcome.ended + 1_000_000_000;
        outcome
    }

    /// Returns the wear of the flash, or `None` if the model counts none.
    #[must_use]
    pub fn wear(&self) -> Option<Wear> {
        self.model.wear()
    }

    fn due(&self, work: &Work) -> u64 {
        match &self.model {
            Model::Nvm(model) => model.due(work, self.now),
            Model::Ssd(model) => {
                let mut model = lock(model);
                model.begin(self.now);
                model.due(work, self.now)
            }
            Model::Zns(model) => {
                let mut model = lock(model);
                model.begin(self.now);
                model.due(work, self.now)
            }
        }
        .max(self.now)
    }

    /// Linear congruential generator, for reproducible results.
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

    fn load(direction: Direction, order: Order, bytes: u64, depth: usize) -> Load {
        Load {
            direction,
            order,
            bytes,
            depth,
            commands: (64 * MIB / bytes) as usize,
        }
    }

    #[test]
    fn a_drive_without_erase_blocks_does_what_its_profile_says() {
        let profile = Profile::named("nvm").expect("comes along");
        let mut drive = Simulation::new(&profile, 64 * MIB).expect("a model");
        let alone = drive.run(&load(Direction::Read, Order::Random, 4096, 1));
        assert_eq!(
            (alone.quantile(500.0), alone.quantile(999.0)),
            (12_000, 12_000)
        );
        let all = drive.run(&load(Direction::Write, Order::Sequential, MIB, 32));
        let ratio = all.bandwidth(MIB) / f64::from(1_u32 << 31);
        assert!((0.98..=1.01).contains(&ratio), "{ratio}");
        assert_eq!(drive.wear(), None);
        assert_eq!(all.began, alone.ended + 1_000_000_000);
    }

    #[test]
    fn the_same_load_takes_the_same_time() {
        let profile = Profile::named("ssd").expect("comes along");
        let run = || {
            let mut drive = Simulation::new(&profile, 64 * MIB).expect("a model");
            drive.run(&load(Direction::Write, Order::Sequential, MIB, 8));
            let outcome = drive.run(&load(Direction::Write, Order::Random, 4096, 32));
            (outcome, drive.wear().expect("flash"))
        };
        let (outcome, wear) = run();
        assert_eq!((outcome.clone(), wear), run());
        assert_eq!((outcome.done.len(), wear.host_pages), (16384, 2 * 16384));
        assert!(outcome.quantile(1000.0) > outcome.quantile(0.0));
    }

    #[test]
    fn nothing_takes_no_time() {
        let profile = Profile::named("nvm").expect("comes along");
        let nothing = Load {
            commands: 0,
            ..load(Direction::Read, Order::Random, 4096, 0)
        };
        let outcome = Simulation::new(&profile, MIB)
            .expect("a model")
            .run(&nothing);
        assert_eq!(
            (outcome.quantile(500.0), outcome.bandwidth(4096) as u64),
            (0, 0)
        );
    }
}
