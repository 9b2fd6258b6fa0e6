//! The NVM Command Set.

use nvme_mpt::{
    Limits,
    spec::{
        identify::{Csi, IdentifyControllerNvm, IdentifyNamespaceNvm, IoCommandSetVector},
        opcode::NvmOpcode,
        status::Status,
    },
};
use zerocopy::FromZeros;

use super::{CommandSet, IoCommand};
use crate::admin::subject::{Subject, bytes, in_pages, saturating_u32};

/// Commands, and whether they change the content of logical blocks.
const COMMANDS: [(NvmOpcode, bool); 9] = [
    (NvmOpcode::FLUSH, false),
    (NvmOpcode::WRITE, true),
    (NvmOpcode::READ, false),
    (NvmOpcode::WRITE_UNCORRECTABLE, true),
    (NvmOpcode::COMPARE, false),
    (NvmOpcode::WRITE_ZEROES, true),
    (NvmOpcode::DATASET_MANAGEMENT, true),
    (NvmOpcode::VERIFY, false),
    (NvmOpcode::COPY, true),
];

#[derive(Clone, Copy, Debug)]
pub(super) struct Nvm;

impl CommandSet for Nvm {
    fn csi(&self) -> Csi {
        Csi::NVM
    }

    fn is_basic(&self) -> bool {
        true
    }

    fn combine(&self, vector: IoCommandSetVector) -> IoCommandSetVector {
        vector.with_nvm(true)
    }

    fn capacity(&self, blocks: u64) -> Option<u64> {
        Some(blocks)
    }

    /// No protection information, hence no storage tags and no extended formats.
    fn namespace(&self, csi: Csi, _: &Subject<'_>) -> Result<Vec<u8>, Status> {
        match csi {
            Csi::NVM => Ok(bytes(IdentifyNamespaceNvm::new_zeroed())),
            _ => Err(Status::INVALID_FIELD),
        }
    }

    /// NVM 1.0, section 4.1.5.4.
    fn controller(&self, subject: &Subject<'_>) -> Vec<u8> {
        let limits = subject.limits;
        let size_limit = |opcode| match limits.offers(opcode) {
            true => in_pages(limits.no_data_bytes_max),
            false => 0,
        };
        let mut id = IdentifyControllerNvm::new_zeroed();
        id.vsl = size_limit(NvmOpcode::VERIFY);
        id.wzsl = size_limit(NvmOpcode::WRITE_ZEROES);
        id.wusl = size_limit(NvmOpcode::WRITE_UNCORRECTABLE);
        if limits.offers(NvmOpcode::DATASET_MANAGEMENT) {
            // 256 ranges are what a command can have: no limit.
            id.dmrl = u8::try_from(limits.dsm_ranges_max).unwrap_or(0);
            id.dmrsl = saturating_u32(subject.in_blocks(limits.dsm_range_bytes_max));
        }
        bytes(id)
    }

    fn commands(&self, limits: &Limits) -> Vec<IoCommand> {
        let offered = COMMANDS
            .into_iter()
            .filter(|(opcode, _)| limits.offers(*opcode));
        let commands = offered.map(|(opcode, changes_content)| IoCommand {
            opcode: opcode.0,
            changes_content,
        });
        commands.collect()
    }
}
