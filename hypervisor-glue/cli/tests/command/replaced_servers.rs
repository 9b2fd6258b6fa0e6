//! Clients whose servers are killed or replaced. A client must notice only a pause.

use std::collections::BTreeMap;
use std::fs;
use std::process::Stdio;
use std::thread;
use std::time::{Duration, Instant};

use nvme_mpt_tests::command::Sqe;
use nvme_mpt_tests::controller::QueueOptions;
use nvme_mpt_tests::doorbell::DoorbellMode;
use nvme_mpt_tests::memory::GuestMemory;
use nvme_mpt_tests::rng::Rng;
use nvme_mpt_tests::vfio_user::VfioUserBar;

use crate::supervised_server::{SupervisedServer, await_waiting};
use crate::support::{Bench, TIMEOUT, exists, has_aio};
use crate::verifying_guest::{Guest, GuestMeasurements, LongestTimes, Pause, run_beside};

/// Doorbell modes, the ways in which a client writes doorbells, with which the tests run.
pub(crate) const DOORBELLS: [DoorbellMode; 3] = [
    DoorbellMode::Shadow,
    DoorbellMode::Mapped,
    DoorbellMode::Trap,
];

/// Way in which a server ends.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ServerEnd {
    Kill,
    Upgrade,
}

/// Returns the median and the maximum.
fn median_and_most(times: &mut [Duration]) -> (Duration, Duration) {
    times.sort();
    (times[times.len() / 2], times[times.len() - 1])
}

/// Returns a histogram of times, in buckets between powers of two of a millisecond.
fn histogram(times: &[Duration]) -> String {
    let mut counts = BTreeMap::new();
    for time in times {
        let bound = (time.as_millis() + 1).next_power_of_two();
        *counts.entry(bound).or_insert(0) += 1;
    }
    let counts = counts.iter();
    let counts: Vec<_> = counts
        .map(|(bound, count)| format!("below {bound} ms {count}"))
        .collect();
    counts.join(", ")
}

/// Returns, for each span of `times`, the longest pause of a client that overlaps the span. Omits spans without such a pause,
/// as the client had no command in flight or had an admin command.
fn pauses_at(times: &[Pause], pauses: &[Pause]) -> Vec<Duration> {
    let longest = |time: &Pause| {
        let overlapping = pauses.iter().filter(|pause| pause.overlaps(*time));
        overlapping.map(|pause| pause.length()).max()
    };
    times.iter().filter_map(longest).collect()
}

/// Prints the times without a completion, and the times until the next server was ready. `without_server` are the time
/// spans in which the function had no server.
fn report(
    end: ServerEnd,
    name: &str,
    without_server: &[Pause],
    mut measurement: GuestMeasurements,
) {
    let (median, most) = median_and_most(&mut measurement.starts);
    println!(
        "{end:?}, {name}: the next server was ready after {median:.1?} (median), {most:.1?} at most"
    );
    for (done, longest) in measurement.guests {
        let LongestTimes {
            mut without,
            mut administered,
            pauses,
        } = longest;
        assert!(done > without.len() as u64);
        let (median, most) = median_and_most(&mut without);
        println!(
            "{end:?}, {name}: {done} I/Os; without one for {median:.1?} (median), {most:.1?} at most: {}",
            histogram(&without)
        );
        let mut at_ends = pauses_at(without_server, &pauses);
        if !at_ends.is_empty() {
            let (median, most) = median_and_most(&mut at_ends);
            println!(
                "{end:?}, {name}: where the function had no server, without one for {median:.1?} (median), {most:.1?} at most: {}",
                histogram(&at_ends)
            );
        }
        administered.retain(|time| !time.is_zero());
        if !administered.is_empty() {
            let (median, most) = median_and_most(&mut administered);
            println!(
                "{end:?}, {name}: a queue pair was created, used and deleted in {median:.1?} (median), {most:.1?} at most"
            );
        }
    }
}

