//! The supervisor's process: starts a command, stores the command's descriptors, and restarts the command after a crash.
#![expect(unsafe_code, reason = "close_range and signal have no safe interface")]

use std::collections::VecDeque;
use std::error::Error;
use std::ffi::OsString;
use std::fs::Permissions;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, ExitStatus};
use std::time::{Duration, Instant};

use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, retry_on_intr};
use rustix::net::RecvFlags;
use rustix::process::{Pid, Resource, WaitOptions, getrlimit, setrlimit, wait, waitpid};
use tempfile::TempDir;

use crate::datagram::{self, ReceivedDatagram};
use crate::error::SuperviseError;
use crate::fd_store_client::is_valid_name;
use crate::first_stage;
use crate::inherited_descriptors::clear_env;
use crate::stored_descriptors::{FdStoreRefusal, StoredDescriptors};
use crate::supervised_process::{SupervisedProcess, is_descendant};

/// Maximum size of a message in bytes (systemd's `NOTIFY_BUFFER_MAX`).
const MESSAGE_MAX: usize = 4096;

/// Number of descriptors that the supervisor needs besides the stored ones: the maximum of one message, and 64 for files and
/// sockets that are always open.
const OWN_DESCRIPTORS: usize = datagram::DESCRIPTORS_MAX + 64;

/// Name of descriptors that a message stores without a name, as in systemd.
const DEFAULT_NAME: &str = "stored";

/// Exit code of a command with wrong arguments. The command is not restarted, since it would fail in the same way.
const USAGE_EXIT_CODE: i32 = 2;

/// Signals that the supervisor forwards.
const FORWARDED_SIGNALS: [Signal; 3] = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP];

/// Signals whose default action would end or stop the supervisor, and which it ignores. The processes that it starts inherit
/// this.
const IGNORED_SIGNALS: [Signal; 12] = [
    Signal::SIGALRM,
    Signal::SIGIO,
    Signal::SIGPIPE,
    Signal::SIGPROF,
    Signal::SIGPWR,
    Signal::SIGTTIN,
    Signal::SIGTTOU,
    Signal::SIGUSR1,
    Signal::SIGUSR2,
    Signal::SIGVTALRM,
    Signal::SIGXCPU,
    Signal::SIGXFSZ,
];

/// Options of a supervisor.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct SuperviseOptions {
    /// First arguments of [`Self::program`], which make it call [`run_first_stage`](crate::run_first_stage) with the
    /// arguments that follow.
    pub first_stage: Vec<OsString>,
    /// Program of the first stage; by default, this process's executable.
    pub program: PathBuf,
    /// Maximum number of stored descriptors (`FDSTORE`). A low `RLIMIT_NOFILE` reduces the maximum.
    pub store_max: u16,
    /// Number of deaths of the command within a minute after which the supervisor ends instead of restarting the command.
    pub max_deaths: usize,
    /// Delay before the restart after the second death within a minute.
    pub first_delay: Duration,
}

/// Default of [`SuperviseOptions::first_delay`].
const FIRST_DELAY: Duration = Duration::from_millis(100);

impl SuperviseOptions {
    /// Returns the defaults: 4096 descriptors, 10 deaths, 100 ms.
    #[must_use]
    pub fn new(first_stage: Vec<OsString>) -> Self {
        Self {
            first_stage,
            program: "/proc/self/exe".into(),
            store_max: 4096,
            max_deaths: 10,
            first_delay: FIRST_DELAY,
        }
    }
}

/// Returns a process's exit code; 128 plus the signal's number if a signal ended the process.
#[must_use]
pub fn exit_code(status: ExitStatus) -> ExitCode {
    let signal = status.signal().map(|signal| 128 + signal);
    let code = status.code().or(signal).unwrap_or(1);
    ExitCode::from(u8::try_from(code).unwrap_or(1))
}

