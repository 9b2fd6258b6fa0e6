//! A guest's view of a physical drive: capabilities, health, a changed namespace, and the removal of the drive.

use std::sync::Arc;
use std::time::Duration;

use nvme_guest::DriveEvent;
use nvme_mpt_tests::Error;
use nvme_mpt_tests::admin::{AsyncEvent, LogPage, feature, log};
use nvme_mpt_tests::command::{DataPointer, Sqe, io};
use nvme_mpt_tests::controller::{Controller, QueueOptions};
use nvme_mpt_tests::identify::{ONCS_DSM, ONCS_VERIFY, cns};
use nvme_mpt_tests::sgl;
use nvme_mpt_tests::status::{
    INTERNAL_ERROR, INVALID_FIELD, INVALID_NAMESPACE, INVALID_OPCODE, SUCCESS, StatusCode,
};
use nvme_spec::identify::Oncs;
use nvme_spec::ids::Nsid;
use nvme_spec::log::CriticalWarning;

use crate::common::bystander::Bystander;
use crate::common::scripted_controller::ScriptedController;
use crate::common::sentinel::Sentinel;
use crate::common::{HANG, Machine, Setup, status};

/// Bits of Asynchronous Event Configuration: temperature, spare and reliability, and Namespace Attribute Notices.
const TEMPERATURE: u32 = 0b010;
const ALL_EVENTS: u32 = 0b1_1111 | 1 << 8;

const SMART_RELIABILITY: AsyncEvent = smart(0);
const SMART_TEMPERATURE: AsyncEvent = smart(1);
const SMART_SPARE: AsyncEvent = smart(2);
const NAMESPACE_CHANGED: AsyncEvent = AsyncEvent {
    kind: 2,
    info: 0,
    log_page: log::CHANGED_NAMESPACES,
};

const fn smart(info: u8) -> AsyncEvent {
    AsyncEvent {
        kind: 1,
        info,
        log_page: log::SMART,
    }
}

/// Creates a function, and attaches a driver that enables these events.
fn listening(machine: &Machine, events: u32) -> Controller {
    let mut controller = machine.attach();
    let set = controller.set_feature(feature::ASYNC_EVENT_CONFIG, 0, events);
    set.unwrap();
    controller.request_async_event().unwrap();
    controller
}

/// Returns the pending event, and submits another request.
#[track_caller]
fn next_event(controller: &mut Controller) -> AsyncEvent {
    let event = controller.async_event(HANG).unwrap().expect("an event");
    controller.request_async_event().unwrap();
    event
}

/// Checks that no event occurs, after the function had the opportunity to report one.
#[track_caller]
fn expect_no_event(machine: &Machine, controller: &mut Controller) {
    machine.function().process_events();
    let event = controller.async_event(Duration::ZERO).unwrap();
    assert_eq!(event, None);
}

fn read_log(controller: &mut Controller, id: u8, len: usize) -> Vec<u8> {
    let page = LogPage::of_controller(id, len);
    controller.log_page(page).unwrap()
}

fn failed_create_status(controller: &mut Controller, id: u16) -> StatusCode {
    match controller.create_queue_pair(id, &QueueOptions::polled(16)) {
        Err(Error::Status { cqe, .. }) => cqe.status().code(),
        other => panic!("a queue on a drive that is gone: {other:?}"),
    }
}

