//! Tests of the driver with the model of a drive: bring-up, admin commands, rings and data, in every doorbell mode.

use std::sync::Arc;
use std::time::Duration;

use crate::admin::{AsyncEvent, LogPage, feature};
use crate::bar::Bar;
use crate::command::Sqe;
use crate::controller::{Config, Controller, QueueOptions};
use crate::disk::{Disk, Transfer};
use crate::doorbell::DoorbellMode;
use crate::drive::{DoorbellBufferUse, DriveBar, ModelDrive, NamespaceOptions, Options};
use crate::error::Error;
use crate::interrupt::Interrupt;
use crate::memory::GuestMemory;
use crate::model::{Limits, Model, Op};
use crate::status;

const LONG: Duration = Duration::from_secs(600);

const MODES: [(DoorbellMode, bool); 4] = [
    (DoorbellMode::Trap, false),
    (DoorbellMode::Mapped, false),
    (DoorbellMode::Shadow, false),
    (DoorbellMode::Shadow, true),
];

fn memory() -> GuestMemory {
    GuestMemory::new(&[(0x10_0000, 8 << 20), (1 << 32, 8 << 20)]).unwrap()
}

/// Starts a drive that polls its Doorbell Buffer, or that reads it only after register writes (`parked`), and a driver.
fn start(mode: DoorbellMode, parked: bool) -> (Arc<ModelDrive>, Controller) {
    let memory = memory();
    let options = Options {
        dstrd: if mode == DoorbellMode::Mapped { 10 } else { 2 },
        doorbell_buffer: match parked {
            true => DoorbellBufferUse::EventIdx,
            false => DoorbellBufferUse::Watched,
        },
        namespaces: vec![NamespaceOptions::new(1, 2 << 20, 512)],
        ..Options::default()
    };
    let drive = ModelDrive::start(options);
    let config = Config {
        doorbells: mode,
        ..Config::default()
    };
    let bar = DriveBar::new(&drive, &memory, &[]);
    let controller = Controller::attach(bar, memory, config, 2).unwrap();
    (drive, controller)
}

#[test]
fn data_comes_back_in_every_doorbell_mode() {
    for (mode, parked) in MODES {
        let (_drive, mut controller) = start(mode, parked);
        let mut disk = Disk::open(&mut controller, 1).unwrap();
        let data: Vec<u8> = (0..16384_u32).map(|i| (i / 7) as u8).collect();
        disk.write(7, &data).unwrap();
        assert_eq!(disk.read(7, 32).unwrap(), data, "{mode:?}");
        // There are more commands than entries, so the rings wrap.
        for _ in 0..200 {
            disk.flush().unwrap();
        }
        let rung = disk.queue.sq.doorbell().rings();
        assert_eq!(rung, 202);
        let written = disk.queue.sq.doorbell().writes();
        match (mode, parked) {
            (DoorbellMode::Trap, _) => assert_eq!(written, 202),
            (DoorbellMode::Shadow, true) => assert!(written > 0, "{written}"),
            _ => assert!(written <= 1, "{mode:?} {written}"),
        }
    }
}

#[test]
fn every_kind_of_data_pointer_moves_the_same_data() {
    let (_drive, mut controller) = start(DoorbellMode::Trap, false);
    let mut disk = Disk::open(&mut controller, 1).unwrap();
    let data: Vec<u8> = (0..131_072_u32).map(|i| (i / 3) as u8).collect();
    let sgl = |piece, per_segment| Transfer::Sgl { piece, per_segment };
    for transfer in [
        Transfer::Prp { offset: 0 },
        Transfer::Prp { offset: 4 },
        Transfer::Prp { offset: 4092 },
        sgl(1 << 20, 2),
        sgl(4096, 256),
        sgl(1000, 7),
    ] {
        disk.transfer = transfer;
        disk.write_zeroes(0, 256, false).unwrap();
        disk.write(0, &data).unwrap();
        assert!(disk.read(0, 256).unwrap() == data, "{transfer:?}");
        disk.compare(0, &data).unwrap();
    }
}

#[test]
fn the_model_notices_a_write_that_was_lost() {
    let (drive, mut controller) = start(DoorbellMode::Trap, false);
    let mut disk = Disk::open(&mut controller, 1).unwrap();
    let mut model = Model::new(Limits::for_disk(&disk, 32), true);
    let write = Op::Write {
        slba: 9,
        blocks: 3,
        tag: 1,
    };
    model.step(&mut disk, &write).unwrap();
    drive.poke(1, 10 * 512, &[0xFF]);
    assert!(model.verify_all(&mut disk).is_err());
}

