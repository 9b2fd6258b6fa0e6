//! Verification steps, cheapest first.

use std::fs;
use std::io;
use std::num::NonZero;
use std::path::Path;
use std::process::Command;
use std::thread;

use super::command::{CountedChecks, TARGET};
use super::{
    StepCondition, StepContext, VerifyError, VerifyOptions, VerifyStep, cloud_hypervisor, fuzz,
};
use crate::checks::FULL;
use crate::process::{self, ProcessError};
use crate::provision::host::{self, HostTool};
use crate::provision::lab::LabAssets;
use crate::provision::{GuestAssets, KernelChoice, go};

/// Crates with loom models.
const MODELLED: [&str; 2] = ["nvme-guest", "nvme-software"];
/// Crates with unsafe memory accesses.
const UNSAFE: [&str; 3] = ["nvme-mpt-memory", "nvme-software", "nvme-vfio"];
/// Main users of [`UNSAFE`], whose tests take longer.
const USERS_OF_UNSAFE: [&str; 5] = [
    "nvme-lease",
    "nvme-guest",
    "nvme-mpt",
    "nvme-layers",
    "nvme-key-values",
];

/// Crates that are not published.
const PRIVATE: [&str; 7] = [
    "nvme-mpt-tests",
    "nvme-mpt-fuzz-targets",
    "nvme-mpt-simulator",
    "nvme-load",
    "figure-data",
    "figures",
    "integration",
];
/// Crates that VMMs embed, and the command that adds them to Cloud Hypervisor. Their dependencies are the other such crates.
const EMBEDDED: [&str; 3] = ["nvme-mpt-vmm", "vfio-user-server", "patch-vmm"];
/// Manifest of a crate whose `rust-version` is that of all crates that VMMs embed.
const EMBEDDED_MANIFEST: &str = "hypervisor-glue/vmm/Cargo.toml";
/// Crate that is only built on x86-64, since it boots PCs.
const OF_PCS: &str = "integration";
/// Go modules: the Kubernetes driver, and tests of the driver against parts of Kubernetes.
const DRA_MODULES: [&str; 2] = [
    "hypervisor-glue/kubernetes",
    "hypervisor-glue/kubernetes/conformance",
];
/// Go module with the tests that run the driver in a cluster.
const CLUSTER_MODULE: &str = "hypervisor-glue/kubernetes/cluster";
/// Flag of the Go compiler that disables optimization. With this flag, lints, tests and the cluster share one build of the
/// dependencies.
const UNOPTIMIZED: &str = "-gcflags=all=-N -l";
/// Target triple of static programs.
const MUSL: &str = "x86_64-unknown-linux-musl";
const RISCV64: &str = "riscv64gc-unknown-linux-gnu";
const AARCH64: &str = "aarch64-unknown-linux-gnu";
/// Linker and C library that cross-compilation to `AARCH64` needs.
const AARCH64_TOOLS: [HostTool; 2] = [
    HostTool {
        program: "aarch64-linux-gnu-gcc",
        package: "gcc-aarch64-linux-gnu",
    },
    HostTool {
        program: "/usr/aarch64-linux-gnu/lib/crt1.o",
        package: "libc6-dev-arm64-cross",
    },
];

