//! A vfio-user client that sends arbitrary bytes in arbitrary pieces, with arbitrary file descriptors.
//!
//! The first byte of the input chooses how the remaining bytes are sent:
//!
//! | bit | |
//! |---|---|
//! | 0 | a valid `VERSION` comes first |
//! | 1 | framed: messages with valid sizes, from (command, options, length in 2 bytes, payload); if 0, a byte stream |
//! | 2 | every piece has file descriptors; framed: bits 4 to 7 of the options are their number |
//! | 3 | the device has a mappable area |
//! | 4-7 | size of the pieces |
//!
//! The session must neither panic nor block, every reply must be valid, and no file descriptor may stay open.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, LazyLock};

use vfio_user_server::{
    DeviceRegion, DmaRegion, IrqCommand, IrqData, IrqIndex, IrqInfo, MappableArea, RegionIndex,
    SessionReadiness, VfioUserDevice, VfioUserSession,
};
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

const HEADER: usize = 16;
const BAR0_SIZE: u64 = 0x4000;
const MAX_MAPS: usize = 8;
const PIECES: [usize; 16] = [
    usize::MAX,
    1,
    2,
    3,
    7,
    15,
    16,
    17,
    20,
    31,
    32,
    33,
    64,
    100,
    1000,
    70_000,
];

/// File whose descriptor is sent. It is opened once.
static NULL: LazyLock<File> = LazyLock::new(|| File::open("/dev/null").expect("a null device"));

/// Number of open files of this process before the first session.
static OPEN_FILES: LazyLock<usize> = LazyLock::new(open_files);

/// A device that stores the requests that it gets, and checks the server's guarantees.
struct Model {
    area: Option<Arc<OwnedFd>>,
    maps: Vec<DmaRegion>,
    vectors: Vec<OwnedFd>,
}

impl Model {
    fn check(index: RegionIndex, offset: u64, count: usize) {
        let size = match index {
            RegionIndex::Bar0 => BAR0_SIZE,
            RegionIndex::Config => 0x100,
            other => panic!("{other:?} does not exist"),
        };
        assert!(offset.checked_add(count as u64).expect("no overflow") <= size);
    }
}

impl VfioUserDevice for Model {
    fn region(&self, index: RegionIndex) -> DeviceRegion {
        let (size, area) = match index {
            RegionIndex::Bar0 => (BAR0_SIZE, self.area.clone()),
            RegionIndex::Config => (0x100, None),
            _ => (0, None),
        };
        DeviceRegion {
            size,
            readable: true,
            writable: true,
            mappable: area.map(|memory| MappableArea {
                offset: 0x1000,
                size: 0x1000,
                memory,
                base: 0,
            }),
        }
    }

    fn read(&mut self, region: RegionIndex, offset: u64, data: &mut [u8]) {
        Self::check(region, offset, data.len());
        data.fill(0x11);
    }

    fn write(&mut self, region: RegionIndex, offset: u64, data: &[u8]) {
        Self::check(region, offset, data.len());
    }

    fn dma_map(&mut self, region: DmaRegion) -> io::Result<()> {
        assert!(region.size > 0);
        region.iova.checked_add(region.size - 1).expect("an end");
        if let Some(memory) = &region.memory {
            memory.offset.checked_add(region.size - 1).expect("an end");
        }
        if self.maps.len() == MAX_MAPS {
            return Err(io::Error::from(io::ErrorKind::StorageFull));
        }
        self.maps.push(region);
        Ok(())
    }

    fn dma_unmap(&mut self, range: Option<(u64, u64)>) -> io::Result<u64> {
        let Some((address, size)) = range else {
            self.maps.clear();
            return Ok(1);
        };
        let last = address.checked_add(size.checked_sub(1).expect("a size"));
        last.expect("an end");
        let before = self.maps.len();
        self.maps.retain(|map| map.iova != address);
        match before - self.maps.len() {
            0 => Err(io::Error::other("nothing there")),
            _ => Ok(size),
        }
    }

    fn irq(&self, index: IrqIndex) -> IrqInfo {
        IrqInfo {
            count: if index == IrqIndex::Msix { 64 } else { 1 },
            maskable: index == IrqIndex::Intx,
            ..IrqInfo::default()
        }
    }

    fn set_irqs(&mut self, command: IrqCommand) -> io::Result<()> {
        let available = self.irq(command.index).count;
        assert!(command.start.checked_add(command.count).expect("an end") <= available);
        match command.data {
            IrqData::Connect(fds) => {
                assert_eq!(fds.len(), command.count as usize);
                self.vectors = fds;
            }
            IrqData::Bools(which) => assert_eq!(which.len(), command.count as usize),
            IrqData::Disconnect => self.vectors.clear(),
            IrqData::None => {}
        }
        Ok(())
    }

    fn reset(&mut self) {}

    fn on_disconnected(&mut self) {
        self.maps.clear();
        self.vectors.clear();
    }
}

/// The client's end of the connection, which reads and checks all replies.
struct Client {
    stream: UnixStream,
    /// Bytes of incomplete replies.
    received: Vec<u8>,
    replies: usize,
}

