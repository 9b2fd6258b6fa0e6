//! The control socket. A client sends one line of JSON, the server answers with one line of JSON, and the connection ends.
//!
//! One thread serves all clients concurrently, and this thread serves no function. So a client that sends or reads slowly
//! delays neither other clients nor functions.
//!
//! A change of functions may take long, for example to wipe a range. So the service makes the change on another thread, and
//! replies when the change is done. The change is completed even if the client has disconnected.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::num::NonZeroU64;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use event_manager::{EventManager, EventOps, EventSet, Events, MutEventSubscriber, SubscriberOps};
use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerCredentials;
use nix::unistd::geteuid;
use nvme_guest::threads::start_thread;
use nvme_mpt_logging::LogFilter;
use nvme_mpt_memory::clock;
use nvme_mpt_memory::deadline::{Deadline, SystemClock};
use serde::{Deserialize, Serialize};
use thiserror::Error;
use vmm_sys_util::eventfd::EventFd;

use crate::capacity::DriveCapacity;
use crate::change::{ChangeResult, FunctionChange, FunctionEntry};
use crate::faults::{DriveFaults, FaultRequest};
use crate::owner::user_name;
use crate::stats::ServerStats;
use vfio_user_server::SocketListener;

/// Maximum number of connected clients. A further client replaces the oldest.
const CLIENTS_MAX: usize = 64;

/// Timeout of a client for its answer. It is long enough for a server that first serves several other clients.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(if cfg!(test) { 180 } else { 10 });

/// Maximum wait until a new server listens on the control socket after an upgrade or restart.
const TAKEOVER_TIMEOUT: Duration = Duration::from_secs(30);

/// Interval between attempts to connect to the new server.
const TAKEOVER_POLL_INTERVAL: Duration = Duration::from_millis(2);

/// Maximum size of a request in bytes: a fault schedule with JSON escapes fits.
const REQUEST_MAX: usize = 128 << 10;

/// Maximum size of an answer in bytes: the statistics of thousands of queues fit.
const ANSWER_MAX: usize = 64 << 20;

/// Error of the control socket or of a request on it.
#[derive(Debug, Error)]
pub enum ControlError {
    /// The socket cannot be bound.
    #[error(
        "Cannot create the control socket; to run a second server, choose another path with --control"
    )]
    Bind(#[source] vfio_user_server::Error),
    /// The thread or its event loop cannot be created.
    #[error("Cannot start the control thread")]
    Thread(#[source] io::Error),
    /// Waiting for events failed.
    #[error("Cannot wait for control clients")]
    Events(#[source] event_manager::Error),
    /// No server listens on the socket.
    #[error("No server answers on {}: start `nvme-mpt serve`, or give its control socket with --control", path.display())]
    NoServer {
        /// The socket.
        path: PathBuf,
        /// Cause of the failed connection.
        source: io::Error,
    },
    /// This user may not connect.
    #[error(
        "User {user} may not use the control socket {}: run this as root or as the server's user", path.display()
    )]
    Permission {
        /// The socket.
        path: PathBuf,
        /// The user of this process.
        user: String,
        /// The kernel's error.
        source: io::Error,
    },
    /// The server did not answer in time, or the connection failed.
    #[error("The server on {} does not answer", path.display())]
    NoAnswer {
        /// The socket.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// The answer cannot be parsed.
    #[error(
        "This version does not understand the answer of the server on {}: use the version of nvme-mpt that the \
         server has",
        path.display()
    )]
    BadAnswer {
        /// The socket.
        path: PathBuf,
        /// Cause.
        source: serde_json::Error,
    },
    /// After an upgrade, the successor does not listen on the control socket.
    #[error(
        "Process {process} should have taken over, but does not answer on {}: see the log of the server; its supervisor \
         restarts it",
        path.display()
    )]
    NotTakenOver {
        /// The socket.
        path: PathBuf,
        /// Process id of the successor.
        process: u32,
    },
    /// The server refused the request.
    #[error("The server on {} refused: {reason}", path.display())]
    Refused {
        /// The socket.
        path: PathBuf,
        /// The server's reason.
        reason: String,
    },
}

/// A client's request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "snake_case", deny_unknown_fields)]
enum ControlRequest {
    /// Report the statistics.
    Stats {},
    /// List or change injected faults.
    Faults {
        /// The operation.
        request: FaultRequest,
    },
    /// List the functions.
    List {},
    /// Report the log filter, after an optional change.
    Log {
        /// The new filter.
        filter: Option<String>,
    },
    /// Report the capacity of the drives.
    Capacity {
        /// Allocation unit in bytes, a power of two. `None` uses each drive's own unit.
        unit: Option<NonZeroU64>,
    },
    /// Use a new supervisor, since the previous supervisor has ended.
    Adopt {
        /// Address of the supervisor's socket.
        supervisor: PathBuf,
        /// Maximum number of descriptors that the supervisor stores.
        max: u64,
    },
    /// Change the functions.
    Change {
        /// The change.
        change: FunctionChange,
    },
}

