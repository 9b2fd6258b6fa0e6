//! The VMM's side: a [`ControllerBackend`] whose lease, DMA window, queues and pollers are in the server.

use std::collections::BTreeMap;
use std::io;
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use nvme_guest::backend::{CoalescingConfig, DoorbellWaker, IoDoorbells};
use nvme_guest::dma::DetachedGuestMemory;
use nvme_guest::doorbell::MAX_QUEUE_PAIRS;
use nvme_guest::host::{LeaseDamage, UnreportedChanges};
use nvme_guest::inflight::ExitCounter;
use nvme_guest::iova::IovaSpace;
use nvme_guest::rate_limit::RateLimits;
use nvme_guest::stats::MemoryStats;
use nvme_guest::threads::ThreadSpawner;
use nvme_guest::{
    BackendEvent, BackendState, BackendStateError, BackendStats, ControllerBackend, CqConfig,
    DirtyRange, DmaError, DmaWindow, DoorbellBuffer, DoorbellPage, Gpa, InterruptVector,
    IoQueueEvent, LeaseBackend, LeaseCounters, LeaseFacts, LeaseStatus, LifecycleBackend,
    MemoryBackend, MemoryRegion, PersistedQueues, QueueBackend, QueueError, SharedBackendParts,
    SqConfig, VmmMapping,
};
use nvme_mpt_memory::deadline::DRAIN_DEADLINE;
use nvme_mpt_memory::eventfd;
use nvme_mpt_memory::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use nvme_mpt_memory::sync::{JoinHandle, Mutex, MutexGuard};
use nvme_spec::ids::QueueId;
use nvme_spec::log::SmartHealth;
use nvme_spec::registers::Doorbell;
use serde::de::DeserializeOwned;
use vmm_sys_util::eventfd::EventFd;
use zerocopy::FromBytes;

use crate::DESCRIPTORS_MAX;
use crate::attach::{
    ANSWER_TIMEOUT, GrantedLease, LeaseAttachError, OPENING_TIMEOUT, ServerDiscovery, request_lease,
};
use crate::call::{self, BackendCall};
use crate::message::{AttachedLease, BackendResult, IoDoorbellsReply, SmartHealthBytes};
use crate::remote_vector::RemoteVector;
use crate::server_link::{DirtyLog, LinkState, RegionHistory, ServerLink, ServerLost, map_call};
use crate::server_sockets;
use crate::server_watch::{AttachedServer, ServerWatch};
use crate::socket::Stream;

/// Attaches a function to the server at the other end of `stream`; returns `None` if this server does not have the
/// function's drive. If this server is lost, the function does not wait for another server: all its commands fail.
///
/// The option string must have absolute paths. The stream must be blocking. `socket` is its name in messages.
///
/// # Errors
/// See [`LeaseAttachError`].
pub fn attach_stream(
    stream: Stream,
    socket: &Path,
    options: &str,
    threads: &ThreadSpawner,
) -> Result<Option<RemoteBackend>, LeaseAttachError> {
    request_lease(stream, socket, options, &[], OPENING_TIMEOUT)?
        .map(|given| RemoteBackend::new(given, None, threads))
        .transpose()
}

/// Attaches to the server that has the drive of `options`; returns `None` if no server has this drive. If that server is
/// lost later, the function waits at most `timeout` for another server; without limit if `timeout` is `None`.
///
/// A server that cannot be reached is skipped with a warning. If the skipped server has the drive, this returns `None`, and
/// the caller's own attempt to open the drive fails.
///
/// # Errors
/// [`LeaseAttachError::Refused`], [`LeaseAttachError::SetUp`].
pub fn attach_any_server(
    state_dir: &Path,
    options: &str,
    timeout: Option<Duration>,
    threads: &ThreadSpawner,
) -> Result<Option<RemoteBackend>, LeaseAttachError> {
    let Some(given) = server_sockets::find_lease(state_dir, options, &[], OPENING_TIMEOUT)? else {
        return Ok(None);
    };
    let reach = (timeout != Some(Duration::ZERO)).then(|| ServerDiscovery {
        state_dir: state_dir.to_owned(),
        options: options.to_owned(),
        timeout,
    });
    RemoteBackend::new(given, reach, threads).map(Some)
}

/// Returns whether a server has the drive of `options`, by the same search as [`attach_any_server`]. No lease is created. A
/// server that cannot be reached counts as a server without the drive.
#[must_use]
pub fn is_served(state_dir: &Path, options: &str) -> bool {
    server_sockets::has_server(state_dir, options, OPENING_TIMEOUT)
}

/// Eventfds that wake the server's pollers, and the doorbells of the queues that each poller serves.
#[derive(Debug, Default)]
struct RemoteWakers {
    by_number: BTreeMap<u64, Arc<EventFd>>,
    doorbells: IoDoorbells,
}

/// Sums of counters over all servers of the function. Each server counts from zero. Commands that a lost server counted
/// after its last report are missing.
#[derive(Debug, Default)]
struct CumulativeCounters {
    /// Number of the server whose counters are `last`.
    server: u64,
    before: LeaseCounters,
    last: LeaseCounters,
}

impl CumulativeCounters {
    fn update(&mut self, server: u64, counters: LeaseCounters) {
        if self.server != server {
            self.server = server;
            self.before = self.before + self.last;
        }
        self.last = counters;
    }
}

/// Back end in another process, a drive server: sends the function's requests to this server.
///
/// If the server is lost, the function waits for another server with the drive, up to the configured timeout. Meanwhile, the
/// guest's I/O is delayed. After the timeout, every command of the guest fails as on a removed drive.
#[derive(Debug)]
pub struct RemoteBackend {
    id: String,
    link: Arc<ServerLink>,
    facts: LeaseFacts,
    shared: SharedBackendParts,
    /// The VM's memory as mapped in this process. Admin commands access it.
    window: DmaWindow,
    wakers: Arc<Mutex<RemoteWakers>>,
    counters: Mutex<CumulativeCounters>,
    /// Counter of the doorbell writes that exit to the VMM, which the server's statistics read. `None` if the server's doorbell
    /// file has no place for this counter.
    exit_counter: Option<ExitCounter>,
    watch_thread: Option<JoinHandle<()>>,
    /// Dropped to end the watch thread.
    stop: Option<Sender<()>>,
    /// Disconnected once the watch thread has ended.
    watch_ended: Mutex<Receiver<()>>,
}

