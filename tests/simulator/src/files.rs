//! Functions with leases of one file. Their server may die at any step, and the next server restores their queues. The
//! machine may crash as well.
//!
//! The file lies on a simulated disk (`nvme_software::simulated`). The disk has a page cache, a device cache and errors.
//! Requests of a dead server take effect later, or never. The model treats each block as a register. After a Flush or a FUA
//! write, the test asks the disk immediately whether the data is stable. So the test does not depend on a crash at the
//! right moment.
//!
//! A server may die before it has recorded an error that the kernel reported. The next server finds this error by spare
//! open file descriptions, which outlive a server.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nvme_guest::threads::start_thread;
use nvme_lease::Ledger;
use nvme_lease::range::ByteRange;
use nvme_mpt::Drive;
use nvme_mpt::drive::HostController;
use nvme_mpt_memory::clock;
use nvme_mpt_memory::files::simulated as ledger_disk;
use nvme_mpt_memory::simulation::acted;
use nvme_mpt_tests::command::{DSM_DEALLOCATE, Sqe, dsm_range, io};
use nvme_mpt_tests::memory::GuestMemory;
use nvme_mpt_tests::queue::QueuePair;
use nvme_mpt_tests::registers::CC_CSS_NVM;
use nvme_mpt_tests::rng::Rng;
use nvme_mpt_tests::status;
use nvme_software::SoftwareController;
use nvme_software::simulated as disk;

use crate::engine::{Engine, Process};
use crate::guest::{CommandEnd, Conditions, Data, Guest, GuestState, Machine, Persona, Work};
use crate::history::{BLOCK, History};
use crate::registers::{BLOCKS, BLOCKS_MAX, bytes_of, value_of};
use crate::restarts::{VmmParts, open_local_backend, sleep_forever};
use crate::runs::OmittedParts;
use crate::scenario::{HIGH, HIGH_LEN, LOW, LOW_LEN, buffers};

/// Number of blocks of a function. With this many pages, a lost block is seldom overwritten before a Flush promises that it
/// is stable.
const SHARE_BLOCKS: usize = 4 * BLOCKS;

/// Size of a function's range in bytes.
pub(crate) const SHARE: u64 = (SHARE_BLOCKS * BLOCK) as u64;

/// Force Unit Access bit in dword 12 of write commands.
const FUA: u32 = 1 << 30;

/// Longest duration of a command. The kernel may delay a few requests by many seconds each.
const IO_TIMEOUT: Duration = Duration::from_secs(120);

/// Maximum number of requests that the kernel delays, for all functions together.
const DELAYED_REQUESTS_MAX: u64 = 2;

/// Directory of the ledger, on a separate disk.
const STATE: &str = "/state";

/// Values of a block in `marks`: readable, or marked as unreadable.
const READABLE: u64 = 0;
const MARKED: u64 = 1;

/// Expected contents of a function's blocks.
#[derive(Debug)]
struct ExpectedBlocks {
    number: u64,
    /// Values that reads may return.
    readable: History,
    /// Values that may be on stable storage.
    stable: History,
    /// Time at which the last successful Flush began.
    flushed: Duration,
    /// Number of failures of the disk when the VMM connected.
    failures: u64,
    /// True if a server died after it had recorded lost writes in the in-flight tracking. The loss may not be real: the
    /// server records it before it asks the spare description.
    may_have_lost_writes: bool,
    /// Number of Deallocate commands that are left of a series.
    remaining_deallocates: u64,
    /// Readability of the blocks: Write Uncorrectable marks blocks as unreadable. The marks survive crashes.
    marks: History,
    /// True if the guest sends no commands that delay other functions for long.
    is_plain: bool,
}

impl ExpectedBlocks {
    fn new(number: u64) -> Self {
        let history = || History::new(number, SHARE_BLOCKS).keep_all_writes();
        Self {
            number,
            readable: history(),
            stable: history(),
            flushed: Duration::ZERO,
            failures: 0,
            may_have_lost_writes: false,
            remaining_deallocates: 0,
            marks: history(),
            is_plain: false,
        }
    }

    /// Returns whether a read that began at `began` may find an unreadable block.
    fn may_be_marked(&self, mut blocks: std::ops::Range<u64>, began: Duration) -> bool {
        blocks.any(|block| self.marks.may_return(block, began, |value| value == MARKED))
    }

