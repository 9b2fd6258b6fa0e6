//! Shared state of a queue pair's users, under the pair's lock: arbitration and in-flight commands.
//!
//! The commands of a lone user go directly from its batch to the ring, and completions directly from the ring to the user. So
//! do those of heavy users while no command waits ([`direct`]). All other commands wait in front of the ring and are
//! dispatched in this order:
//!
//! 1. Commands of light users, immediately, whatever the weights of their leases are.
//! 2. Commands of heavy users, in bytes by [the weights of their leases](super::arbitration), as far as the [governor's
//!    window](super::governor) allows. A split command counts by the children that go to the drive, not as a whole.
//!
//! While a light user is active on any pair of the drive, or while the drive is [contended](super::survey), commands of lone
//! users go through arbitration, too.

mod direct;

use std::sync::{Arc, Weak};

use direct::SharedPermit;

use super::QueuePairInner;
use super::binding::{CurrentQueuePair, NewQueuePairUser, QueueMigrations, QueuePairBinding};
use super::governor::{DriveGovernor, QueuePairWindow};
use super::held_back_users::HeldBackUsers;
use super::inflight::{
    CompletionOutcome, InFlightCommand, InFlightCommands, InFlightSample, LateCommand, NO_USER,
    PLAIN_SLOTS,
};
use super::inflight_bound;
use super::rings::{PairDoorbells, VfioQueuePairRings};
use super::sharing::QueuePairSharing;
use super::stats::PairStats;
use super::user::{QueuePairUser, WaitingCommand};
use nvme_guest::adaptive::CommandClass;
use nvme_mpt::host::{HostCompletion, HostMemory};
use nvme_mpt_memory::clock::Ticks;
use nvme_spec::cqe::Cqe;
use nvme_spec::opcode::NvmOpcode;
use nvme_spec::sqe::Sqe;
use nvme_spec::status::Status;

/// Divisor of the ring's entries. Heavy users leave 1/16 of the entries, but at least one entry, to light users.
const LIGHT_ENTRIES_DIVISOR: usize = 16;

/// Divisor of the [activity time](DriveGovernor::activity_ticks). A user whose lease has used up its share of the drive waits
/// for at most 1/16 of that time, or 62 ms, and then launches one command nevertheless. So 256 commands of a queue take at most
/// 16 s, less than the guest driver's timeout.
const HOLD_BACK_DIVISOR: u64 = 16;

/// Divisor of the [activity time](DriveGovernor::activity_ticks). A user that is held back is checked again after 1/4096 of
/// that time, or 0.24 ms.
const HOLD_CHECK_DIVISOR: u64 = 4096;

/// Status of commands of a lease whose namespace was removed or reformatted.
const REVOKED: Status = Status::INVALID_NAMESPACE_OR_FORMAT.with_dnr(true);

/// State of a queue pair: whether it may use the drive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum QueuePairState {
    Running,
    /// Commands wait; the rings and doorbells are not accessed, because the drive is being reset or given up.
    Stopped,
    /// The drive was given up: all commands complete with this status.
    Dead(Status),
}

/// Portion of a user's next command that goes to the drive as one command: the whole command, or a child of it.
#[derive(Clone, Copy)]
struct CommandPortion {
    /// Number of bytes by which the portion counts, as [`QueuePairCore::next_command`] returned it for `bytes_max`.
    weight: u64,
    /// Maximum bytes of the portion.
    bytes_max: u64,
}

impl CommandPortion {
    /// Selects the whole of a command that counts by `weight` bytes.
    const fn whole(weight: u64) -> Self {
        let most = u64::MAX;
        Self {
            weight,
            bytes_max: most,
        }
    }
}

