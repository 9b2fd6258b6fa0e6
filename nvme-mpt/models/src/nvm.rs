//! `model = "nvm"`: a drive without erase blocks, such as phase-change memory.
//!
//! The drive has parallel units, across which blocks are striped. A command occupies a unit for each of its stripes on this
//! unit, after the stripes of earlier commands. On an idle drive, a command of one stripe takes the profile's latency. All
//! units together have the profile's bandwidth. A part of a stripe takes as long as a whole stripe.

use std::sync::atomic::{AtomicU64, Ordering};

use super::profile::{NvmProfile, NvmRates};
use super::time::TickUnit;
use super::{MediaAccess, MediaWork};

/// A parallel unit. It has a cache line of its own, because several pollers use it.
#[derive(Debug, Default)]
#[repr(align(64))]
struct ParallelUnit {
    /// Time, in ticks, when the unit has done all work assigned to it.
    free_at: AtomicU64,
}

impl ParallelUnit {
    /// Occupies the unit for `busy` ticks, from `now` on or, if the unit is busy at `now`, from the time when it is free.
    /// Returns the start time.
    fn occupy(&self, now: u64, busy: u64) -> u64 {
        loop {
            if let Some(start) = self.try_occupy(now, busy) {
                return start;
            }
        }
    }

    /// Tries once to occupy the unit like [`Self::occupy`]. Returns `None` if another queue has occupied the unit at that
    /// moment.
    #[inline]
    fn try_occupy(&self, now: u64, busy: u64) -> Option<u64> {
        let free = self.free_at.load(Ordering::Relaxed);
        let start = free.max(now);
        // The sum wraps only after centuries. The command is then due immediately.
        let done = start.wrapping_add(busy);
        // Relaxed ordering suffices, as the unit's time orders no other memory.
        self.free_at
            .compare_exchange(free, done, Ordering::Relaxed, Ordering::Relaxed)
            .ok()?;
        Some(start)
    }
}

/// Cost of reads or of writes, in ticks.
#[derive(Clone, Copy, Debug)]
struct StripeCost {
    /// Time for which a stripe occupies its unit.
    stripe_ticks: u64,
    /// Minimum ticks from the start on a unit until the command completes.
    latency: u64,
    /// Latency minus the time for which one stripe occupies its unit.
    extra_latency: u64,
    /// Time from the start on a unit to the completion of a command of one stripe.
    one_stripe_ticks: u64,
}

impl StripeCost {
    fn new(rates: &NvmRates, profile: &NvmProfile, timebase: TickUnit) -> Self {
        let units = u64::from(profile.units);
        let stripe = timebase.transfer_ticks(profile.stripe.0 * units, rates.bandwidth.0);
        let latency = timebase.span_ticks(rates.latency);
        Self {
            stripe_ticks: stripe,
            latency,
            extra_latency: latency.saturating_sub(stripe),
            one_stripe_ticks: latency.max(stripe),
        }
    }

    /// Returns the time from the start on a unit to the completion of a command whose stripes occupy the unit for `busy` ticks.
    #[inline]
    fn total_ticks(&self, busy: u64) -> u64 {
        self.latency.max(busy + self.extra_latency)
    }
}

/// Remainders of divisions by a constant divisor, by means of two multiplications.
///
/// The result is exact for dividends of 32 bits: D. Lemire, O. Kaser, N. Kurz, "Faster remainder by direct computation", 2019.
#[derive(Clone, Copy, Debug)]
struct FastRemainder {
    divisor: u64,
    /// 2^64 / divisor, rounded up.
    reciprocal: u64,
}

impl FastRemainder {
    /// Prepares the remainder for a divisor, which must not be 0.
    fn new(divisor: u16) -> Self {
        let divisor = u64::from(divisor.max(1));
        Self {
            divisor,
            // For divisor 1, the reciprocal wraps to 0, which yields remainder 0 as required.
            reciprocal: (u64::MAX / divisor).wrapping_add(1),
        }
    }

    #[inline]
    fn remainder(self, dividend: u32) -> u32 {
        let fraction = self.reciprocal.wrapping_mul(u64::from(dividend));
        ((u128::from(fraction) * u128::from(self.divisor)) >> 64) as u32
    }
}

/// Timing model of a drive of parallel units, which all queues of the drive share.
#[derive(Debug)]
pub(crate) struct NvmModel {
    /// Number of logical blocks in a stripe, as a base-2 logarithm.
    stripe_shift: u32,
    read: StripeCost,
    write: StripeCost,
    units: Box<[ParallelUnit]>,
    unit_remainder: FastRemainder,
}