    /// Checks that a read that began at `began` may find all blocks readable.
    fn judge_readable(&self, blocks: std::ops::Range<u64>, began: Duration) {
        for block in blocks {
            if let Err(error) = self.marks.judge(block, READABLE, began) {
                panic!("a block was read that is marked as unreadable: {error}");
            }
        }
    }

    fn stable_value(&self, block: u64) -> u64 {
        let offset = self.number * SHARE + block * BLOCK as u64;
        value_of(block, &disk::stable(offset, BLOCK))
    }

    /// Checks that the writes are stable that had completed at the time `promised`.
    fn judge_stable(&self, blocks: std::ops::Range<u64>, promised: Duration, what: &str) {
        for block in blocks {
            let value = self.stable_value(block);
            if let Err(error) = self.stable.judge(block, value, promised) {
                panic!("{what} of {promised:?}: stable {error}");
            }
        }
    }

    /// Checks that a write that cleared marks is stable: without the mark, the block must not show its old data.
    fn judge_cleared(&self, blocks: std::ops::Range<u64>, began: Duration) {
        for block in blocks {
            if self.marks.judge(block, READABLE, began).is_ok() {
                continue;
            }
            let value = self.stable_value(block);
            if let Err(error) = self.stable.judge_since(block, value, began) {
                panic!("a write over a mark: stable {error}");
            }
        }
    }

    /// Handles a crash of the machine: checks the values that are stable, and continues with them.
    fn crash(&mut self, now: Duration) {
        let blocks = self.readable.blocks();
        self.judge_stable(0..blocks, self.flushed, "after a crash, the last Flush");
        let values: Vec<u64> = (0..blocks).map(|block| self.stable_value(block)).collect();
        self.readable.reset_to(&values, now);
        self.stable.reset_to(&values, now);
        self.flushed = now;
    }

    /// Handles a new connection of the VMM. The previous VMM has no requests in flight. `failures` is the number of the
    /// disk's failures so far.
    fn connect(&mut self, failures: u64, now: Duration) {
        self.readable.end_all(now);
        self.stable.end_all(now);
        self.marks.end_all(now);
        if disk::failures() > self.failures {
            self.stable.mark_uncertain(now);
        }
        self.failures = failures;
        self.may_have_lost_writes = false;
    }
}

/// Work of a guest on the blocks of its function.
#[derive(Debug)]
pub(crate) struct Tenant(Arc<Mutex<ExpectedBlocks>>);

/// A command on blocks.
#[derive(Debug)]
pub(crate) struct Command {
    opcode: u8,
    slba: u64,
    blocks: u64,
    is_durable: bool,
    /// Deallocate bit of Write Zeroes.
    deallocates: bool,
    /// Values written to the blocks, one for each block.
    values: Vec<u64>,
}

impl Tenant {
    /// Creates work that only reads, writes and flushes. All blocks are zeroes at first.
    pub(crate) fn plain(number: u64) -> Self {
        Self(Arc::new(Mutex::new(ExpectedBlocks {
            is_plain: true,
            ..ExpectedBlocks::new(number)
        })))
    }

    fn expected(&self) -> MutexGuard<'_, ExpectedBlocks> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Work for Tenant {
    type Command = Command;

    const COMMAND_SETS: u32 = CC_CSS_NVM;

    fn choose(&mut self, rng: &mut Rng) -> Command {
        let mut known = self.expected();
        if rng.below(100) == 0 {
            known.remaining_deallocates = 4 + rng.below(20);
        }
        let opcode = match rng.below(16) {
            _ if known.is_plain => {
                [io::READ, io::WRITE, io::FLUSH][rng.below(8).min(5) as usize / 2]
            }
            _ if rng.below(10) == 0 => io::WRITE_UNCORRECTABLE,
            _ if known.remaining_deallocates > 0 && rng.below(4) > 0 => {
                known.remaining_deallocates -= 1;
                io::DATASET_MANAGEMENT
            }
            0..5 => io::READ,
            5..10 => io::WRITE,
            10..12 => io::FLUSH,
            12..14 => io::WRITE_ZEROES,
            14 => io::DATASET_MANAGEMENT,
            _ => io::VERIFY,
        };
        let most = known.readable.blocks();
        let blocks = match opcode {
            io::DATASET_MANAGEMENT | io::WRITE_ZEROES => 1 + rng.below(2 * BLOCKS_MAX),
            _ => 1 + rng.below(BLOCKS_MAX),
        };
        // The first and the last block are adjacent to other leases.
        let slba = match rng.below(4) {
            0 => 0,
            1 => most - blocks,
            _ => rng.below(most - blocks + 1),
        };
        let values = match opcode {
            io::WRITE => (slba..slba + blocks)
                .map(|block| known.readable.value(block))
                .collect(),
            io::WRITE_ZEROES | io::DATASET_MANAGEMENT => vec![0; blocks as usize],
            _ => Vec::new(),
        };
        Command {
            opcode,
            slba,
            blocks,
            is_durable: matches!(opcode, io::WRITE | io::WRITE_ZEROES) && rng.below(6) == 0,
            deallocates: rng.below(2) == 0,
            values,
        }
    }