/// State of a queue pair that its users share, under the pair's lock.
#[derive(Debug)]
pub(super) struct QueuePairCore {
    pub(super) rings: VfioQueuePairRings,
    inflight: InFlightCommands,
    /// Maximum bytes of a command on this drive.
    max_transfer: u64,
    users: Vec<Option<Box<QueuePairUser>>>,
    users_total: usize,
    /// Number of users that are migrating to other pairs.
    migrating: usize,
    /// Number of users that borrow the pair.
    borrowers: usize,
    /// Number of users whose lease is revoked.
    revoked: usize,
    /// True if the pair has a single user, which may submit directly: it is neither migrating nor revoked, and its slots fit
    /// the plain table ([`PLAIN_SLOTS`]).
    has_lone_user: bool,
    /// Migrations to other pairs that the queues have not noticed yet.
    migrations: QueueMigrations,
    pub(super) sharing: QueuePairSharing,
    /// Value of the pair's command counter at the drive monitor's last survey.
    pub(super) surveyed_commands: u64,
    held_back: HeldBackUsers,
    /// Permission of the batch that holds the pair's lock; `None` without one.
    shared_permit: Option<SharedPermit>,
    /// Number of calls of [`Self::is_held_back`], by which tests bound the cost of a poll.
    #[cfg(test)]
    pub(super) held_back_checks: std::cell::Cell<u64>,
    state: QueuePairState,
    stats: PairStats,
}

impl QueuePairCore {
    pub(super) fn new(
        rings: VfioQueuePairRings,
        max_transfer: u64,
        governor: Arc<DriveGovernor>,
    ) -> Self {
        // One entry stays empty to distinguish a full ring from an empty one. So at most 1023 commands fit.
        let capacity = (rings.entries() - 1) as u16;
        Self {
            rings,
            inflight: InFlightCommands::new(capacity),
            max_transfer,
            users: Vec::new(),
            users_total: 0,
            migrating: 0,
            borrowers: 0,
            revoked: 0,
            has_lone_user: false,
            migrations: QueueMigrations::default(),
            sharing: QueuePairSharing::new(governor),
            surveyed_commands: 0,
            held_back: HeldBackUsers::default(),
            shared_permit: None,
            #[cfg(test)]
            held_back_checks: std::cell::Cell::default(),
            state: QueuePairState::Running,
            stats: PairStats::default(),
        }
    }

    /// Adds a queue as a user. Returns the number of the user.
    pub(super) fn join(&mut self, queue: NewQueuePairUser) -> u16 {
        let lease = queue.lease.clone();
        let mut user = QueuePairUser::new(queue, self.max_transfer);
        user.limit_direct(self.direct_bytes_max(), self.max_transfer);
        self.revoked += usize::from(user.is_revoked);
        let user = Some(Box::new(user));
        // If a queue has not noticed its migration yet, its number is not reused.
        let mut numbers = (0..).zip(&self.users);
        let free =
            numbers.find(|(number, entry)| entry.is_none() && !self.migrations.has_user(*number));
        let free = free.map(|(number, _)| usize::from(number));
        let number = free.unwrap_or(self.users.len());
        if free.is_none() {
            self.users.push(None);
        }
        self.users[number] = user;
        self.users_total += 1;
        self.update_lone_user();
        self.sharing.light_users.reserve(self.users.len());
        self.held_back.reserve(self.users.len());
        self.sharing.arbitration.join(number as u16, &lease);
        number as u16
    }

    fn update_lone_user(&mut self) {
        let go_by_slots = |user: &QueuePairUser| usize::from(user.queue.slots) <= PLAIN_SLOTS;
        let mut users = self.users.iter().flatten();
        self.has_lone_user = self.users_total == 1
            && self.migrating == 0
            && self.revoked == 0
            && users.all(|user| go_by_slots(user));
    }

    /// Adds a queue as a user that borrows this pair, because the pair's own queues are idle. Returns the number of the user.
    pub(super) fn join_borrower(
        &mut self,
        queue: NewQueuePairUser,
        home_pair: Weak<QueuePairInner>,
    ) -> u16 {
        let number = self.join(queue);
        if let Some(user) = self.user(number) {
            user.home_pair = Some(home_pair);
            self.borrowers += 1;
        }
        number
    }