impl RemoteBackend {
    pub(crate) fn new(
        given: GrantedLease,
        reach: Option<ServerDiscovery>,
        threads: &ThreadSpawner,
    ) -> Result<Self, LeaseAttachError> {
        let socket = given.socket.clone();
        Self::set_up(given, reach, threads)
            .map_err(|source| LeaseAttachError::SetUp { socket, source })
    }

    fn set_up(
        given: GrantedLease,
        reach: Option<ServerDiscovery>,
        threads: &ThreadSpawner,
    ) -> io::Result<Self> {
        let GrantedLease {
            channel,
            attached,
            parts: [doorbells, inflight, events],
            signs,
            socket,
        } = given;
        let channel = Arc::new(channel);
        let AttachedLease {
            ref id,
            ref facts,
            dstrd,
            vectors,
        } = attached;
        let (id, facts) = (id.clone(), facts.clone());
        let doorbells = DoorbellPage::from_file(doorbells, dstrd, facts.queue_pairs)?;
        let server = AttachedServer {
            channel: channel.clone(),
            signs,
        };
        let exits = ExitCounter::from_file(inflight.as_fd()).ok();
        let events = Arc::new(eventfd::from_client(events)?);
        let link = ServerLink::new(
            channel,
            socket,
            events,
            vectors,
            facts.namespace.blocks,
            reach.is_some(),
        );
        let window = DmaWindow::new(Arc::new(IovaSpace::software()));
        let vector = |number| {
            let link = link.clone();
            InterruptVector::with_link(Box::new(RemoteVector { number, link }))
        };
        let shared = SharedBackendParts {
            doorbells: Arc::new(doorbells),
            events: link.events.clone(),
            memory: window.memory(),
            vectors: (0..vectors).map(vector).collect(),
            inflight: None,
        };
        let wakers = Arc::<Mutex<RemoteWakers>>::default();
        let (ending, ended) = mpsc::channel();
        let (stop, stopped) = mpsc::channel();
        let watch = ServerWatch {
            link: link.clone(),
            stopped,
            discovery: reach,
            promised: attached,
            doorbells: shared.doorbells.clone(),
            inflight,
            memory: shared.memory.clone(),
            drop_wakers: {
                let wakers = wakers.clone();
                // The queues themselves stay: the guest believes that they exist until it resets its controller.
                Box::new(move || lock(&wakers).by_number.clear())
            },
        };
        let work = move || {
            watch.run(server);
            drop(ending);
        };
        let watch = threads.spawn("nvme-server", Box::new(work))?;
        Ok(Self {
            id,
            link,
            facts,
            shared,
            window,
            wakers,
            counters: Mutex::default(),
            exit_counter: exits,
            watch_thread: Some(watch),
            stop: Some(stop),
            watch_ended: Mutex::new(ended),
        })
    }

    /// Returns the id of the lease.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }

    fn call<T: DeserializeOwned>(&self, call: BackendCall<T>) -> Result<T, ServerLost> {
        self.link.call(call, None)
    }

    /// Sends a request whose reply cannot be an error. Does nothing if the server is lost.
    fn call_ignoring_loss(&self, call: BackendCall<()>) {
        // The link has already logged the loss.
        let _ = self.call(call);
    }

    fn call_io<T: DeserializeOwned>(&self, call: BackendCall<BackendResult<T>>) -> io::Result<T> {
        self.call_io_locked(&mut self.link.state(), call)
    }

    /// Sends a request like [`Self::call_io`], while the caller holds the lock. So the caller can record the answer before
    /// another server connects and gets the record.
    fn call_io_locked<T: DeserializeOwned>(
        &self,
        state: &mut LinkState,
        call: BackendCall<BackendResult<T>>,
    ) -> io::Result<T> {
        let outcome = self.link.call_locked(state, call, None)?;
        outcome.map_err(|failed| failed.0)
    }

    /// Sends a change of the queues, and records the change for the next server, both under one lock. If the server does not
    /// answer, the change is not recorded.
    fn change_queues(
        &self,
        qid: QueueId,
        call: BackendCall<Result<(), QueueError>>,
        note: impl FnOnce(&mut PersistedQueues),
    ) -> Result<(), QueueError> {
        let mut state = self.link.state();
        let answer = self.link.call_locked(&mut state, call, None);
        let result = answer.unwrap_or_else(|lost| {
            let source = lost.into();
            Err(QueueError::Host { qid, source })
        });
        if result.is_ok() {
            note(&mut state.settings.queues);
        }
        drop(state);
        self.refresh_doorbells();
        result
    }

    /// Sends a request that stops the function's queues. If the server is lost, waits until the lost server has ended its
    /// work for the function.
    fn call_quiesce(
        &self,
        call: BackendCall<Result<(), QueueError>>,
        time: Duration,
    ) -> Result<(), QueueError> {
        match self.call(call) {
            Ok(result) => result,
            Err(ServerLost) if self.link.wait_until_ended(time) => Ok(()),
            Err(ServerLost) => Err(QueueError::Timeout(QueueId::ADMIN)),
        }
    }

    fn call_state<T: DeserializeOwned>(
        &self,
        call: BackendCall<Result<T, BackendStateError>>,
    ) -> Result<T, BackendStateError> {
        self.call(call).unwrap_or_else(|lost| {
            let source = lost.into();
            Err(BackendStateError::Unreachable { source })
        })
    }

    /// Returns whether the function has lost its last server, which has ended all its work for the function.
    fn has_ended(&self) -> bool {
        self.link.state().has_ended()
    }

