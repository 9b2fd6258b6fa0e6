//! A server whose process is killed at every step, while its client must notice nothing.

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use proptest::prelude::*;
use tempfile::TempDir;
use vmm_sys_util::epoll::{Epoll, EpollEvent};
use vmm_sys_util::sock_ctrl_msg::ScmSocket;
use zerocopy::IntoBytes;

use crate::kill_point::kill_at;
use crate::message::{
    DmaMap, MAX_CONTROL_PAYLOAD, MAX_DATA_XFER_SIZE, RegionInfo, VfioUserCommand, VfioUserHeader,
};
use crate::testing::{DescriptorTracer, message};
use crate::{
    ClientProcess, DeviceRegion, DmaRegion, Error, IrqCommand, IrqData, IrqIndex, IrqInfo,
    MappableArea, RegionIndex, RequestLog, RequestLogError, SocketAccess, SocketListener,
    VfioUserDevice, VfioUserServer, socket,
};

/// Descriptors of a server that the test holds, as a supervisor does, so that they outlive the server's process.
#[derive(Debug, Default)]
struct SurvivingDescriptors {
    listener: Option<OwnedFd>,
    request_log: Option<OwnedFd>,
    client: Option<OwnedFd>,
    /// `SO_SNDBUF` of clients that connect.
    send_buffer: Option<usize>,
    refuses: bool,
}

fn copy(fd: &Option<OwnedFd>) -> OwnedFd {
    fd.as_ref().unwrap().try_clone().unwrap()
}

/// A device whose state is the text of all its requests, including reads.
#[derive(Debug)]
struct Ledger {
    entries: Vec<u8>,
    saved: Option<usize>,
    supervisor: Arc<Mutex<SurvivingDescriptors>>,
    memory: Arc<OwnedFd>,
}

/// Returns the saved form of the state. Appending an entry moves every byte, so a partly written state is noticed.
fn reversed(bytes: &[u8]) -> Vec<u8> {
    bytes.iter().rev().copied().collect()
}

impl Ledger {
    fn new(saved: &[u8], supervisor: &Arc<Mutex<SurvivingDescriptors>>) -> Self {
        Self {
            entries: reversed(saved),
            saved: None,
            supervisor: supervisor.clone(),
            memory: Arc::new(File::open("/dev/null").unwrap().into()),
        }
    }

    fn append(&mut self, what: &[u8]) {
        self.entries.extend_from_slice(what);
        self.entries.push(b';');
    }
}

impl VfioUserDevice for Ledger {
    fn region(&self, index: RegionIndex) -> DeviceRegion {
        let mappable = (index == RegionIndex::Bar2).then(|| MappableArea {
            offset: 0,
            size: 0x1000,
            memory: self.memory.clone(),
            base: 0,
        });
        DeviceRegion {
            size: 4 << 20,
            readable: true,
            writable: true,
            mappable,
        }
    }

    /// Returns data that differs from the data of every other read.
    fn read(&mut self, _: RegionIndex, _: u64, data: &mut [u8]) {
        let seed = self.entries.len() * 31;
        for (at, byte) in data.iter_mut().enumerate() {
            *byte = (seed + at + at / 251) as u8;
        }
        self.append(format!("read {}", data.len()).as_bytes());
    }

    fn write(&mut self, _: RegionIndex, _: u64, data: &[u8]) {
        let sum: u64 = data.iter().map(|&byte| u64::from(byte)).sum();
        self.append(format!("write {} {sum}", data.len()).as_bytes());
    }

    fn dma_map(&mut self, region: DmaRegion) -> io::Result<()> {
        let shared = region.memory.is_some();
        self.append(format!("map {:#x} {shared}", region.iova).as_bytes());
        Ok(())
    }

    fn dma_unmap(&mut self, _: Option<(u64, u64)>) -> io::Result<u64> {
        Ok(0)
    }

    fn irq(&self, _: IrqIndex) -> IrqInfo {
        IrqInfo {
            count: 64,
            ..IrqInfo::default()
        }
    }

