//! A guest that accesses configuration space at arbitrary offsets and with arbitrary lengths.
//!
//! The input is a sequence of accesses: kind, offset in 2 bytes, length, and data for a write. The function must keep its
//! identity. Its BARs must be aligned to their size, and every move must be reported. The capability list must stay valid, and
//! reads must return all bytes.

use std::cell::RefCell;

use nvme_guest::DoorbellMode;
use vmm_device::{
    Bar, BarMove, CONFIG_SPACE_SIZE, DEVICE_ID, MsixMasking, NvmeFunction, VENDOR_ID,
};

use crate::{Fixture, Input};

thread_local! {
    static FIXTURE: RefCell<Fixture> =
        RefCell::new(Fixture::new(DoorbellMode::Shadow, MsixMasking::Function));
}

/// Reported addresses of the BARs.
struct BarAddresses([Option<u64>; 2]);

impl BarAddresses {
    fn apply_moves(&mut self, bar_moves: &[BarMove], function: &NvmeFunction) {
        for (place, bar) in self.0.iter_mut().zip(Bar::ALL) {
            for moved in bar_moves.iter().filter(|moved| moved.bar == bar) {
                assert_eq!((moved.from, moved.size), (*place, function.bar_size(bar)));
                assert_ne!(moved.from, moved.to);
                *place = moved.to;
            }
            assert_eq!(*place, function.bar_address(bar), "an unreported move");
            let aligned = |address: u64| address.is_multiple_of(function.bar_size(bar));
            assert!(place.is_none_or(aligned));
        }
    }
}

fn byte(function: &NvmeFunction, offset: u64) -> u8 {
    let mut data = [0];
    function.read_config(offset, &mut data);
    data[0]
}

fn check(function: &NvmeFunction) {
    let mut id = [0; 4];
    function.read_config(0, &mut id);
    assert_eq!(id[..2], VENDOR_ID.to_le_bytes());
    assert_eq!(id[2..], DEVICE_ID.to_le_bytes());
    let mut class = [0; 3];
    function.read_config(9, &mut class);
    assert_eq!(class, [0x02, 0x08, 0x01]);
    let mut ids = Vec::new();
    let mut capability = byte(function, 0x34);
    while capability != 0 {
        assert!(capability >= 0x40 && ids.len() < 4);
        ids.push(byte(function, capability.into()));
        capability = byte(function, u64::from(capability) + 1);
    }
    assert_eq!(ids, [0x01, 0x11, 0x10, 0x05]);
    for vector in [0, 1, 31, 32, u16::MAX] {
        let _ = function.msix_message(vector);
    }
    assert_eq!(byte(function, 0x69) & 0x80, 0, "Initiate FLR reads as zero");
}

/// Runs one input.
pub fn run(input: &[u8]) {
    FIXTURE.with_borrow_mut(|fixture| {
        fixture.reset(&[]);
        let function = &mut fixture.function;
        let mut places = BarAddresses([None; 2]);
        let mut input = Input(input);
        while !input.is_empty() {
            let kind = input.byte();
            // Some offsets are beyond the end of configuration space, and some accesses reach across its end.
            let offset = match kind & 0b110 {
                0b110 => u64::MAX - u64::from(input.byte()),
                _ => u64::from(input.number()) % (2 * CONFIG_SPACE_SIZE),
            };
            let length = usize::from(input.byte());
            if kind & 1 == 0 {
                let mut data = vec![0xA5; length];
                function.read_config(offset, &mut data);
                assert!(offset < 0x100 || data.iter().all(|byte| *byte == 0));
            } else {
                let bar_moves = function.write_config(offset, input.piece(length));
                places.apply_moves(&bar_moves, function);
            }
            check(function);
        }
        let bar_moves = function.reset();
        places.apply_moves(&bar_moves, function);
        assert_eq!(places.0, [None; 2]);
    });
}
