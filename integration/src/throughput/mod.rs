//! Compares ways of giving one NVMe drive to a guest, in the lab: pass-through of the whole device, nvme-mpt, and virtio on
//! the host's driver. For comparison, the host's driver is measured without a guest. If `CLOUD_HYPERVISOR` is set, guests
//! of Cloud Hypervisor also use a file on the drive, through nvme-mpt and through Cloud Hypervisor's virtio-blk.
//!
//! In the lab, an instruction costs much more than on a real processor, and the drive costs nearly nothing. So only ratios
//! between the ways have a meaning, and they favour ways with few instructions.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Parser;
use figure_data::FigureError;
use thiserror::Error;

use crate::guest::fio::{FioError, FioJobDirection, GuestFioJob};
use crate::guest::{self, GuestError};
use crate::lab::inside::{self, InsideError};
use crate::lab::options::build;
use crate::lab::{Lab, LabConfig, LabDrive, LabError};
use crate::process::ProcessError;
use crate::progress::{ProgressStep, print_line};
use crate::provision::lab::LabAssets;
use crate::provision::{GuestAssets, KernelChoice, ProvisionError};
use crate::server::ServerError;
use crate::vmms::VmmsError;
use crate::vmms::cloud_hypervisor;

mod access_method;
mod table;

use access_method::AccessMethod;
use table::ThroughputTable;

/// The lab's only drive.
const DRIVE: &str = "a";
const DRIVE_SIZE: u64 = 512 << 20;
/// Default number of the host's CPUs.
const VCPUS: u32 = 2;
/// Timeout of the measurement. It is longer than any run.
const TIMEOUT: Duration = Duration::from_secs(4 * 3600);
const REPORT: &str = "/tmp/throughput.json";
/// Maximum number of attempts for a way whose guest is lost.
const ATTEMPTS: u32 = 3;

