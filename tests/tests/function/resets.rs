//! Resets with I/O in flight. After a reset, the device must not access guest memory: no data, ring, shadow doorbell or
//! EventIdx.

use nvme_mpt_tests::command::Sqe;
use nvme_mpt_tests::controller::Controller;
use nvme_mpt_tests::doorbell::{DoorbellMode, Side};
use nvme_mpt_tests::memory::{DmaBuffer, PAGE_SIZE};
use nvme_mpt_tests::prp::{self, PreparedPointer};
use nvme_mpt_tests::queue::QueuePair;
use nvme_mpt_tests::registers::{CC, CC_ENABLE, CSTS};

use crate::common::bystander::Bystander;
use crate::common::{
    HANG, Host, LEASE, MODES, Machine, Setup, disk, queue_pair, wait_for, written_file,
};

const DEPTH: u16 = 64;
const PIECE: usize = 32 << 10;
/// Fill byte for memory of the next owner.
const MARK: u8 = 0x6b;

/// Kinds of resets.
#[derive(Clone, Copy, Debug)]
enum Reset {
    /// Clears CC.EN.
    Controller,
    /// Function Level Reset.
    FunctionLevel,
    /// Reset of the function by the VMM.
    Function,
    /// Sets CC.SHN, then clears CC.EN.
    Shutdown,
}

const ALL: [Reset; 4] = [
    Reset::Controller,
    Reset::FunctionLevel,
    Reset::Function,
    Reset::Shutdown,
];

impl Reset {
    fn run(self, machine: &Machine, controller: &mut Controller) {
        match self {
            Self::Controller => controller.disable().unwrap(),
            Self::FunctionLevel => machine.function_level_reset(),
            Self::Function => drop(machine.function().reset()),
            Self::Shutdown => {
                controller.shutdown(false).unwrap();
                // The shutdown is complete: all commands have completed or were dropped.
                controller.disable().unwrap();
            }
        }
        assert_eq!(machine.bar().read32(CSTS), 0, "{self:?}");
        assert_eq!(machine.bar().read32(CC) & CC_ENABLE, 0, "{self:?}");
    }
}

/// Memory that the device may write during one life of the controller.
struct Life {
    queue: QueuePair,
    doorbells: Vec<(u64, usize)>,
    buffers: Vec<DmaBuffer>,
    _lists: Vec<PreparedPointer>,
}

impl Life {
    /// Enables the controller and leaves 64 commands in flight.
    fn start(machine: &Machine, controller: &mut Controller, mode: DoorbellMode) -> Self {
        controller.reset().unwrap();
        controller.set_number_of_queues(4).unwrap();
        if mode == DoorbellMode::Shadow {
            controller.configure_doorbell_buffer(&mut []).unwrap();
        }
        let mut queue = queue_pair(controller, 1, 128);
        let buffers: Vec<_> = (0..DEPTH)
            .map(|_| machine.memory.alloc(PIECE).unwrap())
            .collect();
        let lists: Vec<_> = buffers
            .iter()
            .map(|buffer| prp::buffer(buffer, 0, PIECE).unwrap())
            .collect();
        for (list, cid) in lists.iter().zip(0..DEPTH) {
            let blocks = (PIECE / 512) as u32;
            let sqe = Sqe::read(1, u64::from(cid) * u64::from(blocks), blocks);
            assert!(queue.push(&sqe.with_cid(cid).with_data(list.pointer)));
        }
        queue.ring();
        let doorbells = controller
            .doorbell_buffer()
            .map(|buffer| [buffer.shadow().gpa(), buffer.event_idx().gpa()])
            .into_iter()
            .flatten()
            .map(|gpa| (gpa, PAGE_SIZE))
            .collect();
        Self {
            queue,
            doorbells,
            buffers,
            _lists: lists,
        }
    }

