//! Tests of `.ci/run` with a fake cargo: order of the commands, exit status, and cleanup.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Mutex, PoisonError};
use std::thread::sleep;
use std::time::Duration;

use tempfile::TempDir;

/// Serializes tests. A child that another test forks may have a new program open for writing, which then cannot start.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// A fake cargo. It sources the test's shell code for `install` and `verify`, and has no `deny` command.
const CARGO: &str = r#"#!/bin/sh
echo "$*" >>"$STUB/calls"
case "$1" in
deny) exit 1 ;;
install) . "$STUB/install" ;;
verify) [ $# -gt 1 ] || . "$STUB/verify" ;;
esac
"#;

/// Runs the script. `install` and `verify` are shell code for `cargo install` and the first `cargo verify`. Returns the output
/// and the directory with the fake programs.
fn run(install: &str, verify: &str) -> (Output, TempDir) {
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let dir = tempfile::tempdir().unwrap();
    let programs = dir.path();
    for (name, text) in [("install", install), ("verify", verify)] {
        fs::write(programs.join(name), text).unwrap();
    }
    let none = "#!/bin/sh\nexit 1\n";
    for (name, text) in [
        ("cargo", CARGO),
        ("cc", none),
        ("c++", none),
        ("apt-get", none),
    ] {
        let path = programs.join(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    }
    let temporary = programs.join("temporary");
    fs::create_dir(&temporary).unwrap();
    let others = std::env::var_os("PATH").unwrap_or_default();
    let paths = [programs.to_owned()].into_iter();
    let paths = paths.chain(std::env::split_paths(&others));
    let script = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../.ci/run");
    let output = Command::new(script)
        .env("PATH", std::env::join_paths(paths).unwrap())
        .env("STUB", programs)
        .env("TMPDIR", &temporary)
        .output()
        .unwrap();
    assert_eq!(
        fs::read_dir(temporary).unwrap().count(),
        0,
        "files are left"
    );
    (output, dir)
}

fn has_second_part(dir: &TempDir) -> bool {
    let calls = fs::read_to_string(dir.path().join("calls")).unwrap();
    calls.lines().any(|call| call.starts_with("verify --only "))
}

#[test]
fn ci_runs_its_second_part_after_a_successful_first_part() {
    let (output, dir) = run(":", ":");
    assert!(output.status.success(), "{output:?}");
    assert!(has_second_part(&dir));
}

#[test]
fn ci_exits_with_the_first_failure() {
    for (install, verify) in [("echo no such crate; exit 101", ":"), (":", "exit 3")] {
        let (output, dir) = run(install, verify);
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        assert!(!has_second_part(&dir));
        let text = String::from_utf8_lossy(&output.stderr);
        let is_told = text.lines().any(|line| line == "no such crate");
        assert_eq!(is_told, install != ":", "{text}");
    }
}

/// Returns whether a process is running. An ended process exists until its parent has waited for it.
fn is_running(process: &str) -> bool {
    let stat = fs::read_to_string(Path::new("/proc").join(process).join("stat"));
    stat.is_ok_and(|stat| !stat.contains(") Z "))
}

#[test]
fn ending_a_ci_run_ends_its_processes() {
    let install = "echo $$ >\"$STUB/new\"; mv \"$STUB/new\" \"$STUB/process\"; exec sleep 600";
    let verify = "until [ -e \"$STUB/process\" ]; do sleep 0.01; done; kill -TERM $PPID";
    let (output, dir) = run(install, verify);
    assert!(!output.status.success(), "{output:?}");
    assert!(!has_second_part(&dir));
    let process = fs::read_to_string(dir.path().join("process")).unwrap();
    let mut reads = 0;
    while is_running(process.trim()) {
        reads += 1;
        assert!(reads < 18_000, "cargo-deny is built still");
        sleep(Duration::from_millis(10));
    }
}
