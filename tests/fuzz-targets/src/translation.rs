//! A guest that submits arbitrary I/O commands, with arbitrary memory contents, to a shadow queue that this thread polls.
//!
//! The first byte of the input chooses the logical block size, the number of regions and commands, the command set, and a
//! lease of one or two extents. At first, all zones are empty and there are no keys. After an input with a Batch, the drive
//! is created again for the next input. Each region has four bytes: its first page, its length, and the device's access
//! rights. Each command has 64 bytes. The remaining bytes are the content of the regions, in order.
//!
//! Each command must complete once, with its identifier and a status that the specification permits. A successful command
//! must lie within the lease. A region without write access must stay unchanged, and so must the memory of another guest,
//! and its blocks on both sides of the lease. With zones, this other guest writes its blocks only once, so the blocks also
//! show whether its zones were reset.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;

use nvme_guest::{CqConfig, DoorbellMode, Gpa, MemoryRegion, SqConfig};
use nvme_lease::range::ByteRange;
use nvme_lease::{LeaseRequest, Ledger, RequestedBytes};
use nvme_models::DriveProfile;
use nvme_mpt::shadow::ShadowQueue;
use nvme_mpt::{BackendOptions, Drive, LocalBackend, LocalBackendConfig, PollerPool};
use nvme_mpt_memory::clock;
use nvme_mpt_vmm::drives::{self, DriveOptions};
use nvme_spec::ids::QueueId;
use nvme_spec::registers::Doorbell;

use crate::{Input, RINGS};

const PAGE: u64 = 4096;
/// Number of pages of the largest region.
const REGION_PAGES: u64 = 64;
const REGIONS: usize = 4;
const ENTRIES: u32 = 32;
const QUEUE: QueueId = QueueId(1);
const SQ: u64 = RINGS;
const CQ: u64 = RINGS + 2 * PAGE;
/// Size of each lease in bytes. The guest's lease lies between two leases of neighbours.
const LEASE: u64 = 1 << 20;
/// Fill byte for the neighbours' memory and blocks.
const MARK: u8 = 0xA5;
/// Number of bytes of the neighbours that are checked: those next to the guest's blocks.
const EDGE: u64 = 64 << 10;

/// Status codes that a command may have, with Status Code Type.
const LEGAL: [u16; 25] = [
    0x000, // Successful Completion
    0x001, // Invalid Command Opcode
    0x002, // Invalid Field in Command
    0x004, // Data Transfer Error
    0x00B, // Invalid Namespace or Format
    0x00D, // Invalid SGL Segment Descriptor
    0x00E, // Invalid Number of SGL Descriptors
    0x00F, // Data SGL Length Invalid
    0x011, // SGL Descriptor Type Invalid
    0x013, // PRP Offset Invalid
    0x080, // LBA Out of Range
    0x081, // Capacity Exceeded
    0x085, // Invalid Value Size
    0x086, // Invalid Key Size
    0x087, // KV Key Does Not Exist
    0x089, // Key Exists
    0x183, // Command Size Limit Exceeded
    0x1B8, // Zone Boundary Error
    0x1B9, // Zone Is Full
    0x1BC, // Zone Invalid Write
    0x1BD, // Too Many Active Zones
    0x1BE, // Too Many Open Zones
    0x1BF, // Invalid Zone State Transition
    0x281, // Unrecovered Read Error
    0x285, // Compare Failure
];

const FLUSH: u8 = 0x00;
const WRITE: u8 = 0x01;
const READ: u8 = 0x02;
const COMPARE: u8 = 0x05;
const DATASET_MANAGEMENT: u8 = 0x09;
const COPY: u8 = 0x19;
const ZONE_MANAGEMENT_SEND: u8 = 0x79;
const ZONE_MANAGEMENT_RECEIVE: u8 = 0x7A;
const STORE: u8 = 0x01;
const RETRIEVE: u8 = 0x02;
const LIST: u8 = 0x06;
const DELETE: u8 = 0x10;
const EXIST: u8 = 0x14;
const BATCH: u8 = 0x85;

/// Profile of a zoned drive: each lease has 16 zones, of which 4 can be open and 6 active.
const ZONES: &str = "model = \"zns\"\nzone_size = \"64K\"\nzone_capacity = \"64K\"\n\
                     max_open = 16\nmax_active = 24\nappend_limit = \"16K\"\n";

