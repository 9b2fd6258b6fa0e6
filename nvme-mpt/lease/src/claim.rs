//! Claims: the right by which a lease is requested, checked against the [settings](super::lease_settings) of its id.

use super::error::LeaseError;
use super::extents::LeaseExtents;
use super::lease_settings::{LeaseSettings, LeaseSettingsById};
use super::lease_target::LeaseTarget;
use super::ledger_store::LedgerRecords;
use super::range_owners;

/// Right by which a process requests a lease.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LeaseClaim {
    /// The operator requests the lease. Its owner stays the same.
    #[default]
    Operator,
    /// The operator requests the lease for this user, who becomes its owner.
    ForUser(u32),
    /// A process of this user requests the lease, and may have any lease. If the lease has no owner, the user becomes its
    /// owner.
    AnyLease(u32),
    /// A process of this user requests the lease, and may have only a lease that the user owns, of bytes that already belong to
    /// the lease's id.
    OwnLease(u32),
}

impl LeaseClaim {
    /// Checks that the owner of the lease `id` allows the claim.
    pub(super) fn check_owner(self, records: &LedgerRecords, id: &str) -> Result<(), LeaseError> {
        let Self::OwnLease(user) = self else {
            return Ok(());
        };
        match records.owner(id) {
            Some(owner) if owner == user => Ok(()),
            Some(owner) => Err(LeaseError::OtherOwner {
                id: id.to_owned(),
                owner,
                user,
            }),
            None => Err(LeaseError::NoOwner {
                id: id.to_owned(),
                user,
            }),
        }
    }

    /// For [`Self::OwnLease`], checks that all bytes of the lease already belong to the lease's id. Bytes that belong to no
    /// id are refused too, because they may have data of the host.
    pub(super) fn check_extents(
        self,
        records: &LedgerRecords,
        area: &LeaseTarget<'_>,
        extents: &LeaseExtents,
    ) -> Result<(), LeaseError> {
        let Self::OwnLease(user) = self else {
            return Ok(());
        };
        let mut parts = extents.parts().iter();
        let foreign = parts.find(|part| {
            let found = range_owners::find_owners(&records.owners, &area.candidate(**part, None));
            let own = found
                .iter()
                .filter(|found| found.owner.is_owned_by(area.id));
            let own = own.map(|found| found.range.length());
            own.fold(0, u64::saturating_add) != part.length()
        });
        match foreign {
            None => Ok(()),
            Some(range) => Err(LeaseError::NotReserved {
                id: area.id.to_owned(),
                drive: area.drive.to_owned(),
                range: *range,
                user,
            }),
        }
    }

    /// Records the owner of a lease that was granted by this right.
    pub(super) fn record_owner(self, settings: &mut LeaseSettingsById, id: &str) {
        let owner = match self {
            Self::Operator | Self::OwnLease(_) => return,
            Self::ForUser(user) => Some(user),
            Self::AnyLease(user) => settings
                .get(id)
                .and_then(|settings| settings.owner)
                .or(Some(user)),
        };
        settings.entry(id.to_owned()).or_default().owner = owner;
    }
}

impl LedgerRecords {
    /// Returns the user that owns leases of `id`.
    pub(super) fn owner(&self, id: &str) -> Option<u32> {
        self.settings.get(id)?.owner
    }

    /// Returns whether the ledger has a lease or data of the id.
    pub(super) fn has_id(&self, id: &str) -> bool {
        self.leases.iter().any(|record| record.id == id)
            || self.owners.iter().any(|owner| owner.id == id)
    }

