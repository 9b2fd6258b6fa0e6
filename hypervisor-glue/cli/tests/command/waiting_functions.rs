//! Functions that the next server cannot serve yet. Their VMs wait, and lose nothing.

use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::process::Command;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use nvme_mpt_tests::controller::{Config, Controller};
use nvme_mpt_tests::disk::Disk;
use nvme_mpt_tests::doorbell::DoorbellMode;
use nvme_mpt_tests::memory::GuestMemory;
use nvme_mpt_tests::vfio_user::VfioUserBar;

use crate::stored_versions::{STATES, request_logs};
use crate::supervised_server::SupervisedServer;
use crate::support::{Bench, TIMEOUT};
use crate::verifying_guest::{Guest, run_beside};

#[test]
fn a_function_that_cannot_be_restored_affects_no_other() {
    let bench = Bench::new();
    let functions = [
        "path=drive.img,socket=a.sock,id=a",
        "path=other.img,socket=b.sock,id=b",
    ];
    fs::File::create(bench.path("other.img"))
        .unwrap()
        .set_len(1 << 20)
        .unwrap();
    let supervised = SupervisedServer::start(&bench, &functions);
    let guest = Guest::connect(&bench.path("a.sock"), DoorbellMode::Shadow, true);
    run_beside(vec![guest], 1, || {
        fs::rename(bench.path("other.img"), bench.path("hidden.img")).unwrap();
        supervised.kill_server();
        let listed = bench.ask("list", &[]).unwrap();
        assert!(listed.contains("does not exist"), "{listed}");
        // Once its drive is back, this server serves the function again.
        fs::rename(bench.path("hidden.img"), bench.path("other.img")).unwrap();
        let is_there = |printed: &str| !printed.contains("does not exist");
        let listed = bench.ask_until("list", &[], is_there).unwrap();
        assert!(is_there(&listed), "{listed}");
    });
    supervised.stop();
}

#[test]
fn a_shortage_of_open_files_loses_no_function() {
    let bench = Bench::new();
    let functions: Vec<String> = (0..6)
        .map(|number| {
            let start = 8 * number;
            format!("path=drive.img,range={start}M+8M,socket={number}.sock,id=f{number}")
        })
        .collect();
    let functions: Vec<&str> = functions.iter().map(String::as_str).collect();
    let served = bench.serve_command("one", &functions);
    // Each server reads its limit at its start.
    let limit = bench.path("limit");
    let mut serve = Command::new("sh");
    serve
        .args(["-c", "ulimit -n $(cat limit) && exec \"$0\" \"$@\""])
        .arg(served.get_program())
        .args(served.get_args());
    fs::write(&limit, "1000").unwrap();
    let supervised =
        SupervisedServer::start_command(&bench, &["--deaths", "100000", "--delay", "0"], &serve);
    let guests: Vec<Guest> = (0..6)
        .map(|number| {
            let socket = bench.path(&format!("{number}.sock"));
            Guest::connect(&socket, DoorbellMode::Shadow, true).with_fixed_queues()
        })
        .collect();
    let server = supervised.server_pid().unwrap();
    let used = fs::read_dir(format!("/proc/{server}/fd")).unwrap().count();
    // With fewer, the server cannot start; with more, it serves everything.
    let mut limits = (3..8).map(|eighths| used * eighths / 8);
    run_beside(guests, 5, || {
        fs::write(&limit, limits.next().unwrap().to_string()).unwrap();
        SupervisedServer::send("KILL", &supervised.server_pid().unwrap());
        thread::sleep(Duration::from_millis(500));
        fs::write(&limit, "1000").unwrap();
        // A server that has read the low limit may run.
        if let Some(server) = supervised.server_pid() {
            SupervisedServer::send("KILL", &server);
        }
        let is_served = |listed: &str| listed.matches("connected").count() == functions.len();
        let began = Instant::now();
        while !bench
            .ask("list", &[])
            .is_ok_and(|listed| is_served(&listed))
        {
            assert!(began.elapsed() < TIMEOUT, "{}", supervised.log());
            thread::sleep(Duration::from_millis(10));
        }
    });
    let log = supervised.log();
    assert!(!log.contains("loses its drive"), "{log}");
    supervised.stop();
}