    /// Ends the lending of the pair to a user, who stays. Returns the user's home pair; `None` if the user does not borrow this
    /// pair.
    pub(super) fn end_balloon(&mut self, number: u16) -> Option<Weak<QueuePairInner>> {
        let home_pair = self.user(number)?.home_pair.take()?;
        self.borrowers -= 1;
        Some(home_pair)
    }

    /// Returns whether any user borrows the pair.
    pub(super) fn has_borrowers(&self) -> bool {
        self.borrowers > 0
    }

    /// Returns whether this user is one of the pair's own queues, and other queues borrow the pair at present.
    pub(super) fn is_lender(&mut self, number: u16) -> bool {
        self.has_borrowers()
            && self
                .user(number)
                .is_some_and(|user| user.home_pair.is_none())
    }

    /// Returns the users that are not migrating to another pair, with their numbers.
    pub(super) fn staying_users(&self) -> impl Iterator<Item = (u16, &QueuePairUser)> {
        let users = (0..).zip(&self.users);
        users
            .filter_map(|(number, user)| Some((number, user.as_deref()?)))
            .filter(|(_, user)| !user.is_migrating)
    }

    /// Returns a user that is not migrating and for whose key of a reservation of queue pairs `which` returns true. Borrowers
    /// come first.
    pub(super) fn find_staying_user(
        &self,
        which: impl Fn(Option<u64>) -> bool,
    ) -> Option<(u16, NewQueuePairUser)> {
        let users = self.staying_users();
        let (number, user) = users
            .filter(|(_, user)| which(user.queue.lease.reservation()))
            .min_by_key(|(_, user)| user.home_pair.is_none())?;
        Some((number, user.queue.clone()))
    }

    /// Starts the migration of user `number` to another pair. Does nothing if the user is migrating already, or if it has left
    /// and its number belongs to another queue now. Returns whether the migration has started.
    pub(super) fn begin_migration(
        &mut self,
        number: u16,
        current_pair: &Arc<CurrentQueuePair>,
        to: QueuePairBinding,
    ) -> bool {
        let has_flights = self.inflight.inflight_of_user(number) > 0;
        let Some(user) = self.user(number) else {
            return false;
        };
        if user.is_migrating || !Arc::ptr_eq(&user.queue.current_pair, current_pair) {
            return false;
        }
        if has_flights || !user.waiting.is_empty() || !user.done.is_empty() {
            user.is_migrating = true;
            self.migrating += 1;
            self.end_balloon(number);
            self.update_lone_user();
        } else {
            self.leave(number);
        }
        self.migrations.add(number, to);
        true
    }

    /// Takes the new binding of a queue that must migrate, if there is one. If the queue `is_done` with this pair, its user
    /// leaves the pair.
    #[inline]
    pub(super) fn take_migration(
        &mut self,
        number: u16,
        is_done: bool,
    ) -> Option<QueuePairBinding> {
        let to = self.migrations.take(number)?;
        if is_done {
            self.leave(number);
        }
        Some(to)
    }

    /// Drops the waiting commands of a user. Returns whether none of the user's commands is in flight.
    pub(super) fn drop_waiting(&mut self, number: u16) -> bool {
        if let Some(user) = self.user(number) {
            user.waiting.clear();
        }
        self.inflight.inflight_of_user(number) == 0
    }

    /// Completes the waiting commands of a user with Command Aborted due to SQ Deletion. The drive gets no further command of
    /// the user, and no further child of a split one.
    pub(super) fn cut_short(&mut self, number: u16) {
        self.complete_waiting(number, Status::ABORTED_SQ_DELETION);
    }

    /// Completes the waiting commands of a user with `status`, without the drive.
    fn complete_waiting(&mut self, number: u16, status: Status) {
        let Some(user) = self.user(number) else {
            return;
        };
        while let Some(waiting) = user.waiting.pop_front() {
            let begun = match &mut user.splits {
                Some(splits) if waiting.is_split => splits.cut_short(waiting.sqe.cid().0, status),
                _ => false,
            };
            // A command whose children are in flight completes with its last child instead.
            if !begun {
                user.done.push(failed_completion(&waiting.sqe, status));
            }
        }
        self.report_waiting();
    }

