//! The first messages of a connection: a VMM asks a server for a lease.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use thiserror::Error;

use crate::channel::{Channel, ChannelError};
use crate::message::{Attached, Opened, Opening, PARTS, SIGNS, VERSION};
use crate::socket::{self, Signs, Stream};

/// Time in which a server says something while a lease is made.
pub(crate) const OPENING_PATIENCE: Duration = Duration::from_secs(10);

/// Time in which a server answers, or ends a lease. Its longest work is bounded by 30 seconds.
pub(crate) const PATIENCE: Duration = Duration::from_secs(45);

/// Descriptors of a server that sends its signs.
const WITH_SIGNS: usize = PARTS + SIGNS;

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
    /// Signs that nothing of the server is left; `None` from a server that knows none.
    pub(crate) signs: Option<Signs>,
    pub(crate) socket: PathBuf,
}

/// Answer of a server to an [`Opening`].
enum Answer {
    /// It does not have the drive.
    NotServed,
    /// It has the drive, and made no lease.
    Served,
    /// It has the drive, and made the lease. The descriptors come with it.
    Attached(Box<Attached>, Vec<OwnedFd>),
}

/// Returns the error of a server that does not answer as the protocol says.
fn no_answer(socket: &Path, source: ChannelError) -> AttachError {
    AttachError::Answer {
        socket: socket.to_owned(),
        source,
    }
}

/// Returns the error of a process that cannot use its connection to a server.
fn no_set_up(socket: &Path, source: io::Error) -> AttachError {
    AttachError::SetUp {
        socket: socket.to_owned(),
        source,
    }
}

/// Sends an opening to the server on `socket`, with the descriptors that go with it. Returns the connection and the
/// answer. A server that says nothing for `patience` is not waited for any longer.
fn open(
    stream: Stream,
    socket: &Path,
    opening: &Opening,
    kept: &[BorrowedFd<'_>],
    patience: Duration,
) -> Result<(Channel, Answer), AttachError> {
    let set_up = |source| no_set_up(socket, source);
    let failed = |source| no_answer(socket, source);
    let channel = Channel::new(stream).map_err(set_up)?;
    channel.set_patience(patience).map_err(set_up)?;
    channel.send(opening, kept).map_err(failed)?;
    let answer = loop {
        let (opened, descriptors) = channel.receive_answer().map_err(failed)?;
        match opened {
            Opened::Waiting => {}
            Opened::NotServed => break Answer::NotServed,
            Opened::Served => break Answer::Served,
            Opened::Attached(attached) => break Answer::Attached(attached, descriptors),
            Opened::Refused { reason } => {
                return Err(AttachError::Refused {
                    socket: socket.to_owned(),
                    reason,
                });
            }
        }
    };
    Ok((channel, answer))
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
    let opening = Opening {
        version: VERSION,
        options: options.to_owned(),
        only_asks: false,
        sees_end: true,
    };
    let (channel, answer) = open(stream, socket, &opening, kept, patience)?;
    let (attached, mut descriptors) = match answer {
        Answer::NotServed => return Ok(None),
        Answer::Attached(attached, descriptors) if attached.is_possible() => {
            (*attached, descriptors)
        }
        // It was asked for a lease.
        Answer::Served | Answer::Attached(..) => {
            return Err(no_answer(socket, ChannelError::Impossible));
        }
    };
    channel
        .set_patience(PATIENCE)
        .map_err(|source| no_set_up(socket, source))?;
    channel.expect_queue_pairs(attached.facts.queue_pairs);
    let signs = match descriptors.len() {
        WITH_SIGNS => <[OwnedFd; SIGNS]>::try_from(descriptors.split_off(PARTS)).ok(),
        _ => None,
    };
    let signs = signs.map(|signs| Signs::new(channel.stream(), signs));
    let parts = <[OwnedFd; PARTS]>::try_from(descriptors).map_err(|descriptors| {
        let (came, said) = (descriptors.len(), PARTS);
        no_answer(socket, ChannelError::Descriptors { came, said })
    })?;
    Ok(Some(Given {
        channel,
        attached,
        parts,
        signs,
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
    let opening = Opening {
        version: VERSION,
        options: options.to_owned(),
        only_asks: true,
        sees_end: false,
    };
    let (_, answer) = open(stream, socket, &opening, &[], patience)?;
    // A server that does not know the question gives a lease, which ends with the connection.
    Ok(!matches!(answer, Answer::NotServed))
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
