//! `nvme-mpt serve` as a child process, and the statistics that `nvme-mpt stats` prints of it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::thread;
use std::time::{Duration, Instant};

use serde::Deserialize;
use thiserror::Error;

use crate::lab::inside;
use crate::process::{self, ProcessError, Supervised};
use crate::programs;

/// Longest time that the server may take to listen, or to stop.
const PATIENCE: Duration = Duration::from_secs(300);

/// Longest time for which the server, or the thread of a function, may be held up.
const HELD_UP: Duration = Duration::from_secs(180);

/// Errors of the server.
#[derive(Debug, Error)]
pub enum ServerError {
    /// A process of ours failed.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// A file or folder for it can't be used.
    #[error("Cannot use {path}")]
    File {
        /// The path.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Error of a server that does not come up.
    #[error("nvme-mpt serve does not say that it is ready:\n{log}")]
    NotReady {
        /// The end of its log.
        log: String,
    },
    /// A client stays connected.
    #[error("A client is still connected to {path}, {patience:?} after it was killed")]
    Connected {
        /// The socket.
        path: PathBuf,
        /// Time that was waited.
        patience: Duration,
    },
    /// Error of a server that ended in another way than asked to.
    #[error("nvme-mpt serve ended badly ({status}):\n{log}")]
    Ended {
        /// Exit status.
        status: ExitStatus,
        /// The end of its log.
        log: String,
    },
    /// A keeper has no server, or several.
    #[error("The keeper, process {keeper}, has not one server but {kept:?}")]
    NotOne {
        /// Its process id.
        keeper: u32,
        /// Process ids of its children.
        kept: Vec<u32>,
    },
    /// A command with `--json` printed something else.
    #[error("Cannot read the output of `nvme-mpt {command} --json`: {source}\n{text}")]
    Output {
        /// The command.
        command: &'static str,
        /// Why.
        source: serde_json::Error,
        /// Its output.
        text: String,
    },
    /// A function that was asked for is not in the statistics.
    #[error("`nvme-mpt stats` knows no function '{id}'")]
    NoFunction {
        /// The function's id.
        id: String,
    },
    /// A drive that was asked for is not in the statistics.
    #[error("`nvme-mpt stats` knows no drive {path}")]
    NoDrive {
        /// Path by which it was opened.
        path: String,
    },
}

/// Builds the `nvme-mpt` command and returns where it lies. Inside the lab, it is there.
///
/// # Errors
/// If it doesn't build.
pub fn build() -> Result<PathBuf, ProcessError> {
    if inside::is_inside() {
        return Ok(inside::brought("nvme-mpt"));
    }
    programs::build("nvme-mpt", &["nvme-mpt"])?;
    Ok(crate::target_dir().join("release/nvme-mpt"))
}

/// A function to serve, in the words of the option string.
#[derive(Debug, Clone)]
pub struct FunctionOptions {
    /// Its name in the statistics.
    pub id: String,
    /// The store: a file, a block device, `memory:SIZE`, `null:SIZE`.
    pub path: String,
    /// `START+LENGTH`.
    pub range: String,
    /// More options, such as `doorbells=trap`.
    pub more: Vec<String>,
}

impl FunctionOptions {
    /// A function `id` on a `range` of `path`.
    pub fn new(id: &str, path: impl Into<String>, range: impl Into<String>) -> Self {
        Self {
            id: id.to_owned(),
            path: path.into(),
            range: range.into(),
            more: Vec::new(),
        }
    }

    /// A function `id` of a `size`, wherever `path` has room.
    pub fn by_size(id: &str, path: impl Into<String>, size: &str) -> Self {
        Self::new(id, path, "").option(format!("size={size}"))
    }

    /// Adds an option.
    #[must_use]
    pub fn option(mut self, option: impl Into<String>) -> Self {
        self.more.push(option.into());
        self
    }