/// Runs a command, stores descriptors for it, and restarts it if it dies.
///
/// The supervisor forwards SIGTERM, SIGINT and SIGHUP to the command's main process. The function returns that process's
/// status if
///
/// - the supervisor was asked to end by SIGTERM or SIGINT,
/// - the process ended with 0, or with 2 (wrong arguments), or
/// - no process of the command was ever ready (`READY=1`).
///
/// Otherwise, the command is restarted: at once after its first death within a minute, then after
/// [`SuperviseOptions::first_delay`], and after twice the delay for each further death, up to 5 s. The command's process
/// can make another process the main process by `MAINPID=`. Before a restart, the supervisor ends former main processes by
/// SIGKILL, so that two never run at the same time.
///
/// Call this in a process whose other threads block these signals, before it starts any other process. The supervisor
/// blocks signals, adopts orphans, collects all children, sets close-on-exec for all descriptors, and raises
/// `RLIMIT_NOFILE` to its maximum.
///
/// # Errors
///
/// The command died too often or cannot be started, or the kernel refuses an operation.
pub fn supervise(
    options: &SuperviseOptions,
    command: &[OsString],
) -> Result<ExitStatus, SuperviseError> {
    ServerSupervisor::new(options, command)?.run()
}

/// Runs a supervisor for a running process of `command` whose previous supervisor has ended. When the process dies, the
/// supervisor starts `command`.
///
/// `number` is the id of that process. `ask` asks the process to use this supervisor. The arguments of `ask` are the
/// supervisor's address (`NOTIFY_SOCKET`) and the maximum number of stored descriptors (`FDSTORE`). The process must send
/// no message to the supervisor before `ask` has returned.
///
/// The supervisor is not the parent of this process and cannot collect its status. So the supervisor treats the end as
/// successful if the process announced it (`STOPPING=1`).
///
/// # Errors
///
/// See [`supervise`]; also the error of `ask`.
pub fn adopt<E: Error + Send + Sync + 'static>(
    options: &SuperviseOptions,
    command: &[OsString],
    number: u32,
    ask: impl FnOnce(&Path, u64) -> Result<(), E>,
) -> Result<ExitStatus, SuperviseError> {
    let mut supervisor = ServerSupervisor::new(options, command)?;
    // Open the process before `ask`: after that call, the process may end at any time and its number may be reused.
    let pid = i32::try_from(number).ok().and_then(Pid::from_raw);
    let process = pid.ok_or(Errno::SRCH).and_then(SupervisedProcess::open);
    let process = process.map_err(|error| SuperviseError::system("watch the server", error))?;
    let max = supervisor.stored.max() as u64;
    ask(&socket_path(&supervisor.dir), max).map_err(|error| SuperviseError::Adopt(error.into()))?;
    log::info!("Process {number} is the main process now");
    supervisor.main = Some(process);
    supervisor.was_ready = true;
    supervisor.start_at = None;
    supervisor.run()
}

struct ServerSupervisor<'a> {
    options: &'a SuperviseOptions,
    command: &'a [OsString],
    /// Directory that only this user may enter, so that only this user's processes can send messages.
    dir: TempDir,
    socket: UnixDatagram,
    signals: SignalFd,
    stored: StoredDescriptors,
    main: Option<SupervisedProcess>,
    /// Id of the main process if the latest check found that this process has ended.
    ended_main: Option<Pid>,
    /// Former main processes that have not ended.
    former_processes: Vec<SupervisedProcess>,
    deaths: RestartLimiter,
    /// Time at which the command is to be started; `None` while there is a main process.
    start_at: Option<Instant>,
    /// Set once a process of the command has reported `READY=1`.
    was_ready: bool,
    /// Set once the main process has announced its end (`STOPPING=1`).
    is_stopping: bool,
    /// Set once the supervisor was asked to end.
    should_end: bool,
    /// Exit status of the main process that ended last.
    status: ExitStatus,
}

impl<'a> ServerSupervisor<'a> {
    fn new(options: &'a SuperviseOptions, command: &'a [OsString]) -> Result<Self, SuperviseError> {
        if command.is_empty() {
            return Err(SuperviseError::NoCommand);
        }
        prepare_process()?;
        let wanted = usize::from(options.store_max);
        let limit = getrlimit(Resource::Nofile).current;
        let store_max = max_storable(wanted, limit);
        if store_max < wanted {
            log::warn!(
                "At most {store_max} descriptors are stored, not {wanted}, as RLIMIT_NOFILE allows no more: raise it"
            );
        }
        let mut mask: SigSet = FORWARDED_SIGNALS.into_iter().collect();
        mask.add(Signal::SIGCHLD);
        let blocked = mask.thread_block();
        blocked.map_err(|error| SuperviseError::system("block signals", error))?;
        let signals = SignalFd::with_flags(&mask, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)
            .map_err(|error| SuperviseError::system("receive signals", error))?;
        let dir = tempfile::Builder::new()
            .prefix("nvme-mpt-supervise-")
            .permissions(Permissions::from_mode(0o700))
            .tempdir()
            .map_err(|error| SuperviseError::system("make a directory for its socket", error))?;
        let socket = UnixDatagram::bind(socket_path(&dir))
            .map_err(|error| SuperviseError::system("make its socket", error))?;
        Ok(Self {
            options,
            command,
            dir,
            socket,
            signals,
            stored: StoredDescriptors::new(store_max),
            main: None,
            ended_main: None,
            former_processes: Vec::new(),
            deaths: RestartLimiter::new(options.max_deaths, options.first_delay),
            start_at: Some(now()),
            was_ready: false,
            is_stopping: false,
            should_end: false,
            status: ExitStatus::default(),
        })
    }

