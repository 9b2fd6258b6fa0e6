//! A vfio-user server: a listening socket, the device, and at most one client at a time.

use std::io;
use std::net::Shutdown;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use log::{debug, error, info, warn};
use nvme_mpt_memory::describe_error;

use crate::device::VfioUserDevice;
use crate::dispatch::DeviceRegions;
use crate::error::Error;
use crate::kill_point::crash_point;
use crate::listener::{SocketAccess, SocketListener};
use crate::request_log::{LoggedConnection, RequestLog, RequestLogError};
use crate::session::{SessionReadiness, VfioUserSession};
use crate::socket::{self, PeerProcess};
use crate::socket_watcher::SocketWatcher;

/// Token with which the watcher reports events of the listening socket.
const LISTENER: u32 = 0;
/// Token with which the watcher reports events of the client's socket.
const CLIENT: u32 = 1;

/// Maximum number of connections that one event accepts, so that the thread's other event sources get a turn.
const ACCEPTS_PER_TURN: usize = 16;

/// Maximum number of rounds in which the remaining requests of a client that has closed the connection are answered. The
/// requests that fit into a socket's buffer need fewer rounds.
const FINAL_TURNS_MAX: usize = 1024;

/// Timeout for a client's `VERSION` command. Until this command, a connected client prevents all other clients from using the
/// device.
const NEGOTIATION_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum time for which a new client waits for the end of a connection whose process has ended. This is less than the five
/// seconds for which clients wait for an answer.
const SUCCESSION_TIMEOUT: Duration = Duration::from_secs(3);

/// Offers a device to clients, one client at a time.
///
/// Add the server to an event manager, or watch it from another event loop ([`Self::watch`], [`Self::handle_event`]). The
/// server has no thread and no timer of its own: the event loop's thread answers requests as they arrive. If a second client
/// connects, the server closes the second connection immediately. After the first client has disconnected, the next client
/// finds the device in the state in which the first client left it.
///
/// A connection lives as long as its socket: the process that made the connection may pass the socket to another process.
/// Requests of an io_uring can hold the socket of a killed process a little longer. So if the process that made the connection
/// has ended, a new client waits up to three seconds for the socket to close. If the socket is still open then, the server
/// closes the new client's connection.
///
/// The caller's loop must call [`Self::check_timeouts`] when the time that [`Self::next_timeout`] returned is over. This call
/// refuses a new client that has waited three seconds, and disconnects a client that does not send `VERSION` in time.
///
/// # A connection that outlives the process
///
/// A server with a [`RequestLog`] ([`Self::bind_with_log`]) logs each request and its reply. A successor process can continue
/// the server if duplicates of three descriptors outlive this process: the listening socket, the client's socket and the
/// request log. The successor calls [`Self::resume`] with them. The client does not notice: each request is carried out and
/// answered once, at whatever point the first process ended.
///
/// A process with such a server must ignore the signal SIGPIPE, as Rust programs do by default.
#[derive(Debug)]
pub struct VfioUserServer<D: VfioUserDevice> {
    listener: SocketListener,
    device: D,
    regions: Arc<DeviceRegions>,
    client: Option<ConnectedClient>,
    /// New client that waits for the end of the previous connection, and the time when `check_timeouts` first saw the client.
    waiting_client: Option<(UnixStream, Option<Duration>)>,
    /// Log that a successor process needs to continue; `None` for a server that ends with its process.
    request_log: Option<RequestLog>,
    /// Set once a successor has the sockets, so that this server handles no more events.
    is_released: bool,
}

#[derive(Debug)]
struct ConnectedClient {
    session: VfioUserSession,
    /// Process that made the connection, if the kernel reports it.
    peer: Option<PeerProcess>,
    /// Socket events that the watcher reports at present.
    watched_events: EventSet,
    /// Number of clients that were refused because this client was connected.
    refused_clients: u64,
    /// Time when `check_timeouts` first saw the client without a `VERSION`; `None` until then.
    first_seen: Option<Duration>,
}

impl ConnectedClient {
    /// Returns whether the process that made the connection has ended. Another process may still hold the socket.
    fn is_process_dead(&self) -> bool {
        self.peer.as_ref().is_some_and(PeerProcess::is_dead)
    }

    /// Returns whether the client has sent `VERSION`.
    fn has_negotiated(&self) -> bool {
        self.session.dispatcher.negotiated().is_some()
    }

