//! State of a command in progress on a file drive.

use std::sync::Arc;

use super::SharedFile;
use super::bounce_buffers::{BounceBuffer, BounceBufferSize};
use super::change_claims::BlockChangeClaim;
use super::extent_survey::ExtentSurvey;
use super::io_mode::{FileIoMode, TransferBuffer, UNIT};
use super::queue_syncs::SyncNumber;
use super::uring::IoVectors;
use crate::uncorrectable::UncorrectableMarkChange;
use nvme_mpt::host::DataPointer;
use nvme_mpt::host::HostMemory;
use nvme_mpt_memory::RawBytes;
use nvme_mpt_memory::clock::Ticks;
use nvme_spec::ids::Lba;
use nvme_spec::nvm::{CompareVerify, CopyCommand, ReadWrite, WriteZeroes};
use nvme_spec::opcode::NvmOpcode;
use nvme_spec::sqe::Sqe;
use nvme_spec::status::Status;

/// Next step of a command. Steps that make a request to the kernel end with its completion.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum FileCommandStep {
    /// Complete the command.
    #[default]
    Done,
    /// Wait until a change may begin, because other changes of its blocks exclude it; see
    /// [`change_claims`](super::change_claims).
    AwaitClaim,
    /// Read the next block of which the write changes only a part; without one, prepare the write.
    Fill,
    /// Read, or continue a partly completed read.
    Read,
    /// Copy the read data from the bounce buffer to the guest.
    Scatter,
    /// Write, or continue a partly completed write.
    Write,
    /// Wait for a sync of the file that covers the command; see [`queue_syncs`](super::queue_syncs).
    Flush,
    /// Sync the file.
    Sync,
    /// Sync the companion file, if the drive has one.
    SyncCompanion,
    /// Zero the next part of a range.
    Zero,
    /// Wait for the survey of the range's allocated extents; see [`extent_survey`](super::extent_survey).
    AwaitSurvey,
    /// Wait until the queue may process a slice of the file; see [`slice_scheduler`](super::slice_scheduler).
    AwaitTurn,
    /// Make the file system zero or deallocate a slice.
    ZeroSlice,
    /// Compare the read data with the guest's data.
    Compare,
    /// Read the next source range of a Copy, or write the data read from it.
    CopyRange,
    /// Deallocate the next range.
    DeallocateRange,
    /// Clear the uncorrectable marks of blocks that were written, once their data is durable.
    ClearMarks,
    /// Wait until the ledger has stored a change of uncorrectable marks.
    AwaitMarks,
}

impl FileCommandStep {
    /// Returns whether the step is a sync of the file or of the companion file.
    pub(super) fn is_sync(self) -> bool {
        matches!(self, Self::Sync | Self::SyncCompanion)
    }
}

/// Method by which a range is zeroed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum ZeroingMethod {
    /// The file system zeroes the range and keeps it allocated.
    #[default]
    ZeroRange,
    /// The file system deallocates the range.
    PunchHole,
    /// The queue writes zeroes with ordinary write requests.
    WriteZeroes,
}

/// Progress of a range that is zeroed or deallocated.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RangeZeroing {
    pub(super) start: u64,
    /// Offset in the file of the first byte that is not processed yet.
    pub(super) offset: u64,
    pub(super) end: u64,
    /// True if some bytes before `offset` could not be deallocated, and so keep their data. The command succeeds, because a
    /// deallocation is advice.
    pub(super) has_skipped_data: bool,
    pub(super) method: ZeroingMethod,
    /// Step that follows when all bytes of the range are processed.
    pub(super) next_step: FileCommandStep,
    /// Length in bytes of the present slice, the piece of the range that the file system processes now.
    pub(super) slice_bytes: u64,
    /// Weight of the present slice, which limits its duration; see [`extent_survey`](super::extent_survey). Without a survey,
    /// this is the length of the slice.
    pub(super) slice_weight: u64,
    /// True if the next slices are chosen without a survey, because none was answered in time, or none can be requested.
    pub(super) is_unsurveyed: bool,
    /// True if this command has the turn, the permission to process one slice of the file.
    pub(super) has_turn: bool,
    /// Time at which the file system began the present slice.
    pub(super) slice_start: Ticks,
}

