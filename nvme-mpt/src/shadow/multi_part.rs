//! Execution in parts, for commands whose blocks lie in several extents of the host's namespace or exceed the host controller's
//! limits for one command.
//!
//! Such a command is translated as a whole with the LBAs of the lease, and keeps its slot. Its parts go to the host controller
//! one after the other under the slot's number. Each part is one contiguous range of the host's namespace. The command ends
//! with the last part, or with the first part that fails. A guest that follows the reported limits (NOIOB, and the NVMe 2.0
//! limits for ranges and for commands without data) sends few such commands. Other guests are not refused, because drivers
//! older than NVMe 2.0 do not know these limits.
//!
//! Deallocation is only advice, so blocks that are not reached within `DEALLOCATE_TIMEOUT` keep their data.
//!
//! Each part with data has its own PRP list or SGL, which describes its share of the command's data; no data is copied.
//! These lists are few, so a part may wait for a free one.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::Duration;

use nvme_guest::address::PAGE_SIZE;
use nvme_mpt_memory::clock::{Ticks, ticks_in};
use nvme_spec::dma::SglDescriptor;
use nvme_spec::ids::{CommandId, Lba};
use nvme_spec::nvm::{CopyCommand, CopyRange0, DatasetManagement, DsmRange, ReadWrite};
use nvme_spec::opcode::NvmOpcode;
use nvme_spec::sqe::{Psdt, Sqe};
use nvme_spec::status::Status;
use zerocopy::{FromBytes, IntoBytes, transmute};

use super::LeasedBlocks;
use super::slot::CommandSlots;
use super::translate::{CommandTranslator, PartContext};
use crate::host::ListMemory;
use crate::host::{DataPointer, HostCompletion};

/// Number of lists that a shadow queue has for parts of commands. A list describes the data or the ranges of one part in
/// flight; a part that needs one waits until one is free.
pub(crate) const PART_LISTS: u16 = 8;

/// Time after which a Deallocate in parts starts no further part: a third of the usual command timeout of drivers (30 s).
const DEALLOCATE_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum size of the range list of a Dataset Management or Copy command, in words of 8 bytes.
const RANGE_WORDS: usize = PAGE_SIZE as usize / 8;

/// Progress of a command that is executed in parts, in blocks.
#[derive(Clone, Copy, Debug, Default)]
struct MultiPartProgress {
    total: u64,
    done: u64,
    /// Number of blocks of the part in flight.
    part: u64,
    /// Number of the list that describes the part in flight, if the part needs one.
    list: Option<u16>,
}

/// Commands of a shadow queue that are executed in parts.
#[derive(Debug)]
pub(super) struct MultiPartCommands {
    /// Progress of the commands, by slot.
    progress: Box<[MultiPartProgress]>,
    /// Slots of the commands that wait to submit their next part.
    waiting: VecDeque<u16>,
    /// Numbers of the lists for parts that are free. The numbers of the slots' own lists come before them.
    lists: Vec<u16>,
    /// Number of the queue's commands that are executed in parts.
    count: usize,
    is_cut_short: bool,
    builder: PartBuilder,
    deallocate_ticks: u64,
}

/// Next step of a command that is executed in parts.
#[derive(Debug)]
pub(super) enum MultiPartStep {
    /// The part must be submitted to the host controller.
    Submit(Sqe),
    /// The command in this slot must be completed with this status.
    Complete(u16, Status),
}

impl MultiPartCommands {
    /// Creates the state for `slots` slots. The lists for parts have the numbers after those of the slots' own lists.
    pub(super) fn new(slots: u16) -> Self {
        let count = usize::from(slots);
        Self {
            progress: vec![MultiPartProgress::default(); count].into_boxed_slice(),
            waiting: VecDeque::with_capacity(count),
            lists: (slots..slots + PART_LISTS).collect(),
            count: 0,
            is_cut_short: false,
            builder: PartBuilder::new(),
            deallocate_ticks: ticks_in(DEALLOCATE_TIMEOUT),
        }
    }

    /// Returns whether any command is being executed in parts.
    pub(super) const fn has_commands(&self) -> bool {
        self.count > 0
    }

    /// Lets commands start no further part: waiting commands end, and commands in flight end after their current part.
    pub(super) fn cut_short(&mut self) {
        self.is_cut_short = true;
    }

    /// Starts the execution of a command in parts. `whole` is the translated command that the slot has.
    #[cold]
    pub(super) fn begin(&mut self, slot: u16, whole: &Sqe, lists: &mut ListMemory) {
        let total = self.builder.total_blocks(whole, slot, lists);
        if let Some(progress) = self.progress.get_mut(usize::from(slot)) {
            *progress = MultiPartProgress {
                total,
                ..MultiPartProgress::default()
            };
        }
        self.count += 1;
        // The capacity covers all slots, and each slot is queued at most once.
        self.waiting.push_back(slot);
    }

