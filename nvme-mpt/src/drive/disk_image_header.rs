//! Headers of disk images and of encrypted disks. A guest should get the content of such an image, not its raw bytes, so a new
//! lease of such bytes is refused.
//!
//! A guest may write such a header itself. So headers are checked only before the first lease of bytes that have had no owner
//! yet. Otherwise a guest that wrote such a header would lose access to its drive.

use crate::drive::Drive;

/// A kind of disk image or of disk encryption, recognized by the first bytes. An operator who leases such a drive probably
/// means its content instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskImageHeader {
    /// Name of the kind.
    pub name: &'static str,
    /// Advice to the operator: a command that makes the content usable as a drive.
    pub remedy: &'static str,
}

/// Remedy for disk images.
const CONVERT: &str = "convert it first (`qemu-img convert -O raw`)";
/// Remedy for encrypted disks.
const OPEN: &str = "open it first (`cryptsetup open`), and make the device of that the drive";

/// Known headers: the offset of the magic number, the magic number, the name of the kind, and the remedy.
const HEADERS: &[(usize, &[u8], &str, &str)] = &[
    (0, b"QFI\xFB", "a qcow2 image", CONVERT),
    (0, b"QED\0", "a QED image", CONVERT),
    (0, b"KDMV", "a VMDK image", CONVERT),
    (0, b"COWD", "a VMDK image", CONVERT),
    (0, b"# Disk DescriptorFile", "a VMDK image", CONVERT),
    (0, b"vhdxfile", "a VHDX image", CONVERT),
    (0, b"conectix", "a VHD image", CONVERT),
    (64, b"\x7F\x10\xDA\xBE", "a VDI image", CONVERT),
    (0, b"WithoutFreeSpace", "a Parallels image", CONVERT),
    (0, b"WithouFreSpacExt", "a Parallels image", CONVERT),
    (0, b"Bochs Virtual HD Image", "a Bochs image", CONVERT),
    (0, b"LUKS\xBA\xBE", "LUKS", OPEN),
    (3, b"-FVE-FS-", "BitLocker", OPEN),
];

/// Number of bytes to read for the check.
const PROBE_BYTES: usize = 512;

impl DiskImageHeader {
    /// Returns the kind of header that bytes begin with.
    #[must_use]
    pub fn detect(bytes: &[u8]) -> Option<Self> {
        let begins =
            |at: usize, mark: &[u8]| bytes.get(at..).is_some_and(|at| at.starts_with(mark));
        let mut known = HEADERS.iter().filter(|(at, mark, ..)| begins(*at, mark));
        known.next().map(|(.., name, remedy)| Self { name, remedy })
    }

    /// Returns the kind of header at byte `offset` of a drive. Returns `None` if there is none, or if the drive is neither a
    /// file nor a block device.
    #[must_use]
    pub fn detect_at(drive: &Drive, offset: u64) -> Option<Self> {
        let mut bytes = [0; PROBE_BYTES];
        let length = drive.controller().peek(offset, &mut bytes)?;
        Self::detect(bytes.get(..length)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_distinguished_from_data() {
        for (at, mark, name, _) in HEADERS {
            let mut bytes = vec![0x55; 512];
            bytes[*at..*at + mark.len()].copy_from_slice(mark);
            assert_eq!(
                DiskImageHeader::detect(&bytes).map(|header| header.name),
                Some(*name)
            );
            // With one wrong byte, or truncated, the header is invalid.
            bytes[at + mark.len() - 1] ^= 0xFF;
            assert_eq!(DiskImageHeader::detect(&bytes), None, "{name}");
            assert_eq!(
                DiskImageHeader::detect(&bytes[..at + mark.len() - 1]),
                None,
                "{name}"
            );
        }
        assert_eq!(DiskImageHeader::detect(&[]), None);
        assert_eq!(DiskImageHeader::detect(&[0; 512]), None);
    }
}
