//! A drive in a file: durability, holes, unaligned data, and a file that is truncated.
#![expect(
    unsafe_code,
    reason = "asks the kernel how much of a file is in its cache only"
)]

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};

use nvme_lease::PreviousDataPolicy;
use nvme_mpt_tests::Error;
use nvme_mpt_tests::admin::{LogPage, log};
use nvme_mpt_tests::command::{DataPointer, FUA, Sqe};
use nvme_mpt_tests::controller::Controller;
use nvme_mpt_tests::disk::{Disk, Transfer};
use nvme_mpt_tests::not_checked::not_checked;
use nvme_mpt_tests::rng;
use nvme_mpt_tests::sgl;
use nvme_mpt_tests::status::{
    CAPACITY_EXCEEDED, COMPARE_FAILURE, SUCCESS, StatusCode, UNRECOVERED_READ_ERROR, WRITE_FAULT,
};
use tempfile::NamedTempFile;

use crate::common::loop_device::{LoopDevice, Mounted};
use crate::common::{HANG, Host, LEASE, Machine, Setup, status};

/// A file, a drive in it, and a guest with the whole drive.
struct Scene {
    file: NamedTempFile,
    machine: Machine,
    disk: Disk,
    controller: Controller,
}

fn scene(lba_size: u32) -> Scene {
    scene_of(LEASE, lba_size)
}

fn scene_of(bytes: u64, lba_size: u32) -> Scene {
    let file = NamedTempFile::new().unwrap();
    file.as_file().set_len(bytes).unwrap();
    let machine = Host::of_file(file.path(), lba_size).machine(&Setup::nth(0));
    let (controller, disk) = machine.disk();
    Scene {
        file,
        machine,
        disk,
        controller,
    }
}

/// Returns the status of a failed command.
fn error_status(error: &Error) -> Option<StatusCode> {
    error.completion().map(|cqe| cqe.status().code())
}

fn pattern(tag: u64, bytes: usize) -> Vec<u8> {
    let mut data = vec![0; bytes];
    rng::fill_blocks(&mut data, tag, 0, 512);
    data
}

/// Returns the number of dirty pages and pages in writeback of a file. `None` before Linux 6.5, which cannot tell.
fn unwritten(file: &File) -> Option<u64> {
    cached(file).map(|[_, dirty, writeback, ..]| dirty + writeback)
}

/// Returns counts of a file's pages in the page cache: total, dirty, in writeback, and two more. `None` before Linux 6.5.
pub(crate) fn cached(file: &File) -> Option<[u64; 5]> {
    const SYS_CACHESTAT: libc::c_long = 451;
    /// Zeroes mean the whole file.
    static RANGE: [u64; 2] = [0, 0];
    // nr_cache, nr_dirty, nr_writeback, nr_evicted, nr_recently_evicted.
    let mut counts = [0_u64; 5];
    // SAFETY: the range and the counts have the form that the call wants, and live longer than it.
    let result = unsafe {
        libc::syscall(
            SYS_CACHESTAT,
            file.as_raw_fd(),
            RANGE.as_ptr(),
            counts.as_mut_ptr(),
            0,
        )
    };
    (result == 0).then_some(counts)
}

/// Returns whether the kernel reports dirty pages for files on this file system.
pub(crate) fn has_dirty_page_counts() -> bool {
    let file = tempfile::tempfile().unwrap();
    (0..20).any(|_| {
        file.write_all_at(&[1; 65_536], 0).unwrap();
        unwritten(&file).is_some_and(|pages| pages > 0) && {
            file.sync_data().unwrap();
            unwritten(&file) == Some(0)
        }
    })
}

/// Writes with flags, through the page cache.
fn write_through_cache(scene: &mut Scene, flags: u32) {
    let data = scene.machine.memory.alloc(2 * 65_536).unwrap();
    data.fill(0x41);
    let blocks = (65_536 / scene.disk.block_size()) as u32;
    let sqe = Sqe::write(1, 16, blocks);
    let sqe = sqe
        .with_cdw(12, sqe.cdw(12) | flags)
        .with_data(DataPointer::sgl(sgl::data_block(data.gpa() + 1, 65_536)));
    assert_eq!(status(&mut scene.disk.queue, sqe), SUCCESS);
}

