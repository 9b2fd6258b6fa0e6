//! `nvme-mpt serve`: drives are opened, leased in parts and offered as NVMe functions, until a
//! signal asks for the end.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nvme_mpt::host::NamespaceFormat;
use nvme_mpt::lease::{PrivateError, make_state_folder};
use nvme_mpt::spec::ids::Nsid;
use nvme_mpt::{Drive, Learning, Pollers};
use nvme_mpt_vmm::drives::{self, DriveOptions, DrivePath, OpenDriveError};
use thiserror::Error;
use vmm_device::{MsixMasking, NvmeFunction};

use crate::adaptor::NvmeDevice;
use crate::attach;
use crate::control::{ControlError, ControlServer, Service};
use crate::faults::{self, DriveFaults, FaultRequest};
use crate::function_thread::{FunctionHandle, FunctionThread, FunctionThreadError};
use crate::signals::EndSignals;
use crate::stats::{DriveStats, ServerStats};
use nvme_mpt_vmm::open::{self, Ledgers, OpenError};
use nvme_mpt_vmm::options::ServedFunction;

/// Functions of a server, and the places of its state.
#[derive(Clone, Debug)]
pub struct ServeOptions {
    /// The functions.
    pub functions: Vec<ServedFunction>,
    /// Folder with the ledger of leases.
    pub state_dir: PathBuf,
    /// Control socket.
    pub control: PathBuf,
}

