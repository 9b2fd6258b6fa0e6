//! Tests of the supervisor and its server as processes: stored descriptors, restarts, and termination.
//!
//! The executable has four roles: the tests, the supervisor, the first stage, and a server that a test controls over a
//! socket. Tests wait for messages and for ends of processes, never for a fixed time.

use std::ffi::{OsStr, OsString};
use std::fmt::Display;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::Duration;

use libtest_mimic::{Arguments, Trial};
use nvme_mpt_supervise::{
    DescriptorQueue, FdStoreClient, InheritedDescriptors, SuperviseOptions, exit_code,
    run_first_stage, supervise,
};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};

const BARRIER: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    let mut words = std::env::args_os().skip(1);
    let role = words.next().unwrap_or_default();
    match role.to_str() {
        Some("role-supervise") => run_supervisor(words.collect()),
        Some("role-first-stage") => {
            print_line(&run_first_stage(words));
            ExitCode::FAILURE
        }
        Some("role-serve") => serve(&words.next().unwrap()),
        _ => run_tests(),
    }
}

/// Writes a line in one system call, because several processes write to the log.
fn print_line(line: &dyn Display) {
    io::stderr()
        .write_all(format!("{line}\n").as_bytes())
        .unwrap();
}

// Functions of the processes that act as a supervisor.

struct Lines;

impl log::Log for Lines {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        print_line(record.args());
    }

    fn flush(&self) {}
}

fn run_supervisor(words: Vec<OsString>) -> ExitCode {
    log::set_logger(&Lines).unwrap();
    log::set_max_level(log::LevelFilter::Debug);
    let [deaths, store_max] = [0, 1].map(|at| words[at].to_str().unwrap().parse::<u16>().unwrap());
    let mut options = SuperviseOptions::new(vec!["role-first-stage".into()]);
    (options.max_deaths, options.store_max) = (deaths.into(), store_max);
    match supervise(&options, &words[2..]) {
        Ok(status) => exit_code(status),
        Err(error) => {
            print_line(&error);
            ExitCode::FAILURE
        }
    }
}

// Functions of the processes that act as a server.

fn file(content: &str) -> OwnedFd {
    let file = File::from(memfd_create("content", MemfdFlags::CLOEXEC).unwrap());
    file.write_all_at(content.as_bytes(), 0).unwrap();
    file.into()
}

fn content(file: OwnedFd) -> String {
    let mut bytes = [0; 64];
    let length = File::from(file).read_at(&mut bytes, 0).unwrap();
    String::from_utf8(bytes[..length].to_vec()).unwrap()
}

