//! Rate limits of a lease, in I/Os and bytes per second over all its queues, and its weight relative to other leases.
//!
//! Each limit is a token bucket that fills at its rate, up to its burst. A queue may fetch a batch of commands while the bucket
//! has credit, and is charged after the fetch. If the batch costs more than the credit, the bucket has a debt, and the next
//! batch waits until the debt is paid off. So the rate is met over time, whatever the size of commands.
//!
//! A bucket is stored as one moment: the time at which credit and debt are both zero (the theoretical arrival time of
//! the generic cell rate algorithm). Queues of several pollers charge a bucket with one atomic operation per batch.

mod lease_weight;

use std::fmt;
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use nvme_lease::range::ByteSize;
use nvme_mpt_memory::clock::{TickRate, Ticks};
use serde::{Deserialize, Serialize};

pub use lease_weight::{LeaseWeight, LeaseWeightError};

/// Default burst of a limit, as the time in which an empty bucket fills to that size.
const DEFAULT_BURST: Duration = Duration::from_millis(10);

/// Maximum time by which the poll of a queue is delayed although its bucket already has credit.
const POLL_PAUSE: Duration = Duration::from_millis(1);

/// Maximum time between two polls of a queue whose bucket has no credit.
const POLL_PAUSE_MAX: Duration = Duration::from_secs(1);

/// Limit as a rate in I/Os or bytes per second, and a burst.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RateLimit {
    /// I/Os or bytes per second.
    pub per_second: NonZeroU64,
    /// Burst: I/Os or bytes that may pass at once after idle time. The default is the rate's amount for 10 ms.
    pub burst: Option<NonZeroU64>,
}

/// Limits of a lease.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RateLimits {
    /// Limit of I/O commands per second; `None` for no limit.
    pub iops: Option<RateLimit>,
    /// Limit of bytes read and written per second; `None` for no limit.
    pub bandwidth: Option<RateLimit>,
    /// Weight relative to other leases that share queue pairs; `None` means the default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<LeaseWeight>,
}

impl fmt::Display for RateLimits {
    /// Formats the limits as options; an empty text without limits.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            iops,
            bandwidth,
            weight,
        } = self;
        let options = [
            iops.map(|limit| format!("iops={}", limit.to_text(|commands| commands.to_string()))),
            bandwidth.map(|limit| {
                let text = limit.to_text(|bytes| ByteSize(bytes).to_string());
                format!("bandwidth={text}")
            }),
            weight.map(|weight| format!("weight={weight}")),
        ];
        let given: Vec<String> = options.into_iter().flatten().collect();
        f.write_str(&given.join(","))
    }
}

/// Error of parsing a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RateLimitError {
    /// The text is not a number of commands.
    #[error(
        "A limit of commands is a number per second, as in 20000; a burst may follow, as in 20000+500"
    )]
    Commands,
    /// The text is not a number of bytes.
    #[error(
        "A limit of bytes is a number per second, as in 100M; a burst may follow, as in 100M+1G"
    )]
    Bytes,
    /// The limit is below [`RateLimit::BYTES_MIN`].
    #[error(
        "A limit of bytes is {} per second or more: with less, the debt of large commands could outlast the 30 s that a \
         guest's driver waits for the next one",
        RateLimit::BYTES_MIN
    )]
    TooFewBytes,
}

impl RateLimit {
    /// Lowest limit in bytes per second. A batch has up to 6 MiB: commands are fetched up to 4 MiB, and the last one may add 2
    /// MiB. At this limit, that debt is paid off in 24 s, within the 30 s command timeout of guest drivers.
    pub const BYTES_MIN: ByteSize = ByteSize(256 << 10);

    /// Parses a limit of commands: `NUMBER`, or `NUMBER+BURST` with the burst in commands.
    ///
    /// # Errors
    /// [`RateLimitError::Commands`].
    pub fn parse_iops(text: &str) -> Result<Self, RateLimitError> {
        let number = |text: &str| {
            let digits = text.bytes().all(|byte| byte.is_ascii_digit());
            digits.then(|| text.parse().ok())?
        };
        Self::parse(text, number).ok_or(RateLimitError::Commands)
    }

