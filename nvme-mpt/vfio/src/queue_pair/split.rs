//! Split commands: children that each execute a part of their parent.
//!
//! A command is split if it transfers more than the drive accepts in one command, or if a light user's command would have to
//! wait too long for it ([`governor`](super::governor)). The size of a child is decided at dispatch: a number of whole *grains*
//! of the parent. Write Zeroes, which transfers no data, is split only because of light users. A drive that accepts the longest
//! command of a guest gets each command whole. Guests of such a drive may use SGLs and rely on the drive's atomic write units,
//! which may exceed a block.
//!
//! No data is copied. A child uses the PRP entries of its parent. The list that translation made for the parent stays in the
//! slot's own memory until the parent completes. This list never chains to another list, because 1 MiB takes at most 256
//! entries, which are half a page. A PRP list may start at any entry (Base 2.0, section 4.1.1).

use nvme_guest::adaptive::WINDOW_MAX;
use nvme_guest::address::PAGE_SIZE;
use nvme_mpt::host::{HostCompletion, HostMemory};
use nvme_mpt_memory::RawWords;
use nvme_spec::nvm::{CopyCommand, CopyRange0, DatasetManagement, DsmRange, ReadWrite};
use nvme_spec::opcode::NvmOpcode;
use nvme_spec::sqe::{Psdt, Sqe};
use nvme_spec::status::Status;

/// Maximum data bytes of a guest's command: the MDTS that guests see.
pub(super) const PARENT_BYTES_MAX: u64 = 1 << 20;

/// Maximum size of a command that goes to the drive without a split.
#[derive(Clone, Copy, Debug)]
pub(super) struct UnsplitLimit {
    bytes: u64,
    lba_shift: u8,
    /// Maximum number of blocks, zero-based like NLB.
    nlb_z: u16,
}

impl UnsplitLimit {
    /// Creates the limit of `bytes` bytes, for blocks of `1 << lba_shift` bytes.
    pub(super) fn new(bytes: u64, lba_shift: u8) -> Self {
        let blocks = (bytes >> lba_shift).clamp(1, 1 << 16);
        Self {
            bytes,
            lba_shift,
            nlb_z: (blocks - 1) as u16,
        }
    }

    /// Returns the limit in bytes.
    pub(super) fn bytes(self) -> u64 {
        self.bytes
    }

    /// Returns the number of bytes that a Read, Write or Compare transfers; 0 for all other commands.
    #[inline]
    pub(super) fn data_len(&self, sqe: &Sqe) -> u64 {
        match NvmOpcode(sqe.opcode()) {
            NvmOpcode::READ | NvmOpcode::WRITE | NvmOpcode::COMPARE => {
                // All three have NLB in the same place (NVM 1.0, section 3.2).
                (u64::from(sqe.cdw12 & 0xFFFF) + 1) << self.lba_shift
            }
            _ => 0,
        }
    }

    /// Returns the number of bytes of a command that can be divided among children: its data. If light users must be able to
    /// interrupt the command (`interruptible`), the blocks of Write Zeroes count too.
    #[inline]
    pub(super) fn divisible_len(&self, sqe: &Sqe, interruptible: bool) -> u64 {
        match NvmOpcode(sqe.opcode()) {
            NvmOpcode::WRITE_ZEROES if interruptible => {
                (u64::from(sqe.cdw12 & 0xFFFF) + 1) << self.lba_shift
            }
            _ => self.data_len(sqe),
        }
    }

    /// Returns the number of bytes that a command reads, writes or deallocates, for the accounting of shares. A command without
    /// data counts as at most [`WINDOW_MAX`] bytes. So a guest that deallocates a whole lease waits no longer afterwards than
    /// after a transfer of [`WINDOW_MAX`] bytes.
    #[inline]
    pub(super) fn touched_bytes(&self, sqe: &Sqe, memory: HostMemory<'_>) -> u64 {
        match self.data_len(sqe) {
            0 => self.touched_without_data(sqe, memory).min(WINDOW_MAX),
            len => len,
        }
    }

    #[cold]
    fn touched_without_data(&self, sqe: &Sqe, memory: HostMemory<'_>) -> u64 {
        let blocks = match NvmOpcode(sqe.opcode()) {
            NvmOpcode::WRITE_ZEROES | NvmOpcode::VERIFY | NvmOpcode::WRITE_UNCORRECTABLE => {
                u64::from(sqe.cdw12 & 0xFFFF) + 1
            }
            NvmOpcode::DATASET_MANAGEMENT => {
                let command = DatasetManagement::from(sqe);
                let count = if command.ad {
                    usize::from(command.nr_z) + 1
                } else {
                    0
                };
                sum_range_blocks(sqe, memory, count, size_of::<DsmRange>(), |words, at| {
                    words.read(at) >> 32
                })
            }
            NvmOpcode::COPY => {
                let count = usize::from(CopyCommand::from(sqe).nr_z) + 1;
                sum_range_blocks(sqe, memory, count, size_of::<CopyRange0>(), |words, at| {
                    (words.read(at + 2) & 0xFFFF) + 1
                })
            }
            _ => 0,
        };
        blocks << self.lba_shift
    }

