//! Invalid doorbell values, and doorbells of queues that do not exist (NVMe Base 2.0, section 3.1.4; asynchronous events,
//! section 5.2).

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use nvme_mpt_tests::admin::{AsyncEvent, LogPage, feature, log};
use nvme_mpt_tests::bar::Bar;
use nvme_mpt_tests::command::{Sqe, admin};
use nvme_mpt_tests::controller::{Config, Controller, QueueOptions};
use nvme_mpt_tests::doorbell::{DoorbellMode, Side};
use nvme_mpt_tests::queue::{CompletionQueue, SubmissionQueue};
use nvme_mpt_tests::status::SUCCESS;

use crate::common::bystander::Bystander;
use crate::common::{HANG, Host, MODES, Machine, Setup, queue_pair, status, wait_for};

const INVALID_REGISTER: AsyncEvent = AsyncEvent {
    kind: 0,
    info: 0,
    log_page: log::ERROR,
};
const INVALID_VALUE: AsyncEvent = AsyncEvent {
    kind: 0,
    info: 1,
    log_page: log::ERROR,
};

fn with_each_mode(test: impl Fn(Machine, Controller, DoorbellMode)) {
    for mode in MODES {
        let host = Host::new("memory:32M", 512);
        let bystander = Bystander::start(&host, &Setup::nth(1));
        let machine = host.machine(&Setup::nth(0).doorbells(mode));
        let controller = machine.attach();
        test(machine, controller, mode);
        bystander.finish();
    }
}

/// Creates queue pair 1, with queues of different sizes. Returns both queues.
fn queues(
    controller: &mut Controller,
    sq_entries: u32,
    cq_entries: u32,
) -> (SubmissionQueue, CompletionQueue) {
    let options = QueueOptions::polled(cq_entries);
    let mut cq = controller.create_cq(1, &options).unwrap();
    let mut sq = controller.create_sq(1, sq_entries, 1).unwrap();
    if let Some(buffer) = controller.doorbell_buffer() {
        sq.doorbell_mut().attach(buffer, 1, Side::SqTail);
        cq.doorbell_mut().attach(buffer, 1, Side::CqHead);
    }
    (sq, cq)
}

#[track_caller]
fn expect_event(controller: &mut Controller, want: AsyncEvent) {
    assert_eq!(controller.async_event(HANG).unwrap(), Some(want));
    // Reading the log page unmasks the event type.
    controller
        .log_page(LogPage::of_controller(log::ERROR, 64))
        .unwrap();
    request_event(controller);
}

/// Submits an Asynchronous Event Request. Returns when the controller has taken the request.
fn request_event(controller: &mut Controller) {
    controller.request_async_event().unwrap();
    assert_eq!(controller.active_namespaces(0).unwrap(), [1]);
}

/// Checks that no event is pending. The admin command would complete after the event.
#[track_caller]
fn expect_no_event(controller: &mut Controller) {
    assert_eq!(controller.active_namespaces(0).unwrap(), [1]);
    let outstanding = controller.outstanding_event_requests();
    let event = controller.async_event(std::time::Duration::ZERO).unwrap();
    assert_eq!(event, None);
    assert_eq!(controller.outstanding_event_requests(), outstanding);
}

#[test]
fn tails_beyond_the_queue() {
    with_each_mode(|machine, mut controller, mode| {
        let mut queue = queue_pair(&mut controller, 1, 8);
        request_event(&mut controller);
        for bad in [8, 9, 255, 0xffff, 0x1_0000, u32::MAX] {
            machine.write_raw_doorbell(&controller, 1, Side::SqTail, bad);
            expect_event(&mut controller, INVALID_VALUE);
            // Writing the same value again causes no second event.
            machine.write_raw_doorbell(&controller, 1, Side::SqTail, bad);
            machine.write_raw_doorbell(&controller, 1, Side::SqTail, bad);
            // The queue still works with valid values.
            for _ in 0..20 {
                assert_eq!(
                    status(&mut queue, Sqe::flush(1)),
                    SUCCESS,
                    "{mode:?} after {bad:#x}"
                );
            }
            expect_no_event(&mut controller);
        }
    });
}

