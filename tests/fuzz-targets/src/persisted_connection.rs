//! The request log of a vfio-user server whose process has ended. The log has arbitrary changes, and the client continues.
//!
//! A server with a request log answers a client. Then the next server restores the connection from the log. The input
//! describes the client's actions and the changes to the log:
//!
//! | bytes | |
//! |---|---|
//! | 1 | choices, see below |
//! | 1 | number of changes to the log |
//! | 5 each | a change: a word's number, and its value |
//! | 1 | number of changed bytes of a reply |
//! | as many | the bytes, which overwrite the next reply |
//! | 4 | distance by which the file position moves, if choice 5 is set |
//! | 2 | number of bytes from the client to the first server |
//! | as many, then all others | messages for the first and the next server: (command, options, length in 2 bytes, payload) |
//!
//! Words 0 to 5 are the log's title, words 6 to 19 its valid head.
//!
//! Choices: bit 0 makes the client start with `VERSION`; bit 1 lets the client read replies before the first server ends;
//! bit 2 gives the device a mappable area; bit 3 disconnects the client before the next server starts; bit 4 loses the
//! client's socket; bit 5 moves the file position; bit 6 connects another client.
//!
//! The log must be refused, or the next server must continue. The server must not block, must end the session when the
//! client ends, and must leave no file descriptor open.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, LazyLock};

use tempfile::TempDir;
use vfio_user_server::{
    DeviceRegion, DmaRegion, IrqCommand, IrqIndex, IrqInfo, MappableArea, RegionIndex, RequestLog,
    SocketAccess, SocketListener, SocketWatcher, VfioUserDevice, VfioUserServer,
};
use vmm_sys_util::epoll::EventSet;
use vmm_sys_util::signal;

use crate::Input;

/// Signal for writes to a socket whose other end is closed (signal(7)). Rust's runtime ignores it, but libFuzzer has its own
/// main.
const SIGPIPE: i32 = 13;

const LISTENER: u32 = 0;
const CLIENT: u32 = 1;

/// Indices of words in a log.
const COMMIT_WORD: u64 = 16;
const TITLE_WORDS: u8 = 6;
const WORDS: u8 = 20;
const HEADS: u64 = 0x1000;

/// Number of events after which a server must have no work left. In each turn, it answers several requests.
const EVENTS: usize = 64;

static FOLDER: LazyLock<TempDir> = LazyLock::new(|| tempfile::tempdir().expect("a folder"));
/// File that the client may map. It is opened once.
static AREA: LazyLock<File> = LazyLock::new(|| File::open("/dev/null").expect("a null device"));
/// Number of open files of this process before the first session.
static OPEN_FILES: LazyLock<usize> = LazyLock::new(|| {
    // Blocked once: this thread runs all inputs.
    signal::block_signal(SIGPIPE).expect("a signal's number");
    open_files()
});

fn open_files() -> usize {
    fs::read_dir("/proc/self/fd").expect("proc").count()
}

fn socket() -> PathBuf {
    FOLDER.path().join("socket")
}

/// A device that counts accesses.
struct Model {
    has_area: bool,
    stream: Option<OwnedFd>,
    requests: u32,
}

impl Model {
    fn new(has_area: bool) -> Self {
        Self {
            has_area,
            stream: None,
            requests: 0,
        }
    }
}

impl VfioUserDevice for Model {
    fn region(&self, index: RegionIndex) -> DeviceRegion {
        let has_area = self.has_area && index == RegionIndex::Bar0;
        let size = match index {
            RegionIndex::Bar0 => 0x4000,
            RegionIndex::Config => 0x100,
            _ => 0,
        };
        DeviceRegion {
            size,
            readable: true,
            writable: true,
            mappable: has_area.then(|| MappableArea {
                offset: 0x1000,
                size: 0x1000,
                memory: Arc::new(AREA.try_clone().expect("a file").into()),
                base: 0,
            }),
        }
    }

    fn read(&mut self, _: RegionIndex, _: u64, data: &mut [u8]) {
        self.requests += 1;
        data.fill(0x11);
    }

