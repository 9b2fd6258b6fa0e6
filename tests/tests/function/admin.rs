//! All opcodes and CNS values, fused commands, invalid identifiers, and commands that wait: Asynchronous Event Requests and
//! Aborts.

use nvme_mpt_tests::bar::Bar;
use nvme_mpt_tests::command::{DataPointer, Sqe, admin, io};
use nvme_mpt_tests::controller::Controller;
use nvme_mpt_tests::disk::Disk;
use nvme_mpt_tests::doorbell::Side;
use nvme_mpt_tests::identify::cns;
use nvme_mpt_tests::prp;
use nvme_mpt_tests::status::{
    ABORT_REQUESTED, AER_LIMIT_EXCEEDED, CQ_INVALID, DATA_TRANSFER_ERROR, INVALID_FIELD,
    INVALID_LOG_PAGE, INVALID_NAMESPACE, INVALID_OPCODE, INVALID_QUEUE_ID, SUCCESS, StatusCode,
};

use crate::common::bystander::Bystander;
use crate::common::sentinel::Sentinel;
use crate::common::{
    HANG, Host, LEASE, Machine, Setup, UNMAPPED_ADDRESS, admin_status, queue_pair, status,
    written_file,
};

const IO_OPCODES: [u8; 9] = [
    io::FLUSH,
    io::WRITE,
    io::READ,
    io::WRITE_UNCORRECTABLE,
    io::COMPARE,
    io::WRITE_ZEROES,
    io::DATASET_MANAGEMENT,
    io::VERIFY,
    io::COPY,
];

struct Scene {
    machine: Machine,
    controller: Controller,
    disk: Disk,
    bystander: Bystander,
}

fn scene(host: &Host) -> Scene {
    let bystander = Bystander::start(host, &Setup::nth(1));
    let machine = host.machine(&Setup::nth(0));
    let (controller, disk) = machine.disk();
    Scene {
        machine,
        controller,
        disk,
        bystander,
    }
}

impl Scene {
    #[track_caller]
    fn finish(mut self) {
        self.disk.flush().unwrap();
        assert_eq!(self.controller.active_namespaces(0).unwrap(), [1]);
        assert_eq!(self.controller.status().unwrap(), 1);
        self.bystander.finish();
    }
}

#[test]
fn every_io_opcode() {
    let mut scene = scene(&Host::new("memory:32M", 512));
    let sentinel = Sentinel::new(&scene.machine.memory, 4096);
    for opcode in 0..=u8::MAX {
        let known = IO_OPCODES.contains(&opcode);
        for (nsid, pointer) in [(1, sentinel.gpa()), (0, UNMAPPED_ADDRESS), (u32::MAX, 1)] {
            let sqe = Sqe::new(opcode, nsid).with_data(DataPointer::prp(pointer, 0));
            let want = match (opcode, nsid) {
                _ if !known => INVALID_OPCODE,
                // Flush is the only command that accepts the broadcast namespace identifier.
                (io::FLUSH, 1 | u32::MAX) => SUCCESS,
                (_, 0 | u32::MAX) => INVALID_NAMESPACE,
                // Other tests check the effects of these commands.
                _ => continue,
            };
            assert_eq!(
                status(&mut scene.disk.queue, sqe),
                want,
                "{opcode:#x} {nsid:#x}"
            );
        }
    }
    sentinel.check();
    scene.finish();
}

#[test]
fn every_admin_opcode() {
    let mut scene = scene(&Host::new("memory:32M", 512));
    for opcode in 0..=u8::MAX {
        let want = match opcode {
            // All fields are 0, and queue 0 is the admin queue, which these commands cannot name.
            admin::CREATE_SQ | admin::CREATE_CQ | admin::DELETE_SQ | admin::DELETE_CQ => {
                INVALID_QUEUE_ID
            }
            // Log page 0 with a data pointer outside of memory. Either error may be reported first.
            admin::GET_LOG_PAGE => {
                let sqe =
                    Sqe::new(opcode, u32::MAX).with_data(DataPointer::prp(UNMAPPED_ADDRESS, 0));
                let code = admin_status(&mut scene.controller, sqe);
                assert!(
                    [DATA_TRANSFER_ERROR, INVALID_LOG_PAGE].contains(&code),
                    "{code}"
                );
                continue;
            }
            // CNS 0 of namespace 0; feature 0, which does not exist.
            admin::IDENTIFY => INVALID_NAMESPACE,
            admin::SET_FEATURES | admin::GET_FEATURES => INVALID_FIELD,
            admin::ABORT => SUCCESS,
            // This command waits for an event.
            admin::ASYNC_EVENT_REQUEST => continue,
            // The guest has no memory at address 0.
            admin::DOORBELL_BUFFER_CONFIG => INVALID_FIELD,
            _ => INVALID_OPCODE,
        };
        let code = admin_status(&mut scene.controller, Sqe::new(opcode, 0));
        assert_eq!(code, want, "{opcode:#x}");
    }
    scene.finish();
}

