//! Extents, and their text form: the identity of a drive is a list of extents.

use std::fmt::Write;

use crate::range::ByteRange;

/// Part of a base. A base is what has a name of its own: a disk, an NVMe namespace, a RAID device or a file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct BackingExtent {
    /// Name of the base, without spaces.
    pub(crate) base: String,
    /// Offset of the first byte on the base.
    pub(crate) start: u64,
    /// Number of bytes.
    pub(crate) length: u64,
    /// Extents on the devices that store the base's bytes. They are listed only if it is unknown where on those devices a given
    /// byte of the base is stored.
    pub(crate) below: Vec<BackingExtent>,
}

impl BackingExtent {
    /// Returns whether the extents may have a byte in common.
    ///
    /// If both extents have the same base, their offsets are compared. Otherwise each extent, and each extent below it, is
    /// compared with those of the other.
    pub(crate) fn overlaps(&self, other: &Self) -> bool {
        if self.base == other.base {
            return self.overlaps_in_base(other);
        }
        if let (Some((ours, _)), Some((others, _))) = (
            self.base.split_once(VOLUME_SEPARATOR),
            other.base.split_once(VOLUME_SEPARATOR),
        ) && ours == others
        {
            return false;
        }
        let others = || std::iter::once(other).chain(&other.below);
        let mut ours = std::iter::once(self).chain(&self.below);
        ours.any(|ours| others().any(|other| ours.overlaps_in_base(other)))
    }

    /// Returns the parts of this extent that may share bytes with `other`, as start and end offsets within this extent.
    fn shared_parts(&self, other: &Self) -> Vec<(u64, u64)> {
        if !self.overlaps(other) {
            return Vec::new();
        }
        let part = |other: &Self| {
            let end = |extent: &Self| extent.start.saturating_add(extent.length);
            let start = self.start.max(other.start);
            (start - self.start, end(self).min(end(other)) - self.start)
        };
        if self.base == other.base {
            return vec![part(other)];
        }
        // It is unknown where an extent's bytes are stored on the devices below, so each of its bytes may be shared.
        let mut others = std::iter::once(other).chain(&other.below);
        if others.any(|other| self.below.iter().any(|below| below.overlaps_in_base(other))) {
            return vec![(0, self.length)];
        }
        let below = other
            .below
            .iter()
            .filter(|below| self.overlaps_in_base(below));
        below.map(part).collect()
    }

    fn overlaps_in_base(&self, other: &Self) -> bool {
        let end = |extent: &Self| extent.start.saturating_add(extent.length);
        self.base == other.base && self.start < end(other) && other.start < end(self)
    }

    /// Returns whether `other` has the bytes of the base that directly follow this extent.
    pub(super) fn is_followed_by(&self, other: &Self) -> bool {
        let end = self.start.checked_add(self.length);
        self.base == other.base && end == Some(other.start) && self.below == other.below
    }

    /// Returns whether both extents have the same bytes of the same base. The extents on devices below the bases are not
    /// compared.
    fn is_same_range(&self, other: &Self) -> bool {
        self.base == other.base && self.start == other.start && self.length == other.length
    }
}

/// Separator between extents in the text of an identity. It cannot occur in an extent, because no name of a base contains a
/// space.
const EXTENT_SEPARATOR: &str = " and ";
/// Separator between an extent's bytes and its base, in the text of an identity.
const BASE_SEPARATOR: &str = " of ";
/// Separator between a base and the extents on the devices below it.
const BELOW_SEPARATOR: &str = " over ";
/// Separator between an extent's bytes and its base, if the extent is on a device below another base.
const BELOW_BASE_SEPARATOR: char = '/';
/// Separator between the name of a thin pool and the number of a volume. Volumes of the same pool do not overlap.
const VOLUME_SEPARATOR: char = '#';

/// Returns the name of a volume of a pool.
pub(super) fn volume_name(base: &str, number: &str) -> String {
    format!("{base}{VOLUME_SEPARATOR}{number}")
}