    fn render(&self, socket: &Path) -> String {
        format!("socket={},{}", socket.display(), self.in_process())
    }

    /// Returns the option string with which a VMM takes the function into its own process.
    pub fn in_process(&self) -> String {
        let options = self.pairs().map(|(key, value)| format!("{key}={value}"));
        options.collect::<Vec<_>>().join(",")
    }

    /// Returns the options one by one, by their keys.
    pub fn pairs(&self) -> impl Iterator<Item = (&str, &str)> {
        let own = [
            ("id", &*self.id),
            ("path", &*self.path),
            ("range", &*self.range),
        ];
        let more = self.more.iter().filter_map(|option| option.split_once('='));
        own.into_iter()
            .filter(|(_, value)| !value.is_empty())
            .chain(more)
    }
}

/// End of a server that has a keeper.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Replacement {
    /// SIGKILL, as a crash would be.
    Kill,
    /// `nvme-mpt upgrade`.
    Upgrade,
}

/// Parent of a server's process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Parent {
    /// This process.
    Own,
    /// `nvme-mpt keep`, which starts the server again.
    Keeper,
}

/// A running `nvme-mpt serve`. Dropping it kills it.
#[derive(Debug)]
pub struct Server {
    binary: PathBuf,
    parent: Parent,
    folder: PathBuf,
    functions: Vec<FunctionOptions>,
    drives: Vec<String>,
    process: Supervised,
}

impl Server {
    /// Starts it and waits until every function's socket listens. `folder` gets the sockets, the
    /// ledger of the leases and the log.
    ///
    /// # Errors
    /// If it does not come up.
    pub fn start(
        binary: &Path,
        functions: &[FunctionOptions],
        folder: &Path,
    ) -> Result<Self, ServerError> {
        Self::start_under(Parent::Own, binary, functions, folder)
    }

    /// Starts it as [`Self::start`] does, under a keeper.
    ///
    /// # Errors
    /// If it does not come up.
    pub fn start_kept(
        binary: &Path,
        functions: &[FunctionOptions],
        folder: &Path,
    ) -> Result<Self, ServerError> {
        Self::start_under(Parent::Keeper, binary, functions, folder)
    }

    fn start_under(
        parent: Parent,
        binary: &Path,
        functions: &[FunctionOptions],
        folder: &Path,
    ) -> Result<Self, ServerError> {
        let state = state_dir(folder);
        fs::create_dir_all(&state).map_err(|source| ServerError::File {
            path: state,
            source,
        })?;
        let process = spawn(parent, binary, functions, &[], folder)?;
        let mut server = Self {
            binary: binary.to_owned(),
            parent,
            folder: folder.to_owned(),
            functions: functions.to_vec(),
            drives: Vec::new(),
            process,
        };
        server.await_ready()?;
        Ok(server)
    }

    /// Starts it with drives that it keeps open, and no function. Functions in VMMs find them.
    ///
    /// # Errors
    /// If it does not come up.
    pub fn holding(binary: &Path, drives: &[String], folder: &Path) -> Result<Self, ServerError> {
        let process = spawn(Parent::Own, binary, &[], drives, folder)?;
        let mut server = Self {
            binary: binary.to_owned(),
            parent: Parent::Own,
            folder: folder.to_owned(),
            functions: Vec::new(),
            drives: drives.to_vec(),
            process,
        };
        server.await_ready()?;
        Ok(server)
    }

    /// Returns the socket of the function `id`.
    pub fn socket(&self, id: &str) -> PathBuf {
        socket(&self.folder, id)
    }

    /// Returns the folder with its ledger, where VMMs find it.
    pub fn state_dir(&self) -> PathBuf {
        state_dir(&self.folder)
    }

    /// Returns the server's process id, or its keeper's.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Returns the end of its log.
    pub fn log_tail(&self) -> String {
        process::file_tail(self.process.log())
    }

