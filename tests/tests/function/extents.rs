//! Leases by size: commands across the borders of extents, and leases that grow while in use.

use std::fs::OpenOptions;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use nvme_layers::LayeredController;
use nvme_layers::faults::FaultPlan;
use nvme_lease::range_lock::FileRangeLock;
use nvme_lease::{Lease, LeaseError, PreviousDataPolicy};
use nvme_models::DriveProfile;
use nvme_mpt::local_backend::GrowError;
use nvme_mpt_tests::Error;
use nvme_mpt_tests::admin::{AsyncEvent, LogPage, feature, log};
use nvme_mpt_tests::command::Sqe;
use nvme_mpt_tests::controller::Controller;
use nvme_mpt_tests::disk::{Disk, Transfer};
use nvme_mpt_tests::prp;
use nvme_mpt_tests::status::{
    COMPARE_FAILURE, LBA_OUT_OF_RANGE, SUCCESS, StatusCode, UNRECOVERED_READ_ERROR, WRITE_FAULT,
};
use nvme_mpt_vmm::drives::{self, DriveOptions};

use crate::common::bystander::Bystander;
use crate::common::{HANG, Host, Machine, Setup, queue_pair, status, wait_for};

/// Allocation unit in bytes.
const UNIT: u64 = 1 << 20;

/// Allocation unit in blocks.
const BLOCKS: u64 = UNIT / 512;

/// Size of the drives in bytes.
const DRIVE: u64 = 32 * UNIT;

/// Creates a drive of each kind.
fn hosts() -> [(Host, Option<tempfile::NamedTempFile>); 2] {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(DRIVE).unwrap();
    [
        (Host::new("memory:32M", 512), None),
        (Host::of_file(file.path(), 512), Some(file)),
    ]
}

/// Returns the setup of a lease by size of `count` units.
fn units(count: u64) -> Setup {
    Setup::from_start(count * UNIT).with_allocation_unit(UNIT)
}

/// Leases all units except for `count` separate ones: the second unit of the drive, the fourth, and so on.
fn leave_units(host: &Host, count: u64) -> Vec<Lease> {
    let rest = 2 * count * UNIT;
    let every_second = (0..count).map(|at| (2 * at * UNIT, UNIT));
    host.lease_ranges(every_second.chain([(rest, DRIVE - rest)]))
}

/// Returns data that differs for each block.
fn pattern(first: u64, blocks: u64) -> Vec<u8> {
    let words = (first * 64..(first + blocks) * 64).map(|word| word.wrapping_mul(0x9E37_79B9));
    words.flat_map(u64::to_le_bytes).collect()
}

/// Writes all blocks.
fn fill(disk: &mut Disk) {
    for first in (0..disk.blocks()).step_by(BLOCKS as usize) {
        disk.write(first, &pattern(first, BLOCKS)).unwrap();
    }
}

#[track_caller]
fn check(disk: &mut Disk, first: u64, blocks: u64) {
    let read = disk.read(first, blocks as u32).unwrap();
    assert!(read == pattern(first, blocks), "{blocks} from {first} on");
}

#[test]
fn a_guest_sees_one_namespace_and_its_optimal_boundary() {
    for (host, _file) in hosts() {
        let _others = leave_units(&host, 8);
        let machine = host.machine(&units(8));
        let (_controller, mut disk) = machine.disk();
        assert_eq!(disk.blocks(), 8 * BLOCKS);
        assert_eq!(disk.namespace().raw[46..48], (BLOCKS as u16).to_le_bytes());
        fill(&mut disk);
        for transfer in [
            Transfer::Prp { offset: 0 },
            Transfer::Prp { offset: 512 },
            Transfer::Sgl {
                piece: 700,
                per_segment: 40,
            },
        ] {
            disk.transfer = transfer;
            for first in [BLOCKS - 1, BLOCKS - 7, 2 * BLOCKS - 8, 7 * BLOCKS - 9] {
                for count in [2, 8, 9, 16, 64] {
                    check(&mut disk, first, count);
                }
            }
        }
        disk.transfer = Transfer::Prp { offset: 3584 };
        check(&mut disk, BLOCKS / 2, BLOCKS);
    }
}

#[test]
fn copies_go_over_borders() {
    for (host, _file) in hosts() {
        let _others = leave_units(&host, 8);
        let machine = host.machine(&units(8));
        let (_controller, mut disk) = machine.disk();
        fill(&mut disk);
        // Source ranges across two borders, and a destination across another border.
        let sources = [
            (BLOCKS - 5, 11),
            (BLOCKS + 100, 1),
            (3 * BLOCKS - 1, 2),
            (7, 300),
        ];
        let target = 6 * BLOCKS - 20;
        disk.copy(target, &sources).unwrap();
        let copied: Vec<u8> = sources
            .iter()
            .flat_map(|&(first, count)| pattern(first, count.into()))
            .collect();
        let count = (copied.len() / 512) as u32;
        assert!(disk.read(target, count).unwrap() == copied);
        check(&mut disk, target - 100, 100);
        check(&mut disk, target + u64::from(count), 100);
    }
}