    fn set_irqs(&mut self, command: IrqCommand) -> io::Result<()> {
        let IrqData::Connect(fds) = command.data else {
            return Err(io::ErrorKind::Unsupported.into());
        };
        self.append(format!("connect {}", fds.len()).as_bytes());
        Ok(())
    }

    fn reset(&mut self) {
        self.append(b"reset");
    }

    fn on_connected(&mut self, _: Option<ClientProcess>) {
        self.append(b"connected");
    }

    fn persist_client(&mut self, stream: BorrowedFd<'_>) -> io::Result<()> {
        let mut supervisor = self.supervisor.lock().unwrap();
        if supervisor.refuses {
            return Err(io::ErrorKind::QuotaExceeded.into());
        }
        if let Some(size) = supervisor.send_buffer {
            rustix::net::sockopt::set_socket_send_buffer_size(stream, size)?;
        }
        supervisor.client = Some(stream.try_clone_to_owned()?);
        Ok(())
    }

    fn save(&mut self) -> Option<Vec<u8>> {
        let changed = self.saved.replace(self.entries.len()) != Some(self.entries.len());
        changed.then(|| reversed(&self.entries))
    }

    fn on_disconnected(&mut self) {
        self.append(b"disconnected");
        self.supervisor.lock().unwrap().client = None;
    }
}

/// Consecutive server processes, whose descriptors outlive each of them.
struct ServerProcesses {
    path: PathBuf,
    supervisor: Arc<Mutex<SurvivingDescriptors>>,
    process: Option<(VfioUserServer<Ledger>, Epoll)>,
    /// Steps at which the next server processes are killed, one entry for each process.
    kills: Vec<u32>,
    deaths: usize,
    _directory: TempDir,
}

impl ServerProcesses {
    fn new() -> Self {
        let directory = TempDir::new().unwrap();
        let path = directory.path().join("kept.sock");
        let supervisor = Arc::new(Mutex::new(SurvivingDescriptors::default()));
        let device = Ledger::new(b"", &supervisor);
        let request_log = RequestLog::new().unwrap();
        let server =
            VfioUserServer::bind_with_log(&path, SocketAccess::default(), device, request_log)
                .unwrap();
        {
            let mut supervisor = supervisor.lock().unwrap();
            let listener = server.listener().as_fd().try_clone_to_owned();
            supervisor.listener = Some(listener.unwrap());
            let request_log = server.request_log().unwrap().as_fd().try_clone_to_owned();
            supervisor.request_log = Some(request_log.unwrap());
        }
        let epoll = Epoll::new().unwrap();
        server.watch(&mut &epoll).unwrap();
        Self {
            path,
            supervisor,
            process: Some((server, epoll)),
            kills: Vec::new(),
            deaths: 0,
            _directory: directory,
        }
    }

    fn connect(&self) -> UnixStream {
        let client = UnixStream::connect(&self.path).unwrap();
        client.set_nonblocking(true).unwrap();
        client
    }

    fn resume(&self) -> Result<(VfioUserServer<Ledger>, Epoll), Error> {
        let (listener, request_log, client) = {
            let supervisor = self.supervisor.lock().unwrap();
            let client = supervisor.client.as_ref().map(|fd| fd.try_clone().unwrap());
            (
                copy(&supervisor.listener),
                copy(&supervisor.request_log),
                client,
            )
        };
        let (request_log, record) = RequestLog::from_predecessor(request_log)?;
        let device = Ledger::new(record.device_state(), &self.supervisor);
        let listener = SocketListener::from_predecessor(&self.path, listener)?;
        let server =
            VfioUserServer::resume(listener, request_log, client.map(UnixStream::from), device)?;
        let epoll = Epoll::new().unwrap();
        server.watch(&mut &epoll).unwrap();
        Ok((server, epoll))
    }

    fn kill(&mut self) {
        if let Some((mut server, _)) = self.process.take() {
            server.release();
        }
        self.deaths += 1;
    }