    /// Completes the waiting commands of revoked leases with Invalid Namespace or Format. Later commands of these leases' users
    /// complete in the same way.
    pub(super) fn revoke(&mut self) {
        for number in 0..self.users.len() as u16 {
            let Some(user) = self.user(number) else {
                continue;
            };
            if !user.is_revoked && user.queue.lease.is_revoked() {
                user.is_revoked = true;
                self.revoked += 1;
                self.complete_waiting(number, REVOKED);
            }
        }
        self.update_lone_user();
    }

    /// Removes a user. The caller ensures that none of the user's commands is in flight.
    pub(super) fn leave(&mut self, number: u16) {
        self.end_balloon(number);
        if let Some(user) = self.users.get_mut(usize::from(number))
            && let Some(user) = user.take()
        {
            self.users_total -= 1;
            self.migrating -= usize::from(user.is_migrating);
            self.revoked -= usize::from(user.is_revoked);
            self.update_lone_user();
        }
        self.sharing.light_users.retain(|light| *light != number);
        self.held_back.remove(number);
        self.sharing.arbitration.leave(number);
        self.report_waiting();
    }

    #[inline]
    pub(super) fn user(&mut self, number: u16) -> Option<&mut QueuePairUser> {
        self.users.get_mut(usize::from(number))?.as_deref_mut()
    }

    /// Returns the number of users that are not migrating to another pair.
    pub(super) fn user_count(&self) -> usize {
        self.users_total - self.migrating
    }

    /// Returns the number of in-flight commands; each child of a split command counts.
    pub(super) fn in_flight(&self) -> usize {
        self.inflight.in_flight()
    }

    /// Returns the number of entries that heavy users leave free for light users.
    fn light_entries(&self) -> usize {
        match self.users_total {
            0 | 1 => 0,
            _ => (self.inflight.capacity() / LIGHT_ENTRIES_DIVISOR).max(1),
        }
    }

    /// Returns whether heavy users have no free entry in the ring, apart from the entries that are left to light users.
    pub(super) fn is_full(&self) -> bool {
        self.inflight.free_count() <= self.light_entries()
    }

    /// Returns the number of in-flight commands that a lone user has submitted directly.
    pub(super) fn direct_count(&self) -> usize {
        self.inflight.plain_count()
    }

    /// Returns the maximum size in bytes of a command that a lone user may submit directly.
    fn direct_bytes_max(&self) -> u64 {
        match self.sharing.heavy_bytes_max {
            u64::MAX => u64::MAX,
            _ => inflight_bound::DIRECT_BYTES_MAX,
        }
    }

    /// Sets the limit of heavy users' bytes in flight on this pair, or removes it for `None`. Also adapts the size of commands
    /// that a lone user may submit directly.
    pub(super) fn limit_heavy_bytes(&mut self, bytes: Option<u64>) {
        let before = self.direct_bytes_max();
        self.sharing.heavy_bytes_max = bytes.unwrap_or(u64::MAX);
        let most = self.direct_bytes_max();
        if most != before {
            let max_transfer = self.max_transfer;
            for user in self.users.iter_mut().flatten() {
                user.limit_direct(most, max_transfer);
            }
        }
    }

    /// Returns the numbers of heavy users' bytes that have completed since the last call, and of those in flight.
    pub(super) fn take_heavy_bytes(&mut self) -> (u64, u64) {
        (
            self.sharing.take_completed_bytes(),
            self.sharing.heavy_bytes(),
        )
    }