    /// Its statistics, now.
    ///
    /// # Errors
    /// If they can't be had.
    pub fn stats(&self) -> Result<Stats, ServerError> {
        let text = self.ask(&["stats", "--json"])?;
        serde_json::from_str(&text).map_err(|source| ServerError::Output {
            command: "stats",
            source,
            text,
        })
    }

    /// Returns the statistics of one function, now.
    ///
    /// # Errors
    /// If they can't be had.
    pub fn function_stats(&self, id: &str) -> Result<FunctionStats, ServerError> {
        let deadline = Instant::now() + HELD_UP;
        loop {
            let functions = self.stats()?.functions;
            if let Some(found) = functions.into_iter().find(|function| function.id == id) {
                return Ok(found);
            }
            // One whose thread is held up is not reported.
            if Instant::now() >= deadline || !self.list()?.iter().any(|listed| listed == id) {
                return Err(ServerError::NoFunction { id: id.to_owned() });
            }
        }
    }

    /// Returns the statistics of one drive, now.
    ///
    /// # Errors
    /// If they can't be had.
    pub fn drive_stats(&self, path: &str) -> Result<DriveStats, ServerError> {
        self.stats()?
            .drives
            .into_iter()
            .find(|drive| drive.path == path)
            .ok_or_else(|| ServerError::NoDrive {
                path: path.to_owned(),
            })
    }

    /// Adds the faults of a plan to those of the drive at `path`.
    ///
    /// # Errors
    /// The server refuses them.
    pub fn inject_faults(&self, path: &str, plan: &str) -> Result<(), ServerError> {
        let file = self.folder.join("faults.toml");
        fs::write(&file, plan).map_err(|source| ServerError::File {
            path: file.clone(),
            source,
        })?;
        self.fault(|command| command.args(["inject", path]).arg(&file))
    }

    /// Returns the number of commands that faults of the drive at `path` struck so far.
    ///
    /// # Errors
    /// If it can't be had.
    pub fn struck(&self, path: &str) -> Result<u64, ServerError> {
        let text = self.ask(&["fault", "list", "--json"])?;
        let drives: Result<Vec<DriveFaults>, _> = serde_json::from_str(&text);
        let drives = drives.map_err(|source| ServerError::Output {
            command: "fault list",
            source,
            text,
        })?;
        let faults = drives.iter().filter(|drive| drive.drive == path);
        Ok(faults
            .flat_map(|drive| &drive.faults)
            .map(|fault| fault.struck)
            .sum())
    }

    /// Takes the faults of the drive at `path` away.
    ///
    /// # Errors
    /// The server refuses.
    pub fn clear_faults(&self, path: &str) -> Result<(), ServerError> {
        self.fault(|command| command.args(["clear", path]))
    }

    fn fault(&self, what: impl Fn(&mut Command) -> &mut Command) -> Result<(), ServerError> {
        let command = || {
            let mut command = Command::new(&self.binary);
            command
                .args(["fault", "--control"])
                .arg(control(&self.folder));
            what(&mut command);
            command
        };
        run_in_time(command).map(drop)
    }

    /// Adds a function. It is not among those of a [restart](Self::restart), as the server keeps it.
    ///
    /// # Errors
    /// The server refuses it.
    pub fn add(&self, function: &FunctionOptions) -> Result<(), ServerError> {
        let options = function.render(&self.socket(&function.id));
        self.ask(&["add", &options]).map(drop)
    }

    /// Removes a function.
    ///
    /// # Errors
    /// The server refuses, as a VMM is connected.
    pub fn remove(&self, id: &str) -> Result<(), ServerError> {
        self.ask(&["remove", id]).map(drop)
    }

    /// Changes the limits of a function.
    ///
    /// # Errors
    /// The server refuses.
    pub fn limit(&self, id: &str, limits: &str) -> Result<(), ServerError> {
        self.ask(&["limit", id, limits]).map(drop)
    }

