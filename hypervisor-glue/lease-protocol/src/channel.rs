//! Messages with descriptors over a stream socket.
//!
//! A message is a header of 8 bytes, then JSON. The header has the number of bytes of JSON and the number of descriptors, each
//! as a 32-bit little-endian integer. The descriptors are sent together with the header.

use std::io::{self, Read, Write};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use nvme_mpt_memory::deadline::{Deadline, SystemClock};
use serde::Serialize;
use serde::de::DeserializeOwned;
use thiserror::Error;

use crate::message::LeaseEndNotice;
use crate::socket::{self, DESCRIPTORS_MAX, Stream};

/// Largest JSON of a message in bytes, for a lease of up to 64 queue pairs. A lease with more queue pairs has a larger
/// limit.
pub const MESSAGE_MAX: usize = 4 << 20;

/// Share of each queue pair in the message limit of a lease with more than 64 queue pairs, in bytes: enough for the state of a
/// queue pair with a full completion queue.
const BYTES_PER_PAIR: usize = MESSAGE_MAX / 64;

/// Timeout for sending a message, and for receiving the rest of a message after its first part.
const TRANSFER_TIMEOUT: Duration = Duration::from_secs(10);

const HEADER_BYTES: usize = 8;

/// Error of sending or receiving a message.
#[derive(Debug, Error)]
pub enum ChannelError {
    /// The other side closed the connection.
    #[error("the other side closed the connection")]
    Closed,
    /// A message did not arrive in time.
    #[error("the other side did not answer in time")]
    Timeout,
    /// A message is larger than the limit for this connection.
    #[error("a message has {length} bytes, more than the {most} that are allowed")]
    TooLarge {
        /// Bytes of the message.
        length: usize,
        /// Limit in bytes.
        most: usize,
    },
    /// The number of descriptors is wrong.
    #[error("a message has {came} descriptors instead of {said}")]
    Descriptors {
        /// Number of descriptors that were received or were to be sent.
        came: usize,
        /// Expected number of descriptors: from the message's header, or for this kind of message. For a message to be
        /// sent, the maximum.
        said: usize,
    },
    /// The message is invalid, or not expected here.
    #[error("a message is not one of the lease protocol")]
    Message(#[from] serde_json::Error),
    /// The server granted a lease whose properties contradict each other or a limit.
    #[error("a lease has impossible properties")]
    InvalidLease,
    /// The kernel's error.
    #[error("the connection failed")]
    Io(#[from] io::Error),
}

/// Connection between a VMM and a server, which carries the messages of one lease.
#[derive(Debug)]
pub(crate) struct LeaseChannel {
    stream: Stream,
    /// Largest JSON of a message in bytes.
    message_max: AtomicUsize,
    end_notices: ReceivedEndNotices,
}

/// End notices of the server that the VMM has received.
#[derive(Debug, Default)]
struct ReceivedEndNotices {
    removed: AtomicBool,
    ended: AtomicBool,
}

impl LeaseChannel {
    /// Creates a channel over a blocking socket.
    pub(crate) fn new(stream: Stream) -> io::Result<Self> {
        stream.set_write_timeout(Some(TRANSFER_TIMEOUT))?;
        let most = MESSAGE_MAX.into();
        let last_words = ReceivedEndNotices::default();
        Ok(Self {
            stream,
            message_max: most,
            end_notices: last_words,
        })
    }

    /// Raises the limit for the size of messages to what a lease with this number of queue pairs needs.
    pub(crate) fn expect_queue_pairs(&self, queue_pairs: u16) {
        let most = MESSAGE_MAX.max(usize::from(queue_pairs) * BYTES_PER_PAIR);
        self.message_max.store(most, Ordering::Relaxed);
    }

    fn check_length(&self, length: usize) -> Result<(), ChannelError> {
        let most = self.message_max.load(Ordering::Relaxed);
        match length <= most {
            true => Ok(()),
            false => Err(ChannelError::TooLarge { length, most }),
        }
    }

    pub(crate) fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Sends a message.
    pub(crate) fn send(
        &self,
        message: &impl Serialize,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<(), ChannelError> {
        let mut bytes = vec![0; HEADER_BYTES];
        serde_json::to_writer(&mut bytes, message)?;
        let length = bytes.len() - HEADER_BYTES;
        self.check_length(length)?;
        let number = descriptors.len();
        if number > DESCRIPTORS_MAX {
            let said = DESCRIPTORS_MAX;
            return Err(ChannelError::Descriptors { came: number, said });
        }
        bytes[..4].copy_from_slice(&(length as u32).to_le_bytes());
        bytes[4..HEADER_BYTES].copy_from_slice(&(number as u32).to_le_bytes());
        let sent = socket::send(&self.stream, &bytes, descriptors).map_err(channel_error)?;
        (&self.stream)
            .write_all(&bytes[sent..])
            .map_err(channel_error)
    }

    /// Receives a request. `timeout` is the timeout for the first byte of the request. After the first byte, the remaining
    /// bytes must arrive within `TRANSFER_TIMEOUT`.
    pub(crate) fn receive_request<M: DeserializeOwned>(
        &self,
        timeout: Option<Duration>,
    ) -> Result<(M, Vec<OwnedFd>), ChannelError> {
        self.stream.set_read_timeout(timeout)?;
        let mut deadline = None;
        self.receive(|| {
            // The first call comes after the first part of the message, so the deadline starts with that part.
            let deadline: &mut Deadline = deadline
                .get_or_insert_with(|| Deadline::after(&SystemClock::shared(), TRANSFER_TIMEOUT));
            match deadline.remaining() {
                Duration::ZERO => Err(ChannelError::Timeout),
                left => Ok(self.stream.set_read_timeout(Some(left))?),
            }
        })
    }

    /// Sets the timeout that [`Self::receive_answer`] applies to each part of an answer.
    pub(crate) fn set_answer_timeout(&self, timeout: Duration) -> io::Result<()> {
        self.stream.set_read_timeout(Some(timeout))
    }

    /// Receives an answer. A server that is ending may send a `LeaseEndNotice` in place of the answer; then this returns
    /// `ChannelError::Closed`.
    ///
    /// This sets no socket option, because a seccomp filter of the VMM may forbid the system call.
    pub(crate) fn receive_answer<M: DeserializeOwned>(
        &self,
    ) -> Result<(M, Vec<OwnedFd>), ChannelError> {
        let (bytes, descriptors) = self.receive_bytes(|| Ok(()))?;
        match serde_json::from_slice(&bytes) {
            Ok(answer) => Ok((answer, descriptors)),
            Err(error) => match serde_json::from_slice(&bytes) {
                Ok(word) => {
                    self.record_end_notice(&word);
                    Err(ChannelError::Closed)
                }
                Err(_) => Err(error.into()),
            },
        }
    }

    fn record_end_notice(&self, word: &LeaseEndNotice) {
        let ReceivedEndNotices { removed, ended } = &self.end_notices;
        match word {
            LeaseEndNotice::Removed => removed.store(true, Ordering::Relaxed),
            LeaseEndNotice::Ended => ended.store(true, Ordering::Relaxed),
        }
    }

    /// Reads the server's end notices that have arrived, and skips unread answers.
    pub(crate) fn read_end_notices(&self) {
        while let Ok((bytes, _)) = self.receive_bytes(|| Ok(())) {
            if let Ok(word) = serde_json::from_slice(&bytes) {
                self.record_end_notice(&word);
            }
        }
    }

    /// Returns whether the server has sent `LeaseEndNotice::Removed`: an operator has removed the lease.
    pub(crate) fn was_removed(&self) -> bool {
        self.end_notices.removed.load(Ordering::Relaxed)
    }

    /// Returns whether the server has sent `LeaseEndNotice::Ended`: nothing accesses the function's memory any longer.
    pub(crate) fn has_ended(&self) -> bool {
        self.end_notices.ended.load(Ordering::Relaxed)
    }

    /// Receives a message. A message can arrive in several parts; `before_part` is called before each part except the first.
    fn receive<M: DeserializeOwned>(
        &self,
        before_part: impl FnMut() -> Result<(), ChannelError>,
    ) -> Result<(M, Vec<OwnedFd>), ChannelError> {
        let (bytes, descriptors) = self.receive_bytes(before_part)?;
        Ok((serde_json::from_slice(&bytes)?, descriptors))
    }

    /// Receives a message like [`Self::receive`], and returns its JSON.
    fn receive_bytes(
        &self,
        mut before_part: impl FnMut() -> Result<(), ChannelError>,
    ) -> Result<(Vec<u8>, Vec<OwnedFd>), ChannelError> {
        let mut header = [0; HEADER_BYTES];
        let mut descriptors = Vec::new();
        let mut came = self.receive_some(&mut header, &mut descriptors)?;
        while came < HEADER_BYTES {
            before_part()?;
            came += self.receive_some(&mut header[came..], &mut descriptors)?;
        }
        let [length, number] = [0, 4].map(|at| {
            let word = [0, 1, 2, 3].map(|byte| header[at + byte]);
            u32::from_le_bytes(word) as usize
        });
        self.check_length(length)?;
        if descriptors.len() != number {
            let (came, said) = (descriptors.len(), number);
            return Err(ChannelError::Descriptors { came, said });
        }
        let mut bytes = Vec::new();
        let mut part = [0; 1 << 14];
        while bytes.len() < length {
            before_part()?;
            let room = (length - bytes.len()).min(part.len());
            match (&self.stream).read(&mut part[..room]) {
                Ok(0) => return Err(ChannelError::Closed),
                Ok(read) => bytes.extend_from_slice(&part[..read]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(channel_error(error)),
            }
        }
        Ok((bytes, descriptors))
    }

    fn receive_some(
        &self,
        buffer: &mut [u8],
        descriptors: &mut Vec<OwnedFd>,
    ) -> Result<usize, ChannelError> {
        let received = socket::receive(&self.stream, buffer, descriptors).map_err(channel_error)?;
        if received.has_lost_descriptors || descriptors.len() > DESCRIPTORS_MAX {
            let (came, said) = (descriptors.len(), DESCRIPTORS_MAX);
            return Err(ChannelError::Descriptors { came, said });
        }
        match received.bytes {
            0 => Err(ChannelError::Closed),
            bytes => Ok(bytes),
        }
    }
}

fn channel_error(error: io::Error) -> ChannelError {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => ChannelError::Timeout,
        io::ErrorKind::BrokenPipe
        | io::ErrorKind::ConnectionReset
        | io::ErrorKind::UnexpectedEof
        | io::ErrorKind::WriteZero => ChannelError::Closed,
        _ => ChannelError::Io(error),
    }
}
