//! Indices of queues' entries, and room in a Completion Queue as a permit.
//!
//! All queues have their indices in these types: those of guests and those of drives, for I/O and for admin
//! commands.

use std::num::NonZero;

use nvme_spec::cqe::PhaseTag;

/// Number of a queue's entries, with the arithmetic of indices below it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingSize(NonZero<u32>);

/// Error of an index that the other side of a queue cannot have.
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

    /// Returns the number of entries. The queue holds one less.
    #[inline]
    #[must_use]
    pub const fn entries(self) -> u32 {
        self.0.get()
    }

    /// Returns the steps from one index to another.
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

    /// Returns the index that lies `steps` behind another one, at most a whole round.
    #[inline]
    #[must_use]
    pub const fn behind(self, index: u32, steps: u32) -> u32 {
        debug_assert!(index < self.entries() && steps <= self.entries());
        if index >= steps {
            index - steps
        } else {
            index + self.entries() - steps
        }
    }
}

/// Index of a queue's entry, which moves on from the last entry to the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingIndex {
    size: RingSize,
    /// Below `size`, always.
    index: u32,
}

impl RingIndex {
    /// Index of the first entry.
    #[must_use]
    pub const fn new(size: RingSize) -> Self {
        Self { size, index: 0 }
    }

    /// Index of any entry; `None` if the queue has no such entry.
    #[must_use]
    pub const fn at(size: RingSize, index: u32) -> Option<Self> {
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

    /// Returns the steps from here to another index, which may come from the other side.
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

    /// Moves on to the next entry. Returns true if that is the first one again.
    #[inline]
    pub const fn advance(&mut self) -> bool {
        let next = self.index + 1;
        let wraps = next == self.size.entries();
        self.index = if wraps { 0 } else { next };
        wraps
    }
}

/// Index of a Completion Queue's entry, and the Phase Tag of new entries (Base 2.0, section 3.3.3.2.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PhasedIndex {
    index: RingIndex,
    tag: PhaseTag,
}

impl PhasedIndex {
    /// Index of the first entry, in the first round.
    #[must_use]
    pub const fn new(size: RingSize) -> Self {
        Self::at(RingIndex::new(size), true)
    }

    /// Index of any entry, with the Phase Tag of its round.
    #[must_use]
    pub const fn at(index: RingIndex, phase: bool) -> Self {
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

    /// Returns the Phase Tag of a new entry here.
    #[inline]
    #[must_use]
    pub const fn phase(self) -> bool {
        self.tag.phase()
    }

    /// As [`Self::phase`], in its place in an entry.
    #[inline]
    #[must_use]
    pub const fn tag(self) -> PhaseTag {
        self.tag
    }

    /// Moves on to the next entry.
    #[inline]
    pub const fn advance(&mut self) {
        if self.index.advance() {
            self.tag = self.tag.inverted();
        }
    }
}

/// Room for one entry in a Completion Queue. A command is taken against it, and its completion spends it.
#[must_use]
#[derive(Debug)]
pub struct Room(());

/// Room for several entries in a Completion Queue, taken one by one.
#[must_use]
#[derive(Debug)]
pub struct Rooms(u32);

impl Rooms {
    /// Returns the number of entries that there is room for.
    #[inline]
    #[must_use]
    pub const fn count(&self) -> u32 {
        self.0
    }

    /// Takes room for one entry out of it.
    #[inline]
    pub const fn split_off(&mut self) -> Option<Room> {
        if self.0 == 0 {
            return None;
        }
        self.0 -= 1;
        Some(Room(()))
    }
}

impl From<Room> for Rooms {
    fn from(_: Room) -> Self {
        Self(1)
    }
}

/// Indices of a Completion Queue on the side that fills it, and its room.
#[derive(Debug)]
pub struct CompletionIndices {
    tail: PhasedIndex,
    /// Index up to which the host has consumed, below the size.
    head: u32,
    /// Entries that neither wait for the host nor are promised by a [`Room`].
    room: u32,
}

impl CompletionIndices {
    /// Indices of an empty queue.
    #[must_use]
    pub const fn new(size: RingSize) -> Self {
        Self {
            tail: PhasedIndex::new(size),
            head: 0,
            room: size.entries() - 1,
        }
    }

    /// Indices of a queue in use, without promises; `None` if the queue has no such head.
    #[must_use]
    pub const fn at(tail: PhasedIndex, head: u32) -> Option<Self> {
        let size = tail.size();
        if head >= size.entries() {
            return None;
        }
        let unconsumed = size.distance(head, tail.get());
        Some(Self {
            tail,
            head,
            room: size.entries() - 1 - unconsumed,
        })
    }

    /// Returns the size of the queue.
    #[inline]
    #[must_use]
    pub const fn size(&self) -> RingSize {
        self.tail.size()
    }

    /// Returns the index and the Phase Tag of the entry that is filled next.
    #[inline]
    #[must_use]
    pub const fn tail(&self) -> PhasedIndex {
        self.tail
    }

    /// Returns the index up to which the host has consumed.
    #[inline]
    #[must_use]
    pub const fn head(&self) -> RingIndex {
        RingIndex {
            size: self.size(),
            index: self.head,
        }
    }

