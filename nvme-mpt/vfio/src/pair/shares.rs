//! Shares of a drive by weight, for busy tenants on several pairs.
//!
//! Within a pair, turns divide the places among the queues that share it. Between pairs, the drive decides: it takes
//! commands in the order of arrival, or serves the pairs in turn, so a tenant with more or deeper queues gets more bytes.
//! Here, a pure function of the bytes that each tenant got since the previous look, and of those that the drive has done,
//! decides its limit until the next look:
//!
//! - While some tenant gets less than its share by weight, those that get more are cut, until they have theirs.
//! - While the drive does less than it can, or is fast for all that it has, those limits rise, and end: nobody is held back
//!   for what nobody else takes.
//!
//! What a drive does varies from look to look, by itself. So it is smoothed, and the drive's capacity is estimated as the most
//! of that. The estimate decays, faster while no tenant has a limit.

/// The least limit: one command, from which a limit can rise.
const LIMIT_MIN: u64 = 4096;

/// A tenant from one look to the next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct OwnerShare {
    pub(super) weight: u64,
    /// Bytes that the drive got of it.
    pub(super) got: u64,
    /// True if it would take more now.
    pub(super) wants: bool,
    /// Most bytes until the next look.
    pub(super) limit: Option<u64>,
}

/// Part of a look in what the drive usually does.
const SMOOTHING: u64 = 8;

/// Bytes that the drive does from one look to the next.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct WeightedShares {
    usual: u64,
    /// The most of [`Self::usual`].
    most: u64,
}

impl WeightedShares {
    /// Decides what each of the busy tenants may get until the next look. The drive has `done` so many bytes since the last
    /// one. It `is_slow` if commands that it has take noticeably long.
    pub(super) fn divide(&mut self, tenants: &mut [OwnerShare], done: u64, is_slow: bool) {
        let got: u64 = tenants.iter().map(|tenant| tenant.got).sum();
        // Much of it took the place of commands that went directly, which nobody counts when they are done.
        if done < got / 2 {
            return;
        }
        // Bytes that fill a deep queue do not tell what the drive can do, and one that empties such a queue is not idle.
        let all = done;
        let weights: u64 = tenants.iter().map(|tenant| tenant.weight).sum();
        if tenants.iter().all(|tenant| tenant.limit.is_none()) {
            self.most -= self.most / 16;
        }
        self.usual = match self.usual {
            0 => all,
            usual => usual - usual / SMOOTHING + all / SMOOTHING,
        };
        let all = self.usual;
        self.most = self.most - self.most / 64;
        self.most = self.most.max(all);
        let most = self.most;
        let due = |tenant: &OwnerShare| scaled(most, tenant.weight, weights);
        let is_idle = !is_slow || all < most - most / 8;
        let is_short = |tenant: &OwnerShare| {
            let due = due(tenant);
            tenant.wants && tenant.limit.is_none() && tenant.got < due - due / 64
        };
        let is_any_short = tenants.iter().any(is_short);
        for tenant in tenants {
            let (due, got) = (due(tenant), tenant.got);
            tenant.limit = match tenant.limit {
                Some(limit) if is_idle => Some(limit + limit / 4),
                Some(limit) if got < due => Some(scaled(limit, due, got).min(limit + limit / 8)),
                limit if is_any_short && !is_idle && got > due => {
                    let limit = limit.map_or(got, |limit| limit.min(got));
                    Some(scaled(limit, due, got).max(limit - limit / 4))
                }
                limit => limit,
            };
            // One that no tenant can reach is none, and whoever has it may be short.
            let limit = tenant.limit.filter(|limit| *limit < most);
            tenant.limit = limit.map(|limit| limit.max(LIMIT_MIN));
        }
    }

    /// Forgets what the drive did, as busy tenants do not share it any more.
    pub(super) fn forget(&mut self) {
        *self = Self::default();
    }
}

