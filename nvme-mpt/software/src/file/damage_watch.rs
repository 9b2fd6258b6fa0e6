//! Detection of changes of a drive's file by other processes: truncation, removal, or replacement.
//!
//! No interface of the kernel prevents the truncation of a file. So a batch of commands with a write checks the file's size
//! first. The control thread checks the size and the path periodically.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, Weak};

use log::error;

use super::kernel::{MetadataExt, metadata};
use super::{LeasedFile, SharedFile};
use nvme_mpt_memory::sync::Mutex;

/// Watch of a drive's file for damage by other processes. A block device cannot be damaged in these ways.
#[derive(Debug)]
pub(super) struct FileDamageWatch {
    is_regular: bool,
    /// Smallest size that the file has had at a check, in bytes. Bytes beyond this size have lost their content, even if the
    /// file has grown since.
    min_size_bytes: AtomicU64,
    is_replaced: AtomicBool,
    leases: Mutex<Vec<Weak<LeasedFile>>>,
}

impl FileDamageWatch {
    pub(super) fn new(regular: bool, bytes: u64) -> Self {
        Self {
            is_regular: regular,
            min_size_bytes: AtomicU64::new(bytes),
            is_replaced: AtomicBool::new(false),
            leases: Mutex::default(),
        }
    }

    /// Registers a lease of the file, to which damage is reported.
    pub(super) fn register(&self, lease: &Arc<LeasedFile>) {
        let mut leases = self.leases.lock().unwrap_or_else(PoisonError::into_inner);
        leases.retain(|lease| lease.strong_count() > 0);
        leases.push(Arc::downgrade(lease));
    }

    /// Returns whether the bytes before `end` have existed since the file was opened, so that no truncation has erased them.
    #[inline]
    pub(super) fn is_intact_until(&self, end: u64) -> bool {
        end <= self.min_size_bytes.load(Ordering::Relaxed)
    }

    /// Returns whether other processes can truncate, remove or replace the file.
    pub(super) const fn can_change(&self) -> bool {
        self.is_regular
    }

    /// Returns whether the file's path leads to another file, or to no file.
    pub(super) fn is_replaced(&self) -> bool {
        self.is_replaced.load(Ordering::Relaxed)
    }

    /// Returns all leases of the file.
    pub(super) fn leases(&self) -> Vec<Arc<LeasedFile>> {
        let leases = self.leases.lock().unwrap_or_else(PoisonError::into_inner);
        leases.iter().filter_map(Weak::upgrade).collect()
    }

    fn report_damage(&self) {
        for lease in self.leases() {
            lease.report_damage();
        }
    }
}

impl SharedFile {
    /// Checks whether the file was truncated, and reports that to its leases.
    pub(super) fn check_size(&self) {
        if !self.damage_watch.is_regular {
            return;
        }
        // The call fails for an open file only if the file system is broken. All I/O fails then.
        let Ok(metadata) = self.open_file.metadata() else {
            return;
        };
        let bytes = metadata.len();
        let before = self
            .damage_watch
            .min_size_bytes
            .fetch_min(bytes, Ordering::Relaxed);
        if bytes < before {
            error!(
                "The file {} was cut short from {before} to {bytes} bytes while it is served. What lay behind is \
                 lost, and is neither read nor written until the drive is reopened",
                self.path.display()
            );
            self.damage_watch.report_damage();
        }
    }

    /// Checks whether the file's path leads to another file or to none, and reports that to the file's leases.
    pub(super) fn check_path(&self) {
        if !self.damage_watch.is_regular || self.damage_watch.is_replaced() {
            return;
        }
        let Ok(opened) = self.open_file.metadata() else {
            return;
        };
        let replaced = match metadata(&self.path) {
            Ok(found) => (found.dev(), found.ino()) != (opened.dev(), opened.ino()),
            // A sandbox may hide the path, so an error other than NotFound does not show a removal.
            Err(error) => error.kind() == io::ErrorKind::NotFound,
        };
        if replaced && !self.damage_watch.is_replaced.swap(true, Ordering::Relaxed) {
            error!(
                "The file {} was removed or replaced while it is served. Guests continue with the opened file, which \
                 may have no name left and be lost when the last of them ends",
                self.path.display()
            );
            self.damage_watch.report_damage();
        }
    }
}
