//! Guests that share one poller. Only calls advance the clock: reads, signals, memory accesses, submissions, deallocations
//! and log lines take time.
//!
//! Both scenarios have two phases and compare the command latencies of the phases. In `shares`, a guest with one
//! outstanding command runs beside a function with one busy queue; in the second phase, the function has sixteen busy
//! queues. In `attackers`, four guests with one outstanding command each run beside a fifth guest. The fifth guest is quiet
//! in the first phase, and delays the poller as much as it can in the second.

use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Once, PoisonError};
use std::time::Duration;

use nvme_guest::interrupt::{ClientSignals, EventReader};
use nvme_guest::threads::start_thread;
use nvme_lease::range::ByteRange;
use nvme_mpt::drive::HostController;
use nvme_mpt::{Drive, LocalBackend, PollerPool, SharedBackendPartsSource};
use nvme_mpt_memory::clock;
use nvme_mpt_memory::simulation::{acted, costs};
use nvme_mpt_tests::command::{DSM_DEALLOCATE, Sqe, dsm_range, io};
use nvme_mpt_tests::controller::{Config, Controller, QueueOptions};
use nvme_mpt_tests::doorbell::{DoorbellMode, Side};
use nvme_mpt_tests::function::{InProcess, map};
use nvme_mpt_tests::interrupt::Interrupt;
use nvme_mpt_tests::memory::{DmaBuffer, GuestMemory};
use nvme_mpt_tests::prp;
use nvme_mpt_tests::queue::QueuePair;
use nvme_mpt_tests::rng::Rng;
use nvme_software::simulated as disk;
use nvme_software::{MemoryAllocationTime, SoftwareController};
use vmm_device::{MsixMasking, NvmeFunction};

use crate::blocks::Blocks;
use crate::engine::Engine;
use crate::history::BLOCK;
use crate::runs::OmittedParts;
use crate::scenario::{LOW, LOW_LEN, Started, config, interrupts, lease_on};

/// Size of a command in blocks of 512 bytes (4 KiB), and size of a guest's range.
const COMMAND_BLOCKS: u32 = 8;
const RANGE_BLOCKS: usize = 64;

/// Duration of a read on the drive in memory.
const READ: Duration = Duration::from_micros(5);

/// Number of commands of a guest in each phase, and before the phase with an attacker. In the latter, the server adapts to
/// the guest.
const COMMANDS: usize = 700;
const FIRST: usize = 100;

/// Longest pause of a guest between two commands, in nanoseconds.
const PAUSE: u64 = 200_000;

/// Longest time that a poller spends on one function per round.
const QUANTUM: Duration = Duration::from_micros(50);

/// Longest latency until the poller's other functions have moved away from the attacker. They move to another thread after
/// 4 ms. If all pollers sleep, the watcher checks for this every 40 ms.
const LONGEST: Duration = Duration::from_millis(50);

/// Number of queues of a busy function, and number of commands in each queue.
const QUEUES: u16 = 16;
const DEPTH: usize = 8;

/// Duration of a signal to an eventfd that has 200,000 waiters.
const SIGNAL: Duration = Duration::from_millis(2);
/// Duration of an access to memory into which a hole is being punched.
const ACCESS: Duration = Duration::from_millis(60);
/// Duration of a submission to a file system that another process implements (FUSE).
const SUBMISSION: Duration = Duration::from_millis(25);
/// Duration of deallocating one MiB of a range that is a hole already.
const DEALLOCATION: Duration = Duration::from_micros(2);
/// Duration of writing a log line.
const LINE: Duration = Duration::from_micros(200);

/// Size of the drive on which holes are deallocated.
const HOLES: u64 = 64 << 20;

/// A function and its guest, which does one thing at a time.
struct Client {
    controller: Controller,
    queues: Vec<QueuePair>,
    vectors: Vec<Arc<Interrupt>>,
    /// File descriptor that the server signals for the first queue's vector.
    signalled: RawFd,
    memory: GuestMemory,
    buffer: DmaBuffer,
    rng: Rng,
}