    /// Returns the number of entries that wait for the host.
    #[inline]
    #[must_use]
    pub const fn unconsumed(&self) -> u32 {
        self.size().distance(self.head, self.tail.get())
    }

    /// Returns the number of entries that were filled since the tail was there.
    #[inline]
    #[must_use]
    pub const fn filled_since(&self, tail: PhasedIndex) -> u32 {
        self.size().distance(tail.get(), self.tail.get())
    }

    /// Returns the number of entries that can be reserved.
    #[inline]
    #[must_use]
    pub const fn room(&self) -> u32 {
        self.room
    }

    /// Reserves one entry, if there is room.
    #[inline]
    pub const fn reserve(&mut self) -> Option<Room> {
        if self.room == 0 {
            return None;
        }
        self.room -= 1;
        Some(Room(()))
    }

    /// Reserves `most` entries, or as many as there is room for.
    #[inline]
    pub fn reserve_up_to(&mut self, most: u32) -> Rooms {
        let count = most.min(self.room);
        self.room -= count;
        Rooms(count)
    }

    /// Takes back room that no completion is posted into.
    #[inline]
    pub const fn give_back(&mut self, rooms: Rooms) {
        self.room += rooms.0;
    }

    /// Moves the tail over an entry that was filled, and spends the room for it.
    #[inline]
    pub const fn spend(&mut self, _: Room) {
        self.tail.advance();
    }

    /// Takes over the host's head. There is room again for the entries that it consumed.
    ///
    /// # Errors
    /// [`InvalidIndex`] if there is no such entry, or the host consumed more than was posted. The head stays.
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
        self.room += consumed;
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
                    assert_eq!(size.behind(to, distance), from);
                    let index = RingIndex::at(size, from).expect("an entry");
                    assert_eq!(index.distance_to(to), Ok(distance));
                }
            }
        }
    }

    #[test]
    fn indices_beyond_the_queue_are_none() {
        let index = RingIndex::at(size(4), 3).expect("an entry");
        assert_eq!(RingIndex::at(size(4), 4), None);
        assert_eq!(index.distance_to(4), Err(InvalidIndex));
        assert_eq!(index.distance_to(u32::MAX), Err(InvalidIndex));
        let tail = PhasedIndex::at(index, false);
        assert!(CompletionIndices::at(tail, 4).is_none());
        let mut queue = CompletionIndices::at(tail, 1).expect("an entry");
        assert_eq!((queue.unconsumed(), queue.room()), (2, 1));
        for head in [0, 4, u32::MAX] {
            assert_eq!(queue.move_head(head), Err(InvalidIndex));
        }
        assert_eq!(queue.head().get(), 1);
        assert_eq!(queue.move_head(3), Ok(()));
        assert_eq!((queue.unconsumed(), queue.room()), (0, 3));
        assert!(!queue.tail().phase());
    }

    #[test]
    fn room_is_reserved_once() {
        let mut queue = CompletionIndices::new(size(4));
        let mut rooms = queue.reserve_up_to(5);
        assert_eq!((rooms.count(), queue.room()), (3, 0));
        assert!(queue.reserve().is_none());
        let room = rooms.split_off().expect("room");
        queue.give_back(rooms);
        assert_eq!((queue.unconsumed(), queue.room()), (0, 2));
        queue.spend(room);
        assert_eq!((queue.unconsumed(), queue.room()), (1, 2));
        let room = queue.reserve().expect("room");
        queue.give_back(room.into());
        assert_eq!(queue.room(), 2);
        assert!(queue.reserve_up_to(0).split_off().is_none());
    }

    /// Compares the indices with a list, for every sequence of eight steps of five kinds.
    #[test]
    fn a_completion_queue_is_first_in_first_out() {
        const ENTRIES: u32 = 3;
        for steps in 0..5_u32.pow(8) {
            let mut queue = CompletionIndices::new(size(ENTRIES));
            let (mut posted, mut rooms, mut count) = (VecDeque::new(), Vec::new(), 0);
            for step in 0..8 {
                match steps / 5_u32.pow(step) % 5 {
                    0 => {
                        let room = queue.reserve();
                        assert_eq!(room.is_some(), posted.len() + rooms.len() < 2);
                        rooms.extend(room);
                    }
                    1 => {
                        if let Some(room) = rooms.pop() {
                            let tail = queue.tail();
                            assert_eq!(tail.get(), count % ENTRIES);
                            assert_eq!(tail.phase(), (count / ENTRIES).is_multiple_of(2));
                            count += 1;
                            queue.spend(room);
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
                        if let Some(room) = rooms.pop() {
                            queue.give_back(room.into());
                        }
                    }
                    _ => {
                        let beyond = (queue.tail().get() + 1) % ENTRIES;
                        let is_there = posted.len() as u32 == ENTRIES - 1;
                        assert_eq!(queue.move_head(beyond).is_ok(), is_there);
                    }
                }
                assert_eq!(queue.unconsumed() as usize, posted.len());
                assert_eq!(queue.room() as usize, 2 - posted.len() - rooms.len());
            }
        }
    }
}
