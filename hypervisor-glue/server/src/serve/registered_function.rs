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
        declared: &FunctionDeclaration,
        drive: Arc<Drive>,
        terms: &ServerContext,
    ) -> Result<Self, FunctionRegistrationError> {
        let ServerFunctionOptions {
            socket, function, ..
        } = &declared.function;
        for caution in function.warnings() {
            log::warn!("The function on {}: {caution}", socket.display());
        }
        let mut keeping = terms.persistence.as_ref();
        if let Some(kept) = keeping.filter(|_| !can_outlive_process(function)) {
            log::warn!(
                "A VM on {} loses its drive when this server ends: zones, keys and values of memory: drives end with it",
                socket.display()
            );
            if let Some(before) = kept.take_function(socket) {
                kept.end_predecessor();
                before.discard();
            }
            keeping = None;
        }
        let Some(keeping) = keeping else {
            let attachment =
                attach_backend(declared, &drive, terms, SharedBackendPartsSource::Own)?;
            let device = NvmeFunction::new(attachment.clone(), MsixMasking::Client);
            let device = NvmeDevice::new(device).map_err(FunctionRegistrationError::Doorbells)?;
            let server = VfioUserServer::bind_with(socket, declared_access(declared)?, device)?;
            return Self::start(declared, drive, &attachment, server);
        };
        if let Some(before) = keeping.take_function(socket) {
            let crashes = before.crash_record();
            let go_on = || Self::restore(declared, &drive, terms, keeping, before);
            if let Some(offer) = run_recorded(crashes.as_ref(), go_on)? {
                return Ok(offer);
            }
        }
        let attachment = attach_backend(
            declared,
            &drive,
            terms,
            SharedBackendPartsSource::Continued(None),
        )?;
        let server = serve_persisted(declared, keeping, attachment.clone())?;
        Self::start(declared, drive, &attachment, server)
    }

    /// Restores or quarantines a function of the predecessor. Returns `None` if neither will ever be possible; the function
    /// is then removed from the supervisor.
    fn restore(
        declared: &FunctionDeclaration,
        drive: &Arc<Drive>,
        terms: &ServerContext,
        keeping: &ServerPersistence,
        before: RestorableFunction,
    ) -> Result<Option<Self>, FunctionRegistrationError> {
        let socket = &declared.function.socket;
        let shelf = before.store_key();
        let reason = before.quarantine_reason();
        let parts = match reason {
            // The function is quarantined. The predecessor's files stay unchanged, as the report about the crash needs them.
            Some(_) => SharedBackendPartsSource::Continued(None),
            None => before.shared_parts(),
        };
        let error = match attach_backend(declared, drive, terms, parts) {
            Ok(attachment) => {
                let goes_on = match reason {
                    Some(reason) => {
                        Self::quarantine(declared, drive, terms, &attachment, before, reason)
                    }
                    None => {
                        resume_function(before, declared, attachment.clone(), keeping.pause_start())
                            .map(|server| Self::start(declared, drive.clone(), &attachment, server))
                    }
                };
                match goes_on {
                    Ok(Ok(offer)) => {
                        return Ok(Some(Self {
                            is_restored: true,
                            ..offer
                        }));
                    }
                    // The thread for the function cannot be started now. A later attempt may succeed.
                    Ok(Err(error)) => {
                        attachment.retain_spares();
                        keeping.reread_function(&shelf);
                        return Err(error);
                    }
                    Err(error) if error.is_transient() => {
                        attachment.retain_spares();
                        keeping.reread_function(&shelf);
                        return Err(FunctionRegistrationError::Resume(Box::new(error)));
                    }
                    Err(error) => report::chain(&error),
                }
            }
            Err(error) if error.is_persisted_files_mismatch() => {
                drop(before);
                report::chain(&error)
            }
            Err(error) => {
                keeping.return_function(before);
                return Err(error);
            }
        };
        log::error!(
            "Cannot restore the function on {}, so a VMM that has it loses its drive: {error}",
            socket.display()
        );
        // When the supervisor has closed the function's descriptors, no process holds its socket any more. A new function
        // can then use the path.
        keeping.end_predecessor();
        shelf.forget_and_wait();
        Ok(None)
    }

    /// Quarantines a function: its guest sees a fatal controller status (`CSTS.CFS`), and its VMM stays connected.
    fn quarantine(
        declared: &FunctionDeclaration,
        drive: &Arc<Drive>,
        terms: &ServerContext,
        attachment: &Arc<LocalBackend>,
        before: RestorableFunction,
        reason: QuarantineReason,
    ) -> Result<Result<Self, FunctionRegistrationError>, FunctionResumeError> {
        let id = attachment.lease().id();
        let stored = match before.write_report(&terms.state_dir, id) {
            Ok(folder) => format!("its state is in {}", folder.display()),
            Err(error) => format!("its state is not stored: {}", report::chain(&error)),
        };
        let reason = format!(
            "{reason}, and is quarantined (CSTS.CFS); {stored}; remove it with --force and add it again, or reload \
             the file with --force"
        );
        log::error!(
            function = id;
            "Function {id} on {} fails: {reason}",
            declared.function.socket.display()
        );
        let QuarantinedFunction {
            function_state,
            listener,
            stream,
            request_log: journal,
            store_key: shelf,
            crash_record: crashes,
        } = before.into_quarantined()?;
        let mut function = NvmeFunction::new(attachment.clone(), MsixMasking::Client);
        function.quarantine(&function_state)?;
        let device = QuarantinedDevice::new(NvmeDevice::new(function)?, shelf, crashes);
        let listener = SocketListener::from_predecessor(&declared.function.socket, listener)?;
        let server = VfioUserServer::resume(listener, journal, stream, device)?;
        let offer = Self::start(declared, drive.clone(), attachment, server);
        Ok(offer.map(|mut offer| {
            offer.entry.state = FunctionStatus::Failed { reason };
            offer
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
        declared: &FunctionDeclaration,
        drive: Arc<Drive>,
        attachment: &Arc<LocalBackend>,
        server: VfioUserServer<D>,
    ) -> Result<Self, FunctionRegistrationError> {
        let ServerFunctionOptions {
            socket, function, ..
        } = &declared.function;
        let id = attachment.lease().id().to_owned();
        let extents = attachment.lease().extents();
        let thread = FunctionThread::start(&id, server)?;
        // The next server must lease this range, even if the drive has grown since.
        let whole = extents.single();
        let whole = whole.filter(|_| function.range.is_none() && function.size.is_none());
        let lease = whole.map(|range| AssignedLease {
            id: id.clone(),
            range,
        });
        Ok(Self {
            declaration: FunctionDeclaration {
                lease,
                ..declared.clone()
            },
            entry: FunctionEntry {
                pending: None,
                id,
                socket: socket.clone(),
                drive: function.path.to_string(),
                range: extents.single(),
                extents: Some(extents),
                origin: declared.origin,
                limits: function.rates.to_string(),
                state: FunctionStatus::Waiting,
                summary: summary(function, &drive, attachment),
            },
            queues: attachment.max_queue_pairs(),
            drive,
            local_backend: Arc::downgrade(attachment),
            is_restored: false,
            thread,
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
        let attachment = self.local_backend.upgrade();
        attachment.is_none_or(|attachment| attachment.quiesce_once(time).is_ok())
    }

    /// Releases the locks on the lease for the next server. The function must be paused, and this process must exit soon.
    pub(super) fn release_lease(&self) {
        if let Some(attachment) = self.local_backend.upgrade() {
            attachment.release_locks();
        }
    }

    /// Returns whether the lease must grow for `size`: `size` exceeds the capacity that the guest sees, and the lease is not
    /// larger than `size`.
    pub(super) fn needs_growth(&self, size: ByteSize) -> bool {
        // Without a back end, the thread has ended and the function has no lease.
        self.local_backend.upgrade().is_some_and(|attachment| {
            let leased = attachment.lease().extents().length();
            attachment.stats().capacity_bytes < size.0 && leased <= size.0
        })
    }

    /// Grows the lease while the guest runs.
    pub(super) fn grow(&mut self, size: ByteSize, stop: &AtomicBool) -> Result<(), GrowError> {
        // Without a back end, the thread has ended and the function has no lease.
        if let Some(attachment) = self.local_backend.upgrade() {
            let grown = attachment.grow(size.0, stop);
            let summary = summary(
                &self.declaration.function.function,
                &self.drive,
                &attachment,
            );
            self.entry
                .set_extents(attachment.lease().extents(), summary);
            grown?;
        }
        self.declaration.set_size(size);
        Ok(())
    }

    /// Changes the rate limits while the guest runs.
    pub(super) fn set_rates(&mut self, rates: RateLimits) {
        self.declaration.function.function.rates = rates;
        self.entry.limits = rates.to_string();
        // Without a back end, the thread has ended and the function has no queues.
        if let Some(attachment) = self.local_backend.upgrade() {
            attachment.set_rates(rates);
        }
    }
}

fn declared_access(
    declared: &FunctionDeclaration,
) -> Result<SocketAccess, FunctionRegistrationError> {
    let ServerFunctionOptions { mode, owner, .. } = &declared.function;
    Ok(socket_access(*mode, owner.as_ref())?)
}

/// Leases the function's part of the drive, and creates its back end.
fn attach_backend(
    declared: &FunctionDeclaration,
    drive: &Arc<Drive>,
    terms: &ServerContext,
    parts: SharedBackendPartsSource,
) -> Result<Arc<LocalBackend>, FunctionRegistrationError> {
    let claim = declared_access(declared)?
        .user
        .map_or(LeaseClaim::Operator, LeaseClaim::ForUser);
    let ServerContext {
        ledgers,
        pollers,
        stop,
        ..
    } = terms;
    let function = declared.options_with_lease();
    let ledgers = ledgers.with_claim(claim);
    let attachment = open::attach_with(&function, drive, &ledgers, pollers, parts, stop)?;
    Ok(Arc::new(attachment))
}

/// Restores a function of the predecessor, with its VMM's connection.
fn resume_function(
    before: RestorableFunction,
    declared: &FunctionDeclaration,
    attachment: Arc<LocalBackend>,
    stall: GuestPauseStart,
) -> Result<VfioUserServer<NvmeDevice>, FunctionResumeError> {
    let RestoredFunction {
        function_state,
        listener,
        stream,
        client,
        request_log: journal,
        persisted: kept,
    } = before.into_restored()?;
    let function = NvmeFunction::new(attachment, MsixMasking::Client);
    let ServerFunctionOptions {
        socket,
        function: options,
        ..
    } = &declared.function;
    // The device stores its state from now on. Restoring the client already changes the state.
    let mut device = NvmeDevice::new(function)?.with_persistence(kept, options.memory);
    device.restore(client, &function_state)?;
    let stall = stream
        .is_some()
        .then(|| stall.pause_until(system::host_time()));
    if let Some(stall) = stall {
        device.set_guest_pause(stall);
    }
    let listener = SocketListener::from_predecessor(socket, listener)?;
    let server = VfioUserServer::resume(listener, journal, stream, device)?;
    if let Some(stall) = stall {
        let socket = socket.display();
        log::info!("The client of {socket} continues: it had no server for {stall}");
    }
    Ok(server)
}

/// Serves a new function and stores its state with the supervisor.
fn serve_persisted(
    declared: &FunctionDeclaration,
    keeping: &ServerPersistence,
    attachment: Arc<LocalBackend>,
) -> Result<VfioUserServer<NvmeDevice>, FunctionRegistrationError> {
    let socket = &declared.function.socket;
    let shared = attachment.shared_parts();
    let function = NvmeFunction::new(attachment, MsixMasking::Client);
    let device = NvmeDevice::new(function).map_err(FunctionRegistrationError::Doorbells)?;
    let journal = RequestLog::new().map_err(Error::from)?;
    let kept = Arc::new(PersistedFunction::new(
        keeping.allocate_store_key(),
        socket,
        &journal,
        &shared,
    )?);
    let memory = declared.function.function.memory;
    let device = device.with_persistence(kept.clone(), memory);
    let server =
        VfioUserServer::bind_with_log(socket, declared_access(declared)?, device, journal)?;
    if let Some(journal) = server.request_log() {
        kept.persist(server.listener().as_fd(), journal.as_fd())?;
    }
    Ok(server)
}

/// Returns a function's one-line description.
fn summary(options: &FunctionOptions, drive: &Drive, attachment: &LocalBackend) -> String {
    let namespace = attachment.namespace();
    let contents = match &namespace.command_sets.native().contents {
        NamespaceContents::Other(name) => name.clone(),
        NamespaceContents::Blocks { .. } => format!(
            "{} blocks of {} bytes",
            attachment.stats().capacity_bytes >> namespace.lba_shift,
            1_u64 << namespace.lba_shift
        ),
    };
    let queue_pairs = match attachment.max_queue_pairs() {
        pairs if pairs == options.queues => format!("{pairs} queue pairs"),
        pairs => format!("{pairs} of {} queue pairs", options.queues),
    };
    let drive = match options.path {
        DrivePath::Pci(_) => format!("{} namespace {}", options.path, drive.namespace().nsid),
        _ => options.path.to_string(),
    };
    format!(
        "{drive}, range {} ({contents}); serial {}; doorbells {}, poll {}, {queue_pairs}",
        attachment.lease().extents(),
        namespace.serial,
        options.doorbells,
        options.poll,
    )
}
