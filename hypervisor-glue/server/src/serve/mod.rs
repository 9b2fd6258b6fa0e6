//! `nvme-mpt serve`: opens drives, leases parts of them and serves NVMe functions until a signal ends the server. Functions
//! can be added and removed at run time.
//!
//! - `declarations`: functions and drives as configured
//! - `open_drives`: open drives
//! - `registered_function`: one served function
//! - `registry`: all served functions, and changes to them
//! - `lease_server`: leases of functions that run inside VMMs
//! - `change_thread`: the thread that changes functions
//! - `reload`: applies the configuration file
//! - `configuration_differences`: differences between the configuration file and the served functions
//! - `upgrade`: replaces the server process
//! - `stored_configuration`: the configuration stored for the next server
//! - `required_files`: files that Landlock has to allow
//! - `context`: resources and settings that all functions share
//! - `stats_source`: statistics for the control socket and for metrics
//! - `registry_snapshot`: a snapshot of functions and drives for other threads
//! - `error`: errors of serving and changing functions

mod change_thread;
mod configuration_differences;
mod context;
mod declarations;
mod error;
mod lease_server;
mod open_drives;
mod registered_function;
mod registry;
mod registry_snapshot;
mod reload;
mod required_files;
mod starting_registry;
mod stats_source;
mod stored_configuration;
mod upgrade;

use std::fs;
use std::io::{self, Write};
use std::num::NonZeroU64;
use std::path::{self, Path, PathBuf};
use std::sync::Arc;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::JoinHandle;
use std::time::Duration;

use nvme_guest::threads::start_thread;
use nvme_lease::range::ByteSize;
use nvme_lease::{PreviousDataPolicy, PrivateFileError, make_state_dir};
use nvme_mpt::PollerPool;
use nvme_mpt_logging::{self as logging, LogFilter};
use nvme_mpt_memory::clock::{self, TickRate};
use nvme_mpt_memory::crash::install_crash_handlers;
use nvme_mpt_memory::system;
use nvme_mpt_paths::{OpenDirectory, PathError};
use nvme_mpt_supervise::{FdStoreError, InheritedDescriptors};
use nvme_mpt_vmm::open::LeaseLedgers;
use nvme_mpt_vmm::options::{
    FunctionOptions, ServerDriveOptions, ServerFunctionOptions, VmmSocket,
};
use nvme_mpt_vmm::report;
use rustix::process::{Resource, getrlimit, setrlimit};
use thiserror::Error;
use vfio_user_server::SocketAccess;

use self::change_thread::{ChangeQueue, ChangeThread};
use self::configuration_differences::ConfigurationComparer;
use self::context::ServerContext;
use self::declarations::{AddedFunctionsFile, FunctionDeclaration, StartConfiguration};
use self::lease_server::{LeaseServer, LeaseTable};
use self::open_drives::OpenDrives;
use self::registry::FunctionRegistry;
use self::starting_registry::StartingRegistry;
use self::stats_source::ServerStatsSource;
use self::stored_configuration::StoredConfigurationError;
use crate::capacity::DriveCapacity;
use crate::change::{DeclarationSource, FunctionChange, FunctionEntry};
use crate::confinement::{ConfineError, ConfinementOptions, ProcessConfinement, confine};
use crate::control::{ChangeReply, ControlError, ControlListener, ControlServer, ControlService};
use crate::faults::{self, DriveFaults, FaultRequest};
use crate::function_thread::FunctionThreadError;
use crate::metrics::{HealthAnswers, MetricsError, MetricsListener, MetricsOptions, MetricsServer};
use crate::owner::{UnknownOwner, socket_access};
use crate::persistence::predecessor::FailureReport;
use crate::persistence::{self, GuestPauseStart, PersistenceError, ServerPersistence, crashes};
use crate::signals::{EndSignals, ServerSignal};
use crate::stats::ServerStats;
use crate::vmm_arguments;

pub use self::declarations::option_files;
pub use self::declarations::{ConfigFileError, ParsedDeclaration};
pub use self::error::{ChangeError, FunctionRegistrationError, LimitsError};
pub use self::open_drives::FunctionDriveError;

/// Maximum time to wait for the first poll of newly started pollers.
const POLLER_START_TIMEOUT: Duration = Duration::from_millis(100);

