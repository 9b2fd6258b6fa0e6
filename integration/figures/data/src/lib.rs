//! Figures as data: the schema of `docs/figures/*.json`, which benchmarks write and `cargo figures` draws.
//!
//! A figure is one measurement on one machine. It has a panel for each quantity, so that each axis has only one unit:
//!
//! ```json
//! {
//!   "title": "Reads of one function",
//!   "date": "2026-11-27",
//!   "machine": "A: two virtual cores of an AMD EPYC (Zen 5)",
//!   "commit": "601349c9",
//!   "command": "cargo bench -p nvme-mpt-tests --bench crowd",
//!   "panels": [
//!     {
//!       "measured": "4 KiB reads, null:",
//!       "unit": "I/Os per second",
//!       "plot": "bars",
//!       "log": true,
//!       "series": [
//!         {
//!           "label": "adaptive",
//!           "points": [{ "label": "depth 1", "value": 1180000, "min": 1100000, "max": 1210000, "n": 5 }]
//!         }
//!       ]
//!     }
//!   ]
//! }
//! ```
//!
//! - [`FigureData`] and its parts: the schema, reading, validation and writing;
//! - [`origin`]: date, machine and commit of a measurement that this program makes.

pub mod origin;
mod rules;
#[cfg(test)]
mod tests;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Date and commit of figures that are older than version 0.1.0, whose exact origin is unknown.
pub const BEFORE_VERSIONS: &str = "before 0.1.0";

/// A figure: one measurement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FigureData {
    /// Heading of the figure.
    pub title: String,
    /// Day of the measurement, such as `2026-11-27`, or [`BEFORE_VERSIONS`].
    pub date: String,
    /// Processor and number of processors, as text.
    pub machine: String,
    /// Commit that was measured, or the first commit that contains the figures: at least seven hexadecimal digits, followed
    /// by `-dirty` if the sources had changes. It may also be [`origin::UNKNOWN`] or [`BEFORE_VERSIONS`].
    pub commit: String,
    /// Command that makes the measurement.
    pub command: String,
    /// Quantities that were measured, at least one.
    pub panels: Vec<FigurePanel>,
}

/// A quantity that was measured, with its values.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FigurePanel {
    /// Name of the quantity, such as `p99 of 4 KiB reads`.
    pub measured: String,
    /// Unit of all values of the panel.
    pub unit: String,
    /// Kind of plot.
    pub plot: PlotKind,
    /// True if the axis of values is logarithmic. All values must then be positive.
    #[serde(default, skip_serializing_if = "is_false")]
    pub log: bool,
    /// Series of points, at least one.
    pub series: Vec<FigureSeries>,
}

/// Kinds of plots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PlotKind {
    /// A bar for each point. Bars of points with the same label stand together.
    Bars,
    /// A line for each series. The labels of the points are on the other axis, in their order.
    Lines,
    /// No picture is drawn of the data.
    None,
}

/// Points that belong together, such as those of one configuration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FigureSeries {
    /// Name in the legend. It may be empty if the panel has only one series.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub label: String,
    /// Points with different labels, at least one.
    pub points: Vec<FigurePoint>,
}

/// A point: one value, a range, or both.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FigurePoint {
    /// Case that was measured.
    pub label: String,
    /// Median, or the only value; `None` if only the range is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<f64>,
    /// Lowest value. It is present if `max` is present.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min: Option<f64>,
    /// Highest value. It is present if `min` is present.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max: Option<f64>,
    /// Number of measurements from which the value was calculated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub n: Option<u32>,
}

/// Errors of reading and writing figures. Each names the file.
#[derive(Debug, Error)]
pub enum FigureError {
    /// The file cannot be read.
    #[error("Cannot read {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// The file cannot be written.
    #[error("Cannot write {path}")]
    Write {
        /// The file.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// The text is not JSON of this schema.
    #[error("{path}: {source}")]
    Schema {
        /// The file.
        path: PathBuf,
        /// The field, and the cause.
        source: serde_path_to_error::Error<serde_json::Error>,
    },
    /// A field has a value that is not allowed.
    #[error("{path}: {field}: {problem}")]
    Field {
        /// The file.
        path: PathBuf,
        /// The field's path, such as `panels[0].series[1].label`.
        field: String,
        /// Reason why the value is not allowed.
        problem: &'static str,
    },
}

impl FigureData {
    /// Returns a figure without panels, for a measurement on this machine, on this day, with this commit.
    #[must_use]
    pub fn on_this_machine(title: &str, command: &str) -> Self {
        Self {
            title: title.to_owned(),
            date: origin::today(),
            machine: origin::machine(),
            commit: origin::commit(),
            command: command.to_owned(),
            panels: Vec::new(),
        }
    }

