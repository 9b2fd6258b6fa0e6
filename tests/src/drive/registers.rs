//! Registers, and the states that CC and CSTS describe (NVMe Base 2.0, sections 3.1.3, 3.5, 3.6).

use std::time::Duration;

use nvme_mpt_memory::clock;

use super::faults::ResetReaction;
use super::queues::{Cq, Sq, WeightedTurns};
use super::{Arbitration, Controller, WeightedFailure};
use crate::memory::PAGE_SIZE;
use crate::registers::{
    ACQ, AQA, ASQ, CAP, CC, CC_ENABLE, CC_SHN_MASK, CSTS, CSTS_FATAL, CSTS_PAUSED, CSTS_READY,
    CSTS_SHST_COMPLETE, VS,
};

/// CC.CSS and CC.MPS.
const CC_CSS_MPS: u32 = 0x7F0;

/// CC.AMS.
const CC_AMS: u32 = 0b111 << 11;

/// CC.AMS: Weighted Round Robin with Urgent Priority Class.
const CC_AMS_WEIGHTED: u32 = 1 << 11;

/// State of the controller, from disabled to ready. The times are the ends of transitions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Disabled,
    Enabling(Duration),
    Ready,
    Disabling(Duration),
}

impl Controller {
    fn cap(&self) -> u64 {
        let options = &self.options;
        // CAP with CQR set.
        u64::from(options.entries_max - 1)
            | 1 << 16
            | u64::from(options.arbitration != Arbitration::RoundRobin) << 17
            | u64::from(options.timeout) << 24
            | u64::from(options.dstrd) << 32
            | u64::from(options.command_sets) << 37
            | u64::from(options.mpsmin) << 48
            | u64::from(options.mpsmin.max(4)) << 52
    }

    fn csts(&self) -> u32 {
        let ready = match self.phase {
            Phase::Ready => true,
            Phase::Disabling(_) => self.weighted_failure.is_none(),
            Phase::Disabled | Phase::Enabling(_) => false,
        };
        (if ready { CSTS_READY } else { 0 })
            | (if self.fatal { CSTS_FATAL } else { 0 })
            | (if self.paused { CSTS_PAUSED } else { 0 })
            | (if self.shut_down {
                CSTS_SHST_COMPLETE
            } else {
                0
            })
    }

    pub(super) fn read_register(&self, offset: u64) -> u64 {
        match offset {
            CAP => self.cap(),
            VS => self.options.version.into(),
            CC => self.cc.into(),
            CSTS => self.csts().into(),
            AQA => self.aqa.into(),
            ASQ => self.asq,
            ACQ => self.acq,
            _ => 0,
        }
    }

    pub(super) fn write_register(&mut self, offset: u64, value: u64) {
        if matches!(offset, AQA | ASQ | ACQ) && self.cc & CC_ENABLE != 0 {
            self.record_violation(format!(
                "Register {offset:#x} was written while CC.EN is set"
            ));
        }
        match offset {
            CC => self.configure(value as u32),
            AQA => self.aqa = value as u32,
            ASQ => self.asq = value,
            ACQ => self.acq = value,
            // INTMS and INTMC, which MSI-X does not use.
            0x0C | 0x10 => {}
            _ => self.record_violation(format!("Register {offset:#x} was written")),
        }
    }

    fn configure(&mut self, cc: u32) {
        let now = clock::monotonic();
        let before = std::mem::replace(&mut self.cc, cc);
        if cc & CC_SHN_MASK != 0 && before & CC_SHN_MASK == 0 {
            self.counters.shutdowns += 1;
            self.shut_down = true;
        }
        let then = now + self.options.reset_time;
        match (before & CC_ENABLE != 0, cc & CC_ENABLE != 0) {
            (false, true) => {
                if self.phase != Phase::Disabled {
                    self.record_violation("CC.EN was set before CSTS.RDY was cleared");
                }
                if cc & CC_CSS_MPS != 0 {
                    self.record_violation(format!(
                        "CC {cc:#x}: CSS or MPS is not one that is offered"
                    ));
                }
                self.select_arbitration(cc & CC_AMS);
                self.counters.enables += 1;
                self.counters.weighted_enables += u64::from(self.is_weighted());
                self.phase = Phase::Enabling(then);
            }
            (true, false) => {
                let stuck = self.fatal
                    || self.weighted_failure.is_some()
                    || self.faults.resets != ResetReaction::Work;
                if matches!(self.phase, Phase::Enabling(_)) && !stuck {
                    self.record_violation("CC.EN was cleared before CSTS.RDY was set");
                }
                self.counters.disables += 1;
                self.phase = Phase::Disabling(then);
            }
            (true, true) if (before ^ cc) & (CC_CSS_MPS | CC_AMS) != 0 => {
                self.record_violation("CC.CSS, CC.MPS or CC.AMS was changed while CC.EN is set");
            }
            _ => {}
        }
    }