impl Client {
    fn connect(
        drive: &Arc<Drive>,
        range: ByteRange,
        queues: u16,
        pollers: &Arc<PollerPool>,
        rng: &mut Rng,
    ) -> Self {
        let lease = lease_on(drive, "guest", range);
        let mut config = config(drive, lease, DoorbellMode::Trap, "shared:event", pollers);
        config.options.queue_pairs = queues;
        let local_backend = LocalBackend::with_parts(config, SharedBackendPartsSource::Own);
        let local_backend = local_backend.unwrap_or_else(|error| panic!("no attachment: {error}"));
        let function = NvmeFunction::new(Arc::new(local_backend), MsixMasking::Client);
        let memory = GuestMemory::new(&[(LOW, LOW_LEN)]).unwrap_or_else(|error| panic!("{error}"));
        for region in memory.regions() {
            map(&function, &memory, &region);
        }
        let vectors = interrupts(function.vectors().len());
        let signals = ClientSignals::new("client", EventReader::Trusted);
        let mut signalled = Vec::new();
        for (vector, interrupt) in function.vectors().iter().zip(&vectors) {
            let event = interrupt.event().try_clone().expect("descriptors");
            signalled.push(event.as_raw_fd());
            vector.set_client_eventfd(signals.eventfd(event));
        }
        let config = Config {
            doorbells: DoorbellMode::Trap,
            ..Config::default()
        };
        let bar = Arc::new(InProcess::new(function));
        let controller = Controller::attach(bar, memory.clone(), config, queues);
        let mut controller = controller.unwrap_or_else(|error| panic!("no controller: {error}"));
        let queues = (1..=queues)
            .map(|id| {
                let interrupt = vectors[usize::from(id)].clone();
                let options = QueueOptions::interrupting(2 * DEPTH as u32, id, interrupt);
                let pair = controller.create_queue_pair(id, &options);
                pair.unwrap_or_else(|error| panic!("no queue: {error}"))
            })
            .collect();
        let buffer = memory.alloc(1 << 20).expect("memory");
        Self {
            controller,
            queues,
            vectors,
            signalled: signalled[1],
            memory,
            buffer,
            rng: Rng::new(rng.next_u64()),
        }
    }

    fn read(&self, place: usize) -> Sqe {
        let len = COMMAND_BLOCKS as usize * BLOCK;
        let data = prp::buffer(&self.buffer, place * len, len).expect("memory");
        Sqe::read(1, 0, COMMAND_BLOCKS).with_data(data.pointer)
    }

    /// Pauses, then executes a command. Returns the latency.
    fn execute_after_pause(&mut self, sqe: Sqe) -> Duration {
        clock::sleep(Duration::from_nanos(self.rng.below(PAUSE)));
        let began = clock::monotonic();
        let queue = &mut self.queues[0];
        queue.submit(sqe).expect("room");
        queue.ring();
        loop {
            if let Some(cqe) = queue.poll() {
                assert!(cqe.status().is_success(), "{cqe:?}");
                queue.ring();
                return clock::monotonic() - began;
            }
            let signals = self.vectors[1].wait(Duration::from_secs(10));
            assert!(signals.expect("a vector") > 0, "an interrupt is lost");
        }
    }

    /// Keeps the first `queues` queues full until the flag is set. Returns the number of completed commands.
    fn keep_busy(&mut self, queues: usize, is_over: &AtomicBool) -> u64 {
        let sqe = self.read(0);
        let mut in_flight = vec![0; queues];
        let mut done = 0;
        while !is_over.load(Ordering::Relaxed) || in_flight.iter().any(|count| *count > 0) {
            for (queue, count) in self.queues.iter_mut().zip(&mut in_flight) {
                while let Some(cqe) = queue.poll() {
                    assert!(cqe.status().is_success(), "{cqe:?}");
                    *count -= 1;
                    done += 1;
                }
                while *count < DEPTH && !is_over.load(Ordering::Relaxed) {
                    queue.submit(sqe).expect("room");
                    *count += 1;
                }
                queue.ring();
            }
            clock::sleep(4 * READ);
        }
        done
    }
}

