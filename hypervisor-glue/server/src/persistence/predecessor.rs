//! Replacing a running server by a new process: both sides of the protocol.
//!
//! | step | predecessor | successor |
//! |---|---|---|
//! | 1 | starts the successor with all supervisor entries, a socket and its VMMs' lease protocol version | checks its configuration, the functions' states and that version; opens drives in files; starts its threads; sends "ready" |
//! | 2 | pauses all functions, names the successor to the supervisor, sends "ends" | waits |
//! | 3 | releases all leases, sends "released" | restores all functions, lets its pollers reach their queues, sends "serves" |
//! | 4 | ends | serves its other sockets |
//!
//! If the successor is late or cannot read a state before step 2 is complete, the predecessor continues. After step 2, the
//! predecessor can only end, and its functions stay paused there. If the successor then dies, the supervisor starts a new
//! server.
//!
//! | crash of | before the naming | between the naming and "ends" | after "ends" |
//! |---|---|---|---|
//! | the predecessor | the successor ends, the supervisor starts a new server | the same | the successor continues |
//! | the successor | the predecessor continues | the supervisor ends the predecessor and starts a new one | the same |
//!
//! If the predecessor has a VMM's lease, or a drive that only one process can open, it does not send "released" in step 3.
//! The successor then waits until the predecessor has ended. The successor also waits for the end of servers of earlier
//! releases.

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
use nvme_guest::threads::start_thread;
use nvme_mpt_lease_protocol::VERSION;
use nvme_mpt_memory::notifier::EventfdNotifier;
use nvme_mpt_memory::{clock, system};
use nvme_mpt_supervise::{FdStoreError, InheritedDescriptors, SuperviseError, start_successor};
use thiserror::Error;

use super::ServerPersistence;
use super::fd_store_registry::FdStoreRegistry;
use super::persisted_function::{RestoreError, SuccessorRequirements, check_requirements};
use crate::confinement::LandlockRefusal;

/// Name under which the successor inherits its end of the upgrade socket.
const SOCKET_NAME: &str = "predecessor";

/// Name under which the successor inherits the request logs of functions, which it reads before it takes over.
const REQUEST_LOG_NAME: &str = "journal";

/// Environment variable with the lease protocol version that VMMs with leases speak to the predecessor. Empty if no VMM has
/// a lease.
const LEASE_PROTOCOL_VARIABLE: &str = "NVME_MPT_LEASE_PROTOCOL";

/// Message of a successor that is ready to take over.
const READY: u8 = b'r';

/// Byte after [`READY`] in the same message, with which the successor says that it waits only for [`RELEASED`]. Earlier
/// releases do not send this byte and wait for the predecessor's end.
const AWAITS_RELEASE: u8 = b'b';

/// Message of a server that is about to end for its successor. The time at which its functions were asked to pause follows, in
/// nanoseconds of the host's clock.
const ENDING: u8 = b'e';

/// Message of a server that has released all leases. It follows [`ENDING`].
const RELEASED: u8 = b'l';

/// Message of a successor that serves all functions that it can restore.
const SERVING: u8 = b's';

/// Message of a successor that cannot take over. The reason follows as text. A successor that is killed ends without this
/// message.
const FAILED: u8 = b'f';

/// Maximum length in bytes of the reason that follows [`FAILED`].
const REASON_MAX: u64 = 16 << 10;

/// Timeout for a successor to send [`READY`].
const READY_TIMEOUT: Duration = Duration::from_secs(30);

/// Timeout for a successor to send [`SERVING`]. After the timeout, the predecessor ends as well.
const SERVING_TIMEOUT: Duration = Duration::from_secs(10);

