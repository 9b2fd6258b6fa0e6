//! `nvme-mpt add`, `reserve`, `remove`, `limit`, `resize`, `list`, `reload` and `upgrade`: functions of a running server.

use std::env;
use std::error::Error;
use std::fs;
use std::io::{self, Write};
use std::num::NonZeroU64;
use std::path::PathBuf;

use clap::Args;
use nvme_lease::MIN_UNIT;
use nvme_lease::range::ByteSize;
use nvme_mpt_server::change::{ChangeResult, FunctionChange, ReservedLease};
use nvme_mpt_server::control;
use nvme_mpt_server::owner::user_name;
use nvme_mpt_server::serve::print_function;
use nvme_mpt_server::stats::{SUPERVISOR_ENDED, SupervisorStatus};
use nvme_mpt_vmm::options::{LeaseReservation, OptionText, RateChange, option_help};
use thiserror::Error;

use super::{FILES_HELP, RunningServerArgs, error_text};
use crate::table::{capacity, list};

/// Add a function to a running server, also for its next start
///
/// Prints the arguments with which Cloud Hypervisor and QEMU attach it.
#[derive(Args, Debug)]
#[command(after_help = FILES_HELP)]
pub(super) struct AddArgs {
    #[arg(
        value_name = "OPTIONS",
        help = function_synopsis(),
        long_help = function_help(),
        value_parser = |text: &str| text.parse::<OptionText>().map_err(|error| error_text(&error))
    )]
    options: OptionText,
    #[command(flatten)]
    server: RunningServerArgs,
}

/// Reserve a lease of a running server's drive for the VMMs of a user
///
/// VMMs of other users are refused the lease, but for root and the user of the server. The reservation lasts until
/// `nvme-mpt leases release ID`. Data of other ids in the range has to be erased or kept, as for every lease.
#[derive(Args, Debug)]
pub(super) struct ReserveArgs {
    #[arg(
        value_name = "OPTIONS",
        help =
            "path=DRIVE,owner=USER,id=ID, and range= or size= as for `add`; limits as for `limit`",
        value_parser = |text: &str| match text.parse::<LeaseReservation>() {
            Ok(_) => text.parse::<OptionText>().map_err(|error| error_text(&error)),
            Err(error) => Err(error_text(&error)),
        }
    )]
    options: OptionText,
    #[command(flatten)]
    server: RunningServerArgs,
}

/// Remove a function from a running server, and give its lease back
#[derive(Args, Debug)]
pub(super) struct RemoveArgs {
    /// The function's id, or the path of its socket, with a slash: ./a.sock
    id: String,
    /// Remove it although a VMM is connected. Its guest loses the drive
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    server: RunningServerArgs,
}

/// Change the limits of a function of a running server, under its guest
///
/// Limits of a function that was added are restored after a restart. Limits of a function in a VMM apply until
/// `nvme-mpt leases release ID`.
#[derive(Args, Debug)]
pub(super) struct LimitArgs {
    /// The function's id, or the path of its socket, with a slash: ./a.sock
    id: String,
    /// iops=NUMBER[+BURST] and bandwidth=SIZE[+BURST], each per second, or none for no limit; weight=N beside other
    /// busy guests of a physical drive, or none for 100
    #[arg(
        value_name = "LIMITS",
        value_parser = |text: &str| text.parse::<RateChange>().map(|_| text.to_owned()).map_err(|error| error_text(&error))
    )]
    limits: String,
    #[command(flatten)]
    server: RunningServerArgs,
}

/// Change the size of a function of a running server that has size=, under its guest
///
/// It grows while its guest runs, and the guest is notified. It shrinks only with --truncate, and only while no VMM is
/// connected: data at its end is lost. The size of a function that was added is restored after a restart.
#[derive(Args, Debug)]
pub(super) struct ResizeArgs {
    /// The function's id, or the path of its socket, with a slash: ./a.sock
    id: String,
    /// New size, as in 128G
    #[arg(value_parser = |text: &str| text.parse::<ByteSize>().map_err(|error| error_text(&error)))]
    size: ByteSize,
    /// Make it smaller, and lose the data at its end
    #[arg(long)]
    truncate: bool,
    #[command(flatten)]
    server: RunningServerArgs,
}

/// Show the functions of a running server
#[derive(Args, Debug)]
pub(super) struct ListArgs {
    #[command(flatten)]
    server: RunningServerArgs,
}

/// Show the ids that have parts of each drive of a running server, and what is free
///
/// Data of an id takes capacity until `nvme-mpt leases release ID`.
#[derive(Args, Debug)]
pub(super) struct CapacityArgs {
    /// Count what is free in units of this size, as in 16M: a power of two, 1M or more [default: 1G; of zones, one
    /// zone]
    #[arg(long, value_name = "SIZE", value_parser = parse_unit)]
    unit: Option<ByteSize>,
    #[command(flatten)]
    server: RunningServerArgs,
}

