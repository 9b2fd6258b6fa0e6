//! Test support: a device that records calls, and a client that sends any message.

use std::io::{self, Read};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent};
use vmm_sys_util::sock_ctrl_msg::ScmSocket;
use zerocopy::{FromBytes, IntoBytes};

use crate::device::{
    DeviceRegion, DmaRegion, IrqCommand, IrqIndex, IrqInfo, MappableArea, RegionIndex,
    VfioUserDevice,
};
use crate::message::{VfioUserCommand, VfioUserHeader};
use crate::session::{SessionReadiness, VfioUserSession};
use crate::socket;

pub(crate) const BAR0_SIZE: u64 = 0x4000;
pub(crate) const CONFIG_SIZE: u64 = 0x1000;
pub(crate) const MSIX_VECTORS: u32 = 128;

/// Device that records its calls.
#[derive(Debug)]
pub(crate) struct RecordingDevice {
    pub(crate) bar0: Vec<u8>,
    pub(crate) memory: Option<Arc<OwnedFd>>,
    pub(crate) maps: Vec<DmaRegion>,
    pub(crate) irqs: Vec<IrqCommand>,
    pub(crate) accesses: Vec<(RegionIndex, u64, usize)>,
    pub(crate) resets: u32,
    pub(crate) disconnects: u32,
    /// Errno that the next fallible call returns.
    pub(crate) next_errno: Option<i32>,
}

impl RecordingDevice {
    pub(crate) fn new() -> Self {
        Self {
            bar0: (0..BAR0_SIZE).map(|byte| byte as u8).collect(),
            memory: None,
            maps: Vec::new(),
            irqs: Vec::new(),
            accesses: Vec::new(),
            resets: 0,
            disconnects: 0,
            next_errno: None,
        }
    }

    /// Creates a device with a mappable area. The file of the area is never accessed.
    pub(crate) fn mappable() -> Self {
        let file = std::fs::File::open("/dev/null").unwrap();
        Self {
            memory: Some(Arc::new(file.into())),
            ..Self::new()
        }
    }

    fn result(&mut self) -> io::Result<()> {
        match self.next_errno.take() {
            Some(errno) => Err(io::Error::from_raw_os_error(errno)),
            None => Ok(()),
        }
    }
}

impl VfioUserDevice for RecordingDevice {
    fn region(&self, index: RegionIndex) -> DeviceRegion {
        let (size, mappable) = match index {
            RegionIndex::Bar0 => (BAR0_SIZE, self.memory.clone()),
            RegionIndex::Config => (CONFIG_SIZE, None),
            _ => (0, None),
        };
        DeviceRegion {
            size,
            readable: size > 0,
            writable: size > 0,
            mappable: mappable.map(|memory| MappableArea {
                offset: 0x1000,
                size: 0x2000,
                memory,
                base: 0x10000,
            }),
        }
    }

    fn read(&mut self, region: RegionIndex, offset: u64, data: &mut [u8]) {
        self.accesses.push((region, offset, data.len()));
        assert!(data.iter().all(|&byte| byte == 0xff));
        if region == RegionIndex::Bar0 {
            data.copy_from_slice(&self.bar0[offset as usize..][..data.len()]);
        }
    }

    fn write(&mut self, region: RegionIndex, offset: u64, data: &[u8]) {
        self.accesses.push((region, offset, data.len()));
        if region == RegionIndex::Bar0 {
            self.bar0[offset as usize..][..data.len()].copy_from_slice(data);
        }
    }

    fn dma_map(&mut self, region: DmaRegion) -> io::Result<()> {
        self.result()?;
        self.maps.push(region);
        Ok(())
    }

    fn dma_unmap(&mut self, range: Option<(u64, u64)>) -> io::Result<u64> {
        self.result()?;
        let before: u64 = self.maps.iter().map(|map| map.size).sum();
        self.maps.retain(|map| match range {
            Some((address, size)) => (map.iova, map.size) != (address, size),
            None => false,
        });
        Ok(before - self.maps.iter().map(|map| map.size).sum::<u64>())
    }

    fn irq(&self, index: IrqIndex) -> IrqInfo {
        IrqInfo {
            count: match index {
                IrqIndex::Msix => MSIX_VECTORS,
                IrqIndex::Err | IrqIndex::Req => 1,
                _ => 0,
            },
            ..IrqInfo::default()
        }
    }

    fn set_irqs(&mut self, command: IrqCommand) -> io::Result<()> {
        self.result()?;
        self.irqs.push(command);
        Ok(())
    }

    fn reset(&mut self) {
        self.resets += 1;
    }

    fn on_disconnected(&mut self) {
        self.disconnects += 1;
        self.maps.clear();
        self.irqs.clear();
    }
}

/// Reply as the client received it.
#[derive(Debug)]
pub(crate) struct ReceivedReply {
    pub(crate) header: VfioUserHeader,
    pub(crate) payload: Vec<u8>,
    pub(crate) fds: Vec<OwnedFd>,
}

