//! Ids that last held ranges, whose data is there until somebody decides otherwise.
//!
//! A lease enters its id for its range when it is given out, and the entry outlives it. So the next lease of
//! any part of that range either has the same id, or says what becomes of the data ([`FormerData`]). An operator may
//! also say so beforehand, for all that an id left.
//!
//! A range that is to be wiped is marked before its first block is wiped. The mark goes when the last block is zeroes and
//! durable. After a crash in between, the range belongs to no id, and the next lease has to wipe it.
//!
//! Entries name bytes by what holds them (`origin::extent`), so that a disk, its partition and a loop device of a file
//! have the same tenants.

use std::collections::HashSet;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::extents::joined;
use crate::origin::{extent, nvme};
use crate::range::ByteRange;

/// Fate of data that another id left in the range of a lease.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FormerData {
    /// The lease is refused.
    #[default]
    Refused,
    /// The lease gets it.
    Kept,
    /// The lease has to wipe it before it can be attached to.
    Wiped,
    /// As [`Self::Wiped`], and the lease has to wipe bytes that no lease has held, too: they may have data of the host. A lease
    /// by size does not wipe these bytes.
    Erased,
}

impl FromStr for FormerData {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "keep" => Ok(Self::Kept),
            "wipe" => Ok(Self::Erased),
            _ => Err(format!(
                "`{text}` is nothing that can become of data which another id left in the range; use keep or wipe"
            )),
        }
    }
}

/// A range, and the id that last held it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Tenant {
    pub(super) id: String,
    drive: String,
    nsid: u32,
    pub(super) range: ByteRange,
    /// Offset in bytes within a lease by size at which the range begins; `None` if the range was named.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    at: Option<u64>,
    /// It is being wiped: what is left is nobody's.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    wiping: bool,
    /// The operator has given the data up: the next lease gets it, whatever its id.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    given_up: bool,
    /// The operator has released the range: the next lease of another id wipes it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    released: bool,
    /// The id's lease has lost other parts. So no lease by size takes this one up.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    remnant: bool,
}

/// Data in the way of a lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Left {
    id: String,
    range: ByteRange,
    wiping: bool,
}

impl fmt::Display for Left {
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

/// A range that is about to be leased, and the id that wants it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place<'a> {
    pub(super) id: &'a str,
    pub(super) drive: &'a str,
    pub(super) nsid: u32,
    pub(super) range: ByteRange,
    /// Offset in bytes within a lease by size at which the range begins; `None` if the range was named.
    pub(super) at: Option<u64>,
}

impl Place<'_> {
    /// Returns the place of a part of the range.
    fn part(&self, range: ByteRange) -> Self {
        let moved = range.start().saturating_sub(self.range.start());
        Self {
            range,
            at: self.at.map(|at| at.saturating_add(moved)),
            ..*self
        }
    }
}

/// A part of a place in one of the bases that hold its bytes.
pub(super) struct Part {
    base: String,
    /// Bytes of the base.
    pub(super) range: ByteRange,
    /// Start of the part, as the drive of the place numbers its bytes.
    at: u64,
}

impl Part {
    pub(super) fn place<'a>(&'a self, of: &Place<'a>) -> Place<'a> {
        let moved = self.at.saturating_sub(of.range.start());
        Place {
            drive: &self.base,
            range: self.range,
            at: of.at.map(|at| at.saturating_add(moved)),
            ..*of
        }
    }

    /// Returns bytes of the base, within the part, as the drive of the place numbers them.
    pub(super) fn on_drive(&self, range: ByteRange) -> Option<ByteRange> {
        let moved = range.start().checked_sub(self.range.start())?;
        ByteRange::new(self.at.checked_add(moved)?, range.length()).ok()
    }
}

