//! Commands that wait for a resource before they start, in a wait queue for each resource.
//!
//! If a resource is not available for the first command of its wait queue, it is not available for the commands behind it
//! either. So only the first command of each wait queue must be checked, whatever the number of waiting commands.

use std::collections::VecDeque;

use super::super::bounce_buffers::BounceBufferSize;

/// A resource that a command needs to start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::file) enum AwaitedResource {
    /// An entry in the list of block changes; see the module `change_claims`.
    ListEntry,
    /// A bounce buffer of this size class.
    BounceBuffer(BounceBufferSize),
}

impl AwaitedResource {
    /// All resources, in the order in which a command acquires them.
    pub(super) const ALL: [Self; 3] = [
        Self::ListEntry,
        Self::BounceBuffer(BounceBufferSize::Small),
        Self::BounceBuffer(BounceBufferSize::Large),
    ];

    fn queue_index(self) -> usize {
        match self {
            Self::ListEntry => 0,
            Self::BounceBuffer(BounceBufferSize::Small) => 1,
            Self::BounceBuffer(BounceBufferSize::Large) => 2,
        }
    }
}

/// Wait queues of command slots, one for each resource.
#[derive(Debug)]
pub(super) struct ResourceWaitQueues([VecDeque<u16>; 3]);

impl ResourceWaitQueues {
    /// Creates empty wait queues with a capacity of `slots` each.
    pub(super) fn new(slots: usize) -> Self {
        Self(std::array::from_fn(|_| VecDeque::with_capacity(slots)))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.iter().all(VecDeque::is_empty)
    }

    /// Appends a slot to the wait queue of a resource.
    pub(super) fn push(&mut self, want: AwaitedResource, slot: u16) {
        self.0[want.queue_index()].push_back(slot);
    }

    /// Takes the first slot of the wait queue of a resource.
    pub(super) fn take(&mut self, want: AwaitedResource) -> Option<u16> {
        self.0[want.queue_index()].pop_front()
    }

    /// Puts a slot back at the front of the wait queue of a resource.
    pub(super) fn push_front(&mut self, want: AwaitedResource, slot: u16) {
        self.0[want.queue_index()].push_front(slot);
    }

    /// Takes the first slot of any wait queue that is not empty.
    pub(super) fn take_any(&mut self) -> Option<u16> {
        self.0.iter_mut().find_map(VecDeque::pop_front)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_line_keeps_its_order() {
        let mut waiting = ResourceWaitQueues::new(8);
        assert!(waiting.is_empty());
        for (slot, want) in (0..).zip(AwaitedResource::ALL.into_iter().cycle().take(6)) {
            waiting.push(want, slot);
        }
        for (slot, want) in (0..).zip(AwaitedResource::ALL) {
            assert_eq!(waiting.take(want), Some(slot));
            waiting.push_front(want, slot);
        }
        for (slot, want) in (0..).zip(AwaitedResource::ALL) {
            assert_eq!(waiting.take(want), Some(slot));
            assert_eq!(waiting.take(want), Some(slot + 3));
            assert_eq!(waiting.take(want), None);
        }
        waiting.push(AwaitedResource::BounceBuffer(BounceBufferSize::Large), 7);
        assert!(!waiting.is_empty());
        assert_eq!((waiting.take_any(), waiting.take_any()), (Some(7), None));
    }
}