#[test]
fn functions_that_wait_share_their_drive_with_the_options_of_each() {
    let bench = Bench::new();
    // The function without the option is restored first, as it has less memory.
    let functions = [
        "path=other.img,range=0+64M,socket=a.sock,id=a",
        "path=other.img,range=64M+64M,socket=b.sock,id=b,timeout=60",
    ];
    let drive = fs::File::create(bench.path("other.img")).unwrap();
    drive.set_len(128 << 20).unwrap();
    let supervised = SupervisedServer::start(&bench, &functions);
    let guest = Guest::connect(&bench.path("b.sock"), DoorbellMode::Shadow, true);
    run_beside(vec![guest], 1, || {
        fs::rename(bench.path("other.img"), bench.path("hidden.img")).unwrap();
        supervised.kill_server();
        let listed = bench.ask("list", &[]).unwrap();
        assert_eq!(listed.matches("does not exist").count(), 2, "{listed}");
        fs::rename(bench.path("hidden.img"), bench.path("other.img")).unwrap();
        let is_there = |printed: &str| !printed.contains("not offered");
        let listed = bench.ask_until("list", &[], is_there).unwrap();
        assert!(is_there(&listed), "{listed}");
    });
    supervised.stop();
}

/// Overwrites the number of the socket's owner in the configuration that a server has persisted.
fn forget_owner(server: &str) {
    const OWNER: &[u8] = b"owner=";
    let mut count = 0;
    for file in request_logs(server) {
        for at in STATES {
            let mut state = vec![0; 4096];
            let read = file.read_at(&mut state, at).unwrap();
            let owners = state[..read].windows(OWNER.len());
            let places = owners.enumerate().filter(|(_, text)| *text == OWNER);
            for (place, _) in places {
                let number = place + OWNER.len();
                let digits = state[number..]
                    .iter()
                    .take_while(|byte| byte.is_ascii_digit());
                let digits = digits.count();
                let user = vec![b'z'; digits];
                file.write_all_at(&user, at + number as u64).unwrap();
                count += 1;
            }
        }
    }
    assert!(count > 0, "an owner");
}

/// A function whose VM waits: the next server cannot serve it, because it does not know the owner of the socket.
struct WaitingFunction {
    supervised: SupervisedServer,
    disk: Disk,
    controller: Controller,
    /// Contents of block 7 as the guest wrote it.
    written: Vec<u8>,
}

impl WaitingFunction {
    fn start(bench: &Bench) -> Self {
        let user = fs::metadata("/proc/self").unwrap().uid();
        Self::write_file(bench, &format!("owner = \"{user}\"\n"));
        let mut serve = bench.serve_command("one", &[]);
        serve.args(["--config", "serve.toml"]);
        let supervised = SupervisedServer::start_command(bench, &[], &serve);
        let memory = GuestMemory::new(&[(1 << 20, 16 << 20)]).unwrap();
        let bar = VfioUserBar::attach(&bench.path("a.sock"), &memory).unwrap();
        let controller = Controller::attach(Arc::new(bar), memory, Config::default(), 1);
        let mut controller = controller.unwrap();
        let mut disk = Disk::open(&mut controller, 1).unwrap();
        let written = vec![0x5A; 512];
        disk.write(7, &written).unwrap();
        Self::write_file(bench, "owner = \"no-such-user\"\n");
        // The persisted configuration names an owner that no longer exists.
        forget_owner(&supervised.server_pid().unwrap());
        supervised.kill_server();
        let listed = bench.ask("list", &[]).unwrap();
        assert!(listed.contains("no user \"z"), "{listed}");
        Self {
            supervised,
            disk,
            controller,
            written,
        }
    }

    /// Writes the configuration file, with `more` after the function.
    fn write_file(bench: &Bench, more: &str) {
        let a = "[[function]]\npath = \"memory:64M\"\nsocket = \"a.sock\"\nid = \"a\"\n";
        fs::write(bench.path("serve.toml"), format!("{a}{more}")).unwrap();
    }

    /// Verifies that the function continues with its data.
    fn verify_and_stop(mut self) {
        assert!(self.disk.read(7, 1).unwrap() == self.written);
        drop((self.disk, self.controller));
        self.supervised.stop();
    }
}

#[test]
fn a_function_that_waits_for_the_operator_loses_nothing_in_memory() {
    let bench = Bench::new();
    let waiting = WaitingFunction::start(&bench);
    let b = "path=drive.img,range=0+1M,socket=b.sock,id=b";
    bench.ask("add", &[b]).unwrap();
    bench.ask("remove", &["b"]).unwrap();
    bench.ask("reload", &[]).unwrap_err();
    WaitingFunction::write_file(&bench, "");
    bench.ask("reload", &[]).unwrap();
    waiting.verify_and_stop();
}

#[test]
fn a_failed_reload_keeps_a_function_that_waits_for_the_operator() {
    let bench = Bench::new();
    let waiting = WaitingFunction::start(&bench);
    let bad = "[[function]]\npath = \"none.img\"\nsocket = \"b.sock\"\nid = \"b\"\n";
    WaitingFunction::write_file(&bench, bad);
    let error = bench.ask("reload", &[]).unwrap_err();
    assert!(error.contains("does not exist"), "{error}");
    let listed = bench.ask("list", &[]).unwrap();
    assert!(listed.contains("connected"), "{listed}");
    waiting.verify_and_stop();
}
