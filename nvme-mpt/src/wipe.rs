//! Wiping: erases data of other ids in a lease's range before a guest gets the range.
//!
//! A wipe uses Write Zeroes, with the Deallocate bit if the drive promises that deallocated blocks read as zeroes. In both
//! cases the blocks read as zeroes afterwards. Dataset Management is not used, because it is only a hint that a drive may
//! ignore. Each wipe is logged, because data is lost and the server starts later.
//!
//! The ledger marks each part as unwiped until the part is zeroed and flushed. So after a crash, the ledger still shows the
//! parts to wipe.
//!
//! Drives may have larger blocks than when the data was written, so the range may have only a part of its first or last block.
//! The whole block belongs to the lease, but its other bytes may be data that the lease keeps. Such a block is read, and
//! written with zeroes in the part.
//!
//! Blocks that are known to be zero, such as holes of a file, are skipped. The final flush makes these zeroes durable as well.
//!
//! A command that a reset of the drive or an Abort cancelled is submitted again, and the wipe continues.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use log::warn;
use nvme_guest::dma::RegionTable;
use nvme_guest::leaked::leak;
use nvme_lease::range::{BlockRange, ByteRange};
use nvme_lease::{Lease, LeaseError, LeaseExtents};
use nvme_mpt_memory::{MappingAccess, clock};
use nvme_spec::ids::{CommandId, Lba};
use nvme_spec::nvm::{ReadWrite, WriteZeroes};
use nvme_spec::opcode::NvmOpcode;
use nvme_spec::sqe::Sqe;
use nvme_spec::status::Status;
use zerocopy::IntoBytes;

use crate::drive::Drive;
use crate::drive::{HostLease, HostLeaseError};
use crate::host::ListMemory;
use crate::host::{HostCompletion, HostMemory};
use crate::shadow::HostQueuePair;

/// Maximum number of commands of a wipe in flight, enough for the drive to work in parallel.
const DEPTH: u16 = 8;

/// Maximum time without a completion, after which the wipe fails. It is counted in poll intervals, so that a suspension of the
/// machine does not count. The drive's own command timeout is shorter.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Maximum number of times that one command is submitted, because a reset or an Abort may cancel it. If the last attempt is
/// cancelled too, the wipe fails.
const ATTEMPTS: u32 = 5;

/// Pause before the drive is polled again, if a poll found no completion.
const POLL_INTERVAL: Duration = Duration::from_micros(50);

/// Progress of a wipe, in percent of its range, after which the next message is logged.
const PROGRESS_STEP_PERCENT: u64 = 10;

/// Error of a wipe. The range that was not wiped completely stays marked as unwiped in the ledger.
#[derive(Debug, thiserror::Error)]
pub enum WipeError {
    /// The drive has no Write Zeroes command.
    #[error(
        "Drive {drive} cannot be wiped from here: it has no Write Zeroes. Erase {range} by other means, then say \
         data=keep"
    )]
    Unsupported {
        /// Path of the drive.
        drive: String,
        /// Range to wipe.
        range: ByteRange,
    },
    /// A command failed.
    #[error(
        "Wiping {range} of drive {drive} failed at block {block} with status {status:?}: if it stays so, lease a range \
         without this block, or keep the former data with data=keep"
    )]
    Command {
        /// Path of the drive.
        drive: String,
        /// Range that was to be wiped.
        range: ByteRange,
        /// The command's first block.
        block: Lba,
        /// Status of the command.
        status: Status,
    },
    /// The drive completes no commands, or was removed.
    #[error("Wiping {range} of drive {drive} stopped: the drive completes no commands")]
    Stopped {
        /// Path of the drive.
        drive: String,
        /// Range that was to be wiped.
        range: ByteRange,
    },
    /// The wipe was stopped on request.
    #[error(
        "Wiping {range} of drive {drive} was stopped, as the server ends; it continues with the next start"
    )]
    Interrupted {
        /// Path of the drive.
        drive: String,
        /// Range that was to be wiped.
        range: ByteRange,
    },
    /// The drive's queues or its cache failed.
    #[error("Drive {drive} cannot be wiped")]
    Io {
        /// Path of the drive.
        drive: String,
        /// Error of the queue or of the flush.
        source: io::Error,
    },
    /// The host controller refused to open the lease.
    #[error("Range {range} of drive {drive} cannot be leased to be wiped")]
    Lease {
        /// Path of the drive.
        drive: String,
        /// Extents of the lease.
        range: LeaseExtents,
        /// Reason of the host controller.
        source: HostLeaseError,
    },
    /// The ledger cannot record that a range is wiped.
    #[error(transparent)]
    Ledger(#[from] LeaseError),
}

