//! Labels: names that an operator writes on drives without a persistent name.
//!
//! A label is in the last MiB of the drive. Once the drive is used by its label, no lease contains that MiB. The drive's
//! name in the ledger contains the label's UUID, which no guest sees. So a guest cannot imitate another drive by writing a
//! label to its own drive.

use std::fmt;
use std::str::FromStr;

use nvme_mpt_memory::system::random;
use uuid::{Builder, Uuid};

use crate::backing_id::{DriveIdentity, DriveIdentityRef, backing_extent};

/// Size in bytes of the area at the end of a drive that is reserved for the label.
const AREA_BYTES: u64 = 1 << 20;

/// Size of a label in bytes, a multiple of every logical block size.
pub const LABEL_BYTES: usize = 4096;

/// First line and last line of a label.
const FIRST_LINE: &str = "nvme-mpt drive label 1";
const LAST_LINE: &str = "end";

/// Maximum number of characters of a label's name.
const NAME_MAX: usize = 64;

/// Name of a drive, chosen by the operator.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct DriveName(String);

impl FromStr for DriveName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let is_in_names = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        match (1..=NAME_MAX).contains(&text.len()) && text.bytes().all(is_in_names) {
            true => Ok(Self(text.to_owned())),
            false => Err(format!(
                "The name of a drive has 1 to {NAME_MAX} letters, digits, \".\", \"_\" and \"-\""
            )),
        }
    }
}

impl fmt::Display for DriveName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Label of a drive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriveLabel {
    /// Name that the operator gave.
    pub name: DriveName,
    /// UUID that distinguishes labels of the same name.
    uuid: Uuid,
}

impl DriveLabel {
    /// Creates a label with a random UUID.
    #[must_use]
    pub fn new(name: DriveName) -> Self {
        let random = u128::from(random()) << 64 | u128::from(random());
        Self {
            name,
            uuid: Builder::from_random_bytes(random.to_be_bytes()).into_uuid(),
        }
    }

    /// Returns the label's offset on a drive of `bytes`, where the leasable bytes end; `None` if the drive is too small.
    #[must_use]
    pub fn label_offset(bytes: u64) -> Option<u64> {
        let place = bytes.checked_sub(AREA_BYTES)?;
        let place = place - place % LABEL_BYTES as u64;
        (place >= AREA_BYTES).then_some(place)
    }

    /// Parses a label; `None` if the block is no label.
    #[must_use]
    pub fn parse(block: &[u8]) -> Option<Self> {
        let mut lines = std::str::from_utf8(block).ok()?.lines().skip(1);
        let name = lines.next()?.strip_prefix("name ")?.parse().ok()?;
        let uuid = lines.next()?.strip_prefix("uuid ")?.parse().ok()?;
        let label = Self { name, uuid };
        // A UUID has several spellings. Only the one that `to_block` writes is accepted.
        (label.to_block() == block).then_some(label)
    }

    /// Returns the block to write to the drive.
    #[must_use]
    pub fn to_block(&self) -> Vec<u8> {
        let Self { name, uuid } = self;
        let mut block =
            format!("{FIRST_LINE}\nname {name}\nuuid {uuid}\n{LAST_LINE}\n").into_bytes();
        block.resize(LABEL_BYTES, 0);
        block
    }

    /// Returns the name that the ledger uses for the base of a drive with this label.
    #[must_use]
    pub fn base(&self) -> String {
        backing_extent::base_name(
            backing_extent::LABEL_KIND,
            &format!("{}/{}", self.name, self.uuid),
        )
    }

    /// Parses the label from a [base](Self::base).
    #[must_use]
    pub fn from_base(base: &str) -> Option<Self> {
        let (kind, name) = base.split_once(':')?;
        let (name, uuid) = name.split_once('/')?;
        let label = Self {
            name: name.parse().ok()?,
            uuid: uuid.parse().ok()?,
        };
        (kind == backing_extent::LABEL_KIND).then_some(label)
    }

    /// Returns the identity of the labelled drive. `of` is the drive's identity without the label, and `bytes` the number of
    /// leasable bytes. The names of `of` become former names.
    #[must_use]
    pub fn identity(&self, of: DriveIdentityRef<'_>, bytes: u64) -> DriveIdentity {
        let formerly = of.former_names.iter().map(String::as_str).chain([of.name]);
        DriveIdentity {
            name: backing_extent::labelled_identity(&self.base(), of.name, bytes),
            former_names: formerly.map(str::to_owned).collect(),
            possible_names: of.possible_names.to_vec(),
            facts: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_is_read_as_it_was_written() {
        let label = DriveLabel::new("pool-1".parse().unwrap());
        let block = label.to_block();
        assert_eq!(block.len(), LABEL_BYTES);
        assert_eq!(DriveLabel::parse(&block), Some(label.clone()));
        assert_eq!(DriveLabel::from_base(&label.base()), Some(label.clone()));
        assert_ne!(DriveLabel::new(label.name.clone()), label);
        for at in [0, 25, 60, LABEL_BYTES - 1] {
            let mut torn = block.clone();
            torn[at] ^= 0x20;
            assert_ne!(DriveLabel::parse(&torn), Some(label.clone()), "{at}");
        }
        assert_eq!(DriveLabel::parse(&[0; LABEL_BYTES]), None);
        for name in ["", "a b", "a/b", "a,b", "\u{e4}"] {
            name.parse::<DriveName>().unwrap_err();
        }
    }

    #[test]
    fn a_label_lies_in_the_last_mebibyte() {
        assert_eq!(DriveLabel::label_offset(64 << 20), Some(63 << 20));
        assert_eq!(DriveLabel::label_offset((64 << 20) + 512), Some(63 << 20));
        assert_eq!(DriveLabel::label_offset(2 << 20), Some(1 << 20));
        assert_eq!(DriveLabel::label_offset((2 << 20) - 512), None);
        assert_eq!(DriveLabel::label_offset(0), None);
    }

    #[test]
    fn a_labelled_drive_overlaps_what_it_lies_on() {
        let label = DriveLabel::new("a".parse().unwrap());
        let identity = label.identity("1048576+4194304 of disk:d".into(), 1 << 20);
        let identity = identity.name;
        let range = "0+4K".parse().unwrap();
        let on = |drive, range: &str| backing_extent::DriveByteRange {
            drive,
            range: range.parse().unwrap(),
        };
        let ours = backing_extent::DriveByteRange {
            drive: &identity,
            range,
        };
        assert!(backing_extent::do_overlap(ours, on("disk:d", "1M+4K")));
        assert!(!backing_extent::do_overlap(ours, on("disk:d", "0+1M")));
        assert_eq!(backing_extent::bases(&identity), [label.base()]);
        assert_eq!(backing_extent::boot_id_of(&label.base()), None);
    }
}
