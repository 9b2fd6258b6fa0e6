//! Guest memory that is plugged block by block, as virtio-mem does. The guest sees contiguous memory, while the VMM maps and
//! unmaps each block separately.

use std::sync::atomic::{AtomicBool, Ordering};

use nvme_guest::dma::MAX_REGIONS;
use nvme_guest::{DmaError, Gpa, MemoryRegion};
use nvme_mpt_tests::command::{DataPointer, Sqe, io};
use nvme_mpt_tests::doorbell::Side;
use nvme_mpt_tests::memory::{DmaBuffer, PAGE_SIZE, Region};
use nvme_mpt_tests::rng::{self, Rng};
use nvme_mpt_tests::sgl::{data_block, last_segment};
use nvme_mpt_tests::status::{DATA_TRANSFER_ERROR, INVALID_SGL_COUNT, SUCCESS};
use nvme_mpt_tests::{prp, queue::QueuePair};

use crate::common::bystander::Bystander;
use crate::common::{
    HIGH, Host, LEASE, Machine, Setup, UNMAPPED_ADDRESS, queue_pair, status, written_file,
};
use crate::memory::queue_pair_at;

const BLOCK: u64 = 64 << 10;
const BLOCKS: u64 = 32;
/// Address of the plugged memory, with a gap behind the initial memory.
const PLUGGED: u64 = HIGH + (1 << 30);
const PAGE: u64 = PAGE_SIZE as u64;
const MDTS: usize = 1 << 20;

/// Creates a file for two leases.
fn file() -> tempfile::NamedTempFile {
    let file = written_file(LEASE);
    file.as_file().set_len(2 * LEASE).unwrap();
    file
}

/// Adds the region to the guest's memory. The function does not have it mapped yet.
fn add_unplugged_region(machine: &Machine) -> Region {
    machine.memory.add_region(PLUGGED, BLOCKS * BLOCK).unwrap()
}

/// Returns a part of a region in the form that a VMM maps.
fn part(machine: &Machine, region: &Region, offset: u64, len: u64) -> MemoryRegion {
    MemoryRegion {
        gpa: Gpa(region.gpa + offset),
        len,
        fd: machine.memory.fd().try_clone_to_owned().unwrap(),
        offset: region.fd_offset + offset,
        readable: true,
        writable: true,
    }
}

fn plug(machine: &Machine, region: &Region, block: u64) {
    let memory = part(machine, region, block * BLOCK, BLOCK);
    machine.function().backend().map(memory).unwrap();
}

fn unplug(machine: &Machine, region: &Region, block: u64) {
    let gpa = Gpa(region.gpa + block * BLOCK);
    let unmapped = machine.function().backend().unmap(gpa, BLOCK);
    assert_eq!(unmapped.unwrap(), BLOCK);
}

/// Returns orders of plugging: ascending (the blocks merge into few runs), descending (each block is a run), and random.
fn orders() -> [Vec<u64>; 3] {
    let upwards: Vec<u64> = (0..BLOCKS).collect();
    let downwards = upwards.iter().rev().copied().collect();
    let mut rng = Rng::new(7);
    let mut any = upwards.clone();
    for i in (1..any.len()).rev() {
        any.swap(i, rng.below(i as u64 + 1) as usize);
    }
    [upwards, downwards, any]
}

/// Writes the contents of one buffer to the drive, and reads them into another buffer.
#[track_caller]
fn round_trip(
    queue: &mut QueuePair,
    from: (DataPointer, &DmaBuffer),
    to: (DataPointer, &DmaBuffer),
) {
    let blocks = (MDTS / 512) as u32;
    let mut bytes = vec![0; MDTS];
    rng::fill_blocks(&mut bytes, from.1.gpa(), 0, 512);
    from.1.write(0, &bytes);
    to.1.fill(0);
    let write = Sqe::write(1, 0, blocks).with_data(from.0);
    assert_eq!(status(queue, write), SUCCESS);
    let read = Sqe::read(1, 0, blocks).with_data(to.0);
    assert_eq!(status(queue, read), SUCCESS);
    assert!(to.1.to_vec(0, MDTS) == bytes, "other data");
}

