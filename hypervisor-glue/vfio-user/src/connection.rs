//! Conversion between a byte stream and messages.
//!
//! [`MessageReader`] never reads past the present message. So a message with a payload takes two system calls. In return, each
//! file descriptor belongs to the message that it was sent with, however the client splits its stream.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use rustix::io::Errno;
use rustix::net::RecvFlags;
use zerocopy::IntoBytes;

use crate::error::RequestRefusal;
use crate::kill_point::crash_point;
use crate::message::{MAX_FDS_ACCEPTED, VfioUserHeader};
use crate::request_log::{MAX_REQUEST, RequestLogError};
use crate::socket;

/// Step in bytes by which a receive buffer grows. The memory allocated for a message exceeds the bytes that the client has sent
/// by at most this step. A buffer keeps its capacity for the next message.
const BUFFER_GROWTH: usize = 64 * 1024;

/// Complete message from a client.
#[derive(Debug)]
pub(crate) struct VfioUserMessage<'a> {
    pub(crate) header: VfioUserHeader,
    pub(crate) payload: &'a [u8],
    pub(crate) fds: Vec<OwnedFd>,
    /// Set if the kernel could not install some file descriptors of the message, so `fds` lacks them.
    pub(crate) has_lost_fds: bool,
}

/// Reason why no further message can be read from a connection.
#[derive(Debug)]
pub(crate) enum StreamEnd {
    /// The client closed the connection.
    Closed {
        /// Set if the stream ended within a message.
        cut_short: bool,
    },
    /// The socket failed.
    Failed(io::Error),
    /// The received header is invalid, so the server does not know where the next message starts.
    InvalidMessage {
        header: VfioUserHeader,
        refusal: RequestRefusal,
    },
    /// The server refused the last message, and ends the connection after the error reply.
    Refused,
    /// The request log could not be read or written.
    RequestLog(RequestLogError),
}

impl From<RequestLogError> for StreamEnd {
    fn from(error: RequestLogError) -> Self {
        Self::RequestLog(error)
    }
}

/// Reads messages from a socket.
#[derive(Debug, Default)]
pub(crate) struct MessageReader {
    header: [u8; VfioUserHeader::SIZE],
    /// Number of bytes of `header` that have been received.
    header_bytes_received: usize,
    payload: Vec<u8>,
    fds: Vec<OwnedFd>,
    has_lost_fds: bool,
    /// Set once the message was returned to the caller, so the next call begins another message.
    is_returned: bool,
}

impl MessageReader {
    /// Returns the next message; `None` until all its bytes have arrived.
    pub(crate) fn next(
        &mut self,
        stream: &UnixStream,
    ) -> Result<Option<VfioUserMessage<'_>>, StreamEnd> {
        if self.is_returned {
            self.discard();
        }
        while self.header_bytes_received < VfioUserHeader::SIZE {
            let buffer = &mut self.header[self.header_bytes_received..];
            match receive(stream, buffer, &mut self.fds, &mut self.has_lost_fds) {
                Ok(Some(0)) => return Err(self.closed_end()),
                Ok(Some(bytes)) => self.header_bytes_received += bytes,
                Ok(None) => return Ok(None),
                Err(error) => return Err(StreamEnd::Failed(error)),
            }
            self.check_fds()?;
        }

        let header = self.header();
        let size = RequestRefusal::check_size(&header, usize::MAX)
            .map_err(|refusal| StreamEnd::InvalidMessage { header, refusal })?;
        let payload_size = size - VfioUserHeader::SIZE;
        while self.payload.len() < payload_size {
            let have = self.payload.len();
            self.payload
                .resize(payload_size.min(have + BUFFER_GROWTH), 0);
            let buffer = &mut self.payload[have..];
            let received = receive(stream, buffer, &mut self.fds, &mut self.has_lost_fds);
            let bytes = received.as_ref().map_or(0, |bytes| bytes.unwrap_or(0));
            self.payload.truncate(have + bytes);
            match received {
                Ok(Some(0)) => return Err(self.closed_end()),
                Ok(Some(_)) => {}
                Ok(None) => return Ok(None),
                Err(error) => return Err(StreamEnd::Failed(error)),
            }
            self.check_fds()?;
        }