#[test]
fn flush_and_force_unit_access_reach_the_device() {
    if !has_dirty_page_counts() {
        not_checked("the kernel or the file system does not tell what is in its cache only");
        return;
    }
    // A file of this length cannot bypass the page cache.
    let mut scene = scene_of(LEASE + 100, 512);
    let file = scene.file.reopen().unwrap();
    // The kernel may write pages back at any time, but hardly each time at once.
    let dirty = (0..20).any(|_| {
        write_through_cache(&mut scene, 0);
        unwritten(&file) > Some(0)
    });
    if !dirty {
        not_checked("the kernel writes what is in its cache at once");
        return;
    }
    scene.disk.flush().unwrap();
    assert_eq!(unwritten(&file), Some(0), "after Flush");
    for _ in 0..20 {
        write_through_cache(&mut scene, FUA);
        assert_eq!(unwritten(&file), Some(0), "after a write with FUA");
    }
    write_through_cache(&mut scene, 0);
    scene.controller.shutdown(false).unwrap();
    assert_eq!(unwritten(&file), Some(0), "after a normal shutdown");
}

#[test]
fn write_zeroes_keeps_blocks_and_deallocates_where_it_may() {
    const MIB: usize = 1 << 20;
    for lba_size in [512, 4096] {
        let mut scene = scene(lba_size);
        if scene.disk.namespace().dlfeat & 0b111 != 1 {
            not_checked("the file system has no holes");
            return;
        }
        let per_mib = (MIB / scene.disk.block_size()) as u32;
        let data = pattern(3, MIB);
        let file = scene.file.reopen().unwrap();
        let allocated = || {
            file.sync_all().unwrap();
            512 * file.metadata().unwrap().blocks()
        };
        for mib in 0..8 {
            scene.disk.write(mib * u64::from(per_mib), &data).unwrap();
        }
        let full = allocated();
        assert!(full >= 8 * MIB as u64);
        scene.disk.write_zeroes(0, per_mib, false).unwrap();
        assert_eq!(allocated(), full, "zeroes take room");
        scene
            .disk
            .write_zeroes(u64::from(per_mib), per_mib, true)
            .unwrap();
        let punched = allocated();
        assert!(punched <= full - MIB as u64, "{full} {punched}");
        let ranges = [2, 4, 5].map(|mib| (mib * u64::from(per_mib), per_mib));
        scene.disk.deallocate(&ranges).unwrap();
        assert!(allocated() <= punched - 3 * MIB as u64);
        let zeroed = [true, true, true, false, true, true, false, false];
        for (mib, zeroed) in (0..).zip(zeroed) {
            let read = scene.disk.read(mib * u64::from(per_mib), per_mib).unwrap();
            let want = if zeroed { vec![0; MIB] } else { data.clone() };
            assert!(read == want, "MiB {mib}");
        }
    }
}

#[test]
fn compare_copy_and_verify() {
    for lba_size in [512, 4096] {
        let mut scene = scene(lba_size);
        let (disk, size) = (&mut scene.disk, lba_size as usize);
        let data = pattern(5, 64 * size);
        disk.write(100, &data).unwrap();
        disk.compare(100, &data).unwrap();
        for at in [0, 31 * size + 7, 64 * size - 1] {
            let mut other = data.clone();
            other[at] ^= 1;
            let error = disk.compare(100, &other).unwrap_err();
            assert_eq!(error_status(&error), Some(COMPARE_FAILURE), "{at}");
        }
        disk.copy(1000, &[(130, 34), (100, 30)]).unwrap();
        let copied = disk.read(1000, 64).unwrap();
        assert!(copied[..34 * size] == data[30 * size..]);
        assert!(copied[34 * size..] == data[..30 * size]);
        disk.verify(100, 64).unwrap();
    }
}

