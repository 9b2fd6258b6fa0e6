//! Indices of queue entries, and permits to fill entries of a Completion Queue.
//!
//! All queues use these types: queues of guests and of drives, for I/O and for admin commands.

use std::num::NonZero;

use nvme_spec::cqe::PhaseTag;

/// Number of entries of a queue, with arithmetic on indices of its entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingSize(NonZero<u32>);

/// Error for an invalid index from the other side of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvalidIndex;

impl RingSize {
    /// Returns `None` for a queue without entries.
    #[must_use]
    pub const fn new(entries: u32) -> Option<Self> {
        match NonZero::new(entries) {
            Some(entries) => Some(Self(entries)),
            None => None,
        }
    }

    /// Returns the number of entries. A queue is full with one entry less.
    #[inline]
    #[must_use]
    pub const fn entries(self) -> u32 {
        self.0.get()
    }

    /// Returns the number of steps from one index to another.
    #[inline]
    #[must_use]
    pub const fn distance(self, from: u32, to: u32) -> u32 {
        debug_assert!(from < self.entries() && to < self.entries());
        if to >= from {
            to - from
        } else {
            to + self.entries() - from
        }
    }

    /// Returns the index `steps` entries before `index`, where `steps` is at most the number of entries.
    #[inline]
    #[must_use]
    pub const fn step_back(self, index: u32, steps: u32) -> u32 {
        debug_assert!(index < self.entries() && steps <= self.entries());
        if index >= steps {
            index - steps
        } else {
            index + self.entries() - steps
        }
    }
}

/// Index of a queue entry, which wraps from the last entry to the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingIndex {
    size: RingSize,
    /// Index of the entry, always below `size`.
    index: u32,
}

impl RingIndex {
    /// Creates an index of the first entry.
    #[must_use]
    pub const fn new(size: RingSize) -> Self {
        Self { size, index: 0 }
    }

    /// Creates an index of the entry `index`; `None` if the queue has no such entry.
    #[must_use]
    pub const fn from_index(size: RingSize, index: u32) -> Option<Self> {
        if index < size.entries() {
            Some(Self { size, index })
        } else {
            None
        }
    }

    /// Returns the size of the queue.
    #[inline]
    #[must_use]
    pub const fn size(self) -> RingSize {
        self.size
    }

    /// Returns the index as a number.
    #[inline]
    #[must_use]
    pub const fn get(self) -> u32 {
        self.index
    }

    /// Returns the number of steps to another index, which may be untrusted.
    ///
    /// # Errors
    /// [`InvalidIndex`] if the queue has no such entry.
    #[inline]
    pub const fn distance_to(self, index: u32) -> Result<u32, InvalidIndex> {
        if index < self.size.entries() {
            Ok(self.size.distance(self.index, index))
        } else {
            Err(InvalidIndex)
        }
    }

    /// Advances to the next entry. Returns true if the index wrapped to the first one.
    #[inline]
    pub const fn advance(&mut self) -> bool {
        let next = self.index + 1;
        let wraps = next == self.size.entries();
        self.index = if wraps { 0 } else { next };
        wraps
    }
}

/// Index of a Completion Queue entry, and the Phase Tag of new entries (Base 2.0, section 3.3.3.2.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PhasedIndex {
    index: RingIndex,
    tag: PhaseTag,
}

impl PhasedIndex {
    /// Creates an index of the first entry, with the Phase Tag of the first pass.
    #[must_use]
    pub const fn new(size: RingSize) -> Self {
        Self::with_phase(RingIndex::new(size), true)
    }

    /// Creates an index of any entry, with the Phase Tag of the pass.
    #[must_use]
    pub const fn with_phase(index: RingIndex, phase: bool) -> Self {
        Self {
            index,
            tag: PhaseTag::new(phase),
        }
    }

    /// Returns the size of the queue.
    #[inline]
    #[must_use]
    pub const fn size(self) -> RingSize {
        self.index.size
    }

    /// Returns the index as a number.
    #[inline]
    #[must_use]
    pub const fn get(self) -> u32 {
        self.index.index
    }

    /// Returns the Phase Tag of a new entry.
    #[inline]
    #[must_use]
    pub const fn phase(self) -> bool {
        self.tag.phase()
    }

    /// Returns the [phase](Self::phase) at the bit position that it has in an entry.
    #[inline]
    #[must_use]
    pub const fn tag(self) -> PhaseTag {
        self.tag
    }

    /// Advances to the next entry.
    #[inline]
    pub const fn advance(&mut self) {
        if self.index.advance() {
            self.tag = self.tag.inverted();
        }
    }
}