/// A command in progress on a file drive.
#[derive(Debug, Default)]
pub(super) struct FileCommand {
    pub(super) sqe: Sqe,
    pub(super) next_step: FileCommandStep,
    /// Step that follows when all bytes are transferred.
    pub(super) after_transfer: FileCommandStep,
    /// Step that follows when the read data was copied from the bounce buffer to the guest.
    pub(super) after_scatter: FileCommandStep,
    /// Offset in the file of the next byte to transfer.
    pub(super) offset: u64,
    /// Offset in the file of the command's data.
    pub(super) data_offset: u64,
    /// Memory of the command's data, without the parts that are already transferred.
    pub(super) vectors: IoVectors,
    /// Start and end of the bytes of the file that the bounce buffer holds; `None` if the transfer uses no bounce buffer.
    pub(super) staged: Option<(u64, u64)>,
    /// Part of the bounce buffer that the present request transfers.
    pub(super) stage: IoVectors,
    /// Start and end of each range of the file that must be read first, because the write may change its blocks only in part.
    pub(super) fills: [Option<(u64, u64)>; 2],
    pub(super) bounce: Option<BounceBuffer>,
    pub(super) claim: BlockChangeClaim,
    /// Step that follows when the claimed change may begin.
    pub(super) after_claim: FileCommandStep,
    pub(super) zeroing: RangeZeroing,
    /// Survey of the next bytes of the range, and the time at which it was requested.
    pub(super) survey: Option<(Arc<ExtentSurvey>, Ticks)>,
    /// Time from which on the command does not wait for its turn any more; see [`slice_scheduler`](super::slice_scheduler).
    pub(super) turn_deadline: Ticks,
    /// Blocks whose uncorrectable marks must be cleared: the first one, and their number.
    pub(super) blocks_to_unmark: (u64, u64),
    /// Change of uncorrectable marks that the ledger must store before the command continues.
    pub(super) mark_change: Option<UncorrectableMarkChange>,
    /// Steps that follow a sync of the file, and a change of uncorrectable marks.
    pub(super) after_sync: FileCommandStep,
    pub(super) after_marks: FileCommandStep,
    /// Number of the first sync whose success makes the command's data durable.
    pub(super) needed_sync: SyncNumber,
    /// Number of the sync that the command performs; `None` if the command waits for a sync that another command performs.
    pub(super) led_sync: Option<SyncNumber>,
    /// Number of the command's ranges that were processed, and the number of their bytes.
    pub(super) processed_ranges: usize,
    pub(super) processed_bytes: usize,
    /// True if a request of this command is pending in the kernel.
    pub(super) is_requested: bool,
    /// Value of the queue's counter of age checks when the request was made first. If the kernel returns a request undone, it
    /// is repeated, and this value stays.
    pub(super) requested_at_check: u32,
    /// True if the pending request is overdue, and its cancellation was requested.
    pub(super) is_overdue: bool,
    /// Number of times that a request of the command was repeated because it was overdue.
    pub(super) repeat_count: u8,
}

impl FileCommand {
    /// Resets the state for a new command in this slot.
    pub(super) fn reset(&mut self, sqe: &Sqe) {
        self.sqe = *sqe;
        self.vectors.clear();
        self.staged = None;
        self.fills = [None; 2];
        self.survey = None;
        (self.processed_ranges, self.processed_bytes) = (0, 0);
        (self.is_requested, self.is_overdue, self.repeat_count) = (false, false, 0);
        self.mark_change = None;
        (self.after_sync, self.after_marks) = (FileCommandStep::Done, FileCommandStep::Done);
    }

    /// Returns the memory of the present transfer: that of the bounce buffer, or the guest's.
    #[inline]
    pub(super) fn transfer_vectors(&self) -> &IoVectors {
        match self.staged {
            Some(_) => &self.stage,
            None => &self.vectors,
        }
    }

    #[inline]
    pub(super) fn transfer_vectors_mut(&mut self) -> &mut IoVectors {
        match self.staged {
            Some(_) => &mut self.stage,
            None => &mut self.vectors,
        }
    }

    /// Selects `len` bytes of the bounce buffer's data area, from an offset on, as the memory of the command's data.
    pub(super) fn use_data(&mut self, offset: usize, len: usize) -> Result<(), Status> {
        let bytes = self
            .bounce
            .as_ref()
            .and_then(|bounce| bounce.data(offset, len));
        self.vectors.push(bytes.ok_or(Status::INTERNAL_ERROR)?);
        Ok(())
    }

    /// Selects the part of the bounce buffer that holds the bytes `start..end` of the file for the next transfer.
    pub(super) fn use_stage(&mut self, start: u64, end: u64) -> Result<(), Status> {
        let (base, _) = self.staged.ok_or(Status::INTERNAL_ERROR)?;
        let bytes = self
            .bounce
            .as_ref()
            .and_then(|bounce| bounce.stage((start - base) as usize, (end - start) as usize));
        self.stage.clear();
        self.stage.push(bytes.ok_or(Status::INTERNAL_ERROR)?);
        self.offset = start;
        Ok(())
    }

