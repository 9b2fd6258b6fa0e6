//! A served function: its lease, its socket and its thread.

use std::os::fd::AsFd;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Weak};
use std::time::Duration;

use nvme_guest::ControllerBackend;
use nvme_guest::host::NamespaceContents;
use nvme_guest::rate_limit::RateLimits;
use nvme_lease::LeaseClaim;
use nvme_lease::range::ByteSize;
use nvme_mpt::local_backend::GrowError;
use nvme_mpt::{Drive, LocalBackend, SharedBackendPartsSource};
use nvme_mpt_memory::crash::run_recorded;
use nvme_mpt_memory::system;
use nvme_mpt_vmm::drives::DrivePath;
use nvme_mpt_vmm::open;
use nvme_mpt_vmm::options::{FunctionOptions, ServerFunctionOptions};
use nvme_mpt_vmm::report;
use vfio_user_server::{Error, RequestLog, SocketAccess, SocketListener, VfioUserServer};
use vmm_device::{MsixMasking, NvmeFunction};

use super::context::ServerContext;
use super::declarations::{AssignedLease, FunctionDeclaration};
use super::error::FunctionRegistrationError;
use super::open_drives::can_outlive_process;
use crate::change::{FunctionEntry, FunctionStatus};
use crate::function_thread::{FunctionHandle, FunctionThread};
use crate::nvme_device::{ControlledDevice, FunctionResumeError, NvmeDevice};
use crate::owner::socket_access;
use crate::persistence::persisted_function::{
    PersistedFunction, QuarantineReason, QuarantinedFunction, RestorableFunction, RestoredFunction,
};
use crate::persistence::{GuestPauseStart, ServerPersistence};
use crate::quarantine::QuarantinedDevice;

/// A function that the server serves: its declaration, its drive and its thread.
#[derive(Debug)]
pub(super) struct RegisteredFunction {
    pub(super) declaration: FunctionDeclaration,
    pub(super) entry: FunctionEntry,
    /// Maximum number of the drive's queue pairs that the function's queues may use.
    pub(super) queues: u16,
    pub(super) drive: Arc<Drive>,
    /// Back end of the function. Only the function's thread keeps the back end alive, so this reference is weak.
    local_backend: Weak<LocalBackend>,
    /// True if the function was restored from the predecessor.
    pub(super) is_restored: bool,
    pub(super) thread: FunctionThread,
}

impl RegisteredFunction {
    /// Leases the function's part of the drive and serves it on its socket. If the predecessor had the function, restores
    /// the function and its connection to the VMM.
    pub(super) fn new(
        declaration: &FunctionDeclaration,
        drive: Arc<Drive>,
        context: &ServerContext,
    ) -> Result<Self, FunctionRegistrationError> {
        let ServerFunctionOptions {
            socket, function, ..
        } = &declaration.options;
        for caution in function.warnings() {
            log::warn!("The function on {}: {caution}", socket.display());
        }
        let mut persistence = context.persistence.as_ref();
        if let Some(server_persistence) = persistence.filter(|_| !can_outlive_process(function)) {
            log::warn!(
                "A VM on {} loses its drive when this server ends: zones, keys and values of memory: drives end with it",
                socket.display()
            );
            if let Some(restorable) = server_persistence.take_function(socket) {
                server_persistence.end_predecessor();
                restorable.discard();
            }
            persistence = None;
        }
        let Some(persistence) = persistence else {
            let local_backend =
                attach_backend(declaration, &drive, context, SharedBackendPartsSource::Own)?;
            let device = NvmeFunction::new(local_backend.clone(), MsixMasking::Client);
            let device = NvmeDevice::new(device).map_err(FunctionRegistrationError::Doorbells)?;
            let server = VfioUserServer::bind_with(socket, declared_access(declaration)?, device)?;
            return Self::start(declaration, drive, &local_backend, server);
        };
        if let Some(restorable) = persistence.take_function(socket) {
            let crashes = restorable.crash_record();
            let go_on = || Self::restore(declaration, &drive, context, persistence, restorable);
            if let Some(function) = run_recorded(crashes.as_ref(), go_on)? {
                return Ok(function);
            }
        } else if let Some(reason) = persistence.unread_reason() {
            return Err(FunctionRegistrationError::Unread { reason });
        }
        let local_backend = attach_backend(
            declaration,
            &drive,
            context,
            SharedBackendPartsSource::Continued(None),
        )?;
        let server = serve_persisted(declaration, persistence, local_backend.clone())?;
        Self::start(declaration, drive, &local_backend, server)
    }

