//! Rules for granting a lease.

use super::by_size;
use super::entry::LeaseEntry;
use super::holder::LeaseSlot;
use super::outcome::{AdmittedLease, LeaseRefusal};
use super::request::{LeaseRequest, RequestedBytes};
use super::store::{LedgerRecord, LedgerRecords, LedgerStoreError};
use super::tenants::{self, PreviousDataPolicy};
use crate::origin::HostDisks;
use crate::origin::extent::{self, DriveByteRange};
use crate::origin::nvme;
use crate::range::ByteRange;

/// Decides about `request`. A request is refused if a lease has the same id or overlaps the range. The exception is a lease
/// with the same id and the same range of the same drive whose holder died: it is taken over, and this returns its slot. Data
/// of another id in the range also refuses the request, unless the request says what to do with the data.
///
/// A lease by size gets the extents that its id had, and free allocation units (`by_size`).
pub(super) fn admit(
    records: &LedgerRecords,
    request: &LeaseRequest<'_>,
    is_held: impl Fn(LeaseSlot) -> Result<bool, LedgerStoreError>,
) -> Result<AdmittedLease, LeaseRefusal> {
    if let Some(earlier) = records.find_earlier(request, HostDisks::now) {
        return Err(LeaseRefusal::Earlier(earlier));
    }
    records.check_known(request)?;
    if records.is_unlasting(request) {
        return Err(LeaseRefusal::Unlasting);
    }
    match request.wanted {
        RequestedBytes::At(range) => admit_range(records, request, range, is_held),
        RequestedBytes::Size { bytes, unit, whole } => {
            let demand = by_size::SizeDemand { bytes, unit, whole };
            by_size::admit(records, &request.area(), demand, is_held)
        }
    }
}

fn admit_range(
    records: &LedgerRecords,
    request: &LeaseRequest<'_>,
    range: ByteRange,
    is_held: impl Fn(LeaseSlot) -> Result<bool, LedgerStoreError>,
) -> Result<AdmittedLease, LeaseRefusal> {
    let mut taken_over = None;
    for record in &records.leases {
        let overlaps = overlaps(record, request, range);
        let same_id = record.id == request.id;
        if !overlaps && !same_id {
            continue;
        }
        let held = is_held(LeaseSlot(record.slot)).map_err(LeaseRefusal::Store)?;
        let is_it = (overlaps && has_same_bytes(record, request, range))
            || was_at_range(record, request, range);
        if same_id && is_it && !held {
            taken_over = Some(LeaseSlot(record.slot));
        } else if overlaps {
            return Err(LeaseRefusal::Overlap(
                range,
                LeaseEntry::new(record, held).into(),
            ));
        } else {
            return Err(LeaseRefusal::IdTaken(LeaseEntry::new(record, held).into()));
        }
    }
    if let Some(whole) = by_size::torn_by(records, &request.area(), range) {
        return Err(LeaseRefusal::Torn(range, whole));
    }
    let place = request.area().place(range, None);
    if request.former_data == PreviousDataPolicy::Refused
        && let Some(left) = tenants::in_the_way(&records.tenants, &place)
    {
        return Err(LeaseRefusal::OthersData(range, left));
    }
    Ok(AdmittedLease {
        taken_over,
        extents: range.into(),
        former: None,
    })
}

/// Returns whether the recorded lease and the request have the same range, on drives whose names are of different boots of the
/// host. The drive may be the same: the operator has decided so, because otherwise the request would have been refused before.
fn was_at_range(record: &LedgerRecord, request: &LeaseRequest<'_>, range: ByteRange) -> bool {
    let boots = [record.drive.as_str(), request.drive.name].map(extent::boot_of_drive);
    matches!(boots, [Some(theirs), Some(ours)] if theirs != ours)
        && record.extents.only() == Some(range)
}

/// Returns whether the recorded lease has a byte of the requested range. The stored bytes are compared, because a disk and its
/// partition are drives with different names but common bytes.
fn overlaps(record: &LedgerRecord, request: &LeaseRequest<'_>, range: ByteRange) -> bool {
    let (theirs, their_nsid) = nvme::as_block_device(&record.drive, record.nsid);
    let (ours, our_nsid) = nvme::as_block_device(request.drive.name, request.nsid.0);
    let mut parts = record.extents.parts().iter();
    their_nsid == our_nsid
        && parts.any(|part| extent::overlap(stretch(&theirs, *part), stretch(&ours, range)))
}

const fn stretch(drive: &str, range: ByteRange) -> DriveByteRange<'_> {
    DriveByteRange { drive, range }
}

/// Returns whether the recorded lease has exactly the bytes of the requested range.
fn has_same_bytes(record: &LedgerRecord, request: &LeaseRequest<'_>, range: ByteRange) -> bool {
    let (theirs, _) = nvme::as_block_device(&record.drive, record.nsid);
    let (ours, _) = nvme::as_block_device(request.drive.name, request.nsid.0);
    let only = record.extents.only();
    only.is_some_and(|only| extent::same_bytes(stretch(&theirs, only), stretch(&ours, range)))
}
