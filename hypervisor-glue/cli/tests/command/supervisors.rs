//! The end of a supervisor or of a server, and supervisors that adopt a running server.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::RecvTimeoutError;
use std::thread;
use std::time::{Duration, Instant};

use nvme_mpt_tests::doorbell::DoorbellMode;

use crate::supervised_server::{SupervisedServer, await_waiting};
use crate::support::{Bench, TIMEOUT};
use crate::verifying_guest::{Guest, TestProgress};

/// Repeats a command until its output contains `text`. Returns standard output and standard error.
pub(crate) fn await_output(
    bench: &Bench,
    command: &str,
    options: &[&str],
    text: &str,
) -> (String, String) {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let arguments = [&["--control", "one.control"], options].concat();
        let output = bench.run(command, &arguments);
        let [printed, warned] =
            [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
        if printed.contains(text) || warned.contains(text) {
            return (printed, warned);
        }
        assert!(Instant::now() < deadline, "{command}: {printed}{warned}");
        thread::sleep(Duration::from_millis(50));
    }
}

const SUPERVISOR_ENDED: &str = "The supervisor of this server has ended";

#[test]
fn the_end_of_a_supervisor_is_reported_and_another_supervisor_can_adopt_the_server() {
    let bench = Bench::new();
    let functions = [
        "socket=a.sock,path=drive.img,range=0+16M,id=a",
        "socket=b.sock,path=memory:16M,range=0+16M,id=b",
    ];
    let serve = bench.serve_command("one", &functions);
    let first = SupervisedServer::start(&bench, &functions);
    let adopt = ["--adopt", "--control", "one.control", "--delay", "0"];
    // A server refuses a second supervisor.
    let mut refused = SupervisedServer::start_supervisor(&bench, "refused", &adopt, &serve);
    assert_eq!(refused.supervisor.wait().unwrap().code(), Some(1));
    assert!(
        refused.log().contains("its supervisor has not ended"),
        "{}",
        refused.log()
    );
    let running = await_output(&bench, "stats", &["--json"], r#""supervisor":"runs""#);
    assert!(running.1.is_empty(), "{running:?}");

    let course = Arc::new(TestProgress::default());
    let run = |socket: &str| {
        let guest = Guest::connect(&bench.path(socket), DoorbellMode::Shadow, true);
        let course = course.clone();
        thread::spawn(move || guest.run(&course))
    };
    let mut guests = vec![run("a.sock")];
    let server = first.server_pid().expect("a server");
    SupervisedServer::send("KILL", &first.supervisor_pid().to_string());
    await_output(&bench, "list", &[], SUPERVISOR_ENDED);
    await_output(&bench, "stats", &[], SUPERVISOR_ENDED);
    await_output(&bench, "stats", &["--json"], r#""supervisor":"ended""#);
    first.await_log(SUPERVISOR_ENDED);
    // Without a supervisor, VMs still work with the server. Only a successor could not be started.
    guests.push(run("b.sock"));
    let added = "socket=c.sock,path=drive.img,range=16M+16M,id=c";
    bench.ask("add", &[added]).unwrap();
    guests.push(run("c.sock"));
    let refused = bench.ask("upgrade", &[]).unwrap_err();
    assert!(refused.contains("--adopt"), "{refused}");

    let second = SupervisedServer::start_supervisor(&bench, "second", &adopt, &serve);
    await_output(&bench, "stats", &["--json"], r#""supervisor":"runs""#);
    let (_, warned) = await_output(&bench, "list", &[], "drive.img");
    assert_eq!(warned, "");
    // The new supervisor has adopted the server, which is not its child. The successor is a child of the adopted server, and
    // the supervisor must accept it.
    let ended = || course.ended.fetch_add(1, Ordering::Relaxed);
    ended();
    bench
        .ask("upgrade", &[])
        .unwrap_or_else(|error| panic!("{error}; {}", second.log()));
    let upgraded = nvme_mpt_server::control::listening_pid(&bench.path("one.control"));
    let upgraded = upgraded.expect("a server").to_string();
    assert_ne!(upgraded, server);
    ended();
    SupervisedServer::send("KILL", &upgraded);
    second.await_ready();
    ended();
    second.kill_server();
    ended();
    second.upgrade(&bench);
    course.is_over.store(true, Ordering::Relaxed);
    for guest in guests {
        let (done, _) = guest.join().unwrap();
        assert!(done > 4);
    }
    await_waiting(&bench);
    drop(first);
    second.stop();
}

#[test]
fn a_server_started_without_a_supervisor_accepts_none() {
    let bench = Bench::new();
    let function = ["socket=a.sock,path=drive.img,range=0+16M,id=a"];
    let _server = bench.serve("one", &function).unwrap();
    let serve = bench.serve_command("one", &function);
    let adopt = ["--adopt", "--control", "one.control"];
    let mut refused = SupervisedServer::start_supervisor(&bench, "refused", &adopt, &serve);
    assert_eq!(refused.supervisor.wait().unwrap().code(), Some(1));
    let log = refused.log();
    assert!(log.contains("it was started without a supervisor"), "{log}");
}

#[test]
fn the_supervisor_of_an_adopted_server_ends_with_it() {
    let bench = Bench::new();
    let function = ["socket=a.sock,path=drive.img,range=0+16M,id=a"];
    let serve = bench.serve_command("one", &function);
    let first = SupervisedServer::start(&bench, &function);
    let server = first.server_pid().expect("a server");
    SupervisedServer::send("KILL", &first.supervisor_pid().to_string());
    await_output(&bench, "list", &[], SUPERVISOR_ENDED);
    let adopt = ["--adopt", "--control", "one.control"];
    let mut second = SupervisedServer::start_supervisor(&bench, "second", &adopt, &serve);
    await_output(&bench, "stats", &["--json"], r#""supervisor":"runs""#);
    SupervisedServer::send("TERM", &server);
    let status = second.supervisor.wait().unwrap();
    assert!(status.success(), "{status}: {}", second.log());
    drop(first);
}

#[test]
fn without_a_supervisor_there_is_no_upgrade() {
    let bench = Bench::new();
    let server = bench
        .serve("one", &["path=drive.img,socket=a.sock"])
        .unwrap();
    assert!(
        server.printed.contains("Without a supervisor"),
        "{}",
        server.printed
    );
    let error = bench.ask("upgrade", &[]).unwrap_err();
    assert!(error.contains("nvme-mpt supervise"), "{error}");
    server.stop();
}

#[test]
fn a_server_that_keeps_dying_is_not_restarted() {
    let bench = Bench::new();
    let mut supervised = SupervisedServer::start_as(
        &bench,
        &["--deaths", "3"],
        &["path=drive.img,socket=a.sock"],
    );
    // The supervisor gives up after three deaths within a minute. On a slow machine, three deaths may take longer than a
    // minute, so more servers die first.
    let mut deaths = 0;
    loop {
        SupervisedServer::send("KILL", &supervised.server_pid().expect("a server"));
        deaths += 1;
        match supervised.ready.recv_timeout(TIMEOUT) {
            Ok(()) => {}
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => panic!("no server: {}", supervised.log()),
        }
    }
    assert!(deaths >= 3, "{deaths}");
    let status = supervised.supervisor.wait().unwrap();
    assert!(!status.success());
    let log = supervised.log();
    assert!(log.contains("gives up"), "{log}");
}
