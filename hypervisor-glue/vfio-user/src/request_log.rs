//! Request log of a server, in a file that outlives its process.
//!
//! | offset | content |
//! |---|---|
//! | 0 | magic, layout, *commit word* |
//! | 4 KiB, 8 KiB | two heads: the last request, the connection, the location of the device's state |
//! | 2 MiB, 18 MiB | two states of the device, at most 16 MiB each |
//! | 34 MiB | replies, each at a multiple of 2 MiB |
//!
//! A commit overwrites the invalid head, then writes the commit word, which makes this head the valid one. The commit word is
//! written in a single write. So there is always one valid head, whenever the process ends. The device's state is also written
//! to the unused place first, and the new head then points to it.
//!
//! The file's *position* belongs to the open file description, which all processes share because they duplicate one descriptor.
//! [`RequestLog::send`] advances it by the number of bytes that the socket accepts. So the position shows how much of a reply
//! was sent.
//!
//! # 2 MiB for each reply
//!
//! sendfile(2) lends the file's pages to the socket. So a reply must not change until the client has read it. Therefore each
//! reply has its own pages. They are removed from the file later, but never overwritten. Memory files can have huge pages
//! (`/sys/kernel/mm/transparent_hugepage/shmem_enabled`). Removing a part of a huge page would zero that part in place, so each
//! reply gets a whole huge page of 2 MiB. On a host with pages of 16 or 64 KiB, huge pages are larger: there, `shmem_enabled`
//! must be `never`.

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::{FallocateFlags, MemfdFlags};
use thiserror::Error;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::device::RegionIndex;
use crate::kill_point::crash_point;
use crate::message::{MAX_CONTROL_PAYLOAD, MAX_DATA_XFER_SIZE, RegionAccess, VfioUserHeader};

const MAGIC: [u8; 8] = *b"vfiousrJ";
const LAYOUT: u32 = 1;

const COMMIT_WORD_OFFSET: u64 = 16;
const HEADS_OFFSET: u64 = 0x1000;
const HEAD_STRIDE: u64 = 0x1000;
const DEVICES_OFFSET: u64 = SLOT;
const REPLIES_OFFSET: u64 = DEVICES_OFFSET + 2 * MAX_DEVICE_STATE as u64;
/// Size of a slot, the place of one reply in the file, in bytes.
const SLOT: u64 = 2 << 20;
/// Number of slots for replies. Replies use the slots in turn, so the pages of a reply are removed long before another reply
/// uses its slot.
const SLOTS: u64 = 1024;
const FILE_SIZE: u64 = REPLIES_OFFSET + SLOTS * SLOT;

/// Largest state of a device in a request log, in bytes.
pub const MAX_DEVICE_STATE: usize = 16 << 20;

/// Maximum number of attempts to read the request log of a running server. Each commit during a read makes another attempt
/// necessary, and takes about as long as the read.
const ATTEMPTS: u32 = 1000;

/// Largest request in bytes. A request stays in the socket until it is answered, so the whole request must fit into the
/// socket's buffer.
pub(crate) const MAX_REQUEST: usize = VfioUserHeader::SIZE + MAX_CONTROL_PAYLOAD;

const MAX_REPLY: usize =
    VfioUserHeader::SIZE + size_of::<RegionAccess>() + MAX_DATA_XFER_SIZE as usize;
const _: () = assert!((MAX_REPLY as u64) < SLOT);
const _: () = assert!(DEVICES_OFFSET.is_multiple_of(SLOT) && REPLIES_OFFSET.is_multiple_of(SLOT));

