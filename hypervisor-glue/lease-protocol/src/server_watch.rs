//! Thread that notices when a server ends, and then searches for the next server.

use std::fmt;
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use nvme_guest::{
    BackendEvent, BackendStateError, DmaError, DoorbellPage, GuestMemory, PersistedQueues,
};
use nvme_mpt_memory::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use nvme_mpt_memory::{clock, describe_error, eventfd};
use serde::de::DeserializeOwned;
use thiserror::Error;

use crate::attach::{GrantedLease, LeaseAttachError, OPENING_TIMEOUT, ServerDiscovery};
use crate::call::{self, BackendCall};
use crate::channel::{ChannelError, LeaseChannel};
use crate::message::{AttachedLease, VectorChange};
use crate::server_link::{
    BackendSettings, LinkState, RegionHistory, ServerLink, SuccessorServer, map_call,
};
use crate::server_sockets;
use crate::socket::{ServerExitSigns, Stream, wait_for_end};

/// Shortest and longest interval between two searches for the next server.
const RETRY_INTERVALS: (Duration, Duration) = (Duration::from_millis(5), Duration::from_secs(1));

/// Timeout for receiving the end notices of a server.
const END_NOTICE_TIMEOUT: Duration = Duration::from_millis(1);

/// Divisor for the search interval: the next search begins after a tenth of the time that the function has waited so far.
const RETRY_DIVISOR: u32 = 10;

/// Interval of log messages while there is no server.
const REPORT_INTERVAL: Duration = Duration::from_secs(60);

/// Reason why a function cannot continue with another server.
#[derive(Debug, Error)]
enum ReattachError {
    #[error(transparent)]
    Attach(#[from] LeaseAttachError),
    #[error("it does not answer")]
    Channel(#[from] ChannelError),
    #[error("it cannot reach the VM's memory")]
    Memory(#[from] DmaError),
    #[error("it cannot make the guest's queues")]
    Queues(#[from] BackendStateError),
    #[error("it lacks features that the guest was promised: detach the drive and attach it again")]
    MissingFeatures,
    #[error(
        "its doorbells have another stride (CAP.DSTRD {here}, but the guest was told {told}): detach the drive and attach \
         it again"
    )]
    Stride { told: u8, here: u8 },
    #[error("the kernel refused")]
    Io(#[from] io::Error),
}

impl ReattachError {
    /// Returns whether the server would fail in the same way at each attempt.
    fn is_final(&self) -> bool {
        matches!(self, Self::MissingFeatures | Self::Stride { .. })
    }
}

/// Server that has, or had, the function's lease.
#[derive(Debug)]
pub(crate) struct AttachedServer {
    pub(crate) channel: Arc<LeaseChannel>,
    /// Descriptors that signal the end of the server's process.
    pub(crate) signs: ServerExitSigns,
}

impl AttachedServer {
    /// Shuts down the sending side of the connection, upon which the server ends the lease.
    fn shut_down(self) -> Self {
        // A failed connection ends the lease as well.
        let _ = self.channel.stream().shutdown(Shutdown::Write);
        let _ = self.channel.set_answer_timeout(END_NOTICE_TIMEOUT);
        self
    }

    /// Returns whether the server has ended all its work for the function. May be called only after the connection has
    /// ended, or after [`shut_down`](Self::shut_down).
    fn has_ended(&self) -> bool {
        self.channel.read_end_notices();
        self.channel.has_ended() || self.signs.have_occurred().unwrap_or(false)
    }

    /// Waits until the server has ended all its work for the function.
    fn wait_until_ended(&self) {
        await_end(self.channel.stream());
        if !self.has_ended() {
            retry_wait("the end of a drive server's process", || {
                self.signs.await_all()
            });
        }
    }
}

/// Context of the watch thread.
pub(crate) struct ServerWatch {
    pub(crate) link: Arc<ServerLink>,
    /// Channel that is disconnected when the function ends.
    pub(crate) stopped: Receiver<()>,
    pub(crate) discovery: Option<ServerDiscovery>,
    /// Lease properties that the guest was promised when it attached.
    pub(crate) promised: AttachedLease,
    pub(crate) doorbells: Arc<DoorbellPage>,
    /// In-flight tracking file.
    pub(crate) inflight: OwnedFd,
    pub(crate) memory: GuestMemory,
    /// Drops the eventfds by which a lost server's pollers were woken.
    pub(crate) drop_wakers: Box<dyn Fn() + Send>,
}

impl fmt::Debug for ServerWatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServerWatch")
            .field("link", &self.link)
            .finish_non_exhaustive()
    }
}

impl ServerWatch {
    /// Watches the servers until the function ends. Returns earlier if the drive is lost for good and no server accesses
    /// the function's memory any longer.
    pub(crate) fn run(&self, mut server: AttachedServer) {
        loop {
            let channel = server.channel.clone();
            await_end(channel.stream());
            self.link.record_close();
            let mut left = vec![server];
            self.remove_ended(&mut left);
            if !self.is_stopped() {
                if channel.was_removed() {
                    log::error!("An operator has released the function's lease");
                    self.give_up();
                } else if let Some(next) = self.next_server(&mut left) {
                    server = next;
                    continue;
                }
            }
            // The function itself may already have recorded the loss of a server that does not answer.
            if !self.link.state().has_ended() {
                left.iter().for_each(AttachedServer::wait_until_ended);
                self.link.record_end();
            }
            return;
        }
    }