/// Checks for each doorbell mode that a guest on a drive in a file survives the end of `times` servers.
fn survives_on_a_file(end: ServerEnd, times: usize) {
    for doorbells in DOORBELLS {
        survives(end, "drive.img", doorbells, true, times);
    }
}

pub(crate) fn survives(
    end: ServerEnd,
    drive: &str,
    doorbells: DoorbellMode,
    stays_connected: bool,
    times: usize,
) {
    survives_with(end, drive, doorbells, stays_connected, times, "");
}

/// Checks that a guest survives the end of `times` servers. `options` are further options of the function, each of which starts
/// with a comma.
pub(crate) fn survives_with(
    end: ServerEnd,
    drive: &str,
    doorbells: DoorbellMode,
    stays_connected: bool,
    times: usize,
    options: &str,
) {
    let bench = Bench::new();
    let mode = match doorbells {
        DoorbellMode::Mapped => "mapped",
        DoorbellMode::Trap => "trap",
        _ => "shadow",
    };
    let function = format!("path={drive},socket=a.sock,doorbells={mode}{options}");
    let supervised = SupervisedServer::start(&bench, &[&function]);
    let guest = Guest::connect(&bench.path("a.sock"), doorbells, stays_connected);
    let measurement = run_beside(vec![guest], times, || match end {
        ServerEnd::Kill => supervised.kill_server(),
        ServerEnd::Upgrade => supervised.upgrade(&bench),
    });
    let without_server = supervised.pauses_in_log("a.sock");
    assert!(without_server.len() >= times, "{without_server:?}");
    report(
        end,
        &format!("{drive}, {mode}"),
        &without_server,
        measurement,
    );
    // The next client finds a controller in its power-on state, with its data.
    await_waiting(&bench);
    let _ = Guest::connect(&bench.path("a.sock"), doorbells, stays_connected);
    supervised.stop();
    assert!(!exists(&bench.path("a.sock")));
}

#[test]
fn clients_with_doorbells_4_bytes_apart_survive_kills_and_upgrades() {
    for doorbells in DOORBELLS {
        for end in [ServerEnd::Kill, ServerEnd::Upgrade] {
            survives_with(end, "memory:64M", doorbells, true, 5, ",doorbell-stride=4");
        }
    }
}

#[test]
fn clients_of_drives_with_models_and_faults_survive_kills_and_upgrades() {
    for (drive, options) in [
        ("memory:64M", ",profile=nvm"),
        ("drive.img", ",profile=ssd"),
        ("drive.img", ",profile=nvm,faults=none"),
    ] {
        for end in [ServerEnd::Kill, ServerEnd::Upgrade] {
            survives_with(end, drive, DoorbellMode::Shadow, true, 5, options);
        }
    }
}

#[test]
fn a_client_of_a_function_with_1024_queue_pairs_survives_kills_and_upgrades() {
    for end in [ServerEnd::Kill, ServerEnd::Upgrade] {
        let options = ",queues=1024";
        survives_with(end, "memory:64M", DoorbellMode::Mapped, true, 3, options);
    }
}

#[test]
fn a_client_on_memory_survives_200_kills() {
    survives(
        ServerEnd::Kill,
        "memory:64M",
        DoorbellMode::Shadow,
        true,
        200,
    );
}

#[test]
fn a_client_on_null_survives_200_kills() {
    survives(
        ServerEnd::Kill,
        "null:64M",
        DoorbellMode::Mapped,
        false,
        200,
    );
}

#[test]
fn a_client_on_a_file_survives_200_kills() {
    survives_on_a_file(ServerEnd::Kill, 67);
}

#[test]
fn a_client_on_memory_survives_200_upgrades() {
    survives(
        ServerEnd::Upgrade,
        "memory:64M",
        DoorbellMode::Shadow,
        true,
        200,
    );
}

#[test]
fn a_client_on_null_survives_200_upgrades() {
    survives(
        ServerEnd::Upgrade,
        "null:64M",
        DoorbellMode::Mapped,
        false,
        200,
    );
}

