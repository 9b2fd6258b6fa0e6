//! Child processes: commands that are run to completion, and supervised children that end with this process.
#![expect(
    unsafe_code,
    reason = "kill(2), prctl(2) and setpriority(2) have no safe wrapper in the standard library"
)]

use std::fs::File;
use std::io;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::LazyLock;
use std::sync::mpsc::{self, Sender};
use std::time::{Duration, Instant};

use thiserror::Error;

/// Maximum number of output lines in an error.
const TAIL_LINES: usize = 25;
/// Niceness after [`lower_priority`]: the process gets a third of the weight of other processes.
const NICE: libc::c_int = 5;

/// Errors of a child process.
#[derive(Debug, Error)]
pub enum ProcessError {
    /// The program cannot be started.
    #[error("Cannot start `{command}`: is it installed?")]
    Start {
        /// The command line.
        command: String,
        /// Cause.
        source: io::Error,
    },
    /// The program failed.
    #[error("`{command}` failed ({status}):\n{tail}")]
    Failed {
        /// The command line.
        command: String,
        /// Exit status.
        status: ExitStatus,
        /// End of the output.
        tail: String,
    },
    /// The child's log file cannot be created.
    #[error("Cannot create the log file {path}")]
    Log {
        /// The file.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// The child cannot be waited for or signalled.
    #[error("Cannot wait for `{name}`")]
    Wait {
        /// The child.
        name: String,
        /// Cause.
        source: io::Error,
    },
    /// The child did not end in time.
    #[error("`{name}` still runs {after:?} after it was asked to stop")]
    StillRuns {
        /// The child.
        name: String,
        /// Timeout.
        after: Duration,
    },
}

/// Runs a command to completion and returns its standard output.
///
/// # Errors
/// The command cannot be started or fails. The error contains the end of its output.
pub fn run(command: &mut Command) -> Result<String, ProcessError> {
    let line = command_line(command);
    let output = command
        .stdin(Stdio::null())
        .output()
        .map_err(|source| ProcessError::Start {
            command: line.clone(),
            source,
        })?;
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    if output.status.success() {
        return Ok(stdout);
    }
    let all = stdout + &String::from_utf8_lossy(&output.stderr);
    Err(ProcessError::Failed {
        command: line,
        status: output.status,
        tail: tail(&all),
    })
}

/// Sets a timer slack of 1 us for this thread and its future threads and programs. By default, Linux adds up to 50 us to
/// each sleep, which is several times the sleep of tests between polls of a queue.
pub fn reduce_timer_slack() {
    let nanoseconds: libc::c_ulong = 1000;
    // SAFETY: prctl(2) changes the timer slack of the calling thread. It accesses no memory of this process.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, nanoseconds) };
}

/// Lowers the priority of this thread and its future programs (nice(1)).
pub fn lower_priority() {
    // SAFETY: setpriority(2) accesses no memory of this process. Linux takes 0 for the calling thread.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, NICE) };
}

/// Returns the last lines of a text.
pub fn tail(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(TAIL_LINES)..].join("\n")
}

/// Returns the end of a log file, or the reason why it cannot be read.
pub fn file_tail(path: &Path) -> String {
    match std::fs::read(path) {
        Ok(bytes) => tail(&String::from_utf8_lossy(&bytes)),
        Err(error) => format!("({}: {error})", path.display()),
    }
}

/// Describes the state of this process's children: their threads and io_urings.
pub fn describe_children() -> String {
    let own = std::process::id().to_string();
    let Ok(processes) = std::fs::read_dir("/proc") else {
        return "(there is no /proc)".to_owned();
    };
    let of_child = |process: io::Result<std::fs::DirEntry>| {
        let process = process.ok()?;
        let pid: u32 = process.file_name().to_str()?.parse().ok()?;
        let (_, fields) = stat_of(&process.path())?;
        (fields.get(1) == Some(&own)).then(|| describe_process(pid))
    };
    let children: Vec<String> = processes.filter_map(of_child).collect();
    children.join("\n")
}

/// Returns a thread's exit status from its `stat` fields; `None` if the thread has not ended.
fn exit_status_of(fields: &[String]) -> Option<String> {
    const EXIT_CODE: usize = 49;
    let status = fields.get(EXIT_CODE)?.parse().ok()?;
    Some(ExitStatus::from_raw(status).to_string())
}