/// Profile of a key-value drive.
const PAIRS: &str = "model = \"kv\"\nmax_value = \"64K\"\n";

/// Kind of the drive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Blocks,
    /// A drive on which the guest's lease has two extents, with a neighbour's lease between them.
    Extents,
    Zones,
    Pairs,
}

/// Maximum number of polls until a command completes. A reset of all zones takes one poll for each zone.
const POLLS_MAX: usize = 64;

/// Maximum number of pauses after these polls: if blocks are marked as unreadable, the command waits until a thread has
/// stored the mark.
const PAUSES: usize = 10_000;
const PAUSE: Duration = Duration::from_millis(1);

thread_local! {
    static FIXTURES: RefCell<BTreeMap<(u32, Kind), Fixture>> =
        const { RefCell::new(BTreeMap::new()) };
}

/// A guest's queue pair, which this thread polls.
struct Lane {
    local_backend: LocalBackend,
    rings: File,
    shadow: Option<Box<ShadowQueue>>,
    tail: u32,
}

impl Lane {
    fn new(
        drive: &Arc<Drive>,
        ledger: &Ledger,
        pollers: &Arc<PollerPool>,
        (id, wanted): (&str, RequestedBytes),
    ) -> Self {
        let request = LeaseRequest {
            id,
            drive: drive.identity(),
            nsid: drive.namespace().nsid,
            wanted,
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
                // The queues use doorbell registers, since data of a command could overwrite a Doorbell Buffer.
                doorbells: DoorbellMode::Trap,
                ..BackendOptions::default()
            },
        })
        .expect("an attachment");
        let rings = file(4 * PAGE);
        assert!(map(&local_backend, &rings, RINGS, 4, (true, true)));
        Self {
            local_backend,
            rings,
            shadow: None,
            tail: 0,
        }
    }

    fn begin(&mut self) {
        self.rings
            .write_all_at(&[0; 4 * PAGE as usize], 0)
            .expect("memory");
        self.tail = 0;
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
            self.local_backend
                .return_queue(shadow)
                .expect("it is known");
        }
        self.local_backend.reset().expect("nothing is in flight");
    }

    /// Executes one command. Only one is in flight at a time, since its data may overwrite the rings.
    fn run(&mut self, mut command: [u8; 64]) -> u16 {
        let index = self.tail;
        let cid = 0x4000 + index as u16;
        command[2..4].copy_from_slice(&cid.to_le_bytes());
        let at = SQ - RINGS + 64 * u64::from(index);
        self.rings.write_all_at(&command, at).expect("memory");
        self.tail = (index + 1) % ENTRIES;
        let before = completed_count(&self.local_backend);
        self.local_backend
            .ring_doorbell(Doorbell::SqTail(QUEUE), self.tail);
        let shadow = self.shadow.as_mut().expect("between begin and end");
        assert!(shadow.poll(), "the command was not taken: {command:x?}");
        for turn in 0..POLLS_MAX + PAUSES {
            if completed_count(&self.local_backend) == before {
                if turn >= POLLS_MAX {
                    clock::sleep(PAUSE);
                }
                shadow.poll();
            }
        }
        assert!(!shadow.poll(), "there was more than one command");
        assert_eq!(
            completed_count(&self.local_backend),
            before + 1,
            "{command:x?}"
        );
        let mut entry = [0; 16];
        let at = CQ - RINGS + 16 * u64::from(index);
        self.rings.read_exact_at(&mut entry, at).expect("memory");
        let word = |at: usize| u16::from_le_bytes([entry[at], entry[at + 1]]);
        assert_eq!(word(8), self.tail as u16, "SQ head: {command:x?}");
        assert_eq!((word(10), word(12)), (QUEUE.0, cid), "{command:x?}");
        assert_eq!(word(14) & 1, 1, "phase: {command:x?}");
        let status = word(14) >> 1 & 0x7FF;
        assert!(LEGAL.contains(&status), "status {status:#x}: {command:x?}");
        status
    }
}

/// Returns the number of completed commands.
fn completed_count(local_backend: &LocalBackend) -> u64 {
    let stats = local_backend.stats();
    stats.queues.first().map_or(0, |queue| queue.commands)
}

