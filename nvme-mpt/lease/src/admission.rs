//! Rules for granting a lease.

use super::by_size;
use super::holder::LeaseSlot;
use super::lease_entry::LeaseEntry;
use super::ledger_store::{LedgerRecord, LedgerRecords, LedgerStoreError};
use super::outcome::{AdmittedLease, LeaseRefusal};
use super::range_owners::{self, PreviousDataPolicy};
use super::request::{LeaseRequest, RequestedBytes};
use crate::backing_id::HostDisks;
use crate::backing_id::backing_extent::{self, DriveByteRange};
use crate::backing_id::nvme_names;
use crate::range::ByteRange;

/// Decides about `request`. A request is refused if a lease has its id or overlaps its range. The exception is a lease of
/// this id and exactly this range of this drive whose holder died: it is taken over, and the result has its slot. A request
/// is also refused if the range has data of another id, unless the request says what to do with the data.
///
/// A lease by size gets the extents that its id already has, and then free allocation units (`by_size`).
pub(super) fn admit(
    records: &LedgerRecords,
    request: &LeaseRequest<'_>,
    is_held: impl Fn(LeaseSlot) -> Result<bool, LedgerStoreError>,
) -> Result<AdmittedLease, LeaseRefusal> {
    if let Some(earlier) = records.find_earlier(request, HostDisks::query) {
        return Err(LeaseRefusal::Earlier(earlier));
    }
    records.check_known_drive(request)?;
    if records.has_temporary_name(request) {
        return Err(LeaseRefusal::NoPersistentName);
    }
    match request.wanted {
        RequestedBytes::Range(range) => admit_range(records, request, range, is_held),
        RequestedBytes::Size { bytes, unit, whole } => {
            let demand = by_size::SizeDemand { bytes, unit, whole };
            by_size::admit(records, &request.target(), demand, is_held)
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
            || had_range(record, request, range);
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
    if let Some(whole) = by_size::find_split_lease(records, &request.target(), range) {
        return Err(LeaseRefusal::Split(range, whole));
    }
    let place = request.target().candidate(range, None);
    if request.previous_data == PreviousDataPolicy::Refused
        && let Some(left) = range_owners::find_blocking(&records.owners, &place)
    {
        return Err(LeaseRefusal::OthersData(range, left));
    }
    Ok(AdmittedLease {
        taken_over,
        extents: range.into(),
        previous: None,
    })
}

/// Returns whether the recorded lease and the request have the same range, on drives whose names are of different boots of the
/// host. The drives are then taken for the same drive. The operator has said that they are: without this decision, an earlier
/// check would have refused the request.
fn had_range(record: &LedgerRecord, request: &LeaseRequest<'_>, range: ByteRange) -> bool {
    let boots = [record.drive.as_str(), request.drive.name].map(backing_extent::drive_boot_id);
    matches!(boots, [Some(theirs), Some(ours)] if theirs != ours)
        && record.extents.single() == Some(range)
}

/// Returns whether the recorded lease has a byte of the requested range. Stored bytes are compared rather than names,
/// because a disk and its partition have different names but common bytes.
fn overlaps(record: &LedgerRecord, request: &LeaseRequest<'_>, range: ByteRange) -> bool {
    let (theirs, their_nsid) = nvme_names::as_block_device(&record.drive, record.nsid);
    let (ours, our_nsid) = nvme_names::as_block_device(request.drive.name, request.nsid.0);
    let mut parts = record.extents.parts().iter();
    their_nsid == our_nsid
        && parts.any(|part| {
            backing_extent::do_overlap(drive_range(&theirs, *part), drive_range(&ours, range))
        })
}

const fn drive_range(drive: &str, range: ByteRange) -> DriveByteRange<'_> {
    DriveByteRange { drive, range }
}

/// Returns whether the recorded lease has exactly the bytes of the requested range.
fn has_same_bytes(record: &LedgerRecord, request: &LeaseRequest<'_>, range: ByteRange) -> bool {
    let (theirs, _) = nvme_names::as_block_device(&record.drive, record.nsid);
    let (ours, _) = nvme_names::as_block_device(request.drive.name, request.nsid.0);
    let only = record.extents.single();
    only.is_some_and(|only| {
        backing_extent::are_same_bytes(drive_range(&theirs, only), drive_range(&ours, range))
    })
}