/// Returns the parts of `place` in the bases of its drive.
pub(super) fn parts(place: &Place<'_>) -> Vec<Part> {
    let mut at = place.range.start();
    let part = |extent: extent::Extent| {
        let part = Part {
            range: ByteRange::new(extent.start, extent.length).ok()?,
            base: extent.base,
            at,
        };
        at += extent.length;
        Some(part)
    };
    let extents = extent::places(place.drive, place.range);
    extents.into_iter().filter_map(part).collect()
}

impl Tenant {
    /// Returns the entries of a place that its id holds.
    pub(super) fn of(place: &Place<'_>) -> Vec<Self> {
        let parts = parts(place);
        let tenants = parts.iter().map(|part| Self::new(part.place(place)));
        tenants.collect()
    }

    fn new(place: Place<'_>) -> Self {
        Self {
            id: place.id.to_owned(),
            drive: place.drive.to_owned(),
            nsid: place.nsid,
            range: place.range,
            at: place.at,
            wiping: false,
            given_up: false,
            released: false,
            remnant: false,
        }
    }

    /// Returns the base that holds its bytes.
    pub(super) const fn nsid(&self) -> u32 {
        self.nsid
    }

    pub(super) fn drive(&self) -> &str {
        &self.drive
    }

    /// Gives the base another name, if there is one.
    pub(super) fn rename_drive(&mut self, rename: impl Fn(&str) -> Option<String>) {
        if let Some(name) = rename(&self.drive) {
            self.drive = name;
        }
    }

    /// Returns whether 64 bits count the bytes of its lease up to its end.
    pub(super) fn is_sound(&self) -> bool {
        let end = |at: u64| at.checked_add(self.range.length());
        self.at.is_none_or(|at| end(at).is_some())
    }

    /// Returns the entry of a part of its range.
    fn part(&self, range: ByteRange) -> Self {
        let moved = range.start().saturating_sub(self.range.start());
        Self {
            range,
            at: self.at.map(|at| at.saturating_add(moved)),
            ..self.clone()
        }
    }

    /// Returns whether a lease of `place` finds there what is not its own. A lease by size has each byte at its
    /// offset.
    fn is_foreign(&self, place: &Place<'_>) -> bool {
        self.wiping || self.id != place.id || (place.at.is_some() && !self.is_at_home(place))
    }

    /// Returns whether its bytes lie at the offsets in the lease that `place` gives them.
    fn is_at_home(&self, place: &Place<'_>) -> bool {
        let first =
            |at: Option<u64>, range: &ByteRange| at.map(|at| at.wrapping_sub(range.start()));
        first(self.at, &self.range) == first(place.at, &place.range)
    }

    /// Returns whether the bytes are the data of an id, whole and not released.
    pub(super) fn is_kept_by(&self, id: &str) -> bool {
        self.id == id && !self.wiping && !self.is_free()
    }

    /// Returns whether the data is in the way of a lease that does not say what becomes of it.
    fn refuses(&self, place: &Place<'_>) -> bool {
        self.is_foreign(place) && !self.released && (self.wiping || !self.given_up)
    }

    /// Returns whether a lease by size of any id may have its bytes once they are wiped. A part that a lease by size did
    /// not wipe to the end belongs to that lease.
    pub(super) fn is_free(&self) -> bool {
        self.released || self.given_up || (self.wiping && self.at.is_none())
    }

    /// Returns whether the operator has given the data up.
    pub(super) const fn is_given_up(&self) -> bool {
        self.given_up
    }

    /// Returns its id, and whether it is a part of the id's lease by size.
    fn lease(&self) -> (String, bool) {
        (self.id.clone(), self.at.is_some())
    }

    /// Makes it a part that no lease by size takes up.
    fn abandon(&mut self) {
        (self.at, self.remnant) = (None, true);
    }

    /// Returns whether a lease by size of its id may take it up.
    pub(super) fn is_taken_up(&self) -> bool {
        !self.remnant && (self.at.is_some() || !self.wiping)
    }

    /// Returns whether a lease of `place` has to wipe the data.
    fn is_wiped(&self, place: &Place<'_>, fate: FormerData) -> bool {
        self.is_foreign(place)
            && match fate {
                FormerData::Refused => self.released,
                FormerData::Kept => false,
                FormerData::Wiped | FormerData::Erased => true,
            }
    }

