//! Controller properties in BAR0, up to the doorbells (Base 2.0, section 3.1.3; PCIe 1.0, section 3.1).
//!
//! A write that requests an enable, a reset or a shutdown returns a [`ControllerTransition`]. The caller carries out this
//! transition and reports its completion. Only then does `CSTS` change.

use nvme_guest::Gpa;
use nvme_spec::{
    cqe::IOCQES,
    registers::{
        Aqa, ArbitrationMechanism, Cap, Cc, CommandSetSelected, Crto, Csts, NvmeVersion,
        ShutdownNotification, ShutdownStatus, offset,
    },
    sqe::IOSQES,
};

mod state;

/// `CAP.TO` and `CRTO.CRWMT` in units of 500 ms: 127.5 s, the maximum of `CAP.TO`. Enabling is immediate, but a reset waits for
/// commands in flight, which takes as long as the drive needs.
const READY_TIMEOUT: u8 = u8::MAX;

/// Mask of the address bits in `ASQ` and `ACQ`. Bits 11:0 are reserved, as queues are page aligned.
const BASE_MASK: u64 = !0xFFF;
/// Mask of the bits of `AQA` that are not reserved.
const AQA_MASK: u32 = 0x0FFF_0FFF;

/// Transition of the controller that a guest requests by writing a property.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ControllerTransition {
    /// `CC.EN` changed from 0 to 1, with valid settings.
    Enable(AdminQueues),
    /// `CC.EN` changed from 1 to 0: a Controller Reset (Base 2.0, section 3.7.2).
    Disable,
    /// `CC.SHN` requests a shutdown, normal or abrupt (Base 2.0, section 3.6).
    Shutdown(ShutdownNotification),
}

/// Addresses and sizes of the admin queues: `AQA`, `ASQ` and `ACQ` at the time when the controller was enabled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AdminQueues {
    pub(crate) sq_base: Gpa,
    pub(crate) sq_entries: u32,
    pub(crate) cq_base: Gpa,
    pub(crate) cq_entries: u32,
}

/// Values in `CAP` that depend on the lease.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ControllerCapabilities {
    /// Largest number of entries of an I/O queue (`CAP.MQES`), 2 to 65,536.
    pub(crate) queue_entries_max: u32,
    /// Distance of doorbells (`CAP.DSTRD`), as the field has it.
    pub(crate) dstrd: u8,
}

/// Values of the controller properties of one controller.
#[derive(Clone, Debug)]
pub(crate) struct ControllerProperties {
    cap: Cap,
    interrupt_mask: u32,
    cc: Cc,
    csts: Csts,
    aqa: Aqa,
    asq: u64,
    acq: u64,
}

impl ControllerProperties {
    /// Creates the properties of a disabled controller.
    pub(crate) fn new(capabilities: ControllerCapabilities) -> Self {
        let mqes_z = capabilities.queue_entries_max.clamp(2, 1 << 16) - 1;
        let cap = Cap::default()
            .with_mqes_z(u16::try_from(mqes_z).unwrap_or(u16::MAX))
            .with_cqr(true)
            .with_to(READY_TIMEOUT)
            .with_dstrd(capabilities.dstrd)
            .with_css_nvm(true)
            // CNS 05h to 08h and 1Ch are supported, so a host may select all command sets.
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

    /// Reads any number of bytes at any offset. Bytes outside the properties read as zero.
    pub(crate) fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        for (byte, at) in data.iter_mut().zip(offset..offset::DOORBELLS) {
            *byte = self.read_dword(at & !0b11).to_le_bytes()[(at & 0b11) as usize];
        }
    }

