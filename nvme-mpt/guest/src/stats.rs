//! Counters of the data path. One poller writes each of them; any thread may read.

use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};

use nvme_mpt_memory::clock::ticks_to_nanoseconds;
use nvme_spec::status::Status;
use serde::{Deserialize, Serialize};

/// Statistics of the VM memory that a function has mapped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryStats {
    /// Currently mapped regions.
    pub regions: u64,
    /// Bytes of the mapped regions.
    pub bytes: u64,
    /// Number of region mappings so far. If the guest uses a virtual IOMMU, the number grows with its I/O, because the VMM maps
    /// pages for each command.
    pub maps: u64,
    /// Regions unmapped so far.
    pub unmaps: u64,
}

/// A counter with one writer at a time, which needs no locked instruction.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds to the counter. Only its one writer may call this.
    #[inline]
    pub fn add(&self, by: u64) {
        self.0.store(
            self.0.load(Ordering::Relaxed).wrapping_add(by),
            Ordering::Relaxed,
        );
    }

    /// Returns the count so far.
    #[must_use]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A number that rises and falls, with one writer.
#[derive(Debug, Default)]
pub struct Gauge(AtomicU64);

impl Gauge {
    /// Sets the number.
    #[inline]
    pub fn set(&self, to: u64) {
        self.0.store(to, Ordering::Relaxed);
    }

    /// Returns the number.
    #[must_use]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Number of different statuses for which failed commands are counted.
const STATUSES: usize = 32;

/// Number of commands that failed with a status. A `code` of 0 (success) marks a free entry.
#[derive(Debug, Default)]
struct StatusCounter {
    code: AtomicU16,
    commands: AtomicU64,
}

/// Failed commands of a function, by status. Any thread may count.
#[derive(Debug, Default)]
pub struct StatusCounters {
    counters: [StatusCounter; STATUSES],
    /// Failed commands whose status has no counter of its own, because all [`STATUSES`] counters are taken by other statuses.
    others: AtomicU64,
}

impl StatusCounters {
    /// Counts a command by its status, ignoring the bits Do Not Retry and Command Retry Delay.
    #[cold]
    pub fn count(&self, status: Status) {
        let code = status.code().0;
        let place = self.counters.iter().find(|counter| {
            let free = &counter.code;
            let taken = free.compare_exchange(0, code, Ordering::Relaxed, Ordering::Relaxed);
            taken.map_or_else(|present| present == code, |_| true)
        });
        let commands = place.map_or(&self.others, |place| &place.commands);
        commands.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the number of commands of each status.
    #[must_use]
    pub fn stats(&self) -> Vec<StatusCount> {
        let named = self.counters.iter().map(|counter| {
            let status = Status(counter.code.load(Ordering::Relaxed));
            (status.to_string(), &counter.commands)
        });
        let all = named.chain([("others".to_owned(), &self.others)]);
        let counts = all.map(|(status, commands)| StatusCount {
            status,
            commands: commands.load(Ordering::Relaxed),
        });
        counts.filter(|count| count.commands > 0).collect()
    }
}

/// Number of commands that completed with a status.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StatusCount {
    /// Name of the status.
    pub status: String,
    /// Commands.
    pub commands: u64,
}

/// Number of histogram buckets per power of two of latency. A bucket is at most 25 % wide.
const STEPS: usize = 4;
const BUCKETS: usize = 48 * STEPS;

/// Latencies of commands, from the fetch of their batch to their completion.
#[derive(Debug)]
pub struct LatencyHistogram {
    buckets: [Counter; BUCKETS],
    max: AtomicU64,
}

impl Default for LatencyHistogram {
    fn default() -> Self {
        Self {
            buckets: [const { Counter(AtomicU64::new(0)) }; BUCKETS],
            max: AtomicU64::new(0),
        }
    }
}

impl LatencyHistogram {
    #[inline]
    fn bucket(ticks: u64) -> usize {
        // The two bits after the leading one select the step; all values below 4 ticks fall into one step.
        let ticks = ticks.max(STEPS as u64);
        let power = ticks.ilog2() as usize;
        let step = (ticks >> (power - 2)) as usize % STEPS;
        ((power - 2) * STEPS + step).min(BUCKETS - 1)
    }