struct Fixture {
    guest: Lane,
    /// Memory file with all regions of the guest.
    memory: File,
    neighbours: [Lane; 2],
    neighbours_memory: File,
    lba_size: u32,
    kind: Kind,
}

impl Fixture {
    fn new(lba_size: u32, kind: Kind) -> Self {
        let profile = match kind {
            Kind::Blocks | Kind::Extents => None,
            Kind::Zones => Some(ZONES),
            Kind::Pairs => Some(PAIRS),
        };
        let profile = profile.map(|text| DriveProfile::parse("fuzz", text).expect("a profile"));
        let path = format!("memory:{}", 4 * LEASE).parse().expect("a drive");
        let options = DriveOptions {
            lba: Some(lba_size.try_into().expect("a size")),
            profile: profile.map(Arc::new),
            ..DriveOptions::default()
        };
        let drive = drives::open(&path, options).expect("memory");
        let (ledger, pollers) = (Ledger::in_process(), PollerPool::new());
        let at =
            |index| RequestedBytes::Range(ByteRange::new(index * LEASE, LEASE).expect("a range"));
        let lane = |id, wanted| Lane::new(&drive, &ledger, &pollers, (id, wanted));
        let mut neighbours = [lane("below", at(0)), lane("above", at(2))];
        let neighbours_memory = file(2 * EDGE);
        for (neighbour, index) in neighbours.iter_mut().zip(0..) {
            let local_backend = &neighbour.local_backend;
            // The neighbour's memory is at addresses that inputs use for the guest's memory, too.
            assert!(map(
                local_backend,
                &neighbours_memory,
                0,
                2 * EDGE / PAGE,
                (true, true)
            ));
            neighbour.begin();
            neighbours_memory
                .write_all_at(&[MARK; 2 * EDGE as usize], 0)
                .expect("memory");
            let status = neighbour.run(edge(WRITE, index, lba_size, kind));
            assert_eq!(status, 0, "the neighbour's own write");
        }
        Self {
            guest: match kind {
                Kind::Extents => {
                    let wanted = RequestedBytes::Size {
                        bytes: 2 * LEASE,
                        unit: LEASE,
                        whole: false,
                    };
                    lane("guest", wanted)
                }
                _ => lane("guest", at(1)),
            },
            memory: file(REGIONS as u64 * REGION_PAGES * PAGE),
            neighbours,
            neighbours_memory,
            lba_size,
            kind,
        }
    }

    /// Checks that the neighbours' memory and blocks are unchanged.
    fn check_neighbours(&mut self) {
        let mut bytes = vec![0; 2 * EDGE as usize];
        for (neighbour, index) in self.neighbours.iter_mut().zip(0..) {
            self.neighbours_memory
                .read_exact_at(&mut bytes, 0)
                .expect("memory");
            assert!(
                bytes.iter().all(|byte| *byte == MARK),
                "another guest's memory was written"
            );
            let zeroes = [0; EDGE as usize];
            self.neighbours_memory
                .write_all_at(&zeroes, 0)
                .expect("memory");
            let status = neighbour.run(edge(READ, index, self.lba_size, self.kind));
            assert_eq!(status, 0, "another guest's blocks became unreadable");
            // The head follows the tail, so the neighbour's completion queue never becomes full.
            let head = neighbour.tail;
            let local_backend = &neighbour.local_backend;
            local_backend.ring_doorbell(Doorbell::CqHead(QUEUE), head);
            if head == 0 {
                neighbour.end();
                neighbour.begin();
            }
            self.neighbours_memory
                .read_exact_at(&mut bytes, 0)
                .expect("memory");
            assert!(
                bytes.iter().all(|byte| *byte == MARK),
                "another guest's blocks were written"
            );
        }
    }
}