/// A server cannot be started, or did not end well.
#[derive(Debug, Error)]
pub enum ServeError {
    /// Two functions have the same socket.
    #[error("Two functions have the socket {}: give each its own", .0.display())]
    SocketTwice(PathBuf),
    /// Two functions have the same id.
    #[error("Two functions have the id \"{0}\": give each its own")]
    IdTwice(String),
    /// Two functions want the same drive in different ways.
    #[error(
        "Drive {path} is opened once, but the functions that share it ask for different {key}=: give the same {key}= to each"
    )]
    DriveTwice {
        /// The drive.
        path: DrivePath,
        /// The option that differs.
        key: &'static str,
    },
    /// A function cannot be offered.
    #[error("Cannot offer the function on {}", socket.display())]
    Function {
        /// Its socket.
        socket: PathBuf,
        /// Why.
        #[source]
        source: OfferError,
    },
    /// The state folder cannot be had for our user alone.
    #[error("Cannot use the state folder; choose another one with --state-dir")]
    StateDir(#[source] PrivateError),
    /// The folder of the control socket cannot be made.
    #[error("Cannot create the folder {} for the control socket; choose another place with --control", path.display())]
    ControlDir {
        /// The folder.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The control socket cannot be offered.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// Signals cannot be waited for.
    #[error("Cannot wait for SIGTERM and SIGINT")]
    Signals(#[source] io::Error),
    /// The offered functions cannot be printed.
    #[error("Cannot print what is offered")]
    Print(#[source] io::Error),
    /// A function did not end well.
    #[error("The function on {} did not end well", socket.display())]
    End {
        /// Its socket.
        socket: PathBuf,
        /// Why.
        #[source]
        source: FunctionThreadError,
    },
}

/// One function cannot be offered.
#[derive(Debug, Error)]
pub enum OfferError {
    /// Its part of the drive cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// Its doorbells cannot be offered.
    #[error("Cannot share the doorbells; raise the limit on open files")]
    Doorbells(#[source] io::Error),
    /// Error serving a function.
    #[error(transparent)]
    Thread(#[from] FunctionThreadError),
}

/// Offers functions until SIGTERM or SIGINT comes, and reports it on `out`: a block for each function,
/// and "ready".
///
/// # Errors
/// Something cannot be offered: then nothing is, and nothing stays behind. Or something did not end
/// well.
pub fn serve(options: &ServeOptions, out: &mut dyn Write) -> Result<(), ServeError> {
    let signals = EndSignals::hold_back().map_err(ServeError::Signals)?;
    let server = Server::start(options)?;
    server.announce(out).map_err(ServeError::Print)?;
    let signal = signals.wait().map_err(ServeError::Signals)?;
    log::info!("{signal}: no more clients are taken, and the functions are reset");
    // To the end: a signal that ends the process now would leave leases behind, for data that is not yet
    // durable. Each wait on the way has its own bound.
    signals.hold_for_good();
    server.end()
}

/// A function that is offered, with what a person needs to know about it.
#[derive(Debug)]
struct Offer {
    id: String,
    socket: PathBuf,
    summary: String,
    /// Path by which its drive is opened, and the queue pairs that it may use of it.
    path: String,
    queues: u16,
    thread: FunctionThread,
}

/// All that is offered. Dropped, it is offered no more.
#[derive(Debug)]
struct Server {
    // First, since it asks the functions.
    control: ControlServer,
    offers: Vec<Offer>,
    /// Last: a drive is given back when its last user is gone.
    drives: Vec<Arc<Drive>>,
}

impl Server {
    fn start(options: &ServeOptions) -> Result<Self, ServeError> {
        let functions = resolve(&options.functions)?;
        // Before anything is opened: a folder that others may use is reported at once.
        make_state_folder(&options.state_dir).map_err(ServeError::StateDir)?;
        let mut drives = Drives::default();
        let ledgers = Ledgers::open(&options.state_dir);
        let pollers = Pollers::new();
        let mut offers: Vec<Offer> = Vec::new();
        for function in &functions {
            let path = &function.function.path;
            let options = drive_options(&functions, path)?;
            let offer = drives
                .open(path, options, function.function.namespace)
                .map_err(|error| OfferError::from(OpenError::from(error)))
                .and_then(|drive| offer(function, &drive, &ledgers, &pollers))
                .map_err(|source| ServeError::Function {
                    socket: function.socket.clone(),
                    source,
                })?;
            if offers.iter().any(|other| other.id == offer.id) {
                return Err(ServeError::IdTwice(offer.id));
            }
            offers.push(offer);
        }
        let drives = drives.controllers();
        let control = start_control(&options.control, &offers, drives.clone(), pollers)?;
        Ok(Self {
            control,
            offers,
            drives,
        })
    }

    fn announce(&self, out: &mut dyn Write) -> io::Result<()> {
        for drive in &self.drives {
            if let Some(summary) = summary_of(drive, &self.offers) {
                writeln!(out, "Drive {summary}")?;
                writeln!(out)?;
            }
        }
        for Offer {
            id,
            socket,
            summary,
            ..
        } in &self.offers
        {
            writeln!(out, "Function {id} on {}", socket.display())?;
            writeln!(out, "  {summary}")?;
            writeln!(out, "  Cloud Hypervisor:")?;
            writeln!(out, "    {}", attach::cloud_hypervisor(id, socket))?;
            writeln!(out, "  QEMU 10.1 or newer:")?;
            writeln!(out, "    {}", attach::qemu(id, socket))?;
            writeln!(out)?;
        }
        writeln!(out, "ready")?;
        out.flush()
    }

    /// Ends all functions, at the same time, and returns the first error.
    fn end(self) -> Result<(), ServeError> {
        drop(self.control);
        // What is left of the drives belongs to the functions.
        drop(self.drives);
        for offer in &self.offers {
            offer.thread.stop();
        }
        let mut result = Ok(());
        for Offer { socket, thread, .. } in self.offers {
            let ended = thread
                .end()
                .map_err(|source| ServeError::End { socket, source });
            result = result.and(ended);
        }
        result
    }
}

/// The functions with absolute paths, which name the same file the same way.
fn resolve(functions: &[ServedFunction]) -> Result<Vec<ServedFunction>, ServeError> {
    let mut resolved: Vec<ServedFunction> = Vec::with_capacity(functions.len());
    for function in functions {
        let mut function = function.clone();
        // Fails for an empty path alone, which no option has.
        if let Ok(absolute) = std::path::absolute(&function.socket) {
            function.socket = absolute;
        }
        if let DrivePath::File(path) = &function.function.path
            && let Ok(canonical) = fs::canonicalize(path)
        {
            // A file that does not exist is reported when it is opened.
            function.function.path = DrivePath::File(canonical);
        }
        if resolved.iter().any(|other| other.socket == function.socket) {
            return Err(ServeError::SocketTwice(function.socket));
        }
        resolved.push(function);
    }
    Ok(resolved)
}

/// Returns the options of the drive at `path`: as the functions that share it ask.
fn drive_options(
    functions: &[ServedFunction],
    path: &DrivePath,
) -> Result<DriveOptions, ServeError> {
    let sharing = functions.iter().map(|other| &other.function);
    let sharing = sharing.filter(|other| other.path == *path);
    let differ = |key| ServeError::DriveTwice {
        path: path.clone(),
        key,
    };
    let lba = common(sharing.clone().filter_map(|other| other.lba)).map_err(|_| differ("lba"))?;
    let profile = common(sharing.clone().filter_map(|other| other.profile.clone()))
        .map_err(|_| differ("profile"))?;
    let faults = common(sharing.clone().filter_map(|other| other.faults.clone()))
        .map_err(|_| differ("faults"))?;
    let fixed = sharing.clone().map(|other| other.fixed.of_drive());
    let fixed = fixed.filter(|fixed| *fixed != Learning::default());
    let learning = common(fixed).map_err(|_| differ("fixed"))?;
    let timeout =
        common(sharing.filter_map(|other| other.timeout)).map_err(|_| differ("timeout"))?;
    let default = DriveOptions::default();
    Ok(DriveOptions {
        lba_size: lba.unwrap_or_default().bytes(),
        deadline: timeout.unwrap_or(default.deadline),
        learning: learning.unwrap_or_default(),
        profile,
        faults,
        ..default
    })
}

/// Values differ that should be one.
struct Differ;

fn common<T: PartialEq>(mut values: impl Iterator<Item = T>) -> Result<Option<T>, Differ> {
    let first = values.next();
    match values.any(|other| Some(&other) != first.as_ref()) {
        true => Err(Differ),
        false => Ok(first),
    }
}

/// The drives that are open: each host controller once, with each namespace that is used.
#[derive(Debug, Default)]
struct Drives(Vec<Arc<Drive>>);

impl Drives {
    fn open(
        &mut self,
        path: &DrivePath,
        options: DriveOptions,
        namespace: Option<Nsid>,
    ) -> Result<Arc<Drive>, OpenDriveError> {
        let name = path.to_string();
        let of_path = |drive: &&Arc<Drive>| drive.path() == name;
        let drive = match self.0.iter().find(of_path) {
            Some(open) => open.sibling(namespace)?,
            None => drives::open(
                path,
                DriveOptions {
                    namespace,
                    ..options
                },
            )?,
        };
        let same = |open: &&Arc<Drive>| {
            open.path() == name && open.namespace().nsid == drive.namespace().nsid
        };
        if let Some(open) = self.0.iter().find(same) {
            return Ok(open.clone());
        }
        self.0.push(drive.clone());
        Ok(drive)
    }

    /// One drive of each host controller.
    fn controllers(self) -> Vec<Arc<Drive>> {
        let mut controllers: Vec<Arc<Drive>> = Vec::new();
        for drive in self.0 {
            if controllers.iter().all(|other| other.path() != drive.path()) {
                controllers.push(drive);
            }
        }
        controllers
    }
}

/// Returns the facts that a person needs to know of a drive with a number of queues of its own.
fn summary_of(drive: &Drive, offers: &[Offer]) -> Option<String> {
    let pairs = drive.controller().queue_pairs()?;
    let users = offers.iter().filter(|offer| offer.path == drive.path());
    let wanted: u32 = users.map(|offer| u32::from(offer.queues)).sum();
    let mut summary = format!(
        "{}: {}, {} I/O queue pair{}",
        drive.path(),
        drive.controller().model(),
        pairs.total,
        if pairs.total == 1 { "" } else { "s" },
    );
    if wanted > pairs.total.into() {
        summary += &format!(
            "; its functions may use {wanted}, so that queues share them when guests create more than there are"
        );
    }
    Some(summary)
}

fn offer(
    options: &ServedFunction,
    drive: &Arc<Drive>,
    ledgers: &Ledgers,
    pollers: &Arc<Pollers>,
) -> Result<Offer, OfferError> {
    let ServedFunction { socket, function } = options;
    let attachment = open::attach(function, drive, ledgers, pollers)?;
    let id = attachment.lease().id().to_owned();
    let drive_name = match function.path {
        DrivePath::Pci(_) => format!("{} namespace {}", function.path, drive.namespace().nsid),
        _ => function.path.to_string(),
    };
    let summary = format!("{drive_name}, range {}", attachment.lease().bytes());
    let namespace = attachment.namespace();
    let contents = match namespace.format {
        NamespaceFormat::Keys(_) => "keys and values".to_owned(),
        NamespaceFormat::Blocks | NamespaceFormat::Zones(_) => format!(
            "{} blocks of {} bytes",
            namespace.blocks,
            1_u64 << namespace.lba_shift
        ),
    };
    let summary = format!(
        "{summary} ({contents}); serial {}; doorbells {}, poll {}, {} queue pairs",
        namespace.serial,
        function.doorbells,
        function.poll,
        attachment.max_queue_pairs(),
    );
    let queues = attachment.max_queue_pairs();
    let function = NvmeFunction::new(Arc::new(attachment), MsixMasking::Client);
    let device = NvmeDevice::new(function).map_err(OfferError::Doorbells)?;
    let thread = FunctionThread::start(&id, socket, device)?;
    Ok(Offer {
        id,
        socket: socket.clone(),
        summary,
        path: drive.path().to_owned(),
        queues,
        thread,
    })
}

fn start_control(
    path: &Path,
    offers: &[Offer],
    drives: Vec<Arc<Drive>>,
    pollers: Arc<Pollers>,
) -> Result<ControlServer, ServeError> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).map_err(|source| ServeError::ControlDir {
            path: folder.to_owned(),
            source,
        })?;
    }
    let handles = offers.iter().map(|offer| offer.thread.handle()).collect();
    Ok(ControlServer::start(
        path,
        Controlled {
            handles,
            drives,
            pollers,
        },
    )?)
}

/// State behind the control socket.
struct Controlled {
    handles: Vec<FunctionHandle>,
    drives: Vec<Arc<Drive>>,
    pollers: Arc<Pollers>,
}

impl Service for Controlled {
    fn stats(&self) -> ServerStats {
        ServerStats {
            functions: FunctionHandle::stats_of(&self.handles),
            drives: self
                .drives
                .iter()
                .map(|drive| DriveStats::of(drive))
                .collect(),
            pollers: self.pollers.stats(),
        }
    }

    fn faults(&self, request: &FaultRequest) -> Result<Vec<DriveFaults>, String> {
        faults::carry_out(request, &self.drives).map_err(|error| error.to_string())
    }
}