    /// Parses a limit of bytes: `SIZE` or `SIZE+BURST`.
    ///
    /// # Errors
    /// [`RateLimitError::Bytes`].
    pub fn parse_bandwidth(text: &str) -> Result<Self, RateLimitError> {
        let number = |text: &str| Some(text.parse::<ByteSize>().ok()?.0);
        Self::parse(text, number).ok_or(RateLimitError::Bytes)
    }

    /// Rejects a limit of bytes below [`Self::BYTES_MIN`]. Lower limits that are already in force are not checked here.
    ///
    /// # Errors
    /// [`RateLimitError::TooFewBytes`].
    pub fn check_bandwidth(self) -> Result<(), RateLimitError> {
        match ByteSize(self.per_second.get()) < Self::BYTES_MIN {
            true => Err(RateLimitError::TooFewBytes),
            false => Ok(()),
        }
    }

    fn to_text(self, number: impl Fn(u64) -> String) -> String {
        let per_second = number(self.per_second.get());
        match self.burst {
            Some(burst) => format!("{per_second}+{}", number(burst.get())),
            None => per_second,
        }
    }

    fn parse(text: &str, number: impl Fn(&str) -> Option<u64>) -> Option<Self> {
        let number = |text| NonZeroU64::new(number(text)?);
        let (per_second, burst) = match text.split_once('+') {
            Some((per_second, burst)) => (per_second, Some(number(burst)?)),
            None => (text, None),
        };
        Some(Self {
            per_second: number(per_second)?,
            burst,
        })
    }
}

/// Limiter of one lease, shared by its queues.
#[derive(Debug)]
pub struct RateLimiter {
    rate: TickRate,
    iops: TokenBucket,
    bandwidth: TokenBucket,
}

impl RateLimiter {
    /// Creates a limiter with full buckets, by the clock of `rate`.
    #[must_use]
    pub fn new(limits: RateLimits, rate: TickRate) -> Self {
        let limiter = Self {
            rate,
            iops: TokenBucket::default(),
            bandwidth: TokenBucket::default(),
        };
        // A new limiter has no debt, so the present time does not matter.
        limiter.set(limits, Ticks(0));
        limiter
    }

    /// Changes the limits. Credit is kept, in units of time. A debt is paid off at the new rate if that is sooner,
    /// because a debt at a low limit may take days.
    pub fn set(&self, limits: RateLimits, now: Ticks) {
        let RateLimits {
            iops, bandwidth, ..
        } = limits;
        self.iops.set(iops, self.rate, now);
        self.bandwidth.set(bandwidth, self.rate, now);
    }

    /// Returns whether the lease has a limit of commands or bytes.
    #[must_use]
    pub fn is_limited(&self) -> bool {
        self.iops.is_limited() || self.bandwidth.is_limited()
    }

    /// Returns the number of commands that may be fetched now.
    #[must_use]
    pub fn allowance(&self, now: Ticks) -> u32 {
        match self.bandwidth.credit(now) {
            0 => 0,
            _ => u32::try_from(self.iops.credit(now)).unwrap_or(u32::MAX),
        }
    }

    /// Charges fetched commands and their data bytes.
    pub fn charge(&self, commands: u32, bytes: u64, now: Ticks) {
        self.iops.charge(commands.into(), now);
        self.bandwidth.charge(bytes, now);
    }

    /// Returns the time at which a queue should be polled again while its bucket has no credit.
    ///
    /// This time may be later than [`Self::due`], so that the poller is not woken for each command. The delay loses no
    /// credit, because at most a quarter of the smaller burst accrues during it.
    #[must_use]
    pub fn next_poll(&self, now: Ticks) -> Ticks {
        let longest = self.rate.ticks(POLL_PAUSE);
        let buckets = [&self.iops, &self.bandwidth].into_iter();
        let capacities = buckets.filter(|bucket| bucket.is_limited());
        let capacities = capacities.map(|bucket| bucket.capacity.load(Ordering::Relaxed) / 4);
        let pause_ticks = capacities.min().unwrap_or(0).min(longest);
        // A queue with a large debt is polled several times before the debt is paid off.
        let last = self.rate.ticks(POLL_PAUSE_MAX);
        let [first, last] = [pause_ticks, last].map(|ticks| Ticks(now.0.saturating_add(ticks)));
        self.due().max(first).min(last)
    }

