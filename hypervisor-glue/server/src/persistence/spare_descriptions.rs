//! Spare open file descriptions of leases' files, held by the supervisor. After a crash, the next server checks them for
//! write errors, which the kernel reports to each open file description once, and which the predecessor may not have seen.
//!
//! Each entry is named after its lease. VMMs never get these descriptors.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use nvme_lease::backing_id::start_location;
use nvme_mpt::Drive;
use nvme_mpt::drive::SpareDescriptorStore;
use nvme_mpt_supervise::FdStoreError;
use nvme_mpt_vmm::report;

use super::fd_store_registry::{FdStoreRegistry, MISSING_SPARE_EFFECT, SPARE_PREFIX};
use super::fnv1a_hash;

/// Spare descriptors of leases' files, stored with the supervisor. If the server dies, the next one finds unreported write
/// errors by them.
#[derive(Debug)]
pub(crate) struct SpareDescriptions {
    registry: Arc<FdStoreRegistry>,
    /// True once the successor owns the entries, so that this process must not change them.
    is_handed_over: AtomicBool,
}

/// Returns the prefix of the entries' names for the leases of a drive.
fn drive_prefix(drive: &str) -> String {
    // Half of a hash is enough: if two drives have the same prefix, entries of one stay longer than needed. The hash is of the
    // drive's location, which stays when the drive grows, and not of its identity.
    format!(
        "{SPARE_PREFIX}{:08x}-",
        fnv1a_hash(&start_location(drive)) >> 32
    )
}

/// Returns the name under which the supervisor stores a lease's spare descriptors. The name must be short, since the supervisor
/// passes all names in one environment variable.
fn lease_entry_name(drive: &str, lease: &str) -> String {
    format!("{}{:016x}", drive_prefix(drive), fnv1a_hash(lease))
}

impl SpareDescriptions {
    pub(super) fn new(registry: Arc<FdStoreRegistry>) -> Self {
        let is_over = AtomicBool::new(false);
        Self {
            registry,
            is_handed_over: is_over,
        }
    }

    /// If `is_over` is set, stops all changes of the entries, because the successor owns them from now on. Otherwise, allows
    /// changes again.
    pub(crate) fn set_handed_over(&self, is_over: bool) {
        self.is_handed_over.store(is_over, Ordering::Release);
    }

    fn is_handed_over(&self) -> bool {
        self.is_handed_over.load(Ordering::Acquire)
    }

    /// Removes the entries of all drives except those in `open`, since no function will use them.
    pub(crate) fn forget_other_drives(&self, open: &[Arc<Drive>]) {
        if self.is_handed_over() {
            return;
        }
        let open: Vec<String> = open
            .iter()
            .map(|drive| drive_prefix(drive.identity().name))
            .collect();
        let mut names = self.registry.names(SPARE_PREFIX);
        names.retain(|name| !open.iter().any(|prefix| name.starts_with(prefix)));
        self.forget_all(&names);
    }

    fn forget_all(&self, names: &[String]) {
        if names.is_empty() {
            return;
        }
        let forget = || -> Result<(), FdStoreError> {
            names
                .iter()
                .try_for_each(|name| self.registry.forget(name))?;
            self.registry.await_supervisor()
        };
        if let Err(error) = forget() {
            log::error!(
                "Cannot remove files of ended leases from the supervisor: {}",
                report::chain(&error)
            );
        }
    }
}

impl SpareDescriptorStore for SpareDescriptions {
    fn load(&self, drive: &str, lease: &str) -> Vec<OwnedFd> {
        let loaded = self.registry.descriptors(&lease_entry_name(drive, lease));
        loaded.unwrap_or_else(|error| {
            log::error!(
                "Cannot check whether the previous server lost writes of lease {lease}: {}",
                report::chain(&error)
            );
            Vec::new()
        })
    }

    fn store(&self, drive: &str, lease: &str, spare: &[OwnedFd]) {
        if self.is_handed_over() {
            return;
        }
        let name = lease_entry_name(drive, lease);
        let descriptors: Vec<_> = spare.iter().map(AsFd::as_fd).collect();
        // The supervisor would add the descriptors to those that it has under this name, perhaps from an earlier server. So
        // these are removed first.
        let stored = self
            .registry
            .forget(&name)
            .and_then(|()| self.registry.store_descriptors(&name, &descriptors));
        match stored {
            Ok(true) => {}
            Ok(false) => {
                log::warn!(
                    "The supervisor's store is full and cannot take {name} of lease {lease}: {MISSING_SPARE_EFFECT}"
                )
            }
            Err(error) => log::error!(
                "Cannot store {name} of lease {lease} in the supervisor: {MISSING_SPARE_EFFECT}: {}",
                report::chain(&error)
            ),
        }
    }

    fn forget(&self, drive: &str, lease: &str) {
        let name = lease_entry_name(drive, lease);
        if !self.is_handed_over() && self.registry.names(&name).contains(&name) {
            self.forget_all(&[name]);
        }
    }
}