/// Latencies of commands.
#[derive(Debug, Default)]
struct LatencySamples(Mutex<Vec<Duration>>);

impl LatencySamples {
    fn add(&self, times: Vec<Duration>) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.extend(times);
    }

    /// Returns the 99.9th percentile and the maximum.
    fn longest(&self) -> (Duration, Duration) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.sort_unstable();
        let last = all.len() - 1;
        (all[last - last / 1000], all[last])
    }
}

/// Creates a drive in memory with a range for each guest. Each read takes time.
fn timed_drive(guests: usize) -> Arc<Drive> {
    let blocks = Blocks::new(guests * RANGE_BLOCKS).with_time(READ);
    let controller: Arc<dyn HostController> = Arc::new(SoftwareController::new(blocks, 9));
    Drive::new("simulated", controller, None).expect("a namespace")
}

fn range_of(guest: usize) -> ByteRange {
    let bytes = (RANGE_BLOCKS * BLOCK) as u64;
    ByteRange::new(guest as u64 * bytes, bytes).expect("a range")
}

/// Creates the poller pool, in which all functions share one poller. A watcher thread runs, too.
fn start_pollers() -> Arc<PollerPool> {
    let engine = Engine::of_thread().expect("a scheduler");
    engine.charge_only_calls();
    costs::share_one_poller();
    let pollers = PollerPool::new();
    pollers.start_watchdog().expect("an actor");
    pollers
}

/// Compares the latencies of a guest in two phases: beside a function with one busy queue, and with sixteen busy queues.
pub(crate) fn run_shares(less: OmittedParts, rng: &mut Rng) {
    let pollers = start_pollers();
    let drive = timed_drive(2);
    let mut quiet = Client::connect(&drive, range_of(0), 1, &pollers, rng);
    let mut busy = Client::connect(&drive, range_of(1), QUEUES, &pollers, rng);
    let phase = |quiet: &mut Client, mut busy: Client, queues: usize| {
        let is_over = Arc::new(AtomicBool::new(false));
        let done = Arc::new(AtomicU64::new(0));
        let (flag, count) = (is_over.clone(), done.clone());
        let back = Arc::new(Mutex::new(None));
        let place = back.clone();
        let work = move || {
            count.store(busy.keep_busy(queues, &flag), Ordering::Relaxed);
            *place.lock().unwrap_or_else(PoisonError::into_inner) = Some(busy);
        };
        let actor = start_thread("busy", work).expect("an actor");
        let times = LatencySamples::default();
        let sqe = quiet.read(0);
        let commands = 2 * COMMANDS.min(less.rounds.unwrap_or(u64::MAX) as usize);
        times.add(
            (0..commands)
                .map(|_| quiet.execute_after_pause(sqe))
                .collect(),
        );
        is_over.store(true, Ordering::Relaxed);
        acted();
        let _ended = actor.join();
        let busy = back.lock().unwrap_or_else(PoisonError::into_inner).take();
        (times.longest(), done.load(Ordering::Relaxed), busy)
    };
    let ((one, one_max), _, back) = phase(&mut quiet, busy, 1);
    busy = back.expect("it has ended");
    let ((all, all_max), done, _) = phase(&mut quiet, busy, usize::from(QUEUES));
    assert!(
        all <= 2 * one + QUANTUM && all_max <= 2 * one_max + QUANTUM,
        "beside {QUEUES} queues, p99.9 and maximum are {all:?} and {all_max:?}; beside one, {one:?} and {one_max:?}"
    );
    assert!(done > 0, "the function with {QUEUES} queues has no turn");
}

