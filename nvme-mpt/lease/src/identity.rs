//! Names that a guest sees for its lease.

use nvme_spec::ids::Nsid;
use uuid::Uuid;

use crate::backing_id::backing_extent::{self, BackingExtent};
use crate::backing_id::nvme_names;
use crate::range::ByteRange;

/// UUID namespace from which all names that guests see are derived (version 5, RFC 9562, section 5.5). It must never change,
/// because guests identify their disks by these names.
const NAME_SPACE: Uuid = Uuid::from_u128(0x6e76_6d65_2d6d_5074_a001_6c65_6173_6573);

/// In EUI-64, bit 1 of the first byte marks a locally administered name (IEEE 802, "U/L").
const LOCALLY_ADMINISTERED: u8 = 0x02;
/// In EUI-64, bit 0 of the first byte marks a group name (IEEE 802, "I/G").
const GROUP: u8 = 0x01;
/// Offset of the company identifier in an NGUID (Base 2.0, section 4.5: bytes 8 to 10). Its first byte has the same two bits as
/// an EUI-64.
const NGUID_COMPANY_ID: usize = 8;

/// Names of a lease, by which its guest identifies the disk. They depend on the id, the range and the drive, so that equal
/// names mean equal data. The names of a lease by size depend on the id and the drive, but not on the extents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseIdentity {
    /// Serial Number of the guest controller: 20 ASCII characters.
    pub serial: String,
    /// Namespace Globally Unique Identifier.
    pub nguid: [u8; 16],
    /// IEEE Extended Unique Identifier, locally administered.
    pub eui64: [u8; 8],
    /// Namespace UUID.
    pub uuid: [u8; 16],
}

impl LeaseIdentity {
    /// Derives the names of the lease `id` of `range` of namespace `nsid` of the drive with the name `drive`.
    #[must_use]
    pub fn derive(drive: &str, nsid: Nsid, range: ByteRange, id: &str) -> Self {
        let (drive, nsid) = nvme_names::as_block_device(drive, nsid.0);
        Self::derive_from(nsid, id, &range_key(&drive, range))
    }

    /// Derives the names of the lease by size `id` of namespace `nsid` of the drive with the name `drive`. They stay the
    /// same when the extents change.
    #[must_use]
    pub fn derive_by_size(drive: &str, nsid: Nsid, id: &str) -> Self {
        let (drive, nsid) = nvme_names::as_block_device(drive, nsid.0);
        Self::derive_from(nsid, id, &format!("size\n{drive}"))
    }

    /// Derives the names of the lease `id` from the text `at`, which says where the lease is.
    fn derive_from(nsid: u32, id: &str, at: &str) -> Self {
        // Each name is derived with a text for its purpose, so that no name can be computed from another name. The drive's name
        // comes last, because only that text may contain any character.
        let name = |purpose: &str| {
            let name = format!("{purpose}\n{nsid}\n{id}\n{at}");
            Uuid::new_v5(&NAME_SPACE, name.as_bytes())
        };

        let mut nguid = name("nguid").into_bytes();
        nguid[NGUID_COMPANY_ID] = (nguid[NGUID_COMPANY_ID] | LOCALLY_ADMINISTERED) & !GROUP;

        // These bytes of a UUID (0 to 5 and 10 to 15) have no version and variant bits.
        let hash = name("eui64").into_bytes();
        let mut eui64 = [0; 8];
        eui64[..6].copy_from_slice(&hash[..6]);
        eui64[6..].copy_from_slice(&hash[10..12]);
        eui64[0] = (eui64[0] | LOCALLY_ADMINISTERED) & !GROUP;

        let serial = format!("MPT{:017X}", name("serial").as_u128() >> (128 - 17 * 4));

        Self {
            serial,
            nguid,
            eui64,
            uuid: name("uuid").into_bytes(),
        }
    }
}

/// Returns the id of a function and its lease, if none was chosen. It depends only on the drive and the range, so a server
/// that is restarted with the same options takes over its own leases.
#[must_use]
pub fn default_id(drive: &str, nsid: Nsid, range: ByteRange) -> String {
    let (drive, nsid) = nvme_names::as_block_device(drive, nsid.0);
    let name = format!("id\n{nsid}\n{}", range_key(&drive, range));
    let hash = Uuid::new_v5(&NAME_SPACE, name.as_bytes()).as_u128();
    format!("nvme-{:08x}", hash >> 96)
}

