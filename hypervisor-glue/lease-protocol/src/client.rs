//! The VMM's side: a [`HostSide`] whose lease, memory windows, queues and pollers are in the server.

use std::collections::BTreeMap;
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use nvme_mpt::attachment::DoorbellWaker;
use nvme_mpt::dma::HeldMemory;
use nvme_mpt::host::{ChangedZones, Damage, NamespaceFormat};
use nvme_mpt::iova::IovaSpace;
use nvme_mpt::limit::RateLimits;
use nvme_mpt::memory::eventfd;
use nvme_mpt::poller::Threads;
use nvme_mpt::seam::{CoalescingConfig, IoDoorbells};
use nvme_mpt::spec::ids::QueueId;
use nvme_mpt::spec::log::SmartHealth;
use nvme_mpt::spec::registers::Doorbell;
use nvme_mpt::{
    AttachmentState, AttachmentStats, Counters, CqConfig, DirtyRange, DmaError, DmaWindow,
    DoorbellBuffer, DoorbellPage, DriveEvent, Event, Gpa, HostSide, InterruptVector, LeaseFacts,
    LeaseStatus, MemoryRegion, QueueError, QueueFailure, SharedParts, SqConfig, StateError,
};
use serde::de::DeserializeOwned;
use thiserror::Error;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::EventFd;
use zerocopy::FromBytes;

use crate::channel::{Channel, ChannelError};
use crate::message::{
    Attached, DirtyPages, Doorbells, Opened, Opening, Outcome, Region, Request, Smart, VERSION,
};
use crate::vector::RemoteVector;

/// Time in which a server says something while a lease is made.
const OPENING_PATIENCE: Duration = Duration::from_secs(10);

/// Time in which a server answers. Its longest work is bounded by 30 seconds.
const PATIENCE: Duration = Duration::from_secs(45);

/// Time that a server has to end a lease: a reset and a flush, of 30 seconds each.
const END_PATIENCE: Duration = Duration::from_secs(65);

/// A server does not give its drive's lease.
#[derive(Debug, Error)]
pub enum AttachError {
    /// Nothing listens on the socket, or not to us.
    #[error("Cannot connect to the drive server on {}", socket.display())]
    Connect {
        /// The socket.
        socket: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It does not answer as the protocol says.
    #[error("The drive server on {} does not answer", socket.display())]
    Answer {
        /// The socket.
        socket: PathBuf,
        /// Why.
        source: ChannelError,
    },
    /// It refused.
    #[error("The drive server on {} refused: {reason}", socket.display())]
    Refused {
        /// The socket.
        socket: PathBuf,
        /// Its words.
        reason: String,
    },
    /// This process has no memory, descriptors or threads.
    #[error("Cannot set up what the drive server on {} gave", socket.display())]
    SetUp {
        /// The socket.
        socket: PathBuf,
        /// Kernel's error.
        source: io::Error,
    },
}

/// The server cannot be asked any more.
#[derive(Debug)]
pub(crate) struct Lost;

impl From<Lost> for io::Error {
    fn from(_: Lost) -> Self {
        Self::new(
            io::ErrorKind::NotConnected,
            "the drive server is gone: start it, then detach the drive and attach it again",
        )
    }
}

/// State of a connection.
#[derive(Debug)]
enum Connection {
    Open(Channel),
    /// The server closed it: it has ended what it did for the function, or itself.
    Closed,
    /// The server did not answer, and what it does is not known.
    Abandoned,
}

/// The connection to a server.
#[derive(Debug)]
pub(crate) struct Link {
    connection: Mutex<Connection>,
    /// Readable while the host side has events, and when the connection is lost.
    events: Arc<EventFd>,
    socket: PathBuf,
}

impl Link {
    /// Asks for something, with a descriptor if it needs one.
    pub(crate) fn ask<T: DeserializeOwned>(
        &self,
        request: &Request,
        descriptor: Option<&OwnedFd>,
    ) -> Result<T, Lost> {
        Ok(self.ask_for_more(request, descriptor)?.0)
    }

