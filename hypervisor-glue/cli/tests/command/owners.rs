//! Tests of leases that belong to users, and of VMMs of several users on one server.

use std::env;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use nvme_mpt_tests::not_checked::not_checked;

use crate::support::{Bench, Server, TIMEOUT, has_aio};
use crate::vmms::{TestVmm, await_leases};

const ALICE: u32 = 1001;
const BOB: u32 = 1002;

const FIRST: &str = "path=drive.img,range=0+16M,id=first";

/// Returns whether this process can become another user.
fn is_root() -> bool {
    let root = nix::unistd::getuid().is_root();
    if !root {
        not_checked("root alone can be several users");
    }
    root
}

fn serve_command(bench: &Bench) -> Command {
    // Mode of a usual directory in /srv.
    fs::set_permissions(bench.path(""), fs::Permissions::from_mode(0o755)).unwrap();
    let mut serve = bench.serve_command("one", &[]);
    serve.args(["--drive", "path=drive.img"]);
    serve.args(["--vmm-socket", "mode=0666"]);
    serve
}

fn server(bench: &Bench) -> Server {
    Server::start(serve_command(bench)).unwrap()
}

fn refusal(bench: &Bench, user: u32, options: &str) -> String {
    let mut vmm = TestVmm::start_as(bench, user, options, 1);
    let report = vmm.report();
    assert!(report.starts_with("refused: "), "{report}");
    vmm.end();
    report
}

