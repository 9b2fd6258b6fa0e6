//! The event loop's side: a listening socket and at most one client.

use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;

use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use log::{debug, error, info, warn};

use crate::device::Device;
use crate::dispatch::Regions;
use crate::error::Error;
use crate::listener::{Listener, SocketAccess};
use crate::session::{Progress, Session};
use crate::socket::{self, Peer};
use crate::watcher::Watcher;

/// Token of the listening socket's events.
const LISTENER: u32 = 0;
/// Token of the client's events.
const CLIENT: u32 = 1;

/// Connections that are accepted before others on the thread get their turn.
const ACCEPTS_PER_TURN: usize = 16;

/// Calls of a session whose client is gone, to answer what it left. More than a socket buffers.
const LAST_TURNS: usize = 1024;

/// Serves a device to one client after the other.
///
/// It is added to an event manager, or watched by an event loop of one's own ([`Self::watch`], [`Self::handle`]). It has
/// no thread and no timer: the loop's thread answers a request as soon as it sees it. A second client is refused at once, by closing
/// its connection; when the first one goes, the next one finds the device as it was left.
///
/// A connection belongs to the process that made it. When that process has ended, the next client replaces it, even if
/// the socket is still open: requests of an io_uring can hold it a little longer.
#[derive(Debug)]
pub struct Server<D: Device> {
    listener: Listener,
    device: D,
    regions: Arc<Regions>,
    client: Option<Client>,
}

#[derive(Debug)]
struct Client {
    session: Session,
    /// The process that connected, if the kernel names it.
    peer: Option<Peer>,
    /// Readiness of the socket that the event manager watches for.
    waits_for: Progress,
    /// Others that were refused meanwhile.
    refused: u64,
}

impl Client {
    /// Returns whether the client closed the connection or its process has ended.
    fn is_gone(&self) -> bool {
        self.session.hung_up() || self.peer.as_ref().is_some_and(Peer::is_dead)
    }
}

impl<D: Device> Server<D> {
    /// Tokens of the server's events. Other sources of the same event loop use other tokens.
    pub const TOKENS: Range<u32> = LISTENER..CLIENT + 1;

    /// Offers `device` at `path`. The socket file is for this process's user alone, replaces that
    /// of a server that is gone, and is removed with the server.
    ///
    /// # Errors
    ///
    /// Another server has the path, the file cannot be made, or the device's mappable areas are no
    /// good.
    pub fn bind(path: impl AsRef<Path>, device: D) -> Result<Self, Error> {
        Self::bind_with(path, SocketAccess::default(), device)
    }

    /// [Offers](Self::bind) `device` at `path`, with a socket file of these permissions.
    ///
    /// # Errors
    ///
    /// As [`Self::bind`]. Only a privileged process may give a file to another user.
    pub fn bind_with(
        path: impl AsRef<Path>,
        access: SocketAccess,
        device: D,
    ) -> Result<Self, Error> {
        let regions = Arc::new(Regions::of(&device)?);
        Ok(Self {
            listener: Listener::bind_with(path.as_ref(), access)?,
            device,
            regions,
            client: None,
        })
    }

    /// The socket file, as it was given.
    pub fn path(&self) -> &Path {
        self.listener.path()
    }

    /// The device.
    pub fn device(&self) -> &D {
        &self.device
    }

    /// The device.
    pub fn device_mut(&mut self) -> &mut D {
        &mut self.device
    }

    /// Returns whether there is a client. One whose process has ended is none.
    pub fn is_connected(&self) -> bool {
        self.client.as_ref().is_some_and(|client| !client.is_gone())
    }

    /// Has `watcher` watch the listening socket. The server has it watch its client as well, once there is one.
    ///
    /// A server in an event manager does so by itself.
    ///
    /// # Errors
    ///
    /// Returns the watcher's error.
    pub fn watch(&self, watcher: &mut impl Watcher) -> io::Result<()> {
        watcher.add(self.listener.as_raw_fd(), LISTENER, EventSet::IN)
    }