/// Means by which the fifth guest delays the poller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Attack {
    /// The guest's eventfd has many waiters, so a signal takes long.
    Signals,
    /// Holes are punched into the guest's memory.
    Memory,
    /// The guest's drive is a file on a file system that another process implements.
    Submissions,
    /// The guest deallocates holes.
    Holes,
    /// The guest causes log lines.
    Log,
}

const ATTACKS: [Attack; 5] = [
    Attack::Signals,
    Attack::Memory,
    Attack::Submissions,
    Attack::Holes,
    Attack::Log,
];

/// Logger that takes simulated time for each line.
struct SlowLogger;

impl log::Log for SlowLogger {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, _: &log::Record<'_>) {
        costs::work(LINE);
    }

    fn flush(&self) {}
}

/// Sets whether log lines take time.
pub(crate) fn charge_lines(are_charged: bool) {
    static SET: Once = Once::new();
    SET.call_once(|| {
        let _is_first = log::set_logger(&SlowLogger);
    });
    log::set_max_level(match are_charged {
        true => log::LevelFilter::Warn,
        false => log::LevelFilter::Off,
    });
}

/// Returns the attacker's drive, and the attacker's range on this drive.
fn drive_of(attack: Attack, shared: &Arc<Drive>, guests: usize) -> (Arc<Drive>, ByteRange) {
    let controller: Arc<dyn HostController> = match attack {
        Attack::Submissions => {
            let controller = SoftwareController::open_file("/drive".as_ref(), 9);
            Arc::new(controller.unwrap_or_else(|error| panic!("the file does not open: {error}")))
        }
        Attack::Holes => {
            let controller = SoftwareController::memory(HOLES, 9, MemoryAllocationTime::AsWritten);
            Arc::new(controller.unwrap_or_else(|error| panic!("no memory for a drive: {error}")))
        }
        _ => return (shared.clone(), range_of(guests)),
    };
    let drive = Drive::new("attacker", controller, None).expect("a namespace");
    let bytes = drive.blocks() << drive.lba_shift();
    (drive, ByteRange::new(0, bytes).expect("a range"))
}

impl Client {
    /// Makes one step of the attack.
    fn attack(&mut self, attack: Attack) {
        match attack {
            Attack::Signals | Attack::Submissions => drop(self.execute_after_pause(self.read(0))),
            Attack::Memory => drop(self.execute_after_pause(self.read(1))),
            Attack::Holes => self.deallocate(),
            Attack::Log => self.write_invalid_doorbell(),
        }
    }

    /// Deallocates the whole drive repeatedly, by commands with the maximum number of ranges.
    fn deallocate(&mut self) {
        let half = HOLES / 2 / BLOCK as u64;
        let ranges: Vec<u8> = (0..256_u64)
            .flat_map(|range| dsm_range(range % 2 * half, half as u32))
            .collect();
        self.buffer.write(0, &ranges);
        let data = prp::buffer(&self.buffer, 0, ranges.len()).expect("memory");
        let sqe = Sqe::new(io::DATASET_MANAGEMENT, 1)
            .with_cdw(10, 255)
            .with_cdw(11, DSM_DEALLOCATE)
            .with_data(data.pointer);
        self.execute_after_pause(sqe);
    }

    /// Writes invalid doorbell values, outside of the queue.
    fn write_invalid_doorbell(&mut self) {
        clock::sleep(Duration::from_nanos(self.rng.below(PAUSE)));
        let value = 1000 + self.rng.below(60_000) as u32;
        let side = [Side::SqTail, Side::CqHead][self.rng.below(2) as usize];
        self.controller.write_doorbell(1, side, value);
    }

    /// Prepares an attack. From now on, the attacker's calls take additional time.
    fn prepare(&self, attack: Attack) {
        match attack {
            Attack::Signals => costs::slow_signals(self.signalled, SIGNAL),
            Attack::Memory => {
                let file = std::fs::File::from(
                    self.memory.fd().try_clone_to_owned().expect("a descriptor"),
                );
                let inode = file.metadata().expect("a file").ino();
                let start = self.buffer.gpa() - LOW + 4096;
                costs::slow_memory(inode, start..start + 4096, ACCESS);
            }
            Attack::Submissions => disk::set_submission_time(SUBMISSION),
            Attack::Holes => costs::slow_deallocation(DEALLOCATION),
            Attack::Log => charge_lines(true),
        }
    }
}

