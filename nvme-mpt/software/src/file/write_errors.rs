//! Count of the write-back errors by which leases of a file have lost completed writes.
//!
//! After one open file description has received the report of a failed write-back, the kernel does not report it to
//! descriptions opened later. When a process continues the leases of its predecessor, it opens them one after the other. So a
//! lease may be opened after another lease has received the report, although the predecessor's writes of this lease may be
//! among the lost ones. Therefore losses are counted per file, and such a lease checks whether the count has risen.

use std::collections::BTreeMap;
use std::sync::PoisonError;

use nvme_mpt_memory::sync::{Mutex, MutexGuard};

/// Maximum number of remembered names. A lease whose name was forgotten is treated as if it knew of no loss.
const NAMES_MAX: usize = 1024;

/// Counted losses of a file in this process.
#[derive(Debug, Default)]
pub(super) struct FileWriteErrors(Mutex<ReportedWriteErrors>);

#[derive(Debug, Default)]
struct ReportedWriteErrors {
    count: u64,
    /// For each lease name, the count when the latest lease of this name ended. Leases that ended at count 0 are left out.
    ended_leases: BTreeMap<String, u64>,
}

impl FileWriteErrors {
    fn lock(&self) -> MutexGuard<'_, ReportedWriteErrors> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a loss that a lease has detected. The caller then checks all open leases.
    pub(super) fn count_error(&self) {
        self.lock().count += 1;
    }

    /// Records that a lease has ended, and that it knew of all losses so far.
    pub(super) fn end_lease(&self, name: &str) {
        let mut told = self.lock();
        let count = told.count;
        if count == 0 {
            return;
        }
        if told.ended_leases.len() >= NAMES_MAX {
            told.ended_leases.clear();
        }
        told.ended_leases.insert(name.to_owned(), count);
    }

    /// Returns whether losses were counted since the latest lease of this name ended or, without such a lease, since the file
    /// was opened.
    pub(super) fn has_unreported_for(&self, name: &str) -> bool {
        let told = self.lock();
        told.count > told.ended_leases.get(name).copied().unwrap_or_default()
    }
}