    fn write(&mut self, _: RegionIndex, _: u64, _: &[u8]) {
        self.requests += 1;
    }

    fn dma_map(&mut self, _: DmaRegion) -> io::Result<()> {
        self.requests += 1;
        Ok(())
    }

    fn dma_unmap(&mut self, _: Option<(u64, u64)>) -> io::Result<u64> {
        self.requests += 1;
        Ok(0)
    }

    fn irq(&self, index: IrqIndex) -> IrqInfo {
        IrqInfo {
            count: if index == IrqIndex::Msix { 64 } else { 0 },
            ..IrqInfo::default()
        }
    }

    fn set_irqs(&mut self, _: IrqCommand) -> io::Result<()> {
        self.requests += 1;
        Ok(())
    }

    fn reset(&mut self) {
        self.requests += 1;
    }

    fn persist_client(&mut self, stream: BorrowedFd<'_>) -> io::Result<()> {
        self.stream = Some(stream.try_clone_to_owned()?);
        Ok(())
    }

    fn save(&mut self) -> Option<Vec<u8>> {
        Some(self.requests.to_le_bytes().to_vec())
    }

    fn on_disconnected(&mut self) {
        self.stream = None;
    }
}

/// An event loop that handles every event, whether the event occurred or not.
struct NullWatcher;

impl SocketWatcher for NullWatcher {
    fn add(&mut self, _: RawFd, _: u32, _: EventSet) -> io::Result<()> {
        Ok(())
    }

    fn modify(&mut self, _: RawFd, _: u32, _: EventSet) -> io::Result<()> {
        Ok(())
    }

    fn remove(&mut self, _: RawFd) -> io::Result<()> {
        Ok(())
    }
}

/// A client that never blocks.
struct Client {
    stream: UnixStream,
    messages: u16,
}

impl Client {
    fn connect() -> Self {
        let stream = UnixStream::connect(socket()).expect("a server listens");
        stream.set_nonblocking(true).expect("non-blocking");
        Self {
            stream,
            messages: 0,
        }
    }

    /// Sends as many messages as the socket accepts.
    fn send_messages(&mut self, mut input: Input<'_>) {
        while !input.is_empty() {
            let (command, options) = (input.byte(), input.byte());
            let length = input.number().into();
            let payload = input.piece(length);
            self.message(command, options, payload);
        }
    }

    fn message(&mut self, command: u8, options: u8, payload: &[u8]) {
        let mut message = self.messages.to_le_bytes().to_vec();
        message.extend([command, 0]);
        // With bit 7 of the options, the size is wrong by one, which must end the connection.
        let size = 16 + payload.len() as u32 - u32::from(options >> 7);
        message.extend(size.to_le_bytes());
        // Bits 0 and 1 are the type (0 is a command), bit 2 is No_reply, and bit 3 is Error.
        message.extend([options & 3 | (options & 0xC) << 2, 0, 0, 0, 0, 0, 0, 0]);
        message.extend_from_slice(payload);
        // Fails if the socket is full, or if the server has ended.
        let _ = self.stream.write(&message);
        self.messages = self.messages.wrapping_add(1);
    }

    fn drain_replies(&mut self) {
        let mut buffer = [0; 64 * 1024];
        while let Ok(1..) = self.stream.read(&mut buffer) {}
    }
}

/// Changes the log's file.
fn corrupt_log(request_log: &File, choices: u8, input: &mut Input<'_>) {
    let mut generation = [0; 8];
    request_log
        .read_exact_at(&mut generation, COMMIT_WORD)
        .expect("memory");
    let head = HEADS + u64::from_le_bytes(generation) % 2 * HEADS;
    for _ in 0..input.byte() {
        let word = input.byte() % WORDS;
        let value = input.piece(4);
        let at = match word.checked_sub(TITLE_WORDS) {
            None => u64::from(word) * 4,
            Some(word) => head + u64::from(word) * 4,
        };
        request_log.write_all_at(value, at).expect("memory");
    }
    let length = input.byte();
    let reply = input.piece(length.into());
    let mut open = request_log;
    let position = open.stream_position().expect("a file");
    request_log.write_all_at(reply, position).expect("memory");
    if choices & 32 != 0 {
        let [low, high] = [input.number(), input.number()].map(i32::from);
        let by = i64::from(high << 16 | low);
        // Fails if the position would become negative.
        let _ = open.seek(SeekFrom::Current(by));
    }
}