    /// Queues a user's commands for arbitration and dispatches as many as possible. `outstanding` is the user's number of
    /// incomplete commands, including the new ones.
    #[inline(never)]
    pub(super) fn enqueue(
        &mut self,
        number: u16,
        staged: &[Sqe],
        outstanding: u32,
        memory: HostMemory<'_>,
        now: Ticks,
    ) {
        let is_light_present = self.sharing.governor.is_light_active(now);
        let is_contended = is_light_present || self.sharing.governor.is_contended(now);
        let is_governed = self.users_total > 1 || is_contended;
        let heavy_ticks = self.heavy_ticks();
        let Self {
            users,
            sharing,
            stats,
            ..
        } = self;
        let user = users.get_mut(usize::from(number));
        let Some(user) = user.and_then(Option::as_deref_mut) else {
            return;
        };
        let refusal = match self.state {
            QueuePairState::Dead(status) => Some(status),
            _ if user.is_revoked => Some(REVOKED),
            _ => None,
        };
        if let Some(status) = refusal {
            user.add_uncounted(staged.iter().map(|sqe| failed_completion(sqe, status)));
            return;
        }
        user.last_batch = now;
        // The outstanding commands of all queues of a lease count: many shallow queues are as busy as one deep queue.
        let outstanding = outstanding.max(user.count_submitted(staged.len() as u32));
        let longest = staged
            .iter()
            .map(|sqe| user.whole_limit.touched_bytes(sqe, memory))
            .max()
            .unwrap_or(0);
        if !is_governed || CommandClass::is_heavy(outstanding, longest) {
            user.heavy_until = Ticks(now.0.saturating_add(heavy_ticks));
        }
        let is_light = now > user.heavy_until && user.waiting.is_empty();
        for sqe in staged {
            let len = user.whole_limit.touched_bytes(sqe, memory);
            let class = if is_light {
                CommandClass::light(NvmOpcode(sqe.opcode()), outstanding)
            } else {
                CommandClass::HEAVY
            };
            let interruptible = is_light_present && class == CommandClass::HEAVY;
            let divisible = user.whole_limit.divisible_len(sqe, interruptible);
            let split = user.splits.as_mut().and_then(|splits| {
                let grain = splits.grain(divisible, interruptible)?;
                Some((splits, grain))
            });
            let is_split = split.is_some();
            let len = if is_split { divisible } else { len };
            if let Some((splits, grain)) = split {
                if let Err(status) = splits.prepare(sqe, len, grain, memory) {
                    user.done.push(failed_completion(sqe, status));
                    continue;
                }
                stats.splits += 1;
            }
            stats.commands += 1;
            user.waiting.push_back(WaitingCommand {
                sqe: *sqe,
                len,
                class,
                arrived_at: now,
                is_split,
            });
        }
        if !is_light {
            // The limit of a user that is held back still applies, so the user does not take part in arbitration.
            if !user.is_held_back {
                sharing.arbitration.mark_waiting(number);
            }
        } else if !std::mem::replace(&mut user.is_in_lights, true) {
            sharing.light_users.push_back(number);
        }
        if is_governed {
            sharing.on_command_arrived(number, is_light, now);
        }
        self.dispatch(now);
    }

    /// Returns the time for which a user stays heavy, so that it does not count as light between two bursts.
    fn heavy_ticks(&self) -> u64 {
        self.sharing.governor.activity_ticks() / 10
    }

    /// Returns whether [`Self::dispatch`] may find commands to send.
    #[inline]
    pub(super) fn can_dispatch(&self) -> bool {
        let has_waiting = !self.sharing.is_idle() || !self.held_back.is_empty();
        self.state == QueuePairState::Running && has_waiting
    }

    /// Sends waiting commands to the drive, as far as arbitration allows.
    pub(super) fn dispatch(&mut self, now: Ticks) {
        if !self.can_dispatch() {
            return;
        }
        self.dispatch_light(now);
        self.dispatch_heavy(now);
        self.report_waiting();
        self.rings.ring_sq();
    }

    fn report_waiting(&mut self) {
        // If all users of the pair are held back, the pair must not occupy a turn at the window.
        let is_waiting = self.state == QueuePairState::Running && !self.sharing.is_idle();
        self.sharing.report_waiting(is_waiting);
    }

