//! Sizes and ranges in bytes, in the notation of the command line, and ranges of logical blocks.

use std::fmt;
use std::str::FromStr;

use nvme_spec::ids::Lba;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Suffixes of a size, each with its power of two, largest first.
const SUFFIXES: [(char, u32); 4] = [('T', 40), ('G', 30), ('M', 20), ('K', 10)];

/// Alignment of the start and end of leases, in bytes. A file or disk may rewrite a whole block of this size to change a part
/// of it. So a block must not belong to two leases.
pub const BOUNDARY: u64 = 4096;

/// Error of parsing a size.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum SizeError {
    /// The text is not a number, or its suffix is not K, M, G or T.
    #[error(
        "\"{0}\" is not a size: write bytes, or a number with suffix K, M, G or T (powers of 1024), such as 64G"
    )]
    Syntax(String),
    /// The size does not fit 64 bits.
    #[error("\"{0}\" is more than 64 bits can count; the largest size is 16777215T")]
    TooLarge(String),
}

/// A number of bytes, written as a number with an optional suffix K, M, G or T (powers of 1024).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ByteSize(pub u64);

impl FromStr for ByteSize {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Self, SizeError> {
        let syntax = || SizeError::Syntax(text.to_owned());
        let last = text.chars().next_back().ok_or_else(syntax)?;
        let (digits, shift) = SUFFIXES
            .iter()
            .find(|(suffix, _)| last.eq_ignore_ascii_case(suffix))
            .map_or((text, 0), |(_, shift)| (&text[..text.len() - 1], *shift));
        // `u64::from_str` would accept a leading plus sign, which separates start and length here.
        if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
            return Err(syntax());
        }
        let too_large = || SizeError::TooLarge(text.to_owned());
        let number: u64 = digits.parse().map_err(|_| too_large())?;
        number
            .checked_mul(1 << shift)
            .map(Self)
            .ok_or_else(too_large)
    }
}

impl fmt::Display for ByteSize {
    /// Formats the size with the largest suffix that represents it exactly.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let exact = SUFFIXES
            .iter()
            .find(|(_, shift)| self.0 != 0 && self.0.is_multiple_of(1 << shift));
        match exact {
            Some((suffix, shift)) => f.pad(&format!("{}{suffix}", self.0 >> shift)),
            None => f.pad(&self.0.to_string()),
        }
    }
}

/// Error of a range that is invalid, or does not fit the drive.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum RangeError {
    /// The plus sign between start and length is missing.
    #[error("\"{0}\" is not a range: write START+LENGTH, such as 64G+64G")]
    Syntax(String),
    /// Start or length is not a size.
    #[error("\"{text}\" is not a range: its {part} is wrong")]
    Size {
        /// Text of the whole range.
        text: String,
        /// Part that is no size: `start` or `length`.
        part: &'static str,
        /// Error of parsing the part.
        source: SizeError,
    },
    /// The length is zero.
    #[error("A range that starts at {0} is empty: give it a length above 0")]
    Empty(ByteSize),
    /// The end does not fit 64 bits.
    #[error("The range of {length} from {start} ends beyond what 64 bits can count")]
    Overflow {
        /// First byte of the range.
        start: ByteSize,
        /// Number of bytes of the range.
        length: ByteSize,
    },
    /// Start or length is not a multiple of the drive's logical block size.
    #[error(
        "The {part} of range {range} is not a multiple of the drive's logical block of {block} bytes: \
         {below} and {above} are"
    )]
    NotWholeBlocks {
        /// The range.
        range: ByteRange,
        /// Part that is no multiple: `start` or `length`.
        part: &'static str,
        /// Size of a logical block in bytes.
        block: u64,
        /// Next lower valid value for this part.
        below: ByteSize,
        /// Next higher valid value for this part.
        above: ByteSize,
    },
    /// The start or end of a lease is not aligned to [`BOUNDARY`].
    #[error(
        "The {part} of range {range} is not a multiple of {boundary} bytes, as that of a lease has to be: {below} and \
         {above} are",
        boundary = BOUNDARY
    )]
    NotOnBoundary {
        /// The range.
        range: ByteRange,
        /// Part that is not aligned: `start` or `length`.
        part: &'static str,
        /// Next lower valid value for this part.
        below: ByteSize,
        /// Next higher valid value for this part.
        above: ByteSize,
    },
    /// The range ends beyond the drive.
    #[error("Range {range} ends at {end}, beyond the drive's {capacity}; {advice}")]
    BeyondDrive {
        /// The range.
        range: ByteRange,
        /// End of the range.
        end: ByteSize,
        /// Size of the drive.
        capacity: ByteSize,
        /// Description of ranges that would fit.
        advice: String,
    },
    /// A lease has no extents.
    #[error("A lease without extents has no bytes: give it one extent at least")]
    NoExtents,
    /// Two extents of one lease overlap.
    #[error("The extents {one} and {other} overlap: those of a lease have no byte in common")]
    ExtentsOverlap {
        /// The extent with the lower start.
        one: ByteRange,
        /// The other extent.
        other: ByteRange,
    },
}

