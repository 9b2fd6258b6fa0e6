//! The `nvme-mpt` command.

mod doctor;
mod functions;
#[cfg(test)]
mod json_page;
mod leases;
mod manual;
mod stats;
mod top;

use std::env;
use std::error::Error;
use std::ffi::OsString;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::str::FromStr;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use nvme_mpt_doctor::host_drives;
use nvme_mpt_logging::{self as logging, LevelFilter, LogFilter, ThreadedOutput};
use nvme_mpt_server::change::{ChangeResult, DeclarationSource, FunctionChange};
use nvme_mpt_server::confinement::{ConfinementOptions, FileRule, SeccompMode};
use nvme_mpt_server::control::{self, ControlError};
use nvme_mpt_server::faults::FaultRequest;
use nvme_mpt_server::metrics::{MetricsAddress, MetricsOptions};
use nvme_mpt_server::persistence::predecessor::FailureReport;
use nvme_mpt_server::persistence::{FIRST_STAGE, has_persisted_configuration};
use nvme_mpt_server::serve::{ParsedDeclaration, ServeOptions, option_files, serve};
use serde_json::json;
use thiserror::Error;

use nvme_layers::faults::FaultPlan;
use nvme_lease::range::ByteSize;
use nvme_lease::{CONTROL_SOCKET, PreviousDataPolicy};
use nvme_models::fit::fit_profile;
use nvme_mpt_supervise::{InheritedDescriptors, SuperviseOptions};
use nvme_mpt_vmm::drives::DrivePath;
use nvme_vfio::bind;
use nvme_vfio::function::{HostRoot, PciAddress};

use self::doctor::DoctorArgs;
use self::functions::{
    AddArgs, CapacityArgs, DiffersError, LimitArgs, ListArgs, ReloadArgs, RemoveArgs, ReserveArgs,
    ResizeArgs, UpgradeArgs, function_help, function_synopsis,
};
use self::leases::{LeasesArgs, run_leases};
use self::manual::{CompletionsArgs, ManArgs};
use self::stats::StatsArgs;
use self::top::TopArgs;
use crate::table::faults;
use nvme_mpt_vmm::options::{
    OptionError, OptionText, STATE_DIR, ServerDriveOptions, ServerFunctionOptions, VmmSocket,
    parse_memory_limit, parse_socket_path,
};
use nvme_mpt_vmm::report;

/// Exit code of `nvme-mpt upgrade --strict` if the file differs from the served configuration.
const DIFFERS_EXIT_CODE: u8 = 3;

/// Help text about the log.
const LOG_HELP: &str = "Environment:
  RUST_LOG  Least level of the log on standard error: error, warn (the
            default), info (that of serve), debug or trace; or levels of
            modules, as in RUST_LOG=warn,nvme_mpt_server=info";

/// Help text about files that other help texts name.
const FILES_HELP: &str = "Files:
  docs/, resources/  In the source tree, and in /usr/share/doc/nvme-mpt of the
                     Debian package";

/// Lets many virtual machines share one NVMe drive.
#[derive(Debug, Parser)]
#[command(name = "nvme-mpt", version, max_term_width = 80, after_help = LOG_HELP)]
struct CommandLine {
    #[command(subcommand)]
    command: MainCommand,
}

#[derive(Debug, Subcommand)]
enum MainCommand {
    Serve(Box<ServeArgs>),
    Supervise(SuperviseArgs),
    Upgrade(UpgradeArgs),
    Add(AddArgs),
    Reserve(ReserveArgs),
    Remove(RemoveArgs),
    Limit(LimitArgs),
    Resize(ResizeArgs),
    List(ListArgs),
    Capacity(CapacityArgs),
    Reload(ReloadArgs),
    Leases(LeasesArgs),
    Stats(StatsArgs),
    Top(TopArgs),
    Log(LogArgs),
    Fault(FaultArgs),
    Profile(ProfileArgs),
    Drives(DrivesArgs),
    Bind(BindArgs),
    Unbind(UnbindArgs),
    Doctor(DoctorArgs),
    Man(ManArgs),
    Completions(CompletionsArgs),
}

