//! The namespace under load.

use nvme_mpt_tests::doorbell::DoorbellMode;

/// The namespace under load, and the size and positions of commands on it.
#[derive(Clone, Debug)]
pub(super) struct LoadTarget {
    pub(super) model: String,
    pub(super) capacity: u64,
    pub(super) block_size: usize,
    pub(super) blocks_per_command: u32,
    /// Number of positions of commands in the range. Commands at different positions do not overlap.
    pub(super) positions: u64,
    pub(super) doorbells: DoorbellMode,
    pub(super) ticks_per_second: f64,
}

impl LoadTarget {
    pub(super) fn ticks(&self, seconds: f64) -> u64 {
        (seconds * self.ticks_per_second) as u64
    }

    /// Returns the positions of queue `index` of `queues`: the first position, and the number of positions.
    pub(super) fn part(&self, index: u64, queues: u64) -> (u64, u64) {
        let places = self.positions / queues;
        (index * places, places)
    }

    #[cfg(test)]
    pub(super) fn from_positions(places: u64, blocks_per_command: u32) -> Self {
        Self {
            model: String::new(),
            capacity: 0,
            block_size: 512,
            blocks_per_command,
            positions: places,
            doorbells: DoorbellMode::Trap,
            ticks_per_second: 1e9,
        }
    }
}
