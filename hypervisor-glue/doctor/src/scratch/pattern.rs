//! Test patterns, and signatures of previous data.

use super::guest::IO_BYTES;

/// Returns the data that I/O `index` writes. The data is different for each guest, round and I/O.
pub(super) fn io_content(guest: u8, round: u8, index: u64) -> [u8; IO_BYTES] {
    let mut bytes = [0; IO_BYTES];
    for (at, word) in (0_u64..).zip(bytes.chunks_exact_mut(8)) {
        let value = u64::from(guest) << 56 | u64::from(round) << 48 | index << 16 | at;
        // An odd factor, so that all values differ.
        let value = value.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        word.copy_from_slice(&value.to_le_bytes());
    }
    bytes
}

/// Number of bytes at the start of a namespace in which signatures are searched.
pub(super) const HEAD_BYTES: usize = 128 << 10;

/// Signatures: name, offset, magic.
const SIGNATURES: &[(&str, usize, &[u8])] = &[
    ("a GUID partition table", 512, b"EFI PART"),
    ("a GUID partition table", 4096, b"EFI PART"),
    ("an ext file system", 0x438, &[0x53, 0xEF]),
    ("an XFS file system", 0, b"XFSB"),
    ("a btrfs file system", 0x1_0040, b"_BHRfS_M"),
    ("an NTFS file system", 3, b"NTFS    "),
    ("an exFAT file system", 3, b"EXFAT   "),
    ("an F2FS file system", 0x400, &[0x10, 0x20, 0xF5, 0xF2]),
    ("a physical volume of LVM", 512, b"LABELONE"),
    ("a LUKS volume", 0, b"LUKS\xBA\xBE"),
    ("a RAID member", 4096, &[0xFC, 0x4E, 0x2B, 0xA9]),
    ("swap space", 4086, b"SWAPSPACE2"),
    (
        "a bcache device",
        0x1018,
        &[0xC6, 0x85, 0x73, 0xF6, 0x4E, 0x1A, 0x45, 0xCA],
    ),
    // This signature is last, since file systems and protective MBRs have it, too.
    ("a boot sector or a partition table", 510, &[0x55, 0xAA]),
];

/// Returns the name of a signature of previous data at the start of a namespace, if there is one.
pub(super) fn find_signature(head: &[u8]) -> Option<&'static str> {
    let has = |offset: usize, bytes: &[u8]| {
        let end = offset.saturating_add(bytes.len());
        head.get(offset..end) == Some(bytes)
    };
    SIGNATURES
        .iter()
        .find(|(_, offset, bytes)| has(*offset, bytes))
        .map(|(name, _, _)| *name)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn signatures_are_found_where_they_are_and_nowhere_else() {
        assert_eq!(find_signature(&[0; HEAD_BYTES]), None);
        assert_eq!(find_signature(&[]), None);
        for (name, offset, bytes) in SIGNATURES {
            let mut head = vec![0; HEAD_BYTES];
            head[*offset..offset + bytes.len()].copy_from_slice(bytes);
            assert_eq!(find_signature(&head), Some(*name));
            assert_eq!(find_signature(&head[..offset + bytes.len() - 1]), None);
            head.insert(0, 0);
            assert_eq!(find_signature(&head), None, "{name} elsewhere");
        }
    }

    #[test]
    fn contents_differ_by_guest_round_and_place() {
        let mut seen = BTreeSet::new();
        for (guest, round, index) in [(1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1), (1, 0, 1 << 30)] {
            assert!(seen.insert(io_content(guest, round, index)));
        }
        let words = io_content(1, 0, 7);
        let words: BTreeSet<&[u8]> = words.chunks_exact(8).collect();
        assert_eq!(words.len(), IO_BYTES / 8);
    }
}