pub(super) const ALL: &[VerifyStep] = &[
    VerifyStep {
        name: "fmt",
        what: "the format of all sources",
        when: StepCondition::Always,
        is_sharded: false,
        has_separate_build: false,
        needs_quiet: false,
        run: fmt,
    },
    VerifyStep {
        name: "clippy",
        what: "lints, as errors",
        when: StepCondition::Always,
        is_sharded: false,
        has_separate_build: false,
        needs_quiet: false,
        run: clippy,
    },
    VerifyStep {
        name: "doc",
        what: "documentation without broken links",
        when: StepCondition::Always,
        is_sharded: false,
        has_separate_build: false,
        needs_quiet: false,
        run: doc,
    },
    VerifyStep {
        name: "test",
        what: "unit tests and those that cross crates",
        when: StepCondition::Always,
        is_sharded: false,
        has_separate_build: false,
        needs_quiet: false,
        run: test,
    },
    VerifyStep {
        name: "fetch",
        what: "a QEMU, kernels and user lands of guests and of the lab, from packages",
        when: StepCondition::Always,
        is_sharded: true,
        has_separate_build: true,
        needs_quiet: false,
        run: fetch,
    },
    VerifyStep {
        name: "loom",
        what: "models of what threads do to each other",
        when: StepCondition::Always,
        is_sharded: false,
        has_separate_build: true,
        needs_quiet: false,
        run: loom,
    },
    VerifyStep {
        name: "simulate",
        what: "the data path on a simulated clock",
        when: StepCondition::Always,
        is_sharded: false,
        has_separate_build: true,
        needs_quiet: false,
        run: simulate,
    },
    VerifyStep {
        name: "guest",
        what: "one guest on a stock QEMU, with a function for each way of doorbells",
        when: StepCondition::UnlessFull,
        is_sharded: false,
        has_separate_build: false,
        needs_quiet: false,
        run: guest,
    },
    VerifyStep {
        name: "host",
        what: "one host in software, with two drives and an IOMMU",
        when: StepCondition::UnlessFull,
        is_sharded: false,
        has_separate_build: false,
        needs_quiet: false,
        run: host,
    },
    VerifyStep {
        name: "remote",
        what: "functions whose back end is reached through the lease protocol",
        when: StepCondition::Full,
        is_sharded: false,
        has_separate_build: false,
        needs_quiet: false,
        run: remote,
    },
    VerifyStep {
        name: "long",
        what: "tests that do something a hundred or a thousand times",
        when: StepCondition::Full,
        is_sharded: false,
        has_separate_build: false,
        needs_quiet: false,
        run: long,
    },
    VerifyStep {
        name: "asan",
        what: "the data path's tests under AddressSanitizer",
        when: StepCondition::Full,
        is_sharded: false,
        has_separate_build: true,
        needs_quiet: false,
        run: asan,
    },
    VerifyStep {
        name: "fuzz",
        what: "every fuzz target for a while",
        when: StepCondition::Full,
        is_sharded: false,
        has_separate_build: false,
        needs_quiet: false,
        run: fuzz::run,
    },
    VerifyStep {
        name: "bench",
        what: "benchmarks run, and commands allocate nothing",
        when: StepCondition::Full,
        is_sharded: false,
        has_separate_build: false,
        needs_quiet: false,
        run: bench,
    },
    VerifyStep {
        name: "deny",
        what: "licences, sources and advisories of dependencies",
        when: StepCondition::Full,
        is_sharded: false,
        has_separate_build: false,
        needs_quiet: false,
        run: deny,
    },
    VerifyStep {
        name: "kubernetes",
        what: "the DRA driver against the server and parts of Kubernetes",
        when: StepCondition::Full,
        is_sharded: false,
        has_separate_build: false,
        needs_quiet: false,
        run: kubernetes,
    },
    VerifyStep {
        name: "cluster",
        what: "the DRA driver in a cluster of etcd, an API server, a scheduler and kubelet",
        when: StepCondition::Full,
        is_sharded: false,
        has_separate_build: false,
        needs_quiet: false,
        run: cluster,
    },
    VerifyStep {
        name: "package",
        what: "crates built from what would be published of them",
        when: StepCondition::Full,
        is_sharded: false,
        has_separate_build: true,
        needs_quiet: false,
        run: package,
    },
    VerifyStep {
        name: "msrv",
        what: "crates for VMMs, with the oldest compiler that they declare",
        when: StepCondition::Full,
        is_sharded: false,
        has_separate_build: true,
        needs_quiet: false,
        run: msrv,
    },
    VerifyStep {
        name: "musl",
        what: "the command as a static program, and its tests",
        when: StepCondition::Full,
        is_sharded: false,
        has_separate_build: true,
        needs_quiet: false,
        run: musl,
    },
    VerifyStep {
        name: "cross",
        what: "a build for 64-bit Arm; crates for VMMs, checked for 64-bit RISC-V",
        when: StepCondition::Full,
        is_sharded: false,
        has_separate_build: true,
        needs_quiet: false,
        run: cross,
    },
    VerifyStep {
        name: "cloud-hypervisor",
        what: "the series of commits for the Cloud Hypervisor that CLOUD_HYPERVISOR_SOURCE names",
        when: StepCondition::Full,
        is_sharded: false,
        has_separate_build: true,
        needs_quiet: false,
        run: cloud_hypervisor::run,
    },
    VerifyStep {
        name: "e2e",
        what: "guests on a stock QEMU",
        when: StepCondition::Full,
        is_sharded: true,
        has_separate_build: false,
        needs_quiet: true,
        run: e2e,
    },
    VerifyStep {
        name: "lab",
        what: "hosts in software, with drives, an IOMMU, KVM and guests of their own",
        when: StepCondition::Full,
        is_sharded: true,
        has_separate_build: false,
        needs_quiet: true,
        run: lab,
    },
];

