//! The server's side of one connection, for the life of a lease.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nvme_mpt::deadline::{DRAIN_DEADLINE, Deadline, SystemClock, WaitClock};
use nvme_mpt::interrupt::ClientSignals;
use nvme_mpt::limit::RateLimits;
use nvme_mpt::memory::eventfd;
use nvme_mpt::memory::presence::Presence;
use nvme_mpt::memory::sync::mpsc::{self, RecvTimeoutError};
use nvme_mpt::memory::user_faults::MemoryHolder;
use nvme_mpt::poller::run_beside;
use nvme_mpt::seam::LastCommands;
use nvme_mpt::seam::{DoorbellWaker, ForeignDoorbellWaker};
use nvme_mpt::{DirtyRange, DmaError, EventReader, HostSide, KeptParts, MemoryRegion, SharedParts};
use serde::Serialize;
use thiserror::Error;
use zerocopy::IntoBytes;

use crate::channel::{Channel, ChannelError};
use crate::message::{
    Attached, DirtyPages, Doorbells, Failed, Farewell, Opened, Opening, PARTS, RANGES_MAX, Region,
    Request, Smart, VERSION, VectorChange,
};
use crate::socket::{self, DESCRIPTORS_MAX, Peer, Stream};

/// Timeout for a VMM's first message.
const OPENING_PATIENCE: Duration = Duration::from_secs(10);

/// Interval of `Waiting` messages while a lease is created.
const SIGN_OF_LIFE: Duration = Duration::from_secs(1);

