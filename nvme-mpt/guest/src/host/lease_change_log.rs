//! Changes of a lease that its guest did not cause, listed in a log page.

use nvme_spec::log::ChangeList;
use serde::{Deserialize, Serialize};
use zerocopy::{FromZeros, IntoBytes};

/// Store of changes of a lease that its guest did not cause.
pub trait LeaseChangeLog {
    /// Returns the changes that have not been reported to the guest.
    fn changes(&self) -> UnreportedChanges;

    /// Adds changes that a predecessor had not reported to the guest.
    fn restore(&self, unreported: &UnreportedChanges);

    /// Removes changes that were reported to the guest. Changes that came after the report was made stay.
    fn remove(&self, reported: &UnreportedChanges);
}

/// Changes that were not reported to the guest yet.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct UnreportedChanges {
    ids: Vec<u64>,
    /// True if there were more changes than identifiers can be stored.
    more: bool,
}

impl UnreportedChanges {
    /// Maximum number of identifiers that are stored: the capacity of the log page.
    pub const CAPACITY: usize = ChangeList::CAPACITY;

    /// Creates changes with these identifiers. If `more` is true, there were further changes, whose identifiers are not stored.
    #[must_use]
    pub fn new(ids: &[u64], more: bool) -> Self {
        let mut changes = Self::default();
        ids.iter().for_each(|id| changes.add(*id));
        changes.more |= more;
        changes
    }

    /// Returns the known identifiers.
    #[must_use]
    pub fn ids(&self) -> &[u64] {
        &self.ids
    }

    /// Returns whether there were further changes whose identifiers are not stored.
    #[must_use]
    pub fn has_more(&self) -> bool {
        self.more
    }

    /// Returns whether there are no changes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty() && !self.more
    }

    /// Adds a change, unless it is already in the list.
    pub fn add(&mut self, id: u64) {
        if self.ids.contains(&id) {
        } else if self.ids.len() < Self::CAPACITY {
            self.ids.push(id);
        } else {
            self.more = true;
        }
    }

    /// Adds another list of changes that were not reported to the guest yet.
    pub fn merge(&mut self, unreported: &Self) {
        unreported.ids.iter().for_each(|id| self.add(*id));
        self.more |= unreported.more;
    }

    /// Removes changes that were reported to the guest. They must be the first ones in this list.
    pub fn remove(&mut self, reported: &Self) {
        self.ids.drain(..reported.ids.len().min(self.ids.len()));
        self.more &= !reported.more;
    }

    /// Returns the log page. If there are more changes than it can list, it lists none and reports the overflow.
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
        let mut changes = UnreportedChanges::new(&[3, 5, 3], false);
        let page = changes.page();
        assert_eq!(page[..8], [2, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!((page[8], page[16], page.len()), (3, 5, 4096));
        changes.remove(&UnreportedChanges::new(&[3], false));
        assert_eq!(changes.page()[..9], [1, 0, 0, 0, 0, 0, 0, 0, 5]);
        (10..10 + UnreportedChanges::CAPACITY as u64).for_each(|id| changes.add(id));
        assert!(changes.has_more());
        assert_eq!(changes.page()[..9], [0xFF, 0xFF, 0, 0, 0, 0, 0, 0, 0]);
    }
}
