//! Model of the data in a guest's zones. From the guest's writes and resets, it derives the values that a read may return.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::time::Duration;

use super::model::Number;

/// Number of bits of a value that hold the index of the block in its command.
const BLOCK_BITS: u32 = 8;

/// Returns the value that a command writes to the block at index `nth` of its blocks.
pub(super) const fn value(number: Number, nth: u64) -> u64 {
    1 << 63 | number << BLOCK_BITS | nth
}

/// Blocks that a command has written.
#[derive(Clone, Copy, Debug)]
struct Write {
    zone: usize,
    /// Offset of the first block in the zone. `None` for a Zone Append whose location the guest does not know.
    offset: Option<u64>,
    blocks: u64,
    zeroes: bool,
    began: Duration,
    /// `None` while the write is in flight.
    ended: Option<Duration>,
    /// True if the write has certainly taken effect.
    is_sure: bool,
}

impl Write {
    /// Returns the index in this write of the block at a location; `None` if the write does not contain the block, or if
    /// the location of the write is unknown.
    fn nth(&self, zone: usize, offset: u64) -> Option<u64> {
        let nth = offset.checked_sub(self.offset?)?;
        (self.zone == zone && nth < self.blocks).then_some(nth)
    }
}

/// A reset of a zone.
#[derive(Clone, Copy, Debug)]
struct Reset {
    zone: usize,
    began: Duration,
    /// `None` while the reset is in flight.
    ended: Option<Duration>,
    /// True if the reset has certainly taken effect.
    is_sure: bool,
    /// True for an interrupted reset. It may have left old data behind the write pointer.
    is_interrupted: bool,
}

/// Data in all zones, by the commands so far.
#[derive(Debug)]
pub(super) struct Data {
    writes: BTreeMap<Number, Write>,
    resets: BTreeMap<(Number, usize), Reset>,
    /// True if an interrupted reset may leave data behind the write pointer, because the process dies.
    leaves_data: bool,
}

impl Data {
    /// Creates the data of zones that are all zeroes.
    pub(super) const fn new(leaves_data: bool) -> Self {
        Self {
            writes: BTreeMap::new(),
            resets: BTreeMap::new(),
            leaves_data,
        }
    }

    /// Records the start of a write.
    pub(super) fn begin_write(
        &mut self,
        number: Number,
        zone: usize,
        offset: Option<u64>,
        (blocks, zeroes): (u64, bool),
        now: Duration,
    ) {
        let write = Write {
            zone,
            offset,
            blocks,
            zeroes,
            began: now,
            ended: None,
            is_sure: false,
        };
        self.writes.insert(number, write);
    }

    /// Records the success of a write at `offset`.
    pub(super) fn write_succeeded(&mut self, number: Number, offset: u64, now: Duration) {
        if let Some(write) = self.writes.get_mut(&number) {
            (write.offset, write.ended, write.is_sure) = (Some(offset), Some(now), true);
        }
    }

    /// Removes a failed write, which has written nothing.
    pub(super) fn write_failed(&mut self, number: Number) {
        self.writes.remove(&number);
    }

    /// Ends an interrupted write or reset: it has taken effect before `now`, or never will.
    pub(super) fn command_interrupted(&mut self, number: Number, now: Duration) {
        if let Some(write) = self.writes.get_mut(&number) {
            write.ended = Some(now);
        }
        self.end_reset(number, now, false);
        for (_, reset) in self.resets.range_mut(parts(number)) {
            reset.is_interrupted = true;
        }
    }

    /// Records the start of a reset.
    pub(super) fn begin_reset(
        &mut self,
        number: Number,
        zones: impl Iterator<Item = usize>,
        now: Duration,
    ) {
        for zone in zones {
            let reset = Reset {
                zone,
                began: now,
                ended: None,
                is_sure: false,
                is_interrupted: false,
            };
            self.resets.insert((number, zone), reset);
        }
    }