#[test]
fn every_cns_value() {
    let mut scene = scene(&Host::new("memory:32M", 512));
    let controller = &mut scene.controller;
    let known = [
        cns::NAMESPACE,
        cns::CONTROLLER,
        cns::ACTIVE_NAMESPACES,
        cns::NAMESPACE_DESCRIPTORS,
        cns::CSI_NAMESPACE,
        cns::CSI_CONTROLLER,
        cns::CSI_ACTIVE_NAMESPACES,
        cns::CSI_INDEPENDENT_NAMESPACE,
        cns::COMMAND_SETS,
    ];
    let data = controller.memory().alloc(4096).unwrap();
    let pointer = DataPointer::prp(data.gpa(), 0);
    for value in 0..=u8::MAX {
        let sqe = Sqe::identify(value, 1, 0).with_data(pointer);
        let want = if known.contains(&value) {
            SUCCESS
        } else {
            INVALID_FIELD
        };
        assert_eq!(admin_status(controller, sqe), want, "CNS {value:#x}");
    }
    for value in [
        cns::NAMESPACE,
        cns::NAMESPACE_DESCRIPTORS,
        cns::CSI_NAMESPACE,
    ] {
        for nsid in [0, 2, 0xffff_fffe, u32::MAX] {
            let sqe = Sqe::identify(value, nsid, 0).with_data(pointer);
            assert_eq!(
                admin_status(controller, sqe),
                INVALID_NAMESPACE,
                "{value:#x} {nsid:#x}"
            );
        }
    }
    for value in [
        cns::CSI_NAMESPACE,
        cns::CSI_CONTROLLER,
        cns::CSI_ACTIVE_NAMESPACES,
    ] {
        for csi in [1, 2, 0x30, 0xff] {
            let sqe = Sqe::identify(value, 1, csi).with_data(pointer);
            assert_eq!(
                admin_status(controller, sqe),
                INVALID_FIELD,
                "{value:#x} CSI {csi:#x}"
            );
        }
    }
    // Data pointers without memory, and data that spans two regions.
    let nowhere =
        Sqe::identify(cns::CONTROLLER, 0, 0).with_data(DataPointer::prp(UNMAPPED_ADDRESS, 0));
    assert_eq!(admin_status(controller, nowhere), DATA_TRANSFER_ERROR);
    scene.finish();
}

#[test]
fn fused_commands() {
    let mut scene = scene(&Host::new("memory:32M", 512));
    let sentinel = Sentinel::new(&scene.machine.memory, 4096);
    for fuse in 1..=3 {
        for opcode in IO_OPCODES {
            let sqe = Sqe::range(opcode, 1, 0, 1)
                .with_data(DataPointer::prp(sentinel.gpa(), 0))
                .with_flags(fuse);
            let code = status(&mut scene.disk.queue, sqe);
            assert_eq!(code, INVALID_FIELD, "{opcode:#x} {fuse}");
        }
        let sqe = Sqe::identify(cns::CONTROLLER, 0, 0)
            .with_data(DataPointer::prp(sentinel.gpa(), 0))
            .with_flags(fuse);
        assert_eq!(admin_status(&mut scene.controller, sqe), INVALID_FIELD);
    }
    sentinel.check();
    scene.finish();
}

#[test]
fn namespaces_that_do_not_exist() {
    let mut scene = scene(&Host::new("memory:32M", 512));
    let sentinel = Sentinel::new(&scene.machine.memory, 4096);
    for nsid in [0, 2, 3, 0x8000_0001, 0xffff_fffe, u32::MAX] {
        for opcode in IO_OPCODES {
            let sqe = Sqe::range(opcode, nsid, 0, 1).with_data(DataPointer::prp(sentinel.gpa(), 0));
            let want = match (opcode, nsid) {
                (io::FLUSH, u32::MAX) => SUCCESS,
                _ => INVALID_NAMESPACE,
            };
            let code = status(&mut scene.disk.queue, sqe);
            assert_eq!(code, want, "{opcode:#x} {nsid:#x}");
        }
    }
    sentinel.check();
    scene.finish();
}

#[test]
fn requests_for_events_are_limited() {
    let mut scene = scene(&Host::new("memory:32M", 512));
    let limit = scene.controller.identity().unwrap().max_async_events;
    assert_eq!(limit, 4);
    for _ in 0..limit {
        scene.controller.request_async_event().unwrap();
    }
    let one_more = Sqe::new(admin::ASYNC_EVENT_REQUEST, 0);
    for _ in 0..20 {
        let code = admin_status(&mut scene.controller, one_more);
        assert_eq!(code, AER_LIMIT_EXCEEDED);
    }
    // All requests are still outstanding, and complete when an event occurs.
    scene.controller.write_doorbell(3, Side::SqTail, 1);
    let event = scene.controller.async_event(HANG).unwrap().unwrap();
    assert_eq!((event.kind, event.info), (0, 0));
    assert_eq!(scene.controller.outstanding_event_requests(), 3);
    scene.controller.request_async_event().unwrap();
    let code = admin_status(&mut scene.controller, one_more);
    assert_eq!(code, AER_LIMIT_EXCEEDED);
    scene.finish();
}

