//! The `nvme-mpt` command as a process, for tests.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// Longest time for which a machine may hold a thread up.
pub(crate) const PATIENCE: Duration = Duration::from_secs(180);

/// A folder with a drive file, a state folder and sockets of its own.
pub(crate) struct Bench {
    folder: TempDir,
}

impl Bench {
    /// With a drive file of 64 MiB.
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let drive = File::create(folder.path().join("drive.img")).unwrap();
        drive.set_len(64 << 20).unwrap();
        Self { folder }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Names in the folder.
    pub(crate) fn names(&self) -> Vec<String> {
        let entries = self.folder.path().read_dir().unwrap();
        let mut names: Vec<_> = entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    /// `nvme-mpt COMMAND --state-dir … ARGUMENTS`, in the folder.
    pub(crate) fn command(&self, command: &str, arguments: &[&str]) -> Command {
        let mut nvme_mpt = Command::new(env!("CARGO_BIN_EXE_nvme-mpt"));
        nvme_mpt
            .arg(command)
            .args(["--state-dir", "state"])
            .args(arguments)
            .current_dir(&self.folder)
            .env("RUST_LOG", "warn")
            .stdin(Stdio::null());
        nvme_mpt
    }

    pub(crate) fn run(&self, command: &str, arguments: &[&str]) -> Output {
        self.command(command, arguments).output().unwrap()
    }

    /// Starts a server with these functions; its control socket is `NAME.control`.
    pub(crate) fn serve(&self, name: &str, functions: &[&str]) -> Result<Server, Failure> {
        Server::start(self.serve_command(name, functions))
    }

    /// A command to the server `one`. Returns what it printed, or its complaint. It is given again as long as the server,
    /// or the thread of a function, is held up.
    pub(crate) fn ask(&self, command: &str, arguments: &[&str]) -> Result<String, String> {
        let busy = |printed: &str| printed.split([' ', '\n', '"']).any(|word| word == "busy");
        self.ask_until(command, arguments, |printed| {
            command != "list" || !busy(printed)
        })
    }

    /// As [`Self::ask`], until what it prints is `complete`.
    pub(crate) fn ask_until(
        &self,
        command: &str,
        arguments: &[&str],
        complete: impl Fn(&str) -> bool,
    ) -> Result<String, String> {
        let control = ["--control", "one.control"];
        let deadline = Instant::now() + PATIENCE;
        loop {
            let output = self.run(command, &[&control, arguments].concat());
            let text = |bytes| String::from_utf8(bytes).unwrap();
            let answer = match output.status.success() {
                true => Ok(text(output.stdout)),
                false => Err(text(output.stderr)),
            };
            let held_up = match &answer {
                Ok(printed) => !complete(printed),
                // The server, or the function that a change is about: nothing has changed then.
                Err(complaint) => complaint.contains("does not answer"),
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

    /// Returns the output of `leases list --json`: id, state and range.
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

/// A server that is ready. Killed when dropped.
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

    /// As `kill -9` does.
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

    /// Sends a signal by name and waits for the end; returns what was logged as well.
    pub(crate) fn signal(mut self, signal: &str) -> (ExitStatus, String) {
        self.send(signal);
        self.wait()
    }

    /// Ends it, which must go well. It may have seen a test's edit of its file before the test had it reload, and a busy host
    /// may have made signals slow.
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

/// Returns whether a file exists, dangling or not.
pub(crate) fn exists(path: &Path) -> bool {
    path.symlink_metadata().is_ok()
}

/// Returns whether a process has a context of asynchronous I/O. The kernel takes tens of milliseconds to end a process
/// that has one.
pub(crate) fn has_aio(pid: &str) -> bool {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    maps.contains("/[aio]")
}
