//! `nvme-mpt serve` as a child process, and its statistics from `nvme-mpt stats`.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::thread;
use std::time::{Duration, Instant};

use nvme_guest::stats::QueueStats;
use nvme_mpt_server::stats::{DriveStats, FunctionStats, ServerStats};
use serde::Deserialize;
use thiserror::Error;

use crate::lab::inside;
use crate::process::{self, ProcessError, SupervisedChild};
use crate::programs;

/// Timeout for the server to start listening, or to stop.
const START_STOP_TIMEOUT: Duration = Duration::from_secs(300);

/// Longest tolerated pause of the server or of a function's thread.
const PAUSE_MAX: Duration = Duration::from_secs(180);

/// Errors of the server.
#[derive(Debug, Error)]
pub enum ServerError {
    /// A child process failed.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// A file or directory of the server cannot be used.
    #[error("Cannot use {path}")]
    File {
        /// The path.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// The server does not come up.
    #[error("nvme-mpt serve does not say that it is ready:\n{log}")]
    NotReady {
        /// End of the server's log.
        log: String,
    },
    /// A VMM stays connected to a function.
    #[error("A client is still connected to {path}, {timeout:?} after it was killed")]
    Connected {
        /// Socket of the function.
        path: PathBuf,
        /// Timeout.
        timeout: Duration,
    },
    /// The server ended unexpectedly.
    #[error("nvme-mpt serve did not end cleanly ({status}):\n{log}")]
    Ended {
        /// Exit status.
        status: ExitStatus,
        /// End of the server's log.
        log: String,
    },
    /// The supervisor has no server, or more than one.
    #[error("The supervisor, process {supervisor}, has not one server but {supervised_pids:?}")]
    NotOne {
        /// Process id of the supervisor.
        supervisor: u32,
        /// Process ids of its children.
        supervised_pids: Vec<u32>,
    },
    /// A command with `--json` printed invalid output.
    #[error("Cannot read the output of `nvme-mpt {command} --json`: {source}\n{text}")]
    Output {
        /// The command that printed it.
        command: &'static str,
        /// Cause.
        source: serde_json::Error,
        /// Output of the command.
        text: String,
    },
    /// The function is not in the statistics.
    #[error("`nvme-mpt stats` knows no function '{id}'")]
    NoFunction {
        /// The function's id.
        id: String,
    },
    /// The drive is not in the statistics.
    #[error("`nvme-mpt stats` knows no drive {path}")]
    NoDrive {
        /// Path by which it was opened.
        path: String,
    },
}

/// Builds the `nvme-mpt` command and returns its path. Inside the lab, the command exists already.
///
/// # Errors
/// The command does not build.
pub fn build() -> Result<PathBuf, ProcessError> {
    if inside::is_inside() {
        return Ok(inside::copied_path("nvme-mpt"));
    }
    programs::build("nvme-mpt", &["nvme-mpt"])?;
    Ok(crate::target_dir().join("release/nvme-mpt"))
}

/// A function to serve, given as the parts of its option string.
#[derive(Debug, Clone)]
pub struct FunctionArgument {
    /// Name in the statistics.
    pub id: String,
    /// Drive of the function: a file, a block device, `memory:SIZE` or `null:SIZE`.
    pub path: String,
    /// Range of the drive, as `START+LENGTH`.
    pub range: String,
    /// Further options, such as `doorbells=trap`.
    pub options: Vec<String>,
}

impl FunctionArgument {
    /// Creates a function `id` on a `range` of `path`.
    pub fn new(id: &str, path: impl Into<String>, range: impl Into<String>) -> Self {
        Self {
            id: id.to_owned(),
            path: path.into(),
            range: range.into(),
            options: Vec::new(),
        }
    }

    /// Creates a function `id` of `size` bytes, which the server allocates anywhere on `path`.
    pub fn by_size(id: &str, path: impl Into<String>, size: &str) -> Self {
        Self::new(id, path, "").option(format!("size={size}"))
    }

    /// Adds an option.
    #[must_use]
    pub fn option(mut self, option: impl Into<String>) -> Self {
        self.options.push(option.into());
        self
    }

    fn render(&self, socket: &Path) -> String {
        format!("socket={},{}", socket.display(), self.in_process())
    }

    /// Returns the option string of the function, for a VMM that runs it in its own process.
    pub fn in_process(&self) -> String {
        let options = self.pairs().map(|(key, value)| format!("{key}={value}"));
        options.collect::<Vec<_>>().join(",")
    }

