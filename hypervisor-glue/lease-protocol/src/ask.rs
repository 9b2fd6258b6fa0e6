//! The first messages of a connection: a VMM asks a server for a lease.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use thiserror::Error;

use crate::channel::{Channel, ChannelError};
use crate::message::{Attached, Opened, Opening, PARTS, VERSION};
use crate::socket::{self, Stream};

/// Time in which a server says something while a lease is made.
pub(crate) const OPENING_PATIENCE: Duration = Duration::from_secs(10);

/// Time in which a server answers, or ends a lease. Its longest work is bounded by 30 seconds.
pub(crate) const PATIENCE: Duration = Duration::from_secs(45);

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

/// A lease that a server has given, before the function uses it.
#[derive(Debug)]
pub(crate) struct Given {
    pub(crate) channel: Channel,
    pub(crate) attached: Attached,
    /// Files of the doorbells and of the live state, and the eventfd of events.
    pub(crate) parts: [OwnedFd; PARTS],
    pub(crate) socket: PathBuf,
}

/// Asks the server on `socket` for the lease of an option string with absolute paths; `None` if the server does not have
/// the function's drive. `kept` is what the function has from the server before. A server that says nothing for `patience`
/// is not waited for any longer.
pub(crate) fn ask_for_lease(
    stream: Stream,
    socket: &Path,
    options: &str,
    kept: &[BorrowedFd<'_>],
    patience: Duration,
) -> Result<Option<Given>, AttachError> {
    let answer = |source| AttachError::Answer {
        socket: socket.to_owned(),
        source,
    };
    let set_up = |source| AttachError::SetUp {
        socket: socket.to_owned(),
        source,
    };
    let channel = Channel::new(stream).map_err(set_up)?;
    channel.set_patience(patience).map_err(set_up)?;
    let opening = Opening {
        version: VERSION,
        options: options.to_owned(),
        only_asks: false,
    };
    channel.send(&opening, kept).map_err(answer)?;
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
            // It was asked for a lease.
            Opened::Served | Opened::Attached(_) => {
                return Err(answer(ChannelError::Impossible));
            }
        }
    };
    channel.set_patience(PATIENCE).map_err(set_up)?;
    channel.expect_queue_pairs(attached.facts.queue_pairs);
    let parts = <[OwnedFd; PARTS]>::try_from(descriptors).map_err(|descriptors| {
        let (came, said) = (descriptors.len(), PARTS);
        answer(ChannelError::Descriptors { came, said })
    })?;
    Ok(Some(Given {
        channel,
        attached,
        parts,
        socket: socket.to_owned(),
    }))
}

/// Asks the server on `socket` whether it has the drive of an option string with absolute paths. The function gets no
/// lease. A server that says nothing for `patience` is not waited for any longer.
pub(crate) fn ask_for_drive(
    stream: Stream,
    socket: &Path,
    options: &str,
    patience: Duration,
) -> Result<bool, AttachError> {
    let answer = |source| AttachError::Answer {
        socket: socket.to_owned(),
        source,
    };
    let set_up = |source| AttachError::SetUp {
        socket: socket.to_owned(),
        source,
    };
    let channel = Channel::new(stream).map_err(set_up)?;
    channel.set_patience(patience).map_err(set_up)?;
    let opening = Opening {
        version: VERSION,
        options: options.to_owned(),
        only_asks: true,
    };
    channel.send(&opening, &[]).map_err(answer)?;
    loop {
        let (opened, _) = channel.receive_answer().map_err(answer)?;
        match opened {
            Opened::Waiting => {}
            Opened::NotServed => return Ok(false),
            // A server that does not know the question gives a lease, which ends with the connection.
            Opened::Served | Opened::Attached(_) => return Ok(true),
            Opened::Refused { reason } => {
                return Err(AttachError::Refused {
                    socket: socket.to_owned(),
                    reason,
                });
            }
        }
    }
}

/// Connects to a server.
pub(crate) fn connect(socket: &Path) -> Result<Stream, AttachError> {
    socket::connect(socket).map_err(|source| AttachError::Connect {
        socket: socket.to_owned(),
        source,
    })
}

/// Way to a server that has the drive, while the function's own is gone.
#[derive(Clone, Debug)]
pub(crate) struct Reach {
    /// State folder of the servers.
    pub(crate) state_dir: PathBuf,
    /// The function's option string.
    pub(crate) options: String,
    /// Time to look for a server; `None` for ever.
    pub(crate) patience: Option<Duration>,
}