/// Permit to fill one entry of a Completion Queue. Each fetched command takes a permit, and its completion uses the permit up.
/// So a completion always finds a free entry.
#[must_use]
#[derive(Debug)]
pub struct CompletionCredit(());

/// Permits to fill several entries of a Completion Queue, to be taken one by one.
#[must_use]
#[derive(Debug)]
pub struct CompletionCredits(u32);

impl CompletionCredits {
    /// Returns the number of permits.
    #[inline]
    #[must_use]
    pub const fn count(&self) -> u32 {
        self.0
    }

    /// Takes one permit out.
    #[inline]
    pub const fn split_off(&mut self) -> Option<CompletionCredit> {
        if self.0 == 0 {
            return None;
        }
        self.0 -= 1;
        Some(CompletionCredit(()))
    }
}

impl From<CompletionCredit> for CompletionCredits {
    fn from(_: CompletionCredit) -> Self {
        Self(1)
    }
}

/// Indices of a Completion Queue on the side that fills it, with the number of free entries.
#[derive(Debug)]
pub struct CompletionIndices {
    tail: PhasedIndex,
    /// Index up to which the host has consumed entries, always below the size.
    head: u32,
    /// Number of free entries that no [`CompletionCredit`] reserves.
    free_entries: u32,
}

impl CompletionIndices {
    /// Creates indices of an empty queue.
    #[must_use]
    pub const fn new(size: RingSize) -> Self {
        Self {
            tail: PhasedIndex::new(size),
            head: 0,
            free_entries: size.entries() - 1,
        }
    }

    /// Creates indices of a queue in use, without reserved entries; `None` if the queue has no entry `head`.
    #[must_use]
    pub const fn from_positions(tail: PhasedIndex, head: u32) -> Option<Self> {
        let size = tail.size();
        if head >= size.entries() {
            return None;
        }
        let unconsumed = size.distance(head, tail.get());
        Some(Self {
            tail,
            head,
            free_entries: size.entries() - 1 - unconsumed,
        })
    }

    /// Returns the size of the queue.
    #[inline]
    #[must_use]
    pub const fn size(&self) -> RingSize {
        self.tail.size()
    }

    /// Returns the index and the Phase Tag of the next entry to fill.
    #[inline]
    #[must_use]
    pub const fn tail(&self) -> PhasedIndex {
        self.tail
    }

    /// Returns the index up to which the host has consumed entries.
    #[inline]
    #[must_use]
    pub const fn head(&self) -> RingIndex {
        RingIndex {
            size: self.size(),
            index: self.head,
        }
    }

    /// Returns the number of entries that the host has not consumed.
    #[inline]
    #[must_use]
    pub const fn unconsumed(&self) -> u32 {
        self.size().distance(self.head, self.tail.get())
    }

    /// Returns the number of entries filled since the tail was `tail`.
    #[inline]
    #[must_use]
    pub const fn filled_since(&self, tail: PhasedIndex) -> u32 {
        self.size().distance(tail.get(), self.tail.get())
    }

    /// Returns the number of entries that can be reserved.
    #[inline]
    #[must_use]
    pub const fn free_entries(&self) -> u32 {
        self.free_entries
    }

    /// Reserves an entry; `None` if no entry is free.
    #[inline]
    pub const fn reserve(&mut self) -> Option<CompletionCredit> {
        if self.free_entries == 0 {
            return None;
        }
        self.free_entries -= 1;
        Some(CompletionCredit(()))
    }

    /// Reserves up to `most` entries: fewer if fewer are free.
    #[inline]
    pub fn reserve_up_to(&mut self, most: u32) -> CompletionCredits {
        let count = most.min(self.free_entries);
        self.free_entries -= count;
        CompletionCredits(count)
    }

    /// Returns unused permits, which frees their entries.
    #[inline]
    pub const fn return_credits(&mut self, credits: CompletionCredits) {
        self.free_entries += credits.0;
    }

    /// Advances the tail past a filled entry, which uses up the entry's permit.
    #[inline]
    pub const fn spend(&mut self, _: CompletionCredit) {
        self.tail.advance();
    }

