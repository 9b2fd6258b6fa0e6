//! Doorbell strides of 4 and 64 bytes (`doorbell-stride=`, CAP.DSTRD; NVMe Base 2.0, sections 3.1.3.1 and 5.8).

use nvme_guest::DoorbellStride;
use nvme_mpt_tests::controller::Controller;
use nvme_mpt_tests::disk::Disk;
use nvme_mpt_tests::doorbell::{DoorbellMode, Side};

use crate::common::bystander::Bystander;
use crate::common::{Host, MODES, Machine, Setup, disk, pass_round};

fn setup(stride: DoorbellStride, mode: DoorbellMode) -> Setup {
    Setup {
        stride,
        ..Setup::nth(0).doorbells(mode)
    }
}

fn attach(machine: &Machine, stride: u64) -> (Controller, Vec<Disk>) {
    let mut controller = machine.attach();
    assert_eq!(controller.cap().doorbell_stride(), stride);
    let disks = (1..=4).map(|id| disk(&mut controller, id)).collect();
    (controller, disks)
}

#[test]
fn each_path_of_doorbells_has_either_stride() {
    for mode in MODES {
        for (stride, bytes) in [(DoorbellStride::Bytes4, 4), (DoorbellStride::Bytes64, 64)] {
            let host = Host::new("memory:32M", 512);
            // A bystander on the same pollers has the default stride.
            let bystander = Bystander::start(&host, &Setup::nth(1));
            let machine = host.machine(&setup(stride, mode));
            let (mut controller, mut disks) = attach(&machine, bytes);
            for seed in 0..20 {
                pass_round(&mut disks, seed);
                // The admin queue's doorbells are in the same page, and with a stride of 4 bytes in the same cache line.
                assert_eq!(controller.active_namespaces(0).unwrap(), [1]);
            }
            drop(disks);
            // A reset clears all doorbells, whatever the stride.
            machine.function_level_reset();
            let (_controller, mut disks) = attach(&machine, bytes);
            pass_round(&mut disks, 20);
            bystander.finish();
        }
    }
}

#[test]
fn doorbell_offsets_match_the_stride() {
    let host = Host::new("memory:16M", 512);
    for (stride, bytes) in [(DoorbellStride::Bytes4, 4), (DoorbellStride::Bytes64, 64)] {
        let machine = host.machine(&setup(stride, DoorbellMode::Trap));
        let function = machine.function();
        let at = |offset| {
            function
                .doorbell_at(0x1000 + offset)
                .map(|doorbell| doorbell.index())
        };
        // Four I/O queue pairs and the admin queue pair.
        for index in 0..10 {
            assert_eq!(at(u64::from(index) * bytes), Some(index), "{stride:?}");
            assert_eq!(at(u64::from(index) * bytes + 2), None, "{stride:?}");
        }
        assert_eq!(at(10 * bytes), None, "{stride:?}");
        assert_eq!(at(32), (bytes == 4).then_some(8));
    }
}

#[test]
fn a_doorbell_buffer_has_room_for_as_many_queues_as_its_stride_allows() {
    for (stride, most) in [(DoorbellStride::Bytes4, 100), (DoorbellStride::Bytes64, 31)] {
        let host = Host::new("memory:32M", 512);
        let bystander = Bystander::start(&host, &Setup::nth(1));
        let machine = host.machine(&Setup {
            queue_pairs: most,
            ..setup(stride, DoorbellMode::Shadow)
        });
        let mut controller = machine.attach();
        let mut disks: Vec<Disk> = (1..=most).map(|id| disk(&mut controller, id)).collect();
        for seed in 0..4 {
            pass_round(&mut disks, seed);
        }
        // The last queue's doorbells are in the buffer's page, and no register write was needed for them.
        let buffer = controller.doorbell_buffer().unwrap();
        let (head, _) = buffer.cells(most, Side::CqHead).unwrap();
        assert_ne!(head[0].load(std::sync::atomic::Ordering::Acquire), 0);
        bystander.finish();
    }
}

#[test]
fn a_snapshot_goes_on_with_its_stride_alone() {
    let host = Host::new("memory:32M", 512);
    for mode in MODES {
        let four = setup(DoorbellStride::Bytes4, mode);
        let machine = host.machine(&four);
        let (mut controller, mut disks) = attach(&machine, 4);
        pass_round(&mut disks, 1);
        let suspended = machine.suspend();
        for other in [DoorbellStride::Widest, DoorbellStride::Bytes64] {
            let error = host.restore(&suspended, &setup(other, mode));
            let error = error.err().expect("refused").to_string();
            assert!(error.contains("doorbell stride (CAP.DSTRD)"), "{error}");
            assert!(
                error.contains("is 4, but") || error.contains(" 0"),
                "{error}"
            );
        }
        let machine = host.restore(&suspended, &four).unwrap();
        machine.function().resume();
        controller.move_to(machine.bar()).unwrap();
        for disk in &mut disks {
            disk.queue.move_to(&machine.bar()).unwrap();
        }
        for seed in 2..6 {
            pass_round(&mut disks, seed);
        }
    }
}
