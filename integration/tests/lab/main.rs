//! Tests on an emulated host with NVMe drives, an IOMMU and KVM: see `integration::lab`.
//!
//! `cargo test --release --package integration --test lab -- [--list] [--once] [--shard I/N] [FILTER]`: FILTER is a
//! part of a check's name. These tests need many minutes: `cargo test` alone does not run them, `cargo verify` runs
//! the group `native`, and `cargo verify --full` runs all of them.
//!
//! A group boots one lab with the drives that it names, and this same program runs the group's checks
//! inside it, one after the other. A check is a function of a [`Bench`]: it binds, serves and boots guests
//! as on a real host. To add one, put it into a file of its topic and that file's `GROUP` into [`GROUPS`].

use std::process::ExitCode;
use std::time::Instant;

use integration::checks::Selection;
use integration::guest;
use integration::lab::{LabDrive, inside};
use integration::progress::say;

mod around;
mod backing;
mod bind;
mod client;
mod comings;
mod disks;
mod drives;
mod exits;
mod failures;
mod fixture;
mod giveback;
mod harness;
mod hostile;
mod init;
mod iommu;
mod isolation;
mod linux;
mod native;
mod nested;
mod scarcity;
mod sharing;
mod vmm;
mod vmms;

use fixture::{Bench, Failure};
use harness::Suite;

/// A check inside the lab.
type Inside = fn(&Bench) -> Result<(), Failure>;
/// A check from outside, which boots its own labs.
type Around = fn(&Suite) -> Result<(), Failure>;

/// Refusals that the IOMMU must have counted by the end of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Refused {
    /// Nothing: what the device was told was right in the first place.
    Nothing,
    /// Something, as the group provokes it.
    Something,
}

/// Checks that belong together.
enum Group {
    /// Inside one lab.
    Inside {
        name: &'static str,
        drives: fn() -> Vec<LabDrive>,
        refused: Refused,
        checks: &'static [(&'static str, Inside)],
    },
    /// From outside.
    Around {
        name: &'static str,
        checks: &'static [(&'static str, Around)],
    },
}

const GROUPS: &[Group] = &[
    around::GROUP,
    backing::GROUP,
    bind::GROUP,
    comings::GROUP,
    disks::GROUP,
    drives::GROUP,
    failures::GROUP,
    giveback::GROUP,
    iommu::GROUP,
    isolation::GROUP,
    linux::GROUP,
    native::GROUP,
    nested::GROUP,
    scarcity::GROUP,
    sharing::GROUP,
    vmm::GROUP,
    vmms::GROUP,
];

impl Group {
    fn name(&self) -> &'static str {
        match self {
            Self::Inside { name, .. } | Self::Around { name, .. } => name,
        }
    }

    /// The full names of its checks that are wanted.
    fn wanted(&self, filter: &str) -> Vec<String> {
        let checks: Vec<&str> = match self {
            Self::Inside { checks, .. } => checks.iter().map(|(check, _)| *check).collect(),
            Self::Around { checks, .. } => checks.iter().map(|(check, _)| *check).collect(),
        };
        let full = |check| format!("{}::{check}", self.name());
        let names = checks.into_iter().map(full);
        names.filter(|name| name.contains(filter)).collect()
    }
}

fn main() -> ExitCode {
    if inside::is_inside() {
        return run_inside(&std::env::args().skip(1).collect::<Vec<_>>());
    }
    let selection = match Selection::from_arguments(std::env::args().skip(1)) {
        Ok(selection) => selection,
        Err(error) => {
            integration::print_error(&error);
            return ExitCode::FAILURE;
        }
    };
    let groups: Vec<&Group> = selection.share_of(GROUPS).collect();
    if selection.list {
        let wanted = |group: &&Group| group.wanted(&selection.filter);
        for name in groups.iter().flat_map(wanted) {
            say(&format!("{name}: test"));
        }
        return ExitCode::SUCCESS;
    }
    harness::run(&groups, &selection)
}

/// Runs the checks of these names, in the lab that was booted for them.
fn run_inside(wanted: &[String]) -> ExitCode {
    let mut all_well = true;
    for group in GROUPS {
        let Group::Inside { name, checks, .. } = group else {
            continue;
        };
        for (check, run) in *checks {
            let full = format!("{name}::{check}");
            if wanted.contains(&full) {
                let started = Instant::now();
                let result = Bench::new(&full).and_then(|bench| run(&bench));
                all_well &= result.is_ok();
                harness::report(&full, &result, started);
                if result.is_err_and(|failure| guest::is_lost(&*failure)) {
                    // Nobody knows in what state it has left the drives: the rest needs another lab.
                    return ExitCode::FAILURE;
                }
            }
        }
    }
    if all_well {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}
