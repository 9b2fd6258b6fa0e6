//! Errors of making a profile from a report of fio.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use crate::ProfileError;

/// Error of making a profile.
#[derive(Debug, Error)]
pub enum FitError {
    /// The report cannot be read.
    #[error("fio's report {path} cannot be read")]
    Read {
        /// The report's path.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// The file is not a fio report.
    #[error("{path} is not a report of fio; run it with --output-format=json --output=FILE")]
    Report {
        /// The file's path.
        path: PathBuf,
        /// Cause, and its position in the file.
        source: serde_json::Error,
    },
    /// A job failed, so its measurements are invalid.
    #[error("Job {job} of {path} failed with error {code}; measure again")]
    Failed {
        /// The report.
        path: PathBuf,
        /// The job.
        job: String,
        /// fio's error code.
        code: i64,
    },
    /// An option's value cannot be parsed.
    #[error("Job {job} of {path} has {option}={value}, which is not a {what}")]
    Option {
        /// The report.
        path: PathBuf,
        /// The job.
        job: String,
        /// The fio option.
        option: &'static str,
        /// The option's value.
        value: String,
        /// The expected kind of value.
        what: &'static str,
    },
    /// A measurement is missing.
    #[error(
        "{path} has no job that only {what}; add one with {options}, or use resources/drives/measure.fio"
    )]
    Missing {
        /// The report.
        path: PathBuf,
        /// Measurement that the missing job would make.
        what: &'static str,
        /// fio options for the missing job.
        options: &'static str,
    },
    /// The measurements are outside a profile's range.
    #[error("{path}: unsupported fio result")]
    Profile {
        /// The report.
        path: PathBuf,
        /// Error of the invalid value.
        source: ProfileError,
    },
}
