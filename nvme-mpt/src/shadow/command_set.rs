//! Command sets, as shadow queues treat their commands.
//!
//! A [`HostQueue`](crate::host::HostQueue) names its command set as a type, so a command is dispatched to it
//! when the program is compiled.

use super::Untranslated;
use super::translate::Translator;
use crate::host::{CommandSetDescription, HostQueue, IoCommand};
use crate::spec::opcode::NvmOpcode;
use crate::spec::sqe::Sqe;
use crate::spec::status::Status;

/// Data that a completed command moved, as the lease's figures have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Traffic {
    /// Bytes that the guest read.
    Read(u32),
    /// Bytes that the guest wrote.
    Written(u32),
    /// Neither.
    Other,
}

/// A guest's command that the host controller completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompletedCommand {
    /// Its opcode. Opcodes of other command sets are numbers alone.
    pub opcode: NvmOpcode,
    /// Dwords 10 and 11 as the guest has them; 0 in command sets without LBAs.
    pub slba: u64,
    /// Bytes of data that it could move.
    pub bytes: u32,
    /// Its status.
    pub status: Status,
    /// Dword 0 of the host's completion.
    pub dw0: u32,
}

/// A command set: its commands' way to the host controller, their results' way back, and its description for a guest.
pub trait CommandSet {
    /// Facts of a namespace on which its description depends.
    type Facts;

    /// I/O commands that a namespace of it can execute, beside those of the NVM Command Set if it has blocks.
    const COMMANDS: &'static [IoCommand];

    /// Describes a namespace to its guest.
    #[must_use]
    fn describe(facts: &Self::Facts) -> CommandSetDescription;

    /// Translates a command that will have this slot at the host controller, into `host`. After an error,
    /// `host` is no command. Returns the bytes of data in the VM's memory that the host controller can read or
    /// write. Ranges that are copied into the slot's own list are none.
    ///
    /// # Errors
    /// [`Untranslated`]: a command that does not reach the host controller, or not as one.
    fn translate(
        translator: &mut Translator,
        guest: &Sqe,
        slot: u16,
        host: &mut Sqe,
    ) -> Result<u32, Untranslated>;

    /// The LBA that a command begins with, where the error log has it.
    #[must_use]
    #[inline(always)]
    fn named_lba(guest: &Sqe) -> u64 {
        guest.cdw10_11()
    }

    /// Dwords 0 and 1 of the guest's completion.
    #[must_use]
    #[inline(always)]
    fn result(translator: &Translator, completed: &CompletedCommand) -> (u32, u32) {
        let _ = translator;
        (completed.dw0, 0)
    }

    /// Returns whether a guest's command may be carried out twice, as long as the guest has not seen it end.
    #[must_use]
    fn is_repeatable(guest: &Sqe) -> bool;

    /// Returns the data that a command moved.
    #[must_use]
    #[inline(always)]
    fn traffic(completed: &CompletedCommand) -> Traffic {
        match completed.opcode {
            NvmOpcode::WRITE => Traffic::Written(completed.bytes),
            NvmOpcode::READ => Traffic::Read(completed.bytes),
            _ => Traffic::Other,
        }
    }
}

/// A host queue for whose commands there is a way.
pub(crate) trait TranslatedQueue: HostQueue<Commands: CommandSet> {}

impl<Q: HostQueue<Commands: CommandSet>> TranslatedQueue for Q {}