    /// Returns the next step of the first waiting command; `None` if no command waits or no list for a part is free. If the
    /// queue has failed (`gives_up`), waiting commands complete instead of submitting their next part.
    #[cold]
    pub(super) fn next_step(
        &mut self,
        slots: &CommandSlots,
        translator: &mut CommandTranslator,
        now: Ticks,
        gives_up: bool,
    ) -> Option<MultiPartStep> {
        let number = *self.waiting.front()?;
        let ended = |status| Some(MultiPartStep::Complete(number, status));
        let (Some(whole), Some(progress)) = (
            slots.command(number),
            self.progress.get_mut(usize::from(number)),
        ) else {
            self.waiting.pop_front();
            return ended(Status::INTERNAL_ERROR);
        };
        if self.is_cut_short || gives_up {
            self.waiting.pop_front();
            return ended(Status::ABORTED_SQ_DELETION);
        }
        let is_late = NvmOpcode(whole.opcode()) == NvmOpcode::DATASET_MANAGEMENT
            && now.since(slots.taken_at(number)) > self.deallocate_ticks;
        if is_late || progress.total == 0 {
            self.waiting.pop_front();
            progress.done = progress.total;
            return ended(Status::SUCCESS);
        }
        if needs_lists(whole) {
            progress.list = Some(self.lists.pop()?);
        }
        self.waiting.pop_front();
        let place = PartPlace {
            slot: number,
            list: progress.list.unwrap_or(number),
        };
        match self
            .builder
            .build_part(whole, progress.done, place, translator)
        {
            Ok((part, blocks)) => {
                progress.part = blocks;
                Some(MultiPartStep::Submit(part))
            }
            Err(status) => ended(status),
        }
    }

    /// Handles the completion of a part in flight, or of a command that was completed without a part. Returns whether the
    /// command has parts left.
    #[cold]
    pub(super) fn handle_completion(&mut self, completion: HostCompletion) -> bool {
        let HostCompletion { slot, status, .. } = completion;
        let Some(progress) = self.progress.get_mut(usize::from(slot)) else {
            return false;
        };
        self.lists.extend(progress.list.take());
        progress.done += std::mem::take(&mut progress.part);
        let continues = status.is_success() && progress.done < progress.total;
        match continues {
            true => self.waiting.push_back(slot),
            false => self.count -= 1,
        }
        continues
    }
}

/// Returns whether each part of a command needs a list, for its data or its ranges.
fn needs_lists(whole: &Sqe) -> bool {
    matches!(
        NvmOpcode(whole.opcode()),
        NvmOpcode::READ
            | NvmOpcode::WRITE
            | NvmOpcode::COMPARE
            | NvmOpcode::DATASET_MANAGEMENT
            | NvmOpcode::COPY
    )
}

/// Slot and list that a part in flight uses at the host controller.
#[derive(Clone, Copy, Debug)]
struct PartPlace {
    slot: u16,
    /// Number of the part's list, which no other command or part uses.
    list: u16,
}

/// Builder of parts: commands for the host controller that each execute a part of a guest's command.
#[derive(Debug)]
struct PartBuilder {
    /// Contiguous pieces of a part's data, as IOVA and length.
    data_pieces: Vec<(u64, u64)>,
    /// Ranges of the whole command, copied from the list of its slot.
    ranges: Box<[u64]>,
}

impl PartBuilder {
    fn new() -> Self {
        Self {
            data_pieces: Vec::with_capacity(RANGE_WORDS),
            ranges: vec![0; RANGE_WORDS].into_boxed_slice(),
        }
    }

    /// Copies the ranges of a whole command from the list of its slot.
    fn copy_ranges<T: FromBytes + IntoBytes + zerocopy::Immutable + zerocopy::KnownLayout>(
        &mut self,
        count: usize,
        slot: u16,
        lists: &mut ListMemory,
    ) -> Result<&[T], Status> {
        let words = count * size_of::<T>() / 8;
        let ranges = self.ranges.get_mut(..words).ok_or(Status::INTERNAL_ERROR)?;
        ranges.copy_from_slice(&lists.slot_list(slot).0[..words]);
        <[T]>::ref_from_bytes(ranges.as_bytes()).map_err(|_| Status::INTERNAL_ERROR)
    }

