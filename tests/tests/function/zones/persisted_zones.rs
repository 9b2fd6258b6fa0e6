//! The file of zone states, on a full disk and truncated while in use.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nvme_mpt_memory::describe_error;
use nvme_mpt_tests::command::Sqe;
use nvme_mpt_tests::status::{READ_ONLY_RANGE, SUCCESS, WRITE_FAULT};
use nvme_mpt_tests::zoned::{action, state};
use nvme_mpt_vmm::drives;

use super::{PROFILE, SIZE, ZONE, attach, blocks, host, lease, options, zone};
use crate::common::loop_device::{LoopDevice, Mounted, run};
use crate::common::{Setup, children};
use crate::lost_writes::{RELIABILITY_AND_READ_ONLY, status_and_dnr, warnings};

/// Creates a drive's file for three leases, without blocks. Returns its path and the path of its zone states.
fn create_drive(dir: &Path) -> (PathBuf, PathBuf) {
    let file = dir.join("drive.img");
    File::create(&file).unwrap().set_len(48 << 20).unwrap();
    (file.clone(), file.with_extension("img.zones"))
}

/// A file that fills its file system. Drop frees the space.
struct FullFileSystem(PathBuf);

impl FullFileSystem {
    /// Fills a file system except for `left` bytes.
    fn leaving(left: u64, dir: &Path) -> Self {
        let path = dir.join("full");
        let file = File::create(&path).unwrap();
        let mut end = 0;
        while file.write_all_at(&[1; 1024], end).is_ok() {
            end += 1024;
        }
        file.set_len(end - left).unwrap();
        Self(path)
    }
}

impl Drop for FullFileSystem {
    /// Truncates the file. A child of another test may have it open, and then removal would free no blocks.
    fn drop(&mut self) {
        File::create(&self.0).unwrap();
        fs::remove_file(&self.0).unwrap();
    }
}

/// Buffer for direct I/O.
#[repr(align(4096))]
struct Page([u8; 4096]);

/// Checks that a drive does not open while its zone states have no space, and opens afterwards.
fn check_full_file_system(dir: &Path) {
    let (file, zone_file) = create_drive(dir);
    let path = file.to_str().unwrap();
    let open = || {
        children::wait_for_spawns();
        drives::open(&path.parse().unwrap(), options(PROFILE, None))
    };
    // A new file has space for its head only. A sparse copy has no space at all.
    for left in [4096, 0] {
        let full = FullFileSystem::leaving(left, dir);
        let refused = open().map(drop);
        let error = describe_error(&refused.expect_err("there is no room for the states"));
        let named = zone_file.to_str().unwrap();
        assert!(error.contains(named), "{error}");
        assert!(error.contains("no space for the 4480 bytes"), "{error}");
        assert!(error.contains("free space"), "{error}");
        drop(full);
        drop(open().unwrap());
        let states = File::options().write(true).open(&zone_file).unwrap();
        states.set_len(4096).unwrap();
        states.set_len(4096 + 48 * 8).unwrap();
    }
    {
        let host = host(path);
        let full = FullFileSystem::leaving(0, dir);
        let (_controller, mut disk) = attach(&host.machine(&Setup::nth(1)));
        disk.zone_action(SIZE, action::FINISH).unwrap();
        disk.flush().unwrap();
        drop(full);
    }
    let host = host(path);
    let (_controller, mut disk) = attach(&host.machine(&Setup::nth(1)));
    assert_eq!(disk.zone(SIZE).unwrap(), zone(state::FULL, SIZE, u64::MAX));
}

#[test]
fn states_that_find_no_room_refuse_the_drive() {
    if let Some(tmpfs) = Mounted::tmpfs(1 << 20) {
        check_full_file_system(tmpfs.path());
    }
    // Without extents, ext4 has no fallocate.
    for features in ["extents", "^extents,^64bit,^metadata_csum"] {
        if let Some(device) = LoopDevice::new(8 << 20, 16 << 20)
            && let Some(ext4) = Mounted::ext4(device.device(), features)
        {
            check_full_file_system(ext4.path());
        }
    }
}

