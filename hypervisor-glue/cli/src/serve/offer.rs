//! One function that is offered: its lease, its socket and its thread.

use std::os::fd::AsFd;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Weak};
use std::time::Duration;

use nvme_mpt::attachment::GrowError;
use nvme_mpt::host::Contents;
use nvme_mpt::lease::Claim;
use nvme_mpt::limit::RateLimits;
use nvme_mpt::memory::crash::recorded;
use nvme_mpt::memory::system;
use nvme_mpt::range::Bytes;
use nvme_mpt::{Attachment, Drive, FunctionParts, HostSide};
use nvme_mpt_vmm::drives::DrivePath;
use nvme_mpt_vmm::open;
use nvme_mpt_vmm::options::{FunctionOptions, ServedFunction};
use nvme_mpt_vmm::report;
use vfio_user_server::{Error, Journal, Listener, Server, SocketAccess};
use vmm_device::{MsixMasking, NvmeFunction};

use super::declared::{DeclaredFunction, ServedLease};
use super::drives::outlives_process;
use super::error::OfferError;
use super::terms::Terms;
use crate::adaptor::{NvmeDevice, ResumeError, Served};
use crate::change::{FunctionEntry, FunctionState};
use crate::function_thread::FunctionThread;
use crate::kept::function::{KeptFunction, SetAside, SetAsideReason, SurvivingFunction, Survivors};
use crate::kept::{Keeping, StallBegin};
use crate::owner::socket_access;
use crate::set_aside::SetAsideDevice;

/// A function that is offered.
#[derive(Debug)]
pub(super) struct Offer {
    pub(super) declared: DeclaredFunction,
    pub(super) entry: FunctionEntry,
    /// Queue pairs of the drive that it may use.
    pub(super) queues: u16,
    pub(super) drive: Arc<Drive>,
    /// The function alone keeps its attachment.
    attachment: Weak<Attachment>,
    /// It was that of the server before.
    pub(super) goes_on: bool,
    pub(super) thread: FunctionThread,
}

impl Offer {
    /// Leases what the function asks for of its drive, and serves it on its socket. If the server before had it, it goes on
    /// with its VMM.
    pub(super) fn new(
        declared: &DeclaredFunction,
        drive: Arc<Drive>,
        terms: &Terms,
    ) -> Result<Self, OfferError> {
        let ServedFunction {
            socket, function, ..
        } = &declared.function;
        for caution in function.cautions() {
            log::warn!("The function on {}: {caution}", socket.display());
        }
        let mut keeping = terms.keeping.as_ref();
        if let Some(kept) = keeping.filter(|_| !outlives_process(function)) {
            log::warn!(
                "A VM on {} loses its drive when this server ends: zones, keys and values of memory: drives end with it",
                socket.display()
            );
            if let Some(before) = kept.take(socket) {
                kept.outlast_predecessor();
                before.give_up();
            }
            keeping = None;
        }
        let Some(keeping) = keeping else {
            let attachment = attach(declared, &drive, terms, FunctionParts::Own)?;
            let device = NvmeFunction::new(attachment.clone(), MsixMasking::Client);
            let device = NvmeDevice::new(device).map_err(OfferError::Doorbells)?;
            let server = Server::bind_with(socket, access(declared)?, device)?;
            return Self::start(declared, drive, &attachment, server);
        };
        if let Some(before) = keeping.take(socket) {
            let crashes = before.crashes();
            let go_on = || Self::go_on(declared, &drive, terms, keeping, before);
            if let Some(offer) = recorded(crashes.as_ref(), go_on)? {
                return Ok(offer);
            }
        }
        let attachment = attach(declared, &drive, terms, FunctionParts::Continued(None))?;
        let server = offer_kept(declared, keeping, attachment.clone())?;
        Self::start(declared, drive, &attachment, server)
    }

