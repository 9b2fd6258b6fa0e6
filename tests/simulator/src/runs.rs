//! Runs seeds in sequence. Each child process runs a batch of seeds, and is then replaced.

use std::fs;
use std::io::{BufRead, BufReader, Write as _, stdout};
use std::ops::Range;
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use clap::{Args, Parser};

use crate::engine::{Engine, Outcome};
use crate::mutations;
use crate::regressions::{self, Regression};
use crate::scenario::{self, Scenario};
use crate::tenants::{self, TenantResults};

/// Number of seeds that a child process runs.
const BATCH: u64 = 25;

/// Maximum number of failures to show.
const FAILURES_SHOWN: usize = 10;

/// First word of a child's line about a seed that passed.
const OK: &str = "ok";
/// First word of a child's line about a seed that failed.
const FAILED: &str = "failed";
/// First word of a child's line with the results of a cell of [`tenants`].
const TENANT_LINE: &str = "figures";

/// Runs functions, pollers and drives on one simulated clock, and checks what the guests observe.
#[derive(Clone, Debug, Parser)]
#[command(name = "cargo simulate")]
pub(crate) struct Options {
    /// First seed.
    #[arg(long)]
    seed: Option<u64>,
    /// Number of seeds. Default: 1 if a first seed is given, else 1000.
    #[arg(long)]
    seeds: Option<u64>,
    /// Runs seeds until this many hours of simulated time have passed, regardless of the number of seeds.
    #[arg(long)]
    hours: Option<f64>,
    /// The only scenario to simulate. Without it, the seed chooses a scenario.
    #[arg(long, value_parser = named)]
    scenario: Option<Scenario>,
    /// File for the last steps of the last seed that failed.
    #[arg(long)]
    trace: Option<PathBuf>,
    /// Stops at the first seed that fails.
    #[arg(long)]
    first: bool,
    /// Simulates less than the seed requires.
    #[command(flatten)]
    less: OmittedParts,
    /// Searches for the smallest simulation that still fails with the seed.
    #[arg(long)]
    shrink: bool,
    /// Applies each deliberate defect whose name contains this text, and counts the seeds that find it.
    #[arg(long, num_args = 0..=1, default_missing_value = "", value_name = "NAME")]
    mutations: Option<String>,
    /// Runs the seeds that have found defects.
    #[arg(long)]
    regressions: bool,
    /// Prints tables of the performance that tenants of a physical drive keep beside each other.
    #[arg(long)]
    tenants: bool,
    /// Writes the figure of these tables to this file.
    #[arg(long, requires = "tenants", value_name = "FILE")]
    json: Option<PathBuf>,
    /// Runs these seeds in this process, on behalf of a parent process.
    #[arg(long, hide = true, num_args = 2)]
    batch: Option<Vec<u64>>,
}

/// Parts of a simulation to leave out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Args)]
pub(crate) struct OmittedParts {
    /// Maximum number of guests.
    #[arg(long)]
    pub(crate) guests: Option<u64>,
    /// Maximum number of rounds of commands for each guest.
    #[arg(long)]
    pub(crate) rounds: Option<u64>,
    /// No actor is preempted for long.
    #[arg(long)]
    pub(crate) no_preemption: bool,
    /// All stores are visible at once.
    #[arg(long)]
    pub(crate) no_late_stores: bool,
    /// Drives do not fail, and no guest is malicious.
    #[arg(long)]
    pub(crate) no_trouble: bool,
}

impl OmittedParts {
    fn arguments(self) -> Vec<String> {
        let mut arguments = Vec::new();
        for (name, most) in [("--guests", self.guests), ("--rounds", self.rounds)] {
            if let Some(most) = most {
                arguments.extend([name.to_owned(), most.to_string()]);
            }
        }
        let flags = [
            ("--no-preemption", self.no_preemption),
            ("--no-late-stores", self.no_late_stores),
            ("--no-trouble", self.no_trouble),
        ];
        let set = flags.into_iter().filter(|(_, is_set)| *is_set);
        arguments.extend(set.map(|(name, _)| name.to_owned()));
        arguments
    }

