//! Tests on an emulated host with NVMe drives, an IOMMU and KVM: see `integration::lab`.
//!
//! `cargo test --release --workspace --test lab -- [--list] [--once] [--shard I/N] [FILTER]`: FILTER is a
//! part of a check's name. These tests need many minutes: `cargo test` alone does not run them, `cargo verify` runs
//! the group `native`, and `cargo verify --full` runs all of them.
//!
//! [`checks`] is the harness. A group boots one lab with the drives that it names, and each of its checks is this same
//! program inside the lab. A check is a function of a [`Bench`]: it binds, serves and boots guests as on a real host.
//! To add one, put it into a file of its topic and that file's `GROUP` into [`GROUPS`].

use std::process::ExitCode;
use std::sync::Arc;

use clap::Parser;
use integration::checks::{self, Options};
use integration::guest;
use integration::lab::{LabDrive, inside};

mod around;
mod backing;
mod balloon;
mod bind;
mod client;
mod comings;
mod disks;
mod doctor;
mod drives;
mod elsewhere;
mod exits;
mod failures;
mod fio;
mod fixture;
mod giveback;
mod harness;
mod hostile;
mod init;
mod iommu;
mod isolation;
mod late_memory;
mod linux;
mod native;
mod nested;
mod order;
mod scarcity;
mod shared;
mod sharing;
mod vmm;
mod vmms;

use fixture::{Bench, Failure};
use harness::{GroupLab, Suite};

/// A check inside the lab.
type Inside = fn(&Bench) -> Result<(), Failure>;
/// A check outside of the lab, which boots its own labs.
type Around = fn(&Suite) -> Result<(), Failure>;

/// Expected number of IOMMU refusals at the end of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Refused {
    /// No refusals: every DMA address was valid.
    Nothing,
    /// At least one refusal, which the group provokes.
    Something,
}

/// Checks that belong together.
#[derive(Clone, Copy)]
enum Group {
    /// Checks inside one lab.
    Inside {
        name: &'static str,
        drives: fn() -> Vec<LabDrive>,
        refused: Refused,
        checks: &'static [(&'static str, Inside)],
    },
    /// Checks from outside.
    Around {
        name: &'static str,
        checks: &'static [(&'static str, Around)],
    },
}

const GROUPS: &[Group] = &[
    around::GROUP,
    backing::GROUP,
    balloon::GROUP,
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
    order::GROUP,
    scarcity::GROUP,
    shared::GROUP,
    sharing::GROUP,
    vmm::GROUP,
    vmms::GROUP,
];

fn main() -> ExitCode {
    if inside::is_inside() {
        let arguments: Vec<String> = std::env::args().skip(1).collect();
        return match &arguments[..] {
            [first, rest @ ..] if first == elsewhere::ARGUMENT => elsewhere::main(rest),
            [first, rest @ ..] if first == order::ARGUMENT => order::main(rest),
            _ => run_inside(arguments.first().map_or("", String::as_str)),
        };
    }
    let options = Options::parse();
    let once = options.once;
    let groups = GROUPS.iter().map(|group| group.checks(once)).collect();
    // A lab needs the whole machine.
    checks::run(options, groups, 1)
}

impl Group {
    fn checks(self, once: bool) -> checks::Group {
        match self {
            Self::Around { name, checks } => {
                let mut group = checks::Group::new(name);
                for &(check, run) in checks {
                    group = group.check(check, move || run(harness::suite()?));
                }
                group
            }
            Self::Inside {
                name,
                drives,
                refused,
                checks,
            } => {
                let lab = Arc::new(GroupLab::new(drives, once));
                let mut group = checks::Group::new(name);
                for &(check, _) in checks {
                    let lab = Arc::clone(&lab);
                    group = group.check(check, move || lab.check(&format!("{name}::{check}")));
                }
                group.end("lab", move || lab.end(refused))
            }
        }
    }
}

/// Runs the check called `wanted`, in the lab of its group.
fn run_inside(wanted: &str) -> ExitCode {
    match check_inside(wanted) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            println!("{}", integration::error_chain(&*failure));
            match guest::is_lost(&*failure) {
                true => ExitCode::from(guest::LOST_STATUS),
                false => ExitCode::FAILURE,
            }
        }
    }
}

fn check_inside(wanted: &str) -> Result<(), Failure> {
    for group in GROUPS {
        let Group::Inside { name, checks, .. } = group else {
            continue;
        };
        for (check, run) in *checks {
            if format!("{name}::{check}") == wanted {
                return run(&fixture::bench(wanted)?);
            }
        }
    }
    Err(format!("There is no check {wanted}").into())
}
