//! Model test: a guest and its VMM bring a function into any state that they can, and a successor process restores each.

use std::{fs::File, os::unix::fs::FileExt, time::Duration};

use nvme_guest::{DoorbellMode, Gpa, MemoryRegion, PersistedBackendFiles};
use nvme_spec::{
    ids::{Nsid, QueueId},
    registers::Doorbell,
    sqe::Sqe,
};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError};
use zerocopy::IntoBytes;

use super::NvmeFunction;
use super::state::tests::{
    PersistedFunctionParts, clone_fd, function_with_files, serialize_and_parse,
};
use crate::fixtures::{self, ADMIN_ENTRIES, ADMIN_SQ, MEMORY, UNMAPPED};
use crate::{Bar, FunctionState, MsixMasking};

/// Size of a part of the guest's memory, in bytes. The VMM of the model maps and unmaps whole parts.
const PART: u64 = 1 << 20;
/// Number of parts of the guest's memory. Each kind of ring, and data, has its own part.
const PARTS: u64 = (MEMORY.end - MEMORY.start) / PART;
/// Number of entries of the I/O queues.
const ENTRIES: u16 = 16;
/// Offsets of the properties that the guest of the model writes.
const CC: u64 = 0x14;
const PROPERTIES: u64 = 0x60;

/// Step of the model's guest or of its VMM.
#[derive(Clone, Debug)]
enum FunctionModelStep {
    /// A write to Controller Configuration.
    Configure(u32),
    /// A write to any property.
    Property { offset: u64, data: Vec<u8> },
    /// A write to configuration space.
    Config { offset: u64, data: Vec<u8> },
    /// A write to the MSI-X table or its pending bits.
    Msix { offset: u64, data: Vec<u8> },
    /// A doorbell write.
    Doorbell { qid: u16, head: bool, value: u32 },
    /// An admin command, written at the queue's tail.
    Admin([u64; 8]),
    /// An I/O command, written at the start of a queue, with its doorbell.
    Io { qid: u16, words: [u64; 8] },
    /// The guest enables its controller as a driver does.
    Enable,
    /// The guest creates a queue pair like a driver, with rings in separate parts.
    CreatePair(u16),
    /// The VMM unmaps a part of the memory, or maps it again.
    Map { part: u64, mapped: bool },
    /// The client masks or unmasks a vector.
    Mask { vector: usize, masked: bool },
    /// A vector is raised.
    Signal(usize),
    /// The function handles its events.
    Events,
    /// Time passes.
    Wait,
    /// A successor process takes the function over.
    Replace,
    /// The VMM pauses the function and restores a snapshot of it.
    Snapshot,
}

fn any_bytes() -> impl Strategy<Value = Vec<u8>> {
    let value = prop_oneof![Just(0), Just(u64::MAX), any::<u64>(), 0..16_u64];
    let length = prop_oneof![Just(1), Just(2), Just(4), Just(8)];
    (value, length).prop_map(|(value, length)| value.to_le_bytes()[..length].to_vec())
}

/// Guest addresses of rings and data, and some invalid ones.
fn any_address() -> impl Strategy<Value = u64> {
    let page =
        (0..PARTS, 0..4_u64).prop_map(|(part, page)| MEMORY.start + part * PART + (page << 12));
    prop_oneof![
        6 => page,
        1 => Just(UNMAPPED),
        1 => Just(0),
        1 => any::<u64>(),
    ]
}

/// Values of `CC`: those that drivers write, some that change constant fields, and arbitrary ones.
fn any_cc() -> impl Strategy<Value = u32> {
    let driver = prop_oneof![
        Just(0x0046_0001),
        Just(0x0000_0001),
        Just(0x0045_0001),
        Just(0x0066_0001),
        Just(0x0046_0801),
        Just(0x0046_0081),
        Just(0x0046_0061),
        Just(0x0046_4001),
        Just(0x0046_8001),
        Just(0x0046_C001),
        Just(0x0046_0000),
        Just(0x0046_4000),
        Just(0xFF46_0001),
    ];
    prop_oneof![6 => driver, 1 => any::<u32>(), 1 => any::<u32>().prop_map(|value| value | 1)]
}