    fn to_sqe(&self, command: &Command) -> (Sqe, Data) {
        let Command {
            opcode,
            slba,
            blocks,
            is_durable,
            deallocates,
            ref values,
        } = *command;
        let count = blocks as u32;
        let fua = |sqe: Sqe| match is_durable {
            true => sqe.with_cdw(12, sqe.cdw(12) | FUA),
            false => sqe,
        };
        match opcode {
            io::READ => {
                let data = Data::In(blocks as usize * BLOCK);
                (Sqe::read(1, slba, count), data)
            }
            io::VERIFY => (Sqe::verify(1, slba, count), Data::None),
            io::WRITE_UNCORRECTABLE => (Sqe::write_uncorrectable(1, slba, count), Data::None),
            io::WRITE => {
                let data = values.iter().flat_map(|value| bytes_of(*value)).collect();
                (fua(Sqe::write(1, slba, count)), Data::Out(data))
            }
            io::WRITE_ZEROES => {
                let sqe = Sqe::write_zeroes(1, slba, count, deallocates);
                (fua(sqe), Data::None)
            }
            io::DATASET_MANAGEMENT => {
                let sqe = Sqe::new(opcode, 1).with_cdw(11, DSM_DEALLOCATE);
                (sqe, Data::Out(dsm_range(slba, count).to_vec()))
            }
            _ => (Sqe::flush(1), Data::None),
        }
    }

    fn begin(&mut self, command: &mut Command, now: Duration) {
        let mut known = self.expected();
        for (block, value) in (command.slba..).zip(&command.values) {
            known.readable.begin(block, *value, now);
            known.stable.begin(block, *value, now);
            known.marks.begin(block, READABLE, now);
        }
        if command.opcode == io::WRITE_UNCORRECTABLE {
            for block in command.slba..command.slba + command.blocks {
                known.marks.begin(block, MARKED, now);
            }
        }
    }

    fn end(&mut self, command: Command, end: &CommandEnd<'_>) {
        let Command {
            opcode,
            slba,
            blocks,
            is_durable,
            values,
            ..
        } = command;
        let mut known = self.expected();
        let has_succeeded = end.has_succeeded();
        if let Some(cqe) = end.cqe
            && !has_succeeded
        {
            let code = cqe.status().code();
            let is_lost = [status::WRITE_FAULT, status::READ_ONLY_RANGE].contains(&code)
                && ![io::READ, io::VERIFY].contains(&opcode)
                && (disk::failures() > known.failures || known.may_have_lost_writes);
            let is_marked = code == status::UNRECOVERED_READ_ERROR
                && [io::READ, io::VERIFY].contains(&opcode)
                && known.may_be_marked(slba..slba + blocks, end.began);
            assert!(
                is_lost || is_marked || end.is_excused,
                "opcode {opcode:#x} failed, and the disk did not: {cqe:?}"
            );
        }
        if opcode == io::READ && has_succeeded {
            for (block, bytes) in (slba..).zip(end.data.chunks_exact(BLOCK)) {
                if let Err(error) = known
                    .readable
                    .judge(block, value_of(block, bytes), end.began)
                {
                    panic!("{error}");
                }
            }
        }
        if [io::READ, io::VERIFY].contains(&opcode) && has_succeeded {
            known.judge_readable(slba..slba + blocks, end.began);
        }
        if [io::WRITE, io::WRITE_ZEROES].contains(&opcode) && has_succeeded {
            known.judge_cleared(slba..slba + blocks, end.began);
        }
        if opcode == io::WRITE_UNCORRECTABLE {
            for block in slba..slba + blocks {
                known.marks.end(block, end.began, end.now, has_succeeded);
            }
        }
        // Deallocate is a hint, so the blocks may keep their contents.
        let sure = has_succeeded && opcode != io::DATASET_MANAGEMENT;
        for (block, _) in (slba..).zip(&values) {
            known.readable.end(block, end.began, end.now, sure);
            known.stable.end(block, end.began, end.now, sure);
            known.marks.end(block, end.began, end.now, sure);
        }
        if opcode == io::FLUSH && has_succeeded {
            let all = 0..known.readable.blocks();
            known.judge_stable(all, end.began, "a Flush");
            known.flushed = known.flushed.max(end.began);
        }
        if is_durable && has_succeeded {
            for block in slba..slba + blocks {
                let value = known.stable_value(block);
                if let Err(error) = known.stable.judge_since(block, value, end.began) {
                    panic!("a write with FUA: stable {error}");
                }
            }
        }
    }

