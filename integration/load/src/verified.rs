//! Verified load. Each position of the range has a generation, which a write increments. A read must return the generation
//! that was last completed.

use nvme_mpt_tests::command::io;
use nvme_mpt_tests::rng::{self, Rng};

use super::LoadError;
use super::lane::{Lane, NEVER, PassLimits};
use super::options::{AccessPattern, LoadOptions};
use super::pass::{measured_limits, pass};
use super::plan::{CommandPlan, NextCommand, SlotData};
use super::target::LoadTarget;

/// Writes the whole part of each lane, runs the mix of reads and writes, and then reads the whole part.
pub(super) fn run(
    lanes: &mut [Lane],
    indices: &[u64],
    queues: u64,
    target: &LoadTarget,
    options: &LoadOptions,
) -> Result<(), LoadError> {
    let mut areas: Vec<VerifiedArea> = indices
        .iter()
        .map(|&index| VerifiedArea::new(target, index, queues, options))
        .collect();
    let unmeasured = PassLimits {
        measure_from: NEVER,
        ..PassLimits::for_whole_plan(u32::from(options.batch))
    };
    pass(lanes, &mut areas, unmeasured, options)?;
    for area in &mut areas {
        area.phase = VerificationPhase::Mix;
        area.place = 0;
    }
    pass(lanes, &mut areas, measured_limits(target, options), options)?;
    for area in &mut areas {
        area.phase = VerificationPhase::Check;
        area.place = 0;
    }
    pass(lanes, &mut areas, unmeasured, options)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum VerificationPhase {
    Fill,
    Mix,
    Check,
}

/// In-flight command of a slot.
#[derive(Clone, Copy, Debug)]
struct PendingCommand {
    place: u64,
    generation: u32,
    read: bool,
}

/// Part of the range that one lane uses.
#[derive(Debug)]
struct VerifiedArea {
    phase: VerificationPhase,
    pattern: AccessPattern,
    rng: Rng,
    reads_below: u64,
    seed: u64,
    first: u64,
    blocks: u64,
    block_size: usize,
    place: u64,
    /// Generation of each position that was last completed.
    generations: Vec<u32>,
    /// For each position, true while a command is in flight there. There is at most one, since a read during a write may
    /// return old or new data.
    busy: Vec<bool>,
    pending: Vec<Option<PendingCommand>>,
    scratch: Vec<u8>,
}

impl VerifiedArea {
    fn new(target: &LoadTarget, index: u64, queues: u64, options: &LoadOptions) -> Self {
        let (first, places) = target.part(index, queues);
        Self {
            phase: VerificationPhase::Fill,
            pattern: options.pattern,
            rng: Rng::new(options.seed ^ index << 32),
            reads_below: (u64::from(options.mix) << 32) / 100,
            seed: options.seed,
            first,
            blocks: u64::from(target.blocks_per_command),
            block_size: target.block_size,
            place: 0,
            generations: vec![0; places as usize],
            busy: vec![false; places as usize],
            pending: vec![None; usize::from(options.depth())],
            scratch: vec![0; target.blocks_per_command as usize * target.block_size],
        }
    }

    fn slba(&self, place: u64) -> u64 {
        (self.first + place) * self.blocks
    }

    fn tag(&self, generation: u32) -> u64 {
        self.seed << 32 ^ u64::from(generation)
    }

    /// Returns the next position, and true if it is to be read; `None` at the end of the phase.
    fn choose(&mut self) -> Option<(u64, bool)> {
        let places = self.generations.len() as u64;
        if self.phase != VerificationPhase::Mix {
            let place = self.place;
            self.place += 1;
            return (place < places).then_some((place, self.phase == VerificationPhase::Check));
        }
        let number = self.rng.next_u64();
        let start = match self.pattern {
            AccessPattern::Random => ((u128::from(number) * u128::from(places)) >> 64) as u64,
            AccessPattern::Sequential => {
                self.place += 1;
                (self.place - 1) % places
            }
        };
        let place = (start..places)
            .chain(0..start)
            .find(|&place| !self.busy[place as usize])?;
        Some((place, number & 0xffff_ffff < self.reads_below))
    }
}

impl CommandPlan for VerifiedArea {
    fn next(&mut self, data: SlotData<'_>) -> Option<NextCommand> {
        let (place, read) = self.choose()?;
        let slba = self.slba(place);
        let mut generation = self.generations[place as usize];
        if !read {
            generation += 1;
            let tag = self.tag(generation);
            rng::fill_blocks(&mut self.scratch, tag, slba, self.block_size);
            data.buffer.write(data.offset, &self.scratch);
        }
        self.busy[place as usize] = true;
        self.pending[data.slot] = Some(PendingCommand {
            place,
            generation,
            read,
        });
        Some(NextCommand {
            opcode: if read { io::READ } else { io::WRITE },
            slba,
        })
    }

    fn on_completion(&mut self, data: SlotData<'_>) -> Result<(), LoadError> {
        let Some(pending) = self.pending[data.slot].take() else {
            return Ok(());
        };
        self.busy[pending.place as usize] = false;
        if !pending.read {
            self.generations[pending.place as usize] = pending.generation;
            return Ok(());
        }
        data.buffer.read(data.offset, &mut self.scratch);
        let tag = self.tag(pending.generation);
        let slba = self.slba(pending.place);
        for (lba, block) in (slba..).zip(self.scratch.chunks(self.block_size)) {
            let (words, _) = block.as_chunks::<8>();
            let expected = rng::block_words(tag, lba);
            if words
                .iter()
                .zip(expected)
                .any(|(word, want)| *word != want.to_le_bytes())
            {
                return Err(LoadError::Corrupt {
                    lba,
                    generation: pending.generation,
                });
            }
        }
        Ok(())
    }
}