/// Returns the name of a base from its kind and its own name, in which all characters except printable ASCII are replaced.
pub(crate) fn base_name(kind: &str, name: &str) -> String {
    let printable = |c: char| match c.is_ascii_graphic() {
        true => c,
        false => '_',
    };
    let name: String = name.trim().chars().map(printable).collect();
    format!("{kind}:{name}")
}

/// Kind of a base that is a disk.
pub(super) const DISK_KIND: &str = "disk";

/// Kind of a base that is a RAID device.
pub(super) const ARRAY_KIND: &str = "md";

/// Kind of a base that is a drive with a label, named by the label.
pub(crate) const LABEL_KIND: &str = "drive-id";

/// Prefix of the name of a file system that is named by its UUID.
pub(super) const FS_UUID_PREFIX: &str = "fs:";

/// Boot id of a host that reports none. Two names with this id may be of different boots.
pub(crate) const UNKNOWN_BOOT: &str = "00000000-0000-0000-0000-000000000000";

/// Returns the id of the boot for which a base's name is valid; `None` if the name is valid for all boots. A disk without WWID
/// and serial number has a name that is valid for one boot, and so may a file on it. The bytes of the base outlive the name.
pub(crate) fn boot_id_of(base: &str) -> Option<&str> {
    let is_boot = |text: &&str| {
        let groups = text.split('-').map(str::len);
        let is_digit = |byte: u8| byte.is_ascii_hexdigit() || byte == b'-';
        groups.eq([8, 4, 4, 4, 12]) && text.bytes().all(is_digit)
    };
    let mut after = base.split("disk:").skip(1);
    after.find_map(|name| name.split_once('/').map(|(boot, _)| boot).filter(is_boot))
}

/// Returns the id of the boot for which the name of a drive's base is valid; `None` if the names of all its bases are valid for
/// all boots. Devices below a base do not count.
pub(crate) fn drive_boot_id(identity: &str) -> Option<String> {
    let bases = bases(identity);
    bases
        .iter()
        .find_map(|base| boot_id_of(base))
        .map(str::to_owned)
}

/// Returns whether a name that is valid for the boot `boot` may be older than the boot `present`.
pub(crate) fn is_earlier_boot(boot: &str, present: &str) -> bool {
    boot != present || boot == UNKNOWN_BOOT
}

/// Returns whether `base`, whose name is valid for one boot, may be the disk or file that is now named `other`. The name
/// `other` is of another boot, or a lasting name that the disk may have got later.
pub(crate) fn can_be_same(base: &str, other: &str) -> bool {
    let inode = |base: &str| {
        let (inode, _) = base.strip_prefix("file:")?.split_once('@')?;
        Some(inode.to_owned())
    };
    if other
        .split_once(':')
        .is_some_and(|(kind, _)| kind == LABEL_KIND)
    {
        return true;
    }
    let is_named_anew = [DISK_KIND, ARRAY_KIND].map(|kind| format!("{kind}:"));
    let is_named_anew = is_named_anew.iter().any(|kind| other.contains(kind))
        || other.contains(&format!("@{FS_UUID_PREFIX}"));
    is_named_anew && inode(base) == inode(other)
}

/// Returns the identity of a labelled drive whose only base is `base`. Its bytes are the first `bytes` bytes of the drive with
/// the identity `of`.
pub(crate) fn labelled_identity(base: &str, of: &str, bytes: u64) -> String {
    let all = ByteRange::new(0, bytes).map(|all| range_extents(of, all));
    let all = all.unwrap_or_default().into_iter();
    let below = all.flat_map(|mut extent| {
        let below = std::mem::take(&mut extent.below);
        std::iter::once(extent).chain(below)
    });
    format_identity(&[BackingExtent {
        base: base.to_owned(),
        start: 0,
        length: bytes,
        below: below.collect(),
    }])
}

/// Returns the location of a drive's first byte, from its identity. Unlike the identity, the location does not change when the
/// drive grows or a device below it changes.
pub(crate) fn start_location(identity: &str) -> String {
    let first = ByteRange::new(0, 1).map(|first| range_extents(identity, first));
    match first.unwrap_or_default().first() {
        Some(BackingExtent { base, start, .. }) => format!("{start}{BASE_SEPARATOR}{base}"),
        None => identity.to_owned(),
    }
}

