//! Count of the write-back errors that leases of a file have received.
//!
//! After an open file description has received the report of a failed write-back, the kernel does not report this error to
//! descriptions that are opened afterwards. A process that continues the leases of its predecessor opens them one after the
//! other. So when it opens a lease, another lease may already have received the report of an error that lost writes of the
//! opened lease. Therefore errors are counted for the file, and a continued lease checks whether the count has risen.

use std::collections::BTreeMap;
use std::sync::PoisonError;

use nvme_mpt_memory::sync::{Mutex, MutexGuard};

/// Maximum number of lease names that are remembered. If there are more, all are forgotten, and their leases count as having
/// received no error.
const NAMES_MAX: usize = 1024;

/// Count of the write-back errors that leases of one file have received in this process.
#[derive(Debug, Default)]
pub(super) struct FileWriteErrors(Mutex<ReportedWriteErrors>);

#[derive(Debug, Default)]
struct ReportedWriteErrors {
    count: u64,
    /// Number of errors at the end of the last lease of each name. Leases that ended before the first error are left out.
    ended_leases: BTreeMap<String, u64>,
}

impl FileWriteErrors {
    fn lock(&self) -> MutexGuard<'_, ReportedWriteErrors> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts an error that a lease has received. The caller then checks all open leases of the file.
    pub(super) fn count_error(&self) {
        self.lock().count += 1;
    }

    /// Records that a lease has ended. It has received all errors so far.
    pub(super) fn end_lease(&self, name: &str) {
        let mut reported = self.lock();
        let count = reported.count;
        if count == 0 {
            return;
        }
        if reported.ended_leases.len() >= NAMES_MAX {
            reported.ended_leases.clear();
        }
        reported.ended_leases.insert(name.to_owned(), count);
    }

    /// Returns whether errors were counted since the last lease of this name ended. If there was no such lease, returns whether
    /// errors were counted since the file was opened.
    pub(super) fn has_unreported_for(&self, name: &str) -> bool {
        let reported = self.lock();
        reported.count > reported.ended_leases.get(name).copied().unwrap_or_default()
    }
}