#[test]
fn a_client_on_a_file_survives_200_upgrades() {
    survives_on_a_file(ServerEnd::Upgrade, 67);
}

#[test]
#[ignore = "ends 6,000 servers"]
fn clients_survive_a_thousand_ends_of_each_kind() {
    for end in [ServerEnd::Kill, ServerEnd::Upgrade] {
        survives(end, "memory:64M", DoorbellMode::Shadow, true, 1000);
        survives(end, "null:64M", DoorbellMode::Mapped, false, 1000);
        survives_on_a_file(end, 334);
    }
}

/// A guest runs commands beside 63 idle guests with eight queues each, which the next server must restore as well.
#[test]
#[ignore = "ends servers of 64 functions 100 times"]
fn sixty_four_functions_continue_with_the_next_server() {
    let bench = Bench::new();
    let functions: Vec<_> = (0..64)
        .map(|number| format!("path=null:64M,range={number}M+1M,socket={number}.sock,id=f{number}"))
        .collect();
    let functions: Vec<_> = functions.iter().map(String::as_str).collect();
    let supervised = SupervisedServer::start(&bench, &functions);
    let mut guests = (0..64).map(|number| {
        let socket = bench.path(&format!("{number}.sock"));
        let mut guest = Guest::connect(&socket, DoorbellMode::Shadow, false);
        let options = QueueOptions::polled(64);
        let mut queues = Vec::new();
        for id in 3..10 {
            queues.push(guest.controller.create_queue_pair(id, &options).unwrap());
        }
        (guest, queues)
    });
    let (guest, _) = guests.next().unwrap();
    let idle: Vec<_> = guests.collect();
    let mut guest = Some(guest);
    for end in [ServerEnd::Upgrade, ServerEnd::Kill] {
        let before = supervised.pauses_in_log("0.sock").len();
        let running = guest
            .take()
            .unwrap_or_else(|| Guest::connect(&bench.path("0.sock"), DoorbellMode::Shadow, false));
        let measurement = run_beside(vec![running], 50, || match end {
            ServerEnd::Kill => supervised.kill_server(),
            ServerEnd::Upgrade => supervised.upgrade(&bench),
        });
        let without_server = &supervised.pauses_in_log("0.sock")[before..];
        report(end, "64 functions", without_server, measurement);
    }
    for (mut guest, mut queues) in idle {
        for queue in &mut queues {
            queue.execute(Sqe::flush(1), TIMEOUT).unwrap();
        }
        guest.administer();
    }
    supervised.stop();
}

/// The drive may have to pin each client's memory, so clients with little memory are restored first.
#[test]
fn clients_with_little_memory_continue_before_clients_with_much() {
    let bench = Bench::new();
    let names = ["large", "medium", "small"];
    let functions = names.map(|name| {
        let place = names.iter().position(|other| *other == name).unwrap();
        format!("path=null:64M,range={place}M+1M,socket={name}.sock,id={name}")
    });
    let supervised = SupervisedServer::start(&bench, &functions.each_ref().map(String::as_str));
    let clients = names.iter().zip([64, 32, 2]).map(|(name, mebibytes)| {
        let memory = GuestMemory::new(&[(1 << 30, mebibytes << 20)]).unwrap();
        let socket = bench.path(&format!("{name}.sock"));
        let bar = VfioUserBar::attach(&socket, &memory).unwrap();
        (bar, memory)
    });
    let clients: Vec<_> = clients.collect();
    let listed = || {
        let list = bench.ask("list", &[]).unwrap();
        names.map(|name| list.find(&format!("{name}.sock")).expect("all are listed"))
    };
    supervised.kill_server();
    let log = supervised.log();
    let taken_up = names.map(|name| {
        let log_line = format!("/{name}.sock continues");
        log.find(&log_line)
            .unwrap_or_else(|| panic!("{name}: {log}"))
    });
    assert!(
        taken_up.is_sorted_by(|before, after| before > after),
        "{log}"
    );
    assert!(listed().is_sorted(), "as they were declared");
    drop(clients);
    supervised.stop();
}