    /// Changes the size of a function's lease, under its guest.
    ///
    /// # Errors
    /// The server refuses.
    pub fn resize(&self, id: &str, size: &str) -> Result<(), ServerError> {
        self.ask(&["resize", id, size]).map(drop)
    }

    /// Returns the ids of its functions.
    ///
    /// # Errors
    /// If they can't be had.
    pub fn list(&self) -> Result<Vec<String>, ServerError> {
        let text = self.ask(&["list", "--json"])?;
        let entries: Result<Vec<FunctionEntry>, _> = serde_json::from_str(&text);
        let entries = entries.map_err(|source| ServerError::Output {
            command: "list",
            source,
            text,
        })?;
        Ok(entries.into_iter().map(|entry| entry.id).collect())
    }

    fn ask(&self, arguments: &[&str]) -> Result<String, ServerError> {
        run_in_time(|| {
            let mut command = Command::new(&self.binary);
            command.args(arguments);
            command.arg("--control").arg(control(&self.folder));
            command
        })
    }

    /// Waits until no VMM is connected to the function `name`. The kernel may close the socket of a VMM that was
    /// killed after the process has ended: requests in an io_uring, which QEMU waits with, hold it a little longer.
    ///
    /// # Errors
    /// One stays connected.
    pub fn await_no_client(&self, name: &str) -> Result<(), ServerError> {
        // A connected socket's state in the list (proc_net_unix in Linux, net/unix/af_unix.c).
        const CONNECTED: &str = "03";
        let path = self.socket(name);
        let list = Path::new("/proc/net/unix");
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            let sockets = fs::read_to_string(list).map_err(|source| ServerError::File {
                path: list.to_owned(),
                source,
            })?;
            let is_connected = |line: &str| {
                let mut fields = line.split_whitespace().skip(5);
                fields.next() == Some(CONNECTED) && fields.nth(1).map(Path::new) == Some(&path)
            };
            if !sockets.lines().any(is_connected) {
                return Ok(());
            }
            thread::sleep(Duration::from_millis(20));
        }
        Err(ServerError::Connected {
            path,
            patience: PATIENCE,
        })
    }

    /// Kills it, as a crash would.
    pub fn kill(&mut self) {
        self.process.kill();
    }

    /// Starts it anew, on the same sockets and the same drive, after it has ended.
    ///
    /// # Errors
    /// If it does not come up.
    pub fn restart(&mut self) -> Result<(), ServerError> {
        let Self {
            binary,
            parent,
            functions,
            drives,
            folder,
            ..
        } = self;
        self.process = spawn(*parent, binary, functions, drives, folder)?;
        self.await_ready()
    }

    /// Has another process take its place under the keeper, and waits until that one serves.
    ///
    /// # Errors
    /// If it does not come up, or the server has no keeper.
    pub fn replace(&mut self, how: Replacement) -> Result<(), ServerError> {
        let served = self.readies();
        let pid = self.await_kept()?;
        match how {
            Replacement::Kill => {
                process::run(Command::new("kill").args(["-s", "KILL", &pid.to_string()]))?;
            }
            Replacement::Upgrade => drop(self.ask(&["upgrade"])?),
        }
        self.await_readies(served + 1)
    }

    /// Waits until the keeper has one server, and returns its process id. A server that was replaced may be about to
    /// end.
    fn await_kept(&mut self) -> Result<u32, ServerError> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let kept = self.kept();
            if let [pid] = kept[..] {
                return Ok(pid);
            }
            self.expect_alive()?;
            if Instant::now() >= deadline {
                let keeper = self.pid();
                return Err(ServerError::NotOne { keeper, kept });
            }
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Returns the process ids of the keeper's children.
    fn kept(&self) -> Vec<u32> {
        let keeper = self.pid();
        let path = format!("/proc/{keeper}/task/{keeper}/children");
        let children = fs::read_to_string(path).unwrap_or_default();
        children
            .split_whitespace()
            .filter_map(|pid| pid.parse().ok())
            .collect()
    }

    /// Stops it (SIGTERM) and sees that it ends well.
    ///
    /// # Errors
    /// If it does not end, or not with success.
    pub fn stop(&mut self) -> Result<(), ServerError> {
        let status = self.process.terminate(PATIENCE)?;
        if status.success() {
            return Ok(());
        }
        Err(ServerError::Ended {
            status,
            log: self.log_tail(),
        })
    }

    /// Checks that it still runs.
    ///
    /// # Errors
    /// If it has ended.
    pub fn expect_alive(&mut self) -> Result<(), ServerError> {
        match self.process.ended()? {
            None => Ok(()),
            Some(status) => Err(ServerError::Ended {
                status,
                log: self.log_tail(),
            }),
        }
    }

    /// It prints "ready" when every socket listens. The sockets themselves are not asked: each takes one
    /// client, and one that is left over from a server that was killed is there all along.
    fn await_ready(&mut self) -> Result<(), ServerError> {
        self.await_readies(1)
    }

    /// Returns the number of times that it, or the server that it has replaced, was ready.
    fn readies(&self) -> usize {
        let log = fs::read_to_string(self.process.log()).unwrap_or_default();
        let since_start = log.rsplit(START_MARK).next().unwrap_or_default();
        since_start.lines().filter(|line| *line == "ready").count()
    }

    fn await_readies(&mut self, wanted: usize) -> Result<(), ServerError> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if self.readies() >= wanted {
                return Ok(());
            }
            self.expect_alive()?;
            if Instant::now() >= deadline {
                return Err(ServerError::NotReady {
                    log: self.log_tail(),
                });
            }
            thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if self.parent == Parent::Keeper && matches!(self.process.ended(), Ok(None)) {
            // The keeper first, which would start the next server.
            let kept = self.kept();
            self.process.kill();
            for pid in kept {
                // It may have ended with its keeper.
                let _ = process::run(Command::new("kill").args(["-s", "KILL", &pid.to_string()]));
            }
        }
    }
}

