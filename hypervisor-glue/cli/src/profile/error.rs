//! Errors of `nvme-mpt profile fit`.

use std::io;
use std::path::PathBuf;

use nvme_software::model::ProfileError;
use thiserror::Error;

/// Error making a profile.
#[derive(Debug, Error)]
pub enum FitError {
    /// The report cannot be read.
    #[error("fio's report {path} cannot be read")]
    Read {
        /// Its path.
        path: PathBuf,
        /// Kernel's error.
        source: io::Error,
    },
    /// Error of a file that is no report of fio.
    #[error("{path} is no report of fio; run it with --output-format=json --output=FILE")]
    Report {
        /// Its path.
        path: PathBuf,
        /// Cause, and its place.
        source: serde_json::Error,
    },
    /// A job failed: what it measured is not what the drive does.
    #[error("Job {job} of {path} failed with error {code}; measure again")]
    Failed {
        /// The report.
        path: PathBuf,
        /// The job.
        job: String,
        /// fio's error.
        code: i64,
    },
    /// A value that cannot be understood.
    #[error("Job {job} of {path} has {option}={value}, which is no {what}")]
    Option {
        /// The report.
        path: PathBuf,
        /// The job.
        job: String,
        /// fio's option.
        option: &'static str,
        /// Its value.
        value: String,
        /// Value that it should be.
        what: &'static str,
    },
    /// Something was not measured.
    #[error(
        "{path} has no job that {what}, and nothing else beside; add one with {options}, or use \
         resources/drives/measure.fio"
    )]
    Missing {
        /// The report.
        path: PathBuf,
        /// Contribution that the job would make.
        what: &'static str,
        /// fio's options for it.
        options: &'static str,
    },
    /// The measurements make no profile.
    #[error("{path} tells of a drive that cannot be modelled")]
    Profile {
        /// The report.
        path: PathBuf,
        /// The value that is out of range.
        source: ProfileError,
    },
}
