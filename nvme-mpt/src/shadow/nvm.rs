//! The NVM Command Set, whose commands are available for all namespaces of logical blocks.

use nvme_guest::address::log2_pages;
use nvme_guest::host::{
    CommandSetDescription, ControllerLimits, IdentifyNamespaceData, IoCommand, NamespaceContents,
    SparseStructure,
};
use nvme_spec::identify::{Csi, IdentifyControllerNvm};
use nvme_spec::opcode::NvmOpcode;
use nvme_spec::sqe::Sqe;
use zerocopy::FromZeros;

use super::UntranslatedCommand;
use super::command_set::CommandSet;
use super::translate::CommandTranslator;

/// Longest deallocation range advised to guests, in bytes. Longer ranges are executed in parts. Linux follows the advice since
/// 5.13. Without it, Linux would send ranges that take longer than its command timeout.
const ADVISED_RANGE_BYTES: u64 = 1 << 30;

/// The NVM Command Set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NvmCommands;

/// Properties of a namespace on which the description of its NVM Command Set depends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NvmFacts {
    /// Limits of the host controller.
    pub limits: ControllerLimits,
    /// Logical block size in bytes, as the exponent of a power of two.
    pub lba_shift: u8,
}

impl CommandSet for NvmCommands {
    type Facts = NvmFacts;

    const COMMANDS: &'static [IoCommand] = &[
        IoCommand::reading(NvmOpcode::FLUSH.0),
        IoCommand::writing(NvmOpcode::WRITE.0),
        IoCommand::reading(NvmOpcode::READ.0),
        IoCommand::writing(NvmOpcode::WRITE_UNCORRECTABLE.0),
        IoCommand::reading(NvmOpcode::COMPARE.0),
        IoCommand::writing(NvmOpcode::WRITE_ZEROES.0),
        IoCommand::writing(NvmOpcode::DATASET_MANAGEMENT.0),
        IoCommand::reading(NvmOpcode::VERIFY.0),
        IoCommand::writing(NvmOpcode::COPY.0),
    ];

    /// Describes the NVM Command Set. There is no protection information, so there are no storage tags and no extended
    /// formats, and Identify Namespace is all zero. Identify Controller has size limits (NVM 1.0, section 4.1.5.4).
    fn describe(facts: &NvmFacts) -> CommandSetDescription {
        let NvmFacts { limits, lba_shift } = facts;
        let size_limit = |opcode| match limits.supports(opcode) {
            true => log2_pages(limits.no_data_bytes_max),
            false => 0,
        };
        let mut id = IdentifyControllerNvm::new_zeroed();
        id.vsl = size_limit(NvmOpcode::VERIFY);
        id.wzsl = size_limit(NvmOpcode::WRITE_ZEROES);
        id.wusl = size_limit(NvmOpcode::WRITE_UNCORRECTABLE);
        if limits.supports(NvmOpcode::DATASET_MANAGEMENT) {
            // A command can have at most 256 ranges, so 256 is reported as 0, no limit.
            id.dmrl = u8::try_from(limits.dsm_ranges_max).unwrap_or(0);
            id.dmrsl = u32::try_from(ADVISED_RANGE_BYTES >> lba_shift).unwrap_or(u32::MAX);
        }
        let offered = Self::COMMANDS.iter().copied();
        CommandSetDescription {
            csi: Csi::NVM,
            contents: NamespaceContents::BLOCKS,
            commands: offered
                .filter(|command| limits.supports(NvmOpcode(command.opcode)))
                .collect(),
            namespace: IdentifyNamespaceData::default(),
            controller: SparseStructure::from_structure(&id),
            change_list: None,
            // The local back end saves the limits as promises.
            promises: Vec::new(),
        }
    }

    #[inline(always)]
    fn translate(
        translator: &mut CommandTranslator,
        guest: &Sqe,
        slot: u16,
        host: &mut Sqe,
    ) -> Result<u32, UntranslatedCommand> {
        translator.translate(guest, slot, host)
    }

    /// Every command is repeatable except Copy, which may have changed its own source.
    fn is_repeatable(guest: &Sqe) -> bool {
        NvmOpcode(guest.opcode()) != NvmOpcode::COPY
    }
}

#[cfg(test)]
mod tests {
    use nvme_spec::identify::Oncs;
    use zerocopy::FromBytes;

    use super::*;
    use crate::drive::HostController;
    use crate::drive::idle_controller::IdleController;

    /// Returns the limit of a deallocated range in bytes that guests see. `dsm_range_bytes_max` is the drive's own limit.
    fn reported_range_limit(dsm_range_bytes_max: u64, lba_shift: u8) -> u64 {
        let limits = ControllerLimits {
            commands: Oncs(0).with_dsm(true),
            dsm_range_bytes_max,
            ..*IdleController::new().limits()
        };
        let set = NvmCommands::describe(&NvmFacts { limits, lba_shift });
        let bytes = set.controller.to_bytes(size_of::<IdentifyControllerNvm>());
        let id = IdentifyControllerNvm::read_from_bytes(&bytes).expect("its size");
        u64::from(id.dmrsl) << lba_shift
    }

    #[test]
    fn guests_are_advised_the_same_range_whatever_the_drive_takes_at_once() {
        for lba_shift in [9, 12] {
            for own in [1 << 20, 1 << 40, u64::MAX] {
                assert_eq!(reported_range_limit(own, lba_shift), ADVISED_RANGE_BYTES);
            }
        }
    }
}