#[test]
fn ranges_without_data_go_over_borders() {
    for (host, _file) in hosts() {
        let _others = leave_units(&host, 8);
        let machine = host.machine(&units(8));
        let (_controller, mut disk) = machine.disk();
        fill(&mut disk);
        // After the split at the borders, there are more ranges than a command may have.
        let ranges: Vec<(u64, u32)> = (0..256).map(|at| (BLOCKS - 8, 16 + at % 2)).collect();
        disk.deallocate(&ranges).unwrap();
        disk.write_zeroes(3 * BLOCKS - 4, 9, true).unwrap();
        for (first, count) in [(BLOCKS - 8, 17), (3 * BLOCKS - 4, 9)] {
            assert!(
                disk.read(first, count)
                    .unwrap()
                    .iter()
                    .all(|byte| *byte == 0)
            );
            check(&mut disk, first - 9, 9);
            check(&mut disk, first + u64::from(count), 9);
        }
        disk.verify(BLOCKS - 100, 200).unwrap();
        disk.write_uncorrectable(5 * BLOCKS - 1, 2).unwrap();
        for first in [5 * BLOCKS - 1, 5 * BLOCKS] {
            let read = disk.read(first, 1).map(drop);
            assert_eq!(failure(read), UNRECOVERED_READ_ERROR);
            disk.write(first, &pattern(first, 1)).unwrap();
        }
        check(&mut disk, 5 * BLOCKS - 9, 18);
    }
}

#[test]
fn many_commands_in_parts_are_in_flight_at_a_time() {
    for (host, _file) in hosts() {
        let _others = leave_units(&host, 8);
        let machine = host.machine(&units(8));
        let (mut controller, mut disk) = machine.disk();
        fill(&mut disk);
        let mut queue = queue_pair(&mut controller, 2, 64);
        let reads: Vec<_> = (0..60_u64)
            .map(|number| {
                let (first, count) = ((1 + number % 7) * BLOCKS - 1 - number % 5, 7 + number);
                let data = machine.memory.alloc(count as usize * 512).unwrap();
                let prepared = prp::buffer(&data, 0, count as usize * 512).unwrap();
                let sqe = Sqe::read(1, first, count as u32).with_data(prepared.pointer);
                let cid = queue.submit(sqe).unwrap();
                (cid, first, count, data, prepared)
            })
            .collect();
        let cids: Vec<u16> = reads.iter().map(|(cid, ..)| *cid).collect();
        for entry in queue.drain(&cids, HANG).unwrap() {
            assert_eq!(entry.status().code(), SUCCESS);
        }
        for (_, first, count, data, _) in reads {
            let mut read = vec![0; count as usize * 512];
            data.read(0, &mut read);
            assert!(read == pattern(first, count), "{count} from {first} on");
        }
    }
}

/// Returns the status of a failed command.
#[track_caller]
fn failure(result: Result<(), Error>) -> StatusCode {
    let completion = result.unwrap_err().completion();
    completion.expect("a completion").status().code()
}

/// Creates a drive in memory with faults.
fn faulty(plan: &str, profile: Option<&str>) -> Host {
    let options = DriveOptions {
        faults: Some(Arc::new(FaultPlan::parse("test", plan).unwrap())),
        profile: profile.map(|name| Arc::new(DriveProfile::find_built_in(name).unwrap())),
        ..DriveOptions::default()
    };
    Host::from_drive(drives::open(&"memory:32M".parse().unwrap(), options).unwrap())
}

#[test]
fn a_part_that_fails_ends_its_command() {
    // The second unit of the lease is the fourth unit of the drive.
    let host = faulty(
        "[[fault]]\nkind = \"media-error\"\nrange = \"3M+4K\"\n",
        None,
    );
    let _others = leave_units(&host, 4);
    let machine = host.machine(&units(4));
    let (_controller, mut disk) = machine.disk();
    disk.write(BLOCKS - 8, &pattern(0, 8)).unwrap();
    let written = disk.write(BLOCKS - 4, &pattern(BLOCKS - 4, 8));
    assert_eq!(failure(written), WRITE_FAULT);
    // Only writes of up to one block are atomic.
    check(&mut disk, BLOCKS - 4, 4);
    let compared = disk.compare(BLOCKS - 4, &pattern(0, 8));
    assert_eq!(failure(compared), COMPARE_FAILURE);
    disk.write(2 * BLOCKS - 4, &pattern(2 * BLOCKS - 4, 8))
        .unwrap();
    check(&mut disk, 2 * BLOCKS - 4, 8);
}

