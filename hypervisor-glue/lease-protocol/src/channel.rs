//! Messages with descriptors over a stream socket.
//!
//! A message is a header of 8 bytes, then JSON. The header has the number of bytes of JSON and the number of
//! descriptors, each as 32 bits in little endian. The descriptors come with the header.

use std::io::{self, Read, Write};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use nvme_mpt::deadline::{Deadline, SystemClock};
use serde::Serialize;
use serde::de::DeserializeOwned;
use thiserror::Error;

use crate::message::Farewell;
use crate::socket::{self, DESCRIPTORS_MAX, Stream};

/// Most bytes of a message's JSON, for a lease of up to 64 queue pairs.
pub const MESSAGE_MAX: usize = 4 << 20;

/// Most bytes for each queue pair of a lease with more of them: the state of one that holds all completions that it can.
const BYTES_PER_PAIR: usize = MESSAGE_MAX / 64;

/// Time in which a message that began has to arrive, or to be taken.
const TRANSFER: Duration = Duration::from_secs(10);

const HEADER: usize = 8;

/// A message did not arrive, or is none.
#[derive(Debug, Error)]
pub enum ChannelError {
    /// The other side closed the connection.
    #[error("the other side closed the connection")]
    Closed,
    /// A message did not arrive in time.
    #[error("the other side does not go on")]
    Timeout,
    /// A message is larger than one may be.
    #[error("a message of {length} bytes came, but it may have {most}")]
    TooLarge {
        /// Bytes of the message.
        length: usize,
        /// Most bytes that it may have.
        most: usize,
    },
    /// A message has other descriptors than it says.
    #[error("a message came with {came} descriptors instead of {said}")]
    Descriptors {
        /// Descriptors that came.
        came: usize,
        /// Descriptors that the header has, or the request needs.
        said: usize,
    },
    /// A message is not what the protocol has there.
    #[error("a message came that is not one of the lease protocol")]
    Message(#[from] serde_json::Error),
    /// A lease has facts that none can have.
    #[error("a lease came with facts that no lease has")]
    Impossible,
    /// The kernel's error.
    #[error("the connection failed")]
    Io(#[from] io::Error),
}

/// A connection.
#[derive(Debug)]
pub(crate) struct Channel {
    stream: Stream,
    /// Most bytes of a message's JSON.
    most: AtomicUsize,
    last_words: LastWords,
}

/// The [`Farewell`]s of the other side that have come.
#[derive(Debug, Default)]
struct LastWords {
    removed: AtomicBool,
    ended: AtomicBool,
}

impl Channel {
    /// Over a socket that is blocking.
    pub(crate) fn new(stream: Stream) -> io::Result<Self> {
        stream.set_write_timeout(Some(TRANSFER))?;
        let most = MESSAGE_MAX.into();
        let last_words = LastWords::default();
        Ok(Self {
            stream,
            most,
            last_words,
        })
    }

    /// Lets messages have the size that a lease with so many queue pairs needs.
    pub(crate) fn expect_queue_pairs(&self, queue_pairs: u16) {
        let most = MESSAGE_MAX.max(usize::from(queue_pairs) * BYTES_PER_PAIR);
        self.most.store(most, Ordering::Relaxed);
    }

    fn check_length(&self, length: usize) -> Result<(), ChannelError> {
        let most = self.most.load(Ordering::Relaxed);
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
        let mut bytes = vec![0; HEADER];
        serde_json::to_writer(&mut bytes, message)?;
        let length = bytes.len() - HEADER;
        self.check_length(length)?;
        let number = descriptors.len();
        if number > DESCRIPTORS_MAX {
            let said = DESCRIPTORS_MAX;
            return Err(ChannelError::Descriptors { came: number, said });
        }
        bytes[..4].copy_from_slice(&(length as u32).to_le_bytes());
        bytes[4..HEADER].copy_from_slice(&(number as u32).to_le_bytes());
        let sent = socket::send(&self.stream, &bytes, descriptors).map_err(failure)?;
        (&self.stream).write_all(&bytes[sent..]).map_err(failure)
    }

    /// Receives a request, which begins within `patience`, or at any time. Then it has to arrive.
    pub(crate) fn receive_request<M: DeserializeOwned>(
        &self,
        patience: Option<Duration>,
    ) -> Result<(M, Vec<OwnedFd>), ChannelError> {
        self.stream.set_read_timeout(patience)?;
        let mut deadline = None;
        self.receive(|| {
            // The first part has come.
            let deadline: &mut Deadline =
                deadline.get_or_insert_with(|| Deadline::after(&SystemClock::shared(), TRANSFER));
            match deadline.left() {
                Duration::ZERO => Err(ChannelError::Timeout),
                left => Ok(self.stream.set_read_timeout(Some(left))?),
            }
        })
    }

    /// Sets the time that [`Self::receive_answer`] waits for each part of an answer.
    pub(crate) fn set_patience(&self, patience: Duration) -> io::Result<()> {
        self.stream.set_read_timeout(Some(patience))
    }

    /// Receives an answer. A sandbox of the VMM need not allow any thread to change the socket. A server that ends gives no
    /// more answers, and its last words may come in place of one.
    pub(crate) fn receive_answer<M: DeserializeOwned>(
        &self,
    ) -> Result<(M, Vec<OwnedFd>), ChannelError> {
        let (bytes, descriptors) = self.receive_bytes(|| Ok(()))?;
        match serde_json::from_slice(&bytes) {
            Ok(answer) => Ok((answer, descriptors)),
            Err(error) => match serde_json::from_slice(&bytes) {
                Ok(word) => {
                    self.note(&word);
                    Err(ChannelError::Closed)
                }
                Err(_) => Err(error.into()),
            },
        }
    }

    fn note(&self, word: &Farewell) {
        let LastWords { removed, ended } = &self.last_words;
        match word {
            Farewell::Removed => removed.store(true, Ordering::Relaxed),
            Farewell::Ended => ended.store(true, Ordering::Relaxed),
        }
    }

    /// Reads the last words of a server, as far as they have come. Answers that nobody waited for are passed over. Returns
    /// whether the server has closed the connection.
    pub(crate) fn read_last_words(&self) -> bool {
        loop {
            match self.receive_bytes(|| Ok(())) {
                Ok((bytes, _)) => {
                    if let Ok(word) = serde_json::from_slice(&bytes) {
                        self.note(&word);
                    }
                }
                Err(error) => return matches!(error, ChannelError::Closed),
            }
        }
    }

    /// Returns whether the server has said that the lease was taken away.
    pub(crate) fn was_removed(&self) -> bool {
        self.last_words.removed.load(Ordering::Relaxed)
    }

    /// Returns whether the server has said that nothing reaches the function's memory any more.
    pub(crate) fn has_ended(&self) -> bool {
        self.last_words.ended.load(Ordering::Relaxed)
    }

    /// Receives a message. `before_part` comes before each part but the first.
    fn receive<M: DeserializeOwned>(
        &self,
        before_part: impl FnMut() -> Result<(), ChannelError>,
    ) -> Result<(M, Vec<OwnedFd>), ChannelError> {
        let (bytes, descriptors) = self.receive_bytes(before_part)?;
        Ok((serde_json::from_slice(&bytes)?, descriptors))
    }

    /// As [`Self::receive`], and returns the JSON.
    fn receive_bytes(
        &self,
        mut before_part: impl FnMut() -> Result<(), ChannelError>,
    ) -> Result<(Vec<u8>, Vec<OwnedFd>), ChannelError> {
        let mut header = [0; HEADER];
        let mut descriptors = Vec::new();
        let mut came = self.receive_some(&mut header, &mut descriptors)?;
        while came < HEADER {
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
                Err(error) => return Err(failure(error)),
            }
        }
        Ok((bytes, descriptors))
    }

    fn receive_some(
        &self,
        buffer: &mut [u8],
        descriptors: &mut Vec<OwnedFd>,
    ) -> Result<usize, ChannelError> {
        let received = socket::receive(&self.stream, buffer, descriptors).map_err(failure)?;
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

fn failure(error: io::Error) -> ChannelError {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => ChannelError::Timeout,
        io::ErrorKind::BrokenPipe
        | io::ErrorKind::ConnectionReset
        | io::ErrorKind::UnexpectedEof
        | io::ErrorKind::WriteZero => ChannelError::Closed,
        _ => ChannelError::Io(error),
    }
}
