//! Runs groups of checks: boots a lab for each, and counts what it says of them.

use std::collections::BTreeSet;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use integration::checks::{LOST, Selection};
use integration::guest;
use integration::lab::options;
use integration::lab::{Lab, LabConfig, LabDrive};
use integration::progress::{say, seconds};
use integration::provision::KernelChoice;
use integration::provision::lab::LabAssets;
use integration::vmms::cloud_hypervisor;

use crate::fixture::{Failure, LOGS, at, expect};
use crate::{Group, Refused};

/// Longer than any group takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(1800);
/// Most labs that a group may take in which no check comes to its end, as guests are lost.
const ATTEMPTS: u32 = 8;
/// The same with `--once`.
const ONE_ATTEMPT: u32 = 1;
/// Beginnings of lines that report a check.
const PASSED: &str = "ok      ";
const FAILED: &str = "FAILED  ";

/// Says what became of a check: in the lab to the one who counts, and to a person. A check is to be made
/// again whose guest was [lost](guest::is_lost).
pub(crate) fn report(name: &str, result: &Result<(), Failure>, started: Instant) {
    let time = seconds(started.elapsed());
    match result {
        Ok(()) => say(&format!("{PASSED}{name} ({time})")),
        Err(failure) if guest::is_lost(&**failure) => {
            say(&format!("{LOST}{name} ({time}): a guest was lost"));
            // How shows in the first line; what follows is its console.
            if let Some(line) = integration::error_chain(&**failure).lines().next() {
                say(&format!("        {line}"));
            }
        }
        Err(failure) => {
            say(&format!("{FAILED}{name} ({time})"));
            for line in integration::error_chain(&**failure).lines() {
                say(&format!("        {line}"));
            }
        }
    }
}

/// State that all groups share.
pub(crate) struct Suite {
    assets: LabAssets,
    programs: Vec<PathBuf>,
}

impl Suite {
    fn provide() -> Result<Self, Failure> {
        let itself = std::env::current_exe().map_err(at("this program"))?;
        let mut programs = options::build()?;
        programs.extend(cloud_hypervisor::to_bring());
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
        work: impl FnOnce(Lab) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let folder = tempfile::Builder::new()
            .prefix("nvme-mpt-lab-")
            .tempdir()
            .map_err(at(std::env::temp_dir()))?;
        let mut config = LabConfig::new();
        for program in &self.programs {
            config = config.bring(program);
        }
        for drive in drives {
            config = config.drive(drive);
        }
        let result = Lab::boot(&self.assets, &config, folder.path())
            .map_err(Failure::from)
            .and_then(work);
        if result.is_err() {
            say(&format!(
                "        console and logs: {}",
                folder.keep().display()
            ));
        }
        result
    }

    /// Returns the name of this program inside a lab.
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
    fn count(&mut self, name: &str, result: &Result<(), Failure>, started: Instant) {
        report(name, result, started);
        match result {
            Ok(()) => self.passed += 1,
            Err(_) => self.failed.push(name.to_owned()),
        }
    }
}

/// Passes on what labs say and notes which checks they tell of.
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

    /// Those of `wanted` that nothing was told of.
    fn left_of(&self, wanted: &[String]) -> Vec<String> {
        let is_left = |name: &&String| !self.passed.contains(*name) && !self.failed.contains(*name);
        wanted.iter().filter(is_left).cloned().collect()
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

/// Runs the checks of `groups` that `selection` names.
pub(crate) fn run(groups: &[&Group], selection: &Selection) -> ExitCode {
    let suite = match Suite::provide() {
        Ok(suite) => suite,
        Err(failure) => {
            say(&format!(
                "Cannot boot any lab: {}",
                integration::error_chain(&*failure)
            ));
            say("0 passed, 1 failed");
            return ExitCode::FAILURE;
        }
    };
    let mut tally = Tally::default();
    for group in groups {
        run_group(group, &suite, selection, &mut tally);
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

fn run_group(group: &Group, suite: &Suite, selection: &Selection, tally: &mut Tally) {
    let wanted = group.wanted(&selection.filter);
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
            let attempts = match selection.once {
                true => ONE_ATTEMPT,
                false => ATTEMPTS,
            };
            let result = run_in_labs(name, *drives, suite, &wanted, &mut told, attempts)
                .and_then(|refusals| refused.expect(refusals));
            tally.passed += told.passed.len();
            tally.failed.extend(told.failed.iter().cloned());
            for name in told.left_of(&wanted) {
                let silent = Err(Failure::from("No lab says what became of it"));
                tally.count(&name, &silent, started);
            }
            tally.count(&format!("{name}::lab"), &result, started);
        }
    }
}

impl Refused {
    /// Fails unless this many accesses of devices are what was to be refused.
    fn expect(self, refusals: u64) -> Result<(), Failure> {
        let as_expected = match self {
            Self::Nothing => refusals == 0,
            Self::Something => refusals > 0,
        };
        expect(as_expected, || {
            format!("The IOMMU has refused {refusals} accesses, expected: {self:?}")
        })
    }
}

/// Files of this size are images of drives and of memory, which take minutes to bring back.
const LOG_KIB_MAX: u64 = 4096;

/// Runs the checks in one lab after another, until something is told of each of them, and returns how many
/// accesses the IOMMUs have refused. A lab in which any of them comes to its end was worth its while.
fn run_in_labs(
    name: &str,
    drives: fn() -> Vec<LabDrive>,
    suite: &Suite,
    wanted: &[String],
    told: &mut Told,
    attempts: u32,
) -> Result<u64, Failure> {
    let (mut refusals, mut in_vain) = (0, 0);
    while in_vain < attempts {
        let started = Instant::now();
        let left = told.left_of(wanted);
        match suite.with_lab(drives(), |lab| run_checks(lab, suite, &left, told)) {
            Ok(refused) => refusals += refused,
            // The lab is a guest as well.
            Err(failure) if guest::is_lost(&*failure) => report(name, &Err(failure), started),
            Err(failure) => return Err(failure),
        }
        let still_left = told.left_of(wanted);
        if still_left.is_empty() {
            return Ok(refusals);
        }
        in_vain = match still_left.len() < left.len() && attempts > ONE_ATTEMPT {
            true => 0,
            false => in_vain + 1,
        };
    }
    Err(Failure::from(format!(
        "A guest was lost in each of {attempts} labs, one after the other"
    )))
}

/// Runs the checks inside `lab`, to the first whose guest is lost, and returns how many accesses the IOMMU
/// has refused.
fn run_checks(lab: Lab, suite: &Suite, wanted: &[String], told: &mut Told) -> Result<u64, Failure> {
    let (itself, wanted) = (suite.itself(), wanted.join(" "));
    let command = format!(
        "{}{itself} {wanted}
        status=$?
        [ -d {LOGS} ] && find {LOGS} -type f -size +{LOG_KIB_MAX}k -exec rm {{}} +
        exit $status",
        cloud_hypervisor::assignment()
    );
    let status = lab.stream(&command, PATIENCE, told)?;
    let mut files = Vec::new();
    if status != 0 {
        files.push(LOGS.to_owned());
    }
    let kept = tempfile::Builder::new()
        .prefix("nvme-mpt-lab-logs-")
        .tempdir()
        .map_err(at(std::env::temp_dir()))?;
    let report = lab.finish(status, &files, kept.path())?;
    if !report.files.is_empty() {
        say(&format!(
            "        logs of what failed: {}",
            kept.keep().display()
        ));
    }
    Ok(report.iommu_faults)
}