/// Numbers of bytes and of complete ranges that this process has wiped.
static WIPED: (AtomicU64, AtomicU64) = (AtomicU64::new(0), AtomicU64::new(0));

/// Numbers of bytes and of complete ranges that this process has wiped since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WipeStats {
    /// Wiped bytes, including those of ranges that are not wiped completely.
    pub bytes: u64,
    /// Ranges that are wiped completely.
    pub parts: u64,
}

/// Returns the numbers of bytes and of complete ranges that this process has wiped.
#[must_use]
pub fn wipe_stats() -> WipeStats {
    let (bytes, parts) = &WIPED;
    WipeStats {
        bytes: bytes.load(Ordering::Relaxed),
        parts: parts.load(Ordering::Relaxed),
    }
}

/// Erases all [unwiped](Lease::unwiped) ranges of a lease, and logs the progress.
///
/// After `stop` is set, no more commands are submitted.
///
/// # Errors
/// See [`WipeError`]; unwiped ranges stay marked in the ledger.
pub fn wipe(drive: &Arc<Drive>, lease: &Lease, stop: &AtomicBool) -> Result<(), WipeError> {
    if lease.unwiped().is_empty() {
        return Ok(());
    }
    let host = drive
        .open_lease(lease.id(), &lease.blocks(), None)
        .map_err(|source| WipeError::Lease {
            drive: drive.path().to_string(),
            range: lease.extents(),
            source,
        })?;
    wipe_open_lease(drive, lease, host.as_ref(), stop)
}

/// Wipes like [`wipe`], by a lease that is already open at the host controller.
pub(crate) fn wipe_open_lease(
    drive: &Arc<Drive>,
    lease: &Lease,
    host: &dyn HostLease,
    stop: &AtomicBool,
) -> Result<(), WipeError> {
    let Some(first) = lease.unwiped().first().copied() else {
        return Ok(());
    };
    let name = drive.path().to_string();
    let failed = |source| WipeError::Io {
        drive: name.clone(),
        source,
    };
    if !drive.limits().supports(NvmOpcode::WRITE_ZEROES) {
        return Err(WipeError::Unsupported {
            drive: name,
            range: first,
        });
    }
    while let Some(range) = lease.unwiped().first().copied() {
        warn!(
            lease = lease.id();
            "Lease {}: {range} of {name}, with another lease's data, is being wiped",
            lease.id()
        );
        for part in block_parts(range, drive.lba_shift()) {
            let eraser = BlockPartWipe::new(drive, host, range).map_err(failed)?;
            eraser.run(&part, stop)?;
        }
        let mut eraser = RangeWipe::new(drive, host, range).map_err(failed)?;
        eraser.run(stop)?;
        drop(eraser);
        // Only this part is reported as wiped. All other parts of the lease keep their content, such as written zones.
        host.on_wiped(&range);
        host.flush().map_err(failed)?;
        lease.mark_wiped()?;
        WIPED.1.fetch_add(1, Ordering::Relaxed);
        warn!(lease = lease.id(); "Lease {}: {range} of {name} is wiped", lease.id());
    }
    Ok(())
}

/// Part of a block.
#[derive(Clone, Debug, PartialEq, Eq)]
struct BlockPart {
    block: Lba,
    /// Offsets of the part's bytes in the block.
    bytes: Range<usize>,
}

