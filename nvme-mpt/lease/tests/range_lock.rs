//! Locks on an image of which a process of another user has locks, too. Needs root.
//!
//! The test is a program of its own. With other tests in its process, a forked child would have copies of their descriptors
//! until it executes its program, and with them their locks.

use std::env;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use nvme_lease::range_lock::{ClaimError, FileRangeLock};
use nvme_mpt_memory::system::{LockKind, process_user, try_lock};

const TEST: &str = "a_reader_of_another_user_refuses_nothing";

/// Environment variable with the path of the file to lock. If it is set, this test program is the process that reads the file.
const READ: &str = "NVME_MPT_TEST_READS";

/// User id without special access rights.
const NOBODY: u32 = 65534;

fn open(image: &Path) -> File {
    let mut options = OpenOptions::new();
    options.read(true).write(true).open(image).unwrap()
}

/// Claims 1 KiB of the image, from byte `start` on.
fn claim(image: &Path, start: u64) -> Result<FileRangeLock, ClaimError> {
    FileRangeLock::claim(open(image), start, 1 << 10)
}

/// Runs the reading process: locks the whole file until standard input ends.
fn read_and_lock(image: &Path) {
    let file = File::open(image).unwrap();
    assert!(try_lock(&file, LockKind::Shared, 0, 0).unwrap());
    println!("\nlocked");
    io::stdin().read_line(&mut String::new()).unwrap();
}

fn reader_of_another_user(image: &Path) -> Child {
    fs::set_permissions(image, fs::Permissions::from_mode(0o644)).unwrap();
    let mut child = Command::new(env::current_exe().unwrap())
        .args(["--exact", TEST, "--nocapture"])
        .env(READ, image)
        .uid(NOBODY)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap() == "locked"), "it locks");
    child
}

#[test]
fn a_reader_of_another_user_refuses_nothing() {
    if let Some(image) = env::var_os(READ) {
        return read_and_lock(Path::new(&image));
    }
    if process_user() != 0 {
        // Write to stderr directly, since the test harness hides the output of passing tests.
        let _ = writeln!(io::stderr(), "NOT CHECKED: {TEST}: it needs root");
        return;
    }
    let image = tempfile::NamedTempFile::new().unwrap();
    image.as_file().set_len(1 << 20).unwrap();
    let image = image.path();

    let mut reader = reader_of_another_user(image);
    assert!(!try_lock(&open(image), LockKind::Exclusive, 0, 1).unwrap());
    let claimed = claim(image, 0).expect("only read");
    // In spite of the reader's lock, the claimed part is locked against another claim, and against a VMM that wants
    // exclusive use.
    claim(image, 512).expect_err("taken");
    let next = claim(image, 1 << 10).expect("the next part");
    drop(reader.stdin.take());
    assert!(reader.wait().unwrap().success());

    assert!(!try_lock(&open(image), LockKind::Exclusive, 0, 1).unwrap());
    claim(image, 0).expect_err("taken");
    drop((claimed, next));
    claim(image, 0).expect("free again");
}
