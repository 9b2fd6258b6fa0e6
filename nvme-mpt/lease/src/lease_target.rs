//! Namespace of a drive from which an id leases parts.

use nvme_spec::ids::Nsid;

use super::ledger_store::LedgerRecord;
use super::range_owners::{self, LocatedRangeOwner, RangeCandidate, RangeOwner};
use crate::backing_id::backing_extent::{self, DriveByteRange};
use crate::backing_id::nvme_names;
use crate::range::ByteRange;

/// Namespace of a drive, and the id that requests bytes of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct LeaseTarget<'a> {
    pub(super) id: &'a str,
    pub(super) drive: &'a str,
    pub(super) nsid: Nsid,
    /// Size of the namespace in bytes.
    pub(super) capacity: u64,
}

impl<'a> LeaseTarget<'a> {
    /// Returns `range` of this namespace as a range that the id requests. `at` is the range's offset within a lease by size.
    pub(super) fn candidate(&self, range: ByteRange, at: Option<u64>) -> RangeCandidate<'a> {
        RangeCandidate {
            id: self.id,
            drive: self.drive,
            nsid: self.nsid.0,
            range,
            lease_offset: at,
        }
    }

    /// Returns the whole namespace as a range that the id requests; `None` if the namespace has no blocks.
    pub(super) fn whole_candidate(&self) -> Option<RangeCandidate<'a>> {
        let range = ByteRange::new(0, self.capacity).ok()?;
        Some(self.candidate(range, None))
    }

    /// Returns the bytes of this namespace that a recorded lease may share with it.
    pub(super) fn shared_ranges(&self, record: &LedgerRecord) -> Vec<ByteRange> {
        let (theirs, their_nsid) = nvme_names::as_block_device(&record.drive, record.nsid);
        let (ours, our_nsid) = nvme_names::as_block_device(self.drive, self.nsid.0);
        match self.whole_candidate() {
            Some(all) if their_nsid == our_nsid => {
                let ours = DriveByteRange {
                    drive: &ours,
                    range: all.range,
                };
                backing_extent::shared_ranges(ours, &theirs, record.extents.parts())
            }
            _ => Vec::new(),
        }
    }

    /// Returns the ledger's entries of owners whose bytes are in this namespace.
    pub(super) fn find_owners<'t>(&self, owners: &'t [RangeOwner]) -> Vec<LocatedRangeOwner<'t>> {
        let all = self.whole_candidate();
        all.map_or_else(Vec::new, |all| range_owners::find_owners(owners, &all))
    }
}