/// Make the functions of a running server those of its file
///
/// Functions that did not change continue. If a function of the file is wrong, or a VMM is connected to one that changes
/// or goes or has a lease on a drive that goes, nothing is changed.
#[derive(Args, Debug)]
pub(super) struct ReloadArgs {
    /// Reload although a VMM is connected to a function that changes or goes, or has a lease on a drive that goes. Its
    /// guest loses the drive
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    server: RunningServerArgs,
}

/// Replace a running server by a new process, without its VMs noticing more than a pause
///
/// The server needs a supervisor: `nvme-mpt supervise`, or systemd with resources/nvme-mpt.service. The new process has the
/// same arguments, and serves the same functions even if the file was edited: differences are reported, and `nvme-mpt reload`
/// applies them. If it cannot take over the state of a function, the old server continues.
#[derive(Args, Debug)]
#[command(after_help = FILES_HELP)]
pub(super) struct UpgradeArgs {
    /// Program of the new process [default: the path of the server's program, which an update may have replaced]
    #[arg(long, value_name = "PATH")]
    binary: Option<PathBuf>,
    /// End with 3 if the file differs from what is served. The new process has taken over then, too
    #[arg(long)]
    strict: bool,
    #[command(flatten)]
    server: RunningServerArgs,
}

/// Error of the program given to `nvme-mpt upgrade --binary`.
#[derive(Debug, Error)]
#[error("Cannot use the program {}", path.display())]
struct BinaryError {
    path: PathBuf,
    source: io::Error,
}

/// Error of `nvme-mpt upgrade --strict`: the file differs from the served configuration.
#[derive(Debug, Error)]
#[error("The file differs from what is served: apply it with `nvme-mpt reload`, or change it back")]
pub(super) struct DiffersError;

/// Returns the output of `nvme-mpt upgrade --json`.
pub(super) fn upgrade_json(process: u32, pending: &[String]) -> serde_json::Value {
    serde_json::json!({ "process": process, "pending": pending })
}

impl UpgradeArgs {
    pub(super) fn run(self) -> Result<(), Box<dyn Error>> {
        let binary = self.binary.as_ref().map(|path| {
            fs::canonicalize(path).map_err(|source| BinaryError {
                path: path.clone(),
                source,
            })
        });
        let upgrade = FunctionChange::Upgrade {
            binary: binary.transpose()?,
        };
        let before = control::listening_pid(&self.server.control());
        let ChangeResult::Upgraded { process, pending } = self.server.request_change(upgrade)?
        else {
            return Err(UNEXPECTED_ANSWER.into());
        };
        control::await_server(&self.server.control(), before, process)?;
        let mut out = io::stdout().lock();
        match self.server.json {
            true => writeln!(out, "{}", upgrade_json(process, &pending))?,
            false => writeln!(out, "Process {process} is the server now")?,
        }
        for sentence in &pending {
            // If standard error is closed, the warning cannot be shown.
            let _ = writeln!(io::stderr(), "nvme-mpt: warning: {sentence}");
        }
        match self.strict && !pending.is_empty() {
            true => Err(DiffersError.into()),
            false => Ok(()),
        }
    }
}

impl AddArgs {
    pub(super) fn run(self) -> Result<(), Box<dyn Error>> {
        let add = FunctionChange::Add {
            options: self
                .options
                .with_absolute_paths(&env::current_dir()?)
                .to_string(),
        };
        let ChangeResult::Added(entry) = self.server.request_change(add)? else {
            return Err(UNEXPECTED_ANSWER.into());
        };
        let mut out = io::stdout().lock();
        match self.server.json {
            true => writeln!(out, "{}", serde_json::to_string(&entry)?)?,
            false => print_function(&entry, &mut out)?,
        }
        Ok(())
    }
}

impl ReserveArgs {
    pub(super) fn run(self) -> Result<(), Box<dyn Error>> {
        let reserve = FunctionChange::Reserve {
            options: self
                .options
                .with_absolute_paths(&env::current_dir()?)
                .to_string(),
        };
        let ChangeResult::Reserved(reserved) = self.server.request_change(reserve)? else {
            return Err(UNEXPECTED_ANSWER.into());
        };
        let mut out = io::stdout().lock();
        if self.server.json {
            writeln!(out, "{}", serde_json::to_string(&reserved)?)?;
            return Ok(());
        }
        let ReservedLease {
            id,
            owner,
            drive,
            extents,
        } = reserved;
        let owner = user_name(owner);
        writeln!(out, "Reserved {id} for {owner}: range {extents} of {drive}")?;
        Ok(())
    }
}

impl RemoveArgs {
    pub(super) fn run(self) -> Result<(), Box<dyn Error>> {
        let remove = FunctionChange::Remove {
            id: socket_or_id(self.id),
            force: self.force,
        };
        let ChangeResult::Removed {
            function,
            failure: trouble,
        } = self.server.request_change(remove)?
        else {
            return Err(UNEXPECTED_ANSWER.into());
        };
        let mut out = io::stdout().lock();
        match self.server.json {
            true => writeln!(out, "{}", serde_json::to_string(&function)?)?,
            false => writeln!(out, "Removed {}: {}", function.id, function.summary)?,
        }
        match trouble {
            None => Ok(()),
            Some(failure) => Err(failure.into()),
        }
    }
}

