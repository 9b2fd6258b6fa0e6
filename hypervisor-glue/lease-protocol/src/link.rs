//! The VMM's connection to a server, and what is told to the next one if the server goes.

use std::collections::BTreeSet;
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use nvme_mpt::limit::RateLimits;
use nvme_mpt::memory::eventfd;
use nvme_mpt::memory::sync::{Condvar, Mutex, MutexGuard};
use nvme_mpt::seam::CoalescingConfig;
use nvme_mpt::seam::GUEST_NSID;
use nvme_mpt::spec::ids::QueueId;
use nvme_mpt::{DriveEvent, Event, Gpa, HostSideEvent, KeptQueues, MemoryRegion, QueueFailure};
use serde::de::DeserializeOwned;
use vmm_sys_util::eventfd::EventFd;

use crate::channel::{Channel, ChannelError};
use crate::message::{RegionHistory, Request};

/// The server cannot be asked any more.
#[derive(Debug)]
pub(crate) struct Lost;

impl From<Lost> for io::Error {
    fn from(_: Lost) -> Self {
        Self::new(
            io::ErrorKind::NotConnected,
            "the drive server is gone: start it again; if the function does not wait for it, detach the drive and \
             attach it again",
        )
    }
}

/// State of a connection.
#[derive(Debug)]
enum Connection {
    Open(Arc<Channel>),
    /// The server reads nothing any more. It closes its side when it has ended the lease.
    Ending(Arc<Channel>),
    /// The server cannot be asked, and what it does is not known.
    Failed(Arc<Channel>),
    /// The connection has ended. The drive may still carry out commands of the function: of a server that was killed, the kernel
    /// closes the sockets before the drive.
    Gone,
    /// The server has ended what it did for the function, or nothing of it is left.
    Over,
}

/// Dirty pages of a log that goes on across servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DirtyLog {
    /// The server and this process know them all.
    Complete,
    /// A server that went knew of pages: each page may be dirty.
    Missed,
}

/// Choices of the function that a server is told once, and so is the next one.
#[derive(Debug, Default)]
pub(crate) struct Standing {
    /// Vectors, by number.
    pub(crate) vectors: Vec<Wire>,
    pub(crate) rates: Option<RateLimits>,
    pub(crate) coalescing: Option<CoalescingConfig>,
    /// Queues that the guest has.
    pub(crate) queues: KeptQueues,
    /// The doorbells are mapped.
    pub(crate) silent: bool,
    /// The doorbells of the admin queue are watched.
    pub(crate) watched: bool,
    pub(crate) paused: bool,
    pub(crate) dirty_log: Option<DirtyLog>,
    /// Regions, by guest address and length, that were mapped while there was no server. Where a server before had them
    /// mapped, it may have been with other pages.
    pub(crate) unknown: BTreeSet<(u64, u64)>,
}

/// Connection of a vector to the VMM.
#[derive(Debug, Default)]
pub(crate) struct Wire {
    pub(crate) eventfd: Option<OwnedFd>,
    pub(crate) masked: bool,
}

impl Standing {
    /// Forgets regions that are unmapped.
    pub(crate) fn forget(&mut self, gpa: Gpa, len: u64) {
        let range = gpa.0..gpa.0.saturating_add(len);
        self.unknown.retain(|(start, _)| !range.contains(start));
    }

    /// Returns whether the server before had a region that is mapped now.
    pub(crate) fn had(&self, region: &MemoryRegion) -> RegionHistory {
        match self.unknown.contains(&(region.gpa.0, region.len)) {
            true => RegionHistory::New,
            false => RegionHistory::Kept,
        }
    }

    /// Returns whether a server took dirty pages with it that were not told yet.
    pub(crate) fn take_missed(&mut self) -> bool {
        let missed = self.dirty_log == Some(DirtyLog::Missed);
        if missed {
            self.dirty_log = Some(DirtyLog::Complete);
        }
        missed
    }
}

/// State that the function's calls and the watch share.
#[derive(Debug)]
pub(crate) struct LinkState {
    connection: Connection,
    /// The next server is waited for if this one goes.
    waits: bool,
    pub(crate) standing: Standing,
    /// Servers that came after the first one.
    pub(crate) servers: u64,
    /// Leased blocks, as a server reported them last.
    pub(crate) blocks: u64,
    /// Events that no server has.
    notices: Vec<Event>,
    pub(crate) socket: PathBuf,
}