/// Error of creating, reading or writing a request log.
#[derive(Debug, Error)]
pub enum RequestLogError {
    /// The file is no request log.
    #[error(
        "The stored file is not a vfio-user request log: it is {found}. Start without it, and connect the VMM again"
    )]
    NotARequestLog {
        /// Kind of file found.
        found: &'static str,
    },
    /// Another version of the server wrote the request log.
    #[error(
        "The vfio-user request log has layout {found}, but this program reads layout {LAYOUT}: start the program \
         that wrote it"
    )]
    Layout {
        /// Layout version of the file.
        found: u32,
    },
    /// The request log has no commit: the process ended before it stored the device's first state.
    #[error("The vfio-user request log is empty: start without it")]
    Empty,
    /// The request log contains an invalid value.
    #[error(
        "The vfio-user request log is damaged: {field} is {value}. Start without it, and connect the VMM again"
    )]
    Damaged {
        /// Name of the invalid value, for the message.
        field: &'static str,
        /// The invalid value, as found in the file.
        value: u64,
    },
    /// The server has committed during every attempt to read the request log.
    #[error(
        "The vfio-user request log changed while it was read, {ATTEMPTS} times in a row: try again when its client \
         is less busy"
    )]
    Busy,
    /// An unsent reply must be sent with the memory of a region, but the device has no memory for this region.
    #[error("A stored reply needs the memory of region {region:?}, which the device does not have")]
    NoMemory {
        /// The region.
        region: RegionIndex,
    },
    /// The device's state is too large.
    #[error(
        "The device's state has {size} bytes: a vfio-user request log takes at most {MAX_DEVICE_STATE}"
    )]
    DeviceState {
        /// Bytes of state.
        size: usize,
    },
    /// The file cannot be accessed.
    #[error("Cannot {action} the vfio-user request log")]
    File {
        /// Action that failed.
        action: &'static str,
        /// Cause.
        source: io::Error,
    },
}

fn file_error(action: &'static str) -> impl FnOnce(io::Error) -> RequestLogError {
    move |source| RequestLogError::File { action, source }
}

/// Beginning of the file: its format, and the commit word, the number of the last commit.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RequestLogHeader {
    magic: [u8; 8],
    layout: U32,
    reserved: U32,
    commit_word: U64,
}

const _: () =
    assert!(std::mem::offset_of!(RequestLogHeader, commit_word) as u64 == COMMIT_WORD_OFFSET);

/// Record of the last request in the file, in the file's byte order: the *head* (see the module).
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawLoggedRequest {
    /// Number of the commit that wrote this head. The head is valid if its number equals the commit word.
    generation: U64,
    sequence: U64,
    request: U32,
    reply: U32,
    flags: U32,
    /// Number of the region whose memory is sent with the reply, or [`NO_REGION`].
    memory_of: U32,
    unread: U32,
    unanswered: U32,
    device_slot: U32,
    device_size: U32,
}

const CONNECTED: u32 = 1 << 0;
const NEGOTIATED: u32 = 1 << 1;
const ACCEPTS_FDS: u32 = 1 << 2;
const CLOSING: u32 = 1 << 3;
const SENDING: u32 = 1 << 4;
const FLAGS: u32 = CONNECTED | NEGOTIATED | ACCEPTS_FDS | CLOSING | SENDING;
const NO_REGION: u32 = u32::MAX;

/// Results of the client's `VERSION` command on which later requests depend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NegotiatedVersion {
    /// Set if the client accepts a file descriptor with a reply.
    pub(crate) accepts_fds: bool,
}

/// State of the client's connection that a successor needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LoggedConnection {
    /// Result of the client's `VERSION` command; `None` until the client sends it.
    pub(crate) negotiated: Option<NegotiatedVersion>,
    /// Set if the server closes the connection after the last reply.
    pub(crate) is_closing: bool,
}

/// Head of the request log: the last request, its reply, and the client's connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LoggedRequest {
    /// Number of the request. The reply is in the slot with this number modulo [`SLOTS`].
    pub(crate) sequence: u64,
    /// Size of the request in bytes, which are to be removed from the socket; 0 if no request must be removed.
    pub(crate) request_bytes: u32,
    /// Size of the reply in bytes; 0 if there is none.
    pub(crate) reply_bytes: u32,
    /// Region whose memory is sent with the reply.
    pub(crate) memory_region: Option<RegionIndex>,
    /// Unread bytes in the socket right before a reply with a descriptor was sent. `None` if the last reply has no descriptor,
    /// or was not sent yet.
    pub(crate) before_sending: Option<SocketQueueBytes>,
    pub(crate) client: Option<LoggedConnection>,
}

/// Unread data in a socket, for both directions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SocketQueueBytes {
    /// Replies that the client has not read, as bytes of kernel memory.
    pub(crate) unread: u32,
    /// Requests that the server has not read, in bytes.
    pub(crate) unanswered: u32,
}

