//! `cargo patch-vmm CHECKOUT`: makes a branch with the commits of a series in a checkout of Cloud Hypervisor.

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use patch_vmm::branch::{self, BranchRequest};
use patch_vmm::checkout::Checkout;
use patch_vmm::series::{self, Series};

/// Makes a branch with the commits of a series in a git checkout of Cloud Hypervisor.
///
/// The series nvme-mpt adds the option --nvme-mpt. The series vfio-user mends vfio-user devices (--user-device).
#[derive(Parser)]
#[command(name = "patch-vmm")]
struct Arguments {
    /// Git checkout of Cloud Hypervisor
    checkout: PathBuf,
    /// Name of the new branch [default: the name of the series]
    #[arg(long)]
    branch: Option<String>,
    /// Only check that the series fits
    #[arg(long)]
    check: bool,
    #[arg(long, default_value = "nvme-mpt", help = series_help())]
    series: PathBuf,
    /// Leave Cargo.lock as it is
    #[arg(long)]
    no_lock: bool,
}

fn series_help() -> String {
    let known = series::known_names().join(", ");
    format!("Name of a series ({known}), or directory of another one")
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("Error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    let (name, dir) = series::find(&arguments.series)?;
    let series = Series::read(&dir)?;
    let branch = arguments.branch.as_ref().unwrap_or(&name);
    let checkout = Checkout::open(&arguments.checkout)?;
    if arguments.check {
        let (version, changes) = branch::check(&checkout, &series, branch)?;
        println!("The series {name} fits {version}:");
        for (commit, change) in changes {
            println!("  {}: {} files", commit.name, change.paths().count());
        }
        return Ok(());
    }
    let request = BranchRequest {
        branch,
        updates_lock: !arguments.no_lock,
    };
    let made = branch::create(&checkout, &series, &request)?;
    println!("Branch {branch} has these commits:");
    for (id, subject) in &made.commits {
        println!("  {id:.12} {subject}");
    }
    let dir = checkout.dir().display();
    if !made.has_grouped_imports {
        println!("Imports are not grouped, as that needs the rustfmt of a nightly toolchain");
    }
    match made.configuration {
        Ok(None) => {}
        Ok(Some(lines)) => println!("Add these lines to {dir}/.cargo/config.toml:\n{lines}"),
        Err(error) => println!("{dir}/.cargo/config.toml cannot be written: {error}"),
    }
    println!("Build it in {dir}. These are the patches:");
    println!("  git format-patch {:.12}..{branch}", made.base);
    Ok(())
}
