//! A server that is replaced by another process while it runs.
//!
//! | step | the server | its successor |
//! |---|---|---|
//! | 1 | starts the successor, with all that is in the keeper and a socket | checks its configuration and all states; says that it is ready |
//! | 2 | has all functions rest, names the successor to the keeper, says that it ends | waits |
//! | 3 | ends | sees the end, and goes on as after a crash |
//!
//! Until step 2 is done, the server goes on if its successor ends, is late or cannot read a state. From then on, the
//! successor is what the keeper starts again after its death.

use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::Child;
use std::time::Duration;

use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerCredentials;
use nvme_mpt::clock;
use nvme_mpt::memory::system;
use nvme_mpt_keep::{Inherited, KeepError, KeeperError, start_successor};
use thiserror::Error;

use super::function::{SurvivorError, check_state};
use super::registry::Registry;
use super::{KEEPER_PATIENCE, Keeping};
use crate::confine::LandlockRefusal;

/// Name of the successor's end of the socket.
const SOCKET: &str = "predecessor";

/// Name of the journals that a successor may read at once.
const JOURNAL: &str = "journal";

/// Word of a successor that can take over.
const READY: u8 = b'r';

/// Word of a server that ends for its successor. The moment at which its functions were asked to rest follows, in
/// nanoseconds.
const ENDS: u8 = b'e';

/// Longest wait for a successor to become ready.
const PATIENCE: Duration = Duration::from_secs(30);

/// Time between two looks at what a server waits for.
const LOOK: Duration = Duration::from_millis(100);

/// A server does not take another one's place.
#[derive(Debug, Error)]
pub enum PredecessorError {
    /// A state cannot be read.
    #[error("The state of a function cannot be taken over, so the server before goes on")]
    State(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The server before is not replaced after all.
    #[error("The server before goes on without this one, or has died and is started again")]
    GoesOn,
    /// The kernel's error.
    #[error("The end of the server before cannot be seen")]
    Io(#[from] io::Error),
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
        let socket = UnixStream::from(socket);
        let unreadable = |error: SurvivorError| PredecessorError::State(Box::new(error));
        for journal in journals {
            check_state(journal).map_err(unreadable)?;
        }
        let credentials = getsockopt(&socket, PeerCredentials).map_err(io::Error::from)?;
        let process = rustix::process::Pid::from_raw(credentials.pid());
        let process = process.ok_or(PredecessorError::GoesOn)?;
        let process = rustix::process::pidfd_open(process, rustix::process::PidfdFlags::empty());
        let process = process.map_err(io::Error::from)?;
        Ok(Some(Self { socket, process }))
    }

    /// Tells it that this process can take over, and waits until it has ended. Returns the moment at which its functions were
    /// asked to rest, by the clock of the host.
    pub(super) fn await_end(mut self) -> Result<Duration, PredecessorError> {
        self.socket.write_all(&[READY])?;
        let mut word = [0];
        match self.socket.read_exact(&mut word) {
            Ok(()) if word == [ENDS] => {}
            _ => return Err(PredecessorError::GoesOn),
        }
        let told = system::host_time();
        let mut rested = [0; 8];
        // A server of an earlier release says no more than the word.
        let rested = match self.socket.read_exact(&mut rested) {
            Ok(()) => Duration::from_nanos(u64::from_le_bytes(rested)),
            Err(_) => told,
        };
        let mut ends = [rustix::event::PollFd::new(
            &self.process,
            rustix::event::PollFlags::IN,
        )];
        rustix::io::retry_on_intr(|| rustix::event::poll(&mut ends, None))
            .map_err(io::Error::from)?;
        Ok(rested)
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
    #[error("Function {id} cannot be handed over: {reason}")]
    Function {
        /// The function.
        id: String,
        /// Why.
        reason: String,
    },
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
        let process = registry.pass_on(JOURNAL, |descriptors| {
            let mut all: Vec<(&str, BorrowedFd<'_>)> = descriptors;
            all.push((SOCKET, theirs.as_fd()));
            start_successor(first_stage, command, variables, &all)
        })?;
        Ok(Self {
            socket,
            process: Some(process),
        })
    }

    /// Number of its process.
    pub(crate) fn number(&self) -> u32 {
        self.process.as_ref().map_or(0, Child::id)
    }

    /// Waits until it can take over, unless `ends` says that this server is to end.
    pub(crate) fn await_ready(&mut self, ends: impl Fn() -> bool) -> Result<(), UpgradeError> {
        self.socket.set_read_timeout(Some(LOOK))?;
        let deadline = clock::monotonic() + PATIENCE;
        let mut word = [0];
        loop {
            match self.socket.read(&mut word) {
                Ok(1) if word == [READY] => return Ok(()),
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

    fn ended(&mut self) -> UpgradeError {
        let status = self.process.as_mut().map(Child::wait);
        let status = status.and_then(Result::ok);
        UpgradeError::Ended(status.map_or("no status".to_owned(), |status| status.to_string()))
    }

    /// Hands over to it, as all functions rest that were asked to at `rested`. After that this process has to end at once:
    /// nothing of it may touch what is kept.
    pub(crate) fn hand_over(
        &mut self,
        keeping: &Keeping,
        rested: Duration,
    ) -> Result<(), UpgradeError> {
        let store = keeping.registry().store();
        store.notify(&format!("MAINPID={}", self.number()))?;
        let named = store.barrier(KEEPER_PATIENCE).map_err(UpgradeError::from);
        let rested = u64::try_from(rested.as_nanos()).unwrap_or(u64::MAX);
        let mut words = vec![ENDS];
        words.extend(rested.to_le_bytes());
        let told = named.and_then(|()| Ok(self.socket.write_all(&words)?));
        match told {
            Ok(()) => self.process = None,
            // The keeper is not to take the successor's end for this server's.
            Err(_) => store.notify(&format!("MAINPID={}", std::process::id()))?,
        }
        told
    }
}

impl Drop for Successor {
    fn drop(&mut self) {
        if let Some(mut process) = self.process.take() {
            // It may have ended by itself.
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}