fn run(bench: &Bench, command: &str, arguments: &[&str]) -> String {
    let output = bench.run(command, arguments);
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Returns the owner and the limits of each id.
fn lease_settings(bench: &Bench) -> serde_json::Value {
    let settings = run(bench, "leases", &["terms", "--json"]);
    serde_json::from_str(&settings).unwrap()
}

fn ledger(bench: &Bench) -> String {
    fs::read_to_string(bench.path("state/leases.json")).unwrap_or_default()
}

/// Each container has its own PID namespace, so servers in two containers can have the same process id.
#[test]
fn servers_of_two_pid_namespaces_share_a_state_directory() {
    if !is_root() {
        return;
    }
    let bench = Bench::new();
    fs::write(bench.path("other.img"), vec![0; 1 << 20]).unwrap();
    let in_a_namespace = |name: &str, drive: &str| {
        let function = format!("socket={name}.sock,path={drive},id={name}");
        let serve = bench.serve_command(name, &[&function]);
        let mut contained = Command::new("unshare");
        contained
            .args(["--pid", "--fork", "--kill-child"])
            .arg(serve.get_program())
            .args(serve.get_args())
            .current_dir(bench.path("."))
            .env("RUST_LOG", "warn")
            .stdin(Stdio::null());
        Server::start(contained).unwrap_or_else(|failure| panic!("{failure:?}"))
    };
    let sockets = || fs::read_dir(bench.path("state/servers")).unwrap().count();
    let first = in_a_namespace("a", "drive.img");
    let second = in_a_namespace("b", "other.img");
    assert_eq!(sockets(), 2);
    // Two servers run, and neither uses the other's files. A third server does not use them either.
    let third = bench
        .serve("c", &["socket=c.sock,path=null:1M,id=c"])
        .unwrap();
    assert_eq!(sockets(), 3);
    let taken = bench.serve("d", &["socket=d.sock,path=drive.img,id=d"]);
    let refused = format!("{:?}", taken.expect_err("it is leased"));
    assert!(refused.contains("overlaps lease"), "{refused}");
    let states: Vec<_> = bench
        .leases()
        .into_iter()
        .map(|(id, state, _)| (id, state))
        .collect();
    let held = |id: &str| (id.to_owned(), "held".to_owned());
    assert_eq!(states, [held("a"), held("b")]);
    // The next server removes the socket that a killed server has left.
    first.kill();
    let deadline = Instant::now() + TIMEOUT;
    while bench.leases()[0].1 != "stale" {
        assert!(Instant::now() < deadline, "the kernel ends the namespace");
        thread::sleep(Duration::from_millis(10));
    }
    let next = in_a_namespace("a", "drive.img");
    assert_eq!(sockets(), 3);
    for server in [next, second] {
        server.kill();
    }
    third.stop();
}

#[test]
fn a_vmm_of_another_user_gets_the_leases_that_it_owns() {
    if !is_root() {
        return;
    }
    let bench = Bench::new();
    let server = server(&bench);
    let before = ledger(&bench);
    let message = refusal(&bench, ALICE, FIRST);
    for part in [
        "Lease \"first\" belongs to no user yet, and user 1001 asks for it",
        "owner=1001`",
    ] {
        assert!(message.contains(part), "{message}");
    }
    assert_eq!(ledger(&bench), before, "nothing has changed");

    let reserve = format!("{FIRST},owner={ALICE},iops=100000");
    let message = bench.ask("reserve", &[&reserve]).unwrap();
    assert!(
        message.starts_with("Reserved first for 1001: range 0+16M of /"),
        "{message}"
    );
    let reserved = ledger(&bench);
    let message = refusal(&bench, BOB, FIRST);
    for part in [
        "Lease \"first\" belongs to user 1001, and user 1002 asks for it",
        "`nvme-mpt leases give first 1002`",
    ] {
        assert!(message.contains(part), "{message}");
    }
    for (options, part) in [
        (
            "path=drive.img,range=0+32M,id=first",
            "is not reserved for lease",
        ),
        (
            "path=drive.img,range=0+16M,id=first,data=wipe",
            "Option \"data\" is not for VMMs of user 1001",
        ),
        ("path=drive.img,id=first,profile=nvm", "Option \"profile\""),
        (
            "path=drive.img,range=0+16M,id=first,queues=65",
            "Option \"queues=65\" is not for VMMs of user 1001",
        ),
        (
            "path=drive.img,range=0+16M,id=second",
            "Lease \"second\" belongs to no user",
        ),
    ] {
        let message = refusal(&bench, ALICE, options);
        assert!(message.contains(part), "{message}");
    }
    assert_eq!(ledger(&bench), reserved, "nothing has changed");

    let mut first = TestVmm::start_as(&bench, ALICE, FIRST, 1);
    assert_eq!(first.report(), "attached");
    assert_eq!(first.pass(), "passed");
    let listed = run(&bench, "leases", &["list", "--json"]);
    let listed: serde_json::Value = serde_json::from_str(&listed).unwrap();
    assert_eq!(listed[0]["owner"], ALICE);
    let listed = run(&bench, "leases", &[]);
    assert!(listed.contains("1001"), "{listed}");
    let listed = bench.ask("list", &[]).unwrap();
    assert!(listed.contains("iops=100000"), "{listed}");

    // After the server was killed, the lease still belongs to Alice.
    server.kill();
    let message = {
        let server = self::server(&bench);
        assert_eq!(first.pass(), "passed");
        let message = refusal(&bench, BOB, FIRST);
        first.end();
        await_leases(&bench, &[]);
        server.stop();
        message
    };
    assert!(message.contains("belongs to user 1001"), "{message}");
}

#[test]
fn an_operator_gives_a_lease_to_another_user_and_forgets_it() {
    if !is_root() {
        return;
    }
    let bench = Bench::new();
    let server = server(&bench);
    let reserve = format!("{FIRST},owner={ALICE}");
    bench.ask("reserve", &[&reserve]).unwrap();
    // Root may attach a user's lease, and the lease's owner does not change.
    let mut root = TestVmm::start(&bench, FIRST, 1);
    assert_eq!(root.report(), "attached");
    assert_eq!(lease_settings(&bench)["first"]["owner"], ALICE);
    let given = run(&bench, "leases", &["give", "first", "1002"]);
    assert_eq!(given, "Lease first belongs to 1002 now\n");
    // The VMM keeps the lease that it is using.
    assert_eq!(root.pass(), "passed");
    root.end();
    await_leases(&bench, &[]);
    assert!(refusal(&bench, ALICE, FIRST).contains("belongs to user 1002"));
    let mut bob = TestVmm::start_as(&bench, BOB, FIRST, 1);
    assert_eq!(bob.report(), "attached");
    bob.end();
    await_leases(&bench, &[]);
    // The release removes the owner, and the data is erased before the next owner gets the range.
    run(&bench, "leases", &["release", "first"]);
    assert_eq!(lease_settings(&bench), serde_json::json!({}));
    assert!(refusal(&bench, BOB, FIRST).contains("belongs to no user"));
    let none = bench.run("leases", &["give", "none", "1002"]);
    let stderr = String::from_utf8(none.stderr).unwrap();
    assert!(stderr.contains("There is no lease \"none\""), "{stderr}");
    server.stop();
}

#[test]
fn the_first_vmm_that_takes_a_lease_owns_it_and_a_sockets_owner_too() {
    let bench = Bench::new();
    let server = server(&bench);
    let mut first = TestVmm::start(&bench, FIRST, 1);
    assert_eq!(first.report(), "attached");
    let user = nix::unistd::getuid().as_raw();
    assert_eq!(lease_settings(&bench)["first"]["owner"], user);
    first.end();
    let owner = format!("path=drive.img,range=16M+16M,id=b,socket=b.sock,owner={user}");
    bench.ask("add", &[&owner]).unwrap();
    bench
        .ask("add", &["path=drive.img,range=32M+16M,id=c,socket=c.sock"])
        .unwrap();
    let settings = lease_settings(&bench);
    assert_eq!(settings["b"]["owner"], user);
    assert!(settings["c"].is_null(), "{settings}");
    let unknown = format!("{FIRST},owner=no-such-user");
    let message = bench.ask("reserve", &[&unknown]).unwrap_err();
    assert!(
        message.contains("There is no user \"no-such-user\""),
        "{message}"
    );
    server.stop();
}

#[test]
fn other_users_reach_a_server_only_if_it_allows_them() {
    if !is_root() {
        return;
    }
    let bench = Bench::new();
    let mode_of = |name: &str| fs::metadata(bench.path(name)).unwrap().mode() & 0o7777;
    fs::set_permissions(bench.path(""), fs::Permissions::from_mode(0o755)).unwrap();
    let mut closed = bench.serve_command("one", &[]);
    closed.args(["--drive", "path=drive.img"]);
    let server = Server::start(closed).unwrap();
    assert_eq!([mode_of("state"), mode_of("state/servers")], [0o700; 2]);
    // Alice's VMM cannot find the server, and may not open the drive itself.
    refusal(&bench, ALICE, FIRST);
    server.stop();
    let server = self::server(&bench);
    assert_eq!([mode_of("state"), mode_of("state/servers")], [0o711, 0o755]);
    bench
        .ask("add", &["path=drive.img,range=32M+16M,id=c,socket=c.sock"])
        .unwrap();
    for file in ["leases.json", "leases.lock", "holders.lock"] {
        assert_eq!(mode_of(&format!("state/{file}")), 0o600, "{file}");
    }
    assert_eq!(mode_of("one.control.functions.toml"), 0o600);
    let message = refusal(&bench, ALICE, FIRST);
    assert!(message.contains("belongs to no user"), "{message}");
    server.stop();
}

#[test]
fn reserved_ranges_are_refused_to_others() {
    let bench = Bench::new();
    let server = server(&bench);
    let user = nix::unistd::getuid().as_raw();
    let reserve =
        |what: &str| bench.ask("reserve", &[&format!("path=drive.img,owner={user},{what}")]);
    reserve("range=0+16M,id=first").unwrap();
    reserve("size=16M,unit=1M,id=second").unwrap();
    for (what, error_message) in [
        ("range=8M+16M,id=third", "data of lease \"first\""),
        ("size=64M,unit=1M,id=third", "There is no capacity"),
        (
            "range=0+16M,id=third,queues=2",
            "There is no option \"queues\"",
        ),
    ] {
        let message = reserve(what).unwrap_err();
        assert!(message.contains(error_message), "{message}");
    }
    let mut second = TestVmm::start(&bench, "path=drive.img,size=16M,unit=1M,id=second", 1);
    assert_eq!(second.report(), "attached");
    assert_eq!(second.pass(), "passed");
    second.end();
    server.stop();
}

/// Environment variable of [`crowd`]: the directory with the sockets of servers.
const SOCKETS: &str = "TEST_CROWD_SOCKETS";

/// A process of another user with many connections, started by another test.
#[test]
#[ignore = "started by other tests"]
fn crowd() {
    nix::unistd::setuid(ALICE.into()).unwrap();
    let mut sockets = fs::read_dir(env::var(SOCKETS).unwrap()).unwrap();
    let socket = sockets.next().unwrap().unwrap().path();
    let connections: Vec<_> = (0..192)
        .map(|_| UnixStream::connect(&socket).unwrap())
        .collect();
    println!("connected");
    let mut end = String::new();
    std::io::stdin().read_line(&mut end).unwrap();
    drop(connections);
}

#[test]
fn a_users_idle_connections_block_no_other_user() {
    if !is_root() {
        return;
    }
    let bench = Bench::new();
    let server = server(&bench);
    let mut crowd = Command::new(env::current_exe().unwrap())
        .args(["--exact", "owners::crowd", "--ignored", "--nocapture"])
        .env(SOCKETS, bench.path("state/servers"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = std::io::BufReader::new(crowd.stdout.take().unwrap());
    let mut line = String::new();
    while !line.ends_with("connected\n") {
        let read = std::io::BufRead::read_line(&mut lines, &mut line).unwrap();
        assert_ne!(read, 0, "the crowd ended");
    }
    let mut first = TestVmm::start(&bench, FIRST, 1);
    assert_eq!(first.report(), "attached");
    first.end();
    drop(crowd.stdin.take());
    assert!(crowd.wait().unwrap().success());
    let (status, stderr) = server.signal("TERM");
    assert!(status.success(), "{status}: {stderr}");
    let message = "user 1001 has 64 connections without a lease";
    assert!(stderr.contains(message), "{stderr}");
}

#[test]
fn blocking_eventfds_of_a_user_delay_no_other_user() {
    if !is_root() {
        return;
    }
    let bench = Bench::new();
    let server = server(&bench);
    let mine = format!("path=drive.img,range=0+16M,id=first,owner={ALICE}");
    bench.ask("reserve", &[&mine]).unwrap();
    let mut neighbour = TestVmm::start(&bench, "path=drive.img,range=16M+16M,id=second", 2);
    assert_eq!(neighbour.report(), "attached");
    assert_eq!(neighbour.pass(), "passed");
    let pid = server.pid().to_string();
    assert!(!has_aio(&pid), "no user has to be distrusted yet");
    let mut alice = TestVmm::start_as(&bench, ALICE, FIRST, 1);
    assert_eq!(alice.report(), "attached");
    assert!(has_aio(&pid));
    assert_eq!(alice.order("block"), "blocked");
    assert_eq!(neighbour.pass(), "passed");
    assert_eq!(alice.pass(), "passed", "her own queues go on as well");
    alice.kill();
    assert_eq!(neighbour.pass(), "passed");
    // The server writes to eventfds of root directly, until a write blocks.
    let mut root = TestVmm::start(&bench, "path=drive.img,range=32M+16M,id=third", 3);
    assert_eq!(root.report(), "attached");
    assert_eq!(root.order("block"), "blocked");
    assert_eq!(neighbour.pass(), "passed");
    assert_eq!(root.pass(), "passed");
    root.kill();
    assert_eq!(neighbour.pass(), "passed");
    neighbour.end();
    let (status, log) = server.signal("TERM");
    assert!(status.success(), "{log}");
    assert!(log.contains("of its VMM block"), "{log}");
}
