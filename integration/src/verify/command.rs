//! Runs a program that is a part of a step. Writes the program's output to the step's log, and counts the results of tests.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use serde_json::{Value, json};

use super::{CheckCounts, StepContext, VerifyError};
use crate::guest::LOST_GUEST_LINE;
use crate::process;
use crate::progress::{print_line, seconds};

/// Target triple of builds with sanitizers. Because the target is named, cargo builds the build scripts without the
/// sanitizer.
pub(super) const TARGET: &str = "x86_64-unknown-linux-gnu";

/// Number of checks for which a successful program counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CountedChecks {
    /// One check.
    One,
    /// The number of tests in the program's output, which must not be 0.
    Tests,
    /// The number of tests in the output, which is also shown while the program runs.
    TestsShown,
}

impl StepContext<'_> {
    /// Returns a cargo command in the workspace.
    pub(super) fn cargo(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        command
            .args(arguments)
            .current_dir(crate::workspace_dir())
            .env("CARGO_TERM_COLOR", "never");
        command
    }

    /// Returns a cargo command with a separate build directory and with other compiler flags.
    pub(super) fn cargo_with_target_dir(
        &self,
        arguments: &[&str],
        build: &str,
        flags: &str,
    ) -> Command {
        let mut command = self.cargo(arguments);
        command
            .env("CARGO_TARGET_DIR", self.dir.join(build))
            .env("RUSTFLAGS", flags);
        command
    }

    /// Returns the targets of a `kind` ("bin", "bench") of a package, by the path of its manifest.
    pub(super) fn targets(&self, manifest: &str, kind: &str) -> Result<Vec<String>, VerifyError> {
        let package = self.package(manifest)?;
        let targets = package["targets"].as_array().cloned().unwrap_or_default();
        Ok(targets
            .iter()
            .filter(|target| target["kind"][0] == kind)
            .filter_map(|target| Some(target["name"].as_str()?.to_owned()))
            .collect())
    }

    /// Returns the oldest compiler that a package declares, by the path of its manifest.
    pub(super) fn rust_version(&self, manifest: &str) -> Result<String, VerifyError> {
        let package = self.package(manifest)?;
        let version = package["rust_version"].as_str();
        version.map(str::to_owned).ok_or_else(|| VerifyError::File {
            path: manifest.into(),
            source: io::Error::other("rust-version is missing"),
        })
    }

    /// Returns what cargo knows of a package, by the path of its manifest. It is null if cargo does not know the package.
    fn package(&self, manifest: &str) -> Result<Value, VerifyError> {
        let arguments = [
            "metadata",
            "--no-deps",
            "--format-version",
            "1",
            "--manifest-path",
        ];
        let text = process::run(self.cargo(&arguments).arg(manifest))?;
        let path = crate::workspace_dir().join(manifest);
        let metadata: Value = serde_json::from_str(&text).map_err(|error| VerifyError::File {
            path: path.clone(),
            source: error.into(),
        })?;
        // In a workspace, cargo lists all packages.
        let packages = metadata["packages"].as_array().cloned().unwrap_or_default();
        let package = packages
            .into_iter()
            .find(|package| package["manifest_path"] == json!(path));
        Ok(package.unwrap_or_default())
    }

    /// Runs a program that must succeed.
    pub(super) fn run(
        &mut self,
        command: &mut Command,
        worth: CountedChecks,
    ) -> Result<(), VerifyError> {
        let line = describe(command);
        let ran = self.run_logged(command, &line, worth == CountedChecks::TestsShown)?;
        let ProgramResult {
            status,
            count,
            failures,
            programs,
            not_checked,
        } = ran;
        if let Some(slowest) = programs.slowest() {
            let step = self.log.file_stem().unwrap_or_default();
            print_line(&format!("    slowest of {}: {slowest}", step.display()));
        }
        for what in not_checked {
            if !self.not_checked.contains(&what) {
                self.not_checked.push(what);
            }
        }
        match worth {
            CountedChecks::One => {
                self.count.built += count.built;
                self.count.passed += u64::from(status.success());
            }
            CountedChecks::Tests | CountedChecks::TestsShown => self.count.add(count),
        }
        if !status.success() {
            return Err(VerifyError::Failed {
                command: line,
                log: self.log.clone(),
                what: failures
                    .into_messages()
                    .unwrap_or_else(|| process::file_tail(&self.log)),
            });
        }
        if worth != CountedChecks::One && count.passed + count.failed == 0 {
            return Err(VerifyError::NothingTested {
                command: line,
                log: self.log.clone(),
            });
        }
        Ok(())
    }

    fn run_logged(
        &self,
        command: &mut Command,
        line: &str,
        shown: bool,
    ) -> Result<ProgramResult, VerifyError> {
        let at = |source| VerifyError::File {
            path: self.log.clone(),
            source,
        };
        let mut log = append(&self.log).map_err(at)?;
        writeln!(log, "$ {line}").map_err(at)?;
        let (output, input) = io::pipe().map_err(at)?;
        let error = input.try_clone().map_err(at)?;
        let spawned = command
            .stdin(Stdio::null())
            .stdout(input)
            .stderr(error)
            .spawn();
        let mut child = spawned.map_err(|source| {
            VerifyError::Process(process::ProcessError::Start {
                command: line.to_owned(),
                source,
            })
        })?;
        // The command holds the write end of the pipe, which must be closed for the reading to end.
        command.stdout(Stdio::null()).stderr(Stdio::null());

        let mut count = CheckCounts::default();
        let mut failures = FailureMessages::default();
        let mut programs = TestPrograms::default();
        let mut not_checked = Vec::new();
        let mut lines = BufReader::new(output);
        let mut said = Vec::new();
        while lines.read_until(b'\n', &mut said).map_err(at)? > 0 {
            log.write_all(&said).map_err(at)?;
            let text = String::from_utf8_lossy(&said);
            if let Some(more) = results_in(text.trim_end()) {
                count.add(more);
            }
            failures.read(text.trim_end());
            programs.read(text.trim_end());
            not_checked.extend(not_checked_in(text.trim_end()));
            if shown {
                print_line(&format!("    {}", text.trim_end()));
            }
            said.clear();
        }
        let status = child.wait().map_err(at)?;
        Ok(ProgramResult {
            status,
            count,
            failures,
            programs,
            not_checked,
        })
    }
}

