//! Previous owners: the id that last held each range. Its data stays until it is decided what to do with it.
//!
//! When a lease is granted, its id is recorded for its range, in an entry that outlives the lease. So the next lease of any
//! part of that range must have that id, or say what to do with the data ([`PreviousDataPolicy`]). An operator may also
//! decide in advance about all data of an id.
//!
//! A range is marked before its first block is wiped. The mark is removed when all blocks are durably zero. If the server
//! crashes in between, the mark stays: the range belongs to no id, and the next lease must wipe it.
//!
//! Entries address bytes by the device or file that stores them (`backing_id::backing_extent`). So a disk and its partition
//! share entries, and so do a file and its loop device.

use std::collections::HashSet;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::extents::join_adjacent;
use crate::backing_id::{backing_extent, nvme_names};
use crate::range::ByteRange;

/// Treatment of data that another id has in the range of a lease.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PreviousDataPolicy {
    /// The data refuses the lease.
    #[default]
    Refused,
    /// The lease gets the data of other ids as it is.
    Kept,
    /// The data of other ids is wiped before the lease can be attached.
    Wiped,
    /// The data of other ids is wiped as with [`Self::Wiped`], and so are bytes that no lease has had so far, because they may
    /// have data of the host. A lease by size does not wipe bytes of that second kind.
    Erased,
}

impl FromStr for PreviousDataPolicy {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "keep" => Ok(Self::Kept),
            "wipe" => Ok(Self::Erased),
            _ => Err(format!(
                "`{text}` is not a choice for data that another id left in the range; use keep or wipe"
            )),
        }
    }
}

/// Range of bytes with data, and the id that last had a lease of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RangeOwner {
    pub(super) id: String,
    drive: String,
    nsid: u32,
    pub(super) range: ByteRange,
    /// Offset of the range in its lease, in bytes, if the lease was requested by size and so may have several ranges; `None` if
    /// the range itself was requested.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    at: Option<u64>,
    /// True if the range was marked for wiping and the wipe is incomplete. The data that is left belongs to no id.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    wiping: bool,
    /// True if the operator has given the data up: the next lease of the range gets it, whatever its id.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    given_up: bool,
    /// True if the operator has released the range: if its next lease has another id, the data is wiped.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    released: bool,
    /// True if a lease by size must not reuse this data, because another lease got other parts of the id's lease, or because
    /// the id began a new lease by size.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    remnant: bool,
}

/// Data of another id, or partly wiped data, that blocks a lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeftoverData {
    id: String,
    range: ByteRange,
    wiping: bool,
}

impl fmt::Display for LeftoverData {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { id, range, wiping } = self;
        match wiping {
            true => write!(
                f,
                "data of lease \"{id}\" in {range}, which was not wiped to the end"
            ),
            false => write!(f, "data of lease \"{id}\" in {range}"),
        }
    }
}

/// A range that an id requests.
#[derive(Clone, Copy, Debug)]
pub(super) struct RangeCandidate<'a> {
    pub(super) id: &'a str,
    pub(super) drive: &'a str,
    pub(super) nsid: u32,
    pub(super) range: ByteRange,
    /// Offset of the range in its lease, in bytes, if the lease was requested by size and so may have several ranges; `None` if
    /// the range itself was requested.
    pub(super) lease_offset: Option<u64>,
}

impl RangeCandidate<'_> {
    /// Returns `range`, a part of this range, with its own offset in the lease.
    fn slice(&self, range: ByteRange) -> Self {
        let moved = range.start().saturating_sub(self.range.start());
        Self {
            range,
            lease_offset: self.lease_offset.map(|at| at.saturating_add(moved)),
            ..*self
        }
    }
}

/// Part of a requested range that one base (a disk or file) stores.
pub(super) struct BackingPart {
    base: String,
    /// Bytes of the base that store the part.
    pub(super) range: ByteRange,
    /// Offset of the part's first byte on the leased drive.
    drive_offset: u64,
}

