//! Processor time of pollers, charged to the functions they work for.
//!
//! The kernel counts the CPU time of a poller's thread, without sleeps and preemptions. The poller reads that clock at most
//! once per [`ACCOUNTING_PERIOD`]. It divides the time since the last reading among its queues, in proportion to the ticks
//! spent on each queue. So the sum over all queues equals the kernel's count. A preemption adds nothing to the sum, but
//! increases the share of the preempted queue. Over time, preemptions hit queues in proportion to their time. A poller with one
//! function counts no ticks: all of its time is charged to that function.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Minimum time between two readings of a poller thread's CPU time. A poller also reads it when queues are added or removed.
pub(crate) const ACCOUNTING_PERIOD: Duration = Duration::from_millis(1);

/// Processor time that pollers spent on one function. Any poller may add time.
#[derive(Debug, Default)]
pub(crate) struct ProcessorTime {
    nanoseconds: AtomicU64,
}

impl ProcessorTime {
    /// Returns the processor time of all pollers for the function, in seconds.
    pub(crate) fn seconds(&self) -> f64 {
        self.nanoseconds.load(Ordering::Relaxed) as f64 / 1e9
    }
}

/// Ticks that a poller spent on one queue, or on one watched doorbell, and that are not yet charged to the queue's function.
#[derive(Debug)]
pub(crate) struct ProcessorTimeCharge {
    function: Arc<ProcessorTime>,
    ticks: u64,
}

impl ProcessorTimeCharge {
    /// Creates a charge without ticks. Its ticks will be charged to `function`.
    pub(crate) fn new(function: Arc<ProcessorTime>) -> Self {
        Self { function, ticks: 0 }
    }

    /// Adds ticks that the poller spent on the queue or watched doorbell.
    #[inline]
    pub(crate) fn add(&mut self, ticks: u64) {
        self.ticks = self.ticks.wrapping_add(ticks);
    }

    /// Returns the processor time that the ticks are charged to.
    pub(crate) fn function(&self) -> &Arc<ProcessorTime> {
        &self.function
    }
}

/// CPU time of a poller's thread since the last reading, to be divided among the queues and watched doorbells that it worked
/// for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ProcessorTimeDivision {
    nanoseconds: u64,
    ticks: u64,
    charges: u64,
}

impl ProcessorTimeDivision {
    /// Prepares the division of `spent` among `bills` in proportion to their ticks, or equally if no ticks were counted.
    pub(crate) fn new<'a>(
        spent: Duration,
        bills: impl Iterator<Item = &'a ProcessorTimeCharge>,
    ) -> Self {
        let (mut ticks, mut count) = (0_u64, 0);
        for charge in bills {
            ticks = ticks.saturating_add(charge.ticks);
            count += 1;
        }
        Self {
            nanoseconds: u64::try_from(spent.as_nanos()).unwrap_or(u64::MAX),
            ticks,
            charges: count,
        }
    }

    /// Charges the function of `charge` with its share of the time, and resets the ticks of `charge`.
    pub(crate) fn charge_share(&self, charge: &mut ProcessorTimeCharge) {
        let (part, whole) = match self.ticks {
            0 => (1, self.charges),
            ticks => (charge.ticks, ticks),
        };
        charge.ticks = 0;
        let share = u128::from(self.nanoseconds) * u128::from(part) / u128::from(whole.max(1));
        // A share does not exceed the total, so it fits into 64 bits.
        let share = u64::try_from(share).unwrap_or(self.nanoseconds);
        charge
            .function
            .nanoseconds
            .fetch_add(share, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Divides `spent` nanoseconds among charges of two functions. Each charge is given as the index of its function, and its
    /// ticks. Returns the time of each function.
    fn divide_time(spent: u64, bills: &[(usize, u64)]) -> [u64; 2] {
        let functions: [Arc<ProcessorTime>; 2] = Default::default();
        let bills = bills.iter().map(|(function, ticks)| {
            let mut charge = ProcessorTimeCharge::new(functions[*function].clone());
            charge.add(*ticks);
            charge
        });
        let mut bills: Vec<_> = bills.collect();
        let division = ProcessorTimeDivision::new(Duration::from_nanos(spent), bills.iter());
        bills
            .iter_mut()
            .for_each(|charge| division.charge_share(charge));
        assert!(bills.iter().all(|charge| charge.ticks == 0));
        functions.map(|function| function.nanoseconds.load(Ordering::Relaxed))
    }

    #[test]
    fn time_is_divided_by_ticks() {
        assert_eq!(divide_time(1000, &[(0, 300), (1, 100)]), [750, 250]);
        assert_eq!(divide_time(1000, &[(0, 1), (1, 2), (0, 1)]), [500, 500]);
        assert_eq!(divide_time(1000, &[(0, 0), (1, 7)]), [0, 1000]);
        let most = divide_time(u64::MAX, &[(0, u64::MAX), (1, u64::MAX)]);
        assert_eq!(most[0], u64::MAX, "the sum of ticks saturates");
    }

    #[test]
    fn time_without_ticks_is_divided_equally() {
        assert_eq!(divide_time(1000, &[(0, 0)]), [1000, 0]);
        assert_eq!(
            divide_time(1000, &[(0, 0), (0, 0), (0, 0), (1, 0)]),
            [750, 250]
        );
        assert_eq!(divide_time(1000, &[]), [0, 0]);
    }
}