    /// Returns simulations that are smaller than this one, the smallest first.
    fn smaller_simulations(self) -> Vec<Self> {
        let rounds = self.rounds.unwrap_or(64);
        let guests = self.guests.unwrap_or(3);
        let mut smaller: Vec<_> = (1..guests)
            .map(|guests| Self {
                guests: Some(guests),
                ..self
            })
            .collect();
        smaller.extend([
            Self {
                no_trouble: true,
                ..self
            },
            Self {
                no_preemption: true,
                ..self
            },
            Self {
                no_late_stores: true,
                ..self
            },
        ]);
        let shares = [rounds / 8, rounds / 2, rounds * 7 / 8];
        smaller.extend(
            shares
                .into_iter()
                .filter(|share| *share > 0)
                .map(|rounds| Self {
                    rounds: Some(rounds),
                    ..self
                }),
        );
        smaller.retain(|less| *less != self);
        smaller
    }
}

/// Returns the scenario with this name.
///
/// # Errors
/// There is no such scenario; the error lists the valid names.
fn named(name: &str) -> Result<Scenario, String> {
    let mut all = Scenario::ALL.iter();
    let found = all.find(|(known, _)| *known == name);
    found.map(|(_, scenario)| *scenario).ok_or_else(|| {
        let names: Vec<_> = Scenario::ALL.iter().map(|(name, _)| *name).collect();
        format!("there are {}", names.join(", "))
    })
}

/// Executes the command line.
pub(crate) fn main() -> ExitCode {
    let options = Options::parse();
    match (&options.batch, &options.mutations) {
        (Some(batch), _) => run_batch(&options, batch[0]..batch[1]),
        (None, Some(filter)) => match mutations::run(filter, options.first) {
            Ok(true) => ExitCode::SUCCESS,
            Ok(false) => ExitCode::FAILURE,
            Err(error) => {
                eprintln!("{error}");
                ExitCode::FAILURE
            }
        },
        (None, None) if options.regressions => run_regressions(&options),
        (None, None) if options.shrink => shrink(&options),
        (None, None) if options.tenants => print_tenants(&options),
        (None, None) => parent(&options),
    }
}

/// Runs seeds in this process. The first failure ends the process.
fn run_batch(options: &Options, seeds: Range<u64>) -> ExitCode {
    let engine = Engine::install();
    let trace = options.trace.clone();
    let running: &'static Mutex<u64> = Box::leak(Box::new(Mutex::new(seeds.start)));
    std::panic::set_hook(Box::new(move |panic| {
        let seed = *running.lock().unwrap_or_else(PoisonError::into_inner);
        let engine = Engine::of_thread();
        let outcome = engine.map(Engine::progress).unwrap_or_default();
        let reason = panic.to_string().replace('\n', " ");
        println!("{FAILED} {seed} {} {reason}", numbers(outcome));
        let _flushed = stdout().flush();
        if let (Some(trace), Some(engine)) = (&trace, engine) {
            let text = format!("{reason}\n\n{}\n{}", engine.actors(), engine.trace());
            if let Err(error) = fs::write(trace, text) {
                eprintln!("{}: {error}", trace.display());
            }
        }
        std::process::exit(1);
    }));
    for seed in seeds {
        *running.lock().unwrap_or_else(PoisonError::into_inner) = seed;
        let scenario = options.scenario.unwrap_or_else(|| Scenario::for_seed(seed));
        let less = options.less;
        let is_figure = options.tenants;
        let main = move || match is_figure {
            true => println!("{TENANT_LINE} {}", tenants::result_line(seed)),
            false => scenario::run(scenario, seed, less),
        };
        let outcome = engine.run(seed, less, main);
        println!("{OK} {seed} {}", numbers(outcome));
    }
    ExitCode::SUCCESS
}

/// Formats the numbers of an outcome as [`Batch::finish`] reads them.
fn numbers(outcome: Outcome) -> String {
    let Outcome {
        steps,
        commands,
        time,
    } = outcome;
    format!("{steps} {commands} {}", time.as_nanos())
}

/// Results of all seeds so far.
#[derive(Debug, Default)]
struct Results {
    seeds: u64,
    steps: u64,
    commands: u64,
    time: Duration,
    failures: Vec<(u64, String)>,
    /// Lines with the results of the tenants' cells.
    tenant_lines: Vec<String>,
}

/// A child process that runs seeds.
struct Batch {
    child: Child,
    remaining: Range<u64>,
}