    /// Returns the part of the bounce buffer's stage that holds the command's data.
    pub(super) fn staged_data(&self) -> Result<RawBytes<'_>, Status> {
        let (base, _) = self.staged.ok_or(Status::INTERNAL_ERROR)?;
        let at = (self.data_offset - base) as usize;
        self.bounce
            .as_ref()
            .and_then(|bounce| bounce.stage(at, self.vectors.len()))
            .ok_or(Status::INTERNAL_ERROR)
    }

    /// Prepares the write of `len` bytes: whether the bounce buffer is used, and which blocks must be read first.
    pub(super) fn stage_write(&mut self, plan: TransferBuffer, len: u64) {
        let TransferBuffer::Staged { start, end } = plan else {
            self.staged = None;
            return;
        };
        self.staged = Some((start, end));
        let head = start != self.data_offset;
        let tail = end != self.data_offset + len;
        // The last block of a file may be short.
        let last = (end - 1) - (end - 1) % UNIT;
        self.fills = match (head, tail) {
            (false, false) => [None; 2],
            _ if end - start <= 2 * UNIT => [Some((start, end)), None],
            (head, tail) => [
                head.then_some((start, start + UNIT)),
                tail.then_some((last, end)),
            ],
        };
    }

    /// Returns whether a successful command promises that its data is durable: Flush, and writes with FUA. Write, Write Zeroes
    /// and Copy have FUA in the same dword.
    pub(super) fn needs_durability(&self) -> bool {
        match NvmOpcode(self.sqe.opcode()) {
            NvmOpcode::FLUSH => true,
            NvmOpcode::WRITE | NvmOpcode::WRITE_ZEROES | NvmOpcode::COPY => {
                ReadWrite::from(&self.sqe).fua
            }
            _ => false,
        }
    }

    /// Returns the size of the bounce buffer that a command needs to start; `None` if it needs no bounce buffer.
    pub(super) fn needed_bounce_buffer(
        &self,
        file: &SharedFile,
        plan: TransferBuffer,
    ) -> Option<BounceBufferSize> {
        match NvmOpcode(self.sqe.opcode()) {
            NvmOpcode::COMPARE | NvmOpcode::VERIFY | NvmOpcode::COPY => {
                Some(BounceBufferSize::Large)
            }
            // A range may have a partial block at each end.
            NvmOpcode::WRITE_ZEROES => {
                let WriteZeroes { slba, nlb_z, .. } = WriteZeroes::from(&self.sqe);
                let ends = (slba.0 | (u64::from(nlb_z) + 1)) << file.lba_shift;
                (file.io_mode != FileIoMode::Cached && !ends.is_multiple_of(UNIT))
                    .then_some(BounceBufferSize::Small)
            }
            NvmOpcode::DATASET_MANAGEMENT => {
                (file.io_mode != FileIoMode::Cached).then_some(BounceBufferSize::Small)
            }
            _ => match plan {
                TransferBuffer::InPlace => None,
                TransferBuffer::Staged { start, end } => {
                    Some(BounceBufferSize::from_stage_bytes((end - start) as usize))
                }
            },
        }
    }

    /// Returns whether the command has to make further requests to the kernel.
    pub(super) fn has_more_requests(&self) -> bool {
        match self.next_step {
            FileCommandStep::Done | FileCommandStep::Compare | FileCommandStep::Scatter => false,
            FileCommandStep::Zero => self.zeroing.offset < self.zeroing.end,
            _ => true,
        }
    }

    /// Returns the offset in the file at which the bytes of the next request end. For a slice, returns the end of the whole
    /// range.
    pub(super) fn request_end(&self) -> u64 {
        match self.next_step {
            FileCommandStep::Read | FileCommandStep::Fill | FileCommandStep::Write => {
                self.offset + self.transfer_vectors().len() as u64
            }
            FileCommandStep::ZeroSlice => self.zeroing.end,
            _ => 0,
        }
    }

    /// Returns whether the data that was read equals the guest's data.
    pub(super) fn is_data_equal(
        &self,
        lba_shift: u8,
        memory: HostMemory<'_>,
    ) -> Result<bool, Status> {
        let bounce = self.bounce.as_ref().ok_or(Status::INTERNAL_ERROR)?;
        let (mut done, mut equal) = (0, true);
        let len = (u64::from(CompareVerify::from(&self.sqe).nlb_z) + 1) << lba_shift;
        DataPointer::from_sqe(&self.sqe).for_each_piece(memory, len, |part: RawBytes<'_>| {
            equal &= bounce
                .data(done, part.len())
                .is_some_and(|read| read.equals(part));
            done += part.len();
        })?;
        Ok(equal)
    }

    /// Returns the first block and the number of blocks that the command has written; `None` if it writes no blocks.
    fn written_blocks(&self, file: &SharedFile) -> Option<(Lba, u64)> {
        match NvmOpcode(self.sqe.opcode()) {
            NvmOpcode::WRITE | NvmOpcode::WRITE_ZEROES => {
                let ReadWrite { slba, nlb_z, .. } = ReadWrite::from(&self.sqe);
                Some((slba, u64::from(nlb_z) + 1))
            }
            NvmOpcode::COPY => {
                let CopyCommand { sdlba, .. } = CopyCommand::from(&self.sqe);
                Some((sdlba, self.processed_bytes as u64 >> file.lba_shift))
            }
            _ => None,
        }
    }

    /// Makes the command clear the uncorrectable marks of the blocks that it has written, before it completes. Returns whether
    /// there are such marks.
    #[cold]
    pub(super) fn clear_written_marks(&mut self, file: &SharedFile) -> bool {
        self.written_blocks(file)
            .is_some_and(|(Lba(start), count)| {
                self.clear_marks(file, (start, count), FileCommandStep::Done)
            })
    }

    /// Makes the command clear the uncorrectable marks of blocks, and then continue with `then`. Returns whether there are such
    /// marks. The data becomes durable before the marks are cleared. So after a power failure, a readable block never has data
    /// from before its mark.
    pub(super) fn clear_marks(
        &mut self,
        file: &SharedFile,
        blocks: (u64, u64),
        then: FileCommandStep,
    ) -> bool {
        let has_marks = file.uncorrectable.needs_clear(blocks.0, blocks.1);
        if has_marks {
            self.blocks_to_unmark = blocks;
            (self.after_sync, self.after_marks) = (FileCommandStep::ClearMarks, then);
            self.next_step = FileCommandStep::Sync;
        }
        has_marks
    }

    /// Returns whether the command is a deallocation. This is advice (NVM 1.0, section 3.2.3.1): if a range cannot be
    /// deallocated, it keeps its data and the command succeeds.
    pub(super) fn is_advice(&self) -> bool {
        NvmOpcode(self.sqe.opcode()) == NvmOpcode::DATASET_MANAGEMENT
    }

    /// Returns whether a survey of the next bytes of the range must precede the next slice.
    pub(super) fn needs_survey(&mut self) -> bool {
        let RangeZeroing {
            offset: at,
            method: means,
            is_unsurveyed: is_blind,
            ..
        } = self.zeroing;
        if means != ZeroingMethod::PunchHole || is_blind {
            return false;
        }
        let known = self
            .survey
            .as_ref()
            .and_then(|(survey, _)| survey.extents());
        let reaches = known.is_some_and(|extents| extents.is_covered(at));
        if !reaches {
            self.survey = None;
        }
        !reaches
    }

    /// Returns the step that follows the zeroes of a command that writes them itself.
    pub(super) fn step_after_zeroes(&self) -> FileCommandStep {
        if WriteZeroes::from(&self.sqe).fua {
            FileCommandStep::Sync
        } else {
            FileCommandStep::Done
        }
    }
}