#[test]
fn a_reset_begins_no_further_part() {
    // The latency is longer than any pause of the machine, so no write completes on its own.
    let plan = "[[fault]]\nkind = \"latency\"\nadd = \"60s\"\noperations = [\"write\"]\n".repeat(3);
    let host = faulty(&plan, Some("nvm"));
    let _others = leave_units(&host, 4);
    let machine = host.machine(&units(4));
    let mut controller = machine.attach();
    let mut queue = queue_pair(&mut controller, 2, 16);
    let data = machine.memory.alloc(4096).unwrap();
    let prepared = prp::buffer(&data, 0, 4096).unwrap();
    let write = Sqe::write(1, BLOCKS - 4, 8).with_data(prepared.pointer);
    queue.submit(write).unwrap();
    queue.ring();
    let drive = LayeredController::downcast(host.drive.controller()).unwrap();
    let hit_count = || drive.faults().unwrap().stats()[0].struck;
    wait_for("the first part", || hit_count() == 1);
    controller.reset().unwrap();
    assert_eq!(hit_count(), 1, "the second part");
    let mut disk = crate::common::disk(&mut controller, 1);
    check_zeroes(&mut disk, BLOCKS, 4);
}

#[track_caller]
fn check_zeroes(disk: &mut Disk, first: u64, blocks: u64) {
    let read = disk.read(first, blocks as u32).unwrap();
    assert!(
        read.iter().all(|byte| *byte == 0),
        "{blocks} from {first} on"
    );
}

/// Attaches a driver that enables namespace notices.
fn listening(machine: &Machine) -> (Controller, Disk) {
    let (mut controller, disk) = machine.disk();
    controller
        .set_feature(feature::ASYNC_EVENT_CONFIG, 0, 1 << 8)
        .unwrap();
    controller.request_async_event().unwrap();
    (controller, disk)
}

#[track_caller]
fn expect_namespace_event(controller: &mut Controller) {
    let event = controller.async_event(HANG).unwrap();
    let changed = AsyncEvent {
        kind: 2,
        info: 0,
        log_page: log::CHANGED_NAMESPACES,
    };
    assert_eq!(event, Some(changed));
}

#[test]
fn a_lease_grows_under_its_guest() {
    for (host, _file) in hosts() {
        // Data of a released lease, and of a lease in use.
        let stop = AtomicBool::new(false);
        {
            let previous_machine = host.machine(&Setup::from_start(2 * UNIT));
            fill(&mut previous_machine.disk().1);
        }
        host.ledger
            .decide_data("lease-0", PreviousDataPolicy::Wiped)
            .unwrap();
        let bystander = Bystander::start(
            &host,
            &Setup {
                start: 4 * UNIT,
                ..Setup::from_start(26 * UNIT)
            },
        );
        // Unused space is allocated first.
        let machine = host.machine(&units(1));
        let local_backend = host.latest_backend.lock().unwrap().upgrade().unwrap();
        assert_eq!(local_backend.lease().extents().to_string(), "2M+1M");
        let (mut controller, mut disk) = listening(&machine);
        fill(&mut disk);
        let beyond = Sqe::read(1, BLOCKS, 1);
        assert_eq!(status(&mut disk.queue, beyond), LBA_OUT_OF_RANGE);

        let error = local_backend.grow(7 * UNIT, &stop).unwrap_err();
        assert!(
            matches!(&error, GrowError::Lease(LeaseError::NoCapacity { .. })),
            "{error}"
        );
        assert_eq!(status(&mut disk.queue, beyond), LBA_OUT_OF_RANGE);

        local_backend.grow(5 * UNIT, &stop).unwrap();
        expect_namespace_event(&mut controller);
        // The existing queue can access the new blocks, across the borders of extents.
        check(&mut disk, 0, BLOCKS);
        let mut whole = crate::common::disk(&mut controller, 2);
        assert_eq!(whole.blocks(), 5 * BLOCKS);
        for first in (BLOCKS..5 * BLOCKS).step_by(BLOCKS as usize) {
            check_zeroes(&mut whole, first, BLOCKS);
        }
        for queue in [&mut disk, &mut whole] {
            queue
                .write(BLOCKS / 2, &pattern(BLOCKS / 2, BLOCKS))
                .unwrap();
            queue
                .write(4 * BLOCKS - 3, &pattern(4 * BLOCKS - 3, 90))
                .unwrap();
            check(queue, BLOCKS / 2, BLOCKS);
            check(queue, 4 * BLOCKS - 3, 90);
        }
        // The lease has this size already.
        local_backend.grow(5 * UNIT, &stop).unwrap();
        let error = local_backend.grow(4 * UNIT, &stop).unwrap_err();
        assert!(error.to_string().contains("--truncate"), "{error}");
        bystander.finish();
    }
}

