//! A server under a supervisor.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use jiff::{SignedDuration, Timestamp};

use crate::support::{Bench, TIMEOUT};
use crate::verifying_guest::Pause;

/// A supervisor with its server. Both are killed on drop.
pub(crate) struct SupervisedServer {
    pub(crate) supervisor: Child,
    pub(crate) ready: Receiver<()>,
    log: PathBuf,
}

impl SupervisedServer {
    pub(crate) fn start(bench: &Bench, functions: &[&str]) -> Self {
        Self::start_as(bench, &["--deaths", "100000", "--delay", "0"], functions)
    }

    pub(crate) fn start_as(bench: &Bench, options: &[&str], functions: &[&str]) -> Self {
        Self::start_command(bench, options, &bench.serve_command("one", functions))
    }

    pub(crate) fn start_command(bench: &Bench, options: &[&str], serve: &Command) -> Self {
        let supervised = Self::start_supervisor(bench, "log", options, serve);
        supervised.await_ready();
        supervised
    }

    /// Starts a supervisor, whose server is allowed to fail at its start.
    pub(crate) fn start_supervisor(
        bench: &Bench,
        log: &str,
        options: &[&str],
        serve: &Command,
    ) -> Self {
        let log = bench.path(log);
        let mut supervisor = Command::new(env!("CARGO_BIN_EXE_nvme-mpt"))
            .arg("supervise")
            .args(options)
            .arg("--")
            .arg(serve.get_program())
            .args(serve.get_args())
            .current_dir(bench.path("."))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(fs::File::create(&log).unwrap())
            .spawn()
            .unwrap();
        let stdout = BufReader::new(supervisor.stdout.take().unwrap());
        let (sender, ready) = mpsc::channel();
        thread::spawn(move || {
            let lines = stdout.lines().map_while(Result::ok);
            for _ in lines.filter(|line| line == "ready") {
                if sender.send(()).is_err() {
                    return;
                }
            }
        });
        Self {
            supervisor,
            ready,
            log,
        }
    }

    pub(crate) fn await_ready(&self) {
        if let Err(error) = self.ready.recv_timeout(TIMEOUT) {
            panic!("no server: {error}; {}", self.log());
        }
    }

    /// Discards "ready" messages that have arrived. There may be several, if an upgrade was requested twice.
    pub(crate) fn forget_ready(&self) {
        while self.ready.try_recv().is_ok() {}
    }

    pub(crate) fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap()
    }

    /// Waits until the log contains `text`. A server may answer a command before it has logged the state that it reports.
    pub(crate) fn await_log(&self, text: &str) {
        let began = Instant::now();
        while !self.log().contains(text) {
            assert!(began.elapsed() < TIMEOUT, "no '{text}' in {}", self.log());
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Returns the periods in which a function had no server, from the servers' log.
    pub(crate) fn pauses_in_log(&self, socket: &str) -> Vec<Pause> {
        let named = format!("/{socket} continues: it had no server for ");
        let log = self.log();
        let lines = log.lines().filter_map(|line| line.split_once(&named));
        let pauses = lines.map(|(before, after)| {
            let (time, _) = before.split_once(' ').unwrap();
            let (milliseconds, _) = after.split_once(" ms, since").unwrap();
            let seconds = milliseconds.parse::<f64>().unwrap() / 1e3;
            let until: Timestamp = time.parse().unwrap();
            let from = until - SignedDuration::from_secs_f64(seconds);
            Pause { from, until }
        });
        pauses.collect()
    }

    /// Returns the number of servers that crashed.
    pub(crate) fn crashes(&self) -> usize {
        self.log().matches("SIGABRT").count()
    }

    /// Returns the process id of the supervisor.
    pub(crate) fn supervisor_pid(&self) -> u32 {
        self.supervisor.id()
    }

    /// Returns the process id of the server: the supervisor's latest child that has not ended. An earlier child may be a
    /// replaced server that still waits for the supervisor.
    pub(crate) fn server_pid(&self) -> Option<String> {
        let supervisor = self.supervisor.id();
        let children =
            fs::read_to_string(format!("/proc/{supervisor}/task/{supervisor}/children")).ok()?;
        let has_ended = |pid: &str| {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat"));
            stat.is_ok_and(|stat| stat.contains(") Z "))
        };
        let mut servers = children.split_whitespace();
        servers.rfind(|pid| !has_ended(pid)).map(str::to_owned)
    }

    pub(crate) fn send(signal: &str, pid: &str) {
        // The process may have ended already.
        let sent = Command::new("kill").args(["-s", signal, pid]).status();
        sent.unwrap();
    }

    /// Kills the server, and waits until the next server is ready.
    pub(crate) fn kill_server(&self) {
        self.forget_ready();
        let server = self.server_pid().expect("a server");
        Self::send("KILL", &server);
        self.await_ready();
    }

    /// Upgrades the server, and waits until the next server is ready.
    pub(crate) fn upgrade(&self, bench: &Bench) {
        self.forget_ready();
        let before = self.server_pid().expect("a server");
        let printed = bench
            .ask("upgrade", &[])
            .unwrap_or_else(|error| panic!("{error}; {}", self.log()));
        assert!(printed.contains("is the server now"), "{printed}");
        self.await_ready();
        assert!(!printed.contains(&format!("Process {before} ")));
    }

    /// Stops server and supervisor, which must succeed. No function may be in quarantine, although servers were killed.
    pub(crate) fn stop(self) {
        let log = self.log();
        assert!(!log.contains("quarantined"), "{log}");
        self.end();
    }

    /// Stops server and supervisor.
    pub(crate) fn end(mut self) {
        Self::send("TERM", &self.supervisor.id().to_string());
        let status = self.supervisor.wait().unwrap();
        assert!(status.success(), "{status}: {}", self.log());
    }
}

impl Drop for SupervisedServer {
    fn drop(&mut self) {
        // The supervisor is killed first, because it would restart the server.
        let server = self.server_pid();
        let _ = self.supervisor.kill();
        let _ = self.supervisor.wait();
        if let Some(server) = server {
            Self::send("KILL", &server);
        }
    }
}

/// Waits until no client is connected. The server notices a disconnect late if a program that was just started still holds
/// a copy of the client's socket.
pub(crate) fn await_waiting(bench: &Bench) {
    let waits = |printed: &str| !printed.contains("connected");
    let listed = bench.ask_until("list", &[], waits).unwrap();
    assert!(waits(&listed), "{listed}");
}