fn fmt(context: &mut StepContext) -> Result<(), VerifyError> {
    let mut command = context.cargo(&["fmt", "--all", "--check", "--", "--color", "never"]);
    context.run(&mut command, CountedChecks::One)?;
    let mut command = context.cargo(&["fmt", "--check", "--manifest-path"]);
    command.args(["tests/fuzz/Cargo.toml", "--", "--color", "never"]);
    context.run(&mut command, CountedChecks::One)
}

fn clippy(context: &mut StepContext) -> Result<(), VerifyError> {
    let arguments = [
        "clippy",
        "--release",
        "--workspace",
        "--all-targets",
        "--",
        "--deny",
        "warnings",
    ];
    let mut command = context.cargo(&arguments);
    context.run(&mut command, CountedChecks::One)?;
    // `--all-targets` omits targets that `cargo test` does not run by default, so they are named.
    let mut command = context.cargo(&["clippy", "--release", "--workspace"]);
    command.args(["--test", "e2e", "--test", "lab", "--", "--deny", "warnings"]);
    context.run(&mut command, CountedChecks::One)
}

fn doc(context: &mut StepContext) -> Result<(), VerifyError> {
    let mut command = context.cargo(&["doc", "--release", "--workspace", "--no-deps"]);
    command.env("RUSTDOCFLAGS", "--deny warnings");
    context.run(&mut command, CountedChecks::One)
}

/// Tests the whole workspace in the release profile. Guests, lab and benchmarks use the release profile and the whole
/// workspace, too. So dependencies have the same features everywhere, and all share one build. The debug profile's
/// arithmetic checks are enabled in the builds of the steps `asan` and `fuzz`.
fn test(context: &mut StepContext) -> Result<(), VerifyError> {
    let mut command = context.cargo(&["test", "--release", "--workspace", "--no-fail-fast"]);
    command.env(TEST_THREADS, test_threads());
    context.run(&mut command, CountedChecks::Tests)
}

/// Environment variable with the number of concurrent tests of a program.
const TEST_THREADS: &str = "RUST_TEST_THREADS";

/// Returns the number of concurrent tests: twice the number of processors, since tests wait for a third of their time.
fn test_threads() -> String {
    let processors = thread::available_parallelism().map_or(1, NonZero::get);
    (2 * processors).to_string()
}

