//! The server's side of one connection, from the VMM's first message until the end of the lease.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nvme_guest::backend::CommandDrainMode;
use nvme_guest::rate_limit::RateLimits;
use nvme_guest::threads::run_alongside;
use nvme_guest::{ControllerBackend, EventReader, PersistedBackendParts, SharedBackendParts};
use nvme_mpt_memory::deadline::{DRAIN_DEADLINE, Deadline, SystemClock, WaitClock};
use nvme_mpt_memory::eventfd;
use nvme_mpt_memory::process_liveness::ProcessLiveness;
use nvme_mpt_memory::sync::mpsc::{self, RecvTimeoutError};
use nvme_mpt_memory::userfaultfd::MemoryHolder;

use crate::call::BackendRequest;
use crate::channel::{ChannelError, LeaseChannel};
use crate::message::{
    ATTACH_DESCRIPTORS, AttachReply, AttachRequest, AttachedLease, LeaseEndNotice, VERSION,
};
use crate::request_handler::{BackendRequestHandler, SessionError};
use crate::socket::{self, PeerIdentity, Stream};

/// Timeout for a VMM's first message.
const OPENING_TIMEOUT: Duration = Duration::from_secs(10);

/// Interval of `Waiting` messages while a lease is created.
const WAITING_INTERVAL: Duration = Duration::from_secs(1);

/// Answer to a VMM that requests a lease.
#[derive(Debug)]
pub enum LeaseAdmission {
    /// This server does not have the drive.
    NotServed,
    /// The lease is refused, for the given reason.
    Refused(String),
    /// The lease is granted, with this back end.
    Attached(Arc<dyn ControllerBackend>),
}

/// Creates the leases that a session serves.
pub trait LeaseSource: Sync {
    /// Creates the lease that an option string describes. `parts` are the function's files from the previous server, if
    /// any. Must return early once `stop` is `true`.
    fn attach(
        &self,
        peer: PeerIdentity,
        options: &str,
        parts: Option<PersistedBackendParts>,
        stop: &AtomicBool,
    ) -> LeaseAdmission;

    /// Returns whether this server has the drive that an option string names. Called for a VMM that only asks for the
    /// drive, without requesting a lease.
    fn has_drive(&self, options: &str) -> bool {
        let _ = options;
        false
    }

    /// Sets the rate limits that the VMM requests.
    fn set_rates(&self, host: &Arc<dyn ControllerBackend>, rates: RateLimits) {
        host.set_rate_limits(rates);
    }

    /// Returns whether the server is ending. Then functions get no lease, and wait for the successor.
    fn is_server_ending(&self) -> bool {
        false
    }

    /// Handles the end of a lease, and returns its cause. Commands of the lease may still be in flight.
    fn on_lease_end(&self, host: &Arc<dyn ControllerBackend>) -> LeaseEndCause;
}

/// Cause of a lease's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseEndCause {
    /// The VMM or the server has closed the connection. The VMM may request the lease again.
    Disconnected,
    /// An operator has removed the lease.
    Removed,
}

/// Connection of a VMM.
#[derive(Debug)]
pub struct LeaseSession {
    channel: LeaseChannel,
    peer: PeerIdentity,
    clock: Arc<dyn WaitClock>,
}

impl LeaseSession {
    /// Creates a session for a connected VMM. The caller then calls `run`.
    ///
    /// # Errors
    /// [`SessionError::Io`].
    pub fn new(stream: Stream) -> Result<Self, SessionError> {
        let peer = socket::peer(&stream)?;
        stream.set_nonblocking(false)?;
        let channel = LeaseChannel::new(stream)?;
        let clock = SystemClock::shared();
        Ok(Self {
            channel,
            peer,
            clock,
        })
    }

    /// Replaces the clock of the session's deadlines.
    #[must_use]
    pub fn with_clock(self, clock: Arc<dyn WaitClock>) -> Self {
        Self { clock, ..self }
    }

    /// Returns the process at the other end.
    #[must_use]
    pub fn peer(&self) -> PeerIdentity {
        self.peer
    }

