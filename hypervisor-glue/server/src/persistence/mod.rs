//! State that a server stores with its supervisor, so that VMs outlive the server.
//!
//! | name | descriptors |
//! |---|---|
//! | `function-N` | both ends of a function's [descriptor queue](nvme_mpt_supervise::DescriptorQueue), see `persisted_function` |
//! | `memory-BYTES` | memory file of the drive `memory:BYTES` |
//! | `faults-HASH` | memory file of a drive's injected faults, by the hash of its path |
//! | `drive-PCI` | both ends of a physical drive's descriptor queue, see `drive_descriptors` |
//! | `spare-DRIVE-LEASE` | spare file descriptors of a lease, see `spare_descriptions` |
//! | `leases` | ledger of private drives, such as `memory:`, that only this process uses |
//! | `configuration` | initial functions and drives of the next server, in a request log |
//!
//! A descriptor is stored before a committed state names it, and removed after the committed state does not name it any longer.
//! So a crash leaves at most unused descriptors, which the next server closes.

pub(crate) mod crashes;
mod drive_descriptors;
mod fd_store_registry;
pub(crate) mod persisted_function;
pub mod predecessor;
mod spare_descriptions;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nvme_guest::iova::MappedFile;
use nvme_guest::threads::start_thread;
use nvme_lease::{LeaseError, Ledger};
use nvme_mpt_memory::{clock, memfd, system};
use nvme_mpt_supervise::{FdStoreClient, FdStoreError, InheritedDescriptors};
use nvme_mpt_vmm::drives::{DrivePath, MemoryFile};
use nvme_mpt_vmm::report;
use thiserror::Error;
use vfio_user_server::{RequestLog, RequestLogContents, RequestLogError};

use drive_descriptors::{DRIVE_PREFIX, DriveDescriptorQueues};
use fd_store_registry::{FdStoreRegistry, SPARE_PREFIX};
use persisted_function::{FdStoreKey, RestorableFunction, RestoreError, RestoreOrder};
use predecessor::{PredecessorError, PredecessorProcess, ReleasedPredecessor};
use spare_descriptions::SpareDescriptions;

use crate::stats::{GuestPause, GuestPauseCause, SupervisorStatus};

/// First argument of the internal process between a supervisor and its command (the first stage).
pub const FIRST_STAGE: &str = "supervise-first-stage";

/// Prefix of the names under which the supervisor stores functions.
const FUNCTION_PREFIX: &str = "function-";

/// Prefix of the names of memory files of `memory:` drives.
const MEMORY_PREFIX: &str = "memory-";

/// Prefix of the names of memory files with drives' injected faults.
const FAULTS_PREFIX: &str = "faults-";

/// Timeout for the supervisor to process all messages.
const SUPERVISOR_TIMEOUT: Duration = Duration::from_secs(5);

/// Interval of checking whether the supervisor runs.
const SUPERVISOR_POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Name under which the supervisor keeps the ledger of `memory:` and `null:` drives.
const PRIVATE_LEDGER: &str = "leases";

/// Name under which the supervisor keeps the configuration of functions and drives.
const CONFIGURATION: &str = "configuration";