fn run_session(choices: u8, mut input: Input<'_>) {
    let is_chosen = |bit: u8| choices & 1 << bit != 0;
    let model = Model::new(is_chosen(2));
    let request_log = RequestLog::new().expect("memory");
    let file = request_log
        .as_fd()
        .try_clone_to_owned()
        .expect("a descriptor");
    let mut server =
        VfioUserServer::bind_with_log(socket(), SocketAccess::default(), model, request_log)
            .expect("a server");
    let listener = server.listener().as_fd().try_clone_to_owned();
    let listener = listener.expect("a descriptor");

    let mut changes = Input(input.0);
    skip(&mut input, choices);
    let mut client = Client::connect();
    server.handle_event(LISTENER, &mut NullWatcher);
    if is_chosen(0) {
        client.message(1, 0, b"\0\0\x01\0");
    }
    let length = input.number().into();
    client.send_messages(Input(input.piece(length)));
    server.handle_event(CLIENT, &mut NullWatcher);
    if is_chosen(1) {
        client.drain_replies();
        server.handle_event(CLIENT, &mut NullWatcher);
    }
    let stream = server.device_mut().stream.take();
    server.release();
    drop(server);

    let shared = File::from(file.try_clone().expect("a descriptor"));
    corrupt_log(&shared, choices, &mut changes);
    drop(shared);
    let mut client = Some(client).filter(|_| !is_chosen(3));
    let stream = stream.filter(|_| !is_chosen(4)).map(UnixStream::from);
    let Ok((request_log, record)) = RequestLog::from_predecessor(file) else {
        return;
    };
    let requests = record
        .device_state()
        .try_into()
        .map_or(0, u32::from_le_bytes);
    let mut model = Model::new(is_chosen(2));
    model.requests = requests;
    model.stream = stream
        .as_ref()
        .map(|stream| stream.as_fd().try_clone_to_owned().expect("a descriptor"));
    let listener = SocketListener::from_predecessor(&socket(), listener).expect("it listens");
    let Ok(mut server) = VfioUserServer::resume(listener, request_log, stream, model) else {
        return;
    };
    server.watch(&mut NullWatcher).expect("anything is watched");
    let other = is_chosen(6).then(Client::connect);
    server.handle_event(LISTENER, &mut NullWatcher);
    server.handle_event(CLIENT, &mut NullWatcher);
    if let Some(client) = &mut client {
        client.send_messages(input);
        for _ in 0..EVENTS {
            server.handle_event(CLIENT, &mut NullWatcher);
            client.drain_replies();
        }
    }
    drop((client, other));
    for _ in 0..EVENTS {
        server.handle_event(CLIENT, &mut NullWatcher);
    }
    assert!(!server.is_connected(), "a client that is gone");
    server.commit().expect("a journal");
}

/// Skips the changes of the log in the input. The client's messages follow them.
fn skip(input: &mut Input<'_>, choices: u8) {
    let changes = usize::from(input.byte());
    input.piece(changes * 5);
    let reply = input.byte();
    input.piece(reply.into());
    if choices & 32 != 0 {
        input.piece(4);
    }
}

/// Runs one input.
pub fn run(input: &[u8]) {
    let mut input = Input(input);
    let choices = input.byte();
    LazyLock::force(&FOLDER);
    LazyLock::force(&AREA);
    let before = *OPEN_FILES;
    run_session(choices, input);
    let _ = fs::remove_file(socket());
    assert_eq!(open_files(), before, "a file descriptor is left open");
}
