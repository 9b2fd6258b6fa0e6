//! Functions whose work crashed the server, and functions whose state is lost.

use std::fs;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::thread;
use std::time::{Duration, Instant};

use nvme_mpt_tests::bar::Bar;
use nvme_mpt_tests::command::Sqe;
use nvme_mpt_tests::doorbell::DoorbellMode;
use nvme_mpt_tests::memory::GuestMemory;
use nvme_mpt_tests::prp;
use nvme_mpt_tests::vfio_user::VfioUserBar;

use crate::supervised_server::SupervisedServer;
use crate::support::{Bench, TIMEOUT};
use crate::verifying_guest::{BLOCKS, Guest, PIECE, run_beside};

/// Offset of CSTS.
pub(crate) const STATUS: u64 = 0x1C;
/// CSTS.RDY and CSTS.CFS.
const READY: u32 = 1;
const FATAL: u32 = 2;

#[test]
fn a_function_that_crashes_the_server_twice_is_quarantined() {
    let bench = Bench::new();
    let plan = "[[fault]]\nkind = \"crash\"\noperations = [\"read\"]\nrange = \"32M+4K\"\n";
    fs::write(bench.path("crash.toml"), plan).unwrap();
    // A single poller runs the queues of all functions.
    let functions = [
        "path=drive.img,faults=crash.toml,range=0+32M,socket=a.sock,id=a",
        "path=drive.img,faults=crash.toml,range=32M+16M,socket=b.sock,id=b",
        "path=memory:64M,socket=c.sock,id=c",
        "path=drive.img,faults=crash.toml,range=48M+1M,socket=d.sock,id=d",
    ];
    let supervised = SupervisedServer::start(&bench, &functions);
    let connect = |socket: &str| Guest::connect(&bench.path(socket), DoorbellMode::Shadow, true);
    let set_aside = |listed: &str| {
        let lines = listed.lines().filter(|line| line.contains("quarantined"));
        let ids = lines.map(|line| line.split(':').next().unwrap().to_owned());
        ids.collect::<Vec<_>>()
    };
    // Servers end during these requests, so each request is repeated.
    let list_until = |is_complete: &dyn Fn(&str) -> bool| {
        let began = Instant::now();
        loop {
            match bench.ask("list", &[]) {
                Ok(listed) if is_complete(&listed) => return listed,
                _ => assert!(began.elapsed() < TIMEOUT, "{}", supervised.log()),
            }
            thread::sleep(Duration::from_millis(10));
        }
    };
    let innocent = ["a.sock", "c.sock", "d.sock"].map(connect);
    let mut guilty = connect("b.sock");
    let bar = guilty.controller.bar().clone();
    run_beside(innocent.into(), 1, || {
        let data = prp::buffer(&guilty.buffers[0], 0, PIECE).unwrap();
        let read = Sqe::read(1, 0, BLOCKS).with_data(data.pointer);
        guilty.queue.submit(read).unwrap();
        guilty.queue.ring();
        let listed = list_until(&|listed| !set_aside(listed).is_empty());
        assert_eq!(set_aside(&listed), ["b"], "{listed}");
        let report = bench.path("state/set-aside/b");
        for part in ["2 times", "--force", report.to_str().unwrap()] {
            assert!(listed.contains(part), "{listed}");
        }
        for file in ["state.json", "live"] {
            let metadata = fs::metadata(report.join(file)).unwrap();
            assert_eq!(metadata.permissions().mode() & 0o777, 0o600);
            assert!(metadata.len() > 0);
        }
        let state = fs::read(report.join("state.json")).unwrap();
        let state: serde_json::Value = serde_json::from_slice(&state).unwrap();
        assert!(state["socket"].as_str().unwrap().ends_with("b.sock"));

        // The guest finds a failed controller, and no register write changes this.
        assert_eq!(bar.read32(STATUS), READY | FATAL);
        assert!(guilty.queue.poll().is_none());
        for configuration in [0x0046_0000, 0x0046_0001] {
            bar.write32(0x14, configuration);
            assert_eq!(bar.read32(STATUS), FATAL);
        }
        // Later servers quarantine the function as well.
        let before = supervised.server_pid().unwrap();
        SupervisedServer::send("KILL", &before);
        let listed = list_until(&|_| {
            supervised
                .server_pid()
                .is_some_and(|server| server != before)
        });
        assert_eq!(set_aside(&listed), ["b"], "{listed}");
        bench.ask("upgrade", &[]).unwrap();
        let listed = list_until(&|_| true);
        assert_eq!(set_aside(&listed), ["b"], "{listed}");
        assert_eq!(bar.read32(STATUS), READY | FATAL, "as it was kept");

        // After the operator has removed the function and added it again, it works.
        let error = bench.ask("remove", &["b"]).unwrap_err();
        assert!(error.contains("--force"), "{error}");
        bench.ask("remove", &["b", "--force"]).unwrap();
        let function = "path=drive.img,faults=crash.toml,range=32M+16M,socket=b.sock,id=b";
        bench.ask("add", &[function]).unwrap();
        assert!(set_aside(&list_until(&|_| true)).is_empty());
        connect("b.sock").administer();
    });
    assert_eq!(supervised.crashes(), 2, "{}", supervised.log());
    supervised.end();
}

