//! Reads of controller properties by a guest, and the effects of its writes.

use super::*;

fn registers() -> ControllerProperties {
    ControllerProperties::new(ControllerCapabilities {
        queue_entries_max: 1024,
        dstrd: 4,
    })
}

fn read<const N: usize>(registers: &ControllerProperties, offset: u64) -> [u8; N] {
    let mut data = [0xA5; N];
    registers.read(offset, &mut data);
    data
}

fn read_u32(registers: &ControllerProperties, offset: u64) -> u32 {
    u32::from_le_bytes(read(registers, offset))
}

fn write_u32(
    registers: &mut ControllerProperties,
    offset: u64,
    value: u32,
) -> Option<ControllerTransition> {
    registers.write(offset, &value.to_le_bytes())
}

/// Writes AQA, ASQ, ACQ and then CC, as Linux does.
fn enable(registers: &mut ControllerProperties, cc: u32) -> Option<ControllerTransition> {
    write_u32(registers, 0x24, 0x001F_003F);
    registers.write(0x28, &0x1_0000_1000_u64.to_le_bytes());
    registers.write(0x30, &0x1_0000_2000_u64.to_le_bytes());
    write_u32(registers, 0x14, cc)
}

const QUEUES: AdminQueues = AdminQueues {
    sq_base: Gpa(0x1_0000_1000),
    sq_entries: 64,
    cq_base: Gpa(0x1_0000_2000),
    cq_entries: 32,
};

fn running() -> ControllerProperties {
    let mut registers = registers();
    assert_eq!(
        enable(&mut registers, 0x0046_0001),
        Some(ControllerTransition::Enable(QUEUES))
    );
    assert_eq!(
        read_u32(&registers, 0x1C),
        0,
        "not ready until the queues are set up"
    );
    registers.set_ready();
    registers
}

#[test]
fn capabilities_are_what_drivers_expect() {
    let registers = registers();
    // MQES 1023, CQR, TO 127.5 s, DSTRD 4, CSS 41h, 4 KiB pages only, CRMS 01b.
    assert_eq!(
        u64::from_le_bytes(read(&registers, 0)),
        0x0800_0824_FF01_03FF
    );
    assert_eq!(read_u32(&registers, 0x08), 0x0002_0000);
    assert_eq!(read_u32(&registers, 0x68), 255, "CRTO.CRWMT is CAP.TO");
    let largest = ControllerProperties::new(ControllerCapabilities {
        queue_entries_max: 65_536,
        dstrd: 0,
    });
    assert_eq!(read_u32(&largest, 0) & 0xFFFF, 0xFFFF);
}

#[test]
fn enabling_is_ready_and_everything_stays_readable() {
    let registers = running();
    assert!(registers.is_running());
    assert_eq!(read_u32(&registers, 0x1C), 1);
    assert_eq!(read_u32(&registers, 0x14), 0x0046_0001);
    assert_eq!(read_u32(&registers, 0x24), 0x001F_003F);
    assert_eq!(u64::from_le_bytes(read(&registers, 0x28)), 0x1_0000_1000);
    assert_eq!(u64::from_le_bytes(read(&registers, 0x30)), 0x1_0000_2000);
}

#[test]
fn all_command_sets_may_be_selected() {
    let mut registers = registers();
    assert_eq!(
        enable(&mut registers, 0x0046_0061),
        Some(ControllerTransition::Enable(QUEUES))
    );
}

#[test]
fn an_invalid_configuration_fails_the_controller() {
    for cc in [
        0x0046_0071, // CSS: admin only, which CAP does not offer
        0x0046_0011, // CSS: reserved
        0x0046_0081, // MPS: 8 KiB
        0x0046_0801, // AMS: weighted round robin
        0x0047_0001, // IOSQES: 128 bytes
        0x0056_0001, // IOCQES: 32 bytes
    ] {
        let mut registers = registers();
        assert_eq!(enable(&mut registers, cc), None, "{cc:#x}");
        assert_eq!(read_u32(&registers, 0x1C), 0b10, "CFS and never RDY");
        assert!(!registers.is_running());
        assert_eq!(
            write_u32(&mut registers, 0x14, 0),
            Some(ControllerTransition::Disable)
        );
        registers.complete_reset();
        assert_eq!(read_u32(&registers, 0x1C), 0);
    }
    for aqa in [0, 0x001F_0000, 0x0000_001F] {
        let mut registers = registers();
        write_u32(&mut registers, 0x24, aqa);
        assert_eq!(
            write_u32(&mut registers, 0x14, 0x0046_0001),
            None,
            "AQA {aqa:#x}"
        );
        assert_eq!(read_u32(&registers, 0x1C), 0b10);
    }
}

#[test]
fn entry_sizes_may_come_later() {
    let mut registers = registers();
    assert_eq!(
        enable(&mut registers, 1),
        Some(ControllerTransition::Enable(QUEUES))
    );
    registers.set_ready();
    assert_eq!(write_u32(&mut registers, 0x14, 0x0046_0001), None);
    assert_eq!((registers.cc().iosqes(), registers.cc().iocqes()), (6, 4));
}

#[test]
fn enable_only_fields_do_not_change_while_enabled() {
    let mut registers = running();
    assert_eq!(write_u32(&mut registers, 0x14, 0x0146_38F1), None);
    assert_eq!(read_u32(&registers, 0x14), 0x0046_0001);
}

