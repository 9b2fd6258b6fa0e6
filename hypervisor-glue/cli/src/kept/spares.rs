//! Spare descriptions of the files of leases, of which no process but the keeper's next server makes use.
//!
//! They have the names of their leases. A VMM never gets one.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use nvme_mpt::Drive;
use nvme_mpt::drive::SpareKeeper;
use nvme_mpt::origin::beginning;
use nvme_mpt_keep::KeepError;
use nvme_mpt_vmm::report;

use super::hash;
use super::registry::{LEFT_OUT, Registry, SPARE};

/// Spare descriptions in the keeper.
#[derive(Debug)]
pub(crate) struct Spares {
    registry: Arc<Registry>,
    /// The next server owns the entries.
    is_over: AtomicBool,
}

/// Returns the beginning of the names of a drive's leases.
fn prefix_of(drive: &str) -> String {
    // Half of a hash does: drives that share one have their entries longer. The identity may change while the drive is the same.
    format!("{SPARE}{:08x}-", hash(&beginning(drive)) >> 32)
}

/// Returns a lease's name, which is short: the keeper passes all names on in one variable.
fn name_of(drive: &str, lease: &str) -> String {
    format!("{}{:016x}", prefix_of(drive), hash(lease))
}

impl Spares {
    pub(super) fn new(registry: Arc<Registry>) -> Self {
        let is_over = AtomicBool::new(false);
        Self { registry, is_over }
    }

    /// Stops all changes in the keeper if `is_over` is set: the next server owns its entries.
    pub(crate) fn leave(&self, is_over: bool) {
        self.is_over.store(is_over, Ordering::Release);
    }

    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }

    /// Drops the entries of drives that are not open: no function will use them again.
    pub(crate) fn forget_drives_but(&self, open: &[Arc<Drive>]) {
        if self.is_over() {
            return;
        }
        let open: Vec<String> = open
            .iter()
            .map(|drive| prefix_of(drive.identity().name))
            .collect();
        let mut names = self.registry.names(SPARE);
        names.retain(|name| !open.iter().any(|prefix| name.starts_with(prefix)));
        self.forget_all(&names);
    }

    fn forget_all(&self, names: &[String]) {
        if names.is_empty() {
            return;
        }
        let forget = || -> Result<(), KeepError> {
            names
                .iter()
                .try_for_each(|name| self.registry.forget(name))?;
            self.registry.await_keeper()
        };
        if let Err(error) = forget() {
            log::error!(
                "The keeper may have files of leases open that have ended: {}",
                report::chain(&error)
            );
        }
    }
}

impl SpareKeeper for Spares {
    fn kept(&self, drive: &str, lease: &str) -> Vec<OwnedFd> {
        let kept = self.registry.descriptors(&name_of(drive, lease));
        kept.unwrap_or_else(|error| {
            log::error!(
                "Writes of lease {lease} that the server before lost cannot be asked for: {}",
                report::chain(&error)
            );
            Vec::new()
        })
    }

    fn keep(&self, drive: &str, lease: &str, spare: &[OwnedFd]) {
        if self.is_over() {
            return;
        }
        let name = name_of(drive, lease);
        let descriptors: Vec<_> = spare.iter().map(AsFd::as_fd).collect();
        // The keeper adds to what it has of a name, also from a server that this one does not know of.
        let kept = self
            .registry
            .forget(&name)
            .and_then(|()| self.registry.keep(&name, &descriptors));
        match kept {
            Ok(true) => {}
            Ok(false) => {
                log::warn!("The keeper has no room for {name} of lease {lease}: {LEFT_OUT}")
            }
            Err(error) => log::error!(
                "The keeper has not {name} of lease {lease}: {LEFT_OUT}: {}",
                report::chain(&error)
            ),
        }
    }

    fn forget(&self, drive: &str, lease: &str) {
        let name = name_of(drive, lease);
        if !self.is_over() && self.registry.names(&name).contains(&name) {
            self.forget_all(&[name]);
        }
    }
}
