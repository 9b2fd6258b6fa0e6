//! Logical blocks beyond the lease, in commands and in range lists, and commands that are too large. Guests on both sides of
//! the lease must notice nothing.

use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use nvme_guest::threads::ThreadSpawner;
use nvme_mpt_tests::command::{
    DEAC, DSM_DEALLOCATE, DataPointer, FUA, Sqe, copy_range, dsm_range, io,
};
use nvme_mpt_tests::controller::Controller;
use nvme_mpt_tests::disk::{Disk, Transfer};
use nvme_mpt_tests::memory::PAGE_SIZE;
use nvme_mpt_tests::prp;
use nvme_mpt_tests::rng::Rng;
use nvme_mpt_tests::status::{
    INVALID_FIELD, LBA_OUT_OF_RANGE, SIZE_LIMIT_EXCEEDED, SUCCESS, StatusCode,
};

use crate::common::bystander::Bystander;
use crate::common::changes::ChangeThread;
use crate::common::sentinel::Sentinel;
use crate::common::{Host, LEASE, Machine, Setup, UNMAPPED_ADDRESS, status};

/// Allocation unit of a lease by size, in bytes.
const UNIT: u64 = 1 << 20;

/// Opcodes with SLBA in CDW10 and NLB in CDW12.
const RANGED: [u8; 7] = [
    io::READ,
    io::WRITE,
    io::COMPARE,
    io::VERIFY,
    io::WRITE_ZEROES,
    io::WRITE_UNCORRECTABLE,
    // For NLB 0, these are the destination blocks of a copy of one range.
    io::COPY,
];

/// Returns ranges (first block, number of blocks) that exceed a namespace of `blocks` blocks.
fn ranges_beyond(blocks: u64) -> Vec<(u64, u32)> {
    vec![
        (blocks, 1),
        (blocks - 1, 2),
        (blocks - 7, 8),
        (blocks + 1, 1),
        (2 * blocks, 1),
        (blocks << 1 | 1, 8),
        (u64::MAX, 1),
        (u64::MAX, 2),
        (u64::MAX - 6, 8),
        (u64::MAX - 7, 8),
        (1 << 63, 1),
        // The byte address would wrap to an address in the lease.
        (1 << 55, 1),
        (1 << 52, 8),
    ]
}

struct Scene {
    machine: Machine,
    disk: Disk,
    controller: Controller,
    bystanders: [Bystander; 2],
}

fn scene(host: &Host, setup: &Setup) -> Scene {
    let bystanders = [0, 2].map(|index| Bystander::start(host, &Setup::nth(index)));
    let machine = host.machine(setup);
    let (controller, disk) = machine.disk();
    Scene {
        machine,
        disk,
        controller,
        bystanders,
    }
}

impl Scene {
    #[track_caller]
    fn finish(mut self) {
        self.disk.flush().unwrap();
        self.bystanders.into_iter().for_each(Bystander::finish);
    }

    /// Executes a command with `bytes` as its data, in separate pages.
    #[track_caller]
    fn execute_with_bytes(&mut self, sqe: Sqe, bytes: &[u8]) -> StatusCode {
        let data = self.machine.memory.alloc(bytes.len()).unwrap();
        data.write(0, bytes);
        let prepared = prp::buffer(&data, 0, bytes.len()).unwrap();
        status(&mut self.disk.queue, sqe.with_data(prepared.pointer))
    }
}

/// Runs a test on a drive of each kind and logical block size.
fn on_each_drive(test: impl Fn(Scene)) {
    for lba_size in [512, 4096] {
        test(scene(&Host::new("memory:48M", lba_size), &Setup::nth(1)));
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(3 * LEASE).unwrap();
        let host = Host::of_file(file.path(), lba_size);
        test(scene(&host, &Setup::nth(1)));
        // A lease of several extents, with other leases between them.
        let host = Host::new("memory:80M", lba_size);
        let between = (16..80).step_by(2).map(|at| (at * UNIT, UNIT));
        let others =
            host.lease_ranges(between.filter(|(at, _)| !(32 * UNIT..48 * UNIT).contains(at)));
        test(scene(&host, &Setup::default().with_allocation_unit(UNIT)));
        drop(others);
    }
}