    /// Restores or quarantines a function of the predecessor. Returns `None` if neither will ever be possible; the function
    /// is then removed from the supervisor.
    fn restore(
        declaration: &FunctionDeclaration,
        drive: &Arc<Drive>,
        context: &ServerContext,
        persistence: &ServerPersistence,
        restorable: RestorableFunction,
    ) -> Result<Option<Self>, FunctionRegistrationError> {
        let socket = &declaration.options.socket;
        let store_key = restorable.store_key();
        let reason = restorable.quarantine_reason();
        let parts = match reason {
            // The function is quarantined. The predecessor's files stay unchanged, as the report about the crash needs them.
            Some(_) => SharedBackendPartsSource::Continued(None),
            None => match restorable.shared_parts() {
                Ok(parts) => parts,
                Err(error) => {
                    persistence.return_function(restorable);
                    let error = FunctionResumeError::from(error);
                    return Err(FunctionRegistrationError::Resume(Box::new(error)));
                }
            },
        };
        let error = match attach_backend(declaration, drive, context, parts) {
            Ok(local_backend) => {
                let continues = match reason {
                    Some(reason) => Self::quarantine(
                        declaration,
                        drive,
                        context,
                        &local_backend,
                        restorable,
                        reason,
                    ),
                    None => resume_function(
                        restorable,
                        declaration,
                        local_backend.clone(),
                        persistence.pause_start(),
                    )
                    .map(|server| Self::start(declaration, drive.clone(), &local_backend, server)),
                };
                match continues {
                    Ok(Ok(function)) => {
                        return Ok(Some(Self {
                            is_restored: true,
                            ..function
                        }));
                    }
                    // The thread for the function cannot be started now. A later attempt may succeed.
                    Ok(Err(error)) => {
                        local_backend.retain_spares();
                        persistence.reread_function(&store_key);
                        return Err(error);
                    }
                    Err(error) if error.is_transient() => {
                        local_backend.retain_spares();
                        persistence.reread_function(&store_key);
                        return Err(FunctionRegistrationError::Resume(Box::new(error)));
                    }
                    Err(error) => report::chain(&error),
                }
            }
            Err(error) if error.is_persisted_files_mismatch() => {
                drop(restorable);
                report::chain(&error)
            }
            Err(error) => {
                persistence.return_function(restorable);
                return Err(error);
            }
        };
        log::error!(
            "Cannot restore the function on {}, so a VMM that has it loses its drive: {error}",
            socket.display()
        );
        // When the supervisor has closed the function's descriptors, no process holds its socket any more. A new function
        // can then use the path.
        persistence.end_predecessor();
        store_key.forget_and_wait();
        Ok(None)
    }

    /// Quarantines a function: its guest sees a fatal controller status (`CSTS.CFS`), and its VMM stays connected.
    fn quarantine(
        declaration: &FunctionDeclaration,
        drive: &Arc<Drive>,
        context: &ServerContext,
        local_backend: &Arc<LocalBackend>,
        restorable: RestorableFunction,
        reason: QuarantineReason,
    ) -> Result<Result<Self, FunctionRegistrationError>, FunctionResumeError> {
        let id = local_backend.lease().id();
        let stored = match restorable.write_report(&context.state_dir, id) {
            Ok(dir) => format!("its state is in {}", dir.display()),
            Err(error) => format!("its state is not stored: {}", report::chain(&error)),
        };
        let reason = format!(
            "{reason}, and is quarantined (CSTS.CFS); {stored}; remove it with --force and add it again, or reload \
             the file with --force"
        );
        log::error!(
            function = id;
            "Function {id} on {} fails: {reason}",
            declaration.options.socket.display()
        );
        let QuarantinedFunction {
            function_state,
            listener,
            stream,
            request_log,
            store_key,
            crash_record: crashes,
        } = restorable.into_quarantined()?;
        let mut function = NvmeFunction::new(local_backend.clone(), MsixMasking::Client);
        function.quarantine(&function_state)?;
        let device = QuarantinedDevice::new(NvmeDevice::new(function)?, store_key, crashes);
        let listener = SocketListener::from_predecessor(&declaration.options.socket, listener)?;
        let server = VfioUserServer::resume(listener, request_log, stream, device)?;
        let registered_function = Self::start(declaration, drive.clone(), local_backend, server);
        Ok(registered_function.map(|mut registered_function| {
            registered_function.entry.state = FunctionStatus::Failed { reason };
            registered_function
        }))
    }

