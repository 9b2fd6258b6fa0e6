//! The blocks that a command reads or writes.

use std::ops::Range;

use nvme_mpt::host::{HostMemory, range_descriptor};
use nvme_spec::ids::Lba;
use nvme_spec::nvm::{CopyCommand, CopyRange0, DatasetManagement, DsmRange, ReadWrite};
use nvme_spec::opcode::NvmOpcode;
use nvme_spec::sqe::Sqe;
use nvme_spec::status::Status;

/// An extent of blocks that a command reads or writes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TouchedBlocks {
    pub(super) blocks: Range<u64>,
    /// Status of the command if these blocks have a media error.
    pub(super) media_error: Status,
}

fn touched_blocks(Lba(start): Lba, count: u64, media_error: Status) -> TouchedBlocks {
    TouchedBlocks {
        blocks: start..start.saturating_add(count),
        media_error,
    }
}

/// Returns whether `wanted` returns `true` for an extent of a command.
pub(super) fn has_extent(
    sqe: &Sqe,
    memory: HostMemory<'_>,
    mut wanted: impl FnMut(&TouchedBlocks) -> bool,
) -> bool {
    find_extent(sqe, memory, |extent| wanted(extent).then_some(())).is_some()
}

/// Calls `answer` for each extent of a command, and returns the first result that is not `None`. A command's list of ranges was
/// checked when the command was translated. If the list cannot be read, no extent is found, and the backing store fails the
/// command.
pub(super) fn find_extent<T>(
    sqe: &Sqe,
    memory: HostMemory<'_>,
    mut answer: impl FnMut(&TouchedBlocks) -> Option<T>,
) -> Option<T> {
    let read = Status::UNRECOVERED_READ_ERROR;
    let written = Status::WRITE_FAULT;
    match NvmOpcode(sqe.opcode()) {
        // All these commands have the starting block and the number of blocks in the same dwords.
        opcode @ (NvmOpcode::READ
        | NvmOpcode::COMPARE
        | NvmOpcode::VERIFY
        | NvmOpcode::WRITE
        | NvmOpcode::WRITE_ZEROES
        | NvmOpcode::WRITE_UNCORRECTABLE) => {
            let ReadWrite { slba, nlb_z, .. } = ReadWrite::from(sqe);
            let status = match opcode {
                NvmOpcode::READ | NvmOpcode::COMPARE | NvmOpcode::VERIFY => read,
                _ => written,
            };
            answer(&touched_blocks(slba, u64::from(nlb_z) + 1, status))
        }
        NvmOpcode::DATASET_MANAGEMENT => {
            let DatasetManagement { nr_z, .. } = DatasetManagement::from(sqe);
            (0..=usize::from(nr_z)).find_map(|index| {
                let DsmRange { slba, nlb, .. } = range_descriptor(sqe, memory, index).ok()?;
                answer(&touched_blocks(slba, nlb.into(), written))
            })
        }
        NvmOpcode::COPY => {
            let CopyCommand { sdlba, nr_z, .. } = CopyCommand::from(sqe);
            let mut copied = 0;
            let source = (0..=usize::from(nr_z)).find_map(|index| {
                let CopyRange0 { slba, nlb_z, .. } = range_descriptor(sqe, memory, index).ok()?;
                let blocks = u64::from(nlb_z) + 1;
                copied += blocks;
                answer(&touched_blocks(slba, blocks, read))
            });
            source.or_else(|| answer(&touched_blocks(sdlba, copied, written)))
        }
        _ => None,
    }
}
