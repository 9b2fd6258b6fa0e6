//! A drive that completes the commands of two guests arbitrarily: in any order, twice, with any status, or by entries with
//! unused identifiers or arbitrary contents.
//!
//! The first byte of the input chooses the drive's maximum transfer size and the number of guests. Steps follow, each a
//! byte and its operands: a guest submits a command, the drive completes a command, or the drive posts any other entry.
//!
//! Each command of each guest must complete once. It must succeed if the drive reported only success for the command, and
//! fail if the drive reported an error for any part of it. A command that the drive interrupted may be submitted again.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;

use nvme_guest::threads::ThreadSpawner;
use nvme_guest::{CqConfig, DoorbellMode, Gpa, MemoryRegion, SqConfig};
use nvme_lease::range::ByteRange;
use nvme_lease::{LeaseRequest, Ledger, RequestedBytes};
use nvme_mpt::shadow::ShadowQueue;
use nvme_mpt::{BackendOptions, Drive, LocalBackend, LocalBackendConfig, PollerPool};
use nvme_mpt_tests::command::Sqe;
use nvme_mpt_tests::drive::{HandQueue, ModelDrive, NamespaceOptions, Options};
use nvme_spec::ids::QueueId;
use nvme_spec::registers::Doorbell;
use nvme_vfio::{ControllerOptions, VfioController};

use crate::Input;

const PAGE: u64 = 4096;
const ENTRIES: u32 = 64;
const QUEUE: QueueId = QueueId(1);
/// Layout of a guest's memory: rings, a PRP list, and data.
const SQ: u64 = 0;
const CQ: u64 = PAGE;
const LIST: u64 = 2 * PAGE;
const DATA: u64 = 3 * PAGE;
const DATA_PAGES: u64 = 32;
/// Size of each lease in bytes.
const LEASE: u64 = 1 << 20;
const BLOCK: u64 = 512;
/// Number of blocks reserved for each command: those of the longest command.
const BLOCKS_PER_COMMAND: u64 = DATA_PAGES * PAGE / BLOCK;
/// Number of a guest's commands: one for each reserved part of the lease.
const COMMANDS: usize = (LEASE / BLOCK / BLOCKS_PER_COMMAND) as usize;
const GUESTS: usize = 2;
/// Maximum number of steps of an input. Further steps are ignored.
const STEPS: usize = 256;

const STATUS_MASK: u64 = 0x7FF << 49;

/// Status Command Interrupted, after which the guest may submit the command again (NVMe Base 2.0, figure 97).
const INTERRUPTED: u64 = 0x21;

thread_local! {
    static FIXTURES: RefCell<BTreeMap<u8, Fixture>> = const { RefCell::new(BTreeMap::new()) };
}

/// Result that a guest's command must have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum ExpectedResult {
    #[default]
    Idle,
    /// The command is in flight, and has no error so far.
    InFlight,
    /// The command is in flight, and the drive has interrupted it. It may be repeated, and may then have any result.
    Interrupted,
    /// The command is in flight, and a part of it has failed.
    PartFailed,
}

/// A guest whose queue pair this thread polls.
struct Lane {
    local_backend: LocalBackend,
    memory: File,
    shadow: Option<Box<ShadowQueue>>,
    tail: u32,
    head: u32,
    phase: bool,
    command_states: [ExpectedResult; COMMANDS],
}