/// Returns the parts of blocks at the start and the end of a range, for blocks of `1 << shift` bytes. Blocks that lie in the
/// range are not among them.
fn block_parts(range: ByteRange, shift: u8) -> impl Iterator<Item = BlockPart> {
    let (first, last) = (range.start() >> shift, (range.end() - 1) >> shift);
    let last = (last != first).then_some(last);
    [Some(first), last]
        .into_iter()
        .flatten()
        .filter_map(move |block| {
            let start = block << shift;
            let within = |at: u64| at.saturating_sub(start).min(1 << shift) as usize;
            let bytes = within(range.start())..within(range.end());
            let block = Lba(block);
            (bytes.len() < 1 << shift).then_some(BlockPart { block, bytes })
        })
}

/// Waits for completions and appends them to `done`. Returns whether there are any: the drive may have failed, or may complete
/// no commands.
fn wait_for_completions(
    queue: &mut HostQueuePair,
    memory: HostMemory<'_>,
    done: &mut Vec<HostCompletion>,
) -> bool {
    let mut pauses = 0;
    loop {
        queue.reap_into(memory, done);
        if !done.is_empty() {
            return true;
        }
        if queue.is_gone() || queue.has_failed() || POLL_INTERVAL * pauses > TIMEOUT {
            return false;
        }
        pauses += 1;
        clock::sleep(POLL_INTERVAL);
    }
}

/// Wipe of a part of a block, whose other bytes stay. Nothing else writes to the block meanwhile, because it belongs to the
/// lease, and no guest uses these blocks of the lease yet.
struct BlockPartWipe<'a> {
    drive: &'a Arc<Drive>,
    /// Range of which the part is the start or the end.
    range: ByteRange,
    queue: HostQueuePair,
    /// Memory of the block's data.
    buffer: ListMemory,
}

impl<'a> BlockPartWipe<'a> {
    fn new(drive: &'a Arc<Drive>, host: &'a dyn HostLease, range: ByteRange) -> io::Result<Self> {
        let space = drive.controller().iova_space();
        Ok(Self {
            drive,
            range,
            queue: host.create_wiping_queue(1)?,
            buffer: ListMemory::with_access(space, 1, MappingAccess::ReadWrite)?,
        })
    }

    fn run(mut self, part: &BlockPart, stop: &AtomicBool) -> Result<(), WipeError> {
        if stop.load(Ordering::Relaxed) {
            return Err(WipeError::Interrupted {
                drive: self.drive.path().to_string(),
                range: self.range,
            });
        }
        let result = self.zero_part(part);
        if !self.queue.drain() {
            // The drive may still access the data of a command that it has not completed.
            leak(self.buffer);
        }
        result
    }

    fn zero_part(&mut self, part: &BlockPart) -> Result<(), WipeError> {
        self.transfer_block(NvmOpcode::READ, part.block)?;
        let (block, _) = self.buffer.slot_list(0);
        block.as_mut_bytes()[part.bytes.clone()].fill(0);
        self.transfer_block(NvmOpcode::WRITE, part.block)?;
        let bytes = part.bytes.len() as u64;
        WIPED.0.fetch_add(bytes, Ordering::Relaxed);
        Ok(())
    }

    /// Reads the block into the buffer, or writes it from there.
    fn transfer_block(&mut self, opcode: NvmOpcode, block: Lba) -> Result<(), WipeError> {
        let mut sqe = Sqe::new(opcode.0);
        sqe.cdw0 = sqe.cdw0.with_cid(CommandId(0));
        sqe.nsid = self.drive.namespace().nsid;
        // A block has 4,096 bytes at most, so it lies in one memory page.
        sqe.dptr = [self.buffer.slot_iova(0).bits(), 0];
        ReadWrite {
            slba: block,
            ..ReadWrite::default()
        }
        .write_to(&mut sqe);
        let memory = HostMemory {
            table: &RegionTable::default(),
            lists: &self.buffer,
        };
        let mut status = Status::COMMAND_INTERRUPTED;
        for _ in 0..ATTEMPTS {
            self.queue.submit_batch(&[sqe], memory);
            let mut done = Vec::with_capacity(1);
            if !wait_for_completions(&mut self.queue, memory, &mut done) {
                return Err(WipeError::Stopped {
                    drive: self.drive.path().to_string(),
                    range: self.range,
                });
            }
            status = done.first().map_or(status, |completion| completion.status);
            if status != Status::COMMAND_INTERRUPTED {
                break;
            }
        }
        if status.is_success() {
            return Ok(());
        }
        Err(WipeError::Command {
            drive: self.drive.path().to_string(),
            range: self.range,
            block,
            status,
        })
    }
}