    /// Removes from `left` the servers that have ended all their work. Records the end if no server is left.
    fn remove_ended(&self, left: &mut Vec<AttachedServer>) {
        left.retain(|server| !server.has_ended());
        if left.is_empty() {
            self.link.record_end();
        }
    }

    fn is_stopped(&self) -> bool {
        self.stopped.try_recv() == Err(TryRecvError::Disconnected)
    }

    /// Searches for a server that has the drive until it finds one. Meanwhile, records when the lost servers in `left` have
    /// ended their work.
    fn next_server(&self, left: &mut Vec<AttachedServer>) -> Option<AttachedServer> {
        let reach = self.discovery.as_ref()?;
        let began = clock::monotonic();
        let mut reported = None;
        loop {
            self.remove_ended(left);
            let waited = clock::monotonic().saturating_sub(began);
            if reach.timeout.is_some_and(|timeout| waited >= timeout) {
                log::error!("No drive server came back within {waited:?}");
                self.give_up();
                return None;
            }
            match self.resume(reach, left) {
                Ok(Some(server)) => return Some(server),
                Err(error) if error.is_final() => {
                    log::error!("A drive server came back, but {error}");
                    self.give_up();
                    return None;
                }
                outcome
                    if reported.is_none_or(|at| waited.saturating_sub(at) >= REPORT_INTERVAL) =>
                {
                    let why = outcome
                        .err()
                        .map(|error| format!(": {}", describe_error(&error)));
                    let why = why.unwrap_or_default();
                    log::warn!("No drive server has the function's drive yet{why}");
                    reported = Some(waited);
                }
                _ => {}
            }
            let pause = (waited / RETRY_DIVISOR).clamp(RETRY_INTERVALS.0, RETRY_INTERVALS.1);
            if self.stopped.recv_timeout(pause) != Err(RecvTimeoutError::Timeout) {
                return None;
            }
        }
    }

    fn give_up(&self) {
        let mut state = self.link.state();
        if state.should_reconnect() {
            self.link.report_failure(&mut state);
        }
    }

    /// Requests the lease from each server in turn. Sends the recorded state to the server that grants the lease. If this
    /// server fails after it got the function's memory, adds it to `left`, because it may have commands in flight.
    fn resume(
        &self,
        reach: &ServerDiscovery,
        left: &mut Vec<AttachedServer>,
    ) -> Result<Option<AttachedServer>, ReattachError> {
        let events = eventfd::share(&self.link.events)?;
        let inherited = [self.doorbells.fd(), self.inflight.as_fd(), events.as_fd()];
        let Some(given) = server_sockets::find_lease(
            &reach.state_dir,
            &reach.options,
            &inherited,
            OPENING_TIMEOUT,
        )?
        else {
            return Ok(None);
        };
        let GrantedLease {
            channel,
            attached,
            signs,
            socket,
            ..
        } = given;
        let (told, here) = (self.promised.dstrd, attached.dstrd);
        if told != here {
            return Err(ReattachError::Stride { told, here });
        }
        if !attached.can_replace(&self.promised) {
            return Err(ReattachError::MissingFeatures);
        }
        (self.drop_wakers)();
        let channel = Arc::new(channel);
        let server = AttachedServer {
            channel: channel.clone(),
            signs,
        };
        // The lock blocks the function's calls, so that the new server misses no change.
        let mut state = self.link.state();
        if !state.should_reconnect() {
            // The function has ended.
            return Ok(None);
        }
        let back = match self.send_state(&channel, &state) {
            Ok(back) => back,
            Err(error) => {
                // The server may have begun commands before it failed.
                state.assume_inflight();
                left.push(server.shut_down());
                return Err(error);
            }
        };
        let blocks = attached.facts.namespace.blocks;
        let next = SuccessorServer {
            channel,
            socket,
            blocks,
        };
        self.link.reconnect(&mut state, next, back);
        Ok(Some(server))
    }

