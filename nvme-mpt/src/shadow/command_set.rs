//! Command sets, as implemented for shadow queues.
//!
//! A [`HostQueue`](crate::host::HostQueue) names its command set as a type, so that commands are dispatched at compile time.

use nvme_guest::host::{CommandSetDescription, IoCommand};
use nvme_spec::opcode::NvmOpcode;
use nvme_spec::sqe::Sqe;
use nvme_spec::status::Status;

use super::UntranslatedCommand;
use super::translate::CommandTranslator;
use crate::host::HostQueue;

/// Data moved by a completed command, for the statistics of the lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandTraffic {
    /// Bytes read by the guest.
    Read(u32),
    /// Bytes written by the guest.
    Written(u32),
    /// Neither read nor written.
    Other,
}

/// Guest command that the host controller has completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompletedCommand {
    /// Opcode of the command. The names of [`NvmOpcode`] apply to the NVM Command Set only.
    pub opcode: NvmOpcode,
    /// Dwords 10 and 11 of the guest's command, which are its first LBA; 0 in command sets without LBAs.
    pub slba: u64,
    /// Maximum number of data bytes that the command could move.
    pub bytes: u32,
    /// Completion status.
    pub status: Status,
    /// Dword 0 of the host's completion.
    pub dw0: u32,
}

/// A command set: translation of its commands and results, and its description for a guest.
pub trait CommandSet {
    /// Properties of a namespace that [`Self::describe`] needs.
    type Facts;

    /// I/O commands that belong to the command set alone. A namespace with logical blocks also has the commands of the NVM
    /// Command Set.
    const COMMANDS: &'static [IoCommand];

    /// Returns the description of a namespace for its guest.
    #[must_use]
    fn describe(facts: &Self::Facts) -> CommandSetDescription;

    /// Translates a command for `slot` of the host controller into `host`. After an error, `host` is not a valid command.
    /// Returns the number of bytes in the VM's memory that the host controller reads or writes. Ranges do not count, because
    /// they are copied to the slot's list.
    ///
    /// # Errors
    /// [`UntranslatedCommand`] if the command does not reach the host controller as a single command.
    fn translate(
        translator: &mut CommandTranslator,
        guest: &Sqe,
        slot: u16,
        host: &mut Sqe,
    ) -> Result<u32, UntranslatedCommand>;

    /// Returns the first LBA of a command, for an entry of the error log.
    #[must_use]
    #[inline(always)]
    fn error_log_lba(guest: &Sqe) -> u64 {
        guest.cdw10_11()
    }

    /// Returns dwords 0 and 1 of the guest's completion.
    #[must_use]
    #[inline(always)]
    fn completion_dwords(
        translator: &CommandTranslator,
        completed: &CompletedCommand,
    ) -> (u32, u32) {
        let _ = translator;
        (completed.dw0, 0)
    }

    /// Returns whether a command may be executed twice if the guest has not seen its completion, as after a reset of the drive.
    #[must_use]
    fn is_repeatable(guest: &Sqe) -> bool;

    /// Returns the number of bytes that a completed command has read or written, for the statistics.
    #[must_use]
    #[inline(always)]
    fn traffic(completed: &CompletedCommand) -> CommandTraffic {
        match completed.opcode {
            NvmOpcode::WRITE => CommandTraffic::Written(completed.bytes),
            NvmOpcode::READ => CommandTraffic::Read(completed.bytes),
            _ => CommandTraffic::Other,
        }
    }
}

/// Host queue whose command set a shadow queue can translate.
pub(crate) trait TranslatedQueue: HostQueue<Commands: CommandSet> {}

impl<Q: HostQueue<Commands: CommandSet>> TranslatedQueue for Q {}
