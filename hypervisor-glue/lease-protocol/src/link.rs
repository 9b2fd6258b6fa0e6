//! The VMM's connection to a server, and the state that the VMM records for the next server.

use std::collections::BTreeSet;
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use nvme_guest::limit::RateLimits;
use nvme_guest::seam::{CoalescingConfig, GUEST_NSID};
use nvme_guest::{
    BackendEvent, DriveEvent, Gpa, IoQueueEvent, MemoryRegion, PersistedQueues, QueueFailure,
};
use nvme_mpt_memory::eventfd;
use nvme_mpt_memory::sync::{Condvar, Mutex, MutexGuard};
use nvme_spec::ids::QueueId;
use serde::de::DeserializeOwned;
use vmm_sys_util::eventfd::EventFd;

use crate::channel::{ChannelError, LeaseChannel};
use crate::message::{BackendRequest, RegionHistory};

/// Error: the server was lost, and no other server is connected.
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

/// State of the connection.
#[derive(Debug)]
enum ServerConnectionState {
    Open(Arc<LeaseChannel>),
    /// The server is lost and reads no more requests. It closes the connection after it has ended the lease.
    Ending(Arc<LeaseChannel>),
    /// The server did not answer in time, or violated the protocol. It may still carry out commands.
    Failed(Arc<LeaseChannel>),
    /// The connection has ended, but the drive may still carry out commands of the function: for a killed server, the kernel
    /// closes the sockets before the drive.
    Gone,
    /// All work of the server for the function has ended.
    Over,
}

/// State of the log of dirty pages, across all servers of the function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DirtyLog {
    /// No dirty page was lost with a server.
    Complete,
    /// A server was lost together with its log of dirty pages, so every page counts as dirty.
    Missed,
}

/// Settings of the function that each further server must get.
#[derive(Debug, Default)]
pub(crate) struct BackendSettings {
    /// Connections of the vectors, by number.
    pub(crate) vectors: Vec<VectorConnection>,
    pub(crate) rates: Option<RateLimits>,
    pub(crate) coalescing: Option<CoalescingConfig>,
    /// Queues that the guest has created.
    pub(crate) queues: PersistedQueues,
    /// Set while the guest's doorbell pages are mapped, so that doorbell writes do not exit to the VMM.
    pub(crate) silent: bool,
    /// Set while the server must watch the doorbells of the admin queue.
    pub(crate) watched: bool,
    pub(crate) paused: bool,
    pub(crate) dirty_log: Option<DirtyLog>,
    /// Regions, by guest address and length, that were mapped while no server was connected. The previous server did not have
    /// these mappings, and may have had other memory at these addresses.
    pub(crate) unknown: BTreeSet<(u64, u64)>,
}

/// Eventfd and mask of an interrupt vector.
#[derive(Debug, Default)]
pub(crate) struct VectorConnection {
    pub(crate) eventfd: Option<OwnedFd>,
    pub(crate) masked: bool,
}

impl BackendSettings {
    /// Removes the records of regions that were unmapped.
    pub(crate) fn forget(&mut self, gpa: Gpa, len: u64) {
        let range = gpa.0..gpa.0.saturating_add(len);
        self.unknown.retain(|(start, _)| !range.contains(start));
    }

    /// Returns whether the previous server had this region mapped, with the same memory.
    pub(crate) fn had(&self, region: &MemoryRegion) -> RegionHistory {
        match self.unknown.contains(&(region.gpa.0, region.len)) {
            true => RegionHistory::New,
            false => RegionHistory::Kept,
        }
    }

    /// Returns whether a server was lost together with its log of dirty pages since the last call.
    pub(crate) fn take_missed(&mut self) -> bool {
        let missed = self.dirty_log == Some(DirtyLog::Missed);
        if missed {
            self.dirty_log = Some(DirtyLog::Complete);
        }
        missed
    }
}

/// Connection and recorded state, shared by the function's methods and the watch thread.
#[derive(Debug)]
pub(crate) struct LinkState {
    connection: ServerConnectionState,
    /// Set if the function waits for another server after it has lost its server.
    waits: bool,
    pub(crate) standing: BackendSettings,
    /// Number of servers that the function has had after its first one.
    pub(crate) servers: u64,
    /// Number of leased blocks, as last reported by a server.
    pub(crate) blocks: u64,
    /// Events that originate in this process.
    notices: Vec<IoQueueEvent>,
    pub(crate) socket: PathBuf,
}