/// Error of a session.
#[derive(Debug, Error)]
pub enum SessionError {
    /// The VMM violated the protocol, or the connection failed.
    #[error("A VMM's connection ended")]
    Channel(#[from] ChannelError),
    /// The lease was created without the shared in-flight state that a VMM's function needs.
    #[error("A lease has no live state, which a function in a VMM needs")]
    NoLiveState,
    /// The kernel's error.
    #[error("A VMM's connection cannot be set up")]
    Io(#[from] std::io::Error),
}

/// Answer to a VMM's request for a lease.
#[derive(Debug)]
pub enum Admission {
    /// This server does not have the drive.
    NotServed,
    /// The lease is refused, for the given reason.
    Refused(String),
    /// The lease is granted, with this host side.
    Attached(Arc<dyn HostSide>),
}

/// Creates the leases that a session serves.
pub trait Leases: Sync {
    /// Creates the lease of an option string. `parts` are the function's files from the previous server, if any. Must return
    /// early once `stop` is set.
    fn attach(
        &self,
        peer: Peer,
        options: &str,
        parts: Option<KeptParts>,
        stop: &AtomicBool,
    ) -> Admission;

    /// Returns whether this server has the drive of an option string. Called for a VMM that does not want a lease yet.
    fn serves(&self, options: &str) -> bool {
        let _ = options;
        false
    }

    /// Sets the rate limits that the VMM requests.
    fn set_rates(&self, host: &Arc<dyn HostSide>, rates: RateLimits) {
        host.set_rates(rates);
    }

    /// Returns whether the server is ending, so that functions continue with its successor.
    fn server_ends(&self) -> bool {
        false
    }

    /// Handles the end of a lease, and returns its cause. Its commands may still be in flight.
    fn ended(&self, host: &Arc<dyn HostSide>) -> End;
}

/// Cause of a lease's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The VMM or the server has gone. The VMM may request the lease again.
    Gone,
    /// An operator has removed the lease.
    Removed,
}

/// Connection of a VMM.
#[derive(Debug)]
pub struct Session {
    channel: Channel,
    peer: Peer,
    clock: Arc<dyn WaitClock>,
}

impl Session {
    /// Creates a session, to be run with `run`.
    ///
    /// # Errors
    /// [`SessionError::Io`].
    pub fn new(stream: Stream) -> Result<Self, SessionError> {
        let peer = socket::peer(&stream)?;
        stream.set_nonblocking(false)?;
        let channel = Channel::new(stream)?;
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
    pub fn peer(&self) -> Peer {
        self.peer
    }

    /// Serves the VMM until it disconnects. After this returns, no work is done for the VMM; a lease with commands in flight
    /// lives until they have ended.
    ///
    /// # Errors
    /// See [`SessionError`]. The lease ends also after an error.
    pub fn run(self, leases: &dyn Leases) -> Result<(), SessionError> {
        match self.hold_lease(leases) {
            Err(SessionError::Channel(ChannelError::Closed)) => Ok(()),
            other => other,
        }
    }

    fn hold_lease(self, leases: &dyn Leases) -> Result<(), SessionError> {
        let (opening, descriptors): (Opening, _) =
            self.channel.receive_request(Some(OPENING_PATIENCE))?;
        let Opening {
            version,
            options,
            only_asks,
            sees_end,
        } = opening;
        if version != VERSION {
            let reason = format!(
                "the VMM speaks version {version} of the lease protocol, and this server version {VERSION}: use the \
                 same release for both"
            );
            self.channel.send(&Opened::Refused { reason }, &[])?;
            return Ok(());
        }
        if only_asks {
            let answer = match leases.serves(&options) {
                true => Opened::Served,
                false => Opened::NotServed,
            };
            self.channel.send(&answer, &[])?;
            return Ok(());
        }
        let parts = kept_parts(descriptors)?;
        let host = match self.admit(leases, &options, parts)? {
            Admission::NotServed => {
                self.channel.send(&Opened::NotServed, &[])?;
                return Ok(());
            }
            Admission::Refused(reason) => {
                self.channel.send(&Opened::Refused { reason }, &[])?;
                return Ok(());
            }
            Admission::Attached(host) => host,
        };
        let mut flushed = 0;
        let result = self.serve(leases, &host, sees_end, &mut flushed);
        // A successor can only restore queues whose commands are complete.
        let last = match leases.server_ends() {
            true => LastCommands::Complete,
            false => LastCommands::CutShort,
        };
        let deadline = Deadline::after(&self.clock, DRAIN_DEADLINE);
        let is_over = end(&*host, last, flushed, &deadline);
        if leases.ended(&host) == End::Removed {
            // If the VMM has gone as well, the message is not needed.
            let _ = self.channel.send(&Farewell::Removed, &[]);
        }
        // A VMM that does not know the message would take it for an answer.
        if is_over && sees_end {
            let _ = self.channel.send(&Farewell::Ended, &[]);
        }
        // Without that message, the VMM waits for the next server, or for the complete end of this process.
        result
    }

    /// Requests the lease, and sends the VMM a `Waiting` message each second.
    fn admit(
        &self,
        leases: &dyn Leases,
        options: &str,
        parts: Option<KeptParts>,
    ) -> Result<Admission, SessionError> {
        let stop = AtomicBool::new(false);
        let (peer, stopped) = (self.peer, &stop);
        let (sender, receiver) = mpsc::channel();
        let attach = move || {
            // The receiver waits until this is sent.
            let _ = sender.send(leases.attach(peer, options, parts, stopped));
        };
        run_beside("lease", attach, || {
            loop {
                match receiver.recv_timeout(SIGN_OF_LIFE) {
                    Ok(admission) => return Ok(admission),
                    Err(RecvTimeoutError::Disconnected) => {
                        return Ok(Admission::Refused("the server failed".to_owned()));
                    }
                    // A lease is useless in a server that is ending, so its creation is aborted.
                    Err(RecvTimeoutError::Timeout) if leases.server_ends() => {
                        stop.store(true, Ordering::Relaxed);
                    }
                    Err(RecvTimeoutError::Timeout) => {}
                }
                if let Err(error) = self.channel.send(&Opened::Waiting, &[]) {
                    stop.store(true, Ordering::Relaxed);
                    if let Ok(Admission::Attached(host)) = receiver.recv() {
                        leases.ended(&host);
                    }
                    return Err(error.into());
                }
            }
        })?
    }

    /// Answers requests. Sets `flushed` to the number of commands that were complete at the VMM's last flush.
    fn serve(
        &self,
        leases: &dyn Leases,
        host: &Arc<dyn HostSide>,
        sees_end: bool,
        flushed: &mut u64,
    ) -> Result<(), SessionError> {
        let SharedParts {
            doorbells,
            events,
            vectors,
            live,
            ..
        } = host.shared();
        let live = live.ok_or(SessionError::NoLiveState)?;
        // The VMM checks that its memory is complete before it sends any.
        host.set_memory_holder(MemoryHolder::Trusted);
        let attached = Opened::Attached(Box::new(Attached {
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
        let signals = ClientSignals::new(&host.stats().id, reader);
        let events = eventfd::share(&events)?;
        let mut parts = vec![doorbells.fd(), live.fd(), events.as_fd()];
        if sees_end {
            // Must precede the first queue, so that the signs cover all its commands.
            parts.extend(Presence::announce()?.signs());
        }
        self.channel.send(&attached, &parts)?;
        let mut served = Served {
            channel: &self.channel,
            leases,
            host,
            shared: host.shared(),
            bells: Vec::new(),
            bells_made: 0,
            dirty: Vec::new(),
            signals,
        };
        loop {
            let (request, descriptors) = self.channel.receive_request(None)?;
            if let Request::FlushWithin(_) = &request {
                // The VMM gets the flush's result, so these commands need no further flush.
                *flushed = host.commands();
            }
            served.answer(request, descriptors)?;
        }
    }
}

/// Ends all work for a function, until `deadline`. Returns whether nothing accesses its memory.
fn end(host: &dyn HostSide, last: LastCommands, flushed: u64, deadline: &Deadline) -> bool {
    host.end_silent_doorbells();
    let is_over = match host.leave_within(deadline.left(), last) {
        // Does not wait, as there are no queues.
        Ok(()) => {
            let unmapped = host.unmap_all();
            if let Err(error) = &unmapped {
                log::warn!("Memory of a VMM that went is still in use: {error}");
            }
            unmapped.is_ok()
        }
        // The memory of commands in flight stays mapped until they have ended.
        Err(error) => {
            log::warn!("A lease ends with commands of its function in flight: {error}");
            false
        }
    };
    if host.commands() != flushed
        && let Err(error) = host.flush_within(deadline.left())
    {
        log::error!("Cannot flush the drive of a VMM that went: {error}");
    }
    is_over
}

/// Returns the parts that a function has kept from the previous server.
fn kept_parts(descriptors: Vec<OwnedFd>) -> Result<Option<KeptParts>, SessionError> {
    if descriptors.is_empty() {
        return Ok(None);
    }
    let [doorbells, live, events] =
        <[OwnedFd; PARTS]>::try_from(descriptors).map_err(|descriptors| {
            let (came, said) = (descriptors.len(), PARTS);
            ChannelError::Descriptors { came, said }
        })?;
    let events = eventfd::take(events)?;
    Ok(Some(KeptParts {
        doorbells,
        live,
        events,
    }))
}

fn expect(descriptors: &[OwnedFd], said: usize) -> Result<(), ChannelError> {
    match descriptors.len() {
        came if came == said => Ok(()),
        came => Err(ChannelError::Descriptors { came, said }),
    }
}

/// Limits a VMM's timeout to the server's maximum.
fn bounded(time: Duration) -> Duration {
    time.min(DRAIN_DEADLINE)
}

/// Combines a region with its descriptor.
fn memory(region: Region, descriptor: Option<OwnedFd>) -> Result<MemoryRegion, DmaError> {
    let Region {
        gpa,
        len,
        offset,
        readable,
        writable,
    } = region;
    let fd = descriptor.ok_or(DmaError::InvalidRegion { gpa, len })?;
    Ok(MemoryRegion {
        gpa,
        len,
        fd,
        offset,
        readable,
        writable,
    })
}

/// Lease with its connection.
struct Served<'a> {
    channel: &'a Channel,
    leases: &'a dyn Leases,
    host: &'a Arc<dyn HostSide>,
    shared: SharedParts,
    /// Wakers that the VMM has, by number.
    bells: Vec<(u64, ForeignDoorbellWaker)>,
    bells_made: u64,
    /// Dirty pages that were read and not sent yet.
    dirty: Vec<DirtyRange>,
    /// Signals to the VMM's eventfds.
    signals: Arc<ClientSignals>,
}

impl Served<'_> {
    fn reply(&self, reply: &impl Serialize) -> Result<(), ChannelError> {
        self.channel.send(reply, &[])
    }

    fn answer(
        &mut self,
        request: Request,
        mut descriptors: Vec<OwnedFd>,
    ) -> Result<(), SessionError> {
        let host = self.host;
        let needed = match &request {
            Request::Map(_) | Request::MapKept(_) => 1,
            Request::Vector { change, .. } if *change == VectorChange::Connect => 1,
            _ => 0,
        };
        expect(&descriptors, needed)?;
        let descriptor = descriptors.pop();
        match request {
            Request::Status => self.reply(&host.status()),
            Request::Damage => self.reply(&host.damage()),
            Request::SmartHealth => {
                let page = host.smart_health();
                let page = page.map(|page| page.map(|page| Smart(page.as_bytes().to_vec())));
                self.reply(&page.map_err(Failed))
            }
            Request::Changes => self.reply(&host.changes()),
            Request::ForgetChanges(told) => self.reply(&host.forget_changes(&told)),
            Request::Counters => self.reply(&host.counters()),
            Request::Commands => self.reply(&host.commands()),
            Request::Stats => self.reply(&host.stats()),
            Request::TakeEvents => self.reply(&host.take_events()),
            Request::Map(region) => {
                let mapped = memory(region, descriptor).and_then(|memory| host.map(memory));
                self.reply(&mapped)
            }
            Request::MapKept(region) => {
                let mapped = memory(region, descriptor).and_then(|memory| host.map_claimed(memory));
                self.reply(&mapped)
            }
            Request::Unmap { gpa, len, time } => {
                self.reply(&host.unmap_within(gpa, len, bounded(time)))
            }
            Request::StartDirtyLog => self.reply(&host.start_dirty_log()),
            Request::TakeDirtyPages => {
                let pages = self.take_dirty_pages();
                self.reply(&pages)
            }
            Request::StopDirtyLog => {
                self.dirty.clear();
                self.reply(&host.stop_dirty_log())
            }
            Request::CreateCq(config) => self.reply(&host.create_cq(config)),
            Request::CreateSq { config, time } => {
                self.reply(&host.create_sq_within(config, bounded(time)))
            }
            Request::DeleteSq { qid, time } => {
                self.reply(&host.delete_sq_within(qid, bounded(time)))
            }
            Request::DeleteCq { qid, time } => {
                self.reply(&host.delete_cq_within(qid, bounded(time)))
            }
            Request::SetCoalescing(coalescing) => self.reply(&host.set_coalescing(coalescing)),
            Request::SetRates(rates) => self.reply(&self.leases.set_rates(host, rates)),
            Request::IoDoorbells => return self.doorbells(),
            Request::SetDoorbellBuffer { buffer, time } => {
                self.reply(&host.set_doorbell_buffer_within(buffer, bounded(time)))
            }
            Request::BeginSilentDoorbells => {
                self.reply(&host.begin_silent_doorbells().map_err(Failed))
            }
            Request::EndSilentDoorbells => self.reply(&host.end_silent_doorbells()),
            Request::WatchAdminDoorbells => {
                self.reply(&host.watch_admin_doorbells().map_err(Failed))
            }
            Request::BeginAnew => self.reply(&host.begin_anew()),
            Request::Pause => self.reply(&host.pause()),
            Request::PauseWithin(time) => self.reply(&host.pause_within(bounded(time))),
            Request::Resume => self.reply(&host.resume()),
            Request::Revoke => self.reply(&host.revoke()),
            Request::ResetWithin(time) => self.reply(&host.reset_within(bounded(time))),
            Request::FlushWithin(time) => {
                let flushed = host.flush_within(bounded(time));
                self.reply(&flushed.map_err(Failed))
            }
            Request::Save => self.reply(&host.save()),
            Request::Check(state) => self.reply(&host.check(&state)),
            Request::TakeUp(kept) => self.reply(&host.take_up(&kept)),
            Request::Restore(state) => self.reply(&host.restore(&state)),
            Request::Vector { number, change } => {
                self.reply(&self.change_vector(number, change, descriptor))
            }
        }?;
        Ok(())
    }

    fn take_dirty_pages(&mut self) -> Result<DirtyPages, DmaError> {
        if self.dirty.is_empty() {
            self.dirty = self.host.take_dirty_pages()?;
        }
        let rest = self.dirty.split_off(self.dirty.len().min(RANGES_MAX));
        let ranges = std::mem::replace(&mut self.dirty, rest);
        let more = !self.dirty.is_empty();
        Ok(DirtyPages { ranges, more })
    }

    /// Carries out a change or a query of a vector.
    fn change_vector(
        &self,
        number: u16,
        change: VectorChange,
        descriptor: Option<OwnedFd>,
    ) -> bool {
        let Some(vector) = self.shared.vectors.get(usize::from(number)) else {
            return false;
        };
        let waited = vector.pending();
        match change {
            VectorChange::Connect => match descriptor.map(eventfd::take) {
                Some(Ok(eventfd)) => vector.set_client(self.signals.eventfd(eventfd)),
                // The vector stays unconnected and keeps its signals.
                _ => log::warn!("A VMM sent what is no eventfd for vector {number}"),
            },
            VectorChange::Disconnect => vector.set_eventfd(None),
            VectorChange::Mask => vector.set_masked(true),
            VectorChange::Unmask => vector.set_masked(false),
            VectorChange::Ask => return waited,
            VectorChange::Clear => {
                vector.clear_pending();
                return false;
            }
        }
        waited && !vector.pending()
    }

    fn doorbells(&mut self) -> Result<(), SessionError> {
        let doorbells = self.host.io_doorbells();
        let wakers = &doorbells.wakers;
        let is_named =
            |bell: &ForeignDoorbellWaker| wakers.iter().any(|(_, waker)| bell.is_of(waker));
        self.bells.retain(|(_, bell)| is_named(bell));
        let mut answer = Doorbells {
            are_buffered: doorbells.are_buffered,
            are_silent: doorbells.are_silent,
            ..Doorbells::default()
        };
        let mut new = Vec::new();
        for (doorbell, waker) in &doorbells.wakers {
            let number = match self.bells.iter().find(|(_, bell)| bell.is_of(waker)) {
                Some((number, _)) => *number,
                // The VMM repeats the request.
                None if new.len() == DESCRIPTORS_MAX => continue,
                None => {
                    let Some((number, descriptor)) = self.make_bell(waker)? else {
                        continue;
                    };
                    answer.new_bells.push(number);
                    new.push(descriptor);
                    number
                }
            };
            answer.bells.push((*doorbell, number));
        }
        let new: Vec<BorrowedFd<'_>> = new.iter().map(AsFd::as_fd).collect();
        Ok(self.channel.send(&answer, &new)?)
    }

    fn make_bell(&mut self, waker: &DoorbellWaker) -> Result<Option<(u64, OwnedFd)>, SessionError> {
        let Some(bell) = waker.foreign()? else {
            return Ok(None);
        };
        let descriptor = bell.share()?;
        let number = self.bells_made;
        self.bells_made += 1;
        self.bells.push((number, bell));
        Ok(Some((number, descriptor)))
    }
}
