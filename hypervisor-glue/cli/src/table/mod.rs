//! Text tables for the terminal.

pub(crate) mod capacity;
pub(crate) mod doctor;
pub(crate) mod faults;
pub(crate) mod list;
pub(crate) mod stats;

use std::fmt;

/// Columns of a terminal for which tables are made.
pub(crate) const WIDTH: usize = 80;

/// A table with columns as wide as their widest cell.
pub(crate) struct TextTable {
    rows: Vec<Vec<String>>,
    /// True to align cells to the left.
    is_left_aligned: bool,
}

impl TextTable {
    /// Creates a right-aligned table with a header row.
    pub(crate) fn new(head: &[&str]) -> Self {
        Self {
            rows: vec![head.iter().map(|&cell| cell.to_owned()).collect()],
            is_left_aligned: false,
        }
    }

    /// Creates a left-aligned table without a header row.
    pub(crate) fn left_aligned() -> Self {
        Self {
            rows: Vec::new(),
            is_left_aligned: true,
        }
    }

    /// Returns whether there is no row below the header.
    pub(crate) fn is_empty(&self) -> bool {
        self.rows.len() < 2
    }

    pub(crate) fn add_row(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }
}

impl fmt::Display for TextTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let cell_width = |row: &Vec<String>, column: usize| {
            row.get(column).map_or(0, |cell| cell.chars().count())
        };
        let widths: Vec<usize> = (0..columns)
            .map(|column| {
                let widths = self.rows.iter().map(|row| cell_width(row, column));
                widths.max().unwrap_or(0)
            })
            .collect();
        for row in &self.rows {
            let mut line = String::new();
            for (cell, width) in row.iter().zip(&widths) {
                line += &match self.is_left_aligned {
                    true => format!("  {cell:<width$}"),
                    false => format!("  {cell:>width$}"),
                };
            }
            let line = if self.is_left_aligned {
                line.trim_end()
            } else {
                &line
            };
            writeln!(f, "{line}")?;
        }
        Ok(())
    }
}