/// Describes the state of a process: its threads and the progress of its io_urings (Linux, io_uring/fdinfo.c). The text has
/// each thread's state, and its user and kernel time in clock ticks (Documentation/filesystems/proc.rst).
pub fn describe_process(pid: u32) -> String {
    let process = PathBuf::from(format!("/proc/{pid}"));
    let Ok(threads) = std::fs::read_dir(process.join("task")) else {
        return format!("(process {pid} has no threads)");
    };
    let of_thread = |thread: io::Result<std::fs::DirEntry>| {
        let thread = thread.ok()?.path();
        let (name, fields) = stat_of(&thread)?;
        let (state, user, kernel) = (fields.first()?, fields.get(11)?, fields.get(12)?);
        // Only root may read in which kernel function a thread waits.
        let stack = std::fs::read_to_string(thread.join("stack")).unwrap_or_default();
        let place = stack.lines().find_map(|line| line.split(' ').nth(1));
        let end = (state == "Z").then(|| exit_status_of(&fields)).flatten();
        let place = end.unwrap_or_else(|| place.unwrap_or_default().to_owned());
        Some(format!("{name} {state} {user}+{kernel} {place}"))
    };
    let threads: Vec<String> = threads.filter_map(of_thread).collect();
    let mut text = format!("Process {pid}: {}", threads.join(", "));
    for file in std::fs::read_dir(process.join("fd")).into_iter().flatten() {
        let Ok(file) = file else { continue };
        let is_ring = std::fs::read_link(file.path())
            .is_ok_and(|target| target.as_os_str() == "anon_inode:[io_uring]");
        if is_ring {
            let number = file.file_name();
            let info = process.join("fdinfo").join(&number);
            let info = std::fs::read_to_string(info).unwrap_or_default();
            let ring = info.lines().filter(|line| {
                RING_FIELDS
                    .iter()
                    .any(|field| line.trim_start().starts_with(field))
            });
            let ring: Vec<&str> = ring.map(str::trim).collect();
            text += &format!("\n  io_uring {}: {}", number.display(), ring.join(", "));
        }
    }
    text
}

/// Fields of an io_uring that are reported.
const RING_FIELDS: [&str; 5] = ["SqHead", "SqTail", "CqHead", "CqTail", "task_works"];

/// Returns the name of a process or thread, and the `stat` fields behind the name.
fn stat_of(dir: &Path) -> Option<(String, Vec<String>)> {
    let stat = std::fs::read_to_string(dir.join("stat")).ok()?;
    // A name may contain any character. So the other fields begin behind the last parenthesis.
    let (start, rest) = stat.rsplit_once(") ")?;
    let (_, name) = start.split_once(" (")?;
    Some((
        name.to_owned(),
        rest.split_whitespace().map(str::to_owned).collect(),
    ))
}

fn command_line(command: &Command) -> String {
    std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(|word| word.to_string_lossy())
        .collect::<Vec<_>>()
        .join(" ")
}

/// A child that is killed when this is dropped, and when this process ends for any reason.
#[derive(Debug)]
pub struct SupervisedChild {
    name: String,
    log: PathBuf,
    child: Child,
    exit_status: Option<ExitStatus>,
}