    /// Returns the largest number of ticks in a bucket.
    fn upper_bound(bucket: usize) -> u64 {
        let (power, step) = (bucket / STEPS, bucket % STEPS);
        ((STEPS + step + 1) as u64)
            .checked_shl(power as u32)
            .map_or(u64::MAX, |end| end - 1)
    }

    /// Counts a command with a latency of `ticks`. Only the histogram's one writer may call this.
    #[inline]
    pub fn record(&self, ticks: u64) {
        self.buckets[Self::bucket(ticks)].add(1);
        if ticks > self.max.load(Ordering::Relaxed) {
            self.max.store(ticks, Ordering::Relaxed);
        }
    }

    /// Adds the counts of all buckets to `sum`.
    fn add_buckets_to(&self, sum: &mut LatencyDistribution) {
        for (sum, bucket) in sum.0.iter_mut().zip(&self.buckets) {
            *sum += bucket.get();
        }
    }

    fn snapshot(&self) -> (Vec<u64>, u64) {
        let buckets = self.buckets.iter().map(Counter::get).collect();
        (buckets, self.max.load(Ordering::Relaxed))
    }

    /// Returns quantiles of the latency in microseconds, rounded up to a bucket.
    #[must_use]
    pub fn latency(&self) -> LatencyStats {
        let (buckets, max) = self.snapshot();
        let total: u64 = buckets.iter().sum();
        let microseconds = |ticks| ticks_to_nanoseconds(ticks) as f64 / 1000.0;
        let quantile = |per_mille: u64| {
            let rank = (total * per_mille).div_ceil(1000).max(1);
            let mut seen = 0;
            let bucket = buckets.iter().position(|count| {
                seen += count;
                seen >= rank
            });
            microseconds(bucket.map_or(0, |bucket| Self::upper_bound(bucket).min(max)))
        };
        LatencyStats {
            p50: quantile(500),
            p99: quantile(990),
            p999: quantile(999),
            max: microseconds(max),
        }
    }
}

/// Latency distribution of several queues.
#[derive(Debug)]
pub struct LatencyDistribution([u64; BUCKETS]);

impl LatencyDistribution {
    /// Returns the sum of `histograms`.
    pub fn sum<'a>(histograms: impl IntoIterator<Item = &'a LatencyHistogram>) -> Self {
        let mut sum = Self([0; BUCKETS]);
        for histogram in histograms {
            histogram.add_buckets_to(&mut sum);
        }
        sum
    }

    /// Returns the buckets that are not empty, shortest latencies first.
    pub fn buckets(&self) -> Vec<LatencyBucket> {
        let counted = self
            .0
            .iter()
            .enumerate()
            .filter(|(_, commands)| **commands > 0);
        let buckets = counted.map(|(bucket, commands)| LatencyBucket {
            from_ns: match bucket.checked_sub(1) {
                Some(below) => ticks_to_nanoseconds(LatencyHistogram::upper_bound(below)),
                None => 0,
            },
            to_ns: ticks_to_nanoseconds(LatencyHistogram::upper_bound(bucket)),
            commands: *commands,
        });
        buckets.collect()
    }
}

/// Commands with latencies between two bounds, which are at most 25 % apart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LatencyBucket {
    /// Lower bound in nanoseconds.
    pub from_ns: u64,
    /// Upper bound in nanoseconds.
    pub to_ns: u64,
    /// Commands.
    pub commands: u64,
}

/// Returns the latency quantile `share` in nanoseconds, rounded up to a bucket; `None` without commands. The buckets
/// may be from several functions.
#[must_use]
pub fn quantile(buckets: &[LatencyBucket], share: f64) -> Option<u64> {
    let mut buckets: Vec<&LatencyBucket> = buckets.iter().collect();
    buckets.sort_unstable_by_key(|bucket| bucket.to_ns);
    let all: u64 = buckets.iter().map(|bucket| bucket.commands).sum();
    let rank = ((all as f64 * share).ceil() as u64).max(1);
    let mut seen = 0;
    let bucket = buckets.iter().find(|bucket| {
        seen += bucket.commands;
        seen >= rank
    });
    bucket.map(|bucket| bucket.to_ns)
}