#[test]
fn blocks_beyond_the_lease() {
    on_each_drive(|mut scene| {
        let sentinel = Sentinel::new(&scene.machine.memory, 16 * PAGE_SIZE);
        let blocks = scene.disk.blocks();
        assert_eq!(blocks, LEASE / scene.disk.block_size() as u64);
        for (slba, count) in ranges_beyond(blocks) {
            for opcode in RANGED {
                let sqe = match opcode {
                    // The command has one source range with this number of blocks. Its data is not at the sentinel.
                    io::COPY => {
                        let bytes = copy_range(0, count);
                        let code = scene.execute_with_bytes(Sqe::copy(1, slba, 1), &bytes);
                        assert_eq!(code, LBA_OUT_OF_RANGE, "copy to {slba:#x}+{count}");
                        continue;
                    }
                    opcode => Sqe::range(opcode, 1, slba, count),
                };
                let pointer = prp::list(
                    &scene.machine.memory,
                    sentinel.gpa(),
                    &(1..8)
                        .map(|i| sentinel.gpa() + 4096 * i)
                        .collect::<Vec<_>>(),
                    0,
                )
                .unwrap();
                for flags in [0, FUA, DEAC] {
                    let cdw12 = sqe.cdw(12) | flags;
                    let sqe = sqe.with_cdw(12, cdw12).with_data(pointer.pointer);
                    let code = status(&mut scene.disk.queue, sqe);
                    assert_eq!(code, LBA_OUT_OF_RANGE, "{opcode:#x} {slba:#x}+{count}");
                }
            }
        }
        sentinel.check();
        // The last block is valid.
        let last = vec![7; scene.disk.block_size()];
        scene.disk.write(blocks - 1, &last).unwrap();
        assert_eq!(scene.disk.read(blocks - 1, 1).unwrap(), last);
        scene.finish();
    });
}

#[test]
fn transfers_beyond_mdts() {
    on_each_drive(|mut scene| {
        let mdts = scene.controller.identity().unwrap().max_transfer();
        let most = (mdts / scene.disk.block_size()) as u32;
        assert_eq!(mdts, 1 << 20);
        // The largest transfer works, and every byte is correct.
        let mut rng = Rng::new(1);
        let bytes: Vec<u8> = (0..mdts).map(|_| rng.next_u64() as u8).collect();
        scene.disk.write(3, &bytes).unwrap();
        scene.disk.transfer = Transfer::Prp { offset: 3584 };
        assert_eq!(scene.disk.read(3, most).unwrap(), bytes);
        let sentinel = Sentinel::new(&scene.machine.memory, PAGE_SIZE);
        for count in [most + 1, most + 8, 0x1_0000] {
            for opcode in RANGED {
                if opcode == io::COPY || u64::from(count) > scene.disk.blocks() {
                    continue;
                }
                let pointer = DataPointer::prp(sentinel.gpa(), sentinel.gpa());
                let sqe = Sqe::range(opcode, 1, 0, count).with_data(pointer);
                // Drivers from before version 2.0 know no limit for commands without data.
                let wanted = match opcode {
                    io::VERIFY | io::WRITE_ZEROES | io::WRITE_UNCORRECTABLE => SUCCESS,
                    _ => INVALID_FIELD,
                };
                let code = status(&mut scene.disk.queue, sqe);
                assert_eq!(code, wanted, "{opcode:#x} of {count}");
                if opcode == io::WRITE_UNCORRECTABLE {
                    // Write Zeroes clears the marks.
                    let sqe = Sqe::range(io::WRITE_ZEROES, 1, 0, count);
                    assert_eq!(status(&mut scene.disk.queue, sqe), SUCCESS);
                }
            }
        }
        sentinel.check();
        scene.finish();
    });
}