    /// Returns the entry with the function's current state. Waits at most one second for the function's answer.
    pub(super) fn current_entry(&self) -> FunctionEntry {
        let answers = FunctionHandle::collect_stats([&self.thread.handle()]);
        let mut entry = self.entry.clone();
        entry.set_connected(answers.first().map(|function| function.connected));
        entry
    }

    /// Returns whether the function is quarantined.
    pub(super) fn is_quarantined(&self) -> bool {
        matches!(self.entry.state, FunctionStatus::Failed { .. })
    }

    /// Starts the thread that serves a function.
    fn start<D: ControlledDevice + Send + 'static>(
        declaration: &FunctionDeclaration,
        drive: Arc<Drive>,
        local_backend: &Arc<LocalBackend>,
        server: VfioUserServer<D>,
    ) -> Result<Self, FunctionRegistrationError> {
        let ServerFunctionOptions {
            socket, function, ..
        } = &declaration.options;
        let id = local_backend.lease().id().to_owned();
        let extents = local_backend.lease().extents();
        let thread = FunctionThread::start(&id, server)?;
        // The next server must lease this range, even if the drive has grown since.
        let whole = extents.single();
        let whole = whole.filter(|_| function.range.is_none() && function.size.is_none());
        let lease = whole.map(|range| AssignedLease {
            id: id.clone(),
            range,
        });
        let mut declaration = declaration.clone();
        declaration.declared.lease = lease;
        Ok(Self {
            entry: FunctionEntry {
                pending: None,
                id,
                socket: socket.clone(),
                drive: function.path.to_string(),
                range: extents.single(),
                extents: Some(extents),
                origin: declaration.declared.source,
                limits: function.backend.rates.to_string(),
                state: FunctionStatus::Waiting,
                summary: summary(function, &drive, local_backend),
            },
            queues: local_backend.max_queue_pairs(),
            drive,
            local_backend: Arc::downgrade(local_backend),
            is_restored: false,
            thread,
            declaration,
        })
    }

    /// Ends the function. Returns the error as text, or `None` after a clean end.
    pub(super) fn end(self) -> Option<String> {
        let Self { entry, thread, .. } = self;
        let error = thread.end().err()?;
        Some(format!(
            "Function {} did not end cleanly: {}",
            entry.id,
            report::chain(&error)
        ))
    }

    /// Checks whether the function's drive answers: pauses the queues until their in-flight commands have ended. Returns
    /// whether they end within `time`.
    pub(super) fn can_quiesce(&self, time: Duration) -> bool {
        // Without a back end, the thread has ended and the function has no commands in flight.
        let local_backend = self.local_backend.upgrade();
        local_backend.is_none_or(|local_backend| local_backend.quiesce_once(time).is_ok())
    }

    /// Releases the locks on the lease for the next server. The function must be paused, and this process must exit soon.
    pub(super) fn release_lease(&self) {
        if let Some(local_backend) = self.local_backend.upgrade() {
            local_backend.release_locks();
        }
    }

    /// Returns whether the lease must grow for `size`: `size` exceeds the capacity that the guest sees, and the lease is not
    /// larger than `size`.
    pub(super) fn needs_growth(&self, size: ByteSize) -> bool {
        // Without a back end, the thread has ended and the function has no lease.
        self.local_backend.upgrade().is_some_and(|local_backend| {
            let leased = local_backend.lease().extents().length();
            local_backend.stats().capacity_bytes < size.0 && leased <= size.0
        })
    }

    /// Grows the lease while the guest runs.
    pub(super) fn grow(&mut self, size: ByteSize, stop: &AtomicBool) -> Result<(), GrowError> {
        // Without a back end, the thread has ended and the function has no lease.
        if let Some(local_backend) = self.local_backend.upgrade() {
            let grown = local_backend.grow(size.0, stop);
            let summary = summary(
                &self.declaration.options.function,
                &self.drive,
                &local_backend,
            );
            self.entry
                .set_extents(local_backend.lease().extents(), summary);
            grown?;
        }
        self.declaration.set_size(size);
        Ok(())
    }

    /// Changes the rate limits while the guest runs.
    pub(super) fn set_rates(&mut self, rates: RateLimits) {
        self.declaration.options.function.backend.rates = rates;
        self.entry.limits = rates.to_string();
        // Without a back end, the thread has ended and the function has no queues.
        if let Some(local_backend) = self.local_backend.upgrade() {
            local_backend.set_rates(rates);
        }
    }
}

fn declared_access(
    declaration: &FunctionDeclaration,
) -> Result<SocketAccess, FunctionRegistrationError> {
    let ServerFunctionOptions { mode, owner, .. } = &declaration.options;
    Ok(socket_access(*mode, owner.as_ref())?)
}

