//! A server that is replaced by another process while it runs.
//!
//! | step | the server | its successor |
//! |---|---|---|
//! | 1 | starts the successor, with all that is in the keeper, a socket and the version that its VMMs speak | checks its configuration, all states and that version, opens drives in files, has started its threads, says that it is ready |
//! | 2 | has all functions rest, names the successor to the keeper, says that it ends | waits |
//! | 3 | lets go of all leases, says so | takes up all functions, has its pollers look at them, says that it serves them |
//! | 4 | ends | offers its other sockets |
//!
//! Until step 2 is done, the server goes on if its successor is late or cannot read a state. From then on, the successor is
//! what the keeper starts again after its death, and the server does nothing but end: its functions rest for good.
//!
//! | death | before the naming | between the naming and the word that it ends | after the word |
//! |---|---|---|---|
//! | of the server | the successor ends, the keeper starts another server | the same | the successor goes on |
//! | of the successor | the server goes on | the keeper ends the server, and starts another one | the same |
//!
//! A server says nothing in step 3 if it has a lease of a VMM, or a drive that one process alone can have, such as a physical
//! one. Its successor goes on once it has ended. So does the successor of a server of an earlier release.

use std::env;
use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::Child;
use std::sync::{Arc, Mutex, Once, PoisonError, mpsc};
use std::time::Duration;

use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerCredentials;
use nvme_mpt::clock;
use nvme_mpt::memory::notifier::Notifier;
use nvme_mpt::memory::system;
use nvme_mpt::poller::start_thread;
use nvme_mpt_keep::{Inherited, KeepError, KeeperError, start_successor};
use nvme_mpt_lease_protocol::VERSION;
use thiserror::Error;

use super::Keeping;
use super::function::{FunctionNeeds, SurvivorError, check_state};
use super::registry::Registry;
use crate::confine::LandlockRefusal;

/// Name of the successor's end of the socket.
const SOCKET: &str = "predecessor";

/// Name of the journals that a successor may read at once.
const JOURNAL: &str = "journal";

/// Variable with the version of the lease protocol that VMMs with leases of the server speak; empty without such VMMs.
const LEASE_PROTOCOL: &str = "NVME_MPT_LEASE_PROTOCOL";

/// Word of a successor that can take over.
const READY: u8 = b'r';

/// Word that follows [`READY`] in one message, of a successor that waits for [`LET_GO`] alone. One of an earlier release
/// waits for the server's end.
const BESIDE: u8 = b'b';

/// Word of a server that ends for its successor. The moment at which its functions were asked to rest follows, in
/// nanoseconds.
const ENDS: u8 = b'e';

/// Word of a server that has let go of all leases, after [`ENDS`].
const LET_GO: u8 = b'l';

/// Word of a successor that serves all functions which it can take up.
const SERVES: u8 = b's';

/// Word of a successor that cannot take over. Its reason follows. Earlier releases end without this word.
const FAILED: u8 = b'f';

/// Longest reason, in bytes.
const REASON_MAX: u64 = 16 << 10;

/// Longest wait for a successor to become ready.
const PATIENCE: Duration = Duration::from_secs(30);

/// Longest wait for a successor to serve. The server ends then in any case, as it does nothing any more.
const SERVES_PATIENCE: Duration = Duration::from_secs(10);

/// Time between two looks at what a server waits for.
const LOOK: Duration = Duration::from_millis(100);