impl LimitArgs {
    pub(super) fn run(self) -> Result<(), Box<dyn Error>> {
        let limit = FunctionChange::Limit {
            id: socket_or_id(self.id),
            limits: self.limits.clone(),
        };
        let ChangeResult::Limited(entry) = self.server.request_change(limit)? else {
            return Err(UNEXPECTED_ANSWER.into());
        };
        let mut out = io::stdout().lock();
        match self.server.json {
            true => writeln!(out, "{}", serde_json::to_string(&entry)?)?,
            false => writeln!(out, "Limited {}: {}", entry.id, self.limits)?,
        }
        Ok(())
    }
}

impl ResizeArgs {
    pub(super) fn run(self) -> Result<(), Box<dyn Error>> {
        let resize = FunctionChange::Resize {
            id: socket_or_id(self.id),
            bytes: self.size.0,
            truncate: self.truncate,
        };
        let ChangeResult::Resized(entry) = self.server.request_change(resize)? else {
            return Err(UNEXPECTED_ANSWER.into());
        };
        let mut out = io::stdout().lock();
        match self.server.json {
            true => writeln!(out, "{}", serde_json::to_string(&entry)?)?,
            false => writeln!(out, "Resized {}: {}", entry.id, self.size)?,
        }
        Ok(())
    }
}

impl ListArgs {
    pub(super) fn run(self) -> Result<(), Box<dyn Error>> {
        let functions = control::query_functions(&self.server.control())?;
        // The server is asked before anything is printed, so that a command that fails prints nothing.
        let stats = control::query_stats(&self.server.control())?;
        let mut out = io::stdout().lock();
        if self.server.json {
            writeln!(out, "{}", serde_json::to_string(&functions)?)?;
        } else if functions.is_empty() {
            writeln!(out, "No functions; add one with `nvme-mpt add`")?;
        } else {
            write!(out, "{}", list::table(&functions))?;
        }
        drop(out);
        if stats.supervisor == SupervisorStatus::Ended {
            // If standard error is closed, the warning cannot be shown.
            let _ = writeln!(io::stderr(), "nvme-mpt: warning: {SUPERVISOR_ENDED}");
        }
        Ok(())
    }
}

fn parse_unit(text: &str) -> Result<ByteSize, String> {
    match text.parse::<ByteSize>() {
        Ok(unit) if unit.0.is_power_of_two() && unit.0 >= MIN_UNIT => Ok(unit),
        Ok(_) => Err("a unit is a power of two, 1M or more".to_owned()),
        Err(error) => Err(error_text(&error)),
    }
}

impl CapacityArgs {
    pub(super) fn run(self) -> Result<(), Box<dyn Error>> {
        let unit = self.unit.and_then(|unit| NonZeroU64::new(unit.0));
        let capacities = control::query_capacity(&self.server.control(), unit)?;
        let mut out = io::stdout().lock();
        if self.server.json {
            writeln!(out, "{}", serde_json::to_string(&capacities)?)?;
        } else if capacities.is_empty() {
            writeln!(
                out,
                "No drives; open one with `nvme-mpt serve --drive` or `nvme-mpt add`"
            )?;
        } else {
            write!(out, "{}", capacity::table(&capacities))?;
        }
        Ok(())
    }
}

impl ReloadArgs {
    pub(super) fn run(self) -> Result<(), Box<dyn Error>> {
        let reload = FunctionChange::Reload { force: self.force };
        let ChangeResult::Reloaded(reloaded) = self.server.request_change(reload)? else {
            return Err(UNEXPECTED_ANSWER.into());
        };
        let mut out = io::stdout().lock();
        if self.server.json {
            writeln!(out, "{}", serde_json::to_string(&reloaded)?)?;
            return Ok(());
        }
        for (names, done) in [
            (&reloaded.added, "Added"),
            (&reloaded.changed, "Changed"),
            (&reloaded.limited, "Limited"),
            (&reloaded.resized, "Resized"),
            (&reloaded.removed, "Removed"),
        ] {
            if !names.is_empty() {
                writeln!(out, "{done}: {}", names.join(", "))?;
            }
        }
        writeln!(out, "Unchanged: {}", reloaded.unchanged)?;
        Ok(())
    }
}

pub(super) fn function_synopsis() -> String {
    format!("A function:\n{}", option_help::synopsis())
}

pub(super) fn function_help() -> String {
    format!(
        "{}\n\n{}\nA value with a comma stands in double quotes. docs/options.md has the details.",
        function_synopsis(),
        option_help::help()
    )
}

/// Makes the path absolute if the text is a socket's path. A text with a slash is such a path, since ids contain none.
fn socket_or_id(text: String) -> String {
    match text.contains('/').then(|| std::path::absolute(&text)) {
        Some(Ok(path)) => path.display().to_string(),
        _ => text,
    }
}

/// Error of an answer of the wrong kind.
const UNEXPECTED_ANSWER: &str =
    "The server's answer is for another request: use the version of nvme-mpt that the server has";