/// Returns a neighbour's command on its blocks next to the guest's lease, or on a key. Write and Store have the same
/// opcode, and so do Read and Retrieve.
fn edge(opcode: u8, index: u64, lba_size: u32, kind: Kind) -> [u8; 64] {
    let blocks = EDGE / u64::from(lba_size);
    let slba = if index == 0 {
        LEASE / u64::from(lba_size) - blocks
    } else {
        0
    };
    let mut command = [0; 64];
    // The data pointer is an SGL data block at the start of memory.
    command[0] = opcode;
    command[1] = 0x40;
    command[4] = 1;
    command[32..36].copy_from_slice(&(EDGE as u32).to_le_bytes());
    if kind == Kind::Pairs {
        command[8..12].copy_from_slice(b"edge");
        command[40..44].copy_from_slice(&(EDGE as u32).to_le_bytes());
        command[44] = 4;
        return command;
    }
    command[40..48].copy_from_slice(&slba.to_le_bytes());
    command[48..52].copy_from_slice(&(blocks as u32 - 1).to_le_bytes());
    command
}

/// Returns a reset of all zones.
fn reset_all() -> [u8; 64] {
    let mut command = [0; 64];
    command[0] = ZONE_MANAGEMENT_SEND;
    command[4] = 1;
    command[52] = 4;
    command[53] = 1;
    command
}

fn file(len: u64) -> File {
    let file = tempfile::tempfile_in("/dev/shm").expect("memory");
    file.set_len(len).expect("room");
    file
}

/// Maps the start of a file for the guest. Returns false if the address is in use.
fn map(
    local_backend: &LocalBackend,
    file: &File,
    gpa: u64,
    pages: u64,
    (readable, writable): (bool, bool),
) -> bool {
    map_part(local_backend, file, (gpa, pages), 0, (readable, writable))
}

fn map_part(
    local_backend: &LocalBackend,
    file: &File,
    (gpa, pages): (u64, u64),
    offset: u64,
    (readable, writable): (bool, bool),
) -> bool {
    let region = MemoryRegion {
        gpa: Gpa(gpa),
        len: pages * PAGE,
        fd: OwnedFd::from(file.try_clone().expect("a descriptor")),
        offset,
        readable,
        writable,
    };
    local_backend.window().map(region).is_ok()
}

/// Returns a Delete for the key of a Store.
fn undo(store: &[u8; 64]) -> [u8; 64] {
    let mut command = *store;
    command[0] = DELETE;
    command
}

/// Checks that a command that has succeeded was allowed to succeed.
fn check_success(command: &[u8; 64], lba_size: u32, kind: Kind) {
    let number = |at: usize, len: usize| {
        let mut bytes = [0; 8];
        bytes[..len].copy_from_slice(&command[at..at + len]);
        u64::from_le_bytes(bytes)
    };
    let (opcode, nsid) = (command[0], number(4, 4));
    assert!(
        nsid == 1 || opcode == FLUSH && nsid == 0xFFFF_FFFF,
        "{command:x?}"
    );
    assert_eq!(command[1] & 0b11, 0, "a fused command: {command:x?}");
    assert!(matches!(command[1] >> 6, 0 | 1), "PSDT: {command:x?}");
    let lba_size = u64::from(lba_size);
    let blocks = match kind {
        Kind::Extents => 2 * LEASE / lba_size,
        _ => LEASE / lba_size,
    };
    if kind == Kind::Pairs {
        let (size, key) = (number(40, 4), command[44]);
        match opcode {
            FLUSH => {}
            STORE => assert!((1..=16).contains(&key) && size <= 64 << 10, "{command:x?}"),
            RETRIEVE => assert!((1..=16).contains(&key) && size <= 1 << 20, "{command:x?}"),
            LIST => assert!(key <= 16 && (4..=1 << 20).contains(&size), "{command:x?}"),
            DELETE | EXIST => assert!((1..=16).contains(&key), "{command:x?}"),
            // In a Batch, the number of operations is in the place of the key length.
            BATCH => assert!(
                (1..=8).contains(&key) && (32 * u64::from(key)..=1 << 20).contains(&size),
                "{command:x?}"
            ),
            _ => panic!("no command of keys and values: {command:x?}"),
        }
        return;
    }
    match opcode {
        FLUSH | DATASET_MANAGEMENT => {}
        // The command applies to all zones, so its block has no meaning.
        ZONE_MANAGEMENT_SEND if command[53] & 1 == 1 => {}
        ZONE_MANAGEMENT_SEND | ZONE_MANAGEMENT_RECEIVE => {
            assert!(number(40, 8) < blocks, "{command:x?}");
        }
        COPY => assert!(number(40, 8) < blocks, "{command:x?}"),
        _ => {
            let (slba, count) = (number(40, 8), number(48, 2) + 1);
            let inside = slba.checked_add(count).is_some_and(|end| end <= blocks);
            assert!(inside && count * lba_size <= 1 << 20, "{command:x?}");
        }
    }
    if matches!(opcode, READ | WRITE | COMPARE) && command[1] >> 6 == 0 {
        assert_eq!(number(24, 8) % 4, 0, "PRP1: {command:x?}");
    }
}

