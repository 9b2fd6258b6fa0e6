//! Guest memory that disappears during I/O: the VMM unmaps it, or its creator truncates it.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nvme_guest::{Gpa, MemoryRegion};
use nvme_mpt_memory::file_system::is_memory_file;
use nvme_mpt_tests::command::{DataPointer, Sqe, io};
use nvme_mpt_tests::controller::{Controller, QueueOptions};
use nvme_mpt_tests::doorbell::{Doorbell, DoorbellMode, Side};
use nvme_mpt_tests::huge_pages::{HUGE_PAGE, HugePages};
use nvme_mpt_tests::memory::{DmaBuffer, Region};
use nvme_mpt_tests::not_checked::not_checked;
use nvme_mpt_tests::queue::{CompletionQueue, QueuePair, SubmissionQueue};
use nvme_mpt_tests::registers::CSTS_FATAL;
use nvme_mpt_tests::rng;
use nvme_mpt_tests::status::{DATA_TRANSFER_ERROR, SUCCESS};

use crate::common::bystander::Bystander;
use crate::common::sentinel::Sentinel;
use crate::common::{
    HANG, HIGH, Host, LEASE, MODES, Machine, REGION, Setup, UNMAP_TIME, UNMAPPED_ADDRESS, disk,
    queue_pair, status, wait_for, written_file,
};

const PIECE: usize = 64 << 10;
const BLOCKS: u32 = (PIECE / 512) as u32;

/// Returns the region above 4 GiB, which has no queues by default.
fn high(machine: &Machine) -> Region {
    let regions = machine.memory.regions();
    regions.into_iter().find(|r| r.gpa == HIGH).unwrap()
}

/// Runs a test on a drive in memory and on a drive in a file. The latter keeps commands in flight for longer.
fn on_each_drive(test: impl Fn(&Host)) {
    test(&Host::new("memory:32M", 512));
    let file = written_file(LEASE);
    file.as_file().set_len(2 * LEASE).unwrap();
    test(&Host::of_file(file.path(), 512));
}

#[test]
fn data_unmapped_under_io() {
    on_each_drive(|host| {
        let bystander = Bystander::start(host, &Setup::nth(1));
        for mode in MODES {
            let machine = host.machine(&Setup::nth(0).doorbells(mode));
            let mut controller = machine.attach();
            let mut queue = queue_pair(&mut controller, 1, 64);
            let region = high(&machine);
            let prp2 = Sentinel::new(&machine.memory, 4096);
            for round in 0..10 {
                let buffers: Vec<DmaBuffer> = (0..32)
                    .map(|i| {
                        machine
                            .memory
                            .alloc_at(HIGH + i * PIECE as u64, PIECE)
                            .unwrap()
                    })
                    .collect();
                let gone = AtomicBool::new(false);
                std::thread::scope(|scope| {
                    let guest = scope.spawn(|| read_into(&mut queue, &buffers, &gone));
                    std::thread::sleep(std::time::Duration::from_millis(round));
                    machine.unmap(&region);
                    // The device has stopped its accesses. From here on, the pages must not change.
                    for buffer in &buffers {
                        buffer.fill(0x5a);
                    }
                    gone.store(true, Ordering::Release);
                    guest.join().unwrap();
                });
                for opcode in [
                    io::READ,
                    io::WRITE,
                    io::COMPARE,
                    io::DATASET_MANAGEMENT,
                    io::COPY,
                ] {
                    let pointer = DataPointer::prp(buffers[0].gpa(), prp2.gpa());
                    let sqe = Sqe::range(opcode, 1, 0, 8).with_data(pointer);
                    let sqe = if opcode >= io::DATASET_MANAGEMENT {
                        sqe.with_cdw(12, 0)
                    } else {
                        sqe
                    };
                    assert_eq!(status(&mut queue, sqe), DATA_TRANSFER_ERROR, "{opcode:#x}");
                }
                for buffer in &buffers {
                    assert!(
                        buffer.to_vec(0, PIECE).iter().all(|&b| b == 0x5a),
                        "{mode:?}"
                    );
                }
                machine.map(&region);
                drop(buffers);
            }
            assert_eq!(status(&mut queue, Sqe::flush(1)), SUCCESS);
            prp2.check();
        }
        bystander.finish();
    });
}