/// Counters of one I/O queue pair. They persist when the guest deletes and creates queues of the same identifier.
#[derive(Debug, Default)]
pub struct QueueCounters {
    /// Commands completed.
    pub commands: Counter,
    /// Read commands completed.
    pub reads: Counter,
    /// Write commands completed.
    pub writes: Counter,
    /// Bytes read by the guest.
    pub read_bytes: Counter,
    /// Bytes written by the guest.
    pub write_bytes: Counter,
    /// Commands that completed with an error.
    pub errors: Counter,
    /// Commands that completed with a media error.
    pub media_errors: Counter,
    /// Interrupts raised.
    pub interrupts: Counter,
    /// Doorbell checks after re-arming that found a new value. Each of them prevented a lost wake-up.
    pub rearm_saves: Counter,
    /// Commands in flight after the last batch.
    pub in_flight: Gauge,
    /// Ticks in which the queue fetched no commands because of the rate limits of its lease.
    pub throttled: Counter,
    /// Latencies of commands.
    pub latency: LatencyHistogram,
    /// Doorbell writes that exited to the VMM. The control thread writes this counter.
    pub doorbell_exits: Counter,
}

/// Percentiles of the latency of commands, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LatencyStats {
    /// Half of the commands took at most this long.
    pub p50: f64,
    /// 99 % of the commands took at most this long.
    pub p99: f64,
    /// 99.9 % of the commands took at most this long.
    pub p999: f64,
    /// The longest latency.
    pub max: f64,
}

/// Use of the drive's queue pair that serves a guest's queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HostQueueUse {
    /// The pair is reserved for this lease and used only by its queues.
    Reserved,
    /// The pair is not reserved, and used by this queue alone.
    Exclusive,
    /// The pair is shared in turn with other queues.
    Shared,
}

/// Use of the drive's queue pairs by the queues of one lease.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeasePairStats {
    /// Number of queue pairs that are reserved for the lease, used or not.
    pub reserved: u16,
    /// Queues that alone use an unreserved pair.
    pub exclusive: u16,
    /// Queues that share a pair with other queues.
    pub shared: u16,
}

/// Statistics of one I/O queue pair.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct QueueStats {
    /// Queue Identifier of the Submission Queue.
    pub qid: u16,
    /// Commands completed.
    pub commands: u64,
    /// Read commands completed.
    #[serde(default)]
    pub reads: u64,
    /// Write commands completed.
    #[serde(default)]
    pub writes: u64,
    /// Bytes read by the guest.
    pub read_bytes: u64,
    /// Bytes written by the guest.
    pub write_bytes: u64,
    /// Commands in flight.
    #[serde(default)]
    pub in_flight: u64,
    /// Doorbell writes that exited to the VMM.
    pub doorbell_exits: u64,
    /// Interrupts raised.
    pub interrupts: u64,
    /// Commands that completed with an error.
    pub errors: u64,
    /// Doorbell checks after re-arming that found a new value.
    pub rearm_saves: u64,
    /// Milliseconds in which the queue fetched no commands because of the rate limits of its lease.
    #[serde(default)]
    pub throttled_ms: u64,
    /// Latencies of commands, from fetch to completion.
    pub latency_us: LatencyStats,
    /// Use of the drive's queue pair that serves this queue. `None` while no pair of the drive does, or if the drive does not
    /// limit the number of pairs.
    #[serde(default)]
    pub host_queue: Option<HostQueueUse>,
}

impl QueueCounters {
    /// Returns the counts for the SMART log page.
    pub fn smart_counters(&self) -> LeaseCounters {
        LeaseCounters {
            reads: self.reads.get(),
            writes: self.writes.get(),
            bytes_read: self.read_bytes.get(),
            bytes_written: self.write_bytes.get(),
            media_errors: self.media_errors.get(),
            errors: self.errors.get(),
        }
    }

