//! Drives that the ledger knows under another name: from an earlier boot of the host, from an earlier version, or from a
//! time when the host reported other attributes of them.
//!
//! A disk with neither a WWID nor a serial number gets another kernel name at each boot. After a reboot, the ledger cannot
//! tell which of the present disks a recorded disk is. So until the operator decides, the ledger grants no bytes of a disk
//! that may be a recorded one: neither as bytes without data, nor to the id that had them under the recorded name.
//!
//! A name can also change in other ways: a disk gets or loses a serial number, or a label is overwritten. So the ledger
//! stores all names that a drive had at its last lease, and searches for data under all names that the requested drive has
//! now. A match refuses the lease until the operator decides.
//!
//! The names that guests see are derived from the name that the drive had when it was first leased, and must not change. So
//! the ledger stores that name.

use std::cell::LazyCell;
use std::collections::BTreeSet;

use super::error::DriveMatchReason;
use super::ledger_store::{LedgerRecord, LedgerRecords};
use super::outcome::EarlierDrive;
use super::range_owners::{self, PreviousDataPolicy, RangeOwner};
use super::request::{LeaseRequest, RequestedBytes};
use crate::backing_id::backing_extent::{self, DriveByteRange};
use crate::backing_id::{DriveIdentityRef, HostDisks};
use crate::label::DriveLabel;
use crate::range::ByteRange;

impl LedgerRecords {
    /// Returns whether an id has a lease or data on a base.
    pub(super) fn has_base(&self, base: &str) -> bool {
        let has = |record: &LedgerRecord| {
            backing_extent::bases(&record.drive)
                .iter()
                .any(|of| of == base)
        };
        self.owners.iter().any(|owner| owner.drive() == base) || self.leases.iter().any(has)
    }

    /// Returns for the drive `from`, and for the drive `to`, whether any id has a lease or data on it.
    pub(super) fn are_drives_known(&self, from: &str, to: &str) -> (bool, bool) {
        let known = |drive| {
            backing_extent::bases(drive)
                .iter()
                .any(|base| self.has_base(base))
        };
        (known(from), known(to))
    }

    /// Returns the labels of all drives with leases or data.
    pub(super) fn labels(&self) -> Vec<DriveLabel> {
        let owners = self.owners.iter().map(|owner| owner.drive().to_owned());
        let leases = self.leases.iter();
        let leases = leases.flat_map(|record| backing_extent::bases(&record.drive));
        let labels = owners.chain(leases);
        labels
            .filter_map(|base| DriveLabel::from_base(&base))
            .collect()
    }

    /// Returns the drive name from which the names that the drive's guests see are derived. It is the name that the drive had
    /// at its first lease.
    pub(super) fn guest_name_source(&self, drive: &str) -> String {
        if let Some(label) = backing_extent::bases(drive)
            .iter()
            .find_map(|base| DriveLabel::from_base(base))
        {
            // The name of the device that has a label may change with each boot.
            let base = label.base();
            return self.namings.get(&base).cloned().unwrap_or(base);
        }
        match self.namings.is_empty() {
            true => drive.to_owned(),
            false => backing_extent::rename_bases(drive, |base| self.namings.get(base).cloned()),
        }
    }

    /// Renames the bases (disks, files) of the drive `from` to those of the drive `to` in all records. A base is not renamed if
    /// the ledger already has records under its new name. Returns `false` if no base was renamed.
    pub(super) fn carry_over(&mut self, from: &str, to: &str) -> bool {
        if let [base] = &backing_extent::bases(to)[..]
            && DriveLabel::from_base(base).is_some()
            && backing_extent::bases(from) != [from]
        {
            // The bytes of `from` have other offsets on the labelled drive `to`.
            return false;
        }
        if let [base] = &backing_extent::bases(from)[..]
            && DriveLabel::from_base(base).is_some()
            && backing_extent::bases(to) != [to]
        {
            return false;
        }
        let pairs = backing_extent::bases(from)
            .into_iter()
            .zip(backing_extent::bases(to));
        let mut changed = false;
        for (from, to) in pairs {
            if from == to || !self.has_base(&from) || self.has_base(&to) {
                continue;
            }
            let rename = |base: &str| (base == from).then(|| to.clone());
            for record in &mut self.leases {
                record.drive = backing_extent::rename_bases(&record.drive, rename);
            }
            for owner in &mut self.owners {
                owner.rename_drive(rename);
            }
            for uncorrectable in &mut self.uncorrectable {
                uncorrectable.rename_drive(rename);
            }
            self.other_names.remove(&from);
            if let Some(known) = self.known.remove(&from) {
                self.known.insert(to.clone(), known);
            }
            if self.partly_known.remove(&from) {
                self.partly_known.insert(to.clone());
            }
            let naming = self.namings.remove(&from).unwrap_or(from);
            self.namings.insert(to, naming);
            changed = true;
        }
        changed
    }

    /// Returns a known drive that may be the requested drive under another name, with data of ids in the requested bytes. Bytes
    /// about which the operator has decided do not count, nor do bytes that the requesting id has on the requested drive under
    /// its present name.
    pub(super) fn find_earlier(
        &self,
        request: &LeaseRequest<'_>,
        host: impl FnOnce() -> HostDisks,
    ) -> Option<EarlierDrive> {
        let is_decided = matches!(request.wanted, RequestedBytes::Range(_))
            && request.previous_data == PreviousDataPolicy::Kept;
        if is_decided {
            return None;
        }
        EarlierDriveSearch::new(self, request, host).find_undecided()
    }