impl LinkState {
    /// Returns whether no server does anything for the function.
    pub(crate) fn is_over(&self) -> bool {
        matches!(self.connection, Connection::Over)
    }

    /// Returns whether the function waits for a server now.
    pub(crate) fn is_away(&self) -> bool {
        self.waits && !matches!(self.connection, Connection::Open(_))
    }

    /// Returns whether the function waits for a server, or will if its server goes.
    pub(crate) fn waits(&self) -> bool {
        self.waits
    }

    /// Notes that a server may do something for the function again which does not have it yet.
    pub(crate) fn doubt(&mut self) {
        if self.is_over() {
            self.connection = Connection::Gone;
        }
    }

    pub(crate) fn take_notices(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.notices)
    }

    /// Takes out a connection whose server ends the lease if it is asked to: the function ends.
    pub(crate) fn part(&mut self) -> Option<Arc<Channel>> {
        self.waits = false;
        let connection = std::mem::replace(&mut self.connection, Connection::Over);
        if let Connection::Failed(channel) = connection {
            // The watch ends with it.
            let _ = channel.stream().shutdown(Shutdown::Both);
            return None;
        }
        if !matches!(connection, Connection::Over) {
            self.connection = Connection::Gone;
        }
        match connection {
            Connection::Open(channel) | Connection::Ending(channel) => Some(channel),
            _ => None,
        }
    }
}

/// The server that goes on with the function's drive.
pub(crate) struct NextServer {
    pub(crate) channel: Arc<Channel>,
    pub(crate) socket: PathBuf,
    /// Blocks of the lease by now.
    pub(crate) blocks: u64,
}

/// The connection to a server.
#[derive(Debug)]
pub(crate) struct Link {
    state: Mutex<LinkState>,
    /// Notified when the server has closed the connection, and when nothing of it is left.
    closed: Condvar,
    /// Readable while the host side has events, and when the connection changes.
    pub(crate) events: Arc<EventFd>,
}

