//! The series of commits for Cloud Hypervisor, in a clone of the checkout that the user names: no registry has its source.

use std::env;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::command::CountedChecks;
use super::{StepContext, VerifyError};
use crate::process;

/// Environment variable with the path of a git checkout of Cloud Hypervisor.
const SOURCE_VARIABLE: &str = "CLOUD_HYPERVISOR_SOURCE";
/// Branch that the series makes.
const BRANCH: &str = "nvme-mpt";
const FEATURE: [&str; 2] = ["--features", "nvme_mpt"];
/// Features of the crate `vmm` alone, which needs a hypervisor.
const FEATURES_OF_VMM: [&str; 2] = ["--features", "kvm,nvme_mpt"];

/// Makes the branch of commits, and checks that it adds no dependency without its feature. Checks its last commit as Cloud
/// Hypervisor's own integration does: format, lints, which compile its integration tests as well, and the tests of its crate
/// `vmm`. Checks that each commit compiles.
pub(super) fn run(context: &mut StepContext) -> Result<(), VerifyError> {
    let Some(source) = env::var_os(SOURCE_VARIABLE).map(PathBuf::from) else {
        let what = format!("the series for Cloud Hypervisor: set {SOURCE_VARIABLE} to a checkout");
        context.not_checked.push(what);
        return Ok(());
    };
    let source = fs::canonicalize(&source).map_err(|error| file_error(&source, error))?;
    let clone = context.dir.join("cloud-hypervisor");
    match fs::remove_dir_all(&clone) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(file_error(&clone, error));
        }
        _ => {}
    }
    // The user's checkout stays as it is.
    process::run(git(&source).args(["clone", "--quiet", "."]).arg(&clone))?;

    let dependencies_before = dependencies(context, &clone)?;
    // The branch needs a clean checkout, and cargo may have updated the lock file.
    process::run(git(&clone).args(["checkout", "--quiet", "--", "."]))?;

    let arguments = ["run", "--release", "--package", "patch-vmm", "--"];
    let mut patch = context.cargo(&arguments);
    patch.arg(&clone).args(["--branch", BRANCH]);
    context.run(&mut patch, CountedChecks::One)?;
    let commits = format!("HEAD..{BRANCH}");
    let commits = process::run(git(&clone).args(["rev-list", "--reverse", &commits]))?;
    for commit in commits.lines() {
        process::run(git(&clone).args(["checkout", "--quiet", commit]))?;
        let arguments = [
            &["check", "--package", "vmm", "--tests"][..],
            &FEATURES_OF_VMM,
        ]
        .concat();
        in_clone(context, &clone, &arguments, CountedChecks::One)?;
    }
    if dependencies(context, &clone)? != dependencies_before {
        let changed =
            "its dependencies without the feature nvme_mpt differ from those before the branch";
        return Err(file_error(&clone, io::Error::other(changed)));
    }
    context.count.passed += 1;
    let lints = [&["clippy", "--all-targets"][..], &FEATURE].concat();
    let lints = [&lints[..], &["--", "--deny", "warnings"]].concat();
    in_clone(context, &clone, &lints, CountedChecks::One)?;
    let tests = [&["test", "--package", "vmm", "--lib"][..], &FEATURES_OF_VMM].concat();
    in_clone(context, &clone, &tests, CountedChecks::Tests)?;
    let format = ["+nightly", "fmt", "--all", "--check"];
    match process::run(Command::new("cargo").args(["+nightly", "fmt", "--version"])) {
        Ok(_) => {
            let mut command = Command::new("cargo");
            command.args(format).current_dir(&clone);
            context.run(&mut command, CountedChecks::One)
        }
        Err(_) => {
            let what = "the format of the series: its options need a nightly rustfmt";
            context.not_checked.push(what.to_owned());
            Ok(())
        }
    }
}

/// Returns the dependencies of the program with its default features, as cargo prints them.
fn dependencies(context: &StepContext, clone: &Path) -> Result<String, VerifyError> {
    let arguments = ["tree", "--edges", "normal", "--package", "cloud-hypervisor"];
    Ok(process::run(context.cargo(&arguments).current_dir(clone))?)
}

fn in_clone(
    context: &mut StepContext,
    clone: &Path,
    arguments: &[&str],
    worth: CountedChecks,
) -> Result<(), VerifyError> {
    let mut command = context.cargo(arguments);
    command.current_dir(clone).env(
        "CARGO_TARGET_DIR",
        context.dir.join("cloud-hypervisor-build"),
    );
    context.run(&mut command, worth)
}

fn git(dir: &Path) -> Command {
    let mut command = Command::new("git");
    command.arg("-C").arg(dir);
    command
}

fn file_error(path: &Path, source: io::Error) -> VerifyError {
    VerifyError::File {
        path: path.to_owned(),
        source,
    }
}