/// Submits an admin command and returns the completions of the given commands, by identifier.
fn admin_completions(
    controller: &mut Controller,
    sqe: Sqe,
    count: usize,
) -> Vec<(u16, StatusCode)> {
    let queue = controller.admin_queue().unwrap();
    queue.submit(sqe).unwrap();
    queue.ring();
    let mut seen = Vec::new();
    crate::common::wait_for("admin completions", || {
        while let Some(cqe) = queue.poll() {
            seen.push((cqe.cid(), cqe.status().code()));
        }
        queue.ring();
        seen.len() >= count
    });
    seen
}

#[test]
fn a_request_for_events_is_aborted() {
    let mut scene = scene(&Host::new("memory:32M", 512));
    for cid in [0xf100, 0xf101] {
        let queue = scene.controller.admin_queue().unwrap();
        assert!(queue.push(&Sqe::new(admin::ASYNC_EVENT_REQUEST, 0).with_cid(cid)));
        queue.ring();
    }
    let seen = admin_completions(&mut scene.controller, Sqe::abort(0, 0xf101), 2);
    // The aborted command completes before the Abort.
    assert_eq!(seen[0], (0xf101, ABORT_REQUESTED));
    assert_eq!(seen[1].1, SUCCESS);
    assert_eq!(seen.len(), 2);
    // The aborted command is gone. The other command is still outstanding.
    assert!(!scene.controller.abort(0, 0xf101).unwrap());
    let seen = admin_completions(&mut scene.controller, Sqe::abort(0, 0xf100), 2);
    assert_eq!(seen[0], (0xf100, ABORT_REQUESTED));
    scene.finish();
}

#[test]
fn unknown_commands_are_not_aborted() {
    let mut scene = scene(&Host::new("memory:32M", 512));
    for (sq, cid) in [(0, 0x1234), (1, 0), (2, 0), (77, 5), (0xffff, 0xffff)] {
        // The Abort succeeds and reports that it aborted nothing.
        assert!(!scene.controller.abort(sq, cid).unwrap(), "{sq} {cid}");
    }
    scene.finish();
}

#[test]
fn io_in_flight_that_is_aborted_completes_once() {
    let file = written_file(LEASE);
    file.as_file().set_len(2 * LEASE).unwrap();
    let mut scene = scene(&Host::of_file(file.path(), 512));
    let mut queue = queue_pair(&mut scene.controller, 2, 128);
    let data = scene.machine.memory.alloc(1 << 20).unwrap();
    let prepared = prp::buffer(&data, 0, 1 << 20).unwrap();
    for _ in 0..20 {
        let cids: Vec<u16> = (0..32)
            .map(|_| {
                queue
                    .submit(Sqe::read(1, 0, 2048).with_data(prepared.pointer))
                    .unwrap()
            })
            .collect();
        queue.ring();
        let aborted: Vec<bool> = cids
            .iter()
            .map(|&cid| scene.controller.abort(2, cid).unwrap())
            .collect();
        for (cqe, aborted) in queue.drain(&cids, HANG).unwrap().into_iter().zip(aborted) {
            let want = if aborted { ABORT_REQUESTED } else { SUCCESS };
            assert_eq!(cqe.status().code(), want, "{cqe:?}");
        }
    }
    scene.finish();
}

#[test]
fn invalid_data_pointers_of_admin_commands() {
    let mut scene = scene(&Host::new("memory:32M", 512));
    let sentinel = Sentinel::new(&scene.machine.memory, 3 * 4096);
    let identify = Sqe::identify(cns::CONTROLLER, 0, 0);
    for (prp1, prp2, want) in [
        (0, 0, DATA_TRANSFER_ERROR),
        (UNMAPPED_ADDRESS, 0, DATA_TRANSFER_ERROR),
        (!3, 0, DATA_TRANSFER_ERROR),
        (
            sentinel.gpa() + 1,
            0,
            nvme_mpt_tests::status::PRP_OFFSET_INVALID,
        ),
        (
            sentinel.gpa() + 4,
            sentinel.gpa() + 4100,
            nvme_mpt_tests::status::PRP_OFFSET_INVALID,
        ),
    ] {
        let sqe = identify.with_data(DataPointer::prp(prp1, prp2));
        assert_eq!(
            admin_status(&mut scene.controller, sqe),
            want,
            "{prp1:#x} {prp2:#x}"
        );
    }
    sentinel.check();
    // Create I/O Submission Queue for a completion queue that does not exist.
    let sqe = Sqe::create_sq(3, sentinel.gpa(), 16, 3);
    assert_eq!(admin_status(&mut scene.controller, sqe), CQ_INVALID);
    sentinel.check();
    let bar: &dyn Bar = &*scene.machine.bar();
    assert_eq!(bar.read32(0x1c), 1);
    scene.finish();
}