    /// Returns the entry of a part that a lease of `place` has to wipe.
    fn marked(&self, range: ByteRange, place: &Place<'_>) -> Self {
        let entry = match place.at {
            // It belongs to the lease, which has it at this offset when it comes back.
            Some(_) => Self::new(place.part(range)),
            None => Self {
                at: None,
                ..self.part(range)
            },
        };
        Self {
            wiping: true,
            ..entry
        }
    }

    fn overlaps(&self, place: &Place<'_>) -> bool {
        self.range.overlaps(&place.range)
            && is_same_base((&self.drive, self.nsid), (place.drive, place.nsid))
    }
}

/// Returns whether two bases, each with a namespace, hold the same bytes.
pub(super) fn is_same_base(one: (&str, u32), other: (&str, u32)) -> bool {
    nvme::as_block_device(one.0, one.1) == nvme::as_block_device(other.0, other.1)
}

/// Returns whether two lists have the same entries, in any order.
pub(super) fn are_same(some: &[Tenant], others: &[Tenant]) -> bool {
    some.len() == others.len() && sorted(some) == sorted(others)
}

/// Returns entries in the order of the bytes that they name.
fn sorted(tenants: &[Tenant]) -> Vec<&Tenant> {
    let mut sorted: Vec<&Tenant> = tenants.iter().collect();
    sorted.sort_by_key(|&tenant| (tenant.nsid, tenant.range.start(), &tenant.drive));
    sorted
}

/// An entry, as a drive that holds its bytes numbers them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Found<'a> {
    pub(super) tenant: &'a Tenant,
    pub(super) range: ByteRange,
    /// Offset in bytes within a lease by size at which the range begins.
    pub(super) at: Option<u64>,
}

/// Returns the entries in `place`.
pub(super) fn find<'a>(tenants: &'a [Tenant], place: &Place<'_>) -> Vec<Found<'a>> {
    let in_part = |part: &Part| {
        let place = part.place(place);
        let there = tenants.iter().filter(|tenant| tenant.overlaps(&place));
        let found = there.filter_map(|tenant| {
            let [_, within, _] = split(&tenant.range, &place.range);
            let within = within?;
            let moved = within.start() - tenant.range.start();
            Some(Found {
                tenant,
                range: part.on_drive(within)?,
                at: tenant.at.map(|at| at.saturating_add(moved)),
            })
        });
        found.collect::<Vec<_>>()
    };
    parts(place).iter().flat_map(in_part).collect()
}

/// Makes the id's data at offsets in `place` remnants: a lease by size of the id begins anew.
pub(super) fn abandon(tenants: &mut [Tenant], place: &Place<'_>) {
    for part in parts(place) {
        let place = part.place(place);
        let its = tenants
            .iter_mut()
            .filter(|tenant| tenant.id == place.id && tenant.overlaps(&place));
        its.filter(|tenant| tenant.at.is_some())
            .for_each(Tenant::abandon);
    }
}

/// Releases `place`, the end of a lease by size.
pub(super) fn release(tenants: &mut Vec<Tenant>, place: &Place<'_>) {
    for part in parts(place) {
        let place = part.place(place);
        let mut parts = Vec::new();
        for tenant in tenants.extract_if(.., |tenant| tenant.overlaps(&place)) {
            let [before, within, behind] = split(&tenant.range, &place.range);
            let outside = before.into_iter().chain(behind);
            parts.extend(outside.map(|range| tenant.part(range)));
            parts.extend(within.map(|range| Tenant {
                at: None,
                given_up: false,
                released: true,
                remnant: true,
                ..tenant.part(range)
            }));
        }
        tenants.append(&mut parts);
    }
}

