//! Tests of configuration space.

use super::*;

const ALL: OfferedInterrupts = OfferedInterrupts {
    msi: true,
    pin: true,
};

fn config_space() -> ConfigSpace {
    ConfigSpace::new(4096, 65, ALL)
}

fn read<const N: usize>(config: &ConfigSpace, offset: u64) -> [u8; N] {
    let mut data = [0xA5; N];
    config.read(offset, &mut data);
    data
}

fn read_u32(config: &ConfigSpace, offset: u64) -> u32 {
    u32::from_le_bytes(read(config, offset))
}

#[test]
fn the_header_is_that_of_an_nvme_controller() {
    let config = config_space();
    assert_eq!(read(&config, 0), [0x50, 0x4D, 0x01, 0x00]);
    assert_eq!(read(&config, 8), [0x00, 0x02, 0x08, 0x01]);
    assert_eq!(read(&config, 0x0E), [0x00], "header type 0, one function");
    assert_eq!(read(&config, 0x10), [0x04, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(read(&config, 0x3D), [0x01], "INTA#");
}

#[test]
fn capabilities_are_chained() {
    let config = config_space();
    assert_eq!(read(&config, 6), [0x10, 0x00], "Status.Capabilities List");
    assert_eq!(read(&config, 0x34), [0x40]);
    assert_eq!(
        read(&config, 0x40),
        [0x01, 0x50, 0x03, 0x00, 0x08, 0x00, 0x00, 0x00]
    );
    // 65 vectors, with the table at BAR4 + 0 and pending bits at BAR4 + 1000h.
    assert_eq!(
        read(&config, 0x50),
        [0x11, 0x60, 0x40, 0x00, 4, 0, 0, 0, 4, 0x10, 0, 0]
    );
    assert_eq!(read(&config, 0x60), [0x10, 0xA0, 0x02, 0x00]);
    // MSI with 64-bit addresses, and 32 messages.
    assert_eq!(read(&config, 0xA0), [0x05, 0x00, 0x8A, 0x00]);
    assert_eq!(
        read_u32(&config, 0x64),
        0x1000_8000,
        "FLR, role-based error reporting"
    );
}

#[test]
fn bars_are_sized_by_all_ones() {
    let mut config = config_space();
    for (offset, size) in [(0x10, 0x4000), (0x20, 0x2000)] {
        config.write(offset, &[0xFF; 4]);
        config.write(offset + 4, &[0xFF; 4]);
        assert_eq!(read_u32(&config, offset), !(size - 1) | 0b100);
        assert_eq!(read_u32(&config, offset + 4), 0xFFFF_FFFF);
    }
    for offset in [0x18, 0x1C, 0x30] {
        config.write(offset, &[0xFF; 4]);
        assert_eq!(read_u32(&config, offset), 0, "BAR2, BAR3, expansion ROM");
    }
}

#[test]
fn the_registers_bar_holds_all_doorbells() {
    for (doorbells, size) in [
        (1, 0x4000),
        (0x3000, 0x4000),
        (0x3001, 0x8000),
        (0x82000, 0x10_0000),
    ] {
        assert_eq!(
            ConfigSpace::new(doorbells, 2, ALL).bar_size(Bar::Registers),
            size
        );
    }
}

#[test]
fn bars_that_move_are_reported() {
    let mut config = config_space();
    assert_eq!(
        config.write(0x10, &0xFEBF_0000_u32.to_le_bytes()),
        ConfigWrite::default()
    );
    assert_eq!(
        config.write(0x20, &0xC000_0000_u32.to_le_bytes()),
        ConfigWrite::default()
    );
    let moved = config.write(0x04, &[0x06, 0x00]);
    assert_eq!(
        moved.bar_moves,
        [
            BarMove {
                bar: Bar::Registers,
                size: 0x4000,
                from: None,
                to: Some(0xFEBF_0000)
            },
            BarMove {
                bar: Bar::Msix,
                size: 0x2000,
                from: None,
                to: Some(0xC000_0000)
            },
        ]
    );
    // Writing half of a 64-bit address moves the BAR as well.
    let to = Some(0x8_FEBF_0000);
    assert_eq!(
        config.write(0x14, &[8, 0, 0, 0]).bar_moves,
        [BarMove {
            bar: Bar::Registers,
            size: 0x4000,
            from: Some(0xFEBF_0000),
            to
        }]
    );
    assert_eq!(
        config.write(0x10, &[0xFF; 8]).bar_moves,
        [BarMove {
            bar: Bar::Registers,
            size: 0x4000,
            from: to,
            to: None
        }],
        "sizing maps nothing"
    );
    assert_eq!(
        config.write(0x04, &[0x00]).bar_moves.len(),
        1,
        "only BAR4 was left"
    );
    assert_eq!(config.write(0x3C, &[0x0B]), ConfigWrite::default());
}

#[test]
fn the_command_register_keeps_only_implemented_bits() {
    let mut config = config_space();
    config.write(4, &[0xFF, 0xFF]);
    assert_eq!(read(&config, 4), [0x46, 0x05]);
    config.write(6, &[0xFF, 0xFF]);
    assert_eq!(read(&config, 6), [0x10, 0x00]);
}

#[test]
fn power_states_are_d0_and_d3hot() {
    let mut config = config_space();
    for (written, read_back) in [(0x03, 0x0B), (0x01, 0x0B), (0x00, 0x08), (0x02, 0x08)] {
        config.write(0x44, &[written, 0]);
        assert_eq!(read(&config, 0x44), [read_back]);
    }
}

#[test]
fn msix_control_has_two_writable_bits() {
    let mut config = config_space();
    config.write(0x52, &[0xFF, 0xFF]);
    assert_eq!(read(&config, 0x52), [0x40, 0xC0]);
    assert_eq!(
        config.msix_control(),
        MsixControl {
            enabled: true,
            function_masked: true,
            msi: None,
        }
    );
    config.write(0x53, &[0x80]);
    assert_eq!(
        config.msix_control(),
        MsixControl {
            enabled: true,
            function_masked: false,
            msi: None,
        }
    );
}

#[test]
fn msi_control_returns_the_guests_values() {
    let mut config = config_space();
    config.write(0xA0, &[0xFF; 16]);
    assert_eq!(
        read(&config, 0xA0),
        [0x05, 0, 0xFB, 0, 0xFC, 0xFF, 0xFF, 0xFF]
    );
    assert_eq!(
        read(&config, 0xA8),
        [0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0, 0]
    );
    // 111b is reserved, so the number of messages is limited to 32.
    let all = MsiControl {
        enabled: true,
        messages_log2: 5,
        address: !0b11,
        data: 0xFFFF,
    };
    assert_eq!(config.msi_control(), all);
    config.write(0xA2, &[0x11]);
    assert_eq!(config.msi_control().messages(), 2);
    config.reset();
    assert!(!config.msi_control().enabled);
    for (vectors, messages) in [(1, 1), (2, 2), (5, 4), (32, 32), (65, 32), (128, 32)] {
        let config = ConfigSpace::new(4096, vectors, ALL);
        assert_eq!(config.msi_messages(), messages);
    }
}

/// Returns contents as releases up to 0.1 saved them.
fn msix_only_contents() -> Vec<u8> {
    let (msi, pin) = (false, false);
    let mut config = ConfigSpace::new(4096, 65, OfferedInterrupts { msi, pin });
    assert_eq!(read(&config, 0x3D), [0], "no INTx");
    assert_eq!(read(&config, 0x60), [0x10, 0, 0x02, 0]);
    config.write(0x10, &0xFEBF_0000_u32.to_le_bytes());
    config.write(0x04, &[0x06, 0x04]);
    config.save()
}

#[test]
fn a_guest_keeps_the_capabilities_that_it_has_seen() {
    let saved = msix_only_contents();
    let mut config = config_space();
    config.check(&saved).unwrap();
    config.restore(&saved, false);
    assert_eq!(config.save(), saved);
    assert!(!config.has_pin());
    assert_eq!(config.msi_messages(), 0);
    // Absent capabilities cannot be written, and a reset does not add them.
    config.write(0xA0, &[0xFF; 16]);
    assert_eq!(config.save(), saved);
    config.reset();
    assert_eq!(read(&config, 0x3D), [0]);
    assert_eq!(config.msi_messages(), 0);
    // The next guest gets all capabilities.
    config.reset_for_new_guest();
    assert_eq!(config.save(), config_space().save());
    assert!(config.has_pin());
}

#[test]
fn contents_with_unsupported_capabilities_are_refused() {
    let saved = config_space().save();
    let no_pin = OfferedInterrupts { pin: false, ..ALL };
    let config = ConfigSpace::new(4096, 65, no_pin);
    assert!(config.check(&saved).is_err());
    let mut saved = msix_only_contents();
    saved[0x3D] = 2;
    assert!(config_space().check(&saved).is_err());
}

#[test]
fn initiate_flr_resets_and_reads_as_zero() {
    let mut config = config_space();
    config.write(0x10, &0xFEBF_0000_u32.to_le_bytes());
    config.write(0x04, &[0x06]);
    config.write(0x52, &[0x00, 0x80]);
    // Accesses that cover the bit: two bytes, one byte, a dword, and more than a dword.
    for (offset, data) in [
        (0x68, &[0x10, 0xA8][..]),
        (0x69, &[0x80]),
        (0x68, &[0, 0x80, 0, 0]),
        (0x60, &[0xFF; 64]),
    ] {
        let write = config.write(offset, data);
        assert!(write.function_level_reset);
        assert_eq!(read(&config, 0x68), [0x10, 0x28]);
    }
    assert_eq!(read(&config, 0x04), [0, 0]);
    assert_eq!(config.bar_address(Bar::Registers), None);
    assert!(!config.msix_control().enabled);
    assert!(!config.write(0x68, &[0x80, 0x7F]).function_level_reset);
    assert!(!config.write(0x6A, &[0x80]).function_level_reset);
}

#[test]
fn flr_reports_the_bars_it_unmaps() {
    let mut config = config_space();
    config.write(0x10, &0xFEBF_0000_u32.to_le_bytes());
    config.write(0x04, &[0x02]);
    let from = Some(0xFEBF_0000);
    let expected = [BarMove {
        bar: Bar::Registers,
        size: 0x4000,
        from,
        to: None,
    }];
    assert_eq!(config.clone().reset(), expected);
    assert_eq!(config.write(0x69, &[0x80]).bar_moves, expected);
}

#[test]
fn accesses_of_any_place_and_length_are_safe() {
    let mut config = config_space();
    for offset in (0..300).chain([4090, 4096, u64::MAX - 3, u64::MAX]) {
        for length in (0..10).chain([300, 5000]) {
            let mut data = vec![0xA5; length];
            config.read(offset, &mut data);
            if offset >= 256 {
                assert!(data.iter().all(|byte| *byte == 0), "{offset:#x}");
            }
            config.write(offset, &vec![0xFF; length]);
            assert_eq!(read(&config, 0), [0x50, 0x4D, 0x01, 0x00]);
        }
    }
}

#[test]
fn bytes_words_and_dwords_agree() {
    let config = config_space();
    for offset in 0..COMPATIBLE_SIZE as u64 - 3 {
        let dword = read::<4>(&config, offset);
        let bytes: Vec<u8> = (0..4).map(|n| read::<1>(&config, offset + n)[0]).collect();
        let words = [read::<2>(&config, offset), read::<2>(&config, offset + 2)].concat();
        assert_eq!(
            (dword.as_slice(), dword.as_slice()),
            (&bytes[..], &words[..])
        );
    }
}