#[test]
fn data_goes_on_from_block_to_block() {
    let file = file();
    for host in [
        Host::new("memory:32M", 512),
        Host::of_file(file.path(), 512),
    ] {
        let bystander = Bystander::start(&host, &Setup::nth(1));
        for order in orders() {
            let machine = host.machine(&Setup::nth(0));
            let region = add_unplugged_region(&machine);
            for block in order {
                plug(&machine, &region, block);
            }
            let mut controller = machine.attach();
            let mut queue = queue_pair(&mut controller, 1, 64);
            let [a, b] = [0, 1].map(|half| {
                let gpa = PLUGGED + half * BLOCKS / 2 * BLOCK;
                machine.memory.alloc_at(gpa, MDTS).unwrap()
            });
            let list = |buffer| prp::buffer(buffer, 0, MDTS).unwrap();
            let (list_a, list_b) = (list(&a), list(&b));
            // One data block descriptor for the whole buffer.
            let sgl = |buffer: &DmaBuffer| DataPointer::sgl(data_block(buffer.gpa(), MDTS as u32));
            round_trip(&mut queue, (list_a.pointer, &a), (list_b.pointer, &b));
            round_trip(&mut queue, (sgl(&b), &b), (sgl(&a), &a));
            round_trip(&mut queue, (list_a.pointer, &a), (sgl(&b), &b));
            // If one block is missing, no data is written.
            unplug(&machine, &region, BLOCKS / 2 + 3);
            b.fill(0x5a);
            for pointer in [list_b.pointer, sgl(&b)] {
                let read = Sqe::read(1, 0, (MDTS / 512) as u32).with_data(pointer);
                assert_eq!(status(&mut queue, read), DATA_TRANSFER_ERROR);
            }
            assert!(b.to_vec(0, MDTS).iter().all(|&byte| byte == 0x5a));
            plug(&machine, &region, BLOCKS / 2 + 3);
            round_trip(&mut queue, (sgl(&a), &a), (sgl(&b), &b));
        }
        bystander.finish();
    }
}

#[test]
fn descriptors_that_cross_too_many_blocks_are_refused() {
    let host = Host::new("memory:32M", 512);
    let bystander = Bystander::start(&host, &Setup::nth(1));
    let machine = host.machine(&Setup::nth(0));
    let region = add_unplugged_region(&machine);
    // Single pages in descending order, which never merge into runs.
    for page in (0..BLOCKS * BLOCK / PAGE).rev() {
        let memory = part(&machine, &region, page * PAGE, PAGE);
        machine.function().backend().map(memory).unwrap();
    }
    let mut controller = machine.attach();
    let mut queue = queue_pair(&mut controller, 1, 64);
    let read = |descriptors: u64, len: u32, first: u64| {
        let list: Vec<u8> = (0..descriptors)
            .flat_map(|i| data_block(PLUGGED + first + i * u64::from(len), len))
            .flat_map(u64::to_le_bytes)
            .collect();
        let memory = machine.memory.alloc(list.len()).unwrap();
        memory.write(0, &list);
        let pointer = DataPointer::sgl(last_segment(memory.gpa(), list.len() as u32));
        let blocks = descriptors as u32 * len / 512;
        (
            Sqe::range(io::READ, 1, 0, blocks).with_data(pointer),
            memory,
        )
    };
    // A command may have at most 512 descriptors. Every second data block here spans two pages.
    let (sqe, _memory) = read(512, 2048, 3072);
    assert_eq!(status(&mut queue, sqe), INVALID_SGL_COUNT);
    let (sqe, _memory) = read(512, 2048, 0);
    assert_eq!(status(&mut queue, sqe), SUCCESS);
    let (sqe, _memory) = read(256, 4096, 3072);
    assert_eq!(status(&mut queue, sqe), SUCCESS);
    bystander.finish();
}

