//! Source of all times and sleeps. A poller reads the time once per pass, in ticks of the cheapest clock (the time stamp
//! counter on x86-64). The control path reads the system's clock.
#![cfg_attr(
    not(simulation),
    expect(
        clippy::disallowed_methods,
        reason = "the one source of time and sleep"
    )
)]
#![cfg_attr(
    all(target_arch = "x86_64", not(simulation)),
    expect(unsafe_code, reason = "reads the time stamp counter")
)]

use std::fmt;
use std::sync::OnceLock;
#[cfg(not(simulation))]
use std::thread;
use std::time::Duration;
#[cfg(not(simulation))]
use std::time::Instant;

/// A moment, in ticks since a fixed moment in the past.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticks(pub u64);

impl Ticks {
    /// Returns the present moment.
    #[inline]
    #[must_use]
    pub fn now() -> Self {
        #[cfg(simulation)]
        return Self(crate::simulation::now().as_nanos() as u64);
        #[cfg(all(target_arch = "x86_64", not(simulation)))]
        // SAFETY: every x86-64 processor has the instruction, and it has no side effect.
        return Self(unsafe { core::arch::x86_64::_rdtsc() });
        #[cfg(not(any(target_arch = "x86_64", simulation)))]
        Self(monotonic().as_nanos() as u64)
    }

    /// Returns the ticks since `earlier`; 0 if `earlier` is in the future, because another processor's clock may be ahead.
    #[inline]
    #[must_use]
    pub fn since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

/// A source of ticks. Tests of queues have another one than the host's clock.
pub trait TickClock: fmt::Debug {
    /// Returns the ticks since some time in the past. The value never decreases.
    fn now(&self) -> u64;
}

/// The host's clock.
#[derive(Clone, Copy, Debug, Default)]
pub struct HostClock;

impl TickClock for HostClock {
    #[inline]
    fn now(&self) -> u64 {
        Ticks::now().0
    }
}

/// Speed of a clock. Code that gets [`Ticks`] from its caller also gets their rate when it is created, so it works with any
/// clock.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TickRate {
    per_nanosecond: f64,
}

impl TickRate {
    /// Speed of a simulated clock with ticks of one nanosecond.
    pub const NANOSECOND: Self = Self {
        per_nanosecond: 1.0,
    };

    /// Returns the speed of [`Ticks::now`].
    #[must_use]
    pub fn measured() -> Self {
        if cfg!(simulation) {
            return Self::NANOSECOND;
        }
        Self {
            per_nanosecond: per_nanosecond(),
        }
    }

    /// Returns the number of ticks in a duration.
    #[must_use]
    pub fn ticks(self, time: Duration) -> u64 {
        (time.as_nanos() as f64 * self.per_nanosecond) as u64
    }

    /// Returns the duration of a number of ticks.
    #[must_use]
    pub fn duration(self, ticks: u64) -> Duration {
        Duration::from_nanos((ticks as f64 / self.per_nanosecond) as u64)
    }
}

/// Returns the number of ticks in a duration. Meant for set-up, because it may wait for the measurement of the rate.
#[must_use]
pub fn ticks_in(time: Duration) -> u64 {
    TickRate::measured().ticks(time)
}

/// Returns the duration of a number of ticks in nanoseconds.
#[must_use]
pub fn ticks_to_nanoseconds(ticks: u64) -> u64 {
    TickRate::measured().duration(ticks).as_nanos() as u64
}

/// Returns the time since the first call in this process, by the system's monotonic clock.
#[must_use]
pub fn monotonic() -> Duration {
    #[cfg(simulation)]
    return crate::simulation::now();
    #[cfg(not(simulation))]
    {
        static START: OnceLock<Instant> = OnceLock::new();
        START.get_or_init(Instant::now).elapsed()
    }
}

/// Suspends the calling thread.
pub fn sleep(time: Duration) {
    #[cfg(simulation)]
    let _slept = crate::simulation::wait_for(Some(time), || None::<()>);
    #[cfg(not(simulation))]
    thread::sleep(time);
}

/// Duration of the measurement by [`per_nanosecond`]. It is short because the start of a server or a VMM waits for it. In
/// 300 measurements of 2 ms, the largest error was 6 millionths; with 20 ms, it was 0.6 millionths.
const MEASUREMENT_TIME: Duration = Duration::from_millis(2);

/// Returns the ticks per nanosecond. The first call measures them against the system's clock.
fn per_nanosecond() -> f64 {
    static RATE: OnceLock<f64> = OnceLock::new();
    *RATE.get_or_init(|| {
        let (from, start) = read_both_clocks();
        sleep(MEASUREMENT_TIME);
        let (to, end) = read_both_clocks();
        let ticks = to.since(from);
        let nanos = end.saturating_sub(start).as_nanos();
        // A counter or clock that stands still must not make durations infinite.
        if ticks == 0 || nanos == 0 {
            1.0
        } else {
            ticks as f64 / nanos as f64
        }
    })
}

/// Returns one moment as ticks and as time of the system's monotonic clock.
///
/// A preemption between the two readings would falsify the rate. So several pairs are read, and the closest one is used.
fn read_both_clocks() -> (Ticks, Duration) {
    const TRIES: usize = 16;
    let pairs = (0..TRIES).map(|_| {
        let before = monotonic();
        let ticks = Ticks::now();
        let apart = monotonic().saturating_sub(before);
        (apart, ticks, before + apart / 2)
    });
    pairs
        .min_by_key(|(apart, ..)| *apart)
        .map_or_else(|| (Ticks::now(), monotonic()), |(_, ticks, at)| (ticks, at))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_and_nanoseconds_convert_both_ways() {
        let ticks = ticks_in(Duration::from_millis(1));
        let nanos = ticks_to_nanoseconds(ticks);
        assert!((990_000..=1_010_000).contains(&nanos), "{nanos}");
        assert_eq!(Ticks(5).since(Ticks(9)), 0);
        let microsecond = Duration::from_micros(1);
        assert_eq!(TickRate::NANOSECOND.ticks(microsecond), 1000);
        assert_eq!(TickRate::NANOSECOND.duration(1000), microsecond);
    }
}
