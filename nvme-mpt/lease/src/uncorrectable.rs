//! Ledger entries for blocks that Write Uncorrectable made unreadable.
//!
//! A mark (an entry for unreadable blocks) belongs to the data of an id. It lasts until the blocks are written, wiped, or
//! leased by another id. Marks address bytes by the disk or file that stores them, as the entries of
//! [`super::range_owners`] do.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};

use super::extents::join_adjacent;
use super::range_owners::{BackingPart, RangeCandidate, backing_parts, is_same_base, split_range};
use crate::range::ByteRange;

/// Bytes on one base (disk or file) that Write Uncorrectable of an id's guest made unreadable.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct UncorrectableBytes {
    id: String,
    drive: String,
    nsid: u32,
    /// Unreadable ranges sorted by start, which neither overlap nor touch.
    #[serde(serialize_with = "write_ranges", deserialize_with = "read_ranges")]
    ranges: Vec<ByteRange>,
}

/// Serializes the ranges as one text, because there may be thousands.
fn write_ranges<S: Serializer>(ranges: &[ByteRange], serializer: S) -> Result<S::Ok, S::Error> {
    let ranges: Vec<String> = ranges.iter().map(ByteRange::to_string).collect();
    serializer.serialize_str(&ranges.join(" "))
}

fn read_ranges<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<ByteRange>, D::Error> {
    let text = String::deserialize(deserializer)?;
    let ranges = text.split_whitespace().map(str::parse);
    ranges.collect::<Result<_, _>>().map_err(D::Error::custom)
}

impl UncorrectableBytes {
    fn is_on_base(&self, place: &RangeCandidate<'_>) -> bool {
        is_same_base((&self.drive, self.nsid), (place.drive, place.nsid))
    }

    /// Returns the id whose guest made the bytes unreadable.
    pub(super) fn id(&self) -> &str {
        &self.id
    }

    /// Renames the base (disk or file) that the entry names.
    pub(super) fn rename_drive(&mut self, rename: impl Fn(&str) -> Option<String>) {
        if let Some(name) = rename(&self.drive) {
            self.drive = name;
        }
    }

    /// Removes a range from the unreadable bytes.
    fn remove_range(&mut self, range: &ByteRange) {
        self.ranges = subtract(&self.ranges, range);
    }
}

/// Returns `ranges` without the bytes of `cut`.
pub(super) fn subtract(ranges: &[ByteRange], cut: &ByteRange) -> Vec<ByteRange> {
    let remaining = ranges
        .iter()
        .flat_map(|range| match split_range(range, cut) {
            [before, Some(_), behind] => [before, behind],
            [_, None, _] => [Some(*range), None],
        });
    remaining.flatten().collect()
}

/// Returns the unreadable ranges of the id of `place` that lie in `place`, as offsets on the leased drive.
pub(super) fn find_ranges(
    uncorrectable: &[UncorrectableBytes],
    place: &RangeCandidate<'_>,
) -> Vec<ByteRange> {
    let of_part = |part: &BackingPart| {
        let place = part.candidate(place);
        let its = uncorrectable
            .iter()
            .filter(|entry| entry.id == place.id && entry.is_on_base(&place));
        let within = its.flat_map(|entry| &entry.ranges).filter_map(|range| {
            let [_, within, _] = split_range(range, &place.range);
            part.to_drive_range(within?)
        });
        within.collect::<Vec<_>>()
    };
    backing_parts(place).iter().flat_map(of_part).collect()
}

/// Replaces the ranges that are recorded as unreadable for the id of `place` within `place` by `ranges`, which are offsets on
/// the leased drive.
pub(super) fn replace(
    uncorrectable: &mut Vec<UncorrectableBytes>,
    place: &RangeCandidate<'_>,
    ranges: &[ByteRange],
) {
    let mut at = place.range.start();
    for part in backing_parts(place) {
        let on_drive = ByteRange::new(at, part.range.length());
        at = at.saturating_add(part.range.length());
        let Ok(on_drive) = on_drive else { continue };
        let place = part.candidate(place);
        remove_from_part(uncorrectable, &place, |id| id == place.id);
        let within = ranges.iter().filter_map(|range| {
            let [_, within, _] = split_range(range, &on_drive);
            let within = within?;
            let moved = within.start() - on_drive.start();
            ByteRange::new(place.range.start().checked_add(moved)?, within.length()).ok()
        });
        let mut within: Vec<_> = within.collect();
        if within.is_empty() {
            continue;
        }
        let is_its = |entry: &UncorrectableBytes| {
            (entry.id.as_str(), entry.drive.as_str(), entry.nsid)
                == (place.id, place.drive, place.nsid)
        };
        if let Some(its) = uncorrectable.iter_mut().find(|entry| is_its(entry)) {
            its.ranges.append(&mut within);
            its.ranges.sort_by_key(ByteRange::start);
            its.ranges = join_adjacent(&its.ranges);
        } else {
            within.sort_by_key(ByteRange::start);
            uncorrectable.push(UncorrectableBytes {
                id: place.id.to_owned(),
                drive: place.drive.to_owned(),
                nsid: place.nsid,
                ranges: join_adjacent(&within),
            });
        }
    }
    uncorrectable.retain(|entry| !entry.ranges.is_empty());
}

/// Removes the marks of other ids in `place`, because the id of `place` now owns these bytes.
pub(super) fn remove_others(
    uncorrectable: &mut Vec<UncorrectableBytes>,
    place: &RangeCandidate<'_>,
) {
    remove_where(uncorrectable, place, |id| id != place.id);
}