/// A server's answer.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum ControlAnswer {
    /// Answer to [`ControlRequest::Stats`].
    Stats(ServerStats),
    /// Answer to [`ControlRequest::Faults`]: the faults of all drives that support injection.
    Faults(Vec<DriveFaults>),
    /// Answer to [`ControlRequest::List`].
    List(Vec<FunctionEntry>),
    /// Answer to [`ControlRequest::Log`]: the filter in effect.
    Log(String),
    /// Answer to [`ControlRequest::Capacity`].
    Capacity(Vec<DriveCapacity>),
    /// Answer to [`ControlRequest::Adopt`]: the server starts storing its descriptors with the new supervisor.
    Adopted(()),
    /// Answer to [`ControlRequest::Change`].
    Changed(ChangeResult),
    /// The request is invalid or failed.
    Error(String),
}

/// Implementation of the control socket's requests.
pub trait ControlService: Send + 'static {
    /// Returns the statistics.
    fn stats(&self) -> ServerStats;

    /// Lists or changes injected faults. Returns the resulting faults.
    ///
    /// # Errors
    /// Returns the reason as text.
    fn update_faults(&self, request: &FaultRequest) -> Result<Vec<DriveFaults>, String>;

    /// Returns the functions.
    fn functions(&self) -> Vec<FunctionEntry>;

    /// Sets a new log filter, if one is given. Returns the filter in effect.
    ///
    /// # Errors
    /// Returns the reason as text.
    fn set_log_filter(&self, filter: Option<&str>) -> Result<String, String>;

    /// Returns the capacity of the drives for leases in allocation units of `unit` bytes, or of each drive's own unit for
    /// `None`.
    ///
    /// # Errors
    /// Returns the reason as text.
    fn capacity(&self, unit: Option<NonZeroU64>) -> Result<Vec<DriveCapacity>, String>;

    /// Switches to a new supervisor after the previous supervisor has ended. Implementations must not send a message to the
    /// new supervisor before they return.
    ///
    /// # Errors
    /// Returns the reason for refusing the supervisor as text.
    fn adopt_supervisor(&self, supervisor: &Path, max: u64) -> Result<(), String>;

    /// Starts a change of the functions, and replies when it is done.
    fn start_change(&self, change: FunctionChange, reply: ChangeReply);
}

/// Reply channel to the client that requested a change.
#[derive(Debug)]
pub struct ChangeReply {
    stream: UnixStream,
    partial_answers: Arc<UnfinishedAnswers>,
}

impl ChangeReply {
    /// Sends the result, or the reason of the failure. Does not block: if the client's socket is full, the control thread
    /// sends the remaining part of the answer.
    pub fn send(self, result: Result<ChangeResult, String>) {
        let answer = match result {
            Ok(changed) => ControlAnswer::Changed(changed),
            Err(reason) => ControlAnswer::Error(reason),
        };
        let Self {
            stream,
            partial_answers: late,
        } = self;
        let exchange = ControlExchange::from_answer(&answer);
        let sent = exchange.and_then(|mut exchange| match exchange.write(&stream)? {
            true => Ok(()),
            false => late.push(ControlClient { stream, exchange }),
        });
        if let Err(error) = sent {
            log::info!("A control client disconnected before its change was complete: {error}");
        }
    }
}

/// Clients that have received a part of the answer to their change. The control thread takes them from here and sends the
/// remaining part.
#[derive(Debug)]
struct UnfinishedAnswers {
    clients: Mutex<Vec<ControlClient>>,
    wakeup: EventFd,
}

impl UnfinishedAnswers {
    fn clients(&self) -> MutexGuard<'_, Vec<ControlClient>> {
        // A poisoned lock is usable: no change can be interrupted by a panic.
        self.clients.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, client: ControlClient) -> io::Result<()> {
        self.clients().push(client);
        self.wakeup.write(1)
    }
}

/// A bound control socket. Connections wait in the socket's backlog until the socket is served.
#[derive(Debug)]
pub struct ControlListener(SocketListener);

impl ControlListener {
    /// Binds a socket at `path`.
    ///
    /// # Errors
    /// The socket cannot be bound.
    pub fn bind(path: &Path) -> Result<Self, ControlError> {
        SocketListener::bind(path)
            .map(Self)
            .map_err(ControlError::Bind)
    }
}

/// A running control socket. Dropping it ends the thread.
#[derive(Debug)]
pub struct ControlServer {
    stop: EventFd,
    thread: Option<JoinHandle<()>>,
}