impl LinkState {
    /// Returns whether no server can carry out commands of the function any longer.
    pub(crate) fn is_over(&self) -> bool {
        matches!(self.connection, ServerConnectionState::Over)
    }

    /// Returns whether the function is waiting for a server.
    pub(crate) fn is_away(&self) -> bool {
        self.waits && !matches!(self.connection, ServerConnectionState::Open(_))
    }

    /// Returns whether the function waits for another server after it has lost, or would lose, its server.
    pub(crate) fn waits(&self) -> bool {
        self.waits
    }

    /// Records that commands of the function may be in flight at a server that had got the lease, but failed before it was the
    /// function's server.
    pub(crate) fn doubt(&mut self) {
        if self.is_over() {
            self.connection = ServerConnectionState::Gone;
        }
    }

    pub(crate) fn take_notices(&mut self) -> Vec<IoQueueEvent> {
        std::mem::take(&mut self.notices)
    }

    /// Ends the connection because the function ends. Returns the connection if the server still has to end the lease over it.
    pub(crate) fn part(&mut self) -> Option<Arc<LeaseChannel>> {
        self.waits = false;
        let connection = std::mem::replace(&mut self.connection, ServerConnectionState::Over);
        if let ServerConnectionState::Failed(channel) = connection {
            // Makes the watch thread end.
            let _ = channel.stream().shutdown(Shutdown::Both);
            return None;
        }
        if !matches!(connection, ServerConnectionState::Over) {
            self.connection = ServerConnectionState::Gone;
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
pub(crate) struct NextServer {
    pub(crate) channel: Arc<LeaseChannel>,
    pub(crate) socket: PathBuf,
    /// Number of leased blocks.
    pub(crate) blocks: u64,
}

/// Connection to the present server.
#[derive(Debug)]
pub(crate) struct ServerLink {
    state: Mutex<LinkState>,
    /// Notified when all work of a lost server has ended.
    closed: Condvar,
    /// Eventfd that is readable if the back end has events, or if the server was lost or replaced.
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
                waits,
                servers: 0,
                blocks,
                standing: BackendSettings {
                    vectors,
                    ..BackendSettings::default()
                },
                notices: Vec::new(),
                socket,
            }),
            closed: Condvar::new(),
            events,
        })
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, LinkState> {
        // A panic cannot leave a partial change.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a request, with a descriptor if it needs one, and returns the answer.
    pub(crate) fn ask<T: DeserializeOwned>(
        &self,
        request: &BackendRequest,
        descriptor: Option<&OwnedFd>,
    ) -> Result<T, ServerLost> {
        self.ask_in(&mut self.state(), request, descriptor)
    }

    /// Sends a request like [`Self::ask`], while the caller holds the lock.
    pub(crate) fn ask_in<T: DeserializeOwned>(
        &self,
        state: &mut LinkState,
        request: &BackendRequest,
        descriptor: Option<&OwnedFd>,
    ) -> Result<T, ServerLost> {
        Ok(self.ask_for_more(state, request, descriptor)?.0)
    }

    pub(crate) fn ask_for_more<T: DeserializeOwned>(
        &self,
        state: &mut LinkState,
        request: &BackendRequest,
        descriptor: Option<&OwnedFd>,
    ) -> Result<(T, Vec<OwnedFd>), ServerLost> {
        let ServerConnectionState::Open(channel) = &state.connection else {
            return Err(ServerLost);
        };
        let descriptor = descriptor.map(AsFd::as_fd);
        if let Err(error) = channel.send(request, descriptor.as_slice()) {
            return Err(match error {
                ChannelError::Closed => self.lose(state, &error, ServerConnectionState::Ending),
                _ => self.lose(state, &error, ServerConnectionState::Failed),
            });
        }
        channel.receive_answer().map_err(|error| match error {
            // The watch thread notices the end, and whether commands are still in flight.
            ChannelError::Closed => self.lose(state, &error, ServerConnectionState::Ending),
            _ => self.lose(state, &error, ServerConnectionState::Failed),
        })
    }

    /// Waits at most `time` until no lost server can carry out commands of the function. Returns `true` in this case, also if
    /// the next server is already connected. If a lost server does not close its connection within `time`, later calls return
    /// at once.
    pub(crate) fn wait_until_over(&self, time: Duration) -> bool {
        let is_ending = |state: &mut LinkState| {
            matches!(
                state.connection,
                ServerConnectionState::Ending(_) | ServerConnectionState::Gone
            )
        };
        let waited = self
            .closed
            .wait_timeout_while(self.state(), time, is_ending);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let connection = std::mem::replace(&mut state.connection, ServerConnectionState::Gone);
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
            ServerConnectionState::Failed(_) | ServerConnectionState::Gone
        )
    }

    /// Records that the server is lost, for the reason `error`.
    fn lose(
        &self,
        state: &mut LinkState,
        error: &ChannelError,
        then: impl FnOnce(Arc<LeaseChannel>) -> ServerConnectionState,
    ) -> ServerLost {
        let channel = match std::mem::replace(&mut state.connection, ServerConnectionState::Gone) {
            ServerConnectionState::Open(channel) => channel,
            other => {
                state.connection = other;
                return ServerLost;
            }
        };
        let socket = state.socket.display();
        let outcome = match state.waits {
            true => "the function waits until a server has its drive",
            false => "its drive is lost",
        };
        log::error!("The drive server on {socket} is lost, and {outcome}: {error}");
        // A server that is still running sees this, and closes its side after it has ended the lease.
        let _ = channel.stream().shutdown(Shutdown::Write);
        state.connection = then(channel);
        if let Some(log) = &mut state.standing.dirty_log {
            *log = DirtyLog::Missed;
        }
        match state.waits {
            true => self.notify(state, IoQueueEvent::HostSide(BackendEvent::Away)),
            false => self.fail(state),
        }
        ServerLost
    }

    /// Reports to the function that its drive is gone for good.
    pub(crate) fn fail(&self, state: &mut LinkState) {
        state.waits = false;
        // The commands in flight will never be completed.
        let reason = QueueFailure::HostQueue;
        let qid = QueueId::ADMIN;
        self.notify(state, IoQueueEvent::QueueFailed { qid, reason });
        self.notify(state, IoQueueEvent::Drive(DriveEvent::Gone));
    }

    fn notify(&self, state: &mut LinkState, event: IoQueueEvent) {
        state.notices.push(event);
        // A full counter is readable as well.
        let _ = eventfd::signal(&self.events);
    }

    /// Records that the server has closed its side of the connection.
    pub(crate) fn close(&self) {
        let mut state = self.state();
        self.lose(
            &mut state,
            &ChannelError::Closed,
            ServerConnectionState::Ending,
        );
        if !state.is_over() {
            state.connection = ServerConnectionState::Gone;
        }
    }

    /// Records that all lost servers have ended their work for the function.
    pub(crate) fn end(&self) {
        let mut state = self.state();
        if matches!(state.connection, ServerConnectionState::Gone) {
            state.connection = ServerConnectionState::Over;
        }
        drop(state);
        self.closed.notify_all();
    }

    /// Continues with another server, which has already got the recorded state. `back` tells whether this server also restored
    /// the queues.
    pub(crate) fn go_on(&self, state: &mut LinkState, next: NextServer, back: BackendEvent) {
        let NextServer {
            channel,
            socket,
            blocks,
        } = next;
        log::warn!(
            "The drive server on {} has the function's drive again",
            socket.display()
        );
        if back == BackendEvent::BackWithoutQueues {
            state.standing.queues = PersistedQueues::default();
        }
        state.standing.unknown.clear();
        state.connection = ServerConnectionState::Open(channel);
        state.servers += 1;
        state.socket = socket;
        self.notify(state, IoQueueEvent::HostSide(back));
        if std::mem::replace(&mut state.blocks, blocks) != blocks {
            // The lease was resized, and the server that did this may have ended before it reported the event.
            let changed = DriveEvent::NamespaceChanged(GUEST_NSID);
            self.notify(state, IoQueueEvent::Drive(changed));
        }
    }
}
