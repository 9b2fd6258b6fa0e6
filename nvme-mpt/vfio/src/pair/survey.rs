//! Looks at all queue pairs of a drive, by which its governor knows of members that have a pair to themselves.
//!
//! Such a member goes straight to its ring, and counts nothing but its commands in flight. So the drive's supervisor adds
//! them up ten times a second, by lease: a tenant is quiet or busy with all its queues, whichever pairs they use. While
//! commands take noticeably long on a drive that a quiet tenant shares with a busy one, its pairs are not used directly.
//! A drive with one tenant, or one that is fast enough for all, costs nothing but these looks.

use std::sync::Arc;
use std::time::Duration;

use super::core::Core;
use super::turns::LeaseShare;
use super::{Governor, Pair};
use nvme_mpt::clock::{Rate, Ticks};
use nvme_mpt::learn::Class;

/// Mean time of commands in the drive from which on a quiet tenant notices a busy one: a few times that of a fast drive
/// with one command. If more of a slow drive's time is its own, the governor finds a window that nobody notices.
const NOTICEABLE: Duration = Duration::from_micros(250);

/// A tenant of the drive at a look.
#[derive(Debug)]
struct Tenant {
    lease: Arc<LeaseShare>,
    outstanding: u32,
}

/// Tenants of a drive, and the time of their commands.
#[derive(Debug)]
pub struct Survey {
    noticeable: u64,
    /// Tenants at this look that have commands, or had some since the last one.
    tenants: Vec<Tenant>,
    /// When it last looked, and what the drive had of all pairs then.
    looked: Ticks,
    had: u64,
    /// Commands since then, and what the drive has now; of that, what came directly.
    commands: u64,
    has: u64,
    direct: u64,
}

impl Survey {
    /// Of a drive that nobody has looked at, with a clock of this rate.
    #[must_use]
    pub fn new(rate: Rate) -> Self {
        Self {
            noticeable: rate.ticks(NOTICEABLE),
            tenants: Vec::new(),
            looked: Ticks::default(),
            had: 0,
            commands: 0,
            has: 0,
            direct: 0,
        }
    }

    /// Looks at all pairs of a drive, and tells its governor.
    pub fn look<'a>(
        &mut self,
        governor: &Governor,
        pairs: impl IntoIterator<Item = &'a Pair>,
        now: Ticks,
    ) {
        let elapsed = now.since(self.looked);
        (self.looked, self.had) = (now, self.has);
        (self.commands, self.has, self.direct) = (0, 0, 0);
        self.tenants.clear();
        for pair in pairs {
            self.add(&mut pair.shared.lock(), now, elapsed);
        }
        let is_busy = |tenant: &Tenant| Class::is_heavy(tenant.outstanding, 0);
        let has_both = self.tenants.iter().any(is_busy) && !self.tenants.iter().all(is_busy);
        if has_both && (governor.has_waiting() || self.is_slow(elapsed)) {
            governor.contend(now);
        }
        // Those of members that go on directly are nobody's business.
        let direct = if governor.is_governed(now) {
            self.direct
        } else {
            0
        };
        governor.note_direct(direct);
    }

    /// Adds what a pair has had to do for so many ticks.
    fn add(&mut self, core: &mut Core, now: Ticks, elapsed: u64) {
        let (taken, in_flight) = (core.stats().commands, core.in_flight() as u64);
        let commands = taken - std::mem::replace(&mut core.surveyed, taken);
        self.commands += commands;
        self.has += in_flight;
        self.direct += core.direct() as u64;
        let is_lone = core.members() == 1;
        for (_, member) in core.staying() {
            let counted = member.counted();
            let (outstanding, is_active) = match is_lone {
                true => (counted.max(in_flight as u32), commands > 0 || in_flight > 0),
                false => (counted, now.since(member.last_batch) <= elapsed),
            };
            if is_active || outstanding > 0 {
                self.note(&member.queue.lease, outstanding);
            }
        }
    }

    fn note(&mut self, lease: &Arc<LeaseShare>, outstanding: u32) {
        let mut known = self.tenants.iter_mut();
        match known.find(|tenant| Arc::ptr_eq(&tenant.lease, lease)) {
            Some(tenant) => tenant.outstanding = tenant.outstanding.saturating_add(outstanding),
            None => self.tenants.push(Tenant {
                lease: lease.clone(),
                outstanding,
            }),
        }
    }

    /// Returns whether commands take noticeably long: their mean time is what the drive has by what it completes.
    fn is_slow(&self, elapsed: u64) -> bool {
        let completed = (self.had + self.commands).saturating_sub(self.has);
        u128::from(self.has) * u128::from(elapsed)
            > u128::from(completed) * u128::from(self.noticeable)
    }
}