/// Configuration of a server.
#[derive(Clone, Debug)]
pub struct ServeOptions {
    /// Functions of the command line.
    pub functions: Vec<ParsedDeclaration<ServerFunctionOptions>>,
    /// Drives of the command line, which stay open even without functions.
    pub drives: Vec<ParsedDeclaration<ServerDriveOptions>>,
    /// Errors in functions and drives of the command line. A server that restores its predecessor's configuration ignores these
    /// errors.
    pub argument_errors: Vec<String>,
    /// Configuration file with more functions and drives.
    pub file: Option<PathBuf>,
    /// Server's default for `data=`: the policy for data that another lease id left in a function's range.
    pub data: PreviousDataPolicy,
    /// Memory limit of functions without `memory-limit=`, in the server and in VMMs.
    pub memory_limit: Option<ByteSize>,
    /// Directory of the lease ledger.
    pub state_dir: PathBuf,
    /// Path of the control socket.
    pub control: PathBuf,
    /// Permissions of the socket on which VMMs request leases.
    pub vmm_socket: VmmSocket,
    /// Destination of the metrics.
    pub metrics: MetricsOptions,
    /// Restrictions by Landlock and seccomp.
    pub confinement: ConfinementOptions,
    /// Files that `profile=` and `faults=` name in [`Self::functions`] and [`Self::drives`]. The next server reads these
    /// files again.
    pub option_files: Vec<PathBuf>,
}

