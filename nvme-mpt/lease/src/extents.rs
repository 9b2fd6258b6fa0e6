//! Extents of a lease: parts of a drive in the order of the lease's blocks.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::range::{BlockRange, ByteRange, ByteSize, RangeError};

/// Maximum number of extents that a message lists one by one.
pub(super) const LISTED_MAX: usize = 3;

/// Extents of a lease: parts of a drive in the order of the lease's blocks. There is at least one part, and parts do not
/// overlap. Parts that are consecutive on the drive and in the lease are joined.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "Vec<ByteRange>", into = "Vec<ByteRange>")]
pub struct LeaseExtents(Vec<ByteRange>);

impl LeaseExtents {
    /// Creates extents from `parts`, in the order of the lease.
    ///
    /// # Errors
    /// There is no part, or two parts overlap.
    pub fn new(parts: Vec<ByteRange>) -> Result<Self, RangeError> {
        let mut sorted = parts.clone();
        sorted.sort_by_key(ByteRange::start);
        for pair in sorted.windows(2) {
            if let [one, other] = pair
                && one.overlaps(other)
            {
                return Err(RangeError::ExtentsOverlap {
                    one: *one,
                    other: *other,
                });
            }
        }
        let joined = join_adjacent(&parts);
        match joined.is_empty() {
            true => Err(RangeError::NoExtents),
            false => Ok(Self(joined)),
        }
    }

    /// Returns the parts in the order of the lease.
    #[must_use]
    pub fn parts(&self) -> &[ByteRange] {
        &self.0
    }

    /// Returns the part if there is exactly one; `None` if there are several.
    #[must_use]
    pub fn single(&self) -> Option<ByteRange> {
        match &self.0[..] {
            [only] => Some(*only),
            _ => None,
        }
    }

    /// Returns the total length in bytes.
    #[must_use]
    pub fn length(&self) -> u64 {
        // The parts lie in a 64-bit range and do not overlap, so the sum fits 64 bits.
        self.0.iter().map(ByteRange::length).sum()
    }

    /// Converts the parts to logical blocks of `1 << lba_shift` bytes, on a drive of `blocks` blocks.
    ///
    /// # Errors
    /// A part is not a whole number of blocks, or ends beyond the drive.
    pub fn to_blocks(&self, lba_shift: u8, blocks: u64) -> Result<Vec<BlockRange>, RangeError> {
        let parts = self.0.iter();
        parts
            .map(|part| part.to_blocks(lba_shift, blocks))
            .collect()
    }

    /// Returns each part with its offset in bytes within the lease.
    pub(super) fn with_offsets(&self) -> impl Iterator<Item = (u64, ByteRange)> {
        self.0.iter().scan(0, |next, part| {
            let at = *next;
            *next += part.length();
            Some((at, *part))
        })
    }

    /// Returns the parts of the drive that have the bytes `from..to` of the lease.
    pub(super) fn slice(&self, from: u64, to: u64) -> Vec<ByteRange> {
        let part = |(at, part): (u64, ByteRange)| {
            let (first, end) = (from.max(at), to.min(at + part.length()));
            ByteRange::new(
                part.start() + first.checked_sub(at)?,
                end.checked_sub(first)?,
            )
            .ok()
        };
        self.with_offsets().filter_map(part).collect()
    }

    /// Returns the offset within the lease of the drive's byte `byte`; `None` if the lease does not have that byte.
    pub(super) fn offset_of(&self, byte: u64) -> Option<u64> {
        self.with_offsets().find_map(|(at, part)| {
            let within = (part.start()..part.end()).contains(&byte);
            within.then(|| at + (byte - part.start()))
        })
    }
}

impl From<ByteRange> for LeaseExtents {
    fn from(range: ByteRange) -> Self {
        Self(vec![range])
    }
}

impl From<LeaseExtents> for Vec<ByteRange> {
    fn from(extents: LeaseExtents) -> Self {
        extents.0
    }
}

impl TryFrom<Vec<ByteRange>> for LeaseExtents {
    type Error = RangeError;

    fn try_from(parts: Vec<ByteRange>) -> Result<Self, RangeError> {
        Self::new(parts)
    }
}

impl fmt::Display for LeaseExtents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format_ranges(&self.0))
    }
}

/// Joins each range with the next range of the list if the two touch.
pub(super) fn join_adjacent(ranges: &[ByteRange]) -> Vec<ByteRange> {
    let chunks = ranges.chunk_by(|one, next| one.end() == next.start());
    let joined = chunks.filter_map(|chunk| {
        let (first, last) = (chunk.first()?, chunk.last()?);
        ByteRange::new(first.start(), last.end().checked_sub(first.start())?).ok()
    });
    joined.collect()
}

