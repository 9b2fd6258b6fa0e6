//! The demonstration: guests share one drive, each with a range of its own. It verifies that no guest wrote to the range of
//! another one.

use std::fs;
use std::io;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::thread;
use std::time::Duration;

use clap::{Parser, ValueEnum};
use nvme_vfio::function::PciAddress;
use thiserror::Error;

use crate::guest::fio::FioError;
use crate::guest::{self, BOOT_TIMEOUT, Guest, GuestConfig, GuestDrive, GuestError};
use crate::lab::LabError;
use crate::process::ProcessError;
use crate::progress::{ProgressOutput, ProgressStep, capture_lines, print_line};
use crate::provision::{GuestAssets, KernelChoice, ProvisionError};
use crate::server::{self, FunctionArgument, Server, ServerError};

mod host;
mod isolation;
mod jobs;
mod lab;
mod report;

use host::UnboundDrive;
use isolation::DriveLayout;
use report::DemoReport;

const POWER_OFF_TIMEOUT: Duration = Duration::from_secs(300);

/// Boots guests that share one drive, and checks that each range holds its own guest's data alone
///
/// Measures each guest's I/O. The exit status is not 0 if a verification or the isolation check fails.
#[derive(Debug, Parser)]
#[command(name = "demo", version)]
pub struct DemoOptions {
    /// Number of guests that share the drive
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=16))]
    guests: u32,
    /// The guests' kernel: 6.1 (Debian 12), 6.12 (Debian 13), or the path of an image
    #[arg(long, default_value = "6.12")]
    kernel: KernelChoice,
    /// The drive, WHOSE CONTENT IS OVERWRITTEN: a file or block device that exists, the PCI
    /// address of a physical drive, or memory:SIZE. With "lab", the demonstration runs on an
    /// emulated host with a drive. By default, a new file
    #[arg(long, value_name = "PATH|ADDRESS|memory:SIZE|lab")]
    drive: Option<DriveChoice>,
    /// Way in which guests ring doorbells
    #[arg(long, value_enum, default_value_t = DemoDoorbellMode::Shadow)]
    doorbells: DemoDoorbellMode,
    /// vCPUs of each guest, and so its I/O queues
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=16))]
    vcpus: u32,
    /// Duration of each job
    #[arg(long, value_name = "SECONDS", default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..))]
    runtime: u64,
    /// Only the jobs that have this in their names, such as randread or verify
    #[arg(long, value_name = "TEXT", value_parser = jobs::parse_job_filter)]
    jobs: Option<String>,
    /// Writes the measurements into a file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Doorbell mode of the guests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DemoDoorbellMode {
    /// A store to the Doorbell Buffer in the guest's memory
    Shadow,
    /// A store to a page that is mapped into the guest
    Mapped,
    /// A trapped register write: an exit to the VMM for each doorbell
    Trap,
}

impl DemoDoorbellMode {
    /// Returns the value of the `doorbells` option.
    pub fn word(self) -> &'static str {
        match self {
            Self::Shadow => "shadow",
            Self::Mapped => "mapped",
            Self::Trap => "trap",
        }
    }
}

/// Drive that the guests share.
#[derive(Debug, Clone, PartialEq, Eq)]
enum DriveChoice {
    Path(PathBuf),
    Function { address: String },
    Memory { size: u64 },
    Lab,
}

impl FromStr for DriveChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "lab" {
            return Ok(Self::Lab);
        }
        if let Ok(address) = text.parse::<PciAddress>() {
            return Ok(Self::Function {
                address: address.to_string(),
            });
        }
        let Some(size) = text.strip_prefix("memory:") else {
            return Ok(Self::Path(PathBuf::from(text)));
        };
        let size = crate::parse_size(size).ok_or_else(|| {
            format!("'{size}' is not a size: a number of bytes, or with K, M, G or T")
        })?;
        Ok(Self::Memory { size })
    }
}