#[test]
fn linux_order_of_queues_before_the_doorbell_buffer_works() {
    let (_drive, mut controller) = start(DoorbellMode::Trap, false);
    let mut disk = Disk::open(&mut controller, 1).unwrap();
    disk.flush().unwrap();
    let buffer = controller
        .configure_doorbell_buffer(&mut [&mut disk.queue])
        .unwrap();
    assert_eq!(buffer.shadow().to_vec(2 * 16, 1), [1]);
    let before = disk.queue.doorbell_writes();
    for _ in 0..100 {
        disk.flush().unwrap();
    }
    assert!(disk.queue.doorbell_writes() <= before + 2);
}

#[test]
fn statuses_reach_the_caller() {
    let (_drive, mut controller) = start(DoorbellMode::Trap, false);
    let mut disk = Disk::open(&mut controller, 1).unwrap();
    let code = |error: Error| error.completion().unwrap().status().code();
    let blocks = disk.blocks();
    assert_eq!(
        code(disk.read(blocks, 1).unwrap_err()),
        status::LBA_OUT_OF_RANGE
    );
    let cqe = controller.admin_raw(Sqe::new(0xff, 0)).unwrap();
    assert_eq!(cqe.status().code(), status::INVALID_OPCODE);
    let orphan = controller.create_sq(2, 16, 2).unwrap_err();
    assert_eq!(code(orphan), status::CQ_INVALID);
}

#[test]
fn asynchronous_events_do_not_disturb_other_commands() {
    let (drive, mut controller) = start(DoorbellMode::Trap, false);
    for _ in 0..2 {
        controller.request_async_event().unwrap();
    }
    let notices = 1 << 8;
    controller
        .set_feature(feature::ASYNC_EVENT_CONFIG, 0, notices)
        .unwrap();
    drive.resize(1, 100);
    controller.identify_controller().unwrap();
    let event = controller.async_event(LONG).unwrap();
    let want = AsyncEvent {
        kind: 2,
        info: 0,
        log_page: 4,
    };
    assert_eq!(event, Some(want));
    assert_eq!(controller.outstanding_event_requests(), 1);
    assert_eq!(controller.async_event(Duration::ZERO).unwrap(), None);
}

#[test]
fn log_pages_are_asked_for_by_offset_and_length() {
    let (drive, mut controller) = start(DoorbellMode::Trap, false);
    // Each byte is set to its offset in the page.
    drive.forge(Box::new(|sqe, data| {
        for (byte, offset) in data.iter_mut().zip(sqe.cdw(12)..) {
            *byte = offset as u8;
        }
    }));
    let page = LogPage {
        offset: 20,
        ..LogPage::of_controller(2, 512)
    };
    let bytes = controller.log_page(page).unwrap();
    assert_eq!((bytes.len(), bytes[0], bytes[100]), (512, 20, 120));
}

#[test]
fn interrupts_follow_completions() {
    let memory = memory();
    let vector = Arc::new(Interrupt::new().unwrap());
    let drive = ModelDrive::start(Options::default());
    let bar = DriveBar::new(&drive, &memory, &[Arc::clone(&vector)]);
    let mut controller = Controller::attach(bar, memory, Config::default(), 1).unwrap();
    let options = QueueOptions::interrupting(16, 0, vector);
    let mut queue = controller.create_queue_pair(1, &options).unwrap();
    let cid = queue.submit(Sqe::flush(1)).unwrap();
    queue.ring();
    let interrupt = Arc::clone(queue.cq.interrupt().unwrap());
    assert_eq!(interrupt.wait(LONG).unwrap(), 1);
    assert_eq!(queue.poll().unwrap().cid(), cid);
}

#[test]
fn shutdown_reset_and_queue_deletion() {
    let (_drive, mut controller) = start(DoorbellMode::Shadow, false);
    let disk = Disk::open(&mut controller, 1).unwrap();
    controller.delete_queue_pair(disk.queue).unwrap();
    controller.shutdown(false).unwrap();
    controller.reset().unwrap();
    assert!(controller.doorbell_buffer().is_none());
    Disk::open(&mut controller, 1).unwrap().flush().unwrap();
}

#[test]
fn a_controller_that_is_gone_is_an_error() {
    struct GoneBar;
    impl Bar for GoneBar {
        fn read32(&self, _: u64) -> u32 {
            u32::MAX
        }
        fn read64(&self, _: u64) -> u64 {
            // MPSMIN is acceptable to the driver, so that the failure is that of CSTS.
            !(0xf << 48)
        }
        fn write32(&self, _: u64, _: u32) {}
        fn write64(&self, _: u64, _: u64) {}
    }
    let gone = Controller::attach(Arc::new(GoneBar), memory(), Config::default(), 1);
    assert!(matches!(gone, Err(Error::Gone)));
}