impl BackingPart {
    pub(super) fn candidate<'a>(&'a self, of: &RangeCandidate<'a>) -> RangeCandidate<'a> {
        let moved = self.drive_offset.saturating_sub(of.range.start());
        RangeCandidate {
            drive: &self.base,
            range: self.range,
            lease_offset: of.lease_offset.map(|at| at.saturating_add(moved)),
            ..*of
        }
    }

    /// Converts a range of the base to offsets on the leased drive; `None` if it is not within this part.
    pub(super) fn to_drive_range(&self, range: ByteRange) -> Option<ByteRange> {
        let moved = range.start().checked_sub(self.range.start())?;
        ByteRange::new(self.drive_offset.checked_add(moved)?, range.length()).ok()
    }
}

/// Splits `place` into parts, one for each base that stores some of its bytes.
pub(super) fn backing_parts(place: &RangeCandidate<'_>) -> Vec<BackingPart> {
    let mut at = place.range.start();
    let part = |extent: backing_extent::BackingExtent| {
        let part = BackingPart {
            range: ByteRange::new(extent.start, extent.length).ok()?,
            base: extent.base,
            drive_offset: at,
        };
        at += extent.length;
        Some(part)
    };
    let extents = backing_extent::range_extents(place.drive, place.range);
    extents.into_iter().filter_map(part).collect()
}

impl RangeOwner {
    fn new(place: RangeCandidate<'_>) -> Self {
        Self {
            id: place.id.to_owned(),
            drive: place.drive.to_owned(),
            nsid: place.nsid,
            range: place.range,
            at: place.lease_offset,
            wiping: false,
            given_up: false,
            released: false,
            remnant: false,
        }
    }

    /// Returns the id of the namespace, as the lease that made the entry named it.
    pub(super) const fn nsid(&self) -> u32 {
        self.nsid
    }

    pub(super) fn drive(&self) -> &str {
        &self.drive
    }

    /// Renames the base (disk or file) that the entry names, if `rename` returns a name for it.
    pub(super) fn rename_drive(&mut self, rename: impl Fn(&str) -> Option<String>) {
        if let Some(name) = rename(&self.drive) {
            self.drive = name;
        }
    }

    /// Returns whether the end of the range, as an offset in its lease, fits 64 bits.
    pub(super) fn is_valid(&self) -> bool {
        let end = |at: u64| at.checked_add(self.range.length());
        self.at.is_none_or(|at| end(at).is_some())
    }

    /// Returns an entry with this entry's owner for `range`, a part of its range.
    fn slice(&self, range: ByteRange) -> Self {
        let moved = range.start().saturating_sub(self.range.start());
        Self {
            range,
            at: self.at.map(|at| at.saturating_add(moved)),
            ..self.clone()
        }
    }

    /// Returns whether a lease of `place` must not read the entry's data, because the data belongs to another id or is partly
    /// wiped. A lease by size must not read data either that had another offset in the id's earlier lease.
    fn is_foreign(&self, place: &RangeCandidate<'_>) -> bool {
        self.wiping
            || self.id != place.id
            || (place.lease_offset.is_some() && !self.is_at_lease_offset(place))
    }

    /// Returns whether the entry's bytes have the same offsets in the lease of this entry and in the lease that requests
    /// `place`.
    fn is_at_lease_offset(&self, place: &RangeCandidate<'_>) -> bool {
        let first =
            |at: Option<u64>, range: &ByteRange| at.map(|at| at.wrapping_sub(range.start()));
        first(self.at, &self.range) == first(place.lease_offset, &place.range)
    }

    /// Returns whether the entry's bytes are data of `id` that is neither partly wiped, released nor given up.
    pub(super) fn is_owned_by(&self, id: &str) -> bool {
        self.id == id && !self.wiping && !self.is_free()
    }

    /// Returns whether the data blocks a lease of `place`, if the request has no policy for data of other ids.
    fn is_blocking(&self, place: &RangeCandidate<'_>) -> bool {
        self.is_foreign(place) && !self.released && (self.wiping || !self.given_up)
    }