/// Keeps reads of all buffers in flight until a read fails after the memory was unmapped.
fn read_into(queue: &mut QueuePair, buffers: &[DmaBuffer], gone: &AtomicBool) {
    let prepared: Vec<_> = buffers
        .iter()
        .map(|buffer| nvme_mpt_tests::prp::buffer(buffer, 0, PIECE).unwrap())
        .collect();
    let mut ended = false;
    while !ended {
        let was_gone = gone.load(Ordering::Acquire);
        let cids: Vec<u16> = (0..)
            .zip(&prepared)
            .map(|(i, p)| {
                let sqe = Sqe::read(1, i * u64::from(BLOCKS), BLOCKS);
                queue.submit(sqe.with_data(p.pointer)).unwrap()
            })
            .collect();
        for cqe in queue.drain(&cids, HANG).unwrap() {
            match cqe.status().code() {
                SUCCESS => assert!(!was_gone, "a read into memory that is gone succeeded"),
                DATA_TRANSFER_ERROR => ended |= was_gone,
                other => panic!("{other}"),
            }
        }
    }
}

#[test]
fn a_region_can_be_replaced_under_io() {
    let host = Host::new("memory:32M", 512);
    let bystander = Bystander::start(&host, &Setup::nth(1));
    let machine = host.machine(&Setup::nth(0));
    let (_controller, mut disk) = machine.disk();
    let region = high(&machine);
    let mut bytes = vec![0; 8192];
    // I/O to other regions continues while this region is mapped and unmapped.
    let stop = &AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            for round in 0..200 {
                rng::fill_blocks(&mut bytes, round, 0, 512);
                disk.write(round, &bytes).unwrap();
                assert_eq!(disk.read(round, 16).unwrap(), bytes);
            }
            stop.store(true, Ordering::Relaxed);
        });
        while !stop.load(Ordering::Relaxed) {
            machine.unmap(&region);
            machine.map(&region);
        }
    });
    bystander.finish();
}

/// Creates a queue pair with rings at given locations.
pub(crate) fn queue_pair_at(
    controller: &mut Controller,
    (sq, cq): (DmaBuffer, DmaBuffer),
    entries: u32,
) -> QueuePair {
    controller
        .admin(Sqe::create_cq(1, cq.gpa(), entries, None))
        .unwrap();
    controller
        .admin(Sqe::create_sq(1, sq.gpa(), entries, 1))
        .unwrap();
    let bar = controller.bar();
    let mapped = !bar.doorbell_windows().is_empty();
    let doorbell = |offset| Doorbell::new(bar, offset, mapped).unwrap();
    let cap = controller.cap();
    let mut queue = QueuePair::new(
        SubmissionQueue::new(1, sq, entries, doorbell(cap.sq_doorbell(1))),
        CompletionQueue::new(1, cq, entries, doorbell(cap.cq_doorbell(1)), None),
    );
    if let Some(buffer) = controller.doorbell_buffer() {
        queue.attach(buffer);
    }
    queue
}