    /// Records the end of a reset. `is_sure` is true if it has certainly taken effect.
    pub(super) fn end_reset(&mut self, number: Number, now: Duration, is_sure: bool) {
        for (_, reset) in self.resets.range_mut(parts(number)) {
            (reset.ended, reset.is_sure) = (Some(now), is_sure);
        }
    }

    /// Removes a failed reset, which has changed nothing.
    pub(super) fn reset_failed(&mut self, number: Number) {
        self.resets.retain(|(other, _), _| *other != number);
    }

    /// Checks the value that a read returned for a block. The read began at `began`. `is_written` is true if the block now
    /// lies below the write pointer.
    ///
    /// # Panics
    /// The block cannot have had this value during the read.
    pub(super) fn judge(
        &self,
        (zone, offset): (usize, u64),
        is_written: bool,
        found: u64,
        began: Duration,
    ) {
        let settled = self.possible_values(zone, offset, is_written, began);
        assert!(
            settled.is_none_or(|values| values.contains(&found)),
            "block {offset} of zone {zone} has {found:#x}, and was written by one of {:?}",
            self.writes
                .values()
                .filter(|write| write.nth(zone, offset).is_some())
                .collect::<Vec<_>>()
        );
        if found == 0 {
            return;
        }
        let (number, nth) = (
            (found & !(1 << 63)) >> BLOCK_BITS,
            found & ((1 << BLOCK_BITS) - 1),
        );
        let write = self.writes.get(&number);
        let write = write.filter(|write| {
            let is_there = write.offset.is_none() || write.nth(zone, offset) == Some(nth);
            found == value(number, nth) && write.zone == zone && is_there && !write.zeroes
        });
        let Some(write) = write else {
            panic!("block {offset} of zone {zone} has {found:#x}, which was never written there");
        };
        let over = self
            .later_reset(write)
            .filter(|reset| is_before(reset.ended, began));
        let mut cut = self.resets.values().filter(|reset| reset.is_interrupted);
        let leaves_data = self.leaves_data
            || cut.any(|reset| reset.zone == zone && !is_before(reset.ended, write.began));
        assert!(
            leaves_data || over.is_none(),
            "block {offset} of zone {zone} has {found:#x} of {write:?} after {over:?}"
        );
    }

    /// Returns the values that a block may have had since the start of a read; `None` if it may have had any other value,
    /// too.
    fn possible_values(
        &self,
        zone: usize,
        offset: u64,
        is_written: bool,
        began: Duration,
    ) -> Option<Vec<u64>> {
        let resets = || self.resets.values().filter(|reset| reset.zone == zone);
        let all = self.writes.iter().filter(|(_, write)| write.zone == zone);
        let (mut values, mut is_certain, mut is_doubtful) = (Vec::new(), false, false);
        for (number, write) in all.filter(|(_, write)| self.later_reset(write).is_none()) {
            let nth = write.nth(zone, offset);
            if write.is_sure && is_before(write.ended, began) {
                if let Some(nth) = nth {
                    let value = value(*number, nth);
                    values.push(if write.zeroes { 0 } else { value });
                    // No reset can have removed the data of this write.
                    is_certain |= resets().all(|reset| is_before(reset.ended, write.began));
                }
            } else {
                is_doubtful |= nth.is_some() || write.offset.is_none();
            }
        }
        let is_quiet = resets().all(|reset| is_before(reset.ended, began));
        let is_settled = is_written && is_quiet && !is_doubtful;
        (is_certain || is_settled).then_some(values)
    }

    /// Returns a reset that certainly followed a write.
    fn later_reset(&self, write: &Write) -> Option<&Reset> {
        self.resets.values().find(|reset| {
            reset.zone == write.zone && reset.is_sure && is_before(write.ended, reset.began)
        })
    }
}

/// Returns the range of keys for the zones of a reset.
const fn parts(number: Number) -> RangeInclusive<(Number, usize)> {
    (number, 0)..=(number, usize::MAX)
}

/// Returns whether a command ended before `moment`.
fn is_before(ended: Option<Duration>, moment: Duration) -> bool {
    ended.is_some_and(|ended| ended < moment)
}