/// Runs the tests of functions again, with a remote back end over a socket.
fn remote(context: &mut StepContext) -> Result<(), VerifyError> {
    let tests = ["--test", "function", "--test", "physical"];
    let arguments = ["test", "--release", "--workspace"];
    let mut command = context.cargo(&[&arguments[..], &tests, &["--no-fail-fast"]].concat());
    command.env("NVME_MPT_BACKEND", "remote");
    command.env(TEST_THREADS, test_threads());
    context.run(&mut command, CountedChecks::Tests)
}

/// Runs tests that are too slow for the step `test`.
fn long(context: &mut StepContext) -> Result<(), VerifyError> {
    let mut command = context.cargo(&["test", "--release", "--workspace"]);
    command.args(["--test", "command", "--", "--ignored"]);
    command.args(["a_hundred", "a_thousand", "sixty_four"]);
    context.run(&mut command, CountedChecks::Tests)
}

/// Downloads and builds the files of guests and lab, so that later steps need not wait for them.
fn fetch(context: &mut StepContext) -> Result<(), VerifyError> {
    GuestAssets::provide(&KernelChoice::V6_12)?;
    // The nested guests in the lab use kernels that other guests also use.
    LabAssets::provide(&KernelChoice::V6_12)?;
    context.count.passed += 1;
    Ok(())
}

fn loom(context: &mut StepContext) -> Result<(), VerifyError> {
    let packages = MODELLED.map(|package| ["--package", package]).concat();
    let arguments = [
        &["test"][..],
        &packages,
        &["--profile", "model", "--lib", "loom"],
    ]
    .concat();
    let mut command = context.cargo_with_target_dir(&arguments, "loom", "--cfg loom");
    context.run(&mut command, CountedChecks::Tests)
}

/// Simulates seeds that have failed in the past, and new seeds. With `--full`, also simulates twenty thousand more seeds,
/// and runs the scheduler's tests and the lints of code that only the simulation uses.
fn simulate(context: &mut StepContext) -> Result<(), VerifyError> {
    let full = context.options.full;
    let mut command = context.cargo(&["simulate", "--regressions"]);
    context.run(&mut command, CountedChecks::One)?;
    let seeds = if full { "20000" } else { "1000" };
    let mut command = context.cargo(&["simulate", "--seeds", seeds]);
    context.run(&mut command, CountedChecks::One)?;
    if full {
        let flags = "build.rustflags=['--cfg=simulation', '--deny=warnings']";
        for (subcommand, worth) in [
            ("test", CountedChecks::Tests),
            ("clippy", CountedChecks::One),
        ] {
            let arguments = [subcommand, "--profile", "simulation", "--config", flags];
            let mut command = context.cargo(&arguments);
            command.args(["--target-dir", "target/simulation"]);
            command.args(["--package", "nvme-mpt-simulator"]);
            context.run(&mut command, worth)?;
        }
    }
    Ok(())
}

fn asan(context: &mut StepContext) -> Result<(), VerifyError> {
    let users = match context.options.full {
        true => &USERS_OF_UNSAFE[..],
        false => &[],
    };
    let packages = UNSAFE.iter().chain(users);
    let packages: Vec<&str> = packages
        .flat_map(|package| ["--package", package])
        .collect();
    let how = ["--target", TARGET, "--lib", "--all-features"];
    // The step `test` runs the statistics of simulated drives, which take minutes, so they are skipped here. Other tests of
    // queue pairs make the same memory accesses.
    let which = [
        "--",
        "--skip",
        "tests::sharing::",
        "--skip",
        "tests::owners::",
    ];
    let arguments = [&["test"][..], &packages, &how, &which].concat();
    let mut command = context.cargo_with_target_dir(&arguments, "asan", "-Zsanitizer=address");
    // The sanitizer's compiler option is unstable. The instrumented code is that of the stable compiler.
    command.env("RUSTC_BOOTSTRAP", "1");
    // Running the tests takes longer than building them, so they are optimized. Arithmetic checks stay enabled.
    command.env("CARGO_PROFILE_DEV_OPT_LEVEL", "1");
    command.env("CARGO_PROFILE_DEV_LTO", "off");
    command.env("CARGO_PROFILE_DEV_INCREMENTAL", "false");
    // Needed for functions and line numbers in reports.
    command.env("CARGO_PROFILE_DEV_DEBUG", "line-tables-only");
    context.run(&mut command, CountedChecks::Tests)
}

