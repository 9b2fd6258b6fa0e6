//! Tests of write errors that the kernel reported to a server which was killed before it recorded them. The next server
//! finds them by spare open file descriptions.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use nvme_mpt_tests::controller::{Config, Controller};
use nvme_mpt_tests::disk::Disk;
use nvme_mpt_tests::memory::GuestMemory;
use nvme_mpt_tests::not_checked::not_checked;
use nvme_mpt_tests::vfio_user::VfioUserBar;
use tempfile::TempDir;

use crate::supervised_server::{SupervisedServer, await_waiting};
use crate::support::{Bench, TIMEOUT};
use crate::vmms::TestVmm;

/// Capacity in bytes of the file system that holds the device's file. It is smaller than the test's data.
const CAPACITY: u64 = 1 << 20;

/// Size of the device in bytes.
const DEVICE: u64 = 16 << 20;

/// Flags of a read-only file description in `/proc/PID/fdinfo`: at most `O_LARGEFILE` and `O_CLOEXEC`.
const READS: [&str; 4] = ["00", "0100000", "02000000", "02100000"];

fn attach(bench: &Bench) -> (Disk, Controller) {
    let memory = GuestMemory::new(&[(1 << 20, 16 << 20)]).unwrap();
    let bar = VfioUserBar::attach(&bench.path("a.sock"), &memory).unwrap();
    let mut controller = Controller::attach(Arc::new(bar), memory, Config::default(), 1).unwrap();
    (Disk::open(&mut controller, 1).unwrap(), controller)
}

/// Returns the number of read-only open file descriptions of a path that the supervisor holds.
fn spares(supervised: &SupervisedServer, path: &Path) -> usize {
    let process = PathBuf::from(format!("/proc/{}", supervised.supervisor_pid()));
    let path = path.canonicalize().unwrap();
    let mut count = 0;
    for entry in fs::read_dir(process.join("fd")).unwrap() {
        let entry = entry.unwrap();
        if fs::read_link(entry.path()).is_ok_and(|found| found == path) {
            let info = process.join("fdinfo").join(entry.file_name());
            let info = fs::read_to_string(info).unwrap();
            let flags = info.lines().find_map(|line| line.strip_prefix("flags:"));
            let flags = flags.unwrap().trim();
            assert!(READS.contains(&flags), "{flags}");
            count += 1;
        }
    }
    count
}

/// Waits until the supervisor holds `wanted` spare descriptions of a path.
fn await_spares(supervised: &SupervisedServer, path: &Path, wanted: usize) {
    let deadline = Instant::now() + TIMEOUT;
    while spares(supervised, path) != wanted {
        assert!(Instant::now() < deadline, "{}", spares(supervised, path));
        thread::sleep(Duration::from_millis(20));
    }
}

/// Returns whether the file system of the test directory writes files back to a disk.
fn is_on_a_disk(bench: &Bench) -> bool {
    let kind = Command::new("stat")
        .args(["--file-system", "--format=%T"])
        .arg(bench.path("drive.img"))
        .output()
        .unwrap();
    let kind = String::from_utf8(kind.stdout).unwrap();
    let kind = kind.trim();
    let is_local = !matches!(kind, "tmpfs" | "ramfs" | "fuseblk" | "nfs" | "virtiofs");
    if !is_local {
        not_checked(&format!("a file on {kind} has no spare description"));
    }
    is_local
}

#[test]
fn the_supervisor_has_a_spare_description_of_each_lease_until_the_lease_ends() {
    let bench = Bench::new();
    if !is_on_a_disk(&bench) {
        return;
    }
    let drive = bench.path("drive.img");
    let mut serve = bench.serve_command("one", &["path=drive.img,range=0+1M,socket=a.sock,id=a"]);
    serve.args(["--drive", "path=drive.img"]);
    let supervised =
        SupervisedServer::start_command(&bench, &["--deaths", "100000", "--delay", "0"], &serve);
    bench
        .ask("add", &["path=drive.img,range=1M+1M,socket=b.sock,id=b"])
        .unwrap();
    let mut vmm = TestVmm::start(&bench, "path=drive.img,range=16M+16M,id=vmm", 1);
    assert_eq!(vmm.report(), "attached");
    await_spares(&supervised, &drive, 3);
    for round in 0..2 {
        supervised.kill_server();
        await_spares(&supervised, &drive, 3);
        assert_eq!(vmm.pass(), "passed", "round {round}");
        supervised.upgrade(&bench);
        await_spares(&supervised, &drive, 3);
        assert_eq!(vmm.pass(), "passed", "round {round}");
    }
    bench.ask("remove", &["b"]).unwrap();
    assert_eq!(spares(&supervised, &drive), 2, "a file is closed by then");
    vmm.end();
    await_spares(&supervised, &drive, 1);
    bench.ask("remove", &["a"]).unwrap();
    assert_eq!(spares(&supervised, &drive), 0);
    supervised.stop();
}

