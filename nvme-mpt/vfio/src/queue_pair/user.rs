//! A user of a queue pair, with its waiting commands and completions.

use std::collections::VecDeque;
use std::sync::Weak;

use super::QueuePairInner;
use super::binding::NewQueuePairUser;
use super::split::{PARENT_BYTES_MAX, SplitCommands, UnsplitLimit};
use nvme_guest::adaptive::CommandClass;
use nvme_mpt::host::HostCompletion;
use nvme_mpt_memory::clock::Ticks;
use nvme_spec::sqe::Sqe;

/// Minimum number of bytes by which a command counts in arbitration, even without data.
pub(super) const WEIGHT_MIN: u64 = 4096;

/// A command that waits for dispatch. Its Command Identifier is its slot number in the user's queue.
#[derive(Clone, Copy, Debug)]
pub(super) struct WaitingCommand {
    pub(super) sqe: Sqe,
    /// Number of bytes that the command transfers, zeroes or deallocates; 0 for all other commands.
    pub(super) len: u64,
    pub(super) class: CommandClass,
    pub(super) arrived_at: Ticks,
    /// True if the command goes to the drive in children, not as a whole.
    pub(super) is_split: bool,
}

/// A user of a queue pair: a queue that has commands there.
#[derive(Debug)]
pub(super) struct QueuePairUser {
    /// Maximum size of a command that the drive accepts as a whole, in this user's blocks.
    pub(super) whole_limit: UnsplitLimit,
    /// Maximum size of a command that the user may submit directly while it is alone, in this user's blocks.
    pub(super) direct_limit: UnsplitLimit,
    /// Commands that wait for dispatch, oldest first.
    pub(super) waiting: VecDeque<WaitingCommand>,
    /// Completions for the user's queue: those that another user has reaped, and those of commands that did not go to the
    /// drive.
    pub(super) done: Vec<HostCompletion>,
    /// True if the pair's list of users with waiting light commands has the user.
    pub(super) is_in_lights: bool,
    /// True while the user takes no part in arbitration, because its lease has used up its share (`held_back_users.rs`).
    pub(super) is_held_back: bool,
    /// Time until which the user counts as heavy, after it has had many or large commands.
    pub(super) heavy_until: Ticks,
    /// State of the user's split commands; `None` on a drive where no command is split.
    pub(super) splits: Option<SplitCommands>,
    /// Queue that is the user.
    pub(super) queue: NewQueuePairUser,
    /// True while the user migrates to another pair. The user leaves this pair when its last command here has completed.
    pub(super) is_migrating: bool,
    /// Home pair of the queue, while the queue borrows this pair.
    pub(super) home_pair: Option<Weak<QueuePairInner>>,
    /// Time of the queue's last batch, without batches that it submitted directly as lone user.
    pub(super) last_batch: Ticks,
    /// Time at which a command of the user last went to the drive while the drive was weighed.
    pub(super) weighed_at: Ticks,
    /// True if the lease is revoked, so that the drive gets no further command of the user.
    pub(super) is_revoked: bool,
    /// Number of the user's outstanding commands that are counted at the lease.
    counted: u32,
    /// Number of completions in `done` whose commands are not counted at the lease.
    uncounted: u32,
}

impl QueuePairUser {
    /// Creates the user for a queue, on a drive that accepts `max_transfer` bytes per command.
    pub(super) fn new(queue: NewQueuePairUser, max_transfer: u64) -> Self {
        let NewQueuePairUser {
            slots, lba_shift, ..
        } = queue;
        let capacity = usize::from(slots);
        let is_split = max_transfer < PARENT_BYTES_MAX;
        let revoked = queue.lease.is_revoked();
        Self {
            whole_limit: UnsplitLimit::new(max_transfer, lba_shift),
            direct_limit: UnsplitLimit::new(max_transfer, lba_shift),
            waiting: VecDeque::with_capacity(capacity),
            done: Vec::with_capacity(capacity),
            is_in_lights: false,
            is_held_back: false,
            heavy_until: Ticks::default(),
            splits: is_split.then(|| SplitCommands::new(slots, max_transfer, lba_shift)),
            queue,
            is_migrating: false,
            home_pair: None,
            last_batch: Ticks::default(),
            weighed_at: Ticks::default(),
            is_revoked: revoked,
            counted: 0,
            uncounted: 0,
        }
    }

    /// Limits the direct commands of a lone user to `bytes` bytes, on a drive that accepts `max_transfer` bytes per command.
    pub(super) fn limit_direct(&mut self, bytes: u64, max_transfer: u64) {
        self.direct_limit = UnsplitLimit::new(bytes.min(max_transfer), self.queue.lba_shift);
    }

    /// Counts commands of the user that go through arbitration, here and at the lease. Returns the number of outstanding
    /// commands of all queues of the lease.
    #[inline]
    pub(super) fn count_submitted(&mut self, commands: u32) -> u32 {
        self.counted += commands;
        self.queue.lease.count_submitted(commands)
    }

    /// Returns the number of the user's outstanding commands that are counted at the lease.
    pub(super) fn counted(&self) -> u32 {
        self.counted
    }

    /// Adds completions of commands that are not counted at the lease.
    pub(super) fn add_uncounted(&mut self, done: impl IntoIterator<Item = HostCompletion>) {
        let before = self.done.len();
        self.done.extend(done);
        self.uncounted += (self.done.len() - before) as u32;
    }

    /// Swaps the stored completions with `ready`, and counts them as completed.
    #[inline]
    pub(super) fn swap_done(&mut self, ready: &mut Vec<HostCompletion>) {
        std::mem::swap(&mut self.done, ready);
        if !ready.is_empty() {
            let uncounted = std::mem::take(&mut self.uncounted);
            self.count_completed((ready.len() as u32).saturating_sub(uncounted));
        }
    }

    /// Counts completions of commands that [`Self::count_submitted`] has counted.
    #[inline]
    pub(super) fn count_completed(&mut self, ended: u32) {
        let ended = ended.min(self.counted);
        self.counted -= ended;
        self.queue.lease.count_ended(ended);
    }

    /// Returns the class of the next command to dispatch, and the number of bytes by which it counts. If the command is split,
    /// the number is that of the next child, which has at most `most` bytes, but at least one grain.
    #[inline]
    pub(super) fn next_command(&self, most: u64) -> Option<(CommandClass, u64)> {
        let head = self.waiting.front()?;
        let len = match &self.splits {
            Some(splits) if head.is_split => splits.next_len(head.sqe.cid().0, head.len, most),
            _ => head.len,
        };
        Some((head.class, len.max(WEIGHT_MIN)))
    }

    /// Takes the command or the child that [`Self::next_command`] has described. A child comes with the number of its first
    /// grain.
    pub(super) fn take_next(&mut self, most: u64) -> Option<(Sqe, Option<u16>)> {
        let head = self.waiting.front()?;
        if let Some(splits) = &mut self.splits
            && head.is_split
        {
            let child = splits.dispatch(&head.sqe, head.len, most);
            if child.is_last {
                self.waiting.pop_front();
            }
            return Some((child.sqe, Some(child.first_grain)));
        }
        let head = self.waiting.pop_front()?;
        Some((head.sqe, None))
    }

    /// Drops the first waiting command, if this is its slot.
    pub(super) fn drop_front(&mut self, slot: u16) {
        if self
            .waiting
            .front()
            .is_some_and(|head| head.sqe.cid().0 == slot)
        {
            self.waiting.pop_front();
        }
    }
}

impl Drop for QueuePairUser {
    fn drop(&mut self) {
        self.queue.lease.count_ended(self.counted);
    }
}