impl NvmModel {
    /// Creates the model. Loading the profile has checked it.
    pub(super) fn new(profile: &NvmProfile, lba_shift: u8, timebase: TickUnit) -> Self {
        let stripe_blocks = (profile.stripe.0 >> lba_shift).max(1);
        let units = std::iter::repeat_with(ParallelUnit::default);
        Self {
            stripe_shift: stripe_blocks.ilog2(),
            read: StripeCost::new(&profile.read, profile, timebase),
            write: StripeCost::new(&profile.write, profile, timebase),
            units: units.take(profile.units.into()).collect(),
            unit_remainder: FastRemainder::new(profile.units),
        }
    }

    /// Computes the time when work that arrives at `now` completes.
    #[inline]
    pub(super) fn due_time(&self, work: &MediaWork, now: u64) -> u64 {
        if let Some(due) = self.stripe_due_time(work, now) {
            return due;
        }
        let cost = match work.access {
            MediaAccess::Read => &self.read,
            MediaAccess::Write => &self.write,
            // The drive changes its tables and moves no data.
            MediaAccess::Deallocate => return now.saturating_add(self.write.latency),
            // Completed writes are never volatile, so a Flush takes no time.
            MediaAccess::Flush => return now,
        };
        let (first, last) = self.stripe_range(work);
        let index = self.unit_remainder.remainder(first as u32);
        self.striped_due_time(index.into(), last - first + 1, cost, now)
    }

    /// Computes the time like [`Self::due_time`], but faster, and only for a read or write of one stripe. Returns `None` for
    /// other work, and if another queue has occupied the unit at that moment; the model is then unchanged.
    #[inline]
    pub(super) fn stripe_due_time(&self, work: &MediaWork, now: u64) -> Option<u64> {
        let cost = match work.access {
            MediaAccess::Read => &self.read,
            MediaAccess::Write => &self.write,
            MediaAccess::Deallocate | MediaAccess::Flush => return None,
        };
        let (first, last) = self.stripe_range(work);
        if first != last {
            return None;
        }
        // The stripe's number is truncated to 32 bits, which only affects the choice of the unit.
        let unit = self
            .units
            .get(self.unit_remainder.remainder(first as u32) as usize)?;
        let start = unit.try_occupy(now, cost.stripe_ticks)?;
        Some(start.wrapping_add(cost.one_stripe_ticks))
    }

    /// Returns the numbers of the first and the last stripe of the work's blocks.
    #[inline]
    fn stripe_range(&self, work: &MediaWork) -> (u64, u64) {
        let last = work.slba + work.blocks.saturating_sub(1);
        (work.slba >> self.stripe_shift, last >> self.stripe_shift)
    }

    #[inline]
    fn unit_due_time(&self, unit: u64, cost: &StripeCost, stripes: u64, now: u64) -> u64 {
        let Some(unit) = self.units.get(unit as usize) else {
            return now;
        };
        let busy = cost.stripe_ticks * stripes;
        unit.occupy(now, busy)
            .saturating_add(cost.total_ticks(busy))
    }

