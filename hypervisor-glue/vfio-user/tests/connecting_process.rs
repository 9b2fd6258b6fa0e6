//! Clients whose connecting process has ended, and clients that send nothing.

mod common;

use std::env;
use std::io::{self, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use vfio_user_server::VfioUserServer;
use vmm_sys_util::epoll::{Epoll, EpollEvent};
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

use common::{Nothing, RESET, VERSION, read_reply};

/// Serializes tests. A child process holds copies of all descriptors until it executes its program, so a socket that a
/// concurrent test closes would stay open.
fn test_lock() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Environment variable: path of the server's socket for a client in a separate process. The socket that receives the
/// connection lies beside it.
const CLIENT: &str = "VFIO_USER_CLIENT_OF_A_PROCESS";

/// Runs a client in a separate process: connects, passes the connection on, and ends at the end of standard input.
fn client_of_a_process(path: &Path) {
    let connection = UnixStream::connect(path).unwrap();
    let pass = UnixStream::connect(path.with_extension("pass")).unwrap();
    pass.send_with_fd(&b"x"[..], connection.as_raw_fd())
        .unwrap();
    io::stdin().read_to_end(&mut Vec::new()).unwrap();
}

/// Receives a connection that a process passes on. Child processes do not inherit it.
fn received_connection(pass: &UnixStream) -> UnixStream {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let part = &mut [IoSliceMut::new(&mut byte)];
    recvmsg(pass, part, &mut control, RecvFlags::CMSG_CLOEXEC).unwrap();
    let descriptor = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    UnixStream::from(descriptor.expect("the process's connection"))
}

/// A server with its event loop, and a clock that the test advances.
struct Loop {
    server: VfioUserServer<Nothing>,
    epoll: Epoll,
    now: Duration,
}

impl Loop {
    fn new(path: &Path) -> Self {
        let (server, epoll) = (
            VfioUserServer::bind(path, Nothing).unwrap(),
            Epoll::new().unwrap(),
        );
        server.watch(&mut &epoll).unwrap();
        Self {
            server,
            epoll,
            now: Duration::from_secs(1000),
        }
    }

    /// Handles all pending events.
    fn handle_events(&mut self) {
        let mut events = [EpollEvent::default(); 4];
        loop {
            let count = self.epoll.wait(0, &mut events).unwrap();
            for event in &events[..count] {
                let token = u32::try_from(event.data()).unwrap();
                self.server.handle_event(token, &mut &self.epoll);
            }
            self.server.check_timeouts(self.now, &mut &self.epoll);
            if count == 0 {
                return;
            }
        }
    }

    fn advance(&mut self, time: Duration) {
        self.now += time;
        self.handle_events();
    }

    /// Sends a client's version message. Returns whether the server answers.
    fn negotiates(&mut self, mut client: &UnixStream) -> bool {
        client.write_all(&VERSION).unwrap();
        self.answers(client)
    }

    fn answers(&mut self, mut client: &UnixStream) -> bool {
        self.handle_events();
        client.set_nonblocking(true).unwrap();
        let mut byte = [0];
        let answers = client.read(&mut byte).is_ok_and(|count| count == 1);
        client.set_nonblocking(false).unwrap();
        if answers {
            io::copy(&mut client.take(15), &mut io::sink()).unwrap();
        }
        answers
    }

    fn closes(&mut self, mut client: &UnixStream) -> bool {
        self.handle_events();
        client.set_nonblocking(true).unwrap();
        match client.read(&mut [0]) {
            Ok(count) => count == 0,
            // The server may close the connection with unread bytes.
            Err(error) => error.kind() == io::ErrorKind::ConnectionReset,
        }
    }
}

/// A launcher, or a program that forks into the background, connects and ends. The process to which it passes the socket stays.
#[test]
fn client_whose_connecting_process_has_ended_stays() {
    let name = "client_whose_connecting_process_has_ended_stays";
    if let Some(path) = env::var_os(CLIENT) {
        return client_of_a_process(Path::new(&path));
    }
    let _turn = test_lock();
    let directory = tempfile::TempDir::new().unwrap();
    let path = directory.path().join("one.sock");
    let listener = UnixListener::bind(path.with_extension("pass")).unwrap();
    let mut events = Loop::new(&path);
    let mut process = Command::new(env::current_exe().unwrap())
        .args(["--exact", name])
        .env(CLIENT, &path)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let (pass, _) = listener.accept().unwrap();
    let first = received_connection(&pass);
    (&first).write_all(&VERSION).unwrap();
    events.handle_events();
    assert_eq!(read_reply(&first), 0);

    let second = UnixStream::connect(&path).unwrap();
    assert!(events.closes(&second), "the process lives");

    drop(process.stdin.take());
    assert!(process.wait().unwrap().success());
    assert!(events.server.is_connected());
    let third = UnixStream::connect(&path).unwrap();
    (&third).write_all(&VERSION).unwrap();
    events.handle_events();
    (&first).write_all(&RESET).unwrap();
    events.handle_events();
    assert_eq!(read_reply(&first), 0, "the socket lives");
    let due = events.server.next_timeout(events.now).unwrap();
    events.advance(due - Duration::from_millis(1));
    assert!(!events.closes(&third), "it waits for the end of the socket");
    events.advance(Duration::from_millis(1));
    assert!(events.closes(&third));
    assert_eq!(events.server.next_timeout(events.now), None);

    let fourth = UnixStream::connect(&path).unwrap();
    (&fourth).write_all(&VERSION).unwrap();
    events.handle_events();
    // Closes the connection as the kernel does shortly after the process is killed.
    drop(first);
    events.handle_events();
    assert_eq!(read_reply(&fourth), 0);
}

#[test]
fn a_silent_client_does_not_occupy_the_device() {
    let _turn = test_lock();
    let directory = tempfile::TempDir::new().unwrap();
    let path = directory.path().join("one.sock");
    let mut events = Loop::new(&path);
    for message in [&VERSION[..0], &VERSION[..7]] {
        let mut idle = UnixStream::connect(&path).unwrap();
        idle.write_all(message).unwrap();
        events.handle_events();
        let second = UnixStream::connect(&path).unwrap();
        assert!(events.closes(&second), "it may be slow");
        let due = events.server.next_timeout(events.now).unwrap();
        assert!(due >= Duration::from_secs(5), "{due:?}");
        events.advance(due - Duration::from_millis(1));
        assert!(!events.closes(&idle));
        events.advance(Duration::from_millis(1));
        assert!(events.closes(&idle));
        let third = UnixStream::connect(&path).unwrap();
        assert!(events.negotiates(&third));
        // A client that has sent its version may be idle.
        assert_eq!(events.server.next_timeout(events.now), None);
        events.advance(Duration::from_secs(24 * 3600));
        assert!(events.server.is_connected());
    }
}