    /// Starts a process if there is none, and runs the server until it is idle. If the process is killed, returns before the
    /// next process starts.
    fn run_until_killed(&mut self) -> bool {
        let step = self.kills.first().copied().unwrap_or(u32::MAX);
        let mut process = self.process.take();
        let left = kill_at(step, || {
            if process.is_none() {
                process = Some(self.resume().unwrap());
            }
            let (server, epoll) = process.as_mut().unwrap();
            let mut events = [EpollEvent::default(); 4];
            loop {
                let ready = epoll.wait(0, &mut events).unwrap();
                if ready == 0 {
                    break;
                }
                for event in &events[..ready] {
                    server.handle_event(event.data() as u32, &mut &*epoll);
                }
            }
        });
        self.process = process;
        match left {
            Some(left) => {
                if let Some(step) = self.kills.first_mut() {
                    *step = left;
                }
            }
            None => {
                self.kills.remove(0);
                self.kill();
            }
        }
        left.is_none()
    }

    fn run(&mut self) {
        while self.run_until_killed() {}
    }

    /// Returns whether the request log has memory allocated for a reply.
    fn has_reply(&self) -> bool {
        let file = copy(&self.supervisor.lock().unwrap().request_log);
        // The file is reopened, to get a separate file position.
        let file = File::open(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap();
        let replies = rustix::fs::SeekFrom::Data(34 << 20);
        match rustix::fs::seek(&file, replies) {
            Ok(_) => true,
            Err(error) => {
                assert_eq!(error, rustix::io::Errno::NXIO);
                false
            }
        }
    }

    fn entries(&self) -> String {
        let file = copy(&self.supervisor.lock().unwrap().request_log);
        let (_, record) = RequestLog::from_predecessor(file).unwrap();
        String::from_utf8(reversed(record.device_state())).unwrap()
    }
}

/// Replies that a client has received, and the number of descriptors that came with them.
#[derive(Debug, Default, PartialEq)]
struct ReceivedReplies {
    bytes: Vec<u8>,
    fds: usize,
    closed: bool,
}

impl ReceivedReplies {
    fn receive(&mut self, client: &UnixStream) {
        let mut buffer = vec![0; 1 << 20];
        loop {
            let mut fds = Vec::new();
            match socket::receive(client, &mut buffer, &mut fds) {
                Ok(received) if received.bytes == 0 => {
                    self.closed = true;
                    return;
                }
                Ok(received) => {
                    self.fds += fds.len();
                    self.bytes.extend_from_slice(&buffer[..received.bytes]);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) => {
                    assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
                    self.closed = true;
                    return;
                }
            }
        }
    }