impl Link {
    pub(crate) fn new(
        channel: Arc<Channel>,
        socket: PathBuf,
        events: Arc<EventFd>,
        vectors: u16,
        blocks: u64,
        waits: bool,
    ) -> Arc<Self> {
        let vectors = (0..vectors).map(|_| Wire::default()).collect();
        Arc::new(Self {
            state: Mutex::new(LinkState {
                connection: Connection::Open(channel),
                waits,
                servers: 0,
                blocks,
                standing: Standing {
                    vectors,
                    ..Standing::default()
                },
                notices: Vec::new(),
                socket,
            }),
            closed: Condvar::new(),
            events,
        })
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, LinkState> {
        // Each change is complete before anything can panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks for something, with a descriptor if it needs one.
    pub(crate) fn ask<T: DeserializeOwned>(
        &self,
        request: &Request,
        descriptor: Option<&OwnedFd>,
    ) -> Result<T, Lost> {
        self.ask_in(&mut self.state(), request, descriptor)
    }

    /// As [`Self::ask`], while the caller has the state.
    pub(crate) fn ask_in<T: DeserializeOwned>(
        &self,
        state: &mut LinkState,
        request: &Request,
        descriptor: Option<&OwnedFd>,
    ) -> Result<T, Lost> {
        Ok(self.ask_for_more(state, request, descriptor)?.0)
    }

    pub(crate) fn ask_for_more<T: DeserializeOwned>(
        &self,
        state: &mut LinkState,
        request: &Request,
        descriptor: Option<&OwnedFd>,
    ) -> Result<(T, Vec<OwnedFd>), Lost> {
        let Connection::Open(channel) = &state.connection else {
            return Err(Lost);
        };
        let descriptor = descriptor.map(AsFd::as_fd);
        if let Err(error) = channel.send(request, descriptor.as_slice()) {
            return Err(match error {
                ChannelError::Closed => self.lose(state, &error, Connection::Ending),
                _ => self.lose(state, &error, Connection::Failed),
            });
        }
        channel.receive_answer().map_err(|error| match error {
            // The watch sees the end, and then whether nothing is in flight any more.
            ChannelError::Closed => self.lose(state, &error, Connection::Ending),
            _ => self.lose(state, &error, Connection::Failed),
        })
    }

    /// Waits, for `time` at most, until no server that was lost can still carry out commands of the function. Returns whether
    /// that is so; the next server may be connected by then. If a server has not closed the connection within `time`, later
    /// calls do not wait for it. If it has, they do.
    pub(crate) fn wait_until_over(&self, time: Duration) -> bool {
        let is_ending = |state: &mut LinkState| {
            matches!(state.connection, Connection::Ending(_) | Connection::Gone)
        };
        let waited = self
            .closed
            .wait_timeout_while(self.state(), time, is_ending);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let connection = std::mem::replace(&mut state.connection, Connection::Gone);
        state.connection = match connection {
            Connection::Ending(channel) => {
                log::error!(
                    "A drive server does not end its lease, and is not waited for any more"
                );
                Connection::Failed(channel)
            }
            other => other,
        };
        !matches!(state.connection, Connection::Failed(_) | Connection::Gone)
    }

    /// Notes that the server cannot be asked any more.
    fn lose(
        &self,
        state: &mut LinkState,
        error: &ChannelError,
        then: impl FnOnce(Arc<Channel>) -> Connection,
    ) -> Lost {
        let channel = match std::mem::replace(&mut state.connection, Connection::Gone) {
            Connection::Open(channel) => channel,
            other => {
                state.connection = other;
                return Lost;
            }
        };
        let socket = state.socket.display();
        let outcome = match state.waits {
            true => "the function waits until a server has its drive",
            false => "its drive is lost",
        };
        log::error!("The drive server on {socket} is lost, and {outcome}: {error}");
        // A server that goes on sees the end, and closes its side when it has ended the lease.
        let _ = channel.stream().shutdown(Shutdown::Write);
        state.connection = then(channel);
        if let Some(log) = &mut state.standing.dirty_log {
            *log = DirtyLog::Missed;
        }
        match state.waits {
            true => self.notify(state, Event::HostSide(HostSideEvent::Away)),
            false => self.fail(state),
        }
        Lost
    }

    /// Tells the function that its drive is gone for good.
    pub(crate) fn fail(&self, state: &mut LinkState) {
        state.waits = false;
        // Nobody completes the commands that were taken.
        let reason = QueueFailure::HostQueue;
        let qid = QueueId::ADMIN;
        self.notify(state, Event::QueueFailed { qid, reason });
        self.notify(state, Event::Drive(DriveEvent::Gone));
    }

    fn notify(&self, state: &mut LinkState, event: Event) {
        state.notices.push(event);
        // A counter that is full is readable as well.
        let _ = eventfd::signal(&self.events);
    }

    /// Notes that the server has closed the connection.
    pub(crate) fn close(&self) {
        let mut state = self.state();
        self.lose(&mut state, &ChannelError::Closed, Connection::Ending);
        if !state.is_over() {
            state.connection = Connection::Gone;
        }
    }

    /// Notes that a server whose connection has ended does nothing for the function any more.
    pub(crate) fn end(&self) {
        let mut state = self.state();
        if matches!(state.connection, Connection::Gone) {
            state.connection = Connection::Over;
        }
        drop(state);
        self.closed.notify_all();
    }

    /// Goes on with another server, which knows all that the one before did, and the queues unless they are lost.
    pub(crate) fn go_on(&self, state: &mut LinkState, next: NextServer, back: HostSideEvent) {
        let NextServer {
            channel,
            socket,
            blocks,
        } = next;
        log::warn!(
            "The drive server on {} has the function's drive again",
            socket.display()
        );
        if back == HostSideEvent::BackWithoutQueues {
            state.standing.queues = KeptQueues::default();
        }
        state.standing.unknown.clear();
        state.connection = Connection::Open(channel);
        state.servers += 1;
        state.socket = socket;
        self.notify(state, Event::HostSide(back));
        if std::mem::replace(&mut state.blocks, blocks) != blocks {
            // The lease has grown, and the server that did it may have ended before it told.
            let changed = DriveEvent::NamespaceChanged(GUEST_NSID);
            self.notify(state, Event::Drive(changed));
        }
    }
}