impl SocketQueueBytes {
    pub(crate) fn has_more_than(self, before: Self) -> bool {
        self.unread > before.unread || self.unanswered > before.unanswered
    }
}

impl LoggedRequest {
    fn start_offset(&self) -> u64 {
        reply_offset(self.sequence)
    }

    fn end_offset(&self) -> u64 {
        reply_offset(self.sequence.wrapping_add(1))
    }

    /// Returns the head for the request after this one, without the request's sizes.
    pub(crate) fn next(&self, client: LoggedConnection) -> Self {
        Self {
            sequence: self.sequence.wrapping_add(1),
            client: Some(client),
            ..Self::default()
        }
    }

    /// Returns a head without a request, for a new connection or, if `client` is `None`, for no connection.
    pub(crate) fn with_client(&self, client: Option<LoggedConnection>) -> Self {
        Self {
            sequence: self.sequence,
            client,
            ..Self::default()
        }
    }
}

/// Returns the offset in the file of the reply to request `sequence`. The numbers of requests wrap at a multiple of [`SLOTS`].
fn reply_offset(sequence: u64) -> u64 {
    REPLIES_OFFSET + sequence % SLOTS * SLOT
}

/// Place of the device's state in the file: which of the two places, and the size in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct DeviceStateLocation {
    slot: u32,
    size: u32,
}

impl DeviceStateLocation {
    fn offset(self) -> u64 {
        DEVICES_OFFSET + u64::from(self.slot) * MAX_DEVICE_STATE as u64
    }
}

/// File in which a server logs its requests for its successor.
///
/// The caller stores a duplicate of the file's descriptor ([`AsFd`]) in another process, and the successor opens the request
/// log from this duplicate. Only one server at a time may use a request log. So a process that has handed its request log over
/// must not use it again.
#[derive(Debug)]
pub struct RequestLog {
    shared: Arc<RequestLogFile>,
}

/// Parts shared by a request log and its [`StateStore`]s.
#[derive(Debug)]
struct RequestLogFile {
    file: File,
    committed: Mutex<RequestLogCommit>,
}

/// Last commit to the file: its number, the head, and the place of the device's state.
#[derive(Debug)]
struct RequestLogCommit {
    generation: u64,
    head: LoggedRequest,
    device: DeviceStateLocation,
    /// Device state of a commit that failed. The next commit writes it.
    unwritten: Option<Vec<u8>>,
}

/// Storage for the device's state during a request.
///
/// A device stores its state before an action that must not happen twice. If the process ends after that, the successor carries
/// out the same request again, but starts from the stored state.
#[derive(Clone, Debug)]
pub struct StateStore {
    shared: Arc<RequestLogFile>,
}

impl StateStore {
    /// Stores the device's state, as [`Device::save`](crate::VfioUserDevice::save) returns it.
    ///
    /// # Errors
    ///
    /// The state is too large, or the request log cannot be written. The next commit stores the state again.
    pub fn store(&self, device: &[u8]) -> Result<(), RequestLogError> {
        let mut committed = self.shared.committed();
        let head = committed.head;
        self.shared
            .commit(&mut committed, head, Some(device.to_owned()))
    }
}

/// Contents of a request log that another process wrote.
#[derive(Debug)]
pub struct RequestLogContents {
    device_state: Vec<u8>,
    is_connected: bool,
}

impl RequestLogContents {
    /// Reads the request log of a server that is still running.
    ///
    /// # Errors
    ///
    /// As [`RequestLog::from_predecessor`].
    pub fn read_running(file: OwnedFd) -> Result<Self, RequestLogError> {
        Self::read_changing(file, || {})
    }

    /// Reads a request log that its server may be changing. Tests pass `amid`, which is called in each attempt between the
    /// reads of the head and of the device's state.
    fn read_changing(file: OwnedFd, mut amid: impl FnMut()) -> Result<Self, RequestLogError> {
        let file = open(file)?;
        let mut before = generation(&file)?;
        for _ in 0..ATTEMPTS {
            let read = read_head(&file, before).and_then(|(head, device)| {
                amid();
                Self::read(&file, head, device)
            });
            // A commit leaves the present head and state in place, and only a second commit overwrites them. So the data is
            // valid if the commit word has not changed.
            let after = generation(&file)?;
            if after == before {
                return read;
            }
            before = after;
        }
        Err(RequestLogError::Busy)
    }

