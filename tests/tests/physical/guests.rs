//! Guests that end while the drive executes their commands: no DMA reaches released memory, and the drive's work on these
//! commands does not affect other guests.

use std::fmt::Debug;
use std::time::Duration;

use nvme_mpt_tests::Error;
use nvme_mpt_tests::command::Sqe;
use nvme_mpt_tests::drive::{Effect, Fault, FaultMatch, NamespaceOptions, Options};
use nvme_mpt_tests::memory::{DmaBuffer, GuestMemory, PAGE_SIZE, Region};
use nvme_mpt_tests::prp;
use nvme_mpt_tests::queue::QueuePair;
use nvme_mpt_tests::registers::CSTS;

use crate::common::{HANG, Host, LEASE, LONG, Machine, SHORT, Setup, queue_pair, wait_for};
use crate::load::Load;

const DEPTH: u16 = 32;
const LEN: usize = 64 << 10;
/// Fill byte for memory of the next owner.
const MARK: u8 = 0x6B;

fn options(queue_pairs: u16) -> Options {
    Options {
        queue_pairs,
        mdts: 3,
        namespaces: vec![NamespaceOptions::new(1, 4 * LEASE, 512)],
        ..Options::default()
    }
}

/// Executes a command, and repeats it while its status permits a retry: late commands are interrupted.
#[track_caller]
fn retry_until_done<T: Debug>(mut command: impl FnMut() -> Result<T, Error>) -> T {
    let mut result = command();
    for _ in 0..20 {
        match &result {
            Err(Error::Status { cqe, .. }) if !cqe.status().do_not_retry() => result = command(),
            _ => break,
        }
    }
    result.unwrap()
}

/// Reads that the drive delays.
struct DelayedReads {
    /// Resources of the guest's driver. They live as long as the function does.
    driver: Option<(QueuePair, Vec<(DmaBuffer, prp::PreparedPointer)>)>,
    memory: GuestMemory,
    /// Memory that the drive and the function may write.
    ranges: Vec<(u64, usize)>,
}

impl DelayedReads {
    /// Submits reads. Returns when the drive has them.
    fn start(host: &Host, machine: &Machine, effect: Effect) -> Self {
        let mut controller = machine.attach();
        let mut queue = queue_pair(&mut controller, 1, 64);
        retry_until_done(|| queue.execute(Sqe::flush(1), HANG));
        let buffers: Vec<_> = (0..DEPTH)
            .map(|_| {
                let buffer = machine.memory.alloc(LEN).unwrap();
                let prepared = prp::buffer(&buffer, 0, LEN).unwrap();
                (buffer, prepared)
            })
            .collect();
        // The drive's commands are limited to 32 KiB, so each command of the guest is split in two.
        let met = host.model.counters().faults_matched + 8;
        let first = 3 * LEASE / 512;
        let blocks = FaultMatch::Blocks(first..first + LEASE / 512);
        host.model
            .inject(Fault::once(blocks, effect).times(u64::MAX));
        for (cid, (_, prepared)) in (0..DEPTH).zip(&buffers) {
            let blocks = (LEN / 512) as u32;
            let sqe = Sqe::read(1, u64::from(cid) * u64::from(blocks), blocks);
            assert!(queue.push(&sqe.with_cid(cid).with_data(prepared.pointer)));
        }
        queue.ring();
        wait_for("reads at the drive", || {
            host.model.counters().faults_matched >= met
        });
        let data = buffers.iter().map(|(buffer, _)| buffer);
        let written = data.chain([queue.cq.memory()]);
        Self {
            ranges: written.map(|buffer| (buffer.gpa(), buffer.len())).collect(),
            memory: machine.memory.clone(),
            driver: Some((queue, buffers)),
        }
    }

    /// Fills the memory as its next owner would.
    fn mark(&self) {
        for &(gpa, len) in &self.ranges {
            self.memory.write(gpa, &vec![MARK; len]).unwrap();
        }
    }

    #[track_caller]
    fn check(&self, what: &str) {
        for &(gpa, len) in &self.ranges {
            let mut bytes = vec![0; len];
            self.memory.read(gpa, &mut bytes).unwrap();
            let marked = bytes.iter().all(|byte| *byte == MARK);
            assert!(marked, "{what}: {gpa:#x} was written afterwards");
        }
    }
}