/// Removes all unreadable ranges in `place`, because its bytes were wiped.
pub(super) fn remove_all(uncorrectable: &mut Vec<UncorrectableBytes>, place: &RangeCandidate<'_>) {
    remove_where(uncorrectable, place, |_| true);
}

fn remove_where(
    uncorrectable: &mut Vec<UncorrectableBytes>,
    place: &RangeCandidate<'_>,
    is_of: impl Fn(&str) -> bool,
) {
    // Most drives have no unreadable ranges.
    if uncorrectable.is_empty() {
        return;
    }
    for part in backing_parts(place) {
        remove_from_part(uncorrectable, &part.candidate(place), &is_of);
    }
    uncorrectable.retain(|entry| !entry.ranges.is_empty());
}

fn remove_from_part(
    uncorrectable: &mut [UncorrectableBytes],
    place: &RangeCandidate<'_>,
    is_of: impl Fn(&str) -> bool,
) {
    for entry in uncorrectable {
        if is_of(&entry.id) && entry.is_on_base(place) {
            entry.remove_range(&place.range);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn place<'a>(id: &'a str, drive: &'a str, start: u64, length: u64) -> RangeCandidate<'a> {
        RangeCandidate {
            id,
            drive,
            nsid: 1,
            range: ByteRange::new(start, length).unwrap(),
            lease_offset: None,
        }
    }

    fn range(start: u64, length: u64) -> ByteRange {
        ByteRange::new(start, length).unwrap()
    }

    #[test]
    fn marks_are_those_of_the_bytes_by_whatever_name() {
        let mut uncorrectable = Vec::new();
        let partition = |id, start, length| place(id, "100+50 of disk:one", start, length);
        replace(
            &mut uncorrectable,
            &partition("a", 0, 50),
            &[range(4, 2), range(30, 1)],
        );
        let disk = place("a", "disk:one", 100, 50);
        assert_eq!(
            find_ranges(&uncorrectable, &disk),
            [range(104, 2), range(130, 1)]
        );
        assert_eq!(
            find_ranges(&uncorrectable, &place("b", "disk:one", 100, 50)),
            []
        );
        assert_eq!(
            find_ranges(&uncorrectable, &place("a", "disk:two", 100, 50)),
            []
        );
        remove_others(&mut uncorrectable, &disk);
        assert_eq!(
            find_ranges(&uncorrectable, &partition("a", 5, 10)),
            [range(5, 1)]
        );
        remove_others(&mut uncorrectable, &place("b", "disk:one", 105, 20));
        assert_eq!(
            find_ranges(&uncorrectable, &disk),
            [range(104, 1), range(130, 1)]
        );
        remove_all(&mut uncorrectable, &place("a", "disk:one", 104, 1));
        assert_eq!(find_ranges(&uncorrectable, &disk), [range(130, 1)]);
        replace(&mut uncorrectable, &disk, &[]);
        assert_eq!(uncorrectable, [], "an id without marks takes no room");
    }

    #[test]
    fn ranges_are_stored_as_one_text() {
        let mut uncorrectable = Vec::new();
        let its = place("a", "disk:one", 0, 1 << 20);
        replace(
            &mut uncorrectable,
            &its,
            &[range(512, 512), range(1536, 4096)],
        );
        let text = serde_json::to_string(&uncorrectable).unwrap();
        assert!(text.contains("\"512+512 1536+4K\""), "{text}");
        let read: Vec<UncorrectableBytes> = serde_json::from_str(&text).unwrap();
        assert_eq!(read, uncorrectable);
        for wrong in ["512", "x+1", "1+0"] {
            let text = text.replace("512+512", wrong);
            serde_json::from_str::<Vec<UncorrectableBytes>>(&text).unwrap_err();
        }
    }

    proptest! {
        #[test]
        fn they_are_a_set_of_bytes_for_each_id(
            steps in prop::collection::vec((0..4_u8, any::<bool>(), 0..60_u64, 1..9_u64), 1..40)
        ) {
            let mut uncorrectable = Vec::new();
            let mut model = [[false; 80]; 2];
            for (step, second, start, length) in steps {
                let (id, index) = if second { ("b", 1) } else { ("a", 0) };
                let whole = place(id, "disk:one", 0, 80);
                let part = place(id, "disk:one", start, length);
                let bytes = start as usize..(start + length) as usize;
                match step {
                    0 => {
                        let mut all = find_ranges(&uncorrectable, &whole);
                        all.push(range(start, length));
                        replace(&mut uncorrectable, &whole, &all);
                        model[index][bytes].fill(true);
                    }
                    1 => {
                        replace(&mut uncorrectable, &part, &[]);
                        model[index][bytes].fill(false);
                    }
                    2 => {
                        remove_others(&mut uncorrectable, &part);
                        model[1 - index][bytes].fill(false);
                    }
                    _ => {
                        remove_all(&mut uncorrectable, &part);
                        model.iter_mut().for_each(|model| model[bytes.clone()].fill(false));
                    }
                }
                for (id, model) in ["a", "b"].iter().zip(&model) {
                    let found = find_ranges(&uncorrectable, &place(id, "disk:one", 0, 80));
                    for (at, marked) in (0..).zip(model) {
                        let is_in = |range: &ByteRange| (range.start()..range.end()).contains(&at);
                        prop_assert_eq!(found.iter().any(is_in), *marked);
                    }
                }
            }
        }
    }
}
