//! Namespace of a drive from which an id leases parts.

use nvme_spec::ids::Nsid;

use super::store::LedgerRecord;
use super::tenants::{self, LocatedRangeOwner, RangeCandidate, RangeOwner};
use crate::origin::extent::{self, DriveByteRange};
use crate::origin::nvme;
use crate::range::ByteRange;

/// Namespace of a drive, and the id that leases parts of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct LeaseTarget<'a> {
    pub(super) id: &'a str,
    pub(super) drive: &'a str,
    pub(super) nsid: Nsid,
    /// Size of the namespace in bytes.
    pub(super) capacity: u64,
}

impl<'a> LeaseTarget<'a> {
    /// Returns `range` of this namespace as a candidate for the id. `at` is the offset of `range` within a lease by size.
    pub(super) fn place(&self, range: ByteRange, at: Option<u64>) -> RangeCandidate<'a> {
        RangeCandidate {
            id: self.id,
            drive: self.drive,
            nsid: self.nsid.0,
            range,
            at,
        }
    }

    /// Returns the whole namespace as a candidate for the id; `None` if the namespace has no blocks.
    pub(super) fn all(&self) -> Option<RangeCandidate<'a>> {
        let range = ByteRange::new(0, self.capacity).ok()?;
        Some(self.place(range, None))
    }

    /// Returns the bytes of the area that may belong to a lease.
    pub(super) fn shared_with(&self, record: &LedgerRecord) -> Vec<ByteRange> {
        let (theirs, their_nsid) = nvme::as_block_device(&record.drive, record.nsid);
        let (ours, our_nsid) = nvme::as_block_device(self.drive, self.nsid.0);
        match self.all() {
            Some(all) if their_nsid == our_nsid => {
                let ours = DriveByteRange {
                    drive: &ours,
                    range: all.range,
                };
                extent::shared(ours, &theirs, record.extents.parts())
            }
            _ => Vec::new(),
        }
    }

    /// Returns the entries of previous owners in the area.
    pub(super) fn found<'t>(&self, tenants: &'t [RangeOwner]) -> Vec<LocatedRangeOwner<'t>> {
        let all = self.all();
        all.map_or_else(Vec::new, |all| tenants::find(tenants, &all))
    }
}
