//! The table of `nvme-mpt list`.
//!
//! Reasons of failures are printed below the table: inside the table, a long reason would widen every row.

use std::fmt;

use nvme_mpt_server::change::{DeclarationSource, FunctionEntry, FunctionStatus};

use super::TextTable;

/// Formats a server's functions as a table.
pub(crate) fn table(functions: &[FunctionEntry]) -> impl fmt::Display {
    let mut reasons = Vec::new();
    let mut table = TextTable::new(&[
        "ID", "STATE", "ORIGIN", "RANGE", "LIMITS", "DRIVE", "SOCKET",
    ]);
    for entry in functions {
        let FunctionEntry {
            id,
            socket,
            drive,
            range: _,
            extents,
            origin,
            limits,
            state,
            summary: _,
            pending,
        } = entry;
        let state = match state {
            FunctionStatus::Waiting => "waiting".to_owned(),
            FunctionStatus::Connected => "connected".to_owned(),
            FunctionStatus::Busy => "busy".to_owned(),
            FunctionStatus::Failed { reason } => {
                reasons.push(format!("{id}: failed: {}", one_line(reason)));
                "failed".to_owned()
            }
        };
        let state = match pending {
            Some(pending) => format!("{state} ({pending})"),
            None => state,
        };
        let origin = match origin {
            DeclarationSource::CommandLine => "command line",
            DeclarationSource::File => "file",
            DeclarationSource::Added => "added",
            DeclarationSource::Vmm => "VMM",
        };
        table.add_row(vec![
            id.clone(),
            state,
            origin.to_owned(),
            extents.as_ref().map_or("-".to_owned(), ToString::to_string),
            match limits.as_str() {
                "" => "-".to_owned(),
                limits => limits.to_owned(),
            },
            drive.clone(),
            socket.display().to_string(),
        ]);
    }
    fmt::from_fn(move |f| {
        write!(f, "{table}")?;
        reasons
            .iter()
            .try_for_each(|reason| writeln!(f, "{reason}"))
    })
}

/// Joins a reason and its causes, one per line, into a single line.
pub(super) fn one_line(reason: &str) -> String {
    reason.replace("\n  ", "; ").replace(char::is_control, " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_reasons_do_not_widen_the_table() {
        let entry = |id: &str, state| FunctionEntry {
            pending: None,
            id: id.to_owned(),
            socket: format!("/run/{id}.sock").into(),
            drive: "memory:1G".to_owned(),
            range: None,
            extents: None,
            origin: DeclarationSource::Added,
            limits: String::new(),
            state,
            summary: String::new(),
        };
        let reason = format!("Cannot do it\n  {}", "because ".repeat(40));
        let failed = FunctionStatus::Failed { reason };
        let told = table(&[entry("a", FunctionStatus::Waiting), entry("b", failed)]).to_string();
        let lines: Vec<&str> = told.lines().collect();
        assert_eq!(lines.len(), 4, "{told}");
        assert!(lines[..3].iter().all(|line| line.len() < 80), "{told}");
        assert!(lines[2].contains("failed"), "{told}");
        assert!(
            lines[3].starts_with("b: failed: Cannot do it; because because"),
            "{told}"
        );
    }
}