/// Offer NVMe functions to VMMs over vfio-user, until SIGTERM or SIGINT
///
/// Prints, for each function, the arguments with which Cloud Hypervisor and QEMU attach it, and then
/// "ready". Functions can be added and removed while it runs.
#[derive(Args, Debug)]
#[command(after_help = format!("{LOG_HELP}\n\n{FILES_HELP}"))]
struct ServeArgs {
    #[arg(
        long = "function",
        value_name = "OPTIONS",
        help = function_synopsis(),
        long_help = format!("{}\n\nCan be given many times.", function_help()),
        value_parser = OptionsArgument::<ServerFunctionOptions>::parse
    )]
    functions: Vec<OptionsArgument<ServerFunctionOptions>>,
    #[arg(
        long = "drive",
        value_name = "OPTIONS",
        help = drive_help(),
        value_parser = OptionsArgument::<ServerDriveOptions>::parse
    )]
    drives: Vec<OptionsArgument<ServerDriveOptions>>,
    /// File with functions and drives, like resources/serve.toml; `reload` reads it again
    #[arg(long = "config", value_name = "FILE")]
    file: Option<PathBuf>,
    /// Hand data that another id left in a range over to its new id, for functions without data=
    #[arg(long, conflicts_with = "wipe")]
    keep_data: bool,
    /// Erase data that another id left in a range before its new id gets it, for functions without data=
    ///
    /// The log reports the progress. A server that is ended meanwhile continues when it is started again.
    #[arg(long)]
    wipe: bool,
    /// Memory limit of functions without memory-limit=, and of functions in VMMs that may set none, as in 17G
    #[arg(
        long,
        value_name = "SIZE",
        value_parser = |text: &str| parse_memory_limit(text)
    )]
    memory_limit: Option<ByteSize>,
    /// Let VMMs of other users ask for their leases: mode= and owner= of the socket, as in mode=0660,owner=:kvm
    ///
    /// Without it, root and the user of this server may ask.
    #[arg(
        long,
        value_name = "OPTIONS",
        default_value = "mode=0600",
        hide_default_value = true,
        value_parser = |text: &str| text.parse::<VmmSocket>().map_err(|error| error_text(&error))
    )]
    vmm_socket: VmmSocket,
    /// Serve metrics to Prometheus at http://ADDRESS/metrics: PORT of the loopback interface, ADDRESS:PORT, or unix:PATH
    #[arg(long, value_name = "ADDRESS")]
    metrics: Option<MetricsAddress>,
    /// Name of this host by which clients may ask for metrics over TCP, beside addresses, localhost and the host name: other
    /// names are refused, as their owners could read the metrics by a browser on this host
    #[arg(long, value_name = "NAME")]
    metrics_host: Vec<String>,
    /// Write metrics into a file for the node exporter, every 15 s: it reads names that end in .prom in its textfile directory
    #[arg(long, value_name = "PATH")]
    metrics_file: Option<PathBuf>,
    /// Messages of the log: a least level (off, error, warn, info, debug, trace), or levels of modules, as in
    /// warn,nvme_vfio=debug [default: that of RUST_LOG, else info]
    #[arg(
        long,
        value_name = "FILTER",
        value_parser = |text: &str| text.parse::<LogFilter>().map_err(|error| error_text(&error))
    )]
    log: Option<LogFilter>,
    /// Filter of the server's system calls: true, false, or log, which only reports refusals to the kernel's audit log
    #[arg(
        long,
        value_name = "true|false|log",
        default_value = "true",
        value_parser = |text: &str| text.parse::<SeccompMode>().map_err(|error| error_text(&error))
    )]
    seccomp: SeccompMode,
    /// Let the server use only the files of its functions, drives and directories, by Landlock
    ///
    /// That is what the arguments, the file and earlier runs name at its start. The log reports what the kernel enforces.
    #[arg(long)]
    landlock: bool,
    /// Other files that the server may use, for functions that are added later: path=DIR,access=rw
    ///
    /// path= is a directory or a file, access= letters of r (read), w (write) and x (execute, for `upgrade --binary`). Can be
    /// given many times.
    #[arg(
        long,
        value_name = "path=DIR,access=rwx",
        requires = "landlock",
        value_parser = |text: &str| text.parse::<FileRule>().map_err(|error| error_text(&error))
    )]
    landlock_rules: Vec<FileRule>,
    #[command(flatten)]
    state: StateDirArgs,
    #[command(flatten)]
    control: ControlSocketArgs,
}

