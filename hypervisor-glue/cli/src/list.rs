//! Table of `nvme-mpt list`.

use std::fmt;

use crate::change::{FunctionEntry, FunctionState, Origin};
use crate::table::Table;

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
            range: _,
            extents,
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
            Origin::Vmm => "VMM",
        };
        table.row(vec![
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
    table
}
