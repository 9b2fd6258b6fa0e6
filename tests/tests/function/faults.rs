//! Fault injection: effects of each kind of fault on a guest. Another guest must notice only faults of the drive as a whole.

use std::sync::Arc;
use std::time::{Duration, Instant};

use nvme_layers::LayeredController;
use nvme_layers::faults::{FaultInjector, FaultPlan};
use nvme_models::DriveProfile;
use nvme_mpt_tests::Error;
use nvme_mpt_tests::admin::{AsyncEvent, LogPage, feature, log};
use nvme_mpt_tests::command::{Sqe, io};
use nvme_mpt_tests::controller::{Controller, QueueOptions};
use nvme_mpt_tests::prp;
use nvme_mpt_tests::status::{
    ABORTED_SQ_DELETION, INTERNAL_ERROR, LBA_OUT_OF_RANGE, SUCCESS, StatusCode,
    UNRECOVERED_READ_ERROR, WRITE_FAULT,
};
use nvme_mpt_vmm::drives::{self, DriveOptions};

use crate::common::bystander::Bystander;
use crate::common::sentinel::Sentinel;
use crate::common::{HANG, Host, LEASE, Machine, Setup, disk, queue_pair, status, wait_for};

/// Kinds of backing stores. Each test uses all of them.
const STORES: [&str; 2] = ["memory:32M", "file"];

/// A drive with space for two leases and with faults, and its file if there is one.
struct FaultyHost {
    host: Host,
    _file: Option<tempfile::NamedTempFile>,
}

impl FaultyHost {
    fn new(store: &str, plan: &str) -> Self {
        Self::timed(store, plan, None)
    }

    fn timed(store: &str, plan: &str, profile: Option<&str>) -> Self {
        let file = (store == "file").then(|| {
            let file = tempfile::NamedTempFile::new().unwrap();
            file.as_file().set_len(2 * LEASE).unwrap();
            file
        });
        let path = match &file {
            Some(file) => file.path().to_str().unwrap(),
            None => store,
        };
        let options = DriveOptions {
            faults: Some(Arc::new(FaultPlan::parse("test", plan).unwrap())),
            profile: profile.map(|name| Arc::new(DriveProfile::find_built_in(name).unwrap())),
            ..DriveOptions::default()
        };
        Self {
            host: Host::from_drive(drives::open(&path.parse().unwrap(), options).unwrap()),
            _file: file,
        }
    }

    fn faults(&self) -> &FaultInjector {
        let drive = LayeredController::downcast(self.host.drive.controller());
        drive.and_then(LayeredController::faults).unwrap()
    }

    /// Returns the number of affected commands for each fault.
    fn struck_commands(&self) -> Vec<u64> {
        let faults = self.faults().stats();
        faults.iter().map(|fault| fault.struck).collect()
    }

    fn inject(&self, plan: &str) {
        let plan = FaultPlan::parse("test", plan).unwrap();
        let faults = self.faults();
        faults.inject(&plan).unwrap();
    }
}

/// Executes a command that must not change its buffer of 4 KiB.
#[track_caller]
fn failed_status(
    machine: &Machine,
    controller: &mut Controller,
    queue: u16,
    sqe: Sqe,
) -> StatusCode {
    let sentinel = Sentinel::new(&machine.memory, 4096);
    let data = nvme_mpt_tests::command::DataPointer::prp(sentinel.gpa(), 0);
    let mut pair = queue_pair(controller, queue, 16);
    let status = status(&mut pair, sqe.with_data(data));
    controller.delete_queue_pair(pair).unwrap();
    sentinel.check();
    status
}

