//! The tables of `nvme-mpt fault`.

use std::fmt;

use nvme_mpt_server::faults::DriveFaults;

/// Formats the faults of a drive as a table, or as one line if there are none.
pub(crate) fn table(faults: &DriveFaults) -> impl fmt::Display {
    fmt::from_fn(move |f| {
        if faults.faults.is_empty() {
            return writeln!(f, "Drive {}: no faults", faults.drive);
        }
        writeln!(f, "Drive {}", faults.drive)?;
        writeln!(
            f,
            "  {:11}  {:>12}  {:>12}  {:>12}  RANGE",
            "FAULT", "COMMANDS", "STRUCK", "AT MOST"
        )?;
        for fault in &faults.faults {
            let most = fault
                .count
                .map_or("-".to_owned(), |count| count.to_string());
            let range = fault.range.as_deref().unwrap_or("all");
            writeln!(
                f,
                "  {:11}  {:>12}  {:>12}  {most:>12}  {range}",
                fault.kind, fault.seen, fault.struck
            )?;
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use nvme_layers::faults::{FaultKind, FaultStats};

    use super::*;

    #[test]
    fn each_fault_has_a_row_and_a_drive_without_faults_one_line() {
        let mut faults = DriveFaults {
            drive: "memory:1M".to_owned(),
            faults: Vec::new(),
        };
        assert_eq!(table(&faults).to_string(), "Drive memory:1M: no faults\n");
        let lost = |range: Option<&str>| FaultStats {
            kind: FaultKind::Lost,
            range: range.map(str::to_owned),
            seen: 2,
            struck: 1,
            count: None,
        };
        faults.faults = vec![lost(None), lost(Some("0+4K"))];
        let table = table(&faults).to_string();
        let rows: Vec<Vec<&str>> = table
            .lines()
            .map(|line| line.split_whitespace().collect())
            .collect();
        let expected = [
            vec!["Drive", "memory:1M"],
            vec!["FAULT", "COMMANDS", "STRUCK", "AT", "MOST", "RANGE"],
            vec!["lost", "2", "1", "-", "all"],
            vec!["lost", "2", "1", "-", "0+4K"],
        ];
        assert_eq!(rows, expected);
    }
}