/// Runs one input.
pub fn run(input: &[u8]) {
    let mut input = Input(input);
    let choice = input.byte();
    let lba_size = if choice & 1 == 0 { 512 } else { 4096 };
    let commands = usize::from(choice >> 3) % 16 + 1;
    let (kind, regions) = match (choice >> 7, choice >> 2 & 1) {
        (0, _) => {
            let kind = match choice >> 6 {
                0 => Kind::Blocks,
                _ => Kind::Extents,
            };
            (kind, usize::from(choice >> 1) % REGIONS + 1)
        }
        (_, 0) => (Kind::Zones, usize::from(choice >> 1 & 1) + 1),
        _ => (Kind::Pairs, usize::from(choice >> 1 & 1) + 1),
    };
    FIXTURES.with_borrow_mut(|fixtures| {
        let fixture = fixtures
            .entry((lba_size, kind))
            .or_insert_with(|| Fixture::new(lba_size, kind));
        let mut mapped = Vec::new();
        for index in 0..regions as u64 {
            let first = u64::from(input.number());
            // The end of the address space must be tested, too.
            let gpa = if first >= 0xFF00 {
                (first << 12) | !0xFFF_FFFF
            } else {
                first << 12
            };
            let pages = u64::from(input.byte()) % REGION_PAGES + 1;
            let access = input.byte();
            let access = (access & 1 == 0, access & 2 == 0);
            let offset = index * REGION_PAGES * PAGE;
            let local_backend = &fixture.guest.local_backend;
            if map_part(local_backend, &fixture.memory, (gpa, pages), offset, access) {
                mapped.push((gpa, pages, offset, access.1));
            }
        }
        let submitted: Vec<[u8; 64]> = (0..commands)
            .map(|_| {
                let mut command = [0; 64];
                let piece = input.piece(64);
                command[..piece.len()].copy_from_slice(piece);
                command
            })
            .collect();
        let contents: Vec<Vec<u8>> = mapped
            .iter()
            .map(|&(_, pages, offset, _)| {
                let mut content = input.piece((pages * PAGE) as usize).to_vec();
                content.resize((pages * PAGE) as usize, 0);
                fixture
                    .memory
                    .write_all_at(&content, offset)
                    .expect("memory");
                content
            })
            .collect();

        fixture.guest.begin();
        if kind == Kind::Zones {
            assert_eq!(fixture.guest.run(reset_all()), 0, "zones are reset");
        }
        let mut stored = Vec::new();
        let mut begins_anew = false;
        for command in submitted {
            if fixture.guest.run(command) == 0 {
                check_success(&command, lba_size, kind);
                if kind == Kind::Pairs && command[0] == STORE {
                    stored.push(command);
                }
                // The guest may have changed the Batch's data since the command read it, so the stored keys are unknown.
                begins_anew |= kind == Kind::Pairs && command[0] == BATCH;
            }
        }
        fixture.guest.end();
        if !stored.is_empty() {
            fixture.guest.begin();
            for command in stored {
                // Fails if a later command has deleted the key.
                fixture.guest.run(undo(&command));
            }
            fixture.guest.end();
        }
        for ((gpa, pages, offset, writable), content) in mapped.into_iter().zip(contents) {
            if !writable {
                let mut bytes = vec![0; content.len()];
                fixture
                    .memory
                    .read_exact_at(&mut bytes, offset)
                    .expect("memory");
                assert!(bytes == content, "memory was written that may only be read");
            }
            let unmapped = fixture
                .guest
                .local_backend
                .window()
                .unmap(Gpa(gpa), pages * PAGE);
            assert_eq!(unmapped.expect("nothing uses it"), pages * PAGE);
        }
        fixture.check_neighbours();
        if begins_anew {
            fixtures.remove(&(lba_size, kind));
        }
    });
}