#[test]
fn media_errors_are_told_and_change_nothing() {
    for profile in [None, Some("nvm")] {
        for store in STORES {
            let plan = "[[fault]]\nkind = \"media-error\"\nrange = \"64K+4K\"\n";
            let drive = FaultyHost::timed(store, plan, profile);
            let bystander = Bystander::start(&drive.host, &Setup::nth(1));
            let machine = drive.host.machine(&Setup::nth(0));
            let (mut controller, mut disk) = machine.disk();
            // Write these blocks before media errors are active.
            drive.faults().clear();
            disk.write(120, &[0xA5; 24 * 512]).unwrap();
            drive.inject(plan);
            for (sqe, expected) in [
                (Sqe::read(1, 128, 8), UNRECOVERED_READ_ERROR),
                (Sqe::read(1, 121, 8), UNRECOVERED_READ_ERROR),
                (Sqe::range(io::COMPARE, 1, 135, 2), UNRECOVERED_READ_ERROR),
                (Sqe::range(io::VERIFY, 1, 128, 1), UNRECOVERED_READ_ERROR),
                (Sqe::write(1, 128, 8), WRITE_FAULT),
                (Sqe::range(io::WRITE_ZEROES, 1, 128, 8), WRITE_FAULT),
                (Sqe::range(io::WRITE_UNCORRECTABLE, 1, 135, 8), WRITE_FAULT),
            ] {
                let status = failed_status(&machine, &mut controller, 2, sqe);
                assert_eq!(status, expected, "{store} {sqe:?}");
            }
            assert_eq!(disk.read(120, 8).unwrap(), [0xA5; 4096]);
            assert_eq!(disk.read(136, 8).unwrap(), [0xA5; 4096]);
            assert_eq!(status(&mut disk.queue, Sqe::flush(1)), SUCCESS);
            let log = controller
                .log_page(LogPage::of_controller(log::ERROR, 64 * 8))
                .unwrap();
            assert_eq!(log[16..24], 135_u64.to_le_bytes(), "the newest error's LBA");
            let health = controller
                .log_page(LogPage::of_controller(log::SMART, 512))
                .unwrap();
            assert_eq!(health[160], 7, "media errors");
            assert_eq!(drive.struck_commands(), [7]);
            let errors = machine.function().backend().stats().errors;
            let errors: Vec<_> = errors
                .iter()
                .map(|error| (error.status.as_str(), error.commands))
                .collect();
            assert_eq!(errors, [("Unrecovered Read Error", 4), ("Write Fault", 3)]);
            // Media errors are off again. No failed command has had an effect.
            drive.faults().clear();
            assert_eq!(disk.read(120, 24).unwrap(), [0xA5; 24 * 512]);
            bystander.finish();
        }
    }
}

#[test]
fn a_latency_fault_delays_matching_commands() {
    // The system clock may be slewed by up to 500 ppm, and the test compares the drive's time with it.
    const DELAY_MIN: Duration = Duration::from_millis(299);
    for store in STORES {
        let plan = "[[fault]]\nkind = \"latency\"\nadd = \"300ms\"\noperations = [\"write\"]\n\
                    range = \"0+16M\"\nafter = 1\ncount = 4\n";
        let drive = FaultyHost::timed(store, plan, Some("nvm"));
        let bystander = Bystander::start(&drive.host, &Setup::nth(1));
        let machine = drive.host.machine(&Setup::nth(0));
        let (_controller, mut disk) = machine.disk();
        let data = machine.memory.alloc(4096).unwrap();
        let pointer = prp::buffer(&data, 0, 4096).unwrap().pointer;
        let mut taken = |sqe: Sqe| {
            let begin = Instant::now();
            let status = status(&mut disk.queue, sqe.with_data(pointer));
            assert_eq!(status, SUCCESS);
            begin.elapsed()
        };
        taken(Sqe::write(1, 0, 8));
        for lba in 0..4 {
            let taken = taken(Sqe::write(1, lba, 8));
            assert!(taken >= DELAY_MIN, "{store}: {taken:?}");
        }
        for _ in 0..20 {
            taken(Sqe::write(1, 0, 8));
            taken(Sqe::read(1, 0, 8));
        }
        assert_eq!(drive.struck_commands(), [4]);
        bystander.finish();
    }
}

#[test]
fn a_lost_command_ends_with_its_queue_and_the_others_go_on() {
    for store in STORES {
        let plan =
            "[[fault]]\nkind = \"lost\"\noperations = [\"write\"]\nrange = \"0+16M\"\ncount = 3\n";
        let drive = FaultyHost::new(store, plan);
        let bystander = Bystander::start(&drive.host, &Setup::nth(1));
        let machine = drive.host.machine(&Setup::nth(0));
        let (mut controller, mut disk) = machine.disk();
        let data = machine.memory.alloc(4096).unwrap();
        let pointer = prp::buffer(&data, 0, 4096).unwrap().pointer;
        let write = Sqe::write(1, 8, 8).with_data(pointer);

        // Abort does not reach the command, but the deletion of its queue ends it.
        let mut queue = queue_pair(&mut controller, 2, 16);
        assert!(queue.push(&write.with_cid(7)));
        queue.ring();
        wait_for("the fault strikes", || drive.struck_commands() == [1]);
        wait_for("it is counted", || machine.queue_stats(2).in_flight == 1);
        assert_eq!(
            disk.read(8, 8).unwrap(),
            [0; 4096],
            "it was not carried out"
        );
        assert!(!controller.abort(2, 7).unwrap());
        assert!(queue.poll().is_none());
        let mut queue = controller.delete_queue_pair(queue).unwrap();
        let lost = queue.poll().expect("its completion");
        assert_eq!((lost.cid(), lost.status().code()), (7, ABORTED_SQ_DELETION));
        assert_eq!(machine.queue_stats(2).in_flight, 0);

        // A reset of the controller ends it.
        for reset in 0..2 {
            let mut queue = queue_pair(&mut controller, 3, 16);
            assert!(queue.push(&write));
            queue.ring();
            wait_for("the fault strikes", || {
                drive.struck_commands() == [2 + reset]
            });
            let waited = drive.host.clock.waited();
            controller.reset().unwrap();
            assert_eq!(drive.host.clock.waited(), waited);
            controller.set_number_of_queues(4).unwrap();
        }
        disk = crate::common::disk(&mut controller, 1);
        disk.write(8, &[0x5A; 4096]).unwrap();
        assert_eq!(disk.read(8, 8).unwrap(), [0x5A; 4096]);
        bystander.finish();
    }
}