    /// Returns whether the drive accepts a command as a whole.
    #[inline]
    pub(super) fn is_whole(&self, sqe: &Sqe) -> bool {
        // The first comparison is a fast path: in commands without NLB, the low half of dword 12 rarely exceeds the limit.
        sqe.cdw12 as u16 <= self.nlb_z || self.data_len(sqe) <= self.bytes
    }
}

/// Sums the blocks of a command's ranges, which lie in the list of the command's slot. `blocks` reads the number of blocks of
/// the range at a word index.
fn sum_range_blocks(
    sqe: &Sqe,
    memory: HostMemory<'_>,
    count: usize,
    size: usize,
    blocks: impl Fn(&RawWords<'_>, usize) -> u64,
) -> u64 {
    let list = memory.lists.resolve(sqe.dptr[0], count * size);
    let Some(words) = list.and_then(|list| list.words()) else {
        return 0;
    };
    (0..count)
        .map(|range| blocks(&words, range * size / size_of::<u64>()))
        .sum()
}

/// Minimum grain in bytes, the unit in which a command is split. It is two pages, so that a longer command has a PRP list.
pub(super) const GRAIN: u64 = 2 * PAGE_SIZE;

/// Progress of a split command.
#[derive(Clone, Copy, Debug, Default)]
struct SplitProgress {
    /// Length of the command's grains in bytes. Each child has a number of whole grains.
    grain: u32,
    grains: u16,
    /// Number of grains that have gone to the drive in children.
    dispatched: u16,
    /// Number of children in flight.
    in_flight: u16,
    /// First grain and status of the failed child with the lowest LBA; `None` if no child has failed.
    failure: Option<(u16, Status)>,
}

impl SplitProgress {
    fn new(grain: u64, grains: u64) -> Result<Self, Status> {
        Ok(Self {
            grain: grain as u32,
            grains: u16::try_from(grains).map_err(|_| Status::INTERNAL_ERROR)?,
            ..Self::default()
        })
    }
}

/// Returns whether a split command transfers data.
fn has_data(sqe: &Sqe) -> bool {
    NvmOpcode(sqe.opcode()) != NvmOpcode::WRITE_ZEROES
}

/// Progress of a user's split commands, by slot.
#[derive(Debug)]
pub(super) struct SplitCommands {
    /// Maximum bytes of a child, a multiple of the page size.
    child_bytes: u64,
    lba_shift: u8,
    progress: Box<[SplitProgress]>,
    /// Data Pointers of children that consist of one grain: [`GRAINS_MAX`] per slot. Pages of this table are allocated when a
    /// command first uses them.
    pointers: Box<[[u64; 2]]>,
}

/// Maximum number of grains that a command is split into.
const GRAINS_MAX: usize = (PARENT_BYTES_MAX / GRAIN) as usize;

impl SplitCommands {
    /// Allocates the state for `slots` commands, on a drive that accepts `child_bytes` in one command: at least two pages, as
    /// MDTS is at least 1 (Base 2.0, Figure 275).
    pub(super) fn new(slots: u16, child_bytes: u64, lba_shift: u8) -> Self {
        let slots = usize::from(slots);
        Self {
            child_bytes: (child_bytes & !(PAGE_SIZE - 1)).clamp(GRAIN, PARENT_BYTES_MAX),
            lba_shift,
            progress: vec![SplitProgress::default(); slots].into_boxed_slice(),
            pointers: vec![[0; 2]; slots * GRAINS_MAX].into_boxed_slice(),
        }
    }

    /// Returns the grain of a command of `len` bytes that must be split. A command must be split if it exceeds the drive's
    /// limit, or if light commands have to be able to interrupt it (`interruptible`). Returns `None` for other commands.
    #[inline]
    pub(super) fn grain(&self, len: u64, interruptible: bool) -> Option<u64> {
        let grain = if interruptible {
            GRAIN
        } else {
            self.child_bytes
        };
        (len > grain).then_some(grain)
    }

    /// Prepares the split of a command of `len` bytes, which must be more than `grain`. Reads everything that the children need
    /// from the command's PRP list.
    pub(super) fn prepare(
        &mut self,
        sqe: &Sqe,
        len: u64,
        grain: u64,
        memory: HostMemory<'_>,
    ) -> Result<(), Status> {
        let slot = usize::from(sqe.cid().0);
        let grains = len.div_ceil(grain);
        if !has_data(sqe) {
            self.progress[slot] = SplitProgress::new(grain, grains)?;
            return Ok(());
        }
        // SGLs are not offered on a drive that needs split commands.
        if sqe.cdw0.psdt() != Psdt::PRP || len > PARENT_BYTES_MAX {
            return Err(Status::INTERNAL_ERROR);
        }
        let [prp1, list] = sqe.dptr;
        let offset = prp1 % PAGE_SIZE;
        // The command has more than two pages, as its length exceeds a grain of at least two pages. So PRP2 points to a list.
        let entries = (offset + len).div_ceil(PAGE_SIZE) as usize - 1;
        let words = memory
            .lists
            .resolve(list, 8 * entries)
            .and_then(|list| list.words())
            .ok_or(Status::INTERNAL_ERROR)?;
        let pointers = self
            .pointers
            .get_mut(slot * GRAINS_MAX..)
            .and_then(|pointers| pointers.get_mut(..grains as usize))
            .ok_or(Status::INTERNAL_ERROR)?;
        let pages_per_grain = (grain / PAGE_SIZE) as usize;
        for (index, pointer) in pointers.iter_mut().enumerate() {
            // The parent's PRP1 is page 0, so entry 0 of the list is page 1.
            let page = index * pages_per_grain;
            let first = match page {
                0 => prp1,
                page => words.read(page - 1) + offset,
            };
            let bytes = (len - index as u64 * grain).min(grain);
            let rest = bytes.saturating_sub(PAGE_SIZE - offset);
            let second = if rest == 0 {
                0
            } else if rest <= PAGE_SIZE {
                words.read(page)
            } else {
                list + 8 * page as u64
            };
            *pointer = [first, second];
        }
        self.progress[slot] = SplitProgress::new(grain, grains)?;
        Ok(())
    }

    /// Returns the number of bytes of the next child of a command of `len` bytes: at most `most`, but at least a grain.
    pub(super) fn next_len(&self, slot: u16, len: u64, most: u64) -> u64 {
        let progress = &self.progress[usize::from(slot)];
        let grain = u64::from(progress.grain);
        let most = most.clamp(grain, self.child_bytes);
        len.saturating_sub(u64::from(progress.dispatched) * grain)
            .min(most - most % grain)
    }

    /// Builds the next child of a command of `len` bytes. The child has [`Self::next_len`] bytes.
    pub(super) fn dispatch(&mut self, parent: &Sqe, len: u64, most: u64) -> SplitPart {
        let slot = usize::from(parent.cid().0);
        let child_len = self.next_len(parent.cid().0, len, most);
        let progress = &mut self.progress[slot];
        let first = progress.dispatched;
        let grain = u64::from(progress.grain);
        progress.dispatched += child_len.div_ceil(grain) as u16;
        progress.in_flight += 1;
        let bytes_before = u64::from(first) * grain;
        let blocks = child_len >> self.lba_shift;
        let mut sqe = *parent;
        sqe.set_cdw10_11(ReadWrite::from(parent).slba.0 + (bytes_before >> self.lba_shift));
        sqe.cdw12 = (parent.cdw12 & !0xFFFF) | (blocks as u32 - 1);
        if has_data(parent) {
            sqe.dptr = self.pointers[slot * GRAINS_MAX + usize::from(first)];
            if child_len > grain {
                // The child has more than two pages, so PRP2 points into the parent's list.
                sqe.dptr[1] = parent.dptr[1] + 8 * (bytes_before / PAGE_SIZE);
            }
        }
        SplitPart {
            sqe,
            first_grain: first,
            is_last: progress.dispatched == progress.grains,
        }
    }

    /// Stops the dispatch of further children. The command then ends with `status`, or with the failure of one of its children.
    /// Returns whether children are in flight.
    pub(super) fn cut_short(&mut self, slot: u16, status: Status) -> bool {
        let progress = &mut self.progress[usize::from(slot)];
        progress.grains = progress.dispatched;
        progress
            .failure
            .get_or_insert((progress.dispatched, status));
        progress.in_flight > 0
    }

    /// Records the completion of the child that begins with grain `child`. After a failure, the command gets no further
    /// children.
    pub(super) fn complete(&mut self, slot: u16, child: u16, status: Status) -> SplitPartOutcome {
        let progress = &mut self.progress[usize::from(slot)];
        progress.in_flight -= 1;
        let earlier = progress.failure.is_none_or(|(first, _)| child < first);
        if !status.is_success() && earlier {
            progress.failure = Some((child, status));
        }
        let cut_short = progress.failure.is_some() && progress.dispatched < progress.grains;
        if cut_short {
            progress.grains = progress.dispatched;
        }
        let is_done = progress.in_flight == 0 && progress.dispatched == progress.grains;
        let status = progress
            .failure
            .map_or(Status::SUCCESS, |(_, status)| status);
        SplitPartOutcome {
            is_cut_short: cut_short,
            completion: is_done.then_some(HostCompletion {
                slot,
                status,
                dw0: 0,
            }),
        }
    }
}

/// A child of a split command, which executes a part of its parent.
pub(super) struct SplitPart {
    pub(super) sqe: Sqe,
    /// Number of the first of the parent's grains that the child executes.
    pub(super) first_grain: u16,
    /// True if the child executes the parent's last grain.
    pub(super) is_last: bool,
}

/// State of a split command after a child has completed.
#[derive(Debug)]
pub(super) struct SplitPartOutcome {
    /// True if the remaining children of the command will not go to the drive, because a child has failed.
    pub(super) is_cut_short: bool,
    /// Completion of the whole command, if no child is left.
    pub(super) completion: Option<HostCompletion>,
}
