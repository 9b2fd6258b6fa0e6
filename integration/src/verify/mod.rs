//! Runs all verification steps of a change. Each step is timed, and its output is logged.

use std::fs;
use std::io;
use std::num::NonZero;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use clap::Parser;
use thiserror::Error;

use crate::checks::Shard;
use crate::process::{self, ProcessError};
use crate::progress::{ProgressStep as Announced, print_line, seconds};
use crate::provision::ProvisionError;
use crate::provision::host::{self, HostTool};

mod cloud_hypervisor;
mod command;
mod fuzz;
mod steps;

/// Checks the project: format, lints, documentation, tests, models, fuzz corpora, one guest and one lab
///
/// Nothing is retried, and nothing depends on guests inside of guests. With --full it checks everything.
#[derive(Debug, Parser)]
#[command(name = "verify", version)]
pub struct VerifyOptions {
    /// Runs every step, including nested guests in the lab, which may be lost and are tried again
    #[arg(long, conflicts_with = "only")]
    full: bool,
    /// Runs one of N shares of all checks, so that several machines can divide them
    #[arg(long, value_name = "I/N", requires = "full")]
    shard: Option<Shard>,
    /// Runs only these steps, separated by commas
    #[arg(long, value_name = "STEP", value_delimiter = ',')]
    only: Vec<String>,
    /// Lists the steps and ends
    #[arg(long)]
    list: bool,
    /// Duration of each fuzz target
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    fuzz_seconds: u64,
    /// Only the end-to-end tests with this in their name
    #[arg(long, value_name = "FILTER")]
    e2e_filter: Option<String>,
    /// Omits the end-to-end tests with any of these in their name, such as `modes`, which step `guest` runs
    #[arg(long, value_name = "FILTER,…", value_delimiter = ',')]
    e2e_skip: Vec<String>,
    /// Only the tests in the lab with this in their name
    #[arg(long, value_name = "FILTER")]
    lab_filter: Option<String>,
}

/// Reasons why a step failed.
#[derive(Debug, Error)]
pub enum VerifyError {
    /// A tool is missing.
    #[error(transparent)]
    Provision(#[from] ProvisionError),
    /// A program could not be run.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// A program failed.
    #[error("`{command}` failed. Its whole output is in {log}; what failed, or the end:\n{what}")]
    Failed {
        /// Command line of the program.
        command: String,
        /// Log of the step.
        log: PathBuf,
        /// Messages of failed tests, or the end of the log.
        what: String,
    },
    /// A program that should run tests ran none.
    #[error("`{command}` ran no test. Its output is in {log}")]
    NothingTested {
        /// Command line of the program.
        command: String,
        /// Log of the step.
        log: PathBuf,
    },
    /// A file cannot be used.
    #[error("Cannot use {path}")]
    File {
        /// The file.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// A fuzz target found a failing input.
    #[error("Fuzz target {target} found something, kept in {artifact}:\n{tail}")]
    Fuzz {
        /// The target.
        target: String,
        /// Path of the input.
        artifact: PathBuf,
        /// End of the log.
        tail: String,
    },
    /// A step is unknown.
    #[error("There is no step '{name}': see --list")]
    NoStep {
        /// Name that was requested.
        name: String,
    },
}

/// Numbers of passed and failed checks, and numbers of other results.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct CheckCounts {
    passed: u64,
    failed: u64,
    /// Number of guests that were lost and booted again.
    lost: u64,
    /// Number of crates that were compiled or checked.
    built: u64,
}

impl CheckCounts {
    fn add(&mut self, more: Self) {
        let Self {
            passed,
            failed,
            lost,
            built,
        } = more;
        self.passed += passed;
        self.failed += failed;
        self.lost += lost;
        self.built += built;
    }
}

/// Environment of a step.
struct StepContext<'a> {
    options: &'a VerifyOptions,
    /// Directory of logs, and of builds that must be separate from the usual ones.
    dir: &'a Path,
    log: PathBuf,
    count: CheckCounts,
    not_checked: Vec<String>,
}

impl StepContext<'_> {
    /// Returns an environment with separate counts, for a part of the step that runs concurrently.
    fn with_separate_counts(&self) -> Self {
        Self {
            options: self.options,
            dir: self.dir,
            log: self.log.clone(),
            count: CheckCounts::default(),
            not_checked: Vec::new(),
        }
    }
}

/// Condition under which a step runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StepCondition {
    /// The step runs always, except if other steps are selected.
    Always,
    /// The step runs without `--full`. With `--full`, another step includes it. Such steps boot one machine.
    UnlessFull,
    /// The step runs with `--full`.
    Full,
}