#[test]
fn the_spare_of_an_absent_vmm_is_closed_with_its_drive() {
    let bench = Bench::new();
    if !is_on_a_disk(&bench) {
        return;
    }
    let drive = bench.path("drive.img");
    let supervised =
        SupervisedServer::start(&bench, &["path=drive.img,range=0+1M,socket=a.sock,id=a"]);
    let mut vmm = TestVmm::start(&bench, "path=drive.img,range=16M+16M,id=vmm", 1);
    assert_eq!(vmm.report(), "attached");
    await_spares(&supervised, &drive, 2);
    vmm.stop_process();
    supervised.kill_server();
    vmm.kill();
    assert_eq!(spares(&supervised, &drive), 2);
    bench.ask("remove", &["a"]).unwrap();
    assert_eq!(spares(&supervised, &drive), 0);
    supervised.stop();
}

/// A block device whose file is on a file system that is smaller than the device. The server's buffered writes to the
/// device complete before their write-back fails.
struct Device {
    path: PathBuf,
    dir: TempDir,
}

impl Device {
    /// Returns `None` with a message if this process may not create the device.
    fn new() -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().to_str().unwrap();
        let size = format!("size={CAPACITY}");
        run(&["mount", "-t", "tmpfs", "-o", &size, "drive", place])?;
        let mut device = Self {
            path: PathBuf::new(),
            dir,
        };
        let file = device.dir.path().join("drive.img");
        File::create(&file).unwrap().set_len(DEVICE + 512).unwrap();
        let file = file.to_str().unwrap();
        let made = run(&["losetup", "--find", "--show", "--sector-size", "4096", file])?;
        device.path = made.trim().into();
        Some(device)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if !self.path.as_os_str().is_empty() {
            run(&["losetup", "--detach", self.path.to_str().unwrap()]);
        }
        run(&["umount", "--lazy", self.dir.path().to_str().unwrap()]);
    }
}

fn run(command: &[&str]) -> Option<String> {
    let output = Command::new(command[0]).args(&command[1..]).output();
    match output {
        Ok(output) if output.status.success() => {
            Some(String::from_utf8_lossy(&output.stdout).into_owned())
        }
        failed => {
            not_checked(&format!(
                "`{}` cannot be run here: {failed:?}",
                command.join(" ")
            ));
            None
        }
    }
}

/// Makes a write-back of the device fail. Then consumes the error, so that it is not reported for files that are opened
/// later.
fn fail_a_write_back(device: &Path) {
    let reader = File::open(device).unwrap();
    let file = File::options().write(true).open(device).unwrap();
    file.write_all_at(&vec![0x41; 4 * CAPACITY as usize], 0)
        .unwrap();
    // This sync consumes the error, as a server does that is killed before it records the error.
    reader.sync_all().unwrap_err();
}

#[test]
fn a_flush_fails_if_a_server_was_killed_with_the_report_of_a_lost_write() {
    let Some(device) = Device::new() else {
        return;
    };
    let bench = Bench::new();
    let function = format!("path={},lba=4096,socket=a.sock,id=a", device.path.display());
    let supervised = SupervisedServer::start(&bench, &[&function]);
    let (mut disk, controller) = attach(&bench);
    disk.flush().unwrap();
    assert_eq!(spares(&supervised, &device.path), 1);
    supervised.kill_server();
    disk.flush().unwrap();

    fail_a_write_back(&device.path);
    supervised.kill_server();
    disk.flush().expect_err("it promised what was lost");
    // The spare description has reported the error once, and the server has recorded it.
    supervised.kill_server();
    disk.flush().unwrap_err();
    let log = supervised.log();
    assert!(log.contains("Lease a lost completed writes, as"), "{log}");
    assert_eq!(log.matches("could not be written").count(), 1, "{log}");

    // A VMM that connects later gets no report of writes that were lost before.
    drop((disk, controller));
    await_waiting(&bench);
    let (mut disk, controller) = attach(&bench);
    disk.flush().unwrap();
    supervised.kill_server();
    disk.flush().unwrap();

    fail_a_write_back(&device.path);
    supervised.upgrade(&bench);
    disk.flush()
        .expect_err("the server after one that was replaced promised it");

    drop((disk, controller));
    await_waiting(&bench);
    let failure = bench.ask("remove", &["a"]).unwrap_err();
    assert!(failure.contains("lost completed writes"), "{failure}");
    assert_eq!(spares(&supervised, &device.path), 0);
    supervised.stop();
}