    /// Returns whether any lease by size may get the entry's bytes and wipe them. A partly wiped part of a lease by size is not
    /// free, because it still belongs to that lease.
    pub(super) fn is_free(&self) -> bool {
        self.released || self.given_up || (self.wiping && self.at.is_none())
    }

    /// Returns whether the operator has given the data up.
    pub(super) const fn is_given_up(&self) -> bool {
        self.given_up
    }

    /// Returns the entry's id, and true if the entry is part of a lease by size.
    fn lease_key(&self) -> (String, bool) {
        (self.id.clone(), self.at.is_some())
    }

    /// Records that no lease by size may reuse the entry's data.
    fn mark_remnant(&mut self) {
        (self.at, self.remnant) = (None, true);
    }

    /// Returns whether a lease by size of the entry's id may reuse the data.
    pub(super) fn is_reusable(&self) -> bool {
        !self.remnant && (self.at.is_some() || !self.wiping)
    }

    /// Returns whether a lease of `place` has to wipe the data before use. `policy` is the request's policy for data of other
    /// ids.
    fn needs_wipe(&self, place: &RangeCandidate<'_>, policy: PreviousDataPolicy) -> bool {
        self.is_foreign(place)
            && match policy {
                PreviousDataPolicy::Refused => self.released,
                PreviousDataPolicy::Kept => false,
                PreviousDataPolicy::Wiped | PreviousDataPolicy::Erased => true,
            }
    }

    /// Returns an entry for `range`, a part of this entry, that marks the part for wiping by a lease of `place`.
    fn to_marked(&self, range: ByteRange, place: &RangeCandidate<'_>) -> Self {
        let entry = match place.lease_offset {
            // The part belongs to the lease by size at its offset there, even before the wipe.
            Some(_) => Self::new(place.slice(range)),
            None => Self {
                at: None,
                ..self.slice(range)
            },
        };
        Self {
            wiping: true,
            ..entry
        }
    }

    fn overlaps(&self, place: &RangeCandidate<'_>) -> bool {
        self.range.overlaps(&place.range)
            && is_same_base((&self.drive, self.nsid), (place.drive, place.nsid))
    }
}

/// Returns whether two bases (disks or files), each with the id of a namespace, store the same bytes.
pub(super) fn is_same_base(one: (&str, u32), other: (&str, u32)) -> bool {
    nvme_names::as_block_device(one.0, one.1) == nvme_names::as_block_device(other.0, other.1)
}

/// Returns whether two lists have the same entries in any order.
pub(super) fn have_same_entries(some: &[RangeOwner], others: &[RangeOwner]) -> bool {
    some.len() == others.len() && sort_by_bytes(some) == sort_by_bytes(others)
}

/// Returns entries sorted by the bytes that they address.
fn sort_by_bytes(owners: &[RangeOwner]) -> Vec<&RangeOwner> {
    let mut sorted: Vec<&RangeOwner> = owners.iter().collect();
    sorted.sort_by_key(|&owner| (owner.nsid, owner.range.start(), &owner.drive));
    sorted
}

/// Entry of an owner, with the bytes as offsets on the leased drive.
#[derive(Clone, Copy, Debug)]
pub(super) struct LocatedRangeOwner<'a> {
    pub(super) owner: &'a RangeOwner,
    pub(super) range: ByteRange,
    /// Offset of the range in its lease, in bytes, if the lease was requested by size.
    pub(super) lease_offset: Option<u64>,
}

/// Returns the entries whose bytes overlap `place`, clipped to `place` and with offsets on the leased drive.
pub(super) fn find_owners<'a>(
    owners: &'a [RangeOwner],
    place: &RangeCandidate<'_>,
) -> Vec<LocatedRangeOwner<'a>> {
    let in_part = |part: &BackingPart| {
        let place = part.candidate(place);
        let overlapping = owners.iter().filter(|owner| owner.overlaps(&place));
        let found = overlapping.filter_map(|owner| {
            let [_, within, _] = split_range(&owner.range, &place.range);
            let within = within?;
            let moved = within.start() - owner.range.start();
            Some(LocatedRangeOwner {
                owner,
                range: part.to_drive_range(within)?,
                lease_offset: owner.at.map(|at| at.saturating_add(moved)),
            })
        });
        found.collect::<Vec<_>>()
    };
    backing_parts(place).iter().flat_map(in_part).collect()
}