    fn wakers(&self) -> MutexGuard<'_, RemoteWakers> {
        lock(&self.wakers)
    }

    /// Returns all memory regions that the drive may write to.
    fn writable_memory(&self) -> Result<Vec<DirtyRange>, DmaError> {
        let regions = self.shared.memory.detach().regions();
        let regions = regions.map_err(|_| DmaError::NotLogged)?;
        let writable = regions.into_iter().filter(|region| region.writable);
        let range = |MemoryRegion { gpa, len, .. }| DirtyRange { gpa, len };
        Ok(writable.map(range).collect())
    }

    /// Asks the server again for the doorbells, whose wakers change with the queues.
    fn refresh_doorbells(&self) -> IoDoorbells {
        let mut wakers = self.wakers();
        let wakers = &mut *wakers;
        for _ in 0..=usize::from(MAX_QUEUE_PAIRS) / DESCRIPTORS_MAX {
            // Without a server, the guest still sees its queues, so the doorbells stay.
            let Some((doorbells, new)) = self.fetch_doorbells(&mut wakers.by_number) else {
                break;
            };
            wakers.doorbells = doorbells;
            if new < DESCRIPTORS_MAX {
                break;
            }
        }
        wakers.doorbells.clone()
    }

    /// Asks the server once for the doorbells. Returns them, and the number of wakers that the server sent for the first time.
    fn fetch_doorbells(
        &self,
        wakers: &mut BTreeMap<u64, Arc<EventFd>>,
    ) -> Option<(IoDoorbells, usize)> {
        let mut state = self.link.state();
        let answer = (self.link).call_with_descriptors(&mut state, call::io_doorbells(), None);
        let (doorbells, descriptors) = answer.ok()?;
        let IoDoorbellsReply {
            are_buffered,
            are_untrapped,
            wakers: named,
            new_wakers,
        } = doorbells;
        let new = new_wakers.len();
        for (number, descriptor) in new_wakers.into_iter().zip(descriptors) {
            match eventfd::from_client(descriptor) {
                Ok(waker) => {
                    // The guest may have written a doorbell a moment ago, for which only the previous server's poller was
                    // woken. A full counter wakes the poller as well.
                    let _ = eventfd::signal(&waker);
                    wakers.insert(number, Arc::new(waker));
                }
                Err(error) => log::error!("The drive server sent an invalid waker: {error}"),
            }
        }
        wakers.retain(|number, _| named.iter().any(|(_, other)| other == number));
        let waker = |(doorbell, number)| {
            let waker: &Arc<EventFd> = wakers.get(&number)?;
            Some((doorbell, DoorbellWaker::from(waker.clone())))
        };
        let doorbells = IoDoorbells {
            are_buffered,
            are_untrapped,
            wakers: named.into_iter().filter_map(waker).collect(),
        };
        Some((doorbells, new))
    }
}

