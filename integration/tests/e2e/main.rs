//! End-to-end tests: unmodified guests on a stock QEMU, with drives served by `nvme-mpt serve`.
//!
//! `cargo test --release --package integration --test e2e -- [--list] [--shard I/N] [FILTER]`: FILTER is a part of a
//! check's name. These tests need minutes: `cargo test` alone does not run them, `cargo verify` runs the group
//! `modes`, and `cargo verify --full` runs all of them.

use std::process::ExitCode;
use std::time::Instant;

use integration::checks::Selection;
use integration::progress::{say, seconds};

mod btrfs;
mod doorbells;
mod ext4;
mod faults;
mod firmware;
mod fixture;
mod hotplug;
mod key_value;
mod lifecycle;
mod linux;
mod modes;
mod nvme_cli;
mod pauses;
mod profiles;
mod reset;
mod sharing;
mod tenants;
mod viommu;
mod zones;

use fixture::{Bench, Failure, Lab, Suite};

/// A check with what it needs to itself.
type Alone = fn(&Lab) -> Result<(), Failure>;
/// A check that shares a booted guest with others of its group; it is made on each function of the guest.
type OnBench = fn(&Bench) -> Result<(), Failure>;

/// Checks that belong together.
enum Group {
    Alone {
        name: &'static str,
        checks: &'static [(&'static str, Alone)],
    },
    OnBench {
        name: &'static str,
        boot: fn(&Lab) -> Result<Vec<Bench>, Failure>,
        checks: &'static [(&'static str, OnBench)],
    },
}

const GROUPS: &[Group] = &[
    linux::GROUP,
    modes::GROUP,
    reset::GROUP,
    lifecycle::GROUP,
    hotplug::GROUP,
    ext4::GROUP,
    sharing::GROUP,
    zones::GROUP,
    btrfs::GROUP,
    key_value::GROUP,
    profiles::GROUP,
    faults::GROUP,
    firmware::GROUP,
    viommu::GROUP,
    tenants::GROUP,
];

/// Numbers of checks that passed and did not.
#[derive(Default)]
struct Tally {
    passed: usize,
    failed: Vec<String>,
}

impl Tally {
    fn count(&mut self, name: &str, check: impl FnOnce() -> Result<(), Failure>) {
        let started = Instant::now();
        let result = check();
        let time = seconds(started.elapsed());
        match result {
            Ok(()) => {
                say(&format!("ok      {name} ({time})"));
                self.passed += 1;
            }
            Err(failure) => {
                say(&format!("FAILED  {name} ({time})"));
                for line in integration::error_chain(&*failure).lines() {
                    say(&format!("        {line}"));
                }
                self.failed.push(name.to_owned());
            }
        }
    }
}

fn main() -> ExitCode {
    let selection = match Selection::from_arguments(std::env::args().skip(1)) {
        Ok(selection) => selection,
        Err(error) => {
            integration::print_error(&error);
            return ExitCode::FAILURE;
        }
    };
    let filter = &selection.filter;
    let is_wanted = |group: &str, check: &str| format!("{group}::{check}").contains(filter);
    let groups: Vec<&Group> = selection.share_of(GROUPS).collect();
    if selection.list {
        for (group, check) in groups
            .iter()
            .flat_map(|group| names(group))
            .filter(|(g, c)| is_wanted(g, c))
        {
            say(&format!("{group}::{check}: test"));
        }
        return ExitCode::SUCCESS;
    }

    let suite = match Suite::provide() {
        Ok(suite) => suite,
        Err(failure) => {
            say(&format!(
                "Cannot run any end-to-end test: {}",
                integration::error_chain(&*failure)
            ));
            say("0 passed, 1 failed");
            return ExitCode::FAILURE;
        }
    };
    let mut tally = Tally::default();
    for group in groups {
        run_group(group, &suite, &is_wanted, &mut tally);
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

fn names(group: &Group) -> Vec<(&'static str, &'static str)> {
    match *group {
        Group::Alone { name, checks } => checks.iter().map(|(check, _)| (name, *check)).collect(),
        Group::OnBench { name, checks, .. } => {
            checks.iter().map(|(check, _)| (name, *check)).collect()
        }
    }
}

fn run_group(
    group: &Group,
    suite: &Suite,
    is_wanted: &impl Fn(&str, &str) -> bool,
    tally: &mut Tally,
) {
    match *group {
        Group::Alone { name, checks } => {
            for (check, run) in checks.iter().filter(|(check, _)| is_wanted(name, check)) {
                let full = format!("{name}::{check}");
                tally.count(&full, || suite.with_lab(&full, run));
            }
        }
        Group::OnBench { name, boot, checks } => {
            let wanted: Vec<_> = checks
                .iter()
                .filter(|(check, _)| is_wanted(name, check))
                .collect();
            if wanted.is_empty() {
                return;
            }
            let mut reached = false;
            let booted = suite.with_lab(name, |lab| {
                let benches = boot(lab)?;
                reached = true;
                let failed = tally.failed.len();
                for (check, run) in &wanted {
                    for bench in &benches {
                        let function = match benches.len() {
                            1 => String::new(),
                            _ => format!("::{}", bench.function),
                        };
                        tally.count(&format!("{name}::{check}{function}"), || run(bench));
                    }
                }
                if tally.failed.len() > failed {
                    lab.keep_logs();
                }
                Ok(())
            });
            if !reached {
                // Every check that could not be made has failed.
                for (check, _) in &wanted {
                    tally.count(&format!("{name}::{check}"), || {
                        Err("The guest that the check needs did not come up".into())
                    });
                }
            }
            if let Err(failure) = booted {
                say(&format!("        {}", integration::error_chain(&*failure)));
            }
        }
    }
}