/// Records that no lease by size may reuse the data in `place`: the id begins a new lease by size, and the data is of its
/// earlier lease.
pub(super) fn mark_remnants(owners: &mut [RangeOwner], place: &RangeCandidate<'_>) {
    for part in backing_parts(place) {
        let place = part.candidate(place);
        let its = owners
            .iter_mut()
            .filter(|owner| owner.id == place.id && owner.overlaps(&place));
        its.filter(|owner| owner.at.is_some())
            .for_each(RangeOwner::mark_remnant);
    }
}

/// Releases the data in `place`, which a lease by size had before it was truncated.
pub(super) fn release_range(owners: &mut Vec<RangeOwner>, place: &RangeCandidate<'_>) {
    for part in backing_parts(place) {
        let place = part.candidate(place);
        let mut parts = Vec::new();
        for owner in owners.extract_if(.., |owner| owner.overlaps(&place)) {
            let [before, within, behind] = split_range(&owner.range, &place.range);
            let outside = before.into_iter().chain(behind);
            parts.extend(outside.map(|range| owner.slice(range)));
            parts.extend(within.map(|range| RangeOwner {
                at: None,
                given_up: false,
                released: true,
                remnant: true,
                ..owner.slice(range)
            }));
        }
        owners.append(&mut parts);
    }
}

/// Returns the first data that blocks a lease of `place`: data of another id, or data whose wipe is incomplete.
pub(super) fn find_blocking(
    owners: &[RangeOwner],
    place: &RangeCandidate<'_>,
) -> Option<LeftoverData> {
    let parts = backing_parts(place);
    let left = |part: &BackingPart| find_blocking_in_part(owners, &part.candidate(place));
    parts.iter().find_map(left)
}

fn find_blocking_in_part(
    owners: &[RangeOwner],
    place: &RangeCandidate<'_>,
) -> Option<LeftoverData> {
    let foreign = |owner: &&RangeOwner| owner.overlaps(place) && owner.is_blocking(place);
    owners.iter().find(foreign).map(|owner| LeftoverData {
        id: owner.id.clone(),
        range: owner.range,
        wiping: owner.wiping,
    })
}

/// Records the operator's decision on what happens to an id's data when another id leases its range. Returns the ranges for
/// which it was recorded. For a partly wiped range, only the decision to wipe is recorded, because some of its data is lost.
pub(super) fn record_decision(
    owners: &mut [RangeOwner],
    id: &str,
    policy: PreviousDataPolicy,
) -> Vec<ByteRange> {
    let its = owners
        .iter_mut()
        .filter(|owner| owner.id == id && (!owner.wiping || policy != PreviousDataPolicy::Kept));
    its.map(|owner| {
        owner.given_up = policy == PreviousDataPolicy::Kept;
        owner.released = matches!(
            policy,
            PreviousDataPolicy::Wiped | PreviousDataPolicy::Erased
        );
        owner.range
    })
    .collect()
}

/// Records the id of `place` as the owner of its bytes. Parts with data that it must not read are marked for wiping instead.
pub(super) fn record_owner(
    owners: &mut Vec<RangeOwner>,
    place: &RangeCandidate<'_>,
    policy: PreviousDataPolicy,
) {
    let mut broken = HashSet::new();
    for part in backing_parts(place) {
        record_owner_of_part(owners, &part.candidate(place), policy, &mut broken);
    }
    // A released lease that has lost a part is not reused as a whole, so its other parts become remnants.
    if !broken.is_empty() {
        let parts = owners.iter_mut();
        let parts = parts.filter(|owner| owner.released && broken.contains(&owner.lease_key()));
        parts.for_each(RangeOwner::mark_remnant);
    }
}

