//! Runs the `nvme-mpt` command as a process, for tests.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// Timeout that exceeds any delay of a busy machine.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(180);

/// A directory with its own drive file, state directory and sockets.
pub(crate) struct Bench {
    dir: TempDir,
}

impl Bench {
    /// Creates a bench with a drive file of 64 MiB.
    pub(crate) fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let drive = File::create(dir.path().join("drive.img")).unwrap();
        drive.set_len(64 << 20).unwrap();
        Self { dir }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Returns the sorted file names in the directory.
    pub(crate) fn names(&self) -> Vec<String> {
        let entries = self.dir.path().read_dir().unwrap();
        let mut names: Vec<_> = entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    /// Creates the command `nvme-mpt COMMAND --state-dir … ARGUMENTS`, run in the directory.
    pub(crate) fn command(&self, command: &str, arguments: &[&str]) -> Command {
        let mut nvme_mpt = Command::new(env!("CARGO_BIN_EXE_nvme-mpt"));
        nvme_mpt
            .arg(command)
            .args(["--state-dir", "state"])
            .args(arguments)
            .current_dir(&self.dir)
            .env("RUST_LOG", "warn")
            .stdin(Stdio::null());
        nvme_mpt
    }

    pub(crate) fn run(&self, command: &str, arguments: &[&str]) -> Output {
        self.command(command, arguments).output().unwrap()
    }

    /// Starts a server that serves `functions`. Its control socket is `NAME.control`.
    pub(crate) fn serve(&self, name: &str, functions: &[&str]) -> Result<Server, Failure> {
        Server::start(self.serve_command(name, functions))
    }

    /// Runs a command against the server `one`. Returns its output or its error. If the host holds up the server or a
    /// function's thread, repeats the command.
    pub(crate) fn ask(&self, command: &str, arguments: &[&str]) -> Result<String, String> {
        let busy = |printed: &str| printed.split([' ', '\n', '"']).any(|word| word == "busy");
        self.ask_until(command, arguments, |printed| {
            command != "list" || !busy(printed)
        })
    }

    /// Repeats [`Self::ask`] until `complete` accepts the output.
    pub(crate) fn ask_until(
        &self,
        command: &str,
        arguments: &[&str],
        complete: impl Fn(&str) -> bool,
    ) -> Result<String, String> {
        let control = ["--control", "one.control"];
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let output = self.run(command, &[&control, arguments].concat());
            let text = |bytes| String::from_utf8(bytes).unwrap();
            let answer = match output.status.success() {
                true => Ok(text(output.stdout)),
                false => Err(text(output.stderr)),
            };
            let held_up = match &answer {
                Ok(printed) => !complete(printed),
                // The server or the function's thread has not answered, so nothing has changed.
                Err(message) => message.contains("does not answer"),
            };
            if !held_up || Instant::now() > deadline {
                return answer;
            }
            thread::sleep(Duration::from_millis(100));
        }
    }

    pub(crate) fn serve_command(&self, name: &str, functions: &[&str]) -> Command {
        let mut serve = self.command("serve", &["--control", &format!("{name}.control")]);
        for function in functions {
            serve.args(["--function", function]);
        }
        serve
    }

    /// Returns id, state and range of each lease in the output of `leases list --json`.
    pub(crate) fn leases(&self) -> Vec<(String, String, String)> {
        let output = self.run("leases", &["list", "--json"]);
        assert!(output.status.success(), "{output:?}");
        let leases: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let leases = leases.as_array().unwrap().iter().map(|lease| {
            let text = |key: &str| lease[key].as_str().unwrap().to_owned();
            let number = |key: &str| lease["range"][key].as_u64().unwrap();
            let range = format!("{}+{}", number("start"), number("length"));
            (text("id"), text("state"), range)
        });
        leases.collect()
    }
}

/// A server that did not start.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) status: ExitStatus,
    pub(crate) stderr: String,
}

/// A server that is ready. Dropping it kills the server.
#[derive(Debug)]
pub(crate) struct Server {
    process: Child,
    /// Output before "ready".
    pub(crate) printed: String,
}

impl Server {
    pub(crate) fn start(mut command: Command) -> Result<Self, Failure> {
        let mut server = Self {
            process: command
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap(),
            printed: String::new(),
        };
        let stdout = BufReader::new(server.process.stdout.take().unwrap());
        for line in stdout.lines().map(Result::unwrap) {
            if line == "ready" {
                return Ok(server);
            }
            server.printed.push_str(&line);
            server.printed.push('\n');
        }
        let (status, stderr) = server.wait();
        Err(Failure { status, stderr })
    }

    fn wait(&mut self) -> (ExitStatus, String) {
        let status = self.process.wait().unwrap();
        let mut stderr = String::new();
        let mut pipe = self.process.stderr.take().unwrap();
        pipe.read_to_string(&mut stderr).unwrap();
        (status, stderr)
    }

    pub(crate) fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Kills the server by SIGKILL.
    pub(crate) fn kill(mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    /// Sends a signal by name.
    pub(crate) fn send(&self, signal: &str) {
        let pid = self.process.id().to_string();
        let sent = Command::new("kill").args(["-s", signal, &pid]).status();
        assert!(sent.unwrap().success());
    }

    /// Sends a signal by name, and waits for the end. Returns the status and the log.
    pub(crate) fn signal(mut self, signal: &str) -> (ExitStatus, String) {
        self.send(signal);
        self.wait()
    }

    /// Stops the server, which must succeed. The log may report an edit of the configuration file; on a busy host, also
    /// slow eventfds.
    pub(crate) fn stop(self) {
        let (status, stderr) = self.signal("TERM");
        assert!(status.success(), "{status}: {stderr}");
        let is_expected = |line: &str| {
            line.ends_with("`nvme-mpt reload` applies the file")
                || line.ends_with("a thread of its own signals them from now on")
        };
        let rest: Vec<&str> = stderr.lines().filter(|line| !is_expected(line)).collect();
        assert!(rest.is_empty(), "{stderr}");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Returns whether a path exists, even as a dangling link.
pub(crate) fn exists(path: &Path) -> bool {
    path.symlink_metadata().is_ok()
}

/// Returns whether a process has an AIO context, which makes its end take tens of milliseconds in the kernel.
pub(crate) fn has_aio(pid: &str) -> bool {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    maps.contains("/[aio]")
}
