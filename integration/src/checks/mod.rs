//! Arguments of the programs that run checks on machines: which checks to run, and how.

use std::error::Error as StdError;
use std::io;
use std::path::Path;

use thiserror::Error;

/// Beginning of a line that reports a lost guest, whose check is made again.
pub const LOST: &str = "AGAIN   ";

/// Why a check failed: an error of anything that it used, or a text.
pub type Failure = Box<dyn StdError + Send + Sync>;

/// A file of a check that can't be used.
#[derive(Debug, Error)]
#[error("Cannot use {path}")]
struct FileFailure {
    path: String,
    source: io::Error,
}

/// Returns what makes a failure of an error at `path`.
pub fn at(path: impl AsRef<Path>) -> impl FnOnce(io::Error) -> Failure {
    let path = path.as_ref().display().to_string();
    |source| FileFailure { path, source }.into()
}

/// Fails with `message` unless `holds`.
///
/// # Errors
/// If it does not hold.
pub fn expect(holds: bool, message: impl FnOnce() -> String) -> Result<(), Failure> {
    match holds {
        true => Ok(()),
        false => Err(message().into()),
    }
}

/// An argument that makes no sense.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum SelectionError {
    /// The share is none.
    #[error("--shard {0}: expected I/N with 1 <= I <= N, as in 2/3")]
    Shard(String),
    /// No such option.
    #[error(
        "There is no option {0}: there are --list, --once, --shard I/N, and a part of the names of checks"
    )]
    Unknown(String),
}

/// One of `count` shares of all checks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shard {
    /// From 0.
    index: usize,
    count: usize,
}

impl Shard {
    /// Returns whether what has this place in a list belongs to the share.
    pub fn has(self, place: usize) -> bool {
        place % self.count == self.index
    }
}

impl std::str::FromStr for Shard {
    type Err = SelectionError;

    fn from_str(text: &str) -> Result<Self, SelectionError> {
        let parse = || {
            let (index, count) = text.split_once('/')?;
            let (index, count): (usize, usize) = (index.parse().ok()?, count.parse().ok()?);
            (1..=count).contains(&index).then(|| Self {
                index: index - 1,
                count,
            })
        };
        parse().ok_or_else(|| SelectionError::Shard(text.to_owned()))
    }
}

impl std::fmt::Display for Shard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.index + 1, self.count)
    }
}

/// The checks that were asked for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Selection {
    /// Only lists them.
    pub list: bool,
    /// Makes no check again whose guest was lost.
    pub once: bool,
    /// A part of their names.
    pub filter: String,
    shard: Option<Shard>,
}

impl Selection {
    /// Parses a program's arguments.
    ///
    /// # Errors
    /// If one makes no sense.
    pub fn from_arguments(
        mut arguments: impl Iterator<Item = String>,
    ) -> Result<Self, SelectionError> {
        let mut selection = Self::default();
        while let Some(argument) = arguments.next() {
            match argument.as_str() {
                "--list" => selection.list = true,
                "--once" => selection.once = true,
                "--shard" => {
                    let text = arguments.next().unwrap_or_default();
                    selection.shard = Some(text.parse()?);
                }
                // Cargo and its friends pass these to every test program.
                "--nocapture" | "--quiet" | "-q" => {}
                other if other.starts_with('-') => {
                    return Err(SelectionError::Unknown(argument));
                }
                _ => selection.filter = argument,
            }
        }
        Ok(selection)
    }

    /// The share of `groups` that was asked for.
    pub fn share_of<'a, T>(&self, groups: &'a [T]) -> impl Iterator<Item = &'a T> + use<'a, T> {
        let shard = self.shard;
        let belongs = move |place| shard.is_none_or(|shard: Shard| shard.has(place));
        let placed = groups.iter().enumerate();
        placed.filter_map(move |(place, group)| belongs(place).then_some(group))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn selection(line: &str) -> Result<Selection, SelectionError> {
        Selection::from_arguments(line.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn options_and_a_filter_are_understood() {
        let selected = selection("--once -q linux").unwrap();
        assert!(selected.once && !selected.list);
        assert_eq!(selected.filter, "linux");
        assert_eq!(
            selection("--onse"),
            Err(SelectionError::Unknown("--onse".to_owned()))
        );
    }

    #[test]
    fn shares_are_disjoint_and_together_all() {
        let groups: Vec<u32> = (0..17).collect();
        let mut all: Vec<u32> = (1..=3)
            .flat_map(|index| {
                let selected = selection(&format!("--shard {index}/3")).unwrap();
                selected.share_of(&groups).copied().collect::<Vec<_>>()
            })
            .collect();
        all.sort_unstable();
        assert_eq!(all, groups);
    }

    #[test]
    fn shares_that_are_none_are_refused() {
        for wrong in ["", "0/3", "4/3", "1", "a/b", "1/0"] {
            assert_eq!(
                selection(&format!("--shard {wrong}")),
                Err(SelectionError::Shard(wrong.to_owned())),
                "{wrong}"
            );
        }
    }
}