    /// Returns the present use of the limits, with which the lease's next back end continues.
    #[must_use]
    pub fn usage(&self) -> RateLimiterUse {
        RateLimiterUse {
            iops: self.iops.usage(),
            bandwidth: self.bandwidth.usage(),
        }
    }

    /// Continues with the use of the limits by the lease's previous back end.
    pub fn restore(&self, used: RateLimiterUse, now: Ticks) {
        self.iops.restore(used.iops, now);
        self.bandwidth.restore(used.bandwidth, now);
    }

    /// Returns the time from which [`Self::allowance`] is above zero, so that a command may be fetched.
    #[must_use]
    pub fn due(&self) -> Ticks {
        self.iops.due().max(self.bandwidth.due())
    }
}

/// Use of a lease's limits so far, as moments on the clock of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RateLimiterUse {
    iops: BucketUse,
    bandwidth: BucketUse,
}

impl RateLimiterUse {
    /// Returns whether the buckets are full again.
    #[must_use]
    pub fn is_replenished(self, now: Ticks) -> bool {
        self.iops.even.max(self.bandwidth.even) <= now.0
    }
}

/// State of a bucket: the cost of a unit (an I/O or a byte), and the moment at which credit and debt are zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct BucketUse {
    cost: u64,
    even: u64,
}

impl BucketUse {
    /// Returns the moment at which a debt is paid off if a unit costs `cost` ticks from now on. If a unit gets cheaper, the
    /// debt keeps its units; if a unit gets dearer, the debt keeps its time. Returns `None` if there is no debt or was no
    /// limit.
    fn convert_cost(self, cost: u64, now: Ticks) -> Option<u64> {
        let debt = self.even.checked_sub(now.0)?;
        let left = (u128::from(debt) * u128::from(cost)).checked_div(self.cost.into())?;
        let left = u64::try_from(left).unwrap_or(u64::MAX).min(debt);
        Some(now.0.saturating_add(left))
    }
}

/// Number of fractional bits of a cost in ticks. A cost of 100 ticks has an error below one millionth.
const FRACTION_BITS: u32 = 20;

/// Token bucket of one limit. A unit is an I/O or a byte.
#[derive(Debug, Default)]
struct TokenBucket {
    /// Ticks per unit, in fixed point with [`FRACTION_BITS`] fractional bits; 0 without a limit.
    cost: AtomicU64,
    /// Ticks in which an empty bucket fills completely.
    capacity: AtomicU64,
    /// Tick at which credit and debt are zero: later than now for a debt, earlier than now for credit.
    even: AtomicU64,
}

impl TokenBucket {
    fn set(&self, limit: Option<RateLimit>, rate: TickRate, now: Ticks) {
        let Some(RateLimit { per_second, burst }) = limit else {
            return self.set_cost(0, now);
        };
        let second = u128::from(rate.ticks(Duration::from_secs(1)));
        let cost = (second << FRACTION_BITS) / u128::from(per_second.get());
        let cost = u64::try_from(cost).unwrap_or(u64::MAX).max(1);
        let capacity = match burst {
            Some(burst) => cost_ticks(cost, burst.get()),
            None => rate.ticks(DEFAULT_BURST),
        };
        // The bucket holds at least one unit, because with less no command would ever pass. It also holds the credit that
        // accrues while the queue is not polled.
        let least = cost_ticks(cost, 1).saturating_add(1);
        let capacity = capacity.max(least).saturating_add(rate.ticks(POLL_PAUSE));
        self.capacity.store(capacity, Ordering::Relaxed);
        self.set_cost(cost, now);
    }