    /// Returns the result of [`Self::find_earlier`], but considers only known drives whose names are valid for all boots.
    pub(super) fn find_renamed(
        &self,
        request: &LeaseRequest<'_>,
        host: impl FnOnce() -> HostDisks,
    ) -> Option<EarlierDrive> {
        let search = EarlierDriveSearch::new(self, request, host);
        let lost = search.find_base(|base| backing_extent::boot_id_of(base).is_none());
        lost.or_else(|| search.find_below_label())
    }

    /// Returns the names of all bases with leases or data in the ledger.
    fn bases(&self) -> BTreeSet<String> {
        let owners = self.owners.iter().map(|owner| owner.drive().to_owned());
        let leases = self.leases.iter();
        let leases = leases.flat_map(|record| backing_extent::bases(&record.drive));
        owners.chain(leases).collect()
    }

    /// Records the other names of a drive, so that the drive is recognized if it loses its present name.
    pub(super) fn note_names(&mut self, drive: DriveIdentityRef<'_>) {
        let ours = backing_extent::bases(drive.name);
        let all = || drive.former_names.iter().chain(drive.possible_names);
        if let [base] = &ours[..]
            && DriveLabel::from_base(base).is_some()
        {
            let below = self.other_names.entry(base.clone()).or_default();
            // Names for one boot are recorded anew at each boot. All other names stay, because a name that the host does not
            // report today may be the only one that it reports later.
            below.retain(|name| backing_extent::drive_boot_id(name).is_none());
            below.extend(all().cloned());
            return;
        }
        for (at, base) in ours.into_iter().enumerate() {
            let names = all().map(|name| backing_extent::bases(name));
            let names =
                names.filter_map(|mut names| (at < names.len()).then(|| names.swap_remove(at)));
            let lasting =
                names.filter(|name| *name != base && backing_extent::boot_id_of(name).is_none());
            let lasting: BTreeSet<String> = lasting.collect();
            if !lasting.is_empty() {
                // No name is removed, because a name that the host does not report today may return.
                self.other_names.entry(base).or_default().extend(lasting);
            }
        }
    }

    /// Returns the ids with data on `base` in bytes that the request could get. Data that was given up does not count. Released
    /// data counts: it is not wiped yet, and a lease under another name of the drive would not wipe it.
    fn ids_on(&self, base: &str, request: &LeaseRequest<'_>) -> Vec<String> {
        let is_label = DriveLabel::from_base(base).is_some();
        let boot = backing_extent::drive_boot_id(request.drive.name);
        let is_asked_for = |range: &ByteRange| match (request.wanted, &boot) {
            (RequestedBytes::Range(wanted), Some(_)) if !is_label => {
                let places = backing_extent::range_extents(request.drive.name, wanted);
                let ranges = places.iter();
                let mut ranges = ranges.flat_map(|at| ByteRange::new(at.start, at.length));
                ranges.any(|wanted| wanted.overlaps(range))
            }
            // A drive with a lasting name is carried over as a whole or not at all, so all its data counts.
            _ => true,
        };
        let left = self.owners.iter().filter(|owner| {
            owner.drive() == base && !owner.is_given_up() && is_asked_for(&owner.range)
        });
        let mut ids: Vec<String> = left.map(|owner| owner.id.clone()).collect();
        ids.sort();
        ids.dedup();
        ids
    }

    /// Returns whether the id already has data in all requested bytes of the requested drive. For a request by size, returns
    /// whether the id already has a lease by size there.
    fn has_all_bytes(&self, request: &LeaseRequest<'_>) -> bool {
        let area = request.target();
        let of_id = |range| {
            let found = range_owners::find_owners(&self.owners, &area.candidate(range, None));
            let own = found.into_iter();
            let own = own.filter(|found| found.owner.is_owned_by(request.id));
            own.map(|found| (found.lease_offset, found.range.length()))
                .collect::<Vec<_>>()
        };
        match (request.wanted, area.whole_candidate()) {
            (RequestedBytes::Range(range), _) => {
                let lengths = of_id(range).into_iter().map(|(_, length)| length);
                lengths.fold(0, u64::saturating_add) == range.length()
            }
            (RequestedBytes::Size { .. }, Some(all)) => {
                of_id(all.range).iter().any(|(at, _)| at.is_some())
            }
            (RequestedBytes::Size { .. }, None) => false,
        }
    }

    /// Returns whether the request is for a new lease by size on a drive whose name is valid only until the next boot.
    pub(super) fn has_temporary_name(&self, request: &LeaseRequest<'_>) -> bool {
        matches!(request.wanted, RequestedBytes::Size { .. })
            && backing_extent::drive_boot_id(request.drive.name).is_some()
            && !self.has_all_bytes(request)
    }

    /// Records the operator's decision to give a range to the id although the drive may be a known drive under another
    /// name. The ledger forgets the data that the id had in this range of the known drive. Nothing is decided about other
    /// ranges of the known drive.
    pub(super) fn note_decision(
        &mut self,
        request: &LeaseRequest<'_>,
        range: ByteRange,
        host: impl FnOnce() -> HostDisks,
    ) {
        let without = LeaseRequest {
            previous_data: PreviousDataPolicy::Refused,
            ..*request
        };
        let search = EarlierDriveSearch::new(self, &without, host);
        if search.find_undecided().is_none() {
            return;
        }
        let alike = self.bases().into_iter();
        let alike: BTreeSet<String> = alike
            .filter(|base| search.likeness(base).is_some())
            .collect();
        drop(search);
        let bases = backing_extent::bases(request.drive.name).into_iter();
        self.partly_known
            .extend(bases.filter(|base| backing_extent::boot_id_of(base).is_none()));
        let places = backing_extent::range_extents(request.drive.name, range);
        let [place] = &places[..] else {
            return;
        };
        let is_it = |owner: &RangeOwner| {
            owner.id == request.id
                && (owner.range.start(), owner.range.length()) == (place.start, place.length)
                && alike.contains(owner.drive())
        };
        // If two known drives have data in such a range, the ledger cannot tell which of them is meant, and forgets
        // neither.
        if self.owners.iter().filter(|owner| is_it(owner)).count() == 1 {
            self.owners.retain(|owner| !is_it(owner));
        }
    }
}