impl ReceivedReply {
    /// Returns the errno; 0 for success. Checks the rules that the protocol sets for all replies.
    pub(crate) fn errno(&self) -> u32 {
        let flags = self.header.flags.get();
        if flags & VfioUserHeader::ERROR != 0 {
            assert_eq!(flags, VfioUserHeader::TYPE_REPLY | VfioUserHeader::ERROR);
            assert_eq!(self.payload.len(), 0, "an error reply is a header");
            assert_ne!(self.header.error.get(), 0);
            assert!(self.fds.is_empty());
        } else {
            assert_eq!(flags, VfioUserHeader::TYPE_REPLY);
            assert_eq!(self.header.error.get(), 0);
        }
        self.header.error.get()
    }

    pub(crate) fn read<T: FromBytes>(&self) -> T {
        assert_eq!(self.errno(), 0);
        T::read_from_prefix(&self.payload).unwrap().0
    }
}

/// Client whose server runs on the same thread.
pub(crate) struct SessionFixture {
    pub(crate) client: UnixStream,
    pub(crate) session: VfioUserSession,
    pub(crate) device: RecordingDevice,
    next_id: u16,
}

impl SessionFixture {
    /// Creates a connection on which the client has not sent `VERSION`.
    pub(crate) fn begin(device: RecordingDevice) -> Self {
        let (client, server) = UnixStream::pair().unwrap();
        server.set_nonblocking(true).unwrap();
        client.set_nonblocking(true).unwrap();
        Self {
            client,
            session: VfioUserSession::new(server, &device).unwrap(),
            device,
            next_id: 0x1234,
        }
    }

    /// Creates a connection on which `VERSION` was negotiated.
    pub(crate) fn begin_negotiated(device: RecordingDevice) -> Self {
        let mut this = Self::begin(device);
        assert_eq!(
            this.request(VfioUserCommand::VERSION, &[0, 0, 1, 0])
                .errno(),
            0
        );
        this
    }

    pub(crate) fn run(&mut self) -> SessionReadiness {
        self.session.run(&mut self.device)
    }

    pub(crate) fn message(&mut self, command: VfioUserCommand, payload: &[u8]) -> Vec<u8> {
        self.next_id = self.next_id.wrapping_add(1);
        message(self.next_id, command, 0, payload)
    }

    /// Sends a command, and returns the reply.
    pub(crate) fn request(&mut self, command: VfioUserCommand, payload: &[u8]) -> ReceivedReply {
        self.request_with_fds(command, payload, &[])
    }

    pub(crate) fn request_with_fds(
        &mut self,
        command: VfioUserCommand,
        payload: &[u8],
        fds: &[RawFd],
    ) -> ReceivedReply {
        let message = self.message(command, payload);
        let sent = self.client.send_with_fds(&[&message[..]], fds).unwrap();
        assert_eq!(sent, message.len());
        self.run();
        let reply = self.receive_reply().expect("a reply");
        assert_eq!(reply.header.message_id.get(), self.next_id);
        assert_eq!(reply.header.command(), command);
        reply
    }

    /// Returns the next reply, if there is one. Header and payload must each arrive in one piece, and file descriptors with the
    /// header.
    pub(crate) fn receive_reply(&mut self) -> Option<ReceivedReply> {
        let mut header = VfioUserHeader::default();
        let mut fds = Vec::new();
        match socket::receive(&self.client, header.as_mut_bytes(), &mut fds) {
            Ok(received) if received.bytes == 0 => return None,
            Ok(received) => assert_eq!(received.bytes, VfioUserHeader::SIZE),
            Err(error) => {
                assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
                return None;
            }
        }
        let mut payload = vec![0; header.message_size.get() as usize - VfioUserHeader::SIZE];
        if !payload.is_empty() {
            let read = (&self.client).read(&mut payload).unwrap();
            assert_eq!(read, payload.len());
        }
        Some(ReceivedReply {
            header,
            payload,
            fds,
        })
    }

    /// Returns whether the client sees the end of the stream.
    pub(crate) fn closes_for_client(self) -> bool {
        let Self {
            session, client, ..
        } = self;
        drop(session);
        matches!((&client).read(&mut [0; 1]), Ok(0))
    }
}

pub(crate) fn message(id: u16, command: VfioUserCommand, flags: u32, payload: &[u8]) -> Vec<u8> {
    let header = VfioUserHeader {
        message_id: id.into(),
        command: command.0.into(),
        message_size: ((VfioUserHeader::SIZE + payload.len()) as u32).into(),
        flags: flags.into(),
        error: 0.into(),
    };
    [header.as_bytes(), payload].concat()
}

/// Reading end of a pipe, which shows whether any copy of the writing end is open.
pub(crate) struct DescriptorTracer(io::PipeReader);

impl DescriptorTracer {
    pub(crate) fn new() -> (Self, OwnedFd) {
        let (reader, writer) = io::pipe().unwrap();
        (Self(reader), writer.into())
    }

    pub(crate) fn is_closed(&self) -> bool {
        let epoll = Epoll::new().unwrap();
        let mut event = [EpollEvent::default()];
        let fd = self.0.as_raw_fd();
        epoll.ctl(ControlOperation::Add, fd, event[0]).unwrap();
        epoll.wait(0, &mut event).unwrap() == 1
    }
}