    fn verification_commands(&self) -> Vec<Command> {
        let count = self.expected().readable.blocks();
        let starts = (0..count).step_by(BLOCKS_MAX as usize);
        starts
            .map(|slba| Command {
                opcode: io::READ,
                slba,
                blocks: BLOCKS_MAX.min(count - slba),
                is_durable: false,
                deallocates: false,
                values: Vec::new(),
            })
            .collect()
    }
}

/// Returns random parameters of a disk model.
pub(crate) fn random_disk_parameters(
    less: OmittedParts,
    rng: &mut Rng,
) -> disk::DiskModelParameters {
    let fails = !less.no_trouble;
    let write_backs = [8, 40][rng.below(2) as usize];
    let mut one_in = |of: u64, worlds: u64| match fails && rng.below(worlds) == 0 {
        true => of + rng.below(of),
        false => 0,
    };
    disk::DiskModelParameters {
        failed_write_backs: one_in(write_backs, 2),
        failed_flushes: one_in(20, 6),
        interruptions: one_in(10, 2),
        short_transfers: one_in(6, 2),
        refused_slices: one_in(4, 3),
        refused_calls: one_in(8, 2),
        held_requests: one_in(60, 4),
        is_direct: rng.below(2) == 0,
        punches_holes: rng.below(4) > 0,
        time_bits: 8 + rng.below(14),
    }
}

/// A function between two crashes of its machine.
struct TenantLife {
    function: Arc<VmmParts>,
    expected: Arc<Mutex<ExpectedBlocks>>,
    shared: Arc<GuestState>,
    /// Number of failures of the disk when the VMM connected.
    failures: u64,
    guest: Option<(Guest<Tenant>, Vec<QueuePair>)>,
}

impl TenantLife {
    fn new(known: &Arc<Mutex<ExpectedBlocks>>, rounds: u64, rng: &mut Rng) -> Self {
        let regions = [(LOW, LOW_LEN), (HIGH, HIGH_LEN)];
        let memory = GuestMemory::new(&regions).unwrap_or_else(|error| panic!("{error}"));
        let (parts, pairs) = VmmParts::new(&memory, rng);
        let shared = Arc::new(GuestState::default());
        let conditions = Conditions {
            rounds,
            io_timeout: IO_TIMEOUT,
            admin_timeout: IO_TIMEOUT,
            may_fail: false,
            may_be_slow: true,
            resets: 0,
            deletions: 0,
            aborts: 0,
        };
        let buffers = buffers(&memory);
        let machine = Machine {
            memory,
            interrupts: Vec::new(),
            shared: shared.clone(),
            buffers,
        };
        let work = Tenant(known.clone());
        let seed = Rng::new(rng.next_u64());
        let guest = Guest::new(work, Persona::FreeBsd, conditions, seed, machine);
        Self {
            function: parts,
            expected: known.clone(),
            shared,
            failures: disk::failures(),
            guest: Some((guest, pairs)),
        }
    }

    /// Starts the guest once its VMM is connected.
    fn start(&mut self, engine: &Engine) -> Option<Process> {
        let (guest, pairs) = self.guest.take()?;
        let mut known = self.expected.lock().unwrap_or_else(PoisonError::into_inner);
        known.connect(self.failures, clock::monotonic());
        drop(known);
        Some(engine.start_process("guest", move || guest.run_on(pairs)))
    }