impl Client {
    fn read_replies(&mut self) {
        let mut buffer = [0; 16 * 1024];
        while let Ok(bytes @ 1..) = self.stream.read(&mut buffer) {
            self.received.extend_from_slice(&buffer[..bytes]);
        }
        while let Some(size) = self.received.get(4..8) {
            let size = u32::from_le_bytes(size.try_into().expect("4 bytes")) as usize;
            assert!((HEADER..=HEADER + 16 + 1024 * 1024).contains(&size));
            if self.received.len() < size {
                break;
            }
            let reply: Vec<u8> = self.received.drain(..size).collect();
            match reply[8..12] {
                [0x01, 0, 0, 0] => assert_eq!(reply[12..16], [0; 4]),
                [0x21, 0, 0, 0] => {
                    assert_eq!(size, HEADER);
                    assert_ne!(reply[12..16], [0; 4]);
                }
                ref flags => panic!("flags {flags:x?}"),
            }
            self.replies += 1;
        }
    }
}

fn message(id: u16, command: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
    let mut message = Vec::with_capacity(HEADER + payload.len());
    message.extend(id.to_le_bytes());
    message.extend([command, 0]);
    message.extend(((HEADER + payload.len()) as u32).to_le_bytes());
    message.extend([flags, 0, 0, 0, 0, 0, 0, 0]);
    message.extend_from_slice(payload);
    message
}

/// Returns the byte strings to send, each with its number of file descriptors.
fn script(mode: u8, mut data: &[u8]) -> Vec<(Vec<u8>, usize)> {
    let some = usize::from(mode & 4 != 0);
    let mut script = Vec::new();
    if mode & 1 != 0 {
        script.push((message(0, 1, 0, b"\0\0\x01\0"), 0));
    }
    if mode & 2 == 0 {
        script.push((
            data.to_vec(),
            some * data.first().map_or(0, |&byte| byte.into()),
        ));
        return script;
    }
    while let [command, options, low, high, rest @ ..] = data {
        let length = usize::from(u16::from_le_bytes([*low, *high])).min(rest.len());
        let (payload, rest) = rest.split_at(length);
        // Bits 0 and 1 are the type (0 is a command), bit 2 is No_reply, and bit 3 is Error.
        let flags = options & 3 | (options & 0xc) << 2;
        let fds = some * usize::from(options >> 4);
        let message = message(script.len() as u16, *command, flags, payload);
        script.push((message, fds));
        data = rest;
    }
    script
}

fn open_files() -> usize {
    fs::read_dir("/proc/self/fd").expect("proc").count()
}

fn run_session(mode: u8, data: &[u8]) {
    let (stream, server) = UnixStream::pair().expect("a socket pair");
    stream.set_nonblocking(true).expect("non-blocking");
    server.set_nonblocking(true).expect("non-blocking");
    let mut device = Model {
        area: (mode & 8 != 0).then(|| Arc::new(NULL.try_clone().expect("a file").into())),
        maps: Vec::new(),
        vectors: Vec::new(),
    };
    let mut session = VfioUserSession::new(server, &device).expect("good regions");
    let mut client = Client {
        stream,
        received: Vec::new(),
        replies: 0,
    };

    let fds: Vec<RawFd> = vec![NULL.as_raw_fd(); 253];
    let mut sent = 0;
    for (bytes, fd_count) in script(mode, data) {
        let size = PIECES[usize::from(mode >> 4)].min(bytes.len().max(1));
        for piece in bytes.chunks(size) {
            let mut rest = piece;
            // The socket's buffer is limited, so the data is sent in several steps, between which the server reads.
            for attempt in 0.. {
                assert!(attempt < 1000, "the server does not read");
                let fds = &fds[..fd_count.min(fds.len())];
                match client
                    .stream
                    .send_with_fds(&[rest], fds)
                    .map_err(io::Error::from)
                {
                    Ok(taken) => rest = &rest[taken..],
                    Err(full) => assert_eq!(full.kind(), io::ErrorKind::WouldBlock),
                }
                loop {
                    let progress = session.run(&mut device);
                    client.read_replies();
                    match progress {
                        SessionReadiness::Reading => break,
                        SessionReadiness::Writing => {}
                        SessionReadiness::Ended => return device.on_disconnected(),
                    }
                }
                if rest.is_empty() {
                    break;
                }
            }
            sent += piece.len();
        }
    }
    // Each turn of the session answers some messages, and later turns answer the remaining ones.
    for _ in 0..=sent / HEADER {
        session.run(&mut device);
        client.read_replies();
    }
    assert!(client.received.is_empty(), "a reply is cut short");
    assert!(client.replies <= sent / HEADER, "a reply too many");
}

/// Runs one input.
pub fn run(data: &[u8]) {
    let Some((&mode, data)) = data.split_first() else {
        return;
    };
    LazyLock::force(&NULL);
    let before = *OPEN_FILES;
    run_session(mode, data);
    assert_eq!(open_files(), before, "a file descriptor is left open");
}