#[test]
fn ready_stays_until_the_reset_is_complete() {
    let mut registers = running();
    assert_eq!(
        write_u32(&mut registers, 0x14, 0x0046_0000),
        Some(ControllerTransition::Disable)
    );
    assert_eq!(read_u32(&registers, 0x1C), 1);
    registers.complete_reset();
    assert_eq!(read_u32(&registers, 0x1C), 0);
    assert_eq!(read_u32(&registers, 0x14), 0);
    assert_eq!(read_u32(&registers, 0x24), 0x001F_003F, "AQA survives");
    assert_eq!(
        u64::from_le_bytes(read(&registers, 0x30)),
        0x1_0000_2000,
        "ACQ survives"
    );
    registers.reset();
    assert_eq!(
        read(&registers, 0x24),
        [0; 0x14],
        "but not a function level reset"
    );
}

#[test]
fn a_shutdown_is_notified_once_and_ended_by_a_reset() {
    for (shn, kind) in [
        (0x4000, ShutdownNotification::NORMAL),
        (0x8000, ShutdownNotification::ABRUPT),
    ] {
        let mut registers = running();
        let cc = 0x0046_0001 | shn;
        assert_eq!(
            write_u32(&mut registers, 0x14, cc),
            Some(ControllerTransition::Shutdown(kind))
        );
        assert_eq!(read_u32(&registers, 0x1C), 0b0101);
        assert!(!registers.is_running());
        registers.complete_shutdown();
        assert_eq!(read_u32(&registers, 0x1C), 0b1001);
        assert_eq!(write_u32(&mut registers, 0x14, cc), None);
        assert_eq!(write_u32(&mut registers, 0x14, 0x0046_0001), None);
        assert_eq!(read_u32(&registers, 0x1C), 0b1001);
        assert_eq!(
            write_u32(&mut registers, 0x14, 0),
            Some(ControllerTransition::Disable)
        );
        registers.complete_reset();
        assert_eq!(read_u32(&registers, 0x1C), 0);
    }
}

#[test]
fn a_disabled_controller_can_be_shut_down_and_enabled_again() {
    let mut registers = registers();
    assert_eq!(
        write_u32(&mut registers, 0x14, 0x4000),
        Some(ControllerTransition::Shutdown(ShutdownNotification::NORMAL))
    );
    registers.complete_shutdown();
    assert_eq!(read_u32(&registers, 0x1C), 0b1000);
    assert_eq!(
        enable(&mut registers, 0x0046_0001),
        Some(ControllerTransition::Enable(QUEUES))
    );
    assert_eq!(read_u32(&registers, 0x1C), 0);
}

#[test]
fn a_reserved_shutdown_notification_is_ignored() {
    let mut registers = running();
    assert_eq!(write_u32(&mut registers, 0x14, 0x0046_C001), None);
    assert!(registers.is_running());
}

#[test]
fn interrupt_masks_are_set_and_cleared_by_ones() {
    let mut registers = registers();
    write_u32(&mut registers, 0x0C, 0b1100);
    write_u32(&mut registers, 0x0C, 0b0010);
    write_u32(&mut registers, 0x10, 0b0100);
    assert_eq!(read_u32(&registers, 0x0C), 0b1010);
    assert_eq!(read_u32(&registers, 0x10), 0b1010);
}

#[test]
fn read_only_and_unknown_properties_ignore_writes() {
    let mut registers = running();
    let before: Vec<u8> = read::<4096>(&registers, 0).to_vec();
    for (offset, length) in [(0x00, 12), (0x18, 12), (0x38, 0xFC8)] {
        assert_eq!(registers.write(offset, &vec![0xFF; length]), None);
    }
    assert_eq!(read::<4096>(&registers, 0).to_vec(), before);
}

#[test]
fn addresses_are_written_in_halves_or_whole_and_page_aligned() {
    let mut registers = registers();
    write_u32(&mut registers, 0x2C, 0x12);
    write_u32(&mut registers, 0x28, 0x3456_7FFF);
    assert_eq!(u64::from_le_bytes(read(&registers, 0x28)), 0x12_3456_7000);
    registers.write(0x28, &0xFFFF_FFFF_FFFF_FFFF_u64.to_le_bytes());
    assert_eq!(
        u64::from_le_bytes(read(&registers, 0x28)),
        0xFFFF_FFFF_FFFF_F000
    );
    // Eight bytes over AQA and the lower half of ASQ.
    registers.write(0x24, &0x7000_001F_001F_u64.to_le_bytes());
    assert_eq!(read_u32(&registers, 0x24), 0x001F_001F);
    assert_eq!(
        u64::from_le_bytes(read(&registers, 0x28)),
        0xFFFF_FFFF_0000_7000
    );
}

#[test]
fn partial_and_odd_accesses_are_safe() {
    let mut registers = registers();
    registers.write(0x24, &0x001F_003F_u32.to_le_bytes());
    assert_eq!(registers.write(0x16, &[0x46]), None);
    assert_eq!(read_u32(&registers, 0x14), 0x0046_0000);
    assert!(matches!(
        registers.write(0x14, &[1]),
        Some(ControllerTransition::Enable(_))
    ));
    assert_eq!(read(&registers, 0x15), [0x00, 0x46, 0x00, 0, 0]);
    for offset in [
        0,
        1,
        0x13,
        0x15,
        0xFFE,
        0xFFF,
        0x1000,
        u64::MAX - 1,
        u64::MAX,
    ] {
        for length in [0, 1, 2, 3, 5, 7, 8, 9, 64, 5000] {
            registers.read(offset, &mut vec![0; length]);
            registers.write(offset, &vec![0xFF; length]);
        }
    }
}

#[test]
fn one_write_over_everything_makes_one_transition() {
    let mut registers = running();
    assert_eq!(
        registers.write(0, &[0; 4096]),
        Some(ControllerTransition::Disable)
    );
    registers.complete_reset();
    assert_eq!(
        read(&registers, 0x24),
        [0; 0x14],
        "the admin queues went too"
    );
}