/// Formats up to three ranges one by one. For more ranges, formats only their number and total length.
pub(super) fn format_ranges(ranges: &[ByteRange]) -> String {
    if ranges.len() > LISTED_MAX {
        let lengths = ranges.iter().map(ByteRange::length);
        let length = ByteSize(lengths.fold(0, u64::saturating_add));
        return format!("{length} in {} extents", ranges.len());
    }
    let last = ranges.len().saturating_sub(1);
    let separated = |(i, range): (usize, &ByteRange)| match i {
        0 => range.to_string(),
        _ if i == last => format!(" and {range}"),
        _ => format!(", {range}"),
    };
    ranges.iter().enumerate().map(separated).collect()
}

#[cfg(test)]
mod tests {
    use nvme_spec::ids::Lba;

    use super::*;

    fn ranges(texts: &[&str]) -> Vec<ByteRange> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    fn extents(texts: &[&str]) -> LeaseExtents {
        LeaseExtents::new(ranges(texts)).unwrap()
    }

    #[test]
    fn parts_that_follow_each_other_in_both_orders_are_joined() {
        for (given, joined) in [
            (&["0+1G"][..], &["0+1G"][..]),
            (&["0+1G", "1G+1G", "2G+1G"], &["0+3G"]),
            (&["1G+1G", "0+1G"], &["1G+1G", "0+1G"]),
            (&["5G+1G", "0+1G", "1G+1G"], &["5G+1G", "0+2G"]),
            (&["0+1G", "2G+1G"], &["0+1G", "2G+1G"]),
        ] {
            let extents = extents(given);
            assert_eq!(extents.parts(), ranges(joined), "{given:?}");
            assert_eq!(extents.single().is_some(), joined.len() == 1);
            assert_eq!(extents.length(), (given.len() as u64) << 30);
        }
    }

    #[test]
    fn no_part_and_parts_that_overlap_are_refused() {
        assert_eq!(LeaseExtents::new(Vec::new()), Err(RangeError::NoExtents));
        for texts in [&["0+2G", "1G+1G"][..], &["4G+1G", "0+1G", "4G+1G"]] {
            let error = LeaseExtents::new(ranges(texts)).unwrap_err();
            assert!(
                matches!(error, RangeError::ExtentsOverlap { .. }),
                "{error}"
            );
        }
        let error = LeaseExtents::new(ranges(&["1G+1G", "0+2G"])).unwrap_err();
        assert_eq!(
            error.to_string(),
            "The extents 0+2G and 1G+1G overlap: those of a lease have no byte in common"
        );
    }

    #[test]
    fn few_parts_are_listed_and_many_are_counted() {
        for (texts, text) in [
            (&["0+1G"][..], "0+1G"),
            (&["0+1G", "5G+2G"], "0+1G and 5G+2G"),
            (&["0+1G", "5G+2G", "9G+1G"], "0+1G, 5G+2G and 9G+1G"),
            (&["0+1G", "5G+2G", "9G+1G", "3G+1G"], "5G in 4 extents"),
        ] {
            assert_eq!(extents(texts).to_string(), text);
        }
    }

    #[test]
    fn stored_extents_are_checked_when_read() {
        let json = serde_json::to_string(&extents(&["4K+4K", "0+4K"])).unwrap();
        assert_eq!(
            json,
            r#"[{"start":4096,"length":4096},{"start":0,"length":4096}]"#
        );
        let read: LeaseExtents = serde_json::from_str(&json).unwrap();
        assert_eq!(read, extents(&["4K+4K", "0+4K"]));
        for bad in [
            "[]",
            r#"[{"start":0,"length":0}]"#,
            r#"[{"start":0,"length":2},{"start":1,"length":2}]"#,
            r#"{"start":0,"length":2}"#,
        ] {
            assert!(serde_json::from_str::<LeaseExtents>(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn each_part_becomes_whole_blocks() {
        let blocks = extents(&["8K+8K", "0+4K"]).to_blocks(12, 4).unwrap();
        let range = |start, blocks| BlockRange {
            start: Lba(start),
            blocks,
        };
        assert_eq!(blocks, [range(2, 2), range(0, 1)]);
        assert!(extents(&["0+4K", "8K+512"]).to_blocks(12, 4).is_err());
        assert!(extents(&["0+4K", "8K+12K"]).to_blocks(12, 4).is_err());
    }

    #[test]
    fn bytes_of_the_lease_are_found_on_the_drive() {
        let extents = extents(&["8K+8K", "0+4K", "32K+4K"]);
        let placed: Vec<_> = extents.with_offsets().map(|(at, _)| at).collect();
        assert_eq!(placed, [0, 8192, 12288]);
        assert_eq!(extents.slice(0, 16384), extents.parts());
        assert_eq!(extents.slice(4096, 10240), ranges(&["12K+4K", "0+2K"]));
        assert_eq!(extents.slice(8192, 8192), []);
        assert_eq!(extents.slice(16384, u64::MAX), []);
        for (byte, offset) in [
            (8192, Some(0)),
            (16383, Some(8191)),
            (16384, None),
            (0, Some(8192)),
            (32768, Some(12288)),
        ] {
            assert_eq!(extents.offset_of(byte), offset, "{byte}");
        }
    }
}
