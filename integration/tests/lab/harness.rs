//! Runs groups of checks: boots a lab for each, and counts what it says of them.

use std::collections::BTreeSet;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use integration::lab::options;
use integration::lab::{Lab, LabConfig, LabDrive};
use integration::progress::{say, seconds};
use integration::provision::KernelChoice;
use integration::provision::lab::LabAssets;

use crate::fixture::{Fault, LOGS, expect};
use crate::{Group, Refused};

/// Longer than any group takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(1800);
/// How often a check is made whose guest is lost.
const ATTEMPTS: u32 = 3;
/// How lines begin that tell of a check.
const PASSED: &str = "ok      ";
const FAILED: &str = "FAILED  ";

/// Says what became of a check: in the lab to the one who counts, and to a person.
pub(crate) fn report(name: &str, result: &Result<(), Fault>, started: Instant) {
    let time = seconds(started.elapsed());
    match result {
        Ok(()) => say(&format!("{PASSED}{name} ({time})")),
        Err(fault) => {
            say(&format!("{FAILED}{name} ({time})"));
            for line in integration::error_chain(fault).lines() {
                say(&format!("        {line}"));
            }
        }
    }
}

/// Makes a check, and again if a guest of its own was lost: KVM on an emulated processor now and then
/// ends a guest without a word, at any time, one that has the drive passed through as well. Whatever
/// else fails, fails at once.
pub(crate) fn attempt(
    name: &str,
    mut check: impl FnMut() -> Result<(), Fault>,
) -> Result<(), Fault> {
    for _ in 1..ATTEMPTS {
        match check() {
            Err(fault) if is_guest_lost(&fault) => {
                say(&format!("AGAIN   {name}: a guest was lost"));
            }
            result => return result,
        }
    }
    check()
}

/// Whether QEMU has ended under a guest, or the guest has reset itself in the reference VMM.
fn is_guest_lost(fault: &Fault) -> bool {
    let text = integration::error_chain(fault);
    text.contains("QEMU ended while") || text.contains("It ended with exit status: 2")
}

/// What all groups share.
pub(crate) struct Suite {
    assets: LabAssets,
    programs: Vec<PathBuf>,
}

impl Suite {
    fn provide() -> Result<Self, Fault> {
        let itself = std::env::current_exe().map_err(|source| Fault::File {
            path: "this program".into(),
            source,
        })?;
        let mut programs = options::build()?;
        programs.push(itself);
        Ok(Self {
            assets: LabAssets::provide(&KernelChoice::V6_12)?,
            programs,
        })
    }

    /// Boots a lab for `work`, of which the logs are kept if it fails.
    pub(crate) fn with_lab<T>(
        &self,
        drives: Vec<LabDrive>,
        work: impl FnOnce(Lab) -> Result<T, Fault>,
    ) -> Result<T, Fault> {
        let folder = tempfile::Builder::new()
            .prefix("nvme-mpt-lab-")
            .tempdir()
            .map_err(|source| Fault::File {
                path: std::env::temp_dir(),
                source,
            })?;
        let mut config = LabConfig::new();
        for program in &self.programs {
            config = config.bring(program);
        }
        for drive in drives {
            config = config.drive(drive);
        }
        let result = Lab::boot(&self.assets, &config, folder.path())
            .map_err(Fault::from)
            .and_then(work);
        if result.is_err() {
            say(&format!(
                "        console and logs: {}",
                folder.keep().display()
            ));
        }
        result
    }

    /// What this program is called inside a lab.
    fn itself(&self) -> String {
        let path = self.programs.last().cloned().unwrap_or_default();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        format!("/lab/run/bin/{name}")
    }
}

/// Checks by what became of them.
#[derive(Default)]
struct Tally {
    passed: usize,
    failed: Vec<String>,
}

impl Tally {
    fn count(&mut self, name: &str, result: &Result<(), Fault>, started: Instant) {
        report(name, result, started);
        match result {
            Ok(()) => self.passed += 1,
            Err(_) => self.failed.push(name.to_owned()),
        }
    }
}

