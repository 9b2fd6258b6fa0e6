//! First messages of a connection, by which a VMM requests a lease from a server.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use thiserror::Error;

use crate::channel::{ChannelError, LeaseChannel};
use crate::message::{
    ATTACH_DESCRIPTORS, AttachReply, AttachRequest, AttachedLease, SIGNS, VERSION,
};
use crate::socket::{self, ServerExitSigns, Stream};

/// Timeout for each message that the server sends while it creates a lease.
pub(crate) const OPENING_TIMEOUT: Duration = Duration::from_secs(10);

/// Timeout for each answer of a server that has granted a lease, and for the end of the lease in the server after the back end
/// is dropped. It is longer than the 30 seconds to which the server limits its longest operation.
pub(crate) const ANSWER_TIMEOUT: Duration = Duration::from_secs(45);

/// Error of requesting a lease from a server.
#[derive(Debug, Error)]
pub enum LeaseAttachError {
    /// Nothing accepts connections on the socket, or access is denied.
    #[error("Cannot connect to the drive server on {}", socket.display())]
    Connect {
        /// The socket.
        socket: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// The server does not answer, or violates the protocol.
    #[error("The drive server on {} does not answer", socket.display())]
    Answer {
        /// The socket.
        socket: PathBuf,
        /// Cause.
        source: ChannelError,
    },
    /// The server has the drive and refused the lease.
    #[error("The drive server on {} refused: {reason}", socket.display())]
    Refused {
        /// The socket.
        socket: PathBuf,
        /// Reason that the server gave.
        reason: String,
    },
    /// This process lacks memory, descriptors or threads for using the lease.
    #[error("Cannot use the resources that the drive server on {} sent", socket.display())]
    SetUp {
        /// The socket.
        socket: PathBuf,
        /// Kernel's error.
        source: io::Error,
    },
}

/// Lease that a server has granted, and that the function does not use yet.
#[derive(Debug)]
pub(crate) struct GrantedLease {
    pub(crate) channel: LeaseChannel,
    pub(crate) attached: AttachedLease,
    /// Doorbell file, in-flight tracking file, and eventfd that signals events.
    pub(crate) parts: [OwnedFd; ATTACH_DESCRIPTORS],
    /// Descriptors by which the VMM sees that the server's process has ended completely.
    pub(crate) signs: ServerExitSigns,
    pub(crate) socket: PathBuf,
}

/// Answer of a server to an [`AttachRequest`].
enum AttachOutcome {
    /// The server does not have the drive.
    NotServed,
    /// The server has the drive. It has created no lease, as the VMM only asked for the drive.
    Served,
    /// The server has created the lease. The descriptors are the lease's files, as listed at `AttachReply::Attached`.
    Attached(Box<AttachedLease>, Vec<OwnedFd>),
}

/// Returns the error for a server that does not answer, or violates the protocol.
fn answer_error(socket: &Path, source: ChannelError) -> LeaseAttachError {
    LeaseAttachError::Answer {
        socket: socket.to_owned(),
        source,
    }
}

/// Returns the error for a process that lacks resources for its connection to a server.
fn set_up_error(socket: &Path, source: io::Error) -> LeaseAttachError {
    LeaseAttachError::SetUp {
        socket: socket.to_owned(),
        source,
    }
}

/// Sends an [`AttachRequest`] to the server on `socket`. Returns the connection and the answer. `inherited` are the lease's
/// descriptors from the predecessor. `timeout` is the timeout for each message of the server.
fn send_attach_request(
    stream: Stream,
    socket: &Path,
    request: &AttachRequest,
    inherited: &[BorrowedFd<'_>],
    timeout: Duration,
) -> Result<(LeaseChannel, AttachOutcome), LeaseAttachError> {
    let set_up = |source| set_up_error(socket, source);
    let failed = |source| answer_error(socket, source);
    let channel = LeaseChannel::new(stream).map_err(set_up)?;
    channel.set_answer_timeout(timeout).map_err(set_up)?;
    channel.send(request, inherited).map_err(failed)?;
    let answer = loop {
        let (opened, descriptors) = channel.receive_answer().map_err(failed)?;
        match opened {
            AttachReply::Waiting => {}
            AttachReply::NotServed => break AttachOutcome::NotServed,
            AttachReply::Served => break AttachOutcome::Served,
            AttachReply::Attached(attached) => {
                break AttachOutcome::Attached(attached, descriptors);
            }
            AttachReply::Refused { reason } => {
                return Err(LeaseAttachError::Refused {
                    socket: socket.to_owned(),
                    reason,
                });
            }
        }
    };
    Ok((channel, answer))
}

/// Requests a lease from the server on `socket`; returns `None` if this server does not have the function's drive. `options`
/// is the function's option string, with absolute paths. `inherited` are the lease's descriptors from the predecessor, and
/// `timeout` is the timeout for each message of the server.
pub(crate) fn request_lease(
    stream: Stream,
    socket: &Path,
    options: &str,
    inherited: &[BorrowedFd<'_>],
    timeout: Duration,
) -> Result<Option<GrantedLease>, LeaseAttachError> {
    let request = AttachRequest {
        version: VERSION,
        options: options.to_owned(),
        only_asks: false,
    };
    let (channel, answer) = send_attach_request(stream, socket, &request, inherited, timeout)?;
    let (attached, mut descriptors) = match answer {
        AttachOutcome::NotServed => return Ok(None),
        AttachOutcome::Attached(attached, descriptors) if attached.is_valid() => {
            (*attached, descriptors)
        }
        // The request was for a lease. So the server violates the protocol by `Served`, the answer to a mere query, and by an
        // invalid lease.
        AttachOutcome::Served | AttachOutcome::Attached(..) => {
            return Err(answer_error(socket, ChannelError::InvalidLease));
        }
    };
    channel
        .set_answer_timeout(ANSWER_TIMEOUT)
        .map_err(|source| set_up_error(socket, source))?;
    channel.expect_queue_pairs(attached.facts.queue_pairs);
    let came = descriptors.len();
    let signs = descriptors.split_off(ATTACH_DESCRIPTORS.min(came));
    let (Ok(parts), Ok(signs)) = (
        <[OwnedFd; ATTACH_DESCRIPTORS]>::try_from(descriptors),
        <[OwnedFd; SIGNS]>::try_from(signs),
    ) else {
        let said = ATTACH_DESCRIPTORS + SIGNS;
        return Err(answer_error(
            socket,
            ChannelError::Descriptors { came, said },
        ));
    };
    let signs = ServerExitSigns::new(channel.stream(), signs);
    Ok(Some(GrantedLease {
        channel,
        attached,
        parts,
        signs,
        socket: socket.to_owned(),
    }))
}

/// Asks the server on `socket` whether it has the drive that an option string with absolute paths names. `timeout` is the
/// timeout for each message of the server.
pub(crate) fn query_drive(
    stream: Stream,
    socket: &Path,
    options: &str,
    timeout: Duration,
) -> Result<bool, LeaseAttachError> {
    let request = AttachRequest {
        version: VERSION,
        options: options.to_owned(),
        only_asks: true,
    };
    let (_, answer) = send_attach_request(stream, socket, &request, &[], timeout)?;
    match answer {
        AttachOutcome::Served => Ok(true),
        AttachOutcome::NotServed => Ok(false),
        AttachOutcome::Attached(..) => Err(answer_error(socket, ChannelError::InvalidLease)),
    }
}

/// Connects to a server.
pub(crate) fn connect(socket: &Path) -> Result<Stream, LeaseAttachError> {
    socket::connect(socket).map_err(|source| LeaseAttachError::Connect {
        socket: socket.to_owned(),
        source,
    })
}

/// Parameters for the search for another server, after the function has lost its server.
#[derive(Clone, Debug)]
pub(crate) struct ServerDiscovery {
    /// State directory of the servers.
    pub(crate) state_dir: PathBuf,
    /// The function's option string.
    pub(crate) options: String,
    /// Maximum duration of the search; `None` for no limit.
    pub(crate) timeout: Option<Duration>,
}