fn bench(context: &mut StepContext) -> Result<(), VerifyError> {
    let manifests = ["tests/Cargo.toml", "integration/Cargo.toml"];
    let mut benches = Vec::new();
    for manifest in manifests {
        benches.extend(context.targets(manifest, "bench")?);
    }
    for name in &benches {
        let arguments = ["bench", "--workspace", "--bench", name, "--", "--smoke"];
        let mut command = context.cargo(&arguments);
        context.run(&mut command, CountedChecks::One)?;
    }
    if benches.is_empty() {
        return Err(VerifyError::NothingTested {
            command: format!("the benchmarks of {manifests:?}"),
            log: context.log.clone(),
        });
    }
    Ok(())
}

fn deny(context: &mut StepContext) -> Result<(), VerifyError> {
    let check = |checks: &[&str]| {
        let mut command = context.cargo(&["deny", "check"]);
        command.args(checks);
        command
    };
    let (mut offline, mut advisories) = (
        check(&["bans", "licenses", "sources"]),
        check(&["advisories"]),
    );
    context.run(&mut offline, CountedChecks::One)?;
    match context.run(&mut advisories, CountedChecks::One) {
        // The database of advisories is not in a package registry, and some networks cannot reach it.
        Err(VerifyError::Failed { what, .. }) if what.contains(NO_ADVISORIES) => {
            let what = "advisories of dependencies: their database cannot be fetched from here";
            context.not_checked.push(what.to_owned());
            Ok(())
        }
        result => result,
    }
}

/// Message of cargo-deny if it cannot fetch the database of advisories.
const NO_ADVISORIES: &str = "failed to fetch advisory database";

/// Packages the current sources, committed or not, as for publishing, in the order in which crates would be published. The
/// directory has a new name: cargo identifies unpacked crates by the directory's name. With the name of an earlier run,
/// cargo would reuse the crates of that run, if their version is the same.
fn package(context: &mut StepContext) -> Result<(), VerifyError> {
    let parent = crate::target_dir().join("packages");
    // A run that was killed may have left directories.
    let removed = match fs::remove_dir_all(&parent) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    };
    let dir = removed
        .and_then(|()| fs::create_dir_all(&parent))
        .and_then(|()| tempfile::tempdir_in(&parent));
    let dir = dir.map_err(|source| VerifyError::File {
        path: parent,
        source,
    })?;
    let arguments = ["publish", "--dry-run", "--workspace", "--allow-dirty"];
    let mut command = context.cargo(&arguments);
    command.args(PRIVATE.map(|package| ["--exclude", package]).as_flattened());
    command.arg("--target-dir").arg(dir.path());
    context.run(&mut command, CountedChecks::One)
}

/// Checks the crates that VMMs embed with the oldest compiler that they declare, in a build directory of its own. The
/// database of keys and values declares a newer compiler, so the second command lets cargo ignore what crates declare.
fn msrv(context: &mut StepContext) -> Result<(), VerifyError> {
    let version = context.rust_version(EMBEDDED_MANIFEST)?;
    if let Err(error) = ensure_toolchain(&version) {
        let what = format!("crates for VMMs with Rust {version}: {error}");
        context.not_checked.push(what);
        return Ok(());
    }
    let declared = ["--features", "nvme-mpt-vmm/kvm,nvme-mpt-vmm/toml"];
    let all = ["--all-features", "--ignore-rust-version"];
    for features in [declared, all] {
        let mut command = Command::new("rustup");
        command
            .args(["run", &version, "cargo", "check", "--locked"])
            .args(
                EMBEDDED
                    .map(|package| ["--package", package])
                    .as_flattened(),
            )
            .args(features)
            .current_dir(crate::workspace_dir())
            .env("CARGO_TARGET_DIR", context.dir.join("msrv"))
            .env("CARGO_TERM_COLOR", "never");
        context.run(&mut command, CountedChecks::One)?;
    }
    Ok(())
}