/// A verification step.
struct VerifyStep {
    name: &'static str,
    what: &'static str,
    when: StepCondition,
    /// True if each [`Shard`] runs a part of the step. If false, one shard runs the whole step.
    is_sharded: bool,
    /// True if the step has a separate build. It can then run beside steps that use the workspace's build.
    has_separate_build: bool,
    /// True if the step needs a quiet machine. With `--full`, this step and all later ones start after all concurrent steps
    /// have ended.
    needs_quiet: bool,
    run: fn(&mut StepContext) -> Result<(), VerifyError>,
}

impl VerifyStep {
    fn is_wanted(&self, options: &VerifyOptions) -> bool {
        if !options.only.is_empty() {
            return options.only.iter().any(|name| name == self.name);
        }
        match self.when {
            StepCondition::Always => true,
            StepCondition::UnlessFull => !options.full,
            StepCondition::Full => options.full,
        }
    }
}

struct StepOutcome {
    name: &'static str,
    count: CheckCounts,
    time: Duration,
    /// Description of the error that failed the step.
    error: Option<String>,
    /// Checks of the step that were skipped.
    not_checked: Vec<String>,
}

impl StepOutcome {
    fn succeeded(&self) -> bool {
        self.error.is_none()
    }
}

/// Tools that builds and tests need in addition to Rust.
const TOOLS: &[HostTool] = &[
    HostTool {
        program: "cc",
        package: "gcc",
    },
    HostTool {
        program: "c++",
        package: "g++",
    },
    HostTool {
        program: "valgrind",
        package: "valgrind",
    },
    // A test of subvolumes needs this tool.
    HostTool {
        program: "mkfs.btrfs",
        package: "btrfs-progs",
    },
];

/// Runs the selected steps. Returns whether all succeeded.
///
/// # Errors
/// The steps cannot be run at all.
pub fn run(options: &VerifyOptions) -> Result<bool, VerifyError> {
    if options.list {
        for step in steps::ALL {
            let when = match step.when {
                StepCondition::Always | StepCondition::UnlessFull => "",
                StepCondition::Full => " (--full)",
            };
            print_line(&format!("{:<10} {}{when}", step.name, step.what));
        }
        return Ok(true);
    }
    for name in &options.only {
        if !steps::ALL.iter().any(|step| step.name == name) {
            return Err(VerifyError::NoStep { name: name.clone() });
        }
    }
    host::ensure(TOOLS)?;
    let dir = crate::target_dir().join("verify");
    fs::create_dir_all(&dir).map_err(|source| VerifyError::File {
        path: dir.clone(),
        source,
    })?;

    let belongs = |(place, step): &(usize, &VerifyStep)| {
        step.is_sharded || options.shard.is_none_or(|shard| shard.has(*place))
    };
    process::reduce_timer_slack();
    let started = Instant::now();
    let wanted = steps::ALL.iter().filter(|step| step.is_wanted(options));
    let steps = wanted.enumerate().filter(belongs);
    let steps: Vec<&VerifyStep> = steps.map(|(_, step)| step).collect();
    let processors = thread::available_parallelism().map_or(1, NonZero::get);
    let outcomes = run_steps(&steps, options, &dir, processors);
    Ok(summarize(&outcomes, started.elapsed()))
}

/// Steps with their positions in the list.
type Placed<'a> = Vec<(usize, &'a VerifyStep)>;

/// Steps, divided by the phase in which they run.
struct StepPhases<'a> {
    /// Steps with separate builds. They run at lower priority.
    separate_builds: Placed<'a>,
    /// Steps that run at the same time as the separate builds.
    first: Placed<'a>,
    /// Steps that boot one machine each. They run concurrently after `first`, since each machine keeps one processor busy.
    machines: Placed<'a>,
    /// Steps that run after all other steps.
    last: Placed<'a>,
}