    fn ranges(&self) -> Vec<(u64, usize)> {
        let rings = [self.queue.sq.memory(), self.queue.cq.memory()];
        let mut ranges: Vec<_> = rings
            .into_iter()
            .chain(&self.buffers)
            .map(|buffer| (buffer.gpa(), buffer.len()))
            .collect();
        ranges.extend(&self.doorbells);
        ranges
    }

    /// Fills the memory as its next owner would.
    fn mark(&self, machine: &Machine) {
        for (gpa, len) in self.ranges() {
            machine.memory.write(gpa, &vec![MARK; len]).unwrap();
        }
    }

    #[track_caller]
    fn check(&self, machine: &Machine, what: &str) {
        for (gpa, len) in self.ranges() {
            let mut bytes = vec![0; len];
            machine.memory.read(gpa, &mut bytes).unwrap();
            if let Some(at) = bytes.iter().position(|&byte| byte != MARK) {
                panic!("{what}: {:#x} was written after the reset", gpa + at as u64);
            }
        }
    }
}

/// Resets a controller with 64 commands in flight, many times.
fn storm(host: &Host, mode: DoorbellMode, rounds: usize, resets: &[Reset]) {
    let bystander = Bystander::start(host, &Setup::nth(1));
    let machine = host.machine(&Setup::nth(0).doorbells(mode));
    let mut controller = machine.attach();
    for round in 0..rounds {
        let reset = resets[round % resets.len()];
        let life = Life::start(&machine, &mut controller, mode);
        if round % 3 == 2 {
            wait_for("a completion", || life.queue.cq.has_entry());
        }
        reset.run(&machine, &mut controller);
        life.mark(&machine);
        let what = format!("{mode:?} {reset:?} round {round}");
        // Provokes a late poller: the old doorbells are written, and the bystander keeps the poller awake.
        controller.write_doorbell(1, Side::SqTail, 5);
        bystander.wait_for_progress();
        life.check(&machine, &what);
        // The pages of the Doorbell Buffer return to the allocator with `life`, so they are checked before the next life.
    }
    controller.reset().unwrap();
    controller.set_number_of_queues(4).unwrap();
    let mut disk = disk(&mut controller, 1);
    disk.timeout = HANG;
    disk.write(9, &[9; 512]).unwrap();
    assert_eq!(disk.read(9, 1).unwrap(), [9; 512]);
    bystander.finish();
}

fn file_host() -> (tempfile::NamedTempFile, Host) {
    let file = written_file(LEASE);
    file.as_file().set_len(2 * LEASE).unwrap();
    let host = Host::of_file(file.path(), 512);
    (file, host)
}

#[test]
fn controller_resets_with_io_in_flight() {
    let (_file, host) = file_host();
    storm(&host, DoorbellMode::Shadow, 100, &[Reset::Controller]);
}

#[test]
fn function_level_resets_with_io_in_flight() {
    let (_file, host) = file_host();
    storm(&host, DoorbellMode::Shadow, 100, &[Reset::FunctionLevel]);
}

#[test]
fn function_resets_with_io_in_flight() {
    let (_file, host) = file_host();
    storm(&host, DoorbellMode::Shadow, 100, &[Reset::Function]);
}

#[test]
fn shutdowns_with_io_in_flight() {
    let (_file, host) = file_host();
    storm(&host, DoorbellMode::Shadow, 100, &[Reset::Shutdown]);
}

#[test]
fn resets_of_all_kinds_in_every_doorbell_mode() {
    for mode in MODES {
        storm(&Host::new("memory:32M", 512), mode, 40, &ALL);
        let (_file, host) = file_host();
        storm(&host, mode, 20, &ALL);
    }
}

#[test]
fn a_machine_can_go_with_io_in_flight() {
    let (_file, host) = file_host();
    let bystander = Bystander::start(&host, &Setup::nth(1));
    for round in 0..10 {
        // The lease can be acquired again, so it was returned.
        let machine = host.machine(&Setup::nth(0).doorbells(MODES[round % 3]));
        let mut controller = machine.attach();
        let life = Life::start(&machine, &mut controller, MODES[round % 3]);
        drop((machine, life));
    }
    bystander.finish();
}
