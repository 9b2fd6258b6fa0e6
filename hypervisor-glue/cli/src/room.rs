//! Report of `nvme-mpt room`: the capacity of each drive, and the ids that use it.

use std::fmt;
use std::num::NonZeroU64;

use nvme_mpt::Drive;
use nvme_mpt::lease::{CapacityUse, LeaseError, NamespaceCapacity};
use nvme_mpt::range::Bytes;
use nvme_mpt_vmm::open::LeaseLedgers;
use serde::{Deserialize, Serialize};

use crate::table::TextTable;

/// Capacity of a drive's namespace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DriveCapacity {
    /// The drive, as in `path=`.
    pub drive: String,
    /// Id of the namespace.
    pub nsid: u32,
    /// Size of the namespace in bytes.
    pub bytes: u64,
    /// Size of a logical block in bytes.
    pub lba_bytes: u32,
    /// Unit of leases by size, in bytes.
    pub unit: u64,
    /// Used and free capacity.
    #[serde(flatten)]
    pub room: NamespaceCapacity,
}

impl DriveCapacity {
    /// Returns the capacity of a drive, for leases in units of `unit`, or in the drive's own unit.
    ///
    /// # Errors
    /// The ledger cannot be used.
    pub fn of(
        drive: &Drive,
        ledgers: &LeaseLedgers,
        unit: Option<NonZeroU64>,
    ) -> Result<Self, LeaseError> {
        let (unit, room) = ledgers.room(drive, unit)?;
        let namespace = drive.namespace();
        Ok(Self {
            drive: drive.path().to_string(),
            nsid: namespace.nsid.0,
            bytes: namespace.blocks << namespace.lba_shift,
            lba_bytes: 1 << namespace.lba_shift,
            unit,
            room,
        })
    }
}

/// Formats the capacity as a table with a row per id.
pub(crate) fn table(rooms: &[DriveCapacity]) -> impl fmt::Display {
    let mut table = TextTable::of_text();
    table.row(
        ["DRIVE", "NAMESPACE", "ID", "SIZE", "USE"]
            .map(str::to_owned)
            .into(),
    );
    for room in rooms {
        let mut row = |id: &str, bytes, used: &str| {
            let cells = [
                &*room.drive,
                &room.nsid.to_string(),
                id,
                &Bytes(bytes).to_string(),
                used,
            ];
            table.row(cells.map(str::to_owned).into());
        };
        for CapacityUse { id, bytes, leased } in &room.room.uses {
            row(id, *bytes, if *leased { "leased" } else { "data" });
        }
        row("-", room.room.free, "free");
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_json_has_the_names_that_programs_read_and_the_table_one_row_per_id() {
        let used = |id: &str, leased| CapacityUse {
            id: id.to_owned(),
            bytes: 2 << 30,
            leased,
        };
        let room = DriveCapacity {
            drive: "0000:01:00.0".to_owned(),
            nsid: 1,
            bytes: (8 << 30) + 512,
            lba_bytes: 512,
            unit: 1 << 30,
            room: NamespaceCapacity {
                free: 4 << 30,
                uses: vec![used("a", true), used("b", false)],
            },
        };
        let json = serde_json::to_value(&room).unwrap();
        for key in ["nsid", "bytes", "lba_bytes", "unit", "free"] {
            assert!(json[key].is_u64(), "{key}");
        }
        assert_eq!(json["uses"][0]["id"], "a");
        assert_eq!(json["uses"][1]["leased"], false);
        assert_eq!(serde_json::from_value::<DriveCapacity>(json).unwrap(), room);

        let table = table(&[room]).to_string();
        let rows: Vec<Vec<&str>> = table
            .lines()
            .map(|line| line.split_whitespace().collect())
            .collect();
        let drive = "0000:01:00.0";
        let expected = [
            vec!["DRIVE", "NAMESPACE", "ID", "SIZE", "USE"],
            vec![drive, "1", "a", "2G", "leased"],
            vec![drive, "1", "b", "2G", "data"],
            vec![drive, "1", "-", "4G", "free"],
        ];
        assert_eq!(rows, expected);
    }
}
