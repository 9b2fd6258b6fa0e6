//! Flushes of one queue, several of which share a sync.
//!
//! The kernel executes a sync in a worker thread, and a poller thread has a limited number of workers for all its queues. So a
//! queue has at most one sync pending in the kernel. Flushes that arrive during this sync share the next sync, which begins
//! after all of them have arrived.

use nvme_spec::ids::CommandId;

/// Number of one of a queue's syncs, which are counted from 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct SyncNumber(u64);

impl SyncNumber {
    fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

/// Next action of a Flush, with respect to the queue's syncs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FlushRole {
    /// The Flush completes: a sync that began after its arrival has succeeded.
    Done,
    /// The Flush performs the sync with this number.
    Leads(SyncNumber),
    /// The Flush waits for the end of the sync in progress.
    Waits,
}

/// Syncs of a queue, and the Flushes that wait for them.
#[derive(Debug)]
pub(super) struct QueueSyncs {
    last_begun: SyncNumber,
    /// Number of the latest sync that has succeeded.
    last_succeeded: SyncNumber,
    is_running: bool,
    /// Slots of Flushes that wait for the sync in progress.
    waiting: Vec<u16>,
    resuming: Vec<u16>,
}

impl QueueSyncs {
    pub(super) fn new(slots: usize) -> Self {
        Self {
            last_begun: SyncNumber::default(),
            last_succeeded: SyncNumber::default(),
            is_running: false,
            waiting: Vec::with_capacity(slots),
            resuming: Vec::with_capacity(slots),
        }
    }

    /// Returns the number of the first sync that begins after a Flush which arrives now, and so makes its data durable.
    pub(super) fn next_sync(&self) -> SyncNumber {
        self.last_begun.next()
    }

    /// Decides what a Flush does next. `needed` is the number of the first sync that makes the Flush's data durable.
    pub(super) fn join(&mut self, needed: SyncNumber) -> FlushRole {
        if self.last_succeeded >= needed {
            return FlushRole::Done;
        }
        if self.is_running {
            return FlushRole::Waits;
        }
        self.is_running = true;
        self.last_begun = self.last_begun.next();
        FlushRole::Leads(self.last_begun)
    }

    /// Makes the Flush in a slot wait for the sync in progress.
    pub(super) fn add_waiter(&mut self, slot: CommandId) {
        self.waiting.push(slot.0);
    }

    /// Ends the sync in progress.
    pub(super) fn end_sync(&mut self, number: SyncNumber, succeeded: bool) {
        self.is_running = false;
        if succeeded {
            self.last_succeeded = number;
        }
    }

    /// Returns whether Flushes wait although no sync is in progress, so that they must continue.
    pub(super) fn can_resume(&self) -> bool {
        !self.is_running && !self.waiting.is_empty()
    }

    /// Takes the slots of all waiting Flushes. The caller returns the vector through [`Self::recycle`].
    pub(super) fn take_waiting(&mut self) -> Vec<u16> {
        std::mem::swap(&mut self.waiting, &mut self.resuming);
        std::mem::take(&mut self.resuming)
    }

    /// Takes back the vector of [`Self::take_waiting`], to use its memory again.
    pub(super) fn recycle(&mut self, mut slots: Vec<u16>) {
        slots.clear();
        self.resuming = slots;
    }

    /// Removes one waiting Flush, and returns its slot.
    pub(super) fn pop(&mut self) -> Option<u16> {
        self.waiting.pop()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flushes_that_arrive_during_a_sync_share_the_next() {
        let mut syncs = QueueSyncs::new(4);
        let first = syncs.next_sync();
        assert_eq!(syncs.join(first), FlushRole::Leads(first));
        let later = [syncs.next_sync(), syncs.next_sync()];
        assert!(later[0] > first, "the sync under way began before them");
        for needed in later {
            assert_eq!(syncs.join(needed), FlushRole::Waits);
        }
        syncs.end_sync(first, true);
        assert_eq!(syncs.join(later[0]), FlushRole::Leads(later[0]));
        assert_eq!(syncs.join(later[1]), FlushRole::Waits);
        syncs.end_sync(later[0], true);
        assert_eq!(syncs.join(later[1]), FlushRole::Done);
    }

    #[test]
    fn a_sync_that_failed_makes_nothing_durable() {
        let mut syncs = QueueSyncs::new(4);
        let first = syncs.next_sync();
        syncs.join(first);
        let later = syncs.next_sync();
        syncs.end_sync(first, false);
        let FlushRole::Leads(second) = syncs.join(later) else {
            panic!("it makes one");
        };
        syncs.end_sync(second, false);
        assert_ne!(syncs.join(later), FlushRole::Done);
    }
}