impl ControlServer {
    /// Starts serving `service` on the socket.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(
        listener: ControlListener,
        service: impl ControlService,
    ) -> Result<Self, ControlError> {
        let ControlListener(listener) = listener;
        let stop =
            EventFd::new(libc::EFD_CLOEXEC | libc::EFD_NONBLOCK).map_err(ControlError::Thread)?;
        let came =
            EventFd::new(libc::EFD_CLOEXEC | libc::EFD_NONBLOCK).map_err(ControlError::Thread)?;
        let late = UnfinishedAnswers {
            clients: Mutex::default(),
            wakeup: came,
        };
        let clients = ControlClients {
            listener,
            partial_answers: Arc::new(late),
            stop: stop.try_clone().map_err(ControlError::Thread)?,
            stopped: false,
            clients: VecDeque::new(),
            service,
        };
        let mut events = EventManager::new().map_err(ControlError::Events)?;
        let serve = move || {
            let clients = events.add_subscriber(clients);
            while events
                .subscriber_mut(clients)
                .is_ok_and(|clients| !clients.stopped)
            {
                if let Err(error) = events.run() {
                    log::error!("The control socket is closed: {error}");
                    return;
                }
            }
        };
        let thread = start_thread("control", serve).map_err(ControlError::Thread)?;
        Ok(Self {
            stop,
            thread: Some(thread),
        })
    }
}

impl Drop for ControlServer {
    fn drop(&mut self) {
        // The write cannot fail: the eventfd's counter is 0 before it.
        let _ = self.stop.write(1);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!("The control thread ended by itself");
        }
    }
}

/// State of the control thread.
struct ControlClients<S> {
    listener: SocketListener,
    partial_answers: Arc<UnfinishedAnswers>,
    stop: EventFd,
    stopped: bool,
    /// Connected clients, oldest first.
    clients: VecDeque<ControlClient>,
    service: S,
}

/// A client with a non-blocking stream.
#[derive(Debug)]
struct ControlClient {
    stream: UnixStream,
    exchange: ControlExchange,
}

/// Progress of a client's request and answer.
#[derive(Debug)]
enum ControlExchange {
    /// The request is incomplete, and this is its received part.
    Receiving(Vec<u8>),
    /// The answer is partly sent.
    Sending {
        /// The complete answer with its line end.
        answer: Vec<u8>,
        /// Number of bytes sent.
        sent_bytes: usize,
    },
}

impl ControlExchange {
    fn from_answer(answer: &ControlAnswer) -> io::Result<Self> {
        let mut answer = serde_json::to_vec(answer)?;
        answer.push(b'\n');
        Ok(Self::Sending {
            answer,
            sent_bytes: 0,
        })
    }

    /// Sends as much of the answer as the socket accepts. Returns whether the whole answer is sent.
    fn write(&mut self, mut stream: &UnixStream) -> io::Result<bool> {
        let Self::Sending {
            answer,
            sent_bytes: taken,
        } = self
        else {
            return Ok(false);
        };
        while let Some(left) = answer.get(*taken..).filter(|left| !left.is_empty()) {
            match stream.write(left) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => *taken += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }
}

/// Next step of the control thread for a client whose socket was ready.
enum ControlClientStep {
    /// Wait for these events.
    Wait(EventSet),
    /// Disconnect the client, which has received its answer or sent no request.
    Done,
    /// Pass the requested change to the service, which sends the reply.
    Change(FunctionChange),
}

impl<S: ControlService> MutEventSubscriber for ControlClients<S> {
    fn init(&mut self, ops: &mut EventOps) {
        for events in [
            Events::new(&self.listener, EventSet::IN),
            Events::new(&self.stop, EventSet::IN),
            Events::new(&self.partial_answers.wakeup, EventSet::IN),
        ] {
            if let Err(error) = ops.add(events) {
                log::error!("The control socket is closed: {error}");
                self.stopped = true;
            }
        }
    }

    fn process(&mut self, events: Events, ops: &mut EventOps) {
        let fd = events.fd();
        if fd == self.stop.as_raw_fd() {
            self.stopped = true;
        } else if fd == self.partial_answers.wakeup.as_raw_fd() {
            // Does not block: this thread was woken because the eventfd is readable.
            let _ = self.partial_answers.wakeup.read();
            let late = std::mem::take(&mut *self.partial_answers.clients());
            for client in late {
                self.add_client(client, EventSet::OUT, ops);
            }
        } else if fd == self.listener.as_raw_fd() {
            match self.listener.accept() {
                Ok(Some(stream)) => {
                    let exchange = ControlExchange::Receiving(Vec::new());
                    self.add_client(ControlClient { stream, exchange }, EventSet::IN, ops);
                }
                Ok(None) => {}
                Err(error) => log::warn!("Cannot accept a control client: {error}"),
            }
        } else if let Err(error) = self.advance_client(fd, ops) {
            log::info!("Cannot answer a control client: {error}");
        }
    }
}

impl<S: ControlService> ControlClients<S> {
    /// Adds a client and waits for its events. Disconnects the oldest client if there are too many.
    fn add_client(&mut self, client: ControlClient, events: EventSet, ops: &mut EventOps) {
        if self.clients.len() >= CLIENTS_MAX && self.remove_client(0, ops).is_some() {
            log::warn!(
                "{CLIENTS_MAX} control clients send no request or do not read their answers: disconnecting the first \
                 one"
            );
        }
        match ops.add(Events::new(&client.stream, events)) {
            Ok(()) => self.clients.push_back(client),
            Err(error) => log::warn!("Cannot watch the socket of a control client: {error}"),
        }
    }