#[test]
fn a_fatal_status_is_one_controllers_and_a_reset_cures_it() {
    for store in STORES {
        let plan =
            "[[fault]]\nkind = \"fatal\"\noperations = [\"read\"]\nrange = \"0+16M\"\nafter = 10\n";
        let drive = FaultyHost::new(store, plan);
        let bystander = Bystander::start(&drive.host, &Setup::nth(1));
        let machine = drive.host.machine(&Setup::nth(0));
        let (mut controller, mut disk) = machine.disk();
        disk.write(0, &[0xC3; 4096]).unwrap();
        for _ in 0..10 {
            disk.read(0, 8).unwrap();
        }
        assert_eq!(controller.status().unwrap(), 1, "ready and nothing else");
        let data = machine.memory.alloc(4096).unwrap();
        let pointer = prp::buffer(&data, 0, 4096).unwrap().pointer;
        assert!(disk.queue.push(&Sqe::read(1, 0, 8).with_data(pointer)));
        disk.queue.ring();
        machine.wait_fatal(&controller);
        assert!(disk.queue.poll().is_none(), "it never completes");
        drop(disk);
        controller.reset().unwrap();
        controller.set_number_of_queues(4).unwrap();
        let mut disk = crate::common::disk(&mut controller, 1);
        assert_eq!(disk.read(0, 8).unwrap(), [0xC3; 4096]);
        assert_eq!(drive.struck_commands(), [1]);
        bystander.finish();
    }
}

/// Waits for the next event.
#[track_caller]
fn next_event(controller: &mut Controller) -> AsyncEvent {
    let event = controller.async_event(HANG).unwrap().expect("an event");
    controller.request_async_event().unwrap();
    event
}

const NAMESPACE_CHANGED: AsyncEvent = AsyncEvent {
    kind: 2,
    info: 0,
    log_page: log::CHANGED_NAMESPACES,
};

/// Attaches a driver that enables namespace notices.
fn listening(machine: &Machine) -> Controller {
    let mut controller = machine.attach();
    controller
        .set_feature(feature::ASYNC_EVENT_CONFIG, 0, 1 << 8)
        .unwrap();
    controller.request_async_event().unwrap();
    controller
}

fn changed_namespaces(controller: &mut Controller) -> u32 {
    let page = LogPage::of_controller(log::CHANGED_NAMESPACES, 4096);
    let page = controller.log_page(page).unwrap();
    u32::from_le_bytes(page[..4].try_into().unwrap())
}

