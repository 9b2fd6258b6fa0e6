//! Report of `nvme-mpt capacity`: the capacity of each drive, and the lease ids that use part of the capacity.

use std::num::NonZeroU64;

use nvme_lease::{LeaseError, NamespaceCapacity};
use nvme_mpt::Drive;
use nvme_mpt_vmm::open::LeaseLedgers;
use serde::{Deserialize, Serialize};

/// Capacity of one namespace of a drive.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DriveCapacity {
    /// The drive, as in `path=`.
    pub drive: String,
    /// Namespace identifier.
    pub nsid: u32,
    /// Size of the namespace in bytes.
    pub bytes: u64,
    /// Size of a logical block in bytes.
    pub lba_bytes: u32,
    /// Allocation unit in bytes of leases that name only a size.
    pub unit: u64,
    /// Used and free capacity.
    #[serde(flatten)]
    pub capacity: NamespaceCapacity,
}

impl DriveCapacity {
    /// Returns the capacity of a drive for leases in allocation units of `unit` bytes; `None` selects the drive's own unit.
    ///
    /// # Errors
    /// The ledger cannot be used.
    pub fn query(
        drive: &Drive,
        ledgers: &LeaseLedgers,
        unit: Option<NonZeroU64>,
    ) -> Result<Self, LeaseError> {
        let (unit, free) = ledgers.capacity(drive, unit)?;
        let namespace = drive.namespace();
        Ok(Self {
            drive: drive.path().to_string(),
            nsid: namespace.nsid.0,
            bytes: namespace.blocks << namespace.lba_shift,
            lba_bytes: 1 << namespace.lba_shift,
            unit,
            capacity: free,
        })
    }
}

#[cfg(test)]
mod tests {
    use nvme_lease::CapacityUse;

    use super::*;

    #[test]
    fn the_json_has_the_names_that_programs_read() {
        let used = |id: &str, leased| CapacityUse {
            id: id.to_owned(),
            bytes: 2 << 30,
            leased,
        };
        let capacity = DriveCapacity {
            drive: "0000:01:00.0".to_owned(),
            nsid: 1,
            bytes: (8 << 30) + 512,
            lba_bytes: 512,
            unit: 1 << 30,
            capacity: NamespaceCapacity {
                free: 4 << 30,
                uses: vec![used("a", true), used("b", false)],
            },
        };
        let json = serde_json::to_value(&capacity).unwrap();
        for key in ["nsid", "bytes", "lba_bytes", "unit", "free"] {
            assert!(json[key].is_u64(), "{key}");
        }
        assert_eq!(json["uses"][0]["id"], "a");
        assert_eq!(json["uses"][1]["leased"], false);
        assert_eq!(
            serde_json::from_value::<DriveCapacity>(json).unwrap(),
            capacity
        );
    }
}