/// Records the id of `place` as the owner of `place`, which lies on one base (a disk or file). If released data loses a part to
/// `place`, adds the data's id to `broken`, with a flag that is true for data of a lease by size.
fn record_owner_of_part(
    owners: &mut Vec<RangeOwner>,
    place: &RangeCandidate<'_>,
    policy: PreviousDataPolicy,
    broken: &mut HashSet<(String, bool)>,
) {
    if policy == PreviousDataPolicy::Erased {
        mark_unknown(owners, place);
    }
    let mut unwiped = Vec::new();
    let mut remaining = Vec::new();
    for owner in owners.extract_if(.., |owner| owner.overlaps(place)) {
        let has_moved = owner.id != place.id || !owner.is_at_lease_offset(place);
        if owner.released && !owner.remnant && has_moved {
            broken.insert(owner.lease_key());
        }
        let [before, within, behind] = split_range(&owner.range, &place.range);
        let outside = before.into_iter().chain(behind);
        remaining.extend(outside.map(|range| owner.slice(range)));
        if owner.needs_wipe(place, policy) {
            unwiped.extend(within.map(|range| owner.to_marked(range, place)));
        }
    }
    owners.append(&mut remaining);
    // All bytes that are not marked get the new id.
    let mut at = place.range.start();
    unwiped.sort_by_key(|owner: &RangeOwner| owner.range.start());
    for owner in unwiped {
        owners.extend(gap_owner(place, at, owner.range.start()));
        at = owner.range.end();
        owners.push(owner);
    }
    owners.extend(gap_owner(place, at, place.range.end()));
}

/// Marks those bytes of `place` for wiping that no lease has had so far.
fn mark_unknown(owners: &mut Vec<RangeOwner>, place: &RangeCandidate<'_>) {
    let known = owners.iter().filter(|owner| owner.overlaps(place));
    let known = known.filter_map(|owner| {
        let [_, within, _] = split_range(&owner.range, &place.range);
        within
    });
    let mut known: Vec<ByteRange> = known.collect();
    known.sort_by_key(ByteRange::start);
    let mut at = place.range.start();
    for range in known {
        owners.extend(gap_owner(place, at, range.start()).map(mark_unwiped));
        at = at.max(range.end());
    }
    owners.extend(gap_owner(place, at, place.range.end()).map(mark_unwiped));
}

fn mark_unwiped(owner: RangeOwner) -> RangeOwner {
    RangeOwner {
        wiping: true,
        ..owner
    }
}

/// Returns the parts of `place` that are marked for wiping, as offsets on the leased drive.
pub(super) fn unwiped_ranges(owners: &[RangeOwner], place: &RangeCandidate<'_>) -> Vec<ByteRange> {
    let of_part = |part: &BackingPart| {
        let unwiped = unwiped_in_part(owners, &part.candidate(place));
        let moved = unwiped.into_iter().map(|range| part.to_drive_range(range));
        moved.flatten().collect::<Vec<_>>()
    };
    backing_parts(place).iter().flat_map(of_part).collect()
}

fn unwiped_in_part(owners: &[RangeOwner], place: &RangeCandidate<'_>) -> Vec<ByteRange> {
    let unwiped = owners
        .iter()
        .filter(|owner| owner.wiping && owner.overlaps(place));
    let mut unwiped: Vec<ByteRange> = unwiped
        .filter_map(|owner| {
            let [_, within, _] = split_range(&owner.range, &place.range);
            within
        })
        .collect();
    unwiped.sort_by_key(ByteRange::start);
    join_adjacent(&unwiped)
}

fn gap_owner(place: &RangeCandidate<'_>, start: u64, end: u64) -> Option<RangeOwner> {
    let range = ByteRange::new(start, end.checked_sub(start)?).ok()?;
    Some(RangeOwner::new(place.slice(range)))
}

