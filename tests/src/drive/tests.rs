//! Tests of the drive with the guest driver. The guest's memory is mapped for the drive at guest physical addresses.

use std::sync::Arc;
use std::time::Duration;

use nvme_mpt_memory::clock;
use nvme_vfio::ControllerAccess;

use super::*;
use crate::command::admin;
use crate::controller::{Config, Controller as Driver, QueueOptions};
use crate::disk::{Disk, Transfer};
use crate::doorbell::DoorbellMode;
use crate::error::Error;
use crate::memory::GuestMemory;
use crate::model::{Limits, Model, Op};
use crate::queue::QueuePair;
use crate::registers::{
    ACQ, AQA, ASQ, CAP, CC, CC_ENABLE, CC_IOCQES_16, CC_IOSQES_64, CSTS, CSTS_FATAL, CSTS_READY,
};
use crate::status::{self, StatusCode};

const LONG: Duration = Duration::from_secs(600);

/// A drive, and a driver that has enabled it.
struct Scene {
    driver: Driver,
    drive: Arc<ModelDrive>,
}

fn scene(options: Options, doorbells: DoorbellMode) -> Scene {
    let drive = ModelDrive::start(options);
    let memory = GuestMemory::new(&[(0x10_0000, 8 << 20), (1 << 32, 8 << 20)]).unwrap();
    let config = Config {
        doorbells,
        admin_timeout: LONG,
        ..Config::default()
    };
    let bar = DriveBar::new(&drive, &memory, &[]);
    let driver = Driver::attach(bar, memory, config, 2).unwrap();
    Scene { driver, drive }
}

impl Scene {
    fn queue(&mut self) -> QueuePair {
        let options = QueueOptions::polled(16);
        self.driver.create_queue_pair(1, &options).unwrap()
    }

    fn disk(&mut self) -> Disk {
        let mut disk = Disk::open(&mut self.driver, 1).unwrap();
        disk.timeout = LONG;
        disk
    }
}

fn code(result: Result<impl std::fmt::Debug, Error>) -> StatusCode {
    let error = result.expect_err("an error");
    error.completion().expect("a completion").status().code()
}

#[test]
fn random_commands_agree_with_the_model_of_a_namespace() {
    let small = || vec![NamespaceOptions::new(1, 1 << 20, 512)];
    let default = Options {
        namespaces: small(),
        ..Options::default()
    };
    let variants = [
        (DoorbellMode::Trap, default.clone()),
        (
            DoorbellMode::Shadow,
            Options {
                doorbell_buffer: DoorbellBufferUse::Watched,
                dstrd: 4,
                ..default.clone()
            },
        ),
        (
            DoorbellMode::Shadow,
            Options {
                doorbell_buffer: DoorbellBufferUse::EventIdx,
                namespaces: vec![NamespaceOptions::new(1, 1 << 20, 4096)],
                ..default.clone()
            },
        ),
        (
            DoorbellMode::Trap,
            Options {
                parallel: 1,
                seed: None,
                latency: Duration::from_micros(50),
                ..default
            },
        ),
    ];
    for (mode, options) in variants {
        let mut scene = scene(options, mode);
        let mut disk = scene.disk();
        let limits = Limits::for_disk(&disk, 32);
        let mut model = Model::new(limits, true);
        let mut rng = Rng::new(7);
        for round in 0..800 {
            disk.transfer = match round % 3 {
                0 => Transfer::Prp { offset: 0 },
                1 => Transfer::Prp { offset: 1200 },
                _ => Transfer::Sgl {
                    piece: 700,
                    per_segment: 5,
                },
            };
            let op = Op::choose(std::array::from_fn(|_| rng.next_u64()), &limits);
            if let Err(mismatch) = model.step(&mut disk, &op) {
                panic!("{mismatch}");
            }
        }
        model.verify_all(&mut disk).unwrap();
        // The driver asked for blocks that do not exist, and made no other mistake.
        assert!(scene.drive.model_iommu().faults().is_empty());
        scene.driver.shutdown(false).unwrap();
        scene.driver.disable().unwrap();
        assert!(!scene.drive.is_enabled());
    }
}

