//! Faults to inject into the drive: which commands, when, and with what effect. The schedule's type is that of software
//! drives.

use std::time::Duration;

use nvme_layers::faults::FaultSchedule;

use crate::admin::feature;
use crate::command::{Sqe, admin};
use crate::status::StatusCode;

/// QPRIO of priority class Medium.
const MEDIUM: u32 = 2;

/// Commands that a [`Fault`] matches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FaultMatch {
    /// I/O commands.
    Io,
    /// I/O commands with an opcode.
    IoOpcode(u8),
    /// I/O commands whose blocks, by SLBA and NLB, include a block of this range.
    Blocks(std::ops::Range<u64>),
    /// Admin commands with an opcode.
    Admin(u8),
    /// Set Features commands for Arbitration with weights. If `true`, only commands with unequal weights.
    Weights(bool),
    /// Create I/O Submission Queue commands with a priority class (QPRIO) other than Medium.
    QueueClass,
}

impl FaultMatch {
    fn matches(&self, queue: u16, sqe: &Sqe) -> bool {
        match self {
            Self::Io => queue != 0,
            Self::IoOpcode(opcode) => queue != 0 && sqe.opcode() == *opcode,
            Self::Blocks(range) => {
                let first = sqe.0[5];
                let last = first.saturating_add(sqe.0[6] & 0xFFFF);
                queue != 0 && range.start <= last && first < range.end
            }
            Self::Admin(opcode) => queue == 0 && sqe.opcode() == *opcode,
            Self::Weights(unequal) => {
                let weights = sqe.cdw(11) >> 8;
                let is_equal = weights == (weights & 0xFF) * 0x1_0101;
                let is_arbitration = sqe.cdw(10) as u8 == feature::ARBITRATION;
                Self::Admin(admin::SET_FEATURES).matches(queue, sqe)
                    && is_arbitration
                    && !(*unequal && is_equal)
            }
            Self::QueueClass => {
                let priority = sqe.cdw(11) >> 1 & 0b11;
                Self::Admin(admin::CREATE_SQ).matches(queue, sqe) && priority != MEDIUM
            }
        }
    }
}

/// Effect of a fault on a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// The command never completes, but it may be aborted. Its DMA still happens, when the controller is reset.
    Lose,
    /// The command does not complete, as with [`Self::Lose`], until
    /// [`ModelDrive::complete_held`](super::ModelDrive::complete_held).
    Hold,
    /// The command takes this much longer.
    Delay(Duration),
    /// The command is not executed, but completes successfully.
    Skip,
    /// The command is not executed, and completes with this status. The flag is Do Not Retry.
    Fail(StatusCode, bool),
    /// The controller reports a fatal status (CSTS.CFS) and stops, until a reset.
    Fatal,
    /// The controller stops until a reset, but reports no status.
    Hang,
    /// The drive disappears from the bus.
    Vanish,
    /// The command completes twice, with a short delay between.
    CompleteTwice,
    /// The command completes, and completes once more later: after the drive has fetched this number of further commands
    /// from its queue, at least one.
    CompleteAgain(u16),
    /// The command completes, and with it a command that was never sent.
    CompleteUnknown,
    /// Before the command's completion, the drive posts an entry of random bytes with the valid phase tag.
    Garbage,
}

/// A fault to inject.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Commands that the fault matches.
    pub matching: FaultMatch,
    /// Schedule: which of the matching commands are affected.
    pub schedule: FaultSchedule,
    /// Effect on the affected commands.
    pub effect: Effect,
}

impl Fault {
    /// Creates a fault that affects only the next matching command.
    pub fn once(meets: FaultMatch, effect: Effect) -> Self {
        Self {
            matching: meets,
            schedule: FaultSchedule::new(0, Some(1)),
            effect,
        }
    }

    /// Sets the number of matching commands that succeed before the fault.
    #[must_use]
    pub fn after(mut self, commands: u64) -> Self {
        self.schedule.after = commands;
        self
    }

    /// Sets the number of matching commands that the fault affects.
    #[must_use]
    pub fn times(mut self, commands: u64) -> Self {
        self.schedule.count = Some(commands);
        self
    }
}

/// Reaction to Abort.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AbortReaction {
    /// The command is aborted.
    #[default]
    Work,
    /// The Abort reports that the command was not aborted.
    Fail,
    /// The Abort never completes.
    Hang,
    /// The Abort does not complete. It is executed once another reaction is set.
    Hold,
}

/// Reaction of the controller to CC.EN.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ResetReaction {
    /// CSTS.RDY follows CC.EN, as specified.
    #[default]
    Work,
    /// CSTS.RDY is never set until a function level reset.
    NeverReady,
    /// CSTS.RDY is never set again.
    Broken,
}

/// All injected faults.
#[derive(Debug, Default)]
pub(super) struct Faults {
    list: Vec<Fault>,
    pub(super) aborts: AbortReaction,
    pub(super) resets: ResetReaction,
    /// Number of commands that faults have affected.
    pub(super) matched: u64,
}

impl Faults {
    pub(super) fn add(&mut self, fault: Fault) {
        self.list.push(fault);
    }

    pub(super) fn clear(&mut self) {
        self.list.clear();
    }

    /// Returns the effect that faults have on a newly fetched command.
    pub(super) fn effect_on(&mut self, queue: u16, sqe: &Sqe) -> Option<Effect> {
        let mut effect = None;
        for fault in &mut self.list {
            if !fault.matching.matches(queue, sqe) {
                continue;
            }
            if fault.schedule.count_command(|| effect.is_none()) {
                self.matched += 1;
                effect = Some(fault.effect);
            }
        }
        self.list.retain(|fault| !fault.schedule.is_exhausted());
        effect
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_meets_the_commands_it_names_as_often_as_it_says() {
        let mut faults = Faults::default();
        faults.add(
            Fault::once(FaultMatch::IoOpcode(2), Effect::Lose)
                .after(1)
                .times(2),
        );
        faults.add(Fault::once(FaultMatch::Blocks(8..16), Effect::Hang));
        let (read, write) = (Sqe::read(1, 7, 2), Sqe::write(1, 7, 1));
        let met: Vec<_> = [read, write, read, read, read]
            .iter()
            .map(|sqe| faults.effect_on(1, sqe))
            .collect();
        let lose = Some(Effect::Lose);
        assert_eq!(met, [Some(Effect::Hang), None, lose, lose, None]);
        assert_eq!(faults.matched, 3);
        faults.add(Fault::once(FaultMatch::Admin(2), Effect::Fatal));
        assert_eq!(faults.effect_on(1, &read), None);
        assert_eq!(faults.effect_on(0, &read), Some(Effect::Fatal));
    }
}