        self.is_returned = true;
        Ok(Some(VfioUserMessage {
            header,
            payload: &self.payload,
            fds: std::mem::take(&mut self.fds),
            has_lost_fds: self.has_lost_fds,
        }))
    }

    /// Returns whether a part of the next message has arrived.
    pub(crate) fn is_partial(&self) -> bool {
        self.header_bytes_received > 0 && !self.is_returned
    }

    /// Peeks the next message, which stays in the socket; `None` if the message is incomplete. After a complete message, the
    /// socket's peek offset (`SO_PEEK_OFF`) equals the size of the message.
    pub(crate) fn peek(
        &mut self,
        stream: &UnixStream,
    ) -> Result<Option<VfioUserMessage<'_>>, StreamEnd> {
        if self.is_returned {
            self.discard();
        }
        while self.header_bytes_received < VfioUserHeader::SIZE {
            // This call has no control buffer, so the kernel does not install file descriptors yet: they come with the peek
            // below.
            let buffer = &mut self.header[self.header_bytes_received..];
            let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
            match rustix::net::recv(stream, buffer, flags) {
                Ok((0, _)) => return Err(self.closed_end()),
                Ok((bytes, _)) => {
                    crash_point();
                    self.header_bytes_received += bytes;
                }
                Err(Errno::AGAIN) => return Ok(None),
                Err(Errno::INTR) => {}
                Err(error) => return Err(StreamEnd::Failed(error.into())),
            }
            // A peek at any bytes of a sendmsg(2) gets copies of its descriptors. So the header is peeked again together with
            // the payload, which gets the descriptors whichever bytes they were sent with. A message that is only a header
            // needs no descriptors.
            if self.header_bytes_received == VfioUserHeader::SIZE
                && self.header().message_size != VfioUserHeader::SIZE as u32
            {
                socket::set_peek_offset(stream, 0).map_err(StreamEnd::Failed)?;
                crash_point();
            }
        }

        let header = self.header();
        let size = RequestRefusal::check_size(&header, MAX_REQUEST)
            .map_err(|refusal| StreamEnd::InvalidMessage { header, refusal })?;
        // `payload` has space for the whole message, header included. So a peek ends at the end of the message, or where the
        // client's sendmsg(2) ended.
        while size > VfioUserHeader::SIZE && self.payload.len() < size {
            let have = self.payload.len();
            self.payload.resize(size, 0);
            let buffer = &mut self.payload[have..];
            let received = socket::peek(stream, buffer, &mut self.fds);
            let bytes = received.as_ref().map_or(0, |received| received.bytes);
            self.payload.truncate(have + bytes);
            match received {
                Ok(received) if received.bytes == 0 => return Err(self.closed_end()),
                Ok(received) => {
                    crash_point();
                    self.has_lost_fds |= received.has_lost_fds;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) => return Err(StreamEnd::Failed(error)),
            }
            self.check_fds()?;
        }

        self.is_returned = true;
        Ok(Some(VfioUserMessage {
            header,
            payload: self.payload.get(VfioUserHeader::SIZE..).unwrap_or_default(),
            fds: std::mem::take(&mut self.fds),
            has_lost_fds: self.has_lost_fds,
        }))
    }

    /// Drops the last message: frees its buffer and closes its descriptors.
    fn discard(&mut self) {
        let mut payload = std::mem::take(&mut self.payload);
        payload.clear();
        payload.shrink_to(BUFFER_GROWTH);
        *self = Self {
            payload,
            ..Self::default()
        };
    }

    fn header(&self) -> VfioUserHeader {
        zerocopy::transmute!(self.header)
    }

    fn closed_end(&self) -> StreamEnd {
        StreamEnd::Closed {
            cut_short: self.header_bytes_received > 0,
        }
    }

    /// Refuses a message with too many descriptors. Called for each received piece, since a client can send a message in
    /// pieces, each with further descriptors.
    fn check_fds(&self) -> Result<(), StreamEnd> {
        if self.fds.len() <= MAX_FDS_ACCEPTED {
            return Ok(());
        }
        let header = self.header();
        Err(StreamEnd::InvalidMessage {
            header,
            refusal: RequestRefusal::TooManyFds {
                command: header.command(),
                maximum: MAX_FDS_ACCEPTED,
            },
        })
    }
}

/// Receives bytes and descriptors; `None` if the call would block.
fn receive(
    stream: &UnixStream,
    buffer: &mut [u8],
    fds: &mut Vec<OwnedFd>,
    fds_lost: &mut bool,
) -> io::Result<Option<usize>> {
    match socket::receive(stream, buffer, fds) {
        Ok(received) => {
            *fds_lost |= received.has_lost_fds;
            Ok(Some(received.bytes))
        }
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
        Err(error) => Err(error),
    }
}

/// Builds replies and sends them, one at a time.
#[derive(Debug, Default)]
pub(crate) struct ReplyWriter {
    /// Reply that is being built or sent, header first; empty if there is none.
    bytes: Vec<u8>,
    /// Number of bytes of the reply that the socket has accepted.
    sent_bytes: usize,
    /// Descriptor to send with the reply's first byte.
    fd: Option<Arc<OwnedFd>>,
}

impl ReplyWriter {
    /// Begins a reply. Returns the buffer to append its payload to.
    pub(crate) fn begin_reply(&mut self) -> &mut Vec<u8> {
        self.discard();
        self.bytes.resize(VfioUserHeader::SIZE, 0);
        &mut self.bytes
    }

    /// Completes the reply to `command` with the appended payload.
    pub(crate) fn complete_reply(&mut self, command: &VfioUserHeader, fd: Option<Arc<OwnedFd>>) {
        let header = command.reply(self.bytes.len().saturating_sub(VfioUserHeader::SIZE));
        self.bytes[..VfioUserHeader::SIZE].copy_from_slice(header.as_bytes());
        self.fd = fd;
    }

    /// Replaces the reply to `command` by an error reply.
    pub(crate) fn replace_by_error(&mut self, command: &VfioUserHeader, errno: u32) {
        self.discard();
        let header = command.error_reply(errno);
        self.bytes.extend_from_slice(header.as_bytes());
    }

    /// Returns the reply that is being built or sent, header first; empty if there is none.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Drops the reply: frees its buffer beyond [`BUFFER_GROWTH`] and its descriptor.
    pub(crate) fn discard(&mut self) {
        self.bytes.clear();
        self.bytes.shrink_to(BUFFER_GROWTH);
        self.sent_bytes = 0;
        self.fd = None;
    }

    /// Sends the unsent bytes of the reply. Returns true once all its bytes are sent.
    pub(crate) fn flush(&mut self, stream: &UnixStream) -> io::Result<bool> {
        while self.sent_bytes < self.bytes.len() {
            match socket::send(stream, &self.bytes[self.sent_bytes..], self.fd.as_deref()) {
                Ok(bytes) => {
                    self.sent_bytes += bytes;
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