#[test]
fn deallocation_beyond_the_lease() {
    on_each_drive(|mut scene| {
        let blocks = scene.disk.blocks();
        for (slba, count) in ranges_beyond(blocks) {
            // The invalid range is alone, or follows valid ranges.
            for before in [0, 1, 255] {
                let mut bytes = dsm_range(blocks / 2, 1).repeat(before);
                bytes.extend(dsm_range(slba, count));
                let sqe = Sqe::deallocate(1, before as u32 + 1);
                let code = scene.execute_with_bytes(sqe, &bytes);
                assert_eq!(code, LBA_OUT_OF_RANGE, "{slba:#x}+{count} behind {before}");
                // The attributes are hints too, but their blocks must be valid.
                let code = scene.execute_with_bytes(sqe.with_cdw(11, 0), &bytes);
                assert_eq!(code, LBA_OUT_OF_RANGE);
            }
        }
        for (slba, count) in [(1, u32::MAX), (blocks - 1, u32::MAX), (u64::MAX, u32::MAX)] {
            let code = scene.execute_with_bytes(Sqe::deallocate(1, 1), &dsm_range(slba, count));
            assert_eq!(code, LBA_OUT_OF_RANGE, "{slba:#x}+{count:#x}");
        }
        scene
            .disk
            .deallocate(&[(0, 8), (blocks - 1, 1), (5, 0)])
            .unwrap();
        scene.finish();
    });
}

/// Time limit of a Deallocate, after which the rest of the blocks may stay unchanged. Deallocate is advisory, and the driver
/// waits for its completion.
const DEALLOCATE: Duration = Duration::from_secs(10);

/// Checks the blocks after a Deallocate that took this time.
#[track_caller]
fn check_deallocated(firsts: &[u8], took: Duration) {
    let reached = firsts.iter().take_while(|&&byte| byte == 0).count();
    assert!(
        firsts[reached..].iter().all(|&byte| byte == 0x5a),
        "{firsts:?}"
    );
    assert!(
        reached == firsts.len() || took >= DEALLOCATE,
        "{firsts:?} after {took:.1?}"
    );
    if reached < firsts.len() {
        println!(
            "The disk took {took:.1?} for {reached} of {} MiB.",
            firsts.len()
        );
    }
}

/// Large Write Zeroes as Linux up to 5.12 and Windows send them: these drivers date from before version 2.0.
#[test]
fn commands_of_drivers_that_know_no_limits() {
    nvme_software::survey_files(&ThreadSpawner::default()).unwrap();
    on_each_drive(|mut scene| {
        let blocks = scene.disk.blocks();
        let block = scene.disk.block_size();
        let whole = u32::try_from(blocks).unwrap();
        let fill = |disk: &mut Disk| {
            for first in (0..blocks).step_by((1 << 20) / block) {
                disk.write(first, &vec![0x5a; 1 << 20]).unwrap();
            }
        };
        let first_of_each = |disk: &mut Disk| -> Vec<u8> {
            let firsts = (0..blocks).step_by((1 << 20) / block);
            let bytes = firsts.map(|first| disk.read(first, 1).unwrap());
            bytes.map(|bytes| bytes[0]).collect()
        };
        fill(&mut scene.disk);
        // All blocks in one range; all but the first block in the maximum number of ranges; and no blocks.
        let begun = Instant::now();
        let code = scene.execute_with_bytes(Sqe::deallocate(1, 1), &dsm_range(0, whole));
        assert_eq!(code, SUCCESS);
        check_deallocated(&first_of_each(&mut scene.disk), begun.elapsed());
        fill(&mut scene.disk);
        let each = whole / 256;
        let ranges = (1..256).flat_map(|at| dsm_range(u64::from(at * each), each));
        let ranges: Vec<u8> = ranges.chain(dsm_range(0, 0)).collect();
        let begun = Instant::now();
        assert_eq!(
            scene.execute_with_bytes(Sqe::deallocate(1, 256), &ranges),
            SUCCESS
        );
        let took = begun.elapsed();
        let firsts = first_of_each(&mut scene.disk);
        assert_eq!(firsts[0], 0x5a);
        check_deallocated(&firsts[1..], took);
        // The largest number of blocks that NLB can express.
        fill(&mut scene.disk);
        let count = whole.min(0x1_0000);
        let pointer = DataPointer::prp(0, 0);
        for (opcode, flags, wanted) in [
            (io::VERIFY, 0, [0x5a; 16]),
            (io::WRITE_ZEROES, 0, [0; 16]),
            (io::WRITE_ZEROES, DEAC, [0; 16]),
        ] {
            let sqe = Sqe::range(opcode, 1, 0, count).with_data(pointer);
            let sqe = sqe.with_cdw(12, sqe.cdw(12) | flags);
            assert_eq!(status(&mut scene.disk.queue, sqe), SUCCESS, "{opcode:#x}");
            assert_eq!(first_of_each(&mut scene.disk), wanted, "{opcode:#x}");
            fill(&mut scene.disk);
            // If the blocks are deallocated already, the command ends at once. A command that exceeds the lease has no effect
            // at all.
            let code = status(&mut scene.disk.queue, sqe.with_cdw(10, whole - count + 1));
            assert_eq!(code, LBA_OUT_OF_RANGE, "{opcode:#x}");
            assert_eq!(first_of_each(&mut scene.disk), [0x5a; 16], "{opcode:#x}");
        }
        scene.finish();
    });
}