/// Returns the bases (disks, namespaces, files) that have a drive's bytes, from the drive's identity.
pub(crate) fn bases(identity: &str) -> Vec<String> {
    let all = ByteRange::new(0, u64::MAX).map(|all| range_extents(identity, all));
    let all = all.unwrap_or_default().into_iter();
    all.map(|extent| extent.base).collect()
}

/// Renames the bases of an identity with `rename`, and leaves everything else as it is.
pub(crate) fn rename_bases(identity: &str, rename: impl Fn(&str) -> Option<String>) -> String {
    let mut extents: Vec<BackingExtent> =
        match identity.split(EXTENT_SEPARATOR).map(parse).collect() {
            Some(extents) => extents,
            None => return rename(identity).unwrap_or_else(|| identity.to_owned()),
        };
    for extent in &mut extents {
        if let Some(name) = rename(&extent.base) {
            extent.base = name;
        }
    }
    format_identity(&extents)
}

/// Returns the parts of `extents` that have the `length` bytes from `offset` on, counted over all extents.
pub(crate) fn slice_extents(
    extents: &[BackingExtent],
    offset: u64,
    length: u64,
) -> Vec<BackingExtent> {
    let (mut skip, mut left) = (offset, length);
    let mut part = Vec::new();
    for extent in extents {
        if skip >= extent.length {
            skip -= extent.length;
            continue;
        }
        let length = (extent.length - skip).min(left);
        if length > 0 {
            part.push(BackingExtent {
                start: extent.start + skip,
                length,
                ..extent.clone()
            });
        }
        skip = 0;
        left -= length;
    }
    part
}

/// Formats extents as the identity of a drive. A single extent that starts with its base's first byte is written as the base's
/// name alone: the drive's size gives its length.
pub(crate) fn format_identity(extents: &[BackingExtent]) -> String {
    if let [extent] = extents
        && extent.start == 0
        && extent.below.is_empty()
    {
        return extent.base.clone();
    }
    let mut text = String::new();
    for (i, extent) in extents.iter().enumerate() {
        let BackingExtent {
            base,
            start,
            length,
            below,
        } = extent;
        let and = if i > 0 { EXTENT_SEPARATOR } else { "" };
        // Writing to a string does not fail.
        let _ = write!(text, "{and}{start}+{length}{BASE_SEPARATOR}{base}");
        for BackingExtent {
            base,
            start,
            length,
            ..
        } in below
        {
            let _ = write!(
                text,
                "{BELOW_SEPARATOR}{start}+{length}{BELOW_BASE_SEPARATOR}{base}"
            );
        }
    }
    text
}

/// Returns the extents that have a range of a drive. An identity that is not a list of extents is taken for the name of a base.
pub(crate) fn range_extents(identity: &str, range: ByteRange) -> Vec<BackingExtent> {
    let whole = || {
        vec![BackingExtent {
            base: identity.to_owned(),
            start: 0,
            length: u64::MAX,
            below: Vec::new(),
        }]
    };
    let extents: Option<Vec<BackingExtent>> = identity.split(EXTENT_SEPARATOR).map(parse).collect();
    slice_extents(
        &extents.unwrap_or_else(whole),
        range.start(),
        range.length(),
    )
}

fn parse(text: &str) -> Option<BackingExtent> {
    let (bytes, rest) = text.split_once(BASE_SEPARATOR)?;
    let mut parts = rest.split(BELOW_SEPARATOR);
    let extent = |bytes: &str, base: &str, below| {
        let (start, length) = bytes.split_once('+')?;
        Some(BackingExtent {
            base: base.to_owned(),
            start: start.parse().ok()?,
            length: length.parse().ok()?,
            below,
        })
    };
    let base = parts.next()?;
    let below = parts.map(|part| {
        let (bytes, base) = part.split_once(BELOW_BASE_SEPARATOR)?;
        extent(bytes, base, Vec::new())
    });
    extent(bytes, base, below.collect::<Option<_>>()?)
}

/// Range of bytes of a drive, with the drive's identity.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DriveByteRange<'a> {
    pub(crate) drive: &'a str,
    pub(crate) range: ByteRange,
}

