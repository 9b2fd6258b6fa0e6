//! Holdings of an attachment on its drive, given back when nothing works on it any more.

use std::io;
use std::sync::Arc;

use crate::drive::Drive;
use crate::host::{Claim, HostLease};
use crate::lease::Lease;

/// A lease with its range lock and its drive.
///
/// The attachment, each of its shadow queues and each flush own a share of it. So the lease lives until
/// its last command has ended, whoever gave up waiting for that.
#[derive(Debug)]
pub(crate) struct Holding {
    // Dropped before the lease: whoever gets the lease next finds the range unlocked.
    _claim: Claim,
    pub(super) lease: Lease,
    host: HostLease,
    pub(super) drive: Arc<Drive>,
}

impl Holding {
    pub(super) fn new(lease: Lease, claim: Claim, host: HostLease, drive: Arc<Drive>) -> Self {
        Self {
            _claim: claim,
            lease,
            host,
            drive,
        }
    }

    /// Returns the host controller's share for the lease alone.
    pub(super) fn host(&self) -> &HostLease {
        &self.host
    }

    /// Makes everything durable that was completed until now. It takes as long as the drive does.
    pub(super) fn flush(&self) -> io::Result<()> {
        let controller = self.drive.controller();
        controller.flush(self.drive.namespace(), &self.host)
    }

    /// A lease of a drive that keeps nothing.
    #[cfg(test)]
    pub(crate) fn of_nothing() -> Self {
        use crate::drive::{DriveOptions, DrivePath};
        use crate::lease::{FormerData, LeaseRequest, Ledger};

        let drive = Drive::open(&DrivePath::Null(1 << 30), DriveOptions::default()).expect("opens");
        let lease = Ledger::in_process().acquire(&LeaseRequest {
            id: "test",
            drive: drive.identity(),
            nsid: drive.namespace().nsid,
            range: "0+1M".parse().expect("a range"),
            lba_shift: drive.lba_shift(),
            blocks: drive.blocks(),
            former_data: FormerData::Refused,
        });
        Self::new(
            lease.expect("free"),
            Claim::default(),
            HostLease::default(),
            drive,
        )
    }
}