impl Batch {
    fn start(options: &Options, seeds: Range<u64>) -> std::io::Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        let range = [seeds.start, seeds.end].map(|seed| seed.to_string());
        command.arg("--batch").args(range).stdout(Stdio::piped());
        if let Some(scenario) = options.scenario {
            command.args(["--scenario", scenario.name()]);
        }
        command.args(options.less.arguments());
        if options.tenants {
            command.arg("--tenants");
        }
        if let Some(trace) = &options.trace {
            command.arg("--trace").arg(trace);
        }
        Ok(Self {
            child: command.spawn()?,
            remaining: seeds,
        })
    }

    /// Reads the child's results until its end. After a failure, returns the seeds that the child has not run.
    fn finish(mut self, results: &Mutex<Results>) -> Range<u64> {
        let lines = self.child.stdout.take().map(BufReader::new);
        for line in lines
            .into_iter()
            .flat_map(BufRead::lines)
            .map_while(Result::ok)
        {
            if let Some((TENANT_LINE, results_text)) = line.split_once(' ') {
                let mut results = results.lock().unwrap_or_else(PoisonError::into_inner);
                results.tenant_lines.push(results_text.to_owned());
                continue;
            }
            let mut words = line.splitn(6, ' ');
            let kind = words.next().unwrap_or_default();
            let mut number = || {
                words
                    .next()
                    .and_then(|word| word.parse::<u64>().ok())
                    .unwrap_or(0)
            };
            let (seed, steps, commands, nanoseconds) = (number(), number(), number(), number());
            if ![OK, FAILED].contains(&kind) {
                continue;
            }
            let mut results = results.lock().unwrap_or_else(PoisonError::into_inner);
            results.seeds += 1;
            results.steps += steps;
            results.commands += commands;
            results.time += Duration::from_nanos(nanoseconds);
            if kind == FAILED {
                let reason = words.next().unwrap_or_default();
                results.failures.push((seed, reason.to_owned()));
            }
            self.remaining.start = seed + 1;
        }
        let ended = self.child.wait();
        let died = ended.map_or(true, |status| status.code().is_none_or(|code| code > 1));
        if died && !self.remaining.is_empty() {
            let mut results = results.lock().unwrap_or_else(PoisonError::into_inner);
            results.seeds += 1;
            let reason = format!("the process died: {:?}", self.child.wait());
            results.failures.push((self.remaining.start, reason));
            self.remaining.start += 1;
        }
        self.remaining
    }
}

/// Searches for a smaller simulation: removes parts one by one, as long as the seed still fails.
fn shrink(options: &Options) -> ExitCode {
    let seed = options.seed.unwrap_or(0);
    let failure = |less: OmittedParts| {
        let results = Mutex::default();
        let options = Options {
            less,
            ..options.clone()
        };
        let batch = Batch::start(&options, seed..seed + 1);
        batch.ok()?.finish(&results);
        let results = results.into_inner().unwrap_or_else(PoisonError::into_inner);
        results.failures.into_iter().next()
    };
    let mut less = options.less;
    let Some((_, mut reason)) = failure(less) else {
        println!("seed {seed} does not fail");
        return ExitCode::FAILURE;
    };
    while let Some((smaller, why)) = less
        .smaller_simulations()
        .into_iter()
        .find_map(|less| Some((less, failure(less)?.1)))
    {
        (less, reason) = (smaller, why);
    }
    let scenario = options
        .scenario
        .unwrap_or_else(|| Scenario::for_seed(seed))
        .name();
    show(scenario, &reason, seed, less);
    ExitCode::SUCCESS
}

/// Runs the seeds that have found defects, each in its scenario.
fn run_regressions(options: &Options) -> ExitCode {
    let list = match regressions::read() {
        Ok(list) => list,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::FAILURE;
        }
    };
    let (began, mut failed) = (Instant::now(), 0);
    for Regression {
        scenario,
        seed,
        found,
        fix,
    } in &list
    {
        let results = Mutex::default();
        let scenario = match named(scenario) {
            Ok(scenario) => scenario,
            Err(error) => {
                eprintln!("Seed {seed} has the scenario {scenario}: {error}");
                return ExitCode::FAILURE;
            }
        };
        let options = Options {
            scenario: Some(scenario),
            ..options.clone()
        };
        match Batch::start(&options, *seed..*seed + 1) {
            Ok(batch) => {
                let _rest = batch.finish(&results);
            }
            Err(error) => {
                eprintln!("no process for seed {seed}: {error}");
                return ExitCode::FAILURE;
            }
        }
        let results: Results = results.into_inner().unwrap_or_else(PoisonError::into_inner);
        let was_run = results.seeds > 0;
        failed += usize::from(!was_run || !results.failures.is_empty());
        for (seed, reason) in &results.failures {
            show(scenario.name(), reason, *seed, options.less);
            println!("    It failed before {fix}, too: {found}");
        }
    }
    let seconds = began.elapsed().as_secs_f64();
    println!(
        "{} seeds that failed once, {failed} failed: {seconds:.1} s",
        list.len()
    );
    match failed == 0 && !list.is_empty() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    }
}