#[test]
fn commands_unsupported_by_the_drive_are_neither_offered_nor_sent() {
    let drive = ScriptedController::new(|limits| {
        limits.commands = Oncs::default().with_dsm(true).with_verify(true);
        limits.sgl_descriptors_max = 0;
        (limits.awun_z, limits.awupf_z) = (31, 7);
    });
    let machine = drive.host(1).machine(&Setup::nth(0));
    let (mut controller, mut disk) = machine.disk();
    let id = controller.identify_controller().unwrap();
    // The admin queue adds Save and Select, and Timestamp.
    assert_eq!(id.oncs, ONCS_DSM | ONCS_VERIFY | 1 << 4 | 1 << 6);
    assert_eq!(id.raw[526..530], [31, 0, 7, 0], "AWUN, AWUPF");
    assert_eq!(id.raw[266..270], [0x5E, 0x01, 0, 0], "WCTEMP, CCTEMP");
    assert!(!id.sgl());
    let effects = read_log(&mut controller, log::COMMAND_EFFECTS, 4096);
    let sentinel = Sentinel::new(&machine.memory, 4096);
    for (opcode, offered) in [
        (io::FLUSH, true),
        (io::READ, true),
        (io::WRITE, true),
        (io::DATASET_MANAGEMENT, true),
        (io::VERIFY, true),
        (io::COMPARE, false),
        (io::WRITE_ZEROES, false),
        (io::WRITE_UNCORRECTABLE, false),
        (io::COPY, false),
    ] {
        let supported = effects[1024 + 4 * usize::from(opcode)] & 1 != 0;
        assert_eq!(supported, offered, "{opcode:#x}");
        if !offered {
            let sqe = Sqe::range(opcode, 1, 0, 1).with_data(DataPointer::prp(sentinel.gpa(), 0));
            assert_eq!(status(&mut disk.queue, sqe), INVALID_OPCODE, "{opcode:#x}");
        }
    }
    let block = sgl::data_block(sentinel.gpa(), 512);
    let sqe = Sqe::read(1, 0, 1).with_data(DataPointer::sgl(block));
    assert_eq!(status(&mut disk.queue, sqe), INVALID_FIELD);
    sentinel.check();
    disk.verify(0, 8).unwrap();
    assert_eq!(controller.status().unwrap(), 1);
}

#[test]
fn health_is_per_drive_and_statistics_are_per_lease() {
    let drive = ScriptedController::new(|_| ());
    let host = drive.host(1);
    let neighbour = Bystander::start(&host, &Setup::nth(1));
    let machine = host.machine(&Setup::nth(0));
    let (mut controller, mut disk) = machine.disk();
    disk.write(0, &[0xA5; 4096]).unwrap();
    disk.read(0, 8).unwrap();
    disk.read(8, 8).unwrap();
    // The device counts a command after it posts the completion. When Flush completes, earlier commands are counted.
    disk.flush().unwrap();
    let page = read_log(&mut controller, log::SMART, 512);
    assert_eq!(page[..3], [0, 0x2C, 0x01], "no warning, 300 K");
    assert_eq!(page[3..6], [0x77; 3], "spare and wear");
    assert_eq!(page[128..144], [0x77; 16], "power on hours");
    let counters = [32, 48, 64, 80, 160, 176];
    let counters = counters.map(|at| u128::from_le_bytes(page[at..][..16].try_into().unwrap()));
    assert_eq!(
        counters,
        [1, 1, 2, 1, 0, 0],
        "data units, commands and errors"
    );
    neighbour.finish();
}

#[test]
fn a_guest_that_asks_on_and_on_does_not_keep_the_drive_busy() {
    let drive = ScriptedController::new(|_| ());
    let host = drive.host(1);
    let machine = host.machine(&Setup::nth(0));
    let mut controller = machine.attach();
    let begun = std::time::Instant::now();
    for _ in 0..1000 {
        read_log(&mut controller, log::SMART, 512);
    }
    let most = begun.elapsed().as_secs() + 1;
    let reads = u64::from(drive.health_reads());
    assert!((1..=most).contains(&reads), "{reads} reads in {most} s");
}