    fn run(mut self) -> Result<ExitStatus, SuperviseError> {
        loop {
            if self.start_at.is_some_and(|at| at <= now()) {
                self.start()?;
            }
            self.wait()?;
            // The end is checked before the messages are read, so that all messages of an ended process are seen.
            let main = self.main.as_ref();
            self.ended_main = main.filter(|main| main.has_ended()).map(|main| main.pid);
            self.read_messages();
            self.forward_signals()?;
            self.former_processes.retain(|process| !process.has_ended());
            self.reap_children();
            if self.has_main_ended() {
                // When a former main process ends, its children become children of the supervisor. The main process may be such
                // a child.
                for former_process in &self.former_processes {
                    former_process.signal(rustix::process::Signal::KILL);
                }
                if self.former_processes.is_empty()
                    && let Some(status) = self.handle_main_end()?
                {
                    return Ok(status);
                }
            }
            if self.should_end && self.main.is_none() {
                return Ok(self.status);
            }
        }
    }

    /// Returns whether the latest check found that the main process has ended.
    fn has_main_ended(&self) -> bool {
        let main = self.main.as_ref().map(|main| main.pid);
        main.is_some() && main == self.ended_main
    }

    /// Waits until there is a message, a signal, the end of a process, or until the next start of the command is due.
    fn wait(&self) -> Result<(), SuperviseError> {
        let mut events = vec![
            PollFd::new(&self.socket, PollFlags::IN),
            PollFd::new(&self.signals, PollFlags::IN),
        ];
        // Once the main process has ended, only former main processes are awaited.
        let main = self.main.iter().filter(|_| !self.has_main_ended());
        let processes = self.former_processes.iter().chain(main);
        events.extend(processes.map(|process| PollFd::new(process, PollFlags::IN)));
        let time = self.start_at.map(|at| {
            let left = at.saturating_duration_since(now());
            // The casts lose nothing: the delay is at most a minute.
            let (tv_sec, tv_nsec) = (left.as_secs() as i64, left.subsec_nanos().into());
            Timespec { tv_sec, tv_nsec }
        });
        let waited = retry_on_intr(|| poll(&mut events, time.as_ref()));
        waited
            .map(drop)
            .map_err(|error| SuperviseError::system("wait", error))
    }

    fn start(&mut self) -> Result<(), SuperviseError> {
        let SuperviseOptions {
            first_stage,
            program,
            ..
        } = self.options;
        let mut command = Command::new(program);
        clear_env(&mut command);
        command
            .args(first_stage)
            .args(self.command)
            .env("NOTIFY_SOCKET", socket_path(&self.dir))
            .env("FDSTORE", self.stored.max().to_string())
            // A separate process group: a terminal's SIGINT reaches only the supervisor, which forwards it once.
            .process_group(0);
        let stored: Vec<_> = self.stored.descriptors().map(AsFd::as_fd).collect();
        let started = first_stage::start(&mut command, self.stored.names(), &stored)?;
        let process = SupervisedProcess::open(Pid::from_child(&started.child));
        let process =
            process.map_err(|error| SuperviseError::system("start the command", error))?;
        log::info!(
            "Started {:?} as process {}, with {} stored descriptors",
            self.command[0],
            process.pid.as_raw_pid(),
            stored.len()
        );
        self.start_at = None;
        self.is_stopping = false;
        self.main = Some(process);
        if let Err(error) = started.send_result {
            // The first stage fails without all descriptors, which counts as a death.
            log::error!("Cannot pass stored descriptors on: {error}");
        }
        Ok(())
    }