#[test]
fn a_server_continues_if_its_successor_fails() {
    let bench = Bench::new();
    let file = bench.path("serve.toml");
    let good = "[[function]]\npath = \"drive.img\"\nsocket = \"a.sock\"\nid = \"a\"\n";
    fs::write(&file, good).unwrap();
    let mut serve = bench.serve_command("one", &[]);
    serve.args(["--config", "serve.toml"]);
    let supervised = SupervisedServer::start_command(&bench, &[], &serve);
    let server = supervised.server_pid();
    let guest = Guest::connect(&bench.path("a.sock"), DoorbellMode::Shadow, true);
    let refused = |arguments: &[&str]| bench.ask("upgrade", arguments).unwrap_err();
    run_beside(vec![guest], 1, || {
        let error = refused(&["--binary", "/nonexistent/nvme-mpt"]);
        let named = "Cannot use the program /nonexistent/nvme-mpt";
        assert!(error.contains(named), "{error}");
        let error = refused(&["--binary", "/bin/true"]);
        assert!(error.contains("exit status: 0"), "{error}");
        let error = refused(&["--binary", "drive.img"]);
        assert!(error.contains("before it could take over"), "{error}");
    });
    assert_eq!(supervised.server_pid(), server);
    supervised.upgrade(&bench);
    let successor = supervised.server_pid();
    assert_ne!(successor, server);
    let logged = format!("Process {} is replacing this server", successor.unwrap());
    assert!(supervised.log().contains(&logged), "{}", supervised.log());
    // `nvme-mpt upgrade` looked for the successor by a connection without a request. The server must not log its end as an
    // error.
    let cut = "not answered: unexpected end of file";
    assert!(!supervised.log().contains(cut), "{}", supervised.log());
    supervised.stop();
}

#[test]
fn a_server_that_is_killed_while_it_starts_loses_nothing() {
    let bench = Bench::new();
    let functions = [
        "path=drive.img,range=0+32M,socket=a.sock,id=a",
        "path=drive.img,range=32M+32M,socket=b.sock,id=b",
        "path=memory:64M,size=32M,unit=1M,socket=c.sock,id=c",
    ];
    let supervised = SupervisedServer::start(&bench, &functions);
    let guests = ["a.sock", "b.sock", "c.sock"]
        .map(|socket| Guest::connect(&bench.path(socket), DoorbellMode::Shadow, true));
    let mut rng = Rng::new(3);
    run_beside(guests.into(), 60, || {
        // Kills the server at an arbitrary point.
        if let Some(server) = supervised.server_pid() {
            SupervisedServer::send("KILL", &server);
        }
        if rng.below(3) == 0 {
            supervised.await_ready();
        }
    });
    // A server that has not installed its signal handlers yet would be killed by the SIGTERM of `stop`, so wait until it is
    // ready.
    let began = Instant::now();
    while bench.ask("list", &[]).is_err() {
        assert!(began.elapsed() < TIMEOUT, "{}", supervised.log());
        thread::sleep(Duration::from_millis(10));
    }
    supervised.stop();
}

/// Returns the process id of a server's successor, which is its child.
fn successor_of(server: &str) -> Option<String> {
    let mut threads = fs::read_dir(format!("/proc/{server}/task")).ok()?.flatten();
    threads.find_map(|thread| {
        let children = fs::read_to_string(thread.path().join("children")).ok()?;
        let first = children.split(' ').next().filter(|pid| !pid.is_empty());
        first.map(str::to_owned)
    })
}

