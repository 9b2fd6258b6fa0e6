//! Tracked state of a shadow queue, written by its poller.

use std::sync::atomic::{Ordering, compiler_fence};

use nvme_mpt_memory::{CompletionIndices, MappedWord64, PhasedIndex, RingIndex, SlotRecords};
use nvme_spec::ids::QueueId;
use nvme_spec::sqe::Sqe;

/// Minimum distance between the command numbers of a new Submission Queue and those of an earlier queue with the same
/// identifier. So a mark that the earlier queue left is not taken for a command of the new queue.
const NUMBER_GAP: u32 = 1 << 20;

/// Maximum number of commands in a batch, which is what a poller fetches at a time.
const BATCH_MAX: u32 = 1 << 10;

/// Mark of a slot in the tracking file whose command is in flight: the command's Submission Queue, and the command's number in
/// that queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InflightMark(u64);

impl InflightMark {
    const IN_FLIGHT: u64 = 1 << 63;
    /// Flag in a mark: the recorded head of the Submission Queue is known to be after the command.
    const SETTLED: u64 = 1 << 62;

    const fn new(qid: QueueId) -> Self {
        Self(Self::IN_FLIGHT | (qid.0 as u64) << 32)
    }

    const fn new_settled(qid: QueueId) -> Self {
        Self(Self::new(qid).0 | Self::SETTLED)
    }

    /// Returns the mark of the queue's next command in a batch.
    #[inline(always)]
    pub const fn next(self) -> Self {
        Self(self.0 + 1)
    }

    const fn with_number(self, number: u32) -> Self {
        Self(self.0 & !(u32::MAX as u64) | number as u64)
    }

    const fn number(self) -> u32 {
        self.0 as u32
    }

    pub(crate) const fn is_in_flight(self) -> bool {
        self.0 & Self::IN_FLIGHT != 0
    }

    /// Returns the identifier of the Submission Queue.
    pub const fn sqid(self) -> QueueId {
        QueueId((self.0 >> 32) as u16)
    }

    /// Returns the command's number in its queue; `None` if the recorded head is known to be after the command.
    pub const fn unsettled_number(self) -> Option<u32> {
        match self.0 & Self::SETTLED {
            0 => Some(self.number()),
            _ => None,
        }
    }
}

/// Head of a Submission Queue as recorded in the tracking file, and the number of the command at the head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordedSqHead {
    /// Index of the entry at the head.
    pub index: u32,
    /// Number of the command at the head.
    pub number: u32,
}

impl RecordedSqHead {
    pub(crate) const fn from_word(word: u64) -> Self {
        Self {
            index: word as u32,
            number: (word >> 32) as u32,
        }
    }
}

/// Tail of a Completion Queue as recorded in the tracking file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordedCqTail {
    /// Index of the queue entry at the tail.
    pub index: u32,
    /// Phase Tag of the next completion.
    pub phase: bool,
    /// True if the queue failed.
    pub failed: bool,
}

impl RecordedCqTail {
    /// Flag: the queue exists, and its slots in the tracking file include all of its in-flight commands.
    const COMPLETE: u64 = 1 << 63;
    const FAILED: u64 = 1 << 62;
    const PHASE: u64 = 1 << 32;

    /// Decodes the recorded tail. Returns `None` for a queue that cannot be restored.
    const fn from_word(word: u64) -> Option<Self> {
        if word & Self::COMPLETE == 0 {
            return None;
        }
        Some(Self {
            index: word as u32,
            phase: word & Self::PHASE != 0,
            failed: word & Self::FAILED != 0,
        })
    }

    #[inline(always)]
    fn to_word(tail: PhasedIndex, failed: bool) -> u64 {
        let failed = if failed { Self::FAILED } else { 0 };
        let phase = (tail.phase() as u64) << Self::PHASE.trailing_zeros();
        Self::COMPLETE | failed | phase | u64::from(tail.get())
    }
}

/// Tracked state of a Completion Queue and its slots.
#[derive(Debug)]
pub struct InflightQueue {
    pub(crate) tail: MappedWord64,
    pub(crate) head: MappedWord64,
    pub(crate) slots: SlotRecords,
}

impl InflightQueue {
    /// Initializes a queue without in-flight commands.
    pub fn init(&self, indices: &CompletionIndices) {
        // Until the queue is initialized, it is invalid: if the process ends here, the queue cannot be restored.
        self.invalidate();
        self.clear_stale_marks(|_| false);
        self.store(indices, false);
    }

    /// Prevents the queue from being restored until its positions are stored again.
    pub fn invalidate(&self) {
        self.tail.store(0);
        compiler_fence(Ordering::SeqCst);
    }

    /// Records a fetched command before it is submitted to the host controller.
    #[inline(always)]
    pub fn record(&self, slot: u16, command: &Sqe, mark: InflightMark) {
        self.slots.record(slot, command, mark.0);
    }

    /// Records a command of a restored queue. The recorded head is after the command.
    pub fn record_restored(&self, slot: u16, command: &Sqe, sqid: QueueId) {
        self.slots
            .record(slot, command, InflightMark::new_settled(sqid).0);
    }

    /// Clears the mark of a slot after the completion of its command is published.
    #[inline(always)]
    pub fn clear(&self, slot: u16) {
        self.slots.set_mark(slot, 0);
    }

    /// Clears the marks of slots without a command in flight.
    pub fn clear_stale_marks(&self, is_in_flight: impl Fn(u16) -> bool) {
        for slot in 0..SlotRecords::COUNT {
            if !is_in_flight(slot) && self.slots.mark(slot) != 0 {
                self.clear(slot);
            }
        }
    }