    /// Removes a client and stops waiting for its events.
    fn remove_client(&mut self, index: usize, ops: &mut EventOps) -> Option<UnixStream> {
        let ControlClient { stream, .. } = self.clients.remove(index)?;
        if let Err(error) = ops.remove(Events::new(&stream, EventSet::IN)) {
            log::warn!("Cannot stop watching the socket of a control client: {error}");
        }
        Some(stream)
    }

    /// Continues the exchange with a client whose socket is ready.
    fn advance_client(&mut self, fd: RawFd, ops: &mut EventOps) -> io::Result<()> {
        let mut clients = self.clients.iter_mut().enumerate();
        let Some((index, client)) = clients.find(|(_, client)| client.stream.as_raw_fd() == fd)
        else {
            return Ok(());
        };
        let step = client.advance(&self.service);
        let waited = match &step {
            Ok(ControlClientStep::Wait(events)) => ops.modify(Events::new(&client.stream, *events)),
            _ => Ok(()),
        };
        if let (Ok(ControlClientStep::Wait(_)), Ok(())) = (&step, &waited) {
            return Ok(());
        }
        let stream = self.remove_client(index, ops);
        waited.map_err(io::Error::other)?;
        if let (ControlClientStep::Change(change), Some(stream)) = (step?, stream) {
            let late = self.partial_answers.clone();
            self.service.start_change(
                change,
                ChangeReply {
                    stream,
                    partial_answers: late,
                },
            );
        }
        Ok(())
    }
}

impl ControlClient {
    /// Receives a part of the request, or sends a part of the answer.
    fn advance(&mut self, service: &impl ControlService) -> io::Result<ControlClientStep> {
        if let ControlExchange::Receiving(request) = &mut self.exchange {
            match receive_part(&self.stream, request, REQUEST_MAX) {
                Ok(LineProgress::Complete) => {}
                Ok(LineProgress::Partial) => return Ok(ControlClientStep::Wait(EventSet::IN)),
                // A connection without a request is no error: `listening_pid` makes such connections, to find the server's
                // process.
                Ok(LineProgress::Closed) => return Ok(ControlClientStep::Done),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Ok(ControlClientStep::Wait(EventSet::IN));
                }
                Err(error) => return Err(error),
            }
            let answer = match serde_json::from_slice(request) {
                Ok(request) => match execute_request(service, request) {
                    Ok(answer) => answer,
                    Err(change) => return Ok(ControlClientStep::Change(change)),
                },
                Err(error) => ControlAnswer::Error(format!(
                    "not a request: {error}; write {{\"command\":\"stats\"}} and a new line"
                )),
            };
            self.exchange = ControlExchange::from_answer(&answer)?;
        }
        Ok(match self.exchange.write(&self.stream)? {
            true => ControlClientStep::Done,
            false => ControlClientStep::Wait(EventSet::OUT),
        })
    }
}

/// Executes a request and returns its answer. For a change of functions, returns the change as `Err`, because another
/// thread makes changes.
fn execute_request(
    service: &impl ControlService,
    request: ControlRequest,
) -> Result<ControlAnswer, FunctionChange> {
    let or_reason =
        |answer: Result<ControlAnswer, String>| answer.unwrap_or_else(ControlAnswer::Error);
    Ok(match request {
        ControlRequest::Stats {} => ControlAnswer::Stats(service.stats()),
        ControlRequest::Faults { request } => {
            or_reason(service.update_faults(&request).map(ControlAnswer::Faults))
        }
        ControlRequest::List {} => ControlAnswer::List(service.functions()),
        ControlRequest::Log { filter } => or_reason(
            service
                .set_log_filter(filter.as_deref())
                .map(ControlAnswer::Log),
        ),
        ControlRequest::Capacity { unit } => {
            or_reason(service.capacity(unit).map(ControlAnswer::Capacity))
        }
        ControlRequest::Adopt { supervisor, max } => or_reason(
            service
                .adopt_supervisor(&supervisor, max)
                .map(ControlAnswer::Adopted),
        ),
        ControlRequest::Change { change } => return Err(change),
    })
}

/// Requests the statistics of the server on the control socket at `path`.
///
/// # Errors
/// There is no server, or its answer cannot be understood.
pub fn query_stats(path: &Path) -> Result<ServerStats, ControlError> {
    match send_request(path, &ControlRequest::Stats {})? {
        ControlAnswer::Stats(stats) => Ok(stats),
        other => Err(other.into_error(path)),
    }
}