#[test]
fn killing_server_or_successor_during_an_upgrade_loses_nothing() {
    let bench = Bench::new();
    let functions = [
        "path=drive.img,range=0+32M,socket=a.sock,id=a",
        "path=drive.img,range=32M+32M,socket=b.sock,id=b",
        "path=memory:64M,size=32M,unit=1M,socket=c.sock,id=c",
    ];
    let supervised = SupervisedServer::start(&bench, &functions);
    let guests = ["a.sock", "b.sock", "c.sock"]
        .map(|socket| Guest::connect(&bench.path(socket), DoorbellMode::Shadow, true));
    let succeed = |command: &str| {
        let began = Instant::now();
        while bench.ask(command, &[]).is_err() {
            assert!(began.elapsed() < TIMEOUT, "{}", supervised.log());
            thread::sleep(Duration::from_millis(10));
        }
    };
    let mut rng = Rng::new(9);
    run_beside(guests.into(), 60, || {
        let mut upgrade = bench.command("upgrade", &["--control", "one.control"]);
        let upgrade = upgrade.stdout(Stdio::null()).stderr(Stdio::null());
        let mut upgrade = upgrade.spawn().unwrap();
        thread::sleep(Duration::from_micros(rng.below(60_000)));
        // Kills one of the two processes at an arbitrary point.
        let server = supervised.server_pid();
        let victim = match rng.below(2) {
            0 => server,
            _ => server.and_then(|server| successor_of(&server)),
        };
        if let Some(victim) = victim {
            SupervisedServer::send("KILL", &victim);
        }
        // The upgrade command may still wait for a process that has ended.
        let _ = upgrade.kill();
        upgrade.wait().unwrap();
        succeed("list");
    });
    // The last upgrade may still be running.
    succeed("upgrade");
    supervised.stop();
}

#[test]
fn pauses_are_measured_and_reset_counts_continue() {
    let bench = Bench::new();
    let supervised = SupervisedServer::start(&bench, &["path=null:64M,socket=a.sock,id=a"]);
    // If the host holds up a function's thread, statistics omit the function for a moment.
    let has_function = |printed: &str| printed.contains("\"id\":\"a\"");
    let measurement = || {
        let printed = bench.ask_until("stats", &["--json"], has_function);
        let stats: serde_json::Value = serde_json::from_str(&printed.unwrap()).unwrap();
        stats["functions"][0].clone()
    };
    let mut guest = Guest::connect(&bench.path("a.sock"), DoorbellMode::Shadow, false);
    guest.controller.reset().unwrap();
    let before = measurement();
    assert!(before["pause"].is_null(), "{before}");
    assert_eq!(before["resets"]["controller"], 1, "{before}");
    for end in ["upgrade", "crash"] {
        match end {
            "crash" => supervised.kill_server(),
            _ => supervised.upgrade(&bench),
        }
        let after = measurement();
        assert!(!has_aio(&supervised.server_pid().unwrap()));
        assert_eq!(after["pause"]["cause"], end, "{after}");
        let seconds = after["pause"]["seconds"].as_f64().unwrap();
        assert!(seconds > 0.0 && seconds < TIMEOUT.as_secs_f64(), "{after}");
        assert_eq!(after["resets"], before["resets"]);
    }
    drop(guest);
    await_waiting(&bench);
    supervised.kill_server();
    let after = measurement();
    assert!(!has_aio(&supervised.server_pid().unwrap()));
    assert!(after["pause"].is_null(), "no VMM waited: {after}");
    supervised.stop();
}

#[test]
fn added_functions_survive_and_removed_functions_are_released() {
    let bench = Bench::new();
    let supervised =
        SupervisedServer::start(&bench, &["path=drive.img,range=0+1M,socket=a.sock,id=a"]);
    bench
        .ask("add", &["path=drive.img,range=1M+1M,socket=b.sock,id=b"])
        .unwrap();
    let guest = Guest::connect(&bench.path("b.sock"), DoorbellMode::Shadow, true);
    run_beside(vec![guest], 3, || supervised.kill_server());
    await_waiting(&bench);
    bench.ask("remove", &["b"]).unwrap();
    supervised.kill_server();
    let listed = bench.ask("list", &[]).unwrap();
    assert!(
        listed.contains("a.sock") && !listed.contains("b.sock"),
        "{listed}"
    );
    assert!(!exists(&bench.path("b.sock")));
    let log = supervised.log();
    assert!(!log.contains("no longer served"), "{log}");
    supervised.stop();
}