#[test]
fn a_drive_that_is_removed_is_gone_for_all_its_guests() {
    for store in STORES {
        let plan = "[[fault]]\nkind = \"lost\"\noperations = [\"write\"]\nrange = \"16M+4K\"\n\
                    [[fault]]\nkind = \"removal\"\noperations = [\"flush\"]\n";
        let drive = FaultyHost::new(store, plan);
        let machines = [0, 1].map(|index| drive.host.machine(&Setup::nth(index)));
        let mut controllers = [0, 1].map(|index: usize| listening(&machines[index]));
        let [mut first, mut second] = [0, 1].map(|index| disk(&mut controllers[index], 1));
        first.write(0, &[1; 4096]).unwrap();
        // Commands that wait forever never complete. The removal ends this one.
        let data = machines[1].memory.alloc(4096).unwrap();
        let pointer = prp::buffer(&data, 0, 4096).unwrap().pointer;
        assert!(second.queue.push(&Sqe::write(1, 0, 8).with_data(pointer)));
        second.queue.ring();
        wait_for("the fault strikes", || drive.struck_commands()[0] == 1);

        assert_eq!(status(&mut first.queue, Sqe::flush(1)), INTERNAL_ERROR);
        let mut lost = None;
        wait_for("the lost command ends", || {
            lost = second.queue.poll();
            lost.is_some()
        });
        let lost = lost.unwrap().status();
        assert_eq!((lost.code(), lost.do_not_retry()), (INTERNAL_ERROR, true));
        for (controller, disk) in controllers.iter_mut().zip([&mut first, &mut second]) {
            assert_eq!(status(&mut disk.queue, Sqe::flush(1)), INTERNAL_ERROR);
            assert_eq!(next_event(controller), NAMESPACE_CHANGED);
            assert_eq!(changed_namespaces(controller), 1);
            assert_eq!(controller.active_namespaces(0).unwrap(), [0; 0]);
            assert_eq!(controller.status().unwrap(), 1, "the controller works");
            controller.reset().unwrap();
            controller.set_number_of_queues(4).unwrap();
            let refused = controller.create_queue_pair(1, &QueueOptions::polled(16));
            let Err(Error::Status { cqe, .. }) = refused else {
                panic!("a queue on a drive that is gone");
            };
            assert_eq!(cqe.status().code(), INTERNAL_ERROR);
            controller.shutdown(false).unwrap();
        }
    }
}

#[test]
fn a_namespace_that_is_resized_has_another_size() {
    for store in STORES {
        let drive = FaultyHost::new(store, "");
        let bystander = Bystander::start(&drive.host, &Setup::nth(0));
        let machine = drive.host.machine(&Setup::nth(1));
        let mut controller = listening(&machine);
        let mut disk = disk(&mut controller, 1);
        let blocks = LEASE / 512;
        disk.write(0, &[0x11; 4096]).unwrap();
        disk.write(blocks - 8, &[0x22; 4096]).unwrap();
        for (size, left) in [("24M", blocks / 2), ("32M", blocks)] {
            // The next command of any guest triggers the resize.
            drive.inject(&format!(
                "[[fault]]\nkind = \"resize\"\nsize = \"{size}\"\n"
            ));
            assert_eq!(next_event(&mut controller), NAMESPACE_CHANGED);
            assert_eq!(changed_namespaces(&mut controller), 1);
            assert_eq!(controller.active_namespaces(0).unwrap(), [1]);
            let namespace = controller.identify_namespace(1).unwrap();
            assert_eq!((namespace.nsze, namespace.ncap), (left, left));
            assert_eq!(disk.read(0, 8).unwrap(), [0x11; 4096]);
            let last = failed_status(&machine, &mut controller, 2, Sqe::write(1, left, 1));
            assert_eq!(last, LBA_OUT_OF_RANGE);
            disk.read(left - 8, 8).unwrap();
        }
        assert_eq!(disk.read(blocks - 8, 8).unwrap(), [0x22; 4096]);
        bystander.finish();

        // A lease that begins beyond the end of the drive has no namespace.
        drive.inject("[[fault]]\nkind = \"resize\"\nsize = \"16M\"\n");
        status(&mut disk.queue, Sqe::flush(1));
        assert_eq!(next_event(&mut controller), NAMESPACE_CHANGED);
        assert_eq!(controller.active_namespaces(0).unwrap(), [0; 0]);
        assert_eq!(controller.status().unwrap(), 1, "the controller works");
    }
}

#[test]
fn faults_of_a_guest_do_not_depend_on_other_guests() {
    let plan =
        "seed = 3\n[[fault]]\nkind = \"media-error\"\nrange = \"0+16M\"\nprobability = 0.2\n";
    let run = |with_other: bool| -> Vec<StatusCode> {
        let drive = FaultyHost::new("memory:32M", plan);
        let other = with_other.then(|| Bystander::start(&drive.host, &Setup::nth(1)));
        let machine = drive.host.machine(&Setup::nth(0));
        let (_controller, mut disk) = machine.disk();
        let data = machine.memory.alloc(4096).unwrap();
        let pointer = prp::buffer(&data, 0, 4096).unwrap().pointer;
        let statuses = (0..500)
            .map(|lba| status(&mut disk.queue, Sqe::read(1, lba, 8).with_data(pointer)))
            .collect();
        if let Some(other) = other {
            other.finish();
        }
        statuses
    };
    let alone = run(false);
    assert_eq!(alone, run(true));
    let bad = alone
        .iter()
        .filter(|status| **status == UNRECOVERED_READ_ERROR);
    assert!((60..140).contains(&bad.count()));
}
