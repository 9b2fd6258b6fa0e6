//! The table of `nvme-mpt capacity`.

use std::fmt;

use nvme_lease::CapacityUse;
use nvme_lease::range::ByteSize;
use nvme_mpt_server::capacity::DriveCapacity;

use super::TextTable;

/// Formats the capacity as a table with a row per id.
pub(crate) fn table(capacities: &[DriveCapacity]) -> impl fmt::Display {
    let mut table = TextTable::left_aligned();
    table.add_row(
        ["DRIVE", "NAMESPACE", "ID", "SIZE", "USE"]
            .map(str::to_owned)
            .into(),
    );
    for capacity in capacities {
        let mut row = |id: &str, bytes, used: &str| {
            let cells = [
                &*capacity.drive,
                &capacity.nsid.to_string(),
                id,
                &ByteSize(bytes).to_string(),
                used,
            ];
            table.add_row(cells.map(str::to_owned).into());
        };
        for CapacityUse { id, bytes, leased } in &capacity.capacity.uses {
            row(id, *bytes, if *leased { "leased" } else { "data" });
        }
        row("-", capacity.capacity.free, "free");
    }
    table
}

#[cfg(test)]
mod tests {
    use nvme_lease::NamespaceCapacity;

    use super::*;

    #[test]
    fn the_table_has_one_row_per_id() {
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

        let table = table(&[capacity]).to_string();
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
