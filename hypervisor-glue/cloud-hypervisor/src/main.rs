//! `cargo patch-vmm CHECKOUT`: adds the option `--nvme-mpt` to a checkout of Cloud Hypervisor, as a branch of commits.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Parser;
use patch_vmm::branch::{self, BranchRequest};
use patch_vmm::checkout::Checkout;
use patch_vmm::series::Series;

/// Makes a branch in a git checkout of Cloud Hypervisor, with commits that add the option --nvme-mpt.
#[derive(Parser)]
#[command(name = "patch-vmm")]
struct Arguments {
    /// Git checkout of Cloud Hypervisor
    checkout: PathBuf,
    /// Name of the new branch
    #[arg(long, default_value = "nvme-mpt")]
    branch: String,
    /// Only check that the series fits
    #[arg(long)]
    check: bool,
    /// Directory of the series [default: the one of this project]
    #[arg(long)]
    series: Option<PathBuf>,
    /// Leave Cargo.lock as it is
    #[arg(long)]
    no_lock: bool,
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
    let default = Path::new(env!("CARGO_MANIFEST_DIR")).join("series");
    let series = Series::read(arguments.series.as_deref().unwrap_or(&default))?;
    let checkout = Checkout::open(&arguments.checkout)?;
    if arguments.check {
        let (version, changes) = branch::check(&checkout, &series, &arguments.branch)?;
        println!("The series fits {version}:");
        for (commit, change) in changes {
            println!("  {}: {} files", commit.name, change.paths().count());
        }
        return Ok(());
    }
    let request = BranchRequest {
        branch: &arguments.branch,
        updates_lock: !arguments.no_lock,
    };
    let made = branch::create(&checkout, &series, &request)?;
    println!("Branch {} has these commits:", arguments.branch);
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
    println!("  git format-patch {:.12}..{}", made.base, arguments.branch);
    Ok(())
}