/// Way in which a guest ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum GuestEnd {
    Disabled,
    FunctionLevelReset,
    FunctionReset,
    Dead,
}

const WAYS: [GuestEnd; 4] = [
    GuestEnd::Disabled,
    GuestEnd::FunctionLevelReset,
    GuestEnd::FunctionReset,
    GuestEnd::Dead,
];

/// Ends a guest with reads in flight, beside other guests under load on the same queue pairs.
fn check_guest_end(queue_pairs: u16, deadline: Duration, effect: Effect) {
    let host = Host::with(options(queue_pairs), deadline);
    // The drive has nonzero data, so that a late read is noticed.
    host.model
        .poke(1, 3 * LEASE as usize, &vec![0x99; LEASE as usize]);
    let loads: Vec<Load> = (0..2)
        .map(|nth| Load::start(&host, &Setup::nth(nth), 2, 8))
        .collect();
    for way in WAYS {
        let machine = host.machine(&Setup::nth(3));
        let mut reads = DelayedReads::start(&host, &machine, effect);
        let mut left = None;
        match way {
            GuestEnd::Disabled => {
                // The driver clears CC.EN and waits for CSTS.RDY as long as permitted.
                let bar = machine.bar();
                bar.write32(0x14, 0);
                wait_for("CSTS.RDY to be cleared", || bar.read32(CSTS) & 1 == 0);
                left = Some(machine);
            }
            GuestEnd::FunctionLevelReset => {
                machine.function_level_reset();
                left = Some(machine);
            }
            GuestEnd::FunctionReset => {
                drop(machine.function().reset());
                left = Some(machine);
            }
            GuestEnd::Dead => {
                let driver = reads.driver.take();
                let gone = std::thread::spawn(move || drop((driver, machine)));
                wait_for("the machine's end", || gone.is_finished());
                gone.join().unwrap();
            }
        }
        let what = format!("{way:?}, {effect:?}, {queue_pairs} queue pairs");
        reads.mark();
        host.model.remove_faults();
        for load in &loads {
            load.wait_for_progress();
        }
        reads.check(&what);
        // The next holder of the lease finds its data and the drive in order.
        drop((reads, left));
        let next = host.machine(&Setup::nth(3));
        let (_controller, mut disk) = next.disk();
        let read = retry_until_done(|| disk.read(0, 8));
        assert_eq!(read, vec![0x99; PAGE_SIZE], "{what}");
    }
    for load in loads {
        load.finish();
    }
    host.finish();
}

#[test]
fn guests_go_while_the_drive_is_slow() {
    let slow = Effect::Delay(Duration::from_millis(400));
    check_guest_end(8, LONG, slow);
    check_guest_end(1, LONG, slow);
}

#[test]
fn guests_go_while_the_drive_has_lost_their_commands() {
    check_guest_end(8, SHORT, Effect::Lose);
    check_guest_end(1, SHORT, Effect::Lose);
}

#[test]
fn memory_is_given_back_once_the_drive_is_done_with_it() {
    let host = Host::with(options(2), LONG);
    let machine = host.machine(&Setup::nth(3));
    let reads = DelayedReads::start(&host, &machine, Effect::Delay(Duration::from_millis(500)));
    // The region of the data buffers.
    let &(data, _) = reads.ranges.first().unwrap();
    let regions = machine.memory.regions();
    let inside = |region: &&Region| (region.gpa..region.gpa + region.len).contains(&data);
    let region = regions.iter().find(inside).unwrap();
    // Unmap returns when no command in flight uses the region.
    machine.unmap(region);
    for &(gpa, len) in reads.ranges.iter().filter(|(gpa, _)| *gpa >= region.gpa) {
        machine.memory.write(gpa, &vec![MARK; len]).unwrap();
    }
    host.model.remove_faults();
    Load::start(&host, &Setup::nth(0), 2, 8).finish_undisturbed();
    reads.check("unmapped");
    drop((reads, machine));
    host.finish();
}