impl Drop for RemoteBackend {
    fn drop(&mut self) {
        drop(self.stop.take());
        let channel = self.link.state().disconnect();
        if let Some(channel) = &channel {
            // The server ends the lease, which frees the drive, and then closes the connection.
            let _ = channel.stream().shutdown(Shutdown::Write);
        }
        // Wait until the watch thread sees the closed connection: this may be a sandboxed vCPU thread, which may not wait
        // for it. The watch thread may also be connecting to another server.
        let ended = self
            .watch_ended
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner);
        if ended.recv_timeout(ANSWER_TIMEOUT) == Err(RecvTimeoutError::Timeout) {
            log::error!("A drive server does not end its lease in time: no longer waiting for it");
            return;
        }
        if let Some(watch) = self.watch_thread.take()
            && watch.join().is_err()
        {
            log::error!("The watch of a drive server panicked");
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic cannot leave a partial change.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl RemoteBackend {
    /// Maps memory in the server and in this process, or in neither. If the server is lost, the region is mapped in this
    /// process, and the next server gets it when it connects.
    fn map_on_both(
        &self,
        memory: MemoryRegion,
        own: Option<VmmMapping>,
        had: RegionHistory,
    ) -> Result<(), DmaError> {
        let mut state = self.link.state();
        let call = map_call(&memory, had);
        let answer = (self.link).call_locked(&mut state, call, Some(&memory.fd));
        let there = match answer {
            Ok(result) => result.map(|()| true)?,
            Err(ServerLost) if state.should_reconnect() => false,
            Err(lost) => {
                let (gpa, len, source) = (memory.gpa, memory.len, lost.into());
                return Err(DmaError::Map { gpa, len, source });
            }
        };
        let (gpa, len) = (memory.gpa, memory.len);
        let mapped = match own {
            Some(own) => self.window.map_in_place(memory, own),
            None => self.window.map_checked(memory),
        };
        if mapped.is_ok() && !there {
            state.settings.new_regions.insert((gpa.0, len));
        }
        mapped.inspect_err(|_| {
            if there {
                let unmap = call::unmap_within(gpa, len, DRAIN_DEADLINE);
                let _ = self.link.call_locked(&mut state, unmap, None);
            }
        })
    }
}

impl ControllerBackend for RemoteBackend {
    fn facts(&self) -> LeaseFacts {
        self.facts.clone()
    }

    fn shared_parts(&self) -> SharedBackendParts {
        self.shared.clone()
    }

    fn is_disconnected(&self) -> bool {
        self.link.state().is_disconnected()
    }

    fn successor_count(&self) -> u64 {
        self.link.state().successors
    }

    fn take_events(&self) -> Vec<IoQueueEvent> {
        // Must precede reading the events: each later event signals again. No signal is no error.
        let _ = self.link.events.read();
        // Older events first: the next server's events are read after the loss of the previous one.
        let mut events = self.link.state().take_local_events();
        events.extend(self.call(call::take_events()).into_iter().flatten());
        events.extend(self.link.state().take_local_events());
        if events.contains(&IoQueueEvent::HostSide(BackendEvent::BackWithQueues)) {
            self.refresh_doorbells();
        }
        events
    }

    fn reset_connection(&self) {
        self.call_ignoring_loss(call::reset_connection());
    }
}

impl LeaseBackend for RemoteBackend {
    fn status(&self) -> LeaseStatus {
        let mut state = self.link.state();
        match self.link.call_locked(&mut state, call::status(), None) {
            Ok(status) => {
                if status.is_backed {
                    state.blocks = status.blocks;
                }
                status
            }
            Err(ServerLost) => {
                let waits = state.should_reconnect();
                LeaseStatus {
                    blocks: state.blocks,
                    used: 0,
                    is_backed: waits,
                    is_gone: !waits,
                }
            }
        }
    }

    fn check_damage(&self) -> LeaseDamage {
        self.call(call::check_damage()).unwrap_or_default()
    }

    fn smart_health(&self) -> io::Result<Option<SmartHealth>> {
        let page = self.call_io(call::smart_health())?;
        Ok(page.and_then(|SmartHealthBytes(bytes)| SmartHealth::read_from_bytes(&bytes).ok()))
    }

    fn changes(&self) -> Option<UnreportedChanges> {
        let own = self.facts.namespace.command_sets.native();
        own.change_list.as_ref()?;
        self.call(call::changes()).ok()?
    }

    fn remove_changes(&self, reported: &UnreportedChanges) {
        self.call_ignoring_loss(call::remove_changes(reported.clone()));
    }

    fn counters(&self) -> LeaseCounters {
        let mut counted = lock(&self.counters);
        let mut state = self.link.state();
        let answer = (self.link).call_locked(&mut state, call::counters(), None);
        if let Ok(counters) = answer {
            counted.update(state.successors, counters);
        }
        counted.before + counted.last
    }

    fn completed_commands(&self) -> u64 {
        self.call(call::completed_commands()).unwrap_or_default()
    }

    fn stats(&self) -> BackendStats {
        let namespace = &self.facts.namespace;
        self.call(call::stats()).unwrap_or_else(|_| BackendStats {
            id: self.id.clone(),
            model: namespace.model.clone(),
            serial: namespace.serial.clone(),
            capacity_bytes: namespace.blocks << namespace.lba_shift,
            doorbells: self.facts.doorbells.to_string(),
            queue_pairs: None,
            memory: MemoryStats::default(),
            queues: Vec::new(),
            latency: Vec::new(),
            errors: Vec::new(),
            processor_seconds: 0.0,
        })
    }

    fn flush_within(&self, time: Duration) -> io::Result<()> {
        self.call_io(call::flush_within(time))
    }
}

impl MemoryBackend for RemoteBackend {
    fn map(&self, memory: MemoryRegion) -> Result<(), DmaError> {
        self.window.check_region(&memory)?;
        self.map_on_both(memory, None, RegionHistory::New)
    }

    fn map_persisted(&self, memory: MemoryRegion) -> Result<(), DmaError> {
        self.map_claimed(memory)
    }

    fn map_claimed(&self, memory: MemoryRegion) -> Result<(), DmaError> {
        self.window.check_region(&memory)?;
        self.map_on_both(memory, None, RegionHistory::Kept)
    }

    fn map_in_place(&self, memory: MemoryRegion, own: VmmMapping) -> Result<(), DmaError> {
        // The server maps the whole file, in which pages may still be missing during a restore on demand or post-copy.
        if !own.is_complete {
            let (gpa, len) = (memory.gpa, memory.len);
            return Err(DmaError::Incomplete { gpa, len });
        }
        self.map_on_both(memory, Some(own), RegionHistory::New)
    }

    fn check_memory(&self) -> Result<(), DmaError> {
        self.window.check_complete()
    }

    fn map_detached(&self, memory: &DetachedGuestMemory) -> Result<(), DmaError> {
        let regions = memory.regions().map_err(|source| {
            let (gpa, len) = (Gpa(0), u64::MAX);
            DmaError::Map { gpa, len, source }
        })?;
        let mut regions = regions.into_iter();
        regions.try_for_each(|region| self.map_on_both(region, None, RegionHistory::New))
    }

    fn unmap_within(&self, gpa: Gpa, len: u64, time: Duration) -> Result<u64, DmaError> {
        // Unmaps the region in the server and in this process under one lock, so that no server connects in between. If the
        // server is ending, waits first until it has ended.
        let mut waited = false;
        loop {
            let mut state = self.link.state();
            let unmap = call::unmap_within(gpa, len, time);
            match self.link.call_locked(&mut state, unmap, None) {
                Ok(Ok(_)) => {}
                // The server has unmapped the region for new commands. Only commands in flight still use its memory.
                Ok(Err(busy @ DmaError::Busy { .. })) => {
                    let _ = self.window.unmap_within(gpa, len, time);
                    return Err(busy);
                }
                Ok(Err(refused)) => return Err(refused),
                Err(ServerLost) if state.has_ended() => {}
                Err(ServerLost) if !waited => {
                    drop(state);
                    waited = true;
                    self.link.wait_until_ended(time);
                    continue;
                }
                // The lost server may still use the memory.
                Err(ServerLost) => return Err(DmaError::Busy { gpa, len }),
            }
            let unmapped = self.window.unmap_within(gpa, len, time);
            if matches!(unmapped, Ok(_) | Err(DmaError::Busy { .. })) {
                state.settings.forget_regions(gpa, len);
            }
            return unmapped;
        }
    }

    fn start_dirty_log(&self) -> Result<(), DmaError> {
        // A server that reconnects later gets the request from the recorded settings.
        let mut state = self.link.state();
        let answer = (self.link).call_locked(&mut state, call::start_dirty_log(), None);
        let log = match answer {
            Ok(result) => result.map(|()| DirtyLog::Complete)?,
            // A server that is ending may still write to the function's memory.
            Err(ServerLost) if state.should_reconnect() => DirtyLog::Missed,
            Err(ServerLost) => return Err(DmaError::NotLogged),
        };
        self.window.start_dirty_log()?;
        state.settings.dirty_log = Some(log);
        Ok(())
    }

    fn take_dirty_pages(&self) -> Result<Vec<DirtyRange>, DmaError> {
        let mut ranges = self.window.take_dirty_pages()?;
        loop {
            let pages = match self.call(call::take_dirty_pages()) {
                Ok(result) => result?,
                // The lost server's dirty pages are lost with it.
                Err(ServerLost) if self.link.state().should_reconnect() => {
                    return self.writable_memory();
                }
                Err(ServerLost) => return Err(DmaError::NotLogged),
            };
            ranges.extend(pages.ranges);
            if !pages.more {
                break;
            }
        }
        // Checked last: the server that answered may have connected a moment ago, after dirty pages were lost.
        match self.link.state().settings.take_missed_dirty_log() {
            true => self.writable_memory(),
            false => Ok(ranges),
        }
    }

    fn stop_dirty_log(&self) {
        // Set first, so that a server that connects now is not asked for a dirty log.
        self.link.state().settings.dirty_log = None;
        self.call_ignoring_loss(call::stop_dirty_log());
        self.window.stop_dirty_log();
    }
}

impl QueueBackend for RemoteBackend {
    fn create_cq(&self, config: CqConfig) -> Result<(), QueueError> {
        self.change_queues(config.qid, call::create_cq(config), |queues| {
            queues.cqs.push(config);
        })
    }

    fn create_sq_within(&self, config: SqConfig, time: Duration) -> Result<(), QueueError> {
        let call = call::create_sq_within(config, time);
        self.change_queues(config.qid, call, |queues| queues.sqs.push(config))
    }

    fn delete_sq_within(&self, qid: QueueId, time: Duration) -> Result<(), QueueError> {
        let call = call::delete_sq_within(qid, time);
        self.change_queues(qid, call, |queues| queues.delete_sq(qid))
    }

    fn delete_cq_within(&self, qid: QueueId, time: Duration) -> Result<(), QueueError> {
        let call = call::delete_cq_within(qid, time);
        self.change_queues(qid, call, |queues| queues.delete_cq(qid))
    }

    fn set_coalescing(&self, coalescing: CoalescingConfig) {
        self.link.state().settings.coalescing = Some(coalescing);
        self.call_ignoring_loss(call::set_coalescing(coalescing));
    }

    fn set_rate_limits(&self, rates: RateLimits) {
        self.link.state().settings.rates = Some(rates);
        self.call_ignoring_loss(call::set_rate_limits(rates));
    }

    fn ring(&self, doorbell: Doorbell, value: u32) -> bool {
        let wakers = self.wakers();
        let wakers = &wakers.doorbells.wakers;
        let waker = wakers.iter().find(|(other, _)| *other == doorbell);
        // A lost server may not have sent the waker of this doorbell. The next server reads the doorbell when it restores
        // the queue.
        if waker.is_none() && !self.link.state().settings.queues.has_queue(doorbell) {
            return false;
        }
        self.shared.doorbells.store(doorbell, value);
        let (Doorbell::SqTail(qid) | Doorbell::CqHead(qid)) = doorbell;
        if let Some(exits) = &self.exit_counter {
            // The lock is held, so no other thread counts.
            exits.increment(qid);
        }
        if let Some((_, waker)) = waker {
            // A full counter wakes the poller as well.
            let _ = eventfd::signal(waker.eventfd());
        }
        true
    }

    fn io_doorbells(&self) -> IoDoorbells {
        self.refresh_doorbells()
    }

    fn set_doorbell_buffer_within(
        &self,
        buffer: DoorbellBuffer,
        time: Duration,
    ) -> Result<(), QueueError> {
        let call = call::set_doorbell_buffer_within(buffer, time);
        self.change_queues(QueueId::ADMIN, call, |queues| {
            queues.doorbell_buffer = Some(buffer);
        })
    }

    fn begin_untrapped_doorbells(&self) -> io::Result<()> {
        let mut state = self.link.state();
        let began = self.call_io_locked(&mut state, call::begin_untrapped_doorbells());
        // If the server was lost, the next server gets the request. If the server refused, doorbells stay trapped.
        state.settings.untrapped = began.is_ok() || state.is_disconnected();
        match state.settings.untrapped {
            true => Ok(()),
            false => began,
        }
    }

    fn end_untrapped_doorbells(&self) {
        self.link.state().settings.untrapped = false;
        self.call_ignoring_loss(call::end_untrapped_doorbells());
    }

    fn watch_admin_doorbells(&self) -> io::Result<()> {
        let mut state = self.link.state();
        let watched = self.call_io_locked(&mut state, call::watch_admin_doorbells());
        // If the server was lost, the next server gets the request. If the server refused, no doorbell is watched.
        state.settings.watches_admin = watched.is_ok() || state.is_disconnected();
        watched
    }
}

impl LifecycleBackend for RemoteBackend {
    fn pause_within(&self, time: Duration) -> Result<(), QueueError> {
        // Set first, so that a server that reconnects now restores the queues paused.
        self.link.state().settings.paused = true;
        self.call_quiesce(call::pause_within(time), time)
    }

    fn pause(&self) -> Result<(), QueueError> {
        self.link.state().settings.paused = true;
        // If the pause fails, the server resumes all queues.
        let result = self.call_quiesce(call::pause(), DRAIN_DEADLINE);
        if result.is_err() {
            self.link.state().settings.paused = false;
        }
        result
    }

    fn resume(&self) {
        self.link.state().settings.paused = false;
        self.call_ignoring_loss(call::resume());
        self.refresh_doorbells();
    }

    fn revoke(&self) -> Result<(), QueueError> {
        // Set first, so that a server that reconnects now revokes the queues as well.
        self.link.state().settings.queues.revoked = true;
        self.call_quiesce(call::revoke(), DRAIN_DEADLINE)
    }

    fn reset_within(&self, time: Duration) -> Result<(), QueueError> {
        {
            // Set first, so that a server that reconnects now restores no queues.
            let mut state = self.link.state();
            state.settings.watches_admin = false;
            state.settings.queues = PersistedQueues::default();
        }
        let result = self.call_quiesce(call::reset_within(time), time);
        self.refresh_doorbells();
        if self.has_ended() {
            // Without a server, the doorbells must be cleared here.
            self.shared.doorbells.clear();
            self.wakers().doorbells = IoDoorbells::default();
        }
        result
    }

    fn save(&self) -> Result<BackendState, BackendStateError> {
        self.call_state(call::save())
    }

    fn check_state(&self, state: &BackendState) -> Result<(), BackendStateError> {
        self.call_state(call::check_state(Box::new(state.clone())))
    }

    fn restore(&self, state: &BackendState) -> Result<(), BackendStateError> {
        let mut link = self.link.state();
        let call = call::restore(Box::new(state.clone()));
        let answer = self.link.call_locked(&mut link, call, None);
        let result = answer.unwrap_or_else(|lost| {
            let source = lost.into();
            Err(BackendStateError::Unreachable { source })
        });
        if result.is_ok() {
            link.settings.queues = PersistedQueues::from_state(state);
        }
        drop(link);
        self.refresh_doorbells();
        result
    }

    fn restore_running(&self, queues: &PersistedQueues) -> Result<(), BackendStateError> {
        self.call_state(call::restore_running(queues.clone()))
    }
}

#[cfg(all(test, not(simulation)))]
mod tests {
    use std::io::{PipeReader, PipeWriter};
    use std::os::fd::{BorrowedFd, OwnedFd};
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::process::{Child, Command, Stdio};

    use nvme_guest::backend::LeasedNamespace;
    use nvme_guest::interrupt::vector_count;
    use nvme_guest::threads::{run_alongside, start_thread};
    use nvme_guest::{AdaptivePolicies, ControllerLimits, DoorbellMode, DoorbellStride};
    use nvme_mpt::shadow::{CommandSet, NvmCommands, NvmFacts};
    use nvme_mpt_memory::memfd;
    use nvme_spec::identify::Oncs;
    use nvme_spec::ids::Nsid;
    use vmm_sys_util::eventfd::EFD_NONBLOCK;

    use super::*;
    use crate::call::BackendRequest;
    use crate::channel::{ChannelError, LeaseChannel};
    use crate::message::{AttachReply, AttachRequest, LeaseEndNotice, RemoteIoError, SIGNS};

    const QUEUE_PAIRS: u16 = 1;
    /// The error `EMFILE`.
    const NO_DESCRIPTORS: i32 = 24;

    fn facts() -> LeaseFacts {
        let limits = ControllerLimits {
            mdts: 5,
            entries_max: 64,
            commands: Oncs::default(),
            awun_z: 0,
            awupf_z: 0,
            volatile_write_cache: true,
            deallocated_reads_zeroes: false,
            sgl_descriptors_max: 0,
            no_data_bytes_max: 4096,
            dsm_range_bytes_max: 4096,
            dsm_ranges_max: 1,
            copy_bytes_max: 4096,
            copy_ranges_max: 1,
            own_bytes_max: 0,
        };
        let lba_shift = 12;
        LeaseFacts {
            namespace: LeasedNamespace {
                nsid: Nsid(1),
                lba_shift,
                blocks: 1000,
                serial: "served".into(),
                model: "a server's drive".into(),
                nguid: [1; 16],
                eui64: [2; 8],
                uuid: [3; 16],
                command_sets: NvmCommands::describe(&NvmFacts { limits, lba_shift }).into(),
            },
            limits,
            queue_pairs: QUEUE_PAIRS,
            doorbells: DoorbellMode::Trap,
            parks: true,
            thresholds: None,
            can_be_damaged: false,
            is_private: false,
            unit_blocks: None,
            policies: AdaptivePolicies::default(),
        }
    }

    /// Accepts the next connection of a function, and grants it the lease of a server that ends with its connection.
    fn grant_lease(listener: &UnixListener) -> LeaseChannel {
        let readable = EventFd::new(EFD_NONBLOCK).unwrap();
        readable.write(1).unwrap();
        let readable = eventfd::share(&readable).unwrap();
        let (hung_up, _) = io::pipe().unwrap();
        let signs = [readable.as_fd(), hung_up.as_fd()];
        grant_lease_over(listener.accept().unwrap().0, signs)
    }

    /// Grants the lease to a function. `signs` are descriptors that become readable, or hang up, when the server's process
    /// ends.
    fn grant_lease_over(stream: UnixStream, signs: [BorrowedFd<'_>; SIGNS]) -> LeaseChannel {
        let channel = LeaseChannel::new(stream).unwrap();
        let _: (AttachRequest, Vec<OwnedFd>) = channel.receive_request(None).unwrap();
        let stride = DoorbellStride::default();
        let doorbells = DoorbellPage::new(DoorbellMode::Trap, stride, QUEUE_PAIRS).unwrap();
        let inflight = memfd(c"live", 4096).unwrap();
        let events = eventfd::share(&EventFd::new(EFD_NONBLOCK).unwrap()).unwrap();
        let attached = AttachReply::Attached(Box::new(AttachedLease {
            id: "lease".to_owned(),
            facts: facts(),
            dstrd: doorbells.dstrd(),
            vectors: vector_count(QUEUE_PAIRS),
        }));
        let parts = [doorbells.fd(), inflight.as_fd(), events.as_fd()];
        channel
            .send(&attached, &[&parts[..], &signs].concat())
            .unwrap();
        channel
    }

    /// Server whose connection closes before its process ends.
    struct DyingServer {
        process: Child,
        /// Write end of the pipe whose read end is one of the signs. Requests that outlive the process hold the write end
        /// open.
        write_end: Option<PipeWriter>,
        hangs_up: PipeReader,
        pidfd: OwnedFd,
    }

    impl DyingServer {
        fn new() -> Self {
            let mut command = Command::new("cat");
            command.stdin(Stdio::piped()).stdout(Stdio::null());
            let process = command.spawn().unwrap();
            let (hangs_up, held) = io::pipe().unwrap();
            let flags = rustix::process::PidfdFlags::empty();
            let pidfd =
                rustix::process::pidfd_open(rustix::process::Pid::from_child(&process), flags);
            Self {
                write_end: Some(held),
                hangs_up,
                pidfd: pidfd.unwrap(),
                process,
            }
        }

        fn signs(&self) -> [BorrowedFd<'_>; SIGNS] {
            [self.pidfd.as_fd(), self.hangs_up.as_fd()]
        }

        /// Attaches a function that waits for no other server.
        fn attach(&self) -> (RemoteBackend, LeaseChannel) {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let threads = ThreadSpawner::default();
            let mut channel = None;
            let serve = || channel = Some(grant_lease_over(theirs, self.signs()));
            let attach = || attach_stream(ours, Path::new("pair"), "options", &threads);
            let host = run_alongside("server", serve, attach).unwrap();
            let host = host.unwrap().expect("it has the drive");
            (host, channel.expect("it has served"))
        }

        fn kill(&mut self) {
            self.process.kill().unwrap();
            self.process.wait().unwrap();
        }
    }

    /// Timeout of calls that the test expects to time out.
    const SHORT_TIMEOUT: Duration = Duration::from_millis(20);

    /// Checks that the function treats its server as possibly still running: each request that must wait for the server's
    /// end times out.
    fn check_not_ended(host: &RemoteBackend) {
        for ended in [
            host.reset_within(SHORT_TIMEOUT),
            host.pause_within(SHORT_TIMEOUT),
            host.call_quiesce(call::revoke(), SHORT_TIMEOUT),
        ] {
            assert!(matches!(ended, Err(QueueError::Timeout(_))), "{ended:?}");
        }
        let unmapped = host.unmap_within(Gpa(0), 4096, SHORT_TIMEOUT);
        assert!(
            matches!(unmapped, Err(DmaError::Busy { .. })),
            "{unmapped:?}"
        );
    }

    #[test]
    fn a_reset_waits_for_all_requests_of_a_killed_server() {
        let mut server = DyingServer::new();
        let (host, channel) = server.attach();
        let region = MemoryRegion {
            gpa: Gpa(0),
            len: 4096,
            fd: memfd(c"guest", 4096).unwrap(),
            offset: 0,
            readable: true,
            writable: true,
        };
        host.window.map(region).unwrap();
        // The kernel closes the sockets of a killed process before the drive.
        drop(channel);
        check_not_ended(&host);
        server.kill();
        // The process has ended, but a request of its io_uring has not.
        check_not_ended(&host);
        drop(server.write_end.take());
        host.reset_within(DRAIN_DEADLINE).unwrap();
        assert_eq!(host.unmap_all().unwrap(), 4096);
    }

    #[test]
    fn the_function_waits_for_a_server_killed_during_attach() {
        let state_dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(server_sockets::sockets_dir(state_dir.path())).unwrap();
        let listener =
            UnixListener::bind(server_sockets::socket_path(state_dir.path(), "1")).unwrap();
        let (first, mut second) = (DyingServer::new(), DyingServer::new());
        let (sender, receiver) = mpsc::channel();
        let serve = || {
            let give = |server: &DyingServer| {
                grant_lease_over(listener.accept().unwrap().0, server.signs())
            };
            let channel = give(&first);
            channel.send(&LeaseEndNotice::Ended, &[]).unwrap();
            drop(channel);
            // The server has commands in flight when it is killed.
            let channel = give(&second);
            let taken: (BackendRequest, _) = channel.receive_request(None).unwrap();
            assert!(matches!(taken.0, BackendRequest::restore_running { .. }));
            drop((channel, listener));
            sender.send(()).unwrap();
        };
        let threads = ThreadSpawner::default();
        let attach = || {
            let host = attach_any_server(state_dir.path(), "path=a", None, &threads);
            receiver.recv().unwrap();
            host
        };
        let host = run_alongside("server", serve, attach).unwrap();
        let host = host.unwrap().expect("the server has the drive");
        // As long as the function has not seen the end of the connection, it takes the server for running.
        check_not_ended(&host);
        second.kill();
        drop(second.write_end.take());
        host.reset_within(DRAIN_DEADLINE).unwrap();
    }

    #[test]
    fn an_end_notice_of_a_running_server_completes_a_reset() {
        let mut server = DyingServer::new();
        let (host, channel) = server.attach();
        let leave = || {
            let _: (BackendRequest, Vec<OwnedFd>) = channel.receive_request(None).unwrap();
            // The server sends these messages in place of the reply.
            channel.send(&LeaseEndNotice::Removed, &[]).unwrap();
            channel.send(&LeaseEndNotice::Ended, &[]).unwrap();
            drop(channel);
        };
        let reset = run_alongside("server", leave, || host.reset_within(DRAIN_DEADLINE));
        reset.unwrap().unwrap();
        assert!(host.has_ended());
        server.kill();
    }

    #[test]
    fn a_revoked_lease_with_commands_in_flight_has_not_ended() {
        let mut server = DyingServer::new();
        let (host, channel) = server.attach();
        channel.send(&LeaseEndNotice::Removed, &[]).unwrap();
        drop(channel);
        check_not_ended(&host);
        let gone = |event: &IoQueueEvent| {
            matches!(event, IoQueueEvent::Drive(nvme_guest::DriveEvent::Gone))
        };
        assert!(host.take_events().iter().any(gone));
        server.kill();
        drop(server.write_end.take());
        host.reset_within(DRAIN_DEADLINE).unwrap();
    }

    /// Attaches a function whose first server refuses its first request, or disconnects without a reply. Returns the result
    /// of that request, and the requests about the function's state that the next server gets.
    fn requests_to_next_server(
        refuses: bool,
        ask: impl FnOnce(&RemoteBackend) -> io::Result<()>,
    ) -> (io::Result<()>, Vec<BackendRequest>) {
        let state_dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(server_sockets::sockets_dir(state_dir.path())).unwrap();
        let listener =
            UnixListener::bind(server_sockets::socket_path(state_dir.path(), "1")).unwrap();
        let (sender, receiver) = mpsc::channel();
        let serve = move || {
            let first = grant_lease(&listener);
            let _: (BackendRequest, Vec<OwnedFd>) = first.receive_request(None).unwrap();
            if refuses {
                let error = io::Error::from_raw_os_error(NO_DESCRIPTORS);
                let refused: BackendResult<()> = Err(RemoteIoError(error));
                first.send(&refused, &[]).unwrap();
            }
            drop(first);
            let next = grant_lease(&listener);
            let mut requests: Vec<BackendRequest> = Vec::new();
            while !matches!(
                requests.last(),
                Some(BackendRequest::restore_running { .. })
            ) {
                let (request, _) = next.receive_request(None).unwrap();
                let done: BackendResult<()> = Ok(());
                next.send(&done, &[]).unwrap();
                requests.push(request);
            }
            sender.send(requests).unwrap();
            // The server runs until the function ends.
            let end: Result<(BackendRequest, Vec<OwnedFd>), _> = next.receive_request(None);
            assert!(matches!(end, Err(ChannelError::Closed)), "{end:?}");
        };
        let server = start_thread("server", serve).unwrap();
        let threads = ThreadSpawner::default();
        let host = attach_any_server(state_dir.path(), "path=a", None, &threads);
        let host = host.unwrap().expect("the server has the drive");
        let result = ask(&host);
        let requests = receiver.recv().unwrap();
        drop(host);
        server.join().unwrap();
        (result, requests)
    }

    fn page(number: u64) -> MemoryRegion {
        MemoryRegion {
            gpa: Gpa(number * 4096),
            len: 4096,
            fd: memfd(c"guest", 4096).unwrap(),
            offset: 0,
            readable: true,
            writable: true,
        }
    }

    #[test]
    fn only_memory_that_the_old_server_always_had_is_reported_as_mapped() {
        let state_dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(server_sockets::sockets_dir(state_dir.path())).unwrap();
        let listener =
            UnixListener::bind(server_sockets::socket_path(state_dir.path(), "1")).unwrap();
        let (sender, receiver) = mpsc::channel();
        let (change, changed) = mpsc::channel();
        let serve = move || {
            let done: BackendResult<()> = Ok(());
            let first = grant_lease(&listener);
            for _ in 0..2 {
                let (_, _): (BackendRequest, Vec<OwnedFd>) = first.receive_request(None).unwrap();
                first.send(&done, &[]).unwrap();
            }
            first.send(&LeaseEndNotice::Ended, &[]).unwrap();
            drop(first);
            changed.recv().unwrap();
            for _ in 0..2 {
                let next = grant_lease(&listener);
                let mut mapped = Vec::new();
                loop {
                    let (request, _) = next.receive_request(None).unwrap();
                    next.send(&done, &[]).unwrap();
                    match request {
                        BackendRequest::map { region } => {
                            mapped.push((region.gpa, RegionHistory::New))
                        }
                        BackendRequest::map_claimed { region } => {
                            mapped.push((region.gpa, RegionHistory::Kept))
                        }
                        _ => break,
                    }
                }
                sender.send(mapped).unwrap();
            }
        };
        let server = start_thread("server", serve).unwrap();
        let threads = ThreadSpawner::default();
        let host = attach_any_server(state_dir.path(), "path=a", None, &threads);
        let host = host.unwrap().expect("the server has the drive");
        host.map(page(0)).unwrap();
        host.map(page(1)).unwrap();
        assert!(host.link.wait_until_ended(DRAIN_DEADLINE));
        // There is no server now. The lost server had the second page mapped, but not the third.
        assert_eq!(
            host.unmap_within(Gpa(4096), 4096, SHORT_TIMEOUT).unwrap(),
            4096
        );
        host.map(page(1)).unwrap();
        host.map(page(2)).unwrap();
        change.send(()).unwrap();
        let pages = [0, 1, 2].map(|number| Gpa(number * 4096));
        let had = [RegionHistory::Kept, RegionHistory::New, RegionHistory::New];
        assert_eq!(
            receiver.recv().unwrap(),
            Vec::from_iter(pages.into_iter().zip(had))
        );
        // By now, the current server has had all pages mapped.
        let had = pages.map(|gpa| (gpa, RegionHistory::Kept));
        assert_eq!(receiver.recv().unwrap(), had);
        drop(host);
        server.join().unwrap();
    }

    #[test]
    fn requests_refused_by_the_old_server_are_not_repeated() {
        let (watched, requests) =
            requests_to_next_server(true, |host| host.watch_admin_doorbells());
        assert_eq!(watched.unwrap_err().raw_os_error(), Some(NO_DESCRIPTORS));
        assert!(
            matches!(requests[..], [BackendRequest::restore_running { .. }]),
            "{requests:?}"
        );

        let (began, requests) =
            requests_to_next_server(true, |host| host.begin_untrapped_doorbells());
        assert_eq!(began.unwrap_err().raw_os_error(), Some(NO_DESCRIPTORS));
        assert!(
            matches!(requests[..], [BackendRequest::restore_running { .. }]),
            "{requests:?}"
        );
    }

    #[test]
    fn requests_unanswered_by_the_old_server_are_repeated() {
        let (watched, requests) =
            requests_to_next_server(false, |host| host.watch_admin_doorbells());
        assert_eq!(watched.unwrap_err().kind(), io::ErrorKind::NotConnected);
        assert!(
            matches!(
                requests[..],
                [
                    BackendRequest::watch_admin_doorbells {},
                    BackendRequest::restore_running { .. }
                ]
            ),
            "{requests:?}"
        );

        let (began, requests) =
            requests_to_next_server(false, |host| host.begin_untrapped_doorbells());
        began.expect("the next server begins it");
        assert!(
            matches!(
                requests[..],
                [
                    BackendRequest::begin_untrapped_doorbells {},
                    BackendRequest::restore_running { .. }
                ]
            ),
            "{requests:?}"
        );
    }
}