impl DriveByteRange<'_> {
    fn extents(self) -> Vec<BackingExtent> {
        range_extents(self.drive, self.range)
    }
}

/// Returns whether two ranges of two drives are the same bytes in the same order.
pub(crate) fn are_same_bytes(one: DriveByteRange<'_>, other: DriveByteRange<'_>) -> bool {
    let (ours, others) = (one.extents(), other.extents());
    let mut pairs = ours.iter().zip(&others);
    ours.len() == others.len() && pairs.all(|(ours, other)| ours.is_same_range(other))
}

/// Returns whether two ranges of two drives have a byte in common.
pub(crate) fn do_overlap(one: DriveByteRange<'_>, other: DriveByteRange<'_>) -> bool {
    let others = other.extents();
    let ours = one.extents();
    ours.iter()
        .any(|ours| others.iter().any(|other| ours.overlaps(other)))
}

/// Returns the parts of `one` that may share bytes with the ranges `of_other` of the drive `other`, as offsets on the drive of
/// `one`.
pub(crate) fn shared_ranges(
    one: DriveByteRange<'_>,
    other: &str,
    of_other: &[ByteRange],
) -> Vec<ByteRange> {
    let ours = one.extents();
    let all = ByteRange::new(0, u64::MAX).ok();
    let whole = all.map_or_else(Vec::new, |all| range_extents(other, all));
    let mut shared = Vec::new();
    for range in of_other {
        for theirs in slice_extents(&whole, range.start(), range.length()) {
            let mut at = one.range.start();
            for ours in &ours {
                let parts = ours.shared_parts(&theirs).into_iter();
                let parts = parts.map(|(start, end)| ByteRange::new(at + start, end - start));
                shared.extend(parts.flatten());
                at += ours.length;
            }
        }
    }
    shared
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn range(text: &str) -> ByteRange {
        text.parse().unwrap()
    }

    fn stretch<'a>(drive: &'a str, text: &str) -> DriveByteRange<'a> {
        DriveByteRange {
            drive,
            range: range(text),
        }
    }

    fn extent(base: &str, start: u64, length: u64) -> BackingExtent {
        BackingExtent {
            base: base.to_owned(),
            start,
            length,
            below: Vec::new(),
        }
    }

    #[test]
    fn a_drive_that_grows_begins_where_it_did() {
        for (identity, first) in [
            ("disk:A", "0 of disk:A"),
            ("1048576+4096 of disk:A", "1048576 of disk:A"),
            ("1048576+8192 of disk:A", "1048576 of disk:A"),
            ("0+4096 of md:A over 0+4096/disk:B", "0 of md:A"),
            ("0+4096 of disk:A and 8192+4096 of disk:B", "0 of disk:A"),
        ] {
            assert_eq!(start_location(identity), first);
        }
    }

    #[test]
    fn an_identity_is_read_as_it_was_written() {
        let whole = [extent("disk:a", 0, 1 << 30)];
        assert_eq!(format_identity(&whole), "disk:a");
        assert_eq!(
            range_extents("disk:a", range("4K+4K")),
            [extent("disk:a", 4096, 4096)]
        );
        let part = [extent("disk:a", 4096, 1 << 20)];
        assert_eq!(format_identity(&part), "4096+1048576 of disk:a");
        assert_eq!(
            range_extents(&format_identity(&part), range("4K+4K")),
            [extent("disk:a", 8192, 4096)]
        );
        let two = [
            extent("disk:a", 4096, 8192),
            extent("file:7@disk:b", 0, 8192),
        ];
        assert_eq!(
            format_identity(&two),
            "4096+8192 of disk:a and 0+8192 of file:7@disk:b"
        );
        assert_eq!(
            range_extents(&format_identity(&two), range("4K+8K")),
            [
                extent("disk:a", 8192, 4096),
                extent("file:7@disk:b", 0, 4096)
            ]
        );
        for other in [
            "nvme:serial with spaces",
            "a of b",
            "1+x of b",
            "file:/a and b",
        ] {
            assert_eq!(
                range_extents(other, range("0+4K")),
                [extent(other, 0, 4096)]
            );
        }
        assert_eq!(
            base_name("disk", " t10.ATA  QEMU \u{e4}"),
            "disk:t10.ATA__QEMU__"
        );
    }

    #[test]
    fn names_that_end_with_a_boot_are_told_from_others() {
        let boot = "0b000000-0000-4000-8000-00000000000a";
        for base in [
            format!("disk:{boot}/5"),
            format!("disk:{boot}/259:0"),
            format!("file:12@disk:{boot}/5"),
            format!("file:12@1048576+4096_of_disk:{boot}/5"),
            format!("file:12@btrfs:disk:{boot}/5:/@"),
        ] {
            assert_eq!(boot_id_of(&base), Some(boot), "{base}");
        }
        for base in [
            "disk:naa.5000c500a1b2c3d4",
            "disk:serial/5",
            "disk:0b000000-0000-4000-8000-00000000000a",
            "disk:xb000000-0000-4000-8000-00000000000a/5",
            "file:12@0b000000-0000-4000-8000-00000000000a/0:40",
            "ram:0b000000-0000-4000-8000-00000000000a/5",
            "file:12@fs:ext-0123456789abcdef",
            "nvme:nqn.a:s",
        ] {
            assert_eq!(boot_id_of(base), None, "{base}");
        }
        let part = format!("1048576+4096 of disk:{boot}/5 and 0+8 of dm:a over 0+8/disk:b");
        assert_eq!(bases(&part), [format!("disk:{boot}/5"), "dm:a".to_owned()]);
        let named = rename_bases(&part, |base| (base == "dm:a").then(|| "dm:b".to_owned()));
        assert_eq!(named, part.replace("dm:a", "dm:b"));
    }

    #[test]
    fn ranges_overlap_where_their_bytes_do() {
        let disk = "disk:a";
        let partition = "1048576+1048576 of disk:a";
        let overlaps = |a, b, c, d| do_overlap(stretch(a, b), stretch(c, d));
        assert!(overlaps(disk, "1M+4K", partition, "0+4K"));
        assert!(overlaps(partition, "0+4K", disk, "1M+4K"));
        assert!(!overlaps(disk, "0+1M", partition, "0+1M"));
        assert!(!overlaps(disk, "2M+1M", partition, "0+1M"));
        assert!(!overlaps("disk:b", "1M+4K", partition, "0+4K"));
        let striped = "0+4096 of disk:b and 1048576+4096 of disk:a";
        assert!(overlaps(striped, "4K+4K", partition, "0+4K"));
        assert!(!overlaps(striped, "0+4K", partition, "0+4K"));
    }

    #[test]
    fn what_is_below_is_part_of_an_identity() {
        let crypt = |start, length| BackingExtent {
            below: vec![extent("disk:a", 4096, 8192), extent("file:7@disk:b", 0, 8)],
            ..extent("dm:crypt", start, length)
        };
        let identity = format_identity(&[crypt(0, 4096)]);
        assert_eq!(
            identity,
            "0+4096 of dm:crypt over 4096+8192/disk:a over 0+8/file:7@disk:b"
        );
        assert_eq!(range_extents(&identity, range("0+4K")), [crypt(0, 4096)]);
        let two = [extent("disk:a", 0, 4096), crypt(0, 4096)];
        assert_eq!(
            range_extents(&format_identity(&two), range("4K+4K")),
            [crypt(0, 4096)]
        );
        assert!(are_same_bytes(
            stretch(&identity, "0+4K"),
            stretch("dm:crypt", "0+4K")
        ));
        assert!(!are_same_bytes(
            stretch(&identity, "0+4K"),
            stretch("dm:crypt", "0+2K")
        ));
    }

    #[test]
    fn a_drive_has_the_bytes_that_it_shares_at_its_own_places() {
        let ranges = |texts: &[&str]| texts.iter().map(|text| range(text)).collect::<Vec<_>>();
        let two = "1048576+8192 of disk:a and 0+8192 of disk:b";
        for (ours, theirs, taken, found) in [
            (
                "disk:a",
                "disk:a",
                &["4K+4K", "0+4K"][..],
                &["4K+4K", "0+4K"][..],
            ),
            ("disk:a", "disk:b", &["0+1G"], &[]),
            ("disk:a", two, &["4K+8K"], &["1028K+4K"]),
            (two, "disk:a", &["1M+4K", "1028K+1M"], &["0+4K", "4K+4K"]),
            (two, "disk:b", &["0+1G"], &["8K+8K"]),
            (
                "disk:a",
                "0+8192 of dm:c over 4096+8192/disk:a",
                &["4K+4K"],
                &["4K+8K"],
            ),
            (
                "0+8192 of dm:c over 4096+8192/disk:a",
                "disk:a",
                &["0+8K", "12K+4K"],
                &["0+8K"],
            ),
            (
                "0+8192 of dm:p#1 over 0+8192/disk:a",
                "0+8192 of dm:p#2 over 0+8192/disk:a",
                &["0+8K"],
                &[],
            ),
        ] {
            let shared = shared_ranges(stretch(ours, "0+1G"), theirs, &ranges(taken));
            assert_eq!(shared, ranges(found), "{ours}, {theirs}");
        }
        assert_eq!(
            shared_ranges(stretch(two, "4K+8K"), "disk:b", &ranges(&["0+1G"])),
            ranges(&["8K+4K"])
        );
    }

    /// Generates an extent of one of a few bases, possibly with extents on devices below.
    fn some_extent() -> impl Strategy<Value = BackingExtent> {
        let part = |bases: &'static [&'static str]| {
            let base = prop::sample::select(bases);
            (base, 0..8_u64, 1..8_u64).prop_map(|(base, start, length)| extent(base, start, length))
        };
        let below = prop::collection::vec(part(&["disk:a", "disk:b"]), 0..3);
        let bases = &["disk:a", "disk:b", "dm:c", "dm:p#1", "dm:p#2"];
        (part(bases), below).prop_map(|(extent, below)| BackingExtent {
            below: if extent.base.starts_with("dm") {
                below
            } else {
                Vec::new()
            },
            ..extent
        })
    }

    proptest! {
        #[test]
        fn bytes_are_shared_where_ranges_overlap(
            ours in prop::collection::vec(some_extent(), 1..3),
            theirs in prop::collection::vec(some_extent(), 1..3),
            of in (0..8_u64, 1..8_u64),
        ) {
            let length = ours.iter().map(|extent| extent.length).sum();
            let (ours, theirs) = (format_identity(&ours), format_identity(&theirs));
            let of = ByteRange::new(of.0, of.1).unwrap();
            let all = ByteRange::new(0, length).unwrap();
            let ours = |range| DriveByteRange { drive: &ours, range };
            let found = shared_ranges(ours(all), &theirs, &[of]);
            let theirs = DriveByteRange { drive: &theirs, range: of };
            for byte in 0..length {
                let byte = ByteRange::new(byte, 1).unwrap();
                let is_shared = found.iter().any(|range| range.overlaps(&byte));
                prop_assert_eq!(is_shared, do_overlap(ours(byte), theirs), "byte {}", byte);
            }
        }
    }

    #[test]
    fn what_lies_below_overlaps_wholly() {
        let over = |base: &str, below: BackingExtent| BackingExtent {
            below: vec![below],
            ..extent(base, 0, 4096)
        };
        let crypt = over("dm:crypt", extent("disk:a", 4096, 8192));
        assert!(crypt.overlaps(&extent("disk:a", 8192, 4096)));
        assert!(extent("disk:a", 8192, 4096).overlaps(&crypt));
        assert!(!crypt.overlaps(&extent("disk:a", 0, 4096)));
        let behind = BackingExtent {
            start: 4096,
            ..crypt.clone()
        };
        assert!(!crypt.overlaps(&behind), "other bytes of one base");
        let again = over("dm:again", extent("disk:a", 4096, 8192));
        assert!(crypt.overlaps(&again), "two mappings of the same bytes");
        let thin = |number| {
            over(
                &volume_name("dm:pool", number),
                extent("disk:a", 4096, 8192),
            )
        };
        assert!(thin("1").overlaps(&thin("1")));
        assert!(!thin("1").overlaps(&thin("2")), "the pool keeps them apart");
        assert!(thin("1").overlaps(&crypt));
    }
}