/// Result of a program.
struct ProgramResult {
    status: ExitStatus,
    count: CheckCounts,
    failures: FailureMessages,
    programs: TestPrograms,
    not_checked: Vec<String>,
}

/// Test programs that cargo has run, each with its time in seconds.
#[derive(Debug, Default)]
struct TestPrograms {
    running: Option<String>,
    durations: Vec<(f64, String)>,
}

impl TestPrograms {
    /// Maximum number of slow programs that are reported, and the minimum time in seconds of such a program.
    const MOST: usize = 5;
    const LONG: f64 = 10.0;

    /// Parses a line: `     Running tests/a/main.rs (target/release/deps/a-0123)`, or `test result: …; finished in 1.50s`.
    fn read(&mut self, line: &str) {
        if let Some((_, program)) = line.split_once("/deps/")
            && line.trim_start().starts_with("Running ")
        {
            let name = program.rsplit_once('-').map_or(program, |(name, _)| name);
            self.running = Some(name.to_owned());
        } else if let Some((_, time)) = line.split_once("; finished in ")
            && line.starts_with("test result: ")
            && let Some(Ok(took)) = time.strip_suffix('s').map(str::parse::<f64>)
            && let Some(name) = self.running.take()
        {
            self.durations.push((took, name));
        }
    }

    /// Returns the slowest programs; `None` if only one program ran, or if none took long.
    fn slowest(mut self) -> Option<String> {
        let are_several = self.durations.len() > 1;
        self.durations.retain(|(took, _)| *took >= Self::LONG);
        self.durations.sort_by(|(a, _), (b, _)| b.total_cmp(a));
        let lines = self.durations.iter().take(Self::MOST).map(|(took, name)| {
            let took = seconds(Duration::from_secs_f64(*took));
            format!("{name} {took}")
        });
        let lines: Vec<String> = lines.collect();
        (are_several && !lines.is_empty()).then(|| lines.join(", "))
    }
}

/// Failure messages in the output of test programs.
///
/// Cargo continues after a program with failures, so the end of the output need not contain them.
#[derive(Debug, Default)]
struct FailureMessages {
    lines: Vec<String>,
    is_inside: bool,
}

impl FailureMessages {
    /// Maximum number of lines of messages.
    const MOST: usize = 300;

    /// Parses a line. The messages stand behind `failures:`, each below `---- NAME stdout ----`. The names of the tests
    /// stand behind a second `failures:`.
    fn read(&mut self, line: &str) {
        if line == "failures:" {
            self.is_inside = true;
        } else if line.starts_with("test result: ") {
            self.is_inside = false;
        } else if self.is_inside && self.lines.len() < Self::MOST {
            self.lines.push(line.to_owned());
        }
    }

    /// Returns the messages; `None` if no test failed.
    fn into_messages(self) -> Option<String> {
        let is_told = self.lines.iter().any(|line| !line.is_empty());
        is_told.then(|| self.lines.join("\n"))
    }
}

fn append(path: &Path) -> io::Result<File> {
    File::options().create(true).append(true).open(path)
}

/// Returns a command line as a person would type it, with those environment variables that matter.
fn describe(command: &Command) -> String {
    let mut words: Vec<String> = command
        .get_envs()
        .filter_map(|(key, value)| {
            Some(format!(
                "{}='{}'",
                key.to_string_lossy(),
                value?.to_string_lossy()
            ))
        })
        .collect();
    words.push(command.get_program().to_string_lossy().into_owned());
    words.extend(
        command
            .get_args()
            .map(|word| word.to_string_lossy().into_owned()),
    );
    words.join(" ")
}

/// Returns the skipped check that a line of output reports; `None` if it reports none. The test harness may have written
/// text in front of the report.
fn not_checked_in(line: &str) -> Option<String> {
    let (_, what) = line.split_once("NOT CHECKED: ")?;
    Some(what.to_owned())
}