    /// Sends light users' commands to the drive while the ring has free entries.
    fn dispatch_light(&mut self, now: Ticks) {
        while let Some(&number) = self.sharing.light_users.front() {
            while let Some((class, weight)) = self.next_command(number, u64::MAX)
                && class != CommandClass::HEAVY
            {
                if !self.submit_next(number, CommandPortion::whole(weight), now) {
                    return;
                }
            }
            self.sharing.light_users.pop_front();
            if let Some(user) = self.user(number) {
                user.is_in_lights = false;
            }
        }
    }

    /// Sends heavy users' commands to the drive, in the order of arbitration.
    fn dispatch_heavy(&mut self, now: Ticks) {
        let is_weighed = self.sharing.governor.is_weight_limited(now);
        self.release_held_back(now, is_weighed);
        if self.sharing.arbitration.is_empty() {
            return;
        }
        let window = self.sharing.window(now);
        let reserved = self.light_entries();
        let most = match window {
            QueuePairWindow::Pair { part, .. } | QueuePairWindow::Turn { total: part, .. } => part,
            QueuePairWindow::Open | QueuePairWindow::Closed => u64::MAX,
        };
        while let Some(number) = self.sharing.arbitration.next() {
            let Some((class, weight)) = self.next_command(number, most) else {
                self.sharing.arbitration.skip();
                continue;
            };
            // If identifiers are held for Aborts, or in a ring of two entries, all free entries may be left to light users
            // permanently. Then heavy users may have one command in flight.
            let (free, in_flight) = (self.inflight.free_count(), self.inflight.in_flight());
            let is_full = free <= reserved && (free == 0 || in_flight > 0);
            // A light command is still waiting here only if the ring is full.
            if class != CommandClass::HEAVY || is_full {
                break;
            }
            if is_weighed && self.is_held_back(number, now) {
                self.hold_back(number, now);
                continue;
            }
            // The last child of a split command counts as a full window. Otherwise the last children of several commands would
            // go to the drive together.
            let claim = match window {
                QueuePairWindow::Turn { total, .. } if self.is_split(number) => total,
                _ => weight,
            };
            if !self.sharing.has_credits(window, claim, now)
                || !self.submit_next(
                    number,
                    CommandPortion {
                        weight,
                        bytes_max: most,
                    },
                    now,
                )
            {
                break;
            }
            let has_more = self.user(number).is_some_and(|it| {
                if is_weighed {
                    it.queue.lease.count_dispatched(weight);
                    it.weighed_at = now;
                }
                !it.waiting.is_empty()
            });
            self.sharing.arbitration.charge(weight, has_more);
        }
    }

    /// Takes a user, the one that is served next, out of arbitration for 1/`HOLD_CHECK_DIVISOR` of the activity time.
    fn hold_back(&mut self, number: u16, now: Ticks) {
        self.sharing.arbitration.skip();
        if let Some(user) = self.user(number) {
            user.is_held_back = true;
            let due = now.0 + self.sharing.governor.activity_ticks() / HOLD_CHECK_DIVISOR;
            self.held_back.push(number, Ticks(due));
        }
    }

    /// Returns users that were held back to arbitration: those whose time has passed, or all if the drive is not weighed any
    /// more.
    fn release_held_back(&mut self, now: Ticks, is_weighed: bool) {
        let now = if is_weighed { now } else { Ticks(u64::MAX) };
        while let Some(number) = self.held_back.pop_due(now) {
            self.sharing.arbitration.mark_waiting(number);
            if let Some(user) = self.user(number) {
                user.is_held_back = false;
            }
        }
    }

    /// Returns whether a user must wait because its lease has used up its bytes until the next survey. Each user waits for a
    /// bounded time, because other queues of the lease may use up the bytes of every interval.
    fn is_held_back(&self, number: u16, now: Ticks) -> bool {
        #[cfg(test)]
        self.held_back_checks.set(self.held_back_checks.get() + 1);
        let user = self.users.get(usize::from(number));
        let pause = self.sharing.governor.activity_ticks() / HOLD_BACK_DIVISOR;
        user.and_then(Option::as_deref).is_some_and(|user| {
            user.queue.lease.is_at_limit() && now.since(user.weighed_at) < pause
        })
    }