    fn striped_due_time(&self, first: u64, stripes: u64, cost: &StripeCost, now: u64) -> u64 {
        let count = self.units.len() as u64;
        let (each, rest) = (stripes / count, stripes % count);
        let mut due = now;
        for i in 0..count.min(stripes) {
            let stripes = each + u64::from(i < rest);
            due = due.max(self.unit_due_time((first + i) % count, cost, stripes, now));
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::{DriveProfile, ProfileSize};
    use crate::time::TimeSpan;

    /// Creates a model with 4 units. A stripe has 4 KiB. A unit reads it in 4 us and writes it in 8 us.
    fn model() -> NvmModel {
        let rates = |latency, bandwidth| NvmRates {
            latency: TimeSpan(latency),
            bandwidth: ProfileSize(bandwidth),
        };
        let profile = NvmProfile {
            units: 4,
            stripe: ProfileSize(4096),
            read: rates(10_000, 4_096_000_000),
            write: rates(10_000, 2_048_000_000),
        };
        NvmModel::new(&profile, 9, TickUnit::Nanoseconds)
    }

    fn work(access: MediaAccess, slba: u64, blocks: u64) -> MediaWork {
        MediaWork {
            access,
            slba,
            blocks,
        }
    }

    #[test]
    fn remainders_are_exact() {
        for divisor in [1, 2, 3, 5, 7, 12, 64, 100, 641, 32_767, u16::MAX] {
            let remainder = FastRemainder::new(divisor);
            let divisor = u32::from(divisor);
            let near = [0, divisor, u32::MAX / divisor * divisor, u32::MAX, 1 << 31];
            for near in near {
                for dividend in (0..3).flat_map(|i| [near.wrapping_add(i), near.wrapping_sub(i)]) {
                    assert_eq!(
                        remainder.remainder(dividend),
                        dividend % divisor,
                        "{dividend}"
                    );
                }
            }
        }
    }

    #[test]
    fn a_stripe_on_an_idle_drive_takes_the_latency() {
        let model = model();
        assert_eq!(model.due_time(&work(MediaAccess::Read, 0, 8), 100), 10_100);
        assert_eq!(model.due_time(&work(MediaAccess::Write, 8, 8), 100), 10_100);
        // A partial stripe takes as long as a whole stripe. Two partial stripes are on two units.
        assert_eq!(model.due_time(&work(MediaAccess::Read, 23, 1), 100), 10_100);
        assert_eq!(
            model.due_time(&work(MediaAccess::Read, 31, 2), 50_000),
            60_000
        );
        assert_eq!(model.due_time(&work(MediaAccess::Flush, 0, 0), 7), 7);
        assert_eq!(
            model.due_time(&work(MediaAccess::Deallocate, 0, 99), 7),
            10_007
        );
    }

    #[test]
    fn a_stripe_alone_takes_as_long_as_among_many() {
        let (model, general) = (model(), model());
        for i in 0..1000_u64 {
            let access = [MediaAccess::Read, MediaAccess::Write][usize::from(i.is_multiple_of(3))];
            let (work, now) = (work(access, i * 7919 % 4096, 1), i * 700);
            let (index, cost) = match access {
                MediaAccess::Read => (work.slba / 8 % 4, &general.read),
                _ => (work.slba / 8 % 4, &general.write),
            };
            let expected = general.striped_due_time(index, 1, cost, now);
            assert_eq!(model.stripe_due_time(&work, now), Some(expected));
        }
        for other in [
            work(MediaAccess::Read, 7, 2),
            work(MediaAccess::Flush, 0, 0),
            work(MediaAccess::Deallocate, 0, 8),
        ] {
            assert_eq!(model.stripe_due_time(&other, 0), None);
        }
    }

    #[test]
    fn a_unit_does_one_stripe_after_the_other() {
        let model = model();
        let of_unit_0 = |stripe: u64| work(MediaAccess::Read, stripe * 4 * 8, 8);
        assert_eq!(model.due_time(&of_unit_0(0), 0), 10_000);
        assert_eq!(model.due_time(&of_unit_0(1), 0), 14_000);
        assert_eq!(model.due_time(&of_unit_0(2), 0), 18_000);
        // The other units are idle now. This unit is idle afterwards.
        assert_eq!(model.due_time(&work(MediaAccess::Read, 8, 8), 0), 10_000);
        assert_eq!(model.due_time(&of_unit_0(3), 12_000), 22_000);
    }

    #[test]
    fn all_units_together_have_the_bandwidth() {
        for (access, bandwidth) in [(MediaAccess::Read, 4.096e9), (MediaAccess::Write, 2.048e9)] {
            let model = model();
            // A command of 1 MiB has 64 stripes on each unit.
            let due = (0..100).map(|i| model.due_time(&work(access, i * 2048, 2048), 0));
            let nanoseconds = due.max().expect("commands");
            let achieved = f64::from(100 << 20) / nanoseconds as f64 * 1e9;
            let ratio = achieved / bandwidth;
            assert!((0.99..=1.0).contains(&ratio), "{ratio}");
        }
    }

    #[test]
    fn the_profile_that_comes_along_keeps_its_latency_under_load() {
        let DriveProfile::Nvm(profile) = DriveProfile::find_built_in("nvm").expect("comes along")
        else {
            panic!("another model");
        };
        let model = NvmModel::new(&profile, 9, TickUnit::Nanoseconds);
        for command in 0..profile.units.into() {
            let due = model.due_time(&work(MediaAccess::Read, command * 8, 8), 0);
            assert_eq!(due, profile.read.latency.0);
        }
    }
}