#[test]
fn a_ring_unmapped_under_io() {
    on_each_drive(|host| {
        let bystander = Bystander::start(host, &Setup::nth(1));
        for mode in MODES {
            for sq_goes in [true, false] {
                let machine = host.machine(&Setup::nth(0).doorbells(mode));
                let mut controller = machine.attach();
                let page = machine.memory.alloc(4096).unwrap();
                let going = machine.memory.alloc_at(HIGH, 4096).unwrap();
                let rings = if sq_goes {
                    (going, page)
                } else {
                    (page, going)
                };
                let mut queue = queue_pair_at(&mut controller, rings, 64);
                assert_eq!(status(&mut queue, Sqe::flush(1)), SUCCESS);
                for _ in 0..63 {
                    queue.submit(Sqe::verify(1, 0, 128)).unwrap();
                }
                queue.ring();
                machine.unmap(&high(&machine));
                let ring = if sq_goes {
                    queue.sq.memory()
                } else {
                    queue.cq.memory()
                };
                ring.fill(0x5a);
                machine.wait_fatal(&controller);
                // The device no longer writes to this memory, whatever the guest does.
                machine.write_raw_doorbell(&controller, 1, Side::SqTail, 3);
                bystander.wait_for_progress();
                assert!(ring.to_vec(0, 4096).iter().all(|&b| b == 0x5a), "{mode:?}");
                // The guest can continue after a controller reset.
                drop(queue);
                controller.reset().unwrap();
                let mut queue = queue_pair(&mut controller, 1, 64);
                assert_eq!(status(&mut queue, Sqe::flush(1)), SUCCESS);
            }
        }
        bystander.finish();
    });
}

/// Firmware changes the memory map while its queues exist. The VMM unmaps memory with queues, and maps it again at once.
#[test]
fn a_ring_that_comes_back_goes_on_under_io() {
    on_each_drive(|host| {
        let bystander = Bystander::start(host, &Setup::nth(1));
        for mode in MODES {
            for sq_goes in [true, false] {
                let machine = host.machine(&Setup::nth(0).doorbells(mode));
                let mut controller = machine.attach();
                let page = machine.memory.alloc(4096).unwrap();
                let going = machine.memory.alloc_at(HIGH, 4096).unwrap();
                let rings = if sq_goes {
                    (going, page)
                } else {
                    (page, going)
                };
                let mut queue = queue_pair_at(&mut controller, rings, 64);
                let region = high(&machine);
                for round in 0..20 {
                    let cids: Vec<u16> = (0..63)
                        .map(|_| queue.submit(Sqe::verify(1, 0, 128)).unwrap())
                        .collect();
                    queue.ring();
                    let gone = Instant::now();
                    machine.unmap(&region);
                    machine.map(&region);
                    if gone.elapsed() > UNMAP_TIME {
                        // The machine was paused for too long. The controller may fail in this case.
                        break;
                    }
                    // Each command completes exactly once.
                    let completions = queue.drain(&cids, HANG).unwrap();
                    assert_eq!(completions.len(), 63, "{mode:?} {round}");
                }
            }
        }
        bystander.finish();
    });
}

#[test]
fn a_doorbell_buffer_unmapped_under_io() {
    on_each_drive(|host| {
        let bystander = Bystander::start(host, &Setup::nth(1));
        let machine = host.machine(&Setup::nth(0));
        // The controller starts without a Doorbell Buffer. The test then places the buffer in memory that it can unmap.
        let mut controller = machine.attach();
        let [shadow, event_idx] =
            [0, 4096].map(|at| machine.memory.alloc_at(HIGH + at, 4096).unwrap());
        let pages = DataPointer::prp(shadow.gpa(), event_idx.gpa());
        let config = Sqe::new(nvme_mpt_tests::command::admin::DOORBELL_BUFFER_CONFIG, 0);
        controller.admin(config.with_data(pages)).unwrap();
        let cq = controller.create_cq(1, &QueueOptions::polled(16)).unwrap();
        let mut sq = controller.create_sq(1, 16, 1).unwrap();
        let stride = controller.cap().doorbell_stride() as usize;
        sq.push(&Sqe::flush(1));
        shadow.write(2 * stride, &1_u32.to_le_bytes());
        sq.doorbell_mut().ring(1);
        wait_for("a completion", || cq.has_entry());
        machine.unmap(&high(&machine));
        let sentinels = [shadow, event_idx].map(Sentinel::from_pages);
        machine.wait_fatal(&controller);
        // The poller goes to sleep and wakes up, and must not write EventIdx to the unmapped page.
        for _ in 0..20 {
            controller.write_doorbell(1, Side::SqTail, 2);
            bystander.wait_for_progress();
        }
        sentinels.iter().for_each(Sentinel::check);
        controller.reset().unwrap();
        let mut disk = disk(&mut controller, 1);
        disk.flush().unwrap();
        sentinels.iter().for_each(Sentinel::check);
        bystander.finish();
    });
}