    /// Returns whether a user's next command goes to the drive in children.
    fn is_split(&self, number: u16) -> bool {
        let user = self.users.get(usize::from(number));
        let user = user.and_then(Option::as_deref);
        user.is_some_and(|it| it.waiting.front().is_some_and(|head| head.is_split))
    }

    #[inline(always)]
    fn next_command(&self, number: u16, most: u64) -> Option<(CommandClass, u64)> {
        self.users
            .get(usize::from(number))?
            .as_ref()?
            .next_command(most)
    }

    /// Writes a user's next command, or a child of it, into the ring. Returns whether the ring had a free entry.
    fn submit_next(&mut self, number: u16, portion: CommandPortion, now: Ticks) -> bool {
        let CommandPortion {
            weight,
            bytes_max: most,
        } = portion;
        let Self {
            rings,
            inflight: commands,
            users,
            sharing,
            stats,
            ..
        } = self;
        let user = users.get_mut(usize::from(number));
        let Some(user) = user.and_then(Option::as_deref_mut) else {
            return false;
        };
        let Some(head) = user.waiting.front() else {
            return false;
        };
        if commands.free_count() == 0 {
            return false;
        }
        let (class, arrived) = (head.class, head.arrived_at);
        let class = match class != CommandClass::HEAVY && sharing.is_behind_heavy() {
            true => class.behind_heavy(),
            false => class,
        };
        let Some((sqe, child)) = user.take_next(most) else {
            return false;
        };
        let command = InFlightCommand {
            user: number,
            slot: sqe.cid().0,
            child,
            weight: weight as u32,
            class,
            arrived_at: arrived,
        };
        let Some(cid) = commands.insert_special(command, now) else {
            return false;
        };
        rings.push(&sqe, cid);
        if class == CommandClass::HEAVY {
            sharing.on_heavy_submitted(weight);
        } else {
            sharing.governor.on_light_submitted();
        }
        stats.children += u64::from(child.is_some());
        true
    }

    /// Distributes the drive's completions to the users and dispatches waiting commands.
    #[inline]
    pub(super) fn reap(&mut self, clock: impl Fn() -> Ticks) {
        self.reap_shared(NO_USER, clock, &mut |_| {});
    }

    /// Distributes the entries of the Completion Queue to the users. `first` is an entry that the caller has already taken from
    /// the queue.
    #[inline(never)]
    fn process_completions(&mut self, mut first: Option<Cqe>, clock: impl Fn() -> Option<Ticks>) {
        // The bound protects the caller from a drive that posts entries without end.
        for _ in 0..self.rings.entries() {
            let Some(entry) = first.take().or_else(|| self.rings.next()) else {
                return;
            };
            self.process_completion(&entry, &clock);
        }
    }

    /// Processes one entry of the Completion Queue. `clock` is called only if the latency of the command is measured.
    #[inline]
    fn process_completion(&mut self, entry: &Cqe, clock: impl Fn() -> Option<Ticks>) {
        match self.inflight.remove(entry.cid(), entry.status()) {
            Some(outcome) => self.deliver(outcome, entry.dw0(), clock),
            None => self.stats.late_completions += 1,
        }
    }

    /// Stores the completion of a command for its user.
    #[inline]
    fn deliver(&mut self, outcome: CompletionOutcome, dw0: u32, clock: impl Fn() -> Option<Ticks>) {
        match outcome {
            CompletionOutcome::Plain { user, slot, status } => {
                if let Some(user) = self.user(user) {
                    user.add_uncounted([HostCompletion { slot, status, dw0 }]);
                }
            }
            CompletionOutcome::Special(command, status) => {
                if let Some(completion) = self.account_completion(&command, status, dw0, clock())
                    && let Some(user) = self.user(command.user)
                {
                    user.done.push(completion);
                }
            }
        }
    }

