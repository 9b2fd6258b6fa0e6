//! Runs each fuzz target for a limited time by libFuzzer. This needs only the stable compiler.

use std::fs;
use std::num::NonZero;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::thread::{self, ScopedJoinHandle};

use super::command::{CountedChecks, TARGET};
use super::{StepContext, VerifyError};
use crate::process;
use crate::progress::print_line;

const MANIFEST: &str = "tests/fuzz/Cargo.toml";

/// Timeout of one input, beyond which it counts as a hang. A machine may be stopped for a minute.
const TIMEOUT: &str = "-timeout=300";

/// Compiler options for libFuzzer (LLVM, SanitizerCoverage): counters of edges and traces of comparisons.
const FLAGS: &str = "--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
     -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
     -Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares";

/// Builds all targets and runs them, each on one thread. As many targets run concurrently as there are processors.
pub(super) fn run(context: &mut StepContext) -> Result<(), VerifyError> {
    let at_once = thread::available_parallelism().map_or(1, NonZero::get);
    let build = [
        "build",
        "--release",
        "--target",
        TARGET,
        "--manifest-path",
        MANIFEST,
    ];
    let mut command = context.cargo_with_target_dir(&build, "fuzz", FLAGS);
    context.run(&mut command, CountedChecks::One)?;

    let programs = context.dir.join("fuzz").join(TARGET).join("release");
    let targets = context.targets(MANIFEST, "bin")?;
    if targets.is_empty() {
        return Err(VerifyError::NothingTested {
            command: format!("the targets of {MANIFEST}"),
            log: context.log.clone(),
        });
    }
    let targets = Mutex::new(targets.into_iter());
    let next = || {
        let mut targets = targets.lock().unwrap_or_else(PoisonError::into_inner);
        targets.next()
    };
    let work = |mut own: StepContext| {
        let mut result = Ok(());
        while let Some(target) = next() {
            own.log = own.log.with_file_name(format!("fuzz-{target}.log"));
            // Removes the log of an earlier run.
            let _ = fs::remove_file(&own.log);
            let outcome = run_target(&mut own, &target, &programs.join(&target));
            own.count.failed += u64::from(outcome.is_err());
            // The other targets run even if one fails.
            result = result.and(outcome);
        }
        (own.count, result)
    };
    let ran: Vec<_> = thread::scope(|scope| {
        let start = |_| scope.spawn(|| work(context.with_separate_counts()));
        let workers: Vec<_> = (0..at_once).map(start).collect();
        workers.into_iter().map(ScopedJoinHandle::join).collect()
    });
    let mut result = Ok(());
    for worker in ran {
        let (count, outcome) = worker.unwrap_or_else(|panic| resume_unwind(panic));
        context.count.add(count);
        result = result.and(outcome);
    }
    result
}

fn run_target(context: &mut StepContext, target: &str, program: &Path) -> Result<(), VerifyError> {
    let finds = create_dir(&context.dir.join("fuzz-finds").join(target))?;
    let artifacts = create_dir(&context.dir.join("fuzz-artifacts").join(target))?;
    // Artifacts of earlier runs do not count.
    let before = files(&artifacts)?;
    let seconds = context.options.fuzz_seconds;
    let mut command = Command::new(program);
    command
        .arg(format!("-max_total_time={seconds}"))
        .arg(format!("-artifact_prefix={}/", artifacts.display()))
        .args([TIMEOUT, "-rss_limit_mb=2048", "-print_final_stats=1"])
        // libFuzzer writes new inputs to the first directory, and only reads the directories behind it.
        .arg(&finds);
    let corpus = corpus(target);
    if corpus.is_dir() {
        command.arg(corpus);
    }
    let result = context.run(&mut command, CountedChecks::One);
    let found = files(&artifacts)?
        .into_iter()
        .find(|file| !before.contains(file));
    match (result, found) {
        (_, Some(artifact)) => Err(VerifyError::Fuzz {
            target: target.to_owned(),
            artifact,
            tail: process::file_tail(&context.log),
        }),
        (Ok(()), None) => {
            print_line(&format!("    {target}: nothing found in {seconds} s"));
            Ok(())
        }
        (Err(error), None) => Err(error),
    }
}

fn corpus(target: &str) -> PathBuf {
    crate::workspace_dir()
        .join("tests/fuzz/corpus")
        .join(target)
}

fn create_dir(path: &Path) -> Result<PathBuf, VerifyError> {
    fs::create_dir_all(path).map_err(|source| VerifyError::File {
        path: path.to_owned(),
        source,
    })?;
    Ok(path.to_owned())
}

fn files(dir: &Path) -> Result<Vec<PathBuf>, VerifyError> {
    let at = |source| VerifyError::File {
        path: dir.to_owned(),
        source,
    };
    fs::read_dir(dir)
        .map_err(at)?
        .map(|entry| Ok(entry.map_err(at)?.path()))
        .collect()
}