fn serve(path: &OsStr) -> ExitCode {
    let mut inherited = InheritedDescriptors::from_env().unwrap();
    let store = FdStoreClient::from_env().unwrap();
    let names: Vec<_> = inherited.names().collect();
    let mut test = UnixStream::connect(path).unwrap();
    writeln!(test, "{} {}", std::process::id(), names.join(",")).unwrap();
    let store = || store.as_ref().unwrap();
    let mut bags = Vec::new();
    for line in BufReader::new(test.try_clone().unwrap()).lines() {
        let line = line.unwrap();
        let (order, rest) = line.split_once(' ').unwrap_or((&line, ""));
        let (name, more) = rest.split_once(' ').unwrap_or((rest, ""));
        let answer = match order {
            "keep" => store()
                .store(name, &[file(more).as_fd()])
                .map(|()| String::new()),
            "bag" => {
                let queue = DescriptorQueue::new().unwrap();
                queue.put(7, &[file(more).as_fd()]).unwrap();
                let stored = store().store(name, &queue.ends()).map(|()| String::new());
                bags.push(queue);
                stored
            }
            "forget" => store().remove(name).map(|()| String::new()),
            "send" => store()
                .notify(&rest.replace('|', "\n"))
                .map(|()| String::new()),
            "barrier" => store().barrier(BARRIER).map(|()| String::new()),
            "keeps" => Ok(store().can_store().to_string()),
            "read" => {
                let contents: Vec<_> = inherited.take(name).into_iter().map(content).collect();
                Ok(contents.join(","))
            }
            "read-bag" => {
                let mut queue = DescriptorQueue::from_persisted(inherited.take(name)).unwrap();
                let (number, files) = queue.contents().unwrap().pop().unwrap();
                let files: Vec<_> = files.into_iter().map(content).collect();
                Ok(format!("{number}:{}", files.join(",")))
            }
            "read-file" => Ok(fs::read_to_string(name).unwrap().replace('\n', "|")),
            "descriptors" => {
                let numbers = fs::read_dir("/proc/self/fd").unwrap();
                let mut numbers: Vec<u32> = numbers
                    .filter(|entry| {
                        let target = fs::read_link(entry.as_ref().unwrap().path());
                        target.is_ok_and(|target| !target.starts_with("/proc"))
                    })
                    .map(|entry| {
                        entry
                            .unwrap()
                            .file_name()
                            .to_str()
                            .unwrap()
                            .parse()
                            .unwrap()
                    })
                    .collect();
                numbers.sort_unstable();
                Ok(format!("{numbers:?}"))
            }
            "variable" => Ok(std::env::var(name).unwrap_or_default()),
            "successor" => {
                let own = std::env::current_exe().unwrap();
                let child = Command::new(own).arg("role-serve").arg(path).spawn();
                Ok(child.unwrap().id().to_string())
            }
            "run" => {
                let words: Vec<_> = rest.split(' ').collect();
                let ended = Command::new(words[0]).args(&words[1..]).status();
                Ok(ended.unwrap().to_string())
            }
            "exit" => return ExitCode::from(name.parse::<u8>().unwrap()),
            other => panic!("{other}"),
        };
        match answer {
            Ok(answer) => writeln!(test, "{answer}").unwrap(),
            Err(error) => writeln!(test, "Error: {error}").unwrap(),
        }
    }
    ExitCode::FAILURE
}

// Functions of the test process.

/// A test's handle of a server.
struct Server {
    pid: Pid,
    names: String,
    stream: BufReader<UnixStream>,
    process: OwnedFd,
}

impl Server {
    fn accept(listener: &UnixListener, parent: &Child) -> Self {
        Self::accept_next(listener, parent).expect("the supervisor ended")
    }

    /// Waits until the next server connects. Returns `None` if its parent has ended.
    fn accept_next(listener: &UnixListener, parent: &Child) -> Option<Self> {
        let parent = pidfd_open(Pid::from_child(parent), PidfdFlags::empty()).unwrap();
        let mut events = [
            PollFd::new(listener, PollFlags::IN),
            PollFd::new(&parent, PollFlags::IN),
        ];
        poll(&mut events, None).unwrap();
        if !events[1].revents().is_empty() {
            return None;
        }
        let mut stream = BufReader::new(listener.accept().unwrap().0);
        let mut line = String::new();
        stream.read_line(&mut line).unwrap();
        let (pid, names) = line.trim_end_matches('\n').split_once(' ').unwrap();
        let pid = Pid::from_raw(pid.parse().unwrap()).unwrap();
        let names = names.to_owned();
        let process = pidfd_open(pid, PidfdFlags::empty()).unwrap();
        Some(Self {
            pid,
            names,
            stream,
            process,
        })
    }

    #[track_caller]
    fn ask(&mut self, order: &str) -> String {
        writeln!(self.stream.get_mut(), "{order}").unwrap();
        let mut line = String::new();
        let came = self.stream.read_line(&mut line).unwrap();
        assert!(came > 0, "the server ended at {order:?}");
        line.trim_end_matches('\n').to_owned()
    }

    #[track_caller]
    fn order(&mut self, order: &str) {
        assert_eq!(self.ask(order), "", "{order}");
    }

    fn exit(mut self, code: u8) {
        writeln!(self.stream.get_mut(), "exit {code}").unwrap();
        self.wait();
    }

    fn kill(self) {
        kill_process(self.pid, Signal::KILL).unwrap();
        self.wait();
    }

    /// Waits until the server's process has ended, whether or not its parent has reaped it yet.
    fn wait(self) {
        poll(&mut [PollFd::new(&self.process, PollFlags::IN)], None).unwrap();
    }
}

struct SupervisedSocket {
    dir: tempfile::TempDir,
    listener: UnixListener,
    supervisor: Child,
}