/// Search for the requested drive among the drives that the ledger knows under other names.
struct EarlierDriveSearch<'a, F> {
    records: &'a LedgerRecords,
    request: &'a LeaseRequest<'a>,
    /// Bases of the requested drive.
    bases: Vec<String>,
    host: LazyCell<HostDisks, F>,
}

impl<'a, F: FnOnce() -> HostDisks> EarlierDriveSearch<'a, F> {
    fn new(records: &'a LedgerRecords, request: &'a LeaseRequest<'a>, host: F) -> Self {
        Self {
            records,
            request,
            bases: backing_extent::bases(request.drive.name),
            host: LazyCell::new(host),
        }
    }

    /// Returns a known drive about which the operator must decide before the request can be granted.
    fn find_undecided(&self) -> Option<EarlierDrive> {
        let records = self.records;
        let has_all = || records.has_all_bytes(self.request);
        let is_known = self
            .bases
            .iter()
            .all(|base| match backing_extent::boot_id_of(base) {
                Some(boot) => boot != backing_extent::UNKNOWN_BOOT && has_all(),
                None if records.partly_known.contains(base) => has_all(),
                None => records.has_base(base),
            });
        let unknown = (!is_known).then(|| self.find_base(|_| true)).flatten();
        unknown.or_else(|| match has_all() {
            true => None,
            false => self.find_below_label(),
        })
    }

    /// Returns a known base that may belong to the requested drive. Only bases without a label that `is_asked_for` selects are
    /// considered.
    fn find_base(&self, is_asked_for: impl Fn(&str) -> bool) -> Option<EarlierDrive> {
        let bases = self.records.bases().into_iter();
        let mut bases = bases.filter(|base| is_asked_for(base));
        bases.find_map(|name| self.with_ids(self.likeness(&name)?, name))
    }

    /// Returns a labelled drive whose bytes are on the requested drive, or were on it before its disk got another name.
    fn find_below_label(&self) -> Option<EarlierDrive> {
        let labels = self.records.bases().into_iter();
        let mut labels = labels
            .filter(|base| DriveLabel::from_base(base).is_some() && !self.bases.contains(base));
        labels.find_map(|name| {
            let likeness = self.likeness_of_label(&name)?;
            self.with_ids(likeness, name)
        })
    }

    fn with_ids(&self, likeness: DriveMatchReason, name: String) -> Option<EarlierDrive> {
        let ids = self.records.ids_on(&name, self.request);
        (!ids.is_empty()).then_some(EarlierDrive {
            name,
            ids,
            likeness,
        })
    }

    /// Returns the reason to think that a known base, which has no label, belongs to the requested drive; `None` if it cannot
    /// belong to it.
    fn likeness(&self, base: &str) -> Option<DriveMatchReason> {
        // A name without a known boot id may have belonged to another disk in an earlier boot.
        let is_ours = backing_extent::boot_id_of(base) != Some(backing_extent::UNKNOWN_BOOT)
            && self.bases.iter().any(|ours| ours == base);
        if is_ours || DriveLabel::from_base(base).is_some() {
            return None;
        }
        if self.shares_name(base) {
            return Some(DriveMatchReason::OtherName);
        }
        let mut ours = self.bases.iter();
        let can_be = match backing_extent::boot_id_of(base) {
            Some(_) => ours.any(|ours| backing_extent::can_be_same(base, ours)),
            // Two different names that are valid for all boots mean two drives.
            None => ours.any(|ours| {
                backing_extent::boot_id_of(ours).is_some()
                    && backing_extent::can_be_same(ours, base)
            }),
        };
        can_be.then(|| self.find_absence(base)).flatten()
    }

    /// Returns whether a known base has one of the requested drive's names.
    fn shares_name(&self, base: &str) -> bool {
        let is_label = matches!(&self.bases[..], [ours] if DriveLabel::from_base(ours).is_some());
        let others = self.request.drive.possible_names.iter();
        // The name of a whole disk does not match a part of the disk, whose bytes have other offsets.
        let others =
            others.filter(|other| !is_label || backing_extent::bases(other) == [other.as_str()]);
        let others: Vec<String> = others
            .flat_map(|other| backing_extent::bases(other))
            .collect();
        let is_shared = |name: &String| {
            self.bases.contains(name)
                || (backing_extent::boot_id_of(name).is_none() && others.contains(name))
        };
        let names = self.records.other_names.get(base);
        others.iter().any(|other| other == base)
            || names.is_some_and(|names| names.iter().any(is_shared))
    }

    /// Returns the reason to think that a known base is the requested drive: its name is of an earlier boot, or the host has no
    /// disk of that name. Returns `None` if the host has that disk, or if this boot cannot tell.
    fn find_absence(&self, base: &str) -> Option<DriveMatchReason> {
        let own = self
            .bases
            .iter()
            .find_map(|base| backing_extent::boot_id_of(base));
        match backing_extent::boot_id_of(base) {
            Some(boot)
                if backing_extent::is_earlier_boot(boot, own.unwrap_or(&self.host.boot_id)) =>
            {
                Some(DriveMatchReason::EarlierBoot)
            }
            // A name of another boot does not show whether its disk is present.
            Some(boot) if boot != self.host.boot_id => None,
            None if own.is_some_and(|own| own != self.host.boot_id) => None,
            _ => (!self.host.has_disk(base)).then_some(DriveMatchReason::Absent),
        }
    }

