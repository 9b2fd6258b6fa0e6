//! Shares of a drive by weight, for busy owners on several pairs.
//!
//! Within a pair, arbitration divides the ring among the users. Between pairs, the drive decides: it executes commands in order
//! of arrival or serves the pairs in turn, so an owner with more or deeper queues gets more bytes. In each survey, a pure
//! function computes each owner's limit until the next survey. Its inputs are the bytes that the drive received from each
//! owner, and the bytes that the drive completed, since the last survey:
//!
//! - While an owner gets less than its share by weight, the limits of owners that get more than their share are reduced.
//! - While the drive completes less than it can, or is fast enough for all its commands, limits rise and finally end. So no
//!   owner stays limited if the other owners do not use the capacity that its limit frees.
//!
//! The drive's throughput varies between surveys, so it is smoothed. The drive's capacity is estimated as the maximum of the
//! smoothed throughput. The estimate decays, and decays faster while no owner has a limit.

/// Minimum of an owner's limit, in bytes. It permits one command, so that the limit can rise again.
const LIMIT_MIN: u64 = 4096;

/// Use of the drive by an owner (a lease) between two surveys, and its limit until the next survey.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct OwnerShare {
    pub(super) weight: u64,
    /// Number of bytes of the owner's commands that went to the drive between the surveys.
    pub(super) received_bytes: u64,
    /// True if the owner has more commands outstanding than a quiet owner, and so would use more of the drive.
    pub(super) has_demand: bool,
    /// Number of the owner's bytes that may go to the drive until the next survey; `None` for no limit.
    pub(super) limit: Option<u64>,
}

/// Divisor of the exponential smoothing: the latest survey counts as 1/8.
const SMOOTHING: u64 = 8;

/// Estimates of the drive's throughput, in bytes between two surveys.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct WeightedShares {
    smoothed_bytes: u64,
    /// Estimate of the drive's capacity: the decaying maximum of `smoothed_bytes`.
    capacity_bytes: u64,
}

impl WeightedShares {
    /// Computes the limits of the busy owners until the next survey. `done` is the number of bytes that the drive has completed
    /// since the last survey. `is_slow` is true if commands take noticeably long.
    pub(super) fn divide_limits(&mut self, owners: &mut [OwnerShare], done: u64, is_slow: bool) {
        let got: u64 = owners.iter().map(|owner| owner.received_bytes).sum();
        // If commands went to the drive directly before, their completions are not counted. Then `done` is too small to judge
        // by.
        if done < got / 2 {
            return;
        }
        // Bytes that fill a deep queue do not show the drive's throughput, and a drive that empties such a queue is not
        // idle.
        let all = done;
        let weights: u64 = owners.iter().map(|owner| owner.weight).sum();
        if owners.iter().all(|owner| owner.limit.is_none()) {
            self.capacity_bytes -= self.capacity_bytes / 16;
        }
        self.smoothed_bytes = match self.smoothed_bytes {
            0 => all,
            usual => usual - usual / SMOOTHING + all / SMOOTHING,
        };
        let all = self.smoothed_bytes;
        self.capacity_bytes = self.capacity_bytes - self.capacity_bytes / 64;
        self.capacity_bytes = self.capacity_bytes.max(all);
        let most = self.capacity_bytes;
        let due = |owner: &OwnerShare| scale(most, owner.weight, weights);
        let is_idle = !is_slow || all < most - most / 8;
        let is_short = |owner: &OwnerShare| {
            let due = due(owner);
            owner.has_demand && owner.limit.is_none() && owner.received_bytes < due - due / 64
        };
        let is_any_short = owners.iter().any(is_short);
        for owner in owners {
            let (due, got) = (due(owner), owner.received_bytes);
            owner.limit = match owner.limit {
                Some(limit) if is_idle => Some(limit + limit / 4),
                Some(limit) if got < due => Some(scale(limit, due, got).min(limit + limit / 8)),
                limit if is_any_short && !is_idle && got > due => {
                    let limit = limit.map_or(got, |limit| limit.min(got));
                    Some(scale(limit, due, got).max(limit - limit / 4))
                }
                limit => limit,
            };
            // A limit of at least the drive's capacity is dropped, because an owner with a limit does not count as one that
            // gets too little.
            let limit = owner.limit.filter(|limit| *limit < most);
            owner.limit = limit.map(|limit| limit.max(LIMIT_MIN));
        }
    }

    /// Forgets the estimates, because busy owners do not share the drive any more.
    pub(super) fn forget(&mut self) {
        *self = Self::default();
    }
}