/// Show or change the messages that a running server logs
///
/// The change lasts until the server ends or is replaced. `serve --log` is permanent.
#[derive(Args, Debug)]
struct LogArgs {
    /// New filter: a least level (off, error, warn, info, debug, trace), or levels of modules, as in
    /// warn,nvme_vfio=debug
    #[arg(value_parser = |text: &str| text.parse::<LogFilter>().map_err(|error| error_text(&error)))]
    filter: Option<LogFilter>,
    #[command(flatten)]
    server: RunningServerArgs,
}

impl LogArgs {
    fn run(&self) -> Result<(), Box<dyn Error>> {
        let filter = control::set_log_filter(&self.server.control(), self.filter.as_ref())?;
        let mut out = io::stdout().lock();
        match self.server.json {
            true => writeln!(out, "{}", log_json(&filter))?,
            false => writeln!(out, "{filter}")?,
        }
        Ok(())
    }
}

/// Returns the output of `nvme-mpt log --json`.
fn log_json(filter: &str) -> serde_json::Value {
    json!({ "log": filter })
}

/// Keep the drives of VMs on vfio-user while their server is replaced
///
/// Starts COMMAND, `nvme-mpt serve` with its options, and starts it again after it died. Connections, memory and state of
/// the functions outlive it, so VMs notice only a pause. SIGTERM and SIGINT are passed on; the supervisor ends with the
/// server. systemd does the same with resources/nvme-mpt.service.
///
/// If a supervisor dies, its server continues and reports it in its log, list and stats. `nvme-mpt supervise --adopt` starts
/// the next one.
#[derive(Args, Debug)]
#[command(after_help = FILES_HELP)]
struct SuperviseArgs {
    /// Become the supervisor of a running server whose supervisor has died. COMMAND is started once that server dies
    #[arg(long)]
    adopt: bool,
    /// With --adopt: control socket of the server [default: control.sock in the default state directory]
    #[arg(long, value_name = "SOCKET", value_parser = parse_socket_path, requires = "adopt")]
    control: Option<PathBuf>,
    /// Deaths of the server within a minute after which it is not restarted
    #[arg(long, value_name = "COUNT", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    deaths: u32,
    /// Milliseconds until the restart after the second death within a minute; each further death doubles them, up to 5 s
    #[arg(long, value_name = "MILLISECONDS", default_value_t = 100)]
    delay: u32,
    /// Command of the server, as in: nvme-mpt supervise -- nvme-mpt serve --config /etc/nvme-mpt.toml
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "COMMAND"
    )]
    command: Vec<OsString>,
}

/// Inject, show or clear faults of a software drive of a running server
///
/// The drive must have been served with faults=none, or with faults of its own.
#[derive(Args, Debug)]
struct FaultArgs {
    #[command(subcommand)]
    command: Option<FaultCommand>,
    /// As JSON, one line
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    state: StateDirArgs,
    #[command(flatten)]
    control: ControlSocketArgs,
}

#[derive(Debug, Subcommand)]
enum FaultCommand {
    /// Show the faults of all drives, and how many commands each struck (what `fault` alone does)
    List {
        /// As JSON, one line
        #[arg(long)]
        json: bool,
    },
    /// Add the faults of a file to those of a drive
    #[command(after_help = FILES_HELP)]
    Inject {
        /// The drive, as in path=
        drive: DrivePath,
        /// The file, like resources/faults/example.toml
        plan: String,
    },
    /// Remove the faults of a drive. Their effects stay: a removed drive is gone
    Clear {
        /// The drive, as in path=
        drive: DrivePath,
    },
}