    /// Answers the client's requests. Returns the socket events to wait for, or `None` if the connection has ended.
    fn run<D: VfioUserDevice>(
        &mut self,
        device: &mut D,
        request_log: Option<&mut RequestLog>,
    ) -> Option<EventSet> {
        if let Some(request_log) = request_log {
            return self.session.run_logged(device, request_log);
        }
        match self.session.run(device) {
            SessionReadiness::Reading => Some(EventSet::IN),
            SessionReadiness::Writing => Some(EventSet::OUT),
            SessionReadiness::Ended => None,
        }
    }
}

impl<D: VfioUserDevice> VfioUserServer<D> {
    /// Tokens of the server's events. Other sources of the same event loop must use other tokens.
    pub const TOKENS: Range<u32> = LISTENER..CLIENT + 1;

    /// Offers `device` at `path`. Only this process's user can access the socket file. The file replaces the file of a dead
    /// server. Dropping the server removes the file.
    ///
    /// # Errors
    ///
    /// Another server has the path, the file cannot be created, or a mappable area of the device is invalid.
    pub fn bind(path: impl AsRef<Path>, device: D) -> Result<Self, Error> {
        Self::bind_with(path, SocketAccess::default(), device)
    }

    /// [Offers](Self::bind) `device` at `path`, with the file permissions in `access`.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`Self::bind`]. Only a privileged process may give a file to another user.
    pub fn bind_with(
        path: impl AsRef<Path>,
        access: SocketAccess,
        device: D,
    ) -> Result<Self, Error> {
        Self::bind_inner(path.as_ref(), access, device, None)
    }

    /// [Offers](Self::bind_with) `device` at `path`, and commits the states of the device and of the connection to
    /// `request_log`.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`Self::bind_with`], and an error if the request log cannot be written.
    pub fn bind_with_log(
        path: impl AsRef<Path>,
        access: SocketAccess,
        mut device: D,
        mut request_log: RequestLog,
    ) -> Result<Self, Error> {
        let head = request_log.head().with_client(None);
        request_log.commit(head, device.save())?;
        device.on_saved();
        Self::bind_inner(path.as_ref(), access, device, Some(request_log))
    }

    fn bind_inner(
        path: &Path,
        access: SocketAccess,
        device: D,
        request_log: Option<RequestLog>,
    ) -> Result<Self, Error> {
        let regions = Arc::new(DeviceRegions::from_device(&device)?);
        Ok(Self {
            listener: SocketListener::bind_with(path, access)?,
            device,
            regions,
            client: None,
            waiting_client: None,
            request_log,
            is_released: false,
        })
    }

    /// Continues the server of a predecessor, a process that has ended or has [released](Self::release) the sockets.
    ///
    /// `device` is created from the [record](crate::RequestLogContents::device_state) of the request log. `stream` is the
    /// client's socket, if a duplicate of it was [persisted](VfioUserDevice::persist_client). The event loop completes a
    /// request that the predecessor has begun.
    ///
    /// - If the request log has a client and there is no `stream`, the client has disconnected. So
    ///   [`on_disconnected`](VfioUserDevice::on_disconnected) is called.
    /// - If there is a `stream`, but no client in the request log, the stream belongs to a new client, or is already closed.
    ///   After this call, [`Self::is_connected`] distinguishes these cases.
    ///
    /// On success, dropping the server removes the socket file.
    ///
    /// # Errors
    ///
    /// The request log cannot be accessed, or a mappable area of the device is invalid. An error leaves the sockets and the
    /// socket file unchanged.
    pub fn resume(
        listener: SocketListener,
        request_log: RequestLog,
        stream: Option<UnixStream>,
        device: D,
    ) -> Result<Self, Error> {
        let mut this = Self {
            regions: Arc::new(DeviceRegions::from_device(&device)?),
            listener,
            device,
            client: None,
            waiting_client: None,
            request_log: Some(request_log),
            is_released: true,
        };
        this.restore_client(stream)?;
        this.is_released = false;
        this.listener.adopt();
        Ok(this)
    }

