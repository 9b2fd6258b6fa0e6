//! Errors of option strings.

use std::error::Error as StdError;

use crate::drives::DrivePath;
use thiserror::Error;

/// Error in the options of a function.
#[derive(Debug, Error)]
pub enum OptionError {
    /// A key without `=`.
    #[error("{}", no_value(word))]
    NoValue {
        /// The key.
        word: String,
    },
    /// A key with blanks around it.
    #[error(
        "Option \"{key}\" has a blank before or after its name: write KEY=VALUE,KEY=VALUE without blanks"
    )]
    Blank {
        /// The key, without them.
        key: String,
    },
    /// Nothing behind the `=`.
    #[error("Option \"{key}\" has an empty value: give it one, or leave it out")]
    EmptyValue {
        /// The key.
        key: String,
    },
    /// A key that is there already.
    #[error("Option \"{key}\" is given twice: keep one")]
    Twice {
        /// The key.
        key: String,
    },
    /// Two keys of which one alone can be given.
    #[error("Options \"{key}\" and \"{other}\" are both given: {why}; keep one")]
    Both {
        /// One key.
        key: &'static str,
        /// The other key.
        other: &'static str,
        /// Why.
        why: &'static str,
    },
    /// A quote without its end.
    #[error("Option \"{key}\" opens a quote that it does not close: add a \"")]
    Unclosed {
        /// The key.
        key: String,
    },
    /// A key that means nothing.
    #[error("There is no option \"{key}\": the options are {allowed}")]
    Unknown {
        /// The key.
        key: String,
        /// The keys that there are.
        allowed: String,
    },
    /// A key that cannot be left out.
    #[error("Option \"{key}\" is missing: add {key}={example}")]
    Missing {
        /// The key.
        key: &'static str,
        /// A value that would do.
        example: &'static str,
    },
    /// A key that the kind of drive makes meaningless.
    #[error("Option \"{key}\" is not for {path}: {why}; leave it out")]
    Meaningless {
        /// The key.
        key: &'static str,
        /// The drive.
        path: DrivePath,
        /// Why.
        why: &'static str,
    },
    /// A value that another option has to go with.
    #[error("Option \"{key}={value}\" needs {other}: {why}; add that, or leave it out")]
    Needs {
        /// The key.
        key: &'static str,
        /// The value.
        value: String,
        /// The option that it needs.
        other: &'static str,
        /// Why.
        why: &'static str,
    },
    /// A value that is none of its key's.
    #[error("Option \"{key}\" cannot be \"{value}\"")]
    Value {
        /// The key.
        key: &'static str,
        /// The value.
        value: String,
        /// The fault, and the values that are allowed.
        source: Box<dyn StdError + Send + Sync>,
    },
}

fn no_value(word: &str) -> String {
    if word.is_empty() {
        "An option is empty: write KEY=VALUE, separated by single commas".to_owned()
    } else {
        format!("Option \"{word}\" has no value: write {word}=VALUE")
    }
}