    /// Stores the queue's tail and head.
    pub fn store(&self, indices: &CompletionIndices, failed: bool) {
        self.store_head(indices.head());
        self.store_tail(indices.tail(), failed);
    }

    /// Stores the queue's tail.
    #[inline(always)]
    pub fn store_tail(&self, tail: PhasedIndex, failed: bool) {
        compiler_fence(Ordering::SeqCst);
        self.tail.store(RecordedCqTail::to_word(tail, failed));
        compiler_fence(Ordering::SeqCst);
    }

    /// Records the queue's head: the guest has consumed all completions before this index.
    #[inline(always)]
    pub fn store_head(&self, head: RingIndex) {
        compiler_fence(Ordering::SeqCst);
        self.head.store(head.get().into());
        compiler_fence(Ordering::SeqCst);
    }

    /// Returns the recorded tail and the index of the recorded head; `None` for a queue that cannot be restored.
    pub fn positions(&self) -> Option<(RecordedCqTail, u32)> {
        let head = u32::try_from(self.head.load()).ok()?;
        Some((RecordedCqTail::from_word(self.tail.load())?, head))
    }

    /// Returns the slots that are marked as in flight.
    pub fn inflight_slots(&self) -> Vec<InflightSlot> {
        let slots = (0..SlotRecords::COUNT).map(|slot| (slot, InflightMark(self.slots.mark(slot))));
        let slots = slots.filter(|(_, mark)| mark.is_in_flight());
        slots
            .map(|(slot, mark)| InflightSlot {
                slot,
                mark,
                command: self.slots.command(slot),
            })
            .collect()
    }
}

/// A slot whose command was in flight.
#[derive(Debug)]
pub struct InflightSlot {
    /// Number of the slot.
    pub slot: u16,
    /// Mark of the command.
    pub mark: InflightMark,
    /// The command, as the guest wrote it.
    pub command: Sqe,
}

/// Tracked state of a Submission Queue.
#[derive(Debug)]
pub struct InflightSqHead {
    head: MappedWord64,
    /// Mark for the next command, with its number.
    next: InflightMark,
}

impl InflightSqHead {
    pub(crate) fn new(head: MappedWord64, qid: QueueId) -> Self {
        let next = InflightMark::new(qid);
        Self { head, next }
    }

    /// Returns the recorded head, which another process may have recorded.
    pub fn load(&self) -> RecordedSqHead {
        RecordedSqHead::from_word(self.head.load())
    }

    /// Initializes a queue from which no command has been fetched.
    pub fn init(&mut self, head: RingIndex) {
        // No mark that an earlier queue with this identifier left has a number close to this one.
        let number = self.load().number.wrapping_add(NUMBER_GAP);
        self.next = self.next.with_number(number);
        self.store(head, self.next);
    }

    /// Continues a restored queue, whose head is now `head`: the commands since the recorded head count as fetched.
    pub fn resume(&mut self, head: RingIndex) {
        let RecordedSqHead { index, number } = self.load();
        let entries = head.size().entries();
        let taken = head.size().distance(index % entries, head.get());
        self.next = self.next.with_number(number.wrapping_add(taken));
        self.store(head, self.next);
    }

    /// Returns the mark of the next command.
    pub fn next(&self) -> InflightMark {
        self.next
    }

    /// Begins a batch of up to `BATCH_MAX` commands at `head`. Returns the mark of the first command.
    #[inline(always)]
    pub fn begin_batch(&mut self, head: RingIndex) -> InflightMark {
        if self.next.number() > u32::MAX - BATCH_MAX {
            self.renumber(head);
        }
        self.next
    }

    /// Restarts the command numbers at 0, at `head`. The caller has made sure that no marked command of the queue has one of
    /// the numbers that follow 0.
    #[cold]
    #[inline(never)]
    fn renumber(&mut self, head: RingIndex) {
        self.store(head, self.next.with_number(0));
    }

    /// Stores the head and the number of the command there, after all commands before it were recorded.
    #[inline(always)]
    pub fn store(&mut self, head: RingIndex, next: InflightMark) {
        self.next = next;
        compiler_fence(Ordering::SeqCst);
        self.head
            .store(u64::from(next.number()) << 32 | u64::from(head.get()));
        compiler_fence(Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use nvme_mpt_memory::RingSize;

    use super::super::InflightFile;
    use super::*;

    #[test]
    fn numbers_begin_anew_before_they_reach_the_queues_identifier() {
        let state = InflightFile::new(1).expect("memory");
        let qid = QueueId(1);
        let mut inflight = state.sq_head(qid).expect("a queue");
        let head = RingIndex::from_index(RingSize::new(8).expect("entries"), 5).expect("below");
        inflight.init(head);
        assert_eq!(inflight.load().number, NUMBER_GAP);
        inflight.store(head, inflight.next.with_number(u32::MAX - BATCH_MAX));
        let mark = inflight.begin_batch(head);
        assert_eq!(mark.unsettled_number(), Some(u32::MAX - BATCH_MAX));
        inflight.store(head, mark.next());
        let mark = inflight.begin_batch(head);
        assert_eq!(mark.unsettled_number(), Some(0));
        assert_eq!((mark.sqid(), mark.is_in_flight()), (qid, true));
        assert_eq!(
            inflight.load(),
            RecordedSqHead {
                index: 5,
                number: 0
            }
        );
        // A successor process continues from this state.
        let mut next = state.sq_head(qid).expect("a queue");
        let later = RingIndex::from_index(head.size(), 1).expect("below");
        next.resume(later);
        assert_eq!(
            next.load(),
            RecordedSqHead {
                index: 1,
                number: 4
            }
        );
        assert_eq!(InflightMark::new_settled(qid).unsettled_number(), None);
    }
}