#[test]
fn admin_queues_unmapped() {
    let host = Host::new("memory:32M", 512);
    let bystander = Bystander::start(&host, &Setup::nth(1));
    for mode in MODES {
        let machine = host.machine(&Setup::nth(0).doorbells(mode));
        let mut controller = machine.attach();
        for region in machine.memory.regions() {
            machine.unmap(&region);
        }
        machine.write_raw_doorbell(&controller, 0, Side::SqTail, 0);
        // The function's clock limits the wait, and the test advances this clock.
        wait_for("CSTS.CFS", || {
            host.clock.advance(Duration::from_millis(1));
            controller.status().unwrap() & CSTS_FATAL != 0
        });
        for region in machine.memory.regions() {
            machine.map(&region);
        }
        controller.reset().unwrap();
        assert_eq!(controller.active_namespaces(0).unwrap(), [1]);
    }
    bystander.finish();
}

/// Replaces a region by a file that this process does not map, so the test can truncate it without SIGBUS.
fn truncatable(machine: &Machine) -> File {
    region_of(machine, tempfile::tempfile_in("/dev/shm").unwrap())
}

/// Replaces a region by an existing file, like [`truncatable`].
fn region_of(machine: &Machine, file: File) -> File {
    file.set_len(REGION).unwrap();
    let region = MemoryRegion {
        gpa: Gpa(UNMAPPED_ADDRESS),
        len: REGION,
        fd: OwnedFd::from(file.try_clone().unwrap()),
        offset: 0,
        readable: true,
        writable: true,
    };
    machine.function().backend().map(region).unwrap();
    file
}

#[test]
fn data_truncated_under_io() {
    let host = Host::new("memory:32M", 512);
    check_truncated_data(&host, || tempfile::tempfile_in("/dev/shm").unwrap());
}

/// The device itself copies between guest memory and the file's pages.
#[test]
fn data_of_a_file_on_tmpfs_truncated_under_io() {
    let drive = tempfile::Builder::new().tempfile_in("/dev/shm").unwrap();
    drive.as_file().set_len(2 * LEASE).unwrap();
    let host = Host::of_file(drive.path(), 512);
    check_truncated_data(&host, || tempfile::tempfile_in("/dev/shm").unwrap());
}

#[test]
fn data_in_huge_pages_truncated_under_io() {
    match HugePages::reserve(REGION / HUGE_PAGE) {
        Some(pages) => {
            let host = Host::new("memory:32M", 512);
            check_truncated_data(&host, || pages.file().unwrap());
        }
        None => not_checked("no huge pages can be had here"),
    }
}

