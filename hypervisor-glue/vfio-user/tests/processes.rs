//! The vfio-user server with a client in another process, and a server process without free descriptors.
//!
//! A child process has copies of all file descriptors of its parent until it executes its program. Tests that check whether a
//! socket or a descriptor is closed are therefore not in this file.

mod common;

use std::env;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use event_manager::{EventManager, SubscriberOps};
use vfio_user_server::{
    DeviceRegion, DmaRegion, IrqCommand, IrqIndex, IrqInfo, RegionIndex, RequestLog,
    SessionReadiness, SocketAccess, SocketListener, SocketWatcher, VfioUserDevice, VfioUserServer,
    VfioUserSession,
};
use vmm_sys_util::epoll::{Epoll, EpollEvent, EventSet};
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

use common::{Nothing, RESET, VERSION, read_reply};

const ALONE: &str = "VFIO_USER_FD_LIMIT_ALONE";

/// Runs `test` in a process with a limit of 64 open files.
fn with_low_limit(name: &str, test: impl FnOnce()) {
    if env::var_os(ALONE).is_some() {
        return test();
    }
    let output = Command::new("sh")
        .args(["-c", "ulimit -n 64 && exec \"$0\" --exact \"$1\""])
        .arg(env::current_exe().unwrap())
        .arg(name)
        .env(ALONE, "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}");
    assert!(text.contains("1 passed"), "{text}");
}

/// Opens files until no descriptor is left.
fn exhaust() -> Vec<File> {
    let mut taken = Vec::new();
    loop {
        match File::open("/dev/null") {
            Ok(file) => taken.push(file),
            Err(error) => {
                assert_eq!(error.raw_os_error(), Some(libc::EMFILE));
                return taken;
            }
        }
    }
}

#[test]
fn message_whose_fds_are_lost_is_refused_and_the_next_one_answered() {
    let name = "message_whose_fds_are_lost_is_refused_and_the_next_one_answered";
    with_low_limit(name, || {
        let (mut client, server) = UnixStream::pair().unwrap();
        server.set_nonblocking(true).unwrap();
        let mut session = VfioUserSession::new(server, &Nothing).unwrap();
        client.write_all(&VERSION).unwrap();
        session.run(&mut Nothing);
        assert_eq!(read_reply(&client), 0);

        let null = File::open("/dev/null").unwrap();
        let mut taken = exhaust();
        // The process has free descriptors for none of the two files, then for one of them.
        for spare in [0, 1] {
            taken.truncate(taken.len() - spare);
            let fds = [null.as_raw_fd(); 2];
            client.send_with_fds(&[&RESET[..]], &fds).unwrap();
            assert_eq!(session.run(&mut Nothing), SessionReadiness::Reading);
            assert_eq!(read_reply(&client), libc::EMFILE as u32);
        }
        client.write_all(&RESET).unwrap();
        assert_eq!(session.run(&mut Nothing), SessionReadiness::Reading);
        assert_eq!(read_reply(&client), 0);
        // The server has closed the descriptor that it received, so this file gets the only free one.
        drop(File::open("/dev/null").unwrap());
    });
}

#[test]
fn client_without_an_fd_is_turned_away_and_does_not_keep_the_thread_busy() {
    let name = "client_without_an_fd_is_turned_away_and_does_not_keep_the_thread_busy";
    with_low_limit(name, || {
        let directory = tempfile::TempDir::new().unwrap();
        let path = directory.path().join("full.sock");
        let mut manager = EventManager::new().unwrap();
        manager.add_subscriber(VfioUserServer::bind(&path, Nothing).unwrap());

        let mut early = UnixStream::connect(&path).unwrap();
        let taken = exhaust();
        assert_eq!(manager.run().unwrap(), 1);
        assert_eq!(early.read(&mut [0; 1]).unwrap(), 0);
        assert_eq!(manager.run_with_timeout(0).unwrap(), 0);

        drop(taken);
        let mut client = UnixStream::connect(&path).unwrap();
        client.write_all(&VERSION).unwrap();
        manager.run().unwrap();
        manager.run().unwrap();
        assert_eq!(read_reply(&client), 0);
    });
}

/// Environment variable: path of the socket on which a server in a separate process receives its descriptors. The server's own
/// socket path lies beside it.
const SUPERVISOR: &str = "VFIO_USER_KEEPER_OF_A_PROCESS";

/// A device that counts writes. A read returns the count.
struct Counter {
    writes: u64,
    saved: Option<u64>,
    persisted_client: Option<OwnedFd>,
}

impl VfioUserDevice for Counter {
    fn region(&self, _: RegionIndex) -> DeviceRegion {
        DeviceRegion {
            size: 4096,
            readable: true,
            writable: true,
            mappable: None,
        }
    }
    fn read(&mut self, _: RegionIndex, _: u64, data: &mut [u8]) {
        data.copy_from_slice(&self.writes.to_le_bytes());
    }
    fn write(&mut self, _: RegionIndex, _: u64, _: &[u8]) {
        self.writes += 1;
    }
    fn dma_map(&mut self, _: DmaRegion) -> io::Result<()> {
        Ok(())
    }
    fn dma_unmap(&mut self, _: Option<(u64, u64)>) -> io::Result<u64> {
        Ok(0)
    }
    fn irq(&self, _: IrqIndex) -> IrqInfo {
        IrqInfo::default()
    }
    fn set_irqs(&mut self, _: IrqCommand) -> io::Result<()> {
        Ok(())
    }
    fn reset(&mut self) {}
    fn on_disconnected(&mut self) {}
    fn persist_client(&mut self, stream: BorrowedFd<'_>) -> io::Result<()> {
        self.persisted_client = Some(stream.try_clone_to_owned()?);
        Ok(())
    }
    fn save(&mut self) -> Option<Vec<u8>> {
        let changed = self.saved.replace(self.writes) != Some(self.writes);
        changed.then(|| self.writes.to_le_bytes().to_vec())
    }
}

