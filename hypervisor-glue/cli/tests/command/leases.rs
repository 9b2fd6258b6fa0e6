//! Tests of leases between several processes.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::process::Stdio;
use std::thread;
use std::time::Duration;

use crate::support::{Bench, Server};

fn lease(id: &str, state: &str, range: &str) -> (String, String, String) {
    (id.to_owned(), state.to_owned(), range.to_owned())
}

#[test]
fn two_processes_share_a_drive_but_no_byte_of_it() {
    let bench = Bench::new();
    let first = bench
        .serve("one", &["socket=a.sock,path=drive.img,id=a,range=16M+16M"])
        .unwrap();
    let refused = bench
        .serve("two", &["socket=b.sock,path=drive.img,id=b,range=0+17M"])
        .unwrap_err();
    assert_eq!(refused.status.code(), Some(1));
    let held = format!(
        "held by process {}); choose a range that does not overlap",
        first.pid()
    );
    // The user knows the drive by its path.
    let drive = bench.path("drive.img");
    let range = format!(
        "overlaps lease \"a\" (range 16M+16M of {}, ",
        drive.display()
    );
    for part in [&range, &held] {
        assert!(refused.stderr.contains(part), "{}", refused.stderr);
    }
    // The server that was refused has left no files.
    assert_eq!(
        bench.names(),
        ["a.sock", "drive.img", "one.control", "state"]
    );

    let second = bench
        .serve("two", &["socket=b.sock,path=./drive.img,id=b,range=0+16M"])
        .unwrap();
    assert_eq!(
        bench.leases(),
        [
            lease("a", "held", "16777216+16777216"),
            lease("b", "held", "0+16777216")
        ]
    );
    first.stop();
    assert_eq!(bench.leases(), [lease("b", "held", "0+16777216")]);
    second.stop();
    assert_eq!(bench.leases(), []);
    assert_eq!(bench.names(), ["drive.img", "state"]);
}

#[test]
fn another_path_to_the_same_file_is_the_same_drive() {
    let bench = Bench::new();
    std::os::unix::fs::symlink("drive.img", bench.path("link.img")).unwrap();
    let _first = bench
        .serve("one", &["socket=a.sock,path=drive.img,id=a"])
        .unwrap();
    let refused = bench
        .serve("two", &["socket=b.sock,path=link.img,id=b,range=8M+4K"])
        .unwrap_err();
    assert!(
        refused.stderr.contains("overlaps lease \"a\""),
        "{}",
        refused.stderr
    );
}

