//! Tables that a person reads, and that of `nvme-mpt list`.

use std::fmt;

use crate::serve::{FunctionEntry, FunctionState, Origin};

/// Rows of cells, printed in columns that are as wide as they need be.
pub(crate) struct Table(Vec<Vec<String>>);

impl Table {
    pub(crate) fn new(head: &[&str]) -> Self {
        Self(vec![head.iter().map(|&cell| cell.to_owned()).collect()])
    }

    /// Returns whether it has no row below its head.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.len() < 2
    }

    pub(crate) fn row(&mut self, cells: Vec<String>) {
        self.0.push(cells);
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns = self.0.iter().map(Vec::len).max().unwrap_or(0);
        let cell_width = |row: &Vec<String>, column: usize| {
            row.get(column).map_or(0, |cell| cell.chars().count())
        };
        let widths: Vec<usize> = (0..columns)
            .map(|column| {
                let widths = self.0.iter().map(|row| cell_width(row, column));
                widths.max().unwrap_or(0)
            })
            .collect();
        for row in &self.0 {
            for (cell, width) in row.iter().zip(&widths) {
                write!(f, "  {cell:>width$}")?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

/// Returns the table of a server's functions.
pub(crate) fn table(functions: &[FunctionEntry]) -> impl fmt::Display {
    let mut table = Table::new(&[
        "ID", "STATE", "ORIGIN", "RANGE", "LIMITS", "DRIVE", "SOCKET",
    ]);
    for entry in functions {
        let FunctionEntry {
            id,
            socket,
            drive,
            range,
            origin,
            limits,
            state,
            summary: _,
        } = entry;
        let state = match state {
            FunctionState::Waiting => "waiting".to_owned(),
            FunctionState::Connected => "connected".to_owned(),
            FunctionState::Busy => "busy".to_owned(),
            FunctionState::Failed { reason } => {
                format!("failed: {}", reason.replace("\n  ", "; "))
            }
        };
        let origin = match origin {
            Origin::CommandLine => "command line",
            Origin::File => "file",
            Origin::Added => "added",
        };
        table.row(vec![
            id.clone(),
            state,
            origin.to_owned(),
            range.map_or("-".to_owned(), |range| range.to_string()),
            match limits.as_str() {
                "" => "-".to_owned(),
                limits => limits.to_owned(),
            },
            drive.clone(),
            socket.display().to_string(),
        ]);
    }
    table
}
