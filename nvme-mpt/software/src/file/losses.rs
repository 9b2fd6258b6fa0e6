//! Count of losses of completed writes that leases of a file have learned of.
//!
//! The kernel does not report a failed write-back to a description that is opened after another description received the
//! report. A lease that continues after another process may be opened that late, because functions are restored one after the
//! other. Some of its writes are older and may be lost. So the file counts losses, and such a lease checks for losses that are
//! new to it.

use std::collections::BTreeMap;
use std::sync::PoisonError;

use nvme_mpt_memory::sync::{Mutex, MutexGuard};

/// Maximum of remembered names. A forgotten lease counts as knowing no loss.
const NAMES_MAX: usize = 1024;

/// Losses of a file's leases in this process.
#[derive(Debug, Default)]
pub(super) struct FileWriteErrors(Mutex<ReportedWriteErrors>);

#[derive(Debug, Default)]
struct ReportedWriteErrors {
    count: u64,
    /// The count when the latest lease of each name ended, if it was not 0.
    ended: BTreeMap<String, u64>,
}

impl FileWriteErrors {
    fn lock(&self) -> MutexGuard<'_, ReportedWriteErrors> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a loss that a lease learned of. The caller then checks all open leases.
    pub(super) fn count(&self) {
        self.lock().count += 1;
    }

    /// Records the end of a lease, which knows all losses so far.
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

    /// Returns whether losses occurred since the latest lease of this name ended, or since the file was opened.
    pub(super) fn are_new_to(&self, name: &str) -> bool {
        let told = self.lock();
        told.count > told.ended.get(name).copied().unwrap_or_default()
    }
}