#[test]
fn concurrent_requests_for_a_range_grant_one_lease() {
    let bench = Bench::new();
    let outcomes: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = (0..8)
            .map(|number| {
                let bench = &bench;
                scope.spawn(move || {
                    let function = format!("socket={number}.sock,path=drive.img,id=n{number}");
                    bench.serve(&number.to_string(), &[&function])
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    });
    let (winners, losers): (Vec<_>, Vec<_>) = outcomes.into_iter().partition(Result::is_ok);
    assert_eq!(winners.len(), 1);
    for loser in losers {
        let failure = loser.unwrap_err();
        assert!(
            failure.stderr.contains("overlaps lease \"n"),
            "{}",
            failure.stderr
        );
    }
    assert_eq!(bench.leases().len(), 1);
}

#[test]
fn leases_of_a_killed_server_stay_with_their_ids() {
    let bench = Bench::new();
    let function = "socket=a.sock,path=drive.img,id=a,range=0+16M";
    bench.serve("one", &[function]).unwrap().kill();
    assert_eq!(bench.leases(), [lease("a", "stale", "0+16777216")]);

    let other = "socket=b.sock,path=drive.img,id=b,range=8M+16M";
    let refused = bench.serve("two", &[other]).unwrap_err();
    assert!(
        refused.stderr.contains(
            "ended without releasing it); choose a range that does not overlap, or start its holder"
        ) && refused
            .stderr
            .contains("`nvme-mpt leases release a --state-dir state`"),
        "{}",
        refused.stderr
    );

    // A new server gets the range of the killed server, and replaces its sockets.
    let again = bench.serve("one", &[function]).unwrap();
    assert_eq!(bench.leases(), [lease("a", "held", "0+16777216")]);
    again.stop();
    assert_eq!(bench.leases(), []);
    assert_eq!(bench.names(), ["drive.img", "state"]);
}

#[test]
fn a_server_without_ids_gets_its_leases_again_after_a_kill() {
    let bench = Bench::new();
    let functions = [
        "socket=a.sock,path=drive.img,range=0+16M",
        "socket=b.sock,path=drive.img,range=16M+16M",
    ];
    let first = bench.serve("one", &functions).unwrap();
    let printed = first.printed.clone();
    first.kill();
    let second = bench.serve("one", &functions).unwrap();
    assert_eq!(second.printed, printed, "ids and serial numbers included");
    second.stop();
}

#[test]
fn stale_leases_can_be_released_and_held_ones_only_by_force() {
    let bench = Bench::new();
    let function = "socket=a.sock,path=drive.img,id=a";
    let server = bench.serve("one", &[function]).unwrap();
    let held = bench.run("leases", &["release", "a"]);
    assert_eq!(held.status.code(), Some(1));
    let stderr = String::from_utf8(held.stderr).unwrap();
    assert!(
        stderr.starts_with("nvme-mpt: Cannot release lease \"a\""),
        "{stderr}"
    );
    server.kill();

    let listed = bench.run("leases", &[]);
    let listed = String::from_utf8(listed.stdout).unwrap();
    assert!(
        listed.contains("stale") && listed.contains("nvme-mpt leases release ID"),
        "{listed}"
    );
    let released = bench.run("leases", &["release", "a"]);
    assert!(released.status.success(), "{released:?}");
    let stdout = String::from_utf8(released.stdout).unwrap();
    assert!(
        stdout.ends_with("\nThe data of a is erased before another id gets 0+64M\n"),
        "{stdout}"
    );
    assert_eq!(bench.leases(), []);
    let none = bench.run("leases", &["release", "none"]);
    assert_eq!(none.status.code(), Some(1));
    let stderr = String::from_utf8(none.stderr).unwrap();
    assert!(stderr.contains("\"none\""), "{stderr}");

    let server = bench.serve("one", &[function]).unwrap();
    let forced = bench.run("leases", &["release", "--force", "a"]);
    assert!(forced.status.success(), "{forced:?}");
    assert_eq!(bench.leases(), []);
    server.stop();
}

#[test]
fn killed_at_any_moment_a_server_leaves_a_whole_ledger() {
    let bench = Bench::new();
    let function = "socket=a.sock,path=drive.img,id=a,range=0+16M";
    for round in 0..40 {
        let mut command = bench.serve_command("one", &[function]);
        let mut process = command.stdout(Stdio::null()).spawn().unwrap();
        // The rounds have different delays. So on any machine, some servers are killed before they read the ledger, some after
        // they have changed the ledger, and some in between.
        thread::sleep(Duration::from_micros(250 * round));
        process.kill().unwrap();
        process.wait().unwrap();

        let leases = bench.leases();
        assert!(
            leases.is_empty() || leases == [lease("a", "stale", "0+16777216")],
            "round {round}: {leases:?}"
        );
    }
    bench.serve("one", &[function]).unwrap().stop();
    assert_eq!(bench.leases(), []);
}

#[test]
fn the_ledger_is_private_to_its_user() {
    let bench = Bench::new();
    let function = "socket=a.sock,path=drive.img,id=a,range=0+16M";
    let mode_of = |name: &str| fs::metadata(bench.path(name)).unwrap().mode() & 0o7777;
    let narrow = || {
        assert_eq!(mode_of("state"), 0o700);
        for file in ["leases.json", "leases.lock", "holders.lock"] {
            assert_eq!(mode_of(&format!("state/{file}")), 0o600, "{file}");
        }
    };
    bench.serve("one", &[function]).unwrap().stop();
    narrow();
    // Sets the file modes that earlier versions have left, as if one of them had run.
    let widen = |name: &str, mode| {
        fs::set_permissions(bench.path(name), fs::Permissions::from_mode(mode)).unwrap();
    };
    widen("state", 0o755);
    for file in ["leases.json", "leases.lock", "holders.lock"] {
        widen(&format!("state/{file}"), 0o644);
    }
    let server = bench.serve("one", &[function]).unwrap();
    narrow();
    let (status, _) = server.signal("TERM");
    assert!(status.success(), "{status}");
    narrow();
}

#[test]
fn data_of_another_id_is_handed_over_or_wiped_only_on_request() {
    let bench = Bench::new();
    let drive = bench.path("drive.img");
    let fill = |byte| fs::write(&drive, vec![byte; 64 << 20]).unwrap();
    let range_of = || fs::read(&drive).unwrap()[..16 << 20].to_vec();
    let serial = |printed: &str| {
        let (_, serial) = printed.split_once("serial ").unwrap();
        serial.split(';').next().unwrap().to_owned()
    };
    fill(1);
    let first = "socket=a.sock,path=drive.img,id=a,range=0+16M";
    let other = "socket=b.sock,path=drive.img,id=b,range=0+16M";
    let server = bench.serve("one", &[first]).unwrap();
    let of_first = serial(&server.printed);
    server.stop();
    let refused = bench.serve("two", &[other]).unwrap_err();
    for expected in ["data of lease \"a\" in 0+16M", "data=keep", "data=wipe"] {
        assert!(refused.stderr.contains(expected), "{}", refused.stderr);
    }
    let options = format!("{other},data=keep");
    let server = bench.serve("two", &[&options]).unwrap();
    assert_ne!(serial(&server.printed), of_first);
    server.stop();
    assert_eq!(range_of(), vec![1; 16 << 20]);
    // The range now belongs to the second id, so the first id is refused.
    bench.serve("two", &[other]).unwrap().stop();
    bench.serve("one", &[first]).unwrap_err();

    let wipe = format!("{first},data=wipe");
    let (status, log) = bench.serve("one", &[&wipe]).unwrap().signal("TERM");
    assert!(status.success(), "{status}: {log}");
    assert!(
        log.contains("is being wiped") && log.contains("is wiped"),
        "{log}"
    );
    assert_eq!(range_of(), vec![0; 16 << 20]);
    let behind = fs::read(&drive).unwrap().split_off(16 << 20);
    assert_eq!(behind, vec![1; 48 << 20]);
    // A wiped range belongs to the id that wiped it. So a second start with equal options keeps the data.
    fill(2);
    bench.serve("one", &[&wipe]).unwrap().stop();
    assert_eq!(range_of(), vec![2; 16 << 20]);
}

#[test]
fn a_requested_wipe_erases_data_of_the_host_too() {
    let bench = Bench::new();
    let drive = bench.path("drive.img");
    fs::write(&drive, vec![0xCC; 64 << 20]).unwrap();
    let read = || fs::read(&drive).unwrap();
    let function = |id: &str, range: &str, data: &str| {
        format!("socket={id}.sock,path=drive.img,id={id},range={range}{data}")
    };
    // Without an explicit wipe, a first lease keeps existing data.
    let first = function("a", "0+16M", "");
    bench.serve("one", &[&first]).unwrap().stop();
    assert_eq!(read(), vec![0xCC; 64 << 20]);
    // The option `--wipe` does not erase data without an owner, such as an image that is new to the ledger.
    let next = function("b", "32M+16M", "");
    let mut all = bench.serve_command("one", &[&next]);
    all.arg("--wipe");
    Server::start(all).unwrap().stop();
    assert_eq!(read(), vec![0xCC; 64 << 20]);
    let wiped = function("a", "0+32M", ",data=wipe");
    let (status, log) = bench.serve("one", &[&wiped]).unwrap().signal("TERM");
    assert!(status.success() && log.contains("16M+16M"), "{log}");
    let drive_now = read();
    assert_eq!(drive_now[..16 << 20], vec![0xCC; 16 << 20], "its own");
    assert_eq!(drive_now[16 << 20..32 << 20], vec![0; 16 << 20]);
    assert_eq!(drive_now[32 << 20..], vec![0xCC; 32 << 20]);
    // The range now belongs to this id, so its data is not wiped again.
    fs::write(&drive, vec![0xDD; 64 << 20]).unwrap();
    bench.serve("one", &[&wiped]).unwrap().stop();
    assert_eq!(read(), vec![0xDD; 64 << 20]);
}

#[test]
fn a_release_with_keep_hands_data_over_once() {
    let bench = Bench::new();
    let function = |id: &str| format!("socket={id}.sock,path=drive.img,id={id},range=0+16M");
    let serve = |id: &str| bench.serve("one", &[&function(id)]);
    let release_and_keep = |id: &str| bench.run("leases", &["release", id, "--keep"]);
    let nothing = release_and_keep("a");
    let stderr = String::from_utf8(nothing.stderr).unwrap();
    assert!(
        stderr.contains("No range has data of lease \"a\""),
        "{stderr}"
    );

    let server = serve("a").unwrap();
    let held = release_and_keep("a");
    let stderr = String::from_utf8(held.stderr).unwrap();
    assert!(stderr.contains("which is in use"), "{stderr}");
    server.stop();
    assert!(
        serve("b")
            .unwrap_err()
            .stderr
            .contains("data of lease \"a\"")
    );
    let released = release_and_keep("a");
    let stdout = String::from_utf8(released.stdout).unwrap();
    assert_eq!(stdout, "The data of a goes to the next lease of 0+16M\n");
    serve("b").unwrap().kill();
    // A lease whose holder is dead is released as well.
    let released = release_and_keep("b");
    let stdout = String::from_utf8(released.stdout).unwrap();
    assert!(
        stdout.starts_with("Released b: range 0+16M of file:"),
        "{stdout}"
    );
    serve("c").unwrap().stop();
    serve("b").unwrap_err();
}

#[test]
fn a_released_range_is_erased_before_another_id_gets_it() {
    let bench = Bench::new();
    let drive = bench.path("drive.img");
    fs::write(&drive, vec![1; 64 << 20]).unwrap();
    let function = |id: &str| format!("socket={id}.sock,path=drive.img,id={id},range=0+16M");
    let range_of = || fs::read(&drive).unwrap()[..16 << 20].to_vec();
    bench.serve("one", &[&function("a")]).unwrap().stop();
    assert!(bench.run("leases", &["release", "a"]).status.success());
    // Nothing was erased yet, so the previous owner gets its data back.
    bench.serve("one", &[&function("a")]).unwrap().stop();
    assert_eq!(range_of(), vec![1; 16 << 20]);
    bench.serve("two", &[&function("b")]).unwrap_err();

    assert!(bench.run("leases", &["release", "a"]).status.success());
    let (status, log) = bench
        .serve("two", &[&function("b")])
        .unwrap()
        .signal("TERM");
    assert!(status.success() && log.contains("is wiped"), "{log}");
    let drive = fs::read(&drive).unwrap();
    assert_eq!(drive[..16 << 20], vec![0; 16 << 20]);
    assert_eq!(drive[16 << 20..], vec![1; 48 << 20]);
}

#[test]
fn private_drives_are_in_no_ledger() {
    let bench = Bench::new();
    let function = "socket=a.sock,path=memory:1M,id=a";
    let one = bench.serve("one", &[function]).unwrap();
    let two = bench
        .serve("two", &["socket=b.sock,path=memory:1M,id=a"])
        .unwrap();
    assert_eq!(bench.leases(), []);
    one.stop();
    two.stop();
}
