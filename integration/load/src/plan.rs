//! Choice of the next command of a queue.

use nvme_mpt_tests::command::{DSM_DEALLOCATE, dsm_range, io};
use nvme_mpt_tests::memory::DmaBuffer;
use nvme_mpt_tests::rng::Rng;

use super::LoadError;
use super::options::AccessPattern;
use super::target::LoadTarget;

/// Those fields of a command that the plan chooses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NextCommand {
    pub(super) opcode: u8,
    pub(super) slba: u64,
}

/// Data buffer of a slot.
#[derive(Clone, Copy, Debug)]
pub(super) struct SlotData<'a> {
    pub(super) slot: usize,
    pub(super) buffer: &'a DmaBuffer,
    pub(super) offset: usize,
}

/// Source of commands for one queue.
pub(super) trait CommandPlan: Send {
    /// Returns the next command, with `data` as its data; `None` at the end of the plan.
    fn next(&mut self, data: SlotData<'_>) -> Option<NextCommand>;

    /// Handles the successful completion of the command whose slot has this data.
    fn on_completion(&mut self, data: SlotData<'_>) -> Result<(), LoadError>;
}

/// Endless reads and writes, or endless deallocations. The data is not checked.
#[derive(Clone, Debug)]
pub(super) struct MixedPlan {
    rng: Rng,
    pattern: AccessPattern,
    /// Bound for reads: a command is a read if the low 32 bits of a random number are below this.
    reads_below: u64,
    /// First block, number of positions of commands, and number of blocks of each command.
    first: u64,
    positions: u64,
    blocks: u64,
    place: u64,
    /// Number of blocks that each command deallocates; `None` for reads and writes.
    deallocates: Option<u32>,
}

impl MixedPlan {
    /// Creates the plan of queue `index` of `queues`.
    pub(super) fn new(
        target: &LoadTarget,
        index: u64,
        queues: u64,
        pattern: AccessPattern,
        read_percent: u8,
        seed: u64,
    ) -> Self {
        let (first, places) = match pattern {
            AccessPattern::Random => (0, target.positions),
            AccessPattern::Sequential => target.part(index, queues),
        };
        Self {
            rng: Rng::new(seed ^ index << 32),
            pattern,
            reads_below: (u64::from(read_percent) << 32) / 100,
            first,
            positions: places,
            blocks: u64::from(target.blocks_per_command),
            place: 0,
            deallocates: None,
        }
    }

    /// Makes commands deallocate `blocks` blocks each.
    pub(super) fn with_deallocation(self, blocks: u32) -> Self {
        Self {
            deallocates: Some(blocks),
            ..self
        }
    }
}

impl CommandPlan for MixedPlan {
    #[inline]
    fn next(&mut self, data: SlotData<'_>) -> Option<NextCommand> {
        let number = self.rng.next_u64();
        let place = match self.pattern {
            AccessPattern::Random => {
                ((u128::from(number) * u128::from(self.positions)) >> 64) as u64
            }
            AccessPattern::Sequential => {
                let place = self.place;
                self.place = if place + 1 == self.positions {
                    0
                } else {
                    place + 1
                };
                place
            }
        };
        let slba = (self.first + place) * self.blocks;
        if let Some(blocks) = self.deallocates {
            data.buffer.write(data.offset, &dsm_range(slba, blocks));
            // Dataset Management has the number of ranges and the bit AD in the dwords of SLBA.
            return Some(NextCommand {
                opcode: io::DATASET_MANAGEMENT,
                slba: u64::from(DSM_DEALLOCATE) << 32,
            });
        }
        let read = number & 0xffff_ffff < self.reads_below;
        Some(NextCommand {
            opcode: if read { io::READ } else { io::WRITE },
            slba,
        })
    }

    #[inline]
    fn on_completion(&mut self, _: SlotData<'_>) -> Result<(), LoadError> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use nvme_mpt_tests::command::Sqe;
    use nvme_mpt_tests::memory::GuestMemory;

    use super::*;

    fn take(plan: &mut MixedPlan, n: usize) -> Vec<NextCommand> {
        let memory = GuestMemory::new(&[(0, 4096)]).unwrap();
        let buffer = memory.alloc(4096).unwrap();
        let data = SlotData {
            slot: 0,
            buffer: &buffer,
            offset: 0,
        };
        (0..n).map(|_| plan.next(data).unwrap()).collect()
    }

    #[test]
    fn the_mix_is_as_asked_and_within_the_range() {
        let target = LoadTarget::from_positions(100, 8);
        for percent in [0, 30, 100] {
            let mut plan = MixedPlan::new(&target, 0, 1, AccessPattern::Random, percent, 1);
            let commands = take(&mut plan, 10_000);
            let reads = commands.iter().filter(|c| c.opcode == io::READ).count() as i64;
            let off = (reads - i64::from(percent) * 100).abs();
            assert!(
                off < if percent == 30 { 300 } else { 1 },
                "{percent}: {reads}"
            );
            assert!(commands.iter().all(|c| c.slba % 8 == 0 && c.slba / 8 < 100));
            let places: std::collections::HashSet<_> = commands.iter().map(|c| c.slba).collect();
            assert_eq!(places.len(), 100);
        }
    }

    #[test]
    fn a_range_to_deallocate_is_the_data() {
        let memory = GuestMemory::new(&[(0, 4096)]).unwrap();
        let buffer = memory.alloc(4096).unwrap();
        let data = SlotData {
            slot: 0,
            buffer: &buffer,
            offset: 512,
        };
        let target = LoadTarget::from_positions(10, 8);
        let plan = MixedPlan::new(&target, 1, 2, AccessPattern::Sequential, 100, 1);
        let next = plan.with_deallocation(8).next(data).unwrap();
        let sqe = Sqe::deallocate(1, 1).with_slba(next.slba);
        assert_eq!(next.opcode, sqe.opcode());
        assert_eq!(sqe, Sqe::deallocate(1, 1));
        let mut range = [0; 16];
        buffer.read(512, &mut range);
        assert_eq!(range, dsm_range(40, 8));
    }

    #[test]
    fn sequential_queues_share_the_range_without_meeting() {
        let target = LoadTarget::from_positions(10, 8);
        let mut seen = Vec::new();
        for queue in 0..3 {
            let mut plan = MixedPlan::new(&target, queue, 3, AccessPattern::Sequential, 100, 1);
            let commands = take(&mut plan, 4);
            assert_eq!(commands[1].slba, commands[0].slba + 8);
            // The part has three positions. So the fourth command is at the first position again.
            assert_eq!(commands[3].slba, commands[0].slba);
            seen.extend(commands[..3].iter().map(|c| c.slba / 8));
        }
        assert_eq!(seen, [0, 1, 2, 3, 4, 5, 6, 7, 8]);
    }
}
