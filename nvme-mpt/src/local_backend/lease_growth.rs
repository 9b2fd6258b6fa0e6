//! Growth of a lease, which was requested by size, while its guest uses it.
//!
//! 1. The ledger stores the added extents.
//! 2. The host controller opens them for the lease. Data of other leases in them is wiped.
//! 3. The shadow queues adopt the blocks with the next table of the VM's memory.
//! 4. The guest gets an event that its namespace has changed.
//!
//! If a step fails, the guest keeps its old size, and the next attempt continues with that step.

use std::sync::PoisonError;
use std::sync::atomic::AtomicBool;

use nvme_guest::backend::GUEST_NSID;
use nvme_guest::event::{DriveEvent, IoQueueEvent};
use nvme_lease::range::{BlockRange, ByteRange};
use nvme_lease::{Lease, LeaseError};
use nvme_spec::ids::Lba;

use super::LocalBackend;
use crate::drive::Drive;
use crate::drive::HostLeaseError;
use crate::shadow::{LeasedBlocks, NamespaceIds};
use crate::wipe::{WipeError, wipe_open_lease};

/// Reason why a lease cannot grow.
#[derive(Debug, thiserror::Error)]
pub enum GrowError {
    /// The ledger refuses the growth.
    #[error(transparent)]
    Lease(#[from] LeaseError),
    /// The host controller does not open the added extents for the lease.
    #[error("Lease \"{id}\" cannot be given {range}")]
    Host {
        /// Identifier of the lease.
        id: String,
        /// Bytes of the drive that it does not open.
        range: ByteRange,
        /// Reason of the host controller.
        source: HostLeaseError,
    },
    /// The lease cannot grow, because leases of its drive are one contiguous range of a fixed size.
    #[error(
        "Lease \"{0}\" cannot grow, as leases of its drive have a fixed size: add a larger lease"
    )]
    FixedSize(String),
    /// An extent of the lease is not a multiple of the ledger's smallest extent (unit). Addresses could not be translated.
    #[error(
        "The extents of lease \"{0}\" are not whole units of it; the ledger was changed by hand"
    )]
    PartialUnits(String),
    /// The added extents have data of another lease, which cannot be wiped.
    #[error(transparent)]
    Wipe(#[from] WipeError),
}

/// Progress of a lease's growth.
#[derive(Debug)]
pub(super) struct LeaseGrowth {
    /// Number of the lease's blocks that are open at the host controller.
    granted_blocks: u64,
}

impl From<u64> for LeaseGrowth {
    fn from(given: u64) -> Self {
        Self {
            granted_blocks: given,
        }
    }
}

/// Returns the number of blocks of a unit, the smallest extent of a lease that was requested by size. Returns `None` for a
/// lease that was requested as a range.
pub(super) fn unit_blocks(drive: &Drive, lease: &Lease) -> Option<u64> {
    lease.unit().map(|unit| unit >> drive.lba_shift())
}

impl LocalBackend {
    /// Grows a lease, which was requested by size, to `bytes`. The call takes as long as wiping the added blocks, and reports
    /// the new size to the guest at its end. After `stop` is set, no further block is wiped.
    ///
    /// # Errors
    /// See [`GrowError`]. The guest keeps its old size after an error.
    pub fn grow(&self, bytes: u64, stop: &AtomicBool) -> Result<(), GrowError> {
        // Locked until all steps are done.
        let mut growth = self.growth.lock().unwrap_or_else(PoisonError::into_inner);
        let (lease, drive, host) = (self.lease(), self.drive(), self.open_lease.host());
        let shift = drive.lba_shift();
        if drive.controller().lease_unit_bytes().is_some() && bytes > lease.extents().length() {
            return Err(GrowError::FixedSize(lease.id().to_owned()));
        }
        lease
            .grow(bytes)
            .map_err(|error| drive.lease_error(error))?;
        for part in extents_after(&lease.blocks(), growth.granted_blocks) {
            if let Err(source) = host.add_part(part) {
                // The extents are unused, except for those that the host controller has opened already.
                let given = growth.granted_blocks << shift;
                if let Err(error) = lease.truncate(given) {
                    log::error!(
                        lease = lease.id();
                        "Lease {} keeps extents that it cannot use: {error}",
                        lease.id()
                    );
                }
                return Err(GrowError::Host {
                    id: lease.id().to_owned(),
                    range: part.bytes(shift),
                    source,
                });
            }
            growth.granted_blocks += part.blocks;
        }
        wipe_open_lease(drive, lease, host, stop)?;
        let nsids = NamespaceIds {
            guest: GUEST_NSID,
            host: lease.nsid(),
        };
        let blocks = LeasedBlocks::new(nsids, shift, &lease.blocks(), unit_blocks(drive, lease));
        let blocks = blocks.ok_or_else(|| GrowError::PartialUnits(lease.id().to_owned()))?;
        if blocks != *self.context.blocks() {
            self.context.set_blocks(blocks);
            self.window.republish_table();
            let changed = DriveEvent::NamespaceChanged(lease.nsid());
            self.context.events.report(IoQueueEvent::Drive(changed));
        }
        Ok(())
    }
}

/// Returns the extents of a lease without its first `given` blocks.
fn extents_after(parts: &[BlockRange], given: u64) -> Vec<BlockRange> {
    let mut skip = given;
    let parts = parts.iter().filter_map(|part| {
        let skipped = skip.min(part.blocks);
        skip -= skipped;
        (skipped < part.blocks).then(|| BlockRange {
            start: Lba(part.start.0 + skipped),
            blocks: part.blocks - skipped,
        })
    });
    parts.collect()
}