    fn read(
        file: &File,
        head: LoggedRequest,
        device: DeviceStateLocation,
    ) -> Result<Self, RequestLogError> {
        let mut bytes = vec![0; device.size as usize];
        file.read_exact_at(&mut bytes, device.offset())
            .map_err(file_error("read"))?;
        Ok(Self {
            device_state: bytes,
            is_connected: head.client.is_some(),
        })
    }

    /// Returns the device's last state, as [`Device::save`](crate::VfioUserDevice::save) returned it.
    pub fn device_state(&self) -> &[u8] {
        &self.device_state
    }

    /// Returns whether a client was connected.
    pub fn is_connected(&self) -> bool {
        self.is_connected
    }
}

impl RequestLog {
    /// Creates an empty request log.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error.
    pub fn new() -> Result<Self, RequestLogError> {
        let file = rustix::fs::memfd_create("vfio-user-journal", MemfdFlags::CLOEXEC)
            .map(File::from)
            .map_err(|error| file_error("make")(error.into()))?;
        file.set_len(FILE_SIZE).map_err(file_error("make"))?;
        let title = RequestLogHeader {
            magic: MAGIC,
            layout: LAYOUT.into(),
            reserved: 0.into(),
            commit_word: 0.into(),
        };
        file.write_all_at(title.as_bytes(), 0)
            .map_err(file_error("write"))?;
        let this = Self::from_parts(
            file,
            0,
            LoggedRequest::default(),
            DeviceStateLocation::default(),
        );
        this.finish_request()?;
        Ok(this)
    }

    /// Opens the request log of the predecessor.
    ///
    /// # Errors
    ///
    /// The file is no request log, has another layout, is empty or is damaged.
    pub fn from_predecessor(file: OwnedFd) -> Result<(Self, RequestLogContents), RequestLogError> {
        let mut file = open(file)?;
        let generation = generation(&file)?;
        let (head, device) = read_head(&file, generation)?;
        let position = file.stream_position().map_err(file_error("inspect"))?;
        let sent = position.wrapping_sub(head.start_offset());
        if head.client.is_some() && sent > head.reply_bytes.into() && position != head.end_offset()
        {
            return Err(damaged_error("the file's position", position));
        }
        let record = RequestLogContents::read(&file, head, device)?;
        Ok((Self::from_parts(file, generation, head, device), record))
    }

    fn from_parts(
        file: File,
        generation: u64,
        head: LoggedRequest,
        device: DeviceStateLocation,
    ) -> Self {
        let committed = Mutex::new(RequestLogCommit {
            generation,
            head,
            device,
            unwritten: None,
        });
        Self {
            shared: Arc::new(RequestLogFile { file, committed }),
        }
    }

    /// Returns a handle by which the device can store its state during a request.
    pub fn state_store(&self) -> StateStore {
        StateStore {
            shared: self.shared.clone(),
        }
    }

    pub(crate) fn head(&self) -> LoggedRequest {
        self.shared.committed().head
    }

    /// Commits `head` to the file. If `device` is given, stores it as the device's state; otherwise, stores the state of an
    /// earlier commit that failed, if there is one.
    pub(crate) fn commit(
        &mut self,
        head: LoggedRequest,
        device: Option<Vec<u8>>,
    ) -> Result<(), RequestLogError> {
        let mut committed = self.shared.committed();
        self.shared.commit(&mut committed, head, device)
    }

    /// Writes the reply to request `sequence` into the reply's slot, before the commit of the request.
    pub(crate) fn write_reply(&self, sequence: u64, reply: &[u8]) -> Result<(), RequestLogError> {
        self.shared.write(reply, reply_offset(sequence))?;
        crash_point();
        Ok(())
    }

    /// Reads the reply to the last request.
    pub(crate) fn reply(&self) -> Result<Vec<u8>, RequestLogError> {
        let head = self.head();
        let mut reply = vec![0; head.reply_bytes as usize];
        self.shared
            .file
            .read_exact_at(&mut reply, head.start_offset())
            .map_err(file_error("read"))?;
        Ok(reply)
    }