/// Make profiles of drives for profile=
#[derive(Args, Debug)]
struct ProfileArgs {
    #[command(subcommand)]
    command: ProfileCommand,
}

#[derive(Debug, Subcommand)]
enum ProfileCommand {
    /// Print a profile with the timing that fio measured on a real drive
    ///
    /// FILE is fio's output of --output-format=json --output=FILE; resources/drives/measure.fio has the jobs.
    #[command(after_help = FILES_HELP)]
    Fit {
        /// fio's report
        file: PathBuf,
    },
}

/// Show the NVMe functions of this host, with the obstacles to serving each
#[derive(Args, Debug)]
struct DrivesArgs {
    #[command(flatten)]
    server: RunningServerArgs,
}

/// Take a drive from the host's own driver, so that it can be served
///
/// Refuses a drive that is mounted, swap space, part of another block device, or open. The modules
/// vfio-pci and vfio_iommu_type1 must be loaded.
#[derive(Args, Debug)]
struct BindArgs {
    /// The drive's PCI address, as in 0000:01:00.0, or its directory in /sys/bus/pci/devices
    address: PciAddress,
    /// Take it even if a process has it open, or if an unknown driver has it
    #[arg(long)]
    force: bool,
}

/// Give a drive back to the host's own driver
///
/// Refuses a drive that is served, or that a virtual machine has.
#[derive(Args, Debug)]
struct UnbindArgs {
    /// The drive's PCI address, as in 0000:01:00.0, or its directory in /sys/bus/pci/devices
    address: PciAddress,
}

#[derive(Args, Debug)]
struct StateDirArgs {
    /// Directory with the ledger of leases, the same for all servers that share a drive
    #[arg(long, value_name = "DIR", default_value = STATE_DIR, global = true)]
    state_dir: PathBuf,
}

#[derive(Args, Debug)]
struct ControlSocketArgs {
    /// Control socket of the server [default: control.sock in the state directory]
    #[arg(long, value_name = "SOCKET", value_parser = parse_socket_path, global = true)]
    control: Option<PathBuf>,
}

fn drive_help() -> String {
    format!(
        "A drive that stays open without functions: {}",
        ServerDriveOptions::keys().collect::<Vec<_>>().join(", ")
    )
}

/// Options of all requests to a running server.
#[derive(Args, Debug)]
struct RunningServerArgs {
    #[command(flatten)]
    state: StateDirArgs,
    #[command(flatten)]
    control: ControlSocketArgs,
    /// As JSON, one line
    #[arg(long)]
    json: bool,
}

impl RunningServerArgs {
    /// Returns the server's control socket.
    fn control(&self) -> PathBuf {
        self.control.path(&self.state)
    }

    /// Requests a change from the server.
    fn request_change(&self, change: FunctionChange) -> Result<ChangeResult, ControlError> {
        control::request_change(&self.control(), change)
    }
}

impl ControlSocketArgs {
    fn path(&self, state: &StateDirArgs) -> PathBuf {
        self.control
            .clone()
            .unwrap_or_else(|| state.state_dir.join(CONTROL_SOCKET))
    }
}