#[test]
fn uncorrectable_blocks_fail_until_they_are_written() {
    let mut scene = scene(512);
    let disk = &mut scene.disk;
    let data = pattern(6, 512);
    let failed = |result: nvme_mpt_tests::Result<()>| {
        assert_eq!(
            error_status(&result.unwrap_err()),
            Some(UNRECOVERED_READ_ERROR)
        );
    };
    disk.write(50, &data.repeat(8)).unwrap();
    let rewrites: [&dyn Fn(&mut Disk); 4] = [
        &|disk| disk.write(52, &data).unwrap(),
        &|disk| disk.write_zeroes(52, 1, false).unwrap(),
        &|disk| disk.copy(52, &[(50, 1)]).unwrap(),
        &|disk| disk.deallocate(&[(52, 1)]).unwrap(),
    ];
    for rewrite in rewrites {
        disk.write_uncorrectable(52, 1).unwrap();
        failed(disk.read(52, 1).map(drop));
        failed(disk.read(50, 8).map(drop));
        failed(disk.compare(52, &data));
        failed(disk.verify(50, 8));
        failed(disk.copy(60, &[(50, 1), (52, 1)]));
        disk.read(50, 2).unwrap();
        disk.read(53, 5).unwrap();
        rewrite(disk);
        disk.read(50, 8).unwrap();
        disk.verify(52, 1).unwrap();
    }
}

#[test]
fn buffers_at_any_alignment() {
    for lba_size in [512, 4096] {
        let mut scene = scene(lba_size);
        let disk = &mut scene.disk;
        for (tag, transfer) in (0..).zip([
            Transfer::Prp { offset: 4 },
            Transfer::Prp { offset: 512 },
            Transfer::Prp { offset: 4092 },
            Transfer::Sgl {
                piece: 513,
                per_segment: 20,
            },
            Transfer::Sgl {
                piece: 4096,
                per_segment: 4,
            },
            Transfer::Sgl {
                piece: 12_345,
                per_segment: 2,
            },
        ]) {
            let data = pattern(tag, 8 * lba_size as usize);
            disk.transfer = transfer;
            disk.write(3 + tag, &data).unwrap();
            disk.compare(3 + tag, &data).unwrap();
            assert!(disk.read(3 + tag, 8).unwrap() == data, "{transfer:?}");
            // Data written with one layout is read with another.
            disk.transfer = Transfer::Prp { offset: 0 };
            assert!(disk.read(3 + tag, 8).unwrap() == data, "{transfer:?}");
        }
    }
}

/// Returns whether the file system supports direct I/O.
fn is_direct() -> bool {
    let file = NamedTempFile::new().unwrap();
    file.as_file().set_len(8192).unwrap();
    let direct = std::fs::OpenOptions::new()
        .write(true)
        .custom_flags(libc::O_DIRECT)
        .open(file.path());
    direct.is_ok() && has_dirty_page_counts()
}

#[test]
fn no_buffer_brings_data_into_the_page_cache() {
    if !is_direct() {
        not_checked("the file system has nothing but its page cache, or does not tell");
        return;
    }
    let mut scene = scene(512);
    let file = scene.file.reopen().unwrap();
    for (tag, offset) in (0..).zip([0, 4, 512, 1020, 4092]) {
        let data = pattern(tag, 8 * 512);
        scene.disk.transfer = Transfer::Prp { offset };
        // A range of whole file system blocks, and a range with partial blocks at both ends.
        for slba in [64, 67] {
            scene.disk.write(slba, &data).unwrap();
            assert!(scene.disk.read(slba, 8).unwrap() == data);
            scene.disk.compare(slba, &data).unwrap();
            scene.disk.copy(slba + 101, &[(slba, 8)]).unwrap();
            scene
                .disk
                .write_zeroes(slba + 201, 9, tag % 2 == 0)
                .unwrap();
            scene.disk.deallocate(&[(slba + 301, 21)]).unwrap();
        }
        let pages = cached(&file).unwrap()[0];
        assert_eq!(pages, 0, "with data at {offset} of a page");
    }
}

