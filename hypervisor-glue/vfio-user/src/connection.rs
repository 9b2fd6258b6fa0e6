//! A byte stream becomes messages, and replies become bytes.
//!
//! [`Reader`] never reads past the message it is reading. That costs a second system call for a
//! message with a payload. In return, file descriptors belong to the message whose bytes they came
//! with, however a client cuts its stream into pieces.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use rustix::io::Errno;
use rustix::net::RecvFlags;
use zerocopy::IntoBytes;

use crate::error::Refusal;
use crate::journal::{JournalError, MAX_REQUEST};
use crate::message::{Header, MAX_FDS_ACCEPTED};
use crate::socket;
use crate::step::step;

/// Bytes that are made room for at a time, so that a client has to send what it wants us to keep;
/// and the room that stays between messages.
const CHUNK: usize = 64 * 1024;

/// A whole message.
#[derive(Debug)]
pub(crate) struct Message<'a> {
    pub(crate) header: Header,
    pub(crate) payload: &'a [u8],
    pub(crate) fds: Vec<OwnedFd>,
    /// There were file descriptors that are not in `fds`.
    pub(crate) fds_lost: bool,
}

/// The stream has no more messages.
#[derive(Debug)]
pub(crate) enum Ended {
    /// The client closed it.
    Closed {
        /// In the middle of a message.
        cut_short: bool,
    },
    /// The socket failed.
    Failed(io::Error),
    /// The bytes are no message, and the start of the next one is unknown.
    OutOfStep { header: Header, refusal: Refusal },
    /// The last message was refused, and the connection ends with its reply.
    Refused,
    /// The journal failed.
    Journal(JournalError),
}

impl From<JournalError> for Ended {
    fn from(error: JournalError) -> Self {
        Self::Journal(error)
    }
}

/// Reads messages.
#[derive(Debug, Default)]
pub(crate) struct Reader {
    header: [u8; Header::SIZE],
    /// Bytes of `header` that are there.
    filled: usize,
    payload: Vec<u8>,
    fds: Vec<OwnedFd>,
    fds_lost: bool,
    /// The message was handed out: the next call begins a new one.
    handed_out: bool,
}

impl Reader {
    /// The next message, or `None` when it has not come in whole yet.
    pub(crate) fn next(&mut self, stream: &UnixStream) -> Result<Option<Message<'_>>, Ended> {
        if self.handed_out {
            self.begin();
        }
        while self.filled < Header::SIZE {
            let room = &mut self.header[self.filled..];
            match receive(stream, room, &mut self.fds, &mut self.fds_lost) {
                Ok(Some(0)) => return Err(self.closed()),
                Ok(Some(bytes)) => self.filled += bytes,
                Ok(None) => return Ok(None),
                Err(error) => return Err(Ended::Failed(error)),
            }
            self.check_fds()?;
        }

        let header = self.header();
        let size = Refusal::check_size(&header, usize::MAX)
            .map_err(|refusal| Ended::OutOfStep { header, refusal })?;
        let payload_size = size - Header::SIZE;
        while self.payload.len() < payload_size {
            let have = self.payload.len();
            self.payload.resize(payload_size.min(have + CHUNK), 0);
            let room = &mut self.payload[have..];
            let received = receive(stream, room, &mut self.fds, &mut self.fds_lost);
            let bytes = received.as_ref().map_or(0, |bytes| bytes.unwrap_or(0));
            self.payload.truncate(have + bytes);
            match received {
                Ok(Some(0)) => return Err(self.closed()),
                Ok(Some(_)) => {}
                Ok(None) => return Ok(None),
                Err(error) => return Err(Ended::Failed(error)),
            }
            self.check_fds()?;
        }