    fn ask_for_more<T: DeserializeOwned>(
        &self,
        request: &Request,
        descriptor: Option<&OwnedFd>,
    ) -> Result<(T, Vec<OwnedFd>), Lost> {
        let mut connection = self.connection();
        let Connection::Open(channel) = &*connection else {
            return Err(Lost);
        };
        let descriptor = descriptor.map(AsFd::as_fd);
        let answer = channel
            .send(request, descriptor.as_slice())
            .and_then(|()| channel.receive_answer());
        answer.map_err(|error| self.lose(&mut connection, &error))
    }

    fn lose(&self, connection: &mut Connection, error: &ChannelError) -> Lost {
        let socket = self.socket.display();
        log::error!("The drive server on {socket} is lost, and its drive with it: {error}");
        if let Connection::Open(channel) = connection {
            // The watch ends with it.
            let _ = channel.stream().shutdown(Shutdown::Both);
        }
        *connection = match error {
            ChannelError::Closed => Connection::Closed,
            _ => Connection::Abandoned,
        };
        // A counter that is full is readable as well.
        let _ = self.events.write(1);
        Lost
    }

    fn connection(&self) -> MutexGuard<'_, Connection> {
        // Each change is complete before anything can panic.
        self.connection
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// Attaches to the drive server on `socket`, for the function of an option string with absolute paths; `None` if the
/// server does not have the function's drive.
///
/// # Errors
/// See [`AttachError`].
pub fn attach(
    socket: &Path,
    options: &str,
    threads: &Threads,
) -> Result<Option<RemoteHostSide>, AttachError> {
    let stream = UnixStream::connect(socket).map_err(|source| AttachError::Connect {
        socket: socket.to_owned(),
        source,
    })?;
    attach_over(stream, socket, options, threads)
}

/// As [`attach`], over a connection. `socket` is its name in messages.
///
/// # Errors
/// See [`AttachError`].
pub fn attach_over(
    stream: UnixStream,
    socket: &Path,
    options: &str,
    threads: &Threads,
) -> Result<Option<RemoteHostSide>, AttachError> {
    let answer = |source| AttachError::Answer {
        socket: socket.to_owned(),
        source,
    };
    let set_up = |source| AttachError::SetUp {
        socket: socket.to_owned(),
        source,
    };
    let channel = Channel::new(stream).map_err(set_up)?;
    channel.set_patience(OPENING_PATIENCE).map_err(set_up)?;
    let opening = Opening {
        version: VERSION,
        options: options.to_owned(),
    };
    channel.send(&opening, &[]).map_err(answer)?;
    let (attached, descriptors) = loop {
        let (opened, descriptors) = channel.receive_answer().map_err(answer)?;
        match opened {
            Opened::Waiting => {}
            Opened::NotServed => return Ok(None),
            Opened::Refused { reason } => {
                return Err(AttachError::Refused {
                    socket: socket.to_owned(),
                    reason,
                });
            }
            Opened::Attached(attached) if attached.is_possible() => {
                break (*attached, descriptors);
            }
            Opened::Attached(_) => return Err(answer(ChannelError::Impossible)),
        }
    };
    channel.set_patience(PATIENCE).map_err(set_up)?;
    let [doorbells, events] = <[OwnedFd; 2]>::try_from(descriptors).map_err(|descriptors| {
        let (came, said) = (descriptors.len(), 2);
        answer(ChannelError::Descriptors { came, said })
    })?;
    let parts = (doorbells, events);
    let host = RemoteHostSide::new(channel, attached, parts, socket, threads).map_err(set_up)?;
    Ok(Some(host))
}

/// Bells of the server's pollers, and the doorbells whose queues they poll.
#[derive(Debug, Default)]
struct Bells {
    by_number: BTreeMap<u64, Arc<EventFd>>,
    doorbells: IoDoorbells,
}

/// Host side of a function in another process, a drive server.
///
/// When the server goes, every I/O command and admin command of the guest fails as on a drive that was removed.
#[derive(Debug)]
pub struct RemoteHostSide {
    id: String,
    link: Arc<Link>,
    facts: LeaseFacts,
    shared: SharedParts,
    /// The VM's memory in this process, for the admin queue.
    window: DmaWindow,
    bells: Mutex<Bells>,
    counters: Mutex<Counters>,
    /// The guest was told that the drive is gone.
    told: AtomicBool,
    watch: Option<JoinHandle<()>>,
    /// Disconnected once the server has closed the connection.
    ended: Mutex<Receiver<()>>,
}

impl RemoteHostSide {
    fn new(
        channel: Channel,
        attached: Attached,
        (doorbells, events): (OwnedFd, OwnedFd),
        socket: &Path,
        threads: &Threads,
    ) -> io::Result<Self> {
        let Attached {
            id,
            facts,
            dstrd,
            vectors,
        } = attached;
        let doorbells = DoorbellPage::of_file(doorbells, dstrd, facts.queue_pairs)?;
        let watched = channel.stream().try_clone()?;
        let link = Arc::new(Link {
            connection: Mutex::new(Connection::Open(channel)),
            events: Arc::new(eventfd::take(events)?),
            socket: socket.to_owned(),
        });
        let window = DmaWindow::new(Arc::new(IovaSpace::software()));
        let vector = |number| {
            let link = link.clone();
            InterruptVector::linked(Box::new(RemoteVector { number, link }))
        };
        let shared = SharedParts {
            doorbells: Arc::new(doorbells),
            events: link.events.clone(),
            memory: window.memory(),
            vectors: (0..vectors).map(vector).collect(),
        };
        let watcher = link.clone();
        let (ending, ended) = mpsc::channel();
        let work = move || watch(&watched, &watcher, ending);
        let watch = threads.spawn("nvme-server", Box::new(work))?;
        Ok(Self {
            id,
            link,
            facts,
            shared,
            window,
            bells: Mutex::default(),
            counters: Mutex::default(),
            told: AtomicBool::new(false),
            watch: Some(watch),
            ended: Mutex::new(ended),
        })
    }

