//! The VMM's connection to a server, and the state that the VMM records for the next server.

use std::collections::BTreeSet;
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use nvme_guest::backend::{CoalescingConfig, GUEST_NSID};
use nvme_guest::rate_limit::RateLimits;
use nvme_guest::{
    BackendEvent, DmaError, DriveEvent, Gpa, IoQueueEvent, MemoryRegion, PersistedQueues,
    QueueFailure,
};
use nvme_mpt_memory::eventfd;
use nvme_mpt_memory::sync::{Condvar, Mutex, MutexGuard};
use nvme_spec::ids::QueueId;
use serde::de::DeserializeOwned;
use vmm_sys_util::eventfd::EventFd;

use crate::call::{self, BackendCall};
use crate::channel::{ChannelError, LeaseChannel};
use crate::message::MemoryRegionMessage;

/// Error: the server was lost, and no other server has connected yet.
#[derive(Debug)]
pub(crate) struct ServerLost;

impl From<ServerLost> for io::Error {
    fn from(_: ServerLost) -> Self {
        Self::new(
            io::ErrorKind::NotConnected,
            "the drive server is gone: start it again; if the function does not wait for it, detach the drive and \
             attach it again",
        )
    }
}

/// State of the connection between the VMM and its function's server.
#[derive(Debug)]
enum ServerConnectionState {
    Open(Arc<LeaseChannel>),
    /// The server is lost and reads no more requests. It closes the connection after it has ended the lease.
    Ending(Arc<LeaseChannel>),
    /// The server did not answer in time, or violated the protocol. The function sends it no further request, but it may
    /// still carry out commands.
    Failed(Arc<LeaseChannel>),
    /// The connection has ended, but the drive may still carry out commands of the function: for a killed server, the kernel
    /// closes the sockets before the drive.
    Disconnected,
    /// All work of the server for the function has ended.
    Ended,
}

/// History of a region of the function's memory: mapped in the previous server, or new.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RegionHistory {
    /// The previous server had the region mapped, and the VMM has not unmapped it since.
    Kept,
    /// The previous server did not have this memory mapped at these addresses.
    New,
}

/// Returns the call that maps a region. The descriptor of the region's memory is sent with the call.
pub(crate) fn map_call(
    region: &MemoryRegion,
    had: RegionHistory,
) -> BackendCall<Result<(), DmaError>> {
    let region = MemoryRegionMessage::new(region);
    match had {
        RegionHistory::Kept => call::map_claimed(region),
        RegionHistory::New => call::map(region),
    }
}

/// State of the log of dirty pages, across all servers of the function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DirtyLog {
    /// No dirty page was lost with a server.
    Complete,
    /// A server was lost together with its log of dirty pages, so every page counts as dirty.
    Missed,
}

/// Settings of the function that each later server must get.
#[derive(Debug, Default)]
pub(crate) struct BackendSettings {
    /// Eventfd and mask of each interrupt vector, by the vector's number.
    pub(crate) vectors: Vec<VectorConnection>,
    pub(crate) rates: Option<RateLimits>,
    pub(crate) coalescing: Option<CoalescingConfig>,
    /// Queues that the guest has created.
    pub(crate) queues: PersistedQueues,
    /// Set while the guest's doorbell pages are mapped, so that doorbell writes do not exit to the VMM.
    pub(crate) untrapped: bool,
    /// Set while the server must watch the doorbells of the admin queue and report their writes as events.
    pub(crate) watches_admin: bool,
    pub(crate) paused: bool,
    pub(crate) dirty_log: Option<DirtyLog>,
    /// Regions, by guest address and length, that were mapped while no server was connected. The predecessor did not have
    /// these regions mapped, and may have had other memory at these addresses.
    pub(crate) new_regions: BTreeSet<(u64, u64)>,
}

/// Eventfd and mask of an interrupt vector.
#[derive(Debug, Default)]
pub(crate) struct VectorConnection {
    pub(crate) eventfd: Option<OwnedFd>,
    pub(crate) masked: bool,
}

impl BackendSettings {
    /// Removes the records of regions that were unmapped.
    pub(crate) fn forget_regions(&mut self, gpa: Gpa, len: u64) {
        let range = gpa.0..gpa.0.saturating_add(len);
        self.new_regions.retain(|(start, _)| !range.contains(start));
    }

    /// Returns whether the predecessor had this region mapped, with the same memory.
    pub(crate) fn region_history(&self, region: &MemoryRegion) -> RegionHistory {
        match self.new_regions.contains(&(region.gpa.0, region.len)) {
            true => RegionHistory::New,
            false => RegionHistory::Kept,
        }
    }

    /// Returns whether a server was lost together with its log of dirty pages since the last call.
    pub(crate) fn take_missed_dirty_log(&mut self) -> bool {
        let missed = self.dirty_log == Some(DirtyLog::Missed);
        if missed {
            self.dirty_log = Some(DirtyLog::Complete);
        }
        missed
    }
}

