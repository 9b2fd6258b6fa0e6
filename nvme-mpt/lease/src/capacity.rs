//! Capacity of a drive: its use by ids, and the free capacity for leases by size.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::by_size;
use super::lease_target::LeaseTarget;
use super::ledger_store::LedgerRecords;

/// Capacity of a namespace of a drive.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamespaceCapacity {
    /// Free bytes for leases by size, in whole units.
    pub free: u64,
    /// Ids with parts of the namespace, sorted by id.
    pub uses: Vec<CapacityUse>,
}

/// Part of a namespace that belongs to an id.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CapacityUse {
    /// Id that has the part.
    pub id: String,
    /// Number of bytes that are leased to the id, or that have data of the id which was not released.
    pub bytes: u64,
    /// True if the ledger has a lease of the id, held or stale.
    pub leased: bool,
}

/// Returns the free bytes of the namespace `area` for leases in units of `unit` bytes, and the parts of it that belong to ids.
pub(super) fn namespace_capacity(
    records: &LedgerRecords,
    area: &LeaseTarget<'_>,
    unit: u64,
) -> NamespaceCapacity {
    let (free, used) = by_size::namespace_uses(records, area, unit);
    let mut uses = BTreeMap::<String, CapacityUse>::new();
    for (id, range, leased) in used {
        let entry = uses.entry(id.to_owned()).or_insert_with(|| CapacityUse {
            id: id.to_owned(),
            bytes: 0,
            leased: false,
        });
        // Leased parts come first. The data of a lease is listed as another part, which must not count twice.
        if leased || !entry.leased {
            entry.bytes += range.length();
        }
        entry.leased |= leased;
    }
    NamespaceCapacity {
        free,
        uses: uses.into_values().collect(),
    }
}

#[cfg(test)]
mod tests {
    use nvme_spec::ids::Nsid;

    use super::super::{LeaseError, LeaseRequest, Ledger, PreviousDataPolicy, RequestedBytes};
    use crate::range::ByteRange;

    const GIB: u64 = 1 << 30;

    fn request(id: &str, wanted: RequestedBytes) -> LeaseRequest<'_> {
        LeaseRequest {
            id,
            drive: "file:/drive".into(),
            nsid: Nsid(1),
            wanted,
            lba_shift: 9,
            blocks: (10 * GIB + 4096) >> 9,
            previous_data: PreviousDataPolicy::Refused,
        }
    }

    fn by_size(id: &str, gib: u64) -> LeaseRequest<'_> {
        request(
            id,
            RequestedBytes::Size {
                bytes: gib * GIB,
                unit: GIB,
                whole: false,
            },
        )
    }

    /// Free GiB; and for each id its GiB, and true if it has a lease.
    type CapacityInGib = (u64, Vec<(String, u64, bool)>);

    fn shown(ledger: &Ledger) -> Result<CapacityInGib, LeaseError> {
        let capacity = ledger.capacity("file:/drive", Nsid(1), 10 * GIB + 4096, GIB)?;
        let uses = capacity.uses.into_iter();
        let uses = uses.map(|entry| (entry.id, entry.bytes / GIB, entry.leased));
        Ok((capacity.free / GIB, uses.collect()))
    }

    #[test]
    fn leases_and_data_take_room_until_the_data_is_released() {
        let dir = tempfile::tempdir().unwrap();
        let ledger_dir = Ledger::open(&dir.path().join("state"));
        for ledger in [ledger_dir, Ledger::in_process()] {
            assert_eq!(shown(&ledger).unwrap(), (10, vec![]));
            let a = ledger.acquire(&by_size("a", 3)).unwrap();
            let b = ledger.acquire(&by_size("b", 2)).unwrap();
            let use_of = |id: &str, gib, leased| (id.to_owned(), gib, leased);
            let (of_a, of_b) = (use_of("a", 3, true), use_of("b", 2, true));
            assert_eq!(shown(&ledger).unwrap(), (5, vec![of_a.clone(), of_b]));
            b.release().unwrap();
            let of_b = use_of("b", 2, false);
            assert_eq!(shown(&ledger).unwrap(), (5, vec![of_a.clone(), of_b]));
            ledger.decide_data("b", PreviousDataPolicy::Wiped).unwrap();
            assert_eq!(shown(&ledger).unwrap(), (7, vec![of_a]));
            drop(a);
        }
    }

    #[test]
    fn a_part_of_a_unit_takes_the_unit() {
        let ledger = Ledger::in_process();
        let half: ByteRange = "512M+1M".parse().unwrap();
        let _half = ledger
            .acquire(&request("half", RequestedBytes::Range(half)))
            .unwrap();
        assert_eq!(shown(&ledger).unwrap().0, 9);
        let capacity = ledger
            .capacity("file:/other", Nsid(1), 10 * GIB, GIB)
            .unwrap();
        assert_eq!((capacity.free, capacity.uses), (10 * GIB, vec![]));
    }
}
