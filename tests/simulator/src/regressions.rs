//! List of seeds that have found defects.

use std::path::{Path, PathBuf};
use std::{fs, io};

use serde::Deserialize;

/// Reason why the list cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RegressionError {
    /// The list is malformed.
    #[error("{path}: {source}")]
    List {
        /// Path of the list.
        path: PathBuf,
        /// Error of the parser.
        source: Box<toml::de::Error>,
    },
    /// The list cannot be read.
    #[error("{path}: {source}")]
    File {
        /// Path of the list.
        path: PathBuf,
        /// I/O error.
        source: io::Error,
    },
}

#[derive(Debug, Deserialize)]
struct List {
    regression: Vec<Regression>,
}

/// A seed that has found a defect.
#[derive(Debug, Deserialize)]
pub(crate) struct Regression {
    pub(crate) scenario: String,
    pub(crate) seed: u64,
    /// Description of the failure.
    pub(crate) found: String,
    /// Commit that fixed the failure.
    pub(crate) fix: String,
}

/// Reads the list.
pub(crate) fn read() -> Result<Vec<Regression>, RegressionError> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("regressions.toml");
    let text = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(source) => return Err(RegressionError::File { path, source }),
    };
    let list: List = toml::from_str(&text).map_err(|source| RegressionError::List {
        path,
        source: source.into(),
    })?;
    Ok(list.regression)
}