    /// Handles the end of the main process. Returns the process's status if the supervisor must end as well.
    fn handle_main_end(&mut self) -> Result<Option<ExitStatus>, SuperviseError> {
        let Some(main) = self.main.take() else {
            return Ok(None);
        };
        // The status of a process that is not the supervisor's child is unknown: its parent collected it.
        let unknown = match self.is_stopping {
            true => ExitStatus::default(),
            false => ExitStatus::from_raw(1 << 8),
        };
        self.status = main.status.unwrap_or(unknown);
        let (status, pid) = (self.status, main.pid.as_raw_pid());
        if self.should_end || status.success() {
            log::info!("Process {pid} ended with {status}");
            return Ok(Some(status));
        }
        if !self.was_ready || status.code() == Some(USAGE_EXIT_CODE) {
            let reason = match self.was_ready {
                true => "Its arguments are wrong",
                false => "It was never ready",
            };
            log::error!("Process {pid} ended with {status}. {reason}: it is not started again");
            return Ok(Some(status));
        }
        let now = now();
        let Some(delay) = self.deaths.record_death(now) else {
            return Err(SuperviseError::GaveUp {
                command: self.command[0].clone(),
                deaths: self.options.max_deaths,
                status,
            });
        };
        log::warn!("Process {pid} ended with {status}, and is started again after {delay:?}");
        self.start_at = Some(now + delay);
        Ok(None)
    }

    fn forward_signals(&mut self) -> Result<(), SuperviseError> {
        loop {
            let read = self.signals.read_signal();
            let Some(came) =
                read.map_err(|error| SuperviseError::system("read a signal", error))?
            else {
                return Ok(());
            };
            let signal = match came.ssi_signo as i32 {
                libc::SIGTERM => rustix::process::Signal::TERM,
                libc::SIGINT => rustix::process::Signal::INT,
                libc::SIGHUP => rustix::process::Signal::HUP,
                _ => continue,
            };
            self.should_end |= signal != rustix::process::Signal::HUP;
            if let Some(main) = &self.main {
                log::info!("Passing {signal:?} on to process {}", main.pid.as_raw_pid());
                main.signal(signal);
            }
        }
    }

    /// Collects children that have ended: main processes and orphans.
    ///
    /// Before the supervisor collects a process, it reads the pending messages. One of them may be a `MAINPID=` for that
    /// process, which the process's former parent sent before the parent ended.
    fn reap_children(&mut self) {
        let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
        loop {
            let ended = match waitid(Id::All, flags) {
                Ok(WaitStatus::StillAlive) | Err(nix::errno::Errno::ECHILD) => return,
                Ok(status) => status.pid(),
                // nix cannot decode real-time signals, which may end a process as well.
                Err(_) => None,
            };
            self.read_messages();
            let collected = match ended.and_then(|pid| Pid::from_raw(pid.as_raw())) {
                Some(pid) => waitpid(Some(pid), WaitOptions::NOHANG),
                None => wait(WaitOptions::NOHANG),
            };
            let Ok(Some((pid, status))) = collected else {
                return;
            };
            if let Some(main) = self.main.as_mut().filter(|main| main.pid == pid) {
                main.status = Some(ExitStatus::from_raw(status.as_raw()));
            }
        }
    }

    fn read_messages(&mut self) {
        let mut buffer = [0; MESSAGE_MAX];
        loop {
            match datagram::receive(&self.socket, &mut buffer, RecvFlags::DONTWAIT) {
                Ok(ReceivedDatagram {
                    is_truncated: true, ..
                }) => {
                    log::warn!("A message lost bytes or descriptors, and is ignored");
                }
                Ok(ReceivedDatagram {
                    bytes, descriptors, ..
                }) => match str::from_utf8(&buffer[..bytes]) {
                    Ok(text) => self.process_message(text, descriptors),
                    Err(_) => log::warn!("A message is not text, and is ignored"),
                },
                Err(Errno::AGAIN) => return,
                Err(error) => {
                    log::error!("Cannot read messages: {error}");
                    return;
                }
            }
        }
    }