    /// Sets the cost of a unit (an I/O or a byte) in ticks. If the limit is removed, the debt is cancelled.
    fn set_cost(&self, cost: u64, now: Ticks) {
        let before = self.cost.swap(cost, Ordering::Relaxed);
        let update = |even| BucketUse { cost: before, even }.convert_cost(cost, now);
        // An error only means that there is no debt to convert.
        let _ = self
            .even
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, update);
    }

    fn usage(&self) -> BucketUse {
        BucketUse {
            cost: self.cost.load(Ordering::Relaxed),
            even: self.even.load(Ordering::Relaxed),
        }
    }

    fn restore(&self, used: BucketUse, now: Ticks) {
        let cost = self.cost.load(Ordering::Relaxed);
        if let Some(even) = used.convert_cost(cost, now) {
            self.even.fetch_max(even, Ordering::Relaxed);
        }
    }

    fn is_limited(&self) -> bool {
        self.cost.load(Ordering::Relaxed) != 0
    }

    /// Returns the number of units (I/Os or bytes) that the bucket has credit for.
    fn credit(&self, now: Ticks) -> u64 {
        let cost = self.cost.load(Ordering::Relaxed);
        if cost == 0 {
            return u64::MAX;
        }
        let capacity = self.capacity.load(Ordering::Relaxed);
        let full = now.0.saturating_add(capacity);
        let left = full.saturating_sub(self.even.load(Ordering::Relaxed));
        let units = (u128::from(left.min(capacity)) << FRACTION_BITS) / u128::from(cost);
        u64::try_from(units).unwrap_or(u64::MAX)
    }

    fn charge(&self, units: u64, now: Ticks) {
        let cost = self.cost.load(Ordering::Relaxed);
        if cost == 0 || units == 0 {
            return;
        }
        let spent = cost_ticks(cost, units);
        let update = |even: u64| Some(even.max(now.0).saturating_add(spent));
        // This update always succeeds.
        let _ = self
            .even
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, update);
    }

    fn due(&self) -> Ticks {
        let cost = self.cost.load(Ordering::Relaxed);
        if cost == 0 {
            return Ticks(0);
        }
        let capacity = self.capacity.load(Ordering::Relaxed);
        let even = self.even.load(Ordering::Relaxed);
        // The moment is rounded up, so that there is credit for a unit at this moment.
        let earned = even.saturating_add(cost_ticks(cost, 1)).saturating_add(1);
        Ticks(earned.saturating_sub(capacity))
    }
}