impl SupervisedSocket {
    fn start(deaths: u16, store_max: u16) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("test");
        let listener = UnixListener::bind(&path).unwrap();
        let own = std::env::current_exe().unwrap();
        // The supervisor inherits descriptors that are not meant for it, and variables of another supervisor.
        let mut command = Command::new("/bin/sh");
        command
            .args(["-c", "exec 3</dev/null 9</dev/null; exec \"$0\" \"$@\""])
            .arg(&own)
            .args([
                "role-supervise",
                &deaths.to_string(),
                &store_max.to_string(),
            ])
            .args([own.as_os_str(), "role-serve".as_ref(), path.as_os_str()])
            .env("LISTEN_FDS", "1")
            .env("LISTEN_FDNAMES", "foreign")
            .env("TMPDIR", dir.path())
            .stdin(Stdio::piped())
            .stderr(File::create(dir.path().join("log")).unwrap());
        let supervisor = command.spawn().unwrap();
        Self {
            dir,
            listener,
            supervisor,
        }
    }

    fn server(&self) -> Server {
        Server::accept(&self.listener, &self.supervisor)
    }

    /// Waits for the end of the supervisor. Returns its exit code and its log.
    fn end(mut self) -> (Option<i32>, String) {
        let code = self.supervisor.wait().unwrap().code();
        let log = fs::read_to_string(self.dir.path().join("log")).unwrap();
        let left = fs::read_dir(self.dir.path()).unwrap();
        let left = left.map(|entry| entry.unwrap().file_name());
        assert!(left.into_iter().all(|name| name == "log" || name == "test"));
        (code, log)
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.supervisor), signal).unwrap();
    }
}

fn descriptors_survive_sigkill() {
    let supervised = SupervisedSocket::start(10, 4096);
    let mut server = supervised.server();
    assert_eq!(server.names, "");
    assert_eq!(server.ask("keeps"), "true");
    for order in [
        "keep a one",
        "keep a two",
        "keep b three",
        "bag bag four",
        "send READY=1",
    ] {
        server.order(order);
    }
    server.kill();
    let mut server = supervised.server();
    assert_eq!(server.names, "a,b,bag");
    assert_eq!(server.ask("variable LISTEN_FDNAMES"), "a:a:b:bag:bag");
    assert_eq!(server.ask("read a"), "one,two");
    assert_eq!(server.ask("read b"), "three");
    assert_eq!(server.ask("read-bag bag"), "7:four");
    server.order("forget a");
    server.order("keep c five");
    server.kill();
    let mut server = supervised.server();
    assert_eq!(server.names, "b,bag,c");
    assert_eq!(server.ask("read b"), "three");
    assert_eq!(server.ask("read-bag bag"), "7:four");
    assert_eq!(server.ask("read c"), "five");
    server.exit(0);
    assert_eq!(supervised.end().0, Some(0));
}

fn more_descriptors_than_one_message_has_arrive_in_order() {
    let supervised = SupervisedSocket::start(10, 4096);
    let mut server = supervised.server();
    server.order("send READY=1");
    let contents: Vec<_> = (0..300).map(|number| number.to_string()).collect();
    for content in &contents {
        server.order(&format!("keep many {content}"));
    }
    server.kill();
    let mut server = supervised.server();
    assert_eq!(server.ask("read many"), contents.join(","));
    server.exit(0);
    assert_eq!(supervised.end().0, Some(0));
}

fn a_command_gets_what_it_expects() {
    let mut supervised = SupervisedSocket::start(10, 4096);
    let mut server = supervised.server();
    assert_eq!(server.ask("variable LISTEN_FDS"), "");
    assert_eq!(server.ask("variable FDSTORE"), "4096");
    let status = server.ask("read-file /proc/self/status");
    let field = |name: &str| {
        let mut lines = status.split('|');
        let line = lines.find_map(|line| line.strip_prefix(name)).unwrap();
        u64::from_str_radix(line.trim(), 16).unwrap()
    };
    assert_eq!(field("SigBlk:"), 0);
    // SIGHUP, SIGINT and SIGTERM.
    let signals = [1, 2, 15]
        .map(|signal| 1 << (signal - 1))
        .iter()
        .sum::<u64>();
    assert_eq!(field("SigIgn:") & signals, 0);
    // The server has six descriptors open: the standard streams, the connection to the supervisor, and the connection to the
    // test with its copy.
    assert_eq!(server.ask("descriptors"), "[0, 1, 2, 3, 4, 5]");
    supervised
        .supervisor
        .stdin
        .take()
        .unwrap()
        .write_all(b"typed")
        .unwrap();
    assert_eq!(server.ask("read-file /dev/stdin"), "typed");
    server.exit(0);
    assert_eq!(supervised.end().0, Some(0));
}

