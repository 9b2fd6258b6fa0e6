//! Spare open file descriptions of a local back end's lease, which the supervisor process holds while the lease is held.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use log::{error, warn};
use nvme_lease::Lease;

use crate::drive::{Drive, HostLease, SpareDescriptorStore};

/// Spare file descriptions that the supervisor process holds for one lease. When this is dropped, they are closed unless the
/// function continues without the back end.
#[derive(Debug)]
pub(super) struct SpareDescriptors {
    store: Arc<dyn SpareDescriptorStore>,
    drive: Arc<Drive>,
    lease: String,
    /// True if the function continues without this back end, so that the descriptions stay open.
    is_retained: AtomicBool,
}

impl SpareDescriptors {
    /// Loads the spare descriptions that the supervisor process has for a lease, if its function continues from another process
    /// (`continues`). If there are none, or if they cannot be used, opens new ones and stores them with the supervisor. Returns
    /// `None` if the lease needs none, or if they cannot be opened.
    ///
    /// If `continues` is true, the descriptions stay with the supervisor when the result is dropped, until
    /// [`Self::forget_on_drop`] is called: if this back end cannot be created, the function may continue without it.
    pub(super) fn restore_or_create(
        supervisor: Arc<dyn SpareDescriptorStore>,
        drive: &Arc<Drive>,
        lease: &Lease,
        host: &dyn HostLease,
        continues: bool,
    ) -> Option<Self> {
        let (identity, id) = (drive.identity().name, lease.id());
        let spare = Self {
            store: supervisor.clone(),
            drive: drive.clone(),
            lease: id.to_owned(),
            is_retained: AtomicBool::new(continues),
        };
        let spares = match continues {
            true => supervisor.load(identity, id),
            false => Vec::new(),
        };
        if !spares.is_empty() {
            match host.restore_spare_fds(spares) {
                Ok(true) => return Some(spare),
                Ok(false) => warn!(
                    lease = id;
                    "Lease {id} is in another file than under the previous server: whether the old file lost writes \
                     is not known"
                ),
                Err(error) => warn!(
                    lease = id;
                    "Cannot check whether the previous server lost writes of lease {id}: {error}"
                ),
            }
        }
        match host.open_spare_fds() {
            Ok(opened) if !opened.is_empty() => {
                supervisor.store(identity, id, &opened);
                return Some(spare);
            }
            Ok(_) => {}
            Err(error) => error!(
                lease = id;
                "If this server is killed, a lost write of lease {id} may go unreported: its file cannot be opened \
                 for the next server: {error}"
            ),
        }
        // The next server must not get an entry that no lease uses.
        spare.forget_on_drop();
        None
    }

    /// Lets the descriptions be closed when this is dropped, because the function ends with this back end.
    pub(super) fn forget_on_drop(&self) {
        self.is_retained.store(false, Ordering::Relaxed);
    }

    /// Lets the descriptions stay open when this is dropped, because the function continues in this process or in a successor.
    pub(super) fn retain_on_drop(&self) {
        self.is_retained.store(true, Ordering::Relaxed);
    }
}

impl Drop for SpareDescriptors {
    fn drop(&mut self) {
        if !self.is_retained.load(Ordering::Relaxed) {
            self.store.forget(self.drive.identity().name, &self.lease);
        }
    }
}
