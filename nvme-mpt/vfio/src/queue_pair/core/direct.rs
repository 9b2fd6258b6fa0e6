//! Commands that go from a batch directly to the ring, without arbitration, and their completions.
//!
//! Two kinds of users submit directly:
//!
//! - The *lone* user of a pair. Its commands are in the plain table, and no window counts them.
//! - A heavy user of a *shared* pair, which has several users, while no command waits at the pair. The commands that exceed the
//!   window or the ring are not submitted directly. Arbitration would dispatch the others at once. It would charge the user for
//!   them, but forget that before its next decision, since all leases start with equal virtual times after nobody has waited
//!   (`arbitration.rs`). The window counts these commands like all others of heavy users.
//!
//! The functions for shared pairs are marked as cold, although they may be called for each command: the compiler then spills
//! registers around these calls rather than in the loop of a lone user. This saves the lone user 8 instructions a command.

use nvme_guest::adaptive::CommandClass;
use nvme_mpt::host::{CompletionTaker, HostCompletion};
use nvme_mpt_memory::clock::Ticks;
use nvme_spec::sqe::Sqe;

use super::super::governor::QueuePairWindow;
use super::super::inflight::InFlightCommand;
use super::super::split::UnsplitLimit;
use super::super::user::WEIGHT_MIN;
use super::{QueuePairCore, QueuePairState};

/// Permission of a user of a shared pair to submit directly, and counts of the commands that it has submitted. Valid while a
/// batch holds the pair's lock.
#[derive(Debug)]
pub(super) struct SharedPermit {
    user: u16,
    /// Number of submitted commands.
    count: u32,
    /// Maximum size of a command.
    limit: UnsplitLimit,
    /// Number of bytes that the window has left.
    bytes_left: u64,
    /// Number of bytes of the submitted commands, as they count in the window.
    submitted_bytes: u64,
    /// Length in bytes of the largest submitted command.
    longest: u64,
}

impl QueuePairCore {
    /// Returns whether the user is alone on the pair and none of its commands waits, so that all completions in the ring belong
    /// to this user.
    #[inline]
    pub(in super::super) fn is_lone(&self, number: u16) -> bool {
        self.has_lone_user
            && self.state == QueuePairState::Running
            && self
                .users
                .get(usize::from(number))
                .and_then(Option::as_deref)
                .is_some_and(|user| user.waiting.is_empty() && user.done.is_empty())
    }

    /// Returns the maximum size of a command that this user may now [submit as lone user](Self::submit_lone). Returns `None` if
    /// `count` commands cannot go directly to the ring in that way.
    #[inline]
    pub(in super::super) fn permit_lone(
        &mut self,
        number: u16,
        count: u32,
        now: Ticks,
    ) -> Option<UnsplitLimit> {
        let can = self.is_lone(number)
            && !self.sharing.governor.is_direct_disabled(now)
            && count as usize <= self.inflight.free_count()
            && self.inflight.acquire_plain_table(number);
        can.then(|| self.user(number).map(|user| user.direct_limit))
            .flatten()
    }

    /// Writes a lone user's command into the ring. Returns false if the command exceeds `limit`, so that it must be split.
    #[inline(always)]
    pub(in super::super) fn submit_lone(
        &mut self,
        sqe: &Sqe,
        limit: UnsplitLimit,
        now: Ticks,
    ) -> bool {
        if !limit.is_whole(sqe) {
            return false;
        }
        let cid = self.inflight.insert_plain(sqe.cid().0, now);
        self.rings.push(sqe, cid);
        true
    }

    /// Counts the commands that a lone user has submitted since the ring's tail was `tail`. Returns their number.
    #[inline]
    pub(in super::super) fn count_lone(&mut self, tail: u32) -> u32 {
        let count = self.rings.written_since(tail);
        self.inflight.count_inserted_plain(count);
        self.stats.commands += count as u64;
        count as u32
    }

    /// Returns whether this user of a shared pair may [submit](Self::submit_shared) up to `count` commands directly now.
    #[cold]
    #[inline(never)]
    pub(in super::super) fn permit_shared(&mut self, number: u16, count: u32, now: Ticks) -> bool {
        if self.users_total < 2
            || self.state != QueuePairState::Running
            || self.sharing.governor.is_direct_disabled(now)
            || !self.sharing.is_idle()
            || !self.held_back.is_empty()
            || count as usize + self.light_entries() > self.inflight.free_count()
            || self.is_lender(number)
        {
            return false;
        }
        // The window depends on whether other users are active as well.
        self.sharing.on_command_arrived(number, false, now);
        let (bytes, part) = match self.sharing.window(now) {
            QueuePairWindow::Open => (u64::MAX, u64::MAX),
            QueuePairWindow::Pair { bytes, part } => (bytes, part),
            QueuePairWindow::Turn { .. } | QueuePairWindow::Closed => return false,
        };
        let bytes_left = bytes.saturating_sub(self.sharing.heavy_bytes());
        let Some(user) = self.user(number) else {
            return false;
        };
        let outstanding = user.queue.lease.outstanding().saturating_add(count);
        let is_heavy = now <= user.heavy_until || CommandClass::is_heavy(outstanding, 0);
        if user.is_migrating || user.is_revoked || !is_heavy {
            return false;
        }
        self.shared_permit = Some(SharedPermit {
            user: number,
            limit: UnsplitLimit::new(user.whole_limit.bytes().min(part), user.queue.lba_shift),
            bytes_left,
            count: 0,
            submitted_bytes: 0,
            longest: 0,
        });
        true
    }

