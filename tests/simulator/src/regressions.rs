//! Seeds that failed once.

use std::path::{Path, PathBuf};
use std::{fs, io};

use serde::Deserialize;

/// Reason for which there is no list.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RegressionError {
    /// The list is no such list.
    #[error("{path}: {source}")]
    List {
        /// The list.
        path: PathBuf,
        /// Complaint of the parser.
        source: Box<toml::de::Error>,
    },
    /// The list cannot be read.
    #[error("{path}: {source}")]
    File {
        /// The list.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
}

#[derive(Debug, Deserialize)]
struct List {
    regression: Vec<Regression>,
}

/// A seed that failed once.
#[derive(Debug, Deserialize)]
pub(crate) struct Regression {
    pub(crate) scenario: String,
    pub(crate) seed: u64,
    /// Its failure.
    pub(crate) found: String,
    /// The commit with which it failed no more.
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
