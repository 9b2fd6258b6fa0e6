//! The steps, in the order in which a mistake is cheapest to find.

use super::command::Worth;
use super::{Context, Step, VerifyError, fuzz};
use crate::progress::say;
use crate::provision::host;

/// The crate whose concurrency is modelled and whose memory accesses are checked.
const DATA_PATH: &str = "nvme-mpt";
/// Sanitizers want the target named, so that build scripts are built without them.
pub(super) const TARGET: &str = "x86_64-unknown-linux-gnu";

pub(super) const ALL: &[Step] = &[
    Step {
        name: "fmt",
        what: "the format of all sources",
        run: fmt,
    },
    Step {
        name: "clippy",
        what: "lints, as errors",
        run: clippy,
    },
    Step {
        name: "doc",
        what: "documentation without broken links",
        run: doc,
    },
    Step {
        name: "test",
        what: "unit tests and those that cross crates",
        run: test,
    },
    Step {
        name: "loom",
        what: "models of what threads do to each other",
        run: loom,
    },
    Step {
        name: "asan",
        what: "the data path's tests under AddressSanitizer",
        run: asan,
    },
    Step {
        name: "fuzz",
        what: "every fuzz target for a while",
        run: fuzz::run,
    },
    Step {
        name: "bench",
        what: "benchmarks run, and commands allocate nothing",
        run: bench,
    },
    Step {
        name: "deny",
        what: "licences and advisories of dependencies",
        run: deny,
    },
    Step {
        name: "e2e",
        what: "guests on a stock QEMU",
        run: e2e,
    },
    Step {
        name: "lab",
        what: "a host in software, with drives, an IOMMU and KVM",
        run: lab,
    },
];

fn fmt(context: &mut Context) -> Result<(), VerifyError> {
    let mut command = context.cargo(&["fmt", "--all", "--check", "--", "--color", "never"]);
    context.run(&mut command, Worth::One)?;
    let mut command = context.cargo(&["fmt", "--check", "--manifest-path"]);
    command.args(["tests/fuzz/Cargo.toml", "--", "--color", "never"]);
    context.run(&mut command, Worth::One)
}

fn clippy(context: &mut Context) -> Result<(), VerifyError> {
    let arguments = [
        "clippy",
        "--workspace",
        "--all-targets",
        "--",
        "--deny",
        "warnings",
    ];
    let mut command = context.cargo(&arguments);
    context.run(&mut command, Worth::One)
}

fn doc(context: &mut Context) -> Result<(), VerifyError> {
    let mut command = context.cargo(&["doc", "--workspace", "--no-deps"]);
    command.env("RUSTDOCFLAGS", "--deny warnings");
    context.run(&mut command, Worth::One)
}

fn test(context: &mut Context) -> Result<(), VerifyError> {
    let mut command = context.cargo(&["test", "--workspace"]);
    context.run(&mut command, Worth::ItsTests)
}

fn loom(context: &mut Context) -> Result<(), VerifyError> {
    let arguments = ["test", "--package", DATA_PATH, "--release", "--lib", "loom"];
    let mut command = context.cargo_apart(&arguments, "loom", "--cfg loom");
    context.run(&mut command, Worth::ItsTests)
}

fn asan(context: &mut Context) -> Result<(), VerifyError> {
    let arguments = ["test", "--package", DATA_PATH, "--target", TARGET, "--lib"];
    let mut command = context.cargo_apart(&arguments, "asan", "-Zsanitizer=address");
    // The sanitizer's switch is unstable; what it instruments is the stable compiler's code.
    command.env("RUSTC_BOOTSTRAP", "1");
    context.run(&mut command, Worth::ItsTests)
}

fn bench(context: &mut Context) -> Result<(), VerifyError> {
    let benches = context.targets("tests/Cargo.toml", "bench")?;
    for name in &benches {
        let arguments = [
            "bench",
            "--package",
            "nvme-mpt-tests",
            "--bench",
            name,
            "--",
            "--smoke",
        ];
        let mut command = context.cargo(&arguments);
        context.run(&mut command, Worth::One)?;
    }
    if benches.is_empty() {
        return Err(VerifyError::NothingTested {
            command: "the benchmarks of tests/Cargo.toml".to_owned(),
            log: context.log.clone(),
        });
    }
    Ok(())
}

fn deny(context: &mut Context) -> Result<(), VerifyError> {
    let cargo_home = std::env::var_os("CARGO_HOME").map(std::path::PathBuf::from);
    let beside_cargo = cargo_home.is_some_and(|home| home.join("bin/cargo-deny").is_file());
    if !host::on_path("cargo-deny") && !beside_cargo {
        say("    NOT CHECKED: cargo-deny is not installed (cargo install cargo-deny)");
        return Ok(());
    }
    let mut command = context.cargo(&["deny", "check"]);
    context.run(&mut command, Worth::One)
}

fn e2e(context: &mut Context) -> Result<(), VerifyError> {
    let filter = context.options.e2e_filter.clone();
    machines(context, "e2e", filter.as_deref())
}

fn lab(context: &mut Context) -> Result<(), VerifyError> {
    let filter = context.options.lab_filter.clone();
    machines(context, "lab", filter.as_deref())
}

/// Tests that boot machines: a program of its own, which tells as it goes on.
fn machines(context: &mut Context, name: &str, filter: Option<&str>) -> Result<(), VerifyError> {
    let mut arguments = vec!["test", "--release", "--package", "integration", "--test"];
    arguments.extend([name, "--"]);
    arguments.extend(filter);
    let mut command = context.cargo(&arguments);
    context.run(&mut command, Worth::ItsTestsShown)
}
