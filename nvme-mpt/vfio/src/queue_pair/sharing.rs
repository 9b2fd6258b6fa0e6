//! A queue pair's order of users, and the limit of its heavy users' bytes in flight.

use std::collections::VecDeque;
use std::sync::Arc;

use super::arbitration::QueuePairArbitration;
use super::governor::{DriveGovernor, QueuePairWindow};
use super::inflight_bound;
use nvme_guest::adaptive::WINDOW_MAX;
use nvme_mpt_memory::clock::Ticks;

/// Latest activity of a pair's users, by which it finds that only one of them is active.
#[derive(Clone, Copy, Debug, Default)]
struct QueuePairUserActivity {
    last_user: u16,
    last_seen: Ticks,
    /// Latest time at which a user other than `last_user` was active.
    other_seen: Ticks,
}

impl QueuePairUserActivity {
    fn record(&mut self, user: u16, now: Ticks) {
        if self.last_user != user {
            self.other_seen = self.last_seen;
            self.last_user = user;
        }
        self.last_seen = now;
    }

    fn is_alone(&self, now: Ticks, presence: u64) -> bool {
        self.other_seen == Ticks::default() || now.since(self.other_seen) > presence
    }
}

/// State by which the users of a pair share it: light users in order of arrival, heavy users by arbitration within the
/// governor's limits.
#[derive(Debug)]
pub(super) struct QueuePairSharing {
    pub(super) governor: Arc<DriveGovernor>,
    /// Number that the governor has given to the pair.
    number: u16,
    /// Numbers of the users that may have light commands waiting, in order of arrival.
    pub(super) light_users: VecDeque<u16>,
    /// Arbitration between the heavy users.
    pub(super) arbitration: QueuePairArbitration,
    /// Number of heavy users' bytes in flight, on this pair.
    heavy_bytes: u64,
    /// Number of heavy users' bytes that have completed since the last survey.
    completed_bytes: u64,
    /// Maximum of `heavy_bytes` on a drive that is not known to be fast; `u64::MAX` for no limit.
    pub(super) heavy_bytes_max: u64,
    /// True if this pair has reported to the governor that heavy commands wait on it.
    is_waiting: bool,
    activity: QueuePairUserActivity,
    /// Time at which a user of this pair last submitted a light command; `None` before the first.
    light_arrived: Option<Ticks>,
}

impl QueuePairSharing {
    pub(super) fn new(governor: Arc<DriveGovernor>) -> Self {
        let most = match governor.quarter_timeout() {
            0 => u64::MAX,
            _ => inflight_bound::INITIAL_LIMIT,
        };
        Self {
            number: governor.waiting().register_pair(),
            governor,
            completed_bytes: 0,
            heavy_bytes_max: most,
            light_users: VecDeque::new(),
            arbitration: QueuePairArbitration::default(),
            heavy_bytes: 0,
            is_waiting: false,
            activity: QueuePairUserActivity::default(),
            light_arrived: None,
        }
    }

    /// Returns whether no user has commands waiting for dispatch.
    #[inline]
    pub(super) fn is_idle(&self) -> bool {
        self.light_users.is_empty() && self.arbitration.is_empty()
    }

    /// Records that a user has submitted a command, which is light or heavy.
    pub(super) fn on_command_arrived(&mut self, user: u16, is_light: bool, now: Ticks) {
        self.activity.record(user, now);
        if is_light {
            self.light_arrived = Some(now);
            self.governor.on_light_arrived(now);
        }
    }

    /// Returns the current limit of heavy users' bytes in flight on this pair.
    pub(super) fn window(&self, now: Ticks) -> QueuePairWindow {
        let activity_ticks = self.governor.activity_ticks();
        let has_light = self
            .light_arrived
            .is_some_and(|arrived| now.since(arrived) <= activity_ticks);
        let window = self
            .governor
            .window(self.number, self.is_waiting, has_light, now);
        let is_alone = || self.activity.is_alone(now, activity_ticks);
        // Without a limit, the drive would divide its time by the number of commands that each user submits.
        if window == QueuePairWindow::Open && !is_alone() {
            return QueuePairWindow::whole(self.heavy_bytes_max.min(WINDOW_MAX));
        }
        match window {
            QueuePairWindow::Open if self.heavy_bytes_max < u64::MAX => {
                QueuePairWindow::whole(self.heavy_bytes_max)
            }
            QueuePairWindow::Pair { bytes, part } => QueuePairWindow::Pair {
                bytes: bytes.min(self.heavy_bytes_max),
                part: part.min(self.heavy_bytes_max),
            },
            other => other,
        }
    }

    /// Returns the number of heavy users' bytes that have completed since the last call.
    pub(super) fn take_completed_bytes(&mut self) -> u64 {
        std::mem::take(&mut self.completed_bytes)
    }

    /// Returns whether a light command that is submitted now waits behind heavy commands to which the own window applies.
    #[inline]
    pub(super) fn is_behind_heavy(&self) -> bool {
        self.heavy_bytes > 0 && self.governor.waiting().count_elsewhere(self.is_waiting) > 0
    }

    /// Returns the heavy users' bytes in flight.
    pub(super) fn heavy_bytes(&self) -> u64 {
        self.heavy_bytes
    }

