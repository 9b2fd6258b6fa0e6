//! Log filters: a default level and levels of modules.

use std::fmt;
use std::str::FromStr;

use env_filter::{Builder, Filter};
use log::LevelFilter;
use thiserror::Error;

/// Valid levels, for error messages.
const LEVELS: &str = "off, error, warn, info, debug or trace";

/// Error of parsing a filter.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum FilterError {
    /// A level is unknown.
    #[error("'{level}' is not a level: use {LEVELS}")]
    Level {
        /// The unknown level.
        level: String,
    },
    /// A module name is missing or invalid.
    #[error("'{part}' is not a module: write MODULE=LEVEL, as in nvme_vfio=debug")]
    Module {
        /// The invalid part.
        part: String,
    },
    /// Two levels apply to the same messages.
    #[error("there are two levels for {what}: keep one")]
    Twice {
        /// The affected messages, as text.
        what: String,
    },
    /// The filter is empty.
    #[error(
        "a filter of the log is LEVEL or MODULE=LEVEL, separated by commas; a level is {LEVELS}"
    )]
    Empty,
}

/// A log filter, as in `info` or `warn,nvme_vfio=debug`. A level without a module is the default level of all modules.
/// Without a default level, modules that the filter does not name log nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogFilter {
    default_level: Option<LevelFilter>,
    modules: Vec<(String, LevelFilter)>,
}

impl LogFilter {
    /// Compiles the filter for matching records.
    pub(super) fn build(&self) -> Filter {
        let mut builder = Builder::new();
        builder.filter_level(self.default_level.unwrap_or(LevelFilter::Off));
        for (module, level) in &self.modules {
            builder.filter_module(module, *level);
        }
        builder.build()
    }
}

impl From<LevelFilter> for LogFilter {
    fn from(least: LevelFilter) -> Self {
        Self {
            default_level: Some(least),
            modules: Vec::new(),
        }
    }
}

impl FromStr for LogFilter {
    type Err = FilterError;

    fn from_str(text: &str) -> Result<Self, FilterError> {
        let mut filter = Self {
            default_level: None,
            modules: Vec::new(),
        };
        for part in text.split(',').map(str::trim) {
            let level = |level: &str| {
                level.parse().map_err(|_| FilterError::Level {
                    level: level.to_owned(),
                })
            };
            let Some((module, of_module)) = part.split_once('=') else {
                if part.is_empty() {
                    return Err(FilterError::Empty);
                }
                if filter.default_level.replace(level(part)?).is_some() {
                    let what = "all modules".to_owned();
                    return Err(FilterError::Twice { what });
                }
                continue;
            };
            let module = module.trim();
            let is_name = |letter: char| letter.is_ascii_alphanumeric() || "_:".contains(letter);
            if module.is_empty() || !module.chars().all(is_name) {
                let part = part.to_owned();
                return Err(FilterError::Module { part });
            }
            if filter.modules.iter().any(|(other, _)| other == module) {
                let what = format!("module {module}");
                return Err(FilterError::Twice { what });
            }
            let of_module = level(of_module.trim())?;
            filter.modules.push((module.to_owned(), of_module));
        }
        Ok(filter)
    }
}

impl fmt::Display for LogFilter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let level = |level: &LevelFilter| level.as_str().to_ascii_lowercase();
        let least = self.default_level.iter().map(level);
        let modules = self.modules.iter();
        let modules = modules.map(|(module, of_module)| format!("{module}={}", level(of_module)));
        let parts: Vec<_> = least.chain(modules).collect();
        f.write_str(&parts.join(","))
    }
}

#[cfg(test)]
mod tests {
    use log::{Level, Metadata};

    use super::*;

    #[test]
    fn modules_have_levels_of_their_own() {
        let filter: LogFilter = "warn, nvme_vfio=debug,nvme_lease=off".parse().unwrap();
        assert_eq!(filter.to_string(), "warn,nvme_vfio=debug,nvme_lease=off");
        let built = filter.build();
        let is_logged = |target: &str, level| {
            built.enabled(&Metadata::builder().target(target).level(level).build())
        };
        assert!(is_logged("nvme_mpt_server::serve", Level::Warn));
        assert!(!is_logged("nvme_mpt_server::serve", Level::Info));
        assert!(is_logged("nvme_vfio::controller", Level::Debug));
        assert!(!is_logged("nvme_lease::ledger", Level::Error));
        assert_eq!(built.filter(), LevelFilter::Debug);
        assert_eq!(LogFilter::from(LevelFilter::Info).to_string(), "info");
    }

    #[test]
    fn other_modules_log_nothing_without_a_level() {
        let filter: LogFilter = "nvme_vfio=info".parse().unwrap();
        let mut other = Metadata::builder();
        other.target("nvme_mpt").level(Level::Error);
        assert!(!filter.build().enabled(&other.build()));
    }

    #[test]
    fn invalid_filters_are_refused_by_name() {
        for (text, error) in [
            ("inof", "'inof' is not a level: use off, error, warn"),
            ("nvme_vfio", "'nvme_vfio' is not a level"),
            ("nvme_vfio=", "'' is not a level"),
            ("nvme_vfio=loud", "'loud' is not a level"),
            ("=debug", "'=debug' is not a module"),
            ("a b=debug", "'a b=debug' is not a module"),
            ("info,warn", "there are two levels for all modules"),
            ("a=info,a=warn", "there are two levels for module a"),
            ("", "a filter of the log is LEVEL or MODULE=LEVEL"),
            ("info,", "a filter of the log is LEVEL or MODULE=LEVEL"),
        ] {
            let told = text.parse::<LogFilter>().unwrap_err().to_string();
            assert!(told.starts_with(error), "{text}: {told}");
        }
    }
}