/// Offset of the crash count in a function's in-flight tracking file (`nvme-mpt/guest/src/inflight/mod.rs`).
const CRASHES: u64 = 72;

/// Overwrites the crash count in the in-flight tracking files of all functions of a server.
fn set_crashes(server: &str, crashes: u64) {
    let mut count = 0;
    for entry in fs::read_dir(format!("/proc/{server}/fd")).unwrap() {
        let path = entry.unwrap().path();
        let leads_to = fs::read_link(&path).unwrap_or_default();
        if leads_to.to_string_lossy().contains("nvme-mpt-live") {
            let file = fs::File::options().write(true).open(&path).unwrap();
            file.write_all_at(&crashes.to_le_bytes(), CRASHES).unwrap();
            count += 1;
        }
    }
    assert!(count > 0, "a live state");
}

/// Offset of the record of memory that is being pinned, in a function's in-flight tracking file.
const PINNING: u64 = 88;

/// Finds the in-flight tracking file of the function with `queue_pairs` queue pairs, among the files of a server.
fn inflight_file(server: &str, queue_pairs: u64) -> fs::File {
    let len = 4096 + queue_pairs * (143_360 - 4096) / 2;
    for entry in fs::read_dir(format!("/proc/{server}/fd")).unwrap() {
        let path = entry.unwrap().path();
        let leads_to = fs::read_link(&path).unwrap_or_default();
        if leads_to.to_string_lossy().contains("nvme-mpt-live") {
            let file = fs::File::options().read(true).write(true).open(&path);
            let file = file.unwrap();
            if file.metadata().unwrap().len() == len {
                return file;
            }
        }
    }
    panic!("no live state for {queue_pairs} queue pairs");
}

/// Returns the number of processes that the kernel has killed for lack of memory.
fn oom_kills() -> u64 {
    let text = fs::read_to_string("/proc/vmstat").unwrap();
    let count = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
    count.unwrap().parse().unwrap()
}