/// Ensures that rustup has a toolchain. Installs it if it is missing.
fn ensure_toolchain(version: &str) -> Result<(), ProcessError> {
    let mut installed = Command::new("rustup");
    installed.args(["run", version, "cargo", "--version"]);
    let install = ["toolchain", "install", version, "--profile", "minimal"];
    process::run(&mut installed)
        .or_else(|_| process::run(Command::new("rustup").args(install)))
        .map(drop)
}

/// Runs the tests of the command with a static program, and checks that it is static. The tests are static programs, too.
fn musl(context: &mut StepContext) -> Result<(), VerifyError> {
    process::run(Command::new("rustup").args(["target", "add", MUSL]))?;
    let build = context.dir.join("musl");
    let arguments = ["test", "--release", "--target", MUSL, "--no-fail-fast"];
    let mut command = context.cargo(&arguments);
    command
        .args(["--package", "nvme-mpt-cli", "--test", "command"])
        .env("CARGO_TARGET_DIR", &build);
    context.run(&mut command, CountedChecks::Tests)?;
    let program = build.join(MUSL).join("release/nvme-mpt");
    let mut headers = Command::new("readelf");
    headers
        .args(["--wide", "--program-headers", "--dynamic"])
        .arg(&program);
    let headers = process::run(&mut headers)?;
    if headers.contains("INTERP") || headers.contains("(NEEDED)") {
        return Err(VerifyError::Failed {
            command: format!("readelf {}", program.display()),
            log: context.log.clone(),
            what: format!("The program is not static:\n{headers}"),
        });
    }
    context.count.passed += 1;
    Ok(())
}

/// Builds for 64-bit Arm, and checks for RISC-V what a VMM there would embed. A check needs no linker.
fn cross(context: &mut StepContext) -> Result<(), VerifyError> {
    host::ensure(&AARCH64_TOOLS)?;
    process::run(Command::new("rustup").args(["target", "add", AARCH64, RISCV64]))?;
    let arguments = ["--workspace", "--exclude", OF_PCS, "--target", AARCH64];
    let mut command = context.cargo(&["build", "--all-features", "--all-targets"]);
    command.args(arguments).env(
        "CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER",
        AARCH64_TOOLS[0].program,
    );
    context.run(&mut command, CountedChecks::One)?;
    let mut command = context.cargo(&["check", "--all-features", "--target", RISCV64]);
    command.args(
        EMBEDDED
            .map(|package| ["--package", package])
            .as_flattened(),
    );
    context.run(&mut command, CountedChecks::One)
}

/// Tests the Kubernetes driver with the server that is built from the current sources.
fn kubernetes(context: &mut StepContext) -> Result<(), VerifyError> {
    build_server(context)?;
    let go = go::go()?;
    let mut format = in_module(&go.with_file_name("gofmt"), DRA_MODULES[0], &["-l", "."]);
    let unformatted = process::run(&mut format)?;
    if !unformatted.trim().is_empty() {
        return Err(VerifyError::Failed {
            command: "gofmt -l .".to_owned(),
            log: context.log.clone(),
            what: format!("Run gofmt -w in {}:\n{unformatted}", DRA_MODULES[0]),
        });
    }
    for module in DRA_MODULES {
        let mut vet = in_module(&go, module, &["vet", UNOPTIMIZED, "./..."]);
        context.run(&mut vet, CountedChecks::One)?;
        let arguments = ["test", "-vet=off", "-count=1", UNOPTIMIZED, "./..."];
        let mut test = in_module(&go, module, &arguments);
        context.run(&mut test, CountedChecks::Tests)?;
    }
    Ok(())
}