/// Passes on what a lab says and notes which checks it tells of.
struct Told {
    line: Vec<u8>,
    passed: BTreeSet<String>,
    failed: BTreeSet<String>,
}

impl Told {
    fn new() -> Self {
        Self {
            line: Vec::new(),
            passed: BTreeSet::new(),
            failed: BTreeSet::new(),
        }
    }

    fn understand(&mut self) {
        let line = String::from_utf8_lossy(&self.line);
        let name = |rest: &str| rest.split(' ').next().unwrap_or_default().to_owned();
        if let Some(rest) = line.strip_prefix(PASSED) {
            self.passed.insert(name(rest));
        } else if let Some(rest) = line.strip_prefix(FAILED) {
            self.failed.insert(name(rest));
        }
        self.line.clear();
    }
}

impl Write for Told {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        for byte in bytes {
            if *byte == b'\n' {
                self.understand();
            } else {
                self.line.push(*byte);
            }
        }
        io::stdout().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stdout().flush()
    }
}

/// Runs the checks of `groups` that have `filter` in their names.
pub(crate) fn run(groups: &[Group], filter: &str) -> ExitCode {
    let suite = match Suite::provide() {
        Ok(suite) => suite,
        Err(fault) => {
            say(&format!(
                "Cannot boot any lab: {}",
                integration::error_chain(&fault)
            ));
            say("0 passed, 1 failed");
            return ExitCode::FAILURE;
        }
    };
    let mut tally = Tally::default();
    for group in groups {
        run_group(group, &suite, filter, &mut tally);
    }
    for name in &tally.failed {
        say(&format!("failed: {name}"));
    }
    say(&format!(
        "{} passed, {} failed",
        tally.passed,
        tally.failed.len()
    ));
    if tally.failed.is_empty() && tally.passed > 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

fn run_group(group: &Group, suite: &Suite, filter: &str, tally: &mut Tally) {
    let wanted = group.wanted(filter);
    if wanted.is_empty() {
        return;
    }
    match group {
        Group::Around { name, checks } => {
            for (check, run) in *checks {
                let full = format!("{name}::{check}");
                if wanted.contains(&full) {
                    let started = Instant::now();
                    tally.count(&full, &run(suite), started);
                }
            }
        }
        Group::Inside {
            name,
            drives,
            refused,
            ..
        } => {
            let started = Instant::now();
            let mut told = Told::new();
            let result = attempt(name, || {
                told = Told::new();
                suite.with_lab(drives(), |lab| {
                    run_checks(lab, suite, &wanted, *refused, &mut told)
                })
            });
            tally.passed += told.passed.len();
            tally.failed.extend(told.failed.iter().cloned());
            for name in wanted {
                if !told.passed.contains(&name) && !told.failed.contains(&name) {
                    let silent = Err(Fault::Wrong("The lab says nothing of it".to_owned()));
                    tally.count(&name, &silent, started);
                }
            }
            tally.count(&format!("{name}::lab"), &result, started);
        }
    }
}

/// Runs the checks inside `lab` and then sees what the IOMMU has refused.
fn run_checks(
    lab: Lab,
    suite: &Suite,
    wanted: &[String],
    refused: Refused,
    told: &mut Told,
) -> Result<(), Fault> {
    let command = format!("{} {}", suite.itself(), wanted.join(" "));
    let status = lab.stream(&command, PATIENCE, told)?;
    let mut files = Vec::new();
    if status != 0 {
        files.push(LOGS.to_owned());
    }
    let kept = tempfile::Builder::new()
        .prefix("nvme-mpt-lab-logs-")
        .tempdir()
        .map_err(|source| Fault::File {
            path: std::env::temp_dir(),
            source,
        })?;
    let report = lab.finish(status, &files, kept.path())?;
    if !report.files.is_empty() {
        say(&format!(
            "        logs of what failed: {}",
            kept.keep().display()
        ));
    }
    let as_expected = match refused {
        Refused::Nothing => report.iommu_faults == 0,
        Refused::Something => report.iommu_faults > 0,
    };
    expect(as_expected, || {
        format!(
            "The IOMMU has refused {} accesses, expected: {refused:?}",
            report.iommu_faults
        )
    })
}