    /// Returns the counts so far as statistics of the queue pair `qid`.
    pub fn stats(&self, qid: u16) -> QueueStats {
        QueueStats {
            qid,
            commands: self.commands.get(),
            reads: self.reads.get(),
            writes: self.writes.get(),
            in_flight: self.in_flight.get(),
            read_bytes: self.read_bytes.get(),
            write_bytes: self.write_bytes.get(),
            doorbell_exits: self.doorbell_exits.get(),
            interrupts: self.interrupts.get(),
            errors: self.errors.get(),
            rearm_saves: self.rearm_saves.get(),
            throttled_ms: ticks_to_nanoseconds(self.throttled.get()) / 1_000_000,
            latency_us: self.latency.latency(),
            host_queue: None,
        }
    }
}

/// Statistics of one poller.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PollerStats {
    /// The thread's name.
    pub name: String,
    /// The CPU that the thread is pinned to, if any.
    pub cpu: Option<usize>,
    /// Seconds since the poller's start.
    #[serde(default)]
    pub life_seconds: f64,
    /// Seconds in which the poller found work.
    #[serde(default)]
    pub busy_seconds: f64,
    /// Seconds in which the poller slept.
    #[serde(default)]
    pub parked_seconds: f64,
    /// CPU time by the kernel's clock of the thread, in seconds. At most a millisecond behind while the poller is
    /// awake.
    #[serde(default)]
    pub processor_seconds: f64,
    /// Share of the time since the poller's start in which the poller found work, 0 to 1.
    pub busy_share: f64,
    /// Share of the time since the poller's start in which the poller slept, 0 to 1. In the rest of the time, it spun without
    /// work or found work.
    pub parked_share: f64,
    /// Number of shadow queues that the poller runs.
    pub queues: usize,
    /// Number of times that the poller went to sleep.
    pub parks: u64,
    /// Number of times that the poller woke up and found no work.
    pub spurious_wakes: u64,
}

/// Counters of one lease, for the SMART / Health Information log page and snapshots.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LeaseCounters {
    /// Read commands completed.
    pub reads: u64,
    /// Write commands completed.
    pub writes: u64,
    /// Bytes read by the guest.
    pub bytes_read: u64,
    /// Bytes written by the guest.
    pub bytes_written: u64,
    /// Commands that completed with a media error.
    pub media_errors: u64,
    /// Commands that completed with an error.
    pub errors: u64,
}

impl std::ops::Add for LeaseCounters {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        // A counter that comes from a snapshot may have any value, so sums must not overflow.
        Self {
            reads: self.reads.wrapping_add(other.reads),
            writes: self.writes.wrapping_add(other.writes),
            bytes_read: self.bytes_read.wrapping_add(other.bytes_read),
            bytes_written: self.bytes_written.wrapping_add(other.bytes_written),
            media_errors: self.media_errors.wrapping_add(other.media_errors),
            errors: self.errors.wrapping_add(other.errors),
        }
    }
}

impl std::ops::Sub for LeaseCounters {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        Self {
            reads: self.reads.wrapping_sub(other.reads),
            writes: self.writes.wrapping_sub(other.writes),
            bytes_read: self.bytes_read.wrapping_sub(other.bytes_read),
            bytes_written: self.bytes_written.wrapping_sub(other.bytes_written),
            media_errors: self.media_errors.wrapping_sub(other.media_errors),
            errors: self.errors.wrapping_sub(other.errors),
        }
    }
}

