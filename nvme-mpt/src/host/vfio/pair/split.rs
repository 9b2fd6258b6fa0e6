//! Commands that transfer more than the drive takes at once: their children.
//!
//! No data is copied. A child's PRP entries are its parent's: the list that translation made for
//! the parent lies in memory of the slot's own until the parent completes, it has no entry that
//! points to another list (1 MiB takes 256 entries at most, half a page), and a PRP list may start
//! at any entry (Base 2.0, section 4.1.1).

use crate::address::PAGE_SIZE;
use crate::host::{HostCompletion, HostMemory};
use crate::spec::nvm::ReadWrite;
use crate::spec::opcode::NvmOpcode;
use crate::spec::sqe::{Psdt, Sqe};
use crate::spec::status::Status;

/// Most bytes of a guest's command (MDTS of a guest controller).
pub(super) const PARENT_BYTES_MAX: u64 = 1 << 20;

/// Bytes of data that a command transfers from or to the guest's memory, as far as they can be
/// more than one page; 0 for other commands.
#[inline]
pub(super) fn data_len(sqe: &Sqe, lba_shift: u8) -> u64 {
    match NvmOpcode(sqe.opcode()) {
        NvmOpcode::READ | NvmOpcode::WRITE | NvmOpcode::COMPARE => {
            // The three have NLB in the same place (NVM 1.0, section 3.2).
            (u64::from(sqe.cdw12 & 0xFFFF) + 1) << lba_shift
        }
        _ => 0,
    }
}

/// How far a command that was split has come.
#[derive(Clone, Copy, Debug, Default)]
struct Progress {
    children: u16,
    /// Children that the drive has had.
    dispatched: u16,
    in_flight: u16,
    /// The first child, in the order of LBAs, that failed, and how.
    failure: Option<(u16, Status)>,
}

/// A member's commands that were split, by slot.
#[derive(Debug)]
pub(super) struct Splits {
    /// Most bytes of a child, a multiple of the page size.
    child_bytes: u64,
    lba_shift: u8,
    children_max: usize,
    progress: Box<[Progress]>,
    /// Data Pointers of the children: `children_max` per slot.
    pointers: Box<[[u64; 2]]>,
}

impl Splits {
    /// Room for `slots` commands of which the drive takes `child_bytes` at once: two pages at least,
    /// as MDTS is at least 1 (Base 2.0, Figure 275).
    pub(super) fn new(slots: u16, child_bytes: u64, lba_shift: u8) -> Self {
        let child_bytes = (child_bytes & !(PAGE_SIZE - 1)).max(2 * PAGE_SIZE);
        let children_max = PARENT_BYTES_MAX.div_ceil(child_bytes) as usize;
        let slots = usize::from(slots);
        Self {
            child_bytes,
            lba_shift,
            children_max,
            progress: vec![Progress::default(); slots].into_boxed_slice(),
            pointers: vec![[0; 2]; slots * children_max].into_boxed_slice(),
        }
    }

    /// Most bytes of a child.
    pub(super) fn child_bytes(&self) -> u64 {
        self.child_bytes
    }

    /// Prepares a command that transfers `len` bytes, more than a child can: all that must be known
    /// of the parent's PRP list is read now.
    pub(super) fn prepare(
        &mut self,
        sqe: &Sqe,
        len: u64,
        memory: HostMemory<'_>,
    ) -> Result<(), Status> {
        // SGLs are not offered on such a drive.
        if sqe.cdw0.psdt() != Psdt::PRP || len > PARENT_BYTES_MAX {
            return Err(Status::INTERNAL_ERROR);
        }
        let slot = usize::from(sqe.cid().0);
        let children = len.div_ceil(self.child_bytes) as usize;
        let [prp1, list] = sqe.dptr;
        let offset = prp1 % PAGE_SIZE;
        // More than two pages, as a child has two at least: PRP2 points to a list.
        let entries = (offset + len).div_ceil(PAGE_SIZE) as usize - 1;
        let words = memory
            .lists
            .resolve(list, 8 * entries)
            .and_then(|list| list.words())
            .ok_or(Status::INTERNAL_ERROR)?;
        let pointers = self
            .pointers
            .get_mut(slot * self.children_max..)
            .and_then(|pointers| pointers.get_mut(..children))
            .ok_or(Status::INTERNAL_ERROR)?;
        let pages_per_child = (self.child_bytes / PAGE_SIZE) as usize;
        for (child, pointer) in pointers.iter_mut().enumerate() {
            // Its first page is as many pages after its parent's; entry 0 is that of page 1.
            let page = child * pages_per_child;
            let first = match page {
                0 => prp1,
                page => words.read(page - 1) + offset,
            };
            let child_len = (len - child as u64 * self.child_bytes).min(self.child_bytes);
            let rest = child_len.saturating_sub(PAGE_SIZE - offset);
            let second = if rest == 0 {
                0
            } else if rest <= PAGE_SIZE {
                words.read(page)
            } else {
                list + 8 * page as u64
            };
            *pointer = [first, second];
        }
        self.progress[slot] = Progress {
            children: children as u16,
            ..Progress::default()
        };
        Ok(())
    }

    /// Bytes of the child that is dispatched next, of a parent that transfers `len` bytes.
    pub(super) fn next_len(&self, slot: u16, len: u64) -> u64 {
        let child = u64::from(self.progress[usize::from(slot)].dispatched);
        len.saturating_sub(child * self.child_bytes)
            .min(self.child_bytes)
    }

    /// The next child of a command that transfers `len` bytes, its number, and whether it is the
    /// last one.
    pub(super) fn dispatch(&mut self, parent: &Sqe, len: u64) -> (Sqe, u16, bool) {
        let slot = usize::from(parent.cid().0);
        let child_len = self.next_len(parent.cid().0, len);
        let progress = &mut self.progress[slot];
        let child = progress.dispatched;
        progress.dispatched += 1;
        progress.in_flight += 1;
        let blocks_before = (u64::from(child) * self.child_bytes) >> self.lba_shift;
        let blocks = child_len >> self.lba_shift;
        let mut sqe = *parent;
        sqe.set_cdw10_11(ReadWrite::from(parent).slba.0 + blocks_before);
        sqe.cdw12 = (parent.cdw12 & !0xFFFF) | (blocks as u32 - 1);
        sqe.dptr = self.pointers[slot * self.children_max + usize::from(child)];
        (sqe, child, progress.dispatched == progress.children)
    }

    /// A child has completed. After a failure no more are dispatched.
    pub(super) fn complete(&mut self, slot: u16, child: u16, status: Status) -> Joined {
        let progress = &mut self.progress[usize::from(slot)];
        progress.in_flight -= 1;
        let earlier = progress.failure.is_none_or(|(first, _)| child < first);
        if !status.is_success() && earlier {
            progress.failure = Some((child, status));
        }
        let cut_short = progress.failure.is_some() && progress.dispatched < progress.children;
        if cut_short {
            progress.children = progress.dispatched;
        }
        let is_done = progress.in_flight == 0 && progress.dispatched == progress.children;
        let status = progress
            .failure
            .map_or(Status::SUCCESS, |(_, status)| status);
        Joined {
            cut_short,
            completion: is_done.then_some(HostCompletion {
                slot,
                status,
                dw0: 0,
            }),
        }
    }
}

/// What becomes of a parent when a child has completed.
#[derive(Debug)]
pub(super) struct Joined {
    /// Its other children are not dispatched any more.
    pub(super) cut_short: bool,
    /// It has completed.
    pub(super) completion: Option<HostCompletion>,
}