fn the_supervisor_gives_up_after_deaths() {
    let supervised = SupervisedSocket::start(3, 4096);
    // The supervisor gives up after three deaths within a minute. On a slow machine, three deaths may take longer than a
    // minute, so more servers die first.
    let mut deaths = 0;
    while let Some(mut server) = Server::accept_next(&supervised.listener, &supervised.supervisor) {
        server.order("send READY=1");
        server.kill();
        deaths += 1;
    }
    assert!(deaths >= 3, "{deaths}");
    let (code, log) = supervised.end();
    assert_eq!(code, Some(1));
    let message = "role-serve";
    assert!(!log.contains(message), "arguments may have secrets: {log}");
    assert!(
        log.contains("ended 3 times within a minute, at last with signal: 9"),
        "{log}"
    );
    assert!(log.contains("supervisor-"), "the command's name: {log}");
}

fn a_command_that_was_never_ready_is_not_started_again() {
    let supervised = SupervisedSocket::start(10, 4096);
    supervised.server().exit(7);
    let (code, log) = supervised.end();
    assert_eq!(code, Some(7));
    assert!(log.contains("It was never ready"), "{log}");
}

fn a_command_with_wrong_arguments_is_not_started_again() {
    let supervised = SupervisedSocket::start(10, 4096);
    let mut server = supervised.server();
    server.order("send READY=1");
    server.kill();
    supervised.server().exit(2);
    let (code, log) = supervised.end();
    assert_eq!(code, Some(2));
    assert!(log.contains("Its arguments are wrong"), "{log}");
}

fn sigterm_and_sigint_end_the_command_and_the_supervisor() {
    for (signal, code) in [(Signal::TERM, 143), (Signal::INT, 130)] {
        let supervised = SupervisedSocket::start(10, 4096);
        let mut server = supervised.server();
        server.order("send READY=1");
        supervised.signal(signal);
        server.wait();
        assert_eq!(supervised.end().0, Some(code));
    }
}

fn sighup_is_passed_on_and_does_not_end_the_supervisor() {
    let supervised = SupervisedSocket::start(10, 4096);
    let mut server = supervised.server();
    server.order("send READY=1");
    server.order("barrier");
    supervised.signal(Signal::HUP);
    server.wait();
    supervised.server().exit(0);
    let (code, log) = supervised.end();
    assert_eq!(code, Some(0));
    assert!(log.contains("ended with signal: 1"), "{log}");
}

fn a_successor_becomes_the_main_process() {
    let supervised = SupervisedSocket::start(10, 4096);
    let mut old = supervised.server();
    old.order("keep a one");
    let pid = old.ask("successor");
    let mut new = supervised.server();
    assert_eq!(new.pid.as_raw_pid().to_string(), pid);
    // The supervisor passes descriptors only to processes that it starts.
    assert_eq!(new.names, "");
    old.order(&format!("send MAINPID={pid}|READY=1"));
    old.exit(0);
    new.order("keep b two");
    new.order("barrier");
    new.kill();
    let mut server = supervised.server();
    assert_eq!(server.names, "a,b");
    assert_eq!(server.ask("read a"), "one");
    // The server dies right after its message, and the supervisor still handles the message.
    let pid = server.ask("successor");
    let new = supervised.server();
    server.order(&format!("send MAINPID={pid}"));
    server.kill();
    new.exit(5);
    supervised.server().exit(0);
    let (code, log) = supervised.end();
    assert_eq!(code, Some(0));
    assert!(log.contains("ended with exit status: 5"), "{log}");
}