/// A server does not take another one's place.
#[derive(Debug, Error)]
pub enum PredecessorError {
    /// A state cannot be read.
    #[error("The state of a function cannot be taken over, so the server before goes on")]
    State(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// VMMs with leases could not go on.
    #[error(
        "VMMs speak version {version} of the lease protocol, and this server version {VERSION}, so the server before goes \
         on: use a release that speaks version {version}, or remove the functions of these VMMs first"
    )]
    LeaseProtocol {
        /// Version that the VMMs speak.
        version: String,
    },
    /// The next server would lack a resource.
    #[error("There is not enough for another server beside this one: {what}")]
    Scarce {
        /// The thing, and what to do.
        what: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
    /// The server before is not replaced after all.
    #[error("The server before goes on without this one, or has died and is started again")]
    GoesOn,
    /// The kernel's error.
    #[error("The end of the server before cannot be seen")]
    Io(#[from] io::Error),
}

/// Tells the server that this process is to replace why it cannot.
#[derive(Debug)]
pub(crate) struct FailureReport(UnixStream);

impl FailureReport {
    /// Returns the report to that server; `None` if there is none.
    pub(crate) fn to_predecessor(inherited: &Inherited) -> Option<Self> {
        let socket = inherited.get(SOCKET).next()?;
        let socket = socket.try_clone_to_owned().ok()?;
        Some(Self(socket.into()))
    }

    /// Sends the reason, if that server waits for this process. Otherwise only the log has it.
    pub(crate) fn tell(mut self, reason: &str) {
        let mut message = vec![FAILED];
        message.extend(reason.as_bytes());
        // The server may have ended.
        let _ = self.0.write_all(&message);
    }
}

/// The server that this process is to replace.
#[derive(Debug)]
pub(super) struct Predecessor {
    socket: UnixStream,
    process: OwnedFd,
}

impl Predecessor {
    /// Finds the server that started this process as its successor, and reads the states that it has now.
    pub(super) fn find(inherited: &mut Inherited) -> Result<Option<Self>, PredecessorError> {
        let journals = inherited.take(JOURNAL);
        let Some(socket) = inherited.take(SOCKET).into_iter().next() else {
            return Ok(None);
        };
        check_lease_protocol(&env::var(LEASE_PROTOCOL).unwrap_or_default())?;
        let socket = UnixStream::from(socket);
        let unreadable = |error: SurvivorError| PredecessorError::State(Box::new(error));
        let needs = journals.into_iter().map(check_state);
        let needs: Vec<_> = needs.collect::<Result<_, _>>().map_err(unreadable)?;
        try_resources(&needs)?;
        let credentials = getsockopt(&socket, PeerCredentials).map_err(io::Error::from)?;
        let process = rustix::process::Pid::from_raw(credentials.pid());
        let process = process.ok_or(PredecessorError::GoesOn)?;
        let process = rustix::process::pidfd_open(process, rustix::process::PidfdFlags::empty());
        let process = process.map_err(io::Error::from)?;
        Ok(Some(Self { socket, process }))
    }

    /// Tells it that this process can take over, and waits until all functions are free to be taken up. Returns the moment
    /// at which they were asked to rest, by the clock of the host.
    pub(super) fn await_turn(self) -> Result<(Duration, Leaving), PredecessorError> {
        let Self {
            mut socket,
            process,
        } = self;
        socket.write_all(&[READY, BESIDE])?;
        let mut word = [0];
        match socket.read_exact(&mut word) {
            Ok(()) if word == [ENDS] => {}
            _ => return Err(PredecessorError::GoesOn),
        }
        let told = system::host_time();
        let mut rested = [0; 8];
        // A server of an earlier release says no more than the word.
        let rested = match socket.read_exact(&mut rested) {
            Ok(()) => Duration::from_nanos(u64::from_le_bytes(rested)),
            Err(_) => told,
        };
        let has_let_go = socket.read_exact(&mut word).is_ok() && word == [LET_GO];
        let leaving = Leaving {
            socket,
            process,
            told: Once::new(),
        };
        if !has_let_go {
            leaving.await_end()?;
        }
        Ok((rested, leaving))
    }
}

/// Threads of a function: the one that serves it, and the one that flushes its lease.
const THREADS_EACH: usize = 2;

/// Descriptors of a function beside those of its client: doorbells, live state, epoll, eventfds and what its drive needs.
const DESCRIPTORS_EACH: usize = 28;

/// Threads and descriptors of a server beside its functions.
const SPARE: usize = 16;

/// Reserves all resources that this process will need for its predecessor's functions, while the predecessor still serves them.
/// So a missing resource is found before the predecessor releases them.
fn try_resources(needs: &[FunctionNeeds]) -> Result<(), PredecessorError> {
    let scarce = |what| move |source| PredecessorError::Scarce { what, source };
    if needs.iter().any(|needs| needs.notifies_untrusted) {
        // It stays.
        let shared = Notifier::shared();
        shared.map_err(scarce(
            "contexts of asynchronous I/O, which carry interrupts to clients of other users",
        ))?;
    }
    let clients: usize = needs.iter().map(|needs| needs.descriptors).sum();
    // The process has each descriptor of a client twice for a while: as it was kept, and in use.
    let descriptors = 2 * clients + DESCRIPTORS_EACH * needs.len() + SPARE;
    try_descriptors(descriptors).map_err(scarce(
        "open files; raise LimitNOFILE= of the unit, or RLIMIT_NOFILE",
    ))?;
    try_threads(THREADS_EACH * needs.len() + SPARE).map_err(scarce(
        "threads; raise TasksMax= of the unit, or pids.max and RLIMIT_NPROC",
    ))
}

fn try_descriptors(count: usize) -> io::Result<()> {
    let file = std::fs::File::open("/dev/null")?;
    let copies: Result<Vec<OwnedFd>, _> = (0..count)
        .map(|_| file.as_fd().try_clone_to_owned())
        .collect();
    copies.map(drop)
}

fn try_threads(count: usize) -> io::Result<()> {
    let (hold, held) = mpsc::channel::<()>();
    let held = Arc::new(Mutex::new(held));
    let started = (0..count).map(|_| {
        let held = held.clone();
        start_thread("trial", move || {
            let held = held.lock().unwrap_or_else(PoisonError::into_inner);
            // Until all were started, or one was not.
            let _ = held.recv();
        })
    });
    let mut threads = Vec::with_capacity(count);
    let mut result = Ok(());
    for thread in started {
        match thread {
            Ok(thread) => threads.push(thread),
            Err(error) => {
                result = Err(error);
                break;
            }
        }
    }
    drop(hold);
    for thread in threads {
        // It cannot panic.
        let _ = thread.join();
    }
    result
}

/// Returns the variable that names the version of the lease protocol to a successor, which takes VMMs over if there are some.
pub(crate) fn lease_protocol(are_vmms: bool) -> (&'static str, String) {
    let version = are_vmms.then(|| VERSION.to_string());
    (LEASE_PROTOCOL, version.unwrap_or_default())
}

/// Refuses VMMs of another version. A server of an earlier release names none.
fn check_lease_protocol(version: &str) -> Result<(), PredecessorError> {
    if version.is_empty() || version.parse::<u32>() == Ok(VERSION) {
        return Ok(());
    }
    let version = version.to_owned();
    Err(PredecessorError::LeaseProtocol { version })
}

/// The server before, which has nothing any more that this process needs, and may not have ended yet.
#[derive(Debug)]
pub(super) struct Leaving {
    socket: UnixStream,
    process: OwnedFd,
    told: Once,
}

impl Leaving {
    /// A server whose end of the socket is in this process. Returns that end, too.
    #[cfg(test)]
    pub(super) fn of(process: OwnedFd) -> (Self, UnixStream) {
        let (socket, theirs) = UnixStream::pair().unwrap();
        let leaving = Self {
            socket,
            process,
            told: Once::new(),
        };
        (leaving, theirs)
    }

    /// Returns whether a process has this number and is that server, ended or not.
    pub(super) fn is_process(&self, number: u32) -> bool {
        let credentials = getsockopt(&self.socket, PeerCredentials);
        credentials.is_ok_and(|peer| u32::try_from(peer.pid()) == Ok(number))
    }

    /// Tells it that all functions are served which can be taken up beside it.
    pub(super) fn let_end(&self) {
        self.told.call_once(|| {
            // It may have ended.
            let _ = (&self.socket).write_all(&[SERVES]);
        });
    }

    /// Waits for its end.
    pub(super) fn await_end(&self) -> io::Result<()> {
        let mut ends = [rustix::event::PollFd::new(
            &self.process,
            rustix::event::PollFlags::IN,
        )];
        let waited = rustix::io::retry_on_intr(|| rustix::event::poll(&mut ends, None));
        waited.map(drop).map_err(io::Error::from)
    }
}

/// A server is not replaced, and goes on.
#[derive(Debug, Error)]
pub(crate) enum UpgradeError {
    /// Nothing would outlive the server.
    #[error(
        "The server has no keeper, so VMs would lose their drives: start it by `nvme-mpt keep`, or by systemd with \
         resources/nvme-mpt.service"
    )]
    NoKeeper,
    /// The next server cannot be started.
    #[error("The next server cannot be started")]
    Start(#[from] KeeperError),
    /// The next server ended before it could take over.
    #[error("The next server ended with {0} before it could take over; the log has its reason")]
    Ended(String),
    /// The next server cannot take over, and has said why.
    #[error("The next server cannot take over, and this one goes on: {0}")]
    Failed(String),
    /// This server may not execute the program of the next one.
    #[error(transparent)]
    Landlock(#[from] LandlockRefusal),
    /// The next server does not become ready.
    #[error("The next server is not ready after {} seconds", PATIENCE.as_secs())]
    Late,
    /// The server was asked to end meanwhile.
    #[error("The server ends")]
    Ending,
    /// A function does not rest.
    #[error(
        "Function {id} on {drive} cannot be handed over: {reason}. Nothing has changed; upgrade again once its drive answers"
    )]
    Function {
        /// The function.
        id: String,
        /// Its drive.
        drive: String,
        /// Why.
        reason: String,
    },
    /// This process could not end, because the kernel has requests of a lease.
    #[error(
        "The drive of lease {0} has commands in flight, and no server can take over before they have ended. Nothing has \
         changed; upgrade again once the drive answers"
    )]
    Lease(String),
    /// The next server opens drives by their paths.
    #[error(
        "{0}. The next server would not find it. Nothing has changed; move the drive back to its path, or remove its functions, \
         and upgrade again"
    )]
    Moved(String),
    /// The ledger cannot be read.
    #[error("The leases that end cannot be found")]
    Ledger(#[source] nvme_mpt::lease::LeaseError),
    /// The keeper does not take the next server as its own.
    #[error("The keeper cannot be told of the next server")]
    Keeper(#[from] KeepError),
    /// The kernel's error.
    #[error("The next server cannot be spoken with")]
    Io(#[from] io::Error),
}

/// The process that is to replace this server. Dropped, it is ended, and this server goes on.
#[derive(Debug)]
pub(crate) struct Successor {
    socket: UnixStream,
    /// `None` once it takes over.
    process: Option<Child>,
    /// It can take over before this process has ended.
    goes_on_beside: bool,
}

impl Successor {
    /// Starts a command as the successor of this server.
    pub(crate) fn start(
        keeping: &Keeping,
        first_stage: &[OsString],
        command: &[OsString],
        variables: &[(&str, String)],
    ) -> Result<Self, UpgradeError> {
        let (socket, theirs) = UnixStream::pair()?;
        let registry: &Registry = keeping.registry();
        // It may have another keeper than this process was started by.
        let keeper = registry.store().variables();
        let variables = variables
            .iter()
            .map(|(name, value)| (*name, OsString::from(value)));
        let variables: Vec<_> = variables.chain(keeper).collect();
        let process = registry.pass_on(JOURNAL, |descriptors| {
            let mut all: Vec<(&str, BorrowedFd<'_>)> = descriptors;
            all.push((SOCKET, theirs.as_fd()));
            start_successor(first_stage, command, &variables, &all)
        })?;
        Ok(Self {
            socket,
            process: Some(process),
            goes_on_beside: false,
        })
    }

    /// Returns whether it can take over before this process has ended.
    pub(crate) fn goes_on_beside(&self) -> bool {
        self.goes_on_beside
    }

    /// Number of its process.
    pub(crate) fn number(&self) -> u32 {
        self.process.as_ref().map_or(0, Child::id)
    }

    /// Waits until it can take over, unless `ends` says that this server is to end.
    pub(crate) fn await_ready(&mut self, ends: impl Fn() -> bool) -> Result<(), UpgradeError> {
        self.socket.set_read_timeout(Some(LOOK))?;
        let deadline = clock::monotonic() + PATIENCE;
        let mut words = [0; 2];
        loop {
            match self.socket.read(&mut words) {
                Ok(count) if count > 0 && words[0] == READY => {
                    self.goes_on_beside = words == [READY, BESIDE];
                    return Ok(());
                }
                Ok(count) if count > 0 && words[0] == FAILED => {
                    return Err(self.failed(&words[1..count]));
                }
                Ok(_) => return Err(self.ended()),
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => {}
                    io::ErrorKind::ConnectionReset => return Err(self.ended()),
                    _ => return Err(error.into()),
                },
            }
            if ends() {
                return Err(UpgradeError::Ending);
            }
            if clock::monotonic() > deadline {
                return Err(UpgradeError::Late);
            }
        }
    }

    /// Reads the rest of the reason why the successor cannot take over.
    fn failed(&mut self, first: &[u8]) -> UpgradeError {
        let mut reason = first.to_vec();
        // It ends after it has told all, or takes too long.
        let _ = (&self.socket).take(REASON_MAX).read_to_end(&mut reason);
        UpgradeError::Failed(String::from_utf8_lossy(&reason).into_owned())
    }

    fn ended(&mut self) -> UpgradeError {
        let status = self.process.as_mut().map(Child::wait);
        let status = status.and_then(Result::ok);
        UpgradeError::Ended(status.map_or("no status".to_owned(), |status| status.to_string()))
    }

    /// Hands over to it, as all functions rest that were asked to at `rested`. After that this process has to end: nothing of
    /// it may touch what is kept.
    pub(crate) fn hand_over(
        &mut self,
        keeping: &Keeping,
        rested: Duration,
    ) -> Result<(), UpgradeError> {
        let store = keeping.registry().store();
        // The keeper reads it before it acts on the end of either process.
        store.notify(&format!("MAINPID={}", self.number()))?;
        let rested = u64::try_from(rested.as_nanos()).unwrap_or(u64::MAX);
        let mut words = vec![ENDS];
        words.extend(rested.to_le_bytes());
        match self.socket.write_all(&words) {
            Ok(()) => {
                self.process = None;
                Ok(())
            }
            Err(error) => {
                // The keeper is not to take the successor's end for this server's.
                store.notify(&format!("MAINPID={}", std::process::id()))?;
                Err(error.into())
            }
        }
    }

    /// Has it go on beside this process, which has let go of all leases. Returns once it serves, has ended or is late.
    pub(crate) fn let_go_on(&mut self) -> io::Result<()> {
        self.socket.set_read_timeout(Some(SERVES_PATIENCE))?;
        self.socket.write_all(&[LET_GO])?;
        let mut word = [0];
        self.socket.read_exact(&mut word)
    }
}

impl Drop for Successor {
    fn drop(&mut self) {
        if let Some(mut process) = self.process.take() {
            // It may have ended by itself.
            let _ = process.kill();
            // One that opens a file on storage that stands still ends with it. Without a thread, nobody waits for it.
            let _ = start_thread("reaper", move || drop(process.wait()));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Shutdown;
    use std::process::{Command, Stdio};

    use rustix::process::{Pid, PidfdFlags, getpid, pidfd_open};

    use super::*;

    fn descriptor_of(process: Pid) -> OwnedFd {
        pidfd_open(process, PidfdFlags::empty()).unwrap()
    }

    /// Returns the words of a server that ends, whose functions were asked to rest at `rested`.
    fn ends(rested: Duration) -> Vec<u8> {
        let mut words = vec![ENDS];
        let rested = u64::try_from(rested.as_nanos()).unwrap();
        words.extend(rested.to_le_bytes());
        words
    }

    #[test]
    fn a_successor_goes_on_beside_a_server_that_has_let_go() {
        let (mut server, socket) = UnixStream::pair().unwrap();
        // It does not end in this test.
        let process = descriptor_of(getpid());
        let rested = Duration::from_nanos(7);
        server.write_all(&ends(rested)).unwrap();
        server.write_all(&[LET_GO]).unwrap();
        let (at, leaving) = Predecessor { socket, process }.await_turn().unwrap();
        assert_eq!(at, rested);
        leaving.let_end();
        leaving.let_end();
        drop(leaving);
        let mut said = Vec::new();
        server.read_to_end(&mut said).unwrap();
        assert_eq!(said, [READY, BESIDE, SERVES]);
    }

    #[test]
    fn a_successor_waits_for_the_end_of_a_server_that_does_not_let_go() {
        let rested = Duration::from_nanos(7);
        // The first one is of an earlier release.
        for words in [vec![ENDS], ends(rested)] {
            let mut command = Command::new("cat");
            command.stdin(Stdio::piped()).stdout(Stdio::null());
            let mut child = command.spawn().unwrap();
            let process = descriptor_of(Pid::from_child(&child));
            let (mut server, socket) = UnixStream::pair().unwrap();
            server.write_all(&words).unwrap();
            server.shutdown(Shutdown::Write).unwrap();
            drop(child.stdin.take());
            let (at, _) = Predecessor { socket, process }.await_turn().unwrap();
            assert_eq!(at == rested, words.len() > 1);
            assert!(child.try_wait().unwrap().is_some(), "it has ended");
        }
    }

    #[test]
    fn a_server_that_goes_on_has_no_successor() {
        for words in [&b""[..], &[LET_GO][..]] {
            let (mut server, socket) = UnixStream::pair().unwrap();
            let process = descriptor_of(getpid());
            server.write_all(words).unwrap();
            server.shutdown(Shutdown::Write).unwrap();
            let refused = Predecessor { socket, process }.await_turn().unwrap_err();
            assert!(matches!(refused, PredecessorError::GoesOn), "{refused}");
        }
    }

    #[test]
    fn vmms_of_another_version_are_refused_before_the_server_ends() {
        for are_vmms in [false, true] {
            let (name, version) = lease_protocol(are_vmms);
            assert_eq!(name, LEASE_PROTOCOL);
            assert_eq!(version.is_empty(), !are_vmms);
            check_lease_protocol(&version).unwrap();
        }
        for version in [VERSION - 1, VERSION + 1] {
            let refused = check_lease_protocol(&version.to_string()).unwrap_err();
            let versions = format!(
                "version {version} of the lease protocol, and this server version {VERSION}"
            );
            assert!(refused.to_string().contains(&versions), "{refused}");
        }
        check_lease_protocol("four").unwrap_err();
    }

    #[test]
    fn resources_that_there_are_refuse_no_upgrade() {
        let needs = FunctionNeeds {
            descriptors: 3,
            notifies_untrusted: true,
        };
        try_resources(&[needs; 4]).unwrap();
    }

    /// Returns a successor that has said this, and its end of the socket.
    fn successor(words: &[u8]) -> (Successor, UnixStream) {
        let (socket, mut theirs) = UnixStream::pair().unwrap();
        theirs.write_all(words).unwrap();
        let successor = Successor {
            socket,
            process: None,
            goes_on_beside: false,
        };
        (successor, theirs)
    }

    #[test]
    fn a_successor_of_an_earlier_release_needs_the_end_of_the_server() {
        for (words, beside) in [(&[READY][..], false), (&[READY, BESIDE][..], true)] {
            let (mut successor, _theirs) = successor(words);
            successor.await_ready(|| false).unwrap();
            assert_eq!(successor.goes_on_beside(), beside);
        }
        let (mut other, _theirs) = successor(b"x");
        let refused = other.await_ready(|| false).unwrap_err();
        assert!(matches!(refused, UpgradeError::Ended(_)), "{refused}");
    }

    #[test]
    fn a_successor_that_cannot_take_over_says_why() {
        let (mut successor, theirs) = successor(b"");
        FailureReport(theirs).tell("There is no room");
        let refused = successor.await_ready(|| false).unwrap_err();
        let told = "The next server cannot take over, and this one goes on: There is no room";
        assert_eq!(refused.to_string(), told);
    }

    #[test]
    fn a_server_that_has_let_go_stays_until_its_successor_serves() {
        let (mut successor, mut theirs) = successor(&[SERVES]);
        successor.let_go_on().unwrap();
        let mut word = [0];
        theirs.read_exact(&mut word).unwrap();
        assert_eq!(word, [LET_GO]);
        // It has ended.
        drop(theirs);
        successor.let_go_on().unwrap_err();
    }
}
