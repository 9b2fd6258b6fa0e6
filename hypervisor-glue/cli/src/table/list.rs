//! The table of `nvme-mpt list`.
//!
//! Reasons of failures are printed below the table: inside the table, a long reason would widen every row.

use std::fmt;

use nvme_mpt_server::change::{DeclarationSource, FunctionEntry, FunctionStatus};

use super::{TextTable, WIDTH};

/// Formats a server's functions as a table. Below the row of each function stand its socket, its limits and its difference from
/// the file.
pub(crate) fn table(functions: &[FunctionEntry]) -> impl fmt::Display {
    let mut reasons = Vec::new();
    let mut notes = vec![Vec::new()];
    let mut table = TextTable::left_aligned();
    let head = ["ID", "STATE", "ORIGIN", "RANGE", "DRIVE"];
    table.add_row(head.map(str::to_owned).into());
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
            FunctionStatus::Waiting => "waiting",
            FunctionStatus::Connected => "connected",
            FunctionStatus::Busy => "busy",
            FunctionStatus::Failed { reason } => {
                reasons.push(format!("{id}: failed: {}", one_line(reason)));
                "failed"
            }
        };
        let source = match origin {
            DeclarationSource::CommandLine => "command line",
            DeclarationSource::File => "file",
            DeclarationSource::Added => "added",
            DeclarationSource::Vmm => "VMM",
        };
        let range = extents.as_ref().map_or("-".to_owned(), ToString::to_string);
        table.add_row(vec![
            id.clone(),
            state.to_owned(),
            source.to_owned(),
            range,
            drive.clone(),
        ]);
        let socket = socket.display().to_string();
        let socket = (!socket.is_empty()).then(|| format!("socket {socket}"));
        let limits = (!limits.is_empty()).then(|| format!("limits {limits}"));
        let pending = pending
            .as_ref()
            .map(|pending| format!("pending: {pending}"));
        notes.push(fill_lines([socket, limits, pending].into_iter().flatten()));
    }
    fmt::from_fn(move |f| {
        let table = table.to_string();
        for (line, notes) in table.lines().zip(&notes) {
            writeln!(f, "{line}")?;
            notes.iter().try_for_each(|note| writeln!(f, "{note}"))?;
        }
        reasons
            .iter()
            .try_for_each(|reason| writeln!(f, "{reason}"))
    })
}

/// Joins texts into indented lines of at most [`WIDTH`] columns. A text of more columns gets a line for itself.
fn fill_lines(parts: impl Iterator<Item = String>) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for part in parts {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 2 + part.chars().count() <= WIDTH => {
                line.push_str(", ");
                line.push_str(&part);
            }
            _ => lines.push(format!("      {part}")),
        }
    }
    lines
}

/// Joins a reason and its causes, one per line, into a single line.
pub(super) fn one_line(reason: &str) -> String {
    reason.replace("\n  ", "; ").replace(char::is_control, " ")
}

#[cfg(test)]
mod tests {
    use nvme_lease::LeaseExtents;
    use nvme_lease::range::ByteRange;

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
        let text = table(&[entry("a", FunctionStatus::Waiting), entry("b", failed)]).to_string();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 6, "{text}");
        assert!(lines[..5].iter().all(|line| line.len() < 80), "{text}");
        assert!(lines[3].contains("failed"), "{text}");
        assert!(
            lines[5].starts_with("b: failed: Cannot do it; because because"),
            "{text}"
        );
    }

    #[test]
    fn usual_functions_fit_a_terminal_of_80_columns() {
        let part = ByteRange::new(64 << 30, 64 << 30).unwrap();
        let mut entry = FunctionEntry {
            id: "database-1".to_owned(),
            socket: "/run/nvme-mpt/database-1.sock".into(),
            drive: "0000:01:00.0".to_owned(),
            range: Some(part),
            extents: LeaseExtents::new(vec![part]).ok(),
            origin: DeclarationSource::CommandLine,
            limits: "iops=20000,weight=300".to_owned(),
            state: FunctionStatus::Connected,
            summary: String::new(),
            pending: Some("the file has another range and iops".to_owned()),
        };
        let lines = [
            "  ID          STATE      ORIGIN        RANGE    DRIVE",
            "  database-1  connected  command line  64G+64G  0000:01:00.0",
            "      socket /run/nvme-mpt/database-1.sock, limits iops=20000,weight=300",
            "      pending: the file has another range and iops",
        ];
        let text = table(&[entry.clone()]).to_string();
        assert_eq!(text.lines().collect::<Vec<_>>(), lines);
        entry.limits = "iops=20000+500,bandwidth=100M+1G,weight=300".to_owned();
        entry.drive = "/var/lib/nvme-mpt/drive.img".to_owned();
        let text = table(&[entry]).to_string();
        assert!(text.lines().all(|line| line.len() <= WIDTH), "{text}");
    }
}
