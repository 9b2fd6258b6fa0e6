//! The controller properties in BAR0, up to the doorbells (Base 2.0, section 3.1.3; PCIe 1.0,
//! section 3.1).
//!
//! A write that asks for work (enable, reset, shut down) is returned as a [`Transition`]. Whoever
//! carries it out reports back, and only then does `CSTS` tell the guest.

use nvme_mpt::{
    Gpa, StateError,
    spec::{
        cqe::IOCQES,
        registers::{
            Aqa, ArbitrationMechanism, Cap, Cc, CommandSetSelected, Crto, Csts,
            ShutdownNotification, ShutdownStatus, Version, offset,
        },
        sqe::IOSQES,
    },
};

use crate::state::parts::RegistersState;

/// `CAP.TO` and `CRTO.CRWMT`, in units of 500 ms: 30 s. Enabling takes no time at all; a reset may
/// have to wait for commands that the host controller still works on.
const READY_TIMEOUT: u8 = 60;

/// Bits 11:0 of `ASQ` and `ACQ` are reserved: queues begin a memory page.
const BASE_MASK: u64 = !0xFFF;
/// Bits of `AQA` that are not reserved.
const AQA_MASK: u32 = 0x0FFF_0FFF;

/// What a guest has asked of the controller by writing a property.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Transition {
    /// `CC.EN` went from 0 to 1, with everything valid that has to be.
    Enable(AdminQueues),
    /// `CC.EN` went from 1 to 0: a Controller Reset (Base 2.0, section 3.7.2).
    Disable,
    /// `CC.SHN` asks for a shutdown, normal or abrupt (Base 2.0, section 3.6).
    Shutdown(ShutdownNotification),
}

/// Where the admin queues lie, as `AQA`, `ASQ` and `ACQ` had it when the controller was enabled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AdminQueues {
    pub(crate) sq_base: Gpa,
    pub(crate) sq_entries: u32,
    pub(crate) cq_base: Gpa,
    pub(crate) cq_entries: u32,
}

/// What the controller's `CAP` promises that depends on what is behind it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Capabilities {
    /// Most entries of an I/O queue, 2 to 65,536.
    pub(crate) queue_entries_max: u32,
    /// `CAP.DSTRD`.
    pub(crate) dstrd: u8,
}

/// The properties of one controller.
#[derive(Clone, Debug)]
pub(crate) struct Registers {
    cap: Cap,
    interrupt_mask: u32,
    cc: Cc,
    csts: Csts,
    aqa: Aqa,
    asq: u64,
    acq: u64,
}

impl Registers {
    /// The properties of a controller that is disabled.
    pub(crate) fn new(capabilities: Capabilities) -> Self {
        let mqes_z = capabilities.queue_entries_max.clamp(2, 1 << 16) - 1;
        let cap = Cap::default()
            .with_mqes_z(u16::try_from(mqes_z).unwrap_or(u16::MAX))
            .with_cqr(true)
            .with_to(READY_TIMEOUT)
            .with_dstrd(capabilities.dstrd)
            .with_css_nvm(true)
            // CNS 05h to 08h and 1Ch are there, so a host may select all command sets: the one.
            .with_css_io(true)
            // Required of a controller that reports version 2.0.
            .with_crwms(true);
        Self::with_cap(cap)
    }

    fn with_cap(cap: Cap) -> Self {
        Self {
            cap,
            interrupt_mask: 0,
            cc: Cc::default(),
            csts: Csts::default(),
            aqa: Aqa::default(),
            asq: 0,
            acq: 0,
        }
    }

