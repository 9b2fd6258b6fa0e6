//! The server's side of one connection: a lease, from its beginning to its end.

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

/// Time that a VMM has for its first message.
const OPENING_PATIENCE: Duration = Duration::from_secs(10);

/// Time between two signs of life while a lease is made.
const SIGN_OF_LIFE: Duration = Duration::from_secs(1);

/// A session ended otherwise than by its VMM.
#[derive(Debug, Error)]
pub enum SessionError {
    /// The VMM broke the protocol, or the connection did.
    #[error("A VMM's connection ended")]
    Channel(#[from] ChannelError),
    /// The lease was made for a function of this process.
    #[error("A lease has no live state, which a function in a VMM needs")]
    NoLiveState,
    /// The kernel's error.
    #[error("A VMM's connection cannot be set up")]
    Io(#[from] std::io::Error),
}

/// Decision about a VMM that wants a lease.
#[derive(Debug)]
pub enum Admission {
    /// The drive is none of this server's.
    NotServed,
    /// There is no lease, for the reason given.
    Refused(String),
    /// Host side of the lease.
    Attached(Arc<dyn HostSide>),
}

/// Source of leases.
pub trait Leases: Sync {
    /// Makes the lease of an option string, for a function that may have kept parts from the server before. It ends
    /// early when `stop` is set.
    fn attach(
        &self,
        peer: Peer,
        options: &str,
        parts: Option<KeptParts>,
        stop: &AtomicBool,
    ) -> Admission;

    /// Returns whether this server has the drive of an option string. A VMM asks before it wants a lease.
    fn serves(&self, options: &str) -> bool {
        let _ = options;
        false
    }

    /// Sets the limits that the VMM asks for.
    fn set_rates(&self, host: &Arc<dyn HostSide>, rates: RateLimits) {
        host.set_rates(rates);
    }

    /// Returns whether the server ends, so that functions go on with the next one.
    fn server_ends(&self) -> bool {
        false
    }

    /// The lease of `host` has ended, unless its commands are in flight.
    fn ended(&self, host: &Arc<dyn HostSide>) -> End;
}

/// Cause of the end of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The VMM or the server goes. The VMM may ask for the lease again.
    Gone,
    /// An operator has taken it away.
    Removed,
}

/// A connection of a VMM.
#[derive(Debug)]
pub struct Session {
    channel: Channel,
    peer: Peer,
    clock: Arc<dyn WaitClock>,
}

impl Session {
    /// A session that has not begun.
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

    /// The same session, whose deadlines go by another clock.
    #[must_use]
    pub fn with_clock(self, clock: Arc<dyn WaitClock>) -> Self {
        Self { clock, ..self }
    }

    /// The process at the other end.
    #[must_use]
    pub fn peer(&self) -> Peer {
        self.peer
    }

    /// Serves the VMM until it goes. When this returns, nothing is done for it any more; a lease with commands in
    /// flight lives until they have ended.
    ///
    /// # Errors
    /// See [`SessionError`]: the lease has ended all the same.
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
        // The next server takes up queues whose commands are complete.
        let last = match leases.server_ends() {
            true => LastCommands::Complete,
            false => LastCommands::CutShort,
        };
        let deadline = Deadline::after(&self.clock, DRAIN_DEADLINE);
        let is_over = end(&*host, last, flushed, &deadline);
        if leases.ended(&host) == End::Removed {
            // A VMM that has gone as well does not need it.
            let _ = self.channel.send(&Farewell::Removed, &[]);
        }
        // A VMM that does not know the word would take it for an answer.
        if is_over && sees_end {
            let _ = self.channel.send(&Farewell::Ended, &[]);
        }
        // Without that word, the VMM waits for the next server, or until nothing of this process is left.
        result
    }

    /// Asks for the lease, with a sign of life to the VMM each second.
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
            // The receiver waits in any case.
            let _ = sender.send(leases.attach(peer, options, parts, stopped));
        };
        run_beside("lease", attach, || {
            loop {
                match receiver.recv_timeout(SIGN_OF_LIFE) {
                    Ok(admission) => return Ok(admission),
                    Err(RecvTimeoutError::Disconnected) => {
                        return Ok(Admission::Refused("the server failed".to_owned()));
                    }
                    // Nobody waits for a lease of a server that ends, however long it takes to make.
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

    /// Answers requests. `flushed` becomes the number of commands that were complete when the VMM had them flushed.
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
        // The VMM's side looks whether its memory is complete before it sends any.
        host.set_memory_holder(MemoryHolder::Trusted);
        let attached = Opened::Attached(Box::new(Attached {
            id: host.stats().id,
            facts: host.facts(),
            dstrd: doorbells.dstrd(),
            // At most 128.
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
            // Before the lease has a queue, so that all that its commands begin is covered.
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
                // The VMM learns of the flush's result, so that it is not made again for these.
                *flushed = host.commands();
            }
            served.answer(request, descriptors)?;
        }
    }
}

/// Ends all that is done for a function, until `deadline`. Returns whether nothing reaches its memory any more.
fn end(host: &dyn HostSide, last: LastCommands, flushed: u64, deadline: &Deadline) -> bool {
    host.end_silent_doorbells();
    let is_over = match host.leave_within(deadline.left(), last) {
        // Without queues this waits for nothing.
        Ok(()) => {
            let unmapped = host.unmap_all();
            if let Err(error) = &unmapped {
                log::warn!("Memory of a VMM that went is still in use: {error}");
            }
            unmapped.is_ok()
        }
        // Their memory stays mapped until they have ended.
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

/// Returns what a function kept from the server before.
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

/// Returns the time that a VMM asks for, within the server's own bound.
fn bounded(time: Duration) -> Duration {
    time.min(DRAIN_DEADLINE)
}

/// Returns a region with its descriptor.
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

/// A lease that is served.
struct Served<'a> {
    channel: &'a Channel,
    leases: &'a dyn Leases,
    host: &'a Arc<dyn HostSide>,
    shared: SharedParts,
    /// Bells that the VMM has, by their numbers.
    bells: Vec<(u64, ForeignDoorbellWaker)>,
    bells_made: u64,
    /// Pages that were taken and not told.
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

    /// Carries out a change of a vector, or answers a question about it.
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
                // A vector that leads nowhere keeps its signals.
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
                // The VMM asks again.
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