    fn restore_client(&mut self, stream: Option<UnixStream>) -> Result<(), Error> {
        let Some(request_log) = &mut self.request_log else {
            return Ok(());
        };
        let path = self.listener.path().display();
        let regions = self.regions.clone();
        let head = request_log.head();
        let Some(stream) = stream else {
            if head.client.is_some() {
                info!("The client of {path} disconnected with the end of the previous process");
                self.device.on_disconnected();
                let none = head.with_client(None);
                request_log.commit(none, self.device.save())?;
            }
            // Removes the last reply from the request log, even if the client has not read it.
            request_log.finish_request()?;
            self.device.on_saved();
            return Ok(());
        };
        let failed = |source| Error::Socket {
            path: path.to_string().into(),
            action: "set the client's mode",
            source,
        };
        stream.set_nonblocking(true).map_err(failed)?;
        let process = socket::peer_process(&stream).ok();
        let peer = PeerProcess::from_stream(&stream).ok();
        let session = match head.client {
            Some(connected) => {
                VfioUserSession::resume_logged(stream, regions, connected, request_log)?
            }
            // The request log has no client: the predecessor or the client has ended this connection.
            None if socket::has_hung_up(&stream).unwrap_or(true) => {
                self.device.on_saved();
                return Ok(());
            }
            None => {
                let session = VfioUserSession::begin_logged(stream, regions, request_log)?;
                self.device.on_connected(process);
                let head = head.with_client(Some(LoggedConnection::default()));
                request_log.commit(head, self.device.save())?;
                self.device.on_saved();
                session
            }
        };
        debug!("The client of {path} continues");
        self.client = Some(ConnectedClient {
            watched_events: session.initial_events(request_log),
            session,
            peer,
            refused_clients: 0,
            first_seen: None,
        });
        Ok(())
    }

    /// Commits the device's state, if it has changed, to the request log. Does nothing without a request log. Call this after a
    /// change that no request caused.
    ///
    /// # Errors
    ///
    /// The request log cannot be written, or the state is too large.
    pub fn commit(&mut self) -> Result<(), RequestLogError> {
        let Some(request_log) = self.request_log.as_mut().filter(|_| !self.is_released) else {
            return Ok(());
        };
        match self.device.save() {
            Some(state) => request_log.commit(request_log.head(), Some(state))?,
            None => return Ok(()),
        }
        self.device.on_saved();
        Ok(())
    }

    /// Leaves the sockets to a successor. From now on, this server handles no event and commits nothing. Dropping the server
    /// then leaves the socket file in place, and does not report a disconnected client to the device.
    ///
    /// Call this between two events, before the successor [resumes](Self::resume).
    pub fn release(&mut self) {
        self.is_released = true;
        self.listener.release();
    }

    /// Returns the listening socket.
    pub fn listener(&self) -> &SocketListener {
        &self.listener
    }

    /// Returns the request log, if the server has one.
    pub fn request_log(&self) -> Option<&RequestLog> {
        self.request_log.as_ref()
    }

    /// Returns the path of the socket file, as given by the caller.
    pub fn path(&self) -> &Path {
        self.listener.path()
    }

    /// Returns the device.
    pub fn device(&self) -> &D {
        &self.device
    }

    /// Returns the device.
    pub fn device_mut(&mut self) -> &mut D {
        &mut self.device
    }

    /// Returns whether a client's connection is open, even if the process that made the connection has ended.
    pub fn is_connected(&self) -> bool {
        let client = self.client.as_ref();
        client.is_some_and(|client| !client.session.has_hung_up())
    }

    /// Returns the time until [`Self::check_timeouts`] must be called; `None` if no timeout is running: no new client waits,
    /// and the connected client has sent `VERSION`. `now` is measured from any fixed point in the past.
    pub fn next_timeout(&self, now: Duration) -> Option<Duration> {
        let left = |since: Option<Duration>, bound: Duration| match since {
            Some(since) => (since + bound).saturating_sub(now),
            None => Duration::ZERO,
        };
        let unnegotiated = self
            .client
            .as_ref()
            .filter(|client| !client.has_negotiated());
        let version_timeout =
            unnegotiated.map(|client| left(client.first_seen, NEGOTIATION_TIMEOUT));
        let waiting = self.waiting_client.as_ref();
        let succession_timeout = waiting.map(|(_, since)| left(*since, SUCCESSION_TIMEOUT));
        version_timeout.into_iter().chain(succession_timeout).min()
    }