    /// Removes records that nothing refers to any more: settings with default values; settings and unreadable blocks of ids
    /// that have neither a lease nor data; names and facts of drives on which no id has a lease or data.
    pub(super) fn remove_unused(&mut self) {
        let mut settings = std::mem::take(&mut self.settings);
        settings.retain(|id, lease_settings| {
            *lease_settings != LeaseSettings::default() && self.has_id(id)
        });
        self.settings = settings;
        let mut uncorrectable = std::mem::take(&mut self.uncorrectable);
        uncorrectable.retain(|entry| self.has_id(entry.id()));
        self.uncorrectable = uncorrectable;
        let mut namings = std::mem::take(&mut self.namings);
        namings.retain(|base, _| self.has_base(base));
        self.namings = namings;
        let mut partly_known = std::mem::take(&mut self.partly_known);
        partly_known.retain(|base| self.has_base(base));
        self.partly_known = partly_known;
        let mut other_names = std::mem::take(&mut self.other_names);
        other_names.retain(|base, _| self.has_base(base));
        self.other_names = other_names;
        self.forget_unknown_facts();
    }
}

#[cfg(test)]
mod tests {
    use nvme_spec::ids::Nsid;

    use super::super::lease_entry::LeaseHolderState;
    use super::super::ledger::Ledger;
    use super::super::range_owners::PreviousDataPolicy;
    use super::super::request::{LeaseRequest, RequestedBytes};
    use super::*;
    use crate::range::ByteSize;

    const OPERATOR: u32 = 0;
    const ALICE: u32 = 1001;
    const BOB: u32 = 1002;