#[test]
fn a_file_gets_its_room_back_from_a_driver_that_knows_no_limit() {
    nvme_software::survey_files(&ThreadSpawner::default()).unwrap();
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(2 * LEASE).unwrap();
    let host = Host::of_file(file.path(), 512);
    let machine = host.machine(&Setup::nth(1));
    let (controller, mut disk) = machine.disk();
    if disk.namespace().raw[33] & 0b111 != 1 {
        println!("The file system has no holes.");
        return;
    }
    let allocated_bytes = || file.as_file().metadata().unwrap().blocks() * 512;
    let fill = |disk: &mut Disk| {
        for first in (0..disk.blocks()).step_by(2048) {
            disk.write(first, &vec![0x5a; 1 << 20]).unwrap();
        }
        disk.flush().unwrap();
        assert!(allocated_bytes() >= LEASE, "{}", allocated_bytes());
    };
    let whole = u32::try_from(disk.blocks()).unwrap();
    let deallocate = |disk: &mut Disk, ranges: &[(u64, u32)]| {
        let begun = Instant::now();
        disk.deallocate(ranges).unwrap();
        let took = begun.elapsed();
        assert!(
            allocated_bytes() < LEASE / 16 || took >= DEALLOCATE,
            "{} are left after {took:.1?}",
            allocated_bytes()
        );
    };
    fill(&mut disk);
    deallocate(&mut disk, &[(0, whole)]);
    fill(&mut disk);
    let each = whole / 256;
    let ranges: Vec<_> = (0..256).map(|at| (u64::from(at * each), each)).collect();
    deallocate(&mut disk, &ranges);
    drop(controller);
}

#[test]
fn copies_from_beyond_the_lease() {
    on_each_drive(|mut scene| {
        let blocks = scene.disk.blocks();
        for (slba, count) in ranges_beyond(blocks) {
            for before in [0, 1, 31] {
                let mut bytes = copy_range(0, 1).repeat(before);
                bytes.extend(copy_range(slba, count));
                let sqe = Sqe::copy(1, blocks / 2, before as u32 + 1);
                let code = scene.execute_with_bytes(sqe, &bytes);
                assert_eq!(code, LBA_OUT_OF_RANGE, "{slba:#x}+{count} behind {before}");
            }
        }
        // A destination with space for all ranges except for the last.
        let bytes = copy_range(0, 8).repeat(4);
        let code = scene.execute_with_bytes(Sqe::copy(1, blocks - 31, 4), &bytes);
        assert_eq!(code, LBA_OUT_OF_RANGE);
        let code = scene.execute_with_bytes(Sqe::copy(1, blocks - 32, 4), &bytes);
        assert_eq!(code, SUCCESS);
        scene.finish();
    });
}

#[test]
fn copies_beyond_their_limits() {
    on_each_drive(|mut scene| {
        let namespace = scene.disk.namespace();
        let (mssrl, mcl) = (u32::from(namespace.mssrl), namespace.mcl);
        let most = u32::from(namespace.max_copy_ranges);
        assert_eq!(most, 128);
        let blocks = scene.disk.blocks();
        let ranges = |count: u32, each: u32| copy_range(0, each).repeat(count as usize);
        for (count, each, want) in [
            (1, mssrl, SUCCESS),
            (1, mssrl + 1, SIZE_LIMIT_EXCEEDED),
            (1, 0x1_0000, SIZE_LIMIT_EXCEEDED),
            (2, mcl / 2, SUCCESS),
            (2, mcl / 2 + 1, SIZE_LIMIT_EXCEEDED),
            (most, 1, SUCCESS),
            (most + 1, 1, SIZE_LIMIT_EXCEEDED),
            (256, 1, SIZE_LIMIT_EXCEEDED),
        ] {
            let sqe = Sqe::copy(1, blocks / 2, count);
            let code = scene.execute_with_bytes(sqe, &ranges(count, each));
            assert_eq!(code, want, "{count} ranges of {each}");
        }
        // Descriptor formats that are not supported.
        for format in 1..16_u32 {
            let sqe = Sqe::copy(1, 64, 1).with_cdw(12, format << 8);
            let code = scene.execute_with_bytes(sqe, &ranges(1, 1));
            assert_eq!(code, INVALID_FIELD, "format {format}");
        }
        scene.finish();
    });
}

