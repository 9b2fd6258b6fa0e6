//! Shares of a drive by weight, for busy tenants whose queues have pairs to themselves.
//!
//! Within a pair, turns divide the places among the queues that share it. Between pairs, the drive decides: it takes
//! commands in the order of arrival, or serves the pairs in turn, so a tenant with more or deeper queues gets more bytes.
//! Here, a pure function of the bytes that each tenant got since the previous look decides its limit until the next look:
//!
//! - While some tenant gets less than its share by weight, those that get more are cut, until they have theirs.
//! - While the drive does less than it can, those limits rise: nobody is held back for what nobody else takes.
//!
//! The drive's capacity is estimated as the most bytes that it did between two looks. The estimate decays while no tenant
//! has a limit.

/// The least limit: one command, from which a limit can rise.
const LIMIT_MIN: u64 = 4096;

/// A tenant from one look to the next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Portion {
    pub(super) weight: u64,
    /// Bytes that the drive got of it.
    pub(super) got: u64,
    /// Most bytes until the next look.
    pub(super) limit: Option<u64>,
}

/// The most that the drive did from one look to the next.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Shares {
    most: u64,
}

impl Shares {
    /// Decides what each of the busy tenants may get until the next look.
    pub(super) fn divide(&mut self, tenants: &mut [Portion]) {
        let all: u64 = tenants.iter().map(|tenant| tenant.got).sum();
        let weights: u64 = tenants.iter().map(|tenant| tenant.weight).sum();
        if tenants.iter().all(|tenant| tenant.limit.is_none()) {
            self.most -= self.most / 16;
        }
        self.most = self.most.max(all);
        let most = self.most;
        let due = |tenant: &Portion| scaled(most, tenant.weight, weights);
        let is_idle = all < most - most / 8;
        let is_short = |tenant: &Portion| {
            let due = due(tenant);
            tenant.limit.is_none() && tenant.got < due - due / 64
        };
        let is_any_short = tenants.iter().any(is_short);
        for tenant in tenants {
            let (due, got) = (due(tenant), tenant.got);
            tenant.limit = match tenant.limit {
                Some(limit) if is_idle => Some(limit + limit / 4).filter(|limit| *limit < most),
                Some(limit) if got < due => Some(scaled(limit, due, got).min(limit + limit / 8)),
                limit if is_any_short && !is_idle && got > due => {
                    let limit = limit.map_or(got, |limit| limit.min(got));
                    Some(scaled(limit, due, got).max(limit - limit / 4))
                }
                limit => limit,
            };
            tenant.limit = tenant.limit.map(|limit| limit.max(LIMIT_MIN));
        }
    }

    /// Forgets what the drive did, as busy tenants do not share it any more.
    pub(super) fn forget(&mut self) {
        self.most = 0;
    }
}

/// Returns `value` times `by`, divided by `of`.
fn scaled(value: u64, by: u64, of: u64) -> u64 {
    let scaled = u128::from(value) * u128::from(by) / u128::from(of.max(1));
    u64::try_from(scaled).unwrap_or(u64::MAX)
}