/// Admin commands that change the state, and arbitrary ones.
fn any_admin() -> impl Strategy<Value = [u64; 8]> {
    let opcode = prop_oneof![
        4 => Just(0x05_u8),
        4 => Just(0x01),
        2 => Just(0x00),
        2 => Just(0x04),
        4 => Just(0x09),
        1 => Just(0x0A),
        1 => Just(0x06),
        2 => Just(0x0C),
        1 => Just(0x08),
        2 => Just(0x7C),
        1 => Just(0x02),
        1 => any::<u8>(),
    ];
    // A queue, or a feature, in dword 10.
    let dword10 = prop_oneof![
        4 => (0..6_u32).prop_map(|qid| u32::from(ENTRIES - 1) << 16 | qid),
        4 => 0..0x20_u32,
        1 => any::<u32>(),
    ];
    // Bits of a queue, or a value of a feature, in dword 11.
    let dword11 = prop_oneof![
        4 => (0..6_u32, 0..4_u32).prop_map(|(high, low)| high << 16 | low),
        1 => any::<u32>(),
    ];
    let nsid = prop_oneof![2 => Just(0), 1 => Just(1), 1 => Just(u32::MAX)];
    (
        opcode,
        nsid,
        any_address(),
        any_address(),
        dword10,
        dword11,
        any::<u32>(),
    )
        .prop_map(|(opcode, nsid, first, second, dword10, dword11, dword12)| {
            let sqe = Sqe {
                dptr: [first, second],
                cdw10: dword10,
                cdw11: dword11,
                cdw12: dword12,
                nsid: Nsid(nsid),
                ..Sqe::new(opcode)
            };
            zerocopy::transmute!(sqe)
        })
}

fn any_io() -> impl Strategy<Value = [u64; 8]> {
    let opcode = prop_oneof![
        Just(0x00_u8),
        Just(0x01),
        Just(0x02),
        Just(0x08),
        Just(0x09),
        any::<u8>()
    ];
    (opcode, any_address(), any_address(), 0..256_u32, 0..32_u32).prop_map(
        |(opcode, first, second, block, blocks)| {
            let sqe = Sqe {
                dptr: [first, second],
                cdw10: block,
                cdw12: blocks,
                nsid: Nsid(1),
                ..Sqe::new(opcode)
            };
            zerocopy::transmute!(sqe)
        },
    )
}

fn any_step() -> impl Strategy<Value = FunctionModelStep> {
    let vectors = 0..8_usize;
    prop_oneof![
        3 => any_cc().prop_map(FunctionModelStep::Configure),
        2 => (0..PROPERTIES, any_bytes()).prop_map(|(offset, data)| FunctionModelStep::Property { offset, data }),
        3 => (0..256_u64, any_bytes()).prop_map(|(offset, data)| FunctionModelStep::Config { offset, data }),
        1 => Just(FunctionModelStep::Config { offset: 4, data: vec![6, 0] }),
        2 => (0..0x1000_u64, any_bytes()).prop_map(|(offset, data)| FunctionModelStep::Msix { offset, data }),
        2 => (0..6_u16, any::<bool>(), prop_oneof![4 => 0..20_u32, 1 => any::<u32>()])
            .prop_map(|(qid, head, value)| FunctionModelStep::Doorbell { qid, head, value }),
        12 => any_admin().prop_map(FunctionModelStep::Admin),
        4 => (1..5_u16, any_io()).prop_map(|(qid, words)| FunctionModelStep::Io { qid, words }),
        3 => Just(FunctionModelStep::Enable),
        5 => (1..5_u16).prop_map(FunctionModelStep::CreatePair),
        4 => (0..PARTS, any::<bool>()).prop_map(|(part, mapped)| FunctionModelStep::Map { part, mapped }),
        1 => (vectors.clone(), any::<bool>()).prop_map(|(vector, masked)| FunctionModelStep::Mask { vector, masked }),
        1 => vectors.prop_map(FunctionModelStep::Signal),
        2 => Just(FunctionModelStep::Events),
        1 => Just(FunctionModelStep::Wait),
        4 => Just(FunctionModelStep::Replace),
        2 => Just(FunctionModelStep::Snapshot),
    ]
}

/// A function with its guest and its VMM, as the model runs them.
struct FunctionModelMachine {
    function: NvmeFunction,
    persisted: PersistedFunctionParts,
    /// For each part of the memory, true if the VMM has mapped it.
    mapped: [bool; PARTS as usize],
    /// The guest's tail of the admin queue.
    tail: u32,
}

impl FunctionModelMachine {
    fn new() -> Self {
        let (drive, ledger) = (fixtures::drive(), tempfile::tempfile().unwrap());
        let memory = fixtures::guest_memory();
        let function = function_with_files(&drive, &ledger, None);
        let shared = function.backend().shared_parts();
        let parts = PersistedFunctionParts {
            drive,
            ledger,
            doorbells: clone_fd(shared.doorbells.fd()),
            inflight: clone_fd(shared.inflight.unwrap().fd()),
            memory,
        };
        let machine = Self {
            function,
            persisted: parts,
            mapped: [true; PARTS as usize],
            tail: 0,
        };
        machine.map_all(&machine.function);
        machine
    }