/// Runs a command, again as long as its server does not answer in time. Nothing has changed then.
fn run_in_time(command: impl Fn() -> Command) -> Result<String, ServerError> {
    let deadline = Instant::now() + HELD_UP;
    loop {
        match process::run(&mut command()) {
            Err(ProcessError::Failed { tail, .. })
                if tail.contains("does not answer") && Instant::now() < deadline => {}
            result => return Ok(result?),
        }
        thread::sleep(Duration::from_millis(100));
    }
}

/// A function, in the parts of `nvme-mpt list --json` that are used here.
#[derive(Debug, Deserialize)]
struct FunctionEntry {
    id: String,
}

/// The faults of a drive, in the parts of `nvme-mpt fault list --json` that are used here.
#[derive(Debug, Deserialize)]
struct DriveFaults {
    drive: String,
    faults: Vec<Fault>,
}

#[derive(Debug, Deserialize)]
struct Fault {
    struck: u64,
}

/// Separates the logs of one server from those of the next on the same sockets.
const START_MARK: &str = "---- nvme-mpt serve ----\n";

fn spawn(
    parent: Parent,
    binary: &Path,
    functions: &[FunctionOptions],
    drives: &[String],
    folder: &Path,
) -> Result<Supervised, ServerError> {
    let log = folder.join("serve.log");
    let at = |source| ServerError::File {
        path: log.clone(),
        source,
    };
    let mut file = fs::File::options()
        .create(true)
        .append(true)
        .open(&log)
        .map_err(at)?;
    io::Write::write_all(&mut file, START_MARK.as_bytes()).map_err(at)?;

    let mut command = Command::new(binary);
    if parent == Parent::Keeper {
        // Checks end many servers, and time how long I/O stands still.
        let endless = ["--deaths", "1000000", "--delay", "0"];
        command.arg("keep").args(endless).arg("--").arg(binary);
    }
    command
        .arg("serve")
        .arg("--control")
        .arg(control(folder))
        .arg("--state-dir")
        .arg(state_dir(folder))
        // Checks look at what functions with other ids left.
        .arg("--keep-data");
    for function in functions {
        command
            .arg("--function")
            .arg(function.render(&socket(folder, &function.id)));
    }
    for drive in drives {
        command.arg("--drive").arg(drive);
    }
    Ok(Supervised::spawn("nvme-mpt serve", &command, &log)?)
}