/// Wipe of the whole blocks of one range of a drive, in progress.
struct RangeWipe<'a> {
    drive: &'a Arc<Drive>,
    host: &'a dyn HostLease,
    range: ByteRange,
    queue: HostQueuePair,
    lists: ListMemory,
    table: RegionTable,
    /// Next block to wipe, and the first block that does not lie in the range.
    next_block: u64,
    end_block: u64,
    /// Maximum number of blocks of one command.
    blocks_max: u64,
    /// Commands in flight, by slot.
    inflight: [Option<WipeCommand>; DEPTH as usize],
    /// Commands to submit again after a reset or an Abort.
    retries: Vec<WipeCommand>,
    /// True once the drive was flushed for this wipe. The flush precedes the first skipped block, because some file systems
    /// report data that is not written back yet as a hole.
    is_flushed: bool,
}

/// Write Zeroes command of a wipe. It ends after `RangeWipe::blocks_max` blocks, or at the end of the range.
#[derive(Clone, Copy, Debug)]
struct WipeCommand {
    /// First block of the command.
    block: Lba,
    /// Number of attempts that a reset or an Abort has cancelled.
    failed_attempts: u32,
}

impl<'a> RangeWipe<'a> {
    fn new(drive: &'a Arc<Drive>, host: &'a dyn HostLease, range: ByteRange) -> io::Result<Self> {
        let controller = drive.controller();
        let shift = drive.lba_shift();
        let most = (drive.limits().no_data_bytes_max >> shift).clamp(1, 1 << 16);
        let next_block = range.start().div_ceil(1 << shift);
        Ok(Self {
            drive,
            host,
            range,
            queue: host.create_wiping_queue(DEPTH)?,
            lists: ListMemory::new(controller.iova_space(), DEPTH.into())?,
            table: RegionTable::default(),
            next_block,
            end_block: next_block.max(range.end() >> shift),
            blocks_max: most,
            inflight: [None; DEPTH as usize],
            retries: Vec::with_capacity(DEPTH.into()),
            is_flushed: false,
        })
    }

    fn run(&mut self, stop: &AtomicBool) -> Result<(), WipeError> {
        let first = self.next_block;
        let all = self.end_block - first;
        let mut reported_percent = 0;
        let mut done = Vec::with_capacity(DEPTH.into());
        loop {
            let stopped = stop.load(Ordering::Relaxed);
            if !stopped {
                self.submit()?;
            }
            if self.inflight.iter().all(Option::is_none) {
                let is_left = self.next_block < self.end_block || !self.retries.is_empty();
                return match stopped && is_left {
                    true => Err(WipeError::Interrupted {
                        drive: self.drive.path().to_string(),
                        range: self.range,
                    }),
                    false => Ok(()),
                };
            }
            done.clear();
            let memory = HostMemory {
                table: &self.table,
                lists: &self.lists,
            };
            if !wait_for_completions(&mut self.queue, memory, &mut done) {
                return Err(WipeError::Stopped {
                    drive: self.drive.path().to_string(),
                    range: self.range,
                });
            }
            for completion in &done {
                self.complete(completion)?;
            }
            let percent = (self.next_block - first) * 100 / all;
            if percent >= reported_percent + PROGRESS_STEP_PERCENT && percent < 100 {
                reported_percent = percent;
                warn!(
                    "{percent} % of {} of {} is wiped",
                    self.range,
                    self.drive.path()
                );
            }
        }
    }

    /// Returns the next command: one to submit again, or else one for the blocks after those that are zero already. Returns
    /// `None` if all blocks of the range are submitted or skipped.
    fn next_command(&mut self) -> Result<Option<WipeCommand>, WipeError> {
        if let Some(piece) = self.retries.pop() {
            return Ok(Some(piece));
        }
        self.skip_zeroes()?;
        if self.next_block == self.end_block {
            return Ok(None);
        }
        let block = Lba(self.next_block);
        self.next_block += (self.end_block - self.next_block).min(self.blocks_max);
        Ok(Some(WipeCommand {
            block,
            failed_attempts: 0,
        }))
    }