impl SupervisedChild {
    /// Starts `program`. Its output is written to the file `log`.
    ///
    /// # Errors
    /// The program cannot be started, or its log file cannot be created.
    pub fn spawn(name: &str, program: &Command, log: &Path) -> Result<Self, ProcessError> {
        let file = |source| ProcessError::Log {
            path: log.to_owned(),
            source,
        };
        let out = File::options()
            .create(true)
            .append(true)
            .open(log)
            .map_err(file)?;
        let err = out.try_clone().map_err(file)?;

        let mut command = Command::new(program.get_program());
        command
            .args(program.get_args())
            .stdin(Stdio::null())
            .stdout(out)
            .stderr(err);
        for (key, value) in program.get_envs() {
            match value {
                Some(value) => command.env(key, value),
                None => command.env_remove(key),
            };
        }
        // SAFETY: between fork and exec, the closure makes only one system call, which is allowed after a fork. It accesses
        // no memory that another thread could have left locked or half-written.
        unsafe {
            command.pre_exec(
                || match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) {
                    0 => Ok(()),
                    _ => Err(io::Error::last_os_error()),
                },
            );
        }
        let line = command_line(program);
        let child = spawn_from_lasting_thread(command).map_err(|source| ProcessError::Start {
            command: line,
            source,
        })?;
        Ok(Self {
            name: name.to_owned(),
            log: log.to_owned(),
            child,
            exit_status: None,
        })
    }

    /// Returns the child's process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns the path of the child's log.
    pub fn log(&self) -> &Path {
        &self.log
    }

    /// Returns the exit status if the child has ended.
    ///
    /// # Errors
    /// The status cannot be read.
    pub fn try_wait(&mut self) -> Result<Option<ExitStatus>, ProcessError> {
        if self.exit_status.is_none() {
            self.exit_status = self.child.try_wait().map_err(|source| ProcessError::Wait {
                name: self.name.clone(),
                source,
            })?;
        }
        Ok(self.exit_status)
    }

    /// Waits until the child has ended.
    ///
    /// # Errors
    /// The child has not ended after `timeout`.
    pub fn wait(&mut self, timeout: Duration) -> Result<ExitStatus, ProcessError> {
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(status) = self.try_wait()? {
                return Ok(status);
            }
            if Instant::now() >= deadline {
                return Err(ProcessError::StillRuns {
                    name: self.name.clone(),
                    after: timeout,
                });
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Sends SIGTERM to the child and waits until it has ended.
    ///
    /// # Errors
    /// The child has not ended after `timeout`.
    pub fn terminate(&mut self, timeout: Duration) -> Result<ExitStatus, ProcessError> {
        if self.try_wait()?.is_none() {
            let pid = libc::pid_t::try_from(self.child.id()).unwrap_or(libc::pid_t::MAX);
            // SAFETY: kill(2) accesses no memory of this process. The pid cannot have been given to another process,
            // because the child has not been waited for (`exit_status` is None).
            unsafe { libc::kill(pid, libc::SIGTERM) };
        }
        self.wait(timeout)
    }

    /// Kills the child (SIGKILL), like a crash or power failure.
    pub fn kill(&mut self) {
        // Both calls fail only if the child has ended already.
        let _ = self.child.kill();
        if let Ok(status) = self.child.wait() {
            self.exit_status = Some(status);
        }
    }
}

impl Drop for SupervisedChild {
    fn drop(&mut self) {
        if self.exit_status.is_none() {
            self.kill();
        }
    }
}

type Request = (Command, Sender<io::Result<Child>>);

/// Thread that starts all supervised children and lives as long as the process. It is needed since Linux sends the
/// parent-death signal when the *thread* that started the child ends.
static SPAWNER: LazyLock<Sender<Request>> = LazyLock::new(|| {
    let (requests, receiver) = mpsc::channel::<Request>();
    std::thread::spawn(move || {
        for (mut command, reply) in receiver {
            // The caller waits for the reply. If it does not, dropping the child's handle is harmless: the child dies with
            // this process.
            let _ = reply.send(command.spawn());
        }
    });
    requests
});

fn spawn_from_lasting_thread(command: Command) -> io::Result<Child> {
    let gone = || io::Error::other("the thread that starts children has ended");
    let (reply, answer) = mpsc::channel();
    SPAWNER.send((command, reply)).map_err(|_| gone())?;
    answer.recv().map_err(|_| gone())?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_are_listed_with_their_activity() {
        let this = std::thread::Builder::new().name("(a) b) 1".into());
        let describe = || describe_process(std::process::id());
        let threads = this
            .spawn(describe)
            .expect("a thread")
            .join()
            .expect("no panic");
        assert!(threads.contains("(a) b) 1 R "), "{threads}");
        assert!(describe_process(u32::MAX).contains("no threads"));
    }

    #[test]
    fn child_processes_are_listed() {
        let mut child = Command::new("sleep").arg("600").spawn().expect("sleep");
        let name = format!("Process {}: ", child.id());
        let deadline = Instant::now() + Duration::from_secs(180);
        // If other processes start or end meanwhile, the list of processes may lack one, so it is read again.
        let told_of = |what: &str| loop {
            let text = describe_children();
            let text = text.lines().find(|line| line.starts_with(&name));
            let text = text.unwrap_or_default().to_owned();
            if text.contains(what) || Instant::now() >= deadline {
                break text;
            }
        };
        let lives = told_of("sleep S");
        child.kill().expect("kill");
        let ended = told_of("signal: 9");
        child.wait().expect("an end");
        assert!(lives.contains("sleep S"), "{lives}");
        assert!(ended.contains("signal: 9"), "{ended}");
    }
}
