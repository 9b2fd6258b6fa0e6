//! Harness for the programs `e2e` and `lab`, whose checks boot machines.
//!
//! The harness extends `libtest-mimic` by [groups](CheckGroup) of checks that share a machine, [shares](Shard) of all
//! groups, concurrent groups, and the option `--once`. Checks that share a machine run in sequence.

use std::error::Error as StdError;
use std::fmt;
use std::io::{self, Write};
use std::num::NonZero;
use std::path::Path;
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use clap::Parser;
use libtest_mimic::{Arguments, Failed, Trial};
use thiserror::Error;

use crate::progress::{print_line, seconds};

pub mod balloon;
mod concurrency;
mod environment;

pub use environment::CheckEnvironment;

/// Reason why a check failed.
pub type Failure = Box<dyn StdError + Send + Sync>;

/// Environment variable that `cargo verify --full` sets. If it is set, checks with repetitions run more of them.
pub const FULL: &str = "NVME_MPT_FULL";

/// Error of a file that a check uses.
#[derive(Debug, Error)]
#[error("Cannot use {path}")]
struct FileFailure {
    path: String,
    source: io::Error,
}

/// Returns a function that adds the path to an I/O error.
pub fn with_path(path: impl AsRef<Path>) -> impl FnOnce(io::Error) -> Failure {
    let path = path.as_ref().display().to_string();
    |source| FileFailure { path, source }.into()
}

/// Returns `message` as an error if `holds` is false.
///
/// # Errors
/// The condition does not hold.
pub fn expect(holds: bool, message: impl FnOnce() -> String) -> Result<(), Failure> {
    match holds {
        true => Ok(()),
        false => Err(message().into()),
    }
}

/// Error of parsing a share.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("{0}: expected I/N with 1 <= I <= N, as in 2/3")]
pub struct ShardError(String);

/// One of `count` shares, into which all groups are divided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shard {
    /// Index of the share, from 0.
    index: usize,
    count: usize,
}

impl Shard {
    /// Returns whether the share contains the entry at position `place` of a list.
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

impl fmt::Display for Shard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.index + 1, self.count)
    }
}

/// Options of a program that runs checks.
#[derive(Debug, Parser)]
pub struct CheckOptions {
    #[command(flatten)]
    tests: Arguments,
    /// Repeats no check whose guest was lost
    #[arg(long)]
    pub once: bool,
    /// Runs one of N shares of the groups of checks
    #[arg(long, value_name = "I/N")]
    shard: Option<Shard>,
}

/// Function of a check, which runs once.
type Run = Box<dyn FnOnce() -> Result<(), Failure> + Send>;

/// A check that has not run yet.
struct Check {
    name: String,
    run: Run,
}

impl Check {
    fn new(
        group: &str,
        name: &str,
        run: impl FnOnce() -> Result<(), Failure> + Send + 'static,
    ) -> Self {
        Self {
            name: format!("{group}::{name}"),
            run: Box::new(run),
        }
    }

    fn is_selected(&self, tests: &Arguments) -> bool {
        !tests.is_filtered_out(&Trial::test(&*self.name, || Ok(())))
    }

    /// Converts the check into a trial of the harness.
    fn into_trial(self) -> Trial {
        let Self { name, run } = self;
        Trial::test(name, move || {
            let started = Instant::now();
            let result = run();
            report("", started.elapsed(), result)
        })
    }
}

impl fmt::Debug for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Check").field(&self.name).finish()
    }
}

/// Prints a check's output and its time, before the harness prints the outcome on the same line. Returns the outcome.
fn report(output: &str, took: Duration, result: Result<(), Failure>) -> Result<(), Failed> {
    print!("{output}{} ", seconds(took));
    // If standard output is closed, the check does not fail.
    let _ = io::stdout().flush();
    result.map_err(|failure| Failed::from(crate::error_chain(&*failure)))
}

/// Checks that run in sequence, in the order of the list.
#[derive(Debug)]
struct CheckUnit {
    checks: Vec<Check>,
    /// True if no other unit may run at the same time.
    is_exclusive: bool,
}

/// Checks that share a machine, in the order in which they run. A group belongs to one [`Shard`].
#[derive(Debug)]
pub struct CheckGroup {
    name: &'static str,
    checks: Vec<Check>,
    last_check: Option<Check>,
    is_concurrent: bool,
    is_exclusive: bool,
}

impl CheckGroup {
    /// Creates a group without checks.
    pub fn new(name: &'static str) -> Self {
        Self {
            name,
            checks: Vec::new(),
            last_check: None,
            is_concurrent: false,
            is_exclusive: false,
        }
    }

    /// Adds a check. Its closure is dropped after it has run, or if the check is not selected.
    #[must_use]
    pub fn check(
        mut self,
        name: &str,
        run: impl FnOnce() -> Result<(), Failure> + Send + 'static,
    ) -> Self {
        self.checks.push(Check::new(self.name, name, run));
        self
    }

    /// Sets the last check of the group, which runs whenever another check of the group does.
    #[must_use]
    pub fn end(
        mut self,
        name: &str,
        run: impl FnOnce() -> Result<(), Failure> + Send + 'static,
    ) -> Self {
        self.last_check = Some(Check::new(self.name, name, run));
        self
    }