/// The first data in the way of `place`: that of another id, or what is left of a wipe.
pub(super) fn in_the_way(tenants: &[Tenant], place: &Place<'_>) -> Option<Left> {
    let parts = parts(place);
    let left = |part: &Part| in_the_way_of_part(tenants, &part.place(place));
    parts.iter().find_map(left)
}

fn in_the_way_of_part(tenants: &[Tenant], place: &Place<'_>) -> Option<Left> {
    let foreign = |tenant: &&Tenant| tenant.overlaps(place) && tenant.refuses(place);
    tenants.iter().find(foreign).map(|tenant| Left {
        id: tenant.id.clone(),
        range: tenant.range,
        wiping: tenant.wiping,
    })
}

/// Decides what becomes of the data that an id left, if another id leases it. Returns the ranges. A range whose wipe has
/// not ended can only be wiped, as its data is mixed.
pub(super) fn decide(tenants: &mut [Tenant], id: &str, fate: FormerData) -> Vec<ByteRange> {
    let its = tenants
        .iter_mut()
        .filter(|tenant| tenant.id == id && (!tenant.wiping || fate != FormerData::Kept));
    its.map(|tenant| {
        tenant.given_up = fate == FormerData::Kept;
        tenant.released = matches!(fate, FormerData::Wiped | FormerData::Erased);
        tenant.range
    })
    .collect()
}

/// Enters `place` for its id. Parts that have to be wiped are marked instead.
pub(super) fn enter(tenants: &mut Vec<Tenant>, place: &Place<'_>, fate: FormerData) {
    let mut broken = HashSet::new();
    for part in parts(place) {
        enter_part(tenants, &part.place(place), fate, &mut broken);
    }
    // Of a released lease that has lost a part, the others are not taken up again.
    if !broken.is_empty() {
        let parts = tenants.iter_mut();
        let parts = parts.filter(|tenant| tenant.released && broken.contains(&tenant.lease()));
        parts.for_each(Tenant::abandon);
    }
}

/// Enters a part of a place. The released leases that lose a part by that are added to `broken`.
fn enter_part(
    tenants: &mut Vec<Tenant>,
    place: &Place<'_>,
    fate: FormerData,
    broken: &mut HashSet<(String, bool)>,
) {
    if fate == FormerData::Erased {
        mark_unknown(tenants, place);
    }
    let mut marked = Vec::new();
    let mut kept = Vec::new();
    for tenant in tenants.extract_if(.., |tenant| tenant.overlaps(place)) {
        let moves = tenant.id != place.id || !tenant.is_at_home(place);
        if tenant.released && !tenant.remnant && moves {
            broken.insert(tenant.lease());
        }
        let [before, within, behind] = split(&tenant.range, &place.range);
        let outside = before.into_iter().chain(behind);
        kept.extend(outside.map(|range| tenant.part(range)));
        if tenant.is_wiped(place, fate) {
            marked.extend(within.map(|range| tenant.marked(range, place)));
        }
    }
    tenants.append(&mut kept);
    // The rest of the range is the new id's.
    let mut at = place.range.start();
    marked.sort_by_key(|tenant: &Tenant| tenant.range.start());
    for tenant in marked {
        tenants.extend(between(place, at, tenant.range.start()));
        at = tenant.range.end();
        tenants.push(tenant);
    }
    tenants.extend(between(place, at, place.range.end()));
}

/// Marks the bytes of a place that no lease has held, as data of the place's id whose wipe is unfinished.
fn mark_unknown(tenants: &mut Vec<Tenant>, place: &Place<'_>) {
    let known = tenants.iter().filter(|tenant| tenant.overlaps(place));
    let known = known.filter_map(|tenant| {
        let [_, within, _] = split(&tenant.range, &place.range);
        within
    });
    let mut known: Vec<ByteRange> = known.collect();
    known.sort_by_key(ByteRange::start);
    let mut at = place.range.start();
    for range in known {
        tenants.extend(between(place, at, range.start()).map(unwiped));
        at = at.max(range.end());
    }
    tenants.extend(between(place, at, place.range.end()).map(unwiped));
}