/// Converts an error of the kernel in a step of a command into a status for the guest.
pub(super) fn status_from_errno(errno: i32, step: FileCommandStep) -> Status {
    match errno {
        // A hole could not be filled: the storage is full, or reaches a limit of the user or of the process (RLIMIT_FSIZE).
        libc::ENOSPC | libc::EDQUOT | libc::EFBIG => Status::CAPACITY_EXCEEDED,
        libc::EFAULT => Status::DATA_TRANSFER_ERROR,
        libc::ENOMEM | libc::EAGAIN | libc::EINTR | libc::ECANCELED => Status::INTERNAL_ERROR,
        // This includes reads of a Copy.
        _ if step == FileCommandStep::Read => Status::UNRECOVERED_READ_ERROR,
        _ => Status::WRITE_FAULT,
    }
}

/// Returns whether a deallocation failed without changing the range, because the file system cannot deallocate, or cannot at
/// present.
pub(super) fn is_harmless_errno(errno: i32) -> bool {
    matches!(
        errno,
        libc::EOPNOTSUPP
            | libc::ENOSYS
            | libc::EINVAL
            | libc::EPERM
            | libc::EACCES
            | libc::EBUSY
            | libc::ETXTBSY
            | libc::EFBIG
            | libc::ENOSPC
            | libc::EDQUOT
            | libc::ENOMEM
    )
}