#[test]
fn queues_have_turns_though_there_is_room_for_one_command() {
    let options = Options {
        parallel: 1,
        latency: Duration::from_micros(50),
        ..Options::default()
    };
    let mut scene = scene(options, DoorbellMode::Trap);
    let queue = QueueOptions::polled(16);
    let [mut first, mut second] =
        [1, 2].map(|id| scene.driver.create_queue_pair(id, &queue).unwrap());
    // The first command occupies the drive's only channel until both queues have all their commands.
    let held = Fault::once(FaultMatch::Io, Effect::Hold);
    scene.drive.inject(held);
    for pair in [&mut first, &mut second] {
        for cid in 0..8 {
            assert!(pair.push(&Sqe::flush(1).with_cid(cid)));
        }
        pair.ring();
    }
    while scene.drive.counters().faults_matched == 0 {
        clock::sleep(Duration::from_micros(50));
    }
    scene.drive.complete_held();
    let [mut early, mut late] = [0, 0];
    while late < 8 {
        early += u32::from(first.poll().is_some());
        late += u32::from(second.poll().is_some());
        if late == 2 {
            assert!(early < 8, "the second queue waited for all of the first");
        }
    }
}

/// Enables a drive with the arbitration mechanism `ams` in CC.AMS. Returns CSTS once the drive is ready or has failed.
fn enabled_with(arbitration: Arbitration, ams: u32) -> (u32, Arc<ModelDrive>) {
    let drive = ModelDrive::start(Options {
        arbitration,
        ..Options::default()
    });
    let bit = drive.read64(CAP) >> 17 & 1;
    assert_eq!(bit == 1, arbitration != Arbitration::RoundRobin);
    drive.write32(AQA, 0x1_0001);
    drive.write64(ASQ, 0x1000);
    drive.write64(ACQ, 0x2000);
    drive.write32(CC, ams << 11 | CC_IOSQES_64 | CC_IOCQES_16 | CC_ENABLE);
    loop {
        let csts = drive.read32(CSTS);
        if csts & (CSTS_READY | CSTS_FATAL) != 0 {
            return (csts, drive);
        }
        clock::sleep(Duration::from_micros(50));
    }
}

#[test]
fn an_arbitration_that_is_not_offered_is_fatal() {
    let cases = [
        (Arbitration::RoundRobin, 0, true, true),
        (Arbitration::RoundRobin, 1, false, false),
        (Arbitration::Weighted, 0, true, true),
        (Arbitration::Weighted, 1, true, true),
        (Arbitration::Weighted, 7, false, false),
        // The host cannot know that this drive fails, so it has made no mistake.
        (
            Arbitration::FailingWeighted(WeightedFailure::Fatal),
            1,
            false,
            true,
        ),
    ];
    for (arbitration, ams, works, is_sound) in cases {
        let (csts, drive) = enabled_with(arbitration, ams);
        let found = (csts & CSTS_FATAL == 0, drive.check_host().is_ok());
        assert_eq!(found, (works, is_sound), "{arbitration:?}, CC.AMS {ams}");
    }
}

#[test]
fn classes_have_commands_by_weight_and_urgent_ones_go_first() {
    let options = Options {
        arbitration: Arbitration::Weighted,
        ..Options::default()
    };
    let drive = ModelDrive::start(options);
    let mut controller = drive.controller();
    // In a round, High may have three commands, Medium two, and Low one.
    controller.arbitration = 0x0201_0000;
    for (id, class) in [(1, 2), (2, 1), (3, 3), (4, 0), (5, 2)] {
        let commands = if class == 0 { 2 } else { 60 };
        let sq = Sq::new(0, 64, id, class).with_waiting(commands);
        controller.sqs.insert(id, sq);
    }
    let order: Vec<_> = std::iter::repeat_with(|| {
        let id = controller.next_by_weight().expect("commands that wait");
        let sq = controller.sqs.get_mut(&id).expect("the queue");
        *sq = Sq::new(0, 64, id, sq.priority).with_waiting(sq.waiting() - 1);
        id
    })
    .take(14)
    .collect();
    assert_eq!(order, [4, 4, 2, 2, 2, 1, 5, 3, 2, 2, 2, 1, 5, 3]);
}