impl<'a> StepPhases<'a> {
    fn from_steps(steps: &[&'a VerifyStep], is_full: bool, processors: usize) -> Self {
        let is_beside =
            |(_, step): &(usize, &VerifyStep)| processors > 1 && step.has_separate_build;
        let placed = steps.iter().copied().enumerate();
        let (parallel, mut first): (Placed<'_>, Placed<'_>) = placed.partition(is_beside);
        let quiet = first
            .iter()
            .position(|(_, step)| is_full && step.needs_quiet);
        let last = first.split_off(quiet.unwrap_or(first.len()));
        let is_machine = |(_, step): &(usize, &VerifyStep)| {
            processors > 1 && step.when == StepCondition::UnlessFull
        };
        let (machines, first) = first.into_iter().partition(is_machine);
        Self {
            separate_builds: parallel,
            first,
            machines,
            last,
        }
    }
}

/// Runs steps by their [phases](StepPhases). Returns the outcomes in the order of the steps.
fn run_steps(
    steps: &[&VerifyStep],
    options: &VerifyOptions,
    dir: &Path,
    processors: usize,
) -> Vec<StepOutcome> {
    let run = |steps: Placed<'_>| -> Vec<(usize, StepOutcome)> {
        let steps = steps.into_iter();
        steps
            .map(|(place, step)| (place, run_step(step, options, dir)))
            .collect()
    };
    let StepPhases {
        separate_builds: parallel,
        first,
        machines,
        last,
    } = StepPhases::from_steps(steps, options.full, processors);
    let mut outcomes = thread::scope(|scope| {
        let parallel = scope.spawn(|| {
            process::lower_priority();
            run(parallel)
        });
        let mut outcomes = run(first);
        let machines = machines.into_iter();
        let machines: Vec<_> = machines
            .map(|machine| scope.spawn(move || run(vec![machine])))
            .collect();
        for lane in machines.into_iter().chain([parallel]) {
            outcomes.extend(lane.join().unwrap_or_else(|panic| resume_unwind(panic)));
        }
        outcomes
    });
    outcomes.extend(run(last));
    outcomes.sort_by_key(|(place, _)| *place);
    outcomes.into_iter().map(|(_, outcome)| outcome).collect()
}

fn run_step(step: &VerifyStep, options: &VerifyOptions, dir: &Path) -> StepOutcome {
    let started = Instant::now();
    let announced = Announced::start(format!("{}: {}", step.name, step.what));
    let mut context = StepContext {
        options,
        dir,
        log: dir.join(format!("{}.log", step.name)),
        count: CheckCounts::default(),
        not_checked: Vec::new(),
    };
    // Removes the log of an earlier run.
    let _ = fs::remove_file(&context.log);
    let result = (step.run)(&mut context);
    let mut count = context.count;
    let error = match result {
        Ok(()) => {
            announced.done(format!("{}, {} passed", step.name, count.passed));
            None
        }
        Err(error) => {
            drop(announced);
            let error = crate::error_chain(&error);
            print_line(&error);
            // The step has failed without counting a failed check, so the step itself counts as one.
            count.failed = count.failed.max(1);
            Some(error)
        }
    };
    StepOutcome {
        name: step.name,
        count,
        time: started.elapsed(),
        error,
        not_checked: context.not_checked,
    }
}

/// Prints the result of each step, then the errors of failed steps again, since many lines may have followed them, and the
/// sum on the last line. `time` is the total time. Returns whether all steps succeeded.
fn summarize(outcomes: &[StepOutcome], time: Duration) -> bool {
    let mut sum = CheckCounts::default();
    print_line(&format!(
        "\n{:<10} {:<8} {:>7} {:>7} {:>7} {:>7} {:>14}",
        "step", "", "passed", "failed", "lost", "built", "time"
    ));
    for outcome in outcomes {
        let StepOutcome { name, count, .. } = outcome;
        print_line(&format!(
            "{name:<10} {:<8} {:>7} {:>7} {:>7} {:>7} {:>14}",
            if outcome.succeeded() { "ok" } else { "FAILED" },
            count.passed,
            count.failed,
            count.lost,
            count.built,
            seconds(outcome.time),
        ));
        sum.add(*count);
    }
    print_line(&format!(
        "{:<10} {:<8} {:>7} {:>7} {:>7} {:>7} {:>14}",
        "all",
        "",
        sum.passed,
        sum.failed,
        sum.lost,
        sum.built,
        seconds(time),
    ));
    print_line(
        "lost: guests that were lost and tried again; built: crates that were compiled or checked",
    );
    for what in outcomes.iter().flat_map(|outcome| &outcome.not_checked) {
        print_line(&format!("NOT CHECKED: {what}"));
    }
    for StepOutcome { name, error, .. } in outcomes {
        if let Some(error) = error {
            print_line(&format!("\nFAILED: {name}: {error}"));
        }
    }
    print_line(&format!("\n{} passed, {} failed", sum.passed, sum.failed));
    !outcomes.is_empty() && outcomes.iter().all(StepOutcome::succeeded)
}

#[cfg(test)]
mod tests {
    use std::sync::{Condvar, Mutex};

    use super::*;
    use crate::progress::capture_lines;

    /// Number of steps that wait for each other in [`meet`].
    static CAME: Mutex<u32> = Mutex::new(0);
    static MEETING: Condvar = Condvar::new();