#[test]
fn states_that_are_cut_off_fail_every_flush_and_change_and_new_lease() {
    let dir = tempfile::tempdir().unwrap();
    let (file, zone_file) = create_drive(dir.path());
    let changes = [
        ("Append", Sqe::zone_append(1, 0, 1)),
        ("Finish", Sqe::zone_send(1, 2 * SIZE, action::FINISH, false)),
        ("Reset", Sqe::zone_send(1, 0, action::RESET, false)),
        ("Reset of all", Sqe::zone_send(1, 0, action::RESET, true)),
        ("Close of all", Sqe::zone_send(1, 0, action::CLOSE, true)),
    ];
    let flush = ("Flush", Sqe::flush(1));
    for (name, first) in [flush].into_iter().chain(changes) {
        let host = host(file.to_str().unwrap());
        let machines = [0, 1].map(|index| host.machine(&Setup::nth(index)));
        let [(mut controller, mut disk), (_, mut other)] = machines.each_ref().map(attach);
        let data = machines[0].memory.alloc(4096).unwrap();
        let run = |disk: &mut _, sqe: Sqe| {
            let data = nvme_mpt_tests::prp::buffer(&data, 0, 4096).unwrap().pointer;
            status_and_dnr(disk, sqe.with_data(data))
        };
        disk.append(0, &blocks(1, 0, 8)).unwrap();
        assert_eq!(run(&mut disk, flush.1), (SUCCESS, false));

        File::options()
            .write(true)
            .open(&zone_file)
            .unwrap()
            .set_len(4096)
            .unwrap();
        assert_eq!(run(&mut disk, first), (WRITE_FAULT, true), "{name}");
        for disk in [&mut disk, &mut other] {
            assert_eq!(run(disk, flush.1), (WRITE_FAULT, true), "after {name}");
            for (what, change) in changes {
                let expected = (READ_ONLY_RANGE, true);
                assert_eq!(run(disk, change), expected, "{what} after {name}");
            }
        }
        assert_eq!(disk.read(0, 8).unwrap(), blocks(1, 0, 8));
        assert_eq!(warnings(&mut controller), RELIABILITY_AND_READ_ONLY);
        machines[0].function().flush().unwrap_err();
        machines[0].function().backend().reset_connection();
        assert_eq!(
            run(&mut disk, flush.1),
            (WRITE_FAULT, true),
            "for a new VMM"
        );
        let refused = lease(&host, 32 * ZONE, 16 * ZONE).map(drop);
        let error = describe_error(&refused.expect_err("its states are lost"));
        assert!(error.contains(zone_file.to_str().unwrap()), "{error}");
        fs::remove_file(&zone_file).unwrap();
    }
}

#[test]
fn states_that_were_not_written_back_are_written_for_a_new_vmm() {
    let Some(device) = LoopDevice::new(8 << 20, 16 << 20) else {
        return;
    };
    let Some(ext4) = Mounted::ext4(device.device(), "^has_journal") else {
        return;
    };
    let (file, zone_file) = create_drive(ext4.path());
    let host = host(file.to_str().unwrap());
    let machine = host.machine(&Setup::nth(0));
    let (controller, mut disk) = attach(&machine);
    // The underlying file system has no space for the page behind the head of the states.
    let below = fs::read(device.file()).unwrap();
    let mut pages = (0..).zip(below.as_chunks::<4096>().0);
    let head = pages.find(|(_, page)| page.starts_with(b"nvmezns1"));
    let states = (head.expect("it was synced").0 + 1) * 4096;
    let (offset, path) = (
        format!("--offset={states}"),
        device.file().to_str().unwrap(),
    );
    run(&["fallocate", "--punch-hole", &offset, "--length=4096", path]).unwrap();
    let full = FullFileSystem::leaving(0, device.file().parent().unwrap());
    disk.zone_action(SIZE, action::FINISH).unwrap();
    assert_eq!(
        status_and_dnr(&mut disk, Sqe::flush(1)),
        (WRITE_FAULT, true)
    );
    drop(full);
    machine.function_level_reset();
    machine.function().backend().reset_connection();
    drop((controller, disk));
    let (_controller, mut disk) = attach(&machine);
    disk.flush().unwrap();
    // Direct I/O, since the page cache has the data in any case.
    let direct = File::options()
        .read(true)
        .custom_flags(libc::O_DIRECT)
        .open(zone_file)
        .unwrap();
    let mut page = Page([0; 4096]);
    assert!(direct.read_at(&mut page.0, 4096).unwrap() >= 16);
    let words = page.0.as_chunks().0;
    assert_eq!(words[0], [0; 8], "empty");
    assert_ne!(words[1], [0; 8], "full");
}