    /// Returns the options as pairs of key and value.
    pub fn pairs(&self) -> impl Iterator<Item = (&str, &str)> {
        let own = [
            ("id", &*self.id),
            ("path", &*self.path),
            ("range", &*self.range),
        ];
        let more = self
            .options
            .iter()
            .filter_map(|option| option.split_once('='));
        own.into_iter()
            .filter(|(_, value)| !value.is_empty())
            .chain(more)
    }
}

/// Way of replacing a server under a supervisor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServerReplacement {
    /// The server is killed by SIGKILL, like in a crash.
    Kill,
    /// The server is upgraded by `nvme-mpt upgrade`.
    Upgrade,
}

/// Parent of the server's process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ServerParent {
    /// This process.
    ThisProcess,
    /// `nvme-mpt supervise`, which restarts the server.
    Supervisor,
}

/// A running `nvme-mpt serve`. Dropping it kills it.
#[derive(Debug)]
pub struct Server {
    binary: PathBuf,
    parent: ServerParent,
    dir: PathBuf,
    functions: Vec<FunctionArgument>,
    drives: Vec<String>,
    process: SupervisedChild,
}

impl Server {
    /// Starts a server, and waits until it listens on the sockets of all functions. Sockets, lease ledger and log are put
    /// into `dir`.
    ///
    /// # Errors
    /// The server does not come up.
    pub fn start(
        binary: &Path,
        functions: &[FunctionArgument],
        dir: &Path,
    ) -> Result<Self, ServerError> {
        Self::start_under(ServerParent::ThisProcess, binary, functions, dir)
    }

    /// Starts a server like [`Self::start`], but under a supervisor.
    ///
    /// # Errors
    /// The server does not come up.
    pub fn start_supervised(
        binary: &Path,
        functions: &[FunctionArgument],
        dir: &Path,
    ) -> Result<Self, ServerError> {
        Self::start_under(ServerParent::Supervisor, binary, functions, dir)
    }

    fn start_under(
        parent: ServerParent,
        binary: &Path,
        functions: &[FunctionArgument],
        dir: &Path,
    ) -> Result<Self, ServerError> {
        let state = state_dir(dir);
        fs::create_dir_all(&state).map_err(|source| ServerError::File {
            path: state,
            source,
        })?;
        let process = spawn(parent, binary, functions, &[], dir)?;
        let mut server = Self {
            binary: binary.to_owned(),
            parent,
            dir: dir.to_owned(),
            functions: functions.to_vec(),
            drives: Vec::new(),
            process,
        };
        server.await_ready()?;
        Ok(server)
    }

    /// Starts a server without functions, which keeps drives open. Functions in VMMs attach to these drives.
    ///
    /// # Errors
    /// The server does not come up.
    pub fn start_with_drives(
        binary: &Path,
        drives: &[String],
        dir: &Path,
    ) -> Result<Self, ServerError> {
        let process = spawn(ServerParent::ThisProcess, binary, &[], drives, dir)?;
        let mut server = Self {
            binary: binary.to_owned(),
            parent: ServerParent::ThisProcess,
            dir: dir.to_owned(),
            functions: Vec::new(),
            drives: drives.to_vec(),
            process,
        };
        server.await_ready()?;
        Ok(server)
    }

    /// Returns the socket of the function `id`.
    pub fn socket(&self, id: &str) -> PathBuf {
        socket(&self.dir, id)
    }

    /// Returns the directory of the lease ledger, for VMMs.
    pub fn state_dir(&self) -> PathBuf {
        state_dir(&self.dir)
    }

    /// Returns the process id of the supervisor; without a supervisor, that of the server.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Returns the end of the log.
    pub fn log_tail(&self) -> String {
        process::file_tail(self.process.log())
    }

    /// Returns the server's current statistics.
    ///
    /// # Errors
    /// The statistics cannot be read.
    pub fn stats(&self) -> Result<ServerStats, ServerError> {
        let text = self.run_command(&["stats", "--json"])?;
        serde_json::from_str(&text).map_err(|source| ServerError::Output {
            command: "stats",
            source,
            text,
        })
    }

    /// Returns the current statistics of one function.
    ///
    /// # Errors
    /// The statistics cannot be read.
    pub fn function_stats(&self, id: &str) -> Result<FunctionStats, ServerError> {
        let deadline = Instant::now() + PAUSE_MAX;
        loop {
            let functions = self.stats()?.functions;
            if let Some(found) = functions.into_iter().find(|function| function.id == id) {
                return Ok(found);
            }
            // If a function's thread is held up, the function is listed, but the statistics omit it. Then this tries again.
            if Instant::now() >= deadline || !self.list()?.iter().any(|listed| listed == id) {
                return Err(ServerError::NoFunction { id: id.to_owned() });
            }
        }
    }