    /// Returns the total number of blocks of a command that is executed in parts.
    fn total_blocks(&mut self, whole: &Sqe, slot: u16, lists: &mut ListMemory) -> u64 {
        match NvmOpcode(whole.opcode()) {
            NvmOpcode::DATASET_MANAGEMENT => {
                let count = usize::from(DatasetManagement::from(whole).nr_z) + 1;
                let ranges = self.copy_ranges::<DsmRange>(count, slot, lists);
                let ranges = ranges.unwrap_or_default().iter();
                ranges.map(|range| u64::from(range.nlb)).sum()
            }
            NvmOpcode::COPY => {
                let count = usize::from(CopyCommand::from(whole).nr_z) + 1;
                let ranges = self.copy_ranges::<CopyRange0>(count, slot, lists);
                let ranges = ranges.unwrap_or_default().iter();
                ranges.map(|range| u64::from(range.nlb_z) + 1).sum()
            }
            // All other commands have NLB in the same field (NVM 1.0, section 3.2).
            _ => u64::from(ReadWrite::from(whole).nlb_z) + 1,
        }
    }

    /// Builds the part of a command that follows its first `done` blocks. Returns the part and its number of blocks.
    fn build_part(
        &mut self,
        whole: &Sqe,
        done: u64,
        place: PartPlace,
        translator: &mut CommandTranslator,
    ) -> Result<(Sqe, u64), Status> {
        let means = translator.part_context();
        let mut part = *whole;
        part.cdw0 = whole.cdw0.with_cid(CommandId(place.slot));
        let cut = match NvmOpcode(whole.opcode()) {
            NvmOpcode::DATASET_MANAGEMENT => self.build_deallocate(&mut part, done, place, means),
            NvmOpcode::COPY => self.build_copy(&mut part, done, place, means),
            _ => {
                let PartContext {
                    blocks,
                    limits,
                    lists,
                } = means;
                let ReadWrite { slba, nlb_z, .. } = ReadWrite::from(whole);
                let total = u64::from(nlb_z) + 1;
                let most = match needs_lists(whole) {
                    true => u64::MAX,
                    false => (limits.no_data_bytes_max >> blocks.lba_shift()).max(1),
                };
                let left = total.saturating_sub(done).min(most);
                let (start, count) = blocks.contiguous_run(Lba(slba.0 + done), left);
                let nlb_z = count.checked_sub(1).ok_or(Status::INTERNAL_ERROR)?;
                part.set_cdw10_11(start.0);
                part.cdw12 = (whole.cdw12 & !0xFFFF) | nlb_z as u32;
                if needs_lists(whole) {
                    let shift = blocks.lba_shift();
                    let bytes = total << shift;
                    let share = done << shift..(done + count) << shift;
                    self.set_part_data(&mut part, bytes, share, place.list, lists)?;
                }
                Ok(count)
            }
        };
        cut.map(|count| (part, count))
    }

    /// Sets the Data Pointer of a part. `bytes` is the size of the whole command's data, and `share` the part's range of that
    /// data.
    fn set_part_data(
        &mut self,
        part: &mut Sqe,
        bytes: u64,
        share: Range<u64>,
        list: u16,
        lists: &mut ListMemory,
    ) -> Result<(), Status> {
        let stretches = &mut self.data_pieces;
        stretches.clear();
        let mut at = 0;
        // The walk covers all data, because the form of a Data Pointer depends on the length.
        DataPointer::from_sqe(part).for_each_iova(lists, bytes, |iova, len| {
            let (start, end) = (at.max(share.start), (at + len).min(share.end));
            if start < end {
                stretches.push((iova + (start - at), end - start));
            }
            at += len;
            Ok(())
        })?;
        let (list, iova) = lists.slot_list(list);
        let mut words = list.iter_mut();
        let mut count = 0;
        let mut add = |word| {
            count += 1;
            words
                .next()
                .map(|place| *place = word)
                .ok_or(Status::INTERNAL_ERROR)
        };
        let nothing = Status::INTERNAL_ERROR;
        if part.cdw0.psdt() == Psdt::PRP {
            let mut first = None;
            for &(start, len) in stretches.iter() {
                let mut page = start;
                while page < start + len {
                    match first {
                        None => first = Some(page),
                        Some(_) => add(page)?,
                    }
                    page = (page & !(PAGE_SIZE - 1)) + PAGE_SIZE;
                }
            }
            let second = match count {
                0 => 0,
                1 => list[0],
                _ => iova.bits(),
            };
            part.dptr = [first.ok_or(nothing)?, second];
            return Ok(());
        }
        // A command's data has less than 4 GiB.
        let block = |&(start, len): &(u64, u64)| SglDescriptor::data_block(start, len as u32);
        part.dptr = match stretches.as_slice() {
            [] => return Err(nothing),
            [only] => transmute!(block(only)),
            several => {
                for words in several.iter().map(block) {
                    let words: [u64; 2] = transmute!(words);
                    words.into_iter().try_for_each(&mut add)?;
                }
                transmute!(SglDescriptor::last_segment(iova.bits(), 8 * count))
            }
        };
        Ok(())
    }