/// Executes a command repeatedly while another thread changes its ranges: these `words` of the data alternate between `good`
/// and `bad` values.
fn race_with_changes(
    scene: &mut Scene,
    rounds: u32,
    sqe: Sqe,
    bytes: &[u8],
    words: &[usize],
    bad: &[u64],
) {
    let memory = scene.machine.memory.clone();
    let data = memory.alloc(bytes.len()).unwrap();
    data.write(0, bytes);
    let cells = data.cells::<AtomicU64>();
    let good: Vec<u64> = words
        .iter()
        .map(|&word| cells[word].load(Ordering::Relaxed))
        .collect();
    let pointer = prp::buffer(&data, 0, bytes.len()).unwrap().pointer;
    let mut rng = Rng::new(5);
    let change = || {
        let at = rng.below(words.len() as u64) as usize;
        let value = bad[rng.below(bad.len() as u64) as usize];
        cells[words[at]].store(value, Ordering::Relaxed);
        cells[words[at]].store(good[at], Ordering::Relaxed);
        if rng.below(256) == 0 {
            std::thread::sleep(std::time::Duration::from_micros(20));
        }
    };
    ChangeThread::during(change, |changes| {
        let mut command = || status(&mut scene.disk.queue, sqe.with_data(pointer));
        for round in 0..rounds {
            let code = command();
            assert!([SUCCESS, LBA_OUT_OF_RANGE].contains(&code), "{code}");
            if round % 50 == 0 {
                assert_eq!(changes.while_paused(&mut command), SUCCESS);
            }
        }
    });
}

#[test]
fn deallocation_ranges_that_change_while_they_are_used() {
    on_each_drive(|mut scene| {
        let blocks = scene.disk.blocks();
        let bytes = dsm_range(blocks / 2, 8).repeat(16);
        // SLBA is the second word of a range. It changes to blocks of the neighbours.
        let words: Vec<usize> = (0..16).map(|range| 2 * range + 1).collect();
        let bad = [blocks, blocks + 64, blocks.wrapping_neg(), u64::MAX - 4];
        let sqe = Sqe::deallocate(1, 16).with_cdw(11, DSM_DEALLOCATE);
        // Each command takes a step of the file for each range, about 0.1 s on a slow file system.
        race_with_changes(&mut scene, 200, sqe, &bytes, &words, &bad);
        scene.finish();
    });
}

#[test]
fn copy_ranges_that_change_while_they_are_used() {
    on_each_drive(|mut scene| {
        let blocks = scene.disk.blocks();
        // The lease's blocks have a pattern, so that a neighbour's blocks would be noticed.
        let block = vec![0x3c; scene.disk.block_size()];
        for slba in (0..8).chain(64..128) {
            scene.disk.write(slba, &block).unwrap();
        }
        let bytes = copy_range(0, 4).repeat(16);
        let words: Vec<usize> = (0..16).map(|range| 4 * range + 1).collect();
        let bad = [blocks, blocks + 64, blocks.wrapping_neg(), u64::MAX - 1];
        race_with_changes(&mut scene, 1000, Sqe::copy(1, 64, 16), &bytes, &words, &bad);
        for slba in 64..128 {
            assert_eq!(scene.disk.read(slba, 1).unwrap(), block, "block {slba}");
        }
        scene.finish();
    });
}

#[test]
fn range_lists_outside_memory() {
    on_each_drive(|mut scene| {
        for sqe in [Sqe::deallocate(1, 256), Sqe::copy(1, 0, 128)] {
            for gpa in [0, UNMAPPED_ADDRESS, !0xfff] {
                let sqe = sqe.with_data(DataPointer::prp(gpa, 0));
                let code = status(&mut scene.disk.queue, sqe);
                assert_eq!(code, nvme_mpt_tests::status::DATA_TRANSFER_ERROR);
            }
        }
        scene.finish();
    });
}