#[test]
fn heads_beyond_the_queue() {
    with_each_mode(|machine, mut controller, mode| {
        let (mut sq, mut cq) = queues(&mut controller, 32, 4);
        request_event(&mut controller);
        let mut head = 0;
        for bad in [4, 5, 0xffff, 0x1_0001, u32::MAX] {
            // More commands than completion entries: the device waits for the head doorbell.
            for cid in 0..8 {
                assert!(sq.push(&Sqe::flush(1).with_cid(cid)));
            }
            let tail = sq.tail() as u16;
            sq.doorbell_mut().ring(tail);
            for cid in 0..8 {
                wait_for("a completion", || cq.has_entry());
                if cid == 0 {
                    machine.write_raw_doorbell(&controller, 1, Side::CqHead, bad);
                    expect_event(&mut controller, INVALID_VALUE);
                    machine.write_raw_doorbell(&controller, 1, Side::CqHead, head);
                }
                let cqe = cq.poll().unwrap();
                assert_eq!((cqe.cid(), cqe.status().code()), (cid, SUCCESS), "{mode:?}");
                sq.set_head(cqe.sq_head());
                head = cq.head();
                cq.doorbell_mut().ring(head as u16);
            }
            expect_no_event(&mut controller);
        }
    });
}

#[test]
fn heads_beyond_what_was_posted() {
    for mode in MODES {
        // There is no second guest: the poller examines an idle queue before it goes to sleep.
        let machine = Host::new("memory:16M", 512).machine(&Setup::nth(0).doorbells(mode));
        let mut controller = machine.attach();
        let mut queue = queue_pair(&mut controller, 1, 8);
        request_event(&mut controller);
        for _ in 0..3 {
            assert_eq!(status(&mut queue, Sqe::flush(1)), SUCCESS);
        }
        for bad in [4, 7, 5] {
            machine.write_raw_doorbell(&controller, 1, Side::CqHead, bad);
            expect_event(&mut controller, INVALID_VALUE);
        }
        machine.write_raw_doorbell(&controller, 1, Side::CqHead, queue.cq.head());
        for _ in 0..20 {
            assert_eq!(status(&mut queue, Sqe::flush(1)), SUCCESS, "{mode:?}");
        }
        expect_no_event(&mut controller);
    }
}

#[test]
fn doorbells_without_a_queue() {
    for mode in [DoorbellMode::Shadow, DoorbellMode::Trap] {
        let host = Host::new("memory:32M", 512);
        let bystander = Bystander::start(&host, &Setup::nth(1));
        let machine = host.machine(&Setup::nth(0).doorbells(mode));
        let mut controller = machine.attach();
        let mut queue = queue_pair(&mut controller, 1, 8);
        request_event(&mut controller);
        // Possible queues, impossible queues, and an offset between two doorbells.
        for (queue, side) in [
            (2, Side::SqTail),
            (3, Side::CqHead),
            (4, Side::SqTail),
            (5, Side::SqTail),
            (0x1ff, Side::CqHead),
        ] {
            controller.write_doorbell(queue, side, 1);
            expect_event(&mut controller, INVALID_REGISTER);
        }
        controller.bar().write32(0x1000 + 2, 1);
        expect_event(&mut controller, INVALID_REGISTER);
        assert_eq!(status(&mut queue, Sqe::flush(1)), SUCCESS);
        // A deleted queue.
        drop(controller.delete_queue_pair(queue).unwrap());
        controller.write_doorbell(1, Side::SqTail, 1);
        expect_event(&mut controller, INVALID_REGISTER);
        expect_no_event(&mut controller);
        bystander.finish();
    }
}

#[test]
fn admin_doorbells_beyond_the_queue() {
    with_each_mode(|machine, mut controller, _| {
        request_event(&mut controller);
        for bad in [32, 0xffff, u32::MAX] {
            machine.write_raw_doorbell(&controller, 0, Side::SqTail, bad);
            expect_event(&mut controller, INVALID_VALUE);
        }
        assert_eq!(controller.active_namespaces(0).unwrap(), [1]);
    });
}