    fn likeness_of_label(&self, label: &str) -> Option<DriveMatchReason> {
        let all = ByteRange::new(0, u64::MAX).ok()?;
        let wanted = match self.request.wanted {
            RequestedBytes::Range(range) => range,
            RequestedBytes::Size { .. } => all,
        };
        let is_on = |below: &str, drive: &str| {
            let range = wanted;
            let below = DriveByteRange {
                drive: below,
                range: all,
            };
            backing_extent::do_overlap(DriveByteRange { drive, range }, below)
        };
        let drive = self.request.drive;
        let names = || {
            drive
                .possible_names
                .iter()
                .map(String::as_str)
                .chain([drive.name])
        };
        let below = self.records.other_names.get(label)?;
        if below
            .iter()
            .any(|below| names().any(|name| is_on(below, name)))
        {
            return Some(DriveMatchReason::OtherName);
        }
        let mut of_boot = self
            .bases
            .iter()
            .filter(|ours| backing_extent::boot_id_of(ours).is_some());
        let is_renamed = of_boot.any(|ours| {
            let rename = |base: &str| {
                let was = backing_extent::boot_id_of(base).is_some()
                    && backing_extent::can_be_same(base, ours);
                let was = was && self.find_absence(base).is_some();
                was.then(|| ours.clone())
            };
            below
                .iter()
                .any(|below| is_on(&backing_extent::rename_bases(below, rename), drive.name))
        });
        is_renamed.then_some(DriveMatchReason::Absent)
    }
}

#[cfg(test)]
mod tests {
    use super::super::error::LeaseError;
    use super::super::ledger::Ledger;
    use super::*;
    use crate::backing_id::{self, DriveIdentity};
    use nvme_spec::ids::Nsid;
    use std::collections::HashMap;

    /// Generator of pseudo-random numbers (SplitMix64).
    struct EarlierDriveTestRandom(u64);

    impl EarlierDriveTestRandom {
        fn below(&mut self, end: usize) -> usize {
            self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            (mixed ^ (mixed >> 31)) as usize % end
        }
    }

    const OLD: &str = "0d000000-0000-4000-8000-000000000001";

    fn request<'a>(id: &'a str, drive: &'a str, wanted: RequestedBytes) -> LeaseRequest<'a> {
        LeaseRequest {
            id,
            drive: drive.into(),
            nsid: Nsid(1),
            wanted,
            lba_shift: 9,
            blocks: 1 << 20,
            previous_data: PreviousDataPolicy::Refused,
        }
    }

    fn at(text: &str) -> RequestedBytes {
        RequestedBytes::Range(text.parse().unwrap())
    }

    const SIZE: RequestedBytes = RequestedBytes::Size {
        bytes: 64 << 20,
        unit: 1 << 20,
        whole: false,
    };