/// Runs a server in a separate process until it is killed, or the test ends.
fn server_of_a_process(supervisor: &Path) {
    let supervisor = UnixStream::connect(supervisor).unwrap();
    let mut fds = (0..3).map(|_| {
        let (_, file) = supervisor.recv_with_fd(&mut [0]).unwrap();
        OwnedFd::from(file.unwrap())
    });
    let listener =
        SocketListener::from_predecessor(Path::new("kept.sock"), fds.next().unwrap()).unwrap();
    let (request_log, record) = RequestLog::from_predecessor(fds.next().unwrap()).unwrap();
    let client = fds.next().map(UnixStream::from);
    let device = Counter {
        writes: u64::from_le_bytes(record.device_state().try_into().unwrap()),
        saved: None,
        persisted_client: None,
    };
    let mut server = VfioUserServer::resume(listener, request_log, client, device).unwrap();
    let epoll = Epoll::new().unwrap();
    server.watch(&mut &epoll).unwrap();
    let end = VfioUserServer::<Counter>::TOKENS.end;
    SocketWatcher::add(&mut &epoll, supervisor.as_raw_fd(), end, EventSet::IN).unwrap();
    let mut events = [EpollEvent::default(); 4];
    loop {
        let ready = epoll.wait(-1, &mut events).unwrap();
        for event in &events[..ready] {
            match event.data() as u32 {
                token if token == end => return server.release(),
                token => server.handle_event(token, &mut &epoll),
            }
        }
    }
}

/// A server process, and a connection at whose end the process ends.
struct Process(Child, #[expect(dead_code, reason = "held open")] UnixStream);

impl Drop for Process {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns the messages for a write of 8 bytes and a read of 8 bytes.
fn write_and_read(id: u16) -> Vec<u8> {
    let [low, high] = id.to_le_bytes();
    let write = [
        &[low, high, 10, 0, 40, 0, 0, 0][..],
        &[0; 16],
        &[0, 0, 0, 0, 8, 0, 0, 0],
        &[7; 8],
    ];
    let read = [
        &[low, high, 9, 0, 32, 0, 0, 0][..],
        &[0; 16],
        &[0, 0, 0, 0, 8, 0, 0, 0],
    ];
    [write.concat(), read.concat()].concat()
}

#[test]
fn client_of_servers_that_are_killed_sees_each_request_done_once() {
    const KILLS: u64 = 40;
    const BURST: u64 = 100;
    let name = "client_of_servers_that_are_killed_sees_each_request_done_once";
    if let Some(path) = env::var_os(SUPERVISOR) {
        return server_of_a_process(Path::new(&path));
    }
    let directory = tempfile::TempDir::new().unwrap();
    let path = directory.path().join("kept.sock");
    let supervisor_path = directory.path().join("supervisor.sock");
    let supervisor = UnixListener::bind(&supervisor_path).unwrap();

    // This process acts as the first server, whose descriptors the server processes get.
    let device = Counter {
        writes: 0,
        saved: None,
        persisted_client: None,
    };
    let request_log = RequestLog::new().unwrap();
    let mut first =
        VfioUserServer::bind_with_log(&path, SocketAccess::default(), device, request_log).unwrap();
    let epoll = Epoll::new().unwrap();
    let mut client = UnixStream::connect(&path).unwrap();
    first.handle_event(VfioUserServer::<Counter>::TOKENS.start, &mut &epoll);
    // The timeout fails the test if a server stops answering.
    let timeout = Some(Duration::from_secs(60));
    client.set_read_timeout(timeout).unwrap();
    client.write_all(&VERSION).unwrap();
    let persisted: [OwnedFd; 3] = [
        first.listener().as_fd().try_clone_to_owned().unwrap(),
        first
            .request_log()
            .unwrap()
            .as_fd()
            .try_clone_to_owned()
            .unwrap(),
        first.device_mut().persisted_client.take().unwrap(),
    ];
    first.release();
    drop((first, epoll));

    let start = || {
        let child = Command::new(env::current_exe().unwrap())
            .args(["--exact", name])
            .env(SUPERVISOR, &supervisor_path)
            .current_dir(directory.path())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let (stream, _) = supervisor.accept().unwrap();
        for fd in &persisted {
            stream.send_with_fd(&b"x"[..], fd.as_raw_fd()).unwrap();
        }
        Process(child, stream)
    };
    let mut process = start();
    assert_eq!(read_reply(&client), 0);
    for kill in 0..KILLS {
        let burst: Vec<u8> = (0..BURST)
            .flat_map(|id| write_and_read(id as u16))
            .collect();
        // The requests fit into the socket, so the client need not wait for a server.
        client.write_all(&burst).unwrap();
        // The server is killed at a different point in each round.
        let early = kill * 37 % BURST;
        for id in 0..BURST {
            if id == early {
                drop(process);
                process = start();
            }
            let mut written = [0; 32];
            client.read_exact(&mut written).unwrap();
            let mut read = [0; 40];
            client.read_exact(&mut read).unwrap();
            for (reply, command) in [(&written[..], 10), (&read[..], 9)] {
                assert_eq!(reply[..4], [id as u8, 0, command, 0]);
                assert_eq!(reply[8..16], [1, 0, 0, 0, 0, 0, 0, 0]);
            }
            let writes = u64::from_le_bytes(read[32..].try_into().unwrap());
            assert_eq!(writes, kill * BURST + id + 1);
        }
    }
    drop(process);
    assert!(path.exists());
}