    /// Handles expired timeouts: disconnects a client that has not sent `VERSION`, and refuses a new client that waits for the
    /// end of the previous connection.
    pub fn check_timeouts(&mut self, now: Duration, watcher: &mut impl SocketWatcher) {
        if self.is_released {
            return;
        }
        let path = self.listener.path().display();
        if let Some((_, since)) = &mut self.waiting_client
            && now.saturating_sub(*since.get_or_insert(now)) >= SUCCESSION_TIMEOUT
        {
            warn!(
                "Refused a client on {path}: another process has taken over the connection of the previous client"
            );
            self.waiting_client = None;
        }
        if let Some(client) = &mut self.client
            && !client.has_negotiated()
            && now.saturating_sub(*client.first_seen.get_or_insert(now)) >= NEGOTIATION_TIMEOUT
        {
            warn!(
                "The client on {path} sent no VERSION for {NEGOTIATION_TIMEOUT:?}, and is disconnected"
            );
            self.disconnect_client(watcher);
        }
    }

    /// Registers the listening socket and the connected client's socket with `watcher`. The server itself registers sockets of
    /// clients that connect afterwards.
    ///
    /// A server in an event manager must not call this, since the event manager calls it.
    ///
    /// # Errors
    ///
    /// Returns the watcher's error.
    pub fn watch(&self, watcher: &mut impl SocketWatcher) -> io::Result<()> {
        watcher.add(self.listener.as_raw_fd(), LISTENER, EventSet::IN)?;
        match &self.client {
            Some(client) => watcher.add(client.session.as_raw_fd(), CLIENT, client.watched_events),
            None => Ok(()),
        }
    }

    /// Handles an event that the watcher reports with `token`, which is one of [`Self::TOKENS`].
    pub fn handle_event(&mut self, token: u32, watcher: &mut impl SocketWatcher) {
        match token {
            _ if self.is_released => {}
            LISTENER => self.accept(watcher),
            _ => self.serve_client(watcher),
        }
    }

    fn accept(&mut self, watcher: &mut impl SocketWatcher) {
        for _ in 0..ACCEPTS_PER_TURN {
            match self.listener.accept() {
                Ok(Some(stream)) => self.admit_client(stream, watcher),
                Ok(None) => return,
                Err(error) => {
                    warn!(
                        "Cannot accept a connection on {}: {error}",
                        self.path().display()
                    );
                    return;
                }
            }
        }
    }

    fn admit_client(&mut self, stream: UnixStream, watcher: &mut impl SocketWatcher) {
        // A restarted VMM may connect before this thread has handled the end of the previous VMM's connection.
        if self
            .client
            .as_ref()
            .is_some_and(|client| client.session.has_hung_up())
        {
            self.finish_client(watcher);
        }
        let path = self.listener.path().display();
        if let Some(client) = &mut self.client {
            if self.waiting_client.is_none() && client.is_process_dead() {
                self.waiting_client = Some((stream, None));
                return;
            }
            client.refused_clients += 1;
            match client.refused_clients {
                1 => warn!("Refused a client on {path}: another one is connected"),
                refused => debug!("Refused a client on {path}: the {refused}th"),
            }
            return;
        }

        if self.request_log.is_some()
            && let Err(error) = self.device.persist_client(stream.as_fd())
        {
            return error!(
                "Cannot store the state of a client of {path}, which is refused: {error}"
            );
        }
        crash_point();
        let peer = PeerProcess::from_stream(&stream)
            .inspect_err(|error| debug!("The process of a client on {path} is unknown: {error}"));
        let process = socket::peer_process(&stream).ok();
        let regions = self.regions.clone();
        match begin_session(stream, regions, self.request_log.as_mut(), watcher) {
            Ok(session) => {
                info!("A client has connected to {path}");
                self.client = Some(ConnectedClient {
                    session,
                    peer: peer.ok(),
                    watched_events: EventSet::IN,
                    refused_clients: 0,
                    first_seen: None,
                });
                self.device.on_connected(process);
                if !self.commit_client(Some(LoggedConnection::default())) {
                    self.disconnect_client(watcher);
                }
            }
            Err(error) => {
                error!(
                    "Cannot serve a client on {path}: {}",
                    describe_error(&*error)
                );
                if self.request_log.is_some() {
                    // The device has got a duplicate of the client's socket for the successor, and drops it now.
                    self.device.on_disconnected();
                }
            }
        }
    }