fn unwiped(tenant: Tenant) -> Tenant {
    Tenant {
        wiping: true,
        ..tenant
    }
}

/// The parts of `place` that are marked, as its drive numbers its bytes.
pub(super) fn marked(tenants: &[Tenant], place: &Place<'_>) -> Vec<ByteRange> {
    let of_part = |part: &Part| {
        let marked = marked_in_part(tenants, &part.place(place));
        let moved = marked.into_iter().map(|range| part.on_drive(range));
        moved.flatten().collect::<Vec<_>>()
    };
    parts(place).iter().flat_map(of_part).collect()
}

fn marked_in_part(tenants: &[Tenant], place: &Place<'_>) -> Vec<ByteRange> {
    let marked = tenants
        .iter()
        .filter(|tenant| tenant.wiping && tenant.overlaps(place));
    let mut marked: Vec<ByteRange> = marked
        .filter_map(|tenant| {
            let [_, within, _] = split(&tenant.range, &place.range);
            within
        })
        .collect();
    marked.sort_by_key(ByteRange::start);
    joined(&marked)
}

fn between(place: &Place<'_>, start: u64, end: u64) -> Option<Tenant> {
    let range = ByteRange::new(start, end.checked_sub(start)?).ok()?;
    Some(Tenant::new(place.part(range)))
}