impl Lane {
    fn new(drive: &Arc<Drive>, ledger: &Ledger, pollers: &Arc<PollerPool>, index: u64) -> Self {
        let request = LeaseRequest {
            id: &format!("lease-{index}"),
            drive: drive.identity(),
            nsid: drive.namespace().nsid,
            wanted: RequestedBytes::Range(ByteRange::new(index * LEASE, LEASE).expect("a range")),
            lba_shift: drive.lba_shift(),
            blocks: drive.blocks(),
            previous_data: nvme_lease::PreviousDataPolicy::Kept,
        };
        let local_backend = LocalBackend::new(LocalBackendConfig {
            drive: drive.clone(),
            lease: ledger.acquire(&request).expect("a lease"),
            reservation: None,
            pollers: pollers.clone(),
            options: BackendOptions {
                queue_pairs: 1,
                doorbells: DoorbellMode::Trap,
                ..BackendOptions::default()
            },
        })
        .expect("an attachment");
        let memory = tempfile::tempfile_in("/dev/shm").expect("memory");
        let len = DATA + DATA_PAGES * PAGE;
        memory.set_len(len).expect("room");
        let region = MemoryRegion {
            gpa: Gpa(0),
            len,
            fd: OwnedFd::from(memory.try_clone().expect("a descriptor")),
            offset: 0,
            readable: true,
            writable: true,
        };
        local_backend.window().map(region).expect("memory");
        let list: Vec<u8> = (1..DATA_PAGES)
            .flat_map(|page| (DATA + page * PAGE).to_le_bytes())
            .collect();
        memory.write_all_at(&list, LIST).expect("memory");
        Self {
            local_backend,
            memory,
            shadow: None,
            tail: 0,
            head: 0,
            phase: true,
            command_states: [ExpectedResult::Idle; COMMANDS],
        }
    }

    fn begin(&mut self) {
        self.memory
            .write_all_at(&[0; 2 * PAGE as usize], SQ)
            .expect("memory");
        (self.tail, self.head, self.phase) = (0, 0, true);
        let cq = CqConfig {
            qid: QUEUE,
            base: Gpa(CQ),
            entries: ENTRIES,
            vector: None,
        };
        self.local_backend.create_cq(cq).expect("a queue");
        let sq = SqConfig {
            qid: QUEUE,
            cqid: QUEUE,
            base: Gpa(SQ),
            entries: ENTRIES,
        };
        self.local_backend.create_sq(sq).expect("a queue");
        self.shadow = Some(self.local_backend.take_queue(QUEUE).expect("the queue"));
    }

    fn end(&mut self) {
        if let Some(shadow) = self.shadow.take() {
            let given_back = self.local_backend.return_queue(shadow);
            given_back.expect("it is known");
        }
        self.local_backend.reset().expect("nothing is in flight");
    }

    /// Submits one of the guest's commands that are not in flight.
    fn send(&mut self, kind: u8, size: u8) {
        let Some(index) = self
            .command_states
            .iter()
            .position(|expected_result| *expected_result == ExpectedResult::Idle)
        else {
            return;
        };
        let slba = index as u64 * BLOCKS_PER_COMMAND;
        let blocks = u32::from(size) % BLOCKS_PER_COMMAND as u32 + 1;
        let sqe = match kind % 5 {
            0 => Sqe::write_zeroes(1, slba, blocks, false),
            1 => Sqe::compare(1, slba, blocks),
            2 => Sqe::write(1, slba, blocks),
            _ => Sqe::read(1, slba, blocks),
        };
        let pages = (u64::from(blocks) * BLOCK).div_ceil(PAGE);
        let prp2 = match pages {
            0 | 1 => 0,
            2 => DATA + PAGE,
            _ => LIST,
        };
        let pointer = nvme_mpt_tests::command::DataPointer::prp(DATA, prp2);
        let sqe = sqe.with_data(pointer).with_cid(index as u16);
        let bytes: Vec<u8> = sqe.0.iter().flat_map(|word| word.to_le_bytes()).collect();
        let at = SQ + 64 * u64::from(self.tail);
        self.memory.write_all_at(&bytes, at).expect("memory");
        self.tail = (self.tail + 1) % ENTRIES;
        self.command_states[index] = ExpectedResult::InFlight;
        let tail = Doorbell::SqTail(QUEUE);
        self.local_backend.ring_doorbell(tail, self.tail);
    }

