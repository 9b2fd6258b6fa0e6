//! `cargo patch-vmm CHECKOUT`: adds the option `--nvme-mpt` to a checkout of Cloud Hypervisor, as a branch of commits.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Parser;
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
    let version = checkout.version(&series)?;
    let commits = series.plan(&version.name, &checkout)?;
    if arguments.check {
        println!("The series fits {version}:");
        for (commit, change) in commits {
            println!("  {}: {} files", commit.name, change.paths().count());
        }
        return Ok(());
    }
    Err("Only --check is there yet".into())
}
