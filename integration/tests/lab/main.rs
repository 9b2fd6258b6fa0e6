//! Tests on an emulated host with NVMe drives, an IOMMU and KVM: see `integration::lab`.
//!
//! `cargo test --release --workspace --test lab -- [--list] [--once] [--shard I/N] [FILTER]`: FILTER is a
//! part of a check's name. These tests need many minutes: `cargo test` alone does not run them, `cargo verify` runs
//! the group `native`, and `cargo verify --full` runs all of them. `LAB_KERNEL` may name a kernel image for the labs, such as
//! one with iommufd, which Debian's kernels lack.
//!
//! [`checks`] is the harness. A group boots one lab with the drives that it names, and each of its checks is this same
//! program inside the lab. A check is a function of a [`Bench`]: it binds, serves and boots guests as on a real host.
//! To add one, put it into a file of its topic and that file's `GROUP` into [`GROUPS`].

use std::process::ExitCode;
use std::sync::Arc;

use clap::Parser;
use integration::checks::{self, CheckOptions};
use integration::guest;
use integration::lab::{LabDrive, inside};

mod backing;
mod balloon;
mod bind;
mod client;
mod cloud_hypervisor;
mod disk_order;
mod disks;
mod doctor;
mod drive_release;
mod drives;
mod exits;
mod failures;
mod fio;
mod fixture;
mod function_changes;
mod harness;
mod hostile;
mod init;
mod iommu;
mod isolation;
mod killed_servers;
mod late_memory;
mod linux;
mod loaded_guest;
mod native;
mod nested;
mod outside;
mod remote_functions;
mod scarce_queue_pairs;
mod shared_drive;
mod sharing;
mod vmm;
mod vmms;

use fixture::{CheckEnvironment, Failure};
use harness::{GroupLab, Suite};

/// A check inside the lab.
type Inside = fn(&CheckEnvironment) -> Result<(), Failure>;
/// A check outside of the lab, which boots its own labs.
type Around = fn(&Suite) -> Result<(), Failure>;

/// Expected number of IOMMU refusals at the end of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ExpectedRefusals {
    /// No refusals: every DMA address was valid.
    None,
    /// At least one refusal, which the group provokes.
    AtLeastOne,
}

/// Checks that belong together.
#[derive(Clone, Copy)]
enum Group {
    /// Checks inside one lab.
    Inside {
        name: &'static str,
        drives: fn() -> Vec<LabDrive>,
        refused: ExpectedRefusals,
        checks: &'static [(&'static str, Inside)],
    },
    /// Checks from outside.
    Around {
        name: &'static str,
        checks: &'static [(&'static str, Around)],
    },
}

const GROUPS: &[Group] = &[
    outside::GROUP,
    backing::GROUP,
    balloon::GROUP,
    bind::GROUP,
    cloud_hypervisor::GROUP,
    function_changes::GROUP,
    disks::GROUP,
    drives::GROUP,
    failures::GROUP,
    drive_release::GROUP,
    iommu::GROUP,
    isolation::GROUP,
    linux::GROUP,
    native::GROUP,
    nested::GROUP,
    disk_order::GROUP,
    scarce_queue_pairs::GROUP,
    shared_drive::GROUP,
    sharing::GROUP,
    vmm::GROUP,
    vmms::GROUP,
];

fn main() -> ExitCode {
    if inside::is_inside() {
        let arguments: Vec<String> = std::env::args().skip(1).collect();
        return match &arguments[..] {
            [first, rest @ ..] if first == remote_functions::ARGUMENT => {
                remote_functions::main(rest)
            }
            [first, rest @ ..] if first == disk_order::ARGUMENT => disk_order::main(rest),
            _ => run_inside(arguments.first().map_or("", String::as_str)),
        };
    }
    let options = CheckOptions::parse();
    let once = options.once;
    let groups = GROUPS.iter().map(|group| group.checks(once)).collect();
    // A lab needs the whole machine.
    checks::run(options, groups, 1)
}

impl Group {
    fn checks(self, once: bool) -> checks::CheckGroup {
        match self {
            Self::Around { name, checks } => {
                let mut group = checks::CheckGroup::new(name);
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
                let mut group = checks::CheckGroup::new(name);
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