    /// Polls the guest's queue, and consumes completions.
    fn poll(&mut self) -> bool {
        let shadow = self.shadow.as_mut().expect("between begin and end");
        let busy = shadow.poll();
        let mut taken = false;
        loop {
            let mut entry = [0; 16];
            let at = CQ + 16 * u64::from(self.head);
            self.memory.read_exact_at(&mut entry, at).expect("memory");
            let word = |at: usize| u16::from_le_bytes([entry[at], entry[at + 1]]);
            if (word(14) & 1 == 1) != self.phase {
                break;
            }
            let index = usize::from(word(12));
            let expected_result = self
                .command_states
                .get_mut(index)
                .expect("a command of the guest's");
            let success = word(14) >> 1 & 0x7FF == 0;
            match std::mem::take(expected_result) {
                ExpectedResult::Idle => panic!("command {index} completed, which is not in flight"),
                ExpectedResult::InFlight => assert!(success, "command {index}: {:#x}", word(14)),
                ExpectedResult::Interrupted => {}
                ExpectedResult::PartFailed => {
                    assert!(!success, "command {index} succeeded in part")
                }
            }
            self.head = (self.head + 1) % ENTRIES;
            if self.head == 0 {
                self.phase = !self.phase;
            }
            taken = true;
        }
        if taken {
            let head = Doorbell::CqHead(QUEUE);
            self.local_backend.ring_doorbell(head, self.head);
        }
        busy || taken
    }

    fn is_idle(&self) -> bool {
        self.command_states
            .iter()
            .all(|expected_result| *expected_result == ExpectedResult::Idle)
    }
}

/// A drive whose hardware this thread plays.
struct Fixture {
    lanes: Vec<Lane>,
    model: Arc<ModelDrive>,
    queue: Option<HandQueue>,
    /// Commands that the drive has fetched.
    commands: Vec<Sqe>,
}

impl Fixture {
    fn new(mdts: u8) -> Self {
        let model = ModelDrive::start(Options {
            mdts,
            queue_pairs: 1,
            entries_max: 32,
            namespaces: vec![NamespaceOptions::new(
                1,
                GUESTS as u64 * LEASE,
                BLOCK as u32,
            )],
            is_manual: true,
            ..Options::default()
        });
        let options = ControllerOptions {
            // No command may be aborted during an input.
            command_timeout: Duration::from_secs(3600),
            ..ControllerOptions::default()
        };
        let controller = VfioController::open(model.clone(), options, &ThreadSpawner::default())
            .expect("a drive");
        let path = "0000:01:00.0";
        let drive = Drive::new(path, controller, None).expect("a namespace");
        let (ledger, pollers) = (Ledger::in_process(), PollerPool::new());
        let lanes = (0..GUESTS as u64)
            .map(|index| Lane::new(&drive, &ledger, &pollers, index))
            .collect();
        Self {
            lanes,
            model,
            queue: None,
            commands: Vec::new(),
        }
    }

    /// Polls the guests' queues, and fetches their commands for the drive.
    fn poll_lanes(&mut self, guests: usize) -> bool {
        let mut busy = false;
        for lane in &mut self.lanes[..guests] {
            busy |= lane.poll();
        }
        let queue = match &mut self.queue {
            Some(queue) => queue,
            none => none.insert(self.model.hand_queue(1).expect("a queue")),
        };
        while let Some(sqe) = queue.take() {
            let twice = self.commands.iter().any(|other| other.cid() == sqe.cid());
            assert!(!twice, "an identifier in use: {sqe:?}");
            self.commands.push(sqe);
            busy = true;
        }
        busy
    }