/// Errors of the demonstration.
#[derive(Debug, Error)]
pub enum DemoError {
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
    /// A fio job that must work failed.
    #[error(transparent)]
    Fio(#[from] FioError),
    /// The drive is too small for the guests.
    #[error("{size} bytes are too few for {guests} guests: the drive must have at least {least}")]
    TooSmall {
        /// The drive's size.
        size: u64,
        /// Number of guests.
        guests: u32,
        /// Minimum size.
        least: u64,
    },
    /// A file cannot be used.
    #[error("Cannot use {path}")]
    File {
        /// The file.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// The drive's path does not exist.
    #[error(
        "There is no drive {path}: give one that exists, as made by `truncate -s 1G FILE`, or leave --drive out for a \
         file of its own"
    )]
    NoDrive {
        /// The path.
        path: PathBuf,
    },
    /// The host has no PCI function at the address.
    #[error(
        "There is no PCI function {address} on this host: `nvme-mpt drives` lists its NVMe functions"
    )]
    NoFunction {
        /// The address.
        address: String,
    },
    /// The host's driver shows no namespace of the drive.
    #[error(
        "Drive {address} has no block device here: its content is checked through the host's nvme driver, \
         which must have it when the demonstration begins (`nvme-mpt unbind {address}`)"
    )]
    NoBlockDevice {
        /// The drive.
        address: String,
    },
    /// The lab failed.
    #[error(transparent)]
    Lab(#[from] LabError),
    /// A guest in the lab was [lost](crate::guest::is_lost).
    #[error("In the lab a guest was lost:\n{output}")]
    GuestLost {
        /// End of the demonstration's output.
        output: String,
    },
    /// The demonstration inside the lab failed.
    #[error("The demonstration in the lab ended with status {status}, without a report:\n{output}")]
    NotGiven {
        /// Exit status of the program.
        status: i32,
        /// End of its output.
        output: String,
    },
    /// A program in a guest printed invalid output.
    #[error("Unexpected output of guest {guest} about its drive: {output:?}")]
    Drive {
        /// The guest.
        guest: String,
        /// Its output.
        output: String,
    },
}

/// Runs the demonstration. Returns whether all data was right, and all guests wrote only to their ranges.
///
/// # Errors
/// The demonstration cannot be run.
pub fn run(options: &DemoOptions) -> Result<bool, DemoError> {
    if options.drive == Some(DriveChoice::Lab) {
        return lab::run(options);
    }
    // Checked before anything is fetched or built.
    match &options.drive {
        Some(DriveChoice::Path(path)) => isolation::check_exists(path)?,
        Some(DriveChoice::Function { address }) => host::check_function(address)?,
        _ => {}
    }
    let (assets, binary) = provide_and_build(options)?;
    let dir = tempfile::Builder::new()
        .prefix("nvme-mpt-demo-")
        .tempdir()
        .map_err(|source| DemoError::File {
            path: std::env::temp_dir(),
            source,
        })?;

    let result = run_on_drive(options, &assets, &binary, dir.path());
    match &result {
        Ok(report) if report.all_well() => {}
        _ => print_line(&format!(
            "Logs and consoles are kept in {}",
            dir.keep().display()
        )),
    }
    let report = result?;
    if let Some(path) = &options.json {
        fs::write(path, report.json()).map_err(|source| DemoError::File {
            path: path.clone(),
            source,
        })?;
    }
    print_line(&report.table());
    Ok(report.all_well())
}

/// Provides the guests' files and builds the server, both at a time: one waits for the network, the other for processors.
fn provide_and_build(options: &DemoOptions) -> Result<(GuestAssets, PathBuf), DemoError> {
    thread::scope(|scope| {
        let build = scope.spawn(|| capture_lines(server::build));
        let assets = GuestAssets::provide(&options.kernel)?;
        let step = ProgressStep::start("Waiting for the build of nvme-mpt, which began before");
        let (built, lines) = build.join().unwrap_or_else(|panic| resume_unwind(panic));
        step.done("");
        print_line(lines.trim_end());
        Ok((assets, built?))
    })
}