/// Asks the server on the control socket at `path` to use a new supervisor.
///
/// # Errors
/// There is no server, or it refuses the supervisor.
pub fn offer_supervisor(path: &Path, supervisor: &Path, max: u64) -> Result<(), ControlError> {
    let supervisor = supervisor.to_owned();
    match send_request(path, &ControlRequest::Adopt { supervisor, max })? {
        ControlAnswer::Adopted(()) => Ok(()),
        other => Err(other.into_error(path)),
    }
}

/// Returns the process id, in this process's PID namespace, of the server that listens at `path`. Returns `None` if no process
/// listens, or if the server has no id in this namespace.
#[must_use]
pub fn listening_pid(path: &Path) -> Option<u32> {
    let stream = UnixStream::connect(path).ok()?;
    let peer = getsockopt(&stream, PeerCredentials).ok()?;
    u32::try_from(peer.pid()).ok().filter(|number| *number != 0)
}

/// Waits until another process than `old_pid` listens at `path`. `process` is the successor's id in the server's PID namespace,
/// which may not be the PID namespace of this process.
///
/// # Errors
/// [`ControlError::NotTakenOver`] if this takes more than 30 seconds.
pub fn await_server(path: &Path, old_pid: Option<u32>, process: u32) -> Result<(), ControlError> {
    let deadline = Deadline::after(&SystemClock::shared(), TAKEOVER_TIMEOUT);
    loop {
        let listens = listening_pid(path);
        let is_next = listens.is_some() && old_pid.is_some() && listens != old_pid;
        if listens == Some(process) || is_next {
            return Ok(());
        }
        if deadline.remaining().is_zero() {
            return Err(ControlError::NotTakenOver {
                path: path.to_owned(),
                process,
            });
        }
        clock::sleep(TAKEOVER_POLL_INTERVAL);
    }
}

/// Sends a request about injected faults to the server on the control socket at `path`.
///
/// # Errors
/// There is no server, it refuses, or its answer cannot be understood.
pub fn query_faults(path: &Path, request: FaultRequest) -> Result<Vec<DriveFaults>, ControlError> {
    match send_request(path, &ControlRequest::Faults { request })? {
        ControlAnswer::Faults(faults) => Ok(faults),
        other => Err(other.into_error(path)),
    }
}

/// Requests the functions of the server on the control socket at `path`.
///
/// # Errors
/// There is no server, or its answer cannot be understood.
pub fn query_functions(path: &Path) -> Result<Vec<FunctionEntry>, ControlError> {
    match send_request(path, &ControlRequest::List {})? {
        ControlAnswer::List(functions) => Ok(functions),
        other => Err(other.into_error(path)),
    }
}

/// Sets the log filter of the server on the control socket at `path`, if one is given. Returns the filter in effect.
///
/// # Errors
/// There is no server, it refuses, or its answer cannot be understood.
pub fn set_log_filter(path: &Path, filter: Option<&LogFilter>) -> Result<String, ControlError> {
    let filter = filter.map(LogFilter::to_string);
    match send_request(path, &ControlRequest::Log { filter })? {
        ControlAnswer::Log(filter) => Ok(filter),
        other => Err(other.into_error(path)),
    }
}

/// Requests the capacity of the drives of the server on the control socket at `path`. The capacity is counted in allocation
/// units of `unit` bytes, or of each drive's own unit if `None`.
///
/// # Errors
/// There is no server, it refuses, or its answer cannot be understood.
pub fn query_capacity(
    path: &Path,
    unit: Option<NonZeroU64>,
) -> Result<Vec<DriveCapacity>, ControlError> {
    match send_request(path, &ControlRequest::Capacity { unit })? {
        ControlAnswer::Capacity(capacity) => Ok(capacity),
        other => Err(other.into_error(path)),
    }
}

/// Requests a change from the server on the control socket at `path`, and waits until the change is done.
///
/// # Errors
/// There is no server, it refuses, or its answer cannot be understood.
pub fn request_change(path: &Path, change: FunctionChange) -> Result<ChangeResult, ControlError> {
    match send_request(path, &ControlRequest::Change { change })? {
        ControlAnswer::Changed(changed) => Ok(changed),
        other => Err(other.into_error(path)),
    }
}

impl ControlAnswer {
    /// Returns the error for an answer whose kind does not match the request.
    fn into_error(self, path: &Path) -> ControlError {
        let reason = match self {
            Self::Error(reason) => reason,
            _ => "its answer is for another request".to_owned(),
        };
        ControlError::Refused {
            path: path.to_owned(),
            reason,
        }
    }
}