/// Measures a drive through each way into a guest, in the lab, and prints a table with ratios
#[derive(Debug, Parser)]
#[command(name = "throughput", version)]
pub struct ThroughputOptions {
    /// Duration of each job
    #[arg(long, value_name = "SECONDS", default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..))]
    runtime: u64,
    /// Rounds of measurements; the table has the medians
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Only the jobs with this in their names, such as "4k" or "qd32"
    #[arg(long, value_name = "PART", default_value = "")]
    jobs: String,
    /// Only the ways with this in their names, such as "file" or "busy"
    #[arg(long, value_name = "PART", default_value = "")]
    ways: String,
    /// The host's CPUs
    #[arg(long, default_value_t = VCPUS, value_parser = clap::value_parser!(u32).range(1..=16))]
    vcpus: u32,
    /// Writes the figures into a file, for `cargo figures`
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Errors of the measurement.
#[derive(Debug, Error)]
pub enum ThroughputError {
    /// The guests cannot be provided.
    #[error(transparent)]
    Provision(#[from] ProvisionError),
    /// A program failed.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// The server failed.
    #[error(transparent)]
    Server(#[from] ServerError),
    /// A guest failed.
    #[error(transparent)]
    Guest(#[from] GuestError),
    /// fio failed.
    #[error(transparent)]
    Fio(#[from] FioError),
    /// The lab failed.
    #[error(transparent)]
    Lab(#[from] LabError),
    /// A VMM failed.
    #[error(transparent)]
    Vmm(#[from] VmmsError),
    /// A drive or file in the lab is missing.
    #[error(transparent)]
    Inside(#[from] InsideError),
    /// A file cannot be used.
    #[error("Cannot use {path}")]
    File {
        /// The file.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// The figures cannot be written.
    #[error(transparent)]
    Figure(#[from] FigureError),
    /// The measuring program in the lab failed.
    #[error(
        "Nothing was measured: the program in the lab ended with status {status}; the cause is above"
    )]
    NotMeasured {
        /// Exit status.
        status: i32,
    },
    /// No way has the text in its name.
    #[error(
        "There is no way with '{part}' in its name; those on a file want {variable} to name a Cloud Hypervisor",
        variable = cloud_hypervisor::PATH_VARIABLE
    )]
    NoWay {
        /// The text.
        part: String,
    },
    /// No job has the text in its name.
    #[error("There is no job with '{part}' in its name")]
    NoJob {
        /// The text.
        part: String,
    },
}

/// Returns the jobs: random 4 KiB and sequential 128 KiB, as reads, writes and a mix, with one command and with 32 in
/// flight. Each job uses libaio with direct I/O in one process, on a drive whose blocks were all written before.
fn jobs(options: &ThroughputOptions) -> Result<Vec<GuestFioJob>, ThroughputError> {
    let runtime = Duration::from_secs(options.runtime);
    let job = |name, pattern, size, depth| {
        GuestFioJob::new(name, pattern, size, depth)
            .runtime(runtime)
            .option("size", "256m")
            // The ramp time keeps one-time work of drive and guest out of the measurement.
            .option("ramp_time", "1")
    };
    let jobs: Vec<GuestFioJob> = [
        job("randread-4k-qd1", "randread", "4k", 1),
        job("randread-4k-qd32", "randread", "4k", 32),
        job("randwrite-4k-qd1", "randwrite", "4k", 1),
        job("randwrite-4k-qd32", "randwrite", "4k", 32),
        job("randrw-4k-qd32", "randrw", "4k", 32).option("rwmixread", "70"),
        job("read-128k-qd1", "read", "128k", 1),
        job("read-128k-qd32", "read", "128k", 32),
        job("write-128k-qd1", "write", "128k", 1),
        job("write-128k-qd32", "write", "128k", 32),
    ]
    .into_iter()
    .filter(|job| job.name().contains(&options.jobs))
    .collect();
    if jobs.is_empty() {
        return Err(ThroughputError::NoJob {
            part: options.jobs.clone(),
        });
    }
    Ok(jobs)
}

/// Returns the selected ways.
fn ways(options: &ThroughputOptions) -> Result<Vec<AccessMethod>, ThroughputError> {
    let mut ways = AccessMethod::all();
    ways.retain(|way| way.name().contains(&options.ways));
    if ways.is_empty() {
        return Err(ThroughputError::NoWay {
            part: options.ways.clone(),
        });
    }
    Ok(ways)
}

/// Measures and prints the results. Outside of the lab, boots a lab and measures there.
///
/// # Errors
/// A way cannot be measured; a table is never incomplete.
pub fn run(options: &ThroughputOptions) -> Result<(), ThroughputError> {
    if inside::is_inside() {
        // The program outside of the lab prints the results.
        let table = measure(options)?;
        let path = options.json.clone().unwrap_or_else(|| REPORT.into());
        return fs::write(&path, table.json())
            .map_err(|source| ThroughputError::File { path, source });
    }
    let table = measure_in_lab(options)?;
    if let Some(path) = &options.json {
        table.figure(&command(options)).write(path)?;
    }
    print_line(&table.to_string());
    Ok(())
}

/// Returns the command that makes this measurement inside the lab.
fn command(options: &ThroughputOptions) -> String {
    let ThroughputOptions {
        runtime,
        rounds,
        vcpus,
        ..
    } = options;
    let mut command = format!("cargo throughput --runtime {runtime} --rounds {rounds}");
    if cloud_hypervisor::configured_path().is_some() {
        command = format!("{}=PATH {command}", cloud_hypervisor::PATH_VARIABLE);
    }
    for (name, part) in [("jobs", &options.jobs), ("ways", &options.ways)] {
        if !part.is_empty() {
            command += &format!(" --{name} '{part}'");
        }
    }
    if *vcpus != VCPUS {
        command += &format!(" --vcpus {vcpus}");
    }
    command
}

fn measure_in_lab(options: &ThroughputOptions) -> Result<ThroughputTable, ThroughputError> {
    jobs(options)?;
    ways(options)?;
    let mut programs = build()?;
    let itself = std::env::current_exe().map_err(|source| ThroughputError::File {
        path: PathBuf::from("this program"),
        source,
    })?;
    programs.push(itself);
    programs.extend(cloud_hypervisor::existing_path());
    let assets = LabAssets::provide(&KernelChoice::V6_12)?;
    let dir = tempfile::Builder::new()
        .prefix("nvme-mpt-throughput-")
        .tempdir()
        .map_err(|source| ThroughputError::File {
            path: std::env::temp_dir(),
            source,
        })?;
    let mut config = LabConfig::new()
        .vcpus(options.vcpus)
        .drive(LabDrive::new(DRIVE, DRIVE_SIZE));
    for program in &programs {
        config = config.with_file(program);
    }
    let step = ProgressStep::start("Booting the lab");
    let lab = Lab::boot(&assets, &config, dir.path())?;
    step.done(format!("kernel {}", assets.host.kernel.name));
    let command = format!(
        "{}throughput --runtime {} --rounds {} --jobs '{}' --ways '{}' --json {REPORT}",
        cloud_hypervisor::assignment(),
        options.runtime,
        options.rounds,
        options.jobs,
        options.ways
    );
    let status = lab.stream(&command, TIMEOUT, &mut io::stdout())?;
    let report = lab.finish(status, &[REPORT.to_owned()], dir.path())?;
    if status != 0 {
        // The program in the lab has already printed the cause.
        return Err(ThroughputError::NotMeasured { status });
    }
    let path = dir.path().join("throughput.json");
    let text = fs::read_to_string(&path).map_err(|source| ThroughputError::File {
        path: path.clone(),
        source,
    })?;
    let mut table = ThroughputTable::from_json(&text).map_err(|source| ThroughputError::File {
        path,
        source: source.into(),
    })?;
    table.iommu_faults = report.iommu_faults;
    Ok(table)
}

fn measure(options: &ThroughputOptions) -> Result<ThroughputTable, ThroughputError> {
    let jobs = jobs(options)?;
    let assets = GuestAssets::provide(&KernelChoice::V6_12)?;
    let dir = PathBuf::from("/tmp/throughput");
    fs::create_dir_all(&dir).map_err(|source| ThroughputError::File {
        path: dir.clone(),
        source,
    })?;
    access_method::fill()?;
    let ways = ways(options)?;
    let names = ways.iter().map(|way| way.name());
    let mut table = ThroughputTable::new(names, jobs.iter().map(GuestFioJob::name));
    for round in 1..=options.rounds {
        for (column, way) in ways.iter().enumerate() {
            let step = ProgressStep::start(format!("{} (round {round})", way.name()));
            let sides = measured(*way, &jobs, &assets, &dir)?;
            for (row, side) in sides.iter().enumerate() {
                table.add(row, column, side);
            }
            step.done("");
        }
    }
    Ok(table)
}

/// Measures with one way. If its guest is lost, measures again.
fn measured(
    way: AccessMethod,
    jobs: &[GuestFioJob],
    assets: &GuestAssets,
    dir: &Path,
) -> Result<Vec<FioJobDirection>, ThroughputError> {
    for _ in 1..ATTEMPTS {
        match way.measure(jobs, assets, dir) {
            Err(error) if guest::is_lost(&error) => {
                print_line(&format!("    {}", guest::LOST_GUEST_LINE))
            }
            result => return result,
        }
    }
    way.measure(jobs, assets, dir)
}
