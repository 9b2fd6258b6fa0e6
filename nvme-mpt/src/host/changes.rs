//! Changes of a lease that its guest has not caused, and that a log page lists.

use serde::{Deserialize, Serialize};
use zerocopy::{FromZeros, IntoBytes};

use crate::spec::log::ChangeList;

/// Changes of a lease that its guest has not caused.
pub trait ChangeLog {
    /// Returns the changes of which the guest was not told.
    fn changes(&self) -> Changes;

    /// Adds changes of which the guest was not told.
    fn recall(&self, untold: &Changes);

    /// Forgets changes of which the guest was told. Changes since then stay.
    fn forget(&self, told: &Changes);
}

/// Changes of which a guest was not told.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Changes {
    ids: Vec<u64>,
    /// There are others, which are not known one by one.
    more: bool,
}

impl Changes {
    /// Most changes that are known one by one: those that the log page has room for.
    pub const CAPACITY: usize = ChangeList::CAPACITY;

    /// Changes of these identifiers, and others if there are `more`.
    #[must_use]
    pub fn new(ids: &[u64], more: bool) -> Self {
        let mut changes = Self::default();
        ids.iter().for_each(|id| changes.add(*id));
        changes.more |= more;
        changes
    }

    /// Returns the identifiers of those that are known one by one.
    #[must_use]
    pub fn ids(&self) -> &[u64] {
        &self.ids
    }

    /// Returns whether there are others.
    #[must_use]
    pub fn are_more(&self) -> bool {
        self.more
    }

    /// Returns whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty() && !self.more
    }

    /// Adds a change, once.
    pub fn add(&mut self, id: u64) {
        if self.ids.contains(&id) {
        } else if self.ids.len() < Self::CAPACITY {
            self.ids.push(id);
        } else {
            self.more = true;
        }
    }

    /// Adds other changes.
    pub fn recall(&mut self, untold: &Self) {
        untold.ids.iter().for_each(|id| self.add(*id));
        self.more |= untold.more;
    }

    /// Removes those that the guest was told of, which were the first ones here.
    pub fn forget(&mut self, told: &Self) {
        self.ids.drain(..told.ids.len().min(self.ids.len()));
        self.more &= !told.more;
    }

    /// Returns the log page: all of them, or none if there are more than it has room for.
    #[must_use]
    pub fn page(&self) -> Vec<u8> {
        let mut page = ChangeList::new_zeroed();
        page.count = ChangeList::OVERFLOW;
        if !self.more {
            for (place, id) in page.ids.iter_mut().zip(&self.ids) {
                *place = *id;
            }
            page.count = u16::try_from(self.ids.len()).unwrap_or(ChangeList::OVERFLOW);
        }
        page.as_bytes().to_vec()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_lists_all_changes_or_none() {
        let mut changes = Changes::new(&[3, 5, 3], false);
        let page = changes.page();
        assert_eq!(page[..8], [2, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!((page[8], page[16], page.len()), (3, 5, 4096));
        changes.forget(&Changes::new(&[3], false));
        assert_eq!(changes.page()[..9], [1, 0, 0, 0, 0, 0, 0, 0, 5]);
        (10..10 + Changes::CAPACITY as u64).for_each(|id| changes.add(id));
        assert!(changes.are_more());
        assert_eq!(changes.page()[..9], [0xFF, 0xFF, 0, 0, 0, 0, 0, 0, 0]);
    }
}