    /// Serves the VMM until it disconnects. After this returns, the server carries out no further requests of the VMM. If
    /// commands are in flight, the lease exists until they have ended.
    ///
    /// # Errors
    /// See [`SessionError`]. The lease ends also after an error.
    pub fn run(self, leases: &dyn LeaseSource) -> Result<(), SessionError> {
        match self.serve_lease(leases) {
            Err(SessionError::Channel(ChannelError::Closed)) => Ok(()),
            other => other,
        }
    }

    fn serve_lease(self, leases: &dyn LeaseSource) -> Result<(), SessionError> {
        let (request, descriptors): (AttachRequest, _) =
            self.channel.receive_request(Some(OPENING_TIMEOUT))?;
        let AttachRequest {
            version,
            options,
            only_asks,
        } = request;
        if version != VERSION {
            let reason = format!(
                "the VMM speaks version {version} of the lease protocol, and this server version {VERSION}: use the \
                 same release for both"
            );
            self.channel.send(&AttachReply::Refused { reason }, &[])?;
            return Ok(());
        }
        if only_asks {
            let answer = match leases.has_drive(&options) {
                true => AttachReply::Served,
                false => AttachReply::NotServed,
            };
            self.channel.send(&answer, &[])?;
            return Ok(());
        }
        let parts = persisted_parts(descriptors)?;
        let host = match self.admit(leases, &options, parts)? {
            LeaseAdmission::NotServed => {
                self.channel.send(&AttachReply::NotServed, &[])?;
                return Ok(());
            }
            LeaseAdmission::Refused(reason) => {
                self.channel.send(&AttachReply::Refused { reason }, &[])?;
                return Ok(());
            }
            LeaseAdmission::Attached(host) => host,
        };
        let mut flushed = 0;
        let result = self.answer_requests(leases, &host, &mut flushed);
        // A successor can only restore queues whose commands are complete.
        let last = match leases.is_server_ending() {
            true => CommandDrainMode::Complete,
            false => CommandDrainMode::CutShort,
        };
        let deadline = Deadline::after(&self.clock, DRAIN_DEADLINE);
        let is_over = end_lease(&*host, last, flushed, &deadline);
        if leases.on_lease_end(&host) == LeaseEndCause::Removed {
            // If the VMM has closed its side as well, the message is not needed.
            let _ = self.channel.send(&LeaseEndNotice::Removed, &[]);
        }
        if is_over {
            let _ = self.channel.send(&LeaseEndNotice::Ended, &[]);
        }
        // Without `Ended`, the VMM waits for the next server, or for the complete end of this process.
        result
    }

    /// Creates the lease, and meanwhile sends the VMM a `Waiting` message each second.
    fn admit(
        &self,
        leases: &dyn LeaseSource,
        options: &str,
        parts: Option<PersistedBackendParts>,
    ) -> Result<LeaseAdmission, SessionError> {
        let stop = AtomicBool::new(false);
        let (peer, stopped) = (self.peer, &stop);
        let (sender, receiver) = mpsc::channel();
        let attach = move || {
            // The receiver waits until this is sent, so that the send cannot fail.
            let _ = sender.send(leases.attach(peer, options, parts, stopped));
        };
        run_alongside("lease", attach, || {
            loop {
                match receiver.recv_timeout(WAITING_INTERVAL) {
                    Ok(admission) => return Ok(admission),
                    Err(RecvTimeoutError::Disconnected) => {
                        return Ok(LeaseAdmission::Refused("the server failed".to_owned()));
                    }
                    // A lease is useless in a server that is ending, so its creation is aborted.
                    Err(RecvTimeoutError::Timeout) if leases.is_server_ending() => {
                        stop.store(true, Ordering::Relaxed);
                    }
                    Err(RecvTimeoutError::Timeout) => {}
                }
                if let Err(error) = self.channel.send(&AttachReply::Waiting, &[]) {
                    stop.store(true, Ordering::Relaxed);
                    if let Ok(LeaseAdmission::Attached(host)) = receiver.recv() {
                        leases.on_lease_end(&host);
                    }
                    return Err(error.into());
                }
            }
        })?
    }