    fn serve_client(&mut self, watcher: &mut impl SocketWatcher) {
        let Some(client) = &mut self.client else {
            return;
        };
        let Some(wanted) = client.run(&mut self.device, self.request_log.as_mut()) else {
            return self.disconnect_client(watcher);
        };
        if wanted == client.watched_events {
            return;
        }
        client.watched_events = wanted;
        if let Err(error) = watcher.modify(client.session.as_raw_fd(), CLIENT, wanted) {
            error!(
                "Cannot serve the client on {}: {error}",
                self.path().display()
            );
            self.disconnect_client(watcher);
        }
    }

    /// Answers the requests that a client sent before it closed the connection, then disconnects the client.
    fn finish_client(&mut self, watcher: &mut impl SocketWatcher) {
        if let Some(client) = &mut self.client {
            for _ in 0..FINAL_TURNS_MAX {
                if client.run(&mut self.device, self.request_log.as_mut()) != Some(EventSet::IN) {
                    break;
                }
            }
        }
        self.disconnect_client(watcher);
    }

    fn disconnect_client(&mut self, watcher: &mut impl SocketWatcher) {
        let Some(client) = self.client.take() else {
            return;
        };
        // Done while the socket is open: once it is closed, another file could have its descriptor number, and the event
        // manager would stop watching that file.
        unwatch_session(&client.session, watcher);
        self.end_client(client);
        if let Some((stream, _)) = self.waiting_client.take() {
            self.admit_client(stream, watcher);
        }
    }

    fn end_client(&mut self, client: ConnectedClient) {
        if self.request_log.is_some() {
            // A duplicate of the socket may be open elsewhere. The shutdown makes the client and the successor see the end.
            let _ = client.session.stream.shutdown(Shutdown::Both);
            crash_point();
        }
        drop(client);
        self.device.on_disconnected();
        self.commit_client(None);
    }

    /// Commits `client` to the request log as the connected client, or that no client is connected. Returns whether the commit
    /// succeeded.
    fn commit_client(&mut self, client: Option<LoggedConnection>) -> bool {
        let Some(request_log) = &mut self.request_log else {
            return true;
        };
        crash_point();
        let head = request_log.head().with_client(client);
        let noted = request_log.commit(head, self.device.save());
        let freed = noted.and_then(|()| {
            self.device.on_saved();
            match client {
                Some(_) => Ok(()),
                // Removes the last reply from the request log, even if the client has not read it.
                None => request_log.finish_request(),
            }
        });
        freed
            .inspect_err(|error| {
                let path = self.listener.path().display();
                error!(
                    "Cannot record a client of {path}: {}",
                    describe_error(error)
                );
            })
            .is_ok()
    }
}

fn begin_session(
    stream: UnixStream,
    regions: Arc<DeviceRegions>,
    request_log: Option<&mut RequestLog>,
    watcher: &mut impl SocketWatcher,
) -> Result<VfioUserSession, Box<dyn std::error::Error>> {
    let session = match request_log {
        Some(request_log) => VfioUserSession::begin_logged(stream, regions, request_log)?,
        None => VfioUserSession::with_regions(stream, regions),
    };
    watcher.add(session.as_raw_fd(), CLIENT, EventSet::IN)?;
    Ok(session)
}

fn unwatch_session(session: &VfioUserSession, watcher: &mut impl SocketWatcher) {
    if let Err(error) = watcher.remove(session.as_raw_fd()) {
        error!("Cannot stop watching a client's socket: {error}");
    }
}

impl<D: VfioUserDevice> MutEventSubscriber for VfioUserServer<D> {
    fn process(&mut self, events: Events, ops: &mut EventOps) {
        self.handle_event(events.data(), ops);
    }

    fn init(&mut self, ops: &mut EventOps) {
        if let Err(error) = self.watch(ops) {
            error!("Cannot watch socket {}: {error}", self.path().display());
        }
    }
}

impl<D: VfioUserDevice> Drop for VfioUserServer<D> {
    fn drop(&mut self) {
        if let Some(client) = self.client.take().filter(|_| !self.is_released) {
            self.end_client(client);
        }
    }
}

impl<D: VfioUserDevice> AsRawFd for VfioUserServer<D> {
    /// The listening socket.
    fn as_raw_fd(&self) -> RawFd {
        self.listener.as_raw_fd()
    }
}