fn run_on_drive(
    options: &DemoOptions,
    assets: &GuestAssets,
    binary: &Path,
    dir: &Path,
) -> Result<DemoReport, DemoError> {
    let layout = match &options.drive {
        Some(DriveChoice::Memory { size }) => DriveLayout::in_memory(*size, options.guests)?,
        Some(DriveChoice::Path(path)) => DriveLayout::on_file(path, options.guests)?,
        Some(DriveChoice::Function { address }) => {
            DriveLayout::on_function(address, options.guests)?
        }
        Some(DriveChoice::Lab) | None => {
            let path = crate::target_dir().join("demo/drive.img");
            let at = |source| DemoError::File {
                path: path.clone(),
                source,
            };
            fs::create_dir_all(path.parent().unwrap_or(&path)).map_err(at)?;
            // The file is created anew, since the file of an earlier run may contain guests' patterns.
            match fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(at(error)),
                _ => {}
            }
            DriveLayout::on_file(&path, options.guests)?
        }
    };
    let step = ProgressStep::start(format!("Marking {}", layout.drive()));
    layout.mark_guards()?;
    step.done(layout.describe());

    let names: Vec<String> = (1..=options.guests).map(|n| format!("guest-{n}")).collect();
    let functions: Vec<FunctionArgument> = names
        .iter()
        .zip(layout.ranges())
        .map(|(name, range)| {
            FunctionArgument::new(name, layout.drive(), range.option())
                .option(format!("doorbells={}", options.doorbells.word()))
                .option(format!("queues={}", options.vcpus))
        })
        .collect();
    // Declared before the server, and therefore dropped after the server.
    let taken = match layout.function() {
        Some(address) => {
            let step = ProgressStep::start(format!("Taking {address} from the host's driver"));
            let taken = UnboundDrive::take(binary, address)?;
            step.done("");
            Some(taken)
        }
        None => None,
    };
    let step = ProgressStep::start("Starting nvme-mpt serve");
    let mut server = Server::start(binary, &functions, dir)?;
    step.done(format!("one process, {} functions", functions.len()));

    let step = ProgressStep::start(format!(
        "Booting {} guests, kernel {}",
        names.len(),
        assets.kernel.name
    ));
    // In a lab, guests that boot at the same time are lost more often.
    let one_by_one = crate::lab::inside::is_inside();
    let mut guests = Vec::new();
    for name in &names {
        let config = GuestConfig::new(name)
            .vcpus(options.vcpus)
            .drive(GuestDrive::vfio_user(server.socket(name)));
        let guest = Guest::start_booting(assets, &config, dir)?;
        if one_by_one {
            guest.await_ready(BOOT_TIMEOUT)?;
            step.note(format!("{name} is up"));
        }
        guests.push(guest);
    }
    for (guest, name) in guests.iter().zip(&names).filter(|_| !one_by_one) {
        guest.await_ready(BOOT_TIMEOUT)?;
        step.note(format!("{name} is up"));
    }
    step.done("");

    let step = ProgressStep::start("Measuring, all guests at once");
    let mut reports = on_each(&guests, |guest| jobs::measure(guest, &server, options))?;
    step.done("");

    let step =
        ProgressStep::start("Each guest fills its range with a pattern of its own, all at once");
    let filled = on_each(&guests, |guest| Ok(isolation::fill(guest)))?;
    step.done("");
    let step = ProgressStep::start("Each guest reads its whole range back");
    let read_back = on_each(&guests, |guest| Ok(isolation::read_back(guest)))?;
    step.done("");
    let ends = filled.into_iter().zip(read_back);
    all(reports
        .iter_mut()
        .zip(ends)
        .map(|(report, (filled, read_back))| {
            report.note(filled)?;
            report.note(read_back)
        }))?;

    for guest in &mut guests {
        guest.power_off(POWER_OFF_TIMEOUT)?;
    }
    server.stop()?;
    if let Some(taken) = taken {
        let step = ProgressStep::start(format!(
            "Giving {} back to the host's driver",
            layout.drive()
        ));
        taken.bind_again()?;
        step.done("");
    }

    let step = ProgressStep::start("Checking the drive: every range, and what lies between them");
    let faults = layout.check(&names)?;
    step.done(if faults.is_empty() {
        "all as it should be"
    } else {
        "NOT as it should be"
    });
    Ok(DemoReport {
        doorbells: options.doorbells,
        guests: reports,
        guards_checked: layout.has_guards(),
        faults,
    })
}

/// Runs `what` for all guests concurrently. Returns the results in the order of the guests.
fn on_each<T: Send>(
    guests: &[Guest],
    what: impl Fn(&Guest) -> Result<T, DemoError> + Sync,
) -> Result<Vec<T>, DemoError> {
    let lines = ProgressOutput::current();
    std::thread::scope(|scope| {
        let threads: Vec<_> = guests
            .iter()
            .map(|guest| scope.spawn(|| lines.with_lines(|| what(guest))))
            .collect();
        all(threads.into_iter().map(|thread| {
            thread
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        }))
    })
}

/// Returns all results, or one of the errors. An error that was not caused by a lost guest takes precedence.
fn all<T>(results: impl Iterator<Item = Result<T, DemoError>>) -> Result<Vec<T>, DemoError> {
    let (well, failed): (Vec<_>, Vec<_>) = results.partition(Result::is_ok);
    let (lost, failed): (Vec<_>, Vec<_>) = failed
        .into_iter()
        .filter_map(Result::err)
        .partition(|error| guest::is_lost(error));
    match failed.into_iter().chain(lost).next() {
        Some(error) => Err(error),
        None => well.into_iter().collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_lost_in_the_lab_counts_as_lost_outside() {
        let output = "the end of its console".to_owned();
        assert!(guest::is_lost(&DemoError::GuestLost {
            output: output.clone()
        }));
        assert!(!guest::is_lost(&DemoError::NotGiven { status: 1, output }));
    }

    #[test]
    fn a_lost_guest_does_not_hide_a_failure() {
        let lost = || {
            let output = String::new();
            Err(DemoError::GuestLost { output })
        };
        let failed = Err(DemoError::NoDrive { path: "/d".into() });
        let ends = all([Ok(1), lost(), failed, lost()].into_iter());
        assert!(matches!(ends, Err(DemoError::NoDrive { .. })), "{ends:?}");
        assert!(guest::is_lost(
            &all([Ok(1), lost()].into_iter()).unwrap_err()
        ));
        assert_eq!(all([Ok(1), Ok(2)].into_iter()).unwrap(), [1, 2]);
    }
}