    /// Returns the number of bytes sent of the reply to the last request; `None` if the request is finished.
    pub(crate) fn sent_bytes(&self) -> Result<Option<u32>, RequestLogError> {
        let head = self.head();
        let position = (&self.shared.file).stream_position();
        let position = position.map_err(file_error("inspect"))?;
        let sent = position.wrapping_sub(head.start_offset());
        // A larger value means that the position is at the next slot, so the request is finished. All other positions were
        // rejected when the request log was opened.
        Ok(u32::try_from(sent)
            .ok()
            .filter(|&sent| sent <= head.reply_bytes))
    }

    /// Records in the file's position that `sent` bytes of the reply to the last request were sent.
    pub(crate) fn set_sent_bytes(&self, sent: u32) -> Result<(), RequestLogError> {
        self.seek(self.head().start_offset() + u64::from(sent))
    }

    /// Sends up to `count` more bytes of the reply to the last request. Returns the number of bytes that the socket accepted.
    pub(crate) fn send(&self, stream: &UnixStream, count: u32) -> io::Result<u32> {
        loop {
            match rustix::fs::sendfile(stream, &self.shared.file, None, count as usize) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                // The cast keeps the value, since at most `count` bytes were sent.
                Ok(sent) => return Ok(sent as u32),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Finishes the last request: moves the file's position to the next slot, and removes the pages of the reply from the file.
    pub(crate) fn finish_request(&self) -> Result<(), RequestLogError> {
        let head = self.head();
        self.seek(head.end_offset())?;
        crash_point();
        let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        loop {
            match rustix::fs::fallocate(&self.shared.file, mode, head.start_offset(), SLOT) {
                Ok(()) => break,
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(file_error("free a reply in")(error.into())),
            }
        }
        crash_point();
        Ok(())
    }

    fn seek(&self, position: u64) -> Result<(), RequestLogError> {
        (&self.shared.file)
            .seek(SeekFrom::Start(position))
            .map_err(file_error("seek in"))?;
        Ok(())
    }
}

impl RequestLogFile {
    fn committed(&self) -> MutexGuard<'_, RequestLogCommit> {
        // A panic cannot leave a partial change.
        self.committed
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn commit(
        &self,
        committed: &mut RequestLogCommit,
        head: LoggedRequest,
        device: Option<Vec<u8>>,
    ) -> Result<(), RequestLogError> {
        let device = device.or_else(|| committed.unwritten.take());
        let result = self.try_commit(committed, head, device.as_deref());
        committed.unwritten = device.filter(|_| result.is_err());
        result
    }

    fn try_commit(
        &self,
        committed: &mut RequestLogCommit,
        head: LoggedRequest,
        device: Option<&[u8]>,
    ) -> Result<(), RequestLogError> {
        let mut state = committed.device;
        if let Some(bytes) = device {
            let size = bytes.len();
            if size > MAX_DEVICE_STATE {
                return Err(RequestLogError::DeviceState { size });
            }
            state = DeviceStateLocation {
                slot: 1 - state.slot,
                // The cast keeps the value, since the size was checked above.
                size: size as u32,
            };
            self.write(bytes, state.offset())?;
            crash_point();
        }
        // The number 0 stands for a request log without a commit, so the numbers skip it.
        let generation = committed.generation.wrapping_add(1).max(1);
        let raw = RawLoggedRequest::new(generation, &head, state);
        self.write(raw.as_bytes(), head_offset(generation))?;
        crash_point();
        self.write(&generation.to_le_bytes(), COMMIT_WORD_OFFSET)?;
        crash_point();
        committed.generation = generation;
        committed.head = head;
        committed.device = state;
        Ok(())
    }

    fn write(&self, bytes: &[u8], offset: u64) -> Result<(), RequestLogError> {
        self.file
            .write_all_at(bytes, offset)
            .map_err(file_error("write"))
    }
}

impl AsFd for RequestLog {
    /// Returns the file, of which the caller stores a duplicate for the successor.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.file.as_fd()
    }
}

/// Opens a file as a request log, and checks its header and size.
fn open(file: OwnedFd) -> Result<File, RequestLogError> {
    let file = File::from(file);
    let metadata = file.metadata().map_err(file_error("inspect"))?;
    if !metadata.is_file() {
        return Err(RequestLogError::NotARequestLog {
            found: "not a regular file",
        });
    }
    let mut title = RequestLogHeader::new_zeroed();
    match file.read_exact_at(title.as_mut_bytes(), 0) {
        Ok(()) if title.magic == MAGIC => {}
        Err(error) if error.kind() != io::ErrorKind::UnexpectedEof => {
            return Err(file_error("read")(error));
        }
        _ => {
            return Err(RequestLogError::NotARequestLog {
                found: "a file with other contents",
            });
        }
    }
    let layout = title.layout.get();
    if layout != LAYOUT {
        return Err(RequestLogError::Layout { found: layout });
    }
    if metadata.len() != FILE_SIZE {
        return Err(damaged_error("the file's size", metadata.len()));
    }
    Ok(file)
}

/// Returns the number of the last commit, which is the commit word.
fn generation(file: &File) -> Result<u64, RequestLogError> {
    let mut word = U64::new_zeroed();
    file.read_exact_at(word.as_mut_bytes(), COMMIT_WORD_OFFSET)
        .map_err(file_error("read"))?;
    match word.get() {
        0 => Err(RequestLogError::Empty),
        generation => Ok(generation),
    }
}

/// Reads the valid head, which is the one that the commit word `generation` selects.
fn read_head(
    file: &File,
    generation: u64,
) -> Result<(LoggedRequest, DeviceStateLocation), RequestLogError> {
    let mut raw = RawLoggedRequest::new_zeroed();
    file.read_exact_at(raw.as_mut_bytes(), head_offset(generation))
        .map_err(file_error("read"))?;
    raw.check(generation)
}

fn damaged_error(field: &'static str, value: impl Into<u64>) -> RequestLogError {
    let value = value.into();
    RequestLogError::Damaged { field, value }
}

fn head_offset(generation: u64) -> u64 {
    HEADS_OFFSET + generation % 2 * HEAD_STRIDE
}

impl RawLoggedRequest {
    fn new(generation: u64, head: &LoggedRequest, device: DeviceStateLocation) -> Self {
        let agreed = head.client.and_then(|client| client.negotiated);
        let flags = [
            (head.client.is_some(), CONNECTED),
            (agreed.is_some(), NEGOTIATED),
            (agreed.is_some_and(|agreed| agreed.accepts_fds), ACCEPTS_FDS),
            (head.client.is_some_and(|client| client.is_closing), CLOSING),
            (head.before_sending.is_some(), SENDING),
        ];
        let flags = flags.iter().filter(|(set, _)| *set);
        let traffic = head.before_sending.unwrap_or_default();
        Self {
            generation: generation.into(),
            sequence: head.sequence.into(),
            request: head.request_bytes.into(),
            reply: head.reply_bytes.into(),
            flags: flags.fold(0, |flags, (_, flag)| flags | flag).into(),
            memory_of: head
                .memory_region
                .map_or(NO_REGION, |index| index as u32)
                .into(),
            unread: traffic.unread.into(),
            unanswered: traffic.unanswered.into(),
            device_slot: device.slot.into(),
            device_size: device.size.into(),
        }
    }