/// Error of `--json` with a command that does not print a list.
#[derive(Debug, Error)]
#[error("--json is an option of {0} alone: leave it out")]
struct JsonError(&'static str);

/// An option string on the command line, with the files that it names.
#[derive(Clone, Debug)]
struct OptionsArgument<T> {
    /// The parsed argument, or the message about an invalid one.
    parsed: Result<ParsedDeclaration<T>, String>,
    option_files: Vec<PathBuf>,
}

impl<T: FromStr<Err = OptionError>> OptionsArgument<T> {
    fn parse(text: &str) -> Result<Self, String> {
        let given = || {
            let options: OptionText = text.parse()?;
            let files = option_files(&options);
            let source = DeclarationSource::CommandLine;
            Ok((files, ParsedDeclaration::parse(source, options)?))
        };
        match given() {
            Ok((described, given)) => Ok(Self {
                parsed: Ok(given),
                option_files: described,
            }),
            // A file that the argument names may have changed since the predecessor's start. The predecessor's configuration is
            // restored, so the argument is not needed.
            Err(error) if has_persisted_configuration() => Ok(Self {
                parsed: Err(error_text(&error)),
                option_files: Vec::new(),
            }),
            Err(error) => {
                let error: OptionError = error;
                Err(error_text(&error))
            }
        }
    }
}

/// Returns the valid arguments, and makes their relative paths absolute as starting at `dir`. Appends messages about invalid
/// arguments to `mistakes`.
fn collect_arguments<T: FromStr<Err = OptionError>>(
    arguments: Vec<OptionsArgument<T>>,
    dir: &Path,
    mistakes: &mut Vec<String>,
) -> Vec<ParsedDeclaration<T>> {
    let all = arguments.into_iter().filter_map(|argument| {
        let given = argument.parsed.map_err(|mistake| mistakes.push(mistake));
        given.ok().map(|given| given.with_absolute_paths(dir))
    });
    all.collect()
}

/// Formats an error and its causes for clap.
fn error_text(error: &dyn Error) -> String {
    report::chain(error)
}

/// Runs the command given on the command line.
#[must_use]
pub fn run() -> ExitCode {
    let mut arguments = env::args_os();
    if arguments.nth(1).is_some_and(|first| first == FIRST_STAGE) {
        return report_failure(&nvme_mpt_supervise::run_first_stage(arguments));
    }
    let CommandLine { command } =
        CommandLine::try_parse().unwrap_or_else(|error| exit_with_error(&error));
    if matches!(command, MainCommand::Serve(_) | MainCommand::Supervise(_)) {
        logging::queue_messages();
    }
    match &command {
        MainCommand::Serve(serve) => logging::start(serve.log.clone(), LevelFilter::Info),
        _ => logging::start(None, LevelFilter::Warn),
    }
    let result = match command {
        MainCommand::Serve(options) => run_serve(*options),
        MainCommand::Supervise(options) => return run_supervise(&options),
        MainCommand::Upgrade(options) => options.run(),
        MainCommand::Add(options) => options.run(),
        MainCommand::Reserve(options) => options.run(),
        MainCommand::Remove(options) => options.run(),
        MainCommand::Limit(options) => options.run(),
        MainCommand::Resize(options) => options.run(),
        MainCommand::List(options) => options.run(),
        MainCommand::Capacity(options) => options.run(),
        MainCommand::Reload(options) => options.run(),
        MainCommand::Leases(options) => run_leases(options),
        MainCommand::Stats(options) => options.run(),
        MainCommand::Top(options) => options.run(),
        MainCommand::Log(options) => options.run(),
        MainCommand::Fault(options) => run_fault(options),
        MainCommand::Profile(options) => run_profile(&options),
        MainCommand::Drives(options) => run_drives(options),
        MainCommand::Bind(options) => run_bind(&options),
        MainCommand::Unbind(options) => run_unbind(&options),
        MainCommand::Doctor(options) => options.run(),
        MainCommand::Man(options) => options.run(),
        MainCommand::Completions(options) => options.run(),
    };
    let status = match result {
        Ok(()) => ExitCode::SUCCESS,
        // The output's reader has closed the pipe, which is not an error.
        Err(error) if is_broken_pipe(&*error) => ExitCode::SUCCESS,
        Err(error) if error.is::<DiffersError>() => {
            report_failure(&*error);
            ExitCode::from(DIFFERS_EXIT_CODE)
        }
        Err(error) => report_failure(&*error),
    };
    logging::flush(logging::END_TIMEOUT);
    status
}

/// Exits because of invalid arguments. If this process was started to replace a server, also reports the error to that server.
fn exit_with_error(error: &clap::Error) -> ! {
    if error.use_stderr()
        && let Ok(inherited) = InheritedDescriptors::from_env()
        && let Some(failure) = FailureReport::connect(&inherited)
    {
        failure.send(error.to_string().trim_end());
    }
    error.exit()
}

/// Reports the error of a command.
fn report_failure(error: &dyn Error) -> ExitCode {
    logging::log_fatal(&format!("nvme-mpt: {}", report::chain(error)));
    ExitCode::FAILURE
}

fn no_server_error(control: PathBuf) -> ControlError {
    ControlError::NoServer {
        path: control,
        source: io::ErrorKind::NotFound.into(),
    }
}

fn run_supervise(options: &SuperviseArgs) -> ExitCode {
    let mut supervise_options = SuperviseOptions::new(vec![FIRST_STAGE.into()]);
    supervise_options.max_deaths = options.deaths as usize;
    supervise_options.first_delay = Duration::from_millis(options.delay.into());
    if let Err(error) = logging::start_log_thread() {
        log::warn!(
            "Cannot start the thread of the log, so a slow reader of the log delays this process: {error}"
        );
    }
    let result = match options.adopt {
        false => nvme_mpt_supervise::supervise(&supervise_options, &options.command),
        true => {
            let control = options.control.clone();
            let control = control.unwrap_or_else(|| Path::new(STATE_DIR).join(CONTROL_SOCKET));
            // The process id cannot change in the meantime, as a server without a supervisor refuses upgrades.
            match control::listening_pid(&control) {
                None => return report_failure(&no_server_error(control)),
                Some(number) => nvme_mpt_supervise::adopt(
                    &supervise_options,
                    &options.command,
                    number,
                    |socket, max| control::offer_supervisor(&control, socket, max),
                ),
            }
        }
    };
    let status = match result {
        Ok(status) => nvme_mpt_supervise::exit_code(status),
        Err(error) => report_failure(&error),
    };
    logging::flush(logging::END_TIMEOUT);
    status
}

fn is_broken_pipe(error: &(dyn Error + 'static)) -> bool {
    error
        .downcast_ref::<io::Error>()
        .is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}

fn run_serve(options: ServeArgs) -> Result<(), Box<dyn Error>> {
    let control = options.control.path(&options.state);
    let data = match (options.keep_data, options.wipe) {
        (true, _) => PreviousDataPolicy::Kept,
        (_, true) => PreviousDataPolicy::Wiped,
        _ => PreviousDataPolicy::Refused,
    };
    let described = options.functions.iter();
    let described = described.flat_map(|argument| &argument.option_files);
    let of_drives = options.drives.iter();
    let of_drives = of_drives.flat_map(|argument| &argument.option_files);
    let described = described.chain(of_drives).cloned().collect();
    let dir = env::current_dir()?;
    let mut mistakes = Vec::new();
    let options = ServeOptions {
        functions: collect_arguments(options.functions, &dir, &mut mistakes),
        drives: collect_arguments(options.drives, &dir, &mut mistakes),
        argument_errors: mistakes,
        file: options.file,
        data,
        memory_limit: options.memory_limit,
        state_dir: options.state.state_dir,
        control,
        vmm_socket: options.vmm_socket,
        metrics: MetricsOptions {
            address: options.metrics,
            hosts: options.metrics_host,
            file: options.metrics_file,
        },
        confinement: ConfinementOptions {
            seccomp: options.seccomp,
            landlock: options.landlock,
            rules: options.landlock_rules,
        },
        option_files: described,
    };
    Ok(serve(options, &mut ThreadedOutput::new(io::stdout()))?)
}

fn run_fault(options: FaultArgs) -> Result<(), Box<dyn Error>> {
    let path = options.control.path(&options.state);
    let command = options
        .command
        .unwrap_or(FaultCommand::List { json: false });
    let mut as_json = options.json;
    let request = match command {
        FaultCommand::List { json } => {
            as_json |= json;
            FaultRequest::List {}
        }
        _ if as_json => return Err(JsonError("`fault list`").into()),
        FaultCommand::Inject { drive, plan } => {
            // The server parses the plan as well, but only here is the name of its file known for error messages.
            let text = FaultPlan::read_text(&plan)?;
            FaultPlan::parse(&plan, &text)?;
            FaultRequest::Inject {
                drive: canonicalize_path(drive).to_string(),
                plan: text,
            }
        }
        FaultCommand::Clear { drive } => FaultRequest::Clear {
            drive: canonicalize_path(drive).to_string(),
        },
    };
    let drives = control::query_faults(&path, request)?;
    let mut out = io::stdout().lock();
    if as_json {
        writeln!(out, "{}", serde_json::to_string(&drives)?)?;
    } else if drives.is_empty() {
        writeln!(out, "No drive of the server was opened with faults=")?;
    } else {
        for drive in &drives {
            write!(out, "{}", faults::table(drive))?;
        }
    }
    Ok(())
}

fn run_profile(options: &ProfileArgs) -> Result<(), Box<dyn Error>> {
    let ProfileCommand::Fit { file } = &options.command;
    write!(io::stdout(), "{}", fit_profile(file)?)?;
    Ok(())
}

/// Returns the absolute path with links resolved, since the server may run in another working directory.
fn canonicalize_path(path: DrivePath) -> DrivePath {
    match path {
        DrivePath::File(file) => DrivePath::File(fs::canonicalize(&file).unwrap_or(file)),
        other => other,
    }
}

fn run_drives(options: DrivesArgs) -> Result<(), Box<dyn Error>> {
    let path = options.server.control();
    let result = match control::query_stats(&path) {
        Ok(stats) => stats.drives,
        // Without access to a server, show only what the kernel reports.
        Err(ControlError::NoServer { .. } | ControlError::Permission { .. }) => Vec::new(),
        Err(error) => return Err(error.into()),
    };
    let drives = host_drives::list_drives(&HostRoot::default(), &result)?;
    let mut out = io::stdout().lock();
    if options.server.json {
        writeln!(out, "{}", serde_json::to_string(&drives)?)?;
    } else if drives.is_empty() {
        writeln!(out, "No NVMe functions on this host")?;
    } else {
        for (index, drive) in drives.iter().enumerate() {
            let gap = if index == 0 { "" } else { "\n" };
            write!(out, "{gap}{drive}")?;
        }
    }
    Ok(())
}

fn run_bind(options: &BindArgs) -> Result<(), Box<dyn Error>> {
    let bound = bind::bind(&HostRoot::default(), options.address, options.force)?;
    writeln!(io::stdout(), "{bound}")?;
    Ok(())
}

fn run_unbind(options: &UnbindArgs) -> Result<(), Box<dyn Error>> {
    let bound = bind::unbind(&HostRoot::default(), options.address)?;
    writeln!(io::stdout(), "{bound}")?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        CommandLine::command().debug_assert();
    }

    /// Appends the lines of the help of a command and its subcommands that are wider than a terminal of 80 columns.
    fn collect_wide_lines(command: &mut clap::Command, wide: &mut Vec<String>) {
        for help in [command.render_help(), command.render_long_help()] {
            let help = help.to_string();
            let lines = help.lines().filter(|line| line.chars().count() > 80);
            wide.extend(lines.map(str::to_owned));
        }
        for command in command.get_subcommands_mut() {
            collect_wide_lines(command, wide);
        }
    }

    #[test]
    fn help_fits_a_terminal_of_80_columns() {
        let mut wide = Vec::new();
        let mut command = CommandLine::command();
        // `max_term_width` of subcommands is that of the command.
        command.build();
        collect_wide_lines(&mut command, &mut wide);
        assert!(wide.is_empty(), "{wide:#?}");
    }
}