fn socket(folder: &Path, id: &str) -> PathBuf {
    folder.join(format!("{id}.sock"))
}

/// Returns where a server of this folder has its ledger.
pub(crate) fn state_dir(folder: &Path) -> PathBuf {
    folder.join("state")
}

fn control(folder: &Path) -> PathBuf {
    folder.join("control.sock")
}

/// Output of `nvme-mpt stats --json`, as far as it is used here.
#[derive(Debug, Clone, Deserialize)]
pub struct Stats {
    /// One entry for each function.
    pub functions: Vec<FunctionStats>,
    /// One entry for each poller.
    #[serde(default)]
    pub pollers: Vec<PollerStats>,
    /// One entry for each drive.
    #[serde(default)]
    pub drives: Vec<DriveStats>,
}

/// Incidents of a drive.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct DriveStats {
    /// Path by which it was opened, such as its PCI address.
    pub path: String,
    /// Its I/O queue pairs; `None` without a bound.
    pub queue_pairs: Option<QueuePairStats>,
    /// Commands that did not complete within their deadline.
    pub timeouts: u64,
    /// Abort commands for such commands.
    pub aborts: u64,
    /// Controller resets.
    pub resets: u64,
    /// True if it failed for good or was removed.
    pub gone: bool,
    /// Critical Warning bits of its last answer about its health; `None` without one.
    #[serde(default)]
    pub critical_warning: Option<u8>,
}

/// Use of the I/O queue pairs of a drive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub struct QueuePairStats {
    /// Total of the drive.
    pub total: u16,
    /// Pairs of one queue each.
    pub exclusive: u16,
    /// Pairs of several queues each.
    pub shared: u16,
}

/// One function's counters.
#[derive(Debug, Clone, Deserialize)]
pub struct FunctionStats {
    /// Its name.
    pub id: String,
    /// The model that its guest sees.
    pub model: String,
    /// The serial number that its guest sees.
    pub serial: String,
    /// The capacity that its guest sees.
    pub capacity_bytes: u64,
    /// Its I/O queues.
    pub queues: Vec<QueueStats>,
    /// Its guest's memory.
    #[serde(default)]
    pub memory: MemoryStats,
}

/// A guest's memory, as its function has it mapped.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
pub struct MemoryStats {
    /// Regions that were mapped so far.
    pub maps: u64,
    /// Regions that were unmapped so far.
    pub unmaps: u64,
}

/// One I/O queue pair's counters.
#[derive(Debug, Clone, Deserialize)]
pub struct QueueStats {
    /// Commands completed.
    pub commands: u64,
    /// Doorbell writes that came as an exit.
    pub doorbell_exits: u64,
    /// Interrupts raised.
    pub interrupts: u64,
    /// Looks of a poller on its way to sleep that found a new command.
    #[serde(default)]
    pub rearm_saves: u64,
    /// Milliseconds in which commands waited for the limits of their lease.
    #[serde(default)]
    pub throttled_ms: u64,
    /// Use of the drive's queue pair behind it: `reserved`, `exclusive` or `shared`; `None` without a bound.
    #[serde(default)]
    pub host_queue: Option<String>,
}

