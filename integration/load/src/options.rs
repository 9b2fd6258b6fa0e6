//! Options of a load.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use nvme_mpt_tests::doorbell::DoorbellMode;

/// Order of the blocks that commands go to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum AccessPattern {
    /// Anywhere in the range.
    #[default]
    Random,
    /// One behind the other; each queue has a part of the range.
    Sequential,
}

/// Way in which doorbells are rung.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum DoorbellChoice {
    /// The first of `shadow`, `mapped` and `trap` that the controller offers.
    #[default]
    Auto,
    /// Doorbell Buffer.
    Shadow,
    /// Stores to the part of BAR0 that the server lets be mapped.
    Mapped,
    /// Messages to the server.
    Trap,
}

impl DoorbellChoice {
    /// Returns the driver's doorbell mode, if the user chose one.
    pub(super) fn doorbell_mode(self) -> Option<DoorbellMode> {
        match self {
            Self::Auto => None,
            Self::Shadow => Some(DoorbellMode::Shadow),
            Self::Mapped => Some(DoorbellMode::Mapped),
            Self::Trap => Some(DoorbellMode::Trap),
        }
    }
}

/// Size of a Dataset Management range in bytes.
const DSM_RANGE: usize = 16;

/// Load to run, and the function to run it on.
#[derive(Args, Clone, Debug)]
pub struct LoadOptions {
    /// vfio-user socket of the function
    pub socket: PathBuf,

    /// Commands outstanding in each queue
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..=16384))]
    pub qd: u16,

    /// Bytes of a command (suffixes K, M, G)
    #[arg(long, default_value = "4K", value_parser = parse_size)]
    pub size: u64,

    /// Percentage of reads; the others are writes
    #[arg(long, default_value_t = 100, value_name = "PERCENT",
          value_parser = clap::value_parser!(u8).range(0..=100))]
    pub mix: u8,

    /// Deallocate instead of reading and writing: each command has one range of --size bytes
    #[arg(long, conflicts_with_all = ["mix", "verify"])]
    pub deallocate: bool,

    /// Order of the blocks that commands go to
    #[arg(long, value_enum, default_value_t)]
    pub pattern: AccessPattern,

    /// I/O queue pairs
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub queues: u16,

    /// Threads that drive the queues; by default one for each queue
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,

    /// Seconds to run
    #[arg(long, default_value_t = 5.0, value_parser = parse_seconds)]
    pub seconds: f64,

    /// Number of commands that each queue runs, instead of --seconds
    #[arg(long, conflicts_with = "seconds")]
    pub count: Option<u64>,

    /// Seconds to run before measuring; not with --count
    #[arg(long, default_value_t = 0.2, value_parser = parse_seconds)]
    pub warmup: f64,

    /// Bytes of the namespace to use, from its start (suffixes K, M, G)
    #[arg(long, value_parser = parse_size)]
    pub range: Option<u64>,

    /// Write the range, run the mix, check every read, and read all of the range at the end
    #[arg(long, conflicts_with = "pause_us")]
    pub verify: bool,

    /// Processors for the threads, in turn
    #[arg(long, value_delimiter = ',', value_name = "CPU,…")]
    pub cpu: Vec<usize>,

    /// Way in which doorbells are rung
    #[arg(long, value_enum, default_value_t)]
    pub doorbells: DoorbellChoice,

    /// Wait for interrupts instead of polling
    #[arg(long)]
    pub interrupts: bool,

    /// Pause for 0 to this many microseconds before each command, of which one is outstanding at a time
    #[arg(long, value_name = "MICROSECONDS", conflicts_with = "qd")]
    pub pause_us: Option<u64>,

    /// Completions after which the doorbells are rung at the latest
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..))]
    pub batch: u16,

    /// Seed of addresses, mix, pauses and data
    #[arg(long, default_value_t = 1)]
    pub seed: u64,

    /// Seconds without a completion after which the run fails
    #[arg(long, default_value_t = 10.0, value_parser = parse_seconds)]
    pub timeout: f64,

    /// Print the distribution of latencies
    #[arg(long)]
    pub latency: bool,

    /// Write the result to this file
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

impl LoadOptions {
    /// Returns the number of in-flight commands per queue, which is one if there are pauses.
    pub(super) fn depth(&self) -> u16 {
        match self.pause_us {
            Some(_) => 1,
            None => self.qd,
        }
    }

    /// Returns the data size of a command in bytes. For a deallocation, the data is one range.
    pub(super) fn transfer(&self) -> usize {
        match self.deallocate {
            true => DSM_RANGE,
            false => self.size as usize,
        }
    }

    pub(super) fn timeout(&self) -> Duration {
        Duration::from_secs_f64(self.timeout)
    }
}

/// Parses a size in bytes with an optional suffix K, M or G (powers of 1,024).
fn parse_size(text: &str) -> Result<u64, String> {
    let (digits, shift) = match text.char_indices().next_back() {
        Some((at, 'k' | 'K')) => (&text[..at], 10),
        Some((at, 'm' | 'M')) => (&text[..at], 20),
        Some((at, 'g' | 'G')) => (&text[..at], 30),
        _ => (text, 0),
    };
    digits
        .parse::<u64>()
        .ok()
        .and_then(|n| n.checked_mul(1 << shift))
        .filter(|&n| n > 0)
        .ok_or_else(|| format!("'{text}' is not a size such as 512, 4K or 1M"))
}

fn parse_seconds(text: &str) -> Result<f64, String> {
    text.parse()
        .ok()
        .filter(|seconds| (0.0..1e6).contains(seconds))
        .ok_or_else(|| format!("'{text}' is not a number of seconds"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_suffixes() {
        assert_eq!(parse_size("512"), Ok(512));
        assert_eq!(parse_size("4K"), Ok(4096));
        assert_eq!(parse_size("1m"), Ok(1 << 20));
        assert_eq!(parse_size("3G"), Ok(3 << 30));
        for wrong in ["", "K", "0", "-1", "4KiB", "4 K", "99999999999999G", "4é"] {
            assert!(parse_size(wrong).is_err(), "{wrong}");
        }
    }
}
