//! A guest that accesses BAR0 and BAR4 at arbitrary offsets and with arbitrary lengths, including doorbells.
//!
//! The first byte of the input chooses the doorbell mode and the side that masks interrupts. The remaining bytes are a
//! sequence of accesses: kind, offset in 2 bytes, length, and data for a write. Read-only properties must keep their
//! values, `CSTS` must follow `CC`, and a reset must recover the controller.

use std::cell::RefCell;
use std::collections::BTreeMap;

use nvme_guest::DoorbellMode;
use vmm_device::{Bar, MsixMasking};

use crate::{Fixture, Input};

thread_local! {
    static FIXTURES: RefCell<BTreeMap<u8, Fixture>> = const { RefCell::new(BTreeMap::new()) };
}

fn fixture(choice: u8) -> Fixture {
    let mode = match choice & 0b011 {
        0 => DoorbellMode::Shadow,
        1 => DoorbellMode::Mapped,
        _ => DoorbellMode::Trap,
    };
    let masking = match choice & 0b100 {
        0 => MsixMasking::Function,
        _ => MsixMasking::Client,
    };
    Fixture::new(mode, masking)
}

fn check(fixture: &Fixture, cap: [u32; 2]) {
    assert_eq!([fixture.register(0x00), fixture.register(0x04)], cap);
    assert_eq!(fixture.register(0x08), 0x0002_0000, "VS");
    assert_eq!(fixture.register(0x28) & 0xFFF, 0, "ASQ");
    assert_eq!(fixture.register(0x30) & 0xFFF, 0, "ACQ");
    let (cc, csts) = (fixture.register(0x14), fixture.register(0x1C));
    let (ready, failed) = (csts & 1 != 0, csts & 2 != 0);
    // CSTS follows at once: resetting and enabling the controller complete before the write returns.
    assert!(!ready || cc & 1 != 0);
    assert!(ready || failed || cc & 1 == 0);
    assert_eq!(
        csts & !0b1011,
        0,
        "shutdown processing is complete, or there is none"
    );
}

/// Runs one input.
pub fn run(input: &[u8]) {
    let mut input = Input(input);
    let choice = input.byte() & 0b111;
    FIXTURES.with_borrow_mut(|fixtures| {
        let fixture = fixtures.entry(choice).or_insert_with(|| fixture(choice));
        // The input is also the content of guest memory, and thereby of the commands.
        fixture.reset(input.0);
        let cap = [fixture.register(0x00), fixture.register(0x04)];
        while !input.is_empty() {
            let kind = input.byte();
            let bar = if kind & 0b10 == 0 {
                Bar::Registers
            } else {
                Bar::Msix
            };
            let offset = match kind >> 6 {
                0 => u64::from(input.byte()),
                1 => 0x1000 + u64::from(input.byte()),
                2 => u64::from(input.number()),
                _ => u64::MAX - u64::from(input.byte()),
            };
            let length = usize::from(input.byte());
            if kind & 1 == 0 {
                fixture
                    .function
                    .read_bar(bar, offset, &mut vec![0xA5; length]);
            } else {
                fixture.function.write_bar(bar, offset, input.piece(length));
            }
            if kind & 0b100 != 0 {
                fixture.function.process_events();
            }
            check(fixture, cap);
        }
        fixture.function.write_bar(Bar::Registers, 0x14, &[0; 4]);
        assert_eq!(fixture.register(0x1C) & 0b11, 0);
    });
}