    /// Skips the blocks before the next one to wipe that are known to be zero already, and counts them as wiped.
    fn skip_zeroes(&mut self) -> Result<(), WipeError> {
        let mut zeroes = self.leading_zeroes();
        // A flush first: some file systems report data that is not written back yet as a hole.
        if zeroes > 0 && !self.is_flushed {
            self.host.flush().map_err(|source| WipeError::Io {
                drive: self.drive.path().to_string(),
                source,
            })?;
            self.is_flushed = true;
            zeroes = self.leading_zeroes();
        }
        self.next_block += zeroes;
        WIPED
            .0
            .fetch_add(zeroes << self.drive.lba_shift(), Ordering::Relaxed);
        Ok(())
    }

    /// Returns the number of blocks from `next_block` on that are known to be zero.
    fn leading_zeroes(&self) -> u64 {
        let blocks = self.end_block - self.next_block;
        if blocks == 0 {
            return 0;
        }
        let start = Lba(self.next_block);
        let part = BlockRange { start, blocks };
        self.host.leading_zeroes(part).min(blocks)
    }

    fn submit(&mut self) -> Result<(), WipeError> {
        let mut commands = Vec::with_capacity(DEPTH.into());
        for slot in 0..DEPTH {
            if self.inflight[usize::from(slot)].is_some() {
                continue;
            }
            let Some(piece) = self.next_command()? else {
                break;
            };
            let blocks = (self.end_block - piece.block.0).min(self.blocks_max);
            let mut sqe = Sqe::new(NvmOpcode::WRITE_ZEROES.0);
            sqe.cdw0 = sqe.cdw0.with_cid(CommandId(slot));
            sqe.nsid = self.drive.namespace().nsid;
            WriteZeroes {
                slba: piece.block,
                // At most 65,536 blocks.
                nlb_z: (blocks - 1) as u16,
                deac: self.drive.limits().deallocated_reads_zeroes,
                ..WriteZeroes::default()
            }
            .write_to(&mut sqe);
            commands.push(sqe);
            self.inflight[usize::from(slot)] = Some(piece);
        }
        if !commands.is_empty() {
            let memory = HostMemory {
                table: &self.table,
                lists: &self.lists,
            };
            self.queue.submit_batch(&commands, memory);
        }
        Ok(())
    }

    fn complete(&mut self, completion: &HostCompletion) -> Result<(), WipeError> {
        let flying = self.inflight.get_mut(usize::from(completion.slot));
        let Some(piece) = flying.and_then(Option::take) else {
            return Ok(());
        };
        let WipeCommand {
            block,
            failed_attempts: failed,
        } = piece;
        if completion.status == Status::COMMAND_INTERRUPTED && failed + 1 < ATTEMPTS {
            self.retries.push(WipeCommand {
                block,
                failed_attempts: failed + 1,
            });
            return Ok(());
        }
        if completion.status != Status::SUCCESS {
            return Err(WipeError::Command {
                drive: self.drive.path().to_string(),
                range: self.range,
                block,
                status: completion.status,
            });
        }
        let blocks = (self.end_block - block.0).min(self.blocks_max);
        WIPED
            .0
            .fetch_add(blocks << self.drive.lba_shift(), Ordering::Relaxed);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_parts_of_blocks_are_read_and_written() {
        let parts = |start, length, shift| {
            let range = ByteRange::new(start, length).unwrap();
            let parts = block_parts(range, shift);
            parts
                .map(|part| (part.block.0, part.bytes))
                .collect::<Vec<_>>()
        };
        assert_eq!(parts(512, 512, 9), []);
        assert_eq!(parts(4096, 4096, 12), []);
        assert_eq!(parts(8192, 4608, 12), [(3, 0..512)]);
        assert_eq!(parts(4608, 7680, 12), [(1, 512..4096)]);
        assert_eq!(parts(4608, 512, 12), [(1, 512..1024)]);
        assert_eq!(parts(3584, 1024, 12), [(0, 3584..4096), (1, 0..512)]);
        assert_eq!(
            parts(u64::MAX - 511, 511, 12),
            [(u64::MAX >> 12, 3584..4095)]
        );
    }
}