/// Statistics of one guest controller's lease and queues.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BackendStats {
    /// The lease's id.
    pub id: String,
    /// Model Number.
    pub model: String,
    /// Serial Number.
    pub serial: String,
    /// Size of the lease in bytes.
    pub capacity_bytes: u64,
    /// Mode of delivering doorbell writes to the pollers.
    pub doorbells: String,
    /// Use of the drive's queue pairs; `None` if the drive does not limit the number of pairs.
    #[serde(default)]
    pub queue_pairs: Option<LeasePairStats>,
    /// The VM's memory.
    #[serde(default)]
    pub memory: MemoryStats,
    /// The I/O queue pairs that were used.
    pub queues: Vec<QueueStats>,
    /// Latency distribution over all queues.
    #[serde(default)]
    pub latency: Vec<LatencyBucket>,
    /// Commands that completed with an error, by status.
    #[serde(default)]
    pub errors: Vec<StatusCount>,
    /// Seconds of processor time that pollers spent on the function, including polls without work.
    #[serde(default)]
    pub processor_seconds: f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_hold_what_their_bounds_say() {
        for ticks in (4..5000).chain([u64::MAX / 3, 1 << 40, (1 << 45) + 7]) {
            let bucket = LatencyHistogram::bucket(ticks);
            assert!(
                ticks <= LatencyHistogram::upper_bound(bucket) || bucket == BUCKETS - 1,
                "{ticks}"
            );
            if bucket > 0 && bucket < BUCKETS - 1 {
                let below = LatencyHistogram::upper_bound(bucket - 1);
                assert!(ticks > below, "{ticks} is not above {below}");
            }
        }
    }

    #[test]
    fn buckets_of_several_queues_are_added_up() {
        let (a, b) = (LatencyHistogram::default(), LatencyHistogram::default());
        for ticks in [5, 1000, 1000] {
            a.record(ticks);
        }
        b.record(1000);
        let buckets = LatencyDistribution::sum([&a, &b]).buckets();
        let commands: Vec<u64> = buckets.iter().map(|bucket| bucket.commands).collect();
        assert_eq!(commands, [1, 3]);
        let thousand = ticks_to_nanoseconds(1000);
        assert!(buckets[1].from_ns <= thousand && thousand <= buckets[1].to_ns);
        assert_eq!(LatencyDistribution::sum([]).buckets(), []);
    }

    #[test]
    fn a_quantile_is_the_bound_of_its_bucket() {
        let bucket = |to_ns, commands| LatencyBucket {
            from_ns: to_ns - 1,
            to_ns,
            commands,
        };
        let buckets = [bucket(200, 1), bucket(10, 98), bucket(100, 1)];
        for (share, bound) in [(0.0, 10), (0.5, 10), (0.98, 10), (0.99, 100), (1.0, 200)] {
            assert_eq!(quantile(&buckets, share), Some(bound), "{share}");
        }
        assert_eq!(quantile(&[], 0.5), None);
    }

    #[test]
    fn statuses_are_told_apart_up_to_their_most() {
        let counters = StatusCounters::default();
        counters.count(Status::INVALID_FIELD);
        counters.count(Status::INVALID_FIELD.with_dnr(true));
        let name = Status::INVALID_FIELD.to_string();
        let count = |status: &str, commands| StatusCount {
            status: status.to_owned(),
            commands,
        };
        assert_eq!(counters.stats(), [count(&name, 2)]);
        for sc in 0..=u8::MAX {
            counters.count(Status::new(
                nvme_spec::status::StatusCodeType::VENDOR_SPECIFIC,
                sc,
            ));
        }
        let stats = counters.stats();
        assert_eq!(stats.len(), STATUSES + 1);
        let others = 256 - (STATUSES as u64 - 1);
        assert_eq!(stats.last(), Some(&count("others", others)));
    }

    #[test]
    fn percentiles_are_within_a_bucket() {
        let histogram = LatencyHistogram::default();
        let tick = |us| nvme_mpt_memory::clock::ticks_in(std::time::Duration::from_micros(us));
        for _ in 0..990 {
            histogram.record(tick(10));
        }
        for _ in 0..10 {
            histogram.record(tick(1000));
        }
        let latency = histogram.latency();
        assert!((9.9..=12.6).contains(&latency.p50), "{latency:?}");
        assert!((9.9..=12.6).contains(&latency.p99), "{latency:?}");
        assert!((990.0..=1010.0).contains(&latency.p999), "{latency:?}");
        assert_eq!(
            LatencyHistogram::default().latency(),
            LatencyStats::default()
        );
    }
}
