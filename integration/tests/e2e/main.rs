//! End-to-end tests: unmodified guests on a stock QEMU, with drives served by `nvme-mpt serve`.
//!
//! `cargo test --release --workspace --test e2e -- [--list] [--shard I/N] [--test-threads N] [FILTER]`: FILTER is a part
//! of a check's name. These tests need minutes: `cargo test` alone does not run them, `cargo verify` runs the group
//! `modes`, and `cargo verify --full` runs all of them. [`checks`] is the harness.

use std::env;
use std::process::ExitCode;
use std::sync::{Arc, OnceLock};

use clap::Parser;
use integration::checks::{self, CheckOptions, FULL};

mod balloon;
mod btrfs;
mod doorbells;
mod ext4;
mod fabrics;
mod faults;
mod firmware;
mod fixture;
mod frozen;
mod function_changes;
mod hotplug;
mod interrupts;
mod key_value;
mod lifecycle;
mod linux;
mod lost_notifications;
mod modes;
mod mounts;
mod nvme_cli;
mod package;
mod profiles;
mod replaced_servers;
mod reset;
mod sharing;
mod tenants;
mod trim;
mod viommu;
mod zones;

use fixture::{BenchDir, BootedFunction, CheckEnvironment, Failure};

/// A check with its own [`BenchDir`] and guests, which may run beside other checks.
type Alone = fn(&CheckEnvironment) -> Result<(), Failure>;
/// A check that shares a booted guest with other checks of its group.
type OnGuest = fn(&BootedFunction) -> Result<(), Failure>;

/// Checks that belong together.
#[derive(Clone, Copy)]
enum Group {
    Alone {
        name: &'static str,
        checks: &'static [(&'static str, Alone)],
    },
    /// Each check runs on each function of the guest.
    OnGuest {
        name: &'static str,
        /// Ids of the functions, in the order of the result of `boot`.
        functions: &'static [&'static str],
        boot: fn(&CheckEnvironment) -> Result<Vec<BootedFunction>, Failure>,
        checks: &'static [(&'static str, OnGuest)],
    },
}

/// Long checks come first, so that the last check delays the end as little as possible.
const GROUPS: &[Group] = &[
    fabrics::GROUP,
    viommu::GROUP,
    btrfs::GROUP,
    balloon::GROUP,
    faults::GROUP,
    tenants::GROUP,
    zones::GROUP,
    zones::ODD_GROUP,
    key_value::GROUP,
    sharing::GROUP,
    replaced_servers::GROUP,
    lifecycle::GROUP,
    function_changes::GROUP,
    reset::GROUP,
    modes::GROUP,
    ext4::GROUP,
    profiles::GROUP,
    hotplug::GROUP,
    firmware::GROUP,
    linux::GROUP,
];

/// Groups that run only with `--full`: they need more than Debian's packages, take minutes, or may fail on a busy machine
/// ([`EXCLUSIVE_GROUPS`]).
const FULL_GROUPS: &[Group] = &[
    frozen::GROUP,
    trim::GROUP,
    interrupts::GROUP,
    package::GROUP,
    firmware::FULL_GROUP,
];

/// Groups that must run alone. Their modules say why.
const EXCLUSIVE_GROUPS: &[&str] = &["interrupts"];

/// Maximum number of concurrent checks on any machine. Each may have two guests of 512 MiB.
const MOST_AT_ONCE: usize = 8;

fn main() -> ExitCode {
    let full = env::var_os(FULL).map(|_| FULL_GROUPS).unwrap_or_default();
    let groups = GROUPS.iter().chain(full).copied();
    let groups = groups.map(Group::checks).collect();
    checks::run(CheckOptions::parse(), groups, MOST_AT_ONCE)
}

impl Group {
    fn checks(self) -> checks::CheckGroup {
        match self {
            Self::Alone { name, checks } => {
                let mut group = checks::CheckGroup::new(name).concurrent();
                if EXCLUSIVE_GROUPS.contains(&name) {
                    group = group.exclusive();
                }
                for &(check, run) in checks {
                    group = group.check(check, move || {
                        let place = BenchDir::new(&format!("{name}-{check}"))?;
                        place.record_result(run(&place.bench))
                    });
                }
                group
            }
            Self::OnGuest {
                name,
                functions,
                boot,
                checks,
            } => {
                let guest = Arc::new(SharedGuest {
                    name,
                    boot,
                    booted: OnceLock::new(),
                });
                let mut group = checks::CheckGroup::new(name);
                for &(check, run) in checks {
                    for (place, function) in functions.iter().enumerate() {
                        let check = match functions.len() {
                            1 => check.to_owned(),
                            _ => format!("{check}::{function}"),
                        };
                        let guest = Arc::clone(&guest);
                        group = group.check(&check, move || guest.check(place, run));
                    }
                }
                group
            }
        }
    }
}

/// A guest that checks share. The first check boots it, and it ends with the last check.
struct SharedGuest {
    name: &'static str,
    boot: fn(&CheckEnvironment) -> Result<Vec<BootedFunction>, Failure>,
    // The functions are dropped before their place.
    booted: OnceLock<Result<(Vec<BootedFunction>, BenchDir), String>>,
}

impl SharedGuest {
    fn boot(&self) -> Result<(Vec<BootedFunction>, BenchDir), String> {
        let boot = || {
            let place = BenchDir::new(self.name)?;
            let functions = place.record_result((self.boot)(&place.bench))?;
            Ok((functions, place))
        };
        boot().map_err(|failure: Failure| {
            let cause = integration::error_chain(&*failure);
            format!("The guest that the check needs did not come up: {cause}")
        })
    }

    fn check(&self, place: usize, run: OnGuest) -> Result<(), Failure> {
        let booted = self.booted.get_or_init(|| self.boot());
        let (functions, at) = booted.as_ref().map_err(String::as_str)?;
        at.record_result(run(&functions[place]))
    }
}
