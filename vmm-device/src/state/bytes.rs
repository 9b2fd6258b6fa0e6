//! Encoding of a state as bytes: a header line, then the state as JSON.
//!
//! The header is checked first, so that each error is reported by its cause: another version, a truncated state, or a damaged
//! state.

use std::fmt;

use nvme_guest::doorbell::MAX_QUEUE_PAIRS;

use super::{FunctionState, FunctionStateError, VERSION};

/// First bytes of every encoded state.
pub(super) const MAGIC: &str = "nvme-mpt function state";

/// Maximum size of an encoded state in bytes. Each queue pair needs less than 128 KiB, even with a full Completion Queue.
const STATE_MAX: usize = MAX_QUEUE_PAIRS as usize * (128 << 10);

/// Maximum length of the header line in bytes, with its newline.
const LINE_MAX: usize = 128;

impl FunctionState {
    /// Encodes the state as bytes, for a file.
    ///
    /// # Errors
    /// [`FunctionStateError::Syntax`]. This never occurs, because a state has only numbers and text.
    pub fn to_bytes(&self) -> Result<Vec<u8>, FunctionStateError> {
        let state = serde_json::to_vec(self)?;
        let line = StateHeader {
            version: self.version,
            len: state.len(),
            crc32: crc32(&state),
        };
        Ok([format!("{line}\n").as_bytes(), &state].concat())
    }

    /// Decodes a state from bytes.
    ///
    /// # Errors
    /// All of [`FunctionStateError`] except those about restoring.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, FunctionStateError> {
        let head = &bytes[..bytes.len().min(LINE_MAX)];
        let end = head.iter().position(|byte| *byte == b'\n');
        let line = end.and_then(|end| std::str::from_utf8(&bytes[..end]).ok());
        let (line, state) = match (line, end) {
            (Some(line), Some(end)) => (line, &bytes[end + 1..]),
            _ => return Err(FunctionStateError::NotAState),
        };
        let parsed = StateHeader::parse(line).ok_or(FunctionStateError::NotAState)?;
        let StateHeader {
            version,
            len,
            crc32: expected,
        } = parsed;
        if version != VERSION {
            return Err(FunctionStateError::Version { found: version });
        }
        // Only the canonical spelling of the numbers is accepted.
        if parsed.to_string() != line {
            return Err(FunctionStateError::NotAState);
        }
        if state.len() != len || len > STATE_MAX {
            return Err(FunctionStateError::Length {
                found: state.len(),
                expected: len.min(STATE_MAX),
            });
        }
        let found = crc32(state);
        if found != expected {
            return Err(FunctionStateError::Checksum { found, expected });
        }
        let state: Self = serde_json::from_slice(state)?;
        state.check_version()?;
        Ok(state)
    }
}

/// Header line of an encoded state.
struct StateHeader {
    version: u32,
    len: usize,
    crc32: u32,
}

impl fmt::Display for StateHeader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            version,
            len,
            crc32,
        } = self;
        write!(f, "{MAGIC} version={version} bytes={len} crc32={crc32:08x}")
    }
}

impl StateHeader {
    fn parse(line: &str) -> Option<Self> {
        let mut words = line.strip_prefix(MAGIC)?.strip_prefix(' ')?.split(' ');
        let mut value = |name: &str| words.next()?.strip_prefix(name)?.strip_prefix('=');
        let version = value("version")?.parse().ok()?;
        // The fields after the version may differ between versions.
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
    fn the_crc32_matches_the_known_value() {
        assert_eq!(crc32(b"123456789"), 0xCBF4_3926);
        assert_eq!(crc32(b""), 0);
    }

    fn error(bytes: &[u8]) -> String {
        FunctionState::from_bytes(bytes).unwrap_err().to_string()
    }

    #[test]
    fn each_defect_of_stored_bytes_has_its_error() {
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
