//! Extents of a lease by size: the extents that its id already has, followed by free ones.
//!
//! The drive is divided into units. A unit is free if it overlaps neither a lease nor data that still belongs to an id.
//! Data that was released, was given up, or is not completely wiped does not make a unit taken. It is wiped before a lease
//! uses the unit.
//!
//! The ledger stores the offset of each byte within its lease (in `owners`). So an id that returns finds its extents in
//! their order.

use std::ops::Range;

use super::allocation::{self, UnitDemand};
use super::error::LeaseError;
use super::extents::{LeaseExtents, join_adjacent};
use super::holder::LeaseSlot;
use super::lease_entry::LeaseEntry;
use super::lease_target::LeaseTarget;
use super::ledger_store::{LedgerRecords, LedgerStoreError};
use super::outcome::{
    AdmittedLease, LeaseRefusal, PreviousExtents, PreviousExtentsMismatch, PreviousLeaseBySize,
};
use super::range_owners::{self, LocatedRangeOwner, PreviousDataPolicy, RangeOwner};
use crate::range::{ByteRange, ByteSize};

/// Smallest unit of leases by size, in bytes. The size of the ledger's file grows with the number of extents.
pub const MIN_UNIT: u64 = 1 << 20;

/// Maximum number of units of a lease by size.
const MAX_UNITS: u64 = 1 << 20;

/// Checks the unit size of a lease by size.
pub(super) fn check_unit(
    unit: u64,
    lba_shift: u8,
    area: &LeaseTarget<'_>,
) -> Result<(), LeaseError> {
    let reason = if !unit.is_power_of_two() {
        let above = unit.checked_next_power_of_two().unwrap_or(1 << 63);
        let above = above.max(MIN_UNIT);
        match above / 2 {
            below if below >= MIN_UNIT => format!(
                "is not a power of two: {} and {} are",
                ByteSize(below),
                ByteSize(above)
            ),
            _ => format!("is not a power of two: {} is", ByteSize(above)),
        }
    } else if unit < MIN_UNIT {
        format!("is too small: the smallest is {}", ByteSize(MIN_UNIT))
    } else if !unit.is_multiple_of(1 << lba_shift) {
        let block = ByteSize(1 << lba_shift);
        format!("is not a multiple of the drive's logical block: use unit={block}")
    } else if area.capacity < MIN_UNIT {
        format!(
            "is larger than the drive, which has {}: lease it with range=",
            ByteSize(area.capacity)
        )
    } else if area.capacity < unit {
        format!(
            "is larger than the drive, which has {}: choose a smaller unit",
            ByteSize(area.capacity)
        )
    } else {
        return Ok(());
    };
    Err(LeaseError::Unit {
        unit: ByteSize(unit),
        reason,
    })
}

/// Checks the length of a lease by size against its unit.
pub(super) fn check_size(bytes: u64, unit: u64) -> Result<(), LeaseError> {
    let most = unit.saturating_mul(MAX_UNITS);
    let below = bytes - bytes % unit;
    let above = below.saturating_add(unit);
    let reason = if bytes < unit {
        format!("is less than a unit: use size={}", ByteSize(unit))
    } else if bytes > most {
        format!(
            "is more than {MAX_UNITS} units of {}: ask for at most {}, or choose a larger unit",
            ByteSize(unit),
            ByteSize(most)
        )
    } else if bytes != below {
        format!(
            "is not a multiple of its unit {}: {} and {} are",
            ByteSize(unit),
            ByteSize(below),
            ByteSize(above)
        )
    } else {
        return Ok(());
    };
    Err(LeaseError::Size {
        size: ByteSize(bytes),
        reason,
    })
}

/// Requested length of a lease by size, and conditions for its extents.
#[derive(Clone, Copy, Debug)]
pub(super) struct SizeDemand {
    pub(super) bytes: u64,
    /// Unit size in bytes: extents start and end at its multiples.
    pub(super) unit: u64,
    /// True if the lease must be one extent.
    pub(super) whole: bool,
}