/// A non-empty range of bytes of a drive, whose end fits 64 bits. Written `START+LENGTH`, each a [`ByteSize`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "RawRange", into = "RawRange")]
pub struct ByteRange {
    start: u64,
    length: u64,
}

/// Serialized form of a range, which is validated when it is read.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawRange {
    start: u64,
    length: u64,
}

impl From<ByteRange> for RawRange {
    fn from(range: ByteRange) -> Self {
        Self {
            start: range.start,
            length: range.length,
        }
    }
}

impl TryFrom<RawRange> for ByteRange {
    type Error = RangeError;

    fn try_from(raw: RawRange) -> Result<Self, RangeError> {
        Self::new(raw.start, raw.length)
    }
}

impl ByteRange {
    /// Creates a range of `length` bytes from byte `start`.
    ///
    /// # Errors
    /// The range is empty, or its end does not fit 64 bits.
    pub fn new(start: u64, length: u64) -> Result<Self, RangeError> {
        if length == 0 {
            return Err(RangeError::Empty(ByteSize(start)));
        }
        if start.checked_add(length).is_none() {
            return Err(RangeError::Overflow {
                start: ByteSize(start),
                length: ByteSize(length),
            });
        }
        Ok(Self { start, length })
    }

    /// Returns the first byte.
    #[must_use]
    pub const fn start(&self) -> u64 {
        self.start
    }

    /// Returns the number of bytes, above 0.
    #[must_use]
    pub const fn length(&self) -> u64 {
        self.length
    }

    /// Returns the first byte after the range.
    #[must_use]
    pub const fn end(&self) -> u64 {
        // `new` has checked that the sum fits 64 bits.
        self.start + self.length
    }

    /// Returns whether the ranges have a byte in common.
    #[must_use]
    pub const fn overlaps(&self, other: &Self) -> bool {
        self.start < other.end() && other.start < self.end()
    }

    /// Checks that start and end are aligned for a lease ([`BOUNDARY`]). The end may also be `capacity`, the size of
    /// the drive in bytes.
    ///
    /// # Errors
    /// [`RangeError::NotOnBoundary`].
    pub fn check_alignment(&self, capacity: u64) -> Result<(), RangeError> {
        let length = (self.end() != capacity).then_some(("length", self.length));
        for (part, value) in [Some(("start", self.start)), length].into_iter().flatten() {
            if !value.is_multiple_of(BOUNDARY) {
                let below = value - value % BOUNDARY;
                return Err(RangeError::NotOnBoundary {
                    range: *self,
                    part,
                    below: ByteSize(below),
                    above: ByteSize(below.saturating_add(BOUNDARY)),
                });
            }
        }
        Ok(())
    }

    /// Converts the range to logical blocks of `1 << lba_shift` bytes, on a drive of `blocks` blocks.
    ///
    /// # Errors
    /// Start or length is not a whole number of blocks, or the range ends beyond the drive.
    pub fn to_blocks(&self, lba_shift: u8, blocks: u64) -> Result<BlockRange, RangeError> {
        let block = 1_u64 << lba_shift;
        for (part, value) in [("start", self.start), ("length", self.length)] {
            if !value.is_multiple_of(block) {
                let below = value - value % block;
                return Err(RangeError::NotWholeBlocks {
                    range: *self,
                    part,
                    block,
                    below: ByteSize(below),
                    above: ByteSize(below.saturating_add(block)),
                });
            }
        }
        let range = BlockRange {
            start: Lba(self.start >> lba_shift),
            blocks: self.length >> lba_shift,
        };
        if self.end() >> lba_shift > blocks {
            // The product saturates only if the drive is larger than any range; then every range fits.
            let capacity = blocks.saturating_mul(block);
            let advice = match capacity.checked_sub(self.start) {
                Some(rest) if rest > 0 => format!(
                    "the longest range from there is {}+{}",
                    ByteSize(self.start),
                    ByteSize(rest)
                ),
                _ => "start below that".to_owned(),
            };
            return Err(RangeError::BeyondDrive {
                range: *self,
                end: ByteSize(self.end()),
                capacity: ByteSize(capacity),
                advice,
            });
        }
        Ok(range)
    }
}