    fn ids(&self) -> Vec<u16> {
        let (mut ids, mut rest) = (Vec::new(), &self.bytes[..]);
        while !rest.is_empty() {
            ids.push(u16::from_le_bytes([rest[0], rest[1]]));
            let size = u32::from_le_bytes(rest[4..8].try_into().unwrap());
            rest = &rest[size as usize..];
        }
        ids
    }
}

/// A step of the client.
#[derive(Clone, Debug)]
enum ClientStep {
    /// Sends bytes by one call, with copies of a descriptor.
    Send(Vec<u8>, usize),
    /// Lets the server run, and reads its replies.
    Receive,
    /// Lets the server run, and reads nothing.
    Wait,
    /// Lets the server commit a change of the device's state that no request has caused.
    Change,
    Close,
    Connect,
}
use ClientStep::*;

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn version(id: u16) -> ClientStep {
    Send(
        message(
            id,
            VfioUserCommand::VERSION,
            0,
            b"\0\0\x01\0{\"capabilities\":{}}\0",
        ),
        0,
    )
}

fn read(id: u16, count: u32) -> ClientStep {
    let payload = words(&[0, 0, 0, count]);
    Send(message(id, VfioUserCommand::REGION_READ, 0, &payload), 0)
}

fn write(id: u16, flags: u32, data: &[u8]) -> ClientStep {
    let payload = [&words(&[0, 0, 0, data.len() as u32]), data].concat();
    Send(
        message(id, VfioUserCommand::REGION_WRITE, flags, &payload),
        0,
    )
}

fn connect_irqs(id: u16, fds: u32) -> ClientStep {
    let payload = words(&[20, 0x24, 2, 0, fds]);
    let message = message(id, VfioUserCommand::DEVICE_SET_IRQS, 0, &payload);
    Send(message, fds as usize)
}

fn map(id: u16) -> ClientStep {
    let map = DmaMap {
        argsz: 32.into(),
        flags: (DmaMap::READ | DmaMap::WRITE).into(),
        offset: 0.into(),
        address: (u64::from(id) << 20).into(),
        size: 0x1000.into(),
    };
    Send(message(id, VfioUserCommand::DMA_MAP, 0, map.as_bytes()), 1)
}

/// Requests information about the mappable region, whose reply carries a descriptor.
fn region_info(id: u16) -> ClientStep {
    let info = RegionInfo {
        argsz: 4096.into(),
        index: (RegionIndex::Bar2 as u32).into(),
        ..RegionInfo::default()
    };
    let message = message(
        id,
        VfioUserCommand::DEVICE_GET_REGION_INFO,
        0,
        info.as_bytes(),
    );
    Send(message, 0)
}

fn reset(id: u16, flags: u32) -> ClientStep {
    Send(message(id, VfioUserCommand::DEVICE_RESET, flags, &[]), 0)
}

fn refused(id: u16) -> ClientStep {
    Send(message(id, VfioUserCommand(999), 0, &[1; 100]), 0)
}

fn every_kind() -> Vec<ClientStep> {
    vec![
        version(1),
        write(2, 0, &[7; 4]),
        read(3, 8),
        connect_irqs(4, 3),
        map(5),
        region_info(6),
        write(7, VfioUserHeader::NO_REPLY, &[9; 64]),
        refused(8),
        reset(9, 0),
        reset(10, VfioUserHeader::NO_REPLY),
        read(11, 5000),
    ]
}

/// Returns the steps `acts`, each followed by `after`.
fn interleave(acts: Vec<ClientStep>, after: ClientStep) -> Vec<ClientStep> {
    let each = acts.into_iter().flat_map(|act| [act, after.clone()]);
    each.collect()
}

/// Runs a client while the server's processes are killed at the steps `kills`. Returns the replies, the device's entries and
/// the number of killed processes.
fn run_client(
    acts: &[ClientStep],
    send_buffer: Option<usize>,
    kills: &[u32],
) -> (Vec<ReceivedReplies>, String, usize) {
    let mut world = ServerProcesses::new();
    world.supervisor.lock().unwrap().send_buffer = send_buffer;
    world.kills = kills.to_vec();
    let null = File::open("/dev/null").unwrap();
    let mut client = world.connect();
    let mut replies = vec![ReceivedReplies::default()];
    for act in acts {
        match act {
            Send(bytes, fds) => {
                let fds = vec![null.as_raw_fd(); *fds];
                match client.send_with_fds(&[&bytes[..]], &fds) {
                    Ok(sent) => assert_eq!(sent, bytes.len()),
                    Err(error) => assert_eq!(error.errno(), libc::EPIPE),
                }
            }
            Receive => loop {
                world.run();
                let before = replies.last().unwrap().bytes.len();
                replies.last_mut().unwrap().receive(&client);
                if replies.last().unwrap().bytes.len() == before {
                    break;
                }
            },
            Wait => world.run(),
            Change => {
                world.run();
                let (server, _) = world.process.as_mut().unwrap();
                server.device_mut().append(b"changed");
                server.commit().unwrap();
            }
            Close => {
                client.shutdown(Shutdown::Write).unwrap();
                world.run();
                replies.last_mut().unwrap().receive(&client);
            }
            Connect => {
                client = world.connect();
                replies.push(ReceivedReplies::default());
            }
        }
    }
    world.run();
    replies.last_mut().unwrap().receive(&client);
    let entries = world.entries();
    assert!(!world.has_reply(), "each has been sent");
    (replies, entries, world.deaths)
}

/// Runs the client's steps once for each step of the server, at which the server is killed. Returns the number of steps.
fn at_every_step(acts: &[ClientStep], send_buffer: Option<usize>) -> u32 {
    let (replies, entries, _) = run_client(acts, send_buffer, &[]);
    for step in 0.. {
        let (killed, done, deaths) = run_client(acts, send_buffer, &[step]);
        assert!(
            killed == replies,
            "killed at step {step}: heard {:?}, not {:?}",
            killed.iter().map(ReceivedReplies::ids).collect::<Vec<_>>(),
            replies.iter().map(ReceivedReplies::ids).collect::<Vec<_>>()
        );
        assert_eq!(done, entries, "killed at step {step}");
        if deaths == 0 {
            return step;
        }
    }
    unreachable!()
}

#[test]
fn each_request_is_done_and_answered_once() {
    let acts = interleave(every_kind(), Receive);
    let (replies, entries, _) = run_client(&acts, None, &[]);
    assert_eq!(replies[0].ids(), [1, 2, 3, 4, 5, 6, 8, 9, 11]);
    assert_eq!(replies[0].fds, 1);
    assert_eq!(
        entries,
        "connected;write 4 28;read 8;connect 3;map 0x500000 true;write 64 576;reset;reset;read 5000;"
    );
    assert!(at_every_step(&acts, None) > 100);
}

#[test]
fn each_pipelined_request_is_done_and_answered_once() {
    assert!(at_every_step(&every_kind(), None) > 100);
}

#[test]
fn requests_of_a_client_that_reads_only_at_the_end_are_done_once() {
    assert!(at_every_step(&interleave(every_kind(), Wait), None) > 100);
}

#[test]
fn requests_sent_by_one_call_are_done_once() {
    let all = every_kind().into_iter().filter_map(|act| match act {
        Send(bytes, 0) => Some(bytes),
        _ => None,
    });
    let all: Vec<u8> = all.flatten().collect();
    assert!(at_every_step(&[Send(all, 0), Receive], None) > 50);
}

#[test]
fn requests_in_pieces_are_done_once() {
    let mut acts = Vec::new();
    for act in every_kind() {
        let Send(bytes, fds) = act else { continue };
        // Splits within the header, and within the payload if there is one.
        let cuts = [0, 7, bytes.len().min(30), bytes.len()];
        for cut in cuts.windows(2).filter(|cut| cut[0] < cut[1]) {
            let fds = if cut[0] == 7 { fds } else { 0 };
            acts.extend([Send(bytes[cut[0]..cut[1]].to_vec(), fds), Receive]);
        }
    }
    assert!(at_every_step(&acts, None) > 100);
}

#[test]
fn replies_larger_than_the_socket_are_sent_once() {
    let acts = [
        version(1),
        read(2, 300_000),
        read(3, 16),
        Wait,
        Receive,
        reset(4, 0),
        Receive,
    ];
    let steps = at_every_step(&acts, Some(20_000));
    assert!(steps > 50, "{steps} steps");
}

#[test]
fn reply_with_a_descriptor_behind_a_large_one_is_sent_once() {
    let acts = [version(1), read(2, 30_000), region_info(3), Wait, Receive];
    let (replies, ..) = run_client(&acts, Some(5000), &[]);
    assert_eq!((replies[0].ids(), replies[0].fds), (vec![1, 2, 3], 1));
    assert!(at_every_step(&acts, Some(5000)) > 40);
}

#[test]
fn state_that_changes_between_requests_is_committed() {
    let acts = [
        version(1),
        Receive,
        Change,
        read(2, 4),
        Receive,
        Change,
        Change,
        read(3, 4),
    ];
    // The server is not killed, because a change of state is not a step of a request.
    let (_, entries, _) = run_client(&acts, None, &[]);
    assert_eq!(entries, "connected;changed;read 4;changed;changed;read 4;");
}

#[test]
fn the_end_of_each_client_is_reported_once() {
    let bad_size = {
        let mut message = message(9, VfioUserCommand::DEVICE_RESET, 0, &[]);
        message[4] = 3;
        message
    };
    let version_9 = message(9, VfioUserCommand::VERSION, 0, &[9, 0, 0, 0]);
    let ends: [&[ClientStep]; 6] = [
        &[Close],
        &[reset(8, 0), Close],
        &[Send(vec![1; 10], 0), Close],
        &[Send(bad_size, 0), reset(8, 0)],
        &[reset(8, VfioUserHeader::NO_REPLY), Send(vec![0; 100], 0)],
        &[Send(version_9, 0)],
    ];
    for (number, end) in ends.iter().enumerate() {
        let mut acts = vec![Wait];
        if number < 5 {
            acts.extend([version(1), Receive]);
        }
        acts.extend_from_slice(end);
        acts.extend([Receive, Connect, version(11), reset(12, 0), Receive]);
        let (replies, entries, _) = run_client(&acts, None, &[]);
        assert!(replies[0].closed, "{number}");
        assert_eq!(replies[1].ids(), [11, 12], "{number}");
        assert_eq!(entries.matches("disconnected;").count(), 1, "{number}");
        assert!(at_every_step(&acts, None) > 10);
    }
}

#[test]
fn client_that_does_not_read_finds_every_reply_right() {
    let mut acts = vec![version(0)];
    acts.extend((1..=40).map(|id| read(id, 100 + u32::from(id))));
    acts.push(Wait);
    let (replies, ..) = run_client(&acts, None, &[]);
    assert_eq!(replies[0].ids(), (0..=40).collect::<Vec<_>>());
    // Each reply has other data, so a reply that is lost or repeated is noticed.
    let (killed, _, deaths) = run_client(&acts, None, &[150, 200, 7, 40]);
    assert_eq!(deaths, 4);
    assert!(killed == replies);
}

#[test]
fn a_client_that_disconnected_with_the_process_is_reported() {
    let mut world = ServerProcesses::new();
    let client = world.connect();
    let Send(version, _) = version(1) else {
        unreachable!()
    };
    (&client).write_all(&version).unwrap();
    world.run();
    world.kill();
    world.supervisor.lock().unwrap().client = None;
    world.run();
    assert_eq!(world.entries(), "connected;disconnected;");
    assert!(!world.process.as_ref().unwrap().0.is_connected());
}

#[test]
fn a_client_that_the_supervisor_cannot_store_is_refused() {
    let mut world = ServerProcesses::new();
    world.supervisor.lock().unwrap().refuses = true;
    let client = world.connect();
    world.run();
    assert_eq!((&client).read(&mut [0; 1]).unwrap(), 0);
    assert_eq!(world.entries(), "");

    world.supervisor.lock().unwrap().refuses = false;
    let client = world.connect();
    world.run();
    let error = (&client).read(&mut [0; 1]).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
}

#[test]
fn a_replaced_process_and_a_failed_takeover_keep_the_socket_file() {
    let mut world = ServerProcesses::new();
    let client = world.connect();
    world.run();
    let (mut server, _epoll) = world.process.take().unwrap();

    // A takeover fails while the first process still runs: the new listener is dropped without `adopt`.
    let listener = copy(&world.supervisor.lock().unwrap().listener);
    let listener = SocketListener::from_predecessor(&world.path, listener).unwrap();
    drop(listener);
    assert!(world.path.exists());

    server.release();
    drop(server);
    assert!(world.path.exists());
    world.run();
    assert_eq!(world.entries(), "connected;");
    let (server, _) = world.process.take().unwrap();
    assert!(server.is_connected());
    drop(server);
    assert!(!world.path.exists());
    assert_eq!((&client).read(&mut [0; 1]).unwrap(), 0, "the kept socket");
    assert_eq!(world.entries(), "connected;disconnected;");
}

#[test]
fn descriptors_are_taken_and_closed() {
    let mut world = ServerProcesses::new();
    let client = world.connect();
    let (tracer, fd) = DescriptorTracer::new();
    let Send(version, _) = version(1) else {
        unreachable!()
    };
    (&client).write_all(&version).unwrap();
    let Send(irqs, _) = connect_irqs(2, 1) else {
        unreachable!()
    };
    let fds = [fd.as_raw_fd()];
    client.send_with_fds(&[&irqs[..]], &fds).unwrap();
    drop(fd);
    world.run();
    // This test's device drops each descriptor that it receives.
    assert_eq!(world.entries(), "connected;connect 1;");
    assert!(tracer.is_closed());
}

#[test]
fn message_that_comes_in_part_does_not_keep_the_thread_busy() {
    let mut world = ServerProcesses::new();
    let client = world.connect();
    let Send(version, _) = version(1) else {
        unreachable!()
    };
    (&client).write_all(&version[..20]).unwrap();
    // This call must return although the message is incomplete.
    world.run();
    (&client).write_all(&version[20..]).unwrap();
    world.run();
    let mut replies = ReceivedReplies::default();
    replies.receive(&client);
    assert_eq!(replies.ids(), [1]);
}

#[test]
fn largest_request_is_taken_and_a_larger_one_refused() {
    let most = MAX_CONTROL_PAYLOAD - 16;
    let acts = [version(1), write(2, 0, &vec![1; most]), Receive];
    let (replies, entries, _) = run_client(&acts, None, &[]);
    assert_eq!(replies[0].ids(), [1, 2]);
    assert!(entries.ends_with(&format!("write {most} {most};")));

    let acts = [version(1), write(2, 0, &vec![1; most + 1]), Receive];
    let (replies, ..) = run_client(&acts, None, &[]);
    assert!(replies[0].closed);

    // The largest read is accepted.
    let acts = [version(1), read(2, MAX_DATA_XFER_SIZE), Receive];
    let (replies, ..) = run_client(&acts, None, &[]);
    assert_eq!(replies[0].ids(), [1, 2]);
}

#[test]
fn sockets_that_do_not_listen_are_refused() {
    let world = ServerProcesses::new();
    let (one, _other) = UnixStream::pair().unwrap();
    for fd in [one.into(), File::open("/dev/null").unwrap().into()] {
        let error = SocketListener::from_predecessor(&world.path, fd).unwrap_err();
        assert!(matches!(error, Error::NotListening { .. }));
    }
}

#[test]
fn later_servers_file_is_not_adopted() {
    let mut world = ServerProcesses::new();
    world.kill();
    std::fs::remove_file(&world.path).unwrap();
    world.run();
    // With the privilege to ask, the kernel reports the file of a socket.
    let listener = copy(&world.supervisor.lock().unwrap().listener);
    if socket::bound_file(&listener).is_ok() {
        let mut other = SocketListener::bind(&world.path).unwrap();
        let mut restored = SocketListener::from_predecessor(&world.path, listener).unwrap();
        restored.adopt();
        drop(restored);
        assert!(world.path.exists());
        assert!(other.accept().unwrap().is_none());
    }
}

/// Creates a request log in the middle of a reply, and the socket for the unsent part of the reply.
fn unfinished_request() -> ServerProcesses {
    let mut world = ServerProcesses::new();
    world.supervisor.lock().unwrap().send_buffer = Some(20_000);
    let client = world.connect();
    for act in [version(1), read(2, 300_000)] {
        let Send(bytes, _) = act else { unreachable!() };
        (&client).write_all(&bytes).unwrap();
    }
    world.run();
    world.kill();
    world
}

#[test]
fn damaged_request_logs_are_refused_or_restored_without_a_panic() {
    let world = unfinished_request();
    let file = File::from(copy(&world.supervisor.lock().unwrap().request_log));
    let (mut opened, mut refused) = (0, 0);
    let places = (0..32).chain(0x1000..0x1040).chain(0x2000..0x2040);
    for place in places {
        let mut byte = [0];
        file.read_exact_at(&mut byte, place).unwrap();
        for mask in [1, 0x10, 0x80, 0xff] {
            file.write_all_at(&[byte[0] ^ mask], place).unwrap();
            match RequestLog::from_predecessor(file.try_clone().unwrap().into()) {
                Ok(_) => opened += 1,
                Err(error) => {
                    refused += 1;
                    assert!(!error.to_string().is_empty());
                }
            }
        }
        file.write_all_at(&byte, place).unwrap();
    }
    assert!(opened > 0 && refused > 100, "{opened} {refused}");

    let size = file.metadata().unwrap().len();
    for size in [0, 1, 23, 24, 4096, 5000, 1 << 21, size - 1, size + 1] {
        file.set_len(size).unwrap();
        RequestLog::from_predecessor(file.try_clone().unwrap().into()).unwrap_err();
    }
}

#[test]
fn other_files_and_layouts_have_errors_of_their_own() {
    let (reader, _writer) = io::pipe().unwrap();
    let error = RequestLog::from_predecessor(reader.into()).unwrap_err();
    assert!(matches!(error, RequestLogError::NotARequestLog { .. }));
    let error = RequestLog::from_predecessor(tempfile::tempfile().unwrap().into()).unwrap_err();
    assert!(matches!(error, RequestLogError::NotARequestLog { .. }));

    let request_log = RequestLog::new().unwrap();
    let file = File::from(request_log.as_fd().try_clone_to_owned().unwrap());
    let error = RequestLog::from_predecessor(file.try_clone().unwrap().into()).unwrap_err();
    assert!(matches!(error, RequestLogError::Empty));
    file.write_all_at(&[2], 8).unwrap();
    let error = RequestLog::from_predecessor(file.into()).unwrap_err();
    assert!(matches!(error, RequestLogError::Layout { found: 2 }));
}

fn any_act() -> impl Strategy<Value = ClientStep> {
    prop_oneof![
        (0_u32..3000).prop_map(|count| read(0, count)),
        (0_u32..200_000).prop_map(|count| read(0, count)),
        (0_usize..100).prop_map(|count| write(0, 0, &vec![3; count])),
        (0_usize..9000).prop_map(|count| write(0, VfioUserHeader::NO_REPLY, &vec![4; count])),
        (1_u32..20).prop_map(|fds| connect_irqs(0, fds)),
        Just(map(0)),
        Just(region_info(0)),
        Just(reset(0, 0)),
        Just(reset(0, VfioUserHeader::NO_REPLY)),
        Just(refused(0)),
        Just(Receive),
        Just(Receive),
        Just(Wait),
    ]
}

/// Gives each message its own number, so that replies can be told apart.
fn number_messages(acts: &mut [ClientStep]) {
    for (id, act) in (1_u16..).zip(acts) {
        if let Send(bytes, _) = act {
            bytes[..2].copy_from_slice(&id.to_le_bytes());
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn random_requests_are_done_and_answered_once(
        mut acts in prop::collection::vec(any_act(), 1..12),
        kills in prop::collection::vec(0_u32..60, 1..8),
        send_buffer in prop::option::of(5_000_usize..100_000),
    ) {
        acts.insert(0, version(0));
        acts.push(Receive);
        number_messages(&mut acts);
        let (replies, entries, _) = run_client(&acts, send_buffer, &[]);
        let (killed, done, _) = run_client(&acts, send_buffer, &kills);
        prop_assert!(killed == replies, "heard {:?}, not {:?}", killed[0].ids(), replies[0].ids());
        prop_assert_eq!(done, entries);
    }

    /// Overwrites the head with arbitrary bytes, and with a matching commit word.
    #[test]
    fn random_heads_are_refused_or_restored(
        mut head in prop::collection::vec(any::<u8>(), 64),
        small in any::<bool>(),
        position in 0_u64..(40 << 20),
    ) {
        let world = unfinished_request();
        let file = File::from(copy(&world.supervisor.lock().unwrap().request_log));
        let commit_word = u64::from_le_bytes(head[..8].try_into().unwrap());
        file.write_all_at(&commit_word.to_le_bytes(), 16).unwrap();
        if small {
            // Limits sizes and flags to valid ranges.
            for word in head[16..].chunks_mut(4) {
                word[1..].fill(0);
            }
        }
        file.write_all_at(&head, 0x1000 + commit_word % 2 * 0x1000).unwrap();
        let mut file = file;
        io::Seek::seek(&mut file, io::SeekFrom::Start(position)).unwrap();
        if let Ok((mut server, epoll)) = world.resume() {
            for token in [1, 1, 0] {
                server.handle_event(token, &mut &epoll);
            }
        }
    }
}