    fn range<'a>(id: &'a str, range: &str) -> LeaseRequest<'a> {
        LeaseRequest {
            id,
            drive: "file:/drive".into(),
            nsid: Nsid(1),
            wanted: RequestedBytes::Range(range.parse().unwrap()),
            lba_shift: 9,
            blocks: 1 << 23,
            previous_data: PreviousDataPolicy::Refused,
        }
    }

    fn size<'a>(id: &'a str, bytes: &str) -> LeaseRequest<'a> {
        let ByteSize(bytes) = bytes.parse().unwrap();
        LeaseRequest {
            wanted: RequestedBytes::Size {
                bytes,
                unit: 1 << 20,
                whole: false,
            },
            ..range(id, "0+1M")
        }
    }

    fn both() -> (tempfile::TempDir, [Ledger; 2]) {
        let dir = tempfile::tempdir().unwrap();
        let ledger_dir = Ledger::open(&dir.path().join("state"));
        (dir, [ledger_dir, Ledger::in_process()])
    }

    fn reserve(ledger: &Ledger, request: &LeaseRequest<'_>, user: u32) {
        let lease = ledger
            .acquire_with_claim(LeaseClaim::ForUser(user), request)
            .unwrap();
        lease.release().unwrap();
    }

    fn owners(ledger: &Ledger) -> Vec<(String, Option<u32>)> {
        let settings = ledger.settings().unwrap().into_iter();
        settings
            .map(|(id, settings)| (id, settings.owner))
            .collect()
    }

    #[test]
    fn a_lease_belongs_to_its_owner_until_release() {
        let (_dir, ledgers) = both();
        for ledger in ledgers {
            let wanted = range("a", "1M+1M");
            // A user cannot reserve bytes for itself.
            let error = ledger
                .acquire_with_claim(LeaseClaim::OwnLease(ALICE), &wanted)
                .unwrap_err();
            assert!(
                error.to_string().contains("path=…,id=a,owner=1001"),
                "{error}"
            );
            assert_eq!(owners(&ledger), []);
            reserve(&ledger, &wanted, ALICE);
            let error = ledger
                .acquire_with_claim(LeaseClaim::OwnLease(BOB), &wanted)
                .unwrap_err();
            assert_eq!(
                error.to_string(),
                "Lease \"a\" belongs to user 1001, and user 1002 asks for it: run the VMM as user 1001, or give \
                 the lease to user 1002 with `nvme-mpt leases give a 1002`"
            );
            assert_eq!(ledger.list().unwrap(), []);
            let held = ledger
                .acquire_with_claim(LeaseClaim::OwnLease(ALICE), &wanted)
                .unwrap();
            assert_eq!(ledger.list().unwrap()[0].owner, Some(ALICE));
            held.release().unwrap();
            // The operator may use the lease, and Alice stays its owner.
            for claim in [LeaseClaim::Operator, LeaseClaim::AnyLease(OPERATOR)] {
                let held = ledger.acquire_with_claim(claim, &wanted).unwrap();
                assert_eq!(ledger.list().unwrap()[0].owner, Some(ALICE));
                drop(held);
            }
            ledger.decide_data("a", PreviousDataPolicy::Wiped).unwrap();
            assert_eq!(owners(&ledger), []);
            ledger
                .acquire_with_claim(LeaseClaim::OwnLease(ALICE), &wanted)
                .unwrap_err();
        }
    }

    #[test]
    fn the_first_that_takes_a_lease_owns_it() {
        let (_dir, ledgers) = both();
        for ledger in ledgers {
            let wanted = range("a", "0+1M");
            drop(ledger.acquire(&wanted).unwrap());
            assert_eq!(owners(&ledger), [], "no process asked as a user");
            drop(
                ledger
                    .acquire_with_claim(LeaseClaim::AnyLease(OPERATOR), &wanted)
                    .unwrap(),
            );
            assert_eq!(owners(&ledger), [("a".to_owned(), Some(OPERATOR))]);
            ledger
                .acquire_with_claim(LeaseClaim::OwnLease(BOB), &wanted)
                .unwrap_err();
            drop(
                ledger
                    .acquire_with_claim(LeaseClaim::ForUser(BOB), &wanted)
                    .unwrap(),
            );
            drop(
                ledger
                    .acquire_with_claim(LeaseClaim::OwnLease(BOB), &wanted)
                    .unwrap(),
            );
        }
    }

    #[test]
    fn the_owner_gets_exactly_the_reserved_bytes() {
        let (_dir, ledgers) = both();
        for ledger in ledgers {
            reserve(&ledger, &range("a", "1M+1M"), ALICE);
            drop(ledger.acquire(&range("b", "3M+1M")).unwrap());
            for (request, data) in [
                ("0+1M", PreviousDataPolicy::Refused),
                ("1M+2M", PreviousDataPolicy::Refused),
                ("0+2M", PreviousDataPolicy::Wiped),
                ("3M+1M", PreviousDataPolicy::Kept),
                ("3M+1M", PreviousDataPolicy::Wiped),
            ] {
                let request = LeaseRequest {
                    previous_data: data,
                    ..range("a", request)
                };
                let error = ledger
                    .acquire_with_claim(LeaseClaim::OwnLease(ALICE), &request)
                    .unwrap_err();
                assert!(matches!(error, LeaseError::NotReserved { .. }), "{error}");
            }
            // A user may also lease only a part of the reserved range.
            drop(
                ledger
                    .acquire_with_claim(LeaseClaim::OwnLease(ALICE), &range("a", "1M+512K"))
                    .unwrap(),
            );
            reserve(&ledger, &size("c", "4M"), BOB);
            let held = ledger
                .acquire_with_claim(LeaseClaim::OwnLease(BOB), &size("c", "2M"))
                .unwrap();
            assert_eq!(held.extents().length(), 4 << 20);
            drop(held);
            let more = ledger.acquire_with_claim(LeaseClaim::OwnLease(BOB), &size("c", "5M"));
            let error = more.unwrap_err();
            assert!(matches!(error, LeaseError::NotReserved { .. }), "{error}");
            assert_eq!(ledger.list().unwrap(), []);
        }
    }

    #[test]
    fn a_dead_owners_lease_is_taken_over_by_its_owner() {
        let (_dir, [ledger, _]) = both();
        let wanted = range("a", "0+1M");
        reserve(&ledger, &wanted, ALICE);
        ledger
            .acquire_with_claim(LeaseClaim::OwnLease(ALICE), &wanted)
            .unwrap()
            .die();
        let stale = &ledger.list().unwrap()[0];
        assert_eq!(
            (stale.state, stale.owner),
            (LeaseHolderState::Stale, Some(ALICE))
        );
        ledger
            .acquire_with_claim(LeaseClaim::OwnLease(BOB), &wanted)
            .unwrap_err();
        drop(
            ledger
                .acquire_with_claim(LeaseClaim::OwnLease(ALICE), &wanted)
                .unwrap(),
        );
    }

    #[test]
    fn unwiped_reservations_are_refused() {
        let (_dir, [ledger, _]) = both();
        drop(ledger.acquire(&range("b", "0+2M")).unwrap());
        let wiping = LeaseRequest {
            previous_data: PreviousDataPolicy::Wiped,
            ..range("a", "0+2M")
        };
        let lease = ledger
            .acquire_with_claim(LeaseClaim::ForUser(ALICE), &wiping)
            .unwrap();
        assert_eq!(lease.unwiped().len(), 1);
        lease.die();
        for data in [
            PreviousDataPolicy::Refused,
            PreviousDataPolicy::Kept,
            PreviousDataPolicy::Wiped,
        ] {
            let request = LeaseRequest {
                previous_data: data,
                ..range("a", "0+2M")
            };
            ledger
                .acquire_with_claim(LeaseClaim::OwnLease(ALICE), &request)
                .unwrap_err();
        }
        // When reserved again, the range is wiped completely.
        let lease = ledger
            .acquire_with_claim(LeaseClaim::ForUser(ALICE), &wiping)
            .unwrap();
        lease.mark_wiped().unwrap();
        drop(lease);
        let request = range("a", "0+2M");
        drop(
            ledger
                .acquire_with_claim(LeaseClaim::OwnLease(ALICE), &request)
                .unwrap(),
        );
    }

    #[test]
    fn a_lease_is_given_to_another_user() {
        let (_dir, ledgers) = both();
        for ledger in ledgers {
            let error = ledger.set_owner("a", BOB).unwrap_err();
            assert!(matches!(error, LeaseError::NoSuchLease { .. }), "{error}");
            let wanted = range("a", "0+1M");
            reserve(&ledger, &wanted, ALICE);
            let held = ledger
                .acquire_with_claim(LeaseClaim::OwnLease(ALICE), &wanted)
                .unwrap();
            ledger.set_owner("a", BOB).unwrap();
            assert_eq!(ledger.list().unwrap()[0].owner, Some(BOB));
            drop(held);
            ledger
                .acquire_with_claim(LeaseClaim::OwnLease(ALICE), &wanted)
                .unwrap_err();
            drop(
                ledger
                    .acquire_with_claim(LeaseClaim::OwnLease(BOB), &wanted)
                    .unwrap(),
            );
        }
    }

    #[test]
    fn limits_end_with_the_id() {
        let (_dir, ledgers) = both();
        for ledger in ledgers {
            let wanted = range("a", "0+1M");
            let lease = ledger.acquire(&wanted).unwrap();
            assert_eq!(lease.limits().unwrap(), None);
            lease.note_limits(Some("iops=1".to_owned())).unwrap();
            drop(lease);
            let lease = ledger.acquire(&wanted).unwrap();
            assert_eq!(lease.limits().unwrap().as_deref(), Some("iops=1"));
            lease.note_limits(None).unwrap();
            assert!(ledger.settings().unwrap().is_empty());
            lease.note_limits(Some("iops=2".to_owned())).unwrap();
            drop(lease);
            // The records of the id are removed once another id has its bytes.
            let other = LeaseRequest {
                previous_data: PreviousDataPolicy::Kept,
                ..range("b", "0+1M")
            };
            let other = ledger.acquire(&other).unwrap();
            assert!(ledger.settings().unwrap().is_empty());
            other.note_limits(Some("iops=3".to_owned())).unwrap();
            ledger.release("b", true).unwrap();
            assert!(ledger.settings().unwrap().is_empty());
            let error = other.note_limits(Some("iops=4".to_owned())).unwrap_err();
            assert!(matches!(error, LeaseError::Gone { .. }), "{error}");
        }
    }
}