/// Counts the results in a line of cargo or a test program: `test result: ok. 3 passed; 0 failed; …`, a built crate, a lost
/// guest, or a Go package.
fn results_in(line: &str) -> Option<CheckCounts> {
    if line.contains(LOST_GUEST_LINE) {
        return Some(CheckCounts {
            lost: 1,
            ..CheckCounts::default()
        });
    }
    // Tests of a Go package are not counted separately.
    if line.starts_with("ok  \t") || line.starts_with("FAIL\t") {
        return Some(CheckCounts {
            passed: u64::from(line.starts_with("ok")),
            failed: u64::from(line.starts_with("FAIL")),
            ..CheckCounts::default()
        });
    }
    let building = ["   Compiling ", "    Checking ", " Documenting "];
    if building.iter().any(|word| line.starts_with(word)) {
        return Some(CheckCounts {
            built: 1,
            ..CheckCounts::default()
        });
    }
    let (_, result) = line.strip_prefix("test result: ")?.split_once(". ")?;
    let mut parts = result.split("; ");
    Some(CheckCounts {
        passed: parts.next()?.strip_suffix(" passed")?.parse().ok()?,
        failed: parts.next()?.strip_suffix(" failed")?.parse().ok()?,
        ..CheckCounts::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_of_failed_tests_are_kept_and_nothing_else() {
        let read = |output: &str| {
            let mut failures = FailureMessages::default();
            output.lines().for_each(|line| failures.read(line));
            failures.into_messages()
        };
        let failed = "running 2 tests\n\
            test a ... ok\n\
            test b ... FAILED\n\n\
            failures:\n\n\
            ---- b stdout ----\n\
            thread 'b' panicked at b.rs:1\n\n\
            failures:\n    b\n\n\
            test result: FAILED. 1 passed; 1 failed; 0 ignored\n\
            running 1 test\n\
            test c ... ok\n\
            test result: ok. 1 passed; 0 failed; 0 ignored\n\
            error: 1 target failed:";
        let lines = read(failed).unwrap();
        assert!(lines.contains("thread 'b' panicked at b.rs:1"), "{lines}");
        assert!(!lines.contains("running"), "{lines}");
        assert!(!lines.contains("error: 1 target failed"), "{lines}");
        let (_, passed) = failed.split_once("running 1 test").unwrap();
        assert_eq!(read(passed), None);
    }

    #[test]
    fn the_slowest_test_programs_are_named() {
        let slowest = |output: &str| {
            let mut programs = TestPrograms::default();
            output.lines().for_each(|line| programs.read(line));
            programs.slowest()
        };
        let ran = "     Running unittests src/lib.rs (target/release/deps/nvme_mpt-01ab)\n\
            running 1 test\n\
            test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 12.50s\n\
            \x20    Running tests/function/main.rs (target/release/deps/function-02cd)\n\
            test result: ok. 9 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 130.01s\n\
            \x20    Running tests/layers.rs (target/release/deps/layers-03ef)\n\
            test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.20s";
        let expected = "function 2 min 10 s, nvme_mpt 12.5 s";
        assert_eq!(slowest(ran).as_deref(), Some(expected));
        let (one, _) = ran.split_once("\n     Running tests/function").unwrap();
        assert_eq!(slowest(one), None);
        assert_eq!(
            slowest(&ran.replace("12.50s", "2.50s").replace("130.01s", "9.99s")),
            None
        );
    }

    #[test]
    fn unchecked_items_are_parsed_from_output_lines() {
        for line in [
            "NOT CHECKED: a::b: it needs root",
            "test a::b ... NOT CHECKED: a::b: it needs root",
            "        NOT CHECKED: a::b: it needs root",
        ] {
            let what = not_checked_in(line).unwrap();
            assert_eq!(what, "a::b: it needs root");
        }
        assert_eq!(not_checked_in("test a::b ... ok"), None);
    }

    #[test]
    fn test_results_are_parsed_from_output_lines() {
        let line = "test result: ok. 26 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out";
        assert_eq!(
            results_in(line),
            Some(CheckCounts {
                passed: 26,
                failed: 1,
                ..CheckCounts::default()
            })
        );
        let built = results_in("   Compiling nvme-mpt v0.1.0 (/nvme-mpt)").unwrap();
        assert_eq!((built.built, built.passed), (1, 0));
        let lost = results_in(&format!("test vmms::qemu ... {LOST_GUEST_LINE}")).unwrap();
        assert_eq!((lost.lost, lost.failed), (1, 0));
        let go = |line| results_in(line).map(|count| (count.passed, count.failed));
        assert_eq!(go("ok  \tmodule/package\t1.5s"), Some((1, 0)));
        assert_eq!(go("FAIL\tmodule/package\t1.5s"), Some((0, 1)));
        assert_eq!(go("?   \tmodule/package\t[no test files]"), None);
        for other in [
            "",
            "FAIL",
            "x passed, y failed",
            "test linux::v6_1 ... 3 passed; 0 failed",
            "3 passed, 0 failed",
            "running 3 tests",
        ] {
            assert_eq!(results_in(other), None, "{other}");
        }
    }
}