    /// Returns the id of the lease.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }

    fn ask<T: DeserializeOwned>(&self, request: &Request) -> Result<T, Lost> {
        self.link.ask(request, None)
    }

    /// Asks for what cannot fail. Without a server there is nothing to do it to.
    fn tell(&self, request: &Request) {
        // The link has reported the loss.
        let _ = self.ask::<()>(request);
    }

    fn ask_io<T: DeserializeOwned>(&self, request: &Request) -> io::Result<T> {
        let outcome: Outcome<T> = self.ask(request)?;
        outcome.map_err(|failed| failed.0)
    }

    fn ask_of_queue(&self, qid: QueueId, request: &Request) -> Result<(), QueueError> {
        self.ask(request).unwrap_or_else(|lost: Lost| {
            let source = lost.into();
            Err(QueueError::Host { qid, source })
        })
    }

    /// Asks for an end of what the queues do. A server that is gone does nothing any more.
    fn ask_to_rest(&self, request: &Request) -> Result<(), QueueError> {
        match self.ask(request) {
            Ok(result) => result,
            Err(Lost) if self.is_over() => Ok(()),
            Err(Lost) => Err(QueueError::Timeout(QueueId::ADMIN)),
        }
    }

    fn ask_of_state<T: DeserializeOwned>(&self, request: &Request) -> Result<T, StateError> {
        self.ask(request).unwrap_or_else(|lost: Lost| {
            let source = lost.into();
            Err(StateError::Unreachable { source })
        })
    }

    /// Returns whether the server has ended what it did for the function.
    fn is_over(&self) -> bool {
        matches!(*self.link.connection(), Connection::Closed)
    }

    fn bells(&self) -> MutexGuard<'_, Bells> {
        // Each change is complete before anything can panic.
        self.bells.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks for the doorbells anew, after the queues changed.
    fn renew_doorbells(&self) -> IoDoorbells {
        let mut bells = self.bells();
        bells.doorbells = self.doorbells(&mut bells.by_number).unwrap_or_default();
        bells.doorbells.clone()
    }