    /// Returns the present sums over all I/O queues of one function.
    ///
    /// # Errors
    /// The statistics cannot be read.
    pub fn queue_totals(&self, id: &str) -> Result<QueueTotals, ServerError> {
        Ok(QueueTotals::of_function(&self.function_stats(id)?))
    }

    /// Returns the present statistics of one drive.
    ///
    /// # Errors
    /// The statistics cannot be read.
    pub fn drive_stats(&self, path: &str) -> Result<DriveStats, ServerError> {
        self.stats()?
            .drives
            .into_iter()
            .find(|drive| drive.path == path)
            .ok_or_else(|| ServerError::NoDrive {
                path: path.to_owned(),
            })
    }

    /// Adds the faults of a plan to the drive at `path`.
    ///
    /// # Errors
    /// The server refuses them.
    pub fn inject_faults(&self, path: &str, plan: &str) -> Result<(), ServerError> {
        let file = self.dir.join("faults.toml");
        fs::write(&file, plan).map_err(|source| ServerError::File {
            path: file.clone(),
            source,
        })?;
        self.fault(|command| command.args(["inject", path]).arg(&file))
    }

    /// Returns the number of commands that the faults of the drive at `path` have affected.
    ///
    /// # Errors
    /// The number cannot be read.
    pub fn struck_commands(&self, path: &str) -> Result<u64, ServerError> {
        let text = self.run_command(&["fault", "list", "--json"])?;
        let drives: Result<Vec<ListedDriveFaults>, _> = serde_json::from_str(&text);
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

    /// Removes the faults of the drive at `path`.
    ///
    /// # Errors
    /// The server refuses.
    pub fn clear_faults(&self, path: &str) -> Result<(), ServerError> {
        self.fault(|command| command.args(["clear", path]))
    }

    fn fault(&self, what: impl Fn(&mut Command) -> &mut Command) -> Result<(), ServerError> {
        let command = || {
            let mut command = Command::new(&self.binary);
            command.args(["fault", "--control"]).arg(control(&self.dir));
            what(&mut command);
            command
        };
        run_in_time(command).map(drop)
    }

    /// Adds a function. [`Self::restart`] does not name it again, since the server itself stores added functions.
    ///
    /// # Errors
    /// The server refuses the function.
    pub fn add(&self, function: &FunctionArgument) -> Result<(), ServerError> {
        let options = function.render(&self.socket(&function.id));
        self.run_command(&["add", &options]).map(drop)
    }

    /// Removes a function.
    ///
    /// # Errors
    /// The server refuses, because a VMM is connected.
    pub fn remove(&self, id: &str) -> Result<(), ServerError> {
        self.run_command(&["remove", id]).map(drop)
    }

    /// Changes the limits of a function.
    ///
    /// # Errors
    /// The server refuses.
    pub fn limit(&self, id: &str, limits: &str) -> Result<(), ServerError> {
        self.run_command(&["limit", id, limits]).map(drop)
    }

    /// Resizes a function's lease while its guest uses it.
    ///
    /// # Errors
    /// The server refuses.
    pub fn resize(&self, id: &str, size: &str) -> Result<(), ServerError> {
        self.run_command(&["resize", id, size]).map(drop)
    }

    /// Returns the ids of the server's functions.
    ///
    /// # Errors
    /// The list cannot be read.
    pub fn list(&self) -> Result<Vec<String>, ServerError> {
        let text = self.run_command(&["list", "--json"])?;
        let entries: Result<Vec<ListedFunction>, _> = serde_json::from_str(&text);
        let entries = entries.map_err(|source| ServerError::Output {
            command: "list",
            source,
            text,
        })?;
        Ok(entries.into_iter().map(|entry| entry.id).collect())
    }

    fn run_command(&self, arguments: &[&str]) -> Result<String, ServerError> {
        run_in_time(|| {
            let mut command = Command::new(&self.binary);
            command.args(arguments);
            command.arg("--control").arg(control(&self.dir));
            command
        })
    }

    /// Waits until no VMM is connected to the function `name`. For a killed VMM, this may take a little longer than the end
    /// of the process, since QEMU's io_uring requests still hold the socket.
    ///
    /// # Errors
    /// A client stays connected.
    pub fn await_no_client(&self, name: &str) -> Result<(), ServerError> {
        // State of a connected socket in the list (proc_net_unix in Linux, net/unix/af_unix.c).
        const CONNECTED: &str = "03";
        let path = self.socket(name);
        let list = Path::new("/proc/net/unix");
        let deadline = Instant::now() + START_STOP_TIMEOUT;
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
            timeout: START_STOP_TIMEOUT,
        })
    }

    /// Kills the server by SIGKILL, like a crash.
    pub fn kill(&mut self) {
        self.process.kill();
    }

    /// Restarts the ended server, on the same sockets and the same drive.
    ///
    /// # Errors
    /// The server does not come up.
    pub fn restart(&mut self) -> Result<(), ServerError> {
        let Self {
            binary,
            parent,
            functions,
            drives,
            dir: folder,
            ..
        } = self;
        self.process = spawn(*parent, binary, functions, drives, folder)?;
        self.await_ready()
    }

    /// Replaces the server under its supervisor, and waits until the successor is ready.
    ///
    /// # Errors
    /// The successor does not come up, or the server has no supervisor.
    pub fn replace(&mut self, how: ServerReplacement) -> Result<(), ServerError> {
        let ready_before = self.ready_count();
        let pid = self.await_one_child()?;
        match how {
            ServerReplacement::Kill => {
                process::run(Command::new("kill").args(["-s", "KILL", &pid.to_string()]))?;
            }
            ServerReplacement::Upgrade => drop(self.run_command(&["upgrade"])?),
        }
        self.await_ready_count(ready_before + 1)
    }

    /// Waits until the supervisor has exactly one child, and returns its process id. Until then, a replaced server may
    /// still be ending.
    fn await_one_child(&mut self) -> Result<u32, ServerError> {
        let deadline = Instant::now() + START_STOP_TIMEOUT;
        loop {
            let pids = self.child_pids();
            if let [pid] = pids[..] {
                return Ok(pid);
            }
            self.expect_alive()?;
            if Instant::now() >= deadline {
                let supervisor = self.pid();
                return Err(ServerError::NotOne {
                    supervisor,
                    supervised_pids: pids,
                });
            }
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Returns the process ids of the supervisor's children.
    fn child_pids(&self) -> Vec<u32> {
        let supervisor = self.pid();
        let path = format!("/proc/{supervisor}/task/{supervisor}/children");
        let children = fs::read_to_string(path).unwrap_or_default();
        children
            .split_whitespace()
            .filter_map(|pid| pid.parse().ok())
            .collect()
    }

    /// Stops the server by SIGTERM, and checks that it ends successfully.
    ///
    /// # Errors
    /// The server does not end, or does not end successfully.
    pub fn stop(&mut self) -> Result<(), ServerError> {
        let status = self.process.terminate(START_STOP_TIMEOUT)?;
        if status.success() {
            return Ok(());
        }
        Err(ServerError::Ended {
            status,
            log: self.log_tail(),
        })
    }

    /// Checks that the server still runs.
    ///
    /// # Errors
    /// The server has ended.
    pub fn expect_alive(&mut self) -> Result<(), ServerError> {
        match self.process.try_wait()? {
            None => Ok(()),
            Some(status) => Err(ServerError::Ended {
                status,
                log: self.log_tail(),
            }),
        }
    }

    /// Waits for "ready" in the log, which the server prints once it listens on all sockets. Connecting to a socket would
    /// prove nothing: each socket accepts only one client, and a killed server leaves its sockets behind.
    fn await_ready(&mut self) -> Result<(), ServerError> {
        self.await_ready_count(1)
    }

    /// Returns the number of times that this server or one of its predecessors printed "ready".
    fn ready_count(&self) -> usize {
        let log = fs::read_to_string(self.process.log()).unwrap_or_default();
        let since_start = log.rsplit(START_MARK).next().unwrap_or_default();
        since_start.lines().filter(|line| *line == "ready").count()
    }

    fn await_ready_count(&mut self, wanted: usize) -> Result<(), ServerError> {
        let deadline = Instant::now() + START_STOP_TIMEOUT;
        loop {
            if self.ready_count() >= wanted {
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
        if self.parent == ServerParent::Supervisor && matches!(self.process.try_wait(), Ok(None)) {
            // The supervisor is killed first, because it would restart the server.
            let pids = self.child_pids();
            self.process.kill();
            for pid in pids {
                // Fails if the server has ended together with its supervisor.
                let _ = process::run(Command::new("kill").args(["-s", "KILL", &pid.to_string()]));
            }
        }
    }
}

/// Runs a command. Repeats it while the server does not answer in time; such a timeout changes nothing.
fn run_in_time(command: impl Fn() -> Command) -> Result<String, ServerError> {
    let deadline = Instant::now() + PAUSE_MAX;
    loop {
        match process::run(&mut command()) {
            Err(ProcessError::Failed { tail, .. })
                if tail.contains("does not answer") && Instant::now() < deadline => {}
            result => return Ok(result?),
        }
        thread::sleep(Duration::from_millis(100));
    }
}

/// Entry of `nvme-mpt list --json`, reduced to the fields in use.
#[derive(Debug, Deserialize)]
struct ListedFunction {
    id: String,
}

/// Faults of a drive in `nvme-mpt fault list --json`, reduced to the fields in use.
#[derive(Debug, Deserialize)]
struct ListedDriveFaults {
    drive: String,
    faults: Vec<ListedFault>,
}

#[derive(Debug, Deserialize)]
struct ListedFault {
    struck: u64,
}

/// Line in the log that precedes the output of each server on the same sockets.
const START_MARK: &str = "---- nvme-mpt serve ----\n";

fn spawn(
    parent: ServerParent,
    binary: &Path,
    functions: &[FunctionArgument],
    drives: &[String],
    dir: &Path,
) -> Result<SupervisedChild, ServerError> {
    let log = dir.join("serve.log");
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
    if parent == ServerParent::Supervisor {
        // Checks end the server many times and measure pauses of I/O. So the supervisor restarts it without a limit and
        // without a delay.
        let endless = ["--deaths", "1000000", "--delay", "0"];
        command.arg("supervise").args(endless).arg("--").arg(binary);
    }
    command
        .arg("serve")
        .arg("--control")
        .arg(control(dir))
        .arg("--state-dir")
        .arg(state_dir(dir))
        // Checks read data that functions with other ids have left on the drive.
        .arg("--keep-data");
    for function in functions {
        command
            .arg("--function")
            .arg(function.render(&socket(dir, &function.id)));
    }
    for drive in drives {
        command.arg("--drive").arg(drive);
    }
    Ok(SupervisedChild::spawn("nvme-mpt serve", &command, &log)?)
}

fn socket(dir: &Path, id: &str) -> PathBuf {
    dir.join(format!("{id}.sock"))
}

/// Returns the directory of a server's lease ledger.
pub(crate) fn state_dir(dir: &Path) -> PathBuf {
    dir.join("state")
}

fn control(dir: &Path) -> PathBuf {
    dir.join("control.sock")
}

/// Sums over all I/O queues of a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueTotals {
    /// Commands completed.
    pub commands: u64,
    /// Doorbell writes that exited from the guest.
    pub doorbell_exits: u64,
    /// Interrupts raised.
    pub interrupts: u64,
    /// Number of times that pollers found a new command in their last check before parking.
    pub rearm_saves: u64,
    /// Milliseconds for which commands waited because of limits.
    pub throttled_ms: u64,
}

impl QueueTotals {
    /// Returns the sums of a function.
    pub fn of_function(function: &FunctionStats) -> Self {
        let sum = |of: fn(&QueueStats) -> u64| function.queues.iter().map(of).sum();
        Self {
            commands: sum(|queue| queue.commands),
            doorbell_exits: sum(|queue| queue.doorbell_exits),
            interrupts: sum(|queue| queue.interrupts),
            rearm_saves: sum(|queue| queue.rearm_saves),
            throttled_ms: sum(|queue| queue.throttled_ms),
        }
    }

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

    /// Returns the doorbell exits per command.
    pub fn doorbell_exits_per_io(self) -> f64 {
        ratio(self.doorbell_exits, self.commands)
    }

    /// Returns the interrupts per command.
    pub fn interrupts_per_io(self) -> f64 {
        ratio(self.interrupts, self.commands)
    }
}

/// Returns the ratio of `count` to `commands`. Without commands, this is NaN, so that every comparison with it is false.
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
    fn statistics_are_added_up() {
        let queue = |commands, rearm_saves, throttled_ms| QueueStats {
            commands,
            doorbell_exits: 2,
            interrupts: 50,
            rearm_saves,
            throttled_ms,
            ..QueueStats::default()
        };
        let totals = QueueTotals::of_function(&FunctionStats {
            queues: vec![queue(100, 4, 7), queue(300, 0, 0)],
            ..FunctionStats::default()
        });
        assert_eq!(
            totals,
            QueueTotals {
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
    fn without_commands_the_exit_ratio_is_nan() {
        let nothing = QueueTotals {
            commands: 0,
            doorbell_exits: 0,
            interrupts: 0,
            rearm_saves: 0,
            throttled_ms: 0,
        };
        assert!(nothing.doorbell_exits_per_io().is_nan());
    }
}
