//! Errors of option strings.

use std::error::Error as StdError;

use crate::drives::DrivePath;
use thiserror::Error;

/// Error in the options of a function.
#[derive(Debug, Error)]
pub enum OptionError {
    /// A key has no `=`.
    #[error("{}", no_value_text(word))]
    NoValue {
        /// The key.
        word: String,
    },
    /// A key has blanks around it.
    #[error(
        "Option \"{key}\" has a blank before or after its name: write KEY=VALUE,KEY=VALUE without blanks"
    )]
    Blank {
        /// The key without the blanks.
        key: String,
    },
    /// A value is empty.
    #[error("Option \"{key}\" has an empty value: give it one, or leave it out")]
    EmptyValue {
        /// The key.
        key: String,
    },
    /// A key occurs twice.
    #[error("Option \"{key}\" is given twice: keep one")]
    Duplicate {
        /// The key.
        key: String,
    },
    /// Two keys exclude each other.
    #[error("Options \"{key}\" and \"{other}\" are both given: {why}; keep one")]
    Conflict {
        /// The key that excludes the other one.
        key: &'static str,
        /// The excluded key.
        other: &'static str,
        /// Reason of the refusal, for the error message.
        why: &'static str,
    },
    /// A quote is not closed.
    #[error("Option \"{key}\" opens a quote that it does not close: add a \"")]
    Unclosed {
        /// The key.
        key: String,
    },
    /// The options contain an unknown key.
    #[error("There is no option \"{key}\": the options are {allowed}")]
    Unknown {
        /// The key.
        key: String,
        /// The known keys, as text for the error message.
        allowed: String,
    },
    /// A VMM's configuration has the key `id`, which names devices there.
    #[error("There is no option \"id\" here: the id of the lease is lease=ID")]
    IdForLease,
    /// A mandatory option is missing.
    #[error("Option \"{key}\" is missing: add {key}={example}")]
    Missing {
        /// The key.
        key: &'static str,
        /// Example of a value, for the error message.
        example: &'static str,
    },
    /// A key does not apply to the kind of drive.
    #[error("Option \"{key}\" is not for {path}: {why}; leave it out")]
    NotApplicable {
        /// The key.
        key: &'static str,
        /// The drive.
        path: DrivePath,
        /// Reason of the refusal, for the error message.
        why: &'static str,
    },
    /// A value requires an option that is not given.
    #[error("Option \"{key}={value}\" needs {other}: {why}; add that, or leave it out")]
    Needs {
        /// The key.
        key: &'static str,
        /// The value.
        value: String,
        /// The required option.
        other: &'static str,
        /// Reason of the refusal, for the error message.
        why: &'static str,
    },
    /// A value is invalid.
    #[error("Option \"{key}\" cannot be \"{value}\"")]
    Value {
        /// The key.
        key: &'static str,
        /// The value.
        value: String,
        /// The parse error, with the allowed values.
        source: Box<dyn StdError + Send + Sync>,
    },
}

fn no_value_text(word: &str) -> String {
    if word.is_empty() {
        "An option is empty: write KEY=VALUE, separated by single commas".to_owned()
    } else {
        format!("Option \"{word}\" has no value: write {word}=VALUE")
    }
}
