//! One harness for the checks that boot machines: the programs `e2e` and `lab`.
//!
//! It is `libtest-mimic` with three additions: [groups](Group) of checks that share a machine, [shares](Shard) of all
//! groups, and `--once`. Checks run one after the other.

use std::error::Error as StdError;
use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
use libtest_mimic::{Arguments, Failed, Trial};
use thiserror::Error;

use crate::progress::{say, seconds};

mod bench;

pub use bench::Bench;

/// Why a check failed: an error of anything that it used, or a text.
pub type Failure = Box<dyn StdError + Send + Sync>;

/// Variable of the environment that `cargo verify --full` sets: checks that can be done many times are.
pub const FULL: &str = "NVME_MPT_FULL";

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

/// A share that is none.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("{0}: expected I/N with 1 <= I <= N, as in 2/3")]
pub struct ShardError(String);

/// One of `count` shares of all checks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shard {
    /// From 0.
    index: usize,
    count: usize,
}

impl Shard {
    /// Returns whether the share has this place of a list.
    pub fn has(self, place: usize) -> bool {
        place % self.count == self.index
    }
}

impl std::str::FromStr for Shard {
    type Err = ShardError;

    fn from_str(text: &str) -> Result<Self, ShardError> {
        let parse = || {
            let (index, count) = text.split_once('/')?;
            let (index, count): (usize, usize) = (index.parse().ok()?, count.parse().ok()?);
            (1..=count).contains(&index).then(|| Self {
                index: index - 1,
                count,
            })
        };
        parse().ok_or_else(|| ShardError(text.to_owned()))
    }
}

impl std::fmt::Display for Shard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.index + 1, self.count)
    }
}

/// Options of a program that runs checks.
#[derive(Debug, Parser)]
pub struct Options {
    #[command(flatten)]
    tests: Arguments,
    /// Repeats no check whose guest was lost
    #[arg(long)]
    pub once: bool,
    /// Runs one of N shares of the groups of checks
    #[arg(long, value_name = "I/N")]
    shard: Option<Shard>,
}

/// Checks that share a machine, in the order in which they run. A [`Shard`] has a group as a whole.
#[derive(Debug)]
pub struct Group {
    name: &'static str,
    checks: Vec<Trial>,
    end: Option<Trial>,
}

impl Group {
    /// A group without a check.
    pub fn new(name: &'static str) -> Self {
        Self {
            name,
            checks: Vec::new(),
            end: None,
        }
    }

    /// Adds a check. Its closure, with all it owns, is dropped after it ran, or if it is not selected.
    #[must_use]
    pub fn check(
        mut self,
        name: &str,
        run: impl FnOnce() -> Result<(), Failure> + Send + 'static,
    ) -> Self {
        self.checks.push(trial(self.name, name, run));
        self
    }

    /// Sets the check that ends the group. It runs after any other check of the group.
    #[must_use]
    pub fn end(
        mut self,
        name: &str,
        run: impl FnOnce() -> Result<(), Failure> + Send + 'static,
    ) -> Self {
        self.end = Some(trial(self.name, name, run));
        self
    }

    fn selected(self, tests: &Arguments) -> Vec<Trial> {
        let mut checks = self.checks;
        checks.retain(|check| !tests.is_filtered_out(check));
        if !checks.is_empty() {
            checks.extend(self.end);
        }
        checks
    }
}

fn trial(
    group: &str,
    name: &str,
    run: impl FnOnce() -> Result<(), Failure> + Send + 'static,
) -> Trial {
    Trial::test(format!("{group}::{name}"), move || {
        let started = Instant::now();
        let result = run();
        // On the line that the outcome ends.
        print!("{} ", seconds(started.elapsed()));
        // A reader that is gone fails no check.
        let _ = io::stdout().flush();
        result.map_err(|failure| Failed::from(crate::error_chain(&*failure)))
    })
}

/// Runs the checks that `options` select, or lists them.
pub fn run(options: Options, groups: Vec<Group>) -> ExitCode {
    let Options {
        mut tests,
        once: _,
        shard,
    } = options;
    let trials = select(&tests, shard, groups);
    // They are selected already: the end of a group comes with any other check of it.
    (tests.filter, tests.exact) = (None, false);
    tests.skip.clear();
    tests.test_threads = Some(1);
    if trials.is_empty() {
        say("No check has such a name");
        return ExitCode::FAILURE;
    }
    libtest_mimic::run(&tests, trials).exit_code()
}

fn select(tests: &Arguments, shard: Option<Shard>, groups: Vec<Group>) -> Vec<Trial> {
    groups
        .into_iter()
        .enumerate()
        .filter(|(place, _)| shard.is_none_or(|shard| shard.has(*place)))
        .flat_map(|(_, group)| group.selected(tests))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn groups() -> Vec<Group> {
        ["a", "b", "c", "d", "e"]
            .map(|name| {
                let group = Group::new(name)
                    .check("one", || Ok(()))
                    .check("two", || Ok(()));
                group.end("end", || Err("It ends".into()))
            })
            .into()
    }

    fn selected(line: &str) -> Vec<String> {
        let words = ["checks"].into_iter().chain(line.split_whitespace());
        let options = Options::try_parse_from(words).unwrap();
        let trials = select(&options.tests, options.shard, groups());
        trials.iter().map(|trial| trial.name().to_owned()).collect()
    }

    #[test]
    fn a_filter_selects_checks_and_the_end_of_their_group() {
        assert_eq!(selected("--once c::"), ["c::one", "c::two", "c::end"]);
        assert_eq!(selected("--exact d::two"), ["d::two", "d::end"]);
        assert_eq!(selected("b --skip one"), ["b::two", "b::end"]);
        assert!(selected("a::end").is_empty());
        assert!(Options::try_parse_from(["checks", "--onse"]).is_err());
    }

    #[test]
    fn shares_are_disjoint_and_together_all() {
        let share = |index| selected(&format!("--shard {index}/3"));
        let mut all = [share(1), share(2), share(3)].concat();
        all.sort_unstable();
        let mut whole = selected("");
        whole.sort_unstable();
        assert_eq!(all, whole);
    }

    #[test]
    fn shares_that_are_none_are_refused() {
        for wrong in ["", "0/3", "4/3", "1", "a/b", "1/0"] {
            assert_eq!(
                wrong.parse::<Shard>(),
                Err(ShardError(wrong.to_owned())),
                "{wrong}"
            );
        }
    }
}