/// Returns the text from which the names for a range are derived. All paths to the range's bytes give the same text.
fn range_key(drive: &str, range: ByteRange) -> String {
    let (start, length) = (range.start(), range.length());
    match &backing_extent::range_extents(drive, range)[..] {
        [
            BackingExtent {
                base,
                start,
                length: part,
                ..
            },
        ] if *part == length => format!("{start}+{length}\n{base}"),
        _ => format!("{start}+{length}\n{drive}"),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn range(text: &str) -> ByteRange {
        text.parse().unwrap()
    }

    #[test]
    fn names_are_stable() {
        // Guests identify their file systems by these names, so they must never change.
        let identity = LeaseIdentity::derive("file:/drive", Nsid(1), range("64G+64G"), "vm-1");
        assert_eq!(
            identity,
            LeaseIdentity::derive("file:/drive", Nsid(1), range("64G+64G"), "vm-1")
        );
        assert_eq!(identity.serial, "MPTC30E6D298DD056CC9");
        assert_eq!(
            Uuid::from_bytes(identity.uuid).to_string(),
            "0868f84e-f2b5-5ded-998d-4c800c068d12"
        );
        assert_eq!(
            Uuid::from_bytes(identity.nguid).simple().to_string(),
            "cd6bbe1426f3552aa6c7026f4d657061"
        );
        assert_eq!(u64::from_be_bytes(identity.eui64), 0x8227_9c7e_bd06_01bb);
        assert_eq!(
            default_id("file:/drive", Nsid(1), range("64G+64G")),
            "nvme-18c54e01"
        );
    }

    #[test]
    fn names_depend_on_the_bytes() {
        let disk = LeaseIdentity::derive("disk:a", Nsid(1), range("1M+64K"), "a");
        let partition = "1048576+1073741824 of disk:a";
        assert_eq!(
            LeaseIdentity::derive(partition, Nsid(1), range("0+64K"), "a"),
            disk
        );
        assert_ne!(
            LeaseIdentity::derive("disk:a", Nsid(1), range("0+64K"), "a"),
            disk
        );
        assert_eq!(
            default_id(partition, Nsid(1), range("0+64K")),
            default_id("disk:a", Nsid(1), range("1M+64K"))
        );
    }

    #[test]
    fn names_of_a_namespace_are_those_of_its_block_device() {
        let names = |drive, nsid| LeaseIdentity::derive(drive, Nsid(nsid), range("0+64K"), "a");
        assert_eq!(names("nvme:nqn.a:s", 2), names("nvme:nqn.a:s/2", 1));
        assert_ne!(names("nvme:nqn.a:s", 2), names("nvme:nqn.a:s", 1));
    }

    #[test]
    fn names_by_size_are_stable_and_differ_from_names_of_ranges() {
        // Like the names in `names_are_stable`, these names must never change.
        let identity = LeaseIdentity::derive_by_size("file:/drive", Nsid(1), "vm-1");
        assert_eq!(identity.serial, "MPT88301FB4615951598");
        assert_eq!(
            Uuid::from_bytes(identity.uuid).to_string(),
            "31cb127e-0d8c-527c-b50e-dd450e83f560"
        );
        let of = LeaseIdentity::derive_by_size;
        assert_eq!(
            of("nvme:nqn.a:s", Nsid(2), "a"),
            of("nvme:nqn.a:s/2", Nsid(1), "a")
        );
        for other in [
            of("file:/other", Nsid(1), "vm-1"),
            of("file:/drive", Nsid(2), "vm-1"),
            of("file:/drive", Nsid(1), "vm-2"),
            LeaseIdentity::derive("file:/drive", Nsid(1), range("0+1G"), "vm-1"),
        ] {
            assert_ne!(other.serial, identity.serial);
            assert_ne!(other.uuid, identity.uuid);
            assert_ne!(other.nguid, identity.nguid);
            assert_ne!(other.eui64, identity.eui64);
        }
    }

    #[test]
    fn names_differ_between_leases() {
        let mut seen = HashSet::new();
        for drive in ["file:/a", "file:/b"] {
            for nsid in [1, 2] {
                for text in ["0+1G", "0+2G", "1G+1G", "1+1G"] {
                    for id in ["vm-1", "vm-2"] {
                        let identity = LeaseIdentity::derive(drive, Nsid(nsid), range(text), id);
                        assert!(seen.insert(identity.serial.into_bytes()));
                        assert!(seen.insert(identity.nguid.to_vec()));
                        assert!(seen.insert(identity.eui64.to_vec()));
                        assert!(seen.insert(identity.uuid.to_vec()));
                    }
                    assert!(seen.insert(default_id(drive, Nsid(nsid), range(text)).into_bytes()));
                }
            }
        }
    }

    #[test]
    fn names_have_the_form_of_their_standard() {
        for start in 0..64 {
            let range = ByteRange::new(start << 30, 1 << 30).unwrap();
            let identity = LeaseIdentity::derive("file:/drive", Nsid(1), range, "vm-1");
            assert_eq!(identity.serial.len(), 20);
            assert!(identity.serial.bytes().all(|b| b.is_ascii_alphanumeric()));
            assert_eq!(identity.eui64[0] & 0b11, 0b10);
            assert_eq!(identity.nguid[8] & 0b11, 0b10);
            assert_eq!(Uuid::from_bytes(identity.uuid).get_version_num(), 5);
        }
    }
}