    fn doorbells(&self, bells: &mut BTreeMap<u64, Arc<EventFd>>) -> Option<IoDoorbells> {
        let answer = self.link.ask_for_more(&Request::IoDoorbells, None);
        let (doorbells, descriptors): (Doorbells, _) = answer.ok()?;
        let Doorbells {
            are_buffered,
            are_silent,
            bells: named,
            new_bells,
        } = doorbells;
        for (number, descriptor) in new_bells.into_iter().zip(descriptors) {
            match eventfd::take(descriptor) {
                Ok(bell) => drop(bells.insert(number, Arc::new(bell))),
                Err(error) => log::error!("The drive server sent a bell that is none: {error}"),
            }
        }
        bells.retain(|number, _| named.iter().any(|(_, other)| other == number));
        let waker = |(doorbell, number)| {
            let bell: &Arc<EventFd> = bells.get(&number)?;
            Some((doorbell, DoorbellWaker::from(bell.clone())))
        };
        Some(IoDoorbells {
            are_buffered,
            are_silent,
            wakers: named.into_iter().filter_map(waker).collect(),
        })
    }

    fn map_there(&self, memory: &MemoryRegion) -> Result<(), DmaError> {
        let MemoryRegion {
            gpa,
            len,
            ref fd,
            offset,
            readable,
            writable,
        } = *memory;
        let request = Request::Map(Region {
            gpa,
            len,
            offset,
            readable,
            writable,
        });
        let result = self.link.ask(&request, Some(fd));
        result.unwrap_or_else(|lost: Lost| {
            let source = lost.into();
            Err(DmaError::Map { gpa, len, source })
        })
    }
}

impl Drop for RemoteHostSide {
    fn drop(&mut self) {
        let mut connection = self.link.connection();
        if let Connection::Open(channel) = &*connection {
            // The server ends the lease, and closes the connection when it has: then the drive is free.
            let _ = channel.stream().shutdown(Shutdown::Write);
            // The watch sees it: a sandboxed vCPU that takes the function out may not.
            let ended = self.ended.get_mut().unwrap_or_else(PoisonError::into_inner);
            let _ = ended.recv_timeout(END_PATIENCE);
            let _ = channel.stream().shutdown(Shutdown::Both);
            *connection = Connection::Closed;
        }
        drop(connection);
        if let Some(watch) = self.watch.take()
            && watch.join().is_err()
        {
            log::error!("The watch of a drive server panicked");
        }
    }
}

/// Waits until the server closes the connection, while nothing else may be waiting for it.
fn watch(stream: &UnixStream, link: &Link, ending: Sender<()>) {
    await_end(stream);
    drop(ending);
    let mut connection = link.connection();
    if matches!(*connection, Connection::Open(_)) {
        link.lose(&mut connection, &ChannelError::Closed);
    }
}

/// Waits until the other side closes a connection.
fn await_end(stream: &UnixStream) {
    let wait = || {
        let epoll = Epoll::new()?;
        let end = EpollEvent::new(EventSet::READ_HANG_UP | EventSet::HANG_UP, 0);
        epoll.ctl(ControlOperation::Add, stream.as_raw_fd(), end)?;
        loop {
            match epoll.wait(-1, &mut [EpollEvent::default()]) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                result => return result,
            }
        }
    };
    if let Err(error) = wait() {
        log::error!("Cannot wait for the end of a drive server: {error}");
    }
}

impl HostSide for RemoteHostSide {
    fn facts(&self) -> LeaseFacts {
        self.facts.clone()
    }

    fn shared(&self) -> SharedParts {
        self.shared.clone()
    }

    fn status(&self) -> LeaseStatus {
        self.ask(&Request::Status).unwrap_or(LeaseStatus {
            blocks: self.facts.namespace.blocks,
            used: 0,
            is_backed: false,
            is_gone: true,
        })
    }