#[test]
fn a_temperature_beyond_the_guests_threshold_is_an_event_once() {
    let drive = ScriptedController::new(|_| ());
    let host = drive.host(1);
    let machine = host.machine(&Setup::nth(0));
    let other = host.machine(&Setup::nth(1));
    let mut controller = listening(&machine, TEMPERATURE);
    let mut patient = listening(&other, TEMPERATURE);
    controller
        .set_feature(feature::TEMPERATURE_THRESHOLD, 0, 320)
        .unwrap();
    expect_no_event(&machine, &mut controller);

    drive.heat(325);
    drive.report_event(DriveEvent::Health);
    assert_eq!(next_event(&mut controller), SMART_TEMPERATURE);
    // The temperature exceeds the drive's threshold, but not this guest's own threshold.
    expect_no_event(&other, &mut patient);

    drive.report_event(DriveEvent::Health);
    expect_no_event(&machine, &mut controller);
    assert_eq!(
        read_log(&mut controller, log::SMART, 512)[0],
        TEMPERATURE as u8
    );
    expect_no_event(&machine, &mut controller);

    // Cooling down and heating up again causes another event.
    drive.heat(300);
    drive.report_event(DriveEvent::Health);
    expect_no_event(&machine, &mut controller);
    drive.heat(350);
    drive.report_event(DriveEvent::Health);
    assert_eq!(next_event(&mut controller), SMART_TEMPERATURE);
    assert_eq!(next_event(&mut patient), SMART_TEMPERATURE);
}

#[test]
fn drive_warnings_are_reported_once_until_read() {
    let drive = ScriptedController::new(|_| ());
    let host = drive.host(1);
    let machine = host.machine(&Setup::nth(0));
    let other = host.machine(&Setup::nth(1));
    let mut controller = listening(&machine, ALL_EVENTS);
    let mut deaf = listening(&other, 0);
    controller.request_async_event().unwrap();

    let failing = CriticalWarning::default()
        .with_spare(true)
        .with_read_only(true);
    drive.warn(failing);
    drive.report_event(DriveEvent::Health);
    assert_eq!(next_event(&mut controller), SMART_SPARE);
    // The second event is held back until the guest has read the log page of the first.
    expect_no_event(&machine, &mut controller);
    assert_eq!(read_log(&mut controller, log::SMART, 512)[0], failing.0);
    assert_eq!(next_event(&mut controller), SMART_RELIABILITY);
    expect_no_event(&other, &mut deaf);

    // A guest that enables an event gets it for a present condition.
    deaf.set_feature(feature::ASYNC_EVENT_CONFIG, 0, 0b1000)
        .unwrap();
    assert_eq!(next_event(&mut deaf), SMART_RELIABILITY);
}

#[test]
fn namespace_changes_reach_only_its_guests() {
    let drive = ScriptedController::new(|_| ());
    let hosts = [drive.host(1), drive.host(2)];
    let machines = [0, 1].map(|index: usize| hosts[index].machine(&Setup::nth(0)));
    let [mut first, mut second] =
        [0, 1].map(|index: usize| listening(&machines[index], ALL_EVENTS));
    // The namespace grows, which does not affect a lease.
    drive.change_namespaces(|namespaces| namespaces[1].blocks *= 2);
    drive.report_event(DriveEvent::NamespaceChanged(Nsid(2)));

    assert_eq!(next_event(&mut second), NAMESPACE_CHANGED);
    let log_page = LogPage {
        retain: true,
        ..LogPage::of_controller(log::CHANGED_NAMESPACES, 4096)
    };
    for page in [
        second.log_page(log_page).unwrap(),
        read_log(&mut second, log::CHANGED_NAMESPACES, 4096),
    ] {
        assert_eq!(
            page[..8],
            [1, 0, 0, 0, 0, 0, 0, 0],
            "as the guest numbers it"
        );
    }
    let page = read_log(&mut second, log::CHANGED_NAMESPACES, 4096);
    assert_eq!(page, [0; 4096], "it was read");
    assert_eq!(second.active_namespaces(0).unwrap(), [1]);

    expect_no_event(&machines[0], &mut first);
    let page = read_log(&mut first, log::CHANGED_NAMESPACES, 4096);
    assert_eq!(page, [0; 4096], "another guest's");
}

/// A guest, and a bystander on the other namespace. The test changes the guest's namespace.
struct Scene {
    drive: Arc<ScriptedController>,
    machine: Machine,
    controller: Controller,
    disk: nvme_mpt_tests::disk::Disk,
    bystander: Bystander,
}