/// Splits `range` into its parts before, within and after `other`, which overlaps it.
pub(super) fn split_range(range: &ByteRange, other: &ByteRange) -> [Option<ByteRange>; 3] {
    let part = |start: u64, end: u64| ByteRange::new(start, end.checked_sub(start)?).ok();
    let (start, end) = (
        range.start().max(other.start()),
        range.end().min(other.end()),
    );
    [
        part(range.start(), start),
        part(start, end),
        part(end, range.end()),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn place(id: &'static str, start: u64, length: u64) -> RangeCandidate<'static> {
        RangeCandidate {
            id,
            drive: "file:/drive",
            nsid: 1,
            range: ByteRange::new(start, length).unwrap(),
            lease_offset: None,
        }
    }

    #[test]
    fn data_is_in_the_way_of_other_ids_alone() {
        let mut owners = Vec::new();
        record_owner(
            &mut owners,
            &place("a", 10, 10),
            PreviousDataPolicy::Refused,
        );
        assert_eq!(find_blocking(&owners, &place("a", 0, 30)), None);
        assert_eq!(find_blocking(&owners, &place("b", 0, 10)), None);
        let other = RangeCandidate {
            drive: "file:/other",
            ..place("b", 10, 10)
        };
        assert_eq!(find_blocking(&owners, &other), None);
        let left = find_blocking(&owners, &place("b", 19, 1)).unwrap();
        assert_eq!(left.to_string(), "data of lease \"a\" in 10+10");

        record_owner(&mut owners, &place("b", 15, 2), PreviousDataPolicy::Wiped);
        assert_eq!(
            unwiped_ranges(&owners, &place("b", 0, 30)),
            [ByteRange::new(15, 2).unwrap()]
        );
        // A range whose wipe is incomplete belongs to no id.
        let left = find_blocking(&owners, &place("b", 15, 2)).unwrap();
        assert!(left.to_string().ends_with("not wiped to the end"), "{left}");
        record_owner(&mut owners, &place("b", 15, 2), PreviousDataPolicy::Refused);
        assert_eq!(find_blocking(&owners, &place("b", 15, 2)), None);
        assert!(find_blocking(&owners, &place("b", 10, 7)).is_some());
        assert!(find_blocking(&owners, &place("b", 17, 3)).is_some());
    }

    #[test]
    fn lists_are_the_same_in_any_order() {
        let mut owners = Vec::new();
        for (id, start) in [("a", 10), ("b", 30), ("c", 50)] {
            record_owner(
                &mut owners,
                &place(id, start, 10),
                PreviousDataPolicy::Refused,
            );
        }
        let other = RangeCandidate {
            drive: "file:/other",
            ..place("b", 10, 10)
        };
        record_owner(&mut owners, &other, PreviousDataPolicy::Refused);
        let mut others = owners.clone();
        others.rotate_left(1);
        others.swap(0, 2);
        assert!(have_same_entries(&owners, &others));
        assert!(!have_same_entries(&owners, &others[1..]));
        others[0].released = true;
        assert!(!have_same_entries(&owners, &others));
        others[0] = others[1].clone();
        assert!(!have_same_entries(&owners, &others));
    }

    #[test]
    fn data_that_was_given_up_is_in_the_way_of_no_id() {
        let mut owners = Vec::new();
        record_owner(
            &mut owners,
            &place("a", 10, 10),
            PreviousDataPolicy::Refused,
        );
        record_owner(
            &mut owners,
            &place("c", 30, 10),
            PreviousDataPolicy::Refused,
        );
        let given_up = record_decision(&mut owners, "a", PreviousDataPolicy::Kept);
        assert_eq!(given_up, [ByteRange::new(10, 10).unwrap()]);
        assert_eq!(
            record_decision(&mut owners, "none", PreviousDataPolicy::Kept),
            []
        );
        assert_eq!(find_blocking(&owners, &place("b", 10, 10)), None);
        assert!(find_blocking(&owners, &place("b", 10, 21)).is_some());
        // A request that wipes also wipes this range.
        let mut wiped = owners.clone();
        record_owner(&mut wiped, &place("b", 10, 10), PreviousDataPolicy::Wiped);
        assert_eq!(unwiped_ranges(&wiped, &place("b", 10, 10)), given_up);
        assert_eq!(
            record_decision(&mut wiped, "a", PreviousDataPolicy::Kept),
            [],
            "mixed data"
        );
        // The new id owns the data that it leases, and the other part stays given up.
        record_owner(&mut owners, &place("b", 10, 5), PreviousDataPolicy::Refused);
        assert!(find_blocking(&owners, &place("a", 10, 5)).is_some());
        assert_eq!(find_blocking(&owners, &place("d", 15, 5)), None);
    }

    #[test]
    fn what_no_lease_has_held_is_erased_on_request_alone() {
        let range = |start, length| ByteRange::new(start, length).unwrap();
        let mut owners = Vec::new();
        record_owner(&mut owners, &place("a", 10, 5), PreviousDataPolicy::Refused);
        record_owner(&mut owners, &place("b", 20, 5), PreviousDataPolicy::Refused);
        let mut wiped = owners.clone();
        record_owner(&mut wiped, &place("a", 5, 25), PreviousDataPolicy::Wiped);
        assert_eq!(unwiped_ranges(&wiped, &place("a", 0, 40)), [range(20, 5)]);
        record_owner(&mut owners, &place("a", 5, 25), PreviousDataPolicy::Erased);
        let all = [range(5, 5), range(15, 15)];
        assert_eq!(unwiped_ranges(&owners, &place("a", 0, 40)), all);
        // Data of the requesting id is not wiped, and wiped data becomes its own.
        for range in all {
            let place = place("a", range.start(), range.length());
            record_owner(&mut owners, &place, PreviousDataPolicy::Kept);
        }
        record_owner(&mut owners, &place("a", 5, 25), PreviousDataPolicy::Erased);
        assert_eq!(unwiped_ranges(&owners, &place("a", 0, 40)), []);
    }

    #[test]
    fn a_partition_has_the_owners_of_its_disk() {
        let mut owners = Vec::new();
        let disk = |id, start, length| RangeCandidate {
            drive: "disk:one",
            ..place(id, start, length)
        };
        let partition = |id, start, length| RangeCandidate {
            drive: "100+50 of disk:one",
            ..place(id, start, length)
        };
        record_owner(
            &mut owners,
            &disk("a", 110, 10),
            PreviousDataPolicy::Refused,
        );
        assert_eq!(find_blocking(&owners, &partition("b", 0, 10)), None);
        assert!(find_blocking(&owners, &partition("b", 15, 10)).is_some());
        record_owner(
            &mut owners,
            &partition("b", 15, 10),
            PreviousDataPolicy::Wiped,
        );
        assert_eq!(
            unwiped_ranges(&owners, &partition("b", 15, 10)),
            [ByteRange::new(15, 5).unwrap()]
        );
        assert!(find_blocking(&owners, &disk("a", 124, 1)).is_some());
    }

    #[test]
    fn a_block_device_has_the_owners_of_its_namespace() {
        let mut owners = Vec::new();
        let physical = RangeCandidate {
            drive: "nvme:nqn.a:s",
            nsid: 2,
            ..place("a", 110, 10)
        };
        record_owner(&mut owners, &physical, PreviousDataPolicy::Refused);
        let block = |drive| RangeCandidate {
            drive,
            ..place("b", 0, 50)
        };
        assert!(find_blocking(&owners, &block("100+50 of nvme:nqn.a:s/2")).is_some());
        assert_eq!(
            find_blocking(&owners, &block("100+50 of nvme:nqn.a:s")),
            None
        );
        assert_eq!(
            find_blocking(&owners, &block("120+50 of nvme:nqn.a:s/2")),
            None
        );
    }

    #[derive(Clone, Copy, Debug)]
    enum OwnerModelAction {
        Enter(u64, u64),
        Decide,
    }

    /// State of a byte in the model: its owner, true if it is marked for wiping, and the operator's decision.
    #[derive(Clone, Copy, Debug, PartialEq)]
    struct OwnerModelByte(&'static str, bool, PreviousDataPolicy);

    impl OwnerModelByte {
        fn is_foreign(self, id: &str) -> bool {
            self.1 || self.0 != id
        }

        fn refuses(self, id: &str) -> bool {
            let decided = match self.2 {
                PreviousDataPolicy::Refused => false,
                PreviousDataPolicy::Kept => !self.1,
                PreviousDataPolicy::Wiped | PreviousDataPolicy::Erased => true,
            };
            self.is_foreign(id) && !decided
        }
    }

    fn doing() -> impl Strategy<Value = OwnerModelAction> {
        prop_oneof![
            3 => (0..60_u64, 1..20_u64).prop_map(|(start, length)| OwnerModelAction::Enter(start, length)),
            1 => Just(OwnerModelAction::Decide),
        ]
    }

    fn previous_data_policy() -> impl Strategy<Value = PreviousDataPolicy> {
        use PreviousDataPolicy::{Erased, Kept, Refused, Wiped};
        prop::sample::select(vec![Refused, Kept, Wiped, Erased])
    }

    proptest! {
        #[test]
        fn every_byte_has_the_owner_that_last_entered(
            steps in prop::collection::vec((prop::sample::select(vec!["a", "b", "c"]), doing(), previous_data_policy()), 1..40)
        ) {
            let mut model: [Option<OwnerModelByte>; 80] = [None; 80];
            let mut owners = Vec::new();
            for (id, doing, policy) in steps {
                match doing {
                    OwnerModelAction::Enter(start, length) => {
                        let place = place(id, start, length);
                        let bytes = &mut model[start as usize..(start + length) as usize];
                        let refused = bytes.iter().flatten().any(|byte| byte.refuses(id));
                        prop_assert_eq!(find_blocking(&owners, &place).is_some(), refused);
                        record_owner(&mut owners, &place, policy);
                        for byte in bytes {
                            let wiped = byte.filter(|byte| {
                                let policy = if policy == PreviousDataPolicy::Refused { byte.2 } else { policy };
                                let given = matches!(policy, PreviousDataPolicy::Wiped | PreviousDataPolicy::Erased);
                                byte.is_foreign(id) && given
                            });
                            *byte = Some(match wiped {
                                Some(OwnerModelByte(owner, _, decided)) => OwnerModelByte(owner, true, decided),
                                None => {
                                    let is_unknown = byte.is_none() && policy == PreviousDataPolicy::Erased;
                                    OwnerModelByte(id, is_unknown, PreviousDataPolicy::Refused)
                                }
                            });
                        }
                    }
                    OwnerModelAction::Decide => {
                        record_decision(&mut owners, id, policy);
                        for byte in model.iter_mut().flatten() {
                            if byte.0 == id && (!byte.1 || policy != PreviousDataPolicy::Kept) {
                                byte.2 = match policy {
                                    PreviousDataPolicy::Erased => PreviousDataPolicy::Wiped,
                                    policy => policy,
                                };
                            }
                        }
                    }
                }
                for (at, byte) in model.iter().enumerate() {
                    let found: Vec<_> = owners
                        .iter()
                        .filter(|range_owner| (range_owner.range.start()..range_owner.range.end()).contains(&(at as u64)))
                        .map(|range_owner| {
                            let decided = match (range_owner.given_up, range_owner.released) {
                                (false, false) => PreviousDataPolicy::Refused,
                                (_, false) => PreviousDataPolicy::Kept,
                                (_, true) => PreviousDataPolicy::Wiped,
                            };
                            (range_owner.id.as_str(), range_owner.wiping, decided)
                        })
                        .collect();
                    let expected: Vec<_> = byte.iter().map(|byte| (byte.0, byte.1, byte.2)).collect();
                    prop_assert_eq!(found, expected, "byte {}", at);
                }
            }
        }
    }
}