    /// Reads a file and validates the figure.
    ///
    /// # Errors
    /// [`FigureError::Read`], [`FigureError::Schema`] or [`FigureError::Field`].
    pub fn read(path: &Path) -> Result<Self, FigureError> {
        let text = fs::read_to_string(path).map_err(|source| FigureError::Read {
            path: path.to_owned(),
            source,
        })?;
        Self::parse(&text, path)
    }

    /// Parses the text of a file and validates the figure. The path is used in errors.
    ///
    /// # Errors
    /// [`FigureError::Schema`] or [`FigureError::Field`].
    pub fn parse(text: &str, path: &Path) -> Result<Self, FigureError> {
        let mut json = serde_json::Deserializer::from_str(text);
        let figure: Self =
            serde_path_to_error::deserialize(&mut json).map_err(|source| FigureError::Schema {
                path: path.to_owned(),
                source,
            })?;
        json.end().map_err(|_| FigureError::Field {
            path: path.to_owned(),
            field: "end".to_owned(),
            problem: "must not have text behind the figure",
        })?;
        figure.validate(path)?;
        Ok(figure)
    }

    /// Validates the figure and writes it.
    ///
    /// # Errors
    /// [`FigureError::Field`] or [`FigureError::Write`].
    pub fn write(&self, path: &Path) -> Result<(), FigureError> {
        self.validate(path)?;
        let write = |source| FigureError::Write {
            path: path.to_owned(),
            source,
        };
        let text = serde_json::to_string_pretty(self).map_err(|error| write(error.into()))?;
        fs::write(path, text + "\n").map_err(write)
    }

    fn validate(&self, path: &Path) -> Result<(), FigureError> {
        rules::check(self).map_err(|(field, problem)| FigureError::Field {
            path: path.to_owned(),
            field,
            problem,
        })
    }

    /// Returns whether the figure has a panel that is drawn.
    #[must_use]
    pub fn has_picture(&self) -> bool {
        self.panels.iter().any(|panel| panel.plot != PlotKind::None)
    }
}

impl FigurePoint {
    /// Returns a point with one value.
    #[must_use]
    pub fn new(label: &str, value: f64) -> Self {
        Self {
            label: label.to_owned(),
            value: Some(value),
            ..Self::default()
        }
    }

    /// Returns a point with the median, the lowest and the highest of some measurements; `None` without measurements.
    #[must_use]
    pub fn from_rounds(label: &str, rounds: &[f64]) -> Option<Self> {
        let mut sorted = rounds.to_vec();
        sorted.sort_by(f64::total_cmp);
        let middle = sorted.len() / 2;
        let value = match sorted.len() {
            0 => return None,
            odd if odd % 2 == 1 => sorted[middle],
            _ => f64::midpoint(sorted[middle - 1], sorted[middle]),
        };
        Some(Self {
            label: label.to_owned(),
            value: Some(value),
            min: sorted.first().copied(),
            max: sorted.last().copied(),
            n: u32::try_from(sorted.len()).ok(),
        })
    }

    /// Returns the lowest and the highest value of the point.
    #[must_use]
    pub fn range(&self) -> Option<(f64, f64)> {
        Some((self.min.or(self.value)?, self.max.or(self.value)?))
    }
}

/// Returns the path after `--json` in the arguments of a benchmark.
#[must_use]
pub fn json_argument(arguments: &[String]) -> Option<PathBuf> {
    let at = arguments.iter().position(|argument| argument == "--json")?;
    arguments.get(at + 1).map(PathBuf::from)
}

#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde passes a reference"
)]
fn is_false(value: &bool) -> bool {
    !value
}
