//! Losses of completed writes of which leases of a file were told.
//!
//! The kernel reports no failed write-back to a description that is opened after another one was told of it. A lease
//! that goes on after another process can be opened that late, as functions are taken up one after the other. Its writes
//! are older, and may be lost. So the file counts the losses, and such a lease asks for those that are new to it.

use std::collections::BTreeMap;
use std::sync::PoisonError;

use nvme_mpt::memory::sync::{Mutex, MutexGuard};

/// Names that are remembered. A lease whose name is forgotten counts as told of nothing.
const NAMES_MAX: usize = 1024;

/// Losses of a file's leases in this process.
#[derive(Debug, Default)]
pub(super) struct Losses(Mutex<Told>);

#[derive(Debug, Default)]
struct Told {
    count: u64,
    /// The count at the end of the last lease of a name, if it was not 0.
    ended: BTreeMap<String, u64>,
}

impl Losses {
    fn lock(&self) -> MutexGuard<'_, Told> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a loss of which a lease was told. All open leases are asked after this.
    pub(super) fn count(&self) {
        self.lock().count += 1;
    }

    /// Notes the end of a lease that knows all losses until now.
    pub(super) fn end(&self, name: &str) {
        let mut told = self.lock();
        let count = told.count;
        if count == 0 {
            return;
        }
        if told.ended.len() >= NAMES_MAX {
            told.ended.clear();
        }
        told.ended.insert(name.to_owned(), count);
    }

    /// Returns whether there were losses since the last lease of this name ended, or since the file was opened.
    pub(super) fn are_new_to(&self, name: &str) -> bool {
        let told = self.lock();
        told.count > told.ended.get(name).copied().unwrap_or_default()
    }
}