fn send_request(path: &Path, request: &ControlRequest) -> Result<ControlAnswer, ControlError> {
    let no_server = |source: io::Error| match source.kind() {
        io::ErrorKind::PermissionDenied => ControlError::Permission {
            path: path.to_owned(),
            user: user_name(geteuid().as_raw()),
            source,
        },
        _ => ControlError::NoServer {
            path: path.to_owned(),
            source,
        },
    };
    let no_answer = |source| ControlError::NoAnswer {
        path: path.to_owned(),
        source,
    };
    let bad_answer = |source| ControlError::BadAnswer {
        path: path.to_owned(),
        source,
    };
    let stream = UnixStream::connect(path).map_err(no_server)?;
    let mut line = LineStream::new(&stream, CLIENT_TIMEOUT).map_err(no_answer)?;
    let request_line = serde_json::to_vec(request).map_err(bad_answer)?;
    line.write(&request_line).map_err(no_answer)?;
    if matches!(request, ControlRequest::Change { .. }) {
        // No deadline for the answer to a change, which may take arbitrarily long. If the server ends meanwhile, it closes the
        // connection.
        line.deadline = None;
    }
    let answer = line.read(ANSWER_MAX).map_err(no_answer)?;
    let answer = answer.ok_or_else(|| no_answer(io::ErrorKind::UnexpectedEof.into()))?;
    serde_json::from_slice(&answer).map_err(bad_answer)
}

/// Progress of receiving a line.
enum LineProgress {
    /// The line is incomplete.
    Partial,
    /// The line is complete.
    Complete,
    /// The connection ended before the first byte.
    Closed,
}