        self.handed_out = true;
        Ok(Some(Message {
            header,
            payload: &self.payload,
            fds: std::mem::take(&mut self.fds),
            fds_lost: self.fds_lost,
        }))
    }

    /// Returns whether a message has come in part.
    pub(crate) fn is_amid(&self) -> bool {
        self.filled > 0 && !self.handed_out
    }

    /// Looks at the next message, which stays in the socket, or returns `None` when it has not come in whole yet. When it has, the socket's
    /// peek offset is its size.
    pub(crate) fn peek(&mut self, stream: &UnixStream) -> Result<Option<Message<'_>>, Ended> {
        if self.handed_out {
            self.begin();
        }
        while self.filled < Header::SIZE {
            // Without a control message, no file descriptors are opened.
            let room = &mut self.header[self.filled..];
            let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
            match rustix::net::recv(stream, room, flags) {
                Ok((0, _)) => return Err(self.closed()),
                Ok((bytes, _)) => {
                    step();
                    self.filled += bytes;
                }
                Err(Errno::AGAIN) => return Ok(None),
                Err(Errno::INTR) => {}
                Err(error) => return Err(Ended::Failed(error.into())),
            }
            // The header again, with the payload: descriptors come with every look at any of the bytes that they were
            // sent with. A message that is a header alone has no use for them.
            if self.filled == Header::SIZE && self.header().message_size != Header::SIZE as u32 {
                socket::set_peek_offset(stream, 0).map_err(Ended::Failed)?;
                step();
            }
        }

        let header = self.header();
        let size = Refusal::check_size(&header, MAX_REQUEST)
            .map_err(|refusal| Ended::OutOfStep { header, refusal })?;
        // Room for all of it, so that each look ends where a sendmsg(2) of the client's ends, or with the message.
        while size > Header::SIZE && self.payload.len() < size {
            let have = self.payload.len();
            self.payload.resize(size, 0);
            let room = &mut self.payload[have..];
            let received = socket::peek(stream, room, &mut self.fds);
            let bytes = received.as_ref().map_or(0, |received| received.bytes);
            self.payload.truncate(have + bytes);
            match received {
                Ok(received) if received.bytes == 0 => return Err(self.closed()),
                Ok(received) => {
                    step();
                    self.fds_lost |= received.fds_lost;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) => return Err(Ended::Failed(error)),
            }
            self.check_fds()?;
        }

        self.handed_out = true;
        Ok(Some(Message {
            header,
            payload: self.payload.get(Header::SIZE..).unwrap_or_default(),
            fds: std::mem::take(&mut self.fds),
            fds_lost: self.fds_lost,
        }))
    }

    /// Forgets the last message.
    fn begin(&mut self) {
        let mut payload = std::mem::take(&mut self.payload);
        payload.clear();
        payload.shrink_to(CHUNK);
        *self = Self {
            payload,
            ..Self::default()
        };
    }

    fn header(&self) -> Header {
        zerocopy::transmute!(self.header)
    }

    fn closed(&self) -> Ended {
        Ended::Closed {
            cut_short: self.filled > 0,
        }
    }

    /// A message that comes in many pieces could bring file descriptors with each of them.
    fn check_fds(&self) -> Result<(), Ended> {
        if self.fds.len() <= MAX_FDS_ACCEPTED {
            return Ok(());
        }
        let header = self.header();
        Err(Ended::OutOfStep {
            header,
            refusal: Refusal::TooManyFds {
                command: header.command(),
                maximum: MAX_FDS_ACCEPTED,
            },
        })
    }
}

/// Receives, `None` standing for "nothing yet".
fn receive(
    stream: &UnixStream,
    room: &mut [u8],
    fds: &mut Vec<OwnedFd>,
    fds_lost: &mut bool,
) -> io::Result<Option<usize>> {
    match socket::receive(stream, room, fds) {
        Ok(received) => {
            *fds_lost |= received.fds_lost;
            Ok(Some(received.bytes))
        }
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
        Err(error) => Err(error),
    }
}

/// Sends replies, one at a time.
#[derive(Debug, Default)]
pub(crate) struct Writer {
    /// The reply, header first; empty when there is none.
    bytes: Vec<u8>,
    /// Bytes of it that are sent.
    sent: usize,
    /// Goes with the first byte.
    fd: Option<Arc<OwnedFd>>,
}

impl Writer {
    /// Begins a reply: the buffer to append its payload to.
    pub(crate) fn payload(&mut self) -> &mut Vec<u8> {
        self.discard();
        self.bytes.resize(Header::SIZE, 0);
        &mut self.bytes
    }

    /// The reply to `command` is what was appended.
    pub(crate) fn reply(&mut self, command: &Header, fd: Option<Arc<OwnedFd>>) {
        let header = command.reply(self.bytes.len().saturating_sub(Header::SIZE));
        self.bytes[..Header::SIZE].copy_from_slice(header.as_bytes());
        self.fd = fd;
    }

    /// The reply to `command` is an error, whatever was appended.
    pub(crate) fn error_reply(&mut self, command: &Header, errno: u32) {
        self.discard();
        let header = command.error_reply(errno);
        self.bytes.extend_from_slice(header.as_bytes());
    }

    /// The reply, header first; empty when there is none.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// There is no reply.
    pub(crate) fn discard(&mut self) {
        self.bytes.clear();
        self.bytes.shrink_to(CHUNK);
        self.sent = 0;
        self.fd = None;
    }

    /// Sends what is left of the reply, if there is one. Returns whether nothing is left.
    pub(crate) fn flush(&mut self, stream: &UnixStream) -> io::Result<bool> {
        while self.sent < self.bytes.len() {
            match socket::send(stream, &self.bytes[self.sent..], self.fd.as_deref()) {
                Ok(bytes) => {
                    self.sent += bytes;
                    self.fd = None;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        self.discard();
        Ok(true)
    }
}