/// Tests the driver in a cluster. The programs of the cluster stay in a directory, since building them takes ten minutes or
/// more.
fn cluster(context: &mut StepContext) -> Result<(), VerifyError> {
    let go = match go::go() {
        Ok(go) => go,
        Err(error) => {
            let what = format!("a cluster of Kubernetes: it is built with Go: {error}");
            context.not_checked.push(what);
            return Ok(());
        }
    };
    build_server(context)?;
    let mut vet = in_module(&go, CLUSTER_MODULE, &["vet", UNOPTIMIZED, "./..."]);
    context.run(&mut vet, CountedChecks::One)?;
    // Without -v, Go does not print why tests were skipped.
    let how = ["-vet=off", "-count=1", "-v", "-timeout=3h"];
    let arguments = [&["test"][..], &how, &[UNOPTIMIZED, "."]].concat();
    let mut test = in_module(&go, CLUSTER_MODULE, &arguments);
    test.env("NVME_MPT_CLUSTER_PROGRAMS", context.dir.join("cluster"));
    context.run(&mut test, CountedChecks::Tests)
}

fn build_server(context: &mut StepContext) -> Result<(), VerifyError> {
    let mut build = context.cargo(&["build", "--release", "--workspace", "--bin", "nvme-mpt"]);
    context.run(&mut build, CountedChecks::One)
}

/// Returns a command that runs a Go program in a module. An environment variable has the server's path.
fn in_module(program: &Path, module: &str, arguments: &[&str]) -> Command {
    let server = crate::target_dir().join("release/nvme-mpt");
    let mut command = Command::new(program);
    command
        .args(arguments)
        .current_dir(crate::workspace_dir().join(module))
        .env("CGO_ENABLED", "0")
        .env("GOTOOLCHAIN", "local")
        .env("NVME_MPT_BINARY", server);
    command
}

fn guest(context: &mut StepContext) -> Result<(), VerifyError> {
    machines(context, "e2e", &["modes::"], CountedChecks::TestsShown)
}

/// Runs the lab's native checks. The step `guest` runs concurrently and shows its output, so that of these checks is not
/// shown.
fn host(context: &mut StepContext) -> Result<(), VerifyError> {
    machines(
        context,
        "lab",
        &["--once", "native::"],
        CountedChecks::Tests,
    )
}

fn e2e(context: &mut StepContext) -> Result<(), VerifyError> {
    let VerifyOptions {
        e2e_filter,
        e2e_skip,
        ..
    } = context.options;
    let skip = e2e_skip.iter().flat_map(|skip| ["--skip", skip.as_str()]);
    let arguments = skip.chain(e2e_filter.as_deref()).collect();
    run_machines_shard(context, "e2e", arguments)
}

fn lab(context: &mut StepContext) -> Result<(), VerifyError> {
    let filter = context.options.lab_filter.as_deref();
    run_machines_shard(context, "lab", filter.into_iter().collect())
}

fn run_machines_shard(
    context: &mut StepContext,
    name: &str,
    more: Vec<&str>,
) -> Result<(), VerifyError> {
    let shard = context.options.shard.map(|shard| shard.to_string());
    let mut arguments = more;
    if let Some(shard) = &shard {
        arguments.extend(["--shard", shard]);
    }
    machines(context, name, &arguments, CountedChecks::TestsShown)
}

/// Runs a program of checks that boot machines, which reports its progress.
fn machines(
    context: &mut StepContext,
    name: &str,
    more: &[&str],
    worth: CountedChecks,
) -> Result<(), VerifyError> {
    let mut arguments = vec!["test", "--release", "--workspace", "--test"];
    arguments.extend([name, "--"]);
    arguments.extend(more);
    let mut command = context.cargo(&arguments);
    if context.options.full {
        command.env(FULL, "1");
    }
    context.run(&mut command, worth)
}
