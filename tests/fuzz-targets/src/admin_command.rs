//! A guest that submits arbitrary admin commands, with arbitrary data and queues.
//!
//! The first byte of the input chooses the doorbell mode and the number of commands. The commands follow, with 64 bytes
//! each. The remaining bytes are the content of guest memory from address 0 on: data, PRP lists, I/O queues with their
//! commands, doorbell buffers.
//!
//! Each command must complete once with its own identifier, or wait as an Asynchronous Event Request. Otherwise the
//! controller must have failed, and a reset must recover it.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::time::Duration;

use nvme_guest::{DoorbellMode, Gpa};
use nvme_mpt_memory::clock;
use vmm_device::{Bar, MsixMasking};

use crate::{Fixture, Input, RINGS};

/// Number of entries of the admin queues. It exceeds the number of commands and completions of one input.
const ENTRIES: u32 = 64;
const COMMANDS: u8 = 15;
const CQ: u64 = RINGS + 0x1_0000;
const ASYNC_EVENT_REQUEST: u8 = 0x0C;
const CFS: u32 = 0b10;

thread_local! {
    static FIXTURES: RefCell<BTreeMap<u8, Fixture>> = const { RefCell::new(BTreeMap::new()) };
}

fn fixture(choice: u8) -> Fixture {
    let mode = match choice & 0b11 {
        0 | 1 => DoorbellMode::Shadow,
        2 => DoorbellMode::Mapped,
        _ => DoorbellMode::Trap,
    };
    let fixture = Fixture::new(mode, MsixMasking::Client);
    // For one second after a change of the memory map, commands wait for missing memory. This loop lets that second pass.
    while fixture.function.memory().time_since_change() <= Duration::from_secs(1) {
        clock::sleep(Duration::from_millis(10));
    }
    fixture
}

fn enable(fixture: &mut Fixture) {
    fixture.write(CQ, &[0; ENTRIES as usize * 16]);
    let write = |function: &mut vmm_device::NvmeFunction, offset, data: &[u8]| {
        function.write_bar(Bar::Registers, offset, data);
    };
    let function = &mut fixture.function;
    write(
        function,
        0x24,
        &((ENTRIES - 1) << 16 | (ENTRIES - 1)).to_le_bytes(),
    );
    write(function, 0x28, &RINGS.to_le_bytes());
    write(function, 0x30, &CQ.to_le_bytes());
    write(function, 0x14, &0x0046_0001_u32.to_le_bytes());
    assert_eq!(fixture.register(0x1C), 1);
}

/// Returns the command identifiers of the posted completions.
fn completed_cids(fixture: &Fixture) -> Vec<u16> {
    let mut queue = [0; ENTRIES as usize * 16];
    fixture
        .function
        .memory()
        .read(Gpa(CQ), &mut queue)
        .expect("rings");
    queue
        .chunks(16)
        .take_while(|entry| entry[14] & 1 == 1)
        .map(|entry| u16::from_le_bytes([entry[12], entry[13]]))
        .collect()
}

/// Runs one input.
pub fn run(input: &[u8]) {
    let mut input = Input(input);
    let choice = input.byte();
    FIXTURES.with_borrow_mut(|fixtures| {
        let fixture = fixtures
            .entry(choice & 0b11)
            .or_insert_with(|| fixture(choice));
        let mut commands: Vec<[u8; 64]> = Vec::new();
        for cid in 0..u16::from((choice >> 2) % COMMANDS + 1) {
            let mut command = [0; 64];
            let piece = input.piece(64);
            command[..piece.len()].copy_from_slice(piece);
            command[2..4].copy_from_slice(&cid.to_le_bytes());
            commands.push(command);
        }
        fixture.reset(input.0);
        enable(fixture);
        fixture.write(RINGS, &commands.concat());
        let tail = (commands.len() as u32).to_le_bytes();
        fixture.function.write_bar(Bar::Registers, 0x1000, &tail);
        fixture.function.process_events();

        if fixture.register(0x1C) & CFS == 0 {
            let mut completed = completed_cids(fixture);
            completed.sort_unstable();
            let once = completed.windows(2).all(|pair| pair[0] != pair[1]);
            assert!(once, "a command completed twice: {completed:?}");
            for (cid, command) in (0..).zip(&commands) {
                let waits = command[0] == ASYNC_EVENT_REQUEST;
                assert!(
                    waits || completed.contains(&cid),
                    "command {cid} got lost: {command:x?}"
                );
            }
            assert!(
                completed
                    .last()
                    .is_none_or(|cid| usize::from(*cid) < commands.len())
            );
        }
        fixture.function.write_bar(Bar::Registers, 0x14, &[0; 4]);
        assert_eq!(fixture.register(0x1C), 0);
    });
}