    /// Processes a message, and closes descriptors that are not stored. Closing the descriptor of a `BARRIER=1` message tells
    /// its sender that all earlier messages have been processed.
    fn process_message(&mut self, text: &str, descriptors: Vec<OwnedFd>) {
        let value = |name| {
            let mut lines = text.lines().filter_map(|line| line.split_once('='));
            lines
                .find(|(found, _)| *found == name)
                .map(|(_, value)| value)
        };
        let is_set = |name| value(name) == Some("1");
        if is_set("FDSTOREREMOVE") {
            match value("FDNAME") {
                Some(name) => self.stored.remove(name),
                None => log::warn!("FDSTOREREMOVE=1 came without FDNAME, and is ignored"),
            }
        } else if is_set("FDSTORE") {
            let name = value("FDNAME")
                .filter(|name| is_valid_name(name))
                .unwrap_or(DEFAULT_NAME);
            for descriptor in descriptors {
                self.store_descriptor(name, descriptor);
            }
        }
        if let Some(pid) = value("MAINPID") {
            self.change_main(pid);
        }
        if is_set("READY") {
            self.was_ready = true;
            log::info!("{:?} is ready", self.command[0]);
        }
        if is_set("STOPPING") {
            self.is_stopping = true;
            log::info!("{:?} is stopping", self.command[0]);
        }
        if let Some(status) = value("STATUS") {
            log::info!("{:?}: {}", self.command[0], status.escape_debug());
        }
    }

    fn store_descriptor(&mut self, name: &str, descriptor: OwnedFd) {
        let reason = match self.stored.add(name, descriptor) {
            Ok(()) => return,
            Err(FdStoreRefusal::Duplicate) => {
                log::debug!("A descriptor named {name:?} is stored already");
                return;
            }
            Err(FdStoreRefusal::Full) => "the store is full",
            Err(FdStoreRefusal::NamesTooLong) => "the names of all descriptors are too long",
        };
        let max = self.stored.max();
        log::error!(
            "A descriptor named {name:?} is not stored: {reason} (at most {max} descriptors)"
        );
    }

    fn change_main(&mut self, value: &str) {
        let pid = value
            .parse()
            .ok()
            .filter(|pid| *pid > 0)
            .and_then(Pid::from_raw);
        if pid.is_some() && pid == self.main.as_ref().map(|main| main.pid) {
            return;
        }
        let process = pid.and_then(|pid| SupervisedProcess::open(pid).ok());
        // If the successor has already ended, it counts as a dead main process. So its command is restarted, and the
        // supervisor does not end together with the predecessor.
        let main = self.main.as_ref().map(|main| main.pid);
        // A former main process may become the main process again if its successor does not take over.
        let is_former = |pid| {
            self.former_processes
                .iter()
                .any(|former_process| former_process.pid == pid)
        };
        let process =
            process.filter(|process| is_former(process.pid) || is_descendant(process.pid, main));
        let Some(process) = process else {
            log::warn!(
                "MAINPID={value:?} does not name a process that descends from the supervisor, and is ignored"
            );
            return;
        };
        log::info!(
            "Process {} is the main process now",
            process.pid.as_raw_pid()
        );
        self.former_processes
            .retain(|former_process| former_process.pid != process.pid);
        if self.should_end {
            // SIGTERM was sent to the previous main process only, so send it to its successor as well.
            process.signal(rustix::process::Signal::TERM);
        }
        self.former_processes.extend(self.main.replace(process));
        self.start_at = None;
    }
}

/// Returns the number of descriptors that a supervisor can store, at most `wanted`. `limit` is the `RLIMIT_NOFILE`; `None`
/// means unlimited.
fn max_storable(wanted: usize, limit: Option<u64>) -> usize {
    let limit = limit.map_or(usize::MAX, |limit| {
        usize::try_from(limit).unwrap_or(usize::MAX)
    });
    wanted.min(limit.saturating_sub(OWN_DESCRIPTORS))
}

fn socket_path(dir: &TempDir) -> PathBuf {
    Path::new(dir.path()).join("notify")
}