    /// Checks and decodes a head. The file is not trusted, since a client may have taken over the process that wrote it.
    fn check(
        &self,
        commit_word: u64,
    ) -> Result<(LoggedRequest, DeviceStateLocation), RequestLogError> {
        let Self {
            generation,
            sequence,
            request,
            reply,
            flags,
            memory_of,
            unread,
            unanswered,
            device_slot,
            device_size,
        } = *self;
        if generation.get() != commit_word {
            return Err(damaged_error("a head's generation", generation.get()));
        }
        let (request, reply, flags) = (request.get(), reply.get(), flags.get());
        if request as usize > MAX_REQUEST {
            return Err(damaged_error("the request's size", request));
        }
        if reply as usize > MAX_REPLY {
            return Err(damaged_error("the reply's size", reply));
        }
        if flags & !FLAGS != 0 {
            return Err(damaged_error("a word of flags", flags));
        }
        let memory_of = match memory_of.get() {
            NO_REGION => None,
            index => Some(
                RegionIndex::new(index).ok_or(damaged_error("a reply's region number", index))?,
            ),
        };
        let device = DeviceStateLocation {
            slot: device_slot.get(),
            size: device_size.get(),
        };
        if device.slot > 1 {
            return Err(damaged_error(
                "the number of the device's state",
                device.slot,
            ));
        }
        if device.size as usize > MAX_DEVICE_STATE {
            return Err(damaged_error("the size of the device's state", device.size));
        }
        let agreed = NegotiatedVersion {
            accepts_fds: flags & ACCEPTS_FDS != 0,
        };
        let client = LoggedConnection {
            negotiated: (flags & NEGOTIATED != 0).then_some(agreed),
            is_closing: flags & CLOSING != 0,
        };
        let traffic = SocketQueueBytes {
            unread: unread.get(),
            unanswered: unanswered.get(),
        };
        let head = LoggedRequest {
            sequence: sequence.get(),
            request_bytes: request,
            reply_bytes: reply,
            memory_region: memory_of,
            before_sending: (flags & SENDING != 0).then_some(traffic),
            client: (flags & CONNECTED != 0).then_some(client),
        };
        Ok((head, device))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Contents of a request log of layout 1 after half of a reply was sent: its non-zero words, by offset.
    const STORED: &[(u64, u64)] = &[
        (0, u64::from_le_bytes(*b"vfiousrJ")),
        (8, 1),
        (16, 1),
        (0x2000, 1),
        (0x2008, 0x0001_0000_0003),
        (0x2010, 0x0008_0000_0014),
        (0x2018, 0x0004_0000_001F),
        (0x2020, 0x0015_0000_0007),
        (0x2028, 0x0008_0000_0001),
        (0x0120_0000, u64::from_le_bytes(*b"a device")),
        (0x0280_0000, u64::from_le_bytes(*b"answered")),
    ];

    /// Length in bytes of the file with [`STORED`].
    const STORED_LEN: u64 = 0x8220_0000;

    /// File position of the file with [`STORED`].
    const STORED_POSITION: u64 = 0x0280_0004;

    fn stored_head() -> LoggedRequest {
        let agreed = Some(NegotiatedVersion { accepts_fds: true });
        let before = SocketQueueBytes {
            unread: 7,
            unanswered: 21,
        };
        LoggedRequest {
            sequence: 0x0001_0000_0003,
            request_bytes: 20,
            reply_bytes: 8,
            memory_region: Some(RegionIndex::Bar4),
            before_sending: Some(before),
            client: Some(LoggedConnection {
                negotiated: agreed,
                is_closing: true,
            }),
        }
    }

    #[test]
    fn the_request_log_of_this_layout_matches_the_stored_file() {
        let mut request_log = RequestLog::new().unwrap();
        let head = stored_head();
        request_log.write_reply(head.sequence, b"answered").unwrap();
        request_log
            .commit(head, Some(b"a device".to_vec()))
            .unwrap();
        request_log.set_sent_bytes(4).unwrap();
        let mut file = &request_log.shared.file;
        assert_eq!(file.metadata().unwrap().len(), STORED_LEN);
        assert_eq!(file.stream_position().unwrap(), STORED_POSITION);
        // Offsets of the header, the two heads, the two places for the device's state, and the slot of this reply.
        let places = [0, 0x1000, 0x2000, 0x0020_0000, 0x0120_0000, 0x0280_0000];
        let words = places.into_iter().flat_map(|place: u64| {
            let mut bytes = [0; 0x1000];
            file.read_exact_at(&mut bytes, place).unwrap();
            let (words, _) = bytes.as_chunks::<8>();
            let words = words.iter().map(|word| u64::from_le_bytes(*word));
            (place..).step_by(8).zip(words.collect::<Vec<_>>())
        });
        let words: Vec<_> = words.filter(|(_, word)| *word != 0).collect();
        assert!(
            words == STORED,
            "The layout of the journal has changed: raise LAYOUT, read the one before as well, and store these words: \
             {words:#x?}"
        );
    }

    #[test]
    fn a_request_log_of_layout_1_is_restored() {
        let file = rustix::fs::memfd_create("stored", MemfdFlags::CLOEXEC).unwrap();
        let mut file = File::from(file);
        file.set_len(STORED_LEN).unwrap();
        for (offset, word) in STORED {
            file.write_all_at(&word.to_le_bytes(), *offset).unwrap();
        }
        file.seek(SeekFrom::Start(STORED_POSITION)).unwrap();
        let record = RequestLogContents::read_running(file.try_clone().unwrap().into()).unwrap();
        assert_eq!(record.device_state(), b"a device");
        let (request_log, record) = RequestLog::from_predecessor(file.into()).unwrap();
        assert_eq!(
            (record.device_state(), record.is_connected()),
            (&b"a device"[..], true)
        );
        assert_eq!(request_log.head(), stored_head());
        assert_eq!(request_log.reply().unwrap(), b"answered");
        assert_eq!(request_log.sent_bytes().unwrap(), Some(4));
    }

    #[test]
    fn a_request_log_of_another_layout_is_refused_before_and_after_a_kill() {
        let mut request_log = RequestLog::new().unwrap();
        commit(&mut request_log, b"state");
        let later = LAYOUT + 1;
        let file = &request_log.shared.file;
        file.write_all_at(&later.to_le_bytes(), 8).unwrap();
        for refused in [
            RequestLogContents::read_running(share(&request_log)).unwrap_err(),
            RequestLog::from_predecessor(share(&request_log)).unwrap_err(),
        ] {
            assert!(
                matches!(refused, RequestLogError::Layout { found } if found == later),
                "{refused}"
            );
        }
    }

    #[test]
    fn a_state_stored_during_a_request_is_used_by_the_next_process() {
        let mut request_log = RequestLog::new().unwrap();
        let stored = |request_log: &RequestLog| {
            let file = request_log.as_fd().try_clone_to_owned().unwrap();
            let (again, record) = RequestLog::from_predecessor(file).unwrap();
            (again.head().sequence, record.device_state().to_owned())
        };
        let head = request_log.head().next(LoggedConnection::default());
        request_log.commit(head, Some(b"before".to_vec())).unwrap();
        request_log.set_sent_bytes(0).unwrap();
        let store = request_log.state_store();
        store.store(b"amid").unwrap();
        assert_eq!(stored(&request_log), (head.sequence, b"amid".to_vec()));
        store.store(b"later").unwrap();
        // The next commit has no device state, because the request has not changed the state since.
        let next = request_log.head().next(LoggedConnection::default());
        request_log.commit(next, None).unwrap();
        request_log.set_sent_bytes(0).unwrap();
        assert_eq!(stored(&request_log), (next.sequence, b"later".to_vec()));
    }

    /// Commits one request of a client.
    fn commit(request_log: &mut RequestLog, state: &[u8]) {
        let head = request_log.head().next(LoggedConnection::default());
        request_log.commit(head, Some(state.to_vec())).unwrap();
    }

    fn share(request_log: &RequestLog) -> OwnedFd {
        request_log.as_fd().try_clone_to_owned().unwrap()
    }

    #[test]
    fn a_running_servers_log_is_readable_while_it_sends() {
        let mut request_log = RequestLog::new().unwrap();
        commit(&mut request_log, b"state");
        // The server commits and sends a part of its reply after the reader has read the head.
        request_log
            .seek(request_log.head().end_offset() + 20)
            .unwrap();
        let refused = RequestLog::from_predecessor(share(&request_log)).unwrap_err();
        assert!(
            matches!(refused, RequestLogError::Damaged { .. }),
            "{refused}"
        );
        let record = RequestLogContents::read_running(share(&request_log)).unwrap();
        assert_eq!(
            (record.device_state(), record.is_connected()),
            (&b"state"[..], true)
        );
    }

    #[test]
    fn a_running_servers_state_is_read_as_committed() {
        let mut request_log = RequestLog::new().unwrap();
        commit(&mut request_log, b"first");
        let shared = || share(&request_log);
        let (first, second) = (shared(), shared());
        // The second of these commits overwrites the state that is being read.
        let mut states = [&b"second"[..], b"third"].into_iter();
        let record = RequestLogContents::read_changing(first, || {
            for state in states.by_ref() {
                commit(&mut request_log, state);
            }
        });
        assert_eq!(record.unwrap().device_state(), b"third");
        let error = RequestLogContents::read_changing(second, || commit(&mut request_log, b"more"))
            .unwrap_err();
        assert!(matches!(error, RequestLogError::Busy), "{error}");
    }
}