/// Two concurrent commands on one page. One command has memory that is not aligned for the device.
#[test]
fn two_writes_in_one_page_are_both_there() {
    let mut scene = scene(512);
    let memory = &scene.machine.memory;
    let (even, odd) = (memory.alloc(4096).unwrap(), memory.alloc(4096).unwrap());
    let whole = memory.alloc(4096).unwrap();
    for round in 0..4000_u32 {
        let slba = u64::from(round % 16) * 8;
        let tags = [round as u8, !(round as u8), round.wrapping_mul(7) as u8];
        even.fill(tags[0]);
        odd.fill(tags[1]);
        whole.fill(tags[2]);
        let write = |slba, blocks, gpa, bytes| {
            Sqe::write(1, slba, blocks).with_data(DataPointer::sgl(sgl::data_block(gpa, bytes)))
        };
        let queue = &mut scene.disk.queue;
        let commands = [
            write(slba, 1, even.gpa(), 512),
            write(slba + 1, 1, odd.gpa() + 1, 512),
            // These writes cover the next page, which the last command also writes in part.
            write(slba + 8, 8, whole.gpa(), 4096),
        ];
        let cids = commands.map(|command| queue.submit(command).unwrap());
        for cid in cids {
            let cqe = queue.wait(cid, HANG).unwrap();
            assert_eq!(cqe.status().code(), SUCCESS, "{round}");
        }
        let found = scene.disk.read(slba, 16).unwrap();
        assert!(found[..512].iter().all(|&byte| byte == tags[0]), "{round}");
        assert!(
            found[512..1024].iter().all(|&byte| byte == tags[1]),
            "{round}"
        );
        assert!(found[4096..].iter().all(|&byte| byte == tags[2]), "{round}");
    }
    scene.disk.flush().unwrap();
    scene.file.as_file().sync_all().unwrap();
}

#[test]
fn deallocated_blocks_read_zeroes_wherever_a_range_begins() {
    let mut scene = scene(512);
    if scene.disk.namespace().dlfeat & 0b111 != 1 {
        not_checked("the file system has no holes");
        return;
    }
    let data = pattern(9, 128 * 512);
    for (start, blocks) in [(0, 8), (1, 3), (1, 7), (5, 6), (3, 40), (8, 1), (7, 2)] {
        for zero in [false, true] {
            scene.disk.write(0, &data).unwrap();
            if zero {
                scene.disk.write_zeroes(start, blocks, false).unwrap();
            } else {
                scene.disk.deallocate(&[(start, blocks)]).unwrap();
            }
            let mut want = data.clone();
            want[start as usize * 512..(start as usize + blocks as usize) * 512].fill(0);
            assert!(scene.disk.read(0, 128).unwrap() == want, "{start}+{blocks}");
        }
    }
}

#[test]
fn a_block_device_that_cannot_write_zeroes_promises_none() {
    let Some(device) = LoopDevice::without_zeroes(LEASE) else {
        return;
    };
    let machine = Host::of_file(device.device(), 512).machine(&Setup::nth(0));
    let (_controller, mut disk) = machine.disk();
    assert_eq!(disk.namespace().dlfeat & 0b111, 0);
    let data = pattern(9, 64 * 512);
    for (start, blocks) in [(0, 8), (3, 40), (5, 1)] {
        let bytes = start as usize * 512..(start as usize + blocks as usize) * 512;
        disk.write(0, &data).unwrap();
        // A deallocation is advice: it must not fail, and must not affect other blocks.
        disk.deallocate(&[(start, blocks)]).unwrap();
        let found = disk.read(0, 64).unwrap();
        assert!(found[..bytes.start] == data[..bytes.start]);
        assert!(found[bytes.end..] == data[bytes.end..]);
        for deallocate in [false, true] {
            disk.write(0, &data).unwrap();
            disk.write_zeroes(start, blocks, deallocate).unwrap();
            let mut want = data.clone();
            want[bytes.clone()].fill(0);
            assert!(disk.read(0, 64).unwrap() == want, "{start}+{blocks}");
        }
    }
}