/// Sets up signals, limits and descriptors of this process, which must not have started children yet.
fn prepare_process() -> Result<(), SuperviseError> {
    nix::sys::prctl::set_child_subreaper(true)
        .map_err(|error| SuperviseError::system("adopt orphans", error))?;
    for signal in IGNORED_SIGNALS {
        // SAFETY: no handler is called for a signal that is ignored.
        unsafe { nix::sys::signal::signal(signal, nix::sys::signal::SigHandler::SigIgn) }
            .map_err(|error| SuperviseError::system("ignore signals", error))?;
    }
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    setrlimit(Resource::Nofile, limit)
        .map_err(|error| SuperviseError::system("raise RLIMIT_NOFILE", error))?;
    let (first, last) = (
        crate::inherited_descriptors::LISTEN_FDS_START as libc::c_uint,
        libc::c_uint::MAX,
    );
    let flags = libc::CLOSE_RANGE_CLOEXEC;
    // SAFETY: the call takes numbers alone, and closes nothing in this process.
    match unsafe { libc::syscall(libc::SYS_close_range, first, last, flags) } {
        0 => Ok(()),
        _ => {
            let error = io::Error::last_os_error();
            Err(SuperviseError::system(
                "set close-on-exec for its descriptors",
                error,
            ))
        }
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "the supervisor is a process of its own, which no simulator runs"
)]
fn now() -> Instant {
    Instant::now()
}

/// Deaths of the command within the last minute.
struct RestartLimiter {
    max: usize,
    first_delay: Duration,
    times: VecDeque<Instant>,
}

impl RestartLimiter {
    const WINDOW: Duration = Duration::from_secs(60);
    const DELAY_MAX: Duration = Duration::from_secs(5);

    fn new(max: usize, first_delay: Duration) -> Self {
        let times = VecDeque::new();
        Self {
            max,
            first_delay,
            times,
        }
    }

    /// Records a death. Returns the delay before the restart; `None` after too many deaths.
    fn record_death(&mut self, now: Instant) -> Option<Duration> {
        self.times
            .retain(|time| now.duration_since(*time) < Self::WINDOW);
        self.times.push_back(now);
        match self.times.len() {
            count if count >= self.max => None,
            1 => Some(Duration::ZERO),
            count => {
                let by = u32::try_from(count - 2).unwrap_or(u32::MAX);
                let factor = 1_u32.checked_shl(by).unwrap_or(u32::MAX);
                Some(self.first_delay.saturating_mul(factor).min(Self::DELAY_MAX))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_grow_up_to_five_seconds_and_the_tenth_death_is_the_last() {
        let mut deaths = RestartLimiter::new(10, FIRST_DELAY);
        let start = now();
        let delays: Vec<_> = (0..10).map(|_| deaths.record_death(start)).collect();
        let expected = [0, 100, 200, 400, 800, 1600, 3200, 5000, 5000];
        let expected = expected.map(|delay| Some(Duration::from_millis(delay)));
        assert_eq!(delays[..9], expected);
        assert_eq!(delays[9], None);
    }

    #[test]
    fn a_death_counts_for_a_minute() {
        let mut deaths = RestartLimiter::new(3, FIRST_DELAY);
        let start = now();
        let seconds = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(deaths.record_death(seconds(0)), Some(Duration::ZERO));
        assert_eq!(
            deaths.record_death(seconds(59)),
            Some(Duration::from_millis(100))
        );
        assert_eq!(
            deaths.record_death(seconds(60)),
            Some(Duration::from_millis(100))
        );
        assert_eq!(deaths.record_death(seconds(61)), None);
        assert_eq!(deaths.record_death(seconds(600)), Some(Duration::ZERO));
        let mut patient = RestartLimiter::new(usize::MAX, FIRST_DELAY);
        let delays: Vec<_> = (0..70)
            .filter_map(|_| patient.record_death(start))
            .collect();
        assert_eq!(delays[69], Duration::from_secs(5));
        let mut eager = RestartLimiter::new(usize::MAX, Duration::ZERO);
        let delays: Vec<_> = (0..70).filter_map(|_| eager.record_death(start)).collect();
        assert_eq!(delays[69], Duration::ZERO);
    }

    #[test]
    fn no_more_descriptors_are_stored_than_the_process_may_have() {
        assert_eq!(max_storable(4096, None), 4096);
        assert_eq!(max_storable(4096, Some(524_288)), 4096);
        assert_eq!(max_storable(4096, Some(1024)), 1024 - OWN_DESCRIPTORS);
        assert_eq!(max_storable(4096, Some(64)), 0);
    }

    #[test]
    fn the_exit_code_is_the_status_or_128_plus_the_signal() {
        let code = |raw| format!("{:?}", exit_code(ExitStatus::from_raw(raw)));
        assert_eq!(code(7 << 8), format!("{:?}", ExitCode::from(7)));
        assert_eq!(code(15), format!("{:?}", ExitCode::from(143)));
    }
}