/// Returns `value * by / of` without overflow.
pub(super) fn scale(value: u64, by: u64, of: u64) -> u64 {
    let scaled = u128::from(value) * u128::from(by) / u128::from(of.max(1));
    u64::try_from(scaled).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: u64 = 1_000_000;

    fn owners(weights: [u64; 2]) -> [OwnerShare; 2] {
        weights.map(|weight| OwnerShare {
            weight,
            has_demand: true,
            ..OwnerShare::default()
        })
    }

    #[test]
    fn a_limit_that_limits_nothing_ends_and_lets_its_owner_be_short() {
        let mut shares = WeightedShares::default();
        let mut both = owners([1, 1]);
        // The first lease floods the drive, and gets a limit.
        for _ in 0..100 {
            let first = both[0].limit.unwrap_or(ALL * 9 / 10).min(ALL * 9 / 10);
            (both[0].received_bytes, both[1].received_bytes) = (first, ALL - first);
            let done = both.iter().map(|owner| owner.received_bytes).sum();
            shares.divide_limits(&mut both, done, true);
        }
        assert!(
            both[0].limit.is_some_and(|limit| limit < ALL * 6 / 10),
            "{both:?}"
        );
        // Then the second lease floods the drive, for longer than byte counters could grow.
        for _ in 0..2_000 {
            let second = both[1].limit.unwrap_or(ALL * 9 / 10).min(ALL * 9 / 10);
            (both[0].received_bytes, both[1].received_bytes) = (ALL - second, second);
            let done = both.iter().map(|owner| owner.received_bytes).sum();
            shares.divide_limits(&mut both, done, true);
        }
        assert!(
            both[1].limit.is_some_and(|limit| limit < ALL * 6 / 10),
            "{both:?}"
        );
        assert!(both[0].received_bytes > ALL * 4 / 10, "{both:?}");
    }

    /// The lighter lease submits little, so the amount of work does not show that the drive has become faster.
    #[test]
    fn limits_end_on_a_drive_that_becomes_fast() {
        let mut shares = WeightedShares::default();
        let mut both = owners([1, 1]);
        for _ in 0..100 {
            let first = both[0].limit.unwrap_or(ALL * 9 / 10).min(ALL * 9 / 10);
            (both[0].received_bytes, both[1].received_bytes) = (first, ALL - first);
            let done = both.iter().map(|owner| owner.received_bytes).sum();
            shares.divide_limits(&mut both, done, true);
        }
        let mut intervals = 0;
        while let Some(limit) = both[0].limit {
            (both[0].received_bytes, both[1].received_bytes) = (limit, ALL / 2);
            let done = both.iter().map(|owner| owner.received_bytes).sum();
            shares.divide_limits(&mut both, done, false);
            intervals += 1;
            assert!(intervals < 20, "{both:?}");
        }
    }

    #[test]
    fn bytes_that_fill_a_deep_queue_are_not_done() {
        let mut shares = WeightedShares::default();
        let mut both = owners([1, 1]);
        let mut intervals = 0;
        while both[0].limit.is_none_or(|limit| limit > ALL * 6 / 10) {
            // The first lease fills its queue, and keeps it full.
            let first = if intervals == 0 {
                10 * ALL
            } else {
                ALL * 9 / 10
            };
            (both[0].received_bytes, both[1].received_bytes) = (first, ALL / 10);
            shares.divide_limits(&mut both, ALL, true);
            intervals += 1;
            assert!(intervals < 10, "{both:?}");
        }
    }

    /// The maximum throughput is a poor estimate of such a drive's capacity: compared with it, the drive seems idle in most
    /// surveys.
    #[test]
    fn a_drive_whose_work_varies_is_divided_as_well() {
        for spread in [0, 20, 40, 60] {
            let mut seed = 7_u64;
            let mut percent = || {
                seed ^= seed << 13;
                seed ^= seed >> 7;
                seed ^= seed << 17;
                100 - spread + seed % (2 * spread + 1)
            };
            let mut shares = WeightedShares::default();
            let mut both = owners([1, 1]);
            let mut sums = [0, 0];
            for interval in 0..400 {
                let all = ALL * percent() / 100;
                // The first lease has more queues, and so gets more.
                let first = both[0].limit.unwrap_or(ALL).min(all * 84 / 100);
                (both[0].received_bytes, both[1].received_bytes) = (first, all - first);
                if interval >= 100 {
                    sums = [sums[0] + first, sums[1] + all - first];
                }
                let done = both.iter().map(|owner| owner.received_bytes).sum();
                shares.divide_limits(&mut both, done, true);
            }
            let second = sums[1] * 100 / (sums[0] + sums[1]);
            assert!((45..=55).contains(&second), "{spread}: {second} %");
        }
    }
}