    fn with_kept_data<'a>(request: LeaseRequest<'a>) -> LeaseRequest<'a> {
        let former_data = PreviousDataPolicy::Kept;
        LeaseRequest {
            previous_data: former_data,
            ..request
        }
    }

    /// Creates a ledger with adjacent leases by size on a drive whose name ended with a boot, such as one that had a lasting
    /// name then.
    fn with_temporary_name(drive: &str, ids: &[&str]) -> (tempfile::TempDir, Ledger) {
        let dir = tempfile::tempdir().unwrap();
        let ledger = Ledger::open(&dir.path().join("state"));
        for id in ids {
            drop(ledger.acquire(&request(id, "disk:any", SIZE)).unwrap());
        }
        let path = dir.path().join("state/leases.json");
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, text.replace("disk:any", drive)).unwrap();
        (dir, ledger)
    }

    fn is_earlier(result: Result<super::super::Lease, LeaseError>) -> String {
        let error = result.unwrap_err();
        assert!(matches!(error, LeaseError::EarlierName(_)), "{error}");
        error.to_string()
    }

    /// Returns an identity with the given other names.
    fn named(name: &str, others: &[&str]) -> DriveIdentity {
        DriveIdentity {
            name: name.to_owned(),
            former_names: Vec::new(),
            possible_names: others.iter().map(|&other| other.to_owned()).collect(),
            facts: None,
        }
    }

    /// Returns the identity of a labelled drive on the base `below`.
    fn labelled(name: &str, below: &DriveIdentity) -> DriveIdentity {
        DriveLabel::new(name.parse().unwrap()).identity(below.into(), 1 << 29)
    }

    fn of<'a>(id: &'a str, drive: &'a DriveIdentity, wanted: RequestedBytes) -> LeaseRequest<'a> {
        LeaseRequest {
            drive: drive.into(),
            ..request(id, "", wanted)
        }
    }

    /// Covers all ways in which a drive gets another name or loses a name.
    #[test]
    fn a_drive_whose_name_changed_gives_no_data_of_others() {
        let boot = backing_id::boot_id();
        // No disk of this host uses these numbers.
        let now = |number: u32| format!("disk:{boot}/{}", 4_000_000_000 + number);
        let (old, ext, xfs) = (
            format!("disk:{OLD}/5"),
            "file:12@fs:ext-1",
            "file:12@fs:xfs-1",
        );
        let whole = named("disk:wwid", &["disk:serial"]);
        let part = named("1048576+536870912 of disk:s", &[]);
        let cases = [
            // The drive is a file whose disk got a serial number, lost it, or got another one.
            (named(ext, &[]), named("file:12@disk:s", &[ext])),
            (named("file:12@disk:s", &[ext]), named(ext, &[&now(1)])),
            (
                named("file:12@disk:s", &[ext]),
                named("file:12@disk:t", &[ext]),
            ),
            // The drive is a file whose file system does not report its UUID any more.
            (named(xfs, &[]), named(&format!("file:12@{}", now(1)), &[])),
            (
                named("file:12@disk:s", &[]),
                named(&format!("file:12@{}", now(1)), &[]),
            ),
            (
                named(&format!("file:12@{}", now(1)), &[]),
                named("file:12@disk:s", &[]),
            ),
            (
                named(&format!("file:12@{}", now(1)), &[]),
                named(xfs, &[&format!("file:12@{}", now(2))]),
            ),
            // The drive is a disk that got a serial number, lost it, or was connected again.
            (named(&old, &[]), named("disk:s", &[])),
            (named("disk:s", &[]), named(&now(1), &[])),
            (named(&now(1), &[]), named(&now(2), &[])),
            (named(&now(1), &[]), named("disk:s", &[&now(2)])),
            (named(&now(1), &[]), named("disk:s", &[&now(1)])),
            // The drive is a disk that lost one of two persistent names.
            (named("disk:serial", &[]), whole.clone()),
            (whole.clone(), named("disk:serial", &[])),
            (named("disk:serial", &[]), labelled("pool", &whole)),
            // The drive got a label, lost it, or got another label.
            (named(&old, &[]), labelled("pool", &named(&now(1), &[]))),
            (labelled("pool", &whole), named("disk:wwid", &[])),
            (labelled("pool", &whole), named("disk:serial", &[])),
            (labelled("pool", &whole), labelled("other", &whole)),
            (labelled("pool", &part), part.clone()),
            (labelled("pool", &named(&old, &[])), named(&now(1), &[])),
            (labelled("pool", &named(&now(1), &[])), named(&now(2), &[])),
        ];
        for (before, after) in &cases {
            let dir = tempfile::tempdir().unwrap();
            let ledger = Ledger::open(&dir.path().join("state"));
            drop(ledger.acquire(&of("a", before, at("0+64M"))).unwrap());
            let lasts = backing_extent::drive_boot_id(&after.name).is_none();
            let size = lasts.then_some(SIZE);
            for wanted in size.into_iter().chain([at("1M+1M"), at("0+64M")]) {
                for id in ["a", "b"] {
                    let found = ledger.acquire(&of(id, after, wanted));
                    let error = found.expect_err(&format!("{before:?} {after:?} {wanted:?}"));
                    assert!(matches!(error, LeaseError::EarlierName(_)), "{error}");
                }
            }
            let error = ledger.acquire(&of("b", after, at("1M+1M"))).unwrap_err();
            let LeaseError::EarlierName(error) = error else {
                panic!("{error}");
            };
            if DriveLabel::from_base(&error.earlier).is_some() {
                assert!(error.remedy.contains("--again"), "{error}");
                continue;
            }
            let command = format!("leases carry-over '{}' PATH", error.earlier);
            assert!(error.remedy.contains(&command), "{error}");
            // A decision about one range does not apply to another range.
            let accepted = of("b", after, at("128M+1M"));
            drop(ledger.acquire(&with_kept_data(accepted)).unwrap());
            if lasts {
                is_earlier(ledger.acquire(&of("c", after, SIZE)));
            }
            is_earlier(ledger.acquire(&of("c", after, at("1M+1M"))));
            ledger.decide_data("b", PreviousDataPolicy::Kept).unwrap();
        }
        for (before, after) in &cases {
            let dir = tempfile::tempdir().unwrap();
            let ledger = Ledger::open(&dir.path().join("state"));
            let lease = ledger.acquire(&of("a", before, at("0+64M"))).unwrap();
            let names = lease.identity();
            drop(lease);
            let LeaseError::EarlierName(error) =
                ledger.acquire(&of("b", after, at("1M+1M"))).unwrap_err()
            else {
                panic!("refused");
            };
            if DriveLabel::from_base(&error.earlier).is_some() {
                continue;
            }
            // The error message contains all necessary information.
            assert!(
                ledger
                    .carry_over_checked(&error.earlier, &after.name)
                    .unwrap()
            );
            let lease = ledger.acquire(&of("a", after, at("0+64M"))).unwrap();
            assert_eq!(lease.identity(), names);
            if backing_extent::drive_boot_id(&after.name).is_none() {
                let sized = ledger.acquire(&of("c", after, SIZE)).unwrap();
                assert_eq!(sized.extents().parts()[0].start(), 64 << 20);
            }
            let error = ledger.acquire(&of("b", after, at("1M+1M"))).unwrap_err();
            assert!(matches!(error, LeaseError::Overlap { .. }), "{error}");
        }
    }

    #[test]
    fn a_name_that_was_not_reported_for_a_while_still_refuses() {
        let names = ["disk:wwid", "disk:serial"];
        let both = named(names[0], &names[1..]);
        let (one, other) = (named(names[0], &[]), named(names[1], &[]));
        let label = DriveLabel::new("pool".parse().unwrap());
        let over = |below: &DriveIdentity| label.identity(below.into(), 1 << 29);
        for (first, next) in [(both.clone(), one.clone()), (over(&both), over(&one))] {
            let dir = tempfile::tempdir().unwrap();
            let ledger = Ledger::open(&dir.path().join("state"));
            drop(ledger.acquire(&of("a", &first, SIZE)).unwrap());
            drop(ledger.acquire(&of("b", &next, SIZE)).unwrap());
            let error = ledger.acquire(&of("c", &other, SIZE)).unwrap_err();
            assert!(matches!(error, LeaseError::EarlierName(_)), "{error}");
        }
    }

    #[test]
    fn drives_with_other_names_are_others() {
        let ext = ["file:12@fs:ext-1", "file:12@fs:ext-2"];
        let part = |start: u64| named(&format!("{start}+536870912 of disk:s"), &[]);
        for (before, after) in [
            (named("disk:s", &[]), named("disk:t", &[])),
            (named("disk:s", &["disk:a"]), named("disk:t", &["disk:b"])),
            (named(ext[0], &[]), named(ext[1], &[])),
            (named("file:12@disk:s", &[ext[0]]), named(ext[1], &[])),
            (named(ext[0], &[]), named("file:12@disk:s", &[ext[1]])),
            (named(ext[0], &[]), named("disk:s", &[])),
            (named("file:13@disk:s", &[]), named(ext[0], &[])),
            (labelled("pool", &part(1 << 20)), part(1 << 30)),
            (part(1 << 30), labelled("pool", &part(1 << 20))),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let ledger = Ledger::open(&dir.path().join("state"));
            drop(ledger.acquire(&of("a", &before, SIZE)).unwrap());
            drop(ledger.acquire(&of("b", &after, SIZE)).expect(&after.name));
        }
    }

    #[test]
    fn a_disk_that_may_be_a_lost_one_is_found_before_it_is_labelled() {
        let dir = tempfile::tempdir().unwrap();
        let ledger = Ledger::open(&dir.path().join("state"));
        let disk = format!("disk:{}/4000000000", backing_id::boot_id());
        let lost = |drive: &str| {
            let found = ledger.find_renamed(drive.into(), Nsid(1), 1 << 20, 9);
            found.unwrap().map(|(name, _)| name)
        };
        let before = format!("disk:{OLD}/5");
        drop(
            ledger
                .acquire(&request("a", &before, at("256M+1M")))
                .unwrap(),
        );
        assert_eq!(lost(&disk), None, "its lease is refused instead");
        let other = request("b", "disk:s", at("0+1M"));
        drop(ledger.acquire(&with_kept_data(other)).unwrap());
        assert_eq!(lost(&disk).as_deref(), Some("disk:s"));
        assert_eq!(lost("disk:t"), None);
    }

    #[test]
    fn a_disk_without_a_name_has_no_new_lease_by_size() {
        let dir = tempfile::tempdir().unwrap();
        let ledger = Ledger::open(&dir.path().join("state"));
        for base in [format!("disk:{OLD}/5"), format!("file:12@disk:{OLD}/5")] {
            let error = ledger.acquire(&request("a", &base, SIZE)).unwrap_err();
            assert!(
                matches!(error, LeaseError::NoPersistentName { .. }),
                "{error}"
            );
            drop(ledger.acquire(&request("a", &base, at("0+1M"))).unwrap());
            ledger.release("a", true).unwrap_err();
        }
        // Drives whose contents end with the boot, like their names, may have leases by size.
        for base in [format!("ram:{OLD}/5"), format!("file:12@{OLD}/0:40")] {
            drop(ledger.acquire(&request("b", &base, SIZE)).unwrap());
        }
    }

    #[test]
    fn a_labelled_disk_has_leases_by_size_over_boots() {
        let dir = tempfile::tempdir().unwrap();
        let ledger = Ledger::open(&dir.path().join("state"));
        let label = DriveLabel::new("pool".parse().unwrap());
        // The disk that has the label is known only by a kernel number.
        let drive = |boot: &str, number| {
            let disk = format!("disk:{boot}/{number}");
            label.identity((&disk).into(), 256 << 20).name
        };
        let starts = |drive: &str, ids: [&str; 2]| {
            ids.map(|id| {
                let lease = ledger.acquire(&request(id, drive, SIZE)).unwrap();
                (id.to_owned(), lease.extents().parts()[0].start())
            })
        };
        let first = starts(&drive(OLD, 5), ["a", "b"]);
        let mut next = starts(&drive(&backing_id::boot_id(), 6), ["b", "a"]);
        next.reverse();
        assert_eq!(first, next);
        assert_ne!(first[0].1, first[1].1);
    }

    #[test]
    fn leases_by_size_on_a_temporary_name_go_on_until_the_boot() {
        let boot = backing_id::boot_id();
        let drive = format!("disk:{boot}/5");
        let (_dir, ledger) = with_temporary_name(&drive, &["a", "b"]);
        for id in ["b", "a"] {
            let lease = ledger.acquire(&request(id, &drive, SIZE)).unwrap();
            let start = lease.extents().parts()[0].start();
            assert_eq!(start, if id == "a" { 0 } else { 64 << 20 });
        }
        // At the next boot, the disk has another name, or its old name belongs to another disk.
        for drive in [format!("disk:{OLD}/5"), format!("disk:{OLD}/6")] {
            is_earlier(ledger.acquire(&request("a", &drive, SIZE)));
        }
        // The operator's decision is valid only until the next boot.
        let next = format!("disk:{OLD}/5");
        assert!(ledger.carry_over_checked(&drive, &next).unwrap());
        drop(ledger.acquire(&request("a", &next, SIZE)).unwrap());
        let error = ledger.acquire(&request("c", &next, SIZE)).unwrap_err();
        assert!(
            matches!(error, LeaseError::NoPersistentName { .. }),
            "{error}"
        );
    }

    #[test]
    fn a_range_of_a_disk_without_a_name_is_not_had_again_after_a_boot_without_a_word() {
        let dir = tempfile::tempdir().unwrap();
        let ledger = Ledger::open(&dir.path().join("state"));
        let before = format!("disk:{OLD}/5");
        drop(ledger.acquire(&request("a", &before, at("0+1M"))).unwrap());
        ledger
            .acquire(&request("c", &before, at("4M+1M")))
            .unwrap()
            .die();
        let drive = format!("disk:{}/3", backing_id::boot_id());
        for (id, range) in [("a", "0+1M"), ("b", "512K+1M"), ("c", "4M+1M")] {
            let wanted = request(id, &drive, at(range));
            let error = is_earlier(ledger.acquire(&wanted));
            assert!(error.contains(&before), "{error}");
            let wiping = PreviousDataPolicy::Wiped;
            is_earlier(ledger.acquire(&LeaseRequest {
                previous_data: wiping,
                ..wanted
            }));
        }
        // A part without data is available, but the operator is asked once per boot.
        drop(ledger.acquire(&request("d", &drive, at("8M+1M"))).unwrap());
        for id in ["a", "c"] {
            let wanted = request(id, &drive, at(if id == "a" { "0+1M" } else { "4M+1M" }));
            drop(ledger.acquire(&with_kept_data(wanted)).unwrap());
            drop(ledger.acquire(&wanted).unwrap());
        }
        // The data that these ids left on the old drive does not count as data on a second drive.
        assert!(!ledger.carry_over(&before, "disk:known").unwrap());
    }

    #[test]
    fn a_file_goes_on_under_the_name_of_its_file_system_within_the_boot() {
        let old = format!("file:12@disk:{}/5", backing_id::boot_id());
        let new = "file:12@fs:ext-0123456789abcdef";
        let (_dir, ledger) = with_temporary_name(&old, &["a", "b"]);
        let earlier_lease = ledger.acquire(&request("b", &old, SIZE)).unwrap();
        let names = earlier_lease.identity();
        // The lease is held during the change.
        assert!(ledger.carry_over(&old, new).unwrap());
        assert!(!ledger.carry_over(&old, new).unwrap());
        earlier_lease.die();
        let after = ledger.acquire(&request("b", new, SIZE)).unwrap();
        assert_eq!(after.extents().parts()[0].start(), 64 << 20);
        assert_eq!(after.identity(), names, "names of guests stay");
        assert_eq!(ledger.guest_name_source(new).unwrap(), old);
    }

    #[test]
    fn a_file_of_an_earlier_boot_is_carried_over_by_the_operator_alone() {
        let old = format!("file:12@disk:{OLD}/5");
        let new = "file:12@fs:ext-0123456789abcdef";
        let (_dir, ledger) = with_temporary_name(&old, &["a", "b"]);
        let error = is_earlier(ledger.acquire(&request("b", new, SIZE)));
        assert!(error.contains("leases carry-over"), "{error}");
        is_earlier(ledger.acquire(&request("b", new, at("0+1M"))));
        // After that, the disk may have a serial number.
        is_earlier(ledger.acquire(&request("z", "file:12@disk:serial", SIZE)));
        // Neither another file nor a disk can be this drive.
        for other in ["file:13@fs:ext-0123456789abcdef", "disk:serial"] {
            drop(ledger.acquire(&request("z", other, SIZE)).unwrap());
        }
        assert!(ledger.carry_over_checked(&old, new).unwrap());
        let lease = ledger.acquire(&request("b", new, SIZE)).unwrap();
        assert_eq!(lease.extents().parts()[0].start(), 64 << 20);
        let error = ledger.carry_over_checked(new, "disk:any").unwrap_err();
        assert!(matches!(error, LeaseError::InUse { .. }), "{error}");
        drop(lease);
        let error = ledger.carry_over_checked(new, "disk:serial").unwrap_err();
        assert!(matches!(error, LeaseError::BothKnown { .. }), "{error}");
    }

    #[test]
    fn a_disk_that_got_a_serial_number_is_refused_until_it_is_carried_over() {
        for base in ["disk:", "file:12@disk:"] {
            let dir = tempfile::tempdir().unwrap();
            let ledger = Ledger::open(&dir.path().join("state"));
            drop(ledger.acquire(&request("y", "disk:other", SIZE)).unwrap());
            let old = format!("{base}{OLD}/5");
            drop(ledger.acquire(&request("a", &old, at("0+1M"))).unwrap());
            let new = format!("{base}serial");
            for drive in [new.clone(), format!("1048576+1048576 of {new}")] {
                is_earlier(ledger.acquire(&request("b", &drive, SIZE)));
                for id in ["a", "b"] {
                    is_earlier(ledger.acquire(&request(id, &drive, at("0+1M"))));
                }
            }
            // A disk that the ledger knows under another name is another disk.
            drop(ledger.acquire(&request("z", "disk:other", SIZE)).unwrap());
            assert!(ledger.carry_over_checked(&old, &new).unwrap());
            drop(ledger.acquire(&request("a", &new, at("0+1M"))).unwrap());
            let lease = ledger.acquire(&request("b", &new, SIZE)).unwrap();
            assert!(lease.extents().parts()[0].start() >= 1 << 20);
        }
    }

    #[test]
    fn the_word_for_a_range_gives_out_no_other_of_the_drive() {
        for [old, new] in [
            ["file:12@disk:OLD/5", "file:12@disk:serial"],
            ["file:12@disk:OLD/5", "file:12@fs:ext-0123456789abcdef"],
            ["disk:OLD/5", "disk:serial"],
            ["disk:OLD/5", "drive-id:name"],
        ] {
            let old = old.replace("OLD", OLD);
            let (_dir, ledger) = with_temporary_name(&old, &["a", "b", "c"]);
            let is_refused = |id, wanted| {
                is_earlier(ledger.acquire(&request(id, new, wanted)));
            };
            let first = request("a", new, at("0+64M"));
            drop(ledger.acquire(&with_kept_data(first)).unwrap());
            is_refused("d", SIZE);
            is_refused("d", at("64M+1M"));
            is_refused("b", SIZE);
            is_refused("b", at("64M+64M"));
            // A range about which the operator decided, now or before, can be leased.
            drop(ledger.acquire(&first).unwrap());
            let second = request("b", new, at("64M+64M"));
            drop(ledger.acquire(&with_kept_data(second)).unwrap());
            is_refused("d", SIZE);
            // After the last range is decided, the ledger knows all data of the drive.
            let third = request("c", new, at("128M+64M"));
            drop(ledger.acquire(&with_kept_data(third)).unwrap());
            let lease = ledger.acquire(&request("d", new, SIZE)).unwrap();
            assert_eq!(lease.extents().parts()[0].start(), 192 << 20);
        }
    }

    #[test]
    fn data_of_an_earlier_boot_is_in_the_way_until_it_is_given_up() {
        let (_dir, ledger) = with_temporary_name(&format!("disk:{OLD}/5"), &["a", "b"]);
        let other = request("z", "disk:serial", at("256M+1M"));
        is_earlier(ledger.acquire(&other));
        drop(ledger.acquire(&with_kept_data(other)).unwrap());
        is_earlier(ledger.acquire(&request("y", "disk:serial", SIZE)));
        for (policy, is_refused) in [
            (PreviousDataPolicy::Wiped, true),
            (PreviousDataPolicy::Kept, false),
        ] {
            for id in ["a", "b"] {
                ledger.decide_data(id, policy).unwrap();
            }
            let result = ledger.acquire(&request("y", "disk:serial", SIZE));
            match is_refused {
                true => drop(is_earlier(result)),
                false => drop(result.unwrap()),
            }
        }
    }

    #[test]
    fn without_a_boot_id_the_operator_must_identify_drives() {
        let dir = tempfile::tempdir().unwrap();
        let ledger = Ledger::open(&dir.path().join("state"));
        let drive = "disk:00000000-0000-0000-0000-000000000000/5";
        let wanted = request("a", drive, at("0+1M"));
        drop(ledger.acquire(&wanted).unwrap());
        is_earlier(ledger.acquire(&wanted));
        is_earlier(ledger.acquire(&request("b", drive, at("0+1M"))));
        is_earlier(ledger.acquire(&request("b", "disk:serial", SIZE)));
        drop(ledger.acquire(&with_kept_data(wanted)).unwrap());
        is_earlier(ledger.acquire(&wanted));
        // A part without data is available.
        drop(ledger.acquire(&request("d", drive, at("8M+1M"))).unwrap());
    }

    #[test]
    fn an_old_drive_name_ends_with_its_data() {
        let dir = tempfile::tempdir().unwrap();
        let ledger = Ledger::open(&dir.path().join("state"));
        let [first, second] = [5, 6].map(|number| format!("disk:{OLD}/{number}"));
        drop(ledger.acquire(&request("a", &first, at("0+1M"))).unwrap());
        assert!(ledger.carry_over_checked(&first, &second).unwrap());
        let text = || std::fs::read_to_string(dir.path().join("state/leases.json")).unwrap();
        assert!(text().contains("namings"));
        assert_eq!(ledger.guest_name_source(&second).unwrap(), first);
        let drive = format!("disk:{}/3", backing_id::boot_id());
        let wanted = request("a", &drive, at("0+1M"));
        drop(ledger.acquire(&with_kept_data(wanted)).unwrap());
        assert!(!text().contains("namings"), "{}", text());
    }

    /// Three disks, two of them without a persistent name, appear in another order at each of 20 boots. Each id requests its
    /// lease on the disk that now has the number which the id's disk had at the first boot.
    #[test]
    fn disks_in_changed_order_give_no_data_of_others() {
        for seed in 0..20 {
            let mut random = EarlierDriveTestRandom(seed);
            let dir = tempfile::tempdir().unwrap();
            let ledger = Ledger::open(&dir.path().join("state"));
            // The ledger knows the third disk by an earlier name.
            let before = request("z", "disk:serial", at("384M+1M"));
            drop(ledger.acquire(&before).unwrap());
            // Id that wrote each MiB of each disk.
            let mut content: HashMap<(usize, u64), &str> = HashMap::new();
            let mut right = 0;
            for boot in 0..20_u64 {
                let mut order = [0_usize, 1, 2];
                for i in (1..3).rev() {
                    order.swap(i, random.below(i + 1));
                }
                for (number, disk) in order.into_iter().enumerate() {
                    let name = match disk {
                        2 => "disk:serial".to_owned(),
                        _ => format!("disk:0d000000-0000-4000-8000-{boot:012}/{number}"),
                    };
                    for (id, wanted) in [
                        (["a", "b", "c"][number], SIZE),
                        (["d", "e", "f"][number], at("256M+4M")),
                    ] {
                        let Ok(lease) = ledger.acquire(&request(id, &name, wanted)) else {
                            continue;
                        };
                        for part in lease.extents().parts() {
                            for block in part.start() >> 20..part.end() >> 20 {
                                let found = content.insert((disk, block), id);
                                assert!(
                                    found.is_none_or(|owner| owner == id),
                                    "seed {seed}, boot {boot}: {id} finds data of {found:?} on disk {disk}"
                                );
                            }
                        }
                        right += 1;
                    }
                }
            }
            assert!(right > 20, "the disk with a name goes on: {right}");
        }
    }
}