    /// Writes a command into the ring by the permission of [`Self::permit_shared`]. Returns false if the command must go
    /// through arbitration, because it exceeds a limit.
    #[cold]
    #[inline(never)]
    pub(in super::super) fn submit_shared(&mut self, sqe: &Sqe, now: Ticks) -> bool {
        let Some(permit) = &mut self.shared_permit else {
            return false;
        };
        let bytes = permit.limit.data_len(sqe);
        let weight = bytes.max(WEIGHT_MIN);
        // A command without data counts by the blocks of its ranges, in arbitration.
        if bytes == 0 || bytes > permit.limit.bytes() || weight > permit.bytes_left {
            return false;
        }
        let command = InFlightCommand {
            user: permit.user,
            slot: sqe.cid().0,
            child: None,
            weight: weight as u32,
            class: CommandClass::HEAVY,
            arrived_at: now,
        };
        let Some(cid) = self.inflight.insert_special(command, now) else {
            return false;
        };
        self.rings.push(sqe, cid);
        permit.count += 1;
        permit.bytes_left -= weight;
        permit.submitted_bytes += weight;
        permit.longest = permit.longest.max(bytes);
        true
    }

    /// Counts the commands that were submitted by the permission of [`Self::permit_shared`]. Returns their number.
    #[cold]
    #[inline(never)]
    pub(in super::super) fn count_shared(&mut self, now: Ticks) -> u32 {
        let Some(permit) = self.shared_permit.take().filter(|it| it.count > 0) else {
            return 0;
        };
        let count = permit.count;
        self.stats.commands += u64::from(count);
        self.sharing.on_heavy_submitted(permit.submitted_bytes);
        let heavy_ticks = self.heavy_ticks();
        if let Some(user) = self.user(permit.user) {
            user.last_batch = now;
            let outstanding = user.count_submitted(count);
            if CommandClass::is_heavy(outstanding, permit.longest) {
                user.heavy_until = Ticks(now.0.saturating_add(heavy_ticks));
            }
        }
        count
    }

    /// Passes the completions of a lone user directly to `taker`, and returns their number. Completions of commands that went
    /// through arbitration are stored until [`Self::swap_done`] instead.
    #[inline(always)]
    pub(in super::super) fn reap_lone(
        &mut self,
        clock: impl Fn() -> Ticks,
        taker: &mut impl CompletionTaker,
    ) -> usize {
        let head = self.rings.head();
        // The loop ends even if the drive posts without end, because each command completes only once.
        let other = loop {
            let Some(entry) = self.rings.next() else {
                break None;
            };
            let Some(slot) = self.inflight.remove_plain(entry.cid()) else {
                break Some(entry);
            };
            taker.take(HostCompletion {
                slot,
                status: entry.status(),
                dw0: entry.dw0(),
            });
        };
        let taken = self.rings.taken_since(head);
        let count = match other {
            None => taken,
            // If the drive ignores the queue's limits, a whole round of entries may have been taken, and `taken_since` returns
            // 0 for it.
            Some(_) => taken.checked_sub(1).unwrap_or(self.inflight.capacity()),
        };
        self.inflight.count_removed_plain(count);
        if let Some(entry) = other {
            self.process_completions(Some(entry), || Some(clock()));
        }
        self.rings.ring_cq();
        count
    }

    /// Distributes the drive's completions to the users, and dispatches waiting commands. Passes completions of heavy commands
    /// of user `number` directly to `taker`, and returns their number; all others are stored until [`Self::swap_done`].
    #[cold]
    #[inline(never)]
    pub(in super::super) fn reap_shared(
        &mut self,
        number: u16,
        clock: impl Fn() -> Ticks,
        taker: &mut impl CompletionTaker,
    ) -> u32 {
        if self.state != QueuePairState::Running {
            return 0;
        }
        let (mut taken, mut heavy_bytes) = (0, 0);
        // The bound protects the caller from a drive that posts entries without end.
        for _ in 0..self.rings.entries() {
            let Some(entry) = self.rings.next() else {
                break;
            };
            let Some(command) = self.inflight.remove_heavy(entry.cid()) else {
                self.process_completion(&entry, || Some(clock()));
                continue;
            };
            heavy_bytes += u64::from(command.weight);
            let completion = HostCompletion {
                slot: command.slot,
                status: entry.status(),
                dw0: entry.dw0(),
            };
            if command.user == number {
                taken += 1;
                taker.take(completion);
            } else if let Some(user) = self.user(command.user) {
                user.done.push(completion);
            }
        }
        if heavy_bytes > 0 {
            self.sharing.on_heavy_completed(heavy_bytes, Some(clock()));
        }
        if taken > 0
            && let Some(user) = self.user(number)
        {
            user.count_completed(taken);
        }
        self.rings.ring_cq();
        if self.can_dispatch() {
            self.dispatch(clock());
        }
        taken
    }
}