/// Returns `value` times `by`, divided by `of`.
pub(super) fn scaled(value: u64, by: u64, of: u64) -> u64 {
    let scaled = u128::from(value) * u128::from(by) / u128::from(of.max(1));
    u64::try_from(scaled).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: u64 = 1_000_000;

    fn tenants(weights: [u64; 2]) -> [OwnerShare; 2] {
        weights.map(|weight| OwnerShare {
            weight,
            wants: true,
            ..OwnerShare::default()
        })
    }

    #[test]
    fn a_limit_that_limits_nothing_ends_and_lets_its_tenant_be_short() {
        let mut shares = WeightedShares::default();
        let mut both = tenants([1, 1]);
        // The first floods the drive, and is cut.
        for _ in 0..100 {
            let first = both[0].limit.unwrap_or(ALL * 9 / 10).min(ALL * 9 / 10);
            (both[0].got, both[1].got) = (first, ALL - first);
            let done = both.iter().map(|tenant| tenant.got).sum();
            shares.divide(&mut both, done, true);
        }
        assert!(
            both[0].limit.is_some_and(|limit| limit < ALL * 6 / 10),
            "{both:?}"
        );
        // Now the second does, for longer than any number of bytes could grow.
        for _ in 0..2_000 {
            let second = both[1].limit.unwrap_or(ALL * 9 / 10).min(ALL * 9 / 10);
            (both[0].got, both[1].got) = (ALL - second, second);
            let done = both.iter().map(|tenant| tenant.got).sum();
            shares.divide(&mut both, done, true);
        }
        assert!(
            both[1].limit.is_some_and(|limit| limit < ALL * 6 / 10),
            "{both:?}"
        );
        assert!(both[0].got > ALL * 4 / 10, "{both:?}");
    }

    /// The lighter one wants little, so the drive's work does not tell that it has become faster.
    #[test]
    fn limits_end_on_a_drive_that_becomes_fast() {
        let mut shares = WeightedShares::default();
        let mut both = tenants([1, 1]);
        for _ in 0..100 {
            let first = both[0].limit.unwrap_or(ALL * 9 / 10).min(ALL * 9 / 10);
            (both[0].got, both[1].got) = (first, ALL - first);
            let done = both.iter().map(|tenant| tenant.got).sum();
            shares.divide(&mut both, done, true);
        }
        let mut looks = 0;
        while let Some(limit) = both[0].limit {
            (both[0].got, both[1].got) = (limit, ALL / 2);
            let done = both.iter().map(|tenant| tenant.got).sum();
            shares.divide(&mut both, done, false);
            looks += 1;
            assert!(looks < 20, "{both:?}");
        }
    }

    #[test]
    fn bytes_that_fill_a_deep_queue_are_not_done() {
        let mut shares = WeightedShares::default();
        let mut both = tenants([1, 1]);
        let mut looks = 0;
        while both[0].limit.is_none_or(|limit| limit > ALL * 6 / 10) {
            // The first fills its queue, and then keeps it full.
            let first = if looks == 0 { 10 * ALL } else { ALL * 9 / 10 };
            (both[0].got, both[1].got) = (first, ALL / 10);
            shares.divide(&mut both, ALL, true);
            looks += 1;
            assert!(looks < 10, "{both:?}");
        }
    }

    /// The busiest look is no measure of what a drive can do: by it, the drive seems to have room at most looks.
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
            let mut both = tenants([1, 1]);
            let mut sums = [0, 0];
            for look in 0..400 {
                let all = ALL * percent() / 100;
                // The first has more queues.
                let first = both[0].limit.unwrap_or(ALL).min(all * 84 / 100);
                (both[0].got, both[1].got) = (first, all - first);
                if look >= 100 {
                    sums = [sums[0] + first, sums[1] + all - first];
                }
                let done = both.iter().map(|tenant| tenant.got).sum();
                shares.divide(&mut both, done, true);
            }
            let second = sums[1] * 100 / (sums[0] + sums[1]);
            assert!((45..=55).contains(&second), "{spread}: {second} %");
        }
    }
}