/// Error of starting or ending a server.
#[derive(Debug, Error)]
pub enum ServeError {
    /// The functions cannot be served.
    #[error(transparent)]
    Functions(Box<ChangeError>),
    /// A path cannot be made absolute.
    #[error("Cannot find {}", path.display())]
    Path {
        /// The path.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// The state directory cannot be made private to the server's user.
    #[error("Cannot use the state directory; choose another one with --state-dir")]
    StateDir(#[source] PrivateFileError),
    /// The directory of the control socket cannot be created.
    #[error(
        "Cannot create the directory {} for the control socket; choose another place with --control",
        path.display()
    )]
    ControlDir {
        /// Directory of the control socket.
        path: PathBuf,
        /// Cause.
        source: PathError,
    },
    /// The control socket cannot be served.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// Metrics cannot be exported.
    #[error(transparent)]
    Metrics(#[from] MetricsError),
    /// The socket for leases of VMMs cannot be served.
    #[error("Cannot offer leases to VMMs; check the directory `servers` in the state directory")]
    Leases(#[source] io::Error),
    /// The owner of the socket for VMMs is unknown.
    #[error(transparent)]
    Owner(#[from] UnknownOwner),
    /// A function or drive of the command line is invalid.
    #[error("{0}")]
    Argument(String),
    /// The state of the predecessor cannot be restored.
    #[error(transparent)]
    Persistence(#[from] PersistenceError),
    /// The stored configuration of the predecessor cannot be read.
    #[error(transparent)]
    StoredConfiguration(#[from] StoredConfigurationError),
    /// The thread that changes functions cannot be started.
    #[error("Cannot start the thread that changes functions")]
    Thread(#[source] io::Error),
    /// The thread that writes this process into the ledger cannot be started.
    #[error("Cannot start the thread that names this process in the ledger of leases")]
    LedgerWriter(#[source] io::Error),
    /// The signal handlers that count crashes cannot be installed.
    #[error("Cannot count crashes of this server for the functions that cause them")]
    Crashes(#[source] io::Error),
    /// The process cannot be confined.
    #[error(transparent)]
    Confine(#[from] ConfineError),
    /// Signals cannot be awaited.
    #[error("Cannot wait for SIGTERM and SIGINT")]
    Signals(#[source] io::Error),
    /// The log thread cannot be started.
    #[error("Cannot start the thread that writes the log")]
    Log(#[source] io::Error),
    /// The list of served functions cannot be printed.
    #[error("Cannot print the drives and functions")]
    Print(#[source] io::Error),
    /// The change thread panicked, which ended all functions.
    #[error("The thread that changes functions panicked")]
    Panicked,
    /// A function ended with an error.
    #[error("The function on {} did not end cleanly", socket.display())]
    End {
        /// Socket of the function.
        socket: PathBuf,
        /// Cause.
        #[source]
        source: FunctionThreadError,
    },
}

impl From<FdStoreError> for ServeError {
    fn from(error: FdStoreError) -> Self {
        Self::Persistence(error.into())
    }
}

impl From<ChangeError> for ServeError {
    fn from(error: ChangeError) -> Self {
        Self::Functions(Box::new(error))
    }
}

/// Serves functions until SIGTERM or SIGINT arrives. Prints a block for each function and then "ready" to `out`. Confines
/// the process until its end, before it opens any drive.
///
/// # Errors
/// If a function or drive cannot be served, no function is served. The state directory that Landlock needs may then remain,
/// but no other file. Errors of ending the functions are returned as well.
pub fn serve(options: ServeOptions, out: &mut dyn Write) -> Result<(), ServeError> {
    let inherited = InheritedDescriptors::from_env()?;
    let failure = FailureReport::connect(&inherited);
    let result = serve_inherited(options, inherited, failure.is_some(), out);
    if let (Err(error), Some(failure)) = (&result, failure) {
        failure.send(&report::chain(error));
    } else if let Err(error) = &result
        && persistence::has_persisted_configuration()
        && system::is_exhaustion(error)
    {
        // A supervisor gives up after several deaths within a minute, and a shortage may last longer.
        log::error!(
            "The server cannot start for lack of a resource: {}. It ends in {} s, and serves what it has restored until then",
            report::chain(error),
            SHORTAGE_PAUSE.as_secs()
        );
        clock::sleep(SHORTAGE_PAUSE);
    }
    result
}

/// Time for which a server waits before it ends, if it lacks a resource of the process or the host that its start needs.
/// Functions that it has restored are served meanwhile.
const SHORTAGE_PAUSE: Duration = Duration::from_secs(10);

/// Serves functions, with the state inherited from a supervisor or from the predecessor.
fn serve_inherited(
    options: ServeOptions,
    inherited: InheritedDescriptors,
    replaces: bool,
    out: &mut dyn Write,
) -> Result<(), ServeError> {
    let signals = EndSignals::block().map_err(ServeError::Signals)?;
    raise_open_file_limit();
    let configuration = initial_configuration(&options, &inherited, replaces)?;
    // Confines first, since threads that are started later inherit the restrictions.
    let rules = required_files::server_rules(&options, &configuration)?;
    let confined = confine(&options.confinement, rules)?;
    logging::start_log_thread().map_err(ServeError::Log)?;
    system::enable_preemption_count();
    let stop = Arc::new(AtomicBool::new(false));
    // A signal must also end long waits during the start, for example for wiping a range.
    let signal = start_signal_thread(signals, stop.clone()).map_err(ServeError::Signals)?;
    install_crash_handlers().map_err(ServeError::Crashes)?;
    // Measuring the tick rate takes some milliseconds. It is done here, before the predecessor pauses its functions.
    let _ = TickRate::measured();
    // The predecessor ends only if the arguments are valid, so they are checked before.
    let metrics = options.metrics.clone();
    let control = options.control.clone();
    let mut prepared = None;
    let mut late = None;
    let persistence = ServerPersistence::connect(inherited, || -> Result<(), ServeError> {
        // If this thread cannot be started, the sockets are bound after the functions are served.
        late = SuccessorSockets::spawn(control.clone(), metrics.clone()).ok();
        prepared = Some(prepare_takeover(&options, &configuration)?);
        Ok(())
    })?;
    let supervisor = persistence.as_deref();
    let restores_functions = configuration.is_restored
        || supervisor.is_some_and(ServerPersistence::has_restorable_functions);
    // Guests wait only for their functions, and the predecessor may still own the sockets.
    let replacing = persistence
        .as_ref()
        .filter(|persistence| persistence.has_predecessor());
    if let (Some(persistence), Some(late)) = (replacing, &late) {
        late.start_binding(persistence.clone(), restores_functions);
    }
    let bound = match replacing {
        Some(_) => None,
        None => Some(bind_metrics(&metrics, restores_functions)?),
    };
    let (listener, registry) = start(
        options,
        configuration,
        prepared,
        persistence.clone(),
        stop,
        confined,
    )?;
    let bound = match (
        listener.zip(bound),
        late.and_then(SuccessorSockets::into_sockets),
    ) {
        (Some(bound), _) => Ok(bound),
        (None, Some(bound)) => bound,
        // The thread of `SuccessorSockets` could not be started, so the sockets are bound here.
        (None, None) => bind_after_predecessor(supervisor, &control, &metrics, restores_functions),
    };
    let (listener, metrics) = bound?;
    print_functions(&registry, out).map_err(ServeError::Print)?;
    if persistence.is_none() && registry.entries().next().is_some() {
        let lost = "Without a supervisor: VMs on vfio-user lose their drives when this server ends; see `nvme-mpt help supervise`";
        writeln!(out, "{lost}").map_err(ServeError::Print)?;
    }
    if registry.entries().next().is_none() {
        let control = control.display();
        log::info!("There is no function yet: add one with `nvme-mpt add --control {control}`");
    }
    let server = ActiveServer::start(listener, metrics, registry)?;
    if let Some(Err(error)) = persistence
        .as_ref()
        .map(ServerPersistence::watch_supervisor)
    {
        log::warn!(
            "Cannot start a thread, so the end of the supervisor will be noticed late: {error}"
        );
    }
    // The supervisor gets `READY=1` before "ready" is printed. A reader of the printed line may kill this process immediately,
    // and a supervisor does not restart a server that was never ready.
    persistence::notify(persistence.as_deref(), "READY=1");
    // Functions may have been restored after a crash. The log is flushed before the reader of "ready" can kill this
    // process.
    logging::flush(logging::END_TIMEOUT);
    writeln!(out, "ready")
        .and_then(|()| out.flush())
        .map_err(ServeError::Print)?;
    let signal = loop {
        let signal = signal
            .recv()
            .unwrap_or_else(|error| Err(io::Error::other(error)));
        match signal.map_err(ServeError::Signals)? {
            ServerSignal::End(name) => break name,
            ServerSignal::Reload => server.changes.reload(),
        }
    };
    log::info!("{signal}: no more clients are accepted, and the functions are reset");
    persistence::notify(persistence.as_deref(), "STOPPING=1");
    server.end()
}

/// Raises this process's limit of open files to the maximum that its user has. Each function needs dozens of descriptors, and
/// the default limit is made for programs that use `select`.
fn raise_open_file_limit() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        log::warn!("Cannot raise RLIMIT_NOFILE to its maximum: {error}");
    }
}

/// Returns the initial configuration: the configuration that the predecessor stored; else that of the command line and the
/// file.
fn initial_configuration(
    options: &ServeOptions,
    inherited: &InheritedDescriptors,
    replaces: bool,
) -> Result<StartConfiguration, ServeError> {
    let stored = persistence::persisted_configuration(inherited).map_err(ServeError::from);
    let restored = stored.and_then(|stored| match stored {
        Some(bytes) => Ok(Some(stored_configuration::decode(&bytes)?)),
        None => Ok(None),
    });
    match restored {
        Ok(Some(stored_configuration)) => {
            for mistake in &options.argument_errors {
                log::warn!(
                    "The command line is invalid, so the previous configuration stays in use: {mistake}"
                );
            }
            return Ok(stored_configuration);
        }
        Ok(None) => {}
        // The predecessor still runs, and continues to serve if this process fails.
        Err(error) if replaces => return Err(error),
        // The supervisor keeps all functions, and starts the server again.
        Err(error) if system::is_exhaustion(&error) => return Err(error),
        Err(error) => log::error!(
            "Cannot restore the previous configuration, so the command line and the file apply: {}",
            report::chain(&error)
        ),
    }
    if let Some(mistake) = options.argument_errors.first() {
        return Err(ServeError::Argument(mistake.clone()));
    }
    let file = options.file.clone().map(absolute_path).transpose()?;
    let added = AddedFunctionsFile::for_control_socket(&options.control);
    let (functions, drives) = (options.functions.clone(), options.drives.clone());
    let configuration = StartConfiguration::read(functions, drives, file.as_deref(), &added);
    Ok(configuration.map_err(ChangeError::from)?)
}

/// Waits for signals on a thread. The signal that ends the server also sets `stop`.
fn start_signal_thread(
    signals: EndSignals,
    stop: Arc<AtomicBool>,
) -> io::Result<Receiver<io::Result<ServerSignal>>> {
    let (sender, receiver) = mpsc::channel();
    let wait = move || {
        let signal = loop {
            match signals.wait() {
                // A reload signal may arrive before functions are served. It waits in the channel until then.
                Ok(ServerSignal::Reload) => drop(sender.send(Ok(ServerSignal::Reload))),
                signal => break signal,
            }
        };
        stop.store(true, Ordering::Relaxed);
        // Signals stay blocked until the process ends. A second signal would kill the process and leave leases whose data is
        // not durable. Each remaining wait is bounded.
        signals.block_forever();
        // If the start failed, there is no receiver, and the process ends anyway.
        let _ = sender.send(signal);
    };
    start_thread("signals", wait)?;
    Ok(receiver)
}

/// Serves the initial functions. Returns the control socket, bound but not yet served; `None` if this server replaces
/// another one, whose sockets are bound later.
fn start(
    options: ServeOptions,
    configuration: StartConfiguration,
    prepared: Option<PreparedTakeover>,
    persistence: Option<Arc<ServerPersistence>>,
    stop: Arc<AtomicBool>,
    confined: ProcessConfinement,
) -> Result<(Option<ControlListener>, StartingRegistry), ServeError> {
    let ServeOptions {
        functions: _,
        drives: _,
        argument_errors: _,
        file,
        data,
        memory_limit,
        state_dir,
        control,
        vmm_socket,
        metrics: _,
        confinement: _,
        option_files: _,
    } = options;
    let VmmSocket { mode, owner } = vmm_socket;
    let access = match socket_access(mode, owner.as_ref()) {
        Err(error) if configuration.is_restored => {
            let error = report::chain(&error);
            log::error!("Only VMMs of root and of this server's user may ask for leases: {error}");
            SocketAccess::default()
        }
        access => access?,
    };
    start_file_survey();
    // Precedes all opening of files in the directory, so that a directory that other users can access is reported first.
    make_state_dir(&state_dir).map_err(ServeError::StateDir)?;
    let file = match configuration.is_restored {
        // The file is not needed now, and may have been removed since the predecessor read it.
        true => file.map(|file| path::absolute(&file).unwrap_or(file)),
        false => file.map(absolute_path).transpose()?,
    };
    let replaces = persistence
        .as_deref()
        .is_some_and(ServerPersistence::has_predecessor);
    // The control socket protects the file of added functions against a second server. During an upgrade, the predecessor's
    // socket does so.
    let listener = match replaces {
        true => None,
        false => Some(bind_control(&control)?),
    };
    let added = AddedFunctionsFile::for_control_socket(&control);
    let PreparedTakeover {
        ledgers,
        drives: open,
        pollers,
    } = match prepared {
        Some(prepared) => prepared,
        None => PreparedTakeover {
            ledgers: open_ledgers(&state_dir, persistence.is_some())?,
            drives: OpenDrives::default(),
            pollers: match &persistence {
                Some(_) => PollerPool::with_threads(crashes::thread_spawner()),
                None => PollerPool::new(),
            },
        },
    };
    let ledgers = ledgers.with_memory_limit(memory_limit);
    if let Err(error) = pollers.start_watchdog() {
        log::warn!(
            "Cannot start a thread, so a function that waits delays others of its poller: {error}"
        );
    }
    let ledgers = Arc::new(match &persistence {
        Some(persistence) => ledgers
            .with_private_ledger(persistence.private_ledger())
            .with_spare_store(persistence.spares().clone()),
        None => ledgers,
    });
    let pause_start = GuestPauseStart::for_vmms(persistence.as_deref());
    let registry = FunctionRegistry::new(ServerContext {
        leases: LeaseTable::new(
            &state_dir,
            access,
            ledgers.clone(),
            pollers.clone(),
            pause_start,
        ),
        ledgers,
        pollers,
        data,
        rules: configuration.rules.clone(),
        // Other processes use this path as well, so it must be absolute.
        state_dir: path::absolute(&state_dir).unwrap_or(state_dir),
        file,
        added,
        persistence,
        stop,
        confinement: confined,
    });
    let mut registry = StartingRegistry::new(registry);
    registry.drives = open;
    registry.start(configuration)?;
    Ok((listener, registry))
}

fn make_control_dir(control: &Path) -> Result<(), ServeError> {
    let Some(dir) = control.parent() else {
        return Ok(());
    };
    let made = OpenDirectory::open_or_create(dir, 0o777);
    made.map(drop).map_err(|source| ServeError::ControlDir {
        path: dir.to_owned(),
        source,
    })
}

fn bind_control(control: &Path) -> Result<ControlListener, ServeError> {
    make_control_dir(control)?;
    Ok(ControlListener::bind(control)?)
}

/// Binds the sockets of a server that replaces another one, after the predecessor has ended.
fn bind_after_predecessor(
    persistence: Option<&ServerPersistence>,
    control: &Path,
    metrics: &MetricsOptions,
    restores_functions: bool,
) -> Result<ServerSockets, ServeError> {
    if let Some(persistence) = persistence {
        persistence.await_predecessor_end()?;
    }
    let metrics = bind_metrics(metrics, restores_functions)?;
    Ok((bind_control(control)?, metrics))
}

/// Control socket and metrics socket of a server.
type ServerSockets = (ControlListener, MetricsListener);

/// Control socket and metrics socket of a server that replaces another one. A thread binds them as soon as the predecessor
/// ends, even while functions are still being restored. So no third server can take the control socket and write the file of
/// added functions in the meantime.
#[derive(Debug)]
struct SuccessorSockets {
    requests: Sender<(Arc<ServerPersistence>, bool)>,
    /// Thread that binds the sockets. Its result is `None` if `start_binding` was never called.
    thread: JoinHandle<Option<Result<ServerSockets, ServeError>>>,
}

impl SuccessorSockets {
    /// Starts the thread. Must be called before functions pause: a thread that starts during the pause could take processor
    /// time from a poller.
    fn spawn(control: PathBuf, metrics: MetricsOptions) -> io::Result<Self> {
        let (orders, receiver) = mpsc::channel();
        let bind = move || {
            crashes::abort_on_panic();
            let (persistence, restores_functions): (Arc<ServerPersistence>, bool) =
                receiver.recv().ok()?;
            Some(bind_after_predecessor(
                Some(&persistence),
                &control,
                &metrics,
                restores_functions,
            ))
        };
        let thread = start_thread("sockets", bind)?;
        Ok(Self {
            requests: orders,
            thread,
        })
    }

    /// Starts waiting for the end of the predecessor.
    fn start_binding(&self, persistence: Arc<ServerPersistence>, restores_functions: bool) {
        // The send fails only if the thread has panicked, which ends the process.
        let _ = self.requests.send((persistence, restores_functions));
    }

    /// Waits until the sockets are bound. Returns `None` if [`start_binding`](Self::start_binding) was not called.
    fn into_sockets(self) -> Option<Result<ServerSockets, ServeError>> {
        let Self {
            requests: orders,
            thread,
        } = self;
        drop(orders);
        match thread.join() {
            Ok(bound) => bound,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
}

/// Binds the metrics listener. If this fails in a server that restores functions, the server continues without metrics, so
/// that VMs keep their drives.
fn bind_metrics(
    options: &MetricsOptions,
    restores_functions: bool,
) -> Result<MetricsListener, MetricsError> {
    match MetricsListener::bind(options) {
        Err(error) if restores_functions => {
            log::error!("Cannot serve metrics: {}", report::chain(&error));
            MetricsListener::bind(&MetricsOptions::default())
        }
        bound => bound,
    }
}

/// Resources of a server that replaces another one. They are prepared before functions pause, so that the pause is short.
#[derive(Debug)]
struct PreparedTakeover {
    /// Lease ledgers. The predecessor's ledger of private drives is added later.
    ledgers: LeaseLedgers,
    /// Drives that this process has opened while the predecessor has them open as well.
    drives: OpenDrives,
    /// Poller pool, with a running poller thread for each value of `poll=` with which functions share pollers.
    pollers: Arc<PollerPool>,
}

/// Opens the ledgers of a state directory. If `is_supervised`, the server may restore another server's functions, so the ledger
/// writer thread is started as well.
fn open_ledgers(state_dir: &Path, is_supervised: bool) -> Result<LeaseLedgers, ServeError> {
    let ledgers = LeaseLedgers::open(state_dir);
    match is_supervised {
        true => ledgers
            .with_ledger_writer()
            .map_err(ServeError::LedgerWriter),
        false => Ok(ledgers),
    }
}

/// Starts the thread that finds out which parts of files are allocated, so that deallocations of holes are fast. It serves
/// files that are opened later, too.
fn start_file_survey() {
    if let Err(error) = nvme_software::survey_files(&nvme_guest::threads::ThreadSpawner::default())
    {
        log::warn!(
            "Cannot start a thread, so holes of files are deallocated in short slices: {error}"
        );
    }
}

/// Checks options, opens drives and starts pollers, but acquires no lease. Returns once the pollers are running.
fn prepare_takeover(
    options: &ServeOptions,
    configuration: &StartConfiguration,
) -> Result<PreparedTakeover, ServeError> {
    let VmmSocket { mode, owner } = &options.vmm_socket;
    socket_access(*mode, owner.as_ref())?;
    start_file_survey();
    // The paths are resolved in the same way as by the function registry, which looks for these drives.
    let resolved = |function: &FunctionOptions| FunctionOptions {
        path: declarations::resolve_path(&function.path),
        ..function.clone()
    };
    let held = configuration.drives.iter();
    let held: Vec<_> = held.map(|held| resolved(&held.options.drive)).collect();
    let functions = configuration.functions.iter();
    let functions = functions.map(|declaration| resolved(&declaration.options.function));
    let added = configuration.added_texts.iter().filter_map(|text| {
        let added = FunctionDeclaration::parse(DeclarationSource::Added, text.clone()).ok()?;
        Some(resolved(&added.options.function))
    });
    let functions: Vec<_> = functions.chain(added).collect();
    let drives = OpenDrives::open_beside(&held, &functions);
    let ledgers = open_ledgers(&options.state_dir, true)?;
    let pollers = PollerPool::with_threads(crashes::thread_spawner());
    for function in &functions {
        if function.backend.poll.check_processors().is_ok() {
            // An error is ignored, because the function's first queue tries again to start the poller.
            let _ = pollers.prepare(&function.backend.poll, function.backend.adaptive);
        }
    }
    // Threads that start while functions are paused would take processor time from the predecessor, so wait until they have
    // started.
    pollers.await_passes(POLLER_START_TIMEOUT);
    Ok(PreparedTakeover {
        ledgers,
        drives,
        pollers,
    })
}

/// Returns the absolute path of an existing file. Symbolic links are not resolved, since they may lead to another file at a
/// later reload.
fn absolute_path(path: PathBuf) -> Result<PathBuf, ServeError> {
    let found = fs::metadata(&path).and_then(|_| path::absolute(&path));
    found.map_err(|source| ServeError::Path { path, source })
}

fn print_functions(registry: &FunctionRegistry, out: &mut dyn Write) -> io::Result<()> {
    for summary in registry.drive_summaries() {
        writeln!(out, "Drive {summary}")?;
        writeln!(out)?;
    }
    for entry in registry.entries() {
        print_function(entry, out)?;
        writeln!(out)?;
    }
    Ok(())
}

/// Prints a function, and the VMM arguments that attach it.
///
/// # Errors
/// Returns the error of `out`.
pub fn print_function(entry: &FunctionEntry, out: &mut dyn Write) -> io::Result<()> {
    let FunctionEntry {
        id,
        socket,
        summary,
        ..
    } = entry;
    writeln!(out, "Function {id} on {}", socket.display())?;
    writeln!(out, "  {summary}")?;
    writeln!(out, "  Cloud Hypervisor:")?;
    writeln!(
        out,
        "    {}",
        vmm_arguments::cloud_hypervisor_arguments(id, socket)
    )?;
    writeln!(out, "  QEMU 10.1 or newer:")?;
    writeln!(out, "    {}", vmm_arguments::qemu_arguments(id, socket))
}

/// A running server. Dropping it ends all functions.
#[derive(Debug)]
struct ActiveServer {
    // Dropped first: its thread submits changes, which the fields below carry out.
    control: ControlServer,
    metrics: MetricsServer,
    leases: LeaseServer,
    changes: ChangeThread,
}

impl ActiveServer {
    fn start(
        listener: ControlListener,
        metrics: MetricsListener,
        registry: StartingRegistry,
    ) -> Result<Self, ServeError> {
        let stats_source = ServerStatsSource {
            registry_snapshot: registry.snapshot(),
            leases: registry.leases(),
            pollers: registry.pollers(),
            ledgers: registry.context.ledgers.clone(),
            health: HealthAnswers::default(),
            persistence: registry.context.persistence.clone(),
        };
        // The lease server starts before anything is reported, because a VMM that finds no lease server would open the
        // drive itself.
        let lease_server =
            LeaseServer::start(stats_source.leases.clone()).map_err(ServeError::Leases)?;
        let metrics = MetricsServer::start(metrics, stats_source.clone())?;
        let comparer = ConfigurationComparer::start({
            let snapshot = registry.snapshot();
            move || {
                let snapshot = snapshot
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .clone();
                snapshot.running_configuration.compare()
            }
        })
        .map_err(ServeError::Thread)?;
        let (queue, requests) = ChangeQueue::new();
        let control = ControlServer::start(
            listener,
            ServerControl {
                stats_source,
                comparer: comparer.clone(),
                changes: queue.clone(),
            },
        )?;
        // The last step, since the functions end with their thread.
        let changes =
            ChangeThread::start(registry, comparer, queue, requests).map_err(ServeError::Thread)?;
        Ok(Self {
            control,
            metrics,
            leases: lease_server,
            changes,
        })
    }

    /// Ends all functions and returns the first error.
    fn end(self) -> Result<(), ServeError> {
        let Self {
            control,
            metrics,
            mut leases,
            changes,
        } = self;
        // Clients can submit no changes from now on. Changes that wait are refused, and the change in progress ends early.
        drop((control, metrics));
        // Leases and functions are asked to end before either is awaited, as each may use its whole timeout.
        leases.stop_leases();
        let registry = changes.end().ok_or(ServeError::Panicked)?;
        registry.forget_configuration();
        registry.stop_functions();
        drop(leases);
        let persistence = registry.context.persistence.clone();
        // The last process that closes a block device waits for its writes. The supervisor must not wait, so this process keeps
        // the drives open until the supervisor has closed its descriptors.
        let _open = persistence.as_ref().map(|_| registry.drives.controllers());
        let ended = registry.end();
        if let Some(persistence) = persistence {
            // Removes the remaining spare descriptors, those of leases to which no VMM has returned.
            persistence.spares().forget_other_drives(&[]);
        }
        ended.map_err(|(socket, source)| ServeError::End { socket, source })
    }
}

/// Implementation of the control socket's requests.
struct ServerControl {
    stats_source: ServerStatsSource,
    comparer: ConfigurationComparer,
    changes: ChangeQueue,
}

impl ControlService for ServerControl {
    fn stats(&self) -> ServerStats {
        self.stats_source.stats()
    }

    fn update_faults(&self, request: &FaultRequest) -> Result<Vec<DriveFaults>, String> {
        faults::execute_request(request, &self.stats_source.registry_snapshot().drives)
            .map_err(|error| error.to_string())
    }

    fn adopt_supervisor(&self, supervisor: &Path, max: u64) -> Result<(), String> {
        match &self.stats_source.persistence {
            Some(persistence) => persistence.adopt_supervisor(supervisor.as_os_str(), max),
            None => Err(
                "it was started without a supervisor, and has nothing to store in one".to_owned(),
            ),
        }
    }

    fn functions(&self) -> Vec<FunctionEntry> {
        let mut entries = self.stats_source.registry_snapshot().entries();
        self.comparer.differences().mark_entries(&mut entries);
        entries.extend(self.stats_source.leases.entries());
        entries
    }

    fn set_log_filter(&self, filter: Option<&str>) -> Result<String, String> {
        if let Some(text) = filter {
            let filter: LogFilter = text.parse().map_err(|error| format!("{error}"))?;
            let say = || log::info!("The filter of the log is {filter} from now on");
            let is_said = log::log_enabled!(log::Level::Info);
            if is_said {
                say();
            }
            logging::set_filter(filter.clone());
            if !is_said {
                say();
            }
        }
        let filter = logging::filter().ok_or("it has no log of its own")?;
        Ok(filter.to_string())
    }

    fn capacity(&self, unit: Option<NonZeroU64>) -> Result<Vec<DriveCapacity>, String> {
        self.stats_source
            .capacity(unit)
            .map_err(|error| report::chain(&error))
    }

    fn start_change(&self, change: FunctionChange, reply: ChangeReply) {
        self.changes.push(change, reply);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::process::{Command, Stdio};

    use rustix::process::{Pid, PidfdFlags, pidfd_open};

    use super::*;

    #[test]
    fn the_control_socket_waits_only_for_the_end_of_the_old_server() {
        let dir = tempfile::tempdir().unwrap();
        let mut command = Command::new("cat");
        let command = command.stdin(Stdio::piped()).stdout(Stdio::null());
        let mut before = command.spawn().unwrap();
        let process = pidfd_open(Pid::from_child(&before), PidfdFlags::empty()).unwrap();
        let persistence = Arc::new(ServerPersistence::beside_predecessor(dir.path(), process));
        let control = dir.path().join("control.sock");
        let metrics = MetricsOptions::default();
        let late = SuccessorSockets::spawn(control.clone(), metrics).unwrap();
        late.start_binding(persistence, true);
        UnixStream::connect(&control).unwrap_err();
        drop(before.stdin.take());
        before.wait().unwrap();
        // The process that acts as the predecessor has ended, so the thread binds the sockets, although no functions are
        // restored yet.
        while UnixStream::connect(&control).is_err() {
            clock::sleep(Duration::from_millis(1));
        }
        late.into_sockets().expect("begun").unwrap();
    }
}