    /// Returns whether a heavy command that counts as `claim` bytes may go to the drive now. `window` limits the heavy users'
    /// bytes in flight. A command above the limit may go only while no other heavy bytes count against it.
    pub(super) fn has_credits(&self, window: QueuePairWindow, claim: u64, now: Ticks) -> bool {
        let fits = |in_flight: u64, limit: u64| in_flight == 0 || in_flight + claim <= limit;
        match window {
            QueuePairWindow::Open => true,
            QueuePairWindow::Closed => false,
            QueuePairWindow::Pair { bytes, .. } => fits(self.heavy_bytes, bytes),
            QueuePairWindow::Turn { total, own } => match self.governor.in_flight() {
                0 if 2 * claim > total => self.governor.can_submit_heavy(now),
                in_flight => fits(in_flight, total) && fits(self.heavy_bytes, own),
            },
        }
    }

    /// Counts heavy users' bytes that were submitted to the drive.
    pub(super) fn on_heavy_submitted(&mut self, weight: u64) {
        self.heavy_bytes += weight;
        self.governor.on_heavy_submitted(weight);
    }

    /// Counts heavy users' bytes that completed.
    pub(super) fn on_heavy_completed(&mut self, weight: u64, now: Option<Ticks>) {
        self.heavy_bytes -= weight;
        self.completed_bytes += weight;
        self.governor.on_heavy_completed(weight, now);
    }

    /// Reports to the governor whether heavy commands wait on this pair. Does nothing if that is known.
    pub(super) fn report_waiting(&mut self, is_waiting: bool) {
        if self.is_waiting != is_waiting {
            self.is_waiting = is_waiting;
            let waiting = self.governor.waiting();
            waiting.set_waiting(self.number, is_waiting);
        }
    }
}

impl Drop for QueuePairSharing {
    fn drop(&mut self) {
        self.report_waiting(false);
        self.governor.waiting().unregister_pair(self.number);
        self.governor.on_heavy_completed(self.heavy_bytes, None);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use nvme_guest::adaptive::PolicyChoice;
    use nvme_mpt_memory::clock::TickRate;

    const NOW: Ticks = Ticks(1 << 40);

    /// Creates a governor whose windows apply, because a light command is in flight.
    fn governor() -> Arc<DriveGovernor> {
        let governor = DriveGovernor::new(PolicyChoice::Adaptive, TickRate::NANOSECOND);
        governor.on_light_submitted();
        Arc::new(governor)
    }

    fn pairs(governor: &Arc<DriveGovernor>, count: usize) -> Vec<QueuePairSharing> {
        (0..count)
            .map(|_| QueuePairSharing::new(governor.clone()))
            .collect()
    }

    fn has_turn(pair: &QueuePairSharing, now: Ticks) -> bool {
        matches!(pair.window(now), QueuePairWindow::Turn { .. })
    }

    /// Checks that two pairs take turns while both wait, and that neither is overlooked when the other ends.
    #[track_caller]
    fn check_independent(one: &mut QueuePairSharing, other: &mut QueuePairSharing) {
        one.on_heavy_submitted(4096);
        one.report_waiting(true);
        assert!(!one.is_behind_heavy());
        other.report_waiting(true);
        assert!(one.is_behind_heavy());
        let times = (0..100).map(|step| Ticks(NOW.0 + step * 1_000_000));
        let turns = times.map(|now| [has_turn(one, now), has_turn(other, now)]);
        let turns: BTreeSet<[bool; 2]> = turns.collect();
        assert_eq!(turns, BTreeSet::from([[false, true], [true, false]]));
        one.report_waiting(false);
        assert!(one.is_behind_heavy());
        assert_eq!(one.governor.waiting().count(), 1);
        other.report_waiting(false);
        assert_eq!(one.governor.waiting().count(), 0);
        assert!(!one.is_behind_heavy());
        one.on_heavy_completed(4096, None);
    }

    #[test]
    fn pairs_of_a_drive_with_many_are_not_mistaken_for_each_other() {
        let mut pairs = pairs(&governor(), 200);
        for other in [1, 63, 64, 65, 128, 192, 199] {
            let [one, other] = pairs.get_disjoint_mut([0, other]).expect("two pairs");
            check_independent(one, other);
            check_independent(other, one);
        }
    }

    #[test]
    fn pairs_that_were_deleted_and_created_again_are_not_mistaken_for_others() {
        let governor = governor();
        let mut one = QueuePairSharing::new(governor.clone());
        for _ in 0..200 {
            let mut created = QueuePairSharing::new(governor.clone());
            check_independent(&mut one, &mut created);
            created.report_waiting(true);
            drop(created);
            assert_eq!(governor.waiting().count(), 0);
        }
    }

    #[test]
    fn each_waiting_pair_has_a_turn() {
        let mut pairs = pairs(&governor(), 200);
        let waiting = || (0..200).filter(|pair| pair % 3 != 1);
        waiting().for_each(|pair| pairs[pair].report_waiting(true));
        let mut turns = Vec::new();
        // A turn is longer than a step.
        for step in 0..1_000_000 {
            let now = Ticks(NOW.0 + step * 50_000);
            let having: Vec<usize> = waiting()
                .filter(|pair| has_turn(&pairs[*pair], now))
                .collect();
            let [pair] = having[..] else {
                panic!("{having:?} have a turn");
            };
            if turns.last() != Some(&pair) {
                turns.push(pair);
            }
            if turns.len() > waiting().count() {
                break;
            }
        }
        turns.pop();
        turns.sort_unstable();
        assert_eq!(turns, waiting().collect::<Vec<_>>());
    }
}
