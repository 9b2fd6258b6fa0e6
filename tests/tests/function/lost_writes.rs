//! Writes that completed, and that the file system below could not write back: no Flush may promise them.

use std::ops::Range;

use nvme_mpt_tests::admin::{LogPage, log};
use nvme_mpt_tests::command::{DataPointer, FUA, Sqe};
use nvme_mpt_tests::controller::Controller;
use nvme_mpt_tests::disk::Disk;
use nvme_mpt_tests::sgl;
use nvme_mpt_tests::status::{READ_ONLY_RANGE, SUCCESS, StatusCode, WRITE_FAULT};

use crate::common::loop_device::LoopDevice;
use crate::common::{HANG, Host, LEASE, Machine, Setup, disk};

/// Critical Warning, bits 2 and 3: reliability degraded, media read only (Base 2.0, Figure 207).
const RELIABILITY_AND_READ_ONLY: u8 = 0b1100;

/// Room of the device, less than a guest writes.
const ROOM: u64 = 1 << 20;

/// A command's status, and whether it is not to be retried.
fn ended(disk: &mut Disk, sqe: Sqe) -> (StatusCode, bool) {
    let status = disk.queue.submit_and_wait(sqe, HANG).unwrap().status();
    (status.code(), status.do_not_retry())
}

/// Writes these bytes of the disk from an odd address, which goes through the page cache. Returns how the writes
/// ended.
fn write_through_cache(
    machine: &Machine,
    disk: &mut Disk,
    bytes: Range<u64>,
    flags: u32,
) -> Vec<StatusCode> {
    const PIECE: u64 = 65_536;
    let data = machine.memory.alloc(2 * PIECE as usize).unwrap();
    data.fill(0x41);
    let blocks = PIECE / disk.block_size() as u64;
    let pieces = bytes.start / PIECE..bytes.end / PIECE;
    let ends = pieces.map(|piece| {
        let sqe = Sqe::write(1, piece * blocks, blocks as u32);
        let sqe = sqe
            .with_cdw(12, sqe.cdw(12) | flags)
            .with_data(DataPointer::sgl(sgl::data_block(
                data.gpa() + 1,
                PIECE as u32,
            )));
        ended(disk, sqe).0
    });
    ends.collect()
}

/// Critical Warning.
fn warnings(controller: &mut Controller) -> u8 {
    let page = LogPage {
        id: log::SMART,
        nsid: u32::MAX,
        offset: 0,
        len: 512,
        retain: false,
    };
    controller.log_page(page).unwrap()[0]
}

#[test]
fn every_tenant_hears_of_lost_writes_until_its_vmm_connects_again() {
    let Some(device) = LoopDevice::new(2 * LEASE, ROOM) else {
        return;
    };
    let host = Host::of_file(device.device(), 4096);
    let [a, b] = [0, 1].map(|nth| host.machine(&Setup::nth(nth)));
    let (mut a_controller, mut a_disk) = a.disk();
    let (mut b_controller, mut b_disk) = b.disk();
    let mut a_second = disk(&mut a_controller, 2);
    assert_eq!(warnings(&mut a_controller), 0);

    let ends = write_through_cache(&a, &mut a_disk, 0..4 * ROOM, 0);
    if ends.iter().any(|end| *end != SUCCESS) {
        // Nothing is lost without a word where writes wait for the device.
        return;
    }
    let flush = Sqe::flush(1);
    // The neighbour's Flush finds it first.
    assert_eq!(
        ended(&mut b_disk, flush),
        (WRITE_FAULT, true),
        "B's first Flush"
    );
    for round in 0..3 {
        for (who, disk) in [
            ("A", &mut a_disk),
            ("A, queue 2", &mut a_second),
            ("B", &mut b_disk),
        ] {
            assert_eq!(
                ended(disk, flush),
                (WRITE_FAULT, true),
                "{who}, Flush {round}"
            );
        }
    }
    for flags in [0, FUA] {
        let ends = write_through_cache(&a, &mut a_disk, 0..65_536, flags);
        assert_eq!(ends, [READ_ONLY_RANGE], "a write behind what was lost");
    }
    a_disk.read(0, 8).unwrap();
    for controller in [&mut a_controller, &mut b_controller] {
        assert_eq!(warnings(controller), RELIABILITY_AND_READ_ONLY);
    }

    // A reset is the guest's own, and brings nothing back.
    drop((a_disk, a_second));
    a_controller.reset().unwrap();
    let mut a_disk = disk(&mut a_controller, 1);
    assert_eq!(
        ended(&mut a_disk, flush),
        (WRITE_FAULT, true),
        "after a reset"
    );
    a.function().flush().unwrap_err();

    a.function().host().begin_anew();
    assert_eq!(
        ended(&mut a_disk, flush),
        (SUCCESS, false),
        "for a VMM that connected anew"
    );
    assert_eq!(warnings(&mut a_controller), 0);
    a.function().flush().unwrap();
    assert_eq!(
        ended(&mut b_disk, flush),
        (WRITE_FAULT, true),
        "B's VMM did not"
    );
}

#[test]
fn a_reset_between_the_loss_and_the_flush_hides_nothing() {
    let Some(device) = LoopDevice::new(2 * LEASE, ROOM) else {
        return;
    };
    let host = Host::of_file(device.device(), 4096);
    let [a, b] = [0, 1].map(|nth| host.machine(&Setup::nth(nth)));
    let (mut a_controller, mut a_disk) = a.disk();
    let (_b_controller, mut b_disk) = b.disk();
    let ends = write_through_cache(&a, &mut a_disk, 0..4 * ROOM, 0);
    if ends.iter().any(|end| *end != SUCCESS) {
        return;
    }
    drop(a_disk);
    // Every description that is opened later begins behind an error that somebody was told.
    assert_eq!(ended(&mut b_disk, Sqe::flush(1)), (WRITE_FAULT, true));
    a_controller.reset().unwrap();
    let mut a_disk = disk(&mut a_controller, 1);
    assert_eq!(ended(&mut a_disk, Sqe::flush(1)), (WRITE_FAULT, true));
}

#[test]
fn a_write_with_fua_and_the_end_of_a_function_find_what_was_lost() {
    let Some(device) = LoopDevice::new(LEASE, ROOM) else {
        return;
    };
    let host = Host::of_file(device.device(), 4096);
    let machine = host.machine(&Setup::nth(0));
    let (_controller, mut disk) = machine.disk();
    let ends = write_through_cache(&machine, &mut disk, 0..4 * ROOM, 0);
    if ends.iter().any(|end| *end != SUCCESS) {
        return;
    }
    let ends = write_through_cache(&machine, &mut disk, 0..4 * ROOM, FUA);
    let first = ends.iter().position(|end| *end != SUCCESS);
    let (durable, after) = ends.split_at(first.expect("there is no room for all of them"));
    assert!(durable.len() as u64 <= ROOM / 65_536);
    assert_eq!(after[0], WRITE_FAULT);
    assert!(after[1..].iter().all(|end| *end == READ_ONLY_RANGE));
    assert_eq!(ended(&mut disk, Sqe::flush(1)), (WRITE_FAULT, true));
    machine.function().flush().unwrap_err();
}