    /// Answers the VMM's requests until the connection ends. When the VMM requests a flush, sets `flushed` to the number of
    /// commands completed so far: the end of the lease need not flush these again.
    fn answer_requests(
        &self,
        leases: &dyn LeaseSource,
        host: &Arc<dyn ControllerBackend>,
        flushed: &mut u64,
    ) -> Result<(), SessionError> {
        let SharedBackendParts {
            doorbells,
            events,
            vectors,
            inflight,
            ..
        } = host.shared_parts();
        let inflight = inflight.ok_or(SessionError::NoInflightFile)?;
        // The VMM checks that its memory is complete before it sends any.
        host.set_memory_holder(MemoryHolder::Trusted);
        let attached = AttachReply::Attached(Box::new(AttachedLease {
            id: host.stats().id,
            facts: host.facts(),
            dstrd: doorbells.dstrd(),
            // Fits: at most 128.
            vectors: vectors.len() as u16,
        }));
        self.channel.expect_queue_pairs(host.facts().queue_pairs);
        let reader = match self.peer.is_trusted() {
            true => EventReader::Trusted,
            false => EventReader::Untrusted,
        };
        let events = eventfd::share(&events)?;
        let mut parts = vec![doorbells.fd(), inflight.fd(), events.as_fd()];
        // Must precede the first queue, so that the signs cover all its commands.
        parts.extend(ProcessLiveness::open()?.fds());
        self.channel.send(&attached, &parts)?;
        let set_rates = |rates| leases.set_rates(host, rates);
        let mut server = BackendRequestHandler::new(&self.channel, &**host, &set_rates, reader);
        loop {
            let (request, descriptors): (BackendRequest, _) = self.channel.receive_request(None)?;
            if let BackendRequest::flush_within { .. } = &request {
                // The VMM gets the flush's result, so these commands need no other flush at the end of the lease.
                *flushed = host.completed_commands();
            }
            server.take_descriptor(descriptors, request.descriptor_count())?;
            request.answer(&mut server)?;
        }
    }
}

/// Ends all work for a function, within `deadline`. Returns true if all its memory was unmapped, so that nothing accesses
/// this memory any longer.
fn end_lease(
    host: &dyn ControllerBackend,
    last: CommandDrainMode,
    flushed: u64,
    deadline: &Deadline,
) -> bool {
    host.end_untrapped_doorbells();
    let is_over = match host.detach_within(deadline.remaining(), last) {
        // The function has no queues left, so this does not wait.
        Ok(()) => {
            let unmapped = host.unmap_all();
            if let Err(error) = &unmapped {
                log::warn!("Memory of a disconnected VMM is still in use: {error}");
            }
            unmapped.is_ok()
        }
        // The memory of commands in flight stays mapped until they have ended.
        Err(error) => {
            log::warn!("A lease ends with commands of its function in flight: {error}");
            false
        }
    };
    if host.completed_commands() != flushed
        && let Err(error) = host.flush_within(deadline.remaining())
    {
        log::error!("Cannot flush the drive of a disconnected VMM: {error}");
    }
    is_over
}

/// Converts the descriptors that a function got from the previous server; `None` if there are none.
fn persisted_parts(
    descriptors: Vec<OwnedFd>,
) -> Result<Option<PersistedBackendParts>, SessionError> {
    if descriptors.is_empty() {
        return Ok(None);
    }
    let [doorbells, inflight, events] = <[OwnedFd; ATTACH_DESCRIPTORS]>::try_from(descriptors)
        .map_err(|descriptors| {
            let (came, said) = (descriptors.len(), ATTACH_DESCRIPTORS);
            ChannelError::Descriptors { came, said }
        })?;
    let events = eventfd::from_client(events)?;
    Ok(Some(PersistedBackendParts {
        doorbells,
        inflight,
        events,
    }))
}
