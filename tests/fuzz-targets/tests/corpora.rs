//! Every input from which a fuzz target ever learned, in a build without instruments.

use std::fs;
use std::path::Path;
use std::process::ExitCode;

use libtest_mimic::{Arguments, Failed, Trial};
use nvme_mpt_fuzz_targets::{ALL, Target};

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    // Targets count descriptors of the process.
    arguments.test_threads = Some(1);
    let trials = ALL
        .iter()
        .map(|target| Trial::test(target.name, || run(target)));
    libtest_mimic::run(&arguments, trials.collect()).exit_code()
}

/// Runs the corpus of a target. A panic fails it.
fn run(target: &Target) -> Result<(), Failed> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus");
    let mut inputs = 0;
    for entry in fs::read_dir(folder.join(target.name))? {
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