    /// Updates the host's head, which frees the consumed entries.
    ///
    /// # Errors
    /// [`InvalidIndex`] if the queue has no such entry, or if the host would have consumed more than was posted. The head
    /// is then unchanged.
    #[inline]
    pub const fn move_head(&mut self, head: u32) -> Result<(), InvalidIndex> {
        if head >= self.size().entries() {
            return Err(InvalidIndex);
        }
        let consumed = self.size().distance(self.head, head);
        if consumed > self.unconsumed() {
            return Err(InvalidIndex);
        }
        self.head = head;
        self.free_entries += consumed;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;

    fn size(entries: u32) -> RingSize {
        RingSize::new(entries).expect("entries")
    }

    #[test]
    fn an_index_goes_round() {
        assert_eq!(RingSize::new(0), None);
        for entries in 1..=5 {
            let size = size(entries);
            let mut index = PhasedIndex::new(size);
            for step in 0..3 * entries {
                assert_eq!(index.get(), step % entries);
                assert_eq!(index.phase(), (step / entries).is_multiple_of(2));
                index.advance();
            }
            for from in 0..entries {
                for to in 0..entries {
                    let distance = (to + entries - from) % entries;
                    assert_eq!(size.distance(from, to), distance);
                    assert_eq!(size.step_back(to, distance), from);
                    let index = RingIndex::from_index(size, from).expect("an entry");
                    assert_eq!(index.distance_to(to), Ok(distance));
                }
            }
        }
    }

    #[test]
    fn indices_beyond_the_queue_are_none() {
        let index = RingIndex::from_index(size(4), 3).expect("an entry");
        assert_eq!(RingIndex::from_index(size(4), 4), None);
        assert_eq!(index.distance_to(4), Err(InvalidIndex));
        assert_eq!(index.distance_to(u32::MAX), Err(InvalidIndex));
        let tail = PhasedIndex::with_phase(index, false);
        assert!(CompletionIndices::from_positions(tail, 4).is_none());
        let mut queue = CompletionIndices::from_positions(tail, 1).expect("an entry");
        assert_eq!((queue.unconsumed(), queue.free_entries()), (2, 1));
        for head in [0, 4, u32::MAX] {
            assert_eq!(queue.move_head(head), Err(InvalidIndex));
        }
        assert_eq!(queue.head().get(), 1);
        assert_eq!(queue.move_head(3), Ok(()));
        assert_eq!((queue.unconsumed(), queue.free_entries()), (0, 3));
        assert!(!queue.tail().phase());
    }

    #[test]
    fn room_is_reserved_once() {
        let mut queue = CompletionIndices::new(size(4));
        let mut credits = queue.reserve_up_to(5);
        assert_eq!((credits.count(), queue.free_entries()), (3, 0));
        assert!(queue.reserve().is_none());
        let credit = credits.split_off().expect("room");
        queue.return_credits(credits);
        assert_eq!((queue.unconsumed(), queue.free_entries()), (0, 2));
        queue.spend(credit);
        assert_eq!((queue.unconsumed(), queue.free_entries()), (1, 2));
        let credit = queue.reserve().expect("room");
        queue.return_credits(credit.into());
        assert_eq!(queue.free_entries(), 2);
        assert!(queue.reserve_up_to(0).split_off().is_none());
    }

    /// Compares the indices with a list of entries, for every sequence of eight steps of five kinds.
    #[test]
    fn a_completion_queue_is_first_in_first_out() {
        const ENTRIES: u32 = 3;
        for steps in 0..5_u32.pow(8) {
            let mut queue = CompletionIndices::new(size(ENTRIES));
            let (mut posted, mut credits, mut count) = (VecDeque::new(), Vec::new(), 0);
            for step in 0..8 {
                match steps / 5_u32.pow(step) % 5 {
                    0 => {
                        let credit = queue.reserve();
                        assert_eq!(credit.is_some(), posted.len() + credits.len() < 2);
                        credits.extend(credit);
                    }
                    1 => {
                        if let Some(credit) = credits.pop() {
                            let tail = queue.tail();
                            assert_eq!(tail.get(), count % ENTRIES);
                            assert_eq!(tail.phase(), (count / ENTRIES).is_multiple_of(2));
                            count += 1;
                            queue.spend(credit);
                            assert_eq!(queue.filled_since(tail), 1);
                            posted.push_back(tail.get());
                        }
                    }
                    2 => {
                        if let Some(index) = posted.pop_front() {
                            assert_eq!(queue.head().get(), index);
                            assert_eq!(queue.move_head((index + 1) % ENTRIES), Ok(()));
                        }
                    }
                    3 => {
                        if let Some(credit) = credits.pop() {
                            queue.return_credits(credit.into());
                        }
                    }
                    _ => {
                        let beyond = (queue.tail().get() + 1) % ENTRIES;
                        let is_there = posted.len() as u32 == ENTRIES - 1;
                        assert_eq!(queue.move_head(beyond).is_ok(), is_there);
                    }
                }
                assert_eq!(queue.unconsumed() as usize, posted.len());
                assert_eq!(
                    queue.free_entries() as usize,
                    2 - posted.len() - credits.len()
                );
            }
        }
    }
}
