//! Events reported by the drive, up to the guests.

use std::time::Duration;

use nvme_mpt::drive::DriveIncidents;
use nvme_mpt_tests::admin::{LogPage, feature, log};
use nvme_mpt_tests::command::{Sqe, admin, io};
use nvme_mpt_tests::controller::Controller;
use nvme_mpt_tests::drive::{Effect, Fault, FaultMatch, ModelDrive, NamespaceOptions, Options};
use nvme_mpt_tests::identify::field;
use nvme_mpt_tests::status::{
    INVALID_FIELD, INVALID_NAMESPACE, NAMESPACE_NOT_READY, SUCCESS, WRITE_PROTECTED,
};

use crate::common::{HANG, Host, LEASE, LONG, Machine, Setup, open, queue_pair, status, wait_for};
use crate::load::Load;

/// Asynchronous Event Configuration: temperature, and Namespace Attribute Notices.
const EVENTS: u32 = 0b010 | 1 << 8;

fn host() -> Host {
    let options = Options {
        namespaces: vec![
            NamespaceOptions::new(1, 2 * LEASE, 512),
            NamespaceOptions::new(2, LEASE, 4096),
        ],
        queue_pairs: 2,
        ..Options::default()
    };
    Host::with(options, LONG)
}

fn listening(machine: &Machine) -> Controller {
    let mut controller = machine.attach();
    let set = controller.set_feature(feature::ASYNC_EVENT_CONFIG, 0, EVENTS);
    set.unwrap();
    for _ in 0..2 {
        controller.request_async_event().unwrap();
    }
    controller
}

#[test]
fn heat_is_told_to_every_guest() {
    let host = host();
    let machines = [host.machine(&Setup::nth(0)), host.machine(&Setup::nth(1))];
    let mut controllers = machines.each_ref().map(listening);
    for temperature in [365, 366] {
        host.model.report_temperature(temperature);
        for controller in &mut controllers {
            let event = controller.async_event(HANG).unwrap().expect("an event");
            assert_eq!((event.kind, event.info, event.log_page), (1, 1, log::SMART));
            controller.request_async_event().unwrap();
            let page = LogPage::of_controller(log::SMART, 512);
            let health = controller.log_page(page).unwrap();
            assert_eq!(health[0] & 0b10, 0b10, "the temperature is critical");
            assert!(field::u16(&health, 1) >= 365);
        }
        if temperature == 365 {
            // Cool down, so that heating up is a new event.
            host.model.clear_temperature(300);
            let page = LogPage::of_controller(log::SMART, 512);
            // A function reads the drive's health at most once per second.
            host.clock.advance(Duration::from_secs(1));
            for controller in &mut controllers {
                let health = controller.log_page(page).unwrap();
                assert_eq!(health[0] & 0b10, 0, "a cool drive");
            }
        }
    }
    drop((controllers, machines));
    host.finish();
}

#[test]
fn namespace_changes_reach_only_its_guests() {
    let host = host();
    let namespaces = host.drive.controller().namespaces();
    let other = crate::function::Host {
        drive: host.drive.sibling(Some(namespaces[1].nsid)).unwrap(),
        ..crate::function::Host::from_drive(host.drive.clone())
    };
    let load = Load::start(&host, &Setup::nth(0), 1, 8);
    let machines = [host.machine(&Setup::nth(1)), other.machine(&Setup::nth(0))];
    let mut controllers = machines.each_ref().map(listening);
    host.model.resize(2, 2 * LEASE / 4096);
    let event = controllers[1].async_event(HANG).unwrap();
    let event = event.expect("an event");
    let want = (2, 0, log::CHANGED_NAMESPACES);
    assert_eq!((event.kind, event.info, event.log_page), want);
    // The host has examined all namespaces by now, and the first namespace has no event.
    let nothing = controllers[0].async_event(Duration::ZERO);
    assert_eq!(nothing.unwrap(), None);
    assert_eq!(
        host.drive.controller().namespaces()[1].blocks,
        2 * LEASE / 4096
    );
    load.wait_for_progress();
    load.finish_undisturbed();
    drop((controllers, machines, other));
    host.finish();
}

/// Waits until a guest gets an event about its namespace.
#[track_caller]
fn expect_namespace_event(controller: &mut Controller) {
    let event = controller.async_event(HANG).unwrap().expect("an event");
    let want = (2, 0, log::CHANGED_NAMESPACES);
    assert_eq!((event.kind, event.info, event.log_page), want);
}

#[test]
fn the_only_namespace_disappears_when_its_blocks_are_lost() {
    let options = Options {
        namespaces: vec![NamespaceOptions::new(1, 2 * LEASE, 512)],
        ..Options::default()
    };
    let host = Host::with(options, LONG);
    let machine = host.machine(&Setup::nth(0));
    let mut controller = listening(&machine);
    let mut queue = queue_pair(&mut controller, 1, 16);
    assert_eq!(status(&mut queue, Sqe::flush(1)), SUCCESS);
    host.model.format_with_metadata(1, 8);
    // The result does not matter.
    wait_for("the end of its commands", || {
        status(&mut queue, Sqe::flush(1)) == INVALID_NAMESPACE
    });
    expect_namespace_event(&mut controller);
    assert!(host.drive.controller().namespaces().is_empty());
    assert_eq!(controller.active_namespaces(0).unwrap(), [0; 0]);
    drop((queue, controller, machine));
    host.finish();
}