/// Error of using the supervisor.
#[derive(Debug, Error)]
pub enum PersistenceError {
    /// The supervisor cannot be reached, or the descriptors that it passed cannot be read.
    #[error("Cannot use the supervisor of this server")]
    Supervisor(#[from] FdStoreError),
    /// The kernel cannot create a memory file.
    #[error("Cannot make a memory file that outlives this server")]
    Memory(#[source] std::io::Error),
    /// The kernel cannot duplicate a descriptor.
    #[error("Cannot duplicate the descriptor of the stored configuration")]
    Descriptor(#[source] std::io::Error),
    /// The predecessor stays in place, or handing over failed.
    #[error(transparent)]
    Predecessor(#[from] PredecessorError),
    /// The ledger of private drives cannot be read.
    #[error("Cannot read the previous server's ledger of memory: and null: drives")]
    Ledger(#[from] LeaseError),
    /// The configuration cannot be stored or read.
    #[error("Cannot use the stored configuration")]
    Configuration(#[from] RequestLogError),
}

/// Returns the configuration that the predecessor stored; `None` if there is none.
///
/// # Errors
/// The configuration cannot be read.
pub(crate) fn persisted_configuration(
    inherited: &InheritedDescriptors,
) -> Result<Option<Vec<u8>>, PersistenceError> {
    let Some(file) = inherited.get(CONFIGURATION).next() else {
        return Ok(None);
    };
    let file = file
        .try_clone_to_owned()
        .map_err(PersistenceError::Descriptor)?;
    // The predecessor may still run and write the request log of the configuration.
    match RequestLogContents::read_running(file) {
        Ok(record) => Ok(Some(record.device_state().to_vec())),
        // The predecessor ended before it stored a configuration.
        Err(RequestLogError::Empty) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Returns whether the predecessor left a configuration for this process. Does not read the configuration.
pub fn has_persisted_configuration() -> bool {
    let names = std::env::var("LISTEN_FDNAMES").unwrap_or_default();
    names.split(':').any(|name| name == CONFIGURATION)
}

/// Reports the server's state to the supervisor or service manager, as in sd_notify(3).
pub(crate) fn notify(persistence: Option<&ServerPersistence>, assignments: &str) {
    let notified = match persistence {
        Some(persistence) => persistence.registry.client().notify(assignments),
        None => FdStoreClient::from_env().and_then(|store| match store {
            Some(store) => store.notify(assignments),
            None => Ok(()),
        }),
    };
    if let Err(error) = notified {
        log::error!(
            "Cannot send {assignments} to the supervisor: {}",
            report::chain(&error)
        );
    }
}

/// State that this server stores with its supervisor, or has inherited from its predecessor.
#[derive(Debug)]
pub(crate) struct ServerPersistence {
    registry: Arc<FdStoreRegistry>,
    /// True while a new supervisor is receiving the descriptors.
    is_being_adopted: AtomicBool,
    state: Mutex<PersistenceState>,
    spares: Arc<SpareDescriptions>,
    /// Start of the pause of functions that this process restores.
    pause_start: GuestPauseStart,
    /// Predecessor that this process replaces; `None` if the process was not started by a running server.
    predecessor: Option<ReleasedPredecessor>,
}

/// Start of the pause of the functions that this server restores, and its cause.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GuestPauseStart {
    cause: GuestPauseCause,
    /// Time when the pause began, on the host's monotonic clock.
    time: Duration,
}

impl GuestPauseStart {
    /// Returns the start of the pause of functions in VMMs. Unlike functions on vfio-user, these also continue after an orderly
    /// restart of the server, and without a supervisor.
    pub(crate) fn for_vmms(persistence: Option<&ServerPersistence>) -> Self {
        match persistence.map(ServerPersistence::pause_start) {
            Some(begin) if begin.cause == GuestPauseCause::Upgrade => begin,
            begin => Self {
                cause: GuestPauseCause::Restart,
                time: begin.map_or_else(system::host_time, |begin| begin.time),
            },
        }
    }

    /// Returns the pause from this start to `end`.
    pub(crate) fn pause_until(self, end: Duration) -> GuestPause {
        let Self { cause, time: at } = self;
        // The start comes from another process, perhaps of another release, so it may be wrong and later than `end`.
        let seconds = end.saturating_sub(at).as_secs_f64();
        GuestPause { cause, seconds }
    }
}

/// A function of the predecessor that cannot be read yet. Its socket is unknown until then.
#[derive(Debug)]
struct UnreadFunction {
    store_key: FdStoreKey,
    /// The error of the last attempt.
    reason: String,
}

#[derive(Debug)]
struct PersistenceState {
    /// Request log in which the configuration is stored; `None` until it is first stored.
    configuration: Option<RequestLog>,
    /// Functions of the predecessor that are not restored yet, by the path of their socket.
    restorable: BTreeMap<PathBuf, RestorableFunction>,
    /// Functions of the predecessor that this process cannot read yet, for lack of a resource.
    unread: Vec<UnreadFunction>,
    /// True if a function was blamed for the lack of memory that ended the predecessor.
    has_blamed: bool,
    /// Ledger of private drives: those that only this process can have, `memory:` and `null:`.
    private_ledger: Ledger,
    /// Memory files with the contents of `memory:` drives, by size in bytes.
    memory_files: BTreeMap<u64, MemoryFile>,
    /// Faults of drives that this process has not opened yet, by name in the supervisor.
    fault_files: BTreeMap<String, MemoryFile>,
    drives: DriveDescriptorQueues,
    next_function: u64,
}

impl UnreadFunction {
    fn new(store_key: FdStoreKey, error: &RestoreError) -> Self {
        let reason = report::chain(error);
        Self { store_key, reason }
    }

    fn log(&self) {
        let Self { store_key, reason } = self;
        log::error!(
            "Cannot read {} of the previous process yet: {reason}. The server retries until it succeeds",
            store_key.name
        );
    }
}

impl ServerPersistence {
    /// Connects to the supervisor and reads the stored state. Returns `None` without a supervisor.
    ///
    /// If this process replaces a running server, first calls `check`, and continues only if it succeeds. Then waits until
    /// the predecessor has paused its functions and handed them over. After that, the predecessor [may still
    /// run](Self::await_predecessor_end).
    ///
    /// # Errors
    /// See [`PersistenceError`]. If `check` fails, returns its error.
    pub(crate) fn connect<E: From<PersistenceError>>(
        mut inherited: InheritedDescriptors,
        check: impl FnOnce() -> Result<(), E>,
    ) -> Result<Option<Arc<Self>>, E> {
        let store = FdStoreClient::from_env().map_err(PersistenceError::from)?;
        let Some(store) = store.filter(FdStoreClient::can_store) else {
            return Ok(None);
        };
        let mut pause_start = GuestPauseStart {
            cause: GuestPauseCause::Crash,
            time: system::host_time(),
        };
        let mut leaving = None;
        crashes::install_panic_hook();
        if let Some(predecessor) =
            PredecessorProcess::find(&mut inherited).map_err(PersistenceError::from)?
        {
            check()?;
            let (at, server) = predecessor
                .await_hand_over()
                .map_err(PersistenceError::from)?;
            pause_start = GuestPauseStart {
                cause: GuestPauseCause::Upgrade,
                time: at,
            };
            leaving = Some(server);
        }
        let persistence = Self::read(store, inherited, pause_start, leaving)?;
        Ok(Some(Arc::new(persistence)))
    }

    fn read(
        store: FdStoreClient,
        mut inherited: InheritedDescriptors,
        pause_start: GuestPauseStart,
        leaving: Option<ReleasedPredecessor>,
    ) -> Result<Self, PersistenceError> {
        let registry = Arc::new(FdStoreRegistry::new(store));
        let names: Vec<String> = inherited.names().map(str::to_owned).collect();
        let mut stored: BTreeMap<String, Vec<OwnedFd>> = BTreeMap::new();
        for name in names {
            let descriptors = inherited.take(&name);
            registry.record_stored(&name, &descriptors)?;
            stored.insert(name, descriptors);
        }
        if leaving.is_some() {
            registry.reconcile_store()?;
        }
        let configuration = stored.remove(CONFIGURATION).unwrap_or_default();
        let configuration = configuration
            .into_iter()
            .next()
            .map(RequestLog::from_predecessor);
        let mut state = PersistenceState {
            configuration: match configuration {
                Some(Ok((configuration_log, _))) => Some(configuration_log),
                // The request log cannot be read, which `persisted_configuration` has reported. A new one will replace it.
                Some(Err(_)) => {
                    registry.forget(CONFIGURATION)?;
                    None
                }
                None => None,
            },
            restorable: BTreeMap::new(),
            unread: Vec::new(),
            has_blamed: false,
            private_ledger: open_private_ledger(
                &registry,
                stored.remove(PRIVATE_LEDGER).unwrap_or_default(),
            )?,
            memory_files: BTreeMap::new(),
            fault_files: BTreeMap::new(),
            drives: DriveDescriptorQueues::default(),
            next_function: 0,
        };
        for (name, descriptors) in stored {
            if let Some(number) = parse_number_after(FUNCTION_PREFIX, &name) {
                state.next_function = state.next_function.max(number + 1);
                let store_key = FdStoreKey {
                    name: name.clone(),
                    registry: registry.clone(),
                };
                match RestorableFunction::read(store_key.clone(), descriptors) {
                    Ok(function) => {
                        let socket = function.socket().to_owned();
                        state.restorable.insert(socket, function);
                    }
                    Err(error) if error.is_transient() => {
                        let unread = UnreadFunction::new(store_key, &error);
                        unread.log();
                        state.unread.push(unread);
                    }
                    Err(error) => {
                        let error = report::chain(&error);
                        log::error!("Cannot restore {name} of the previous process: {error}");
                        if let Some(leaving) = &leaving {
                            leaving.dismiss();
                            leaving.await_end().map_err(PredecessorError::from)?;
                        }
                        // The supervisor has the function's socket open. Once it has removed the entry, a new function can use
                        // the socket's path.
                        store_key.forget_and_wait();
                    }
                }
            } else if let Some(bytes) = parse_number_after(MEMORY_PREFIX, &name) {
                let file = descriptors.into_iter().next();
                let file = file.map(|file| MemoryFile(Arc::new(file)));
                state.memory_files.extend(file.map(|file| (bytes, file)));
            } else if name.starts_with(FAULTS_PREFIX) {
                let file = descriptors.into_iter().next();
                let file = file.map(|file| MemoryFile(Arc::new(file)));
                state.fault_files.extend(file.map(|file| (name, file)));
            } else if name.starts_with(DRIVE_PREFIX) {
                if let Err(error) = state.drives.insert(name.clone(), descriptors) {
                    let error = report::chain(&error);
                    log::error!(
                        "Cannot restore {name} of the previous process, so it is reset: {error}"
                    );
                    registry.forget(&name)?;
                }
            } else if name.starts_with(SPARE_PREFIX) {
                // An entry of a spare description stays: it is used with its lease, or removed with its drive.
            } else {
                log::warn!("The supervisor has \"{name}\", which this server does not know");
            }
        }
        state.has_blamed = RestorableFunction::blame_one(state.restorable.values_mut());
        let state = Mutex::new(state);
        Ok(Self {
            spares: Arc::new(SpareDescriptions::new(registry.clone())),
            registry,
            is_being_adopted: AtomicBool::new(false),
            state,
            pause_start,
            predecessor: leaving,
        })
    }

    /// Adds a function of the predecessor that cannot be read for lack of open files.
    #[cfg(test)]
    pub(crate) fn add_unread(&self) {
        let error = RestoreError::from(FdStoreError::Truncated);
        let unread = UnreadFunction::new(self.allocate_store_key(), &error);
        self.state().unread.push(unread);
    }

    #[cfg(test)]
    pub(crate) fn beside_predecessor(dir: &Path, predecessor: OwnedFd) -> Self {
        let (persistence, ..) = Self::beside_predecessor_with(dir, predecessor);
        persistence
    }

    /// Creates the state of a server whose predecessor is this process. Also returns the socket of a supervisor that reads
    /// nothing, and the predecessor's end of the upgrade socket.
    #[cfg(test)]
    pub(crate) fn beside_predecessor_with(
        dir: &Path,
        predecessor: OwnedFd,
    ) -> (
        Self,
        std::os::unix::net::UnixDatagram,
        std::os::unix::net::UnixStream,
    ) {
        let (FdStoreKey { registry, .. }, supervisor) = FdStoreKey::with_silent_supervisor(dir);
        let (leaving, server) = ReleasedPredecessor::with_pidfd(predecessor);
        let persistence = Self {
            spares: Arc::new(SpareDescriptions::new(registry.clone())),
            registry,
            is_being_adopted: AtomicBool::new(false),
            state: Mutex::new(PersistenceState {
                configuration: None,
                restorable: BTreeMap::new(),
                unread: Vec::new(),
                has_blamed: false,
                private_ledger: Ledger::in_process(),
                memory_files: BTreeMap::new(),
                fault_files: BTreeMap::new(),
                drives: DriveDescriptorQueues::default(),
                next_function: 0,
            }),
            pause_start: GuestPauseStart {
                cause: GuestPauseCause::Upgrade,
                time: Duration::ZERO,
            },
            predecessor: Some(leaving),
        };
        (persistence, supervisor, server)
    }

    /// Returns whether this process was started to replace another server. Until the predecessor has
    /// [ended](Self::await_predecessor_end), it may still own sockets.
    pub(crate) fn has_predecessor(&self) -> bool {
        self.predecessor.is_some()
    }

    /// Returns whether this process replaces the server with this process id.
    pub(crate) fn is_predecessor(&self, number: u32) -> bool {
        let leaving = self.predecessor.as_ref();
        leaving.is_some_and(|leaving| leaving.has_pid(number))
    }

    /// Tells the predecessor that it may end, since all functions that can be restored beside it are served.
    pub(crate) fn dismiss_predecessor(&self) {
        if let Some(leaving) = &self.predecessor {
            leaving.dismiss();
        }
    }

    /// Tells the predecessor to end, and waits until it has ended. Afterwards, only this process has the functions' sockets.
    pub(crate) fn end_predecessor(&self) {
        self.dismiss_predecessor();
        if let Err(error) = self.await_predecessor_end() {
            log::error!("{}", report::chain(&error));
        }
    }

    /// Waits until the predecessor has ended.
    ///
    /// # Errors
    /// [`PersistenceError::Predecessor`] with the kernel's error.
    pub(crate) fn await_predecessor_end(&self) -> Result<(), PersistenceError> {
        match &self.predecessor {
            Some(leaving) => Ok(leaving.await_end().map_err(PredecessorError::from)?),
            None => Ok(()),
        }
    }

    /// Returns whether the predecessor left functions that are not restored yet.
    pub(crate) fn has_restorable_functions(&self) -> bool {
        let state = self.state();
        !state.restorable.is_empty() || !state.unread.is_empty()
    }

    /// Returns the reason why a function of the predecessor cannot be read yet; `None` if all are read. As long as there is a
    /// reason, a socket that is not known as that of a read function may be the unread function's.
    pub(crate) fn unread_reason(&self) -> Option<String> {
        let state = self.state();
        state.unread.first().map(|unread| unread.reason.clone())
    }

    /// Tries again to read the functions that could not be read. Returns whether the last one of them has been read.
    pub(crate) fn reread_unread(&self) -> bool {
        let unread = std::mem::take(&mut self.state().unread);
        let had_unread = !unread.is_empty();
        for UnreadFunction { store_key, reason } in unread {
            match self.try_reread(&store_key) {
                Ok(None) => {}
                Ok(Some(mut function)) => {
                    let mut state = self.state();
                    match state.has_blamed {
                        true => function.acquit(),
                        false => {
                            let suspects = [&mut function].into_iter();
                            state.has_blamed = RestorableFunction::blame_one(suspects);
                        }
                    }
                    drop(state);
                    self.return_function(function);
                }
                Err(unread) => {
                    if unread.reason != reason {
                        unread.log();
                    }
                    self.state().unread.push(unread);
                }
            }
        }
        had_unread && self.state().unread.is_empty()
    }

    /// Returns the time at which the pause of the restored functions started, and its cause.
    pub(crate) fn pause_start(&self) -> GuestPauseStart {
        self.pause_start
    }

    /// Waits until the supervisor has processed all messages of this process.
    ///
    /// # Errors
    /// The supervisor has ended or is late.
    pub(crate) fn await_supervisor(&self) -> Result<(), FdStoreError> {
        self.registry.client().barrier(SUPERVISOR_TIMEOUT)
    }

    pub(crate) fn supervisor_status(&self) -> SupervisorStatus {
        match self.registry.has_supervisor_ended() {
            true => SupervisorStatus::Ended,
            false => SupervisorStatus::Runs,
        }
    }

    /// Starts a thread that checks every second whether the supervisor has ended.
    pub(crate) fn watch_supervisor(self: &Arc<Self>) -> io::Result<()> {
        let watched = Arc::downgrade(self);
        let watch = move || {
            while let Some(persistence) = watched.upgrade() {
                persistence.registry.check_supervisor();
                drop(persistence);
                clock::sleep(SUPERVISOR_POLL_INTERVAL);
            }
        };
        start_thread("supervisor", watch).map(drop)
    }

    /// Stores all descriptors with a new supervisor at this address, after the previous supervisor has ended. A background
    /// thread sends the descriptors.
    ///
    /// # Errors
    /// Returns the reason for refusing the new supervisor as text.
    pub(crate) fn adopt_supervisor(
        self: &Arc<Self>,
        address: &OsStr,
        max: u64,
    ) -> Result<(), String> {
        self.registry.check_supervisor();
        if !self.registry.has_supervisor_ended() {
            return Err("its supervisor has not ended".to_owned());
        }
        let store = FdStoreClient::connect(address, max).map_err(|error| report::chain(&error))?;
        if self.is_being_adopted.swap(true, Ordering::Relaxed) {
            return Err("another supervisor is taking its place".to_owned());
        }
        let persistence = self.clone();
        let adopt = move || {
            match persistence.registry.adopt_client(store) {
                Ok(()) => log::info!("The new supervisor has everything that the old one had"),
                Err(error) => log::error!(
                    "Cannot pass everything that the old supervisor had to the new one: {}",
                    report::chain(&error)
                ),
            }
            persistence.is_being_adopted.store(false, Ordering::Relaxed);
        };
        start_thread("adoption", adopt).map(drop).map_err(|error| {
            self.is_being_adopted.store(false, Ordering::Relaxed);
            error.to_string()
        })
    }

    /// Returns the entries in the supervisor, which an upgrade passes to the successor.
    pub(crate) fn registry(&self) -> &FdStoreRegistry {
        &self.registry
    }

    /// Stores the configuration of all functions and drives.
    pub(crate) fn store_configuration(&self, bytes: &[u8]) {
        if let Err(error) = self.try_store_configuration(bytes) {
            log::error!(
                "Cannot store the configuration in use, so the next server reads the configuration file: {}",
                report::chain(&error)
            );
        }
    }

    fn try_store_configuration(&self, bytes: &[u8]) -> Result<(), PersistenceError> {
        let mut state = self.state();
        if let Some(configuration_log) = &state.configuration {
            return Ok(configuration_log.state_store().store(bytes)?);
        }
        let configuration_log = RequestLog::new()?;
        configuration_log.state_store().store(bytes)?;
        let what = "the configuration";
        self.registry
            .store_or_report(what, CONFIGURATION, &[configuration_log.as_fd()])?;
        state.configuration = Some(configuration_log);
        Ok(())
    }

    /// Deletes the stored configuration at an orderly end, so that the next server uses its own command line and file.
    pub(crate) fn forget_configuration(&self) {
        self.state().configuration = None;
        if let Err(error) = self.registry.forget(CONFIGURATION) {
            let error = report::chain(&error);
            log::error!("Cannot remove the configuration from the supervisor: {error}");
        }
    }

    /// Makes a function that could not be restored restorable again: reads its descriptors anew, for a later attempt or a
    /// successor.
    pub(crate) fn reread_function(&self, store_key: &FdStoreKey) {
        match self.try_reread(store_key) {
            Ok(function) => function.into_iter().for_each(|it| self.return_function(it)),
            Err(unread) => {
                unread.log();
                self.state().unread.push(unread);
            }
        }
    }

    /// Reads a function's descriptors anew. A function that can never be read is removed from the supervisor: returns `None`.
    fn try_reread(
        &self,
        store_key: &FdStoreKey,
    ) -> Result<Option<RestorableFunction>, UnreadFunction> {
        let descriptors = self.registry.descriptors(&store_key.name);
        let read = descriptors.map_err(RestoreError::from);
        match read.and_then(|descriptors| RestorableFunction::read(store_key.clone(), descriptors))
        {
            Ok(function) => return Ok(Some(function)),
            Err(error) if error.is_transient() => {
                return Err(UnreadFunction::new(store_key.clone(), &error));
            }
            Err(error) => {
                let error = report::chain(&error);
                log::error!(
                    "Cannot restore {} of the previous process: {error}",
                    store_key.name
                );
                store_key.forget_and_wait();
            }
        }
        Ok(None)
    }

    /// Removes and returns the predecessor's function with this socket.
    pub(crate) fn take_function(&self, socket: &Path) -> Option<RestorableFunction> {
        self.state().restorable.remove(socket)
    }

    /// Puts back a function that [`Self::take_function`] returned and that cannot be restored now, for a later attempt or a
    /// successor.
    pub(crate) fn return_function(&self, function: RestorableFunction) {
        let socket = function.socket().to_owned();
        self.state().restorable.insert(socket, function);
    }

    /// Returns whether the predecessor had a function with this socket that is not restored yet. As long as a function is
    /// unread, every socket may be that function's.
    pub(crate) fn has_function(&self, socket: &Path) -> bool {
        let state = self.state();
        state.restorable.contains_key(socket) || !state.unread.is_empty()
    }

    /// Returns the function's position in the order of restoring; `None` if no function with this socket is left to be
    /// restored.
    pub(crate) fn restore_order(&self, socket: &Path) -> Option<RestoreOrder> {
        let state = self.state();
        state
            .restorable
            .get(socket)
            .map(RestorableFunction::restore_order)
    }

    /// Returns the guest memory of the predecessor's function with this socket, as ranges of files with their lengths in bytes.
    pub(crate) fn function_memory(&self, socket: &Path) -> Vec<(MappedFile, u64)> {
        let state = self.state();
        let function = state.restorable.get(socket);
        function.map_or_else(Vec::new, RestorableFunction::mapped_memory)
    }

    /// Removes the stored state of the predecessor's functions for whose sockets `is_wanted` returns false.
    pub(crate) fn retain_functions(&self, is_wanted: impl Fn(&Path) -> bool) {
        let mut state = self.state();
        let all = std::mem::take(&mut state.restorable);
        let (wanted, unwanted) = all.into_iter().partition(|(socket, _)| is_wanted(socket));
        state.restorable = wanted;
        drop(state);
        for (socket, function) in unwanted {
            log::warn!(
                "The function on {} is no longer served: a VMM that has it loses its drive",
                socket.display()
            );
            function.discard();
        }
    }

    /// Allocates a name under which the supervisor will store a new function.
    pub(crate) fn allocate_store_key(&self) -> FdStoreKey {
        let mut state = self.state();
        let number = state.next_function;
        state.next_function += 1;
        FdStoreKey {
            name: format!("{FUNCTION_PREFIX}{number}"),
            registry: self.registry.clone(),
        }
    }

    pub(crate) fn spares(&self) -> &Arc<SpareDescriptions> {
        &self.spares
    }

    pub(crate) fn private_ledger(&self) -> Ledger {
        self.state().private_ledger.clone()
    }

    /// Returns the memory file of the drive `memory:BYTES`. If there is none yet, creates one that reads as zeros.
    ///
    /// # Errors
    /// [`PersistenceError::Memory`], [`PersistenceError::Supervisor`].
    pub(crate) fn memory_file(&self, bytes: u64) -> Result<MemoryFile, PersistenceError> {
        let mut state = self.state();
        if let Some(file) = state.memory_files.get(&bytes) {
            return Ok(file.clone());
        }
        let file = memfd(c"nvme-mpt-drive", bytes).map_err(PersistenceError::Memory)?;
        let what = format!("the content of memory:{bytes}");
        self.registry
            .store_or_report(&what, &memory_name(bytes), &[file.as_fd()])?;
        let file = MemoryFile(Arc::new(file));
        state.memory_files.insert(bytes, file.clone());
        Ok(file)
    }

    /// Returns the memory file for the faults of a drive that this process opens. The first call for a drive returns the
    /// predecessor's file if there is one. All other calls return a new file, since opening a drive again clears its
    /// recorded faults.
    ///
    /// # Errors
    /// [`PersistenceError::Memory`], [`PersistenceError::Supervisor`].
    pub(crate) fn fault_file(&self, path: &DrivePath) -> Result<MemoryFile, PersistenceError> {
        let mut state = self.state();
        let name = faults_name(path);
        if let Some(file) = state.fault_files.remove(&name) {
            return Ok(file);
        }
        self.registry.forget(&name)?;
        let file = memfd(c"nvme-mpt-faults", 0).map_err(PersistenceError::Memory)?;
        let what = format!("the faults of {path}");
        self.registry
            .store_or_report(&what, &name, &[file.as_fd()])?;
        Ok(MemoryFile(Arc::new(file)))
    }

    /// Removes the injected faults of a closed drive from the supervisor.
    pub(crate) fn forget_faults(&self, path: &DrivePath) {
        let name = faults_name(path);
        self.state().fault_files.remove(&name);
        if let Err(error) = self.registry.forget(&name) {
            log::error!(
                "Cannot ask the supervisor to release faults: {}",
                report::chain(&error)
            );
        }
    }

    /// Removes the content of a closed `memory:` drive from the supervisor.
    pub(crate) fn forget_memory(&self, bytes: u64) {
        if self.state().memory_files.remove(&bytes).is_some()
            && let Err(error) = self.registry.forget(&memory_name(bytes))
        {
            log::error!(
                "Cannot ask the supervisor to release memory: {}",
                report::chain(&error)
            );
        }
    }

    fn state(&self) -> MutexGuard<'_, PersistenceState> {
        // A poisoned lock is usable: no change can be interrupted by a panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Parses the number after a prefix of an entry's name; `None` if the name has another form.
fn parse_number_after(prefix: &str, name: &str) -> Option<u64> {
    name.strip_prefix(prefix)?.parse().ok()
}

fn memory_name(bytes: u64) -> String {
    format!("{MEMORY_PREFIX}{bytes}")
}

/// Returns the name under which the supervisor stores a drive's faults. The name has a hash of the path, since names must be
/// short and cannot contain colons.
fn faults_name(path: &DrivePath) -> String {
    format!("{FAULTS_PREFIX}{:016x}", fnv1a_hash(&path.to_string()))
}

/// Returns the FNV-1a hash, which is the same in all releases.
fn fnv1a_hash(text: &str) -> u64 {
    text.bytes().fold(0xCBF2_9CE4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3)
    })
}

/// Opens the ledger of private drives from the predecessor's descriptor, or creates one and stores it.
fn open_private_ledger(
    registry: &FdStoreRegistry,
    stored: Vec<OwnedFd>,
) -> Result<Ledger, PersistenceError> {
    let file = match stored.into_iter().next() {
        Some(file) => file,
        None => {
            let file = memfd(c"nvme-mpt-leases", 0).map_err(PersistenceError::Memory)?;
            let what = "the leases of memory: and null: drives";
            registry.store_or_report(what, PRIVATE_LEDGER, &[file.as_fd()])?;
            file
        }
    };
    Ok(Ledger::from_memory_file(File::from(file))?)
}
