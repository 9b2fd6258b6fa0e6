//! Faults of the drive, as data: their commands, their occasions, and their effects. Occasions are those of software
//! drives' fault plans.

use std::time::Duration;

use nvme_software::faults::FaultSchedule;

use crate::admin::feature;
use crate::command::{Sqe, admin};
use crate::status::StatusCode;

/// QPRIO of the class Medium.
const MEDIUM: u32 = 2;

/// Commands that a [`Fault`] meets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Meets {
    /// I/O commands.
    Io,
    /// I/O commands of an opcode.
    IoOpcode(u8),
    /// I/O commands with a block, by SLBA and NLB, in a range.
    Blocks(std::ops::Range<u64>),
    /// Admin commands of an opcode.
    Admin(u8),
    /// Set Features of weights (Arbitration); `true` for unequal ones alone.
    Weights(bool),
    /// Create I/O Submission Queue of another class than Medium (QPRIO).
    QueueClass,
}

impl Meets {
    fn meets(&self, queue: u16, sqe: &Sqe) -> bool {
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
                Self::Admin(admin::SET_FEATURES).meets(queue, sqe)
                    && is_arbitration
                    && !(*unequal && is_equal)
            }
            Self::QueueClass => {
                let priority = sqe.cdw(11) >> 1 & 0b11;
                Self::Admin(admin::CREATE_SQ).meets(queue, sqe) && priority != MEDIUM
            }
        }
    }
}

/// Fate of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// It is never completed, unless it is aborted. Its data still moves when the controller is reset.
    Lose,
    /// As [`Self::Lose`], until [`ModelDrive::let_go`](super::ModelDrive::let_go).
    Hold,
    /// It takes this much longer.
    Delay(Duration),
    /// It is not executed, and completes as if it had been.
    Skip,
    /// It is not executed, and completes with this status; with Do Not Retry, or without.
    Fail(StatusCode, bool),
    /// The controller reports a fatal status (CSTS.CFS) and does nothing more until it is reset.
    Fatal,
    /// The controller takes and completes nothing more until it is reset, and reports nothing.
    Hang,
    /// The drive is gone from the bus.
    Vanish,
    /// It is completed, and a moment later completed again.
    CompleteTwice,
    /// It is completed, and completed again once the drive has taken so many more commands of its queue, at least one.
    CompleteAgain(u16),
    /// A command that was not sent is completed, too.
    CompleteUnknown,
    /// A completion queue entry of arbitrary bytes, with the phase that is due, comes before its own.
    Garbage,
}

/// Something that goes wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Commands that it meets.
    pub meets: Meets,
    /// Which of them.
    pub occasions: FaultSchedule,
    /// Their fate.
    pub effect: Effect,
}

impl Fault {
    /// The next such command.
    pub fn once(meets: Meets, effect: Effect) -> Self {
        Self {
            meets,
            occasions: FaultSchedule::new(0, Some(1)),
            effect,
        }
    }

    /// Sets the number of such commands that go well first.
    #[must_use]
    pub fn after(mut self, commands: u64) -> Self {
        self.occasions.after = commands;
        self
    }

    /// Sets the number of such commands.
    #[must_use]
    pub fn times(mut self, commands: u64) -> Self {
        self.occasions.count = Some(commands);
        self
    }
}

/// The drive's reaction to Abort.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Aborts {
    /// It aborts the command.
    #[default]
    Work,
    /// It reports that it did not abort the command.
    Fail,
    /// It never completes the Abort.
    Hang,
    /// It keeps the Abort, and looks at it once its reaction is another one.
    Hold,
}

/// The drive's reaction to being enabled and disabled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Resets {
    /// It follows.
    #[default]
    Work,
    /// It never becomes ready again; a function level reset helps.
    NeverReady,
    /// It never becomes ready again, whatever is done.
    Broken,
}

/// All that goes wrong.
#[derive(Debug, Default)]
pub(super) struct Faults {
    list: Vec<Fault>,
    pub(super) aborts: Aborts,
    pub(super) resets: Resets,
    /// Number of commands that met a fault.
    pub(super) met: u64,
}

impl Faults {
    pub(super) fn add(&mut self, fault: Fault) {
        self.list.push(fault);
    }

    pub(super) fn clear(&mut self) {
        self.list.clear();
    }

    /// Returns the fate of a command that the drive has just taken.
    pub(super) fn meet(&mut self, queue: u16, sqe: &Sqe) -> Option<Effect> {
        let mut effect = None;
        for fault in &mut self.list {
            if !fault.meets.meets(queue, sqe) {
                continue;
            }
            if fault.occasions.come(|| effect.is_none()) {
                self.met += 1;
                effect = Some(fault.effect);
            }
        }
        self.list.retain(|fault| !fault.occasions.are_over());
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
            Fault::once(Meets::IoOpcode(2), Effect::Lose)
                .after(1)
                .times(2),
        );
        faults.add(Fault::once(Meets::Blocks(8..16), Effect::Hang));
        let (read, write) = (Sqe::read(1, 7, 2), Sqe::write(1, 7, 1));
        let met: Vec<_> = [read, write, read, read, read]
            .iter()
            .map(|sqe| faults.meet(1, sqe))
            .collect();
        let lose = Some(Effect::Lose);
        assert_eq!(met, [Some(Effect::Hang), None, lose, lose, None]);
        assert_eq!(faults.met, 3);
        faults.add(Fault::once(Meets::Admin(2), Effect::Fatal));
        assert_eq!(faults.meet(1, &read), None);
        assert_eq!(faults.meet(0, &read), Some(Effect::Fatal));
    }
}