    /// Writes any number of bytes at any offset. If a property is written in part, its other bytes keep their values. Returns a
    /// transition that the write requests.
    pub(crate) fn write(&mut self, offset: u64, data: &[u8]) -> Option<ControllerTransition> {
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

    /// Returns whether admin commands are processed: the controller is enabled, has not failed and is not shut down.
    pub(crate) fn is_running(&self) -> bool {
        self.cc.en()
            && self.csts.rdy()
            && !self.csts.cfs()
            && self.csts.shst() == ShutdownStatus::NORMAL
    }

    /// Returns Controller Configuration (`CC`), on whose fields some commands depend.
    pub(crate) fn cc(&self) -> Cc {
        self.cc
    }

    /// Returns the vectors that the guest has masked through INTMS, one bit each.
    pub(crate) fn interrupt_mask(&self) -> u32 {
        self.interrupt_mask
    }

    /// Sets `CSTS.RDY`, after the admin queues were set up.
    pub(crate) fn set_ready(&mut self) {
        self.csts = self.csts.with_rdy(true);
    }

    /// Completes a Controller Reset, after the last access to guest memory. `AQA`, `ASQ` and `ACQ` keep their values; all other
    /// properties are reset (Base 2.0, section 3.7.2).
    pub(crate) fn complete_reset(&mut self) {
        *self = Self {
            aqa: self.aqa,
            asq: self.asq,
            acq: self.acq,
            ..Self::with_cap(self.cap)
        };
    }

    /// Keeps `CSTS.RDY` set until [`Self::complete_reset`], because commands from before the reset may still access guest
    /// memory.
    pub(crate) fn keep_ready(&mut self) {
        self.csts = self.csts.with_rdy(true);
    }

    /// Returns the transition that has begun and is not complete, as these properties show it; `None` if there is none.
    pub(crate) fn incomplete_transition(&self) -> Option<ControllerTransition> {
        if self.csts.cfs() {
            return None;
        }
        match (self.cc.en(), self.csts.rdy()) {
            (false, true) => Some(ControllerTransition::Disable),
            (true, false) => Some(ControllerTransition::Enable(self.admin_queues())),
            _ if self.csts.shst() == ShutdownStatus::OCCURRING => {
                Some(ControllerTransition::Shutdown(self.cc.shn()))
            }
            _ => None,
        }
    }

    /// Completes a shutdown: `CSTS.SHST` shows it from now on.
    pub(crate) fn complete_shutdown(&mut self) {
        self.csts = self.csts.with_shst(ShutdownStatus::COMPLETE);
    }

    /// Sets `CSTS.CFS`, because of a failure that no completion can report.
    pub(crate) fn fail(&mut self) {
        self.csts = self.csts.with_cfs(true);
    }

    /// Resets all properties to their power-on values.
    pub(crate) fn reset(&mut self) {
        *self = Self::with_cap(self.cap);
    }

    fn read_dword(&self, at: u64) -> u32 {
        const CAP_HIGH: u64 = offset::CAP + 4;
        const ASQ_HIGH: u64 = offset::ASQ + 4;
        const ACQ_HIGH: u64 = offset::ACQ + 4;
        match at {
            offset::CAP => self.cap.0 as u32,
            CAP_HIGH => (self.cap.0 >> 32) as u32,
            offset::VS => NvmeVersion::V2_0.0,
            // The specification does not define the value while MSI-X is in use, but some drivers read back the masks that they
            // set.
            offset::INTMS | offset::INTMC => self.interrupt_mask,
            offset::CC => self.cc.0,
            offset::CSTS => self.csts.0,
            offset::AQA => self.aqa.0,
            offset::ASQ => self.asq as u32,
            ASQ_HIGH => (self.asq >> 32) as u32,
            offset::ACQ => self.acq as u32,
            ACQ_HIGH => (self.acq >> 32) as u32,
            offset::CRTO => Crto::default().with_crwmt(u16::from(self.cap.to())).0,
            _ => 0,
        }
    }

    fn write_dword(&mut self, at: u64, value: u32, mask: u32) -> Option<ControllerTransition> {
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
            // CAP, VS, CSTS and CRTO are read-only. NSSR has no effect without CAP.NSSRS.
            _ => {}
        }
        None
    }

    /// Writes Controller Configuration (Base 2.0, section 3.1.3.5).
    fn write_cc(&mut self, value: Cc) -> Option<ControllerTransition> {
        // CRIME is read-only, since CAP.CRMS.CRIMS is clear.
        let value = value.with_crime(false);
        match (self.cc.en(), value.en()) {
            (true, false) => {
                self.cc = value;
                Some(ControllerTransition::Disable)
            }
            (false, true) => self.enable(value),
            (true, true) => {
                // CSS, MPS and AMS may only change while the controller is disabled.
                let (css, mps, ams) = (self.cc.css(), self.cc.mps(), self.cc.ams());
                self.notify_shutdown(value.with_css(css).with_mps(mps).with_ams(ams))
            }
            (false, false) => self.notify_shutdown(value),
        }
    }

    fn enable(&mut self, value: Cc) -> Option<ControllerTransition> {
        self.cc = value.with_shn(ShutdownNotification::NONE);
        self.csts = Csts::default();
        let queues = self.admin_queues();
        // A queue of one entry can hold no command (Base 2.0, section 3.3.3.4).
        if !is_supported(self.cc) || queues.sq_entries < 2 || queues.cq_entries < 2 {
            self.fail();
            return None;
        }
        Some(ControllerTransition::Enable(queues))
    }

    fn admin_queues(&self) -> AdminQueues {
        AdminQueues {
            sq_base: Gpa(self.asq),
            sq_entries: u32::from(self.aqa.asqs_z()) + 1,
            cq_base: Gpa(self.acq),
            cq_entries: u32::from(self.aqa.acqs_z()) + 1,
        }
    }

    fn notify_shutdown(&mut self, value: Cc) -> Option<ControllerTransition> {
        let notified = self.cc.shn();
        self.cc = value;
        let is_requested = matches!(
            value.shn(),
            ShutdownNotification::NORMAL | ShutdownNotification::ABRUPT
        );
        // Only a reset ends a shutdown that has begun.
        if !is_requested || value.shn() == notified || self.csts.shst() != ShutdownStatus::NORMAL {
            return None;
        }
        self.csts = self.csts.with_shst(ShutdownStatus::OCCURRING);
        Some(ControllerTransition::Shutdown(value.shn()))
    }
}

/// Returns whether the controller can be enabled with the value `cc`. The sizes of I/O queue entries may be zero, because the
/// guest may set them later, before it creates I/O queues.
fn is_supported(cc: Cc) -> bool {
    has_supported_constants(cc)
        && matches!(cc.iosqes(), 0 | IOSQES)
        && matches!(cc.iocqes(), 0 | IOCQES)
}

/// Returns whether CSS, MPS and AMS, which must not change while the controller is enabled, have supported values.
fn has_supported_constants(cc: Cc) -> bool {
    matches!(cc.css(), CommandSetSelected::NVM | CommandSetSelected::ALL)
        && cc.mps() == 0
        && cc.ams() == ArbitrationMechanism::ROUND_ROBIN
}

#[cfg(test)]
mod tests;