#[test]
fn a_file_that_is_cut_short() {
    let mut scene = scene(4096);
    let data = pattern(7, 8 * 4096);
    let disk = &mut scene.disk;
    let last = disk.blocks() - 8;
    disk.write(0, &data).unwrap();
    disk.write(last, &data).unwrap();
    scene.file.as_file().set_len(LEASE / 2 + 100).unwrap();
    let unreadable = |result: nvme_mpt_tests::Result<()>| {
        assert_eq!(
            error_status(&result.unwrap_err()),
            Some(UNRECOVERED_READ_ERROR)
        );
    };
    for transfer in [
        Transfer::Prp { offset: 0 },
        Transfer::Sgl {
            piece: 999,
            per_segment: 40,
        },
    ] {
        disk.transfer = transfer;
        unreadable(disk.read(last, 8).map(drop));
        // A transfer that begins before the end of the file.
        unreadable(disk.read(LEASE / 2 / 4096 - 4, 8).map(drop));
        unreadable(disk.compare(last, &data));
        unreadable(disk.verify(last, 8));
        unreadable(disk.copy(100, &[(last, 8)]));
        assert!(disk.read(0, 8).unwrap() == data);
    }
    // No write extends the file, and no Flush confirms the lost data.
    let length = || scene.file.as_file().metadata().unwrap().len();
    let unwritable = |result: nvme_mpt_tests::Result<()>| {
        assert_eq!(error_status(&result.unwrap_err()), Some(WRITE_FAULT));
        assert_eq!(length(), LEASE / 2 + 100);
    };
    disk.transfer = Transfer::Prp { offset: 0 };
    unwritable(disk.write(last, &data));
    unwritable(disk.write(LEASE / 2 / 4096 - 4, &data));
    unwritable(disk.write_zeroes(last, 8, false));
    unwritable(disk.write_zeroes(last, 8, true));
    unwritable(disk.copy(last, &[(0, 8)]));
    unwritable(disk.flush());
    disk.write(8, &data).unwrap();
    // The loss remains if another process extends the file.
    scene.file.as_file().set_len(LEASE).unwrap();
    unreadable(disk.read(last, 8).map(drop));
    assert!(disk.write(last, &data).is_err());
}

/// Returns Critical Warning.
fn warnings(controller: &mut Controller) -> u8 {
    let page = LogPage {
        id: log::SMART,
        nsid: u32::MAX,
        offset: 0,
        len: 512,
        retain: true,
    };
    controller.log_page(page).unwrap()[0]
}

/// Critical Warning, bit 2: reliability degraded (Base 2.0, Figure 207).
const RELIABILITY: u8 = 0b100;

#[test]
fn a_write_is_the_first_to_find_a_file_cut_short_and_leaves_it_so() {
    for blocks in [8_u64, 64] {
        let mut scene = scene(4096);
        let disk = &mut scene.disk;
        let last = disk.blocks() - blocks;
        disk.write(last, &pattern(1, blocks as usize * 4096))
            .unwrap();
        assert_eq!(warnings(&mut scene.controller), 0);
        scene.file.as_file().set_len(LEASE / 2).unwrap();
        let error = disk
            .write(last, &pattern(2, blocks as usize * 4096))
            .unwrap_err();
        assert_eq!(error_status(&error), Some(WRITE_FAULT));
        assert_eq!(scene.file.as_file().metadata().unwrap().len(), LEASE / 2);
        assert_eq!(warnings(&mut scene.controller), RELIABILITY);
    }
}

#[test]
fn a_guest_is_warned_of_a_file_that_is_cut_short_or_replaced() {
    let dir = tempfile::tempdir().unwrap();
    for replace in [false, true] {
        let path = dir.path().join("drive.img");
        let file = File::create(&path).unwrap();
        file.set_len(2 * LEASE).unwrap();
        let host = Host::of_file(&path, 4096);
        let machines = [0, 1].map(|nth| host.machine(&Setup::nth(nth)));
        let mut guests = machines.each_ref().map(Machine::disk);
        if replace {
            std::fs::write(dir.path().join("other"), [0; 4096]).unwrap();
            std::fs::rename(dir.path().join("other"), &path).unwrap();
        } else {
            file.set_len(LEASE).unwrap();
        }
        let warned = guests
            .each_mut()
            .map(|(controller, _)| warnings(controller));
        // A lease that lies before the end of the file is undamaged.
        assert_eq!(warned, [if replace { RELIABILITY } else { 0 }, RELIABILITY]);
        let [(_, first), (_, second)] = &mut guests;
        first.write(0, &pattern(1, 4096)).unwrap();
        first.flush().unwrap();
        assert_eq!(second.write(0, &pattern(1, 4096)).is_ok(), replace);
    }
}

