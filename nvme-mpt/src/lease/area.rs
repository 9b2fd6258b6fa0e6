//! Namespace of a drive from which an id leases parts.

use super::store::Record;
use super::tenants::{self, Found, Place, Tenant};
use crate::origin::extent::{self, Stretch};
use crate::origin::nvme;
use crate::range::ByteRange;
use crate::spec::ids::Nsid;

/// Namespace of a drive, and the id that leases parts of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Area<'a> {
    pub(super) id: &'a str,
    pub(super) drive: &'a str,
    pub(super) nsid: Nsid,
    /// Size of the namespace in bytes.
    pub(super) capacity: u64,
}

impl<'a> Area<'a> {
    /// Returns the place of `range` in the area. `at` is its offset within a lease by size.
    pub(super) fn place(&self, range: ByteRange, at: Option<u64>) -> Place<'a> {
        Place {
            id: self.id,
            drive: self.drive,
            nsid: self.nsid.0,
            range,
            at,
        }
    }

    /// Returns the place of the whole namespace; `None` if it is empty.
    pub(super) fn all(&self) -> Option<Place<'a>> {
        let range = ByteRange::new(0, self.capacity).ok()?;
        Some(self.place(range, None))
    }

    /// Returns the bytes of the area that may belong to a lease.
    pub(super) fn shared_with(&self, record: &Record) -> Vec<ByteRange> {
        let (theirs, their_nsid) = nvme::as_block_device(&record.drive, record.nsid);
        let (ours, our_nsid) = nvme::as_block_device(self.drive, self.nsid.0);
        match self.all() {
            Some(all) if their_nsid == our_nsid => {
                let ours = Stretch {
                    drive: &ours,
                    range: all.range,
                };
                extent::shared(ours, &theirs, record.extents.parts())
            }
            _ => Vec::new(),
        }
    }

    /// Returns the entries of previous owners in the area.
    pub(super) fn found<'t>(&self, tenants: &'t [Tenant]) -> Vec<Found<'t>> {
        let all = self.all();
        all.map_or_else(Vec::new, |all| tenants::find(tenants, &all))
    }
}
