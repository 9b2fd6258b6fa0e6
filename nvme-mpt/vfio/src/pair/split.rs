//! Commands that go to the drive in parts: their children.
//!
//! A command is split because it transfers more than the drive takes at once. Or it is split because a
//! light member's command would wait too long for one that large ([`governor`](super::governor)). How
//! large a child is, is decided when it is dispatched: some whole *grains* of its parent. Write Zeroes, which transfers
//! nothing, is split for the second reason alone. A drive that
//! takes all that a guest may transfer gets commands whole: its guests are promised its atomic writes,
//! which may be longer than a block, and use SGLs.
//!
//! No data is copied. A child's PRP entries are its parent's. The list that translation made for
//! the parent lies in memory of the slot's own until the parent completes. It has no entry that
//! points to another list (1 MiB takes 256 entries at most, half a page). A PRP list may start at
//! any entry (Base 2.0, section 4.1.1).

use nvme_mpt::address::PAGE_SIZE;
use nvme_mpt::host::{HostCompletion, HostMemory};
use nvme_mpt::learn::WINDOW_MAX;
use nvme_mpt::memory::RawWords;
use nvme_mpt::spec::nvm::{CopyCommand, CopyRange0, DatasetManagement, DsmRange, ReadWrite};
use nvme_mpt::spec::opcode::NvmOpcode;
use nvme_mpt::spec::sqe::{Psdt, Sqe};
use nvme_mpt::spec::status::Status;

/// Most bytes of a guest's command (MDTS of a guest controller).
pub(super) const PARENT_BYTES_MAX: u64 = 1 << 20;

/// Limit up to which the drive takes a member's commands whole.
#[derive(Clone, Copy, Debug)]
pub(super) struct UnsplitLimit {
    bytes: u64,
    lba_shift: u8,
    /// The most blocks that the drive takes at once, zero-based as NLB is.
    nlb_z: u16,
}

impl UnsplitLimit {
    /// Of a drive that takes so many bytes at once.
    pub(super) fn new(bytes: u64, lba_shift: u8) -> Self {
        let blocks = (bytes >> lba_shift).clamp(1, 1 << 16);
        Self {
            bytes,
            lba_shift,
            nlb_z: (blocks - 1) as u16,
        }
    }

    /// Bytes of data that a command transfers from or to the guest's memory, as far as they can be
    /// more than one page; 0 for other commands.
    #[inline]
    pub(super) fn data_len(&self, sqe: &Sqe) -> u64 {
        match NvmOpcode(sqe.opcode()) {
            NvmOpcode::READ | NvmOpcode::WRITE | NvmOpcode::COMPARE => {
                // The three have NLB in the same place (NVM 1.0, section 3.2).
                (u64::from(sqe.cdw12 & 0xFFFF) + 1) << self.lba_shift
            }
            _ => 0,
        }
    }

    /// Bytes by which a command can be split: those of [`Self::data_len`], and of zeroes if it is to be `interruptible`.
    #[inline]
    pub(super) fn divisible_len(&self, sqe: &Sqe, interruptible: bool) -> u64 {
        match NvmOpcode(sqe.opcode()) {
            NvmOpcode::WRITE_ZEROES if interruptible => {
                (u64::from(sqe.cdw12 & 0xFFFF) + 1) << self.lba_shift
            }
            _ => self.data_len(sqe),
        }
    }

    /// Bytes of the drive that a command reads, writes or deallocates, as they count for the shares of tenants. A command
    /// without data counts [`WINDOW_MAX`] at most: a guest that deallocates a whole lease then waits no longer than after
    /// that many bytes of data.
    #[inline]
    pub(super) fn touched(&self, sqe: &Sqe, memory: HostMemory<'_>) -> u64 {
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
                ranges(sqe, memory, count, size_of::<DsmRange>(), |words, at| {
                    words.read(at) >> 32
                })
            }
            NvmOpcode::COPY => {
                let count = usize::from(CopyCommand::from(sqe).nr_z) + 1;
                ranges(sqe, memory, count, size_of::<CopyRange0>(), |words, at| {
                    (words.read(at + 2) & 0xFFFF) + 1
                })
            }
            _ => 0,
        };
        blocks << self.lba_shift
    }

    /// Returns whether the drive takes a command at once.
    #[inline]
    pub(super) fn is_whole(&self, sqe: &Sqe) -> bool {
        // Commands whose dword 12 is something else are rarely that large there.
        sqe.cdw12 as u16 <= self.nlb_z || self.data_len(sqe) <= self.bytes
    }
}