#[test]
fn a_namespace_change_is_reported_although_a_reset_drops_the_event() {
    let host = host();
    let machine = host.machine(&Setup::nth(0));
    let mut controller = listening(&machine);
    // The failed drive executes nothing, and keeps its event until it is reset.
    host.model.fail();
    host.model.resize(1, LEASE / 512);
    expect_namespace_event(&mut controller);
    assert_eq!(host.drive.controller().namespaces()[0].blocks, LEASE / 512);
    drop((controller, machine));
    host.finish();
}

#[test]
fn a_namespace_change_is_reported_although_the_first_read_fails() {
    let host = host();
    let machine = host.machine(&Setup::nth(0));
    let mut controller = listening(&machine);
    let fail = Effect::Fail(NAMESPACE_NOT_READY, false);
    host.model
        .inject(Fault::once(FaultMatch::Admin(admin::IDENTIFY), fail).times(3));
    host.model.resize(1, LEASE / 512);
    expect_namespace_event(&mut controller);
    assert_eq!(host.drive.controller().namespaces()[0].blocks, LEASE / 512);
    drop((controller, machine));
    host.finish();
}

#[test]
fn a_drive_that_knows_fewer_warnings_tells_of_its_namespaces() {
    let options = Options {
        namespaces: vec![NamespaceOptions::new(1, 2 * LEASE, 512)],
        ..Options::default()
    };
    let model = ModelDrive::start(options);
    // Number of Queues, then Asynchronous Event Configuration.
    let refuse = Effect::Fail(INVALID_FIELD, true);
    model.inject(Fault::once(FaultMatch::Admin(admin::SET_FEATURES), refuse).after(1));
    let host = Host::from_drive(open(&model, LONG).unwrap(), model);
    assert_eq!(host.model.counters().faults_matched, 1);
    let machine = host.machine(&Setup::nth(0));
    let mut controller = listening(&machine);
    host.model.resize(1, LEASE / 512);
    expect_namespace_event(&mut controller);
    drop((controller, machine));
    host.finish();
}

/// After an event, a drive raises no other event of its type until the host has read the event's log page.
#[test]
fn an_event_that_was_not_asked_for_masks_no_other() {
    for (info, log_page) in [
        (2, log::TELEMETRY_CONTROLLER_INITIATED),
        (5, log::ENDURANCE_GROUP_EVENTS),
    ] {
        let host = host();
        let machine = host.machine(&Setup::nth(0));
        let mut controller = listening(&machine);
        host.model.report_notice(info, log_page);
        host.model.resize(1, LEASE / 512);
        expect_namespace_event(&mut controller);
        assert_eq!(host.incidents(), DriveIncidents::default());
        drop((controller, machine));
        host.finish();
    }
}

/// The drive answers no command while it activates firmware, so the event's log page must not be read before.
#[test]
fn firmware_that_is_activated_causes_no_reset() {
    let options = Options {
        namespaces: vec![NamespaceOptions::new(1, 2 * LEASE, 512)],
        ..Options::default()
    };
    let host = Host::with(options, Duration::from_secs(10));
    let machine = host.machine(&Setup::nth(0));
    let mut controller = listening(&machine);
    let timeout = Duration::from_secs(2);
    host.model.set_admin_timeout(Some(timeout));
    host.model.start_firmware_activation();
    // The driver gets the event before it can see the pause.
    std::thread::sleep(Duration::from_millis(300));
    host.model.pause();
    std::thread::sleep(2 * timeout);
    host.model.resume();
    host.model.resize(1, LEASE / 512);
    expect_namespace_event(&mut controller);
    assert_eq!(host.incidents(), DriveIncidents::default());
    drop((controller, machine));
    host.finish();
}

#[test]
fn a_drive_that_becomes_read_only_fails_writes_and_says_so() {
    let host = host();
    let machine = host.machine(&Setup::nth(0));
    let mut controller = machine.attach();
    let read_only = 1 << 3;
    controller
        .set_feature(feature::ASYNC_EVENT_CONFIG, 0, read_only)
        .unwrap();
    controller.request_async_event().unwrap();
    let mut queue = queue_pair(&mut controller, 1, 16);
    let data = machine.memory.alloc(512).unwrap();
    let buffer = nvme_mpt_tests::prp::buffer(&data, 0, 512).unwrap();
    let [read, write] =
        [Sqe::read(1, 0, 1), Sqe::write(1, 0, 1)].map(|sqe| sqe.with_data(buffer.pointer));
    assert_eq!(status(&mut queue, write), SUCCESS);
    for opcode in [io::WRITE, io::WRITE_ZEROES] {
        let effect = Effect::Fail(WRITE_PROTECTED, true);
        host.model
            .inject(Fault::once(FaultMatch::IoOpcode(opcode), effect).times(u64::MAX));
    }
    host.model.report_read_only();
    let event = controller.async_event(HANG).unwrap().expect("an event");
    assert_eq!((event.kind, event.info, event.log_page), (1, 0, log::SMART));
    let page = LogPage::of_controller(log::SMART, 512);
    assert_eq!(
        controller.log_page(page).unwrap()[0] & 0b1111,
        read_only as u8
    );
    for write in [write, Sqe::write_zeroes(1, 0, 1, false)] {
        let completion = queue.submit_and_wait(write, HANG).unwrap().status();
        assert_eq!(completion.code(), WRITE_PROTECTED);
        assert!(completion.do_not_retry());
    }
    assert_eq!(status(&mut queue, read), SUCCESS);
    assert_eq!(host.incidents(), DriveIncidents::default());
    drop((queue, controller, machine));
    host.finish();
}