    /// Waits until the other step has started as well.
    fn meet(context: &mut StepContext) -> Result<(), VerifyError> {
        let mut came = CAME.lock().expect("the meeting");
        *came += 1;
        MEETING.notify_all();
        let timeout = Duration::from_secs(180);
        let (came, _) = MEETING
            .wait_timeout_while(came, timeout, |came| *came < 2)
            .expect("the meeting");
        match *came {
            2 => Ok(()),
            _ => fail(context),
        }
    }

    fn pass(_: &mut StepContext) -> Result<(), VerifyError> {
        Ok(())
    }

    fn fail(_: &mut StepContext) -> Result<(), VerifyError> {
        Err(VerifyError::NoStep {
            name: "none".to_owned(),
        })
    }

    fn step(
        name: &'static str,
        is_beside: bool,
        run: fn(&mut StepContext) -> Result<(), VerifyError>,
    ) -> VerifyStep {
        VerifyStep {
            name,
            what: "a step of a test",
            when: StepCondition::Always,
            is_sharded: false,
            has_separate_build: is_beside,
            needs_quiet: false,
            run,
        }
    }

    #[test]
    fn verify_steps_run_in_their_lanes() {
        let quiet = VerifyStep {
            needs_quiet: true,
            ..step("quiet", false, pass)
        };
        let machine = VerifyStep {
            when: StepCondition::UnlessFull,
            ..step("machine", false, pass)
        };
        let steps = [
            step("first", false, pass),
            quiet,
            step("later", false, pass),
            step("apart", true, pass),
        ];
        let steps: Vec<&VerifyStep> = steps.iter().collect();
        let lanes = |steps: &[&VerifyStep], is_full, processors| {
            let StepPhases {
                separate_builds: parallel,
                first,
                machines,
                last,
            } = StepPhases::from_steps(steps, is_full, processors);
            [parallel, first, machines, last].map(|lane| {
                let names: Vec<_> = lane.iter().map(|(_, step)| step.name).collect();
                names.join(" ")
            })
        };
        let (full, quick) = (true, false);
        let expected = ["apart", "first", "", "quiet later"];
        assert_eq!(lanes(&steps, full, 2), expected);
        let expected = ["apart", "first quiet later", "", ""];
        assert_eq!(lanes(&steps, quick, 2), expected);
        let expected = ["", "first", "", "quiet later apart"];
        assert_eq!(lanes(&steps, full, 1), expected);
        let first = step("first", false, pass);
        let steps = [&first, &machine, &machine];
        let expected = ["", "first", "machine machine", ""];
        assert_eq!(lanes(&steps, quick, 2), expected);
        let expected = ["", "first machine machine", "", ""];
        assert_eq!(lanes(&steps, quick, 1), expected);
    }

    #[test]
    fn steps_with_builds_of_their_own_run_beside_the_others() {
        let options = VerifyOptions::try_parse_from(["verify"]).expect("options");
        let dir = tempfile::tempdir().expect("a folder");
        let ends = |steps: &[VerifyStep], processors| {
            let steps: Vec<&VerifyStep> = steps.iter().collect();
            let outcomes = run_steps(&steps, &options, dir.path(), processors);
            let ends = outcomes
                .into_iter()
                .map(|outcome| (outcome.name, outcome.succeeded()));
            ends.collect::<Vec<_>>()
        };
        let steps = [
            step("apart", true, meet),
            step("first", false, meet),
            step("last", false, fail),
        ];
        let expected = [("apart", true), ("first", true), ("last", false)];
        assert_eq!(ends(&steps, 2), expected);
        let alone = [step("apart", true, pass), step("last", false, fail)];
        assert_eq!(ends(&alone, 1), [("apart", true), ("last", false)]);
    }

    #[test]
    fn errors_of_failed_steps_are_repeated_behind_the_table() {
        let options = VerifyOptions::try_parse_from(["verify"]).expect("options");
        let dir = tempfile::tempdir().expect("a folder");
        let steps = [step("well", false, pass), step("wrong", false, fail)];
        let steps: Vec<&VerifyStep> = steps.iter().collect();
        let outcomes = run_steps(&steps, &options, dir.path(), 1);
        let (succeeded, lines) = capture_lines(|| summarize(&outcomes, Duration::ZERO));
        assert!(!succeeded);
        let (table, errors) = lines.split_once("lost:").expect("the end of the table");
        assert!(table.contains("FAILED"), "{lines}");
        assert!(
            errors.contains("FAILED: wrong: There is no step 'none'"),
            "{lines}"
        );
        assert!(!errors.contains("well"), "{lines}");
    }
}