#[test]
fn host_violations_are_detected() {
    let mut scene = scene(
        Options {
            mdts: 1,
            oncs: 0,
            ..Options::default()
        },
        DoorbellMode::Trap,
    );
    let mut disk = scene.disk();
    disk.write(0, &[7; 8192]).unwrap();
    scene.drive.check_host().unwrap();
    let complaints = |scene: &Scene| scene.drive.controller().complaints.len();
    assert_eq!(code(disk.read(0, 17)), status::INVALID_FIELD);
    assert_eq!(code(disk.verify(0, 1)), status::INVALID_OPCODE);
    assert_eq!(code(disk.read(1 << 40, 1)), status::LBA_OUT_OF_RANGE);
    assert_eq!(complaints(&scene), 3);
    let nowhere = Sqe::read(1, 0, 1).with_data(crate::command::DataPointer::prp(0x5000, 0));
    assert_eq!(code(disk.command(nowhere)), status::DATA_TRANSFER_ERROR);
    let odd = Sqe::read(1, 0, 16).with_data(crate::command::DataPointer::prp(0x10_0000, 0x10_1008));
    assert_eq!(code(disk.command(odd)), status::PRP_OFFSET_INVALID);
    assert_eq!(complaints(&scene), 5);
    let fault = DmaFault {
        iova: 0x5000,
        len: 512,
        write: true,
    };
    assert_eq!(scene.drive.model_iommu().faults(), [fault]);
    scene
        .driver
        .write_doorbell(1, crate::doorbell::Side::SqTail, 64);
    // The drive must have read each doorbell value before the next value replaces it.
    while complaints(&scene) < 6 {
        std::thread::sleep(Duration::from_micros(20));
    }
    disk.flush().unwrap();
    assert!(scene.drive.check_host().is_err());
}

#[test]
fn each_fault_has_its_effect() {
    let mut scene = scene(Options::default(), DoorbellMode::Trap);
    let mut queue = scene.queue();
    let drive = scene.drive.clone();
    let inject = |effect| drive.inject(Fault::once(FaultMatch::Io, effect));
    inject(Effect::Fail(status::NAMESPACE_NOT_READY, false));
    let failed = queue.execute(Sqe::flush(1), LONG).unwrap_err();
    let failed = failed.completion().unwrap().status();
    assert_eq!(failed.code(), status::NAMESPACE_NOT_READY);
    assert!(!failed.do_not_retry());

    // The command is lost, and then aborted.
    inject(Effect::Lose);
    let lost = queue.submit(Sqe::flush(1)).unwrap();
    queue.ring();
    queue.execute(Sqe::flush(1), LONG).unwrap();
    drive.set_aborts(AbortReaction::Fail);
    assert!(!scene.driver.abort(1, lost).unwrap());
    drive.set_aborts(AbortReaction::Work);
    assert!(scene.driver.abort(1, lost).unwrap());
    let aborted = queue.wait(lost, LONG).unwrap();
    assert_eq!(aborted.status().code(), status::ABORT_REQUESTED);

    // The drive posts unexpected entries.
    for (effect, entries) in [
        (Effect::CompleteTwice, 2),
        (Effect::CompleteUnknown, 2),
        (Effect::Garbage, 2),
    ] {
        inject(effect);
        let cid = queue.submit(Sqe::flush(1)).unwrap();
        queue.ring();
        let mut found = Vec::new();
        while found.len() < entries {
            found.extend(queue.poll());
        }
        queue.ring();
        assert!(found.iter().any(|cqe| cqe.cid() == cid), "{effect:?}");
    }

    // The entry is posted again while the second command after it is in flight.
    inject(Effect::CompleteAgain(2));
    let mut submitted = Vec::new();
    let mut found = Vec::new();
    while found.len() < 4 {
        if submitted.len() < 3 && found.len() == submitted.len() {
            submitted.push(queue.submit(Sqe::flush(1)).unwrap());
            queue.ring();
        }
        found.extend(queue.poll().map(|cqe| cqe.cid()));
    }
    queue.ring();
    submitted.push(submitted[0]);
    found[2..].sort_unstable();
    submitted[2..].sort_unstable();
    assert_eq!(found, submitted);

    // After each of these failures of the controller, a reset helps.
    for effect in [Effect::Fatal, Effect::Hang] {
        let met = drive.counters().faults_matched + 1;
        inject(effect);
        queue.submit(Sqe::flush(1)).unwrap();
        queue.ring();
        // The fault must stop the controller before it executes the admin command.
        while drive.counters().faults_matched < met {
            std::thread::sleep(Duration::from_micros(20));
        }
        let admin = scene.driver.admin_queue().unwrap();
        let short = Duration::from_millis(50);
        admin
            .submit_and_wait(Sqe::identify(1, 0, 0), short)
            .unwrap_err();
        assert_eq!(
            scene.driver.status().unwrap() & 2 != 0,
            effect == Effect::Fatal
        );
        scene.driver.reset().unwrap();
        assert_eq!(drive.queue_pairs(), 0);
        queue = scene.queue();
    }
    drive.check_host().unwrap();
    inject(Effect::Vanish);
    queue.submit(Sqe::flush(1)).unwrap();
    queue.ring();
    while !drive.is_gone() {
        std::thread::sleep(Duration::from_micros(20));
    }
    assert!(matches!(scene.driver.status(), Err(Error::Gone)));
}

