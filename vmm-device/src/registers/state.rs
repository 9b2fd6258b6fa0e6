//! Controller properties in the saved state.

use nvme_guest::BackendStateError;
use nvme_spec::registers::{Aqa, Cap, Cc, Csts, ShutdownStatus};

use super::{AQA_MASK, BASE_MASK, ControllerProperties, has_supported_constants};
use crate::state::parts::RegistersState;

impl ControllerProperties {
    /// Returns the properties, to be saved.
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

    /// Checks that the saved properties fit this controller's `CAP`, and that a guest's accesses could have produced them.
    pub(crate) fn check(&self, state: &RegistersState) -> Result<(), BackendStateError> {
        let RegistersState {
            cap,
            interrupt_mask: _,
            cc,
            csts,
            aqa,
            asq,
            acq,
        } = *state;
        let (saved, own) = (Cap(cap).dstrd(), self.cap.dstrd());
        if saved != own {
            return Err(BackendStateError::Mismatch {
                promise: "doorbell stride (CAP.DSTRD)".to_owned(),
                saved: saved.to_string(),
                here: own.to_string(),
            });
        }
        // `CAP.TO` may differ: the guest has read the saved value, and keeps it.
        if Cap(cap).with_to(0) != self.cap.with_to(0) {
            return Err(BackendStateError::Mismatch {
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
        // Entry sizes may change while the controller is enabled, so only the other fields of `CC` are checked. During an
        // incomplete reset, RDY is set and EN is clear.
        let ready = csts.rdy() && cc.en() && !has_supported_constants(cc);
        let shut_down = matches!(
            csts.shst(),
            ShutdownStatus::NORMAL | ShutdownStatus::OCCURRING | ShutdownStatus::COMPLETE
        );
        if csts != known || ready || !shut_down {
            let valid = format!("what CC {:#010x} leads to", cc.0);
            let value = format!("{:#010x}", csts.0);
            return Err(BackendStateError::invalid("CSTS", value, valid));
        }
        if cc.crime() {
            let value = format!("{:#010x}", cc.0);
            return Err(BackendStateError::invalid("CC", value, "without CRIME"));
        }
        for (name, value, mask) in [
            ("AQA", u64::from(aqa), u64::from(AQA_MASK)),
            ("ASQ", asq, BASE_MASK),
            ("ACQ", acq, BASE_MASK),
        ] {
            if value & !mask != 0 {
                let valid = "without reserved bits";
                return Err(BackendStateError::invalid(
                    name,
                    format!("{value:#x}"),
                    valid,
                ));
            }
        }
        Ok(())
    }

    /// Restores checked properties.
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
}

impl RegistersState {
    /// Returns whether the controller is enabled.
    pub(crate) fn is_enabled(&self) -> bool {
        Cc(self.cc).en()
    }

    /// Returns whether the controller is enabled and ready, so that it can have queues.
    pub(crate) fn is_ready(&self) -> bool {
        self.is_enabled() && Csts(self.csts).rdy()
    }

    /// Returns whether the guest has disabled the controller, and the reset is not complete.
    pub(crate) fn is_being_disabled(&self) -> bool {
        !self.is_enabled() && Csts(self.csts).rdy()
    }
}
