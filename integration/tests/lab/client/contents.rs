//! Expected contents of the blocks of a client's range.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use nvme_mpt_tests::rng;

use super::ClientWork;
use crate::fixture::{Failure, expect, with_path};

/// Writes that a place may hold: the last completed write, and later writes whose outcome is unknown. A drive that disappears
/// may have executed a failed write.
#[derive(Clone, Copy, Debug, Default)]
struct WrittenPlace {
    completed: u64,
    last: u64,
}

/// Contents of all places of a range. Each write of a place has its own generation.
#[derive(Clone, Debug)]
pub(crate) struct Contents {
    seed: u64,
    bytes: usize,
    block_size: usize,
    places: Vec<WrittenPlace>,
    /// Last generation that was started in each place. Generations are not reused.
    started: Vec<u64>,
}

impl Contents {
    pub(super) fn new(work: &ClientWork, block_size: usize) -> Self {
        Self {
            seed: work.seed,
            bytes: work.bytes,
            block_size,
            places: vec![WrittenPlace::default(); work.places],
            started: vec![0; work.places],
        }
    }

    pub(super) fn places(&self) -> usize {
        self.places.len()
    }

    pub(super) fn blocks(&self) -> u32 {
        (self.bytes / self.block_size) as u32
    }

    /// Returns the first block of a place.
    pub(super) fn slba(&self, place: usize) -> u64 {
        place as u64 * u64::from(self.blocks())
    }

    /// Starts the next generation of a place.
    pub(super) fn start_write(&mut self, place: usize) -> u64 {
        self.started[place] += 1;
        self.started[place]
    }

    /// Returns the data of a generation.
    pub(super) fn data(&self, place: usize, generation: u64) -> Vec<u8> {
        let mut bytes = vec![0; self.bytes];
        let tag = self.seed << 32 ^ generation;
        rng::fill_blocks(&mut bytes, tag, self.slba(place), self.block_size);
        bytes
    }

    pub(super) fn record_write(&mut self, place: usize, generation: u64) {
        self.places[place] = WrittenPlace {
            completed: generation,
            last: generation,
        };
    }

    /// Records a write whose outcome is unknown.
    pub(super) fn record_uncertain_write(&mut self, place: usize, generation: u64) {
        self.places[place].last = generation;
    }

    /// Checks the data of a place block by block, because a write of unknown outcome may have stopped in the middle.
    pub(super) fn check(&self, place: usize, read: &[u8]) -> Result<(), Failure> {
        let WrittenPlace { completed, last } = self.places[place];
        let allowed: Vec<Vec<u8>> = (completed..=last)
            .map(|generation| match generation {
                // Before the first write, any data is allowed.
                0 => read.to_vec(),
                generation => self.data(place, generation),
            })
            .collect();
        let size = self.block_size;
        let wrong = read.chunks(size).enumerate().find(|(index, block)| {
            let at = index * size;
            !allowed.iter().any(|bytes| bytes[at..at + size] == **block)
        });
        expect(wrong.is_none(), || {
            let block = self.slba(place) + wrong.map_or(0, |(index, _)| index as u64);
            format!("Block {block} holds none of the writes {completed} to {last} of its place")
        })
    }

    /// Checks the contents on a block device of the host, from byte `start` on.
    pub(crate) fn check_device(&self, device: &Path, start: u64) -> Result<(), Failure> {
        let file = File::open(device).map_err(with_path(device))?;
        let mut read = vec![0; self.bytes];
        for place in 0..self.places.len() {
            let offset = start + (place * self.bytes) as u64;
            file.read_exact_at(&mut read, offset)
                .map_err(with_path(device))?;
            self.check(place, &read)?;
        }
        Ok(())
    }
}