/// Attaches a driver that uses the Doorbell Buffer for the admin queue too, like libvfn. The driver writes a register only when
/// EventIdx requires it.
fn buffered_admin_queue(machine: &Machine, bar: Arc<dyn Bar>) -> Controller {
    let config = Config {
        doorbells: DoorbellMode::Shadow,
        admin_entries: ADMIN_ENTRIES,
        admin_timeout: HANG,
        admin_in_buffer: true,
        ..Config::default()
    };
    Controller::attach(bar, machine.memory.clone(), config, 1).unwrap()
}

const ADMIN_ENTRIES: u16 = 8;

/// Returns a command that accesses no data.
fn number_of_queues() -> Sqe {
    Sqe::new(admin::GET_FEATURES, 0).with_cdw(10, feature::NUMBER_OF_QUEUES.into())
}

#[test]
fn an_admin_queue_in_the_doorbell_buffer_is_served_round_after_round() {
    let host = Host::new("memory:32M", 512);
    let machine = host.machine(&Setup::nth(0));
    let mut controller = buffered_admin_queue(&machine, machine.bar());
    for _ in 0..10 * ADMIN_ENTRIES {
        controller.identify_controller().unwrap();
    }
    // The doorbell is written once for all commands, or once for each command.
    for count in 1..ADMIN_ENTRIES {
        for at_once in [true, false] {
            let queue = controller.admin_queue().unwrap();
            for cid in 0..count {
                let sqe = number_of_queues().with_cid(cid);
                assert!(queue.push(&sqe));
                if !at_once {
                    queue.ring();
                }
            }
            queue.ring();
            for cid in 0..count {
                let cqe = queue.wait(cid, HANG).unwrap();
                assert_eq!(cqe.status().code(), SUCCESS);
            }
        }
    }
    // I/O works as usual.
    let mut disk = crate::common::disk(&mut controller, 1);
    disk.verify(0, 8).unwrap();
    // The next driver may use registers only.
    let mut controller = machine.attach();
    for _ in 0..4 * ADMIN_ENTRIES {
        controller.identify_controller().unwrap();
    }
}

/// A BAR whose doorbell writes arrive when the test delivers them, like writes of a client that awaits no reply.
struct PostedBar {
    bar: Arc<dyn Bar>,
    is_posting: AtomicBool,
    writes: Mutex<Vec<(u64, u32)>>,
}

impl PostedBar {
    fn deliver(&self) {
        for (offset, value) in self.writes.lock().unwrap().drain(..) {
            self.bar.write32(offset, value);
        }
    }
}

impl Bar for PostedBar {
    fn read32(&self, offset: u64) -> u32 {
        self.bar.read32(offset)
    }

    fn read64(&self, offset: u64) -> u64 {
        self.bar.read64(offset)
    }

    fn write32(&self, offset: u64, value: u32) {
        if offset >= 0x1000 && self.is_posting.load(Ordering::Relaxed) {
            self.writes.lock().unwrap().push((offset, value));
        } else {
            self.bar.write32(offset, value);
        }
    }

    fn write64(&self, offset: u64, value: u64) {
        self.bar.write64(offset, value);
    }
}

#[test]
fn register_writes_that_arrive_late_hide_no_admin_command() {
    let host = Host::new("memory:32M", 512);
    let machine = host.machine(&Setup::nth(0));
    let posted = Arc::new(PostedBar {
        bar: machine.bar(),
        is_posting: AtomicBool::new(false),
        writes: Mutex::default(),
    });
    let mut controller = buffered_admin_queue(&machine, posted.clone());
    posted.is_posting.store(true, Ordering::Relaxed);
    for round in 0..4 * ADMIN_ENTRIES {
        let queue = controller.admin_queue().unwrap();
        for cid in 0..3 {
            let sqe = number_of_queues().with_cid(cid);
            assert!(queue.push(&sqe));
            // The second and third update find EventIdx still behind the first update.
            queue.ring();
            if round % 3 == cid {
                // Another event makes the device examine the queue before the register write arrives.
                machine.function().process_events();
            }
        }
        posted.deliver();
        for cid in 0..3 {
            let cqe = queue.wait(cid, HANG).unwrap();
            assert_eq!(cqe.status().code(), SUCCESS);
        }
        posted.deliver();
    }
    assert_eq!(controller.status().unwrap(), 1);
}