    fn damage(&self) -> Damage {
        self.ask(&Request::Damage).unwrap_or_default()
    }

    fn smart_health(&self) -> io::Result<Option<SmartHealth>> {
        let page: Option<Smart> = self.ask_io(&Request::SmartHealth)?;
        Ok(page.and_then(|Smart(bytes)| SmartHealth::read_from_bytes(&bytes).ok()))
    }

    fn changed_zones(&self) -> Option<ChangedZones> {
        match self.facts.namespace.format {
            NamespaceFormat::Zones(_) => self.ask(&Request::ChangedZones).ok()?,
            NamespaceFormat::Blocks | NamespaceFormat::Keys(_) => None,
        }
    }

    fn forget_changed_zones(&self, told: &ChangedZones) {
        self.tell(&Request::ForgetChangedZones(told.clone()));
    }

    fn counters(&self) -> Counters {
        let mut last = self.counters.lock().unwrap_or_else(PoisonError::into_inner);
        if let Ok(counters) = self.ask(&Request::Counters) {
            *last = counters;
        }
        *last
    }

    fn commands(&self) -> u64 {
        self.ask(&Request::Commands).unwrap_or_default()
    }

    fn stats(&self) -> AttachmentStats {
        let namespace = &self.facts.namespace;
        self.ask(&Request::Stats)
            .unwrap_or_else(|_| AttachmentStats {
                id: self.id.clone(),
                model: namespace.model.clone(),
                serial: namespace.serial.clone(),
                capacity_bytes: namespace.blocks << namespace.lba_shift,
                doorbells: self.facts.doorbells.to_string(),
                queue_pairs: None,
                queues: Vec::new(),
            })
    }

    fn take_events(&self) -> Vec<Event> {
        if let Ok(events) = self.ask(&Request::TakeEvents) {
            return events;
        }
        // Nothing to read is no error.
        let _ = self.link.events.read();
        match self.told.swap(true, Ordering::Relaxed) {
            true => Vec::new(),
            false => vec![
                // Nobody completes the commands that were taken.
                Event::QueueFailed {
                    qid: QueueId::ADMIN,
                    reason: QueueFailure::HostQueue,
                },
                Event::Drive(DriveEvent::Gone),
            ],
        }
    }

    fn map(&self, memory: MemoryRegion) -> Result<(), DmaError> {
        self.map_there(&memory)?;
        let (gpa, len) = (memory.gpa, memory.len);
        self.window.map(memory).inspect_err(|_| {
            // A region is mapped on both sides, or on neither.
            let _ = self.ask::<Result<u64, DmaError>>(&Request::Unmap { gpa, len });
        })
    }

    fn map_held(&self, memory: &HeldMemory) -> Result<(), DmaError> {
        let regions = memory.regions().map_err(|source| {
            let (gpa, len) = (Gpa(0), u64::MAX);
            DmaError::Map { gpa, len, source }
        })?;
        regions.into_iter().try_for_each(|region| self.map(region))
    }

    fn unmap(&self, gpa: Gpa, len: u64) -> Result<u64, DmaError> {
        let answer: Result<Result<u64, DmaError>, Lost> = self.ask(&Request::Unmap { gpa, len });
        match answer {
            Ok(result) => drop(result?),
            Err(Lost) if self.is_over() => {}
            // The server may still use it.
            Err(Lost) => return Err(DmaError::Busy { gpa, len }),
        }
        self.window.unmap(gpa, len)
    }

    fn start_dirty_log(&self) -> Result<(), DmaError> {
        let answer: Result<Result<(), DmaError>, Lost> = self.ask(&Request::StartDirtyLog);
        answer.unwrap_or(Err(DmaError::NotLogged))?;
        self.window.start_dirty_log()
    }

    fn take_dirty_pages(&self) -> Result<Vec<DirtyRange>, DmaError> {
        let mut ranges = self.window.take_dirty_pages()?;
        loop {
            let answer: Result<Result<DirtyPages, DmaError>, Lost> =
                self.ask(&Request::TakeDirtyPages);
            let pages = answer.unwrap_or(Err(DmaError::NotLogged))?;
            ranges.extend(pages.ranges);
            if !pages.more {
                return Ok(ranges);
            }
        }
    }