    /// Handles an event that the watcher reports with `token`, one of [`Self::TOKENS`].
    pub fn handle(&mut self, token: u32, watcher: &mut impl Watcher) {
        match token {
            LISTENER => self.accept(watcher),
            _ => self.serve(watcher),
        }
    }

    fn accept(&mut self, watcher: &mut impl Watcher) {
        for _ in 0..ACCEPTS_PER_TURN {
            match self.listener.accept() {
                Ok(Some(stream)) => self.admit(stream, watcher),
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

    fn admit(&mut self, stream: UnixStream, watcher: &mut impl Watcher) {
        // A VMM that is restarted connects before this thread has seen its predecessor go.
        if self.client.as_ref().is_some_and(Client::is_gone) {
            self.finish(watcher);
        }
        let path = self.listener.path().display();
        if let Some(client) = &mut self.client {
            client.refused += 1;
            match client.refused {
                1 => warn!("Refused a client on {path}: another one is connected"),
                refused => debug!("Refused a client on {path}: the {refused}th"),
            }
            return;
        }

        let peer = Peer::of(&stream)
            .inspect_err(|error| debug!("A client on {path} is of no known process: {error}"));
        let user = socket::user(&stream).ok();
        let session = Session::with_regions(stream, self.regions.clone());
        match watcher.add(session.as_raw_fd(), CLIENT, EventSet::IN) {
            Ok(()) => {
                info!("A client has connected to {path}");
                self.client = Some(Client {
                    session,
                    peer: peer.ok(),
                    waits_for: Progress::Reading,
                    refused: 0,
                });
                self.device.connected(user);
            }
            Err(error) => error!("Cannot serve a client on {path}: {error}"),
        }
    }

    fn serve(&mut self, watcher: &mut impl Watcher) {
        let Some(client) = &mut self.client else {
            return;
        };
        let progress = client.session.run(&mut self.device);
        let wanted = match progress {
            Progress::Ended => return self.disconnect(watcher),
            waits_for if waits_for == client.waits_for => return,
            Progress::Reading => EventSet::IN,
            Progress::Writing => EventSet::OUT,
        };
        client.waits_for = progress;
        if let Err(error) = watcher.modify(client.session.as_raw_fd(), CLIENT, wanted) {
            error!(
                "Cannot serve the client on {}: {error}",
                self.path().display()
            );
            self.disconnect(watcher);
        }
    }

    /// Answers what a client sent before it went, and lets it go.
    fn finish(&mut self, watcher: &mut impl Watcher) {
        if let Some(client) = &mut self.client {
            for _ in 0..LAST_TURNS {
                if client.session.run(&mut self.device) != Progress::Reading {
                    break;
                }
            }
        }
        self.disconnect(watcher);
    }

    fn disconnect(&mut self, watcher: &mut impl Watcher) {
        let Some(client) = self.client.take() else {
            return;
        };
        // Before the socket is closed: the event manager must not see its number again.
        if let Err(error) = watcher.remove(client.session.as_raw_fd()) {
            error!("Cannot stop watching a client's socket: {error}");
        }
        drop(client);
        self.device.disconnected();
    }
}

impl<D: Device> MutEventSubscriber for Server<D> {
    fn process(&mut self, events: Events, ops: &mut EventOps) {
        self.handle(events.data(), ops);
    }

    fn init(&mut self, ops: &mut EventOps) {
        if let Err(error) = self.watch(ops) {
            error!("Cannot watch socket {}: {error}", self.path().display());
        }
    }
}

impl<D: Device> Drop for Server<D> {
    fn drop(&mut self) {
        if self.client.take().is_some() {
            self.device.disconnected();
        }
    }
}

impl<D: Device> AsRawFd for Server<D> {
    /// The listening socket.
    fn as_raw_fd(&self) -> RawFd {
        self.listener.as_raw_fd()
    }
}