/// Leases the function's part of the drive, and creates its back end.
fn attach_backend(
    declaration: &FunctionDeclaration,
    drive: &Arc<Drive>,
    context: &ServerContext,
    parts: SharedBackendPartsSource,
) -> Result<Arc<LocalBackend>, FunctionRegistrationError> {
    let claim = declared_access(declaration)?
        .user
        .map_or(LeaseClaim::Operator, LeaseClaim::ForUser);
    let ServerContext {
        ledgers,
        pollers,
        stop,
        ..
    } = context;
    let function = declaration.options_with_lease();
    let ledgers = ledgers.with_claim(claim);
    let local_backend = open::attach_with(&function, drive, &ledgers, pollers, parts, stop)?;
    Ok(Arc::new(local_backend))
}

/// Restores a function of the predecessor, with its VMM's connection.
fn resume_function(
    restorable: RestorableFunction,
    declaration: &FunctionDeclaration,
    local_backend: Arc<LocalBackend>,
    pause_start: GuestPauseStart,
) -> Result<VfioUserServer<NvmeDevice>, FunctionResumeError> {
    let RestoredFunction {
        function_state,
        listener,
        stream,
        client,
        request_log,
        persisted,
    } = restorable.into_restored()?;
    let function = NvmeFunction::new(local_backend, MsixMasking::Client);
    let ServerFunctionOptions {
        socket,
        function: options,
        ..
    } = &declaration.options;
    // The device stores its state from now on. Restoring the client already changes the state.
    let mut device = NvmeDevice::new(function)?.with_persistence(persisted, options.backend.memory);
    device.restore(client, &function_state)?;
    let pause = stream
        .is_some()
        .then(|| pause_start.pause_until(system::host_time()));
    if let Some(pause) = pause {
        device.set_guest_pause(pause);
    }
    let listener = SocketListener::from_predecessor(socket, listener)?;
    let server = VfioUserServer::resume(listener, request_log, stream, device)?;
    if let Some(pause) = pause {
        let socket = socket.display();
        log::info!("The client of {socket} continues: it had no server for {pause}");
    }
    Ok(server)
}

/// Serves a new function and stores its state with the supervisor.
fn serve_persisted(
    declaration: &FunctionDeclaration,
    persistence: &ServerPersistence,
    local_backend: Arc<LocalBackend>,
) -> Result<VfioUserServer<NvmeDevice>, FunctionRegistrationError> {
    let socket = &declaration.options.socket;
    let shared = local_backend.shared_parts();
    let function = NvmeFunction::new(local_backend, MsixMasking::Client);
    let device = NvmeDevice::new(function).map_err(FunctionRegistrationError::Doorbells)?;
    let request_log = RequestLog::new().map_err(Error::from)?;
    let persisted = Arc::new(PersistedFunction::new(
        persistence.allocate_store_key(),
        socket,
        &request_log,
        &shared,
    )?);
    let memory = declaration.options.function.backend.memory;
    let device = device.with_persistence(persisted.clone(), memory);
    let server =
        VfioUserServer::bind_with_log(socket, declared_access(declaration)?, device, request_log)?;
    if let Some(request_log) = server.request_log() {
        persisted.persist(server.listener().as_fd(), request_log.as_fd())?;
    }
    Ok(server)
}

/// Returns a function's one-line description.
fn summary(options: &FunctionOptions, drive: &Drive, local_backend: &LocalBackend) -> String {
    let namespace = local_backend.namespace();
    let contents = match &namespace.command_sets.native().contents {
        NamespaceContents::Other(name) => name.clone(),
        NamespaceContents::Blocks { .. } => format!(
            "{} blocks of {} bytes",
            local_backend.stats().capacity_bytes >> namespace.lba_shift,
            1_u64 << namespace.lba_shift
        ),
    };
    let queue_pairs = match local_backend.max_queue_pairs() {
        pairs if pairs == options.backend.queue_pairs => format!("{pairs} queue pairs"),
        pairs => format!("{pairs} of {} queue pairs", options.backend.queue_pairs),
    };
    let drive = match options.path {
        DrivePath::Pci(_) => format!("{} namespace {}", options.path, drive.namespace().nsid),
        _ => options.path.to_string(),
    };
    format!(
        "{drive}, range {} ({contents}); serial {}; doorbells {}, poll {}, {queue_pairs}",
        local_backend.lease().extents(),
        namespace.serial,
        options.backend.doorbells,
        options.backend.poll,
    )
}
