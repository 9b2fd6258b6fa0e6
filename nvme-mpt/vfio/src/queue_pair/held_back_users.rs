//! Users of a queue pair that are held back, because their leases have used up their bytes until the next survey.
//!
//! Limits change in surveys, ten times a second, while the pair is polled all the time. So these users take no part in
//! [arbitration](super::arbitration) until they are due. The cost of a poll then depends only on the users that can be served.

use std::collections::VecDeque;

use nvme_mpt_memory::clock::Ticks;

/// Users that are held back, each until its due time, at which it takes part in arbitration again.
#[derive(Debug, Default)]
pub(super) struct HeldBackUsers {
    /// Users that are held back: due time and number, in the order in which they were held back. Each is held back for an equal
    /// time, so the first one is due first.
    users: VecDeque<(Ticks, u16)>,
}

impl HeldBackUsers {
    /// Reserves memory for `count` users, so that [`Self::push`] does not allocate.
    pub(super) fn reserve(&mut self, count: usize) {
        self.users.reserve(count.saturating_sub(self.users.len()));
    }

    /// Adds a user that is not held back yet, and is due at `due`.
    pub(super) fn push(&mut self, number: u16, due: Ticks) {
        self.users.push_back((due, number));
    }

    /// Removes the first user and returns its number, if the user is due.
    #[inline]
    pub(super) fn pop_due(&mut self, now: Ticks) -> Option<u16> {
        let (due, number) = *self.users.front()?;
        (due <= now).then(|| self.users.pop_front())?;
        Some(number)
    }

    /// Removes a user that leaves the pair.
    pub(super) fn remove(&mut self, number: u16) {
        self.users.retain(|(_, other)| *other != number);
    }

    /// Returns whether no user is held back.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.users.is_empty()
    }
}