#[test]
fn failed_growth_keeps_the_old_size_and_can_be_repeated() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(DRIVE).unwrap();
    let host = Host::of_file(file.path(), 512);
    drop(host.lease_ranges([(4 * UNIT, DRIVE - 4 * UNIT)]));
    let previous_id = format!("at-{}", 4 * UNIT);
    host.ledger
        .decide_data(&previous_id, PreviousDataPolicy::Wiped)
        .unwrap();
    let machine = host.machine(&units(1));
    let local_backend = host.latest_backend.lock().unwrap().upgrade().unwrap();
    let (mut controller, mut disk) = listening(&machine);
    fill(&mut disk);
    let beyond = Sqe::read(1, BLOCKS, 1);
    let grow = |units, stop| local_backend.grow(units * UNIT, &AtomicBool::new(stop));

    // Another process has locked part of the free space without a lease.
    let mut options = OpenOptions::new();
    let opened = options.read(true).write(true).open(file.path()).unwrap();
    let lock = FileRangeLock::take(opened, 3 * UNIT, UNIT)
        .unwrap()
        .unwrap();
    let error = grow(4, false).unwrap_err();
    assert!(matches!(error, GrowError::Host { .. }), "{error}");
    assert_eq!(local_backend.lease().extents().length(), UNIT);
    assert_eq!(status(&mut disk.queue, beyond), LBA_OUT_OF_RANGE);
    drop(lock);
    grow(4, false).unwrap();
    expect_namespace_event(&mut controller);
    check_zeroes(&mut disk, BLOCKS, BLOCKS);

    // The server stops during the wipe.
    controller.request_async_event().unwrap();
    controller
        .log_page(LogPage::of_controller(log::CHANGED_NAMESPACES, 4096))
        .unwrap();
    let beyond = Sqe::read(1, 4 * BLOCKS, 1);
    let error = grow(6, true).unwrap_err();
    assert!(matches!(error, GrowError::Wipe(_)), "{error}");
    assert_eq!(status(&mut disk.queue, beyond), LBA_OUT_OF_RANGE);
    assert!(!local_backend.lease().unwiped().is_empty());
    grow(6, false).unwrap();
    expect_namespace_event(&mut controller);
    for first in [4 * BLOCKS, 5 * BLOCKS] {
        check_zeroes(&mut disk, first, BLOCKS);
    }
    check(&mut disk, 0, BLOCKS);
}

#[test]
fn a_lease_of_zones_does_not_grow() {
    let zones = "model = \"zns\"\nzone_size = \"1M\"\nzone_capacity = \"1M\"\n\
                 max_open = 8\nmax_active = 8\nappend_limit = \"16K\"\n";
    let options = DriveOptions {
        profile: Some(Arc::new(DriveProfile::parse("test", zones).unwrap())),
        ..DriveOptions::default()
    };
    let host = Host::from_drive(drives::open(&"memory:32M".parse().unwrap(), options).unwrap());
    let machine = host.machine(&units(4));
    let local_backend = host.latest_backend.lock().unwrap().upgrade().unwrap();
    let error = local_backend.grow(5 * UNIT, &AtomicBool::new(false));
    assert!(matches!(error, Err(GrowError::FixedSize(_))), "{error:?}");
    assert_eq!(local_backend.lease().extents().to_string(), "0+4M");
    drop((machine, local_backend));
    // The failed growth did not affect the data state of the space.
    let others = host.lease_ranges([(4 * UNIT, UNIT)]);
    assert_eq!(others[0].unwiped(), []);
}

#[test]
fn a_snapshot_is_restored_on_a_grown_lease() {
    let host = Host::new("memory:32M", 512);
    let machine = host.machine(&units(2));
    let (mut controller, mut disk) = listening(&machine);
    fill(&mut disk);
    let suspended = machine.suspend();

    let smaller = host.restore(&suspended, &units(1));
    // A lease never shrinks, so restoring with a smaller size succeeds.
    drop(smaller.unwrap());
    let machine = host.restore(&suspended, &units(4)).unwrap();
    machine.function().resume();
    controller.move_to(machine.bar()).unwrap();
    disk.queue.move_to(&machine.bar()).unwrap();
    expect_namespace_event(&mut controller);
    check(&mut disk, 0, BLOCKS);
    let whole = crate::common::disk(&mut controller, 2);
    assert_eq!(whole.blocks(), 4 * BLOCKS);
}