    /// Reads any number of bytes from any offset; what is not a property reads as zero.
    pub(crate) fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        for (byte, at) in data.iter_mut().zip(offset..offset::DOORBELLS) {
            *byte = self.dword(at & !0b11).to_le_bytes()[(at & 0b11) as usize];
        }
    }

    /// Writes any number of bytes to any offset. Properties are 4 or 8 bytes and accessed as such;
    /// of one that is written in part, the rest keeps its value.
    pub(crate) fn write(&mut self, offset: u64, data: &[u8]) -> Option<Transition> {
        let mut transition = None;
        let mut bytes = data.iter().zip(offset..offset::DOORBELLS).peekable();
        while let Some((_, first)) = bytes.peek() {
            let at = first & !0b11;
            let (mut value, mut mask) = ([0; 4], [0; 4]);
            while let Some((byte, within)) = bytes.next_if(|(_, offset)| offset & !0b11 == at) {
                value[(within & 0b11) as usize] = *byte;
                mask[(within & 0b11) as usize] = 0xFF;
            }
            let written = self.write_dword(at, u32::from_le_bytes(value), u32::from_le_bytes(mask));
            transition = transition.or(written);
        }
        transition
    }

    /// Whether admin commands are processed: enabled, not failed, not shut down.
    pub(crate) fn is_running(&self) -> bool {
        self.csts.rdy() && !self.csts.cfs() && self.csts.shst() == ShutdownStatus::NORMAL
    }

    /// `CC`, as far as commands depend on it.
    pub(crate) fn cc(&self) -> Cc {
        self.cc
    }

    /// The admin queues are set up: `CSTS.RDY` follows `CC.EN`.
    pub(crate) fn enabled(&mut self) {
        self.csts = self.csts.with_rdy(true);
    }

    /// Nothing touches guest memory any more: a Controller Reset is complete. The properties of
    /// the admin queues keep their values, all others are reset (Base 2.0, section 3.7.2).
    pub(crate) fn disabled(&mut self) {
        *self = Self {
            aqa: self.aqa,
            asq: self.asq,
            acq: self.acq,
            ..Self::with_cap(self.cap)
        };
    }

    /// Shutdown processing is complete.
    pub(crate) fn shut_down(&mut self) {
        self.csts = self.csts.with_shst(ShutdownStatus::COMPLETE);
    }

    /// The controller failed in a way that no completion can tell: `CSTS.CFS`.
    pub(crate) fn fail(&mut self) {
        self.csts = self.csts.with_cfs(true);
    }

    /// As after power-on.
    pub(crate) fn reset(&mut self) {
        *self = Self::with_cap(self.cap);
    }

    /// The properties, for a snapshot.
    pub(crate) fn save(&self) -> RegistersState {
        let Self {
            cap,
            interrupt_mask,
            cc,
            csts,
            aqa,
            asq,
            acq,
        } = self;
        RegistersState {
            cap: cap.0,
            interrupt_mask: *interrupt_mask,
            cc: cc.0,
            csts: csts.0,
            aqa: aqa.0,
            asq: *asq,
            acq: *acq,
        }
    }

    /// Whether these can be the properties: of a controller with this `CAP`, and as accesses leave
    /// them.
    pub(crate) fn check(&self, state: &RegistersState) -> Result<(), StateError> {
        let RegistersState {
            cap,
            interrupt_mask: _,
            cc,
            csts,
            aqa,
            asq,
            acq,
        } = *state;
        if cap != self.cap.0 {
            return Err(StateError::Mismatch {
                promise: "CAP".to_owned(),
                saved: format!("{cap:#018x}"),
                here: format!("{:#018x}", self.cap.0),
            });
        }
        let (cc, csts) = (Cc(cc), Csts(csts));
        let known = Csts::default()
            .with_rdy(csts.rdy())
            .with_cfs(csts.cfs())
            .with_shst(csts.shst());
        let ready = csts.rdy() && !(cc.en() && is_supported(cc));
        let shut_down = matches!(
            csts.shst(),
            ShutdownStatus::NORMAL | ShutdownStatus::OCCURRING | ShutdownStatus::COMPLETE
        );
        if csts != known || ready || !shut_down {
            let valid = format!("what CC {:#010x} leads to", cc.0);
            let value = format!("{:#010x}", csts.0);
            return Err(StateError::invalid("CSTS", value, valid));
        }
        if cc.crime() {
            let value = format!("{:#010x}", cc.0);
            return Err(StateError::invalid("CC", value, "without CRIME"));
        }
        for (name, value, mask) in [
            ("AQA", u64::from(aqa), u64::from(AQA_MASK)),
            ("ASQ", asq, BASE_MASK),
            ("ACQ", acq, BASE_MASK),
        ] {
            if value & !mask != 0 {
                let valid = "without reserved bits";
                return Err(StateError::invalid(name, format!("{value:#x}"), valid));
            }
        }
        Ok(())
    }

    /// Takes over properties that have been checked.
    pub(crate) fn restore(&mut self, state: &RegistersState) {
        let RegistersState {
            cap,
            interrupt_mask,
            cc,
            csts,
            aqa,
            asq,
            acq,
        } = *state;
        *self = Self {
            cap: Cap(cap),
            interrupt_mask,
            cc: Cc(cc),
            csts: Csts(csts),
            aqa: Aqa(aqa),
            asq,
            acq,
        };
    }

    fn dword(&self, at: u64) -> u32 {
        const CAP_HIGH: u64 = offset::CAP + 4;
        const ASQ_HIGH: u64 = offset::ASQ + 4;
        const ACQ_HIGH: u64 = offset::ACQ + 4;
        match at {
            offset::CAP => self.cap.0 as u32,
            CAP_HIGH => (self.cap.0 >> 32) as u32,
            offset::VS => Version::V2_0.0,
            // Undefined while MSI-X is in use, and yet some drivers rely on reading back what
            // they masked.
            offset::INTMS | offset::INTMC => self.interrupt_mask,
            offset::CC => self.cc.0,
            offset::CSTS => self.csts.0,
            offset::AQA => self.aqa.0,
            offset::ASQ => self.asq as u32,
            ASQ_HIGH => (self.asq >> 32) as u32,
            offset::ACQ => self.acq as u32,
            ACQ_HIGH => (self.acq >> 32) as u32,
            offset::CRTO => Crto::default().with_crwmt(u16::from(READY_TIMEOUT)).0,
            _ => 0,
        }
    }

    fn write_dword(&mut self, at: u64, value: u32, mask: u32) -> Option<Transition> {
        const ASQ_HIGH: u64 = offset::ASQ + 4;
        const ACQ_HIGH: u64 = offset::ACQ + 4;

        let merge = |old: u32| old & !mask | value & mask;
        let merge_low = |old: u64| (old >> 32 << 32 | u64::from(merge(old as u32))) & BASE_MASK;
        let merge_high = |old: u64| u64::from(merge((old >> 32) as u32)) << 32 | old & 0xFFFF_FFFF;
        match at {
            offset::INTMS => self.interrupt_mask |= value & mask,
            offset::INTMC => self.interrupt_mask &= !(value & mask),
            offset::CC => return self.write_cc(Cc(merge(self.cc.0))),
            offset::AQA => self.aqa = Aqa(merge(self.aqa.0) & AQA_MASK),
            offset::ASQ => self.asq = merge_low(self.asq),
            ASQ_HIGH => self.asq = merge_high(self.asq),
            offset::ACQ => self.acq = merge_low(self.acq),
            ACQ_HIGH => self.acq = merge_high(self.acq),
            // CAP, VS, CSTS and CRTO are read-only; NSSR does nothing without CAP.NSSRS.
            _ => {}
        }
        None
    }

    /// A write to Controller Configuration (Base 2.0, section 3.1.3.5).
    fn write_cc(&mut self, value: Cc) -> Option<Transition> {
        // CRIME is read-only without CAP.CRMS.CRIMS.
        let value = value.with_crime(false);
        match (self.cc.en(), value.en()) {
            (true, false) => {
                self.cc = value;
                Some(Transition::Disable)
            }
            (false, true) => self.enable(value),
            (true, true) => {
                // These three may only change while disabled.
                let (css, mps, ams) = (self.cc.css(), self.cc.mps(), self.cc.ams());
                self.notify_shutdown(value.with_css(css).with_mps(mps).with_ams(ams))
            }
            (false, false) => self.notify_shutdown(value),
        }
    }

    fn enable(&mut self, value: Cc) -> Option<Transition> {
        self.cc = value.with_shn(ShutdownNotification::NONE);
        self.csts = Csts::default();
        let queues = AdminQueues {
            sq_base: Gpa(self.asq),
            sq_entries: u32::from(self.aqa.asqs_z()) + 1,
            cq_base: Gpa(self.acq),
            cq_entries: u32::from(self.aqa.acqs_z()) + 1,
        };
        // A queue of one entry could hold none (Base 2.0, section 3.3.3.4).
        if !is_supported(self.cc) || queues.sq_entries < 2 || queues.cq_entries < 2 {
            self.fail();
            return None;
        }
        Some(Transition::Enable(queues))
    }

    fn notify_shutdown(&mut self, value: Cc) -> Option<Transition> {
        let notified = self.cc.shn();
        self.cc = value;
        let asked = matches!(
            value.shn(),
            ShutdownNotification::NORMAL | ShutdownNotification::ABRUPT
        );
        // Once begun, a shutdown is left by a reset only.
        if !asked || value.shn() == notified || self.csts.shst() != ShutdownStatus::NORMAL {
            return None;
        }
        self.csts = self.csts.with_shst(ShutdownStatus::OCCURRING);
        Some(Transition::Shutdown(value.shn()))
    }
}