fn scene() -> Scene {
    let drive = ScriptedController::new(|_| ());
    let bystander = Bystander::start(&drive.host(2), &Setup::nth(0));
    let machine = drive.host(1).machine(&Setup::nth(0));
    let (mut controller, mut disk) = machine.disk();
    controller
        .set_feature(feature::ASYNC_EVENT_CONFIG, 0, ALL_EVENTS)
        .unwrap();
    controller.request_async_event().unwrap();
    disk.write(0, &[0xA5; 4096]).unwrap();
    Scene {
        drive,
        machine,
        controller,
        disk,
        bystander,
    }
}

#[test]
fn a_namespace_with_different_blocks_is_lost_to_the_guest() {
    for case in ["formatted", "shrunk", "detached"] {
        let mut scene = scene();
        scene.drive.change_namespaces(|namespaces| match case {
            "formatted" => {
                namespaces[0].lba_shift = 12;
                namespaces[0].blocks >>= 3;
            }
            "shrunk" => namespaces[0].blocks = 100,
            _ => drop(namespaces.remove(0)),
        });
        scene
            .drive
            .report_event(DriveEvent::NamespaceChanged(Nsid(1)));
        assert_eq!(next_event(&mut scene.controller), NAMESPACE_CHANGED);
        assert_eq!(
            scene.controller.active_namespaces(0).unwrap(),
            [0; 0],
            "{case}"
        );
        let structure = scene.controller.identify(cns::NAMESPACE, 1, 0).unwrap();
        assert_eq!(structure, [0; 4096], "{case}");

        let sentinel = Sentinel::new(&scene.machine.memory, 4096);
        let data = DataPointer::prp(sentinel.gpa(), 0);
        for sqe in [Sqe::read(1, 0, 1), Sqe::write(1, 0, 1)] {
            let status = status(&mut scene.disk.queue, sqe.with_data(data));
            assert_eq!(status, INVALID_NAMESPACE, "{case}");
        }
        sentinel.check();
        let failed = failed_create_status(&mut scene.controller, 2);
        assert_eq!(failed, INTERNAL_ERROR, "{case}");
        assert_eq!(scene.controller.status().unwrap(), 1, "it works");
        scene.bystander.finish();
    }
}

#[test]
fn a_guest_whose_drive_is_gone_loses_its_namespace_and_no_more() {
    let mut scene = scene();
    scene.drive.remove();
    assert_eq!(next_event(&mut scene.controller), NAMESPACE_CHANGED);
    assert_eq!(next_event(&mut scene.controller), SMART_RELIABILITY);
    assert_eq!(scene.controller.active_namespaces(0).unwrap(), [0; 0]);
    let errors = read_log(&mut scene.controller, log::ERROR, 64);
    assert_eq!(errors[..8], 1_u64.to_le_bytes(), "one error");
    assert_eq!(errors[8..12], [0xFF; 4], "of no command");
    let health = read_log(&mut scene.controller, log::SMART, 512);
    assert_eq!(health[0], 0b100, "not reliable");

    // After a reset, the controller works, and has no namespace.
    for _ in 0..3 {
        scene.controller.reset().unwrap();
        assert_eq!(scene.controller.active_namespaces(0).unwrap(), [0; 0]);
        let failed = failed_create_status(&mut scene.controller, 1);
        assert_eq!(failed, INTERNAL_ERROR);
    }
    scene.controller.shutdown(false).unwrap();
}

#[test]
fn a_drive_reset_causes_no_guest_event() {
    let mut scene = scene();
    scene.drive.report_event(DriveEvent::Reset);
    expect_no_event(&scene.machine, &mut scene.controller);
    let errors = read_log(&mut scene.controller, log::ERROR, 64);
    assert_eq!(errors, [0; 64]);
    assert_eq!(
        status(&mut scene.disk.queue, Sqe::flush(1)),
        SUCCESS,
        "it goes on"
    );
    scene.bystander.finish();
}