/// Truncates a guest's memory to one huge page during I/O to this memory.
fn check_truncated_data(host: &Host, memory: impl Fn() -> File) {
    let bystander = Bystander::start(host, &Setup::nth(1));
    for mode in MODES {
        let machine = host.machine(&Setup::nth(0).doorbells(mode));
        let file = region_of(&machine, memory());
        let mut controller = machine.attach();
        let mut queue = queue_pair(&mut controller, 1, 64);
        let pointer = DataPointer::prp(UNMAPPED_ADDRESS + (8 << 20), 0);
        for opcode in [io::WRITE, io::READ] {
            let sqe = Sqe::range(opcode, 1, 0, 8).with_data(pointer);
            assert_eq!(status(&mut queue, sqe), SUCCESS);
        }
        let sqe = Sqe::read(1, 0, 8).with_data(pointer);
        for _ in 0..63 {
            queue.submit(sqe).unwrap();
        }
        queue.ring();
        file.set_len(HUGE_PAGE).unwrap();
        // All submitted commands may have completed before the truncation, so submit one more.
        wait_for("room for one more", || {
            while queue.poll().is_some() {}
            queue.submit(sqe).is_ok()
        });
        queue.ring();
        machine.wait_fatal(&controller);
        bystander.wait_for_progress();
        // The truncated region stays unusable. Another region works.
        machine
            .function()
            .backend()
            .unmap(Gpa(UNMAPPED_ADDRESS), REGION)
            .unwrap();
        drop(queue);
        controller.reset().unwrap();
        let mut disk = disk(&mut controller, 1);
        disk.write(0, &[1; 4096]).unwrap();
        assert_eq!(disk.read(0, 8).unwrap(), [1; 4096]);
    }
    bystander.finish();
}

#[test]
fn data_of_a_file_drive_truncated_under_io() {
    let file = tempfile::NamedTempFile::new().unwrap();
    if is_memory_file(file.as_fd()) {
        not_checked("temporary files are in memory here");
        return;
    }
    file.as_file().set_len(2 * LEASE).unwrap();
    let host = Host::of_file(file.path(), 512);
    let bystander = Bystander::start(&host, &Setup::nth(1));
    let machine = host.machine(&Setup::nth(0));
    let memory = truncatable(&machine);
    let mut controller = machine.attach();
    let mut queue = queue_pair(&mut controller, 1, 64);
    let pointer = DataPointer::prp(UNMAPPED_ADDRESS + (8 << 20), 0);
    for opcode in [io::READ, io::WRITE] {
        let sqe = Sqe::range(opcode, 1, 0, 8).with_data(pointer);
        memory.set_len(REGION).unwrap();
        assert_eq!(status(&mut queue, sqe), SUCCESS);
        memory.set_len(4096).unwrap();
        // The kernel finds no memory: the command fails, and nothing else happens.
        assert_eq!(status(&mut queue, sqe), DATA_TRANSFER_ERROR, "{opcode:#x}");
    }
    bystander.finish();
}

#[test]
fn rings_truncated_under_io() {
    let host = Host::new("memory:32M", 512);
    let bystander = Bystander::start(&host, &Setup::nth(1));
    for mode in [DoorbellMode::Mapped, DoorbellMode::Trap] {
        for sq_goes in [true, false] {
            let machine = host.machine(&Setup::nth(0).doorbells(mode));
            let file = truncatable(&machine);
            let mut controller = machine.attach();
            let page = machine.memory.alloc(4096).unwrap();
            let (sq, cq) = match sq_goes {
                true => (UNMAPPED_ADDRESS + 4096, page.gpa()),
                false => (page.gpa(), UNMAPPED_ADDRESS + 4096),
            };
            controller.admin(Sqe::create_cq(1, cq, 64, None)).unwrap();
            controller.admin(Sqe::create_sq(1, sq, 64, 1)).unwrap();
            let flush: Vec<u8> = Sqe::flush(1)
                .0
                .iter()
                .flat_map(|w| w.to_le_bytes())
                .collect();
            match sq_goes {
                true => file.write_all_at(&flush, 4096).unwrap(),
                false => page.write(0, &flush),
            }
            machine.write_raw_doorbell(&controller, 1, Side::SqTail, 1);
            let completed = || {
                let mut entry = [0; 16];
                match sq_goes {
                    true => page.read(0, &mut entry),
                    false => file.read_exact_at(&mut entry, 4096).unwrap(),
                }
                entry[14] & 1 == 1
            };
            wait_for("a completion", completed);
            file.set_len(4096).unwrap();
            machine.write_raw_doorbell(&controller, 1, Side::SqTail, 2);
            machine.wait_fatal(&controller);
            bystander.wait_for_progress();
            controller.disable().unwrap();
        }
    }
    bystander.finish();
}