/// Connection to the server, and the function's settings for the next server. The function's methods and the watch thread share
/// this.
#[derive(Debug)]
pub(crate) struct LinkState {
    connection: ServerConnectionState,
    /// Set if the function waits for another server after it has lost its server.
    should_reconnect: bool,
    pub(crate) settings: BackendSettings,
    /// Number of servers that the function has had after its first one.
    pub(crate) successors: u64,
    /// Number of leased blocks, as last reported by a server.
    pub(crate) blocks: u64,
    /// Events for the function that come from this process and not from a server, such as the loss of the server.
    local_events: Vec<IoQueueEvent>,
    pub(crate) socket: PathBuf,
}

impl LinkState {
    /// Returns whether no server can carry out commands of the function any longer.
    pub(crate) fn has_ended(&self) -> bool {
        matches!(self.connection, ServerConnectionState::Ended)
    }

    /// Returns whether the function is waiting for a server.
    pub(crate) fn is_disconnected(&self) -> bool {
        self.should_reconnect && !matches!(self.connection, ServerConnectionState::Open(_))
    }

    /// Returns whether the function waits for another server when its server is lost.
    pub(crate) fn should_reconnect(&self) -> bool {
        self.should_reconnect
    }

    /// Records that commands of the function may be in flight in a server that granted the lease, but failed before it
    /// became the function's server.
    pub(crate) fn assume_inflight(&mut self) {
        if self.has_ended() {
            self.connection = ServerConnectionState::Disconnected;
        }
    }

    pub(crate) fn take_local_events(&mut self) -> Vec<IoQueueEvent> {
        std::mem::take(&mut self.local_events)
    }

    /// Ends the connection because the function ends. Returns the connection if the server still has to end the lease over it.
    pub(crate) fn disconnect(&mut self) -> Option<Arc<LeaseChannel>> {
        self.should_reconnect = false;
        let connection = std::mem::replace(&mut self.connection, ServerConnectionState::Ended);
        if let ServerConnectionState::Failed(channel) = connection {
            // The watch thread sees the end of the stream, and ends.
            let _ = channel.stream().shutdown(Shutdown::Both);
            return None;
        }
        if !matches!(connection, ServerConnectionState::Ended) {
            self.connection = ServerConnectionState::Disconnected;
        }
        match connection {
            ServerConnectionState::Open(channel) | ServerConnectionState::Ending(channel) => {
                Some(channel)
            }
            _ => None,
        }
    }
}

/// Server that takes over the function's drive.
pub(crate) struct SuccessorServer {
    pub(crate) channel: Arc<LeaseChannel>,
    pub(crate) socket: PathBuf,
    /// Number of leased blocks, as the server granted them.
    pub(crate) blocks: u64,
}

/// The function's connection to its present server, or its wait for the next one.
#[derive(Debug)]
pub(crate) struct ServerLink {
    state: Mutex<LinkState>,
    /// Notified by [`Self::record_end`], when all work of the lost servers has ended.
    ended: Condvar,
    /// Eventfd that is readable if the back end has events, or if the connection to the server has changed.
    pub(crate) events: Arc<EventFd>,
}