/// Receives a part of a line, without the line end.
fn receive_part(
    mut stream: &UnixStream,
    line: &mut Vec<u8>,
    limit: usize,
) -> io::Result<LineProgress> {
    let mut chunk = [0; 4096];
    let count = match stream.read(&mut chunk) {
        Err(error) if error.kind() == io::ErrorKind::Interrupted => {
            return Ok(LineProgress::Partial);
        }
        read => read?,
    };
    let end = chunk[..count].iter().position(|byte| *byte == b'\n');
    line.extend_from_slice(&chunk[..end.unwrap_or(count)]);
    if line.len() > limit {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    match end {
        Some(_) => Ok(LineProgress::Complete),
        None if count > 0 => Ok(LineProgress::Partial),
        None if line.is_empty() => Ok(LineProgress::Closed),
        None => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

/// Sends and receives lines, all within one deadline.
struct LineStream<'stream> {
    stream: &'stream UnixStream,
    /// Time by which the request must be sent and the answer received; `None` to wait indefinitely.
    deadline: Option<Deadline>,
}

impl<'stream> LineStream<'stream> {
    fn new(stream: &'stream UnixStream, timeout: Duration) -> io::Result<Self> {
        stream.set_nonblocking(false)?;
        Ok(Self {
            stream,
            deadline: Some(Deadline::after(&SystemClock::shared(), timeout)),
        })
    }

    fn time_left(&self) -> io::Result<Option<Duration>> {
        match self.deadline.as_ref().map(Deadline::remaining) {
            Some(Duration::ZERO) => Err(io::ErrorKind::TimedOut.into()),
            left => Ok(left),
        }
    }

    /// Receives a line and removes its line end. Returns `None` if the connection ends before the first byte.
    fn read(&self, limit: usize) -> io::Result<Option<Vec<u8>>> {
        let mut line = Vec::new();
        loop {
            self.stream.set_read_timeout(self.time_left()?)?;
            match receive_part(self.stream, &mut line, limit)? {
                LineProgress::Partial => {}
                LineProgress::Complete => return Ok(Some(line)),
                LineProgress::Closed => return Ok(None),
            }
        }
    }

    /// Sends a line and its end.
    fn write(&self, line: &[u8]) -> io::Result<()> {
        for mut part in [line, b"\n"] {
            while !part.is_empty() {
                self.stream.set_write_timeout(self.time_left()?)?;
                match { self.stream }.write(part) {
                    Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                    Ok(count) => part = &part[count..],
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;
    use crate::change::ReloadResult;
    use crate::stats::FunctionStats;

    /// A service that counts requests for statistics, and reports faults for one drive.
    #[derive(Default)]
    struct CountingService(AtomicU64);

    /// Name of a drive whose faults do not fit into the buffer of a socket.
    const LONG: &str = "a drive with very many faults";

    /// Number of entries in the answer about [`LONG`].
    const LONG_LEN: usize = 100_000;

    impl ControlService for CountingService {
        fn stats(&self) -> ServerStats {
            ServerStats {
                functions: vec![FunctionStats {
                    capacity_bytes: self.0.fetch_add(1, Ordering::Relaxed),
                    ..FunctionStats::default()
                }],
                ..ServerStats::default()
            }
        }

        fn update_faults(&self, request: &FaultRequest) -> Result<Vec<DriveFaults>, String> {
            match request {
                FaultRequest::Inject { drive, plan } if plan.len() == 60_000 => {
                    Ok(vec![DriveFaults {
                        drive: drive.clone(),
                        faults: Vec::new(),
                    }])
                }
                FaultRequest::Inject { drive, .. } if drive == LONG => Ok((0..LONG_LEN)
                    .map(|_| DriveFaults {
                        drive: drive.clone(),
                        faults: Vec::new(),
                    })
                    .collect()),
                _ => Err("no such drive".to_owned()),
            }
        }

        fn adopt_supervisor(&self, _: &Path, _: u64) -> Result<(), String> {
            Err("its supervisor has not ended".to_owned())
        }

        fn set_log_filter(&self, filter: Option<&str>) -> Result<String, String> {
            match filter {
                Some("info") | None => Ok("info".to_owned()),
                Some(other) => Err(format!("no {other}")),
            }
        }

        fn functions(&self) -> Vec<FunctionEntry> {
            Vec::new()
        }

        fn capacity(&self, unit: Option<NonZeroU64>) -> Result<Vec<DriveCapacity>, String> {
            match unit {
                Some(_) => Ok(Vec::new()),
                None => Err("no ledger".to_owned()),
            }
        }

        fn start_change(&self, change: FunctionChange, reply: ChangeReply) {
            if let FunctionChange::Remove { id, .. } = &change
                && id == LONG
            {
                // Replies on the control thread itself: if the reply waited for this client, all other clients would be
                // held up.
                return reply.send(Err("x".repeat(LONG_LEN * 40)));
            }
            // Replies from another thread, while the control thread serves other clients.
            let answer = move || match change {
                FunctionChange::Reload { .. } => {
                    reply.send(Ok(ChangeResult::Reloaded(ReloadResult::default())))
                }
                _ => reply.send(Err("not now".to_owned())),
            };
            start_thread("change", answer).unwrap();
        }
    }

    fn server(path: &Path) -> ControlServer {
        let listener = ControlListener::bind(path).unwrap();
        ControlServer::start(listener, CountingService::default()).unwrap()
    }

    #[test]
    fn faults_are_injected_and_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("control.sock");
        let _server = server(&path);
        // The request has the longest allowed plan, of the characters that take the most bytes in JSON.
        let inject = FaultRequest::Inject {
            drive: "memory:1G".to_owned(),
            plan: "\n".repeat(60_000),
        };
        let faults = query_faults(&path, inject).unwrap();
        assert_eq!(faults[0].drive, "memory:1G");
        let error = query_faults(&path, FaultRequest::List {}).unwrap_err();
        assert!(
            error.to_string().ends_with("refused: no such drive"),
            "{error}"
        );
    }

    fn ask(path: &Path, request: &[u8]) -> String {
        let mut stream = UnixStream::connect(path).unwrap();
        stream.write_all(request).unwrap();
        let mut answer = String::new();
        BufReader::new(stream).read_line(&mut answer).unwrap();
        answer
    }

    #[test]
    fn changes_are_answered_on_completion() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("control.sock");
        let _server = server(&path);
        let reload = FunctionChange::Reload { force: false };
        let changed = request_change(&path, reload.clone()).unwrap();
        assert_eq!(changed, ChangeResult::Reloaded(ReloadResult::default()));
        // This client sends a change and disconnects.
        let mut line = serde_json::to_vec(&ControlRequest::Change { change: reload }).unwrap();
        line.push(b'\n');
        UnixStream::connect(&path)
            .unwrap()
            .write_all(&line)
            .unwrap();
        let remove = FunctionChange::Remove {
            id: "a".to_owned(),
            force: false,
        };
        let error = request_change(&path, remove).unwrap_err();
        assert!(error.to_string().ends_with("refused: not now"), "{error}");
        assert_eq!(query_functions(&path).unwrap(), []);
        assert_eq!(query_capacity(&path, NonZeroU64::new(1 << 20)).unwrap(), []);
        let error = query_capacity(&path, None).unwrap_err();
        assert!(error.to_string().ends_with("refused: no ledger"), "{error}");
    }

    #[test]
    fn statistics_are_read_for_each_request() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("control.sock");
        let server = server(&path);
        for request in 0..3 {
            let stats = query_stats(&path).unwrap();
            assert_eq!(stats.functions[0].capacity_bytes, request);
        }
        drop(server);
        assert!(!path.exists());
        let error = query_stats(&path).unwrap_err();
        assert!(matches!(error, ControlError::NoServer { .. }), "{error}");
    }

    #[test]
    fn invalid_requests_get_an_error_and_affect_no_other_client() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("control.sock");
        let _server = server(&path);
        for request in [
            &b"\n"[..],
            b"stats\n",
            b"{\"command\":\"halt\"}\n",
            b"{\"command\":\"stats\",\"more\":1}\n",
            b"\xff\xff\n",
        ] {
            let answer = ask(&path, request);
            assert!(
                answer.starts_with("{\"error\":\"not a request: "),
                "{answer}"
            );
            assert!(answer.ends_with("\"}\n"), "{answer}");
        }
        // This client sends a request that is too long, and disconnects. The server sends no answer, and serves the next
        // client.
        let mut stream = UnixStream::connect(&path).unwrap();
        let _ = stream.write_all(&[b'x'; 2 * REQUEST_MAX]);
        assert_eq!(stream.read(&mut [0]).unwrap_or(0), 0);
        drop(UnixStream::connect(&path).unwrap());
        query_stats(&path).unwrap();
    }

    #[test]
    fn a_late_request_blocks_no_other_client_and_is_answered() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("control.sock");
        let _server = server(&path);
        let mut late: Vec<_> = (0..CLIENTS_MAX)
            .map(|_| UnixStream::connect(&path).unwrap())
            .collect();
        for request in 0..2 {
            let stats = query_stats(&path).unwrap();
            assert_eq!(stats.functions[0].capacity_bytes, request);
        }
        // The server closed this connection to make room for another client.
        assert_eq!(late[0].read(&mut [0]).unwrap(), 0);
        for (request, stream) in (2..).zip(late.drain(3..).rev()) {
            (&stream).write_all(b"{\"command\":\"stats\"}\n").unwrap();
            let mut answer = String::new();
            BufReader::new(stream).read_line(&mut answer).unwrap();
            let capacity = format!("\"capacity_bytes\":{request}");
            assert!(answer.contains(&capacity), "{answer}");
        }
    }

    #[test]
    fn a_partial_request_blocks_no_other_client_and_is_answered_once_complete() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("control.sock");
        let _server = server(&path);
        let (half, rest) = b"{\"command\":\"stats\"}\n".split_at(9);
        let mut late = UnixStream::connect(&path).unwrap();
        late.write_all(half).unwrap();
        for request in 0..2 {
            let stats = query_stats(&path).unwrap();
            assert_eq!(stats.functions[0].capacity_bytes, request);
        }
        late.write_all(rest).unwrap();
        let mut answer = String::new();
        BufReader::new(late).read_line(&mut answer).unwrap();
        assert!(answer.contains("\"capacity_bytes\":2"), "{answer}");
        // A client that disconnects in the middle of its request is forgotten.
        let mut gone = UnixStream::connect(&path).unwrap();
        gone.write_all(half).unwrap();
        drop(gone);
        query_stats(&path).unwrap();
    }

    #[test]
    fn a_slow_reader_blocks_no_other_client_and_gets_its_answer_later() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("control.sock");
        let _server = server(&path);
        let mut late = UnixStream::connect(&path).unwrap();
        let long = FaultRequest::Inject {
            drive: LONG.to_owned(),
            plan: String::new(),
        };
        let mut request = serde_json::to_vec(&ControlRequest::Faults { request: long }).unwrap();
        request.push(b'\n');
        late.write_all(&request).unwrap();
        // The server has sent the first byte of the answer.
        assert_eq!(late.read(&mut [0]).unwrap(), 1);
        for request_number in 0..2 {
            let stats = query_stats(&path).unwrap();
            assert_eq!(stats.functions[0].capacity_bytes, request_number);
        }
        let mut answer = "{".to_owned();
        BufReader::new(late).read_line(&mut answer).unwrap();
        let ControlAnswer::Faults(faults) = serde_json::from_str(&answer).unwrap() else {
            panic!("{}", &answer[..100]);
        };
        assert_eq!(faults.len(), LONG_LEN);
        assert_eq!(faults[LONG_LEN - 1].drive, LONG);
    }

    #[test]
    fn a_long_reply_to_a_change_blocks_no_other_client_and_arrives_later() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("control.sock");
        let _server = server(&path);
        let change = FunctionChange::Remove {
            id: LONG.to_owned(),
            force: false,
        };
        let mut request = serde_json::to_vec(&ControlRequest::Change { change }).unwrap();
        request.push(b'\n');
        let mut late = UnixStream::connect(&path).unwrap();
        late.write_all(&request).unwrap();
        assert_eq!(late.read(&mut [0]).unwrap(), 1);
        for request_number in 0..2 {
            let stats = query_stats(&path).unwrap();
            assert_eq!(stats.functions[0].capacity_bytes, request_number);
        }
        let mut answer = "{".to_owned();
        BufReader::new(late).read_line(&mut answer).unwrap();
        let ControlAnswer::Error(reason) = serde_json::from_str(&answer).unwrap() else {
            panic!("{}", &answer[..100]);
        };
        assert_eq!(reason.len(), LONG_LEN * 40);
    }

    #[test]
    fn a_client_without_a_request_is_no_error() {
        let read = |sent: &[u8]| {
            let (mut client, server) = UnixStream::pair().unwrap();
            client.write_all(sent).unwrap();
            drop(client);
            LineStream::new(&server, CLIENT_TIMEOUT)
                .unwrap()
                .read(REQUEST_MAX)
        };
        assert_eq!(read(b"").unwrap(), None);
        assert_eq!(read(b"stats\n").unwrap(), Some(b"stats".to_vec()));
        let cut = read(b"stats").unwrap_err();
        assert_eq!(cut.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn a_second_server_does_not_take_the_socket() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("control.sock");
        let _server = server(&path);
        let error = ControlListener::bind(&path).unwrap_err();
        assert!(matches!(error, ControlError::Bind(_)), "{error}");
        query_stats(&path).unwrap();
    }
}
