//! Model of blocks as registers. From the guest's writes, it derives the values that a read may return.
//!
//! A write takes effect at some time between its submission and its completion. A failed or interrupted write takes effect
//! at such a time, or never. A read returns the contents at one time between its own submission and completion.

use std::time::Duration;

/// Size of a logical block in bytes.
pub(crate) const BLOCK: usize = 512;

/// Number of writes that are remembered for each block, if there are many blocks.
const KEPT_WRITES: usize = 24;

/// A write of a value to a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Write {
    value: u64,
    began: Duration,
    /// `None` while the write is in flight.
    ended: Option<Duration>,
    /// True if the write has certainly taken effect.
    sure: bool,
}

/// Writes to the blocks of a guest.
#[derive(Debug)]
pub(crate) struct History {
    guest: u64,
    writes: u64,
    /// Number of writes that are remembered for each block.
    kept_writes: usize,
    /// Time before which no write is certain to have taken effect.
    uncertain_before: Duration,
    blocks: Vec<Vec<Write>>,
}

impl History {
    /// Creates a history of `blocks` blocks that are all zeroes.
    pub(crate) fn new(guest: u64, blocks: usize) -> Self {
        let zeroes = Write {
            value: 0,
            began: Duration::ZERO,
            ended: Some(Duration::ZERO),
            sure: true,
        };
        Self {
            guest,
            writes: 0,
            kept_writes: KEPT_WRITES,
            uncertain_before: Duration::ZERO,
            blocks: vec![vec![zeroes]; blocks],
        }
    }

    /// Makes the history remember all writes. With few blocks, one block may be written many times during one read.
    pub(crate) fn keep_all_writes(self) -> Self {
        Self {
            kept_writes: usize::MAX,
            ..self
        }
    }

    /// Returns the number of blocks.
    pub(crate) fn blocks(&self) -> u64 {
        self.blocks.len() as u64
    }

    /// Returns a value for a write to the block that no other write has.
    pub(crate) fn value(&mut self, block: u64) -> u64 {
        self.writes += 1;
        (self.guest + 1) << 56 | block << 36 | self.writes
    }

    /// Records the start of a write.
    pub(crate) fn begin(&mut self, block: u64, value: u64, now: Duration) {
        self.blocks[block as usize].push(Write {
            value,
            began: now,
            ended: None,
            sure: false,
        });
    }

    /// Records the end of the write that began at `began`. `sure` is true if it has certainly taken effect.
    pub(crate) fn end(&mut self, block: u64, began: Duration, now: Duration, sure: bool) {
        let sure = sure && began >= self.uncertain_before;
        let writes = &mut self.blocks[block as usize];
        if let Some(write) = writes
            .iter_mut()
            .find(|write| write.began == began && write.ended.is_none())
        {
            (write.ended, write.sure) = (Some(now), sure);
        }
        if writes.len() > self.kept_writes {
            // Forgets writes that were overwritten long ago: no read lasts for that many writes.
            let sure = writes.iter().rev().filter(|write| write.sure).nth(8);
            if let Some(&last) = sure {
                writes.retain(|write| write.ended.is_none_or(|ended| ended >= last.began));
            }
        }
    }

    /// Removes a rejected write, which never takes effect.
    pub(crate) fn forget(&mut self, block: u64, value: u64, began: Duration) {
        let writes = &mut self.blocks[block as usize];
        let write = writes.iter().position(|write| {
            write.value == value && write.began == began && write.ended.is_none()
        });
        if let Some(index) = write {
            writes.remove(index);
        }
    }

    /// Ends all writes in flight: each has taken effect before `now`, or never will.
    pub(crate) fn end_all(&mut self, now: Duration) {
        let under_way = self.blocks.iter_mut().flatten();
        for write in under_way.filter(|write| write.ended.is_none()) {
            write.ended = Some(now);
        }
    }

    /// Marks all writes that began before `moment` as uncertain.
    pub(crate) fn mark_uncertain(&mut self, moment: Duration) {
        if moment <= self.uncertain_before {
            return;
        }
        self.uncertain_before = moment;
        let writes = self.blocks.iter_mut().flatten();
        for write in writes.filter(|write| write.began < moment) {
            write.sure = false;
        }
    }

    /// Replaces the history: at the time `now`, the blocks have exactly these values.
    pub(crate) fn reset_to(&mut self, values: &[u64], now: Duration) {
        for (writes, value) in self.blocks.iter_mut().zip(values) {
            *writes = vec![Write {
                value: *value,
                began: now,
                ended: Some(now),
                sure: true,
            }];
        }
    }

    /// Returns whether a read that began at `began` may return a value for which `such` is true.
    pub(crate) fn may_return(
        &self,
        block: u64,
        began: Duration,
        such: impl Fn(u64) -> bool,
    ) -> bool {
        let values = self.blocks[block as usize].iter().map(|write| write.value);
        values
            .filter(|value| such(*value))
            .any(|value| self.judge(block, value, began).is_ok())
    }

    /// Checks that a value was written by a write that began at `began` or later.
    ///
    /// # Errors
    /// Description of the mistake.
    pub(crate) fn judge_since(
        &self,
        block: u64,
        value: u64,
        began: Duration,
    ) -> Result<(), String> {
        let writes = &self.blocks[block as usize];
        let mut such = writes.iter().filter(|write| write.value == value);
        match such.any(|write| write.ended.is_none_or(|ended| ended >= began)) {
            true => Ok(()),
            false => Err(format!(
                "block {block} has {value:#x}, which is older than the write of {began:?}: {writes:?}"
            )),
        }
    }

    /// Checks the value that a read returned for a block. The read began at `began`.
    ///
    /// # Errors
    /// Description of the mistake.
    pub(crate) fn judge(&self, block: u64, value: u64, began: Duration) -> Result<(), String> {
        let writes = &self.blocks[block as usize];
        let over = |write: &Write| {
            let ended = write.ended?;
            writes.iter().find(|other| {
                other.sure
                    && other.value != value
                    && other.began > ended
                    && other.ended.is_some_and(|ended| ended < began)
            })
        };
        // Zeroes are written repeatedly, so the value does not identify one write.
        let mut last = None;
        for write in writes.iter().filter(|write| write.value == value) {
            match over(write) {
                None => return Ok(()),
                Some(over) => last = Some((write, over)),
            }
        }
        let guest = self.guest;
        Err(match last {
            None => format!(
                "block {block} has {value:#x}, which guest {guest} never wrote there: {writes:?}"
            ),
            Some((write, over)) => format!(
                "block {block} has {value:#x} of {write:?}, over which {over:?} was written before the read of \
                 {began:?}: {writes:?}"
            ),
        })
    }
}
