//! A member of a queue pair, as the pair sees it.

use std::collections::VecDeque;
use std::sync::Weak;

use super::QueuePairInner;
use super::seat::NewQueuePairUser;
use super::split::{PARENT_BYTES_MAX, SplitCommands, UnsplitLimit};
use nvme_mpt::clock::Ticks;
use nvme_mpt::host::HostCompletion;
use nvme_mpt::learn::CommandClass;
use nvme_mpt::spec::sqe::Sqe;

/// Weight of a command that transfers less, or nothing.
const WEIGHT_MIN: u64 = 4096;

/// A command that waits for its turn; its Command Identifier is the member's slot.
#[derive(Clone, Copy, Debug)]
pub(super) struct WaitingCommand {
    pub(super) sqe: Sqe,
    /// Bytes that it transfers, or that it touches without data; 0 for others.
    pub(super) len: u64,
    pub(super) class: CommandClass,
    pub(super) arrived: Ticks,
    /// True if it goes to the drive in parts.
    pub(super) split: bool,
}

/// A member of a queue pair.
#[derive(Debug)]
pub(super) struct QueuePairUser {
    /// Limit up to which the drive takes its commands whole.
    pub(super) whole: UnsplitLimit,
    /// Limit up to which they may go directly.
    pub(super) direct: UnsplitLimit,
    /// Commands that wait for their turn, oldest first.
    pub(super) waiting: VecDeque<WaitingCommand>,
    /// Completions that somebody else has reaped, or that need no drive.
    pub(super) done: Vec<HostCompletion>,
    /// True if it is one of those that may have light commands waiting.
    pub(super) in_lights: bool,
    /// Until when it counts as heavy.
    pub(super) heavy_until: Ticks,
    /// Its commands that are split, on a drive where that may be.
    pub(super) splits: Option<SplitCommands>,
    /// The queue behind it.
    pub(super) queue: NewQueuePairUser,
    /// True once it moves to another pair: it leaves with the last of its commands.
    pub(super) departs: bool,
    /// Pair that it came from, while it borrows this one.
    pub(super) home: Option<Weak<QueuePairInner>>,
    /// Time of its last batch that took its turn.
    pub(super) last_batch: Ticks,
    /// When it last launched a command while its lease's share counted.
    pub(super) weighed_at: Ticks,
    /// True if the drive gets no command of it any more.
    pub(super) revoked: bool,
    /// Commands that it has counted at its lease.
    counted: u32,
    /// Completions in `done` of commands that were never counted there.
    uncounted: u32,
}

impl QueuePairUser {
    /// A queue as a member, on a drive that takes `max_transfer` bytes at once.
    pub(super) fn new(queue: NewQueuePairUser, max_transfer: u64) -> Self {
        let NewQueuePairUser {
            slots, lba_shift, ..
        } = queue;
        let room = usize::from(slots);
        let is_split = max_transfer < PARENT_BYTES_MAX;
        let revoked = queue.lease.is_revoked();
        Self {
            whole: UnsplitLimit::new(max_transfer, lba_shift),
            direct: UnsplitLimit::new(max_transfer, lba_shift),
            waiting: VecDeque::with_capacity(room),
            done: Vec::with_capacity(room),
            in_lights: false,
            heavy_until: Ticks::default(),
            splits: is_split.then(|| SplitCommands::new(slots, max_transfer, lba_shift)),
            queue,
            departs: false,
            home: None,
            last_batch: Ticks::default(),
            weighed_at: Ticks::default(),
            revoked,
            counted: 0,
            uncounted: 0,
        }
    }

    /// Sets the most bytes of commands that may go directly, on a drive that takes `max_transfer` at once.
    pub(super) fn limit_direct(&mut self, bytes: u64, max_transfer: u64) {
        self.direct = UnsplitLimit::new(bytes.min(max_transfer), self.queue.lba_shift);
    }

    /// Counts commands that take their turn. Returns how many its lease has outstanding, of all its queues.
    #[inline]
    pub(super) fn count(&mut self, commands: u32) -> u32 {
        self.counted += commands;
        self.queue.lease.submitted(commands)
    }

    /// Returns the commands that it has counted and not got back.
    pub(super) fn counted(&self) -> u32 {
        self.counted
    }

    /// Takes completions of commands that it has not counted.
    pub(super) fn take_uncounted(&mut self, done: impl IntoIterator<Item = HostCompletion>) {
        let before = self.done.len();
        self.done.extend(done);
        self.uncounted += (self.done.len() - before) as u32;
    }

    /// Moves its completions out.
    #[inline]
    pub(super) fn swap_done(&mut self, ready: &mut Vec<HostCompletion>) {
        std::mem::swap(&mut self.done, ready);
        if !ready.is_empty() {
            self.uncount(ready.len() as u32);
        }
    }

    fn uncount(&mut self, done: u32) {
        let ended = done.saturating_sub(std::mem::take(&mut self.uncounted));
        let ended = ended.min(self.counted);
        self.counted -= ended;
        self.queue.lease.ended(ended);
    }

    /// The class of what is dispatched next, and what it weighs; of a command that is split, no more
    /// than `most` bytes if that is possible.
    #[inline]
    pub(super) fn next(&self, most: u64) -> Option<(CommandClass, u64)> {
        let head = self.waiting.front()?;
        let len = match &self.splits {
            Some(splits) if head.split => splits.next_len(head.sqe.cid().0, head.len, most),
            _ => head.len,
        };
        Some((head.class, len.max(WEIGHT_MIN)))
    }

    /// Takes what [`Self::next`] told of: a command or a child, with its number.
    pub(super) fn take_next(&mut self, most: u64) -> Option<(Sqe, Option<u16>)> {
        let head = self.waiting.front()?;
        if let Some(splits) = &mut self.splits
            && head.split
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

    /// Forgets the command in front if it is this one.
    pub(super) fn forget(&mut self, slot: u16) {
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
        self.queue.lease.ended(self.counted);
    }
}