/// Returns the cost of `units` in ticks. `cost` is the cost of one unit, in fixed point.
fn cost_ticks(cost: u64, units: u64) -> u64 {
    let ticks = (u128::from(cost) * u128::from(units)) >> FRACTION_BITS;
    u64::try_from(ticks).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn limits(iops: &str, bandwidth: &str) -> RateLimits {
        RateLimits {
            iops: RateLimit::parse_iops(iops).ok(),
            bandwidth: RateLimit::parse_bandwidth(bandwidth).ok(),
            weight: None,
        }
    }

    /// Takes batches of at most `most` commands of `bytes` each, as early as the limiter permits. Returns the number of
    /// commands in `seconds`.
    fn taken(limiter: &RateLimiter, from: u64, seconds: u64, most: u32, bytes: u64) -> u64 {
        let (mut now, mut sum) = (from, 0);
        while now < from + seconds * SECOND {
            let count = limiter.allowance(Ticks(now)).min(most);
            if count == 0 {
                let due = limiter.due().0;
                assert!(due > now, "{due} is not ahead of {now}");
                now = limiter.next_poll(Ticks(now)).0;
                assert!(now >= due && now - due <= 1_000_000);
                assert!(limiter.allowance(Ticks(now)) > 0, "at {now}");
                continue;
            }
            limiter.charge(count, u64::from(count) * bytes, Ticks(now));
            sum += u64::from(count);
            // The drive needs some time before the next batch.
            now += 1000;
        }
        sum
    }

    #[test]
    fn the_longest_bursts_come_at_once() {
        let longest = format!("1+{}", u64::MAX);
        let limiter = RateLimiter::new(limits(&longest, &longest), TickRate::NANOSECOND);
        assert_eq!(limiter.allowance(Ticks(SECOND)), u32::MAX);
        limiter.charge(1000, 1000 << 20, Ticks(SECOND));
        assert!(limiter.allowance(Ticks(SECOND)) > 1000);
    }

    #[test]
    fn limits_are_numbers_with_bursts() {
        let limit = |per_second, burst| RateLimit {
            per_second: NonZeroU64::new(per_second).expect("not 0"),
            burst: NonZeroU64::new(burst),
        };
        assert_eq!(RateLimit::parse_iops("20000"), Ok(limit(20_000, 0)));
        assert_eq!(RateLimit::parse_iops("1+500"), Ok(limit(1, 500)));
        assert_eq!(
            RateLimit::parse_bandwidth("1M+1G"),
            Ok(limit(1 << 20, 1 << 30))
        );
        for text in ["", "0", "1+0", "+1", "1+", "-1", "none", "1.5", "1+2+3"] {
            assert_eq!(
                RateLimit::parse_iops(text),
                Err(RateLimitError::Commands),
                "{text}"
            );
            assert_eq!(
                RateLimit::parse_bandwidth(text),
                Err(RateLimitError::Bytes),
                "{text}"
            );
        }
        for (iops, bandwidth, text) in [
            ("", "", ""),
            ("20000", "", "iops=20000"),
            ("1+5", "1M+1G", "iops=1+5,bandwidth=1M+1G"),
            ("", "1000", "bandwidth=1000"),
        ] {
            assert_eq!(limits(iops, bandwidth).to_string(), text);
        }
        let weighed = |iops, bandwidth| {
            let weight = "300".parse().ok();
            let limits = limits(iops, bandwidth);
            RateLimits { weight, ..limits }.to_string()
        };
        assert_eq!(weighed("", ""), "weight=300");
        assert_eq!(weighed("1", "2M"), "iops=1,bandwidth=2M,weight=300");
        // The unit is ambiguous: it could be 1000 or 1024.
        assert!(RateLimit::parse_iops("20K").is_err());
    }

    #[test]
    fn a_burst_comes_at_once_and_then_the_rate() {
        let limiter = RateLimiter::new(limits("1000+50", ""), TickRate::NANOSECOND);
        // The 51st command is credit from an idle time.
        assert_eq!(limiter.allowance(Ticks(SECOND)), 51);
        limiter.charge(51, 0, Ticks(SECOND));
        assert_eq!(limiter.allowance(Ticks(SECOND)), 0);
        assert_eq!(limiter.allowance(Ticks(SECOND + 10_000_000)), 10);
        assert_eq!(
            limiter.allowance(Ticks(9 * SECOND)),
            51,
            "no more than that"
        );
    }

    #[test]
    fn a_debt_is_paid_off() {
        let limiter = RateLimiter::new(limits("", "1M"), TickRate::NANOSECOND);
        assert!(limiter.allowance(Ticks(SECOND)) > 0);
        limiter.charge(1, 4 << 20, Ticks(SECOND));
        assert_eq!(limiter.allowance(Ticks(4 * SECOND)), 0);
        assert_eq!(limiter.next_poll(Ticks(2 * SECOND)), Ticks(3 * SECOND));
        let due = limiter.due();
        assert!((3.9..=4.0).contains(&(due.since(Ticks(SECOND)) as f64 / 1e9)));
        assert!(limiter.allowance(due) > 0);
    }

    #[test]
    fn limits_of_too_few_bytes_are_refused() {
        let check = |text| RateLimit::parse_bandwidth(text).and_then(RateLimit::check_bandwidth);
        for text in ["1", "255K", "262143", "1+1G"] {
            assert_eq!(check(text), Err(RateLimitError::TooFewBytes), "{text}");
        }
        for text in ["256K", "256K+1", "1G"] {
            assert_eq!(check(text), Ok(()), "{text}");
        }
        assert!(
            RateLimitError::TooFewBytes
                .to_string()
                .contains(" 256K per")
        );
    }

    #[test]
    fn the_least_limit_pays_off_a_batch_before_drivers_give_up() {
        let least = RateLimit::BYTES_MIN.to_string();
        let limiter = RateLimiter::new(limits("", &least), TickRate::NANOSECOND);
        limiter.charge(64, 6 << 20, Ticks(SECOND));
        let due = limiter.due();
        assert!(due.since(Ticks(SECOND)) < 25 * SECOND, "{due:?}");
    }

    #[test]
    fn limits_change_while_they_are_used() {
        let limiter = RateLimiter::new(RateLimits::default(), TickRate::NANOSECOND);
        assert!(!limiter.is_limited());
        assert_eq!(limiter.allowance(Ticks(0)), u32::MAX);
        limiter.set(limits("1000", ""), Ticks(SECOND));
        let first = taken(&limiter, SECOND, 2, 32, 4096);
        limiter.set(limits("5000", ""), Ticks(3 * SECOND));
        let second = taken(&limiter, 3 * SECOND, 2, 32, 4096);
        assert!((1990..=2030).contains(&first), "{first}");
        assert!((9950..=10_150).contains(&second), "{second}");
        limiter.set(RateLimits::default(), Ticks(5 * SECOND));
        assert!(!limiter.is_limited());
        assert_eq!(limiter.allowance(Ticks(0)), u32::MAX);
    }

    #[test]
    fn a_limit_that_is_raised_holds_up_nobody_for_the_one_before() {
        // The user typed bytes instead of megabytes per second.
        let limiter = RateLimiter::new(limits("", "100"), TickRate::NANOSECOND);
        limiter.charge(1, 4 << 20, Ticks(SECOND));
        let hours = limiter.due().since(Ticks(SECOND)) / (3600 * SECOND);
        assert_eq!(hours, 11);
        let now = Ticks(2 * SECOND);
        limiter.set(limits("", "4M"), now);
        assert_eq!(limiter.allowance(now), 0, "the bytes are still owed");
        assert!(limiter.allowance(Ticks(3 * SECOND)) > 0);
        // A lower limit does not extend the debt.
        limiter.set(limits("", "100"), now);
        assert!(limiter.allowance(Ticks(3 * SECOND)) > 0);
        // A limit after a time without a limit starts without debt.
        limiter.set(RateLimits::default(), now);
        limiter.set(limits("", "1M"), now);
        assert!(limiter.allowance(now) > 0);
    }

    #[test]
    fn the_next_limiter_of_a_lease_takes_up_what_was_used() {
        let now = Ticks(SECOND);
        let new = || RateLimiter::new(limits("1000", "1M+4M"), TickRate::NANOSECOND);
        let (limiter, next) = (new(), new());
        limiter.charge(1, 6 << 20, now);
        assert_eq!(limiter.allowance(now), 0);
        assert!(next.allowance(now) > 0, "a new one has all of its credit");
        let used = limiter.usage();
        next.restore(used, now);
        assert_eq!(next.allowance(now), 0);
        assert_eq!(next.due(), limiter.due());
        assert!(!used.is_replenished(Ticks(6 * SECOND)));
        assert!(used.is_replenished(Ticks(8 * SECOND)));
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

        #[test]
        fn the_rate_is_met_within_two_percent(
            iops in 100_u64..500_000,
            bandwidth in prop::option::of(1_u64 << 20..4 << 30),
            most in 1_u32..64,
            bytes in prop::sample::select(vec![512_u64, 4096, 65_536]),
        ) {
            let limit = |per_second| RateLimit { per_second: NonZeroU64::new(per_second).expect("not 0"), burst: None };
            let limits = RateLimits { iops: Some(limit(iops)), bandwidth: bandwidth.map(limit), weight: None };
            let limiter = RateLimiter::new(limits, TickRate::NANOSECOND);
            let wanted = iops.min(bandwidth.unwrap_or(u64::MAX) / bytes) as f64;
            // At most one command per microsecond, in batches.
            let wanted = wanted.min(1e6 * f64::from(most));
            let seconds = 2;
            let taken = taken(&limiter, SECOND, seconds, most, bytes) as f64 / seconds as f64;
            // Allowance for the burst of 10 ms and for a last batch.
            let slack = wanted * 0.016 + f64::from(most) + 1.0;
            prop_assert!((taken - wanted).abs() <= slack, "{taken} of {wanted}");
        }
    }
}