#[test]
fn blocks_come_and_go_under_io_to_others() {
    let file = file();
    let host = Host::of_file(file.path(), 512);
    let bystander = Bystander::start(&host, &Setup::nth(1));
    let machine = host.machine(&Setup::nth(0));
    let region = add_unplugged_region(&machine);
    (0..BLOCKS).for_each(|block| plug(&machine, &region, block));
    let mut controller = machine.attach();
    let mut queue = queue_pair(&mut controller, 1, 64);
    // The middle half stays mapped while the rest is unmapped and mapped.
    let stays = BLOCKS / 4..BLOCKS * 3 / 4;
    let buffer = machine
        .memory
        .alloc_at(PLUGGED + stays.start * BLOCK, MDTS)
        .unwrap();
    let sgl = DataPointer::sgl(data_block(buffer.gpa(), MDTS as u32));
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..100 {
                let list = prp::buffer(&buffer, 0, MDTS).unwrap();
                let mut bytes = vec![0; MDTS];
                rng::fill_blocks(&mut bytes, 9, 0, 512);
                buffer.write(0, &bytes);
                let blocks = (MDTS / 512) as u32;
                let write = Sqe::write(1, 0, blocks).with_data(list.pointer);
                assert_eq!(status(&mut queue, write), SUCCESS);
                buffer.fill(0);
                let read = Sqe::read(1, 0, blocks).with_data(sgl);
                assert_eq!(status(&mut queue, read), SUCCESS);
                assert!(buffer.to_vec(0, MDTS) == bytes, "other data");
            }
            stop.store(true, Ordering::Relaxed);
        });
        let mut rng = Rng::new(3);
        let mut plugged = vec![true; BLOCKS as usize];
        while !stop.load(Ordering::Relaxed) {
            let block = rng.below(BLOCKS);
            if stays.contains(&block) {
                continue;
            }
            let is_plugged = &mut plugged[block as usize];
            if *is_plugged {
                unplug(&machine, &region, block);
            } else {
                plug(&machine, &region, block);
            }
            *is_plugged = !*is_plugged;
        }
    });
    bystander.finish();
}

#[test]
fn queues_may_lie_in_several_blocks() {
    let host = Host::new("memory:32M", 512);
    let bystander = Bystander::start(&host, &Setup::nth(1));
    for order in orders() {
        let machine = host.machine(&Setup::nth(0));
        let region = add_unplugged_region(&machine);
        for block in order {
            plug(&machine, &region, block);
        }
        let mut controller = machine.attach();
        // The queue has 64 KiB, and its second half is in the next block.
        let sq = PLUGGED + 9 * BLOCK + BLOCK / 2;
        let sq = machine.memory.alloc_at(sq, 64 << 10).unwrap();
        let cq = machine.memory.alloc(16 << 10).unwrap();
        let mut queue = queue_pair_at(&mut controller, (sq, cq), 1024);
        for _ in 0..3000 {
            assert_eq!(status(&mut queue, Sqe::flush(1)), SUCCESS);
        }
        // If any block of a queue is unmapped, the controller fails.
        unplug(&machine, &region, 10);
        machine.write_raw_doorbell(&controller, 1, Side::SqTail, 0);
        machine.wait_fatal(&controller);
    }
    bystander.finish();
}

#[test]
fn a_client_that_maps_page_by_page_is_stopped() {
    let host = Host::new("memory:32M", 512);
    let bystander = Bystander::start(&host, &Setup::nth(1));
    let machine = host.machine(&Setup::nth(0));
    let count = (MAX_REGIONS - machine.memory.regions().len()) as u64;
    let len = count * PAGE;
    let region = machine.memory.add_region(PLUGGED, len).unwrap();
    let map = |memory| machine.function().backend().map(memory);
    for page in 0..count {
        map(part(&machine, &region, page * PAGE, PAGE)).unwrap();
    }
    let more = MemoryRegion {
        gpa: Gpa(UNMAPPED_ADDRESS),
        ..part(&machine, &region, 0, PAGE)
    };
    let refused = map(more);
    assert!(
        matches!(refused, Err(DmaError::TooManyRegions)),
        "{refused:?}"
    );
    // The guest can use the mapped memory to the last page.
    let mut controller = machine.attach();
    let mut queue = queue_pair(&mut controller, 1, 64);
    let end = PLUGGED + len;
    let [a, b] = [2, 1].map(|n| {
        let gpa = end - n * MDTS as u64;
        machine.memory.alloc_at(gpa, MDTS).unwrap()
    });
    let list = |buffer| prp::buffer(buffer, 0, MDTS).unwrap();
    let (list_a, list_b) = (list(&a), list(&b));
    round_trip(&mut queue, (list_a.pointer, &a), (list_b.pointer, &b));
    bystander.wait_for_progress();
    let unmapped = machine.function().backend().unmap(Gpa(PLUGGED), len);
    assert_eq!(unmapped.unwrap(), len);
    assert_eq!(status(&mut queue, Sqe::flush(1)), SUCCESS);
    bystander.finish();
}
