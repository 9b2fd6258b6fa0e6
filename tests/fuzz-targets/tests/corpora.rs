//! Regression test: runs all inputs of the fuzz corpora, in a build without instrumentation.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use libtest_mimic::{Arguments, Failed, Trial};
use nvme_mpt_fuzz_targets::{ALL, Target};

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    // Targets count the process's open file descriptors, so only one test may run at a time.
    arguments.test_threads = Some(1);
    let corpora = ALL
        .iter()
        .map(|target| Trial::test(target.name, || run(target)));
    let complete = Trial::test("each_program_and_each_corpus_has_a_target", complete);
    let trials = corpora.chain([complete]).collect();
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// Returns the directory that contains the fuzz programs and the corpora.
fn corpus_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz")
}

/// Checks that each target has a program and a corpus, and that each program and corpus has a target.
fn complete() -> Result<(), Failed> {
    let targets: BTreeSet<_> = ALL.iter().map(|target| target.name.to_owned()).collect();
    for what in ["fuzz_targets", "corpus"] {
        let mut names = BTreeSet::new();
        for entry in fs::read_dir(corpus_dir().join(what))? {
            let path = entry?.path();
            let name = path.file_stem().unwrap_or_default();
            names.insert(name.to_string_lossy().into_owned());
        }
        if names != targets {
            return Err(format!("{what} has {names:?}, and the targets are {targets:?}").into());
        }
    }
    Ok(())
}

/// Runs the target with all inputs of its corpus. The test fails if a run panics.
fn run(target: &Target) -> Result<(), Failed> {
    let mut inputs = 0;
    for entry in fs::read_dir(corpus_dir().join("corpus").join(target.name))? {
        let path = entry?.path();
        eprintln!("{}", path.display());
        (target.run)(&fs::read(path)?);
        inputs += 1;
    }
    match inputs {
        0 => Err("it has no input".into()),
        _ => Ok(()),
    }
}
