//! The event loop's side: a listening socket and at most one client.

use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;

use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use log::{debug, error, info, warn};

use crate::device::Device;
use crate::dispatch::Regions;
use crate::error::Error;
use crate::listener::Listener;
use crate::session::{Progress, Session};

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
/// To be added to an event manager. It has no thread and no timer: a request is answered on the
/// event manager's thread as soon as that sees it. A second client is refused at once, by closing
/// its connection; when the first one goes, the next one finds the device as it was left.
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
    /// Readiness of the socket that the event manager watches for.
    waits_for: Progress,
    /// Others that were refused meanwhile.
    refused: u64,
}

impl<D: Device> Server<D> {
    /// Offers `device` at `path`. The socket file is for this process's user alone, replaces that
    /// of a server that is gone, and is removed with the server.
    ///
    /// # Errors
    ///
    /// Another server has the path, the file cannot be made, or the device's mappable areas are no
    /// good.
    pub fn bind(path: impl AsRef<Path>, device: D) -> Result<Self, Error> {
        let regions = Arc::new(Regions::of(&device)?);
        Ok(Self {
            listener: Listener::bind(path.as_ref())?,
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

    /// Returns whether there is a client.
    pub fn is_connected(&self) -> bool {
        self.client.is_some()
    }

    fn accept(&mut self, ops: &mut EventOps) {
        for _ in 0..ACCEPTS_PER_TURN {
            match self.listener.accept() {
                Ok(Some(stream)) => self.admit(stream, ops),
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

    fn admit(&mut self, stream: UnixStream, ops: &mut EventOps) {
        // A VMM that is restarted connects before this thread has seen its predecessor go.
        if self
            .client
            .as_ref()
            .is_some_and(|client| client.session.hung_up())
        {
            self.finish(ops);
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

        let session = Session::with_regions(stream, self.regions.clone());
        match ops.add(Events::with_data(&session, CLIENT, EventSet::IN)) {
            Ok(()) => {
                info!("A client has connected to {path}");
                self.client = Some(Client {
                    session,
                    waits_for: Progress::Reading,
                    refused: 0,
                });
                self.device.connected();
            }
            Err(error) => error!("Cannot serve a client on {path}: {error}"),
        }
    }

    fn serve(&mut self, ops: &mut EventOps) {
        let Some(client) = &mut self.client else {
            return;
        };
        let progress = client.session.run(&mut self.device);
        let wanted = match progress {
            Progress::Ended => return self.disconnect(ops),
            waits_for if waits_for == client.waits_for => return,
            Progress::Reading => EventSet::IN,
            Progress::Writing => EventSet::OUT,
        };
        client.waits_for = progress;
        if let Err(error) = ops.modify(Events::with_data(&client.session, CLIENT, wanted)) {
            error!(
                "Cannot serve the client on {}: {error}",
                self.path().display()
            );
            self.disconnect(ops);
        }
    }

    /// Answers what a client sent before it went, and lets it go.
    fn finish(&mut self, ops: &mut EventOps) {
        if let Some(client) = &mut self.client {
            for _ in 0..LAST_TURNS {
                if client.session.run(&mut self.device) != Progress::Reading {
                    break;
                }
            }
        }
        self.disconnect(ops);
    }

    fn disconnect(&mut self, ops: &mut EventOps) {
        let Some(client) = self.client.take() else {
            return;
        };
        // Before the socket is closed: the event manager must not see its number again.
        if let Err(error) = ops.remove(Events::empty(&client.session)) {
            error!("Cannot stop watching a client's socket: {error}");
        }
        drop(client);
        self.device.disconnected();
    }
}

impl<D: Device> MutEventSubscriber for Server<D> {
    fn process(&mut self, events: Events, ops: &mut EventOps) {
        match events.data() {
            LISTENER => self.accept(ops),
            _ => self.serve(ops),
        }
    }

    fn init(&mut self, ops: &mut EventOps) {
        let listener = Events::with_data(&self.listener, LISTENER, EventSet::IN);
        if let Err(error) = ops.add(listener) {
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