    /// Posts an entry. An entry with the identifier of a command in flight completes this command. If no command is in
    /// flight, nothing is posted: no queue would poll, so the next command's poll might take this entry for its own
    /// completion.
    fn post(&mut self, lower: u64, upper: u64) {
        if self.commands.is_empty() {
            return;
        }
        let cid = (upper >> 32) as u16;
        let known = self.commands.iter().position(|sqe| sqe.cid() == cid);
        if let Some(index) = known {
            let sqe = self.commands.remove(index);
            if upper & STATUS_MASK != 0 {
                let stretch = sqe.0[5] / BLOCKS_PER_COMMAND;
                let lane = &mut self.lanes[stretch as usize / COMMANDS];
                let expected_result = &mut lane.command_states[stretch as usize % COMMANDS];
                assert_ne!(
                    *expected_result,
                    ExpectedResult::Idle,
                    "a part of nothing: {sqe:?}"
                );
                let is_interrupted = (upper & STATUS_MASK) >> 49 == INTERRUPTED;
                // The first failed part, in order of the blocks, determines the status. So the status of other parts may
                // not be visible to the guest.
                *expected_result =
                    match is_interrupted || *expected_result == ExpectedResult::Interrupted {
                        true => ExpectedResult::Interrupted,
                        false => ExpectedResult::PartFailed,
                    };
            }
        }
        if let Some(queue) = &mut self.queue {
            queue.post([lower, upper]);
        }
    }

    fn run(&mut self, input: &mut Input<'_>, guests: usize) {
        let mut last = [0; 2];
        for _ in 0..STEPS {
            if input.is_empty() {
                break;
            }
            let step = input.byte();
            let operand = usize::from(step >> 3);
            match step % 8 {
                0..3 => {
                    let (kind, size) = (input.byte(), input.byte());
                    self.lanes[operand % guests].send(kind, size);
                }
                3 | 4 if !self.commands.is_empty() => {
                    let cid = self.commands[operand % self.commands.len()].cid();
                    let status = match step % 8 {
                        3 => 0,
                        _ => u64::from(input.number()) << 48,
                    };
                    last = [0, u64::from(cid) << 32 | status];
                    self.post(last[0], last[1]);
                }
                5 => {
                    let (cid, status) = (input.number(), input.number());
                    last = [0, u64::from(cid) << 32 | u64::from(status) << 48];
                    self.post(last[0], last[1]);
                }
                6 => {
                    let mut words = [0; 16];
                    let piece = input.piece(16);
                    words[..piece.len()].copy_from_slice(piece);
                    let number = u128::from_le_bytes(words);
                    last = [number as u64, (number >> 64) as u64];
                    self.post(last[0], last[1]);
                }
                _ => self.post(last[0], last[1]),
            }
            self.poll_lanes(guests);
        }
        // From here on, the drive completes the remaining commands correctly.
        let mut idle = 0;
        while !self.lanes[..guests].iter().all(Lane::is_idle) {
            while let Some(sqe) = self.commands.first() {
                let upper = u64::from(sqe.cid()) << 32;
                self.post(0, upper);
                self.poll_lanes(guests);
            }
            idle = if self.poll_lanes(guests) { 0 } else { idle + 1 };
            if idle > 1000 {
                // Commands of guests that share a queue pair may have to wait for a while.
                std::thread::sleep(Duration::from_micros(100));
            }
            assert!(idle < 50_000, "commands are lost");
        }
        // After the last completion, nothing may follow.
        for _ in 0..3 {
            self.poll_lanes(guests);
        }
        assert!(self.commands.is_empty());
    }
}

/// Runs one input.
pub fn run(input: &[u8]) {
    let mut input = Input(input);
    let choice = input.byte();
    let mdts = [0, 1, 3][usize::from(choice) % 3];
    let guests = usize::from(choice / 3) % GUESTS + 1;
    FIXTURES.with_borrow_mut(|fixtures| {
        let fixture = fixtures.entry(mdts).or_insert_with(|| Fixture::new(mdts));
        for lane in &mut fixture.lanes[..guests] {
            lane.begin();
        }
        fixture.run(&mut input, guests);
        for lane in &mut fixture.lanes[..guests] {
            lane.end();
        }
        fixture.model.check_host().expect("a host that behaves");
    });
}