    fn region(&self, part: u64) -> MemoryRegion {
        MemoryRegion {
            gpa: Gpa(MEMORY.start + part * PART),
            len: PART,
            fd: clone_fd(&self.persisted.memory),
            offset: part * PART,
            readable: true,
            writable: true,
        }
    }

    /// Maps, for a new function, the parts of the memory that the VMM has mapped.
    fn map_all(&self, function: &NvmeFunction) {
        for (part, mapped) in (0..).zip(self.mapped) {
            if mapped {
                function.backend().map(self.region(part)).unwrap();
            }
        }
    }

    fn write_register(&mut self, offset: u64, data: &[u8]) {
        self.function.write_bar(Bar::Registers, offset, data);
    }

    fn enable(&mut self) {
        self.write_register(CC, &0_u32.to_le_bytes());
        let queues = ADMIN_ENTRIES - 1;
        self.write_register(0x24, &(queues << 16 | queues).to_le_bytes());
        self.write_register(0x28, &ADMIN_SQ.to_le_bytes());
        self.write_register(0x30, &(MEMORY.start + PART).to_le_bytes());
        self.write_register(CC, &0x0046_0001_u32.to_le_bytes());
        self.tail = 0;
    }

    /// Writes to the guest's memory, whether it is mapped or not.
    fn store(&self, at: u64, data: &[u8]) {
        let file = File::from(clone_fd(&self.persisted.memory));
        file.write_all_at(data, at - MEMORY.start).unwrap();
    }

    fn ring(&mut self, doorbell: Doorbell, value: u32) {
        let offset = self.function.doorbell_offset(doorbell);
        self.write_register(offset, &value.to_le_bytes());
    }

    fn apply_step(&mut self, step: &FunctionModelStep) -> Result<(), TestCaseError> {
        match step {
            FunctionModelStep::Configure(cc) => self.write_register(CC, &cc.to_le_bytes()),
            FunctionModelStep::Property { offset, data } => self.write_register(*offset, data),
            FunctionModelStep::Config { offset, data } => {
                drop(self.function.write_config(*offset, data))
            }
            FunctionModelStep::Msix { offset, data } => {
                self.function.write_bar(Bar::Msix, *offset, data)
            }
            FunctionModelStep::Doorbell { qid, head, value } => {
                let qid = QueueId(*qid);
                let doorbell = match head {
                    true => Doorbell::CqHead(qid),
                    false => Doorbell::SqTail(qid),
                };
                self.ring(doorbell, *value);
            }
            FunctionModelStep::Admin(words) => {
                self.store(ADMIN_SQ + u64::from(self.tail) * 64, words.as_bytes());
                self.tail = (self.tail + 1) % ADMIN_ENTRIES;
                self.ring(Doorbell::SqTail(QueueId::ADMIN), self.tail);
                self.function.process_events();
                // The guest consumes what there is.
                let head = self
                    .function
                    .running_state()
                    .admin
                    .rings
                    .map_or(0, |rings| rings.cq_tail);
                self.ring(Doorbell::CqHead(QueueId::ADMIN), head);
            }
            FunctionModelStep::Io { qid, words } => {
                let qid = QueueId(*qid);
                let queues = self.function.running_state().queues.to_created();
                let sq = queues.sqs.iter().find(|sq| sq.qid == qid);
                let base = sq.map_or(UNMAPPED, |sq| sq.base.0);
                if MEMORY.contains(&base) {
                    self.store(base, words.as_bytes());
                }
                self.ring(Doorbell::SqTail(qid), 1);
            }
            FunctionModelStep::Enable => self.enable(),
            FunctionModelStep::CreatePair(qid) => {
                let place = u64::from(*qid) << 12;
                let queue = |opcode, part, dword| Sqe {
                    dptr: [MEMORY.start + part * PART + place, 0],
                    cdw10: u32::from(ENTRIES - 1) << 16 | u32::from(*qid),
                    cdw11: dword,
                    ..Sqe::new(opcode)
                };
                let (cq, sq) = (queue(0x05, 2, 3), queue(0x01, 3, u32::from(*qid) << 16 | 1));
                for sqe in [cq, sq] {
                    self.apply_step(&FunctionModelStep::Admin(zerocopy::transmute!(sqe)))?;
                }
            }
            FunctionModelStep::Map { part, mapped } => {
                let region = self.region(*part);
                let place = usize::try_from(*part).unwrap();
                if self.mapped[place] != *mapped {
                    match mapped {
                        true => self.function.backend().map(region).unwrap(),
                        false => drop(
                            self.function
                                .backend()
                                .unmap(region.gpa, region.len)
                                .unwrap(),
                        ),
                    }
                    self.mapped[place] = *mapped;
                }
            }
            FunctionModelStep::Mask { vector, masked } => {
                if let Some(vector) = self.function.vectors().get(*vector) {
                    vector.set_masked(*masked);
                }
            }
            FunctionModelStep::Signal(vector) => {
                if let Some(vector) = self.function.vectors().get(*vector) {
                    vector.signal();
                }
            }
            FunctionModelStep::Events => self.function.process_events(),
            FunctionModelStep::Wait => {
                self.function.clock.sleep(Duration::from_millis(300));
                self.function.process_events();
            }
            FunctionModelStep::Replace => self.replace()?,
            FunctionModelStep::Snapshot => self.snapshot()?,
        }
        Ok(())
    }