    /// Goes on with a function of the server before, or sets it aside; `None` if it does not go on.
    fn go_on(
        declared: &DeclaredFunction,
        drive: &Arc<Drive>,
        terms: &Terms,
        keeping: &Keeping,
        before: SurvivingFunction,
    ) -> Result<Option<Self>, OfferError> {
        let socket = &declared.function.socket;
        let shelf = before.shelf();
        let reason = before.reason_to_set_aside();
        let parts = match reason {
            // The files of the server before stay as they are.
            Some(_) => FunctionParts::Continued(None),
            None => before.parts(),
        };
        let error = match attach(declared, drive, terms, parts) {
            Ok(attachment) => {
                let goes_on = match reason {
                    Some(reason) => {
                        Self::set_aside(declared, drive, terms, &attachment, before, reason)
                    }
                    None => resume(before, declared, attachment.clone(), keeping.stall_begin())
                        .map(|server| Self::start(declared, drive.clone(), &attachment, server)),
                };
                match goes_on {
                    Ok(Ok(offer)) => {
                        return Ok(Some(Self {
                            goes_on: true,
                            ..offer
                        }));
                    }
                    // Its thread cannot be made now.
                    Ok(Err(error)) => {
                        attachment.leave_spare();
                        keeping.take_back(&shelf);
                        return Err(error);
                    }
                    Err(error) if error.may_pass() => {
                        attachment.leave_spare();
                        keeping.take_back(&shelf);
                        return Err(OfferError::Resume(Box::new(error)));
                    }
                    Err(error) => report::chain(&error),
                }
            }
            Err(error) if error.is_of_kept_files() => {
                drop(before);
                report::chain(&error)
            }
            Err(error) => {
                keeping.give_back(before);
                return Err(error);
            }
        };
        log::error!(
            "The function on {} does not go on, and a VMM that has it loses its drive: {error}",
            socket.display()
        );
        // The socket is closed then, and its path is free.
        keeping.outlast_predecessor();
        shelf.forget_now();
        Ok(None)
    }

    /// Sets a function aside.
    fn set_aside(
        declared: &DeclaredFunction,
        drive: &Arc<Drive>,
        terms: &Terms,
        attachment: &Arc<Attachment>,
        before: SurvivingFunction,
        reason: SetAsideReason,
    ) -> Result<Result<Self, OfferError>, ResumeError> {
        let id = attachment.lease().id();
        let stored = match before.write_report(&terms.state_dir, id) {
            Ok(folder) => format!("its state is in {}", folder.display()),
            Err(error) => format!("its state is not stored: {}", report::chain(&error)),
        };
        let reason = format!(
            "{reason}, and is set aside (CSTS.CFS); {stored}; remove it with --force \
             and add it again, or reload the file with --force"
        );
        log::error!(
            function = id;
            "Function {id} on {} fails: {reason}",
            declared.function.socket.display()
        );
        let SetAside {
            control,
            listener,
            stream,
            journal,
            shelf,
            crashes,
        } = before.set_aside()?;
        let mut function = NvmeFunction::new(attachment.clone(), MsixMasking::Client);
        function.set_aside(&control)?;
        let device = SetAsideDevice::new(NvmeDevice::new(function)?, shelf, crashes);
        let listener = Listener::from_kept(&declared.function.socket, listener)?;
        let server = Server::resume(listener, journal, stream, device)?;
        let offer = Self::start(declared, drive.clone(), attachment, server);
        Ok(offer.map(|mut offer| {
            offer.entry.state = FunctionState::Failed { reason };
            offer
        }))
    }

    /// Returns whether the function is set aside.
    pub(super) fn is_set_aside(&self) -> bool {
        matches!(self.entry.state, FunctionState::Failed { .. })
    }

    /// Serves a function that is ready.
    fn start<D: Served + Send + 'static>(
        declared: &DeclaredFunction,
        drive: Arc<Drive>,
        attachment: &Arc<Attachment>,
        server: Server<D>,
    ) -> Result<Self, OfferError> {
        let ServedFunction {
            socket, function, ..
        } = &declared.function;
        let id = attachment.lease().id().to_owned();
        let extents = attachment.lease().extents();
        let thread = FunctionThread::start(&id, server)?;
        // The next server gives it the same, however large the drive is by then.
        let whole = extents.only();
        let whole = whole.filter(|_| function.range.is_none() && function.size.is_none());
        let lease = whole.map(|range| ServedLease {
            id: id.clone(),
            range,
        });
        Ok(Self {
            declared: DeclaredFunction {
                lease,
                ..declared.clone()
            },
            entry: FunctionEntry {
                pending: None,
                id,
                socket: socket.clone(),
                drive: function.path.to_string(),
                range: extents.only(),
                extents: Some(extents),
                origin: declared.origin,
                limits: function.rates.to_string(),
                state: FunctionState::Waiting,
                summary: summary(function, &drive, attachment),
            },
            queues: attachment.max_queue_pairs(),
            drive,
            attachment: Arc::downgrade(attachment),
            goes_on: false,
            thread,
        })
    }

    /// Ends the function. Returns the error for a person, if it did not end well.
    pub(super) fn end(self) -> Option<String> {
        let Self { entry, thread, .. } = self;
        let error = thread.end().err()?;
        Some(format!(
            "Function {} did not end well: {}",
            entry.id,
            report::chain(&error)
        ))
    }

    /// Makes the queues rest for a moment. Returns whether their commands in flight end within `time`.
    pub(super) fn rests_within(&self, time: Duration) -> bool {
        // A function that has ended by itself has no commands.
        let attachment = self.attachment.upgrade();
        attachment.is_none_or(|attachment| attachment.rest_once(time).is_ok())
    }

    /// Lets go of what keeps the next server from the lease. The function rests, and this process ends at once.
    pub(super) fn let_go(&self) {
        if let Some(attachment) = self.attachment.upgrade() {
            attachment.let_go();
        }
    }

    /// Returns whether the guest has less than `size`, and its lease no more than that.
    pub(super) fn grows_to(&self, size: Bytes) -> bool {
        // A function that has ended by itself has no lease.
        self.attachment.upgrade().is_some_and(|attachment| {
            let leased = attachment.lease().extents().length();
            attachment.stats().capacity_bytes < size.0 && leased <= size.0
        })
    }

    /// Makes the lease larger, under the guest.
    pub(super) fn grow(&mut self, size: Bytes, stop: &AtomicBool) -> Result<(), GrowError> {
        // A function that has ended by itself has no lease.
        if let Some(attachment) = self.attachment.upgrade() {
            let grown = attachment.grow(size.0, stop);
            let summary = summary(&self.declared.function.function, &self.drive, &attachment);
            self.entry
                .set_extents(attachment.lease().extents(), summary);
            grown?;
        }
        self.declared.set_size(size);
        Ok(())
    }

    /// Changes the limits, under the guest.
    pub(super) fn set_rates(&mut self, rates: RateLimits) {
        self.declared.function.function.rates = rates;
        self.entry.limits = rates.to_string();
        // A function that has ended by itself has no queues to limit.
        if let Some(attachment) = self.attachment.upgrade() {
            attachment.set_rates(rates);
        }
    }
}