impl FromStr for ByteRange {
    type Err = RangeError;

    fn from_str(text: &str) -> Result<Self, RangeError> {
        let (start, length) = text
            .split_once('+')
            .ok_or_else(|| RangeError::Syntax(text.to_owned()))?;
        let size = |part, value: &str| {
            value
                .parse::<ByteSize>()
                .map_err(|source| RangeError::Size {
                    text: text.to_owned(),
                    part,
                    source,
                })
        };
        Self::new(size("start", start)?.0, size("length", length)?.0)
    }
}

impl fmt::Display for ByteRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!(
            "{}+{}",
            ByteSize(self.start),
            ByteSize(self.length)
        ))
    }
}

/// A range of logical blocks of one namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockRange {
    /// First block.
    pub start: Lba,
    /// Number of blocks.
    pub blocks: u64,
}

impl BlockRange {
    /// Returns the range in bytes. The namespace's size in bytes must fit 64 bits.
    #[must_use]
    pub const fn bytes(&self, lba_shift: u8) -> ByteRange {
        ByteRange {
            start: self.start.0 << lba_shift,
            length: self.blocks << lba_shift,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const G: u64 = 1 << 30;

    #[test]
    fn sizes_are_powers_of_1024() {
        for (text, bytes) in [
            ("0", 0),
            ("512", 512),
            ("1K", 1024),
            ("1k", 1024),
            ("3M", 3 << 20),
            ("64G", 64 << 30),
            ("2T", 2 << 40),
            ("16777215T", 16_777_215 << 40),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(text.parse(), Ok(ByteSize(bytes)), "{text}");
        }
    }

    #[test]
    fn what_is_no_size_is_refused() {
        for text in [
            "", "G", "+1", "-1", "1.5G", "1 G", "1GB", "1GiB", "0x10", "1P", "٣",
        ] {
            assert_eq!(
                text.parse::<ByteSize>(),
                Err(SizeError::Syntax(text.to_owned())),
                "{text}"
            );
        }
        for text in ["18446744073709551616", "16777216T", "99999999999999999999K"] {
            assert_eq!(
                text.parse::<ByteSize>(),
                Err(SizeError::TooLarge(text.to_owned())),
                "{text}"
            );
        }
    }

    #[test]
    fn sizes_print_with_the_largest_exact_suffix() {
        for (bytes, text) in [
            (0, "0"),
            (1, "1"),
            (1023, "1023"),
            (1024, "1K"),
            (1 << 20, "1M"),
            (G + 512, "1073742336"),
            (1536 << 20, "1536M"),
            (1 << 40, "1T"),
            (u64::MAX, "18446744073709551615"),
        ] {
            assert_eq!(ByteSize(bytes).to_string(), text);
        }
        assert_eq!(format!("{:>6}|", ByteSize(1024)), "    1K|");
    }

    #[test]
    fn a_range_reads_and_prints_the_same() {
        for text in ["0+1G", "64G+64G", "512+512", "1T+1536M"] {
            let range: ByteRange = text.parse().unwrap();
            assert_eq!(range.to_string(), text);
        }
        let range: ByteRange = "64G+2G".parse().unwrap();
        assert_eq!(
            (range.start(), range.length(), range.end()),
            (64 * G, 2 * G, 66 * G)
        );
    }

    #[test]
    fn what_is_no_range_is_refused_with_the_part_that_is_wrong() {
        for (text, message) in [
            (
                "64G",
                "\"64G\" is not a range: write START+LENGTH, such as 64G+64G",
            ),
            ("x+1G", "\"x+1G\" is not a range: its start is wrong"),
            ("0+", "\"0+\" is not a range: its length is wrong"),
            ("0+1+2", "\"0+1+2\" is not a range: its length is wrong"),
            (
                "4K+0",
                "A range that starts at 4K is empty: give it a length above 0",
            ),
            (
                "16777215T+1T",
                "The range of 1T from 16777215T ends beyond what 64 bits can count",
            ),
        ] {
            let error = text.parse::<ByteRange>().unwrap_err();
            assert_eq!(error.to_string(), message);
        }
        // The last byte of the range has an address, but the byte after it has none.
        assert!(ByteRange::new(u64::MAX - 1, 1).is_ok());
        assert!(ByteRange::new(u64::MAX, 1).is_err());
    }

    #[test]
    fn ranges_that_touch_do_not_overlap() {
        let range = |start, length| ByteRange::new(start, length).unwrap();
        let middle = range(100, 50);
        for (other, overlaps) in [
            (range(0, 100), false),
            (range(0, 101), true),
            (range(100, 50), true),
            (range(120, 1), true),
            (range(0, 1000), true),
            (range(149, 1), true),
            (range(150, 1), false),
            (range(u64::MAX - 1, 1), false),
        ] {
            assert_eq!(middle.overlaps(&other), overlaps, "{other}");
            assert_eq!(other.overlaps(&middle), overlaps, "{other}");
        }
    }

    #[test]
    fn a_range_becomes_whole_blocks() {
        let range: ByteRange = "64K+1M".parse().unwrap();
        assert_eq!(
            range.to_blocks(12, 272),
            Ok(BlockRange {
                start: Lba(16),
                blocks: 256
            })
        );
        assert_eq!(
            range.to_blocks(9, u64::MAX),
            Ok(BlockRange {
                start: Lba(128),
                blocks: 2048
            })
        );
    }

    #[test]
    fn leases_begin_and_end_at_multiples_of_4_kib() {
        let check = |text: &str| {
            let range: ByteRange = text.parse().unwrap();
            range.check_alignment((1 << 20) + 512)
        };
        for valid in ["0+4K", "8K+1000K", "4K+1044992", "0+1049088"] {
            check(valid).expect(valid);
        }
        for (text, message) in [
            (
                "512+4K",
                "The start of range 512+4K is not a multiple of 4096 bytes, as that of a lease has to be: 0 and 4K are",
            ),
            (
                "4K+6K",
                "The length of range 4K+6K is not a multiple of 4096 bytes, as that of a lease has to be: 4K and 8K \
                 are",
            ),
        ] {
            assert_eq!(check(text).unwrap_err().to_string(), message);
        }
    }

    #[test]
    fn a_part_of_a_block_is_refused() {
        let message = |text: &str| {
            let range: ByteRange = text.parse().unwrap();
            range.to_blocks(12, 1 << 20).unwrap_err().to_string()
        };
        assert_eq!(
            message("512+8K"),
            "The start of range 512+8K is not a multiple of the drive's logical block of 4096 bytes: 0 and 4K are"
        );
        assert_eq!(
            message("4K+5000"),
            "The length of range 4K+5000 is not a multiple of the drive's logical block of 4096 bytes: 4K and 8K are"
        );
    }

    #[test]
    fn a_range_beyond_the_drive_is_refused() {
        let message = |text: &str| {
            let range: ByteRange = text.parse().unwrap();
            range.to_blocks(12, 256).unwrap_err().to_string()
        };
        assert_eq!(
            message("512K+1M"),
            "Range 512K+1M ends at 1536K, beyond the drive's 1M; the longest range from there is 512K+512K"
        );
        assert_eq!(
            message("1M+4K"),
            "Range 1M+4K ends at 1028K, beyond the drive's 1M; start below that"
        );
        assert_eq!(
            message("16777215T+4K"),
            "Range 16777215T+4K ends at 18014397435740164K, beyond the drive's 1M; start below that"
        );
        let whole: ByteRange = "0+1M".parse().unwrap();
        assert!(whole.to_blocks(12, 256).is_ok());
    }

    #[test]
    fn a_stored_range_is_checked_when_read() {
        let range: ByteRange = "64G+64G".parse().unwrap();
        let json = serde_json::to_string(&range).unwrap();
        assert_eq!(json, r#"{"start":68719476736,"length":68719476736}"#);
        assert_eq!(serde_json::from_str::<ByteRange>(&json).unwrap(), range);
        for bad in [
            r#"{"start":0,"length":0}"#,
            r#"{"start":18446744073709551615,"length":1}"#,
            r#"{"start":-1,"length":1}"#,
            r#"{"start":0}"#,
        ] {
            assert!(serde_json::from_str::<ByteRange>(bad).is_err(), "{bad}");
        }
    }
}