/// One poller's counters.
#[derive(Debug, Clone, Deserialize)]
pub struct PollerStats {
    /// Its name.
    pub name: String,
    /// The share of time that it found work, 0 to 1.
    pub busy_share: f64,
    /// The share of time that it slept, 0 to 1.
    pub parked_share: f64,
    /// Number of times that it went to sleep.
    pub parks: u64,
}

/// The counters of all I/O queues of a function, added up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Totals {
    /// Commands completed.
    pub commands: u64,
    /// Doorbell writes that came as an exit.
    pub doorbell_exits: u64,
    /// Interrupts raised.
    pub interrupts: u64,
    /// Looks of pollers on their way to sleep that found a new command.
    pub rearm_saves: u64,
    /// Milliseconds in which commands waited for limits.
    pub throttled_ms: u64,
}

impl FunctionStats {
    /// Returns all I/O queues together.
    pub fn totals(&self) -> Totals {
        let sum = |of: fn(&QueueStats) -> u64| self.queues.iter().map(of).sum();
        Totals {
            commands: sum(|queue| queue.commands),
            doorbell_exits: sum(|queue| queue.doorbell_exits),
            interrupts: sum(|queue| queue.interrupts),
            rearm_saves: sum(|queue| queue.rearm_saves),
            throttled_ms: sum(|queue| queue.throttled_ms),
        }
    }
}

impl Totals {
    /// Returns the difference from `before`.
    #[must_use]
    pub fn since(self, before: Self) -> Self {
        Self {
            commands: self.commands.saturating_sub(before.commands),
            doorbell_exits: self.doorbell_exits.saturating_sub(before.doorbell_exits),
            interrupts: self.interrupts.saturating_sub(before.interrupts),
            rearm_saves: self.rearm_saves.saturating_sub(before.rearm_saves),
            throttled_ms: self.throttled_ms.saturating_sub(before.throttled_ms),
        }
    }

    /// Doorbell exits for each command.
    pub fn doorbell_exits_per_io(self) -> f64 {
        ratio(self.doorbell_exits, self.commands)
    }

    /// Interrupts for each command.
    pub fn interrupts_per_io(self) -> f64 {
        ratio(self.interrupts, self.commands)
    }
}

/// Without commands there is no ratio: not a number, so that no comparison with it holds.
fn ratio(count: u64, commands: u64) -> f64 {
    if commands == 0 {
        f64::NAN
    } else {
        count as f64 / commands as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statistics_are_read_and_added_up() {
        let text = r#"{"functions":[{"id":"a","socket":"/run/a.sock","model":"nvme-mpt","serial":"1",
            "capacity_bytes":1073741824,"doorbells":"shadow","queues":[
            {"qid":1,"commands":100,"doorbell_exits":2,"interrupts":50,"errors":3,"rearm_saves":4,"throttled_ms":7},
            {"qid":2,"commands":300,"doorbell_exits":2,"interrupts":50}],
            "admin":{"commands":9,"doorbell_exits":9,"interrupts":9}}],
            "pollers":[{"name":"p0","cpu":1,"busy_share":0.5,"parked_share":0.25,"parks":7,"queues":2}]}"#;
        let stats: Stats = serde_json::from_str(text).expect("statistics");
        let totals = stats.functions[0].totals();
        assert_eq!(
            totals,
            Totals {
                commands: 400,
                doorbell_exits: 4,
                interrupts: 100,
                rearm_saves: 4,
                throttled_ms: 7
            }
        );
        assert!((totals.doorbell_exits_per_io() - 0.01).abs() < 1e-12);
        assert!((totals.interrupts_per_io() - 0.25).abs() < 1e-12);
    }

    #[test]
    fn no_command_gives_no_ratio_to_be_proud_of() {
        let nothing = Totals {
            commands: 0,
            doorbell_exits: 0,
            interrupts: 0,
            rearm_saves: 0,
            throttled_ms: 0,
        };
        assert!(nothing.doorbell_exits_per_io().is_nan());
    }
}
