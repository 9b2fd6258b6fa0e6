//! State of a later release, which an upgrade refuses before the server ends.

use std::fs;
use std::os::unix::fs::FileExt;
use std::thread;
use std::time::Duration;

use nvme_mpt_tests::doorbell::DoorbellMode;

use crate::quarantine::STATUS;
use crate::supervised_server::SupervisedServer;
use crate::support::Bench;
use crate::verifying_guest::Guest;

/// Beginning of a function's state in its request log, up to the digit of the version.
const VERSION: &[u8] = b"{\"version\":";

/// Offsets of the two copies of the state in a request log (`hypervisor-glue/vfio-user/src/request_log.rs`).
pub(crate) const STATES: [u64; 2] = [2 << 20, 18 << 20];

/// Offset of the layout version in a request log.
const LAYOUT: u64 = 8;

/// Opens the request logs of a server, once for each descriptor.
pub(crate) fn request_logs(server: &str) -> Vec<fs::File> {
    let entries = fs::read_dir(format!("/proc/{server}/fd")).unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    let journals = paths.filter(|path| {
        let leads_to = fs::read_link(path).unwrap_or_default();
        leads_to.to_string_lossy().contains("vfio-user-journal")
    });
    let mut options = fs::File::options();
    options.read(true).write(true);
    journals.map(|path| options.open(path).unwrap()).collect()
}

/// Overwrites the version in the states that a server has persisted. Returns the previous digits.
fn set_version(server: &str, digit: u8) -> Vec<u8> {
    let mut before = Vec::new();
    for file in request_logs(server) {
        for at in STATES {
            let mut begin = [0; VERSION.len() + 1];
            file.read_exact_at(&mut begin, at).unwrap();
            if begin.starts_with(VERSION) {
                before.push(begin[VERSION.len()]);
                file.write_all_at(&[digit], at + VERSION.len() as u64)
                    .unwrap();
            }
        }
    }
    assert!(!before.is_empty(), "there is no state");
    before
}

/// Overwrites the layout version in the request logs of a server. Returns the previous bytes.
fn set_layout(server: &str, layout: [u8; 4]) -> [u8; 4] {
    let mut before = None;
    for file in request_logs(server) {
        let mut bytes = [0; 4];
        file.read_exact_at(&mut bytes, LAYOUT).unwrap();
        before.get_or_insert(bytes);
        file.write_all_at(&layout, LAYOUT).unwrap();
    }
    before.expect("a journal")
}

#[test]
fn a_state_of_a_later_release_is_refused_before_the_server_ends() {
    let bench = Bench::new();
    let supervised = SupervisedServer::start(&bench, &["path=drive.img,socket=a.sock,id=a"]);
    let mut guest = Guest::connect(&bench.path("a.sock"), DoorbellMode::Shadow, true);
    guest.administer();
    // The server persists changes before it answers, so this read waits for them. Changes by its pollers may wake it once
    // more.
    guest.controller.bar().read32(STATUS);
    let server = supervised.server_pid().unwrap();
    let version = set_version(&server, b'9')[0];
    loop {
        thread::sleep(Duration::from_millis(200));
        if set_version(&server, b'9')
            .iter()
            .all(|digit| *digit == b'9')
        {
            break;
        }
    }
    let error = bench.ask("upgrade", &[]).unwrap_err();
    assert!(error.contains("cannot take over"), "{error}");
    let reason = "its state has version 9, which this program does not know";
    assert!(error.contains(reason), "{error}");
    assert_eq!(supervised.server_pid().unwrap(), server);
    guest.administer();
    set_version(&server, version);
    supervised.upgrade(&bench);
    guest.administer();
    drop(guest);
    supervised.stop();
}

#[test]
fn a_request_log_of_a_later_release_is_refused_before_the_server_ends() {
    let bench = Bench::new();
    let supervised = SupervisedServer::start(&bench, &["path=drive.img,socket=a.sock,id=a"]);
    let mut guest = Guest::connect(&bench.path("a.sock"), DoorbellMode::Shadow, true);
    guest.administer();
    let server = supervised.server_pid().unwrap();
    let layout = set_layout(&server, 9_u32.to_le_bytes());
    let error = bench.ask("upgrade", &[]).unwrap_err();
    assert!(error.contains("cannot take over"), "{error}");
    assert!(error.contains("request log has layout 9"), "{error}");
    assert_eq!(supervised.server_pid().unwrap(), server);
    guest.administer();
    set_layout(&server, layout);
    supervised.upgrade(&bench);
    guest.administer();
    drop(guest);
    supervised.stop();
}