/// Compares the latencies of guests in two phases: beside a quiet guest, and beside an attacker.
pub(crate) fn run_attackers(less: OmittedParts, rng: &mut Rng) {
    let pollers = start_pollers();
    let attack = ATTACKS[rng.below(ATTACKS.len() as u64) as usize];
    let guests = 4.min(less.guests.unwrap_or(u64::MAX)) as usize;
    disk::format(
        1 << 20,
        disk::DiskModelParameters {
            time_bits: 12,
            ..disk::DiskModelParameters::default()
        },
        0,
    );
    let (is_over, attacks) = (
        Arc::new(AtomicBool::new(false)),
        Arc::new(AtomicBool::new(false)),
    );
    let is_closed = Arc::new(AtomicBool::new(false));
    let flag = is_closed.clone();
    let kernel = start_thread("kernel", move || disk::run(&flag)).expect("an actor");
    let drive = timed_drive(guests + 1);
    let phases: Arc<[LatencySamples; 3]> = Arc::default();
    let ready = Arc::new(AtomicUsize::new(0));
    let mut actors: Vec<Started> = Vec::new();
    for guest in 0..guests {
        let mut client = Client::connect(&drive, range_of(guest), 1, &pollers, rng);
        let (phases, ready, attacks) = (phases.clone(), ready.clone(), attacks.clone());
        let commands = COMMANDS.min(less.rounds.unwrap_or(u64::MAX) as usize);
        let work = move || {
            let sqe = client.read(0);
            let mut phase = |phase: usize, commands: usize| {
                let times = (0..commands)
                    .map(|_| client.execute_after_pause(sqe))
                    .collect();
                phases[phase].add(times);
            };
            phase(0, commands);
            ready.fetch_add(1, Ordering::Relaxed);
            acted();
            while !attacks.load(Ordering::Relaxed) {
                clock::sleep(READ);
            }
            phase(1, FIRST);
            phase(2, commands);
        };
        actors.push(start_thread(&format!("guest-{guest}"), work).expect("an actor"));
    }
    let (own_drive, range) = drive_of(attack, &drive, guests);
    let mut attacker = Client::connect(&own_drive, range, 1, &pollers, rng);
    drop((own_drive, pollers));
    let (over, begins) = (is_over.clone(), attacks.clone());
    let attacker = move || {
        while !over.load(Ordering::Relaxed) {
            match begins.load(Ordering::Relaxed) {
                true => attacker.attack(attack),
                false => {
                    attacker.execute_after_pause(attacker.read(0));
                    if ready.load(Ordering::Relaxed) == guests {
                        attacker.prepare(attack);
                        begins.store(true, Ordering::Relaxed);
                        acted();
                    }
                }
            }
        }
    };
    let attacker = start_thread("attacker", attacker).expect("an actor");
    for actor in actors {
        let _ended = actor.join();
    }
    is_over.store(true, Ordering::Relaxed);
    acted();
    let _ended = attacker.join();
    is_closed.store(true, Ordering::Relaxed);
    acted();
    let _ended = kernel.join();
    charge_lines(false);
    let [(quiet, quiet_max), (_, first), (contended, beside_max)] =
        [0, 1, 2].map(|phase| phases[phase].longest());
    assert!(
        contended <= 2 * quiet + QUANTUM,
        "{attack:?}: p99.9 is {contended:?} ({beside_max:?} at most) beside the attacker, and {quiet:?} ({quiet_max:?}) beside a quiet guest"
    );
    assert!(
        first <= LONGEST,
        "{attack:?}: at first, a command took {first:?}"
    );
}