fn a_successor_that_has_ended_already_counts() {
    let supervised = SupervisedSocket::start(10, 4096);
    let mut old = supervised.server();
    let pid = old.ask("successor");
    // The successor's parent does not reap it.
    supervised.server().exit(5);
    // Both orders are sent in one write, because the supervisor may end the process after the first.
    write!(old.stream.get_mut(), "send MAINPID={pid}|READY=1\nexit 0\n").unwrap();
    old.wait();
    supervised.server().exit(0);
    let (code, log) = supervised.end();
    assert_eq!(code, Some(0));
    assert!(log.contains("ended with exit status: 5"), "{log}");
}

fn a_previous_main_process_ends_before_another_starts() {
    let supervised = SupervisedSocket::start(10, 4096);
    let mut old = supervised.server();
    let pid = old.ask("successor");
    let new = supervised.server();
    old.order(&format!("send MAINPID={pid}|READY=1"));
    old.order("barrier");
    new.kill();
    let server = supervised.server();
    let process_dir = fs::read_dir(format!("/proc/{}", old.pid.as_raw_pid()));
    assert!(process_dir.is_err(), "the former main process lives on");
    old.wait();
    server.exit(0);
    assert_eq!(supervised.end().0, Some(0));
}

fn sigterm_after_a_hand_over_goes_to_the_successor() {
    let supervised = SupervisedSocket::start(10, 4096);
    let mut old = supervised.server();
    let pid = old.ask("successor");
    let new = supervised.server();
    old.order(&format!("send MAINPID={pid}|READY=1"));
    old.exit(0);
    supervised.signal(Signal::TERM);
    new.wait();
    assert_eq!(supervised.end().0, Some(143));
}

fn other_messages_are_ignored() {
    let supervised = SupervisedSocket::start(10, 4096);
    let mut server = supervised.server();
    let own = std::process::id();
    for message in [
        "MAINPID=1",
        &format!("MAINPID={own}"),
        "MAINPID=-1",
        "MAINPID=0",
        "MAINPID=x",
        "FDSTOREREMOVE=1",
        "FDSTORE=1",
        "WATCHDOG=1",
        "READY=0",
        "no assignment",
        &"x".repeat(5000),
    ] {
        server.order(&format!("send {message}"));
    }
    server.order("barrier");
    let address = server.ask("variable NOTIFY_SOCKET");
    let dir = Path::new(&address).parent().unwrap();
    let mode = fs::metadata(dir).unwrap().permissions().mode();
    assert_eq!(mode & 0o7777, 0o700, "another user reaches the supervisor");
    server.exit(7);
    let (code, log) = supervised.end();
    assert_eq!(code, Some(7));
    let ignored = log.lines().filter(|line| line.contains("MAINPID="));
    assert_eq!(ignored.count(), 5, "{log}");
    assert!(log.contains("lost bytes or descriptors"), "{log}");
    assert!(log.contains("It was never ready"), "{log}");
}

fn a_full_store_refuses_more() {
    let supervised = SupervisedSocket::start(10, 2);
    let mut server = supervised.server();
    assert_eq!(server.ask("variable FDSTORE"), "2");
    for order in ["send READY=1", "keep a one", "keep b two", "keep c three"] {
        server.order(order);
    }
    server.kill();
    let server = supervised.server();
    assert_eq!(server.names, "a,b");
    server.exit(0);
    let (code, log) = supervised.end();
    assert_eq!(code, Some(0));
    assert!(
        log.contains("\"c\" is not stored: the store is full (at most 2 descriptors)"),
        "{log}"
    );
}

