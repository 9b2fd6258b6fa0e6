//! A snapshot as bytes: one line that says what follows, and the state as JSON.
//!
//! The line is read first. So a snapshot of another version, one that was cut short and one that
//! was changed are each reported as what they are.

use std::fmt;

use nvme_mpt::doorbell::MAX_QUEUE_PAIRS;

use super::{FunctionState, SnapshotError, VERSION};

/// First bytes of every snapshot.
pub(super) const MAGIC: &str = "nvme-mpt function state";

/// Most bytes of a state. A Completion Queue that holds all completions that it can takes less than 128 KiB.
const STATE_MAX: usize = MAX_QUEUE_PAIRS as usize * (128 << 10);

/// Most bytes of the first line, its end included.
const LINE_MAX: usize = 128;

impl FunctionState {
    /// The state as bytes, to be written to a file.
    ///
    /// # Errors
    /// [`SnapshotError::Syntax`], which numbers and text never cause.
    pub fn to_bytes(&self) -> Result<Vec<u8>, SnapshotError> {
        let state = serde_json::to_vec(self)?;
        let line = Line {
            version: self.version,
            len: state.len(),
            crc32: crc32(&state),
        };
        Ok([format!("{line}\n").as_bytes(), &state].concat())
    }

    /// The state that was saved as these bytes.
    ///
    /// # Errors
    /// All of [`SnapshotError`] but those of restoring.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, SnapshotError> {
        let head = &bytes[..bytes.len().min(LINE_MAX)];
        let end = head.iter().position(|byte| *byte == b'\n');
        let line = end.and_then(|end| std::str::from_utf8(&bytes[..end]).ok());
        let (line, state) = match (line, end) {
            (Some(line), Some(end)) => (line, &bytes[end + 1..]),
            _ => return Err(SnapshotError::NotASnapshot),
        };
        let parsed = Line::parse(line).ok_or(SnapshotError::NotASnapshot)?;
        let Line {
            version,
            len,
            crc32: expected,
        } = parsed;
        if version != VERSION {
            return Err(SnapshotError::Version { found: version });
        }
        // Numbers can be written in more than one way, but were in one.
        if parsed.to_string() != line {
            return Err(SnapshotError::NotASnapshot);
        }
        if state.len() != len || len > STATE_MAX {
            return Err(SnapshotError::Length {
                found: state.len(),
                expected: len.min(STATE_MAX),
            });
        }
        let found = crc32(state);
        if found != expected {
            return Err(SnapshotError::Checksum { found, expected });
        }
        let state: Self = serde_json::from_slice(state)?;
        state.check_version()?;
        Ok(state)
    }

    pub(crate) fn check_version(&self) -> Result<(), SnapshotError> {
        if self.version == VERSION {
            return Ok(());
        }
        Err(SnapshotError::Version {
            found: self.version,
        })
    }
}

/// First line of a snapshot.
struct Line {
    version: u32,
    len: usize,
    crc32: u32,
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            version,
            len,
            crc32,
        } = self;
        write!(f, "{MAGIC} version={version} bytes={len} crc32={crc32:08x}")
    }
}

impl Line {
    fn parse(line: &str) -> Option<Self> {
        let mut words = line.strip_prefix(MAGIC)?.strip_prefix(' ')?.split(' ');
        let mut value = |name: &str| words.next()?.strip_prefix(name)?.strip_prefix('=');
        let version = value("version")?.parse().ok()?;
        // Other versions may have other fields after this one.
        if version != VERSION {
            return Some(Self {
                version,
                len: 0,
                crc32: 0,
            });
        }
        Some(Self {
            version,
            len: value("bytes")?.parse().ok()?,
            crc32: u32::from_str_radix(value("crc32")?, 16).ok()?,
        })
    }
}

/// CRC-32 as in ISO 3309 and Ethernet: reflected, polynomial 04C1_1DB7h.
fn crc32(bytes: &[u8]) -> u32 {
    const REFLECTED: u32 = 0xEDB8_8320;
    let table: [u32; 256] = std::array::from_fn(|index| {
        (0..8).fold(index as u32, |rest, _| {
            let carry = if rest & 1 == 0 { 0 } else { REFLECTED };
            rest >> 1 ^ carry
        })
    });
    !bytes.iter().fold(u32::MAX, |rest, byte| {
        let index = (rest as u8 ^ byte) as usize;
        rest >> 8 ^ table[index]
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_the_known_one() {
        assert_eq!(crc32(b"123456789"), 0xCBF4_3926);
        assert_eq!(crc32(b""), 0);
    }

    fn error(bytes: &[u8]) -> String {
        FunctionState::from_bytes(bytes).unwrap_err().to_string()
    }

    #[test]
    fn what_is_wrong_is_told_apart() {
        assert!(error(b"").contains("does not begin with"));
        assert!(error(&[0xFF; 4096]).contains("does not begin with"));
        assert!(error(b"nvme-mpt function state\n").contains("does not begin with"));
        let newer = error(b"nvme-mpt function state version=2 other=things\n{}");
        assert!(newer.contains("version 2") && newer.contains("version 1"));
        let short = error(b"nvme-mpt function state version=1 bytes=9 crc32=cbf43926\n12345678");
        assert!(short.contains("has 8 bytes") && short.contains("must have 9"));
        let other = error(b"nvme-mpt function state version=1 bytes=9 crc32=cbf43926\n123456780");
        assert!(other.contains("must be cbf43926"));
        let number = b"nvme-mpt function state version=1 bytes=9 crc32=cbf43926\n123456789";
        assert!(error(number).contains("not that of a function"));
    }
}