    /// Handles the death of the function's server.
    fn on_server_death(&self) {
        self.function.on_server_death();
        // The call may switch to other actors, so the lock is not held here.
        let has_losses = self.function.has_write_errors();
        let mut known = self.expected.lock().unwrap_or_else(PoisonError::into_inner);
        known.may_have_lost_writes |= has_losses;
    }

    fn has_ended(&self) -> bool {
        self.shared.ended.load(Ordering::Relaxed)
    }
}

/// Runs a server until it is killed.
fn serve(parts: &[Arc<VmmParts>], life: u64) {
    let path = Path::new("/drive");
    let controller = SoftwareController::open_file(path, 9);
    let controller = controller.unwrap_or_else(|error| panic!("the file does not open: {error}"));
    let controller: Arc<dyn HostController> = Arc::new(controller);
    let drive = Drive::new("simulated", controller, None).expect("a namespace");
    let ledger = Ledger::open(STATE.as_ref());
    let mut attachments = Vec::new();
    for (number, parts) in parts.iter().enumerate() {
        let range = ByteRange::new(number as u64 * SHARE, SHARE).expect("a range");
        let id = format!("guest-{number}");
        let local_backend = open_local_backend(parts, &drive, &ledger, &id, range, life);
        attachments.push(local_backend);
    }
    sleep_forever();
}

/// Runs machines that crash, and servers that die. The last server runs until the guests have finished.
pub(crate) fn run(less: OmittedParts, rng: &mut Rng) {
    let engine = Engine::of_thread().expect("a scheduler");
    let tenants = (1 + rng.below(3)).min(less.guests.unwrap_or(u64::MAX));
    disk::format(
        tenants * SHARE,
        random_disk_parameters(less, rng),
        DELAYED_REQUESTS_MAX,
    );
    ledger_disk::format(0);
    let is_over = Arc::new(AtomicBool::new(false));
    let flag = is_over.clone();
    let kernel = start_thread("kernel", move || disk::run(&flag)).expect("an actor");
    let known: Vec<_> = (0..tenants)
        .map(|number| Arc::new(Mutex::new(ExpectedBlocks::new(number))))
        .collect();
    let machines = 1 + rng.below(3);
    for machine in 1..=machines {
        let rounds = (12 + rng.below(36)).min(less.rounds.unwrap_or(u64::MAX));
        let mut seats: Vec<TenantLife> = known
            .iter()
            .map(|known| TenantLife::new(known, rounds, rng))
            .collect();
        let parts_of_all: Vec<_> = seats.iter().map(|vmm| vmm.function.clone()).collect();
        let start = |life: u64| {
            let parts_of_all = parts_of_all.clone();
            engine.start_process("server", move || serve(&parts_of_all, life))
        };
        let mut server = start(0);
        while !parts_of_all.iter().all(|parts| parts.is_served()) {
            clock::sleep(Duration::from_micros(50));
        }
        let guests: Vec<Process> = seats
            .iter_mut()
            .filter_map(|vmm| vmm.start(engine))
            .collect();
        for life in 1..=rng.below(8) {
            let bits = 10 + rng.below(14);
            clock::sleep(Duration::from_nanos(rng.below(2 << bits)));
            engine.kill(server);
            seats.iter().for_each(TenantLife::on_server_death);
            server = start(life);
        }
        if machine == machines {
            while !seats.iter().all(TenantLife::has_ended) {
                clock::sleep(Duration::from_millis(1));
            }
        } else {
            let bits = 10 + rng.below(14);
            clock::sleep(Duration::from_nanos(rng.below(2 << bits)));
        }
        guests.into_iter().for_each(|guest| engine.kill(guest));
        engine.kill(server);
        // In all other cases, only the processes end, and the machine continues.
        if machine == machines || rng.below(3) > 0 {
            disk::crash();
            ledger_disk::crash();
            for known in &known {
                let mut known = known.lock().unwrap_or_else(PoisonError::into_inner);
                known.crash(clock::monotonic());
            }
        }
    }
    is_over.store(true, Ordering::Relaxed);
    acted();
    let _ended = kernel.join();
}
