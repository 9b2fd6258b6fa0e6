//! Processes that crash in different ways, and the crash record that they leave.
#![expect(unsafe_code, reason = "crashes, and sends signals")]
#![expect(
    clippy::disallowed_methods,
    reason = "tests have threads and real time of their own"
)]

use std::env;
use std::fs::File;
use std::hint::black_box;
use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Arc;

use nvme_mpt_memory::crash::{CrashRecord, install_crash_handlers};
use nvme_mpt_memory::{Mapping, MappingAccess};

/// Offset of the record in its file.
const OFFSET: usize = 128;

/// Environment variables that make this program crash: the kind of crash, and the file with its record.
const END: &str = "NVME_MPT_TEST_END";
const FILE: &str = "NVME_MPT_TEST_FILE";

fn record(path: &Path) -> CrashRecord {
    let file = File::options().read(true).write(true).open(path).unwrap();
    let mapping = Mapping::shared(file.as_fd(), 0, 4096, MappingAccess::ReadWrite).unwrap();
    CrashRecord::new(&Arc::new(mapping), OFFSET).unwrap()
}

#[expect(unconditional_recursion, reason = "it is to run out of stack")]
fn overflow(depth: usize) -> usize {
    black_box(overflow(black_box(depth + 1)) + 1)
}

/// Accesses memory beyond the end of a file, in a mapping that no [`Mapping`] guards.
fn touch_lost_memory() {
    let file = tempfile::tempfile().unwrap();
    let (read, shared) = (libc::PROT_READ, libc::MAP_SHARED);
    let fd = std::os::fd::AsRawFd::as_raw_fd(&file);
    // SAFETY: the mapping is new. The read from it raises SIGBUS.
    unsafe {
        let page = libc::mmap(std::ptr::null_mut(), 4096, read, shared, fd, 0);
        assert_ne!(page, libc::MAP_FAILED);
        page.cast::<u8>().read_volatile();
    }
}

/// Waits until the parent sends a signal.
fn await_signal() {
    println!("ready");
    loop {
        // SAFETY: the call takes no memory.
        unsafe { libc::pause() };
    }
}

fn end(way: &str) {
    match way {
        "abort" => std::process::abort(),
        // SAFETY: the access is invalid on purpose. It raises SIGSEGV, which ends this process.
        "segv" => unsafe { black_box(std::ptr::without_provenance_mut::<u8>(8)).write_volatile(1) },
        "bus" => touch_lost_memory(),
        "overflow" => assert_ne!(overflow(0), 0),
        "elsewhere" => {
            let other = std::thread::Builder::new().spawn(|| std::process::abort());
            other.unwrap().join().unwrap();
        }
        "exit" => std::process::exit(3),
        _ => await_signal(),
    }
}

/// Entry point of the crashing process. Does nothing in a normal run of the tests.
#[test]
fn child() {
    let (Some(way), Some(path)) = (env::var_os(END), env::var_os(FILE)) else {
        return;
    };
    let way = way.into_string().unwrap();
    install_crash_handlers().unwrap();
    let record = record(Path::new(&path));
    match way.strip_prefix("after ") {
        Some(way) => {
            record.run(|| black_box(0));
            end(way);
        }
        None => record.run(|| end(&way)),
    }
}

/// Runs a process that crashes as `way` says, or by the given signal. Returns the exit status.
fn process(way: &str, path: &Path, signal: Option<libc::c_int>) -> ExitStatus {
    let mut child = Command::new(env::current_exe().unwrap())
        .args(["--exact", "child", "--nocapture"])
        .env(END, way)
        .env(FILE, path)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    if let Some(signal) = signal {
        let mut printed = Vec::new();
        let stdout = child.stdout.as_mut().unwrap();
        while !printed.ends_with(b"ready\n") {
            let mut byte = [0];
            stdout.read_exact(&mut byte).unwrap();
            printed.extend(byte);
        }
        // SAFETY: the child was not waited for, so the process id belongs to the child.
        assert_eq!(unsafe { libc::kill(child.id() as i32, signal) }, 0);
    }
    // The parent reads all output, so that printing never blocks or fails.
    child.wait_with_output().unwrap().status
}

fn crashes_of(ends: &[(&str, Option<libc::c_int>)], dies_by: libc::c_int) -> u32 {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(4096).unwrap();
    for (way, signal) in ends {
        let status = process(way, file.path(), *signal);
        assert_eq!(status.signal(), Some(dies_by), "{way}: {status}");
    }
    record(file.path()).crashes()
}

#[test]
fn each_process_that_crashes_counts_once() {
    assert_eq!(
        crashes_of(&[("abort", None), ("abort", None)], libc::SIGABRT),
        2
    );
    assert_eq!(crashes_of(&[("segv", None)], libc::SIGSEGV), 1);
    assert_eq!(crashes_of(&[("bus", None)], libc::SIGBUS), 1);
    // A fault whose handling ends in an abort.
    assert_eq!(crashes_of(&[("overflow", None)], libc::SIGABRT), 1);
}

#[test]
fn crashes_of_other_threads_and_after_the_work_do_not_count() {
    assert_eq!(crashes_of(&[("elsewhere", None)], libc::SIGABRT), 0);
    assert_eq!(crashes_of(&[("after abort", None)], libc::SIGABRT), 0);
    assert_eq!(crashes_of(&[("after segv", None)], libc::SIGSEGV), 0);
}

#[test]
fn signals_of_other_processes_and_orderly_ends_do_not_count() {
    for signal in [libc::SIGKILL, libc::SIGTERM, libc::SIGABRT] {
        assert_eq!(crashes_of(&[("signal", Some(signal))], signal), 0);
    }
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(4096).unwrap();
    assert_eq!(process("exit", file.path(), None).code(), Some(3));
    assert_eq!(record(file.path()).crashes(), 0);
}