/// Returns the extents with data of the id, which a lease by size of the id starts with. Refuses the request if the id has data
/// that does not form such a lease. Data that was released or given up is free, so it never refuses the request.
fn find_previous(
    found: &[LocatedRangeOwner<'_>],
    id: &str,
    demand: SizeDemand,
) -> Result<Option<PreviousExtents>, LeaseRefusal> {
    let own = found
        .iter()
        .filter(|found| found.owner.id == id && found.owner.is_reusable());
    let (placed, named): (Vec<&LocatedRangeOwner<'_>>, Vec<_>) =
        own.partition(|found| found.lease_offset.is_some());
    for (of, fit) in [
        (placed, in_lease_order as fn(&[&LocatedRangeOwner<'_>]) -> _),
        (named, in_drive_order),
    ] {
        let is_free = of.iter().all(|found| found.owner.is_free());
        let unfit = match fit(&of) {
            Ok(None) => continue,
            Err((ranges, unfit)) => LeaseRefusal::PreviousData(ranges, unfit),
            Ok(Some(previous)) => match previous.mismatch(demand) {
                None => return Ok(Some(previous)),
                Some(unfit) => LeaseRefusal::PreviousData(previous.extents.parts().to_vec(), unfit),
            },
        };
        if !is_free {
            return Err(unfit);
        }
    }
    Ok(None)
}

/// Returns the id's lease by size, with its options, if a lease of `range` would split it. A later request by size would not
/// find a split lease. A range does not split the lease if it starts with the lease's only extent and contains it.
pub(super) fn find_split_lease(
    records: &LedgerRecords,
    area: &LeaseTarget<'_>,
    range: ByteRange,
) -> Option<PreviousLeaseBySize> {
    let found = area.find_owners(&records.owners);
    let own = found
        .iter()
        .filter(|found| found.owner.id == area.id && found.owner.is_reusable());
    let placed: Vec<&LocatedRangeOwner<'_>> =
        own.filter(|found| found.lease_offset.is_some()).collect();
    if placed.iter().all(|found| found.owner.is_free()) {
        return None;
    }
    let extents = in_lease_order(&placed).ok()??.extents;
    let is_torn = extents.parts().iter().any(|part| part.overlaps(&range))
        && extents
            .single()
            .is_none_or(|only| only.start() != range.start() || only.length() > range.length());
    is_torn.then(|| PreviousLeaseBySize {
        unit: ByteSize(1 << alignment_bits(&extents).trailing_zeros()),
        extents,
    })
}

/// Returns the bitwise OR of the starts and lengths of all extents. Its lowest set bit is the largest power of two of which all
/// starts and lengths are multiples.
fn alignment_bits(extents: &LeaseExtents) -> u64 {
    let bits = extents.parts().iter();
    let bits = bits.map(|part| part.start() | part.length());
    bits.fold(0, |all, bits| all | bits)
}

type PreviousExtentsFit =
    Result<Option<PreviousExtents>, (Vec<ByteRange>, PreviousExtentsMismatch)>;

/// Returns the extents with data of the id's previous lease by size, in the order of their offsets within that lease.
fn in_lease_order(placed: &[&LocatedRangeOwner<'_>]) -> PreviousExtentsFit {
    let mut placed: Vec<_> = placed
        .iter()
        .filter_map(|found| Some((found.lease_offset?, found.range)))
        .collect();
    if placed.is_empty() {
        return Ok(None);
    }
    placed.sort_by_key(|(at, _)| *at);
    let end = placed.iter().try_fold(0_u64, |end, (at, range)| {
        let follows = *at == end;
        follows.then(|| end.checked_add(range.length())).flatten()
    });
    let parts: Vec<ByteRange> = placed.into_iter().map(|(_, range)| range).collect();
    match (end, LeaseExtents::new(parts.clone())) {
        (Some(_), Ok(extents)) => Ok(Some(PreviousExtents {
            extents,
            is_fixed_range: false,
        })),
        _ => Err((sort_and_join(parts), PreviousExtentsMismatch::MissingParts)),
    }
}

/// Returns the data of the id's leases with fixed ranges as one extent; `None` if the id has no such data. The error is the
/// mismatch if the data is not contiguous.
fn in_drive_order(named: &[&LocatedRangeOwner<'_>]) -> PreviousExtentsFit {
    let ranges = sort_and_join(named.iter().map(|found| found.range).collect());
    match &ranges[..] {
        [] => Ok(None),
        [only] => Ok(Some(PreviousExtents {
            extents: (*only).into(),
            is_fixed_range: true,
        })),
        _ => Err((ranges, PreviousExtentsMismatch::NotContiguous)),
    }
}

impl PreviousExtents {
    fn mismatch(&self, demand: SizeDemand) -> Option<PreviousExtentsMismatch> {
        let SizeDemand { unit, whole, .. } = demand;
        let parts = self.extents.parts();
        let fits = 1 << alignment_bits(&self.extents).trailing_zeros();
        if fits < unit {
            let fits = Some(fits).filter(|fits| *fits >= MIN_UNIT);
            return Some(PreviousExtentsMismatch::Unit { unit, fits });
        }
        (whole && parts.len() > 1).then_some(PreviousExtentsMismatch::NotOneExtent)
    }
}

/// Returns ranges in the drive's order, with adjacent ones joined.
fn sort_and_join(mut ranges: Vec<ByteRange>) -> Vec<ByteRange> {
    ranges.sort_by_key(ByteRange::start);
    join_adjacent(&ranges)
}

/// Finds extents for a lease by size: first the extents with data of its id, then free extents. If the id has a stale lease
/// (whose holder died) on this drive, that lease is taken over.
pub(super) fn admit(
    records: &LedgerRecords,
    area: &LeaseTarget<'_>,
    demand: SizeDemand,
    is_held: impl Fn(LeaseSlot) -> Result<bool, LedgerStoreError>,
) -> Result<AdmittedLease, LeaseRefusal> {
    let found = area.find_owners(&records.owners);
    let mut taken_over = None;
    let mut taken = Vec::new();
    let mut others = Vec::new();
    for record in &records.leases {
        let shared = area.shared_ranges(record);
        if record.id != area.id {
            taken.extend(&shared);
            others.push((record, shared));
            continue;
        }
        let held = is_held(LeaseSlot(record.slot)).map_err(LeaseRefusal::Store)?;
        let lengths = shared.iter().map(ByteRange::length);
        let allocated = lengths.fold(0, u64::saturating_add);
        if held || allocated != record.extents.length() {
            return Err(LeaseRefusal::IdTaken(LeaseEntry::new(record, held).into()));
        }
        taken_over = Some(LeaseSlot(record.slot));
    }
    let previous = find_previous(&found, area.id, demand)?;
    let own = previous.as_ref().map(|previous| &previous.extents);
    let own: &[ByteRange] = own.map_or(&[], LeaseExtents::parts);
    for (record, shared) in others {
        let mut overlaps = own
            .iter()
            .filter(|part| shared.iter().any(|range| range.overlaps(part)));
        if let Some(part) = overlaps.next() {
            let held = is_held(LeaseSlot(record.slot)).map_err(LeaseRefusal::Store)?;
            return Err(LeaseRefusal::Overlap(
                *part,
                LeaseEntry::new(record, held).into(),
            ));
        }
    }
    taken.extend(own);
    let extents = extend_with_free(own, &found, &taken, area, demand)?;
    Ok(AdmittedLease {
        taken_over,
        extents,
        previous,
    })
}

/// Returns the id's own extents, followed by free extents up to a total length of `bytes`.
fn extend_with_free(
    own: &[ByteRange],
    found: &[LocatedRangeOwner<'_>],
    taken: &[ByteRange],
    area: &LeaseTarget<'_>,
    demand: SizeDemand,
) -> Result<LeaseExtents, LeaseRefusal> {
    let SizeDemand { bytes, unit, whole } = demand;
    let present: u64 = own.iter().map(ByteRange::length).sum();
    // A lease shrinks only by an explicit request, so its present length may exceed `bytes`.
    let missing = bytes.saturating_sub(present) / unit;
    let (dirty, clean): (Vec<&LocatedRangeOwner<'_>>, Vec<_>) =
        found.iter().partition(|found| found.owner.is_free());
    let clean = clean.iter().map(|found| found.range);
    let taken: Vec<_> = taken.iter().copied().chain(clean).collect();
    let dirty: Vec<_> = dirty.iter().map(|found| found.range).collect();
    let free = allocation::free_units(area.capacity / unit, unit, &taken, &dirty);
    let need = UnitDemand {
        units: missing,
        after_unit: own.last().map(|last| last.end() / unit),
        whole,
    };
    let units = |run: &Range<u64>| run.end - run.start;
    let no_room = || {
        let least = allocation::free_units(area.capacity / MIN_UNIT, MIN_UNIT, &taken, &dirty);
        let least: u64 = least.usable.iter().map(units).sum();
        LeaseRefusal::NoCapacity {
            bytes: missing * unit,
            unit,
            free: free.usable.iter().map(units).sum::<u64>() * unit,
            largest: free.usable.iter().map(units).max().unwrap_or(0) * unit,
            need,
            smaller: !whole && least * MIN_UNIT >= missing * unit,
        }
    };
    let chosen = allocation::choose_units(&free, need).ok_or_else(no_room)?;
    let range = |run: Range<u64>| ByteRange::new(run.start * unit, (run.end - run.start) * unit);
    let chosen = chosen.into_iter().filter_map(|run| range(run).ok());
    let parts = own.iter().copied().chain(chosen).collect();
    // The parts do not overlap: the lease's own parts are not free, so none of them was chosen again.
    LeaseExtents::new(parts).map_err(|_| no_room())
}

/// Part of a namespace that belongs to an id: the id, the bytes, and whether they are leased.
pub(super) type NamespaceUse<'a> = (&'a str, ByteRange, bool);

/// Returns the number of bytes that are free for leases by size in units of `unit` bytes, and the parts of the namespace that
/// belong to ids, leased parts first.
pub(super) fn namespace_uses<'a>(
    records: &'a LedgerRecords,
    area: &LeaseTarget<'_>,
    unit: u64,
) -> (u64, Vec<NamespaceUse<'a>>) {
    let leases = records.leases.iter().flat_map(|record| {
        let shared = area.shared_ranges(record);
        shared.into_iter().map(|range| (&*record.id, range, true))
    });
    let data = area.find_owners(&records.owners);
    let data = data.iter().filter(|found| !found.owner.is_free());
    let data = data.map(|found| (&*found.owner.id, found.range, false));
    let used: Vec<NamespaceUse<'a>> = leases.chain(data).collect();
    let taken: Vec<ByteRange> = used.iter().map(|(_, range, _)| *range).collect();
    let free = allocation::free_units(area.capacity / unit, unit, &taken, &[]);
    let units = free.usable.iter().map(|run| run.end - run.start);
    (units.sum::<u64>() * unit, used)
}

/// Records the id as the owner of the lease's extents, and marks data of other ids in them for wiping.
pub(super) fn record_extents(
    owners: &mut Vec<RangeOwner>,
    area: &LeaseTarget<'_>,
    extents: &LeaseExtents,
    previous: Option<&PreviousExtents>,
) {
    let placed = previous.is_some_and(|previous| !previous.is_fixed_range);
    if let Some(all) = area.whole_candidate()
        && !placed
    {
        range_owners::mark_remnants(owners, &all);
    }
    if let Some(PreviousExtents {
        extents,
        is_fixed_range: true,
    }) = previous
    {
        // All these bytes belong to the id already. Only their offsets within the lease are recorded.
        record_parts(
            owners,
            area,
            extents.with_offsets(),
            PreviousDataPolicy::Kept,
        );
    }
    record_parts(
        owners,
        area,
        extents.with_offsets(),
        PreviousDataPolicy::Wiped,
    );
}

fn record_parts(
    owners: &mut Vec<RangeOwner>,
    area: &LeaseTarget<'_>,
    parts: impl Iterator<Item = (u64, ByteRange)>,
    policy: PreviousDataPolicy,
) {
    for (at, range) in parts {
        range_owners::record_owner(owners, &area.candidate(range, Some(at)), policy);
    }
}

/// Returns the parts of `ranges` that have to be wiped before use, in the order of `ranges`.
pub(super) fn unwiped_ranges(
    owners: &[RangeOwner],
    area: &LeaseTarget<'_>,
    ranges: &[ByteRange],
) -> Vec<ByteRange> {
    let unwiped =
        |range: &ByteRange| range_owners::unwiped_ranges(owners, &area.candidate(*range, None));
    ranges.iter().flat_map(unwiped).collect()
}

/// Changes the length of a lease by size in the ledger. Returns the lease's new extents.
pub(super) fn resize(
    records: &mut LedgerRecords,
    slot: LeaseSlot,
    area: &LeaseTarget<'_>,
    demand: SizeDemand,
) -> Result<LeaseExtents, LeaseRefusal> {
    let bytes = demand.bytes;
    let Some(record) = records.find(slot) else {
        return Err(LeaseRefusal::Gone);
    };
    let before = record.extents.clone();
    let present = before.length();
    let extents = if bytes <= present {
        for range in before.slice(bytes, present) {
            range_owners::release_range(&mut records.owners, &area.candidate(range, None));
        }
        LeaseExtents::new(before.slice(0, bytes)).map_err(|_| LeaseRefusal::Gone)?
    } else {
        let taken = records.leases.iter();
        let taken: Vec<_> = taken
            .flat_map(|record| area.shared_ranges(record))
            .collect();
        let found = area.find_owners(&records.owners);
        let extents = extend_with_free(before.parts(), &found, &taken, area, demand)?;
        let mut at = present;
        for range in extents.slice(present, bytes) {
            let place = area.candidate(range, Some(at));
            range_owners::record_owner(&mut records.owners, &place, PreviousDataPolicy::Wiped);
            at += range.length();
        }
        extents
    };
    if let Some(record) = records.find_mut(slot) {
        record.extents = extents.clone();
    }
    Ok(extents)
}

#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;