#[test]
fn after_an_oom_kill_during_pinning_a_function_is_quarantined() {
    let bench = Bench::new();
    let functions = [
        "path=null:64M,range=0+1M,socket=a.sock,id=a,queues=4",
        "path=null:64M,range=1M+1M,socket=b.sock,id=b,queues=2",
        "path=null:64M,range=2M+1M,socket=c.sock,id=c,queues=3",
        "path=null:64M,range=3M+1M,socket=d.sock,id=d,queues=5",
    ];
    let supervised = SupervisedServer::start(&bench, &functions);
    let connect = |socket: &str| {
        let memory = GuestMemory::new(&[(1 << 20, 1 << 20)]).unwrap();
        let bar = VfioUserBar::attach(&bench.path(socket), &memory).unwrap();
        (bar, memory)
    };
    let clients = ["a.sock", "b.sock", "c.sock", "d.sock"].map(connect);
    let is_recorded = |file: &fs::File| {
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, PINNING).unwrap();
        u64::from_le_bytes(bytes) > 0
    };
    let record = |queue_pairs, bytes: u64, kills: u64| {
        let file = inflight_file(&supervised.server_pid().unwrap(), queue_pairs);
        assert!(!is_recorded(&file), "nothing is pinned");
        let words = [bytes.to_le_bytes(), kills.to_le_bytes()];
        file.write_all_at(&words.concat(), PINNING).unwrap();
    };
    // The server was killed while it pinned memory of function a. The OOM killer has killed no process since, so the crash
    // counts against the function.
    record(4, 1 << 30, oom_kills());
    // The recorded count of OOM kills differs from the present one: the OOM killer has killed a process since.
    record(2, 1 << 30, oom_kills() + 1);
    // Another function's memory was being pinned as well, but this function's was more.
    record(5, 1 << 29, oom_kills() + 1);
    supervised.kill_server();
    let set_aside = || {
        let listed = bench.ask("list", &[]).unwrap();
        let lines = listed.lines().filter(|line| line.contains("quarantined"));
        lines.map(str::to_owned).collect::<Vec<_>>()
    };
    let listed = set_aside();
    assert_eq!(listed.len(), 1, "{listed:?}");
    for part in ["b:", "memory ran out while 1G", "memory-limit=", "--force"] {
        assert!(listed[0].contains(part), "{listed:?}");
    }
    let [(a, _), (b, _), (c, _), (d, _)] = &clients;
    assert_eq!(b.read32(STATUS) & FATAL, FATAL);
    assert_eq!([a, c, d].map(|bar| bar.read32(STATUS)), [0; 3]);
    let log = supervised.log();
    let continues = |id: &str| {
        log.find(&format!("/{id}.sock continues"))
            .expect("it continues")
    };
    assert!(continues("a") > continues("c"), "{log}");
    assert!(continues("d") > continues("c"), "{log}");
    // The server reports the interrupted pinning once.
    let file = inflight_file(&supervised.server_pid().unwrap(), 4);
    assert!(!is_recorded(&file));
    supervised.kill_server();
    assert_eq!(set_aside().len(), 1);
    bench.ask("remove", &["b", "--force"]).unwrap();
    bench.ask("add", &[functions[1]]).unwrap();
    assert!(set_aside().is_empty());
    drop(clients);
    supervised.end();
}

#[test]
fn a_function_that_the_next_server_cannot_restore_is_offered_without_its_state() {
    let bench = Bench::new();
    let functions = [
        "path=drive.img,range=0+32M,socket=a.sock,id=a",
        "path=drive.img,range=32M+16M,socket=b.sock,id=b",
    ];
    let supervised = SupervisedServer::start(&bench, &functions);
    let before = Guest::connect(&bench.path("a.sock"), DoorbellMode::Shadow, true);
    set_crashes(&supervised.server_pid().unwrap(), 4);
    supervised.upgrade(&bench);
    let log = supervised.log();
    assert_eq!(log.matches("of the previous process: ").count(), 2, "{log}");
    // The new server waited for the end of the predecessor, which had the sockets, before it bound them anew.
    assert!(!log.contains("cannot be offered"), "{log}");
    let mut guest = Guest::connect(&bench.path("a.sock"), DoorbellMode::Shadow, true);
    guest.administer();
    drop((before, guest));
    supervised.stop();
}

#[test]
fn after_one_crash_all_functions_continue() {
    let bench = Bench::new();
    // `count = 1`: the next server must restore the information that the fault has occurred.
    let plan = "[[fault]]\nkind = \"crash\"\noperations = [\"read\"]\nrange = \"32M+4K\"\nafter = 2\ncount = 1\n";
    fs::write(bench.path("crash.toml"), plan).unwrap();
    let function = "path=drive.img,range=32M+16M,socket=b.sock,id=b,faults=crash.toml";
    let supervised = SupervisedServer::start_as(&bench, &["--delay", "0"], &[function]);
    let mut guest = Guest::connect(&bench.path("b.sock"), DoorbellMode::Shadow, true);
    for _ in 0..3 {
        let data = prp::buffer(&guest.buffers[0], 0, PIECE).unwrap();
        let read = Sqe::read(1, 0, BLOCKS).with_data(data.pointer);
        let cqe = guest.queue.execute(read, TIMEOUT).unwrap();
        assert!(cqe.status().is_success(), "{cqe:?}");
    }
    assert_eq!(supervised.crashes(), 1, "{}", supervised.log());
    guest.administer();
    supervised.stop();
}