    fn send_state(
        &self,
        channel: &LeaseChannel,
        state: &LinkState,
    ) -> Result<BackendEvent, ReattachError> {
        // Regions that the previous server had mapped come first. After a new region, the server would count them as new.
        let regions = self.memory.detach().regions()?.into_iter();
        let (had, new): (Vec<_>, Vec<_>) = regions
            .partition(|region| state.settings.region_history(region) == RegionHistory::Kept);
        for region in had.into_iter().chain(new) {
            let map = map_call(&region, state.settings.region_history(&region));
            send_call(channel, map, Some(&region.fd))??;
        }
        let BackendSettings {
            vectors,
            rates,
            coalescing,
            queues,
            untrapped: silent,
            watches_admin: watched,
            paused,
            dirty_log,
            new_regions: _,
        } = &state.settings;
        for (number, wire) in (0..).zip(vectors) {
            if wire.masked {
                send_call(
                    channel,
                    call::change_vector(number, VectorChange::Mask),
                    None,
                )?;
            }
            if let Some(eventfd) = &wire.eventfd {
                let connect = call::change_vector(number, VectorChange::Connect);
                send_call(channel, connect, Some(eventfd))?;
            }
        }
        if let Some(rates) = rates {
            send_call(channel, call::set_rate_limits(*rates), None)?;
        }
        if let Some(coalescing) = coalescing {
            send_call(channel, call::set_coalescing(*coalescing), None)?;
        }
        for (wanted, call) in [
            (*silent, call::begin_untrapped_doorbells()),
            (*watched, call::watch_admin_doorbells()),
        ] {
            if wanted {
                send_call(channel, call, None)?.map_err(|failed| failed.0)?;
            }
        }
        if *paused {
            send_call(channel, call::pause(), None)?.map_err(io::Error::other)?;
        }
        if dirty_log.is_some() {
            send_call(channel, call::start_dirty_log(), None)??;
        }
        restore_queues(channel, queues)
    }
}

/// Makes a server restore the guest's queues. This must be the last request, because the server carries out commands
/// afterwards.
fn restore_queues(
    channel: &LeaseChannel,
    queues: &PersistedQueues,
) -> Result<BackendEvent, ReattachError> {
    let restored = send_call(channel, call::restore_running(queues.clone()), None)?;
    Ok(match restored {
        Ok(()) => BackendEvent::BackWithQueues,
        // A later attempt may succeed, for example once memory is mapped again or the server has enough resources.
        Err(error @ BackendStateError::Queue { .. }) => return Err(error.into()),
        Err(error) => {
            log::error!(
                "The next drive server cannot restore the queues: {}",
                describe_error(&error)
            );
            BackendEvent::BackWithoutQueues
        }
    })
}

fn send_call<T: DeserializeOwned>(
    channel: &LeaseChannel,
    call: BackendCall<T>,
    descriptor: Option<&OwnedFd>,
) -> Result<T, ChannelError> {
    let descriptor = descriptor.map(AsFd::as_fd);
    channel.send(&call.request, descriptor.as_slice())?;
    Ok(channel.receive_answer()?.0)
}

/// Waits until the other side closes the connection.
fn await_end(stream: &Stream) {
    retry_wait("the end of a drive server", || wait_for_end(stream));
}

/// Repeats a wait that the kernel refuses, for example because no file descriptor is free.
fn retry_wait(what: &str, wait: impl Fn() -> io::Result<()>) {
    let mut reported = false;
    while let Err(error) = wait() {
        if !std::mem::replace(&mut reported, true) {
            log::error!("Cannot wait for {what}, trying again: {error}");
        }
        clock::sleep(RETRY_INTERVALS.1);
    }
}
