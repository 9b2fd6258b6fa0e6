//! A process is killed during Stores: completed values must be present, and incomplete values must be present as a whole or
//! absent.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use nvme_mpt_tests::command::{Sqe, kv};
use nvme_mpt_tests::prp;

use super::{attach, file_host, host_in, value};
use crate::common::{HANG, LEASE, Setup, children};

/// Environment variables for the killed process: path of the file, and first round of Stores.
const FILE: &str = "NVME_MPT_TEST_PAIRS";
const ROUND: &str = "NVME_MPT_TEST_ROUND";

const TEST: &str = "key_values::crash::completed_stores_survive_a_kill";

/// Keys that are stored concurrently in each round.
const KEYS: u64 = 8;

/// For each kill, the number of values that complete before it.
const KILLS: [usize; 5] = [3, 40, 61, 17, 90];

/// Returns the value of a key in a round. The length differs in each round.
fn written(round: u64, key: u64) -> Vec<u8> {
    let len = (round * 7919 + key * 104_729) % 60_000;
    value(round * KEYS + key + 1, 16 + len as usize)
}

/// Stores values until killed, and prints the completed ones.
fn store_until_killed(path: &Path, first: u64) -> ! {
    let host = host_in(path);
    let machine = host.machine(&Setup::from_start(LEASE));
    let (_controller, mut pairs) = attach(&machine);
    let mut out = std::io::stdout();
    for round in first.. {
        let values: Vec<_> = (0..KEYS)
            .map(|key| {
                let bytes = written(round, key);
                let data = machine.memory.alloc(bytes.len()).unwrap();
                data.write(0, &bytes);
                let prepared = prp::buffer(&data, 0, bytes.len()).unwrap();
                let sqe = Sqe::key_value(kv::STORE, 1, &[key as u8], bytes.len() as u32);
                let cid = pairs.queue.submit(sqe.with_data(prepared.pointer)).unwrap();
                (key, cid, data, prepared)
            })
            .collect();
        for (key, cid, ..) in &values {
            let status = pairs.queue.wait(*cid, HANG).unwrap().status();
            assert!(status.is_success());
            writeln!(out, "\ncompleted {round} {key}").unwrap();
            out.flush().unwrap();
        }
    }
    unreachable!("there are more rounds than time")
}

/// Runs the process and kills it. Returns the last completed round of each key, from the process's output.
fn run_and_kill(path: &Path, round: u64, after: usize) -> BTreeMap<u64, u64> {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", TEST, "--nocapture", "--test-threads=1"])
        .env(FILE, path)
        .env(ROUND, round.to_string())
        .stdin(Stdio::null());
    let mut process = children::start(&mut command).unwrap();
    let mut completed = BTreeMap::new();
    let mut count = 0;
    let output = BufReader::new(process.stdout.take().unwrap());
    for line in output.lines().map(Result::unwrap) {
        let Some(text) = line.strip_prefix("completed ") else {
            continue;
        };
        let (round, key) = text.split_once(' ').unwrap();
        completed.insert(key.parse().unwrap(), round.parse().unwrap());
        count += 1;
        if count == after {
            process.kill().unwrap();
        }
    }
    let status = process.wait().unwrap();
    assert!(count >= after, "it ended by itself: {status}");
    completed
}

#[test]
fn completed_stores_survive_a_kill() {
    if let Some(path) = std::env::var_os(FILE) {
        let round = std::env::var(ROUND).unwrap().parse().unwrap();
        store_until_killed(&PathBuf::from(path), round);
    }
    let (file, host) = file_host();
    drop(host);
    let mut round = 1;
    for after in KILLS {
        let completed = run_and_kill(file.path(), round, after);
        let host = host_in(file.path());
        let machine = host.machine(&Setup::from_start(LEASE));
        let (_controller, mut pairs) = attach(&machine);
        let mut latest = round;
        for key in 0..KEYS {
            let Some(&last) = completed.get(&key) else {
                continue;
            };
            let (found, _) = pairs.retrieve(&[key as u8], 1 << 20).unwrap();
            // The process may have completed one more Store before it could print this.
            let stored = [last, last + 1]
                .into_iter()
                .find(|round| found == written(*round, key));
            assert!(
                stored.is_some(),
                "key {key} is not of round {last} or the next"
            );
            latest = latest.max(last + 1);
        }
        round = latest + 1;
    }
}