/// Interval of checking, during a wait, whether this server has to end itself.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Error of taking over from another server.
#[derive(Debug, Error)]
pub enum PredecessorError {
    /// The state of a function cannot be read.
    #[error("Cannot restore the state of a function, so the previous server continues")]
    State(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// VMMs with leases speak another version of the lease protocol.
    #[error(
        "VMMs speak version {version} of the lease protocol, but this server speaks version {VERSION}, so the \
         previous server continues: use a release that speaks version {version}, or remove the functions of these \
         VMMs first"
    )]
    LeaseProtocol {
        /// Version of the VMMs.
        version: String,
    },
    /// A resource is too scarce for two servers.
    #[error("There are not enough resources for another server beside this one: {what}")]
    Scarce {
        /// Name of the resource, and advice on how to raise its limit.
        what: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
    /// The predecessor continues to serve, or has died and is restarted by the supervisor.
    #[error("The previous server continues, or has died and is restarted")]
    Continues,
    /// The kernel's error.
    #[error("Cannot watch for the end of the previous server")]
    Io(#[from] io::Error),
}

/// Connection that tells the predecessor why this process cannot take over.
#[derive(Debug)]
pub struct FailureReport(UnixStream);

impl FailureReport {
    /// Returns the connection to the predecessor; `None` if this process was not started to replace a server.
    pub fn connect(inherited: &InheritedDescriptors) -> Option<Self> {
        let socket = inherited.get(SOCKET_NAME).next()?;
        let socket = socket.try_clone_to_owned().ok()?;
        Some(Self(socket.into()))
    }

    /// Sends the reason, if the predecessor still waits for it.
    pub fn send(mut self, reason: &str) {
        let mut message = vec![FAILED];
        message.extend(reason.as_bytes());
        // The write fails only if the server has ended, and then the reason is not needed.
        let _ = self.0.write_all(&message);
    }
}

/// The running server that started this process as its successor.
#[derive(Debug)]
pub(super) struct PredecessorProcess {
    socket: UnixStream,
    pidfd: OwnedFd,
}

impl PredecessorProcess {
    /// Finds the predecessor that started this process, and checks that this release can read the present states of its
    /// functions.
    pub(super) fn find(
        inherited: &mut InheritedDescriptors,
    ) -> Result<Option<Self>, PredecessorError> {
        let journals = inherited.take(REQUEST_LOG_NAME);
        let Some(socket) = inherited.take(SOCKET_NAME).into_iter().next() else {
            return Ok(None);
        };
        check_lease_protocol(&env::var(LEASE_PROTOCOL_VARIABLE).unwrap_or_default())?;
        let socket = UnixStream::from(socket);
        let unreadable = |error: RestoreError| PredecessorError::State(Box::new(error));
        let requirements = journals.into_iter().map(check_requirements);
        let requirements: Vec<_> = requirements.collect::<Result<_, _>>().map_err(unreadable)?;
        try_resources(&requirements)?;
        let credentials = getsockopt(&socket, PeerCredentials).map_err(io::Error::from)?;
        let process = rustix::process::Pid::from_raw(credentials.pid());
        let process = process.ok_or(PredecessorError::Continues)?;
        let process = rustix::process::pidfd_open(process, rustix::process::PidfdFlags::empty());
        let process = process.map_err(io::Error::from)?;
        Ok(Some(Self {
            socket,
            pidfd: process,
        }))
    }

    /// Sends [`READY`], and waits until the predecessor has paused its functions and handed them over. Returns the time at
    /// which the functions were asked to pause, by the host's clock.
    pub(super) fn await_hand_over(
        self,
    ) -> Result<(Duration, ReleasedPredecessor), PredecessorError> {
        let Self {
            mut socket,
            pidfd: process,
        } = self;
        socket.write_all(&[READY, AWAITS_RELEASE])?;
        let mut word = [0];
        match socket.read_exact(&mut word) {
            Ok(()) if word == [ENDING] => {}
            _ => return Err(PredecessorError::Continues),
        }
        let reported_at = system::host_time();
        let mut paused_at = [0; 8];
        // The predecessor may end before it has sent the time.
        let paused_at = match socket.read_exact(&mut paused_at) {
            Ok(()) => Duration::from_nanos(u64::from_le_bytes(paused_at)),
            Err(_) => reported_at,
        };
        let has_let_go = socket.read_exact(&mut word).is_ok() && word == [RELEASED];
        let leaving = ReleasedPredecessor {
            socket,
            pidfd: process,
            notified: Once::new(),
        };
        if !has_let_go {
            leaving.await_end()?;
        }
        Ok((paused_at, leaving))
    }
}

/// Threads per function: its control thread, and its lease's flush thread.
const THREADS_PER_FUNCTION: usize = 2;

/// Descriptors that a function needs in addition to those of its client: doorbells, in-flight state, epoll, eventfds and those
/// of the drive.
const DESCRIPTORS_PER_FUNCTION: usize = 28;

/// Threads and descriptors of the server itself.
const SERVER_RESERVE: usize = 16;

/// Allocates all resources that the predecessor's functions will need here, and frees them again, while the predecessor
/// still serves the functions. So a shortage is found before the predecessor releases its functions.
fn try_resources(requirements: &[SuccessorRequirements]) -> Result<(), PredecessorError> {
    let scarce = |what| move |source| PredecessorError::Scarce { what, source };
    if requirements
        .iter()
        .any(|requirements| requirements.has_untrusted_vectors)
    {
        // The notifier stays allocated, since the functions will need it.
        let shared = EventfdNotifier::shared();
        shared.map_err(scarce(
            "contexts of asynchronous I/O, which carry interrupts to clients of other users",
        ))?;
    }
    let clients: usize = requirements
        .iter()
        .map(|requirements| requirements.descriptors)
        .sum();
    // Each descriptor of a client briefly exists twice: stored, and in use.
    let descriptors = 2 * clients + DESCRIPTORS_PER_FUNCTION * requirements.len() + SERVER_RESERVE;
    try_descriptors(descriptors).map_err(scarce(
        "open files; raise LimitNOFILE= of the unit, or RLIMIT_NOFILE",
    ))?;
    try_threads(THREADS_PER_FUNCTION * requirements.len() + SERVER_RESERVE).map_err(scarce(
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
            // The thread lives until all threads are started or one could not be started.
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
        // The result needs no check, since the thread only waits and cannot panic.
        let _ = thread.join();
    }
    result
}

/// Returns the environment variable with which a successor is started: it names the lease protocol version if VMMs have leases,
/// and is empty otherwise.
pub(crate) fn lease_protocol_variable(are_vmms: bool) -> (&'static str, String) {
    let version = are_vmms.then(|| VERSION.to_string());
    (LEASE_PROTOCOL_VARIABLE, version.unwrap_or_default())
}

/// Returns an error if the predecessor's VMMs speak another version. Earlier releases set no version.
fn check_lease_protocol(version: &str) -> Result<(), PredecessorError> {
    if version.is_empty() || version.parse::<u32>() == Ok(VERSION) {
        return Ok(());
    }
    let version = version.to_owned();
    Err(PredecessorError::LeaseProtocol { version })
}

/// The predecessor after it has handed its functions over. Its process may still run.
#[derive(Debug)]
pub(super) struct ReleasedPredecessor {
    socket: UnixStream,
    pidfd: OwnedFd,
    notified: Once,
}

impl ReleasedPredecessor {
    #[cfg(test)]
    pub(super) fn with_pidfd(process: OwnedFd) -> (Self, UnixStream) {
        let (socket, theirs) = UnixStream::pair().unwrap();
        let leaving = Self {
            socket,
            pidfd: process,
            notified: Once::new(),
        };
        (leaving, theirs)
    }

    /// Returns whether the predecessor had this process id.
    pub(super) fn has_pid(&self, number: u32) -> bool {
        let credentials = getsockopt(&self.socket, PeerCredentials);
        credentials.is_ok_and(|peer| u32::try_from(peer.pid()) == Ok(number))
    }

    /// Tells the predecessor that this process serves all functions that can be restored while the predecessor runs.
    pub(super) fn dismiss(&self) {
        self.notified.call_once(|| {
            // The predecessor may have ended.
            let _ = (&self.socket).write_all(&[SERVING]);
        });
    }

    /// Waits until the predecessor has ended.
    pub(super) fn await_end(&self) -> io::Result<()> {
        let mut ends = [rustix::event::PollFd::new(
            &self.pidfd,
            rustix::event::PollFlags::IN,
        )];
        let waited = rustix::io::retry_on_intr(|| rustix::event::poll(&mut ends, None));
        waited.map(drop).map_err(io::Error::from)
    }
}

/// Error of an upgrade, after which this server continues.
#[derive(Debug, Error)]
pub(crate) enum UpgradeError {
    /// The server has no supervisor.
    #[error(
        "The server has no supervisor, so VMs would lose their drives: start it by `nvme-mpt supervise`, or by systemd with \
         resources/nvme-mpt.service"
    )]
    NoSupervisor,
    /// The next server cannot be started.
    #[error("The next server cannot be started")]
    Start(#[from] SuperviseError),
    /// The successor ended before it was ready.
    #[error("The next server ended with {0} before it could take over; see the log")]
    Ended(String),
    /// The successor reported that it cannot take over.
    #[error("The next server cannot take over, so this one continues: {0}")]
    Failed(String),
    /// Landlock forbids executing the successor's program.
    #[error(transparent)]
    Landlock(#[from] LandlockRefusal),
    /// The successor has not sent [`READY`] in time.
    #[error("The next server is not ready after {} seconds", READY_TIMEOUT.as_secs())]
    Late,
    /// The server was asked to end during the upgrade.
    #[error("The server ends")]
    Ending,
    /// A function could not be paused.
    #[error(
        "Function {id} on {drive} cannot be handed over: {reason}. Nothing has changed; upgrade again once its drive answers"
    )]
    Function {
        /// The function.
        id: String,
        /// Its drive.
        drive: String,
        /// Cause.
        reason: String,
    },
    /// A lease has in-flight commands that would keep this process from ending.
    #[error(
        "The drive of lease {0} has commands in flight, and no server can take over before they have ended. Nothing has \
         changed; upgrade again once the drive answers"
    )]
    Lease(String),
    /// A drive is no longer at its path, so the successor would not find it there.
    #[error(
        "{0}. The next server would not find it. Nothing has changed; move the drive back to its path, or remove its functions, \
         and upgrade again"
    )]
    Moved(String),
    /// The ledger cannot be read.
    #[error("Cannot find the leases that are ending")]
    Ledger(#[source] nvme_lease::LeaseError),
    /// The supervisor cannot be informed that the successor becomes the main process.
    #[error("Cannot announce the next server to the supervisor")]
    Supervisor(#[from] FdStoreError),
    /// Error of the socket to the successor.
    #[error("Cannot communicate with the next server")]
    Io(#[from] io::Error),
}

/// The process that is to replace this server. If this is dropped before the hand-over, the successor is killed and this server
/// continues.
#[derive(Debug)]
pub(crate) struct SuccessorProcess {
    socket: UnixStream,
    /// Process handle of the successor; `None` after the hand-over, because dropping the handle would kill the successor.
    process: Option<Child>,
    /// True if the successor has sent [`AWAITS_RELEASE`], so that it can restore functions before this process has ended.
    can_run_beside: bool,
}

impl SuccessorProcess {
    /// Starts a command as the successor.
    pub(crate) fn start(
        persistence: &ServerPersistence,
        first_stage: &[OsString],
        command: &[OsString],
        variables: &[(&str, String)],
    ) -> Result<Self, UpgradeError> {
        let (socket, theirs) = UnixStream::pair()?;
        let registry: &FdStoreRegistry = persistence.registry();
        // A new supervisor may have replaced the one that started this process.
        let supervisor = registry.client().env_variables();
        let variables = variables
            .iter()
            .map(|(name, value)| (*name, OsString::from(value)));
        let variables: Vec<_> = variables.chain(supervisor).collect();
        let process = registry.with_all_descriptors(REQUEST_LOG_NAME, |descriptors| {
            let mut all: Vec<(&str, BorrowedFd<'_>)> = descriptors;
            all.push((SOCKET_NAME, theirs.as_fd()));
            start_successor(first_stage, command, &variables, &all)
        })?;
        Ok(Self {
            socket,
            process: Some(process),
            can_run_beside: false,
        })
    }

    pub(crate) fn can_run_beside(&self) -> bool {
        self.can_run_beside
    }

    /// Returns the successor's process id.
    pub(crate) fn pid(&self) -> u32 {
        self.process.as_ref().map_or(0, Child::id)
    }

    /// Waits until the successor is ready. Returns an error as soon as `ends` returns true, since this server then has to end
    /// itself.
    pub(crate) fn await_ready(&mut self, ends: impl Fn() -> bool) -> Result<(), UpgradeError> {
        self.socket.set_read_timeout(Some(POLL_INTERVAL))?;
        let deadline = clock::monotonic() + READY_TIMEOUT;
        let mut words = [0; 2];
        loop {
            match self.socket.read(&mut words) {
                Ok(count) if count > 0 && words[0] == READY => {
                    self.can_run_beside = words == [READY, AWAITS_RELEASE];
                    return Ok(());
                }
                Ok(count) if count > 0 && words[0] == FAILED => {
                    return Err(self.read_failure(&words[1..count]));
                }
                Ok(_) => return Err(self.exit_error()),
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => {}
                    io::ErrorKind::ConnectionReset => return Err(self.exit_error()),
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

    /// Reads the rest of the text in which a successor explains why it cannot take over.
    fn read_failure(&mut self, first: &[u8]) -> UpgradeError {
        let mut reason = first.to_vec();
        // Reads until the successor ends, or the read timeout passes.
        let _ = (&self.socket).take(REASON_MAX).read_to_end(&mut reason);
        UpgradeError::Failed(String::from_utf8_lossy(&reason).into_owned())
    }

    fn exit_error(&mut self) -> UpgradeError {
        let status = self.process.as_mut().map(Child::wait);
        let status = status.and_then(Result::ok);
        UpgradeError::Ended(status.map_or("no status".to_owned(), |status| status.to_string()))
    }

    /// Hands all functions over to the successor. `paused_at` is the time at which the functions were asked to pause.
    /// Afterwards, this process must end without touching the stored state.
    pub(crate) fn hand_over(
        &mut self,
        persistence: &ServerPersistence,
        paused_at: Duration,
    ) -> Result<(), UpgradeError> {
        let store = persistence.registry().client();
        // The supervisor reads this message before it notices the end of either process, so it knows which of them is the main
        // process.
        store.notify(&format!("MAINPID={}", self.pid()))?;
        let paused_at = u64::try_from(paused_at.as_nanos()).unwrap_or(u64::MAX);
        let mut words = vec![ENDING];
        words.extend(paused_at.to_le_bytes());
        match self.socket.write_all(&words) {
            Ok(()) => {
                self.process = None;
                Ok(())
            }
            Err(error) => {
                // Tell the supervisor that this process is the main process again. Otherwise, it would treat the successor's
                // end as the server's end.
                store.notify(&format!("MAINPID={}", std::process::id()))?;
                Err(error.into())
            }
        }
    }

    /// Tells the successor that all leases are released. Returns once the successor serves its functions, has ended, or exceeds
    /// the timeout.
    pub(crate) fn announce_release(&mut self) -> io::Result<()> {
        self.socket.set_read_timeout(Some(SERVING_TIMEOUT))?;
        self.socket.write_all(&[RELEASED])?;
        let mut word = [0];
        self.socket.read_exact(&mut word)
    }
}

impl Drop for SuccessorProcess {
    fn drop(&mut self) {
        if let Some(mut process) = self.process.take() {
            // The successor may have ended already.
            let _ = process.kill();
            // A successor that is blocked on stuck storage dies only when the storage answers. If no thread can be started to
            // wait for this, the successor stays a zombie.
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

    /// Returns the message of a server that ends. `paused_at` is the time at which its functions began to quiesce.
    fn ends(paused_at: Duration) -> Vec<u8> {
        let mut words = vec![ENDING];
        let paused_at = u64::try_from(paused_at.as_nanos()).unwrap();
        words.extend(paused_at.to_le_bytes());
        words
    }

    #[test]
    fn a_successor_continues_while_a_released_server_still_runs() {
        let (mut server, socket) = UnixStream::pair().unwrap();
        // This test's own process, which does not end during the test, acts as the predecessor.
        let process = descriptor_of(getpid());
        let paused_at = Duration::from_nanos(7);
        server.write_all(&ends(paused_at)).unwrap();
        server.write_all(&[RELEASED]).unwrap();
        let (at, leaving) = PredecessorProcess {
            socket,
            pidfd: process,
        }
        .await_hand_over()
        .unwrap();
        assert_eq!(at, paused_at);
        leaving.dismiss();
        leaving.dismiss();
        drop(leaving);
        let mut sent = Vec::new();
        server.read_to_end(&mut sent).unwrap();
        assert_eq!(sent, [READY, AWAITS_RELEASE, SERVING]);
    }

    #[test]
    fn a_successor_waits_for_the_end_of_a_server_without_early_release() {
        let paused_at = Duration::from_nanos(7);
        // The first server ends before it has sent the time.
        for words in [vec![ENDING], ends(paused_at)] {
            let mut command = Command::new("cat");
            command.stdin(Stdio::piped()).stdout(Stdio::null());
            let mut child = command.spawn().unwrap();
            let process = descriptor_of(Pid::from_child(&child));
            let (mut server, socket) = UnixStream::pair().unwrap();
            server.write_all(&words).unwrap();
            server.shutdown(Shutdown::Write).unwrap();
            drop(child.stdin.take());
            let (at, _) = PredecessorProcess {
                socket,
                pidfd: process,
            }
            .await_hand_over()
            .unwrap();
            assert_eq!(at == paused_at, words.len() > 1);
            assert!(child.try_wait().unwrap().is_some(), "it has ended");
        }
    }

    #[test]
    fn a_takeover_fails_if_the_server_continues() {
        for words in [&b""[..], &[RELEASED][..]] {
            let (mut server, socket) = UnixStream::pair().unwrap();
            let process = descriptor_of(getpid());
            server.write_all(words).unwrap();
            server.shutdown(Shutdown::Write).unwrap();
            let refused = PredecessorProcess {
                socket,
                pidfd: process,
            }
            .await_hand_over()
            .unwrap_err();
            assert!(matches!(refused, PredecessorError::Continues), "{refused}");
        }
    }

    #[test]
    fn vmms_of_another_version_are_refused_before_the_server_ends() {
        for are_vmms in [false, true] {
            let (name, version) = lease_protocol_variable(are_vmms);
            assert_eq!(name, LEASE_PROTOCOL_VARIABLE);
            assert_eq!(version.is_empty(), !are_vmms);
            check_lease_protocol(&version).unwrap();
        }
        for version in [VERSION - 1, VERSION + 1] {
            let refused = check_lease_protocol(&version.to_string()).unwrap_err();
            let versions = format!(
                "version {version} of the lease protocol, but this server speaks version {VERSION}"
            );
            assert!(refused.to_string().contains(&versions), "{refused}");
        }
        check_lease_protocol("four").unwrap_err();
    }

    #[test]
    fn available_resources_allow_an_upgrade() {
        let requirements = SuccessorRequirements {
            descriptors: 3,
            has_untrusted_vectors: true,
        };
        try_resources(&[requirements; 4]).unwrap();
    }

    /// Returns a successor that has sent `words`, and its end of the socket.
    fn successor(words: &[u8]) -> (SuccessorProcess, UnixStream) {
        let (socket, mut theirs) = UnixStream::pair().unwrap();
        theirs.write_all(words).unwrap();
        let successor = SuccessorProcess {
            socket,
            process: None,
            can_run_beside: false,
        };
        (successor, theirs)
    }

    #[test]
    fn a_successor_of_an_earlier_release_needs_the_end_of_the_server() {
        for (words, runs_beside) in [(&[READY][..], false), (&[READY, AWAITS_RELEASE][..], true)] {
            let (mut successor, _theirs) = successor(words);
            successor.await_ready(|| false).unwrap();
            assert_eq!(successor.can_run_beside(), runs_beside);
        }
        let (mut other, _theirs) = successor(b"x");
        let refused = other.await_ready(|| false).unwrap_err();
        assert!(matches!(refused, UpgradeError::Ended(_)), "{refused}");
    }

    #[test]
    fn a_failed_successor_reports_the_reason() {
        let (mut successor, theirs) = successor(b"");
        FailureReport(theirs).send("There is no room");
        let refused = successor.await_ready(|| false).unwrap_err();
        let message = "The next server cannot take over, so this one continues: There is no room";
        assert_eq!(refused.to_string(), message);
    }

    #[test]
    fn a_released_server_runs_until_its_successor_serves() {
        let (mut successor, mut theirs) = successor(&[SERVING]);
        successor.announce_release().unwrap();
        let mut word = [0];
        theirs.read_exact(&mut word).unwrap();
        assert_eq!(word, [RELEASED]);
        // The successor has ended.
        drop(theirs);
        successor.announce_release().unwrap_err();
    }
}
