//! Tables that a person reads.

use std::fmt;

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