/// The parts of `range` before, within and behind `other`, which it overlaps.
pub(super) fn split(range: &ByteRange, other: &ByteRange) -> [Option<ByteRange>; 3] {
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

    fn place(id: &'static str, start: u64, length: u64) -> Place<'static> {
        Place {
            id,
            drive: "file:/drive",
            nsid: 1,
            range: ByteRange::new(start, length).unwrap(),
            at: None,
        }
    }

    #[test]
    fn data_is_in_the_way_of_other_ids_alone() {
        let mut tenants = Vec::new();
        enter(&mut tenants, &place("a", 10, 10), FormerData::Refused);
        assert_eq!(in_the_way(&tenants, &place("a", 0, 30)), None);
        assert_eq!(in_the_way(&tenants, &place("b", 0, 10)), None);
        let other = Place {
            drive: "file:/other",
            ..place("b", 10, 10)
        };
        assert_eq!(in_the_way(&tenants, &other), None);
        let left = in_the_way(&tenants, &place("b", 19, 1)).unwrap();
        assert_eq!(left.to_string(), "data of lease \"a\" in 10+10");

        enter(&mut tenants, &place("b", 15, 2), FormerData::Wiped);
        assert_eq!(
            marked(&tenants, &place("b", 0, 30)),
            [ByteRange::new(15, 2).unwrap()]
        );
        // A range whose wipe has not ended belongs to no id.
        let left = in_the_way(&tenants, &place("b", 15, 2)).unwrap();
        assert!(left.to_string().ends_with("not wiped to the end"), "{left}");
        enter(&mut tenants, &place("b", 15, 2), FormerData::Refused);
        assert_eq!(in_the_way(&tenants, &place("b", 15, 2)), None);
        assert!(in_the_way(&tenants, &place("b", 10, 7)).is_some());
        assert!(in_the_way(&tenants, &place("b", 17, 3)).is_some());
    }

    #[test]
    fn lists_are_the_same_in_any_order() {
        let mut tenants = Vec::new();
        for (id, start) in [("a", 10), ("b", 30), ("c", 50)] {
            enter(&mut tenants, &place(id, start, 10), FormerData::Refused);
        }
        let other = Place {
            drive: "file:/other",
            ..place("b", 10, 10)
        };
        enter(&mut tenants, &other, FormerData::Refused);
        let mut others = tenants.clone();
        others.rotate_left(1);
        others.swap(0, 2);
        assert!(are_same(&tenants, &others));
        assert!(!are_same(&tenants, &others[1..]));
        others[0].released = true;
        assert!(!are_same(&tenants, &others));
        others[0] = others[1].clone();
        assert!(!are_same(&tenants, &others));
    }

    #[test]
    fn data_that_was_given_up_is_in_the_way_of_no_id() {
        let mut tenants = Vec::new();
        enter(&mut tenants, &place("a", 10, 10), FormerData::Refused);
        enter(&mut tenants, &place("c", 30, 10), FormerData::Refused);
        let given_up = decide(&mut tenants, "a", FormerData::Kept);
        assert_eq!(given_up, [ByteRange::new(10, 10).unwrap()]);
        assert_eq!(decide(&mut tenants, "none", FormerData::Kept), []);
        assert_eq!(in_the_way(&tenants, &place("b", 10, 10)), None);
        assert!(in_the_way(&tenants, &place("b", 10, 21)).is_some());
        // A request to wipe wipes it all the same.
        let mut wiped = tenants.clone();
        enter(&mut wiped, &place("b", 10, 10), FormerData::Wiped);
        assert_eq!(marked(&wiped, &place("b", 10, 10)), given_up);
        assert_eq!(decide(&mut wiped, "a", FormerData::Kept), [], "mixed data");
        // The new id has it like any other data, and what it does not lease stays given up.
        enter(&mut tenants, &place("b", 10, 5), FormerData::Refused);
        assert!(in_the_way(&tenants, &place("a", 10, 5)).is_some());
        assert_eq!(in_the_way(&tenants, &place("d", 15, 5)), None);
    }

    #[test]
    fn what_no_lease_has_held_is_erased_on_request_alone() {
        let range = |start, length| ByteRange::new(start, length).unwrap();
        let mut tenants = Vec::new();
        enter(&mut tenants, &place("a", 10, 5), FormerData::Refused);
        enter(&mut tenants, &place("b", 20, 5), FormerData::Refused);
        let mut wiped = tenants.clone();
        enter(&mut wiped, &place("a", 5, 25), FormerData::Wiped);
        assert_eq!(marked(&wiped, &place("a", 0, 40)), [range(20, 5)]);
        enter(&mut tenants, &place("a", 5, 25), FormerData::Erased);
        let all = [range(5, 5), range(15, 15)];
        assert_eq!(marked(&tenants, &place("a", 0, 40)), all);
        // What is its own stays so, and what is wiped becomes so.
        for range in all {
            let place = place("a", range.start(), range.length());
            enter(&mut tenants, &place, FormerData::Kept);
        }
        enter(&mut tenants, &place("a", 5, 25), FormerData::Erased);
        assert_eq!(marked(&tenants, &place("a", 0, 40)), []);
    }

    #[test]
    fn a_partition_has_the_tenants_of_its_disk() {
        let mut tenants = Vec::new();
        let disk = |id, start, length| Place {
            drive: "disk:one",
            ..place(id, start, length)
        };
        let partition = |id, start, length| Place {
            drive: "100+50 of disk:one",
            ..place(id, start, length)
        };
        enter(&mut tenants, &disk("a", 110, 10), FormerData::Refused);
        assert_eq!(in_the_way(&tenants, &partition("b", 0, 10)), None);
        assert!(in_the_way(&tenants, &partition("b", 15, 10)).is_some());
        enter(&mut tenants, &partition("b", 15, 10), FormerData::Wiped);
        assert_eq!(
            marked(&tenants, &partition("b", 15, 10)),
            [ByteRange::new(15, 5).unwrap()]
        );
        assert!(in_the_way(&tenants, &disk("a", 124, 1)).is_some());
    }

    #[test]
    fn a_block_device_has_the_tenants_of_its_namespace() {
        let mut tenants = Vec::new();
        let physical = Place {
            drive: "nvme:nqn.a:s",
            nsid: 2,
            ..place("a", 110, 10)
        };
        enter(&mut tenants, &physical, FormerData::Refused);
        let block = |drive| Place {
            drive,
            ..place("b", 0, 50)
        };
        assert!(in_the_way(&tenants, &block("100+50 of nvme:nqn.a:s/2")).is_some());
        assert_eq!(in_the_way(&tenants, &block("100+50 of nvme:nqn.a:s")), None);
        assert_eq!(
            in_the_way(&tenants, &block("120+50 of nvme:nqn.a:s/2")),
            None
        );
    }

    #[derive(Clone, Copy, Debug)]
    enum Doing {
        Enter(u64, u64),
        Decide,
    }

    /// A byte of the model: whose it is, whether it is marked, and what was decided.
    #[derive(Clone, Copy, Debug, PartialEq)]
    struct Byte(&'static str, bool, FormerData);

    impl Byte {
        fn is_foreign(self, id: &str) -> bool {
            self.1 || self.0 != id
        }

        fn refuses(self, id: &str) -> bool {
            let decided = match self.2 {
                FormerData::Refused => false,
                FormerData::Kept => !self.1,
                FormerData::Wiped | FormerData::Erased => true,
            };
            self.is_foreign(id) && !decided
        }
    }

    fn doing() -> impl Strategy<Value = Doing> {
        prop_oneof![
            3 => (0..60_u64, 1..20_u64).prop_map(|(start, length)| Doing::Enter(start, length)),
            1 => Just(Doing::Decide),
        ]
    }

    fn fate() -> impl Strategy<Value = FormerData> {
        use FormerData::{Erased, Kept, Refused, Wiped};
        prop::sample::select(vec![Refused, Kept, Wiped, Erased])
    }

    proptest! {
        #[test]
        fn every_byte_has_the_tenant_that_last_entered(
            steps in prop::collection::vec((prop::sample::select(vec!["a", "b", "c"]), doing(), fate()), 1..40)
        ) {
            let mut model: [Option<Byte>; 80] = [None; 80];
            let mut tenants = Vec::new();
            for (id, doing, fate) in steps {
                match doing {
                    Doing::Enter(start, length) => {
                        let place = place(id, start, length);
                        let bytes = &mut model[start as usize..(start + length) as usize];
                        let refused = bytes.iter().flatten().any(|byte| byte.refuses(id));
                        prop_assert_eq!(in_the_way(&tenants, &place).is_some(), refused);
                        enter(&mut tenants, &place, fate);
                        for byte in bytes {
                            let wiped = byte.filter(|byte| {
                                let fate = if fate == FormerData::Refused { byte.2 } else { fate };
                                let given = matches!(fate, FormerData::Wiped | FormerData::Erased);
                                byte.is_foreign(id) && given
                            });
                            *byte = Some(match wiped {
                                Some(Byte(owner, _, decided)) => Byte(owner, true, decided),
                                None => {
                                    let is_unknown = byte.is_none() && fate == FormerData::Erased;
                                    Byte(id, is_unknown, FormerData::Refused)
                                }
                            });
                        }
                    }
                    Doing::Decide => {
                        decide(&mut tenants, id, fate);
                        for byte in model.iter_mut().flatten() {
                            if byte.0 == id && (!byte.1 || fate != FormerData::Kept) {
                                byte.2 = match fate {
                                    FormerData::Erased => FormerData::Wiped,
                                    fate => fate,
                                };
                            }
                        }
                    }
                }
                for (at, byte) in model.iter().enumerate() {
                    let found: Vec<_> = tenants
                        .iter()
                        .filter(|tenant| (tenant.range.start()..tenant.range.end()).contains(&(at as u64)))
                        .map(|tenant| {
                            let decided = match (tenant.given_up, tenant.released) {
                                (false, false) => FormerData::Refused,
                                (_, false) => FormerData::Kept,
                                (_, true) => FormerData::Wiped,
                            };
                            (tenant.id.as_str(), tenant.wiping, decided)
                        })
                        .collect();
                    let expected: Vec<_> = byte.iter().map(|byte| (byte.0, byte.1, byte.2)).collect();
                    prop_assert_eq!(found, expected, "byte {}", at);
                }
            }
        }
    }
}