fn access(declared: &DeclaredFunction) -> Result<SocketAccess, OfferError> {
    let ServedFunction { mode, owner, .. } = &declared.function;
    Ok(socket_access(*mode, owner.as_ref())?)
}

/// Attaches to the lease of a function.
fn attach(
    declared: &DeclaredFunction,
    drive: &Arc<Drive>,
    terms: &Terms,
    parts: FunctionParts,
) -> Result<Arc<Attachment>, OfferError> {
    let claim = access(declared)?.user.map_or(Claim::Operator, Claim::For);
    let Terms {
        ledgers,
        pollers,
        stop,
        ..
    } = terms;
    let function = declared.leased();
    let ledgers = ledgers.claiming(claim);
    let attachment = open::attach_with(&function, drive, &ledgers, pollers, parts, stop)?;
    Ok(Arc::new(attachment))
}

/// Goes on with a function of the server before, and with its VMM.
fn resume(
    before: SurvivingFunction,
    declared: &DeclaredFunction,
    attachment: Arc<Attachment>,
    stall: StallBegin,
) -> Result<Server<NvmeDevice>, ResumeError> {
    let Survivors {
        control,
        listener,
        stream,
        client,
        journal,
        kept,
    } = before.take_apart()?;
    let function = NvmeFunction::new(attachment, MsixMasking::Client);
    let ServedFunction {
        socket,
        function: options,
        ..
    } = &declared.function;
    // The keeper stands before the function goes on: what that changes is stored first.
    let mut device = NvmeDevice::new(function)?.kept(kept, options.memory);
    device.take_up(client, &control)?;
    let stall = stream.is_some().then(|| stall.until(system::host_time()));
    if let Some(stall) = stall {
        device.set_stall(stall);
    }
    let listener = Listener::from_kept(socket, listener)?;
    let server = Server::resume(listener, journal, stream, device)?;
    if let Some(stall) = stall {
        let socket = socket.display();
        log::info!("The client of {socket} goes on: it was without a server for {stall}");
    }
    Ok(server)
}

/// Offers a new function, with all in the keeper that the next process needs.
fn offer_kept(
    declared: &DeclaredFunction,
    keeping: &Keeping,
    attachment: Arc<Attachment>,
) -> Result<Server<NvmeDevice>, OfferError> {
    let socket = &declared.function.socket;
    let shared = attachment.shared();
    let function = NvmeFunction::new(attachment, MsixMasking::Client);
    let device = NvmeDevice::new(function).map_err(OfferError::Doorbells)?;
    let journal = Journal::new().map_err(Error::from)?;
    let kept = Arc::new(KeptFunction::new(
        keeping.shelf(),
        socket,
        &journal,
        &shared,
    )?);
    let memory = declared.function.function.memory;
    let device = device.kept(kept.clone(), memory);
    let server = Server::bind_kept(socket, access(declared)?, device, journal)?;
    if let Some(journal) = server.journal() {
        kept.begin(server.listener().as_fd(), journal.as_fd())?;
    }
    Ok(server)
}

/// Returns the facts of a function for a person.
fn summary(options: &FunctionOptions, drive: &Drive, attachment: &Attachment) -> String {
    let namespace = attachment.namespace();
    let contents = match &namespace.command_sets.own().contents {
        Contents::Other(name) => name.clone(),
        Contents::Blocks { .. } => format!(
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