    /// Lets the group's checks run concurrently, since each has its own machines.
    #[must_use]
    pub fn concurrent(mut self) -> Self {
        self.is_concurrent = true;
        self
    }

    /// Makes the group run alone, after all other groups.
    #[must_use]
    pub fn exclusive(mut self) -> Self {
        self.is_exclusive = true;
        self
    }

    fn into_units(self, tests: &Arguments) -> Vec<CheckUnit> {
        let Self {
            mut checks,
            last_check: end,
            is_concurrent: is_apart,
            is_exclusive: is_alone,
            ..
        } = self;
        checks.retain(|check| check.is_selected(tests));
        if checks.is_empty() {
            return Vec::new();
        }
        let unit = |checks| CheckUnit {
            checks,
            is_exclusive: is_alone,
        };
        match end {
            None if is_apart => checks.into_iter().map(|check| unit(vec![check])).collect(),
            end => {
                checks.extend(end);
                vec![unit(checks)]
            }
        }
    }
}

/// Runs the checks that `options` select, or lists them. The number of groups or [independent](CheckGroup::concurrent)
/// checks that run concurrently is at most `most`, and at most the number of processors or that of `--test-threads`.
pub fn run(options: CheckOptions, groups: Vec<CheckGroup>, most: usize) -> ExitCode {
    let CheckOptions {
        mut tests,
        once: _,
        shard,
    } = options;
    let units = select(&tests, shard, groups);
    let processors = || thread::available_parallelism().map_or(1, NonZero::get);
    let wanted = tests.test_threads.unwrap_or_else(processors);
    // The checks are selected above, so the harness must not filter them again: the last check of a group runs with any
    // other check.
    (tests.filter, tests.exact) = (None, false);
    tests.skip.clear();
    // Units run concurrently on threads of this module. The harness itself reports the checks one by one.
    tests.test_threads = Some(1);
    if units.is_empty() {
        print_line("No check has such a name");
        return ExitCode::FAILURE;
    }
    let runs_none = tests.list || tests.bench;
    let conclusion = match wanted.clamp(1, most) {
        at_once if at_once > 1 && !runs_none => concurrency::run(&tests, units, at_once),
        _ => {
            let checks = units.into_iter().flat_map(|unit| unit.checks);
            libtest_mimic::run(&tests, checks.map(Check::into_trial).collect())
        }
    };
    conclusion.exit_code()
}

fn select(tests: &Arguments, shard: Option<Shard>, groups: Vec<CheckGroup>) -> Vec<CheckUnit> {
    groups
        .into_iter()
        .enumerate()
        .filter(|(place, _)| shard.is_none_or(|shard| shard.has(*place)))
        .flat_map(|(_, group)| group.into_units(tests))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn groups() -> Vec<CheckGroup> {
        ["a", "b", "c", "d", "e"]
            .map(|name| {
                let group = CheckGroup::new(name)
                    .check("one", || Ok(()))
                    .check("two", || Ok(()));
                group.end("end", || Err("It ends".into()))
            })
            .into()
    }

    fn selected(line: &str) -> Vec<String> {
        let words = ["checks"].into_iter().chain(line.split_whitespace());
        let options = CheckOptions::try_parse_from(words).unwrap();
        let units = select(&options.tests, options.shard, groups());
        let checks = units.into_iter().flat_map(|unit| unit.checks);
        checks.map(|check| check.name).collect()
    }

    #[test]
    fn a_filter_selects_checks_and_the_end_of_their_group() {
        assert_eq!(selected("--once c::"), ["c::one", "c::two", "c::end"]);
        assert_eq!(selected("--exact d::two"), ["d::two", "d::end"]);
        assert_eq!(selected("b --skip one"), ["b::two", "b::end"]);
        assert!(selected("a::end").is_empty());
        assert!(CheckOptions::try_parse_from(["checks", "--onse"]).is_err());
    }

    #[test]
    fn units_are_groups_and_separate_checks() {
        let checks = |name| {
            let group = CheckGroup::new(name).check("one", || Ok(()));
            group.check("two", || Ok(()))
        };
        let groups = vec![
            checks("shared"),
            checks("apart").concurrent(),
            checks("ended").concurrent().end("end", || Ok(())),
            checks("alone").concurrent().exclusive(),
        ];
        let options = CheckOptions::try_parse_from(["checks", "--skip", "shared::one"]).unwrap();
        let units = select(&options.tests, None, groups);
        let describe = |unit: &CheckUnit| {
            let names: Vec<_> = unit.checks.iter().map(|check| &*check.name).collect();
            (names.join(" "), unit.is_exclusive)
        };
        let units: Vec<_> = units.iter().map(describe).collect();
        let expected = [
            ("shared::two", false),
            ("apart::one", false),
            ("apart::two", false),
            ("ended::one ended::two ended::end", false),
            ("alone::one", true),
            ("alone::two", true),
        ];
        assert_eq!(
            units,
            expected.map(|(names, is_alone)| (names.to_owned(), is_alone))
        );
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
    fn invalid_shares_are_refused() {
        for wrong in ["", "0/3", "4/3", "1", "a/b", "1/0"] {
            assert_eq!(
                wrong.parse::<Shard>(),
                Err(ShardError(wrong.to_owned())),
                "{wrong}"
            );
        }
    }
}