    /// Ends this process and restores the function in the next one.
    fn replace(&mut self) -> Result<(), TestCaseError> {
        let mut before = serialize_and_parse(&self.function.running_state());
        // No time passes by the clock of these functions.
        before.stored_at = None;
        let unused = fixtures::function(DoorbellMode::Trap, MsixMasking::Client);
        drop(std::mem::replace(&mut self.function, unused));
        let files = PersistedBackendFiles {
            doorbells: clone_fd(&self.persisted.doorbells),
            inflight: clone_fd(&self.persisted.inflight),
        };
        let mut next =
            function_with_files(&self.persisted.drive, &self.persisted.ledger, Some(files));
        self.map_all(&next);
        let taken_up = next.restore_running(&before);
        prop_assert!(taken_up.is_ok(), "{taken_up:?} of {before:?}");
        let mut after = next.running_state();
        if before.registers.is_being_disabled() {
            // The disable ends with the process that it waited for.
            before.registers = after.registers;
        }
        // Time passes during the take-over, also for the guest's clock.
        before.admin.powered_seconds = after.admin.powered_seconds;
        before.admin.features.timestamp = after.admin.features.timestamp;
        // Each vector is raised.
        before.msix.pending = Vec::new();
        after.msix.pending = Vec::new();
        after.stored_at = None;
        prop_assert_eq!(&after, &before);
        self.function = next;
        Ok(())
    }

    /// Restores a snapshot of the function, with all guest memory mapped.
    fn snapshot(&mut self) -> Result<(), TestCaseError> {
        for part in 0..PARTS {
            self.apply_step(&FunctionModelStep::Map { part, mapped: true })?;
        }
        self.function.pause().unwrap();
        let mut before = self.function.save().unwrap();
        let bytes = before.to_bytes().unwrap();
        let unused = fixtures::function(DoorbellMode::Trap, MsixMasking::Client);
        drop(std::mem::replace(&mut self.function, unused));
        let mut next = function_with_files(&self.persisted.drive, &self.persisted.ledger, None);
        self.map_all(&next);
        let restored = next.restore(&FunctionState::from_bytes(&bytes).unwrap());
        prop_assert!(restored.is_ok(), "{restored:?} of {before:?}");
        let mut after = next.save().unwrap();
        if before.registers.is_being_disabled() {
            before.registers = after.registers;
        }
        before.admin.powered_seconds = after.admin.powered_seconds;
        before.admin.features.timestamp = after.admin.features.timestamp;
        // Vectors for unconsumed completions are raised once more.
        before.msix.pending = Vec::new();
        after.msix.pending = Vec::new();
        prop_assert_eq!(&after, &before);
        next.resume();
        let shared = next.backend().shared_parts();
        self.persisted.doorbells = clone_fd(shared.doorbells.fd());
        self.persisted.inflight = clone_fd(shared.inflight.unwrap().fd());
        self.function = next;
        Ok(())
    }

    /// Checks that a driver that starts again finds a working controller.
    fn check_usable(&mut self) -> Result<(), TestCaseError> {
        drop(self.function.reset());
        for part in 0..PARTS {
            self.apply_step(&FunctionModelStep::Map { part, mapped: true })?;
        }
        self.apply_step(&FunctionModelStep::Config {
            offset: 4,
            data: vec![6, 0],
        })?;
        self.enable();
        let mut csts = [0; 4];
        self.function.read_bar(Bar::Registers, 0x1C, &mut csts);
        prop_assert_eq!(u32::from_le_bytes(csts), 1);
        Ok(())
    }
}

#[test]
fn the_next_process_takes_up_whatever_state_a_function_is_in() {
    let cases = std::env::var("PROPTEST_CASES").ok();
    let cases = cases.and_then(|cases| cases.parse().ok()).unwrap_or(96);
    let config = Config {
        cases,
        failure_persistence: None,
        ..Config::default()
    };
    proptest!(config, |(steps in prop::collection::vec(any_step(), 1..48))| {
        let mut machine = FunctionModelMachine::new();
        machine.enable();
        for step in &steps {
            machine.apply_step(step)?;
        }
        machine.replace()?;
        machine.check_usable()?;
    });
}