impl ServerLink {
    pub(crate) fn new(
        channel: Arc<LeaseChannel>,
        socket: PathBuf,
        events: Arc<EventFd>,
        vectors: u16,
        blocks: u64,
        waits: bool,
    ) -> Arc<Self> {
        let vectors = (0..vectors).map(|_| VectorConnection::default()).collect();
        Arc::new(Self {
            state: Mutex::new(LinkState {
                connection: ServerConnectionState::Open(channel),
                should_reconnect: waits,
                successors: 0,
                blocks,
                settings: BackendSettings {
                    vectors,
                    ..BackendSettings::default()
                },
                local_events: Vec::new(),
                socket,
            }),
            ended: Condvar::new(),
            events,
        })
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, LinkState> {
        // A panic cannot leave a partial change.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a request, with a descriptor if it needs one, and returns the answer.
    pub(crate) fn call<T: DeserializeOwned>(
        &self,
        call: BackendCall<T>,
        descriptor: Option<&OwnedFd>,
    ) -> Result<T, ServerLost> {
        self.call_locked(&mut self.state(), call, descriptor)
    }

    /// Sends a request like [`Self::call`], while the caller holds the lock.
    pub(crate) fn call_locked<T: DeserializeOwned>(
        &self,
        state: &mut LinkState,
        call: BackendCall<T>,
        descriptor: Option<&OwnedFd>,
    ) -> Result<T, ServerLost> {
        Ok(self.call_with_descriptors(state, call, descriptor)?.0)
    }

    pub(crate) fn call_with_descriptors<T: DeserializeOwned>(
        &self,
        state: &mut LinkState,
        call: BackendCall<T>,
        descriptor: Option<&OwnedFd>,
    ) -> Result<(T, Vec<OwnedFd>), ServerLost> {
        let ServerConnectionState::Open(channel) = &state.connection else {
            return Err(ServerLost);
        };
        let descriptor = descriptor.map(AsFd::as_fd);
        if let Err(error) = channel.send(&call.request, descriptor.as_slice()) {
            return Err(match error {
                ChannelError::Closed => {
                    self.record_loss(state, &error, ServerConnectionState::Ending)
                }
                _ => self.record_loss(state, &error, ServerConnectionState::Failed),
            });
        }
        channel.receive_answer().map_err(|error| match error {
            // The server has closed the connection. The watch thread sees this as well, and whether commands are still in
            // flight.
            ChannelError::Closed => self.record_loss(state, &error, ServerConnectionState::Ending),
            _ => self.record_loss(state, &error, ServerConnectionState::Failed),
        })
    }

    /// Waits at most `time` until no lost server can carry out commands of the function any longer. Returns `true` then,
    /// even if the next server is already connected.
    ///
    /// If a lost server does not close its connection within `time`, later calls return immediately.
    pub(crate) fn wait_until_ended(&self, time: Duration) -> bool {
        let is_ending = |state: &mut LinkState| {
            matches!(
                state.connection,
                ServerConnectionState::Ending(_) | ServerConnectionState::Disconnected
            )
        };
        let waited = self.ended.wait_timeout_while(self.state(), time, is_ending);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let connection =
            std::mem::replace(&mut state.connection, ServerConnectionState::Disconnected);
        state.connection = match connection {
            ServerConnectionState::Ending(channel) => {
                log::error!(
                    "A drive server does not end its lease in time: no longer waiting for it"
                );
                ServerConnectionState::Failed(channel)
            }
            other => other,
        };
        !matches!(
            state.connection,
            ServerConnectionState::Failed(_) | ServerConnectionState::Disconnected
        )
    }

    /// Records that the server is lost because of `error`, tells the function, and moves the connection to the state that
    /// `then` returns. Does nothing if the loss was recorded before.
    fn record_loss(
        &self,
        state: &mut LinkState,
        error: &ChannelError,
        then: impl FnOnce(Arc<LeaseChannel>) -> ServerConnectionState,
    ) -> ServerLost {
        let channel =
            match std::mem::replace(&mut state.connection, ServerConnectionState::Disconnected) {
                ServerConnectionState::Open(channel) => channel,
                other => {
                    state.connection = other;
                    return ServerLost;
                }
            };
        let socket = state.socket.display();
        let outcome = match state.should_reconnect {
            true => "the function waits until a server has its drive",
            false => "its drive is lost",
        };
        log::error!("The drive server on {socket} is lost, and {outcome}: {error}");
        // A server that is still running sees this, ends the lease, and then closes its side.
        let _ = channel.stream().shutdown(Shutdown::Write);
        state.connection = then(channel);
        if let Some(log) = &mut state.settings.dirty_log {
            *log = DirtyLog::Missed;
        }
        match state.should_reconnect {
            true => self.notify(state, IoQueueEvent::HostSide(BackendEvent::Away)),
            false => self.report_failure(state),
        }
        ServerLost
    }

    /// Reports to the function that its drive is lost permanently: no server will take the function over.
    pub(crate) fn report_failure(&self, state: &mut LinkState) {
        state.should_reconnect = false;
        // Commands that are in flight now will never be completed.
        let reason = QueueFailure::HostQueue;
        let qid = QueueId::ADMIN;
        self.notify(state, IoQueueEvent::QueueFailed { qid, reason });
        self.notify(state, IoQueueEvent::Drive(DriveEvent::Gone));
    }

    fn notify(&self, state: &mut LinkState, event: IoQueueEvent) {
        state.local_events.push(event);
        // The write fails only if the counter is full, and then the eventfd is readable anyway.
        let _ = eventfd::signal(&self.events);
    }

    /// Records that the server has closed its side of the connection.
    pub(crate) fn record_close(&self) {
        let mut state = self.state();
        self.record_loss(
            &mut state,
            &ChannelError::Closed,
            ServerConnectionState::Ending,
        );
        if !state.has_ended() {
            state.connection = ServerConnectionState::Disconnected;
        }
    }

    /// Records that all lost servers have ended their work for the function.
    pub(crate) fn record_end(&self) {
        let mut state = self.state();
        if matches!(state.connection, ServerConnectionState::Disconnected) {
            state.connection = ServerConnectionState::Ended;
        }
        drop(state);
        self.ended.notify_all();
    }

    /// Continues with another server, which has already received the settings. `back` is the event for the function, which
    /// tells whether this server has also restored the queues.
    pub(crate) fn reconnect(
        &self,
        state: &mut LinkState,
        next: SuccessorServer,
        back: BackendEvent,
    ) {
        let SuccessorServer {
            channel,
            socket,
            blocks,
        } = next;
        log::warn!(
            "The drive server on {} has the function's drive again",
            socket.display()
        );
        if back == BackendEvent::BackWithoutQueues {
            state.settings.queues = PersistedQueues::default();
        }
        state.settings.new_regions.clear();
        state.connection = ServerConnectionState::Open(channel);
        state.successors += 1;
        state.socket = socket;
        self.notify(state, IoQueueEvent::HostSide(back));
        if std::mem::replace(&mut state.blocks, blocks) != blocks {
            // The predecessor may have resized the lease, and ended before it reported this. So the event is reported here.
            let changed = DriveEvent::NamespaceChanged(GUEST_NSID);
            self.notify(state, IoQueueEvent::Drive(changed));
        }
    }
}