/// Prints a failure, and the command that reproduces it.
fn show(scenario: &str, reason: &str, seed: u64, less: OmittedParts) {
    let seed = seed.to_string();
    let mut command = vec!["cargo simulate", "--seed", &seed, "--scenario", scenario];
    let less = less.arguments();
    command.extend(less.iter().map(String::as_str));
    println!("{scenario}: {reason}\n    {}", command.join(" "));
}

/// Prints the results of all cells of [`tenants`].
fn print_tenants(options: &Options) -> ExitCode {
    let options = Options {
        scenario: Some(Scenario::Tenants),
        ..options.clone()
    };
    let began = Instant::now();
    let results = run_seeds(&options, 0..tenants::CELLS, None);
    let tenants = TenantResults::parse(&results.tenant_lines);
    println!("{}", tenants.table());
    if let Some(path) = &options.json
        && let Err(error) = tenants.figure().write(path)
    {
        eprintln!("{error}");
        return ExitCode::FAILURE;
    }
    report(&options, &results, began.elapsed())
}

fn parent(options: &Options) -> ExitCode {
    let one = options.seed.is_some() && options.hours.is_none();
    let count = options.seeds.unwrap_or(match (one, options.hours) {
        (true, _) => 1,
        (false, Some(_)) => u64::MAX / 2,
        (false, None) => 1000,
    });
    let first = options.seed.unwrap_or(0);
    let seeds = first..first.saturating_add(count);
    let limit = options
        .hours
        .map(|hours| Duration::from_secs_f64(hours * 3600.0));
    let began = Instant::now();
    let results = run_seeds(options, seeds, limit);
    report(options, &results, began.elapsed())
}

/// Runs seeds with one child per processor, until all seeds are done or the simulated time reaches `limit`.
fn run_seeds(options: &Options, seeds: Range<u64>, limit: Option<Duration>) -> Results {
    let (next, results) = (Mutex::new(seeds.start), Mutex::new(Results::default()));
    let processors = std::thread::available_parallelism().map_or(1, |number| number.get());
    std::thread::scope(|scope| {
        for _ in 0..processors {
            scope.spawn(|| {
                loop {
                    let batch = {
                        let mut next = next.lock().unwrap_or_else(PoisonError::into_inner);
                        let results = results.lock().unwrap_or_else(PoisonError::into_inner);
                        let is_over = limit.is_some_and(|limit| results.time >= limit)
                            || options.first && !results.failures.is_empty();
                        let end = next.saturating_add(BATCH).min(seeds.end);
                        if is_over || *next >= end {
                            return;
                        }
                        let batch = *next..end;
                        *next = end;
                        batch
                    };
                    let mut rest = batch;
                    while !rest.is_empty() {
                        match Batch::start(options, rest.clone()) {
                            Ok(batch) => rest = batch.finish(&results),
                            Err(error) => {
                                eprintln!("no process for seeds {rest:?}: {error}");
                                return;
                            }
                        }
                    }
                }
            });
        }
    });
    results.into_inner().unwrap_or_else(PoisonError::into_inner)
}

fn report(options: &Options, results: &Results, elapsed: Duration) -> ExitCode {
    let mut failures: Vec<_> = results.failures.iter().collect();
    failures.sort();
    let shown = failures.iter().take(FAILURES_SHOWN);
    for (seed, reason) in shown {
        let scenario = options
            .scenario
            .unwrap_or_else(|| Scenario::for_seed(*seed))
            .name();
        show(scenario, reason, *seed, options.less);
    }
    let seconds = elapsed.as_secs_f64();
    println!(
        "{} seeds, {} failed: {:.1} hours of simulated time, {} thousand commands and {} million steps in {seconds:.1} s",
        results.seeds,
        failures.len(),
        results.time.as_secs_f64() / 3600.0,
        results.commands / 1_000,
        results.steps / 1_000_000,
    );
    match failures.is_empty() && results.seeds > 0 {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    }
}