#[test]
fn data_of_a_lost_command_moves_until_the_controller_is_disabled() {
    let mut scene = scene(Options::default(), DoorbellMode::Trap);
    let mut queue = scene.queue();
    scene.drive.poke(1, 0, &[9; 512]);
    let page = scene.driver.memory().alloc(4096).unwrap();
    scene
        .drive
        .inject(Fault::once(FaultMatch::IoOpcode(2), Effect::Lose));
    let pointer = crate::command::DataPointer::prp(page.gpa(), 0);
    queue.submit(Sqe::read(1, 0, 1).with_data(pointer)).unwrap();
    queue.ring();
    while scene.drive.counters().commands < 1 {
        std::thread::sleep(Duration::from_micros(20));
    }
    assert_eq!(page.to_vec(0, 512), [0; 512]);
    scene.driver.disable().unwrap();
    assert_eq!(page.to_vec(0, 512), [9; 512]);
    scene.drive.check_host().unwrap();
}

#[test]
fn events_are_told_once_until_their_log_page_is_read() {
    let mut scene = scene(Options::default(), DoorbellMode::Trap);
    let driver = &mut scene.driver;
    driver
        .set_feature(crate::admin::feature::ASYNC_EVENT_CONFIG, 0, 1 << 8 | 2)
        .unwrap();
    for _ in 0..3 {
        driver.request_async_event().unwrap();
    }
    scene.drive.report_temperature(360);
    scene.drive.report_temperature(361);
    let event = driver.async_event(LONG).unwrap().unwrap();
    assert_eq!((event.kind, event.info, event.log_page), (1, 1, 2));
    scene.drive.resize(1, 100);
    let event = driver.async_event(LONG).unwrap().unwrap();
    assert_eq!((event.kind, event.info, event.log_page), (2, 0, 4));
    let page = crate::admin::LogPage::of_controller(4, 4096);
    assert_eq!(
        driver.log_page(page).unwrap()[..8],
        [1, 0, 0, 0, 0, 0, 0, 0]
    );
    assert_eq!(driver.identify_namespace(1).unwrap().nsze, 100);
    // The second warning is only reported after the log page was read.
    let page = crate::admin::LogPage::of_controller(2, 512);
    let health = driver.log_page(page).unwrap();
    assert_eq!((health[0], health[1]), (2, 361_u16 as u8));
    assert!(driver.async_event(LONG).unwrap().is_some());
    let sqe = Sqe::new(admin::KEEP_ALIVE, 0);
    assert_eq!(code(driver.admin(sqe)), status::INVALID_OPCODE);
}