fn a_command_that_does_not_exist_is_named() {
    let own = std::env::current_exe().unwrap();
    let mut command = Command::new(own);
    let output = command
        .args(["role-supervise", "10", "4096", "/nowhere/server"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    let log = String::from_utf8(output.stderr).unwrap();
    assert!(log.contains("Cannot execute \"/nowhere/server\""), "{log}");
}

fn systemd_notify_reaches_the_supervisor() {
    let Some(program) = find_program("systemd-notify") else {
        return;
    };
    let supervised = SupervisedSocket::start(10, 4096);
    let mut server = supervised.server();
    let run = format!("run {} --ready --status=hello", program.display());
    assert_eq!(server.ask(&run), "exit status: 0");
    server.kill();
    supervised.server().exit(0);
    let (code, log) = supervised.end();
    assert_eq!(code, Some(0));
    assert!(log.contains(": hello"), "{log}");
}

fn systemd_socket_activate_is_a_supervisor_too() {
    let Some(program) = find_program("systemd-socket-activate") else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let [path, activation] = ["test", "activation"].map(|name| dir.path().join(name));
    let listener = UnixListener::bind(&path).unwrap();
    let log = dir.path().join("log");
    let mut command = Command::new(program);
    command
        .arg(format!("--listen={}", activation.display()))
        .arg("--fdname=drive 0")
        .arg(std::env::current_exe().unwrap())
        .arg("role-serve")
        .arg(&path)
        .stderr(Stdio::piped());
    let mut activator = command.spawn().unwrap();
    // The activator reports that it listens.
    let mut reports = BufReader::new(activator.stderr.take().unwrap());
    let mut report = String::new();
    reports.read_line(&mut report).unwrap();
    assert!(report.starts_with("Listening on"), "{report}");
    let _client = UnixStream::connect(&activation).unwrap();
    let server = Server::accept(&listener, &activator);
    assert_eq!(server.names, "drive 0");
    server.exit(0);
    assert_eq!(activator.wait().unwrap().code(), Some(0), "{log:?}");
}

/// Returns the path of a systemd program if it is installed.
fn find_program(program: &str) -> Option<PathBuf> {
    let path = Path::new("/usr/bin").join(program);
    if path.exists() {
        return Some(path);
    }
    println!(
        "NOT CHECKED: {} does not exist: install systemd",
        path.display()
    );
    None
}

fn run_tests() -> ExitCode {
    let tests: &[(&str, fn())] = &[
        ("descriptors_survive_sigkill", descriptors_survive_sigkill),
        (
            "more_descriptors_than_one_message_has_arrive_in_order",
            more_descriptors_than_one_message_has_arrive_in_order,
        ),
        (
            "a_command_gets_what_it_expects",
            a_command_gets_what_it_expects,
        ),
        (
            "the_supervisor_gives_up_after_deaths",
            the_supervisor_gives_up_after_deaths,
        ),
        (
            "a_command_that_was_never_ready_is_not_started_again",
            a_command_that_was_never_ready_is_not_started_again,
        ),
        (
            "a_command_with_wrong_arguments_is_not_started_again",
            a_command_with_wrong_arguments_is_not_started_again,
        ),
        (
            "sigterm_and_sigint_end_the_command_and_the_supervisor",
            sigterm_and_sigint_end_the_command_and_the_supervisor,
        ),
        (
            "sighup_is_passed_on_and_does_not_end_the_supervisor",
            sighup_is_passed_on_and_does_not_end_the_supervisor,
        ),
        (
            "a_successor_becomes_the_main_process",
            a_successor_becomes_the_main_process,
        ),
        (
            "a_successor_that_has_ended_already_counts",
            a_successor_that_has_ended_already_counts,
        ),
        (
            "a_previous_main_process_ends_before_another_starts",
            a_previous_main_process_ends_before_another_starts,
        ),
        (
            "sigterm_after_a_hand_over_goes_to_the_successor",
            sigterm_after_a_hand_over_goes_to_the_successor,
        ),
        ("other_messages_are_ignored", other_messages_are_ignored),
        ("a_full_store_refuses_more", a_full_store_refuses_more),
        (
            "a_command_that_does_not_exist_is_named",
            a_command_that_does_not_exist_is_named,
        ),
        (
            "systemd_notify_reaches_the_supervisor",
            systemd_notify_reaches_the_supervisor,
        ),
        (
            "systemd_socket_activate_is_a_supervisor_too",
            systemd_socket_activate_is_a_supervisor_too,
        ),
    ];
    let trial = |(name, test): &(&'static str, fn())| {
        let test = *test;
        Trial::test(*name, move || {
            test();
            Ok(())
        })
    };
    let trials = tests.iter().map(trial).collect();
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}
