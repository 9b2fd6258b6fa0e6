//! Detection of exchanged drives and changed content, by stored facts about physical drives.
//!
//! A PCI address is no identity: after an exchange, another drive is at the address. So an id with data on the drive that
//! was at an address gets no lease of another drive at that address. A drive's name is no proof of the content either: a
//! namespace that was deleted, formatted or shrunk has lost leased bytes. So for each drive with leases or data, the ledger
//! stores the PCI address and facts about the namespaces, and compares both with the present ones at each lease.

use super::known_drives::KnownNamespace;
use super::ledger_store::{LedgerRecord, LedgerRecords};
use super::outcome::LeaseRefusal;
use super::range_owners::RangeOwner;
use super::request::LeaseRequest;
use crate::backing_id::backing_extent;

/// Returns the present facts about the requested namespace; `None` if the drive is not a physical drive.
fn namespace_facts(request: &LeaseRequest<'_>) -> Option<KnownNamespace> {
    let facts = request.drive.facts?;
    Some(KnownNamespace {
        id: facts.ids.get(&request.nsid.0).cloned().unwrap_or_default(),
        blocks: request.blocks,
        lba_shift: request.lba_shift,
    })
}

impl LedgerRecords {
    /// Refuses a lease if the namespace's content may have changed since its last lease, or if the id has data on another drive
    /// that was at the PCI address where the requested drive is now.
    pub(super) fn check_known_drive(&self, request: &LeaseRequest<'_>) -> Result<(), LeaseRefusal> {
        let (Some(facts), Some(now)) = (request.drive.facts, namespace_facts(request)) else {
            return Ok(());
        };
        let ours = request.drive.name;
        let before = self.known.get(ours);
        let before = before.and_then(|drive| drive.namespaces.get(&request.nsid.0));
        if let Some(change) = before.and_then(|before| before.describe_change(&now)) {
            return Err(LeaseRefusal::Changed(change));
        }
        let mut others = self.known.iter();
        let was_here = others.find(|(name, drive)| {
            *name != ours && drive.address == facts.address && self.has_data_on(request.id, name)
        });
        match was_here {
            // The id has data on both drives: its data was moved, or it uses both.
            Some((name, _)) if !self.has_data_on(request.id, ours) => {
                Err(LeaseRefusal::Exchanged {
                    before: name.clone(),
                    address: facts.address.clone(),
                })
            }
            _ => Ok(()),
        }
    }

    fn has_data_on(&self, id: &str, drive: &str) -> bool {
        // Released data belongs to no id any more, even before it is wiped.
        let is_theirs = |owner: &RangeOwner| owner.id == id && owner.drive() == drive;
        let mut owners = self.owners.iter();
        let is_leased = |of: &str| backing_extent::bases(of).iter().any(|base| base == drive);
        let mut leases = self.leases.iter();
        owners.any(|owner| is_theirs(owner) && !owner.is_free())
            || leases.any(|record| record.id == id && is_leased(&record.drive))
    }

    /// Records the present facts about the requested drive and its namespace. A namespace that does not report its identifier now
    /// keeps the recorded one.
    pub(super) fn note_facts(&mut self, request: &LeaseRequest<'_>) {
        let (Some(facts), Some(mut now)) = (request.drive.facts, namespace_facts(request)) else {
            return;
        };
        let drive = self.known.entry(request.drive.name.to_owned()).or_default();
        drive.address.clone_from(&facts.address);
        if let Some(before) = drive.namespaces.get(&request.nsid.0)
            && now.id.is_empty()
        {
            now.id.clone_from(&before.id);
        }
        drive.namespaces.insert(request.nsid.0, now);
    }

    /// Forgets the facts about namespaces on which no id has a lease or data.
    pub(super) fn forget_unknown_facts(&mut self) {
        let mut known = std::mem::take(&mut self.known);
        for (drive, of) in &mut known {
            of.namespaces
                .retain(|nsid, _| self.has_lease_or_data(drive, *nsid));
        }
        known.retain(|_, of| !of.namespaces.is_empty());
        self.known = known;
    }

    /// Returns whether any id has a lease or data on a namespace.
    fn has_lease_or_data(&self, drive: &str, nsid: u32) -> bool {
        let is_on = |record: &LedgerRecord| {
            record.nsid == nsid
                && backing_extent::bases(&record.drive)
                    .iter()
                    .any(|base| base == drive)
        };
        let mut owners = self.owners.iter();
        owners.any(|owner| (owner.drive(), owner.nsid()) == (drive, nsid))
            || self.leases.iter().any(is_on)
    }

    /// Forgets the facts about a drive. The drive's next lease records its facts then. Returns `false` if there were none.
    pub(super) fn forget_facts(&mut self, drive: &str) -> bool {
        self.known.remove(drive).is_some()
    }
}

#[cfg(test)]
mod tests {
    use nvme_spec::ids::Nsid;

    use super::super::error::LeaseError;
    use super::super::ledger::{Lease, Ledger};
    use super::super::range_owners::{self, PreviousDataPolicy};
    use super::super::request::RequestedBytes;
    use super::*;
    use crate::backing_id::{DriveFacts, DriveIdentity};
    use crate::range::ByteRange;

    const ADDRESS: &str = "0000:01:00.0";

    fn drive(name: &str, address: &str, id: &str) -> DriveIdentity {
        DriveIdentity {
            facts: Some(DriveFacts {
                address: address.to_owned(),
                ids: [(1, id.to_owned())].into(),
            }),
            ..name.to_owned().into()
        }
    }