impl RegistersState {
    /// Whether the controller is enabled.
    pub(crate) fn is_enabled(&self) -> bool {
        Cc(self.cc).en()
    }
}

/// Whether the controller can be enabled with these values. Sizes of I/O queue entries are due
/// only when I/O queues are created, so zero stands for "not yet".
fn is_supported(cc: Cc) -> bool {
    matches!(cc.css(), CommandSetSelected::NVM | CommandSetSelected::ALL)
        && cc.mps() == 0
        && cc.ams() == ArbitrationMechanism::ROUND_ROBIN
        && matches!(cc.iosqes(), 0 | IOSQES)
        && matches!(cc.iocqes(), 0 | IOCQES)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn registers() -> Registers {
        Registers::new(Capabilities {
            queue_entries_max: 1024,
            dstrd: 4,
        })
    }

    fn read<const N: usize>(registers: &Registers, offset: u64) -> [u8; N] {
        let mut data = [0xA5; N];
        registers.read(offset, &mut data);
        data
    }

    fn read_u32(registers: &Registers, offset: u64) -> u32 {
        u32::from_le_bytes(read(registers, offset))
    }

    fn write_u32(registers: &mut Registers, offset: u64, value: u32) -> Option<Transition> {
        registers.write(offset, &value.to_le_bytes())
    }

    /// As Linux does: AQA, ASQ, ACQ, then CC.
    fn enable(registers: &mut Registers, cc: u32) -> Option<Transition> {
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

    fn running() -> Registers {
        let mut registers = registers();
        assert_eq!(
            enable(&mut registers, 0x0046_0001),
            Some(Transition::Enable(QUEUES))
        );
        assert_eq!(
            read_u32(&registers, 0x1C),
            0,
            "not ready until the queues are set up"
        );
        registers.enabled();
        registers
    }

    #[test]
    fn capabilities_are_what_drivers_expect() {
        let registers = registers();
        // MQES 1023, CQR, TO 30 s, DSTRD 4, CSS 41h, 4 KiB pages only, CRMS 01b.
        assert_eq!(
            u64::from_le_bytes(read(&registers, 0)),
            0x0800_0824_3C01_03FF
        );
        assert_eq!(read_u32(&registers, 0x08), 0x0002_0000);
        assert_eq!(read_u32(&registers, 0x68), 60, "CRTO.CRWMT is CAP.TO");
        let largest = Registers::new(Capabilities {
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
            Some(Transition::Enable(QUEUES))
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
                Some(Transition::Disable)
            );
            registers.disabled();
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
        assert_eq!(enable(&mut registers, 1), Some(Transition::Enable(QUEUES)));
        registers.enabled();
        assert_eq!(write_u32(&mut registers, 0x14, 0x0046_0001), None);
        assert_eq!((registers.cc().iosqes(), registers.cc().iocqes()), (6, 4));
    }

    #[test]
    fn what_may_change_only_while_disabled_does_not_change() {
        let mut registers = running();
        assert_eq!(write_u32(&mut registers, 0x14, 0x0146_38F1), None);
        assert_eq!(read_u32(&registers, 0x14), 0x0046_0001);
    }

    #[test]
    fn ready_stays_until_the_reset_is_complete() {
        let mut registers = running();
        assert_eq!(
            write_u32(&mut registers, 0x14, 0x0046_0000),
            Some(Transition::Disable)
        );
        assert_eq!(read_u32(&registers, 0x1C), 1);
        registers.disabled();
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
    fn a_shutdown_is_notified_once_and_left_by_reset() {
        for (shn, kind) in [
            (0x4000, ShutdownNotification::NORMAL),
            (0x8000, ShutdownNotification::ABRUPT),
        ] {
            let mut registers = running();
            let cc = 0x0046_0001 | shn;
            assert_eq!(
                write_u32(&mut registers, 0x14, cc),
                Some(Transition::Shutdown(kind))
            );
            assert_eq!(read_u32(&registers, 0x1C), 0b0101);
            assert!(!registers.is_running());
            registers.shut_down();
            assert_eq!(read_u32(&registers, 0x1C), 0b1001);
            assert_eq!(write_u32(&mut registers, 0x14, cc), None);
            assert_eq!(write_u32(&mut registers, 0x14, 0x0046_0001), None);
            assert_eq!(read_u32(&registers, 0x1C), 0b1001);
            assert_eq!(
                write_u32(&mut registers, 0x14, 0),
                Some(Transition::Disable)
            );
            registers.disabled();
            assert_eq!(read_u32(&registers, 0x1C), 0);
        }
    }

    #[test]
    fn a_disabled_controller_can_be_shut_down_and_enabled_again() {
        let mut registers = registers();
        assert_eq!(
            write_u32(&mut registers, 0x14, 0x4000),
            Some(Transition::Shutdown(ShutdownNotification::NORMAL))
        );
        registers.shut_down();
        assert_eq!(read_u32(&registers, 0x1C), 0b1000);
        assert_eq!(
            enable(&mut registers, 0x0046_0001),
            Some(Transition::Enable(QUEUES))
        );
        assert_eq!(read_u32(&registers, 0x1C), 0);
    }

    #[test]
    fn a_reserved_shutdown_notification_is_none() {
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
            Some(Transition::Enable(_))
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
        assert_eq!(registers.write(0, &[0; 4096]), Some(Transition::Disable));
        registers.disabled();
        assert_eq!(
            read(&registers, 0x24),
            [0; 0x14],
            "the admin queues went too"
        );
    }
}