    /// Builds a part of a Dataset Management command: as many ranges as the drive accepts in one command. The number of their
    /// blocks is within the drive's limit for one range.
    fn build_deallocate(
        &mut self,
        part: &mut Sqe,
        done: u64,
        place: PartPlace,
        means: PartContext<'_>,
    ) -> Result<u64, Status> {
        let PartContext {
            blocks,
            limits,
            lists,
        } = means;
        let command = DatasetManagement::from(&*part);
        let most = limits.dsm_ranges_max.min(256) as usize;
        let max_blocks = (limits.dsm_range_bytes_max >> blocks.lba_shift()).max(1);
        let ranges =
            self.copy_ranges::<DsmRange>(usize::from(command.nr_z) + 1, place.slot, lists)?;
        let (list, iova) = lists.slot_list(place.list);
        let ranges = ranges
            .iter()
            .map(|range| (range.slba, u64::from(range.nlb)));
        let (count, taken) = cut_ranges(
            ranges,
            done,
            most,
            max_blocks,
            blocks,
            |number, slba, run| {
                // The run is at most the range, whose length is a `u32`.
                let (cattr, nlb) = (0, run as u32);
                write_range(list, number, &DsmRange { cattr, nlb, slba })
            },
        )?;
        let nr_z = count.checked_sub(1).ok_or(Status::INTERNAL_ERROR)? as u8;
        DatasetManagement { nr_z, ..command }.write_to(part);
        part.dptr = [iova.bits(), 0];
        Ok(taken)
    }

    /// Builds a part of a Copy command, whose destination is contiguous at the host.
    fn build_copy(
        &mut self,
        part: &mut Sqe,
        done: u64,
        place: PartPlace,
        means: PartContext<'_>,
    ) -> Result<u64, Status> {
        let PartContext {
            blocks,
            limits,
            lists,
        } = means;
        let command = CopyCommand::from(&*part);
        let most = limits.copy_ranges_max.min(128) as usize;
        let ranges =
            self.copy_ranges::<CopyRange0>(usize::from(command.nr_z) + 1, place.slot, lists)?;
        let total: u64 = ranges.iter().map(|range| u64::from(range.nlb_z) + 1).sum();
        let to = Lba(command.sdlba.0 + done);
        let (sdlba, run_blocks) = blocks.contiguous_run(to, total.saturating_sub(done));
        let (list, iova) = lists.slot_list(place.list);
        let ranges = ranges
            .iter()
            .map(|range| (range.slba, u64::from(range.nlb_z) + 1));
        let (count, taken) = cut_ranges(
            ranges,
            done,
            most,
            run_blocks,
            blocks,
            |number, slba, run| {
                let nlb_z = run.checked_sub(1).ok_or(Status::INTERNAL_ERROR)? as u16;
                let piece = CopyRange0 {
                    slba,
                    nlb_z,
                    ..CopyRange0::default()
                };
                write_range(list, number, &piece)
            },
        )?;
        let nr_z = count.checked_sub(1).ok_or(Status::INTERNAL_ERROR)? as u8;
        CopyCommand {
            sdlba,
            nr_z,
            ..command
        }
        .write_to(part);
        part.dptr = [iova.bits(), 0];
        Ok(taken)
    }
}

/// Cuts the ranges of a command, without the first `done` blocks, into pieces that are contiguous in the host's namespace.
/// Passes pieces to `put`: at most `most` pieces, and at most `max_blocks` blocks in total. Returns the numbers of pieces and
/// of blocks that it has passed.
fn cut_ranges(
    ranges: impl Iterator<Item = (Lba, u64)>,
    done: u64,
    most: usize,
    max_blocks: u64,
    blocks: &LeasedBlocks,
    mut put: impl FnMut(usize, Lba, u64) -> Result<(), Status>,
) -> Result<(usize, u64), Status> {
    let (mut skip, mut taken, mut count) = (done, 0, 0);
    for (start, length) in ranges {
        let mut at = skip.min(length);
        skip -= at;
        while at < length {
            if count == most || taken == max_blocks {
                return Ok((count, taken));
            }
            let left = (length - at).min(max_blocks - taken);
            let (slba, run) = blocks.contiguous_run(Lba(start.0 + at), left);
            if run == 0 {
                return Err(Status::INTERNAL_ERROR);
            }
            put(count, slba, run)?;
            (at, taken, count) = (at + run, taken + run, count + 1);
        }
    }
    Ok((count, taken))
}

/// Writes a range into a range list, as its entry `number`.
fn write_range<T: IntoBytes + zerocopy::Immutable>(
    list: &mut [u64],
    number: usize,
    range: &T,
) -> Result<(), Status> {
    let bytes = list.as_mut_bytes().get_mut(number * size_of::<T>()..);
    let place = bytes.and_then(|bytes| bytes.get_mut(..size_of::<T>()));
    place
        .ok_or(Status::INTERNAL_ERROR)?
        .copy_from_slice(range.as_bytes());
    Ok(())
}