/// Adds up the blocks of a command's ranges, which lie in its slot's own list. `blocks` reads those of the range at a word.
fn ranges(
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

/// The smallest grain: two pages, so that a command of more than one has a PRP list.
pub(super) const GRAIN: u64 = 2 * PAGE_SIZE;

/// Progress of a command that was split.
#[derive(Clone, Copy, Debug, Default)]
struct SplitProgress {
    /// Bytes of a grain.
    grain: u32,
    grains: u16,
    /// Grains that the drive has had.
    dispatched: u16,
    /// Children.
    in_flight: u16,
    /// The first child, in the order of LBAs, that failed, and how.
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

/// Returns whether a command that is split has data in the guest's memory.
fn has_data(sqe: &Sqe) -> bool {
    NvmOpcode(sqe.opcode()) != NvmOpcode::WRITE_ZEROES
}

/// A member's commands that were split, by slot.
#[derive(Debug)]
pub(super) struct SplitCommands {
    /// Most bytes of a child, a multiple of the page size.
    child_bytes: u64,
    lba_shift: u8,
    progress: Box<[SplitProgress]>,
    /// Data Pointers of children that are one grain: [`GRAINS_MAX`] per slot. Pointers that no command has needed yet
    /// lie in untouched memory.
    pointers: Box<[[u64; 2]]>,
}

/// Most grains of a command.
const GRAINS_MAX: usize = (PARENT_BYTES_MAX / GRAIN) as usize;

impl SplitCommands {
    /// Room for `slots` commands of which the drive takes `child_bytes` at once: two pages at least,
    /// as MDTS is at least 1 (Base 2.0, Figure 275).
    pub(super) fn new(slots: u16, child_bytes: u64, lba_shift: u8) -> Self {
        let slots = usize::from(slots);
        Self {
            child_bytes: (child_bytes & !(PAGE_SIZE - 1)).clamp(GRAIN, PARENT_BYTES_MAX),
            lba_shift,
            progress: vec![SplitProgress::default(); slots].into_boxed_slice(),
            pointers: vec![[0; 2]; slots * GRAINS_MAX].into_boxed_slice(),
        }
    }

    /// The grain of a command that is to be split: it transfers more than the drive takes at once, or
    /// is to be `interruptible` by light members' commands.
    #[inline]
    pub(super) fn grain(&self, len: u64, interruptible: bool) -> Option<u64> {
        let grain = if interruptible {
            GRAIN
        } else {
            self.child_bytes
        };
        (len > grain).then_some(grain)
    }

    /// Prepares a command that transfers or zeroes `len` bytes, more than `grain`, for children of whole
    /// ones: all that must be known of the parent's PRP list is read now.
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
        // SGLs are not offered on such a drive.
        if sqe.cdw0.psdt() != Psdt::PRP || len > PARENT_BYTES_MAX {
            return Err(Status::INTERNAL_ERROR);
        }
        let [prp1, list] = sqe.dptr;
        let offset = prp1 % PAGE_SIZE;
        // More than two pages, as a grain has two at least: PRP2 points to a list.
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
            // Its first page is as many pages after its parent's; entry 0 is that of page 1.
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

    /// Bytes of the child that is dispatched next, of a parent that transfers `len` bytes, where more
    /// than `most` are not wanted: a grain at least.
    pub(super) fn next_len(&self, slot: u16, len: u64, most: u64) -> u64 {
        let progress = &self.progress[usize::from(slot)];
        let grain = u64::from(progress.grain);
        let most = most.clamp(grain, self.child_bytes);
        len.saturating_sub(u64::from(progress.dispatched) * grain)
            .min(most - most % grain)
    }

    /// Takes the next child of a command of `len` bytes. Its length is [`Self::next_len`].
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
                // More than two pages: the rest of its parent's list.
                sqe.dptr[1] = parent.dptr[1] + 8 * (bytes_before / PAGE_SIZE);
            }
        }
        SplitPart {
            sqe,
            first_grain: first,
            is_last: progress.dispatched == progress.grains,
        }
    }

    /// Has no further child of a command dispatched, which ends with this status unless a child fails.
    /// Returns whether the drive has children of it.
    pub(super) fn cut_short(&mut self, slot: u16, status: Status) -> bool {
        let progress = &mut self.progress[usize::from(slot)];
        progress.grains = progress.dispatched;
        progress
            .failure
            .get_or_insert((progress.dispatched, status));
        progress.in_flight > 0
    }

    /// The child that begins with grain `child` has completed. After a failure no more are
    /// dispatched.
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
            cut_short,
            completion: is_done.then_some(HostCompletion {
                slot,
                status,
                dw0: 0,
            }),
        }
    }
}

/// A command to the drive that does a part of its parent.
pub(super) struct SplitPart {
    pub(super) sqe: Sqe,
    /// Number of the parent's grain that it begins with.
    pub(super) first_grain: u16,
    /// The parent has no further child.
    pub(super) is_last: bool,
}

/// Fate of a parent when a child has completed.
#[derive(Debug)]
pub(super) struct SplitPartOutcome {
    /// Its other children are not dispatched any more.
    pub(super) cut_short: bool,
    /// It has completed.
    pub(super) completion: Option<HostCompletion>,
}