    fn stop_dirty_log(&self) {
        self.tell(&Request::StopDirtyLog);
        self.window.stop_dirty_log();
    }

    fn create_cq(&self, config: CqConfig) -> Result<(), QueueError> {
        self.ask_of_queue(config.qid, &Request::CreateCq(config))?;
        self.renew_doorbells();
        Ok(())
    }

    fn create_sq(&self, config: SqConfig) -> Result<(), QueueError> {
        self.ask_of_queue(config.qid, &Request::CreateSq(config))?;
        self.renew_doorbells();
        Ok(())
    }

    fn delete_sq(&self, qid: QueueId) -> Result<(), QueueError> {
        let result = self.ask_of_queue(qid, &Request::DeleteSq(qid));
        self.renew_doorbells();
        result
    }

    fn delete_cq(&self, qid: QueueId) -> Result<(), QueueError> {
        let result = self.ask_of_queue(qid, &Request::DeleteCq(qid));
        self.renew_doorbells();
        result
    }

    fn set_coalescing(&self, coalescing: CoalescingConfig) {
        self.tell(&Request::SetCoalescing(coalescing));
    }

    fn set_rates(&self, rates: RateLimits) {
        self.tell(&Request::SetRates(rates));
    }

    fn ring(&self, doorbell: Doorbell, value: u32) -> bool {
        let bells = self.bells();
        let wakers = &bells.doorbells.wakers;
        let Some((_, waker)) = wakers.iter().find(|(other, _)| *other == doorbell) else {
            return false;
        };
        self.shared.doorbells.store(doorbell, value);
        // A counter that is full wakes the poller as well.
        let _ = waker.eventfd().write(1);
        true
    }

    fn io_doorbells(&self) -> IoDoorbells {
        self.renew_doorbells()
    }

    fn set_doorbell_buffer(&self, buffer: DoorbellBuffer) -> Result<(), QueueError> {
        let request = Request::SetDoorbellBuffer(buffer);
        let result = self.ask_of_queue(QueueId::ADMIN, &request);
        self.renew_doorbells();
        result
    }

    fn begin_silent_doorbells(&self) -> io::Result<()> {
        self.ask_io(&Request::BeginSilentDoorbells)
    }

    fn end_silent_doorbells(&self) {
        self.tell(&Request::EndSilentDoorbells);
    }

    fn watch_admin_doorbells(&self) -> io::Result<()> {
        self.ask_io(&Request::WatchAdminDoorbells)
    }

    fn begin_anew(&self) {
        self.tell(&Request::BeginAnew);
    }

    fn pause(&self) -> Result<(), QueueError> {
        self.ask_to_rest(&Request::Pause)
    }

    fn resume(&self) {
        self.tell(&Request::Resume);
        self.renew_doorbells();
    }

    fn revoke(&self) -> Result<(), QueueError> {
        self.ask_to_rest(&Request::Revoke)
    }

    fn reset_within(&self, time: Duration) -> Result<(), QueueError> {
        let result = self.ask_to_rest(&Request::ResetWithin(time));
        self.renew_doorbells();
        if self.is_over() {
            // Nobody else sets them to zero.
            self.shared.doorbells.clear();
        }
        result
    }

    fn flush_within(&self, time: Duration) -> io::Result<()> {
        self.ask_io(&Request::FlushWithin(time))
    }

    fn save(&self) -> Result<AttachmentState, StateError> {
        self.ask_of_state(&Request::Save)
    }

    fn check(&self, state: &AttachmentState) -> Result<(), StateError> {
        self.ask_of_state(&Request::Check(Box::new(state.clone())))
    }

    fn restore(&self, state: &AttachmentState) -> Result<(), StateError> {
        let result = self.ask_of_state(&Request::Restore(Box::new(state.clone())));
        self.renew_doorbells();
        result
    }
}