    /// Accounts for a completed command, or child of a command. Returns the completion for the user, if the whole command has
    /// completed.
    fn account_completion(
        &mut self,
        command: &InFlightCommand,
        status: Status,
        dw0: u32,
        now: Option<Ticks>,
    ) -> Option<HostCompletion> {
        let slot = command.slot;
        if command.class == CommandClass::HEAVY {
            self.sharing.on_heavy_completed(command.weight.into(), now);
        } else {
            self.sharing
                .governor
                .on_light_completed(command.class, command.arrived_at, now);
        }
        let Some(child) = command.child else {
            return Some(HostCompletion { slot, status, dw0 });
        };
        let user = self.user(command.user)?;
        let joined = user.splits.as_mut()?.complete(slot, child, status);
        if joined.is_cut_short {
            user.drop_front(slot);
        }
        joined.completion
    }

    /// Adds completions for a user, which come from a pair that the user's queue has left.
    pub(super) fn add_completions(&mut self, number: u16, done: &[HostCompletion]) {
        if let Some(user) = self.user(number) {
            user.add_uncounted(done.iter().copied());
        }
    }

    /// Swaps the stored completions of a user with `ready`, which is empty.
    pub(super) fn swap_done(&mut self, number: u16, ready: &mut Vec<HostCompletion>) {
        if let Some(user) = self.user(number) {
            user.swap_done(ready);
        }
    }

    pub(super) fn overdue(&mut self, now: Ticks, deadline: u64) -> Vec<LateCommand> {
        self.inflight.overdue(now, deadline)
    }

    pub(super) fn sample_inflight(&mut self) -> InFlightSample {
        self.inflight.sample_inflight()
    }

    pub(super) fn count_submitted_by(&mut self, moments: &[Ticks]) -> Vec<usize> {
        self.inflight.count_submitted_by(moments)
    }

    pub(super) fn mark_reported(&mut self, late: &LateCommand) -> bool {
        self.inflight.mark_reported(late)
    }

    pub(super) fn has_command(&mut self, late: &LateCommand) -> bool {
        self.inflight.has_command(late)
    }

    pub(super) fn begin_abort(&mut self, late: &LateCommand) -> bool {
        self.inflight.begin_abort(late)
    }

    pub(super) fn end_abort(&mut self, late: &LateCommand) {
        self.inflight.end_abort(late);
    }

    pub(super) fn stop(&mut self) {
        if self.state == QueuePairState::Running {
            self.state = QueuePairState::Stopped;
            self.report_waiting();
        }
    }

    /// Completes all in-flight commands. Those with an entry in the Completion Queue get the drive's status, and all others get
    /// `status`.
    pub(super) fn fail_in_flight(&mut self, status: Status) {
        self.process_completions(None, || None);
        for cid in self.inflight.cids() {
            if let Some(outcome) = self.inflight.remove(cid, status) {
                self.deliver(outcome, 0, || None);
            }
        }
    }

    pub(super) fn restart(&mut self, doorbells: PairDoorbells) {
        // The reset has removed all commands from the drive, so those without a completion were interrupted.
        self.fail_in_flight(Status::COMMAND_INTERRUPTED);
        self.inflight.end_aborts();
        self.rings.restart(doorbells);
        if self.state == QueuePairState::Stopped {
            self.state = QueuePairState::Running;
        }
    }

    pub(super) fn kill(&mut self, status: Status) {
        self.fail_in_flight(status);
        self.state = QueuePairState::Dead(status);
        self.report_waiting();
        for user in self.users.iter_mut().flatten() {
            for waiting in user.waiting.drain(..) {
                user.done.push(failed_completion(&waiting.sqe, status));
            }
        }
    }

    pub(super) fn stats(&self) -> PairStats {
        PairStats {
            doorbell_writes_saved: self.rings.doorbell_writes_saved(),
            ..self.stats
        }
    }
}

fn failed_completion(sqe: &Sqe, status: Status) -> HostCompletion {
    HostCompletion {
        slot: sqe.cid().0,
        status,
        dw0: 0,
    }
}