    /// Makes the controller fail if it does not support the selected arbitration mechanism.
    fn select_arbitration(&mut self, ams: u32) {
        match (ams, self.options.arbitration) {
            (0, _) | (CC_AMS_WEIGHTED, Arbitration::Weighted) => {}
            (CC_AMS_WEIGHTED, Arbitration::FailingWeighted(failure)) => {
                self.fatal = failure != WeightedFailure::NeverReady;
                self.weighted_failure = Some(failure);
            }
            _ => {
                self.record_violation(format!("CC.AMS {:#b} is not offered", ams >> 11));
                self.fatal = true;
            }
        }
    }

    /// Returns whether the controller was enabled with weighted round robin.
    pub(super) fn is_weighted(&self) -> bool {
        self.cc & CC_AMS == CC_AMS_WEIGHTED
    }

    /// Makes CSTS follow CC.
    pub(super) fn update_status(&mut self, now: Duration) -> bool {
        match self.phase {
            Phase::Enabling(then)
                if then <= now
                    && self.faults.resets == ResetReaction::Work
                    && self.weighted_failure.is_none() =>
            {
                self.enter_ready();
                true
            }
            Phase::Disabling(then) if then <= now => {
                self.transfer_lost_commands();
                self.clear_state();
                true
            }
            _ => false,
        }
    }

    fn enter_ready(&mut self) {
        self.doorbells.discard_stores();
        let page = PAGE_SIZE as u64;
        let (sq, cq) = (self.aqa & 0xFFF, self.aqa >> 16 & 0xFFF);
        if !self.asq.is_multiple_of(page) || !self.acq.is_multiple_of(page) || sq == 0 || cq == 0 {
            self.record_violation("AQA, ASQ or ACQ holds no queue");
            self.fatal = true;
        }
        self.cqs.insert(0, Cq::new(self.acq, cq + 1, None));
        self.sqs.insert(0, Sq::new(self.asq, sq + 1, 0, 0));
        self.phase = Phase::Ready;
    }

    /// Clears the state that a reset clears. Afterwards, the drive no longer accesses memory.
    pub(super) fn clear_state(&mut self) {
        self.phase = Phase::Disabled;
        let lasting = |failure: &WeightedFailure| *failure != WeightedFailure::Fatal;
        self.weighted_failure = self.weighted_failure.filter(lasting);
        self.fatal = self.weighted_failure == Some(WeightedFailure::FatalUntilFunctionReset);
        (self.hung, self.shut_down) = (false, false);
        self.paused = false;
        self.sqs.clear();
        self.last_fetched = 0;
        self.arbitration = 0;
        self.weighted_turns = WeightedTurns::default();
        self.cqs.clear();
        self.fetched.clear();
        self.channels.fill(Duration::ZERO);
        self.shadow = None;
        self.event_requests.clear();
        self.events.clear();
        self.unread_events.clear();
        self.event_config = 0;
        self.doorbells.discard_stores();
    }

    /// Resets the function (function level reset).
    pub(super) fn reset_function(&mut self) {
        self.counters.function_resets += 1;
        self.weighted_failure = None;
        self.clear_state();
        (self.cc, self.aqa, self.asq, self.acq) = (0, 0, 0, 0);
        self.bus_master = false;
        if self.faults.resets == ResetReaction::NeverReady {
            self.faults.resets = ResetReaction::Work;
        }
    }
}