/// On a full tmpfs, writes to missing pages fail, including pages that the server believes to exist.
#[test]
fn a_full_tmpfs() {
    const FREE_SPACE: u64 = 1 << 20;
    let Some(tmpfs) = Mounted::tmpfs(FREE_SPACE) else {
        return;
    };
    let path = tmpfs.path().join("drive.img");
    let file = File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(&path)
        .unwrap();
    file.set_len(LEASE).unwrap();
    let machine = Host::of_file(&path, 4096).machine(&Setup::nth(0));
    let (_controller, mut disk) = machine.disk();
    let full = |result: nvme_mpt_tests::Result<()>| {
        assert_eq!(error_status(&result.unwrap_err()), Some(CAPACITY_EXCEEDED));
    };
    let create_remainder = |name| {
        let mut create_remainder = File::create_new(tmpfs.path().join(name)).unwrap();
        std::io::copy(&mut std::io::repeat(1), &mut create_remainder).unwrap_err();
    };
    let blocks = 16;
    for block in 0..blocks {
        disk.write(block, &pattern(block, 4096)).unwrap();
    }
    create_remainder("rest");
    full(disk.write(blocks, &pattern(1, 4096)));
    full(disk.write(blocks - 1, &pattern(blocks - 1, 2 * 4096)));
    let zeroes = vec![0; 4096];
    assert!(disk.read(blocks, 1).unwrap() == zeroes);
    let mut written = vec![0; 4096];
    for block in 0..blocks {
        disk.write(block, &pattern(100 + block, 4096)).unwrap();
        file.read_exact_at(&mut written, block * 4096).unwrap();
        assert!(written == pattern(100 + block, 4096));
    }

    // Another program punches out two pages, and uses up the memory.
    punch(&file, 0, 2 * 4096);
    create_remainder("more");
    for _ in 0..2 {
        full(disk.write(0, &pattern(1, 4096)));
    }
    assert!(disk.read(1, 1).unwrap() == zeroes);
    assert!(disk.read(2, 1).unwrap() == pattern(102, 4096));
    disk.write(3, &pattern(3, 4096)).unwrap();
    // The file is truncated, not removed: a child of another test may have it open.
    File::create(tmpfs.path().join("more")).unwrap();
    disk.write(0, &pattern(1, 4096)).unwrap();
    for (block, tag) in [(0, 1), (3, 3), (4, 104)] {
        file.read_exact_at(&mut written, block * 4096).unwrap();
        assert!(written == pattern(tag, 4096), "block {block}");
    }
}

fn punch(file: &File, offset: i64, len: i64) {
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    // SAFETY: the call takes numbers alone.
    let result = unsafe { libc::fallocate(file.as_raw_fd(), mode, offset, len) };
    assert_eq!(result, 0);
}

/// Allocates space in a part of a file without data. Returns whether the file system reports such space as a hole.
fn reserve_space(file: &File, offset: i64, len: i64) -> bool {
    // SAFETY: the calls take numbers alone. The position of the file is not used.
    unsafe {
        libc::fallocate(file.as_raw_fd(), 0, offset, len) == 0
            && libc::lseek(file.as_raw_fd(), offset, libc::SEEK_DATA) != offset
    }
}

#[test]
fn a_wipe_erases_all_data_and_leaves_holes_out() {
    const MIB: u64 = 1 << 20;
    const FREE_SPACE: u64 = 4 * MIB;
    let setup = Setup::nth(0);
    let data = [0xA5; 4096];
    for dir in [std::env::temp_dir(), "/dev/shm".into()] {
        for lba_size in [512, 4096] {
            let drive = tempfile::Builder::new().tempfile_in(&dir).unwrap();
            let file = drive.as_file();
            file.set_len(LEASE + 4096).unwrap();
            if !reserve_space(file, 8 << 20, FREE_SPACE as i64) {
                not_checked("the file system has no room without data");
                continue;
            }
            let stale_blocks = [0, 3 * MIB + 4096, LEASE - 4096];
            for at in stale_blocks.into_iter().chain([LEASE]) {
                file.write_all_at(&data, at).unwrap();
            }
            let host = Host::of_file(drive.path(), lba_size);
            drop(
                host.lease("former", &setup, PreviousDataPolicy::Kept)
                    .unwrap(),
            );
            host.wipe(&setup);
            let block = |at: u64| {
                let mut block = [1; 4096];
                file.read_exact_at(&mut block, at).unwrap();
                block
            };
            for at in stale_blocks {
                assert!(block(at) == [0; 4096], "data at {at}");
            }
            assert!(block(LEASE) == data, "the neighbour's data");
            // A deallocating command would have freed the space.
            let bytes = file.metadata().unwrap().blocks() * 512;
            assert!(bytes >= FREE_SPACE, "{bytes} bytes");
        }
    }
}