    fn lease(
        ledger: &Ledger,
        id: &str,
        drive: &DriveIdentity,
        (blocks, lba_shift): (u64, u8),
    ) -> Result<Lease, LeaseError> {
        ledger.acquire(&LeaseRequest {
            id,
            drive: drive.into(),
            nsid: Nsid(1),
            wanted: RequestedBytes::Range(ByteRange::new(0, 4096).unwrap()),
            lba_shift,
            blocks,
            previous_data: PreviousDataPolicy::Kept,
        })
    }

    #[test]
    fn a_replaced_namespace_is_refused_with_the_changed_property() {
        let dir = tempfile::tempdir().unwrap();
        let ledger = Ledger::open(dir.path());
        let known = drive("nvme:a", ADDRESS, "01");
        drop(lease(&ledger, "vm", &known, (1000, 9)).unwrap());
        let moved = drive("nvme:a", "0000:02:00.0", "01");
        drop(lease(&ledger, "vm", &moved, (1000, 9)).expect("it was put into another slot"));
        drop(lease(&ledger, "vm", &known, (2000, 9)).expect("it has grown"));
        for (now, size, message) in [
            (&known, (1999, 9), "has 1023488, and had 1000K"),
            (
                &known,
                (2000, 12),
                "has blocks of 4K, and had blocks of 512",
            ),
            (
                &drive("nvme:a", ADDRESS, "02"),
                (2000, 9),
                "has the id 02, and had 01",
            ),
        ] {
            for id in ["vm", "other"] {
                let error = lease(&ledger, id, now, size).unwrap_err();
                assert!(matches!(error, LeaseError::Changed(_)), "{error}");
                assert!(error.to_string().contains(message), "{error}");
            }
        }
        // A namespace that no longer reports its identifier is compared by its other properties. Once it reports one again, it
        // is compared by that too.
        drop(lease(&ledger, "vm", &drive("nvme:a", ADDRESS, ""), (2000, 9)).unwrap());
        let other = drive("nvme:a", ADDRESS, "02");
        let error = lease(&ledger, "vm", &other, (2000, 9)).unwrap_err();
        assert!(matches!(error, LeaseError::Changed(_)), "{error}");
        // The operator accepts the drive.
        assert!(ledger.accept_drive("nvme:a").unwrap());
        assert!(!ledger.accept_drive("nvme:a").unwrap());
        drop(lease(&ledger, "vm", &known, (1999, 9)).unwrap());
    }

    #[test]
    fn a_drive_at_the_address_of_another_one_does_not_take_its_ids() {
        let dir = tempfile::tempdir().unwrap();
        let ledger = Ledger::open(dir.path());
        let (known, other) = (drive("nvme:a", ADDRESS, ""), drive("nvme:b", ADDRESS, ""));
        let held = lease(&ledger, "vm", &known, (1000, 9)).unwrap();
        for _ in 0..2 {
            let error = lease(&ledger, "vm", &other, (1000, 9)).unwrap_err();
            assert!(matches!(error, LeaseError::Exchanged(_)), "{error}");
            let message = error.to_string();
            assert!(
                message.contains("nvme:a, which was at 0000:01:00.0"),
                "{message}"
            );
        }
        drop(held);
        let error = lease(&ledger, "vm", &other, (1000, 9)).unwrap_err();
        assert!(matches!(error, LeaseError::Exchanged(_)), "{error}");
        // The known drive has failed. The command that the error suggests gives up the id's data on it.
        let dir = tempfile::tempdir().unwrap();
        let other_ledger = Ledger::open(dir.path());
        drop(lease(&other_ledger, "vm", &known, (1000, 9)).unwrap());
        lease(&other_ledger, "vm", &other, (1000, 9)).unwrap_err();
        other_ledger
            .decide_data("vm", PreviousDataPolicy::Wiped)
            .unwrap();
        drop(lease(&other_ledger, "vm", &other, (1000, 9)).unwrap());
        // Another id may use the new drive. The known drive is recognized at any address.
        drop(lease(&ledger, "new", &other, (1000, 9)).unwrap());
        let moved = drive("nvme:a", "0000:02:00.0", "");
        drop(lease(&ledger, "vm", &moved, (1000, 9)).unwrap());
        // The new drive is now known at the other address, so the id has data on both drives.
        drop(lease(&ledger, "vm", &other, (1000, 9)).unwrap());
    }

    #[test]
    fn facts_are_forgotten_with_the_last_data_of_a_drive() {
        let mut records = LedgerRecords::default();
        let known = drive("nvme:a", ADDRESS, "");
        let request = LeaseRequest {
            id: "vm",
            drive: (&known).into(),
            nsid: Nsid(1),
            wanted: RequestedBytes::Range(ByteRange::new(0, 4096).unwrap()),
            lba_shift: 9,
            blocks: 1000,
            previous_data: PreviousDataPolicy::Kept,
        };
        records.note_facts(&request);
        assert_eq!(records.known.len(), 1);
        records.note_facts(&LeaseRequest {
            nsid: Nsid(2),
            ..request
        });
        let place = request
            .target()
            .candidate(ByteRange::new(0, 4096).unwrap(), None);
        range_owners::record_owner(&mut records.owners, &place, PreviousDataPolicy::Kept);
        records.remove_unused();
        let namespaces = records.known["nvme:a"].namespaces.keys();
        assert_eq!(namespaces.collect::<Vec<_>>(), [&1]);
        records.owners.clear();
        records.remove_unused();
        assert!(records.known.is_empty());
    }
}
